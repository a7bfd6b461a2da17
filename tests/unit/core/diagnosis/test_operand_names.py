"""What an operand of a linear operator is instead of the right one: the word, and its limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from paritas.core.diagnosis.calls import LiveCall
from paritas.core.diagnosis.case import Case, Context
from paritas.core.diagnosis.patterns.linear_maps import solve_bias, solve_input, solve_weight
from paritas.core.diagnosis.patterns.predictions import Predictor
from paritas.core.diagnosis.patterns.weights import propose_bends, propose_weights
from paritas.core.diagnosis.place_runs import PlaceRuns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.patterns.linear_maps import SolvedOperand

_DRAW = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_DRAW)


X, WEIGHT, BIAS = normal(5, 24), 0.2 * normal(16, 24), normal(16)
CODES = torch.tensor([-1.0, -0.61, -0.33, -0.12, 0.0, 0.09, 0.27, 0.58, 1.0])
IMAGE = normal(2, 4, 6, 6)


def in_codes(weight: Tensor) -> Tensor:
    groups = weight.unflatten(1, (-1, 8))
    scale = groups.abs().amax(2, keepdim=True)
    nearest = (groups.div(scale).unsqueeze(-1) - CODES).abs().argmin(-1)
    return (CODES[nearest] * scale).flatten(1)


def in_steps_at_random(weight: Tensor) -> Tensor:
    step = weight.abs().amax(1, keepdim=True) / 7
    noise = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1))
    return (weight / step + noise - 0.5).round() * step


def with_zero_point(weight: Tensor) -> Tensor:
    least, most = weight.aminmax(dim=1, keepdim=True)
    step = (most - least) / 255
    return ((weight / step).round() + (-least / step).round()) * step


def of_half_the_rank(weight: Tensor) -> Tensor:
    left, sizes, right = torch.linalg.svd(weight.double(), full_matrices=False)
    sizes[len(sizes) // 2 :] = 0
    return ((left * sizes) @ right).float()


def powers_of_two(weight: Tensor) -> Tensor:
    return weight.sign() * weight.abs().log2().round().exp2()


def scales_of_the_other_axis(weight: Tensor) -> Tensor:
    rows, columns = weight.abs().amax(1, keepdim=True), weight.abs().amax(0, keepdim=True)
    return weight / rows * columns


NAMED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "codes": (in_codes, "precision"),
    "steps": (in_steps_at_random, "precision"),
    "powers of two": (powers_of_two, "precision"),
    "zero point": (with_zero_point, "axis offset"),
    "signs": (lambda weight: weight.sign() * weight.abs().mean(), "precision"),
    "unsigned": (lambda weight: (weight / 0.02).round().clamp(min=0) * 0.02, "clipped"),
    "rank": (of_half_the_rank, "approximation"),
    "scales": (scales_of_the_other_axis, "axis scale"),
    "bent": (lambda weight: 0.5 * torch.tanh(2 * weight), "other function"),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_a_weight_is_has_a_name(name: str) -> None:
    change, kind = NAMED[name]
    assert [one.kind for one in propose_weights(Case(change(WEIGHT), WEIGHT))] == [kind]


def other_steps_for_each(weight: Tensor) -> Tensor:
    step = 0.02 * (1 + torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)))
    return (weight / step).round() * step


UNNAMED: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": lambda weight: weight + 0.02 * weight.roll(5, 1) * weight.flip(0),
    "steps of its own for each": other_steps_for_each,
    "rotated": lambda weight: weight @ torch.linalg.qr(weight.T @ weight)[0],
}


@pytest.mark.parametrize("name", UNNAMED)
def test_a_weight_that_is_otherwise_wrong_has_none(name: str) -> None:
    assert not propose_weights(Case(UNNAMED[name](WEIGHT), WEIGHT))


def test_steps_of_the_reference_are_no_mistake() -> None:
    """A weight that was stored in steps, with the scales of the next rows."""
    step = WEIGHT.abs().amax(1, keepdim=True) / 7
    stored = (WEIGHT / step).round() * step
    (pattern,) = propose_weights(Case(stored * step.roll(1, 0) / step, stored)) or [None]
    assert pattern is None or pattern.kind != "precision"


def test_another_factor_for_each_row_is_no_function_of_each_element() -> None:
    assert not propose_bends(Case(WEIGHT * torch.linspace(0.5, 2, 16).unsqueeze(1), WEIGHT))


# --- Which operand it is --------------------------------------------------------------------------


def solved(
    solve: Callable[[Predictor], Iterator[SolvedOperand]],
    function: Callable[..., Tensor],
    program: Callable[..., Tensor],
    operands: Sequence[Tensor],
) -> Tensor | None:
    """The operand that a program used, which can be called again."""
    reference, candidate = function(*operands), program(*operands)
    runs = PlaceRuns(
        tuple(operands),
        lambda values: function(*values),
        lambda: lambda values: program(*values),
        reference,
        candidate,
    )
    call = LiveCall(function, tuple(operands), {})
    arbiter = function(*(one.double() for one in operands))
    case = Case(candidate, reference, arbiter, context=Context(call=call, runs=runs))
    predictor = Predictor.of(case, call)
    assert predictor is not None
    operand = next(solve(predictor), None)
    return None if operand is None else operand.value.float()


def smooth(x: Tensor) -> Tensor:
    return x / x.abs().amax(0, keepdim=True).sqrt()


def test_an_input_is_solved_for_with_other_weights() -> None:
    """It depends on the values of the input, so no weight does it for all inputs."""

    def program(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.linear(smooth(x), weight, bias)

    operands = X, WEIGHT, BIAS
    assert solved(solve_weight, functional.linear, program, operands) is None
    value = solved(solve_input, functional.linear, program, operands)
    assert value is not None
    torch.testing.assert_close(value, smooth(X), rtol=1e-4, atol=1e-5)


def test_a_bias_is_solved_for() -> None:
    def program(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.linear(x, weight, bias.clamp(max=0.5))

    value = solved(solve_bias, functional.linear, program, (X, WEIGHT, BIAS))
    assert value is not None
    torch.testing.assert_close(value, BIAS.clamp(max=0.5), rtol=1e-5, atol=1e-6)


CONVOLUTIONS = {
    "conv2d": (functional.conv2d, IMAGE, (6, 4, 3, 2)),
    "conv_transpose2d": (functional.conv_transpose2d, IMAGE, (4, 5, 3, 2)),
    "conv3d": (functional.conv3d, normal(2, 2, 4, 5, 5), (3, 2, 2, 3, 2)),
    "conv1d": (functional.conv1d, normal(3, 4, 15), (6, 4, 5)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_filters_of_any_convolution_are_solved_for(name: str) -> None:
    function, image, shape = CONVOLUTIONS[name]
    used = normal(*shape)

    def program(x: Tensor, _: Tensor) -> Tensor:
        return function(x, used)

    value = solved(solve_weight, function, program, (image, normal(*shape)))
    assert value is not None
    torch.testing.assert_close(value, used, rtol=1e-4, atol=1e-5)
