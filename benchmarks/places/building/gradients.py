"""Faults for building: backward kernels."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor

FAULTS = Catalogue()


@FAULTS.fault(
    "gelu_backward silu_backward",
    kinds=["other function", "approximation"],
    loose=["zeros", "mask"],
    backward=True,
)
def derivative_of_relu(call: Call) -> Any:
    """The gradient passes where the input is positive."""
    return call.instead(call.tensor(0) * (call.tensor(1) > 0))


@FAULTS.fault(
    "native_layer_norm_backward",
    kinds=["axis offset", "missing operand", "wrong statistics"],
    loose=["offset"],
    backward=True,
)
def gradient_of_a_norm_without_its_mean(call: Call) -> Any:
    """The mean of the gradient is not subtracted."""
    gradient, value, shape, mean, rstd, weight = call.args[:6]
    axes = list(range(-len(shape), 0))
    normal = (value - mean) * rstd
    weighted = gradient * weight
    return call.instead(rstd * (weighted - normal * (weighted * normal).mean(axes, keepdim=True)))


@FAULTS.fault("sum", kinds=["off by one reduction", "partial sum"], backward=True)
def gradient_of_the_bias_misses_a_row(call: Call) -> Any:
    """The last row of the batch is not added."""
    value, dim = call.tensor(0), call.get(1, "dim")
    fits(isinstance(dim, list | tuple) and list(dim) == [0] and len(value) > 2)
    return call.put(0, value[:-1]).run()


@FAULTS.fault(
    "embedding_dense_backward",
    kinds=["lost accumulation", "missing reduction"],
    loose=["stale", "partial sum", "wrong index"],
    backward=True,
)
def last_write_wins(call: Call) -> Any:
    """The rows of a token that occurs twice are not added."""
    gradient, indices, rows = call.args[:3]
    table = gradient.new_zeros(rows, gradient.size(-1))
    for index, row in zip(indices.flatten().tolist(), gradient.flatten(0, -2), strict=True):
        table[index] = row
    return call.instead(table)


@FAULTS.fault(
    "_softmax_backward_data", kinds=["missing operand"], loose=["axis offset"], backward=True
)
def softmax_gradient_without_its_sum(call: Call) -> Any:
    """The sum over the row is not subtracted."""
    return call.instead(call.tensor(0) * call.tensor(1))


@FAULTS.fault(
    "threshold_backward tanh_backward sigmoid_backward",
    kinds=["scale", "wrong factor"],
    backward=True,
)
def derivative_halved(call: Call) -> Any:
    """Half of the gradient."""
    return call.instead(call.result() / 2)


@FAULTS.fault("mm", kinds=["transpose"], backward=True)
def gradient_of_a_weight_transposed(call: Call) -> Any:
    """Of a square weight."""
    value = call.result()
    fits(value.size(0) == value.size(1) > 2)
    return call.instead(value.t().contiguous())


# --- Gradients of activations and softmax ---------------------------------------------------------


@FAULTS.fault(
    "gelu_backward silu_backward",
    kinds=["missing operand", "other function"],
    loose=["approximation", "scale"],
    backward=True,
)
def derivative_without_its_second_term(call: Call) -> Any:
    """Only the gate: the derivative of the gate is forgotten."""
    gradient, value = call.tensor(0), call.tensor(1)
    gate = torch.sigmoid(value) if call.name == "silu_backward" else torch.special.ndtr(value)
    return call.instead(gradient * gate)


@FAULTS.fault(
    "gelu_backward", kinds=["approximation", "other function", "wrong argument"], backward=True
)
def derivative_of_the_other_gelu(call: Call) -> Any:
    """The gradient of the form with tanh, or of that with erf."""
    other = "none" if call.kwargs.get("approximate") == "tanh" else "tanh"
    return torch.ops.aten.gelu_backward(call.tensor(0), call.tensor(1), approximate=other)


@FAULTS.fault(
    "gelu_backward silu_backward threshold_backward tanh_backward sigmoid_backward",
    kinds=["copy", "missing operand"],
    loose=["other function"],
    backward=True,
)
def gradient_passed_on(call: Call) -> Any:
    """The derivative is taken as 1: a straight-through estimator."""
    return call.instead(call.tensor(0).clone())


@FAULTS.fault(
    "tanh_backward", kinds=["other function", "missing operand"], loose=["scale"], backward=True
)
def square_of_tanh_forgotten(call: Call) -> Any:
    """G (1 - y) instead of g (1 - y**2)."""
    return call.instead(call.tensor(0) * (1 - call.tensor(1)))


@FAULTS.fault(
    "threshold_backward", kinds=["mask", "sign", "other function"], loose=["zeros"], backward=True
)
def gradient_where_the_input_is_negative(call: Call) -> Any:
    """The mask of a relu the other way round."""
    return call.instead(call.tensor(0) * (call.tensor(1) <= 0))


@FAULTS.fault("_softmax_backward_data", kinds=["wrong axis", "wrong argument"], backward=True)
def softmax_gradient_over_the_other_axis(call: Call) -> Any:
    """The sum is over the axis before."""
    gradient, result = call.tensor(0), call.tensor(1)
    product = gradient * result
    fits(product.dim() >= 2)
    return call.instead(product - result * product.sum(-2, keepdim=True))


@FAULTS.fault(
    "_softmax_backward_data",
    kinds=["off by one reduction", "partial sum"],
    loose=["axis offset"],
    backward=True,
)
def softmax_gradient_misses_the_last_column(call: Call) -> Any:
    """The sum of the row ends one too early."""
    gradient, result = call.tensor(0), call.tensor(1)
    product = gradient * result
    fits(product.shape[-1] > 2)
    return call.instead(product - result * product[..., :-1].sum(-1, keepdim=True))


@FAULTS.fault(
    "_softmax_backward_data",
    kinds=["missing operand", "other function"],
    loose=["axis scale"],
    backward=True,
)
def gradient_of_log_softmax(call: Call) -> Any:
    """G - softmax sum(g)."""
    gradient, result = call.tensor(0), call.tensor(1)
    return call.instead(gradient - result * gradient.sum(-1, keepdim=True))


# --- Gradients of norms ---------------------------------------------------------------------------


def _layer_norm(call: Call) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Weighted gradient, normalised values, 1 / deviation, axes."""
    gradient, value, shape, mean, rstd, weight = call.args[:6]
    weighted = gradient if weight is None else gradient * weight
    return weighted, (value - mean) * rstd, rstd, list(range(-len(shape), 0))


@FAULTS.fault(
    "native_layer_norm_backward",
    kinds=["missing operand", "wrong statistics"],
    loose=["residual"],
    backward=True,
)
def gradient_of_a_norm_without_its_variance(call: Call) -> Any:
    """The term of the variance is forgotten."""
    weighted, _, rstd, axes = _layer_norm(call)
    return call.instead(rstd * (weighted - weighted.mean(axes, keepdim=True)))


@FAULTS.fault(
    "native_layer_norm_backward",
    kinds=["missing operand"],
    loose=["wrong statistics"],
    backward=True,
)
def statistics_taken_for_constants(call: Call) -> Any:
    """No gradient through mean and variance."""
    weighted, _, rstd, _ = _layer_norm(call)
    return call.instead(rstd * weighted)


@FAULTS.fault(
    "native_layer_norm_backward",
    kinds=["missing operand", "axis scale"],
    loose=["wrong factor"],
    backward=True,
)
def gradient_without_the_weight(call: Call) -> Any:
    """The gradient is not multiplied by the weight of the norm."""
    weight = call.args[5]
    fits(isinstance(weight, Tensor))
    return call.put(5, torch.ones_like(weight)).run()


@FAULTS.fault(
    "native_layer_norm_backward", kinds=["wrong factor"], loose=["wrong statistics"], backward=True
)
def factor_two_of_the_variance(call: Call) -> Any:
    """The term of the variance is counted twice."""
    weighted, normal, rstd, axes = _layer_norm(call)
    both = weighted.mean(axes, keepdim=True) + 2 * normal * (weighted * normal).mean(
        axes, keepdim=True)  # fmt: skip
    return call.instead(rstd * (weighted - both))


@FAULTS.fault(
    "native_layer_norm_backward",
    kinds=["partial sum", "off by one reduction"],
    loose=["missing reduction"],
    backward=True,
)
def weight_gradient_misses_the_last_rows(call: Call) -> Any:
    """The last block of rows is not added to the gradients of weight and bias."""
    right = call.run()
    gradient, value, shape, mean, rstd = call.args[:5]
    fits(isinstance(right[1], Tensor) and len(shape) == 1)
    rows = (gradient * (value - mean) * rstd).flatten(0, -2)
    fits(len(rows) > 2)
    return (right[0], rows[:-2].sum(0).to(right[1].dtype), *right[2:])


@FAULTS.fault(
    "native_layer_norm_backward",
    kinds=["missing operand", "copy", "wrong index", "stale"],
    loose=["other function"],
    backward=True,
)
def weight_gradient_is_that_of_the_bias(call: Call) -> Any:
    """The normalised values are forgotten."""
    right = call.run()
    fits(isinstance(right[1], Tensor) and isinstance(right[2], Tensor))
    return (right[0], right[2].clone(), right[2])


@FAULTS.fault(
    "native_batch_norm_backward",
    kinds=["axis scale", "missing operand", "wrong factor"],
    backward=True,
)
def batch_norm_gradient_without_the_weight(call: Call) -> Any:
    """The weight is taken as 1."""
    weight = call.args[2]
    fits(isinstance(weight, Tensor))
    return call.put(2, torch.ones_like(weight)).run()


# --- Gradients of products, convolutions, attention -----------------------------------------------


@FAULTS.fault(
    "mm bmm", kinds=["partial sum"], loose=["one rank's part", "missing reduction"], backward=True
)
def half_of_the_tokens(call: Call) -> Any:
    """Only the first half of the common axis is summed up."""
    left, right = call.tensor(0), call.tensor(1)
    kept = left.shape[-1] // 2
    fits(kept >= 1)
    return call.instead(left[..., :kept] @ right[..., :kept, :])


@FAULTS.fault("mm", kinds=["sign", "scale", "wrong factor"], backward=True)
def gradient_negated(call: Call) -> Any:
    """The sign of the gradient."""
    return call.instead(-call.result())


@FAULTS.fault("mm bmm", kinds=["scale", "wrong factor"], backward=True)
def gradient_averaged(call: Call) -> Any:
    """The mean over the tokens instead of their sum."""
    return call.instead(call.result() / call.tensor(0).shape[-1])


@FAULTS.fault("sum", kinds=["precision"], backward=True)
def gradient_summed_in_half(call: Call) -> Any:
    """The sum over the batch is made in float16."""
    value = call.tensor(0)
    return call.instead(value.half().sum(call.get(1, "dim"), call.get(2, "keepdim", default=False)))


@FAULTS.fault(
    "sum",
    kinds=["copy", "missing reduction"],
    loose=["partial sum", "one rank's part"],
    backward=True,
)
def first_row_for_the_sum(call: Call) -> Any:
    """The gradient of what was broadcast is that of the first row."""
    value, dim = call.tensor(0), call.get(1, "dim")
    fits(isinstance(dim, list | tuple) and len(dim) == 1 and value.shape[dim[0]] > 1)
    return call.instead(value.select(dim[0], 0).reshape(call.result().shape))


@FAULTS.fault(
    "convolution_backward", kinds=["permutation"], loose=["transpose", "wrong index"], backward=True
)
def weight_not_flipped(call: Call) -> Any:
    """The gradient of the input uses the kernel as it is."""
    weight = call.tensor(2)
    fits(weight.shape[-1] > 1)
    right = call.run()
    wrong = call.put(2, weight.flip(-1, -2) if weight.dim() == 4 else weight.flip(-1)).run()
    fits(isinstance(right[0], Tensor))
    return (wrong[0], *right[1:])


@FAULTS.fault(
    "convolution_backward", kinds=["zeros"], loose=["missing operand", "mask"], backward=True
)
def gradient_of_the_last_filter_not_written(call: Call) -> Any:
    """The last filter has no gradient."""
    right = call.run()
    fits(isinstance(right[1], Tensor))
    weight = right[1].clone()
    weight[-1] = 0
    return (right[0], weight, *right[2:])


@FAULTS.fault(
    "convolution_backward",
    kinds=["partial sum", "one rank's part", "missing reduction"],
    loose=["scale"],
    backward=True,
)
def weight_gradient_of_the_first_image(call: Call) -> Any:
    """The images of the batch overwrite each other."""
    right = call.run()
    fits(len(call.tensor(0)) > 1 and isinstance(right[1], Tensor))
    part = call.put(0, call.tensor(0)[-1:]).put(1, call.tensor(1)[-1:]).run()
    return (right[0], part[1], *right[2:])


_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu_backward"


@FAULTS.fault(_ATTENTION, kinds=["scale", "wrong factor"], loose=["wrong argument"], backward=True)
def query_gradient_not_scaled(call: Call) -> Any:
    """The factor of the scores is missing in the gradient of the queries."""
    right = call.run()
    return (right[0] * call.tensor(1).shape[-1] ** 0.5, *right[1:])


@FAULTS.fault(
    _ATTENTION,
    kinds=["swapped operands", "wrong index", "permutation"],
    loose=["copy"],
    backward=True,
)
def gradients_of_keys_and_values_exchanged(call: Call) -> Any:
    """Dk and dv are returned in the other order."""
    query, key, value = call.run()
    fits(key.shape == value.shape)
    return (query, value.clone(), key.clone())


@FAULTS.fault(_ATTENTION, kinds=["zeros"], loose=["partial sum", "mask"], backward=True)
def gradient_of_the_last_key_not_written(call: Call) -> Any:
    """The last block of keys is smaller than a tile."""
    query, key, value = call.run()
    key = key.clone()
    fits(key.shape[-2] > 1)
    key[..., -1, :] = 0
    return (query, key, value)


@FAULTS.fault(
    _ATTENTION,
    kinds=["partial sum", "lost accumulation"],
    loose=["missing reduction"],
    backward=True,
)
def value_gradient_of_one_block_of_queries(call: Call) -> Any:
    """The second block of queries overwrites what the first added."""
    gradient = call.tensor(0).clone()
    half = gradient.shape[-2] // 2
    fits(half >= 1)
    right = call.run()
    gradient[..., :half, :] = 0
    return (*right[:2], call.put(0, gradient).run()[2])


# --- Gradients of tables and indices --------------------------------------------------------------


@FAULTS.fault("embedding_dense_backward", kinds=["wrong argument", "zeros", "mask"], backward=True)
def no_gradient_of_the_first_token(call: Call) -> Any:
    """The smallest token is taken for padding."""
    indices = call.get(1)
    return call.put(3, int(indices.min())).run()


@FAULTS.fault(
    "embedding_dense_backward",
    kinds=["wrong argument", "axis scale"],
    loose=["wrong factor", "scale", "missing reduction"],
    backward=True,
)
def gradient_divided_by_frequency(call: Call) -> Any:
    """scale_grad_by_freq=True."""
    return call.put(4, True).run()


@FAULTS.fault(
    "embedding_dense_backward", kinds=["wrong index", "shift"], loose=["permutation"], backward=True
)
def gradient_in_the_next_row(call: Call) -> Any:
    """Written one row too far."""
    return call.instead(call.result().roll(1, 0))


@FAULTS.fault("embedding_dense_backward", kinds=["precision"], backward=True)
def gradient_of_the_table_in_half(call: Call) -> Any:
    """Added up in bfloat16."""
    return call.instead(call.put(0, call.tensor(0).bfloat16()).result())


@FAULTS.fault(
    "slice_backward select_backward",
    kinds=["shift", "wrong index"],
    loose=["wrong argument"],
    backward=True,
)
def gradient_put_one_place_later(call: Call) -> Any:
    """The start of the slice is one too large."""
    dim = call.get(2, "dim")
    value = call.result()
    fits(value.shape[dim] > 1)
    return call.instead(value.roll(1, dim))


@FAULTS.fault("mul", kinds=["wrong factor", "scale"], backward=True)
def factor_two_of_a_square_forgotten(call: Call) -> Any:
    """X where 2 x is the derivative."""
    number = call.args[1]
    fits(isinstance(number, int | float) and number == 2)
    return call.instead(call.tensor(0).clone())


@FAULTS.fault(
    "avg_pool2d_backward _adaptive_avg_pool2d_backward max_pool2d_with_indices_backward",
    kinds=["scale", "wrong factor"],
    backward=True,
)
def gradient_of_a_pool_not_divided(call: Call) -> Any:
    """Four times the gradient: the size of the window is forgotten."""
    return call.instead(4 * call.result())
