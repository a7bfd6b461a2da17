"""Elements that are chosen or compared, with a mistake that no argument can express."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import step_names
from paritas.core.diagnosis.patterns.steps import (
    flat_padding,
    with_altered,
    with_argument,
)
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step


def selection_variations(step: Step) -> Iterator[Variation]:
    """The mistakes that are known of operators that choose or compare elements."""
    name = step.name
    if name in _EXTREMES or name in ("median", "nanmedian", "kthvalue"):
        yield from _other_ranks(step)
    elif name in step_names("orders"):
        yield from _other_choices(step)
    elif name == "max_pool2d_with_indices" and any(step.values["padding"]):
        sentence = "the padding takes part in the maximum, as 0"
        yield Variation(PatternKind.ARGUMENT, sentence, _pooled_with_zeros)
    elif name in ("grid_sampler_2d", "grid_sampler_3d"):
        yield from _other_grids(step)
    elif name in ("embedding_bag", "embedding_bag_forward_only"):
        yield from _other_bags(step)
    elif name in step_names("comparisons"):
        yield from _compared_with_nothing(step)
    elif name == "round":
        for words, compute in OTHER_TIES.items():
            sentence = f"halves are rounded {words}, not to even"
            change = partial(_round_decimals, compute=compute)
            yield Variation(PatternKind.TIE_BREAKING, sentence, change)


# --- Another element of each line -----------------------------------------------------------------

# Operators that choose the first in an order, and whether that is the decreasing one.
_EXTREMES = {
    "argmax": True,
    "argmin": False,
    "max": True,
    "min": False,
    "amax": True,
    "amin": False,
}
# So many elements from either end of the order are tried.
_MOST_RANKS = 4
_NUMERALS = {1: "", 2: "second ", 3: "third ", 4: "fourth "}


def _other_ranks(step: Step) -> Iterator[Variation]:
    """The second largest for the largest, the smallest for the largest."""
    x, dim = step.values.get("self"), step.values.get("dim")
    if not isinstance(x, torch.Tensor) or not x.dim():
        return
    if isinstance(dim, list | tuple):
        dim = dim[0] if len(dim) == 1 else None
    size = x.numel() if dim is None else x.shape[dim]
    if step.name == "kthvalue":
        right = step.values["k"]
        yield from _other_numbers(right, size)
        return
    kind = PatternKind.WRONG_INDEX if "arg" in step.name else PatternKind.WRONG_REDUCTION
    ends = itertools.product(range(1, min(size, _MOST_RANKS) + 1), (True, False))
    for number, is_largest in ends:
        if number == 1 and step.name in _EXTREMES and _EXTREMES[step.name] is is_largest:
            continue
        word = "largest" if is_largest else "smallest"
        sentence = f"the {_NUMERALS[number]}{word} of each line is chosen"
        change = partial(_of_rank, dim=dim, number=number, is_largest=is_largest)
        yield Variation(kind, sentence, change)


def _other_numbers(right: int, size: int) -> Iterator[Variation]:
    for other in dict.fromkeys((size + 1 - right, right + 1, right - 1, 1, size)):
        if 1 <= other <= size and other != right:
            sentence = f"k is {other} instead of {right}"
            if other == size + 1 - right:
                sentence = f"the elements are counted from the largest: {sentence}"
            yield Variation(PatternKind.ARGUMENT, sentence, with_argument("k", other))


def _of_rank(step: Step, dim: int | None, number: int, *, is_largest: bool) -> Any:
    x = step.values["self"]
    lines, axis = (x.flatten(), 0) if dim is None else (x, dim)
    values, places = lines.sort(dim=axis, descending=is_largest, stable=True)
    chosen = [tensor.narrow(axis, number - 1, 1) for tensor in (values, places)]
    right = step.run()
    outputs = right if isinstance(right, tuple | list) else [right]
    results = [
        (chosen[0] if output.is_floating_point() else chosen[1]).reshape(output.shape)
        for output in outputs
    ]
    return results[0] if isinstance(right, torch.Tensor) else tuple(results)


def _other_choices(step: Step) -> Iterator[Variation]:
    """Others of a sorted line, or in another order."""
    if step.name == "topk":
        yield Variation(PatternKind.SHIFT, "the largest is skipped", _without_first)
        yield Variation(PatternKind.WRONG_INDEX, "the first of each line are chosen", _first_ones)
    else:
        sentence = "the rank of each element, not the place of each rank"
        yield Variation(PatternKind.WRONG_INDEX, sentence, _inverse_order)
    if step.name != "argsort":
        for sentence, order in (
            ("the chosen elements are in the reverse order", _reverse_selection),
            ("the chosen elements are in the order of their places", _in_place_order),
        ):
            yield Variation(PatternKind.PERMUTATION, sentence, order)


def _without_first(step: Step) -> Any:
    count, dim = step.values["k"], step.values["dim"]
    more = step.run(k=count + 1)
    return tuple(tensor.narrow(dim, 1, count) for tensor in more)


def _first_ones(step: Step) -> Any:
    x, count, dim = (step.values[name] for name in ("self", "k", "dim"))
    _, places = step.run()
    shape = [-1 if axis == dim % x.dim() else 1 for axis in range(x.dim())]
    first = torch.arange(count, device=x.device).view(shape).expand_as(places)
    return x.gather(dim, first), first


def _inverse_order(step: Step) -> Any:
    right, dim = step.run(), step.values["dim"]
    if isinstance(right, torch.Tensor):
        return right.argsort(dim)
    return right[0], right[1].argsort(dim)


def _reverse_selection(step: Step) -> Any:
    return tuple(tensor.flip(step.values["dim"]) for tensor in step.run())


def _in_place_order(step: Step) -> Any:
    x, dim = step.values["self"], step.values["dim"]
    places = step.run()[1].sort(dim).values
    return x.gather(dim, places), places


def _pooled_with_zeros(step: Step) -> Any:
    padded = torch.nn.functional.pad(step.values["self"], flat_padding(step.values["padding"]))
    return step.with_first(step.run(self=padded, padding=[0] * len(step.values["padding"]))[0])


# --- Places between pixels ------------------------------------------------------------------------


_GRID_MODES = {
    "interpolation_mode": ("bilinear", "nearest", "bicubic"),
    "padding_mode": ("zeros", "border", "reflection"),
}


def _other_grids(step: Step) -> Iterator[Variation]:
    """Places that are half a pixel off, in the other order, or from the other side."""
    rank = step.values["input"].dim() - 2
    shares = ((1.0, "half a pixel"), (2.0, "a pixel"))
    for (share, words), sign in itertools.product(shares, (1.0, -1.0)):
        way = "far" if sign > 0 else "short"
        for chosen in (range(rank), *([axis] for axis in range(rank))):
            where = "every axis" if len(chosen) > 1 else f"axis {rank + 1 - chosen[0]}"
            sentence = f"the places of grid are {words} too {way} along {where}"
            change = partial(_moved_grid, by=sign * share, chosen=tuple(chosen))
            yield Variation(PatternKind.SHIFT, sentence, change)
    for kind, sentence, alter in (
        (
            PatternKind.SWAPPED_OPERANDS,
            "x and y of grid are exchanged",
            lambda value: value.flip(-1),
        ),
        (PatternKind.SIGN, "the places of grid are negated", torch.neg),
        (PatternKind.ARGUMENT, "grid is between 0 and 1", lambda value: (value + 1) / 2),
    ):
        yield Variation(kind, sentence, with_altered("grid", alter))
    for name, modes in _GRID_MODES.items():
        right = step.values[name]
        for other, mode in enumerate(modes):
            if other != right:
                sentence = f"{name} is {mode!r} instead of {modes[right]!r}"
                yield Variation(PatternKind.ARGUMENT, sentence, with_argument(name, other))


def _moved_grid(step: Step, by: float, chosen: tuple[int, ...]) -> Any:
    grid, sizes = step.values["grid"], step.values["input"].shape[2:]
    # A grid has the place along the last axis first.
    steps = [by / size if axis in chosen else 0.0 for axis, size in enumerate(reversed(sizes))]
    return step.run(grid=grid + torch.tensor(steps).to(grid))


# --- Bags of rows ---------------------------------------------------------------------------------

_BAG_MODES = ("the sum", "the mean", "the maximum")


def _other_bags(step: Step) -> Iterator[Variation]:
    right = step.values["mode"]
    for other, word in enumerate(_BAG_MODES):
        if other != right:
            sentence = f"{word} of each bag instead of {_BAG_MODES[right]}"
            yield Variation(PatternKind.WRONG_REDUCTION, sentence, with_argument("mode", other))
    for by, way in ((1, "late"), (-1, "early")):
        sentence = f"each bag but the first begins one row too {way}"
        yield Variation(PatternKind.WRONG_INDEX, sentence, partial(_moved_bags, by=by))


def _moved_bags(step: Step, by: int) -> Any:
    offsets, count = step.values["offsets"], step.values["indices"].numel()
    moved = (offsets + by).clamp(0, count)
    moved[0] = offsets[0]
    return step.run(offsets=moved)


# --- Comparisons ----------------------------------------------------------------------------------


def _compared_with_nothing(step: Step) -> Iterator[Variation]:
    for name in ("self", "other"):
        value = step.values[name]
        if isinstance(value, torch.Tensor) and bool((value != 0).any()):
            sentence = f"{name} is not read: it is compared with 0"
            zeros = with_altered(name, torch.zeros_like)
            yield Variation(PatternKind.MISSING_OPERAND, sentence, zeros)


# --- Halves ---------------------------------------------------------------------------------------

# Where numbers lie in the middle between two whole ones; torch takes the even one.
OTHER_TIES: dict[str, Callable[[Tensor], Tensor]] = {
    "up": lambda x: (x + 0.5).floor(),
    "down": lambda x: (x - 0.5).ceil(),
    "away from zero": lambda x: x.sign() * (x.abs() + 0.5).floor(),
    "towards zero": lambda x: x.sign() * (x.abs() - 0.5).ceil(),
}


def _round_decimals(step: Step, compute: Callable[[Tensor], Tensor]) -> Any:
    scale = 10.0 ** step.values.get("decimals", 0)
    return compute(step.values["self"] * scale) / scale
