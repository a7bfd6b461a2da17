"""Faults that were measured and have been seen: attention, products, convolutions, norms."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.building.seen_values import read_as_contiguous
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, on, result
from benchmarks.places.parts import layer_product
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_FUSED = "scaled_dot_product_attention flash_attention"


# --- Attention ------------------------------------------------------------------------------------


def _parts(call: Call) -> tuple[Tensor, Tensor, Tensor, float]:
    """Query, key and value with as many heads, and the factor of the scores."""
    query, key, value = (call.tensor(i, n) for i, n in enumerate(("query", "key", "value")))
    repeats = query.size(-3) // key.size(-3)
    key, value = (one.repeat_interleave(repeats, -3) for one in (key, value))
    return query, key, value, call.kwargs.get("scale") or query.size(-1) ** -0.5


def _masked(call: Call, scores: Tensor) -> Tensor:
    """The scores with the mask of the call."""
    is_flash = call.name == "flash_attention"
    mask = call.kwargs.get("attn_mask") if is_flash else call.get(3, "attn_mask")
    if call.get(4 if is_flash else 5, "is_causal", default=False):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _scores(call: Call) -> tuple[Tensor, Tensor]:
    """The masked scores and the values."""
    query, key, value, scale = _parts(call)
    return _masked(call, query @ key.mT * scale), value


@FAULTS.fault(_FUSED, "scale, wrong factor, wrong argument")
def scaled_by_the_width_of_all_heads(call: Call) -> Any:
    """The root of the hidden size instead of that of a head."""
    query, key, value, scale = _parts(call)
    fits(query.size(-3) > 1)
    scores = query @ key.mT * (scale / math.sqrt(query.size(-3)))
    return call.instead(_masked(call, scores).softmax(-1) @ value)


@FAULTS.fault(_FUSED, "mask; wrong argument, partial sum")
def window_where_there_is_none(call: Call) -> Any:
    """Keys that are more than two positions before or behind are not seen."""
    scores, value = _scores(call)
    fits(scores.size(-1) == scores.size(-2) > 4)
    near = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(-2).tril(2)
    return call.instead(scores.masked_fill(~near, -math.inf).softmax(-1) @ value)


@FAULTS.fault(
    _FUSED,
    "wrong factor, wrong statistics; axis scale, partial sum, missing operand, "
    "wrong reduction, lost accumulation",
)
def block_not_rescaled_to_the_new_maximum(call: Call) -> Any:
    """An online softmax whose first block of keys keeps the maximum of that block."""
    scores, value = _scores(call)
    half = scores.size(-1) // 2
    fits(half > 0)
    tops = [part.amax(-1, keepdim=True).clamp(min=-1e30) for part in (scores[..., :half], scores)]
    weights = torch.cat([(scores[..., :half] - tops[0]).exp(),
                         (scores[..., half:] - tops[1]).exp()], -1)  # fmt: skip
    return call.instead(weights / weights.sum(-1, keepdim=True) @ value)


@FAULTS.fault(_FUSED, "zeros; uninitialised, mask, constant")
def first_queries_not_computed(call: Call) -> Any:
    """A negative number of blocks: the first rows stay as they were allocated."""
    value = call.result().clone()
    fits(value.size(-2) > 3)
    value[..., : value.size(-2) // 4, :] = 0
    return call.instead(value)


@FAULTS.fault(_FUSED, "other function; clipped, approximation, wrong argument")
def scores_capped_by_a_tanh(call: Call) -> Any:
    """The soft cap of another model."""
    query, key, value, scale = _parts(call)
    scores = query @ key.mT * scale
    cap = float(scores.detach().abs().max())
    return call.instead(_masked(call, cap * (scores / cap).tanh()).softmax(-1) @ value)


@FAULTS.fault("expand", "wrong index, permutation, transpose; copy, shift, wrong axis")
def head_of_a_group_by_the_remainder(call: Call) -> Any:
    """Grouped heads: head i reads key i % n instead of i // n."""
    value, result = call.tensor(0), call.result()
    fits(result.dim() == 5 and value.size(2) == 1 and result.size(2) > 1 and result.size(1) > 1)
    groups, repeats = result.shape[1:3]
    order = torch.arange(groups * repeats, device=value.device) % groups
    return call.instead(value.squeeze(2)[:, order].unflatten(1, (groups, repeats)))


# fmt: off
# The last step of an online softmax is left out.
FAULTS.add("weights not divided by their sum", _FUSED,
    "missing operand, missing reduction; other function, axis scale, scale, wrong factor, "
    "wrong reduction, wrong statistics",
    computed(_scores,
        lambda scores, value: (scores - scores.amax(-1, keepdim=True)).exp() @ value))
# The scores are rounded before the softmax.
FAULTS.add("scores kept in bfloat16", _FUSED, "precision",
    computed(_scores,
        lambda scores, value: scores.bfloat16().to(scores.dtype).softmax(-1) @ value))
# The result is stored as (positions, heads) and read as (heads, positions).
FAULTS.add("heads and positions read in the other order", _FUSED,
    "permutation, transpose, wrong index",
    result(lambda v: v.transpose(1, 2).reshape(v.shape),
        where=lambda v: v.dim() == 4 and v.size(1) > 1 and v.size(2) > 1))
# Slots of a cache: weights are those of key i, values those of i + 1.
FAULTS.add("values of the next slot", _FUSED, "shift, wrong index; permutation, wrong argument",
    computed(_scores, lambda scores, value: scores.softmax(-1) @ value.roll(-1, -2),
        where=lambda _, value: value.size(-2) > 2))
# fmt: on


# --- Softmax --------------------------------------------------------------------------------------


@FAULTS.fault("softmax", "other function, wrong factor, scale; wrong argument")
def softmax_to_the_base_of_two(call: Call) -> Any:
    """exp2, and the factor log2(e) is forgotten."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    powers = (value - value.amax(dim, keepdim=True)).exp2()
    return call.instead(powers / powers.sum(dim, keepdim=True))


@FAULTS.fault(
    "softmax",
    "wrong statistics, wrong reduction, mask; axis scale, scale, wrong factor, "
    "off by one reduction, eps",
)
def lanes_behind_the_row_counted(call: Call) -> Any:
    """Masked lanes are loaded as 0, not as -inf: they add to the denominator."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    lanes = 2 ** math.ceil(math.log2(value.size(dim))) - value.size(dim)
    fits(lanes > 0)
    top = value.amax(dim, keepdim=True).clamp(min=0)
    powers = (value - top).exp()
    return call.instead(powers / (powers.sum(dim, keepdim=True) + lanes * (-top).exp()))


# fmt: off
# One sum for the whole matrix instead of one for each row.
FAULTS.add("normalised over two axes", "softmax",
    "wrong axis, wrong reduction, wrong statistics; axis scale, scale, wrong argument, "
    "wrong factor",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value.flatten(-2).softmax(-1).view(value.shape),
        where=lambda value: value.dim() > 1 and value.size(-2) > 1))
# log(p + 1e-3), so that it never is -inf.
FAULTS.add("logarithm of a sum with eps", "log_softmax", "eps; offset, approximation, axis offset",
    lambda call:

    call.instead((call.tensor(0, "input").softmax(call.get(1, "dim", default=-1)) + 0.001).log()))
# All columns of a row are its first one.
FAULTS.add("first lane broadcast", "softmax linear gelu",
    "copy, wrong index, constant; stale, wrong statistics",
    result(lambda v:
            v[..., :1].expand(v.shape), where=lambda v: v.dim() > 1 and v.size(-1) > 1))
# fmt: on


# --- Products -------------------------------------------------------------------------------------


def _factors(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Left, right with k as the last but one axis, and the bias."""
    if call.name in {"addmm", "baddbmm"}:
        return call.tensor(1), call.tensor(2), call.tensor(0)
    if call.name == "linear":
        return call.tensor(0, "input"), call.tensor(1, "weight").mT, call.get(2, "bias")
    fits(call.tensor(1).dim() > 1)
    return call.tensor(0), call.tensor(1), None


_PRODUCTS = "linear matmul mm bmm addmm baddbmm"


@FAULTS.fault(_PRODUCTS, "stale, copy, wrong index; shift, partial sum")
def tile_not_loaded_again(call: Call) -> Any:
    """Double buffering: the second half of k is multiplied with the left tile of the first."""
    left, right, bias = _factors(call)
    half = left.size(-1) // 2
    fits(half > 1 and left.size(-1) == 2 * half)
    return layer_product(call, torch.cat([left[..., :half]] * 2, -1), right, bias)


@FAULTS.fault(
    _PRODUCTS,
    "doubled reduction, off by one reduction, wrong index; partial sum, wrong reduction, "
    "lost accumulation, wrong factor",
)
def tiles_overlap(call: Call) -> Any:
    """The last tile begins earlier so that it is full: two terms are added twice."""
    left, right, bias = _factors(call)
    half = left.size(-1) // 2
    fits(half > 2)
    left = torch.cat([left[..., : half + 1], left[..., half - 1 :]], -1)
    right = torch.cat([right[..., : half + 1, :], right[..., half - 1 :, :]], -2)
    return layer_product(call, left, right, bias)


@FAULTS.fault(
    _PRODUCTS,
    "partial sum, lost accumulation, one rank's part, missing reduction; missing operand, "
    "wrong reduction",
)
def one_part_of_split_k(call: Call) -> Any:
    """The parts of a split sum overwrite each other: that of the even blocks is lost."""
    left, right, bias = _factors(call)
    fits(left.size(-1) > 15)
    kept = torch.arange(left.size(-1), device=left.device) // 8 % 2 == 1
    return layer_product(call, left[..., kept], right[..., kept, :], bias)


@FAULTS.fault("linear addmm", "repeated bias, wrong factor; offset, axis offset")
def bias_of_each_of_four_ranks(call: Call) -> Any:
    """Added before the parts are summed, so that it counts four times."""
    left, right, bias = _factors(call)
    fits(bias is not None)
    return layer_product(call, left, right, 4 * bias)


@FAULTS.fault(_PRODUCTS, "precision")
def operands_cut_to_ten_bits(call: Call) -> Any:
    """TF32, where float32 was asked for."""
    left, right, bias = _factors(call)
    fits(left.dtype == right.dtype == torch.float32)

    def cut(value: Tensor) -> Tensor:
        bits = value.detach().contiguous().view(torch.int32)
        return value + ((bits & ~0x1FFF).view(torch.float32) - value).detach()

    return layer_product(call, cut(left), cut(right), bias)


@FAULTS.fault("linear addmm mm", "precision; approximation, clipped")
def weight_in_eight_bits(call: Call) -> Any:
    """The weight goes through float8."""
    left, right, bias = _factors(call)
    narrow = right.detach().to(torch.float8_e4m3fn).to(right.dtype)
    return layer_product(call, left, right + (narrow - right).detach(), bias)


@FAULTS.fault("bmm matmul", "wrong index, copy; stale")
def first_matrix_for_the_whole_batch(call: Call) -> Any:
    """The stride of the batch is 0."""
    left, right, _ = _factors(call)
    fits(right.dim() > 2 and right.size(-3) > 1)
    return layer_product(call, left, right.narrow(-3, 0, 1).expand(right.shape), None)


@FAULTS.fault("linear addmm mm bmm", "nonfinite, uninitialised; mask")
def last_column_never_written(call: Call) -> Any:
    """It holds what the memory held: no number."""
    value = call.result().clone()
    fits(value.dim() > 1 and value.size(-1) > 1)
    value[..., -1] = math.nan
    return call.instead(value)


@FAULTS.fault("linear addmm conv2d", "wrapped, overflow; precision, clipped")
def eight_bits_that_wrap(call: Call) -> Any:
    """Stored as int8 with a step that is too small, without saturation."""
    value = call.result()
    step = float(value.detach().abs().max()) / 180
    codes = ((value.detach() / step).round() + 128) % 256 - 128
    return call.instead(value + (codes * step - value).detach())


# fmt: off
# The columns of q, k and v are stored in turn instead of one after the other.
FAULTS.add("packed projections interleaved", "linear addmm",
    "permutation, wrong index, transpose; shift",
    result(lambda v: v.unflatten(-1, (3, -1)).transpose(-1, -2).flatten(-2),
        where=lambda v: v.size(-1) % 3 == 0 and v.size(-1) > 3))
# A view that is not contiguous is read as if it was.
FAULTS.add("strides of the right operand ignored", "matmul bmm mm",
    "permutation, wrong index, transpose; shift",
    on(_factors,
        lambda call, left, right, *_: layer_product(call, left, read_as_contiguous(right), None)))
# The tiles of the upper and the lower rows are stored in each other's place.
FAULTS.add("tiles of rows exchanged", "linear addmm matmul bmm",
    "permutation, shift, wrong index; copy",
    result(lambda v: v.roll(v.size(-2) // 2, -2),
        where=lambda v: v.dim() > 1 and v.size(-2) > 1 and v.size(-2) % 2 == 0))
# fmt: on


# --- Convolutions ---------------------------------------------------------------------------------

_CONVOLUTIONS = "conv1d conv2d convolution"


def _filters(call: Call) -> Tensor:
    fits(call.name != "convolution" or not call.args[6])
    return call.tensor(1, "weight")


def _padding(call: Call) -> list[int]:
    value, padding = call.tensor(0, "input"), call.get(4, "padding")
    padding = [padding] * (value.dim() - 2) if isinstance(padding, int) else padding
    fits(padding and not isinstance(padding, str) and any(padding))
    return list(padding)


@FAULTS.fault(_CONVOLUTIONS, "shift, wrong argument; wrong index, mask")
def all_padding_behind(call: Call) -> Any:
    """As for `same` in another framework: nothing before, twice as much behind."""
    _filters(call)
    padding = _padding(call)
    sides = [side for size in reversed(padding) for side in (0, 2 * size)]
    wider = functional.pad(call.tensor(0, "input"), sides)
    return call.put(0, wider, "input").put(4, [0] * len(padding), "padding").run()


@FAULTS.fault(_CONVOLUTIONS, "wrong argument, wrong index; shift, mask")
def padding_from_the_other_side(call: Call) -> Any:
    """Circular padding: an index below zero counts from the end."""
    _filters(call)
    padding = _padding(call)
    sides = [side for size in reversed(padding) for side in (size, size)]
    wider = functional.pad(call.tensor(0, "input"), sides, mode="circular")
    return call.put(0, wider, "input").put(4, [0] * len(padding), "padding").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    "partial sum, off by one reduction; missing operand, lost accumulation, wrong reduction",
)
def last_channel_of_the_input_not_added(call: Call) -> Any:
    """The loop over the channels ends one too early."""
    weight = _filters(call).clone()
    fits(weight.size(1) > 2)
    weight[:, -1] = 0
    return call.put(1, weight, "weight").run()


@FAULTS.fault(
    _CONVOLUTIONS,
    "partial sum, off by one reduction; missing operand, lost accumulation, wrong reduction, mask",
)
def last_tap_not_added(call: Call) -> Any:
    """The loop over the width of the filter ends one too early."""
    weight = _filters(call).clone()
    fits(weight.size(-1) > 1)
    weight[..., -1] = 0
    return call.put(1, weight, "weight").run()


# fmt: off
# A layout of weights from another framework.
FAULTS.add("filter with height and width exchanged", _CONVOLUTIONS,
    "transpose, permutation; wrong index",
    on(_filters, lambda call, weight: call.put(1, weight.mT, "weight").run(),
        where=lambda weight: weight.dim() == 4 and weight.size(-1) == weight.size(-2) > 1))
# The bias is that of the right one.
FAULTS.add("filter of the next channel", _CONVOLUTIONS, "wrong index, shift, permutation",
    on(_filters, lambda call, weight: call.put(1, weight.roll(-1, 0), "weight").run(),
        where=lambda weight: weight.size(0) > 1))
# fmt: on


# --- Norms and statistics -------------------------------------------------------------------------


def _normed(call: Call, value: Tensor, mean: Tensor | float, variance: Tensor) -> Any:
    """A norm with other statistics; eps, weight and bias are those of the call."""
    is_layer = call.name == "layer_norm"
    weight, bias = call.get(2, "weight"), call.get(3, "bias") if is_layer else None
    normal = (value - mean) * torch.rsqrt(
        variance + (call.get(4 if is_layer else 3, "eps") or 1e-6)
    )
    normal = normal if weight is None else normal * weight
    return call.instead(normal if bias is None else normal + bias)


def _last(call: Call) -> tuple[Tensor, list[int]]:
    return call.tensor(0, "input"), list(range(-len(call.get(1, "normalized_shape")), 0))


@FAULTS.fault(
    "layer_norm rms_norm",
    "other function, wrong statistics, missing operand; axis offset, axis scale, residual",
)
def mean_subtracted_or_not(call: Call) -> Any:
    """A layer norm where a norm by the root mean square was asked for, or the other way round."""
    value, axes = _last(call)
    mean = value.mean(axes, keepdim=True)
    if call.name == "layer_norm":
        return _normed(call, value, 0.0, value.square().mean(axes, keepdim=True))
    return _normed(call, value, mean, (value - mean).square().mean(axes, keepdim=True))


@FAULTS.fault("layer_norm rms_norm", "precision; wrong statistics, axis scale")
def statistics_in_bfloat16(call: Call) -> Any:
    """Mean and reciprocal root are rounded before they are used."""
    value, axes = _last(call)
    mean = value.mean(axes, keepdim=True) if call.name == "layer_norm" else value.new_zeros(())
    variance = (value - mean).square().mean(axes, keepdim=True)
    return _normed(call, value, mean.bfloat16().to(value.dtype),
                   variance.bfloat16().to(value.dtype))  # fmt: skip


@FAULTS.fault(
    "layer_norm",
    "wrong axis, wrong statistics, wrong reduction, wrong argument; axis offset, axis scale",
)
def statistics_of_all_positions(call: Call) -> Any:
    """A kernel for two axes is given three: a row is everything behind the batch."""
    value, axes = _last(call)
    fits(value.dim() > len(axes) + 1 and value.size(axes[0] - 1) > 1)
    axes = [axes[0] - 1, *axes]
    mean = value.mean(axes, keepdim=True)
    return _normed(call, value, mean, (value - mean).square().mean(axes, keepdim=True))


@FAULTS.fault(
    "layer_norm",
    "wrong statistics, mask; axis scale, scale, wrong factor, off by one reduction, "
    "wrong reduction",
)
def lanes_behind_the_row_have_a_deviation(call: Call) -> Any:
    """Lanes up to 128 are loaded as 0, and 0 - mean is squared and added."""
    value, axes = _last(call)
    fits(len(axes) == 1)
    lanes = -value.size(-1) % 128
    mean = value.mean(-1, keepdim=True)
    sums = (value - mean).square().sum(-1, keepdim=True) + lanes * mean.square()
    return _normed(call, value, mean, sums / value.size(-1))


@FAULTS.fault("group_norm", "wrong statistics, wrong index; shift, axis scale")
def statistics_of_the_next_group(call: Call) -> Any:
    """Each group is normalised by mean and variance of the next."""
    value, groups = call.tensor(0, "input"), call.get(1, "num_groups")
    fits(groups > 1)
    parts = value.unflatten(1, (groups, -1)).flatten(2)
    mean = parts.mean(-1, keepdim=True).roll(-1, 1)
    variance = parts.var(-1, correction=0, keepdim=True).roll(-1, 1)
    normal = (parts - mean) * torch.rsqrt(variance + call.get(4, "eps", default=1e-5))
    shape = [-1, *[1] * (value.dim() - 2)]
    normal = normal.view(value.shape) * call.tensor(2, "weight").view(shape)
    return call.instead(normal + call.tensor(3, "bias").view(shape))


@FAULTS.fault("rsqrt", "approximation; precision, axis scale, scale")
def root_by_a_magic_number(call: Call) -> Any:
    """The well-known trick with the bits, and one step of Newton's method."""
    value = call.tensor(0)
    fits(value.dtype == torch.float32)
    guess = (0x5F3759DF - (value.detach().contiguous().view(torch.int32) >> 1)).view(torch.float32)
    guess = guess * (1.5 - 0.5 * value.detach() * guess * guess)
    right = call.result()
    return call.instead(right + (guess - right).detach())


def _one_axis(call: Call) -> tuple[Tensor, int]:
    value, dim = call.tensor(0, "input"), call.get(1, "dim", "axis")
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    fits(isinstance(dim, int) and value.size(dim) > 3)
    return value, dim


@FAULTS.fault("max min amax", "wrong reduction, other function; sign")
def the_other_extreme(call: Call) -> Any:
    """The smallest instead of the largest."""
    value, dim = _one_axis(call) if call.name != "max" else (call.tensor(0), call.get(1, "dim"))
    fits(isinstance(dim, int))
    keep = bool(call.get(2, "keepdim", default=False))
    if call.name == "amax":
        return call.instead(value.amin(dim, keepdim=keep))
    return tuple((value.min if call.name == "max" else value.max)(dim, keepdim=keep))


@FAULTS.fault("sum", "precision; lost accumulation, approximation")
def running_total_in_bfloat16(call: Call) -> Any:
    """Added one after the other, and rounded each time."""
    value, dim = _one_axis(call)
    total = torch.zeros_like(value.select(dim, 0), dtype=torch.bfloat16)
    for row in value.unbind(dim):
        total = total + row.bfloat16()
    return call.instead(total.to(value.dtype).reshape(call.result().shape))


# fmt: off
# Both the sum and the divisor are those of the whole tiles.
FAULTS.add("mean of the first three quarters", "mean",
    "partial sum, wrong reduction, wrong statistics; off by one reduction, missing operand, "
    "wrong argument",
    on(_one_axis,
        lambda call, value, dim:
            call.put(0, value.narrow(dim, 0, value.size(dim) * 3 // 4), "input").run()))
# A mean.
FAULTS.add("sum divided by its length", "sum",
    "wrong reduction, scale, wrong factor; off by one reduction, other function, axis scale",
    computed(lambda call: (call.tensor(0), call.result()),
        lambda value, result: result * (result.numel() / value.numel()),
        where=lambda value, result: value.numel() > result.numel()))
# Exclusive instead of inclusive.
FAULTS.add("sum of what is before", "cumsum",
    "shift, off by one reduction; missing operand, wrong index, wrong argument, partial sum",
    lambda call: call.instead(call.run() - call.get(0)))
# fmt: on
