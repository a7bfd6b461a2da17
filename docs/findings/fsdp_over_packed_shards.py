"""FSDP2 over a packed tensor-parallel weight: full_tensor() permutes its rows (torch 2.13.0)."""

import sys
import tempfile

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard


def main(rank, store):
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(8.0).view(8, 1)  # rows 0-3 are the gate, rows 4-7 the up projection
    model = nn.Linear(1, 8, bias=False)
    packed = distribute_tensor(whole, mesh["tp"], [_StridedShard(0, split_factor=2)])
    model.weight = nn.Parameter(packed)
    before = model.weight.full_tensor().flatten().tolist()
    fully_shard(model, mesh=mesh["dp"])
    after = model.weight.full_tensor().flatten().tolist()
    if rank == 0:
        print(f"tensor parallel: {before}\nand FSDP2:       {after}")
    distributed.destroy_process_group()
    sys.exit(after != before)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.spawn(main, (f"{folder}/store",), 4, join=False)
        for process in context.processes:
            process.join()
    sys.exit(any(process.exitcode for process in context.processes))
