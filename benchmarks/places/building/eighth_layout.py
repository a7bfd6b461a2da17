"""More faults for measuring: what moves values, tables, indices."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on, result
from benchmarks.places.parts import columns_of, floats_only, joined_parts, lookup_indices, rows_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_MEMORY = "view reshape flatten _unsafe_view"
_PARTS = "chunk split unbind split_with_sizes"


def _split(call: Call) -> list[Tensor]:
    parts = list(call.run())
    fits(len(parts) > 1)
    return [floats_only(one) for one in parts]


def _dim(call: Call, place: int, default: int) -> int:
    """The axis that a call is about."""
    dim = call.get(place, "dim", "axis", default=default)
    fits(isinstance(dim, int))
    return dim


# --- Transpositions, views and copies -------------------------------------------------------------


@FAULTS.forward(
    "transpose permute movedim",
    "permutation, wrong index, transpose, wrong axis; swapped operands, shift, copy, "
    "wrong rank's shard",
)
def number_of_the_heads_and_of_the_batch_exchanged(call: Call) -> Any:
    """The number of the program is taken apart with the batch as the fast axis."""
    value = call.result()
    fits(value.dim() > 3 and value.size(0) > 1 and value.size(1) > 1)
    batch, heads = value.shape[:2]
    mixed = value.reshape(batch * heads, *value.shape[2:])
    return call.instead(mixed.unflatten(0, (heads, batch)).transpose(0, 1))


@FAULTS.forward(_MEMORY, words.MOVED)
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


@FAULTS.forward("clone contiguous", words.EMPTY_ON_A_RANK)
def elements_counted_as_bytes(call: Call) -> Any:
    """The length of the copy is the number of elements: a quarter of the bytes."""
    value = call.result()
    fits(value.numel() > 4)
    flat = value.reshape(-1).clone()
    flat[flat.numel() // 4 :] = 0
    return call.instead(flat.view(value.shape))


@FAULTS.forward("clone contiguous", "precision; approximation, other function, clipped")
def copied_without_the_last_twenty_bits(call: Call) -> Any:
    """Three bits of the mantissa are left; they are cut and not rounded."""
    value = call.result()
    fits(value.dtype == torch.float32)
    bits = value.detach().contiguous().view(torch.int32)
    return call.instead(with_gradient_of(value, (bits >> 20 << 20).view(torch.float32)))


@FAULTS.forward(
    "unsqueeze squeeze", "copy, stale, wrong index; permutation, constant, shift, wrong argument"
)
def new_axis_before_the_first_example_only(call: Call) -> Any:
    """The stride of the batch is lost with the new axis."""
    value = call.result()
    axis = next((i for i in range(value.dim() - 1) if value.size(i) > 1), -1)
    fits(axis >= 0)
    return call.instead(value.narrow(axis, 0, 1).expand(value.shape).clone())


# fmt: off
# The last row is loaded from the tile that was read last: it repeats the one before it.
FAULTS.add("tail of the turned rows holds the row before", "transpose permute t",
    "mask, stale, copy, wrong index; permutation, missing operand, transpose, shift",
    computed(lambda call: (rows_of(call.result(), 3),),
        lambda value: torch.cat([value[..., :-1, :], value[..., -2:-1, :]], -2)), backward=False)
# Four neighbours are read from the address of the first of them.
FAULTS.add("address without its two lowest bits", _MEMORY,
    "copy, stale, wrong index; permutation, shift, constant, precision",
    result(lambda v: v.reshape(-1)[torch.arange(v.numel()) // 4 * 4].view(v.shape),
        where=lambda v: v.numel() > 1), backward=False)
# fmt: on


# --- Parts ----------------------------------------------------------------------------------------


@FAULTS.forward(
    "getitem slice narrow", "copy, stale, wrong index; shift, mask, permutation, wrong argument"
)
def last_column_of_the_part_is_the_one_before(call: Call) -> Any:
    """The loop that reads the part ends one early, and the register is stored once more."""
    value = columns_of(call.run(), 3)
    source = call.args[0]
    fits(isinstance(source, Tensor) and value.numel() < source.numel())
    return torch.cat([value[..., :-1], value[..., -2:-1]], -1)


@FAULTS.forward(
    _PARTS,
    "residual, missing operand, wrong index, other function; offset, doubled reduction, stale",
)
def second_part_with_the_first_added(call: Call) -> Any:
    """The accumulator is not cleared between two parts."""
    parts = _split(call)
    fits(parts[0].shape == parts[1].shape)
    parts[1] = parts[0] + parts[1]
    return tuple(parts)


@FAULTS.forward("cat", "shift, wrong index; copy, stale, permutation, mask")
def second_part_joined_one_place_late(call: Call) -> Any:
    """The offset of the second part is one too large: the end of the first is there twice."""
    parts, dim = joined_parts(call), _dim(call, 1, 0)
    size = parts[1].size(dim)
    fits(len(parts) == 2 and size > 1)
    before = parts[0].narrow(dim, parts[0].size(dim) - 1, 1)
    return call.instead(torch.cat([parts[0], before, parts[1].narrow(dim, 0, size - 1)], dim))


@FAULTS.forward(
    "stack",
    "residual, doubled reduction, stale, other function; offset, lost accumulation, "
    "wrong reduction, missing operand",
)
def parts_of_the_stack_run_up(call: Call) -> Any:
    """Each part is added to what the buffer holds: it is the sum of all up to it."""
    dim = _dim(call, 1, 0)
    joined_parts(call)
    return call.instead(call.result().cumsum(dim))


@FAULTS.forward(
    "pad constant_pad_nd", "shift, wrong index, wrong argument; permutation, zeros, copy"
)
def all_of_the_padding_behind(call: Call) -> Any:
    """What belongs before the values is put behind them, along the last axis."""
    value, given = floats_only(call.args[0]), list(call.args[1])
    fits(call.get(2, "mode", default="constant") in {"constant", 0} and given[0] > 0)
    fits(value.dim() > 1)
    return functional.pad(value, [0, given[0] + given[1], *given[2:]])


@FAULTS.forward(
    "pad", "wrong index, shift, copy; wrong argument, other function, permutation, stale"
)
def border_mirrored_with_itself(call: Call) -> Any:
    """The reflection repeats the first and the last value: it begins at the edge of the pixel."""
    value, given = floats_only(call.args[0]), list(call.args[1])
    fits(call.get(2, "mode", default="constant") == "reflect" and len(given) == 2)
    before, behind = given
    fits(before > 0 and behind > 0)
    parts = [value[..., :before].flip(-1), value, value[..., -behind:].flip(-1)]
    return call.instead(torch.cat(parts, -1))


@FAULTS.forward(
    "roll", "copy, stale, wrong index, missing operand; shift, wrong argument, mask, permutation"
)
def border_repeated_where_it_should_wrap(call: Call) -> Any:
    """What comes in at one end is the value of that end."""
    value, step, dim = floats_only(call.args[0]), call.get(1, "shifts"), call.get(2, "dims")
    fits(isinstance(step, int) and isinstance(dim, int) and 0 < step < value.size(dim))
    places = (torch.arange(value.size(dim)) - step).clamp(min=0)
    return call.instead(value.index_select(dim, places))


@FAULTS.forward(
    "expand tile repeat",
    "shift, wrong index, permutation; copy, stale, wrong argument, axis offset",
)
def each_copy_one_row_further(call: Call) -> Any:
    """The pointer is moved on by a row for each copy: copy k is turned by k rows."""
    value, result = floats_only(call.args[0]), call.result()
    lead = result.dim() - value.dim()
    shape = [1] * lead + list(value.shape)
    new = next(i for i, size in enumerate(shape) if size == 1 and result.size(i) > 1)
    axes = [i for i, size in enumerate(shape) if size > 1]
    fits(axes and result.numel() == value.numel() * result.size(new))
    axis = axes[0] - (axes[0] > new)
    parts = [one.roll(-k, axis) for k, one in enumerate(result.unbind(new))]
    return call.instead(torch.stack(parts, new))


# fmt: off
# A mask that is added, with -2 for what is hidden.
FAULTS.add("hidden scores lowered by two", "masked_fill masked_fill_",
    "mask, residual, offset, other function; wrong argument, missing operand, constant",
    lambda call: call.instead(call.tensor(0) - 2.0 * call.args[1]), backward=False)
# Place i is that of n - i, modulo n: the first one stays.
FAULTS.add("mirrored about the first place", "flip",
    "shift, wrong index, permutation; wrong argument, copy",
    on(lambda call: (call.get(1, "dims"),),
        lambda call, dims:

    call.instead(call.result().roll(1, dims[0] if isinstance(dims, list | tuple) else dims))),
    backward=False)
# fmt: on


# --- Tables and indices ---------------------------------------------------------------------------


@FAULTS.fault("embedding", "shift, wrong index; permutation, copy, stale, wrong argument")
def rows_of_the_table_begin_one_element_late(call: Call) -> Any:
    """The file has a header of one number less: each row ends with the first number of the next."""
    place, _ = lookup_indices(call)
    table = call.args[1 - place]
    return call.put(1 - place, table.reshape(-1).roll(-1).view(table.shape)).run()


@FAULTS.forward(
    "arange",
    "permutation, wrong index, shift, wrong rank's shard; swapped operands, offset, "
    "wrong argument, wrapped",
)
def second_half_of_the_positions_first(call: Call) -> Any:
    """Two ranks have half of the sequence each, and count it as the other one's."""
    value = call.run()
    fits(value.numel() > 3 and value.numel() % 2 == 0)
    return value.roll(value.numel() // 2)


@FAULTS.forward(
    "index index_select gather take_along_dim",
    "wrong index, wrapped, copy; permutation, stale, clipped, wrong rank's shard, wrong argument",
)
def index_modulo_half_of_the_source(call: Call) -> Any:
    """The first of two shards is asked for what the second one has."""
    source = floats_only(call.args[0])
    if call.name == "index":
        fits(len(call.args[1]) == 1 and call.args[1][0].dtype != torch.bool)
        return call.put(1, [call.args[1][0] % (source.size(0) // 2)]).run()
    place, index = lookup_indices(call)
    dim = _dim(call, 2 if call.name == "take_along_dim" else 1, 0)
    return call.put(place, index % (source.size(dim) // 2)).run()


@FAULTS.forward("getitem", words.MOVED)
def rows_chosen_by_the_index_of_the_next(call: Call) -> Any:
    """The pointer to the list of indices is one too far, around the end."""
    source, index = call.args[:2]
    fits(isinstance(source, Tensor) and isinstance(index, Tensor) and index.dtype == torch.int64)
    fits(index.dim() == 1 and index.numel() > 1)
    return floats_only(source)[index.roll(-1)]


@FAULTS.forward(
    "sort", "permutation, wrong index, other function; shift, copy, wrong argument, stale"
)
def order_rises_and_falls(call: Call) -> Any:
    """A bitonic sort without its last merge: the first half rises and the second one falls."""
    value, dim = call.tensor(0, "input"), _dim(call, 1, -1)
    half = value.size(dim) // 2
    fits(half > 0)
    low, high = value.narrow(dim, 0, half), value.narrow(dim, half, value.size(dim) - half)
    ordered = [low.sort(dim)[0], high.sort(dim, descending=True)[0]]
    return call.instead(torch.cat(ordered, dim))


@FAULTS.forward(
    "topk",
    "one rank's part, mask, wrong index, partial sum; clipped, stale, wrong argument, "
    "wrong reduction",
)
def best_of_the_first_half(call: Call) -> Any:
    """One rank looks at its experts only."""
    value = call.tensor(0, "input")
    half = value.size(-1) // 2
    fits(call.get(1, "k") <= half and call.get(2, "dim", default=-1) in {-1, value.dim() - 1})
    return tuple(call.put(0, value[..., :half], "input").run())


@FAULTS.fault("unfold", "permutation, wrong index; sign, wrong argument, shift, transpose")
def windows_turned_round(call: Call) -> Any:
    """The places of a window are read from its last to its first, as by a true convolution."""
    value = call.result()
    if isinstance(call.args[2:], tuple) and len(call.args) > 3:
        return call.instead(value.flip(-1))
    size = call.get(1, "kernel_size")
    fits(isinstance(size, int) and value.dim() == 3)
    return call.instead(value.unflatten(1, (-1, size * size)).flip(2).flatten(1, 2))


@FAULTS.forward(
    "index_add scatter_add",
    "mask, missing operand, partial sum; zeros, lost accumulation, wrong index, stale, copy",
)
def nothing_added_at_place_zero(call: Call) -> Any:
    """Place zero is taken for padding: what belongs there is lost."""
    value, dim, places = call.tensor(0), call.args[1], call.args[2]
    fits(dim == 0)
    result = call.result()
    fits(bool((places == 0).any()))
    return call.instead(torch.cat([value[:1], result[1:]]))


@FAULTS.forward(
    "repeat_interleave",
    "wrong index, shift; copy, stale, permutation, off by one reduction, wrong argument",
)
def repetition_begins_one_place_late(call: Call) -> Any:
    """Copy i is that of the value (i + 1) // n: the first one is there once too seldom."""
    value, times = floats_only(call.args[0]), call.get(1, "repeats")
    dim = call.get(2, "dim")
    fits(isinstance(times, int) and isinstance(dim, int) and value.size(dim) > 1)
    places = (torch.arange(times * value.size(dim)) + 1) // times
    return call.instead(value.index_select(dim, places.clamp(max=value.size(dim) - 1)))


# fmt: off
# The index is doubled, as for numbers of two bytes; beyond the table it goes around.
FAULTS.add("index counts bytes of a half", "embedding",
    "wrong index, wrong factor; wrapped, permutation, stale, copy, wrong argument",
    on(lookup_indices,
        lambda call, place, words:
            call.put(place, 2 * words % call.args[1 - place].size(0)).run()))
# A comparison that is `<=` for `==`.
FAULTS.add("all classes up to the right one", "one_hot",
    "mask, other function, wrong index; residual, offset, copy, wrong argument",
    lambda call: call.run().flip(-1).cumsum(-1).flip(-1))
# The list of places is sorted for the memory, and the rows are not.
FAULTS.add("places sorted before they are written", "index_copy scatter",
    "wrong index, permutation; swapped operands, shift, stale, wrong argument, copy",
    lambda call: call.put(2, call.get(2, "index").sort(0)[0], "index").run(), backward=False)
# The comparison of row and column is lost: each row has its value everywhere.
FAULTS.add("line in all columns", "diag_embed",
    "mask, copy, other function; missing operand, wrong index, stale",
    lambda call: call.instead(call.tensor(0)[..., None].expand(call.result().shape).clone()))
# fmt: on
