"""How often the first pattern named is the planted one, how honest its confidence is, how fast.

    python benchmarks/bench_diagnosis.py [--misses]

Faults come from the corpora of tests/quality. Seeds 0 and 1 were looked at while the patterns and
the table of `paritas.diagnosis.calibration` were made; seeds 100 and 101 were not.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from paritas.diagnosis.calibration import BUCKETS
from paritas.diagnosis.cases import Context
from paritas.diagnosis.diagnosing import diagnose
from paritas.diagnosis.ranking import raw_ranked
from quality import diagnosis_arrangements as arrangements
from quality import diagnosis_values as values

HALVES = {"tuning": range(2), "held out": range(100, 102)}
# Faults that are less than so many times the noise are counted apart.
EFFECT = 8.0
BENIGN = 100
# Of the corpus of values, which is ten times larger, each so-manieth case.
EACH = 23


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
        told["nameless"] += [sample(x.name, (), x.case) for x in arrangements.unexplained(seed)]
        benign = [*arrangements.benign(seed), *values.benign_cases(seed, BENIGN)]
        told["benign"] += [sample(x.name, (), x.case) for x in benign]
    return told


def sample(name, kinds, case):
    found = raw_ranked(case) if bool(case.wrong.any()) else []
    said, raw = (found[0].kind, found[0].confidence) if found else ("", 0.0)
    return Sample(name, kinds, said, raw)


def report(half, told, *, misses):
    planted = told["planted"]
    right = sum(one.right for one in planted)
    print(f"{half}: {right} of {len(planted)} named first ({right / len(planted):.1%})")
    per_kind = collections.defaultdict(list)
    for one in planted:
        per_kind[one.kinds[0]].append(one)
    for kind, group in sorted(per_kind.items()):
        good = sum(one.right for one in group)
        instead = collections.Counter(one.said or "nothing" for one in group if not one.right)
        print(f"  {kind:24} {good:4} of {len(group):4}  {dict(instead) or ''}")
    for name in ("below the noise", "nameless", "benign"):
        group = told[name]
        claimed = sum(bool(one.said) for one in group)
        good = sum(one.right for one in group)
        print(f"  {name}: {len(group)} cases, {claimed} claimed, {good} of them rightly")
    if misses:
        for one in [*planted, *told["nameless"], *told["benign"]]:
            if not one.right and (one.said or one.kinds):
                print(f"    {one.name}: {one.said or 'nothing'} ({one.raw:.2f}) for {one.kinds}")


def calibration(half, told):
    """How often what was stated with some confidence was right."""
    stated = [one for group in told.values() for one in group if one.said]
    print(f"{half}: confidence")
    for low, claim, _, _ in BUCKETS:
        high = min((one[0] for one in BUCKETS if one[0] > low), default=1.01)
        group = [one for one in stated if low <= one.raw < high]
        good = sum(one.right for one in group)
        share = f"{good / len(group):.3f}" if group else "-"
        print(
            f"  raw {low:.2f} to {high:.2f}: stated {claim:.2f}, right {good}/{len(group)} {share}"
        )


def speed():
    """Seconds for a whole diagnosis of a million elements."""
    torch.manual_seed(0)
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
            start = time.perf_counter()
            found = diagnose(wrong, x, arbiter=x.double(), context=Context())
            took = time.perf_counter() - start
            said = found.best.kind if found.best else "nothing"
            print(f"  {shape!s:20} {name:16} {took:.2f} s: {said}")


def main():
    torch.set_num_threads(
        int(sys.argv[sys.argv.index("--threads") + 1]) if "--threads" in sys.argv else 2
    )
    for half, seeds in HALVES.items():
        told = samples(seeds)
        report(half, told, misses="--misses" in sys.argv)
        calibration(half, told)
    speed()


if __name__ == "__main__":
    main()
