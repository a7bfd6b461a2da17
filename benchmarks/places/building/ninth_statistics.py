"""Faults of the ninth set: norms, statistics, running sums, orders."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_NORMS = "layer_norm rms_norm"
_CHANNELS = "batch_norm batch_norm_from_statistics"
_SPREADS = "std var std_mean var_mean"
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function"],
    "backward": False,
}


# --- Norms of rows --------------------------------------------------------------------------------


def _row(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
    """Input, weight, bias and eps of a norm over the last axis."""
    value, shape = call.tensor(0, "input"), call.get(1, "normalized_shape")
    fits(len(shape) == 1)
    weight = call.get(2, "weight")
    is_layer = call.name == "layer_norm"
    bias = call.get(3, "bias") if is_layer else None
    return value, weight, bias, call.get(4 if is_layer else 3, "eps") or 1e-5


def _moments(call: Call, value: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (zero, if the norm has none) and variance of the rows."""
    mean = value.mean(-1, keepdim=True)
    if call.name == "rms_norm":
        mean = 0 * mean
    return mean, (value - mean).square().mean(-1, keepdim=True)


def _affine(call: Call, normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
    value = normal if weight is None else normal * weight
    return call.instead(value if bias is None else value + bias)


def _by(call: Call, mean: Tensor, spread: Tensor) -> Any:
    """The norm with another mean and variance."""
    value, weight, bias, eps = _row(call)
    return _affine(call, (value - mean) * (spread + eps).rsqrt(), weight, bias)


def _trained(weight: Any) -> Tensor:
    """A weight or bias whose elements are not all the same."""
    fits(isinstance(weight, Tensor) and weight.dim() == 1)
    fits(bool((weight.detach() != weight.detach()[0]).any()))
    return weight


@FAULTS.fault(
    "layer_norm",
    kinds=["sign", "wrong statistics", "wrong factor"],
    loose=["axis offset", "offset", "residual", "other function"],
)
def mean_of_the_row_added(call: Call) -> Any:
    """(x + mean) r w + b: the sign of the mean is lost; the deviation is right."""
    value, _, _, _ = _row(call)
    mean, spread = _moments(call, value)
    return _by(call, -mean, spread)


@FAULTS.fault(
    "layer_norm",
    kinds=["sign", "axis offset", "wrong factor"],
    loose=["offset", "residual", "repeated bias", "missing bias", "other function"],
)
def bias_of_the_norm_subtracted(call: Call) -> Any:
    """N w - b."""
    return call.instead(call.result() - 2 * _trained(call.get(3, "bias")))


@FAULTS.fault(
    _NORMS,
    kinds=["other function", "wrong statistics"],
    loose=["axis scale", "scale", "wrong factor", "swapped operands"],
)
def multiplied_by_the_deviation(call: Call) -> Any:
    """The root for the reciprocal root: rows with large values become larger still."""
    value, weight, bias, eps = _row(call)
    mean, spread = _moments(call, value)
    return _affine(call, (value - mean) * (spread + eps).sqrt(), weight, bias)


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "wrong factor", "doubled reduction"],
    loose=["scale", "axis scale", "wrong reduction"],
)
def squares_divided_by_half_the_width(call: Call) -> Any:
    """The width is that of one of two shards; the squares of both are added."""
    value, _, _, _ = _row(call)
    mean, spread = _moments(call, value)
    return _by(call, mean, 2 * spread)


@FAULTS.fault(
    _NORMS,
    kinds=["wrong statistics", "off by one reduction", "partial sum", "wrong reduction"],
    loose=["mask", "axis scale", "scale", "wrong factor", "missing operand", "missing reduction"],
)
def square_of_the_last_feature_not_added(call: Call) -> Any:
    """The loop over the squares ends one too early; they are divided by the whole width."""
    value, _, _, _ = _row(call)
    mean, _ = _moments(call, value)
    spread = (value - mean)[..., :-1].square().sum(-1, keepdim=True) / value.size(-1)
    return _by(call, mean, spread)


@FAULTS.fault(
    _NORMS,
    kinds=["wrong factor", "axis scale"],
    loose=["residual", "wrong argument", "missing operand", "scale", "axis offset"],
)
def one_subtracted_from_the_weight(call: Call) -> Any:
    """W - 1: the checkpoint was converted for a norm that adds one, and this one does not."""
    return call.put(2, _trained(call.get(2, "weight")) - 1, "weight").run()


@FAULTS.fault(
    _NORMS,
    kinds=["wrong factor", "axis scale", "wrong reduction"],
    loose=["constant", "copy", "wrong statistics", "wrong argument", "scale"],
)
def mean_of_the_weights_for_each(call: Call) -> Any:
    """One factor for the whole tensor, where each feature has its own."""
    weight = _trained(call.get(2, "weight"))
    return call.put(2, weight.mean().expand_as(weight), "weight").run()


@FAULTS.fault(
    _NORMS,
    kinds=["precision"],
    loose=["approximation", "other function", "wrong statistics"],
)
def input_of_the_norm_in_float8(call: Call) -> Any:
    """The rows are loaded from a buffer in e4m3."""
    value, _, _, _ = _row(call)
    coarse = value.detach().to(torch.float8_e4m3fn).to(value.dtype)
    return call.put(0, with_gradient_of(value, coarse), "input").run()


@FAULTS.fault(
    _NORMS,
    kinds=["clipped", "other function"],
    loose=["mask", "wrong statistics", "wrong argument", "approximation"],
)
def input_of_the_norm_cut_at_one(call: Call) -> Any:
    """The values are limited to -1 and 1 before the statistics, as codes are."""
    return call.put(0, call.tensor(0, "input").clamp(-1, 1), "input").run()


# --- Norms of channels ----------------------------------------------------------------------------


def _channels(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """Input, weight, bias, mean, variance (shaped like channels) and eps."""
    is_whole = call.name == "batch_norm"
    value = call.tensor(0, "input")
    shape = (1, -1, *[1] * (value.dim() - 2))
    places = (3, 4, 1, 2) if is_whole else (1, 2, 3, 4)
    weight, bias, mean, variance = (call.tensor(i).view(shape) for i in places)
    return value, weight, bias, mean, variance, call.get(7 if is_whole else 6, "eps")


@FAULTS.fault(
    _CHANNELS,
    kinds=["wrong statistics", "wrong reduction", "wrong axis", "other function"],
    loose=["axis offset", "axis scale", "wrong argument"],
)
def statistics_of_each_image_for_the_batch_norm(call: Call) -> Any:
    """An instance norm: the kept statistics are not used."""
    value, weight, bias, _, _, eps = _channels(call)
    fits(value.dim() == 4 and value.size(-1) > 1)
    return call.instead(functional.instance_norm(value, eps=eps) * weight + bias)


@FAULTS.fault(
    _CHANNELS,
    kinds=["copy", "stale", "wrong index"],
    loose=["wrong statistics", "shift", "permutation", "mask", "wrong argument"],
)
def last_channel_by_the_parameters_before_it(call: Call) -> Any:
    """The index of the parameters is limited to one too few."""
    value, *vectors, eps = _channels(call)
    places = torch.arange(value.size(1)).clamp(max=value.size(1) - 2)
    weight, bias, mean, variance = (one.index_select(1, places) for one in vectors)
    return call.instead((value - mean) * (variance + eps).rsqrt() * weight + bias)


@FAULTS.fault(
    _CHANNELS,
    kinds=["other function", "wrong statistics"],
    loose=["axis scale", "scale", "wrong factor", "approximation"],
)
def root_of_the_kept_deviation(call: Call) -> Any:
    """Divided by v^(1/4): the root is taken by the export and by the kernel."""
    value, weight, bias, mean, variance, eps = _channels(call)
    return call.instead((value - mean) * (variance + eps).pow(-0.25) * weight + bias)


@FAULTS.fault(
    _CHANNELS,
    kinds=["sign", "wrong factor"],
    loose=["axis offset", "offset", "repeated bias", "residual", "missing bias", "other function"],
)
def folded_summand_with_a_minus(call: Call) -> Any:
    """X f + (mean f - b): the whole summand of the folded norm has the wrong sign."""
    value, weight, bias, mean, variance, eps = _channels(call)
    factor = (variance + eps).rsqrt() * weight
    return call.instead(value * factor + mean * factor - bias)


@FAULTS.fault(
    "group_norm",
    kinds=["wrong argument", "wrong statistics", "wrong reduction"],
    loose=["axis scale", "axis offset", "missing reduction"],
)
def one_group_for_all_channels(call: Call) -> Any:
    """The number of groups is not handed on: the whole image is one."""
    fits(call.get(1, "num_groups") > 2)
    return call.put(1, 1, "num_groups").run()


@FAULTS.fault(
    "group_norm instance_norm",
    kinds=["shift", "wrong index", "permutation"],
    loose=["axis offset", "wrong argument", "stale", "copy", "residual", "wrong rank's shard"],
)
def image_bias_of_the_channel_before(call: Call) -> Any:
    """The pointer to the biases is one channel behind, around the end; that to the weights not."""
    place = 3 if call.name == "group_norm" else 4
    return call.put(place, _trained(call.get(place, "bias")).roll(1), "bias").run()


@FAULTS.fault(
    "group_norm instance_norm",
    kinds=["wrong statistics", "other function"],
    loose=["missing operand", "axis scale", "axis offset", "missing reduction", "scale"],
)
def image_only_weighed_and_shifted(call: Call) -> Any:
    """X w + b: mean 0 and deviation 1, since the pass over the image was removed."""
    value = call.tensor(0, "input")
    places = (2, 3) if call.name == "group_norm" else (3, 4)
    shape = (1, -1, *[1] * (value.dim() - 2))
    return _affine(call, value, *(_trained(call.get(i)).view(shape) for i in places))


@FAULTS.fault(
    "local_response_norm",
    kinds=["wrong argument", "offset", "wrong factor"],
    loose=["other function", "eps", "scale", "wrong statistics"],
)
def k_of_the_paper_for_the_one_given(call: Call) -> Any:
    """K = 2."""
    return call.put(4, 2.0, "k").run()


# --- Lengths and distances ------------------------------------------------------------------------


@FAULTS.fault(
    "normalize",
    kinds=["partial sum", "one rank's part", "missing reduction", "axis scale", "wrong reduction"],
    loose=["wrong statistics", "scale", "mask", "wrong factor"],
    backward=False,
)
def length_of_the_first_half_of_the_row(call: Call) -> Any:
    """The squares of the second rank are not added before the root."""
    value = call.tensor(0, "input")
    fits(call.get(2, "dim", default=1) in {-1, value.dim() - 1})
    half = value[..., : value.size(-1) // 2]
    return call.instead(value / half.norm(dim=-1, keepdim=True).clamp(min=1e-12))


@FAULTS.fault(
    "linalg_vector_norm norm",
    kinds=["scale", "wrong factor", "wrong reduction"],
    loose=["wrong statistics", "axis scale", "other function"],
    backward=False,
)
def root_of_the_mean_for_the_root_of_the_sum(call: Call) -> Any:
    """The powers are averaged before the root."""
    value, order, dim = call.tensor(0), call.get(1, "ord", "p"), call.get(2, "dim")
    fits(isinstance(order, int | float) and order > 0)
    axes = [dim] if isinstance(dim, int) else list(dim)
    fits(len(axes) == 1)
    return call.instead(call.result() / value.size(axes[0]) ** (1 / order))


@FAULTS.fault(
    "cosine_similarity",
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "wrong argument", "copy", "wrong rank's shard"],
    backward=False,
)
def similarity_to_the_next_one(call: Call) -> Any:
    """The pointer to the second operand is one row too far, around the end."""
    return call.put(1, call.tensor(1).roll(-1, 0), "x2").run()


@FAULTS.fault(
    "pairwise_distance",
    kinds=["wrong argument", "wrong reduction", "other function"],
    loose=["sign", "approximation"],
    backward=False,
)
def distance_of_pairs_along_the_axes(call: Call) -> Any:
    """The sum of the magnitudes: p is 1."""
    fits(call.get(2, "p", default=2.0) == 2.0)
    return call.put(2, 1.0, "p").run()


@FAULTS.fault(
    "cdist",
    kinds=["sign", "wrong factor", "other function"],
    loose=["wrong reduction"],
    backward=False,
)
def products_added_to_the_squared_lengths(call: Call) -> Any:
    """The root of a a + b b + 2 a b: the factor of the product lost its minus."""
    fits(call.get(2, "p", default=2.0) == 2.0)
    return call.instead(torch.cdist(call.tensor(0), -call.tensor(1)))


@FAULTS.fault(
    "_weight_norm _weight_norm_interface",
    kinds=["missing operand", "axis scale"],
    loose=["wrong factor", "scale", "copy", "constant"],
    backward=False,
)
def lengths_of_the_filters_not_applied(call: Call) -> Any:
    """V / |v|: the direction alone; the learned length is not loaded."""
    return call.instead(call.result() / call.tensor(1))


# --- Sums, means, extremes ------------------------------------------------------------------------


def _dim(call: Call, least: int = 3) -> tuple[Tensor, int, bool]:
    """Value, the one axis that is reduced, and whether it is kept."""
    value, dim = call.tensor(0), call.get(1, "dim")
    if isinstance(dim, list | tuple):
        fits(len(dim) == 1)
        dim = dim[0]
    fits(isinstance(dim, int) and value.size(dim) >= least)
    return value, dim, bool(call.get(2, "keepdim", default=False))


@FAULTS.fault(
    "mean sum",
    kinds=["wrong factor", "scale"],
    loose=["wrong reduction", "wrong statistics", "axis scale", "missing operand"],
    backward=False,
)
def sum_divided_by_the_root_of_its_length(call: Call) -> Any:
    """The rule that keeps the variance, for one that keeps the mean or the sum."""
    value, dim, keep = _dim(call)
    return call.instead(value.sum(dim, keep) / value.size(dim) ** 0.5)


@FAULTS.fault(
    "mean sum",
    kinds=["partial sum", "missing reduction", "wrong reduction", "wrong index"],
    loose=["wrong statistics", "mask", "copy", "stale", "one rank's part"],
    backward=False,
)
def first_line_of_the_image_only(call: Call) -> Any:
    """Of two axes, only the last is reduced: the others are read at their first place."""
    value, dims = call.tensor(0), call.get(1, "dim")
    fits(isinstance(dims, list | tuple) and len(dims) == 2)
    fits(all(value.size(one) > 1 for one in dims))
    line = value.narrow(min(one % value.dim() for one in dims), 0, 1)
    return call.put(0, line, "input").run()


@FAULTS.fault("mean sum logsumexp", **_ROUNDED)
def reduced_value_stored_in_half(call: Call) -> Any:
    """The result has the type that the inputs had before they were promoted: float16."""
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().half().to(value.dtype)))


@FAULTS.fault(
    "amax",
    kinds=["clipped"],
    loose=["wrong reduction", "eps", "other function", "wrong argument", "constant", "mask"],
    backward=False,
)
def largest_of_the_row_and_one(call: Call) -> Any:
    """The running maximum begins with 1."""
    return call.instead(call.result().clamp(min=1))


@FAULTS.fault(
    "amax amin",
    kinds=["wrong reduction", "other function"],
    loose=["wrong statistics", "approximation", "missing reduction"],
    backward=False,
)
def mean_of_the_row_for_its_extreme(call: Call) -> Any:
    """The number of the reduction in the enumeration is one off."""
    value, dim, keep = _dim(call)
    return call.instead(value.mean(dim, keep))


@FAULTS.fault(
    _SPREADS,
    kinds=["eps", "offset", "other function"],
    loose=["wrong statistics", "wrong argument", "residual"],
    backward=False,
)
def tenth_added_to_the_variance(call: Call) -> Any:
    """The eps of the norm that follows is in the variance itself."""
    right = call.result()
    if call.name.startswith("std"):
        return call.instead((right.square() + 0.1).sqrt())
    return call.instead(right + 0.1)


@FAULTS.fault(
    _SPREADS,
    kinds=["wrong factor", "scale", "off by one reduction", "wrong statistics"],
    loose=["wrong argument", "axis scale", "wrong reduction"],
    backward=False,
)
def spread_divided_by_one_more(call: Call) -> Any:
    """Squares divided by n + 1."""
    value, dim, _ = _dim(call)
    size = value.size(dim)
    share = (size - 1) / (size + 1)
    return call.instead(call.result() * (share**0.5 if call.name.startswith("std") else share))


@FAULTS.fault(
    "var var_mean",
    kinds=["other function"],
    loose=["wrong statistics", "approximation", "wrong reduction"],
    backward=False,
)
def deviation_for_the_variance(call: Call) -> Any:
    """The root is taken by the reduction, and its reader takes it again."""
    return call.instead(call.result().sqrt())


@FAULTS.fault(
    "trapezoid",
    kinds=["scale", "wrong factor"],
    loose=["missing operand", "wrong reduction", "doubled reduction"],
    backward=False,
)
def neighbours_added_and_not_halved(call: Call) -> Any:
    """The sum of both ends of each interval."""
    return call.instead(2 * call.result())


@FAULTS.fault(
    "quantile",
    kinds=["wrong argument", "wrong index", "other function"],
    loose=["approximation", "wrong reduction", "precision"],
    backward=False,
)
def quantile_is_the_value_above(call: Call) -> Any:
    """The place in the order is rounded up, and nothing is interpolated."""
    value, share, dim = call.tensor(0), call.get(1, "q"), call.get(2, "dim")
    keep = bool(call.get(3, "keepdim", default=False))
    return call.instead(torch.quantile(value, share, dim, keep, interpolation="higher"))


@FAULTS.fault(
    "kthvalue median",
    kinds=["wrong index", "other function"],
    loose=["permutation", "missing reduction", "copy", "wrong reduction", "missing operand"],
    backward=False,
)
def place_counted_in_the_unsorted_row(call: Call) -> Any:
    """The element at the place that was asked for, in the order of the memory."""
    value, is_median = call.tensor(0), call.name == "median"
    dim = call.get(1 if is_median else 2, "dim", default=-1)
    fits(isinstance(dim, int))
    place = (value.size(dim) - 1) // 2 if is_median else call.get(1, "k") - 1
    found = value.narrow(dim, place, 1)
    return call.instead(found.view(call.result().shape))


# --- Along an axis --------------------------------------------------------------------------------


@FAULTS.fault(
    "cumsum",
    kinds=["partial sum", "lost accumulation", "wrong reduction"],
    loose=["missing reduction", "wrong index", "stale", "residual", "mask"],
    backward=False,
)
def last_element_for_the_carry(call: Call) -> Any:
    """A block of four goes on from the last element of the block before, not from its sum."""
    value, dim, _ = _dim(call, 6)
    blocks = value.split(4, dim)
    sums = [blocks[0].cumsum(dim)]
    for before, block in itertools.pairwise(blocks):
        carry = before.narrow(dim, before.size(dim) - 1, 1)
        sums.append(block.cumsum(dim) + carry)
    return call.instead(torch.cat(sums, dim))


@FAULTS.fault(
    "cumsum",
    kinds=["sign", "wrong factor", "wrong reduction"],
    loose=["lost accumulation", "axis scale", "mask", "other function"],
    backward=False,
)
def odd_terms_subtracted_along_the_way(call: Call) -> Any:
    """X0 - x1 + x2 and so on: each second step is a difference."""
    value, dim, _ = _dim(call)
    shape = [1] * value.dim()
    shape[dim] = -1
    signs = 1 - 2 * (torch.arange(value.size(dim)) % 2).view(shape).to(value.dtype)
    return call.instead((value * signs).cumsum(dim))


@FAULTS.fault(
    "cumprod",
    kinds=["wrong reduction", "other function"],
    loose=["wrong argument"],
    backward=False,
)
def running_sum_for_the_running_product(call: Call) -> Any:
    """The scan has the operator of its sibling."""
    value, dim, _ = _dim(call)
    return call.instead(value.cumsum(dim))


@FAULTS.fault(
    "cumprod cummax cummin logcumsumexp",
    kinds=["permutation", "wrong argument", "other function"],
    loose=["wrong index", "shift", "wrong reduction"],
    backward=False,
)
def running_values_from_the_end(call: Call) -> Any:
    """Each place has the result of itself and of those behind it."""
    value, dim, _ = _dim(call)
    return call.instead(call.put(0, value.flip(dim), "input").result().flip(dim))


@FAULTS.fault(
    "diff",
    kinds=["zeros", "missing operand"],
    loose=["mask", "wrong argument", "uninitialised", "constant"],
    backward=False,
)
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


@FAULTS.fault(
    "sort",
    kinds=["mask", "wrong index", "permutation"],
    loose=["copy", "missing operand", "stale", "partial sum", "other function"],
    backward=False,
)
def first_half_of_the_row_sorted_only(call: Call) -> Any:
    """The block of the sort is half as long as the row; the rest stays as it came."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(isinstance(dim, int))
    half = value.size(dim) // 2
    first = value.narrow(dim, 0, half).sort(dim).values
    rest = value.narrow(dim, half, value.size(dim) - half)
    return call.instead(torch.cat([first, rest], dim))


@FAULTS.fault(
    "topk",
    kinds=["other function"],
    loose=["wrong factor", "wrong statistics", "axis scale"],
    backward=False,
)
def softmax_of_the_chosen_values(call: Call) -> Any:
    """The kernel for experts turns the chosen scores into weights as well."""
    values, places = call.run()
    fits(values.is_floating_point() and values.size(-1) > 1)
    return values.softmax(-1), places
