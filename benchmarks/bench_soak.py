"""Whether the memory of a permanent guard grows: 10,000 checked calls, forward and backward.

Memory is the private memory of the process as reported by Linux, after every 500 steps, after
garbage collection and after free blocks are returned. The first 1,000 steps warm up: caches of
torch and of the allocator fill. Growth is given per step, from a line fitted to the rest; the
number of objects that Python's garbage collector tracks is next to it.
"""

from __future__ import annotations

import ctypes
import gc
import os
from typing import TYPE_CHECKING

import torch
from benchmarks.lab.figures import Figure, Report, Table, line, write
from benchmarks.lab.memory import resident
from torch import nn

import paritas

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paritas.core.compiled.guard import Guard

# For a look at it; what is written is of all of them.
STEPS = int(os.environ.get("BENCH_SOAK_STEPS", "5000"))
BLOCK, WARM = STEPS // 10, STEPS // 5
# A single tensor kept of each step would be 500 bytes and one object.
BYTES, OBJECTS = 100.0, 0.1


def training(backend: str) -> tuple[Callable[[], None], Guard]:
    """One step of a small model, forward and backward, and the guard that checks it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    guarded = paritas.guard(backend, on_mismatch="record")
    compiled = torch.compile(model, backend=guarded)

    def step() -> None:
        compiled(torch.randn(4, 16)).square().mean().backward()
        model.zero_grad()

    return step, guarded


def held() -> tuple[int, int]:
    """Bytes of the process's own, and objects that the garbage collector knows."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident(), len(gc.get_objects())


def rise(points: Mapping[int, int]) -> float:
    """Of the straight line through the points, by least squares."""
    x0, y0 = sum(points) / len(points), sum(points.values()) / len(points)
    above = sum((x - x0) * (y - y0) for x, y in points.items())
    return above / sum((x - x0) ** 2 for x in points)


def soak(backend: str) -> tuple[list[Figure], Table]:
    """Guard so many steps, and look at what is held every now and then."""
    step, guarded = training(backend)
    seen: dict[int, tuple[int, int]] = {}
    for number in range(1, STEPS + 1):
        step()
        if number % BLOCK == 0 and number >= WARM:
            seen[number] = held()
    verdict = guarded.verdict()
    assert verdict.passed, str(verdict)
    checked = sum(entry.checked for entry in guarded.journal.graphs)
    assert checked >= 2 * STEPS, f"{checked} calls checked of {STEPS} steps"
    sizes = {number: size for number, (size, _) in seen.items()}
    objects = {number: count for number, (_, count) in seen.items()}
    first, last = min(seen), max(seen)
    note = f"{checked:,} checked calls; {sizes[first] / 2**20:.1f} to {sizes[last] / 2**20:.1f} MiB"
    kept = f"{objects[first]:,} to {objects[last]:,}"
    figures = [
        Figure(f"memory, {backend}", rise(sizes), "bytes/step", BYTES, note=note),
        Figure(f"objects, {backend}", rise(objects), "objects/step", OBJECTS, note=kept),
    ]
    rows = [[number, size / 2**20, count] for number, (size, count) in seen.items()]
    return figures, Table(f"Each point, {backend}", ["steps", "MiB", "objects"], rows)


def main() -> None:
    """Both ways in which a guard checks: below AOTAutograd, and the captured graph."""
    torch.set_num_threads(1)
    figures, tables = [], []
    for backend in ("inductor", "aot_eager"):
        found, table = soak(backend)
        figures += found
        tables.append(table)
        print(*map(line, found), sep="\n", flush=True)
    if STEPS >= 5_000:
        write(Report("soak", figures, tables, what=__doc__))


if __name__ == "__main__":
    main()
