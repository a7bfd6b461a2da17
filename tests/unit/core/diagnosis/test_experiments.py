"""What follows from calling both programs at a place with other values."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from paritas.core.diagnosis.experiments import experiment
from paritas.core.diagnosis.place_runs import PlaceRuns
from paritas.core.judging.failures import call_context
from paritas.core.results.findings import Diagnosis

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def _ask(
    reference: Callable[..., Any],
    candidate: Callable[..., Any],
    *operands: Tensor,
    reads_all: bool = True,
) -> tuple[str, str]:
    """The kind and the sentence that experiments give; without a kind, what they show."""
    runs = PlaceRuns(
        operands,
        lambda values: reference(*values),
        lambda: lambda values: candidate(*values),
        reference(*operands),
        candidate(*operands),
        reads_all=reads_all,
    )
    context = call_context(reference, operands, {})
    shown = experiment(dataclasses.replace(context, runs=runs))
    return (str(shown.best.kind), shown.best.sentence) if shown.best else ("", shown.note)


@pytest.fixture
def rows() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 8)


@pytest.fixture
def weight() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(5, 8)


def test_another_function_of_each_element_is_shown_with_examples(rows: Tensor) -> None:
    kind, sentence = _ask(torch.tanh, lambda x: x - x.abs() * x / 3, rows)
    assert kind == "other function"
    assert "at self = " in sentence
    assert " instead of " in sentence


def test_a_function_of_other_elements_is_no_function_of_the_same_element(rows: Tensor) -> None:
    kind, _ = _ask(torch.tanh, lambda x: torch.tanh(x) + 0.1 * x.mean(), rows)
    assert kind == ""


def test_values_that_depend_on_their_place_are_no_function_of_the_element(rows: Tensor) -> None:
    places = torch.linspace(1, 2, 48).view(6, 8)
    kind, _ = _ask(torch.tanh, lambda x: torch.tanh(x) * places, rows)
    assert kind == ""


def test_another_function_of_each_line_is_seen_and_has_no_kind(rows: Tensor) -> None:
    kind, note = _ask(
        torch.var,
        lambda x: x.sort().values.diff().cosh().sum().sqrt(),
        rows,
    )
    assert kind == ""
    assert note.startswith("each line follows from the same line of the operand: it gives ")


def test_an_operand_without_effect_is_missing(rows: Tensor, weight: Tensor) -> None:
    bias = torch.arange(1.0, 6.0)
    kind, sentence = _ask(functional.linear, lambda x, w, b: x @ w.t() + 0 * b, rows, weight, bias)
    assert kind == "missing operand"
    assert sentence.endswith("has no effect: the candidate does not depend on it")
    # What does something else as well is not explained by the operand that it does not read.
    kind, _ = _ask(functional.linear, lambda x, w, b: (x @ w.t()).abs() + 0 * b, rows, weight, bias)
    assert kind == ""


def test_a_limit_that_follows_from_all_rows_is_no_other_reduction(rows: Tensor) -> None:
    def add_up(x: Tensor) -> Tensor:
        return x.sum(-1)

    def wrapped(x: Tensor) -> Tensor:
        total = add_up(x)
        return torch.remainder(total, total.abs().max() / 2)

    add_up.__name__ = "sum"
    kind, _ = _ask(add_up, wrapped, rows)
    assert kind == ""


def test_an_operand_that_is_only_clipped_away_is_not_missing(rows: Tensor) -> None:
    high = rows + 100
    kind, _ = _ask(torch.add, lambda x, y: (x + y).clamp(max=3.0) * x.sign(), high, high + 100)
    assert kind != "missing operand"


def test_what_the_candidate_may_compute_by_itself_is_not_missing(rows: Tensor) -> None:
    kind, _ = _ask(torch.mul, lambda x, _: x * x.cos(), rows, rows.sin(), reads_all=False)
    assert kind == ""


def test_another_row_of_an_operand_is_a_wrong_index(rows: Tensor, weight: Tensor) -> None:
    kind, sentence = _ask(
        functional.linear, lambda x, w: functional.linear(x.roll(1, 0) * 0.9, w), rows, weight
    )
    assert kind == "wrong index"
    assert "change the outputs at index" in sentence


def test_a_scale_that_all_rows_share_is_no_wrong_index(rows: Tensor, weight: Tensor) -> None:
    def quantise(x: Tensor, w: Tensor) -> Tensor:
        scale = x.abs().max() / 20
        return functional.linear((x / scale).round() * scale, w)

    kind, _ = _ask(functional.linear, quantise, rows, weight)
    assert kind not in {"wrong index", "wrong statistics"}


def test_terms_that_are_left_out_make_a_partial_sum(rows: Tensor, weight: Tensor) -> None:
    def prune(x: Tensor, w: Tensor) -> Tensor:
        return functional.linear(x, torch.where(w.abs() > 0.5, w, 0.0))

    assert _ask(functional.linear, prune, rows, weight)[0] == "partial sum"


def test_other_terms_that_are_changed_as_well_make_no_partial_sum(
    rows: Tensor, weight: Tensor
) -> None:
    def round_coarsely(x: Tensor, w: Tensor) -> Tensor:
        return functional.linear(x, w.round())

    assert _ask(functional.linear, round_coarsely, rows, weight)[0] == ""


def test_another_reduction_of_the_same_rows_is_named(rows: Tensor) -> None:
    kind, _ = _ask(lambda x: x, lambda x: x, rows)
    assert kind == ""
    mean = _Named("mean", lambda x: x.mean(-1))
    assert _ask(mean, lambda x: x.quantile(0.6, -1), rows)[0] == "wrong reduction"


def test_a_mean_that_mixes_rows_is_another_matter_than_one_in_half_precision(rows: Tensor) -> None:
    mean = _Named("mean", lambda x: x.mean(-1))
    assert _ask(mean, lambda x: x.bfloat16().mean(-1).float(), rows)[0] == ""


class _Named:
    """A function with the name of an operator."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.__name__ = name
        self._function = function

    def __call__(self, *operands: Tensor) -> Any:
        return self._function(*operands)


def test_attention_that_sees_later_tokens_has_another_mask() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 5, 4) for _ in range(3))
    attend = functional.scaled_dot_product_attention
    causal = _Named("scaled_dot_product_attention", lambda q, k, v: attend(q, k, v, is_causal=True))
    kind, _ = _ask(causal, lambda q, k, v: attend(q, k, v, scale=0.3), query, key, value)
    assert kind == "mask"
    kind, _ = _ask(causal, lambda q, k, v: attend(q, k, v, scale=0.3) * 0.5, query, key, value)
    assert kind == ""


def test_what_differs_only_among_its_surroundings_is_not_asked(rows: Tensor) -> None:
    runs = PlaceRuns(
        (rows,), lambda values: values[0].sin(), lambda: lambda values: values[0].sin(),
        rows.sin(), rows.cos(),
    )  # fmt: skip
    context = call_context(torch.sin, (rows,), {})
    assert experiment(dataclasses.replace(context, runs=runs)) == Diagnosis()


def test_other_factors_of_an_operand_do_not_explain_an_operand_that_is_lost(rows: Tensor) -> None:
    doubled = lambda x, y: torch.cat([x[:3] + y[:3], x[3:] + 2 * y[3:]])  # noqa: E731
    assert _ask(torch.add, doubled, rows, rows.flip(0))[0] == "axis scale"
    mixed = lambda x, y: torch.cat([x[:3], 2 * x[3:] + y[3:]])  # noqa: E731
    assert _ask(torch.add, mixed, rows, rows.flip(0))[0] == ""


def test_factors_by_place_are_no_function_of_the_result() -> None:
    torch.manual_seed(0)
    shares = torch.rand(12, 6)
    together = lambda x: x.flip(1).cumprod(1)  # noqa: E731
    assert _ask(together, lambda x: together(x / 3), shares)[0] != "other function"
    assert _ask(together, lambda x: together(x).sqrt(), shares)[0] == "other function"
