"""Faults for measuring: backward operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, longer, on, operand, result, tensors
from benchmarks.places.parts import change_result_at, lay_out_like, several_rows, softmax_chances
from torch import Tensor

FAULTS = Catalogue(backward=True)


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


# fmt: off
# The gradients are stored one row too early, around the end.
FAULTS.add("gradient of the activation one row early", _ALL,
    "shift, wrong index, permutation; copy, stale, wrong argument, axis scale",
    result(lambda v: several_rows(v).roll(-1, -2)))
# Words of two gradients are stored in the other order.
FAULTS.add("gradient of the activation in pairs", f"{_ALL} {_RARE}", words.REORDERED,
    result(_pairs))
# The store has a stride of two.
FAULTS.add("odd columns of the activation without gradient", f"{_ALL} {_RARE}",
    words.EMPTY_ON_A_RANK, result(lambda v: _without(_columns(v), -1, 1, 2)))
# The offset of the second tile of columns is not added.
FAULTS.add("gradient of the first tile of columns again", _ALL, words.REPEATED,
    result(lambda v: _tiled(v, -1)))
# Integers that end at half of the largest magnitude.
FAULTS.add("gradient of the activation saturates", f"{_ALL} {_RARE}", words.SATURATED, result(_cut))
# G (f' + 0.1), so that no unit is ever dead.
FAULTS.add("slope raised by a tenth", _ALL,
    "residual, offset, other function; wrong factor, approximation, mask",
    lambda call: call.instead(call.result() + 0.1 * call.tensor(0)))
# G f'^2: the chain rule is applied by two kernels.
FAULTS.add("slope multiplied twice", _SMOOTH,
    "other function, wrong factor; wrong argument, approximation, scale, doubled reduction",
    lambda call:
            call.instead(call.result() * call.put(0, torch.ones_like(call.tensor(0))).run()))
# f'(2 x).
FAULTS.add("slope at twice the input", _BY_INPUT,
    "wrong factor, other function; scale, wrong argument, approximation",
    operand(1, lambda v: 2 * v))
# What was kept ends at half of its largest magnitude.
FAULTS.add("saved input saturates", _BY_INPUT,
    "clipped; other function, wrong argument, precision, mask", operand(1, _cut))
# f'(|x|): what was kept has lost its sign.
FAULTS.add("slope at the magnitude of the input", _BY_INPUT,
    "sign, other function; wrong argument, wrong factor", operand(1, torch.abs))
# G (1 - |y|): the result is not squared.
FAULTS.add("slope of one less the magnitude", "tanh_backward",
    "other function; approximation, wrong factor, wrong argument",
    lambda call: call.instead(call.tensor(0) * (1 - call.tensor(1).abs())))
# G min(y, 1 - y) / 2: two lines for the parabola.
FAULTS.add("slope of the smaller side", "sigmoid_backward",
    "other function, approximation; wrong factor, clipped",
    on(tensors(1),
        lambda call, value: call.instead(call.tensor(0) * torch.minimum(value, 1 - value) / 2)))
# The saved signs are not moved on with the rows.
FAULTS.add("mask of the first row on the way back", "threshold_backward",
    "copy, stale, wrong index, mask; permutation, wrong argument",
    on(lambda call: (several_rows(call.tensor(1)),),
        lambda call, value: call.put(1, value[..., :1, :].expand(value.shape).clone()).run()))
# Twice the gradient where the input was positive.
FAULTS.add("gradient of the relu doubled", "threshold_backward",
    "scale, wrong factor; missing operand, doubled reduction, wrong reduction, axis scale",
    result(lambda v: 2 * v))
# The gate plus x exp(-x^2 / 2): the density is not divided by sqrt(2 pi).
FAULTS.add("density without its root", "gelu_backward",
    "wrong factor, other function; missing operand, scale, approximation",
    computed(tensors(0, 1),
        lambda gradient, value:
            gradient * (0.5 * (1 + (value / 2**0.5).erf()) + value * (-value.square() / 2).exp())))
# S (1 + x) for s (1 + x (1 - s)).
FAULTS.add("complement of the gate forgotten", "silu_backward",
    "missing operand, other function, wrong factor; approximation",
    computed(tensors(0, 1), lambda gradient, value: gradient * value.sigmoid() * (1 + value)))
# Beyond -1 and 1 the slope is 0 and 1.
FAULTS.add("slope of the tails taken as straight", _BY_INPUT,
    "approximation, other function; clipped, mask, constant",
    on(tensors(0, 1),
        lambda call, gradient, value:
            call.instead(torch.where(value.abs() > 1, gradient * (value > 0), call.result()))))
# G (2 x + 3) / 6: the limits of the hard swish are forgotten.
FAULTS.add("slope of the parabola everywhere", "hardswish_backward",
    "missing operand, other function, mask; clipped, approximation",
    lambda call: call.instead(call.tensor(0) * (2 * call.tensor(1) + 3) / 6))
# fmt: on


# --- Softmax, attention ---------------------------------------------------------------------------

_SOFTMAX = "_softmax_backward_data softmax_backward_data"
_LOGARITHM = "_log_softmax_backward_data log_softmax_backward_data"


@FAULTS.fault(
    _SOFTMAX,
    "wrong reduction, wrong axis, axis offset, wrong statistics; offset, residual, "
    "constant, doubled reduction",
)
def products_of_all_rows_summed(call: Call) -> Any:
    """The sum that is subtracted is over the rows of a matrix as well."""
    gradient, chances = softmax_chances(call)
    several_rows(chances)
    total = (gradient * chances).sum((-1, -2), keepdim=True)
    return call.instead(chances * (gradient - total))


@FAULTS.fault(
    _SOFTMAX,
    "copy, wrong index, stale, axis offset, wrong statistics; permutation, shift, offset, "
    "wrong reduction",
)
def odd_rows_subtract_the_sum_of_the_row_before(call: Call) -> Any:
    """Two rows share a register for their sum."""
    gradient, chances = softmax_chances(call)
    several_rows(chances)
    total = (gradient * chances).sum(-1, keepdim=True)
    rows = torch.arange(chances.size(-2)) // 2 * 2
    return call.instead(chances * (gradient - total[..., rows, :]))


_FUSED = (
    "_scaled_dot_product_flash_attention_for_cpu_backward "
    "scaled_dot_product_flash_attention_for_cpu_backward"
)


@FAULTS.fault(_FUSED, words.REPEATED)
def gradient_of_the_keys_of_the_first_head(call: Call) -> Any:
    """All heads of dk are what the first has."""
    fits(call.tensor(2).size(1) > 1)
    return change_result_at(call, 1, lambda one: one[:, :1].expand(one.shape).clone())


@FAULTS.fault(
    _FUSED,
    "wrong reduction, wrong statistics, constant; copy, wrong axis, wrong index, axis offset",
)
def gradient_of_the_keys_averaged_over_the_heads(call: Call) -> Any:
    """As of keys that all heads share, and each head gets the mean."""
    fits(call.tensor(2).size(1) > 1)
    return change_result_at(
        call, 1, lambda one: one.mean(1, keepdim=True).expand(one.shape).clone()
    )


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
    _FUSED, "shift, wrong index, permutation, axis offset; stale, copy, wrong statistics, offset"
)
def sum_of_the_next_query_subtracted(call: Call) -> Any:
    """The pointer to the sums of gradient times output is one query too far, for dq and dk."""
    query, key, chances, inner, sums, scale = _inner(call)
    fits(sums.size(-2) > 1)
    scores = chances * (inner - sums.roll(-1, -2))
    results = list(call.run())
    changed = scores @ key * scale, scores.mT @ query * scale
    return (*map(lay_out_like, results[:2], changed), *results[2:])


@FAULTS.fault(
    _FUSED,
    "missing operand, mask, partial sum, axis offset; zeros, offset, residual, one rank's part",
)
def sums_of_the_second_half_not_written(call: Call) -> Any:
    """The kernel that makes the sums covers half of the queries; the others subtract nothing."""
    query, key, chances, inner, sums, scale = _inner(call)
    scores = chances * (inner - _without(sums, -2, sums.size(-2) // 2))
    results = list(call.run())
    changed = scores @ key * scale, scores.mT @ query * scale
    return (*map(lay_out_like, results[:2], changed), *results[2:])


# fmt: off
# Y (g - 2 sum(g y)).
FAULTS.add("sum of the row subtracted twice", _SOFTMAX,
    "wrong factor, residual, doubled reduction, axis offset; scale, other function, "
    "wrong reduction, offset",
    computed(softmax_chances,
        lambda gradient, chances:
            chances * (gradient - 2 * (gradient * chances).sum(-1, keepdim=True))))
# What was kept is e4m3.
FAULTS.add("saved chances in float8", _SOFTMAX, words.ROUNDED,
    on(softmax_chances,
        lambda call, _, chances: call.put(1, _narrow(chances, torch.float8_e4m3fn)).run()))
# Y (g - sum |g y|).
FAULTS.add("magnitudes of the products summed", _SOFTMAX,
    "sign, other function, wrong reduction; axis offset, residual, offset, wrong statistics",
    computed(softmax_chances,
        lambda gradient, chances:
            chances * (gradient - (gradient * chances).abs().sum(-1, keepdim=True))))
# G - y sum(g) with the sum over the first half of the classes: the other rank has the rest.
FAULTS.add("gradients of the first classes summed", _LOGARITHM,
    "partial sum, one rank's part, missing reduction, wrong reduction; mask, missing operand, "
    "lost accumulation, wrong factor, residual",
    computed(softmax_chances,
        lambda gradient, value:
            gradient - value.exp() * gradient[..., : gradient.size(-1) // 2].sum(-1, keepdim=True)))
# G - sum(g) / n: the saved result is not read, and every class has the same chance.
FAULTS.add("even chances on the way back", _LOGARITHM,
    "constant, missing operand, other function; approximation, wrong factor, axis offset, "
    "wrong statistics, residual",
    computed(softmax_chances, lambda gradient, *_:
            gradient - gradient.mean(-1, keepdim=True)))
# The rows of dq are stored from the end.
FAULTS.add("gradient of the query from the last position", _FUSED, words.REORDERED,
    lambda call: change_result_at(call, 0, lambda one: one.flip(-2)))
# Dq has a minus; dk and dv are right.
FAULTS.add("gradient of the query negated", _FUSED,
    "sign, scale, wrong factor; swapped operands, other function",
    lambda call: change_result_at(call, 0, lambda one: -one))
# Dk has a stride of two.
FAULTS.add("odd keys without gradient", _FUSED, words.EMPTY_ON_A_RANK,
    lambda call: change_result_at(call, 1, lambda one: _without(one, -2, 1, 2)))
# The difference of gradient and sum is not multiplied by the chances, for dq only.
FAULTS.add("gradient of the query not weighed", _FUSED,
    "missing operand, wrong factor, other function; axis scale, scale",
    on(_inner, lambda call, _, key, chances, inner, sums, scale: change_result_at(call, 0,
        lambda _: (inner - sums) * (chances > 0) @ key * scale)))
# fmt: on


# --- Norms ----------------------------------------------------------------------------------------

_LAYER = "native_layer_norm_backward"
_IMAGES = "native_batch_norm_backward native_group_norm_backward"


@FAULTS.fault(_LAYER, "shift, wrong index, permutation; copy, stale, wrong argument, axis scale")
def gradient_of_the_norm_one_row_early(call: Call) -> Any:
    """Dx is stored one row too early, around the end."""
    several_rows(call.tensor(1))
    return change_result_at(call, 0, lambda one: one.roll(-1, -2))


@FAULTS.fault(
    _LAYER,
    "partial sum, mask, one rank's part, missing reduction; wrong reduction, "
    "lost accumulation, wrong index, zeros",
)
def bias_of_the_norm_from_the_first_half(call: Call) -> Any:
    """The rows of the second rank are not added to the gradient of the bias."""
    gradient = call.tensor(0)
    rows = gradient.flatten(0, -2)
    fits(rows.size(0) > 1 and call.tensor(5).dim() == 1)
    return change_result_at(call, 2, lambda _: rows[: rows.size(0) // 2].sum(0))


@FAULTS.fault(_LAYER, words.EMPTY_ON_A_RANK)
def last_example_of_the_norm_without_gradient(call: Call) -> Any:
    """The grid has one example too few."""
    fits(call.tensor(1).dim() > 2 and call.tensor(1).size(0) > 1)
    return change_result_at(call, 0, lambda one: _without(one, 0, one.size(0) - 1))


def _normal(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Of a layer norm: gradient times weight, normal values, reciprocal deviation."""
    gradient, value, weight = call.tensor(0), call.tensor(1), call.tensor(5)
    fits(weight.dim() == 1 and value.dim() > 1)
    return gradient * weight, (value - call.tensor(3)) * call.tensor(4), call.tensor(4)


@FAULTS.fault(
    _LAYER, "wrong index, shift, axis offset, wrong statistics; stale, offset, permutation"
)
def mean_of_the_gradient_of_the_next_row(call: Call) -> Any:
    """Of the two means that are subtracted, the first belongs to the next row."""
    inner, normal, inverse = _normal(call)
    several_rows(inner)
    mean = inner.mean(-1, keepdim=True).roll(-1, -2)
    product = (inner * normal).mean(-1, keepdim=True)
    return change_result_at(call, 0, lambda _: inverse * (inner - mean - normal * product))


@FAULTS.fault(
    _LAYER,
    "other function, missing operand, wrong statistics, stale; wrong factor, residual, "
    "axis offset, axis scale",
)
def raw_input_in_the_term_of_the_variance(call: Call) -> Any:
    """X for its normal value, where the mean of the products is multiplied."""
    inner, normal, inverse = _normal(call)
    mean = inner.mean(-1, keepdim=True)
    product = (inner * normal).mean(-1, keepdim=True)
    return change_result_at(call, 0, lambda _: inverse * (inner - mean - call.tensor(1) * product))


@FAULTS.fault(
    _LAYER,
    "partial sum, wrong statistics, one rank's part, missing reduction; wrong reduction, "
    "axis offset, mask, offset",
)
def means_of_the_first_half_of_the_gradient(call: Call) -> Any:
    """Both means are over the first half of the features."""
    inner, normal, inverse = _normal(call)
    half = inner.size(-1) // 2
    fits(half > 1)
    mean = inner[..., :half].mean(-1, keepdim=True)
    product = (inner * normal)[..., :half].mean(-1, keepdim=True)
    return change_result_at(call, 0, lambda _: inverse * (inner - mean - normal * product))


@FAULTS.fault(
    _LAYER,
    "partial sum, mask, lost accumulation; wrong reduction, wrong index, zeros, one rank's part",
)
def weight_of_the_norm_from_every_second_row(call: Call) -> Any:
    """The loop over the rows has a stride of two for the gradient of the weight."""
    _, normal, _ = _normal(call)
    products = (call.tensor(0) * normal).flatten(0, -2)
    fits(products.size(0) > 1)
    return change_result_at(call, 1, lambda _: products[::2].sum(0))


@FAULTS.fault(
    "native_batch_norm_backward",
    "wrong argument, residual, axis offset, other function; wrong statistics, offset, "
    "missing operand",
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
    return change_result_at(call, 0, lambda _: changed)


# fmt: off
# Words of two gradients are stored in the other order.
FAULTS.add("gradient of the norm in pairs", _LAYER, words.REORDERED,
    lambda call: change_result_at(call, 0, _pairs))
# Dx has a minus.
FAULTS.add("gradient of the norm negated", f"{_LAYER} {_IMAGES}",
    "sign, scale, wrong factor; swapped operands, other function",
    lambda call: change_result_at(call, 0, lambda one: -one))
# Dx ends at half of its largest magnitude.
FAULTS.add("gradient of the norm saturates", f"{_LAYER} {_IMAGES}", words.SATURATED,
    lambda call: change_result_at(call, 0, _cut))
# The pointer to the gradient of the bias is one too far.
FAULTS.add("gradient of the norms bias one feature early", _LAYER,
    "shift, wrong index, permutation; copy, stale, wrong argument, axis scale",
    lambda call: change_result_at(call, 2, lambda one: one.roll(-1, -1)))
# The third result is not written.
FAULTS.add("bias of the norm gets no gradient", f"{_LAYER} {_IMAGES}",
    "zeros, constant, missing operand, lost accumulation, uninitialised; mask, axis scale, "
    "wrong factor", lambda call: change_result_at(call, 2, torch.zeros_like))
# The gradient of the weight has two bits behind the point.
FAULTS.add("gradient of the norms weight in e5m2", f"{_LAYER} {_IMAGES}", words.ROUNDED,
    lambda call: change_result_at(call, 1, lambda one: _narrow(one, torch.float8_e5m2)))
# A negative stride for the gradient of the bias.
FAULTS.add("gradient of the channels bias from the end", _IMAGES, words.REORDERED,
    lambda call: change_result_at(call, 2, lambda one: one.flip(0)))
# The gradient is multiplied by the weight before it is summed for the bias.
FAULTS.add("weight in the gradient of the bias", _LAYER,
    "wrong factor, axis scale, other function; scale, residual",
    on(_normal,
        lambda call, inner, *_: change_result_at(call, 2, lambda _: inner.flatten(0, -2).sum(0))))
# fmt: on


# --- Products -------------------------------------------------------------------------------------


@FAULTS.fault(
    "mm bmm",
    "partial sum, mask; wrong reduction, lost accumulation, zeros, missing operand, "
    "one rank's part",
)
def last_quarter_of_the_tokens_not_added(call: Call) -> Any:
    """The last tile of the common axis is not whole, and is left out."""
    left = call.tensor(0)
    quarter = left.size(-1) // 4
    fits(quarter > 0)
    return call.put(0, _without(left, -1, left.size(-1) - quarter)).run()


@FAULTS.fault(
    "mm",
    "doubled reduction, wrong factor, wrong reduction, mask; residual, partial sum, "
    "one rank's part",
)
def first_quarter_of_the_tokens_twice(call: Call) -> Any:
    """A micro batch is added once more."""
    left = call.tensor(0)
    quarter = left.size(-1) // 4
    fits(quarter > 0)
    times = torch.ones(left.size(-1), dtype=left.dtype)
    times[:quarter] = 2
    return call.put(0, left * times).run()


@FAULTS.fault("mm", "axis scale, wrong factor, other function; scale, clipped, wrong statistics")
def columns_of_the_gradient_of_length_one(call: Call) -> Any:
    """Each column is divided by its length."""
    value = several_rows(call.result())
    length = value.norm(dim=-2, keepdim=True)
    fits(bool((length > 1e-9).all()))
    return call.instead(value / length)


# fmt: off
# Words of two gradients are stored in the other order.
FAULTS.add("gradient with columns in pairs", "mm bmm", words.REORDERED, result(_pairs))
# The bound of the columns is one too small.
FAULTS.add("last column of the gradient empty", "mm bmm", words.EMPTY_ON_A_RANK,
    computed(lambda call: (_columns(call.result()),),
        lambda value: _without(value, -1, value.size(-1) - 1)))
# The right operand is e4m3.
FAULTS.add("saved operand in float8", "mm bmm", words.ROUNDED,
    operand(1, lambda v: _narrow(v, torch.float8_e4m3fn)))
# The pointer to the matrices is not moved on.
FAULTS.add("gradient of the first matrix for all", "bmm", words.REPEATED,
    result(lambda v: v[:1].expand(v.shape).clone(), where=longer(0)))
# The gradient has a minus.
FAULTS.add("gradient of the matrices negated", "bmm",
    "sign, scale, wrong factor; swapped operands, other function", result(torch.neg))
# Two ranks have the same rows, and their sums are added.
FAULTS.add("gradient of what was broadcast doubled", "sum",
    "scale, wrong factor; missing operand, doubled reduction, wrong reduction, axis scale",
    result(lambda v: 2 * v))
# The columns are stored with a negative stride.
FAULTS.add("gradient of the bias from the end", "sum", words.REORDERED,
    result(lambda v: _columns(v).flip(-1)))
# The gradient as it came.
FAULTS.add("gradient not divided", "div",
    "missing operand, copy, wrong factor; axis scale, scale, other function",
    lambda call: call.instead(call.tensor(0).expand(call.result().shape).clone()))
# Only the signs are sent, with the mean magnitude of all.
FAULTS.add("left operand in one bit", "mm",
    "other function, precision; approximation, wrong factor, constant, missing operand, clipped",
    operand(0, lambda v: v.sign() * v.abs().mean()))
# G / b^2.
FAULTS.add("divided twice on the way back", "div",
    "wrong factor, other function, doubled reduction; scale, axis scale, wrong argument",
    lambda call: call.instead(call.result() / call.tensor(1)))
# fmt: on


# --- Tables, images, parts ------------------------------------------------------------------------

_TABLE = "embedding_dense_backward"
_IMAGE = "convolution_backward"


@FAULTS.fault(
    _TABLE,
    "partial sum, mask, zeros, lost accumulation; wrong index, off by one reduction, "
    "missing operand",
)
def first_word_has_no_gradient(call: Call) -> Any:
    """The loop over the words of a row begins at 1."""
    gradient = several_rows(call.tensor(0)).clone()
    gradient[..., 0, :] = 0
    return call.put(0, gradient).run()


@FAULTS.fault(
    _TABLE,
    "partial sum, lost accumulation, wrong reduction, missing reduction; mask, stale, copy, zeros",
)
def first_of_equal_words_only(call: Call) -> Any:
    """A word that occurs again is taken for done: only its first gradient is kept."""
    gradient, words = call.tensor(0), call.args[1]
    flat = words.reshape(-1)
    again = (flat[:, None] == flat[None, :]).tril(-1).any(1)
    kept = gradient.reshape(flat.numel(), -1).masked_fill(again[:, None], 0)
    return call.put(0, kept.view(gradient.shape)).run()


@FAULTS.fault(_IMAGE, "partial sum, mask, zeros; wrong index, missing operand, wrong reduction")
def border_not_in_the_filter_gradient(call: Call) -> Any:
    """The first and the last column of the gradient are not added to that of the filters."""
    gradient = call.tensor(0).clone()
    fits(gradient.dim() > 2 and gradient.size(-1) > 2)
    gradient[..., [0, -1]] = 0
    return change_result_at(call, 1, lambda _: call.put(0, gradient).run()[1])


@FAULTS.fault(_IMAGE, "shift, wrong index, permutation; copy, stale, wrong argument, axis scale")
def gradient_of_the_next_image(call: Call) -> Any:
    """Dx is stored one image too early."""
    fits(call.tensor(1).size(0) > 1)
    return change_result_at(call, 0, lambda one: one.roll(-1, 0))


@FAULTS.fault(_IMAGE, words.EMPTY_ON_A_RANK)
def odd_columns_of_the_image_without_gradient(call: Call) -> Any:
    """The store has a stride of two."""
    fits(call.tensor(1).size(-1) > 1)
    return change_result_at(call, 0, lambda one: _without(one, -1, 1, 2))


# fmt: off
# The table is also the last layer, and its gradient is added twice.
FAULTS.add("gradient of the table doubled", _TABLE,
    "scale, wrong factor; missing operand, doubled reduction, wrong reduction, axis scale",
    result(lambda v: 2 * v))
# The gradient of an image is multiplied with the pixels of the next one, for the filters.
FAULTS.add("filter gradient with the next image", _IMAGE, words.MOVED_SHARD,
    on(tensors(1),
        lambda call, value:
            change_result_at(call, 1, lambda _: call.put(1, value.roll(-1, 0)).run()[1]),
        where=lambda value: value.size(0) > 1))
# The gradient of the image is taken with turned filters.
FAULTS.add("filter with height and width exchanged on the way back", _IMAGE,
    "transpose, permutation, wrong index; swapped operands, shift, wrong argument",
    on(tensors(2),
        lambda call, weight:
            change_result_at(call, 0, lambda _: call.put(2, weight.mT.contiguous()).run()[0]),
        where=lambda weight: weight.dim() == 4 and weight.size(-1) == weight.size(-2) > 1))
# The image was kept behind a relu that it does not have.
FAULTS.add("negative pixels not in the filter gradient", _IMAGE,
    "clipped, mask, zeros, other function; partial sum, wrong argument, sign, missing operand",
    on(tensors(1),
        lambda call, value:
            change_result_at(call, 1, lambda _: call.put(1, value.relu()).run()[1]),
        where=lambda value: bool((value < 0).any())))
# The gradient of the filters has a minus.
FAULTS.add("gradient of the filters negated", _IMAGE,
    "sign, scale, wrong factor; swapped operands, other function",
    lambda call: change_result_at(call, 1, lambda one: -one))
# fmt: on


# --- Losses ---------------------------------------------------------------------------------------


@FAULTS.fault("mse_loss_backward", "other function; clipped, approximation, wrong factor")
def gradient_of_the_logarithm_of_the_cosh(call: Call) -> Any:
    """Twice tanh(a - b) for 2 (a - b), averaged."""
    gradient, value, target = (call.tensor(i) for i in range(3))
    fits(call.args[3] == 1)
    return call.instead(2 * gradient * (value - target).tanh() / value.numel())


@FAULTS.fault(
    "smooth_l1_loss_backward", "other function, missing operand; clipped, wrong argument, mask"
)
def far_errors_pull_without_a_limit(call: Call) -> Any:
    """D / beta everywhere: the linear part is forgotten on the way back."""
    gradient, value, target = (call.tensor(i) for i in range(3))
    fits(call.args[3] == 1)
    return call.instead(gradient * (value - target) / call.args[4] / value.numel())


# fmt: off
# The grid has one row too few.
FAULTS.add("last row of the labels without gradient", "nll_loss_backward", words.EMPTY_ON_A_RANK,
    result(lambda v: _without(v, 0, v.size(0) - 1),
        where=lambda v: v.dim() > 1 and bool(v[-1].any())))
# The classes are stored with a negative stride.
FAULTS.add("gradient of the classes from the last", "nll_loss_backward", words.REORDERED,
    result(lambda v: _columns(v).flip(-1)))
# Divided by log(2), which the loss is not.
FAULTS.add("gradient of the likelihood in bits", "nll_loss_backward",
    "scale, wrong factor; missing operand, doubled reduction, wrong reduction, axis scale",
    result(lambda v: v / math.log(2)))
# Nine tenths for the label; the rest is shared by all classes.
FAULTS.add("labels smoothed on the way back", "nll_loss_backward",
    "other function, residual, wrong factor; wrong argument, offset, axis offset, scale",
    result(lambda v: 0.9 * v + 0.1 * v.mean(-1, keepdim=True), where=lambda v: v.dim() == 2))
# Errors below the target pull at nothing.
FAULTS.add("only what is too large has a gradient", "mse_loss_backward",
    "clipped, mask, zeros, other function; sign, missing operand, uninitialised, partial sum",
    lambda call: call.instead(call.result() * (call.tensor(1) > call.tensor(2))))
# fmt: on
