"""Faults of the ninth set: norms, statistics, running sums, orders."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on, operand, result, rounded
from benchmarks.places.parts import (
    apply_affine,
    channel_parts,
    moments_of_rows,
    norm_by,
    norm_row,
    reduced_dim,
    trained_weight,
)
from torch.nn import functional

FAULTS = Catalogue()
_NORMS = "layer_norm rms_norm"
_CHANNELS = "batch_norm batch_norm_from_statistics"
_SPREADS = "std var std_mean var_mean"


# --- Norms of rows --------------------------------------------------------------------------------


@FAULTS.fault(
    "layer_norm",
    "sign, wrong statistics, wrong factor; axis offset, offset, residual, other function",
)
def mean_of_the_row_added(call: Call) -> Any:
    """(x + mean) r w + b: the sign of the mean is lost; the deviation is right."""
    value, _, _, _ = norm_row(call)
    mean, spread = moments_of_rows(call, value)
    return norm_by(call, -mean, spread)


@FAULTS.fault(
    _NORMS, "other function, wrong statistics; axis scale, scale, wrong factor, swapped operands"
)
def multiplied_by_the_deviation(call: Call) -> Any:
    """The root for the reciprocal root: rows with large values become larger still."""
    value, weight, bias, eps = norm_row(call)
    mean, spread = moments_of_rows(call, value)
    return apply_affine(call, (value - mean) * (spread + eps).sqrt(), weight, bias)


@FAULTS.fault(
    _NORMS, "wrong statistics, wrong factor, doubled reduction; scale, axis scale, wrong reduction"
)
def squares_divided_by_half_the_width(call: Call) -> Any:
    """The width is that of one of two shards; the squares of both are added."""
    value, _, _, _ = norm_row(call)
    mean, spread = moments_of_rows(call, value)
    return norm_by(call, mean, 2 * spread)


@FAULTS.fault(
    _NORMS,
    "wrong statistics, off by one reduction, partial sum, wrong reduction; mask, "
    "axis scale, scale, wrong factor, missing operand, missing reduction",
)
def square_of_the_last_feature_not_added(call: Call) -> Any:
    """The loop over the squares ends one too early; they are divided by the whole width."""
    value, _, _, _ = norm_row(call)
    mean, _ = moments_of_rows(call, value)
    spread = (value - mean)[..., :-1].square().sum(-1, keepdim=True) / value.size(-1)
    return norm_by(call, mean, spread)


@FAULTS.fault(_NORMS, "precision; approximation, other function, wrong statistics")
def input_of_the_norm_in_float8(call: Call) -> Any:
    """The rows are loaded from a buffer in e4m3."""
    value, _, _, _ = norm_row(call)
    coarse = value.detach().to(torch.float8_e4m3fn).to(value.dtype)
    return call.put(0, with_gradient_of(value, coarse), "input").run()


# fmt: off
# N w - b.
FAULTS.add("bias of the norm subtracted", "layer_norm",
    "sign, axis offset, wrong factor; offset, residual, repeated bias, missing bias, "
    "other function",
    lambda call: call.instead(call.result() - 2 * trained_weight(call.get(3, "bias"))))
# W - 1: the checkpoint was converted for a norm that adds one, and this one does not.
FAULTS.add("one subtracted from the weight", _NORMS,
    "wrong factor, axis scale; residual, wrong argument, missing operand, scale, axis offset",
    lambda call: call.put(2, trained_weight(call.get(2, "weight")) - 1, "weight").run())
# One factor for the whole tensor, where each feature has its own.
FAULTS.add("mean of the weights for each", _NORMS,
    "wrong factor, axis scale, wrong reduction; constant, copy, wrong statistics, "
    "wrong argument, scale",
    on(lambda call: (trained_weight(call.get(2, "weight")),),
        lambda call, weight: call.put(2, weight.mean().expand_as(weight), "weight").run()))
# The values are limited to -1 and 1 before the statistics, as codes are.
FAULTS.add("input of the norm cut at one", _NORMS,
    "clipped, other function; mask, wrong statistics, wrong argument, approximation",
    operand(0, lambda v: v.clamp(-1, 1), "input"))
# fmt: on


# --- Norms of channels ----------------------------------------------------------------------------


@FAULTS.fault(
    _CHANNELS,
    "wrong statistics, wrong reduction, wrong axis, other function; axis offset, "
    "axis scale, wrong argument",
)
def statistics_of_each_image_for_the_batch_norm(call: Call) -> Any:
    """An instance norm: the kept statistics are not used."""
    value, weight, bias, _, _, eps = channel_parts(call)
    fits(value.dim() == 4 and value.size(-1) > 1)
    return call.instead(functional.instance_norm(value, eps=eps) * weight + bias)


@FAULTS.fault(
    _CHANNELS,
    "copy, stale, wrong index; wrong statistics, shift, permutation, mask, wrong argument",
)
def last_channel_by_the_parameters_before_it(call: Call) -> Any:
    """The index of the parameters is limited to one too few."""
    value, *vectors, eps = channel_parts(call)
    places = torch.arange(value.size(1)).clamp(max=value.size(1) - 2)
    weight, bias, mean, variance = (one.index_select(1, places) for one in vectors)
    return call.instead((value - mean) * (variance + eps).rsqrt() * weight + bias)


@FAULTS.fault(
    _CHANNELS,
    "sign, wrong factor; axis offset, offset, repeated bias, residual, missing bias, "
    "other function",
)
def folded_summand_with_a_minus(call: Call) -> Any:
    """X f + (mean f - b): the whole summand of the folded norm has the wrong sign."""
    value, weight, bias, mean, variance, eps = channel_parts(call)
    factor = (variance + eps).rsqrt() * weight
    return call.instead(value * factor + mean * factor - bias)


@FAULTS.fault(
    "group_norm",
    "wrong argument, wrong statistics, wrong reduction; axis scale, axis offset, missing reduction",
)
def one_group_for_all_channels(call: Call) -> Any:
    """The number of groups is not handed on: the whole image is one."""
    fits(call.get(1, "num_groups") > 2)
    return call.put(1, 1, "num_groups").run()


@FAULTS.fault(
    "group_norm instance_norm",
    "wrong statistics, other function; missing operand, axis scale, axis offset, "
    "missing reduction, scale",
)
def image_only_weighed_and_shifted(call: Call) -> Any:
    """X w + b: mean 0 and deviation 1, since the pass over the image was removed."""
    value = call.tensor(0, "input")
    places = (2, 3) if call.name == "group_norm" else (3, 4)
    shape = (1, -1, *[1] * (value.dim() - 2))
    return apply_affine(call, value, *(trained_weight(call.get(i)).view(shape) for i in places))


# fmt: off
# Divided by v^(1/4): the root is taken by the export and by the kernel.
FAULTS.add("root of the kept deviation", _CHANNELS,
    "other function, wrong statistics; axis scale, scale, wrong factor, approximation",
    computed(channel_parts,
        lambda value, weight, bias, mean, variance, eps:
            (value - mean) * (variance + eps).pow(-0.25) * weight + bias))
# The pointer to the biases is one channel behind, around the end; that to the weights not.
FAULTS.add("image bias of the channel before", "group_norm instance_norm",
    "shift, wrong index, permutation; axis offset, wrong argument, stale, copy, residual, "
    "wrong rank's shard",
    on(lambda call: (3 if call.name == "group_norm" else 4,),
        lambda call, place:
            call.put(place, trained_weight(call.get(place, "bias")).roll(1), "bias").run()))
# K = 2.
FAULTS.add("k of the paper for the one given", "local_response_norm",
    "wrong argument, offset, wrong factor; other function, eps, scale, wrong statistics",
    lambda call: call.put(4, 2.0, "k").run())
# fmt: on


# --- Lengths and distances ------------------------------------------------------------------------


@FAULTS.forward(
    "normalize",
    "partial sum, one rank's part, missing reduction, axis scale, wrong reduction; "
    "wrong statistics, scale, mask, wrong factor",
)
def length_of_the_first_half_of_the_row(call: Call) -> Any:
    """The squares of the second rank are not added before the root."""
    value = call.tensor(0, "input")
    fits(call.get(2, "dim", default=1) in {-1, value.dim() - 1})
    half = value[..., : value.size(-1) // 2]
    return call.instead(value / half.norm(dim=-1, keepdim=True).clamp(min=1e-12))


@FAULTS.forward(
    "linalg_vector_norm norm",
    "scale, wrong factor, wrong reduction; wrong statistics, axis scale, other function",
)
def root_of_the_mean_for_the_root_of_the_sum(call: Call) -> Any:
    """The powers are averaged before the root."""
    value, order, dim = call.tensor(0), call.get(1, "ord", "p"), call.get(2, "dim")
    fits(isinstance(order, int | float) and order > 0)
    axes = [dim] if isinstance(dim, int) else list(dim)
    fits(len(axes) == 1)
    return call.instead(call.result() / value.size(axes[0]) ** (1 / order))


@FAULTS.forward(
    "pairwise_distance", "wrong argument, wrong reduction, other function; sign, approximation"
)
def distance_of_pairs_along_the_axes(call: Call) -> Any:
    """The sum of the magnitudes: p is 1."""
    fits(call.get(2, "p", default=2.0) == 2.0)
    return call.put(2, 1.0, "p").run()


@FAULTS.forward("cdist", "sign, wrong factor, other function; wrong reduction")
def products_added_to_the_squared_lengths(call: Call) -> Any:
    """The root of a a + b b + 2 a b: the factor of the product lost its minus."""
    fits(call.get(2, "p", default=2.0) == 2.0)
    return call.instead(torch.cdist(call.tensor(0), -call.tensor(1)))


# fmt: off
# The pointer to the second operand is one row too far, around the end.
FAULTS.add("similarity to the next one", "cosine_similarity", words.MOVED_OPERAND,
    lambda call: call.put(1, call.tensor(1).roll(-1, 0), "x2").run(), backward=False)
# V / |v|: the direction alone; the learned length is not loaded.
FAULTS.add("lengths of the filters not applied", "_weight_norm _weight_norm_interface",
    "missing operand, axis scale; wrong factor, scale, copy, constant",
    lambda call: call.instead(call.result() / call.tensor(1)), backward=False)
# fmt: on


# --- Sums, means, extremes ------------------------------------------------------------------------


@FAULTS.forward(
    "mean sum",
    "partial sum, missing reduction, wrong reduction, wrong index; wrong statistics, mask, "
    "copy, stale, one rank's part",
)
def first_line_of_the_image_only(call: Call) -> Any:
    """Of two axes, only the last is reduced: the others are read at their first place."""
    value, dims = call.tensor(0), call.get(1, "dim")
    fits(isinstance(dims, list | tuple) and len(dims) == 2)
    fits(all(value.size(one) > 1 for one in dims))
    line = value.narrow(min(one % value.dim() for one in dims), 0, 1)
    return call.put(0, line, "input").run()


@FAULTS.forward(_SPREADS, "eps, offset, other function; wrong statistics, wrong argument, residual")
def tenth_added_to_the_variance(call: Call) -> Any:
    """The eps of the norm that follows is in the variance itself."""
    right = call.result()
    if call.name.startswith("std"):
        return call.instead((right.square() + 0.1).sqrt())
    return call.instead(right + 0.1)


@FAULTS.forward(
    _SPREADS,
    "wrong factor, scale, off by one reduction, wrong statistics; wrong argument, "
    "axis scale, wrong reduction",
)
def spread_divided_by_one_more(call: Call) -> Any:
    """Squares divided by n + 1."""
    value, dim, _ = reduced_dim(call)
    size = value.size(dim)
    share = (size - 1) / (size + 1)
    return call.instead(call.result() * (share**0.5 if call.name.startswith("std") else share))


@FAULTS.forward(
    "quantile",
    "wrong argument, wrong index, other function; approximation, wrong reduction, precision",
)
def quantile_is_the_value_above(call: Call) -> Any:
    """The place in the order is rounded up, and nothing is interpolated."""
    value, share, dim = call.tensor(0), call.get(1, "q"), call.get(2, "dim")
    keep = bool(call.get(3, "keepdim", default=False))
    return call.instead(torch.quantile(value, share, dim, keep, interpolation="higher"))


@FAULTS.forward(
    "kthvalue median",
    "wrong index, other function; permutation, missing reduction, copy, wrong reduction, "
    "missing operand",
)
def place_counted_in_the_unsorted_row(call: Call) -> Any:
    """The element at the place that was asked for, in the order of the memory."""
    value, is_median = call.tensor(0), call.name == "median"
    dim = call.get(1 if is_median else 2, "dim", default=-1)
    fits(isinstance(dim, int))
    place = (value.size(dim) - 1) // 2 if is_median else call.get(1, "k") - 1
    found = value.narrow(dim, place, 1)
    return call.instead(found.view(call.result().shape))


# fmt: off
# The rule that keeps the variance, for one that keeps the mean or the sum.
FAULTS.add("sum divided by the root of its length", "mean sum",
    "wrong factor, scale; wrong reduction, wrong statistics, axis scale, missing operand",
    computed(reduced_dim,
        lambda value, dim, keep: value.sum(dim, keep) / value.size(dim) ** 0.5), backward=False)
# The result has the type that the inputs had before they were promoted: float16.
FAULTS.add("reduced value stored in half", "mean sum logsumexp",
    "precision; approximation, other function", result(rounded(torch.float16)), backward=False)
# The running maximum begins with 1.
FAULTS.add("largest of the row and one", "amax",
    "clipped; wrong reduction, eps, other function, wrong argument, constant, mask",
    result(lambda v: v.clamp(min=1)), backward=False)
# The number of the reduction in the enumeration is one off.
FAULTS.add("mean of the row for its extreme", "amax amin",
    "wrong reduction, other function; wrong statistics, approximation, missing reduction",
    computed(reduced_dim, lambda value, dim, keep: value.mean(dim, keep)), backward=False)
# The root is taken by the reduction, and its reader takes it again.
FAULTS.add("deviation for the variance", "var var_mean",
    "other function; wrong statistics, approximation, wrong reduction", result(torch.sqrt),
    backward=False)
# The sum of both ends of each interval.
FAULTS.add("neighbours added and not halved", "trapezoid",
    "scale, wrong factor; missing operand, wrong reduction, doubled reduction",
    result(lambda v: 2 * v), backward=False)
# fmt: on


# --- Along an axis --------------------------------------------------------------------------------


@FAULTS.forward(
    "cumsum",
    "partial sum, lost accumulation, wrong reduction; missing reduction, wrong index, "
    "stale, residual, mask",
)
def last_element_for_the_carry(call: Call) -> Any:
    """A block of four goes on from the last element of the block before, not from its sum."""
    value, dim, _ = reduced_dim(call, 6)
    blocks = value.split(4, dim)
    sums = [blocks[0].cumsum(dim)]
    for before, block in itertools.pairwise(blocks):
        carry = before.narrow(dim, before.size(dim) - 1, 1)
        sums.append(block.cumsum(dim) + carry)
    return call.instead(torch.cat(sums, dim))


@FAULTS.forward(
    "cumsum",
    "sign, wrong factor, wrong reduction; lost accumulation, axis scale, mask, other function",
)
def odd_terms_subtracted_along_the_way(call: Call) -> Any:
    """X0 - x1 + x2 and so on: each second step is a difference."""
    value, dim, _ = reduced_dim(call)
    shape = [1] * value.dim()
    shape[dim] = -1
    signs = 1 - 2 * (torch.arange(value.size(dim)) % 2).view(shape).to(value.dtype)
    return call.instead((value * signs).cumsum(dim))


@FAULTS.forward("diff", "zeros, missing operand; mask, wrong argument, uninitialised, constant")
def nothing_before_the_first_place(call: Call) -> Any:
    """The value before the first is not handed on: the first difference is zero."""
    dim = call.get(2, "dim", default=-1)
    fits("prepend" in call.kwargs)
    value = call.result()
    return call.instead(
        torch.cat(
            [torch.zeros_like(value.narrow(dim, 0, 1)), value.narrow(dim, 1, value.size(dim) - 1)],
            dim,
        )
    )


@FAULTS.forward(
    "sort",
    "mask, wrong index, permutation; copy, missing operand, stale, partial sum, other function",
)
def first_half_of_the_row_sorted_only(call: Call) -> Any:
    """The block of the sort is half as long as the row; the rest stays as it came."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(isinstance(dim, int))
    half = value.size(dim) // 2
    first = value.narrow(dim, 0, half).sort(dim).values
    rest = value.narrow(dim, half, value.size(dim) - half)
    return call.instead(torch.cat([first, rest], dim))


@FAULTS.forward("topk", "other function; wrong factor, wrong statistics, axis scale")
def softmax_of_the_chosen_values(call: Call) -> Any:
    """The kernel for experts turns the chosen scores into weights as well."""
    values, places = call.run()
    fits(values.is_floating_point() and values.size(-1) > 1)
    return values.softmax(-1), places


# fmt: off
# The scan has the operator of its sibling.
FAULTS.add("running sum for the running product", "cumprod",
    "wrong reduction, other function; wrong argument",
    computed(reduced_dim, lambda value, dim, *_: value.cumsum(dim)), backward=False)
# Each place has the result of itself and of those behind it.
FAULTS.add("running values from the end", "cumprod cummax cummin logcumsumexp",
    "permutation, wrong argument, other function; wrong index, shift, wrong reduction",
    on(reduced_dim,
        lambda call, value, dim, *_:
            call.instead(call.put(0, value.flip(dim), "input").result().flip(dim))), backward=False)
# fmt: on
