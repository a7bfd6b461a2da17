"""Faults that were measured fourth and have been seen: attention, softmax, rotary positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, longer, on, operand, result, rounded
from benchmarks.places.parts import (
    attention_operands,
    hide_scores,
    mask_of,
    scores_before_mask,
    weigh_values,
)
from torch import Tensor

FAULTS = Catalogue()
_FUSED = "scaled_dot_product_attention flash_attention"


# --- Attention ------------------------------------------------------------------------------------


@FAULTS.fault(_FUSED, "mask; wrong argument, partial sum, off by one reduction")
def oldest_key_of_each_query_dropped(call: Call) -> Any:
    """A window that is one too short at its far end."""
    scores, mask, value = scores_before_mask(call)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool) if mask is None else mask
    fits(seen.dtype == torch.bool and scores.size(-1) > 3)
    oldest = (seen.cumsum(-1) == 1) & seen & (seen.sum(-1, keepdim=True) > 1)
    return weigh_values(call, scores, seen & ~oldest, value)


@FAULTS.fault(_FUSED, "wrong argument, wrong factor, scale; other function")
def scale_of_the_padded_width(call: Call) -> Any:
    """The width of a head is padded to the next power of two but one before its root is taken."""
    scores, mask, value = scores_before_mask(call)
    width = call.tensor(0, "query").size(-1)
    padded = 2 ** (width.bit_length() + 1)
    return weigh_values(call, scores * math.sqrt(width / padded), mask, value)


@FAULTS.fault(
    _FUSED,
    "wrong reduction, wrong factor, wrong statistics; partial sum, other function, scale, "
    "axis scale",
)
def splits_merged_with_equal_weights(call: Call) -> Any:
    """Two splits of the keys: their results are averaged, whatever their sums are."""
    scores, mask, value = scores_before_mask(call)
    hidden = hide_scores(scores, mask)
    half = scores.size(-1) // 2
    fits(half > 0 and mask is None)
    first = hidden[..., :half].softmax(-1) @ value[..., :half, :]
    return call.instead((first + hidden[..., half:].softmax(-1) @ value[..., half:, :]) / 2)


@FAULTS.fault(_FUSED, "permutation, wrong index; swapped operands, shift")
def values_of_the_heads_from_the_last(call: Call) -> Any:
    """The pointer to the values counts heads down."""
    scores, mask, value = scores_before_mask(call)
    fits(value.dim() == 4 and value.size(1) > 1)
    return weigh_values(call, scores, mask, value.flip(1))


@FAULTS.fault(_FUSED, "copy, wrong index, stale; permutation")
def cache_of_the_first_sequence(call: Call) -> Any:
    """Every sequence of the batch reads keys and values of the first."""
    key, value = call.tensor(1, "key"), call.tensor(2, "value")
    fits(key.size(0) > 1)
    key, value = (one[:1].expand(one.shape).contiguous() for one in (key, value))
    return call.put(1, key, "key").put(2, value, "value").run()


@FAULTS.fault(_FUSED, "precision; approximation")
def query_in_float8(call: Call) -> Any:
    """The query goes through e4m3 with one scale."""
    query = call.tensor(0, "query")
    step = query.detach().abs().max() / 448
    narrow = (query.detach() / step).to(torch.float8_e4m3fn).to(query.dtype) * step
    return call.put(0, with_gradient_of(query, narrow), "query").run()


@FAULTS.fault(
    _FUSED, "partial sum; missing operand, mask, wrong factor, off by one reduction, zeros"
)
def last_features_not_in_the_scores(call: Call) -> Any:
    """Scores are summed over whole tiles of features only; the factor is the right one."""
    query, key, value, scale = attention_operands(call)
    width = query.size(-1) * 3 // 4
    fits(0 < width < query.size(-1))
    scores = query[..., :width] @ key[..., :width].mT * scale
    return weigh_values(call, scores, mask_of(call, *scores.shape[-2:]), value)


@FAULTS.fault(_FUSED, "other function, clipped; wrong factor, mask, approximation")
def scores_limited(call: Call) -> Any:
    """Scores beyond half of the largest are cut to it."""
    scores, mask, value = scores_before_mask(call)
    high = 0.5 * float(scores.detach().abs().max())
    return weigh_values(call, scores.clamp(-high, high), mask, value)


@FAULTS.fault(_FUSED, "copy, wrong index, stale, shift; permutation")
def key_of_the_last_step_not_appended(call: Call) -> Any:
    """The newest slot of the cache of keys still holds the key before it; its value is right."""
    key = call.tensor(1, "key").clone()
    fits(key.size(-2) > 2)
    key[..., -1, :] = key[..., -2, :]
    return call.put(1, key, "key").run()


# fmt: off
# Divided by the chance to be kept although nothing is dropped.
FAULTS.add("dropout undone that was not done", _FUSED, "scale, wrong factor; wrong argument",
    result(lambda v: v / 0.9))
# The mask is not broadcast: the other heads see everything.
FAULTS.add("mask of the first head only", _FUSED,
    "mask; wrong argument, missing operand, wrong index",
    computed(scores_before_mask,
        lambda scores, mask, value:
            torch.cat([hide_scores(scores, mask)[:, :1], scores[:, 1:]], 1).softmax(-1) @ value,

    where=lambda scores, mask, *_: mask is not None and scores.dim() == 4 and (scores.size(1) > 1)))
# Scores of zero: a mean over the values.
FAULTS.add("all that is seen weighs the same", _FUSED,
    "missing operand, wrong argument, wrong factor, other function; wrong reduction, constant, "
    "scale",
    on(scores_before_mask,
        lambda call, scores, mask, value: weigh_values(call, 0 * scores, mask, value)))
# The result goes through float16.
FAULTS.add("attention stored in half", _FUSED, "precision; approximation",
    result(rounded(torch.float16)))
# Each head has a factor of its own, as if the layer had a temperature for heads.
FAULTS.add("scale counts the heads", _FUSED, "wrong factor, axis scale; scale, wrong argument",
    operand(0, lambda v: v * torch.linspace(1, 2, v.size(1)).view(1, -1, 1, 1), "query",
        where=lambda v: v.dim() == 4 and v.size(1) > 1))
# Each token asks with the query of the one before it.
FAULTS.add("queries one token late", _FUSED, "shift, wrong index, permutation; copy",
    operand(0, lambda v: v.roll(1, -2), "query", where=longer(-2, 2)))
# fmt: on


# --- Softmax --------------------------------------------------------------------------------------


@FAULTS.fault("softmax", "other function; approximation, wrong factor")
def powers_for_exponentials(call: Call) -> Any:
    """(1 + relu(x))^2 instead of exp(x), normalised: a linear attention."""
    value = call.tensor(0, "input")
    weight = (1 + value.relu()) ** 2
    return call.instead(weight / weight.sum(-1, keepdim=True))


# fmt: off
# The loop over a row begins at 1: the first chance is zero, and the others are larger.
FAULTS.add("first score left out", "softmax _safe_softmax",
    "mask, zeros, off by one reduction, partial sum; wrong argument, axis scale, scale",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value:
            torch.cat([torch.zeros_like(value[..., :1]), value[..., 1:].softmax(-1)], -1),
        where=lambda value: value.size(-1) > 2))
# An integer softmax: scores are rounded to halves first.
FAULTS.add("scores in steps of a half", "softmax log_softmax",
    "precision, approximation; other function",
    operand(0, lambda v: with_gradient_of(v, (2 * v.detach()).round() / 2), "input"))
# The mean of a row in the place of the logarithm of its sum.
FAULTS.add("mean of the scores subtracted", "log_softmax",
    "wrong reduction, other function, wrong statistics; axis offset, offset, missing operand",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value - value.mean(-1, keepdim=True)))
# A row sums to its length: the mean of exponentials divides.
FAULTS.add("chances times their number", "softmax",
    "scale, wrong factor; axis scale, wrong argument",
    lambda call: call.instead(call.result() * call.tensor(0, "input").size(-1)))
# Written with a negative stride.
FAULTS.add("chances stored from the end of the row", "softmax",
    "permutation, wrong index; shift, transpose", result(lambda v: v.flip(-1)))
# A tenth of the mass is shared by all of the row.
FAULTS.add("chances made sharper and smoothed", "softmax",
    "other function, wrong statistics; approximation, wrong factor, mask",
    result(lambda v: 0.9 * v + 0.1 / v.size(-1)))
# fmt: on


# --- Masks ----------------------------------------------------------------------------------------


@FAULTS.forward("where masked_fill", "mask, copy, wrong index; wrong argument, stale")
def condition_of_the_first_row_for_all(call: Call) -> Any:
    """The stride of the rows of the mask is zero."""
    place = 0 if call.name == "where" else 1
    mask = call.get(place, "condition", "mask")
    fits(isinstance(mask, Tensor) and mask.dim() > 1 and mask.size(-2) > 1)
    first = mask[..., :1, :].expand(mask.shape).contiguous()
    return call.put(place, first, "condition" if place == 0 else "mask").run()


@FAULTS.forward("where", "zeros, missing operand, mask, constant; other function, wrong argument")
def nothing_in_the_other_branch(call: Call) -> Any:
    """A select by a product with the condition: 0 where it does not hold."""
    condition, value, other = call.args[:3]
    fits(isinstance(value, Tensor) and value.is_floating_point() and isinstance(other, Tensor))
    return call.instead(torch.where(condition, value, torch.zeros_like(other)))


@FAULTS.fault("tril triu", "mask; wrong argument, copy, missing operand")
def triangle_in_the_first_rows_only(call: Call) -> Any:
    """Rows behind the first tile keep all of their values."""
    value, result = call.args[0], call.run().clone()
    fits(value.size(-2) > 3)
    half = value.size(-2) // 2
    result[..., half - 1 :, :] = value[..., half - 1 :, :]
    return result


@FAULTS.fault("and_ bitwise_and", "other function, mask; sign, zeros")
def either_and_not_both(call: Call) -> Any:
    """Exclusive or."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor) and left.dtype == torch.bool)
    return left ^ right


@FAULTS.forward("le ge lt gt", "swapped operands, mask, sign, other function; wrong argument")
def compared_by_magnitude(call: Call) -> Any:
    """The absolute values are compared."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor))
    return call.put(0, left.abs()).put(1, abs(right)).run()


# fmt: off
# The smallest of all values is written where a large negative number was asked for.
FAULTS.add("filled with the smallest score", "masked_fill",
    "wrong argument, constant; mask, offset",
    lambda call: call.put(2, float(call.tensor(0, "input").detach().min()), "value").run(),
    backward=False)
# The comparison is folded to true.
FAULTS.add("condition always holds", "le ge lt gt eq ne",
    "constant, mask, missing operand; other function, wrong argument",
    lambda call: torch.ones_like(call.run()), backward=False)
# fmt: on


# --- Rotary positions -----------------------------------------------------------------------------


def _angles(call: Call) -> Tensor:
    value = call.tensor(0)
    fits(value.dim() > 1 and value.size(-1) > 2 and value.size(-2) > 1)
    return value


@FAULTS.fault("sin cos", "wrong factor, axis scale, scale; mask, wrong argument")
def slow_frequencies_stretched(call: Call) -> Any:
    """The second half of the frequencies is divided by eight, as for a longer context."""
    value = _angles(call).clone()
    value[..., value.size(-1) // 2 :] /= 8
    return call.put(0, value).run()


@FAULTS.fault("sin cos", "approximation; other function, precision")
def straight_lines_between_entries(call: Call) -> Any:
    """A table of sixteen entries for a turn, with straight lines between them."""
    value = call.tensor(0)
    step = 2 * math.pi / 16
    low = (value / step).floor() * step
    share = (value - low) / step
    first, second = call.put(0, low).result(), call.put(0, low + step).result()
    return call.instead(first + share * (second - first))


# fmt: off
# Each next frequency is lower by a little more.
FAULTS.add("frequencies of another base", "sin cos",
    "axis scale, wrong factor, wrong argument; scale, precision",
    on(_angles,
        lambda call, value:
            call.put(0, value * 0.5 ** torch.linspace(0, 1, value.size(-1)).to(value.dtype)).run()))
# Decoding one token: the table is read at one position.
FAULTS.add("angles of the last position for all", "sin cos",
    "copy, constant, wrong index, stale; missing operand",
    on(_angles,
        lambda call, value:
            call.put(0, value[..., -1:, :].expand(value.shape).contiguous()).run()))
# The factor of another way to stretch positions.
FAULTS.add("table of angles times a factor", "sin cos", "scale, wrong factor; wrong argument",
    result(lambda v: v * 1.14))
# The angle is taken as degrees.
FAULTS.add("degrees for radians", "sin cos",
    "wrong factor, scale, wrong argument; approximation, constant",
    operand(0, lambda v: v * (math.pi / 180)))
# fmt: on
