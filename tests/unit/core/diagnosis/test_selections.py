"""Elements that are moved, chosen, written or compared: which mistake has which word."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.diagnosis.place_runs import PlaceRuns
from paritas.core.judging.failures import call_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_ATEN = torch.ops.aten


def _diagnose(
    reference: Callable[..., Any],
    candidate: Callable[..., Any],
    *arguments: Any,
    item: int | None = None,
    again: bool = False,
) -> tuple[str, str]:
    """The kind and the sentence of an operator of one tensor, the first argument."""
    pick = (lambda value: value) if item is None else (lambda value: value[item])
    value, *rest = arguments
    right, wrong = (pick(one(*arguments)) for one in (reference, candidate))
    context = call_context(reference, arguments, {})
    if again:
        runs = PlaceRuns(
            (value,),
            lambda values: pick(reference(*values, *rest)),
            lambda: lambda values: pick(candidate(*values, *rest)),
            right,
            wrong,
        )
        context = dataclasses.replace(context, runs=runs)
    patterns = diagnose(wrong, right, context=context).patterns
    return (str(patterns[0].kind), patterns[0].sentence) if patterns else ("", "")


@pytest.fixture
def rows() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 6)


# --- Elements that are moved ----------------------------------------------------------------------


def test_the_line_beside_the_diagonal_is_a_shift(rows: Tensor) -> None:
    beside = lambda x: torch.diagonal(x.roll(-1, 1)).clone()  # noqa: E731
    kind, sentence = _diagnose(torch.diagonal, beside, rows)
    assert kind == "shift"
    assert sentence == "self is read one place after the right one along axis 1"


def test_windows_with_another_step_read_other_elements(rows: Tensor) -> None:
    apart = lambda x, dim, size, _: x.unfold(dim, size, 1).narrow(dim, 0, 2).clone()  # noqa: E731
    kind, _ = _diagnose(_ATEN.unfold.default, apart, rows[:2], 1, 2, 4)
    assert kind in {"shift", "wrong index"}


def test_values_that_are_no_elements_of_the_operand_are_not_read_elsewhere(rows: Tensor) -> None:
    bent = lambda x: torch.diagonal(x.roll(-1, 1)).sin()  # noqa: E731
    kind, _ = _diagnose(torch.diagonal, bent, rows)
    assert kind not in {"shift", "wrong index", "permutation"}


def test_elements_found_by_chance_are_not_read_elsewhere(rows: Tensor) -> None:
    # Sorted, the elements are others for other values.
    ordered = lambda x: torch.diagonal(x).sort().values  # noqa: E731
    kind, sentence = _diagnose(torch.diagonal, ordered, rows, again=True)
    assert kind != "shift"
    assert "self[" not in sentence


# --- Elements that are chosen ---------------------------------------------------------------------


def test_the_second_largest_is_another_index(rows: Tensor) -> None:
    second = lambda x, dim: x.argsort(dim, descending=True).select(dim, 1)  # noqa: E731
    kind, sentence = _diagnose(_ATEN.argmax.default, second, rows, 1)
    assert (kind, sentence) == ("wrong index", "the second largest of each line is chosen")


def test_one_place_for_all_lines_is_not_a_rank(rows: Tensor) -> None:
    first = lambda x, _: torch.zeros(len(x), dtype=torch.long)  # noqa: E731
    kind, sentence = _diagnose(_ATEN.argmax.default, first, rows, 1)
    assert "of each line is chosen" not in sentence
    assert kind in {"zeros", "constant", ""}


def test_ranks_counted_from_the_other_end_are_another_argument(rows: Tensor) -> None:
    largest = lambda x, k, dim: torch.kthvalue(x, 7 - k, dim)  # noqa: E731
    kind, sentence = _diagnose(_ATEN.kthvalue.default, largest, rows, 2, 1, item=0)
    assert kind == "wrong argument"
    assert "counted from the largest" in sentence


def test_a_rank_is_not_the_place_of_a_rank(rows: Tensor) -> None:
    ranks = lambda x, dim: x.argsort(dim).argsort(dim)  # noqa: E731
    kind, sentence = _diagnose(_ATEN.argsort.default, ranks, rows, 1)
    assert kind == "wrong index"
    assert "the rank of each element, not the place of each rank" in sentence


# --- Elements that are written --------------------------------------------------------------------


def test_what_is_added_and_not_written_is_told_so(rows: Tensor) -> None:
    index, source = torch.tensor([[0, 2, 3, 1, 5, 4]]), torch.ones(1, 6) / 3
    kind, _ = _diagnose(_ATEN.scatter.src, torch.scatter_add, rows, 0, index, source)
    assert kind == "residual"


def test_a_row_that_is_not_written_is_stale(rows: Tensor) -> None:
    index, source = torch.tensor([1, 4]), torch.rand(2, 6)
    lost = lambda x, dim, i, s: torch.index_copy(x, dim, i[:-1], s[:-1])  # noqa: E731
    kind, _ = _diagnose(_ATEN.index_copy.default, lost, rows, 0, index, source)
    assert kind == "stale"


def test_a_copy_where_nothing_is_written_is_not_stale(rows: Tensor) -> None:
    kind, _ = _diagnose(_ATEN.roll.default, lambda x, *_: x.clone(), rows, [2], [1])
    assert kind == "copy"


# --- Comparisons, ties, limits --------------------------------------------------------------------


def test_an_operand_that_is_not_compared_is_missing() -> None:
    places = torch.arange(6)
    zero = lambda one, other: one <= 0 * other  # noqa: E731
    kind, _ = _diagnose(_ATEN.le.Tensor, zero, places.view(1, -1), places.view(-1, 1))
    assert kind == "missing operand"


def test_halves_that_are_rounded_up_are_a_matter_of_ties() -> None:
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, 3.2, 0.1, -1.5, 4.5, 6.7])
    kind, _ = _diagnose(_ATEN.round.default, lambda x: (x + 0.5).floor(), values)
    assert kind == "tie-breaking"
    kind, _ = _diagnose(_ATEN.round.default, torch.floor, values)
    assert kind != "tie-breaking"


def test_zeros_that_another_argument_gives_are_that_argument(rows: Tensor) -> None:
    twice = lambda x, least: functional.hardshrink(x, 2 * least)  # noqa: E731
    kind, sentence = _diagnose(_ATEN.hardshrink.default, twice, rows, 0.5)
    assert (kind, sentence) == ("wrong argument", "lambd is 1 instead of 0.5")


def test_a_row_of_zeros_stays_a_row_of_zeros(rows: Tensor) -> None:
    lost = lambda x, least: functional.hardshrink(x, least).index_fill(0, torch.tensor(2), 0.0)  # noqa: E731
    kind, _ = _diagnose(_ATEN.hardshrink.default, lost, rows, 0.5)
    assert kind == "zeros"


def test_a_range_that_begins_again_is_wrapped() -> None:
    torch.manual_seed(0)
    values = torch.randn(8, 9, 6)
    wrapped = lambda x, dims: torch.remainder(x.sum(dims) + 2, 4) - 2  # noqa: E731
    kind, sentence = _diagnose(_ATEN.sum.dim_IntList, wrapped, values, [1], again=True)
    assert kind == "wrapped"
    assert "beyond -2 and 2" in sentence
    limited = lambda x, dims: x.sum(dims).clamp(-2, 2)  # noqa: E731
    assert _diagnose(_ATEN.sum.dim_IntList, limited, values, [1])[0] == "clipped"
