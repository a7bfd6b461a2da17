"""Faults for building: norms, statistics and reductions."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on, result
from benchmarks.places.parts import only_axis
from torch import Tensor

FAULTS = Catalogue()


@FAULTS.fault(
    "layer_norm rms_norm batch_norm group_norm batch_norm_from_statistics",
    "eps, wrong argument; axis scale",
)
def eps_a_thousand_times_larger(call: Call) -> Any:
    """1e-2 instead of 1e-5."""
    place = {"layer_norm": 4, "rms_norm": 3, "batch_norm": 7, "group_norm": 4}.get(call.name, 6)
    fits(call.name != "batch_norm" or not call.get(5, "training", default=False))
    eps = call.get(place, "eps", default=1e-5)
    return call.put(place, 1000 * (eps or 1e-6), "eps").run()


@FAULTS.fault(
    "var std var_mean",
    "off by one reduction, scale, wrong statistics, wrong argument, wrong factor",
)
def other_divisor_of_the_variance(call: Call) -> Any:
    """Divided by n instead of n - 1, or the other way round."""
    value = call.tensor(0)
    correction = call.kwargs.get("correction", 1)
    if "unbiased" in call.kwargs:
        correction = int(call.kwargs["unbiased"])
    dim = call.get(1, "dim", default=None)
    sizes = math.prod(
        value.shape[d] for d in ([dim] if isinstance(dim, int) else dim or range(value.dim()))
    )
    now = max(sizes - correction, 1) / max(sizes - (1 - correction), 1)
    return call.instead(call.result() * (now if call.name != "std" else math.sqrt(now)))


@FAULTS.fault("sum mean", "off by one reduction, partial sum")
def last_element_not_added(call: Call) -> Any:
    """A loop that ends one too early."""
    value, dim = call.tensor(0), call.get(1, "dim")
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    fits(isinstance(dim, int) and value.shape[dim] >= 3)
    short = value.narrow(dim, 0, value.shape[dim] - 1)
    share = 1.0 if call.name == "sum" else (value.shape[dim] - 1) / value.shape[dim]
    return call.instead(call.put(0, short).run() * share)


@FAULTS.fault("layer_norm rms_norm", "eps; axis scale")
def eps_outside_the_root(call: Call) -> Any:
    """Divided by sqrt(v) + eps."""
    value, shape = call.tensor(0), call.get(1)
    axes = list(range(-len(shape), 0))
    weight, bias = call.get(2, "weight"), call.get(3, "bias") if call.name == "layer_norm" else None
    eps = call.get(4 if call.name == "layer_norm" else 3, "eps") or 1e-5
    centred = value - value.mean(axes, keepdim=True) if call.name == "layer_norm" else value
    normal = centred / ((centred * centred).mean(axes, keepdim=True).sqrt() + eps)
    normal = normal if weight is None else normal * weight
    return call.instead(normal if bias is None else normal + bias)


@FAULTS.fault("mean sum amax", "wrong axis, wrong argument")
def reduced_over_the_wrong_axis(call: Call) -> Any:
    """Another axis of the same length."""
    value, dim = call.tensor(0), call.get(1, "dim")
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    fits(isinstance(dim, int))
    dim %= value.dim()
    others = [i for i in range(value.dim()) if i != dim and value.size(i) == value.size(dim) > 1]
    fits(others)
    return call.put(0, value.transpose(dim, others[-1])).run()


@FAULTS.fault("sum", "off by one reduction, partial sum")
def first_element_not_added(call: Call) -> Any:
    """A loop that begins at 1."""
    value, dim = call.tensor(0), call.get(1, "dim")
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    fits(isinstance(dim, int) and value.size(dim) > 2)
    return call.put(0, value.narrow(dim, 1, value.size(dim) - 1)).run()


# fmt: off
# The sum.
FAULTS.add("mean without division", "mean",
    "scale, wrong factor, wrong reduction, other function; missing reduction, "
    "off by one reduction",
    computed(lambda call: (call.tensor(0), call.result()),
        lambda value, result: result * (value.numel() / result.numel())))
# 1 / (sqrt(x) + 1e-4).
FAULTS.add("eps added again", "rsqrt", "eps; axis scale",
    lambda call: call.instead(1 / (call.tensor(0).sqrt() + 0.0001)))
# Half as many groups.
FAULTS.add("other number of groups", "group_norm", "wrong argument, wrong statistics",
    on(lambda call: (call.get(1, "num_groups"),),
        lambda call, groups: call.put(1, groups // 2, "num_groups").run(),
        where=lambda groups: groups % 2 == 0))
# Mean of the next channel.
FAULTS.add("statistics of the neighbouring channel", "batch_norm batch_norm_from_statistics",
    "axis offset, wrong statistics, wrong index; wrong argument, shift, permutation",
    on(lambda call: (1 if call.name == "batch_norm" else 3,),
        lambda call, place: call.put(place, call.tensor(place).roll(1), "running_mean").run()))
# N - 1.
FAULTS.add("mean divided by one less", "mean", "scale, off by one reduction, wrong factor",
    on(lambda call: (call.tensor(0).numel() // call.result().numel(),),
        lambda call, n: call.instead(call.result() * (n / (n - 1))),
        where=lambda n: n > 2))
# fmt: on


# --- Norms as one operator ------------------------------------------------------------------------

_ROWS = "layer_norm rms_norm"


def _norm_of(call: Call) -> tuple[Tensor, list[int], Tensor | None, Tensor | None, float]:
    """Value, axes, weight, bias and eps of a norm over the last axes."""
    value, axes = call.tensor(0), list(range(-len(call.get(1, "normalized_shape")), 0))
    layer = call.name == "layer_norm"
    eps = call.get(4 if layer else 3, "eps", default=None)
    eps = (1e-5 if layer else torch.finfo(value.dtype).eps) if eps is None else eps
    return value, axes, call.get(2, "weight"), call.get(3, "bias") if layer else None, eps


def _weighted(value: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    value = value if weight is None else value * weight
    return value if bias is None else value + bias


@FAULTS.fault("layer_norm", "missing bias, missing operand; axis offset, offset")
def bias_of_the_norm_forgotten(call: Call) -> Any:
    """The bias is not added."""
    fits(isinstance(call.get(3, "bias"), Tensor))
    return call.put(3, None, "bias").run()


@FAULTS.fault("layer_norm", "wrong statistics; axis scale, other function")
def variance_about_zero(call: Call) -> Any:
    """The mean is subtracted from the values and not from those that are squared."""
    value, axes, weight, bias, eps = _norm_of(call)
    centred = value - value.mean(axes, keepdim=True)
    normal = centred * ((value * value).mean(axes, keepdim=True) + eps).rsqrt()
    fits(bool((value.mean(axes).abs() > 0.02 * value.abs().mean()).any()))
    return call.instead(_weighted(normal, weight, bias))


@FAULTS.fault(_ROWS, "off by one reduction, scale, wrong statistics, wrong factor")
def norm_divides_by_one_less(call: Call) -> Any:
    """The variance is the unbiased one."""
    value, axes, weight, bias, eps = _norm_of(call)
    centred = value - value.mean(axes, keepdim=True) if call.name == "layer_norm" else value
    count = math.prod(value.shape[axis] for axis in axes)
    square = (centred * centred).sum(axes, keepdim=True) / (count - 1)
    return call.instead(_weighted(centred * (square + eps).rsqrt(), weight, bias))


@FAULTS.fault(_ROWS, "wrong statistics, off by one reduction; partial sum, axis scale, scale")
def norm_counts_the_padding(call: Call) -> Any:
    """The row is padded with zeros to a power of two, and the padding counts."""
    value, axes, weight, bias, eps = _norm_of(call)
    n = value.shape[-1]
    wide = 1 << (n - 1).bit_length()
    wide = 2 * wide if wide == n else wide
    fits(len(axes) == 1)
    mean = value.sum(-1, keepdim=True) / wide if call.name == "layer_norm" else 0
    centred = value - mean
    square = (centred * centred).sum(-1, keepdim=True) / wide
    return call.instead(_weighted(centred * (square + eps).rsqrt(), weight, bias))


@FAULTS.fault(_ROWS, "wrong statistics, partial sum; axis scale, axis offset")
def statistics_of_whole_vectors_only(call: Call) -> Any:
    """The tail of a row that is no whole vector is not in the statistics."""
    value, axes, weight, bias, eps = _norm_of(call)
    n = value.shape[-1]
    fits(len(axes) == 1 and n > 4)
    part = value[..., : (n - 1) // 4 * 4]
    mean = part.mean(-1, keepdim=True) if call.name == "layer_norm" else 0
    square = ((part - mean) ** 2).mean(-1, keepdim=True)
    return call.instead(_weighted((value - mean) * (square + eps).rsqrt(), weight, bias))


@FAULTS.fault(_ROWS, "wrong statistics, wrong index, stale, copy; axis scale, axis offset, shift")
def statistics_of_the_first_row(call: Call) -> Any:
    """The pointer to the statistics is not advanced."""
    value, axes, weight, bias, eps = _norm_of(call)
    mean = value.mean(axes, keepdim=True) if call.name == "layer_norm" else torch.zeros(())
    square = ((value - mean) ** 2).mean(axes, keepdim=True)
    fits(value.dim() > 1 and value.shape[-2] > 1 and len(axes) == 1)
    mean = mean[..., :1, :] if mean.dim() else mean
    return call.instead(
        _weighted((value - mean) * (square[..., :1, :] + eps).rsqrt(), weight, bias)
    )


@FAULTS.fault(_ROWS, "wrong axis, wrong statistics, wrong reduction")
def normalised_over_the_positions_too(call: Call) -> Any:
    """The statistics are over the last two axes."""
    value, _, weight, bias, eps = _norm_of(call)
    fits(value.dim() >= 3)
    mean = value.mean((-1, -2), keepdim=True) if call.name == "layer_norm" else 0
    square = ((value - mean) ** 2).mean((-1, -2), keepdim=True)
    return call.instead(_weighted((value - mean) * (square + eps).rsqrt(), weight, bias))


@FAULTS.fault(_ROWS, "other function, wrong statistics; axis scale, scale")
def divided_by_the_variance(call: Call) -> Any:
    """The root is forgotten."""
    value, axes, weight, bias, eps = _norm_of(call)
    centred = value - value.mean(axes, keepdim=True) if call.name == "layer_norm" else value
    square = (centred * centred).mean(axes, keepdim=True)
    return call.instead(_weighted(centred / (square + eps), weight, bias))


@FAULTS.fault(_ROWS, "precision")
def normalised_in_bfloat16(call: Call) -> Any:
    """Rounded before the weight is applied."""
    value, axes, weight, bias, eps = _norm_of(call)
    centred = value - value.mean(axes, keepdim=True) if call.name == "layer_norm" else value
    normal = centred * ((centred * centred).mean(axes, keepdim=True) + eps).rsqrt()
    return call.instead(_weighted(normal.bfloat16().to(value.dtype), weight, bias))


@FAULTS.fault(_ROWS, "precision, wrong statistics; axis scale, axis offset")
def statistics_in_half(call: Call) -> Any:
    """Mean and variance are kept in float16."""
    value, axes, weight, bias, eps = _norm_of(call)
    mean = value.mean(axes, keepdim=True).half().to(value.dtype) if bias is not None else 0
    fits(call.name == "rms_norm" or bias is not None)
    square = ((value - mean) ** 2).mean(axes, keepdim=True).half().to(value.dtype)
    return call.instead(_weighted((value - mean) * (square + eps).rsqrt(), weight, bias))


_BATCH = "batch_norm batch_norm_from_statistics"


def _statistics(call: Call) -> tuple[int, int]:
    """Where the running mean and variance are among the arguments."""
    fits(call.name != "batch_norm" or not call.get(5, "training", default=False))
    return (1, 2) if call.name == "batch_norm" else (3, 4)


@FAULTS.fault(_BATCH, "wrong statistics, wrong argument, other function; axis scale, axis offset")
def statistics_of_the_batch(call: Call) -> Any:
    """Normalised as in training."""
    value, places = call.tensor(0), _statistics(call)
    axes = [0, *range(2, value.dim())]
    mean, square = value.mean(axes), value.var(axes, correction=0)
    return call.put(places[0], mean, "running_mean").put(places[1], square, "running_var").run()


@FAULTS.fault("batch_norm batch_norm_from_statistics", "eps, wrong argument; axis scale")
def eps_of_another_framework(call: Call) -> Any:
    """1e-3, the default of Keras."""
    _statistics(call)
    return call.put(7 if call.name == "batch_norm" else 6, 1e-3, "eps").run()


@FAULTS.fault(
    "group_norm native_group_norm", "wrong statistics, wrong axis, wrong argument; axis scale"
)
def statistics_of_single_channels(call: Call) -> Any:
    """An instance norm."""
    value = call.tensor(0)
    axes = list(range(2, value.dim()))
    mean = value.mean(axes, keepdim=True)
    normal = (value - mean) * (value.var(axes, correction=0, keepdim=True) + 1e-5).rsqrt()
    native = call.name == "native_group_norm"
    weight, bias = call.get(1 if native else 2, "weight"), call.get(2 if native else 3, "bias")
    shape = [1, -1] + [1] * len(axes)
    return call.instead(normal * weight.view(shape) + bias.view(shape))


# fmt: off
# The normalised values are not multiplied by the weight.
FAULTS.add("weight of the norm forgotten", _ROWS, "missing operand, other function; axis scale",
    on(lambda call: (call.get(2, "weight"),),
        lambda call, weight: call.put(2, torch.ones_like(weight), "weight").run(),
        where=lambda weight: isinstance(weight, Tensor)))
# 1 + weight, as Gemma stores it.
FAULTS.add("weight plus one", _ROWS, "wrong factor, offset, residual; axis scale, scale",
    on(lambda call: (call.get(2, "weight"),),
        lambda call, weight: call.put(2, weight + 1, "weight").run(),
        where=lambda weight: isinstance(weight, Tensor)))
# The mean is not subtracted.
FAULTS.add("rms norm for layer norm", "layer_norm",
    "other function, missing operand, wrong statistics; axis offset",
    computed(_norm_of,
        lambda value, axes, weight, bias, eps:

    _weighted(value * ((value * value).mean(axes, keepdim=True) + eps).rsqrt(), weight, bias)))
# The pointer to the weight is one too far.
FAULTS.add("weight of the next feature", _ROWS, "wrong index, shift, permutation; axis scale",
    on(lambda call: (call.get(2, "weight"),),
        lambda call, weight: call.put(2, weight.roll(-1, -1), "weight").run(),
        where=lambda weight: isinstance(weight, Tensor) and len(weight) > 1))
# Read from the checkpoint under each other's names.
FAULTS.add("weight and bias exchanged", "layer_norm", "swapped operands; axis scale, axis offset",
    on(lambda call: (call.get(2, "weight"), call.get(3, "bias")),
        lambda call, weight, bias: call.put(2, bias, "weight").put(3, weight, "bias").run(),
        where=lambda weight, bias: isinstance(weight, Tensor) and isinstance(bias, Tensor)))
# Divided by the variance, without a root.
FAULTS.add("variance taken for a deviation", _BATCH, "wrong statistics, other function; axis scale",
    on(_statistics,
        lambda call, _, place:
            call.put(place, call.tensor(place, "running_var") ** 2, "running_var").run()))
# The mean is zero when a batch norm is folded into a convolution.
FAULTS.add("running mean ignored", _BATCH, "missing operand, wrong statistics; axis offset, zeros",
    on(_statistics,
        lambda call, place, *_:
            call.put(place, torch.zeros_like(call.tensor(place, "running_mean"))).run()))
# fmt: on


# --- Statistics written out, and reductions -------------------------------------------------------


@FAULTS.fault("rsqrt", "approximation, precision; scale")
def rsqrt_by_a_magic_number(call: Call) -> Any:
    """The integer trick, with one step of Newton."""
    value = call.tensor(0)
    fits(value.dtype == torch.float32 and bool((value > 0).all()))
    guess = (0x5F3759DF - (value.detach().contiguous().view(torch.int32) >> 1)).view(torch.float32)
    near = guess * (1.5 - 0.5 * value * guess * guess)
    return call.instead(with_gradient_of(value.rsqrt(), near))


@FAULTS.fault("mean sum", "off by one reduction, doubled reduction; partial sum")
def last_element_added_twice(call: Call) -> Any:
    """The tail of the loop overlaps its body."""
    value, dim = call.tensor(0), only_axis(call)
    n = value.shape[dim]
    fits(n >= 3)
    share = 1.0 if call.name == "sum" else (n + 1) / n
    longer = torch.cat([value, value.narrow(dim, n - 1, 1)], dim)
    return call.instead(call.put(0, longer).run() * share)


@FAULTS.fault("mean sum", "partial sum; one rank's part, missing reduction")
def second_half_overwrites_the_first(call: Call) -> Any:
    """One of two partial sums is lost."""
    value, dim = call.tensor(0), only_axis(call)
    n = value.shape[dim]
    fits(n >= 4)
    share = 1.0 if call.name == "sum" else (n - n // 2) / n
    return call.instead(call.put(0, value.narrow(dim, n // 2, n - n // 2)).run() * share)


@FAULTS.fault("mean sum", "precision")
def summed_in_bfloat16(call: Call) -> Any:
    """Every addition is rounded to bfloat16."""
    value, dim = call.tensor(0), only_axis(call)
    total = value.select(dim, 0).bfloat16()
    for place in range(1, value.shape[dim]):
        total = total + value.select(dim, place).bfloat16()
    total = total.to(value.dtype).reshape(call.result().shape)
    return call.instead(total if call.name == "sum" else total / value.shape[dim])


@FAULTS.fault("amax max", "other function; sign, wrong reduction")
def smallest_instead_of_the_largest(call: Call) -> Any:
    """A minimum."""
    value, dim = call.tensor(0), only_axis(call)
    if call.name == "max":
        return torch.min(value, dim, keepdim=call.get(2, "keepdim", default=False))
    return call.instead(value.amin(dim).reshape(call.result().shape))


@FAULTS.fault("cumsum", "lost accumulation, partial sum; wrong reduction")
def carry_between_blocks_lost(call: Call) -> Any:
    """The second block begins again with zero."""
    value, dim = call.get(0), call.get(1, "dim")
    half = value.shape[dim] // 2
    fits(half >= 1)
    parts = value.split([half, value.shape[dim] - half], dim)
    return torch.cat([part.cumsum(dim) for part in parts], dim)


@FAULTS.fault("var std var_mean", "wrong statistics, other function; axis offset")
def mean_of_squares(call: Call) -> Any:
    """The mean is not subtracted."""
    value, dim = call.tensor(0), only_axis(call)
    square = (value * value).mean(dim).reshape(call.result().shape)
    return call.instead(square.sqrt() if call.name == "std" else square)


# fmt: off
# sqrt(x).
FAULTS.add("root instead of its inverse", "rsqrt", "other function, missing operand",
    lambda call: call.instead(call.tensor(0).sqrt()))
# 1 / x.
FAULTS.add("inverse without root", "rsqrt", "other function",
    lambda call: call.instead(1 / call.tensor(0)))
# The root is rounded.
FAULTS.add("root in bfloat16", "rsqrt reciprocal sqrt", "precision; approximation",
    result(lambda v: v.bfloat16()))
# Max pooling where the mean was asked for.
FAULTS.add("largest instead of the mean", "mean", "other function, wrong reduction; offset",
    lambda call:

    call.instead(call.tensor(0).amax(call.get(1, "dim", "axis")).reshape(call.result().shape)))
# The mean.
FAULTS.add("sum divided", "sum", "scale, wrong factor, other function, wrong reduction",
    computed(lambda call: (call.tensor(0), call.result()),
        lambda value, result: result / (value.numel() / result.numel())))
# The running maximum begins with 0 and not with -inf.
FAULTS.add("maximum starts at zero", "amax max", "other function, clipped; mask",
    result(lambda v: v.clamp(min=0)))
# Each element has the sum of those before it.
FAULTS.add("exclusive cumulative sum", "cumsum", "shift, off by one reduction; wrong argument",
    lambda call: call.run() - call.get(0).to(call.run().dtype))
# The sum of each element and those behind it.
FAULTS.add("cumulated from the end", "cumsum", "permutation, wrong argument, other function; shift",
    on(lambda call: (call.get(1, "dim"),),
        lambda call, dim: call.get(0).flip(dim).cumsum(dim).flip(dim)))
# The positions begin at 1, modulo the length.
FAULTS.add("position off by one", "argmax", "off by one reduction, shift, wrong index; offset",
    on(lambda call: (call.get(1, "dim"),),
        lambda call, dim: (call.run() + 1) % call.get(0).shape[dim],
        where=lambda dim: isinstance(dim, int)))
# Argmin.
FAULTS.add("position of the smallest", "argmax", "other function; sign",
    on(lambda call: (call.get(1, "dim"),), lambda call, dim: call.get(0).argmin(dim),
        where=lambda dim: isinstance(dim, int)))
# fmt: on
