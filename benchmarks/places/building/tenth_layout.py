"""Faults of the tenth set: what moves values, tables, indices."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on, result, rounded
from benchmarks.places.parts import (
    columns_of,
    floats_only,
    joined_parts,
    part_read,
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
_READ = "getitem slice narrow"


# --- Transpositions, views and copies -------------------------------------------------------------


# fmt: off
# The last row is read at the address that the pointer began with.
FAULTS.add("last of the turned rows is the first", _TURNED, words.REPEATED,
    computed(lambda call: (rows_of(call.result(), 3),),
        lambda value: torch.cat([value[..., :-1, :], value[..., :1, :]], -2)))
# The index of the second axis is fixed when the loop is unrolled: each is the last.
FAULTS.add("last head of the turned values for all", _TURNED, words.REPEATED,
    computed(lambda call: (floats_only(call.result()),),
        lambda value: value[:, -1:].expand_as(value).clone(),
        where=lambda value: value.dim() == 4 and value.size(1) > 1))
# A factor of one half that belongs to the next operator is fused into the copy twice.
FAULTS.add("turned values halved", _TURNED,
    "scale, wrong factor; other function, wrong argument, axis scale", result(lambda v: 0.5 * v))
# The offset of the second axis of the result is one too large, around the end.
FAULTS.add("turned values one head early", _TURNED, words.MOVED_OPERAND,
    computed(lambda call: (floats_only(call.result()),), lambda value: value.roll(-1, 1),
        where=lambda value: value.dim() == 4 and value.size(1) > 2))
# The address is aligned to the vector before: everything is read four elements too early.
FAULTS.add("memory four elements late", _MEMORY, words.MOVED_OPERAND,
    result(lambda v: v.reshape(-1).roll(4).reshape(v.shape), where=lambda v: v.numel() > 8))
# The number of the example is fixed when the loop is unrolled: each is the last.
FAULTS.add("last example of the view for all", _MEMORY, words.REPEATED,
    computed(lambda call: (floats_only(call.result()),),
        lambda value: value[-1:].expand_as(value).clone(),
        where=lambda value: value.dim() > 2 and value.size(0) > 1))
# A lazy negation is set on the view and is not undone.
FAULTS.add("view with a minus", _MEMORY, "sign, scale, wrong factor; other function",
    result(lambda v: -floats_only(v)))
# The number of rows is divided by the block size without rounding up.
FAULTS.add("last row of the view empty", _MEMORY, words.EMPTY_ON_A_RANK,
    computed(lambda call: (rows_of(call.result()),),
        lambda value: torch.cat([value[..., :-1, :], torch.zeros_like(value[..., -1:, :])], -2)))
# A relu was fused into the copy that does not belong there.
FAULTS.add("negative values not copied", _COPIED, "clipped, other function; zeros, sign, mask",
    result(lambda v: floats_only(v).relu()))
# The source pointer is one row too far; the last row is the first one.
FAULTS.add("copied one row early", _COPIED, words.MOVED_OPERAND,
    result(lambda v: rows_of(v, 3).roll(-1, -2)))
# Two vectors of each row are stored in the other order.
FAULTS.add("halves of the copied columns exchanged", _COPIED, words.REORDERED,
    computed(lambda call: (columns_of(call.result(), 4),),
        lambda value: value.roll(value.size(-1) // 2, -1),
        where=lambda value: value.size(-1) % 2 == 0))
# The buffer of the copy is a float8 with three bits behind the point.
FAULTS.add("copy in e4m3", _COPIED, "precision; approximation, other function",
    result(rounded(torch.float8_e4m3fn), where=lambda v: float(v.detach().abs().max()) < 400))
# The address below the new axis is one element too early, around the end.
FAULTS.add("new axis over values one late", "unsqueeze squeeze",
    "shift, wrong index, permutation; copy, stale, axis offset",
    computed(lambda call: (floats_only(call.result()),),
        lambda value: value.reshape(-1).roll(1).reshape(value.shape),
        where=lambda value: value.numel() > 2))
# The copy accumulates onto a buffer that has the value already.
FAULTS.add("expanded values doubled", "expand",
    "scale, wrong factor; residual, doubled reduction, other function",
    result(lambda v: 2 * floats_only(v)))
# fmt: on


# --- Parts ----------------------------------------------------------------------------------------


@FAULTS.fault("getitem slice select narrow", words.MOVED_SHARD)
def part_of_the_next_example(call: Call) -> Any:
    """The offset of the batch is one too large, around the end."""
    value = part_read(call)
    fits(value.dim() > 1 and value.size(0) == call.args[0].size(0) > 1)
    return call.instead(value.roll(-1, 0))


@FAULTS.fault(_PARTS, words.EMPTY_ON_A_RANK)
def first_row_of_each_part_empty(call: Call) -> Any:
    """The loop that fills the parts begins at the second row."""
    parts = [rows_of(one) for one in split_parts(call)]
    return tuple(
        torch.cat([torch.zeros_like(one[..., :1, :]), one[..., 1:, :]], -2) for one in parts
    )


@FAULTS.fault(_PARTS, words.REPEATED)
def last_part_is_the_first(call: Call) -> Any:
    """The offset of the last part is not added: it is the first one again."""
    parts = split_parts(call)
    fits(len(parts) > 2 and parts[0].shape == parts[-1].shape)
    return (*parts[:-1], parts[0])


@FAULTS.fault(_PARTS, words.REORDERED)
def columns_of_the_first_part_in_reverse(call: Call) -> Any:
    """The first part is read backwards along its last axis."""
    parts = split_parts(call)
    parts[0] = columns_of(parts[0], 3).flip(-1)
    return tuple(parts)


@FAULTS.fault(_PARTS, "scale, wrong factor; other function, wrong argument, axis scale")
def last_part_doubled(call: Call) -> Any:
    """The last part is written to the buffer by two blocks that both add."""
    parts = split_parts(call)
    parts[-1] = 2 * parts[-1]
    return tuple(parts)


@FAULTS.fault("cat", words.REORDERED)
def first_part_from_its_last_row(call: Call) -> Any:
    """The first part is joined in the reverse order of its rows."""
    parts = joined_parts(call)
    parts[0] = rows_of(parts[0], 3).flip(-2)
    return call.put(0, parts, "tensors").run()


@FAULTS.fault("cat", "precision; approximation, other function")
def joined_parts_in_half(call: Call) -> Any:
    """The buffer of the joined parts is float16."""
    joined_parts(call)
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().half().to(value.dtype)))


@FAULTS.fault("pad constant_pad_nd", "constant, wrong argument, offset; mask, other function, eps")
def padded_with_a_tenth(call: Call) -> Any:
    """The value of the padding is 0.1 where it was given as zero, or not given."""
    value, amount = floats_only(call.args[0]), list(call.args[1])
    fits(any(one > 0 for one in amount))
    fits(call.get(2, "mode", default="constant") in {"constant", 0})
    return call.instead(torch.nn.functional.pad(value, amount, value=0.1))


# fmt: off
# The part is read backwards along the axis before the last one.
FAULTS.add("rows of the part from the last", _READ, words.REORDERED,
    lambda call: call.instead(rows_of(part_read(call), 3).flip(-2)))
# The part is divided by the root of its width, as queries are, and is none.
FAULTS.add("part scaled by the root of its width", _READ,
    "scale, wrong factor; other function, wrong argument, axis scale",
    computed(lambda call: (columns_of(part_read(call)),),
        lambda value: value / math.sqrt(value.size(-1))))
# The slice goes through a narrow buffer.
FAULTS.add("part in bfloat16", _READ, "precision; approximation, other function",
    computed(part_read,
        lambda value: with_gradient_of(value, value.detach().bfloat16().to(value.dtype))))
# The slice is a buffer that nothing is written to: it stays zero.
FAULTS.add("part not copied", "getitem slice select narrow",
    "zeros, uninitialised, missing operand; constant, mask, wrong factor, scale",
    lambda call: call.instead(torch.zeros_like(part_read(call))))
# The first part is not stored but accumulated, and holds the sum of both.
FAULTS.add("second part added to the first", "cat",
    "residual, other function; lost accumulation, doubled reduction, missing operand, "
    "wrong factor",
    on(joined_parts,
        lambda call, parts: call.put(0, [parts[0] + parts[1], *parts[1:]], "tensors").run(),
        where=lambda parts: parts[0].shape == parts[1].shape))
# The first part has a factor of two that belongs to the other one.
FAULTS.add("first part doubled", "stack", "scale, wrong factor; axis scale, other function",
    on(joined_parts,
        lambda call, parts: call.put(0, [2 * parts[0], *parts[1:]], "tensors").run()))
# fmt: on


# --- Tables and indices ---------------------------------------------------------------------------


@FAULTS.fault("embedding", words.REPEATED)
def last_word_of_the_row_for_all(call: Call) -> Any:
    """The pointer to the words stays at the end of the row: all are the last one."""
    place, words, _ = words_and_table(call)
    fits(words.dim() > 0 and words.size(-1) > 1)
    return call.put(place, words[..., -1:].expand_as(words).clone()).run()


@FAULTS.fault("embedding", words.REORDERED)
def words_exchanged_in_pairs(call: Call) -> Any:
    """Two indices of 32 bits are loaded as one of 64, and taken apart in the other order."""
    place, words, _ = words_and_table(call)
    fits(words.dim() > 0 and words.size(-1) % 2 == 0)
    return call.put(place, words.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)).run()


@FAULTS.fault("embedding", words.REORDERED)
def rows_of_the_table_in_pairs(call: Call) -> Any:
    """Two rows share a line of memory, and are told apart the wrong way round: index xor 1."""
    place, words, table = words_and_table(call)
    fits(table.size(0) % 2 == 0)
    return call.put(place, words.bitwise_xor(1)).run()


@FAULTS.fault("embedding", "precision; approximation, other function")
def rows_of_the_table_in_eight_bits_each(call: Call) -> Any:
    """Each row has 255 levels, with a step of its own."""
    value = call.result()
    step = value.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return call.instead(with_gradient_of(value, (value.detach() / step).round() * step))


@FAULTS.fault("embedding", words.EMPTY_ON_A_RANK)
def first_word_not_looked_up(call: Call) -> Any:
    """The loop over the words begins at one: the row of the first token is empty."""
    _, words, _ = words_and_table(call)
    fits(words.dim() > 0 and words.size(-1) > 1)
    value = rows_of(call.result())
    return call.instead(torch.cat([torch.zeros_like(value[..., :1, :]), value[..., 1:, :]], -2))


@FAULTS.fault("arange", "shift, wrong index, permutation, wrapped; offset, wrong argument, copy")
def last_position_is_the_first(call: Call) -> Any:
    """1, 2, ..., n - 1, 0: one is added, and the last one begins again."""
    value = call.run()
    fits(value.dim() == 1 and value.numel() > 2)
    return value.roll(-1)


@FAULTS.fault("index _unsafe_index getitem index_select", words.MOVED)
def chosen_values_stored_one_row_late(call: Call) -> Any:
    """Each of the chosen values is stored one place too late, the last one first."""
    index = call.args[1] if call.name != "index_select" else call.args[2]
    listed = index if isinstance(index, list | tuple) else [index]
    fits(any(isinstance(one, Tensor) and one.dim() for one in listed))
    value = floats_only(call.result())
    fits(value.dim() and value.size(0) > 2)
    return call.instead(value.roll(1, 0))


@FAULTS.fault(
    "gather take_along_dim", "wrong index, shift; wrapped, wrong argument, permutation, copy"
)
def gathered_from_the_place_after(call: Call) -> Any:
    """The index is one too large, modulo the length of the axis."""
    source = floats_only(call.args[0])
    place, axis = (1, 2) if call.name == "take_along_dim" else (2, 1)
    dim, index = call.args[axis], call.args[place]
    return call.put(place, (index + 1) % source.size(dim)).run()


@FAULTS.fault("repeat_interleave repeat tile", words.MOVED_SHARD)
def repeated_values_two_places_late(call: Call) -> Any:
    """What is repeated is stored two heads too late, around the end."""
    value = floats_only(call.result())
    axis = 1 if value.dim() == 4 else 0
    fits(value.size(axis) > 2)
    return call.instead(value.roll(2, axis))


# fmt: off
# What is beyond the first of four shards reads the last row of that shard.
FAULTS.add("index limited to a quarter of the table", "embedding",
    "wrong index, clipped; constant, copy, wrong argument, wrapped",
    on(words_and_table,
        lambda call, place, words, table:
            call.put(place, words.clamp(max=table.size(0) // 4 - 1)).run()))
# The features of each row are read backwards.
FAULTS.add("columns of the table from the last", "embedding", words.REORDERED,
    result(lambda v: columns_of(v, 3).flip(-1)))
# Each row is divided by its length, as in a table that is kept normalised.
FAULTS.add("rows of the table of length one", "embedding",
    "other function, axis scale, wrong factor; scale, residual, wrong statistics",
    result(lambda v: v / v.norm(dim=-1, keepdim=True).clamp(min=1e-06)))
# 0, 1, 2, 3, 0, 1: the number inside of a page is taken for the position.
FAULTS.add("positions modulo four", "arange",
    "wrapped, wrong index; wrong argument, copy, permutation, clipped", lambda call: call.run() % 4)
# 0, 3, 6: the stride of a patch is multiplied in.
FAULTS.add("positions three times as far", "arange",
    "scale, wrong factor, wrong argument; wrong index, offset", lambda call: call.run() * 3)
# The offset of the diagonal is one less.
FAULTS.add("diagonal one to the left", "tril triu",
    "wrong index, wrong argument, shift, mask; off by one reduction, zeros",
    lambda call: call.put(1, call.get(1, "diagonal", default=0) - 1, "diagonal").run())
# fmt: on
