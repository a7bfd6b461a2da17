from __future__ import annotations

import inspect
import math
import re

import pytest
import torch

from paritas.core.errors import UsageError
from paritas.core.numerics.checkers import (
    AllCloseValueChecker,
    AutomaticValueChecker,
    FullValueChecker,
    ValueChecker,
)
from paritas.core.results.findings import Status

NAN, INF = math.nan, math.inf
EVERY = [AutomaticValueChecker, AllCloseValueChecker, FullValueChecker]


def floats(n=256, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def status(checker, reference, candidate):
    return checker.check(reference, candidate).status


# --- names and arguments --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (AutomaticValueChecker, ["pcc", "rtol", "atol", "dissimilarity_threshold"]),
        (AllCloseValueChecker, ["rtol", "atol"]),
        (FullValueChecker, ["pcc", "rtol", "atol", "dissimilarity_threshold"]),
    ],
)
def test_the_names_of_the_arguments_are_those_people_know(kind, names):
    assert list(inspect.signature(kind).parameters) == names
    assert isinstance(kind(), ValueChecker)


def test_the_usual_spellings_work():
    AutomaticValueChecker(pcc=0.95, rtol=1e-3)
    AutomaticValueChecker(pcc=0.95, rtol=1e-3, atol=1e-8, dissimilarity_threshold=0.9)
    AllCloseValueChecker(rtol=1e-3)
    FullValueChecker(pcc=0.95, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "value", "span"),
    [
        ("pcc", 1.5, "-1 to 1"),
        ("pcc", -1.01, "-1 to 1"),
        ("pcc", NAN, "-1 to 1"),
        ("pcc", "0.9", "-1 to 1"),
        ("pcc", True, "-1 to 1"),
        ("rtol", -1e-3, "0 to inf"),
        ("rtol", NAN, "0 to inf"),
        ("atol", -1, "0 to inf"),
        ("atol", "tight", "0 to inf"),
        ("dissimilarity_threshold", 1.1, "0 to 1"),
        ("dissimilarity_threshold", -0.1, "0 to 1"),
    ],
)
def test_an_argument_out_of_range_is_a_usage_error_that_names_the_value(name, value, span):
    for kind in EVERY:
        if name not in inspect.signature(kind).parameters:
            continue
        with pytest.raises(UsageError) as caught:
            kind(**{name: value})
        assert str(caught.value) == f"{name} must be a number from {span}, got {value!r}"


@pytest.mark.parametrize("name", ["rtol", "atol"])
def test_none_is_no_tolerance(name):
    with pytest.raises(UsageError, match=f"{name} must be a number"):
        AllCloseValueChecker(**{name: None})


# --- the automatic checker ------------------------------------------------------------------------


def test_a_scale_error_passes_a_correlation_and_not_the_default():
    x = floats()
    assert status(AutomaticValueChecker(), x, x * 1.01) is Status.DIFFERENT
    judgement = AutomaticValueChecker(pcc=0.95).check(x, x * 1.01)
    assert judgement.status is Status.EQUIVALENT
    assert judgement.metrics.pcc == pytest.approx(1.0)


def test_a_correlation_that_is_given_is_enforced():
    x = floats()
    y = x + 0.3 * floats(seed=1)
    pcc = AutomaticValueChecker(pcc=0.9).check(x, y).metrics.pcc
    assert status(AutomaticValueChecker(pcc=pcc - 1e-6), x, y) is Status.EQUIVALENT
    refused = AutomaticValueChecker(pcc=0.99).check(x, y)
    assert refused.status is Status.DIFFERENT
    assert refused.reason == f"correlation {pcc:.6g} is below the required 0.99"


@pytest.mark.parametrize("required", [-1.0, 0.0, 0.95])
def test_an_undefined_correlation_fails_however_little_is_required(required):
    checker = AutomaticValueChecker(pcc=required)
    constant = checker.check(torch.ones(8), torch.full((8,), 2.0))
    assert math.isnan(constant.metrics.pcc)
    assert constant.status is Status.DIFFERENT
    x = floats(8)
    y = x.clone()
    y[3] = NAN
    assert status(checker, x, y) is Status.DIFFERENT
    assert "1 NaN/Inf positions differ" in checker.check(x, y).reason


def test_the_same_nans_on_both_sides_do_not_spoil_a_correlation():
    x = floats()
    x[5] = NAN
    assert status(AutomaticValueChecker(pcc=0.99), x, x * 1.001) is Status.EQUIVALENT


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_are_never_judged_by_correlation(dtype):
    x = torch.arange(100, dtype=dtype)
    y = x.clone()
    y[50] += 1
    judgement = AutomaticValueChecker(pcc=0.5).check(x, y)
    assert judgement.status is Status.DIFFERENT
    assert judgement.reason == "1 of 100 values differ; these values are exact"


def test_bools_are_exact_unless_a_dissimilarity_is_given():
    x = torch.zeros(100, dtype=torch.bool)
    y = x.clone()
    y[:5] = True
    assert status(AutomaticValueChecker(), x, y) is Status.DIFFERENT
    assert status(AutomaticValueChecker(pcc=0.0), x, y) is Status.DIFFERENT
    # Rogers-Tanimoto: 2 * 5 / (100 + 5) = 0.0952
    within = AutomaticValueChecker(dissimilarity_threshold=0.1)
    assert status(within, x, y) is Status.EQUIVALENT
    assert status(within, x, x) is Status.IDENTICAL
    refused = AutomaticValueChecker(dissimilarity_threshold=0.09).check(x, y)
    assert refused.status is Status.DIFFERENT
    assert refused.reason == "5 of 100 values differ: dissimilarity 0.0952, allowed 0.09"


def test_a_dissimilarity_says_nothing_about_integers():
    checker = AutomaticValueChecker(dissimilarity_threshold=1.0)
    assert status(checker, torch.tensor([1, 2]), torch.tensor([1, 3])) is Status.DIFFERENT


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_single_float_is_judged_by_the_tolerances_that_are_given(shape):
    x = torch.full(shape, 2.0)
    assert status(AutomaticValueChecker(), x, x * 1.005) is Status.DIFFERENT
    assert status(AutomaticValueChecker(rtol=0.01), x, x * 1.005) is Status.EQUIVALENT
    assert status(AutomaticValueChecker(rtol=0.001), x, x * 1.005) is Status.DIFFERENT
    assert status(AutomaticValueChecker(atol=0.02), x, x * 1.005) is Status.EQUIVALENT
    # A correlation of one number means nothing, so it is judged automatically.
    assert status(AutomaticValueChecker(pcc=-1.0), x, x * 1.005) is Status.DIFFERENT


def test_tolerances_for_single_floats_do_not_loosen_tensors():
    x = floats()
    assert status(AutomaticValueChecker(rtol=0.5, atol=0.5), x, x * 1.01) is Status.DIFFERENT


def test_rounding_passes_by_default():
    x = floats()
    y = torch.nextafter(x, torch.full_like(x, INF))
    assert status(AutomaticValueChecker(), x, y) is Status.EQUIVALENT
    assert status(AutomaticValueChecker(), x, x.clone()) is Status.IDENTICAL


# --- allclose -------------------------------------------------------------------------------------


def test_allclose_answers_as_torch_does():
    x = floats().double()
    for rtol, atol, error in [(1e-3, 0.0, 9e-4), (1e-3, 0.0, 1.1e-3), (1e-5, 1e-8, 1e-6)]:
        y = x * (1 + error)
        judged = status(AllCloseValueChecker(rtol=rtol, atol=atol), x, y).passes()
        assert judged is torch.allclose(y, x, rtol=rtol, atol=atol)


def test_allclose_counts_what_is_far():
    x = torch.ones(10)
    y = x.clone()
    y[2:5] = 1.1
    judgement = AllCloseValueChecker(rtol=1e-3).check(x, y)
    assert judgement.status is Status.DIFFERENT
    assert judgement.reason == (
        "3 of 10 values are not within rtol=0.001, atol=1e-08 (NaN is never close)"
    )


def test_allclose_is_computed_in_float64():
    # In float16 the tolerance itself would round: 2048 + 1 is not a number there.
    x, y = torch.full((4,), 2048.0).half(), torch.full((4,), 2050.0).half()
    assert status(AllCloseValueChecker(rtol=0.0, atol=2.0), x, y) is Status.EQUIVALENT
    assert status(AllCloseValueChecker(rtol=0.0, atol=1.9), x, y) is Status.DIFFERENT


def test_a_nan_is_close_to_nothing_and_an_infinity_to_itself():
    checker = AllCloseValueChecker(rtol=1.0, atol=1.0)
    nan, inf = torch.tensor([NAN, 1.0]), torch.tensor([INF, 1.0])
    assert status(checker, nan, nan.clone()) is Status.DIFFERENT
    assert status(checker, inf, inf.clone()).passes()
    assert status(checker, inf, -inf) is Status.DIFFERENT
    assert status(checker, inf, torch.ones(2)) is Status.DIFFERENT


@pytest.mark.parametrize("kind", EVERY)
def test_shapes_never_broadcast(kind):
    with pytest.raises(UsageError, match="shapes must be equal"):
        kind().check(torch.ones(3, 1), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.int64, torch.bool])
def test_allclose_claims_every_dtype(dtype):
    x = torch.tensor([0, 1, 1, 0]).to(dtype)
    y = torch.tensor([0, 1, 0, 0]).to(dtype)
    assert status(AllCloseValueChecker(), x, x.clone()) is Status.IDENTICAL
    assert status(AllCloseValueChecker(), x, y) is Status.DIFFERENT


# --- both -----------------------------------------------------------------------------------------


def test_the_full_checker_wants_both_to_pass():
    x = floats().abs() + 1
    scaled, noisy = x * 1.01, 1000 + 0.1 * floats(seed=1)
    flat = torch.full_like(x, 1000.0) + 0.1 * floats(seed=2)
    checker = FullValueChecker(pcc=0.95, rtol=1e-3)
    assert status(AutomaticValueChecker(pcc=0.95), x, scaled) is Status.EQUIVALENT
    assert status(checker, x, scaled) is Status.DIFFERENT  # allclose refuses
    assert status(AllCloseValueChecker(rtol=1e-3), flat, noisy) is Status.EQUIVALENT
    assert status(checker, flat, noisy) is Status.DIFFERENT  # the correlation refuses
    assert status(checker, x, x * 1.0001) is Status.EQUIVALENT
    assert status(checker, x, x.clone()) is Status.IDENTICAL


def test_the_full_checker_tells_the_reason_of_the_one_that_refused():
    x = floats() + 3
    reason = FullValueChecker(pcc=0.95, rtol=1e-3).check(x, x * 1.01).reason
    assert "256 of 256 values are not within rtol=0.001" in reason
    reason = FullValueChecker(pcc=0.999, rtol=10.0).check(x, floats(seed=1)).reason
    assert re.match(r"correlation \S+ is below the required 0\.999", reason)


# --- objects --------------------------------------------------------------------------------------


class Opaque:
    """Says nothing about equality."""


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [
        ("same", "same", Status.IDENTICAL),
        ("same", "other", Status.DIFFERENT),
        (b"x", b"y", Status.DIFFERENT),
        (None, None, Status.IDENTICAL),
        (None, "None", Status.DIFFERENT),
        (7, 7, Status.IDENTICAL),
        (7, 8, Status.DIFFERENT),
        (1, True, Status.DIFFERENT),
        (torch.float32, torch.float32, Status.IDENTICAL),
        (torch.ones(2), None, Status.DIFFERENT),
        (None, torch.ones(2), Status.DIFFERENT),
        ({1, 2}, {2, 1}, Status.IDENTICAL),
        (Opaque(), Opaque(), Status.UNVERIFIED),
    ],
)
def test_plain_objects_are_equal_or_not_and_others_are_unverified(
    kind, reference, candidate, expected
):
    assert status(kind(), reference, candidate) is expected


def test_what_cannot_be_compared_says_so_and_what_to_do():
    judgement = AutomaticValueChecker().check(Opaque(), Opaque())
    assert judgement.reason == "paritas cannot compare objects of type Opaque"
    assert judgement.advice == (
        "return tensors or plain values, or pass a value_checker that accepts this type"
    )


def test_an_equality_that_is_no_yes_or_no_is_unverified():
    class Elementwise:
        def __eq__(self, other):
            return [True, True]

        __hash__ = None

    assert status(AutomaticValueChecker(), Elementwise(), Elementwise()) is Status.UNVERIFIED


def test_objects_of_different_types_show_both():
    reason = AutomaticValueChecker().check("0.5", 0).reason
    assert reason == "the reference is str '0.5', the candidate int 0"
    reason = AutomaticValueChecker().check(torch.ones(2, 3), None).reason
    assert reason == "the reference is a tensor float32[2, 3], the candidate None"


# --- integers under a tolerance -------------------------------------------------------------------

INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint64]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_tensors_obey_the_tolerance_that_was_given(dtype):
    reference = torch.tensor([100, 20, 7], dtype=dtype)
    candidate = torch.tensor([102, 20, 6], dtype=dtype)
    assert AllCloseValueChecker(atol=2).check(reference, candidate).status is Status.EQUIVALENT
    assert AllCloseValueChecker(rtol=0.15).check(reference, candidate).status is Status.EQUIVALENT
    refused = AllCloseValueChecker(atol=1).check(reference, candidate)
    assert refused.status is Status.DIFFERENT
    assert refused.reason.startswith("1 of 3 values are not within rtol=1e-05, atol=1")


@pytest.mark.parametrize("checker", [AutomaticValueChecker, FullValueChecker])
def test_an_explicit_tolerance_applies_to_integers(checker):
    reference, candidate = torch.tensor([100_000, 20, 7]), torch.tensor([100_002, 20, 6])
    assert status(checker(atol=2), reference, candidate) is Status.EQUIVALENT
    assert status(checker(rtol=0.15), reference, candidate) is Status.EQUIVALENT
    assert status(checker(), reference, candidate) is Status.DIFFERENT
    assert status(checker(pcc=0.0), reference, candidate) is Status.DIFFERENT
    refused = AutomaticValueChecker(atol=1).check(reference, candidate)
    assert refused.reason.startswith("1 of 3 values are not within rtol=0, atol=1")


def test_a_tolerance_does_not_make_bools_equal():
    yes, no = torch.tensor([True]), torch.tensor([False])
    assert status(AutomaticValueChecker(atol=2), yes, no) is Status.DIFFERENT
    assert status(FullValueChecker(atol=2), yes, no) is Status.DIFFERENT


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64], ids=str)
@pytest.mark.parametrize(("off", "allowed", "close"), [(1, 0, False), (1, 1, True), (3, 2, False)])
def test_large_integers_are_told_apart_to_the_last_digit(dtype, off, allowed, close):
    reference, candidate = (torch.tensor([2**60, n], dtype=dtype) for n in (2**62, 2**62 + off))
    judgement = AllCloseValueChecker(rtol=0, atol=allowed).check(reference, candidate)
    assert (judgement.status is Status.EQUIVALENT) is close


def test_the_ends_of_the_integers_are_far_apart():
    ends = torch.tensor([-(2**63)]), torch.tensor([2**63 - 1])
    far = AllCloseValueChecker(rtol=0, atol=2.0**63).check(*ends)
    assert far.status is Status.DIFFERENT
    tops = torch.tensor([2**63], dtype=torch.uint64), torch.tensor([2**64 - 1], dtype=torch.uint64)
    assert AllCloseValueChecker(rtol=0, atol=2.0**62).check(*tops).status is Status.DIFFERENT


def test_an_argument_assigned_later_is_obeyed_and_checked():
    checker = AllCloseValueChecker()
    checker.atol = 2
    pair = torch.tensor([10]), torch.tensor([12])
    assert checker.check(*pair).status is Status.EQUIVALENT
    checker.atol = "two"
    with pytest.raises(UsageError, match=r"^atol must be a number from 0 to inf, got 'two'$"):
        checker.check(*pair)
