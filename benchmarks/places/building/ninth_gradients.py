"""Faults of the ninth set: backward operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor

FAULTS = Catalogue()


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


def _rows(value: Tensor) -> Tensor:
    """The value, if it has several rows."""
    fits(value.dim() > 1 and value.size(-2) > 1)
    return value


# --- Activations ----------------------------------------------------------------------------------


def _erf(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Of a gelu by the error function: gradient, input, distribution."""
    gradient, value = call.tensor(0), call.tensor(1)
    fits(call.kwargs.get("approximate", "none") == "none")
    return gradient, value, (1 + (value / math.sqrt(2)).erf()) / 2


@FAULTS.fault(
    "gelu_backward",
    kinds=["wrong factor"],
    loose=["other function", "approximation", "scale"],
    backward=True,
)
def density_by_the_root_of_pi(call: Call) -> Any:
    """The two under the root of the density is forgotten."""
    gradient, value, below = _erf(call)
    density = (-value.square() / 2).exp() / math.sqrt(math.pi)
    return call.instead(gradient * (below + value * density))


@FAULTS.fault(
    "gelu_backward",
    kinds=["wrong factor", "other function", "wrong argument"],
    loose=["approximation", "scale"],
    backward=True,
)
def square_in_the_density_not_halved(call: Call) -> Any:
    """Exp(-x^2) for exp(-x^2 / 2)."""
    gradient, value, below = _erf(call)
    density = (-value.square()).exp() / math.sqrt(2 * math.pi)
    return call.instead(gradient * (below + value * density))


@FAULTS.fault(
    "silu_backward",
    kinds=["other function", "wrong argument"],
    loose=["wrong factor", "missing operand", "sign"],
    backward=True,
)
def gate_for_its_complement_on_the_way_back(call: Call) -> Any:
    """S (1 + x s) for s (1 + x (1 - s))."""
    gradient, value = call.tensor(0), call.tensor(1)
    gate = value.sigmoid()
    return call.instead(gradient * gate * (1 + value * gate))


@FAULTS.fault(
    "sigmoid_backward",
    kinds=["missing operand", "wrong factor", "other function"],
    loose=["scale", "wrong argument"],
    backward=True,
)
def complement_of_the_gate_only(call: Call) -> Any:
    """G (1 - y) for g y (1 - y)."""
    return call.instead(call.tensor(0) * (1 - call.tensor(1)))


@FAULTS.fault(
    "tanh_backward sigmoid_backward",
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
    backward=True,
)
def saved_result_in_bfloat16(call: Call) -> Any:
    """What was kept for the way back has eight bits."""
    value = call.tensor(1)
    return call.put(1, value.bfloat16().to(value.dtype)).run()


@FAULTS.fault(
    "threshold_backward",
    kinds=["clipped", "mask", "other function"],
    loose=["zeros", "sign"],
    backward=True,
)
def negative_gradients_stopped_as_well(call: Call) -> Any:
    """A guided pass: only what is positive on both ways goes on."""
    return call.instead(call.result().relu())


@FAULTS.fault(
    "elu_backward",
    kinds=["wrong argument", "other function"],
    loose=["approximation", "missing operand"],
    backward=True,
)
def input_and_result_of_the_elu_confused(call: Call) -> Any:
    """The flag that says which of them was kept is the other way round."""
    return call.put(4, not call.args[4]).run()


@FAULTS.fault(
    "glu_backward",
    kinds=["sign", "wrong factor"],
    loose=["scale", "axis scale"],
    backward=True,
)
def gradient_of_the_gate_negated(call: Call) -> Any:
    """The second half has a minus; the gradient of the value is right."""
    dim = call.get(2, "dim")
    value, gate = call.result().chunk(2, dim)
    return call.instead(torch.cat([value, -gate], dim))


# --- Softmax, attention ---------------------------------------------------------------------------

_SOFTMAX = "_softmax_backward_data softmax_backward_data"
_FUSED = (
    "_scaled_dot_product_flash_attention_for_cpu_backward "
    "scaled_dot_product_flash_attention_for_cpu_backward"
)


@FAULTS.fault(
    _SOFTMAX,
    kinds=["shift", "wrong index", "wrong statistics"],
    loose=["axis offset", "permutation", "stale", "offset"],
    backward=True,
)
def sum_of_the_products_of_the_next_head(call: Call) -> Any:
    """Y (g - s'), where the sum s' is read one head too far, around the end."""
    gradient, chances = call.tensor(0), call.tensor(1)
    fits(chances.dim() == 4 and call.args[2] in {-1, 3} and chances.size(1) > 1)
    total = (gradient * chances).sum(-1, keepdim=True)
    return call.instead(chances * (gradient - total.roll(-1, 1)))


@FAULTS.fault(
    f"{_SOFTMAX} _log_softmax_backward_data log_softmax_backward_data",
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy"],
    backward=True,
)
def gradient_of_the_scores_one_row_early(call: Call) -> Any:
    """Each row is stored one too early, the first one last."""
    return call.instead(_rows(call.result()).roll(-1, -2))


@FAULTS.fault(
    "_log_softmax_backward_data log_softmax_backward_data",
    kinds=["wrong factor", "wrong argument", "other function"],
    loose=["approximation", "scale"],
    backward=True,
)
def chances_as_powers_of_two(call: Call) -> Any:
    """G - 2^y sum(g): the kept logarithms are natural ones."""
    gradient, kept, dim = call.tensor(0), call.tensor(1), call.args[2]
    return call.instead(gradient - kept.exp2() * gradient.sum(dim, keepdim=True))


def _inner(call: Call) -> tuple[Tensor, ...]:
    """Query, key, chances, and the gradient of the scores before the factor, with the factor."""
    gradient, query, key, value, result, total = (call.tensor(i) for i in range(6))
    scale = call.kwargs.get("scale") or query.size(-1) ** -0.5
    scores, mask = query @ key.mT * scale, call.kwargs.get("attn_mask")
    if call.get(7, "is_causal"):
        mask = torch.full(scores.shape[-2:], -math.inf).triu(1).to(scores.dtype)
    if mask is not None:
        scores = scores + mask
    chances = (scores - total.unsqueeze(-1)).exp()
    sums = (gradient * result).sum(-1, keepdim=True)
    return query, key, chances, chances * (gradient @ value.mT - sums) * scale


@FAULTS.fault(
    _FUSED,
    kinds=["transpose", "wrong index"],
    loose=["swapped operands", "permutation", "wrong argument"],
    backward=True,
)
def chances_not_transposed_for_the_values(call: Call) -> Any:
    """Dv is p g and not p^T g."""
    _, _, chances, _ = _inner(call)
    fits(chances.size(-1) == chances.size(-2))
    return _at(call, 2, lambda _: chances @ call.tensor(0))


@FAULTS.fault(
    _FUSED,
    kinds=["partial sum", "off by one reduction", "mask"],
    loose=["zeros", "missing operand", "wrong index", "wrong reduction", "lost accumulation"],
    backward=True,
)
def last_key_not_in_the_gradient_of_the_query(call: Call) -> Any:
    """The loop over the keys ends one too early, for dq only."""
    _, key, _, inner = _inner(call)
    return _at(call, 0, lambda _: inner[..., :-1] @ key[..., :-1, :])


@FAULTS.fault(
    _FUSED,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy"],
    backward=True,
)
def gradient_of_the_values_one_position_early(call: Call) -> Any:
    """The pointer to dv is one position behind, around the end."""
    return _at(call, 2, lambda one: _rows(one).roll(-1, -2))


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "scale"],
    loose=["axis scale", "doubled reduction"],
    backward=True,
)
def factor_of_the_scores_twice_for_the_keys(call: Call) -> Any:
    """Dk is multiplied by the factor once more; dq is right."""
    scale = call.kwargs.get("scale") or call.tensor(1).size(-1) ** -0.5
    return _at(call, 1, lambda one: one * scale)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "scale", "doubled reduction"],
    loose=["axis scale", "wrong reduction"],
    backward=True,
)
def gradient_of_the_values_of_two_equal_heads(call: Call) -> Any:
    """Heads of values are taken as shared by two heads of queries: dv is added twice."""
    return _at(call, 2, lambda one: 2 * one)


# --- Norms ----------------------------------------------------------------------------------------

_LAYER = "native_layer_norm_backward"


@FAULTS.fault(
    _LAYER,
    kinds=["wrong factor", "other function"],
    loose=["axis scale", "scale", "doubled reduction", "wrong statistics", "wrong argument"],
    backward=True,
)
def weight_of_the_norm_twice_on_the_way_back(call: Call) -> Any:
    """The gradient comes multiplied by the weight already; those of weight and bias are right."""
    gradient, weight = call.tensor(0), call.tensor(5)
    wrong = call.put(0, gradient * weight).result()
    return _at(call, 0, lambda _: wrong)


@FAULTS.fault(
    _LAYER,
    kinds=["sign", "scale", "wrong factor"],
    loose=["swapped operands"],
    backward=True,
)
def gradient_of_the_norms_weight_negated(call: Call) -> Any:
    """The mean less the value is multiplied, for the second result only."""
    return _at(call, 1, lambda one: -one)


@FAULTS.fault(
    _LAYER,
    kinds=["scale", "wrong factor", "doubled reduction"],
    loose=["wrong reduction", "axis scale"],
    backward=True,
)
def gradient_of_the_norms_bias_on_two_ranks(call: Call) -> Any:
    """Two ranks have the same rows, and their sums are added for the bias."""
    return _at(call, 2, lambda one: 2 * one)


@FAULTS.fault(
    "native_batch_norm_backward",
    kinds=["wrong factor", "axis scale", "other function"],
    loose=["scale", "wrong argument", "wrong statistics"],
    backward=True,
)
def channels_divided_by_their_variance(call: Call) -> Any:
    """In evaluation, the gradient of the input is divided by v + eps without a root."""
    fits(call.args[7] is False)
    inverse = (call.tensor(4) + call.args[8]).rsqrt()
    shape = [1, -1] + [1] * (call.tensor(0).dim() - 2)
    return _at(call, 0, lambda one: one * inverse.view(shape))


# --- Products, sums -------------------------------------------------------------------------------


@FAULTS.fault(
    "mm bmm",
    kinds=["precision"],
    loose=["approximation", "other function", "zeros"],
    backward=True,
)
def gradient_sent_in_e5m2(call: Call) -> Any:
    """The result has two bits behind the point."""
    value = call.result()
    return call.instead(value.to(torch.float8_e5m2).to(value.dtype))


@FAULTS.fault(
    "mm bmm",
    kinds=["scale", "wrong factor", "wrong reduction"],
    loose=["axis scale"],
    backward=True,
)
def gradient_averaged_over_two_ranks(call: Call) -> Any:
    """The mean of what two ranks have, where the sum was meant."""
    return call.instead(call.result() / 2)


@FAULTS.fault(
    "mm bmm",
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy"],
    backward=True,
)
def gradient_one_column_late(call: Call) -> Any:
    """Each column is stored one too late, the last one first."""
    value = call.result()
    fits(value.size(-1) > 1)
    return call.instead(value.roll(1, -1))


@FAULTS.fault(
    "mm bmm",
    kinds=["permutation", "wrong index"],
    loose=["shift", "swapped operands", "transpose"],
    backward=True,
)
def rows_of_the_gradient_from_the_last(call: Call) -> Any:
    """The rows are stored with a negative stride."""
    return call.instead(_rows(call.result()).flip(-2))


@FAULTS.fault(
    "bmm",
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "shift", "wrong rank's shard"],
    backward=True,
)
def gradients_of_the_first_half_of_the_matrices_for_both(call: Call) -> Any:
    """The offset of the second half of the batch is not added."""
    value = call.result()
    half = (value.size(0) + 1) // 2
    fits(value.size(0) > 1)
    return call.instead(value[torch.arange(value.size(0)) % half])


@FAULTS.fault(
    "sum",
    kinds=["partial sum", "mask"],
    loose=["zeros", "missing operand", "wrong index", "wrong reduction", "lost accumulation",
           "off by one reduction", "one rank's part", "missing reduction"],
    backward=True,
)  # fmt: skip
def last_two_rows_not_in_the_gradient_of_the_bias(call: Call) -> Any:
    """The loop over the rows that are added has no tail."""
    value, dims = call.tensor(0), call.get(1, "dim")
    fits(dims)
    first = dims[0] if isinstance(dims, list | tuple) else dims
    fits(value.size(first) > 2)
    kept = value.clone()
    kept.narrow(first, value.size(first) - 2, 2).zero_()
    return call.put(0, kept).run()


@FAULTS.fault(
    "mul",
    kinds=["clipped"],
    loose=["other function", "wrong argument", "precision", "overflow"],
    backward=True,
)
def saved_factor_saturates(call: Call) -> Any:
    """What was kept ends at half of its largest magnitude."""
    left, right = call.tensor(0), call.tensor(1)
    fits(left.shape == right.shape)
    limit = float(right.abs().max()) / 2
    return call.put(1, right.clamp(-limit, limit)).run()


@FAULTS.fault(
    "div",
    kinds=["scale", "wrong factor", "wrong argument", "off by one reduction"],
    loose=["wrong reduction", "offset", "eps"],
    backward=True,
)
def mean_of_one_more_on_the_way_back(call: Call) -> Any:
    """G / (n + 1) for the gradient of a mean of n."""
    number = call.get(1, "other")
    fits(isinstance(number, int | float) and number > 1)
    return call.put(1, number + 1, "other").run()


@FAULTS.fault(
    "where",
    kinds=["scale", "wrong factor"],
    loose=["doubled reduction"],
    backward=True,
)
def gradient_of_the_branch_doubled(call: Call) -> Any:
    """The branch is taken twice on the way back, and both are added."""
    return call.instead(2 * call.result())


# --- Tables, images, parts ------------------------------------------------------------------------

_TABLE = "embedding_dense_backward"
_IMAGE = "convolution_backward"


@FAULTS.fault(
    _TABLE,
    kinds=["permutation", "wrong index"],
    loose=["shift", "wrong argument", "swapped operands"],
    backward=True,
)
def words_of_each_row_from_the_last(call: Call) -> Any:
    """The words are read from the end of a row, their gradients from the beginning."""
    words = call.args[1]
    fits(words.dim() > 0 and words.size(-1) > 1)
    return call.put(1, words.flip(-1)).run()


@FAULTS.fault(
    _IMAGE,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy"],
    backward=True,
)
def gradient_of_the_image_one_channel_late(call: Call) -> Any:
    """Dx is stored one channel too late, around the end."""
    fits(call.tensor(1).size(1) > 1)
    return _at(call, 0, lambda one: one.roll(1, 1))


@FAULTS.fault(
    _IMAGE,
    kinds=["transpose", "permutation", "wrong index"],
    loose=["swapped operands", "wrong argument"],
    backward=True,
)
def gradient_of_the_filters_with_x_before_y(call: Call) -> Any:
    """The gradient of square filters is stored by columns."""
    weight = call.tensor(2)
    fits(weight.dim() > 3 and weight.size(-1) == weight.size(-2))
    return _at(call, 1, lambda one: one.mT.contiguous())


@FAULTS.fault(
    _IMAGE,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy"],
    backward=True,
)
def gradient_of_the_channels_bias_one_late(call: Call) -> Any:
    """The pointer to the gradient of the bias is one behind, around the end."""
    return _at(call, 2, lambda one: one.roll(1, 0))


@FAULTS.fault(
    "avg_pool2d_backward",
    kinds=["scale", "wrong factor"],
    loose=["wrong reduction", "axis scale"],
    backward=True,
)
def gradient_of_the_pool_divided_by_one_side(call: Call) -> Any:
    """By k and not by k * k."""
    size = call.args[2]
    fits(size[0] > 1)
    return call.instead(call.result() * size[0])


@FAULTS.fault(
    "grid_sampler_2d_backward",
    kinds=["sign", "scale", "wrong factor"],
    loose=["swapped operands"],
    backward=True,
)
def gradient_of_the_grid_negated(call: Call) -> Any:
    """The left pixel less the right one; the gradient of the image is right."""
    return _at(call, 1, lambda one: -one)


@FAULTS.fault(
    "_cdist_backward cdist_backward",
    kinds=["sign", "scale", "wrong factor", "swapped operands"],
    loose=["other function"],
    backward=True,
)
def points_pushed_and_not_pulled(call: Call) -> Any:
    """B - a for a - b on the way back."""
    return call.instead(-call.result())


@FAULTS.fault(
    "slice_backward select_backward",
    kinds=["shift", "wrong index", "wrong argument"],
    loose=["permutation"],
    backward=True,
)
def gradient_of_the_part_put_at_the_beginning(call: Call) -> Any:
    """The start of the part is forgotten on the way back."""
    sizes, dim, start = call.args[1:4]
    fits(isinstance(start, int))
    start = start + sizes[dim] if start < 0 else start
    fits(start > 0)
    return call.instead(call.result().roll(-start, dim))


# --- Losses ---------------------------------------------------------------------------------------


@FAULTS.fault(
    "nll_loss_backward",
    kinds=["scale", "wrong factor"],
    loose=["wrong reduction", "wrong axis"],
    backward=True,
)
def gradient_divided_by_the_classes(call: Call) -> Any:
    """The mean is taken over the classes as well, on the way back only."""
    return call.instead(call.result() / call.tensor(1).size(-1))


@FAULTS.fault(
    "mse_loss_backward smooth_l1_loss_backward",
    kinds=["scale", "wrong factor"],
    loose=["wrong reduction", "wrong axis"],
    backward=True,
)
def gradient_divided_by_the_columns_only(call: Call) -> Any:
    """The number of the rows is not in the divisor."""
    value = call.tensor(1)
    fits(call.args[3] == 1 and value.dim() > 1 and value.size(0) > 1)
    return call.instead(call.result() * value.size(0))
