"""A piece of a tensor that was taken from the wrong place: one index too early, or too late."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.hypotheses import stated
from paritas.diagnosis.patterns.operations import Operation, attempted, operation_of

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.diagnosis.cases import Case
    from paritas.numerics.diagnoses import Pattern

__all__ = ["propose"]

# So many indices to either side are looked at.
_FARTHEST = 2


def propose(case: Case) -> list[Pattern]:
    """`shift`: what `select` or `slice` gives at another index."""
    operation = operation_of(case)
    if operation is None or operation.name not in ("select", "slice"):
        return []
    ways = [way for step in range(1, _FARTHEST + 1) for way in (step, -step)]
    for way in ways:
        value = attempted(lambda way=way: _taken(operation, way))  # type: ignore[misc]
        if value is None or tuple(value.shape) != case.shape:
            continue
        where = "too late" if way > 0 else "too early"
        count = "one index" if abs(way) == 1 else f"{abs(way)} indices"
        pattern = stated(
            case,
            value.double(),
            "shift",
            f"taken from {count} {where}",
            cost=math.log2(1 + len(ways)),
            evidence={"operator": operation.context.operator, "by": float(way)},
        )
        if pattern is not None:
            return [pattern]
    return []


def _taken(operation: Operation, way: int) -> Tensor | None:
    """The piece that lies so many indices farther on."""
    x = operation.inputs[0]
    dim = operation.argument("dim", 1, 0)
    size = x.shape[dim]
    if operation.name == "select":
        index = operation.argument("index", 2) % size + way
        return x.select(dim, index) if 0 <= index < size else None
    start = operation.argument("start", 2, 0) or 0
    end = operation.argument("end", 3, size)
    step = operation.argument("step", 4, 1)
    start, end = ((min(at, size) if at >= 0 else at + size) + way for at in (start, end or size))
    if start < 0 or end > size or step < 1:
        return None
    return x.index_select(dim, torch.arange(start, end, step))
