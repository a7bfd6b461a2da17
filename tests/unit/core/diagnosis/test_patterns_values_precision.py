"""What is not finite and what is less precise: what is said of it, and when nothing is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from drawing import normal
from paritas.core.diagnosis.case import Case, Context
from paritas.core.diagnosis.patterns import limits, precision
from paritas.core.diagnosis.patterns.precision import FORMATS

RIGHT = normal(8, 64)
DTYPES = {
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3": torch.float8_e4m3fn,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@pytest.mark.parametrize("name", DTYPES)
def test_a_format_rounds_as_torch_does(name: str) -> None:
    form = next(form for form in FORMATS if form.name == name)
    values = torch.cat([RIGHT.flatten(), RIGHT.flatten() * 1e-3, torch.tensor([0.0, 1.0])])
    expected = values.to(DTYPES[name]).double()
    assert torch.equal(form.round_to_nearest(values.double()), expected)


@pytest.mark.parametrize("name", DTYPES)
def test_a_rounded_result_is_called_by_its_format(name: str) -> None:
    (pattern,) = precision.propose_precision(Case(RIGHT.to(DTYPES[name]).float(), RIGHT))
    assert pattern.evidence["format"] == name
    assert pattern.sentence.startswith("rounded to ")
    assert pattern.confidence > 0.95


def test_rounding_to_the_own_dtype_is_no_loss() -> None:
    right = RIGHT.double()
    assert precision.propose_precision(Case(RIGHT.bfloat16(), RIGHT.bfloat16(), right)) == []


def test_a_product_on_rounded_inputs_is_recomputed() -> None:
    a, b = normal(16, 48, seed=1), normal(48, 24, seed=2)
    low = a.bfloat16().float() @ b.bfloat16().float()
    context = Context(operator="aten.mm.default", inputs=(a, b))
    (pattern,) = precision.propose_precision(
        Case(low, a @ b, a.double() @ b.double(), None, context)
    )
    assert pattern.sentence == "computed on inputs rounded to bfloat16"
    low = a @ b.bfloat16().float()
    (pattern,) = precision.propose_precision(
        Case(low, a @ b, a.double() @ b.double(), None, context)
    )
    assert pattern.sentence == "computed on input 1 rounded to bfloat16"


def test_a_quantised_tensor_has_its_levels() -> None:
    scale = RIGHT.abs().amax() / 127
    (pattern,) = precision.propose_precision(Case((RIGHT / scale).round() * scale, RIGHT))
    assert pattern.sentence == "quantised to int8 with one scale for the tensor"


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (torch.tensor(1 / 16), "in whole multiples of 0.0625, here at most "),
        (
            RIGHT.abs().amax(1, keepdim=True) / 15,
            "one for each slice along axis 0, here at most 15",
        ),
    ],
)
def test_a_result_on_steps_is_said_to_be_on_them(step: Tensor, words: str) -> None:
    # As a layer that is trained through its rounding gives it: the right value, and what is left.
    stepped = RIGHT + ((RIGHT / step).round() * step - RIGHT)
    context = Context(operator="aten.mul.Tensor")
    (pattern,) = precision.propose_precision(Case(stepped, RIGHT, context=context))
    assert words in pattern.sentence
    # The steps are read off the candidate: at an output, or if they predict nothing, none is said.
    assert precision.propose_precision(Case(stepped, RIGHT)) == []
    lowered = (RIGHT / step).floor() * step
    assert precision.propose_precision(Case(lowered, RIGHT, context=context)) == []
    assert precision.propose_precision(Case(stepped.relu(), RIGHT, context=context)) == []


def test_the_slices_of_several_runs_are_those_of_one() -> None:
    runs = normal(3, 6, 40)
    step = runs.abs().amax(2, keepdim=True) / 15
    case = Case(
        (runs / step).round() * step,
        runs,
        context=Context(operator="aten.mul.Tensor", stacked=True),
    )
    (pattern,) = precision.propose_precision(case)
    assert "one for each line along axis 1" in pattern.sentence


LIFTED = Context(lifted_agrees=True)


@pytest.mark.parametrize("agrees", [True, False, None])
def test_noise_is_a_loss_of_precision_only_if_it_vanishes_in_float64(agrees: bool | None) -> None:
    right = normal(64, 96)
    noisy = right * (1 + 2**-9 * normal(64, 96, seed=1))
    context = Context(lifted_agrees=agrees)
    found = precision.propose_precision(Case(noisy, right, context=context))
    sentences = [pattern.sentence for pattern in found]
    told = "less precise everywhere, by 0.002 of the values; in float64 it agrees"
    assert sentences == ([told] if agrees else [])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x + 1e-3 * torch.sin(3 * x),
        lambda x: x + 1e-3 * (torch.arange(96) > 80),
        lambda x: x + 1e-3 * x.abs(),
    ],
    ids=["another formula", "a region", "a bias"],
)
def test_errors_with_the_traces_of_a_fault_are_no_rounding_even_if_float64_agrees(wrong) -> None:
    right = normal(64, 96)
    given = wrong(right)
    assert precision.propose_precision(Case(given, right, context=LIFTED)) == []


def test_a_product_in_bfloat16_is_repeated_in_bfloat16() -> None:
    a, b = normal(16, 48, seed=1), normal(48, 24, seed=2)
    low = (a.bfloat16() @ b.bfloat16()).float()
    context = Context(operator="aten.mm.default", inputs=(a, b))
    case = Case(low, a @ b, a.double() @ b.double(), None, context)
    (pattern,) = precision.propose_precision(case)
    assert pattern.sentence == "computed in bfloat16"
    assert float(pattern.evidence["bit for bit"]) > 0.9


def test_too_large_for_float16_is_an_overflow() -> None:
    right = RIGHT * 40000
    (pattern,) = limits.propose_nonfinite(Case(right.half().float(), right))
    assert pattern.kind == "overflow"
    assert pattern.evidence["format"] == "float16"


@pytest.mark.parametrize(
    ("operator", "special", "sentence"),
    [
        ("aten.sqrt.default", -1.0, "NaN from the square root of negative numbers in input 0"),
        (
            "aten.sigmoid.default",
            200.0,
            "NaN from inf / inf: exp of input 0 is too large for float16 (over 11.09)",
        ),
        ("", math.inf, "NaN where input 0 is infinite: inf - inf or 0 * inf"),
        ("aten.div.Tensor", 0.0, "NaN where input 0 is 0: 0 / 0, 0 * inf or the logarithm of 0"),
    ],
)
def test_the_inputs_show_where_a_nan_comes_from(
    operator: str, special: float, sentence: str
) -> None:
    x = RIGHT.abs() + 0.1
    x[2, 5:9] = special
    candidate = torch.where(x == special, math.nan, RIGHT)
    context = Context(operator=operator, inputs=(x,))
    (pattern,) = limits.propose_nonfinite(Case(candidate, RIGHT, context=context))
    assert (pattern.kind, pattern.sentence) == ("nonfinite", sentence)


def test_a_row_that_is_masked_as_a_whole_gives_nan() -> None:
    x = RIGHT.clone()
    x[3] = -math.inf
    right = x.softmax(-1).nan_to_num(0.0)
    context = Context(operator="aten._softmax.default", inputs=(x,), arguments={"dim": -1})
    (pattern,) = limits.propose_nonfinite(Case(x.softmax(-1), right, context=context))
    assert pattern.evidence["cause"] == "-inf - -inf"


def test_a_nan_that_is_swallowed_is_said() -> None:
    right = RIGHT.clone()
    right[1, :3] = math.nan
    (pattern,) = limits.propose_nonfinite(Case(right.nan_to_num(0.0), right))
    assert pattern.sentence == "0 instead of NaN"


def test_what_was_computed_in_float8_is_told_by_all_of_its_values() -> None:
    a, b = normal(6, 7, seed=3).bfloat16(), normal(6, 7, seed=4).bfloat16()
    right = a.double() * b.double()

    def narrow(value: Tensor) -> Tensor:
        return value.to(torch.float8_e4m3fn).to(torch.bfloat16)

    noise = right.abs() * 2.0**-8
    low = narrow(narrow(a) * narrow(b))
    assert precision.propose_precision(Case(low, right.bfloat16(), right, noise)) == []
    (pattern,) = precision.propose_precision(Case(low, right.bfloat16(), right, noise, LIFTED))
    assert pattern.sentence == "computed in float8_e4m3: it can represent every value"
    # Whole numbers are numbers of any format: that says nothing.
    counts = (a * 4).round().double()
    wrong = (counts + (normal(6, 7, seed=5) > 0.5) * counts.abs().clamp(max=1)).bfloat16()
    case = Case(wrong, counts.bfloat16(), counts, counts.abs() * 2.0**-8, LIFTED)
    assert precision.propose_precision(case) == []


def test_an_infinity_is_no_overflow_of_a_format_that_no_value_comes_near() -> None:
    right = torch.cat([RIGHT.flatten(), torch.tensor([1e30])])
    given = torch.cat([RIGHT.flatten(), torch.tensor([math.inf])])
    kinds = [pattern.kind for pattern in limits.propose_nonfinite(Case(given, right))]
    assert kinds == ["nonfinite"]
    near = torch.cat([RIGHT.flatten(), torch.tensor([7e4])])
    (pattern,) = limits.propose_nonfinite(Case(given.half(), near))
    assert pattern.evidence["format"] == "float16"


@pytest.mark.parametrize(
    ("given", "right", "sentence"),
    [
        (-math.inf, math.inf, "an infinity instead of one of the other sign"),
        (math.inf, 1.0, "an infinity instead of a number"),
        (math.inf, math.nan, "an infinity instead of NaN"),
        (math.nan, math.inf, "NaN instead of an infinity"),
    ],
)
def test_what_an_infinity_or_a_nan_replaces_is_named(given, right, sentence) -> None:
    values = torch.arange(1.0, 5.0)
    case = Case(
        torch.cat([values, torch.tensor([given])]), torch.cat([values, torch.tensor([right])])
    )
    (pattern,) = limits.propose_nonfinite(case)
    assert pattern.sentence == sentence
