"""The smallest fault that is caught by blocks, and as a whole; what each costs with the layers.

    PYTHONPATH=src python benchmarks/blocks_power.py [LAYERS ...]

One operator in the middle layer is scaled by 1 + delta, in quarter decades, and the smallest delta
that the native run alone catches is reported (`lift=False`): it is all that remains for a candidate
that cannot run in float64. It prints one line of JSON per dtype and number of layers.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import paritas
from paritas import VerifyConfig

WIDTH = 32
# From 0.3 down, in quarter decades.
DELTAS = [10 ** (-(2 + quarter) / 4) for quarter in range(28)]
DTYPES = (torch.bfloat16, torch.float32)


class Layer(nn.Module):
    """Attention over the sequence, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Run one layer."""
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2) / WIDTH**0.5).softmax(-1)
        x = x + weights @ v
        return x + self.scale * self.down(functional.gelu(self.up(self.second(x))))


class Model(nn.Module):
    """A stack of layers between an embedding and a head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def smallest(model: Model, tokens: Tensor, by: Any) -> float | None:
    """The smallest scaling that is caught."""
    config = VerifyConfig(raise_on_mismatch=False, verify_gradients=False, lift=False)
    caught = None
    for delta in DELTAS:
        wrong = copy.deepcopy(model)
        middle: Any = wrong.layers[len(wrong.layers) // 2]
        middle.scale = 1 + delta
        with torch.no_grad():
            verdict = paritas.verify([tokens], model, wrong, config, by=by)
        if verdict.passed:
            return caught
        caught = delta
    return caught


def main(counts: list[int]) -> None:
    """Print one line per dtype and number of layers."""
    for dtype in DTYPES:
        for layers in counts:
            torch.manual_seed(0)
            model = Model(layers).to(dtype)
            tokens = torch.randint(0, 64, (2, 16))
            found: dict[str, Any] = {"layers": layers, "dtype": str(dtype).removeprefix("torch.")}
            for by in ("whole", "blocks"):
                began = time.process_time()
                found[by] = smallest(model, tokens, by)
                found[f"{by}_cpu_seconds"] = round(time.process_time() - began, 1)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main([int(one) for one in sys.argv[1:]] or [4, 12, 24])
