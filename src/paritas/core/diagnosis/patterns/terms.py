"""Which terms of a sum count, and how often: solved for, not taken from a table.

A matrix product, a convolution, a reduction or a scattered sum is linear in the weights of its
terms. The weights that give the candidate say which terms were left out, counted twice, or taken
with another sign or factor, whichever terms these are.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import step_names
from paritas.core.diagnosis.patterns.convolutions import sliding_axes
from paritas.core.diagnosis.patterns.sums import PRODUCTS
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

# The factor of a product whose last axis is summed over.
_FACTORS = {
    **{name: factors[0] for name, factors in PRODUCTS.items()},
    "mv": "self",
    "addmv": "mat",
    "dot": "self",
}
# So many weights are solved for at once: more terms are solved for in groups, and these divided.
_MOST_GROUPS = 48
_MOST_ROUNDS = 3
# So many elements decide.
_MOST_ELEMENTS = 1 << 13
# A weight that is this near to a number with three digits is that number.
_NEAR = 1e-5
# The sum of all terms must be the right value up to this share.
_LINEAR = 1e-6
_ENOUGH = 1.2


@dataclasses.dataclass(frozen=True)
class _Terms:
    """The terms of a sum.

    Attributes:
        words: what they are.
        count: how many there are.
        weighted: the operator with a weight for each of them.
    """

    words: str
    count: int
    weighted: Callable[..., Any]


def solved_terms(
    step: Step, predict: Callable[[Variation], Tensor | None], candidate: Tensor, part: Tensor
) -> Iterator[Variation]:
    """The sum with other weights of its terms, which give the candidate.

    Args:
        predict: the value in question if the operator is computed so.
        candidate: the candidate, in float64.
        part: where it is wrong.
    """
    for terms in _terms_of(step):
        weights = _solve(terms, predict, candidate, part)
        if weights is not None:
            yield from _variations(terms, weights)


def _terms_of(step: Step) -> Iterator[_Terms]:
    name, values = step.name, step.values
    if name in _FACTORS:
        factor = _FACTORS[name]
        along = partial(_scale_factor, name=factor, axis=-1)
        yield _Terms("terms of each sum", values[factor].shape[-1], along)
    elif name in step_names("convolution", "convolution backward"):
        yield from _convolution_terms(step)
    elif name.startswith(("avg_pool", "adaptive_avg_pool")) and "self" in values:
        yield from _reduced_terms(values["self"], range(2, values["self"].dim()))
    elif "query" in values and "grad_out" not in values:
        along = partial(_scale_factor, name="value", axis=-2)
        yield _Terms("values", values["value"].shape[-2], along)
    elif name in ("sum", "mean"):
        yield from _reduced_terms(values["self"], values.get("dim"))
    elif name == "embedding_dense_backward":
        count = values["indices"].numel()
        yield _Terms("rows that are added up", count, _scaled_rows)
    elif name in step_names("indexed sum"):
        source = "src" if name == "scatter_add" else "source"
        along = partial(_scale_factor, name=source, axis=values["dim"])
        yield _Terms("rows that are added up", values[source].shape[values["dim"]], along)


def _convolution_terms(step: Step) -> Iterator[_Terms]:
    weight = step.values["weight"]
    if step.name == "convolution_backward":
        grad = step.values["grad_output"]
        for axis in range(grad.dim()):
            what = {0: "samples", 1: "channels"}.get(axis, f"positions along axis {axis}")
            along = partial(_scale_factor, name="grad_output", axis=axis)
            yield _Terms(f"{what} of the gradient", grad.shape[axis], along)
        return
    axis = 0 if step.values["transposed"] else 1
    along = partial(_scale_factor, name="weight", axis=axis)
    yield _Terms("input channels", weight.shape[axis], along)
    if not sliding_axes(step):
        return
    taps = math.prod(weight.shape[2:])
    yield _Terms("elements of the kernel", taps, _scaled_taps)
    for axis in range(2, weight.dim()):
        size = step.values["input"].shape[axis]
        along = partial(_scale_factor, name="input", axis=axis)
        yield _Terms(f"places of the input along axis {axis}", size, along)


def _reduced_terms(x: Tensor, dim: Any) -> Iterator[_Terms]:
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    for axis in dims:
        along = partial(_scale_factor, name="self", axis=axis)
        yield _Terms(f"elements along axis {axis}", x.shape[axis], along)


def _scale_factor(step: Step, weights: Tensor, name: str, axis: int) -> Any:
    value = step.values[name]
    shape = [1] * value.dim()
    shape[axis] = -1
    return step.run(**{name: value * weights.to(value).reshape(shape)})


def _scaled_taps(step: Step, weights: Tensor) -> Any:
    weight = step.values["weight"]
    return step.run(weight=weight * weights.to(weight).reshape(weight.shape[2:]))


def _scaled_rows(step: Step, weights: Tensor) -> Any:
    rows, indices = step.values["grad_output"], step.values["indices"]
    return step.run(grad_output=rows * weights.to(rows).reshape(*indices.shape, 1))


# --- Solving --------------------------------------------------------------------------------------


def _solve(
    terms: _Terms, predict: Callable[[Variation], Tensor | None], candidate: Tensor, part: Tensor
) -> Tensor | None:
    places = part.reshape(-1).nonzero().reshape(-1)
    places = places[:: max(1, len(places) // _MOST_ELEMENTS)]

    def value(weights: Tensor) -> Tensor | None:
        change = partial(terms.weighted, weights=weights)
        prediction = predict(Variation(PatternKind.PARTIAL_SUM, "", change))
        return None if prediction is None else prediction.reshape(-1)[places]

    if terms.count < 2:  # noqa: PLR2004
        return None
    for groups in _groupings(terms.count, len(places)):
        weights = _solve_from(value, groups, candidate.reshape(-1)[places], terms.count)
        if weights is not None:
            return weights
    return None


def _groupings(count: int, equations: int) -> Iterator[list[Tensor]]:
    """Groups of terms that may have one weight: the fewer elements decide, the larger."""
    most = min(_MOST_GROUPS, int(equations / _ENOUGH))
    every = torch.arange(count)
    if count <= most or most == _MOST_GROUPS:
        yield list(every.tensor_split(min(count, most)))
        return
    for power in range(1, 11):
        if count > 2**power and -(-count // 2**power) <= most:
            yield list(every.split(2**power))


def _solve_from(
    value: Callable[[Tensor], Tensor | None], groups: list[Tensor], candidate: Tensor, count: int
) -> Tensor | None:
    weights = torch.ones(count, dtype=torch.float64)
    for _ in range(_MOST_ROUNDS):
        solution = _solve_groups(value, weights, groups, candidate)
        if solution is None:
            return None
        unclear = []
        for group, number in zip(groups, solution.tolist(), strict=True):
            near = float(f"{number:.3g}") if abs(number) > _NEAR else 0.0
            is_clear = abs(number - near) <= _NEAR * max(1.0, abs(number))
            weights[group] = near
            if not is_clear and len(group) > 1:
                unclear += list(group.tensor_split(min(len(group), 8)))
            elif not is_clear:
                return None
        if not unclear:
            return weights
        if len(unclear) > _MOST_GROUPS:
            return None
        groups = unclear
    return None


def _solve_groups(
    value: Callable[[Tensor], Tensor | None],
    weights: Tensor,
    groups: list[Tensor],
    candidate: Tensor,
) -> Tensor | None:
    """The weight of each group of terms, the weights of the others as they are."""
    if len(candidate) < _ENOUGH * len(groups):
        return None
    none = weights.clone()
    none[torch.cat(groups)] = 0.0
    base = value(none)
    if base is None or not bool(torch.isfinite(base).all()):
        return None
    columns = []
    for group in groups:
        indicator = none.clone()
        indicator[group] = 1.0
        column = value(indicator)
        if column is None:
            return None
        columns.append(column - base)
    matrix = torch.stack(columns, dim=1)
    all_terms = none.clone()
    all_terms[torch.cat(groups)] = 1.0
    complete = value(all_terms)
    if complete is None or not bool(torch.isfinite(matrix).all()):
        return None
    size = float(complete.abs().max()) or 1.0
    if float((base + matrix.sum(dim=1) - complete).abs().max()) > _LINEAR * size:
        return None  # not linear
    target = (candidate - base).nan_to_num(0.0, 0.0, 0.0).unsqueeze(1)
    # Nothing here depends on some terms. Others that depend on each other have many solutions.
    used = (matrix != 0).any(dim=0)
    least_squares = torch.linalg.lstsq(matrix[:, used], target, driver="gelsd")
    if int(least_squares.rank) < int(used.sum()):
        return None
    solution = torch.ones(len(groups), dtype=torch.float64)
    solution[used] = least_squares.solution.reshape(-1)
    return solution


# --- What the weights say -------------------------------------------------------------------------


def _variations(terms: _Terms, weights: Tensor) -> Iterator[Variation]:
    others = sorted(set(weights[weights != 1].tolist()))
    if len(others) != 1 or bool((weights != 1).all()):
        return
    number = others[0]
    places = (weights == number).nonzero().reshape(-1).tolist()
    if number and 2 * len(places) > terms.count:
        return  # a factor on all: nothing depends on the others, which keep the weight 1
    which = f"{_list_places(places)} of the {terms.count} {terms.words}"
    change = partial(terms.weighted, weights=weights)
    verb = "is" if len(places) == 1 else "are"
    if number == 0:
        yield Variation(PatternKind.PARTIAL_SUM, f"{which} {verb} left out", change)
    elif number == round(number) and number > 1:
        often = "twice" if number == 2 else f"{number:g} times"  # noqa: PLR2004
        verb = "counts" if len(places) == 1 else "count"
        yield Variation(PatternKind.DOUBLED_REDUCTION, f"{which} {verb} {often}", change)
    elif number == -1:
        yield Variation(PatternKind.SIGN, f"{which} {verb} subtracted", change)
    else:
        yield Variation(PatternKind.FACTOR, f"{which} {verb} multiplied by {number:g}", change)


_MOST_LISTED = 4


def _list_places(places: list[int]) -> str:
    """`number 3`, `numbers 8 to 15`, `numbers 1, 3 and others`; they are counted from 0."""
    if len(places) == 1:
        return f"number {places[0]}"
    if places[-1] - places[0] == len(places) - 1:
        return f"numbers {places[0]} to {places[-1]}"
    if len(places) <= _MOST_LISTED:
        return f"numbers {', '.join(map(str, places[:-1]))} and {places[-1]}"
    return f"numbers {', '.join(map(str, places[: _MOST_LISTED - 1]))} and {len(places) - 3} others"
