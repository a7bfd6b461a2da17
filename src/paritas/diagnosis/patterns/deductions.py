"""Mistakes that the candidate itself shows: which rows were read, which keys were seen."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.diagnosis.patterns.attention import deduced_attention, is_attention
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
    if is_attention(step):
        yield from deduced_attention(step, predict, given)
    yield from solved_terms(step, predict, given, part)
    yield from _slices_read(step, predict, given)


# --- Slices of an operand -------------------------------------------------------------------------

_MOST_SLICES = 64


def _slices_read(
    step: Step, predict: Callable[[Variation], Tensor | None], given: Tensor
) -> Iterator[Variation]:
    """One operand with the slices along an axis that give the slices of the result."""
    operands = {n: v for n, v in step.values.items() if _is_operand(v)}
    if len(operands) < 2:  # noqa: PLR2004
        return  # it is the result that is read elsewhere
    for name, value in operands.items():
        for axis, size in enumerate(value.shape):
            along = [one for one, length in enumerate(given.shape) if length == size]
            if not along or not 1 < size <= _MOST_SLICES:
                continue
            errors = _errors_of_slices(name, axis, size, predict, given)
            for other in along if errors is not None else ():
                left = errors.movedim(1 + other, 1).reshape(size, size, -1).sum(-1)
                source = left.argmin(0)
                if not torch.equal(source, torch.arange(size)):
                    said = f"other slices of {name} are read along axis {axis}"
                    change = partial(_with_slices, name=name, axis=axis, source=source)
                    yield Variation(PatternKind.WRONG_INDEX, said, change)


def _is_operand(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0


def _errors_of_slices(
    name: str,
    axis: int,
    size: int,
    predict: Callable[[Variation], Tensor | None],
    given: Tensor,
) -> Tensor | None:
    """The squared errors if the operand has one of its slices everywhere along an axis."""
    found = []
    for one in range(size):
        change = partial(_with_slices, name=name, axis=axis, source=torch.full((size,), one))
        value = predict(Variation(PatternKind.WRONG_INDEX, "", change))
        if value is None:
            return None
        found.append((value - given).nan_to_num(0.0).square())
    return torch.stack(found)


def _with_slices(step: Step, name: str, axis: int, source: Tensor) -> Any:
    value = step.values[name]
    return step.run(**{name: value.index_select(axis, source.to(value.device))})


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
    lines = source.movedim(axis, -1)[tuple(slice(size) for size in index.movedim(axis, -1).shape[:-1])]
    wanted = given.to(source).reshape(index.shape).movedim(axis, -1)
    if wanted.numel() * lines.shape[-1] > _MOST_PAIRS:
        raise ValueError("too many elements to look for one")
    nearest = (wanted.unsqueeze(-1) - lines.unsqueeze(-2)).abs().argmin(dim=-1)
    return step.run(index=nearest.movedim(-1, axis))
