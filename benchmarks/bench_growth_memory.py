"""How memory grows where it should not: slopes on two logarithmic scales, 0 is flat.

The peak on top of what was there before, without the user's inputs and without results that have to
be kept. The smallest sizes are already larger than the blocks in which tensors are processed. The
method of each measurement is next to it.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

import torch
from benchmarks.lab.figures import Report, Table, line, write
from benchmarks.lab.made_dumps import write_pair
from benchmarks.lab.memory import peak_bytes, python_peak, resident_peak
from benchmarks.lab.slopes import FLAT, growth
from torch import nn

import paritas
from paritas.core.numerics.metrics import pair_metrics

MIB = 2**20


def judge_by_size(_: Path) -> dict[int, float]:
    """Judging one pair of values, by torch's allocator."""

    def peak(numel: int) -> float:
        torch.manual_seed(0)
        a = torch.randn(numel)
        b = a * (1 + 1e-7 * torch.randn(numel))
        return peak_bytes(lambda: paritas.judge(a, b), warm=0, times=1) / MIB

    return {numel: peak(numel) for numel in (1 << 22, 1 << 24, 1 << 26)}


def metrics_by_size(_: Path) -> dict[int, float]:
    """All metrics of one pair, by torch's allocator."""

    def peak(numel: int) -> float:
        torch.manual_seed(0)
        a = torch.randn(numel)
        b = a * (1 + 1e-6 * torch.randn(numel))
        return peak_bytes(lambda: pair_metrics(a, b), warm=0, times=1) / MIB

    return {numel: peak(numel) for numel in (1 << 21, 1 << 23, 1 << 25)}


def compare_by_size(folder: Path) -> dict[int, float]:
    """Two pairs in dumps on disk, compared by one worker; the process's own memory.

    Both differ, so they are looked at closely and asked what kind of wrong they are.
    """

    def peak(numel: int) -> float:
        where = folder / str(numel)
        my, golden = write_pair(where, 2, numel)
        found = resident_peak(lambda: paritas.compare(my, golden, jobs=1)) / MIB
        shutil.rmtree(where)
        return found

    return {numel: peak(numel) for numel in (1 << 21, 1 << 23, 1 << 25)}


def compare_by_count(folder: Path) -> dict[int, float]:
    """Pairs of 512 KiB, every eighth different, compared by one worker; the process's own memory.

    Not so small that the table, which is kept, would be most of it.
    """

    def peak(count: int) -> float:
        where = folder / str(count)
        my, golden = write_pair(where, count, 1 << 17, every=8)
        found = resident_peak(lambda: paritas.compare(my, golden, jobs=1)) / MIB
        shutil.rmtree(where)
        return found

    return {count: peak(count) for count in (8, 32, 128)}


def record_by_calls(folder: Path) -> dict[int, float]:
    """Statistics of every module of so many calls; Python's own objects."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])

    def run(calls: int) -> None:
        with (
            torch.no_grad(),
            paritas.capture(folder / "dump", data="stats", overwrite=True),
        ):
            for number in range(calls):
                model(torch.full((8, 32), float(number)))

    return {calls: python_peak(functools.partial(run, calls)) / MIB for calls in (64, 256, 1024)}


def record_by_tensors(folder: Path) -> dict[int, float]:
    """So many tensors of 512 KiB recorded whole, 8 MiB of them queued; the process's own memory."""
    model = nn.Sequential(nn.ReLU())

    def run(count: int) -> None:
        with (
            torch.no_grad(),
            paritas.capture(
                folder / "dump", mode="output", layers="0", queue_bytes=8 * MIB, overwrite=True
            ),
        ):
            for number in range(count):
                model(torch.full((1 << 17,), 1.0 + number))

    run(64)  # the queue and the memory kept for copies fill up once
    return {count: resident_peak(functools.partial(run, count)) / MIB for count in (64, 256, 1024)}


FLATS = {
    "judging a pair, by elements": judge_by_size,
    "metrics of a pair, by elements": metrics_by_size,
    "comparing dumps, by elements of each tensor": compare_by_size,
    "comparing dumps, by tensors": compare_by_count,
    "recording statistics, by calls": record_by_calls,
    "recording: memory by number of tensors": record_by_tensors,
}


def main() -> None:
    """Measure every slope."""
    torch.set_num_threads(1)
    above = Path(__file__).parents[1] / ".cache"
    above.mkdir(exist_ok=True)
    figures, rows = [], []
    for name, measure in FLATS.items():
        with tempfile.TemporaryDirectory(dir=above, prefix="bench_growth-") as folder:
            points = measure(Path(folder))
        figures.append(growth(name, points, "MiB", FLAT))
        how = (measure.__doc__ or "").splitlines()[0]
        rows += [[name, size, peak, how] for size, peak in points.items()]
        print(line(figures[-1]), flush=True)
    table = Table("Each point", ["what", "size", "MiB", "how"], rows)
    write(Report("growth_memory", figures, [table], what=__doc__))


if __name__ == "__main__":
    main()
