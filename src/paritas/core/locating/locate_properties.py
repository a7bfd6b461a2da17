"""Find where two runs with equal values differ in their dtypes, draws, gradients or memory."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from paritas.core.locating.call_words import call_name
from paritas.core.locating.partings import Parting, Spot, find_cut
from paritas.core.locating.trace_matching import plain_name
from paritas.core.numerics.bits import dtype_name
from paritas.core.results.findings import Aspect
from paritas.core.torch_private.operators import traits

if TYPE_CHECKING:
    from collections.abc import Collection

    from paritas.core.tracing.traces import Operation, Trace, TracedValue


def find_property(parting: Parting, aspects: Collection[Aspect]) -> Spot | None:
    """The place of a difference in one of these aspects; None if none is known."""
    searches = {
        Aspect.RNG: _find_draw,
        Aspect.DTYPE: _find_dtype,
        Aspect.REQUIRES_GRAD: _find_cut,
        Aspect.ALIAS: _find_returned,
        Aspect.STRIDE: _find_returned,
        Aspect.DEVICE: _find_returned,
    }
    for aspect, search in searches.items():
        spot = search(parting) if aspect in aspects else None
        if spot is not None:
            return spot
    return None


def _spot(
    parting: Parting, words: str, reference: Operation | None, candidate: Operation | None
) -> Spot:
    return Spot(parting, words, reference, candidate, is_missing=candidate is None)


def _find_draw(parting: Parting) -> Spot | None:
    """The first draw of random numbers that only one side makes."""
    draws = [
        [operation for operation in run.trace.operations if traits(operation.func).random]
        for run in (parting.theirs, parting.mine)
    ]
    for left, right in itertools.zip_longest(*draws):
        if left is None:
            words = f"the candidate also draws random numbers by {call_name(right)}"
        elif right is None:
            words = f"the candidate does not draw random numbers by {call_name(left)}"
        elif left.func is not right.func or _shapes(left, parting.theirs.trace) != _shapes(
            right, parting.mine.trace
        ):
            words = f"the candidate draws other random numbers by {call_name(right)}"
            return _spot(parting, words, left if left.func is right.func else None, right)
        else:
            continue
        return _spot(parting, words, left, right)
    return None


def _shapes(operation: Operation, trace: Trace) -> list[tuple[int, ...]]:
    return [
        value.figures.shape for value in trace.outputs_of(operation) if value.figures is not None
    ]


def _find_dtype(parting: Parting) -> Spot | None:
    """The first operator before a result that gives an equal value in another dtype."""
    members = _members(parting)
    before = parting.mine.trace.operations_behind(parting.ends[1])
    for operation in parting.mine.trace.operations:
        if operation.index not in before:
            continue
        for value in parting.mine.trace.outputs_of(operation):
            reference_values = members.get(parting.classes[value.index], [])
            right = [
                reference_value
                for reference_value in reference_values
                if reference_value.makers and reference_value.figures is not None
            ]
            if value.figures is None or not right:
                continue
            dtypes = {
                reference_value.figures.dtype
                for reference_value in reference_values
                if reference_value.figures is not None
            }
            if value.figures.dtype in dtypes:
                continue
            figures = right[-1].figures
            expected_dtype = "" if figures is None else dtype_name(figures.dtype)
            words = (
                f"{call_name(operation)} gives {dtype_name(value.figures.dtype)}, not "
                f"{expected_dtype}"
            )
            reference = parting.theirs.trace.maker_of(right[-1].index)
            same = reference is not None and plain_name(reference) == plain_name(operation)
            return _spot(parting, words, reference if same else None, operation)
    return None


def _find_cut(parting: Parting) -> Spot | None:
    """The operator behind which autograd follows a value in the reference only."""
    cut = find_cut(parting)
    if cut is None:
        return _find_returned(parting)
    words = f"autograd does not follow the result of {call_name(cut.candidate)}"
    return _spot(parting, words, None, cut.candidate)


def _find_returned(parting: Parting) -> Spot | None:
    """The operators that give the result on both sides."""
    makers: list[Operation | None] = []
    for run, ends in zip((parting.theirs, parting.mine), parting.ends, strict=True):
        makers.append(next(filter(None, map(run.trace.maker_of, ends)), None))
    reference, candidate = makers
    if candidate is None:
        return None
    words = f"the candidate returns the result of {call_name(candidate)}"
    return _spot(parting, words, reference, candidate)


def _members(parting: Parting) -> dict[int | None, list[TracedValue]]:
    members: dict[int | None, list[TracedValue]] = {}
    for value, number in zip(parting.theirs.trace.values, parting.known.classes, strict=True):
        members.setdefault(number, []).append(value)
    return members
