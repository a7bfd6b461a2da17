"""Faults for measuring: products, convolutions, pooling, resizing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

FAULTS = Catalogue()
_WEIGHTED = "linear addmm mm"
_BATCHED = "bmm matmul"
_CONVOLUTIONS = "conv1d conv2d convolution"
_POOLS = (
    "max_pool1d max_pool2d max_pool2d_with_indices avg_pool1d avg_pool2d adaptive_avg_pool2d "
    "adaptive_max_pool2d interpolate upsample_bilinear2d upsample_nearest2d"
)
_EMPTY: dict[str, Any] = {
    "kinds": ["zeros", "mask", "uninitialised"],
    "loose": ["constant", "missing operand", "partial sum", "axis scale", "wrong factor"],
    "backward": False,
}
_MOVED: dict[str, Any] = {
    "kinds": ["shift", "wrong index", "permutation"],
    "loose": ["stale", "copy", "wrong argument", "wrong rank's shard"],
    "backward": False,
}
_ORDER: dict[str, Any] = {
    "kinds": ["permutation", "wrong index"],
    "loose": ["shift", "swapped operands", "wrong argument", "transpose"],
    "backward": False,
}
_COPIED: dict[str, Any] = {
    "kinds": ["copy", "stale", "wrong index"],
    "loose": ["permutation", "shift", "constant", "wrong argument", "wrong rank's shard"],
    "backward": False,
}
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function", "wrong argument"],
    "backward": False,
}
_CUT: dict[str, Any] = {
    "kinds": ["clipped"],
    "loose": ["other function", "approximation", "mask", "wrong argument"],
    "backward": False,
}
_SCALED: dict[str, Any] = {
    "kinds": ["scale", "wrong factor"],
    "loose": ["axis scale", "wrong argument", "wrong reduction"],
    "backward": False,
}
_FUSED: dict[str, Any] = {
    "kinds": ["other function"],
    "loose": ["clipped", "approximation", "wrong factor"],
    "backward": False,
}
_TERMS: dict[str, Any] = {
    "kinds": ["partial sum", "mask", "lost accumulation"],
    "loose": ["missing operand", "missing reduction", "wrong reduction", "zeros", "wrong index",
              "one rank's part"],
    "backward": False,
}  # fmt: skip
_ONE_TERM: dict[str, Any] = {
    "kinds": ["off by one reduction", "partial sum", "mask"],
    "loose": ["missing operand", "wrong index", "zeros", "wrong reduction"],
    "backward": False,
}
_NEGATED: dict[str, Any] = {
    "kinds": ["sign", "wrong factor", "axis scale", "mask"],
    "loose": ["scale", "other function"],
    "backward": False,
}


# --- Products -------------------------------------------------------------------------------------


def _parts(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input, weight as (in, out), bias."""
    if call.name == "linear":
        weight, bias = call.tensor(1, "weight"), call.get(2, "bias")
        fits(weight.dim() == 2)
        return call.tensor(0, "input"), weight.t(), bias
    if call.name == "addmm":
        return call.tensor(1), call.tensor(2), call.tensor(0)
    return call.tensor(0), call.tensor(1), None


def _product(call: Call, left: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    value = left @ weight
    return call.instead(value if bias is None else value + bias)


def _with_input(call: Call, change: Callable[[Tensor], Tensor]) -> Any:
    """The layer with another input."""
    left, weight, bias = _parts(call)
    return _product(call, change(left), weight, bias)


def _kept(call: Call, kept: Callable[[Tensor], Tensor], least: int = 3) -> Any:
    """The layer with some of its features only, by their numbers."""
    width = _parts(call)[0].size(-1)
    fits(width >= least)
    return _with_input(call, lambda left: left * kept(torch.arange(width)))


def _rebiased(call: Call, change: Callable[[Tensor], Tensor]) -> Any:
    """The layer with another bias."""
    place = 0 if call.name == "addmm" else 2
    bias = call.tensor(place, "bias")
    fits(bias.dim() == 1 and bias.numel() > 2)
    return call.put(place, change(bias), "bias").run()


def _columns(call: Call, least: int = 3) -> Tensor:
    """The result, with several columns."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-1) >= least)
    return value


def _rows(call: Call, least: int = 3) -> Tensor:
    """The result, with several rows."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-2) >= least)
    return value


def _coarse(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in a narrower format, with its own gradient."""
    return with_gradient_of(value, value.detach().to(dtype).to(value.dtype))


def _in_steps(value: Tensor, step: float) -> Tensor:
    """The value as whole numbers of steps, with its own gradient."""
    return with_gradient_of(value, (value.detach() / step).round() * step)


@FAULTS.fault(_WEIGHTED, **_SCALED)
def result_times_a_tenth(call: Call) -> Any:
    """A multiplier of 0.1 that another model has for its logits, bias and all."""
    return call.instead(call.result() / 10)


@FAULTS.fault(
    "linear addmm conv1d conv2d convolution",
    kinds=["wrong factor", "scale", "missing bias"],
    loose=["axis offset", "offset", "wrong argument", "missing operand", "one rank's part"],
    backward=False,
)
def third_of_the_bias(call: Call) -> Any:
    """Three ranks each keep a third of the bias, and the sum over them is forgotten."""
    return _rebiased(call, lambda bias: bias / 3)


@FAULTS.fault("linear addmm conv1d conv2d convolution", **_CUT)
def bias_cut_at_a_twentieth(call: Call) -> Any:
    """The range of the stored bias is -0.05 to 0.05."""
    return _rebiased(call, lambda bias: bias.clamp(-0.05, 0.05))


@FAULTS.fault("linear addmm conv1d conv2d convolution", **_ROUNDED)
def bias_in_bfloat16(call: Call) -> Any:
    """The bias has eight bits; input and weight are right."""
    return _rebiased(call, lambda bias: _coarse(bias, torch.bfloat16))


@FAULTS.fault(_WEIGHTED, **_MOVED)
def columns_of_the_layer_two_early(call: Call) -> Any:
    """Each column is stored two places too early, bias and all, the first two last."""
    return call.instead(_columns(call, 5).roll(-2, -1))


@FAULTS.fault(
    _WEIGHTED, kinds=[*_ORDER["kinds"], "wrong rank's shard"], loose=_ORDER["loose"], backward=False
)
def shards_gathered_from_the_last_rank(call: Call) -> Any:
    """The columns of four ranks are gathered in the order 3, 2, 1, 0."""
    value = _columns(call, 8)
    fits(value.size(-1) % 4 == 0)
    return call.instead(value.unflatten(-1, (4, -1)).flip(-2).flatten(-2))


@FAULTS.fault(_WEIGHTED, **_ORDER)
def first_and_last_column_exchanged(call: Call) -> Any:
    """Two columns are stored in each other's place."""
    value = _columns(call)
    places = torch.arange(value.size(-1))
    places[0], places[-1] = value.size(-1) - 1, 0
    return call.instead(value[..., places])


@FAULTS.fault(_WEIGHTED, **_EMPTY)
def first_half_of_the_columns_not_stored(call: Call) -> Any:
    """The grid over the columns begins with its second block."""
    value = _columns(call, 4)
    return call.instead(value * (torch.arange(value.size(-1)) >= value.size(-1) // 2))


@FAULTS.fault(_WEIGHTED, **_EMPTY)
def every_third_row_of_the_layer_not_stored(call: Call) -> Any:
    """Of three rows of a program, the last one is masked out when they are stored."""
    value = _rows(call, 4)
    return call.instead(value * (torch.arange(value.size(-2)) % 3 != 2)[:, None])


@FAULTS.fault(_WEIGHTED, **_TERMS)
def every_fifth_feature_not_added(call: Call) -> Any:
    """The loop over the features is unrolled by five, and the last step is forgotten."""
    return _kept(call, lambda number: number % 5 != 4, least=10)


@FAULTS.fault(_WEIGHTED, **_TERMS)
def third_of_four_tiles_not_added(call: Call) -> Any:
    """The third quarter of the common axis is loaded and not added; the bias is right."""
    width = _parts(call)[0].size(-1)
    start, end = width // 2, 3 * width // 4
    return _kept(call, lambda number: (number < start) | (number >= end), least=8)


@FAULTS.fault(_WEIGHTED, **_ONE_TERM)
def fourth_feature_not_added(call: Call) -> Any:
    """One of the accumulators of an unrolled loop is overwritten in its first pass."""
    return _kept(call, lambda number: number != 3, least=6)


@FAULTS.fault(
    _WEIGHTED,
    kinds=["doubled reduction", "wrong factor"],
    loose=["wrong reduction", "wrong index", "partial sum", "axis scale", "stale", "residual"],
    backward=False,
)
def last_quarter_of_the_features_added_twice(call: Call) -> Any:
    """The epilogue of the loop adds the tile that is still in the registers."""
    width = _parts(call)[0].size(-1)
    return _kept(call, lambda number: 1 + (number >= width - width // 4).int(), least=8)


@FAULTS.fault(_WEIGHTED, **_FUSED)
def tanh_in_the_epilogue(call: Call) -> Any:
    """The activation of a pooler is fused behind another layer."""
    return call.instead(call.result().tanh())


@FAULTS.fault(_WEIGHTED, **_FUSED)
def elu_in_the_epilogue(call: Call) -> Any:
    """Negative results become exp(x) - 1."""
    return call.instead(functional.elu(call.result()))


@FAULTS.fault(_WEIGHTED, **_FUSED)
def gelu_on_the_input_of_the_layer(call: Call) -> Any:
    """A prologue applies the activation of the layer before once more."""
    return _with_input(call, functional.gelu)


@FAULTS.fault(_WEIGHTED, **_ROUNDED)
def result_of_the_layer_in_e5m2(call: Call) -> Any:
    """The result is stored with two bits behind the point."""
    return call.instead(_coarse(call.result(), torch.float8_e5m2))


@FAULTS.fault(_WEIGHTED, **_ROUNDED)
def result_in_steps_of_a_sixteenth(call: Call) -> Any:
    """The result is a fixed-point number with four bits behind the point."""
    return call.instead(_in_steps(call.result(), 1 / 16))


@FAULTS.fault(_WEIGHTED, **_ROUNDED)
def weight_in_steps_of_a_64th(call: Call) -> Any:
    """The weight is a fixed-point number with six bits behind the point; the bias is right."""
    left, weight, bias = _parts(call)
    return _product(call, left, _in_steps(weight, 1 / 64), bias)


@FAULTS.fault(_WEIGHTED, **_ROUNDED)
def input_of_the_layer_in_e4m3(call: Call) -> Any:
    """The input has three bits behind the point and no scale; weight and bias are right."""
    return _with_input(call, lambda left: _coarse(left, torch.float8_e4m3fn))


@FAULTS.fault(_WEIGHTED, **_CUT)
def input_not_above_one_half(call: Call) -> Any:
    """Inputs above 0.5 are cut to it, those below are right."""
    return _with_input(call, lambda left: left.clamp(max=0.5))


@FAULTS.fault(_WEIGHTED, **_NEGATED)
def odd_columns_negated(call: Call) -> Any:
    """Every second column has a minus, as the imaginary parts of a conjugate."""
    value = _columns(call, 2)
    return call.instead(value * (1 - 2 * (torch.arange(value.size(-1)) % 2)).to(value))


@FAULTS.fault(
    _WEIGHTED,
    kinds=["offset"],
    loose=["axis offset", "residual", "other function", "constant"],
    backward=False,
)
def rounding_half_left_in_the_result(call: Call) -> Any:
    """The half that is added before a cast to integers is added, and nothing is cast."""
    return call.instead(call.result() + 0.5)


@FAULTS.fault(_WEIGHTED, **_COPIED)
def fourth_row_for_all(call: Call) -> Any:
    """Each program reads its row from the same register: all rows are the fourth one."""
    value = _rows(call, 4)
    return call.instead(value[..., 3:4, :].expand(value.shape).contiguous())


@FAULTS.fault(
    _WEIGHTED,
    kinds=["residual", "axis offset"],
    loose=["offset", "doubled reduction", "wrong index", "lost accumulation", "other function"],
    backward=False,
)
def first_row_left_in_the_accumulator(call: Call) -> Any:
    """The accumulator of each later row begins with the result of the first one."""
    value = _rows(call)
    later = (torch.arange(value.size(-2)) > 0)[:, None]
    return call.instead(value + later * value[..., :1, :])


# --- Products of batches --------------------------------------------------------------------------


def _matrices(call: Call, least: int = 1) -> Tensor:
    """The result, a batch of matrices."""
    value = call.result()
    fits(value.dim() > 2 and value.size(-3) >= least and min(value.shape[-2:]) > 2)
    return value


@FAULTS.fault(_BATCHED, **_SCALED)
def products_of_the_batch_one_and_a_half_times(call: Call) -> Any:
    """An alpha of 1.5."""
    return call.instead(1.5 * call.result())


@FAULTS.fault(_BATCHED, **_ROUNDED)
def left_factor_in_e4m3(call: Call) -> Any:
    """The first operand has three bits behind the point; the second is right."""
    left = call.tensor(0)
    return call.put(0, _coarse(left, torch.float8_e4m3fn), "input").run()


@FAULTS.fault(_BATCHED, **_ROUNDED)
def products_of_the_batch_in_e5m2(call: Call) -> Any:
    """The products are stored with two bits behind the point."""
    return call.instead(_coarse(call.result(), torch.float8_e5m2))


@FAULTS.fault(_BATCHED, **_MOVED)
def products_of_the_batch_one_early(call: Call) -> Any:
    """Each matrix is stored in the place of the one before it, the first one last."""
    return call.instead(_matrices(call, 3).roll(-1, -3))


@FAULTS.fault(_BATCHED, **_MOVED)
def columns_of_each_matrix_one_late(call: Call) -> Any:
    """Each column is stored one too far, the last one of a matrix first."""
    return call.instead(_matrices(call).roll(1, -1))


@FAULTS.fault(_BATCHED, **_EMPTY)
def second_row_of_each_matrix_not_stored(call: Call) -> Any:
    """One row of each matrix is masked out when it is stored."""
    value = _matrices(call)
    return call.instead(value * (torch.arange(value.size(-2)) != 1)[:, None])


@FAULTS.fault(_BATCHED, **_EMPTY)
def first_matrix_of_the_batch_not_computed(call: Call) -> Any:
    """The grid over the batch begins with one."""
    value = _matrices(call, 2)
    return call.instead(value * (torch.arange(value.size(-3)) > 0)[:, None, None])


@FAULTS.fault(_BATCHED, **_TERMS)
def odd_terms_of_each_product_only(call: Call) -> Any:
    """Two lanes share the common axis of each matrix, and the first of them is not added."""
    left = call.tensor(0)
    fits(left.dim() > 2 and left.size(-1) > 3)
    return call.put(0, left * (torch.arange(left.size(-1)) % 2 == 1), "input").run()


@FAULTS.fault(
    _BATCHED,
    kinds=["sign", "other function"],
    loose=["wrong argument", "clipped"],
    backward=False,
)
def magnitudes_of_the_right_factor(call: Call) -> Any:
    """The second operand is read as numbers without a sign."""
    return call.put(1, call.tensor(1).abs(), "mat2", "other").run()


@FAULTS.fault(_BATCHED, **_CUT)
def right_factor_cut_at_a_third(call: Call) -> Any:
    """The second operand saturates at -1/3 and 1/3."""
    right = call.tensor(1)
    fits(right.dim() > 2)
    return call.put(1, right.clamp(-1 / 3, 1 / 3), "mat2", "other").run()


# --- Convolutions ---------------------------------------------------------------------------------


def _filters(call: Call) -> Tensor:
    weight = call.tensor(1, "weight")
    is_transposed = call.name == "convolution" and bool(call.get(6, "transposed"))
    fits(weight.dim() > 2 and not is_transposed)
    return weight


def _filtered(call: Call, weight: Tensor) -> Any:
    return call.put(1, weight, "weight").run()


def _image(call: Call) -> Tensor:
    value = call.tensor(0, "input")
    fits(value.dim() == _filters(call).dim())
    return value


def _channels(call: Call, least: int = 2) -> tuple[Tensor, Tensor]:
    """The result, and the numbers of its channels as they are broadcast."""
    _filters(call)
    return _numbered(call, least)


def _numbered(call: Call, least: int) -> tuple[Tensor, Tensor]:
    value = call.result()
    fits(value.dim() > 2 and value.size(1) >= least)
    return value, torch.arange(value.size(1)).view(-1, *[1] * (value.dim() - 2))


@FAULTS.fault(_CONVOLUTIONS, **_SCALED)
def filters_times_the_root_of_two(call: Call) -> Any:
    """The gain of a relu is in the filters already, and is applied again; the bias is right."""
    return _filtered(call, 2**0.5 * _filters(call))


@FAULTS.fault(_CONVOLUTIONS, **_ROUNDED)
def channels_of_the_result_in_e5m2(call: Call) -> Any:
    """The result of the convolution is stored with two bits behind the point."""
    _filters(call)
    return call.instead(_coarse(call.result(), torch.float8_e5m2))


@FAULTS.fault(_CONVOLUTIONS, **_CUT)
def filters_cut_at_a_twentieth(call: Call) -> Any:
    """The range of the stored filters is -0.05 to 0.05."""
    return _filtered(call, _filters(call).clamp(-0.05, 0.05))


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["shift", "wrong index"],
    loose=["mask", "zeros", "permutation", "wrong argument", "stale"],
    backward=False,
)
def image_read_two_columns_too_far(call: Call) -> Any:
    """Two less of padding on the left, two more on the right: the image is two to the left."""
    image = _image(call)
    fits(image.size(-1) > 4)
    return call.put(0, functional.pad(image, (-2, 2)), "input").run()


@FAULTS.fault(_CONVOLUTIONS, **_MOVED)
def image_one_channel_too_far(call: Call) -> Any:
    """The taps for channel i meet channel i + 1 of the image, around the end."""
    image = _image(call)
    fits(image.size(1) > 2 and _filters(call).size(1) == image.size(1))
    return call.put(0, image.roll(-1, 1), "input").run()


@FAULTS.fault(_CONVOLUTIONS, **_COPIED)
def last_channel_is_the_one_before(call: Call) -> Any:
    """The last channel still holds what its program has stored before, bias and all."""
    value, number = _channels(call, 3)
    before = value[:, -2:-1].expand(value.shape)
    return call.instead(torch.where(number == value.size(1) - 1, before, value))


@FAULTS.fault(_CONVOLUTIONS, **_EMPTY)
def even_channels_of_the_result_empty(call: Call) -> Any:
    """Two channels share a program, which stores the second of them."""
    value, number = _channels(call, 4)
    return call.instead(value * (number % 2 == 1))


@FAULTS.fault("conv2d convolution", **_EMPTY)
def first_row_of_pixels_not_stored(call: Call) -> Any:
    """The store of each channel begins with the second row."""
    _filters(call)
    value = call.result()
    fits(value.dim() == 4 and value.size(-2) > 2)
    return call.instead(value * (torch.arange(value.size(-2)) > 0)[:, None])


@FAULTS.fault(_CONVOLUTIONS, **_TERMS)
def odd_input_channels_not_added(call: Call) -> Any:
    """The loop over the channels of the image has a stride of two."""
    weight = _filters(call)
    fits(weight.size(1) > 2)
    kept = torch.arange(weight.size(1)) % 2 == 0
    return _filtered(call, weight * kept.view(-1, *[1] * (weight.dim() - 2)))


@FAULTS.fault(_CONVOLUTIONS, **_NEGATED)
def odd_channels_negated(call: Call) -> Any:
    """Every second channel of the result has a minus, bias and all."""
    value, number = _channels(call)
    return call.instead(value * (1 - 2 * (number % 2)).to(value))


@FAULTS.fault(_CONVOLUTIONS, **_FUSED)
def sigmoid_fused_behind_the_filters(call: Call) -> Any:
    """The function of a gate is fused behind a layer that has none."""
    _filters(call)
    return call.instead(call.result().sigmoid())


@FAULTS.fault(
    _CONVOLUTIONS,
    kinds=["mask", "partial sum", "zeros"],
    loose=["missing operand", "missing reduction", "wrong reduction", "wrong index",
           "wrong argument", "other function"],
    backward=False,
)  # fmt: skip
def filters_taken_for_depthwise_ones(call: Call) -> Any:
    """Each channel of the result sees the channel of its own number only."""
    weight = _filters(call)
    fits(weight.size(0) == weight.size(1) > 2)
    kept = torch.eye(weight.size(0)).view(*weight.shape[:2], *[1] * (weight.dim() - 2))
    return _filtered(call, weight * kept)


# --- Pooling, resizing ----------------------------------------------------------------------------


@FAULTS.fault(
    "avg_pool1d avg_pool2d",
    kinds=["scale", "wrong factor", "off by one reduction"],
    loose=["wrong statistics", "wrong reduction", "axis scale", "wrong argument"],
    backward=False,
)
def window_divided_by_one_less(call: Call) -> Any:
    """K * k - 1, as for a variance."""
    size = call.get(1, "kernel_size")
    sides = [size] if isinstance(size, int) else list(size)
    number = sides[0] if call.name == "avg_pool1d" else sides[0] * sides[-1]
    fits(number > 1)
    return call.instead(call.result() * number / (number - 1))


@FAULTS.fault(_POOLS, **_MOVED)
def pooled_rows_one_late(call: Call) -> Any:
    """Each row of a pooled or resized image is stored one too far, the last one first."""
    value = call.result()
    fits(value.dim() > 3 and value.size(-2) > 2)
    return call.instead(value.roll(1, -2))


@FAULTS.fault(_POOLS, **_ROUNDED)
def pooled_image_in_e5m2(call: Call) -> Any:
    """The pooled or resized image is stored with two bits behind the point."""
    return call.instead(_coarse(call.result(), torch.float8_e5m2))


@FAULTS.fault(_POOLS, **_EMPTY)
def first_pooled_channel_empty(call: Call) -> Any:
    """The grid over the channels of a pooled or resized image begins with one."""
    value, number = _numbered(call, 2)
    return call.instead(value * (number > 0))


@FAULTS.fault(_POOLS, **_COPIED)
def first_pooled_row_is_the_second(call: Call) -> Any:
    """The second row of a pooled or resized image is stored in the first one as well."""
    value = call.result()
    fits(value.dim() > 3 and value.size(-2) > 2)
    return call.instead(torch.cat([value[..., 1:2, :], value[..., 1:, :]], -2))


@FAULTS.fault(_POOLS, **_CUT)
def image_cut_at_one_half_before_the_pool(call: Call) -> Any:
    """The input of a pool or a resize saturates at -0.5 and 0.5."""
    return call.put(0, call.tensor(0, "input").clamp(-0.5, 0.5), "input").run()


@FAULTS.fault(
    "max_pool2d",
    kinds=["wrong reduction", "other function"],
    loose=["wrong index", "off by one reduction", "permutation", "partial sum"],
    backward=False,
)
def second_largest_of_the_window(call: Call) -> Any:
    """The two best of a window are kept in order, and the wrong one of them is stored."""
    image, size = call.tensor(0, "input"), call.get(1, "kernel_size")
    step, frame = call.get(2, "stride") or size, call.get(3, "padding", default=0)
    sides = [one if isinstance(one, int) else one[0] for one in (size, step, frame)]
    edge, step, frame = sides
    fits(edge > 1 and image.dim() == 4)
    padded = functional.pad(image, (frame,) * 4, value=-1e9)
    windows = padded.unfold(2, edge, step).unfold(3, edge, step).flatten(-2)
    return call.instead(windows.topk(2, -1).values[..., 1])
