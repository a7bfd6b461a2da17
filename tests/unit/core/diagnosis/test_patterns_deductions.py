"""Mistakes that the candidate shows: which terms count, what was read, which keys were seen."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional as F

from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.judging.failures import call_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

DRAW = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAW, dtype=torch.float64)


X, W, B = normal(2, 10, 48), normal(40, 48), normal(40)
LEFT, RIGHT = normal(4, 12, 16), normal(4, 16, 20)
IMAGE, KERNEL = normal(2, 8, 10, 10), normal(12, 8, 3, 3)
LINE, GROUPED = normal(2, 8, 10), normal(8, 4, 3)
TABLE, TOKENS = normal(50, 16), torch.tensor([[1, 4, 9, 33, 47], [8, 8, 20, 49, 2]])
Q, K, V = normal(2, 4, 12, 16), normal(2, 4, 12, 16), normal(2, 4, 12, 16)
FEW = normal(2, 2, 12, 16), normal(2, 2, 12, 16)
PLACES = torch.arange(12)
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
GRADIENT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def changed(value: Tensor, place: Any, by: Tensor | float) -> Tensor:
    value = value.clone()
    value[place] = by
    return value


def attend(mask: Tensor | None = None, key: Tensor = K, value: Tensor = V) -> Tensor:
    scores = Q @ key.mT / 4
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ value


def diagnosed(candidate: Tensor, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    reference = function(*args, **kwargs)
    reference = reference if isinstance(reference, torch.Tensor) else reference[0]
    return diagnose(candidate, reference, context=call_context(function, args, kwargs))


CAUSAL = torch.ones(12, 12, dtype=torch.bool).tril()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "words", "candidate", "function", "args", "kwargs"),
    [
        (
            "partial sum",
            "number 17 of the 48 terms of each sum is left out",
            F.linear(changed(X, (..., 17), 0.0), W, B),
            F.linear,
            (X, W, B),
            {},
        ),
        (
            "doubled reduction",
            "numbers 8 to 15 of the 48 terms of each sum count twice",
            F.linear(X, W, B) + X[..., 8:16] @ W[:, 8:16].T,
            F.linear,
            (X, W, B),
            {},
        ),
        (
            "missing bias",
            "the bias is left out, but only in a part of the result",
            F.linear(X, W, changed(B, slice(32, None), 0.0)),
            F.linear,
            (X, W, B),
            {},
        ),
        (
            "wrong index",
            "other slices of mat2 are read along axis 0",
            LEFT @ RIGHT[[0, 2, 2, 1]],
            torch.bmm,
            (LEFT, RIGHT),
            {},
        ),
        (
            "zeros",
            "weight: 11.1% of the elements are read as 0",
            F.conv2d(IMAGE, changed(KERNEL, (..., 1, 2), 0.0)),
            F.conv2d,
            (IMAGE, KERNEL),
            {},
        ),
        (
            "wrong index",
            "the input channels of the first group are read",
            F.conv1d(LINE[:, :4].repeat(1, 2, 1), GROUPED, groups=2),
            F.conv1d,
            (LINE, GROUPED),
            {"groups": 2},
        ),
        (
            "wrong argument",
            "dilation is [1, 1] instead of [2, 2]",
            F.conv2d(IMAGE, KERNEL, padding=1),
            F.conv2d,
            (IMAGE, KERNEL),
            {"padding": 2, "dilation": 2},
        ),
        (
            "wrong index",
            "other rows are read than the indices say",
            F.embedding(TOKENS % 32, TABLE),
            F.embedding,
            (TOKENS, TABLE),
            {},
        ),
        (
            "mask",
            "the queries see other keys than the mask allows",
            attend(PLACES[:, None] // 4 >= PLACES // 4),
            F.scaled_dot_product_attention,
            (Q, K, V),
            {"is_causal": True},
        ),
        (
            "partial sum",
            "key 5 is left out",
            attend(PLACES != 5),
            F.scaled_dot_product_attention,
            (Q, K, V),
            {},
        ),
        (
            "doubled reduction",
            "some keys count more than once, the first of them is key 11 of 12",
            attend(None, torch.cat([K, K[:, :, -1:]], 2), torch.cat([V, V[:, :, -1:]], 2)),
            F.scaled_dot_product_attention,
            (Q, K, V),
            {},
        ),
        (
            "wrong index",
            "heads read the keys and values of other heads",
            attend(None, *(one.repeat(1, 2, 1, 1) for one in FEW)),
            ATTENTION,
            (Q, *FEW),
            {},
        ),
        (
            "mask",
            "other elements are masked",
            Q[0, 0, :, :12].triu(),
            torch.tril,
            (Q[0, 0, :, :12],),
            {},
        ),
        (
            "copy",
            "copied from 8 places before along axis 2",
            changed(F.linear(X, W), (..., slice(32, 40)), F.linear(X, W)[..., 24:32]),
            F.linear,
            (X, W),
            {},
        ),
        (
            "permutation",
            "result are exchanged along axis 2",
            F.linear(X, W, B).roll(20, -1),
            F.linear,
            (X, W, B),
            {},
        ),
    ],
)
def test_what_a_result_shows_of_its_mistake_is_said(
    kind: str,
    words: str,
    candidate: Tensor,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    found = diagnosed(candidate, function, *args, **kwargs).best
    assert found is not None
    assert (str(found.kind), found.sentence.partition(": in ")[0][-len(words) :]) == (kind, words)


def test_the_gradients_of_attention_are_written_out_with_their_mistakes() -> None:
    out, sums = ATTENTION(Q, K, V, 0.0, True)
    grad = normal(*out.shape)
    args = (grad, Q, K, V, out, sums, 0.0, True)
    weights = (Q @ K.mT / 4).masked_fill(~CAUSAL, -math.inf).softmax(-1)
    candidate = weights * (grad @ V.mT) @ K / 4
    found = diagnosed(candidate, GRADIENT, *args).best
    assert found is not None
    assert str(found.kind) == "missing operand"
    assert "the sum over the row is left out of the gradient of the scores" in found.sentence


def test_values_that_no_mistake_gives_get_no_kind() -> None:
    assert diagnosed(normal(2, 10, 40), F.linear, X, W, B).best is None
    assert diagnosed(normal(*Q.shape), F.scaled_dot_product_attention, Q, K, V).best is None
    assert diagnosed(normal(2, 5, 16), F.embedding, TOKENS, TABLE).best is None
