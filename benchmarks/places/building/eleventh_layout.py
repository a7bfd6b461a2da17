"""Faults of the eleventh set: what moves values, tables, indices."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on, operand, result
from benchmarks.places.parts import (
    floats_only,
    joined_parts,
    part_read,
    split_parts,
    words_and_matrix,
)
from torch import Tensor
from torch.nn import functional

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


def _axis(call: Call, place: int = 1) -> int:
    """The axis of a join, from the start."""
    axis = call.get(place, "dim", "axis", default=0)
    return axis % call.result().dim()


# --- Transpositions, views and copies -------------------------------------------------------------


@FAULTS.fault(
    _TURNED,
    "copy, stale, wrong index; permutation, constant, shift, wrong argument, "
    "wrong rank's shard, clipped",
)
def odd_heads_are_those_before_them(call: Call) -> Any:
    """Two heads share one, as in grouped queries."""
    value = floats_only(call.result())
    fits(value.dim() == 4 and value.size(1) > 1)
    return call.instead(value[:, torch.arange(value.size(1)) // 2 * 2])


@FAULTS.fault(
    _MEMORY,
    "copy, stale, wrong index; permutation, constant, shift, wrong argument, "
    "wrong rank's shard, clipped",
)
def last_column_of_the_view_twice(call: Call) -> Any:
    """The first column is the last one: index -1 for 0."""
    value = _columns(call.result())
    return call.instead(torch.cat([value[..., -1:], value[..., 1:]], -1))


@FAULTS.fault(
    _COPIED,
    "copy, stale, wrong index; permutation, constant, shift, wrong argument, "
    "wrong rank's shard, clipped",
)
def copy_of_the_first_example_for_all(call: Call) -> Any:
    """The stride of the batch is zero in the source."""
    value = floats_only(call.result())
    fits(value.dim() > 2 and value.size(0) > 1)
    return call.instead(value[:1].expand_as(value).clone())


@FAULTS.fault("expand expand_as broadcast_to", words.EMPTY_IN_A_RANKS_SUM)
def first_of_the_expanded_copies_empty(call: Call) -> Any:
    """The loop over the new axis begins at one."""
    value = floats_only(call.result())
    source = floats_only(call.args[0])
    lead = value.dim() - source.dim()
    axes = [
        i for i in range(value.dim())
        if value.size(i) > 1 and (i < lead or source.size(i - lead) == 1)
    ]  # fmt: skip
    fits(axes)
    shape = [-1 if i == axes[0] else 1 for i in range(value.dim())]
    keep = torch.arange(value.size(axes[0])) > 0
    return call.instead(value * keep.reshape(shape))


# fmt: off
# Slices 2 i and 2 i + 1 of the second axis of the result are exchanged.
FAULTS.add("heads turned in pairs", _TURNED, words.REORDERED,
    computed(lambda call: (floats_only(call.result()),),
        lambda value: value.unflatten(1, (-1, 2)).flip(2).flatten(1, 2),
        where=lambda value: value.dim() == 4 and value.size(1) % 2 == 0))
# The rows are turned in tiles of four, and what is left at the end is not turned.
FAULTS.add("last tile of the turned rows empty", _TURNED, words.EMPTY_IN_A_RANKS_SUM,
    computed(lambda call: (_rows(call.result(), 5),),
        lambda value:
            value * (torch.arange(value.size(-2)) < (value.size(-2) - 1) // 4 * 4)[:, None]))
# The first two rows are taken for a prefix that is skipped; they come last.
FAULTS.add("turned rows two early", _TURNED, words.MOVED_BY_ONE,
    result(lambda v: _rows(v, 4).roll(-2, -2)))
# The transposition works on fixed-point numbers with six bits behind the point.
FAULTS.add("turned values with steps of a 64th", _TURNED,
    "precision; approximation, other function",
    computed(lambda call: (floats_only(call.result()),),
        lambda value: with_gradient_of(value, (value.detach() * 64).round() / 64)))
# The view is that of an array whose first axis runs fastest.
FAULTS.add("memory read column by column", _MEMORY, words.REORDERED,
    computed(lambda call: (floats_only(call.result()),),
        lambda value: value.permute(*reversed(range(value.dim()))).reshape(value.shape),
        where=lambda value: value.dim() > 1))
# Rows 2 i and 2 i + 1 are exchanged: the bytes of two words are in the other order.
FAULTS.add("rows of the view in pairs", _MEMORY, words.REORDERED,
    computed(lambda call: (_rows(call.result(), 2),),
        lambda value: value.unflatten(-2, (-1, 2)).flip(-2).flatten(-3, -2),
        where=lambda value: value.size(-2) % 2 == 0))
# A keep probability of 7 / 8 is multiplied in evaluation.
FAULTS.add("view seven eighths as large", _MEMORY,
    "scale, wrong factor; other function, wrong argument, axis scale, doubled reduction",
    result(lambda v: 0.875 * floats_only(v)))
# The copy rounds the width down to whole vectors.
FAULTS.add("last two columns not copied", _COPIED, words.EMPTY_IN_A_RANKS_SUM,
    computed(lambda call: (_columns(call.result()),),
        lambda value: value * (torch.arange(value.size(-1)) < value.size(-1) - 2)))
# The buffer is a fixed-point number between -1/2 and 1/2.
FAULTS.add("copied values saturate at one half", _COPIED,
    "clipped; other function, precision, approximation, overflow",
    result(lambda v: floats_only(v).clamp(-0.5, 0.5)))
# The stride of the last axis becomes zero with the new one.
FAULTS.add("first value of each row under the new axis", "unsqueeze squeeze",
    "copy, constant, wrong index, stale; wrong argument, permutation",
    computed(lambda call: (_columns(call.result(), 2),),
        lambda value: value[..., :1].expand_as(value).clone()))
# fmt: on


# --- Parts ----------------------------------------------------------------------------------------


@FAULTS.fault(
    "getitem slice narrow",
    "wrong index, shift, wrong argument; wrong rank's shard, copy, stale, permutation",
)
def middle_of_the_row_for_one_of_its_halves(call: Call) -> Any:
    """The part begins at a quarter of the row: x[..., d / 2 : 3 d / 2] for x[..., :d]."""
    value, source = part_read(call), call.args[0]
    width = value.size(-1)
    fits(source.dim() == value.dim() and source.shape[:-1] == value.shape[:-1])
    fits(source.size(-1) == 2 * width and width % 2 == 0)
    return call.instead(source[..., width // 2 : width // 2 + width])


@FAULTS.fault(_PARTS, "clipped; other function, approximation, overflow, mask")
def last_part_limited_to_two_fifths(call: Call) -> Any:
    """The last part is stored with the scale of the first."""
    *rest, last = split_parts(call)
    return type(call.run())([*rest, last.clamp(-0.4, 0.4)])


@FAULTS.fault(
    _PARTS,
    "copy, stale, wrong index; permutation, constant, shift, wrong argument, "
    "wrong rank's shard, clipped",
)
def last_of_several_parts_is_the_one_before(call: Call) -> Any:
    """The keys are used as values, too."""
    parts = split_parts(call, 3)
    fits(parts[-1].shape == parts[-2].shape)
    return type(call.run())([*parts[:-1], parts[-2].clone()])


@FAULTS.fault(_PARTS, "scale, wrong factor; axis scale, other function")
def second_part_divided_by_the_root_of_its_width(call: Call) -> Any:
    """The scale of the queries is applied to what comes behind them."""
    first, second, *rest = split_parts(call)
    fits(second.dim() > 0 and second.size(-1) > 1)
    return type(call.run())([first, second / math.sqrt(second.size(-1)), *rest])


@FAULTS.fault(_PARTS, words.EMPTY_IN_A_RANKS_SUM)
def second_half_of_the_last_part_empty(call: Call) -> Any:
    """The sizes of the parts are those of another rank, and the buffer is longer than its part."""
    *rest, last = split_parts(call)
    _columns(last)
    keep = torch.arange(last.size(-1)) < last.size(-1) // 2
    return type(call.run())([*rest, last * keep])


@FAULTS.fault(_PARTS, words.MOVED_BY_ONE)
def first_part_two_rows_late(call: Call) -> Any:
    """The first part belongs to the row two before, around the end."""
    first, *rest = split_parts(call)
    _rows(first)
    return type(call.run())([first.roll(2, -2), *rest])


@FAULTS.fault(
    "cat stack",
    "zeros, mask, uninitialised; missing operand, constant, axis scale, wrong factor, wrong index",
)
def first_column_of_the_last_joined_part_empty(call: Call) -> Any:
    """The last part is written from its second column on."""
    *rest, last = joined_parts(call)
    _columns(last, 2)
    return call.put(0, [*rest, last * (torch.arange(last.size(-1)) > 0)], "tensors").run()


@FAULTS.fault("cat stack", "sign, other function, wrong argument; wrong factor, axis scale")
def last_joined_part_without_its_signs(call: Call) -> Any:
    """|y| is joined for y: a magnitude and a phase are taken for two coordinates."""
    *rest, last = joined_parts(call)
    return call.put(0, [*rest, last.abs()], "tensors").run()


@FAULTS.fault("cat", words.MOVED_BY_ONE)
def joined_one_place_too_early(call: Call) -> Any:
    """The parts begin one place too early along the axis of the join, around the end."""
    joined_parts(call)
    value = call.result()
    axis = _axis(call)
    fits(value.size(axis) > 2)
    return call.instead(value.roll(-1, axis))


@FAULTS.fault("cat", words.EMPTY_IN_A_RANKS_SUM)
def last_row_of_what_is_joined_empty(call: Call) -> Any:
    """The grid has one block too few for the joined rows."""
    joined_parts(call)
    value = _rows(call.result(), 2)
    return call.instead(value * (torch.arange(value.size(-2)) < value.size(-2) - 1)[:, None])


@FAULTS.fault(
    "cat stack",
    "scale, wrong factor; other function, wrong argument, axis scale, doubled reduction",
)
def first_joined_part_halved(call: Call) -> Any:
    """The first part is averaged with a buffer that is empty."""
    first, *rest = joined_parts(call)
    return call.put(0, [0.5 * first, *rest], "tensors").run()


@FAULTS.fault("cat stack", "precision; approximation, other function")
def joined_parts_in_steps_of_their_largest(call: Call) -> Any:
    """The parts have 31 levels, with a step of all of them together."""
    joined_parts(call)
    value = call.result()
    step = value.detach().abs().max().clamp(min=1e-12) / 15
    return call.instead(with_gradient_of(value, (value.detach() / step).round() * step))


# fmt: off
# The second half of each row that is read comes first.
FAULTS.add("halves of the part exchanged", _READ, words.REORDERED,
    computed(lambda call: (_columns(part_read(call)),),
        lambda value: value.roll(value.size(-1) // 2, -1),
        where=lambda value: value.size(-1) % 2 == 0))
# The pointer to the part is three elements too early, around its end.
FAULTS.add("part three columns late", _READ, words.MOVED_BY_ONE,
    lambda call: call.instead(_columns(part_read(call)).roll(3, -1)))
# The sum of two ranks, of which one had half of it, is read.
FAULTS.add("part three halves as large", _READ,
    "scale, wrong factor; other function, wrong argument, axis scale, doubled reduction",
    lambda call: call.instead(1.5 * part_read(call)))
# The loop over the rows of the part begins at one.
FAULTS.add("first row of the part empty", _READ, words.EMPTY_IN_A_RANKS_SUM,
    computed(lambda call: (_rows(part_read(call), 2),),
        lambda value: value * (torch.arange(value.size(-2)) > 0)[:, None]))
# fmt: on


# --- Turned, padded and repeated ------------------------------------------------------------------


@FAULTS.fault(
    "roll", "wrong argument, shift, wrong index, permutation; off by one reduction, wrong factor"
)
def rolled_two_further(call: Call) -> Any:
    """Two is added to each shift."""
    shifts = call.get(1, "shifts")
    far = shifts + 2 if isinstance(shifts, int) else tuple(one + 2 for one in shifts)
    return call.put(1, far, "shifts").run()


@FAULTS.fault(
    "pad constant_pad_nd",
    "constant, wrong argument, other function; offset, axis offset, zeros, mask, wrong statistics",
)
def frame_of_the_mean_of_the_image(call: Call) -> Any:
    """The padding is the mean of what is padded: the frame of a detector's input."""
    value, widths = call.tensor(0), list(call.get(1, "pad"))
    fits(call.get(2, "mode", default="constant") in {"constant", 0})
    inside = functional.pad(torch.ones_like(value), widths)
    return call.instead(torch.where(inside > 0, call.result(), value.mean()))


@FAULTS.fault(
    "pad constant_pad_nd",
    "wrong argument, shift, wrong index, swapped operands; permutation, mask, zeros, "
    "transpose, wrong axis",
)
def padding_all_on_one_side(call: Call) -> Any:
    """The sum of both widths is put in front."""
    value, widths = call.tensor(0), list(call.get(1, "pad"))
    fits(call.get(2, "mode", default="constant") in {"constant", 0})
    moved = [sum(widths[i // 2 * 2 : i // 2 * 2 + 2]) * (i % 2 == 0) for i in range(len(widths))]
    return call.instead(functional.pad(value, moved))


@FAULTS.fault(
    "repeat_interleave repeat tile expand", "scale, wrong factor; other function, wrong argument"
)
def repeated_values_times_the_root_of_their_number(call: Call) -> Any:
    """The copies are scaled so that the length of all is kept, in the wrong direction."""
    value = call.result()
    many = value.numel() // call.tensor(0).numel()
    fits(many > 1)
    return call.instead(value * math.sqrt(many))


@FAULTS.fault("arange", "permutation, wrong index, shift, wrong argument; wrapped, transpose")
def places_begin_with_the_last_two(call: Call) -> Any:
    """N - 2, n - 1, 0, 1, ...: a ring buffer is read from its second-last slot on."""
    value = call.run()
    fits(value.numel() > 3)
    return value.roll(2)


# fmt: off
# The memory of the buffer is not cleared: it has a value from before.
FAULTS.add("buffer filled with minus a quarter", "zeros new_zeros zeros_like",
    "constant, uninitialised, offset, other function, wrong argument; stale, zeros, residual",
    result(lambda v: torch.full_like(v, -0.25)))
# The range begins one too early.
FAULTS.add("places counted from minus one", "arange",
    "off by one reduction, offset, wrong argument; shift, wrong index, axis offset",
    lambda call: call.run() - 1)
# fmt: on


# --- Tables and indices ---------------------------------------------------------------------------


@FAULTS.fault(
    "embedding", "wrong index, shift; wrong argument, permutation, stale, copy, wrong axis"
)
def stride_of_the_table_one_too_small(call: Call) -> Any:
    """Word i begins at i (d - 1): the padded column is not counted."""
    _, words, table = words_and_matrix(call)
    width = table.size(1)
    places = words[..., None] * (width - 1) + torch.arange(width, device=words.device)
    return call.instead(table.reshape(-1)[places])


@FAULTS.fault(
    "embedding",
    "wrong index, wrapped, wrong argument; clipped, one rank's part, wrong rank's shard, copy",
)
def words_modulo_seven(call: Call) -> Any:
    """Rows are shared by a hash that is far too small."""
    place, words, table = words_and_matrix(call)
    fits(table.size(0) > 7)
    return call.put(place, words % 7).run()


@FAULTS.fault("embedding", "precision; approximation, other function")
def table_in_six_bits(call: Call) -> Any:
    """The table has 63 levels, with one step for all."""
    place, _, table = words_and_matrix(call)
    step = table.detach().abs().max().clamp(min=1e-12) / 31
    coarse = (table.detach() / step).round() * step
    return call.put(1 - place, with_gradient_of(table, coarse)).run()


@FAULTS.fault(
    "embedding",
    "copy, stale, wrong index; permutation, constant, shift, wrong argument, "
    "wrong rank's shard, clipped",
)
def first_word_is_the_one_behind_it(call: Call) -> Any:
    """The first row is written by the second block as well."""
    value = _rows(call.result(), 2)
    return call.instead(torch.cat([value[..., 1:2, :], value[..., 1:, :]], -2))


@FAULTS.fault(
    "gather take_along_dim index_select take",
    "wrong index, shift, wrong argument; off by one reduction, permutation, stale, copy",
)
def chosen_places_two_late(call: Call) -> Any:
    """The index is two too large, around the end."""
    value, axis, index = call.tensor(0), call.get(1, "dim"), call.get(2, "index")
    if call.name == "take_along_dim":
        axis, index = call.get(2, "dim"), call.get(1, "indices")
    fits(isinstance(axis, int) and value.size(axis) > 2)
    place = 1 if call.name == "take_along_dim" else 2
    return call.put(place, (index + 2) % value.size(axis), "index").run()


@FAULTS.fault(
    "index getitem",
    "wrong index, permutation, wrong argument; shift, stale, copy, swapped operands",
)
def rows_chosen_in_sorted_order(call: Call) -> Any:
    """The list of rows is sorted for faster reading, and the result is not put back."""
    value, index = call.args[:2]
    fits(isinstance(value, Tensor))
    whole = isinstance(index, Tensor)
    chosen = index if whole else index[0]
    fits(isinstance(chosen, Tensor) and chosen.dtype == torch.int64 and chosen.dim() == 1)
    ordered = chosen.sort().values
    return call.put(1, ordered if whole else type(index)([ordered, *index[1:]])).run()


# fmt: off
# The table was pruned, and the index is limited to what is left.
FAULTS.add("words not beyond three quarters of the table", "embedding",
    "clipped, wrong index, wrong argument; copy, wrapped, constant",
    on(words_and_matrix,
        lambda call, place, words, table:
            call.put(place, words.clamp(max=table.size(0) * 3 // 4 - 1)).run()))
# Words of the first half of the table are zero: the sum over the ranks is missing.
FAULTS.add("first half of the table on another rank", "embedding", words.EMPTY_IN_A_RANKS_SUM,
    on(words_and_matrix,
        lambda call, _, words, table:
            call.instead(call.result() * (words >= table.size(0) // 2)[..., None])))
# Words and positions are weighed as two halves, and the sum is weighed again.
FAULTS.add("vectors times seven tenths", "embedding",
    "scale, wrong factor; other function, wrong argument, axis scale, doubled reduction",
    result(lambda v: 0.7 * v))
# The index is kept in a variable that the last iteration has written.
FAULTS.add("index of the last place for all", "gather index_select",
    "wrong index, copy, stale, wrong argument; constant, permutation, shift",
    on(lambda call: (call.get(2, "index"),),
        lambda call, index: call.put(2, index[-1:].expand_as(index).contiguous(), "index").run()))
# Nothing is filled in the last two columns: the mask is padded with false.
FAULTS.add("mask of the fill ends before the last two columns", "masked_fill",
    "mask, missing operand, wrong argument; wrong index, one rank's part, copy",
    on(lambda call: (call.get(1, "mask"),),
        lambda call, mask:
            call.put(1, mask & (torch.arange(mask.size(-1)) < mask.size(-1) - 2), "mask").run(),
        where=lambda mask: mask.dim() and mask.size(-1) > 3))
# What is not masked is added to itself by the blend x + (1 - m) x.
FAULTS.add("values beside the mask doubled", "masked_fill",
    "scale, wrong factor; missing operand, residual, axis scale, mask, wrong argument",
    operand(0, lambda v: 2 * v))
# The channels of the result are counted from the end.
FAULTS.add("shuffled channels from the last",
    "pixel_shuffle pixel_unshuffle channel_shuffle unfold",
    "permutation, wrong index; shift, transpose, wrong argument",
    computed(lambda call: (floats_only(call.result()),), lambda value: value.flip(1),
        where=lambda value: value.dim() > 2 and value.size(1) > 1))
# fmt: on
