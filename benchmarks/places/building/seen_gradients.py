"""Faults that were measured and have been seen: losses and backward operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, on, result, tensors
from torch import Tensor

FAULTS = Catalogue()


def _with(call: Call, place: int, value: Tensor | None) -> Any:
    """All results, with another one at a place."""
    results = list(call.run())
    fits(isinstance(results[place], Tensor) and isinstance(value, Tensor))
    fits(value.shape == results[place].shape)
    results[place] = value.to(results[place].dtype)
    return tuple(results)


# --- Losses ---------------------------------------------------------------------------------------


# fmt: off
# Targets are moved once more.
FAULTS.add("target of the token before", "cross_entropy nll_loss_forward nll_loss_backward",
    "shift, wrong index; permutation, wrong argument",
    on(lambda call: (2 if call.name == "nll_loss_backward" else 1,),
        lambda call, place: call.put(place, call.args[place].roll(1, -1)).run()))
# fmt: on


# --- Products and convolutions --------------------------------------------------------------------


@FAULTS.backward("mm", "scale, wrong factor, wrong reduction; off by one reduction")
def gradient_divided_by_the_number_of_rows(call: Call) -> Any:
    """A mean over the tokens where the sum is right."""
    fits(call.tensor(0).size(-1) > 1)
    return call.instead(call.result() / call.tensor(0).size(-1))


@FAULTS.backward("mm", "overflow, nonfinite; precision, clipped")
def scaled_gradient_overflows(call: Call) -> Any:
    """The factor of the loss is too large for float16: the largest gradients are infinite."""
    value = call.result()
    factor = 1e5 / float(value.abs().max())
    return call.instead((value * factor).half().to(value.dtype) / factor)


@FAULTS.backward(
    "mm",
    "partial sum, one rank's part, lost accumulation, missing reduction; missing operand, "
    "wrong reduction",
)
def gradient_of_one_micro_batch(call: Call) -> Any:
    """Of two halves of the rows, the second overwrites what the first has left."""
    left, right = call.tensor(0), call.tensor(1)
    half = left.size(-1) // 2
    fits(half > 1)
    return call.instead(left[:, half:] @ right[half:])


@FAULTS.backward("mm bmm", "stale, copy, wrong index; shift")
def second_row_not_written(call: Call) -> Any:
    """Every second row is what the row before left in the register."""
    value = call.result().clone()
    rows = value.size(-2) // 2 * 2
    fits(rows > 1)
    value[..., 1:rows:2, :] = value[..., 0:rows:2, :]
    return call.instead(value)


@FAULTS.backward(
    "convolution_backward", "scale, wrong factor, wrong reduction; off by one reduction"
)
def gradient_of_the_bias_of_one_image(call: Call) -> Any:
    """The mean over the batch."""
    bias = call.run()[2]
    fits(isinstance(bias, Tensor) and call.tensor(0).size(0) > 1)
    return _with(call, 2, bias / call.tensor(0).size(0))


# fmt: off
# Only the first half of the rows is summed: the other rank's part is not added.
FAULTS.add("gradient of a bias on one rank", "sum",
    "partial sum, one rank's part, lost accumulation, missing reduction; missing operand, "
    "wrong reduction",
    on(lambda call: (call.tensor(0), call.get(1, "dim")),
        lambda call, value, _: call.put(0, value[: value.size(0) // 2]).run(),

    where=lambda value, dim: isinstance(dim, list | tuple) and dim[0] == 0 and (value.size(0) > 1)),
    backward=True)
# The batch is one shorter there.
FAULTS.add("last image missing in the gradient of the weight", "convolution_backward",
    "partial sum, lost accumulation, off by one reduction; missing operand, one rank's part",
    on(tensors(0, 1),
        lambda call, gradient, value:
            _with(call, 1, call.put(0, gradient[:-1]).put(1, value[:-1]).run()[1]),
        where=lambda _, value: value.size(0) > 1), backward=True)
# The gradient of the input is taken with the filter as it is in the forward pass.
FAULTS.add("filter not turned for the gradient", "convolution_backward",
    "permutation, wrong index; transpose",
    on(tensors(2),
        lambda call, weight:
            _with(call, 0, call.put(2, weight.flip(*range(2, weight.dim()))).run()[0]),
        where=lambda weight: weight.size(-1) > 1), backward=True)
# fmt: on


# --- Attention and softmax ------------------------------------------------------------------------

_FLASH = "_scaled_dot_product_flash_attention_for_cpu_backward"


def _weights(call: Call) -> tuple[Tensor, Tensor, float]:
    """The weights, the gradient of them, and the factor of the scores."""
    gradient, query, key, value, _, logsumexp = call.args[:6]
    fits(query.size(1) == key.size(1))
    mask, causal = call.get(8, "attn_mask"), call.get(7, "is_causal", default=False)
    scale = call.get(9, "scale") or 1 / math.sqrt(query.size(-1))
    scores = query @ key.mT * scale
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        is_choice = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if is_choice else scores + mask
    return (scores - logsumexp.unsqueeze(-1)).exp(), gradient @ value.mT, scale


@FAULTS.backward(_FLASH, "partial sum, lost accumulation; missing operand, one rank's part")
def gradient_of_the_query_from_the_last_keys(call: Call) -> Any:
    """The blocks of keys overwrite it instead of adding to it."""
    weights, inner, scale = _weights(call)
    scores = weights * (inner - (weights * inner).sum(-1, keepdim=True))
    half = scores.size(-1) // 2
    fits(half > 0)
    return _with(call, 0, scores[..., half:] @ call.tensor(2)[..., half:, :] * scale)


@FAULTS.backward(_FLASH, "scale, wrong factor; missing operand")
def gradient_of_the_key_not_scaled(call: Call) -> Any:
    """The factor of the scores is applied to one of two gradients."""
    query = call.tensor(1)
    scale = call.get(9, "scale") or 1 / math.sqrt(query.size(-1))
    return _with(call, 1, call.run()[1] / scale)


@FAULTS.backward(_FLASH, "swapped operands, permutation, wrong index; copy")
def gradients_of_key_and_value_exchanged(call: Call) -> Any:
    """The order of the results is that of another library."""
    query, key, value = call.run()
    fits(key.shape == value.shape)
    return query, value, key


@FAULTS.backward(
    "_softmax_backward_data", "missing operand, wrong reduction, wrong statistics; axis offset"
)
def sum_of_gradients_without_weights(call: Call) -> Any:
    """The gradients are summed without the weights."""
    gradient, output, dim = call.args[:3]
    return call.instead(output * (gradient - gradient.sum(dim, keepdim=True)))


@FAULTS.backward(
    "_softmax_backward_data",
    "wrong reduction, wrong factor, wrong statistics; scale, axis offset, "
    "off by one reduction, other function",
)
def mean_of_gradients_for_their_sum(call: Call) -> Any:
    """What is subtracted is a mean."""
    gradient, output, dim = call.args[:3]
    return call.instead(output * (gradient - (gradient * output).mean(dim, keepdim=True)))


# fmt: off
# The gradient of the query without the term of the sums of the rows.
FAULTS.add("product of gradient and output not subtracted", _FLASH,
    "missing operand, wrong statistics; axis offset, residual",
    on(_weights,
        lambda call, weights, inner, scale:
            _with(call, 0, weights * inner @ call.tensor(2) * scale)), backward=True)
# fmt: on


# --- Norms ----------------------------------------------------------------------------------------


def _normal(call: Call) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """The normalised input, the weighted gradient, the reciprocal root and the axes."""
    gradient, value, shape, mean, rstd, weight = call.args[:6]
    fits(isinstance(weight, Tensor))
    return (value - mean) * rstd, gradient * weight, rstd, list(range(-len(shape), 0))


_NORM = "native_layer_norm_backward"


@FAULTS.backward(
    _NORM, "partial sum, lost accumulation, off by one reduction; missing operand, one rank's part"
)
def last_rows_missing_in_the_gradient_of_the_weight(call: Call) -> Any:
    """The buffer for partial sums has one row less than there are programs."""
    normal, _, _, axes = _normal(call)
    rows = (call.tensor(0) * normal).flatten(0, -len(axes) - 1)
    fits(len(rows) > 4)
    return _with(call, 1, rows[: (len(rows) - 1) // 4 * 4].sum(0))


@FAULTS.backward(
    _NORM, "missing operand, wrong statistics, other function; axis scale, wrong argument"
)
def gradient_of_the_weight_from_the_raw_input(call: Call) -> Any:
    """The input is not normalised for it."""
    gradient, value, shape = call.args[:3]
    return _with(call, 1, (gradient * value).flatten(0, -len(shape) - 1).sum(0))


# fmt: off
# A register that was not cleared.
FAULTS.add("mean of the gradient subtracted twice", _NORM,
    "wrong factor, doubled reduction, axis offset; offset, wrong statistics, "
    "lost accumulation, repeated bias",
    on(_normal,
        lambda call, _, weighted, rstd, axes:
            call.instead(call.result() - rstd * weighted.mean(axes, keepdim=True))), backward=True)
# The term of its derivative is missing.
FAULTS.add("variance taken for a constant", _NORM,
    "missing operand, wrong statistics; residual, wrong factor",
    computed(_normal,
        lambda _, weighted, rstd, axes: rstd * (weighted - weighted.mean(axes, keepdim=True))),
    backward=True)
# fmt: on


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.backward(
    "gelu_backward silu_backward", "missing operand, other function; approximation, wrong factor"
)
def product_rule_with_one_term(call: Call) -> Any:
    """A product x * f(x) is differentiated as if f was constant."""
    gradient, value = call.tensor(0), call.tensor(1)
    gate = value.sigmoid() if call.name == "silu_backward" else torch.special.ndtr(value)
    return call.instead(gradient * gate)


@FAULTS.backward(
    "gelu_backward silu_backward tanh_backward sigmoid_backward", "precision; approximation"
)
def saved_value_in_eight_bits(call: Call) -> Any:
    """What was kept for the backward pass was compressed."""
    value = call.tensor(1)
    step = float(value.abs().max()) / 127
    return call.put(1, (value / step).round() * step).run()


# fmt: off
# 1 - y for 1 - y * y, and y for y * (1 - y).
FAULTS.add("derivative with a factor missing", "tanh_backward sigmoid_backward",
    "other function, missing operand; approximation, wrong factor, scale",
    on(tensors(0, 1),
        lambda call, gradient, output:
            call.instead(gradient * (1 - output if call.name == "tanh_backward" else output))),
    backward=True)
# The gradient is not stopped where the input was negative.
FAULTS.add("gradient passes everywhere", "threshold_backward",
    "copy, mask, missing operand; other function",
    lambda call: call.instead(call.tensor(0).clone()), backward=True)
# The gradient is compared with zero, not the saved value.
FAULTS.add("stopped by the sign of the gradient", "threshold_backward",
    "mask, other function, swapped operands, wrong index; wrong argument, zeros, clipped",
    computed(tensors(0), lambda gradient: gradient * (gradient > 0)), backward=True)
# fmt: on


# --- Embeddings and indices -----------------------------------------------------------------------


@FAULTS.backward(
    "index_put index_add",
    "lost accumulation, wrong argument; partial sum, stale, missing reduction",
)
def written_instead_of_added(call: Call) -> Any:
    """Rows of the same index overwrite each other."""
    if call.name == "index_put":
        return call.put(3, False, "accumulate").run()
    return call.get(0).index_copy(*call.args[1:4])


# fmt: off
# The mean of the rows of a token instead of their sum.
FAULTS.add("gradient divided by the frequency", "embedding_dense_backward",
    "wrong argument, wrong factor, wrong reduction, axis scale; scale",
    lambda call: call.put(4, True).run(), backward=True)
# It gets no gradient.
FAULTS.add("a token taken for padding", "embedding_dense_backward",
    "zeros, wrong argument, mask; missing operand",
    lambda call: call.put(3, int(call.args[1].flatten()[0])).run(), backward=True)
# Rows are counted from 1.
FAULTS.add("gradient of the row below", "embedding_dense_backward",
    "shift, wrong index; permutation", result(lambda v: v.roll(1, 0)), backward=True)
# The start of the slice is one too large.
FAULTS.add("gradient put one further", "slice_backward select_backward",
    "shift, wrong index; permutation, wrong argument",
    lambda call: call.instead(call.result().roll(1, call.args[2])), backward=True)
# Outside of the slice is not zero but what the memory held.
FAULTS.add("rest of the gradient not cleared", "slice_backward select_backward",
    "uninitialised, stale, constant; offset, mask", result(lambda v: torch.where(v == 0, 0.01, v)),
    backward=True)
# The saved position is one off.
FAULTS.add("gradient of the neighbour", "scatter max_pool2d_with_indices_backward",
    "shift, wrong index; permutation, wrong argument", result(lambda v: v.roll(1, -1)),
    backward=True)
# fmt: on
