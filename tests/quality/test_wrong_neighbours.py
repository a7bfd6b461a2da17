"""One wrong node beside each operator of torch's sample database: guard() names that node."""

from __future__ import annotations

import os

import pytest

from paritas._torch.global_state import quietly
from quality.wrong_neighbours import Case, cases, entries, named_node

WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
# Operators with several results, views, writes, random numbers, and results that are no floats.
USUAL = ("chunk", "topk", "native_batch_norm", "T", "index_put", "bernoulli")
MOST_WRONG = 0.03


def missed(names: tuple[str, ...] | None) -> tuple[list[str], int]:
    wrong: list[str] = []
    seen = 0
    for entry in entries(lambda name: names is None or name in names):
        for case in cases(entry):
            node = answer(case)
            seen += node is not None
            if node is not None and node != case.wrong:
                wrong.append(f"{case}; named: {node or 'none'}")
    return wrong, seen


def answer(case: Case) -> str | None:
    with quietly():
        return named_node(case)


@pytest.mark.filterwarnings("ignore")
def test_the_wrong_node_beside_an_operator_is_named() -> None:
    wrong, seen = missed(USUAL)
    assert not wrong, "\n".join(wrong)
    assert seen > len(USUAL)


@pytest.mark.slow
@pytest.mark.skipif(not WHOLE, reason="PARITAS_WHOLE_CORPUS=1 runs it")
@pytest.mark.filterwarnings("ignore")
def test_the_wrong_node_beside_any_operator_of_the_database_is_named() -> None:
    wrong, seen = missed(None)
    assert len(wrong) <= MOST_WRONG * seen, "\n".join(wrong)
