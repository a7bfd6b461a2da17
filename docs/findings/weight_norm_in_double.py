"""weight_norm in float64 on a GPU has only float32 precision (torch 2.11.0, CUDA)."""

import copy
import sys

import torch
from torch import nn

if not torch.cuda.is_available():
    print("needs a CUDA device: nothing was tried")
    sys.exit(0)
torch.manual_seed(0)
plain = nn.Conv1d(32, 64, 16).double()
worst = 0.0
for dim in (0, 2):
    on_cpu = nn.utils.parametrizations.weight_norm(copy.deepcopy(plain), dim=dim).weight
    on_gpu = nn.utils.parametrizations.weight_norm(copy.deepcopy(plain).cuda(), dim=dim).weight
    error = float((on_gpu.cpu() - on_cpu).norm() / on_cpu.norm())
    print(f"dim={dim}: float64 weights on the GPU and on the CPU differ by {error:.2g} (relative)")
    worst = max(worst, error)
sys.exit(worst > 1e-12)
