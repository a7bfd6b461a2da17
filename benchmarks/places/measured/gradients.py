"""Faults for measuring: backward operators."""

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
_REORDERED: dict[str, Any] = {
    "kinds": ["permutation", "wrong index"],
    "loose": ["shift", "copy", "stale", "transpose", "wrong rank's shard", "swapped operands"],
    "backward": True,
}
_HALVES: dict[str, Any] = {
    "kinds": ["permutation", "wrong index", "shift", "wrong rank's shard"],
    "loose": ["copy", "stale", "transpose", "swapped operands"],
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
    "loose": ["missing operand", "constant", "one rank's part", "axis scale", "wrong factor",
              "partial sum"],
    "backward": True,
}  # fmt: skip
_COPIED: dict[str, Any] = {
    "kinds": ["copy", "stale", "wrong index"],
    "loose": ["permutation", "shift", "wrong rank's shard", "one rank's part"],
    "backward": True,
}
_PART_OF_THE_SUM: dict[str, Any] = {
    "kinds": ["partial sum", "mask", "wrong reduction"],
    "loose": ["missing operand", "wrong index", "lost accumulation", "off by one reduction",
              "missing reduction", "one rank's part", "zeros"],
    "backward": True,
}  # fmt: skip
_ONE_SHORT: dict[str, Any] = {
    "kinds": ["partial sum", "off by one reduction", "mask", "wrong reduction"],
    "loose": ["missing operand", "wrong index", "lost accumulation", "zeros", "one rank's part"],
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


@FAULTS.fault(_ALL, **_REORDERED)
def gradient_of_the_activation_from_the_last_row(call: Call) -> Any:
    """The rows are stored in the order of programs that count down."""
    return call.instead(_rows(call.result(), 3).flip(-2))


@FAULTS.fault(_ALL, **_SCALED)
def gradient_of_the_activation_four_times(call: Call) -> Any:
    """Four steps are accumulated, and the division by four is left to somebody else."""
    return call.instead(4 * call.result())


@FAULTS.fault(_ALL, **_EMPTY)
def last_quarter_of_the_activation_without_gradient(call: Call) -> Any:
    """Of four tiles of columns, three are stored."""
    value = call.result()
    fits(value.dim() and value.size(-1) > 3)
    width = value.size(-1)
    return call.instead(value * (torch.arange(width) < width - width // 4))


@FAULTS.fault(
    _BY_INPUT,
    kinds=["offset", "wrong argument"],
    loose=["other function", "axis offset", "residual"],
    backward=True,
)
def slope_at_a_half_more(call: Call) -> Any:
    """F'(x + 1/2): the zero point of the kept input is not taken back."""
    return call.put(1, call.tensor(1) + 0.5).run()


@FAULTS.fault(
    _BY_INPUT,
    kinds=["clipped", "wrong argument"],
    loose=["other function", "zeros", "mask", "approximation"],
    backward=True,
)
def kept_input_not_below_zero(call: Call) -> Any:
    """What was kept are numbers without a sign: what was negative is zero."""
    return call.put(1, call.tensor(1).clamp(min=0)).run()


@FAULTS.fault("gelu_backward", kinds=["other function"], loose=["approximation"], backward=True)
def slope_of_the_silu_for_the_gelu(call: Call) -> Any:
    """S(x) (1 + x (1 - s(x))): the table of derivatives has the wrong line."""
    value = call.tensor(1)
    gate = value.sigmoid()
    return call.instead(call.tensor(0) * gate * (1 + value * (1 - gate)))


@FAULTS.fault(
    "tanh_backward",
    kinds=["other function"],
    loose=["approximation", "wrong argument"],
    backward=True,
)
def root_of_the_slope_of_the_tanh(call: Call) -> Any:
    """G sqrt(1 - y²), as if y was a sine."""
    result = call.tensor(1)
    return call.instead(call.tensor(0) * (1 - result.square()).clamp(min=0).sqrt())


# --- Softmax and attention ------------------------------------------------------------------------


def _terms(call: Call) -> tuple[Tensor, Tensor, int]:
    """Gradient times chances, the chances, and the axis of a softmax."""
    gradient, chances, dim = call.tensor(0), call.tensor(1), call.args[2]
    fits(chances.size(dim) > 2)
    return gradient * chances, chances, dim


@FAULTS.fault(
    _SOFTMAX,
    kinds=["partial sum", "mask", "wrong reduction"],
    loose=["missing operand", "wrong index", "lost accumulation", "axis offset", "offset"],
    backward=True,
)
def sum_of_every_second_product_subtracted(call: Call) -> Any:
    """The loop that adds g p has a stride of two."""
    terms, chances, dim = _terms(call)
    some = terms.index_select(dim, torch.arange(0, terms.size(dim), 2))
    return call.instead(terms - chances * some.sum(dim, keepdim=True))


@FAULTS.fault(_SOFTMAX, **_REORDERED)
def gradient_of_the_scores_in_pairs(call: Call) -> Any:
    """Two keys share a word, and are stored in the other order."""
    value, dim = call.result(), call.args[2]
    fits(value.size(dim) > 2 and value.size(dim) % 2 == 0)
    return call.instead(value.index_select(dim, torch.arange(value.size(dim)) ^ 1))


@FAULTS.fault(_FUSED, **_COPIED)
def gradient_of_the_values_of_the_first_head(call: Call) -> Any:
    """The stride of the heads is zero in the store of dv."""
    fits(call.tensor(3).size(1) > 1)
    return _at(call, 2, lambda one: one[:, :1].expand_as(one).contiguous())


@FAULTS.fault(_FUSED, **_DOUBLED)
def gradient_of_the_query_from_two_ranks(call: Call) -> Any:
    """Two ranks have the same queries, and their dq are added."""
    return _at(call, 0, lambda one: 2 * one)


@FAULTS.fault(_FUSED, **_ONE_SHORT)
def last_query_not_in_the_gradient_of_the_values(call: Call) -> Any:
    """The loop over the queries ends one too early, for dv only."""
    gradient = _rows(call.tensor(0), 3)
    kept = (torch.arange(gradient.size(-2)) < gradient.size(-2) - 1).unsqueeze(-1)
    wrong = call.put(0, _like(gradient, gradient * kept)).run()[2]
    return _at(call, 2, lambda _: wrong)


@FAULTS.fault(_FUSED, **_HALVES)
def halves_of_the_gradient_of_the_keys_exchanged(call: Call) -> Any:
    """The two halves of each head are stored in the other order, as for a rotation."""

    def change(one: Tensor) -> Tensor:
        fits(one.size(-1) > 2 and one.size(-1) % 2 == 0)
        return one.roll(one.size(-1) // 2, -1)

    return _at(call, 1, change)


# --- Norms ----------------------------------------------------------------------------------------


def _normal(call: Call) -> tuple[Tensor, Tensor]:
    """The gradient, and the normal values of a layer norm."""
    gradient, value, mean, inverse = (call.tensor(i) for i in (0, 1, 3, 4))
    fits(len(call.args[2]) == 1 and isinstance(call.args[5], Tensor))
    return gradient, (value - mean) * inverse


@FAULTS.fault(
    _LAYER,
    kinds=["wrong factor", "wrong statistics", "wrong argument"],
    loose=["scale", "axis scale", "missing operand"],
    backward=True,
)
def kept_deviation_doubled_on_the_way_back(call: Call) -> Any:
    """The kept inverse deviation is halved for half precision, and not doubled again."""
    return call.put(4, call.tensor(4) / 2).run()


@FAULTS.fault(_LAYER, **_PART_OF_THE_SUM)
def middle_half_of_the_rows_not_in_the_norms_weight(call: Call) -> Any:
    """Of four partial sums of rows, two are not added, for the gradient of the weight only."""
    gradient, normal = _normal(call)
    rows = (gradient * normal).flatten(0, -2)
    size = rows.size(0)
    fits(size > 3)
    wrong = rows[: size // 4].sum(0) + rows[size - size // 4 :].sum(0)
    return _at(call, 1, lambda _: wrong)


@FAULTS.fault(_LAYER, **_HALVES)
def halves_of_the_rows_of_the_norms_gradient_exchanged(call: Call) -> Any:
    """The positions of two ranks are gathered in the other order."""

    def change(one: Tensor) -> Tensor:
        fits(_rows(one, 4).size(-2) % 2 == 0)
        return one.roll(one.size(-2) // 2, -2)

    return _at(call, 0, change)


# --- Products, sums, factors ----------------------------------------------------------------------


@FAULTS.fault("mm bmm", **_PART_OF_THE_SUM)
def middle_half_of_the_terms_of_the_gradient_not_added(call: Call) -> Any:
    """The second and the third of four blocks of the common axis are lost."""
    left, right = call.tensor(0), call.tensor(1)
    size = left.size(-1)
    fits(size > 7)
    place = torch.arange(size)
    kept = (place < size // 4) | (place >= size - size // 4)
    return call.instead((left * kept) @ right)


@FAULTS.fault("mm bmm", **_HALVES)
def halves_of_the_columns_of_the_gradient_exchanged(call: Call) -> Any:
    """Gate and value share a weight, and their gradients are stored in the other order."""
    value = call.result()
    fits(value.size(-1) > 3 and value.size(-1) % 2 == 0)
    return call.instead(value.roll(value.size(-1) // 2, -1))


@FAULTS.fault("mm bmm", **_SCALED)
def gradient_of_the_product_times_a_tenth(call: Call) -> Any:
    """The rate of the step is multiplied in before the optimiser does so."""
    return call.instead(call.result() / 10)


@FAULTS.fault("mm bmm", **_ROUNDED)
def left_side_of_the_gradient_in_e4m3(call: Call) -> Any:
    """The left operand has three bits behind the point, with a scale for the tensor."""
    return call.put(0, _in_steps(call.tensor(0), torch.float8_e4m3fn)).run()


@FAULTS.fault("sum", **_PART_OF_THE_SUM)
def last_quarter_of_the_rows_not_in_the_gradient_of_the_bias(call: Call) -> Any:
    """Of four partial sums, the last is read before it is written: it is not added."""
    value, dims = call.tensor(0), call.get(1, "dim")
    fits(isinstance(dims, list | tuple) and dims)
    dim = dims[-1]
    size = value.size(dim)
    fits(size > 11)
    shape = [1] * value.dim()
    shape[dim] = -1
    return call.put(0, value * (torch.arange(size) < size - size // 4).view(shape)).run()


@FAULTS.fault("sum", **_REORDERED)
def gradient_of_the_bias_in_pairs(call: Call) -> Any:
    """Two columns share a word, and are stored in the other order."""
    value = call.result()
    fits(value.dim() and value.size(-1) > 2 and value.size(-1) % 2 == 0)
    return call.instead(value[..., torch.arange(value.size(-1)) ^ 1])


@FAULTS.fault(
    "mul",
    kinds=["copy", "stale", "wrong index"],
    loose=["wrong argument", "shift", "permutation", "one rank's part"],
    backward=True,
)
def kept_factor_of_the_first_row(call: Call) -> Any:
    """The stride of the rows is zero in the load of what was kept."""
    left, right = call.tensor(0), call.tensor(1)
    fits(left.shape == right.shape)
    return call.put(1, _rows(right, 3)[..., :1, :].expand_as(right).contiguous()).run()


@FAULTS.fault(
    "add",
    kinds=["missing operand", "lost accumulation", "copy"],
    loose=["partial sum", "stale", "zeros", "residual", "one rank's part", "missing reduction",
           "wrong factor", "other function"],
    backward=True,
)  # fmt: skip
def second_gradient_overwrites_the_first(call: Call) -> Any:
    """A value with two readers: the gradient of the second is stored and not added."""
    left, right = call.tensor(0), call.tensor(1)
    fits(left.shape == right.shape and call.get(2, "alpha", default=1) == 1)
    return call.instead(right.clone())


@FAULTS.fault("neg", **_SCALED)
def opposite_gradient_halved(call: Call) -> Any:
    """Both operands of a difference get half of the gradient."""
    return call.instead(call.result() / 2)


@FAULTS.fault("add", **_SCALED)
def gradients_of_two_readers_averaged(call: Call) -> Any:
    """A value with two readers: the mean of the two gradients where their sum was meant."""
    fits(isinstance(call.get(1, "other"), Tensor))
    return call.instead(call.result() / 2)


# --- Tables, images, parts, losses ----------------------------------------------------------------


@FAULTS.fault(_TABLE, **_PART_OF_THE_SUM)
def first_half_of_each_text_not_in_the_table(call: Call) -> Any:
    """The positions of the other rank are not added to the gradients of their words."""
    gradient = _rows(call.tensor(0), 4)
    fits(gradient.dim() > 2)
    late = (torch.arange(gradient.size(-2)) >= gradient.size(-2) // 2).unsqueeze(-1)
    return call.put(0, gradient * late).run()


@FAULTS.fault(_TABLE, **_SCALED)
def gradient_of_the_table_divided_by_eight(call: Call) -> Any:
    """The gradient is averaged over eight ranks, and the table lies on each of them."""
    return call.instead(call.result() / 8)


@FAULTS.fault(_IMAGE, **_DOUBLED)
def gradient_of_the_filters_from_two_ranks(call: Call) -> Any:
    """Two ranks have the same images, and their gradients of the filters are added."""
    return _at(call, 1, lambda one: 2 * one)


@FAULTS.fault(_IMAGE, **_EMPTY)
def first_line_of_the_image_without_gradient(call: Call) -> Any:
    """The loop over the lines of dx begins at one."""

    def change(one: Tensor) -> Tensor:
        fits(one.size(2) > 1)
        return one * (torch.arange(one.size(2)) > 0).view(-1, *[1] * (one.dim() - 3))

    return _at(call, 0, change)


@FAULTS.fault("slice_backward select_backward", **_SHIFTED)
def gradient_of_the_part_one_row_late(call: Call) -> Any:
    """The rows of what comes from behind are read one too early, around the end."""
    return call.put(0, _rows(call.tensor(0), 3).roll(1, -2)).run()


@FAULTS.fault("nll_loss_backward", **_SHIFTED)
def gradient_of_the_label_one_class_late(call: Call) -> Any:
    """The classes are stored one too late, the last one first."""
    return call.instead(call.result().roll(1, -1 if call.tensor(1).dim() < 3 else 1))
