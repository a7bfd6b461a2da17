"""Faults that were measured fourth and have been seen: norms, statistics and reductions."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on, operand, result, rounded, tensors
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_ROWS = "layer_norm rms_norm"


# --- Norms of rows --------------------------------------------------------------------------------


def _row(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
    """Input, weight, bias, eps."""
    is_layer = call.name == "layer_norm"
    eps = call.get(4 if is_layer else 3, "eps")
    bias = call.get(3, "bias") if is_layer else None
    return call.tensor(0, "input"), call.get(2, "weight"), bias, 1e-5 if eps is None else eps


def _normal(call: Call, value: Tensor) -> tuple[Tensor, Tensor]:
    """The centred row (or the row itself) and the mean of its squares."""
    inner = value - value.mean(-1, keepdim=True) if call.name == "layer_norm" else value
    return inner, inner.square().mean(-1, keepdim=True)


def _finish(call: Call, normal: Tensor) -> Any:
    _, weight, bias, _ = _row(call)
    normal = normal if weight is None else normal * weight
    return call.instead(normal if bias is None else normal + bias)


@FAULTS.fault(
    _ROWS,
    "wrong statistics, partial sum; approximation, axis scale, wrong reduction, "
    "off by one reduction",
)
def statistics_of_every_second_feature(call: Call) -> Any:
    """A stride of two in the loop that reduces."""
    value, _, _, eps = _row(call)
    fits(value.size(-1) > 3)
    part = value[..., ::2]
    mean = part.mean(-1, keepdim=True) if call.name == "layer_norm" else 0.0
    square = (part - mean).square().mean(-1, keepdim=True)
    return _finish(call, (value - mean) * (square + eps).rsqrt())


@FAULTS.fault(_ROWS, "wrong statistics, other function, wrong reduction; axis scale, scale")
def divided_by_the_largest_magnitude(call: Call) -> Any:
    """The largest deviation for the root of their mean square."""
    inner, _ = _normal(call, _row(call)[0])
    return _finish(call, inner / inner.abs().amax(-1, keepdim=True).clamp(min=1e-6))


@FAULTS.fault(_ROWS, "clipped; other function, wrong statistics")
def normal_values_limited(call: Call) -> Any:
    """What is more than one deviation away is cut to it."""
    value, _, _, eps = _row(call)
    inner, square = _normal(call, value)
    return _finish(call, (inner * (square + eps).rsqrt()).clamp(-1, 1))


@FAULTS.fault(_ROWS, "eps, wrong argument, offset; axis scale, scale, wrong statistics")
def eps_of_a_tenth(call: Call) -> Any:
    """An eps meant for the row of another norm."""
    value, _, _, _ = _row(call)
    inner, square = _normal(call, value)
    return _finish(call, inner * (square + 0.1).rsqrt())


@FAULTS.fault(_ROWS, "precision; approximation")
def norm_stored_in_eight_bits(call: Call) -> Any:
    """The result has 255 levels, with a step for each row."""
    value = call.result()
    step = value.detach().abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
    return call.instead(with_gradient_of(value, (value.detach() / step).round() * step))


@FAULTS.fault(
    _ROWS, "wrong statistics, wrong axis, wrong reduction; axis scale, wrong argument, scale"
)
def norm_for_each_half_of_the_row(call: Call) -> Any:
    """Two ranks share a row, and each normalises its part."""
    value, _, _, eps = _row(call)
    fits(value.size(-1) % 2 == 0 and value.size(-1) > 3)
    inner, square = _normal(call, value.unflatten(-1, (2, -1)))
    return _finish(call, (inner * (square + eps).rsqrt()).flatten(-2))


@FAULTS.fault(
    "layer_norm",
    "wrong statistics, wrong factor, missing operand; axis scale, scale, wrong reduction, "
    "other function",
)
def variance_without_the_square_of_the_mean(call: Call) -> Any:
    """E[x^2] - E[x], as in a kernel whose square was lost."""
    value, _, _, eps = _row(call)
    mean = value.mean(-1, keepdim=True)
    variance = (value.square().mean(-1, keepdim=True) - mean).clamp(min=1e-3)
    return _finish(call, (value - mean) * (variance + eps).rsqrt())


# fmt: off
# A fused kernel for residual and norm adds the input to the result as well.
FAULTS.add("input of the norm added back", _ROWS, "residual; missing operand, offset, wrong factor",
    lambda call: call.instead(call.result() + call.tensor(0, "input")))
# The weight is kept in e5m2.
FAULTS.add("weight of the norm in float8", _ROWS,
    "precision; axis scale, approximation, wrong factor",
    operand(2, rounded(torch.float8_e5m2), "weight"))
# Multiplied by exp(weight).
FAULTS.add("weight kept as a logarithm", _ROWS, "other function; axis scale, scale, wrong factor",
    operand(2, torch.exp, "weight"))
# Folded into the kernel and added behind it.
FAULTS.add("bias of the norm twice", "layer_norm",
    "repeated bias, wrong factor; axis offset, offset, residual",
    lambda call: call.instead(call.result() + call.tensor(3, "bias")))
# The weight is read backwards.
FAULTS.add("weight of the norm from the end", _ROWS, "wrong index, permutation; axis scale, shift",
    operand(2, lambda v: v.flip(-1), "weight"))
# fmt: on


# --- Norms of channels ----------------------------------------------------------------------------

_BATCH = "batch_norm batch_norm_from_statistics"


def _places(call: Call) -> tuple[int, int, int, int]:
    """Where mean, variance, weight and bias are."""
    return (1, 2, 3, 4) if call.name == "batch_norm" else (3, 4, 1, 2)


@FAULTS.fault(_BATCH, "wrong statistics, missing operand, stale; axis scale, axis offset")
def running_statistics_not_loaded(call: Call) -> Any:
    """Mean 0 and variance 1, as in a new model."""
    mean, variance = _places(call)[:2]
    call = call.put(mean, torch.zeros_like(call.tensor(mean)))
    return call.put(variance, torch.ones_like(call.tensor(variance))).run()


@FAULTS.fault(_BATCH, "wrong factor, axis scale; scale, wrong statistics")
def bias_of_the_batch_norm_scaled(call: Call) -> Any:
    """The bias is multiplied by the weight as well."""
    _, _, weight, bias = _places(call)
    return call.put(bias, call.tensor(bias) * call.tensor(weight)).run()


@FAULTS.fault(
    "group_norm native_group_norm", "wrong statistics, missing operand; axis offset, other function"
)
def groups_not_centred(call: Call) -> Any:
    """Divided by the root of the mean square of the group."""
    fits(call.name == "group_norm")
    value, groups = call.tensor(0, "input"), call.get(1, "num_groups")
    parts = value.unflatten(1, (groups, -1))
    dims = [*range(2, parts.dim())]
    normal = (parts * (parts.square().mean(dims, keepdim=True) + 1e-5).rsqrt()).flatten(1, 2)
    shape = [1, -1] + [1] * (value.dim() - 2)
    return call.instead(normal * call.tensor(2).view(shape) + call.tensor(3).view(shape))


@FAULTS.fault("instance_norm", "eps, wrong argument, offset; axis scale, scale, wrong statistics")
def eps_of_a_tenth_for_the_image(call: Call) -> Any:
    """1e-1."""
    value = call.tensor(0, "input")
    return call.instead(
        functional.instance_norm(
            value, weight=call.get(3, "weight"), bias=call.get(4, "bias"), eps=0.1
        )
    )


@FAULTS.fault(
    "instance_norm",
    "off by one reduction, wrong statistics, wrong factor, wrong argument; scale, axis scale",
)
def pixels_counted_without_one(call: Call) -> Any:
    """The unbiased variance."""
    value = call.tensor(0, "input")
    weight, bias = call.tensor(3, "weight"), call.tensor(4, "bias")
    spread, mean = torch.var_mean(value, (2, 3), keepdim=True)
    normal = (value - mean) * (spread + 1e-5).rsqrt()
    return call.instead(normal * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1))


# fmt: off
# The summand of the channels is lost when the norm is folded.
FAULTS.add("bias of the batch norm left out", _BATCH,
    "missing bias, missing operand; axis offset, offset",
    on(lambda call: (_places(call)[3],),
        lambda call, place: call.put(place, torch.zeros_like(call.tensor(place))).run()))
# The sign of the mean is lost when the norm becomes a factor and a summand.
FAULTS.add("running mean added", _BATCH,
    "sign, wrong factor, wrong statistics; axis offset, offset",
    on(lambda call: (_places(call)[0],),
        lambda call, mean: call.put(mean, -call.tensor(mean)).run()))
# The weight is read backwards.
FAULTS.add("weights of the channels from the end", "group_norm",
    "permutation, wrong index; axis scale, shift", operand(2, lambda v: v.flip(0), "weight"))
# fmt: on


# --- Lengths and angles ---------------------------------------------------------------------------


@FAULTS.fault("normalize", "precision; axis scale, approximation")
def length_in_bfloat16(call: Call) -> Any:
    """The length is rounded before it divides."""
    value = call.tensor(0, "input")
    length = value.norm(dim=-1, keepdim=True)
    return call.instead(
        value / with_gradient_of(length, length.detach().bfloat16().to(value.dtype))
    )


# fmt: off
# X / (1 + |x|): eps is a summand, and large.
FAULTS.add("one added to the length", "normalize",
    "eps, offset, other function; axis scale, scale, wrong argument",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value / (1 + value.norm(dim=-1, keepdim=True))))
# Columns have length one.
FAULTS.add("length along the axis before", "normalize",
    "wrong axis, wrong argument, wrong reduction; axis scale, wrong statistics",
    lambda call: call.instead(functional.normalize(call.tensor(0, "input"), dim=-2)))
# The length of the first operand only.
FAULTS.add("divided by one of two lengths", "cosine_similarity",
    "missing operand, wrong factor; axis scale, scale",
    on(lambda call: (call.tensor(0, "x1"),),
        lambda call, left:
            call.instead((left * call.tensor(1, "x2")).sum(-1) / left.norm(dim=-1))))
# 1 - cos.
FAULTS.add("distance for similarity", "cosine_similarity", "other function; offset, sign",
    result(lambda v: 1 - v))
# P of infinity.
FAULTS.add("distance of the largest difference", "pairwise_distance",
    "wrong argument, other function, wrong reduction",
    lambda call: call.instead((call.tensor(0) - call.tensor(1)).abs().amax(-1, keepdim=True)))
# The direction is divided by the length of the whole weight.
FAULTS.add("one length for all filters", "_weight_norm",
    "wrong axis, wrong statistics, wrong reduction, wrong argument; axis scale, scale",
    on(tensors(0),
        lambda call, direction: call.instead(direction / direction.norm() * call.tensor(1))))
# The weight as it is stored.
FAULTS.add("direction not normalised", "_weight_norm _weight_norm_interface",
    "missing operand, axis scale, copy; scale, wrong statistics",
    lambda call: call.instead(call.tensor(0).clone()))
# norm='ortho'.
FAULTS.add("transform of length one", "fft_fftn", "scale, wrong factor, wrong argument",
    lambda call:
            Call(call.name, call.function, call.args, {**call.kwargs, "norm": "ortho"}).run())
# The conjugate: exp(+i w t).
FAULTS.add("frequencies with the other sign", "fft_fftn",
    "sign, other function, wrong argument; permutation, scale, wrong factor",
    lambda call: call.run().conj().resolve_conj())
# fmt: on


# --- Reductions -----------------------------------------------------------------------------------


def _axis(call: Call) -> int:
    dim = call.get(1, "dim")
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    fits(len(dims) == 1)
    return dims[0]


def _keeps(call: Call) -> bool:
    return bool(call.get(2, "keepdim", default=False))


@FAULTS.forward("mean sum", "wrong factor, sign, wrong reduction; axis scale")
def every_second_term_subtracted(call: Call) -> Any:
    """A butterfly that subtracts where it should add."""
    value, dim = call.tensor(0, "input"), _axis(call)
    fits(value.size(dim) > 1)
    signs = (1 - 2 * (torch.arange(value.size(dim)) % 2)).to(value.dtype)
    shape = [1] * value.dim()
    shape[dim] = -1
    return call.put(0, value * signs.view(shape), "input").run()


@FAULTS.fault(
    "amax max",
    "wrong reduction, wrong index, other function; off by one reduction, wrong statistics",
)
def second_largest(call: Call) -> Any:
    """The winner of the last comparison is lost."""
    value, dim = call.tensor(0, "input"), _axis(call)
    fits(value.size(dim) > 1)
    best = value.topk(2, dim)[0].select(dim, 1)
    return call.instead(best.unsqueeze(dim) if _keeps(call) else best)


@FAULTS.fault("var_mean", "swapped operands, permutation, wrong index; copy")
def variance_and_mean_exchanged(call: Call) -> Any:
    """The order of another library."""
    spread, mean = call.run()
    return mean, spread


@FAULTS.fault("argmax", "partial sum, one rank's part, wrong reduction, mask; wrong index")
def place_in_the_first_half_only(call: Call) -> Any:
    """The best of the first rank's part."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(isinstance(dim, int) and value.size(dim) > 1 and not _keeps(call))
    return value.narrow(dim, 0, value.size(dim) // 2).argmax(dim)


@FAULTS.forward("sort", "permutation, wrong index, partial sum; missing reduction, wrong argument")
def halves_sorted_and_not_merged(call: Call) -> Any:
    """The last step of a merge sort is missing."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    down = bool(call.get(2, "descending", default=False))
    half = value.size(dim) // 2
    fits(half > 1)
    parts = [value.narrow(dim, 0, half), value.narrow(dim, half, value.size(dim) - half)]
    (low, low_at), (high, high_at) = (part.sort(dim, down) for part in parts)
    right = call.run()
    return type(right)((torch.cat([low, high], dim), torch.cat([low_at, high_at + half], dim)))


@FAULTS.fault("topk", "wrong index, offset, wrong rank's shard; copy, wrapped")
def places_within_a_shard(call: Call) -> Any:
    """The places of the second half of the experts are counted from its beginning."""
    values, places = call.run()
    half = call.tensor(0, "input").size(-1) // 2
    return values, places % half


@FAULTS.fault("topk", "copy, stale, wrong index; wrong reduction")
def best_one_for_every_place(call: Call) -> Any:
    """The best expert is not removed before the next one is looked for."""
    values, places = call.run()
    fits(values.size(-1) > 1)
    return values[..., :1].expand(values.shape).contiguous(), places[..., :1].expand(
        places.shape
    ).contiguous()


@FAULTS.fault("median", "off by one reduction, wrong index, wrong reduction; wrong argument")
def one_above_the_middle(call: Call) -> Any:
    """The next value in the order."""
    value, dim = call.tensor(0, "input"), _axis(call)
    place = (value.size(dim) - 1) // 2 + 1
    fits(place < value.size(dim) and _keeps(call))
    return call.instead(value.sort(dim)[0].narrow(dim, place, 1))


# fmt: off
# Half of the smallest and the largest.
FAULTS.add("middle of the range for the mean", "mean",
    "wrong reduction, other function, wrong statistics; approximation",
    on(lambda call: (call.tensor(0, "input"), call.get(1, "dim")),
        lambda call, value, dim:
            call.instead((value.amin(dim, _keeps(call)) + value.amax(dim, _keeps(call))) / 2)),
    backward=False)
# The number of rows divides the sum of a row.
FAULTS.add("divided by the length of another axis", "mean",
    "wrong factor, scale, wrong argument; wrong reduction",
    on(lambda call: (call.tensor(0, "input"), _axis(call)),
        lambda call, value, dim:

    call.instead(call.result() * value.size(dim) / value.size(dim - 1 if dim < 0 else dim + 1)),
        where=lambda value, *_: value.dim() > 1), backward=False)
# All are multiplied.
FAULTS.add("product for the sum", "sum", "wrong reduction, other function",
    lambda call: call.instead(call.tensor(0, "input").prod(_axis(call), _keeps(call))),
    backward=False)
# The root of the sum of squares.
FAULTS.add("length for the sum", "sum", "wrong reduction, other function, wrong statistics",
    lambda call:
            call.instead(call.tensor(0, "input").norm(dim=_axis(call), keepdim=_keeps(call))),
    backward=False)
# The maximum of the second rank is not looked at.
FAULTS.add("largest of the first half", "amax max",
    "partial sum, wrong reduction, one rank's part, mask; wrong index, missing reduction",
    on(lambda call: (call.tensor(0, "input"), _axis(call)),
        lambda call, value, dim:
            call.instead(value.narrow(dim, 0, value.size(dim) // 2).amax(dim, _keeps(call))),
        where=lambda value, dim: value.size(dim) > 1))
# The logarithm of the sum of exponentials.
FAULTS.add("smooth maximum", "amax", "other function, wrong reduction; approximation, offset",
    lambda call: call.instead(call.tensor(0, "input").logsumexp(_axis(call), _keeps(call))))
# log2.
FAULTS.add("logarithm of the sum to base two", "logsumexp",
    "scale, wrong factor, other function; wrong argument", result(lambda v: v * 1.4426950408889634))
# Exp of the result.
FAULTS.add("sum of exponentials without logarithm", "logsumexp", "other function, missing operand",
    result(torch.exp))
# The largest less the smallest.
FAULTS.add("range for the deviation", "std", "wrong statistics, wrong reduction, other function",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value.amax(-1, keepdim=True) - value.amin(-1, keepdim=True)))
# The root is not taken.
FAULTS.add("variance for the deviation", "std",
    "other function, missing operand; wrong statistics, wrong reduction", result(lambda v: v**2))
# The mean along the axis.
FAULTS.add("mean for the median", "median", "wrong reduction, other function; approximation",
    lambda call: call.instead(call.tensor(0, "input").mean(_axis(call), _keeps(call))))
# All are added.
FAULTS.add("sum for the product", "prod", "wrong reduction, other function",
    lambda call: call.instead(call.tensor(0, "input").sum(_axis(call), keepdim=_keeps(call))))
# The loop ends one too early.
FAULTS.add("last factor left out", "prod", "partial sum, off by one reduction, mask; wrong factor",
    on(lambda call: (call.tensor(0, "input"), _axis(call)),
        lambda call, value, dim:
            call.instead(value.narrow(dim, 0, value.size(dim) - 1).prod(dim, _keeps(call)))))
# fmt: on


# --- Along an axis --------------------------------------------------------------------------------


@FAULTS.fault("cumsum", "other function, wrong factor; partial sum")
def running_sum_that_forgets(call: Call) -> Any:
    """What was summed before is halved at each step."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim")
    steps = []
    for part in value.unbind(dim):
        steps.append(part + 0.5 * steps[-1] if steps else part)
    return call.instead(torch.stack(steps, dim))


@FAULTS.forward("cumprod", "shift, off by one reduction, wrong index; other function, partial sum")
def product_of_what_is_before(call: Call) -> Any:
    """Exclusive: it begins with one."""
    value, dim = call.result(), call.get(1, "dim")
    ones = torch.ones_like(value.narrow(dim, 0, 1))
    return call.instead(torch.cat([ones, value.narrow(dim, 0, value.size(dim) - 1)], dim))


@FAULTS.fault("cummax", "other function, wrong reduction, missing reduction; partial sum")
def larger_of_two_neighbours(call: Call) -> Any:
    """Only the value before is compared."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim")
    before = torch.cat([value.narrow(dim, 0, 1), value.narrow(dim, 0, value.size(dim) - 1)], dim)
    return call.instead(torch.maximum(value, before))


# fmt: off
# The sum of all for each of them.
FAULTS.add("total at every place", "cumsum",
    "wrong reduction, other function, copy; missing reduction",
    on(lambda call: (call.tensor(0, "input"),),
        lambda call, value:
            call.instead(value.sum(call.get(1, "dim"), keepdim=True).expand(value.shape).clone())))
# What runs along is rounded at each step.
FAULTS.add("carry in bfloat16", "cumsum logcumsumexp cumprod", "precision; approximation",
    result(rounded(torch.bfloat16)), backward=False)
# The largest so far.
FAULTS.add("running maximum for the running sum", "logcumsumexp",
    "other function, wrong reduction; approximation",
    lambda call: call.instead(call.tensor(0, "input").cummax(call.get(1, "dim"))[0]))
# The opposite of the difference.
FAULTS.add("earlier less later", "diff", "sign, swapped operands, wrong factor, scale",
    result(torch.neg))
# fmt: on
