"""Results of few numbers, such as losses: further runs decide, and a mean is opened into terms."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.diagnosis.experiments import experiment
from paritas.core.diagnosis.place_runs import PlaceRuns
from paritas.core.judging.failures import call_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten


def _explain(
    reference: Callable[..., Any], candidate: Callable[..., Tensor], *args: Any, **named: Any
) -> tuple[str, str]:
    """The kind and the sentence that are stated; two empty texts if none is."""
    places = [place for place, one in enumerate(args) if isinstance(one, torch.Tensor)]

    def run(operands: Any) -> Tensor:
        values = list(args)
        for place, operand in zip(places, operands, strict=True):
            values[place] = operand
        result: Tensor = reference(*values, **named)
        return result

    operands = tuple(args[place] for place in places)
    right, wrong = run(operands), candidate(*operands)
    runs = PlaceRuns(operands, run, lambda: lambda values: candidate(*values), right, wrong)
    context = dataclasses.replace(call_context(reference, args, named), runs=runs)
    shown = diagnose(wrong, right, context=context)
    shown = shown if shown.patterns else experiment(context)
    return (str(shown.best.kind), shown.best.sentence) if shown.best else ("", shown.note)


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
    assert "another function of the same terms: with self = " in sentence
    assert " everywhere it gives 0.491 instead of 0.532; with " in sentence


def test_terms_of_rows_are_no_function_of_which_the_kind_is_known(
    scores: tuple[Tensor, Tensor],
) -> None:
    def candidate(rows: Tensor, targets: Tensor) -> Tensor:
        turned = rows.cumsum(1).sin() * rows.roll(2, 1).cosh()
        return functional.cross_entropy(turned, targets)

    kind, note = _explain(functional.cross_entropy, candidate, *scores)
    assert kind == ""
    assert note.startswith("each term follows from the same rows: with one row for all it gives ")


def test_a_limit_on_what_a_loss_reads_is_found_in_its_terms() -> None:
    loss, draw = functional.binary_cross_entropy_with_logits, torch.Generator().manual_seed(1)
    x, labels = torch.randn(3, 7, generator=draw), torch.rand(3, 7, generator=draw)
    kind, sentence = _explain(loss, lambda x, y: loss(x.clamp(-0.3, 0.3), y), x, labels)
    assert (kind, sentence) == ("clipped", "self is clipped at -0.3 and 0.3")
    # What grows more slowly beyond a number has no limit there.
    slow = lambda x, y: loss(torch.where(x.abs() > 0.3, x.sign() * (0.2 + x.abs() / 3), x), y)  # noqa: E731
    assert _explain(loss, slow, x, labels)[0] == "other function"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "sentence", "change"),
    [
        ("wrong argument", "ignore_index is 2 instead of -100", {"ignore_index": 2}),
        ("other function", "multi_margin_loss instead of cross_entropy", {"other": True}),
        ("wrong index", "target is read in the reverse order", {"reverse": True}),
        (
            "off by one reduction",
            "the number that the sum is divided by is one too large",
            {"factor": 7 / 8},
        ),
        # Seven terms: a plain factor that is nearly the one of another divisor is none.
        ("scale", "scaled by 0.87", {"factor": 0.87}),
    ],
)
def test_what_is_wrong_with_a_loss_of_many_operators(
    kind: str, sentence: str, change: dict[str, Any], scores: tuple[Tensor, Tensor]
) -> None:
    loss = functools.partial(functional.cross_entropy, label_smoothing=0.2)

    def changed(x: Tensor, target: Tensor) -> Tensor:
        if "other" in change:
            return functional.multi_margin_loss(x, target)
        target = target.flip(0) if "reverse" in change else target
        ignored = change.get("ignore_index", -100)
        return change.get("factor", 1.0) * loss(x, target, ignore_index=ignored)

    x, target = (one[:7] for one in scores)
    result = _explain(functional.cross_entropy, changed, x, target, label_smoothing=0.2)
    assert result[0] == kind
    assert result[1].endswith(sentence)


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
