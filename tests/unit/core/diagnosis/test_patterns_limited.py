"""Operands and arguments that were limited, and zeros that a function made something else of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drawing import normal
from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.judging.failures import call_context

aten = torch.ops.aten


A, B = normal(12, 20), normal(12, 20, seed=1)
SIZES = B.abs() + 0.1


def told(candidate: Tensor, target: Any, *args: Any) -> tuple[str, str]:
    found = diagnose(candidate, target(*args), context=call_context(target, args, {}))
    return ("", "") if found.best is None else (found.best.kind, found.best.sentence)


@pytest.mark.parametrize(
    ("candidate", "call", "said"),
    [
        (
            (10 * A).clamp(max=7.5).cos(),
            (aten.cos.default, 10 * A),
            "the argument of cos is limited to at most 7.5",
        ),
        (
            (10 * A).clamp(-9, 9).cos(),
            (aten.cos.default, 10 * A),
            "the argument of cos is limited to at least -9 and at most 9",
        ),
        (A / SIZES.clamp(min=0.5), (aten.div.Tensor, A, SIZES), "other is limited to at least 0.5"),
        (A * B.clamp(max=1), (aten.mul.Tensor, A, B), "other is limited to at most 1"),
    ],
    ids=["above", "both", "divisor", "factor"],
)
def test_what_was_limited_is_told_with_its_bounds(
    candidate: Tensor, call: tuple[Any, ...], said: str
) -> None:
    assert told(candidate, *call) == ("clipped", said)


def test_what_looks_limited_and_is_not() -> None:
    assert told(torch.ones_like(A), aten.cos.default, A)[0] != "clipped"
    assert told(A / SIZES.roll(1, 0), aten.div.Tensor, A, SIZES)[0] != "clipped"
    column = (A * B).index_fill(1, torch.tensor([2]), 1.5)
    assert told(column, aten.mul.Tensor, A, B)[0] == "constant"


def test_a_limit_in_one_row_is_not_a_constant() -> None:
    limited = torch.cat([A[:1].clamp(max=0.3), A[1:]])
    kind, said = told(limited.exp(), aten.exp.default, A)
    assert kind == "clipped"
    assert said.endswith("but only in a part of the result")


def test_zeros_before_a_function_are_told_from_another_constant() -> None:
    zeros = A.index_fill(1, torch.tensor([3]), 0.0).sigmoid()
    assert told(zeros, aten.sigmoid.default, A)[0] == "zeros"
    other = A.index_fill(1, torch.tensor([3]), 0.4).sigmoid()
    assert told(other, aten.sigmoid.default, A)[0] == "constant"
