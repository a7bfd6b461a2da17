"""Faults of the eighth set: attention, softmax, masks, positions."""

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
    read_angles,
    scores_before_mask,
    seen_keys,
    softmax_row,
    weigh_values,
)
from torch import Tensor

FAULTS = Catalogue()
_FUSED = "scaled_dot_product_attention flash_attention"


# --- Attention ------------------------------------------------------------------------------------


def _halves(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden scores of two blocks of keys, and their values."""
    scores, mask, value = scores_before_mask(call)
    half = scores.size(-1) // 2
    fits(half > 1)
    hidden = hide_scores(scores, mask).clamp(min=-1e30)
    return hidden[..., :half], hidden[..., half:], value[..., :half, :], value[..., half:, :]


@FAULTS.fault(
    _FUSED, "wrong factor, scale, wrong argument; other function, axis scale, missing operand"
)
def root_of_the_width_multiplies(call: Call) -> Any:
    """Scores times the root of the width of a head, and not divided by it."""
    query, key, value, _ = attention_operands(call)
    scores = query @ key.mT * query.size(-1) ** 0.5
    return weigh_values(call, scores, mask_of(call, *scores.shape[-2:]), value)


@FAULTS.fault(
    _FUSED,
    "wrong index, wrong factor, axis scale, stale; scale, wrong argument, "
    "wrong rank's shard, shift, permutation",
)
def keys_with_the_scale_of_the_other_block(call: Call) -> Any:
    """Two blocks of keys are stored with a step each, and read with the step of the other."""
    key = call.tensor(1, "key")
    half = key.size(-2) // 2
    fits(half > 1)
    first, second = key[..., :half, :], key[..., half:, :]
    sizes = [one.detach().abs().amax((-2, -1), keepdim=True) for one in (first, second)]
    ratio = sizes[1] / sizes[0]
    return call.put(1, torch.cat([first * ratio, second / ratio], -2), "key").run()


@FAULTS.fault(
    _FUSED,
    "sign, wrong factor, other function, wrong statistics; wrong reduction, scale, "
    "axis scale, wrong argument, approximation",
)
def correction_of_the_first_block_inverted(call: Call) -> Any:
    """An online softmax: exp(new - old) for exp(old - new), in the sum and in the accumulator."""
    first, second, left, right = _halves(call)
    old = first.amax(-1, keepdim=True)
    new = torch.maximum(old, second.amax(-1, keepdim=True))
    fits(bool((new.detach() - old.detach() < 50).all()))
    before, after = (first - old).exp() * (new - old).exp(), (second - new).exp()
    total = before.sum(-1, keepdim=True) + after.sum(-1, keepdim=True)
    return call.instead((before @ left + after @ right) / total)


@FAULTS.fault(
    _FUSED,
    "wrong factor, wrong argument, other function, wrong statistics; scale, "
    "wrong reduction, axis scale, approximation",
)
def blocks_merged_in_another_base(call: Call) -> Any:
    """Logarithms of the sums of two blocks are in base two, and are merged with that of e."""
    first, second, left, right = _halves(call)
    sums = [one.logsumexp(-1, keepdim=True) / math.log(2) for one in (first, second)]
    share = (sums[0] - sums[1]).sigmoid()
    mixed = share * (first.softmax(-1) @ left) + (1 - share) * (second.softmax(-1) @ right)
    return call.instead(mixed)


@FAULTS.fault(
    _FUSED,
    "clipped, other function, wrong statistics; approximation, stale, wrong reduction, "
    "mask, wrong argument",
)
def scores_not_above_the_first_blocks_largest(call: Call) -> Any:
    """The maximum is that of the first block, and exponents above zero are cut to zero."""
    scores, mask, value = scores_before_mask(call)
    half = scores.size(-1) // 2
    fits(half > 1)
    hidden = hide_scores(scores, mask)
    top = hidden[..., :half].amax(-1, keepdim=True)
    fits(bool(top.detach().isfinite().all()))
    return call.instead(torch.minimum(hidden, top).softmax(-1) @ value)


@FAULTS.fault(
    _FUSED,
    "other function, wrong reduction, wrong axis; approximation, wrong statistics, "
    "missing operand, wrong argument",
)
def queries_and_keys_normalised_apart(call: Call) -> Any:
    """Efficient attention: a softmax of each query, and one of the keys over the positions."""
    query, key, value, _ = attention_operands(call)
    fits(mask_of(call, query.size(-2), key.size(-2)) is None)
    return call.instead(query.softmax(-1) @ (key.softmax(-2).mT @ value))


@FAULTS.fault(
    _FUSED, "mask, wrong argument; wrong index, other function, partial sum, wrong reduction"
)
def newest_key_seen_by_every_query(call: Call) -> Any:
    """The slot that was just written has no bit in the mask."""
    scores, mask, value = scores_before_mask(call)
    fits(mask is not None and scores.size(-1) > 2)
    assert mask is not None
    fits(mask.size(-1) == scores.size(-1))
    changed = mask.clone()
    changed[..., -1] = True if mask.dtype == torch.bool else 0.0
    return weigh_values(call, scores, changed, value)


@FAULTS.fault(
    _FUSED,
    "mask, wrong argument, constant, clipped; approximation, offset, other function, "
    "precision, wrong factor, eps",
)
def hidden_keys_get_minus_four(call: Call) -> Any:
    """The mask is too small a number: what is hidden still shines through."""
    scores, mask, value = scores_before_mask(call)
    fits(mask is not None)
    assert mask is not None
    hidden = ~seen_keys(mask)
    fits(bool(hidden.any()))
    added = torch.zeros(mask.shape, dtype=scores.dtype).masked_fill(hidden, -4.0)
    return weigh_values(call, scores, added, value)


@FAULTS.fault(_FUSED, "precision; approximation, other function")
def accumulator_of_the_values_in_bfloat16(call: Call) -> Any:
    """After every two keys, what was summed is rounded to eight bits."""
    scores, mask, value = scores_before_mask(call)
    weights = hide_scores(scores, mask).softmax(-1).detach()
    total = torch.zeros_like(call.result())
    for place in range(0, weights.size(-1), 2):
        term = weights[..., place : place + 2] @ value.detach()[..., place : place + 2, :]
        total = (total + term).bfloat16().to(total.dtype)
    return call.instead(with_gradient_of(call.result(), total))


@FAULTS.fault(
    _FUSED,
    "wrong statistics, wrong index, axis scale, wrong factor; scale, shift, stale, "
    "wrong reduction, permutation",
)
def sums_of_the_next_head_divide(call: Call) -> Any:
    """The pointer to the sums of the exponentials is one head too far."""
    scores, mask, value = scores_before_mask(call)
    fits(scores.dim() == 4 and scores.size(1) > 1)
    hidden = hide_scores(scores, mask)
    weights = (hidden - hidden.detach().amax((1, 3), keepdim=True)).exp()
    return call.instead(weights @ value / weights.sum(-1, keepdim=True).roll(-1, 1))


@FAULTS.fault(
    _FUSED, "wrong index, copy, mask; transpose, permutation, stale, sign, wrong argument"
)
def bias_of_the_distance_without_its_sign(call: Call) -> Any:
    """A key behind the query gets the bias of one as far before it."""
    scores, bias, value = added_bias(call)
    fits(bias.size(-1) == bias.size(-2))
    return weigh_values(call, scores, bias.tril() + bias.tril(-1).mT, value)


# fmt: off
# A norm by the root mean square of heads and features together, as in another model.
FAULTS.add("query divided by its length over all heads", _FUSED,
    "wrong factor, axis scale, other function, wrong statistics; scale, wrong argument, "
    "missing operand",
    operand(0, lambda v: v / (v.square().mean((1, 3), keepdim=True) + 1e-06).sqrt(), "query",
        where=lambda v: v.dim() == 4))
# Heads are taken in pairs, and the query of the first of a pair is overwritten.
FAULTS.add("two heads ask with the second of them", _FUSED, words.REPEATED,
    on(lambda call: (call.tensor(0, "query"),),
        lambda call, query:
            call.instead(call.put(0, query[:, torch.arange(query.size(1)) | 1], "query").result()),
        where=lambda query: query.dim() == 4 and query.size(1) % 2 == 0))
# Relu(s) / n in the place of a softmax, as in a variant for images.
FAULTS.add("rectified scores divided by the keys", _FUSED,
    "other function, wrong reduction; wrong statistics, missing operand, approximation, zeros, "
    "clipped",
    computed(scores_before_mask,
        lambda scores, mask, value: hide_scores(scores, mask).relu() @ value / scores.size(-1)))
# Of four queries, the last two are not stored.
FAULTS.add("rows of the second warp empty", _FUSED, words.EMPTY_IN_A_SUM,
    result(lambda v: v.masked_fill(~(torch.arange(v.size(-2)) % 4 < 2)[:, None], 0),
        where=longer(-2, 2)))
# Each head but the first begins with what the head before it has written.
FAULTS.add("accumulator kept from the head before", _FUSED,
    "residual, stale, doubled reduction; offset, lost accumulation, shift, wrong index, "
    "wrong reduction",
    result(lambda v: v + torch.cat([torch.zeros_like(v[:, :1]), v[:, :-1]], 1),
        where=lambda v: v.dim() == 4 and v.size(1) > 1))
# The last feature of each position is the first of the next one; the very last goes around.
FAULTS.add("pointer to the values one element too far", _FUSED,
    "shift, wrong index, permutation; copy, stale, wrong argument, swapped operands",
    on(lambda call: (call.tensor(2, "value"),),
        lambda call, value:
            call.instead(call.put(2, value.flatten().roll(-1).view(value.shape), "value").result()),
        where=lambda value: value.size(-1) > 1))
# The weights get the bias of the positions, and not the scores.
FAULTS.add("bias added behind the softmax", _FUSED,
    "other function, residual, offset; axis offset, wrong argument, mask, missing operand, "
    "wrong reduction",
    computed(added_bias, lambda scores, bias, value: (scores.softmax(-1) + bias) @ value))
# fmt: on


# --- Softmax --------------------------------------------------------------------------------------

_SOFTMAX = "softmax _safe_softmax"


@FAULTS.fault(
    _SOFTMAX,
    "off by one reduction, partial sum, wrong statistics, wrong reduction; axis scale, "
    "wrong factor, scale, lost accumulation, missing operand",
)
def one_of_the_largest_not_in_the_sum(call: Call) -> Any:
    """The first term of an online sum, exp(0), is not added: the sum begins with zero."""
    _, chances = softmax_row(call)
    rest = 1 - chances.amax(-1, keepdim=True)
    fits(bool((rest.detach() > 0.01).all()))
    return call.instead(chances / rest)


@FAULTS.fault(
    _SOFTMAX,
    "partial sum, missing reduction, wrong reduction, one rank's part; wrong statistics, "
    "axis scale, wrong factor, scale, wrong index",
)
def lanes_keep_their_own_sums(call: Call) -> Any:
    """Two lanes take the columns in turn, and each divides by its own sum."""
    value, chances = softmax_row(call)
    lane = torch.arange(value.size(-1)) % 2
    own = [(chances * (lane == one)).sum(-1, keepdim=True) for one in (0, 1)]
    return call.instead(chances / torch.where(lane == 0, *own).clamp(min=1e-30))


@FAULTS.fault(_SOFTMAX, "stale, wrong index, shift, copy; mask, permutation, wrong rank's shard")
def second_half_of_the_row_before(call: Call) -> Any:
    """The second tile of a row is stored before it is computed: it has that of the last row."""
    _, chances = softmax_row(call)
    fits(chances.dim() > 1 and chances.size(-2) > 1)
    half = chances.size(-1) // 2
    return call.instead(torch.cat([chances[..., :half], chances.roll(1, -2)[..., half:]], -1))


# fmt: off
# The scores come from a part that is normalised already.
FAULTS.add("softmax of the softmax", _SOFTMAX,
    "other function; wrong statistics, approximation, scale, wrong argument, doubled reduction",
    computed(softmax_row, lambda _, chances: chances.softmax(-1)))
# The sum that divides is added up over two ranks, which both have all of the row.
FAULTS.add("sum reduced over two ranks with the same row", _SOFTMAX,
    "doubled reduction, wrong factor, scale, wrong statistics; wrong reduction, axis scale, "
    "one rank's part", computed(softmax_row, lambda _, chances: chances / 2))
# X - log(sum exp(x - max)): the maximum is subtracted within, and forgotten outside.
FAULTS.add("largest not added back to the logarithm", "log_softmax",
    "axis offset, missing operand, wrong statistics, residual; offset, other function, "
    "wrong reduction, missing reduction",
    computed(softmax_row,
        lambda value, *_:
            value - (value - value.amax(-1, keepdim=True)).logsumexp(-1, keepdim=True)))
# fmt: on


# --- Masks ----------------------------------------------------------------------------------------


@FAULTS.forward(
    "where masked_fill",
    "permutation, wrong index, mask; shift, swapped operands, wrong argument, transpose",
)
def bits_of_the_mask_from_the_high_end(call: Call) -> Any:
    """Four columns of a mask share a word, and its bits are read in the other order."""
    place, mask, name = condition_of(call)
    whole = mask.size(-1) // 4 * 4
    fits(whole > 0)
    turned = mask[..., :whole].unflatten(-1, (-1, 4)).flip(-1).flatten(-2)
    return call.put(place, torch.cat([turned, mask[..., whole:]], -1), name).run()


@FAULTS.forward(
    "where masked_fill", "copy, stale, wrong index, mask; constant, permutation, wrong argument"
)
def condition_of_the_first_column_for_all(call: Call) -> Any:
    """The stride of the columns of the mask is zero."""
    place, mask, name = condition_of(call)
    fits(mask.size(-1) > 1)
    return call.put(place, mask[..., :1].expand(mask.shape).clone(), name).run()


@FAULTS.forward(
    "tril triu",
    "mask, wrapped, wrong index; wrong argument, other function, copy, zeros, permutation",
)
def triangle_of_each_tile(call: Call) -> Any:
    """Rows and columns are compared by their numbers within a tile of four."""
    value = call.args[0]
    fits(value.size(-1) > 4 and value.size(-2) > 4)
    diagonal = call.get(1, "diagonal", default=0)
    rows, columns = torch.arange(value.size(-2)) % 4, torch.arange(value.size(-1)) % 4
    far = columns[None, :] - rows[:, None]
    kept = far <= diagonal if call.name == "tril" else far >= diagonal
    return value * kept.to(value.dtype)


@FAULTS.forward(
    "eq ne lt gt le ge",
    "copy, stale, wrong index, mask; permutation, shift, constant, wrong argument",
)
def even_rows_of_the_comparison_twice(call: Call) -> Any:
    """A pair of rows shares one word of bits, that of the first."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dim() > 1 and value.size(-2) > 1)
    return value[..., torch.arange(value.size(-2)) // 2 * 2, :]


@FAULTS.forward(
    "bitwise_and and_ logical_and",
    "transpose, permutation, wrong index, mask; swapped operands, wrong argument, shift",
)
def combined_mask_transposed(call: Call) -> Any:
    """Keys by queries for queries by keys."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 1)
    fits(value.size(-1) == value.size(-2))
    return value.mT.contiguous()


# fmt: off
# The pointer to the values for `false` is one row too far.
FAULTS.add("second branch of the next row", "where",
    "shift, wrong index, permutation; copy, stale, wrong argument, mask, swapped operands",
    operand(2, lambda v: v.roll(-1, -2), "other", where=longer(-2)), backward=False)
# fmt: on


# --- Rotary positions -----------------------------------------------------------------------------


@FAULTS.fault("sin cos", "precision, approximation; other function, wrong argument")
def angle_in_steps_of_a_64th_of_a_turn(call: Call) -> Any:
    """A phase accumulator of six bits."""
    value = read_angles(call)
    step = 2 * math.pi / 64
    coarse = (value.detach() / step).round() * step
    return call.put(0, with_gradient_of(value, coarse)).run()


@FAULTS.fault("sin cos", "approximation, other function; precision")
def parabola_for_half_a_turn(call: Call) -> Any:
    """4 x (pi - x) / pi^2 for half a turn, and a sign: one step of a well-known fast sine."""
    value = read_angles(call)
    turned = value + math.pi / 2 if call.name == "cos" else value
    within = turned.remainder(math.pi)
    sign = 1 - 2 * (turned.detach() / math.pi).floor().remainder(2)
    return call.instead(sign * 4 * within * (math.pi - within) / math.pi**2)


# fmt: off
# An instruction that takes turns: the angle is divided by 2 pi, and nothing undoes it.
FAULTS.add("turns taken for radians", "sin cos",
    "wrong factor, scale, wrong argument; other function, axis scale, missing operand",
    lambda call: call.put(0, read_angles(call) / (2 * math.pi)).run())
# The rows of the table are stored from the end.
FAULTS.add("table of the turns from the last position", "sin cos",
    "permutation, wrong index; shift, wrong argument, transpose, swapped operands",
    lambda call: call.put(0, read_angles(call).flip(-2)).run())
# Feature 2 i + 1 turns as feature 2 i does.
FAULTS.add("two frequencies share the first", "sin cos",
    "copy, stale, wrong index; permutation, shift, wrong argument, constant",
    on(read_angles,
        lambda call, value: call.put(0, value[..., torch.arange(value.size(-1)) // 2 * 2]).run()))
# The function knows angles up to pi, and cuts larger ones.
FAULTS.add("angle limited to half a turn", "sin cos",
    "clipped; other function, wrong argument, mask",
    lambda call: call.put(0, read_angles(call).clamp(-math.pi, math.pi)).run())
# fmt: on
