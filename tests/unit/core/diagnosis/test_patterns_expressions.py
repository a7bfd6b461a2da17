"""Another expression of the same operands: functions, reductions, quotients, altered operands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drawing import normal
from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.judging.failures import call_context

if TYPE_CHECKING:
    from paritas.core.results.findings import Pattern

aten = torch.ops.aten


X, GRADIENT, OTHER = normal(16, 20), normal(16, 20, seed=1), normal(16, 20, seed=2)
POSITIVE, SIGNAL = X.abs() + 0.3, normal(4, 6, 10)
WHOLE, PARTS = (9 * X).long(), (3 * OTHER).abs().long() + 1


def patterns_of(candidate: Tensor, call: tuple[Any, ...]) -> tuple[Pattern, ...]:
    function, *args = call
    reference = function(*args)
    return diagnose(candidate, reference, context=call_context(function, args, {})).patterns


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "sentence", "candidate", "call"),
    [
        (
            "other function",
            "0.5 * softsign(x) + 0.5 instead of sigmoid",
            0.5 + 0.5 * X / (1 + X.abs()),
            (torch.sigmoid, X),
        ),
        (
            "other function",
            "(1 + x) / 2 is used for each x of the result",
            0.5 + 0.5 * X.tanh(),
            (torch.tanh, X),
        ),
        (
            "other function",
            "the square of the result is used",
            (WHOLE - PARTS) ** 2,
            (torch.sub, WHOLE, PARTS),
        ),
        (
            "tie-breaking",
            "halves are rounded up, not to even",
            (WHOLE / 2 + 0.5).floor(),
            (torch.round, WHOLE / 2),
        ),
        (
            "other function",
            "0.5 * (self + other) instead of minimum",
            (X + OTHER) / 2,
            (torch.minimum, X, OTHER),
        ),
        (
            "other function",
            "trunc(self / other) instead of floor_divide",
            (WHOLE / PARTS).trunc().long(),
            (torch.floor_divide, WHOLE, PARTS),
        ),
        (
            "other function",
            "step 1, rsub(output, 1): 1 - x is used for each x of the result",
            GRADIENT * X.sigmoid().square(),
            (aten.sigmoid_backward.default, GRADIENT, X.sigmoid()),
        ),
        (
            "approximation",
            "a polynomial of degree 3, 1 x - 0.1667 x^3, instead of sin",
            X - X**3 / 6,
            (torch.sin, X),
        ),
        (
            "precision",
            "one value for each 0.125 of self: it is rounded to the nearest of such steps",
            F.gelu((8 * X).round() / 8),
            (F.gelu, X),
        ),
        (
            "approximation",
            "turns of 6.28 instead of 6.283185 are subtracted from self",
            torch.cos(9 * X - 6.28 * (9 * X / 6.28).round()),
            (torch.cos, 9 * X),
        ),
        (
            "clipped",
            "the argument of cos is limited to at most 8",
            torch.cos((9 * X).clamp(max=8)),
            (torch.cos, 9 * X),
        ),
        (
            "wrong reduction",
            "the median of the line instead of the mean of the line",
            X.median(1).values,
            (torch.mean, X, 1),
        ),
        (
            "wrong reduction",
            "the running maximum of the line instead of the running sum of the line",
            X.cummax(1).values,
            (torch.cumsum, X, 1),
        ),
        (
            "missing operand",
            "it is not divided by the lengths",
            (X * OTHER).sum(1),
            (F.cosine_similarity, X, OTHER),
        ),
        (
            "wrong statistics",
            (
                "the sum of a * b divided by their number instead of the sum of a * b divided by "
                "both lengths"
            ),
            (X * OTHER).mean(1),
            (F.cosine_similarity, X, OTHER),
        ),
        (
            "other function",
            "the positive values over their sum instead of the softmax",
            X.relu() / X.relu().sum(1, keepdim=True),
            (torch.softmax, X, 1),
        ),
        (
            "other function",
            "sqrt(avg_pool2d(square(x))) instead of avg_pool2d(x)",
            F.avg_pool1d(SIGNAL.square(), 2).sqrt(),
            (F.avg_pool1d, SIGNAL, 2),
        ),
    ],
)
def test_the_expression_that_reproduces_the_candidate_is_stated(
    kind: str, sentence: str, candidate: Tensor, call: tuple[Any, ...]
) -> None:
    (best, *_) = patterns_of(candidate, call)
    assert (best.kind, best.sentence) == (kind, sentence)


def test_a_function_that_nobody_knows_is_shown_by_examples() -> None:
    candidate = torch.sin(1.3 * X) * X.abs() ** 0.7 + 0.1 * X
    (best,) = patterns_of(candidate, (F.gelu, X))
    assert best.kind == "other function"
    assert best.sentence.startswith("another function of the same input: at -0.8")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("candidate", "call"),
    [
        pytest.param(F.gelu(X) + 0.05 * GRADIENT, (F.gelu, X), id="noise"),
        pytest.param(torch.where(GRADIENT > 0, F.gelu(X), X**3), (F.gelu, X), id="some elements"),
        pytest.param(F.gelu(X) * (1 + 0.1 * GRADIENT[0]), (F.gelu, X), id="columns"),
        pytest.param(F.gelu(X * (1 + 0.1 * GRADIENT[0])), (F.gelu, X), id="columns inside"),
        pytest.param(
            0.7 * F.gelu(X) + 0.3 * F.gelu(X.roll(1, 1)), (F.gelu, X), id="its neighbour, too"
        ),
        pytest.param(X * OTHER + 0.1 * GRADIENT, (torch.mul, X, OTHER), id="noise on a product"),
        pytest.param(X.mean(1) + 0.01 * OTHER[:, 0], (torch.mean, X, 1), id="noise on a mean"),
        pytest.param(X.softmax(1) + 0.001 * OTHER, (torch.softmax, X, 1), id="noise on softmax"),
    ],
)
def test_what_is_no_function_of_the_operands_is_not_called_one(
    candidate: Tensor, call: tuple[Any, ...]
) -> None:
    assert not patterns_of(candidate, call)


def test_a_factor_or_a_limit_is_not_called_another_function() -> None:
    (scaled, *_) = patterns_of(1.37 * F.gelu(X), (F.gelu, X))
    (limited, *_) = patterns_of((X + OTHER).clamp(-1, 1), (torch.add, X, OTHER))
    (moved, *_) = patterns_of(X.tanh() + 0.37, (torch.tanh, X))
    (whole, *_) = patterns_of(WHOLE - PARTS + 2, (torch.sub, WHOLE, PARTS))
    assert (scaled.kind, limited.kind) == ("scale", "clipped")
    assert (moved.kind, whole.kind) == ("offset", "offset")
