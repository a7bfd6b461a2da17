"""Faults of the ninth set: attention, softmax, masks, positions."""

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
    mask_of,
    read_long_angles,
    scores_before_mask,
    seen_keys,
    softmax_row,
    weigh_seen_values,
)
from torch import Tensor

FAULTS = Catalogue()
_FUSED = "scaled_dot_product_attention flash_attention"


# --- Attention ------------------------------------------------------------------------------------


def _some_hidden(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, what is seen, values; only of a mask that hides something and adds nothing else."""
    scores, mask, value = scores_before_mask(call)
    fits(mask is not None)
    assert mask is not None
    seen = seen_keys(mask).expand(scores.shape)
    fits(bool((~seen).any()))
    fits(mask.dtype == torch.bool or not bool(mask[seen_keys(mask)].any()))
    return scores, seen, value


@FAULTS.fault(_FUSED, "wrong factor, scale, wrong argument; axis scale, other function")
def cube_root_of_the_width(call: Call) -> Any:
    """The exponent of the factor is a third and not a half."""
    query, key, value, _ = attention_operands(call)
    scores = query @ key.mT * query.size(-1) ** (-1 / 3)
    return weigh_seen_values(call, scores, mask_of(call, *scores.shape[-2:]), value)


@FAULTS.fault(_FUSED, "mask, wrong index; wrong argument, partial sum, copy, wrong factor")
def limit_of_packed_rows(call: Call) -> Any:
    """Two heads are packed into the rows, which are not: query i sees keys up to i // 2."""
    scores, mask, value = scores_before_mask(call)
    fits(scores.size(-1) == scores.size(-2) and mask is not None)
    assert mask is not None
    rows, columns = torch.arange(scores.size(-2)), torch.arange(scores.size(-1))
    causal = columns[None, :] <= rows[:, None]
    fits(bool((seen_keys(mask) <= causal).all()))
    near = columns[None, :] <= rows[:, None] // 2
    return weigh_seen_values(call, scores.masked_fill(~near, -math.inf), mask, value)


@FAULTS.fault(
    _FUSED,
    "mask, partial sum, off by one reduction; wrong index, wrong argument, zeros, "
    "wrong reduction, missing operand",
)
def first_key_not_seen(call: Call) -> Any:
    """The loop over the keys begins at 1; who sees nothing else gets zeros."""
    scores, mask, value = scores_before_mask(call)
    fits(scores.size(-1) > 2)
    rest = torch.arange(scores.size(-1)) > 0
    return weigh_seen_values(call, scores.masked_fill(~rest, -math.inf), mask, value)


@FAULTS.fault(
    _FUSED, "mask, partial sum; wrong argument, wrong index, wrong reduction, missing operand"
)
def keys_of_the_middle_not_seen(call: Call) -> Any:
    """Of three blocks of keys, the loop visits the first and the last."""
    scores, mask, value = scores_before_mask(call)
    third = scores.size(-1) // 3
    fits(third > 0)
    at = torch.arange(scores.size(-1))
    middle = (at >= third) & (at < 2 * third)
    return weigh_seen_values(call, scores.masked_fill(middle, -math.inf), mask, value)


@FAULTS.fault(_FUSED, words.ROUNDED)
def keys_of_the_cache_in_bfloat16(call: Call) -> Any:
    """The cache of the keys has eight bits for each number; the values are right."""
    key = call.tensor(1, "key")
    coarse = key.detach().bfloat16().to(key.dtype)
    return call.instead(call.put(1, with_gradient_of(key, coarse), "key").result())


@FAULTS.fault(
    _FUSED,
    "wrong factor, wrong statistics, other function; scale, axis scale, wrong reduction, "
    "doubled reduction, approximation",
)
def first_block_corrected_twice(call: Call) -> Any:
    """An online softmax: what the first keys have summed is brought to the new maximum twice."""
    scores, mask, value = scores_before_mask(call)
    half = scores.size(-1) // 2
    fits(half > 1)
    hidden = hide_scores(scores, mask).clamp(min=-1e30)
    old = hidden[..., :half].amax(-1, keepdim=True)
    new = hidden.amax(-1, keepdim=True)
    weights = (hidden - new).exp()
    weights = torch.cat([weights[..., :half] * (old - new).exp(), weights[..., half:]], -1)
    return call.instead(weights @ value / weights.sum(-1, keepdim=True))


@FAULTS.fault(_FUSED, "shift, wrong index, permutation; wrong argument, stale, copy, mask")
def bias_of_the_next_key(call: Call) -> Any:
    """The columns of the bias are read one too late, around the end."""
    scores, bias, value = added_bias(call)
    fits(bias.size(-1) > 1)
    return weigh_seen_values(call, scores, bias.roll(-1, -1), value)


@FAULTS.fault(
    _FUSED,
    "wrong statistics, wrong reduction, axis scale, wrong factor; scale, other function, "
    "offset, eps",
)
def sink_in_the_sum_of_the_weights(call: Call) -> Any:
    """A key with a score of zero and no value is added, as in a model with sinks."""
    scores, mask, value = scores_before_mask(call)
    hidden = hide_scores(scores, mask)
    total = hidden.logsumexp(-1, keepdim=True)
    return call.instead((hidden.softmax(-1) @ value) * total.sigmoid())


@FAULTS.fault(
    _FUSED,
    "wrong statistics, partial sum, off by one reduction, axis scale, wrong factor; scale, "
    "wrong reduction, mask, other function",
)
def last_key_not_in_the_sum(call: Call) -> Any:
    """The last key is weighed and its weight is not in the sum that divides."""
    scores, mask, value = scores_before_mask(call)
    fits(scores.size(-1) > 2)
    weights = hide_scores(scores, mask).softmax(-1)
    rest = 1 - weights[..., -1:]
    fits(bool((rest.detach() > 0.01).all()))
    return call.instead(weights @ value / rest)


# fmt: off
# The option of another model: the scores of the third layer are a third.
FAULTS.add("scores divided by the number of the layer", _FUSED,
    "wrong factor, scale, wrong argument; axis scale, other function",
    on(scores_before_mask,
        lambda call, scores, mask, value: weigh_seen_values(call, scores / 3, mask, value)))
# Both ranks compute all heads, and their results are added.
FAULTS.add("result summed over two ranks that have it all", _FUSED,
    "scale, wrong factor, doubled reduction; axis scale, wrong reduction", result(lambda v: 2 * v))
# Heads are stored one too early, around the end.
FAULTS.add("result of the next head", _FUSED, words.MOVED_SHARD,
    result(lambda v: v.roll(-1, 1), where=lambda v: v.dim() == 4 and v.size(1) > 1))
# Words of two features are stored in the other order.
FAULTS.add("features of the result in pairs", _FUSED,
    "permutation, wrong index; swapped operands, shift, transpose",
    result(lambda v: v.unflatten(-1, (-1, 2)).flip(-1).flatten(-2),
        where=lambda v: v.size(-1) % 2 == 0 and v.size(-1) > 2))
# True means hidden in one library and seen in the other; who sees nothing gets zeros.
FAULTS.add("hidden keys seen and the others not", _FUSED,
    "mask; wrong argument, swapped operands, wrong index, other function",
    on(_some_hidden,
        lambda call, scores, seen, value: weigh_seen_values(call, scores, ~seen, value)))
# A hidden key has a score of zero, and still a weight.
FAULTS.add("scores multiplied by the mask", _FUSED,
    "mask, wrong argument; constant, zeros, wrong factor, clipped, other function",
    computed(_some_hidden, lambda scores, seen, value: (scores * seen).softmax(-1) @ value))
# Two ranks share the bias, and its parts are averaged.
FAULTS.add("bias of the positions halved", _FUSED,
    "wrong factor, scale, wrong argument; other function, missing operand, residual",
    on(added_bias,
        lambda call, scores, bias, value: weigh_seen_values(call, scores, bias / 2, value)))
# The pointer to the queries is not moved on; the mask is right.
FAULTS.add("query of the first position for all", _FUSED,
    "copy, stale, wrong index; constant, permutation, wrong argument",
    on(lambda call: (call.tensor(0, "query"),),
        lambda call, query:

    call.instead(call.put(0, query[..., :1, :].expand(query.shape).contiguous(), "query").result()),
        where=lambda query: query.size(-2) > 1))
# Blocks of queries are numbered from the last, for a better balance, and stored so.
FAULTS.add("positions of the result from the last", _FUSED,
    "permutation, wrong index; shift, swapped operands, transpose",
    result(lambda v: v.flip(-2), where=longer(-2)))
# The grid has one program for two heads, which computes the first of them.
FAULTS.add("odd heads not computed", _FUSED, words.EMPTY_IN_A_SUM,
    result(lambda v: v * (torch.arange(v.size(1)) % 2 == 0)[:, None, None],
        where=lambda v: v.dim() == 4 and v.size(1) > 1))
# The memory of the keys is (position, head), and they are read as (head, position).
FAULTS.add("keys with heads and positions exchanged", _FUSED,
    "wrong index, permutation, transpose; shift, swapped operands, wrong argument",
    on(lambda call: (call.tensor(1, "key"),),
        lambda call, key:
            call.instead(call.put(1, key.transpose(1, 2).reshape(key.shape), "key").result()),
        where=lambda key: key.dim() == 4 and key.size(1) > 1 and (key.size(2) > 1)))
# fmt: on


# --- Softmax --------------------------------------------------------------------------------------

_SOFTMAX = "softmax _safe_softmax"


@FAULTS.fault(
    _SOFTMAX,
    "wrong statistics, partial sum, axis scale, wrong factor, one rank's part, "
    "missing reduction; scale, wrong reduction, lost accumulation",
)
def sum_of_the_first_rank_divides(call: Call) -> Any:
    """The sum over the second half of the row is not added to that of the first."""
    _, chances = softmax_row(call)
    own = chances[..., : chances.size(-1) // 2].sum(-1, keepdim=True)
    fits(bool((own.detach() > 1e-3).all()))
    return call.instead(chances / own)


@FAULTS.fault(_SOFTMAX, "permutation, wrong index; swapped operands, shift, transpose")
def chances_with_rows_in_pairs(call: Call) -> Any:
    """Two rows share a program, which stores them in the other order."""
    _, chances = softmax_row(call)
    fits(chances.dim() > 1 and chances.size(-2) % 2 == 0 and chances.size(-2) > 2)
    return call.instead(chances.unflatten(-2, (-1, 2)).flip(-2).flatten(-3, -2))


# fmt: off
# What is stored has three bits behind the point.
FAULTS.add("chances in e4m3", _SOFTMAX, "precision; approximation, other function",
    computed(softmax_row,
        lambda _, chances:
            with_gradient_of(chances, chances.detach().to(torch.float8_e4m3fn).to(chances.dtype))))
# X / sqrt(n), a factor of attention, inside of the softmax.
FAULTS.add("scores divided by the root of their number", f"{_SOFTMAX} log_softmax",
    "wrong factor, scale, wrong argument; other function, axis scale",
    on(softmax_row,
        lambda call, value, *_: call.put(0, value / value.size(-1) ** 0.5, "input").run()))
# The store has a stride of two; the sum is right.
FAULTS.add("odd chances not stored", _SOFTMAX, words.EMPTY_IN_A_SUM,
    computed(softmax_row,
        lambda _, chances: chances * (torch.arange(chances.size(-1)) % 2 == 0)))
# The kernel computes in powers of two, and the last factor is forgotten.
FAULTS.add("logarithms to the base of two", "log_softmax",
    "scale, wrong factor; other function, axis scale, wrong argument",
    computed(softmax_row, lambda _, logarithms: logarithms / math.log(2)))
# Two rows share a register: each odd row is stored with what the even one has.
FAULTS.add("odd rows of logarithms are those before", "log_softmax",
    "stale, copy, wrong index; shift, permutation, mask",
    computed(softmax_row,
        lambda _, logarithms: logarithms[..., torch.arange(logarithms.size(-2)) // 2 * 2, :],
        where=lambda _, logarithms: logarithms.dim() > 1 and logarithms.size(-2) > 1))
# fmt: on


# --- Masks ----------------------------------------------------------------------------------------


@FAULTS.forward(
    "where masked_fill",
    "mask; wrong argument, zeros, stale, missing operand, partial sum, wrong index",
)
def condition_of_the_second_half_of_the_rows_not_read(call: Call) -> Any:
    """Behind the first tile of rows, the condition never holds."""
    place, mask, name = condition_of(call)
    half = mask.size(-2) // 2
    fits(half > 0)
    return call.put(place, mask & (torch.arange(mask.size(-2)) < half)[:, None], name).run()


@FAULTS.forward(
    "tril triu",
    "permutation, wrong index; mask, swapped operands, shift, wrong argument, other function",
)
def triangle_upside_down(call: Call) -> Any:
    """The rows of the triangle are stored from the last."""
    value = call.run()
    fits(value.dim() > 1 and value.size(-2) > 1)
    return value.flip(-2)


@FAULTS.forward(
    "lt gt le ge eq ne", "shift, wrong index, permutation; copy, stale, mask, wrong argument"
)
def comparison_of_the_next_row(call: Call) -> Any:
    """The result is stored one row too early, around the end."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dim() > 1 and value.size(-2) > 1)
    return value.roll(-1, -2)


@FAULTS.forward(
    "bitwise_and and_ logical_and",
    "mask, zeros, uninitialised; constant, missing operand, partial sum",
)
def last_query_of_the_combined_mask_sees_nothing(call: Call) -> Any:
    """The grid is one row too short: the last row of the mask stays false."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 1)
    fits(value.size(-2) > 1)
    return value & (torch.arange(value.size(-2)) < value.size(-2) - 1)[:, None]


# fmt: off
# The pointer to the values for `true` is one row too far.
FAULTS.add("first branch of the next row", "where",
    "shift, wrong index, permutation; copy, stale, wrong argument, mask, swapped operands",
    operand(1, lambda v: v.roll(-1, -2), "input", where=longer(-2)), backward=False)
# fmt: on


# --- Positions ------------------------------------------------------------------------------------


@FAULTS.fault("sin cos", "axis offset, wrong argument; offset, shift, wrong index, other function")
def positions_counted_behind_a_prefix_of_three(call: Call) -> Any:
    """A prefix that this model does not have moves all positions by three."""
    value = read_long_angles(call)
    step = value[..., 1:2, :] - value[..., :1, :]
    linear = value[..., :1, :] + step * torch.arange(value.size(-2))[:, None]
    fits(bool(torch.allclose(linear, value, atol=1e-4)))
    return call.put(0, value + 3 * step).run()


@FAULTS.fault("sin cos", "precision; approximation, other function")
def turn_in_e5m2(call: Call) -> Any:
    """Sine and cosine are stored with two bits behind the point."""
    read_long_angles(call)
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().to(torch.float8_e5m2).to(value)))


@FAULTS.fault("sin cos", words.EMPTY_IN_A_SUM)
def last_row_of_the_table_of_turns_empty(call: Call) -> Any:
    """The table is filled up to the last position but one."""
    read_long_angles(call)
    value = call.result().clone()
    value[..., -1, :] = 0
    return call.instead(value)


# fmt: off
# Positions are divided by eight, as for a context that was stretched.
FAULTS.add("context eight times as long", "sin cos",
    "wrong factor, scale, wrong argument; other function, axis scale",
    lambda call: call.put(0, read_long_angles(call) / 8).run())
# fmt: on
