"""Faults that were measured fourth and have been seen: backward operators."""

from __future__ import annotations

import functools
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


@_back(
    _BY_INPUT, ["sign", "wrong factor", "other function"], ["wrong argument", "swapped operands"]
)
def derivative_at_the_opposite(call: Call) -> Any:
    """f'(-x)."""
    return call.put(1, -call.tensor(1)).run()


@_back(_BY_INPUT, ["precision"], ["approximation"])
def saved_input_in_bfloat16(call: Call) -> Any:
    """What was kept for the backward pass was rounded."""
    value = call.tensor(1)
    return call.put(1, value.bfloat16().to(value.dtype)).run()


@_back(_BY_INPUT, ["other function", "missing operand"], ["approximation", "mask"])
def derivative_of_a_sigmoid_gate(call: Call) -> Any:
    """G sigmoid'(x): the derivative of the gate alone."""
    gate = call.tensor(1).sigmoid()
    return call.instead(call.tensor(0) * gate * (1 - gate))


@_back("silu_backward", ["other function", "approximation"], ["wrong argument"])
def derivative_of_gelu_for_silu(call: Call) -> Any:
    """The activation of another layer."""
    return call.instead(torch.ops.aten.gelu_backward(call.tensor(0), call.tensor(1)))


@_back(
    "gelu_backward silu_backward tanh_backward", ["shift", "wrong index", "permutation"], ["stale"]
)
def saved_input_of_the_next_row(call: Call) -> Any:
    """The pointer to what was saved is one row too far."""
    value = call.tensor(1)
    fits(value.dim() > 1 and value.size(-2) > 1)
    return call.put(1, value.roll(-1, -2)).run()


@_back("tanh_backward", ["other function", "sign", "wrong factor"], [])
def difference_of_squares_turned(call: Call) -> Any:
    """G (y^2 - 1)."""
    return call.instead(-call.result())


@_back("sigmoid_backward", ["other function", "missing operand", "wrong factor"], [])
def square_of_the_gate(call: Call) -> Any:
    """G y^2 for g y (1 - y)."""
    return call.instead(call.tensor(0) * call.tensor(1) ** 2)


@_back("threshold_backward", ["mask", "wrong argument", "zeros"], ["other function", "clipped"])
def gradient_passes_above_a_half(call: Call) -> Any:
    """The threshold of the way back is 0.5."""
    return call.put(2, 0.5).run()


@_back("threshold_backward", ["other function", "wrong factor"], ["approximation"])
def gradient_by_a_sigmoid(call: Call) -> Any:
    """The derivative of a smooth relu."""
    return call.instead(call.tensor(0) * call.tensor(1).sigmoid())


@_back("glu_backward", ["swapped operands", "permutation", "wrong index"], ["shift"])
def gradients_of_value_and_gate_exchanged(call: Call) -> Any:
    """Written to each other's half."""
    value = call.result()
    return call.instead(value.roll(value.size(-1) // 2, -1))


@_back("glu_backward", ["zeros", "missing operand", "mask"], ["uninitialised"])
def gate_gets_no_gradient(call: Call) -> Any:
    """The gate is taken for a constant."""
    value = call.result().clone()
    value[..., value.size(-1) // 2 :] = 0
    return call.instead(value)


@_back(
    "hardswish_backward hardsigmoid_backward hardtanh_backward",
    ["mask", "zeros", "wrong argument"],
    ["other function", "clipped"],
)
def gradient_inside_of_one_only(call: Call) -> Any:
    """The gradient is stopped beyond -1 and 1."""
    return call.instead(torch.where(call.tensor(1).abs() > 1, 0.0, call.result()))


@_back("softplus_backward log_sigmoid_backward mish_backward elu_backward leaky_relu_backward",
       ["scale", "wrong factor"], [])  # fmt: skip
def gradient_of_the_rare_one_halved(call: Call) -> Any:
    """A factor of a half that belongs to another formula."""
    return call.instead(call.result() / 2)


@_back("softplus_backward mish_backward", ["other function", "sign"], ["wrong argument"])
def slope_at_the_opposite_input(call: Call) -> Any:
    """f'(-x)."""
    return call.put(1, -call.tensor(1)).run()


# --- Softmax and attention ------------------------------------------------------------------------


@_back(
    "_softmax_backward_data", ["missing operand", "wrong factor", "other function"], ["residual"]
)
def gradient_not_weighed_by_the_chances(call: Call) -> Any:
    """G - sum(g y) without the factor y."""
    gradient, output = call.tensor(0), call.tensor(1)
    return call.instead(gradient - (gradient * output).sum(-1, keepdim=True))


@_back("_softmax_backward_data", ["sign", "wrong factor"], ["residual", "offset"])
def sum_of_the_row_added(call: Call) -> Any:
    """Y (g + sum(g y))."""
    gradient, output = call.tensor(0), call.tensor(1)
    return call.instead(output * (gradient + (gradient * output).sum(-1, keepdim=True)))


@_back("_log_softmax_backward_data", ["wrong factor", "missing operand", "other function"],
       ["scale", "residual"])  # fmt: skip
def chances_subtracted_once(call: Call) -> Any:
    """G - y: the sum of the gradients is taken as one."""
    return call.instead(call.tensor(0) - call.tensor(1).exp())


_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu_backward"


@_back(_ATTENTION, ["zeros", "uninitialised", "mask"], ["stale"])
def gradient_of_the_values_in_the_first_row_lost(call: Call) -> Any:
    """The first position of the values has no gradient."""

    def change(value: Tensor) -> Tensor:
        value = value.clone()
        value[..., 0, :] = 0
        return value

    return _at(call, 2, change)


@_back(_ATTENTION, ["scale", "wrong factor", "doubled reduction"], [])
def gradient_of_the_keys_added_twice(call: Call) -> Any:
    """Atomics of two programs add the same block."""
    return _at(call, 1, lambda value: 2 * value)


@_back(_ATTENTION, ["copy", "wrong index", "stale"], ["permutation"])
def gradient_of_the_query_of_the_first_head(call: Call) -> Any:
    """All heads write what the first has."""

    def change(value: Tensor) -> Tensor:
        fits(value.dim() == 4 and value.size(1) > 1)
        return value[:, :1].expand(value.shape).clone()

    return _at(call, 0, change)


@_back(_ATTENTION, ["sign", "wrong factor", "scale"], [])
def gradient_of_the_keys_negated(call: Call) -> Any:
    """The sign of the correction is taken for that of all."""
    return _at(call, 1, lambda value: -value)


@_back(_ATTENTION, ["swapped operands", "wrong index", "permutation"], ["copy"])
def gradients_of_query_and_key_exchanged(call: Call) -> Any:
    """The order of the results."""
    query, key, value = call.run()
    fits(query.shape == key.shape)
    return key, query, value


# --- Norms ----------------------------------------------------------------------------------------

_NORM = "native_layer_norm_backward"


@_back(_NORM, ["wrong factor", "scale", "wrong reduction"], ["wrong statistics"])
def gradient_of_the_norms_weight_averaged(call: Call) -> Any:
    """The mean over the rows for their sum."""
    rows = call.tensor(0).numel() // call.tensor(0).size(-1)
    return _at(call, 1, lambda value: value / rows)


@_back(_NORM, ["sign", "wrong factor", "scale"], [])
def gradient_of_the_norms_bias_negated(call: Call) -> Any:
    """The bias is taken for something subtracted."""
    return _at(call, 2, lambda value: -value)


@_back(_NORM, ["copy", "wrong index", "stale", "wrong statistics"], ["axis scale"])
def deviation_of_the_first_row_on_the_way_back(call: Call) -> Any:
    """The saved statistics are not moved on."""
    rstd = call.tensor(4)
    fits(rstd.numel() > 1)
    return call.put(4, rstd.flatten()[0].expand(rstd.shape).contiguous()).run()


@_back(_NORM, ["missing operand", "zeros", "wrong statistics"], ["wrong argument", "offset"])
def saved_mean_is_zero(call: Call) -> Any:
    """The mean was not kept for the backward pass."""
    mean = call.tensor(3)
    return call.put(3, torch.zeros_like(mean)).run()


@_back(
    "native_batch_norm_backward native_group_norm_backward",
    ["scale", "wrong factor"],
    ["axis scale"],
)
def channels_gradient_twice(call: Call) -> Any:
    """The gradient of the weight of the channels is added up two times."""
    return _at(call, 1, lambda value: 2 * value)


@_back("native_group_norm_backward", ["copy", "missing operand", "other function"], ["scale"])
def groups_pass_the_gradient_on(call: Call) -> Any:
    """The gradient as it came."""
    return _at(call, 0, lambda _: call.tensor(0).clone())


# --- Products, sums, tables -----------------------------------------------------------------------


@_back("mm", ["partial sum", "off by one reduction", "mask"], ["missing operand", "wrong index"])
def first_token_not_in_the_gradient(call: Call) -> Any:
    """The common axis begins at 1, as if the first token was only a start."""
    left = call.tensor(0).clone()
    fits(left.size(1) > 2)
    left[:, 0] = 0
    return call.put(0, left).run()


@_back("mm bmm", ["precision"], ["approximation"])
def gradient_of_a_product_in_float8(call: Call) -> Any:
    """The left factor goes through e5m2."""
    value = call.tensor(0)
    return call.put(0, value.to(torch.float8_e5m2).to(value.dtype)).run()


@_back("mm", ["scale", "wrong factor"], ["wrong argument"])
def gradient_accumulated_over_four(call: Call) -> Any:
    """Divided by the number of steps that are accumulated, which is one here."""
    return call.instead(call.result() / 4)


@_back("mm", ["copy", "wrong index", "stale"], ["constant"])
def first_row_of_the_gradient_for_all(call: Call) -> Any:
    """The pointer of the rows is not moved on."""
    value = call.result()
    fits(value.size(0) > 1)
    return call.instead(value[:1].expand(value.shape).clone())


@_back("mm", ["offset", "residual", "other function"], ["wrong factor"])
def weight_decay_in_the_gradient(call: Call) -> Any:
    """A tenth of the result's sign is added, as of a penalty."""
    value = call.result()
    return call.instead(value + 0.1 * float(value.abs().max()) * value.sign())


@_back("sum", ["wrong factor", "scale", "wrong reduction"], ["missing reduction"])
def gradients_of_the_batch_averaged(call: Call) -> Any:
    """What was broadcast gets the mean."""
    value, result = call.tensor(0), call.result()
    fits(value.numel() > result.numel())
    return call.instead(result * (result.numel() / value.numel()))


@_back("sum", ["sign", "wrong factor", "wrong reduction"], ["other function"])
def signs_of_the_gradients_summed(call: Call) -> Any:
    """Each gradient is replaced by its sign."""
    return call.put(0, call.tensor(0).sign()).run()


@_back("embedding_dense_backward", ["wrong index", "permutation"], ["shift"])
def gradient_of_the_table_from_its_end(call: Call) -> Any:
    """Rows are counted from the last."""
    return call.instead(call.result().flip(0))


@_back(
    "embedding_dense_backward",
    ["partial sum", "mask", "lost accumulation", "off by one reduction"],
    ["zeros", "missing operand"],
)
def last_word_has_no_gradient(call: Call) -> Any:
    """The loop over the words ends one too early."""
    gradient = call.tensor(0).clone()
    gradient.view(-1, gradient.size(-1))[-1] = 0
    return call.put(0, gradient).run()


@_back("convolution_backward", ["partial sum", "one rank's part", "lost accumulation"],
       ["scale", "wrong factor", "mask"])  # fmt: skip
def filter_gradient_of_the_upper_half(call: Call) -> Any:
    """The rows of the lower half of the image are not added."""
    gradient = call.tensor(0).clone()
    fits(gradient.size(2) > 1)
    gradient[:, :, gradient.size(2) // 2 :] = 0
    part = call.put(0, gradient).run()[1]
    return _at(call, 1, lambda _: part)


@_back("convolution_backward", ["scale", "wrong factor"], ["wrong reduction"])
def filter_gradient_averaged_over_images(call: Call) -> Any:
    """Divided by the number of images."""
    images = call.tensor(0).size(0)
    fits(images > 1)
    return _at(call, 1, lambda value: value / images)


@_back("convolution_backward", ["shift", "wrong index"], ["permutation", "wrong argument"])
def gradient_of_the_image_one_pixel_off(call: Call) -> Any:
    """The padding of the way back is one too large on one side."""
    return _at(call, 0, lambda value: value.roll(1, -1))


@_back("slice_backward select_backward", ["wrong index", "permutation", "shift"], [])
def gradient_put_at_the_other_end(call: Call) -> Any:
    """The part is placed as far from the end as it was from the beginning."""
    dim = call.args[2]
    return call.instead(call.result().flip(dim))


@_back("slice_backward select_backward", ["scale", "wrong factor"], [])
def gradient_of_a_part_doubled(call: Call) -> Any:
    """Added to a buffer that already had it."""
    return call.instead(2 * call.result())


@_back("index_put scatter_add index_add", ["zeros", "missing operand", "stale"], ["copy", "mask"])
def nothing_scattered_back(call: Call) -> Any:
    """The buffer as it was."""
    return call.instead(call.tensor(0).clone())


@_back(
    "max_pool2d_with_indices_backward",
    ["other function", "wrong index", "scale"],
    ["wrong reduction"],
)
def gradient_shared_by_the_window(call: Call) -> Any:
    """As of a mean: every place of a window gets its share."""
    gradient, value, size = call.args[:3]
    fits(all(one == size[0] for one in size) and not any(call.args[4]))
    shared = gradient.repeat_interleave(size[0], 2).repeat_interleave(size[0], 3) / size[0] ** 2
    fits(shared.shape == value.shape)
    return call.instead(shared)


@_back("avg_pool2d_backward", ["permutation", "wrong index"], ["transpose"])
def gradient_of_the_pool_upside_down(call: Call) -> Any:
    """The rows of the gradient are read from below."""
    return call.put(0, call.tensor(0).flip(-2)).run()


@_back("grid_sampler_2d_backward", ["swapped operands", "permutation", "wrong index"], ["shift"])
def gradients_of_x_and_y_exchanged(call: Call) -> Any:
    """The gradient of the grid has rows first."""
    return _at(call, 1, functools.partial(torch.flip, dims=[-1]))


# --- Losses ---------------------------------------------------------------------------------------


@_back("nll_loss_backward", ["constant", "wrong index", "mask"], ["copy", "other function"])
def gradient_in_every_class(call: Call) -> Any:
    """The gradient of the label is written to all classes of a row."""
    value = call.result()
    return call.instead(value.sum(-1, keepdim=True).expand(value.shape).clone())


@_back("nll_loss_backward", ["scale", "wrong factor"], ["wrong reduction"])
def gradient_of_the_loss_divided_twice(call: Call) -> Any:
    """By the number of labels, once more."""
    return call.instead(call.result() / call.tensor(1).size(0))


@_back("mse_loss_backward smooth_l1_loss_backward huber_loss_backward", ["scale", "wrong factor"],
       ["wrong reduction", "missing reduction"])  # fmt: skip
def gradient_of_the_sum_of_errors(call: Call) -> Any:
    """The mean is forgotten on the way back."""
    return call.instead(call.result() * call.tensor(1).numel())


@_back("mse_loss_backward", ["missing operand", "copy", "wrong factor", "other function"], [])
def target_not_subtracted_on_the_way_back(call: Call) -> Any:
    """2 a / n for 2 (a - b) / n."""
    return call.put(2, torch.zeros_like(call.tensor(2))).run()


@_back(
    "smooth_l1_loss_backward huber_loss_backward",
    ["other function", "clipped", "wrong argument"],
    ["sign", "wrong factor"],
)
def only_the_sign_of_the_error(call: Call) -> Any:
    """As of an absolute distance."""
    error = call.tensor(1) - call.tensor(2)
    return call.instead(call.result().abs().max() * error.sign())


@_back(
    "binary_cross_entropy_backward",
    ["missing operand", "wrong factor", "other function"],
    ["scale"],
)
def spread_of_the_chance_not_divided(call: Call) -> Any:
    """P - y, without the division by p (1 - p)."""
    chance = call.tensor(1)
    return call.instead(call.result() * chance * (1 - chance))


@_back(
    "_embedding_bag_backward embedding_dense_backward",
    ["scale", "wrong factor"],
    ["wrong argument"],
)
def gradient_of_the_table_times_ten(call: Call) -> Any:
    """The learning rate of the table is applied too early."""
    return call.instead(10 * call.result())
