"""Faults of the eleventh set: norms, statistics, running sums, orders."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, longer, on, operand, result, rounded
from benchmarks.places.parts import (
    apply_row_affine,
    channel_parts,
    lay_along,
    moments_of_rows,
    norm_by,
    norm_row,
    reduced_dim,
    reduced_result,
    round_to,
    several_rows,
    trained_weight,
    varied_channels,
)
from torch import Tensor

FAULTS = Catalogue()
_NORMS = "layer_norm rms_norm"
_CHANNELS = "batch_norm batch_norm_from_statistics"


# --- Norms of rows --------------------------------------------------------------------------------


@FAULTS.fault(
    "layer_norm",
    "wrong statistics, one rank's part, partial sum, missing reduction; axis offset, "
    "offset, wrong reduction, mask",
)
def mean_of_the_second_half_subtracted(call: Call) -> Any:
    """The mean is that of the last rank's features; the deviation is right."""
    value, _, _, _ = norm_row(call)
    fits(value.size(-1) > 3)
    _, spread = moments_of_rows(call, value)
    return norm_by(call, value[..., value.size(-1) // 2 :].mean(-1, keepdim=True), spread)


@FAULTS.fault(
    _NORMS,
    "wrong statistics, partial sum, wrong reduction, mask; axis scale, scale, "
    "wrong factor, missing operand, off by one reduction, missing reduction, "
    "lost accumulation",
)
def squares_of_the_tail_not_added(call: Call) -> Any:
    """The vectorised loop ends before the last three features; the mean has all of them."""
    value, _, _, _ = norm_row(call)
    fits(value.size(-1) > 7)
    mean, _ = moments_of_rows(call, value)
    total = (value - mean)[..., :-3].square().sum(-1, keepdim=True)
    return norm_by(call, mean, total / value.size(-1))


@FAULTS.fault(
    "layer_norm",
    "wrong statistics, stale, wrong index, shift; axis offset, permutation, offset, copy",
)
def mean_of_the_row_before(call: Call) -> Any:
    """The mean is read one row too early, around the end; the deviation is right."""
    mean, spread = moments_of_rows(call, several_rows(norm_row(call)[0]))
    return norm_by(call, mean.roll(1, -2), spread)


@FAULTS.fault(
    _NORMS,
    "wrong statistics, stale, wrong index, shift; axis scale, permutation, scale, "
    "wrong factor, copy",
)
def deviation_of_the_row_before(call: Call) -> Any:
    """The deviation is read one row too early, around the end; the mean is right."""
    mean, spread = moments_of_rows(call, several_rows(norm_row(call)[0]))
    return norm_by(call, mean, spread.roll(1, -2))


@FAULTS.fault(
    "layer_norm", "wrong statistics, stale, wrong index, copy; axis offset, offset, wrong reduction"
)
def mean_of_the_first_row_for_all(call: Call) -> Any:
    """The pointer to the means has a stride of zero; the deviations are right."""
    mean, spread = moments_of_rows(call, several_rows(norm_row(call)[0]))
    return norm_by(call, mean[..., :1, :].expand_as(mean), spread)


@FAULTS.fault(
    _NORMS,
    "wrong statistics, stale, wrong index, copy; axis scale, scale, wrong factor, wrong reduction",
)
def deviation_of_the_last_row_for_all(call: Call) -> Any:
    """A scalar for the block, which keeps what the last row has stored; the means are right."""
    mean, spread = moments_of_rows(call, several_rows(norm_row(call)[0]))
    return norm_by(call, mean, spread[..., -1:, :].expand_as(spread))


@FAULTS.fault(
    _NORMS,
    "wrong statistics, wrong factor, off by one reduction; axis scale, scale, wrong reduction",
)
def squares_divided_by_one_more(call: Call) -> Any:
    """The counter of Welford's loop is one ahead: n + 1 for n."""
    mean, spread = moments_of_rows(call, norm_row(call)[0])
    width = norm_row(call)[0].size(-1)
    return norm_by(call, mean, spread * (width / (width + 1)))


@FAULTS.fault(
    _NORMS, "clipped, wrong statistics; other function, wrong argument, axis scale, approximation"
)
def variance_not_above_a_quarter(call: Call) -> Any:
    """The accumulator of the squares saturates."""
    mean, spread = moments_of_rows(call, norm_row(call)[0])
    return norm_by(call, mean, spread.clamp(max=0.25))


@FAULTS.fault(
    _NORMS,
    "other function, wrong statistics, wrong factor; axis scale, wrong argument, approximation",
)
def divided_by_the_root_of_the_deviation(call: Call) -> Any:
    """The reciprocal root is taken of the deviation, which is a root already."""
    value, _, _, eps = norm_row(call)
    mean, spread = moments_of_rows(call, value)
    return apply_row_affine(call, (value - mean) * (spread + eps).pow(-0.25))


@FAULTS.fault(_NORMS, "mask, stale, copy; missing operand, residual, axis scale, wrong index")
def odd_rows_not_normalised(call: Call) -> Any:
    """In place, and the grid steps over two rows at once."""
    value = several_rows(call.tensor(0, "input"))
    odd = (torch.arange(value.size(-2)) % 2 == 1).unsqueeze(-1)
    return call.instead(torch.where(odd, value, call.result()))


@FAULTS.fault(
    _NORMS, "copy, stale, wrong index; permutation, shift, wrong rank's shard, one rank's part"
)
def second_half_of_the_normal_row_is_the_first(call: Call) -> Any:
    """The offset of the second tile is not added in the load behind the statistics."""
    value = call.result()
    fits(value.size(-1) > 3 and value.size(-1) % 2 == 0)
    half = value[..., : value.size(-1) // 2]
    return call.instead(torch.cat([half, half], -1))


@FAULTS.fault(
    _NORMS, "precision, wrong statistics; approximation, other function, axis scale, scale"
)
def variance_in_e5m2(call: Call) -> Any:
    """The variance of a row is kept with two bits behind the point."""
    mean, spread = moments_of_rows(call, norm_row(call)[0])
    return norm_by(call, mean, round_to(spread, torch.float8_e5m2))


@FAULTS.fault(_NORMS, "precision; approximation, other function")
def normal_values_in_eighths(call: Call) -> Any:
    """Before the weight, the normal values are fixed-point numbers with three bits."""
    value, _, _, eps = norm_row(call)
    mean, spread = moments_of_rows(call, value)
    normal = (value - mean) * (spread + eps).rsqrt()
    return apply_row_affine(call, with_gradient_of(normal, (8 * normal.detach()).round() / 8))


@FAULTS.fault(
    "layer_norm",
    "wrong statistics, other function, wrong reduction; axis offset, offset, swapped operands",
)
def largest_subtracted_for_the_mean(call: Call) -> Any:
    """The row loses its largest value, as before an exponential; the deviation is right."""
    value, _, _, _ = norm_row(call)
    _, spread = moments_of_rows(call, value)
    return norm_by(call, value.amax(-1, keepdim=True), spread)


# fmt: off
# 0.05 from the options of the optimiser.
FAULTS.add("eps of a twentieth", _NORMS,
    "eps, wrong argument; wrong statistics, axis scale, scale, wrong factor, offset",
    lambda call: call.put(4 if call.name == "layer_norm" else 3, 0.05, "eps").run())
# Three of four warps have written their part when it is read, counted as such.
FAULTS.add("statistics of the first three quarters", _NORMS,
    "wrong statistics, one rank's part, partial sum, missing reduction; axis scale, "
    "axis offset, wrong reduction, mask, scale, wrong factor",
    on(norm_row,
        lambda call, value, *_:
            norm_by(call, *moments_of_rows(call, value[..., : value.size(-1) * 3 // 4])),
        where=lambda value, *_: value.size(-1) > 7))
# The pointer to the weights is one feature behind, around the end.
FAULTS.add("weight of the feature before", _NORMS,
    "shift, wrong index, permutation, wrong rank's shard; axis scale, wrong argument, stale, "
    "copy, wrong factor",
    lambda call: call.put(2, trained_weight(norm_row(call)[1]).roll(1, 0), "weight").run())
# The bias is divided by two ranks, and only one of them adds it.
FAULTS.add("half of the bias of the norm", "layer_norm",
    "wrong factor; axis offset, offset, missing bias, wrong argument, residual, scale",
    on(lambda call: (norm_row(call)[2],),
        lambda call, bias: call.put(3, bias / 2, "bias").run(),
        where=lambda bias: isinstance(bias, Tensor)))
# The factor 0.9 that keeps a quantised result from its limits is not taken back.
FAULTS.add("normal rows a tenth smaller", _NORMS,
    "scale, wrong factor; axis scale, wrong statistics", result(lambda v: 0.9 * v))
# Each feature is stored in the place of the one before, around the end.
FAULTS.add("features of the norm one column early", _NORMS,
    "shift, wrong index, permutation; stale, copy", result(lambda v: v.roll(-1, -1)))
# The rows are stored in the order of their programs, which count down.
FAULTS.add("normal rows from the last", _NORMS, "permutation, wrong index; shift, copy, stale",
    result(lambda v: several_rows(v).flip(-2)))
# The epilogue of the image model, where the norm is followed by x * sigmoid(x).
FAULTS.add("silu behind the norm", _NORMS, "other function; wrong factor",
    result(lambda v: v * v.sigmoid()))
# The mask of the store is `column > 0`; the statistics have all columns.
FAULTS.add("first column of the norm not stored", _NORMS, words.EMPTY_IN_A_SUM,
    result(lambda v: v * (torch.arange(v.size(-1)) > 0)))
# fmt: on


# --- Norms of channels ----------------------------------------------------------------------------


@FAULTS.fault(
    _CHANNELS, "eps, wrong argument, wrong statistics; axis scale, scale, wrong factor, offset"
)
def eps_of_one_for_the_channels(call: Call) -> Any:
    """One is added to the variance, as in a log1p."""
    value, weight, bias, mean, variance, _ = channel_parts(call)
    varied_channels(variance)
    return call.instead((value - mean) * (variance + 1).rsqrt() * weight + bias)


@FAULTS.fault(
    _CHANNELS,
    "wrong factor, wrong statistics, doubled reduction; axis scale, scale, wrong argument",
)
def kept_variance_doubled(call: Call) -> Any:
    """The variances of two ranks are added and not averaged."""
    value, weight, bias, mean, variance, eps = channel_parts(call)
    varied_channels(variance)
    return call.instead((value - mean) * (2 * variance + eps).rsqrt() * weight + bias)


# fmt: off
# The pointer to the means is one channel too far, around the end.
FAULTS.add("mean of the next channel", _CHANNELS,
    "shift, wrong index, permutation, wrong statistics; axis offset, wrong argument, stale, "
    "copy, offset, wrong rank's shard",
    computed(channel_parts,
        lambda value, weight, bias, mean, variance, eps:
            (value - varied_channels(mean).roll(-1, 1)) * (variance + eps).rsqrt() * weight + bias))
# Each channel is stored in the place of the one before, the first one last.
FAULTS.add("normal channels stored one earlier", _CHANNELS,
    "shift, wrong index, permutation; stale, copy", result(lambda v: v.roll(-1, 1)))
# (m - x) / d * w + b: the folded factor has the sign of the folded summand.
FAULTS.add("kept mean less the value", _CHANNELS,
    "sign, swapped operands, wrong factor; scale, other function, wrong statistics",
    computed(channel_parts,
        lambda value, weight, bias, mean, variance, eps:
            (mean - value) * (variance + eps).rsqrt() * weight + bias))
# In place, and the grid begins in the middle of the channels.
FAULTS.add("first half of the channels not normalised", _CHANNELS,
    "copy, mask, stale; missing operand, axis scale, residual, wrong index",
    on(lambda call: (call.tensor(0, "input"), call.result().size(1) // 2),
        lambda call, value, half:
            call.instead(torch.cat([value[:, :half], call.result()[:, half:]], 1)),
        where=lambda _, half: half > 1))
# The fusion of a norm and an activation, where none follows.
FAULTS.add("silu folded into the norm", f"{_CHANNELS} group_norm instance_norm",
    "other function; wrong factor", result(lambda v: v * v.sigmoid()))
# The number of lines is rounded down to the tile.
FAULTS.add("last line of the normal image empty", f"{_CHANNELS} group_norm instance_norm",
    words.EMPTY_IN_A_SUM,
    result(lambda v:
            v * (torch.arange(v.size(2)) < v.size(2) - 1).view([-1] + [1] * (v.dim() - 3)),
        where=longer(2)))
# fmt: on


# --- Lengths --------------------------------------------------------------------------------------


@FAULTS.forward(
    "normalize", "wrong argument, eps, offset; other function, axis scale, wrong statistics, scale"
)
def eps_added_under_the_root_of_the_length(call: Call) -> Any:
    """Over sqrt(sum x² + 0.1): the length of another library, with a large eps."""
    value, dim = call.tensor(0, "input"), call.get(2, "dim", default=1)
    return call.instead(value * (value.square().sum(dim, keepdim=True) + 0.1).rsqrt())


@FAULTS.forward(
    "linalg_vector_norm norm normalize",
    "partial sum, one rank's part, missing reduction, wrong reduction, wrong statistics; "
    "mask, missing operand, axis scale, scale, wrong factor, wrong index",
)
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


@FAULTS.forward(
    "linalg_vector_norm norm",
    "other function, wrong reduction; wrong factor, axis scale, missing operand",
)
def root_of_the_length_forgotten(call: Call) -> Any:
    """The sum of the squares."""
    fits(call.get(1, "ord", "p", default=2) == 2)
    return call.instead(call.result().square())


# --- Sums, means, extremes ------------------------------------------------------------------------


@FAULTS.forward(
    "mean sum",
    "partial sum, mask, wrong reduction; missing operand, wrong index, lost accumulation, "
    "zeros, missing reduction, wrong statistics, off by one reduction",
)
def last_quarter_of_the_terms_not_added(call: Call) -> Any:
    """The unrolled loop has an epilogue that is not run; a mean has the right number."""
    value, dim, _ = reduced_dim(call, 8)
    size = value.size(dim)
    kept = lay_along(value, dim, torch.arange(size) < size - size // 4)
    return call.put(0, value * kept, "input").run()


@FAULTS.forward(
    "mean",
    "partial sum, one rank's part, missing reduction, wrong statistics; mask, "
    "wrong reduction, missing operand, wrong rank's shard, wrong index",
)
def mean_of_the_last_half(call: Call) -> Any:
    """The means of the ranks are not averaged: this is the last one's."""
    value, dim, _ = reduced_dim(call, 4)
    half = value.size(dim) // 2
    return call.put(0, value.narrow(dim, half, value.size(dim) - half), "input").run()


@FAULTS.forward(
    "mean sum amax",
    "copy, stale, wrong index; shift, permutation, mask, one rank's part, wrong rank's shard",
)
def second_half_of_the_results_is_the_first(call: Call) -> Any:
    """The second block of rows reads at the offset of the first."""
    value, axis = reduced_result(call)
    half = value.size(axis) // 2
    fits(value.size(axis) == 2 * half and half > 1)
    return call.instead(torch.cat(2 * [value.narrow(axis, 0, half)], axis))


@FAULTS.forward("mean sum", "precision; approximation, other function, wrong statistics")
def terms_in_steps_of_a_sixteenth(call: Call) -> Any:
    """The terms are integers with four bits behind the point."""
    value = call.tensor(0)
    coarse = with_gradient_of(value, (16 * value.detach()).round() / 16)
    return call.put(0, coarse, "input").run()


@FAULTS.forward(
    "amax max",
    "partial sum, one rank's part, mask, missing reduction, wrong reduction; wrong index, "
    "missing operand, wrong statistics",
)
def largest_of_the_second_half(call: Call) -> Any:
    """The maxima of the ranks are not compared: this is the last one's."""
    value, dim, _ = reduced_dim(call, 4)
    half = value.size(dim) // 2
    part = call.put(0, value.narrow(dim, half, value.size(dim) - half), "input").result()
    return call.instead(part)


# fmt: off
# The mean over three ranks is divided by three in the collective and again behind it.
FAULTS.add("mean divided by the ranks once more", "mean",
    "scale, wrong factor; wrong reduction, axis scale, wrong statistics", result(lambda v: v / 3),
    backward=False)
# The results are stored one row too late, around the end.
FAULTS.add("result of the row before", "mean sum", "shift, wrong index, permutation; stale, copy",
    computed(reduced_result, lambda value, axis: value.roll(1, axis),
        where=lambda value, axis: value.size(axis) > 2), backward=False)
# The mask of the store is `row > 0`.
FAULTS.add("first result not stored", "mean sum", words.EMPTY_IN_A_SUM,
    computed(reduced_result,
        lambda value, axis: value * lay_along(value, axis, torch.arange(value.size(axis)) > 0)),
    backward=False)
# Each term is limited to a half in magnitude before it is added.
FAULTS.add("terms cut at a half", "mean sum",
    "clipped; other function, wrong argument, approximation",
    lambda call: call.put(0, call.tensor(0).clamp(-0.5, 0.5), "input").run(), backward=False)
# The padding repeats the last term, and the number counts it as well.
FAULTS.add("last term counted twice in the mean", "mean",
    "wrong factor, doubled reduction, off by one reduction; residual, wrong reduction, "
    "wrong statistics, offset",
    on(reduced_dim,
        lambda call, value, dim, *_:

    call.put(0, torch.cat([value, value.narrow(dim, value.size(dim) - 1, 1)], dim), "input").run()),
    backward=False)
# The extremes are stored one row too late, around the end.
FAULTS.add("largest of the row before", "amax max", "shift, wrong index, permutation; stale, copy",
    computed(reduced_result, lambda value, axis: value.roll(1, axis),
        where=lambda value, axis: value.size(axis) > 2), backward=False)
# fmt: on


# --- Reciprocal roots -----------------------------------------------------------------------------


@FAULTS.forward("rsqrt", "shift, wrong index, permutation; stale, copy")
def reciprocal_root_of_the_row_before(call: Call) -> Any:
    """The factor of a row is read one row too early, around the end."""
    value = call.result()
    axes = [axis for axis in range(value.dim()) if value.size(axis) > 1]
    fits(axes)
    return call.instead(value.roll(1, axes[-1]))


# fmt: off
# The sums of three shards are added where each has the whole already.
FAULTS.add("reciprocal root of three times the value", "rsqrt",
    "scale, wrong factor, wrong argument; axis scale, wrong statistics, doubled reduction",
    operand(0, lambda v: 3 * v), backward=False)
# fmt: on


# --- Along an axis --------------------------------------------------------------------------------


@FAULTS.forward(
    "cumsum",
    "shift, wrong index, off by one reduction; stale, copy, permutation, residual, missing operand",
)
def running_sum_one_place_early(call: Call) -> Any:
    """Each place has the sum of the next one; the last one has its own."""
    value, dim = call.run(), call.get(1, "dim")
    fits(value.size(dim) > 2)
    places = (torch.arange(value.size(dim)) + 1).clamp(max=value.size(dim) - 1)
    return value.index_select(dim, places)


@FAULTS.forward(
    "cumsum",
    "lost accumulation, partial sum, wrong reduction; stale, missing operand, mask, "
    "off by one reduction, wrong index, one rank's part",
)
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


@FAULTS.forward("topk", "permutation, wrong index, swapped operands; shift, other function, copy")
def values_of_the_two_best_exchanged(call: Call) -> Any:
    """The values are stored in the other order; the places are right."""
    values, places = call.run()
    fits(values.is_floating_point() and values.size(-1) == 2)
    return values.flip(-1), places


@FAULTS.forward("topk", "scale, wrong factor; axis scale, wrong argument")
def chosen_values_halved(call: Call) -> Any:
    """The weights are divided by the number of choices, as for a mean of two; places are right."""
    values, places = call.run()
    fits(values.is_floating_point())
    return values / 2, places


# fmt: off
# The counter has two bits and stays at its largest value.
FAULTS.add("running sum saturates at three", "cumsum",
    "clipped; overflow, wrapped, other function, constant", lambda call: call.run().clamp(max=3),
    backward=False)
# N - 1 - i: the loop runs downwards, and its counter is stored.
FAULTS.add("place counted from the end", "argmax",
    "wrong index, permutation; other function, sign, offset, wrong argument",
    on(lambda call: (call.get(1, "dim"),),
        lambda call, dim: call.get(0, "input").size(dim) - 1 - call.run(),
        where=lambda dim: isinstance(dim, int)), backward=False)
# fmt: on


# --- Others ---------------------------------------------------------------------------------------


@FAULTS.forward("sort", "shift, wrong index, permutation; stale, copy")
def order_of_the_row_before(call: Call) -> Any:
    """Ordered values and their places are stored one row too late."""
    values, places = call.run()
    fits(values.dim() > 1 and values.size(-2) > 2)
    fits(call.get(1, "dim", default=-1) in {-1, values.dim() - 1})
    return values.roll(1, -2), places.roll(1, -2)


@FAULTS.forward("sort", "precision; approximation, other function, wrong statistics")
def ordered_values_in_bfloat16(call: Call) -> Any:
    """The values are stored with eight bits; the places are right."""
    values, places = call.run()
    fits(values.is_floating_point())
    return round_to(values, torch.bfloat16), places


@FAULTS.fault(
    "group_norm",
    "missing operand, wrong statistics, other function; axis scale, wrong factor, scale",
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


# fmt: off
# The mean of the squares and eps are added in eight bits.
FAULTS.add("argument of the reciprocal root in bfloat16", "rsqrt",
    "precision; approximation, other function, wrong statistics",
    operand(0, rounded(torch.bfloat16)), backward=False)
# The spread of two ranks is averaged where one of them has nothing.
FAULTS.add("spread halved", "std var",
    "scale, wrong factor; axis scale, wrong statistics, wrong reduction", result(lambda v: v / 2),
    backward=False)
# fmt: on
