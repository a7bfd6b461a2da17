"""Faults for building: embeddings, indices, layout, pooling."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


@FAULTS.fault("embedding", kinds=["shift", "wrong index"], loose=["permutation", "copy"])
def next_row_of_the_table(call: Call) -> Any:
    """The index is one too large."""
    places = [0, 1] if call.get(0).is_floating_point() else [1, 0]
    table, indices = (call.args[place] for place in places)
    return call.instead(table[(indices + 1) % len(table)])


@FAULTS.fault("roll flip permute transpose", kinds=["sign", "wrong factor", "scale"])
def one_value_negated_on_the_way(call: Call) -> Any:
    """A copy that negates what it copies."""
    return call.instead(-call.result())


@FAULTS.fault(
    "split chunk unbind", kinds=["stale", "copy", "wrong index"], loose=["permutation", "shift"]
)
def first_part_twice(call: Call) -> Any:
    """The second part is the first one."""
    parts = call.run()
    fits(len(parts) > 1 and parts[0].shape == parts[1].shape and parts[0].is_floating_point())
    return (parts[0], parts[0].clone(), *parts[2:])


@FAULTS.fault("conv2d conv1d convolution", kinds=["wrong argument"], loose=["wrong index", "mask"])
def padding_repeats_the_border(call: Call) -> Any:
    """The border is padded with the nearest values instead of zeros."""
    value, padding = call.tensor(0, "input"), call.get(4, "padding")
    if isinstance(padding, int):
        padding = [padding] * (value.dim() - 2)
    fits(call.name != "convolution" or not call.args[6])
    fits(padding and not isinstance(padding, str) and any(padding))
    sides = [side for size in reversed(padding) for side in (size, size)]
    wider = functional.pad(value, sides, mode="replicate")
    return call.put(0, wider, "input").put(4, [0] * len(padding), "padding").run()


@FAULTS.fault(
    "max_pool2d avg_pool2d adaptive_avg_pool2d",
    kinds=["shift", "wrong index"],
    loose=["permutation"],
)
def pooled_one_further(call: Call) -> Any:
    """The windows begin one too late."""
    return call.put(0, call.tensor(0).roll(-1, -1)).run()


@FAULTS.fault("cat", kinds=["permutation", "swapped operands", "shift"])
def concatenated_in_the_other_order(call: Call) -> Any:
    """b, a."""
    parts = call.get(0, "tensors")
    fits(len(parts) == 2 and parts[0].shape == parts[1].shape)
    return call.put(0, [parts[1], parts[0]], "tensors").run()


@FAULTS.fault("getitem", kinds=["shift", "wrong index"], loose=["wrong argument"])
def slice_off_by_one(call: Call) -> Any:
    """The slice begins and ends one later."""
    value, index = call.tensor(0), call.args[1]
    index = index if isinstance(index, tuple) else (index,)
    fits(any(isinstance(one, slice) and one != slice(None) for one in index))
    axis = next(i for i, one in enumerate(index) if isinstance(one, slice) and one != slice(None))
    if Ellipsis in index[:axis]:
        axis -= sum(one is not None for one in index)
    return value.roll(-1, axis)[index]


@FAULTS.fault(
    "slice select narrow", kinds=["shift", "wrong index"], loose=["wrong argument", "permutation"]
)
def begins_one_later(call: Call) -> Any:
    """A start that is one too large."""
    value, dim = call.tensor(0), call.get(1, "dim", default=0)
    fits(value.size(dim) > 1)
    return call.put(0, value.roll(-1, dim)).run()


@FAULTS.fault("gather index_select", kinds=["shift", "wrong index", "permutation"], loose=["copy"])
def index_shifted(call: Call) -> Any:
    """The index before."""
    value, dim, index = call.tensor(0), call.get(1, "dim"), call.get(2, "index")
    return call.put(2, (index - 1) % value.size(dim), "index").run()


@FAULTS.fault("embedding", kinds=["zeros"], loose=["mask", "wrong argument"])
def first_token_taken_for_padding(call: Call) -> Any:
    """Rows of the smallest index are zero."""
    table, indices = call.args[:2]
    if not table.is_floating_point():
        table, indices = indices, table
    return call.instead(call.result() * (indices != indices.min()).unsqueeze(-1))


@FAULTS.fault(
    "split chunk unbind",
    kinds=["permutation", "swapped operands", "wrong index"],
    loose=["shift", "copy"],
)
def parts_exchanged(call: Call) -> Any:
    """The first two results are exchanged."""
    parts = call.run()
    fits(len(parts) > 1 and parts[0].shape == parts[1].shape and parts[0].is_floating_point())
    return (parts[1], parts[0], *parts[2:])


@FAULTS.fault("topk sort", kinds=["other function"], loose=["shift", "permutation"])
def selected_by_magnitude(call: Call) -> Any:
    """The values in the order of their absolute values."""
    value = call.tensor(0)
    fits(bool((value < 0).any()))
    positions = call.put(0, value.abs()).run()[1]
    dim = call.get(2 if call.name == "topk" else 1, "dim", default=-1)
    return (value.gather(dim, positions), positions)


@FAULTS.fault("argmax", kinds=["tie-breaking"], loose=["other function"])
def last_of_equal_maxima(call: Call) -> Any:
    """Ties go to the last one."""
    value, dim = call.get(0), call.get(1, "dim")
    fits(isinstance(dim, int))
    return value.size(dim) - 1 - value.flip(dim).argmax(dim)


@FAULTS.fault("avg_pool2d", kinds=["wrong argument"], loose=["axis scale"])
def padding_counted_or_not(call: Call) -> Any:
    """The other value of count_include_pad."""
    return call.put(
        5, not call.get(5, "count_include_pad", default=True), "count_include_pad"
    ).run()


@FAULTS.fault("interpolate", kinds=["wrong argument"])
def corners_aligned(call: Call) -> Any:
    """The other value of align_corners."""
    fits(call.get(3, "mode", default="nearest") == "bilinear")
    return call.put(4, not call.get(4, "align_corners", default=False), "align_corners").run()


@FAULTS.fault(
    "cross_entropy nll_loss",
    kinds=["mask", "scale", "wrong factor"],
    loose=["off by one reduction", "wrong argument"],
)
def ignored_targets_counted(call: Call) -> Any:
    """The mean is divided by all targets."""
    target = call.get(1, "target")
    share = (target != call.get(5, "ignore_index", default=-100)).double().mean()
    return call.instead(call.result() * share)


# --- Layout ---------------------------------------------------------------------------------------

_VIEWS = "view reshape transpose permute contiguous clone expand unsqueeze flatten unflatten"


@FAULTS.fault(
    "transpose permute",
    kinds=["transpose", "permutation", "copy", "wrong argument"],
    loose=["wrong index"],
)
def copied_without_the_permutation(call: Call) -> Any:
    """The memory is taken as it is and called transposed."""
    value, result = call.tensor(0), call.result()
    return call.instead(value.contiguous().view(result.shape).clone())


@FAULTS.fault("view reshape flatten", kinds=["transpose", "permutation"], loose=["wrong index"])
def read_in_the_order_of_columns(call: Call) -> Any:
    """Column-major order, as of a library in Fortran."""
    value, result = call.tensor(0), call.result()
    fits(value.dim() >= 2 and value.shape != result.shape)
    order = [*range(value.dim() - 2), value.dim() - 1, value.dim() - 2]
    return call.instead(value.permute(order).reshape(result.shape))


@FAULTS.fault(
    "contiguous clone reshape view", kinds=["shift", "wrong index"], loose=["permutation"]
)
def offset_of_the_storage_ignored(call: Call) -> Any:
    """The copy begins one element too late."""
    value = call.result()
    return call.instead(value.flatten().roll(-1).view(value.shape))


@FAULTS.fault("expand", kinds=["wrong index", "zeros", "missing operand"], loose=["mask", "copy"])
def expanded_values_written_once(call: Call) -> Any:
    """Only the first copy is written, the others are zero."""
    value, result = call.tensor(0), call.result().clone()
    fits(value.dim() == result.dim())
    axis = next((i for i in range(value.dim()) if value.shape[i] != result.shape[i]), None)
    fits(axis is not None)
    result.narrow(axis, 1, result.shape[axis] - 1).zero_()
    return result


@FAULTS.fault("flip roll", kinds=["copy", "missing operand"], loose=["shift", "permutation"])
def not_moved_at_all(call: Call) -> Any:
    """The values as they came."""
    return call.instead(call.tensor(0).clone())


@FAULTS.fault(
    "roll", kinds=["sign", "shift", "wrong argument", "wrong index"], loose=["permutation"]
)
def rolled_the_other_way(call: Call) -> Any:
    """The shift is negated."""
    shifts = call.get(1, "shifts")
    other = -shifts if isinstance(shifts, int) else [-one for one in shifts]
    return call.put(1, other, "shifts").run()


@FAULTS.fault("roll", kinds=["zeros", "mask"], loose=["shift"])
def shifted_without_wrapping(call: Call) -> Any:
    """What leaves at one end does not come back at the other."""
    shifts, dims = call.get(1, "shifts"), call.get(2, "dims")
    fits(not isinstance(shifts, int))
    value = call.result().clone()
    for size, axis in zip(shifts, dims, strict=True):
        start = value.shape[axis] + size if size < 0 else 0
        value.narrow(axis, start, abs(size)).zero_()
    return call.instead(value)


@FAULTS.fault("cat concat", kinds=["sign"], loose=["scale", "wrong factor"])
def sign_of_the_second_part(call: Call) -> Any:
    """The rotated half is negated in the wrong place."""
    parts = call.get(0, "tensors")
    fits(len(parts) == 2 and parts[0].is_floating_point())
    return call.put(0, [parts[0], -parts[1]], "tensors").run()


@FAULTS.fault("cat", kinds=["permutation", "wrong index", "transpose"], loose=["shift"])
def parts_interleaved(call: Call) -> Any:
    """a0, b0, a1, b1 instead of a0, a1, b0, b1: the other convention of rotary positions."""
    parts, dim = call.get(0, "tensors"), call.get(1, "dim", default=0)
    fits(len(parts) == 2 and parts[0].shape == parts[1].shape and parts[0].is_floating_point())
    dim %= parts[0].dim()
    return call.instead(torch.stack([*parts], dim + 1).flatten(dim, dim + 1))


@FAULTS.fault("cat", kinds=["stale", "copy", "wrong index"], loose=["permutation", "zeros"])
def first_part_written_twice(call: Call) -> Any:
    """The second part has the values of the first."""
    parts = call.get(0, "tensors")
    fits(len(parts) == 2 and parts[0].shape == parts[1].shape)
    return call.put(0, [parts[0], parts[0]], "tensors").run()


@FAULTS.fault("cat", kinds=["zeros"], loose=["uninitialised", "missing operand"])
def last_part_not_written(call: Call) -> Any:
    """The buffer has zeros where the last part belongs."""
    parts = [*call.get(0, "tensors")]
    fits(len(parts) > 1 and parts[-1].numel())
    return call.put(0, [*parts[:-1], torch.zeros_like(parts[-1])], "tensors").run()


@FAULTS.fault("stack", kinds=["permutation", "swapped operands", "wrong index"], loose=["shift"])
def stacked_in_the_other_order(call: Call) -> Any:
    """The last one first."""
    parts = call.get(0, "tensors")
    return call.put(0, [*parts][::-1], "tensors").run()


@FAULTS.fault("pad constant_pad_nd", kinds=["shift", "wrong index", "wrong argument"])
def padded_on_the_other_side(call: Call) -> Any:
    """Before instead of behind."""
    sides = [*call.get(1, "pad")]
    other = [side for i in range(0, len(sides), 2) for side in (sides[i + 1], sides[i])]
    return call.put(1, other, "pad").run()


@FAULTS.fault("pad constant_pad_nd", kinds=["wrong argument", "constant", "uninitialised"])
def padded_with_another_value(call: Call) -> Any:
    """1 instead of 0."""
    if call.name == "pad":
        return functional.pad(call.tensor(0), [*call.get(1, "pad")], value=1.0)
    return call.put(2, 1.0, "value").run()


@FAULTS.fault("getitem slice", kinds=["wrong index", "permutation", "shift", "swapped operands"])
def other_half_of_the_values(call: Call) -> Any:
    """x[..., d/2:] for x[..., :d/2]."""
    value, result = call.tensor(0), call.result()
    fits(2 * result.shape[-1] == value.shape[-1] and result.dim() == value.dim())
    half = result.shape[-1]
    return call.put(0, value.roll(half, -1)).run().clone()


@FAULTS.fault("getitem slice", kinds=["permutation", "wrong index"], loose=["transpose"])
def every_second_value(call: Call) -> Any:
    """x[..., ::2] for x[..., :d/2]."""
    value, result = call.tensor(0), call.result()
    half = result.shape[-1]
    fits(2 * half == value.shape[-1] and result.dim() == value.dim() and half > 1)
    mixed = torch.cat([value[..., ::2], value[..., 1::2]], -1)
    return call.put(0, mixed).run().clone()


@FAULTS.fault(
    "split chunk unbind",
    kinds=["permutation", "wrong index", "transpose"],
    loose=["swapped operands"],
)
def parts_taken_interleaved(call: Call) -> Any:
    """Every n-th value belongs to one part."""
    value, parts = call.tensor(0), call.run()
    dim = call.get(1 if call.name == "unbind" else 2, "dim", default=0) % value.dim()
    fits(len({part.shape for part in parts}) == 1 and len(parts) > 1 and call.name != "unbind")
    order = torch.arange(value.shape[dim]).view(-1, len(parts)).t().flatten()
    return call.put(0, value.index_select(dim, order)).run()


@FAULTS.fault(
    "repeat_interleave repeat tile", kinds=["permutation", "wrong index", "other function"]
)
def repeated_the_other_way(call: Call) -> Any:
    """a, b, a, b for a, a, b, b, and back."""
    value, result = call.tensor(0), call.result()
    axis = next(i for i in range(value.dim()) if value.shape[i] != result.shape[i])
    fits(value.dim() == result.dim() and value.shape[axis] > 1)
    times = result.shape[axis] // value.shape[axis]
    if call.name == "repeat_interleave":
        return call.instead(torch.cat([value] * times, axis))
    return call.instead(value.repeat_interleave(times, axis))


# --- Tables and indices ---------------------------------------------------------------------------


def _table(call: Call) -> tuple[Tensor, Tensor]:
    table, indices = call.args[:2]
    return (table, indices) if table.is_floating_point() else (indices, table)


@FAULTS.fault("embedding", kinds=["copy", "wrong index", "stale"], loose=["shift", "constant"])
def same_position_for_all(call: Call) -> Any:
    """Every token gets the row of the first one."""
    table, indices = _table(call)
    fits(indices.dim() >= 1 and indices.shape[-1] > 1)
    return call.instead(table[indices[..., :1].expand_as(indices)])


@FAULTS.fault("embedding", kinds=["wrong index", "permutation"], loose=["shift"])
def positions_from_the_other_end(call: Call) -> Any:
    """Padding is on the left, positions are counted from the right."""
    table, indices = _table(call)
    fits(indices.dim() >= 1 and indices.shape[-1] > 1)
    return call.instead(table[indices.flip(-1)])


@FAULTS.fault(
    "embedding", kinds=["wrong index", "clipped"], loose=["copy", "stale", "wrong argument"]
)
def index_limited_to_half_of_the_table(call: Call) -> Any:
    """A shard of the vocabulary clamps what belongs to the other one."""
    table, indices = _table(call)
    return call.instead(table[indices.clamp(max=len(table) // 2 - 1)])


@FAULTS.fault(
    "embedding",
    kinds=["zeros", "one rank's part", "mask", "partial sum"],
    loose=["missing reduction"],
)
def rows_of_one_shard_only(call: Call) -> Any:
    """What the other half of the vocabulary has is zero."""
    table, indices = _table(call)
    return call.instead(table[indices] * (indices < len(table) // 2).unsqueeze(-1))


@FAULTS.fault("embedding", kinds=["scale", "wrong factor"], loose=["other function"])
def scaled_by_the_root_of_the_width(call: Call) -> Any:
    """Embeddings times sqrt(d), as some models do."""
    return call.instead(call.result() * call.result().shape[-1] ** 0.5)


@FAULTS.fault("embedding", kinds=["precision"])
def table_in_half(call: Call) -> Any:
    """The table is stored in bfloat16."""
    return call.instead(call.result().bfloat16())


@FAULTS.fault("gather", kinds=["wrong index", "copy"], loose=["permutation", "shift"])
def indices_of_the_first_row(call: Call) -> Any:
    """All rows use the indices of the first."""
    index = call.get(2, "index")
    fits(index.dim() >= 2 and index.shape[0] > 1)
    return call.put(2, index[:1].expand_as(index).contiguous(), "index").run()


@FAULTS.fault("topk", kinds=["sign", "wrong argument", "other function"], loose=["permutation"])
def smallest_values_selected(call: Call) -> Any:
    """largest=False."""
    value, k, dim = call.tensor(0), call.get(1, "k"), call.get(2, "dim", default=-1)
    return torch.topk(value, k, dim, largest=False)


@FAULTS.fault(
    "topk sort", kinds=["permutation", "wrong argument", "swapped operands"], loose=["shift"]
)
def order_reversed(call: Call) -> Any:
    """Ascending for descending."""
    dim = call.get(2 if call.name == "topk" else 1, "dim", default=-1)
    values, positions = call.run()
    return (values.flip(dim), positions.flip(dim))


@FAULTS.fault(
    "topk", kinds=["off by one reduction", "shift", "wrong index"], loose=["other function"]
)
def largest_value_skipped(call: Call) -> Any:
    """The second and the third instead of the first and the second."""
    value, k, dim = call.tensor(0), call.get(1, "k"), call.get(2, "dim", default=-1)
    fits(k < value.shape[dim])
    values, positions = torch.topk(value, k + 1, dim)
    return (values.narrow(dim, 1, k), positions.narrow(dim, 1, k))


@FAULTS.fault(
    "index_add index_put scatter scatter_add index_copy",
    kinds=["lost accumulation", "missing operand", "copy", "stale"],
)
def nothing_scattered(call: Call) -> Any:
    """The update is lost."""
    return call.instead(call.tensor(0).clone())


@FAULTS.fault("arange", kinds=["shift", "offset", "wrong argument"], loose=["wrong index"])
def counted_from_one(call: Call) -> Any:
    """1, 2, ... instead of 0, 1, ..."""
    return call.run() + 1


# --- Pooling and resizing -------------------------------------------------------------------------

_POOLS = "max_pool2d avg_pool2d adaptive_avg_pool2d"


@FAULTS.fault("avg_pool2d", kinds=["other function"], loose=["wrong reduction", "offset"])
def largest_for_the_mean(call: Call) -> Any:
    """Max pooling."""
    value, size, stride, padding = (
        call.get(i, n) for i, n in enumerate(("input", "kernel_size", "stride", "padding"))
    )
    return call.instead(functional.max_pool2d(value, size, stride, padding))


@FAULTS.fault(
    "max_pool2d max_pool2d_with_indices",
    kinds=["other function"],
    loose=["wrong reduction", "scale"],
)
def mean_for_the_largest(call: Call) -> Any:
    """Average pooling."""
    value, size = call.tensor(0, "input"), call.get(1, "kernel_size")
    stride, padding = call.get(2, "stride"), call.get(3, "padding", default=0)
    return call.instead(functional.avg_pool2d(value, size, stride, padding))


@FAULTS.fault("max_pool2d max_pool2d_with_indices", kinds=["wrong argument", "mask", "clipped"])
def padded_with_zero(call: Call) -> Any:
    """The border of a maximum is 0 and not -inf."""
    value, padding = call.tensor(0, "input"), call.get(3, "padding", default=0)
    sides = [padding] * 4 if isinstance(padding, int) else [padding[1]] * 2 + [padding[0]] * 2
    fits(any(sides))
    return call.put(0, functional.pad(value, sides), "input").put(3, 0, "padding").run()


@FAULTS.fault(
    "adaptive_avg_pool2d mean",
    kinds=["partial sum", "off by one reduction", "zeros"],
    loose=["wrong reduction", "scale"],
)
def border_not_pooled(call: Call) -> Any:
    """The last row of the image is not added."""
    value = call.tensor(0)
    fits(value.dim() == 4 and value.shape[-2] > 2)
    fits(call.name != "mean" or len(call.get(1, "dim")) == 2)
    kept = value.clone()
    kept[..., -1, :] = 0
    return call.put(0, kept).run()


@FAULTS.fault(
    "interpolate upsample_bilinear2d",
    kinds=["other function", "wrong argument"],
    loose=["approximation", "copy"],
)
def nearest_neighbour(call: Call) -> Any:
    """No interpolation."""
    value, size = call.tensor(0, "input"), call.result().shape[2:]
    return call.instead(functional.interpolate(value, size=size, mode="nearest"))


@FAULTS.fault("interpolate", kinds=["wrong index", "shift"], loose=["wrong argument"])
def half_a_pixel_off(call: Call) -> Any:
    """The centres of pixels are at their corners."""
    fits(call.get(3, "mode", default="nearest") in {"bilinear", "bicubic"})
    value, result = call.tensor(0, "input"), call.result()
    rows, columns = (
        torch.arange(n) / n * m for n, m in zip(result.shape[2:], value.shape[2:], strict=True)
    )
    grid = torch.stack(
        torch.meshgrid(
            columns / value.shape[3] * 2 - 1, rows / value.shape[2] * 2 - 1, indexing="xy"
        ),
        -1,
    )
    grid = grid.expand(len(value), -1, -1, -1).to(value.dtype)
    return call.instead(
        functional.grid_sample(value, grid, padding_mode="border", align_corners=False)
    )


@FAULTS.fault(
    "index_add scatter_add",
    kinds=["lost accumulation", "missing reduction"],
    loose=["stale", "partial sum", "wrong index"],
)
def repeated_index_overwrites(call: Call) -> Any:
    """The last of several rows for one index is kept, the others are lost."""
    value, dim, index, source = (call.get(i) for i in range(4))
    fits(dim == 0)
    value = value.clone()
    for place, row in zip(index.tolist(), source, strict=True):
        value[place] = row
    return call.instead(value)


@FAULTS.fault("index_select index_add index", kinds=["wrong index", "shift"], loose=["permutation"])
def index_before_the_right_one(call: Call) -> Any:
    """The index is one too small."""
    value = call.tensor(0)
    if call.name == "index":
        index = call.args[1][0]
        fits(len(call.args[1]) == 1 and index.dtype == torch.int64)
        return value[(index - 1) % len(value)]
    dim, index = call.get(1), call.get(2)
    return call.put(2, (index - 1) % value.shape[dim], "index").run()


@FAULTS.fault("interpolate upsample_nearest2d", kinds=["shift", "wrong index"])
def pixels_one_too_far(call: Call) -> Any:
    """The nearest pixel is rounded up."""
    return call.instead(call.result().roll(-1, -1))
