"""DTensor: a convolution of sharded channels gives one part and calls it whole (torch 2.13.0)."""

import sys
import tempfile

import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F


def main(rank, store):
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x, weight = torch.randn(1, 4, 6, 6), torch.randn(4, 4, 3, 3)
    whole, wrong = F.conv2d(x, weight), False
    for of_x, of_weight in [(Replicate(), Shard(0)), (Shard(1), Shard(1))]:
        parts = distribute_tensor(x, mesh, [of_x]), distribute_tensor(weight, mesh, [of_weight])
        result = F.conv2d(*parts)
        full = result.full_tensor()
        right = full.shape == whole.shape and torch.allclose(full, whole, atol=1e-4)
        wrong |= not right
        if rank == 0:
            error = (full - whole).abs().max().item() if full.shape == whole.shape else None
            print(f"input {of_x}, weight {of_weight} -> {result.placements}, shape", end=" ")
            print(f"{tuple(full.shape)} instead of {tuple(whole.shape)}, off by {error}")
    distributed.destroy_process_group()
    sys.exit(wrong)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.spawn(main, (f"{folder}/store",), 2, join=False)
        for process in context.processes:
            process.join()
    sys.exit(any(process.exitcode for process in context.processes))
