"""How often the kind of a fault is right, none or wrong, how honest its confidence is, how fast.

The faults have two parts. *Building*: what the patterns were made with. *Measured*: only for the
figures here. (The confidence that is stated is counted on others: `bench_confidence.py`.) A kind of
fault is in one part, by a hash of its name (`benchmarks/diagnosing`), and so are its tensors; the
corpora of tests/quality were built with and are in the first part. Faults *at an operator* come
with its inputs, as at a located place; faults *at an output* are inside of small programs, and
`verify` sees only what they return. Of a fault without a name, every kind is wrong. `--misses`
prints what is wrong or missing in the first part.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import sys
from pathlib import Path

import torch
from benchmarks.diagnosing import operators, programs
from benchmarks.diagnosing.parts import PARTS, Sample, part_of
from benchmarks.lab.figures import Figure, Report, Table, write
from benchmarks.lab.timing import measured

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from paritas.core.diagnosis.case import Context
from paritas.core.diagnosis.diagnose import ACROSS_RANKS, PROPOSERS, diagnose, rank_patterns
from paritas.core.diagnosis.stating import CONFIDENCE, COUNTED
from quality import diagnosis_arrangements as arrangements
from quality import diagnosis_ranks as ranks
from quality import diagnosis_values as values
from quality.test_diagnosis_regions import misses as misses_of_regions

# Of the corpora of tests/quality: their tensors by seed. Seeds 0 and 1 were built with.
SEEDS = {"building": range(2), "measured": range(0)}
# Of the faults in `benchmarks/diagnosing`.
OPERATOR_SEEDS = {"building": range(4), "measured": range(40, 48)}
PROGRAM_SEEDS = {"building": range(1), "measured": range(40, 42)}
REGIONS = (200, 201)
# Faults that are less than so many times the noise are left out.
EFFECT = 8.0
BENIGN = 100
# Every n-th case of the corpora of values and of ranks, which are larger than the others.
EACH = 23
EACH_OF_RANKS = 7


def effect(case):
    """The rms of error over noise on the wrong elements."""
    if case.is_exact:
        return math.inf
    z = (case.error.abs() / case.allowed.clamp(min=1e-300))[case.wrong]
    if not bool(torch.isfinite(z).all()):
        return math.inf
    return float(z.square().mean().sqrt()) if z.numel() else 0.0


# --- What is said ---------------------------------------------------------------------------------


def at_operators(part):
    """What is stated of the faults at an operator."""
    faults = [one for one in operators.OPERATOR_FAULTS if part_of(one.family) == part]
    told = [
        sample
        for fault in faults
        for seed in OPERATOR_SEEDS[part]
        for sample in operators.say(fault, seed)
    ]
    for seed in SEEDS[part]:
        told += of_corpora(seed)
    return told


def at_outputs(part):
    """What is stated of the faults at an output."""
    faults = [one for one in programs.PROGRAM_FAULTS if part_of(one.family) == part]
    return [
        sample
        for fault in faults
        for seed in PROGRAM_SEEDS[part]
        for sample in programs.say(fault, seed)
    ]


def of_corpora(seed):
    """What is stated of the faults of tests/quality, of nameless ones and of rounding."""
    made = [(one.name, one.kinds, one.case) for one in arrangements.planted(seed)]
    some = itertools.islice(values.planted_cases(seed), seed % EACH, None, EACH)
    made += [(one.name, (one.kind,), one.case) for one in some]
    made = [one for one in made if effect(one[2]) >= EFFECT]
    made += [(one.name, (), one.case) for one in arrangements.unexplained(seed)]
    made += [(one.name, (), one.case) for one in arrangements.benign(seed)]
    made += [(one.name, (), one.case) for one in values.benign_cases(seed, BENIGN)]
    told = [sample(*one) for one in made]
    for source in (ranks.planted, ranks.unexplained, ranks.benign):
        for one in itertools.islice(source(seed), seed % EACH_OF_RANKS, None, EACH_OF_RANKS):
            kinds = one.kinds if source is ranks.planted else ()
            told.append(sample(one.name, kinds, one.case, ACROSS_RANKS))
    return told


def sample(name, kinds, case, proposers=PROPOSERS):
    """What is stated first of a case; of values on ranks, by the proposers that are asked there."""
    found = rank_patterns(case, proposers) if bool(case.wrong.any()) else ()
    if not found:
        return Sample(name, name, kinds)
    best = found[0]
    return Sample(name, name, kinds, best.kind, str(best.evidence[COUNTED]), best.confidence)


# --- The figures ----------------------------------------------------------------------------------


def shares(place, part, told):
    """Right of the faults with a name, and wrong of all."""
    named = [one for one in told if one.kinds]
    count = collections.Counter(one.outcome for one in told)
    right = 100 * sum(one.outcome == "right" for one in named) / len(named)
    wrong = 100 * count["wrong"] / len(told)
    note = f"of {len(told)} faults, {len({one.family for one in told})} kinds"
    said = f"of {len(named)} with a name; {count['none']} of {len(told)} without a statement"
    is_bar = part == "measured"
    bar = 85.0 if is_bar and place == "operator" else None
    return [
        Figure(f"right kind at an {place}, {part}", right, "%", bar, "higher", said),
        Figure(f"wrong kind at an {place}, {part}", wrong, "%", 1.0 if is_bar else None, note=note),
    ]


def per_family(place, part, told):
    """Right, none and wrong of each kind of fault of `benchmarks/diagnosing`."""
    groups = collections.defaultdict(list)
    for one in told:
        groups[one.kinds[0] if one.kinds else "no name"].append(one)
    rows = []
    for kind, group in sorted(groups.items()):
        count = collections.Counter(one.outcome for one in group)
        instead = collections.Counter(one.said for one in group if one.outcome == "wrong")
        words = ", ".join(f"{name} {number}" for name, number in instead.items())
        rows.append([kind, count["right"], count["none"], count["wrong"], words])
    columns = ["fault", "right", "none", "wrong", "stated instead"]
    return Table(f"Kinds at an {place}, {part}", columns, rows)


def reliability(part, told):
    """How often what was stated with some confidence was right, by its class."""
    rows = []
    for (grade, at_output), (stated, _, _) in CONFIDENCE.items():
        group = [one for one in told[at_output] if one.said and one.grade == str(grade)]
        right = sum(one.outcome == "right" for one in group)
        place = "output" if at_output else "operator"
        share = right / len(group) if group else None
        rows.append([place, str(grade), stated, share, right, len(group)])
    columns = ["at an", "reproduced", "stated", "right", "right of them", "cases"]
    return Table(f"Confidence, {part}", columns, rows)


def located():
    """How often a planted region is found to the element, of the regional faults."""
    count, missed = misses_of_regions(REGIONS)
    share = 100 * (count - len(missed)) / count
    return Figure("region exact, measured", share, "%", 95.0, "higher", f"of {count}")


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
    chosen = [part for part in PARTS if part in sys.argv] or PARTS
    for part in chosen:
        told = {False: at_operators(part), True: at_outputs(part)}
        for place, group in (("operator", told[False]), ("output", told[True])):
            figures += shares(place, part, group)
            tables.append(per_family(place, part, group))
        tables.append(reliability(part, told))
        if "--misses" in sys.argv and part == "building":
            for one in [*told[False], *told[True]]:
                if one.outcome == "wrong" or (one.kinds and one.outcome == "none"):
                    print(f"    {one.name}: {one.said or 'nothing'} ({one.grade}) for {one.kinds}")
    if chosen is not PARTS:  # a look at some of it, not a measurement
        for figure in figures:
            print(figure.name, figure.value, figure.note)
        return
    slowest, table = speed()
    what = __doc__
    write(Report("diagnosis", [*figures, located(), slowest], [*tables, table], what=what))


if __name__ == "__main__":
    main()
