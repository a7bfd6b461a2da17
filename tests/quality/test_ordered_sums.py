"""Sums of ordered terms: one term after the other, in the program's own dtype, is right.

The partial sums of sorted terms move far away from zero and come back, and each of them is rounded.
torch adds in blocks or pairs, and is far more accurate there than a kernel that adds in order. Such
a kernel passes. One that adds in a narrower dtype does not. The faults compute in the narrow dtype
only if they get float32, so that nothing but the native run can show them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import paritas
from paritas import VerifyConfig
from paritas.core.results.findings import Status

Add = Callable[[Tensor], Tensor]


def in_order(terms: Tensor) -> Tensor:
    """The running sums over the last dimension, each rounded."""
    sums = [terms[..., 0]]
    for place in range(1, terms.shape[-1]):
        sums.append(sums[-1] + terms[..., place])
    return torch.stack(sums, -1)


def in_bfloat16(terms: Tensor) -> Tensor:
    """The same with an accumulator of eight bits."""
    if terms.dtype is torch.float64:
        return in_order(terms)
    sums = [terms[..., 0]]
    for place in range(1, terms.shape[-1]):
        sums.append((sums[-1] + terms[..., place]).bfloat16().to(terms.dtype))
    return torch.stack(sums, -1)


def in_float16(terms: Tensor) -> Tensor:
    """The same with terms of eleven bits, as TF32 has."""
    return in_order(terms if terms.dtype is torch.float64 else terms.half().to(terms.dtype))


def summed(add: Add) -> Callable[..., Tensor]:
    return lambda x: add(x)[..., -1]


def averaged(add: Add) -> Callable[..., Tensor]:
    return lambda x: add(x.T)[..., -1] / x.shape[0]


def running(add: Add) -> Callable[..., Tensor]:
    return add


def product(add: Add) -> Callable[..., Tensor]:
    return lambda a, b: add((a[:, None] * b.T[None]).to(a.dtype))[..., -1]


def applied(add: Add) -> Callable[..., Tensor]:
    return lambda a, b: add(a * b)[..., -1]


def normalised(add: Add) -> Callable[..., Tensor]:
    def layer_norm(x: Tensor) -> Tensor:
        centred = x - add(x)[..., -1:] / x.shape[-1]
        squares = add(centred * centred)[..., -1:] / x.shape[-1]
        return centred * torch.rsqrt(squares + 1e-5)

    return layer_norm


def shares(add: Add) -> Callable[..., Tensor]:
    def softmax(x: Tensor) -> Tensor:
        powers = (x - x.amax(-1, keepdim=True)).exp()
        return powers / add(powers)[..., -1:]

    return softmax


def ordered(*shape: int, seed: int = 0) -> Tensor:
    """Sorted as a whole: from row to row, and in each row."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.reshape(-1).sort().values.reshape(shape)


def ordered_rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).sort(-1).values


OPERATORS: dict[str, tuple[Callable[..., Any], Any, tuple[Tensor, ...]]] = {
    "sum": (lambda x: x.sum(-1), summed, (ordered_rows(24, 300),)),
    "mean of columns": (lambda x: x.mean(0), averaged, (ordered(300, 24),)),
    "cumsum": (lambda x: x.cumsum(-1), running, (ordered_rows(24, 200),)),
    "matmul": (torch.matmul, product, (ordered(30, 50), ordered(50, 20, seed=2))),
    "matrix-vector product": (torch.mv, applied, (ordered(30, 200), ordered(200, seed=2))),
    "layer norm": (lambda x: F.layer_norm(x, x.shape[-1:]), normalised, (ordered_rows(24, 300),)),
    "softmax": (lambda x: x.softmax(-1), shares, (3 * ordered_rows(24, 200),)),
}


def status(name: str, add: Add) -> Status:
    reference, candidate, inputs = OPERATORS[name]
    config = VerifyConfig(raise_on_mismatch=False, verify_gradients=False)
    return paritas.verify(inputs, reference, candidate(add), config).status


@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize("name", OPERATORS)
def test_adding_in_order_is_right(name: str) -> None:
    assert status(name, in_order) is Status.EQUIVALENT


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("add", [in_bfloat16, in_float16])
def test_adding_in_a_narrower_dtype_is_degraded(name: str, add: Add) -> None:
    assert status(name, add) is Status.DEGRADED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("seed", "rows", "terms"), [(0, 16, 7), (1, 9, 9), (3, 9, 9), (10, 16, 7)])
def test_parts_of_a_product_may_be_rounded_and_added(dtype, seed, rows, terms, undiagnosed):
    # As on ranks, or in micro-batches. What is left where they cancel may be exact by chance.
    torch.manual_seed(seed)
    left, right = torch.randn(3, rows, terms).to(dtype), torch.randn(3, terms, 16).to(dtype)

    def in_parts(left, right):
        parts = zip(left.chunk(2, -1), right.chunk(2, 1), strict=True)
        first, second = (torch.bmm(*part) for part in parts)
        return first + second

    quiet = VerifyConfig(raise_on_mismatch=False)
    assert paritas.verify([left, right], torch.bmm, in_parts, quiet).passed
    wrong = paritas.verify([left, right], torch.bmm, lambda a, b: 0.9 * in_parts(a, b), quiet)
    assert not wrong.passed
