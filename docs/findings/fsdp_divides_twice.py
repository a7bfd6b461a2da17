"""FSDP2 on a mesh of one rank divides float64 and float16 gradients twice (torch 2.13.0)."""

import sys
import tempfile

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def gradient(dtype):
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model.set_gradient_divide_factor(2.0)
    model(torch.ones(1, 1, dtype=dtype)).sum().backward()  # the gradient is 1
    return model.weight.grad.full_tensor().item()


with tempfile.NamedTemporaryFile() as store:
    distributed.init_process_group("gloo", f"file://{store.name}", rank=0, world_size=1)
    found = {dtype: gradient(dtype) for dtype in (torch.float32, torch.float64, torch.float16)}
    distributed.destroy_process_group()
for dtype, value in found.items():
    print(f"{dtype}: {value}, should be 0.5")
sys.exit(any(value != 0.5 for value in found.values()))
