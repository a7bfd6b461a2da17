"""Faults for building: embeddings, indices, layout, pooling."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, on, operand, result
from benchmarks.places.parts import table_and_indices
from torch.nn import functional

FAULTS = Catalogue()


@FAULTS.fault("embedding", "shift, wrong index; permutation, copy")
def next_row_of_the_table(call: Call) -> Any:
    """The index is one too large."""
    places = [0, 1] if call.get(0).is_floating_point() else [1, 0]
    table, indices = (call.args[place] for place in places)
    return call.instead(table[(indices + 1) % len(table)])


@FAULTS.fault("split chunk unbind", "stale, copy, wrong index; permutation, shift")
def first_part_twice(call: Call) -> Any:
    """The second part is the first one."""
    parts = call.run()
    fits(len(parts) > 1 and parts[0].shape == parts[1].shape and parts[0].is_floating_point())
    return (parts[0], parts[0].clone(), *parts[2:])


@FAULTS.fault("conv2d conv1d convolution", "wrong argument; wrong index, mask")
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


@FAULTS.fault("getitem", "shift, wrong index; wrong argument")
def slice_off_by_one(call: Call) -> Any:
    """The slice begins and ends one later."""
    value, index = call.tensor(0), call.args[1]
    index = index if isinstance(index, tuple) else (index,)
    fits(any(isinstance(one, slice) and one != slice(None) for one in index))
    axis = next(i for i, one in enumerate(index) if isinstance(one, slice) and one != slice(None))
    if Ellipsis in index[:axis]:
        axis -= sum(one is not None for one in index)
    return value.roll(-1, axis)[index]


@FAULTS.fault("gather index_select", "shift, wrong index, permutation; copy")
def index_shifted(call: Call) -> Any:
    """The index before."""
    value, dim, index = call.tensor(0), call.get(1, "dim"), call.get(2, "index")
    return call.put(2, (index - 1) % value.size(dim), "index").run()


@FAULTS.fault("embedding", "zeros; mask, wrong argument")
def first_token_taken_for_padding(call: Call) -> Any:
    """Rows of the smallest index are zero."""
    table, indices = call.args[:2]
    if not table.is_floating_point():
        table, indices = indices, table
    return call.instead(call.result() * (indices != indices.min()).unsqueeze(-1))


@FAULTS.fault("split chunk unbind", "permutation, swapped operands, wrong index; shift, copy")
def parts_exchanged(call: Call) -> Any:
    """The first two results are exchanged."""
    parts = call.run()
    fits(len(parts) > 1 and parts[0].shape == parts[1].shape and parts[0].is_floating_point())
    return (parts[1], parts[0], *parts[2:])


@FAULTS.fault("topk sort", "other function; shift, permutation")
def selected_by_magnitude(call: Call) -> Any:
    """The values in the order of their absolute values."""
    value = call.tensor(0)
    fits(bool((value < 0).any()))
    positions = call.put(0, value.abs()).run()[1]
    dim = call.get(2 if call.name == "topk" else 1, "dim", default=-1)
    return (value.gather(dim, positions), positions)


@FAULTS.fault("argmax", "tie-breaking; other function")
def last_of_equal_maxima(call: Call) -> Any:
    """Ties go to the last one."""
    value, dim = call.get(0), call.get(1, "dim")
    fits(isinstance(dim, int))
    return value.size(dim) - 1 - value.flip(dim).argmax(dim)


@FAULTS.fault("interpolate", "wrong argument")
def corners_aligned(call: Call) -> Any:
    """The other value of align_corners."""
    fits(call.get(3, "mode", default="nearest") == "bilinear")
    return call.put(4, not call.get(4, "align_corners", default=False), "align_corners").run()


@FAULTS.fault(
    "cross_entropy nll_loss", "mask, scale, wrong factor; off by one reduction, wrong argument"
)
def ignored_targets_counted(call: Call) -> Any:
    """The mean is divided by all targets."""
    target = call.get(1, "target")
    share = (target != call.get(5, "ignore_index", default=-100)).double().mean()
    return call.instead(call.result() * share)


# fmt: off
# A copy that negates what it copies.
FAULTS.add("one value negated on the way", "roll flip permute transpose",
    "sign, wrong factor, scale", result(torch.neg))
# The windows begin one too late.
FAULTS.add("pooled one further", "max_pool2d avg_pool2d adaptive_avg_pool2d",
    "shift, wrong index; permutation", operand(0, lambda v: v.roll(-1, -1)))
# b, a.
FAULTS.add("concatenated in the other order", "cat", "permutation, swapped operands, shift",
    on(lambda call: (call.get(0, "tensors"),),
        lambda call, parts: call.put(0, [parts[1], parts[0]], "tensors").run(),
        where=lambda parts: len(parts) == 2 and parts[0].shape == parts[1].shape))
# A start that is one too large.
FAULTS.add("begins one later", "slice select narrow",
    "shift, wrong index; wrong argument, permutation",
    on(lambda call: (call.tensor(0), call.get(1, "dim", default=0)),
        lambda call, value, dim: call.put(0, value.roll(-1, dim)).run(),
        where=lambda value, dim: value.size(dim) > 1))
# The other value of count_include_pad.
FAULTS.add("padding counted or not", "avg_pool2d", "wrong argument; axis scale",
    lambda call:

    call.put(5, not call.get(5, "count_include_pad", default=True), "count_include_pad").run())
# fmt: on


# --- Layout ---------------------------------------------------------------------------------------


@FAULTS.fault("view reshape flatten", "transpose, permutation; wrong index")
def read_in_the_order_of_columns(call: Call) -> Any:
    """Column-major order, as of a library in Fortran."""
    value, result = call.tensor(0), call.result()
    fits(value.dim() >= 2 and value.shape != result.shape)
    order = [*range(value.dim() - 2), value.dim() - 1, value.dim() - 2]
    return call.instead(value.permute(order).reshape(result.shape))


@FAULTS.fault("expand", "wrong index, zeros, missing operand; mask, copy")
def expanded_values_written_once(call: Call) -> Any:
    """Only the first copy is written, the others are zero."""
    value, result = call.tensor(0), call.result().clone()
    fits(value.dim() == result.dim())
    axis = next((i for i in range(value.dim()) if value.shape[i] != result.shape[i]), None)
    fits(axis is not None)
    result.narrow(axis, 1, result.shape[axis] - 1).zero_()
    return result


@FAULTS.fault("roll", "zeros, mask; shift")
def shifted_without_wrapping(call: Call) -> Any:
    """What leaves at one end does not come back at the other."""
    shifts, dims = call.get(1, "shifts"), call.get(2, "dims")
    fits(not isinstance(shifts, int))
    value = call.result().clone()
    for size, axis in zip(shifts, dims, strict=True):
        start = value.shape[axis] + size if size < 0 else 0
        value.narrow(axis, start, abs(size)).zero_()
    return call.instead(value)


@FAULTS.fault("cat", "permutation, wrong index, transpose; shift")
def parts_interleaved(call: Call) -> Any:
    """a0, b0, a1, b1 instead of a0, a1, b0, b1: the other convention of rotary positions."""
    parts, dim = call.get(0, "tensors"), call.get(1, "dim", default=0)
    fits(len(parts) == 2 and parts[0].shape == parts[1].shape and parts[0].is_floating_point())
    dim %= parts[0].dim()
    return call.instead(torch.stack([*parts], dim + 1).flatten(dim, dim + 1))


@FAULTS.fault("pad constant_pad_nd", "shift, wrong index, wrong argument")
def padded_on_the_other_side(call: Call) -> Any:
    """Before instead of behind."""
    sides = [*call.get(1, "pad")]
    other = [side for i in range(0, len(sides), 2) for side in (sides[i + 1], sides[i])]
    return call.put(1, other, "pad").run()


@FAULTS.fault("pad constant_pad_nd", "wrong argument, constant, uninitialised")
def padded_with_another_value(call: Call) -> Any:
    """1 instead of 0."""
    if call.name == "pad":
        return functional.pad(call.tensor(0), [*call.get(1, "pad")], value=1.0)
    return call.put(2, 1.0, "value").run()


@FAULTS.fault("getitem slice", "wrong index, permutation, shift, swapped operands")
def other_half_of_the_values(call: Call) -> Any:
    """x[..., d/2:] for x[..., :d/2]."""
    value, result = call.tensor(0), call.result()
    fits(2 * result.shape[-1] == value.shape[-1] and result.dim() == value.dim())
    half = result.shape[-1]
    return call.put(0, value.roll(half, -1)).run().clone()


@FAULTS.fault("getitem slice", "permutation, wrong index; transpose")
def every_second_value(call: Call) -> Any:
    """x[..., ::2] for x[..., :d/2]."""
    value, result = call.tensor(0), call.result()
    half = result.shape[-1]
    fits(2 * half == value.shape[-1] and result.dim() == value.dim() and half > 1)
    mixed = torch.cat([value[..., ::2], value[..., 1::2]], -1)
    return call.put(0, mixed).run().clone()


@FAULTS.fault("split chunk unbind", "permutation, wrong index, transpose; swapped operands")
def parts_taken_interleaved(call: Call) -> Any:
    """Every n-th value belongs to one part."""
    value, parts = call.tensor(0), call.run()
    dim = call.get(1 if call.name == "unbind" else 2, "dim", default=0) % value.dim()
    fits(len({part.shape for part in parts}) == 1 and len(parts) > 1 and call.name != "unbind")
    order = torch.arange(value.shape[dim]).view(-1, len(parts)).t().flatten()
    return call.put(0, value.index_select(dim, order)).run()


@FAULTS.fault("repeat_interleave repeat tile", "permutation, wrong index, other function")
def repeated_the_other_way(call: Call) -> Any:
    """a, b, a, b for a, a, b, b, and back."""
    value, result = call.tensor(0), call.result()
    axis = next(i for i in range(value.dim()) if value.shape[i] != result.shape[i])
    fits(value.dim() == result.dim() and value.shape[axis] > 1)
    times = result.shape[axis] // value.shape[axis]
    if call.name == "repeat_interleave":
        return call.instead(torch.cat([value] * times, axis))
    return call.instead(value.repeat_interleave(times, axis))


# fmt: off
# The memory is taken as it is and called transposed.
FAULTS.add("copied without the permutation", "transpose permute",
    "transpose, permutation, copy, wrong argument; wrong index",
    lambda call: call.instead(call.tensor(0).contiguous().view(call.result().shape).clone()))
# The copy begins one element too late.
FAULTS.add("offset of the storage ignored", "contiguous clone reshape view",
    "shift, wrong index; permutation", result(lambda v: v.flatten().roll(-1).view(v.shape)))
# The values as they came.
FAULTS.add("not moved at all", "flip roll", "copy, missing operand; shift, permutation",
    lambda call: call.instead(call.tensor(0).clone()))
# The shift is negated.
FAULTS.add("rolled the other way", "roll", "sign, shift, wrong argument, wrong index; permutation",
    on(lambda call: (call.get(1, "shifts"),),
        lambda call, shifts:

    call.put(1, -shifts if isinstance(shifts, int) else [-one for one in shifts], "shifts").run()))
# The rotated half is negated in the wrong place.
FAULTS.add("sign of the second part", "cat concat", "sign; scale, wrong factor",
    on(lambda call: (call.get(0, "tensors"),),
        lambda call, parts: call.put(0, [parts[0], -parts[1]], "tensors").run(),
        where=lambda parts: len(parts) == 2 and parts[0].is_floating_point()))
# The second part has the values of the first.
FAULTS.add("first part written twice", "cat", "stale, copy, wrong index; permutation, zeros",
    on(lambda call: (call.get(0, "tensors"),),
        lambda call, parts: call.put(0, [parts[0], parts[0]], "tensors").run(),
        where=lambda parts: len(parts) == 2 and parts[0].shape == parts[1].shape))
# The buffer has zeros where the last part belongs.
FAULTS.add("last part not written", "cat", "zeros; uninitialised, missing operand",
    on(lambda call: ([*call.get(0, "tensors")],),
        lambda call, parts:
            call.put(0, [*parts[:-1], torch.zeros_like(parts[-1])], "tensors").run(),
        where=lambda parts: len(parts) > 1 and parts[-1].numel()))
# The last one first.
FAULTS.add("stacked in the other order", "stack",
    "permutation, swapped operands, wrong index; shift",
    lambda call: call.put(0, [*call.get(0, "tensors")][::-1], "tensors").run())
# fmt: on


# --- Tables and indices ---------------------------------------------------------------------------


@FAULTS.fault("topk sort", "permutation, wrong argument, swapped operands; shift")
def order_reversed(call: Call) -> Any:
    """Ascending for descending."""
    dim = call.get(2 if call.name == "topk" else 1, "dim", default=-1)
    values, positions = call.run()
    return (values.flip(dim), positions.flip(dim))


@FAULTS.fault("topk", "off by one reduction, shift, wrong index; other function")
def largest_value_skipped(call: Call) -> Any:
    """The second and the third instead of the first and the second."""
    value, k, dim = call.tensor(0), call.get(1, "k"), call.get(2, "dim", default=-1)
    fits(k < value.shape[dim])
    values, positions = torch.topk(value, k + 1, dim)
    return (values.narrow(dim, 1, k), positions.narrow(dim, 1, k))


# fmt: off
# Every token gets the row of the first one.
FAULTS.add("same position for all", "embedding", "copy, wrong index, stale; shift, constant",
    computed(table_and_indices,
        lambda table, indices: table[indices[..., :1].expand_as(indices)],
        where=lambda _, indices: indices.dim() >= 1 and indices.shape[-1] > 1))
# Padding is on the left, positions are counted from the right.
FAULTS.add("positions from the other end", "embedding", "wrong index, permutation; shift",
    computed(table_and_indices, lambda table, indices: table[indices.flip(-1)],
        where=lambda _, indices: indices.dim() >= 1 and indices.shape[-1] > 1))
# A shard of the vocabulary clamps what belongs to the other one.
FAULTS.add("index limited to half of the table", "embedding",
    "wrong index, clipped; copy, stale, wrong argument",
    computed(table_and_indices,
        lambda table, indices: table[indices.clamp(max=len(table) // 2 - 1)]))
# What the other half of the vocabulary has is zero.
FAULTS.add("rows of one shard only", "embedding",
    "zeros, one rank's part, mask, partial sum; missing reduction",
    computed(table_and_indices,
        lambda table, indices: table[indices] * (indices < len(table) // 2).unsqueeze(-1)))
# Embeddings times sqrt(d), as some models do.
FAULTS.add("scaled by the root of the width", "embedding", "scale, wrong factor; other function",
    lambda call: call.instead(call.result() * call.result().shape[-1] ** 0.5))
# The table is stored in bfloat16.
FAULTS.add("table in half", "embedding", "precision", result(lambda v: v.bfloat16()))
# All rows use the indices of the first.
FAULTS.add("indices of the first row", "gather", "wrong index, copy; permutation, shift",
    on(lambda call: (call.get(2, "index"),),
        lambda call, index: call.put(2, index[:1].expand_as(index).contiguous(), "index").run(),
        where=lambda index: index.dim() >= 2 and index.shape[0] > 1))
# largest=False.
FAULTS.add("smallest values selected", "topk", "sign, wrong argument, other function; permutation",
    lambda call:

    torch.topk(call.tensor(0), call.get(1, "k"), call.get(2, "dim", default=-1), largest=False))
# The update is lost.
FAULTS.add("nothing scattered", "index_add index_put scatter scatter_add index_copy",
    "lost accumulation, missing operand, copy, stale",
    lambda call: call.instead(call.tensor(0).clone()))
# 1, 2, ... instead of 0, 1, ...
FAULTS.add("counted from one", "arange", "shift, offset, wrong argument; wrong index",
    lambda call: call.run() + 1)
# fmt: on


# --- Pooling and resizing -------------------------------------------------------------------------


@FAULTS.fault("avg_pool2d", "other function; wrong reduction, offset")
def largest_for_the_mean(call: Call) -> Any:
    """Max pooling."""
    value, size, stride, padding = (
        call.get(i, n) for i, n in enumerate(("input", "kernel_size", "stride", "padding"))
    )
    return call.instead(functional.max_pool2d(value, size, stride, padding))


@FAULTS.fault("max_pool2d max_pool2d_with_indices", "other function; wrong reduction, scale")
def mean_for_the_largest(call: Call) -> Any:
    """Average pooling."""
    value, size = call.tensor(0, "input"), call.get(1, "kernel_size")
    stride, padding = call.get(2, "stride"), call.get(3, "padding", default=0)
    return call.instead(functional.avg_pool2d(value, size, stride, padding))


@FAULTS.fault("max_pool2d max_pool2d_with_indices", "wrong argument, mask, clipped")
def padded_with_zero(call: Call) -> Any:
    """The border of a maximum is 0 and not -inf."""
    value, padding = call.tensor(0, "input"), call.get(3, "padding", default=0)
    sides = [padding] * 4 if isinstance(padding, int) else [padding[1]] * 2 + [padding[0]] * 2
    fits(any(sides))
    return call.put(0, functional.pad(value, sides), "input").put(3, 0, "padding").run()


@FAULTS.fault(
    "adaptive_avg_pool2d mean", "partial sum, off by one reduction, zeros; wrong reduction, scale"
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
    "interpolate upsample_bilinear2d", "other function, wrong argument; approximation, copy"
)
def nearest_neighbour(call: Call) -> Any:
    """No interpolation."""
    value, size = call.tensor(0, "input"), call.result().shape[2:]
    return call.instead(functional.interpolate(value, size=size, mode="nearest"))


@FAULTS.fault("interpolate", "wrong index, shift; wrong argument")
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
    "index_add scatter_add", "lost accumulation, missing reduction; stale, partial sum, wrong index"
)
def repeated_index_overwrites(call: Call) -> Any:
    """The last of several rows for one index is kept, the others are lost."""
    value, dim, index, source = (call.get(i) for i in range(4))
    fits(dim == 0)
    value = value.clone()
    for place, row in zip(index.tolist(), source, strict=True):
        value[place] = row
    return call.instead(value)


@FAULTS.fault("index_select index_add index", "wrong index, shift; permutation")
def index_before_the_right_one(call: Call) -> Any:
    """The index is one too small."""
    value = call.tensor(0)
    if call.name == "index":
        index = call.args[1][0]
        fits(len(call.args[1]) == 1 and index.dtype == torch.int64)
        return value[(index - 1) % len(value)]
    dim, index = call.get(1), call.get(2)
    return call.put(2, (index - 1) % value.shape[dim], "index").run()


# fmt: off
# The nearest pixel is rounded up.
FAULTS.add("pixels one too far", "interpolate upsample_nearest2d", "shift, wrong index",
    result(lambda v: v.roll(-1, -1)))
# fmt: on
