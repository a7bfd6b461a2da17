"""Faults for measuring: attention, softmax, masks, positions."""

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
    several_heads,
    softmax_row,
    weigh_seen_values,
    with_operand,
)
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_FUSED = "scaled_dot_product_attention flash_attention"


# --- Attention ------------------------------------------------------------------------------------


def _scaled(call: Call, factor: float) -> Any:
    """Attention with its scores times one more factor, before the mask."""
    scores, mask, value = scores_before_mask(call)
    return weigh_seen_values(call, factor * scores, mask, value)


@FAULTS.fault(
    _FUSED, "mask, wrong argument; partial sum, wrong index, other function, missing operand, zeros"
)
def window_of_four_tokens(call: Call) -> Any:
    """Each token sees itself and the three before it: a sliding window of another model."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    rows = query.size(-2)
    fits(rows == key.size(-2) and rows > 4)
    distance = torch.arange(rows)[:, None] - torch.arange(rows)
    return hide_further_keys(call, (distance >= 0) & (distance < 4))


@FAULTS.fault(
    _FUSED, "mask, wrong argument; partial sum, wrong index, other function, missing operand, zeros"
)
def encoder_sees_itself_and_what_follows(call: Call) -> Any:
    """An encoder without a mask gets a triangle, and that of the wrong side."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    rows = query.size(-2)
    fits(rows == key.size(-2) and rows > 2 and mask_of(call, rows, rows) is None)
    return hide_further_keys(call, torch.ones(rows, rows, dtype=torch.bool).triu())


@FAULTS.fault(_FUSED, words.MOVED_OPERAND)
def values_of_the_slot_before(call: Call) -> Any:
    """The cache of the values is read one slot too early, around the end; the keys are right."""
    query, value = call.tensor(0, "query"), call.tensor(2, "value")
    fits(value.size(-2) > 2 and mask_of(call, query.size(-2), value.size(-2)) is not None)
    return with_operand(call, 2, value.roll(1, -2))


@FAULTS.fault(_FUSED, words.REPEATED)
def lower_half_of_each_head_stored_twice(call: Call) -> Any:
    """The second tile along the features is that of the first."""
    value = call.result()
    fits(value.size(-1) % 2 == 0 and value.size(-1) > 2)
    half = value[..., : value.size(-1) // 2]
    return call.instead(torch.cat([half, half], -1))


@FAULTS.fault(
    _FUSED,
    "axis scale, wrong factor, wrong statistics, missing reduction; scale, "
    "missing operand, mask, wrong reduction, other function",
)
def newest_query_not_divided_by_its_sum(call: Call) -> Any:
    """The epilogue that divides by the sum of the exponentials ends one row too early."""
    scores, value = hidden_scores(call)
    fits(scores.size(-2) > 1)
    total = (scores - scores.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)
    last = (torch.arange(scores.size(-2)) == scores.size(-2) - 1)[:, None]
    return call.instead(scores.softmax(-1) @ value * torch.where(last, total, 1.0))


# fmt: off
# The factor of the scores is the number 80 ** -0.5, whatever the width of a head is.
FAULTS.add("factor written for heads of 80", _FUSED,
    "wrong factor, scale, wrong argument; axis scale, other function",
    lambda call: _scaled(call, 80 ** (-0.5) / attention_operands(call)[3]))
# Scores times (1 + 0.1 log 16)^2, the temperature of a stretched context that is not used.
FAULTS.add("factor of a context sixteen times as long", _FUSED,
    "wrong factor, scale, wrong argument; axis scale, other function",
    lambda call: _scaled(call, (1 + 0.1 * math.log(16)) ** 2))
# 10 ** s for exp(s): the scores after the mask are read as decimal exponents.
FAULTS.add("weights as powers of ten", _FUSED,
    "wrong factor, scale, wrong argument, other function; axis scale, approximation",
    on(hidden_scores,
        lambda call, scores, value: weigh_seen_values(call, math.log(10) * scores, None, value)))
# The lengths are two too small: the last two keys are hidden from all who see others.
FAULTS.add("last two keys taken for padding", _FUSED,
    "mask, wrong argument; partial sum, wrong index, other function, missing operand, zeros",
    on(lambda call: (call.tensor(1, "key").size(-2),),
        lambda call, keys: hide_further_keys(call, torch.arange(keys) < keys - 2),
        where=lambda keys: keys > 3))
# The bits of the keys 2, 5, 8 and so on are not set in the mask.
FAULTS.add("every third key hidden", _FUSED,
    "mask, wrong argument; partial sum, wrong index, other function, missing operand, zeros",
    on(lambda call: (call.tensor(1, "key").size(-2),),
        lambda call, keys: hide_further_keys(call, torch.arange(keys) % 3 != 2),
        where=lambda keys: keys > 3))
# A learned bias for the first key is left on: its scores are larger by one.
FAULTS.add("first key favoured by one", _FUSED,
    "axis offset, wrong argument, mask; offset, residual, other function, missing operand",
    on(hidden_scores,
        lambda call, scores, value:

    weigh_seen_values(call, scores + (torch.arange(scores.size(-1)) == 0).to(scores), None, value),
        where=lambda scores, *_: scores.size(-1) > 2))
# Each feature of the result is stored one place too far, the last of a head first.
FAULTS.add("features of each head one late", _FUSED, words.MOVED_OPERAND,
    result(lambda v: v.roll(1, -1), where=longer(-1, 2)))
# The pointer to the keys is one head behind, around the end; the values are right.
FAULTS.add("keys of the head before", _FUSED, words.MOVED_OPERAND,
    on(lambda call: (call.tensor(1, "key"),),
        lambda call, key: with_operand(call, 1, key.roll(1, 1)),
        where=lambda key: key.dim() == 4 and key.size(1) > 2))
# The stride of the heads of the values is zero; queries and keys are right.
FAULTS.add("values of the first head for all", _FUSED, words.REPEATED,
    on(lambda call: (call.tensor(2, "value"),),
        lambda call, value: with_operand(call, 2, value[:, :1].expand(value.shape).contiguous()),
        where=lambda value: value.dim() == 4 and value.size(1) > 1))
# The memory of the values is (feature, position), and is read as (position, feature).
FAULTS.add("values of the cache with the features first", _FUSED,
    "transpose, permutation, wrong index; shift, wrong axis, swapped operands, wrong argument",
    on(lambda call: (call.tensor(2, "value"),),
        lambda call, value: with_operand(call, 2, value.mT.reshape(value.shape)),
        where=lambda value: min(value.shape[-2:]) > 1))
# The features of a query are read two places too far, around the end; the keys are right.
FAULTS.add("features of the query two early", _FUSED, words.MOVED_OPERAND,
    on(lambda call: (call.tensor(0, "query"),),
        lambda call, query: with_operand(call, 0, query.roll(-2, -1)),
        where=lambda query: query.size(-1) > 4))
# The epilogue stores with eight bits.
FAULTS.add("result of the heads in bfloat16", _FUSED, words.ROUNDED,
    result(rounded(torch.bfloat16)))
# The scores have three bits behind the point when they come to the softmax.
FAULTS.add("scores of the heads in e4m3", _FUSED, words.ROUNDED,
    on(scores_before_mask,
        lambda call, scores, mask, value:
            weigh_seen_values(call, round_to(scores, torch.float8_e4m3fn), mask, value)))
# The range of the stored keys is -0.25 to 0.25.
FAULTS.add("keys cut at a quarter", _FUSED, words.LIMITED,
    lambda call: with_operand(call, 1, call.tensor(1, "key").clamp(-0.25, 0.25)))
# Three ranks compute all heads, and their results are added.
FAULTS.add("result summed over three ranks that have it all", _FUSED,
    "scale, wrong factor, doubled reduction; axis scale, wrong argument, wrong reduction",
    result(lambda v: 3 * v))
# The minus of a rotation is left on the result: every second feature of a head has it.
FAULTS.add("odd features of the heads negated", _FUSED,
    "sign, wrong factor, axis scale, mask; scale, other function",
    result(lambda v: v * (1 - 2 * (torch.arange(v.size(-1)) % 2)).to(v), where=longer(-1)))
# The grid over the heads begins with one.
FAULTS.add("first head not stored", _FUSED, words.EMPTY_IN_A_SUM,
    computed(lambda call: (several_heads(call, 3),),
        lambda value: value * (torch.arange(value.size(1)) > 0)[:, None, None]))
# Of three queries of a program, the last one is masked out when they are stored.
FAULTS.add("every third query not stored", _FUSED, words.EMPTY_IN_A_SUM,
    result(lambda v: v * (torch.arange(v.size(-2)) % 3 != 2)[:, None], where=longer(-2, 4)))
# The accumulator is loaded with the first value instead of zeros, and nothing divides it.
FAULTS.add("first value left in the accumulator", _FUSED,
    "residual, axis offset; offset, missing operand, doubled reduction, other function, "
    "wrong index",
    lambda call: call.instead(call.result() + attention_operands(call)[2][..., :1, :]))
# fmt: on


# --- Softmax --------------------------------------------------------------------------------------

_SOFTMAX = "softmax _safe_softmax"
_BOTH = f"{_SOFTMAX} log_softmax"


@FAULTS.fault(
    _BOTH,
    "zeros, mask, constant; wrong argument, missing operand, axis offset, wrong index, "
    "uninitialised, wrong statistics",
)
def last_score_loaded_as_zero(call: Call) -> Any:
    """The bound of the load is one too small, and what is not loaded is zero."""
    value, _ = softmax_row(call)
    kept = torch.arange(value.size(-1)) < value.size(-1) - 1
    return call.put(0, torch.where(kept, value, 0.0), "input").run()


@FAULTS.fault(
    _SOFTMAX, "other function; approximation, wrong statistics, wrong reduction, wrong factor"
)
def one_plus_elu_for_the_exponential(call: Call) -> Any:
    """(1 + elu(x)) / sum (1 + elu(x)), the map of a linear attention, in a softmax of its own."""
    value, _ = softmax_row(call)
    weights = functional.elu(value) + 1
    return call.instead(weights / (weights.sum(-1, keepdim=True) + 1e-9))


# fmt: off
# The scores are divided by ten.
FAULTS.add("temperature of ten", _BOTH,
    "wrong factor, scale, wrong argument; axis scale, other function",
    on(softmax_row, lambda call, value, *_: call.put(0, value / 10, "input").run()))
# Each chance is stored two columns too far, the last two first.
FAULTS.add("two columns late behind the softmax", _BOTH, words.MOVED_OPERAND,
    computed(softmax_row, lambda _, chances: chances.roll(2, -1),
        where=lambda _, chances: chances.size(-1) > 4))
# The stride of the rows of the result is negative: the first row is stored last.
FAULTS.add("rows of chances from the last", _BOTH,
    "permutation, wrong index; shift, wrong argument, swapped operands, copy, stale",
    computed(softmax_row, lambda _, chances: chances.flip(-2),
        where=lambda _, chances: chances.dim() > 1 and chances.size(-2) > 1))
# The softmax runs along the right axis and is stored with rows and columns exchanged.
FAULTS.add("chances of a square transposed", _BOTH,
    "transpose, permutation, wrong index; wrong axis, swapped operands, shift, wrong argument",
    computed(softmax_row, lambda _, chances: chances.mT,
        where=lambda _, chances: chances.dim() > 1 and chances.size(-2) == chances.size(-1)))
# The chances have two digits behind the point.
FAULTS.add("chances with two digits", _SOFTMAX, words.ROUNDED,
    computed(softmax_row,
        lambda _, chances: with_gradient_of(chances, (chances.detach() * 100).round() / 100)))
# The logarithms are stored with three bits behind the point.
FAULTS.add("logarithms of the chances in e4m3", "log_softmax", words.ROUNDED,
    lambda call: call.instead(round_to(softmax_row(call)[1], torch.float8_e4m3fn)))
# Chances are at least 0.05, so that a later logarithm is finite.
FAULTS.add("no chance below a twentieth", _SOFTMAX,
    "clipped; other function, constant, mask, offset, approximation",
    lambda call: call.instead(softmax_row(call)[1].clamp(min=0.05)))
# A pair of lanes is reduced, and not the whole row.
FAULTS.add("each two columns have their own sum", _SOFTMAX,
    "partial sum, wrong reduction, wrong statistics, axis scale, wrong factor; scale, mask, "
    "missing reduction, one rank's part, wrong argument, wrong axis, wrong index",
    computed(softmax_row,
        lambda value, *_: value.clamp(min=-1e30).unflatten(-1, (-1, 2)).softmax(-1).flatten(-2),
        where=lambda value, *_: value.size(-1) % 2 == 0 and value.size(-1) > 4))
# fmt: on


# --- Masks ----------------------------------------------------------------------------------------


def _compared(call: Call) -> Tensor:
    """A comparison of more than one row and column."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 1)
    fits(min(value.shape[-2:]) > 2)
    return value


@FAULTS.forward(
    "where masked_fill", "mask, shift, wrong index, permutation; wrong argument, stale, copy"
)
def condition_of_the_next_row(call: Call) -> Any:
    """The mask is read one row too late, around the end."""
    place, mask, name = any_condition_of(call)
    fits(mask.dim() > 1 and mask.size(-2) > 2)
    return call.put(place, mask.roll(-1, -2), name).run()


@FAULTS.forward(
    "where masked_fill",
    "mask, zeros, uninitialised; missing operand, stale, copy, wrong argument, "
    "wrong index, constant",
)
def condition_of_the_odd_columns_not_read(call: Call) -> Any:
    """A stride of two in the loop over the columns of the mask: the others are false."""
    place, mask, name = any_condition_of(call)
    fits(mask.size(-1) > 2)
    return call.put(place, mask & (torch.arange(mask.size(-1)) % 2 == 0), name).run()


@FAULTS.forward(
    "lt gt le ge",
    "mask, zeros, uninitialised; wrong index, constant, wrong argument, missing operand, "
    "other function",
)
def first_column_of_the_comparison_false(call: Call) -> Any:
    """The loop over the columns of the mask begins at one, and the memory is cleared."""
    value = _compared(call)
    return value & (torch.arange(value.size(-1)) > 0)


# fmt: off
# What is hidden gets -3, and is only a little less likely.
FAULTS.add("filled with minus three", "masked_fill",
    "wrong argument, constant, mask; offset, approximation, clipped, other function",
    on(lambda call:
            (call.get(2, "value"),), lambda call, _: call.put(2, -3.0, "value").run(),
        where=lambda number: isinstance(number, int | float) and number < -100), backward=False)
# Each row of the mask is stored one too far, the last one first.
FAULTS.add("comparison stored one row late", "lt gt le ge eq ne",
    "shift, wrong index, permutation, mask; copy, stale, wrong argument",
    lambda call: _compared(call).roll(1, -2), backward=False)
# fmt: on


# --- Positions ------------------------------------------------------------------------------------


@FAULTS.fault("sin cos", words.ROUNDED)
def table_of_the_turns_in_half(call: Call) -> Any:
    """Sine and cosine are kept in float16."""
    read_long_angles(call)
    return call.instead(round_to(call.result(), torch.float16))


@FAULTS.fault(
    "sin cos", "axis offset, wrong argument; offset, shift, wrong index, residual, other function"
)
def positions_counted_from_the_middle(call: Call) -> Any:
    """The angle of the position in the middle is subtracted from all."""
    value = read_long_angles(call)
    middle = value.size(-2) // 2
    return call.put(0, value - value[..., middle : middle + 1, :]).run()


# fmt: off
# All angles are a third: positions are interpolated where they should not be.
FAULTS.add("context three times as long", "sin cos",
    "wrong factor, scale, wrong argument; axis scale, other function",
    lambda call: call.put(0, read_long_angles(call) / 3).run())
# Positions times frequencies are computed under autocast.
FAULTS.add("angles in bfloat16", "sin cos", words.ROUNDED,
    lambda call: call.put(0, round_to(read_long_angles(call), torch.bfloat16)).run())
# The fastest frequencies are not written: their angles are zero.
FAULTS.add("first quarter of the features not turned", "sin cos",
    "mask, constant, zeros, wrong factor, axis scale; scale, missing operand, other function, "
    "wrong argument, uninitialised",
    on(read_long_angles,
        lambda call, value:
            call.put(0, value * (torch.arange(value.size(-1)) >= value.size(-1) // 4)).run()))
# fmt: on
