"""Every wrong rule is caught, in every dtype; no right one is called wrong, on any ranks."""

from __future__ import annotations

import os

import pytest
import torch

from paritas.core.results.findings import Status
from paritas.sharding.operators.recipe_checks import check_recipe
from quality.partition_corpus import RIGHT
from quality.partition_corpus_wrong import WRONG

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
RANKS = (2, 3, 4, 8)
WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
# In float64 the library of annotations is checked as well, right and wrong.
WRONG_IN = DTYPES if WHOLE else DTYPES[1:]
# Each dtype and each number of ranks in the usual run, but not each with each.
RIGHT_ON = (
    [(dtype, ranks) for dtype in DTYPES for ranks in RANKS]
    if WHOLE
    else [(torch.float64, 2), (torch.float32, 3), (torch.bfloat16, 4), (torch.float32, 8)]
)


def share(cases, turn, turns):
    """All; in the usual run each in one of the turns."""
    return cases if WHOLE else cases[turn::turns]


def _operator(case):
    return case.name.partition(" option ")[0].rstrip(" 01").removesuffix(" row")


def test_the_corpus_is_as_large_as_it_says():
    assert len(WRONG) >= 60
    assert len(RIGHT) >= 150
    assert len({_operator(case) for case in RIGHT}) >= 40
    assert len({case.name for case in [*RIGHT, *WRONG]}) == len(RIGHT) + len(WRONG)


@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize("dtype", WRONG_IN, ids=str)
def test_every_wrong_rule_is_called_different(dtype):
    missed = {}
    for case in share(WRONG, WRONG_IN.index(dtype), len(WRONG_IN)):
        verdict = check_recipe(case.make(dtype), case.recipe, 2)
        if verdict.status is not Status.DIFFERENT:
            missed[case.name] = str(verdict)
    assert missed == {}


@pytest.mark.parametrize(("dtype", "ranks"), RIGHT_ON, ids=str)
def test_no_right_rule_is_called_wrong(dtype, ranks):
    accused = {}
    for case in share(RIGHT, RIGHT_ON.index((dtype, ranks)), len(RIGHT_ON)):
        verdict = check_recipe(case.make(dtype), case.recipe, ranks, strict=True)
        if not verdict.passed:
            accused[case.name] = str(verdict)
    assert accused == {}
