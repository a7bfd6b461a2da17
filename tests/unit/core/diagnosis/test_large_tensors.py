"""Of a large tensor the same is said as of a small one, though it is never held whole."""

from __future__ import annotations

import pytest
import torch

from drawing import normal
from paritas.core.diagnosis.case import Case, Context
from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.diagnosis.region import find_region
from paritas.core.diagnosis.search import CaseSurvey


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paritas.core.diagnosis.boxes.BLOCK", 100)


def _row(x: torch.Tensor) -> torch.Tensor:
    return x.index_fill(0, torch.tensor([5]), 0.0)


def _lost(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(x.shape[-1]) >= 20, torch.nan, x)


def _strays(x: torch.Tensor) -> torch.Tensor:
    wrong = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.003
    wrong[5] = True
    return x + 9 * wrong


def _flat(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out.view(-1)[-33:] = 4.0
    return out


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "change",
    [
        _row,
        _lost,
        _strays,
        _flat,
        lambda x: x * 2,
        lambda x: x.tril(),
        lambda x: x + 1e-7 * x.roll(1, 0),
        lambda x: x + 0.1 * (x > 1.5),
        lambda x: x.clone(),
    ],
    ids=["row", "lost", "strays", "flat", "factor", "causal", "noise", "scatter", "right"],
)
@pytest.mark.parametrize("shape", [(24, 24), (6, 7, 25)], ids=str)
@pytest.mark.parametrize("zeros", [False, True], ids=["dense", "relu"])
def test_counting_by_blocks_finds_the_region_that_masks_find(change, shape, zeros) -> None:
    right = normal(*shape).relu() if zeros else normal(*shape)
    case = Case(change(right), right)
    assert find_region(case, CaseSurvey(case, most=0)) == find_region(case)


@pytest.mark.parametrize(
    "given",
    [
        {"arbiter": normal(9, 40).double(), "noise": torch.full((9, 40), 1e-3)},
        {"noise": torch.full((9, 40), torch.nan)},
        {"context": Context(world={"tp": 4}, axes=("batch", "token"))},
    ],
    ids=["arbiter and noise", "no figure", "ranks"],
)
def test_what_else_is_known_of_the_tensor_is_cut_with_it(given) -> None:
    right = normal(9, 40)
    candidate = right.clone()
    candidate[:, 10:20] += 1.0
    case = Case(candidate, right, **given)
    survey = CaseSurvey(case, most=0)
    assert survey.base.number == int(case.wrong.sum())
    assert find_region(case, survey) == find_region(case)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64, torch.bfloat16])
def test_every_dtype_is_counted(dtype: torch.dtype) -> None:
    right = torch.ones(16, 30).to(dtype).T
    candidate = right.clone()
    candidate[7] = 0
    case = Case(candidate, right)
    assert find_region(case, CaseSurvey(case, most=0)) == find_region(case)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (slice(234, 567), "[234:567, :]"),
        (slice(0, 177), "[:177, :]"),
        (slice(3, None, 7), "[3::7, :]"),
        ([1, 8, 765], "[[1, 8, 765], :]"),
        (slice(999, None), "[999, :]"),
    ],
)
def test_bounds_along_an_axis_too_long_for_counts_are_exact(where, text, monkeypatch) -> None:
    monkeypatch.setattr("paritas.core.diagnosis.marks.LONGEST", 64)
    right = normal(1000, 4)
    candidate = right.clone()
    candidate[where] += 1.0
    case = Case(candidate, right)
    region = find_region(case, CaseSurvey(case, most=0))
    assert region is not None
    assert region.text == text
    assert region.elements == int(case.wrong.sum())


def test_the_part_that_is_asked_for_patterns_is_found_along_a_long_axis(monkeypatch) -> None:
    monkeypatch.setattr("paritas.core.diagnosis.diagnose.MOST_ELEMENTS", 600)
    monkeypatch.setattr("paritas.core.diagnosis.marks.LONGEST", 64)
    right = normal(5001)
    candidate = right.clone()
    candidate[-300:] *= 2
    found = diagnose(candidate, right)
    assert found.best is not None
    assert (found.best.kind, found.where and found.where.text) == ("scale", "[4701:]")
    assert diagnose(right.clone(), right).where is None


def test_a_large_tensor_is_never_made_wide_as_a_whole(monkeypatch) -> None:
    monkeypatch.setattr("paritas.core.diagnosis.diagnose.MOST_ELEMENTS", 600)
    right = normal(200, 30)
    case = Case(right * 2, right)
    survey = CaseSurvey(case, most=0)
    find_region(case, survey)
    assert not {"right", "given", "error", "allowed", "wrong"} & set(vars(case))
