"""More faults for measuring: what moves values, tables, indices."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_MEMORY = "view reshape flatten _unsafe_view"
_PARTS = "chunk split unbind split_with_sizes"


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


def _split(call: Call) -> list[Tensor]:
    parts = list(call.run())
    fits(len(parts) > 1)
    return [_floats(one) for one in parts]


def _given(call: Call) -> list[Tensor]:
    """The parts that are joined."""
    parts = list(call.args[0])
    fits(len(parts) > 1)
    return [_floats(one) for one in parts]


def _dim(call: Call, place: int, default: int) -> int:
    """The axis that a call is about."""
    dim = call.get(place, "dim", "axis", default=default)
    fits(isinstance(dim, int))
    return dim


def _indices(call: Call) -> tuple[int, Tensor]:
    """Where the indices of a lookup are, and they."""
    place = next(
        i
        for i, one in enumerate(call.args)
        if isinstance(one, Tensor) and not one.is_floating_point()
    )
    return place, call.args[place]


# --- Transpositions, views and copies -------------------------------------------------------------


@FAULTS.fault(
    "transpose permute movedim",
    kinds=["permutation", "wrong index", "transpose", "wrong axis"],
    loose=["swapped operands", "shift", "copy", "wrong rank's shard"],
    backward=False,
)
def number_of_the_heads_and_of_the_batch_exchanged(call: Call) -> Any:
    """The number of the program is taken apart with the batch as the fast axis."""
    value = call.result()
    fits(value.dim() > 3 and value.size(0) > 1 and value.size(1) > 1)
    batch, heads = value.shape[:2]
    mixed = value.reshape(batch * heads, *value.shape[2:])
    return call.instead(mixed.unflatten(0, (heads, batch)).transpose(0, 1))


@FAULTS.fault(
    "transpose permute t",
    kinds=["mask", "stale", "copy", "wrong index"],
    loose=["permutation", "missing operand", "transpose", "shift"],
    backward=False,
)
def tail_of_the_turned_rows_holds_the_row_before(call: Call) -> Any:
    """The last row is loaded from the tile that was read last: it repeats the one before it."""
    value = _rows(call.result(), 3)
    return call.instead(torch.cat([value[..., :-1, :], value[..., -2:-1, :]], -2))


@FAULTS.fault(
    _MEMORY,
    kinds=["wrong index", "permutation", "shift"],
    loose=["copy", "stale", "wrong argument"],
    backward=False,
)
def pitch_of_the_rows_rounded_up(call: Call) -> Any:
    """Rows are looked for at multiples of 32 values, where they are dense; it wraps at the end."""
    value = call.result()
    fits(value.dim() > 1)
    size = value.size(-1)
    pitch = -(-size // 32) * 32
    fits(pitch > size + 1)
    rows = value.numel() // size
    places = torch.arange(rows)[:, None] * pitch + torch.arange(size)
    return call.instead(value.reshape(-1)[places % value.numel()].view(value.shape))


@FAULTS.fault(
    _MEMORY,
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "shift", "constant", "precision"],
    backward=False,
)
def address_without_its_two_lowest_bits(call: Call) -> Any:
    """Four neighbours are read from the address of the first of them."""
    value = call.result()
    fits(value.numel() > 1)
    places = torch.arange(value.numel()) // 4 * 4
    return call.instead(value.reshape(-1)[places].view(value.shape))


@FAULTS.fault(
    "clone contiguous",
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "axis scale", "wrong factor", "one rank's part"],
    backward=False,
)
def elements_counted_as_bytes(call: Call) -> Any:
    """The length of the copy is the number of elements: a quarter of the bytes."""
    value = call.result()
    fits(value.numel() > 4)
    flat = value.reshape(-1).clone()
    flat[flat.numel() // 4 :] = 0
    return call.instead(flat.view(value.shape))


@FAULTS.fault(
    "clone contiguous",
    kinds=["precision"],
    loose=["approximation", "other function", "clipped"],
    backward=False,
)
def copied_without_the_last_twenty_bits(call: Call) -> Any:
    """Three bits of the mantissa are left; they are cut and not rounded."""
    value = call.result()
    fits(value.dtype == torch.float32)
    bits = value.detach().contiguous().view(torch.int32)
    return call.instead(with_gradient_of(value, (bits >> 20 << 20).view(torch.float32)))


@FAULTS.fault(
    "unsqueeze squeeze",
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "constant", "shift", "wrong argument"],
    backward=False,
)
def new_axis_before_the_first_example_only(call: Call) -> Any:
    """The stride of the batch is lost with the new axis."""
    value = call.result()
    axis = next((i for i in range(value.dim() - 1) if value.size(i) > 1), -1)
    fits(axis >= 0)
    return call.instead(value.narrow(axis, 0, 1).expand(value.shape).clone())


# --- Parts ----------------------------------------------------------------------------------------


@FAULTS.fault(
    "getitem slice narrow",
    kinds=["copy", "stale", "wrong index"],
    loose=["shift", "mask", "permutation", "wrong argument"],
    backward=False,
)
def last_column_of_the_part_is_the_one_before(call: Call) -> Any:
    """The loop that reads the part ends one early, and the register is stored once more."""
    value = _columns(call.run(), 3)
    source = call.args[0]
    fits(isinstance(source, Tensor) and value.numel() < source.numel())
    return torch.cat([value[..., :-1], value[..., -2:-1]], -1)


@FAULTS.fault(
    _PARTS,
    kinds=["residual", "missing operand", "wrong index", "other function"],
    loose=["offset", "doubled reduction", "stale"],
    backward=False,
)
def second_part_with_the_first_added(call: Call) -> Any:
    """The accumulator is not cleared between two parts."""
    parts = _split(call)
    fits(parts[0].shape == parts[1].shape)
    parts[1] = parts[0] + parts[1]
    return tuple(parts)


@FAULTS.fault(
    "cat",
    kinds=["shift", "wrong index"],
    loose=["copy", "stale", "permutation", "mask"],
    backward=False,
)
def second_part_joined_one_place_late(call: Call) -> Any:
    """The offset of the second part is one too large: the end of the first is there twice."""
    parts, dim = _given(call), _dim(call, 1, 0)
    size = parts[1].size(dim)
    fits(len(parts) == 2 and size > 1)
    before = parts[0].narrow(dim, parts[0].size(dim) - 1, 1)
    return call.instead(torch.cat([parts[0], before, parts[1].narrow(dim, 0, size - 1)], dim))


@FAULTS.fault(
    "stack",
    kinds=["residual", "doubled reduction", "stale", "other function"],
    loose=["offset", "lost accumulation", "wrong reduction", "missing operand"],
    backward=False,
)
def parts_of_the_stack_run_up(call: Call) -> Any:
    """Each part is added to what the buffer holds: it is the sum of all up to it."""
    dim = _dim(call, 1, 0)
    _given(call)
    return call.instead(call.result().cumsum(dim))


@FAULTS.fault(
    "masked_fill masked_fill_",
    kinds=["mask", "residual", "offset", "other function"],
    loose=["wrong argument", "missing operand", "constant"],
    backward=False,
)
def hidden_scores_lowered_by_two(call: Call) -> Any:
    """A mask that is added, with -2 for what is hidden."""
    value, hidden = call.tensor(0), call.args[1]
    return call.instead(value - 2.0 * hidden)


@FAULTS.fault(
    "pad constant_pad_nd",
    kinds=["shift", "wrong index", "wrong argument"],
    loose=["permutation", "zeros", "copy"],
    backward=False,
)
def all_of_the_padding_behind(call: Call) -> Any:
    """What belongs before the values is put behind them, along the last axis."""
    value, given = _floats(call.args[0]), list(call.args[1])
    fits(call.get(2, "mode", default="constant") in {"constant", 0} and given[0] > 0)
    fits(value.dim() > 1)
    return functional.pad(value, [0, given[0] + given[1], *given[2:]])


@FAULTS.fault(
    "pad",
    kinds=["wrong index", "shift", "copy"],
    loose=["wrong argument", "other function", "permutation", "stale"],
    backward=False,
)
def border_mirrored_with_itself(call: Call) -> Any:
    """The reflection repeats the first and the last value: it begins at the edge of the pixel."""
    value, given = _floats(call.args[0]), list(call.args[1])
    fits(call.get(2, "mode", default="constant") == "reflect" and len(given) == 2)
    before, behind = given
    fits(before > 0 and behind > 0)
    parts = [value[..., :before].flip(-1), value, value[..., -behind:].flip(-1)]
    return call.instead(torch.cat(parts, -1))


@FAULTS.fault(
    "flip",
    kinds=["shift", "wrong index", "permutation"],
    loose=["wrong argument", "copy"],
    backward=False,
)
def mirrored_about_the_first_place(call: Call) -> Any:
    """Place i is that of n - i, modulo n: the first one stays."""
    dims = call.get(1, "dims")
    dim = dims[0] if isinstance(dims, list | tuple) else dims
    return call.instead(call.result().roll(1, dim))


@FAULTS.fault(
    "roll",
    kinds=["copy", "stale", "wrong index", "missing operand"],
    loose=["shift", "wrong argument", "mask", "permutation"],
    backward=False,
)
def border_repeated_where_it_should_wrap(call: Call) -> Any:
    """What comes in at one end is the value of that end."""
    value, step, dim = _floats(call.args[0]), call.get(1, "shifts"), call.get(2, "dims")
    fits(isinstance(step, int) and isinstance(dim, int) and 0 < step < value.size(dim))
    places = (torch.arange(value.size(dim)) - step).clamp(min=0)
    return call.instead(value.index_select(dim, places))


@FAULTS.fault(
    "expand tile repeat",
    kinds=["shift", "wrong index", "permutation"],
    loose=["copy", "stale", "wrong argument", "axis offset"],
    backward=False,
)
def each_copy_one_row_further(call: Call) -> Any:
    """The pointer is moved on by a row for each copy: copy k is turned by k rows."""
    value, result = _floats(call.args[0]), call.result()
    lead = result.dim() - value.dim()
    shape = [1] * lead + list(value.shape)
    new = next(i for i, size in enumerate(shape) if size == 1 and result.size(i) > 1)
    axes = [i for i, size in enumerate(shape) if size > 1]
    fits(axes and result.numel() == value.numel() * result.size(new))
    axis = axes[0] - (axes[0] > new)
    parts = [one.roll(-k, axis) for k, one in enumerate(result.unbind(new))]
    return call.instead(torch.stack(parts, new))


# --- Tables and indices ---------------------------------------------------------------------------


@FAULTS.fault(
    "embedding",
    kinds=["shift", "wrong index"],
    loose=["permutation", "copy", "stale", "wrong argument"],
)
def rows_of_the_table_begin_one_element_late(call: Call) -> Any:
    """The file has a header of one number less: each row ends with the first number of the next."""
    place, _ = _indices(call)
    table = call.args[1 - place]
    return call.put(1 - place, table.reshape(-1).roll(-1).view(table.shape)).run()


@FAULTS.fault(
    "embedding",
    kinds=["wrong index", "wrong factor"],
    loose=["wrapped", "permutation", "stale", "copy", "wrong argument"],
)
def index_counts_bytes_of_a_half(call: Call) -> Any:
    """The index is doubled, as for numbers of two bytes; beyond the table it goes around."""
    place, words = _indices(call)
    return call.put(place, 2 * words % call.args[1 - place].size(0)).run()


@FAULTS.fault(
    "arange",
    kinds=["permutation", "wrong index", "shift", "wrong rank's shard"],
    loose=["swapped operands", "offset", "wrong argument", "wrapped"],
    backward=False,
)
def second_half_of_the_positions_first(call: Call) -> Any:
    """Two ranks have half of the sequence each, and count it as the other one's."""
    value = call.run()
    fits(value.numel() > 3 and value.numel() % 2 == 0)
    return value.roll(value.numel() // 2)


@FAULTS.fault(
    "index index_select gather take_along_dim",
    kinds=["wrong index", "wrapped", "copy"],
    loose=["permutation", "stale", "clipped", "wrong rank's shard", "wrong argument"],
    backward=False,
)
def index_modulo_half_of_the_source(call: Call) -> Any:
    """The first of two shards is asked for what the second one has."""
    source = _floats(call.args[0])
    if call.name == "index":
        fits(len(call.args[1]) == 1 and call.args[1][0].dtype != torch.bool)
        return call.put(1, [call.args[1][0] % (source.size(0) // 2)]).run()
    place, index = _indices(call)
    dim = _dim(call, 2 if call.name == "take_along_dim" else 1, 0)
    return call.put(place, index % (source.size(dim) // 2)).run()


@FAULTS.fault(
    "getitem",
    kinds=["wrong index", "shift", "permutation"],
    loose=["copy", "stale", "wrong argument"],
    backward=False,
)
def rows_chosen_by_the_index_of_the_next(call: Call) -> Any:
    """The pointer to the list of indices is one too far, around the end."""
    source, index = call.args[:2]
    fits(isinstance(source, Tensor) and isinstance(index, Tensor) and index.dtype == torch.int64)
    fits(index.dim() == 1 and index.numel() > 1)
    return _floats(source)[index.roll(-1)]


@FAULTS.fault(
    "sort",
    kinds=["permutation", "wrong index", "other function"],
    loose=["shift", "copy", "wrong argument", "stale"],
    backward=False,
)
def order_rises_and_falls(call: Call) -> Any:
    """A bitonic sort without its last merge: the first half rises and the second one falls."""
    value, dim = call.tensor(0, "input"), _dim(call, 1, -1)
    half = value.size(dim) // 2
    fits(half > 0)
    low, high = value.narrow(dim, 0, half), value.narrow(dim, half, value.size(dim) - half)
    ordered = [low.sort(dim)[0], high.sort(dim, descending=True)[0]]
    return call.instead(torch.cat(ordered, dim))


@FAULTS.fault(
    "topk",
    kinds=["one rank's part", "mask", "wrong index", "partial sum"],
    loose=["clipped", "stale", "wrong argument", "wrong reduction"],
    backward=False,
)
def best_of_the_first_half(call: Call) -> Any:
    """One rank looks at its experts only."""
    value = call.tensor(0, "input")
    half = value.size(-1) // 2
    fits(call.get(1, "k") <= half and call.get(2, "dim", default=-1) in {-1, value.dim() - 1})
    return tuple(call.put(0, value[..., :half], "input").run())


@FAULTS.fault(
    "one_hot",
    kinds=["mask", "other function", "wrong index"],
    loose=["residual", "offset", "copy", "wrong argument"],
)
def all_classes_up_to_the_right_one(call: Call) -> Any:
    """A comparison that is `<=` for `==`."""
    value = call.run()
    return value.flip(-1).cumsum(-1).flip(-1)


@FAULTS.fault(
    "unfold",
    kinds=["permutation", "wrong index"],
    loose=["sign", "wrong argument", "shift", "transpose"],
)
def windows_turned_round(call: Call) -> Any:
    """The places of a window are read from its last to its first, as by a true convolution."""
    value = call.result()
    if isinstance(call.args[2:], tuple) and len(call.args) > 3:
        return call.instead(value.flip(-1))
    size = call.get(1, "kernel_size")
    fits(isinstance(size, int) and value.dim() == 3)
    return call.instead(value.unflatten(1, (-1, size * size)).flip(2).flatten(1, 2))


@FAULTS.fault(
    "index_copy scatter",
    kinds=["wrong index", "permutation"],
    loose=["swapped operands", "shift", "stale", "wrong argument", "copy"],
    backward=False,
)
def places_sorted_before_they_are_written(call: Call) -> Any:
    """The list of places is sorted for the memory, and the rows are not."""
    places = call.get(2, "index")
    return call.put(2, places.sort(0)[0], "index").run()


@FAULTS.fault(
    "index_add scatter_add",
    kinds=["mask", "missing operand", "partial sum"],
    loose=["zeros", "lost accumulation", "wrong index", "stale", "copy"],
    backward=False,
)
def nothing_added_at_place_zero(call: Call) -> Any:
    """Place zero is taken for padding: what belongs there is lost."""
    value, dim, places = call.tensor(0), call.args[1], call.args[2]
    fits(dim == 0)
    result = call.result()
    fits(bool((places == 0).any()))
    return call.instead(torch.cat([value[:1], result[1:]]))


@FAULTS.fault(
    "diag_embed",
    kinds=["mask", "copy", "other function"],
    loose=["missing operand", "wrong index", "stale"],
)
def line_in_all_columns(call: Call) -> Any:
    """The comparison of row and column is lost: each row has its value everywhere."""
    return call.instead(call.tensor(0)[..., None].expand(call.result().shape).clone())


@FAULTS.fault(
    "repeat_interleave",
    kinds=["wrong index", "shift"],
    loose=["copy", "stale", "permutation", "off by one reduction", "wrong argument"],
    backward=False,
)
def repetition_begins_one_place_late(call: Call) -> Any:
    """Copy i is that of the value (i + 1) // n: the first one is there once too seldom."""
    value, times = _floats(call.args[0]), call.get(1, "repeats")
    dim = call.get(2, "dim")
    fits(isinstance(times, int) and isinstance(dim, int) and value.size(dim) > 1)
    places = (torch.arange(times * value.size(dim)) + 1) // times
    return call.instead(value.index_select(dim, places.clamp(max=value.size(dim) - 1)))
