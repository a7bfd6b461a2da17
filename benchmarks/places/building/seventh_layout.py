"""Faults for measuring: what moves values, tables, indices."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor

FAULTS = Catalogue()
_TURNED = "transpose permute t movedim"
_MEMORY = "view reshape flatten unflatten _unsafe_view"
_COPIED = "clone contiguous"
_PARTS = "chunk split unbind split_with_sizes"
_READ = "getitem slice narrow select"
_LOOKED_UP = "index index_select gather take_along_dim"
_EMPTY: dict[str, Any] = {
    "kinds": ["zeros", "mask", "uninitialised"],
    "loose": ["constant", "missing operand", "axis scale", "wrong factor", "one rank's part"],
    "backward": False,
}
_MOVED: dict[str, Any] = {
    "kinds": ["shift", "wrong index", "permutation"],
    "loose": ["copy", "stale", "wrong argument", "wrong rank's shard", "swapped operands"],
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


def _narrow(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded, with the gradient of the value."""
    return with_gradient_of(value, value.detach().to(dtype).to(value.dtype))


def _part(call: Call) -> Tensor:
    """What is read of a tensor, and not all of it."""
    value = _floats(call.run())
    fits(isinstance(call.args[0], Tensor) and value.numel() < call.args[0].numel())
    return value


def _split(call: Call, least: int = 2) -> list[Tensor]:
    parts = list(call.run())
    fits(len(parts) >= least)
    return [_floats(one) for one in parts]


def _given(call: Call, least: int = 2) -> list[Tensor]:
    """The parts that are joined."""
    parts = list(call.args[0])
    fits(len(parts) >= least)
    return [_floats(one) for one in parts]


def _indices(call: Call) -> tuple[int, Tensor]:
    """Where the indices of a lookup are, and they."""
    place = next(
        i
        for i, one in enumerate(call.args)
        if isinstance(one, Tensor) and not one.is_floating_point()
    )
    return place, call.args[place]


# --- Transpositions and views ---------------------------------------------------------------------


@FAULTS.fault(_TURNED, **_AGAIN)
def second_half_of_the_turned_rows_is_the_first(call: Call) -> Any:
    """The offset of the second tile of rows is not added."""
    value = _rows(call.result())
    half = (value.size(-2) + 1) // 2
    return call.instead(value[..., torch.arange(value.size(-2)) % half, :])


@FAULTS.fault(_MEMORY, **_MOVED)
def memory_one_row_late(call: Call) -> Any:
    """The rows are read from one row too early, around the end of all."""
    value = call.result()
    fits(value.dim() > 1 and value.numel() > value.size(-1))
    return call.instead(value.reshape(-1).roll(value.size(-1)).reshape(value.shape))


@FAULTS.fault(_MEMORY, **_EMPTY)
def last_quarter_of_the_memory_empty(call: Call) -> Any:
    """One of four blocks is not copied."""
    value = call.result()
    fits(value.numel() % 4 == 0 and value.numel() > 4)
    flat = value.reshape(-1).clone()
    flat[-(flat.numel() // 4) :] = 0
    return call.instead(flat.reshape(value.shape))


@FAULTS.fault(_MEMORY, **_ORDER)
def quarters_of_the_memory_exchanged(call: Call) -> Any:
    """Four blocks in the order 0, 2, 1, 3."""
    value = call.result()
    fits(value.numel() % 4 == 0 and value.numel() > 4)
    return call.instead(value.reshape(4, -1)[[0, 2, 1, 3]].reshape(value.shape))


@FAULTS.fault(_COPIED, **_ORDER)
def copied_from_the_end(call: Call) -> Any:
    """The pointer of the source runs backwards over the whole memory."""
    value = call.result()
    fits(value.numel() > 1)
    return call.instead(value.reshape(-1).flip(0).reshape(value.shape))


@FAULTS.fault(_COPIED, **_AGAIN)
def odd_rows_copied_from_the_even_ones(call: Call) -> Any:
    """The source is moved on after every second row."""
    value = _rows(call.result())
    return call.instead(value[..., torch.arange(value.size(-2)) // 2 * 2, :])


@FAULTS.fault(_TURNED, **_ORDER)
def swizzle_of_the_tile_not_undone(call: Call) -> Any:
    """Column c of row r is stored at c xor (r mod 4), against conflicts of banks, and read at c."""
    value = _rows(call.result())
    rows, columns = value.shape[-2:]
    fits(columns % 4 == 0)
    places = torch.arange(columns)[None, :] ^ (torch.arange(rows)[:, None] % 4)
    return call.instead(value.gather(-1, places.expand(value.shape)))


@FAULTS.fault(
    "expand",
    kinds=["wrong axis", "wrong index", "permutation", "transpose"],
    loose=["copy", "shift", "stale", "wrong argument"],
    backward=False,
)
def broadcast_by_the_remainder_of_the_address(call: Call) -> Any:
    """Element i of the memory of the result is element i mod n of the source."""
    value, result = _floats(call.args[0]), call.result()
    fits(value.numel() > 1)
    places = torch.arange(result.numel()) % value.numel()
    return call.instead(value.reshape(-1)[places].view(result.shape))


@FAULTS.fault(
    _PARTS,
    kinds=["wrong index", "copy", "stale"],
    loose=["shift", "permutation", "wrong argument"],
    backward=False,
)
def parts_begin_one_column_early(call: Call) -> Any:
    """Every part but the first begins with the last column of the one before it."""
    parts = [_columns(one) for one in _split(call)]
    fits(len({one.shape for one in parts}) == 1)
    moved = [
        torch.cat([before[..., -1:], one[..., :-1]], -1)
        for before, one in itertools.pairwise(parts)
    ]
    return (parts[0], *moved)


@FAULTS.fault(
    _COPIED,
    kinds=["wrong index", "transpose", "permutation", "copy"],
    loose=["stale", "shift", "mask"],
    backward=False,
)
def lower_left_tile_copied_from_the_upper_right(call: Call) -> Any:
    """Of a square, the tile below the diagonal is a turned copy of that above it."""
    value = _rows(call.result())
    size = value.size(-1)
    fits(size == value.size(-2) and size > 2)
    return call.instead(value.triu() + value.triu(1).mT)


# --- Parts ----------------------------------------------------------------------------------------


@FAULTS.fault(_PARTS, **_EMPTY)
def first_part_not_filled(call: Call) -> Any:
    """The buffer of the first part is zero."""
    parts = _split(call)
    parts[0] = torch.zeros_like(parts[0])
    return tuple(parts)


@FAULTS.fault(_PARTS, **_ROUNDED)
def last_part_in_float8(call: Call) -> Any:
    """The last part goes to a cache in e4m3."""
    parts = _split(call)
    parts[-1] = _narrow(parts[-1], torch.float8_e4m3fn)
    return tuple(parts)


@FAULTS.fault(_PARTS, **_MOVED)
def second_part_one_row_late(call: Call) -> Any:
    """The pointer of the second part is one row behind."""
    parts = _split(call)
    parts[1] = _rows(parts[1]).roll(1, -2)
    return tuple(parts)


@FAULTS.fault(
    _PARTS,
    kinds=["sign", "scale", "wrong factor"],
    loose=["mask", "axis scale", "other function"],
    backward=False,
)
def first_part_negated(call: Call) -> Any:
    """A minus that belongs to one half of a rotation."""
    parts = _split(call)
    parts[0] = -parts[0]
    return tuple(parts)


@FAULTS.fault("cat", **_AGAIN)
def border_of_the_parts_overwritten(call: Call) -> Any:
    """The first part is one too long: its last place is the first place of the second."""
    parts, dim = _given(call), call.get(1, "dim", "axis", default=0)
    size = parts[0].size(dim)
    fits(size > 1)
    parts[0] = torch.cat([parts[0].narrow(dim, 0, size - 1), parts[1].narrow(dim, 0, 1)], dim)
    return call.put(0, parts).run()


@FAULTS.fault("cat", **_ORDER)
def first_part_from_its_last_column(call: Call) -> Any:
    """The first part is read with a negative stride."""
    parts = _given(call)
    parts[0] = _columns(parts[0]).flip(-1)
    return call.put(0, parts).run()


@FAULTS.fault(_READ, **_MOVED)
def part_of_the_next_row(call: Call) -> Any:
    """The pointer is one row too far; rows go around."""
    return _rows(_part(call)).roll(-1, -2)


@FAULTS.fault(
    "roll",
    kinds=["mask", "missing operand", "copy"],
    loose=["stale", "permutation", "wrong index", "shift"],
    backward=False,
)
def even_columns_rolled_only(call: Call) -> Any:
    """The second of two lanes stays where it was."""
    value, result = _columns(call.args[0]), call.result()
    odd = torch.arange(value.size(-1)) % 2 == 1
    return call.instead(torch.where(odd, value, result))


# --- Tables and indices ---------------------------------------------------------------------------


@FAULTS.fault(
    "embedding",
    kinds=["wrong index", "shift"],
    loose=["permutation", "wrong argument", "offset"],
)
def row_of_the_table_two_further(call: Call) -> Any:
    """Two special words were added at the front of the table; the last ones go around."""
    place, words = _indices(call)
    table = call.args[1 - place]
    return call.put(place, (words + 2) % table.size(0)).run()


@FAULTS.fault("embedding", **_AGAIN)
def every_second_word_is_the_one_before(call: Call) -> Any:
    """The pointer to the words is moved on after two."""
    place, words = _indices(call)
    fits(words.dim() > 0 and words.size(-1) > 1)
    return call.put(place, words[..., torch.arange(words.size(-1)) // 2 * 2]).run()


@FAULTS.fault("embedding", **_ROUNDED)
def rows_of_the_table_in_e5m2(call: Call) -> Any:
    """The table has two bits behind the point."""
    return call.instead(_narrow(call.result(), torch.float8_e5m2))


@FAULTS.fault(
    "embedding",
    kinds=["clipped"],
    loose=["other function", "precision", "overflow", "mask"],
)
def rows_of_the_table_saturate(call: Call) -> Any:
    """Integers that end at half of the largest magnitude."""
    value = call.result()
    limit = float(value.detach().abs().max()) / 2
    return call.instead(value.clamp(-limit, limit))


@FAULTS.fault("embedding", **_MOVED)
def columns_of_the_table_one_late(call: Call) -> Any:
    """The columns are stored one too late, around the end."""
    return call.instead(_columns(call.result()).roll(1, -1))


@FAULTS.fault(
    _LOOKED_UP,
    kinds=["wrong index", "copy"],
    loose=["precision", "stale", "permutation", "wrong argument"],
    backward=False,
)
def lowest_bit_of_the_index_lost(call: Call) -> Any:
    """Index i reads the row i // 2 * 2."""
    if call.name == "index":
        fits(len(call.args[1]) == 1 and call.args[1][0].dtype != torch.bool)
        return call.put(1, [call.args[1][0] // 2 * 2]).run()
    place, index = _indices(call)
    return call.put(place, index // 2 * 2).run()


@FAULTS.fault(
    "gather take_along_dim",
    kinds=["wrong index", "permutation", "stale"],
    loose=["copy", "shift", "wrong argument"],
    backward=False,
)
def indices_read_with_the_stride_of_the_source(call: Call) -> Any:
    """Row r of the indices is looked for at r times the length of the source, around the end."""
    place, index = _indices(call)
    source = _floats(call.args[0])
    dim = call.get(1, "dim") if call.name == "gather" else call.get(2, "dim")
    fits(isinstance(dim, int) and dim % index.dim() == index.dim() - 1)
    fits(index.dim() > 1 and index.size(-1) < source.size(-1))
    flat = index.reshape(-1)
    rows = flat.numel() // index.size(-1)
    places = torch.arange(rows)[:, None] * source.size(-1) + torch.arange(index.size(-1))
    return call.put(place, flat[places % flat.numel()].view(index.shape)).run()


@FAULTS.fault(
    "embedding",
    kinds=["wrong factor", "axis scale", "wrong index"],
    loose=["scale", "stale", "precision", "shift", "permutation"],
)
def rows_with_the_scale_of_the_next_word(call: Call) -> Any:
    """Rows are integers with a scale each; a word gets its own codes and the next word's scale."""
    value = _rows(call.result())
    top = value.detach().abs().amax(-1, keepdim=True)
    fits(bool((top > 0).all()))
    return call.instead(value / top * top.roll(-1, -2))


@FAULTS.fault(
    "embedding",
    kinds=["residual", "wrong index"],
    loose=["offset", "stale", "shift", "copy", "doubled reduction"],
)
def word_before_added(call: Call) -> Any:
    """A convolution of two words that belongs to another model; the first word is alone."""
    value = _rows(call.result())
    before = torch.cat([torch.zeros_like(value[..., :1, :]), value[..., :-1, :]], -2)
    return call.instead(value + before)


@FAULTS.fault(
    "arange",
    kinds=["wrong index", "copy", "wrong factor"],
    loose=["precision", "stale", "wrong argument", "scale"],
    backward=False,
)
def two_tokens_share_a_position(call: Call) -> Any:
    """0, 0, 1, 1, 2, 2: the second token of a pair is not counted."""
    value = call.run()
    fits(value.numel() > 3 and int(value[1] - value[0]) == 1)
    return torch.div(value, 2, rounding_mode="floor")


@FAULTS.fault(
    "arange",
    kinds=["zeros", "mask"],
    loose=["constant", "uninitialised", "wrong index", "wrong factor"],
    backward=False,
)
def odd_positions_are_zero(call: Call) -> Any:
    """The second of two lanes does not count."""
    value = call.run()
    fits(value.numel() > 3)
    return value * (torch.arange(value.numel()) % 2 == 0)


@FAULTS.fault(
    "zeros new_zeros zeros_like full new_full",
    kinds=["offset", "constant", "uninitialised", "wrong argument"],
    loose=["stale", "residual", "axis offset"],
    backward=False,
)
def buffer_begins_with_a_tenth(call: Call) -> Any:
    """The buffer is not what was asked for, but a tenth more."""
    value = _floats(call.run())
    fits(bool(value.isfinite().all()))
    return value + 0.1
