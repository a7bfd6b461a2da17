"""Faults that were measured fifth and have been seen: norms, statistics, running sums."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on, operand, result, rounded, tensors
from benchmarks.places.parts import apply_affine, reduced_dim
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


@FAULTS.fault(_NORMS, "wrong axis, wrong statistics, wrong argument; axis scale, axis offset")
def normalised_along_the_positions(call: Call) -> Any:
    """The statistics are those of a feature over all positions."""
    value, weight, bias, eps = _row(call)
    fits(value.dim() > 2 and value.size(-2) > 1)
    centred = value - value.mean(-2, keepdim=True) if call.name == "layer_norm" else value
    variance = centred.square().mean(-2, keepdim=True)
    return apply_affine(call, centred * (variance + eps).rsqrt(), weight, bias)


@FAULTS.fault(_NORMS, "copy, constant, wrong index, axis scale; stale, wrong factor, scale")
def weight_of_the_first_feature_for_all(call: Call) -> Any:
    """The stride of the weight is zero."""
    _, weight, _, _ = _row(call)
    fits(weight is not None)
    assert weight is not None
    return call.put(2, weight[:1].expand(weight.shape).clone(), "weight").run()


@FAULTS.fault(_NORMS, "zeros, uninitialised, mask; constant")
def last_features_of_the_norm_not_written(call: Call) -> Any:
    """A row is stored by whole vectors."""
    value = call.result().clone()
    fits(value.size(-1) > 4)
    value[..., -2:] = 0
    return call.instead(value)


@FAULTS.fault(
    _NORMS, "wrong factor, scale, wrong statistics; axis scale, missing operand, other function"
)
def deviation_doubled(call: Call) -> Any:
    """The normal values are halved before the weight and the bias."""
    value, weight, bias, _ = _row(call)
    fits(bias is not None and bool(bias.detach().any()))
    normal = functional.layer_norm(value, value.shape[-1:], None, None, call.get(4, "eps"))
    return apply_affine(call, normal / 2, weight, bias)


@FAULTS.fault(
    "layer_norm", "wrong statistics, off by one reduction, wrong factor; axis offset, offset, scale"
)
def mean_of_the_row_divided_by_one_more(call: Call) -> Any:
    """The sum over n + 1; the variance is about that mean."""
    value, weight, bias, eps = _row(call)
    centred = value - value.sum(-1, keepdim=True) / (value.size(-1) + 1)
    variance = centred.square().mean(-1, keepdim=True)
    return apply_affine(call, centred * (variance + eps).rsqrt(), weight, bias)


@FAULTS.fault(_CHANNELS, "swapped operands, wrong index; wrong argument")
def weight_and_bias_of_the_channels_exchanged(call: Call) -> Any:
    """Read from the file in the other order."""
    places = (3, 4) if call.name == "batch_norm" else (1, 2)
    weight, bias = call.get(places[0], "weight"), call.get(places[1], "bias")
    fits(isinstance(weight, Tensor) and isinstance(bias, Tensor))
    return call.put(places[0], bias, "weight").put(places[1], weight, "bias").run()


@FAULTS.fault(
    _CHANNELS, "copy, wrong index, wrong statistics, constant; stale, axis scale, axis offset"
)
def variance_of_the_first_channel_for_all(call: Call) -> Any:
    """The stride of the variances is zero."""
    place = 2 if call.name == "batch_norm" else 4
    variance = call.tensor(place, "running_var")
    return call.put(place, variance[:1].expand(variance.shape).clone(), "running_var").run()


@FAULTS.fault(_CHANNELS, "precision; approximation, axis scale")
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
    "group_norm instance_norm", "missing bias, missing operand, wrong argument; offset, axis offset"
)
def bias_of_the_image_norm_forgotten(call: Call) -> Any:
    """The bias is not added."""
    place = 3 if call.name == "group_norm" else 4
    fits(isinstance(call.get(place, "bias"), Tensor))
    return call.put(place, None, "bias").run()


@FAULTS.fault(
    "group_norm instance_norm", "missing operand, wrong argument, axis scale; scale, wrong factor"
)
def weight_of_the_image_norm_forgotten(call: Call) -> Any:
    """The weight is not handed on."""
    place = 2 if call.name == "group_norm" else 3
    fits(isinstance(call.get(place, "weight"), Tensor))
    return call.put(place, None, "weight").run()


@FAULTS.fault(
    "group_norm",
    "wrong axis, wrong statistics, partial sum; axis scale, axis offset, missing reduction",
)
def groups_of_each_pixel(call: Call) -> Any:
    """The statistics are over the channels of a group, and not over the pixels."""
    value, groups, weight, bias, eps = _grouped(call)
    fits(value.size(1) // groups > 1)
    parts = value.unflatten(1, (groups, -1))
    centred = parts - parts.mean(2, keepdim=True)
    normal = (centred * (centred.square().mean(2, keepdim=True) + eps).rsqrt()).flatten(1, 2)
    shape = (1, -1, *[1] * (value.dim() - 2))
    return apply_affine(call, normal, None if weight is None else weight.view(shape),
                   None if bias is None else bias.view(shape))  # fmt: skip


@FAULTS.fault("group_norm", "missing operand, copy, mask; other function, stale")
def last_group_passed_on(call: Call) -> Any:
    """The loop over the groups ends one too early, in place."""
    value, groups, _, _, _ = _grouped(call)
    fits(groups > 1)
    begin = value.size(1) - value.size(1) // groups
    return call.instead(torch.cat([call.result()[:, :begin], value[:, begin:]], 1))


@FAULTS.fault(
    "instance_norm",
    "wrong axis, wrong statistics, wrong argument; axis scale, axis offset, other function",
)
def pixels_normalised_over_their_channels(call: Call) -> Any:
    """A norm of the channels of each pixel."""
    value = call.tensor(0, "input")
    weight, bias = call.get(3, "weight"), call.get(4, "bias")
    centred = value - value.mean(1, keepdim=True)
    normal = centred * (centred.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    shape = (1, -1, *[1] * (value.dim() - 2))
    return apply_affine(call, normal, weight.view(shape), bias.view(shape))


# fmt: off
# Nothing is added to the variance.
FAULTS.add("norm without eps", " ".join(_EPS),
    "eps, wrong argument, missing operand; wrong statistics, axis scale, scale",
    lambda call: _with_eps(call, lambda _: 0.0))
# The variance less eps.
FAULTS.add("eps subtracted", " ".join(_EPS),
    "eps, wrong argument, sign; wrong statistics, axis scale, scale",
    lambda call: _with_eps(call, lambda eps: -eps))
# The division by the width is of the squares only, and eps is multiplied by it.
FAULTS.add("eps times the width", _NORMS,
    "eps, wrong argument, wrong factor; wrong statistics, axis scale, scale",
    lambda call: _with_eps(call, lambda eps: eps * call.tensor(0, "input").size(-1)))
# In place, and the grid is one row too short: the last one stays as it came.
FAULTS.add("last rows not normalised", _NORMS, "missing operand, copy, mask; other function, stale",
    on(lambda call: (call.tensor(0, "input"),),
        lambda call, value:
            call.instead(torch.cat([call.result()[..., :-1, :], value[..., -1:, :]], -2)),
        where=lambda value: value.dim() > 1 and value.size(-2) > 1))
# A mean square of one and not a length of one.
FAULTS.add("unit rows times the root of the width", "normalize",
    "scale, wrong factor; other function, wrong statistics, axis scale",
    lambda call: call.instead(call.result() * call.tensor(0, "input").size(-1) ** 0.5))
# The mean of a row is subtracted first.
FAULTS.add("rows centred before their length", "normalize",
    "other function, wrong statistics; axis offset, offset, axis scale, missing operand",
    operand(0, lambda v: v - v.mean(-1, keepdim=True), "input"))
# The roots are left out.
FAULTS.add("divided by the squared lengths", "cosine_similarity",
    "other function, wrong statistics; axis scale, scale, wrong factor",
    computed(lambda call: (call.tensor(0), call.tensor(1), call.get(2, "dim", default=1)),
        lambda left, right, dim:
            (left * right).sum(dim) / (left.square().sum(dim) * right.square().sum(dim))))
# The root is not taken.
FAULTS.add("squared distance of pairs", "pairwise_distance",
    "other function, missing operand; wrong argument", result(torch.square))
# Beta of 1.
FAULTS.add("power of one for three quarters", "local_response_norm",
    "wrong argument, other function, wrong factor; axis scale",
    lambda call:
            Call(call.name, call.function, call.args, {**call.kwargs, "beta": 1.0}).run())
# fmt: on


# --- Sums and means -------------------------------------------------------------------------------


@FAULTS.forward(
    "mean",
    "wrong factor, scale, wrong statistics, wrong reduction; axis scale, off by one reduction",
)
def mean_over_the_padded_length(call: Call) -> Any:
    """The sum is divided by the next power of two."""
    value, dim, _ = reduced_dim(call)
    length = value.size(dim)
    padded = 1 << length.bit_length()
    return call.instead(call.result() * length / padded)


@FAULTS.forward("sum", "wrapped; offset, clipped, overflow")
def sum_wraps_around(call: Call) -> Any:
    """An accumulator with too few bits: beyond 0.6 of the largest it begins from below."""
    value = call.result()
    limit = float(0.6 * value.detach().abs().max())
    return call.instead(torch.remainder(value + limit, 2 * limit) - limit)


@FAULTS.fault(
    "std var std_mean var_mean",
    "wrong statistics, other function; wrong index, missing operand, axis offset, wrong reduction",
)
def spread_about_the_first_element(call: Call) -> Any:
    """Deviations from the first element and not from the mean."""
    value, dim, keep = reduced_dim(call)
    square = (value - value.narrow(dim, 0, 1)).square().sum(dim, keep) / (value.size(dim) - 1)
    return call.instead(square.sqrt() if call.name.startswith("std") else square)


@FAULTS.fault(
    "std_mean",
    "wrong argument, wrong factor, wrong statistics, scale, off by one reduction; axis scale",
)
def deviation_with_the_other_divisor(call: Call) -> Any:
    """N for n - 1."""
    value, dim, _ = reduced_dim(call)
    length = value.size(dim)
    return call.instead(call.result() * ((length - 1) / length) ** 0.5)


@FAULTS.fault(
    "logsumexp",
    "partial sum, mask, one rank's part, missing reduction; wrong reduction, wrong index, "
    "off by one reduction",
)
def second_half_of_the_classes_left_out(call: Call) -> Any:
    """The other rank's part of the sum is not added."""
    value, dim, _ = reduced_dim(call)
    return call.put(0, value.narrow(dim, 0, value.size(dim) // 2)).run()


@FAULTS.fault("quantile", "wrong argument, other function; wrong index, approximation")
def quantile_not_interpolated(call: Call) -> Any:
    """interpolation='lower'."""
    kept = call.get(3, "keepdim", default=False)
    dim, share = call.get(2, "dim"), call.get(1, "q")
    return call.instead(
        torch.quantile(call.tensor(0), share, dim, keepdim=kept, interpolation="lower")
    )


@FAULTS.fault("kthvalue", "wrong argument, wrong index, sign; other function, wrong reduction")
def order_from_the_largest(call: Call) -> Any:
    """The third largest."""
    value, dim = call.tensor(0), call.get(2, "dim", default=-1)
    return call.put(1, value.size(dim) + 1 - call.get(1, "k"), "k").run()


# fmt: off
# A stride of two, in the sum and in the number.
FAULTS.add("every second element averaged", "mean",
    "partial sum, wrong index, mask, wrong statistics; wrong reduction, one rank's part",
    computed(reduced_dim,
        lambda value, dim, keep:
            value.index_select(dim, torch.arange(0, value.size(dim), 2)).mean(dim, keep)),
    backward=False)
# The sum of squares.
FAULTS.add("squares added up", "sum", "other function, wrong reduction; sign, wrong statistics",
    operand(0, torch.square), backward=False)
# The loop ends one too early.
FAULTS.add("last element never the extreme", "amax max amin",
    "off by one reduction, partial sum, mask; wrong index, wrong reduction",
    on(reduced_dim,
        lambda call, value, dim, *_:
            call.put(0, value.narrow(dim, 0, value.size(dim) - 1)).run()), backward=False)
# Of the absolute values.
FAULTS.add("smallest magnitude", "amin", "sign, other function, wrong reduction; clipped",
    operand(0, torch.abs))
# The running minimum begins with -1 and not with +inf.
FAULTS.add("minimum begins with minus one", "amin",
    "clipped, other function; zeros, constant, mask", result(lambda v: v.clamp(max=-1.0)))
# The result is stored in a narrow buffer.
FAULTS.add("spread in bfloat16", "std var std_mean var_mean", "precision; approximation, scale",
    result(rounded(torch.bfloat16)))
# The result goes through a narrow buffer.
FAULTS.add("logarithm of the sum in bfloat16", "logsumexp", "precision; approximation",
    result(rounded(torch.bfloat16)))
# log(1 + sum exp): the accumulator begins with one.
FAULTS.add("one more in the sum", "logsumexp",
    "off by one reduction, offset, other function; wrong reduction, eps, constant",
    result(lambda v: v.exp().log1p()))
# The norm of order infinity.
FAULTS.add("largest magnitude for the length", "linalg_vector_norm",
    "wrong argument, other function; axis scale, wrong statistics, wrong reduction",
    lambda call: call.put(1, float("inf"), "ord").run(), backward=False)
# 1 - q.
FAULTS.add("quantile from the other end", "quantile",
    "wrong argument, other function; wrong statistics, wrong index",
    lambda call: call.put(1, 1 - call.get(1, "q"), "q").run())
# The next larger value.
FAULTS.add("order counted from zero", "kthvalue",
    "wrong argument, wrong index, off by one reduction; permutation",
    lambda call: call.put(1, call.get(1, "k") + 1, "k").run())
# The plain sum: the first and the last are not halved.
FAULTS.add("ends of the area count whole", "trapezoid",
    "wrong reduction, wrong factor, missing operand; other function, partial sum, "
    "wrong statistics", lambda call: call.instead(call.tensor(0).sum(call.kwargs.get("dim", -1))))
# The best one is masked out before.
FAULTS.add("place of the second best", "argmin argmax",
    "wrong index, off by one reduction; wrong reduction, wrong argument",
    on(lambda call: (call.tensor(0), call.get(1, "dim")),
        lambda call, value, dim:
            value.argsort(dim, descending=call.name == "argmax").select(dim, 1),
        where=lambda _, dim: isinstance(dim, int)), backward=False)
# The end of the sorted row.
FAULTS.add("largest for the median", "median",
    "wrong index, wrong reduction, other function; wrong argument",
    lambda call:
            call.instead(call.tensor(0).amax(call.get(1, "dim"), call.get(2, "keepdim"))))
# One factor too many has a minus.
FAULTS.add("product with the other sign", "prod", "sign, wrong factor, scale; other function",
    result(torch.neg))
# fmt: on


# --- Along an axis --------------------------------------------------------------------------------


@FAULTS.forward(
    "cumsum cumprod logcumsumexp",
    "copy, stale, partial sum, mask; missing operand, lost accumulation, uninitialised",
)
def last_place_not_added_up(call: Call) -> Any:
    """In place by whole blocks: the last place keeps what came in."""
    value, dim, _ = reduced_dim(call)
    result, end = call.result(), value.size(dim) - 1
    return call.instead(torch.cat([result.narrow(dim, 0, end), value.narrow(dim, end, 1)], dim))


@FAULTS.forward("cummax cummin", "other function, wrong reduction, sign; swapped operands")
def other_running_extreme(call: Call) -> Any:
    """The minimum for the maximum, and the other way round."""
    value, dim = call.tensor(0), call.get(1, "dim")
    return call.instead((torch.cummin if call.name == "cummax" else torch.cummax)(value, dim)[0])


@FAULTS.fault("diff", "wrong index, stale, copy; offset, axis offset")
def difference_to_the_first(call: Call) -> Any:
    """The value that is subtracted is not moved on."""
    dim = call.kwargs.get("dim", -1)
    whole = torch.cat([call.kwargs["prepend"], call.tensor(0)], dim)
    return call.instead(whole.narrow(dim, 1, whole.size(dim) - 1) - whole.narrow(dim, 1, 1))


@FAULTS.fault("sort", "wrong axis, wrong argument, permutation; wrong index")
def sorted_along_the_first_axis(call: Call) -> Any:
    """Columns are sorted and not rows."""
    fits(call.tensor(0).dim() > 1)
    return call.put(1, 0, "dim").run()


@FAULTS.fault("topk", "wrong index, shift, permutation; copy")
def experts_of_the_next_token(call: Call) -> Any:
    """Values and places are those of the next row."""
    values, places = call.run()
    fits(values.dim() > 1 and values.size(0) > 1)
    return values.roll(-1, 0), places.roll(-1, 0)


@FAULTS.fault("topk", "wrong index, offset, shift; wrong argument")
def places_one_expert_further(call: Call) -> Any:
    """Experts are counted from one, modulo their number; the values are right."""
    values, places = call.run()
    return values, (places + 1) % call.tensor(0).size(-1)


# fmt: off
# A decay that is kept as its opposite.
FAULTS.add("running sum negated", "cumsum", "sign, wrong factor, scale", result(torch.neg),
    backward=False)
# The last axis.
FAULTS.add("running extreme along another axis", "cummax cummin",
    "wrong axis, wrong argument; wrong index", lambda call: call.put(1, -1, "dim").run(),
    backward=False)
# The sum of exponentials.
FAULTS.add("running sum not taken back to logarithms", "logcumsumexp",
    "other function, missing operand", result(torch.exp), backward=False)
# Every row is put in the order of the first.
FAULTS.add("order of the first row for all", "sort", "wrong index, permutation; copy, stale",
    on(tensors(0), lambda call, value: call.instead(value[:, call.run()[1][0]]),
        where=lambda value: value.dim() == 2 and value.size(0) > 1))
# fmt: on
