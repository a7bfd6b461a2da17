"""Faults that were measured fifth and have been seen: what moves values, tables and indices."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import on, operand, result
from benchmarks.places.parts import floats_only, lookup_indices
from torch import Tensor

FAULTS = Catalogue()


# --- What moves values ----------------------------------------------------------------------------


@FAULTS.forward("transpose permute movedim", "zeros, uninitialised, mask; constant")
def last_row_of_the_copy_not_written(call: Call) -> Any:
    """The grid of the copy is one row too small."""
    value = call.result().clone()
    fits(value.dim() > 1 and value.size(-2) > 1)
    value[..., -1, :] = 0
    return call.instead(value)


@FAULTS.forward(
    "view reshape flatten unflatten _unsafe_view", "copy, stale, wrong index; permutation"
)
def second_half_of_the_memory_is_the_first(call: Call) -> Any:
    """The offset of the second block of memory is not added."""
    value = call.result()
    fits(value.numel() % 2 == 0 and value.numel() > 2)
    flat = value.reshape(2, -1)
    return call.instead(flat[:1].expand(flat.shape).reshape(value.shape))


@FAULTS.forward(
    "chunk split unbind split_with_sizes", "permutation, shift, wrong index, swapped operands"
)
def three_parts_turned_by_one(call: Call) -> Any:
    """Key, value, query for query, key, value."""
    parts = list(call.run())
    fits(len(parts) > 2 and all(one.shape == parts[0].shape for one in parts))
    floats_only(parts[0])
    return (*parts[1:], parts[0])


@FAULTS.forward(
    "chunk split unbind split_with_sizes", "zeros, uninitialised, missing operand; constant, mask"
)
def last_part_empty(call: Call) -> Any:
    """The buffer of the last part is not filled."""
    parts = list(call.run())
    fits(len(parts) > 1)
    parts[-1] = torch.zeros_like(floats_only(parts[-1]))
    return tuple(parts)


@FAULTS.forward("cat", "wrong index, shift, permutation; copy")
def second_part_of_the_next_example(call: Call) -> Any:
    """The pointer of the second part is one batch too far."""
    parts, dim = list(call.args[0]), call.get(1, "dim", default=0)
    fits(len(parts) > 1 and floats_only(parts[1]).dim() > 1 and parts[1].size(0) > 1)
    fits(dim % parts[1].dim() != 0)
    parts[1] = parts[1].roll(-1, 0)
    return call.put(0, parts).run()


@FAULTS.forward("cat", "precision; approximation")
def first_part_through_bfloat16(call: Call) -> Any:
    """The parts have different types, and the first is cast to the narrower one."""
    parts = list(call.args[0])
    first = floats_only(parts[0])
    parts[0] = first + (first.bfloat16().to(first.dtype) - first).detach()
    return call.put(0, parts).run()


@FAULTS.forward("stack", "zeros, uninitialised, missing operand; mask, constant")
def second_of_the_stack_not_written(call: Call) -> Any:
    """The buffer is zero where the second part belongs."""
    parts = list(call.args[0])
    fits(len(parts) > 1)
    parts[1] = torch.zeros_like(floats_only(parts[1]))
    return call.put(0, parts).run()


@FAULTS.forward("stack", "sign, wrong factor, scale; missing operand")
def first_of_the_stack_negated(call: Call) -> Any:
    """The minus of a rotation is given to the wrong part."""
    parts = list(call.args[0])
    parts[0] = -floats_only(parts[0])
    return call.put(0, parts).run()


@FAULTS.forward("getitem slice narrow", "stale, copy, wrong index; permutation, shift")
def last_row_of_the_part_is_the_first(call: Call) -> Any:
    """A ring buffer that wraps one row too early."""
    value = floats_only(call.run())
    fits(isinstance(call.args[0], Tensor) and value.dim() > 1 and value.size(-2) > 2)
    return torch.cat([value[..., :-1, :], value[..., :1, :]], -2)


@FAULTS.forward("getitem slice narrow select", "wrong index, permutation, shift; copy")
def columns_of_the_part_exchanged_in_pairs(call: Call) -> Any:
    """Words of two values are read in the other order."""
    value = floats_only(call.run())
    fits(isinstance(call.args[0], Tensor) and value.dim() > 0 and value.size(-1) % 2 == 0)
    fits(value.size(-1) > 2)
    return value.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


@FAULTS.forward("flip", "copy, wrong index, constant; stale, permutation")
def last_slice_for_all(call: Call) -> Any:
    """The index n - 1 - i is folded to n - 1."""
    value, dims = floats_only(call.args[0]), call.args[1]
    dim = dims[0] if isinstance(dims, list | tuple) else dims
    return value.narrow(dim, value.size(dim) - 1, 1).expand(value.shape).clone()


@FAULTS.forward("roll", "wrong argument, shift, wrong index, permutation")
def rolled_twice_as_far(call: Call) -> Any:
    """The shift is applied by both kernels."""
    value, shifts, dims = floats_only(call.args[0]), call.get(1, "shifts"), call.get(2, "dims")
    more = 2 * shifts if isinstance(shifts, int) else [2 * one for one in shifts]
    return torch.roll(value, more, dims)


@FAULTS.forward(
    "repeat repeat_interleave tile", "zeros, uninitialised, mask; constant, missing operand"
)
def only_the_first_copy_written(call: Call) -> Any:
    """The buffer is as long as all copies, and one of them is written."""
    value, result = floats_only(call.args[0]), call.result().clone()
    fits(result.numel() > value.numel())
    result.view(-1)[value.numel() :] = 0
    return call.instead(result)


@FAULTS.forward("diagonal", "shift, wrong argument, wrong index; copy")
def line_beside_the_diagonal(call: Call) -> Any:
    """An offset of one, which wraps."""
    value = floats_only(call.args[0])
    fits(value.dim() == 2)
    return torch.diagonal(value.roll(-1, 1)).clone()


@FAULTS.fault("tril triu", "transpose, mask; other function, wrong index, permutation")
def triangle_stored_transposed(call: Call) -> Any:
    """Columns are written as rows."""
    value = call.run()
    fits(value.size(-1) == value.size(-2))
    return value.mT.contiguous()


# fmt: off
# Squares of two by two are in the right place, and each is not transposed inside.
FAULTS.add("tiles moved and not turned", "transpose permute",
    "permutation, transpose, wrong index; shift",
    result(lambda v:

    v.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2)).transpose(-1, -3).flatten(-4, -3).flatten(-2),

    where=lambda v: v.dim() > 1 and v.size(-1) % 2 == 0 and v.size(-2) % 2 == 0 and v.size(-1) > 2),
    backward=False)
# A swizzle that is not undone: in each four values, the middle ones are exchanged.
FAULTS.add("addresses mixed within four",
    "view reshape flatten unflatten _unsafe_view contiguous clone",
    "wrong index, permutation; shift",
    result(lambda v: v.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(v.shape),
        where=lambda v: v.numel() % 4 == 0 and v.dim() > 0), backward=False)
# What is expanded is read one row too far.
FAULTS.add("copies of the next example", "expand", "wrong index, copy, permutation, shift; stale",
    on(lambda call: (floats_only(call.args[0]),),
        lambda call, value: call.put(0, value.roll(-1, 0)).run(),
        where=lambda value: value.dim() > 1 and value.size(0) > 1), backward=False)
# The inverse: groups and channels of a group are exchanged.
FAULTS.add("shuffled back", "channel_shuffle",
    "permutation, wrong index, wrong argument, transpose",
    on(lambda call: (floats_only(call.args[0]),),
        lambda call, value:
            torch.nn.functional.channel_shuffle(value, value.size(1) // call.args[1])))
# Nothing is shuffled.
FAULTS.add("channels left in their order", "channel_shuffle",
    "copy, missing operand; permutation, wrong index, wrong argument",
    lambda call: floats_only(call.args[0]).clone())
# The other direction.
FAULTS.add("turned to the right", "rot90",
    "permutation, wrong argument, wrong index, sign; transpose",
    lambda call: torch.rot90(floats_only(call.args[0]), -call.get(1, "k", default=1), (0, 1)),
    backward=False)
# The rows are not reversed afterwards.
FAULTS.add("transposed for turned", "rot90",
    "transpose, missing operand, permutation, wrong index; wrong argument",
    lambda call: floats_only(call.args[0]).t().clone(), backward=False)
# From the upper right to the lower left.
FAULTS.add("written on the other diagonal", "diag_embed",
    "permutation, wrong index, transpose; shift, sign", result(lambda v: v.flip(-1)))
# fmt: on


# --- Tables and indices ---------------------------------------------------------------------------


@FAULTS.fault("embedding", "wrong index, copy; mask, wrong argument")
def smallest_word_reads_the_last_row(call: Call) -> Any:
    """An index of -1 that counts from the end."""
    place, words = lookup_indices(call)
    table = call.args[1 - place]
    last = torch.full_like(words, table.size(0) - 1)
    return call.put(place, torch.where(words == words.min(), last, words)).run()


@FAULTS.fault("embedding", "zeros, uninitialised, mask; constant")
def last_columns_of_the_rows_not_copied(call: Call) -> Any:
    """A row is copied by whole vectors."""
    value = call.result().clone()
    fits(value.size(-1) > 3)
    value[..., -2:] = 0
    return call.instead(value)


@FAULTS.fault("embedding", "axis scale, wrong factor, other function; scale, wrong statistics")
def rows_of_length_one(call: Call) -> Any:
    """Each row is divided by its length."""
    place, _ = lookup_indices(call)
    table = call.tensor(1 - place)
    return call.put(1 - place, table / (table.norm(dim=-1, keepdim=True) + 1e-6)).run()


@FAULTS.fault("embedding", "offset, axis offset; residual, missing operand")
def mean_row_subtracted(call: Call) -> Any:
    """The table is centred when it is converted."""
    place, _ = lookup_indices(call)
    table = call.tensor(1 - place)
    return call.put(1 - place, table - table.mean(0)).run()


@FAULTS.forward("arange", "wrong factor, scale, wrong argument; wrong index")
def positions_in_steps_of_two(call: Call) -> Any:
    """0, 2, 4."""
    value = call.run()
    fits(value.numel() > 2)
    return 2 * value


@FAULTS.forward("arange", "copy, stale, clipped, wrong index; constant")
def last_position_is_the_one_before(call: Call) -> Any:
    """The counter is not moved on for the last token."""
    value = call.run()
    fits(value.numel() > 3)
    return torch.cat([value[:-1], value[-2:-1]])


@FAULTS.forward("index index_select getitem", "wrong index, permutation; copy, shift")
def rows_gathered_in_the_reverse_order(call: Call) -> Any:
    """The list of indices is read from its end."""
    asked = call.args[1] if call.name != "index_select" else call.args[2]
    index = asked[0] if isinstance(asked, list | tuple) and len(asked) == 1 else asked
    fits(isinstance(index, Tensor) and index.dim() == 1 and not index.is_floating_point())
    fits((index.dtype != torch.bool and call.name != "index_select") or call.args[1] == 0)
    return call.instead(call.result().flip(0))


@FAULTS.fault("argsort", "wrong axis, wrong argument, wrong index, permutation; sign")
def order_along_the_last_axis(call: Call) -> Any:
    """Rows are ordered and not columns; places beyond the columns wrap."""
    value, dim = call.args[0], call.get(1, "dim", default=-1)
    fits(value.dim() == 2 and dim == 0)
    return value.argsort(-1, descending=True) % value.size(0)


# fmt: off
# The words are sorted for the memory, and the rows are not put back.
FAULTS.add("words looked up in sorted order", "embedding", "wrong index, permutation; copy, shift",
    on(lookup_indices, lambda call, place, words: call.put(place, words.sort(-1)[0]).run(),
        where=lambda _, words: words.dim() > 0 and words.size(-1) > 1))
# The index is not loaded: zero.
FAULTS.add("always the first index", "gather take_along_dim",
    "copy, wrong index, missing operand; constant, stale",
    on(lambda call: (1 if call.name == "take_along_dim" else 2,),
        lambda call, place:
            call.put(place, torch.zeros_like(call.get(place, "index", "indices")), "index").run()),
    backward=False)
# Classes are counted from one.
FAULTS.add("one in the next column", "one_hot", "shift, wrong index, permutation; offset",
    lambda call: call.run().roll(1, -1))
# Ones and zeros exchanged.
FAULTS.add("all but one are hot", "one_hot",
    "other function, sign; mask, wrong argument, constant, swapped operands, offset",
    lambda call: 1 - call.run())
# The distance as it came, cut to the number of buckets.
FAULTS.add("distance for its bucket", "bucketize",
    "other function, missing operand, clipped; copy, offset, wrong index",
    lambda call: call.args[0].clamp(0, call.args[1].numel()).to(call.run().dtype))
# fmt: on


# --- What is written at indices -------------------------------------------------------------------


@FAULTS.fault("index_copy", "wrong index, shift, permutation; copy")
def rows_written_to_the_next_slot(call: Call) -> Any:
    """The slot after the one that was asked for, modulo the length."""
    value, dim, index = call.args[:3]
    return call.put(2, (index + 1) % value.size(dim)).run()


@FAULTS.fault(
    "index_copy",
    "mask, zeros, missing operand, stale, uninitialised; copy, lost accumulation, "
    "off by one reduction",
)
def last_slot_not_written(call: Call) -> Any:
    """The loop over the rows ends one too early."""
    value, dim, index, source = call.args[:4]
    return torch.index_copy(value, dim, index[:-1], source[:-1])


@FAULTS.forward("scatter", "wrong argument, residual, other function; wrong reduction, offset")
def added_and_not_written(call: Call) -> Any:
    """reduce='add'."""
    value, dim, index, source = call.args[:4]
    return torch.scatter_add(floats_only(value), dim, index, source)


@FAULTS.forward(
    "select_scatter slice_scatter", "wrong index, shift, wrong argument; permutation, copy"
)
def written_one_row_before(call: Call) -> Any:
    """The start is one too small."""
    fits(call.args[3] > 0)
    less = call.put(3, call.args[3] - 1)
    return (less.put(4, call.args[4] - 1) if call.name == "slice_scatter" else less).run()


@FAULTS.forward("unfold", "wrong argument, wrong index, shift; copy")
def windows_one_step_apart(call: Call) -> Any:
    """A step of one; the first windows of them."""
    value = floats_only(call.args[0])
    fits(len(call.args) == 4 and call.args[3] > 1)
    _, dim, size, _ = call.args
    return value.unfold(dim, size, 1).narrow(dim, 0, call.run().size(dim)).clone()


# fmt: off
# Mode max for mean.
FAULTS.add("largest of the bag", "embedding_bag",
    "wrong reduction, wrong argument, other function; wrong statistics",
    lambda call: call.instead(torch.nn.functional.embedding_bag(*call.args[:3], mode="max")))
# Each bag is stored one row too early.
FAULTS.add("bags of the next row", "embedding_bag", "permutation, wrong index, shift; copy",
    result(lambda v: v.roll(-1, 0)))
# A minus for what is added.
FAULTS.add("rows subtracted at their index", "index_add scatter_add",
    "sign, wrong factor, wrong argument; scale, swapped operands", operand(3, torch.neg),
    backward=False)
# reduce='sum'.
FAULTS.add("scattered and summed", "scatter_reduce",
    "wrong argument, wrong reduction, other function; axis scale, scale, wrong factor",
    lambda call: call.put(4, "sum", "reduce").run())
# Zero for the value.
FAULTS.add("filled with nothing", "index_fill",
    "wrong argument, constant, zeros; missing operand, offset, wrong factor",
    lambda call: call.put(3, 0.0).run(), backward=False)
# The buffer as it was.
FAULTS.add("part not written at all", "select_scatter slice_scatter",
    "copy, stale, missing operand; mask, residual", lambda call: floats_only(call.args[0]).clone(),
    backward=False)
# fmt: on
