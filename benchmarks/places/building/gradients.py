"""Faults for building: backward kernels."""

from __future__ import annotations

from typing import Any

from benchmarks.places.calls import Call, Catalogue, fits

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


@FAULTS.fault("sum", kinds=["off by one reduction", "partial sum", "tail"], backward=True)
def gradient_of_the_bias_misses_a_row(call: Call) -> Any:
    """The last row of the batch is not added."""
    value, dim = call.tensor(0), call.get(1, "dim")
    fits(isinstance(dim, list | tuple) and list(dim) == [0] and len(value) > 2)
    return call.put(0, value[:-1]).run()


@FAULTS.fault(
    "embedding_dense_backward",
    kinds=["accumulation", "lost accumulation", "missing reduction"],
    loose=["stale", "partial sum"],
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
