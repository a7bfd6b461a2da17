"""Faults that were measured fourth and have been seen: norms, statistics and reductions."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
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


@FAULTS.fault(_ROWS, kinds=["residual"], loose=["missing operand", "offset", "wrong factor"])
def input_of_the_norm_added_back(call: Call) -> Any:
    """A fused kernel for residual and norm adds the input to the result as well."""
    return call.instead(call.result() + call.tensor(0, "input"))


@FAULTS.fault(
    _ROWS,
    kinds=["wrong statistics", "partial sum"],
    loose=["approximation", "axis scale", "wrong reduction", "off by one reduction"],
)
def statistics_of_every_second_feature(call: Call) -> Any:
    """A stride of two in the loop that reduces."""
    value, _, _, eps = _row(call)
    fits(value.size(-1) > 3)
    part = value[..., ::2]
    mean = part.mean(-1, keepdim=True) if call.name == "layer_norm" else 0.0
    square = (part - mean).square().mean(-1, keepdim=True)
    return _finish(call, (value - mean) * (square + eps).rsqrt())


@FAULTS.fault(_ROWS, kinds=["wrong statistics", "other function", "wrong reduction"],
              loose=["axis scale", "scale"])  # fmt: skip
def divided_by_the_largest_magnitude(call: Call) -> Any:
    """The largest deviation for the root of their mean square."""
    inner, _ = _normal(call, _row(call)[0])
    return _finish(call, inner / inner.abs().amax(-1, keepdim=True).clamp(min=1e-6))


@FAULTS.fault(_ROWS, kinds=["precision"], loose=["axis scale", "approximation", "wrong factor"])
def weight_of_the_norm_in_float8(call: Call) -> Any:
    """The weight is kept in e5m2."""
    weight = call.tensor(2, "weight")
    narrow = weight.detach().to(torch.float8_e5m2).to(weight.dtype)
    return call.put(2, with_gradient_of(weight, narrow), "weight").run()


@FAULTS.fault(_ROWS, kinds=["other function"], loose=["axis scale", "scale", "wrong factor"])
def weight_kept_as_a_logarithm(call: Call) -> Any:
    """Multiplied by exp(weight)."""
    return call.put(2, call.tensor(2, "weight").exp(), "weight").run()


@FAULTS.fault("layer_norm", kinds=["repeated bias", "wrong factor"],
              loose=["axis offset", "offset", "residual"])  # fmt: skip
def bias_of_the_norm_twice(call: Call) -> Any:
    """Folded into the kernel and added behind it."""
    bias = call.tensor(3, "bias")
    return call.instead(call.result() + bias)


@FAULTS.fault(_ROWS, kinds=["clipped"], loose=["other function", "wrong statistics"])
def normal_values_limited(call: Call) -> Any:
    """What is more than one deviation away is cut to it."""
    value, _, _, eps = _row(call)
    inner, square = _normal(call, value)
    return _finish(call, (inner * (square + eps).rsqrt()).clamp(-1, 1))


@FAULTS.fault(_ROWS, kinds=["eps", "wrong argument", "offset"],
              loose=["axis scale", "scale", "wrong statistics"])  # fmt: skip
def eps_of_a_tenth(call: Call) -> Any:
    """An eps meant for the row of another norm."""
    value, _, _, _ = _row(call)
    inner, square = _normal(call, value)
    return _finish(call, inner * (square + 0.1).rsqrt())


@FAULTS.fault(_ROWS, kinds=["precision"], loose=["approximation"])
def norm_stored_in_eight_bits(call: Call) -> Any:
    """The result has 255 levels, with a step for each row."""
    value = call.result()
    step = value.detach().abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
    return call.instead(with_gradient_of(value, (value.detach() / step).round() * step))


@FAULTS.fault(_ROWS, kinds=["wrong index", "permutation"], loose=["axis scale", "shift"])
def weight_of_the_norm_from_the_end(call: Call) -> Any:
    """The weight is read backwards."""
    return call.put(2, call.tensor(2, "weight").flip(-1), "weight").run()


@FAULTS.fault(_ROWS, kinds=["wrong statistics", "wrong axis", "wrong reduction"],
              loose=["axis scale", "wrong argument", "scale"])  # fmt: skip
def norm_for_each_half_of_the_row(call: Call) -> Any:
    """Two ranks share a row, and each normalises its part."""
    value, _, _, eps = _row(call)
    fits(value.size(-1) % 2 == 0 and value.size(-1) > 3)
    inner, square = _normal(call, value.unflatten(-1, (2, -1)))
    return _finish(call, (inner * (square + eps).rsqrt()).flatten(-2))


@FAULTS.fault("layer_norm", kinds=["wrong statistics", "wrong factor", "missing operand"],
              loose=["axis scale", "scale", "wrong reduction", "other function"])  # fmt: skip
def variance_without_the_square_of_the_mean(call: Call) -> Any:
    """E[x^2] - E[x], as in a kernel whose square was lost."""
    value, _, _, eps = _row(call)
    mean = value.mean(-1, keepdim=True)
    variance = (value.square().mean(-1, keepdim=True) - mean).clamp(min=1e-3)
    return _finish(call, (value - mean) * (variance + eps).rsqrt())


# --- Norms of channels ----------------------------------------------------------------------------

_BATCH = "batch_norm batch_norm_from_statistics"


def _places(call: Call) -> tuple[int, int, int, int]:
    """Where mean, variance, weight and bias are."""
    return (1, 2, 3, 4) if call.name == "batch_norm" else (3, 4, 1, 2)


@FAULTS.fault(_BATCH, kinds=["missing bias", "missing operand"], loose=["axis offset", "offset"])
def bias_of_the_batch_norm_left_out(call: Call) -> Any:
    """The summand of the channels is lost when the norm is folded."""
    place = _places(call)[3]
    return call.put(place, torch.zeros_like(call.tensor(place))).run()


@FAULTS.fault(_BATCH, kinds=["wrong statistics", "missing operand", "stale"],
              loose=["axis scale", "axis offset"])  # fmt: skip
def running_statistics_not_loaded(call: Call) -> Any:
    """Mean 0 and variance 1, as in a new model."""
    mean, variance = _places(call)[:2]
    call = call.put(mean, torch.zeros_like(call.tensor(mean)))
    return call.put(variance, torch.ones_like(call.tensor(variance))).run()


@FAULTS.fault(_BATCH, kinds=["sign", "wrong factor", "wrong statistics"],
              loose=["axis offset", "offset"])  # fmt: skip
def running_mean_added(call: Call) -> Any:
    """The sign of the mean is lost when the norm becomes a factor and a summand."""
    mean = _places(call)[0]
    return call.put(mean, -call.tensor(mean)).run()


@FAULTS.fault(_BATCH, kinds=["wrong factor", "axis scale"], loose=["scale", "wrong statistics"])
def bias_of_the_batch_norm_scaled(call: Call) -> Any:
    """The bias is multiplied by the weight as well."""
    _, _, weight, bias = _places(call)
    return call.put(bias, call.tensor(bias) * call.tensor(weight)).run()


@FAULTS.fault("group_norm native_group_norm", kinds=["wrong statistics", "missing operand"],
              loose=["axis offset", "other function"])  # fmt: skip
def groups_not_centred(call: Call) -> Any:
    """Divided by the root of the mean square of the group."""
    fits(call.name == "group_norm")
    value, groups = call.tensor(0, "input"), call.get(1, "num_groups")
    parts = value.unflatten(1, (groups, -1))
    dims = [*range(2, parts.dim())]
    normal = (parts * (parts.square().mean(dims, keepdim=True) + 1e-5).rsqrt()).flatten(1, 2)
    shape = [1, -1] + [1] * (value.dim() - 2)
    return call.instead(normal * call.tensor(2).view(shape) + call.tensor(3).view(shape))


@FAULTS.fault("group_norm", kinds=["permutation", "wrong index"], loose=["axis scale", "shift"])
def weights_of_the_channels_from_the_end(call: Call) -> Any:
    """The weight is read backwards."""
    return call.put(2, call.tensor(2, "weight").flip(0), "weight").run()


@FAULTS.fault("instance_norm", kinds=["eps", "wrong argument", "offset"],
              loose=["axis scale", "scale", "wrong statistics"])  # fmt: skip
def eps_of_a_tenth_for_the_image(call: Call) -> Any:
    """1e-1."""
    value = call.tensor(0, "input")
    return call.instead(
        functional.instance_norm(
            value, weight=call.get(3, "weight"), bias=call.get(4, "bias"), eps=0.1
        )
    )


@FAULTS.fault("instance_norm", kinds=["off by one reduction", "wrong statistics", "wrong factor",
                                      "wrong argument"],
              loose=["scale", "axis scale"])  # fmt: skip
def pixels_counted_without_one(call: Call) -> Any:
    """The unbiased variance."""
    value = call.tensor(0, "input")
    weight, bias = call.tensor(3, "weight"), call.tensor(4, "bias")
    spread, mean = torch.var_mean(value, (2, 3), keepdim=True)
    normal = (value - mean) * (spread + 1e-5).rsqrt()
    return call.instead(normal * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1))


# --- Lengths and angles ---------------------------------------------------------------------------


@FAULTS.fault("normalize", kinds=["eps", "offset", "other function"],
              loose=["axis scale", "scale", "wrong argument"])  # fmt: skip
def one_added_to_the_length(call: Call) -> Any:
    """X / (1 + |x|): eps is a summand, and large."""
    value = call.tensor(0, "input")
    return call.instead(value / (1 + value.norm(dim=-1, keepdim=True)))


@FAULTS.fault("normalize", kinds=["wrong axis", "wrong argument", "wrong reduction"],
              loose=["axis scale", "wrong statistics"])  # fmt: skip
def length_along_the_axis_before(call: Call) -> Any:
    """Columns have length one."""
    value = call.tensor(0, "input")
    return call.instead(functional.normalize(value, dim=-2))


@FAULTS.fault("normalize", kinds=["precision"], loose=["axis scale", "approximation"])
def length_in_bfloat16(call: Call) -> Any:
    """The length is rounded before it divides."""
    value = call.tensor(0, "input")
    length = value.norm(dim=-1, keepdim=True)
    return call.instead(
        value / with_gradient_of(length, length.detach().bfloat16().to(value.dtype))
    )


@FAULTS.fault("cosine_similarity", kinds=["missing operand", "wrong factor"],
              loose=["axis scale", "scale"])  # fmt: skip
def divided_by_one_of_two_lengths(call: Call) -> Any:
    """The length of the first operand only."""
    left, right = call.tensor(0, "x1"), call.tensor(1, "x2")
    return call.instead((left * right).sum(-1) / left.norm(dim=-1))


@FAULTS.fault("cosine_similarity", kinds=["other function"], loose=["offset", "sign"])
def distance_for_similarity(call: Call) -> Any:
    """1 - cos."""
    return call.instead(1 - call.result())


@FAULTS.fault("pairwise_distance", kinds=["wrong argument", "other function", "wrong reduction"])
def distance_of_the_largest_difference(call: Call) -> Any:
    """P of infinity."""
    left, right = call.tensor(0), call.tensor(1)
    return call.instead((left - right).abs().amax(-1, keepdim=True))


@FAULTS.fault("_weight_norm", kinds=["wrong axis", "wrong statistics", "wrong reduction",
                                     "wrong argument"],
              loose=["axis scale", "scale"])  # fmt: skip
def one_length_for_all_filters(call: Call) -> Any:
    """The direction is divided by the length of the whole weight."""
    direction, length = call.tensor(0), call.tensor(1)
    return call.instead(direction / direction.norm() * length)


@FAULTS.fault(
    "_weight_norm _weight_norm_interface",
    kinds=["missing operand", "axis scale", "copy"],
    loose=["scale", "wrong statistics"],
)
def direction_not_normalised(call: Call) -> Any:
    """The weight as it is stored."""
    return call.instead(call.tensor(0).clone())


@FAULTS.fault("fft_fftn", kinds=["scale", "wrong factor", "wrong argument"])
def transform_of_length_one(call: Call) -> Any:
    """norm='ortho'."""
    return Call(call.name, call.function, call.args, {**call.kwargs, "norm": "ortho"}).run()


@FAULTS.fault("fft_fftn", kinds=["sign", "other function", "wrong argument"],
              loose=["permutation", "scale", "wrong factor"])  # fmt: skip
def frequencies_with_the_other_sign(call: Call) -> Any:
    """The conjugate: exp(+i w t)."""
    return call.run().conj().resolve_conj()


# --- Reductions -----------------------------------------------------------------------------------


def _axis(call: Call) -> int:
    dim = call.get(1, "dim")
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    fits(len(dims) == 1)
    return dims[0]


def _keeps(call: Call) -> bool:
    return bool(call.get(2, "keepdim", default=False))


@FAULTS.fault("mean", kinds=["wrong reduction", "other function", "wrong statistics"],
              loose=["approximation"], backward=False)  # fmt: skip
def middle_of_the_range_for_the_mean(call: Call) -> Any:
    """Half of the smallest and the largest."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim")
    low, high = value.amin(dim, _keeps(call)), value.amax(dim, _keeps(call))
    return call.instead((low + high) / 2)


@FAULTS.fault("mean", kinds=["wrong factor", "scale", "wrong argument"],
              loose=["wrong reduction"], backward=False)  # fmt: skip
def divided_by_the_length_of_another_axis(call: Call) -> Any:
    """The number of rows divides the sum of a row."""
    value, dim = call.tensor(0, "input"), _axis(call)
    fits(value.dim() > 1)
    other = value.size(dim - 1 if dim < 0 else dim + 1)
    return call.instead(call.result() * value.size(dim) / other)


@FAULTS.fault("mean sum", kinds=["wrong factor", "sign", "wrong reduction"], loose=["axis scale"],
              backward=False)  # fmt: skip
def every_second_term_subtracted(call: Call) -> Any:
    """A butterfly that subtracts where it should add."""
    value, dim = call.tensor(0, "input"), _axis(call)
    fits(value.size(dim) > 1)
    signs = (1 - 2 * (torch.arange(value.size(dim)) % 2)).to(value.dtype)
    shape = [1] * value.dim()
    shape[dim] = -1
    return call.put(0, value * signs.view(shape), "input").run()


@FAULTS.fault("sum", kinds=["wrong reduction", "other function"], backward=False)
def product_for_the_sum(call: Call) -> Any:
    """All are multiplied."""
    return call.instead(call.tensor(0, "input").prod(_axis(call), _keeps(call)))


@FAULTS.fault(
    "sum", kinds=["wrong reduction", "other function", "wrong statistics"], backward=False
)
def length_for_the_sum(call: Call) -> Any:
    """The root of the sum of squares."""
    value = call.tensor(0, "input")
    return call.instead(value.norm(dim=_axis(call), keepdim=_keeps(call)))


@FAULTS.fault("amax max", kinds=["wrong reduction", "wrong index", "other function"],
              loose=["off by one reduction", "wrong statistics"])  # fmt: skip
def second_largest(call: Call) -> Any:
    """The winner of the last comparison is lost."""
    value, dim = call.tensor(0, "input"), _axis(call)
    fits(value.size(dim) > 1)
    best = value.topk(2, dim)[0].select(dim, 1)
    return call.instead(best.unsqueeze(dim) if _keeps(call) else best)


@FAULTS.fault("amax max", kinds=["partial sum", "wrong reduction", "one rank's part", "mask"],
              loose=["wrong index", "missing reduction"])  # fmt: skip
def largest_of_the_first_half(call: Call) -> Any:
    """The maximum of the second rank is not looked at."""
    value, dim = call.tensor(0, "input"), _axis(call)
    fits(value.size(dim) > 1)
    return call.instead(value.narrow(dim, 0, value.size(dim) // 2).amax(dim, _keeps(call)))


@FAULTS.fault("amax", kinds=["other function", "wrong reduction"],
              loose=["approximation", "offset"])  # fmt: skip
def smooth_maximum(call: Call) -> Any:
    """The logarithm of the sum of exponentials."""
    return call.instead(call.tensor(0, "input").logsumexp(_axis(call), _keeps(call)))


@FAULTS.fault(
    "logsumexp", kinds=["scale", "wrong factor", "other function"], loose=["wrong argument"]
)
def logarithm_of_the_sum_to_base_two(call: Call) -> Any:
    """log2."""
    return call.instead(call.result() * 1.4426950408889634)


@FAULTS.fault("logsumexp", kinds=["other function", "missing operand"])
def sum_of_exponentials_without_logarithm(call: Call) -> Any:
    """Exp of the result."""
    return call.instead(call.result().exp())


@FAULTS.fault("std", kinds=["wrong statistics", "wrong reduction", "other function"])
def range_for_the_deviation(call: Call) -> Any:
    """The largest less the smallest."""
    value = call.tensor(0, "input")
    return call.instead(value.amax(-1, keepdim=True) - value.amin(-1, keepdim=True))


@FAULTS.fault("std", kinds=["other function", "missing operand"],
              loose=["wrong statistics", "wrong reduction"])  # fmt: skip
def variance_for_the_deviation(call: Call) -> Any:
    """The root is not taken."""
    return call.instead(call.result() ** 2)


@FAULTS.fault("var_mean", kinds=["swapped operands", "permutation", "wrong index"], loose=["copy"])
def variance_and_mean_exchanged(call: Call) -> Any:
    """The order of another library."""
    spread, mean = call.run()
    return mean, spread


@FAULTS.fault("argmax", kinds=["partial sum", "one rank's part", "wrong reduction", "mask"],
              loose=["wrong index"])  # fmt: skip
def place_in_the_first_half_only(call: Call) -> Any:
    """The best of the first rank's part."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(isinstance(dim, int) and value.size(dim) > 1 and not _keeps(call))
    return value.narrow(dim, 0, value.size(dim) // 2).argmax(dim)


@FAULTS.fault("sort", kinds=["permutation", "wrong index", "partial sum"],
              loose=["missing reduction", "wrong argument"], backward=False)  # fmt: skip
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


@FAULTS.fault(
    "topk", kinds=["wrong index", "offset", "wrong rank's shard"], loose=["copy", "wrapped"]
)
def places_within_a_shard(call: Call) -> Any:
    """The places of the second half of the experts are counted from its beginning."""
    values, places = call.run()
    half = call.tensor(0, "input").size(-1) // 2
    return values, places % half


@FAULTS.fault("topk", kinds=["copy", "stale", "wrong index"], loose=["wrong reduction"])
def best_one_for_every_place(call: Call) -> Any:
    """The best expert is not removed before the next one is looked for."""
    values, places = call.run()
    fits(values.size(-1) > 1)
    return values[..., :1].expand(values.shape).contiguous(), places[..., :1].expand(
        places.shape
    ).contiguous()


@FAULTS.fault("median", kinds=["wrong reduction", "other function"], loose=["approximation"])
def mean_for_the_median(call: Call) -> Any:
    """The mean along the axis."""
    return call.instead(call.tensor(0, "input").mean(_axis(call), _keeps(call)))


@FAULTS.fault("median", kinds=["off by one reduction", "wrong index", "wrong reduction"],
              loose=["wrong argument"])  # fmt: skip
def one_above_the_middle(call: Call) -> Any:
    """The next value in the order."""
    value, dim = call.tensor(0, "input"), _axis(call)
    place = (value.size(dim) - 1) // 2 + 1
    fits(place < value.size(dim) and _keeps(call))
    return call.instead(value.sort(dim)[0].narrow(dim, place, 1))


@FAULTS.fault("prod", kinds=["wrong reduction", "other function"])
def sum_for_the_product(call: Call) -> Any:
    """All are added."""
    return call.instead(call.tensor(0, "input").sum(_axis(call), keepdim=_keeps(call)))


@FAULTS.fault("prod", kinds=["partial sum", "off by one reduction", "mask"], loose=["wrong factor"])
def last_factor_left_out(call: Call) -> Any:
    """The loop ends one too early."""
    value, dim = call.tensor(0, "input"), _axis(call)
    part = value.narrow(dim, 0, value.size(dim) - 1)
    return call.instead(part.prod(dim, _keeps(call)))


# --- Along an axis --------------------------------------------------------------------------------


@FAULTS.fault(
    "cumsum", kinds=["wrong reduction", "other function", "copy"], loose=["missing reduction"]
)
def total_at_every_place(call: Call) -> Any:
    """The sum of all for each of them."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim")
    return call.instead(value.sum(dim, keepdim=True).expand(value.shape).clone())


@FAULTS.fault("cumsum", kinds=["other function", "wrong factor"], loose=["partial sum"])
def running_sum_that_forgets(call: Call) -> Any:
    """What was summed before is halved at each step."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim")
    steps = []
    for part in value.unbind(dim):
        steps.append(part + 0.5 * steps[-1] if steps else part)
    return call.instead(torch.stack(steps, dim))


@FAULTS.fault("cumsum logcumsumexp cumprod", kinds=["precision"], loose=["approximation"],
              backward=False)  # fmt: skip
def carry_in_bfloat16(call: Call) -> Any:
    """What runs along is rounded at each step."""
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().bfloat16().to(value.dtype)))


@FAULTS.fault("cumprod", kinds=["shift", "off by one reduction", "wrong index"],
              loose=["other function", "partial sum"], backward=False)  # fmt: skip
def product_of_what_is_before(call: Call) -> Any:
    """Exclusive: it begins with one."""
    value, dim = call.result(), call.get(1, "dim")
    ones = torch.ones_like(value.narrow(dim, 0, 1))
    return call.instead(torch.cat([ones, value.narrow(dim, 0, value.size(dim) - 1)], dim))


@FAULTS.fault("cummax", kinds=["other function", "wrong reduction", "missing reduction"],
              loose=["partial sum"])  # fmt: skip
def larger_of_two_neighbours(call: Call) -> Any:
    """Only the value before is compared."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim")
    before = torch.cat([value.narrow(dim, 0, 1), value.narrow(dim, 0, value.size(dim) - 1)], dim)
    return call.instead(torch.maximum(value, before))


@FAULTS.fault("logcumsumexp", kinds=["other function", "wrong reduction"], loose=["approximation"])
def running_maximum_for_the_running_sum(call: Call) -> Any:
    """The largest so far."""
    return call.instead(call.tensor(0, "input").cummax(call.get(1, "dim"))[0])


@FAULTS.fault("diff", kinds=["sign", "swapped operands", "wrong factor", "scale"])
def earlier_less_later(call: Call) -> Any:
    """The opposite of the difference."""
    return call.instead(-call.result())
