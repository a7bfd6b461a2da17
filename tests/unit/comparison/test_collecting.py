"""Python's search for unreachable objects, while a table grows."""

from __future__ import annotations

import gc

import pytest

from paritas.core.execution.executors import few_full_collections


def test_full_collections_are_rarer_within_and_as_before_afterwards():
    before = gc.get_threshold()
    with few_full_collections():
        within = gc.get_threshold()
    assert within[:2] == before[:2]
    assert within[2] > before[2]
    assert gc.get_threshold() == before


def test_an_error_within_leaves_them_as_before():
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), few_full_collections():
        1 / 0  # noqa: B018
    assert gc.get_threshold() == before


def test_comparisons_that_overlap_leave_them_as_before_whichever_ends_first():
    before = gc.get_threshold()
    first, second = few_full_collections(), few_full_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[2] > before[2]
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before
