"""Faults that were measured third and have been seen: what moves values, tables and indices."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, even, on, operand, result, tensors
from benchmarks.places.parts import table_and_indices
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


# --- Order of values ------------------------------------------------------------------------------


@FAULTS.fault("transpose permute", "copy, wrong index, stale; zeros, missing operand, permutation")
def second_half_of_the_heads_is_the_first(call: Call) -> Any:
    """The second half of the second axis is that of the first half."""
    value = call.result()
    fits(value.dim() > 2 and value.size(1) % 2 == 0)
    half = value.narrow(1, 0, value.size(1) // 2)
    return call.instead(torch.cat([half, half], 1))


@FAULTS.fault("cat", "shift, wrong index, stale; copy, permutation, zeros")
def second_part_written_one_column_early(call: Call) -> Any:
    """The offset of the second part is one too small; the last column stays zero."""
    parts, dim = call.get(0, "tensors"), call.get(1, "dim", default=0)
    fits(len(parts) == 2 and parts[0].is_floating_point() and parts[0].size(dim) > 1)
    value = call.result().clone()
    start = parts[0].size(dim) - 1
    value.narrow(dim, start, parts[1].size(dim)).copy_(parts[1])
    value.narrow(dim, value.size(dim) - 1, 1).zero_()
    return call.instead(value)


@FAULTS.fault("cat", "wrong axis, permutation, transpose, wrong index, wrong argument; shift")
def joined_along_the_axis_before(call: Call) -> Any:
    """One below the other instead of side by side, and called side by side."""
    parts, dim = [*call.get(0, "tensors")], call.get(1, "dim", default=0)
    fits(len(parts) > 1 and len({part.shape for part in parts}) == 1 and parts[0].dim() > 1)
    other = (dim % parts[0].dim()) - 1
    fits(other >= 0)
    return call.instead(torch.cat(parts, other).reshape(call.result().shape))


@FAULTS.fault("stack", "wrong axis, permutation, transpose, wrong argument, wrong index; shift")
def stacked_along_the_first_axis(call: Call) -> Any:
    """The new axis is the first one, and the values are read as if it was the other."""
    parts, dim = [*call.get(0, "tensors")], call.get(1, "dim", default=0)
    fits(dim != 0 and len(parts) > 1)
    return call.instead(torch.stack(parts, 0).reshape(call.result().shape))


@FAULTS.fault("getitem slice select", "permutation, wrong index; shift, sign, wrong argument")
def part_read_from_its_end(call: Call) -> Any:
    """The right part, in the reverse order along its last axis."""
    result = call.result()
    fits(isinstance(call.args[0], Tensor) and result.dim() > 0 and result.size(-1) > 1)
    return result.flip(-1)


@FAULTS.fault("getitem select", "shift, wrong index; permutation, copy, wrong rank's shard")
def row_of_the_next_sequence(call: Call) -> Any:
    """The selected row belongs to the next sequence of the batch."""
    value, result = call.get(0), call.result()
    fits(isinstance(value, Tensor) and result.dim() == value.dim() - 1 and result.dim() > 1)
    fits(result.size(0) == value.size(0) > 1)
    return result.roll(-1, 0)


@FAULTS.fault("pad", "wrong argument, copy; other function, mask, wrong index")
def padded_by_the_border(call: Call) -> Any:
    """The nearest values instead of zeros."""
    sides = [*call.get(1, "pad")]
    fits(min(sides) >= 0 and call.tensor(0).dim() == len(sides) // 2 + 2)
    return functional.pad(call.tensor(0), sides, mode="replicate")


@FAULTS.fault("pixel_shuffle", "permutation, transpose, wrong index; shift")
def pixels_in_the_order_of_another_framework(call: Call) -> Any:
    """The channels of a pixel are the slow axis of the depth and not the fast one."""
    value, factor = call.tensor(0), call.get(1)
    fits(value.size(1) > factor * factor)
    order = torch.arange(value.size(1)).view(factor * factor, -1).t().flatten()
    return call.put(0, value[:, order]).run()


@FAULTS.fault("pixel_shuffle", "transpose, permutation, wrong index; shift")
def rows_and_columns_of_a_block_exchanged(call: Call) -> Any:
    """Inside of each block of pixels, x and y are exchanged."""
    value, factor = call.tensor(0), call.get(1)
    cut = value.unflatten(1, (-1, factor, factor)).transpose(2, 3).flatten(1, 3)
    return call.put(0, cut).run()


@FAULTS.fault("grid_sampler grid_sample", "wrong argument; shift, scale, wrong factor, wrong index")
def corners_of_the_grid_are_pixels(call: Call) -> Any:
    """align_corners=True."""
    return call.instead(functional.grid_sample(call.tensor(0), call.tensor(1), align_corners=True))


@FAULTS.fault("arange", "permutation, wrong index, sign; shift, offset, wrong argument")
def positions_counted_down(call: Call) -> Any:
    """From the last position to the first."""
    value = call.run()
    fits(value.numel() > 2)
    return value.flip(0)


@FAULTS.fault("arange", "wrong index, wrapped; shift, copy, wrong argument, clipped")
def positions_begin_again_halfway(call: Call) -> Any:
    """Two sequences are packed into one: the second half counts from zero."""
    value = call.run()
    fits(value.numel() > 3)
    return value[0] + (value - value[0]) % value[value.numel() // 2]


@FAULTS.fault("roll", "shift, wrong index, wrong axis, wrong argument; permutation")
def rolled_along_another_axis(call: Call) -> Any:
    """The axis before."""
    value, shift, dim = call.tensor(0), call.get(1, "shifts"), call.get(2, "dims")
    dim = dim[0] if isinstance(dim, list | tuple) else dim
    shift = shift[0] if isinstance(shift, list | tuple) else shift
    fits(isinstance(dim, int) and value.dim() > 1)
    return call.instead(value.roll(shift, (dim % value.dim()) - 1))


# fmt: off
# The first two axes of the input are taken in the other order.
FAULTS.add("batch and positions in the other order", "view reshape flatten unflatten contiguous",
    "permutation, transpose, wrong index; shift, wrong axis",
    on(tensors(0),
        lambda call, value: call.instead(value.transpose(0, 1).reshape(call.result().shape)),
        where=lambda value: value.dim() > 2 and value.size(0) > 1 and (value.size(1) > 1)))
# Words of two values are read with their halves exchanged.
FAULTS.add("pairs exchanged by the order of bytes", "view reshape flatten contiguous clone",
    "permutation, wrong index; shift, swapped operands, transpose",
    result(lambda v: v.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), where=even(-1)))
# The values are transposed, and the second axis is turned round.
FAULTS.add("heads from the last to the first", "transpose permute",
    "permutation, wrong index; shift, copy, transpose",
    result(lambda v: v.flip(1), where=lambda v: v.dim() > 2 and v.size(1) > 1))
# The second of two parts is multiplied by a half.
FAULTS.add("second part halved", "cat", "scale, wrong factor, axis scale; mask, wrong argument",
    on(lambda call: (call.get(0, "tensors"),),
        lambda call, parts: call.put(0, [parts[0], 0.5 * parts[1]], "tensors").run(),
        where=lambda parts: len(parts) == 2 and parts[1].is_floating_point()))
# The last part still holds what the one before it wrote.
FAULTS.add("last of the stack is the one before", "stack",
    "copy, stale, wrong index; permutation, zeros",
    on(lambda call: ([*call.get(0, "tensors")],),
        lambda call, parts: call.put(0, [*parts[:-1], parts[-2]], "tensors").run(),
        where=lambda parts: len(parts) > 1))
# Each copy gets its share: the value divided by the number of copies.
FAULTS.add("expanded values shared", "expand", "scale, wrong factor; axis scale, doubled reduction",
    computed(lambda call: (call.tensor(0), call.result()),
        lambda value, result: result / (result.numel() // value.numel()),
        where=lambda value, result: result.numel() > value.numel()))
# The values of a window are in the order (place, channel).
FAULTS.add("windows with the channels last", "unfold", "permutation, transpose, wrong index; shift",
    on(tensors(0),
        lambda call, value:

    call.instead(call.result().unflatten(1, (value.size(1), -1)).transpose(1, 2).flatten(1, 2)),
        where=lambda value: value.dim() == 4 and value.size(1) > 1))
# The grid has rows first.
FAULTS.add("x and y of the grid exchanged", "grid_sampler grid_sample",
    "swapped operands, transpose, wrong index; permutation, wrong argument",
    operand(1, lambda v: v.flip(-1), "grid"))
# fmt: on


# --- Tables and indices ---------------------------------------------------------------------------


@FAULTS.fault(
    "embedding", "wrong argument, clipped, axis scale; scale, wrong factor, other function"
)
def rows_limited_in_length(call: Call) -> Any:
    """max_norm: rows that are longer than the median row are shortened to it."""
    value = call.result()
    length = value.norm(dim=-1, keepdim=True)
    most = float(length.detach().median())
    return call.instead(value * (most / length.clamp(min=most)))


@FAULTS.fault("embedding", "wrong index, permutation; shift, wrong rank's shard, transpose")
def rows_dealt_to_two_shards(call: Call) -> Any:
    """Even rows are looked up in the first half of the table, odd ones in the second."""
    table, indices = table_and_indices(call)
    half = len(table) // 2
    fits(half > 1)
    return call.instead(table[indices // 2 + indices % 2 * half])


@FAULTS.fault("topk", "zeros; mask, missing operand, partial sum, off by one reduction")
def last_expert_has_no_weight(call: Call) -> Any:
    """One expert fewer: the last of the chosen gets zero."""
    values, places = call.run()
    fits(values.size(-1) > 1)
    values = values.clone()
    values[..., -1] = 0
    return (values, places)


@FAULTS.fault("topk sort", "permutation, wrong index, swapped operands; shift, wrong argument")
def places_in_another_order_than_the_values(call: Call) -> Any:
    """The positions are from the smallest to the largest, the values the other way round."""
    values, places = call.run()[:2]
    fits(values.size(-1) > 1)
    return (values, places.flip(-1))


@FAULTS.fault("topk", "copy, wrong index, stale; wrong axis, permutation")
def experts_of_the_first_token_for_all(call: Call) -> Any:
    """All tokens go to the experts of the first one."""
    values, places = call.run()[:2]
    fits(places.dim() > 1 and len(places) > 1)
    return (values, places[:1].expand(places.shape).contiguous())


@FAULTS.fault("gather index index_select", "wrong index, copy, constant; stale, shift")
def index_zero_for_odd_places(call: Call) -> Any:
    """Every second index is not loaded and is zero."""
    value = call.tensor(0)
    place = 1 if call.name == "index" else 2
    index = call.args[place]
    if call.name == "index":
        fits(len(index) == 1 and index[0].dtype == torch.int64)
        index = index[0]
    changed = index.clone()
    changed.view(-1)[1::2] = 0
    return value[changed] if call.name == "index" else call.put(place, changed).run()


# fmt: off
# The index is kept in too few bits.
FAULTS.add("index wraps at a power of two", "embedding",
    "wrong index, wrapped, overflow; copy, clipped, wrong argument, stale",
    computed(table_and_indices,
        lambda table, indices: table[indices % 2 ** max(int(indices.max()).bit_length() - 1, 1)]))
# A shard adds its first row for what it does not have.
FAULTS.add("row of the padding added", "embedding",
    "residual, wrong index, doubled reduction; offset, axis offset, missing operand",
    on(table_and_indices, lambda call, table, *_: call.instead(call.result() + table[0]),
        where=lambda table, *_: bool(table[0].any())))
# The words are read with the batch last.
FAULTS.add("sequence and batch of the words exchanged", "embedding",
    "permutation, wrong index, transpose; shift",
    computed(table_and_indices,
        lambda table, indices: table[indices.t().reshape(indices.shape)],
        where=lambda _, indices: indices.dim() == 2 and min(indices.shape) > 1))
# The inverse permutation.
FAULTS.add("place in the order for the order", "argsort",
    "permutation, wrong index; transpose, swapped operands", lambda call: torch.argsort(call.run()))
# right=True.
FAULTS.add("edge belongs to the bucket above", "bucketize searchsorted",
    "tie-breaking, wrong argument, off by one reduction; shift, offset, wrong index, "
    "other function", lambda call: torch.bucketize(call.get(0), call.get(1), right=True))
# The indices are read from the last to the first.
FAULTS.add("chosen in the reverse order", "gather",
    "permutation, wrong index; shift, swapped operands",
    on(lambda call: (call.get(1, "dim"), call.get(2, "index")),
        lambda call, dim, index: call.put(2, index.flip(dim), "index").run(),
        where=lambda dim, index: index.size(dim) > 1))
# fmt: on
