"""Faults that were measured sixth and have been seen: attention, softmax, masks, positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, even, longer, on, operand, result, rounded
from benchmarks.places.parts import (
    added_bias,
    attention_operands,
    hide_scores,
    keys_seen_by_scores,
    mask_of,
    read_angles,
    scores_before_mask,
    weigh_values,
)
from torch import Tensor

FAULTS = Catalogue()
_FUSED = "scaled_dot_product_attention flash_attention"


# --- Attention ------------------------------------------------------------------------------------


def _exponentials(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Exponentials relative to the largest of their row, their sums, values."""
    scores, mask, value = scores_before_mask(call)
    hidden = hide_scores(scores, mask)
    weights = (hidden - hidden.amax(-1, keepdim=True)).exp()
    return weights, weights.sum(-1, keepdim=True), value


@FAULTS.fault(_FUSED, "wrong factor, scale, wrong argument; other function")
def scale_of_the_number_of_keys(call: Call) -> Any:
    """1 / sqrt(n) for 1 / sqrt(d): the axis before is taken for the width."""
    query, key, value, _ = attention_operands(call)
    fits(key.size(-2) != query.size(-1))
    scores = query @ key.mT * key.size(-2) ** -0.5
    return weigh_values(call, scores, mask_of(call, *scores.shape[-2:]), value)


@FAULTS.fault(_FUSED, "wrong factor, scale, wrong argument; other function")
def root_of_the_scale_on_one_side_only(call: Call) -> Any:
    """Queries and keys each get the fourth root of d, and the keys are forgotten."""
    scores, mask, value = scores_before_mask(call)
    width = call.tensor(0, "query").size(-1)
    fits(width > 1)
    return weigh_values(call, scores * width**0.25, mask, value)


@FAULTS.fault(
    _FUSED,
    "mask, wrong reduction, wrong statistics, axis scale; wrong factor, scale, "
    "other function, partial sum",
)
def mask_applied_behind_the_softmax(call: Call) -> Any:
    """Hidden keys count in the sum of the row, and are zero afterwards."""
    scores, mask, value = scores_before_mask(call)
    seen = keys_seen_by_scores(scores, mask)
    fits(mask is not None and not bool(seen.all()))
    weights = scores.softmax(-1) * seen
    return call.instead(weights @ value)


@FAULTS.fault(
    _FUSED,
    "wrong factor, other function, wrong reduction; scale, axis scale, stale, "
    "lost accumulation, wrong statistics",
)
def sum_rescaled_and_the_accumulator_not(call: Call) -> Any:
    """An online softmax in two blocks: only the sum of the first is brought to the new maximum."""
    scores, mask, value = scores_before_mask(call)
    half = scores.size(-1) // 2
    fits(half > 0)
    hidden = hide_scores(scores, mask)
    fits(bool(hidden[..., :half].isfinite().any(-1).all()))
    weights, total, _ = _exponentials(call)
    first = hidden[..., :half]
    own = (first - first.amax(-1, keepdim=True)).exp() @ value[..., :half, :]
    return call.instead((own + weights[..., half:] @ value[..., half:, :]) / total)


@FAULTS.fault(
    _FUSED,
    "partial sum, wrong reduction, wrong statistics, axis scale, missing reduction, "
    "one rank's part; wrong factor, scale, mask, lost accumulation",
)
def divided_by_the_sum_of_the_first_block(call: Call) -> Any:
    """All keys are weighed, and the sum that divides is that of the first half of them."""
    weights, _, value = _exponentials(call)
    half = weights.size(-1) // 2
    total = weights[..., :half].sum(-1, keepdim=True)
    fits(half > 0 and bool((total > 1e-3).all()))
    return call.instead(weights @ value / total)


@FAULTS.fault(_FUSED, "wrong index, shift, permutation; wrong rank's shard, wrong argument")
def bias_of_the_next_head(call: Call) -> Any:
    """The pointer to the bias is one head too far."""
    scores, bias, value = added_bias(call)
    fits(bias.dim() == 4 and bias.size(1) > 1)
    return weigh_values(call, scores, bias.roll(-1, 1), value)


@FAULTS.fault(_FUSED, words.EMPTY_ON_A_RANK)
def last_head_not_computed(call: Call) -> Any:
    """The grid has one head too few."""
    value = call.result().clone()
    fits(value.dim() == 4 and value.size(1) > 1)
    value[:, -1] = 0
    return call.instead(value)


@FAULTS.fault(_FUSED, "zeros, uninitialised, mask; constant, partial sum, axis scale, wrong factor")
def second_tile_of_the_head_not_stored(call: Call) -> Any:
    """Heads are wider than a tile: what is behind the first half of a head stays empty."""
    value = call.result().clone()
    fits(value.size(-1) > 1)
    value[..., value.size(-1) // 2 :] = 0
    return call.instead(value)


@FAULTS.fault(_FUSED, "permutation, wrong index; shift, swapped operands")
def rows_of_the_result_exchanged_in_pairs(call: Call) -> Any:
    """Two queries of a register are stored in the other order."""
    value = call.result()
    even = value.size(-2) // 2 * 2
    fits(even > 1)
    order = [place ^ 1 if place < even else place for place in range(value.size(-2))]
    return call.instead(value[..., order, :])


@FAULTS.fault(_FUSED, "residual; offset, other function, axis offset")
def own_value_added(call: Call) -> Any:
    """Each position gets its own value on top."""
    _, _, value, _ = attention_operands(call)
    result = call.result()
    fits(value.shape == result.shape)
    return call.instead(result + value)


@FAULTS.fault(_FUSED, "wrong index, copy, stale, mask; permutation, wrong argument")
def mask_of_the_first_query_of_a_block(call: Call) -> Any:
    """Blocks of two queries see what the first of them sees."""
    scores, mask, value = scores_before_mask(call)
    seen = keys_seen_by_scores(scores, mask)
    fits(mask is not None and seen.size(-2) > 1 and not bool(seen.all()))
    rows = torch.arange(seen.size(-2)) // 2 * 2
    shared = seen[..., rows, :]
    fits(bool(shared.any(-1).all()))
    return weigh_values(call, scores, shared, value)


@FAULTS.fault(_FUSED, "wrong index, stale, copy; permutation, wrong rank's shard")
def keys_of_the_first_page_twice(call: Call) -> Any:
    """The second half of the keys is read from the page of the first; the values are right."""
    key = call.tensor(1, "key").clone()
    half = key.size(-2) // 2
    fits(half > 0)
    key[..., half : 2 * half, :] = key[..., :half, :].clone()
    return call.put(1, key, "key").run()


@FAULTS.fault(_FUSED, "sign, wrong factor, other function; scale, axis scale, mask")
def second_half_of_the_query_negated(call: Call) -> Any:
    """The minus of the rotation is left on: the scores are a difference of two halves."""
    query = call.tensor(0, "query")
    width = query.size(-1)
    fits(width > 1)
    factor = torch.ones(width, dtype=query.dtype)
    factor[width // 2 :] = -1
    return call.put(0, query * factor, "query").run()


@FAULTS.fault(_FUSED, "clipped; other function, precision, wrong argument")
def keys_saturate_in_the_cache(call: Call) -> Any:
    """The range of the cache is half of the largest key."""
    key = call.tensor(1, "key")
    limit = float(key.detach().abs().max()) / 2
    return call.put(1, key.clamp(-limit, limit), "key").run()


# fmt: off
# 1 / sqrt(d / 2): only the features that are not turned are counted.
FAULTS.add("scale of the part without positions", _FUSED,
    "wrong factor, scale, wrong argument; other function",
    on(scores_before_mask,
        lambda call, scores, mask, value: weigh_values(call, scores * 2**0.5, mask, value)))
# The two halves of the features of a head are stored in each other's place.
FAULTS.add("halves of each head exchanged", _FUSED,
    "permutation, shift, wrong index; swapped operands, wrong rank's shard",
    result(lambda v: v.roll(v.size(-1) // 2, -1), where=even(-1)))
# The pointer to the values is one example of the batch too far; that of the keys is right.
FAULTS.add("values of the next sequence", _FUSED, "wrong index, shift, permutation; copy, stale",
    operand(2, lambda v:
            v.roll(-1, 0), "value", where=lambda v: v.dim() == 4 and v.size(0) > 1))
# A cache of two pages: the table of pages is wrong for the values.
FAULTS.add("pages of the values in the other order", _FUSED,
    "permutation, shift, wrong index; wrong rank's shard, copy",
    operand(2, lambda v: v.roll(v.size(-2) // 2, -2), "value", where=even(-2)))
# The values are stored in e5m2, as they are.
FAULTS.add("values through float8", _FUSED, "precision; approximation",
    operand(2, rounded(torch.float8_e5m2), "value"))
# A tenth is added to the sum that divides, so that it is never zero.
FAULTS.add("sum of the weights with a summand", _FUSED,
    "eps, axis scale, other function, wrong statistics; offset, scale, wrong factor, "
    "wrong reduction",
    computed(_exponentials, lambda weights, total, value: weights @ value / (total + 0.1)))
# Once to the mask and once to the scores.
FAULTS.add("bias of the positions added twice", _FUSED,
    "wrong factor, scale, residual, wrong argument; other function, doubled reduction, "
    "repeated bias",
    on(added_bias,
        lambda call, scores, bias, value: weigh_values(call, scores, 2 * bias, value)))
# Distances where nearness was meant.
FAULTS.add("bias of the positions subtracted", _FUSED,
    "sign, wrong factor, scale, wrong argument; other function, swapped operands",
    on(added_bias, lambda call, scores, bias, value:
            weigh_values(call, scores, -bias, value)))
# Divided by the number of heads, as by a mean over them.
FAULTS.add("result shared by the heads", _FUSED,
    "wrong factor, scale; missing operand, wrong reduction, axis scale",
    result(lambda v: v / v.size(1), where=lambda v: v.dim() == 4 and v.size(1) > 1))
# The keys are read from the end of their rows.
FAULTS.add("features of the key in the reverse order", _FUSED,
    "wrong index, permutation; shift, copy",
    operand(1, lambda v: v.flip(-1), "key", where=longer(-1)))
# A norm that belongs to queries and keys is applied to the values.
FAULTS.add("values of length one", _FUSED,
    "wrong factor, axis scale, scale; missing operand, other function, wrong statistics",
    operand(2, lambda v: v / (v.norm(dim=-1, keepdim=True) + 1e-06), "value"))
# The first query is taken for one that sees nothing: 0 / 0.
FAULTS.add("first row divided by nothing", _FUSED, "nonfinite; mask, uninitialised, overflow",
    result(lambda v:
            torch.cat([torch.full_like(v[..., :1, :], math.nan), v[..., 1:, :]], -2),
        where=longer(-2)))
# fmt: on


# --- Softmax --------------------------------------------------------------------------------------

_SOFTMAX = "softmax _safe_softmax"


def _row(call: Call) -> tuple[Tensor, Tensor]:
    """Scores of a softmax over the last axis, and their exponentials."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(isinstance(dim, int) and dim % value.dim() == value.dim() - 1 and value.size(-1) > 2)
    return value, (value - value.amax(-1, keepdim=True)).exp().nan_to_num()


@FAULTS.fault(_SOFTMAX, "shift, wrong index, permutation; copy")
def chances_one_column_late(call: Call) -> Any:
    """Stored one column further, the last one first."""
    _row(call)
    return call.instead(call.result().roll(1, -1))


@FAULTS.fault(
    _SOFTMAX,
    "wrong index, shift, axis scale, wrong statistics; stale, wrong factor, scale, permutation",
)
def sum_of_the_next_row_divides(call: Call) -> Any:
    """The pointer to the sums is one row too far."""
    value, weights = _row(call)
    fits(value.dim() > 1 and value.size(-2) > 1)
    total = weights.sum(-1, keepdim=True).roll(-1, -2)
    fits(bool((total > 1e-6).all()))
    return call.instead(weights / total)


@FAULTS.fault(
    _SOFTMAX,
    "partial sum, wrong statistics, axis scale, wrong reduction, one rank's part; "
    "wrong factor, scale, mask, missing reduction",
)
def sum_of_every_second_exponential(call: Call) -> Any:
    """A stride of two in the loop that adds, none in the loop that divides."""
    _, weights = _row(call)
    total = weights[..., ::2].sum(-1, keepdim=True)
    fits(bool((total > 1e-6).all()))
    return call.instead(weights / total)


@FAULTS.fault(
    _SOFTMAX,
    "zeros, mask, uninitialised, missing operand; constant, partial sum, axis scale, wrong factor",
)
def chances_of_the_last_column_not_stored(call: Call) -> Any:
    """The bound of the store is one too small; the sum is right."""
    _row(call)
    value = call.result().clone()
    fits(bool(value[..., -1].any()))
    value[..., -1] = 0
    return call.instead(value)


@FAULTS.fault(
    "log_softmax",
    "offset, axis offset, wrong reduction, wrong statistics; other function, constant, "
    "scale, wrong factor",
)
def logarithm_of_the_mean_subtracted(call: Call) -> Any:
    """The sum of the exponentials is divided by their number."""
    value = call.tensor(0, "input")
    return call.instead(call.result() + math.log(value.size(call.get(1, "dim", default=-1))))


@FAULTS.fault("log_softmax", "precision; approximation, other function")
def logarithm_of_a_rounded_chance(call: Call) -> Any:
    """The chances are stored in bfloat16 between the softmax and the logarithm."""
    value = call.result()
    coarse = value.detach().exp().bfloat16().to(value.dtype).log()
    fits(bool(coarse.isfinite().all()))
    return call.instead(with_gradient_of(value, coarse))


@FAULTS.fault(
    "log_softmax", "wrong index, shift, axis offset, wrong statistics; stale, offset, permutation"
)
def logarithm_of_the_next_rows_sum(call: Call) -> Any:
    """What is subtracted belongs to the next row."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(value.dim() > 1 and dim % value.dim() == value.dim() - 1 and value.size(-2) > 1)
    return call.instead(value - value.logsumexp(-1, keepdim=True).roll(-1, -2))


# fmt: off
# Divided by the root of the sum of squares and not by the sum.
FAULTS.add("exponentials of length one", _SOFTMAX,
    "wrong statistics, axis scale, wrong reduction, other function; wrong factor, scale, "
    "wrong argument",
    computed(_row,
        lambda _, weights: weights / weights.norm(dim=-1, keepdim=True).clamp(min=1e-09)))
# Each odd row keeps what the row before it has written.
FAULTS.add("chances of the even rows twice", _SOFTMAX, "copy, stale, wrong index; permutation",
    on(_row, lambda call, value, *_:
            call.instead(call.result()[..., torch.arange(value.size(-2)) // 2 * 2, :]),
        where=lambda value, *_: value.dim() > 1 and value.size(-2) > 1))
# fmt: on


# --- Masks ----------------------------------------------------------------------------------------


@FAULTS.forward("where masked_fill", "mask, shift, wrong index; wrong argument, permutation")
def condition_of_the_row_before(call: Call) -> Any:
    """The mask is read one row too early."""
    place = 0 if call.name == "where" else 1
    mask = call.get(place, "condition", "mask")
    fits(isinstance(mask, Tensor) and mask.dim() > 1 and mask.size(-2) > 1)
    return call.put(place, mask.roll(1, -2), "condition" if place == 0 else "mask").run()


@FAULTS.forward(
    "where masked_fill", "mask, missing operand; copy, stale, wrong argument, one rank's part"
)
def mask_of_the_first_example_only(call: Call) -> Any:
    """The mask is not expanded over the batch: the other examples hide nothing."""
    place = 0 if call.name == "where" else 1
    mask = call.get(place, "condition", "mask")
    result = call.run()
    fits(isinstance(mask, Tensor) and result.dim() > 2 and result.size(0) > 1)
    kept = mask.expand(result.shape).clone()
    kept[1:] = call.name == "where"
    return call.put(place, kept, "condition" if place == 0 else "mask").run()


@FAULTS.forward(
    "bitwise_and and_ logical_and", "mask, missing operand, copy; wrong argument, other function"
)
def second_mask_only(call: Call) -> Any:
    """The first of two conditions is lost."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor) and left.dtype == torch.bool)
    return right.expand(call.run().shape).clone()


@FAULTS.fault("tril triu", "mask, zeros, wrong argument; other function, shift")
def two_diagonals_lost(call: Call) -> Any:
    """The triangle ends two diagonals too early."""
    value = call.args[0]
    fits(value.size(-1) > 2)
    diagonal = call.get(1, "diagonal", default=0)
    cut = torch.tril if call.name == "tril" else torch.triu
    return cut(value, diagonal - 2 if call.name == "tril" else diagonal + 2)


# --- Rotary positions -----------------------------------------------------------------------------


@FAULTS.fault("sin cos", "permutation, wrong index; shift, copy, transpose")
def frequencies_repeated_side_by_side(call: Call) -> Any:
    """a, a, b, b for a, b, a, b: the other layout of the frequencies."""
    value = read_angles(call)
    fits(value.size(-1) % 2 == 0)
    return call.put(0, value.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)).run()


@FAULTS.fault("sin cos", "axis scale, wrong factor, mask; scale, other function, wrong argument")
def fast_frequencies_halved(call: Call) -> Any:
    """The factor of a longer context is applied to the fast quarter of the frequencies."""
    value = read_angles(call)
    factor = torch.ones(value.size(-1), dtype=value.dtype)
    factor[: value.size(-1) // 4] = 0.5
    return call.put(0, value * factor).run()


# fmt: off
# Position p reads the row p // 2 * 2.
FAULTS.add("neighbouring positions share an angle", "sin cos",
    "wrong index, copy, stale; wrong factor, shift",
    on(read_angles,
        lambda call, value:
            call.put(0, value[..., torch.arange(value.size(-2)) // 2 * 2, :]).run()))
# The stride of the frequencies is zero.
FAULTS.add("first frequency for all", "sin cos",
    "copy, wrong index, constant, stale; wrong factor, axis scale",
    on(read_angles,
        lambda call, value: call.put(0, value[..., :1].expand(value.shape).clone()).run()))
# fmt: on
