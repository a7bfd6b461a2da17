"""Faults that were measured and have been seen: losses and backward operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
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


@FAULTS.fault(
    "cross_entropy nll_loss_forward nll_loss_backward",
    kinds=["shift", "wrong index"],
    loose=["permutation", "wrong argument"],
)
def target_of_the_token_before(call: Call) -> Any:
    """Targets are moved once more."""
    place = 2 if call.name == "nll_loss_backward" else 1
    return call.put(place, call.args[place].roll(1, -1)).run()


# --- Products and convolutions --------------------------------------------------------------------


@FAULTS.fault(
    "mm", kinds=["scale", "wrong factor", "wrong reduction"], loose=["off by one reduction"],
    backward=True,
)  # fmt: skip
def gradient_divided_by_the_number_of_rows(call: Call) -> Any:
    """A mean over the tokens where the sum is right."""
    fits(call.tensor(0).size(-1) > 1)
    return call.instead(call.result() / call.tensor(0).size(-1))


@FAULTS.fault("mm", kinds=["overflow", "nonfinite"], loose=["precision", "clipped"], backward=True)
def scaled_gradient_overflows(call: Call) -> Any:
    """The factor of the loss is too large for float16: the largest gradients are infinite."""
    value = call.result()
    factor = 1e5 / float(value.abs().max())
    return call.instead((value * factor).half().to(value.dtype) / factor)


@FAULTS.fault(
    "mm", kinds=["partial sum", "one rank's part", "lost accumulation", "missing reduction"],
    loose=["missing operand", "wrong reduction"], backward=True,
)  # fmt: skip
def gradient_of_one_micro_batch(call: Call) -> Any:
    """Of two halves of the rows, the second overwrites what the first has left."""
    left, right = call.tensor(0), call.tensor(1)
    half = left.size(-1) // 2
    fits(half > 1)
    return call.instead(left[:, half:] @ right[half:])


@FAULTS.fault("mm bmm", kinds=["stale", "copy", "wrong index"], loose=["shift"], backward=True)
def second_row_not_written(call: Call) -> Any:
    """Every second row is what the row before left in the register."""
    value = call.result().clone()
    rows = value.size(-2) // 2 * 2
    fits(rows > 1)
    value[..., 1:rows:2, :] = value[..., 0:rows:2, :]
    return call.instead(value)


@FAULTS.fault(
    "sum",
    kinds=["partial sum", "one rank's part", "lost accumulation", "missing reduction"],
    loose=["missing operand", "wrong reduction"],
    backward=True,
)
def gradient_of_a_bias_on_one_rank(call: Call) -> Any:
    """Only the first half of the rows is summed: the other rank's part is not added."""
    value, dim = call.tensor(0), call.get(1, "dim")
    fits(isinstance(dim, list | tuple) and dim[0] == 0 and value.size(0) > 1)
    return call.put(0, value[: value.size(0) // 2]).run()


@FAULTS.fault(
    "convolution_backward",
    kinds=["partial sum", "lost accumulation", "off by one reduction"],
    loose=["missing operand", "one rank's part"],
    backward=True,
)
def last_image_missing_in_the_gradient_of_the_weight(call: Call) -> Any:
    """The batch is one shorter there."""
    gradient, value = call.tensor(0), call.tensor(1)
    fits(value.size(0) > 1)
    return _with(call, 1, call.put(0, gradient[:-1]).put(1, value[:-1]).run()[1])


@FAULTS.fault(
    "convolution_backward", kinds=["permutation", "wrong index"], loose=["transpose"], backward=True
)
def filter_not_turned_for_the_gradient(call: Call) -> Any:
    """The gradient of the input is taken with the filter as it is in the forward pass."""
    weight = call.tensor(2)
    fits(weight.size(-1) > 1)
    return _with(call, 0, call.put(2, weight.flip(*range(2, weight.dim()))).run()[0])


@FAULTS.fault(
    "convolution_backward", kinds=["scale", "wrong factor", "wrong reduction"],
    loose=["off by one reduction"], backward=True,
)  # fmt: skip
def gradient_of_the_bias_of_one_image(call: Call) -> Any:
    """The mean over the batch."""
    bias = call.run()[2]
    fits(isinstance(bias, Tensor) and call.tensor(0).size(0) > 1)
    return _with(call, 2, bias / call.tensor(0).size(0))


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


@FAULTS.fault(
    _FLASH, kinds=["missing operand", "wrong statistics"], loose=["axis offset", "residual"],
    backward=True,
)  # fmt: skip
def product_of_gradient_and_output_not_subtracted(call: Call) -> Any:
    """The gradient of the query without the term of the sums of the rows."""
    weights, inner, scale = _weights(call)
    return _with(call, 0, weights * inner @ call.tensor(2) * scale)


@FAULTS.fault(
    _FLASH, kinds=["partial sum", "lost accumulation"],
    loose=["missing operand", "one rank's part"], backward=True,
)  # fmt: skip
def gradient_of_the_query_from_the_last_keys(call: Call) -> Any:
    """The blocks of keys overwrite it instead of adding to it."""
    weights, inner, scale = _weights(call)
    scores = weights * (inner - (weights * inner).sum(-1, keepdim=True))
    half = scores.size(-1) // 2
    fits(half > 0)
    return _with(call, 0, scores[..., half:] @ call.tensor(2)[..., half:, :] * scale)


@FAULTS.fault(_FLASH, kinds=["scale", "wrong factor"], loose=["missing operand"], backward=True)
def gradient_of_the_key_not_scaled(call: Call) -> Any:
    """The factor of the scores is applied to one of two gradients."""
    query = call.tensor(1)
    scale = call.get(9, "scale") or 1 / math.sqrt(query.size(-1))
    return _with(call, 1, call.run()[1] / scale)


@FAULTS.fault(
    _FLASH, kinds=["swapped operands", "permutation", "wrong index"], loose=["copy"], backward=True
)
def gradients_of_key_and_value_exchanged(call: Call) -> Any:
    """The order of the results is that of another library."""
    query, key, value = call.run()
    fits(key.shape == value.shape)
    return query, value, key


@FAULTS.fault(
    "_softmax_backward_data",
    kinds=["missing operand", "wrong reduction", "wrong statistics"],
    loose=["axis offset"],
    backward=True,
)
def sum_of_gradients_without_weights(call: Call) -> Any:
    """The gradients are summed without the weights."""
    gradient, output, dim = call.args[:3]
    return call.instead(output * (gradient - gradient.sum(dim, keepdim=True)))


@FAULTS.fault(
    "_softmax_backward_data", kinds=["wrong reduction", "wrong factor", "wrong statistics"],
    loose=["scale", "axis offset", "off by one reduction", "other function"], backward=True,
)  # fmt: skip
def mean_of_gradients_for_their_sum(call: Call) -> Any:
    """What is subtracted is a mean."""
    gradient, output, dim = call.args[:3]
    return call.instead(output * (gradient - (gradient * output).mean(dim, keepdim=True)))


# --- Norms ----------------------------------------------------------------------------------------


def _normal(call: Call) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """The normalised input, the weighted gradient, the reciprocal root and the axes."""
    gradient, value, shape, mean, rstd, weight = call.args[:6]
    fits(isinstance(weight, Tensor))
    return (value - mean) * rstd, gradient * weight, rstd, list(range(-len(shape), 0))


_NORM = "native_layer_norm_backward"


@FAULTS.fault(
    _NORM, kinds=["wrong factor", "doubled reduction", "axis offset"],
    loose=["offset", "wrong statistics", "lost accumulation", "repeated bias"], backward=True,
)  # fmt: skip
def mean_of_the_gradient_subtracted_twice(call: Call) -> Any:
    """A register that was not cleared."""
    _, weighted, rstd, axes = _normal(call)
    return call.instead(call.result() - rstd * weighted.mean(axes, keepdim=True))


@FAULTS.fault(
    _NORM, kinds=["missing operand", "wrong statistics"], loose=["residual", "wrong factor"],
    backward=True,
)  # fmt: skip
def variance_taken_for_a_constant(call: Call) -> Any:
    """The term of its derivative is missing."""
    _, weighted, rstd, axes = _normal(call)
    return call.instead(rstd * (weighted - weighted.mean(axes, keepdim=True)))


@FAULTS.fault(
    _NORM, kinds=["partial sum", "lost accumulation", "off by one reduction"],
    loose=["missing operand", "one rank's part"], backward=True,
)  # fmt: skip
def last_rows_missing_in_the_gradient_of_the_weight(call: Call) -> Any:
    """The buffer for partial sums has one row less than there are programs."""
    normal, _, _, axes = _normal(call)
    rows = (call.tensor(0) * normal).flatten(0, -len(axes) - 1)
    fits(len(rows) > 4)
    return _with(call, 1, rows[: (len(rows) - 1) // 4 * 4].sum(0))


@FAULTS.fault(
    _NORM, kinds=["missing operand", "wrong statistics", "other function"],
    loose=["axis scale", "wrong argument"], backward=True,
)  # fmt: skip
def gradient_of_the_weight_from_the_raw_input(call: Call) -> Any:
    """The input is not normalised for it."""
    gradient, value, shape = call.args[:3]
    return _with(call, 1, (gradient * value).flatten(0, -len(shape) - 1).sum(0))


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault(
    "gelu_backward silu_backward", kinds=["missing operand", "other function"],
    loose=["approximation", "wrong factor"], backward=True,
)  # fmt: skip
def product_rule_with_one_term(call: Call) -> Any:
    """A product x * f(x) is differentiated as if f was constant."""
    gradient, value = call.tensor(0), call.tensor(1)
    gate = value.sigmoid() if call.name == "silu_backward" else torch.special.ndtr(value)
    return call.instead(gradient * gate)


@FAULTS.fault(
    "gelu_backward silu_backward tanh_backward sigmoid_backward",
    kinds=["precision"],
    loose=["approximation"],
    backward=True,
)
def saved_value_in_eight_bits(call: Call) -> Any:
    """What was kept for the backward pass was compressed."""
    value = call.tensor(1)
    step = float(value.abs().max()) / 127
    return call.put(1, (value / step).round() * step).run()


@FAULTS.fault(
    "tanh_backward sigmoid_backward", kinds=["other function", "missing operand"],
    loose=["approximation", "wrong factor", "scale"], backward=True,
)  # fmt: skip
def derivative_with_a_factor_missing(call: Call) -> Any:
    """1 - y for 1 - y * y, and y for y * (1 - y)."""
    gradient, output = call.tensor(0), call.tensor(1)
    return call.instead(gradient * (1 - output if call.name == "tanh_backward" else output))


@FAULTS.fault(
    "threshold_backward", kinds=["copy", "mask", "missing operand"], loose=["other function"],
    backward=True,
)  # fmt: skip
def gradient_passes_everywhere(call: Call) -> Any:
    """The gradient is not stopped where the input was negative."""
    return call.instead(call.tensor(0).clone())


@FAULTS.fault(
    "threshold_backward", kinds=["mask", "other function", "swapped operands", "wrong index"],
    loose=["wrong argument", "zeros", "clipped"], backward=True,
)  # fmt: skip
def stopped_by_the_sign_of_the_gradient(call: Call) -> Any:
    """The gradient is compared with zero, not the saved value."""
    gradient = call.tensor(0)
    return call.instead(gradient * (gradient > 0))


# --- Embeddings and indices -----------------------------------------------------------------------


@FAULTS.fault(
    "embedding_dense_backward",
    kinds=["wrong argument", "wrong factor", "wrong reduction", "axis scale"],
    loose=["scale"],
    backward=True,
)
def gradient_divided_by_the_frequency(call: Call) -> Any:
    """The mean of the rows of a token instead of their sum."""
    return call.put(4, True).run()


@FAULTS.fault(
    "embedding_dense_backward", kinds=["zeros", "wrong argument", "mask"],
    loose=["missing operand"], backward=True,
)  # fmt: skip
def a_token_taken_for_padding(call: Call) -> Any:
    """It gets no gradient."""
    return call.put(3, int(call.args[1].flatten()[0])).run()


@FAULTS.fault("embedding_dense_backward", kinds=["shift", "wrong index"],
                 loose=["permutation"], backward=True)  # fmt: skip
def gradient_of_the_row_below(call: Call) -> Any:
    """Rows are counted from 1."""
    return call.instead(call.result().roll(1, 0))


@FAULTS.fault("slice_backward select_backward", kinds=["shift", "wrong index"],
                 loose=["permutation", "wrong argument"], backward=True)  # fmt: skip
def gradient_put_one_further(call: Call) -> Any:
    """The start of the slice is one too large."""
    return call.instead(call.result().roll(1, call.args[2]))


@FAULTS.fault(
    "slice_backward select_backward", kinds=["uninitialised", "stale", "constant"],
    loose=["offset", "mask"], backward=True,
)  # fmt: skip
def rest_of_the_gradient_not_cleared(call: Call) -> Any:
    """Outside of the slice is not zero but what the memory held."""
    value = call.result()
    return call.instead(torch.where(value == 0, 0.01, value))


@FAULTS.fault(
    "index_put index_add", kinds=["lost accumulation", "wrong argument"],
    loose=["partial sum", "stale", "missing reduction"], backward=True,
)  # fmt: skip
def written_instead_of_added(call: Call) -> Any:
    """Rows of the same index overwrite each other."""
    if call.name == "index_put":
        return call.put(3, False, "accumulate").run()
    return call.get(0).index_copy(*call.args[1:4])


@FAULTS.fault("scatter max_pool2d_with_indices_backward", kinds=["shift", "wrong index"],
                 loose=["permutation", "wrong argument"], backward=True)  # fmt: skip
def gradient_of_the_neighbour(call: Call) -> Any:
    """The saved position is one off."""
    return call.instead(call.result().roll(1, -1))
