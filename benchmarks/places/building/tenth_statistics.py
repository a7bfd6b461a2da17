"""Faults of the tenth set: norms, statistics, running sums, orders."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, longer, on, operand, result, rounded
from benchmarks.places.parts import (
    apply_affine,
    channel_parts,
    moments_of_rows,
    norm_by,
    norm_row,
    reduced_dim,
    reduced_result,
    round_to,
    several_rows,
    varied_channels,
)
from torch import Tensor

FAULTS = Catalogue()
_NORMS = "layer_norm rms_norm"
_CHANNELS = "batch_norm batch_norm_from_statistics"
_SPREADS = "std var std_mean var_mean"


# --- Norms of rows --------------------------------------------------------------------------------


@FAULTS.fault(
    _NORMS, "sign, swapped operands, wrong factor; scale, other function, wrong statistics"
)
def mean_less_the_value(call: Call) -> Any:
    """(m - x) r w + b: the operands of the difference are exchanged."""
    value, weight, bias, eps = norm_row(call)
    mean, spread = moments_of_rows(call, value)
    return apply_affine(call, (mean - value) * (spread + eps).rsqrt(), weight, bias)


@FAULTS.fault(
    _NORMS, "eps, wrong argument; wrong statistics, axis scale, scale, wrong factor, offset"
)
def eps_of_a_thousandth(call: Call) -> Any:
    """1e-3, the default of another framework."""
    value, _, _, eps = norm_row(call)
    fits(eps not in {1e-6, 1e-3})
    mean, spread = moments_of_rows(call, value)
    return norm_by(call, mean, spread + 1e-3 - eps)


@FAULTS.fault(
    "layer_norm",
    "wrong statistics, wrong factor; axis offset, offset, scale, residual, missing operand",
)
def half_of_the_mean_subtracted(call: Call) -> Any:
    """The mean is divided by two ranks that have all of the row; the deviation is right."""
    value, _, _, _ = norm_row(call)
    mean, spread = moments_of_rows(call, value)
    return norm_by(call, mean / 2, spread)


@FAULTS.fault(
    "layer_norm",
    "wrong statistics, one rank's part, partial sum, missing reduction; axis offset, "
    "offset, wrong reduction, mask",
)
def mean_of_the_first_half_subtracted(call: Call) -> Any:
    """The mean is that of the first rank's features; the deviation is right."""
    value, _, _, _ = norm_row(call)
    fits(value.size(-1) > 3)
    _, spread = moments_of_rows(call, value)
    return norm_by(call, value[..., : value.size(-1) // 2].mean(-1, keepdim=True), spread)


@FAULTS.fault(
    _NORMS,
    "other function, wrong statistics; wrong reduction, axis scale, axis offset, approximation",
)
def rows_between_zero_and_one(call: Call) -> Any:
    """The smallest is subtracted and the range divides: another way to normalise."""
    value, weight, bias, eps = norm_row(call)
    low, high = value.amin(-1, keepdim=True), value.amax(-1, keepdim=True)
    return apply_affine(call, (value - low) / (high - low + eps), weight, bias)


@FAULTS.fault(
    _NORMS,
    "wrong statistics, stale, wrong index; shift, axis scale, axis offset, permutation, "
    "wrong factor, scale",
)
def statistics_of_the_row_before(call: Call) -> Any:
    """Mean and deviation are stored after they were used; the first row has its own."""
    value = several_rows(norm_row(call)[0])
    parts = moments_of_rows(call, value)
    return norm_by(call, *(torch.cat([one[..., :1, :], one[..., :-1, :]], -2) for one in parts))


@FAULTS.fault(
    _NORMS,
    "wrong statistics, wrong axis, wrong reduction; wrong argument, axis scale, "
    "axis offset, other function",
)
def statistics_over_the_batch(call: Call) -> Any:
    """Mean and variance of each feature at each position are over the examples."""
    value, _, _, _ = norm_row(call)
    fits(value.dim() > 2 and value.size(0) > 1)
    mean = value.mean(0, keepdim=True)
    if call.name == "rms_norm":
        mean = 0 * mean
    return norm_by(call, mean, (value - mean).square().mean(0, keepdim=True))


@FAULTS.fault(_NORMS, "wrong statistics, wrong factor; scale, axis scale, wrong reduction")
def squares_divided_by_twice_the_width(call: Call) -> Any:
    """The width is counted for two ranks, and the squares are those of one."""
    value, _, _, _ = norm_row(call)
    mean, spread = moments_of_rows(call, value)
    return norm_by(call, mean, spread / 2)


@FAULTS.fault(
    _NORMS,
    "wrong statistics, wrong reduction; axis scale, scale, wrong factor, axis offset, wrong axis",
)
def one_variance_for_all_rows(call: Call) -> Any:
    """The mean of all variances divides every row; each row has its own mean."""
    value = several_rows(norm_row(call)[0])
    mean, spread = moments_of_rows(call, value)
    return norm_by(call, mean, spread.mean().expand_as(spread))


@FAULTS.fault(
    _NORMS,
    "wrong statistics, partial sum, wrong reduction; mask, axis scale, scale, "
    "wrong factor, missing operand, off by one reduction, missing reduction",
)
def squares_of_the_first_quarter_not_added(call: Call) -> Any:
    """The prologue loads the first quarter of a row for the mean, and its squares are lost."""
    value, _, _, _ = norm_row(call)
    fits(value.size(-1) > 3)
    mean, _ = moments_of_rows(call, value)
    rest = (value - mean)[..., value.size(-1) // 4 :]
    return norm_by(call, mean, rest.square().sum(-1, keepdim=True) / value.size(-1))


@FAULTS.fault(
    _NORMS,
    "clipped, wrong statistics; eps, other function, wrong argument, axis scale, approximation",
)
def variance_not_below_one(call: Call) -> Any:
    """A floor for the variance that is far too high."""
    value, _, _, _ = norm_row(call)
    mean, spread = moments_of_rows(call, value)
    return norm_by(call, mean, spread.clamp(min=1))


@FAULTS.forward(f"{_NORMS} rsqrt", "precision; approximation, wrong statistics, other function")
def reciprocal_root_by_an_estimate_of_eight_bits(call: Call) -> Any:
    """An instruction that estimates the reciprocal root, and no step of Newton's behind it."""

    def estimate(exact: Tensor) -> Tensor:
        size = torch.exp2(exact.detach().log2().floor() - 8)
        return with_gradient_of(exact, ((exact.detach() / size).floor() + 0.5) * size)

    if call.name == "rsqrt":
        return call.instead(estimate(call.result()))
    value, weight, bias, eps = norm_row(call)
    mean, spread = moments_of_rows(call, value)
    return apply_affine(call, (value - mean) * estimate((spread + eps).rsqrt()), weight, bias)


@FAULTS.fault(_NORMS, "precision, wrong statistics; scale, axis scale, approximation")
def sum_of_the_squares_in_steps_of_one(call: Call) -> Any:
    """The sum of squares is an integer before it is divided by the width."""
    value, _, _, _ = norm_row(call)
    mean, spread = moments_of_rows(call, value)
    total = spread * value.size(-1)
    whole = with_gradient_of(total, total.detach().round())
    return norm_by(call, mean, whole / value.size(-1))


# fmt: off
# The result is stored in float16, weight and bias applied.
FAULTS.add("result of the norm in half", _NORMS, "precision; approximation, other function",
    result(rounded(torch.float16)), backward=False)
# The rows are loaded from a buffer with eight bits; the statistics are of these.
FAULTS.add("input of the norm in bfloat16", _NORMS, "precision; approximation, other function",
    operand(0, rounded(torch.bfloat16), "input"), backward=False)
# Each row of the result is that of the row before, the first one is the last.
FAULTS.add("normal rows stored one row later", _NORMS,
    "shift, wrong index, permutation; stale, copy", result(lambda v: several_rows(v).roll(1, -2)))
# The last row keeps what its program has stored before.
FAULTS.add("last normal row is the one before", _NORMS,
    "copy, stale, wrong index; shift, permutation, mask",
    computed(lambda call: (several_rows(call.result()),),
        lambda value: value[..., torch.arange(value.size(-2)).clamp(max=value.size(-2) - 2), :]))
# The grid has one tile of features; the statistics are right.
FAULTS.add("second half of the normal row not stored", _NORMS, words.EMPTY_IN_A_RANKS_SUM,
    result(lambda v: v * (torch.arange(v.size(-1)) < v.size(-1) // 2), where=longer(-1, 3)))
# In place, and the store covers the first half of the features.
FAULTS.add("second half of the row not normalised", _NORMS,
    "mask, stale, copy; missing operand, residual, axis scale, wrong index",
    on(lambda call: (call.tensor(0, "input"), call.result().size(-1) // 2),
        lambda call, value, half:
            call.instead(torch.cat([call.result()[..., :half], value[..., half:]], -1)),
        where=lambda _, half: half > 1))
# The epilogue of another layer: what is negative is zero.
FAULTS.add("relu behind the norm", _NORMS, "clipped, other function; zeros, mask",
    result(torch.relu))
# fmt: on


# --- Norms of channels ----------------------------------------------------------------------------


@FAULTS.fault(
    _CHANNELS,
    "repeated bias, wrong factor; axis offset, offset, residual, doubled reduction, scale",
)
def bias_of_the_batch_norm_twice(call: Call) -> Any:
    """Once by the kernel that folds it, and once in the epilogue."""
    _, _, bias, _, _, _ = channel_parts(call)
    return call.instead(call.result() + bias)


@FAULTS.fault(
    _CHANNELS,
    "shift, wrong index, permutation; axis offset, wrong argument, stale, copy, offset, "
    "wrong rank's shard",
)
def batch_bias_of_the_next_channel(call: Call) -> Any:
    """The pointer to the biases is one channel too far; the others are right."""
    _, _, bias, _, _, _ = channel_parts(call)
    return call.instead(call.result() - bias + varied_channels(bias).roll(-1, 1))


@FAULTS.fault(_CHANNELS, words.MOVED_SHARD)
def normal_channels_stored_one_later(call: Call) -> Any:
    """Each channel is stored in the place of the next one, the last one first."""
    channel_parts(call)
    return call.instead(call.result().roll(1, 1))


@FAULTS.fault(
    "group_norm native_group_norm",
    "eps, wrong argument; wrong statistics, axis scale, scale, wrong factor, offset",
)
def eps_of_a_half_for_the_groups(call: Call) -> Any:
    """The share of a dropout, 0.5, is handed on as eps."""
    if call.name == "group_norm":
        return call.put(4, 0.5, "eps").run()
    return call.put(7, 0.5, "eps").run()


# fmt: off
# The mean was folded into the bias, and is subtracted by the kernel as well.
FAULTS.add("kept mean subtracted twice", _CHANNELS,
    "wrong factor, wrong statistics, doubled reduction; axis offset, offset, residual, scale",
    computed(channel_parts,
        lambda value, weight, bias, mean, variance, eps:
            (value - 2 * mean) * (variance + eps).rsqrt() * weight + bias))
# The momentum is handed on as eps.
FAULTS.add("eps of a tenth for the channels", _CHANNELS,
    "eps, wrong argument; wrong statistics, axis scale, scale, wrong factor, offset",
    computed(channel_parts,
        lambda value, weight, bias, mean, variance, *_:
            (value - mean) * (variance + 0.1).rsqrt() * weight + bias))
# (x - m) w + b: the deviation is taken as one.
FAULTS.add("channels centred and not divided", _CHANNELS,
    "missing operand, wrong statistics, other function; axis scale, wrong factor",
    computed(channel_parts,
        lambda value, weight, bias, mean, *_: (value - mean) * weight + bias))
# The normal image is stored with eight bits.
FAULTS.add("image norm in bfloat16", f"{_CHANNELS} group_norm instance_norm",
    "precision; approximation, other function", result(rounded(torch.bfloat16)), backward=False)
# Groups are half as wide as they should be.
FAULTS.add("twice as many groups", "group_norm",
    "wrong argument, wrong statistics, wrong reduction; axis scale, axis offset, "
    "other function, missing reduction",
    on(lambda call: (call.get(1, "num_groups"), call.tensor(0, "input")),
        lambda call, number, _: call.put(1, 2 * number, "num_groups").run(),
        where=lambda number, value: value.size(1) % (2 * number) == 0))
# The kernel does not ask for the layout: the memory of the image has its channels last.
FAULTS.add("channels last image read as channels first", f"{_CHANNELS} group_norm instance_norm",
    "permutation, transpose, wrong index; shift, swapped operands, wrong statistics, "
    "wrong argument",
    operand(0, lambda v: v.movedim(1, -1).reshape(v.shape), "input",
        where=lambda v: v.dim() > 2 and v.size(1) > 1 and v[0, 0].numel() > 1))
# fmt: on


# --- Lengths --------------------------------------------------------------------------------------


@FAULTS.forward(
    "normalize",
    "axis scale, wrong index, stale, wrong statistics; shift, scale, wrong factor, permutation",
)
def length_of_the_row_before(call: Call) -> Any:
    """The pointer to the lengths is one row behind, around the end."""
    value, dim = call.tensor(0, "input"), call.get(2, "dim", default=1)
    fits(dim in {-1, value.dim() - 1})
    length = value.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return call.instead(value / several_rows(length).roll(1, -2))


@FAULTS.forward(
    "linalg_vector_norm norm",
    "off by one reduction, partial sum, mask; wrong reduction, wrong index, missing operand, zeros",
)
def last_element_not_in_the_length(call: Call) -> Any:
    """The loop over the powers ends one too early."""
    value, dim = call.tensor(0), call.get(2, "dim")
    axes = [dim] if isinstance(dim, int) else list(dim)
    fits(len(axes) == 1 and value.size(axes[0]) > 2)
    short = value.narrow(axes[0], 0, value.size(axes[0]) - 1)
    return call.put(0, short).run()


# fmt: off
# The result is stored with eight bits.
FAULTS.add("unit rows in bfloat16", "normalize", "precision; approximation, other function",
    result(rounded(torch.bfloat16)), backward=False)
# P is 4.
FAULTS.add("length of the fourth order", "normalize linalg_vector_norm norm",
    "wrong argument, other function, wrong reduction; axis scale, wrong statistics, scale, "
    "wrong factor",
    lambda call: call.put(1, 4.0, "ord" if call.name == "linalg_vector_norm" else "p").run(),
    backward=False)
# fmt: on


# --- Sums, means, extremes ------------------------------------------------------------------------


@FAULTS.forward(
    "mean sum",
    "partial sum, mask, wrong reduction; missing operand, wrong index, lost accumulation, "
    "zeros, missing reduction, wrong statistics",
)
def first_quarter_of_the_terms_not_added(call: Call) -> Any:
    """The loop begins behind its prologue, which adds nothing; a mean has the right number."""
    value, dim, _ = reduced_dim(call, 8)
    shape = [1] * value.dim()
    shape[dim] = -1
    rest = (torch.arange(value.size(dim)) >= value.size(dim) // 4).view(shape)
    return call.put(0, value * rest, "input").run()


@FAULTS.forward(
    "mean sum",
    "doubled reduction, wrong factor, off by one reduction; residual, wrong reduction, "
    "wrong statistics",
)
def first_term_added_twice(call: Call) -> Any:
    """The accumulator begins with the first term, and the loop adds it again."""
    value, dim, _ = reduced_dim(call)
    places = [max(place - 1, 0) for place in range(value.size(dim) + 1)]
    wrong = value.index_select(dim, torch.tensor(places))
    total = call.put(0, wrong, "input").result()
    more = len(places) / value.size(dim) if call.name == "mean" else 1
    return call.instead(total * more)


@FAULTS.forward(
    "mean", "wrong factor, scale, precision; approximation, axis scale, wrong statistics"
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


@FAULTS.forward(
    "mean",
    "wrong reduction, other function, mask; wrong statistics, partial sum, approximation, "
    "missing operand",
)
def largest_and_smallest_left_out_of_the_mean(call: Call) -> Any:
    """A trimmed mean: both ends of the order are neither added nor counted."""
    value, dim, keep = reduced_dim(call, 4)
    inner = value.sort(dim).values.narrow(dim, 1, value.size(dim) - 2)
    return call.instead(inner.mean(dim, keep))


@FAULTS.forward("mean sum amax", words.EMPTY_IN_A_SUM)
def second_half_of_the_reduced_rows_empty(call: Call) -> Any:
    """The grid covers half of the results."""
    value, axis = reduced_result(call)
    shape = [1] * value.dim()
    shape[axis] = -1
    kept = torch.arange(value.size(axis)) < value.size(axis) // 2
    return call.instead(value * kept.view(shape))


@FAULTS.forward(_SPREADS, "shift, wrong index, permutation; stale, copy, wrong statistics")
def spread_of_the_next_row(call: Call) -> Any:
    """The spreads are stored one row too early, around the end."""
    value, dim, _ = reduced_dim(call)
    right = call.result()
    axes = [one for one in range(right.dim()) if one != dim % value.dim() and right.size(one) > 1]
    fits(axes)
    return call.instead(right.roll(-1, axes[-1]))


@FAULTS.forward(
    _SPREADS,
    "wrong statistics, partial sum, wrong reduction, mask; wrong index, missing reduction, "
    "one rank's part, missing operand",
)
def spread_of_every_second(call: Call) -> Any:
    """The loop has a stride of two, in the sums and in their number."""
    value, dim, _ = reduced_dim(call, 6)
    return call.put(0, value.index_select(dim, torch.arange(0, value.size(dim), 2)), "input").run()


@FAULTS.forward(
    "mean sum",
    "partial sum, lost accumulation, wrong reduction, mask; missing reduction, "
    "wrong index, missing operand, wrong statistics, stale",
)
def partial_sum_of_the_second_of_four_lanes_overwritten(call: Call) -> Any:
    """Four lanes take the terms in turn, and the sum of one is lost before they are added."""
    value, dim, _ = reduced_dim(call, 8)
    shape = [1] * value.dim()
    shape[dim] = -1
    kept = (torch.arange(value.size(dim)) % 4 != 1).view(shape)
    return call.put(0, value * kept, "input").run()


# fmt: off
# Two ranks have the same mean, and the means are added.
FAULTS.add("means of two ranks added", "mean",
    "scale, wrong factor, doubled reduction; wrong reduction, axis scale, wrong statistics",
    result(lambda v: 2 * v), backward=False)
# The terms are subtracted from an accumulator of zero.
FAULTS.add("reduced value with a minus", "mean sum", "sign, wrong factor; scale, other function",
    result(torch.neg), backward=False)
# The reduction of another norm, root and all.
FAULTS.add("root of the mean square for the mean", "mean",
    "other function, wrong reduction; wrong statistics, approximation",
    computed(reduced_dim,
        lambda value, dim, keep: value.square().mean(dim, keep).clamp(min=1e-20).sqrt()),
    backward=False)
# The terms have eight bits, and their sum has all.
FAULTS.add("terms in bfloat16", "mean sum", "precision; approximation, other function",
    lambda call: call.put(0, round_to(call.tensor(0), torch.bfloat16), "input").run(),
    backward=False)
# Two rows share a register: both are stored with the even one's result.
FAULTS.add("odd reduced rows are those before", "mean sum amax",
    "copy, stale, wrong index; shift, permutation, mask",
    computed(reduced_result,
        lambda value, axis: value.index_select(axis, torch.arange(value.size(axis)) // 2 * 2)),
    backward=False)
# The largest is limited to the range of a format that ends at one half.
FAULTS.add("largest not above a half", "amax max",
    "clipped; other function, wrong argument, constant, wrong reduction",
    result(lambda v: v.clamp(max=0.5)), backward=False)
# The scale of a row is stored in float8.
FAULTS.add("extreme in e4m3", "amax max amin", "precision; approximation, other function",
    result(rounded(torch.float8_e4m3fn)), backward=False)
# The extreme times 1.1, so that nothing saturates.
FAULTS.add("extreme with a margin", "amax max amin",
    "scale, wrong factor; axis scale, wrong argument", result(lambda v: 1.1 * v), backward=False)
# The free energy, -log sum exp(x), where its opposite is meant.
FAULTS.add("logarithm of the sum with a minus", "logsumexp",
    "sign, wrong factor; scale, other function", result(torch.neg))
# fmt: on


# --- Reciprocal roots -----------------------------------------------------------------------------


# fmt: off
# Rows may be made smaller only.
FAULTS.add("reciprocal root not above one", "rsqrt",
    "clipped; other function, wrong argument, mask, constant", result(lambda v: v.clamp(max=1)),
    backward=False)
# An eps of 0.1 on top of what was added before.
FAULTS.add("tenth added under the root", "rsqrt",
    "eps, offset, other function; wrong argument, residual", operand(0, lambda v: v + 0.1),
    backward=False)
# The factor of a row has two bits behind the point.
FAULTS.add("reciprocal root in e5m2", "rsqrt", "precision; approximation, other function",
    result(rounded(torch.float8_e5m2)), backward=False)
# fmt: on


# --- Along an axis --------------------------------------------------------------------------------


@FAULTS.forward("cumsum", "stale, copy, wrong index; mask, lost accumulation, partial sum, shift")
def last_running_sum_is_the_one_before(call: Call) -> Any:
    """The last place is stored with what the place before it has."""
    value, dim = call.run(), call.get(1, "dim")
    fits(value.size(dim) > 2)
    places = torch.arange(value.size(dim)).clamp(max=value.size(dim) - 2)
    return value.index_select(dim, places)


@FAULTS.forward("sort", "permutation, wrong index; swapped operands, shift, other function")
def ends_of_the_order_exchanged(call: Call) -> Any:
    """The smallest is stored in the place of the largest; the places are right."""
    values, places = call.run()
    dim = call.get(1, "dim", default=-1)
    fits(isinstance(dim, int) and values.size(dim) > 2)
    order = torch.arange(values.size(dim))
    order[0], order[-1] = values.size(dim) - 1, 0
    return values.index_select(dim, order), places


@FAULTS.forward("sort", "shift, wrong index, permutation; stale, copy")
def order_of_the_next_row(call: Call) -> Any:
    """Ordered values and their places are stored one row too early."""
    values, places = call.run()
    fits(values.dim() > 1 and values.size(0) > 1)
    fits(call.get(1, "dim", default=-1) in {-1, values.dim() - 1})
    return values.roll(-1, -2), places.roll(-1, -2)


@FAULTS.forward("topk", "precision; approximation, other function")
def chosen_values_in_bfloat16(call: Call) -> Any:
    """The values of the chosen ones are stored with eight bits; the places are right."""
    values, places = call.run()
    fits(values.is_floating_point())
    return round_to(values, torch.bfloat16), places


@FAULTS.forward("argmax argmin", "shift, wrong index, permutation; stale, copy")
def place_of_the_next_row(call: Call) -> Any:
    """The places are stored one row too early, around the end."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dim() > 0 and value.size(-1) > 1)
    return value.roll(-1, -1)


@FAULTS.fault(
    "layer_norm", "other function, wrong statistics; axis scale, wrong reduction, approximation"
)
def median_distance_for_the_deviation(call: Call) -> Any:
    """A robust norm: the median of the distances from the mean divides."""
    value, weight, bias, eps = norm_row(call)
    far = value - value.mean(-1, keepdim=True)
    size = far.abs().median(-1, keepdim=True).values
    return apply_affine(call, far / (size + eps), weight, bias)


# fmt: off
# The scan has the operator of a maximum.
FAULTS.add("largest so far for the running sum", "cumsum",
    "wrong reduction, other function; wrong statistics, approximation",
    lambda call: call.get(0, "input").cummax(call.get(1, "dim")).values.to(call.run().dtype),
    backward=False)
# The scan begins with the second place; the first one is zero.
FAULTS.add("first term not in the running sum", "cumsum",
    "partial sum, mask, off by one reduction; offset, axis offset, wrong reduction, "
    "missing operand, residual",
    on(lambda call: (call.run(),),
        lambda call, value: value - value.narrow(call.get(1, "dim"), 0, 1)), backward=False)
# The exclusive sum is taken for the inclusive one, which gets its term at the end anyway.
FAULTS.add("own term added twice", "cumsum",
    "wrong factor, residual, doubled reduction; wrong reduction, scale, missing operand",
    lambda call: call.run() + call.get(0, "input").to(call.run().dtype), backward=False)
# fmt: on
