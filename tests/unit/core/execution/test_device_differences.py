"""Pairs measured together come out as pairs measured one by one."""

from __future__ import annotations

import math

import pytest
import torch

from paritas.core.execution.differences import MOST_TOGETHER, SMALL, all_equal, differences
from paritas.core.numerics.gates import relative_difference
from paritas.core.numerics.metrics import bitwise_equal

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def noisy(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    reference = torch.randn(shape)
    return (reference * (1 + 0.01 * torch.randn(shape))).to(dtype), reference.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_figures_of_many_pairs_are_those_of_each(dtype):
    torch.manual_seed(0)
    count = MOST_TOGETHER // 512 + 3  # more than are taken at once
    pairs = [noisy((16, 32), dtype) for _ in range(count)]
    pairs += [noisy((), dtype), (pairs[0][0].t(), pairs[0][1].t())]
    for apart, pair in zip(differences(pairs), pairs, strict=True):
        assert apart is not None
        assert not apart.identical
        assert apart.sizes == pytest.approx(relative_difference(*pair), rel=1e-4)


def test_dtypes_may_be_mixed_and_what_is_large_or_empty_is_left_to_others():
    torch.manual_seed(0)
    small = [noisy((8,), dtype) for dtype in DTYPES * 2]
    odd = [noisy((SMALL + 1,), torch.float32), noisy((0,), torch.float32)]
    odd.append((torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64)))
    found = differences([*small, *odd])
    assert found[len(small) :] == [None, None, None]
    for apart, pair in zip(found, small, strict=False):
        assert apart is not None
        assert apart.sizes == pytest.approx(relative_difference(*pair), rel=1e-4)


def test_bits_tell_apart_what_subtraction_cannot():
    zero, tiny = torch.zeros(3), torch.full((3,), 1e-45)
    nan = torch.tensor([1.0, math.nan])
    pairs = [(zero, zero.clone()), (-zero, zero), (nan, nan.clone()), (tiny, zero)]
    assert [apart.identical for apart in differences(pairs) if apart] == [True, False, True, False]
    assert all(apart is not None and apart.sizes is None for apart in differences(pairs))


def test_a_difference_in_pieces_is_that_of_the_whole():
    torch.manual_seed(0)
    candidate, reference = noisy((3, 300_000), torch.float32)
    worst, mean, share = relative_difference(candidate, reference) or (0.0, 0.0, 0.0)
    apart = candidate.double() - reference.double()
    size = reference.double().square().mean().sqrt()
    # Norms are summed up in float32: it is the proportion that is asked for.
    assert worst == pytest.approx(float(apart.abs().max() / size), rel=1e-3)
    assert mean == pytest.approx(float(apart.square().mean().sqrt() / size), rel=1e-3)
    shares = apart.abs() / (apart.abs() + reference.abs())
    assert share == pytest.approx(float(shares.mean()), rel=1e-3)


def test_pairs_are_equal_together_where_they_are_equal_alone():
    torch.manual_seed(0)
    x, nan = torch.randn(4, 6), torch.tensor([math.nan])
    pairs = [
        (x, x.clone()),
        (x, x + 1e-6),
        (x.t(), x.t().clone()),
        (x, x.double()),
        (x, x[:2]),
        (torch.zeros(2), -torch.zeros(2)),
        (nan, -nan),
        (torch.arange(3), torch.arange(3)),
        (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64).conj()),
        (torch.zeros(0), torch.zeros(0)),
        (torch.tensor([True]), torch.tensor([False])),
    ]
    assert all_equal(pairs) == [bitwise_equal(*pair) for pair in pairs]
