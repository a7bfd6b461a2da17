"""Mistakes that the candidate itself shows: which rows were read, which keys were seen."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.patterns.attention import deduced_attention, is_attention
from paritas.core.diagnosis.patterns.limited import limited_arguments
from paritas.core.diagnosis.patterns.operands import solved_operands
from paritas.core.diagnosis.patterns.row_statistics import solved_statistics
from paritas.core.diagnosis.patterns.scattered import scattered_rows
from paritas.core.diagnosis.patterns.scores import solved_scores
from paritas.core.diagnosis.patterns.terms import solved_terms
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step


def deduced_variations(
    step: Step,
    predict: Callable[[Variation], Tensor | None],
    candidate: Tensor,
    part: Tensor,
    around: Sequence[Tensor] = (),
) -> Iterator[Variation]:
    """The operator with the mistakes that its result shows.

    Args:
        predict: the value in question if the operator is computed so.
        candidate: the candidate, in float64.
        part: where it is wrong.
        around: the arguments of the call that the operator is a part of.
    """
    if step.name in _TABLES:
        sentence = "other rows are read than the indices say"
        change = partial(_rows_read, given=candidate)
        yield Variation(PatternKind.WRONG_INDEX, sentence, change)
    elif step.name == "gather":
        sentence = "other elements are read than the indices say"
        change = partial(_elements_read, given=candidate)
        yield Variation(PatternKind.WRONG_INDEX, sentence, change)
    elif step.name in _TAKING:
        sentence = f"other slices are taken along axis {step.values['dim']}"
        change = partial(_slices_taken, given=candidate)
        yield Variation(PatternKind.WRONG_INDEX, sentence, change)
    elif step.name == "index" and _only_index(step) is not None:
        sentence = "other rows are read than the indices say"
        change = partial(_rows_indexed, given=candidate)
        yield Variation(PatternKind.WRONG_INDEX, sentence, change)
    yield from _chosen_elements(step, candidate, part)
    yield from limited_arguments(step, candidate)
    if is_attention(step):
        yield from deduced_attention(step, predict, candidate)
    yield from solved_terms(step, predict, candidate, part)
    yield from scattered_rows(step, candidate)
    yield from solved_operands(step, predict, candidate, around)
    yield from _slices_read(step, predict, candidate)
    yield from solved_statistics(step, predict, candidate)
    yield from solved_scores(step, predict, candidate)
    yield from _added_rows(step, predict, candidate)


# --- A row of an operand that is added ------------------------------------------------------------

_SAME_ROW = 1e-4


def _added_rows(
    step: Step, predict: Callable[[Variation], Tensor | None], candidate: Tensor
) -> Iterator[Variation]:
    """The same row of an operand is added to, or taken from, every row of the result."""
    right = predict(Variation(PatternKind.RESIDUAL, "", lambda step: step.run()))
    if right is None or candidate.dim() < 2:  # noqa: PLR2004
        return
    added = (candidate - right).reshape(-1, candidate.shape[-1])
    row = added.median(dim=0).values
    size = float(row.abs().max())
    if not size > 0 or float((added - row).abs().max()) > _SAME_ROW * size:
        return
    for name, value in step.values.items():
        if not _is_operand(value) or value.dim() != 2 or value.shape[1] != len(row):  # noqa: PLR2004
            continue
        rows = value.detach().cpu().double()
        for sign, words in ((1.0, "added to"), (-1.0, "subtracted from")):
            apart = (rows - sign * row).abs().amax(1)
            position = int(apart.argmin())
            if float(apart[position]) <= _SAME_ROW * size:
                sentence = f"row {position} of {name} is {words} every row of the result"
                change = partial(_with_row, name=name, place=position, sign=sign)
                yield Variation(PatternKind.RESIDUAL, sentence, change)


def _with_row(step: Step, name: str, place: int, sign: float) -> Any:
    result = step.run()
    first = result if isinstance(result, torch.Tensor) else result[0]
    return step.with_first(first + sign * step.values[name][place])


# --- Slices of an operand -------------------------------------------------------------------------

_MOST_SLICES = 64
# Operators that read one tensor, at the places that another one says.
_INDEXED = frozenset({"gather", "index"})


def _slices_read(
    step: Step, predict: Callable[[Variation], Tensor | None], candidate: Tensor
) -> Iterator[Variation]:
    """One operand with the slices along an axis that give the slices of the result."""
    operands = {n: v for n, v in step.values.items() if _is_operand(v)}
    if len(operands) < 2 and step.name not in _INDEXED:  # noqa: PLR2004
        return  # it is the result that is read elsewhere
    for name, value in operands.items():
        for axis, size in enumerate(value.shape):
            along = _axes_of_size(candidate.shape, size)
            if not along or not 1 < size <= _MOST_SLICES:
                continue
            values = _values_of_slices(name, axis, size, predict)
            if values is None:
                continue
            for start, end in along:
                # The slice of the result first, then the slice of the operand.
                parts = values.flatten(1 + start, 1 + end).movedim(1 + start, 0)
                parts = parts.reshape(size, size, -1)
                target = candidate.flatten(start, end).movedim(start, 0).reshape(size, 1, -1)
                source = (parts - target).nan_to_num(0.0).square().sum(-1).argmin(1)
                right = parts[torch.arange(size), torch.arange(size)]
                # Slices of the result at other places are another matter.
                is_moved = torch.allclose(right[source], target.squeeze(1), equal_nan=True)
                if not is_moved and not torch.equal(source, torch.arange(size)):
                    sentence = f"other slices of {name} are read along axis {axis}"
                    change = partial(_with_slices, name=name, axis=axis, source=source)
                    is_mask = name in ("attn_mask", "attn_bias", "mask")
                    kind = PatternKind.MASK if is_mask else PatternKind.WRONG_INDEX
                    yield Variation(kind, sentence, change)


def _axes_of_size(shape: torch.Size, size: int) -> list[tuple[int, int]]:
    """The axes of a result, or neighbouring ones as one, that have a size: first and last."""
    return [
        (start, end)
        for start in range(len(shape))
        for end in range(start, len(shape))
        if math.prod(shape[start : end + 1]) == size and 1 not in shape[start : end + 1]
    ]


def _is_operand(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0


def _values_of_slices(
    name: str, axis: int, size: int, predict: Callable[[Variation], Tensor | None]
) -> Tensor | None:
    """The results if the operand has one of its slices everywhere along an axis."""
    values = []
    for index in range(size):
        change = partial(_with_slices, name=name, axis=axis, source=torch.full((size,), index))
        value = predict(Variation(PatternKind.WRONG_INDEX, "", change))
        if value is None:
            return None
        values.append(value)
    return torch.stack(values)


def _with_slices(step: Step, name: str, axis: int, source: Tensor) -> Any:
    value = step.values[name]
    return step.run(**{name: value.index_select(axis, source.to(value.device))})


# --- Rows of a table ------------------------------------------------------------------------------

# The table, the indices and the axis of operators that read rows.
_TABLES = {"embedding": ("weight", "indices"), "index_select": ("self", "index")}
_MOST_PAIRS = 1 << 24
# Operators that take slices of a tensor along an axis.
_TAKING = frozenset({"slice", "narrow", "select"})


def _rows_read(step: Step, given: Tensor) -> Any:
    """What the operator gives for the indices of the rows that are nearest to those given."""
    table, indices = (step.values[name] for name in _TABLES[step.name])
    nearest = _nearest_rows(table, indices, step.values.get("dim", 0), given)
    return step.run(**{_TABLES[step.name][1]: nearest})


def _only_index(step: Step) -> int | None:
    """The axis that `x[index]` reads, if it is one."""
    places = [at for at, value in enumerate(step.values["indices"]) if value is not None]
    is_one = len(places) == 1 and step.values["indices"][places[0]].dtype == torch.int64
    return places[0] if is_one else None


def _rows_indexed(step: Step, given: Tensor) -> Any:
    indices, axis = list(step.values["indices"]), _only_index(step)
    if axis is None:
        raise ValueError("more than one index")
    indices[axis] = _nearest_rows(step.values["self"], indices[axis], axis, given)
    return step.run(indices=indices)


def _nearest_rows(table: Tensor, indices: Tensor, axis: int, candidate: Tensor) -> Tensor:
    """For each index, the row of a table that is nearest to the one given in its place."""
    rows = table.movedim(axis, 0).reshape(table.shape[axis], -1)
    shape = [*table.shape]
    shape[axis : axis + 1] = indices.shape
    target = candidate.to(table.device).reshape(shape)
    target = target.flatten(axis, axis + indices.dim() - 1).movedim(axis, 0)
    target = target.reshape(indices.numel(), -1).to(rows.dtype)
    if len(rows) * len(target) > _MOST_PAIRS:
        raise ValueError("too many rows to look for one")
    way = "donot_use_mm_for_euclid_dist"
    nearest = torch.cdist(target.nan_to_num(0.0), rows, compute_mode=way).argmin(dim=1)
    return nearest.reshape(indices.shape).to(indices.dtype)


def _slices_taken(step: Step, given: Tensor) -> Any:
    """The slices of the tensor that are nearest to those given."""
    x, axis = step.values["self"], step.values["dim"]
    result = step.run()
    rows = x.movedim(axis, 0).reshape(x.shape[axis], -1)
    shape = result.unsqueeze(axis).shape if step.name == "select" else result.shape
    target = given.to(x).reshape(shape).movedim(axis, 0)
    if len(rows) * len(target) > _MOST_PAIRS:
        raise ValueError("too many slices to look for one")
    way = "donot_use_mm_for_euclid_dist"
    near = target.reshape(len(target), -1).nan_to_num(0.0)
    nearest = torch.cdist(near, rows, compute_mode=way).argmin(dim=1)
    return x.index_select(axis, nearest).reshape(result.shape)


def _elements_read(step: Step, given: Tensor) -> Any:
    """What `gather` gives for the elements of each line that are nearest to those given."""
    source, index, axis = (step.values[name] for name in ("self", "index", "dim"))
    lines = source.movedim(axis, -1)[
        tuple(slice(size) for size in index.movedim(axis, -1).shape[:-1])
    ]
    target = given.to(source).reshape(index.shape).movedim(axis, -1)
    if target.numel() * lines.shape[-1] > _MOST_PAIRS:
        raise ValueError("too many elements to look for one")
    nearest = (target.unsqueeze(-1) - lines.unsqueeze(-2)).abs().argmin(dim=-1)
    return step.run(index=nearest.movedim(-1, axis))


# --- Elements that were masked --------------------------------------------------------------------

_LOWEST = -1e4


def _chosen_elements(step: Step, candidate: Tensor, part: Tensor) -> Iterator[Variation]:
    """Each element is one of two: what a mask lets through, and what it puts in its place."""
    some = candidate[part]
    is_one_value = bool((some == some[0]).all()) and not (
        _lets_through(step, some[0]) or _is_filled_in(step, some[0])
    )
    # Values that were not written look like masked ones.
    if not is_one_value and step.name in ("tril", "triu", "masked_fill", "where", "softmax"):
        sentence = "other elements are masked"
        yield Variation(PatternKind.MASK, sentence, partial(_chosen, given=candidate))
    elif step.name == "add" and _additive_mask(step) is not None:
        sentence = "the mask is added to other elements"
        yield Variation(PatternKind.MASK, sentence, partial(_added_mask, given=candidate))


def _lets_through(step: Step, value: Tensor) -> bool:
    """Whether a mask that is wrong lets one value through, as of a tensor of ones."""
    masked_operand = step.values.get("self")
    if step.name not in ("tril", "triu", "masked_fill") or not isinstance(
        masked_operand, torch.Tensor
    ):
        return False
    return bool((masked_operand == masked_operand.flatten()[0]).all()) and bool(
        masked_operand.flatten()[0] == value
    )


def _is_filled_in(step: Step, value: Tensor) -> bool:
    """Whether it is the number that a mask fills in, and not one of memory that is not written."""
    name = {"masked_fill": "value", "where": "other"}.get(step.name)
    number = step.values.get(name) if name is not None else None
    if number is None or (isinstance(number, torch.Tensor) and number.numel() != 1):
        return False
    return bool(value != 0) and bool(torch.as_tensor(number).to(value) == value)


def _chosen(step: Step, given: Tensor) -> Any:
    values = step.values
    if step.name == "softmax":
        return _masked_softmax(step, given)
    if step.name == "where":
        chosen, other = values["self"], values["other"]
    elif step.name == "masked_fill":
        chosen, other = values["self"], values["value"]
    else:
        chosen, other = values["self"], 0.0
    result = step.run()
    chosen, other = (
        torch.as_tensor(choice).to(result).expand_as(result) for choice in (chosen, other)
    )
    given = given.to(result).reshape(result.shape)
    apart = [(given - choice).abs().nan_to_num(0.0, math.inf, 0.0) for choice in (chosen, other)]
    return torch.where(apart[0] <= apart[1], chosen, other)


def _masked_softmax(step: Step, candidate: Tensor) -> Any:
    """Softmax of what is not zero in the result.

    A row with one such element is 1 there, whatever was masked: only the others show a mask.
    """
    x, right = step.values["self"], step.run()
    candidate = candidate.to(x).reshape(x.shape)
    is_masked = candidate == 0
    newly = (is_masked & (right != 0)).any(step.values["dim"], keepdim=True)
    several = (~is_masked).sum(step.values["dim"], keepdim=True) > 1
    if int((newly & several).sum()) <= int((newly & ~several).sum()):
        raise ValueError("the largest of each row only: that is no mask")
    return step.run(self=x.masked_fill(is_masked, -math.inf))


def _additive_mask(step: Step) -> str | None:
    for name in ("other", "self"):
        value = step.values[name]
        low = value <= _LOWEST if isinstance(value, torch.Tensor) else torch.zeros(1)
        if bool(low.any()) and bool((value[~low] == 0).all()):
            return name
    return None


def _added_mask(step: Step, given: Tensor) -> Any:
    name = _additive_mask(step)
    if name is None:
        raise ValueError("no mask is added")
    result, mask = step.run(), step.values[name]
    x = step.values["self" if name == "other" else "other"]
    given = given.to(result).reshape(result.shape)
    low = mask.expand_as(result) <= _LOWEST
    filled = given[low]
    if bool((filled == filled[0]).all()):
        return torch.where(low, filled[0], x)  # put there, not added
    return torch.where(given <= _LOWEST / 2, x + mask.min(), x.expand_as(result))
