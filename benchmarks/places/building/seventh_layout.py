"""Faults for measuring: what moves values, tables, indices."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, on, result, rounded
from benchmarks.places.parts import (
    columns_of,
    floats_only,
    joined_parts,
    lookup_indices,
    round_to,
    rows_of,
    split_parts,
)
from torch import Tensor

FAULTS = Catalogue()
_TURNED = "transpose permute t movedim"
_MEMORY = "view reshape flatten unflatten _unsafe_view"
_COPIED = "clone contiguous"
_PARTS = "chunk split unbind split_with_sizes"
_READ = "getitem slice narrow select"
_LOOKED_UP = "index index_select gather take_along_dim"


def _part(call: Call) -> Tensor:
    """What is read of a tensor, and not all of it."""
    value = floats_only(call.run())
    fits(isinstance(call.args[0], Tensor) and value.numel() < call.args[0].numel())
    return value


# --- Transpositions and views ---------------------------------------------------------------------


@FAULTS.forward(_MEMORY, words.EMPTY_ON_A_RANK)
def last_quarter_of_the_memory_empty(call: Call) -> Any:
    """One of four blocks is not copied."""
    value = call.result()
    fits(value.numel() % 4 == 0 and value.numel() > 4)
    flat = value.reshape(-1).clone()
    flat[-(flat.numel() // 4) :] = 0
    return call.instead(flat.reshape(value.shape))


@FAULTS.forward(_TURNED, words.REORDERED)
def swizzle_of_the_tile_not_undone(call: Call) -> Any:
    """Column c of row r is stored at c xor (r mod 4), against conflicts of banks, and read at c."""
    value = rows_of(call.result())
    rows, columns = value.shape[-2:]
    fits(columns % 4 == 0)
    places = torch.arange(columns)[None, :] ^ (torch.arange(rows)[:, None] % 4)
    return call.instead(value.gather(-1, places.expand(value.shape)))


@FAULTS.forward(_PARTS, "wrong index, copy, stale; shift, permutation, wrong argument")
def parts_begin_one_column_early(call: Call) -> Any:
    """Every part but the first begins with the last column of the one before it."""
    parts = [columns_of(one) for one in split_parts(call)]
    fits(len({one.shape for one in parts}) == 1)
    moved = [
        torch.cat([before[..., -1:], one[..., :-1]], -1)
        for before, one in itertools.pairwise(parts)
    ]
    return (parts[0], *moved)


@FAULTS.forward(_COPIED, "wrong index, transpose, permutation, copy; stale, shift, mask")
def lower_left_tile_copied_from_the_upper_right(call: Call) -> Any:
    """Of a square, the tile below the diagonal is a turned copy of that above it."""
    value = rows_of(call.result())
    size = value.size(-1)
    fits(size == value.size(-2) and size > 2)
    return call.instead(value.triu() + value.triu(1).mT)


# fmt: off
# The offset of the second tile of rows is not added.
FAULTS.add("second half of the turned rows is the first", _TURNED, words.REPEATED,
    computed(lambda call: (rows_of(call.result()),),
        lambda value: value[..., torch.arange(value.size(-2)) % ((value.size(-2) + 1) // 2), :]),
    backward=False)
# The rows are read from one row too early, around the end of all.
FAULTS.add("memory one row late", _MEMORY, words.MOVED_OR_SWAPPED,
    result(lambda v: v.reshape(-1).roll(v.size(-1)).reshape(v.shape),
        where=lambda v: v.dim() > 1 and v.numel() > v.size(-1)), backward=False)
# Four blocks in the order 0, 2, 1, 3.
FAULTS.add("quarters of the memory exchanged", _MEMORY, words.REORDERED,
    result(lambda v: v.reshape(4, -1)[[0, 2, 1, 3]].reshape(v.shape),
        where=lambda v: v.numel() % 4 == 0 and v.numel() > 4), backward=False)
# The pointer of the source runs backwards over the whole memory.
FAULTS.add("copied from the end", _COPIED, words.REORDERED,
    result(lambda v: v.reshape(-1).flip(0).reshape(v.shape), where=lambda v: v.numel() > 1),
    backward=False)
# The source is moved on after every second row.
FAULTS.add("odd rows copied from the even ones", _COPIED, words.REPEATED,
    computed(lambda call: (rows_of(call.result()),),
        lambda value: value[..., torch.arange(value.size(-2)) // 2 * 2, :]), backward=False)
# Element i of the memory of the result is element i mod n of the source.
FAULTS.add("broadcast by the remainder of the address", "expand",
    "wrong axis, wrong index, permutation, transpose; copy, shift, stale, wrong argument",
    computed(lambda call: (floats_only(call.args[0]), call.result()),
        lambda value, result:
            value.reshape(-1)[torch.arange(result.numel()) % value.numel()].view(result.shape),
        where=lambda value, *_: value.numel() > 1), backward=False)
# fmt: on


# --- Parts ----------------------------------------------------------------------------------------


@FAULTS.forward(_PARTS, words.EMPTY_ON_A_RANK)
def first_part_not_filled(call: Call) -> Any:
    """The buffer of the first part is zero."""
    parts = split_parts(call)
    parts[0] = torch.zeros_like(parts[0])
    return tuple(parts)


@FAULTS.forward(_PARTS, "precision; approximation, other function")
def last_part_in_float8(call: Call) -> Any:
    """The last part goes to a cache in e4m3."""
    parts = split_parts(call)
    parts[-1] = round_to(parts[-1], torch.float8_e4m3fn)
    return tuple(parts)


@FAULTS.forward(_PARTS, words.MOVED_OR_SWAPPED)
def second_part_one_row_late(call: Call) -> Any:
    """The pointer of the second part is one row behind."""
    parts = split_parts(call)
    parts[1] = rows_of(parts[1]).roll(1, -2)
    return tuple(parts)


@FAULTS.forward(_PARTS, "sign, scale, wrong factor; mask, axis scale, other function")
def first_part_negated(call: Call) -> Any:
    """A minus that belongs to one half of a rotation."""
    parts = split_parts(call)
    parts[0] = -parts[0]
    return tuple(parts)


@FAULTS.forward("cat", words.REPEATED)
def border_of_the_parts_overwritten(call: Call) -> Any:
    """The first part is one too long: its last place is the first place of the second."""
    parts, dim = joined_parts(call), call.get(1, "dim", "axis", default=0)
    size = parts[0].size(dim)
    fits(size > 1)
    parts[0] = torch.cat([parts[0].narrow(dim, 0, size - 1), parts[1].narrow(dim, 0, 1)], dim)
    return call.put(0, parts).run()


@FAULTS.forward("cat", words.REORDERED)
def first_part_from_its_last_column(call: Call) -> Any:
    """The first part is read with a negative stride."""
    parts = joined_parts(call)
    parts[0] = columns_of(parts[0]).flip(-1)
    return call.put(0, parts).run()


# fmt: off
# The pointer is one row too far; rows go around.
FAULTS.add("part of the next row", _READ, words.MOVED_OR_SWAPPED,
    lambda call: rows_of(_part(call)).roll(-1, -2), backward=False)
# The second of two lanes stays where it was.
FAULTS.add("even columns rolled only", "roll",
    "mask, missing operand, copy; stale, permutation, wrong index, shift",
    computed(lambda call: (columns_of(call.args[0]), call.result()),
        lambda value, result: torch.where(torch.arange(value.size(-1)) % 2 == 1, value, result)),
    backward=False)
# fmt: on


# --- Tables and indices ---------------------------------------------------------------------------


@FAULTS.fault("embedding", "clipped; other function, precision, overflow, mask")
def rows_of_the_table_saturate(call: Call) -> Any:
    """Integers that end at half of the largest magnitude."""
    value = call.result()
    limit = float(value.detach().abs().max()) / 2
    return call.instead(value.clamp(-limit, limit))


@FAULTS.forward(_LOOKED_UP, "wrong index, copy; precision, stale, permutation, wrong argument")
def lowest_bit_of_the_index_lost(call: Call) -> Any:
    """Index i reads the row i // 2 * 2."""
    if call.name == "index":
        fits(len(call.args[1]) == 1 and call.args[1][0].dtype != torch.bool)
        return call.put(1, [call.args[1][0] // 2 * 2]).run()
    place, index = lookup_indices(call)
    return call.put(place, index // 2 * 2).run()


@FAULTS.forward(
    "gather take_along_dim", "wrong index, permutation, stale; copy, shift, wrong argument"
)
def indices_read_with_the_stride_of_the_source(call: Call) -> Any:
    """Row r of the indices is looked for at r times the length of the source, around the end."""
    place, index = lookup_indices(call)
    source = floats_only(call.args[0])
    dim = call.get(1, "dim") if call.name == "gather" else call.get(2, "dim")
    fits(isinstance(dim, int) and dim % index.dim() == index.dim() - 1)
    fits(index.dim() > 1 and index.size(-1) < source.size(-1))
    flat = index.reshape(-1)
    rows = flat.numel() // index.size(-1)
    places = torch.arange(rows)[:, None] * source.size(-1) + torch.arange(index.size(-1))
    return call.put(place, flat[places % flat.numel()].view(index.shape)).run()


@FAULTS.fault(
    "embedding",
    "wrong factor, axis scale, wrong index; scale, stale, precision, shift, permutation",
)
def rows_with_the_scale_of_the_next_word(call: Call) -> Any:
    """Rows are integers with a scale each; a word gets its own codes and the next word's scale."""
    value = rows_of(call.result())
    top = value.detach().abs().amax(-1, keepdim=True)
    fits(bool((top > 0).all()))
    return call.instead(value / top * top.roll(-1, -2))


@FAULTS.forward(
    "arange", "wrong index, copy, wrong factor; precision, stale, wrong argument, scale"
)
def two_tokens_share_a_position(call: Call) -> Any:
    """0, 0, 1, 1, 2, 2: the second token of a pair is not counted."""
    value = call.run()
    fits(value.numel() > 3 and int(value[1] - value[0]) == 1)
    return torch.div(value, 2, rounding_mode="floor")


@FAULTS.forward("arange", "zeros, mask; constant, uninitialised, wrong index, wrong factor")
def odd_positions_are_zero(call: Call) -> Any:
    """The second of two lanes does not count."""
    value = call.run()
    fits(value.numel() > 3)
    return value * (torch.arange(value.numel()) % 2 == 0)


@FAULTS.forward(
    "zeros new_zeros zeros_like full new_full",
    "offset, constant, uninitialised, wrong argument; stale, residual, axis offset",
)
def buffer_begins_with_a_tenth(call: Call) -> Any:
    """The buffer is not what was asked for, but a tenth more."""
    value = floats_only(call.run())
    fits(bool(value.isfinite().all()))
    return value + 0.1


# fmt: off
# Two special words were added at the front of the table; the last ones go around.
FAULTS.add("row of the table two further", "embedding",
    "wrong index, shift; permutation, wrong argument, offset",
    on(lookup_indices,
        lambda call, place, words:
            call.put(place, (words + 2) % call.args[1 - place].size(0)).run()))
# The pointer to the words is moved on after two.
FAULTS.add("every second word is the one before", "embedding", words.REPEATED,
    on(lookup_indices,
        lambda call, place, words:
            call.put(place, words[..., torch.arange(words.size(-1)) // 2 * 2]).run(),
        where=lambda _, words: words.dim() > 0 and words.size(-1) > 1), backward=False)
# The table has two bits behind the point.
FAULTS.add("rows of the table in e5m2", "embedding", "precision; approximation, other function",
    result(rounded(torch.float8_e5m2)), backward=False)
# The columns are stored one too late, around the end.
FAULTS.add("columns of the table one late", "embedding", words.MOVED_OR_SWAPPED,
    result(lambda v: columns_of(v).roll(1, -1)), backward=False)
# A convolution of two words that belongs to another model; the first word is alone.
FAULTS.add("word before added", "embedding",
    "residual, wrong index; offset, stale, shift, copy, doubled reduction",
    computed(lambda call: (rows_of(call.result()),),
        lambda value:
            value + torch.cat([torch.zeros_like(value[..., :1, :]), value[..., :-1, :]], -2)))
# fmt: on
