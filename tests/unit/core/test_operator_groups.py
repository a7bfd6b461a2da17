"""Groups of operators: each is registered, and no other can be asked for."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

import paritas.core.diagnosis.diagnose  # the groups that the patterns read
import paritas.mutants.planting  # noqa: F401  (the groups that the faults read)
from paritas.core.operators.catalogue import operators_of
from paritas.core.operators.definitions import GROUPS, Kind, Summation, belongs_to


def test_every_group_has_operators():
    assert GROUPS.keys() == {*get_args(Summation), *get_args(Kind)}
    assert all(GROUPS.values())


@pytest.mark.parametrize("group", get_args(Kind))
def test_members_of_a_group_are_operators(group):
    assert all(hasattr(torch.ops.aten, name) for name in operators_of(group))


def test_an_unknown_group_is_refused():
    with pytest.raises(KeyError):
        operators_of("norms of no kind")


def test_an_operator_sums_in_one_way():
    with pytest.raises(ValueError, match="mm sums in two ways"):
        belongs_to("sum", "mm")
