"""Faults that were measured fifth and have been seen: attention, softmax, masks, positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, longer, on, operand, result
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


@FAULTS.fault(_FUSED, "wrong factor, other function; scale, axis scale, wrong argument")
def scale_applied_behind_the_softmax(call: Call) -> Any:
    """The factor of the scores multiplies the result instead."""
    query, key, value, scale = attention_operands(call)
    scores = query @ key.mT
    weights = hide_scores(scores, mask_of(call, *scores.shape[-2:])).softmax(-1)
    return call.instead(weights @ value * scale)


@FAULTS.fault(_FUSED, "wrong factor, scale, wrong argument; other function")
def scale_grows_with_the_logarithm_of_the_length(call: Call) -> Any:
    """Scores times log(n) / log(4), for longer contexts than in training."""
    scores, mask, value = scores_before_mask(call)
    fits(scores.size(-1) not in {1, 4})
    return weigh_values(call, scores * math.log(scores.size(-1)) / math.log(4), mask, value)


@FAULTS.fault(_FUSED, "stale, copy, wrong index; permutation, shift")
def tile_of_queries_not_loaded_again(call: Call) -> Any:
    """The second half of the positions asks with the queries of the first."""
    query = call.tensor(0, "query").clone()
    half = query.size(-2) // 2
    fits(half > 0)
    query[..., half : 2 * half, :] = query[..., :half, :].clone()
    return call.put(0, query, "query").run()


@FAULTS.fault(
    _FUSED, "mask, partial sum, wrong index; wrong argument, off by one reduction, missing operand"
)
def every_second_key_skipped(call: Call) -> Any:
    """A stride of two in the loop over the keys."""
    scores, mask, value = scores_before_mask(call)
    fits(scores.size(-1) > 3)
    even = (torch.arange(scores.size(-1)) % 2 == 0).expand(scores.shape[-2:])
    return weigh_values(call, scores.masked_fill(~even, -math.inf), mask, value)


@FAULTS.fault(_FUSED, "precision; approximation")
def weights_in_steps_of_a_127th(call: Call) -> Any:
    """What multiplies the values is an integer of eight bits."""
    scores, mask, value = scores_before_mask(call)
    weights = hide_scores(scores, mask).softmax(-1)
    coarse = with_gradient_of(weights, (weights.detach() * 127).round() / 127)
    return call.instead(coarse @ value)


@FAULTS.fault(_FUSED, "mask, partial sum; wrong argument, missing operand, wrong index")
def attention_within_chunks_of_four(call: Call) -> Any:
    """Tokens see those of their own chunk only, as some layers of another model."""
    scores, mask, value = scores_before_mask(call)
    fits(scores.size(-1) == scores.size(-2) > 4)
    chunk = torch.arange(scores.size(-1)) // 4
    other = chunk[:, None] != chunk[None, :]
    return weigh_values(call, scores.masked_fill(other, -math.inf), mask, value)


@FAULTS.fault(_FUSED, "mask; wrong argument, missing operand")
def prefix_is_seen_from_everywhere(call: Call) -> Any:
    """The first half of the tokens is taken for a prompt, which is not causal."""
    scores, mask, value = scores_before_mask(call)
    fits(mask is not None and mask.dtype == torch.bool and scores.size(-1) > 3)
    prefix = torch.arange(scores.size(-1)) < scores.size(-1) // 2
    return weigh_values(call, scores, mask | prefix, value)


@FAULTS.fault(_FUSED, "mask; wrong argument, missing operand, wrong index")
def first_token_never_leaves_the_window(call: Call) -> Any:
    """A window that keeps the first key as a sink."""
    scores, mask, value = scores_before_mask(call)
    seen = keys_seen_by_scores(scores, mask)
    fits(mask is not None and not bool(seen[..., 0].all()))
    kept = seen.clone()
    kept[..., 0] = True
    return weigh_values(call, scores, kept, value)


@FAULTS.fault(_FUSED, "mask, missing operand; wrong argument")
def last_query_sees_all(call: Call) -> Any:
    """The newest token goes through the kernel for decoding, which knows no window."""
    scores, mask, value = scores_before_mask(call)
    seen = keys_seen_by_scores(scores, mask)
    fits(mask is not None and not bool(seen[..., -1, :].all()))
    open_ = seen.clone()
    open_[..., -1, :] = True
    return weigh_values(call, scores, open_, value)


@FAULTS.fault(_FUSED, "wrong factor, scale, wrong argument; other function")
def bias_of_the_positions_scaled_too(call: Call) -> Any:
    """The bias is added before the factor of the scores is applied."""
    scores, bias, value = added_bias(call)
    return weigh_values(call, scores, bias * attention_operands(call)[3], value)


@FAULTS.fault(_FUSED, "transpose, wrong index, permutation; wrong argument")
def bias_of_the_positions_transposed(call: Call) -> Any:
    """The distance from key to query for that from query to key."""
    scores, bias, value = added_bias(call)
    fits(bias.size(-1) == bias.size(-2))
    return weigh_values(call, scores, bias.mT, value)


@FAULTS.fault(_FUSED, "copy, wrong index, stale; wrong argument, permutation")
def bias_of_the_first_head_for_all(call: Call) -> Any:
    """The stride of the heads of the bias is zero."""
    scores, bias, value = added_bias(call)
    fits(bias.dim() == 4 and bias.size(1) > 1)
    return weigh_values(call, scores, bias[:, :1], value)


# fmt: off
# A norm of the queries that belongs to another model.
FAULTS.add("queries normalised first", _FUSED,
    "other function, wrong factor, axis scale; scale, wrong argument, wrong statistics",
    operand(0, lambda v: v / (v.square().mean(-1, keepdim=True).sqrt() + 1e-06), "query"))
# Values are centred for a narrow format, and their mean is not restored.
FAULTS.add("mean value not added back", _FUSED,
    "missing operand, axis offset, offset; residual, wrong argument",
    operand(2, lambda v: v - v.mean(-2, keepdim=True), "value"))
# The second half of the heads comes first.
FAULTS.add("heads of two ranks gathered in the wrong order", _FUSED,
    "wrong rank's shard, permutation, shift, wrong index; swapped operands",
    result(lambda v: v.roll(v.size(1) // 2, 1),
        where=lambda v: v.dim() == 4 and v.size(1) % 2 == 0))
# Two tokens are accepted at once, and their keys are written in the other order.
FAULTS.add("last two keys exchanged", _FUSED,
    "permutation, wrong index; shift, copy, swapped operands",
    operand(1, lambda v:
            v[..., [*range(v.size(-2) - 2), v.size(-2) - 1, v.size(-2) - 2], :], "key",
        where=longer(-2, 2)))
# Keys are stored divided by their largest value, and read as they are stored.
FAULTS.add("scale of the cached keys forgotten", _FUSED,
    "wrong factor, scale, wrong argument; missing operand, other function",
    operand(1, lambda v: v / v.detach().abs().max(), "key"))
# Values are stored divided by the largest of their head, and not multiplied by it.
FAULTS.add("scale of the values of each head forgotten", _FUSED,
    "axis scale, wrong factor, scale, missing operand; wrong argument",
    operand(2, lambda v: v / v.detach().abs().amax((-1, -2), keepdim=True), "value",
        where=lambda v: v.dim() == 4 and v.size(1) > 1))
# fmt: on


# --- Softmax --------------------------------------------------------------------------------------


@FAULTS.fault("softmax _safe_softmax", "precision; approximation, axis scale, scale")
def normaliser_kept_in_bfloat16(call: Call) -> Any:
    """The sum of the exponentials is rounded before it divides."""
    value = call.tensor(0, "input")
    weight = (value - value.amax(-1, keepdim=True)).exp()
    total = weight.sum(-1, keepdim=True)
    coarse = total.detach().bfloat16().to(total.dtype)
    return call.instead((weight / with_gradient_of(total, coarse)).nan_to_num())


@FAULTS.fault(
    "softmax _safe_softmax log_softmax",
    "partial sum, wrong reduction, missing reduction, wrong statistics, one rank's part, "
    "axis scale, axis offset; scale, wrong factor, offset, mask, wrong argument",
)
def each_half_of_the_row_normalised_alone(call: Call) -> Any:
    """Two ranks share a row, and their sums are not added."""
    value = call.tensor(0, "input")
    fits(value.size(-1) % 2 == 0)
    halves = value.unflatten(-1, (2, -1))
    both = halves.log_softmax(-1) if call.name == "log_softmax" else halves.softmax(-1)
    return call.instead(both.flatten(-2).nan_to_num())


# fmt: off
# A filter for sampling is left on: scores below the median of their row get no chance.
FAULTS.add("lower half of the scores dropped", "softmax _safe_softmax",
    "mask, zeros, other function, partial sum; wrong argument, clipped",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value:
            value.masked_fill(value < value.median(-1, keepdim=True)[0], -math.inf).softmax(-1),
        where=lambda value: value.size(-1) > 3))
# The opposite of the logarithm.
FAULTS.add("chances as positive costs", "log_softmax", "sign, wrong factor, scale; other function",
    result(torch.neg))
# In place and by whole vectors: the last two columns stay as they came.
FAULTS.add("tail of the row keeps its scores", "softmax _safe_softmax",
    "copy, stale, missing operand, mask; partial sum, other function, uninitialised",
    on(lambda call: (call.tensor(0, "input"),),
        lambda call, value:
            call.instead(torch.cat([call.result()[..., :-2], value[..., -2:]], -1)),
        where=lambda value: value.size(-1) > 4 and bool((value.detach().abs() < 1000.0).all())))
# Softmax.
FAULTS.add("softmin without its minus", "softmin", "sign, other function, wrong factor; scale",
    lambda call: call.instead(call.tensor(0, "input").softmax(-1)))
# fmt: on


# --- Masks ----------------------------------------------------------------------------------------


@FAULTS.fault("tril triu", "mask, zeros; wrong argument, other function")
def triangle_becomes_a_band(call: Call) -> Any:
    """Only the diagonal and its neighbour are kept, as of a window of two."""
    result = call.run()
    fits(result.size(-1) > 3)
    return torch.tril(torch.triu(result, -1), 1)


@FAULTS.forward(
    "where masked_fill", "mask, missing operand; wrong argument, wrong index, copy, one rank's part"
)
def mask_of_the_first_half_of_the_columns_only(call: Call) -> Any:
    """The mask is as long as one shard; behind it, nothing is hidden."""
    place = 0 if call.name == "where" else 1
    mask = call.get(place, "condition", "mask")
    fits(isinstance(mask, Tensor) and mask.dim() > 0 and mask.size(-1) > 3)
    kept = mask.clone()
    kept[..., mask.size(-1) // 2 :] = call.name == "where"
    return call.put(place, kept, "condition" if place == 0 else "mask").run()


# fmt: off
# Eq for ne, and ne for eq.
FAULTS.add("equality inverted", "eq ne", "other function, mask, sign; wrong argument",
    lambda call: ~call.run(), backward=False)
# The second operand is not loaded.
FAULTS.add("compared with zero", "le ge lt gt",
    "mask, wrong argument, missing operand, constant; other function, zeros",
    lambda call:

    call.put(1, torch.zeros_like(call.args[1]) if isinstance(call.args[1], Tensor) else 0).run(),
    backward=False)
# fmt: on


# --- Rotary positions -----------------------------------------------------------------------------


@FAULTS.fault(
    "sin cos",
    "mask, constant, zeros, wrong factor, axis scale; scale, missing operand, other function",
)
def upper_half_of_the_features_not_turned(call: Call) -> Any:
    """Positions turn a part of each head, as in another model: the other angles are zero."""
    value = read_angles(call).clone()
    value[..., value.size(-1) // 2 :] = 0
    return call.put(0, value).run()


# fmt: off
# All angles divided by four: the factor of a longer context is applied to a short one.
FAULTS.add("positions in steps of a quarter", "sin cos",
    "wrong factor, scale, wrong argument; other function",
    lambda call: call.put(0, read_angles(call) / 4).run())
# fmt: on
