"""Right values in another order: axes exchanged, flipped, interleaved otherwise, rows permuted."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.hypotheses import Probe, axis_name, part_of, stated
from paritas.diagnosis.patterns.orders import Order, described, matched_rows, regular_orders
from paritas.diagnosis.patterns.weighing import beyond_noise
from paritas.numerics.diagnoses import Pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.diagnosis.cases import Case

__all__ = ["propose"]

# Axes beyond which not all orders of them are tried.
_MOST_AXES = 4
# Of the values, so many have to be distinct for "the same ones in another order" to mean a thing.
_DISTINCT = 0.5
_FEWEST = 8
_SAME = 0.98


def propose(case: Case) -> list[Pattern]:
    """The simplest reordering of the right values that gives the wrong ones."""
    if not beyond_noise(case) or not case.shape or case.reference.numel() < 2:  # noqa: PLR2004
        return []
    part = part_of(case)
    blocks = [case]
    if not part.is_whole and all(map(part.is_run, _longer(part.case.shape))):
        blocks.append(part.case)
    probes = [Probe(block) for block in blocks]
    for search in (_axes_exchanged, _read_otherwise, _along_axes, _rows, _same_values):
        # A block that is wrong for itself may be reordered for itself, or as the whole is.
        for block, probe in zip(blocks, probes, strict=True):
            pattern = search(block, probe)
            if pattern is not None:
                return [pattern]
    return []


def _longer(shape: tuple[int, ...]) -> list[int]:
    return [axis for axis, size in enumerate(shape) if size > 1]


def _axes_exchanged(case: Case, probe: Probe) -> Pattern | None:
    rank = len(case.shape)
    orders = (
        list(itertools.permutations(range(rank)))
        if rank <= _MOST_AXES
        else [_swapped(rank, a, b) for a, b in itertools.combinations(range(rank), 2)]
    )
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
            text = f"{names[0]} and {names[1]} are exchanged"
        pattern = stated(
            case,
            view,
            "transpose",
            f"transposed: {text}",
            cost=math.log2(len(orders)),
            noise=noise,
            evidence={"order": str(tuple(order))},
        )
        if pattern is not None:
            return pattern
    return None


def _swapped(rank: int, a: int, b: int) -> tuple[int, ...]:
    order = list(range(rank))
    order[a], order[b] = b, a
    return tuple(order)


def _read_otherwise(case: Case, probe: Probe) -> Pattern | None:
    """The values in the memory order of a transposed tensor, taken for those of this one."""
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
            names = [axis_name(case.context, axis, len(case.shape)) for axis in (a, b)]
            pattern = stated(
                case,
                flat[source],
                "permutation",
                f"reshaped without a transpose (or the other way round): the values of {names[0]} "
                f"and {names[1]} lie in memory in the other order",
                cost=math.log2(2 * len(pairs)),
                noise=allowed[source],
                evidence={"axes": f"{a}, {b}"},
            )
            if pattern is not None:
                return pattern
    return None


def _along_axes(case: Case, probe: Probe) -> Pattern | None:
    for axis, order in _all_orders(case):
        if not probe.meets_map(axis, order.source):
            continue
        pattern = _reordered(case, axis, order.source, order.sentence, order.cost)
        if pattern is not None:
            return pattern
    return _flipped_twice(case, probe)


def _all_orders(case: Case) -> Iterator[tuple[int, Order]]:
    for axis, size in enumerate(case.shape):
        for order in regular_orders(size):
            yield axis, order


def _flipped_twice(case: Case, probe: Probe) -> Pattern | None:
    pairs = list(itertools.combinations(range(len(case.shape)), 2))
    for pair in pairs:
        at = tuple(
            case.shape[axis] - 1 - index if axis in pair else index
            for axis, index in enumerate(probe.at)
        )
        if not probe.meets(case.right[at], case.allowed[at]):
            continue
        pattern = stated(
            case,
            case.right.flip(pair),
            "permutation",
            f"flipped along the axes {pair[0]} and {pair[1]}",
            cost=math.log2(len(pairs)) + 1,
            noise=case.allowed.flip(pair),
            evidence={"axes": f"{pair[0]}, {pair[1]}"},
        )
        if pattern is not None:
            return pattern
    return None


def _reordered(case: Case, axis: int, source: Tensor, sentence: str, cost: float) -> Pattern | None:
    return stated(
        case,
        case.right.index_select(axis, source),
        "permutation",
        f"{sentence} along {axis_name(case.context, axis, len(case.shape))}",
        cost=cost,
        noise=case.allowed.index_select(axis, source),
        evidence={"axis": axis},
    )


def _rows(case: Case, _probe: Probe) -> Pattern | None:
    """Whole slices stand at other places of an axis, in no regular order."""
    if len(case.shape) < 2 or case.given.is_complex():  # noqa: PLR2004
        return None
    for axis, size in enumerate(case.shape):
        source = matched_rows(case, axis)
        if source is None:
            continue
        moved = int((source != torch.arange(size)).sum())
        cost = moved * math.log2(size) + 1
        pattern = _reordered(case, axis, source, described(source), cost)
        if pattern is not None:
            return pattern
    return None


def _same_values(case: Case, probe: Probe) -> Pattern | None:
    """The same values, bit for bit, in an order that has no name."""
    wrong = case.wrong
    if case.given.is_complex() or int(wrong.sum()) < _FEWEST:
        return None
    # A few values first: most of them have to be there at all.
    few = torch.isin(probe.given, case.reference.detach().cpu().double()[wrong])
    if float(few.double().mean()) < _SAME:
        return None
    mine = case.given[wrong].sort().values
    theirs = case.reference.detach().cpu().double()[wrong].sort().values
    distinct = len(torch.unique(theirs)) / len(theirs)
    same = float((mine == theirs).double().mean())
    if distinct < _DISTINCT or same < _SAME:
        return None
    # Bit for bit, of mostly distinct values: drawn anew they would not agree.
    return Pattern(
        kind="permutation",
        confidence=0.9 * same,
        sentence="the same values in another order",
        evidence={"same values": same, "distinct": distinct},
    )
