"""DTensor: mean cross entropy of a sharded batch with ignored targets is off (torch 2.13.0)."""

import sys
import tempfile

import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F


def main(rank, store):
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x, target = torch.randn(4, 5), torch.tensor([0, 2, 1, -100])
    whole = F.cross_entropy(x, target).item()
    split = [distribute_tensor(part, mesh, [Shard(0)]) for part in (x, target)]
    loss = F.cross_entropy(*split)
    value = loss.full_tensor().item()
    if rank == 0:
        print(f"targets {target.tolist()}: {loss.placements} {value:.6f}, whole {whole:.6f}")
    distributed.destroy_process_group()
    sys.exit(not abs(value - whole) < 1e-4)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.spawn(main, (f"{folder}/store",), 2, join=False)
        for process in context.processes:
            process.join()
    sys.exit(any(process.exitcode for process in context.processes))
