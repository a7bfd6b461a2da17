"""Mistakes with any number, at any end, in any item: solved for or tried, and reproduced."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drawing import normal
from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.judging.failures import call_context

X, OTHER = normal(12, 40), normal(12, 40, seed=3)
POSITIVE = X.abs() + 0.01
WEIGHT, BIAS, SQUARE = 1 + 0.2 * normal(40, seed=4), normal(40, seed=5), normal(40, 40, seed=9)
BLOCK = normal(4, 6, 40)
IMAGE, KERNEL = normal(2, 6, 9, 9, seed=7), normal(6, 6, 3, 3, seed=8)
HEADS = tuple(normal(2, 2, 10, 8, seed=seed) for seed in (1, 2, 3))
PARTS = X.chunk(4, 1)
MASK = torch.arange(40) > 30
GROUPS = normal(4, 8, 5, 5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "sentence", "candidate", "call"),
    [
        (
            "eps",
            "eps is 0.02 instead of 1e-05",
            F.layer_norm(X, (40,), WEIGHT, BIAS, 0.02),
            (F.layer_norm, X, (40,), WEIGHT, BIAS, 1e-5),
        ),
        (
            "eps",
            "eps is 0.3 instead of 1e-05",
            F.group_norm(GROUPS, 4, None, None, 0.3),
            (F.group_norm, GROUPS, 4, None, None, 1e-5),
        ),
        (
            "wrong argument",
            "negative_slope is 0.37 instead of 0.01",
            F.leaky_relu(X, 0.37),
            (F.leaky_relu, X),
        ),
        (
            "wrong factor",
            "alpha is 0.37 instead of 1",
            torch.add(X, OTHER, alpha=0.37),
            (torch.add, X, OTHER),
        ),
        (
            "wrong factor",
            "the argument is multiplied by 1.3",
            torch.sigmoid(1.3 * X),
            (torch.sigmoid, X),
        ),
        (
            "eps",
            "eps (0.004) is added to the argument",
            torch.log(POSITIVE + 4e-3),
            ("log", POSITIVE),
        ),
        (
            "eps",
            "eps (0.0025) is added to the argument",
            X / (POSITIVE + 2.5e-3),
            (operator.truediv, X, POSITIVE),
        ),
        (
            "partial sum",
            "the first 8 of the 40 terms of each sum are missing",
            X[:, 8:] @ SQUARE[8:],
            (torch.mm, X, SQUARE),
        ),
        (
            "partial sum",
            "the last 8 elements are left out of the 24 along dims [0, 1]",
            BLOCK.flatten(0, 1)[:-8].sum(0),
            (torch.ops.aten.sum.dim_IntList, BLOCK, [0, 1]),
        ),
        (
            "partial sum",
            "the first 2 channels are left out of each sum over the 6 input channels",
            F.conv2d(IMAGE[:, 2:], KERNEL[:, 2:]),
            (F.conv2d, IMAGE, KERNEL),
        ),
        ("wrong index", "item 2 instead of item 1", PARTS[2], (operator.getitem, PARTS, 1)),
        (
            "shift",
            "taken from 3 on instead of 2",
            X[:, 3:13],
            (operator.getitem, X, (slice(None), slice(2, 12))),
        ),
        ("shift", "index is 9 instead of 3", X[9], (operator.getitem, X, 3)),
        ("scale", "scaled by 0.09000001", X * 0.3, (operator.truediv, X, 0.3)),
        ("other function", "abs instead of pow", X.abs(), (torch.square, X)),
        (
            "mask",
            "the mask is read from the other end along axis 0",
            X.masked_fill(MASK.flip(0), -math.inf),
            ("masked_fill", X, MASK, -math.inf),
        ),
        (
            "mask",
            "the mask is negated",
            X.masked_fill(~MASK, -math.inf),
            ("masked_fill", X, MASK, -math.inf),
        ),
        ("mask", "the mask is negated", X * ~MASK, (operator.mul, X, MASK.float())),
        (
            "permutation",
            "weight is read in the reverse order along axis 3",
            F.conv2d(IMAGE, KERNEL.flip(3)),
            (F.conv2d, IMAGE, KERNEL),
        ),
        ("transpose", "mat2 is transposed", X @ SQUARE.T, (torch.mm, X, SQUARE)),
    ],
)
def test_a_mistake_is_named_with_its_number_end_or_item(
    kind: str, sentence: str, candidate: Tensor, call: tuple[Any, ...]
) -> None:
    target, *args = call
    function = getattr(Tensor, target) if isinstance(target, str) else target
    found = diagnose(
        candidate,
        function(*args),
        context=call_context(target, args, {}, is_method=isinstance(target, str)),
    )
    assert found.best is not None
    assert (str(found.best.kind), found.best.sentence) == (kind, sentence)


def test_the_factor_of_attention_may_be_any_number() -> None:
    attend = F.scaled_dot_product_attention
    wrong = attend(*HEADS, scale=0.29)
    found = diagnose(wrong, attend(*HEADS), context=call_context(attend, HEADS, {}))
    assert found.best is not None
    assert found.best.kind == "wrong factor"
    assert "scale is 0.29 instead of 0.3535534" in found.best.sentence
