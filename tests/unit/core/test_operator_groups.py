"""Groups of operators: each is registered, and no other can be asked for."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import zeros

import paritas.core.diagnosis.diagnose  # the groups that the patterns read
import paritas.mutants.planting  # noqa: F401  (the groups that the faults read)
from paritas.core.operators.catalogue import operators_of
from paritas.core.operators.definitions import GROUPS, Kind, Summation, belongs_to
from paritas.core.operators.summed_axes import summed_axes
from paritas.core.operators.terms import OutsideTheoryError


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


@pytest.mark.parametrize(
    ("name", "args", "summed"),
    [
        ("mm", (zeros(2, 3), zeros(3, 5)), {"x": ((1,), 3), "mat2": ((0,), 3)}),
        ("dot", (zeros(4), zeros(4)), {"x": ((0,), 4), "tensor": ((0,), 4)}),
        (
            "baddbmm",
            (zeros(5), zeros(2, 3, 4), zeros(2, 4, 5)),
            {"x": ((), 1), "batch1": ((2,), 4), "batch2": ((1,), 4)},
        ),
        ("sum", (zeros(2, 3, 4), [-1, 0]), {"x": ((0, 2), 8)}),
        ("mean", (zeros(2, 3),), {"x": ((0, 1), 6)}),
        ("sum", (zeros(()),), {"x": ((), 1)}),
        ("logsumexp", (zeros(2, 3), [1]), {"x": ((1,), 3)}),
        (
            "convolution",
            (zeros(1, 4, 8, 8), zeros(6, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 2),
            {"x": ((1, 2, 3), 128), "weight": ((1, 2, 3), 18)},
        ),
        (
            "convolution",
            (zeros(1, 6, 8, 8), zeros(6, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], True, [0, 0], 2),
            {"x": ((1, 2, 3), 192), "weight": ((0, 2, 3), 27)},
        ),
    ],
)
def test_the_axes_of_a_sum_are_those_of_its_formula(name, args, summed):
    axes = summed_axes(name, args, {"dtype": torch.float64})
    assert {key: (each.axes, each.terms) for key, each in axes.items()} == summed


def test_an_operator_without_a_formula_has_no_axes_to_read():
    with pytest.raises(OutsideTheoryError, match=r"no definition of aten\._trilinear"):
        summed_axes("_trilinear", (zeros(2),), {})
