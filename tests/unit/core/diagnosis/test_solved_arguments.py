"""A mistake before a function that can be undone is told as one of its argument."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from paritas.core.diagnosis.case import Case
from paritas.core.diagnosis.diagnose import rank_raw
from paritas.core.diagnosis.patterns.effective import propose_effective
from paritas.core.diagnosis.place_runs import PlaceRuns, vary_operands
from paritas.core.judging.failures import call_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_DRAW = torch.Generator().manual_seed(0)
ROWS = torch.randn(2, 16, 32, generator=_DRAW)
SCORES = 2 * torch.randn(2, 16, 16, generator=_DRAW)
HIDDEN = SCORES.masked_fill(torch.ones(16, 16).triu(1).bool(), torch.finfo(torch.float32).min)
WEIGHT = 1 + 0.3 * torch.randn(32, generator=_DRAW)
BIAS = 0.2 * torch.randn(32, generator=_DRAW)
QUERY, KEY, VALUE = torch.randn(3, 1, 2, 16, 16, generator=_DRAW)
ANGLES = torch.arange(16.0)[:, None] * 1e4 ** (-torch.arange(8.0) / 8)
_ATTENTION = functional.scaled_dot_product_attention


def stated(
    target: Callable[..., Any], args: tuple[Any, ...], candidate: Callable[..., Any]
) -> tuple[str, str]:
    """The kind and the sentence of what the candidate computed with; empty if it has no name."""
    operands = tuple(one for one in args if isinstance(one, torch.Tensor))

    def run(program: Callable[..., Any], values: Any) -> Tensor:
        left = iter(values)
        given = [next(left) if isinstance(one, torch.Tensor) else one for one in args]
        result: Tensor = program(*given)
        return result

    pair = run(target, operands), run(candidate, operands)
    runs = PlaceRuns(
        operands, lambda one: run(target, one), lambda: lambda one: run(candidate, one), *pair
    )
    context = dataclasses.replace(call_context(target, args, {}), runs=runs)
    arbiter = run(target, [one.double() for one in operands])
    case = Case(pair[1], pair[0], arbiter, None, context)
    patterns = propose_effective(case, rank_raw)
    return (str(patterns[0].kind), patterns[0].sentence) if patterns else ("", "")


# --- Functions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [torch.cos, torch.sin])
def test_another_base_of_rotary_frequencies_is_a_factor_for_each_index(function: Any) -> None:
    base = 0.5 ** torch.linspace(0, 1, 8)
    kind, sentence = stated(function, (ANGLES,), lambda x: function(x * base))
    assert kind == "axis scale"
    assert sentence.startswith("its argument is not the reference's: scaled by a different factor")


def test_stretched_frequencies_are_a_factor_in_a_part() -> None:
    stretch = torch.tensor([1.0] * 4 + [0.125] * 4)
    kind, sentence = stated(torch.sin, (ANGLES,), lambda x: torch.sin(x * stretch))
    assert kind == "axis scale"
    assert "in the last 4 of 8 columns" in sentence


def test_what_is_added_to_the_argument_of_a_sigmoid_is_named() -> None:
    added = torch.linspace(0, 1, 32)
    assert stated(torch.sigmoid, (ROWS,), lambda x: torch.sigmoid(x + added))[0] == "axis offset"


def test_an_argument_that_is_just_another_one_has_no_name() -> None:
    noise = 0.1 * torch.randn(ROWS.shape, generator=torch.Generator().manual_seed(1))
    assert stated(torch.sigmoid, (ROWS,), lambda x: torch.sigmoid(x + noise)) == ("", "")
    noise = noise[0, :, :8].clone()
    assert stated(torch.cos, (ANGLES,), lambda x: torch.cos(x + noise)) == ("", "")


# --- Softmax and attention ------------------------------------------------------------------------


def limited(scores: Tensor) -> Tensor:
    return scores.clamp(max=1.0)


def in_steps(scores: Tensor) -> Tensor:
    return (2 * scores).round() / 2


def squared(scores: Tensor) -> Tensor:
    return scores * scores.abs()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scores", [SCORES, HIDDEN], ids=["all", "hidden"])
@pytest.mark.parametrize(
    ("bend", "kind"), [(limited, "clipped"), (in_steps, "precision"), (squared, "other function")]
)
def test_other_scores_of_a_softmax_are_named(scores: Tensor, bend: Any, kind: str) -> None:
    def program(x: Tensor, dim: int) -> Tensor:
        hidden = x < -1e30
        return torch.softmax(torch.where(hidden, x, bend(x)), dim)

    assert stated(torch.softmax, (scores, -1), program)[0] == kind


def test_what_is_no_softmax_has_no_scores() -> None:
    def half(x: Tensor, dim: int) -> Tensor:
        return torch.softmax(x, dim) * torch.linspace(0.5, 1, 16)[:, None]

    assert stated(torch.softmax, (SCORES, -1), half) == ("", "")


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bend: Any, factor: Tensor | float = 1.0
) -> Tensor:
    scores = bend(query @ key.mT / math.sqrt(query.shape[-1]))
    return (scores.softmax(-1) * factor) @ value


@pytest.mark.parametrize(
    ("bend", "kind"), [(limited, "clipped"), (torch.sin, "other function"), (in_steps, "precision")]
)
def test_other_scores_of_an_attention_are_named(bend: Any, kind: str) -> None:
    program = lambda *operands: _attend(*operands, bend)  # noqa: E731
    stands = stated(_ATTENTION, (QUERY, KEY, VALUE), program)
    assert stands[0] == kind
    assert stands[1].startswith("the matrix of scores is not the reference's: ")


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda key: key.clamp(-1, 1), "clipped"),
        (lambda key: key * torch.linspace(0.5, 1.5, 16), "axis scale"),
        (lambda key: key * torch.tensor([1.0] * 8 + [-1.0] * 8), "sign"),
    ],
)
def test_other_keys_of_an_attention_are_named(change: Any, kind: str) -> None:
    program = lambda q, k, v: _attend(q, change(k), v, lambda one: one)  # noqa: E731
    stands = stated(_ATTENTION, (QUERY, KEY, VALUE), program)
    assert stands[0] == kind
    assert stands[1].startswith("key is not the reference's: ")


def test_other_keys_have_no_name() -> None:
    noise = 0.3 * torch.randn(KEY.shape, generator=torch.Generator().manual_seed(1))
    program = lambda q, k, v: _attend(q, k + noise, v, lambda one: one)  # noqa: E731
    assert stated(_ATTENTION, (QUERY, KEY, VALUE), program) == ("", "")


def test_weights_of_an_attention_are_named_if_they_come_from_no_scores() -> None:
    factor = 1 + torch.eye(16)
    program = lambda *operands: _attend(*operands, lambda one: one, factor)  # noqa: E731
    kind, sentence = stated(_ATTENTION, (QUERY, KEY, VALUE), program)
    assert kind == "scale"
    assert "the matrix that multiplies the values" in sentence
    assert "on the diagonal of axes 2 and 3" in sentence


def test_noise_in_the_scores_of_an_attention_has_no_name() -> None:
    noise = 0.3 * torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(1))
    program = lambda *operands: _attend(*operands, lambda one: one + noise)  # noqa: E731
    assert stated(_ATTENTION, (QUERY, KEY, VALUE), program) == ("", "")


# --- Norms ----------------------------------------------------------------------------------------


def _norm(x: Tensor, _: Any, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, (32,)).clamp(-1, 1) * weight + bias


def test_limited_values_are_seen_below_weight_and_bias() -> None:
    kind, sentence = stated(functional.layer_norm, (ROWS, (32,), WEIGHT, BIAS), _norm)
    assert kind == "clipped"
    assert (
        "the value before weight and bias is not the reference's: clipped below -1 and above 1"
        in sentence
    )


def test_a_function_of_the_weight_is_named_although_the_weight_is_ones() -> None:
    """One factor for all in this run, but not for other weights."""
    ones, zeros = torch.ones(32), torch.zeros(32)
    layer = functional.layer_norm
    program = lambda x, shape, w, b: layer(x, shape, w.exp(), b)  # noqa: E731
    kind, sentence = stated(layer, (ROWS, (32,), ones, zeros), program)
    assert kind == "other function"
    assert sentence.startswith("its weight is not the reference's: exp of each element")


def test_another_weight_has_no_name() -> None:
    other = WEIGHT + 0.1 * torch.randn(32, generator=torch.Generator().manual_seed(1))
    layer = functional.layer_norm
    program = lambda x, shape, _, b: layer(x, shape, other, b)  # noqa: E731
    assert stated(layer, (ROWS, (32,), WEIGHT, BIAS), program) == ("", "")


# --- Other operands -------------------------------------------------------------------------------


def test_what_a_mask_writes_stays_in_its_place() -> None:
    varied, mask = vary_operands((HIDDEN, torch.tensor([0.0, -3e38, 0.0])), 0)
    hidden = HIDDEN < -1e30
    assert torch.equal(varied[hidden], HIDDEN[hidden])
    assert bool((varied[~hidden].abs() < 100).all())
    assert not torch.equal(varied, HIDDEN)
    assert mask.tolist() == pytest.approx([0.0, -3e38, 0.0])
