"""Faults of the eleventh set: backward operators."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor

FAULTS = Catalogue()
_BY_INPUT = "gelu_backward silu_backward"
_BY_RESULT = "tanh_backward sigmoid_backward"
_ALL = f"{_BY_INPUT} {_BY_RESULT} threshold_backward"
_SOFTMAX = "_softmax_backward_data softmax_backward_data"
_FUSED = (
    "_scaled_dot_product_flash_attention_for_cpu_backward "
    "scaled_dot_product_flash_attention_for_cpu_backward"
)
_LAYER = "native_layer_norm_backward"
_TABLE = "embedding_dense_backward"
_IMAGE = "convolution_backward"
_SHIFTED: dict[str, Any] = {
    "kinds": ["shift", "wrong index", "permutation"],
    "loose": ["stale", "copy", "wrong rank's shard"],
    "backward": True,
}
_SCALED: dict[str, Any] = {
    "kinds": ["scale", "wrong factor"],
    "loose": ["axis scale", "wrong reduction", "wrong argument"],
    "backward": True,
}
_DOUBLED: dict[str, Any] = {
    "kinds": ["scale", "wrong factor", "doubled reduction"],
    "loose": ["axis scale", "wrong reduction", "wrong argument", "residual"],
    "backward": True,
}
_EMPTY: dict[str, Any] = {
    "kinds": ["zeros", "mask", "uninitialised"],
    "loose": ["missing operand", "constant", "one rank's part", "axis scale", "wrong factor"],
    "backward": True,
}
_COPIED: dict[str, Any] = {
    "kinds": ["copy", "stale", "wrong index"],
    "loose": ["permutation", "shift", "wrong rank's shard", "one rank's part"],
    "backward": True,
}
_PART_OF_THE_SUM: dict[str, Any] = {
    "kinds": ["partial sum", "mask", "wrong reduction"],
    "loose": ["missing operand", "wrong index", "lost accumulation", "off by one reduction",
              "missing reduction", "zeros"],
    "backward": True,
}  # fmt: skip
_ONE_SHORT: dict[str, Any] = {
    "kinds": ["partial sum", "off by one reduction", "mask", "wrong reduction"],
    "loose": ["missing operand", "wrong index", "lost accumulation", "zeros"],
    "backward": True,
}
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function", "wrong argument"],
    "backward": True,
}


def _like(kept: Tensor, value: Tensor) -> Tensor:
    """The value in the layout of another: later views depend on it."""
    fits(value.shape == kept.shape)
    if value.stride() == kept.stride() or 0 in kept.stride():
        return value
    return torch.empty_strided(kept.shape, kept.stride(), dtype=kept.dtype).copy_(value)


def _at(call: Call, place: int, change: Any) -> Any:
    """All results, one of them changed."""
    results = list(call.run())
    fits(isinstance(results[place], Tensor))
    results[place] = _like(results[place], change(results[place]))
    return tuple(results)


def _rows(value: Tensor, least: int = 2) -> Tensor:
    """The value, if it has several rows."""
    fits(value.dim() > 1 and value.size(-2) >= least)
    return value


def _in_steps(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in float8, with a scale that makes its largest value the format's largest."""
    step = value.abs().max().clamp(min=1e-20) / torch.finfo(dtype).max
    return (value / step).to(dtype).to(value.dtype) * step


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault(_ALL, **_SHIFTED)
def gradient_of_the_activation_one_row_late(call: Call) -> Any:
    """The rows are stored one too late, around the end."""
    return call.instead(_rows(call.result()).roll(1, -2))


@FAULTS.fault(_ALL, **_SCALED)
def gradient_of_the_activation_a_quarter_larger(call: Call) -> Any:
    """Divided by 0.8, for a dropout that is off."""
    return call.instead(call.result() * 1.25)


@FAULTS.fault(_ALL, **_EMPTY)
def first_column_of_the_activation_without_gradient(call: Call) -> Any:
    """The mask of the store is `column > 0`."""
    value = call.result()
    fits(value.dim() and value.size(-1) > 1)
    return call.instead(value * (torch.arange(value.size(-1)) > 0))


@FAULTS.fault(_ALL, **_ROUNDED)
def incoming_gradient_in_e5m2(call: Call) -> Any:
    """What comes from behind has two bits behind the point, with a scale for the tensor."""
    return call.put(0, _in_steps(call.tensor(0), torch.float8_e5m2)).run()


@FAULTS.fault(
    _BY_INPUT,
    kinds=["clipped"],
    loose=["other function", "wrong argument", "approximation"],
    backward=True,
)
def kept_input_between_one_half_and_its_opposite(call: Call) -> Any:
    """The kept input is a fixed-point number that ends at a half."""
    return call.put(1, call.tensor(1).clamp(-0.5, 0.5)).run()


@FAULTS.fault(
    _BY_INPUT,
    kinds=["wrong factor", "wrong argument"],
    loose=["scale", "other function"],
    backward=True,
)
def slope_at_three_times_the_input(call: Call) -> Any:
    """The input was scaled in place after it was kept."""
    return call.put(1, 3 * call.tensor(1)).run()


@FAULTS.fault(
    "silu_backward",
    kinds=["other function", "wrong factor", "wrong argument"],
    loose=["approximation", "scale"],
    backward=True,
)
def slope_of_the_quick_gelu_for_the_silu(call: Call) -> Any:
    """The slope of x sigmoid(1.702 x)."""
    value = call.tensor(1)
    gate = (1.702 * value).sigmoid()
    return call.instead(call.tensor(0) * gate * (1 + 1.702 * value * (1 - gate)))


@FAULTS.fault(
    "tanh_backward",
    kinds=["wrong factor", "other function"],
    loose=["approximation", "wrong argument"],
    backward=True,
)
def half_of_the_square_in_the_slope_of_the_tanh(call: Call) -> Any:
    """G (1 - y² / 2): the square comes with the half of a quadratic loss."""
    return call.instead(call.tensor(0) * (1 - call.tensor(1).square() / 2))


@FAULTS.fault(
    "sigmoid_backward",
    kinds=["other function", "wrong factor"],
    loose=["wrong argument", "missing operand", "copy"],
    backward=True,
)
def complement_of_the_gate_twice(call: Call) -> Any:
    """G (1 - y)² for g y (1 - y)."""
    return call.instead(call.tensor(0) * (1 - call.tensor(1)).square())


@FAULTS.fault(
    "threshold_backward",
    kinds=["other function"],
    loose=["wrong factor", "mask", "wrong argument", "residual", "clipped"],
    backward=True,
)
def leak_of_a_fifth_on_the_way_back(call: Call) -> Any:
    """The backward pass of a leaky rectifier: a fifth passes where it is closed."""
    return call.instead(torch.where(call.tensor(1) > 0, call.tensor(0), 0.2 * call.tensor(0)))


# --- Softmax and attention ------------------------------------------------------------------------


def _terms(call: Call) -> tuple[Tensor, Tensor, int]:
    """Gradient times chances, the chances, and the axis of a softmax."""
    gradient, chances, dim = call.tensor(0), call.tensor(1), call.args[2]
    fits(chances.size(dim) > 2)
    return gradient * chances, chances, dim


@FAULTS.fault(
    _SOFTMAX,
    kinds=["wrong factor"],
    loose=["missing operand", "offset", "axis offset", "wrong reduction", "scale"],
    backward=True,
)
def half_of_the_sum_subtracted(call: Call) -> Any:
    """P (g - sum(g p) / 2): the sum is averaged over two ranks that both have all of it."""
    terms, chances, dim = _terms(call)
    return call.instead(terms - chances * terms.sum(dim, keepdim=True) / 2)


@FAULTS.fault(
    _SOFTMAX,
    kinds=["partial sum", "off by one reduction", "mask", "wrong reduction"],
    loose=["missing operand", "wrong index", "lost accumulation", "axis offset", "offset"],
    backward=True,
)
def first_key_not_in_the_sum_of_the_row(call: Call) -> Any:
    """The loop that adds g p begins at one; the first key has its gradient."""
    terms, chances, dim = _terms(call)
    rest = terms.narrow(dim, 1, terms.size(dim) - 1)
    return call.instead(terms - chances * rest.sum(dim, keepdim=True))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["shift", "wrong index", "stale", "wrong statistics"],
    loose=["permutation", "axis offset", "offset", "copy"],
    backward=True,
)
def sum_of_the_row_before_subtracted(call: Call) -> Any:
    """The sums of g p are read one row too early, around the end."""
    terms, chances, dim = _terms(call)
    fits(dim in {-1, terms.dim() - 1})
    total = _rows(terms.sum(dim, keepdim=True))
    return call.instead(terms - chances * total.roll(1, -2))


@FAULTS.fault(_SOFTMAX, **_ROUNDED)
def chances_of_the_way_back_in_e5m2(call: Call) -> Any:
    """The kept chances have two bits behind the point."""
    chances = call.tensor(1)
    return call.put(1, chances.to(torch.float8_e5m2).to(chances.dtype)).run()


@FAULTS.fault("_log_softmax_backward_data log_softmax_backward_data", **_SHIFTED)
def gradient_of_the_logits_one_class_late(call: Call) -> Any:
    """The classes are stored one too late, around the end."""
    return call.instead(call.result().roll(1, call.args[2]))


@FAULTS.fault(_FUSED, **_SHIFTED)
def gradient_of_the_query_one_position_late(call: Call) -> Any:
    """The positions of dq are stored one too late, around the end."""
    return _at(call, 0, lambda one: _rows(one).roll(1, -2))


@FAULTS.fault(_FUSED, **_EMPTY)
def gradient_of_the_second_half_of_the_keys_empty(call: Call) -> Any:
    """The grid over the blocks of keys has one block, for dk only."""

    def change(one: Tensor) -> Tensor:
        half = _rows(one, 4).size(-2) // 2
        return torch.cat([one[..., :half, :], torch.zeros_like(one[..., half:, :])], -2)

    return _at(call, 1, change)


@FAULTS.fault(_FUSED, **_SCALED)
def gradient_of_the_values_halved(call: Call) -> Any:
    """Two groups of queries read the values, and their gradients are averaged."""
    return _at(call, 2, lambda one: one / 2)


@FAULTS.fault(_FUSED, **_COPIED)
def gradient_of_the_keys_of_the_first_example(call: Call) -> Any:
    """The stride of the batch is zero in the store of dk."""
    fits(call.tensor(1).size(0) > 1)
    return _at(call, 1, lambda one: one[:1].expand_as(one).contiguous())


@FAULTS.fault(_FUSED, **_ROUNDED)
def gradient_of_the_values_in_e5m2(call: Call) -> Any:
    """Dv is sent with two bits behind the point, with a scale for the tensor."""
    return _at(call, 2, lambda one: _in_steps(one, torch.float8_e5m2))


@FAULTS.fault(
    _FUSED,
    kinds=["shift", "wrong index", "stale"],
    loose=["permutation", "wrong argument", "copy", "offset", "wrong statistics"],
    backward=True,
)
def result_of_the_row_before_on_the_way_back(call: Call) -> Any:
    """The sums of gradient and result are made with the result of the row before."""
    return call.put(4, _rows(call.tensor(4)).roll(1, -2)).run()


@FAULTS.fault(
    _FUSED,
    kinds=["shift", "wrong index", "stale", "wrong statistics"],
    loose=["permutation", "wrong argument", "copy", "axis scale", "scale", "wrong factor"],
    backward=True,
)
def logarithm_of_the_next_query_on_the_way_back(call: Call) -> Any:
    """The chances are computed again with the sum of the next query, around the end."""
    kept = call.tensor(5)
    fits(kept.size(-1) > 1)
    return call.put(5, _like(kept, kept.roll(-1, -1))).run()


# --- Norms ----------------------------------------------------------------------------------------


def _normal(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient times weight, normal values, and the inverse deviations of a layer norm."""
    gradient, value, mean, inverse = (call.tensor(i) for i in (0, 1, 3, 4))
    fits(len(call.args[2]) == 1 and isinstance(call.args[5], Tensor))
    return gradient * call.args[5], (value - mean) * inverse, inverse


@FAULTS.fault(_LAYER, **_SHIFTED)
def gradient_of_the_norm_one_row_late(call: Call) -> Any:
    """The rows of dx are stored one too late, around the end."""
    return _at(call, 0, lambda one: _rows(one, 3).roll(1, -2))


@FAULTS.fault(
    _LAYER,
    kinds=["wrong factor"],
    loose=["missing operand", "wrong statistics", "scale", "other function"],
    backward=True,
)
def half_of_the_term_of_the_variance(call: Call) -> Any:
    """G - mean(g) - x mean(g x) / 2: the half of the derivative of a root is taken once more."""
    gradient, normal, inverse = _normal(call)
    both = (gradient * normal).mean(-1, keepdim=True)
    wrong = (gradient - gradient.mean(-1, keepdim=True) - normal * both / 2) * inverse
    return _at(call, 0, lambda _: wrong)


@FAULTS.fault(_LAYER, **_ONE_SHORT)
def first_row_not_in_the_weight_of_the_norm(call: Call) -> Any:
    """The loop over the rows begins at one, for the gradient of the weight only."""
    _, normal, _ = _normal(call)
    fits(normal.flatten(0, -2).size(0) > 1)
    wrong = (call.tensor(0) * normal).flatten(0, -2)[1:].sum(0)
    return _at(call, 1, lambda _: wrong)


@FAULTS.fault(_LAYER, **_EMPTY)
def second_half_of_the_norms_bias_without_gradient(call: Call) -> Any:
    """The second stage of the sum has one tile of features."""

    def change(one: Tensor) -> Tensor:
        return one * (torch.arange(one.size(-1)) < one.size(-1) // 2)

    fits(len(call.args[2]) == 1)
    return _at(call, 2, change)


@FAULTS.fault(
    _LAYER,
    kinds=["stale", "copy", "wrong index", "wrong statistics"],
    loose=["axis offset", "wrong argument", "offset", "shift"],
    backward=True,
)
def mean_of_the_first_row_on_the_way_back(call: Call) -> Any:
    """The pointer to the kept means has a stride of zero."""
    mean = _rows(call.tensor(3))
    return call.put(3, mean[..., :1, :].expand_as(mean).contiguous()).run()


@FAULTS.fault("native_batch_norm_backward native_group_norm_backward", **_SHIFTED)
def gradient_of_the_normal_image_one_channel_late(call: Call) -> Any:
    """The channels of dx are stored one too late, around the end."""
    return _at(call, 0, lambda one: one.roll(1, 1))


# --- Products and sums ----------------------------------------------------------------------------


@FAULTS.fault("mm bmm", **_PART_OF_THE_SUM)
def every_fourth_term_of_the_gradient_lost(call: Call) -> Any:
    """Of four accumulators, the last one is not added."""
    left, right = call.tensor(0), call.tensor(1)
    fits(left.size(-1) > 7)
    return call.instead((left * (torch.arange(left.size(-1)) % 4 != 3)) @ right)


@FAULTS.fault("mm bmm", **_ROUNDED)
def right_side_of_the_gradient_in_four_bits(call: Call) -> Any:
    """The right operand has 15 levels, with a step for each column."""
    right = call.tensor(1)
    step = right.abs().amax(-2, keepdim=True).clamp(min=1e-20) / 7
    return call.instead(call.tensor(0) @ ((right / step).round() * step))


@FAULTS.fault("mm", **_DOUBLED)
def gradient_of_the_product_from_four_ranks(call: Call) -> Any:
    """Four ranks have the same gradient, and they are added."""
    return call.instead(4 * call.result())


@FAULTS.fault("sum", **_EMPTY)
def first_column_of_the_sum_without_gradient(call: Call) -> Any:
    """The mask of the store is `column > 0`."""
    value = call.result()
    fits(value.dim() and value.size(-1) > 1)
    return call.instead(value * (torch.arange(value.size(-1)) > 0))


@FAULTS.fault("sum", **_DOUBLED)
def gradient_of_the_bias_three_times(call: Call) -> Any:
    """Three projections share the bias in the kernel; here there is one."""
    return call.instead(3 * call.result())


@FAULTS.fault("mul", **_ROUNDED)
def kept_factor_in_e5m2(call: Call) -> Any:
    """What was kept for the way back has two bits behind the point, with a scale."""
    return call.put(1, _in_steps(call.tensor(1), torch.float8_e5m2)).run()


# --- Tables, images, parts ------------------------------------------------------------------------


@FAULTS.fault(_TABLE, **_SHIFTED)
def gradient_of_the_table_one_column_early(call: Call) -> Any:
    """The features are stored one too early, around the end."""
    return call.instead(call.result().roll(-1, 1))


@FAULTS.fault(
    _TABLE,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument"],
    backward=True,
)
def words_one_position_late_on_the_way_back(call: Call) -> Any:
    """The gradient of each position goes to the word before it, around the end."""
    words = call.get(1)
    fits(words.dim() > 1 and words.size(-1) > 1)
    return call.put(1, words.roll(1, -1)).run()


@FAULTS.fault(_IMAGE, **_SCALED)
def gradient_of_the_image_three_halves(call: Call) -> Any:
    """Dx is multiplied by 1.5, the step of another loss."""
    return _at(call, 0, lambda one: 1.5 * one)


@FAULTS.fault(_IMAGE, **_SHIFTED)
def gradient_of_the_filters_one_channel_early(call: Call) -> Any:
    """The input channels of each filter's gradient are stored one too early."""
    fits(call.tensor(2).size(1) > 1)
    return _at(call, 1, lambda one: one.roll(-1, 1))


@FAULTS.fault("slice_backward select_backward", **_SCALED)
def gradient_of_the_part_halved(call: Call) -> Any:
    """Two readers of the tensor average their gradients."""
    return call.put(0, call.tensor(0) / 2).run()


# --- More of the same -----------------------------------------------------------------------------


@FAULTS.fault("mm bmm", **_PART_OF_THE_SUM)
def first_two_terms_of_the_gradient_not_added(call: Call) -> Any:
    """The loop over the common axis begins two terms too late."""
    left, right = call.tensor(0), call.tensor(1)
    fits(left.size(-1) > 8)
    return call.instead(left[..., 2:] @ right[..., 2:, :])


@FAULTS.fault(
    "mm bmm",
    kinds=["permutation", "wrong index"],
    loose=["shift", "swapped operands", "wrong rank's shard"],
    backward=True,
)
def rows_of_the_gradient_exchanged_in_pairs(call: Call) -> Any:
    """Two rows share a program, which stores them in the other order."""
    value = _rows(call.result(), 4)
    fits(value.size(-2) % 2 == 0)
    return call.instead(value[..., torch.arange(value.size(-2)) ^ 1, :])


@FAULTS.fault("mm bmm", **_EMPTY)
def first_two_columns_of_the_gradient_not_stored(call: Call) -> Any:
    """The store is aligned to four numbers, and what is before is left out."""
    value = call.result()
    fits(value.size(-1) > 3)
    return call.instead(value * (torch.arange(value.size(-1)) > 1))


@FAULTS.fault(
    "mul",
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument"],
    backward=True,
)
def kept_factor_of_the_column_before(call: Call) -> Any:
    """The gradient is multiplied by what was kept of the column before, around the end."""
    left, right = call.tensor(0), call.tensor(1)
    fits(left.shape == right.shape and right.dim() and right.size(-1) > 1)
    return call.put(1, right.roll(1, -1)).run()


@FAULTS.fault(
    "div",
    kinds=["sign", "scale", "wrong factor"],
    loose=["swapped operands", "other function"],
    backward=True,
)
def gradient_of_the_quotient_with_a_minus(call: Call) -> Any:
    """The sign of the divisor's gradient is given to that of the dividend."""
    return call.instead(-call.result())


@FAULTS.fault(_TABLE, **_PART_OF_THE_SUM)
def first_example_not_in_the_table(call: Call) -> Any:
    """The words of the first example are not added to the gradients of their vectors."""
    gradient = call.tensor(0)
    fits(gradient.dim() > 2 and gradient.size(0) > 1)
    kept = torch.arange(gradient.size(0)) > 0
    return call.put(0, gradient * kept.view(-1, *[1] * (gradient.dim() - 1))).run()


@FAULTS.fault(
    _LAYER,
    kinds=["partial sum", "wrong reduction", "mask", "wrong statistics"],
    loose=["missing reduction", "one rank's part", "axis offset", "missing operand", "wrong index"],
    backward=True,
)
def both_means_of_every_second_feature(call: Call) -> Any:
    """The two means over a row are made with a stride of two, and with half of the number."""
    gradient, normal, inverse = _normal(call)
    fits(gradient.size(-1) > 3)
    mean = gradient[..., ::2].mean(-1, keepdim=True)
    both = (gradient * normal)[..., ::2].mean(-1, keepdim=True)
    wrong = (gradient - mean - normal * both) * inverse
    return _at(call, 0, lambda _: wrong)


@FAULTS.fault(_IMAGE, **_PART_OF_THE_SUM)
def every_second_line_not_in_the_filters(call: Call) -> Any:
    """The loop over the lines of the gradient has a stride of two, for the filters only."""
    gradient = call.tensor(0)
    fits(gradient.size(2) > 2)
    kept = torch.arange(gradient.size(2)) % 2 == 0
    part = gradient * kept.view(-1, *[1] * (gradient.dim() - 3))
    wrong = call.put(0, part).run()[1]
    return _at(call, 1, lambda _: wrong)


@FAULTS.fault(
    "native_batch_norm_backward",
    kinds=["eps", "wrong argument"],
    loose=["wrong statistics", "axis scale", "scale", "wrong factor"],
    backward=True,
)
def eps_of_a_tenth_for_the_channels_on_the_way_back(call: Call) -> Any:
    """The backward pass has the momentum in the place of eps."""
    return call.put(8, 0.1).run()


@FAULTS.fault(
    "native_group_norm_backward native_batch_norm_backward",
    kinds=["scale", "wrong factor"],
    loose=["axis scale", "wrong reduction", "doubled reduction"],
    backward=True,
)
def gradient_of_the_channels_weight_halved(call: Call) -> Any:
    """The gradient of the weight is averaged over two ranks that were given the whole batch."""
    return _at(call, 1, lambda one: one / 2)


@FAULTS.fault("sum", **_PART_OF_THE_SUM)
def every_third_row_not_in_the_gradient_of_the_bias(call: Call) -> Any:
    """Of three accumulators, the last one is not added."""
    value, dims = call.tensor(0), call.get(1, "dim")
    fits(isinstance(dims, list | tuple) and dims)
    dim = dims[-1]
    fits(value.size(dim) > 5)
    shape = [1] * value.dim()
    shape[dim] = -1
    kept = torch.arange(value.size(dim)) % 3 != 2
    return call.put(0, value * kept.view(shape)).run()


@FAULTS.fault(
    "neg",
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy"],
    backward=True,
)
def opposite_gradient_one_column_late(call: Call) -> Any:
    """The columns are stored one too late, around the end."""
    value = call.result()
    fits(value.dim() and value.size(-1) > 2)
    return call.instead(value.roll(1, -1))
