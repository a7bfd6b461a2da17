"""Faults of the eleventh set: what moves values, tables, indices."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_TURNED = "transpose permute movedim swapaxes t mT"
_MEMORY = "view reshape flatten unflatten _unsafe_view"
_COPIED = "clone contiguous"
_PARTS = "chunk split unbind split_with_sizes"
_READ = "getitem slice select narrow"
_EMPTY: dict[str, Any] = {
    "kinds": ["zeros", "mask", "uninitialised"],
    "loose": [
        "missing operand",
        "constant",
        "axis scale",
        "wrong factor",
        "one rank's part",
        "partial sum",
    ],
    "backward": False,
}
_SHIFTED: dict[str, Any] = {
    "kinds": ["shift", "wrong index", "permutation"],
    "loose": ["copy", "stale", "wrong argument", "wrong rank's shard", "off by one reduction"],
    "backward": False,
}
_ORDER: dict[str, Any] = {
    "kinds": ["permutation", "wrong index"],
    "loose": ["shift", "swapped operands", "transpose", "wrong rank's shard", "wrong argument"],
    "backward": False,
}
_AGAIN: dict[str, Any] = {
    "kinds": ["copy", "stale", "wrong index"],
    "loose": [
        "permutation",
        "constant",
        "shift",
        "wrong argument",
        "wrong rank's shard",
        "clipped",
    ],
    "backward": False,
}
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function"],
    "backward": False,
}
_SCALED: dict[str, Any] = {
    "kinds": ["scale", "wrong factor"],
    "loose": ["other function", "wrong argument", "axis scale", "doubled reduction"],
    "backward": False,
}


def _floats(value: Any) -> Tensor:
    fits(isinstance(value, Tensor) and value.is_floating_point())
    return value


def _rows(value: Any, least: int = 3) -> Tensor:
    value = _floats(value)
    fits(value.dim() > 1 and value.size(-2) >= least)
    return value


def _columns(value: Any, least: int = 4) -> Tensor:
    value = _floats(value)
    fits(value.dim() > 0 and value.size(-1) >= least)
    return value


def _part(call: Call) -> Tensor:
    """A part that is read of a larger tensor, and not one of several results."""
    fits(isinstance(call.args[0], Tensor))
    return _floats(call.result())


def _split(call: Call, least: int = 2) -> list[Tensor]:
    parts = list(call.run())
    fits(len(parts) >= least)
    return [_floats(one) for one in parts]


def _given(call: Call, least: int = 2) -> list[Tensor]:
    """The parts that are joined."""
    parts = list(call.args[0])
    fits(len(parts) >= least)
    return [_floats(one) for one in parts]


def _axis(call: Call, place: int = 1) -> int:
    """The axis of a join, from the start."""
    axis = call.get(place, "dim", "axis", default=0)
    return axis % call.result().dim()


def _words(call: Call) -> tuple[int, Tensor, Tensor]:
    """Where the indices of a table are, and indices and table."""
    place = next(i for i in (0, 1) if not call.args[i].is_floating_point())
    fits(call.args[1 - place].dim() == 2)
    return place, call.args[place], call.args[1 - place]


# --- Transpositions, views and copies -------------------------------------------------------------


@FAULTS.fault(_TURNED, **_ORDER)
def heads_turned_in_pairs(call: Call) -> Any:
    """Slices 2 i and 2 i + 1 of the second axis of the result are exchanged."""
    value = _floats(call.result())
    fits(value.dim() == 4 and value.size(1) % 2 == 0)
    return call.instead(value.unflatten(1, (-1, 2)).flip(2).flatten(1, 2))


@FAULTS.fault(_TURNED, **_EMPTY)
def last_tile_of_the_turned_rows_empty(call: Call) -> Any:
    """The rows are turned in tiles of four, and what is left at the end is not turned."""
    value = _rows(call.result(), 5)
    kept = (value.size(-2) - 1) // 4 * 4
    rows = torch.arange(value.size(-2)) < kept
    return call.instead(value * rows[:, None])


@FAULTS.fault(_TURNED, **_AGAIN)
def odd_heads_are_those_before_them(call: Call) -> Any:
    """Two heads share one, as in grouped queries."""
    value = _floats(call.result())
    fits(value.dim() == 4 and value.size(1) > 1)
    return call.instead(value[:, torch.arange(value.size(1)) // 2 * 2])


@FAULTS.fault(_TURNED, **_SHIFTED)
def turned_rows_two_early(call: Call) -> Any:
    """The first two rows are taken for a prefix that is skipped; they come last."""
    return call.instead(_rows(call.result(), 4).roll(-2, -2))


@FAULTS.fault(
    _TURNED,
    kinds=["precision"],
    loose=["approximation", "other function"],
    backward=False,
)
def turned_values_with_steps_of_a_64th(call: Call) -> Any:
    """The transposition works on fixed-point numbers with six bits behind the point."""
    value = _floats(call.result())
    return call.instead(with_gradient_of(value, (value.detach() * 64).round() / 64))


@FAULTS.fault(_MEMORY, **_ORDER)
def memory_read_column_by_column(call: Call) -> Any:
    """The view is that of an array whose first axis runs fastest."""
    value = _floats(call.result())
    fits(value.dim() > 1)
    turned = value.permute(*reversed(range(value.dim())))
    return call.instead(turned.reshape(value.shape))


@FAULTS.fault(_MEMORY, **_ORDER)
def rows_of_the_view_in_pairs(call: Call) -> Any:
    """Rows 2 i and 2 i + 1 are exchanged: the bytes of two words are in the other order."""
    value = _rows(call.result(), 2)
    fits(value.size(-2) % 2 == 0)
    return call.instead(value.unflatten(-2, (-1, 2)).flip(-2).flatten(-3, -2))


@FAULTS.fault(_MEMORY, **_AGAIN)
def last_column_of_the_view_twice(call: Call) -> Any:
    """The first column is the last one: index -1 for 0."""
    value = _columns(call.result())
    return call.instead(torch.cat([value[..., -1:], value[..., 1:]], -1))


@FAULTS.fault(_MEMORY, **_SCALED)
def view_seven_eighths_as_large(call: Call) -> Any:
    """A keep probability of 7 / 8 is multiplied in evaluation."""
    return call.instead(0.875 * _floats(call.result()))


@FAULTS.fault(_COPIED, **_EMPTY)
def last_two_columns_not_copied(call: Call) -> Any:
    """The copy rounds the width down to whole vectors."""
    value = _columns(call.result())
    return call.instead(value * (torch.arange(value.size(-1)) < value.size(-1) - 2))


@FAULTS.fault(_COPIED, **_AGAIN)
def copy_of_the_first_example_for_all(call: Call) -> Any:
    """The stride of the batch is zero in the source."""
    value = _floats(call.result())
    fits(value.dim() > 2 and value.size(0) > 1)
    return call.instead(value[:1].expand_as(value).clone())


@FAULTS.fault(
    _COPIED,
    kinds=["clipped"],
    loose=["other function", "precision", "approximation", "overflow"],
    backward=False,
)
def copied_values_saturate_at_one_half(call: Call) -> Any:
    """The buffer is a fixed-point number between -1/2 and 1/2."""
    return call.instead(_floats(call.result()).clamp(-0.5, 0.5))


@FAULTS.fault("expand expand_as broadcast_to", **_EMPTY)
def first_of_the_expanded_copies_empty(call: Call) -> Any:
    """The loop over the new axis begins at one."""
    value = _floats(call.result())
    source = _floats(call.args[0])
    lead = value.dim() - source.dim()
    axes = [
        i for i in range(value.dim())
        if value.size(i) > 1 and (i < lead or source.size(i - lead) == 1)
    ]  # fmt: skip
    fits(axes)
    shape = [-1 if i == axes[0] else 1 for i in range(value.dim())]
    keep = torch.arange(value.size(axes[0])) > 0
    return call.instead(value * keep.reshape(shape))


@FAULTS.fault(
    "unsqueeze squeeze",
    kinds=["copy", "constant", "wrong index", "stale"],
    loose=["wrong argument", "permutation"],
    backward=False,
)
def first_value_of_each_row_under_the_new_axis(call: Call) -> Any:
    """The stride of the last axis becomes zero with the new one."""
    value = _columns(call.result(), 2)
    return call.instead(value[..., :1].expand_as(value).clone())


# --- Parts ----------------------------------------------------------------------------------------


@FAULTS.fault(_READ, **_ORDER)
def halves_of_the_part_exchanged(call: Call) -> Any:
    """The second half of each row that is read comes first."""
    value = _columns(_part(call))
    fits(value.size(-1) % 2 == 0)
    return call.instead(value.roll(value.size(-1) // 2, -1))


@FAULTS.fault(_READ, **_SHIFTED)
def part_three_columns_late(call: Call) -> Any:
    """The pointer to the part is three elements too early, around its end."""
    return call.instead(_columns(_part(call)).roll(3, -1))


@FAULTS.fault(_READ, **_SCALED)
def part_three_halves_as_large(call: Call) -> Any:
    """The sum of two ranks, of which one had half of it, is read."""
    return call.instead(1.5 * _part(call))


@FAULTS.fault(_READ, **_EMPTY)
def first_row_of_the_part_empty(call: Call) -> Any:
    """The loop over the rows of the part begins at one."""
    value = _rows(_part(call), 2)
    keep = (torch.arange(value.size(-2)) > 0)[:, None]
    return call.instead(value * keep)


@FAULTS.fault(
    "getitem slice narrow",
    kinds=["wrong index", "shift", "wrong argument"],
    loose=["wrong rank's shard", "copy", "stale", "permutation"],
    backward=False,
)
def middle_of_the_row_for_one_of_its_halves(call: Call) -> Any:
    """The part begins at a quarter of the row: x[..., d / 2 : 3 d / 2] for x[..., :d]."""
    value, source = _part(call), call.args[0]
    width = value.size(-1)
    fits(source.dim() == value.dim() and source.shape[:-1] == value.shape[:-1])
    fits(source.size(-1) == 2 * width and width % 2 == 0)
    return call.instead(source[..., width // 2 : width // 2 + width])


@FAULTS.fault(
    _PARTS,
    kinds=["clipped"],
    loose=["other function", "approximation", "overflow", "mask"],
    backward=False,
)
def last_part_limited_to_two_fifths(call: Call) -> Any:
    """The last part is stored with the scale of the first."""
    *rest, last = _split(call)
    return type(call.run())([*rest, last.clamp(-0.4, 0.4)])


@FAULTS.fault(_PARTS, **_AGAIN)
def last_of_several_parts_is_the_one_before(call: Call) -> Any:
    """The keys are used as values, too."""
    parts = _split(call, 3)
    fits(parts[-1].shape == parts[-2].shape)
    return type(call.run())([*parts[:-1], parts[-2].clone()])


@FAULTS.fault(
    _PARTS,
    kinds=["scale", "wrong factor"],
    loose=["axis scale", "other function"],
    backward=False,
)
def second_part_divided_by_the_root_of_its_width(call: Call) -> Any:
    """The scale of the queries is applied to what comes behind them."""
    first, second, *rest = _split(call)
    fits(second.dim() > 0 and second.size(-1) > 1)
    return type(call.run())([first, second / math.sqrt(second.size(-1)), *rest])


@FAULTS.fault(_PARTS, **_EMPTY)
def second_half_of_the_last_part_empty(call: Call) -> Any:
    """The sizes of the parts are those of another rank, and the buffer is longer than its part."""
    *rest, last = _split(call)
    _columns(last)
    keep = torch.arange(last.size(-1)) < last.size(-1) // 2
    return type(call.run())([*rest, last * keep])


@FAULTS.fault(_PARTS, **_SHIFTED)
def first_part_two_rows_late(call: Call) -> Any:
    """The first part belongs to the row two before, around the end."""
    first, *rest = _split(call)
    _rows(first)
    return type(call.run())([first.roll(2, -2), *rest])


@FAULTS.fault(
    "cat stack",
    kinds=["zeros", "mask", "uninitialised"],
    loose=["missing operand", "constant", "axis scale", "wrong factor", "wrong index"],
    backward=False,
)
def first_column_of_the_last_joined_part_empty(call: Call) -> Any:
    """The last part is written from its second column on."""
    *rest, last = _given(call)
    _columns(last, 2)
    return call.put(0, [*rest, last * (torch.arange(last.size(-1)) > 0)], "tensors").run()


@FAULTS.fault(
    "cat stack",
    kinds=["sign", "other function", "wrong argument"],
    loose=["wrong factor", "axis scale"],
    backward=False,
)
def last_joined_part_without_its_signs(call: Call) -> Any:
    """|y| is joined for y: a magnitude and a phase are taken for two coordinates."""
    *rest, last = _given(call)
    return call.put(0, [*rest, last.abs()], "tensors").run()


@FAULTS.fault("cat", **_SHIFTED)
def joined_one_place_too_early(call: Call) -> Any:
    """The parts begin one place too early along the axis of the join, around the end."""
    _given(call)
    value = call.result()
    axis = _axis(call)
    fits(value.size(axis) > 2)
    return call.instead(value.roll(-1, axis))


@FAULTS.fault("cat", **_EMPTY)
def last_row_of_what_is_joined_empty(call: Call) -> Any:
    """The grid has one block too few for the joined rows."""
    _given(call)
    value = _rows(call.result(), 2)
    return call.instead(value * (torch.arange(value.size(-2)) < value.size(-2) - 1)[:, None])


@FAULTS.fault("cat stack", **_SCALED)
def first_joined_part_halved(call: Call) -> Any:
    """The first part is averaged with a buffer that is empty."""
    first, *rest = _given(call)
    return call.put(0, [0.5 * first, *rest], "tensors").run()


@FAULTS.fault("cat stack", **_ROUNDED)
def joined_parts_in_steps_of_their_largest(call: Call) -> Any:
    """The parts have 31 levels, with a step of all of them together."""
    _given(call)
    value = call.result()
    step = value.detach().abs().max().clamp(min=1e-12) / 15
    return call.instead(with_gradient_of(value, (value.detach() / step).round() * step))


# --- Turned, padded and repeated ------------------------------------------------------------------


@FAULTS.fault(
    "roll",
    kinds=["wrong argument", "shift", "wrong index", "permutation"],
    loose=["off by one reduction", "wrong factor"],
    backward=False,
)
def rolled_two_further(call: Call) -> Any:
    """Two is added to each shift."""
    shifts = call.get(1, "shifts")
    far = shifts + 2 if isinstance(shifts, int) else tuple(one + 2 for one in shifts)
    return call.put(1, far, "shifts").run()


@FAULTS.fault(
    "pad constant_pad_nd",
    kinds=["constant", "wrong argument", "other function"],
    loose=["offset", "axis offset", "zeros", "mask", "wrong statistics"],
    backward=False,
)
def frame_of_the_mean_of_the_image(call: Call) -> Any:
    """The padding is the mean of what is padded: the frame of a detector's input."""
    value, widths = call.tensor(0), list(call.get(1, "pad"))
    fits(call.get(2, "mode", default="constant") in {"constant", 0})
    inside = functional.pad(torch.ones_like(value), widths)
    return call.instead(torch.where(inside > 0, call.result(), value.mean()))


@FAULTS.fault(
    "pad constant_pad_nd",
    kinds=["wrong argument", "shift", "wrong index", "swapped operands"],
    loose=["permutation", "mask", "zeros", "transpose", "wrong axis"],
    backward=False,
)
def padding_all_on_one_side(call: Call) -> Any:
    """The sum of both widths is put in front."""
    value, widths = call.tensor(0), list(call.get(1, "pad"))
    fits(call.get(2, "mode", default="constant") in {"constant", 0})
    moved = [sum(widths[i // 2 * 2 : i // 2 * 2 + 2]) * (i % 2 == 0) for i in range(len(widths))]
    return call.instead(functional.pad(value, moved))


@FAULTS.fault(
    "repeat_interleave repeat tile expand",
    kinds=["scale", "wrong factor"],
    loose=["other function", "wrong argument"],
    backward=False,
)
def repeated_values_times_the_root_of_their_number(call: Call) -> Any:
    """The copies are scaled so that the length of all is kept, in the wrong direction."""
    value = call.result()
    many = value.numel() // call.tensor(0).numel()
    fits(many > 1)
    return call.instead(value * math.sqrt(many))


@FAULTS.fault(
    "zeros new_zeros zeros_like",
    kinds=["constant", "uninitialised", "offset", "other function", "wrong argument"],
    loose=["stale", "zeros", "residual"],
    backward=False,
)
def buffer_filled_with_minus_a_quarter(call: Call) -> Any:
    """The memory of the buffer is not cleared: it has a value from before."""
    return call.instead(torch.full_like(call.result(), -0.25))


@FAULTS.fault(
    "arange",
    kinds=["off by one reduction", "offset", "wrong argument"],
    loose=["shift", "wrong index", "axis offset"],
    backward=False,
)
def places_counted_from_minus_one(call: Call) -> Any:
    """The range begins one too early."""
    return call.run() - 1


@FAULTS.fault(
    "arange",
    kinds=["permutation", "wrong index", "shift", "wrong argument"],
    loose=["wrapped", "transpose"],
    backward=False,
)
def places_begin_with_the_last_two(call: Call) -> Any:
    """N - 2, n - 1, 0, 1, ...: a ring buffer is read from its second-last slot on."""
    value = call.run()
    fits(value.numel() > 3)
    return value.roll(2)


# --- Tables and indices ---------------------------------------------------------------------------


@FAULTS.fault(
    "embedding",
    kinds=["wrong index", "shift"],
    loose=["wrong argument", "permutation", "stale", "copy", "wrong axis"],
    backward=False,
)
def stride_of_the_table_one_too_small(call: Call) -> Any:
    """Word i begins at i (d - 1): the padded column is not counted."""
    _, words, table = _words(call)
    width = table.size(1)
    places = words[..., None] * (width - 1) + torch.arange(width, device=words.device)
    return call.instead(table.reshape(-1)[places])


@FAULTS.fault(
    "embedding",
    kinds=["wrong index", "wrapped", "wrong argument"],
    loose=["clipped", "one rank's part", "wrong rank's shard", "copy"],
    backward=False,
)
def words_modulo_seven(call: Call) -> Any:
    """Rows are shared by a hash that is far too small."""
    place, words, table = _words(call)
    fits(table.size(0) > 7)
    return call.put(place, words % 7).run()


@FAULTS.fault(
    "embedding",
    kinds=["clipped", "wrong index", "wrong argument"],
    loose=["copy", "wrapped", "constant"],
    backward=False,
)
def words_not_beyond_three_quarters_of_the_table(call: Call) -> Any:
    """The table was pruned, and the index is limited to what is left."""
    place, words, table = _words(call)
    return call.put(place, words.clamp(max=table.size(0) * 3 // 4 - 1)).run()


@FAULTS.fault("embedding", **_ROUNDED)
def table_in_six_bits(call: Call) -> Any:
    """The table has 63 levels, with one step for all."""
    place, _, table = _words(call)
    step = table.detach().abs().max().clamp(min=1e-12) / 31
    coarse = (table.detach() / step).round() * step
    return call.put(1 - place, with_gradient_of(table, coarse)).run()


@FAULTS.fault("embedding", **_EMPTY)
def first_half_of_the_table_on_another_rank(call: Call) -> Any:
    """Words of the first half of the table are zero: the sum over the ranks is missing."""
    _, words, table = _words(call)
    return call.instead(call.result() * (words >= table.size(0) // 2)[..., None])


@FAULTS.fault("embedding", **_AGAIN)
def first_word_is_the_one_behind_it(call: Call) -> Any:
    """The first row is written by the second block as well."""
    value = _rows(call.result(), 2)
    return call.instead(torch.cat([value[..., 1:2, :], value[..., 1:, :]], -2))


@FAULTS.fault("embedding", **_SCALED)
def vectors_times_seven_tenths(call: Call) -> Any:
    """Words and positions are weighed as two halves, and the sum is weighed again."""
    return call.instead(0.7 * call.result())


@FAULTS.fault(
    "gather take_along_dim index_select take",
    kinds=["wrong index", "shift", "wrong argument"],
    loose=["off by one reduction", "permutation", "stale", "copy"],
    backward=False,
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
    "gather index_select",
    kinds=["wrong index", "copy", "stale", "wrong argument"],
    loose=["constant", "permutation", "shift"],
    backward=False,
)
def index_of_the_last_place_for_all(call: Call) -> Any:
    """The index is kept in a variable that the last iteration has written."""
    index = call.get(2, "index")
    return call.put(2, index[-1:].expand_as(index).contiguous(), "index").run()


@FAULTS.fault(
    "index getitem",
    kinds=["wrong index", "permutation", "wrong argument"],
    loose=["shift", "stale", "copy", "swapped operands"],
    backward=False,
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


@FAULTS.fault(
    "masked_fill",
    kinds=["mask", "missing operand", "wrong argument"],
    loose=["wrong index", "one rank's part", "copy"],
    backward=False,
)
def mask_of_the_fill_ends_before_the_last_two_columns(call: Call) -> Any:
    """Nothing is filled in the last two columns: the mask is padded with false."""
    mask = call.get(1, "mask")
    fits(mask.dim() and mask.size(-1) > 3)
    seen = torch.arange(mask.size(-1)) < mask.size(-1) - 2
    return call.put(1, mask & seen, "mask").run()


@FAULTS.fault(
    "masked_fill",
    kinds=["scale", "wrong factor"],
    loose=["missing operand", "residual", "axis scale", "mask", "wrong argument"],
    backward=False,
)
def values_beside_the_mask_doubled(call: Call) -> Any:
    """What is not masked is added to itself by the blend x + (1 - m) x."""
    value = call.tensor(0)
    return call.put(0, 2 * value).run()


@FAULTS.fault(
    "pixel_shuffle pixel_unshuffle channel_shuffle unfold",
    kinds=["permutation", "wrong index"],
    loose=["shift", "transpose", "wrong argument"],
    backward=False,
)
def shuffled_channels_from_the_last(call: Call) -> Any:
    """The channels of the result are counted from the end."""
    value = _floats(call.result())
    fits(value.dim() > 2 and value.size(1) > 1)
    return call.instead(value.flip(1))
