"""Faults of the eleventh set: attention, softmax, masks, positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, longer, on, result, rounded
from benchmarks.places.parts import (
    any_condition_of,
    attention_operands,
    hidden_scores,
    hide_further_keys,
    mask_of,
    read_long_angles,
    round_to,
    scores_before_mask,
    seen_keys,
    several_heads,
    softmax_row,
    weigh_seen_values,
    with_operand,
)
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_FUSED = "scaled_dot_product_attention flash_attention"
_NAMES = ("query", "key", "value")


# --- Attention ------------------------------------------------------------------------------------


def _distances(rows: int, columns: int) -> Tensor:
    """How far each key is behind its query."""
    return torch.arange(rows)[:, None] - torch.arange(columns)


@FAULTS.fault(
    _FUSED, "wrong factor, scale, wrong argument; axis scale, other function, off by one reduction"
)
def factor_for_one_feature_less(call: Call) -> Any:
    """The factor of the scores is 1 / sqrt(d - 1)."""
    query, key, value, _ = attention_operands(call)
    fits(query.size(-1) > 1)
    scores = query @ key.mT * (query.size(-1) - 1) ** -0.5
    return weigh_seen_values(call, scores, mask_of(call, *scores.shape[-2:]), value)


@FAULTS.fault(_FUSED, "wrong factor, scale, wrong argument; axis scale, other function")
def factor_for_content_and_position_together(call: Call) -> Any:
    """1 / sqrt(2 d), as for scores that are a sum of two products."""
    query, key, value, _ = attention_operands(call)
    scores = query @ key.mT * (2 * query.size(-1)) ** -0.5
    return weigh_seen_values(call, scores, mask_of(call, *scores.shape[-2:]), value)


@FAULTS.fault(_FUSED, "mask, wrong argument; partial sum, wrong index, other function")
def only_itself_and_the_token_before(call: Call) -> Any:
    """A sliding window of two tokens is left on."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    fits(query.size(-2) == key.size(-2) and key.size(-2) > 2)
    far = _distances(query.size(-2), key.size(-2))
    return hide_further_keys(call, (far >= 0) & (far < 2))


@FAULTS.fault(_FUSED, "mask, wrong argument; partial sum, wrong index, other function")
def only_one_neighbour_on_each_side(call: Call) -> Any:
    """Local attention: a layer that sees all tokens is taken for one with a window of three."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    fits(query.size(-2) == key.size(-2) and key.size(-2) > 3)
    fits(mask_of(call, query.size(-2), key.size(-2)) is None)
    return hide_further_keys(call, _distances(query.size(-2), key.size(-2)).abs() <= 1)


@FAULTS.fault(
    _FUSED, "mask, wrong argument; partial sum, wrong index, missing operand, off by one reduction"
)
def first_two_tokens_evicted_from_the_cache(call: Call) -> Any:
    """Only the first two queries see the first two keys."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    fits(key.size(-2) > 3 and query.size(-2) > 2)
    rows, columns = torch.arange(query.size(-2))[:, None], torch.arange(key.size(-2))
    return hide_further_keys(call, (columns > 1) | (rows < 2))


@FAULTS.fault(_FUSED, "mask, wrong argument; partial sum, wrong index, other function")
def cut_into_documents_of_three_tokens(call: Call) -> Any:
    """Lengths of packed documents that belong to another batch: tokens see their document only."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    fits(query.size(-2) == key.size(-2) and key.size(-2) > 3)
    document = torch.arange(key.size(-2)) // 3
    return hide_further_keys(call, document[:, None] == document)


@FAULTS.fault(
    _FUSED, "mask, shift, wrong index, permutation, wrong argument; stale, copy, swapped operands"
)
def mask_of_the_next_example(call: Call) -> Any:
    """The pointer to the mask is one sequence of the batch too far."""
    scores, mask, value = scores_before_mask(call)
    fits(mask is not None and mask.dim() == 4 and mask.size(0) > 1)
    assert mask is not None
    return weigh_seen_values(call, scores, mask.roll(-1, 0), value)


@FAULTS.fault(_FUSED, words.ROUNDED)
def operands_of_the_attention_in_bfloat16(call: Call) -> Any:
    """Autocast where none was asked for: query, key and value have eight bits."""
    for place in range(3):
        coarse = round_to(call.tensor(place, _NAMES[place]), torch.bfloat16)
        call = call.put(place, coarse, _NAMES[place])
    return call.instead(call.result())


@FAULTS.fault(_FUSED, words.ROUNDED)
def values_of_the_cache_in_eight_bits(call: Call) -> Any:
    """The values are integers with one step for each position and head."""
    value = call.tensor(2, "value")
    step = value.detach().abs().amax(-1, keepdim=True) / 127
    fits(bool((step > 0).all()))
    return with_operand(call, 2, with_gradient_of(value, (value.detach() / step).round() * step))


@FAULTS.fault(_FUSED, "shift, wrong index, permutation; stale, copy, wrong argument, mask")
def keys_of_the_slot_before(call: Call) -> Any:
    """The cache of the keys is read one slot too early, around the end; the values are right."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    fits(key.size(-2) > 2 and mask_of(call, query.size(-2), key.size(-2)) is not None)
    return with_operand(call, 1, key.roll(1, -2))


@FAULTS.fault(_FUSED, words.MOVED_SHARD)
def result_stored_one_query_early(call: Call) -> Any:
    """Each position holds what the next one has computed, around the end."""
    value = call.result()
    fits(value.size(-2) > 2 and mask_of(call, value.size(-2), value.size(-2)) is not None)
    return call.instead(value.roll(-1, -2))


@FAULTS.fault(_FUSED, "wrong argument, copy, missing operand; stale, wrong index, other function")
def keys_given_as_values(call: Call) -> Any:
    """The pointer to the keys is handed over twice."""
    key, value = call.tensor(1, "key"), call.tensor(2, "value")
    fits(key.shape == value.shape)
    return with_operand(call, 2, key)


@FAULTS.fault(_FUSED, "wrong argument, copy, missing operand; stale, wrong index, other function")
def queries_given_as_keys(call: Call) -> Any:
    """The scores are products of queries with queries."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    fits(query.shape == key.shape)
    return with_operand(call, 1, query)


@FAULTS.fault(_FUSED, "other function; wrong statistics, approximation, wrong reduction")
def linear_attention_by_an_elu(call: Call) -> Any:
    """(1 + elu(q)) (1 + elu(k)) for the exponential of the score."""
    query, key, value, _ = attention_operands(call)
    weights = (1 + functional.elu(query)) @ (1 + functional.elu(key)).mT
    mask = mask_of(call, *weights.shape[-2:])
    if mask is not None:
        fits(mask.dtype == torch.bool or not bool(mask[seen_keys(mask)].any()))
        weights = weights * seen_keys(mask)
    return call.instead(weights @ value / weights.sum(-1, keepdim=True).clamp(min=1e-9))


@FAULTS.fault(
    _FUSED,
    "other function; missing reduction, wrong statistics, wrong reduction, approximation, "
    "missing operand",
)
def softmax_left_out(call: Call) -> Any:
    """The scores themselves weigh the values; what is hidden is zero."""
    scores, mask, value = scores_before_mask(call)
    if mask is not None:
        fits(mask.dtype == torch.bool or not bool(mask[seen_keys(mask)].any()))
        scores = scores * seen_keys(mask)
    return call.instead(scores @ value)


def _blocks(call: Call) -> list[tuple[Tensor, Tensor]]:
    """Scores and values of two blocks of keys."""
    scores, value = hidden_scores(call)
    half = scores.size(-1) // 2
    fits(half > 0)
    first = scores[..., :half], value[..., :half, :]
    return [first, (scores[..., half:], value[..., half:, :])]


@FAULTS.fault(
    _FUSED,
    "wrong factor, wrong statistics, swapped operands; scale, axis scale, wrong reduction, "
    "permutation, wrong index",
)
def splits_weighed_by_the_sums_of_each_other(call: Call) -> Any:
    """Two splits of the keys: the logarithms of their sums are stored in each other's place."""
    (one, left), (two, right) = _blocks(call)
    share = (two.logsumexp(-1, True) - one.logsumexp(-1, True)).sigmoid()
    return call.instead(share * (one.softmax(-1) @ left) + (1 - share) * (two.softmax(-1) @ right))


@FAULTS.fault(
    _FUSED,
    "wrong statistics, wrong factor; scale, axis scale, wrong reduction, missing operand, "
    "missing reduction, partial sum",
)
def splits_added_up_without_weights(call: Call) -> Any:
    """Two splits of the keys, each divided by its own sum, are added."""
    (one, left), (two, right) = _blocks(call)
    return call.instead(one.softmax(-1) @ left + two.softmax(-1) @ right)


@FAULTS.fault(
    _FUSED,
    "permutation, wrong index, shift, wrong rank's shard; swapped operands, wrong argument, mask",
)
def halves_of_the_keys_in_the_other_order(call: Call) -> Any:
    """Two ranks gather their keys in the wrong order; the values are right."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    fits(key.size(-2) % 2 == 0 and key.size(-2) > 2)
    fits(mask_of(call, query.size(-2), key.size(-2)) is not None)
    return with_operand(call, 1, key.roll(key.size(-2) // 2, -2))


@FAULTS.fault(
    _FUSED, "other function, axis scale, wrong factor; scale, wrong argument, missing operand"
)
def keys_divided_by_their_root_mean_square(call: Call) -> Any:
    """A norm of the keys that belongs to another model; the queries are right."""
    key = call.tensor(1, "key")
    size = key.square().mean(-1, keepdim=True)
    fits(bool((size.detach() > 1e-6).all()))
    return with_operand(call, 1, key * size.rsqrt())


@FAULTS.fault(
    _FUSED,
    "wrong statistics, wrong reduction, wrong factor, axis scale; wrong axis, scale, "
    "missing reduction",
)
def one_sum_for_all_heads_of_a_query(call: Call) -> Any:
    """What divides is the mean of the heads' sums of exponentials."""
    scores, value = hidden_scores(call)
    fits(scores.dim() == 4 and scores.size(1) > 1)
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True).mean(1, keepdim=True)
    fits(bool(total.detach().isfinite().all()))
    return call.instead(weights @ value / total)


# fmt: off
# A linear bias of the distance that another model has, and with the wrong sign.
FAULTS.add("distance favours keys that are far", _FUSED,
    "wrong argument, axis offset, mask, residual; offset, other function, sign",
    on(hidden_scores,
        lambda call, scores, value:

    weigh_seen_values(call, scores + 0.1 * _distances(*scores.shape[-2:]).abs(), None, value)))
# The sum of the exponentials begins with the first key, and the loop adds it again.
FAULTS.add("first key twice in the sum that divides", _FUSED,
    "wrong statistics, doubled reduction, axis scale, wrong factor; scale, other function, "
    "off by one reduction, wrong reduction",
    computed(hidden_scores,
        lambda scores, value:

    (scores - torch.cat([scores, scores[..., :1]], -1).logsumexp(-1, keepdim=True)).exp() @ value,
        where=lambda scores, *_: scores.size(-1) > 1))
# The epilogue stores in float8 for the product that follows.
FAULTS.add("result of the heads in e4m3", _FUSED, "precision; approximation, other function",
    result(rounded(torch.float8_e4m3fn)))
# The pointer to the queries is one head behind; keys and values are right.
FAULTS.add("queries of the head before", _FUSED, words.MOVED_OR_SWAPPED,
    on(lambda call: (call.tensor(0, "query"),),
        lambda call, query: with_operand(call, 0, query.roll(1, 1)),
        where=lambda query: query.dim() == 4 and query.size(1) > 2))
# The stride of the heads of the queries is zero.
FAULTS.add("query of the first head for all", _FUSED,
    "copy, stale, wrong index; constant, permutation, wrong argument, wrong rank's shard",
    on(lambda call: (call.tensor(0, "query"),),
        lambda call, query: with_operand(call, 0, query[:, :1].expand(query.shape).contiguous()),
        where=lambda query: query.dim() == 4 and query.size(1) > 1))
# Rotary layouts are mixed up: keys have pairs side by side, queries have them in halves.
FAULTS.add("halves of the keys interleaved", _FUSED,
    "permutation, wrong index, transpose; shift, wrong argument, swapped operands",
    on(lambda call: (call.tensor(1, "key"),),
        lambda call, key: with_operand(call, 1, key.unflatten(-1, (2, -1)).mT.flatten(-2)),
        where=lambda key: key.size(-1) % 2 == 0 and key.size(-1) > 2))
# The range of the stored values is -1 to 1.
FAULTS.add("values cut at one", _FUSED, words.LIMITED,
    lambda call: with_operand(call, 2, call.tensor(2, "value").clamp(-1, 1)))
# A relu is fused into the load of the values.
FAULTS.add("negative values lost", _FUSED,
    "clipped, other function; zeros, mask, sign, wrong argument",
    lambda call: with_operand(call, 2, call.tensor(2, "value").relu()))
# The accumulator has the wrong sign: each head gives the opposite.
FAULTS.add("accumulator subtracted", _FUSED,
    "sign, wrong factor; scale, other function, axis scale", result(torch.neg))
# Each head is written to the place of the next one, the last to the first.
FAULTS.add("result stored one head late", _FUSED, words.MOVED_SHARD,
    lambda call: call.instead(several_heads(call, 3).roll(1, 1)))
# The last head is stored first.
FAULTS.add("heads of the result in the reverse order", _FUSED,
    "permutation, wrong index; shift, wrong rank's shard",
    lambda call: call.instead(several_heads(call, 3).flip(1)))
# The loop over the queries begins at one.
FAULTS.add("first query not stored", _FUSED, words.EMPTY_IN_A_SUM,
    result(lambda v: v * (torch.arange(v.size(-2)) > 0)[:, None], where=longer(-2)))
# Of two queries in a register, only the first is written.
FAULTS.add("odd queries not stored", _FUSED, words.EMPTY_IN_A_SUM,
    result(lambda v: v * (torch.arange(v.size(-2)) % 2 == 0)[:, None], where=longer(-2, 2)))
# The second half of the heads is not gathered.
FAULTS.add("heads of the first rank only", _FUSED,
    "zeros, mask, uninitialised, one rank's part; constant, missing operand, partial sum, "
    "axis scale, wrong factor, missing reduction",
    computed(lambda call: (several_heads(call, 3),),
        lambda value: value * (torch.arange(value.size(1)) < value.size(1) // 2)[:, None, None]))
# The list of sequences that are still running is one too short.
FAULTS.add("last sequence of the batch empty", _FUSED, words.EMPTY_IN_A_RANKS_SUM,
    result(lambda v: v * (torch.arange(v.size(0)) < v.size(0) - 1)[:, None, None, None],
        where=lambda v: v.dim() == 4 and v.size(0) > 1))
# A factor of two branches that are added is applied to one that is alone.
FAULTS.add("result divided by the root of two", _FUSED, "scale, wrong factor; axis scale",
    result(lambda v: v / math.sqrt(2)))
# A mean over the keys of what the softmax has averaged already.
FAULTS.add("weighted mean divided by the keys again", _FUSED,
    "scale, wrong factor, wrong reduction; axis scale",
    lambda call: call.instead(call.result() / call.tensor(1, "key").size(-2)))
# Each program writes to the same buffer, and the last head wins.
FAULTS.add("result of the last head for all", _FUSED,
    "copy, stale, wrong index; permutation, shift, wrong rank's shard",
    computed(several_heads, lambda value: value[:, -1:].expand(value.shape).contiguous()))
# The scores are products of keys with keys.
FAULTS.add("keys given as queries", _FUSED,
    "wrong argument, copy, missing operand; stale, wrong index, other function",
    on(lambda call: (call.tensor(0, "query"), call.tensor(1, "key")),
        lambda call, _, key: with_operand(call, 0, key),
        where=lambda query, key: query.shape == key.shape))
# A norm without a weight behind the heads, as in models with retention.
FAULTS.add("each head of the result normalised", _FUSED,
    "other function, axis scale, wrong factor; scale, wrong statistics, residual",
    result(lambda v: v * (v.square().mean(-1, keepdim=True) + 1e-06).rsqrt()))
# The weights saturate in a format whose range ends at 0.25.
FAULTS.add("no weight above a quarter", _FUSED,
    "clipped; other function, approximation, wrong statistics, wrong factor",
    computed(hidden_scores, lambda scores, value: scores.softmax(-1).clamp(max=0.25) @ value))
# The loop over the features of query and key begins at one; the factor is right.
FAULTS.add("first feature not in the scores", _FUSED,
    "off by one reduction, partial sum, mask; missing operand, wrong reduction, zeros, "
    "wrong index, wrong argument",
    on(lambda call: (call.tensor(0, "query"),),
        lambda call, query: with_operand(call, 0, query * (torch.arange(query.size(-1)) > 0)),
        where=lambda query: query.size(-1) > 2))
# fmt: on


# --- Softmax --------------------------------------------------------------------------------------

_SOFTMAX = "softmax _safe_softmax"


@FAULTS.fault(_SOFTMAX, "other function; approximation, wrong statistics, wrong reduction")
def softplus_in_the_place_of_the_exponential(call: Call) -> Any:
    """Log(1 + exp(x)), divided by its sum over the row."""
    value, _ = softmax_row(call)
    weights = functional.softplus(value)
    return call.instead(weights / (weights.sum(-1, keepdim=True) + 1e-9))


@FAULTS.fault(
    _SOFTMAX,
    "off by one reduction, wrong statistics, partial sum, mask, axis scale, wrong factor; "
    "scale, missing operand, wrong reduction",
)
def second_score_not_in_the_sum(call: Call) -> Any:
    """A vector is loaded with an index that jumps over one element of the row."""
    value, _ = softmax_row(call)
    kept = torch.arange(value.size(-1)) != 1
    less = value.masked_fill(~kept, -math.inf).logsumexp(-1, keepdim=True)
    fits(bool(less.detach().isfinite().all()))
    return call.instead((value - less).exp())


# fmt: off
# The softmax is removed by a rewrite that thinks it runs twice.
FAULTS.add("scores returned as they came", f"{_SOFTMAX} log_softmax",
    "missing reduction, copy, other function; wrong statistics, missing operand, stale, "
    "offset, axis offset",
    computed(softmax_row, lambda value, *_: value.clone(),
        where=lambda value, *_: bool((value.detach() > -10000.0).all())))
# The axis is 1, as where the heads come last.
FAULTS.add("normalised over the second axis", _SOFTMAX,
    "wrong axis, wrong argument; wrong statistics, wrong reduction",
    computed(softmax_row, lambda value, *_: torch.softmax(value, 1),
        where=lambda value, *_: value.dim() == 4 and value.size(1) > 1))
# The chances are multiplied by a hundred.
FAULTS.add("chances in percent", _SOFTMAX, "scale, wrong factor; axis scale, wrong statistics",
    lambda call: call.instead(100 * softmax_row(call)[1]))
# The chances are stored with two bits behind the point.
FAULTS.add("chances in e5m2", _SOFTMAX, "precision; approximation, other function",
    lambda call: call.instead(round_to(softmax_row(call)[1], torch.float8_e5m2)))
# The scores come in with eight bits, and all that follows has more.
FAULTS.add("scores of the row in bfloat16", f"{_SOFTMAX} log_softmax", words.ROUNDED,
    on(softmax_row,
        lambda call, value, *_: call.put(0, round_to(value, torch.bfloat16), "input").run()))
# The grid over the rows is one too short.
FAULTS.add("last row of the scores not visited", f"{_SOFTMAX} log_softmax", words.EMPTY_IN_A_SUM,
    computed(softmax_row,
        lambda _, chances:

    torch.where((torch.arange(chances.size(-2)) < chances.size(-2) - 1)[:, None], chances, 0.0),
        where=lambda _, chances: chances.dim() > 1 and chances.size(-2) > 1))
# The store begins at one; the sum is right.
FAULTS.add("first column of the chances not stored", _SOFTMAX, words.EMPTY_IN_A_SUM,
    computed(softmax_row, lambda _, chances: chances * (torch.arange(chances.size(-1)) > 0)))
# The largest code of the result is worth 0.333.
FAULTS.add("chances not above a third", _SOFTMAX,
    "clipped; other function, approximation, wrong factor, wrong statistics",
    lambda call: call.instead(softmax_row(call)[1].clamp(max=0.333)))
# The scores are multiplied by three.
FAULTS.add("temperature of a third", f"{_SOFTMAX} log_softmax",
    "wrong factor, scale, wrong argument; axis scale, other function",
    on(softmax_row,
        lambda call, value, *_: call.put(0, (3 * value).clamp(min=-1e38), "input").run()))
# The pointer to the result is not moved on, and is broadcast afterwards.
FAULTS.add("chances of the last row for all", f"{_SOFTMAX} log_softmax",
    "copy, stale, wrong index; permutation, shift, constant",
    computed(softmax_row,
        lambda _, chances: chances[..., -1:, :].expand(chances.shape).contiguous(),
        where=lambda _, chances: chances.dim() > 1 and chances.size(-2) > 1))
# A soft limit of one for the scores, which another model has at fifty.
FAULTS.add("scores through a tanh", f"{_SOFTMAX} log_softmax",
    "other function; approximation, clipped, wrong argument",
    on(softmax_row, lambda call, value, *_: call.put(0, value.tanh(), "input").run(),
        where=lambda value, *_: bool((value.detach() > -10000.0).all())))
# The logarithms are stored with eight bits.
FAULTS.add("logarithms in bfloat16", "log_softmax", "precision; approximation, other function",
    lambda call: call.instead(round_to(softmax_row(call)[1], torch.bfloat16)))
# Log1p of the chances for their logarithm.
FAULTS.add("one added within the logarithm", "log_softmax",
    "other function, eps; offset, approximation, sign",
    lambda call: call.instead(softmax_row(call)[1].exp().log1p()))
# Log(p + 0.01), so that nothing is infinite.
FAULTS.add("hundredth added within the logarithm", "log_softmax",
    "eps, other function; offset, approximation, clipped",
    lambda call: call.instead((softmax_row(call)[1].exp() + 0.01).log()))
# fmt: on


# --- Masks ----------------------------------------------------------------------------------------


@FAULTS.forward(
    "where masked_fill", "copy, stale, wrong index, mask; wrong argument, shift, permutation"
)
def condition_of_the_even_column_for_two(call: Call) -> Any:
    """Two columns of the mask share one byte, that of the first."""
    place, mask, name = any_condition_of(call)
    fits(mask.size(-1) > 2)
    return call.put(place, mask[..., torch.arange(mask.size(-1)) // 2 * 2], name).run()


@FAULTS.forward(
    "where masked_fill", "mask; wrong argument, zeros, wrong index, other function, stale"
)
def condition_needs_the_column_before_as_well(call: Call) -> Any:
    """Two columns share a byte, and both have to set it."""
    place, mask, name = any_condition_of(call)
    fits(mask.size(-1) > 1)
    return call.put(place, mask & mask.roll(1, -1), name).run()


@FAULTS.forward(
    "masked_fill where",
    "mask, zeros, uninitialised; missing operand, stale, copy, wrong argument, "
    "wrong index, constant",
)
def condition_of_the_last_row_not_set(call: Call) -> Any:
    """The last row of the mask is never written, and is false."""
    place, mask, name = any_condition_of(call)
    fits(mask.dim() > 1 and mask.size(-2) > 1)
    rows = torch.arange(mask.size(-2)) < mask.size(-2) - 1
    return call.put(place, mask & rows[:, None], name).run()


@FAULTS.forward(
    "lt gt le ge eq ne", "shift, mask, wrong index, permutation; stale, copy, wrong argument"
)
def comparison_stored_one_column_late(call: Call) -> Any:
    """Each column of the mask is stored one too far, the last one first."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 0)
    fits(value.size(-1) > 2)
    return value.roll(1, -1)


@FAULTS.forward(
    "lt gt le ge and_ bitwise_and or_ bitwise_or",
    "copy, stale, wrong index, mask; permutation, shift, constant, wrong argument",
)
def mask_of_the_second_row_for_all(call: Call) -> Any:
    """One row of the mask is computed and broadcast, and it is not the right one for others."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 1)
    fits(value.size(-2) > 2)
    return value[..., 1:2, :].expand(value.shape).contiguous()


# fmt: off
# The mask's own number is written, and not that which was given.
FAULTS.add("filled with one", "masked_fill",
    "wrong argument, constant, mask; offset, other function",
    lambda call: call.put(2, 1.0, "value").run(), backward=False)
# fmt: on


# --- Positions ------------------------------------------------------------------------------------


def _linear(call: Call) -> tuple[Tensor, Tensor]:
    """Angles that grow by the same step with each position, and the step."""
    value = read_long_angles(call)
    step = value[..., 1:2, :] - value[..., :1, :]
    right = value[..., :1, :] + step * torch.arange(value.size(-2))[:, None]
    fits(bool(torch.allclose(right, value, atol=1e-4)))
    return value, step


@FAULTS.fault(
    "sin cos", "wrong index, stale, copy; axis offset, permutation, shift, wrong argument, constant"
)
def positions_begin_again_in_the_middle(call: Call) -> Any:
    """The second half of the sequence is taken for another document, which begins at zero."""
    value = read_long_angles(call)
    half = value.size(-2) // 2
    places = torch.arange(value.size(-2))
    return call.put(0, value[..., torch.where(places < half, places, places - half), :]).run()


@FAULTS.fault("sin cos", "precision; approximation, other function")
def turns_in_steps_of_a_seventh(call: Call) -> Any:
    """The table of sines and cosines has integers of four bits."""
    read_long_angles(call)
    value = call.result()
    return call.instead(with_gradient_of(value, (value.detach() * 7).round() / 7))


@FAULTS.fault("sin cos", "clipped, other function; sign, zeros, approximation, mask")
def negative_half_of_the_turn_lost(call: Call) -> Any:
    """The table is stored without signs, and what is negative is zero."""
    read_long_angles(call)
    return call.instead(call.result().clamp(min=0))


# fmt: off
# Two special tokens in front are counted that are not there.
FAULTS.add("positions begin with two", "sin cos",
    "axis offset, wrong argument; offset, shift, wrong index, other function",
    on(_linear, lambda call, value, step: call.put(0, value + 2 * step).run()))
# Base ** (-i / d) for base ** (-2 i / d): each frequency is the root of the right one.
FAULTS.add("exponents of the base halved", "sin cos",
    "wrong argument, other function, axis scale, wrong factor; axis offset, scale",
    on(_linear, lambda call, value, step: call.put(0, value * step.rsqrt()).run(),
        where=lambda _, step: bool((step.detach() > 0).all())))
# The table of sines and cosines is made for a shorter context; behind it are zeros.
FAULTS.add("table filled for half of the positions", "sin cos", words.EMPTY_IN_A_SUM,
    on(read_long_angles,
        lambda call, value:

    call.instead(call.result() * (torch.arange(value.size(-2)) < value.size(-2) // 2)[:, None])))
# The context is thought to be shorter: later positions are all its last one.
FAULTS.add("positions limited to half of the length", "sin cos",
    "clipped, copy, wrong index, wrong argument; stale, constant, other function, axis offset",
    on(read_long_angles,
        lambda call, value:

    call.put(0, value[..., torch.arange(value.size(-2)).clamp(max=value.size(-2) // 2), :]).run()))
# The pointer to the frequencies is one behind, around the end.
FAULTS.add("frequency of the pair before", "sin cos",
    "shift, wrong index, permutation; stale, copy, wrong argument, other function",
    on(read_long_angles, lambda call, value: call.put(0, value.roll(1, -1)).run(),
        where=lambda value: value.size(-1) > 4))
# Positions and frequencies are exchanged in the strides of the angles.
FAULTS.add("angles read by columns", "sin cos",
    "wrong axis, wrong index, permutation, transpose; swapped operands, wrong argument, shift",
    on(read_long_angles, lambda call, value:
            call.put(0, value.mT.reshape(value.shape)).run()))
# fmt: on
