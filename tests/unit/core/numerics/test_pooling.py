from __future__ import annotations

import math

import pytest
import torch

from drawing import normal64
from paritas.core.numerics.criterion import relative_rms
from paritas.core.numerics.pooling import MOST_SAMPLE, Magnitudes, pool, populations


def pooled(noise, truth):
    found = pool(noise, truth, 1.0)
    return found.by_class[Magnitudes.of(truth).classes(truth)]


def test_equal_noise_is_pooled_to_itself_for_small_values_and_large_ones():
    truth = normal64(64, 64)
    noise = 1e-6 * normal64(64, 64, seed=1)
    assert pooled(noise, truth) == pytest.approx(torch.full((64, 64), 1e-6).numpy(), rel=0.5)


@pytest.mark.parametrize("large", [1e6, 1e30, 1e300])
def test_the_noise_of_large_values_is_not_that_of_the_others(large):
    truth, noise = normal64(64, 64), 1e-6 * normal64(64, 64, seed=1)
    truth[::2, ::3] *= large
    noise[::2, ::3] *= large
    is_large = truth.abs() > large / 100
    found = pooled(noise, truth)
    assert float(found[truth.abs() < 10].max()) < 1e-5
    assert float(found[is_large].min()) > 1e-9 * large


def test_one_large_row_adds_little_to_the_noise_of_values_as_small_as_its_smallest():
    truth, noise = normal64(256, 256), 1e-6 * normal64(256, 256, seed=1)
    truth[3] *= 1e4
    noise[3] *= 1e4
    found = pooled(noise, truth)
    assert float(found[torch.arange(256) != 3].max()) < 1e-5  # of all: 6e-4


def test_noise_that_is_not_finite_is_left_out():
    truth, noise = normal64(100), torch.full((100,), 1e-6, dtype=torch.float64)
    noise[7], truth[8] = math.inf, math.nan
    assert bool(torch.isfinite(pooled(noise, truth)[truth.isfinite()]).all())


@pytest.mark.parametrize("fill", [-1e30, -1e9, 2.5e3])
def test_a_mask_is_a_population_of_its_own(fill):
    truth = normal64(32, 32)
    truth[truth > 0] = fill
    found = populations(truth)
    assert found.scales == (pytest.approx(abs(fill)), pytest.approx(1.0, rel=0.1))
    scale = found.scale(truth)
    assert bool((scale[truth == fill] == found.scales[0]).all())
    assert bool((scale[truth != fill] == found.scales[1]).all())


def test_values_that_cancel_and_tails_belong_to_the_others():
    truth = normal64(32, 32)
    truth[0, 0] = 1e-12
    assert len(populations(truth).scales) == 1
    tails = torch.softmax(20 * normal64(64, 64), dim=-1)
    assert len(populations(tails).scales) == 1


def test_zeros_belong_to_the_smallest_values():
    truth = normal64(32, 32).relu()
    truth[0, :5] = 1e20
    found = populations(truth)
    assert len(found.scales) == 2
    assert float(found.scale(truth)[truth == 0].max()) == found.least
    assert populations(torch.zeros(4)).least == 0.0


@pytest.mark.parametrize("left", [0.0, 1e-24])
def test_where_a_sum_cancels_chance_decides_what_is_left_and_the_noise_is_that_of_the_others(left):
    truth, noise = 1e-15 * normal64(32), 1e-6 * normal64(32, seed=1)
    truth[7], noise[7] = left, 0.0
    assert float(pooled(noise, truth)[7]) == pytest.approx(1e-6, rel=0.5)


def test_zeros_among_values_that_do_not_cancel_have_the_noise_of_zeros():
    truth, noise = normal64(32, 32), 1e-6 * normal64(32, 32, seed=1)
    truth[0, :9] = noise[0, :9] = 0.0
    noise[1, 1] = 2 * truth[1, 1]  # of one element, a decision
    assert not bool(pooled(noise, truth)[0, :9].any())


def test_zeros_are_not_pooled_with_noise_far_above_the_smallest_values():
    truth, noise = 1e-6 * normal64(64, 64), 1e-13 * normal64(64, 64, seed=1)
    truth[0], noise[0] = 1e-2 * normal64(64, seed=2), 1e-2 * normal64(64, seed=3)
    truth[1, :5] = noise[1, :5] = 0.0
    found = pooled(noise, truth)
    assert float(found[1:].max()) < 1e-12
    assert not bool(found[1, :5].any())


def test_a_large_value_that_no_sample_meets_is_a_population_of_its_own():
    truth = normal64(4 * MOST_SAMPLE)
    truth[1] = 1e30
    found = populations(truth)
    assert found.scale(truth)[1] == 1e30
    error = torch.full_like(truth, 1e-3)
    error[1] = 1e27
    assert relative_rms(error, truth) == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("factor", [1e-200, 3e-5, 2.0**-30, 7.0, 1e100])
def test_rescaling_changes_no_pool_and_no_population(factor):
    truth, noise = normal64(40, 40), normal64(40, 40, seed=1)
    truth[::2] *= 1e12
    left, right = pooled(noise, truth), pooled(factor * noise, factor * truth)
    assert right / factor == pytest.approx(left.numpy(), rel=1e-9)
    scales = populations(truth).scales, populations(factor * truth).scales
    assert scales[1] == pytest.approx([factor * scale for scale in scales[0]], rel=1e-9)
