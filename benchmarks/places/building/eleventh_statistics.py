"""Faults of the eleventh set: norms, statistics, running sums, orders."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor

FAULTS = Catalogue()
_NORMS = "layer_norm rms_norm"
_CHANNELS = "batch_norm batch_norm_from_statistics"
_SHIFTED: dict[str, Any] = {
    "kinds": ["shift", "wrong index", "permutation"],
    "loose": ["stale", "copy"],
}
_PART_OF_THE_SUM: dict[str, Any] = {
    "kinds": ["partial sum", "mask", "wrong reduction"],
    "loose": ["missing operand", "wrong index", "lost accumulation", "zeros", "missing reduction",
              "wrong statistics", "off by one reduction"],
    "backward": False,
}  # fmt: skip
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function", "wrong statistics"],
    "backward": False,
}


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in a narrower format, with its own gradient."""
    return with_gradient_of(value, value.detach().to(dtype).to(value.dtype))


# --- Norms of rows --------------------------------------------------------------------------------


def _row(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
    """Input, weight, bias and eps of a norm over the last axis."""
    value, shape = call.tensor(0, "input"), call.get(1, "normalized_shape")
    fits(len(shape) == 1)
    weight = call.get(2, "weight")
    is_layer = call.name == "layer_norm"
    bias = call.get(3, "bias") if is_layer else None
    return value, weight, bias, call.get(4 if is_layer else 3, "eps") or 1e-5


def _moments(call: Call, value: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (zero, if the norm has none) and variance of the rows."""
    mean = value.mean(-1, keepdim=True)
    if call.name == "rms_norm":
        mean = 0 * mean
    return mean, (value - mean).square().mean(-1, keepdim=True)


def _affine(call: Call, normal: Tensor) -> Any:
    """Weight and bias behind another normal value."""
    _, weight, bias, _ = _row(call)
    value = normal if weight is None else normal * weight
    return call.instead(value if bias is None else value + bias)


def _by(call: Call, mean: Tensor, spread: Tensor) -> Any:
    """The norm with another mean and variance."""
    value, _, _, eps = _row(call)
    return _affine(call, (value - mean) * (spread + eps).rsqrt())


def _trained(weight: Any) -> Tensor:
    """A weight or bias whose elements are not all the same."""
    fits(isinstance(weight, Tensor) and weight.dim() == 1)
    fits(bool((weight.detach() != weight.detach()[0]).any()))
    return weight


def _several_rows(value: Tensor, least: int = 2) -> Tensor:
    fits(value.dim() > 1 and value.size(-2) >= least)
    return value


@FAULTS.fault(
    _NORMS,
    kinds=["eps", "wrong argument"],
    loose=["wrong statistics", "axis scale", "scale", "wrong factor", "offset"],
)
def eps_of_a_twentieth(call: Call) -> Any:
    """0.05 from the options of the optimiser."""
    place = 4 if call.name == "layer_norm" else 3
    return call.put(place, 0.05, "eps").run()


@FAULTS.fault(
    "layer_norm",
    kinds=["wrong statistics", "one rank's part", "partial sum", "missing reduction"],
    loose=["axis offset", "offset", "wrong reduction", "mask"],
)
def mean_of_the_second_half_subtracted(call: Call) -> Any:
    """The mean is that of the last rank's features; the deviation is right."""
    value, _, _, _ = _row(call)
    fits(value.size(-1) > 3)
    _, spread = _moments(call, value)
    return _by(call, value[..., value.size(-1) // 2 :].mean(-1, keepdim=True), spread)


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "one rank's part", "partial sum", "missing reduction"],
    loose=["axis scale", "axis offset", "wrong reduction", "mask", "scale", "wrong factor"],
)
def statistics_of_the_first_three_quarters(call: Call) -> Any:
    """Three of four warps have written their part when it is read, counted as such."""
    value, _, _, _ = _row(call)
    fits(value.size(-1) > 7)
    return _by(call, *_moments(call, value[..., : value.size(-1) * 3 // 4]))


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "partial sum", "wrong reduction", "mask"],
    loose=["axis scale", "scale", "wrong factor", "missing operand", "off by one reduction",
           "missing reduction", "lost accumulation"],
)  # fmt: skip
def squares_of_the_tail_not_added(call: Call) -> Any:
    """The vectorised loop ends before the last three features; the mean has all of them."""
    value, _, _, _ = _row(call)
    fits(value.size(-1) > 7)
    mean, _ = _moments(call, value)
    total = (value - mean)[..., :-3].square().sum(-1, keepdim=True)
    return _by(call, mean, total / value.size(-1))


@FAULTS.fault(
    "layer_norm",
    kinds=["wrong statistics", "stale", "wrong index", "shift"],
    loose=["axis offset", "permutation", "offset", "copy"],
)
def mean_of_the_row_before(call: Call) -> Any:
    """The mean is read one row too early, around the end; the deviation is right."""
    mean, spread = _moments(call, _several_rows(_row(call)[0]))
    return _by(call, mean.roll(1, -2), spread)


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "stale", "wrong index", "shift"],
    loose=["axis scale", "permutation", "scale", "wrong factor", "copy"],
)
def deviation_of_the_row_before(call: Call) -> Any:
    """The deviation is read one row too early, around the end; the mean is right."""
    mean, spread = _moments(call, _several_rows(_row(call)[0]))
    return _by(call, mean, spread.roll(1, -2))


@FAULTS.fault(
    "layer_norm",
    kinds=["wrong statistics", "stale", "wrong index", "copy"],
    loose=["axis offset", "offset", "wrong reduction"],
)
def mean_of_the_first_row_for_all(call: Call) -> Any:
    """The pointer to the means has a stride of zero; the deviations are right."""
    mean, spread = _moments(call, _several_rows(_row(call)[0]))
    return _by(call, mean[..., :1, :].expand_as(mean), spread)


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "stale", "wrong index", "copy"],
    loose=["axis scale", "scale", "wrong factor", "wrong reduction"],
)
def deviation_of_the_last_row_for_all(call: Call) -> Any:
    """A scalar for the block, which keeps what the last row has stored; the means are right."""
    mean, spread = _moments(call, _several_rows(_row(call)[0]))
    return _by(call, mean, spread[..., -1:, :].expand_as(spread))


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "wrong factor", "off by one reduction"],
    loose=["axis scale", "scale", "wrong reduction"],
)
def squares_divided_by_one_more(call: Call) -> Any:
    """The counter of Welford's loop is one ahead: n + 1 for n."""
    mean, spread = _moments(call, _row(call)[0])
    width = _row(call)[0].size(-1)
    return _by(call, mean, spread * (width / (width + 1)))


@FAULTS.fault(
    _NORMS,
    kinds=["clipped", "wrong statistics"],
    loose=["other function", "wrong argument", "axis scale", "approximation"],
)
def variance_not_above_a_quarter(call: Call) -> Any:
    """The accumulator of the squares saturates."""
    mean, spread = _moments(call, _row(call)[0])
    return _by(call, mean, spread.clamp(max=0.25))


@FAULTS.fault(
    _NORMS,
    kinds=["other function", "wrong statistics", "wrong factor"],
    loose=["axis scale", "wrong argument", "approximation"],
)
def divided_by_the_root_of_the_deviation(call: Call) -> Any:
    """The reciprocal root is taken of the deviation, which is a root already."""
    value, _, _, eps = _row(call)
    mean, spread = _moments(call, value)
    return _affine(call, (value - mean) * (spread + eps).pow(-0.25))


@FAULTS.fault(
    _NORMS,
    kinds=["shift", "wrong index", "permutation", "wrong rank's shard"],
    loose=["axis scale", "wrong argument", "stale", "copy", "wrong factor"],
)
def weight_of_the_feature_before(call: Call) -> Any:
    """The pointer to the weights is one feature behind, around the end."""
    return call.put(2, _trained(_row(call)[1]).roll(1, 0), "weight").run()


@FAULTS.fault(
    "layer_norm",
    kinds=["wrong factor"],
    loose=["axis offset", "offset", "missing bias", "wrong argument", "residual", "scale"],
)
def half_of_the_bias_of_the_norm(call: Call) -> Any:
    """The bias is divided by two ranks, and only one of them adds it."""
    bias = _row(call)[2]
    fits(isinstance(bias, Tensor))
    return call.put(3, bias / 2, "bias").run()


@FAULTS.fault(
    _NORMS,
    kinds=["scale", "wrong factor"],
    loose=["axis scale", "wrong statistics"],
)
def normal_rows_a_tenth_smaller(call: Call) -> Any:
    """The factor 0.9 that keeps a quantised result from its limits is not taken back."""
    return call.instead(0.9 * call.result())


@FAULTS.fault(
    _NORMS,
    kinds=["mask", "stale", "copy"],
    loose=["missing operand", "residual", "axis scale", "wrong index"],
)
def odd_rows_not_normalised(call: Call) -> Any:
    """In place, and the grid steps over two rows at once."""
    value = _several_rows(call.tensor(0, "input"))
    odd = (torch.arange(value.size(-2)) % 2 == 1).unsqueeze(-1)
    return call.instead(torch.where(odd, value, call.result()))


@FAULTS.fault(
    _NORMS,
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "shift", "wrong rank's shard", "one rank's part"],
)
def second_half_of_the_normal_row_is_the_first(call: Call) -> Any:
    """The offset of the second tile is not added in the load behind the statistics."""
    value = call.result()
    fits(value.size(-1) > 3 and value.size(-1) % 2 == 0)
    half = value[..., : value.size(-1) // 2]
    return call.instead(torch.cat([half, half], -1))


@FAULTS.fault(_NORMS, **_SHIFTED)
def features_of_the_norm_one_column_early(call: Call) -> Any:
    """Each feature is stored in the place of the one before, around the end."""
    return call.instead(call.result().roll(-1, -1))


@FAULTS.fault(
    _NORMS,
    kinds=["permutation", "wrong index"],
    loose=["shift", "copy", "stale"],
)
def normal_rows_from_the_last(call: Call) -> Any:
    """The rows are stored in the order of their programs, which count down."""
    return call.instead(_several_rows(call.result()).flip(-2))


@FAULTS.fault(
    _NORMS,
    kinds=["other function"],
    loose=["wrong factor"],
)
def silu_behind_the_norm(call: Call) -> Any:
    """The epilogue of the image model, where the norm is followed by x * sigmoid(x)."""
    value = call.result()
    return call.instead(value * value.sigmoid())


@FAULTS.fault(
    _NORMS,
    kinds=["precision", "wrong statistics"],
    loose=["approximation", "other function", "axis scale", "scale"],
)
def variance_in_e5m2(call: Call) -> Any:
    """The variance of a row is kept with two bits behind the point."""
    mean, spread = _moments(call, _row(call)[0])
    return _by(call, mean, _rounded(spread, torch.float8_e5m2))


@FAULTS.fault(
    _NORMS,
    kinds=["precision"],
    loose=["approximation", "other function"],
)
def normal_values_in_eighths(call: Call) -> Any:
    """Before the weight, the normal values are fixed-point numbers with three bits."""
    value, _, _, eps = _row(call)
    mean, spread = _moments(call, value)
    normal = (value - mean) * (spread + eps).rsqrt()
    return _affine(call, with_gradient_of(normal, (8 * normal.detach()).round() / 8))


@FAULTS.fault(
    _NORMS,
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "partial sum", "axis scale", "wrong factor"],
)
def first_column_of_the_norm_not_stored(call: Call) -> Any:
    """The mask of the store is `column > 0`; the statistics have all columns."""
    value = call.result()
    return call.instead(value * (torch.arange(value.size(-1)) > 0))


@FAULTS.fault(
    "layer_norm",
    kinds=["wrong statistics", "other function", "wrong reduction"],
    loose=["axis offset", "offset", "swapped operands"],
)
def largest_subtracted_for_the_mean(call: Call) -> Any:
    """The row loses its largest value, as before an exponential; the deviation is right."""
    value, _, _, _ = _row(call)
    _, spread = _moments(call, value)
    return _by(call, value.amax(-1, keepdim=True), spread)


# --- Norms of channels ----------------------------------------------------------------------------


def _channels(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """Input, weight, bias, mean, variance (shaped like channels) and eps."""
    is_whole = call.name == "batch_norm"
    value = call.tensor(0, "input")
    shape = (1, -1, *[1] * (value.dim() - 2))
    places = (3, 4, 1, 2) if is_whole else (1, 2, 3, 4)
    weight, bias, mean, variance = (call.tensor(i).view(shape) for i in places)
    return value, weight, bias, mean, variance, call.get(7 if is_whole else 6, "eps")


def _varied(vector: Tensor) -> Tensor:
    """A vector of channels that differ."""
    flat = vector.detach().flatten()
    fits(bool((flat != flat[0]).any()))
    return vector


@FAULTS.fault(
    _CHANNELS,
    kinds=["eps", "wrong argument", "wrong statistics"],
    loose=["axis scale", "scale", "wrong factor", "offset"],
)
def eps_of_one_for_the_channels(call: Call) -> Any:
    """One is added to the variance, as in a log1p."""
    value, weight, bias, mean, variance, _ = _channels(call)
    _varied(variance)
    return call.instead((value - mean) * (variance + 1).rsqrt() * weight + bias)


@FAULTS.fault(
    _CHANNELS,
    kinds=["wrong factor", "wrong statistics", "doubled reduction"],
    loose=["axis scale", "scale", "wrong argument"],
)
def kept_variance_doubled(call: Call) -> Any:
    """The variances of two ranks are added and not averaged."""
    value, weight, bias, mean, variance, eps = _channels(call)
    _varied(variance)
    return call.instead((value - mean) * (2 * variance + eps).rsqrt() * weight + bias)


@FAULTS.fault(
    _CHANNELS,
    kinds=["shift", "wrong index", "permutation", "wrong statistics"],
    loose=["axis offset", "wrong argument", "stale", "copy", "offset", "wrong rank's shard"],
)
def mean_of_the_next_channel(call: Call) -> Any:
    """The pointer to the means is one channel too far, around the end."""
    value, weight, bias, mean, variance, eps = _channels(call)
    moved = _varied(mean).roll(-1, 1)
    return call.instead((value - moved) * (variance + eps).rsqrt() * weight + bias)


@FAULTS.fault(_CHANNELS, **_SHIFTED)
def normal_channels_stored_one_earlier(call: Call) -> Any:
    """Each channel is stored in the place of the one before, the first one last."""
    return call.instead(call.result().roll(-1, 1))


@FAULTS.fault(
    _CHANNELS,
    kinds=["sign", "swapped operands", "wrong factor"],
    loose=["scale", "other function", "wrong statistics"],
)
def kept_mean_less_the_value(call: Call) -> Any:
    """(m - x) / d * w + b: the folded factor has the sign of the folded summand."""
    value, weight, bias, mean, variance, eps = _channels(call)
    return call.instead((mean - value) * (variance + eps).rsqrt() * weight + bias)


@FAULTS.fault(
    _CHANNELS,
    kinds=["copy", "mask", "stale"],
    loose=["missing operand", "axis scale", "residual", "wrong index"],
)
def first_half_of_the_channels_not_normalised(call: Call) -> Any:
    """In place, and the grid begins in the middle of the channels."""
    value, half = call.tensor(0, "input"), call.result().size(1) // 2
    fits(half > 1)
    return call.instead(torch.cat([value[:, :half], call.result()[:, half:]], 1))


@FAULTS.fault(
    f"{_CHANNELS} group_norm instance_norm",
    kinds=["other function"],
    loose=["wrong factor"],
)
def silu_folded_into_the_norm(call: Call) -> Any:
    """The fusion of a norm and an activation, where none follows."""
    value = call.result()
    return call.instead(value * value.sigmoid())


@FAULTS.fault(
    f"{_CHANNELS} group_norm instance_norm",
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "partial sum", "axis scale", "wrong factor"],
)
def last_line_of_the_normal_image_empty(call: Call) -> Any:
    """The number of lines is rounded down to the tile."""
    value = call.result()
    fits(value.dim() > 2 and value.size(2) > 1)
    shape = [-1] + [1] * (value.dim() - 3)
    kept = torch.arange(value.size(2)) < value.size(2) - 1
    return call.instead(value * kept.view(shape))


# --- Lengths --------------------------------------------------------------------------------------


@FAULTS.fault(
    "normalize",
    kinds=["wrong argument", "eps", "offset"],
    loose=["other function", "axis scale", "wrong statistics", "scale"],
    backward=False,
)
def eps_added_under_the_root_of_the_length(call: Call) -> Any:
    """Over sqrt(sum x² + 0.1): the length of another library, with a large eps."""
    value, dim = call.tensor(0, "input"), call.get(2, "dim", default=1)
    return call.instead(value * (value.square().sum(dim, keepdim=True) + 0.1).rsqrt())


@FAULTS.fault(
    "linalg_vector_norm norm normalize",
    kinds=["partial sum", "one rank's part", "missing reduction", "wrong reduction",
           "wrong statistics"],
    loose=["mask", "missing operand", "axis scale", "scale", "wrong factor", "wrong index"],
    backward=False,
)  # fmt: skip
def length_of_the_second_half(call: Call) -> Any:
    """Each rank takes the length of its own features; this is the last rank's."""
    value, dim = call.tensor(0), call.get(2, "dim", default=1)
    axes = [dim] if isinstance(dim, int) else list(dim)
    fits(len(axes) == 1 and value.size(axes[0]) > 3)
    half = value.size(axes[0]) // 2
    part = value.narrow(axes[0], half, value.size(axes[0]) - half)
    if call.name != "normalize":
        return call.put(0, part).run()
    return call.instead(value / part.norm(dim=axes[0], keepdim=True).clamp(min=1e-12))


@FAULTS.fault(
    "linalg_vector_norm norm",
    kinds=["other function", "wrong reduction"],
    loose=["wrong factor", "axis scale", "missing operand"],
    backward=False,
)
def root_of_the_length_forgotten(call: Call) -> Any:
    """The sum of the squares."""
    fits(call.get(1, "ord", "p", default=2) == 2)
    return call.instead(call.result().square())


# --- Sums, means, extremes ------------------------------------------------------------------------


def _dim(call: Call, least: int = 3) -> tuple[Tensor, int, bool]:
    """Value, the one axis that is reduced, and whether it is kept."""
    value, dim = call.tensor(0), call.get(1, "dim")
    if isinstance(dim, list | tuple):
        fits(len(dim) == 1)
        dim = dim[0]
    fits(isinstance(dim, int) and value.size(dim) >= least)
    return value, dim, bool(call.get(2, "keepdim", default=False))


def _along(value: Tensor, dim: int, vector: Tensor) -> Tensor:
    """A vector, shaped so that it lies along an axis."""
    shape = [1] * value.dim()
    shape[dim] = -1
    return vector.view(shape)


def _reduced(call: Call) -> tuple[Tensor, int]:
    """The result, and an axis of it that has several places."""
    value = call.result()
    axes = [axis for axis in range(value.dim()) if value.size(axis) > 1]
    fits(axes)
    return value, axes[-1]


@FAULTS.fault("mean sum", **_PART_OF_THE_SUM)
def last_quarter_of_the_terms_not_added(call: Call) -> Any:
    """The unrolled loop has an epilogue that is not run; a mean has the right number."""
    value, dim, _ = _dim(call, 8)
    size = value.size(dim)
    kept = _along(value, dim, torch.arange(size) < size - size // 4)
    return call.put(0, value * kept, "input").run()


@FAULTS.fault(
    "mean",
    kinds=["partial sum", "one rank's part", "missing reduction", "wrong statistics"],
    loose=["mask", "wrong reduction", "missing operand", "wrong rank's shard", "wrong index"],
    backward=False,
)
def mean_of_the_last_half(call: Call) -> Any:
    """The means of the ranks are not averaged: this is the last one's."""
    value, dim, _ = _dim(call, 4)
    half = value.size(dim) // 2
    return call.put(0, value.narrow(dim, half, value.size(dim) - half), "input").run()


@FAULTS.fault(
    "mean",
    kinds=["scale", "wrong factor"],
    loose=["wrong reduction", "axis scale", "wrong statistics"],
    backward=False,
)
def mean_divided_by_the_ranks_once_more(call: Call) -> Any:
    """The mean over three ranks is divided by three in the collective and again behind it."""
    return call.instead(call.result() / 3)


@FAULTS.fault("mean sum", backward=False, **_SHIFTED)
def result_of_the_row_before(call: Call) -> Any:
    """The results are stored one row too late, around the end."""
    value, axis = _reduced(call)
    fits(value.size(axis) > 2)
    return call.instead(value.roll(1, axis))


@FAULTS.fault(
    "mean sum amax",
    kinds=["copy", "stale", "wrong index"],
    loose=["shift", "permutation", "mask", "one rank's part", "wrong rank's shard"],
    backward=False,
)
def second_half_of_the_results_is_the_first(call: Call) -> Any:
    """The second block of rows reads at the offset of the first."""
    value, axis = _reduced(call)
    half = value.size(axis) // 2
    fits(value.size(axis) == 2 * half and half > 1)
    return call.instead(torch.cat(2 * [value.narrow(axis, 0, half)], axis))


@FAULTS.fault(
    "mean sum",
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "partial sum", "axis scale", "wrong factor"],
    backward=False,
)
def first_result_not_stored(call: Call) -> Any:
    """The mask of the store is `row > 0`."""
    value, axis = _reduced(call)
    return call.instead(value * _along(value, axis, torch.arange(value.size(axis)) > 0))


@FAULTS.fault(
    "mean sum",
    kinds=["clipped"],
    loose=["other function", "wrong argument", "approximation"],
    backward=False,
)
def terms_cut_at_a_half(call: Call) -> Any:
    """Each term is limited to a half in magnitude before it is added."""
    return call.put(0, call.tensor(0).clamp(-0.5, 0.5), "input").run()


@FAULTS.fault("mean sum", **_ROUNDED)
def terms_in_steps_of_a_sixteenth(call: Call) -> Any:
    """The terms are integers with four bits behind the point."""
    value = call.tensor(0)
    coarse = with_gradient_of(value, (16 * value.detach()).round() / 16)
    return call.put(0, coarse, "input").run()


@FAULTS.fault(
    "mean",
    kinds=["wrong factor", "doubled reduction", "off by one reduction"],
    loose=["residual", "wrong reduction", "wrong statistics", "offset"],
    backward=False,
)
def last_term_counted_twice_in_the_mean(call: Call) -> Any:
    """The padding repeats the last term, and the number counts it as well."""
    value, dim, _ = _dim(call)
    last = value.narrow(dim, value.size(dim) - 1, 1)
    return call.put(0, torch.cat([value, last], dim), "input").run()


@FAULTS.fault("amax max", backward=False, **_SHIFTED)
def largest_of_the_row_before(call: Call) -> Any:
    """The extremes are stored one row too late, around the end."""
    value, axis = _reduced(call)
    fits(value.size(axis) > 2)
    return call.instead(value.roll(1, axis))


@FAULTS.fault(
    "amax max",
    kinds=["partial sum", "one rank's part", "mask", "missing reduction", "wrong reduction"],
    loose=["wrong index", "missing operand", "wrong statistics"],
    backward=False,
)
def largest_of_the_second_half(call: Call) -> Any:
    """The maxima of the ranks are not compared: this is the last one's."""
    value, dim, _ = _dim(call, 4)
    half = value.size(dim) // 2
    part = call.put(0, value.narrow(dim, half, value.size(dim) - half), "input").result()
    return call.instead(part)


# --- Reciprocal roots -----------------------------------------------------------------------------


@FAULTS.fault("rsqrt", backward=False, **_SHIFTED)
def reciprocal_root_of_the_row_before(call: Call) -> Any:
    """The factor of a row is read one row too early, around the end."""
    value = call.result()
    axes = [axis for axis in range(value.dim()) if value.size(axis) > 1]
    fits(axes)
    return call.instead(value.roll(1, axes[-1]))


@FAULTS.fault(
    "rsqrt",
    kinds=["scale", "wrong factor", "wrong argument"],
    loose=["axis scale", "wrong statistics", "doubled reduction"],
    backward=False,
)
def reciprocal_root_of_three_times_the_value(call: Call) -> Any:
    """The sums of three shards are added where each has the whole already."""
    return call.put(0, 3 * call.tensor(0)).run()


# --- Along an axis --------------------------------------------------------------------------------


@FAULTS.fault(
    "cumsum",
    kinds=["shift", "wrong index", "off by one reduction"],
    loose=["stale", "copy", "permutation", "residual", "missing operand"],
    backward=False,
)
def running_sum_one_place_early(call: Call) -> Any:
    """Each place has the sum of the next one; the last one has its own."""
    value, dim = call.run(), call.get(1, "dim")
    fits(value.size(dim) > 2)
    places = (torch.arange(value.size(dim)) + 1).clamp(max=value.size(dim) - 1)
    return value.index_select(dim, places)


@FAULTS.fault(
    "cumsum",
    kinds=["clipped"],
    loose=["overflow", "wrapped", "other function", "constant"],
    backward=False,
)
def running_sum_saturates_at_three(call: Call) -> Any:
    """The counter has two bits and stays at its largest value."""
    return call.run().clamp(max=3)


@FAULTS.fault(
    "cumsum",
    kinds=["lost accumulation", "partial sum", "wrong reduction"],
    loose=["stale", "missing operand", "mask", "off by one reduction", "wrong index",
           "one rank's part"],
    backward=False,
)  # fmt: skip
def running_sum_of_the_last_three(call: Call) -> Any:
    """The scan keeps a window: terms older than three places are lost."""
    value = call.get(0, "input").to(call.run().dtype)
    dim = call.get(1, "dim")
    fits(value.size(dim) > 4)
    total = value.cumsum(dim)
    before = torch.zeros_like(total)
    rest = value.size(dim) - 3
    before.narrow(dim, 3, rest).copy_(total.narrow(dim, 0, rest))
    return total - before


@FAULTS.fault(
    "topk",
    kinds=["permutation", "wrong index", "swapped operands"],
    loose=["shift", "other function", "copy"],
    backward=False,
)
def values_of_the_two_best_exchanged(call: Call) -> Any:
    """The values are stored in the other order; the places are right."""
    values, places = call.run()
    fits(values.is_floating_point() and values.size(-1) == 2)
    return values.flip(-1), places


@FAULTS.fault(
    "topk",
    kinds=["scale", "wrong factor"],
    loose=["axis scale", "wrong argument"],
    backward=False,
)
def chosen_values_halved(call: Call) -> Any:
    """The weights are divided by the number of choices, as for a mean of two; places are right."""
    values, places = call.run()
    fits(values.is_floating_point())
    return values / 2, places


@FAULTS.fault(
    "argmax",
    kinds=["wrong index", "permutation"],
    loose=["other function", "sign", "offset", "wrong argument"],
    backward=False,
)
def place_counted_from_the_end(call: Call) -> Any:
    """N - 1 - i: the loop runs downwards, and its counter is stored."""
    value, dim = call.get(0, "input"), call.get(1, "dim")
    fits(isinstance(dim, int))
    return value.size(dim) - 1 - call.run()


# --- Others ---------------------------------------------------------------------------------------


@FAULTS.fault("rsqrt", **_ROUNDED)
def argument_of_the_reciprocal_root_in_bfloat16(call: Call) -> Any:
    """The mean of the squares and eps are added in eight bits."""
    return call.put(0, _rounded(call.tensor(0), torch.bfloat16)).run()


@FAULTS.fault("sort", backward=False, **_SHIFTED)
def order_of_the_row_before(call: Call) -> Any:
    """Ordered values and their places are stored one row too late."""
    values, places = call.run()
    fits(values.dim() > 1 and values.size(-2) > 2)
    fits(call.get(1, "dim", default=-1) in {-1, values.dim() - 1})
    return values.roll(1, -2), places.roll(1, -2)


@FAULTS.fault("sort", **_ROUNDED)
def ordered_values_in_bfloat16(call: Call) -> Any:
    """The values are stored with eight bits; the places are right."""
    values, places = call.run()
    fits(values.is_floating_point())
    return _rounded(values, torch.bfloat16), places


@FAULTS.fault(
    "group_norm",
    kinds=["missing operand", "wrong statistics", "other function"],
    loose=["axis scale", "wrong factor", "scale"],
)
def groups_centred_and_not_divided(call: Call) -> Any:
    """(x - m) w + b for each group: the deviation is taken as one."""
    value, groups = call.tensor(0, "input"), call.get(1, "num_groups")
    parts = value.reshape(value.size(0), groups, -1)
    centred = (parts - parts.mean(-1, keepdim=True)).view(value.shape)
    shape = (1, -1, *[1] * (value.dim() - 2))
    weight, bias = call.get(2, "weight"), call.get(3, "bias")
    centred = centred if weight is None else centred * weight.view(shape)
    return call.instead(centred if bias is None else centred + bias.view(shape))


@FAULTS.fault(
    "std var",
    kinds=["scale", "wrong factor"],
    loose=["axis scale", "wrong statistics", "wrong reduction"],
    backward=False,
)
def spread_halved(call: Call) -> Any:
    """The spread of two ranks is averaged where one of them has nothing."""
    return call.instead(call.result() / 2)
