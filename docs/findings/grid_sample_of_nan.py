"""One NaN in the grid of grid_sample ends the process in the backward (torch 2.13.0, CPU)."""

import signal
import subprocess
import sys

SCRIPT = """
import math, torch
from torch.nn import functional as F
image = torch.randn(1, 1, 4, 4, requires_grad=True)
grid = torch.zeros(1, 3, 3, 2)
grid[0, 1, 1, 0] = {}
y = F.grid_sample(image, grid, padding_mode="{}", align_corners=False)
print(y[0, 0, 1, 1].item(), flush=True)
y.sum().backward()
"""
wrong = False
for mode, value in [("zeros", "math.nan"), ("border", "math.nan"), ("reflection", "math.inf")]:
    command = [sys.executable, "-c", SCRIPT.format(value, mode)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    told = signal.Signals(-done.returncode).name if done.returncode < 0 else "runs"
    wrong |= done.returncode < 0
    print(f"padding {mode}, grid {value}: forward gives {done.stdout.strip()}, backward: {told}")
sys.exit(wrong)
