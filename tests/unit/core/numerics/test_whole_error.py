from __future__ import annotations

import math

import pytest
import torch

from paritas.core.numerics.criterion import UNIT_F32
from paritas.core.numerics.whole_error import WholeError, WholeNoise, whole_error


@pytest.mark.parametrize("scale", [1.0, 2.0**-400, 2.0**400])
def test_the_whole_error_is_its_size_and_the_factor_that_all_elements_share(scale):
    generator = torch.Generator().manual_seed(0)
    truth = scale * torch.randn(300, generator=generator, dtype=torch.float64)
    found = whole_error(1.25 * truth, truth)
    assert found.factor == pytest.approx(0.25, rel=1e-12)
    assert found.size == pytest.approx(0.25, rel=1e-12)
    apart = torch.cat([truth[150:], -truth[:150]])  # orthogonal
    assert whole_error(truth + apart, truth).factor == pytest.approx(0.0, abs=1e-15)


def test_there_is_no_whole_error_of_nothing_of_another_shape_or_of_what_is_not_finite():
    empty = torch.zeros(0)
    assert whole_error(empty, empty) is None
    for value in (math.nan, math.inf):
        assert whole_error(torch.tensor([1.0, value]), torch.ones(2)) is None
        assert whole_error(torch.ones(2), torch.tensor([1.0, value])) is None
    assert whole_error(torch.ones(3), torch.ones(2)) is None
    zero = whole_error(torch.ones(2), torch.zeros(2))
    assert (zero.size, zero.factor) == (1.0, 0.0)
    parts = whole_error(torch.tensor([2.0 + 2j]), torch.tensor([1.0 + 1j]))
    assert (parts.size, parts.factor) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("runs", "most"),
    [
        # Every run errs as much: of 10,000 elements as many are independent.
        ([1.0] * 12, 2.04),
        # The elements err together, so that the size is that of one number.
        ([0.1, 2.3, 0.4, 1.1, 0.05, 0.8, 1.6, 0.3, 0.9, 0.2, 0.6, 0.7], 4.5),
    ],
)
def test_a_size_may_be_twice_the_usual_and_more_if_that_varies(runs, most):
    noise = WholeNoise(
        own=WholeError(0.5, 0.0), rounding=0.0, numel=10_000,
        runs=tuple(WholeError(size, 0.0) for size in runs),
    )  # fmt: skip
    assert noise.excess(WholeError(0.98 * most, 0.0), last=True).size <= 1
    assert noise.excess(WholeError(1.35 * most, 0.0), last=True).size > 1


def test_results_may_be_rounded_once_more():
    noise = WholeNoise(own=WholeError(0.0, 0.0), rounding=1e-3, numel=100)
    assert noise.excess(WholeError(0.001, 0.0), last=True).size == pytest.approx(1.0)


@pytest.mark.parametrize(("cuts", "passes"), [(True, True), (False, False)])
def test_tensor_cores_may_cut_digits_off(cuts, passes):
    # Attention in float32 by products in TF32 against the formula, as measured on an H200.
    runs = (WholeError(3.3 * UNIT_F32, 0.3 * UNIT_F32),) * 12
    noise = WholeNoise(
        own=WholeError(1.2 * UNIT_F32, 0.1 * UNIT_F32), rounding=UNIT_F32,
        numel=10_000, runs=runs, cuts=cuts,
    )  # fmt: skip
    found = WholeError(9 * UNIT_F32, -7 * UNIT_F32)
    assert (noise.excess(found, last=True).worst <= 1) is passes
