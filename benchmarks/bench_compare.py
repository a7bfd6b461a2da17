"""What comparing costs, as ratios within one run and on one thread, each against its bar.

Seconds are those of the processor, least of several rounds in turns: a machine that does other work
besides takes longer, but not of them. Wall time is told beside it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from paritas.numerics.metrics import bitwise_equal
from paritas.numerics.pair_figures import pair_figures, quick_figures

NUMEL = 8 << 20  # 32 MiB of float32
EQUAL_OF = 16
ROUNDS = 5
SMALL_PAIRS = 50_000
SMALL_NUMELS = (1, 16, 64, 256, 1024, 4096)
EPSILON = 1.1920929e-07


class Row(NamedTuple):
    """One line of the table; more is better, and `bar` is the least that will do."""

    what: str
    ratio: float
    bar: float
    wall_ratio: float | None = None
    note: str = ""


class Seconds(NamedTuple):
    """How long something took."""

    processor: float
    wall: float


def best(*functions, rounds=ROUNDS, calls=1):
    """Least seconds of each function, over rounds in which they take turns.

    In a turn a function is called so many times over: from the second on, each finds as much of its
    tensors in the caches as any other would.
    """
    found = [[] for _ in functions]
    for _ in range(rounds):
        for function, times in zip(functions, found, strict=True):
            for _ in range(calls):
                wall, processor = time.perf_counter(), time.process_time()
                function()
                times.append((time.process_time() - processor, time.perf_counter() - wall))
    return [Seconds(*map(min, zip(*times, strict=True))) for times in found]


# --- msit's metrics, typed anew from their definitions: each goes over the whole tensor -----------


def msit_cosine(my, golden):
    my, golden = my.double(), golden.double()
    if not my.any() and not golden.any():
        return 1.0
    return round(F.cosine_similarity(my, golden, dim=0).item(), 10)


def msit_relative(my, golden):
    return torch.where(golden.abs() > EPSILON, (my / golden - 1).abs(), 0.0)


def msit_absolute(my, golden):
    return torch.where(golden.abs() > EPSILON, (my - golden).abs(), 0.0)


def msit_divergence(my, golden):
    found = F.kl_div(F.log_softmax(my, dim=-1), F.softmax(golden, dim=-1), reduction="sum")
    return max(found.item(), 0.0)


def msit_distance(my, golden):
    norm = golden.norm().item()
    return (my - golden).norm().item() / norm if norm > EPSILON else 0.0


MSIT_METRICS = (
    msit_cosine,
    lambda my, golden: msit_relative(my, golden).max().item(),
    lambda my, golden: msit_relative(my, golden).mean().item(),
    lambda my, golden: msit_absolute(my, golden).max().item(),
    lambda my, golden: msit_absolute(my, golden).mean().item(),
    msit_divergence,
    msit_distance,
)


def msit_sequence(my, golden):
    """All seven, and the extremes of both sides."""
    my, golden = my.reshape(-1).float(), golden.reshape(-1).float()
    if not (torch.isfinite(my).all() and torch.isfinite(golden).all()):
        return []
    found = [metric(my, golden) for metric in MSIT_METRICS]
    for side in (golden, my):
        found += [side.max().item(), side.min().item(), side.mean().item()]
    return found


# --- one pair of tensors --------------------------------------------------------------------------


def tensors(noise):
    generator = torch.Generator().manual_seed(0)
    golden = torch.randn(NUMEL, generator=generator)
    return golden, golden + noise * torch.randn(NUMEL, generator=generator)


def full_set() -> Iterator[Row]:
    """All figures of a pair against msit's sequence."""
    for noise in (1e-6, 1e-4, 1e-2, 1.0):
        golden, my = tensors(noise)
        assert not pair_figures(golden, my).identical
        theirs, ours = against_msit(golden, my)
        yield ratio(f"figures, all differ by {noise:g}: x msit's sequence", theirs, ours, 8.0)
    same = golden.clone()
    assert pair_figures(golden, same).identical
    theirs_equal, ours_equal = against_msit(golden, same)
    rest = EQUAL_OF - 1
    theirs, ours = (
        Seconds(*(rest * e + d for e, d in zip(equal, differing, strict=True)))
        for equal, differing in ((theirs_equal, theirs), (ours_equal, ours))
    )
    yield ratio(f"figures, {rest} of {EQUAL_OF} pairs equal: x msit's sequence", theirs, ours, 25.0)


def against_msit(golden, my):
    return best(lambda: msit_sequence(my, golden), lambda: pair_figures(golden, my))


def tiers() -> Iterator[Row]:
    """The cheap tiers against one copy; bytes of both tensors are counted, read or written."""
    golden, my = tensors(1e-4)
    # All by one allocator: pages of another size are copied at another speed.
    same, room, source = golden.clone(), torch.empty(NUMEL).numpy(), golden.numpy()
    copy, bits, quick = best(
        lambda: np.copyto(room, source),
        lambda: bitwise_equal(golden, same),
        lambda: quick_figures(golden, my),
        calls=5,
    )
    yield ratio("bits, equal: x memcpy", copy, bits, 0.8)
    yield ratio("quick figures, all differ: x memcpy", copy, quick, 0.25)


def small_pairs() -> Iterator[Row]:
    """Figures of many small pairs, of which half are equal; reading them is not counted."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for numel in SMALL_NUMELS:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(numel, generator=generator).to(dtype)
            pairs += [(x, x.clone()), (x, x * 1.01)]
    times = SMALL_PAIRS // len(pairs)
    (seconds,) = best(lambda: [pair_figures(*p) for _ in range(times) for p in pairs], rounds=1)
    count = times * len(pairs)
    each = f"{1e6 * seconds.processor / count:.0f} us each"
    what = f"small pairs in a minute: x {SMALL_PAIRS}"
    yield ratio(what, Seconds(60.0, 60.0), seconds, 1.0)._replace(note=each)


def ratio(what, baseline, ours, bar) -> Row:
    nbytes = 2 * 4 * NUMEL
    note = f"{nbytes / ours.processor / 1e9:.2f} GB/s" if "pairs" not in what else ""
    wall = baseline.wall / ours.wall
    return Row(what, baseline.processor / ours.processor, bar, wall, note)


# --- end to end: whole dumps ----------------------------------------------------------------------
# A measurement is a function that yields rows; it takes part once it is named in SECTIONS.


SECTIONS = (full_set, tiers, small_pairs)


def main():
    torch.set_num_threads(1)
    print(f"pairs of {NUMEL * 4 >> 20} MiB float32, one thread; ratios of processor (wall) time")
    for section in SECTIONS:
        for row in section():
            wall = "" if row.wall_ratio is None else f"({row.wall_ratio:.2f})"
            ended = "pass" if row.ratio >= row.bar else "MISS"
            cells = f"{row.ratio:8.2f} {wall:>9}  bar {row.bar:5.2f}  {ended}"
            print(f"  {row.what:<52} {cells}  {row.note}")


if __name__ == "__main__":
    main()
