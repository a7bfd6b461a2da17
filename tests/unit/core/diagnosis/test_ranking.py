"""The ranking: the simplest first, one thing said once, and a confidence that was measured."""

from __future__ import annotations

import pytest
import torch

from drawing import normal
from paritas.core.diagnosis.case import Case, Context
from paritas.core.diagnosis.diagnose import (
    ORDER,
    PROPOSERS,
    diagnose,
    propose_all,
    rank_patterns,
    rank_raw,
)
from paritas.core.diagnosis.stating import CONFIDENCE


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
    x = normal(12, 12)
    assert [one.kind for one in rank_patterns(Case(change(x), x))] == [kind]


def test_stopping_early_gives_what_asking_all_gives():
    x = normal(12, 12)
    for wrong in (x * 3, -x, x.T, x.roll(2, 0), x.abs(), normal(12, 12, seed=1)):
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
    x = normal(12, 12)
    assert diagnose(x, x.clone()).patterns == ()
    assert diagnose(x[:3], x).patterns == ()


def test_what_nothing_explains_is_left_unexplained():
    x = normal(12, 12)
    assert rank_patterns(Case(x + 0.3 * torch.sin(20 * x), x, context=Context())) == ()


def test_of_a_large_tensor_the_part_that_is_wrong_is_looked_at(monkeypatch):
    monkeypatch.setattr("paritas.core.diagnosis.diagnose.MOST_ELEMENTS", 600)
    x = normal(200, 30)
    y = x.clone()
    y[150:160] *= 2
    best = diagnose(y, x).best
    assert best is not None
    assert best.kind == "scale"


@pytest.mark.parametrize(
    ("operator", "kinds"),
    [("aten.mul.Tensor", ["axis scale"]), ("aten._softmax.default", []), ("", [])],
    ids=["product", "softmax", "output"],
)
def test_a_factor_fitted_for_each_row_is_no_explanation_of_a_softmax_or_at_an_output(
    operator, kinds
):
    x = normal(12, 40)
    wrong = x * (1 + normal(12, 1, seed=1).abs())
    found = diagnose(wrong, x, context=Context(operator=operator))
    assert [one.kind for one in found.patterns] == kinds
    assert found.where is not None


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (lambda x: 2 * x, ["scale"]),
        (lambda x: 1.5 * x, ["scale"]),
        (lambda x: x / 40**0.5, ["scale"]),
        (lambda x: x.roll(1, 0), ["shift"]),
        (lambda x: x + 1, ["offset"]),
        (lambda x: 1.0372918 * x, []),
        (lambda x: x + 0.0372918, []),
    ],
    ids=["twice", "1.5", "1 / sqrt(d)", "rolled", "1 more", "any factor", "any offset"],
)
def test_at_an_output_only_a_known_or_a_round_number_is_stated(change, kinds):
    x = normal(12, 40).double()
    assert [one.kind for one in diagnose(change(x), x).patterns] == kinds


@pytest.mark.parametrize("seed", range(4))
def test_a_factor_is_the_shortest_number_that_gives_the_candidate(seed):
    true = normal(1, 8, seed=seed).double() * 1.1
    x = true.float()
    best = diagnose(1.5 * x, x, arbiter=true, context=Context(operator="aten.add.Tensor")).best
    assert best is not None
    assert best.sentence.startswith("scaled by 1.5")
    assert (best.evidence["factor"], best.evidence["bit for bit"]) == (1.5, 1.0)
