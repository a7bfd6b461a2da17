"""Faults of the tenth set: what moves values, tables, indices."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor

FAULTS = Catalogue()
_TURNED = "transpose permute movedim"
_MEMORY = "view reshape flatten unflatten _unsafe_view"
_COPIED = "clone contiguous"
_PARTS = "chunk split unbind split_with_sizes"
_READ = "getitem slice narrow"
_EMPTY: dict[str, Any] = {
    "kinds": ["zeros", "mask", "uninitialised"],
    "loose": ["constant", "missing operand", "axis scale", "wrong factor", "one rank's part"],
    "backward": False,
}
_SHIFTED: dict[str, Any] = {
    "kinds": ["shift", "wrong index", "permutation"],
    "loose": ["copy", "stale", "wrong argument", "wrong rank's shard"],
    "backward": False,
}
_ORDER: dict[str, Any] = {
    "kinds": ["permutation", "wrong index"],
    "loose": ["shift", "swapped operands", "transpose", "wrong rank's shard", "wrong argument"],
    "backward": False,
}
_AGAIN: dict[str, Any] = {
    "kinds": ["copy", "stale", "wrong index"],
    "loose": ["permutation", "constant", "shift", "wrong argument", "wrong rank's shard"],
    "backward": False,
}
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function"],
    "backward": False,
}
_SCALED: dict[str, Any] = {
    "kinds": ["scale", "wrong factor"],
    "loose": ["other function", "wrong argument", "axis scale"],
    "backward": False,
}


def _floats(value: Any) -> Tensor:
    fits(isinstance(value, Tensor) and value.is_floating_point())
    return value


def _rows(value: Any, least: int = 2) -> Tensor:
    value = _floats(value)
    fits(value.dim() > 1 and value.size(-2) >= least)
    return value


def _columns(value: Any, least: int = 2) -> Tensor:
    value = _floats(value)
    fits(value.dim() > 0 and value.size(-1) >= least)
    return value


def _split(call: Call, least: int = 2) -> list[Tensor]:
    parts = list(call.run())
    fits(len(parts) >= least)
    return [_floats(one) for one in parts]


def _given(call: Call) -> list[Tensor]:
    """The parts that are joined."""
    parts = list(call.args[0])
    fits(len(parts) > 1)
    return [_floats(one) for one in parts]


def _words(call: Call) -> tuple[int, Tensor, Tensor]:
    """Where the indices of a table are, and indices and table."""
    place = next(i for i in (0, 1) if not call.args[i].is_floating_point())
    return place, call.args[place], call.args[1 - place]


def _part(call: Call) -> Tensor:
    """A part that is read of a larger tensor, and not one of several results."""
    fits(isinstance(call.args[0], Tensor))
    return _floats(call.result())


# --- Transpositions, views and copies -------------------------------------------------------------


@FAULTS.fault(_TURNED, **_AGAIN)
def last_of_the_turned_rows_is_the_first(call: Call) -> Any:
    """The last row is read at the address that the pointer began with."""
    value = _rows(call.result(), 3)
    return call.instead(torch.cat([value[..., :-1, :], value[..., :1, :]], -2))


@FAULTS.fault(_TURNED, **_AGAIN)
def last_head_of_the_turned_values_for_all(call: Call) -> Any:
    """The index of the second axis is fixed when the loop is unrolled: each is the last."""
    value = _floats(call.result())
    fits(value.dim() == 4 and value.size(1) > 1)
    return call.instead(value[:, -1:].expand_as(value).clone())


@FAULTS.fault(_TURNED, **_SCALED)
def turned_values_halved(call: Call) -> Any:
    """A factor of one half that belongs to the next operator is fused into the copy twice."""
    return call.instead(0.5 * call.result())


@FAULTS.fault(_TURNED, **_SHIFTED)
def turned_values_one_head_early(call: Call) -> Any:
    """The offset of the second axis of the result is one too large, around the end."""
    value = _floats(call.result())
    fits(value.dim() == 4 and value.size(1) > 2)
    return call.instead(value.roll(-1, 1))


@FAULTS.fault(_MEMORY, **_SHIFTED)
def memory_four_elements_late(call: Call) -> Any:
    """The address is aligned to the vector before: everything is read four elements too early."""
    value = call.result()
    fits(value.numel() > 8)
    return call.instead(value.reshape(-1).roll(4).reshape(value.shape))


@FAULTS.fault(_MEMORY, **_AGAIN)
def last_example_of_the_view_for_all(call: Call) -> Any:
    """The number of the example is fixed when the loop is unrolled: each is the last."""
    value = _floats(call.result())
    fits(value.dim() > 2 and value.size(0) > 1)
    return call.instead(value[-1:].expand_as(value).clone())


@FAULTS.fault(
    _MEMORY,
    kinds=["sign", "scale", "wrong factor"],
    loose=["other function"],
    backward=False,
)
def view_with_a_minus(call: Call) -> Any:
    """A lazy negation is set on the view and is not undone."""
    return call.instead(-_floats(call.result()))


@FAULTS.fault(_MEMORY, **_EMPTY)
def last_row_of_the_view_empty(call: Call) -> Any:
    """The number of rows is divided by the block size without rounding up."""
    value = _rows(call.result())
    return call.instead(torch.cat([value[..., :-1, :], torch.zeros_like(value[..., -1:, :])], -2))


@FAULTS.fault(
    _COPIED,
    kinds=["clipped", "other function"],
    loose=["zeros", "sign", "mask"],
    backward=False,
)
def negative_values_not_copied(call: Call) -> Any:
    """A relu was fused into the copy that does not belong there."""
    return call.instead(_floats(call.result()).relu())


@FAULTS.fault(_COPIED, **_SHIFTED)
def copied_one_row_early(call: Call) -> Any:
    """The source pointer is one row too far; the last row is the first one."""
    return call.instead(_rows(call.result(), 3).roll(-1, -2))


@FAULTS.fault(_COPIED, **_ORDER)
def halves_of_the_copied_columns_exchanged(call: Call) -> Any:
    """Two vectors of each row are stored in the other order."""
    value = _columns(call.result(), 4)
    fits(value.size(-1) % 2 == 0)
    return call.instead(value.roll(value.size(-1) // 2, -1))


@FAULTS.fault(_COPIED, **_ROUNDED)
def copy_in_e4m3(call: Call) -> Any:
    """The buffer of the copy is a float8 with three bits behind the point."""
    value = call.result()
    fits(float(value.detach().abs().max()) < 400)
    coarse = value.detach().to(torch.float8_e4m3fn).to(value.dtype)
    return call.instead(with_gradient_of(value, coarse))


@FAULTS.fault(
    "unsqueeze squeeze",
    kinds=["shift", "wrong index", "permutation"],
    loose=["copy", "stale", "axis offset"],
    backward=False,
)
def new_axis_over_values_one_late(call: Call) -> Any:
    """The address below the new axis is one element too early, around the end."""
    value = _floats(call.result())
    fits(value.numel() > 2)
    return call.instead(value.reshape(-1).roll(1).reshape(value.shape))


@FAULTS.fault(
    "expand",
    kinds=["scale", "wrong factor"],
    loose=["residual", "doubled reduction", "other function"],
    backward=False,
)
def expanded_values_doubled(call: Call) -> Any:
    """The copy accumulates onto a buffer that has the value already."""
    return call.instead(2 * _floats(call.result()))


# --- Parts ----------------------------------------------------------------------------------------


@FAULTS.fault(_READ, **_ORDER)
def rows_of_the_part_from_the_last(call: Call) -> Any:
    """The part is read backwards along the axis before the last one."""
    return call.instead(_rows(_part(call), 3).flip(-2))


@FAULTS.fault(_READ, **_SCALED)
def part_scaled_by_the_root_of_its_width(call: Call) -> Any:
    """The part is divided by the root of its width, as queries are, and is none."""
    value = _columns(_part(call))
    return call.instead(value / math.sqrt(value.size(-1)))


@FAULTS.fault(_READ, **_ROUNDED)
def part_in_bfloat16(call: Call) -> Any:
    """The slice goes through a narrow buffer."""
    value = _part(call)
    return call.instead(with_gradient_of(value, value.detach().bfloat16().to(value.dtype)))


@FAULTS.fault(
    "getitem slice select narrow",
    kinds=["zeros", "uninitialised", "missing operand"],
    loose=["constant", "mask", "wrong factor", "scale"],
    backward=False,
)
def part_not_copied(call: Call) -> Any:
    """The slice is a buffer that nothing is written to: it stays zero."""
    return call.instead(torch.zeros_like(_part(call)))


@FAULTS.fault(
    "getitem slice select narrow",
    kinds=["wrong index", "shift", "permutation"],
    loose=["copy", "stale", "wrong rank's shard"],
    backward=False,
)
def part_of_the_next_example(call: Call) -> Any:
    """The offset of the batch is one too large, around the end."""
    value = _part(call)
    fits(value.dim() > 1 and value.size(0) == call.args[0].size(0) > 1)
    return call.instead(value.roll(-1, 0))


@FAULTS.fault(_PARTS, **_EMPTY)
def first_row_of_each_part_empty(call: Call) -> Any:
    """The loop that fills the parts begins at the second row."""
    parts = [_rows(one) for one in _split(call)]
    return tuple(
        torch.cat([torch.zeros_like(one[..., :1, :]), one[..., 1:, :]], -2) for one in parts
    )


@FAULTS.fault(_PARTS, **_AGAIN)
def last_part_is_the_first(call: Call) -> Any:
    """The offset of the last part is not added: it is the first one again."""
    parts = _split(call)
    fits(len(parts) > 2 and parts[0].shape == parts[-1].shape)
    return (*parts[:-1], parts[0])


@FAULTS.fault(_PARTS, **_ORDER)
def columns_of_the_first_part_in_reverse(call: Call) -> Any:
    """The first part is read backwards along its last axis."""
    parts = _split(call)
    parts[0] = _columns(parts[0], 3).flip(-1)
    return tuple(parts)


@FAULTS.fault(_PARTS, **_SCALED)
def last_part_doubled(call: Call) -> Any:
    """The last part is written to the buffer by two blocks that both add."""
    parts = _split(call)
    parts[-1] = 2 * parts[-1]
    return tuple(parts)


@FAULTS.fault("cat", **_ORDER)
def first_part_from_its_last_row(call: Call) -> Any:
    """The first part is joined in the reverse order of its rows."""
    parts = _given(call)
    parts[0] = _rows(parts[0], 3).flip(-2)
    return call.put(0, parts, "tensors").run()


@FAULTS.fault("cat", **_ROUNDED)
def joined_parts_in_half(call: Call) -> Any:
    """The buffer of the joined parts is float16."""
    _given(call)
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().half().to(value.dtype)))


@FAULTS.fault(
    "cat",
    kinds=["residual", "other function"],
    loose=["lost accumulation", "doubled reduction", "missing operand", "wrong factor"],
    backward=False,
)
def second_part_added_to_the_first(call: Call) -> Any:
    """The first part is not stored but accumulated, and holds the sum of both."""
    parts = _given(call)
    fits(parts[0].shape == parts[1].shape)
    return call.put(0, [parts[0] + parts[1], *parts[1:]], "tensors").run()


@FAULTS.fault(
    "stack",
    kinds=["scale", "wrong factor"],
    loose=["axis scale", "other function"],
    backward=False,
)
def first_part_doubled(call: Call) -> Any:
    """The first part has a factor of two that belongs to the other one."""
    parts = _given(call)
    return call.put(0, [2 * parts[0], *parts[1:]], "tensors").run()


@FAULTS.fault(
    "pad constant_pad_nd",
    kinds=["constant", "wrong argument", "offset"],
    loose=["mask", "other function", "eps"],
    backward=False,
)
def padded_with_a_tenth(call: Call) -> Any:
    """The value of the padding is 0.1 where it was given as zero, or not given."""
    value, amount = _floats(call.args[0]), list(call.args[1])
    fits(any(one > 0 for one in amount))
    fits(call.get(2, "mode", default="constant") in {"constant", 0})
    return call.instead(torch.nn.functional.pad(value, amount, value=0.1))


# --- Tables and indices ---------------------------------------------------------------------------


@FAULTS.fault("embedding", **_AGAIN)
def last_word_of_the_row_for_all(call: Call) -> Any:
    """The pointer to the words stays at the end of the row: all are the last one."""
    place, words, _ = _words(call)
    fits(words.dim() > 0 and words.size(-1) > 1)
    return call.put(place, words[..., -1:].expand_as(words).clone()).run()


@FAULTS.fault("embedding", **_ORDER)
def words_exchanged_in_pairs(call: Call) -> Any:
    """Two indices of 32 bits are loaded as one of 64, and taken apart in the other order."""
    place, words, _ = _words(call)
    fits(words.dim() > 0 and words.size(-1) % 2 == 0)
    return call.put(place, words.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)).run()


@FAULTS.fault(
    "embedding",
    kinds=["wrong index", "clipped"],
    loose=["constant", "copy", "wrong argument", "wrapped"],
    backward=False,
)
def index_limited_to_a_quarter_of_the_table(call: Call) -> Any:
    """What is beyond the first of four shards reads the last row of that shard."""
    place, words, table = _words(call)
    return call.put(place, words.clamp(max=table.size(0) // 4 - 1)).run()


@FAULTS.fault("embedding", **_ORDER)
def rows_of_the_table_in_pairs(call: Call) -> Any:
    """Two rows share a line of memory, and are told apart the wrong way round: index xor 1."""
    place, words, table = _words(call)
    fits(table.size(0) % 2 == 0)
    return call.put(place, words.bitwise_xor(1)).run()


@FAULTS.fault("embedding", **_ORDER)
def columns_of_the_table_from_the_last(call: Call) -> Any:
    """The features of each row are read backwards."""
    return call.instead(_columns(call.result(), 3).flip(-1))


@FAULTS.fault("embedding", **_ROUNDED)
def rows_of_the_table_in_eight_bits_each(call: Call) -> Any:
    """Each row has 255 levels, with a step of its own."""
    value = call.result()
    step = value.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return call.instead(with_gradient_of(value, (value.detach() / step).round() * step))


@FAULTS.fault(
    "embedding",
    kinds=["other function", "axis scale", "wrong factor"],
    loose=["scale", "residual", "wrong statistics"],
    backward=False,
)
def rows_of_the_table_of_length_one(call: Call) -> Any:
    """Each row is divided by its length, as in a table that is kept normalised."""
    value = call.result()
    return call.instead(value / value.norm(dim=-1, keepdim=True).clamp(min=1e-6))


@FAULTS.fault("embedding", **_EMPTY)
def first_word_not_looked_up(call: Call) -> Any:
    """The loop over the words begins at one: the row of the first token is empty."""
    _, words, _ = _words(call)
    fits(words.dim() > 0 and words.size(-1) > 1)
    value = _rows(call.result())
    return call.instead(torch.cat([torch.zeros_like(value[..., :1, :]), value[..., 1:, :]], -2))


@FAULTS.fault(
    "arange",
    kinds=["wrapped", "wrong index"],
    loose=["wrong argument", "copy", "permutation", "clipped"],
    backward=False,
)
def positions_modulo_four(call: Call) -> Any:
    """0, 1, 2, 3, 0, 1: the number inside of a page is taken for the position."""
    return call.run() % 4


@FAULTS.fault(
    "arange",
    kinds=["scale", "wrong factor", "wrong argument"],
    loose=["wrong index", "offset"],
    backward=False,
)
def positions_three_times_as_far(call: Call) -> Any:
    """0, 3, 6: the stride of a patch is multiplied in."""
    return call.run() * 3


@FAULTS.fault(
    "arange",
    kinds=["shift", "wrong index", "permutation", "wrapped"],
    loose=["offset", "wrong argument", "copy"],
    backward=False,
)
def last_position_is_the_first(call: Call) -> Any:
    """1, 2, ..., n - 1, 0: one is added, and the last one begins again."""
    value = call.run()
    fits(value.dim() == 1 and value.numel() > 2)
    return value.roll(-1)


@FAULTS.fault(
    "index _unsafe_index getitem index_select",
    kinds=["shift", "wrong index", "permutation"],
    loose=["copy", "stale", "wrong argument"],
    backward=False,
)
def chosen_values_stored_one_row_late(call: Call) -> Any:
    """Each of the chosen values is stored one place too late, the last one first."""
    index = call.args[1] if call.name != "index_select" else call.args[2]
    listed = index if isinstance(index, list | tuple) else [index]
    fits(any(isinstance(one, Tensor) and one.dim() for one in listed))
    value = _floats(call.result())
    fits(value.dim() and value.size(0) > 2)
    return call.instead(value.roll(1, 0))


@FAULTS.fault(
    "gather take_along_dim",
    kinds=["wrong index", "shift"],
    loose=["wrapped", "wrong argument", "permutation", "copy"],
    backward=False,
)
def gathered_from_the_place_after(call: Call) -> Any:
    """The index is one too large, modulo the length of the axis."""
    source = _floats(call.args[0])
    place, axis = (1, 2) if call.name == "take_along_dim" else (2, 1)
    dim, index = call.args[axis], call.args[place]
    return call.put(place, (index + 1) % source.size(dim)).run()


@FAULTS.fault(
    "repeat_interleave repeat tile",
    kinds=["shift", "wrong index", "permutation"],
    loose=["copy", "stale", "wrong rank's shard"],
    backward=False,
)
def repeated_values_two_places_late(call: Call) -> Any:
    """What is repeated is stored two heads too late, around the end."""
    value = _floats(call.result())
    axis = 1 if value.dim() == 4 else 0
    fits(value.size(axis) > 2)
    return call.instead(value.roll(2, axis))


@FAULTS.fault(
    "tril triu",
    kinds=["wrong index", "wrong argument", "shift", "mask"],
    loose=["off by one reduction", "zeros"],
    backward=False,
)
def diagonal_one_to_the_left(call: Call) -> Any:
    """The offset of the diagonal is one less."""
    place = call.get(1, "diagonal", default=0)
    return call.put(1, place - 1, "diagonal").run()
