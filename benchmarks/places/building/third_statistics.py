"""Faults that were measured third and have been seen: norms, statistics and reductions."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, longer, on, operand, result
from benchmarks.places.parts import only_axis
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_ROWS = "layer_norm rms_norm"
_BATCH = "batch_norm batch_norm_from_statistics"


# --- Norms ----------------------------------------------------------------------------------------


def _row(call: Call) -> tuple[Tensor, list[int], Tensor, Tensor, float]:
    """The value, the axes of a row, weight and bias, and eps."""
    value, shape = call.tensor(0, "input"), call.get(1, "normalized_shape")
    axes = [*range(-len(shape), 0)]
    weight, bias = call.get(2, "weight"), None
    eps = call.get(3, "eps")
    if call.name == "layer_norm":
        bias, eps = call.get(3, "bias"), call.get(4, "eps", default=1e-5)
    weight = value.new_ones(*shape) if weight is None else weight
    bias = value.new_zeros(*shape) if bias is None else bias
    return value, axes, weight, bias, torch.finfo(value.dtype).eps if eps is None else eps


def _centred(call: Call) -> tuple[Tensor, Tensor]:
    """The value, without its mean for a layer norm, and the mean of its squares."""
    value, axes, *_ = _row(call)
    if call.name == "layer_norm":
        value = value - value.mean(axes, keepdim=True)
    return value, value.square().mean(axes, keepdim=True)


@FAULTS.fault(
    "layer_norm",
    "other function, swapped operands, wrong factor; axis offset, offset, repeated bias, residual",
)
def bias_added_before_the_weight(call: Call) -> Any:
    """(x + b) w instead of x w + b."""
    value, variance = _centred(call)
    _, _, weight, bias, eps = _row(call)
    return call.instead((value * (variance + eps).rsqrt() + bias) * weight)


@FAULTS.fault(_ROWS, "wrong factor, axis scale; scale, other function, residual, doubled reduction")
def weight_of_the_norm_applied_twice(call: Call) -> Any:
    """Once when it was folded into the norm, and once by itself."""
    value, variance = _centred(call)
    _, _, weight, bias, eps = _row(call)
    return call.instead(value * (variance + eps).rsqrt() * weight * weight + bias)


@FAULTS.fault(
    _ROWS,
    "scale, wrong statistics, wrong reduction, wrong factor; axis scale, "
    "missing reduction, off by one reduction, other function",
)
def squares_summed_without_a_division(call: Call) -> Any:
    """The length of the row for the root of its mean square."""
    value, variance = _centred(call)
    _, axes, weight, bias, eps = _row(call)
    count = value.size(-1) if len(axes) == 1 else value[0].numel()
    return call.instead(value * (variance * count + eps).rsqrt() * weight + bias)


@FAULTS.fault(
    _ROWS, "clipped, wrong statistics, eps; axis scale, scale, wrong factor, wrong argument"
)
def variance_has_a_floor(call: Call) -> Any:
    """Half of the rows have a smaller variance than what it is limited to."""
    value, variance = _centred(call)
    _, _, weight, bias, eps = _row(call)
    least = float(variance.detach().median())
    fits(variance.numel() > 2)
    return call.instead(value * (variance.clamp(min=least) + eps).rsqrt() * weight + bias)


@FAULTS.fault(_ROWS, "precision, wrong statistics; axis scale, approximation, axis offset")
def variance_as_a_difference_of_rounded_squares(call: Call) -> Any:
    """The mean of squares less the square of the mean, both in bfloat16."""
    value, axes, weight, bias, eps = _row(call)
    mean = value.mean(axes, keepdim=True) if call.name == "layer_norm" else 0 * value[..., :1]
    square = value.square().mean(axes, keepdim=True).bfloat16()
    variance = (square - mean.square().bfloat16()).to(value.dtype).clamp(min=0)
    return call.instead((value - mean) * (variance + eps).rsqrt() * weight + bias)


@FAULTS.fault(
    "layer_norm",
    "missing operand, other function, wrong statistics; axis scale, scale, wrong factor",
)
def mean_subtracted_and_nothing_divided(call: Call) -> Any:
    """The deviation is taken as 1."""
    value, _ = _centred(call)
    _, _, weight, bias, _ = _row(call)
    return call.instead(value * weight + bias)


@FAULTS.fault(_ROWS, "wrong statistics, wrong index, shift; axis scale, axis offset, stale, scale")
def deviation_of_the_next_row(call: Call) -> Any:
    """The mean is that of the row, the deviation that of the next."""
    value, variance = _centred(call)
    _, _, weight, bias, eps = _row(call)
    fits(variance.dim() > 1 and variance.size(-2) > 1)
    return call.instead(value * (variance.roll(-1, -2) + eps).rsqrt() * weight + bias)


def _running(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float]:
    value = call.tensor(0, "input")
    if call.name == "batch_norm":
        mean, variance = call.tensor(1, "running_mean"), call.tensor(2, "running_var")
        weight, bias, eps = (
            call.get(3, "weight"),
            call.get(4, "bias"),
            call.get(7, "eps", default=1e-5),
        )
    else:
        weight, bias, mean, variance = call.args[1:5]
        eps = call.args[6]
    return value, mean, variance, weight, bias, eps


@FAULTS.fault(_BATCH, "wrong statistics; axis offset, axis scale, wrong argument, stale, offset")
def statistics_mixed_with_those_of_the_batch(call: Call) -> Any:
    """The running mean is updated before it is used."""
    value, mean, *_ = _running(call)
    axes = [0, *range(2, value.dim())]
    place = 1 if call.name == "batch_norm" else 3
    return call.put(place, 0.5 * mean + 0.5 * value.mean(axes), "running_mean").run()


@FAULTS.fault(
    _BATCH, "missing operand, axis scale, wrong factor; scale, other function, wrong statistics"
)
def weight_of_the_batch_norm_left_out(call: Call) -> Any:
    """The factors of the channels are lost when the norm is folded."""
    *_, weight, _, _ = _running(call)
    fits(isinstance(weight, Tensor))
    return call.put(3 if call.name == "batch_norm" else 1, torch.ones_like(weight), "weight").run()


@FAULTS.fault(
    "group_norm",
    "wrong index, permutation, wrong statistics, transpose, wrong axis; axis scale, "
    "axis offset, wrong argument, shift",
)
def channels_belong_to_groups_in_turn(call: Call) -> Any:
    """Channel c is in group c % n instead of c // (channels / n)."""
    value, groups = call.tensor(0, "input"), call.get(1, "num_groups")
    fits(1 < groups < value.size(1))
    plain = torch.arange(value.size(1))
    order = plain.view(-1, groups).t().flatten()
    back = torch.argsort(order)
    eps = call.get(4, "eps", default=1e-5)
    normal = functional.group_norm(value[:, order], groups, eps=eps)[:, back]
    shape = [1, -1] + [1] * (value.dim() - 2)
    weight, bias = call.get(2, "weight"), call.get(3, "bias")
    return call.instead(normal * weight.view(shape) + bias.view(shape))


@FAULTS.fault(
    "group_norm", "wrong index, copy, wrong axis; axis scale, stale, wrong argument, permutation"
)
def one_weight_for_each_group(call: Call) -> Any:
    """All channels of a group get the weight of its first channel."""
    weight, groups = call.tensor(2, "weight"), call.get(1, "num_groups")
    fits(1 < groups < weight.size(0))
    size = weight.size(0) // groups
    return call.put(2, weight[::size].repeat_interleave(size), "weight").run()


@FAULTS.fault(
    "instance_norm",
    "wrong axis, wrong statistics, wrong reduction, other function; axis scale, "
    "axis offset, wrong argument",
)
def statistics_of_all_images(call: Call) -> Any:
    """Mean and variance of a channel are over the batch as well."""
    value, weight, bias = call.tensor(0, "input"), call.get(3, "weight"), call.get(4, "bias")
    eps = call.get(7, "eps", default=1e-5)
    return call.instead(functional.batch_norm(value, None, None, weight, bias, True, 0.0, eps))


@FAULTS.fault(
    "normalize norm linalg_vector_norm",
    "wrong argument, other function; axis scale, scale, wrong reduction, wrong statistics, "
    "wrong factor",
)
def sum_of_magnitudes_for_a_length(call: Call) -> Any:
    """The norm of order 1."""
    value = call.tensor(0, "input")
    dim = call.get(2, "dim", default=1 if call.name == "normalize" else None)
    fits(dim is not None)
    length = value.abs().sum(dim, keepdim=True)
    if call.name == "normalize":
        return call.instead(value / length.clamp(min=1e-12))
    return call.instead(length.reshape(call.result().shape))


@FAULTS.fault(
    "cosine_similarity",
    "other function, wrong statistics, offset, missing operand; axis offset, wrong argument",
)
def correlation_for_a_cosine(call: Call) -> Any:
    """The means are subtracted first."""
    dim = call.get(2, "dim", default=1)
    left, right = (one - one.mean(dim, keepdim=True) for one in (call.tensor(0), call.tensor(1)))
    return call.instead(functional.cosine_similarity(left, right, dim))


# fmt: off
# The layer of a port has no norm at this place.
FAULTS.add("norm left out", f"{_ROWS} group_norm batch_norm",
    "copy, missing operand, other function; axis scale, axis offset, scale, offset, "
    "wrong statistics", lambda call: call.instead(call.tensor(0, "input").clone()))
# Each row of the result is that of the next.
FAULTS.add("normal rows stored one row earlier", _ROWS,
    "shift, wrong index, stale; permutation, copy",
    result(lambda v: v.roll(-1, -2), where=longer(-2)))
# One length for the whole tensor.
FAULTS.add("length of all rows together", "normalize",
    "wrong axis, wrong statistics, wrong reduction, wrong argument; axis scale, scale",
    computed(lambda call: (call.tensor(0, "input"),), lambda value: value / value.norm()))
# The root is left out.
FAULTS.add("divided by the squared length", "normalize",
    "other function, missing operand; axis scale, scale, wrong factor, wrong statistics",
    on(lambda call: (call.tensor(0, "input"),),
        lambda call, value:
            call.instead(value / value.square().sum(call.get(2, "dim", default=1), keepdim=True))))
# Nothing is divided by the lengths.
FAULTS.add("dot product for a cosine", "cosine_similarity",
    "missing operand, other function, missing reduction; axis scale, scale, wrong factor, "
    "wrong statistics",
    lambda call:

    call.instead((call.tensor(0, "x1") * call.tensor(1, "x2")).sum(call.get(2, "dim", default=1))))
# fmt: on


# --- Reductions -----------------------------------------------------------------------------------


@FAULTS.fault(
    "sum mean",
    "stale, wrong reduction, residual, lost accumulation; offset, shift, "
    "doubled reduction, uninitialised, axis offset, wrong index",
)
def accumulator_not_cleared_between_rows(call: Call) -> Any:
    """Each row begins with the total of the row before."""
    value = call.result()
    rows = value.flatten()
    fits(rows.numel() > 2)
    before = torch.cat([torch.zeros_like(rows[:1]), rows[:-1]])
    return call.instead((rows + before).view(value.shape))


@FAULTS.fault(
    "mean",
    "mask, wrong reduction, wrong statistics; scale, wrong factor, off by one reduction, "
    "axis scale, wrong argument",
)
def zeros_not_counted(call: Call) -> Any:
    """The mean of what is not zero, as if zeros were padding."""
    value, result = call.tensor(0), call.result()
    dim, keep = call.get(1, "dim", "axis"), result.dim() == value.dim()
    count = (value != 0).sum(dim, keepdim=keep).clamp(min=1)
    return call.instead(value.sum(dim, keepdim=keep) / count)


@FAULTS.fault("amax max", "other function, wrong reduction; sign, wrong index")
def largest_by_magnitude(call: Call) -> Any:
    """The value whose absolute value is the largest."""
    value, dim = call.tensor(0), only_axis(call)
    place = value.abs().argmax(dim, keepdim=True)
    found = value.gather(dim, place)
    if call.name == "max":
        keep = call.get(2, "keepdim", default=False)
        return (found, place) if keep else (found.squeeze(dim), place.squeeze(dim))
    return call.instead(found.reshape(call.result().shape))


@FAULTS.fault("cumsum", "wrong axis, wrong argument; wrong reduction")
def added_up_along_another_axis(call: Call) -> Any:
    """The axis behind, or the one before if there is none."""
    value, dim = call.get(0), call.get(1, "dim")
    fits(value.dim() > 1)
    dim %= value.dim()
    return call.put(1, dim + 1 if dim + 1 < value.dim() else dim - 1, "dim").run()


@FAULTS.fault(
    "cumsum", "other function, wrong reduction, axis scale, wrong factor; scale, wrong statistics"
)
def running_mean_for_a_running_sum(call: Call) -> Any:
    """Divided by the number of what was added so far."""
    value, dim = call.tensor(0), call.get(1, "dim")
    shape = [1] * value.dim()
    shape[dim] = -1
    return call.instead(call.result() / torch.arange(1, value.size(dim) + 1).view(shape))


@FAULTS.fault(
    "std var", "other function, wrong statistics; scale, axis scale, wrong reduction, approximation"
)
def mean_distance_from_the_mean(call: Call) -> Any:
    """The mean absolute deviation."""
    value, dim = call.tensor(0), only_axis(call)
    far = (value - value.mean(dim, keepdim=True)).abs().mean(dim)
    return call.instead(far.reshape(call.result().shape))


@FAULTS.fault("argmax", "wrong axis, wrong argument, transpose; wrong index, swapped operands")
def place_in_the_other_direction(call: Call) -> Any:
    """The best row of each column, of a square."""
    value, dim = call.get(0), call.get(1, "dim")
    fits(value.dim() == 2 and value.size(0) == value.size(1) and dim in {-1, 1})
    return call.put(1, 0, "dim").run()


# fmt: off
# The value in the middle.
FAULTS.add("median for the mean", "mean",
    "other function, wrong reduction; offset, wrong statistics",
    on(lambda call: (call.tensor(0), only_axis(call)),
        lambda call, value, dim:
            call.instead(value.median(dim).values.reshape(call.result().shape)),
        where=lambda value, dim: value.size(dim) > 2))
# The absolute values are summed.
FAULTS.add("magnitudes added up", "mean sum",
    "other function, wrong reduction; sign, wrong statistics, offset", operand(0, torch.abs))
# One maximum for all rows: a scale for each tensor, not for each row.
FAULTS.add("largest of the whole tensor", "amax",
    "wrong axis, wrong reduction, copy, wrong statistics; wrong argument, constant, clipped",
    computed(lambda call: (call.tensor(0), call.result()),
        lambda value, result: value.max().expand(result.shape).clone(),
        where=lambda _, result: result.numel() > 1))
# The logarithm of the sum relative to the largest.
FAULTS.add("maximum not added back", "logsumexp",
    "missing operand, axis offset; offset, other function, wrong statistics",
    on(lambda call: (call.tensor(0), call.result()),
        lambda call, value, result:
            call.instead(result - value.amax(call.get(1, "dim")).reshape(result.shape))))
# The position of the largest absolute value.
FAULTS.add("place of the largest magnitude", "argmax", "other function; sign, wrong index",
    lambda call: call.put(0, call.get(0).abs()).run())
# fmt: on
