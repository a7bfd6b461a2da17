"""Mistakes that the candidate itself shows: which rows were read, which keys were seen."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.diagnosis.patterns.terms import solved_terms
from paritas.diagnosis.patterns.variations import Variation
from paritas.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.diagnosis.calls import Step


def deduced_variations(
    step: Step, predict: Callable[[Variation], Tensor | None], given: Tensor, part: Tensor
) -> Iterator[Variation]:
    """The operator with the mistakes that its result shows.

    Args:
        predict: the value in question if the operator is computed so.
        given: the candidate, in float64.
        part: where it is wrong.
    """
    if step.name in _TABLES:
        said = "other rows are read than the indices say"
        change = partial(_rows_read, given=given)
        yield Variation(PatternKind.WRONG_INDEX, said, change)
    elif step.name == "gather":
        said = "other elements are read than the indices say"
        change = partial(_elements_read, given=given)
        yield Variation(PatternKind.WRONG_INDEX, said, change)
    yield from solved_terms(step, predict, given, part)


# --- Rows of a table ------------------------------------------------------------------------------

# The table, the indices and the axis of operators that read rows.
_TABLES = {"embedding": ("weight", "indices"), "index_select": ("self", "index")}
_MOST_PAIRS = 1 << 24


def _rows_read(step: Step, given: Tensor) -> Any:
    """What the operator gives for the indices of the rows that are nearest to those given."""
    table, indices = (step.values[name] for name in _TABLES[step.name])
    axis = step.values.get("dim", 0)
    rows = table.movedim(axis, 0).reshape(table.shape[axis], -1)
    shape = [*table.shape]
    shape[axis : axis + 1] = indices.shape
    wanted = given.to(table.device).reshape(shape)
    wanted = wanted.flatten(axis, axis + indices.dim() - 1).movedim(axis, 0)
    wanted = wanted.reshape(indices.numel(), -1).to(rows.dtype)
    if len(rows) * len(wanted) > _MOST_PAIRS:
        raise ValueError("too many rows to look for one")
    way = "donot_use_mm_for_euclid_dist"
    nearest = torch.cdist(wanted.nan_to_num(0.0), rows, compute_mode=way).argmin(dim=1)
    return step.run(**{_TABLES[step.name][1]: nearest.reshape(indices.shape).to(indices.dtype)})


def _elements_read(step: Step, given: Tensor) -> Any:
    """What `gather` gives for the elements of each line that are nearest to those given."""
    source, index, axis = (step.values[name] for name in ("self", "index", "dim"))
    lines = source.movedim(axis, -1)[
        tuple(slice(size) for size in index.movedim(axis, -1).shape[:-1])
    ]
    wanted = given.to(source).reshape(index.shape).movedim(axis, -1)
    if wanted.numel() * lines.shape[-1] > _MOST_PAIRS:
        raise ValueError("too many elements to look for one")
    nearest = (wanted.unsqueeze(-1) - lines.unsqueeze(-2)).abs().argmin(dim=-1)
    return step.run(index=nearest.movedim(-1, axis))
