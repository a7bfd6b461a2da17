"""Peak memory of a check on the CPU, by blocks and as a whole, with the number of layers.

    PYTHONPATH=src python benchmarks/blocks_memory.py [LAYERS ...]

Each measurement runs in a process of its own. The candidate shares the parameters of the reference
and computes its norms in another way, so that no value is settled by its bits. It prints one line
of JSON per number of layers; Linux only.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import paritas
from paritas import VerifyConfig

WIDTH, TOKENS = 512, 32
MIB = 1 << 20


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class OtherNorm(Norm):
    """The same, computed in float64."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        return super().forward(x.double()).to(x.dtype)


class Layer(nn.Module):
    """A gated MLP."""

    def __init__(self, norm: type[Norm]) -> None:
        super().__init__()
        self.norm = norm()
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Run one layer."""
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """A stack of layers."""

    def __init__(self, layers: int, norm: type[Norm]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(norm) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers."""
        for layer in self.layers:
            x = layer(x)
        return x


def measure(layers: int, what: str, results: Any) -> None:
    """Measure one kind of run, in a process of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(layers, Norm)
    with torch.device("meta"):
        other = Model(layers, OtherNorm)
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        setattr(other.get_submodule(owner), last, parameter)
    x = torch.randn(1, TOKENS, WIDTH)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    began = time.process_time()
    status = ""
    if what == "plain":
        model(x).square().mean().backward()
    else:
        config = VerifyConfig(raise_on_mismatch=False)
        by: Any = what
        status = paritas.verify([x], model, other, config, by=by).status.value
    seconds = time.process_time() - began
    results.put((_status("VmHWM") - before, round(seconds, 2), status))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key))) * 1024


def main(counts: list[int]) -> None:
    """Print one line per number of layers."""
    start = multiprocessing.get_context("fork")
    block = sum(one.numel() for one in Layer(Norm).parameters()) * 8
    for layers in counts:
        found: dict[str, Any] = {"layers": layers, "block_float64_mib": round(block / MIB, 1)}
        for what in ("plain", "blocks", "whole"):
            results = start.SimpleQueue()
            child = start.Process(target=measure, args=(layers, what, results))
            child.start()
            child.join()
            peak, seconds, status = results.get()
            found |= {f"{what}_mib": round(peak / MIB), f"{what}_cpu_s": seconds}
            found |= {f"{what}_status": status} if status else {}
        found["blocks_beyond_plain_in_blocks"] = round(
            (found["blocks_mib"] - found["plain_mib"]) / found["block_float64_mib"], 2
        )
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main([int(one) for one in sys.argv[1:]] or [4, 8, 16])
