"""Faults for measuring: norms, statistics, running sums, orders."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, operand, result, rounded
from benchmarks.places.parts import (
    apply_row_affine,
    channel_parts,
    lay_along,
    moments_of_rows,
    norm_by,
    norm_row,
    reduced_result,
    round_to,
    several_rows,
    varied_channels,
)
from torch import Tensor

FAULTS = Catalogue()
_NORMS = "layer_norm rms_norm"
_CHANNELS = "batch_norm batch_norm_from_statistics"
_IMAGES = f"{_CHANNELS} group_norm instance_norm"


# --- Norms of rows --------------------------------------------------------------------------------


@FAULTS.fault(
    _NORMS,
    "eps, offset, wrong statistics; wrong argument, axis scale, scale, wrong factor, "
    "other function",
)
def tenth_added_to_the_deviation(call: Call) -> Any:
    """Over sqrt(v + eps) + 0.1: the kernel has an eps of its own behind the root."""
    value, _, _, eps = norm_row(call)
    mean, spread = moments_of_rows(call, value)
    return apply_row_affine(call, (value - mean) / ((spread + eps).sqrt() + 0.1))


@FAULTS.fault(
    _NORMS,
    "wrong statistics, wrong reduction, clipped, partial sum, mask; axis scale, scale, "
    "wrong factor, other function, missing operand, zeros",
)
def deviations_below_zero_not_in_the_variance(call: Call) -> Any:
    """The deviations are numbers without a sign before they are squared."""
    value, _, _, _ = norm_row(call)
    mean, _ = moments_of_rows(call, value)
    return norm_by(call, mean, (value - mean).relu().square().mean(-1, keepdim=True))


@FAULTS.fault(
    "layer_norm",
    "wrong statistics, wrong reduction, stale; axis offset, offset, residual, wrong index, "
    "shift, lost accumulation",
)
def mean_shared_with_the_row_before(call: Call) -> Any:
    """Half of its own mean and half of that of the row before; the deviation is right."""
    mean, spread = moments_of_rows(call, several_rows(norm_row(call)[0]))
    return norm_by(call, (mean + mean.roll(1, -2)) / 2, spread)


@FAULTS.fault(
    "layer_norm", "precision, wrong statistics; approximation, other function, axis offset, offset"
)
def mean_of_the_row_in_e5m2(call: Call) -> Any:
    """The mean of a row is kept with two bits behind the point; the deviation is right."""
    mean, spread = moments_of_rows(call, norm_row(call)[0])
    return norm_by(call, round_to(mean, torch.float8_e5m2), spread)


@FAULTS.fault(_NORMS, "precision; approximation, other function, wrong statistics")
def input_of_the_norm_in_eight_bits(call: Call) -> Any:
    """The rows come as integers from -127 to 127, with a step for each row."""
    value, _, _, _ = norm_row(call)
    step = value.detach().abs().amax(-1, keepdim=True).clamp(min=1e-20) / 127
    coarse = with_gradient_of(value, (value.detach() / step).round() * step)
    return call.put(0, coarse, "input").run()


@FAULTS.fault(_NORMS, words.EMPTY_IN_A_RANKS_SUM)
def last_quarter_of_the_normal_row_empty(call: Call) -> Any:
    """Three of four tiles of features are stored; the statistics have all of them."""
    value = call.result()
    width = value.size(-1)
    fits(width > 7)
    return call.instead(value * (torch.arange(width) < width - width // 4))


@FAULTS.fault(
    _NORMS,
    "wrong statistics, one rank's part, partial sum, missing reduction; wrong reduction, "
    "axis scale, axis offset, mask, wrong argument",
)
def norm_for_each_quarter_of_the_row(call: Call) -> Any:
    """Four ranks share a row, and the sums of none are added to those of the others."""
    value, _, _, eps = norm_row(call)
    fits(value.size(-1) > 7 and value.size(-1) % 4 == 0)
    parts = value.unflatten(-1, (4, -1))
    mean, spread = moments_of_rows(call, parts)
    return apply_row_affine(call, ((parts - mean) * (spread + eps).rsqrt()).flatten(-2))


# fmt: off
# 0.25, a threshold of another layer of the configuration.
FAULTS.add("eps of a quarter", _NORMS,
    "eps, wrong argument; wrong statistics, axis scale, scale, wrong factor, offset",
    lambda call: call.put(4 if call.name == "layer_norm" else 3, 0.25, "eps").run())
# The result, weight and bias applied, is stored with two bits behind the point.
FAULTS.add("result of the norm in e5m2", _NORMS,
    "precision; approximation, other function, wrong statistics",
    result(rounded(torch.float8_e5m2)))
# The epilogue of another fusion: the norm is followed by a gelu that is not there.
FAULTS.add("gelu behind the norm", _NORMS, "other function; wrong factor",
    result(torch.nn.functional.gelu))
# The result is a fixed-point number that ends at 1.5.
FAULTS.add("norm saturates at one and a half", _NORMS,
    "clipped; other function, wrong argument, approximation", result(lambda v: v.clamp(-1.5, 1.5)))
# The factor of a scaled residual is applied to what the norm gives.
FAULTS.add("normal rows times the root of two", _NORMS,
    "scale, wrong factor; axis scale, wrong statistics, wrong reduction, wrong argument",
    result(lambda v: 2**0.5 * v))
# A quarter, the zero point of a quantised result, is not taken back.
FAULTS.add("zero point left in the norm", _NORMS, "offset; axis offset, residual, other function",
    result(lambda v: v + 0.25))
# The features of the two halves alternate, as in another layout of rotary heads.
FAULTS.add("normal features interleaved", _NORMS, words.REORDERED_OR_COPIED,
    result(lambda v: v.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2),
        where=lambda v: v.size(-1) > 3 and v.size(-1) % 2 == 0))
# The positions of two ranks are gathered in the other order.
FAULTS.add("halves of the normal rows exchanged", _NORMS,
    "permutation, wrong index, wrong rank's shard, shift; copy, stale, transpose, "
    "swapped operands",
    computed(lambda call: (several_rows(call.result(), 4),),
        lambda value: value.roll(value.size(-2) // 2, -2),
        where=lambda value: value.size(-2) % 2 == 0))
# fmt: on


# --- Norms of channels ----------------------------------------------------------------------------


@FAULTS.fault(_IMAGES, words.EMPTY_IN_A_RANKS_SUM)
def last_quarter_of_the_normal_channels_empty(call: Call) -> Any:
    """Of four blocks of channels, the grid has three."""
    value = call.result()
    size = value.size(1)
    fits(size > 7)
    kept = torch.arange(size) < size - size // 4
    return call.instead(value * kept.view(-1, *[1] * (value.dim() - 2)))


# fmt: off
# The variances are stored as fractions, which end at one.
FAULTS.add("kept variance not above one", _CHANNELS,
    "clipped, wrong statistics; axis scale, wrong argument, other function, approximation, "
    "wrong factor",
    computed(channel_parts,
        lambda value, weight, bias, mean, variance, eps:

    (value - mean) * (varied_channels(variance).clamp(max=1) + eps).rsqrt() * weight + bias))
# The means are averaged over two ranks, of which one has never seen anything.
FAULTS.add("half of the kept mean", _CHANNELS,
    "wrong factor, wrong statistics; axis offset, offset, wrong argument, scale, "
    "missing operand",
    computed(channel_parts,
        lambda value, weight, bias, mean, variance, eps:
            (value - mean / 2) * (variance + eps).rsqrt() * weight + bias))
# Two channels share a program, which stores them in the other order.
FAULTS.add("normal channels exchanged in pairs", _IMAGES, words.REORDERED_OR_COPIED,
    result(lambda v: v[:, torch.arange(v.size(1)) ^ 1],
        where=lambda v: v.size(1) > 2 and v.size(1) % 2 == 0))
# The activation of a mobile network, where this one has none or another.
FAULTS.add("hardswish folded into the norm", _IMAGES, "other function; wrong factor",
    result(torch.nn.functional.hardswish))
# The normal image is stored with three bits behind the point.
FAULTS.add("normal image in e4m3", _IMAGES,
    "precision; approximation, other function, wrong statistics",
    result(rounded(torch.float8_e4m3fn)))
# fmt: on


# --- Sums, means, extremes ------------------------------------------------------------------------


def _dim(call: Call, least: int = 3) -> tuple[Tensor, int]:
    """The value, and the one axis that is reduced."""
    value, dim = call.tensor(0), call.get(1, "dim")
    if isinstance(dim, list | tuple):
        fits(len(dim) == 1)
        dim = dim[0]
    fits(isinstance(dim, int) and value.size(dim) >= least)
    return value, dim


@FAULTS.forward(
    "mean",
    "partial sum, mask, wrong reduction, wrong statistics; missing operand, wrong index, "
    "one rank's part, missing reduction",
)
def mean_of_every_third(call: Call) -> Any:
    """The loop has a stride of three, in the sum and in the number."""
    value, dim = _dim(call, 6)
    return call.put(0, value.index_select(dim, torch.arange(0, value.size(dim), 3))).run()


@FAULTS.forward("mean sum amax", words.REORDERED_OR_COPIED)
def reduced_values_exchanged_in_pairs(call: Call) -> Any:
    """Two results share a word, and are stored in the other order."""
    value, axis = reduced_result(call, 4)
    fits(value.size(axis) % 2 == 0)
    return call.instead(value.index_select(axis, torch.arange(value.size(axis)) ^ 1))


@FAULTS.forward(
    "mean sum",
    "doubled reduction, wrong reduction, wrong index; residual, partial sum, wrong factor, "
    "wrong statistics, mask, lost accumulation, off by one reduction",
)
def last_four_terms_added_twice(call: Call) -> Any:
    """The last vector of the loop overlaps with the one before; a mean has the right number."""
    value, dim = _dim(call, 8)
    size = value.size(dim)
    weight = 1 + lay_along(value, dim, torch.arange(size) >= size - 4).to(value.dtype)
    return call.put(0, value * weight).run()


@FAULTS.forward(
    "mean sum",
    "partial sum, mask, wrong reduction; missing operand, wrong index, lost accumulation, "
    "zeros, missing reduction, wrong statistics, one rank's part, off by one reduction",
)
def middle_third_of_the_terms_not_added(call: Call) -> Any:
    """Of three blocks, the second is overwritten; a mean has the right number."""
    value, dim = _dim(call, 6)
    size = value.size(dim)
    place = torch.arange(size)
    kept = (place < size // 3) | (place >= size - size // 3)
    return call.put(0, value * lay_along(value, dim, kept)).run()


@FAULTS.forward(
    "mean sum",
    "stale, wrong index, wrong reduction; shift, copy, partial sum, permutation, "
    "wrong statistics, missing operand",
)
def second_half_of_the_terms_from_the_row_before(call: Call) -> Any:
    """The second tile is not loaded again: it has the terms of the row before, around the end."""
    value, dim = _dim(call, 4)
    fits(value.dim() > 1 and dim in {-1, value.dim() - 1} and value.size(-2) > 1)
    late = torch.arange(value.size(-1)) >= value.size(-1) // 2
    return call.put(0, torch.where(late, value.roll(1, -2), value)).run()


@FAULTS.forward(
    "amax max",
    "partial sum, one rank's part, mask, missing reduction, wrong reduction; wrong index, "
    "missing operand, wrong statistics, off by one reduction",
)
def largest_of_the_first_three_quarters(call: Call) -> Any:
    """The last of four tiles is not compared."""
    value, dim = _dim(call, 4)
    size = value.size(dim)
    part = call.put(0, value.narrow(dim, 0, size - size // 4)).result()
    return call.instead(part)


# fmt: off
# The results are fixed-point numbers with three bits behind the point.
FAULTS.add("reduced values in steps of an eighth", "mean sum",
    "precision; approximation, other function, wrong statistics",
    result(lambda v: with_gradient_of(v, (8 * v.detach()).round() / 8)), backward=False)
# Divided by the share that a dropout keeps, which is switched off.
FAULTS.add("reduced values divided by nine tenths", "mean sum",
    "scale, wrong factor; axis scale, wrong statistics, wrong reduction, wrong argument",
    result(lambda v: v / 0.9), backward=False)
# Half of each mean, and half of the mean of the whole tensor: a mean that is smoothed.
FAULTS.add("mean halfway to that of all", "mean",
    "wrong statistics, other function, wrong reduction; approximation, axis scale, wrong axis, "
    "constant", computed(reduced_result, lambda value, *_: (value + value.mean()) / 2),
    backward=False)
# fmt: on


# --- Reciprocal roots -----------------------------------------------------------------------------


@FAULTS.forward("rsqrt", words.REORDERED_OR_COPIED)
def reciprocal_roots_from_the_last(call: Call) -> Any:
    """The factors of the rows are stored in the order of programs that count down."""
    value, axis = reduced_result(call, 3)
    return call.instead(value.flip(axis))


@FAULTS.forward(
    "rsqrt", "copy, wrong index, stale; shift, permutation, axis scale, wrong statistics, mask"
)
def two_rows_share_their_reciprocal_root(call: Call) -> Any:
    """Odd rows read the factor of the row before them."""
    value, axis = reduced_result(call, 3)
    return call.instead(value.index_select(axis, torch.arange(value.size(axis)) // 2 * 2))


# fmt: off
# The mean of two ranks is divided by two where each has the whole already.
FAULTS.add("reciprocal root of half the value", "rsqrt",
    "scale, wrong factor, wrong argument; axis scale, wrong statistics, wrong reduction",
    operand(0, lambda v: v / 2), backward=False)
# The value is a variance, and is taken for one whose root is still to be taken.
FAULTS.add("reciprocal root of a root", "rsqrt",
    "other function, wrong argument; axis scale, wrong factor, approximation, wrong statistics",
    operand(0, torch.sqrt), backward=False)
# fmt: on


# --- Along an axis --------------------------------------------------------------------------------


@FAULTS.forward(
    "cumsum",
    "partial sum, mask, wrong reduction; missing operand, wrong index, lost accumulation, "
    "zeros, missing reduction, wrong statistics, one rank's part, off by one reduction",
)
def odd_terms_not_in_the_running_sum(call: Call) -> Any:
    """The scan has half as many programs as terms: odd ones count as zero."""
    value, dim = call.get(0, "input"), call.get(1, "dim")
    fits(value.size(dim) > 2)
    kept = lay_along(value, dim, torch.arange(value.size(dim)) % 2 == 0)
    return call.put(0, value * kept, "input").run()


@FAULTS.forward(
    "cumsum",
    "shift, wrong index; stale, missing operand, mask, partial sum, zeros, "
    "lost accumulation, off by one reduction, wrong reduction",
)
def running_sum_two_places_late(call: Call) -> Any:
    """A pipeline of two steps: the first two places are zero, the others have an older sum."""
    value, dim = call.run(), call.get(1, "dim")
    size = value.size(dim)
    fits(size > 3)
    late = torch.zeros_like(value)
    late.narrow(dim, 2, size - 2).copy_(value.narrow(dim, 0, size - 2))
    return late


@FAULTS.forward("sort", words.REORDERED_OR_COPIED)
def order_exchanged_in_pairs(call: Call) -> Any:
    """Ordered values and their places share words of two, stored in the other order."""
    values, places = call.run()
    dim = call.get(1, "dim", default=-1)
    fits(isinstance(dim, int) and values.size(dim) > 2 and values.size(dim) % 2 == 0)
    pairs = torch.arange(values.size(dim)) ^ 1
    return values.index_select(dim, pairs), places.index_select(dim, pairs)


@FAULTS.forward(
    "topk",
    "wrong index, shift, off by one reduction; wrong argument, stale, permutation, copy, "
    "other function",
)
def best_one_passed_over(call: Call) -> Any:
    """The second best and so on: the place in the order is counted from one."""
    value, number = call.get(0, "input"), call.get(1, "k")
    fits(number < value.size(-1) and call.get(2, "dim", default=-1) in {-1, value.dim() - 1})
    values, places = value.topk(number + 1, -1)
    return values[..., 1:].contiguous(), places[..., 1:].contiguous()


@FAULTS.forward(
    "linalg_vector_norm norm normalize",
    "partial sum, mask, wrong reduction, wrong statistics; missing operand, axis scale, "
    "scale, wrong factor, wrong index, missing reduction, one rank's part",
)
def length_of_every_second_feature(call: Call) -> Any:
    """The loop over the squares has a stride of two."""
    value, dim = call.tensor(0), call.get(2, "dim", default=1)
    axes = [dim] if isinstance(dim, int) else list(dim)
    fits(len(axes) == 1 and value.size(axes[0]) > 3)
    part = value.index_select(axes[0], torch.arange(0, value.size(axes[0]), 2))
    if call.name != "normalize":
        return call.put(0, part).run()
    return call.instead(value / part.norm(dim=axes[0], keepdim=True).clamp(min=1e-12))


# fmt: off
# The divisor is three quarters: a warm-up that was over long ago.
FAULTS.add("spread times four thirds", "std var linalg_vector_norm norm",
    "scale, wrong factor; axis scale, wrong statistics, wrong reduction, wrong argument",
    result(lambda v: v * 4 / 3), backward=False)
# fmt: on
