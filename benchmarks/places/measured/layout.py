"""Faults for measuring: what moves values, tables, indices."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, result, rounded
from benchmarks.places.parts import (
    floats_only,
    joined_parts,
    part_read,
    round_to,
    split_parts,
    words_and_matrix,
)
from torch import Tensor

FAULTS = Catalogue(backward=False)
_TURNED = "transpose permute movedim swapaxes t mT"
_MEMORY = "view reshape flatten unflatten _unsafe_view"
_COPIED = "clone contiguous"
_PARTS = "chunk split unbind split_with_sizes"
_READ = "getitem slice select narrow"


def _rows(value: Any, least: int = 3) -> Tensor:
    value = floats_only(value)
    fits(value.dim() > 1 and value.size(-2) >= least)
    return value


def _columns(value: Any, least: int = 4) -> Tensor:
    value = floats_only(value)
    fits(value.dim() > 0 and value.size(-1) >= least)
    return value


def _places(value: Tensor, axis: int = -1) -> Tensor:
    return torch.arange(value.size(axis), device=value.device)


# --- Transpositions, views and copies -------------------------------------------------------------


# fmt: off
# The result is stored with a negative stride of its last axis.
FAULTS.add("columns of the turned values from the last", _TURNED, words.REORDERED,
    result(lambda v: _columns(v).flip(-1)))
# Of two values that are loaded at once, the second is not stored.
FAULTS.add("odd columns of the turned values empty", _TURNED, words.EMPTY_ON_A_RANK,
    computed(lambda call: (_columns(call.result()),),
        lambda value: value * (_places(value) % 2 == 0)))
# The buffer of the transposition is a fixed-point number between -0.6 and 0.6.
FAULTS.add("turned values saturate at three fifths", _TURNED,
    "clipped; other function, approximation, overflow, wrong argument",
    result(lambda v: floats_only(v).clamp(-0.6, 0.6)))
# The loop over the columns begins at two.
FAULTS.add("first two columns of the view empty", _MEMORY, words.EMPTY_ON_A_RANK,
    computed(lambda call: (_columns(call.result()),),
        lambda value: value * (_places(value) > 1)))
# The view begins three elements too far in the memory, around its end.
FAULTS.add("memory three elements early", _MEMORY, words.MOVED_BY_ONE,
    computed(lambda call: (floats_only(call.result()),),
        lambda value: value.flatten().roll(-3).reshape(value.shape),
        where=lambda value: value.numel() > 6))
# The change of shape became a copy into a buffer with three bits behind the point.
FAULTS.add("changed shape by way of e4m3", _MEMORY, "precision; approximation, other function",
    result(lambda v: round_to(floats_only(v), torch.float8_e4m3fn)))
# Rows 0, 2, 4, ... and then 1, 3, ...: two streams are stored one after the other.
FAULTS.add("even rows of the view first", _MEMORY, words.REORDERED,
    computed(lambda call: (_rows(call.result()),),
        lambda value: torch.cat([value[..., ::2, :], value[..., 1::2, :]], -2)))
# Each vector of four columns is stored from its last to its first, as bytes of a word.
FAULTS.add("columns copied backwards in fours", _COPIED, words.REORDERED,
    computed(lambda call: (_columns(call.result()),),
        lambda value: value.unflatten(-1, (-1, 4)).flip(-1).flatten(-2),
        where=lambda value: value.size(-1) % 4 == 0))
# The row is limited to the number of rows less three.
FAULTS.add("last two rows are copies of the one before", _COPIED,
    "copy, stale, wrong index; permutation, constant, shift, wrong argument, clipped",
    computed(lambda call: (_rows(call.result(), 4),),
        lambda value: value[..., _places(value, -2).clamp(max=value.size(-2) - 3), :]))
# The mean of a new pair is taken, of which one is empty.
FAULTS.add("values halved with the new axis", "unsqueeze squeeze",
    "scale, wrong factor; other function, wrong argument, axis scale, doubled reduction",
    result(lambda v: floats_only(v) / 2))
# fmt: on


# --- Parts ----------------------------------------------------------------------------------------


@FAULTS.fault(_PARTS, "sign, wrong factor; scale, axis scale, other function")
def second_of_several_parts_negated(call: Call) -> Any:
    """The minus of a rotation is given to the keys."""
    first, second, *rest = split_parts(call, 3)
    return type(call.run())([first, -second, *rest])


@FAULTS.fault(_PARTS, words.MOVED_BY_ONE)
def second_part_two_columns_late(call: Call) -> Any:
    """The pointer to the second part is two columns behind, around its end."""
    first, second, *rest = split_parts(call)
    return type(call.run())([first, _columns(second).roll(2, -1), *rest])


@FAULTS.fault("cat stack", words.MOVED_OPERAND)
def last_joined_part_one_row_early(call: Call) -> Any:
    """The pointer to the last part is one row too far, around its end."""
    *rest, last = joined_parts(call)
    return call.put(0, [*rest, _rows(last).roll(-1, -2)], "tensors").run()


@FAULTS.fault("cat stack", "clipped; other function, approximation, overflow, wrong argument")
def first_joined_part_saturates_at_three_tenths(call: Call) -> Any:
    """The first part is stored between -0.3 and 0.3."""
    first, *rest = joined_parts(call)
    return call.put(0, [first.clamp(-0.3, 0.3), *rest], "tensors").run()


@FAULTS.fault("cat", words.REORDERED)
def joined_columns_in_pairs(call: Call) -> Any:
    """Columns 2 i and 2 i + 1 of the result are exchanged: words of two in the other order."""
    joined_parts(call)
    value = _columns(call.result())
    fits(value.size(-1) % 2 == 0)
    return call.instead(value.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


# fmt: off
# The pointer to the part is two rows too far, around its end.
FAULTS.add("part two rows early", _READ, words.MOVED_BY_ONE,
    lambda call: call.instead(_rows(part_read(call), 4).roll(-2, -2)))
# The part is one column too short, and its buffer as long as before.
FAULTS.add("last column of the part empty", _READ, words.EMPTY_ON_A_RANK,
    computed(lambda call: (_columns(part_read(call), 3),),
        lambda value: value * (_places(value) < value.size(-1) - 1)))
# What is read is kept between -0.4 and 0.4.
FAULTS.add("part saturates at two fifths", _READ,
    "clipped; other function, approximation, overflow, wrong argument",
    lambda call: call.instead(part_read(call).clamp(-0.4, 0.4)))
# fmt: on


# --- Padded, and places ---------------------------------------------------------------------------


@FAULTS.fault(
    "arange", "permutation, wrong index, transpose; shift, wrong argument, swapped operands"
)
def even_places_before_odd_ones(call: Call) -> Any:
    """0, 2, 4, ... and then 1, 3, ...: a sequence that two ranks share in stripes."""
    value = call.run()
    fits(value.numel() > 3)
    return torch.cat([value[::2], value[1::2]])


# fmt: off
# The whole frame is stored one column before its place, around the start of each line.
FAULTS.add("padded values one column early", "pad constant_pad_nd", words.MOVED,
    result(lambda v: _columns(v).roll(-1, -1)))
# The length of a prefix that is not there is added.
FAULTS.add("places five too large", "arange",
    "offset, wrong argument; shift, wrong index, axis offset", lambda call: call.run() + 5)
# fmt: on


# --- Tables and indices ---------------------------------------------------------------------------


@FAULTS.fault("embedding", "wrong index, shift, wrong argument; offset, permutation, stale, copy")
def row_of_the_table_three_further(call: Call) -> Any:
    """Three special words were added in front; the last rows go around."""
    place, words, table = words_and_matrix(call)
    fits(table.size(0) > 6)
    return call.put(place, (words + 3) % table.size(0)).run()


@FAULTS.fault("embedding", "precision; approximation, other function")
def rows_of_the_table_in_five_bits_each(call: Call) -> Any:
    """Each row has 31 levels, with a step of its own."""
    value = call.result()
    step = value.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 15
    return call.instead(with_gradient_of(value, (value.detach() / step).round() * step))


# fmt: off
# Both halves of a row are taken in turn: sines and cosines in the layout of another port.
FAULTS.add("columns of the table interleaved", "embedding", words.REORDERED,
    computed(lambda call: (_columns(call.result()),),
        lambda value: value.unflatten(-1, (2, -1)).mT.flatten(-2),
        where=lambda value: value.size(-1) % 2 == 0))
# What is gathered is stored with three bits behind the point.
FAULTS.add("chosen values in e4m3", "gather index_select index take_along_dim",
    "precision; approximation, other function", result(rounded(torch.float8_e4m3fn)))
# fmt: on
