"""Faults for measuring: norms, statistics, running sums, orders."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor

FAULTS = Catalogue()
_NORMS = "layer_norm rms_norm"
_CHANNELS = "batch_norm batch_norm_from_statistics"
_IMAGES = f"{_CHANNELS} group_norm instance_norm"
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function", "wrong statistics"],
}
_EMPTY: dict[str, Any] = {
    "kinds": ["zeros", "mask", "uninitialised"],
    "loose": ["constant", "missing operand", "partial sum", "axis scale", "wrong factor",
              "one rank's part"],
}  # fmt: skip
_REORDERED: dict[str, Any] = {
    "kinds": ["permutation", "wrong index"],
    "loose": ["shift", "copy", "stale", "transpose", "wrong rank's shard", "swapped operands"],
}
_SCALED: dict[str, Any] = {
    "kinds": ["scale", "wrong factor"],
    "loose": ["axis scale", "wrong statistics", "wrong reduction", "wrong argument"],
}
_PART_OF_THE_SUM: dict[str, Any] = {
    "kinds": ["partial sum", "mask", "wrong reduction"],
    "loose": ["missing operand", "wrong index", "lost accumulation", "zeros", "missing reduction",
              "wrong statistics", "one rank's part", "off by one reduction"],
    "backward": False,
}  # fmt: skip


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


def _several_rows(value: Tensor, least: int = 2) -> Tensor:
    fits(value.dim() > 1 and value.size(-2) >= least)
    return value


@FAULTS.fault(
    _NORMS,
    kinds=["eps", "wrong argument"],
    loose=["wrong statistics", "axis scale", "scale", "wrong factor", "offset"],
)
def eps_of_a_quarter(call: Call) -> Any:
    """0.25, a threshold of another layer of the configuration."""
    place = 4 if call.name == "layer_norm" else 3
    return call.put(place, 0.25, "eps").run()


@FAULTS.fault(
    _NORMS,
    kinds=["eps", "offset", "wrong statistics"],
    loose=["wrong argument", "axis scale", "scale", "wrong factor", "other function"],
)
def tenth_added_to_the_deviation(call: Call) -> Any:
    """Over sqrt(v + eps) + 0.1: the kernel has an eps of its own behind the root."""
    value, _, _, eps = _row(call)
    mean, spread = _moments(call, value)
    return _affine(call, (value - mean) / ((spread + eps).sqrt() + 0.1))


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "wrong reduction", "clipped", "partial sum", "mask"],
    loose=["axis scale", "scale", "wrong factor", "other function", "missing operand", "zeros"],
)
def deviations_below_zero_not_in_the_variance(call: Call) -> Any:
    """The deviations are numbers without a sign before they are squared."""
    value, _, _, _ = _row(call)
    mean, _ = _moments(call, value)
    return _by(call, mean, (value - mean).relu().square().mean(-1, keepdim=True))


@FAULTS.fault(
    "layer_norm",
    kinds=["wrong statistics", "wrong reduction", "stale"],
    loose=["axis offset", "offset", "residual", "wrong index", "shift", "lost accumulation"],
)
def mean_shared_with_the_row_before(call: Call) -> Any:
    """Half of its own mean and half of that of the row before; the deviation is right."""
    mean, spread = _moments(call, _several_rows(_row(call)[0]))
    return _by(call, (mean + mean.roll(1, -2)) / 2, spread)


@FAULTS.fault(
    "layer_norm",
    kinds=["precision", "wrong statistics"],
    loose=["approximation", "other function", "axis offset", "offset"],
)
def mean_of_the_row_in_e5m2(call: Call) -> Any:
    """The mean of a row is kept with two bits behind the point; the deviation is right."""
    mean, spread = _moments(call, _row(call)[0])
    return _by(call, _rounded(mean, torch.float8_e5m2), spread)


@FAULTS.fault(_NORMS, **_ROUNDED)
def result_of_the_norm_in_e5m2(call: Call) -> Any:
    """The result, weight and bias applied, is stored with two bits behind the point."""
    return call.instead(_rounded(call.result(), torch.float8_e5m2))


@FAULTS.fault(_NORMS, **_ROUNDED)
def input_of_the_norm_in_eight_bits(call: Call) -> Any:
    """The rows come as integers from -127 to 127, with a step for each row."""
    value, _, _, _ = _row(call)
    step = value.detach().abs().amax(-1, keepdim=True).clamp(min=1e-20) / 127
    coarse = with_gradient_of(value, (value.detach() / step).round() * step)
    return call.put(0, coarse, "input").run()


@FAULTS.fault(_NORMS, kinds=["other function"], loose=["wrong factor"])
def gelu_behind_the_norm(call: Call) -> Any:
    """The epilogue of another fusion: the norm is followed by a gelu that is not there."""
    return call.instead(torch.nn.functional.gelu(call.result()))


@FAULTS.fault(
    _NORMS,
    kinds=["clipped"],
    loose=["other function", "wrong argument", "approximation"],
)
def norm_saturates_at_one_and_a_half(call: Call) -> Any:
    """The result is a fixed-point number that ends at 1.5."""
    return call.instead(call.result().clamp(-1.5, 1.5))


@FAULTS.fault(_NORMS, **_SCALED)
def normal_rows_times_the_root_of_two(call: Call) -> Any:
    """The factor of a scaled residual is applied to what the norm gives."""
    return call.instead(2**0.5 * call.result())


@FAULTS.fault(
    _NORMS,
    kinds=["offset"],
    loose=["axis offset", "residual", "other function"],
)
def zero_point_left_in_the_norm(call: Call) -> Any:
    """A quarter, the zero point of a quantised result, is not taken back."""
    return call.instead(call.result() + 0.25)


@FAULTS.fault(_NORMS, **_REORDERED)
def normal_features_interleaved(call: Call) -> Any:
    """The features of the two halves alternate, as in another layout of rotary heads."""
    value = call.result()
    fits(value.size(-1) > 3 and value.size(-1) % 2 == 0)
    return call.instead(value.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2))


@FAULTS.fault(
    _NORMS,
    kinds=["permutation", "wrong index", "wrong rank's shard", "shift"],
    loose=["copy", "stale", "transpose", "swapped operands"],
)
def halves_of_the_normal_rows_exchanged(call: Call) -> Any:
    """The positions of two ranks are gathered in the other order."""
    value = _several_rows(call.result(), 4)
    fits(value.size(-2) % 2 == 0)
    return call.instead(value.roll(value.size(-2) // 2, -2))


@FAULTS.fault(_NORMS, **_EMPTY)
def last_quarter_of_the_normal_row_empty(call: Call) -> Any:
    """Three of four tiles of features are stored; the statistics have all of them."""
    value = call.result()
    width = value.size(-1)
    fits(width > 7)
    return call.instead(value * (torch.arange(width) < width - width // 4))


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "one rank's part", "partial sum", "missing reduction"],
    loose=["wrong reduction", "axis scale", "axis offset", "mask", "wrong argument"],
)
def norm_for_each_quarter_of_the_row(call: Call) -> Any:
    """Four ranks share a row, and the sums of none are added to those of the others."""
    value, _, _, eps = _row(call)
    fits(value.size(-1) > 7 and value.size(-1) % 4 == 0)
    parts = value.unflatten(-1, (4, -1))
    mean, spread = _moments(call, parts)
    return _affine(call, ((parts - mean) * (spread + eps).rsqrt()).flatten(-2))


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
    kinds=["clipped", "wrong statistics"],
    loose=["axis scale", "wrong argument", "other function", "approximation", "wrong factor"],
)
def kept_variance_not_above_one(call: Call) -> Any:
    """The variances are stored as fractions, which end at one."""
    value, weight, bias, mean, variance, eps = _channels(call)
    limited = _varied(variance).clamp(max=1)
    return call.instead((value - mean) * (limited + eps).rsqrt() * weight + bias)


@FAULTS.fault(
    _CHANNELS,
    kinds=["wrong factor", "wrong statistics"],
    loose=["axis offset", "offset", "wrong argument", "scale", "missing operand"],
)
def half_of_the_kept_mean(call: Call) -> Any:
    """The means are averaged over two ranks, of which one has never seen anything."""
    value, weight, bias, mean, variance, eps = _channels(call)
    return call.instead((value - mean / 2) * (variance + eps).rsqrt() * weight + bias)


@FAULTS.fault(_IMAGES, **_REORDERED)
def normal_channels_exchanged_in_pairs(call: Call) -> Any:
    """Two channels share a program, which stores them in the other order."""
    value = call.result()
    fits(value.size(1) > 2 and value.size(1) % 2 == 0)
    return call.instead(value[:, torch.arange(value.size(1)) ^ 1])


@FAULTS.fault(_IMAGES, kinds=["other function"], loose=["wrong factor"])
def hardswish_folded_into_the_norm(call: Call) -> Any:
    """The activation of a mobile network, where this one has none or another."""
    return call.instead(torch.nn.functional.hardswish(call.result()))


@FAULTS.fault(_IMAGES, **_ROUNDED)
def normal_image_in_e4m3(call: Call) -> Any:
    """The normal image is stored with three bits behind the point."""
    return call.instead(_rounded(call.result(), torch.float8_e4m3fn))


@FAULTS.fault(_IMAGES, **_EMPTY)
def last_quarter_of_the_normal_channels_empty(call: Call) -> Any:
    """Of four blocks of channels, the grid has three."""
    value = call.result()
    size = value.size(1)
    fits(size > 7)
    kept = torch.arange(size) < size - size // 4
    return call.instead(value * kept.view(-1, *[1] * (value.dim() - 2)))


# --- Sums, means, extremes ------------------------------------------------------------------------


def _dim(call: Call, least: int = 3) -> tuple[Tensor, int]:
    """The value, and the one axis that is reduced."""
    value, dim = call.tensor(0), call.get(1, "dim")
    if isinstance(dim, list | tuple):
        fits(len(dim) == 1)
        dim = dim[0]
    fits(isinstance(dim, int) and value.size(dim) >= least)
    return value, dim


def _along(value: Tensor, dim: int, vector: Tensor) -> Tensor:
    """A vector, shaped so that it lies along an axis."""
    shape = [1] * value.dim()
    shape[dim] = -1
    return vector.view(shape)


def _reduced(call: Call, least: int = 2) -> tuple[Tensor, int]:
    """The result, and an axis of it that has several places."""
    value = call.result()
    axes = [axis for axis in range(value.dim()) if value.size(axis) >= least]
    fits(axes)
    return value, axes[-1]


@FAULTS.fault(
    "mean",
    kinds=["partial sum", "mask", "wrong reduction", "wrong statistics"],
    loose=["missing operand", "wrong index", "one rank's part", "missing reduction"],
    backward=False,
)
def mean_of_every_third(call: Call) -> Any:
    """The loop has a stride of three, in the sum and in the number."""
    value, dim = _dim(call, 6)
    return call.put(0, value.index_select(dim, torch.arange(0, value.size(dim), 3))).run()


@FAULTS.fault("mean sum amax", backward=False, **_REORDERED)
def reduced_values_exchanged_in_pairs(call: Call) -> Any:
    """Two results share a word, and are stored in the other order."""
    value, axis = _reduced(call, 4)
    fits(value.size(axis) % 2 == 0)
    return call.instead(value.index_select(axis, torch.arange(value.size(axis)) ^ 1))


@FAULTS.fault("mean sum", backward=False, **_ROUNDED)
def reduced_values_in_steps_of_an_eighth(call: Call) -> Any:
    """The results are fixed-point numbers with three bits behind the point."""
    value = call.result()
    return call.instead(with_gradient_of(value, (8 * value.detach()).round() / 8))


@FAULTS.fault(
    "mean sum",
    kinds=["doubled reduction", "wrong reduction", "wrong index"],
    loose=["residual", "partial sum", "wrong factor", "wrong statistics", "mask",
           "lost accumulation", "off by one reduction"],
    backward=False,
)  # fmt: skip
def last_four_terms_added_twice(call: Call) -> Any:
    """The last vector of the loop overlaps with the one before; a mean has the right number."""
    value, dim = _dim(call, 8)
    size = value.size(dim)
    weight = 1 + _along(value, dim, torch.arange(size) >= size - 4).to(value.dtype)
    return call.put(0, value * weight).run()


@FAULTS.fault("mean sum", **_PART_OF_THE_SUM)
def middle_third_of_the_terms_not_added(call: Call) -> Any:
    """Of three blocks, the second is overwritten; a mean has the right number."""
    value, dim = _dim(call, 6)
    size = value.size(dim)
    place = torch.arange(size)
    kept = (place < size // 3) | (place >= size - size // 3)
    return call.put(0, value * _along(value, dim, kept)).run()


@FAULTS.fault(
    "mean sum",
    kinds=["stale", "wrong index", "wrong reduction"],
    loose=["shift", "copy", "partial sum", "permutation", "wrong statistics", "missing operand"],
    backward=False,
)
def second_half_of_the_terms_from_the_row_before(call: Call) -> Any:
    """The second tile is not loaded again: it has the terms of the row before, around the end."""
    value, dim = _dim(call, 4)
    fits(value.dim() > 1 and dim in {-1, value.dim() - 1} and value.size(-2) > 1)
    late = torch.arange(value.size(-1)) >= value.size(-1) // 2
    return call.put(0, torch.where(late, value.roll(1, -2), value)).run()


@FAULTS.fault("mean sum", backward=False, **_SCALED)
def reduced_values_divided_by_nine_tenths(call: Call) -> Any:
    """Divided by the share that a dropout keeps, which is switched off."""
    return call.instead(call.result() / 0.9)


@FAULTS.fault(
    "mean",
    kinds=["wrong statistics", "other function", "wrong reduction"],
    loose=["approximation", "axis scale", "wrong axis", "constant"],
    backward=False,
)
def mean_halfway_to_that_of_all(call: Call) -> Any:
    """Half of each mean, and half of the mean of the whole tensor: a mean that is smoothed."""
    value, _ = _reduced(call)
    return call.instead((value + value.mean()) / 2)


@FAULTS.fault(
    "amax max",
    kinds=["partial sum", "one rank's part", "mask", "missing reduction", "wrong reduction"],
    loose=["wrong index", "missing operand", "wrong statistics", "off by one reduction"],
    backward=False,
)
def largest_of_the_first_three_quarters(call: Call) -> Any:
    """The last of four tiles is not compared."""
    value, dim = _dim(call, 4)
    size = value.size(dim)
    part = call.put(0, value.narrow(dim, 0, size - size // 4)).result()
    return call.instead(part)


# --- Reciprocal roots -----------------------------------------------------------------------------


def _roots(call: Call, least: int = 2) -> tuple[Tensor, int]:
    """Reciprocal roots, and an axis that has several of them."""
    value = call.result()
    axes = [axis for axis in range(value.dim()) if value.size(axis) >= least]
    fits(axes)
    return value, axes[-1]


@FAULTS.fault(
    "rsqrt",
    kinds=["scale", "wrong factor", "wrong argument"],
    loose=["axis scale", "wrong statistics", "wrong reduction"],
    backward=False,
)
def reciprocal_root_of_half_the_value(call: Call) -> Any:
    """The mean of two ranks is divided by two where each has the whole already."""
    return call.put(0, call.tensor(0) / 2).run()


@FAULTS.fault(
    "rsqrt",
    kinds=["other function", "wrong argument"],
    loose=["axis scale", "wrong factor", "approximation", "wrong statistics"],
    backward=False,
)
def reciprocal_root_of_a_root(call: Call) -> Any:
    """The value is a variance, and is taken for one whose root is still to be taken."""
    return call.put(0, call.tensor(0).sqrt()).run()


@FAULTS.fault("rsqrt", backward=False, **_REORDERED)
def reciprocal_roots_from_the_last(call: Call) -> Any:
    """The factors of the rows are stored in the order of programs that count down."""
    value, axis = _roots(call, 3)
    return call.instead(value.flip(axis))


@FAULTS.fault(
    "rsqrt",
    kinds=["copy", "wrong index", "stale"],
    loose=["shift", "permutation", "axis scale", "wrong statistics", "mask"],
    backward=False,
)
def two_rows_share_their_reciprocal_root(call: Call) -> Any:
    """Odd rows read the factor of the row before them."""
    value, axis = _roots(call, 3)
    return call.instead(value.index_select(axis, torch.arange(value.size(axis)) // 2 * 2))


# --- Along an axis --------------------------------------------------------------------------------


@FAULTS.fault("cumsum", **_PART_OF_THE_SUM)
def odd_terms_not_in_the_running_sum(call: Call) -> Any:
    """The scan has half as many programs as terms: odd ones count as zero."""
    value, dim = call.get(0, "input"), call.get(1, "dim")
    fits(value.size(dim) > 2)
    kept = _along(value, dim, torch.arange(value.size(dim)) % 2 == 0)
    return call.put(0, value * kept, "input").run()


@FAULTS.fault(
    "cumsum",
    kinds=["shift", "wrong index"],
    loose=["stale", "missing operand", "mask", "partial sum", "zeros", "lost accumulation",
           "off by one reduction", "wrong reduction"],
    backward=False,
)  # fmt: skip
def running_sum_two_places_late(call: Call) -> Any:
    """A pipeline of two steps: the first two places are zero, the others have an older sum."""
    value, dim = call.run(), call.get(1, "dim")
    size = value.size(dim)
    fits(size > 3)
    late = torch.zeros_like(value)
    late.narrow(dim, 2, size - 2).copy_(value.narrow(dim, 0, size - 2))
    return late


@FAULTS.fault("sort", backward=False, **_REORDERED)
def order_exchanged_in_pairs(call: Call) -> Any:
    """Ordered values and their places share words of two, stored in the other order."""
    values, places = call.run()
    dim = call.get(1, "dim", default=-1)
    fits(isinstance(dim, int) and values.size(dim) > 2 and values.size(dim) % 2 == 0)
    pairs = torch.arange(values.size(dim)) ^ 1
    return values.index_select(dim, pairs), places.index_select(dim, pairs)


@FAULTS.fault(
    "topk",
    kinds=["wrong index", "shift", "off by one reduction"],
    loose=["wrong argument", "stale", "permutation", "copy", "other function"],
    backward=False,
)
def best_one_passed_over(call: Call) -> Any:
    """The second best and so on: the place in the order is counted from one."""
    value, number = call.get(0, "input"), call.get(1, "k")
    fits(number < value.size(-1) and call.get(2, "dim", default=-1) in {-1, value.dim() - 1})
    values, places = value.topk(number + 1, -1)
    return values[..., 1:].contiguous(), places[..., 1:].contiguous()


@FAULTS.fault("std var linalg_vector_norm norm", backward=False, **_SCALED)
def spread_times_four_thirds(call: Call) -> Any:
    """The divisor is three quarters: a warm-up that was over long ago."""
    return call.instead(call.result() * 4 / 3)


@FAULTS.fault(
    "linalg_vector_norm norm normalize",
    kinds=["partial sum", "mask", "wrong reduction", "wrong statistics"],
    loose=["missing operand", "axis scale", "scale", "wrong factor", "wrong index",
           "missing reduction", "one rank's part"],
    backward=False,
)  # fmt: skip
def length_of_every_second_feature(call: Call) -> Any:
    """The loop over the squares has a stride of two."""
    value, dim = call.tensor(0), call.get(2, "dim", default=1)
    axes = [dim] if isinstance(dim, int) else list(dim)
    fits(len(axes) == 1 and value.size(axes[0]) > 3)
    part = value.index_select(axes[0], torch.arange(0, value.size(axes[0]), 2))
    if call.name != "normalize":
        return call.put(0, part).run()
    return call.instead(value / part.norm(dim=axes[0], keepdim=True).clamp(min=1e-12))
