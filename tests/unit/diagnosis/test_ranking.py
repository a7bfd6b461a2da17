"""The ranking: the simplest first, one thing said once, and a confidence that was measured."""

from __future__ import annotations

import pytest
import torch

from paritas.diagnosis.case import Case, Context
from paritas.diagnosis.diagnose import (
    ORDER,
    PROPOSERS,
    diagnose,
    propose_all,
    rank_patterns,
    rank_raw,
)
from paritas.diagnosis.stating import CONFIDENCE


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda x: x * 0, "zeros"),
        (lambda x: -x, "sign"),
        (lambda x: x * 3, "scale"),
        (lambda x: x.T, "transpose"),
        (lambda x: x.roll(2, 0), "shift"),
        (lambda x: x.flip(1), "permutation"),
    ],
)
def test_the_simplest_of_what_fits_comes_first_and_alone(change, kind):
    x = noise(12, 12)
    assert [one.kind for one in rank_patterns(Case(change(x), x))] == [kind]


def test_stopping_early_gives_what_asking_all_gives():
    x = noise(12, 12)
    for wrong in (x * 3, -x, x.T, x.roll(2, 0), x.abs(), noise(12, 12, seed=1)):
        case = Case(wrong, x)
        whole = sorted({one.kind for one in propose_all(case)}, key=ORDER.index)
        assert [one.kind for one in rank_raw(case)][:1] == whole[:1]


def test_each_module_can_be_asked_and_comes_in_the_order_of_its_simplest_kind():
    for propose, simplest in PROPOSERS:
        assert callable(propose)
        assert simplest in ORDER
    places = [ORDER.index(simplest) for _, simplest in PROPOSERS]
    assert places == sorted(places)


def test_the_table_states_what_was_counted():
    for stated, right, of in CONFIDENCE.values():
        assert of > 0
        assert abs(stated - right / of) <= 0.1


def test_nothing_is_said_of_values_that_are_right_or_of_another_shape():
    x = noise(12, 12)
    assert diagnose(x, x.clone()).patterns == ()
    assert diagnose(x[:3], x).patterns == ()


def test_what_nothing_explains_is_left_unexplained():
    x = noise(12, 12)
    assert rank_patterns(Case(x + 0.3 * torch.sin(20 * x), x, context=Context())) == ()


def test_of_a_large_tensor_the_part_that_is_wrong_is_looked_at(monkeypatch):
    monkeypatch.setattr("paritas.diagnosis.diagnose.MOST_ELEMENTS", 600)
    x = noise(200, 30)
    y = x.clone()
    y[150:160] *= 2
    best = diagnose(y, x).best
    assert best is not None
    assert best.kind == "scale"
