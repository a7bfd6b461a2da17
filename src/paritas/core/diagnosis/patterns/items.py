"""A value that is picked from several tensors: another of them, or slices of others."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.case import supported_pattern, widen
from paritas.core.diagnosis.patterns.operations import trusted_formula
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paritas.core.diagnosis.case import Case
    from paritas.core.results.findings import Pattern

# The most numbers that are compared to find where slices come from.
_MOST_COMPARED = 1 << 24


def propose_items(case: Case, items: Sequence[Tensor], *, is_picked: bool) -> list[Pattern]:
    """Another of several tensors than the right one.

    Args:
        is_picked: the reference picks one of them.
    """
    cost = math.log2(1 + len(items))
    alike = [
        (index, widen(item)) for index, item in enumerate(items) if tuple(item.shape) == case.shape
    ]
    right = next(
        (
            index
            for index, operand in alike
            if trusted_formula(case, functools.partial(widen, operand)) is not None
        ),
        None,
    )
    for position, tensor in alike:
        if right is not None and position != right:
            sentence = f"item {position} instead of item {right}"
            kind = PatternKind.WRONG_INDEX
            pattern = supported_pattern(case, tensor, kind, sentence, cost=cost)
            if pattern is not None:
                return [pattern]
    is_known = is_picked and right is not None
    return _propose_slices(case, [operand for _, operand in alike]) if is_known else []


def _propose_slices(case: Case, items: list[Tensor]) -> list[Pattern]:
    """Slices of several tensors: they were divided in another way."""
    for axis, size in enumerate(case.shape):
        every = torch.cat(items, axis) if len(items) > 1 and size > 1 else None
        if every is None or every.numel() * size > _MOST_COMPARED:
            continue
        rows, target = (tensor.movedim(axis, 0).flatten(1) for tensor in (every, case.given))
        source = torch.cdist(target.nan_to_num(0.0), rows.nan_to_num(0.0)).argmin(dim=1)
        sentence = f"the slices along axis {axis} are those of other items"
        cost = size * math.log2(len(rows))
        value = every.index_select(axis, source)
        pattern = supported_pattern(case, value, PatternKind.WRONG_INDEX, sentence, cost=cost)
        if pattern is not None:
            return [pattern]
    return []
