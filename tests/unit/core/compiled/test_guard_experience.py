"""What earlier calls teach a guard, and what they never excuse."""

from __future__ import annotations

import torch

from paritas.core.compiled.guarded_calls import Experience
from paritas.core.numerics.gates import MOST_LEARNED, error_ratios, relative_difference


def test_without_experience_nothing_is_explained():
    experience = Experience()
    assert not experience.explains_difference("y", (0.0, 0.0, 0.0))
    assert not experience.explains_errors("y", (0.0, 0.0, 0.0))


def test_a_difference_no_larger_than_before_is_explained_and_a_larger_one_is_not():
    experience = Experience()
    experience.learn("y", (4e-7, 1e-7, 1e-7), (2.0, 1.0, 1.0))
    assert experience.explains_difference("y", (5e-7, 1.2e-7, 1e-7))
    assert not experience.explains_difference("y", (7e-7, 1e-7, 1e-7))
    assert not experience.explains_difference("y", (4e-7, 2e-7, 1e-7))
    assert not experience.explains_difference("y", (4e-7, 1e-7, 2e-7))
    assert not experience.explains_difference("z", (1e-9, 1e-9, 1e-9))
    assert not experience.explains_difference("y", None)


def test_errors_far_beyond_the_reference_s_own_are_not_learnt():
    experience = Experience()
    experience.learn("y", None, (MOST_LEARNED * 2, 1.0, 1.0))
    assert not experience.explains_errors("y", (1.0, 1.0, 1.0))


def test_a_relative_difference_is_in_multiples_of_the_typical_value():
    reference = torch.full((4, 25), 2.0)
    candidate = reference.clone()
    candidate[0, 0] += 2.0
    worst, rms, share = relative_difference(candidate, reference)
    assert worst == 1.0
    assert abs(share - 0.005) < 1e-6
    assert abs(rms - 0.1) < 1e-6
    scaled = relative_difference(candidate * 1e-20, reference * 1e-20)
    assert scaled is None or abs(scaled[0] - 1.0) < 1e-5  # never wrong, at most undecided


def test_what_is_not_finite_or_all_zero_has_no_relative_difference():
    ones = torch.ones(3)
    assert relative_difference(ones, torch.zeros(3)) is None
    assert relative_difference(torch.tensor([1.0, float("nan"), 1.0]), ones) is None
    assert relative_difference(ones, torch.tensor([1.0, float("inf"), 1.0])) is None


def test_halves_are_summed_in_more_than_their_own_range():
    reference = torch.full((1 << 16,), 200.0, dtype=torch.float16)
    worst, rms, _ = relative_difference(reference * 1.01, reference)
    assert abs(worst - 0.01) < 1e-3
    assert abs(rms - 0.01) < 1e-3


def test_error_ratios_compare_like_with_like_whatever_the_strides():
    arbiter = torch.zeros(2, 3, 4, 5, dtype=torch.float64)
    reference = torch.full((2, 3, 4, 5), 1e-7).to(memory_format=torch.channels_last)
    candidate = torch.full((2, 3, 4, 5), 2e-7)
    worst, rms, _ = error_ratios(candidate, reference, arbiter)
    assert abs(worst - 2) < 1e-6
    assert abs(rms - 2) < 1e-6
    assert error_ratios(candidate, arbiter.float(), arbiter) is None


def test_large_values_do_not_hide_that_later_calls_differ_in_all_others():
    reference = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    reference[0, 0] = 1e12
    near = reference * (1 + 1e-6)
    experience = Experience()
    experience.learn("y", relative_difference(near, reference), None)
    assert experience.explains_difference("y", relative_difference(near, reference))
    faulty = reference.clone()
    faulty[1:] *= 0.5
    assert not experience.explains_difference("y", relative_difference(faulty, reference))
    arbiter = reference.double() * (1 - 1e-6)
    experience.learn("y", None, error_ratios(near, reference, arbiter))
    assert not experience.explains_errors("y", error_ratios(faulty, reference, arbiter))
