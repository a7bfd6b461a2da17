"""Faults that were measured fifth and have been seen: norms, statistics, running sums."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_NORMS = "layer_norm rms_norm"
_CHANNELS = "batch_norm batch_norm_from_statistics"
_EPS = {"layer_norm": 4, "rms_norm": 3, "group_norm": 4, "native_group_norm": 7, "batch_norm": 7,
        "batch_norm_from_statistics": 6, "instance_norm": 7}  # fmt: skip


# --- Norms ----------------------------------------------------------------------------------------


def _with_eps(call: Call, change: Any) -> Any:
    """The norm with another eps."""
    place = _EPS[call.name]
    eps = call.get(place, "eps")
    fits(isinstance(eps, float) and eps > 0)
    return call.put(place, change(eps), "eps").run()


def _row(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
    """Input, weight, bias and eps of a norm over the last axis."""
    value, shape = call.tensor(0, "input"), call.get(1, "normalized_shape")
    fits(len(shape) == 1)
    weight = call.get(2, "weight")
    bias = call.get(3, "bias") if call.name == "layer_norm" else None
    return value, weight, bias, call.get(_EPS[call.name], "eps") or 1e-5


def _affine(call: Call, normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
    value = normal if weight is None else normal * weight
    return call.instead(value if bias is None else value + bias)


@FAULTS.fault(" ".join(_EPS), kinds=["eps", "wrong argument", "missing operand"],
              loose=["wrong statistics", "axis scale", "scale"])  # fmt: skip
def norm_without_eps(call: Call) -> Any:
    """Nothing is added to the variance."""
    return _with_eps(call, lambda _: 0.0)


@FAULTS.fault(" ".join(_EPS), kinds=["eps", "wrong argument", "sign"],
              loose=["wrong statistics", "axis scale", "scale"])  # fmt: skip
def eps_subtracted(call: Call) -> Any:
    """The variance less eps."""
    return _with_eps(call, lambda eps: -eps)


@FAULTS.fault(_NORMS, kinds=["eps", "wrong argument", "wrong factor"],
              loose=["wrong statistics", "axis scale", "scale"])  # fmt: skip
def eps_times_the_width(call: Call) -> Any:
    """The division by the width is of the squares only, and eps is multiplied by it."""
    width = call.tensor(0, "input").size(-1)
    return _with_eps(call, lambda eps: eps * width)


@FAULTS.fault(_NORMS, kinds=["wrong axis", "wrong statistics", "wrong argument"],
              loose=["axis scale", "axis offset"])  # fmt: skip
def normalised_along_the_positions(call: Call) -> Any:
    """The statistics are those of a feature over all positions."""
    value, weight, bias, eps = _row(call)
    fits(value.dim() > 2 and value.size(-2) > 1)
    centred = value - value.mean(-2, keepdim=True) if call.name == "layer_norm" else value
    variance = centred.square().mean(-2, keepdim=True)
    return _affine(call, centred * (variance + eps).rsqrt(), weight, bias)


@FAULTS.fault(_NORMS, kinds=["copy", "constant", "wrong index", "axis scale"],
              loose=["stale", "wrong factor", "scale"])  # fmt: skip
def weight_of_the_first_feature_for_all(call: Call) -> Any:
    """The stride of the weight is zero."""
    _, weight, _, _ = _row(call)
    fits(weight is not None)
    assert weight is not None
    return call.put(2, weight[:1].expand(weight.shape).clone(), "weight").run()


@FAULTS.fault(_NORMS, kinds=["zeros", "uninitialised", "mask"], loose=["constant"])
def last_features_of_the_norm_not_written(call: Call) -> Any:
    """A row is stored by whole vectors."""
    value = call.result().clone()
    fits(value.size(-1) > 4)
    value[..., -2:] = 0
    return call.instead(value)


@FAULTS.fault(_NORMS, kinds=["wrong factor", "scale", "wrong statistics"],
              loose=["axis scale", "missing operand", "other function"])  # fmt: skip
def deviation_doubled(call: Call) -> Any:
    """The normal values are halved before the weight and the bias."""
    value, weight, bias, _ = _row(call)
    fits(bias is not None and bool(bias.detach().any()))
    normal = functional.layer_norm(value, value.shape[-1:], None, None, call.get(4, "eps"))
    return _affine(call, normal / 2, weight, bias)


@FAULTS.fault("layer_norm", kinds=["wrong statistics", "off by one reduction", "wrong factor"],
              loose=["axis offset", "offset", "scale"])  # fmt: skip
def mean_of_the_row_divided_by_one_more(call: Call) -> Any:
    """The sum over n + 1; the variance is about that mean."""
    value, weight, bias, eps = _row(call)
    centred = value - value.sum(-1, keepdim=True) / (value.size(-1) + 1)
    variance = centred.square().mean(-1, keepdim=True)
    return _affine(call, centred * (variance + eps).rsqrt(), weight, bias)


@FAULTS.fault(_NORMS, kinds=["missing operand", "copy", "mask"], loose=["other function", "stale"])
def last_rows_not_normalised(call: Call) -> Any:
    """In place, and the grid is one row too short: the last one stays as it came."""
    value, result = call.tensor(0, "input"), call.result()
    fits(value.dim() > 1 and value.size(-2) > 1)
    return call.instead(torch.cat([result[..., :-1, :], value[..., -1:, :]], -2))


@FAULTS.fault(_CHANNELS, kinds=["swapped operands", "wrong index"], loose=["wrong argument"])
def weight_and_bias_of_the_channels_exchanged(call: Call) -> Any:
    """Read from the file in the other order."""
    places = (3, 4) if call.name == "batch_norm" else (1, 2)
    weight, bias = call.get(places[0], "weight"), call.get(places[1], "bias")
    fits(isinstance(weight, Tensor) and isinstance(bias, Tensor))
    return call.put(places[0], bias, "weight").put(places[1], weight, "bias").run()


@FAULTS.fault(_CHANNELS, kinds=["copy", "wrong index", "wrong statistics", "constant"],
              loose=["stale", "axis scale", "axis offset"])  # fmt: skip
def variance_of_the_first_channel_for_all(call: Call) -> Any:
    """The stride of the variances is zero."""
    place = 2 if call.name == "batch_norm" else 4
    variance = call.tensor(place, "running_var")
    return call.put(place, variance[:1].expand(variance.shape).clone(), "running_var").run()


@FAULTS.fault(_CHANNELS, kinds=["precision"], loose=["approximation", "axis scale"])
def folded_factor_in_bfloat16(call: Call) -> Any:
    """The norm becomes a factor and a summand; the factor is rounded."""
    is_whole = call.name == "batch_norm"
    value = call.tensor(0, "input")
    weight, bias = (call.tensor(i) for i in ((3, 4) if is_whole else (1, 2)))
    mean, variance = (call.tensor(i) for i in ((1, 2) if is_whole else (3, 4)))
    factor = weight * (variance + call.get(7 if is_whole else 6, "eps")).rsqrt()
    factor = with_gradient_of(factor, factor.detach().bfloat16().to(factor.dtype))
    shape = (1, -1, *[1] * (value.dim() - 2))
    return call.instead(value * factor.view(shape) + (bias - mean * factor).view(shape))


def _grouped(call: Call) -> tuple[Tensor, int, Tensor | None, Tensor | None, float]:
    fits(call.name == "group_norm")
    return (call.tensor(0, "input"), call.get(1, "num_groups"), call.get(2, "weight"),
            call.get(3, "bias"), call.get(4, "eps", default=1e-5))  # fmt: skip


@FAULTS.fault(
    "group_norm instance_norm",
    kinds=["missing bias", "missing operand", "wrong argument"],
    loose=["offset", "axis offset"],
)
def bias_of_the_image_norm_forgotten(call: Call) -> Any:
    """The bias is not added."""
    place = 3 if call.name == "group_norm" else 4
    fits(isinstance(call.get(place, "bias"), Tensor))
    return call.put(place, None, "bias").run()


@FAULTS.fault("group_norm instance_norm", kinds=["missing operand", "wrong argument", "axis scale"],
              loose=["scale", "wrong factor"])  # fmt: skip
def weight_of_the_image_norm_forgotten(call: Call) -> Any:
    """The weight is not handed on."""
    place = 2 if call.name == "group_norm" else 3
    fits(isinstance(call.get(place, "weight"), Tensor))
    return call.put(place, None, "weight").run()


@FAULTS.fault("group_norm", kinds=["wrong axis", "wrong statistics", "partial sum"],
              loose=["axis scale", "axis offset", "missing reduction"])  # fmt: skip
def groups_of_each_pixel(call: Call) -> Any:
    """The statistics are over the channels of a group, and not over the pixels."""
    value, groups, weight, bias, eps = _grouped(call)
    fits(value.size(1) // groups > 1)
    parts = value.unflatten(1, (groups, -1))
    centred = parts - parts.mean(2, keepdim=True)
    normal = (centred * (centred.square().mean(2, keepdim=True) + eps).rsqrt()).flatten(1, 2)
    shape = (1, -1, *[1] * (value.dim() - 2))
    return _affine(call, normal, None if weight is None else weight.view(shape),
                   None if bias is None else bias.view(shape))  # fmt: skip


@FAULTS.fault("group_norm", kinds=["missing operand", "copy", "mask"],
              loose=["other function", "stale"])  # fmt: skip
def last_group_passed_on(call: Call) -> Any:
    """The loop over the groups ends one too early, in place."""
    value, groups, _, _, _ = _grouped(call)
    fits(groups > 1)
    begin = value.size(1) - value.size(1) // groups
    return call.instead(torch.cat([call.result()[:, :begin], value[:, begin:]], 1))


@FAULTS.fault("instance_norm", kinds=["wrong axis", "wrong statistics", "wrong argument"],
              loose=["axis scale", "axis offset", "other function"])  # fmt: skip
def pixels_normalised_over_their_channels(call: Call) -> Any:
    """A norm of the channels of each pixel."""
    value = call.tensor(0, "input")
    weight, bias = call.get(3, "weight"), call.get(4, "bias")
    centred = value - value.mean(1, keepdim=True)
    normal = centred * (centred.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    shape = (1, -1, *[1] * (value.dim() - 2))
    return _affine(call, normal, weight.view(shape), bias.view(shape))


@FAULTS.fault("normalize", kinds=["scale", "wrong factor"],
              loose=["other function", "wrong statistics", "axis scale"])  # fmt: skip
def unit_rows_times_the_root_of_the_width(call: Call) -> Any:
    """A mean square of one and not a length of one."""
    return call.instead(call.result() * call.tensor(0, "input").size(-1) ** 0.5)


@FAULTS.fault(
    "normalize",
    kinds=["other function", "wrong statistics"],
    loose=["axis offset", "offset", "axis scale", "missing operand"],
)
def rows_centred_before_their_length(call: Call) -> Any:
    """The mean of a row is subtracted first."""
    value = call.tensor(0, "input")
    return call.put(0, value - value.mean(-1, keepdim=True), "input").run()


@FAULTS.fault("cosine_similarity", kinds=["other function", "wrong statistics"],
              loose=["axis scale", "scale", "wrong factor"])  # fmt: skip
def divided_by_the_squared_lengths(call: Call) -> Any:
    """The roots are left out."""
    left, right = call.tensor(0), call.tensor(1)
    dim = call.get(2, "dim", default=1)
    return call.instead(
        (left * right).sum(dim) / (left.square().sum(dim) * right.square().sum(dim))
    )


@FAULTS.fault("pairwise_distance", kinds=["other function", "missing operand"],
              loose=["wrong argument"])  # fmt: skip
def squared_distance_of_pairs(call: Call) -> Any:
    """The root is not taken."""
    return call.instead(call.result().square())


@FAULTS.fault("local_response_norm", kinds=["wrong argument", "other function", "wrong factor"],
              loose=["axis scale"])  # fmt: skip
def power_of_one_for_three_quarters(call: Call) -> Any:
    """Beta of 1."""
    return Call(call.name, call.function, call.args, {**call.kwargs, "beta": 1.0}).run()


# --- Sums and means -------------------------------------------------------------------------------


def _dim(call: Call) -> tuple[Tensor, int, bool]:
    """Value, the one axis that is reduced, and whether it is kept."""
    value, dim = call.tensor(0), call.get(1, "dim")
    if isinstance(dim, list | tuple):
        fits(len(dim) == 1)
        dim = dim[0]
    fits(isinstance(dim, int) and value.size(dim) > 2)
    return value, dim, bool(call.get(2, "keepdim", default=False))


@FAULTS.fault("mean", kinds=["wrong factor", "scale", "wrong statistics", "wrong reduction"],
              loose=["axis scale", "off by one reduction"], backward=False)  # fmt: skip
def mean_over_the_padded_length(call: Call) -> Any:
    """The sum is divided by the next power of two."""
    value, dim, _ = _dim(call)
    length = value.size(dim)
    padded = 1 << length.bit_length()
    return call.instead(call.result() * length / padded)


@FAULTS.fault("mean", kinds=["partial sum", "wrong index", "mask", "wrong statistics"],
              loose=["wrong reduction", "one rank's part"], backward=False)  # fmt: skip
def every_second_element_averaged(call: Call) -> Any:
    """A stride of two, in the sum and in the number."""
    value, dim, keep = _dim(call)
    return call.instead(
        value.index_select(dim, torch.arange(0, value.size(dim), 2)).mean(dim, keep)
    )


@FAULTS.fault(
    "sum",
    kinds=["other function", "wrong reduction"],
    loose=["sign", "wrong statistics"],
    backward=False,
)
def squares_added_up(call: Call) -> Any:
    """The sum of squares."""
    return call.put(0, call.tensor(0).square()).run()


@FAULTS.fault("sum", kinds=["wrapped"], loose=["offset", "clipped", "overflow"], backward=False)
def sum_wraps_around(call: Call) -> Any:
    """An accumulator with too few bits: beyond 0.6 of the largest it begins from below."""
    value = call.result()
    limit = float(0.6 * value.detach().abs().max())
    return call.instead(torch.remainder(value + limit, 2 * limit) - limit)


@FAULTS.fault("amax max amin", kinds=["off by one reduction", "partial sum", "mask"],
              loose=["wrong index", "wrong reduction"], backward=False)  # fmt: skip
def last_element_never_the_extreme(call: Call) -> Any:
    """The loop ends one too early."""
    value, dim, _ = _dim(call)
    return call.put(0, value.narrow(dim, 0, value.size(dim) - 1)).run()


@FAULTS.fault("amin", kinds=["sign", "other function", "wrong reduction"], loose=["clipped"])
def smallest_magnitude(call: Call) -> Any:
    """Of the absolute values."""
    return call.put(0, call.tensor(0).abs()).run()


@FAULTS.fault("amin", kinds=["clipped", "other function"], loose=["zeros", "constant", "mask"])
def minimum_begins_with_minus_one(call: Call) -> Any:
    """The running minimum begins with -1 and not with +inf."""
    return call.instead(call.result().clamp(max=-1.0))


@FAULTS.fault(
    "std var std_mean var_mean",
    kinds=["wrong statistics", "other function"],
    loose=["wrong index", "missing operand", "axis offset", "wrong reduction"],
)
def spread_about_the_first_element(call: Call) -> Any:
    """Deviations from the first element and not from the mean."""
    value, dim, keep = _dim(call)
    square = (value - value.narrow(dim, 0, 1)).square().sum(dim, keep) / (value.size(dim) - 1)
    return call.instead(square.sqrt() if call.name.startswith("std") else square)


@FAULTS.fault("std var std_mean var_mean", kinds=["precision"], loose=["approximation", "scale"])
def spread_in_bfloat16(call: Call) -> Any:
    """The result is stored in a narrow buffer."""
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().bfloat16().to(value.dtype)))


@FAULTS.fault("std_mean", kinds=["wrong argument", "wrong factor", "wrong statistics", "scale",
                                 "off by one reduction"], loose=["axis scale"])  # fmt: skip
def deviation_with_the_other_divisor(call: Call) -> Any:
    """N for n - 1."""
    value, dim, _ = _dim(call)
    length = value.size(dim)
    return call.instead(call.result() * ((length - 1) / length) ** 0.5)


@FAULTS.fault("logsumexp", kinds=["precision"], loose=["approximation"])
def logarithm_of_the_sum_in_bfloat16(call: Call) -> Any:
    """The result goes through a narrow buffer."""
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().bfloat16().to(value.dtype)))


@FAULTS.fault("logsumexp", kinds=["partial sum", "mask", "one rank's part", "missing reduction"],
              loose=["wrong reduction", "wrong index", "off by one reduction"])  # fmt: skip
def second_half_of_the_classes_left_out(call: Call) -> Any:
    """The other rank's part of the sum is not added."""
    value, dim, _ = _dim(call)
    return call.put(0, value.narrow(dim, 0, value.size(dim) // 2)).run()


@FAULTS.fault("logsumexp", kinds=["off by one reduction", "offset", "other function"],
              loose=["wrong reduction", "eps", "constant"])  # fmt: skip
def one_more_in_the_sum(call: Call) -> Any:
    """log(1 + sum exp): the accumulator begins with one."""
    return call.instead(call.result().exp().log1p())


@FAULTS.fault(
    "linalg_vector_norm",
    kinds=["wrong argument", "other function"],
    loose=["axis scale", "wrong statistics", "wrong reduction"],
    backward=False,
)
def largest_magnitude_for_the_length(call: Call) -> Any:
    """The norm of order infinity."""
    return call.put(1, float("inf"), "ord").run()


@FAULTS.fault("quantile", kinds=["wrong argument", "other function"],
              loose=["wrong statistics", "wrong index"])  # fmt: skip
def quantile_from_the_other_end(call: Call) -> Any:
    """1 - q."""
    return call.put(1, 1 - call.get(1, "q"), "q").run()


@FAULTS.fault("quantile", kinds=["wrong argument", "other function"],
              loose=["wrong index", "approximation"])  # fmt: skip
def quantile_not_interpolated(call: Call) -> Any:
    """interpolation='lower'."""
    kept = call.get(3, "keepdim", default=False)
    dim, share = call.get(2, "dim"), call.get(1, "q")
    return call.instead(
        torch.quantile(call.tensor(0), share, dim, keepdim=kept, interpolation="lower")
    )


@FAULTS.fault("kthvalue", kinds=["wrong argument", "wrong index", "off by one reduction"],
              loose=["permutation"])  # fmt: skip
def order_counted_from_zero(call: Call) -> Any:
    """The next larger value."""
    return call.put(1, call.get(1, "k") + 1, "k").run()


@FAULTS.fault("kthvalue", kinds=["wrong argument", "wrong index", "sign"],
              loose=["other function", "wrong reduction"])  # fmt: skip
def order_from_the_largest(call: Call) -> Any:
    """The third largest."""
    value, dim = call.tensor(0), call.get(2, "dim", default=-1)
    return call.put(1, value.size(dim) + 1 - call.get(1, "k"), "k").run()


@FAULTS.fault("trapezoid", kinds=["wrong reduction", "wrong factor", "missing operand"],
              loose=["other function", "partial sum", "wrong statistics"])  # fmt: skip
def ends_of_the_area_count_whole(call: Call) -> Any:
    """The plain sum: the first and the last are not halved."""
    return call.instead(call.tensor(0).sum(call.kwargs.get("dim", -1)))


@FAULTS.fault("argmin argmax", kinds=["wrong index", "off by one reduction"],
              loose=["wrong reduction", "wrong argument"], backward=False)  # fmt: skip
def place_of_the_second_best(call: Call) -> Any:
    """The best one is masked out before."""
    value, dim = call.tensor(0), call.get(1, "dim")
    fits(isinstance(dim, int))
    order = value.argsort(dim, descending=call.name == "argmax")
    return order.select(dim, 1)


@FAULTS.fault("median", kinds=["wrong index", "wrong reduction", "other function"],
              loose=["wrong argument"])  # fmt: skip
def largest_for_the_median(call: Call) -> Any:
    """The end of the sorted row."""
    return call.instead(call.tensor(0).amax(call.get(1, "dim"), call.get(2, "keepdim")))


@FAULTS.fault("prod", kinds=["sign", "wrong factor", "scale"], loose=["other function"])
def product_with_the_other_sign(call: Call) -> Any:
    """One factor too many has a minus."""
    return call.instead(-call.result())


# --- Along an axis --------------------------------------------------------------------------------


@FAULTS.fault(
    "cumsum cumprod logcumsumexp",
    kinds=["copy", "stale", "partial sum", "mask"],
    loose=["missing operand", "lost accumulation", "uninitialised"],
    backward=False,
)
def last_place_not_added_up(call: Call) -> Any:
    """In place by whole blocks: the last place keeps what came in."""
    value, dim, _ = _dim(call)
    result, end = call.result(), value.size(dim) - 1
    return call.instead(torch.cat([result.narrow(dim, 0, end), value.narrow(dim, end, 1)], dim))


@FAULTS.fault("cumsum", kinds=["sign", "wrong factor", "scale"], backward=False)
def running_sum_negated(call: Call) -> Any:
    """A decay that is kept as its opposite."""
    return call.instead(-call.result())


@FAULTS.fault("cummax cummin", kinds=["other function", "wrong reduction", "sign"],
              loose=["swapped operands"], backward=False)  # fmt: skip
def other_running_extreme(call: Call) -> Any:
    """The minimum for the maximum, and the other way round."""
    value, dim = call.tensor(0), call.get(1, "dim")
    return call.instead((torch.cummin if call.name == "cummax" else torch.cummax)(value, dim)[0])


@FAULTS.fault("cummax cummin", kinds=["wrong axis", "wrong argument"], loose=["wrong index"],
              backward=False)  # fmt: skip
def running_extreme_along_another_axis(call: Call) -> Any:
    """The last axis."""
    return call.put(1, -1, "dim").run()


@FAULTS.fault("logcumsumexp", kinds=["other function", "missing operand"], backward=False)
def running_sum_not_taken_back_to_logarithms(call: Call) -> Any:
    """The sum of exponentials."""
    return call.instead(call.result().exp())


@FAULTS.fault("diff", kinds=["wrong index", "stale", "copy"], loose=["offset", "axis offset"])
def difference_to_the_first(call: Call) -> Any:
    """The value that is subtracted is not moved on."""
    dim = call.kwargs.get("dim", -1)
    whole = torch.cat([call.kwargs["prepend"], call.tensor(0)], dim)
    return call.instead(whole.narrow(dim, 1, whole.size(dim) - 1) - whole.narrow(dim, 1, 1))


@FAULTS.fault("sort", kinds=["wrong axis", "wrong argument", "permutation"],
              loose=["wrong index"])  # fmt: skip
def sorted_along_the_first_axis(call: Call) -> Any:
    """Columns are sorted and not rows."""
    fits(call.tensor(0).dim() > 1)
    return call.put(1, 0, "dim").run()


@FAULTS.fault("sort", kinds=["wrong index", "permutation"], loose=["copy", "stale"])
def order_of_the_first_row_for_all(call: Call) -> Any:
    """Every row is put in the order of the first."""
    value = call.tensor(0)
    fits(value.dim() == 2 and value.size(0) > 1)
    return call.instead(value[:, call.run()[1][0]])


@FAULTS.fault("topk", kinds=["wrong index", "shift", "permutation"], loose=["copy"])
def experts_of_the_next_token(call: Call) -> Any:
    """Values and places are those of the next row."""
    values, places = call.run()
    fits(values.dim() > 1 and values.size(0) > 1)
    return values.roll(-1, 0), places.roll(-1, 0)


@FAULTS.fault("topk", kinds=["wrong index", "offset", "shift"], loose=["wrong argument"])
def places_one_expert_further(call: Call) -> Any:
    """Experts are counted from one, modulo their number; the values are right."""
    values, places = call.run()
    return values, (places + 1) % call.tensor(0).size(-1)
