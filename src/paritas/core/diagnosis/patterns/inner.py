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

from paritas.core.diagnosis.patterns.functions import UNARY
from paritas.core.diagnosis.patterns.sums import reduced_dims, tails
from paritas.core.diagnosis.patterns.variations import LARGEST_EPS, Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

_TWICE = frozenset({"add", "sub", "mul", "div"})
_REDUCTIONS = frozenset(
    {
        *("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "linalg_vector_norm", "prod"),
        *("argmax", "argmin", "any", "all"),
    }
)
_AVERAGES = frozenset({"mean", "var"})
# Functions of one tensor, with numbers that say which.
_WITH_NUMBERS = frozenset({"pow", "clamp", "clamp_min", "clamp_max"})


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
                    ("1 + the factor is taken instead of the factor", _one_more),
                    ("the factor - 1 is taken instead of the factor", _one_less),
                    ("the square of the factor is taken", torch.square),
                    ("the root of the factor is taken", torch.sqrt),
                    ("the inverse of the factor is taken", torch.reciprocal),
                ):
                    altered = partial(_with_operand, name=name, change=change)
                    yield Variation(PatternKind.FACTOR, sentence, altered)


def _one_more(value: Tensor) -> Tensor:
    return 1 + value


def _one_less(value: Tensor) -> Tensor:
    return value - 1


def _with_operand(step: Step, name: str, change: Any) -> Any:
    return step.run(**{name: change(step.values[name])})


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
    yield Variation(
        PatternKind.MISSING_OPERAND, sentence, partial(_alter_result, alter=torch.zeros_like)
    )
    yield Variation(PatternKind.SIGN, "it is negated", partial(_alter_result, alter=torch.neg))


def _alter_result(step: Step, alter: Callable[[Tensor], Tensor]) -> Tensor:
    return alter(step.run())


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
            change = partial(_select_places, dim=dim, places=places)
            yield Variation(kind, words, change)
            if step.name in _AVERAGES:
                words = f"{words}, and it is still divided by their number"
                yield Variation(kind, words, partial(_with_divisor_kept, change=change, dim=dim))


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


def _select_places(step: Step, dim: int, places: Tensor) -> Any:
    x = step.values["self"]
    return step.run(self=x.index_select(dim, places.to(x.device)))


def _with_divisor_kept(step: Step, change: Any, dim: int) -> Any:
    count = len(change.keywords["places"])
    return change(step) * (count / step.values["self"].shape[dim])


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
            change = partial(_along, dim=other_dim)
            yield Variation(PatternKind.WRONG_AXIS, sentence, change)


def _in_memory(step: Step, dim: int) -> Tensor:
    x = step.values["self"]
    places = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    position = step.run(keepdim=True)
    result: Tensor = places.gather(dim, position).reshape(step.run().shape)
    return result


def _along(step: Step, dim: Any) -> Any:
    return step.run(dim=dim)


def _other_rows(step: Step, x: Tensor, dims: tuple[int, ...]) -> Iterator[Variation]:
    if not step.values.get("keepdim"):
        return
    kind = PatternKind.WRONG_INDEX
    for axis in (dim for dim in range(x.dim()) if dim not in dims and x.shape[dim] > 1):
        for by in (1, -1):
            where = "before" if by > 0 else "after"
            sentence = f"that of the row {where} the right one along axis {axis} is used"
            for edge in (False, True):
                change = partial(_of_neighbour, axis=axis, by=by, edge=edge)
                yield Variation(kind, sentence, change)
        for position, words in ((0, "first"), (x.shape[axis] - 1, "last")):
            sentence = f"that of the {words} row along axis {axis} is used for all"
            yield Variation(kind, sentence, partial(_of_one_row, axis=axis, place=position))


def _of_neighbour(step: Step, axis: int, by: int, *, edge: bool) -> Tensor:
    value = step.run()
    size = value.shape[axis]
    places = torch.arange(size, device=value.device) - by
    moved = places.clamp(0, size - 1) if edge else places % size
    result: Tensor = value.index_select(axis, moved)
    return result


def _of_one_row(step: Step, axis: int, place: int) -> Tensor:
    value = step.run()
    result: Tensor = value.narrow(axis, place, 1).expand(value.shape)
    return result


# --- Running sums ---------------------------------------------------------------------------------

_NEUTRAL = {"cumsum": 0.0, "cumprod": 1.0, "logcumsumexp": -math.inf}
_OPPOSITES = {"cummax": torch.cummin, "cummin": torch.cummax}


def running_variations(step: Step) -> Iterator[Variation]:
    """A running sum or product that starts again, or that begins with something else."""
    x, name = step.values.get("self"), step.name
    if name in _OPPOSITES:
        sentence = f"{_OPPOSITES[name].__name__} instead of {name}"
        opposite = partial(_opposite, function=_OPPOSITES[name])
        yield Variation(PatternKind.WRONG_REDUCTION, sentence, opposite)
    if name not in _NEUTRAL or not isinstance(x, torch.Tensor) or not x.dim():
        return
    size = x.shape[step.values["dim"]]
    for position in [*range(1, size)][:_MOST_STARTS]:
        sentence = f"what comes before element {position} is not carried over"
        yield Variation(
            PatternKind.PARTIAL_SUM, sentence, partial(_restart_parts, sizes=[position])
        )
    for length in range(2, min(size // 2 + 1, _MOST_STARTS)):
        sentence = f"it starts again every {length} elements: the sum so far is not carried over"
        sizes = [length] * (size // length)
        yield Variation(PatternKind.PARTIAL_SUM, sentence, partial(_restart_parts, sizes=sizes))
    sentence = "the first element is left out"
    yield Variation(PatternKind.OFF_BY_ONE, sentence, _without_first)
    sentence = "the first element counts twice"
    yield Variation(PatternKind.DOUBLED_REDUCTION, sentence, _with_first_twice)
    sentence = "it is not started again with each row"
    yield Variation(PatternKind.WRONG_AXIS, sentence, _over_all_rows)


# So many places and lengths are tried.
_MOST_STARTS = 128


def _opposite(step: Step, function: Any) -> Any:
    return function(step.values["self"], step.values["dim"])


def _restart_parts(step: Step, sizes: list[int]) -> Tensor:
    x, dim = step.values["self"], step.values["dim"]
    rest = x.shape[dim] - sum(sizes)
    parts = x.split([*sizes, rest] if rest else sizes, dim)
    return torch.cat([step.run(self=part) for part in parts], dim)


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


def moved_eps(eps: float) -> Iterator[Variation]:
    """A root whose eps was meant to be added to what is under it."""
    for sentence, change in (
        ("added to the root, not to what is under it", _eps_on_the_root),
        ("added to the result, not to what is under the root", _eps_on_the_result),
        ("the least value under the root, not added", _eps_as_least),
        ("left out", _without_eps),
        ("added twice", _with_eps_twice),
    ):
        yield Variation(PatternKind.EPS, f"eps ({eps:.3g}) is {sentence}", partial(change, eps=eps))


def _eps_on_the_root(step: Step, eps: float) -> Any:
    outer = step.run(self=step.values["self"] - eps)
    return outer + eps if step.name == "sqrt" else 1 / (1 / outer + eps)


def _eps_on_the_result(step: Step, eps: float) -> Any:
    return step.run(self=step.values["self"] - eps) + eps


def _eps_as_least(step: Step, eps: float) -> Any:
    return step.run(self=(step.values["self"] - eps).clamp(min=eps))


def _without_eps(step: Step, eps: float) -> Any:
    return step.run(self=step.values["self"] - eps)


def _with_eps_twice(step: Step, eps: float) -> Any:
    return step.run(self=step.values["self"] + eps)


_ROOTS = frozenset({"rsqrt", "sqrt", "reciprocal"})


def neighbour_variations(before: Step, step: Step) -> Iterator[Variation]:
    """Two neighbouring operators in the other order, as far as that is known."""
    eps = before.values.get("other")
    if step.name in _ROOTS and before.name == "add" and isinstance(eps, float):
        yield from moved_eps(eps)
