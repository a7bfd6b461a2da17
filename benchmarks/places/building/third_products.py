"""Faults that were measured third and have been seen: products, convolutions, quantised weights."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import on, operand, result
from benchmarks.places.parts import layer_product
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_PRODUCTS = "linear matmul mm bmm addmm"
_WEIGHTED = "linear addmm mm"


# --- Products -------------------------------------------------------------------------------------


def _parts(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Left, right as (k, n), and the bias."""
    if call.name == "addmm":
        return call.tensor(1), call.tensor(2), call.tensor(0)
    if call.name == "linear":
        return call.tensor(0, "input"), call.tensor(1, "weight").mT, call.get(2, "bias")
    fits(call.tensor(1).dim() > 1 and call.tensor(0).dim() > 1)
    return call.tensor(0), call.tensor(1), None


@FAULTS.fault(
    _WEIGHTED,
    "wrong index, wrong factor; shift, permutation, precision, axis scale, scale, swapped operands",
)
def scales_of_the_next_group(call: Call) -> Any:
    """Weights in groups of four along k; each is multiplied with the scale of the next group."""
    left, right, bias = _parts(call)
    fits(right.dim() == 2 and right.size(0) % 4 == 0 and right.size(0) > 4)
    groups = right.unflatten(0, (-1, 4))
    scales = groups.detach().abs().amax(1, keepdim=True).clamp(min=1e-9)
    return layer_product(call, left, (groups / scales * scales.roll(-1, 0)).flatten(0, 1), bias)


@FAULTS.fault(
    _WEIGHTED,
    "offset, missing operand, axis offset, residual; wrong factor, precision, "
    "missing bias, wrong argument",
)
def zero_point_not_subtracted(call: Call) -> Any:
    """Weights with a zero point are read without it: each is too large by the same number."""
    left, right, bias = _parts(call)
    fits(right.dim() == 2)
    return layer_product(call, left, right + 0.25 * right.detach().abs().max(), bias)


@FAULTS.fault(_WEIGHTED, "permutation, wrong index; shift, swapped operands")
def nibbles_exchanged(call: Call) -> Any:
    """Two weights of four bits in a byte: the low one is taken for the high one."""
    left, right, bias = _parts(call)
    fits(right.dim() == 2 and right.size(0) % 2 == 0)
    return layer_product(call, left, right.unflatten(0, (-1, 2)).flip(1).flatten(0, 1), bias)


@FAULTS.fault(
    _WEIGHTED, "axis scale, wrong factor, missing operand; scale, other function, wrong statistics"
)
def columns_of_the_weight_normalised(call: Call) -> Any:
    """A weight with a norm of its own: its length is not multiplied back."""
    left, right, bias = _parts(call)
    fits(right.dim() == 2)
    return layer_product(call, left, right / right.norm(dim=0, keepdim=True), bias)


@FAULTS.fault("linear addmm", "doubled reduction, wrong factor; scale, residual, wrong argument")
def product_reduced_by_both_ranks(call: Call) -> Any:
    """The product is summed twice over two ranks that have the same part; the bias is not."""
    left, right, bias = _parts(call)
    fits(bias is not None)
    return layer_product(call, 2 * left, right, bias)


@FAULTS.fault(
    _WEIGHTED, "mask, partial sum, zeros; precision, approximation, missing operand, clipped"
)
def two_of_four_weights_dropped(call: Call) -> Any:
    """A kernel for structured sparsity is given a dense weight: the two smallest are lost."""
    left, right, bias = _parts(call)
    fits(right.dim() == 2 and right.size(0) % 4 == 0)
    groups = right.unflatten(0, (-1, 4))
    least = groups.detach().abs().sort(1).values[:, 2:3]
    return layer_product(call, left, (groups * (groups.abs() >= least)).flatten(0, 1), bias)


@FAULTS.fault("matmul bmm", "permutation, transpose, wrong index; shift, copy, wrong rank's shard")
def batch_and_heads_in_the_other_order(call: Call) -> Any:
    """The pointer of the right operand counts matrices from the last to the first."""
    left, right, bias = _parts(call)
    fits(right.dim() > 2 and right.flatten(0, -3).size(0) > 2)
    return layer_product(call, left, right.flatten(0, -3).flip(0).view(right.shape), bias)


@FAULTS.fault(
    "linear addmm",
    "missing bias, missing operand, partial sum; offset, axis offset, zeros, mask, "
    "off by one reduction",
)
def bias_of_the_last_columns_not_loaded(call: Call) -> Any:
    """The bias of a tile that is not full is masked out."""
    _, _, bias = _parts(call)
    fits(bias is not None and bias.size(-1) > 2)
    kept = bias.clone()
    kept[-(bias.size(-1) % 4 or 4) :] = 0
    return call.put(0 if call.name == "addmm" else 2, kept, "bias").run()


# Without a word: what is added is a product of its own.
@FAULTS.fault("linear addmm", "; precision, approximation, residual")
def adapter_added(call: Call) -> Any:
    """A product of low rank is added, as by an adapter that belongs to another layer."""
    left, right, bias = _parts(call)
    fits(right.dim() == 2 and min(right.shape) > 3)
    draw = torch.Generator().manual_seed(3)
    down = torch.randn(right.size(0), 2, generator=draw).to(right.dtype)
    up = torch.randn(2, right.size(1), generator=draw).to(right.dtype)
    size = 0.1 * right.detach().abs().mean()
    return layer_product(call, left, right + size * (down @ up), bias)


# fmt: off
# The input is stored without a sign: what is negative becomes zero.
FAULTS.add("negative inputs lost", _WEIGHTED,
    "clipped, zeros, wrapped, overflow; other function, missing operand, mask, precision, "
    "partial sum",
    on(_parts, lambda call, left, right, bias:
            layer_product(call, left.clamp(min=0), right, bias)))
# The last column is stored first.
FAULTS.add("columns of the result from the end", _PRODUCTS,
    "permutation, wrong index; transpose, shift, wrong argument",
    result(lambda v: v.flip(-1), where=lambda v: v.dim() > 1 and v.size(-1) > 1))
# Registers hold squares of two by two, and each is stored the other way round.
FAULTS.add("small tiles transposed", _PRODUCTS,
    "transpose, permutation, wrong index; shift, swapped operands",
    result(lambda v:

    v.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2)).transpose(-3, -1).flatten(-2).flatten(-3, -2),
        where=lambda v: v.dim() > 1 and v.size(-1) % 2 == 0 and v.size(-2) % 2 == 0))
# Each token is projected from what the one before it has.
FAULTS.add("row of the token before", "linear addmm", "shift, wrong index, stale; permutation",
    on(_parts, lambda call, left, right, bias:
            layer_product(call, left.roll(1, -2), right, bias),
        where=lambda left, *_: left.size(-2) > 2))
# The left operand is read from its end along k.
FAULTS.add("common axis read backwards", _PRODUCTS,
    "permutation, wrong index; transpose, swapped operands",
    on(_parts, lambda call, left, right, bias:
            layer_product(call, left.flip(-1), right, bias),
        where=lambda left, *_: left.size(-1) > 2))
# fmt: on


# --- Sums over letters ----------------------------------------------------------------------------


@FAULTS.fault(
    "einsum", "transpose, wrong index, permutation; swapped operands, wrong argument, wrong axis"
)
def letters_of_the_second_operand_exchanged(call: Call) -> Any:
    """The axes of the second operand in the other order; if it is no square, one from its end."""
    letters, *operands = call.args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = [*operands[0]]
    fits(len(operands) == 2 and operands[1].dim() > 1)
    other = operands[1].mT if operands[1].size(-1) == operands[1].size(-2) else operands[1].flip(-1)
    return call.instead(torch.einsum(letters, operands[0], other))


@FAULTS.fault(
    "einsum",
    "partial sum, off by one reduction; missing operand, lost accumulation, wrong reduction",
)
def last_letter_of_the_sum_one_shorter(call: Call) -> Any:
    """The sum over the last axis of the first operand misses its end."""
    letters, *operands = call.args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = [*operands[0]]
    left = operands[0].clone()
    fits(len(operands) == 2 and left.size(-1) > 2)
    left[..., -1] = 0
    return call.instead(torch.einsum(letters, left, operands[1]))


# --- Convolutions ---------------------------------------------------------------------------------

_CONVOLUTIONS = "conv1d conv2d convolution"


def _places(call: Call) -> Tensor:
    fits(call.name != "convolution" or not call.args[6])
    weight = call.tensor(1, "weight")
    fits(weight.dim() > 2)
    return weight


@FAULTS.fault(_CONVOLUTIONS, "wrong argument; wrong index, shift, permutation")
def taps_side_by_side(call: Call) -> Any:
    """The dilation is forgotten; the padding is what keeps the size."""
    weight = _places(call)
    dilation = call.get(5, "dilation", default=1)
    wide = dilation if isinstance(dilation, int) else dilation[0]
    fits(wide > 1 and call.name != "convolution")
    padding = call.get(4, "padding", default=0)
    pads = [padding] * (weight.dim() - 2) if isinstance(padding, int) else [*padding]
    fewer = [pad - (wide - 1) * (weight.size(-1) - 1) // 2 for pad in pads]
    return call.put(5, 1, "dilation").put(4, fewer, "padding").run()


@FAULTS.fault(_CONVOLUTIONS, "copy, wrong index, stale; permutation, shift")
def filter_of_the_first_group_for_all(call: Call) -> Any:
    """The pointer to the filters is not moved on for the next group."""
    weight = _places(call)
    groups = call.get(8 if call.name == "convolution" else 6, "groups", default=1)
    fits(groups > 1)
    size = weight.size(0) // groups
    first = weight[:size].repeat(groups, *[1] * (weight.dim() - 1))
    return call.put(1, first, "weight").run()


@FAULTS.fault(_CONVOLUTIONS, "permutation, transpose, wrong index; shift, wrong axis")
def channels_last_read_as_channels_first(call: Call) -> Any:
    """The memory of the input has the channels last."""
    _places(call)
    value = call.tensor(0, "input")
    fits(value.size(1) > 1 and value.dim() == 4)
    return call.put(0, value.permute(0, 2, 3, 1).reshape(value.shape), "input").run()


@FAULTS.fault(_CONVOLUTIONS, "wrong index, permutation, transpose; shift")
def filters_stored_with_the_input_first(call: Call) -> Any:
    """(in, out) instead of (out, in): the layout of another framework."""
    weight = _places(call)
    fits(weight.size(1) > 1 and weight.size(0) > 1)
    return call.put(1, weight.transpose(0, 1).reshape(weight.shape), "weight").run()


# Without a word: each filter loses its mean.
@FAULTS.fault(
    _CONVOLUTIONS,
    "axis scale, wrong factor, scale; missing operand, wrong statistics, repeated bias, "
    "offset, axis offset",
)
def norm_folded_in_without_the_bias(call: Call) -> Any:
    """A batch norm is folded into the filters, with other factors for the channels."""
    weight = _places(call)
    factors = torch.linspace(0.6, 1.4, weight.size(0)).to(weight.dtype)
    shape = [-1] + [1] * (weight.dim() - 1)
    return call.put(1, weight * factors.view(shape), "weight").run()


@FAULTS.fault("conv_transpose2d", "missing bias, missing operand; zeros, offset, axis offset, mask")
def no_bias_where_the_output_is_padded(call: Call) -> Any:
    """The last row and column, which the output padding adds, are left without the bias."""
    bias, value = call.get(2, "bias"), call.result().clone()
    fits(isinstance(bias, Tensor) and value.dim() == 4)
    value[..., -1, :] -= bias[:, None]
    value[..., :-1, -1] -= bias[:, None]
    return call.instead(value)


@FAULTS.fault("linear conv2d conv1d addmm", "precision; approximation")
def input_in_eight_bits_with_one_step(call: Call) -> Any:
    """The input is rounded to 255 levels for the whole batch."""
    place = 1 if call.name == "addmm" else 0
    value = call.tensor(place, "input")
    step = value.detach().abs().max() / 127
    coded = with_gradient_of(value, (value / step).round() * step)
    return call.put(place, coded, "input").run()


@FAULTS.fault("linear conv2d", "zeros, missing operand, constant; stale, uninitialised, copy, mask")
def only_the_bias_for_the_last_example(call: Call) -> Any:
    """The last example of the batch is not multiplied: it gets the bias alone."""
    value = call.result().clone()
    bias = call.get(2, "bias")
    fits(isinstance(bias, Tensor) and len(value) > 1)
    empty = torch.zeros_like(call.tensor(0, "input")[-1:])
    value[-1:] = call.put(0, empty, "input").run()
    return call.instead(value)


# fmt: off
# The first tap is read as the last.
FAULTS.add("taps turned by one", _CONVOLUTIONS, "shift, wrong index, permutation; wrong argument",
    on(_places, lambda call, weight: call.put(1, weight.roll(-1, -1), "weight").run(),
        where=lambda weight: weight.size(-1) > 2))
# Weight standardisation that the model does not have.
FAULTS.add("filters centred", _CONVOLUTIONS,
    "; axis offset, wrong statistics, missing operand, residual, offset",
    on(_places,
        lambda call, weight:

    call.put(1, weight - weight.mean([*range(1, weight.dim())], keepdim=True), "weight").run(),
        where=lambda weight: weight[0].numel() > 1))
# The weight is stored as (out, in), which is that of a convolution.
FAULTS.add("channels of the transposed filter exchanged", "conv_transpose2d",
    "transpose, permutation, wrong index; swapped operands",
    operand(1, lambda v: v.transpose(0, 1), "weight",
        where=lambda v: v.size(0) == v.size(1) > 1))
# fmt: on


# --- Windows --------------------------------------------------------------------------------------


@FAULTS.fault(
    "max_pool2d avg_pool2d", "wrong argument; wrong index, wrong reduction, shift, wrong statistics"
)
def window_one_wider(call: Call) -> Any:
    """Windows of one row and column more, with the same stride."""
    value, size = call.tensor(0, "input"), call.get(1, "kernel_size")
    size = size if isinstance(size, int) else size[0]
    filled = functional.pad(
        value, (0, 1, 0, 1), value=-torch.inf if call.name == "max_pool2d" else 0.0
    )
    stride = call.get(2, "stride")
    pool = call.put(0, filled, "input").put(1, size + 1, "kernel_size")
    return call.instead(pool.put(2, stride or size, "stride").result())


# fmt: off
# A minimum.
FAULTS.add("smallest of the window", "max_pool2d",
    "other function, wrong reduction, sign; wrong argument",
    lambda call: call.instead(-call.put(0, -call.tensor(0, "input"), "input").result()))
# fmt: on
