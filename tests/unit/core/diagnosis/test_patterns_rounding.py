"""A located operator that is less precise: which rounding repeats the candidate."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drawing import normal
from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.judging.failures import call_context
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.results.findings import Pattern

BF16, HALF = torch.bfloat16, torch.float16


X, W, B = normal(16, 64), normal(48, 64, seed=1) / 8, normal(48, seed=2)
IMAGE, KERNEL = normal(2, 4, 8, 8, seed=3), normal(6, 4, 3, 3, seed=4) / 6
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "linear": (F.linear, (X, W, B)),
    "matmul": (torch.matmul, (normal(2, 5, 64), W.t())),
    "addmm": (torch.ops.aten.addmm.default, (B, X, W.t())),
    "convolution": (torch.conv2d, (IMAGE, KERNEL)),
    "a + b": (operator.add, (X, W[0])),
    "a * b": (operator.mul, (X, W[0])),
    "sum": (torch.sum, (X, -1)),
    "softmax": (F.softmax, (X, -1)),
}


def stated(candidate: Tensor, target: Any, args: tuple[Any, ...]) -> Pattern | None:
    """What is said of a wrong result of a call."""
    right = target(*args)
    arbiter = target(*(one.double() if isinstance(one, Tensor) else one for one in args))
    context = call_context(target, args, {})
    return diagnose(candidate, right, arbiter=arbiter, context=context).best


def cast(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(one.to(dtype) if isinstance(one, Tensor) else one for one in args)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("name", CALLS)
def test_an_operator_computed_in_half_precision_is_run_so_again(
    name: str, dtype: torch.dtype
) -> None:
    target, args = CALLS[name]
    best = stated(target(*cast(args, dtype)).float(), target, args)
    assert best is not None
    assert best.kind == PatternKind.PRECISION
    assert best.sentence == f"computed in {str(dtype).removeprefix('torch.')}"
    assert best.evidence["bit for bit"] == 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("dtype", "words"), [(BF16, "bfloat16"), (HALF, "tf32 or float16")])
@pytest.mark.parametrize(
    ("name", "place"),
    [(name, number % 2) for number, name in enumerate(CALLS) if name not in {"sum", "softmax"}],
)
def test_one_rounded_operand_is_named(
    name: str, place: int, dtype: torch.dtype, words: str
) -> None:
    target, args = CALLS[name]
    rounded = [*args]
    rounded[place] = args[place].to(dtype).float()
    best = stated(target(*rounded), target, args)
    assert best is not None
    assert best.kind == PatternKind.PRECISION
    assert best.sentence == f"computed on input {place} rounded to {words}"


def test_operands_rounded_without_the_bias_are_named() -> None:
    best = stated(F.linear(X.bfloat16().float(), W.bfloat16().float(), B), F.linear, (X, W, B))
    assert best is not None
    assert best.sentence == "computed on inputs 0 and 1 rounded to bfloat16"


def accumulate(left: Tensor, right: Tensor, ends: list[int]) -> Tensor:
    """A product whose sum is rounded to bfloat16 at each of these ends."""
    total = torch.zeros(())
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        total = (total + left[..., start:end] @ right[start:end]).bfloat16().float()
    return total


@pytest.mark.parametrize("chunk", [1, 16, 32])
def test_a_sum_that_is_rounded_on_the_way_is_repeated(chunk: int) -> None:
    sums = accumulate(X, W.t(), list(range(chunk, 65, chunk)))
    best = stated(sums + B, F.linear, (X, W, B))
    assert best is not None
    assert best.kind == PatternKind.PRECISION
    every = "every term" if chunk == 1 else f"every {chunk} terms"
    assert best.sentence == f"accumulated in bfloat16: the sum is rounded after {every}"


def test_a_sum_in_an_unknown_order_is_known_by_its_format() -> None:
    best = stated(accumulate(X, W.t(), [5, 23, 40, 64]), torch.matmul, (X, W.t()))
    assert best is not None
    assert best.sentence == "computed in bfloat16: it can represent every value"


def test_a_method_of_a_tensor_is_run_again() -> None:
    context = call_context("sum", (X, -1), {}, is_method=True)
    best = diagnose(X.bfloat16().sum(-1).float(), X.sum(-1), context=context).best
    assert best is not None
    assert best.sentence == "computed in bfloat16"


NO_ROUNDING: dict[str, tuple[Any, tuple[Any, ...], Callable[[], Tensor]]] = {
    "a term less": (F.linear, (X, W, B), lambda: F.linear(X[:, :-1], W[:, :-1], B)),
    "small noise": (F.linear, (X, W, B), lambda: F.linear(X, W * (1 + 1e-3 * normal(48, 64)), B)),
    "other bias": (F.linear, (X, W, B), lambda: F.linear(X, W, B * 1.002)),
    "eps": (F.layer_norm, (X, (64,)), lambda: F.layer_norm(X, (64,), eps=1e-3)),
    "approximation": (F.gelu, (X,), lambda: F.gelu(X, approximate="tanh")),
    "small factor": (operator.mul, (X, W[0]), lambda: X * W[0] * (1 + 2**-9)),
    "fewer summed": (torch.sum, (X, -1), lambda: X[:, :-1].sum(-1)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NO_ROUNDING)
def test_a_small_error_that_no_rounding_repeats_is_no_loss_of_precision(name: str) -> None:
    target, args, wrong = NO_ROUNDING[name]
    best = stated(wrong(), target, args)
    assert best is None or best.kind != PatternKind.PRECISION
