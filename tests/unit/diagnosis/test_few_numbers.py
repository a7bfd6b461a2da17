"""Results of few numbers, such as losses: further runs decide, and a mean is opened into terms."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from paritas.checks.failures import call_context
from paritas.diagnosis.diagnose import diagnose
from paritas.diagnosis.experiments import experiment
from paritas.diagnosis.place_runs import PlaceRuns

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten


def _explain(
    reference: Callable[..., Any], candidate: Callable[..., Tensor], *args: Any
) -> tuple[str, str]:
    """The kind and the sentence that are stated; two empty texts if none is."""
    places = [place for place, one in enumerate(args) if isinstance(one, torch.Tensor)]

    def run(operands: Any) -> Tensor:
        values = list(args)
        for place, operand in zip(places, operands, strict=True):
            values[place] = operand
        result: Tensor = reference(*values)
        return result

    operands = tuple(args[place] for place in places)
    right, wrong = run(operands), candidate(*operands)
    runs = PlaceRuns(operands, run, lambda: lambda values: candidate(*values), right, wrong)
    context = dataclasses.replace(call_context(reference, args, {}), runs=runs)
    patterns = diagnose(wrong, right, context=context).patterns or experiment(context)
    return (str(patterns[0].kind), patterns[0].sentence) if patterns else ("", "")


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    first, second = torch.rand(2, 5, 4, generator=draw)
    return first, second


@pytest.fixture
def scores() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    return torch.randn(9, 5, generator=draw), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3])


def test_a_loss_of_other_terms_is_shown_term_by_term(pair: tuple[Tensor, Tensor]) -> None:
    kind, sentence = _explain(
        functional.mse_loss, lambda a, b: (a - b).square().erfinv().sin().mean(), *pair
    )
    assert kind == "other function"
    assert "another function of the same terms: at self = " in sentence
    assert " a term is 0.491 instead of 0.532; at " in sentence


def test_a_factor_on_a_loss_is_no_other_function(pair: tuple[Tensor, Tensor]) -> None:
    kind, _ = _explain(functional.mse_loss, lambda a, b: 0.7 * (a - b).square().mean(), *pair)
    assert kind in {"scale", "wrong factor"}


def test_terms_that_are_nearly_right_are_an_approximation(pair: tuple[Tensor, Tensor]) -> None:
    def rounded_off(a: Tensor, b: Tensor) -> Tensor:
        return ((a - b).square() + 1e-4).sqrt().mean()

    kind, sentence = _explain(functional.l1_loss, rounded_off, *pair)
    assert kind == "approximation"
    assert "on average" in sentence


def test_weights_of_terms_are_asked_for(scores: tuple[Tensor, Tensor]) -> None:
    def weighted(x: Tensor, target: Tensor) -> Tensor:
        terms = functional.cross_entropy(x, target, reduction="none")
        return (terms * torch.linspace(0.5, 1.5, 9)).mean()

    kind, sentence = _explain(functional.cross_entropy, weighted, *scores)
    assert kind == "wrong factor"
    assert "number 0 counts 0.5 times and number 8 1.5 times" in sentence


def test_terms_that_are_left_out_are_counted(scores: tuple[Tensor, Tensor]) -> None:
    def without_two(x: Tensor, target: Tensor) -> Tensor:
        terms = functional.cross_entropy(x, target, reduction="none")
        return (terms.sum() - terms[2] - terms[5]) / 7

    kind, sentence = _explain(functional.cross_entropy, without_two, *scores)
    assert kind == "partial sum"
    assert "numbers 2, 5 of the 9 terms are left out" in sentence


def test_another_reduction_of_the_terms_is_no_weight(pair: tuple[Tensor, Tensor]) -> None:
    def trimmed(a: Tensor, b: Tensor) -> Tensor:
        return (a - b).abs().flatten().sort().values[2:-2].mean()

    kind, _ = _explain(functional.l1_loss, trimmed, *pair)
    assert kind == "wrong reduction"


def test_operands_of_the_terms_may_be_exchanged(pair: tuple[Tensor, Tensor]) -> None:
    loss = functional.margin_ranking_loss
    signs = (pair[0][0] > pair[1][0]).float() * 2 - 1
    kind, _ = _explain(loss, lambda a, b, c: loss(b, a, c, 0.4), pair[0][0], pair[1][0], signs, 0.4)
    assert kind == "swapped operands"


def test_the_scores_of_a_loss_in_bfloat16(scores: tuple[Tensor, Tensor]) -> None:
    def short(x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(x.bfloat16().float(), target)

    kind, _ = _explain(functional.cross_entropy, short, *scores)
    assert kind == "precision"


def test_what_gives_one_number_must_give_those_of_other_runs() -> None:
    two, three = torch.tensor(2.0), torch.tensor(3.0)
    kind, sentence = _explain(aten.mul.Tensor, lambda a, b: a + b, two, three)
    assert (kind, sentence) == ("other function", "add instead of mul")
    kind, sentence = _explain(aten.mul.Tensor, lambda a, b: a * b * 0 + 5, two, three)
    assert "add" not in sentence
    assert kind != "other function"


def test_the_sign_of_one_number_is_no_function_of_it() -> None:
    kind, _ = _explain(aten.abs.default, lambda x: -x.abs(), torch.tensor(-1.7))
    assert kind == "sign"


def test_a_variance_of_one_number_has_another_divisor(pair: tuple[Tensor, Tensor]) -> None:
    kind, sentence = _explain(aten.var.correction, lambda x: x.var(correction=0), pair[0])
    assert kind == "off by one reduction"
    assert "divided by 20 instead of 19" in sentence


def test_a_slice_left_out_of_a_whole_sum_is_more_than_one_element(
    pair: tuple[Tensor, Tensor],
) -> None:
    kind, _ = _explain(aten.sum.default, lambda x: x[:, :-1].sum(), pair[0])
    assert kind == "partial sum"
    kind, _ = _explain(aten.sum.default, lambda x: x.flatten()[:-1].sum(), pair[0])
    assert kind == "off by one reduction"


def test_rows_of_one_length_are_not_limited() -> None:
    right = torch.eye(5).repeat(2, 1)
    right[7] = 0
    patterns = diagnose(0.875 * right, right, context=call_context("", (), {})).patterns
    assert "clipped" not in {str(one.kind) for one in patterns}
