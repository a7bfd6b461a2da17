"""What `verify(by="blocks")` costs, by the number of layers: compilations, time and memory.

A stack of gated MLPs in float32 with gradients, on one thread. The candidate shares the parameters
of the reference and computes its norms in another way, so no value is settled by its bits. Slopes
are on two logarithmic scales: 1 is linear, 0 is flat. Compilations are those beside the user's own
compilation of the whole model. Time is the processor time of a later check of a compiled model,
which compiles nothing; measured once. Memory is the peak of the process on top of
what was there before, in a process of its own; a plain training step has the gradients of all
layers, and so has the candidate's whole run.
"""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.lab.figures import Figure, Report, Table, write
from benchmarks.lab.slopes import FLAT, growth
from torch import Tensor, nn
from torch.nn import functional

import paritas

TOKENS = 32
SMALL, WIDE = 64, 512
LAYERS = (2, 4, 8, 16, 32)
REPEATS = 1
MIB = 1 << 20
QUIET = paritas.VerifyConfig(raise_on_mismatch=False)


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

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

    def __init__(self, width: int, norm: type[Norm]) -> None:
        super().__init__()
        self.norm = norm(width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Run one layer."""
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """A stack of layers."""

    def __init__(self, layers: int, width: int, norm: type[Norm]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, norm) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers."""
        for layer in self.layers:
            x = layer(x)
        return x


def make_pair(layers: int, width: int) -> tuple[Model, Model, Tensor]:
    """A reference, a candidate with the same parameters, and an input."""
    torch.manual_seed(0)
    model = Model(layers, width, Norm)
    with torch.device("meta"):
        other = Model(layers, width, OtherNorm)
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        setattr(other.get_submodule(owner), last, parameter)
    return model, other, torch.randn(1, TOKENS, width)


def compile_and_time(layers: int) -> tuple[int, float, float]:
    """Compilations of the first check, seconds of a later one, and of a plain step."""
    compiled = 0

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    torch.compiler.reset()  # many models of one class would reach Dynamo's limit
    model, other, x = make_pair(layers, SMALL)
    candidate = torch.compile(other, backend=backend)
    candidate(x).sum().backward()
    own = compiled
    verdict = paritas.verify([x], model, candidate, QUIET, by="blocks")
    assert verdict.status.value == "equivalent", str(verdict)
    further = compiled - own
    spent = []
    for _ in range(REPEATS):
        began = time.process_time()
        paritas.verify([x], model, candidate, QUIET, by="blocks")
        spent.append(time.process_time() - began)
    assert compiled == own + further, "a later check compiles nothing"
    began = time.process_time()
    model(x).square().mean().backward()
    return further, min(spent), time.process_time() - began


def peak_of(layers: int, what: str) -> float:
    """The peak of a plain step or of a check by blocks, in MiB, in a process of its own."""
    start = multiprocessing.get_context("fork")
    results = start.SimpleQueue()
    child = start.Process(target=_measure_peak, args=(layers, what, results))
    child.start()
    child.join()
    found: float = results.get()
    return found


def _measure_peak(layers: int, what: str, results: Any) -> None:
    model, other, x = make_pair(layers, WIDE)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if what == "plain":
        model(x).square().mean().backward()
    else:
        assert paritas.verify([x], model, other, QUIET, by="blocks").passed
    results.put((_status("VmHWM") - before) / MIB)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key))) * 1024


def main() -> None:
    """Measure every number of layers."""
    torch.set_num_threads(1)
    block = sum(one.numel() for one in Layer(WIDE, Norm).parameters()) * 8 / MIB
    rows: list[list[Any]] = []
    for layers in LAYERS:
        # Processes are forked from this one: memory first, before torch.compile starts threads.
        plain, by_blocks = peak_of(layers, "plain"), peak_of(layers, "blocks")
        rows.append([layers, plain, by_blocks, (by_blocks - plain) / block])
    for row in rows:
        row.extend(compile_and_time(row[0]))
        print(row, flush=True)
    counts = {row[0]: row[4] for row in rows}
    figures = [
        Figure(
            "compilations for 32 layers over 2", counts[32] / counts[2], "x", 1.0,
            note=f"{counts[2]} and {counts[32]}, native and lifted",
        ),
        growth("time of a later check, by layers", {row[0]: row[5] for row in rows}, "s"),
        Figure(
            "memory beyond a plain step, most", max(row[3] for row in rows),
            "x a block in float64", note=f"a block in float64 has {block:.0f} MiB",
        ),
        growth(
            "memory beyond a plain step, by layers",
            {row[0]: max(1.0, row[2] - row[1]) for row in rows}, "MiB", FLAT,
        ),
    ]  # fmt: skip
    columns = [
        "layers", "plain step, MiB", "by blocks, MiB", "beyond, in blocks", "compilations",
        "a later check, s", "plain step, s",
    ]  # fmt: skip
    write(Report("blocks", figures, [Table("Each number of layers", columns, rows)], what=__doc__))


if __name__ == "__main__":
    main()
