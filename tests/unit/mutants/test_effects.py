"""The effect of a planted fault, in exact arithmetic and over the program's noise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from paritas.core.errors import UsageError
from paritas.mutants.planting import (
    FaultSite,
    band_of,
    exact_form,
    measure_effect,
    plant,
    program_noise,
    sites,
)
from paritas.mutants.programs import FlatProgram, trace_program

HALVES = [torch.float32, torch.bfloat16, torch.float16]


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def effect_of(program: FlatProgram, mutation: str, node: str = "", detail: str | None = None):
    fitting = [
        site
        for site in sites(program)
        if site.mutation == mutation and node in {"", site.node} and detail in {None, site.detail}
    ]
    mutant = plant(program, fitting[0])
    return measure_effect(program, mutant, program_noise(program))


def product(dtype: torch.dtype) -> FlatProgram:
    values = [draw(0, 6, 16).to(dtype), draw(1, 16, 6).to(dtype)]
    return trace_program(torch.mm, values)


@pytest.mark.parametrize("dtype", HALVES)
def test_an_effect_is_that_of_exact_arithmetic_whatever_the_dtype(dtype):
    effect = effect_of(product(dtype), "scaled_by_permille")
    assert effect.relative == pytest.approx(1e-3, rel=1e-9)
    assert effect.result == "output[0]"


def test_a_permille_is_clear_in_float32_and_faint_in_bfloat16():
    assert effect_of(product(torch.float32), "scaled_by_permille").band == "clear"
    faint = effect_of(product(torch.bfloat16), "scaled_by_permille")
    assert faint.band == "faint"
    assert 0 < faint.over_noise < 2


def test_a_doubled_addend_of_zeros_is_not_a_fault():
    program = trace_program(lambda x, y: (x + y) * 3.0, [draw(0, 4, 4), torch.zeros(4, 4)])
    assert effect_of(program, "doubled_addend", detail="argument 1").band == "none"
    assert effect_of(program, "doubled_addend", detail="argument 0").band == "clear"


def test_a_fault_in_an_unused_value_is_not_a_fault():
    def forward(x):
        _ = x * 2.0
        return x + 1.0

    program = trace_program(forward, [draw(0, 3)])
    site = FaultSite("mul", "scaled_by_percent")
    assert measure_effect(program, plant(program, site), program_noise(program)).band == "none"


def test_a_change_of_integers_is_clear():
    counts = torch.tensor([100, 1], dtype=torch.int8)
    program = trace_program(lambda n: n * 3, [counts])
    effect = effect_of(program, "saturated_integer")
    assert (effect.band, effect.over_noise) == ("clear", math.inf)


def test_a_swallowed_nan_is_clear():
    program = trace_program(torch.relu, [torch.tensor([1.0, float("nan")])])
    assert effect_of(program, "swallowed_nan").over_noise == math.inf


def test_another_dtype_and_shared_memory_are_clear_even_if_no_value_differs():
    program = trace_program(lambda x: x * 1.0, [draw(0, 4)])
    assert effect_of(program, "output_dtype").over_noise == math.inf
    assert effect_of(program, "aliased_output").over_noise == math.inf


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_downcast_has_the_effect_of_its_rounding_also_where_casts_are_lifted(autocast):
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    program = trace_program(
        lambda x: torch.exp(layer(x).float()), [draw(2, 4, 16)], autocast=autocast
    )
    effect = effect_of(program, "internal_downcast", node="exp", detail="in bfloat16")
    assert 2**-11 < effect.relative < 2**-6


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_by_arithmetic_is_rounding_by_a_cast(dtype):
    values = (draw(3, 300) * 2 ** (12 * draw(4, 300))).to(dtype)
    values[:3] = torch.tensor([0.0, float("nan"), -3e4])
    program = trace_program(lambda x: x * 1.0, [values])
    site = next(site for site in sites(program) if site.mutation == "internal_downcast")
    mutant = plant(program, site)
    cast, rounded = mutant(values)[0], exact_form(mutant)(values)[0]
    assert torch.equal(cast.nan_to_num(7.0), rounded.nan_to_num(7.0))
    assert not torch.equal(cast.nan_to_num(7.0), values.nan_to_num(7.0))


def test_a_stale_buffer_is_clearly_above_the_noise():
    torch.manual_seed(0)
    program = trace_program(nn.BatchNorm1d(4), [draw(0, 8, 4) + 1])
    effect = effect_of(program, "stale_buffer", node="native_batch_norm")
    assert effect.band == "clear"
    assert effect.result.startswith("buffer running_")


def test_random_programs_are_measured_on_the_same_draw_each_time():
    program = trace_program(lambda x: torch.dropout(x, 0.5, True), [draw(0, 8, 8)])
    first, second = (effect_of(program, "equal_masks") for _ in range(2))
    assert first == second
    assert first.band == "clear"


def test_measuring_leaves_the_random_state_alone():
    program = product(torch.float32)
    before = torch.get_rng_state()
    effect_of(program, "scaled_by_percent")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_float64_program_is_its_own_yardstick():
    program = trace_program(torch.mm, [draw(0, 4, 4).double(), draw(1, 4, 4).double()])
    assert effect_of(program, "scaled_by_permille").band == "clear"


def test_bands_end_where_they_say():
    assert [band_of(z) for z in (0.5, 2.0, 2.1, 8.0, 8.1, math.inf)] == [
        *("faint", "faint", "moderate", "moderate", "clear", "clear")
    ]


def test_a_program_that_fails_is_refused():
    program = product(torch.float32)
    broken = FlatProgram(
        program.module, (draw(0, 2, 3), draw(0, 2, 3)), program.results, frozenset()
    )
    with pytest.raises(UsageError, match="the program cannot be run"):
        program_noise(broken)
