"""The confidence of a stated kind: how often such statements are right about random faults.

`benchmarks/diagnosing/drawn.py` draws operators, programs, sizes, numbers and what is done wrong.
Faults *at an operator* come with its inputs, as at a located place; *at an output*, `verify` sees
only what a small program returns. Of a fault without a word, every kind is wrong. Statements are
counted by how well they reproduce the candidate; the shares that are stated (`CONFIDENCE` in
`paritas.core.diagnosis.stating`) are (right + 1) over (cases + 2), since few cases prove little,
and at most 0.99.
"""

from __future__ import annotations

import collections
import math
from typing import TYPE_CHECKING

import torch
from benchmarks.diagnosing import drawn
from benchmarks.lab.figures import Figure, Report, Table, write

from paritas.core.diagnosis.stating import CONFIDENCE, Grade

if TYPE_CHECKING:
    from benchmarks.diagnosing.parts import Sample

# After a look at single faults that changes what is stated, there must be others here. The four
# wrong ones at operators were looked at after they were counted: the next count needs others.
AT_OPERATORS = range(289)
AT_OUTPUTS = range(400)


def count(told: list[Sample], grade: Grade) -> tuple[int, int]:
    """The statements of a class that are right, and all of them."""
    group = [one for one in told if one.said and one.grade == str(grade)]
    return sum(one.outcome == "right" for one in group), len(group)


def confidence(right: int, cases: int) -> float:
    """The share that is stated."""
    return min(0.99, math.floor(100 * (right + 1) / (cases + 2)) / 100)


def shares(place: str, told: list[Sample]) -> list[Figure]:
    """Right of the faults with a word, and wrong of all."""
    outcomes = collections.Counter(one.outcome for one in told)
    named = [one for one in told if one.kinds]
    right = sum(one.outcome == "right" for one in named)
    wrong = f"{outcomes['wrong']} of {len(told)}; {outcomes['none']} without a statement"
    word = f"{right} of {len(named)} with a word"
    share = 100 * outcomes["wrong"] / len(told)
    return [
        Figure(f"wrong kind at an {place}", share, "%", 1.0, note=wrong),
        Figure(f"right kind at an {place}", 100 * right / len(named), "%", note=word),
    ]


def classes(told: dict[bool, list[Sample]]) -> Table:
    """Each class with its counts, what they give, and what is stated."""
    rows = []
    for at_output, samples in told.items():
        for grade in Grade:
            right, cases = count(samples, grade)
            place = "output" if at_output else "operator"
            stated = CONFIDENCE[grade, at_output][0]
            rows.append([place, str(grade), right, cases, confidence(right, cases), stated])
    columns = ["at an", "reproduced", "right", "cases", "confidence", "stated"]
    return Table("Confidence, counted", columns, rows)


def changes(place: str, told: list[Sample]) -> Table:
    """Right, none and wrong by what was done."""
    groups = collections.defaultdict(list)
    for one in told:
        groups[one.family.rpartition(": ")[2]].append(one)
    rows = []
    for name, group in sorted(groups.items()):
        outcomes = collections.Counter(one.outcome for one in group)
        instead = sorted({one.said for one in group if one.outcome == "wrong"})
        found = [outcomes[one] for one in ("right", "none", "wrong")]
        rows.append([name, *found, ", ".join(instead)])
    columns = ["fault", "right", "none", "wrong", "stated instead"]
    return Table(f"Faults at an {place}", columns, rows)


def report(told: dict[bool, list[Sample]]) -> Report:
    """All figures of what was said, by whether it was at an output."""
    places = (("operator", told[False]), ("output", told[True]))
    figures = [figure for place, samples in places for figure in shares(place, samples)]
    tables = [classes(told), *(changes(place, samples) for place, samples in places)]
    return Report("confidence", figures, tables, what=__doc__)


def main() -> None:
    torch.set_num_threads(1)
    told = {
        False: list(drawn.at_operators(AT_OPERATORS)),
        True: list(drawn.at_outputs(AT_OUTPUTS)),
    }
    for at_output, samples in told.items():
        for grade in Grade:
            right, cases = count(samples, grade)
            stated = confidence(right, cases)
            print(f"    (Grade.{grade.name}, {at_output}): ({stated}, {right}, {cases}),")
    write(report(told))


if __name__ == "__main__":
    main()
