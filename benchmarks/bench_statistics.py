"""What statistics and sketches of a tensor cost, as ratios to one copy of it.

One thread, wall-clock seconds, the minimum of several rounds; `--device cuda` measures there and
writes a separate file.
"""

from __future__ import annotations

import argparse

import torch
from benchmarks.lab.figures import Figure, Report, Table, write
from benchmarks.lab.timing import best

from paritas.core.numerics.sketch import begin_sketch
from paritas.core.numerics.statistics import begin_statistics

# Name, elements, calls in a round.
SIZES = (("1k", 1 << 10, 100), ("16k", 1 << 14, 50), ("1M", 1 << 20, 3), ("16M", 16 << 20, 1))
ROUNDS = 5


def tensors(numel, device):
    """Kinds of tensors that cost differently: exponents of one value, zeros, NaN, conversions."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(numel, generator=generator)
    broken = normal.clone()
    broken[numel // 2] = torch.nan
    kinds = {
        "float32": normal,
        "float32, half of it zeros": normal.relu(),
        "float32, all ones": torch.ones(numel),
        "float32, one NaN": broken,
        "bfloat16": normal.bfloat16(),
        "float64": normal.double(),
        "int64": torch.randint(50_000, (numel,), generator=generator),
    }
    return {kind: tensor.to(device) for kind, tensor in kinds.items()}


def measure(tensor, calls, wait):
    """Seconds of one copy, of the statistics, of the sketch, and of both."""
    room = torch.empty_like(tensor)
    works = (
        lambda: room.copy_(tensor),
        lambda: begin_statistics(tensor),
        lambda: begin_sketch(tensor),
        lambda: (begin_statistics(tensor), begin_sketch(tensor)),
    )
    return [best(waited(work, wait), ROUNDS, calls=calls).wall for work in works]


def waited(work, wait):
    return lambda: (work(), wait())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    torch.set_num_threads(1)
    rows, figures = [], []
    for name, numel, calls in SIZES:
        for kind, tensor in tensors(numel, device).items():
            copy, summary, sums, both = measure(tensor, calls, wait)
            speed = numel * tensor.element_size() / both / 1e9
            row = [name, kind, *(t / copy for t in (summary, sums, both)), speed, 1e6 * both]
            rows.append(row)
            print(f"{name:>5} {kind:<26} " + " ".join(f"{cell:9.2f}" for cell in row[2:]))
            if kind == "float32":
                figures.append(Figure(f"both, float32, {name}", both / copy, "x one copy"))
    columns = ["size", "kind", "statistics / copy", "sketch / copy", "both / copy", "GB/s", "us"]
    table = Table(f"Times of one copy, on {device}", columns, rows)
    script = "statistics" if device == "cpu" else f"{device}_statistics"
    write(Report(script, figures, [table], what=__doc__))


if __name__ == "__main__":
    main()
