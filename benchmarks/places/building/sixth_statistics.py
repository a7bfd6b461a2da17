"""Faults that were measured sixth and have been seen: norms, statistics, running sums."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, longer, on, operand, result, rounded
from benchmarks.places.parts import apply_affine, channel_parts, norm_row, reduced_dim
from torch import Tensor

FAULTS = Catalogue()
_NORMS = "layer_norm rms_norm"
_CHANNELS = "batch_norm batch_norm_from_statistics"


# --- Norms ----------------------------------------------------------------------------------------


def _centred(call: Call, value: Tensor) -> Tensor:
    """Less its mean, if the norm is one that subtracts it."""
    return value - value.mean(-1, keepdim=True) if call.name == "layer_norm" else value


def _normed(call: Call, value: Tensor, eps: float) -> Tensor:
    centred = _centred(call, value)
    return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()


def _trained(weight: Tensor | None) -> Tensor:
    """A weight whose elements are not all the same."""
    fits(isinstance(weight, Tensor) and weight.dim() == 1)
    assert weight is not None
    fits(bool((weight.detach() != weight.detach()[0]).any()))
    return weight


@FAULTS.fault(
    _NORMS, "wrong index, shift, axis offset, wrong statistics; stale, offset, permutation"
)
def mean_of_the_next_row(call: Call) -> Any:
    """The deviation is that of the row, the mean that of the next."""
    value, weight, bias, eps = norm_row(call)
    fits(call.name == "layer_norm" and value.dim() > 1 and value.size(-2) > 1)
    mean = value.mean(-1, keepdim=True)
    spread = (value - mean).square().mean(-1, keepdim=True)
    return apply_affine(call, (value - mean.roll(-1, -2)) * (spread + eps).rsqrt(), weight, bias)


@FAULTS.fault(
    "layer_norm",
    "wrong factor, axis offset, wrong statistics; residual, offset, other function, "
    "doubled reduction",
)
def mean_of_the_row_subtracted_twice(call: Call) -> Any:
    """Once by the kernel for the statistics and once by that for the values."""
    value, weight, bias, eps = norm_row(call)
    mean = value.mean(-1, keepdim=True)
    spread = (value - mean).square().mean(-1, keepdim=True)
    return apply_affine(call, (value - 2 * mean) * (spread + eps).rsqrt(), weight, bias)


@FAULTS.fault(
    "layer_norm",
    "wrong statistics, partial sum, missing operand, axis scale; scale, wrong factor, "
    "wrong reduction, lost accumulation, missing reduction",
)
def variances_of_two_halves_averaged(call: Call) -> Any:
    """Welford's merge without its last term: the distance of the two means is forgotten."""
    value, weight, bias, eps = norm_row(call)
    fits(value.size(-1) % 2 == 0)
    halves = value.unflatten(-1, (2, -1))
    spread = halves.var(-1, unbiased=False).mean(-1, keepdim=True)
    centred = value - value.mean(-1, keepdim=True)
    return apply_affine(call, centred * (spread + eps).rsqrt(), weight, bias)


@FAULTS.fault(
    _NORMS,
    "wrong statistics, axis scale, other function, wrong reduction; scale, wrong factor, "
    "wrong argument",
)
def mean_magnitude_for_the_deviation(call: Call) -> Any:
    """Divided by the mean of the absolute values."""
    value, weight, bias, eps = norm_row(call)
    centred = _centred(call, value)
    return apply_affine(call, centred / (centred.abs().mean(-1, keepdim=True) + eps), weight, bias)


@FAULTS.fault(
    _NORMS,
    "mask, missing operand, axis scale, wrong factor; copy, one rank's part, scale, partial sum",
)
def weight_for_the_first_half_of_the_features(call: Call) -> Any:
    """The weight is as long as one shard; behind it, it is one."""
    value, weight, bias, eps = norm_row(call)
    kept = _trained(weight).clone()
    kept[kept.numel() // 2 :] = 1
    return apply_affine(call, _normed(call, value, eps), kept, bias)


@FAULTS.fault("layer_norm", "mask, missing bias, missing operand; axis offset, offset")
def bias_of_the_last_features_not_added(call: Call) -> Any:
    """The load of the bias is masked for the last vector."""
    bias = _trained(call.get(3, "bias")).clone()
    fits(bias.numel() > 4)
    bias[-4:] = 0
    return call.put(3, bias, "bias").run()


@FAULTS.fault(
    _NORMS,
    "wrong statistics, partial sum, wrong index, off by one reduction; axis scale, "
    "axis offset, mask, wrong reduction",
)
def statistics_without_the_first_feature(call: Call) -> Any:
    """The loop begins at 1, in the sums and in their number."""
    value, weight, bias, eps = norm_row(call)
    rest = value[..., 1:]
    fits(rest.size(-1) > 1)
    mean = rest.mean(-1, keepdim=True) if call.name == "layer_norm" else 0 * value[..., :1]
    spread = (rest - mean).square().mean(-1, keepdim=True)
    return apply_affine(call, (value - mean) * (spread + eps).rsqrt(), weight, bias)


@FAULTS.fault(
    _NORMS, "wrong index, stale, copy, wrong statistics; axis scale, axis offset, permutation"
)
def statistics_of_the_example_before(call: Call) -> Any:
    """Mean and deviation of a position are those of the same position of the example before."""
    value, weight, bias, eps = norm_row(call)
    fits(value.dim() > 2 and value.size(0) > 1)
    other = value.roll(1, 0)
    mean = other.mean(-1, keepdim=True) if call.name == "layer_norm" else 0 * value[..., :1]
    spread = (other - mean).square().mean(-1, keepdim=True)
    return apply_affine(call, (value - mean) * (spread + eps).rsqrt(), weight, bias)


@FAULTS.fault(_NORMS, words.EMPTY)
def odd_rows_of_the_norm_not_written(call: Call) -> Any:
    """Half as many programs as rows."""
    value = call.result().clone()
    fits(value.dim() > 1 and value.size(-2) > 1)
    value[..., 1::2, :] = 0
    return call.instead(value)


@FAULTS.fault(
    "layer_norm",
    "wrong reduction, wrong statistics, axis scale; scale, wrong factor, constant, copy, "
    "wrong axis",
)
def deviation_averaged_over_the_rows(call: Call) -> Any:
    """Every row is divided by the mean deviation of all positions."""
    value, weight, bias, eps = norm_row(call)
    fits(value.dim() > 1 and value.size(-2) > 1)
    centred = _centred(call, value)
    spread = centred.square().mean(-1, keepdim=True).mean(-2, keepdim=True)
    return apply_affine(call, centred * (spread + eps).rsqrt(), weight, bias)


@FAULTS.fault(
    _CHANNELS,
    "wrong factor, axis offset, missing operand, swapped operands; offset, other function, "
    "wrong argument",
)
def bias_of_the_channels_divided_too(call: Call) -> Any:
    """The bias is added before the division by the deviation."""
    value, weight, bias, mean, variance, eps = channel_parts(call)
    fits(bool(bias.detach().any()))
    return call.instead(((value - mean) * weight + bias) * (variance + eps).rsqrt())


@FAULTS.fault(_CHANNELS, "permutation, wrong index; axis scale, shift")
def weight_of_the_channels_from_the_end(call: Call) -> Any:
    """A negative stride for the weight."""
    place = 3 if call.name == "batch_norm" else 1
    return call.put(place, _trained(call.get(place, "weight")).flip(0), "weight").run()


@FAULTS.fault(_CHANNELS, words.EMPTY)
def last_channel_not_normalised_into_the_buffer(call: Call) -> Any:
    """The grid has one channel too few."""
    value = call.result().clone()
    fits(value.size(1) > 1)
    value[:, -1] = 0
    return call.instead(value)


@FAULTS.fault(
    "group_norm",
    "wrong statistics, wrong reduction, axis scale; scale, wrong factor, wrong argument",
)
def deviation_of_the_whole_image(call: Call) -> Any:
    """The mean is that of the group, the variance that of all groups together."""
    value, groups = call.tensor(0, "input"), call.get(1, "num_groups")
    weight, bias = call.get(2, "weight"), call.get(3, "bias")
    fits(groups > 1)
    parts = value.unflatten(1, (groups, -1)).flatten(2)
    centred = parts - parts.mean(-1, keepdim=True)
    spread = centred.square().mean((1, 2), keepdim=True)
    normal = (centred * (spread + 1e-5).rsqrt()).view(value.shape)
    shape = (1, -1, *[1] * (value.dim() - 2))
    return apply_affine(
        call,
        normal,
        None if weight is None else weight.view(shape),
        None if bias is None else bias.view(shape),
    )


@FAULTS.fault(
    "normalize", "wrong index, shift, axis scale, wrong statistics; stale, wrong factor, scale"
)
def length_of_the_next_row(call: Call) -> Any:
    """The pointer to the lengths is one row too far."""
    value, dim = call.tensor(0, "input"), call.get(2, "dim", default=1)
    fits(value.dim() > 1 and dim % value.dim() == value.dim() - 1 and value.size(-2) > 1)
    return call.instead(value / value.norm(dim=-1, keepdim=True).roll(-1, -2))


# fmt: off
# A loop over rows that writes its first results twice.
FAULTS.add("second half of the rows not normalised again", _NORMS,
    "copy, stale, wrong index; permutation",
    result(lambda v: v[..., torch.arange(v.size(-2)) % ((v.size(-2) + 1) // 2), :],
        where=longer(-2)))
# A layer of another model: no statistics at all.
FAULTS.add("norm replaced by a tanh", _NORMS,
    "other function; approximation, clipped, missing operand, wrong statistics",
    on(norm_row,
        lambda call, value, weight, bias, *_: apply_affine(call, value.tanh(), weight, bias)))
# 1 / w, as for a weight that is stored as a scale to divide by.
FAULTS.add("divided by the weight", _NORMS,
    "wrong factor, other function, axis scale; wrong argument, scale",
    on(norm_row,
        lambda call, value, weight, bias, eps:
            apply_affine(call, _normed(call, value, eps), 1 / _trained(weight), bias)))
# The pointer to the bias is one too far; that to the weight is right.
FAULTS.add("bias of the next feature", "layer_norm", "wrong index, shift, permutation; axis offset",
    lambda call: call.put(3, _trained(call.get(3, "bias")).roll(-1), "bias").run())
# The normal values are stored one column further, around the end.
FAULTS.add("features of the norm one column late", _NORMS, "wrong index, shift, permutation; copy",
    result(lambda v: v.roll(1, -1)))
# The kernel that normalises also converts to e4m3.
FAULTS.add("result of the norm through float8", _NORMS, "precision; approximation",
    result(rounded(torch.float8_e4m3fn)))
# The sign is lost in a buffer of numbers without one.
FAULTS.add("magnitudes of the normal values", _NORMS, "sign, other function; wrong factor, clipped",
    on(norm_row,
        lambda call, value, weight, bias, eps:
            apply_affine(call, _normed(call, value, eps).abs(), weight, bias)))
# Read from the file under each other's names; the magnitude of what is not positive.
FAULTS.add("mean and variance of the channels exchanged", _CHANNELS,
    "swapped operands, wrong index, wrong statistics; wrong argument, copy",
    computed(channel_parts,
        lambda value, weight, bias, mean, variance, eps:
            (value - variance) * (mean.abs() + eps).rsqrt() * weight + bias))
# X f + (b - mean): the mean is not multiplied by the factor when the norm is folded.
FAULTS.add("folded mean not divided", _CHANNELS,
    "wrong factor, axis offset, missing operand, wrong statistics; offset, axis scale, "
    "other function",
    computed(channel_parts,
        lambda value, weight, bias, mean, variance, eps:
            value * weight * (variance + eps).rsqrt() + bias - mean))
# The pointer to the images is not moved on.
FAULTS.add("image norm of the first example for all", "group_norm native_group_norm instance_norm",
    "copy, stale, wrong index; permutation",
    result(lambda v: v[:1].expand(v.shape).clone(), where=longer(0)))
# The absolute value of the cosine.
FAULTS.add("similarity without a sign", "cosine_similarity", "sign, other function; wrong factor",
    result(torch.abs))
# fmt: on


# --- Sums and means -------------------------------------------------------------------------------


@FAULTS.forward(
    "mean", "wrong axis, wrong reduction, wrong statistics; copy, constant, wrong argument, stale"
)
def mean_over_the_rows_too(call: Call) -> Any:
    """One mean for all rows of an example, given to each of them."""
    value, dim, keep = reduced_dim(call)
    fits(value.dim() > 1 and dim % value.dim() == value.dim() - 1 and value.size(-2) > 1)
    both = value.mean(-1, keepdim=keep)
    axis = -2 if keep else -1
    return call.instead(both.mean(axis, keepdim=True).expand(both.shape).clone())


@FAULTS.forward("mean sum", "wrong index, shift, permutation; stale, axis offset")
def result_of_the_next_row(call: Call) -> Any:
    """The reduced values are stored one row too early."""
    reduced_dim(call)
    value = call.result()
    fits(value.dim() > 0 and value.numel() > 1)
    axis = next(i for i in reversed(range(value.dim())) if value.size(i) > 1)
    return call.instead(value.roll(-1, axis))


@FAULTS.forward("mean sum", "copy, stale, wrong index; permutation")
def last_result_is_the_one_before(call: Call) -> Any:
    """The last block of the reduction does not write."""
    reduced_dim(call)
    value = call.result()
    fits(value.numel() > 2)
    axis = next(i for i in reversed(range(value.dim())) if value.size(i) > 1)
    end = value.size(axis) - 1
    return call.instead(
        torch.cat([value.narrow(axis, 0, end), value.narrow(axis, end - 1, 1)], axis)
    )


@FAULTS.forward(
    "mean",
    "wrong statistics, wrong factor, wrong reduction; scale, axis scale, "
    "off by one reduction, other function",
)
def first_element_counts_three_times(call: Call) -> Any:
    """The weight of the first is that of a token for the whole; the others share the rest."""
    value, dim, keep = reduced_dim(call)
    total = value.sum(dim, keep)
    first = value.narrow(dim, 0, 1)
    first = first if keep else first.squeeze(dim)
    return call.instead((total + 2 * first) / (value.size(dim) + 2))


@FAULTS.forward(
    "sum",
    "partial sum, mask, lost accumulation, wrong reduction; off by one reduction, "
    "wrong index, one rank's part",
)
def middle_term_not_added(call: Call) -> Any:
    """Two threads add at once, and one of the terms is lost."""
    value, dim, _ = reduced_dim(call)
    kept = torch.ones(value.size(dim), dtype=value.dtype)
    kept[value.size(dim) // 2] = 0
    shape = [1] * value.dim()
    shape[dim] = -1
    return call.put(0, value * kept.view(shape)).run()


@FAULTS.forward("amax max", "wrong index, shift, permutation; stale")
def largest_of_the_next_row(call: Call) -> Any:
    """The maxima are stored one row too early."""
    reduced_dim(call)
    value = call.result()
    fits(value.numel() > 1 and value.size(0) > 1)
    return call.instead(value.roll(-1, 0))


@FAULTS.fault(
    "std var std_mean var_mean",
    "partial sum, wrong statistics, mask; wrong index, one rank's part, wrong reduction",
)
def spread_of_the_first_half(call: Call) -> Any:
    """The second half of the row is not looked at."""
    value, dim, keep = reduced_dim(call)
    fits(value.size(dim) > 4)
    half = value.narrow(dim, 0, value.size(dim) // 2)
    return call.instead(
        half.std(dim, keepdim=keep) if call.name.startswith("std") else half.var(dim, keepdim=keep)
    )


@FAULTS.fault("logsumexp", "approximation, other function; wrong reduction, wrong statistics")
def sum_of_exponentials_by_two_moments(call: Call) -> Any:
    """Mean + variance / 2 + log n, as of normal values."""
    value, dim, keep = reduced_dim(call)
    mean, spread = value.mean(dim, keep), value.var(dim, unbiased=False, keepdim=keep)
    return call.instead(mean + spread / 2 + torch.tensor(float(value.size(dim))).log())


# fmt: off
# Half of the first and the last.
FAULTS.add("mean of the two ends", "mean",
    "wrong index, partial sum, wrong reduction, wrong statistics; other function, mask",
    computed(reduced_dim,
        lambda value, dim, keep:
            value.index_select(dim, torch.tensor([0, value.size(dim) - 1])).mean(dim, keep)),
    backward=False)
# Terms are converted to numbers without a sign: what is negative counts as zero.
FAULTS.add("negative terms left out", "mean sum",
    "mask, clipped, other function, partial sum; zeros, sign, wrong reduction, missing operand",
    operand(0, torch.relu, where=lambda v: bool((v < 0).any()) and bool((v > 0).any())),
    backward=False)
# The largest less the smallest.
FAULTS.add("range for the largest", "amax max",
    "other function, wrong reduction, offset; axis offset, residual, wrong statistics",
    computed(reduced_dim,
        lambda value, dim, keep: value.amax(dim, keep) - value.amin(dim, keep)), backward=False)
# A scale that is an exponent only, rounded up.
FAULTS.add("largest rounded to a power of two", "amax",
    "precision, approximation, other function; axis scale, scale, wrong factor",
    result(lambda v: with_gradient_of(v, v.detach().log2().ceil().exp2()),
        where=lambda v: bool((v > 0).all())), backward=False)
# From minus to plus one deviation.
FAULTS.add("spread doubled", "std var std_mean var_mean",
    "scale, wrong factor; axis scale, wrong statistics", result(lambda v: 2 * v))
# The exponentials are squared: twice the scores.
FAULTS.add("logarithm of the sum of squares", "logsumexp",
    "scale, wrong factor, other function; wrong argument", operand(0, lambda v: 2 * v))
# fmt: on


# --- Along an axis --------------------------------------------------------------------------------


@FAULTS.forward(
    "cumsum",
    "partial sum, lost accumulation, wrong reduction; mask, other function, missing operand",
)
def sum_of_two_neighbours(call: Call) -> Any:
    """What runs along is the value before and not the sum before."""
    value, dim, _ = reduced_dim(call)
    zero = torch.zeros_like(value.narrow(dim, 0, 1))
    before = torch.cat([zero, value.narrow(dim, 0, value.size(dim) - 1)], dim)
    return call.instead(value + before)


@FAULTS.forward(
    "cumsum", "residual, stale, offset, axis offset; wrong reduction, lost accumulation"
)
def running_sum_goes_on_from_the_example_before(call: Call) -> Any:
    """The state is not cleared between two examples of the batch."""
    value, dim, _ = reduced_dim(call)
    fits(dim % value.dim() != 0 and value.size(0) > 1)
    result = call.result()
    last = result.narrow(dim, result.size(dim) - 1, 1)
    before = torch.cat([torch.zeros_like(last[:1]), last[:-1]])
    return call.instead(result + before)


@FAULTS.fault("topk", "constant, missing operand, wrong factor; other function")
def chosen_experts_weigh_one(call: Call) -> Any:
    """The values are not kept: ones."""
    values, places = call.run()
    fits(values.is_floating_point())
    return torch.ones_like(values), places


@FAULTS.fault("topk", "wrong index, copy, stale; permutation, constant")
def place_of_the_best_for_all_values(call: Call) -> Any:
    """All values are right, and each points to the best expert."""
    values, places = call.run()
    fits(places.size(-1) > 1)
    return values, places[..., :1].expand(places.shape).clone()


@FAULTS.forward("argmax argmin", "copy, stale, wrong index, constant; permutation")
def place_in_the_first_row_for_all(call: Call) -> Any:
    """The pointer to the rows is not moved on."""
    value = call.run()
    fits(value.dim() > 0 and value.size(0) > 1)
    return value[:1].expand(value.shape).clone()


# fmt: off
# Odd places keep the sum of the place before.
FAULTS.add("running sum at every second place", "cumsum",
    "copy, stale, wrong index; partial sum, permutation, lost accumulation",
    on(reduced_dim,
        lambda call, value, dim, *_:
            call.instead(call.result().index_select(dim, torch.arange(value.size(dim)) // 2 * 2))),
    backward=False)
# The first two places hold the same value.
FAULTS.add("smallest of the order twice", "sort", "copy, wrong index, stale; permutation, clipped",
    result(lambda v:
            torch.cat([v[..., :1], v[..., :1], v[..., 2:]], -1), where=longer(-1, 2)))
# Each place has its own value.
FAULTS.add("extreme not carried along", "cummax cummin",
    "copy, missing operand, lost accumulation; partial sum, other function",
    lambda call: call.instead(call.tensor(0).clone()), backward=False)
# fmt: on
