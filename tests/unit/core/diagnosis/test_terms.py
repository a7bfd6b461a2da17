"""Results that are sums of other terms, and the largest of other elements."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from paritas.core.diagnosis.experiments import experiment
from paritas.core.diagnosis.place_runs import PlaceRuns
from paritas.core.judging.failures import call_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class _Named:
    """A function with the name of an operator."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.__name__ = name
        self._function = function

    def __call__(self, *operands: Tensor) -> Any:
        return self._function(*operands)


def _ask(
    name: str, reference: Callable[..., Any], candidate: Callable[..., Any], *operands: Tensor
) -> tuple[str, str]:
    """The kind and the sentence that experiments give; without a kind, what they show."""
    runs = PlaceRuns(
        operands,
        lambda values: reference(*values),
        lambda: lambda values: candidate(*values),
        reference(*operands),
        candidate(*operands),
    )
    context = call_context(_Named(name, reference), operands, {})
    shown = experiment(dataclasses.replace(context, runs=runs))
    return (str(shown.best.kind), shown.best.sentence) if shown.best else ("", shown.note)


@pytest.fixture
def rows() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 8)


def _fade(x: Tensor) -> Tensor:
    return torch.stack([sum(0.5 ** (i - j) * x[:, j] for j in range(i + 1)) for i in range(8)], 1)


def test_terms_with_other_factors_are_named_with_an_example(rows: Tensor) -> None:
    kind, sentence = _ask("cumsum", lambda x: x.cumsum(1), _fade, rows)
    assert kind == "wrong factor"
    assert "counts 0.007812 instead of 1 times in the result's (0, 7)" in sentence


def test_terms_that_are_subtracted_have_another_sign(rows: Tensor) -> None:
    signs = (-1.0) ** torch.arange(8)
    kind, sentence = _ask("sum", lambda x: x.sum(1), lambda x: (x * signs).sum(1), rows)
    assert (kind, sentence) == (
        "sign", "the elements at indices 1, 3 ... 7 along axis 1 of self are subtracted",
    )  # fmt: skip


def test_copies_with_factors_of_their_own_are_an_axis_scale(rows: Tensor) -> None:
    factors = torch.tensor([1.0, 0.5, 0.25]).view(3, 1, 1)
    kind, _ = _ask(
        "expand", lambda x: x.expand(3, 6, 8), lambda x: x.expand(3, 6, 8) * factors, rows
    )
    assert kind == "axis scale"


def test_factors_that_are_values_of_another_operand_are_not_named(rows: Tensor) -> None:
    """The square of the other factor is used: that is no wrong factor of this one."""
    kind, _ = _ask("gate", lambda x, y: x * y.exp(), lambda x, y: x * (2 * y).exp(), rows, rows + 1)
    assert kind not in {"wrong factor", "axis scale", "scale"}


def test_other_elements_with_the_same_factors_are_a_wrong_index(rows: Tensor) -> None:
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    blur = torch.tensor([0.2, 0.5, 0.3])

    def smooth(x: Tensor) -> Tensor:
        return functional.conv1d(x[:, None], blur[None, None])[:, 0]

    kind, sentence = _ask("smooth", smooth, lambda x: smooth(x[:, order]), rows)
    assert kind == "wrong index"
    assert sentence.startswith("other elements of operand 1 are read: the element (0, ")


def test_an_element_that_is_read_twice_is_not_a_mean_of_fewer(rows: Tensor) -> None:
    def read_twice(x: Tensor) -> Tensor:
        return x[:, [0, 1, 2, 3, 4, 5, 6, 6]].sum(1)

    assert _ask("sum", lambda x: x.sum(1), read_twice, rows)[0] == "wrong index"
    fewer = _ask("mean", lambda x: x.mean(1), lambda x: x[:, :6].mean(1), rows)
    assert fewer[0] == "partial sum"


def test_a_row_that_is_added_to_a_row_of_a_table_is_a_residual() -> None:
    torch.manual_seed(0)
    table, words = torch.randn(12, 5), torch.randint(6, 12, (3, 4))
    kind, _ = _ask(
        "embedding", lambda w: w[words], lambda w: w[words] + w[:4], table
    )  # fmt: skip
    assert kind == "residual"


def test_a_share_of_another_sum_is_a_residual_and_more_of_the_same_another_reduction(
    rows: Tensor,
) -> None:
    def total(x: Tensor) -> Tensor:
        return x[:, :5].sum(1)

    assert _ask("sum", total, lambda x: total(x) + total(x).roll(1) / 4, rows)[0] == "residual"
    assert _ask("sum", total, lambda x: x[:, :7].sum(1), rows)[0] == "wrong reduction"


def test_a_gradient_that_a_window_shares_is_not_one_that_is_moved(rows: Tensor) -> None:
    def place(gradient: Tensor) -> Tensor:
        return functional.pad(gradient[..., None], (0, 1)).flatten(1)

    shared, moved = (lambda g: g.repeat_interleave(2, 1) / 2), (lambda g: place(g).roll(1, 1))
    assert _ask("max_pool1d_backward", place, shared, rows)[0] == "other function"
    assert _ask("max_pool1d_backward", place, moved, rows)[0] == "wrong index"


def test_the_mean_or_one_place_instead_of_the_largest_are_another_reduction(rows: Tensor) -> None:
    def largest(x: Tensor) -> Tensor:
        return x.view(6, 4, 2).amax(-1)

    kind, sentence = _ask("max_pool1d", largest, lambda x: x.view(6, 4, 2).mean(-1), rows)
    assert (kind, sentence) == (
        "wrong reduction", "the mean of up to 2 elements of operand 1 instead of max_pool1d",
    )  # fmt: skip
    assert _ask("max_pool1d", largest, lambda x: x[:, ::2] + 0, rows)[0] == "wrong reduction"


def test_the_largest_of_fewer_is_not_the_largest_of_others(rows: Tensor) -> None:
    def largest(x: Tensor) -> Tensor:
        return x.view(6, 2, 4).amax(-1)

    fewer = _ask("max_pool1d", largest, lambda x: x.view(6, 2, 4)[..., :2].amax(-1), rows)
    assert fewer[0] == "wrong reduction"
    assert "fewer elements" in fewer[1]
    others = _ask("max_pool1d", largest, lambda x: largest(x.roll(1, 1)), rows)
    assert others[0] == "wrong index"


def test_a_function_of_the_right_result_is_told_with_examples() -> None:
    torch.manual_seed(0)
    left, right = torch.randn(6, 4), torch.randn(7, 4)
    kind, sentence = _ask(
        "cdist", torch.cdist, lambda a, b: torch.cdist(a, b).square(), left, right
    )
    assert kind == "other function"
    assert sentence.startswith("a function of the right result: where it is ")
    noisy = _ask("cdist", torch.cdist, lambda a, b: torch.cdist(a + a.sin(), b), left, right)
    assert noisy[0] == ""


def test_places_that_are_counted_through_do_not_depend_on_the_values(rows: Tensor) -> None:
    def order(x: Tensor) -> Tensor:
        return x.argsort(-1)

    counted = torch.arange(8).expand(6, 8).clone()
    assert _ask("argsort", order, lambda x: counted.clone(), rows)[0] == "missing operand"
    assert _ask("argsort", order, lambda x: counted.flip(0, 1) + 1, rows)[0] == ""  # an old result


def test_one_value_whatever_is_compared_is_a_constant() -> None:
    kind, _ = _ask(
        "le", torch.le, lambda a, b: torch.ones(6, 6, dtype=torch.bool),
        torch.arange(6)[None], torch.arange(6)[:, None],
    )  # fmt: skip
    assert kind == "constant"


def test_other_elements_of_a_triangle_are_another_mask(rows: Tensor) -> None:
    kind, _ = _ask("triu", lambda x: x.triu(1), lambda x: x.tril(-1), rows)
    assert kind == "mask"
    kind, _ = _ask("triu", lambda x: x.triu(1), lambda x: x.tril(-1) * 2, rows)
    assert kind != "mask"


def test_a_border_that_is_filled_with_other_elements_is_a_wrong_index() -> None:
    image = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(5))
    kind, sentence = _ask(
        "avg_pool2d",
        lambda x: functional.avg_pool2d(x, 3, 1, 1),
        lambda x: functional.avg_pool2d(functional.pad(x, (1, 1, 1, 1), "circular"), 3, 1),
        image,
    )
    assert kind == "wrong index"
    assert sentence.startswith("elements of self are added up where there should be fewer: the ")
