"""What measuring a pair costs on a CUDA device, as a share of the speed of its memory.

The yardstick is a copy of 4 GiB within the device: a copy moves as many bytes as reading a pair of
tensors of that size does. Run from the root of the repository: `python -m benchmarks.bench_cuda`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.lab.figures import RESULTS, Figure, Report, write

from paritas.core.numerics.metrics import pair_metrics
from paritas.core.numerics.statistics import begin_statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GIB = 1 << 30
BYTES = 4 * GIB
ROUNDS = 9
# Promised for the dtypes that most tensors have.
BAR = 0.9
NUMEL = 1 << 28  # the elements of a tensor


def milliseconds(work: Callable[[], Any]) -> float:
    """Median over rounds of what passes on the device between two events around the work."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    times = []
    for _ in range(ROUNDS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times)


def copying() -> float:
    """The time of the copy."""
    source = torch.empty(BYTES, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    return milliseconds(lambda: target.copy_(source))


def make_pair(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers, and the same with relative noise of a thousandth."""
    torch.manual_seed(0)
    x = torch.randn(NUMEL, device="cuda")
    return x.to(dtype), (x * (1 + 1e-3 * torch.randn(NUMEL, device="cuda"))).to(dtype)


def by_operators(reference: torch.Tensor, candidate: torch.Tensor) -> None:
    """A few of the figures the way they are mostly asked for."""
    r, c = reference.double(), candidate.double()
    d = c - r
    torch.stack([d.abs().max(), d.abs().mean(), d.norm(), r.norm(), (r * c).sum(), c.norm()])


def shares(copy: float) -> Iterator[Figure]:
    """What each way of measuring reaches of the bandwidth of the copy."""
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        name = str(dtype).removeprefix("torch.")
        r, c = make_pair(dtype)
        least = copy * r.nbytes / BYTES
        plain = milliseconds(lambda r=r, c=c: by_operators(r, c))
        yield _share(f"six figures of {name} by torch's operators", least / plain)
        every = milliseconds(lambda r=r, c=c: pair_metrics(r, c))
        bar = None if dtype is torch.float16 else BAR
        yield _share(f"full statistics of a pair of {name}", least / every, bar)
        side = milliseconds(lambda r=r: begin_statistics(r))
        yield _share(f"statistics of one tensor of {name}", least / 2 / side)
        del r, c


def _share(name: str, value: float, bar: float | None = None) -> Figure:
    return Figure(name, value, "of the bandwidth", bar, "higher")


def main() -> None:
    """Measure, print, and write down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    folder = parser.parse_args().folder
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is measured, and what was measured before is left alone")
        return
    copy = copying()
    speed = f"A copy of 4 GiB within the device: {2 * BYTES / copy / 1e9:.2f} TB/s. "
    what = f"{speed}Shares of that speed, of tensors of 2^28 elements."
    write(Report("cuda_metrics", list(shares(copy)), what=what), folder)


if __name__ == "__main__":
    main()
