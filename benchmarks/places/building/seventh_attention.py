"""Faults for measuring: attention, softmax, masks, positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor

FAULTS = Catalogue()
_FUSED = "scaled_dot_product_attention flash_attention"
_EMPTY: dict[str, Any] = {
    "kinds": ["zeros", "mask", "uninitialised"],
    "loose": ["constant", "missing operand", "partial sum", "axis scale", "wrong factor"],
}
_MOVED: dict[str, Any] = {
    "kinds": ["shift", "wrong index", "permutation"],
    "loose": ["copy", "stale", "wrong argument", "wrong rank's shard", "swapped operands"],
}
_ORDER: dict[str, Any] = {
    "kinds": ["permutation", "wrong index"],
    "loose": ["shift", "swapped operands", "transpose", "wrong argument", "wrong rank's shard"],
}
_AGAIN: dict[str, Any] = {
    "kinds": ["copy", "stale", "wrong index"],
    "loose": ["permutation", "constant", "shift", "wrong argument"],
}
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function", "wrong argument"],
}
_TIMES: dict[str, Any] = {
    "kinds": ["wrong factor", "scale", "wrong argument"],
    "loose": ["other function", "axis scale", "missing operand"],
}
_HIDDEN: dict[str, Any] = {
    "kinds": ["mask", "wrong argument"],
    "loose": ["other function", "partial sum", "wrong index", "wrong reduction"],
}


# --- Attention ------------------------------------------------------------------------------------


def _operands(call: Call) -> tuple[Tensor, Tensor, Tensor, float]:
    """Query, key and value with the same number of heads, and the factor of the scores."""
    query, key, value = (call.tensor(i, n) for i, n in enumerate(("query", "key", "value")))
    times = query.size(-3) // key.size(-3)
    key, value = (one.repeat_interleave(times, -3) for one in (key, value))
    return query, key, value, call.kwargs.get("scale") or query.size(-1) ** -0.5


def _mask(call: Call, rows: int, columns: int) -> Tensor | None:
    """What is seen (bool), or what is added to the scores; None if there is no mask."""
    is_flash = call.name == "flash_attention"
    if call.get(4 if is_flash else 5, "is_causal", default=False):
        return torch.ones(rows, columns, dtype=torch.bool).tril()
    return call.kwargs.get("attn_mask") if is_flash else call.get(3, "attn_mask")


def _hide(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _parts(call: Call) -> tuple[Tensor, Tensor | None, Tensor]:
    """Scores before the mask, the mask, the values."""
    query, key, value, scale = _operands(call)
    scores = query @ key.mT * scale
    return scores, _mask(call, *scores.shape[-2:]), value


def _weigh(call: Call, scores: Tensor, mask: Tensor | None, value: Tensor) -> Any:
    return call.instead(_hide(scores, mask).softmax(-1) @ value)


def _weights(call: Call) -> tuple[Tensor, Tensor]:
    """The right weights, and the values."""
    scores, mask, value = _parts(call)
    return _hide(scores, mask).softmax(-1), value


def _seen(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Which keys are seen, as booleans."""
    if mask is None:
        return torch.ones(scores.shape[-2:], dtype=torch.bool)
    return mask if mask.dtype == torch.bool else mask > -1e4


def _causal(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, what is seen and values of a call in which no query sees what is behind it."""
    scores, mask, value = _parts(call)
    rows, columns = scores.shape[-2:]
    fits(mask is not None and rows == columns and rows > 3)
    seen = _seen(scores, mask)
    fits(not bool(seen.triu(1).any()))
    return scores, seen, value


def _bias(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, what is added to them (finite numbers), values."""
    scores, mask, value = _parts(call)
    fits(mask is not None and mask.is_floating_point())
    assert mask is not None
    fits(bool((mask.detach().abs() < 1e3).all()) and bool(mask.detach().any()))
    return scores, mask, value


def _twice(call: Call, times: Tensor) -> Any:
    """Each key counts so many times, above and below."""
    weights, value = _weights(call)
    weights = weights * times.to(weights.dtype)
    return call.instead(weights @ value / weights.sum(-1, keepdim=True))


@FAULTS.fault(_FUSED, **_TIMES)
def scale_of_three_kinds_of_scores(call: Call) -> Any:
    """1 / sqrt(3 d), as where content and positions give three summands."""
    scores, mask, value = _parts(call)
    return _weigh(call, scores / 3**0.5, mask, value)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "scale", "wrong argument", "precision"],
    loose=["approximation", "other function"],
)
def scale_written_with_one_digit(call: Call) -> Any:
    """0.4 for 0.354: the factor of the scores comes from a file with few digits."""
    query, key, value, scale = _operands(call)
    scores = query @ key.mT * float(f"{scale:.1g}")
    return _weigh(call, scores, _mask(call, *scores.shape[-2:]), value)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "missing operand", "axis scale"],
    loose=["scale", "mask", "other function", "wrong argument", "one rank's part"],
)
def second_half_of_the_heads_not_scaled(call: Call) -> Any:
    """The factor of the scores is lost for the heads of the second rank."""
    query, _, _, scale = _operands(call)
    heads = query.size(-3)
    fits(heads > 1 and scale != 1)
    factor = torch.ones(heads, 1, 1, dtype=query.dtype)
    factor[heads // 2 :] = 1 / scale
    return call.put(0, query * factor, "query").run()


@FAULTS.fault(
    _FUSED,
    kinds=["zeros", "missing operand", "stale", "uninitialised"],
    loose=["constant", "mask", "partial sum", "wrong index", "wrong argument"],
)
def first_key_never_written(call: Call) -> Any:
    """The first slot of the cache of keys is zero; that of the values is right."""
    key = call.tensor(1, "key").clone()
    fits(key.size(-2) > 2)
    key[..., 0, :] = 0
    return call.put(1, key, "key").run()


@FAULTS.fault(_FUSED, **_ORDER)
def keys_exchanged_in_pairs(call: Call) -> Any:
    """Two keys of a register are loaded in the other order; the values are right."""
    key = call.tensor(1, "key")
    even = key.size(-2) // 2 * 2
    fits(even > 2)
    order = [place ^ 1 if place < even else place for place in range(key.size(-2))]
    return call.put(1, key[..., order, :], "key").run()


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "wrong statistics", "wrong reduction", "other function"],
    loose=["scale", "axis scale", "lost accumulation", "partial sum", "approximation"],
)
def splits_weighed_by_their_largest_scores(call: Call) -> Any:
    """Two splits of the keys are merged by their maxima, and not by the sums of exponentials."""
    scores, mask, value = _parts(call)
    half = scores.size(-1) // 2
    fits(half > 1)
    hidden = _hide(scores, mask).clamp(min=-1e30)
    first, second = hidden[..., :half], hidden[..., half:]
    tops = [one.amax(-1, keepdim=True) for one in (first, second)]
    top = torch.maximum(*tops)
    own = [(one - top).exp() for one in tops]
    left = first.softmax(-1) @ value[..., :half, :]
    right = second.softmax(-1) @ value[..., half:, :]
    return call.instead((own[0] * left + own[1] * right) / (own[0] + own[1]))


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "partial sum", "other function", "wrong argument"],
    loose=["wrong reduction", "approximation", "zeros", "wrong statistics"],
)
def only_the_two_best_keys_seen(call: Call) -> Any:
    """A sparse kernel keeps the two largest scores of each query."""
    scores, mask, value = _parts(call)
    fits(scores.size(-1) > 3)
    hidden = _hide(scores, mask)
    least = hidden.detach().topk(2, -1).values[..., -1:]
    return call.instead(hidden.masked_fill(hidden < least, -math.inf).softmax(-1) @ value)


@FAULTS.fault(
    _FUSED,
    kinds=["zeros", "mask", "partial sum", "other function"],
    loose=["approximation", "wrong reduction", "clipped", "missing operand"],
)
def small_weights_skipped(call: Call) -> Any:
    """What weighs less than a seventh is not multiplied with its value."""
    weights, value = _weights(call)
    return call.instead((weights * (weights > 1 / 7)) @ value)


@FAULTS.fault(
    _FUSED,
    kinds=["other function", "wrong reduction"],
    loose=["missing operand", "wrong statistics", "approximation", "missing reduction"],
)
def sigmoid_of_the_scores_weighs(call: Call) -> Any:
    """Each key has a gate of its own; nothing is divided by a sum."""
    scores, mask, value = _parts(call)
    return call.instead(_hide(scores, mask).sigmoid() @ value)


@FAULTS.fault(_FUSED, **_ORDER)
def heads_of_the_result_by_groups(call: Call) -> Any:
    """Two groups of heads: stored as (head, group) and read as (group, head)."""
    value = call.result()
    fits(value.dim() == 4 and value.size(1) % 2 == 0 and value.size(1) > 2)
    return call.instead(value.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2))


@FAULTS.fault(_FUSED, **_AGAIN)
def values_of_the_first_tile_again(call: Call) -> Any:
    """The tile of the values is not loaded again for the second half of the keys."""
    value = call.tensor(2, "value").clone()
    half = value.size(-2) // 2
    fits(half > 0)
    value[..., half : 2 * half, :] = value[..., :half, :].clone()
    return call.put(2, value, "value").run()


@FAULTS.fault(_FUSED, **_AGAIN)
def newest_query_not_computed(call: Call) -> Any:
    """The last position holds what the one before it has."""
    value = call.result()
    fits(value.size(-2) > 2)
    return call.instead(torch.cat([value[..., :-1, :], value[..., -2:-1, :]], -2))


@FAULTS.fault(_FUSED, **_MOVED)
def result_stored_one_example_later(call: Call) -> Any:
    """The pointer to the result is one example of the batch too far."""
    value = call.result()
    fits(value.dim() == 4 and value.size(0) > 1)
    return call.instead(value.roll(1, 0))


@FAULTS.fault(_FUSED, **_EMPTY)
def first_feature_of_each_head_not_stored(call: Call) -> Any:
    """The store of a head begins with its second feature."""
    value = call.result().clone()
    fits(value.size(-1) > 2)
    value[..., 0] = 0
    return call.instead(value)


@FAULTS.fault(_FUSED, **_HIDDEN)
def keys_at_odd_distances_not_seen(call: Call) -> Any:
    """A window with gaps: every second key before and behind the query."""
    scores, mask, value = _parts(call)
    rows, columns = scores.shape[-2:]
    fits(rows == columns and rows > 3)
    far = torch.arange(rows)[:, None] - torch.arange(columns)[None, :]
    hidden = _hide(scores, mask).masked_fill(far % 2 == 1, -math.inf)
    return call.instead(hidden.softmax(-1) @ value)


@FAULTS.fault(_FUSED, **_HIDDEN)
def two_positions_of_the_future_seen(call: Call) -> Any:
    """The causal mask begins three positions behind the query; padding stays hidden."""
    scores, seen, value = _causal(call)
    wider = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(2)
    return _weigh(call, scores, seen | (wider & seen[..., -1:, :]), value)


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "transpose", "wrong argument"],
    loose=["other function", "wrong index", "permutation", "swapped operands"],
)
def future_seen_and_the_past_hidden(call: Call) -> Any:
    """Queries and keys are exchanged in the causal mask; each token sees itself."""
    scores, seen, value = _causal(call)
    own = torch.eye(scores.size(-1), dtype=torch.bool)
    return _weigh(call, scores, seen.mT | own, value)


@FAULTS.fault(_FUSED, **_HIDDEN)
def token_before_each_one_hidden(call: Call) -> Any:
    """A hole beside the diagonal: the border of two tiles is left out."""
    scores, mask, value = _parts(call)
    rows, columns = scores.shape[-2:]
    fits(rows == columns and rows > 3)
    far = torch.arange(rows)[:, None] - torch.arange(columns)[None, :]
    return call.instead(_hide(scores, mask).masked_fill(far == 1, -math.inf).softmax(-1) @ value)


@FAULTS.fault(_FUSED, **_MOVED)
def bias_of_the_query_before(call: Call) -> Any:
    """The rows of the bias are read one too early."""
    scores, bias, value = _bias(call)
    fits(bias.size(-2) > 2)
    return _weigh(call, scores, bias.roll(1, -2), value)


@FAULTS.fault(_FUSED, **_ORDER)
def bias_of_the_keys_from_the_last(call: Call) -> Any:
    """The columns of the bias are read from the end."""
    scores, bias, value = _bias(call)
    fits(bias.size(-1) > 2)
    return _weigh(call, scores, bias.flip(-1), value)


@FAULTS.fault(
    _FUSED, kinds=["clipped"], loose=["wrong argument", "other function", "mask", "precision"]
)
def bias_of_the_positions_limited(call: Call) -> Any:
    """To half of its largest magnitude: the range of its integers is too small."""
    scores, bias, value = _bias(call)
    limit = float(bias.detach().abs().max()) / 2
    return _weigh(call, scores, bias.clamp(-limit, limit), value)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong reduction", "wrong statistics", "constant"],
    loose=["copy", "wrong axis", "wrong index", "stale", "axis offset"],
)
def mean_of_the_heads_for_each(call: Call) -> Any:
    """The heads are averaged, as for a map of attention, and each gets the mean."""
    value = call.result()
    fits(value.dim() == 4 and value.size(1) > 1)
    return call.instead(value.mean(1, keepdim=True).expand(value.shape).clone())


@FAULTS.fault(_FUSED, **_ORDER)
def keys_of_the_heads_from_the_last(call: Call) -> Any:
    """The pointer to the keys counts heads down; that to the values is right."""
    key = call.tensor(1, "key")
    fits(key.dim() == 4 and key.size(1) > 1)
    return call.put(1, key.flip(1), "key").run()


@FAULTS.fault(_FUSED, **_MOVED)
def keys_and_values_of_the_next_head(call: Call) -> Any:
    """Both pointers of the cache are one head too far."""
    key, value = call.tensor(1, "key"), call.tensor(2, "value")
    fits(key.dim() == 4 and key.size(1) > 1)
    return call.put(1, key.roll(-1, 1), "key").put(2, value.roll(-1, 1), "value").run()


@FAULTS.fault(_FUSED, **_MOVED)
def cache_of_the_next_sequence(call: Call) -> Any:
    """Keys and values are those of the next example of the batch."""
    key, value = call.tensor(1, "key"), call.tensor(2, "value")
    fits(key.dim() == 4 and key.size(0) > 1)
    return call.put(1, key.roll(-1, 0), "key").put(2, value.roll(-1, 0), "value").run()


@FAULTS.fault(
    _FUSED,
    kinds=["doubled reduction", "wrong factor", "wrong reduction", "wrong argument"],
    loose=["mask", "residual", "wrong statistics", "scale", "other function"],
)
def diagonal_taken_twice(call: Call) -> Any:
    """The tile on the diagonal is in the loop with a mask and in that without one."""
    scores, _, _ = _parts(call)
    rows, columns = scores.shape[-2:]
    fits(rows == columns and rows > 1)
    return _twice(call, 1 + torch.eye(rows))


@FAULTS.fault(
    _FUSED,
    kinds=["doubled reduction", "wrong factor", "wrong reduction", "wrong argument"],
    loose=["mask", "residual", "wrong statistics", "scale", "off by one reduction"],
)
def last_key_weighs_twice(call: Call) -> Any:
    """The last tile overlaps the one before it by one key, above and below."""
    scores, _, _ = _parts(call)
    fits(scores.size(-1) > 2)
    times = torch.ones(scores.size(-1))
    times[-1] = 2
    return _twice(call, times)


@FAULTS.fault(
    _FUSED, kinds=["approximation", "other function"], loose=["precision", "wrong reduction"]
)
def exponential_by_the_eighth_power_of_a_line(call: Call) -> Any:
    """(1 + x / 8)^8 for the exponential, with x relative to the largest score."""
    scores, mask, value = _parts(call)
    hidden = _hide(scores, mask).clamp(min=-1e30)
    weights = (1 + (hidden - hidden.amax(-1, keepdim=True)) / 8).relu() ** 8
    return call.instead(weights @ value / weights.sum(-1, keepdim=True))


@FAULTS.fault(
    _FUSED,
    kinds=["wrong axis", "wrong statistics", "wrong reduction"],
    loose=["axis scale", "wrong argument", "wrong factor", "other function"],
)
def weights_sum_to_one_over_the_heads(call: Call) -> Any:
    """The exponentials are divided by their sum over the heads."""
    scores, mask, value = _parts(call)
    fits(scores.dim() == 4 and scores.size(1) > 1)
    weights = (_hide(scores, mask) - scores.amax((1, 3), keepdim=True)).exp()
    total = weights.sum(1, keepdim=True)
    return call.instead(weights / (total + (total == 0)) @ value)


@FAULTS.fault(
    _FUSED, kinds=["precision"], loose=["approximation", "axis scale", "scale", "wrong factor"]
)
def sum_of_the_weights_in_bfloat16(call: Call) -> Any:
    """What divides is rounded to eight bits."""
    scores, mask, _ = _parts(call)
    hidden = _hide(scores, mask)
    total = (hidden - hidden.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True).detach()
    return call.instead(call.result() * (total / total.bfloat16().to(total.dtype)))


@FAULTS.fault(
    _FUSED,
    kinds=["missing operand", "axis offset", "offset", "residual"],
    loose=["wrong statistics", "other function", "wrong argument"],
)
def mean_query_not_added_back(call: Call) -> Any:
    """Queries are centred over the tokens for a narrow format, and the mean is forgotten."""
    query = call.tensor(0, "query")
    fits(query.size(-2) > 1)
    return call.put(0, query - query.mean(-2, keepdim=True), "query").run()


@FAULTS.fault(_FUSED, **_ROUNDED)
def keys_in_four_bits_for_each_channel(call: Call) -> Any:
    """15 levels, with a step for each feature of a head over all positions."""
    key = call.tensor(1, "key")
    step = key.detach().abs().amax(-2, keepdim=True).clamp(min=1e-9) / 7
    coarse = (key.detach() / step).round() * step
    return call.put(1, with_gradient_of(key, coarse), "key").run()


@FAULTS.fault(
    _FUSED,
    kinds=["partial sum", "mask", "missing operand"],
    loose=["zeros", "wrong index", "off by one reduction", "wrong argument", "wrong factor"],
)
def first_features_not_in_the_scores(call: Call) -> Any:
    """The sum over the features of a head begins behind its first quarter."""
    query = call.tensor(0, "query").clone()
    quarter = query.size(-1) // 4
    fits(quarter > 0)
    query[..., :quarter] = 0
    return call.put(0, query, "query").run()


@FAULTS.fault(
    _FUSED,
    kinds=["copy", "stale", "wrong index", "constant"],
    loose=["missing operand", "permutation", "wrong argument"],
)
def value_of_the_first_position_for_all(call: Call) -> Any:
    """The stride of the positions of the values is zero."""
    value = call.tensor(2, "value")
    fits(value.size(-2) > 1)
    return call.put(2, value[..., :1, :].expand(value.shape).clone(), "value").run()


@FAULTS.fault(
    _FUSED,
    kinds=["offset", "residual", "mask", "wrong argument"],
    loose=["other function", "axis offset"],
)
def slope_of_the_distance_for_each_head(call: Call) -> Any:
    """A linear bias of another model: slopes of 1, 1/2, 1/4 for the heads."""
    scores, mask, value = _parts(call)
    rows, columns = scores.shape[-2:]
    fits(columns > 2)
    far = (torch.arange(rows)[:, None] - torch.arange(columns)[None, :]).abs()
    slopes = 0.5 ** torch.arange(scores.size(-3))[:, None, None]
    return _weigh(call, scores - (slopes * far).to(scores.dtype), mask, value)


@FAULTS.fault(_FUSED, **_MOVED)
def weights_of_the_next_head(call: Call) -> Any:
    """Weights of one head multiply the values of the head before it."""
    weights, value = _weights(call)
    fits(weights.dim() == 4 and weights.size(1) > 1)
    return call.instead(weights.roll(-1, 1) @ value)


@FAULTS.fault(
    _FUSED,
    kinds=["sign", "wrong factor", "axis scale", "mask"],
    loose=["scale", "one rank's part"],
)
def odd_heads_negated(call: Call) -> Any:
    """The result of every second head has a minus."""
    value = call.result()
    fits(value.dim() == 4 and value.size(1) > 1)
    sign = 1 - 2 * (torch.arange(value.size(1)) % 2).to(value.dtype)
    return call.instead(value * sign.view(-1, 1, 1))


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "axis scale", "mask"],
    loose=["scale", "one rank's part", "missing operand", "doubled reduction"],
)
def heads_of_the_second_rank_doubled(call: Call) -> Any:
    """Two ranks both have the second half of the heads, and their results are added."""
    value = call.result()
    fits(value.dim() == 4 and value.size(1) > 1)
    factor = torch.ones(value.size(1), 1, 1, dtype=value.dtype)
    factor[value.size(1) // 2 :] = 2
    return call.instead(value * factor)


@FAULTS.fault(_FUSED, **_TIMES)
def factor_of_base_two_in_the_natural_scores(call: Call) -> Any:
    """The scale has log2(e) in it, and the exponential is that of base e."""
    scores, mask, value = _parts(call)
    return _weigh(call, scores / math.log(2), mask, value)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong reduction", "wrong statistics", "copy"],
    loose=["wrong argument", "constant", "wrong index", "stale", "residual"],
)
def keys_of_two_heads_averaged(call: Call) -> Any:
    """A port to fewer heads of keys: each pair of heads has the mean of their keys."""
    key = call.tensor(1, "key")
    fits(key.dim() == 4 and key.size(1) % 2 == 0)
    pairs = key.unflatten(1, (-1, 2))
    mean = pairs.mean(2, keepdim=True).expand(pairs.shape).flatten(1, 2)
    return call.put(1, mean, "key").run()


@FAULTS.fault(_FUSED, **_HIDDEN)
def two_halves_of_the_sequence_apart(call: Call) -> Any:
    """Taken for two documents in one row: no query sees a key of the other half."""
    scores, mask, value = _parts(call)
    rows, columns = scores.shape[-2:]
    fits(rows == columns and rows > 3)
    side = torch.arange(rows) >= rows // 2
    hidden = _hide(scores, mask).masked_fill(side[:, None] != side[None, :], -math.inf)
    return call.instead(hidden.softmax(-1) @ value)


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "zeros", "wrong factor"],
    loose=["partial sum", "scale", "missing operand", "other function", "axis scale"],
)
def dropout_of_the_weights_left_on(call: Call) -> Any:
    """Every fourth key is dropped, another one for each query, and the others are scaled up."""
    weights, value = _weights(call)
    rows, columns = weights.shape[-2:]
    fits(columns > 3)
    places = torch.arange(rows)[:, None] + torch.arange(columns)[None, :]
    kept = (places % 4 != 3).to(weights.dtype) * (4 / 3)
    return call.instead((weights * kept) @ value)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong statistics", "wrong index", "axis scale", "stale", "wrong factor"],
    loose=["scale", "shift", "wrong reduction", "copy"],
)
def sums_of_the_even_rows_divide(call: Call) -> Any:
    """A register holds one sum for two queries: odd rows are divided by that of the row before."""
    scores, mask, value = _parts(call)
    fits(scores.size(-2) > 1)
    hidden = _hide(scores, mask)
    weights = (hidden - hidden.detach().amax((-1, -2), keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    rows = torch.arange(total.size(-2)) // 2 * 2
    return call.instead(weights @ value / total[..., rows, :])


@FAULTS.fault(
    _FUSED,
    kinds=["partial sum", "wrong statistics", "wrong reduction", "axis scale"],
    loose=["wrong factor", "scale", "mask", "off by one reduction", "missing operand"],
)
def own_key_not_in_the_sum(call: Call) -> Any:
    """The diagonal is multiplied with its values, and left out of the sum that divides."""
    scores, mask, value = _parts(call)
    rows, columns = scores.shape[-2:]
    weights = _hide(scores, mask).softmax(-1)
    total = 1 - weights.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    fits(rows == columns and bool((_seen(scores, mask).sum(-1) > 1).all()))
    return call.instead(weights @ value / total)


# --- Softmax --------------------------------------------------------------------------------------

_SOFTMAX = "softmax _safe_softmax"


def _row(call: Call) -> tuple[Tensor, Tensor]:
    """Scores over the last axis, and the result."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(isinstance(dim, int) and dim % value.dim() == value.dim() - 1 and value.size(-1) > 2)
    return value, call.result()


def _rows(value: Tensor) -> None:
    fits(value.dim() > 1 and value.size(-2) > 1)


@FAULTS.fault(f"{_SOFTMAX} log_softmax", **_TIMES)
def temperature_of_one_half(call: Call) -> Any:
    """The scores are doubled."""
    return call.put(0, 2 * call.tensor(0, "input"), "input").run()


@FAULTS.fault(f"{_SOFTMAX} log_softmax", **_TIMES)
def factor_of_base_two_with_the_natural_exponential(call: Call) -> Any:
    """The scores are multiplied by log2(e), and the exponential is not that of base two."""
    return call.put(0, call.tensor(0, "input") / math.log(2), "input").run()


@FAULTS.fault(
    f"{_SOFTMAX} log_softmax",
    kinds=["wrong axis", "wrong argument", "wrong statistics", "wrong reduction"],
    loose=["axis scale", "axis offset", "transpose"],
)
def chances_over_the_first_axis(call: Call) -> Any:
    """The examples of the batch share one sum."""
    value, _ = _row(call)
    fits(value.dim() > 2 and value.size(0) > 1)
    return call.instead(value.log_softmax(0) if "log" in call.name else value.softmax(0))


@FAULTS.fault(
    _SOFTMAX, kinds=["offset", "axis offset"], loose=["residual", "other function", "constant"]
)
def even_share_subtracted(call: Call) -> Any:
    """What every column would have without a preference is subtracted: rows sum to zero."""
    value, chances = _row(call)
    return call.instead(chances - 1 / value.size(-1))


@FAULTS.fault(_SOFTMAX, **_ROUNDED)
def chances_in_64_levels(call: Call) -> Any:
    """The chances are integers of six bits with a step of 1 / 63."""
    _, chances = _row(call)
    return call.instead(with_gradient_of(chances, (chances.detach() * 63).round() / 63))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["zeros", "mask", "other function"],
    loose=["partial sum", "constant", "approximation", "missing operand", "clipped"],
)
def all_but_the_three_best_chances_dropped(call: Call) -> Any:
    """The others become zero, and nothing is divided again."""
    _, chances = _row(call)
    fits(chances.size(-1) > 4)
    least = chances.detach().topk(3, -1).values[..., -1:]
    return call.instead(chances.masked_fill(chances < least, 0))


@FAULTS.fault(
    f"{_SOFTMAX} log_softmax",
    kinds=["mask", "copy", "missing operand"],
    loose=["stale", "other function", "one rank's part", "offset", "axis offset"],
)
def last_row_keeps_its_scores(call: Call) -> Any:
    """In place, and the grid is one row too short."""
    value, chances = _row(call)
    _rows(chances)
    return call.instead(torch.cat([chances[..., :-1, :], value[..., -1:, :]], -2))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["axis scale", "wrong statistics", "wrong factor"],
    loose=["scale", "stale", "wrong reduction", "partial sum"],
)
def largest_of_the_first_half_in_the_numerator(call: Call) -> Any:
    """The sum is relative to the largest of the row, the exponentials to that of its first half."""
    value, chances = _row(call)
    fits(bool(value.detach().isfinite().all()))
    top = value.amax(-1, keepdim=True)
    half = value[..., : value.size(-1) // 2].amax(-1, keepdim=True)
    return call.instead(chances * (top - half).exp())


@FAULTS.fault(
    "log_softmax",
    kinds=["scale", "wrong factor"],
    loose=["wrong argument", "other function", "doubled reduction"],
)
def logarithms_of_the_squares(call: Call) -> Any:
    """Log p^2: twice the logarithms."""
    return call.instead(2 * call.result())


@FAULTS.fault("log_softmax", kinds=["clipped"], loose=["other function", "eps", "mask", "constant"])
def logarithms_not_below_minus_two(call: Call) -> Any:
    """A limit that keeps the loss small."""
    return call.instead(call.result().clamp(min=-2.0))


@FAULTS.fault(
    "log_softmax",
    kinds=["axis offset", "wrong reduction", "wrong statistics", "off by one reduction", "eps"],
    loose=["offset", "other function", "scale", "residual"],
)
def sum_of_the_exponentials_begins_with_one(call: Call) -> Any:
    """X - log(1 + sum exp(x)): a class with a score of zero is in the sum."""
    value, _ = _row(call)
    total = value.logsumexp(-1, keepdim=True)
    return call.instead(value - torch.logaddexp(total, torch.zeros_like(total)))


# --- Masks ----------------------------------------------------------------------------------------


def _condition(call: Call) -> tuple[int, Tensor, str]:
    """Where the condition is, it, and the name of its argument."""
    place, name = (0, "condition") if call.name == "where" else (1, "mask")
    mask = call.get(place, name)
    fits(isinstance(mask, Tensor) and mask.dim() > 1 and mask.dtype == torch.bool)
    return place, mask, name


@FAULTS.fault(
    "where masked_fill",
    kinds=["mask", "missing operand"],
    loose=["wrong argument", "copy", "wrong index", "stale"],
    backward=False,
)
def mask_in_the_even_rows_only(call: Call) -> Any:
    """Odd rows take their values as if nothing was hidden."""
    place, mask, name = _condition(call)
    fits(mask.size(-2) > 1)
    changed = mask.clone()
    changed[..., 1::2, :] = call.name == "where"
    return call.put(place, changed, name).run()


@FAULTS.fault(
    "where masked_fill", **{**_ORDER, "kinds": [*_ORDER["kinds"], "mask"]}, backward=False
)
def mask_of_the_rows_from_the_last(call: Call) -> Any:
    """The rows of the mask are read from the end."""
    place, mask, name = _condition(call)
    fits(mask.size(-2) > 1)
    return call.put(place, mask.flip(-2), name).run()


@FAULTS.fault(
    "masked_fill",
    kinds=["wrong argument", "mask", "constant"],
    loose=["other function", "offset", "zeros", "wrong factor", "scale"],
    backward=False,
)
def filled_with_minus_one(call: Call) -> Any:
    """A small number where a large one was given."""
    fits(isinstance(call.get(2, "value"), int | float) and call.get(2, "value") != -1)
    return call.put(2, -1.0 if call.run().is_floating_point() else -1, "value").run()


@FAULTS.fault(
    "masked_fill",
    kinds=["sign", "wrong argument", "mask", "constant"],
    loose=["wrong factor", "scale", "offset", "other function"],
    backward=False,
)
def minus_of_the_filling_lost(call: Call) -> Any:
    """Hidden scores become the largest ones."""
    value = call.get(2, "value")
    fits(isinstance(value, int | float) and math.isfinite(value) and value < 0)
    return call.put(2, -value, "value").run()


@FAULTS.fault(
    "where",
    kinds=["sign", "wrong factor", "mask"],
    loose=["scale", "other function", "wrong argument"],
    backward=False,
)
def second_branch_with_a_minus(call: Call) -> Any:
    """The branch for `false` is negated."""
    other = call.tensor(2, "other")
    fits(bool(other.detach().isfinite().all()))
    return call.put(2, -other, "other").run()


@FAULTS.fault(
    "where",
    kinds=["other function", "mask"],
    loose=["wrong argument", "missing operand", "clipped"],
    backward=False,
)
def larger_branch_for_the_chosen_one(call: Call) -> Any:
    """A maximum of both branches: the condition is not read."""
    left, right = call.tensor(1), call.tensor(2, "other")
    result = call.result()
    return call.instead(torch.maximum(left, right).expand(result.shape).clone())


@FAULTS.fault(
    "tril triu",
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "wrong argument", "missing operand", "axis scale", "wrong factor"],
    backward=False,
)
def last_row_of_the_triangle_empty(call: Call) -> Any:
    """The grid is one row too short."""
    value = call.run().clone()
    fits(value.size(-2) > 2)
    value[..., -1 if call.name == "tril" else 0, :] = 0
    return value


@FAULTS.fault("tril triu", kinds=["mask", "wrong argument"], loose=["shift", "other function"])
def two_diagonals_too_many(call: Call) -> Any:
    """The triangle ends two diagonals too late."""
    value = call.args[0]
    fits(value.size(-1) > 3)
    diagonal = call.get(1, "diagonal", default=0)
    cut = torch.tril if call.name == "tril" else torch.triu
    return cut(value, diagonal + 2 if call.name == "tril" else diagonal - 2)


_COMPARED = "eq ne lt gt le ge"


@FAULTS.fault(
    _COMPARED,
    kinds=["shift", "wrong index", "permutation", "mask"],
    loose=["copy", "wrong argument"],
    backward=False,
)
def comparison_of_the_next_column(call: Call) -> Any:
    """Stored one column too early, around the end."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dim() > 0 and value.size(-1) > 2)
    return value.roll(-1, -1)


@FAULTS.fault(
    "lt gt le ge",
    kinds=["wrong argument", "mask", "offset"],
    loose=["other function", "off by one reduction"],
    backward=False,
)
def compared_with_two_less(call: Call) -> Any:
    """The limit is two smaller."""
    value, limit = call.args[:2]
    fits(isinstance(value, Tensor) and isinstance(limit, int | float))
    return call.put(1, limit - 2).run()


@FAULTS.fault(
    "bitwise_and and_ logical_and",
    kinds=["copy", "stale", "wrong index", "mask"],
    loose=["permutation"],
    backward=False,
)
def masks_of_the_first_query_for_all(call: Call) -> Any:
    """The stride of the queries is zero when two masks are combined."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dtype == torch.bool)
    fits(value.dim() > 1 and value.size(-2) > 1)
    return value[..., :1, :].expand(value.shape).clone()


# --- Rotary positions -----------------------------------------------------------------------------


def _angles(call: Call) -> Tensor:
    value = call.tensor(0)
    fits(value.dim() > 1 and value.size(-1) > 3 and value.size(-2) > 1)
    return value


@FAULTS.fault("sin cos", **_MOVED)
def frequency_of_the_next_pair(call: Call) -> Any:
    """The angle of each feature is that of the next one, around the end."""
    return call.put(0, _angles(call).roll(-1, -1)).run()


@FAULTS.fault(
    "sin cos",
    kinds=["wrapped", "wrong index", "copy"],
    loose=["stale", "shift", "permutation", "wrong argument"],
)
def positions_begin_again_after_four(call: Call) -> Any:
    """The position is taken modulo the size of a page."""
    value = _angles(call)
    fits(value.size(-2) > 4)
    return call.put(0, value[..., torch.arange(value.size(-2)) % 4, :]).run()


@FAULTS.fault("sin cos", **_TIMES)
def angles_twice_as_fast(call: Call) -> Any:
    """Positions are counted in steps of two."""
    return call.put(0, 2 * _angles(call)).run()


@FAULTS.fault(
    "sin cos",
    kinds=["offset", "wrong argument"],
    loose=["other function", "axis offset", "residual", "shift"],
)
def angles_with_a_phase(call: Call) -> Any:
    """A tenth is added to every angle."""
    return call.put(0, _angles(call) + 0.1).run()


@FAULTS.fault("sin cos", **_ROUNDED)
def table_of_the_turns_in_float8(call: Call) -> Any:
    """The cache of sines and cosines is e4m3."""
    _angles(call)
    value = call.result()
    coarse = value.detach().to(torch.float8_e4m3fn).to(value.dtype)
    return call.instead(with_gradient_of(value, coarse))
