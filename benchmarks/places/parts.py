"""What a fault reads of a call, and what it gives back: shared by all sets of both halves."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, fits, with_gradient_of
from torch import Tensor

_NAMES = ("query", "key", "value")


def read_angles(call: Call) -> Tensor:
    value = call.tensor(0)
    fits(value.dim() > 1 and value.size(-1) > 3 and value.size(-2) > 1)
    return value


def condition_of(call: Call) -> tuple[int, Tensor, str]:
    """Where the condition is, it, and the name of its argument."""
    place, name = (0, "condition") if call.name == "where" else (1, "mask")
    mask = call.get(place, name)
    fits(isinstance(mask, Tensor) and mask.dim() > 1 and mask.dtype == torch.bool)
    return place, mask, name


def softmax_row(call: Call) -> tuple[Tensor, Tensor]:
    """Scores over the last axis, and the result."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(isinstance(dim, int) and dim % value.dim() == value.dim() - 1 and value.size(-1) > 2)
    return value, call.result()


def added_bias(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, what is added to them (finite numbers), values."""
    scores, mask, value = scores_before_mask(call)
    fits(mask is not None and mask.is_floating_point())
    assert mask is not None
    fits(bool((mask.detach().abs() < 1e3).all()) and bool(mask.detach().any()))
    return scores, mask, value


def scores_before_mask(call: Call) -> tuple[Tensor, Tensor | None, Tensor]:
    """Scores before the mask, the mask, the values."""
    query, key, value, scale = attention_operands(call)
    scores = query @ key.mT * scale
    return scores, mask_of(call, *scores.shape[-2:]), value


def mask_of(call: Call, rows: int, columns: int) -> Tensor | None:
    """What is seen (bool), or what is added to the scores; None if there is no mask."""
    is_flash = call.name == "flash_attention"
    if call.get(4 if is_flash else 5, "is_causal", default=False):
        return torch.ones(rows, columns, dtype=torch.bool).tril()
    return call.kwargs.get("attn_mask") if is_flash else call.get(3, "attn_mask")


def attention_operands(call: Call) -> tuple[Tensor, Tensor, Tensor, float]:
    """Query, key and value with the same number of heads, and the factor of the scores."""
    query, key, value = (call.tensor(i, n) for i, n in enumerate(("query", "key", "value")))
    times = query.size(-3) // key.size(-3)
    key, value = (one.repeat_interleave(times, -3) for one in (key, value))
    return query, key, value, call.kwargs.get("scale") or query.size(-1) ** -0.5


def seen_keys(mask: Tensor) -> Tensor:
    """Which keys are seen, as booleans."""
    return mask if mask.dtype == torch.bool else mask > -1e4


def weigh_values(call: Call, scores: Tensor, mask: Tensor | None, value: Tensor) -> Any:
    return call.instead(hide_scores(scores, mask).softmax(-1) @ value)


def hide_scores(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def softmax_chances(call: Call) -> tuple[Tensor, Tensor]:
    gradient, chances = call.tensor(0), call.tensor(1)
    fits(chances.dim() > 1 and call.args[2] in {-1, chances.dim() - 1} and chances.size(-1) > 2)
    return gradient, chances


def change_result_at(call: Call, place: int, change: Any) -> Any:
    """All results, one of them changed."""
    results = list(call.run())
    fits(isinstance(results[place], Tensor))
    results[place] = lay_out_like(results[place], change(results[place]))
    return tuple(results)


def lay_out_like(kept: Tensor, value: Tensor) -> Tensor:
    """The value in the layout of another: later views depend on it."""
    fits(value.shape == kept.shape)
    if value.stride() == kept.stride() or 0 in kept.stride():
        return value
    return torch.empty_strided(kept.shape, kept.stride(), dtype=kept.dtype).copy_(value)


def lookup_indices(call: Call) -> tuple[int, Tensor]:
    """Where the indices of a lookup are, and they."""
    place = next(
        i
        for i, one in enumerate(call.args)
        if isinstance(one, Tensor) and not one.is_floating_point()
    )
    return place, call.args[place]


def columns_of(value: Any, least: int = 2) -> Tensor:
    value = floats_only(value)
    fits(value.dim() > 0 and value.size(-1) >= least)
    return value


def floats_only(value: Any) -> Tensor:
    fits(isinstance(value, Tensor) and value.is_floating_point())
    return value


def rows_of(value: Any, least: int = 2) -> Tensor:
    value = floats_only(value)
    fits(value.dim() > 1 and value.size(-2) >= least)
    return value


def labels_of(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (or their logarithms), labels, and which of them count."""
    scores, labels = call.tensor(0, "input"), call.get(1, "target")
    fits(not labels.is_floating_point() and scores.dim() == 2)
    return scores, labels, labels != call.kwargs.get("ignore_index", -100)


def filters_of(call: Call) -> Tensor:
    weight = call.tensor(1, "weight")
    is_transposed = call.name == "convolution" and bool(call.get(6, "transposed"))
    fits(weight.dim() > 2 and not is_transposed)
    return weight


def several_matrices(call: Call) -> Tensor:
    value = call.result()
    fits(value.dim() > 2 and value.size(-1) > 1 and value.size(-2) > 1)
    return value


def layer_product(call: Call, left: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    value = left @ weight
    return call.instead(value if bias is None else value + bias)


def layer_parts(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input, weight as (in, out), bias."""
    if call.name == "linear":
        weight, bias = call.tensor(1, "weight"), call.get(2, "bias")
        fits(weight.dim() == 2)
        return call.tensor(0, "input"), weight.t(), bias
    if call.name == "addmm":
        return call.tensor(1), call.tensor(2), call.tensor(0)
    return call.tensor(0), call.tensor(1), None


def reduced_dim(call: Call, least: int = 3) -> tuple[Tensor, int, bool]:
    """Value, the one axis that is reduced, and whether it is kept."""
    value, dim = call.tensor(0), call.get(1, "dim")
    if isinstance(dim, list | tuple):
        fits(len(dim) == 1)
        dim = dim[0]
    fits(isinstance(dim, int) and value.size(dim) >= least)
    return value, dim, bool(call.get(2, "keepdim", default=False))


def channel_parts(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """Input, weight, bias, mean, variance (shaped like channels) and eps."""
    is_whole = call.name == "batch_norm"
    value = call.tensor(0, "input")
    shape = (1, -1, *[1] * (value.dim() - 2))
    places = (3, 4, 1, 2) if is_whole else (1, 2, 3, 4)
    weight, bias, mean, variance = (call.tensor(i).view(shape) for i in places)
    return value, weight, bias, mean, variance, call.get(7 if is_whole else 6, "eps")


def several_along(value: Tensor, axis: int = -2) -> Tensor:
    """The value, if it is longer than one along an axis."""
    fits(value.dim() >= (-axis if axis < 0 else axis + 1) and value.size(axis) > 1)
    return value


def trained_weight(weight: Any) -> Tensor:
    """A weight whose elements are not all the same."""
    fits(isinstance(weight, Tensor) and weight.dim() == 1)
    fits(bool((weight.detach() != weight.detach()[0]).any()))
    return weight


def norm_by(call: Call, mean: Tensor, spread: Tensor) -> Any:
    """The norm with another mean and variance."""
    value, weight, bias, eps = norm_row(call)
    return apply_affine(call, (value - mean) * (spread + eps).rsqrt(), weight, bias)


def apply_affine(call: Call, normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
    value = normal if weight is None else normal * weight
    return call.instead(value if bias is None else value + bias)


def norm_row(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
    """Input, weight, bias and eps of a norm over the last axis."""
    value, shape = call.tensor(0, "input"), call.get(1, "normalized_shape")
    fits(len(shape) == 1)
    weight = call.get(2, "weight")
    is_layer = call.name == "layer_norm"
    bias = call.get(3, "bias") if is_layer else None
    return value, weight, bias, call.get(4 if is_layer else 3, "eps") or 1e-5


def moments_of_rows(call: Call, value: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (zero, if the norm has none) and variance of the rows."""
    mean = value.mean(-1, keepdim=True)
    if call.name == "rms_norm":
        mean = 0 * mean
    return mean, (value - mean).square().mean(-1, keepdim=True)


def equal_pair(call: Call) -> tuple[Tensor, Tensor]:
    """Two floating-point operands of one shape."""
    left, right = floating_pair(call)
    fits(left.shape == right.shape)
    return left, right


def floating_pair(call: Call) -> tuple[Tensor, Tensor]:
    """Two floating-point operands."""
    left, right = call.tensor(0), call.tensor(1)
    fits(right.numel() > 1 or left.numel() > 1)
    return left, right


def several_rows(value: Tensor, least: int = 2) -> Tensor:
    """The value, if it has several rows."""
    fits(value.dim() > 1 and value.size(-2) >= least)
    return value


def read_long_angles(call: Call) -> Tensor:
    value = call.tensor(0)
    fits(value.dim() > 1 and value.size(-1) > 3 and value.size(-2) > 2)
    return value


def any_condition_of(call: Call) -> tuple[int, Tensor, str]:
    """Where the condition is, it, and the name of its argument."""
    place, name = (0, "condition") if call.name == "where" else (1, "mask")
    mask = call.get(place, name)
    fits(isinstance(mask, Tensor) and mask.dim() > 0 and mask.dtype == torch.bool)
    return place, mask, name


def hide_further_keys(call: Call, seen: Tensor) -> Any:
    """Attention in which some of the keys are hidden as well."""
    scores, value = hidden_scores(call)
    return weigh_seen_values(call, scores, seen, value)


def weigh_seen_values(call: Call, scores: Tensor, mask: Tensor | None, value: Tensor) -> Any:
    return call.instead(hide_scores(scores, mask).softmax(-1).nan_to_num(0) @ value)


def hidden_scores(call: Call) -> tuple[Tensor, Tensor]:
    """Scores with the mask, and values."""
    scores, mask, value = scores_before_mask(call)
    return hide_scores(scores, mask).clamp(min=-1e30), value


def round_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in a narrower format, with its own gradient."""
    return with_gradient_of(value, value.detach().to(dtype).to(value.dtype))


def with_operand(call: Call, place: int, value: Tensor) -> Any:
    """The call with another query, key or value."""
    return call.instead(call.put(place, value, _NAMES[place]).result())


def several_heads(call: Call, least: int = 2) -> Tensor:
    """The result, with several heads."""
    value = call.result()
    fits(value.dim() == 4 and value.size(1) >= least)
    return value


def softmax_terms(call: Call) -> tuple[Tensor, Tensor, int]:
    """Gradient times chances, the chances, and the axis of a softmax."""
    gradient, chances, dim = call.tensor(0), call.tensor(1), call.args[2]
    fits(chances.size(dim) > 2)
    return gradient * chances, chances, dim


def in_float8_steps(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in float8, with a scale that makes its largest value the format's largest."""
    step = value.abs().max().clamp(min=1e-20) / torch.finfo(dtype).max
    return (value / step).to(dtype).to(value.dtype) * step


def words_and_matrix(call: Call) -> tuple[int, Tensor, Tensor]:
    """Where the indices of a table are, and indices and table."""
    place = next(i for i in (0, 1) if not call.args[i].is_floating_point())
    fits(call.args[1 - place].dim() == 2)
    return place, call.args[place], call.args[1 - place]


def joined_parts(call: Call, least: int = 2) -> list[Tensor]:
    """The parts that are joined."""
    parts = list(call.args[0])
    fits(len(parts) >= least)
    return [floats_only(one) for one in parts]


def split_parts(call: Call, least: int = 2) -> list[Tensor]:
    parts = list(call.run())
    fits(len(parts) >= least)
    return [floats_only(one) for one in parts]


def part_read(call: Call) -> Tensor:
    """A part that is read of a larger tensor, and not one of several results."""
    fits(isinstance(call.args[0], Tensor))
    return floats_only(call.result())


def equal_input_and_target(call: Call) -> tuple[Tensor, Tensor]:
    """Two operands of one shape."""
    value, target = call.tensor(0, "input"), call.tensor(1, "target")
    fits(value.shape == target.shape)
    return value, target


def only_mean(call: Call) -> None:
    fits(call.kwargs.get("reduction", "mean") == "mean")


def image_of(call: Call) -> Tensor:
    value = call.tensor(0, "input")
    fits(value.dim() == filters_of(call).dim())
    return value


def result_rows(call: Call, least: int = 2) -> Tensor:
    """The result, if it has several rows."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-2) >= least)
    return value


def layer_bias(call: Call) -> tuple[int, Tensor]:
    """Where the bias is, and it."""
    place = 0 if call.name == "addmm" else 2
    bias = call.tensor(place, "bias")
    fits(bias.dim() == 1 and bias.numel() > 2)
    return place, bias


def lay_along(value: Tensor, dim: int, vector: Tensor) -> Tensor:
    """A vector, shaped so that it lies along an axis."""
    shape = [1] * value.dim()
    shape[dim] = -1
    return vector.view(shape)


def varied_channels(vector: Tensor) -> Tensor:
    """A vector of channels that differ."""
    flat = vector.detach().flatten()
    fits(bool((flat != flat[0]).any()))
    return vector


def apply_row_affine(call: Call, normal: Tensor) -> Any:
    """Weight and bias behind another normal value."""
    _, weight, bias, _ = norm_row(call)
    value = normal if weight is None else normal * weight
    return call.instead(value if bias is None else value + bias)


def column_numbers(value: Tensor) -> Tensor:
    """The number of each column."""
    return torch.arange(value.size(-1), device=value.device)


def value_and_row(call: Call) -> tuple[Tensor, Tensor]:
    """The larger operand, and the one that has a value for each column only."""
    left, right = plain_pair(call)
    if right.numel() > left.numel():
        left, right = right, left
    fits(left.numel() > right.numel() == right.size(-1) > 3)
    return left, right


def plain_pair(call: Call) -> tuple[Tensor, Tensor]:
    """Two floating-point operands, without a factor or a mode."""
    left, right = call.tensor(0), call.tensor(1)
    fits(call.kwargs.get("alpha", 1) == 1 and not call.kwargs.get("rounding_mode"))
    fits(left.numel() > 1)
    return left, right


def equal_plain_pair(call: Call) -> tuple[Tensor, Tensor]:
    """Two floating-point operands of one shape."""
    left, right = plain_pair(call)
    fits(left.shape == right.shape)
    return left, right


def tensor_and_number(call: Call) -> tuple[Tensor, float]:
    """A floating-point tensor and a number, in either order."""
    value, number = call.args[:2]
    if is_number(value):
        value, number = number, value
    fits(is_number(number) and isinstance(value, Tensor) and value.is_floating_point())
    return value, number


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def keys_seen_by_scores(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Which keys are seen, as booleans."""
    if mask is None:
        return torch.ones(scores.shape[-2:], dtype=torch.bool)
    return mask if mask.dtype == torch.bool else mask > -1e4


def replace_result_at(call: Call, place: int, change: Any) -> Any:
    """All results, one of them changed."""
    results = list(call.run())
    fits(isinstance(results[place], Tensor))
    changed = change(results[place])
    fits(changed.shape == results[place].shape)
    results[place] = changed
    return tuple(results)


def call_again(call: Call, **changed: Any) -> Any:
    """The call with other keywords."""
    return Call(call.name, call.function, call.args, {**call.kwargs, **changed}).run()


def change_bias(call: Call, change: Any) -> Any:
    """The call with a changed bias."""
    place = 0 if call.name == "addmm" else 2
    bias = call.tensor(place, "bias")
    fits(bias.dim() == 1 and bias.numel() > 2)
    return call.put(place, change(bias), "bias").run()


def change_weight(call: Call, change: Any) -> Any:
    """The product with a changed weight, which keeps its gradient."""
    left, weight, bias = layer_parts(call)
    return layer_product(call, left, with_gradient_of(weight, change(weight.detach())), bias)


def operand_and_number(call: Call) -> tuple[Tensor, float]:
    """A floating-point operand and a number."""
    value, number = call.tensor(0), call.args[1]
    fits(isinstance(number, int | float) and not isinstance(number, bool) and number != 0)
    return value, float(number)


def tensor_pair(call: Call) -> tuple[Tensor, Tensor]:
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor) and not call.kwargs)
    fits(left.is_floating_point() and right.is_floating_point())
    return left, right


def input_and_target(call: Call) -> tuple[Tensor, Tensor]:
    return call.tensor(0, "input"), call.tensor(1, "target")


def table_and_indices(call: Call) -> tuple[Tensor, Tensor]:
    table, indices = call.args[:2]
    return (table, indices) if table.is_floating_point() else (indices, table)


def words_and_table(call: Call) -> tuple[int, Tensor, Tensor]:
    """Where the indices of a table are, and indices and table."""
    place = next(i for i in (0, 1) if not call.args[i].is_floating_point())
    return place, call.args[place], call.args[1 - place]


def only_axis(call: Call) -> int:
    dim = call.get(1, "dim", "axis")
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    fits(isinstance(dim, int))
    return dim


def reduced_result(call: Call, least: int = 2) -> tuple[Tensor, int]:
    """Reciprocal roots, and an axis that has several of them."""
    value = call.result()
    axes = [axis for axis in range(value.dim()) if value.size(axis) >= least]
    fits(axes)
    return value, axes[-1]
