"""Fused CPU attention with more values than keys reads beyond the keys (torch 2.13.0)."""

import signal
import subprocess
import sys

SCRIPT = """
import torch
from torch.nn import functional as F
query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
value = torch.randn(1, 1, {}, 8)
print(tuple(F.scaled_dot_product_attention(query, key, value).shape))
"""
wrong = False
for values in [2, 4_000_000]:
    command = [sys.executable, "-c", SCRIPT.format(values)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    wrong |= done.returncode <= 0
    if done.returncode < 0:
        told = f"the process ends by {signal.Signals(-done.returncode).name}"
    elif done.returncode == 0:
        told = f"a result of shape {done.stdout.strip()}, no exception"
    else:
        told = done.stderr.strip().splitlines()[-1]
    print(f"1 key, {values} values: {told}")
sys.exit(wrong)
