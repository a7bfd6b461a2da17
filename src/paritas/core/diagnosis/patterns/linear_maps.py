"""The operands of a product or a convolution as the candidate used them: solved for from results.

The result is linear in the weight: each row of the input, or each window of it, is an equation. It
is linear in the input as well: each column of the weight is one. If there are too few, the
candidate is asked again with other inputs, or other weights, where it can be called alone. So a
weight that is solved for is the same for all inputs, and an input the same for all weights.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.case import roundoff, widen
from paritas.core.diagnosis.patterns.fits import is_determined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from torch import Tensor

    from paritas.core.diagnosis.calls import LiveCall
    from paritas.core.diagnosis.patterns.predictions import Predictor
    from paritas.core.diagnosis.place_runs import PlaceRuns

# Larger systems are not solved.
_MOST_TERMS = 1024
_MOST_ELEMENTS = 1 << 22
# So many equations for each unknown, and so often is the candidate asked for them.
_EQUATIONS = 3.0
_FEWEST = 1.25
_MOST_CALLS = 48
# A candidate that leaves more than so many roundings of its values is not linear.
_MOST_ROUNDINGS = 64.0
_MOST_CONDITION = 1e6


@dataclasses.dataclass(frozen=True, eq=False)
class SolvedOperand:
    """An operand as the candidate used it.

    Attributes:
        number: its place among the floating-point tensors of the call.
        value: what was used.
        noise: of each element, as far as the candidate's rounding decides it.
    """

    number: int
    value: Tensor
    noise: Tensor


def solve_weight(predictor: Predictor) -> Iterator[SolvedOperand]:
    """The weight of a linear operator; nothing if it is none, or is not determined."""
    form = _form_of(predictor)
    if form is not None:
        yield from _solve_system(predictor, form.left, form.for_weight)


def solve_input(predictor: Predictor) -> Iterator[SolvedOperand]:
    """The input of a linear operator, in the same way."""
    form = _form_of(predictor)
    if form is not None:
        yield from _solve_system(predictor, form.left, form.for_input)


def solve_bias(predictor: Predictor) -> Iterator[SolvedOperand]:
    """What was added to all rows of a product, or to all pixels of a convolution."""
    form, case = _form_of(predictor), predictor.case
    if form is None or form.bias is None or not case.is_finite:
        return
    bias = widen(predictor.call.floating[form.bias])
    axis = range(len(case.shape))[form.channels]
    others = [dim for dim in range(len(case.shape)) if dim != axis]
    count = math.prod(case.shape[dim] for dim in others)
    if not others or bias.shape != (case.shape[axis],) or count < 2:  # noqa: PLR2004
        return
    noise = case.unit.square().mean(others).sqrt() / math.sqrt(count)
    yield SolvedOperand(form.bias, bias + case.error.mean(others), noise)


def is_linear(call: LiveCall) -> bool:
    """Whether it is a product or a convolution."""
    return _name_of(call) in {*_PRODUCTS, *_CONVOLUTIONS}


def _solve_system(predictor: Predictor, residual: int, system: _System) -> Iterator[SolvedOperand]:
    case, candidate = predictor.case, predictor.call.floating
    if system.terms > _MOST_TERMS or not case.is_finite:
        return
    # What the call gives for an input of zeros: a bias, or nothing.
    still = predictor.with_operand(residual, torch.zeros_like(candidate[residual]))
    if still is None:
        return
    varied = candidate[system.varied]
    equations = [(system.rows(widen(varied)), system.columns(case.given - still))]
    target = _EQUATIONS * system.terms
    if equations[0][0].shape[-2] < target:
        equations += _ask(case.context.runs, varied, case.candidate.dtype, system, target)
    rows = torch.cat([equation for equation, _ in equations], dim=-2)
    columns = torch.cat([equation for _, equation in equations], dim=-2)
    solution = _solve(rows, columns, roundoff(case.candidate))
    if solution is not None:
        value, noise = (system.operand(block) for block in solution)
        yield SolvedOperand(system.unknown, value, noise)


def _ask(
    runs: PlaceRuns | None, varied: Tensor, dtype: torch.dtype, system: _System, target: float
) -> list[tuple[Tensor, Tensor]]:
    """What the candidate gives for other values of the varied operand; empty if not asked."""
    if runs is None or runs.given.dtype is not dtype:
        return []
    position = _place_of(varied, runs)
    each = system.rows(widen(varied)).shape[-2]
    calls = math.ceil(target / max(1, each))
    if position is None or calls > _MOST_CALLS or not runs.is_faithful:
        return []
    draw = torch.Generator().manual_seed(0)
    size = float(widen(varied).square().mean().sqrt()) or 1.0
    operands = list(runs.operands)
    operands[position.number] = position.put(torch.zeros_like(varied))
    still = runs.candidate(operands)
    if still is None or not bool(torch.isfinite(still).all()):
        return []
    answers = []
    for _ in range(calls):
        other = size * torch.randn(varied.shape, generator=draw, dtype=torch.float64)
        other = other.to(varied)
        operands[position.number] = position.put(other)
        result = runs.candidate(operands)
        if result is None or not bool(torch.isfinite(result).all()):
            return []
        answer = system.columns(system.shaped(widen(result) - widen(still)))
        answers.append((system.rows(widen(other)), answer))
    return answers


@dataclasses.dataclass(frozen=True, eq=False)
class _Place:
    """Where an operand of the call is among what the candidate reads.

    Attributes:
        shape: that is read there.
        is_turned: it is read transposed.
    """

    number: int
    shape: torch.Size
    is_turned: bool = False

    def put(self, operand: Tensor) -> Tensor:
        """What is read there of an operand."""
        turned = operand.mT.contiguous() if self.is_turned else operand
        return turned.reshape(self.shape)


def _place_of(operand: Tensor, runs: PlaceRuns) -> _Place | None:
    """None if it is not clear. It may be read transposed, or in another shape."""
    places = []
    for number, tensor in enumerate(runs.operands):
        if tensor.numel() != operand.numel() or tensor.dtype != operand.dtype:
            continue
        if torch.equal(tensor.reshape(operand.shape), operand):
            places.append(_Place(number, tensor.shape))
        elif tensor.dim() == operand.dim() > 1 and torch.equal(tensor, operand.mT):
            places.append(_Place(number, tensor.shape, is_turned=True))
    return places[0] if len(places) == 1 else None


def _solve(rows: Tensor, columns: Tensor, unit: float) -> tuple[Tensor, Tensor] | None:
    """The weight and its noise; None if the equations do not determine it or do not hold."""
    count, terms = rows.shape[-2:]
    if count < _FEWEST * terms or rows.numel() > _MOST_ELEMENTS:
        return None
    if not is_determined(rows, _MOST_CONDITION):
        return None
    inverse = torch.linalg.pinv(rows)
    value = inverse @ columns
    residual = (rows @ value - columns).square().sum(-2, keepdim=True) / max(1, count - terms)
    scatter = residual.sqrt()
    rounding = unit * columns.square().mean(-2, keepdim=True).sqrt()
    if bool((scatter > _MOST_ROUNDINGS * rounding.clamp(min=1e-300)).any()):
        return None
    noise = inverse.square().sum(-1, keepdim=True).sqrt() * torch.maximum(scatter, rounding)
    return value, noise


# --- Operators as products ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _System:
    """Linear equations for an operand.

    Attributes:
        unknown: its place among the floating-point tensors of the call.
        varied: that of the operand that gives the equations.
        terms: of each sum.
        rows: of a value of the varied operand: groups, equations, terms.
        columns: of a result: groups, equations, columns.
        operand: the operand in its own shape, from groups, terms and columns.
        shaped: a result of the candidate in the shape of the call's.
    """

    unknown: int
    varied: int
    terms: int
    rows: Callable[[Tensor], Tensor]
    columns: Callable[[Tensor], Tensor]
    operand: Callable[[Tensor], Tensor]
    shaped: Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class _Form:
    """A linear operator.

    Attributes:
        left: the place of the input among the floating-point tensors of the call.
        bias: that of the bias, if there is one.
        channels: the axis of the result that the bias is along.
    """

    left: int
    for_weight: _System
    for_input: _System
    bias: int | None
    channels: int = -1


# Where the input and the weight are among the floating-point tensors, and the bias.
_PRODUCTS = {
    "linear": (0, 1, 2),
    "mm": (0, 1, None),
    "matmul": (0, 1, None),
    "bmm": (0, 1, None),
    "addmm": (1, 2, 0),
}
_CONVOLUTIONS = frozenset(
    f"conv{kind}{size}d" for kind in ("", "_transpose") for size in (1, 2, 3)
) | {"convolution"}


# The axes along which products are summed, by the names of their operands.
_SUMMED = {"input": -1, "weight": -1, "mat1": -1, "self": -1, "mat2": -2, "other": -2}


def summed_axis(call: LiveCall, argument: str) -> int | None:
    """The axis of an operand along which a product is summed; None if it is none."""
    return _SUMMED.get(argument) if _name_of(call) in _PRODUCTS else None


def _form_of(predictor: Predictor) -> _Form | None:
    name, operands = _name_of(predictor.call), predictor.call.floating
    if name in _PRODUCTS and len(operands) > max(_PRODUCTS[name][:2]):
        return _product(predictor, name)
    if name in _CONVOLUTIONS and len(operands) > 1:
        return _convolution(predictor)
    return None


def _name_of(call: LiveCall) -> str:
    name = getattr(call.target, "__name__", "")
    packet = getattr(call.target, "overloadpacket", None)
    return str(getattr(packet, "__name__", name))


def _product(predictor: Predictor, name: str) -> _Form | None:
    left, right, bias = _PRODUCTS[name]
    candidate, result = predictor.call.floating, predictor.case.shape
    x, weight = candidate[left], candidate[right]
    shape, batch = weight.shape, weight.shape[:-2]
    if weight.dim() < 2 or x.dim() < 2 or (batch and x.shape[:-2] != batch):  # noqa: PLR2004
        return None
    groups = math.prod(batch)

    def in_rows(value: Tensor) -> Tensor:
        return value.reshape(groups, -1, value.shape[-1])

    def as_weight(value: Tensor) -> Tensor:
        value = value.mT if name == "linear" else value
        return value.expand(groups, *value.shape[-2:]).reshape(shape)

    def in_columns(value: Tensor) -> Tensor:
        value = value.reshape(groups, *shape[-2:])
        return value if name == "linear" else value.mT

    def as_input(value: Tensor) -> Tensor:
        full = value.expand(groups, x.shape[-1], x.numel() // x.shape[-1] // groups)
        return full.mT.reshape(x.shape)

    def reshape_result(value: Tensor) -> Tensor:
        return value.reshape(result)

    terms = x.shape[-1]
    for_weight = _System(right, left, terms, in_rows, in_rows, as_weight, reshape_result)
    for_input = _System(
        left, right, terms, in_columns, lambda value: in_rows(value).mT, as_input, reshape_result
    )
    return _Form(
        left, for_weight, for_input, bias if bias is None or bias < len(candidate) else None
    )


def _convolution(predictor: Predictor) -> _Form | None:
    steps = [step for _, step in predictor.steps if step.name == "convolution"]
    if len(steps) != 1 or len(predictor.steps) > 2:  # noqa: PLR2004
        return None
    values = steps[0].values
    x, weight = values["input"], values["weight"]
    candidate, shape = predictor.call.floating, predictor.case.shape
    if x.dim() != weight.dim() or candidate[0].numel() != x.numel():
        return None
    groups = values["groups"]
    outer, inner = shape[-weight.dim() + 1] // groups, x.shape[1] // groups
    terms = inner * math.prod(weight.shape[2:])

    def in_rows(value: Tensor) -> Tensor:
        return windows_in_rows(value.reshape(x.shape), values)

    def in_columns(value: Tensor) -> Tensor:
        value = value.reshape(-1, groups, outer, math.prod(shape[-weight.dim() + 2 :]))
        return value.movedim(0, 1).mT.flatten(1, 2)

    def as_weight(value: Tensor) -> Tensor:
        full = value.expand(groups, terms, outer).mT
        if values["transposed"]:
            full = full.unflatten(2, (inner, -1)).transpose(1, 2)
        return full.reshape(weight.shape)

    def as_input(value: Tensor) -> Tensor:
        return value.expand(1, x[0].numel(), len(x)).mT.reshape(candidate[0].shape)

    def reshape_result(value: Tensor) -> Tensor:
        return value.reshape(shape)

    def in_pixels(value: Tensor) -> Tensor:
        return _pixels(value.reshape(weight.shape), x.shape[1:], values)

    for_weight = _System(1, 0, terms, in_rows, in_columns, as_weight, reshape_result)
    for_input = _System(
        0, 1, x[0].numel(), in_pixels, lambda value: value.reshape(1, len(x), -1).mT, as_input,
        reshape_result,
    )  # fmt: skip
    return _Form(0, for_weight, for_input, 2 if len(candidate) > 2 else None, 1 - weight.dim())  # noqa: PLR2004


def windows_in_rows(x: Tensor, values: Mapping[str, Any]) -> Tensor:
    """What each place of a convolution's result reads: groups, places, elements."""
    groups = values["groups"]
    windows = _windows(x, values).unflatten(1, (groups, -1)).movedim(1, 0)
    windows = windows.movedim(2, 1 - x.dim())  # groups, batch, places, channel, window
    terms = math.prod(windows.shape[1 - x.dim() :])
    rows: Tensor = windows.reshape(groups, -1, terms)
    return rows


def _windows(x: Tensor, values: Mapping[str, Any]) -> Tensor:
    """What each place of a convolution's result reads: batch, channel, places, window."""
    for axis, size in enumerate(values["weight"].shape[2:]):
        stride, padding, dilation, more = (
            int(values[name][axis]) for name in ("stride", "padding", "dilation", "output_padding")
        )
        width = dilation * (size - 1) + 1
        at = axis + 2
        if values["transposed"]:
            # The gradient of a convolution: zeros between the elements, and the window turned.
            shape = [*x.shape[:at], (x.shape[at] - 1) * stride + 1, *x.shape[at + 1 :]]
            spread = x.new_zeros(shape)
            spread.movedim(at, 0)[::stride] = x.movedim(at, 0)
            x, before, after, stride = spread, width - 1 - padding, width - 1 - padding + more, 1
        else:
            before = after = padding
        x = torch.nn.functional.pad(x.movedim(at, -1), (before, after)).movedim(-1, at)
        x = x.unfold(at, width, stride)[..., ::dilation]
        x = x.flip(-1) if values["transposed"] else x
    return x


def _pixels(weight: Tensor, shape: torch.Size, values: Mapping[str, Any]) -> Tensor:
    """What each element of a convolution's result is of each element of one input."""
    count = math.prod(shape)
    if count > _MOST_TERMS:
        return weight.new_zeros(1, 0, count)
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    each = torch.eye(count, dtype=weight.dtype).reshape(count, *shape)
    settings = [values[name] for name in names]
    result: Tensor = torch.ops.aten.convolution(each, weight, None, *settings)
    return result.reshape(1, count, -1).mT
