"""What a user asks of a pair of tensors, in the words of its figures."""

from __future__ import annotations

import math
import pickle

import msgspec
import pytest
import torch

from paritas.core.errors import UsageError
from paritas.core.numerics.metrics import pair_metrics
from paritas.core.numerics.requirements import NAMES, Requirement
from paritas.core.results.items import Metrics, PairFigures

ONES = torch.ones(4)
NEAR = PairFigures(metrics=pair_metrics(ONES, ONES + 1e-3), mean_rel=1e-3, kl_divergence=0.0)
BROKEN = PairFigures(metrics=pair_metrics(ONES, ONES * math.nan))
SAME = PairFigures(identical=True)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("rel_l2 <= 1e-2", True),
        ("rel_l2 < .0001", False),
        ("rel_l2 <= 1e-2 and max_abs < 1", True),
        ("rel_l2 <= 1e-9 or max_abs < 1", True),
        ("max_abs > 1 or max_abs > 2 and rel_l2 < 1", False),
        ("rel_l2 < 1 or max_abs > 2 and max_abs > 3", True),
        ("(rel_l2 < 1 or max_abs > 2) and max_abs > 3", False),
        ("not max_abs > 1 and not (rel_l2 > 1)", True),
        ("not not max_abs < 1", True),
        ("1 > max_abs", True),
        ("nan_candidate == nan_reference", True),
        ("mismatched != 4", False),
        ("cosine_similarity >= 0.999", True),
        ("max_absolute_error < 1 and mean_absolute_error < 1", True),
        ("max_relative_error < 1 and mean_relative_error < 1", True),
        ("relative_euclidean_distance < 1 and kl_divergence <= 0", True),
        ("max_abs < inf and max_abs > -inf", True),
    ],
)
def test_an_expression_means_what_it_says(text, holds):
    requirement = Requirement.parse(text)
    assert requirement.holds(NEAR) is holds
    assert requirement.text == text


@pytest.mark.parametrize("figures", [BROKEN, PairFigures()])
@pytest.mark.parametrize("text", ["cosine > 0", "not cosine > 0", "cosine != 1", "cosine <= 1"])
def test_a_figure_that_is_nan_or_missing_fails_whatever_is_asked(figures, text):
    assert not Requirement.parse(text).holds(figures)


def test_what_is_unknown_decides_nothing_that_the_rest_decides():
    without_ulps = PairFigures(metrics=msgspec.structs.replace(NEAR.metrics, max_ulp=None))
    assert Requirement.parse("max_ulp < 4 or rel_l2 < 1").holds(without_ulps)
    assert Requirement.parse("rel_l2 < 1 or max_ulp < 4").holds(without_ulps)
    assert not Requirement.parse("rel_l2 < 1 and max_ulp < 4").holds(without_ulps)
    assert Requirement.parse("not (rel_l2 > 1 and max_ulp > 4)").holds(without_ulps)


def test_equal_tensors_have_the_figures_of_no_difference():
    zeros = "max_abs max_rel mean_abs rmse rel_l2 max_ulp mismatched mean_rel kl_divergence"
    for name in (*zeros.split(), "nonfinite_mismatches"):
        assert Requirement.parse(f"{name} == 0").holds(SAME)
    assert Requirement.parse("cosine == 1 and pcc == 1").holds(SAME)
    # How many there are is not known without looking.
    assert not Requirement.parse("nan_candidate == 0").holds(SAME)


def test_every_figure_that_is_a_number_has_its_name():
    for name in Metrics.__struct_fields__:
        if name != "max_abs_index":
            assert Requirement.parse(f"{name} >= 0").names == (name,)
    assert "max_abs_index" not in NAMES


def test_it_shows_the_figures_it_asked_for():
    requirement = Requirement.parse("rel_l2 < 1e-9 or (max_abs < 0 and rel_l2 < 2) or cosine > 2")
    assert requirement.names == ("rel_l2", "max_abs", "cosine")
    assert requirement.describe_figures(NEAR) == "rel_l2 = 0.001, max_abs = 0.001, cosine = 1"
    assert requirement.describe_figures(PairFigures()).startswith("rel_l2 = unknown")


def test_it_can_be_sent_to_another_process():
    requirement = Requirement.parse("rel_l2 < 1 and not max_abs > 2")
    assert pickle.loads(pickle.dumps(requirement)) == requirement


@pytest.mark.parametrize(
    ("text", "why", "at"),
    [
        ("rel_l3 < 1", "unknown figure; did you mean rel_l2?", 0),
        ("rel_l2 <= 1e-3 & max_abs < 1", "unexpected character", 15),
        ("rel_l2 <", "expected a number, or a figure such as rel_l2, here", 8),
        ("rel_l2", "expected one of <= >= == != < > here", 6),
        ("rel_l2 < 1 max_abs < 1", "expected `and` or `or` here", 11),
        ("(rel_l2 < 1", "expected `)` here", 11),
        ("rel_l2 < 1)", "expected `and` or `or` here", 10),
        ("0 < rel_l2 < 1", "comparisons cannot be chained; join them with `and`", 11),
        ("1 < 2", "this compares two numbers; use a figure, such as rel_l2", 5),
        ("", "expected a number, or a figure such as rel_l2, here", 0),
        ("and", "expected a number, or a figure such as rel_l2, here", 0),
        ("__import__ < 1", "unknown figure; did you mean ", 0),
    ],
)
def test_what_cannot_be_read_is_shown_with_its_place(text, why, at):
    with pytest.raises(UsageError) as raised:
        Requirement.parse(text)
    first, shown, caret = str(raised.value).split("\n")
    assert first.startswith(f"cannot read the rule: {why}")
    assert shown == f"  {text}"
    assert caret == f"  {' ' * at}^"


@pytest.mark.parametrize(
    "text", ["(" * 100 + "max_abs < 1" + ")" * 100, "not " * 400 + "max_abs<1"]
)
def test_what_nests_too_deep_is_refused(text):
    with pytest.raises(UsageError, match="more than 50 nested"):
        Requirement.parse(text)


def test_what_is_too_long_is_refused():
    with pytest.raises(UsageError, match="characters"):
        Requirement.parse("max_abs < 1 and " * 1000 + "max_abs < 1")
