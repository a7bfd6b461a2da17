"""What statistics and sketches cost, as ratios to one copy of the tensor within one run."""

from __future__ import annotations

import argparse
import time

import torch

from paritas.numerics.sketch import begin_sketch
from paritas.numerics.statistics import begin

# Name, elements, calls in a round.
SIZES = (("small", 1 << 10, 300), ("16k", 1 << 14, 200), ("1M", 1 << 20, 10), ("16M", 16 << 20, 1))
ROUNDS = 15


def best(function, calls, wait):
    """Least seconds of several rounds: what the machine does when nothing disturbs it."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        wait()
        times.append((time.perf_counter() - start) / calls)
    return min(times)


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
    return (
        best(lambda: room.copy_(tensor), calls, wait),
        best(lambda: begin(tensor), calls, wait),
        best(lambda: begin_sketch(tensor), calls, wait),
        best(lambda: (begin(tensor), begin_sketch(tensor)), calls, wait),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    if device == "cpu":
        torch.set_num_threads(1)
    print(f"on {device}, one thread; GB/s, and times of one copy in brackets")
    for name, numel, calls in SIZES:
        for kind, tensor in tensors(numel, device).items():
            copy, summary, sums, both = measure(tensor, calls, wait)
            nbytes = numel * tensor.element_size()
            cells = (f"{nbytes / t / 1e9:6.2f} ({t / copy:5.1f})" for t in (summary, sums, both))
            row = "  ".join(cells)
            print(f"{name:>5} {kind:<26} statistics, sketch, both: {row}  {1e6 * both:9.1f} us")


if __name__ == "__main__":
    main()
