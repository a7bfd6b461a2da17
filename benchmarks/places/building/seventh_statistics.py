"""Faults for measuring: norms, statistics, running sums, orders."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor

FAULTS = Catalogue()
_NORMS = "layer_norm rms_norm"
_CHANNELS = "batch_norm batch_norm_from_statistics"
_EMPTY: dict[str, Any] = {
    "kinds": ["zeros", "mask", "uninitialised"],
    "loose": ["constant", "missing operand", "partial sum", "axis scale", "wrong factor"],
}
_MOVED: dict[str, Any] = {
    "kinds": ["shift", "wrong index", "permutation"],
    "loose": ["copy", "stale", "wrong argument", "wrong rank's shard", "swapped operands"],
}
_ORDER: dict[str, Any] = {
    "kinds": ["permutation", "wrong index"],
    "loose": ["shift", "swapped operands", "transpose", "wrong argument", "wrong rank's shard"],
}
_AGAIN: dict[str, Any] = {
    "kinds": ["copy", "stale", "wrong index"],
    "loose": ["permutation", "constant", "shift", "wrong argument", "wrong rank's shard"],
}
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function", "wrong argument", "axis scale", "scale"],
}
_CUT: dict[str, Any] = {
    "kinds": ["clipped"],
    "loose": ["other function", "precision", "wrong argument", "overflow", "mask"],
}


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


def _normal(call: Call) -> Tensor:
    """The normal values, before the weight."""
    value, _, _, eps = _row(call)
    mean, spread = _moments(call, value)
    return (value - mean) * (spread + eps).rsqrt()


def _moments(call: Call, value: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (zero, if the norm has none) and variance of the rows."""
    mean = value.mean(-1, keepdim=True)
    if call.name == "rms_norm":
        mean = 0 * mean
    return mean, (value - mean).square().mean(-1, keepdim=True)


def _by(call: Call, mean: Tensor, spread: Tensor) -> Any:
    """The norm with another mean and variance."""
    value, weight, bias, eps = _row(call)
    return _affine(call, (value - mean) * (spread + eps).rsqrt(), weight, bias)


def _trained(weight: Any) -> Tensor:
    """A weight whose elements are not all the same."""
    fits(isinstance(weight, Tensor) and weight.dim() == 1)
    fits(bool((weight.detach() != weight.detach()[0]).any()))
    return weight


def _several(value: Tensor, axis: int = -2) -> Tensor:
    """The value, if it is longer than one along an axis."""
    fits(value.dim() >= (-axis if axis < 0 else axis + 1) and value.size(axis) > 1)
    return value


@FAULTS.fault(_NORMS, **_AGAIN)
def weight_of_the_first_half_for_both(call: Call) -> Any:
    """The second tile of features is multiplied by the weight of the first."""
    weight = _trained(call.get(2, "weight"))
    half = (weight.numel() + 1) // 2
    return call.put(2, weight[torch.arange(weight.numel()) % half], "weight").run()


@FAULTS.fault(
    _NORMS,
    kinds=["other function", "residual", "axis offset"],
    loose=["offset", "wrong factor", "missing operand"],
)
def weight_added_and_not_multiplied(call: Call) -> Any:
    """Normal values plus the weight, plus the bias."""
    _, weight, bias, _ = _row(call)
    fits(weight is not None)
    value = _normal(call) + weight
    return call.instead(value if bias is None else value + bias)


@FAULTS.fault(_NORMS, **_ROUNDED)
def weight_in_steps_of_a_quarter(call: Call) -> Any:
    """The weight is kept with two bits behind the point."""
    weight = _trained(call.get(2, "weight"))
    coarse = (weight.detach() * 4).round() / 4
    return call.put(2, with_gradient_of(weight, coarse), "weight").run()


@FAULTS.fault(_NORMS, **_CUT)
def weight_not_above_one(call: Call) -> Any:
    """A norm that may only damp: weights above one are one."""
    weight = _trained(call.get(2, "weight"))
    return call.put(2, weight.clamp(max=1.0), "weight").run()


@FAULTS.fault("layer_norm", **_ORDER)
def halves_of_the_norms_bias_exchanged(call: Call) -> Any:
    """The bias is packed in the other order than the weight."""
    bias = _trained(call.get(3, "bias"))
    return call.put(3, bias.roll(bias.numel() // 2), "bias").run()


@FAULTS.fault(
    "layer_norm",
    kinds=["clipped", "other function"],
    loose=["mask", "zeros", "axis offset", "wrong argument", "partial sum"],
)
def negative_biases_of_the_norm_lost(call: Call) -> Any:
    """The bias is stored as numbers without a sign, and what is negative is zero."""
    return call.put(3, _trained(call.get(3, "bias")).relu(), "bias").run()


@FAULTS.fault(
    "layer_norm",
    kinds=["wrong statistics", "wrong reduction", "axis offset"],
    loose=["offset", "other function", "wrong index", "residual"],
)
def median_of_the_row_subtracted(call: Call) -> Any:
    """The value in the middle for the mean; the deviation is right."""
    value, _, _, _ = _row(call)
    _, spread = _moments(call, value)
    return _by(call, value.median(-1, keepdim=True).values, spread)


@FAULTS.fault(
    "layer_norm",
    kinds=["wrong statistics", "wrong reduction", "axis offset", "wrong axis"],
    loose=["offset", "constant", "residual"],
)
def mean_of_the_whole_tensor_subtracted(call: Call) -> Any:
    """One mean for all rows; each has its own deviation."""
    value, _, _, _ = _row(call)
    _several(value)
    mean, spread = _moments(call, value)
    return _by(call, value.mean().expand(mean.shape), spread)


@FAULTS.fault(
    "layer_norm",
    kinds=["wrong statistics", "wrong index", "axis offset", "missing reduction"],
    loose=["offset", "copy", "wrong reduction", "partial sum", "residual"],
)
def first_feature_subtracted_for_the_mean(call: Call) -> Any:
    """The shift that keeps a sum of squares exact is taken for the mean itself."""
    value, _, _, _ = _row(call)
    _, spread = _moments(call, value)
    return _by(call, value[..., :1], spread)


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "partial sum", "axis scale", "one rank's part", "missing reduction"],
    loose=["scale", "wrong factor", "wrong reduction", "mask"],
)
def deviation_of_the_first_half_of_the_row(call: Call) -> Any:
    """The squares of the second rank are not added, nor counted; the mean is right."""
    value, _, _, _ = _row(call)
    fits(value.size(-1) > 3)
    mean, _ = _moments(call, value)
    half = (value - mean)[..., : value.size(-1) // 2]
    return _by(call, mean, half.square().mean(-1, keepdim=True))


@FAULTS.fault(
    _NORMS,
    kinds=["clipped", "wrong statistics", "axis scale"],
    loose=["scale", "wrong factor", "eps", "other function", "constant"],
)
def variance_not_above_the_mean_of_all(call: Call) -> Any:
    """Rows with a large variance are divided by less."""
    value, _, _, _ = _row(call)
    _several(value)
    mean, spread = _moments(call, value)
    return _by(call, mean, spread.clamp(max=float(spread.detach().mean())))


@FAULTS.fault(
    _NORMS,
    kinds=["approximation", "other function", "axis scale", "wrong statistics"],
    loose=["scale", "wrong factor"],
)
def reciprocal_root_by_a_line(call: Call) -> Any:
    """1.5 - v / 2: one step of Newton's rule that begins with one."""
    value, weight, bias, _ = _row(call)
    mean, spread = _moments(call, value)
    return _affine(call, (value - mean) * (1.5 - spread / 2), weight, bias)


@FAULTS.fault(
    _NORMS,
    kinds=["other function", "wrong statistics", "wrong factor"],
    loose=["axis scale", "axis offset", "scale", "wrong argument"],
)
def weight_applied_before_the_statistics(call: Call) -> Any:
    """The norm of x w, plus the bias."""
    value, weight, bias, eps = _row(call)
    value = value * _trained(weight)
    mean, spread = _moments(call, value)
    return _affine(call, (value - mean) * (spread + eps).rsqrt(), None, bias)


@FAULTS.fault(
    _NORMS,
    kinds=["mask", "copy", "missing operand"],
    loose=["stale", "axis scale", "axis offset", "wrong factor", "other function"],
)
def first_row_not_normalised(call: Call) -> Any:
    """In place, and the grid begins with the second row."""
    value, result = call.tensor(0, "input"), _several(call.result())
    return call.instead(torch.cat([value[..., :1, :], result[..., 1:, :]], -2))


@FAULTS.fault(_NORMS, **_ORDER)
def halves_of_the_normal_row_exchanged(call: Call) -> Any:
    """The second half of the features is stored first, weight and bias as well."""
    value = call.result()
    fits(value.size(-1) % 2 == 0)
    return call.instead(value.roll(value.size(-1) // 2, -1))


@FAULTS.fault(_NORMS, **_ORDER)
def normal_features_exchanged_in_pairs(call: Call) -> Any:
    """Words of two values are stored in the other order."""
    value = call.result()
    fits(value.size(-1) % 2 == 0)
    return call.instead(value.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


@FAULTS.fault(
    _NORMS,
    kinds=["eps", "wrong argument"],
    loose=["axis scale", "scale", "wrong factor", "wrong statistics", "offset"],
)
def eps_of_one(call: Call) -> Any:
    """The argument of another norm: 1 is added to the variance."""
    value, _, _, eps = _row(call)
    mean, spread = _moments(call, value)
    return _by(call, mean, spread + 1 - eps)


@FAULTS.fault(
    _NORMS,
    kinds=["copy", "stale", "wrong index", "wrong statistics"],
    loose=["axis scale", "axis offset", "permutation", "shift"],
)
def two_rows_share_their_statistics(call: Call) -> Any:
    """Odd rows take mean and deviation of the row before them."""
    value, _, _, _ = _row(call)
    _several(value)
    rows = torch.arange(value.size(-2)) // 2 * 2
    mean, spread = _moments(call, value)
    return _by(call, mean[..., rows, :], spread[..., rows, :])


@FAULTS.fault(_NORMS, **_ROUNDED)
def reciprocal_deviation_in_float8(call: Call) -> Any:
    """1 / sqrt(v + eps) is kept in e4m3."""
    value, weight, bias, eps = _row(call)
    mean, spread = _moments(call, value)
    inverse = (spread + eps).rsqrt()
    coarse = inverse.detach().to(torch.float8_e4m3fn).to(inverse.dtype)
    return _affine(call, (value - mean) * with_gradient_of(inverse, coarse), weight, bias)


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "doubled reduction", "off by one reduction", "wrong reduction"],
    loose=["axis scale", "axis offset", "mask", "wrong factor", "partial sum"],
)
def last_feature_counted_twice(call: Call) -> Any:
    """The tail overlaps the body by one in the sums; they are divided by the right number."""
    value, _, _, _ = _row(call)
    longer = torch.cat([value, value[..., -1:]], -1)
    size = value.size(-1)
    mean = longer.sum(-1, keepdim=True) / size
    if call.name == "rms_norm":
        mean = 0 * mean
    return _by(call, mean, (longer - mean).square().sum(-1, keepdim=True) / size)


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "wrong reduction", "axis scale", "other function"],
    loose=["wrong factor", "scale", "wrong argument"],
)
def fourth_powers_for_the_squares(call: Call) -> Any:
    """The deviation is the fourth root of the mean of fourth powers."""
    value, weight, bias, eps = _row(call)
    mean, _ = _moments(call, value)
    centred = value - mean
    spread = (centred.square().square().mean(-1, keepdim=True) + eps**2).sqrt()
    return _affine(call, centred * spread.rsqrt(), weight, bias)


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "partial sum", "mask"],
    loose=["axis scale", "axis offset", "off by one reduction", "wrong reduction", "clipped"],
)
def largest_feature_not_in_the_statistics(call: Call) -> Any:
    """The outlier of each row is left out of mean and variance, and of their number."""
    value, _, _, _ = _row(call)
    count = value.size(-1) - 1
    fits(count > 1)
    kept = torch.ones_like(value)
    kept.scatter_(-1, value.detach().abs().argmax(-1, keepdim=True), 0)
    mean = (value * kept).sum(-1, keepdim=True) / count
    if call.name == "rms_norm":
        mean = 0 * mean
    return _by(call, mean, ((value - mean).square() * kept).sum(-1, keepdim=True) / count)


@FAULTS.fault(
    "layer_norm",
    kinds=["wrong statistics", "axis scale", "wrong index"],
    loose=["stale", "shift", "wrong factor", "scale", "wrong reduction"],
)
def variance_about_the_mean_of_the_next_row(call: Call) -> Any:
    """The squares are those of the distance to another row's mean; the mean itself is right."""
    value, _, _, _ = _row(call)
    _several(value)
    mean, _ = _moments(call, value)
    spread = (value - mean.roll(-1, -2)).square().mean(-1, keepdim=True)
    return _by(call, mean, spread)


@FAULTS.fault(
    _NORMS,
    kinds=["eps", "wrong factor", "scale", "wrong statistics"],
    loose=["axis scale", "wrong argument"],
)
def eps_relative_to_the_variance(call: Call) -> Any:
    """A tenth of the variance is added to it, and not a number."""
    value, _, _, _ = _row(call)
    mean, spread = _moments(call, value)
    return _by(call, mean, 1.1 * spread)


@FAULTS.fault(
    "layer_norm",
    kinds=["wrong statistics", "wrong factor", "wrong reduction", "axis offset"],
    loose=["offset", "partial sum", "lost accumulation", "other function"],
)
def means_of_unequal_parts_merged_as_equal(call: Call) -> Any:
    """Welford's merge of the first quarter with the rest takes half of each mean."""
    value, _, _, _ = _row(call)
    quarter = value.size(-1) // 4
    fits(quarter > 0)
    _, spread = _moments(call, value)
    parts = value[..., :quarter], value[..., quarter:]
    mean = sum(one.mean(-1, keepdim=True) for one in parts) / 2
    return _by(call, mean, spread)


def _channels(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """Input, weight, bias, mean, variance (shaped like channels) and eps."""
    is_whole = call.name == "batch_norm"
    value = call.tensor(0, "input")
    shape = (1, -1, *[1] * (value.dim() - 2))
    places = (3, 4, 1, 2) if is_whole else (1, 2, 3, 4)
    weight, bias, mean, variance = (call.tensor(i).view(shape) for i in places)
    return value, weight, bias, mean, variance, call.get(7 if is_whole else 6, "eps")


def _whole(call: Call, mean: Tensor, variance: Tensor) -> Any:
    """The norm of channels with other statistics."""
    value, weight, bias, _, _, eps = _channels(call)
    return call.instead((value - mean) * (variance + eps).rsqrt() * weight + bias)


@FAULTS.fault(
    _CHANNELS,
    kinds=["shift", "wrong index", "permutation", "wrong statistics"],
    loose=["axis scale", "stale", "wrong argument", "wrong factor"],
)
def variance_of_the_next_channel(call: Call) -> Any:
    """The pointer to the variances is one too far; that to the means is right."""
    _, _, _, mean, variance, _ = _channels(call)
    return _whole(call, mean, variance.roll(-1, 1))


@FAULTS.fault(
    _CHANNELS,
    kinds=["copy", "stale", "wrong index", "wrong statistics"],
    loose=["axis offset", "constant", "wrong argument", "offset"],
)
def mean_of_the_first_channel_for_all(call: Call) -> Any:
    """The stride of the means is zero."""
    _, _, _, mean, variance, _ = _channels(call)
    return _whole(call, mean[:, :1].expand(mean.shape), variance)


@FAULTS.fault(_CHANNELS, **_MOVED)
def weight_of_the_next_channel(call: Call) -> Any:
    """The pointer to the weights of the channels is one too far."""
    place = 3 if call.name == "batch_norm" else 1
    return call.put(place, _trained(call.get(place, "weight")).roll(-1), "weight").run()


@FAULTS.fault(
    _CHANNELS,
    kinds=["wrong statistics", "wrong factor", "wrong argument"],
    loose=["axis scale", "scale", "off by one reduction"],
)
def variance_divided_by_one_less_once_more(call: Call) -> Any:
    """The kept variance is corrected by n / (n - 1), which was done when it was kept."""
    value, _, _, mean, variance, _ = _channels(call)
    count = value.numel() // value.size(1)
    fits(count > 1)
    return _whole(call, mean, variance * count / (count - 1))


@FAULTS.fault(
    _CHANNELS,
    kinds=["mask", "copy", "missing operand"],
    loose=["stale", "axis scale", "axis offset", "wrong factor", "other function"],
)
def odd_channels_not_normalised(call: Call) -> Any:
    """In place, with half as many programs as channels."""
    value, result = call.tensor(0, "input"), call.result()
    fits(value.size(1) > 1)
    odd = (torch.arange(value.size(1)) % 2 == 1).view(-1, *[1] * (value.dim() - 2))
    return call.instead(torch.where(odd, value, result))


@FAULTS.fault(
    _CHANNELS,
    kinds=["wrong statistics", "wrong reduction", "constant"],
    loose=["axis scale", "wrong argument", "copy", "wrong factor", "scale"],
)
def one_variance_for_all_channels(call: Call) -> Any:
    """The mean of the variances, as of a norm that is quantised by the tensor."""
    _, _, _, mean, variance, _ = _channels(call)
    fits(variance.numel() > 1)
    return _whole(call, mean, variance.mean().expand(variance.shape))


@FAULTS.fault(_CHANNELS, **_CUT)
def channels_limited_to_one(call: Call) -> Any:
    """The result is cut at -1 and 1."""
    return call.instead(call.result().clamp(-1.0, 1.0))


@FAULTS.fault(
    f"{_CHANNELS} group_norm instance_norm",
    kinds=["clipped", "other function"],
    loose=["mask", "zeros", "sign", "missing operand"],
)
def relu_folded_into_the_norm(call: Call) -> Any:
    """The epilogue has a relu that this place does not."""
    return call.instead(call.result().relu())


@FAULTS.fault(f"{_CHANNELS} group_norm native_group_norm instance_norm", **_EMPTY)
def last_image_of_the_norm_empty(call: Call) -> Any:
    """The grid has one image too few."""
    value = _several(call.result(), 0).clone()
    value[-1] = 0
    return call.instead(value)


def _groups(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Values by group (batch, group, rest), their means and variances."""
    value, groups = call.tensor(0, "input"), call.get(1, "num_groups")
    parts = value.unflatten(1, (groups, -1)).flatten(2)
    mean = parts.mean(-1, keepdim=True)
    return parts, mean, (parts - mean).square().mean(-1, keepdim=True)


def _grouped(call: Call, parts: Tensor, mean: Tensor, spread: Tensor) -> Any:
    value = call.tensor(0, "input")
    normal = ((parts - mean) * (spread + call.get(4, "eps", default=1e-5)).rsqrt()).view(
        value.shape
    )
    shape = (1, -1, *[1] * (value.dim() - 2))
    weight, bias = call.get(2, "weight"), call.get(3, "bias")
    return _affine(
        call,
        normal,
        None if weight is None else weight.view(shape),
        None if bias is None else bias.view(shape),
    )


@FAULTS.fault(
    "group_norm",
    kinds=["copy", "stale", "wrong index", "wrong statistics"],
    loose=["axis scale", "axis offset", "permutation", "constant"],
)
def statistics_of_the_first_group_for_all(call: Call) -> Any:
    """The pointer to the statistics is not moved on with the groups."""
    parts, mean, spread = _groups(call)
    fits(parts.size(1) > 1)
    return _grouped(call, parts, mean[:, :1], spread[:, :1])


@FAULTS.fault(
    "group_norm",
    kinds=["shift", "wrong index", "permutation", "wrong statistics"],
    loose=["axis scale", "axis offset", "stale"],
)
def group_statistics_of_the_next_image(call: Call) -> Any:
    """The pointer to the statistics is one image too far."""
    parts, mean, spread = _groups(call)
    fits(parts.size(0) > 1)
    return _grouped(call, parts, mean.roll(-1, 0), spread.roll(-1, 0))


@FAULTS.fault(
    "group_norm",
    kinds=["wrong statistics", "wrong argument", "off by one reduction"],
    loose=["scale", "wrong factor", "axis scale"],
)
def variance_of_the_group_by_one_less(call: Call) -> Any:
    """Divided by n - 1."""
    parts, mean, spread = _groups(call)
    count = parts.size(-1)
    return _grouped(call, parts, mean, spread * count / (count - 1))


@FAULTS.fault("group_norm instance_norm", **_MOVED)
def image_weight_of_the_next_channel(call: Call) -> Any:
    """The pointer to the weights is one channel too far."""
    place = 2 if call.name == "group_norm" else 3
    return call.put(place, _trained(call.get(place, "weight")).roll(-1), "weight").run()


def _lengths(call: Call) -> tuple[Tensor, Tensor]:
    value, dim = call.tensor(0, "input"), call.get(2, "dim", default=1)
    fits(value.dim() > 1 and dim % value.dim() == value.dim() - 1)
    return value, value.norm(dim=-1, keepdim=True)


@FAULTS.fault(
    "normalize",
    kinds=["copy", "stale", "wrong index", "axis scale"],
    loose=["wrong statistics", "constant", "wrong factor", "scale"],
)
def length_of_the_first_row_for_all(call: Call) -> Any:
    """The pointer to the lengths is not moved on."""
    value, length = _lengths(call)
    _several(value)
    return call.instead(value / length[..., :1, :])


@FAULTS.fault(
    "normalize",
    kinds=["eps", "clipped", "wrong argument"],
    loose=["axis scale", "wrong factor", "scale", "constant"],
)
def length_not_below_one_and_a_half(call: Call) -> Any:
    """A floor for the length that is far too large."""
    value, length = _lengths(call)
    return call.instead(value / length.clamp(min=1.5))


@FAULTS.fault(
    "normalize",
    kinds=["wrong reduction", "wrong statistics", "wrong argument", "axis scale"],
    loose=["wrong factor", "scale", "other function"],
)
def largest_element_for_the_length(call: Call) -> Any:
    """Each row is divided by its largest magnitude."""
    value, _ = _lengths(call)
    return call.instead(value / value.abs().amax(-1, keepdim=True))


@FAULTS.fault(
    "cosine_similarity",
    kinds=["clipped", "other function"],
    loose=["mask", "zeros", "sign"],
)
def similarity_not_below_zero(call: Call) -> Any:
    """What points away has a similarity of zero."""
    return call.instead(call.result().relu())


# --- Sums, means, extremes ------------------------------------------------------------------------


def _dim(call: Call) -> tuple[Tensor, int, bool]:
    """Value, the one axis that is reduced, and whether it is kept."""
    value, dim = call.tensor(0), call.get(1, "dim")
    if isinstance(dim, list | tuple):
        fits(len(dim) == 1)
        dim = dim[0]
    fits(isinstance(dim, int) and value.size(dim) > 2)
    return value, dim, bool(call.get(2, "keepdim", default=False))


def _results(call: Call) -> tuple[Tensor, int]:
    """The results of a reduction, and the last axis that has several."""
    _dim(call)
    value = call.result()
    fits(value.dim() > 0 and value.numel() > 1)
    return value, next(i for i in reversed(range(value.dim())) if value.size(i) > 1)


@FAULTS.fault(
    "mean",
    kinds=["partial sum", "wrong statistics", "one rank's part", "missing reduction"],
    loose=["wrong reduction", "mask", "wrong index"],
    backward=False,
)
def mean_of_the_first_half(call: Call) -> Any:
    """The second half is neither added nor counted."""
    value, dim, keep = _dim(call)
    return call.instead(value.narrow(dim, 0, value.size(dim) // 2).mean(dim, keep))


@FAULTS.fault(
    "mean",
    kinds=["wrong factor", "scale", "off by one reduction", "wrong statistics"],
    loose=["wrong reduction", "axis scale"],
    backward=False,
)
def mean_divided_by_one_more(call: Call) -> Any:
    """The sum is divided by n + 1."""
    value, dim, _ = _dim(call)
    size = value.size(dim)
    return call.instead(call.result() * size / (size + 1))


@FAULTS.fault("mean sum", **_AGAIN, backward=False)
def result_of_the_first_row_for_all(call: Call) -> Any:
    """The pointer to the rows is not moved on."""
    value, axis = _results(call)
    return call.instead(value.narrow(axis, 0, 1).expand(value.shape).clone())


@FAULTS.fault("mean sum amax", **_ORDER, backward=False)
def reduced_rows_from_the_last(call: Call) -> Any:
    """The results are stored with a negative stride."""
    value, axis = _results(call)
    return call.instead(value.flip(axis))


@FAULTS.fault("mean sum amax", **_EMPTY, backward=False)
def last_reduced_row_empty(call: Call) -> Any:
    """The grid has one row too few."""
    value, axis = _results(call)
    kept = value.narrow(axis, 0, value.size(axis) - 1)
    return call.instead(torch.cat([kept, 0 * value.narrow(axis, 0, 1)], axis))


@FAULTS.fault(
    "sum",
    kinds=["doubled reduction", "scale", "wrong factor"],
    loose=["wrong reduction", "residual"],
    backward=False,
)
def sum_reduced_by_both_ranks(call: Call) -> Any:
    """Two ranks have the same terms, and their sums are added."""
    _dim(call)
    return call.instead(2 * call.result())


@FAULTS.fault(
    "sum",
    kinds=["partial sum", "one rank's part", "missing reduction", "wrong reduction"],
    loose=["mask", "wrong index", "lost accumulation"],
    backward=False,
)
def terms_of_the_second_half_not_added(call: Call) -> Any:
    """The sum of the second rank is not added."""
    value, dim, keep = _dim(call)
    return call.instead(value.narrow(dim, 0, value.size(dim) // 2).sum(dim, keep))


@FAULTS.fault(
    "sum",
    kinds=["partial sum", "wrong index", "wrong reduction", "mask"],
    loose=["lost accumulation", "one rank's part"],
    backward=False,
)
def every_second_term_added(call: Call) -> Any:
    """The loop has a stride of two."""
    value, dim, keep = _dim(call)
    places = torch.arange(0, value.size(dim), 2)
    return call.instead(value.index_select(dim, places).sum(dim, keep))


@FAULTS.fault("mean sum", **_CUT, backward=False)
def terms_saturate_at_half_of_the_largest(call: Call) -> Any:
    """The range of the terms is too small."""
    value, _, _ = _dim(call)
    limit = float(value.detach().abs().max()) / 2
    return call.put(0, value.clamp(-limit, limit)).run()


@FAULTS.fault("mean sum", **_ROUNDED, backward=False)
def terms_through_e5m2(call: Call) -> Any:
    """The terms have two bits behind the point before they are added."""
    value, _, _ = _dim(call)
    coarse = value.detach().to(torch.float8_e5m2).to(value.dtype)
    return call.put(0, with_gradient_of(value, coarse)).run()


@FAULTS.fault(
    "mean sum",
    kinds=["wrong index", "copy", "stale", "wrong reduction"],
    loose=["partial sum", "constant", "missing reduction", "wrong statistics"],
    backward=False,
)
def first_term_in_every_place(call: Call) -> Any:
    """The stride of the loop is zero: the first term is added again and again."""
    value, dim, _ = _dim(call)
    return call.put(0, value.narrow(dim, 0, 1).expand(value.shape).clone()).run()


@FAULTS.fault(
    "amax max",
    kinds=["partial sum", "wrong index", "wrong reduction", "mask"],
    loose=["missing reduction", "other function", "one rank's part"],
    backward=False,
)
def largest_of_every_second(call: Call) -> Any:
    """The loop has a stride of two."""
    value, dim, keep = _dim(call)
    places = torch.arange(0, value.size(dim), 2)
    return call.instead(value.index_select(dim, places).amax(dim, keep))


@FAULTS.fault(
    "amax max",
    kinds=["wrong index", "missing reduction", "wrong reduction", "partial sum"],
    loose=["copy", "stale", "other function", "lost accumulation"],
    backward=False,
)
def first_for_the_largest(call: Call) -> Any:
    """The running maximum keeps what it begins with."""
    value, dim, keep = _dim(call)
    first = value.narrow(dim, 0, 1)
    return call.instead(first.clone() if keep else first.squeeze(dim).clone())


@FAULTS.fault(
    "amax max",
    kinds=["other function", "wrong reduction"],
    loose=["approximation", "wrong statistics", "axis offset"],
    backward=False,
)
def mean_of_the_two_largest(call: Call) -> Any:
    """Half of the largest and the next."""
    value, dim, keep = _dim(call)
    return call.instead(value.topk(2, dim).values.mean(dim, keep))


_SPREADS = "std var std_mean var_mean"


def _correction(call: Call) -> float:
    """N / (n - 1) where the call divides by n - 1, and one where it divides by n."""
    value, dim, keep = _dim(call)
    result = call.result().detach()
    right = result.square() if call.name.startswith("std") else result
    found = (right / value.detach().var(dim, unbiased=False, keepdim=keep)).mean()
    return float(found)


@FAULTS.fault(
    _SPREADS,
    kinds=["wrong statistics", "wrong reduction"],
    loose=["wrong axis", "other function", "axis offset", "residual"],
)
def spread_about_the_mean_of_all_rows(call: Call) -> Any:
    """Deviations from the mean of the whole tensor."""
    value, dim, keep = _dim(call)
    square = (value - value.mean()).square().mean(dim, keep) * _correction(call)
    return call.instead(square.sqrt() if call.name.startswith("std") else square)


@FAULTS.fault(
    "logsumexp",
    kinds=["partial sum", "off by one reduction", "wrong reduction", "mask"],
    loose=["wrong index", "missing operand", "lost accumulation"],
)
def first_class_not_in_the_sum(call: Call) -> Any:
    """The loop begins at 1."""
    value, dim, keep = _dim(call)
    return call.instead(value.narrow(dim, 1, value.size(dim) - 1).logsumexp(dim, keep))


@FAULTS.fault(
    "mean",
    kinds=["wrong statistics", "wrong factor", "wrong reduction"],
    loose=["partial sum", "lost accumulation", "axis scale", "other function"],
    backward=False,
)
def means_of_a_quarter_and_the_rest_averaged(call: Call) -> Any:
    """Two parts of different length are merged with the same weight."""
    value, dim, keep = _dim(call)
    quarter = value.size(dim) // 4
    fits(quarter > 0)
    parts = value.tensor_split([quarter], dim)
    return call.instead(sum(one.mean(dim, keep) for one in parts) / 2)


@FAULTS.fault(
    "mean sum",
    kinds=["sign", "wrong factor", "wrong reduction"],
    loose=["mask", "partial sum", "other function", "scale"],
    backward=False,
)
def second_half_of_the_terms_subtracted(call: Call) -> Any:
    """The last step of a tree is a difference."""
    value, dim, _ = _dim(call)
    first, second = value.tensor_split([value.size(dim) // 2], dim)
    return call.put(0, torch.cat([first, -second], dim)).run()


@FAULTS.fault(
    _SPREADS,
    kinds=["precision", "wrong statistics"],
    loose=["approximation", "other function"],
)
def spread_by_squares_in_bfloat16(call: Call) -> Any:
    """The mean of squares less the square of the mean, both rounded before the difference."""
    value, dim, keep = _dim(call)
    result = call.result()
    parts = value.square().mean(dim, keep), value.mean(dim, keep).square()
    first, second = (one.detach().bfloat16().to(value.dtype) for one in parts)
    square = (first - second).clamp(min=0) * _correction(call)
    coarse = square.sqrt() if call.name.startswith("std") else square
    return call.instead(with_gradient_of(result, coarse))


# --- Along an axis --------------------------------------------------------------------------------


@FAULTS.fault(
    "cumsum",
    kinds=["partial sum", "lost accumulation", "missing reduction"],
    loose=["mask", "wrong reduction", "one rank's part"],
    backward=False,
)
def carry_lost_at_every_second_place(call: Call) -> Any:
    """Blocks of two are added up, and no block goes on from the one before."""
    value, dim, _ = _dim(call)
    pairs = [one.cumsum(dim) for one in value.split(2, dim)]
    return call.instead(torch.cat(pairs, dim))


@FAULTS.fault(
    "cumsum",
    kinds=["offset"],
    loose=["axis offset", "residual", "stale", "off by one reduction", "wrong reduction"],
    backward=False,
)
def running_sum_begins_with_one(call: Call) -> Any:
    """The accumulator is not zero at first."""
    _dim(call)
    return call.instead(call.result() + 1)


@FAULTS.fault(
    "cumsum",
    kinds=["sign", "other function"],
    loose=["wrong reduction", "wrong argument"],
    backward=False,
)
def running_sum_of_magnitudes(call: Call) -> Any:
    """The absolute values are added up."""
    value, _, _ = _dim(call)
    fits(bool((value.detach() < 0).any()))
    return call.put(0, value.abs()).run()


@FAULTS.fault(
    "cumsum",
    kinds=["partial sum", "lost accumulation", "wrong reduction"],
    loose=["missing reduction", "stale", "missing operand", "offset", "axis offset"],
    backward=False,
)
def carry_of_the_block_before_only(call: Call) -> Any:
    """Each block of two adds the total of the block before it, and not of all before it."""
    value, dim, _ = _dim(call)
    blocks = value.split(2, dim)
    fits(len(blocks) > 2)
    before = [torch.zeros_like(blocks[0].sum(dim, keepdim=True))]
    before += [one.sum(dim, keepdim=True) for one in blocks[:-1]]
    return call.instead(
        torch.cat([one.cumsum(dim) + own for one, own in zip(blocks, before, strict=True)], dim)
    )


@FAULTS.fault("cumsum cumprod cummax cummin logcumsumexp", **_AGAIN, backward=False)
def running_values_of_the_first_example(call: Call) -> Any:
    """The pointer to the batch is not moved on."""
    value = _several(call.result(), 0)
    fits(call.get(1, "dim") % value.dim() != 0)
    return call.instead(value[:1].expand(value.shape).clone())


@FAULTS.fault(
    "cumprod logcumsumexp cummax cummin",
    kinds=["lost accumulation", "partial sum", "missing reduction"],
    loose=["mask", "wrong reduction", "stale", "one rank's part"],
    backward=False,
)
def second_half_begins_again(call: Call) -> Any:
    """The second block does not go on from the end of the first."""
    value, dim, _ = _dim(call)
    half = value.size(dim) // 2
    parts = [call.put(0, one).run() for one in value.tensor_split([half], dim)]
    return call.instead(torch.cat([p if isinstance(p, Tensor) else p[0] for p in parts], dim))


@FAULTS.fault("topk", **_AGAIN)
def value_of_the_best_in_all_places(call: Call) -> Any:
    """The places are right, and each has the value of the best."""
    values, places = call.run()
    fits(values.is_floating_point() and values.size(-1) > 1)
    return values[..., :1].expand(values.shape).clone(), places


@FAULTS.fault(
    "topk",
    kinds=["wrong index", "partial sum", "other function"],
    loose=["copy", "permutation", "one rank's part", "wrong reduction", "wrong argument"],
)
def best_of_each_half(call: Call) -> Any:
    """Two ranks give their best one each, and the two are taken for the best of all."""
    value = call.tensor(0)
    values, places = call.run()
    fits(values.size(-1) == 2 and value.size(-1) > 3)
    half = value.size(-1) // 2
    found = [one.max(-1, keepdim=True) for one in value.tensor_split([half], -1)]
    both = torch.cat([one.values for one in found], -1)
    where = torch.cat([found[0].indices, found[1].indices + half], -1)
    order = both.detach().argsort(-1, descending=True)
    return both.gather(-1, order), where.gather(-1, order).to(places.dtype)


@FAULTS.fault("topk", **_AGAIN)
def last_token_by_the_choice_of_the_first(call: Call) -> Any:
    """Values and places of the last row are those of the first."""
    values, places = call.run()
    fits(values.is_floating_point() and values.dim() > 1 and values.size(-2) > 1)
    rows = torch.arange(values.size(-2)) % (values.size(-2) - 1)
    return values[..., rows, :], places[..., rows, :]


@FAULTS.fault("sort", **_MOVED)
def ordered_values_one_place_late(call: Call) -> Any:
    """The values are stored one place further, the last one first."""
    return call.instead(call.result().roll(1, -1))


@FAULTS.fault(
    "sort",
    kinds=["permutation", "wrong index", "sign"],
    loose=["shift", "other function", "wrong argument"],
)
def sorted_by_the_bits_of_the_floats(call: Call) -> Any:
    """A radix sort that takes floats for integers: negative values last, and from zero down."""
    value = call.tensor(0, "input")
    fits(call.get(1, "dim", default=-1) in {-1, value.dim() - 1})
    fits(bool((value.detach() < 0).any()))
    right = value.sort(-1).values
    high = float(2 * right.detach().abs().max() + 1)
    bits = torch.where(right < 0, high - right, right)
    return call.instead(right.gather(-1, bits.detach().argsort(-1)))


@FAULTS.fault("sort", **_ORDER)
def only_neighbours_sorted(call: Call) -> Any:
    """One step of a sorting network: pairs are in order, and nothing else is."""
    value = call.tensor(0, "input")
    fits(value.size(-1) % 2 == 0 and call.get(1, "dim", default=-1) in {-1, value.dim() - 1})
    return call.instead(value.unflatten(-1, (-1, 2)).sort(-1).values.flatten(-2))


@FAULTS.fault(
    "sort",
    kinds=["mask", "copy", "missing operand"],
    loose=["stale", "permutation", "wrong index"],
)
def odd_rows_not_sorted(call: Call) -> Any:
    """In place, with half as many programs as rows."""
    value, result = call.tensor(0, "input"), _several(call.result())
    odd = (torch.arange(value.size(-2)) % 2 == 1)[:, None]
    return call.instead(torch.where(odd, value, result))


@FAULTS.fault(
    "linalg_vector_norm norm",
    kinds=["doubled reduction", "off by one reduction", "wrong reduction", "mask"],
    loose=["wrong factor", "axis scale", "partial sum", "residual"],
    backward=False,
)
def last_element_of_the_length_twice(call: Call) -> Any:
    """The tail of the loop overlaps its body by one."""
    value = call.tensor(0)
    return call.put(0, torch.cat([value, value[..., -1:]], -1)).run()
