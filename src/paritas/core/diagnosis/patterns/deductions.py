"""Mistakes that the candidate itself shows: which rows were read, which keys were seen."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import step_names
from paritas.core.diagnosis.case import widen
from paritas.core.diagnosis.patterns.attention import deduced_attention, is_attention
from paritas.core.diagnosis.patterns.limited import limited_arguments
from paritas.core.diagnosis.patterns.operands import solved_operands
from paritas.core.diagnosis.patterns.row_statistics import solved_statistics
from paritas.core.diagnosis.patterns.scores import solved_scores
from paritas.core.diagnosis.patterns.steps import first_of, with_order
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
    reader = _READERS.get(step.name)
    if reader is not None and (step.name != "index" or _only_index(step) is not None):
        sentence, read = reader
        sentence = sentence.format(step.values.get("dim"))
        yield Variation(PatternKind.WRONG_INDEX, sentence, partial(read, given=candidate))
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
        rows = widen(value)
        for sign, words in ((1.0, "added to"), (-1.0, "subtracted from")):
            apart = (rows - sign * row).abs().amax(1)
            position = int(apart.argmin())
            if float(apart[position]) <= _SAME_ROW * size:
                sentence = f"row {position} of {name} is {words} every row of the result"
                change = partial(_with_row, name=name, place=position, sign=sign)
                yield Variation(PatternKind.RESIDUAL, sentence, change)


def _with_row(step: Step, name: str, place: int, sign: float) -> Any:
    return step.with_first(first_of(step.run()) + sign * step.values[name][place])


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
                    change = with_order(name, axis, source)
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
        change = with_order(name, axis, torch.full((size,), index))
        value = predict(Variation(PatternKind.WRONG_INDEX, "", change))
        if value is None:
            return None
        values.append(value)
    return torch.stack(values)


# --- Rows of a table ------------------------------------------------------------------------------

# The table, the indices and the axis of operators that read rows.
_TABLES = {"embedding": ("weight", "indices"), "index_select": ("self", "index")}
_MOST_PAIRS = 1 << 24


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
    return _find_nearest(target, rows).reshape(indices.shape).to(indices.dtype)


def _find_nearest(target: Tensor, rows: Tensor) -> Tensor:
    if len(rows) * len(target) > _MOST_PAIRS:
        raise ValueError("too many rows to look for one")
    way = "donot_use_mm_for_euclid_dist"
    return torch.cdist(target.nan_to_num(0.0), rows, compute_mode=way).argmin(dim=1)


def _slices_taken(step: Step, given: Tensor) -> Any:
    """The slices of the tensor that are nearest to those given."""
    x, axis = step.values["self"], step.values["dim"]
    result = step.run()
    rows = x.movedim(axis, 0).reshape(x.shape[axis], -1)
    shape = result.unsqueeze(axis).shape if step.name == "select" else result.shape
    target = given.to(x).reshape(shape).movedim(axis, 0)
    nearest = _find_nearest(target.reshape(len(target), -1), rows)
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


_ROWS, _SLICES = "other rows are read than the indices say", "other slices are taken along axis {}"
_READERS: dict[str, tuple[str, Callable[..., Any]]] = {
    **dict.fromkeys(_TABLES, (_ROWS, _rows_read)),
    "index": (_ROWS, _rows_indexed),
    "gather": ("other elements are read than the indices say", _elements_read),
    **dict.fromkeys(("slice", "narrow", "select"), (_SLICES, _slices_taken)),
}


# --- Elements that were masked --------------------------------------------------------------------

_LOWEST = -1e4
# Operators that put one number in the place of some elements.
_MASKING = step_names("triangles") | {"masked_fill"}


def _chosen_elements(step: Step, candidate: Tensor, part: Tensor) -> Iterator[Variation]:
    """Each element is one of two: what a mask lets through, and what it puts in its place."""
    some = candidate[part]
    is_one_value = bool((some == some[0]).all()) and not (
        _lets_through(step, some[0]) or _is_filled_in(step, some[0])
    )
    # Values that were not written look like masked ones.
    if not is_one_value and step.name in _MASKING | {"where", "softmax"}:
        sentence = "other elements are masked"
        yield Variation(PatternKind.MASK, sentence, partial(_chosen, given=candidate))
    elif step.name == "add" and _additive_mask(step) is not None:
        sentence = "the mask is added to other elements"
        yield Variation(PatternKind.MASK, sentence, partial(_added_mask, given=candidate))


def _lets_through(step: Step, value: Tensor) -> bool:
    """Whether a mask that is wrong lets one value through, as of a tensor of ones."""
    operand = step.values.get("self")
    if step.name not in _MASKING or not isinstance(operand, torch.Tensor):
        return False
    return bool((operand == operand.flatten()[0]).all()) and bool(operand.flatten()[0] == value)


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
    filled = {"where": "other", "masked_fill": "value"}.get(step.name)
    result, choices = step.run(), (values["self"], 0.0 if filled is None else values[filled])
    chosen, other = (torch.as_tensor(choice).to(result).expand_as(result) for choice in choices)
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


# --- Rows that were added to other places than their indices say ----------------------------------


# The indices and the rows of operators that add rows up.
_ADDED_ROWS = {
    "embedding_dense_backward": ("indices", "grad_output"),
    "index_add": ("index", "source"),
}
_MOST_ROWS = 512
_NEAR_SUM = 1e-6


def scattered_rows(step: Step, candidate: Tensor) -> Iterator[Variation]:
    """A sum of rows by their indices, with the indices that give the candidate."""
    names = _ADDED_ROWS.get(step.name)
    if names is None or step.values.get("padding_idx", -1) >= 0:
        return
    if step.values.get("dim", 0) != 0 or step.values.get("alpha", 1) != 1:
        return
    indices, grad = (step.values[name] for name in names)
    rows = widen(grad).reshape(indices.numel(), -1)
    into = step.values.get("self")
    count = step.values["num_weights"] if into is None else len(into)
    if into is not None and into.numel() == candidate.numel():
        candidate = candidate.reshape(into.shape) - widen(into)
    if not 1 < len(rows) <= _MOST_ROWS or candidate.numel() != count * rows.shape[1]:
        return
    places = _places_of(rows, candidate.reshape(count, -1))
    if places is None:
        return
    used = places >= 0
    right = indices.detach().cpu().reshape(-1)
    if bool((places[used] == right[used]).all()):
        return  # rows that are left out are another matter
    sentence = "rows are added to other places than their indices say"
    if not bool(used.all()):
        sentence += f", and {int((~used).sum())} of {len(used)} are left out"
    yield Variation(PatternKind.WRONG_INDEX, sentence, partial(_added_to, places=places))


def _added_to(step: Step, places: Tensor) -> Any:
    names = _ADDED_ROWS[step.name]
    indices, grad = (step.values[name] for name in names)
    places = places.to(indices.device).reshape(indices.shape)
    used = (places >= 0).reshape(*places.shape, *[1] * (grad.dim() - places.dim()))
    return step.run(**{names[0]: places.clamp(min=0).to(indices.dtype), names[1]: grad * used})


def _places_of(rows: Tensor, sums: Tensor) -> Tensor | None:
    """The sum that each row is a term of, -1 for none; None if that is not known."""
    if rows.shape[1] >= len(rows):
        solution = torch.linalg.lstsq(rows.T, sums.T, driver="gelsd")
        weights = solution.solution.T
        rounded = weights.round()
        is_sum = float((rounded @ rows - sums).abs().max()) <= _NEAR_SUM * float(rows.abs().max())
        if int(solution.rank) < len(rows) or not is_sum:
            return None
        once = bool(((rounded == 0) | (rounded == 1)).all()) and bool((rounded.sum(0) <= 1).all())
        return torch.where(rounded.sum(0) > 0, rounded.argmax(0), -1) if once else None
    return _explain_pair_sums(rows, sums)


def _explain_pair_sums(rows: Tensor, sums: Tensor) -> Tensor | None:
    """The same for sums of at most two rows."""
    limit = _NEAR_SUM * float(rows.abs().max())
    places = torch.full((len(rows),), -1)
    first, second = torch.triu_indices(len(rows), len(rows), 1)
    # One number of each row, drawn at random, tells which rows may fit.
    key = torch.rand(rows.shape[1], generator=torch.Generator().manual_seed(0)).double()
    alone, both = rows @ key, (rows[first] + rows[second]) @ key
    for position in (sums.abs().amax(1) > limit).nonzero().reshape(-1).tolist():
        target = sums[position]
        number = target @ key
        wide = limit * rows.shape[1]
        for some in (
            [(int(index),) for index in ((alone - number).abs() <= wide).nonzero()],
            [
                (int(first[index]), int(second[index]))
                for index in ((both - number).abs() <= wide).nonzero()
            ],
        ):
            fitting = [
                indices
                for indices in some
                if float((rows[list(indices)].sum(0) - target).abs().max()) <= limit
            ]
            if fitting:
                break
        if len(fitting) != 1 or bool((places[list(fitting[0])] >= 0).any()):
            return None
        places[list(fitting[0])] = position
    return places
