"""What comparing one pair of tensors costs: 32 MiB of float32 on one thread, and many small ones.

Then two whole dumps of small tensors, of which every tenth differs: the cost of matching and
comparing them and of writing the table, the JSON and the report, against just reading both indices.

Pairs are measured against msit's metrics, written again from their definitions (each goes over the
whole tensor), and against one copy. Seconds are processor seconds, the minimum of several
alternating rounds; wall-clock ratios are next to them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.lab.figures import Figure, Report, write
from benchmarks.lab.made_dumps import write_dump, write_pair
from benchmarks.lab.timing import Spent, in_turns, measured

import paritas
from paritas.comparison.gathering import operands
from paritas.comparison.pairing import match
from paritas.comparison.results_folder import write_all
from paritas.comparison.rules import Rules
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.numerics.pair_figures import pair_figures, quick_figures
from paritas.formats.dumps.reading import Dump

if TYPE_CHECKING:
    from collections.abc import Iterator

NUMEL = 8 << 20  # 32 MiB of float32
EQUAL_OF = 16
ROUNDS = 5
SMALL_PAIRS = 50_000
RECORDS = 10_000
LARGE_RECORDS = 8
SMALL_NUMELS = (1, 16, 64, 256, 1024, 4096)
EPSILON = 1.1920929e-07


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


def full_set() -> Iterator[Figure]:
    """All figures of a pair against msit's sequence."""
    for noise in (1e-6, 1e-4, 1e-2, 1.0):
        golden, my = tensors(noise)
        assert not pair_figures(golden, my).identical
        theirs, ours = against_msit(golden, my)
        yield ratio(f"all figures, all differ by {noise:g}", "x msit", theirs, ours, 8.0)
    same = golden.clone()
    assert pair_figures(golden, same).identical
    theirs_equal, ours_equal = against_msit(golden, same)
    rest = EQUAL_OF - 1
    theirs, ours = (
        Spent(*(rest * e + d for e, d in zip(equal, differing, strict=True)))
        for equal, differing in ((theirs_equal, theirs), (ours_equal, ours))
    )
    yield ratio(f"all figures, {rest} of {EQUAL_OF} equal", "x msit", theirs, ours, 25.0, EQUAL_OF)


def against_msit(golden, my):
    works = {
        "theirs": lambda: msit_sequence(my, golden),
        "ours": lambda: pair_figures(golden, my),
    }
    return in_turns(works, ROUNDS, take="least", warm=False).values()


def tiers() -> Iterator[Figure]:
    """The cheap tiers against one copy; bytes of both tensors are counted, read or written."""
    golden, my = tensors(1e-4)
    # All by one allocator: pages of another size are copied at another speed.
    same, room, source = golden.clone(), torch.empty(NUMEL).numpy(), golden.numpy()
    works = {
        "copy": lambda: np.copyto(room, source),
        "bits": lambda: bitwise_equal(golden, same),
        "quick": lambda: quick_figures(golden, my),
    }
    copy, bits, quick = in_turns(works, ROUNDS, take="least", calls=5).values()
    yield ratio("bits, equal", "x memcpy", copy, bits, 0.8)
    yield ratio("quick figures, all differ", "x memcpy", copy, quick, 0.25)


def small_pairs() -> Iterator[Figure]:
    """Figures of many small pairs, of which half are equal; reading them is not counted."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for numel in SMALL_NUMELS:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(numel, generator=generator).to(dtype)
            pairs += [(x, x.clone()), (x, x * 1.01)]
    times = SMALL_PAIRS // len(pairs)
    seconds = measured(lambda: [pair_figures(*p) for _ in range(times) for p in pairs])
    each = 1e6 * seconds.processor / (times * len(pairs))
    yield Figure(
        f"figures of {SMALL_PAIRS} small pairs",
        seconds.processor,
        "s",
        60.0,
        note=f"{each:.0f} us each",
    )


def records() -> Iterator[Figure]:
    """Dumps of many small tensors, where every record costs and no element does."""
    with tempfile.TemporaryDirectory() as folder:
        my, golden = write_pair(Path(folder), RECORDS, 64, every=10)
        opened = Dump.open(my), Dump.open(golden)
        found = []
        works = {
            "indices": lambda: (Dump.open(my), Dump.open(golden)),
            "matching": lambda: matched(*opened),
            "comparing": lambda: found.append(paritas.compare(my, golden, jobs=1)),
            "writing": lambda: write_all(Path(folder, "table"), found[-1]),
        }
        spent = in_turns(works, ROUNDS, take="least")
        assert len(matched(*opened)) == len(found[-1].rows) == RECORDS
        assert sum(not row.status.passes() for row in found[-1].rows) == RECORDS // 10
    base = spent["indices"].processor
    note = f"reading both indices takes {base:.2g} s"
    for name in ("matching", "comparing", "writing"):
        took = spent[name].processor
        yield Figure(f"{name} {RECORDS} records", took, "s", note=note)
        yield Figure(f"{name} {RECORDS} records over reading both indices", took / base, "x")


def checksums() -> Iterator[Figure]:
    """Stored data held against its digests, against a copy of as many bytes in memory."""
    with tempfile.TemporaryDirectory() as folder:
        my, golden = (
            write_dump(Path(folder, side), LARGE_RECORDS, NUMEL, is_mine=False)
            for side in ("my", "golden")
        )
        source, room = torch.randn(NUMEL).numpy(), torch.empty(NUMEL).numpy()
        works = {
            "copy": lambda: [np.copyto(room, source) for _ in range(LARGE_RECORDS)],
            "checked": lambda: verified(golden),
            "comparing": lambda: paritas.compare(my, golden, jobs=1),
            "trusting": lambda: paritas.compare(my, golden, jobs=1, trust_digests=True),
        }
        copy, checked, comparing, trusting = in_turns(works, ROUNDS, take="least").values()
    nbytes = LARGE_RECORDS * 4 * NUMEL
    note = f"{nbytes / checked.processor / 1e9:.2f} GB/s"
    speed = copy.processor / checked.processor
    yield Figure("data held against its digests", speed, "x memcpy", 0.5, "higher", note)
    note = f"{2 * nbytes / comparing.processor / 1e9:.2f} GB/s; {trusting.processor:.2g} s trusting"
    yield Figure("comparing equal data, checked", comparing.processor, "s", note=note)


def verified(path):
    """A dump of which every value was held against its digest, none of them remembered."""
    dump = Dump.open(path)
    assert all(dump.verify(record) for record in dump.records())


def matched(mine, theirs):
    """The pairs of two dumps."""
    rules = Rules.of()
    my_operands, golden_operands, _ = operands(mine, theirs, rules)
    return match(my_operands, golden_operands, rules, {0: 0}).pairs


def ratio(name, unit, baseline, ours, bar, pairs=1) -> Figure:
    """How many times as fast."""
    speed = pairs * 2 * 4 * NUMEL / ours.processor / 1e9
    note = f"{speed:.2f} GB/s; {baseline.wall / ours.wall:.2f} by the wall clock"
    return Figure(name, baseline.processor / ours.processor, unit, bar, "higher", note)


def main():
    torch.set_num_threads(1)
    figures = [
        figure
        for section in (full_set, tiers, small_pairs, records, checksums)
        for figure in section()
    ]
    write(Report("compare", figures, what=__doc__))


if __name__ == "__main__":
    main()
