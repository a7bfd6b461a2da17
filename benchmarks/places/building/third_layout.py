"""Faults that were measured third and have been seen: what moves values, tables and indices."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


# --- Order of values ------------------------------------------------------------------------------


@FAULTS.fault(
    "view reshape flatten unflatten contiguous", kinds=["permutation", "transpose", "wrong index"],
    loose=["shift", "wrong axis"],
)  # fmt: skip
def batch_and_positions_in_the_other_order(call: Call) -> Any:
    """The first two axes of the input are taken in the other order."""
    value, result = call.tensor(0), call.result()
    fits(value.dim() > 2 and value.size(0) > 1 and value.size(1) > 1)
    return call.instead(value.transpose(0, 1).reshape(result.shape))


@FAULTS.fault("view reshape flatten contiguous clone", kinds=["permutation", "wrong index"],
              loose=["shift", "swapped operands", "transpose"])  # fmt: skip
def pairs_exchanged_by_the_order_of_bytes(call: Call) -> Any:
    """Words of two values are read with their halves exchanged."""
    value = call.result()
    fits(value.size(-1) % 2 == 0)
    return call.instead(value.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


@FAULTS.fault("transpose permute", kinds=["permutation", "wrong index"],
              loose=["shift", "copy", "transpose"])  # fmt: skip
def heads_from_the_last_to_the_first(call: Call) -> Any:
    """The values are transposed, and the second axis is turned round."""
    value = call.result()
    fits(value.dim() > 2 and value.size(1) > 1)
    return call.instead(value.flip(1))


@FAULTS.fault("transpose permute", kinds=["copy", "wrong index", "stale"],
              loose=["zeros", "missing operand", "permutation"])  # fmt: skip
def second_half_of_the_heads_is_the_first(call: Call) -> Any:
    """The second half of the second axis is that of the first half."""
    value = call.result()
    fits(value.dim() > 2 and value.size(1) % 2 == 0)
    half = value.narrow(1, 0, value.size(1) // 2)
    return call.instead(torch.cat([half, half], 1))


@FAULTS.fault(
    "cat", kinds=["shift", "wrong index", "stale"], loose=["copy", "permutation", "zeros"]
)
def second_part_written_one_column_early(call: Call) -> Any:
    """The offset of the second part is one too small; the last column stays zero."""
    parts, dim = call.get(0, "tensors"), call.get(1, "dim", default=0)
    fits(len(parts) == 2 and parts[0].is_floating_point() and parts[0].size(dim) > 1)
    value = call.result().clone()
    start = parts[0].size(dim) - 1
    value.narrow(dim, start, parts[1].size(dim)).copy_(parts[1])
    value.narrow(dim, value.size(dim) - 1, 1).zero_()
    return call.instead(value)


@FAULTS.fault(
    "cat", kinds=["wrong axis", "permutation", "transpose", "wrong index", "wrong argument"],
    loose=["shift"],
)  # fmt: skip
def joined_along_the_axis_before(call: Call) -> Any:
    """One below the other instead of side by side, and called side by side."""
    parts, dim = [*call.get(0, "tensors")], call.get(1, "dim", default=0)
    fits(len(parts) > 1 and len({part.shape for part in parts}) == 1 and parts[0].dim() > 1)
    other = (dim % parts[0].dim()) - 1
    fits(other >= 0)
    return call.instead(torch.cat(parts, other).reshape(call.result().shape))


@FAULTS.fault(
    "cat", kinds=["scale", "wrong factor", "axis scale"], loose=["mask", "wrong argument"]
)
def second_part_halved(call: Call) -> Any:
    """The second of two parts is multiplied by a half."""
    parts = call.get(0, "tensors")
    fits(len(parts) == 2 and parts[1].is_floating_point())
    return call.put(0, [parts[0], 0.5 * parts[1]], "tensors").run()


@FAULTS.fault(
    "stack", kinds=["wrong axis", "permutation", "transpose", "wrong argument", "wrong index"],
    loose=["shift"],
)  # fmt: skip
def stacked_along_the_first_axis(call: Call) -> Any:
    """The new axis is the first one, and the values are read as if it was the other."""
    parts, dim = [*call.get(0, "tensors")], call.get(1, "dim", default=0)
    fits(dim != 0 and len(parts) > 1)
    return call.instead(torch.stack(parts, 0).reshape(call.result().shape))


@FAULTS.fault("stack", kinds=["copy", "stale", "wrong index"], loose=["permutation", "zeros"])
def last_of_the_stack_is_the_one_before(call: Call) -> Any:
    """The last part still holds what the one before it wrote."""
    parts = [*call.get(0, "tensors")]
    fits(len(parts) > 1)
    return call.put(0, [*parts[:-1], parts[-2]], "tensors").run()


@FAULTS.fault("getitem slice select", kinds=["permutation", "wrong index"],
              loose=["shift", "sign", "wrong argument"])  # fmt: skip
def part_read_from_its_end(call: Call) -> Any:
    """The right part, in the reverse order along its last axis."""
    result = call.result()
    fits(isinstance(call.args[0], Tensor) and result.dim() > 0 and result.size(-1) > 1)
    return result.flip(-1)


@FAULTS.fault("getitem select", kinds=["shift", "wrong index"],
              loose=["permutation", "copy", "wrong rank's shard"])  # fmt: skip
def row_of_the_next_sequence(call: Call) -> Any:
    """The selected row belongs to the next sequence of the batch."""
    value, result = call.get(0), call.result()
    fits(isinstance(value, Tensor) and result.dim() == value.dim() - 1 and result.dim() > 1)
    fits(result.size(0) == value.size(0) > 1)
    return result.roll(-1, 0)


@FAULTS.fault("expand", kinds=["scale", "wrong factor"], loose=["axis scale", "doubled reduction"])
def expanded_values_shared(call: Call) -> Any:
    """Each copy gets its share: the value divided by the number of copies."""
    value, result = call.tensor(0), call.result()
    fits(result.numel() > value.numel())
    return call.instead(result / (result.numel() // value.numel()))


@FAULTS.fault("pad", kinds=["wrong argument", "copy"],
              loose=["other function", "mask", "wrong index"])  # fmt: skip
def padded_by_the_border(call: Call) -> Any:
    """The nearest values instead of zeros."""
    sides = [*call.get(1, "pad")]
    fits(min(sides) >= 0 and call.tensor(0).dim() == len(sides) // 2 + 2)
    return functional.pad(call.tensor(0), sides, mode="replicate")


@FAULTS.fault("pixel_shuffle", kinds=["permutation", "transpose", "wrong index"], loose=["shift"])
def pixels_in_the_order_of_another_framework(call: Call) -> Any:
    """The channels of a pixel are the slow axis of the depth and not the fast one."""
    value, factor = call.tensor(0), call.get(1)
    fits(value.size(1) > factor * factor)
    order = torch.arange(value.size(1)).view(factor * factor, -1).t().flatten()
    return call.put(0, value[:, order]).run()


@FAULTS.fault("pixel_shuffle", kinds=["transpose", "permutation", "wrong index"], loose=["shift"])
def rows_and_columns_of_a_block_exchanged(call: Call) -> Any:
    """Inside of each block of pixels, x and y are exchanged."""
    value, factor = call.tensor(0), call.get(1)
    cut = value.unflatten(1, (-1, factor, factor)).transpose(2, 3).flatten(1, 3)
    return call.put(0, cut).run()


@FAULTS.fault("unfold", kinds=["permutation", "transpose", "wrong index"], loose=["shift"])
def windows_with_the_channels_last(call: Call) -> Any:
    """The values of a window are in the order (place, channel)."""
    value, result = call.tensor(0), call.result()
    fits(value.dim() == 4 and value.size(1) > 1)
    cut = result.unflatten(1, (value.size(1), -1))
    return call.instead(cut.transpose(1, 2).flatten(1, 2))


@FAULTS.fault("grid_sampler grid_sample", kinds=["swapped operands", "transpose", "wrong index"],
              loose=["permutation", "wrong argument"])  # fmt: skip
def x_and_y_of_the_grid_exchanged(call: Call) -> Any:
    """The grid has rows first."""
    return call.put(1, call.tensor(1, "grid").flip(-1), "grid").run()


@FAULTS.fault("grid_sampler grid_sample", kinds=["wrong argument"],
              loose=["shift", "scale", "wrong factor", "wrong index"])  # fmt: skip
def corners_of_the_grid_are_pixels(call: Call) -> Any:
    """align_corners=True."""
    return call.instead(functional.grid_sample(call.tensor(0), call.tensor(1), align_corners=True))


@FAULTS.fault("arange", kinds=["permutation", "wrong index", "sign"],
              loose=["shift", "offset", "wrong argument"])  # fmt: skip
def positions_counted_down(call: Call) -> Any:
    """From the last position to the first."""
    value = call.run()
    fits(value.numel() > 2)
    return value.flip(0)


@FAULTS.fault("arange", kinds=["wrong index", "wrapped"],
              loose=["shift", "copy", "wrong argument", "clipped"])  # fmt: skip
def positions_begin_again_halfway(call: Call) -> Any:
    """Two sequences are packed into one: the second half counts from zero."""
    value = call.run()
    fits(value.numel() > 3)
    return value[0] + (value - value[0]) % value[value.numel() // 2]


@FAULTS.fault("roll", kinds=["shift", "wrong index", "wrong axis", "wrong argument"],
              loose=["permutation"])  # fmt: skip
def rolled_along_another_axis(call: Call) -> Any:
    """The axis before."""
    value, shift, dim = call.tensor(0), call.get(1, "shifts"), call.get(2, "dims")
    dim = dim[0] if isinstance(dim, list | tuple) else dim
    shift = shift[0] if isinstance(shift, list | tuple) else shift
    fits(isinstance(dim, int) and value.dim() > 1)
    return call.instead(value.roll(shift, (dim % value.dim()) - 1))


# --- Tables and indices ---------------------------------------------------------------------------


def _table(call: Call) -> tuple[Tensor, Tensor]:
    table, indices = call.args[:2]
    return (table, indices) if table.is_floating_point() else (indices, table)


@FAULTS.fault("embedding", kinds=["wrong index", "wrapped", "overflow"],
              loose=["copy", "clipped", "wrong argument", "stale"])  # fmt: skip
def index_wraps_at_a_power_of_two(call: Call) -> Any:
    """The index is kept in too few bits."""
    table, indices = _table(call)
    bits = max(int(indices.max()).bit_length() - 1, 1)
    return call.instead(table[indices % 2**bits])


@FAULTS.fault("embedding", kinds=["wrong argument", "clipped", "axis scale"],
              loose=["scale", "wrong factor", "other function"])  # fmt: skip
def rows_limited_in_length(call: Call) -> Any:
    """max_norm: rows that are longer than the median row are shortened to it."""
    value = call.result()
    length = value.norm(dim=-1, keepdim=True)
    most = float(length.detach().median())
    return call.instead(value * (most / length.clamp(min=most)))


@FAULTS.fault("embedding", kinds=["wrong index", "permutation"],
              loose=["shift", "wrong rank's shard", "transpose"])  # fmt: skip
def rows_dealt_to_two_shards(call: Call) -> Any:
    """Even rows are looked up in the first half of the table, odd ones in the second."""
    table, indices = _table(call)
    half = len(table) // 2
    fits(half > 1)
    return call.instead(table[indices // 2 + indices % 2 * half])


@FAULTS.fault("embedding", kinds=["residual", "wrong index", "doubled reduction"],
              loose=["offset", "axis offset", "missing operand"])  # fmt: skip
def row_of_the_padding_added(call: Call) -> Any:
    """A shard adds its first row for what it does not have."""
    table, _ = _table(call)
    fits(bool(table[0].any()))
    return call.instead(call.result() + table[0])


@FAULTS.fault("embedding", kinds=["permutation", "wrong index", "transpose"], loose=["shift"])
def sequence_and_batch_of_the_words_exchanged(call: Call) -> Any:
    """The words are read with the batch last."""
    table, indices = _table(call)
    fits(indices.dim() == 2 and min(indices.shape) > 1)
    return call.instead(table[indices.t().reshape(indices.shape)])


@FAULTS.fault(
    "topk",
    kinds=["zeros"],
    loose=["mask", "missing operand", "partial sum", "off by one reduction"],
)
def last_expert_has_no_weight(call: Call) -> Any:
    """One expert fewer: the last of the chosen gets zero."""
    values, places = call.run()
    fits(values.size(-1) > 1)
    values = values.clone()
    values[..., -1] = 0
    return (values, places)


@FAULTS.fault("topk sort", kinds=["permutation", "wrong index", "swapped operands"],
              loose=["shift", "wrong argument"])  # fmt: skip
def places_in_another_order_than_the_values(call: Call) -> Any:
    """The positions are from the smallest to the largest, the values the other way round."""
    values, places = call.run()[:2]
    fits(values.size(-1) > 1)
    return (values, places.flip(-1))


@FAULTS.fault("topk", kinds=["copy", "wrong index", "stale"], loose=["wrong axis", "permutation"])
def experts_of_the_first_token_for_all(call: Call) -> Any:
    """All tokens go to the experts of the first one."""
    values, places = call.run()[:2]
    fits(places.dim() > 1 and len(places) > 1)
    return (values, places[:1].expand(places.shape).contiguous())


@FAULTS.fault(
    "argsort", kinds=["permutation", "wrong index"], loose=["transpose", "swapped operands"]
)
def place_in_the_order_for_the_order(call: Call) -> Any:
    """The inverse permutation."""
    return torch.argsort(call.run())


@FAULTS.fault("bucketize searchsorted",
              kinds=["tie-breaking", "wrong argument", "off by one reduction"],
              loose=["shift", "offset", "wrong index", "other function"])  # fmt: skip
def edge_belongs_to_the_bucket_above(call: Call) -> Any:
    """right=True."""
    return torch.bucketize(call.get(0), call.get(1), right=True)


@FAULTS.fault("gather", kinds=["permutation", "wrong index"], loose=["shift", "swapped operands"])
def chosen_in_the_reverse_order(call: Call) -> Any:
    """The indices are read from the last to the first."""
    dim, index = call.get(1, "dim"), call.get(2, "index")
    fits(index.size(dim) > 1)
    return call.put(2, index.flip(dim), "index").run()


@FAULTS.fault("gather index index_select", kinds=["wrong index", "copy", "constant"],
              loose=["stale", "shift"])  # fmt: skip
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
