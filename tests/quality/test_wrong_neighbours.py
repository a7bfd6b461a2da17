"""One wrong node beside each operator of torch's sample database: guard() names that node."""

from __future__ import annotations

import os
from typing import Any

import pytest
from benchmarks.places.neighbours import NOT_VISIBLE, RIGHT, answers, entries

WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
# Operators with several results, views, writes, random numbers, results that are no floats, shapes
# that depend on values, statistics that are updated, and results that are conjugated later.
USUAL = ("topk", "T", "index_put", "bernoulli", "nonzero", "nn.functional.batch_norm", "fft.ifft")
MOST_WRONG = 0.03
# The workers of xdist share these.
PARTS = 32


def missed(chosen: list[Any]) -> tuple[list[str], int]:
    counted = [one for entry in chosen for one in answers(entry) if one[0] != NOT_VISIBLE]
    return [words for answer, words in counted if answer != RIGHT], len(counted)


@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.filterwarnings("ignore")
def test_the_wrong_node_beside_an_operator_is_named() -> None:
    wrong, seen = missed(entries(USUAL.__contains__))
    assert not wrong, "\n".join(wrong)
    assert seen > len(USUAL)


@pytest.mark.slow
@pytest.mark.skipif(not WHOLE, reason="PARITAS_WHOLE_CORPUS=1 runs it")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_the_wrong_node_beside_any_operator_of_the_database_is_named(part: int) -> None:
    wrong, seen = missed(entries()[part::PARTS])
    assert len(wrong) <= MOST_WRONG * seen, "\n".join(wrong)
