"""Faults for measuring: what moves values, tables, indices."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor

FAULTS = Catalogue()
_TURNED = "transpose permute movedim swapaxes t mT"
_MEMORY = "view reshape flatten unflatten _unsafe_view"
_COPIED = "clone contiguous"
_PARTS = "chunk split unbind split_with_sizes"
_READ = "getitem slice select narrow"
_EMPTY: dict[str, Any] = {
    "kinds": ["zeros", "mask", "uninitialised"],
    "loose": ["missing operand", "constant", "axis scale", "wrong factor", "one rank's part"],
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
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function"],
    "backward": False,
}
_LIMITED: dict[str, Any] = {
    "kinds": ["clipped"],
    "loose": ["other function", "approximation", "overflow", "wrong argument"],
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


def _places(value: Tensor, axis: int = -1) -> Tensor:
    return torch.arange(value.size(axis), device=value.device)


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


def _words(call: Call) -> tuple[int, Tensor, Tensor]:
    """Where the indices of a table are, and indices and table."""
    place = next(i for i in (0, 1) if not call.args[i].is_floating_point())
    fits(call.args[1 - place].dim() == 2)
    return place, call.args[place], call.args[1 - place]


def _stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in a narrower format, with its own gradient."""
    return with_gradient_of(value, value.detach().to(dtype).to(value.dtype))


# --- Transpositions, views and copies -------------------------------------------------------------


@FAULTS.fault(_TURNED, **_ORDER)
def columns_of_the_turned_values_from_the_last(call: Call) -> Any:
    """The result is stored with a negative stride of its last axis."""
    return call.instead(_columns(call.result()).flip(-1))


@FAULTS.fault(_TURNED, **_EMPTY)
def odd_columns_of_the_turned_values_empty(call: Call) -> Any:
    """Of two values that are loaded at once, the second is not stored."""
    value = _columns(call.result())
    return call.instead(value * (_places(value) % 2 == 0))


@FAULTS.fault(_TURNED, **_LIMITED)
def turned_values_saturate_at_three_fifths(call: Call) -> Any:
    """The buffer of the transposition is a fixed-point number between -0.6 and 0.6."""
    return call.instead(_floats(call.result()).clamp(-0.6, 0.6))


@FAULTS.fault(_MEMORY, **_EMPTY)
def first_two_columns_of_the_view_empty(call: Call) -> Any:
    """The loop over the columns begins at two."""
    value = _columns(call.result())
    return call.instead(value * (_places(value) > 1))


@FAULTS.fault(_MEMORY, **_SHIFTED)
def memory_three_elements_early(call: Call) -> Any:
    """The view begins three elements too far in the memory, around its end."""
    value = _floats(call.result())
    fits(value.numel() > 6)
    return call.instead(value.flatten().roll(-3).reshape(value.shape))


@FAULTS.fault(_MEMORY, **_ROUNDED)
def changed_shape_by_way_of_e4m3(call: Call) -> Any:
    """The change of shape became a copy into a buffer with three bits behind the point."""
    return call.instead(_stored(_floats(call.result()), torch.float8_e4m3fn))


@FAULTS.fault(_MEMORY, **_ORDER)
def even_rows_of_the_view_first(call: Call) -> Any:
    """Rows 0, 2, 4, ... and then 1, 3, ...: two streams are stored one after the other."""
    value = _rows(call.result())
    return call.instead(torch.cat([value[..., ::2, :], value[..., 1::2, :]], -2))


@FAULTS.fault(_COPIED, **_ORDER)
def columns_copied_backwards_in_fours(call: Call) -> Any:
    """Each vector of four columns is stored from its last to its first, as bytes of a word."""
    value = _columns(call.result())
    fits(value.size(-1) % 4 == 0)
    return call.instead(value.unflatten(-1, (-1, 4)).flip(-1).flatten(-2))


@FAULTS.fault(
    _COPIED,
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "constant", "shift", "wrong argument", "clipped"],
    backward=False,
)
def last_two_rows_are_copies_of_the_one_before(call: Call) -> Any:
    """The row is limited to the number of rows less three."""
    value = _rows(call.result(), 4)
    rows = _places(value, -2).clamp(max=value.size(-2) - 3)
    return call.instead(value[..., rows, :])


@FAULTS.fault("unsqueeze squeeze", **_SCALED)
def values_halved_with_the_new_axis(call: Call) -> Any:
    """The mean of a new pair is taken, of which one is empty."""
    return call.instead(_floats(call.result()) / 2)


# --- Parts ----------------------------------------------------------------------------------------


@FAULTS.fault(_READ, **_SHIFTED)
def part_two_rows_early(call: Call) -> Any:
    """The pointer to the part is two rows too far, around its end."""
    return call.instead(_rows(_part(call), 4).roll(-2, -2))


@FAULTS.fault(_READ, **_EMPTY)
def last_column_of_the_part_empty(call: Call) -> Any:
    """The part is one column too short, and its buffer as long as before."""
    value = _columns(_part(call), 3)
    return call.instead(value * (_places(value) < value.size(-1) - 1))


@FAULTS.fault(_READ, **_LIMITED)
def part_saturates_at_two_fifths(call: Call) -> Any:
    """What is read is kept between -0.4 and 0.4."""
    return call.instead(_part(call).clamp(-0.4, 0.4))


@FAULTS.fault(
    _PARTS,
    kinds=["sign", "wrong factor"],
    loose=["scale", "axis scale", "other function"],
    backward=False,
)
def second_of_several_parts_negated(call: Call) -> Any:
    """The minus of a rotation is given to the keys."""
    first, second, *rest = _split(call, 3)
    return type(call.run())([first, -second, *rest])


@FAULTS.fault(_PARTS, **_SHIFTED)
def second_part_two_columns_late(call: Call) -> Any:
    """The pointer to the second part is two columns behind, around its end."""
    first, second, *rest = _split(call)
    return type(call.run())([first, _columns(second).roll(2, -1), *rest])


@FAULTS.fault(
    "cat stack",
    kinds=["shift", "wrong index", "permutation"],
    loose=["copy", "stale", "wrong argument", "wrong rank's shard"],
    backward=False,
)
def last_joined_part_one_row_early(call: Call) -> Any:
    """The pointer to the last part is one row too far, around its end."""
    *rest, last = _given(call)
    return call.put(0, [*rest, _rows(last).roll(-1, -2)], "tensors").run()


@FAULTS.fault("cat stack", **_LIMITED)
def first_joined_part_saturates_at_three_tenths(call: Call) -> Any:
    """The first part is stored between -0.3 and 0.3."""
    first, *rest = _given(call)
    return call.put(0, [first.clamp(-0.3, 0.3), *rest], "tensors").run()


@FAULTS.fault("cat", **_ORDER)
def joined_columns_in_pairs(call: Call) -> Any:
    """Columns 2 i and 2 i + 1 of the result are exchanged: words of two in the other order."""
    _given(call)
    value = _columns(call.result())
    fits(value.size(-1) % 2 == 0)
    return call.instead(value.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


# --- Padded, and places ---------------------------------------------------------------------------


@FAULTS.fault(
    "pad constant_pad_nd",
    kinds=["shift", "wrong index", "permutation"],
    loose=["wrong argument", "copy", "stale"],
    backward=False,
)
def padded_values_one_column_early(call: Call) -> Any:
    """The whole frame is stored one column before its place, around the start of each line."""
    return call.instead(_columns(call.result()).roll(-1, -1))


@FAULTS.fault(
    "arange",
    kinds=["offset", "wrong argument"],
    loose=["shift", "wrong index", "axis offset"],
    backward=False,
)
def places_five_too_large(call: Call) -> Any:
    """The length of a prefix that is not there is added."""
    return call.run() + 5


@FAULTS.fault(
    "arange",
    kinds=["permutation", "wrong index", "transpose"],
    loose=["shift", "wrong argument", "swapped operands"],
    backward=False,
)
def even_places_before_odd_ones(call: Call) -> Any:
    """0, 2, 4, ... and then 1, 3, ...: a sequence that two ranks share in stripes."""
    value = call.run()
    fits(value.numel() > 3)
    return torch.cat([value[::2], value[1::2]])


# --- Tables and indices ---------------------------------------------------------------------------


@FAULTS.fault("embedding", **_ORDER)
def columns_of_the_table_interleaved(call: Call) -> Any:
    """Both halves of a row are taken in turn: sines and cosines in the layout of another port."""
    value = _columns(call.result())
    fits(value.size(-1) % 2 == 0)
    return call.instead(value.unflatten(-1, (2, -1)).mT.flatten(-2))


@FAULTS.fault(
    "embedding",
    kinds=["wrong index", "shift", "wrong argument"],
    loose=["offset", "permutation", "stale", "copy"],
    backward=False,
)
def row_of_the_table_three_further(call: Call) -> Any:
    """Three special words were added in front; the last rows go around."""
    place, words, table = _words(call)
    fits(table.size(0) > 6)
    return call.put(place, (words + 3) % table.size(0)).run()


@FAULTS.fault("embedding", **_ROUNDED)
def rows_of_the_table_in_five_bits_each(call: Call) -> Any:
    """Each row has 31 levels, with a step of its own."""
    value = call.result()
    step = value.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 15
    return call.instead(with_gradient_of(value, (value.detach() / step).round() * step))


@FAULTS.fault("gather index_select index take_along_dim", **_ROUNDED)
def chosen_values_in_e4m3(call: Call) -> Any:
    """What is gathered is stored with three bits behind the point."""
    return call.instead(_stored(call.result(), torch.float8_e4m3fn))
