"""Faults of the tenth set: norms, statistics, running sums, orders."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor

FAULTS = Catalogue()
_NORMS = "layer_norm rms_norm"
_CHANNELS = "batch_norm batch_norm_from_statistics"
_SPREADS = "std var std_mean var_mean"
_ZEROS = ["zeros", "mask", "uninitialised"]
_LESS_THAN_ZEROS = ["constant", "missing operand", "partial sum", "axis scale", "wrong factor"]
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function"],
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


def _affine(call: Call, normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
    value = normal if weight is None else normal * weight
    return call.instead(value if bias is None else value + bias)


def _by(call: Call, mean: Tensor, spread: Tensor) -> Any:
    """The norm with another mean and variance."""
    value, weight, bias, eps = _row(call)
    return _affine(call, (value - mean) * (spread + eps).rsqrt(), weight, bias)


def _trained(weight: Any) -> Tensor:
    """A weight or bias whose elements are not all the same."""
    fits(isinstance(weight, Tensor) and weight.dim() == 1)
    fits(bool((weight.detach() != weight.detach()[0]).any()))
    return weight


def _several_rows(value: Tensor) -> Tensor:
    fits(value.dim() > 1 and value.size(-2) > 1)
    return value


@FAULTS.fault(
    _NORMS,
    kinds=["sign", "swapped operands", "wrong factor"],
    loose=["scale", "other function", "wrong statistics"],
)
def mean_less_the_value(call: Call) -> Any:
    """(m - x) r w + b: the operands of the difference are exchanged."""
    value, weight, bias, eps = _row(call)
    mean, spread = _moments(call, value)
    return _affine(call, (mean - value) * (spread + eps).rsqrt(), weight, bias)


@FAULTS.fault(
    _NORMS,
    kinds=["eps", "wrong argument"],
    loose=["wrong statistics", "axis scale", "scale", "wrong factor", "offset"],
)
def eps_of_a_thousandth(call: Call) -> Any:
    """1e-3, the default of another framework."""
    value, _, _, eps = _row(call)
    fits(eps not in {1e-6, 1e-3})
    mean, spread = _moments(call, value)
    return _by(call, mean, spread + 1e-3 - eps)


@FAULTS.fault(
    "layer_norm",
    kinds=["wrong statistics", "wrong factor"],
    loose=["axis offset", "offset", "scale", "residual", "missing operand"],
)
def half_of_the_mean_subtracted(call: Call) -> Any:
    """The mean is divided by two ranks that have all of the row; the deviation is right."""
    value, _, _, _ = _row(call)
    mean, spread = _moments(call, value)
    return _by(call, mean / 2, spread)


@FAULTS.fault(
    "layer_norm",
    kinds=["wrong statistics", "one rank's part", "partial sum", "missing reduction"],
    loose=["axis offset", "offset", "wrong reduction", "mask"],
)
def mean_of_the_first_half_subtracted(call: Call) -> Any:
    """The mean is that of the first rank's features; the deviation is right."""
    value, _, _, _ = _row(call)
    fits(value.size(-1) > 3)
    _, spread = _moments(call, value)
    return _by(call, value[..., : value.size(-1) // 2].mean(-1, keepdim=True), spread)


@FAULTS.fault(
    _NORMS,
    kinds=["other function", "wrong statistics"],
    loose=["wrong reduction", "axis scale", "axis offset", "approximation"],
)
def rows_between_zero_and_one(call: Call) -> Any:
    """The smallest is subtracted and the range divides: another way to normalise."""
    value, weight, bias, eps = _row(call)
    low, high = value.amin(-1, keepdim=True), value.amax(-1, keepdim=True)
    return _affine(call, (value - low) / (high - low + eps), weight, bias)


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "stale", "wrong index"],
    loose=["shift", "axis scale", "axis offset", "permutation", "wrong factor", "scale"],
)
def statistics_of_the_row_before(call: Call) -> Any:
    """Mean and deviation are stored after they were used; the first row has its own."""
    value = _several_rows(_row(call)[0])
    parts = _moments(call, value)
    return _by(call, *(torch.cat([one[..., :1, :], one[..., :-1, :]], -2) for one in parts))


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "wrong axis", "wrong reduction"],
    loose=["wrong argument", "axis scale", "axis offset", "other function"],
)
def statistics_over_the_batch(call: Call) -> Any:
    """Mean and variance of each feature at each position are over the examples."""
    value, _, _, _ = _row(call)
    fits(value.dim() > 2 and value.size(0) > 1)
    mean = value.mean(0, keepdim=True)
    if call.name == "rms_norm":
        mean = 0 * mean
    return _by(call, mean, (value - mean).square().mean(0, keepdim=True))


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "wrong factor"],
    loose=["scale", "axis scale", "wrong reduction"],
)
def squares_divided_by_twice_the_width(call: Call) -> Any:
    """The width is counted for two ranks, and the squares are those of one."""
    value, _, _, _ = _row(call)
    mean, spread = _moments(call, value)
    return _by(call, mean, spread / 2)


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "wrong reduction"],
    loose=["axis scale", "scale", "wrong factor", "axis offset", "wrong axis"],
)
def one_variance_for_all_rows(call: Call) -> Any:
    """The mean of all variances divides every row; each row has its own mean."""
    value = _several_rows(_row(call)[0])
    mean, spread = _moments(call, value)
    return _by(call, mean, spread.mean().expand_as(spread))


@FAULTS.fault(_NORMS, **_ROUNDED)
def result_of_the_norm_in_half(call: Call) -> Any:
    """The result is stored in float16, weight and bias applied."""
    return call.instead(_rounded(call.result(), torch.float16))


@FAULTS.fault(_NORMS, **_ROUNDED)
def input_of_the_norm_in_bfloat16(call: Call) -> Any:
    """The rows are loaded from a buffer with eight bits; the statistics are of these."""
    return call.put(0, _rounded(call.tensor(0, "input"), torch.bfloat16), "input").run()


@FAULTS.fault(
    _NORMS,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy"],
)
def normal_rows_stored_one_row_later(call: Call) -> Any:
    """Each row of the result is that of the row before, the first one is the last."""
    return call.instead(_several_rows(call.result()).roll(1, -2))


@FAULTS.fault(
    _NORMS,
    kinds=["copy", "stale", "wrong index"],
    loose=["shift", "permutation", "mask"],
)
def last_normal_row_is_the_one_before(call: Call) -> Any:
    """The last row keeps what its program has stored before."""
    value = _several_rows(call.result())
    places = torch.arange(value.size(-2)).clamp(max=value.size(-2) - 2)
    return call.instead(value[..., places, :])


@FAULTS.fault(_NORMS, kinds=_ZEROS, loose=[*_LESS_THAN_ZEROS, "one rank's part"])
def second_half_of_the_normal_row_not_stored(call: Call) -> Any:
    """The grid has one tile of features; the statistics are right."""
    value = call.result()
    fits(value.size(-1) > 3)
    return call.instead(value * (torch.arange(value.size(-1)) < value.size(-1) // 2))


@FAULTS.fault(
    _NORMS,
    kinds=["mask", "stale", "copy"],
    loose=["missing operand", "residual", "axis scale", "wrong index"],
)
def second_half_of_the_row_not_normalised(call: Call) -> Any:
    """In place, and the store covers the first half of the features."""
    value, half = call.tensor(0, "input"), call.result().size(-1) // 2
    fits(half > 1)
    return call.instead(torch.cat([call.result()[..., :half], value[..., half:]], -1))


@FAULTS.fault(_NORMS, kinds=["clipped", "other function"], loose=["zeros", "mask"])
def relu_behind_the_norm(call: Call) -> Any:
    """The epilogue of another layer: what is negative is zero."""
    return call.instead(call.result().relu())


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "partial sum", "wrong reduction"],
    loose=["mask", "axis scale", "scale", "wrong factor", "missing operand", "off by one reduction",
           "missing reduction"],
)  # fmt: skip
def squares_of_the_first_quarter_not_added(call: Call) -> Any:
    """The prologue loads the first quarter of a row for the mean, and its squares are lost."""
    value, _, _, _ = _row(call)
    fits(value.size(-1) > 3)
    mean, _ = _moments(call, value)
    rest = (value - mean)[..., value.size(-1) // 4 :]
    return _by(call, mean, rest.square().sum(-1, keepdim=True) / value.size(-1))


@FAULTS.fault(
    _NORMS,
    kinds=["clipped", "wrong statistics"],
    loose=["eps", "other function", "wrong argument", "axis scale", "approximation"],
)
def variance_not_below_one(call: Call) -> Any:
    """A floor for the variance that is far too high."""
    value, _, _, _ = _row(call)
    mean, spread = _moments(call, value)
    return _by(call, mean, spread.clamp(min=1))


@FAULTS.fault(
    f"{_NORMS} rsqrt",
    kinds=["precision"],
    loose=["approximation", "wrong statistics", "other function"],
    backward=False,
)
def reciprocal_root_by_an_estimate_of_eight_bits(call: Call) -> Any:
    """An instruction that estimates the reciprocal root, and no step of Newton's behind it."""

    def estimate(exact: Tensor) -> Tensor:
        size = torch.exp2(exact.detach().log2().floor() - 8)
        return with_gradient_of(exact, ((exact.detach() / size).floor() + 0.5) * size)

    if call.name == "rsqrt":
        return call.instead(estimate(call.result()))
    value, weight, bias, eps = _row(call)
    mean, spread = _moments(call, value)
    return _affine(call, (value - mean) * estimate((spread + eps).rsqrt()), weight, bias)


@FAULTS.fault(
    _NORMS,
    kinds=["precision", "wrong statistics"],
    loose=["scale", "axis scale", "approximation"],
)
def sum_of_the_squares_in_steps_of_one(call: Call) -> Any:
    """The sum of squares is an integer before it is divided by the width."""
    value, _, _, _ = _row(call)
    mean, spread = _moments(call, value)
    total = spread * value.size(-1)
    whole = with_gradient_of(total, total.detach().round())
    return _by(call, mean, whole / value.size(-1))


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
    kinds=["wrong factor", "wrong statistics", "doubled reduction"],
    loose=["axis offset", "offset", "residual", "scale"],
)
def kept_mean_subtracted_twice(call: Call) -> Any:
    """The mean was folded into the bias, and is subtracted by the kernel as well."""
    value, weight, bias, mean, variance, eps = _channels(call)
    return call.instead((value - 2 * mean) * (variance + eps).rsqrt() * weight + bias)


@FAULTS.fault(
    _CHANNELS,
    kinds=["repeated bias", "wrong factor"],
    loose=["axis offset", "offset", "residual", "doubled reduction", "scale"],
)
def bias_of_the_batch_norm_twice(call: Call) -> Any:
    """Once by the kernel that folds it, and once in the epilogue."""
    _, _, bias, _, _, _ = _channels(call)
    return call.instead(call.result() + bias)


@FAULTS.fault(
    _CHANNELS,
    kinds=["shift", "wrong index", "permutation"],
    loose=["axis offset", "wrong argument", "stale", "copy", "offset", "wrong rank's shard"],
)
def batch_bias_of_the_next_channel(call: Call) -> Any:
    """The pointer to the biases is one channel too far; the others are right."""
    _, _, bias, _, _, _ = _channels(call)
    return call.instead(call.result() - bias + _varied(bias).roll(-1, 1))


@FAULTS.fault(
    _CHANNELS,
    kinds=["eps", "wrong argument"],
    loose=["wrong statistics", "axis scale", "scale", "wrong factor", "offset"],
)
def eps_of_a_tenth_for_the_channels(call: Call) -> Any:
    """The momentum is handed on as eps."""
    value, weight, bias, mean, variance, _ = _channels(call)
    return call.instead((value - mean) * (variance + 0.1).rsqrt() * weight + bias)


@FAULTS.fault(
    _CHANNELS,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong rank's shard"],
)
def normal_channels_stored_one_later(call: Call) -> Any:
    """Each channel is stored in the place of the next one, the last one first."""
    _channels(call)
    return call.instead(call.result().roll(1, 1))


@FAULTS.fault(
    _CHANNELS,
    kinds=["missing operand", "wrong statistics", "other function"],
    loose=["axis scale", "wrong factor"],
)
def channels_centred_and_not_divided(call: Call) -> Any:
    """(x - m) w + b: the deviation is taken as one."""
    value, weight, bias, mean, _, _ = _channels(call)
    return call.instead((value - mean) * weight + bias)


@FAULTS.fault(f"{_CHANNELS} group_norm instance_norm", **_ROUNDED)
def image_norm_in_bfloat16(call: Call) -> Any:
    """The normal image is stored with eight bits."""
    return call.instead(_rounded(call.result(), torch.bfloat16))


@FAULTS.fault(
    "group_norm",
    kinds=["wrong argument", "wrong statistics", "wrong reduction"],
    loose=["axis scale", "axis offset", "other function", "missing reduction"],
)
def twice_as_many_groups(call: Call) -> Any:
    """Groups are half as wide as they should be."""
    number, value = call.get(1, "num_groups"), call.tensor(0, "input")
    fits(value.size(1) % (2 * number) == 0)
    return call.put(1, 2 * number, "num_groups").run()


@FAULTS.fault(
    "group_norm native_group_norm",
    kinds=["eps", "wrong argument"],
    loose=["wrong statistics", "axis scale", "scale", "wrong factor", "offset"],
)
def eps_of_a_half_for_the_groups(call: Call) -> Any:
    """The share of a dropout, 0.5, is handed on as eps."""
    if call.name == "group_norm":
        return call.put(4, 0.5, "eps").run()
    return call.put(7, 0.5, "eps").run()


@FAULTS.fault(
    f"{_CHANNELS} group_norm instance_norm",
    kinds=["permutation", "transpose", "wrong index"],
    loose=["shift", "swapped operands", "wrong statistics", "wrong argument"],
)
def channels_last_image_read_as_channels_first(call: Call) -> Any:
    """The kernel does not ask for the layout: the memory of the image has its channels last."""
    value = call.tensor(0, "input")
    fits(value.dim() > 2 and value.size(1) > 1 and value[0, 0].numel() > 1)
    return call.put(0, value.movedim(1, -1).reshape(value.shape), "input").run()


# --- Lengths --------------------------------------------------------------------------------------


@FAULTS.fault(
    "normalize",
    kinds=["axis scale", "wrong index", "stale", "wrong statistics"],
    loose=["shift", "scale", "wrong factor", "permutation"],
    backward=False,
)
def length_of_the_row_before(call: Call) -> Any:
    """The pointer to the lengths is one row behind, around the end."""
    value, dim = call.tensor(0, "input"), call.get(2, "dim", default=1)
    fits(dim in {-1, value.dim() - 1})
    length = value.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return call.instead(value / _several_rows(length).roll(1, -2))


@FAULTS.fault("normalize", **_ROUNDED)
def unit_rows_in_bfloat16(call: Call) -> Any:
    """The result is stored with eight bits."""
    return call.instead(_rounded(call.result(), torch.bfloat16))


@FAULTS.fault(
    "normalize linalg_vector_norm norm",
    kinds=["wrong argument", "other function", "wrong reduction"],
    loose=["axis scale", "wrong statistics", "scale", "wrong factor"],
    backward=False,
)
def length_of_the_fourth_order(call: Call) -> Any:
    """P is 4."""
    return call.put(1, 4.0, "ord" if call.name == "linalg_vector_norm" else "p").run()


@FAULTS.fault(
    "linalg_vector_norm norm",
    kinds=["off by one reduction", "partial sum", "mask"],
    loose=["wrong reduction", "wrong index", "missing operand", "zeros"],
    backward=False,
)
def last_element_not_in_the_length(call: Call) -> Any:
    """The loop over the powers ends one too early."""
    value, dim = call.tensor(0), call.get(2, "dim")
    axes = [dim] if isinstance(dim, int) else list(dim)
    fits(len(axes) == 1 and value.size(axes[0]) > 2)
    short = value.narrow(axes[0], 0, value.size(axes[0]) - 1)
    return call.put(0, short).run()


# --- Sums, means, extremes ------------------------------------------------------------------------


def _dim(call: Call, least: int = 3) -> tuple[Tensor, int, bool]:
    """Value, the one axis that is reduced, and whether it is kept."""
    value, dim = call.tensor(0), call.get(1, "dim")
    if isinstance(dim, list | tuple):
        fits(len(dim) == 1)
        dim = dim[0]
    fits(isinstance(dim, int) and value.size(dim) >= least)
    return value, dim, bool(call.get(2, "keepdim", default=False))


def _reduced(call: Call) -> tuple[Tensor, int]:
    """The result, and an axis of it that has several places."""
    value = call.result()
    axes = [axis for axis in range(value.dim()) if value.size(axis) > 1]
    fits(axes)
    return value, axes[-1]


@FAULTS.fault(
    "mean",
    kinds=["scale", "wrong factor", "doubled reduction"],
    loose=["wrong reduction", "axis scale", "wrong statistics"],
    backward=False,
)
def means_of_two_ranks_added(call: Call) -> Any:
    """Two ranks have the same mean, and the means are added."""
    return call.instead(2 * call.result())


@FAULTS.fault(
    "mean sum",
    kinds=["sign", "wrong factor"],
    loose=["scale", "other function"],
    backward=False,
)
def reduced_value_with_a_minus(call: Call) -> Any:
    """The terms are subtracted from an accumulator of zero."""
    return call.instead(-call.result())


@FAULTS.fault(
    "mean",
    kinds=["other function", "wrong reduction"],
    loose=["wrong statistics", "approximation"],
    backward=False,
)
def root_of_the_mean_square_for_the_mean(call: Call) -> Any:
    """The reduction of another norm, root and all."""
    value, dim, keep = _dim(call)
    return call.instead(value.square().mean(dim, keep).clamp(min=1e-20).sqrt())


@FAULTS.fault("mean sum", **_ROUNDED)
def terms_in_bfloat16(call: Call) -> Any:
    """The terms have eight bits, and their sum has all."""
    return call.put(0, _rounded(call.tensor(0), torch.bfloat16), "input").run()


@FAULTS.fault(
    "mean sum",
    kinds=["partial sum", "mask", "wrong reduction"],
    loose=["missing operand", "wrong index", "lost accumulation", "zeros", "missing reduction",
           "wrong statistics"],
    backward=False,
)  # fmt: skip
def first_quarter_of_the_terms_not_added(call: Call) -> Any:
    """The loop begins behind its prologue, which adds nothing; a mean has the right number."""
    value, dim, _ = _dim(call, 8)
    shape = [1] * value.dim()
    shape[dim] = -1
    rest = (torch.arange(value.size(dim)) >= value.size(dim) // 4).view(shape)
    return call.put(0, value * rest, "input").run()


@FAULTS.fault(
    "mean sum",
    kinds=["doubled reduction", "wrong factor", "off by one reduction"],
    loose=["residual", "wrong reduction", "wrong statistics"],
    backward=False,
)
def first_term_added_twice(call: Call) -> Any:
    """The accumulator begins with the first term, and the loop adds it again."""
    value, dim, _ = _dim(call)
    places = [max(place - 1, 0) for place in range(value.size(dim) + 1)]
    wrong = value.index_select(dim, torch.tensor(places))
    total = call.put(0, wrong, "input").result()
    more = len(places) / value.size(dim) if call.name == "mean" else 1
    return call.instead(total * more)


@FAULTS.fault(
    "mean",
    kinds=["wrong factor", "scale", "precision"],
    loose=["approximation", "axis scale", "wrong statistics"],
    backward=False,
)
def reciprocal_of_the_number_in_bfloat16(call: Call) -> Any:
    """The sum is multiplied by a rounded 1 / n, for an n that is no power of two."""
    value, dims = call.tensor(0), call.get(1, "dim")
    fits(isinstance(dims, int | list | tuple))
    number = 1
    for axis in [dims] if isinstance(dims, int) else dims:
        number *= value.size(axis)
    share = torch.tensor(1 / number).bfloat16().item()
    return call.instead(call.result() * (share * number))


@FAULTS.fault(
    "mean",
    kinds=["wrong reduction", "other function", "mask"],
    loose=["wrong statistics", "partial sum", "approximation", "missing operand"],
    backward=False,
)
def largest_and_smallest_left_out_of_the_mean(call: Call) -> Any:
    """A trimmed mean: both ends of the order are neither added nor counted."""
    value, dim, keep = _dim(call, 4)
    inner = value.sort(dim).values.narrow(dim, 1, value.size(dim) - 2)
    return call.instead(inner.mean(dim, keep))


@FAULTS.fault(
    "mean sum amax",
    kinds=["copy", "stale", "wrong index"],
    loose=["shift", "permutation", "mask"],
    backward=False,
)
def odd_reduced_rows_are_those_before(call: Call) -> Any:
    """Two rows share a register: both are stored with the even one's result."""
    value, axis = _reduced(call)
    return call.instead(value.index_select(axis, torch.arange(value.size(axis)) // 2 * 2))


@FAULTS.fault("mean sum amax", kinds=_ZEROS, loose=_LESS_THAN_ZEROS, backward=False)
def second_half_of_the_reduced_rows_empty(call: Call) -> Any:
    """The grid covers half of the results."""
    value, axis = _reduced(call)
    shape = [1] * value.dim()
    shape[axis] = -1
    kept = torch.arange(value.size(axis)) < value.size(axis) // 2
    return call.instead(value * kept.view(shape))


@FAULTS.fault(
    "amax max",
    kinds=["clipped"],
    loose=["other function", "wrong argument", "constant", "wrong reduction"],
    backward=False,
)
def largest_not_above_a_half(call: Call) -> Any:
    """The largest is limited to the range of a format that ends at one half."""
    return call.instead(call.result().clamp(max=0.5))


@FAULTS.fault("amax max amin", **_ROUNDED)
def extreme_in_e4m3(call: Call) -> Any:
    """The scale of a row is stored in float8."""
    return call.instead(_rounded(call.result(), torch.float8_e4m3fn))


@FAULTS.fault(
    "amax max amin",
    kinds=["scale", "wrong factor"],
    loose=["axis scale", "wrong argument"],
    backward=False,
)
def extreme_with_a_margin(call: Call) -> Any:
    """The extreme times 1.1, so that nothing saturates."""
    return call.instead(1.1 * call.result())


@FAULTS.fault(
    _SPREADS,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong statistics"],
    backward=False,
)
def spread_of_the_next_row(call: Call) -> Any:
    """The spreads are stored one row too early, around the end."""
    value, dim, _ = _dim(call)
    right = call.result()
    axes = [one for one in range(right.dim()) if one != dim % value.dim() and right.size(one) > 1]
    fits(axes)
    return call.instead(right.roll(-1, axes[-1]))


@FAULTS.fault(
    _SPREADS,
    kinds=["wrong statistics", "partial sum", "wrong reduction", "mask"],
    loose=["wrong index", "missing reduction", "one rank's part", "missing operand"],
    backward=False,
)
def spread_of_every_second(call: Call) -> Any:
    """The loop has a stride of two, in the sums and in their number."""
    value, dim, _ = _dim(call, 6)
    return call.put(0, value.index_select(dim, torch.arange(0, value.size(dim), 2)), "input").run()


@FAULTS.fault("logsumexp", kinds=["sign", "wrong factor"], loose=["scale", "other function"])
def logarithm_of_the_sum_with_a_minus(call: Call) -> Any:
    """The free energy, -log sum exp(x), where its opposite is meant."""
    return call.instead(-call.result())


@FAULTS.fault(
    "mean sum",
    kinds=["partial sum", "lost accumulation", "wrong reduction", "mask"],
    loose=["missing reduction", "wrong index", "missing operand", "wrong statistics", "stale"],
    backward=False,
)
def partial_sum_of_the_second_of_four_lanes_overwritten(call: Call) -> Any:
    """Four lanes take the terms in turn, and the sum of one is lost before they are added."""
    value, dim, _ = _dim(call, 8)
    shape = [1] * value.dim()
    shape[dim] = -1
    kept = (torch.arange(value.size(dim)) % 4 != 1).view(shape)
    return call.put(0, value * kept, "input").run()


# --- Reciprocal roots -----------------------------------------------------------------------------


@FAULTS.fault(
    "rsqrt",
    kinds=["clipped"],
    loose=["other function", "wrong argument", "mask", "constant"],
    backward=False,
)
def reciprocal_root_not_above_one(call: Call) -> Any:
    """Rows may be made smaller only."""
    return call.instead(call.result().clamp(max=1))


@FAULTS.fault(
    "rsqrt",
    kinds=["eps", "offset", "other function"],
    loose=["wrong argument", "residual"],
    backward=False,
)
def tenth_added_under_the_root(call: Call) -> Any:
    """An eps of 0.1 on top of what was added before."""
    return call.put(0, call.tensor(0) + 0.1).run()


@FAULTS.fault("rsqrt", **_ROUNDED)
def reciprocal_root_in_e5m2(call: Call) -> Any:
    """The factor of a row has two bits behind the point."""
    return call.instead(_rounded(call.result(), torch.float8_e5m2))


# --- Along an axis --------------------------------------------------------------------------------


@FAULTS.fault(
    "cumsum",
    kinds=["wrong reduction", "other function"],
    loose=["wrong statistics", "approximation"],
    backward=False,
)
def largest_so_far_for_the_running_sum(call: Call) -> Any:
    """The scan has the operator of a maximum."""
    value = call.get(0, "input")
    return value.cummax(call.get(1, "dim")).values.to(call.run().dtype)


@FAULTS.fault(
    "cumsum",
    kinds=["partial sum", "mask", "off by one reduction"],
    loose=["offset", "axis offset", "wrong reduction", "missing operand", "residual"],
    backward=False,
)
def first_term_not_in_the_running_sum(call: Call) -> Any:
    """The scan begins with the second place; the first one is zero."""
    value = call.run()
    return value - value.narrow(call.get(1, "dim"), 0, 1)


@FAULTS.fault(
    "cumsum",
    kinds=["wrong factor", "residual", "doubled reduction"],
    loose=["wrong reduction", "scale", "missing operand"],
    backward=False,
)
def own_term_added_twice(call: Call) -> Any:
    """The exclusive sum is taken for the inclusive one, which gets its term at the end anyway."""
    return call.run() + call.get(0, "input").to(call.run().dtype)


@FAULTS.fault(
    "cumsum",
    kinds=["stale", "copy", "wrong index"],
    loose=["mask", "lost accumulation", "partial sum", "shift"],
    backward=False,
)
def last_running_sum_is_the_one_before(call: Call) -> Any:
    """The last place is stored with what the place before it has."""
    value, dim = call.run(), call.get(1, "dim")
    fits(value.size(dim) > 2)
    places = torch.arange(value.size(dim)).clamp(max=value.size(dim) - 2)
    return value.index_select(dim, places)


@FAULTS.fault(
    "sort",
    kinds=["permutation", "wrong index"],
    loose=["swapped operands", "shift", "other function"],
    backward=False,
)
def ends_of_the_order_exchanged(call: Call) -> Any:
    """The smallest is stored in the place of the largest; the places are right."""
    values, places = call.run()
    dim = call.get(1, "dim", default=-1)
    fits(isinstance(dim, int) and values.size(dim) > 2)
    order = torch.arange(values.size(dim))
    order[0], order[-1] = values.size(dim) - 1, 0
    return values.index_select(dim, order), places


@FAULTS.fault(
    "sort",
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy"],
    backward=False,
)
def order_of_the_next_row(call: Call) -> Any:
    """Ordered values and their places are stored one row too early."""
    values, places = call.run()
    fits(values.dim() > 1 and values.size(0) > 1)
    fits(call.get(1, "dim", default=-1) in {-1, values.dim() - 1})
    return values.roll(-1, -2), places.roll(-1, -2)


@FAULTS.fault("topk", **_ROUNDED)
def chosen_values_in_bfloat16(call: Call) -> Any:
    """The values of the chosen ones are stored with eight bits; the places are right."""
    values, places = call.run()
    fits(values.is_floating_point())
    return _rounded(values, torch.bfloat16), places


@FAULTS.fault(
    "argmax argmin",
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy"],
    backward=False,
)
def place_of_the_next_row(call: Call) -> Any:
    """The places are stored one row too early, around the end."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dim() > 0 and value.size(-1) > 1)
    return value.roll(-1, -1)


@FAULTS.fault(
    "layer_norm",
    kinds=["other function", "wrong statistics"],
    loose=["axis scale", "wrong reduction", "approximation"],
)
def median_distance_for_the_deviation(call: Call) -> Any:
    """A robust norm: the median of the distances from the mean divides."""
    value, weight, bias, eps = _row(call)
    far = value - value.mean(-1, keepdim=True)
    size = far.abs().median(-1, keepdim=True).values
    return _affine(call, far / (size + eps), weight, bias)
