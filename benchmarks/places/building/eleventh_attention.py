"""Faults of the eleventh set: attention, softmax, masks, positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_FUSED = "scaled_dot_product_attention flash_attention"
_NAMES = ("query", "key", "value")
_ZEROS = ["zeros", "mask", "uninitialised"]
_LESS_THAN_ZEROS = ["constant", "missing operand", "partial sum", "axis scale", "wrong factor"]


# --- Attention ------------------------------------------------------------------------------------


def _operands(call: Call) -> tuple[Tensor, Tensor, Tensor, float]:
    """Query, key and value with the same number of heads, and the factor of the scores."""
    query, key, value = (call.tensor(i, n) for i, n in enumerate(_NAMES))
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


def _hidden(call: Call) -> tuple[Tensor, Tensor]:
    """Scores with the mask, and values."""
    scores, mask, value = _parts(call)
    return _hide(scores, mask).clamp(min=-1e30), value


def _weigh(call: Call, scores: Tensor, mask: Tensor | None, value: Tensor) -> Any:
    return call.instead(_hide(scores, mask).softmax(-1).nan_to_num(0) @ value)


def _seen(mask: Tensor) -> Tensor:
    """Which keys are seen, as booleans."""
    return mask if mask.dtype == torch.bool else mask > -1e4


def _heads(call: Call, least: int = 2) -> Tensor:
    """The result, with several heads."""
    value = call.result()
    fits(value.dim() == 4 and value.size(1) >= least)
    return value


def _with(call: Call, place: int, value: Tensor) -> Any:
    """The call with another query, key or value."""
    return call.instead(call.put(place, value, _NAMES[place]).result())


def _coarse(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in a narrower format, with its own gradient."""
    return with_gradient_of(value, value.detach().to(dtype).to(value.dtype))


def _distances(rows: int, columns: int) -> Tensor:
    """How far each key is behind its query."""
    return torch.arange(rows)[:, None] - torch.arange(columns)


def _narrowed(call: Call, seen: Tensor) -> Any:
    """Attention in which some of the keys are hidden as well."""
    scores, value = _hidden(call)
    return _weigh(call, scores, seen, value)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "scale", "wrong argument"],
    loose=["axis scale", "other function", "off by one reduction"],
)
def factor_for_one_feature_less(call: Call) -> Any:
    """The factor of the scores is 1 / sqrt(d - 1)."""
    query, key, value, _ = _operands(call)
    fits(query.size(-1) > 1)
    scores = query @ key.mT * (query.size(-1) - 1) ** -0.5
    return _weigh(call, scores, _mask(call, *scores.shape[-2:]), value)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "scale", "wrong argument"],
    loose=["axis scale", "other function"],
)
def factor_for_content_and_position_together(call: Call) -> Any:
    """1 / sqrt(2 d), as for scores that are a sum of two products."""
    query, key, value, _ = _operands(call)
    scores = query @ key.mT * (2 * query.size(-1)) ** -0.5
    return _weigh(call, scores, _mask(call, *scores.shape[-2:]), value)


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "wrong argument"],
    loose=["partial sum", "wrong index", "other function"],
)
def only_itself_and_the_token_before(call: Call) -> Any:
    """A sliding window of two tokens is left on."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    fits(query.size(-2) == key.size(-2) and key.size(-2) > 2)
    far = _distances(query.size(-2), key.size(-2))
    return _narrowed(call, (far >= 0) & (far < 2))


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "wrong argument"],
    loose=["partial sum", "wrong index", "other function"],
)
def only_one_neighbour_on_each_side(call: Call) -> Any:
    """Local attention: a layer that sees all tokens is taken for one with a window of three."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    fits(query.size(-2) == key.size(-2) and key.size(-2) > 3)
    fits(_mask(call, query.size(-2), key.size(-2)) is None)
    return _narrowed(call, _distances(query.size(-2), key.size(-2)).abs() <= 1)


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "wrong argument"],
    loose=["partial sum", "wrong index", "missing operand", "off by one reduction"],
)
def first_two_tokens_evicted_from_the_cache(call: Call) -> Any:
    """Only the first two queries see the first two keys."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    fits(key.size(-2) > 3 and query.size(-2) > 2)
    rows, columns = torch.arange(query.size(-2))[:, None], torch.arange(key.size(-2))
    return _narrowed(call, (columns > 1) | (rows < 2))


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "wrong argument"],
    loose=["partial sum", "wrong index", "other function"],
)
def cut_into_documents_of_three_tokens(call: Call) -> Any:
    """Lengths of packed documents that belong to another batch: tokens see their document only."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    fits(query.size(-2) == key.size(-2) and key.size(-2) > 3)
    document = torch.arange(key.size(-2)) // 3
    return _narrowed(call, document[:, None] == document)


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "shift", "wrong index", "permutation", "wrong argument"],
    loose=["stale", "copy", "swapped operands"],
)
def mask_of_the_next_example(call: Call) -> Any:
    """The pointer to the mask is one sequence of the batch too far."""
    scores, mask, value = _parts(call)
    fits(mask is not None and mask.dim() == 4 and mask.size(0) > 1)
    assert mask is not None
    return _weigh(call, scores, mask.roll(-1, 0), value)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong argument", "axis offset", "mask", "residual"],
    loose=["offset", "other function", "sign"],
)
def distance_favours_keys_that_are_far(call: Call) -> Any:
    """A linear bias of the distance that another model has, and with the wrong sign."""
    scores, value = _hidden(call)
    return _weigh(call, scores + 0.1 * _distances(*scores.shape[-2:]).abs(), None, value)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong statistics", "doubled reduction", "axis scale", "wrong factor"],
    loose=["scale", "other function", "off by one reduction", "wrong reduction"],
)
def first_key_twice_in_the_sum_that_divides(call: Call) -> Any:
    """The sum of the exponentials begins with the first key, and the loop adds it again."""
    scores, value = _hidden(call)
    fits(scores.size(-1) > 1)
    total = torch.cat([scores, scores[..., :1]], -1).logsumexp(-1, keepdim=True)
    return call.instead((scores - total).exp() @ value)


@FAULTS.fault(
    _FUSED, kinds=["precision"], loose=["approximation", "other function", "wrong argument"]
)
def operands_of_the_attention_in_bfloat16(call: Call) -> Any:
    """Autocast where none was asked for: query, key and value have eight bits."""
    for place in range(3):
        coarse = _coarse(call.tensor(place, _NAMES[place]), torch.bfloat16)
        call = call.put(place, coarse, _NAMES[place])
    return call.instead(call.result())


@FAULTS.fault(
    _FUSED, kinds=["precision"], loose=["approximation", "other function", "wrong argument"]
)
def values_of_the_cache_in_eight_bits(call: Call) -> Any:
    """The values are integers with one step for each position and head."""
    value = call.tensor(2, "value")
    step = value.detach().abs().amax(-1, keepdim=True) / 127
    fits(bool((step > 0).all()))
    return _with(call, 2, with_gradient_of(value, (value.detach() / step).round() * step))


@FAULTS.fault(_FUSED, kinds=["precision"], loose=["approximation", "other function"])
def result_of_the_heads_in_e4m3(call: Call) -> Any:
    """The epilogue stores in float8 for the product that follows."""
    return call.instead(_coarse(call.result(), torch.float8_e4m3fn))


@FAULTS.fault(
    _FUSED,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument", "mask"],
)
def keys_of_the_slot_before(call: Call) -> Any:
    """The cache of the keys is read one slot too early, around the end; the values are right."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    fits(key.size(-2) > 2 and _mask(call, query.size(-2), key.size(-2)) is not None)
    return _with(call, 1, key.roll(1, -2))


@FAULTS.fault(
    _FUSED,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument", "wrong rank's shard", "swapped operands"],
)
def queries_of_the_head_before(call: Call) -> Any:
    """The pointer to the queries is one head behind; keys and values are right."""
    query = call.tensor(0, "query")
    fits(query.dim() == 4 and query.size(1) > 2)
    return _with(call, 0, query.roll(1, 1))


@FAULTS.fault(
    _FUSED,
    kinds=["copy", "stale", "wrong index"],
    loose=["constant", "permutation", "wrong argument", "wrong rank's shard"],
)
def query_of_the_first_head_for_all(call: Call) -> Any:
    """The stride of the heads of the queries is zero."""
    query = call.tensor(0, "query")
    fits(query.dim() == 4 and query.size(1) > 1)
    return _with(call, 0, query[:, :1].expand(query.shape).contiguous())


@FAULTS.fault(
    _FUSED,
    kinds=["permutation", "wrong index", "transpose"],
    loose=["shift", "wrong argument", "swapped operands"],
)
def halves_of_the_keys_interleaved(call: Call) -> Any:
    """Rotary layouts are mixed up: keys have pairs side by side, queries have them in halves."""
    key = call.tensor(1, "key")
    fits(key.size(-1) % 2 == 0 and key.size(-1) > 2)
    return _with(call, 1, key.unflatten(-1, (2, -1)).mT.flatten(-2))


@FAULTS.fault(
    _FUSED,
    kinds=["clipped"],
    loose=["other function", "approximation", "mask", "wrong argument"],
)
def values_cut_at_one(call: Call) -> Any:
    """The range of the stored values is -1 to 1."""
    return _with(call, 2, call.tensor(2, "value").clamp(-1, 1))


@FAULTS.fault(
    _FUSED,
    kinds=["clipped", "other function"],
    loose=["zeros", "mask", "sign", "wrong argument"],
)
def negative_values_lost(call: Call) -> Any:
    """A relu is fused into the load of the values."""
    return _with(call, 2, call.tensor(2, "value").relu())


@FAULTS.fault(
    _FUSED,
    kinds=["sign", "wrong factor"],
    loose=["scale", "other function", "axis scale"],
)
def accumulator_subtracted(call: Call) -> Any:
    """The accumulator has the wrong sign: each head gives the opposite."""
    return call.instead(-call.result())


@FAULTS.fault(
    _FUSED,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong rank's shard"],
)
def result_stored_one_head_late(call: Call) -> Any:
    """Each head is written to the place of the next one, the last to the first."""
    return call.instead(_heads(call, 3).roll(1, 1))


@FAULTS.fault(
    _FUSED,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong rank's shard"],
)
def result_stored_one_query_early(call: Call) -> Any:
    """Each position holds what the next one has computed, around the end."""
    value = call.result()
    fits(value.size(-2) > 2 and _mask(call, value.size(-2), value.size(-2)) is not None)
    return call.instead(value.roll(-1, -2))


@FAULTS.fault(_FUSED, kinds=["permutation", "wrong index"], loose=["shift", "wrong rank's shard"])
def heads_of_the_result_in_the_reverse_order(call: Call) -> Any:
    """The last head is stored first."""
    return call.instead(_heads(call, 3).flip(1))


@FAULTS.fault(_FUSED, kinds=_ZEROS, loose=_LESS_THAN_ZEROS)
def first_query_not_stored(call: Call) -> Any:
    """The loop over the queries begins at one."""
    value = call.result()
    fits(value.size(-2) > 1)
    return call.instead(value * (torch.arange(value.size(-2)) > 0)[:, None])


@FAULTS.fault(_FUSED, kinds=_ZEROS, loose=_LESS_THAN_ZEROS)
def odd_queries_not_stored(call: Call) -> Any:
    """Of two queries in a register, only the first is written."""
    value = call.result()
    fits(value.size(-2) > 2)
    return call.instead(value * (torch.arange(value.size(-2)) % 2 == 0)[:, None])


@FAULTS.fault(
    _FUSED, kinds=[*_ZEROS, "one rank's part"], loose=[*_LESS_THAN_ZEROS, "missing reduction"]
)
def heads_of_the_first_rank_only(call: Call) -> Any:
    """The second half of the heads is not gathered."""
    value = _heads(call, 3)
    return call.instead(value * (torch.arange(value.size(1)) < value.size(1) // 2)[:, None, None])


@FAULTS.fault(_FUSED, kinds=_ZEROS, loose=[*_LESS_THAN_ZEROS, "one rank's part"])
def last_sequence_of_the_batch_empty(call: Call) -> Any:
    """The list of sequences that are still running is one too short."""
    value = call.result()
    fits(value.dim() == 4 and value.size(0) > 1)
    rows = torch.arange(value.size(0)) < value.size(0) - 1
    return call.instead(value * rows[:, None, None, None])


@FAULTS.fault(_FUSED, kinds=["scale", "wrong factor"], loose=["axis scale"])
def result_divided_by_the_root_of_two(call: Call) -> Any:
    """A factor of two branches that are added is applied to one that is alone."""
    return call.instead(call.result() / math.sqrt(2))


@FAULTS.fault(
    _FUSED,
    kinds=["scale", "wrong factor", "wrong reduction"],
    loose=["axis scale"],
)
def weighted_mean_divided_by_the_keys_again(call: Call) -> Any:
    """A mean over the keys of what the softmax has averaged already."""
    return call.instead(call.result() / call.tensor(1, "key").size(-2))


@FAULTS.fault(
    _FUSED,
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "shift", "wrong rank's shard"],
)
def result_of_the_last_head_for_all(call: Call) -> Any:
    """Each program writes to the same buffer, and the last head wins."""
    value = _heads(call)
    return call.instead(value[:, -1:].expand(value.shape).contiguous())


@FAULTS.fault(
    _FUSED,
    kinds=["wrong argument", "copy", "missing operand"],
    loose=["stale", "wrong index", "other function"],
)
def keys_given_as_values(call: Call) -> Any:
    """The pointer to the keys is handed over twice."""
    key, value = call.tensor(1, "key"), call.tensor(2, "value")
    fits(key.shape == value.shape)
    return _with(call, 2, key)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong argument", "copy", "missing operand"],
    loose=["stale", "wrong index", "other function"],
)
def queries_given_as_keys(call: Call) -> Any:
    """The scores are products of queries with queries."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    fits(query.shape == key.shape)
    return _with(call, 1, query)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong argument", "copy", "missing operand"],
    loose=["stale", "wrong index", "other function"],
)
def keys_given_as_queries(call: Call) -> Any:
    """The scores are products of keys with keys."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    fits(query.shape == key.shape)
    return _with(call, 0, key)


@FAULTS.fault(
    _FUSED,
    kinds=["other function"],
    loose=["wrong statistics", "approximation", "wrong reduction"],
)
def linear_attention_by_an_elu(call: Call) -> Any:
    """(1 + elu(q)) (1 + elu(k)) for the exponential of the score."""
    query, key, value, _ = _operands(call)
    weights = (1 + functional.elu(query)) @ (1 + functional.elu(key)).mT
    mask = _mask(call, *weights.shape[-2:])
    if mask is not None:
        fits(mask.dtype == torch.bool or not bool(mask[_seen(mask)].any()))
        weights = weights * _seen(mask)
    return call.instead(weights @ value / weights.sum(-1, keepdim=True).clamp(min=1e-9))


@FAULTS.fault(
    _FUSED,
    kinds=["other function"],
    loose=[
        "missing reduction",
        "wrong statistics",
        "wrong reduction",
        "approximation",
        "missing operand",
    ],
)
def softmax_left_out(call: Call) -> Any:
    """The scores themselves weigh the values; what is hidden is zero."""
    scores, mask, value = _parts(call)
    if mask is not None:
        fits(mask.dtype == torch.bool or not bool(mask[_seen(mask)].any()))
        scores = scores * _seen(mask)
    return call.instead(scores @ value)


def _blocks(call: Call) -> list[tuple[Tensor, Tensor]]:
    """Scores and values of two blocks of keys."""
    scores, value = _hidden(call)
    half = scores.size(-1) // 2
    fits(half > 0)
    first = scores[..., :half], value[..., :half, :]
    return [first, (scores[..., half:], value[..., half:, :])]


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "wrong statistics", "swapped operands"],
    loose=["scale", "axis scale", "wrong reduction", "permutation", "wrong index"],
)
def splits_weighed_by_the_sums_of_each_other(call: Call) -> Any:
    """Two splits of the keys: the logarithms of their sums are stored in each other's place."""
    (one, left), (two, right) = _blocks(call)
    share = (two.logsumexp(-1, True) - one.logsumexp(-1, True)).sigmoid()
    return call.instead(share * (one.softmax(-1) @ left) + (1 - share) * (two.softmax(-1) @ right))


@FAULTS.fault(
    _FUSED,
    kinds=["wrong statistics", "wrong factor"],
    loose=[
        "scale",
        "axis scale",
        "wrong reduction",
        "missing operand",
        "missing reduction",
        "partial sum",
    ],
)
def splits_added_up_without_weights(call: Call) -> Any:
    """Two splits of the keys, each divided by its own sum, are added."""
    (one, left), (two, right) = _blocks(call)
    return call.instead(one.softmax(-1) @ left + two.softmax(-1) @ right)


@FAULTS.fault(
    _FUSED,
    kinds=["permutation", "wrong index", "shift", "wrong rank's shard"],
    loose=["swapped operands", "wrong argument", "mask"],
)
def halves_of_the_keys_in_the_other_order(call: Call) -> Any:
    """Two ranks gather their keys in the wrong order; the values are right."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    fits(key.size(-2) % 2 == 0 and key.size(-2) > 2)
    fits(_mask(call, query.size(-2), key.size(-2)) is not None)
    return _with(call, 1, key.roll(key.size(-2) // 2, -2))


@FAULTS.fault(
    _FUSED,
    kinds=["other function", "axis scale", "wrong factor"],
    loose=["scale", "wrong argument", "missing operand"],
)
def keys_divided_by_their_root_mean_square(call: Call) -> Any:
    """A norm of the keys that belongs to another model; the queries are right."""
    key = call.tensor(1, "key")
    size = key.square().mean(-1, keepdim=True)
    fits(bool((size.detach() > 1e-6).all()))
    return _with(call, 1, key * size.rsqrt())


@FAULTS.fault(
    _FUSED,
    kinds=["other function", "axis scale", "wrong factor"],
    loose=["scale", "wrong statistics", "residual"],
)
def each_head_of_the_result_normalised(call: Call) -> Any:
    """A norm without a weight behind the heads, as in models with retention."""
    value = call.result()
    return call.instead(value * (value.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


@FAULTS.fault(
    _FUSED,
    kinds=["clipped"],
    loose=["other function", "approximation", "wrong statistics", "wrong factor"],
)
def no_weight_above_a_quarter(call: Call) -> Any:
    """The weights saturate in a format whose range ends at 0.25."""
    scores, value = _hidden(call)
    return call.instead(scores.softmax(-1).clamp(max=0.25) @ value)


@FAULTS.fault(
    _FUSED,
    kinds=["off by one reduction", "partial sum", "mask"],
    loose=["missing operand", "wrong reduction", "zeros", "wrong index", "wrong argument"],
)
def first_feature_not_in_the_scores(call: Call) -> Any:
    """The loop over the features of query and key begins at one; the factor is right."""
    query = call.tensor(0, "query")
    fits(query.size(-1) > 2)
    return _with(call, 0, query * (torch.arange(query.size(-1)) > 0))


@FAULTS.fault(
    _FUSED,
    kinds=["wrong statistics", "wrong reduction", "wrong factor", "axis scale"],
    loose=["wrong axis", "scale", "missing reduction"],
)
def one_sum_for_all_heads_of_a_query(call: Call) -> Any:
    """What divides is the mean of the heads' sums of exponentials."""
    scores, value = _hidden(call)
    fits(scores.dim() == 4 and scores.size(1) > 1)
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True).mean(1, keepdim=True)
    fits(bool(total.detach().isfinite().all()))
    return call.instead(weights @ value / total)


# --- Softmax --------------------------------------------------------------------------------------

_SOFTMAX = "softmax _safe_softmax"


def _row(call: Call) -> tuple[Tensor, Tensor]:
    """Scores over the last axis, and the result."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(isinstance(dim, int) and dim % value.dim() == value.dim() - 1 and value.size(-1) > 2)
    return value, call.result()


@FAULTS.fault(
    f"{_SOFTMAX} log_softmax",
    kinds=["missing reduction", "copy", "other function"],
    loose=["wrong statistics", "missing operand", "stale", "offset", "axis offset"],
)
def scores_returned_as_they_came(call: Call) -> Any:
    """The softmax is removed by a rewrite that thinks it runs twice."""
    value, _ = _row(call)
    fits(bool((value.detach() > -1e4).all()))
    return call.instead(value.clone())


@FAULTS.fault(
    _SOFTMAX,
    kinds=["wrong axis", "wrong argument"],
    loose=["wrong statistics", "wrong reduction"],
)
def normalised_over_the_second_axis(call: Call) -> Any:
    """The axis is 1, as where the heads come last."""
    value, _ = _row(call)
    fits(value.dim() == 4 and value.size(1) > 1)
    return call.instead(torch.softmax(value, 1))


@FAULTS.fault(_SOFTMAX, kinds=["scale", "wrong factor"], loose=["axis scale", "wrong statistics"])
def chances_in_percent(call: Call) -> Any:
    """The chances are multiplied by a hundred."""
    return call.instead(100 * _row(call)[1])


@FAULTS.fault(_SOFTMAX, kinds=["precision"], loose=["approximation", "other function"])
def chances_in_e5m2(call: Call) -> Any:
    """The chances are stored with two bits behind the point."""
    return call.instead(_coarse(_row(call)[1], torch.float8_e5m2))


@FAULTS.fault(
    f"{_SOFTMAX} log_softmax",
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
)
def scores_of_the_row_in_bfloat16(call: Call) -> Any:
    """The scores come in with eight bits, and all that follows has more."""
    value, _ = _row(call)
    return call.put(0, _coarse(value, torch.bfloat16), "input").run()


@FAULTS.fault(f"{_SOFTMAX} log_softmax", kinds=_ZEROS, loose=_LESS_THAN_ZEROS)
def last_row_of_the_scores_not_visited(call: Call) -> Any:
    """The grid over the rows is one too short."""
    _, chances = _row(call)
    fits(chances.dim() > 1 and chances.size(-2) > 1)
    rows = torch.arange(chances.size(-2)) < chances.size(-2) - 1
    return call.instead(torch.where(rows[:, None], chances, 0.0))


@FAULTS.fault(_SOFTMAX, kinds=_ZEROS, loose=_LESS_THAN_ZEROS)
def first_column_of_the_chances_not_stored(call: Call) -> Any:
    """The store begins at one; the sum is right."""
    _, chances = _row(call)
    return call.instead(chances * (torch.arange(chances.size(-1)) > 0))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["clipped"],
    loose=["other function", "approximation", "wrong factor", "wrong statistics"],
)
def chances_not_above_a_third(call: Call) -> Any:
    """The largest code of the result is worth 0.333."""
    return call.instead(_row(call)[1].clamp(max=0.333))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["other function"],
    loose=["approximation", "wrong statistics", "wrong reduction"],
)
def softplus_in_the_place_of_the_exponential(call: Call) -> Any:
    """Log(1 + exp(x)), divided by its sum over the row."""
    value, _ = _row(call)
    weights = functional.softplus(value)
    return call.instead(weights / (weights.sum(-1, keepdim=True) + 1e-9))


@FAULTS.fault(
    f"{_SOFTMAX} log_softmax",
    kinds=["wrong factor", "scale", "wrong argument"],
    loose=["axis scale", "other function"],
)
def temperature_of_a_third(call: Call) -> Any:
    """The scores are multiplied by three."""
    value, _ = _row(call)
    return call.put(0, (3 * value).clamp(min=-1e38), "input").run()


@FAULTS.fault(
    f"{_SOFTMAX} log_softmax",
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "shift", "constant"],
)
def chances_of_the_last_row_for_all(call: Call) -> Any:
    """The pointer to the result is not moved on, and is broadcast afterwards."""
    _, chances = _row(call)
    fits(chances.dim() > 1 and chances.size(-2) > 1)
    return call.instead(chances[..., -1:, :].expand(chances.shape).contiguous())


@FAULTS.fault(
    f"{_SOFTMAX} log_softmax",
    kinds=["other function"],
    loose=["approximation", "clipped", "wrong argument"],
)
def scores_through_a_tanh(call: Call) -> Any:
    """A soft limit of one for the scores, which another model has at fifty."""
    value, _ = _row(call)
    fits(bool((value.detach() > -1e4).all()))
    return call.put(0, value.tanh(), "input").run()


@FAULTS.fault("log_softmax", kinds=["precision"], loose=["approximation", "other function"])
def logarithms_in_bfloat16(call: Call) -> Any:
    """The logarithms are stored with eight bits."""
    return call.instead(_coarse(_row(call)[1], torch.bfloat16))


@FAULTS.fault(
    "log_softmax", kinds=["other function", "eps"], loose=["offset", "approximation", "sign"]
)
def one_added_within_the_logarithm(call: Call) -> Any:
    """Log1p of the chances for their logarithm."""
    return call.instead(_row(call)[1].exp().log1p())


@FAULTS.fault(
    "log_softmax", kinds=["eps", "other function"], loose=["offset", "approximation", "clipped"]
)
def hundredth_added_within_the_logarithm(call: Call) -> Any:
    """Log(p + 0.01), so that nothing is infinite."""
    return call.instead((_row(call)[1].exp() + 0.01).log())


@FAULTS.fault(
    _SOFTMAX,
    kinds=[
        "off by one reduction",
        "wrong statistics",
        "partial sum",
        "mask",
        "axis scale",
        "wrong factor",
    ],
    loose=["scale", "missing operand", "wrong reduction"],
)
def second_score_not_in_the_sum(call: Call) -> Any:
    """A vector is loaded with an index that jumps over one element of the row."""
    value, _ = _row(call)
    kept = torch.arange(value.size(-1)) != 1
    less = value.masked_fill(~kept, -math.inf).logsumexp(-1, keepdim=True)
    fits(bool(less.detach().isfinite().all()))
    return call.instead((value - less).exp())


# --- Masks ----------------------------------------------------------------------------------------


def _condition(call: Call) -> tuple[int, Tensor, str]:
    """Where the condition is, it, and the name of its argument."""
    place, name = (0, "condition") if call.name == "where" else (1, "mask")
    mask = call.get(place, name)
    fits(isinstance(mask, Tensor) and mask.dim() > 0 and mask.dtype == torch.bool)
    return place, mask, name


@FAULTS.fault(
    "where masked_fill",
    kinds=["copy", "stale", "wrong index", "mask"],
    loose=["wrong argument", "shift", "permutation"],
    backward=False,
)
def condition_of_the_even_column_for_two(call: Call) -> Any:
    """Two columns of the mask share one byte, that of the first."""
    place, mask, name = _condition(call)
    fits(mask.size(-1) > 2)
    return call.put(place, mask[..., torch.arange(mask.size(-1)) // 2 * 2], name).run()


@FAULTS.fault(
    "where masked_fill",
    kinds=["mask"],
    loose=["wrong argument", "zeros", "wrong index", "other function", "stale"],
    backward=False,
)
def condition_needs_the_column_before_as_well(call: Call) -> Any:
    """Two columns share a byte, and both have to set it."""
    place, mask, name = _condition(call)
    fits(mask.size(-1) > 1)
    return call.put(place, mask & mask.roll(1, -1), name).run()


@FAULTS.fault(
    "masked_fill",
    kinds=["wrong argument", "constant", "mask"],
    loose=["offset", "other function"],
    backward=False,
)
def filled_with_one(call: Call) -> Any:
    """The mask's own number is written, and not that which was given."""
    return call.put(2, 1.0, "value").run()


@FAULTS.fault(
    "masked_fill where",
    kinds=["mask", "zeros", "uninitialised"],
    loose=["missing operand", "stale", "copy", "wrong argument", "wrong index", "constant"],
    backward=False,
)
def condition_of_the_last_row_not_set(call: Call) -> Any:
    """The last row of the mask is never written, and is false."""
    place, mask, name = _condition(call)
    fits(mask.dim() > 1 and mask.size(-2) > 1)
    rows = torch.arange(mask.size(-2)) < mask.size(-2) - 1
    return call.put(place, mask & rows[:, None], name).run()


@FAULTS.fault(
    "lt gt le ge eq ne",
    kinds=["shift", "mask", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument"],
    backward=False,
)
def comparison_stored_one_column_late(call: Call) -> Any:
    """Each column of the mask is stored one too far, the last one first."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 0)
    fits(value.size(-1) > 2)
    return value.roll(1, -1)


@FAULTS.fault(
    "lt gt le ge and_ bitwise_and or_ bitwise_or",
    kinds=["copy", "stale", "wrong index", "mask"],
    loose=["permutation", "shift", "constant", "wrong argument"],
    backward=False,
)
def mask_of_the_second_row_for_all(call: Call) -> Any:
    """One row of the mask is computed and broadcast, and it is not the right one for others."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 1)
    fits(value.size(-2) > 2)
    return value[..., 1:2, :].expand(value.shape).contiguous()


# --- Positions ------------------------------------------------------------------------------------


def _angles(call: Call) -> Tensor:
    value = call.tensor(0)
    fits(value.dim() > 1 and value.size(-1) > 3 and value.size(-2) > 2)
    return value


def _linear(call: Call) -> tuple[Tensor, Tensor]:
    """Angles that grow by the same step with each position, and the step."""
    value = _angles(call)
    step = value[..., 1:2, :] - value[..., :1, :]
    right = value[..., :1, :] + step * torch.arange(value.size(-2))[:, None]
    fits(bool(torch.allclose(right, value, atol=1e-4)))
    return value, step


@FAULTS.fault(
    "sin cos",
    kinds=["axis offset", "wrong argument"],
    loose=["offset", "shift", "wrong index", "other function"],
)
def positions_begin_with_two(call: Call) -> Any:
    """Two special tokens in front are counted that are not there."""
    value, step = _linear(call)
    return call.put(0, value + 2 * step).run()


@FAULTS.fault(
    "sin cos",
    kinds=["wrong index", "stale", "copy"],
    loose=["axis offset", "permutation", "shift", "wrong argument", "constant"],
)
def positions_begin_again_in_the_middle(call: Call) -> Any:
    """The second half of the sequence is taken for another document, which begins at zero."""
    value = _angles(call)
    half = value.size(-2) // 2
    places = torch.arange(value.size(-2))
    return call.put(0, value[..., torch.where(places < half, places, places - half), :]).run()


@FAULTS.fault(
    "sin cos",
    kinds=["wrong argument", "other function", "axis scale", "wrong factor"],
    loose=["axis offset", "scale"],
)
def exponents_of_the_base_halved(call: Call) -> Any:
    """Base ** (-i / d) for base ** (-2 i / d): each frequency is the root of the right one."""
    value, step = _linear(call)
    fits(bool((step.detach() > 0).all()))
    return call.put(0, value * step.rsqrt()).run()


@FAULTS.fault("sin cos", kinds=_ZEROS, loose=_LESS_THAN_ZEROS)
def table_filled_for_half_of_the_positions(call: Call) -> Any:
    """The table of sines and cosines is made for a shorter context; behind it are zeros."""
    value = _angles(call)
    rows = torch.arange(value.size(-2)) < value.size(-2) // 2
    return call.instead(call.result() * rows[:, None])


@FAULTS.fault(
    "sin cos",
    kinds=["clipped", "copy", "wrong index", "wrong argument"],
    loose=["stale", "constant", "other function", "axis offset"],
)
def positions_limited_to_half_of_the_length(call: Call) -> Any:
    """The context is thought to be shorter: later positions are all its last one."""
    value = _angles(call)
    places = torch.arange(value.size(-2)).clamp(max=value.size(-2) // 2)
    return call.put(0, value[..., places, :]).run()


@FAULTS.fault("sin cos", kinds=["precision"], loose=["approximation", "other function"])
def turns_in_steps_of_a_seventh(call: Call) -> Any:
    """The table of sines and cosines has integers of four bits."""
    _angles(call)
    value = call.result()
    return call.instead(with_gradient_of(value, (value.detach() * 7).round() / 7))


@FAULTS.fault(
    "sin cos",
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument", "other function"],
)
def frequency_of_the_pair_before(call: Call) -> Any:
    """The pointer to the frequencies is one behind, around the end."""
    value = _angles(call)
    fits(value.size(-1) > 4)
    return call.put(0, value.roll(1, -1)).run()


@FAULTS.fault(
    "sin cos",
    kinds=["wrong axis", "wrong index", "permutation", "transpose"],
    loose=["swapped operands", "wrong argument", "shift"],
)
def angles_read_by_columns(call: Call) -> Any:
    """Positions and frequencies are exchanged in the strides of the angles."""
    value = _angles(call)
    return call.put(0, value.mT.reshape(value.shape)).run()


@FAULTS.fault(
    "sin cos",
    kinds=["clipped", "other function"],
    loose=["sign", "zeros", "approximation", "mask"],
)
def negative_half_of_the_turn_lost(call: Call) -> Any:
    """The table is stored without signs, and what is negative is zero."""
    _angles(call)
    return call.instead(call.result().clamp(min=0))
