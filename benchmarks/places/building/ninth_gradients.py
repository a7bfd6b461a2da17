"""Faults of the ninth set: backward operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, longer, on, operand, result, tensors
from benchmarks.places.parts import change_result_at, several_rows
from torch import Tensor

FAULTS = Catalogue(backward=True)


# --- Activations ----------------------------------------------------------------------------------


def _erf(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Of a gelu by the error function: gradient, input, distribution."""
    gradient, value = call.tensor(0), call.tensor(1)
    fits(call.kwargs.get("approximate", "none") == "none")
    return gradient, value, (1 + (value / math.sqrt(2)).erf()) / 2


@FAULTS.fault(
    "silu_backward", "other function, wrong argument; wrong factor, missing operand, sign"
)
def gate_for_its_complement_on_the_way_back(call: Call) -> Any:
    """S (1 + x s) for s (1 + x (1 - s))."""
    gradient, value = call.tensor(0), call.tensor(1)
    gate = value.sigmoid()
    return call.instead(gradient * gate * (1 + value * gate))


@FAULTS.fault("glu_backward", "sign, wrong factor; scale, axis scale")
def gradient_of_the_gate_negated(call: Call) -> Any:
    """The second half has a minus; the gradient of the value is right."""
    dim = call.get(2, "dim")
    value, gate = call.result().chunk(2, dim)
    return call.instead(torch.cat([value, -gate], dim))


# fmt: off
# The two under the root of the density is forgotten.
FAULTS.add("density by the root of pi", "gelu_backward",
    "wrong factor; other function, approximation, scale",
    computed(_erf,
        lambda gradient, value, below:
            gradient * (below + value * ((-value.square() / 2).exp() / math.sqrt(math.pi)))))
# Exp(-x^2) for exp(-x^2 / 2).
FAULTS.add("square in the density not halved", "gelu_backward", words.ANOTHER_FACTOR,
    computed(_erf,
        lambda gradient, value, below:
            gradient * (below + value * ((-value.square()).exp() / math.sqrt(2 * math.pi)))))
# G (1 - y) for g y (1 - y).
FAULTS.add("complement of the gate only", "sigmoid_backward",
    "missing operand, wrong factor, other function; scale, wrong argument",
    lambda call: call.instead(call.tensor(0) * (1 - call.tensor(1))))
# What was kept for the way back has eight bits.
FAULTS.add("saved result in bfloat16", "tanh_backward sigmoid_backward", words.ROUNDED,
    operand(1, lambda v: v.bfloat16().to(v.dtype)))
# A guided pass: only what is positive on both ways goes on.
FAULTS.add("negative gradients stopped as well", "threshold_backward",
    "clipped, mask, other function; zeros, sign", result(torch.relu))
# The flag that says which of them was kept is the other way round.
FAULTS.add("input and result of the elu confused", "elu_backward",
    "wrong argument, other function; approximation, missing operand",
    lambda call: call.put(4, not call.args[4]).run())
# fmt: on


# --- Softmax, attention ---------------------------------------------------------------------------

_SOFTMAX = "_softmax_backward_data softmax_backward_data"
_FUSED = (
    "_scaled_dot_product_flash_attention_for_cpu_backward "
    "scaled_dot_product_flash_attention_for_cpu_backward"
)


@FAULTS.fault(
    _SOFTMAX, "shift, wrong index, wrong statistics; axis offset, permutation, stale, offset"
)
def sum_of_the_products_of_the_next_head(call: Call) -> Any:
    """Y (g - s'), where the sum s' is read one head too far, around the end."""
    gradient, chances = call.tensor(0), call.tensor(1)
    fits(chances.dim() == 4 and call.args[2] in {-1, 3} and chances.size(1) > 1)
    total = (gradient * chances).sum(-1, keepdim=True)
    return call.instead(chances * (gradient - total.roll(-1, 1)))


def _inner(call: Call) -> tuple[Tensor, ...]:
    """Query, key, chances, and the gradient of the scores before the factor, with the factor."""
    gradient, query, key, value, result, total = (call.tensor(i) for i in range(6))
    scale = call.kwargs.get("scale") or query.size(-1) ** -0.5
    scores, mask = query @ key.mT * scale, call.kwargs.get("attn_mask")
    if call.get(7, "is_causal"):
        mask = torch.full(scores.shape[-2:], -math.inf).triu(1).to(scores.dtype)
    if mask is not None:
        scores = scores + mask
    chances = (scores - total.unsqueeze(-1)).exp()
    sums = (gradient * result).sum(-1, keepdim=True)
    return query, key, chances, chances * (gradient @ value.mT - sums) * scale


@FAULTS.fault(_FUSED, "transpose, wrong index; swapped operands, permutation, wrong argument")
def chances_not_transposed_for_the_values(call: Call) -> Any:
    """Dv is p g and not p^T g."""
    _, _, chances, _ = _inner(call)
    fits(chances.size(-1) == chances.size(-2))
    return change_result_at(call, 2, lambda _: chances @ call.tensor(0))


@FAULTS.fault(
    _FUSED,
    "partial sum, off by one reduction, mask; zeros, missing operand, wrong index, "
    "wrong reduction, lost accumulation",
)
def last_key_not_in_the_gradient_of_the_query(call: Call) -> Any:
    """The loop over the keys ends one too early, for dq only."""
    _, key, _, inner = _inner(call)
    return change_result_at(call, 0, lambda _: inner[..., :-1] @ key[..., :-1, :])


@FAULTS.fault(_FUSED, "wrong factor, scale; axis scale, doubled reduction")
def factor_of_the_scores_twice_for_the_keys(call: Call) -> Any:
    """Dk is multiplied by the factor once more; dq is right."""
    scale = call.kwargs.get("scale") or call.tensor(1).size(-1) ** -0.5
    return change_result_at(call, 1, lambda one: one * scale)


# fmt: off
# Each row is stored one too early, the first one last.
FAULTS.add("gradient of the scores one row early",
    f"{_SOFTMAX} _log_softmax_backward_data log_softmax_backward_data",
    "shift, wrong index, permutation; stale, copy", result(lambda v: several_rows(v).roll(-1, -2)))
# G - 2^y sum(g): the kept logarithms are natural ones.
FAULTS.add("chances as powers of two", "_log_softmax_backward_data log_softmax_backward_data",
    words.ANOTHER_FACTOR,
    on(tensors(0),
        lambda call, gradient:

    call.instead(gradient - call.tensor(1).exp2() * gradient.sum(call.args[2], keepdim=True))))
# The pointer to dv is one position behind, around the end.
FAULTS.add("gradient of the values one position early", _FUSED,
    "shift, wrong index, permutation; stale, copy",
    lambda call: change_result_at(call, 2, lambda one: several_rows(one).roll(-1, -2)))
# Heads of values are taken as shared by two heads of queries: dv is added twice.
FAULTS.add("gradient of the values of two equal heads", _FUSED,
    "wrong factor, scale, doubled reduction; axis scale, wrong reduction",
    lambda call: change_result_at(call, 2, lambda one: 2 * one))
# fmt: on


# --- Norms ----------------------------------------------------------------------------------------

_LAYER = "native_layer_norm_backward"


@FAULTS.fault(
    "native_batch_norm_backward",
    "wrong factor, axis scale, other function; scale, wrong argument, wrong statistics",
)
def channels_divided_by_their_variance(call: Call) -> Any:
    """In evaluation, the gradient of the input is divided by v + eps without a root."""
    fits(call.args[7] is False)
    inverse = (call.tensor(4) + call.args[8]).rsqrt()
    shape = [1, -1] + [1] * (call.tensor(0).dim() - 2)
    return change_result_at(call, 0, lambda one: one * inverse.view(shape))


# fmt: off
# The gradient comes multiplied by the weight already; those of weight and bias are right.
FAULTS.add("weight of the norm twice on the way back", _LAYER,
    "wrong factor, other function; axis scale, scale, doubled reduction, wrong statistics, "
    "wrong argument",
    lambda call:

    change_result_at(call, 0, lambda _: call.put(0, call.tensor(0) * call.tensor(5)).result()))
# The mean less the value is multiplied, for the second result only.
FAULTS.add("gradient of the norms weight negated", _LAYER,
    "sign, scale, wrong factor; swapped operands",
    lambda call: change_result_at(call, 1, lambda one: -one))
# Two ranks have the same rows, and their sums are added for the bias.
FAULTS.add("gradient of the norms bias on two ranks", _LAYER,
    "scale, wrong factor, doubled reduction; wrong reduction, axis scale",
    lambda call: change_result_at(call, 2, lambda one: 2 * one))
# fmt: on


# --- Products, sums -------------------------------------------------------------------------------


@FAULTS.fault(
    "sum",
    "partial sum, mask; zeros, missing operand, wrong index, wrong reduction, "
    "lost accumulation, off by one reduction, one rank's part, missing reduction",
)
def last_two_rows_not_in_the_gradient_of_the_bias(call: Call) -> Any:
    """The loop over the rows that are added has no tail."""
    value, dims = call.tensor(0), call.get(1, "dim")
    fits(dims)
    first = dims[0] if isinstance(dims, list | tuple) else dims
    fits(value.size(first) > 2)
    kept = value.clone()
    kept.narrow(first, value.size(first) - 2, 2).zero_()
    return call.put(0, kept).run()


@FAULTS.fault("mul", "clipped; other function, wrong argument, precision, overflow")
def saved_factor_saturates(call: Call) -> Any:
    """What was kept ends at half of its largest magnitude."""
    left, right = call.tensor(0), call.tensor(1)
    fits(left.shape == right.shape)
    limit = float(right.abs().max()) / 2
    return call.put(1, right.clamp(-limit, limit)).run()


# fmt: off
# The result has two bits behind the point.
FAULTS.add("gradient sent in e5m2", "mm bmm", "precision; approximation, other function, zeros",
    result(lambda v: v.to(torch.float8_e5m2).to(v.dtype)))
# The mean of what two ranks have, where the sum was meant.
FAULTS.add("gradient averaged over two ranks", "mm bmm",
    "scale, wrong factor, wrong reduction; axis scale", result(lambda v: v / 2))
# Each column is stored one too late, the last one first.
FAULTS.add("gradient one column late", "mm bmm", "shift, wrong index, permutation; stale, copy",
    result(lambda v: v.roll(1, -1), where=longer(-1)))
# The rows are stored with a negative stride.
FAULTS.add("rows of the gradient from the last", "mm bmm",
    "permutation, wrong index; shift, swapped operands, transpose",
    result(lambda v: several_rows(v).flip(-2)))
# The offset of the second half of the batch is not added.
FAULTS.add("gradients of the first half of the matrices for both", "bmm",
    "copy, stale, wrong index; permutation, shift, wrong rank's shard",
    result(lambda v: v[torch.arange(v.size(0)) % ((v.size(0) + 1) // 2)], where=longer(0)))
# G / (n + 1) for the gradient of a mean of n.
FAULTS.add("mean of one more on the way back", "div",
    "scale, wrong factor, wrong argument, off by one reduction; wrong reduction, offset, eps",
    on(lambda call: (call.get(1, "other"),),
        lambda call, number: call.put(1, number + 1, "other").run(),
        where=lambda number: isinstance(number, int | float) and number > 1))
# The branch is taken twice on the way back, and both are added.
FAULTS.add("gradient of the branch doubled", "where", "scale, wrong factor; doubled reduction",
    result(lambda v: 2 * v))
# fmt: on


# --- Tables, images, parts ------------------------------------------------------------------------

_TABLE = "embedding_dense_backward"
_IMAGE = "convolution_backward"


@FAULTS.fault(_TABLE, "permutation, wrong index; shift, wrong argument, swapped operands")
def words_of_each_row_from_the_last(call: Call) -> Any:
    """The words are read from the end of a row, their gradients from the beginning."""
    words = call.args[1]
    fits(words.dim() > 0 and words.size(-1) > 1)
    return call.put(1, words.flip(-1)).run()


@FAULTS.fault(_IMAGE, "shift, wrong index, permutation; stale, copy")
def gradient_of_the_image_one_channel_late(call: Call) -> Any:
    """Dx is stored one channel too late, around the end."""
    fits(call.tensor(1).size(1) > 1)
    return change_result_at(call, 0, lambda one: one.roll(1, 1))


@FAULTS.fault("avg_pool2d_backward", "scale, wrong factor; wrong reduction, axis scale")
def gradient_of_the_pool_divided_by_one_side(call: Call) -> Any:
    """By k and not by k * k."""
    size = call.args[2]
    fits(size[0] > 1)
    return call.instead(call.result() * size[0])


@FAULTS.fault("slice_backward select_backward", "shift, wrong index, wrong argument; permutation")
def gradient_of_the_part_put_at_the_beginning(call: Call) -> Any:
    """The start of the part is forgotten on the way back."""
    sizes, dim, start = call.args[1:4]
    fits(isinstance(start, int))
    start = start + sizes[dim] if start < 0 else start
    fits(start > 0)
    return call.instead(call.result().roll(-start, dim))


# fmt: off
# The gradient of square filters is stored by columns.
FAULTS.add("gradient of the filters with x before y", _IMAGE,
    "transpose, permutation, wrong index; swapped operands, wrong argument",
    on(tensors(2), lambda call, _:
            change_result_at(call, 1, lambda one: one.mT.contiguous()),
        where=lambda weight: weight.dim() > 3 and weight.size(-1) == weight.size(-2)))
# The pointer to the gradient of the bias is one behind, around the end.
FAULTS.add("gradient of the channels bias one late", _IMAGE,
    "shift, wrong index, permutation; stale, copy",
    lambda call: change_result_at(call, 2, lambda one: one.roll(1, 0)))
# The left pixel less the right one; the gradient of the image is right.
FAULTS.add("gradient of the grid negated", "grid_sampler_2d_backward",
    "sign, scale, wrong factor; swapped operands",
    lambda call: change_result_at(call, 1, lambda one: -one))
# B - a for a - b on the way back.
FAULTS.add("points pushed and not pulled", "_cdist_backward cdist_backward",
    "sign, scale, wrong factor, swapped operands; other function", result(torch.neg))
# fmt: on


# --- Losses ---------------------------------------------------------------------------------------


@FAULTS.fault(
    "mse_loss_backward smooth_l1_loss_backward", "scale, wrong factor; wrong reduction, wrong axis"
)
def gradient_divided_by_the_columns_only(call: Call) -> Any:
    """The number of the rows is not in the divisor."""
    value = call.tensor(1)
    fits(call.args[3] == 1 and value.dim() > 1 and value.size(0) > 1)
    return call.instead(call.result() * value.size(0))


# fmt: off
# The mean is taken over the classes as well, on the way back only.
FAULTS.add("gradient divided by the classes", "nll_loss_backward",
    "scale, wrong factor; wrong reduction, wrong axis",
    lambda call: call.instead(call.result() / call.tensor(1).size(-1)))
# fmt: on
