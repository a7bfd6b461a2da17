"""Faults for measuring: attention, softmax, masks, positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, longer, on, operand, result
from benchmarks.places.parts import (
    added_bias,
    attention_operands,
    condition_of,
    hide_scores,
    keys_seen_by_scores,
    mask_of,
    read_angles,
    scores_before_mask,
    several_rows,
    softmax_row,
    weigh_values,
)
from torch import Tensor

FAULTS = Catalogue()
_FUSED = "scaled_dot_product_attention flash_attention"


# --- Attention ------------------------------------------------------------------------------------


def _weights(call: Call) -> tuple[Tensor, Tensor]:
    """The right weights, and the values."""
    scores, mask, value = scores_before_mask(call)
    return hide_scores(scores, mask).softmax(-1), value


def _causal(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, what is seen and values of a call in which no query sees what is behind it."""
    scores, mask, value = scores_before_mask(call)
    rows, columns = scores.shape[-2:]
    fits(mask is not None and rows == columns and rows > 3)
    seen = keys_seen_by_scores(scores, mask)
    fits(not bool(seen.triu(1).any()))
    return scores, seen, value


def _twice(call: Call, times: Tensor) -> Any:
    """Each key counts so many times, above and below."""
    weights, value = _weights(call)
    weights = weights * times.to(weights.dtype)
    return call.instead(weights @ value / weights.sum(-1, keepdim=True))


@FAULTS.fault(
    _FUSED, "wrong factor, scale, wrong argument, precision; approximation, other function"
)
def scale_written_with_one_digit(call: Call) -> Any:
    """0.4 for 0.354: the factor of the scores comes from a file with few digits."""
    query, key, value, scale = attention_operands(call)
    scores = query @ key.mT * float(f"{scale:.1g}")
    return weigh_values(call, scores, mask_of(call, *scores.shape[-2:]), value)


@FAULTS.fault(
    _FUSED,
    "wrong factor, missing operand, axis scale; scale, mask, other function, "
    "wrong argument, one rank's part",
)
def second_half_of_the_heads_not_scaled(call: Call) -> Any:
    """The factor of the scores is lost for the heads of the second rank."""
    query, _, _, scale = attention_operands(call)
    heads = query.size(-3)
    fits(heads > 1 and scale != 1)
    factor = torch.ones(heads, 1, 1, dtype=query.dtype)
    factor[heads // 2 :] = 1 / scale
    return call.put(0, query * factor, "query").run()


@FAULTS.fault(
    _FUSED,
    "zeros, missing operand, stale, uninitialised; constant, mask, partial sum, "
    "wrong index, wrong argument",
)
def first_key_never_written(call: Call) -> Any:
    """The first slot of the cache of keys is zero; that of the values is right."""
    key = call.tensor(1, "key").clone()
    fits(key.size(-2) > 2)
    key[..., 0, :] = 0
    return call.put(1, key, "key").run()


@FAULTS.fault(_FUSED, words.REORDERED)
def keys_exchanged_in_pairs(call: Call) -> Any:
    """Two keys of a register are loaded in the other order; the values are right."""
    key = call.tensor(1, "key")
    even = key.size(-2) // 2 * 2
    fits(even > 2)
    order = [place ^ 1 if place < even else place for place in range(key.size(-2))]
    return call.put(1, key[..., order, :], "key").run()


@FAULTS.fault(
    _FUSED,
    "wrong factor, wrong statistics, wrong reduction, other function; scale, axis scale, "
    "lost accumulation, partial sum, approximation",
)
def splits_weighed_by_their_largest_scores(call: Call) -> Any:
    """Two splits of the keys are merged by their maxima, and not by the sums of exponentials."""
    scores, mask, value = scores_before_mask(call)
    half = scores.size(-1) // 2
    fits(half > 1)
    hidden = hide_scores(scores, mask).clamp(min=-1e30)
    first, second = hidden[..., :half], hidden[..., half:]
    tops = [one.amax(-1, keepdim=True) for one in (first, second)]
    top = torch.maximum(*tops)
    own = [(one - top).exp() for one in tops]
    left = first.softmax(-1) @ value[..., :half, :]
    right = second.softmax(-1) @ value[..., half:, :]
    return call.instead((own[0] * left + own[1] * right) / (own[0] + own[1]))


@FAULTS.fault(
    _FUSED,
    "mask, partial sum, other function, wrong argument; wrong reduction, approximation, "
    "zeros, wrong statistics",
)
def only_the_two_best_keys_seen(call: Call) -> Any:
    """A sparse kernel keeps the two largest scores of each query."""
    scores, mask, value = scores_before_mask(call)
    fits(scores.size(-1) > 3)
    hidden = hide_scores(scores, mask)
    least = hidden.detach().topk(2, -1).values[..., -1:]
    return call.instead(hidden.masked_fill(hidden < least, -math.inf).softmax(-1) @ value)


@FAULTS.fault(_FUSED, "copy, stale, wrong index; permutation, constant, shift, wrong argument")
def values_of_the_first_tile_again(call: Call) -> Any:
    """The tile of the values is not loaded again for the second half of the keys."""
    value = call.tensor(2, "value").clone()
    half = value.size(-2) // 2
    fits(half > 0)
    value[..., half : 2 * half, :] = value[..., :half, :].clone()
    return call.put(2, value, "value").run()


@FAULTS.fault(_FUSED, words.EMPTY_IN_A_SUM)
def first_feature_of_each_head_not_stored(call: Call) -> Any:
    """The store of a head begins with its second feature."""
    value = call.result().clone()
    fits(value.size(-1) > 2)
    value[..., 0] = 0
    return call.instead(value)


@FAULTS.fault(
    _FUSED, "mask, wrong argument; other function, partial sum, wrong index, wrong reduction"
)
def keys_at_odd_distances_not_seen(call: Call) -> Any:
    """A window with gaps: every second key before and behind the query."""
    scores, mask, value = scores_before_mask(call)
    rows, columns = scores.shape[-2:]
    fits(rows == columns and rows > 3)
    far = torch.arange(rows)[:, None] - torch.arange(columns)[None, :]
    hidden = hide_scores(scores, mask).masked_fill(far % 2 == 1, -math.inf)
    return call.instead(hidden.softmax(-1) @ value)


@FAULTS.fault(
    _FUSED, "mask, wrong argument; other function, partial sum, wrong index, wrong reduction"
)
def two_positions_of_the_future_seen(call: Call) -> Any:
    """The causal mask begins three positions behind the query; padding stays hidden."""
    scores, seen, value = _causal(call)
    wider = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(2)
    return weigh_values(call, scores, seen | (wider & seen[..., -1:, :]), value)


@FAULTS.fault(
    _FUSED, "mask, wrong argument; other function, partial sum, wrong index, wrong reduction"
)
def token_before_each_one_hidden(call: Call) -> Any:
    """A hole beside the diagonal: the border of two tiles is left out."""
    scores, mask, value = scores_before_mask(call)
    rows, columns = scores.shape[-2:]
    fits(rows == columns and rows > 3)
    far = torch.arange(rows)[:, None] - torch.arange(columns)[None, :]
    return call.instead(
        hide_scores(scores, mask).masked_fill(far == 1, -math.inf).softmax(-1) @ value
    )


@FAULTS.fault(_FUSED, words.MOVED_OR_SWAPPED)
def bias_of_the_query_before(call: Call) -> Any:
    """The rows of the bias are read one too early."""
    scores, bias, value = added_bias(call)
    fits(bias.size(-2) > 2)
    return weigh_values(call, scores, bias.roll(1, -2), value)


@FAULTS.fault(_FUSED, words.REORDERED)
def bias_of_the_keys_from_the_last(call: Call) -> Any:
    """The columns of the bias are read from the end."""
    scores, bias, value = added_bias(call)
    fits(bias.size(-1) > 2)
    return weigh_values(call, scores, bias.flip(-1), value)


@FAULTS.fault(_FUSED, "clipped; wrong argument, other function, mask, precision")
def bias_of_the_positions_limited(call: Call) -> Any:
    """To half of its largest magnitude: the range of its integers is too small."""
    scores, bias, value = added_bias(call)
    limit = float(bias.detach().abs().max()) / 2
    return weigh_values(call, scores, bias.clamp(-limit, limit), value)


@FAULTS.fault(_FUSED, words.MOVED_OR_SWAPPED)
def keys_and_values_of_the_next_head(call: Call) -> Any:
    """Both pointers of the cache are one head too far."""
    key, value = call.tensor(1, "key"), call.tensor(2, "value")
    fits(key.dim() == 4 and key.size(1) > 1)
    return call.put(1, key.roll(-1, 1), "key").put(2, value.roll(-1, 1), "value").run()


@FAULTS.fault(_FUSED, words.MOVED_OR_SWAPPED)
def cache_of_the_next_sequence(call: Call) -> Any:
    """Keys and values are those of the next example of the batch."""
    key, value = call.tensor(1, "key"), call.tensor(2, "value")
    fits(key.dim() == 4 and key.size(0) > 1)
    return call.put(1, key.roll(-1, 0), "key").put(2, value.roll(-1, 0), "value").run()


@FAULTS.fault(
    _FUSED,
    "doubled reduction, wrong factor, wrong reduction, wrong argument; mask, residual, "
    "wrong statistics, scale, other function",
)
def diagonal_taken_twice(call: Call) -> Any:
    """The tile on the diagonal is in the loop with a mask and in that without one."""
    scores, _, _ = scores_before_mask(call)
    rows, columns = scores.shape[-2:]
    fits(rows == columns and rows > 1)
    return _twice(call, 1 + torch.eye(rows))


@FAULTS.fault(
    _FUSED,
    "doubled reduction, wrong factor, wrong reduction, wrong argument; mask, residual, "
    "wrong statistics, scale, off by one reduction",
)
def last_key_weighs_twice(call: Call) -> Any:
    """The last tile overlaps the one before it by one key, above and below."""
    scores, _, _ = scores_before_mask(call)
    fits(scores.size(-1) > 2)
    times = torch.ones(scores.size(-1))
    times[-1] = 2
    return _twice(call, times)


@FAULTS.fault(_FUSED, "approximation, other function; precision, wrong reduction")
def exponential_by_the_eighth_power_of_a_line(call: Call) -> Any:
    """(1 + x / 8)^8 for the exponential, with x relative to the largest score."""
    scores, mask, value = scores_before_mask(call)
    hidden = hide_scores(scores, mask).clamp(min=-1e30)
    weights = (1 + (hidden - hidden.amax(-1, keepdim=True)) / 8).relu() ** 8
    return call.instead(weights @ value / weights.sum(-1, keepdim=True))


@FAULTS.fault(
    _FUSED,
    "wrong axis, wrong statistics, wrong reduction; axis scale, wrong argument, "
    "wrong factor, other function",
)
def weights_sum_to_one_over_the_heads(call: Call) -> Any:
    """The exponentials are divided by their sum over the heads."""
    scores, mask, value = scores_before_mask(call)
    fits(scores.dim() == 4 and scores.size(1) > 1)
    weights = (hide_scores(scores, mask) - scores.amax((1, 3), keepdim=True)).exp()
    total = weights.sum(1, keepdim=True)
    return call.instead(weights / (total + (total == 0)) @ value)


@FAULTS.fault(_FUSED, "precision; approximation, axis scale, scale, wrong factor")
def sum_of_the_weights_in_bfloat16(call: Call) -> Any:
    """What divides is rounded to eight bits."""
    scores, mask, _ = scores_before_mask(call)
    hidden = hide_scores(scores, mask)
    total = (hidden - hidden.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True).detach()
    return call.instead(call.result() * (total / total.bfloat16().to(total.dtype)))


@FAULTS.fault(_FUSED, words.ROUNDED)
def keys_in_four_bits_for_each_channel(call: Call) -> Any:
    """15 levels, with a step for each feature of a head over all positions."""
    key = call.tensor(1, "key")
    step = key.detach().abs().amax(-2, keepdim=True).clamp(min=1e-9) / 7
    coarse = (key.detach() / step).round() * step
    return call.put(1, with_gradient_of(key, coarse), "key").run()


@FAULTS.fault(
    _FUSED,
    "partial sum, mask, missing operand; zeros, wrong index, off by one reduction, "
    "wrong argument, wrong factor",
)
def first_features_not_in_the_scores(call: Call) -> Any:
    """The sum over the features of a head begins behind its first quarter."""
    query = call.tensor(0, "query").clone()
    quarter = query.size(-1) // 4
    fits(quarter > 0)
    query[..., :quarter] = 0
    return call.put(0, query, "query").run()


@FAULTS.fault(_FUSED, "offset, residual, mask, wrong argument; other function, axis offset")
def slope_of_the_distance_for_each_head(call: Call) -> Any:
    """A linear bias of another model: slopes of 1, 1/2, 1/4 for the heads."""
    scores, mask, value = scores_before_mask(call)
    rows, columns = scores.shape[-2:]
    fits(columns > 2)
    far = (torch.arange(rows)[:, None] - torch.arange(columns)[None, :]).abs()
    slopes = 0.5 ** torch.arange(scores.size(-3))[:, None, None]
    return weigh_values(call, scores - (slopes * far).to(scores.dtype), mask, value)


@FAULTS.fault(
    _FUSED,
    "wrong factor, axis scale, mask; scale, one rank's part, missing operand, doubled reduction",
)
def heads_of_the_second_rank_doubled(call: Call) -> Any:
    """Two ranks both have the second half of the heads, and their results are added."""
    value = call.result()
    fits(value.dim() == 4 and value.size(1) > 1)
    factor = torch.ones(value.size(1), 1, 1, dtype=value.dtype)
    factor[value.size(1) // 2 :] = 2
    return call.instead(value * factor)


@FAULTS.fault(
    _FUSED,
    "wrong reduction, wrong statistics, copy; wrong argument, constant, wrong index, "
    "stale, residual",
)
def keys_of_two_heads_averaged(call: Call) -> Any:
    """A port to fewer heads of keys: each pair of heads has the mean of their keys."""
    key = call.tensor(1, "key")
    fits(key.dim() == 4 and key.size(1) % 2 == 0)
    pairs = key.unflatten(1, (-1, 2))
    mean = pairs.mean(2, keepdim=True).expand(pairs.shape).flatten(1, 2)
    return call.put(1, mean, "key").run()


@FAULTS.fault(
    _FUSED, "mask, wrong argument; other function, partial sum, wrong index, wrong reduction"
)
def two_halves_of_the_sequence_apart(call: Call) -> Any:
    """Taken for two documents in one row: no query sees a key of the other half."""
    scores, mask, value = scores_before_mask(call)
    rows, columns = scores.shape[-2:]
    fits(rows == columns and rows > 3)
    side = torch.arange(rows) >= rows // 2
    hidden = hide_scores(scores, mask).masked_fill(side[:, None] != side[None, :], -math.inf)
    return call.instead(hidden.softmax(-1) @ value)


@FAULTS.fault(
    _FUSED,
    "mask, zeros, wrong factor; partial sum, scale, missing operand, other function, axis scale",
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
    "wrong statistics, wrong index, axis scale, stale, wrong factor; scale, shift, "
    "wrong reduction, copy",
)
def sums_of_the_even_rows_divide(call: Call) -> Any:
    """A register holds one sum for two queries: odd rows are divided by that of the row before."""
    scores, mask, value = scores_before_mask(call)
    fits(scores.size(-2) > 1)
    hidden = hide_scores(scores, mask)
    weights = (hidden - hidden.detach().amax((-1, -2), keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    rows = torch.arange(total.size(-2)) // 2 * 2
    return call.instead(weights @ value / total[..., rows, :])


@FAULTS.fault(
    _FUSED,
    "partial sum, wrong statistics, wrong reduction, axis scale; wrong factor, scale, "
    "mask, off by one reduction, missing operand",
)
def own_key_not_in_the_sum(call: Call) -> Any:
    """The diagonal is multiplied with its values, and left out of the sum that divides."""
    scores, mask, value = scores_before_mask(call)
    rows, columns = scores.shape[-2:]
    weights = hide_scores(scores, mask).softmax(-1)
    total = 1 - weights.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    fits(rows == columns and bool((keys_seen_by_scores(scores, mask).sum(-1) > 1).all()))
    return call.instead(weights @ value / total)


# fmt: off
# 1 / sqrt(3 d), as where content and positions give three summands.
FAULTS.add("scale of three kinds of scores", _FUSED,
    "wrong factor, scale, wrong argument; other function, axis scale, missing operand",
    on(scores_before_mask,
        lambda call, scores, mask, value: weigh_values(call, scores / 3**0.5, mask, value)))
# What weighs less than a seventh is not multiplied with its value.
FAULTS.add("small weights skipped", _FUSED,
    "zeros, mask, partial sum, other function; approximation, wrong reduction, clipped, "
    "missing operand",
    computed(_weights, lambda weights, value: weights * (weights > 1 / 7) @ value))
# Each key has a gate of its own; nothing is divided by a sum.
FAULTS.add("sigmoid of the scores weighs", _FUSED,
    "other function, wrong reduction; missing operand, wrong statistics, approximation, "
    "missing reduction",
    computed(scores_before_mask,
        lambda scores, mask, value: hide_scores(scores, mask).sigmoid() @ value))
# Two groups of heads: stored as (head, group) and read as (group, head).
FAULTS.add("heads of the result by groups", _FUSED, words.REORDERED,
    result(lambda v: v.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2),
        where=lambda v: v.dim() == 4 and v.size(1) % 2 == 0 and v.size(1) > 2))
# The last position holds what the one before it has.
FAULTS.add("newest query not computed", _FUSED,
    "copy, stale, wrong index; permutation, constant, shift, wrong argument",
    result(lambda v: torch.cat([v[..., :-1, :], v[..., -2:-1, :]], -2), where=longer(-2, 2)))
# The pointer to the result is one example of the batch too far.
FAULTS.add("result stored one example later", _FUSED, words.MOVED_OR_SWAPPED,
    result(lambda v: v.roll(1, 0), where=lambda v: v.dim() == 4 and v.size(0) > 1))
# Queries and keys are exchanged in the causal mask; each token sees itself.
FAULTS.add("future seen and the past hidden", _FUSED,
    "mask, transpose, wrong argument; other function, wrong index, permutation, "
    "swapped operands",
    on(_causal,
        lambda call, scores, seen, value:

    weigh_values(call, scores, seen.mT | torch.eye(scores.size(-1), dtype=torch.bool), value)))
# The heads are averaged, as for a map of attention, and each gets the mean.
FAULTS.add("mean of the heads for each", _FUSED,
    "wrong reduction, wrong statistics, constant; copy, wrong axis, wrong index, stale, "
    "axis offset",
    result(lambda v: v.mean(1, keepdim=True).expand(v.shape).clone(),
        where=lambda v: v.dim() == 4 and v.size(1) > 1))
# The pointer to the keys counts heads down; that to the values is right.
FAULTS.add("keys of the heads from the last", _FUSED, words.REORDERED,
    operand(1, lambda v: v.flip(1), "key", where=lambda v: v.dim() == 4 and v.size(1) > 1))
# Queries are centred over the tokens for a narrow format, and the mean is forgotten.
FAULTS.add("mean query not added back", _FUSED,
    "missing operand, axis offset, offset, residual; wrong statistics, other function, "
    "wrong argument", operand(0, lambda v: v - v.mean(-2, keepdim=True), "query", where=longer(-2)))
# The stride of the positions of the values is zero.
FAULTS.add("value of the first position for all", _FUSED,
    "copy, stale, wrong index, constant; missing operand, permutation, wrong argument",
    operand(2, lambda v: v[..., :1, :].expand(v.shape).clone(), "value", where=longer(-2)))
# Weights of one head multiply the values of the head before it.
FAULTS.add("weights of the next head", _FUSED, words.MOVED_OR_SWAPPED,
    computed(_weights, lambda weights, value: weights.roll(-1, 1) @ value,
        where=lambda weights, *_: weights.dim() == 4 and weights.size(1) > 1))
# The result of every second head has a minus.
FAULTS.add("odd heads negated", _FUSED,
    "sign, wrong factor, axis scale, mask; scale, one rank's part",
    result(lambda v: v * (1 - 2 * (torch.arange(v.size(1)) % 2).to(v.dtype)).view(-1, 1, 1),
        where=lambda v: v.dim() == 4 and v.size(1) > 1))
# The scale has log2(e) in it, and the exponential is that of base e.
FAULTS.add("factor of base two in the natural scores", _FUSED,
    "wrong factor, scale, wrong argument; other function, axis scale, missing operand",
    on(scores_before_mask,
        lambda call, scores, mask, value: weigh_values(call, scores / math.log(2), mask, value)))
# fmt: on


# --- Softmax --------------------------------------------------------------------------------------

_SOFTMAX = "softmax _safe_softmax"


@FAULTS.fault(
    f"{_SOFTMAX} log_softmax",
    "mask, copy, missing operand; stale, other function, one rank's part, offset, axis offset",
)
def last_row_keeps_its_scores(call: Call) -> Any:
    """In place, and the grid is one row too short."""
    value, chances = softmax_row(call)
    several_rows(chances)
    return call.instead(torch.cat([chances[..., :-1, :], value[..., -1:, :]], -2))


@FAULTS.fault(
    _SOFTMAX,
    "axis scale, wrong statistics, wrong factor; scale, stale, wrong reduction, partial sum",
)
def largest_of_the_first_half_in_the_numerator(call: Call) -> Any:
    """The sum is relative to the largest of the row, the exponentials to that of its first half."""
    value, chances = softmax_row(call)
    fits(bool(value.detach().isfinite().all()))
    top = value.amax(-1, keepdim=True)
    half = value[..., : value.size(-1) // 2].amax(-1, keepdim=True)
    return call.instead(chances * (top - half).exp())


@FAULTS.fault(
    "log_softmax",
    "axis offset, wrong reduction, wrong statistics, off by one reduction, eps; offset, "
    "other function, scale, residual",
)
def sum_of_the_exponentials_begins_with_one(call: Call) -> Any:
    """X - log(1 + sum exp(x)): a class with a score of zero is in the sum."""
    value, _ = softmax_row(call)
    total = value.logsumexp(-1, keepdim=True)
    return call.instead(value - torch.logaddexp(total, torch.zeros_like(total)))


# fmt: off
# The scores are doubled.
FAULTS.add("temperature of one half", f"{_SOFTMAX} log_softmax",
    "wrong factor, scale, wrong argument; other function, axis scale, missing operand",
    operand(0, lambda v: 2 * v, "input"))
# The scores are multiplied by log2(e), and the exponential is not that of base two.
FAULTS.add("factor of base two with the natural exponential", f"{_SOFTMAX} log_softmax",
    "wrong factor, scale, wrong argument; other function, axis scale, missing operand",
    operand(0, lambda v: v / math.log(2), "input"))
# The examples of the batch share one sum.
FAULTS.add("chances over the first axis", f"{_SOFTMAX} log_softmax",
    "wrong axis, wrong argument, wrong statistics, wrong reduction; axis scale, axis offset, "
    "transpose",
    on(softmax_row,
        lambda call, value, *_:
            call.instead(value.log_softmax(0) if "log" in call.name else value.softmax(0)),
        where=lambda value, *_: value.dim() > 2 and value.size(0) > 1))
# What every column would have without a preference is subtracted: rows sum to zero.
FAULTS.add("even share subtracted", _SOFTMAX,
    "offset, axis offset; residual, other function, constant",
    computed(softmax_row, lambda value, chances: chances - 1 / value.size(-1)))
# The chances are integers of six bits with a step of 1 / 63.
FAULTS.add("chances in 64 levels", _SOFTMAX, words.ROUNDED,
    computed(softmax_row,
        lambda _, chances: with_gradient_of(chances, (chances.detach() * 63).round() / 63)))
# The others become zero, and nothing is divided again.
FAULTS.add("all but the three best chances dropped", _SOFTMAX,
    "zeros, mask, other function; partial sum, constant, approximation, missing operand, "
    "clipped",
    computed(softmax_row,
        lambda _, chances:
            chances.masked_fill(chances < chances.detach().topk(3, -1).values[..., -1:], 0),
        where=lambda _, chances: chances.size(-1) > 4))
# Log p^2: twice the logarithms.
FAULTS.add("logarithms of the squares", "log_softmax",
    "scale, wrong factor; wrong argument, other function, doubled reduction",
    result(lambda v: 2 * v))
# A limit that keeps the loss small.
FAULTS.add("logarithms not below minus two", "log_softmax",
    "clipped; other function, eps, mask, constant", result(lambda v: v.clamp(min=-2.0)))
# fmt: on


# --- Masks ----------------------------------------------------------------------------------------


@FAULTS.forward(
    "where masked_fill", "mask, missing operand; wrong argument, copy, wrong index, stale"
)
def mask_in_the_even_rows_only(call: Call) -> Any:
    """Odd rows take their values as if nothing was hidden."""
    place, mask, name = condition_of(call)
    fits(mask.size(-2) > 1)
    changed = mask.clone()
    changed[..., 1::2, :] = call.name == "where"
    return call.put(place, changed, name).run()


@FAULTS.forward(
    "where masked_fill",
    "permutation, wrong index, mask; shift, swapped operands, transpose, wrong argument, "
    "wrong rank's shard",
)
def mask_of_the_rows_from_the_last(call: Call) -> Any:
    """The rows of the mask are read from the end."""
    place, mask, name = condition_of(call)
    fits(mask.size(-2) > 1)
    return call.put(place, mask.flip(-2), name).run()


@FAULTS.forward(
    "masked_fill",
    "wrong argument, mask, constant; other function, offset, zeros, wrong factor, scale",
)
def filled_with_minus_one(call: Call) -> Any:
    """A small number where a large one was given."""
    fits(isinstance(call.get(2, "value"), int | float) and call.get(2, "value") != -1)
    return call.put(2, -1.0 if call.run().is_floating_point() else -1, "value").run()


@FAULTS.forward("where", "other function, mask; wrong argument, missing operand, clipped")
def larger_branch_for_the_chosen_one(call: Call) -> Any:
    """A maximum of both branches: the condition is not read."""
    left, right = call.tensor(1), call.tensor(2, "other")
    result = call.result()
    return call.instead(torch.maximum(left, right).expand(result.shape).clone())


@FAULTS.forward(
    "tril triu",
    "zeros, mask, uninitialised; constant, wrong argument, missing operand, axis scale, "
    "wrong factor",
)
def last_row_of_the_triangle_empty(call: Call) -> Any:
    """The grid is one row too short."""
    value = call.run().clone()
    fits(value.size(-2) > 2)
    value[..., -1 if call.name == "tril" else 0, :] = 0
    return value


@FAULTS.fault("tril triu", "mask, wrong argument; shift, other function")
def two_diagonals_too_many(call: Call) -> Any:
    """The triangle ends two diagonals too late."""
    value = call.args[0]
    fits(value.size(-1) > 3)
    diagonal = call.get(1, "diagonal", default=0)
    cut = torch.tril if call.name == "tril" else torch.triu
    return cut(value, diagonal + 2 if call.name == "tril" else diagonal - 2)


_COMPARED = "eq ne lt gt le ge"


@FAULTS.forward(_COMPARED, "shift, wrong index, permutation, mask; copy, wrong argument")
def comparison_of_the_next_column(call: Call) -> Any:
    """Stored one column too early, around the end."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dim() > 0 and value.size(-1) > 2)
    return value.roll(-1, -1)


@FAULTS.forward("lt gt le ge", "wrong argument, mask, offset; other function, off by one reduction")
def compared_with_two_less(call: Call) -> Any:
    """The limit is two smaller."""
    value, limit = call.args[:2]
    fits(isinstance(value, Tensor) and isinstance(limit, int | float))
    return call.put(1, limit - 2).run()


@FAULTS.forward("bitwise_and and_ logical_and", "copy, stale, wrong index, mask; permutation")
def masks_of_the_first_query_for_all(call: Call) -> Any:
    """The stride of the queries is zero when two masks are combined."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dtype == torch.bool)
    fits(value.dim() > 1 and value.size(-2) > 1)
    return value[..., :1, :].expand(value.shape).clone()


# fmt: off
# Hidden scores become the largest ones.
FAULTS.add("minus of the filling lost", "masked_fill",
    "sign, wrong argument, mask, constant; wrong factor, scale, offset, other function",
    on(lambda call: (call.get(2, "value"),),
        lambda call, value: call.put(2, -value, "value").run(),

    where=lambda value: isinstance(value, int | float) and math.isfinite(value) and (value < 0)),
    backward=False)
# The branch for `false` is negated.
FAULTS.add("second branch with a minus", "where",
    "sign, wrong factor, mask; scale, other function, wrong argument",
    operand(2, torch.neg, "other", where=lambda v: bool(v.detach().isfinite().all())),
    backward=False)
# fmt: on


# --- Rotary positions -----------------------------------------------------------------------------


@FAULTS.fault("sin cos", words.ROUNDED)
def table_of_the_turns_in_float8(call: Call) -> Any:
    """The cache of sines and cosines is e4m3."""
    read_angles(call)
    value = call.result()
    coarse = value.detach().to(torch.float8_e4m3fn).to(value.dtype)
    return call.instead(with_gradient_of(value, coarse))


# fmt: off
# The angle of each feature is that of the next one, around the end.
FAULTS.add("frequency of the next pair", "sin cos", words.MOVED_OR_SWAPPED,
    lambda call: call.put(0, read_angles(call).roll(-1, -1)).run())
# The position is taken modulo the size of a page.
FAULTS.add("positions begin again after four", "sin cos",
    "wrapped, wrong index, copy; stale, shift, permutation, wrong argument",
    on(read_angles,
        lambda call, value: call.put(0, value[..., torch.arange(value.size(-2)) % 4, :]).run(),
        where=lambda value: value.size(-2) > 4))
# Positions are counted in steps of two.
FAULTS.add("angles twice as fast", "sin cos",
    "wrong factor, scale, wrong argument; other function, axis scale, missing operand",
    lambda call: call.put(0, 2 * read_angles(call)).run())
# A tenth is added to every angle.
FAULTS.add("angles with a phase", "sin cos",
    "offset, wrong argument; other function, axis offset, residual, shift",
    lambda call: call.put(0, read_angles(call) + 0.1).run())
# fmt: on
