"""How often the first pattern is the planted one, how honest its confidence is, and how fast it is.

Faults come from the corpora of tests/quality. Seeds 0 and 1 were used while the patterns and the
table of `paritas.diagnosis.diagnose` were made; seeds 100 and 101 were not. `--misses` prints each
miss.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import sys
from pathlib import Path

import torch
from benchmarks.lab.figures import Figure, Report, Table, write
from benchmarks.lab.timing import measured

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from paritas.diagnosis.case import Context
from paritas.diagnosis.diagnose import ACROSS_RANKS, BUCKETS, PROPOSERS, diagnose, rank_raw
from quality import diagnosis_arrangements as arrangements
from quality import diagnosis_ranks as ranks
from quality import diagnosis_values as values
from quality.test_diagnosis_regions import misses as misses_of_regions

HALVES = {"tuning": range(2), "held out": range(100, 102)}
REGIONS = {"tuning": (0, 1), "held out": (200, 201)}
# Faults that are less than so many times the noise are counted apart.
EFFECT = 8.0
BENIGN = 100
# Every n-th case of the corpora of values and of ranks, which are larger than the others.
EACH = 23
EACH_OF_RANKS = 7


@dataclasses.dataclass(frozen=True)
class Sample:
    """A case, the kinds of which one is right, and what was said of it."""

    name: str
    kinds: tuple[str, ...]
    said: str
    raw: float

    @property
    def right(self):
        """Whether one of the kinds was said."""
        return self.said in self.kinds


def effect(case):
    """The rms of error over noise on the wrong elements."""
    if case.is_exact:
        return math.inf
    z = (case.error.abs() / case.allowed.clamp(min=1e-300))[case.wrong]
    if not bool(torch.isfinite(z).all()):
        return math.inf
    return float(z.square().mean().sqrt()) if z.numel() else 0.0


def samples(seeds):
    """What is said first of every planted fault, of the nameless ones and of the benign."""
    told = {"planted": [], "below the noise": [], "nameless": [], "benign": []}
    for seed in seeds:
        made = [(one.name, one.kinds, one.case) for one in arrangements.planted(seed)]
        made += [
            (one.name, (one.kind,), one.case)
            for one in itertools.islice(values.planted_cases(seed), seed % EACH, None, EACH)
        ]
        for name, kinds, case in made:
            group = "planted" if effect(case) >= EFFECT else "below the noise"
            told[group].append(sample(name, kinds, case))
        for one in every(ranks.planted(seed), seed):
            told["planted"].append(sample(one.name, one.kinds, one.case, ACROSS_RANKS))
        told["nameless"] += [sample(x.name, (), x.case) for x in arrangements.unexplained(seed)]
        told["nameless"] += [
            sample(x.name, (), x.case, ACROSS_RANKS) for x in every(ranks.unexplained(seed), seed)
        ]
        benign = [*arrangements.benign(seed), *values.benign_cases(seed, BENIGN)]
        told["benign"] += [sample(x.name, (), x.case) for x in benign]
        told["benign"] += [
            sample(x.name, (), x.case, ACROSS_RANKS) for x in every(ranks.benign(seed), seed)
        ]
    return told


def every(cases, seed):
    """Some cases of the corpus of ranks."""
    return itertools.islice(cases, seed % EACH_OF_RANKS, None, EACH_OF_RANKS)


def sample(name, kinds, case, proposers=PROPOSERS):
    """What is said first of a case; of values on ranks, by the proposers that are asked there."""
    found = rank_raw(case, proposers) if bool(case.wrong.any()) else []
    said, raw = (found[0].kind, found[0].confidence) if found else ("", 0.0)
    return Sample(name, kinds, said, raw)


def report(half, told, *, misses):
    """The figures of a half, and its table of kinds."""
    planted = told["planted"]
    share = 100 * sum(one.right for one in planted) / len(planted)
    note = f"of {len(planted)} faults above {EFFECT:g} times the noise"
    figures = [Figure(f"right pattern first, {half}", share, "%", 90.0, "higher", note)]
    claimed = sum(bool(one.said) for one in told["benign"])
    note = f"of {len(told['benign'])}"
    figures.append(Figure(f"patterns claimed of benign noise, {half}", claimed, "", 0.0, note=note))
    per_kind = collections.defaultdict(list)
    for one in planted:
        per_kind[one.kinds[0]].append(one)
    rows = []
    for kind, group in sorted(per_kind.items()):
        instead = collections.Counter(one.said or "nothing" for one in group if not one.right)
        said = ", ".join(f"{name} {count}" for name, count in instead.items())
        rows.append([kind, sum(one.right for one in group), len(group), said])
    for name in ("below the noise", "nameless"):
        group = told[name]
        rows.append(
            [
                name,
                sum(one.right for one in group),
                len(group),
                f"{sum(bool(one.said) for one in group)} claimed",
            ]
        )
    if misses:
        for one in [*planted, *told["nameless"], *told["benign"]]:
            if not one.right and (one.said or one.kinds):
                print(f"    {one.name}: {one.said or 'nothing'} ({one.raw:.2f}) for {one.kinds}")
    return figures, Table(f"Patterns, {half}", ["kind", "right", "of", "instead"], rows)


def calibration(half, told):
    """How often what was stated with some confidence was right."""
    stated = [one for group in told.values() for one in group if one.said]
    rows = []
    for low, claim, _, _ in BUCKETS:
        high = min((one[0] for one in BUCKETS if one[0] > low), default=1.01)
        group = [one for one in stated if low <= one.raw < high]
        good = sum(one.right for one in group)
        rows.append([claim, good / len(group) if group else None, len(group)])
    return Table(f"Confidence, {half}", ["stated", "right", "cases"], rows)


def located(half):
    """How often a planted region is found to the element, of the regional faults."""
    count, missed = misses_of_regions(REGIONS[half])
    share = 100 * (count - len(missed)) / count
    return Figure(f"region exact, {half}", share, "%", 95.0, "higher", f"of {count}")


def speed():
    """Seconds for a whole diagnosis of a million elements."""
    torch.manual_seed(0)
    rows = []
    for shape in ((1000, 1000), (1 << 20,), (16, 8, 64, 128)):
        x = torch.randn(shape)
        wrongs = {
            "scaled": x * 1.5,
            "rolled": x.roll(3, -1),
            "one row": x.index_fill(0, torch.tensor([3]), 0.0),
            "noise all over": x + 0.01 * torch.randn(shape),
            "unrelated": torch.randn(shape),
        }
        for name, wrong in wrongs.items():
            found = []
            spent = measured(functools.partial(_diagnose, wrong, x, found))
            said = found[0].best.kind if found[0].best else "nothing"
            rows.append([str(shape), name, spent.wall, said])
    slowest = max(row[2] for row in rows)
    figure = Figure("diagnosing a million elements, most", slowest, "s")
    return figure, Table("Seconds for a million elements", ["shape", "wrong", "s", "said"], rows)


def _diagnose(wrong, x, found):
    found.append(diagnose(wrong, x, arbiter=x.double(), context=Context()))


def main():
    torch.set_num_threads(1)
    figures, tables = [], []
    for half, seeds in HALVES.items():
        told = samples(seeds)
        found, table = report(half, told, misses="--misses" in sys.argv)
        figures += [*found, located(half)]
        tables += [table, calibration(half, told)]
    slowest, table = speed()
    write(Report("diagnosis", [*figures, slowest], [*tables, table], what=__doc__))


if __name__ == "__main__":
    main()
