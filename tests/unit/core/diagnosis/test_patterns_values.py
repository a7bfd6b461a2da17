"""Values that are wrong in a known way: what is said of them, and when nothing is."""

from __future__ import annotations

import math

import pytest
import torch

from drawing import normal
from paritas.core.diagnosis.case import Case, Context
from paritas.core.diagnosis.patterns import affine, limits, replacements

RIGHT = normal(8, 64)


@pytest.mark.parametrize(
    ("factor", "context", "sentence"),
    [
        (4.0, Context(world={"dp": 4}), "scaled by the world size, 4"),
        (0.25, Context(world={"dp": 4}), "scaled by 1 / 4, one over the world size"),
        (
            0.125,
            Context(world={"dp": 2, "tp": 8}),
            "scaled by 1 / 8, one over the size of the mesh axis tp",
        ),
        (8.0, Context(), "scaled by 8, which is sqrt(64), of the size of dimension 1"),
        (
            1 / 0.9,
            Context(arguments={"p": 0.1}),
            "scaled by 1 / (1 - p), one over the share that is kept",
        ),
        (64 / 63, Context(), "scaled by n / (n - 1) for n = 64, the size of dimension 1"),
        (math.log(2), Context(), "scaled by ln 2"),
        (0.5, Context(), "scaled by one half"),
        (1.0123, Context(), "scaled by 1.0123"),
    ],
)
def test_a_factor_is_called_by_its_name(factor: float, context: Context, sentence: str) -> None:
    (pattern,) = affine.propose_scales(Case(RIGHT * factor, RIGHT, context=context))
    assert (pattern.kind, pattern.sentence) == ("scale", sentence)
    assert pattern.confidence > 0.95


def test_a_factor_is_found_where_it_is_in_a_region_only() -> None:
    candidate = RIGHT.clone()
    candidate[2:4] *= 3
    (pattern,) = affine.propose_scales(Case(candidate, RIGHT))
    assert pattern.evidence["extent"] == "where it is wrong"
    assert pattern.evidence["factor"] == pytest.approx(3)


def test_a_few_elements_that_do_not_follow_leave_the_factor_as_it_is() -> None:
    candidate = RIGHT * 1.5
    candidate[0, :5] = 1e6
    (pattern,) = affine.propose_scales(Case(candidate, RIGHT))
    assert pattern.evidence["factor"] == pytest.approx(1.5, rel=1e-6)


def test_one_number_says_nothing_of_a_free_factor_or_offset() -> None:
    case = Case(torch.tensor([3.7]), torch.tensor([1.2]))
    assert affine.propose_scales(case) + affine.propose_offsets(case) == []


def test_a_factor_for_each_row_is_told_from_one_for_all() -> None:
    factors = torch.linspace(1.5, 3, 8)[:, None]
    (pattern,) = affine.propose_scales(Case(RIGHT * factors, RIGHT))
    assert pattern.kind == "axis scale"
    assert pattern.sentence == (
        "scaled by a different factor at each index of dimension 0: 1.5 to 3"
    )


def test_a_weight_that_is_left_out_is_named() -> None:
    weight = 1 + normal(64, seed=1).abs()
    right = RIGHT * weight
    (pattern,) = affine.propose_scales(
        Case(RIGHT, right, context=Context(named={"weight": weight}))
    )
    assert pattern.sentence == "the factor weight is missing"


@pytest.mark.parametrize(
    ("times", "sentence"),
    [
        (-1, "bias is missing"),
        (1, "bias is added once too often"),
        (3, "bias is added 4 times: once per rank"),
        (-0.75, "only 1 / 4 of bias is added: divided by the world size"),
        (-2, "bias is subtracted instead of added"),
    ],
)
def test_a_bias_is_counted(times: float, sentence: str) -> None:
    bias = normal(64, seed=1)
    context = Context(named={"bias": bias}, world={"tp": 4})
    pattern = affine.propose_offsets(Case(RIGHT + times * bias, RIGHT, context=context))[0]
    assert (pattern.kind, pattern.sentence) == ("axis offset", sentence)


def test_a_residual_that_is_left_out_is_named() -> None:
    residual = normal(8, 64, seed=1)
    context = Context(named={"residual": residual})
    (pattern,) = affine.propose_offsets(Case(RIGHT - residual, RIGHT, context=context))
    assert (pattern.kind, pattern.sentence) == ("residual", "residual is missing")


def test_an_offset_has_its_amount() -> None:
    (pattern,) = affine.propose_offsets(Case(RIGHT - 0.5, RIGHT))
    assert (pattern.kind, pattern.sentence) == ("offset", "0.5 is subtracted")


def test_a_vector_that_nobody_knows_is_an_offset_along_its_axis() -> None:
    (pattern,) = affine.propose_offsets(Case(RIGHT + normal(64, seed=1), RIGHT))
    assert pattern.kind == "axis offset"
    assert pattern.evidence["axis"] == "1"


def test_a_sign_that_is_flipped_is_told_from_one_that_is_lost() -> None:
    assert affine.propose_signs(Case(-RIGHT, RIGHT))[0].sentence == "the sign is flipped"
    lost = affine.propose_signs(Case(RIGHT.abs(), RIGHT))[0].sentence
    assert lost.startswith("the sign is lost: negative values")
    truths = RIGHT > 0
    assert affine.propose_signs(Case(~truths, truths))[0].sentence == "every boolean is inverted"
    number = torch.complex(RIGHT, normal(8, 64, seed=1))
    conjugate = affine.propose_signs(Case(number.conj().resolve_conj(), number))[0].sentence
    assert conjugate.endswith("the complex conjugate")


def test_zeros_constants_and_stale_values_are_told_apart() -> None:
    zero, constant = RIGHT.clone(), RIGHT.clone()
    zero[3], constant[3] = 0, 7
    before = normal(8, 64, seed=1)
    assert [one.kind for one in replacements.propose_constants(Case(zero, RIGHT))] == ["zeros"]
    (pattern,) = replacements.propose_constants(Case(constant, RIGHT))
    assert pattern.sentence == "7 in every wrong element"
    (pattern,) = replacements.propose_constants(
        Case(before, RIGHT, context=Context(earlier={"step 1": before}))
    )
    assert pattern.sentence == "stale: still the value of step 1"
    (pattern,) = replacements.propose_constants(
        Case(before, RIGHT, context=Context(inputs=(before,)))
    )
    assert pattern.sentence == "it is input 0 unchanged: the operation was skipped"


def test_random_bits_are_memory_that_nobody_wrote() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2**31 - 1, (8, 64), generator=generator, dtype=torch.int32)
    (pattern,) = replacements.propose_constants(Case(bits.view(torch.float32), RIGHT))
    assert pattern.kind == "uninitialised"


def test_values_cut_off_have_their_bounds() -> None:
    large = RIGHT * 400
    (pattern,) = limits.propose_clipping(Case(large.clamp(-448, 448), large))
    assert pattern.sentence == "clipped below -448 and above 448, the largest float8_e4m3"
    (pattern,) = limits.propose_clipping(Case(RIGHT.relu(), RIGHT))
    assert pattern.sentence == "clipped at 0: negative values become zero"


def test_whole_numbers_that_ran_over_are_remainders() -> None:
    right = torch.arange(-300, 300, 7)
    (pattern,) = limits.propose_wrapped(Case(right.to(torch.int8).to(torch.int64), right))
    assert pattern.sentence == "wrapped around: the right value modulo 2^8, as in int8"
