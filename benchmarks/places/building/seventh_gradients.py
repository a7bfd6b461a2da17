"""Faults for measuring: backward operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor

FAULTS = Catalogue()
_EMPTY: dict[str, Any] = {
    "kinds": ["zeros", "mask", "uninitialised"],
    "loose": ["constant", "missing operand", "axis scale", "wrong factor", "one rank's part"],
    "backward": True,
}
_LOST: dict[str, Any] = {
    "kinds": ["zeros", "constant", "missing operand", "lost accumulation", "uninitialised"],
    "loose": ["mask", "axis scale", "wrong factor"],
    "backward": True,
}
_MOVED: dict[str, Any] = {
    "kinds": ["shift", "wrong index", "permutation"],
    "loose": ["copy", "stale", "wrong argument", "axis scale"],
    "backward": True,
}
_ORDER: dict[str, Any] = {
    "kinds": ["permutation", "wrong index"],
    "loose": ["shift", "swapped operands", "transpose", "wrong rank's shard", "wrong argument"],
    "backward": True,
}
_AGAIN: dict[str, Any] = {
    "kinds": ["copy", "stale", "wrong index"],
    "loose": ["permutation", "constant", "shift", "wrong argument", "wrong rank's shard"],
    "backward": True,
}
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function", "wrong argument"],
    "backward": True,
}
_CUT: dict[str, Any] = {
    "kinds": ["clipped"],
    "loose": ["other function", "precision", "overflow", "wrong argument", "mask"],
    "backward": True,
}
_TIMES: dict[str, Any] = {
    "kinds": ["scale", "wrong factor"],
    "loose": ["missing operand", "doubled reduction", "wrong reduction", "axis scale"],
    "backward": True,
}
_MINUS: dict[str, Any] = {
    "kinds": ["sign", "scale", "wrong factor"],
    "loose": ["swapped operands", "other function"],
    "backward": True,
}
_PART: dict[str, Any] = {
    "kinds": ["partial sum", "mask", "one rank's part", "missing reduction"],
    "loose": ["wrong reduction", "lost accumulation", "wrong index", "zeros"],
    "backward": True,
}


def _like(kept: Tensor, value: Tensor) -> Tensor:
    """The value in the layout of another: later views depend on it."""
    fits(value.shape == kept.shape)
    if value.stride() == kept.stride() or 0 in kept.stride():
        return value
    return torch.empty_strided(kept.shape, kept.stride(), dtype=kept.dtype).copy_(value)


def _at(call: Call, place: int, change: Any) -> Any:
    """All results, one of them changed."""
    results = list(call.run())
    fits(isinstance(results[place], Tensor))
    results[place] = _like(results[place], change(results[place]))
    return tuple(results)


def _rows(value: Tensor) -> Tensor:
    """The value, if it has several rows."""
    fits(value.dim() > 1 and value.size(-2) > 1)
    return value


def _columns(value: Tensor) -> Tensor:
    fits(value.dim() > 0 and value.size(-1) > 1)
    return value


def _pairs(value: Tensor) -> Tensor:
    """Neighbouring columns exchanged."""
    fits(value.dim() > 0 and value.size(-1) % 2 == 0)
    return value.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _tiled(value: Tensor, dim: int) -> Tensor:
    """The second half along an axis is the first again."""
    size = value.size(dim)
    fits(size > 1)
    return value.index_select(dim, torch.arange(size) % ((size + 1) // 2))


def _without(value: Tensor, dim: int, start: int, step: int = 1) -> Tensor:
    """Zero from a place on, in steps."""
    kept = torch.ones(value.size(dim), dtype=value.dtype)
    kept[start::step] = 0
    fits(bool((kept == 0).any()) and bool(kept.any()))
    shape = [1] * value.dim()
    shape[dim] = -1
    return value * kept.view(shape)


def _cut(value: Tensor) -> Tensor:
    limit = float(value.abs().max()) / 2
    return value.clamp(-limit, limit)


def _narrow(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).to(value.dtype)


# --- Activations ----------------------------------------------------------------------------------

_BY_INPUT = "gelu_backward silu_backward"
_SMOOTH = "gelu_backward silu_backward sigmoid_backward tanh_backward"
_ALL = f"{_SMOOTH} threshold_backward"
_RARE = (
    "hardswish_backward hardtanh_backward hardsigmoid_backward leaky_relu_backward "
    "elu_backward softplus_backward mish_backward glu_backward log_sigmoid_backward"
)


@FAULTS.fault(_ALL, **_MOVED)
def gradient_of_the_activation_one_row_early(call: Call) -> Any:
    """The gradients are stored one row too early, around the end."""
    return call.instead(_rows(call.result()).roll(-1, -2))


@FAULTS.fault(f"{_ALL} {_RARE}", **_ORDER)
def gradient_of_the_activation_in_pairs(call: Call) -> Any:
    """Words of two gradients are stored in the other order."""
    return call.instead(_pairs(call.result()))


@FAULTS.fault(f"{_ALL} {_RARE}", **_EMPTY)
def odd_columns_of_the_activation_without_gradient(call: Call) -> Any:
    """The store has a stride of two."""
    return call.instead(_without(_columns(call.result()), -1, 1, 2))


@FAULTS.fault(_ALL, **_AGAIN)
def gradient_of_the_first_tile_of_columns_again(call: Call) -> Any:
    """The offset of the second tile of columns is not added."""
    return call.instead(_tiled(call.result(), -1))


@FAULTS.fault(f"{_ALL} {_RARE}", **_CUT)
def gradient_of_the_activation_saturates(call: Call) -> Any:
    """Integers that end at half of the largest magnitude."""
    return call.instead(_cut(call.result()))


@FAULTS.fault(
    _ALL,
    kinds=["residual", "offset", "other function"],
    loose=["wrong factor", "approximation", "mask"],
    backward=True,
)
def slope_raised_by_a_tenth(call: Call) -> Any:
    """G (f' + 0.1), so that no unit is ever dead."""
    return call.instead(call.result() + 0.1 * call.tensor(0))


@FAULTS.fault(
    _SMOOTH,
    kinds=["other function", "wrong factor"],
    loose=["wrong argument", "approximation", "scale", "doubled reduction"],
    backward=True,
)
def slope_multiplied_twice(call: Call) -> Any:
    """G f'^2: the chain rule is applied by two kernels."""
    slope = call.put(0, torch.ones_like(call.tensor(0))).run()
    return call.instead(call.result() * slope)


@FAULTS.fault(
    _BY_INPUT,
    kinds=["wrong factor", "other function"],
    loose=["scale", "wrong argument", "approximation"],
    backward=True,
)
def slope_at_twice_the_input(call: Call) -> Any:
    """f'(2 x)."""
    return call.put(1, 2 * call.tensor(1)).run()


@FAULTS.fault(
    _BY_INPUT,
    kinds=["clipped"],
    loose=["other function", "wrong argument", "precision", "mask"],
    backward=True,
)
def saved_input_saturates(call: Call) -> Any:
    """What was kept ends at half of its largest magnitude."""
    return call.put(1, _cut(call.tensor(1))).run()


@FAULTS.fault(
    _BY_INPUT,
    kinds=["sign", "other function"],
    loose=["wrong argument", "wrong factor"],
    backward=True,
)
def slope_at_the_magnitude_of_the_input(call: Call) -> Any:
    """f'(|x|): what was kept has lost its sign."""
    return call.put(1, call.tensor(1).abs()).run()


@FAULTS.fault(
    "tanh_backward",
    kinds=["other function"],
    loose=["approximation", "wrong factor", "wrong argument"],
    backward=True,
)
def slope_of_one_less_the_magnitude(call: Call) -> Any:
    """G (1 - |y|): the result is not squared."""
    return call.instead(call.tensor(0) * (1 - call.tensor(1).abs()))


@FAULTS.fault(
    "sigmoid_backward",
    kinds=["other function", "approximation"],
    loose=["wrong factor", "clipped"],
    backward=True,
)
def slope_of_the_smaller_side(call: Call) -> Any:
    """G min(y, 1 - y) / 2: two lines for the parabola."""
    value = call.tensor(1)
    return call.instead(call.tensor(0) * torch.minimum(value, 1 - value) / 2)


@FAULTS.fault(
    "threshold_backward",
    kinds=["copy", "stale", "wrong index", "mask"],
    loose=["permutation", "wrong argument"],
    backward=True,
)
def mask_of_the_first_row_on_the_way_back(call: Call) -> Any:
    """The saved signs are not moved on with the rows."""
    value = _rows(call.tensor(1))
    return call.put(1, value[..., :1, :].expand(value.shape).clone()).run()


@FAULTS.fault("threshold_backward", **_TIMES)
def gradient_of_the_relu_doubled(call: Call) -> Any:
    """Twice the gradient where the input was positive."""
    return call.instead(2 * call.result())


@FAULTS.fault(
    "gelu_backward",
    kinds=["wrong factor", "other function"],
    loose=["missing operand", "scale", "approximation"],
    backward=True,
)
def density_without_its_root(call: Call) -> Any:
    """The gate plus x exp(-x^2 / 2): the density is not divided by sqrt(2 pi)."""
    gradient, value = call.tensor(0), call.tensor(1)
    gate = 0.5 * (1 + (value / 2**0.5).erf())
    return call.instead(gradient * (gate + value * (-value.square() / 2).exp()))


@FAULTS.fault(
    "silu_backward",
    kinds=["missing operand", "other function", "wrong factor"],
    loose=["approximation"],
    backward=True,
)
def complement_of_the_gate_forgotten(call: Call) -> Any:
    """S (1 + x) for s (1 + x (1 - s))."""
    gradient, value = call.tensor(0), call.tensor(1)
    return call.instead(gradient * value.sigmoid() * (1 + value))


@FAULTS.fault(
    _BY_INPUT,
    kinds=["approximation", "other function"],
    loose=["clipped", "mask", "constant"],
    backward=True,
)
def slope_of_the_tails_taken_as_straight(call: Call) -> Any:
    """Beyond -1 and 1 the slope is 0 and 1."""
    gradient, value = call.tensor(0), call.tensor(1)
    straight = gradient * (value > 0)
    return call.instead(torch.where(value.abs() > 1, straight, call.result()))


@FAULTS.fault(
    "hardswish_backward",
    kinds=["missing operand", "other function", "mask"],
    loose=["clipped", "approximation"],
    backward=True,
)
def slope_of_the_parabola_everywhere(call: Call) -> Any:
    """G (2 x + 3) / 6: the limits of the hard swish are forgotten."""
    return call.instead(call.tensor(0) * (2 * call.tensor(1) + 3) / 6)


# --- Softmax, attention ---------------------------------------------------------------------------

_SOFTMAX = "_softmax_backward_data softmax_backward_data"
_LOGARITHM = "_log_softmax_backward_data log_softmax_backward_data"


def _chances(call: Call) -> tuple[Tensor, Tensor]:
    gradient, chances = call.tensor(0), call.tensor(1)
    fits(chances.dim() > 1 and call.args[2] in {-1, chances.dim() - 1} and chances.size(-1) > 2)
    return gradient, chances


@FAULTS.fault(
    _SOFTMAX,
    kinds=["wrong factor", "residual", "doubled reduction", "axis offset"],
    loose=["scale", "other function", "wrong reduction", "offset"],
    backward=True,
)
def sum_of_the_row_subtracted_twice(call: Call) -> Any:
    """Y (g - 2 sum(g y))."""
    gradient, chances = _chances(call)
    total = (gradient * chances).sum(-1, keepdim=True)
    return call.instead(chances * (gradient - 2 * total))


@FAULTS.fault(_SOFTMAX, **_ROUNDED)
def saved_chances_in_float8(call: Call) -> Any:
    """What was kept is e4m3."""
    _, chances = _chances(call)
    return call.put(1, _narrow(chances, torch.float8_e4m3fn)).run()


@FAULTS.fault(
    _SOFTMAX,
    kinds=["sign", "other function", "wrong reduction"],
    loose=["axis offset", "residual", "offset", "wrong statistics"],
    backward=True,
)
def magnitudes_of_the_products_summed(call: Call) -> Any:
    """Y (g - sum |g y|)."""
    gradient, chances = _chances(call)
    total = (gradient * chances).abs().sum(-1, keepdim=True)
    return call.instead(chances * (gradient - total))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["wrong reduction", "wrong axis", "axis offset", "wrong statistics"],
    loose=["offset", "residual", "constant", "doubled reduction"],
    backward=True,
)
def products_of_all_rows_summed(call: Call) -> Any:
    """The sum that is subtracted is over the rows of a matrix as well."""
    gradient, chances = _chances(call)
    _rows(chances)
    total = (gradient * chances).sum((-1, -2), keepdim=True)
    return call.instead(chances * (gradient - total))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["copy", "wrong index", "stale", "axis offset", "wrong statistics"],
    loose=["permutation", "shift", "offset", "wrong reduction"],
    backward=True,
)
def odd_rows_subtract_the_sum_of_the_row_before(call: Call) -> Any:
    """Two rows share a register for their sum."""
    gradient, chances = _chances(call)
    _rows(chances)
    total = (gradient * chances).sum(-1, keepdim=True)
    rows = torch.arange(chances.size(-2)) // 2 * 2
    return call.instead(chances * (gradient - total[..., rows, :]))


@FAULTS.fault(
    _LOGARITHM,
    kinds=["partial sum", "one rank's part", "missing reduction", "wrong reduction"],
    loose=["mask", "missing operand", "lost accumulation", "wrong factor", "residual"],
    backward=True,
)
def gradients_of_the_first_classes_summed(call: Call) -> Any:
    """G - y sum(g) with the sum over the first half of the classes: the other rank has the rest."""
    gradient, value = _chances(call)
    total = gradient[..., : gradient.size(-1) // 2].sum(-1, keepdim=True)
    return call.instead(gradient - value.exp() * total)


@FAULTS.fault(
    _LOGARITHM,
    kinds=["constant", "missing operand", "other function"],
    loose=["approximation", "wrong factor", "axis offset", "wrong statistics", "residual"],
    backward=True,
)
def even_chances_on_the_way_back(call: Call) -> Any:
    """G - sum(g) / n: the saved result is not read, and every class has the same chance."""
    gradient, _ = _chances(call)
    return call.instead(gradient - gradient.mean(-1, keepdim=True))


_FUSED = (
    "_scaled_dot_product_flash_attention_for_cpu_backward "
    "scaled_dot_product_flash_attention_for_cpu_backward"
)


@FAULTS.fault(_FUSED, **_ORDER)
def gradient_of_the_query_from_the_last_position(call: Call) -> Any:
    """The rows of dq are stored from the end."""
    return _at(call, 0, lambda one: one.flip(-2))


@FAULTS.fault(_FUSED, **_AGAIN)
def gradient_of_the_keys_of_the_first_head(call: Call) -> Any:
    """All heads of dk are what the first has."""
    fits(call.tensor(2).size(1) > 1)
    return _at(call, 1, lambda one: one[:, :1].expand(one.shape).clone())


@FAULTS.fault(_FUSED, **_MINUS)
def gradient_of_the_query_negated(call: Call) -> Any:
    """Dq has a minus; dk and dv are right."""
    return _at(call, 0, lambda one: -one)


@FAULTS.fault(_FUSED, **_EMPTY)
def odd_keys_without_gradient(call: Call) -> Any:
    """Dk has a stride of two."""
    return _at(call, 1, lambda one: _without(one, -2, 1, 2))


@FAULTS.fault(
    _FUSED,
    kinds=["wrong reduction", "wrong statistics", "constant"],
    loose=["copy", "wrong axis", "wrong index", "axis offset"],
    backward=True,
)
def gradient_of_the_keys_averaged_over_the_heads(call: Call) -> Any:
    """As of keys that all heads share, and each head gets the mean."""
    fits(call.tensor(2).size(1) > 1)
    return _at(call, 1, lambda one: one.mean(1, keepdim=True).expand(one.shape).clone())


def _inner(call: Call) -> tuple[Tensor, ...]:
    """Gradient, query, key, value, chances, gradient of the chances, their sums, scale."""
    gradient, query, key, value, result, total = (call.tensor(i) for i in range(6))
    scale = call.kwargs.get("scale") or query.size(-1) ** -0.5
    scores, mask = query @ key.mT * scale, call.kwargs.get("attn_mask")
    if call.get(7, "is_causal"):
        mask = torch.full(scores.shape[-2:], -math.inf).triu(1).to(scores.dtype)
    if mask is not None:
        scores = scores + mask
    chances = (scores - total.unsqueeze(-1)).exp()
    sums = (gradient * result).sum(-1, keepdim=True)
    return query, key, chances, gradient @ value.mT, sums, torch.tensor(scale).to(query.dtype)


@FAULTS.fault(
    _FUSED,
    kinds=["missing operand", "wrong factor", "other function"],
    loose=["axis scale", "scale"],
    backward=True,
)
def gradient_of_the_query_not_weighed(call: Call) -> Any:
    """The difference of gradient and sum is not multiplied by the chances, for dq only."""
    _, key, chances, inner, sums, scale = _inner(call)
    return _at(call, 0, lambda _: (inner - sums) * (chances > 0) @ key * scale)


@FAULTS.fault(
    _FUSED,
    kinds=["shift", "wrong index", "permutation", "axis offset"],
    loose=["stale", "copy", "wrong statistics", "offset"],
    backward=True,
)
def sum_of_the_next_query_subtracted(call: Call) -> Any:
    """The pointer to the sums of gradient times output is one query too far, for dq and dk."""
    query, key, chances, inner, sums, scale = _inner(call)
    fits(sums.size(-2) > 1)
    scores = chances * (inner - sums.roll(-1, -2))
    results = list(call.run())
    changed = scores @ key * scale, scores.mT @ query * scale
    return (*map(_like, results[:2], changed), *results[2:])


@FAULTS.fault(
    _FUSED,
    kinds=["missing operand", "mask", "partial sum", "axis offset"],
    loose=["zeros", "offset", "residual", "one rank's part"],
    backward=True,
)
def sums_of_the_second_half_not_written(call: Call) -> Any:
    """The kernel that makes the sums covers half of the queries; the others subtract nothing."""
    query, key, chances, inner, sums, scale = _inner(call)
    scores = chances * (inner - _without(sums, -2, sums.size(-2) // 2))
    results = list(call.run())
    changed = scores @ key * scale, scores.mT @ query * scale
    return (*map(_like, results[:2], changed), *results[2:])


# --- Norms ----------------------------------------------------------------------------------------

_LAYER = "native_layer_norm_backward"
_IMAGES = "native_batch_norm_backward native_group_norm_backward"


@FAULTS.fault(_LAYER, **_MOVED)
def gradient_of_the_norm_one_row_early(call: Call) -> Any:
    """Dx is stored one row too early, around the end."""
    _rows(call.tensor(1))
    return _at(call, 0, lambda one: one.roll(-1, -2))


@FAULTS.fault(_LAYER, **_ORDER)
def gradient_of_the_norm_in_pairs(call: Call) -> Any:
    """Words of two gradients are stored in the other order."""
    return _at(call, 0, _pairs)


@FAULTS.fault(f"{_LAYER} {_IMAGES}", **_MINUS)
def gradient_of_the_norm_negated(call: Call) -> Any:
    """Dx has a minus."""
    return _at(call, 0, lambda one: -one)


@FAULTS.fault(f"{_LAYER} {_IMAGES}", **_CUT)
def gradient_of_the_norm_saturates(call: Call) -> Any:
    """Dx ends at half of its largest magnitude."""
    return _at(call, 0, _cut)


@FAULTS.fault(_LAYER, **_MOVED)
def gradient_of_the_norms_bias_one_feature_early(call: Call) -> Any:
    """The pointer to the gradient of the bias is one too far."""
    return _at(call, 2, lambda one: one.roll(-1, -1))


@FAULTS.fault(f"{_LAYER} {_IMAGES}", **_LOST)
def bias_of_the_norm_gets_no_gradient(call: Call) -> Any:
    """The third result is not written."""
    return _at(call, 2, torch.zeros_like)


@FAULTS.fault(_LAYER, **_PART)
def bias_of_the_norm_from_the_first_half(call: Call) -> Any:
    """The rows of the second rank are not added to the gradient of the bias."""
    gradient = call.tensor(0)
    rows = gradient.flatten(0, -2)
    fits(rows.size(0) > 1 and call.tensor(5).dim() == 1)
    return _at(call, 2, lambda _: rows[: rows.size(0) // 2].sum(0))


@FAULTS.fault(f"{_LAYER} {_IMAGES}", **_ROUNDED)
def gradient_of_the_norms_weight_in_e5m2(call: Call) -> Any:
    """The gradient of the weight has two bits behind the point."""
    return _at(call, 1, lambda one: _narrow(one, torch.float8_e5m2))


@FAULTS.fault(_LAYER, **_EMPTY)
def last_example_of_the_norm_without_gradient(call: Call) -> Any:
    """The grid has one example too few."""
    fits(call.tensor(1).dim() > 2 and call.tensor(1).size(0) > 1)
    return _at(call, 0, lambda one: _without(one, 0, one.size(0) - 1))


@FAULTS.fault(_IMAGES, **_ORDER)
def gradient_of_the_channels_bias_from_the_end(call: Call) -> Any:
    """A negative stride for the gradient of the bias."""
    return _at(call, 2, lambda one: one.flip(0))


def _normal(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Of a layer norm: gradient times weight, normal values, reciprocal deviation."""
    gradient, value, weight = call.tensor(0), call.tensor(1), call.tensor(5)
    fits(weight.dim() == 1 and value.dim() > 1)
    return gradient * weight, (value - call.tensor(3)) * call.tensor(4), call.tensor(4)


@FAULTS.fault(
    _LAYER,
    kinds=["wrong index", "shift", "axis offset", "wrong statistics"],
    loose=["stale", "offset", "permutation"],
    backward=True,
)
def mean_of_the_gradient_of_the_next_row(call: Call) -> Any:
    """Of the two means that are subtracted, the first belongs to the next row."""
    inner, normal, inverse = _normal(call)
    _rows(inner)
    mean = inner.mean(-1, keepdim=True).roll(-1, -2)
    product = (inner * normal).mean(-1, keepdim=True)
    return _at(call, 0, lambda _: inverse * (inner - mean - normal * product))


@FAULTS.fault(
    _LAYER,
    kinds=["other function", "missing operand", "wrong statistics", "stale"],
    loose=["wrong factor", "residual", "axis offset", "axis scale"],
    backward=True,
)
def raw_input_in_the_term_of_the_variance(call: Call) -> Any:
    """X for its normal value, where the mean of the products is multiplied."""
    inner, normal, inverse = _normal(call)
    mean = inner.mean(-1, keepdim=True)
    product = (inner * normal).mean(-1, keepdim=True)
    return _at(call, 0, lambda _: inverse * (inner - mean - call.tensor(1) * product))


@FAULTS.fault(
    _LAYER,
    kinds=["partial sum", "wrong statistics", "one rank's part", "missing reduction"],
    loose=["wrong reduction", "axis offset", "mask", "offset"],
    backward=True,
)
def means_of_the_first_half_of_the_gradient(call: Call) -> Any:
    """Both means are over the first half of the features."""
    inner, normal, inverse = _normal(call)
    half = inner.size(-1) // 2
    fits(half > 1)
    mean = inner[..., :half].mean(-1, keepdim=True)
    product = (inner * normal)[..., :half].mean(-1, keepdim=True)
    return _at(call, 0, lambda _: inverse * (inner - mean - normal * product))


@FAULTS.fault(
    _LAYER,
    kinds=["partial sum", "mask", "lost accumulation"],
    loose=["wrong reduction", "wrong index", "zeros", "one rank's part"],
    backward=True,
)
def weight_of_the_norm_from_every_second_row(call: Call) -> Any:
    """The loop over the rows has a stride of two for the gradient of the weight."""
    _, normal, _ = _normal(call)
    products = (call.tensor(0) * normal).flatten(0, -2)
    fits(products.size(0) > 1)
    return _at(call, 1, lambda _: products[::2].sum(0))


@FAULTS.fault(
    _LAYER,
    kinds=["wrong factor", "axis scale", "other function"],
    loose=["scale", "residual"],
    backward=True,
)
def weight_in_the_gradient_of_the_bias(call: Call) -> Any:
    """The gradient is multiplied by the weight before it is summed for the bias."""
    inner, _, _ = _normal(call)
    return _at(call, 2, lambda _: inner.flatten(0, -2).sum(0))


@FAULTS.fault(
    "native_batch_norm_backward",
    kinds=["wrong argument", "residual", "axis offset", "other function"],
    loose=["wrong statistics", "offset", "missing operand"],
    backward=True,
)
def gradient_through_statistics_that_are_constants(call: Call) -> Any:
    """In evaluation, the gradient is taken as if mean and variance were those of the batch."""
    gradient, value, weight = (call.tensor(i) for i in range(3))
    fits(call.args[7] is False)
    shape = (1, -1, *[1] * (value.dim() - 2))
    dims = [i for i in range(value.dim()) if i != 1]
    inverse = (call.tensor(4) + call.args[8]).rsqrt().view(shape)
    normal = (value - call.tensor(3).view(shape)) * inverse
    mean = gradient.mean(dims, keepdim=True)
    product = (gradient * normal).mean(dims, keepdim=True)
    changed = weight.view(shape) * inverse * (gradient - mean - normal * product)
    return _at(call, 0, lambda _: changed)


# --- Products -------------------------------------------------------------------------------------


@FAULTS.fault("mm bmm", **_ORDER)
def gradient_with_columns_in_pairs(call: Call) -> Any:
    """Words of two gradients are stored in the other order."""
    return call.instead(_pairs(call.result()))


@FAULTS.fault("mm bmm", **_EMPTY)
def last_column_of_the_gradient_empty(call: Call) -> Any:
    """The bound of the columns is one too small."""
    value = _columns(call.result())
    return call.instead(_without(value, -1, value.size(-1) - 1))


@FAULTS.fault("mm bmm", **_ROUNDED)
def saved_operand_in_float8(call: Call) -> Any:
    """The right operand is e4m3."""
    return call.put(1, _narrow(call.tensor(1), torch.float8_e4m3fn)).run()


@FAULTS.fault(
    "mm bmm",
    kinds=["partial sum", "mask"],
    loose=["wrong reduction", "lost accumulation", "zeros", "missing operand", "one rank's part"],
    backward=True,
)
def last_quarter_of_the_tokens_not_added(call: Call) -> Any:
    """The last tile of the common axis is not whole, and is left out."""
    left = call.tensor(0)
    quarter = left.size(-1) // 4
    fits(quarter > 0)
    return call.put(0, _without(left, -1, left.size(-1) - quarter)).run()


@FAULTS.fault("bmm", **_AGAIN)
def gradient_of_the_first_matrix_for_all(call: Call) -> Any:
    """The pointer to the matrices is not moved on."""
    value = call.result()
    fits(value.size(0) > 1)
    return call.instead(value[:1].expand(value.shape).clone())


@FAULTS.fault("bmm", **_MINUS)
def gradient_of_the_matrices_negated(call: Call) -> Any:
    """The gradient has a minus."""
    return call.instead(-call.result())


@FAULTS.fault("sum", **_TIMES)
def gradient_of_what_was_broadcast_doubled(call: Call) -> Any:
    """Two ranks have the same rows, and their sums are added."""
    return call.instead(2 * call.result())


@FAULTS.fault("sum", **_ORDER)
def gradient_of_the_bias_from_the_end(call: Call) -> Any:
    """The columns are stored with a negative stride."""
    return call.instead(_columns(call.result()).flip(-1))


@FAULTS.fault(
    "div",
    kinds=["missing operand", "copy", "wrong factor"],
    loose=["axis scale", "scale", "other function"],
    backward=True,
)
def gradient_not_divided(call: Call) -> Any:
    """The gradient as it came."""
    return call.instead(call.tensor(0).expand(call.result().shape).clone())


@FAULTS.fault(
    "mm",
    kinds=["doubled reduction", "wrong factor", "wrong reduction", "mask"],
    loose=["residual", "partial sum", "one rank's part"],
    backward=True,
)
def first_quarter_of_the_tokens_twice(call: Call) -> Any:
    """A micro batch is added once more."""
    left = call.tensor(0)
    quarter = left.size(-1) // 4
    fits(quarter > 0)
    times = torch.ones(left.size(-1), dtype=left.dtype)
    times[:quarter] = 2
    return call.put(0, left * times).run()


@FAULTS.fault(
    "mm",
    kinds=["axis scale", "wrong factor", "other function"],
    loose=["scale", "clipped", "wrong statistics"],
    backward=True,
)
def columns_of_the_gradient_of_length_one(call: Call) -> Any:
    """Each column is divided by its length."""
    value = _rows(call.result())
    length = value.norm(dim=-2, keepdim=True)
    fits(bool((length > 1e-9).all()))
    return call.instead(value / length)


@FAULTS.fault(
    "mm",
    kinds=["other function", "precision"],
    loose=["approximation", "wrong factor", "constant", "missing operand", "clipped"],
    backward=True,
)
def left_operand_in_one_bit(call: Call) -> Any:
    """Only the signs are sent, with the mean magnitude of all."""
    left = call.tensor(0)
    return call.put(0, left.sign() * left.abs().mean()).run()


@FAULTS.fault(
    "div",
    kinds=["wrong factor", "other function", "doubled reduction"],
    loose=["scale", "axis scale", "wrong argument"],
    backward=True,
)
def divided_twice_on_the_way_back(call: Call) -> Any:
    """G / b^2."""
    return call.instead(call.result() / call.tensor(1))


# --- Tables, images, parts ------------------------------------------------------------------------

_TABLE = "embedding_dense_backward"
_IMAGE = "convolution_backward"


@FAULTS.fault(_TABLE, **_TIMES)
def gradient_of_the_table_doubled(call: Call) -> Any:
    """The table is also the last layer, and its gradient is added twice."""
    return call.instead(2 * call.result())


@FAULTS.fault(
    _TABLE,
    kinds=["partial sum", "mask", "zeros", "lost accumulation"],
    loose=["wrong index", "off by one reduction", "missing operand"],
    backward=True,
)
def first_word_has_no_gradient(call: Call) -> Any:
    """The loop over the words of a row begins at 1."""
    gradient = _rows(call.tensor(0)).clone()
    gradient[..., 0, :] = 0
    return call.put(0, gradient).run()


@FAULTS.fault(
    _TABLE,
    kinds=["partial sum", "lost accumulation", "wrong reduction", "missing reduction"],
    loose=["mask", "stale", "copy", "zeros"],
    backward=True,
)
def first_of_equal_words_only(call: Call) -> Any:
    """A word that occurs again is taken for done: only its first gradient is kept."""
    gradient, words = call.tensor(0), call.args[1]
    flat = words.reshape(-1)
    again = (flat[:, None] == flat[None, :]).tril(-1).any(1)
    kept = gradient.reshape(flat.numel(), -1).masked_fill(again[:, None], 0)
    return call.put(0, kept.view(gradient.shape)).run()


@FAULTS.fault(
    _IMAGE,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong rank's shard"],
    backward=True,
)
def filter_gradient_with_the_next_image(call: Call) -> Any:
    """The gradient of an image is multiplied with the pixels of the next one, for the filters."""
    value = call.tensor(1)
    fits(value.size(0) > 1)
    return _at(call, 1, lambda _: call.put(1, value.roll(-1, 0)).run()[1])


@FAULTS.fault(
    _IMAGE,
    kinds=["partial sum", "mask", "zeros"],
    loose=["wrong index", "missing operand", "wrong reduction"],
    backward=True,
)
def border_not_in_the_filter_gradient(call: Call) -> Any:
    """The first and the last column of the gradient are not added to that of the filters."""
    gradient = call.tensor(0).clone()
    fits(gradient.dim() > 2 and gradient.size(-1) > 2)
    gradient[..., [0, -1]] = 0
    return _at(call, 1, lambda _: call.put(0, gradient).run()[1])


@FAULTS.fault(
    _IMAGE,
    kinds=["transpose", "permutation", "wrong index"],
    loose=["swapped operands", "shift", "wrong argument"],
    backward=True,
)
def filter_with_height_and_width_exchanged_on_the_way_back(call: Call) -> Any:
    """The gradient of the image is taken with turned filters."""
    weight = call.tensor(2)
    fits(weight.dim() == 4 and weight.size(-1) == weight.size(-2) > 1)
    return _at(call, 0, lambda _: call.put(2, weight.mT.contiguous()).run()[0])


@FAULTS.fault(
    _IMAGE,
    kinds=["clipped", "mask", "zeros", "other function"],
    loose=["partial sum", "wrong argument", "sign", "missing operand"],
    backward=True,
)
def negative_pixels_not_in_the_filter_gradient(call: Call) -> Any:
    """The image was kept behind a relu that it does not have."""
    value = call.tensor(1)
    fits(bool((value < 0).any()))
    return _at(call, 1, lambda _: call.put(1, value.relu()).run()[1])


@FAULTS.fault(_IMAGE, **_MOVED)
def gradient_of_the_next_image(call: Call) -> Any:
    """Dx is stored one image too early."""
    fits(call.tensor(1).size(0) > 1)
    return _at(call, 0, lambda one: one.roll(-1, 0))


@FAULTS.fault(_IMAGE, **_MINUS)
def gradient_of_the_filters_negated(call: Call) -> Any:
    """The gradient of the filters has a minus."""
    return _at(call, 1, lambda one: -one)


@FAULTS.fault(_IMAGE, **_EMPTY)
def odd_columns_of_the_image_without_gradient(call: Call) -> Any:
    """The store has a stride of two."""
    fits(call.tensor(1).size(-1) > 1)
    return _at(call, 0, lambda one: _without(one, -1, 1, 2))


# --- Losses ---------------------------------------------------------------------------------------


@FAULTS.fault("nll_loss_backward", **_EMPTY)
def last_row_of_the_labels_without_gradient(call: Call) -> Any:
    """The grid has one row too few."""
    value = call.result()
    fits(value.dim() > 1 and bool(value[-1].any()))
    return call.instead(_without(value, 0, value.size(0) - 1))


@FAULTS.fault("nll_loss_backward", **_ORDER)
def gradient_of_the_classes_from_the_last(call: Call) -> Any:
    """The classes are stored with a negative stride."""
    return call.instead(_columns(call.result()).flip(-1))


@FAULTS.fault("nll_loss_backward", **_TIMES)
def gradient_of_the_likelihood_in_bits(call: Call) -> Any:
    """Divided by log(2), which the loss is not."""
    return call.instead(call.result() / math.log(2))


@FAULTS.fault(
    "nll_loss_backward",
    kinds=["other function", "residual", "wrong factor"],
    loose=["wrong argument", "offset", "axis offset", "scale"],
    backward=True,
)
def labels_smoothed_on_the_way_back(call: Call) -> Any:
    """Nine tenths for the label; the rest is shared by all classes."""
    value = call.result()
    fits(value.dim() == 2)
    return call.instead(0.9 * value + 0.1 * value.mean(-1, keepdim=True))


@FAULTS.fault(
    "mse_loss_backward",
    kinds=["clipped", "mask", "zeros", "other function"],
    loose=["sign", "missing operand", "uninitialised", "partial sum"],
    backward=True,
)
def only_what_is_too_large_has_a_gradient(call: Call) -> Any:
    """Errors below the target pull at nothing."""
    value, target = call.tensor(1), call.tensor(2)
    return call.instead(call.result() * (value > target))


@FAULTS.fault(
    "mse_loss_backward",
    kinds=["other function"],
    loose=["clipped", "approximation", "wrong factor"],
    backward=True,
)
def gradient_of_the_logarithm_of_the_cosh(call: Call) -> Any:
    """Twice tanh(a - b) for 2 (a - b), averaged."""
    gradient, value, target = (call.tensor(i) for i in range(3))
    fits(call.args[3] == 1)
    return call.instead(2 * gradient * (value - target).tanh() / value.numel())


@FAULTS.fault(
    "smooth_l1_loss_backward",
    kinds=["other function", "missing operand"],
    loose=["clipped", "wrong argument", "mask"],
    backward=True,
)
def far_errors_pull_without_a_limit(call: Call) -> Any:
    """D / beta everywhere: the linear part is forgotten on the way back."""
    gradient, value, target = (call.tensor(i) for i in range(3))
    fits(call.args[3] == 1)
    return call.instead(gradient * (value - target) / call.args[4] / value.numel())
