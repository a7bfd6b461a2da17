"""Faults for building: backward kernels."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, on, result, tensors
from torch import Tensor

FAULTS = Catalogue(backward=True)


@FAULTS.fault(
    "native_layer_norm_backward", "axis offset, missing operand, wrong statistics; offset"
)
def gradient_of_a_norm_without_its_mean(call: Call) -> Any:
    """The mean of the gradient is not subtracted."""
    gradient, value, shape, mean, rstd, weight = call.args[:6]
    axes = list(range(-len(shape), 0))
    normal = (value - mean) * rstd
    weighted = gradient * weight
    return call.instead(rstd * (weighted - normal * (weighted * normal).mean(axes, keepdim=True)))


@FAULTS.fault("sum", "off by one reduction, partial sum")
def gradient_of_the_bias_misses_a_row(call: Call) -> Any:
    """The last row of the batch is not added."""
    value, dim = call.tensor(0), call.get(1, "dim")
    fits(isinstance(dim, list | tuple) and list(dim) == [0] and len(value) > 2)
    return call.put(0, value[:-1]).run()


@FAULTS.fault(
    "embedding_dense_backward",
    "lost accumulation, missing reduction; stale, partial sum, wrong index",
)
def last_write_wins(call: Call) -> Any:
    """The rows of a token that occurs twice are not added."""
    gradient, indices, rows = call.args[:3]
    table = gradient.new_zeros(rows, gradient.size(-1))
    for index, row in zip(indices.flatten().tolist(), gradient.flatten(0, -2), strict=True):
        table[index] = row
    return call.instead(table)


# fmt: off
# The gradient passes where the input is positive.
FAULTS.add("derivative of relu", "gelu_backward silu_backward",
    "other function, approximation; zeros, mask",
    lambda call: call.instead(call.tensor(0) * (call.tensor(1) > 0)))
# The sum over the row is not subtracted.
FAULTS.add("softmax gradient without its sum", "_softmax_backward_data",
    "missing operand; axis offset", lambda call: call.instead(call.tensor(0) * call.tensor(1)))
# Half of the gradient.
FAULTS.add("derivative halved", "threshold_backward tanh_backward sigmoid_backward",
    "scale, wrong factor", result(lambda v: v / 2))
# Of a square weight.
FAULTS.add("gradient of a weight transposed", "mm", "transpose",
    result(lambda v: v.t().contiguous(), where=lambda v: v.size(0) == v.size(1) > 2))
# fmt: on


# --- Gradients of activations and softmax ---------------------------------------------------------


@FAULTS.fault(
    "gelu_backward silu_backward", "missing operand, other function; approximation, scale"
)
def derivative_without_its_second_term(call: Call) -> Any:
    """Only the gate: the derivative of the gate is forgotten."""
    gradient, value = call.tensor(0), call.tensor(1)
    gate = torch.sigmoid(value) if call.name == "silu_backward" else torch.special.ndtr(value)
    return call.instead(gradient * gate)


@FAULTS.fault("gelu_backward", "approximation, other function, wrong argument")
def derivative_of_the_other_gelu(call: Call) -> Any:
    """The gradient of the form with tanh, or of that with erf."""
    other = "none" if call.kwargs.get("approximate") == "tanh" else "tanh"
    return torch.ops.aten.gelu_backward(call.tensor(0), call.tensor(1), approximate=other)


@FAULTS.fault("_softmax_backward_data", "wrong axis, wrong argument")
def softmax_gradient_over_the_other_axis(call: Call) -> Any:
    """The sum is over the axis before."""
    gradient, result = call.tensor(0), call.tensor(1)
    product = gradient * result
    fits(product.dim() >= 2)
    return call.instead(product - result * product.sum(-2, keepdim=True))


@FAULTS.fault("_softmax_backward_data", "off by one reduction, partial sum; axis offset")
def softmax_gradient_misses_the_last_column(call: Call) -> Any:
    """The sum of the row ends one too early."""
    gradient, result = call.tensor(0), call.tensor(1)
    product = gradient * result
    fits(product.shape[-1] > 2)
    return call.instead(product - result * product[..., :-1].sum(-1, keepdim=True))


# fmt: off
# The derivative is taken as 1: a straight-through estimator.
FAULTS.add("gradient passed on",
    "gelu_backward silu_backward threshold_backward tanh_backward sigmoid_backward",
    "copy, missing operand; other function", lambda call: call.instead(call.tensor(0).clone()))
# G (1 - y) instead of g (1 - y**2).
FAULTS.add("square of tanh forgotten", "tanh_backward", "other function, missing operand; scale",
    lambda call: call.instead(call.tensor(0) * (1 - call.tensor(1))))
# The mask of a relu the other way round.
FAULTS.add("gradient where the input is negative", "threshold_backward",
    "mask, sign, other function; zeros",
    lambda call: call.instead(call.tensor(0) * (call.tensor(1) <= 0)))
# G - softmax sum(g).
FAULTS.add("gradient of log softmax", "_softmax_backward_data",
    "missing operand, other function; axis scale",
    on(tensors(0),
        lambda call, gradient:
            call.instead(gradient - call.tensor(1) * gradient.sum(-1, keepdim=True))))
# fmt: on


# --- Gradients of norms ---------------------------------------------------------------------------


def _layer_norm(call: Call) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Weighted gradient, normalised values, 1 / deviation, axes."""
    gradient, value, shape, mean, rstd, weight = call.args[:6]
    weighted = gradient if weight is None else gradient * weight
    return weighted, (value - mean) * rstd, rstd, list(range(-len(shape), 0))


@FAULTS.fault("native_layer_norm_backward", "missing operand; wrong statistics")
def statistics_taken_for_constants(call: Call) -> Any:
    """No gradient through mean and variance."""
    weighted, _, rstd, _ = _layer_norm(call)
    return call.instead(rstd * weighted)


@FAULTS.fault("native_layer_norm_backward", "missing operand, axis scale; wrong factor")
def gradient_without_the_weight(call: Call) -> Any:
    """The gradient is not multiplied by the weight of the norm."""
    weight = call.args[5]
    fits(isinstance(weight, Tensor))
    return call.put(5, torch.ones_like(weight)).run()


@FAULTS.fault("native_layer_norm_backward", "wrong factor; wrong statistics")
def factor_two_of_the_variance(call: Call) -> Any:
    """The term of the variance is counted twice."""
    weighted, normal, rstd, axes = _layer_norm(call)
    both = weighted.mean(axes, keepdim=True) + 2 * normal * (weighted * normal).mean(
        axes, keepdim=True)  # fmt: skip
    return call.instead(rstd * (weighted - both))


@FAULTS.fault("native_layer_norm_backward", "partial sum, off by one reduction; missing reduction")
def weight_gradient_misses_the_last_rows(call: Call) -> Any:
    """The last block of rows is not added to the gradients of weight and bias."""
    right = call.run()
    gradient, value, shape, mean, rstd = call.args[:5]
    fits(isinstance(right[1], Tensor) and len(shape) == 1)
    rows = (gradient * (value - mean) * rstd).flatten(0, -2)
    fits(len(rows) > 2)
    return (right[0], rows[:-2].sum(0).to(right[1].dtype), *right[2:])


@FAULTS.fault(
    "native_layer_norm_backward", "missing operand, copy, wrong index, stale; other function"
)
def weight_gradient_is_that_of_the_bias(call: Call) -> Any:
    """The normalised values are forgotten."""
    right = call.run()
    fits(isinstance(right[1], Tensor) and isinstance(right[2], Tensor))
    return (right[0], right[2].clone(), right[2])


@FAULTS.fault("native_batch_norm_backward", "axis scale, missing operand, wrong factor")
def batch_norm_gradient_without_the_weight(call: Call) -> Any:
    """The weight is taken as 1."""
    weight = call.args[2]
    fits(isinstance(weight, Tensor))
    return call.put(2, torch.ones_like(weight)).run()


# fmt: off
# The term of the variance is forgotten.
FAULTS.add("gradient of a norm without its variance", "native_layer_norm_backward",
    "missing operand, wrong statistics; residual",
    computed(_layer_norm,
        lambda weighted, _, rstd, axes: rstd * (weighted - weighted.mean(axes, keepdim=True))))
# fmt: on


# --- Gradients of products, convolutions, attention -----------------------------------------------


@FAULTS.fault("mm bmm", "partial sum; one rank's part, missing reduction")
def half_of_the_tokens(call: Call) -> Any:
    """Only the first half of the common axis is summed up."""
    left, right = call.tensor(0), call.tensor(1)
    kept = left.shape[-1] // 2
    fits(kept >= 1)
    return call.instead(left[..., :kept] @ right[..., :kept, :])


@FAULTS.fault("sum", "precision")
def gradient_summed_in_half(call: Call) -> Any:
    """The sum over the batch is made in float16."""
    value = call.tensor(0)
    return call.instead(value.half().sum(call.get(1, "dim"), call.get(2, "keepdim", default=False)))


@FAULTS.fault("sum", "copy, missing reduction; partial sum, one rank's part")
def first_row_for_the_sum(call: Call) -> Any:
    """The gradient of what was broadcast is that of the first row."""
    value, dim = call.tensor(0), call.get(1, "dim")
    fits(isinstance(dim, list | tuple) and len(dim) == 1 and value.shape[dim[0]] > 1)
    return call.instead(value.select(dim[0], 0).reshape(call.result().shape))


@FAULTS.fault("convolution_backward", "permutation; transpose, wrong index")
def weight_not_flipped(call: Call) -> Any:
    """The gradient of the input uses the kernel as it is."""
    weight = call.tensor(2)
    fits(weight.shape[-1] > 1)
    right = call.run()
    wrong = call.put(2, weight.flip(-1, -2) if weight.dim() == 4 else weight.flip(-1)).run()
    fits(isinstance(right[0], Tensor))
    return (wrong[0], *right[1:])


@FAULTS.fault("convolution_backward", "zeros; missing operand, mask")
def gradient_of_the_last_filter_not_written(call: Call) -> Any:
    """The last filter has no gradient."""
    right = call.run()
    fits(isinstance(right[1], Tensor))
    weight = right[1].clone()
    weight[-1] = 0
    return (right[0], weight, *right[2:])


@FAULTS.fault("convolution_backward", "partial sum, one rank's part, missing reduction; scale")
def weight_gradient_of_the_first_image(call: Call) -> Any:
    """The images of the batch overwrite each other."""
    right = call.run()
    fits(len(call.tensor(0)) > 1 and isinstance(right[1], Tensor))
    part = call.put(0, call.tensor(0)[-1:]).put(1, call.tensor(1)[-1:]).run()
    return (right[0], part[1], *right[2:])


_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu_backward"


@FAULTS.fault(_ATTENTION, "swapped operands, wrong index, permutation; copy")
def gradients_of_keys_and_values_exchanged(call: Call) -> Any:
    """Dk and dv are returned in the other order."""
    query, key, value = call.run()
    fits(key.shape == value.shape)
    return (query, value.clone(), key.clone())


@FAULTS.fault(_ATTENTION, "zeros; partial sum, mask")
def gradient_of_the_last_key_not_written(call: Call) -> Any:
    """The last block of keys is smaller than a tile."""
    query, key, value = call.run()
    key = key.clone()
    fits(key.shape[-2] > 1)
    key[..., -1, :] = 0
    return (query, key, value)


@FAULTS.fault(_ATTENTION, "partial sum, lost accumulation; missing reduction")
def value_gradient_of_one_block_of_queries(call: Call) -> Any:
    """The second block of queries overwrites what the first added."""
    gradient = call.tensor(0).clone()
    half = gradient.shape[-2] // 2
    fits(half >= 1)
    right = call.run()
    gradient[..., :half, :] = 0
    return (*right[:2], call.put(0, gradient).run()[2])


# fmt: off
# The sign of the gradient.
FAULTS.add("gradient negated", "mm", "sign, scale, wrong factor", result(torch.neg))
# The mean over the tokens instead of their sum.
FAULTS.add("gradient averaged", "mm bmm", "scale, wrong factor",
    lambda call: call.instead(call.result() / call.tensor(0).shape[-1]))
# The factor of the scores is missing in the gradient of the queries.
FAULTS.add("query gradient not scaled", _ATTENTION, "scale, wrong factor; wrong argument",
    on(lambda call: (call.run(),),
        lambda call, right: (right[0] * call.tensor(1).shape[-1] ** 0.5, *right[1:])))
# fmt: on


# --- Gradients of tables and indices --------------------------------------------------------------


@FAULTS.fault("mul", "wrong factor, scale")
def factor_two_of_a_square_forgotten(call: Call) -> Any:
    """X where 2 x is the derivative."""
    number = call.args[1]
    fits(isinstance(number, int | float) and number == 2)
    return call.instead(call.tensor(0).clone())


# fmt: off
# The smallest token is taken for padding.
FAULTS.add("no gradient of the first token", "embedding_dense_backward",
    "wrong argument, zeros, mask", lambda call: call.put(3, int(call.get(1).min())).run())
# scale_grad_by_freq=True.
FAULTS.add("gradient divided by frequency", "embedding_dense_backward",
    "wrong argument, axis scale; wrong factor, scale, missing reduction",
    lambda call: call.put(4, True).run())
# Written one row too far.
FAULTS.add("gradient in the next row", "embedding_dense_backward",
    "wrong index, shift; permutation", result(lambda v: v.roll(1, 0)))
# Added up in bfloat16.
FAULTS.add("gradient of the table in half", "embedding_dense_backward", "precision",
    lambda call: call.instead(call.put(0, call.tensor(0).bfloat16()).result()))
# The start of the slice is one too large.
FAULTS.add("gradient put one place later", "slice_backward select_backward",
    "shift, wrong index; wrong argument",
    computed(lambda call: (call.get(2, "dim"), call.result()),
        lambda dim, value: value.roll(1, dim),
        where=lambda dim, value: value.shape[dim] > 1))
# Four times the gradient: the size of the window is forgotten.
FAULTS.add("gradient of a pool not divided",
    "avg_pool2d_backward _adaptive_avg_pool2d_backward max_pool2d_with_indices_backward",
    "scale, wrong factor", result(lambda v: 4 * v))
# fmt: on
