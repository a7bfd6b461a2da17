"""Right values in the wrong place: shifted, flipped, transposed, permuted."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import msgspec
import torch

from paritas.core.diagnosis.case import (
    Case,
    Probe,
    WrongBlock,
    axis_name,
    axis_number,
    first_supported,
    supported_pattern,
    unravel,
    widen,
    wrong_block,
)
from paritas.core.numerics.criterion import MAX_Z
from paritas.core.results.findings import Pattern, PatternKind
from paritas.core.results.wording import list_first

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


# --- Axes swapped, flipped, interleaved; rows permuted --------------------------------------------

# With more axes than this, not all orders of them are tried.
_MOST_AXES = 4
# The share of distinct values below which "the same values in another order" means nothing.
_DISTINCT = 0.5
_FEWEST = 8
_SAME = 0.98


def propose_permutations(case: Case) -> list[Pattern]:
    """The simplest reordering of the right values that gives the wrong ones."""
    if not case.is_beyond_noise or not case.shape or case.reference.numel() < 2:  # noqa: PLR2004
        return []
    part = wrong_block(case)
    blocks = [case]
    if not part.is_whole and all(map(part.is_run, _long_axes(part.case.shape))):
        blocks.append(part.case)
    probes = [Probe(block) for block in blocks]
    for search in (_axes_exchanged, _read_otherwise, _regular_order, _permuted_rows, _same_values):
        # A wrong block may be reordered by itself, or as the whole is.
        for block, probe in zip(blocks, probes, strict=True):
            explanation = first_supported(search(block, probe))
            if explanation:
                return explanation
    return []


def _long_axes(shape: tuple[int, ...]) -> list[int]:
    return [axis for axis, size in enumerate(shape) if size > 1]


def _axes_exchanged(case: Case, probe: Probe) -> Iterator[Pattern | None]:
    rank = len(case.shape)
    orders = list(itertools.permutations(range(rank))) if rank <= _MOST_AXES else []
    orders = orders or [_swap_axes(rank, *two) for two in itertools.combinations(range(rank), 2)]
    for order in orders:
        view = case.right.permute(order)
        if tuple(order) == tuple(range(rank)) or tuple(view.shape) != case.shape:
            continue
        noise = case.allowed.permute(order)
        if not probe.meets_view(view, noise):
            continue
        moved = [axis for axis in range(rank) if order[axis] != axis]
        names = [axis_name(case.context, axis, rank) for axis in moved]
        text = f"the axes are in the order {order}"
        if len(moved) == 2:  # noqa: PLR2004
            text = f"{names[0]} and {names[1]} are swapped"
        kind, cost, figures = PatternKind.TRANSPOSE, math.log2(len(orders)), {"order": str(order)}
        yield supported_pattern(
            case, view, kind, f"transposed: {text}", cost=cost, noise=noise, evidence=figures
        )


def _swap_axes(rank: int, a: int, b: int) -> tuple[int, ...]:
    order = list(range(rank))
    order[a], order[b] = b, a
    return tuple(order)


def _read_otherwise(case: Case, probe: Probe) -> Iterator[Pattern | None]:
    """The memory of a transposed tensor read as if it were this one."""
    numbers = torch.arange(case.right.numel()).reshape(case.shape)
    flat, allowed = case.right.flatten(), case.allowed.flatten()
    pairs = list(itertools.combinations(range(len(case.shape)), 2))
    for a, b in pairs:
        if 1 in (case.shape[a], case.shape[b]):
            continue
        swapped = numbers.transpose(a, b)
        for source in (swapped.reshape(case.shape), numbers.reshape(swapped.shape).transpose(a, b)):
            taken = source[probe.at]
            if not probe.meets(flat[taken], allowed[taken]):
                continue
            first, second = (axis_name(case.context, axis, len(case.shape)) for axis in (a, b))
            sentence = (
                f"reshaped without a transpose (or the other way round): the values of {first} "
                f"and {second} lie in memory in the other order"
            )
            yield supported_pattern(
                case,
                flat[source],
                PatternKind.PERMUTATION,
                sentence,
                cost=math.log2(2 * len(pairs)),
                noise=allowed[source],
                evidence={"axes": f"{a}, {b}"},
            )


def _regular_order(case: Case, probe: Probe) -> Iterator[Pattern | None]:
    for axis, size in enumerate(case.shape):
        for order in regular_orders(size):
            if probe.meets_map(axis, order.source):
                yield _match_reordering(case, axis, order.source, order.sentence, order.cost)
    pairs = list(itertools.combinations(range(len(case.shape)), 2))
    for pair in pairs:
        at = tuple(
            case.shape[axis] - 1 - index if axis in pair else index
            for axis, index in enumerate(probe.at)
        )
        if not probe.meets(case.right[at], case.allowed[at]):
            continue
        first, second = (axis_number(case.context, axis) for axis in pair)
        yield supported_pattern(
            case,
            case.right.flip(pair),
            PatternKind.PERMUTATION,
            f"flipped along the axes {first} and {second}",
            cost=math.log2(len(pairs)) + 1,
            noise=case.allowed.flip(pair),
            evidence={"axes": f"{pair[0]}, {pair[1]}"},
        )


def _match_reordering(
    case: Case,
    axis: int,
    source: Tensor,
    sentence: str,
    cost: float,
    *,
    kind: PatternKind = PatternKind.PERMUTATION,
    detail: str = "",
) -> Pattern | None:
    return supported_pattern(
        case,
        case.right.index_select(axis, source),
        kind,
        f"{sentence} along {axis_name(case.context, axis, len(case.shape))}{detail}",
        cost=cost,
        noise=case.allowed.index_select(axis, source),
        evidence={"axis": axis},
    )


def _permuted_rows(case: Case, _probe: Probe) -> Iterator[Pattern | None]:
    """Whole slices at other places of an axis, in no regular order."""
    if len(case.shape) < 2 or case.given.is_complex():  # noqa: PLR2004
        return
    for axis in range(len(case.shape)):
        yield _taken_from_elsewhere(case, axis)
    if len(case.shape) > 2:  # noqa: PLR2004  (rows of a matrix, of which axes were made since)
        candidate, reference, right, allowed = (
            values.flatten(0, -2)
            for values in (case.candidate, case.reference, case.right, case.allowed)
        )
        yield _taken_from_elsewhere(Case(candidate, reference, right, allowed), 0)


def _taken_from_elsewhere(case: Case, axis: int) -> Pattern | None:
    source = matched_rows(case, axis)
    if source is None:
        return None
    moved = source != torch.arange(len(source))
    cost = int(moved.sum()) * math.log2(len(source)) + 1
    if not bool(moved.any()) or bool(moved[source[moved]].any()):
        return _match_reordering(case, axis, source, describe_order(source), cost)
    # What was copied is still in its own place. One value everywhere need not come from anywhere.
    if bool((case.given == case.given.flatten()[0]).all()):
        return None
    places = moved.nonzero().flatten().tolist()
    if case.is_boolean and len(source[moved].unique()) > 1:
        return None  # a row of a mask has few forms, and any may be found elsewhere
    listed = list_first((f"{int(source[position])} at {position}" for position in places), _NAMED)
    sentence = "copied from another place"
    return _match_reordering(
        case, axis, source, sentence, cost, kind=PatternKind.COPY, detail=f": slice {listed}"
    )


def _same_values(case: Case, probe: Probe) -> Iterator[Pattern | None]:
    """The same values, bit for bit, in an order without a name."""
    wrong = case.wrong
    if case.given.is_complex() or int(wrong.sum()) < _FEWEST:
        return
    # Look for a few values first: most of them must occur at all.
    few = torch.isin(probe.given, widen(case.reference)[wrong])
    if float(few.double().mean()) < _SAME:
        return
    values = case.given[wrong].sort().values
    expected = widen(case.reference)[wrong].sort().values
    distinct = len(torch.unique(expected)) / len(expected)
    same = float((values == expected).double().mean())
    if distinct < _DISTINCT or same < _SAME:
        return
    # Mostly distinct values that are equal bit for bit cannot be drawn again.
    yield Pattern(
        kind=PatternKind.PERMUTATION,
        confidence=0.9 * same,
        sentence="the same values in another order",
        evidence={"same values": same, "distinct": distinct},
    )


# --- Moved along an axis, or in memory ------------------------------------------------------------

# How many lines along an axis are correlated to find the distance, and their largest length.
_LINES = 32
_LOOKED_AT = 2048
_LONGEST = 1 << 15
_PEAKS = 4
_FILLS = ("wrap", "zeros", "edge", "kept")


def propose_shifts(case: Case) -> list[Pattern]:
    """Rolled or shifted by k along an axis, in the whole tensor or in the wrong block."""
    if not case.is_beyond_noise or not case.shape or case.given.is_complex():
        return []
    part = wrong_block(case)
    axes = range(len(case.shape))
    inner = Probe(part.case)
    # A roll of few slices, or of slices that are not neighbours, is a permutation.
    shifted_alongs = [_shifted_along(part.case, axis, inner) for axis in axes if part.is_run(axis)]
    for axis in axes:
        if len(part.indices[axis]) < case.shape[axis] and part.is_run(axis):
            shifted_alongs += first_supported(_from_outside(case, part, axis))
    if len(case.shape) > 1 and not any(shifted_alongs):
        shifted_alongs.append(_in_memory(case))
    return [pattern for pattern in shifted_alongs if pattern is not None]


def _shifted_along(case: Case, axis: int, probe: Probe) -> Pattern | None:
    size = case.shape[axis]
    if size < 2:  # noqa: PLR2004
        return None
    name = axis_name(case.context, axis, len(case.shape))
    patterns = []
    for distance in _distances(case.given, case.right, case.wrong, axis):
        # The ends may hold anything after a shift, so the rest decides whether it is one.
        inside = _source_indices(size, distance, "zeros")
        wrapped = _source_indices(size, distance, "wrap")
        if not (probe.meets_map(axis, inside, partly=True) or probe.meets_map(axis, wrapped)):
            continue
        for fill in _FILLS:
            source = _source_indices(size, distance, fill)
            prediction, noise = _read_from(case, axis, source)
            kind, sentence = PatternKind.SHIFT, _describe_shift(distance, name, fill)
            if fill == "wrap" and 2 * abs(distance) == size:
                kind, sentence = PatternKind.PERMUTATION, f"the two halves swapped along {name}"
            pattern = supported_pattern(
                case,
                prediction,
                kind,
                sentence,
                cost=math.log2(size * 4),
                noise=noise,
                evidence={"distance": distance, "axis": axis, "fill": fill},
            )
            if pattern is not None:
                patterns.append(pattern)
                if _goodness(pattern) == 1:
                    break
        if patterns:
            return max(patterns, key=_goodness)
    return None


def _goodness(pattern: Pattern) -> float:
    """What fills the gap shows in a few elements only."""
    return float(pattern.evidence["explained"]) - float(pattern.evidence["spoiled"])


def _from_outside(case: Case, part: WrongBlock, axis: int) -> Iterator[Pattern | None]:
    """The block holds the values of places beside it, some of them outside the block."""
    size = case.shape[axis]
    probe = Probe(case)
    for distance in _distances(case.given, case.right, case.wrong, axis):
        if not probe.meets_map(axis, _source_indices(size, distance, "wrap")):
            continue
        source = (part.indices[axis] - distance) % size
        prediction, noise = case.right, case.allowed
        for other_axis, index in enumerate(part.indices):
            taken = source if other_axis == axis else index
            prediction = prediction.index_select(other_axis, taken)
            noise = noise.index_select(other_axis, taken)
        name = axis_name(case.context, axis, len(case.shape))
        kind, sentence = PatternKind.SHIFT, _describe_shift(distance, name, "block")
        if not bool(torch.isin(source, part.indices[axis]).any()):
            # What was copied is still in its own place.
            many = f"{abs(distance)} place{'s' * (abs(distance) != 1)}"
            kind = PatternKind.COPY
            sentence = f"copied from {many} {_before_or_after(-distance)} along {name}"
        yield supported_pattern(
            part.case,
            prediction,
            kind,
            sentence,
            cost=math.log2(size * 4) + 1,
            noise=noise,
            evidence={"distance": distance, "axis": axis, "fill": "from beside the block"},
        )


def _in_memory(case: Case) -> Pattern | None:
    """The whole tensor read k elements further on: a wrong pointer, not a wrong index."""
    candidate, reference = case.candidate.detach().cpu(), case.reference.detach().cpu()
    right, allowed = case.right.flatten(), case.allowed.flatten()
    flat = Case(candidate.flatten(), reference.flatten(), right, allowed)
    pattern = _shifted_along(flat, 0, Probe(flat))
    if pattern is None:
        return None
    distance = int(pattern.evidence["distance"])
    many = f"{abs(distance)} element{'s' * (abs(distance) != 1)}"
    sentence = f"every value is {many} {_before_or_after(distance)} its place in memory"
    kind, wrong = PatternKind.SHIFT, flat.wrong.nonzero().flatten()
    if not bool(torch.isin((wrong - distance) % flat.right.numel(), wrong).any()):
        if bool((flat.given[wrong] == flat.given[wrong[0]]).all()):
            return None  # one value need not come from anywhere
        # What was copied is still in its own place.
        kind = PatternKind.COPY
        sentence = f"copied from {many} {_before_or_after(-distance)} in memory"
    evidence = {**pattern.evidence, "axis": "memory"}
    return msgspec.structs.replace(pattern, kind=kind, sentence=sentence, evidence=evidence)


def _distances(candidate: Tensor, right: Tensor, wrong: Tensor, axis: int) -> list[int]:
    """The few distances at which the correlation along an axis is highest."""
    size = right.shape[axis]
    if size < 2:  # noqa: PLR2004
        return []
    line_length = min(size, _LONGEST)

    # A few lines are enough, if they are among the most wrong.
    others = [length for dim, length in enumerate(right.shape) if dim != axis]
    step = max(1, math.prod(others) // _LOOKED_AT)
    starts = torch.arange(0, math.prod(others), step)
    at = list(unravel(starts, others))

    def lines(value: Tensor) -> Tensor:
        moved = value.narrow(axis, 0, line_length).movedim(axis, -1)
        return moved[tuple(at)] if at else moved.unsqueeze(0)

    hit = lines(wrong).sum(dim=-1)
    chosen = hit.topk(min(_LINES, len(hit))).indices
    at = [score[chosen] for score in at]
    left, source = lines(candidate), lines(right)
    bad = ~(torch.isfinite(left) & torch.isfinite(source))
    left, source = left.masked_fill(bad, 0.0), source.masked_fill(bad, 0.0)
    left = left - left.mean(dim=-1, keepdim=True)
    source = source - source.mean(dim=-1, keepdim=True)
    spectrum = torch.fft.rfft(left, n=line_length) * torch.fft.rfft(source, n=line_length).conj()
    correlation = torch.fft.irfft(spectrum.sum(dim=0), n=line_length)
    peaks = correlation.topk(min(_PEAKS, line_length)).indices.tolist()
    shifts = [peak if peak <= line_length // 2 else peak - line_length for peak in peaks]
    # Also the small distances that loops are off by: correlation cannot separate smooth values.
    return [shift for shift in dict.fromkeys([*shifts, 1, -1]) if shift % size]


def _source_indices(size: int, distance: int, fill: str) -> Tensor:
    """The index that each index takes its value from; -1 for zeros."""
    index = torch.arange(size)
    plain = index - distance
    inside = (plain >= 0) & (plain < size)
    match fill:
        case "zeros":
            return torch.where(inside, plain, -1)
        case "edge":
            return plain.clamp(0, size - 1)
        case "kept":
            return torch.where(inside, plain, index)
    return plain % size


def _read_from(case: Case, axis: int, source: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor read in this order, and the noise of those values."""
    values = case.right.index_select(axis, source.clamp(min=0))
    if bool((source < 0).any()):
        shape = [1] * len(case.shape)
        shape[axis] = len(source)
        values = torch.where((source < 0).reshape(shape), 0.0, values)
    return values, case.allowed.index_select(axis, source.clamp(min=0))


def _before_or_after(distance: int) -> str:
    return "after" if distance > 0 else "before"


def _describe_shift(distance: int, name: str, fill: str) -> str:
    if fill == "wrap":
        return f"rolled by {distance} along {name}: every value is {_describe_distance(distance)}"
    ends = {
        "zeros": ", with zeros in the gap",
        "edge": ", with the last value repeated at the end",
        "kept": ", and the end unchanged",
    }
    off = "off by one" if abs(distance) == 1 else f"shifted by {distance}"
    return f"{off} along {name}: every value is {_describe_distance(distance)}{ends.get(fill, '')}"


def _describe_distance(distance: int) -> str:
    count = abs(distance)
    return f"{count} place{'s' * (count != 1)} {_before_or_after(distance)} its own"


# --- Which slices were taken in the place of which, in words --------------------------------------


def describe_places(source: torch.Tensor) -> tuple[PatternKind, str]:
    """The kind and the words of slices that were taken from other places.

    Args:
        source: where each slice was taken from.
    """
    size = len(source)
    positions = torch.arange(size)
    moved = source != positions
    by = (source - positions)[moved]
    if size > 2 and bool((source == source[0]).all()):  # noqa: PLR2004
        return PatternKind.WRONG_INDEX, f"slice {int(source[0])} is taken everywhere"
    for distance in (int(by[0]), int(by[0]) % size, int(by[0]) % size - size):
        if torch.equal(source, (positions + distance) % size) and 2 * abs(distance) < size:
            return PatternKind.SHIFT, f"rolled by {-distance}"
    if len(torch.unique(source)) == size:
        return PatternKind.PERMUTATION, describe_order(source)
    # What lies before was read again: a buffer that was not loaded.
    if bool((by < 0).all()) and len(torch.unique(by)) == 1 and not bool(moved[source[moved]].any()):
        first = int(moved.nonzero()[0])
        some = f"slices {first} to {first + int(moved.sum()) - 1}"
        return (
            PatternKind.STALE,
            f"{some} are not loaded, those {-int(by[0])} before are used again",
        )
    return PatternKind.WRONG_INDEX, describe_order(source)


# --- Orders of the indices of one axis ------------------------------------------------------------

# Longer axes have too many divisors and pairs to try.
_MOST_ROWS = 1024
_COLUMNS = 48
_NAMED = 4


@dataclasses.dataclass(frozen=True)
class Order:
    """A reordering of an axis: index i takes its values from `source[i]`."""

    source: Tensor
    sentence: str
    cost: float


def regular_orders(size: int) -> Iterator[Order]:
    """Flipped; (h d) read as (d h); neighbours or halves swapped.

    A generator, since all orders of a long axis are fifty times as large as the axis.
    """
    if size < 2:  # noqa: PLR2004
        return
    index = torch.arange(size)
    yield Order(index.flip(0), "flipped", 2.0)
    inner = [divisor for divisor in range(2, size // 2 + 1) if size % divisor == 0]
    for width in inner:
        count = size // width
        text = (
            f"interleaved differently: {count} groups of {width} read as {width} groups of {count}"
        )
        source = index.reshape(count, width).T.flatten()
        yield Order(source, text, 2 + math.log2(1 + len(inner)))
    for width in [1, *inner]:
        if (size // width) % 2:
            continue
        source = index.reshape(-1, 2, width).flip(1).flatten()
        text = f"neighbouring blocks of {width} swapped" if width > 1 else "neighbours swapped"
        if width * 2 == size:
            text = "the two halves swapped"
        yield Order(source, text, 3 + math.log2(1 + len(inner)))
    for width in inner:
        source = index.reshape(-1, width).flip(1).flatten()
        text = f"flipped within each block of {width}"
        yield Order(source, text, 3 + math.log2(1 + len(inner)))


def matched_rows(case: Case, axis: int) -> Tensor | None:
    """The slice that each slice along an axis was taken from; None if some match none.

    A few columns with wrong elements are enough to recognise a slice.
    """
    size = case.shape[axis]
    if not 2 <= size <= _MOST_ROWS:  # noqa: PLR2004
        return None
    hit = case.wrong.movedim(axis, 0).reshape(size, -1)
    columns = hit.sum(dim=0).topk(min(_COLUMNS, hit.shape[1])).indices
    actual = case.given.movedim(axis, 0).reshape(size, -1)[:, columns]
    expected = case.right.movedim(axis, 0).reshape(size, -1)[:, columns]
    allowed = MAX_Z * case.allowed.movedim(axis, 0).reshape(size, -1)[:, columns]
    if not bool(torch.isfinite(actual).all() and torch.isfinite(expected).all()):
        return None
    source = torch.arange(size)
    rows = hit.any(dim=1).nonzero().flatten()
    apart = torch.cdist(actual[rows], expected, p=2.0, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = apart.argmin(dim=1)
    limit = torch.maximum(allowed[rows], allowed[nearest])
    near = (actual[rows] - expected[nearest]).abs() <= limit
    if float(near.double().mean()) < 0.9:  # noqa: PLR2004
        return None
    source[rows] = nearest
    return source


def describe_order(source: Tensor) -> str:
    """An order of slices in words."""
    moved = (source != torch.arange(len(source))).nonzero().flatten().tolist()
    taken = source.tolist()
    if len(moved) == 2 and taken[moved[0]] == moved[1] and taken[moved[1]] == moved[0]:  # noqa: PLR2004
        return f"slices {moved[0]} and {moved[1]} are swapped"
    blocks = _exchanged_blocks(moved, taken)
    if blocks:
        return blocks
    listed = list_first((f"{taken[position]} at {position}" for position in moved), _NAMED)
    if len(set(taken)) < len(taken):
        return f"slices taken from the wrong place: slice {listed}"
    return f"slices are permuted: slice {listed}"


def _exchanged_blocks(moved: list[int], taken: list[int]) -> str:
    """Two runs of indices that changed places; empty if there is more to it."""
    if len(moved) < 4 or len(moved) % 2:  # noqa: PLR2004
        return ""
    first, second = moved[: len(moved) // 2], moved[len(moved) // 2 :]
    runs = all(part == list(range(part[0], part[-1] + 1)) for part in (first, second))
    if runs and [taken[position] for position in moved] == second + first:
        left, right = f"{first[0]}:{first[-1] + 1}", f"{second[0]}:{second[-1] + 1}"
        return f"blocks {left} and {right} are swapped"
    return ""
