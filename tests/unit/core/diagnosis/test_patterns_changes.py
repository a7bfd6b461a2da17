"""Something done to a result, to an operand, or to a value on the way."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F

from drawing import normal
from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.diagnosis.place_runs import PlaceRuns
from paritas.core.judging.failures import call_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten


def said_of(reference: Callable[..., Any], candidate: Callable[..., Any], *args: Any) -> str:
    """The kind and the sentence, where both programs can be asked again; empty if none."""
    places = [place for place, one in enumerate(args) if isinstance(one, torch.Tensor)]

    def of(program: Callable[..., Any]) -> Callable[[Any], Tensor]:
        def run(values: Any) -> Tensor:
            given = list(args)
            for place, value in zip(places, values, strict=True):
                given[place] = value
            result = program(*given)
            first: Tensor = result if isinstance(result, torch.Tensor) else result[0]
            return first

        return run

    tensors = tuple(args[place] for place in places)
    right, wrong = of(reference)(tensors), of(candidate)(tensors)
    runs = PlaceRuns(tensors, of(reference), lambda: of(candidate), right, wrong)
    context = dataclasses.replace(call_context(reference, args, {}), runs=runs)
    found = diagnose(wrong, right, context=context).patterns
    return f"{found[0].kind}: {found[0].sentence}" if found else ""


X, TABLE, IMAGES = normal(6, 8), normal(5, 8, seed=1), normal(2, 3, 6, 6, seed=2)
QUERY, KEY, VALUE = normal(3, 2, 2, 5, 4, seed=3)
ROWS = torch.tensor([[0, 3, 1], [4, 4, 2]])
SIDE = [2, 2]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("expected", "reference", "candidate", "args"),
    [
        (
            "axis offset: the mean of weight over axis 0 is subtracted from it",
            aten.embedding.default,
            lambda table, rows: F.embedding(rows, table - table.mean(0)),
            (TABLE, ROWS),
        ),
        (
            "axis scale: value is divided by its largest magnitude over axes [2, 3]",
            F.scaled_dot_product_attention,
            lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v / v.abs().amax((2, 3), keepdim=True)
            ),
            (QUERY, KEY, VALUE),
        ),
        (
            "wrong reduction: the result is added up along axis 0: every slice is the sum of all",
            aten.bmm.default,
            lambda a, b: (a @ b).sum(0, keepdim=True).expand(4, 5, 5).clone(),
            (QUERY.flatten(0, 1), KEY.flatten(0, 1).mT.contiguous()),
        ),
        (
            "other function: the square of self is used",
            aten.avg_pool2d.default,
            lambda x, size: aten.avg_pool2d.default(x.square(), size),
            (IMAGES, SIDE),
        ),
        (
            "offset: the product: 1 is added to self",
            aten.glu.default,
            lambda x, dim: (x[:, :4] + 1) * x[:, 4:].sigmoid(),
            (X, 1),
        ),
        (
            "wrong statistics: the mean: the first element instead of the mean",
            aten.std.correction,
            lambda x, dim: ((x - x[:, :1]).square().sum(1) / 7).sqrt(),
            (X, [1]),
        ),
        (
            "clipped: input is clipped above 0.5",
            aten.native_layer_norm.default,
            lambda x, *rest: aten.native_layer_norm.default(x.clamp(max=0.5), *rest),
            (X, [8], None, None, 1e-5),
        ),
        (
            "residual: the slice of the result before each one along axis 0 is added to it",
            aten.bmm.default,
            lambda a, b: torch.cat([(a @ b)[:1], (a @ b)[1:] + (a @ b)[:-1]]),
            (QUERY.flatten(0, 1), KEY.flatten(0, 1).mT.contiguous()),
        ),
    ],
)
def test_what_was_done_to_a_value_is_said(
    expected: str,
    reference: Callable[..., Any],
    candidate: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    assert said_of(reference, candidate, *args).startswith(expected)


def test_places_that_wrap_around_are_those_of_the_result() -> None:
    best = lambda x: x.topk(3, 1).indices  # noqa: E731
    said = said_of(best, lambda x: (best(x) + 1) % 8, X)
    # A row that is read from one place before its first element gives the same places.
    assert said.startswith(
        (
            "wrong index: every place is one too large, and wraps around at 8",
            "shift: self is read one place before the right one along axis 1",
        )
    )


def test_a_result_that_is_scaled_is_not_an_operand_that_is_doubled() -> None:
    kind, _, _ = said_of(aten.mm.default, lambda a, b: 2 * (a @ b), X, TABLE.T).partition(":")
    assert kind == "scale"


def test_what_holds_for_these_values_only_is_not_said() -> None:
    more = lambda a, b: (a + 1) @ b  # noqa: E731
    # The means of these rows are 0: one more is added to them here, but not to other rows.
    centred_and_more = lambda a, b: (a - a.mean(1, keepdim=True) + 1) @ b  # noqa: E731
    rows = X - X.mean(1, keepdim=True)
    assert said_of(aten.mm.default, more, rows, TABLE.T).startswith("offset: 1 is added to self")
    assert "added to self" not in said_of(aten.mm.default, centred_and_more, rows, TABLE.T)


def test_a_value_that_a_function_goes_on_with_has_a_kind() -> None:
    def mean_of_sums(x: Tensor) -> Tensor:
        return x.sum(1).mean()

    context = call_context(mean_of_sums, (X,), {})
    found = diagnose(X.square().sum(1), X.sum(1), context=context).patterns
    assert (found[0].kind, found[0].sentence) == ("other function", "the sum of the squares")
