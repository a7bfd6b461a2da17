"""Mistakes in one of several operators: left out, done twice, of other elements, of other rows.

They need nothing but the operator and its arguments, so they also cover mistakes that nobody has
thought of. What they give is as far from the right value as any other mistake, and there are many:
they are tried where no mistake of the operator's own family explains the candidate.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import step_names
from paritas.core.diagnosis.patterns.functions import UNARY
from paritas.core.diagnosis.patterns.steps import (
    spread_slice,
    then,
    with_altered,
    with_argument,
    with_order,
)
from paritas.core.diagnosis.patterns.sums import (
    opposite_result,
    reduced_dims,
    restart,
    scale_result,
    tails,
)
from paritas.core.diagnosis.patterns.variations import (
    LARGEST_EPS,
    Variation,
    repeat_edge,
    roll,
)
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

_TWICE = step_names("arithmetic")
# Reductions with one result: others give an index or a mean, too.
_REDUCTIONS = (step_names("reductions") - {"max", "min", "var_mean"}) | {"linalg_vector_norm"}
_AVERAGES = frozenset({"mean", "var"})
# Functions of one tensor, with numbers that say which.
_WITH_NUMBERS = step_names("limits") | {"pow"}


# --- Left out, done twice -------------------------------------------------------------------------


def step_variations(step: Step) -> Iterator[Variation]:
    """One of several operators left out, or done twice."""
    values = list(step.values.values())
    if step.name in _TWICE:
        yield from _pair_variations(step, values[0], values[1])
    elif (step.name in UNARY or step.name in _WITH_NUMBERS) and "self" in step.values:
        sentence = f"{step.name} is left out"
        kind = PatternKind.SIGN if step.name == "neg" else PatternKind.OTHER_FUNCTION
        yield Variation(kind, sentence, partial(_one_operand, name="self"))
        if step.name in UNARY and step.name != "neg":
            sentence = f"{step.name} is applied twice"
            yield Variation(PatternKind.OTHER_FUNCTION, sentence, _done_twice)


def _pair_variations(step: Step, left: Any, right: Any) -> Iterator[Variation]:
    if not isinstance(left, torch.Tensor):
        return
    is_product = step.name in ("mul", "div")
    small = isinstance(right, float) and not is_product and abs(right) <= LARGEST_EPS
    left_out = PatternKind.EPS if small else PatternKind.MISSING_OPERAND
    sentence = f"the second operand of {step.name} is left out"
    yield Variation(left_out, sentence, partial(_one_operand, name="self"))
    if isinstance(right, torch.Tensor):
        sentence = f"the first operand of {step.name} is left out"
        yield Variation(left_out, sentence, partial(_one_operand, name="other"))
    sentence = f"the second operand of {step.name} is applied twice"
    twice = PatternKind.EPS if small else PatternKind.FACTOR
    if isinstance(right, torch.Tensor) and right.dim() == 1 and not is_product:
        twice = PatternKind.REPEATED_BIAS
    yield Variation(twice, sentence, _done_twice)
    if isinstance(right, torch.Tensor) and step.name == "mul":
        for name, operand in (("self", left), ("other", right)):
            if operand.dim() <= 1 < max(left.dim(), right.dim()):
                for sentence, change in (
                    ("1 + the factor is taken instead of the factor", lambda factor: 1 + factor),
                    ("the factor - 1 is taken instead of the factor", lambda factor: factor - 1),
                    ("the square of the factor is taken", torch.square),
                    ("the root of the factor is taken", torch.sqrt),
                    ("the inverse of the factor is taken", torch.reciprocal),
                ):
                    yield Variation(PatternKind.FACTOR, sentence, with_altered(name, change))


def _one_operand(step: Step, name: str) -> Tensor:
    value: Tensor = step.values[name]
    if name == "other" and step.name in ("sub", "div"):
        value = -value if step.name == "sub" else 1 / value
    return value.expand(step.run().shape)


def _done_twice(step: Step) -> Any:
    return step.run(self=step.run())


def alteration_variations() -> Iterator[Variation]:
    """The result of one of several operators is left out, or negated."""
    sentence = "it is left out: 0 is used"
    zeros = then(torch.zeros_like)
    yield Variation(PatternKind.MISSING_OPERAND, sentence, zeros)
    yield Variation(PatternKind.SIGN, "it is negated", then(torch.neg))


# --- Which elements a reduction has ---------------------------------------------------------------

# So many lengths and tiles are tried, beside those that are likely.
_FEW = 8
_TILES = (2, 4, 8, 16, 32, 64, 128, 256, 512)


def reduction_variations(step: Step) -> Iterator[Variation]:
    """A reduction along other axes, or of another row."""
    if not _is_reduction(step):
        return
    x, dims = step.values["self"], reduced_dims(step)
    if step.name in ("argmax", "argmin") and step.values.get("dim") is not None:
        sentence = "the position is that in the whole memory, not along the axis"
        yield Variation(PatternKind.WRONG_INDEX, sentence, partial(_in_memory, dim=dims[0]))
    yield from _other_axes(step, x, dims)
    yield from _other_rows(step, x, dims)


def selection_variations(step: Step) -> Iterator[Variation]:
    """A reduction of fewer elements, or of some of them twice."""
    if not _is_reduction(step):
        return
    for dim in reduced_dims(step):
        size = step.values["self"].shape[dim]
        for kind, sentence, places in _selections(size):
            if len(places) == 1 and step.name != "sum":
                continue  # another number of the same elements: one of them
            words = f"{sentence} along axis {dim}"
            change = with_order("self", dim, places)
            yield Variation(kind, words, change)
            if step.name in _AVERAGES:
                words = f"{words}, and it is still divided by their number"
                yield Variation(kind, words, scale_result(len(places) / size, change))


def _is_reduction(step: Step) -> bool:
    x = step.values.get("self")
    return step.name in _REDUCTIONS and isinstance(x, torch.Tensor) and x.dim() > 0


def _selections(size: int) -> Iterator[tuple[PatternKind, str, Tensor]]:
    """Elements that may be left out, or that may count twice, beside those of the family."""
    every = torch.arange(size)
    tiles = [tile for tile in _TILES if tile < size]
    counts = {*range(1, _FEW), size // 2, size - size // 2, size - 1}
    counts |= {size - tile for tile in tiles}
    for count in sorted(length for length in counts - set(tails(size)) if 0 < length < size):
        kind = PatternKind.PARTIAL_SUM
        yield kind, f"the last {count} of {size} elements are left out", every[:-count]
        yield kind, f"the first {count} of {size} elements are left out", every[count:]
    for stride in sorted({2, 4, *(width for width in range(3, 9) if size % width == 0)}):
        for start in range(stride if stride < size else 0):
            sentence = f"only every element number {start} of {stride} counts"
            yield PatternKind.PARTIAL_SUM, sentence, every[start::stride]
    for tile in (width for width in tiles[1:] if 2 * width < size):
        for start in range(tile, size - tile, tile)[:_FEW]:
            sentence = f"elements {start} to {start + tile - 1} of {size} are left out"
            selection = torch.cat([every[:start], every[start + tile :]])
            yield PatternKind.PARTIAL_SUM, sentence, selection
    for tile in (1, *tiles):
        kind = PatternKind.DOUBLED_REDUCTION
        for start in {0, size - tile}:
            sentence = f"elements {start} to {start + tile - 1} of {size} count twice"
            yield kind, sentence, torch.cat([every, every[start : start + tile]])


# --- Other axes, other rows -----------------------------------------------------------------------

_MOST_RANK = 5


def _other_axes(step: Step, x: Tensor, dims: tuple[int, ...]) -> Iterator[Variation]:
    """Along other axes; the result of fewer or more broadcasts where they are kept."""
    dim = step.values.get("dim")
    if not step.values.get("keepdim") or x.dim() > _MOST_RANK:
        return
    for count in range(1, x.dim() + 1):
        for other in itertools.combinations(range(x.dim()), count):
            if other == dims or math.prod(x.shape[axis_number] for axis_number in other) == 1:
                continue
            if isinstance(dim, int) and count > 1:
                continue
            sentence = f"along axes {list(other)} instead of {list(dims)}"
            other_dim = other[0] if isinstance(dim, int) else list(other)
            yield Variation(PatternKind.WRONG_AXIS, sentence, with_argument("dim", other_dim))


def _in_memory(step: Step, dim: int) -> Tensor:
    x = step.values["self"]
    places = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    position = step.run(keepdim=True)
    result: Tensor = places.gather(dim, position).reshape(step.run().shape)
    return result


def _other_rows(step: Step, x: Tensor, dims: tuple[int, ...]) -> Iterator[Variation]:
    if not step.values.get("keepdim"):
        return
    kind = PatternKind.WRONG_INDEX
    for axis in (dim for dim in range(x.dim()) if dim not in dims and x.shape[dim] > 1):
        for by in (1, -1):
            where = "before" if by > 0 else "after"
            sentence = f"that of the row {where} the right one along axis {axis} is used"
            for move in (roll, repeat_edge):
                change = then(partial(move, axis=axis, by=by))
                yield Variation(kind, sentence, change)
        for position, words in ((0, "first"), (x.shape[axis] - 1, "last")):
            sentence = f"that of the {words} row along axis {axis} is used for all"
            spread = partial(spread_slice, axis=axis, position=position)
            yield Variation(kind, sentence, then(spread))


# --- Running sums ---------------------------------------------------------------------------------

_NEUTRAL = {"cumsum": 0.0, "cumprod": 1.0, "logcumsumexp": -math.inf}
_OPPOSITES = {"cummax": torch.cummin, "cummin": torch.cummax}


def running_variations(step: Step) -> Iterator[Variation]:
    """A running sum or product that starts again, or that begins with something else."""
    x, name = step.values.get("self"), step.name
    if name in _OPPOSITES:
        sentence = f"{_OPPOSITES[name].__name__} instead of {name}"
        opposite = partial(opposite_result, function=_OPPOSITES[name])
        yield Variation(PatternKind.WRONG_REDUCTION, sentence, opposite)
    if name not in _NEUTRAL or not isinstance(x, torch.Tensor) or not x.dim():
        return
    size = x.shape[step.values["dim"]]
    for position in [*range(1, size)][:_MOST_STARTS]:
        sentence = f"what comes before element {position} is not carried over"
        yield Variation(PatternKind.PARTIAL_SUM, sentence, partial(restart, sizes=[position]))
    for length in range(2, min(size // 2 + 1, _MOST_STARTS)):
        sentence = f"it starts again every {length} elements: the sum so far is not carried over"
        sizes = [length] * (size // length)
        yield Variation(PatternKind.PARTIAL_SUM, sentence, partial(restart, sizes=sizes))
    sentence = "the first element is left out"
    yield Variation(PatternKind.OFF_BY_ONE, sentence, _without_first)
    sentence = "the first element counts twice"
    yield Variation(PatternKind.DOUBLED_REDUCTION, sentence, _with_first_twice)
    sentence = "it is not started again with each row"
    yield Variation(PatternKind.WRONG_AXIS, sentence, _over_all_rows)


# So many places and lengths are tried.
_MOST_STARTS = 128


def _without_first(step: Step) -> Any:
    x = step.values["self"].clone()
    x.narrow(step.values["dim"], 0, 1).fill_(_NEUTRAL[step.name])
    return step.run(self=x)


def _with_first_twice(step: Step) -> Any:
    x, dim = step.values["self"], step.values["dim"]
    longer = step.run(self=torch.cat([x.narrow(dim, 0, 1), x], dim))
    return longer.narrow(dim, 1, x.shape[dim])


def _over_all_rows(step: Step) -> Any:
    x, dim = step.values["self"], step.values["dim"]
    moved = x.movedim(dim, -1)
    value = step.run(self=moved.reshape(-1), dim=0)
    return value.reshape(moved.shape).movedim(-1, dim)


# --- Neighbouring operators -----------------------------------------------------------------------


def moved_eps(eps: float, *, is_guess: bool = False) -> Iterator[Variation]:
    """A root whose eps was meant to be added to what is under it.

    Args:
        is_guess: it is not known that there is this eps, so only what is likely is tried.
    """
    for words, is_likely, change in (
        ("added to the root, not to what is under it", True, _add_to_root),
        ("added to the result, not to what is under the root", False, _add_to_result),
        ("the least value under the root, not added", False, _limit_by_eps),
        ("left out", True, lambda step, eps: step.run(self=step.values["self"] - eps)),
        ("added twice", True, lambda step, eps: step.run(self=step.values["self"] + eps)),
    ):
        if is_likely or not is_guess:
            sentence = f"eps ({eps:.3g}) is {words}"
            yield Variation(PatternKind.EPS, sentence, partial(change, eps=eps))


def _add_to_root(step: Step, eps: float) -> Any:
    outer = step.run(self=step.values["self"] - eps)
    return outer + eps if step.name == "sqrt" else 1 / (1 / outer + eps)


def _add_to_result(step: Step, eps: float) -> Any:
    return step.run(self=step.values["self"] - eps) + eps


def _limit_by_eps(step: Step, eps: float) -> Any:
    return step.run(self=(step.values["self"] - eps).clamp(min=eps))


_ROOTS = step_names("roots and reciprocals")


def neighbour_variations(before: Step, step: Step) -> Iterator[Variation]:
    """Two neighbouring operators in the other order, as far as that is known."""
    eps = before.values.get("other")
    if step.name in _ROOTS and before.name == "add" and isinstance(eps, float):
        yield from moved_eps(eps)
