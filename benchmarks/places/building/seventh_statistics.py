"""Faults for measuring: norms, statistics, running sums, orders."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, even, on, operand, result
from benchmarks.places.parts import (
    apply_affine,
    channel_parts,
    moments_of_rows,
    norm_by,
    norm_row,
    reduced_dim,
    several_along,
    trained_weight,
)
from torch import Tensor

FAULTS = Catalogue()
_NORMS = "layer_norm rms_norm"
_CHANNELS = "batch_norm batch_norm_from_statistics"


# --- Norms ----------------------------------------------------------------------------------------


def _normal(call: Call) -> Tensor:
    """The normal values, before the weight."""
    value, _, _, eps = norm_row(call)
    mean, spread = moments_of_rows(call, value)
    return (value - mean) * (spread + eps).rsqrt()


@FAULTS.fault(_NORMS, words.REPEATED)
def weight_of_the_first_half_for_both(call: Call) -> Any:
    """The second tile of features is multiplied by the weight of the first."""
    weight = trained_weight(call.get(2, "weight"))
    half = (weight.numel() + 1) // 2
    return call.put(2, weight[torch.arange(weight.numel()) % half], "weight").run()


@FAULTS.fault(
    _NORMS, "other function, residual, axis offset; offset, wrong factor, missing operand"
)
def weight_added_and_not_multiplied(call: Call) -> Any:
    """Normal values plus the weight, plus the bias."""
    _, weight, bias, _ = norm_row(call)
    fits(weight is not None)
    value = _normal(call) + weight
    return call.instead(value if bias is None else value + bias)


@FAULTS.fault(_NORMS, "precision; approximation, other function, wrong argument, axis scale, scale")
def weight_in_steps_of_a_quarter(call: Call) -> Any:
    """The weight is kept with two bits behind the point."""
    weight = trained_weight(call.get(2, "weight"))
    coarse = (weight.detach() * 4).round() / 4
    return call.put(2, with_gradient_of(weight, coarse), "weight").run()


@FAULTS.fault(
    "layer_norm",
    "wrong statistics, wrong reduction, axis offset; offset, other function, wrong index, residual",
)
def median_of_the_row_subtracted(call: Call) -> Any:
    """The value in the middle for the mean; the deviation is right."""
    value, _, _, _ = norm_row(call)
    _, spread = moments_of_rows(call, value)
    return norm_by(call, value.median(-1, keepdim=True).values, spread)


@FAULTS.fault(
    "layer_norm",
    "wrong statistics, wrong reduction, axis offset, wrong axis; offset, constant, residual",
)
def mean_of_the_whole_tensor_subtracted(call: Call) -> Any:
    """One mean for all rows; each has its own deviation."""
    value, _, _, _ = norm_row(call)
    several_along(value)
    mean, spread = moments_of_rows(call, value)
    return norm_by(call, value.mean().expand(mean.shape), spread)


@FAULTS.fault(
    "layer_norm",
    "wrong statistics, wrong index, axis offset, missing reduction; offset, copy, "
    "wrong reduction, partial sum, residual",
)
def first_feature_subtracted_for_the_mean(call: Call) -> Any:
    """The shift that keeps a sum of squares exact is taken for the mean itself."""
    value, _, _, _ = norm_row(call)
    _, spread = moments_of_rows(call, value)
    return norm_by(call, value[..., :1], spread)


@FAULTS.fault(
    _NORMS,
    "wrong statistics, partial sum, axis scale, one rank's part, missing reduction; scale, "
    "wrong factor, wrong reduction, mask",
)
def deviation_of_the_first_half_of_the_row(call: Call) -> Any:
    """The squares of the second rank are not added, nor counted; the mean is right."""
    value, _, _, _ = norm_row(call)
    fits(value.size(-1) > 3)
    mean, _ = moments_of_rows(call, value)
    half = (value - mean)[..., : value.size(-1) // 2]
    return norm_by(call, mean, half.square().mean(-1, keepdim=True))


@FAULTS.fault(
    _NORMS,
    "clipped, wrong statistics, axis scale; scale, wrong factor, eps, other function, constant",
)
def variance_not_above_the_mean_of_all(call: Call) -> Any:
    """Rows with a large variance are divided by less."""
    value, _, _, _ = norm_row(call)
    several_along(value)
    mean, spread = moments_of_rows(call, value)
    return norm_by(call, mean, spread.clamp(max=float(spread.detach().mean())))


@FAULTS.fault(
    _NORMS, "approximation, other function, axis scale, wrong statistics; scale, wrong factor"
)
def reciprocal_root_by_a_line(call: Call) -> Any:
    """1.5 - v / 2: one step of Newton's rule that begins with one."""
    value, weight, bias, _ = norm_row(call)
    mean, spread = moments_of_rows(call, value)
    return apply_affine(call, (value - mean) * (1.5 - spread / 2), weight, bias)


@FAULTS.fault(
    _NORMS,
    "other function, wrong statistics, wrong factor; axis scale, axis offset, scale, "
    "wrong argument",
)
def weight_applied_before_the_statistics(call: Call) -> Any:
    """The norm of x w, plus the bias."""
    value, weight, bias, eps = norm_row(call)
    value = value * trained_weight(weight)
    mean, spread = moments_of_rows(call, value)
    return apply_affine(call, (value - mean) * (spread + eps).rsqrt(), None, bias)


@FAULTS.fault(
    _NORMS,
    "mask, copy, missing operand; stale, axis scale, axis offset, wrong factor, other function",
)
def first_row_not_normalised(call: Call) -> Any:
    """In place, and the grid begins with the second row."""
    value, result = call.tensor(0, "input"), several_along(call.result())
    return call.instead(torch.cat([value[..., :1, :], result[..., 1:, :]], -2))


@FAULTS.fault(
    _NORMS, "eps, wrong argument; axis scale, scale, wrong factor, wrong statistics, offset"
)
def eps_of_one(call: Call) -> Any:
    """The argument of another norm: 1 is added to the variance."""
    value, _, _, eps = norm_row(call)
    mean, spread = moments_of_rows(call, value)
    return norm_by(call, mean, spread + 1 - eps)


@FAULTS.fault(
    _NORMS,
    "copy, stale, wrong index, wrong statistics; axis scale, axis offset, permutation, shift",
)
def two_rows_share_their_statistics(call: Call) -> Any:
    """Odd rows take mean and deviation of the row before them."""
    value, _, _, _ = norm_row(call)
    several_along(value)
    rows = torch.arange(value.size(-2)) // 2 * 2
    mean, spread = moments_of_rows(call, value)
    return norm_by(call, mean[..., rows, :], spread[..., rows, :])


@FAULTS.fault(_NORMS, "precision; approximation, other function, wrong argument, axis scale, scale")
def reciprocal_deviation_in_float8(call: Call) -> Any:
    """1 / sqrt(v + eps) is kept in e4m3."""
    value, weight, bias, eps = norm_row(call)
    mean, spread = moments_of_rows(call, value)
    inverse = (spread + eps).rsqrt()
    coarse = inverse.detach().to(torch.float8_e4m3fn).to(inverse.dtype)
    return apply_affine(call, (value - mean) * with_gradient_of(inverse, coarse), weight, bias)


@FAULTS.fault(
    _NORMS,
    "wrong statistics, doubled reduction, off by one reduction, wrong reduction; "
    "axis scale, axis offset, mask, wrong factor, partial sum",
)
def last_feature_counted_twice(call: Call) -> Any:
    """The tail overlaps the body by one in the sums; they are divided by the right number."""
    value, _, _, _ = norm_row(call)
    longer = torch.cat([value, value[..., -1:]], -1)
    size = value.size(-1)
    mean = longer.sum(-1, keepdim=True) / size
    if call.name == "rms_norm":
        mean = 0 * mean
    return norm_by(call, mean, (longer - mean).square().sum(-1, keepdim=True) / size)


@FAULTS.fault(
    _NORMS,
    "wrong statistics, wrong reduction, axis scale, other function; wrong factor, scale, "
    "wrong argument",
)
def fourth_powers_for_the_squares(call: Call) -> Any:
    """The deviation is the fourth root of the mean of fourth powers."""
    value, weight, bias, eps = norm_row(call)
    mean, _ = moments_of_rows(call, value)
    centred = value - mean
    spread = (centred.square().square().mean(-1, keepdim=True) + eps**2).sqrt()
    return apply_affine(call, centred * spread.rsqrt(), weight, bias)


@FAULTS.fault(
    _NORMS,
    "wrong statistics, partial sum, mask; axis scale, axis offset, off by one reduction, "
    "wrong reduction, clipped",
)
def largest_feature_not_in_the_statistics(call: Call) -> Any:
    """The outlier of each row is left out of mean and variance, and of their number."""
    value, _, _, _ = norm_row(call)
    count = value.size(-1) - 1
    fits(count > 1)
    kept = torch.ones_like(value)
    kept.scatter_(-1, value.detach().abs().argmax(-1, keepdim=True), 0)
    mean = (value * kept).sum(-1, keepdim=True) / count
    if call.name == "rms_norm":
        mean = 0 * mean
    return norm_by(call, mean, ((value - mean).square() * kept).sum(-1, keepdim=True) / count)


@FAULTS.fault(
    "layer_norm",
    "wrong statistics, axis scale, wrong index; stale, shift, wrong factor, scale, wrong reduction",
)
def variance_about_the_mean_of_the_next_row(call: Call) -> Any:
    """The squares are those of the distance to another row's mean; the mean itself is right."""
    value, _, _, _ = norm_row(call)
    several_along(value)
    mean, _ = moments_of_rows(call, value)
    spread = (value - mean.roll(-1, -2)).square().mean(-1, keepdim=True)
    return norm_by(call, mean, spread)


@FAULTS.fault(_NORMS, "eps, wrong factor, scale, wrong statistics; axis scale, wrong argument")
def eps_relative_to_the_variance(call: Call) -> Any:
    """A tenth of the variance is added to it, and not a number."""
    value, _, _, _ = norm_row(call)
    mean, spread = moments_of_rows(call, value)
    return norm_by(call, mean, 1.1 * spread)


@FAULTS.fault(
    "layer_norm",
    "wrong statistics, wrong factor, wrong reduction, axis offset; offset, partial sum, "
    "lost accumulation, other function",
)
def means_of_unequal_parts_merged_as_equal(call: Call) -> Any:
    """Welford's merge of the first quarter with the rest takes half of each mean."""
    value, _, _, _ = norm_row(call)
    quarter = value.size(-1) // 4
    fits(quarter > 0)
    _, spread = moments_of_rows(call, value)
    parts = value[..., :quarter], value[..., quarter:]
    mean = sum(one.mean(-1, keepdim=True) for one in parts) / 2
    return norm_by(call, mean, spread)


def _whole(call: Call, mean: Tensor, variance: Tensor) -> Any:
    """The norm of channels with other statistics."""
    value, weight, bias, _, _, eps = channel_parts(call)
    return call.instead((value - mean) * (variance + eps).rsqrt() * weight + bias)


@FAULTS.fault(
    _CHANNELS,
    "shift, wrong index, permutation, wrong statistics; axis scale, stale, wrong argument, "
    "wrong factor",
)
def variance_of_the_next_channel(call: Call) -> Any:
    """The pointer to the variances is one too far; that to the means is right."""
    _, _, _, mean, variance, _ = channel_parts(call)
    return _whole(call, mean, variance.roll(-1, 1))


@FAULTS.fault(
    _CHANNELS,
    "copy, stale, wrong index, wrong statistics; axis offset, constant, wrong argument, offset",
)
def mean_of_the_first_channel_for_all(call: Call) -> Any:
    """The stride of the means is zero."""
    _, _, _, mean, variance, _ = channel_parts(call)
    return _whole(call, mean[:, :1].expand(mean.shape), variance)


@FAULTS.fault(
    _CHANNELS,
    "wrong statistics, wrong factor, wrong argument; axis scale, scale, off by one reduction",
)
def variance_divided_by_one_less_once_more(call: Call) -> Any:
    """The kept variance is corrected by n / (n - 1), which was done when it was kept."""
    value, _, _, mean, variance, _ = channel_parts(call)
    count = value.numel() // value.size(1)
    fits(count > 1)
    return _whole(call, mean, variance * count / (count - 1))


@FAULTS.fault(
    _CHANNELS,
    "mask, copy, missing operand; stale, axis scale, axis offset, wrong factor, other function",
)
def odd_channels_not_normalised(call: Call) -> Any:
    """In place, with half as many programs as channels."""
    value, result = call.tensor(0, "input"), call.result()
    fits(value.size(1) > 1)
    odd = (torch.arange(value.size(1)) % 2 == 1).view(-1, *[1] * (value.dim() - 2))
    return call.instead(torch.where(odd, value, result))


@FAULTS.fault(
    _CHANNELS,
    "wrong statistics, wrong reduction, constant; axis scale, wrong argument, copy, "
    "wrong factor, scale",
)
def one_variance_for_all_channels(call: Call) -> Any:
    """The mean of the variances, as of a norm that is quantised by the tensor."""
    _, _, _, mean, variance, _ = channel_parts(call)
    fits(variance.numel() > 1)
    return _whole(call, mean, variance.mean().expand(variance.shape))


@FAULTS.fault(f"{_CHANNELS} group_norm native_group_norm instance_norm", words.EMPTY_IN_A_SUM)
def last_image_of_the_norm_empty(call: Call) -> Any:
    """The grid has one image too few."""
    value = several_along(call.result(), 0).clone()
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
    return apply_affine(
        call,
        normal,
        None if weight is None else weight.view(shape),
        None if bias is None else bias.view(shape),
    )


@FAULTS.fault(
    "group_norm",
    "wrong statistics, wrong argument, off by one reduction; scale, wrong factor, axis scale",
)
def variance_of_the_group_by_one_less(call: Call) -> Any:
    """Divided by n - 1."""
    parts, mean, spread = _groups(call)
    count = parts.size(-1)
    return _grouped(call, parts, mean, spread * count / (count - 1))


def _lengths(call: Call) -> tuple[Tensor, Tensor]:
    value, dim = call.tensor(0, "input"), call.get(2, "dim", default=1)
    fits(value.dim() > 1 and dim % value.dim() == value.dim() - 1)
    return value, value.norm(dim=-1, keepdim=True)


@FAULTS.fault(
    "normalize",
    "copy, stale, wrong index, axis scale; wrong statistics, constant, wrong factor, scale",
)
def length_of_the_first_row_for_all(call: Call) -> Any:
    """The pointer to the lengths is not moved on."""
    value, length = _lengths(call)
    several_along(value)
    return call.instead(value / length[..., :1, :])


# fmt: off
# A norm that may only damp: weights above one are one.
FAULTS.add("weight not above one", _NORMS, words.SATURATED,
    lambda call:
            call.put(2, trained_weight(call.get(2, "weight")).clamp(max=1.0), "weight").run())
# The bias is packed in the other order than the weight.
FAULTS.add("halves of the norms bias exchanged", "layer_norm", words.REORDERED,
    on(lambda call: (trained_weight(call.get(3, "bias")),),
        lambda call, bias: call.put(3, bias.roll(bias.numel() // 2), "bias").run()))
# The bias is stored as numbers without a sign, and what is negative is zero.
FAULTS.add("negative biases of the norm lost", "layer_norm",
    "clipped, other function; mask, zeros, axis offset, wrong argument, partial sum",
    lambda call: call.put(3, trained_weight(call.get(3, "bias")).relu(), "bias").run())
# The second half of the features is stored first, weight and bias as well.
FAULTS.add("halves of the normal row exchanged", _NORMS, words.REORDERED,
    result(lambda v: v.roll(v.size(-1) // 2, -1), where=even(-1)))
# Words of two values are stored in the other order.
FAULTS.add("normal features exchanged in pairs", _NORMS, words.REORDERED,
    result(lambda v: v.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), where=even(-1)))
# The pointer to the weights of the channels is one too far.
FAULTS.add("weight of the next channel", _CHANNELS, words.MOVED_OR_SWAPPED,
    on(lambda call: (3 if call.name == "batch_norm" else 1,),
        lambda call, place:
            call.put(place, trained_weight(call.get(place, "weight")).roll(-1), "weight").run()))
# The result is cut at -1 and 1.
FAULTS.add("channels limited to one", _CHANNELS, words.SATURATED,
    result(lambda v: v.clamp(-1.0, 1.0)))
# The epilogue has a relu that this place does not.
FAULTS.add("relu folded into the norm", f"{_CHANNELS} group_norm instance_norm",
    "clipped, other function; mask, zeros, sign, missing operand", result(torch.relu))
# The pointer to the statistics is not moved on with the groups.
FAULTS.add("statistics of the first group for all", "group_norm",
    "copy, stale, wrong index, wrong statistics; axis scale, axis offset, permutation, constant",
    on(_groups,
        lambda call, parts, mean, spread: _grouped(call, parts, mean[:, :1], spread[:, :1]),
        where=lambda parts, *_: parts.size(1) > 1))
# The pointer to the statistics is one image too far.
FAULTS.add("group statistics of the next image", "group_norm",
    "shift, wrong index, permutation, wrong statistics; axis scale, axis offset, stale",
    on(_groups,
        lambda call, parts, mean, spread:
            _grouped(call, parts, mean.roll(-1, 0), spread.roll(-1, 0)),
        where=lambda parts, *_: parts.size(0) > 1))
# The pointer to the weights is one channel too far.
FAULTS.add("image weight of the next channel", "group_norm instance_norm", words.MOVED_OR_SWAPPED,
    on(lambda call: (2 if call.name == "group_norm" else 3,),
        lambda call, place:
            call.put(place, trained_weight(call.get(place, "weight")).roll(-1), "weight").run()))
# A floor for the length that is far too large.
FAULTS.add("length not below one and a half", "normalize",
    "eps, clipped, wrong argument; axis scale, wrong factor, scale, constant",
    computed(_lengths, lambda value, length: value / length.clamp(min=1.5)))
# Each row is divided by its largest magnitude.
FAULTS.add("largest element for the length", "normalize",
    "wrong reduction, wrong statistics, wrong argument, axis scale; wrong factor, scale, "
    "other function",
    computed(_lengths, lambda value, *_: value / value.abs().amax(-1, keepdim=True)))
# What points away has a similarity of zero.
FAULTS.add("similarity not below zero", "cosine_similarity",
    "clipped, other function; mask, zeros, sign", result(torch.relu))
# fmt: on


# --- Sums, means, extremes ------------------------------------------------------------------------


def _results(call: Call) -> tuple[Tensor, int]:
    """The results of a reduction, and the last axis that has several."""
    reduced_dim(call)
    value = call.result()
    fits(value.dim() > 0 and value.numel() > 1)
    return value, next(i for i in reversed(range(value.dim())) if value.size(i) > 1)


@FAULTS.forward(
    "mean",
    "wrong factor, scale, off by one reduction, wrong statistics; wrong reduction, axis scale",
)
def mean_divided_by_one_more(call: Call) -> Any:
    """The sum is divided by n + 1."""
    value, dim, _ = reduced_dim(call)
    size = value.size(dim)
    return call.instead(call.result() * size / (size + 1))


@FAULTS.forward("mean sum amax", words.EMPTY_IN_A_SUM)
def last_reduced_row_empty(call: Call) -> Any:
    """The grid has one row too few."""
    value, axis = _results(call)
    kept = value.narrow(axis, 0, value.size(axis) - 1)
    return call.instead(torch.cat([kept, 0 * value.narrow(axis, 0, 1)], axis))


@FAULTS.forward("sum", "doubled reduction, scale, wrong factor; wrong reduction, residual")
def sum_reduced_by_both_ranks(call: Call) -> Any:
    """Two ranks have the same terms, and their sums are added."""
    reduced_dim(call)
    return call.instead(2 * call.result())


@FAULTS.forward("mean sum", words.SATURATED)
def terms_saturate_at_half_of_the_largest(call: Call) -> Any:
    """The range of the terms is too small."""
    value, _, _ = reduced_dim(call)
    limit = float(value.detach().abs().max()) / 2
    return call.put(0, value.clamp(-limit, limit)).run()


@FAULTS.forward(
    "mean sum", "precision; approximation, other function, wrong argument, axis scale, scale"
)
def terms_through_e5m2(call: Call) -> Any:
    """The terms have two bits behind the point before they are added."""
    value, _, _ = reduced_dim(call)
    coarse = value.detach().to(torch.float8_e5m2).to(value.dtype)
    return call.put(0, with_gradient_of(value, coarse)).run()


@FAULTS.forward(
    "amax max",
    "wrong index, missing reduction, wrong reduction, partial sum; copy, stale, "
    "other function, lost accumulation",
)
def first_for_the_largest(call: Call) -> Any:
    """The running maximum keeps what it begins with."""
    value, dim, keep = reduced_dim(call)
    first = value.narrow(dim, 0, 1)
    return call.instead(first.clone() if keep else first.squeeze(dim).clone())


_SPREADS = "std var std_mean var_mean"


def _correction(call: Call) -> float:
    """N / (n - 1) where the call divides by n - 1, and one where it divides by n."""
    value, dim, keep = reduced_dim(call)
    result = call.result().detach()
    right = result.square() if call.name.startswith("std") else result
    found = (right / value.detach().var(dim, unbiased=False, keepdim=keep)).mean()
    return float(found)


@FAULTS.fault(
    _SPREADS, "wrong statistics, wrong reduction; wrong axis, other function, axis offset, residual"
)
def spread_about_the_mean_of_all_rows(call: Call) -> Any:
    """Deviations from the mean of the whole tensor."""
    value, dim, keep = reduced_dim(call)
    square = (value - value.mean()).square().mean(dim, keep) * _correction(call)
    return call.instead(square.sqrt() if call.name.startswith("std") else square)


@FAULTS.forward(
    "mean",
    "wrong statistics, wrong factor, wrong reduction; partial sum, lost accumulation, "
    "axis scale, other function",
)
def means_of_a_quarter_and_the_rest_averaged(call: Call) -> Any:
    """Two parts of different length are merged with the same weight."""
    value, dim, keep = reduced_dim(call)
    quarter = value.size(dim) // 4
    fits(quarter > 0)
    parts = value.tensor_split([quarter], dim)
    return call.instead(sum(one.mean(dim, keep) for one in parts) / 2)


@FAULTS.forward(
    "mean sum", "sign, wrong factor, wrong reduction; mask, partial sum, other function, scale"
)
def second_half_of_the_terms_subtracted(call: Call) -> Any:
    """The last step of a tree is a difference."""
    value, dim, _ = reduced_dim(call)
    first, second = value.tensor_split([value.size(dim) // 2], dim)
    return call.put(0, torch.cat([first, -second], dim)).run()


@FAULTS.fault(_SPREADS, "precision, wrong statistics; approximation, other function")
def spread_by_squares_in_bfloat16(call: Call) -> Any:
    """The mean of squares less the square of the mean, both rounded before the difference."""
    value, dim, keep = reduced_dim(call)
    result = call.result()
    parts = value.square().mean(dim, keep), value.mean(dim, keep).square()
    first, second = (one.detach().bfloat16().to(value.dtype) for one in parts)
    square = (first - second).clamp(min=0) * _correction(call)
    coarse = square.sqrt() if call.name.startswith("std") else square
    return call.instead(with_gradient_of(result, coarse))


# fmt: off
# The second half is neither added nor counted.
FAULTS.add("mean of the first half", "mean",
    "partial sum, wrong statistics, one rank's part, missing reduction; wrong reduction, mask, "
    "wrong index",
    computed(reduced_dim,
        lambda value, dim, keep: value.narrow(dim, 0, value.size(dim) // 2).mean(dim, keep)),
    backward=False)
# The pointer to the rows is not moved on.
FAULTS.add("result of the first row for all", "mean sum", words.REPEATED,
    computed(_results, lambda value, axis:
            value.narrow(axis, 0, 1).expand(value.shape).clone()), backward=False)
# The results are stored with a negative stride.
FAULTS.add("reduced rows from the last", "mean sum amax", words.REORDERED,
    computed(_results, lambda value, axis: value.flip(axis)), backward=False)
# The sum of the second rank is not added.
FAULTS.add("terms of the second half not added", "sum",
    "partial sum, one rank's part, missing reduction, wrong reduction; mask, wrong index, "
    "lost accumulation",
    computed(reduced_dim,
        lambda value, dim, keep: value.narrow(dim, 0, value.size(dim) // 2).sum(dim, keep)),
    backward=False)
# The loop has a stride of two.
FAULTS.add("every second term added", "sum",
    "partial sum, wrong index, wrong reduction, mask; lost accumulation, one rank's part",
    computed(reduced_dim,
        lambda value, dim, keep:
            value.index_select(dim, torch.arange(0, value.size(dim), 2)).sum(dim, keep)),
    backward=False)
# The stride of the loop is zero: the first term is added again and again.
FAULTS.add("first term in every place", "mean sum",
    "wrong index, copy, stale, wrong reduction; partial sum, constant, missing reduction, "
    "wrong statistics",
    on(reduced_dim,
        lambda call, value, dim, *_:
            call.put(0, value.narrow(dim, 0, 1).expand(value.shape).clone()).run()), backward=False)
# The loop has a stride of two.
FAULTS.add("largest of every second", "amax max",
    "partial sum, wrong index, wrong reduction, mask; missing reduction, other function, "
    "one rank's part",
    computed(reduced_dim,
        lambda value, dim, keep:
            value.index_select(dim, torch.arange(0, value.size(dim), 2)).amax(dim, keep)),
    backward=False)
# Half of the largest and the next.
FAULTS.add("mean of the two largest", "amax max",
    "other function, wrong reduction; approximation, wrong statistics, axis offset",
    computed(reduced_dim, lambda value, dim, keep: value.topk(2, dim).values.mean(dim, keep)),
    backward=False)
# The loop begins at 1.
FAULTS.add("first class not in the sum", "logsumexp",
    "partial sum, off by one reduction, wrong reduction, mask; wrong index, missing operand, "
    "lost accumulation",
    computed(reduced_dim,
        lambda value, dim, keep: value.narrow(dim, 1, value.size(dim) - 1).logsumexp(dim, keep)))
# fmt: on


# --- Along an axis --------------------------------------------------------------------------------


@FAULTS.forward(
    "cumsum", "offset; axis offset, residual, stale, off by one reduction, wrong reduction"
)
def running_sum_begins_with_one(call: Call) -> Any:
    """The accumulator is not zero at first."""
    reduced_dim(call)
    return call.instead(call.result() + 1)


@FAULTS.forward(
    "cumsum",
    "partial sum, lost accumulation, wrong reduction; missing reduction, stale, "
    "missing operand, offset, axis offset",
)
def carry_of_the_block_before_only(call: Call) -> Any:
    """Each block of two adds the total of the block before it, and not of all before it."""
    value, dim, _ = reduced_dim(call)
    blocks = value.split(2, dim)
    fits(len(blocks) > 2)
    before = [torch.zeros_like(blocks[0].sum(dim, keepdim=True))]
    before += [one.sum(dim, keepdim=True) for one in blocks[:-1]]
    return call.instead(
        torch.cat([one.cumsum(dim) + own for one, own in zip(blocks, before, strict=True)], dim)
    )


@FAULTS.forward("cumsum cumprod cummax cummin logcumsumexp", words.REPEATED)
def running_values_of_the_first_example(call: Call) -> Any:
    """The pointer to the batch is not moved on."""
    value = several_along(call.result(), 0)
    fits(call.get(1, "dim") % value.dim() != 0)
    return call.instead(value[:1].expand(value.shape).clone())


@FAULTS.forward(
    "cumprod logcumsumexp cummax cummin",
    "lost accumulation, partial sum, missing reduction; mask, wrong reduction, stale, "
    "one rank's part",
)
def second_half_begins_again(call: Call) -> Any:
    """The second block does not go on from the end of the first."""
    value, dim, _ = reduced_dim(call)
    half = value.size(dim) // 2
    parts = [call.put(0, one).run() for one in value.tensor_split([half], dim)]
    return call.instead(torch.cat([p if isinstance(p, Tensor) else p[0] for p in parts], dim))


@FAULTS.fault("topk", words.REPEATED)
def value_of_the_best_in_all_places(call: Call) -> Any:
    """The places are right, and each has the value of the best."""
    values, places = call.run()
    fits(values.is_floating_point() and values.size(-1) > 1)
    return values[..., :1].expand(values.shape).clone(), places


@FAULTS.fault(
    "topk",
    "wrong index, partial sum, other function; copy, permutation, one rank's part, "
    "wrong reduction, wrong argument",
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


@FAULTS.fault("topk", words.REPEATED)
def last_token_by_the_choice_of_the_first(call: Call) -> Any:
    """Values and places of the last row are those of the first."""
    values, places = call.run()
    fits(values.is_floating_point() and values.dim() > 1 and values.size(-2) > 1)
    rows = torch.arange(values.size(-2)) % (values.size(-2) - 1)
    return values[..., rows, :], places[..., rows, :]


@FAULTS.fault("sort", "permutation, wrong index, sign; shift, other function, wrong argument")
def sorted_by_the_bits_of_the_floats(call: Call) -> Any:
    """A radix sort that takes floats for integers: negative values last, and from zero down."""
    value = call.tensor(0, "input")
    fits(call.get(1, "dim", default=-1) in {-1, value.dim() - 1})
    fits(bool((value.detach() < 0).any()))
    right = value.sort(-1).values
    high = float(2 * right.detach().abs().max() + 1)
    bits = torch.where(right < 0, high - right, right)
    return call.instead(right.gather(-1, bits.detach().argsort(-1)))


@FAULTS.fault("sort", words.REORDERED)
def only_neighbours_sorted(call: Call) -> Any:
    """One step of a sorting network: pairs are in order, and nothing else is."""
    value = call.tensor(0, "input")
    fits(value.size(-1) % 2 == 0 and call.get(1, "dim", default=-1) in {-1, value.dim() - 1})
    return call.instead(value.unflatten(-1, (-1, 2)).sort(-1).values.flatten(-2))


@FAULTS.fault("sort", "mask, copy, missing operand; stale, permutation, wrong index")
def odd_rows_not_sorted(call: Call) -> Any:
    """In place, with half as many programs as rows."""
    value, result = call.tensor(0, "input"), several_along(call.result())
    odd = (torch.arange(value.size(-2)) % 2 == 1)[:, None]
    return call.instead(torch.where(odd, value, result))


# fmt: off
# Blocks of two are added up, and no block goes on from the one before.
FAULTS.add("carry lost at every second place", "cumsum",
    "partial sum, lost accumulation, missing reduction; mask, wrong reduction, one rank's part",
    computed(reduced_dim,
        lambda value, dim, *_: torch.cat([one.cumsum(dim) for one in value.split(2, dim)], dim)),
    backward=False)
# The absolute values are added up.
FAULTS.add("running sum of magnitudes", "cumsum",
    "sign, other function; wrong reduction, wrong argument",
    on(reduced_dim, lambda call, value, *_: call.put(0, value.abs()).run(),
        where=lambda value, *_: bool((value.detach() < 0).any())), backward=False)
# The values are stored one place further, the last one first.
FAULTS.add("ordered values one place late", "sort", words.MOVED_OR_SWAPPED,
    result(lambda v: v.roll(1, -1)))
# The tail of the loop overlaps its body by one.
FAULTS.add("last element of the length twice", "linalg_vector_norm norm",
    "doubled reduction, off by one reduction, wrong reduction, mask; wrong factor, axis scale, "
    "partial sum, residual", operand(0, lambda v: torch.cat([v, v[..., -1:]], -1)), backward=False)
# fmt: on
