"""The weight of a product or a convolution as the candidate used it: solved for by least squares.

The result is linear in the weight. Each row of the input, or each window of it, is an equation. If
there are too few, the candidate is asked again with other inputs, where it can be called alone.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.case import roundoff, widen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.diagnosis.calls import LiveCall
    from paritas.diagnosis.patterns.predictions import Predictor
    from paritas.diagnosis.place_runs import PlaceRuns

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
class SolvedWeight:
    """A weight as the candidate used it.

    Attributes:
        number: its place among the floating-point tensors of the call.
        value: what was used.
        noise: of each element, as far as the candidate's rounding decides it.
    """

    number: int
    value: Tensor
    noise: Tensor


def solve_weight(predictor: Predictor) -> Iterator[SolvedWeight]:
    """The weight of a linear operator; nothing if it is none, or is not determined."""
    form = _form_of(predictor)
    if form is None or form.terms > _MOST_TERMS:
        return
    case, given = predictor.case, predictor.call.floating
    x = given[form.left]
    still = form.put(torch.zeros_like(x))
    if still is None or not case.is_finite:
        return
    equations = [(form.rows(widen(x)), form.columns(case.given - still))]
    wanted = _EQUATIONS * form.terms
    if equations[0][0].shape[-2] < wanted:
        equations += _ask(case.context.runs, x, case.candidate.dtype, form, wanted)
    rows = torch.cat([one for one, _ in equations], dim=-2)
    columns = torch.cat([one for _, one in equations], dim=-2)
    solution = _solve(rows, columns, roundoff(case.candidate))
    if solution is not None:
        value, noise = (form.weight(one) for one in solution)
        yield SolvedWeight(form.right, value, noise)


def _ask(
    runs: PlaceRuns | None, x: Tensor, dtype: torch.dtype, form: _Form, wanted: float
) -> list[tuple[Tensor, Tensor]]:
    """What the candidate gives for other inputs; empty if it cannot be asked."""
    if runs is None or runs.given.dtype is not dtype:
        return []
    place = runs.place_of(x)
    each = form.rows(widen(x)).shape[-2]
    calls = math.ceil(wanted / max(1, each))
    if place is None or calls > _MOST_CALLS or not runs.is_faithful:
        return []
    draw = torch.Generator().manual_seed(0)
    size = float(widen(x).square().mean().sqrt()) or 1.0
    operands = list(runs.operands)
    operands[place] = torch.zeros_like(x)
    still = runs.candidate(operands)
    if still is None:
        return []
    answers = []
    for _ in range(calls):
        other = size * torch.randn(x.shape, generator=draw, dtype=torch.float64)
        operands[place] = other.to(x)
        result = runs.candidate(operands)
        if result is None:
            return []
        answer = form.columns(widen(result) - widen(still))
        answers.append((form.rows(widen(operands[place])), answer))
    return answers


def _solve(rows: Tensor, columns: Tensor, unit: float) -> tuple[Tensor, Tensor] | None:
    """The weight and its noise; None if the equations do not determine it or do not hold."""
    count, terms = rows.shape[-2:]
    if count < _FEWEST * terms or rows.numel() > _MOST_ELEMENTS:
        return None
    sizes = torch.linalg.svdvals(rows)
    if float(sizes[..., -1].min()) * _MOST_CONDITION < float(sizes[..., 0].max()):
        return None
    inverse = torch.linalg.pinv(rows)
    value = inverse @ columns
    left = (rows @ value - columns).square().sum(-2, keepdim=True) / max(1, count - terms)
    scatter = left.sqrt()
    rounding = unit * columns.square().mean(-2, keepdim=True).sqrt()
    if bool((scatter > _MOST_ROUNDINGS * rounding.clamp(min=1e-300)).any()):
        return None
    noise = inverse.square().sum(-1, keepdim=True).sqrt() * torch.maximum(scatter, rounding)
    return value, noise


# --- Operators as products of rows and a weight ---------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Form:
    """An operator as rows times a matrix.

    Attributes:
        left: the place of the input among the floating-point tensors of the call.
        right: that of the weight.
        terms: of each sum.
        rows: the rows of an input: groups, equations, terms.
        columns: the same of a result: groups, equations, columns.
        weight: a weight in its own shape, from groups, terms and columns.
        put: what the call gives for another input, in float64.
    """

    left: int
    right: int
    terms: int
    rows: Callable[[Tensor], Tensor]
    columns: Callable[[Tensor], Tensor]
    weight: Callable[[Tensor], Tensor]
    put: Callable[[Tensor], Tensor | None]


# Where the input and the weight are among the floating-point tensors.
_PRODUCTS = {"linear": (0, 1), "mm": (0, 1), "matmul": (0, 1), "bmm": (0, 1), "addmm": (1, 2)}
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "convolution"})


def _form_of(predictor: Predictor) -> _Form | None:
    name, given = _name_of(predictor.call), predictor.call.floating
    if name in _PRODUCTS and len(given) > max(_PRODUCTS[name]):
        return _product(predictor, name)
    if name in _CONVOLUTIONS and len(given) > 1:
        return _convolution(predictor)
    return None


def _name_of(call: LiveCall) -> str:
    name = getattr(call.target, "__name__", "")
    packet = getattr(call.target, "overloadpacket", None)
    return str(getattr(packet, "__name__", name))


def _product(predictor: Predictor, name: str) -> _Form | None:
    left, right = _PRODUCTS[name]
    given = predictor.call.floating
    x, weight = given[left], given[right]
    shape, batch = weight.shape, weight.shape[:-2]
    if weight.dim() < 2 or x.dim() < 2 or (batch and x.shape[:-2] != batch):  # noqa: PLR2004
        return None

    def in_rows(value: Tensor) -> Tensor:
        count = math.prod(batch)
        return value.reshape(count, -1, value.shape[-1])

    def as_weight(value: Tensor) -> Tensor:
        value = value.mT if name == "linear" else value
        return value.expand(math.prod(batch), *value.shape[-2:]).reshape(shape)

    put = _put_input(predictor, left)
    return _Form(left, right, x.shape[-1], in_rows, in_rows, as_weight, put)


def _convolution(predictor: Predictor) -> _Form | None:
    steps = [step for _, step in predictor.steps if step.name == "convolution"]
    if len(steps) != 1 or len(predictor.steps) > 2:  # noqa: PLR2004
        return None
    values = steps[0].values
    x, weight = values["input"], values["weight"]
    if values["transposed"] or x.dim() not in (3, 4):
        return None
    groups, outer = values["groups"], weight.shape[0]
    terms = weight[0].numel()
    flat = x.dim() == 3  # noqa: PLR2004
    settings = {
        name: (absent, *values[name]) if flat else tuple(values[name])
        for name, absent in (("stride", 1), ("padding", 0), ("dilation", 1))
    }
    size = (1, *weight.shape[2:]) if flat else tuple(weight.shape[2:])

    def in_rows(value: Tensor) -> Tensor:
        value = value.reshape(-1, x.shape[1], *([1] if flat else []), *x.shape[2:])
        windows: Tensor = torch.nn.functional.unfold(value, size, **settings)
        rows: Tensor = windows.unflatten(1, (groups, terms)).movedim(0, 1).mT.flatten(1, 2)
        return rows

    def in_columns(value: Tensor) -> Tensor:
        value = value.reshape(-1, groups, outer // groups, math.prod(value.shape[2:]))
        return value.movedim(0, 1).mT.flatten(1, 2)

    def as_weight(value: Tensor) -> Tensor:
        full = value.expand(groups, terms, outer // groups)
        return full.mT.reshape(weight.shape)

    return _Form(0, 1, terms, in_rows, in_columns, as_weight, _put_input(predictor, 0))


def _put_input(predictor: Predictor, left: int) -> Callable[[Tensor], Tensor | None]:
    def put(value: Tensor) -> Tensor | None:
        return predictor.with_operand(left, value)

    return put
