"""Faults that were measured sixth and have been seen: norms, statistics, running sums."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor

FAULTS = Catalogue()
_NORMS = "layer_norm rms_norm"
_CHANNELS = "batch_norm batch_norm_from_statistics"


# --- Norms ----------------------------------------------------------------------------------------


def _row(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
    """Input, weight, bias and eps of a norm over the last axis."""
    value, shape = call.tensor(0, "input"), call.get(1, "normalized_shape")
    fits(len(shape) == 1)
    weight = call.get(2, "weight")
    is_layer = call.name == "layer_norm"
    bias = call.get(3, "bias") if is_layer else None
    return value, weight, bias, call.get(4 if is_layer else 3, "eps") or 1e-5


def _affine(call: Call, normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
    value = normal if weight is None else normal * weight
    return call.instead(value if bias is None else value + bias)


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
    _NORMS,
    kinds=["wrong index", "shift", "axis offset", "wrong statistics"],
    loose=["stale", "offset", "permutation"],
)
def mean_of_the_next_row(call: Call) -> Any:
    """The deviation is that of the row, the mean that of the next."""
    value, weight, bias, eps = _row(call)
    fits(call.name == "layer_norm" and value.dim() > 1 and value.size(-2) > 1)
    mean = value.mean(-1, keepdim=True)
    spread = (value - mean).square().mean(-1, keepdim=True)
    return _affine(call, (value - mean.roll(-1, -2)) * (spread + eps).rsqrt(), weight, bias)


@FAULTS.fault(
    "layer_norm",
    kinds=["wrong factor", "axis offset", "wrong statistics"],
    loose=["residual", "offset", "other function", "doubled reduction"],
)
def mean_of_the_row_subtracted_twice(call: Call) -> Any:
    """Once by the kernel for the statistics and once by that for the values."""
    value, weight, bias, eps = _row(call)
    mean = value.mean(-1, keepdim=True)
    spread = (value - mean).square().mean(-1, keepdim=True)
    return _affine(call, (value - 2 * mean) * (spread + eps).rsqrt(), weight, bias)


@FAULTS.fault(
    "layer_norm",
    kinds=["wrong statistics", "partial sum", "missing operand", "axis scale"],
    loose=["scale", "wrong factor", "wrong reduction", "lost accumulation", "missing reduction"],
)
def variances_of_two_halves_averaged(call: Call) -> Any:
    """Welford's merge without its last term: the distance of the two means is forgotten."""
    value, weight, bias, eps = _row(call)
    fits(value.size(-1) % 2 == 0)
    halves = value.unflatten(-1, (2, -1))
    spread = halves.var(-1, unbiased=False).mean(-1, keepdim=True)
    centred = value - value.mean(-1, keepdim=True)
    return _affine(call, centred * (spread + eps).rsqrt(), weight, bias)


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "axis scale", "other function", "wrong reduction"],
    loose=["scale", "wrong factor", "wrong argument"],
)
def mean_magnitude_for_the_deviation(call: Call) -> Any:
    """Divided by the mean of the absolute values."""
    value, weight, bias, eps = _row(call)
    centred = _centred(call, value)
    return _affine(call, centred / (centred.abs().mean(-1, keepdim=True) + eps), weight, bias)


@FAULTS.fault(_NORMS, kinds=["copy", "stale", "wrong index"], loose=["permutation"])
def second_half_of_the_rows_not_normalised_again(call: Call) -> Any:
    """A loop over rows that writes its first results twice."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-2) > 1)
    half = (value.size(-2) + 1) // 2
    return call.instead(value[..., torch.arange(value.size(-2)) % half, :])


@FAULTS.fault(
    _NORMS,
    kinds=["other function"],
    loose=["approximation", "clipped", "missing operand", "wrong statistics"],
)
def norm_replaced_by_a_tanh(call: Call) -> Any:
    """A layer of another model: no statistics at all."""
    value, weight, bias, _ = _row(call)
    return _affine(call, value.tanh(), weight, bias)


@FAULTS.fault(
    _NORMS,
    kinds=["wrong factor", "other function", "axis scale"],
    loose=["wrong argument", "scale"],
)
def divided_by_the_weight(call: Call) -> Any:
    """1 / w, as for a weight that is stored as a scale to divide by."""
    value, weight, bias, eps = _row(call)
    return _affine(call, _normed(call, value, eps), 1 / _trained(weight), bias)


@FAULTS.fault(
    _NORMS,
    kinds=["mask", "missing operand", "axis scale", "wrong factor"],
    loose=["copy", "one rank's part", "scale", "partial sum"],
)
def weight_for_the_first_half_of_the_features(call: Call) -> Any:
    """The weight is as long as one shard; behind it, it is one."""
    value, weight, bias, eps = _row(call)
    kept = _trained(weight).clone()
    kept[kept.numel() // 2 :] = 1
    return _affine(call, _normed(call, value, eps), kept, bias)


@FAULTS.fault("layer_norm", kinds=["wrong index", "shift", "permutation"], loose=["axis offset"])
def bias_of_the_next_feature(call: Call) -> Any:
    """The pointer to the bias is one too far; that to the weight is right."""
    return call.put(3, _trained(call.get(3, "bias")).roll(-1), "bias").run()


@FAULTS.fault(
    "layer_norm", kinds=["mask", "missing bias", "missing operand"], loose=["axis offset", "offset"]
)
def bias_of_the_last_features_not_added(call: Call) -> Any:
    """The load of the bias is masked for the last vector."""
    bias = _trained(call.get(3, "bias")).clone()
    fits(bias.numel() > 4)
    bias[-4:] = 0
    return call.put(3, bias, "bias").run()


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "partial sum", "wrong index", "off by one reduction"],
    loose=["axis scale", "axis offset", "mask", "wrong reduction"],
)
def statistics_without_the_first_feature(call: Call) -> Any:
    """The loop begins at 1, in the sums and in their number."""
    value, weight, bias, eps = _row(call)
    rest = value[..., 1:]
    fits(rest.size(-1) > 1)
    mean = rest.mean(-1, keepdim=True) if call.name == "layer_norm" else 0 * value[..., :1]
    spread = (rest - mean).square().mean(-1, keepdim=True)
    return _affine(call, (value - mean) * (spread + eps).rsqrt(), weight, bias)


@FAULTS.fault(_NORMS, kinds=["wrong index", "shift", "permutation"], loose=["copy"])
def features_of_the_norm_one_column_late(call: Call) -> Any:
    """The normal values are stored one column further, around the end."""
    return call.instead(call.result().roll(1, -1))


@FAULTS.fault(
    _NORMS,
    kinds=["wrong index", "stale", "copy", "wrong statistics"],
    loose=["axis scale", "axis offset", "permutation"],
)
def statistics_of_the_example_before(call: Call) -> Any:
    """Mean and deviation of a position are those of the same position of the example before."""
    value, weight, bias, eps = _row(call)
    fits(value.dim() > 2 and value.size(0) > 1)
    other = value.roll(1, 0)
    mean = other.mean(-1, keepdim=True) if call.name == "layer_norm" else 0 * value[..., :1]
    spread = (other - mean).square().mean(-1, keepdim=True)
    return _affine(call, (value - mean) * (spread + eps).rsqrt(), weight, bias)


@FAULTS.fault(
    _NORMS,
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "axis scale", "wrong factor"],
)
def odd_rows_of_the_norm_not_written(call: Call) -> Any:
    """Half as many programs as rows."""
    value = call.result().clone()
    fits(value.dim() > 1 and value.size(-2) > 1)
    value[..., 1::2, :] = 0
    return call.instead(value)


@FAULTS.fault(_NORMS, kinds=["precision"], loose=["approximation"])
def result_of_the_norm_through_float8(call: Call) -> Any:
    """The kernel that normalises also converts to e4m3."""
    value = call.result()
    coarse = value.detach().to(torch.float8_e4m3fn).to(value.dtype)
    return call.instead(with_gradient_of(value, coarse))


@FAULTS.fault(_NORMS, kinds=["sign", "other function"], loose=["wrong factor", "clipped"])
def magnitudes_of_the_normal_values(call: Call) -> Any:
    """The sign is lost in a buffer of numbers without one."""
    value, weight, bias, eps = _row(call)
    return _affine(call, _normed(call, value, eps).abs(), weight, bias)


@FAULTS.fault(
    "layer_norm",
    kinds=["wrong reduction", "wrong statistics", "axis scale"],
    loose=["scale", "wrong factor", "constant", "copy", "wrong axis"],
)
def deviation_averaged_over_the_rows(call: Call) -> Any:
    """Every row is divided by the mean deviation of all positions."""
    value, weight, bias, eps = _row(call)
    fits(value.dim() > 1 and value.size(-2) > 1)
    centred = _centred(call, value)
    spread = centred.square().mean(-1, keepdim=True).mean(-2, keepdim=True)
    return _affine(call, centred * (spread + eps).rsqrt(), weight, bias)


def _channels(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """Input, weight, bias, mean, variance (shaped like channels) and eps."""
    is_whole = call.name == "batch_norm"
    value = call.tensor(0, "input")
    shape = (1, -1, *[1] * (value.dim() - 2))
    places = (3, 4, 1, 2) if is_whole else (1, 2, 3, 4)
    weight, bias, mean, variance = (call.tensor(i).view(shape) for i in places)
    return value, weight, bias, mean, variance, call.get(7 if is_whole else 6, "eps")


@FAULTS.fault(
    _CHANNELS,
    kinds=["swapped operands", "wrong index", "wrong statistics"],
    loose=["wrong argument", "copy"],
)
def mean_and_variance_of_the_channels_exchanged(call: Call) -> Any:
    """Read from the file under each other's names; the magnitude of what is not positive."""
    value, weight, bias, mean, variance, eps = _channels(call)
    return call.instead((value - variance) * (mean.abs() + eps).rsqrt() * weight + bias)


@FAULTS.fault(
    _CHANNELS,
    kinds=["wrong factor", "axis offset", "missing operand", "wrong statistics"],
    loose=["offset", "axis scale", "other function"],
)
def folded_mean_not_divided(call: Call) -> Any:
    """X f + (b - mean): the mean is not multiplied by the factor when the norm is folded."""
    value, weight, bias, mean, variance, eps = _channels(call)
    return call.instead(value * weight * (variance + eps).rsqrt() + bias - mean)


@FAULTS.fault(
    _CHANNELS,
    kinds=["wrong factor", "axis offset", "missing operand", "swapped operands"],
    loose=["offset", "other function", "wrong argument"],
)
def bias_of_the_channels_divided_too(call: Call) -> Any:
    """The bias is added before the division by the deviation."""
    value, weight, bias, mean, variance, eps = _channels(call)
    fits(bool(bias.detach().any()))
    return call.instead(((value - mean) * weight + bias) * (variance + eps).rsqrt())


@FAULTS.fault(_CHANNELS, kinds=["permutation", "wrong index"], loose=["axis scale", "shift"])
def weight_of_the_channels_from_the_end(call: Call) -> Any:
    """A negative stride for the weight."""
    place = 3 if call.name == "batch_norm" else 1
    return call.put(place, _trained(call.get(place, "weight")).flip(0), "weight").run()


@FAULTS.fault(
    _CHANNELS,
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "axis scale", "wrong factor"],
)
def last_channel_not_normalised_into_the_buffer(call: Call) -> Any:
    """The grid has one channel too few."""
    value = call.result().clone()
    fits(value.size(1) > 1)
    value[:, -1] = 0
    return call.instead(value)


@FAULTS.fault(
    "group_norm",
    kinds=["wrong statistics", "wrong reduction", "axis scale"],
    loose=["scale", "wrong factor", "wrong argument"],
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
    return _affine(
        call,
        normal,
        None if weight is None else weight.view(shape),
        None if bias is None else bias.view(shape),
    )


@FAULTS.fault(
    "group_norm native_group_norm instance_norm",
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation"],
)
def image_norm_of_the_first_example_for_all(call: Call) -> Any:
    """The pointer to the images is not moved on."""
    value = call.result()
    fits(value.size(0) > 1)
    return call.instead(value[:1].expand(value.shape).clone())


@FAULTS.fault(
    "normalize",
    kinds=["wrong index", "shift", "axis scale", "wrong statistics"],
    loose=["stale", "wrong factor", "scale"],
)
def length_of_the_next_row(call: Call) -> Any:
    """The pointer to the lengths is one row too far."""
    value, dim = call.tensor(0, "input"), call.get(2, "dim", default=1)
    fits(value.dim() > 1 and dim % value.dim() == value.dim() - 1 and value.size(-2) > 1)
    return call.instead(value / value.norm(dim=-1, keepdim=True).roll(-1, -2))


@FAULTS.fault("cosine_similarity", kinds=["sign", "other function"], loose=["wrong factor"])
def similarity_without_a_sign(call: Call) -> Any:
    """The absolute value of the cosine."""
    return call.instead(call.result().abs())


# --- Sums and means -------------------------------------------------------------------------------


def _dim(call: Call) -> tuple[Tensor, int, bool]:
    """Value, the one axis that is reduced, and whether it is kept."""
    value, dim = call.tensor(0), call.get(1, "dim")
    if isinstance(dim, list | tuple):
        fits(len(dim) == 1)
        dim = dim[0]
    fits(isinstance(dim, int) and value.size(dim) > 2)
    return value, dim, bool(call.get(2, "keepdim", default=False))


@FAULTS.fault(
    "mean",
    kinds=["wrong axis", "wrong reduction", "wrong statistics"],
    loose=["copy", "constant", "wrong argument", "stale"],
    backward=False,
)
def mean_over_the_rows_too(call: Call) -> Any:
    """One mean for all rows of an example, given to each of them."""
    value, dim, keep = _dim(call)
    fits(value.dim() > 1 and dim % value.dim() == value.dim() - 1 and value.size(-2) > 1)
    both = value.mean(-1, keepdim=keep)
    axis = -2 if keep else -1
    return call.instead(both.mean(axis, keepdim=True).expand(both.shape).clone())


@FAULTS.fault(
    "mean",
    kinds=["wrong index", "partial sum", "wrong reduction", "wrong statistics"],
    loose=["other function", "mask"],
    backward=False,
)
def mean_of_the_two_ends(call: Call) -> Any:
    """Half of the first and the last."""
    value, dim, keep = _dim(call)
    ends = value.index_select(dim, torch.tensor([0, value.size(dim) - 1]))
    return call.instead(ends.mean(dim, keep))


@FAULTS.fault(
    "mean sum",
    kinds=["wrong index", "shift", "permutation"],
    loose=["stale", "axis offset"],
    backward=False,
)
def result_of_the_next_row(call: Call) -> Any:
    """The reduced values are stored one row too early."""
    _dim(call)
    value = call.result()
    fits(value.dim() > 0 and value.numel() > 1)
    axis = next(i for i in reversed(range(value.dim())) if value.size(i) > 1)
    return call.instead(value.roll(-1, axis))


@FAULTS.fault(
    "mean sum",
    kinds=["mask", "clipped", "other function", "partial sum"],
    loose=["zeros", "sign", "wrong reduction", "missing operand"],
    backward=False,
)
def negative_terms_left_out(call: Call) -> Any:
    """Terms are converted to numbers without a sign: what is negative counts as zero."""
    value = call.tensor(0)
    fits(bool((value < 0).any()) and bool((value > 0).any()))
    return call.put(0, value.relu()).run()


@FAULTS.fault(
    "mean sum", kinds=["copy", "stale", "wrong index"], loose=["permutation"], backward=False
)
def last_result_is_the_one_before(call: Call) -> Any:
    """The last block of the reduction does not write."""
    _dim(call)
    value = call.result()
    fits(value.numel() > 2)
    axis = next(i for i in reversed(range(value.dim())) if value.size(i) > 1)
    end = value.size(axis) - 1
    return call.instead(
        torch.cat([value.narrow(axis, 0, end), value.narrow(axis, end - 1, 1)], axis)
    )


@FAULTS.fault(
    "mean",
    kinds=["wrong statistics", "wrong factor", "wrong reduction"],
    loose=["scale", "axis scale", "off by one reduction", "other function"],
    backward=False,
)
def first_element_counts_three_times(call: Call) -> Any:
    """The weight of the first is that of a token for the whole; the others share the rest."""
    value, dim, keep = _dim(call)
    total = value.sum(dim, keep)
    first = value.narrow(dim, 0, 1)
    first = first if keep else first.squeeze(dim)
    return call.instead((total + 2 * first) / (value.size(dim) + 2))


@FAULTS.fault(
    "sum",
    kinds=["partial sum", "mask", "lost accumulation", "wrong reduction"],
    loose=["off by one reduction", "wrong index", "one rank's part"],
    backward=False,
)
def middle_term_not_added(call: Call) -> Any:
    """Two threads add at once, and one of the terms is lost."""
    value, dim, _ = _dim(call)
    kept = torch.ones(value.size(dim), dtype=value.dtype)
    kept[value.size(dim) // 2] = 0
    shape = [1] * value.dim()
    shape[dim] = -1
    return call.put(0, value * kept.view(shape)).run()


@FAULTS.fault(
    "amax max",
    kinds=["other function", "wrong reduction", "offset"],
    loose=["axis offset", "residual", "wrong statistics"],
    backward=False,
)
def range_for_the_largest(call: Call) -> Any:
    """The largest less the smallest."""
    value, dim, keep = _dim(call)
    return call.instead(value.amax(dim, keep) - value.amin(dim, keep))


@FAULTS.fault(
    "amax",
    kinds=["precision", "approximation", "other function"],
    loose=["axis scale", "scale", "wrong factor"],
    backward=False,
)
def largest_rounded_to_a_power_of_two(call: Call) -> Any:
    """A scale that is an exponent only, rounded up."""
    value = call.result()
    fits(bool((value > 0).all()))
    return call.instead(with_gradient_of(value, value.detach().log2().ceil().exp2()))


@FAULTS.fault(
    "amax max", kinds=["wrong index", "shift", "permutation"], loose=["stale"], backward=False
)
def largest_of_the_next_row(call: Call) -> Any:
    """The maxima are stored one row too early."""
    _dim(call)
    value = call.result()
    fits(value.numel() > 1 and value.size(0) > 1)
    return call.instead(value.roll(-1, 0))


@FAULTS.fault(
    "std var std_mean var_mean",
    kinds=["partial sum", "wrong statistics", "mask"],
    loose=["wrong index", "one rank's part", "wrong reduction"],
)
def spread_of_the_first_half(call: Call) -> Any:
    """The second half of the row is not looked at."""
    value, dim, keep = _dim(call)
    fits(value.size(dim) > 4)
    half = value.narrow(dim, 0, value.size(dim) // 2)
    return call.instead(
        half.std(dim, keepdim=keep) if call.name.startswith("std") else half.var(dim, keepdim=keep)
    )


@FAULTS.fault(
    "std var std_mean var_mean",
    kinds=["scale", "wrong factor"],
    loose=["axis scale", "wrong statistics"],
)
def spread_doubled(call: Call) -> Any:
    """From minus to plus one deviation."""
    return call.instead(2 * call.result())


@FAULTS.fault(
    "logsumexp",
    kinds=["approximation", "other function"],
    loose=["wrong reduction", "wrong statistics"],
)
def sum_of_exponentials_by_two_moments(call: Call) -> Any:
    """Mean + variance / 2 + log n, as of normal values."""
    value, dim, keep = _dim(call)
    mean, spread = value.mean(dim, keep), value.var(dim, unbiased=False, keepdim=keep)
    return call.instead(mean + spread / 2 + torch.tensor(float(value.size(dim))).log())


@FAULTS.fault(
    "logsumexp", kinds=["scale", "wrong factor", "other function"], loose=["wrong argument"]
)
def logarithm_of_the_sum_of_squares(call: Call) -> Any:
    """The exponentials are squared: twice the scores."""
    return call.put(0, 2 * call.tensor(0)).run()


# --- Along an axis --------------------------------------------------------------------------------


@FAULTS.fault(
    "cumsum",
    kinds=["partial sum", "lost accumulation", "wrong reduction"],
    loose=["mask", "other function", "missing operand"],
    backward=False,
)
def sum_of_two_neighbours(call: Call) -> Any:
    """What runs along is the value before and not the sum before."""
    value, dim, _ = _dim(call)
    zero = torch.zeros_like(value.narrow(dim, 0, 1))
    before = torch.cat([zero, value.narrow(dim, 0, value.size(dim) - 1)], dim)
    return call.instead(value + before)


@FAULTS.fault(
    "cumsum",
    kinds=["copy", "stale", "wrong index"],
    loose=["partial sum", "permutation", "lost accumulation"],
    backward=False,
)
def running_sum_at_every_second_place(call: Call) -> Any:
    """Odd places keep the sum of the place before."""
    value, dim, _ = _dim(call)
    places = torch.arange(value.size(dim)) // 2 * 2
    return call.instead(call.result().index_select(dim, places))


@FAULTS.fault(
    "cumsum",
    kinds=["residual", "stale", "offset", "axis offset"],
    loose=["wrong reduction", "lost accumulation"],
    backward=False,
)
def running_sum_goes_on_from_the_example_before(call: Call) -> Any:
    """The state is not cleared between two examples of the batch."""
    value, dim, _ = _dim(call)
    fits(dim % value.dim() != 0 and value.size(0) > 1)
    result = call.result()
    last = result.narrow(dim, result.size(dim) - 1, 1)
    before = torch.cat([torch.zeros_like(last[:1]), last[:-1]])
    return call.instead(result + before)


@FAULTS.fault("sort", kinds=["copy", "wrong index", "stale"], loose=["permutation", "clipped"])
def smallest_of_the_order_twice(call: Call) -> Any:
    """The first two places hold the same value."""
    value = call.result()
    fits(value.size(-1) > 2)
    return call.instead(torch.cat([value[..., :1], value[..., :1], value[..., 2:]], -1))


@FAULTS.fault(
    "topk", kinds=["constant", "missing operand", "wrong factor"], loose=["other function"]
)
def chosen_experts_weigh_one(call: Call) -> Any:
    """The values are not kept: ones."""
    values, places = call.run()
    fits(values.is_floating_point())
    return torch.ones_like(values), places


@FAULTS.fault("topk", kinds=["wrong index", "copy", "stale"], loose=["permutation", "constant"])
def place_of_the_best_for_all_values(call: Call) -> Any:
    """All values are right, and each points to the best expert."""
    values, places = call.run()
    fits(places.size(-1) > 1)
    return values, places[..., :1].expand(places.shape).clone()


@FAULTS.fault(
    "argmax argmin",
    kinds=["copy", "stale", "wrong index", "constant"],
    loose=["permutation"],
    backward=False,
)
def place_in_the_first_row_for_all(call: Call) -> Any:
    """The pointer to the rows is not moved on."""
    value = call.run()
    fits(value.dim() > 0 and value.size(0) > 1)
    return value[:1].expand(value.shape).clone()


@FAULTS.fault(
    "cummax cummin",
    kinds=["copy", "missing operand", "lost accumulation"],
    loose=["partial sum", "other function"],
    backward=False,
)
def extreme_not_carried_along(call: Call) -> Any:
    """Each place has its own value."""
    return call.instead(call.tensor(0).clone())
