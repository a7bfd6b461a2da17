"""What measuring a pair costs on a CUDA device, as a share of the speed of its memory.

The yardstick is a copy of 4 GiB within the device, which moves as many bytes as reading a pair of
4 GiB tensors does. Run from the root of the repository: `python -m benchmarks.bench_cuda`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.lab.figures import RESULTS, Figure, Report, write

from paritas.core.numerics.metrics import begin_pair, pair_metrics
from paritas.core.numerics.statistics import begin_statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GIB = 1 << 30
BYTES = 4 * GIB
ROUNDS = 9
# Asked for one after the other without a wait, as by a program that asks for the figures later.
QUEUED = 4
BAR = 0.9
PIECE = 1 << 28


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


def make_pair(dtype: torch.dtype, mean: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers, and the same with relative noise of a thousandth."""
    torch.manual_seed(0)
    reference = torch.empty(BYTES // dtype.itemsize, dtype=dtype, device="cuda")
    candidate = torch.empty_like(reference)
    for start in range(0, reference.numel(), PIECE):
        x = torch.randn(PIECE, device="cuda") + mean
        reference[start : start + PIECE] = x
        candidate[start : start + PIECE] = x * (1 + 1e-3 * torch.randn(PIECE, device="cuda"))
    return reference, candidate


def by_operators(reference: torch.Tensor, candidate: torch.Tensor) -> None:
    """A few of the figures the way they are mostly asked for."""
    r, c = reference.double(), candidate.double()
    d = c - r
    torch.stack([d.abs().max(), d.abs().mean(), d.norm(), r.norm(), (r * c).sum(), c.norm()])


def shares(copy: float) -> Iterator[Figure]:
    """What each way of measuring reaches of the bandwidth of the copy."""
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        name = str(dtype).removeprefix("torch.")
        bar = None if dtype is torch.float16 else BAR
        for mean in (0.0, 100.0):
            r, c = make_pair(dtype, mean)
            told = f"full statistics of a pair of {name}, mean {mean:g}"
            alone = milliseconds(lambda r=r, c=c: begin_pair(r, c))
            yield _share(f"{told}, alone", copy / alone)
            queue = milliseconds(lambda r=r, c=c: [begin_pair(r, c) for _ in range(QUEUED)])
            wanted = bar if mean == 0 else None
            yield _share(f"{told}, one of {QUEUED} queued", copy * QUEUED / queue, wanted)
            if mean == 0:
                yield from _others(name, r[:PIECE], c[:PIECE], copy)
            del r, c


def _others(name: str, r: torch.Tensor, c: torch.Tensor, copy: float) -> Iterator[Figure]:
    """The same by other means, of a part that is as large as their memory allows."""
    copy *= r.nbytes / BYTES
    plain = milliseconds(lambda: by_operators(r, c))
    yield _share(f"six figures of {name} by torch's operators", copy / plain)
    walk = milliseconds(lambda: pair_metrics(r, c, block_size=1 << 22))
    yield _share(f"full statistics of a pair of {name} without the kernel", copy / walk)
    one = milliseconds(lambda: begin_statistics(r))
    yield _share(f"statistics of one tensor of {name}", copy / 2 / one)


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
    what = f"{speed}Shares of that speed, both tensors of a pair being 4 GiB."
    write(Report("cuda_metrics", list(shares(copy)), what=what), folder)


if __name__ == "__main__":
    main()
