"""A mistake in an operand, such as a weight, is told as one of the operand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from paritas.core.diagnosis.calls import LiveCall
from paritas.core.diagnosis.case import Context
from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.diagnosis.place_runs import PlaceRuns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paritas.core.results.findings import Pattern

_DRAW = torch.Generator().manual_seed(0)
X = torch.randn(5, 24, generator=_DRAW)
WEIGHT = torch.randn(16, 24, generator=_DRAW)
BIAS = torch.randn(16, generator=_DRAW)
NOISE = torch.randn(16, 24, generator=_DRAW)


def scales_of_the_next_group(weight: Tensor) -> Tensor:
    groups = weight.unflatten(1, (-1, 4))
    scales = groups.abs().amax(2, keepdim=True)
    return (groups / scales * scales.roll(-1, 1)).flatten(1)


def pruned(weight: Tensor) -> Tensor:
    return weight * (weight.abs() > weight.abs().quantile(0.3))


def with_adapter(weight: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    down, up = (torch.randn(size, generator=draw).to(weight) for size in ((16, 2), (2, 24)))
    return weight + 0.1 * down @ up


def signs(weight: Tensor) -> Tensor:
    return weight.sign() * weight.abs().mean()


MISTAKES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "scales": (scales_of_the_next_group, "wrong factor"),
    "zero point": (lambda weight: weight + 0.25, "offset"),
    "length": (lambda weight: weight / weight.norm(dim=1, keepdim=True), "axis scale"),
    "pruned": (pruned, "zeros"),
    "adapter": (with_adapter, "residual"),
    "signs": (signs, "precision"),
}


def stated(
    program: Callable[..., Tensor], *, inner: Sequence[Tensor] = (), asked: bool = False
) -> Pattern | None:
    """What is stated about a program that should be a linear layer.

    Args:
        inner: the values that it computes on the way, if they can be seen.
        asked: whether it can be called again.
    """
    reference, candidate = functional.linear(X, WEIGHT, BIAS), program(X, WEIGHT, BIAS)
    runs = PlaceRuns(
        (X, WEIGHT, BIAS),
        lambda operands: functional.linear(*operands),
        lambda: lambda operands: program(*operands),
        reference,
        candidate,
    )
    context = Context(
        operator="aten.linear.default",
        inputs=(X, WEIGHT, BIAS),
        call=LiveCall(functional.linear, (X, WEIGHT, BIAS), {}),
        runs=runs if asked else None,
        inner=(lambda *, wide: [one.double() if wide else one for one in inner]) if inner else None,
    )
    arbiter = functional.linear(X.double(), WEIGHT.double(), BIAS.double())
    return diagnose(candidate, reference, arbiter=arbiter, context=context).best


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_weight_that_can_be_seen_is_named(name: str) -> None:
    """Five rows do not determine the weight, but it is among the candidate's own values."""
    change, kind = MISTAKES[name]
    used = change(WEIGHT)
    pattern = stated(lambda x, weight, bias: functional.linear(x, used, bias), inner=[X, used])
    assert pattern is not None
    assert pattern.kind == kind
    assert pattern.sentence.startswith(
        ("weight is not the reference's: ", "mat2 is divided by", "the sign of mat2")
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_weight_is_named_if_the_candidate_can_be_asked(name: str) -> None:
    change, kind = MISTAKES[name]
    pattern = stated(lambda x, w, b: functional.linear(x, change(w), b), asked=True)
    assert pattern is not None
    assert pattern.kind == kind


def test_a_weight_that_is_just_another_one_has_no_name() -> None:
    pattern = stated(lambda x, w, b: functional.linear(x, w + 0.1 * NOISE, b), asked=True)
    assert pattern is None
    other = WEIGHT + 0.1 * NOISE
    assert stated(lambda x, _, b: functional.linear(x, other, b), inner=[other]) is None


def test_a_value_that_does_not_give_the_candidate_was_not_used() -> None:
    """The candidate computes a pruned weight, but uses another one."""
    other = WEIGHT + 0.1 * NOISE
    program = lambda x, _, b: functional.linear(x, other, b)  # noqa: E731
    assert stated(program, inner=[pruned(WEIGHT)]) is None


def test_a_candidate_that_is_not_linear_has_no_other_weight() -> None:
    def program(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.linear(functional.layer_norm(x, (24,)) + 0.1 * x.sin(), weight, bias)

    assert stated(program, asked=True) is None
