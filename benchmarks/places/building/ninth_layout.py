"""Faults of the ninth set: what moves values, tables, indices."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, on, result, rounded, tensors
from benchmarks.places.parts import (
    columns_of,
    floats_only,
    joined_parts,
    rows_of,
    split_parts,
    words_and_table,
)
from torch import Tensor

FAULTS = Catalogue(backward=False)
_TURNED = "transpose permute movedim"
_MEMORY = "view reshape flatten unflatten _unsafe_view"
_COPIED = "clone contiguous"
_PARTS = "chunk split unbind split_with_sizes"


# --- Transpositions, views and copies -------------------------------------------------------------


# fmt: off
# The matrix is as long as wide, and the rewrite removes its transposition.
FAULTS.add("square taken as it is", "t",
    "transpose, permutation, wrong index; copy, missing operand, wrong axis, stale, "
    "swapped operands",
    computed(lambda call: (floats_only(call.args[0]),), lambda value: value.clone(),
        where=lambda value: value.dim() == 2 and value.size(0) == value.size(1) > 1))
# The tile of the copy is one column too narrow.
FAULTS.add("last column of the turned values empty", _TURNED, words.EMPTY_ON_A_RANK,
    computed(lambda call: (columns_of(call.result()),),
        lambda value: torch.cat([value[..., :-1], torch.zeros_like(value[..., -1:])], -1),
        where=lambda value: value.dim() > 1))
# The tile in shared memory is narrow.
FAULTS.add("turned by way of bfloat16", _TURNED, "precision; approximation, other function",
    result(rounded(torch.bfloat16)))
# The pointer of the result is two rows too far, around the end.
FAULTS.add("turned rows stored two rows late", _TURNED, words.MOVED_OR_SWAPPED,
    result(lambda v: rows_of(v, 4).roll(2, -2)))
# The change of shape became a copy into a buffer of float16.
FAULTS.add("changed shape by way of half", _MEMORY, "precision; approximation, other function",
    result(rounded(torch.float16)))
# The loop over the rows of each matrix begins at one.
FAULTS.add("first row of the new shape empty", _MEMORY, words.EMPTY_ON_A_RANK,
    computed(lambda call: (rows_of(call.result()),),
        lambda value: torch.cat([torch.zeros_like(value[..., :1, :]), value[..., 1:, :]], -2)))
# Rows are copied by vectors of eight; what is left of a row stays empty.
FAULTS.add("tail of each row not copied", _COPIED, words.EMPTY_ON_A_RANK,
    computed(lambda call: (columns_of(call.result(), 9),),
        lambda value: value * (torch.arange(value.size(-1)) < value.size(-1) // 8 * 8),
        where=lambda value: value.size(-1) % 8))
# The grid of the copy has one program too few along the batch.
FAULTS.add("last example of the copy empty", _COPIED, words.EMPTY_ON_A_RANK,
    result(lambda v: torch.cat([v[:-1], torch.zeros_like(v[-1:])]),
        where=lambda v: v.dim() > 1 and v.size(0) > 1))
# A negation that belongs to another reader was merged into the view.
FAULTS.add("minus fused into the new axis", "unsqueeze squeeze",
    "sign, scale, wrong factor; other function", result(lambda v: -floats_only(v)))
# fmt: on


# --- Parts ----------------------------------------------------------------------------------------


def _with_step(call: Call) -> tuple[Tensor, list[Any], int]:
    """Source, index and the axis of a slice whose step is not one."""
    source, index = call.args[:2]
    fits(isinstance(source, Tensor) and isinstance(index, list | tuple))
    index = list(index)
    if Ellipsis in [one for one in index if not isinstance(one, Tensor)]:
        place = index.index(Ellipsis)
        index[place : place + 1] = [slice(None)] * (source.dim() - len(index) + 1)
    steps = [isinstance(one, slice) and (one.step or 1) > 1 for one in index]
    fits(any(steps) and all(isinstance(one, slice) for one in index))
    return floats_only(source), index, steps.index(True)


@FAULTS.fault(
    "getitem", "wrong index, wrong argument; missing operand, permutation, copy, shift, stale"
)
def step_of_the_slice_ignored(call: Call) -> Any:
    """As many places as were asked for, one behind another: x[..., :n] for x[..., ::2]."""
    source, index, axis = _with_step(call)
    result = call.result()
    start = index[axis].start or 0
    index[axis] = slice(start, start + result.size(axis))
    return call.instead(source[tuple(index)])


@FAULTS.fault(
    "getitem", "wrong index, shift, wrong argument; copy, permutation, swapped operands, stale"
)
def even_places_for_odd_ones(call: Call) -> Any:
    """X[..., ::2] for x[..., 1::2]."""
    source, index, axis = _with_step(call)
    fits(index[axis].step == 2 and index[axis].stop is None and index[axis].start == 1)
    index[axis] = slice(0, None, 2)
    return call.instead(source[tuple(index)])


@FAULTS.fault("slice select narrow", "wrong index, shift, wrong argument; copy, permutation, stale")
def part_begins_one_early(call: Call) -> Any:
    """A start that is one too small; the length is the right one."""
    value, dim, start = floats_only(call.args[0]), call.args[1], call.args[2]
    fits(isinstance(start, int) and start > 0)
    if call.name == "select":
        return call.instead(value.select(dim, start - 1))
    fits(call.get(4, "step", default=1) == 1)
    return call.instead(value.narrow(dim, start - 1, call.result().size(dim)))


@FAULTS.fault(
    "getitem select", "wrong axis, wrong index; transpose, permutation, copy, stale, wrong argument"
)
def first_tokens_of_one_example_for_the_first_of_each(call: Call) -> Any:
    """X[0, i] for x[i, 0]: the batch is taken for the second axis."""
    source, result = floats_only(call.args[0]), call.result()
    if call.name == "select":
        fits(call.args[1:3] == (1, 0))
    else:
        index = call.args[1]
        fits(isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None))
        fits(isinstance(index[1], int) and index[1] == 0)
    fits(source.dim() > 2 and 1 < source.size(0) <= source.size(1))
    return call.instead(source[0, : result.size(0)])


@FAULTS.fault(_PARTS, "permutation, wrong index, swapped operands; shift, copy, wrong rank's shard")
def parts_from_the_last_to_the_first(call: Call) -> Any:
    """Value, key, query: the parts of a packed projection in the reverse order."""
    parts = split_parts(call, 3)
    fits(all(one.shape == parts[0].shape for one in parts))
    return tuple(parts[::-1])


@FAULTS.fault(_PARTS, "scale, wrong factor; other function, missing operand")
def first_part_scaled_when_it_is_split(call: Call) -> Any:
    """The first part is divided by the root of its width, which is done once more later."""
    parts = split_parts(call)
    fits(parts[0].size(-1) > 1)
    parts[0] = parts[0] * parts[0].size(-1) ** -0.5
    return tuple(parts)


@FAULTS.fault(_PARTS, words.MOVED_OPERAND)
def last_part_of_the_row_before(call: Call) -> Any:
    """The pointer of the last part is one row behind, around the end."""
    parts = split_parts(call)
    parts[-1] = rows_of(parts[-1]).roll(1, -2)
    return tuple(parts)


@FAULTS.fault("cat", words.MOVED_OR_SWAPPED)
def second_part_of_the_row_after(call: Call) -> Any:
    """The pointer of the second part is one row too far, around the end; the first is right."""
    parts = joined_parts(call)
    parts[1] = rows_of(parts[1]).roll(-1, -2)
    return call.put(0, parts, "tensors").run()


@FAULTS.fault("cat", words.EMPTY_ON_A_RANK)
def last_column_of_the_joined_empty(call: Call) -> Any:
    """The width of the joined tensor is one too small in the bound of the store."""
    joined_parts(call)
    value = columns_of(call.result())
    return call.instead(torch.cat([value[..., :-1], torch.zeros_like(value[..., -1:])], -1))


# fmt: off
# The buffer already holds the first part, and it is accumulated: that part counts twice.
FAULTS.add("first part added to a full buffer", "cat",
    "residual, doubled reduction, wrong factor; scale, wrong index, other function, "
    "lost accumulation, axis scale",
    on(joined_parts,
        lambda call, parts: call.put(0, [2 * parts[0], *parts[1:]], "tensors").run(),
        where=lambda parts: parts[0].numel() and parts[1].numel()))
# The pointer to the parts is not moved on: each is the first.
FAULTS.add("first of the stack for all", "stack", words.REPEATED,
    on(joined_parts, lambda call, parts:
            call.put(0, [parts[0]] * len(parts), "tensors").run(),
        where=lambda parts: len(parts) > 2))
# The minus of a rotation is given to the last part.
FAULTS.add("last of the stack negated", "stack",
    "sign, wrong factor, mask; scale, axis scale, other function",
    on(joined_parts,
        lambda call, parts: call.put(0, [*parts[:-1], -parts[-1]], "tensors").run()))
# fmt: on


# --- Copies and borders ---------------------------------------------------------------------------


@FAULTS.fault("expand", words.EMPTY_ON_A_RANK)
def last_copy_of_what_is_expanded_empty(call: Call) -> Any:
    """The loop over the copies ends one too early."""
    value, result = floats_only(call.args[0]), call.result()
    shape = [1] * (result.dim() - value.dim()) + list(value.shape)
    axis = next((i for i, size in enumerate(shape) if size == 1 < result.size(i)), None)
    fits(axis is not None)
    kept = result.narrow(axis, 0, result.size(axis) - 1)
    return call.instead(torch.cat([kept, torch.zeros_like(result.narrow(axis, 0, 1))], axis))


@FAULTS.fault("unfold", "shift, wrong index; permutation, copy, wrong argument, stale")
def windows_begin_one_place_late(call: Call) -> Any:
    """Each window is read one place further, around the end of a line."""
    value, axis = floats_only(call.args[0]), -1
    if value.dim() == 2:
        axis = call.args[1]
    return call.put(0, value.roll(-1, axis), "input").run()


@FAULTS.fault("unfold", words.REPEATED)
def first_window_for_all(call: Call) -> Any:
    """The pointer is not moved on from window to window."""
    result = call.result()
    axis = call.args[1] if call.args[0].dim() == 2 else -1
    return call.instead(result.narrow(axis, 0, 1).expand(result.shape).clone())


@FAULTS.fault("pixel_shuffle", words.REPEATED)
def first_channel_for_each_pixel_of_a_block(call: Call) -> Any:
    """Each block has one value: that of its first channel."""
    value, factor = floats_only(call.args[0]), call.args[1]
    first = value[:, :: factor * factor]
    large = first.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
    return call.instead(large)


@FAULTS.fault("pixel_unshuffle", words.REORDERED)
def channels_of_a_block_in_the_order_of_another_framework(call: Call) -> Any:
    """Channel (place, c) for (c, place)."""
    result, factor = call.result(), call.args[1]
    parts = result.unflatten(1, (-1, factor * factor))
    return call.instead(parts.transpose(1, 2).flatten(1, 2))


@FAULTS.fault("diagonal", "wrong index; wrong argument, permutation, other function, wrong axis")
def line_from_the_upper_right(call: Call) -> Any:
    """The other diagonal."""
    value = floats_only(call.args[0])
    fits(len(call.args) == 1 and not call.kwargs and value.dim() == 2)
    return call.instead(value.flip(-1).diagonal().clone())


@FAULTS.fault("roll", "sign, wrong factor, mask; scale, other function, axis scale")
def wrapped_values_negated(call: Call) -> Any:
    """What comes in at the other end has a minus, as of a rotation."""
    value, step, dim = floats_only(call.args[0]), call.get(1, "shifts"), call.get(2, "dims")
    step, dim = (one[0] if isinstance(one, list | tuple) else one for one in (step, dim))
    fits(isinstance(dim, int) and 0 < abs(step) < value.size(dim))
    result = call.result()
    size = result.size(dim)
    if step > 0:
        parts = [-result.narrow(dim, 0, step), result.narrow(dim, step, size - step)]
    else:
        parts = [result.narrow(dim, 0, size + step), -result.narrow(dim, size + step, -step)]
    return call.instead(torch.cat(parts, dim))


# fmt: off
# One quarter too many.
FAULTS.add("turned by half a turn", "rot90",
    "wrong argument, permutation, wrong index; transpose, wrong axis, shift, other function",
    lambda call: call.put(1, call.get(1, "k", default=1) + 1, "k").run())
# fmt: on


# --- Tables and indices ---------------------------------------------------------------------------


@FAULTS.fault("embedding", words.EMPTY_ON_A_RANK)
def last_word_not_looked_up(call: Call) -> Any:
    """The grid is one word too short: the row of the newest token is empty."""
    _, words, _ = words_and_table(call)
    fits(words.dim() > 0 and words.size(-1) > 1)
    value = rows_of(call.result())
    return call.instead(torch.cat([value[..., :-1, :], torch.zeros_like(value[..., -1:, :])], -2))


@FAULTS.fault(
    "embedding_bag",
    "partial sum, off by one reduction, wrong reduction, missing reduction; mask, "
    "missing operand, wrong statistics, zeros, lost accumulation",
)
def last_word_of_each_bag_not_added(call: Call) -> Any:
    """The loop over the words of a bag ends one too early; all of them are counted."""
    words, table, starts = call.args[:3]
    fits(not words.is_floating_point() and call.kwargs.get("mode", "mean") == "mean")
    ends = [*starts.tolist()[1:], words.numel()]
    bags = [
        table[words[a : b - 1]].sum(0) / (b - a) for a, b in zip(starts.tolist(), ends, strict=True)
    ]
    return call.instead(torch.stack(bags))


@FAULTS.fault(
    "embedding_bag",
    "wrong factor, axis scale, wrong reduction; scale, wrong argument, other function, "
    "wrong statistics",
)
def bag_divided_by_the_root_of_its_length(call: Call) -> Any:
    """The combiner of another framework."""
    words, _, starts = call.args[:3]
    fits(not words.is_floating_point() and call.kwargs.get("mode", "mean") == "mean")
    ends = torch.cat([starts[1:], torch.tensor([words.numel()])])
    return call.instead(call.result() * (ends - starts)[:, None] ** 0.5)


@FAULTS.fault("arange", "wrong argument, scale, wrong factor; missing operand, wrong index, copy")
def step_of_the_positions_lost(call: Call) -> Any:
    """0, 1, 2 for 0, 2, 4: as many, and one behind another."""
    fits(len(call.args) == 3 and call.args[0] == 0 and call.args[2] not in {0, 1})
    value = call.run()
    return torch.arange(value.numel(), dtype=value.dtype, device=value.device)


@FAULTS.fault(
    "gather take_along_dim",
    "wrong axis, wrong index, wrong argument; permutation, transpose, copy, stale",
)
def gathered_along_another_axis(call: Call) -> Any:
    """The last axis, or the first one where the last was asked for."""
    source = floats_only(call.args[0])
    place, axis = (2, 1) if call.name == "take_along_dim" else (1, 2)
    dim, index = call.args[place], call.args[axis]
    other = 0 if dim % source.dim() == source.dim() - 1 else source.dim() - 1
    fits(other != dim % source.dim() and int(index.max()) < source.size(other))
    fits(all(index.size(i) <= source.size(i) for i in range(source.dim()) if i != other))
    return call.instead(source.gather(other, index))


@FAULTS.fault("gather", words.REPEATED)
def gathered_from_the_first_example_for_all(call: Call) -> Any:
    """The stride of the batch is zero for the values; the indices are right."""
    source, dim = floats_only(call.args[0]), call.args[1]
    fits(dim % source.dim() != 0 and source.size(0) > 1)
    return call.put(0, source[:1].expand_as(source).contiguous()).run()


@FAULTS.fault("getitem index", words.REORDERED)
def rows_put_where_they_should_be_taken_from(call: Call) -> Any:
    """The inverse of the order: row i goes to place p[i] instead of coming from it."""
    source, index = floats_only(call.args[0]), call.args[1]
    if isinstance(index, list | tuple):
        fits(len(index) == 1)
        index = index[0]
    fits(isinstance(index, Tensor) and index.dtype == torch.int64 and index.dim() == 1)
    fits(torch.equal(index.sort().values, torch.arange(source.size(0))))
    return call.instead(source[index.argsort()])


@FAULTS.fault(
    "one_hot", "zeros, mask; constant, missing operand, axis scale, wrong factor, one rank's part"
)
def first_class_never_hot(call: Call) -> Any:
    """Class zero is taken for padding: its rows are empty."""
    value = call.run()
    fits(value.dim() == 2)
    return value * (torch.arange(value.size(-1)) > 0)


@FAULTS.fault(
    "index_fill", "wrong axis, wrong index, wrong argument; transpose, mask, permutation, stale"
)
def columns_filled_and_not_rows(call: Call) -> Any:
    """The axis is the other one."""
    value, dim, places = call.tensor(0), call.args[1], call.args[2]
    fits(value.dim() == 2 and int(places.max()) < value.size(1 - dim))
    return call.put(1, 1 - dim, "dim").run()


@FAULTS.fault(
    "index_add scatter_add",
    "lost accumulation, partial sum, missing reduction; wrong reduction, missing operand, "
    "mask, stale, copy",
)
def first_of_the_rows_of_an_index_kept(call: Call) -> Any:
    """Once an index was written, further rows for it are lost."""
    value, dim, places, rows = call.args[:4]
    fits(dim == 0 and isinstance(rows, Tensor) and rows.dim() > 0)
    line = places if places.dim() == 1 else places[:, 0]
    fits(places.dim() == 1 or bool((places == line[:, None]).all()))
    known = line.tolist()
    kept = torch.tensor([one not in known[:i] for i, one in enumerate(known)])
    kept = kept.view(-1, *[1] * (rows.dim() - 1)).to(rows.dtype)
    fits(floats_only(value).size(0) > 1)
    return call.put(3, rows * kept, "src").run()


# fmt: off
# The kernel is given the positions in the place of the words.
FAULTS.add("rows by position and not by word", "embedding",
    "wrong index; wrong argument, permutation, copy, stale, constant, swapped operands",
    on(words_and_table,
        lambda call, place, words, *_:

    call.put(place, torch.arange(words.size(-1), dtype=words.dtype).expand_as(words).clone()).run(),
        where=lambda _, words, table: words.dim() > 1 and words.size(-1) <= table.size(0)))
# The scale of the scores was folded into the table.
FAULTS.add("rows divided by the root of their width", "embedding",
    "scale, wrong factor; other function, wrong argument",
    computed(lambda call: (columns_of(call.result()),),
        lambda value: value * value.size(-1) ** (-0.5)))
# An offset of two special rows is subtracted, and there are none; the first go around.
FAULTS.add("row of the table two before", "embedding",
    "wrong index, shift; permutation, wrong argument, offset, wrapped",
    on(words_and_table,
        lambda call, place, words, table: call.put(place, (words - 2) % table.size(0)).run()))
# 2, 3, 4: the offset of a table with two special rows, which this one does not have.
FAULTS.add("positions begin two later", "arange",
    "offset, wrong argument; shift, wrong index, residual, axis offset",
    lambda call: call.run() + 2)
# The pointer to the new rows is not moved on.
FAULTS.add("first row written to every slot", "index_copy", words.REPEATED,
    on(tensors(3),
        lambda call, rows: call.put(3, rows[:1].expand_as(rows).clone(), "source").run(),
        where=lambda rows: rows.size(0) > 1))
# The store is an addition.
FAULTS.add("part added to what it should replace", "slice_scatter",
    "residual, other function; doubled reduction, stale, offset, wrong argument, "
    "lost accumulation",
    on(lambda call:
            (call.tensor(0), call.put(1, torch.zeros_like(call.tensor(1)), "src").run()),
        lambda call, value, there:

    call.instead(call.put(0, torch.zeros_like(value), "input").run() + there + (value - there)),
        where=lambda value, *_: value.dim() == 2))
# fmt: on
