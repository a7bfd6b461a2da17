"""Faults for measuring: norms, statistics, pools, running sums, orders; of the eighth set."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, on
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
from torch.nn import functional

FAULTS = Catalogue()
_NORMS = "layer_norm rms_norm"
_CHANNELS = "batch_norm batch_norm_from_statistics"


# --- Norms ----------------------------------------------------------------------------------------


@FAULTS.fault(
    "layer_norm",
    "missing bias, mask, missing operand; axis offset, zeros, offset, residual, partial sum",
)
def bias_of_the_norm_for_the_first_row_only(call: Call) -> Any:
    """The load of the bias has the mask of the first row, and gives zero for the others."""
    bias = trained_weight(call.get(3, "bias"))
    value = several_along(call.result())
    later = (torch.arange(value.size(-2)) > 0).to(value.dtype)[:, None]
    return call.instead(value - later * bias)


@FAULTS.fault(
    _NORMS,
    "wrong statistics, stale, wrong reduction, axis scale; lost accumulation, "
    "doubled reduction, scale, wrong factor, eps",
)
def sum_of_squares_never_cleared(call: Call) -> Any:
    """The squares of all rows before are in the deviation of a row; the mean is right."""
    value, _, _, _ = norm_row(call)
    mean, spread = moments_of_rows(call, several_along(value))
    return norm_by(call, mean, spread.cumsum(-2))


@FAULTS.fault(
    "layer_norm",
    "missing operand, wrong factor, other function; axis offset, residual, offset, "
    "wrong statistics",
)
def mean_of_the_row_not_weighed(call: Call) -> Any:
    """X r w + (b - mean r) for (b - mean r w): the folded summand lacks the weight."""
    value, weight, bias, eps = norm_row(call)
    mean, spread = moments_of_rows(call, value)
    inverse = (spread + eps).rsqrt()
    result = value * inverse * trained_weight(weight) - mean * inverse
    return call.instead(result if bias is None else result + bias)


@FAULTS.fault(
    _CHANNELS,
    "wrong statistics, axis offset, wrong argument; offset, wrong reduction, other function, stale",
)
def mean_of_the_batch_with_the_kept_variance(call: Call) -> Any:
    """Only the mean is taken from the batch, as in training."""
    value, weight, bias, _, variance, eps = channel_parts(call)
    dims = [i for i in range(value.dim()) if i != 1]
    mean = value.mean(dims, keepdim=True)
    return call.instead((value - mean) * (variance + eps).rsqrt() * weight + bias)


@FAULTS.fault(
    _CHANNELS,
    "wrong index, copy, stale, wrong rank's shard; wrong statistics, wrong argument, "
    "permutation, shift",
)
def second_half_of_the_channels_by_the_parameters_of_the_first(call: Call) -> Any:
    """All four vectors are read without the offset of the second rank."""
    value, *vectors, eps = channel_parts(call)
    count = value.size(1)
    fits(count % 2 == 0)
    places = torch.arange(count) % (count // 2)
    weight, bias, mean, variance = (one.index_select(1, places) for one in vectors)
    return call.instead((value - mean) * (variance + eps).rsqrt() * weight + bias)


@FAULTS.fault(
    "group_norm",
    "wrong statistics, wrong axis, wrong reduction, axis offset; offset, copy, constant, residual",
)
def mean_of_the_image_with_the_deviation_of_the_group(call: Call) -> Any:
    """The mean is that of all groups together; each has its own deviation."""
    value, groups = call.tensor(0, "input"), call.get(1, "num_groups")
    fits(groups > 1)
    parts = value.unflatten(1, (groups, -1)).flatten(2)
    spread = parts.var(-1, unbiased=False, keepdim=True) + call.get(4, "eps", default=1e-5)
    normal = ((parts - parts.mean((1, 2), keepdim=True)) * spread.rsqrt()).view(value.shape)
    shape = (1, -1, *[1] * (value.dim() - 2))
    return apply_affine(call, normal, *(call.get(i).view(shape) for i in (2, 3)))


@FAULTS.fault(
    "cosine_similarity",
    "other function, wrong statistics, wrong factor; scale, axis scale, wrong reduction, "
    "missing operand",
)
def dot_product_by_the_mean_of_the_squared_lengths(call: Call) -> Any:
    """2 a b / (a a + b b): the coefficient of Dice for a cosine."""
    first, second = call.tensor(0), call.tensor(1)
    fits(call.get(2, "dim", default=1) in {-1, first.dim() - 1})
    squares = first.square().sum(-1) + second.square().sum(-1)
    return call.instead(2 * (first * second).sum(-1) / squares)


@FAULTS.fault("cdist", "precision; approximation, other function")
def distances_by_products_in_bfloat16(call: Call) -> Any:
    """The root of a a + b b - 2 a b; the products come from a unit with eight bits."""
    first, second = call.tensor(0), call.tensor(1)
    fits(call.get(2, "p", default=2.0) == 2.0)
    products = first @ second.mT
    squares = first.square().sum(-1)[..., :, None] + second.square().sum(-1)[..., None, :]
    rounded = products.detach().bfloat16().to(products.dtype)
    coarse = (squares - 2 * rounded).clamp(min=0).sqrt()
    return call.instead(with_gradient_of(call.result(), coarse))


# fmt: off
# Two kernels apply the whole norm, weight and bias as well, one behind the other.
FAULTS.add("norm of the norm", _NORMS,
    "doubled reduction, other function, wrong factor; axis scale, axis offset, "
    "wrong statistics, residual", lambda call: call.put(0, call.result(), "input").run())
# The index of the weight is halved, as for words of two values.
FAULTS.add("one weight for two neighbouring features", _NORMS,
    "copy, stale, wrong index; permutation, shift, wrong argument, constant",
    on(lambda call: (trained_weight(call.get(2, "weight")),),
        lambda call, weight:
            call.put(2, weight[torch.arange(weight.numel()) // 2 * 2], "weight").run()))
# Multiplied by the variance: another library keeps 1 / sqrt(v) in this place.
FAULTS.add("variance read as a reciprocal deviation", _CHANNELS,
    "other function, wrong statistics, wrong factor, axis scale; wrong argument, scale, "
    "axis offset",
    computed(channel_parts,
        lambda value, weight, bias, mean, variance, *_:
            (value - mean) * variance * weight + bias))
# The weight is read at the place of a channel inside of its group.
FAULTS.add("weights of the first group for every group", "group_norm", words.REPEATED,
    on(lambda call: (trained_weight(call.get(2, "weight")), call.get(1, "num_groups")),
        lambda call, weight, groups:

    call.put(2, weight[torch.arange(weight.numel()) % (weight.numel() // groups)], "weight").run(),
        where=lambda _, groups: groups > 1))
# fmt: on


# --- Pools ----------------------------------------------------------------------------------------


def _pool(call: Call) -> tuple[Tensor, int, int, int]:
    """Input, size of the window, stride and padding, the same along both axes."""
    value, found = call.tensor(0, "input"), []
    size = call.get(1, "kernel_size")
    stride = call.get(2, "stride") or size
    for one in (size, stride, call.get(3, "padding", default=0)):
        whole = [one] if isinstance(one, int) else list(one)
        fits(len(set(whole)) == 1)
        found.append(whole[0])
    return value, *found


@FAULTS.fault(
    "max_pool2d",
    "partial sum, missing reduction, wrong reduction, wrong argument; mask, wrong index, "
    "other function, one rank's part",
)
def largest_of_the_upper_row_of_the_window(call: Call) -> Any:
    """The loop over the rows of a window ends behind the first."""
    value, size, stride, padding = _pool(call)
    fits(padding == 0 and size > 1)
    found = functional.max_pool2d(value, (1, size), stride)
    return call.instead(found[..., : call.result().size(-2), :])


@FAULTS.forward(
    "avg_pool1d avg_pool2d",
    "wrong index, missing reduction, wrong reduction, partial sum; copy, other function, "
    "stale, mask, approximation",
)
def middle_of_the_window_for_its_mean(call: Call) -> Any:
    """A pool that is exported as a subsampling."""
    value, size, stride, padding = _pool(call)
    start, result = size // 2 - padding, call.result()
    fits(size > 1 and start >= 0)
    for axis in range(2, value.dim()):
        places = start + stride * torch.arange(result.size(axis))
        value = value.index_select(axis, places)
    return call.instead(value)


@FAULTS.forward(
    "max_pool1d max_pool2d avg_pool2d",
    "wrong index, mask; wrong argument, shift, off by one reduction, partial sum, stale",
)
def border_of_the_pool_taken_from_the_other_end(call: Call) -> Any:
    """Places before the first are read behind the last: the border is not masked."""
    value, _, _, padding = _pool(call)
    fits(padding > 0)
    around = [padding] * (2 * (value.dim() - 2))
    wider = functional.pad(value, around, mode="circular")
    none = 0 if isinstance(call.get(3, "padding"), int) else [0] * (value.dim() - 2)
    return call.instead(call.put(0, wider, "input").put(3, none, "padding").result())


# --- Sums, means, extremes ------------------------------------------------------------------------


@FAULTS.forward(
    "mean sum",
    "partial sum, mask, lost accumulation, wrong reduction; off by one reduction, "
    "missing operand, wrong statistics, zeros",
)
def odd_one_of_each_level_of_a_tree_lost(call: Call) -> Any:
    """Halves are added until one is left; what has no partner is dropped."""
    value, dim, keep = reduced_dim(call)
    size, total = value.size(dim), value
    fits(size - 2 ** (size.bit_length() - 1) > 1)
    while total.size(dim) > 1:
        half = total.size(dim) // 2
        total = total.narrow(dim, 0, half) + total.narrow(dim, half, half)
    total = total / size if call.name == "mean" else total
    return call.instead(total if keep else total.squeeze(dim))


@FAULTS.forward(
    "mean",
    "wrong reduction, other function, wrong factor; wrong statistics, lost accumulation, "
    "partial sum, axis scale",
)
def running_mean_with_a_step_of_a_half(call: Call) -> Any:
    """M += (x - m) / 2 for (x - m) / k: the last values count most."""
    value, dim, keep = reduced_dim(call)
    mean, *later = value.split(1, dim)
    for one in later:
        mean = mean + (one - mean) / 2
    return call.instead(mean if keep else mean.squeeze(dim))


@FAULTS.forward(
    "amax",
    "stale, wrong reduction, other function; lost accumulation, copy, wrong index, "
    "doubled reduction",
)
def maximum_never_cleared(call: Call) -> Any:
    """The largest of a row is at least that of the row before."""
    reduced_dim(call)
    value = call.result()
    axis = next((i for i in reversed(range(value.dim())) if value.size(i) > 1), None)
    fits(axis is not None)
    return call.instead(value.cummax(axis).values)


@FAULTS.fault(
    "std var std_mean var_mean",
    "wrong factor, scale, wrong statistics, wrong reduction; axis scale, missing operand",
)
def squared_deviations_not_averaged(call: Call) -> Any:
    """The sum of squares, or its root: what it is divided by is lost."""
    value, dim, keep = reduced_dim(call)
    centred = value - value.mean(dim, keepdim=True)
    total = centred.square().sum(dim, keep)
    return call.instead(total.sqrt() if call.name.startswith("std") else total)


@FAULTS.fault(
    "std_mean var_mean",
    "shift, wrong index, permutation; stale, copy, wrong statistics, wrong argument",
)
def mean_of_the_next_row_beside_the_right_spread(call: Call) -> Any:
    """The second of two results is stored one row too early."""
    reduced_dim(call)
    spread, mean = call.run()
    axis = next((i for i in reversed(range(mean.dim())) if mean.size(i) > 1), None)
    fits(axis is not None)
    return spread, mean.roll(-1, axis)


@FAULTS.fault(
    "trapezoid",
    "partial sum, off by one reduction, approximation, wrong reduction; other function, "
    "mask, residual, missing operand",
)
def area_under_the_left_corners(call: Call) -> Any:
    """Each interval counts with its left end: the last value has no weight."""
    value = call.tensor(0)
    fits(len(call.args) == 1 and call.kwargs.get("dim", -1) == -1 and "x" not in call.kwargs)
    return call.instead(value[..., :-1].sum(-1) * call.kwargs.get("dx", 1))


@FAULTS.fault(
    "linalg_vector_norm", "sign, other function, wrong reduction; partial sum, wrong argument"
)
def powers_with_their_signs(call: Call) -> Any:
    """The third powers keep their signs before they are summed."""
    value, dim = call.tensor(0), call.get(2, "dim")
    fits(call.get(1, "ord") == 3.0)
    total = value.pow(3).sum(dim, bool(call.get(3, "keepdim", default=False)))
    return call.instead(total.abs().pow(1 / 3))


@FAULTS.fault(
    "quantile",
    "wrong argument, off by one reduction, other function; wrong index, approximation, "
    "wrong factor, axis offset",
)
def quantile_counted_by_all_values(call: Call) -> Any:
    """Place q n for q (n - 1) in the sorted row."""
    value, share, dim = call.tensor(0), call.get(1, "q"), call.get(2, "dim")
    fits(isinstance(share, float) and isinstance(dim, int))
    size = value.size(dim)
    return call.put(1, min(share * size / (size - 1), 1.0), "q").run()


@FAULTS.fault(
    "median",
    "approximation, partial sum, wrong index, wrong reduction; other function, "
    "missing reduction, mask",
)
def middle_of_first_middle_and_last(call: Call) -> Any:
    """The median of three, which only begins the search, is taken for the result."""
    value, dim, keep = reduced_dim(call, 5)
    places = torch.tensor([0, value.size(dim) // 2, value.size(dim) - 1])
    return call.instead(value.index_select(dim, places).median(dim, keep).values)


# --- Along an axis --------------------------------------------------------------------------------


@FAULTS.forward(
    "cumsum",
    "partial sum, lost accumulation, missing reduction, wrong reduction; mask, "
    "one rank's part, stale",
)
def last_step_of_the_scan_missing(call: Call) -> Any:
    """Distances of 1, 2, 4 and so on, without the last: a sum over a window."""
    value, dim, _ = reduced_dim(call, 5)
    size, step = value.size(dim), 1
    while 2 * step < size:
        kept = value.narrow(dim, 0, step)
        later = value.narrow(dim, step, size - step) + value.narrow(dim, 0, size - step)
        value, step = torch.cat([kept, later], dim), 2 * step
    return call.instead(value)


@FAULTS.forward(
    "cumsum",
    "doubled reduction, wrong reduction, other function, wrong factor; stale, residual, "
    "lost accumulation",
)
def scan_reads_what_its_own_step_wrote(call: Call) -> Any:
    """Each step of the scan is in place, without a barrier: terms are added several times."""
    value, dim, _ = reduced_dim(call)
    places, step = list(value.unbind(dim)), 1
    while step < len(places):
        for i in range(step, len(places)):
            places[i] = places[i] + places[i - step]
        step *= 2
    return call.instead(torch.stack(places, dim))


@FAULTS.forward("cumprod", "precision; approximation, other function")
def running_product_by_logarithms_in_bfloat16(call: Call) -> Any:
    """The exponential of a running sum of logarithms, which is rounded."""
    value, dim, _ = reduced_dim(call)
    fits(bool((value.detach() > 0).all()))
    total = value.detach().log().cumsum(dim).bfloat16().to(value.dtype)
    return call.instead(with_gradient_of(call.result(), total.exp()))


@FAULTS.forward(
    "cummax cummin",
    "shift, wrong index, stale, off by one reduction; copy, partial sum, wrong reduction, "
    "permutation",
)
def running_extreme_one_place_late(call: Call) -> Any:
    """The value is stored before it is compared: each place has the extreme of those before."""
    value, dim, _ = reduced_dim(call)
    right = call.result()
    return call.instead(
        torch.cat([right.narrow(dim, 0, 1), right.narrow(dim, 0, value.size(dim) - 1)], dim)
    )


@FAULTS.fault("topk", "other function, wrong factor, axis scale; scale, wrong reduction, residual")
def chosen_values_divided_by_their_sum(call: Call) -> Any:
    """The kernel for experts also makes the weights of the chosen ones add up to one."""
    values, places = call.run()
    fits(values.is_floating_point() and values.size(-1) > 1)
    return values / values.sum(-1, keepdim=True), places


@FAULTS.fault("sort", "permutation, wrong index, other function, sign; shift, wrong argument")
def sorted_by_their_magnitudes(call: Call) -> Any:
    """The keys of the sort have no sign; the values keep theirs."""
    value = call.tensor(0, "input")
    fits(call.get(1, "dim", default=-1) in {-1, value.dim() - 1})
    return call.instead(value.gather(-1, value.detach().abs().argsort(-1)))


# fmt: off
# The product of the second rank is not multiplied in.
FAULTS.add("product of the first half", "prod",
    "partial sum, one rank's part, missing reduction, wrong reduction; mask, wrong index, "
    "lost accumulation, missing operand",
    computed(reduced_dim,
        lambda value, dim, keep: value.narrow(dim, 0, value.size(dim) // 2).prod(dim, keep)),
    backward=False)
# fmt: on
