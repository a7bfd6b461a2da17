"""Values of dtypes with which torch computes little: float8, float4, unsigned integers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from paritas.core.execution.computable import as_computable, stored_as
from paritas.core.execution.observation import input_tensors
from paritas.core.execution.subjects import Inputs
from paritas.kernels.cases import CaseMaker
from paritas.kernels.comparing import relative_distance
from paritas.kernels.rows import CaseFamily
from paritas.kernels.smallest import smallest_failing
from paritas.kernels.weights import redraw_weights

BYTES = torch.randint(
    0, 120, (6, 300), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
STORED = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.uint8,
    torch.uint16,
    torch.uint32,
]


def of(dtype: torch.dtype) -> torch.Tensor:
    return BYTES.view(dtype) if dtype.itemsize == 1 else BYTES.to(dtype)


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_cases_of_all_families_are_made_of_it(dtype: torch.dtype) -> None:
    given = Inputs((torch.randn(6, 700), of(dtype)))
    maker = CaseMaker(given, None, has_weights=True, has_modes=True, seed=0)
    made = {family: list(cases) for family, cases in maker.all_families().items()}
    assert made[CaseFamily.SIZES]
    assert made[CaseFamily.LAYOUTS]
    dtypes = {dict(input_tensors(one.inputs))["input[1]"].dtype for one in made[CaseFamily.VALUES]}
    assert dtypes == {dtype}
    for cases in made.values():
        for case in cases[:3]:
            assert smallest_failing(case, lambda _: True) is not None


def test_a_number_that_float8_cannot_hold_becomes_its_largest() -> None:
    wide = torch.tensor([1e6, -1e6, 3.0, math.nan])
    kept = stored_as(wide, torch.float8_e4m3fn).float()
    assert kept[:3].tolist() == [448.0, -448.0, 3.0]
    assert kept[3].isnan()
    assert stored_as(torch.tensor([math.inf]), torch.float8_e5m2).float().isinf().all()


def test_large_values_in_float8_are_finite() -> None:
    maker = CaseMaker(
        Inputs((of(torch.float8_e4m3fn),)), None, has_weights=False, has_modes=False, seed=0
    )
    values = maker.all_families()[CaseFamily.VALUES]
    large = next(case for case in values if case.name == "large values")
    assert as_computable(large.inputs.args[0]).isfinite().all()


def test_weights_in_float8_are_drawn_anew_within_their_range() -> None:
    module = nn.Module()
    module.register_buffer("weight", (torch.randn(8, 16) * 300).clamp(-448, 448).to(STORED[0]))
    module.register_buffer("packed", of(torch.float4_e2m1fn_x2).clone())
    before = {name: as_computable(one).clone() for name, one in module.named_buffers()}
    redraw_weights(module, 1)
    now = {name: as_computable(one) for name, one in module.named_buffers()}
    assert now["weight"].isfinite().all()
    assert not torch.equal(now["weight"], before["weight"])
    assert not torch.equal(now["packed"], before["packed"])
    assert torch.equal(now["packed"].flatten().sort()[0], before["packed"].flatten().sort()[0])


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_its_distance_to_itself_is_zero(dtype: torch.dtype) -> None:
    assert relative_distance(of(dtype), of(dtype).clone()) == 0


def test_many_values_are_drawn_without_equal_rows() -> None:
    given = torch.randn(4, 4)
    maker = CaseMaker(Inputs((given,)), None, has_weights=False, has_modes=False, seed=0)
    drawn = maker._draw_tensor("input[0]", given, (1024, 2048))
    assert len(drawn.unique(dim=0)) == 1024
    assert drawn.min() >= given.min()
    assert drawn.max() <= given.max()


def test_values_between_infinite_ones_are_numbers() -> None:
    given = torch.randn(6, 8)
    given[:, ::2] = -math.inf
    maker = CaseMaker(Inputs((given,)), None, has_weights=False, has_modes=False, seed=0)
    drawn = maker._draw_tensor("input[0]", given, (60, 80))
    assert not drawn.isnan().any()
    assert drawn.isinf().any()
    assert drawn.isfinite().any()
