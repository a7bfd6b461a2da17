"""Small tensors summarized together: what is found of one is what is found of it alone."""

from __future__ import annotations

import random

import pytest
import torch

from paritas.core.numerics.sketch import sketch
from paritas.core.numerics.statistics import summarize, summarize_all

SIZES = [1, 2, 15, 16, 17, 100, 1023, 4096, 4099, 12288, 65536, 70000]


def same(tensors, *, sketches=True):
    for tensor, row in zip(tensors, summarize_all(tensors, sketches=sketches), strict=True):
        assert row.statistics == summarize(tensor)
        if sketches:
            expected = sketch(tensor)
            assert row.sketch.dtype == expected.dtype
            assert torch.equal(row.sketch, expected)
        else:
            assert row.sketch is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sketches", [True, False])
def test_each_is_summarized_as_if_it_were_alone(dtype, sketches):
    torch.manual_seed(0)
    tensors = [torch.randn(size).to(dtype) for size in SIZES for _ in range(size % 5 + 1)]
    random.Random(0).shuffle(tensors)
    same(tensors, sketches=sketches)


def test_the_company_changes_nothing():
    torch.manual_seed(1)
    tensors = [torch.randn(5, 7, 100) * 10.0**k for k in range(-20, 20)]
    whole = summarize_all(tensors, sketches=True)
    for count in (4, 5, 17, 39):
        some = summarize_all(tensors[-count:], sketches=True)
        for one, other in zip(some, whole[-count:], strict=True):
            assert one.statistics == other.statistics
            assert torch.equal(one.sketch, other.sketch)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 1e-42, 0.0, -0.0])
@pytest.mark.parametrize("place", [slice(3, 4), slice(None, None, 2), slice(None)])
def test_odd_values_are_counted_in_their_own_row(odd, place):
    torch.manual_seed(2)
    tensors = [torch.randn(64) for _ in range(8)]
    tensors[3][place] = odd
    same(tensors)


def test_sums_that_no_float32_holds_stay_as_wide_as_they_are():
    tensors = [torch.full((4096,), 3e38), *(torch.ones(4096) for _ in range(4))]
    same(tensors)


def test_other_kinds_of_tensors_come_along():
    base = torch.arange(24.0).reshape(4, 6)
    others = [base.t(), base.double(), base.long(), base > 3, base.to(torch.complex64)]
    same([*others, torch.empty(0), *(base + k for k in range(5))])
