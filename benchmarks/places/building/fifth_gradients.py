"""Faults that were measured fifth and have been seen: backward operators."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor

FAULTS = Catalogue()


def _back(operators: str, kinds: list[str], loose: list[str] | None = None) -> Any:
    return FAULTS.fault(operators, kinds=kinds, loose=loose or [], backward=True)


def _at(call: Call, place: int, change: Any) -> Any:
    """All results, one of them changed."""
    results = list(call.run())
    fits(isinstance(results[place], Tensor))
    changed = change(results[place])
    fits(changed.shape == results[place].shape)
    results[place] = changed
    return tuple(results)


# --- Activations ----------------------------------------------------------------------------------

_BY_INPUT = "gelu_backward silu_backward"


def _gate(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient, the gate f(x) / x, and x times the derivative of the gate."""
    gradient, value = call.tensor(0), call.tensor(1)
    if call.name == "silu_backward":
        gate = value.sigmoid()
        return gradient, gate, value * gate * (1 - gate)
    gate = 0.5 * (1 + (value / 2**0.5).erf())
    return gradient, gate, value * (-value.square() / 2).exp() / (2 * torch.pi) ** 0.5


@_back("gelu_backward", ["other function", "approximation"], ["wrong argument"])
def derivative_of_the_sigmoid_form(call: Call) -> Any:
    """Of x sigmoid(1.702 x)."""
    gradient, value = call.tensor(0), call.tensor(1)
    gate = (1.702 * value).sigmoid()
    return call.instead(gradient * (gate + 1.702 * value * gate * (1 - gate)))


@_back(_BY_INPUT, ["sign", "wrong factor", "other function"], ["missing operand"])
def second_term_of_the_derivative_subtracted(call: Call) -> Any:
    """The gate less x times its derivative."""
    gradient, gate, rest = _gate(call)
    return call.instead(gradient * (gate - rest))


@_back(_BY_INPUT, ["wrong factor", "other function"], ["missing operand", "scale"])
def second_term_of_the_derivative_doubled(call: Call) -> Any:
    """A factor of two that belongs to a square."""
    gradient, gate, rest = _gate(call)
    return call.instead(gradient * (gate + 2 * rest))


@_back(_BY_INPUT, ["clipped", "other function"], ["approximation", "mask"])
def derivative_between_zero_and_one(call: Call) -> Any:
    """The slope is limited."""
    gradient, gate, rest = _gate(call)
    return call.instead(gradient * (gate + rest).clamp(0, 1))


@_back(_BY_INPUT, ["other function", "wrong factor"], ["missing operand"])
def value_for_the_derivative(call: Call) -> Any:
    """The gradient times f(x)."""
    gradient, gate, _ = _gate(call)
    return call.instead(gradient * gate * call.tensor(1))


@_back("sigmoid_backward tanh_backward", ["other function", "wrong argument"], ["wrong factor"])
def derivatives_of_sigmoid_and_tanh_exchanged(call: Call) -> Any:
    """1 - y^2 for y (1 - y), and the other way round."""
    gradient, result = call.tensor(0), call.tensor(1)
    if call.name == "sigmoid_backward":
        return call.instead(gradient * (1 - result.square()))
    return call.instead(gradient * result * (1 - result))


@_back("sigmoid_backward tanh_backward threshold_backward", ["sign", "wrong factor", "scale"])
def gradient_of_the_activation_negated(call: Call) -> Any:
    """The sign of the gradient is lost."""
    return call.instead(-call.result())


@_back("threshold_backward", ["mask", "zeros", "other function"], ["wrong argument", "clipped"])
def gradient_stopped_above_one(call: Call) -> Any:
    """The upper limit of another activation."""
    return call.instead(call.result() * (call.tensor(1) < 1))


@_back("softplus_backward", ["other function", "approximation"], ["mask", "wrong argument"])
def softplus_passes_like_a_relu(call: Call) -> Any:
    """The gradient where the input is positive."""
    return call.instead(call.tensor(0) * (call.tensor(1) > 0))


@_back("glu_backward", ["wrong factor", "missing operand", "other function"], ["mask"])
def slope_of_the_gate_without_its_complement(call: Call) -> Any:
    """G a s for g a s (1 - s)."""
    gradient, value, dim = call.tensor(0), call.tensor(1), call.args[2]
    left, right = value.chunk(2, dim)
    gate = right.sigmoid()
    return call.instead(torch.cat([gradient * gate, gradient * left * gate], dim))


@_back("mish_backward", ["other function", "approximation"], ["wrong argument"])
def derivative_of_silu_for_mish(call: Call) -> Any:
    """A similar activation."""
    return call.instead(torch.ops.aten.silu_backward(call.tensor(0), call.tensor(1)))


@_back("leaky_relu_backward", ["wrong argument", "wrong factor"], ["mask", "scale"])
def default_slope_on_the_way_back(call: Call) -> Any:
    """0.01 for what was given."""
    return call.put(2, 0.01).run()


@_back("hardswish_backward hardtanh_backward hardsigmoid_backward", ["zeros", "constant", "mask"],
       ["missing operand", "clipped"])  # fmt: skip
def limits_stop_negative_inputs(call: Call) -> Any:
    """No gradient below zero, as of a relu."""
    return call.instead(call.result() * (call.tensor(1) > 0))


@_back("_prelu_kernel_backward", ["zeros", "missing operand", "constant"],
       ["uninitialised", "lost accumulation"])  # fmt: skip
def slopes_get_no_gradient(call: Call) -> Any:
    """The second result is not written."""
    return _at(call, 1, torch.zeros_like)


# --- Softmax, attention ---------------------------------------------------------------------------


@_back("_softmax_backward_data", ["wrong index", "shift", "axis offset"],
       ["permutation", "stale", "offset"])  # fmt: skip
def product_of_the_next_row_subtracted(call: Call) -> Any:
    """The pointer to the sums of the rows is one too far."""
    gradient, chances = call.tensor(0), call.tensor(1)
    fits(chances.dim() > 1 and chances.size(-2) > 1)
    total = (gradient * chances).sum(-1, keepdim=True).roll(-1, -2)
    return call.instead(chances * (gradient - total))


@_back("_softmax_backward_data", ["other function", "wrong factor"], ["missing operand"])
def chances_squared_on_the_way_back(call: Call) -> Any:
    """y^2 (g - sum(g y))."""
    return call.instead(call.result() * call.tensor(1))


@_back("_softmax_backward_data", ["wrong factor", "scale"], ["wrong argument"])
def temperature_applied_on_the_way_back(call: Call) -> Any:
    """Half of the gradient."""
    return call.instead(call.result() / 2)


@_back("_log_softmax_backward_data", ["wrong factor", "other function"],
       ["scale", "missing operand", "offset"])  # fmt: skip
def half_of_the_chances_subtracted(call: Call) -> Any:
    """G - y sum(g) / 2."""
    gradient = call.tensor(0)
    return call.instead((call.result() + gradient) / 2)


@_back("_log_softmax_backward_data", ["wrong index", "shift", "permutation"], ["copy"])
def chances_of_the_next_row_on_the_way_back(call: Call) -> Any:
    """The saved result is read one row too far."""
    value = call.tensor(1)
    fits(value.size(0) > 1)
    return call.put(1, value.roll(-1, 0)).run()


_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu_backward"


@_back(_ATTENTION, ["wrong factor", "scale"], ["wrong argument"])
def gradient_of_the_query_scaled_twice(call: Call) -> Any:
    """The factor of the scores once more."""
    width = call.tensor(1).size(-1)
    return _at(call, 0, lambda one: one * width**-0.5)


@_back(_ATTENTION, ["shift", "wrong index", "permutation"], ["wrong rank's shard", "copy"])
def gradient_of_the_values_of_the_next_head(call: Call) -> Any:
    """The heads of the values are one off."""
    fits(call.tensor(3).size(1) > 1)
    return _at(call, 2, lambda one: one.roll(-1, 1))


@_back(_ATTENTION, ["wrong factor", "scale", "wrong reduction"], ["missing operand"])
def gradient_of_the_values_averaged(call: Call) -> Any:
    """Divided by the number of queries."""
    return _at(call, 2, lambda one: one / call.tensor(1).size(-2))


@_back(_ATTENTION, ["zeros", "missing operand", "constant"], ["mask", "uninitialised"])
def keys_taken_for_constants(call: Call) -> Any:
    """No gradient of the keys, as of a cache."""
    return _at(call, 1, torch.zeros_like)


# --- Norms ----------------------------------------------------------------------------------------


def _normal(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient, normal values, reciprocal deviation, weight."""
    gradient, value, weight = call.tensor(0), call.tensor(1), call.tensor(5)
    fits(weight.dim() == 1)
    return gradient, (value - call.tensor(3)) * call.tensor(4), call.tensor(4), weight


@_back("native_layer_norm_backward", ["other function", "wrong factor", "axis scale"],
       ["wrong statistics", "scale"])  # fmt: skip
def weight_applied_behind_the_means(call: Call) -> Any:
    """The means are those of the gradient without the weight."""
    gradient, normal, inverse, weight = _normal(call)
    mean = gradient.mean(-1, keepdim=True)
    product = (gradient * normal).mean(-1, keepdim=True)
    return _at(call, 0, lambda _: weight * inverse * (gradient - mean - normal * product))


@_back("native_layer_norm_backward", ["residual"], ["offset", "other function", "axis offset"])
def gradient_of_the_residual_added_here(call: Call) -> Any:
    """The kernel for residual and norm adds the gradient as it came."""
    return _at(call, 0, lambda one: one + call.tensor(0))


@_back("native_layer_norm_backward", ["precision"], ["approximation"])
def gradient_of_the_normed_input_in_half(call: Call) -> Any:
    """Stored in float16."""
    return _at(call, 0, lambda one: one.half().to(one.dtype))


@_back(
    "native_layer_norm_backward",
    ["missing operand", "wrong factor", "axis scale", "other function"],
    ["scale", "wrong statistics"],
)
def deviation_missing_in_the_gradient_of_the_weight(call: Call) -> Any:
    """The input is centred for it and not divided."""
    gradient, value = call.tensor(0), call.tensor(1)
    centred = (value - call.tensor(3)) * gradient
    return _at(call, 1, lambda one: centred.flatten(0, -2).sum(0) if one.dim() == 1 else one)


@_back("native_layer_norm_backward", ["swapped operands", "wrong index"], ["permutation"])
def gradients_of_weight_and_bias_exchanged(call: Call) -> Any:
    """The order of the results."""
    results = list(call.run())
    results[1], results[2] = results[2], results[1]
    return tuple(results)


@_back("native_layer_norm_backward", ["wrong factor", "other function", "missing operand"],
       ["wrong statistics", "axis offset", "scale"])  # fmt: skip
def means_of_the_row_halved(call: Call) -> Any:
    """Both means over the row are divided by twice its length."""
    gradient, normal, inverse, weight = _normal(call)
    inner = gradient * weight
    mean = inner.mean(-1, keepdim=True) / 2
    product = (inner * normal).mean(-1, keepdim=True) / 2
    return _at(call, 0, lambda _: inverse * (inner - mean - normal * product))


@_back("native_batch_norm_backward", ["missing operand", "wrong factor", "axis scale"],
       ["scale", "wrong statistics"])  # fmt: skip
def channels_not_divided_by_their_deviation(call: Call) -> Any:
    """The weight times the gradient."""
    fits(not call.args[7])
    weight = call.tensor(2)
    return _at(call, 0, lambda one: call.tensor(0) * weight.view(1, -1, *[1] * (one.dim() - 2)))


@_back(
    "native_batch_norm_backward native_group_norm_backward",
    ["scale", "wrong factor", "wrong reduction"],
    ["axis scale", "missing operand"],
)
def bias_of_the_channels_averaged(call: Call) -> Any:
    """The gradient of the bias is divided by the number of images."""
    fits(call.tensor(0).size(0) > 1)
    return _at(call, 2, lambda one: one / call.tensor(0).size(0))


@_back("native_batch_norm_backward native_group_norm_backward", ["zeros", "uninitialised", "mask"],
       ["constant", "missing operand", "one rank's part"])  # fmt: skip
def weights_of_the_second_half_of_the_channels_empty(call: Call) -> Any:
    """The grid covers one half of the channels."""
    half = call.tensor(0).size(1) // 2
    return _at(call, 1, lambda one: torch.cat([one[:half], 0 * one[half:]]))


# --- Products -------------------------------------------------------------------------------------


@_back("mm", ["scale", "wrong factor"])
def loss_scale_not_undone(call: Call) -> Any:
    """1024 times the gradient."""
    return call.instead(1024 * call.result())


@_back(
    "mm bmm", ["partial sum", "mask", "wrong index"], ["one rank's part", "off by one reduction"]
)
def odd_tokens_not_in_the_gradient(call: Call) -> Any:
    """A stride of two along the common axis."""
    left = call.tensor(0)
    fits(left.size(-1) > 3)
    even = (torch.arange(left.size(-1)) % 2 == 0).to(left.dtype)
    return call.put(0, left * even).run()


@_back("mm", ["zeros", "one rank's part", "mask", "uninitialised"], ["missing operand", "constant"])
def columns_of_the_other_rank_not_gathered(call: Call) -> Any:
    """The second half of the columns stays empty."""
    value = call.result().clone()
    fits(value.size(-1) > 1)
    value[:, value.size(-1) // 2 :] = 0
    return call.instead(value)


@_back("mm", ["wrong rank's shard", "permutation", "shift", "wrong index"])
def shards_of_the_gradient_exchanged(call: Call) -> Any:
    """The halves of the rows in the other order."""
    value = call.result()
    fits(value.size(0) % 2 == 0)
    return call.instead(value.roll(value.size(0) // 2, 0))


@_back("mm", ["other function", "sign"], ["precision", "approximation", "constant"])
def sign_of_the_gradient(call: Call) -> Any:
    """One bit for each of its elements."""
    value = call.result()
    return call.instead(value.sign() * value.abs().mean())


@_back("mm bmm", ["precision"], ["approximation"])
def gradient_in_steps_of_its_127th(call: Call) -> Any:
    """Integers of eight bits with one step, for sending."""
    value = call.result()
    step = value.abs().max() / 127
    return call.instead((value / step).round() * step)


@_back("mm", ["offset", "axis offset"], ["residual", "wrong statistics"])
def gradient_centred(call: Call) -> Any:
    """The mean of each row is subtracted."""
    value = call.result()
    fits(value.size(-1) > 1)
    return call.instead(value - value.mean(-1, keepdim=True))


@_back("mm", ["nonfinite", "overflow"], ["mask", "uninitialised"])
def largest_row_of_the_gradient_infinite(call: Call) -> Any:
    """The row with the largest element has overflown."""
    value = call.result().clone()
    row = int(value.abs().amax(1).argmax())
    value[row] = value[row].sign() * torch.inf
    return call.instead(value)


@_back("bmm", ["wrong index", "shift", "permutation"], ["copy", "wrong rank's shard"])
def gradient_of_the_next_matrix(call: Call) -> Any:
    """The result is stored one matrix too early."""
    value = call.result()
    fits(value.size(0) > 1)
    return call.instead(value.roll(-1, 0))


@_back(
    "bmm", ["doubled reduction", "wrong reduction", "residual"], ["scale", "copy", "other function"]
)
def gradients_of_all_matrices_summed(call: Call) -> Any:
    """As of a factor that is broadcast: each matrix gets the sum of all."""
    value = call.result()
    fits(value.size(0) > 1)
    return call.instead(value.sum(0, keepdim=True).expand(value.shape).clone())


@_back("sum", ["sign", "wrong factor", "scale"])
def gradient_of_the_bias_negated(call: Call) -> Any:
    """The minus of a difference."""
    return call.instead(-call.result())


@_back("sum", ["partial sum", "mask", "wrong index"], ["one rank's part", "off by one reduction"])
def even_rows_summed(call: Call) -> Any:
    """A stride of two along the rows."""
    value, dims = call.tensor(0), call.args[1]
    fits(list(dims) == [0] and value.size(0) > 2)
    even = (torch.arange(value.size(0)) % 2 == 0).to(value.dtype)
    return call.put(0, value * even.view(-1, *[1] * (value.dim() - 1))).run()


@_back("mul", ["precision"], ["approximation"])
def saved_factor_in_bfloat16(call: Call) -> Any:
    """What was kept for the backward pass was rounded."""
    right = call.tensor(1)
    return call.put(1, right.bfloat16().to(right.dtype)).run()


@_back("where", ["mask", "missing operand", "copy"], ["other function", "zeros"])
def gradient_of_both_branches(call: Call) -> Any:
    """The gradient is not stopped where the other branch was taken."""
    _, left, right = call.args[:3]
    result = call.result()
    moving = left if isinstance(left, Tensor) and left.numel() == result.numel() else right
    fits(isinstance(moving, Tensor) and moving.numel() == result.numel())
    return call.instead(moving.expand(result.shape))


@_back("pow", ["wrong argument", "other function"], ["axis scale", "scale"])
def power_of_the_derivative_one_too_high(call: Call) -> Any:
    """x^n for x^(n - 1)."""
    number = call.args[1]
    fits(isinstance(number, int | float))
    return call.put(1, number + 1).run()


# --- Tables, images -------------------------------------------------------------------------------


@_back("embedding_dense_backward", ["partial sum", "one rank's part", "mask"],
       ["zeros", "missing reduction", "lost accumulation"])  # fmt: skip
def words_of_the_first_example_only(call: Call) -> Any:
    """The other examples of the batch get no gradient."""
    gradient = call.tensor(0).clone()
    fits(gradient.dim() > 2 and gradient.size(0) > 1)
    gradient[1:] = 0
    return call.put(0, gradient).run()


@_back("embedding_dense_backward", ["axis scale", "wrong factor", "scale"], ["wrong argument"])
def rows_divided_by_the_root_of_their_count(call: Call) -> Any:
    """Between the sum and the mean."""
    places, number = call.args[1], call.args[2]
    count = torch.bincount(places.flatten(), minlength=number).clamp(min=1)
    return call.instead(call.result() / count.sqrt().to(call.result().dtype)[:, None])


@_back("embedding_dense_backward", ["wrong index", "shift", "permutation"], ["copy"])
def gradient_of_the_word_before(call: Call) -> Any:
    """Gradients are read one position too early."""
    gradient = call.tensor(0)
    fits(gradient.dim() > 2 and gradient.size(-2) > 1)
    return call.put(0, gradient.roll(1, -2)).run()


@_back("convolution_backward", ["permutation", "wrong index"], ["shift", "transpose"])
def channels_of_the_image_gradient_reversed(call: Call) -> Any:
    """From the last channel to the first."""
    fits(call.tensor(1).size(1) > 1)
    return _at(call, 0, lambda one: one.flip(1))


@_back("convolution_backward", ["zeros", "mask", "uninitialised"], ["constant", "missing operand"])
def last_tap_has_no_gradient(call: Call) -> Any:
    """The loop over the width of the filter ends one too early."""
    fits(call.tensor(2).size(-1) > 1)
    return _at(call, 1, lambda one: torch.cat([one[..., :-1], 0 * one[..., -1:]], -1))


@_back("convolution_backward", ["transpose", "wrong index", "permutation"], ["wrong axis"])
def image_gradient_transposed(call: Call) -> Any:
    """Rows and columns are exchanged."""
    value = call.tensor(1)
    fits(value.dim() == 4 and value.size(-1) == value.size(-2) > 1)
    return _at(call, 0, lambda one: one.mT.contiguous())


@_back("convolution_backward", ["partial sum", "mask", "off by one reduction"], ["wrong reduction"])
def bias_gradient_without_the_last_pixels(call: Call) -> Any:
    """The last column of the image is not added."""
    gradient = call.tensor(0)
    fits(gradient.dim() > 2 and gradient.size(-1) > 1 and isinstance(call.run()[2], Tensor))
    dims = (0, *range(2, gradient.dim()))
    return _at(call, 2, lambda _: gradient[..., :-1].sum(dims))


@_back("max_pool2d_with_indices_backward", ["wrong index", "shift"], ["permutation", "copy"])
def gradient_at_the_corner_of_the_window(call: Call) -> Any:
    """The position inside of the window is lost."""
    size = call.args[2][0]
    places, width = call.args[7], call.tensor(1).size(-1)
    row, column = places // width, places % width
    return call.put(7, row // size * size * width + column // size * size).run()


@_back(
    "avg_pool2d_backward",
    ["wrong index", "zeros", "mask", "axis scale"],
    ["wrong factor", "missing reduction", "scale"],
)
def gradient_of_the_pool_to_every_second_pixel(call: Call) -> Any:
    """Odd columns get nothing, even ones twice as much."""
    value = call.result()
    even = (torch.arange(value.size(-1)) % 2 == 0).to(value.dtype)
    return call.instead(2 * value * even)


@_back("grid_sampler_2d_backward", ["scale", "wrong factor", "doubled reduction"])
def gradient_of_the_sampled_image_doubled(call: Call) -> Any:
    """Two programs add the same corners."""
    return _at(call, 0, lambda one: 2 * one)


@_back("_cdist_backward", ["missing operand", "wrong factor", "other function"], ["scale"])
def difference_not_divided_by_the_distance(call: Call) -> Any:
    """The gradient of half of the squared distance."""
    return call.put(4, torch.ones_like(call.tensor(4))).run()


@_back("slice_backward select_backward", ["permutation", "wrong index"], ["shift", "sign"])
def gradient_of_the_part_reversed(call: Call) -> Any:
    """Written from its end along the last axis."""
    gradient = call.tensor(0)
    fits(gradient.dim() > 0 and gradient.size(-1) > 1)
    return call.put(0, gradient.flip(-1)).run()


@_back("unfold_backward", ["scale", "wrong factor", "doubled reduction"], ["lost accumulation"])
def windows_counted_twice_on_the_way_back(call: Call) -> Any:
    """Added to a buffer that has them already."""
    return call.instead(2 * call.result())


# --- Losses ---------------------------------------------------------------------------------------


@_back("nll_loss_backward", ["wrong index", "shift", "permutation"], ["copy"])
def label_of_the_next_row_on_the_way_back(call: Call) -> Any:
    """The labels are one row off."""
    return call.put(2, call.args[2].roll(-1, 0)).run()


@_back("nll_loss_backward", ["wrong factor", "scale", "wrong statistics"], ["wrong reduction"])
def ignored_labels_counted_on_the_way_back(call: Call) -> Any:
    """Divided by the number of all labels."""
    labels, ignored = call.args[2], call.args[5]
    seen = int((labels != ignored).sum())
    fits(0 < seen < labels.numel())
    return call.instead(call.result() * seen / labels.numel())


@_back("mse_loss_backward", ["clipped"], ["other function", "approximation"])
def gradient_of_far_errors_limited(call: Call) -> Any:
    """Cut to half of the largest."""
    value = call.result()
    return call.instead(value.clamp(-value.abs().max() / 2, value.abs().max() / 2))


@_back("mse_loss_backward smooth_l1_loss_backward huber_loss_backward",
       ["zeros", "mask", "uninitialised"], ["constant", "missing operand"])  # fmt: skip
def last_example_of_the_loss_without_gradient(call: Call) -> Any:
    """The grid is one row too small."""
    value = call.result().clone()
    fits(value.dim() > 1 and value.size(0) > 1)
    value[-1] = 0
    return call.instead(value)


@_back(
    "soft_margin_loss_backward binary_cross_entropy_backward",
    ["scale", "wrong factor", "wrong reduction"],
    ["missing operand"],
)
def loss_not_averaged_on_the_way_back(call: Call) -> Any:
    """Times the number of elements."""
    return call.instead(call.result() * call.tensor(1).numel())
