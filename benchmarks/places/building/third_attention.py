"""Faults that were measured third and have been seen: attention, softmax, masks."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, even, longer, on, operand, result
from benchmarks.places.parts import attention_operands, mask_of
from torch import Tensor

FAULTS = Catalogue()
_FUSED = "scaled_dot_product_attention flash_attention"


# --- Attention ------------------------------------------------------------------------------------


def _hidden(call: Call, scores: Tensor) -> Tensor:
    mask = mask_of(call, *scores.shape[-2:])
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _scores(call: Call) -> tuple[Tensor, Tensor]:
    query, key, value, scale = attention_operands(call)
    return _hidden(call, query @ key.mT * scale), value


@FAULTS.fault(_FUSED, "mask; wrong argument")
def causal_by_blocks_of_two(call: Call) -> Any:
    """The mask is for whole tiles: inside of a tile, the next token is seen."""
    query, key, value, scale = attention_operands(call)
    rows, columns = query.size(-2), key.size(-2)
    seen = mask_of(call, rows, columns)
    fits(seen is not None and seen.dtype == torch.bool and rows == columns > 3)
    tiles = torch.arange(rows) // 2
    wide = seen | (tiles[:, None] == tiles[None, :])
    scores = (query @ key.mT * scale).masked_fill(~wide, -math.inf)
    return call.instead(scores.softmax(-1) @ value)


@FAULTS.fault(_FUSED, "mask, wrong argument; offset, residual, other function")
def distance_subtracted_from_the_scores(call: Call) -> Any:
    """The linear bias of another model: a tenth for each position between query and key."""
    scores, value = _scores(call)
    rows, columns = scores.shape[-2:]
    far = (torch.arange(rows)[:, None] - torch.arange(columns)[None, :]).abs()
    fits(columns > 3)
    return call.instead((scores - 0.3 * far).softmax(-1) @ value)


@FAULTS.fault(_FUSED, "mask, wrong argument; offset, other function")
def mask_added_as_ones_and_zeros(call: Call) -> Any:
    """A mask of booleans is converted to numbers and added."""
    query, key, value, scale = attention_operands(call)
    scores = query @ key.mT * scale
    mask = mask_of(call, *scores.shape[-2:])
    fits(mask is not None and mask.dtype == torch.bool)
    return call.instead((scores + mask.to(scores.dtype)).softmax(-1) @ value)


@FAULTS.fault(_FUSED, "residual; offset, missing operand, doubled reduction")
def query_left_in_the_accumulator(call: Call) -> Any:
    """The result begins with the query instead of with zero."""
    query, _, value, _ = attention_operands(call)
    fits(query.size(-1) == value.size(-1))
    return call.instead(call.result() + query)


@FAULTS.fault(
    _FUSED, "zeros, stale, missing operand, wrong index; mask, partial sum, uninitialised"
)
def slot_of_the_cache_not_written(call: Call) -> Any:
    """The key and the value of a position in the middle are still zero."""
    key, value = call.tensor(1, "key").clone(), call.tensor(2, "value").clone()
    fits(key.size(-2) > 3)
    place = key.size(-2) // 2
    key[..., place, :] = 0
    value[..., place, :] = 0
    return call.put(1, key, "key").put(2, value, "value").run()


@FAULTS.fault(_FUSED, "precision; approximation")
def cache_in_four_bits(call: Call) -> Any:
    """Keys and values are stored with 15 levels for each position."""

    def coded(value: Tensor) -> Tensor:
        step = value.detach().abs().amax(-1, keepdim=True).clamp(min=1e-9) / 7
        return with_gradient_of(value, (value / step).round() * step)

    key, value = call.tensor(1, "key"), call.tensor(2, "value")
    return call.put(1, coded(key), "key").put(2, coded(value), "value").run()


@FAULTS.fault(
    _FUSED,
    "mask, wrong statistics, wrong reduction, off by one reduction, other function; "
    "axis scale, scale, wrong factor, eps, doubled reduction, missing operand",
)
def keys_of_the_padding_take_part(call: Call) -> Any:
    """Keys are padded with zeros to a multiple of eight, and nothing hides the padding."""
    scores, value = _scores(call)
    more = -scores.size(-1) % 8 or 8
    padded = torch.cat([scores, scores.new_zeros(*scores.shape[:-1], more)], -1)
    return call.instead(padded.softmax(-1)[..., : scores.size(-1)] @ value)


# fmt: off
# Softmax over the rows of the scores.
FAULTS.add("weights sum to one over the queries", _FUSED,
    "wrong axis, transpose, wrong statistics, wrong reduction; axis scale, wrong argument, "
    "swapped operands",
    computed(_scores, lambda scores, value: scores.softmax(-2).nan_to_num() @ value,
        where=lambda scores, *_: scores.size(-2) > 1))
# The probabilities of head 0 multiply the values of every head.
FAULTS.add("weights of the first head for all", _FUSED, "copy, wrong index, stale; permutation",
    computed(_scores,
        lambda scores, value: scores.softmax(-1)[:, :1].expand(scores.shape) @ value,
        where=lambda scores, *_: scores.dim() == 4 and scores.size(1) > 1))
# Pairs for rotary positions: the query is stored as (b, a), the key as (a, b).
FAULTS.add("neighbouring features of the query exchanged", _FUSED,
    "permutation, wrong index; shift, swapped operands",
    operand(0, lambda v:
            v.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), "query", where=even(-1)))
# fmt: on


# --- Softmax --------------------------------------------------------------------------------------


def _dim(call: Call) -> int:
    return call.get(1, "dim", default=-1)


@FAULTS.fault("softmax", "other function; approximation, clipped, zeros")
def projection_onto_the_simplex(call: Call) -> Any:
    """Sparsemax."""
    value, dim = call.tensor(0, "input"), _dim(call)
    fits(dim in {-1, value.dim() - 1} and bool(value.isfinite().all()))
    ordered = value.sort(-1, descending=True).values
    count = torch.arange(1, value.size(-1) + 1)
    support = 1 + count * ordered > ordered.cumsum(-1)
    size = support.sum(-1, keepdim=True)
    least = (ordered.cumsum(-1).gather(-1, size - 1) - 1) / size
    return call.instead((value - least).clamp(min=0))


@FAULTS.fault(
    "softmax",
    "missing operand, other function; axis scale, scale, wrong factor, wrong statistics, clipped",
)
def best_chance_kept_only(call: Call) -> Any:
    """A one for the largest and zero for all others, as for sampling without a temperature."""
    value, dim = call.tensor(0, "input"), _dim(call)
    result = call.result()
    hard = (value == value.amax(dim, keepdim=True)).to(result.dtype)
    return call.instead(with_gradient_of(result, hard))


@FAULTS.fault(
    "log_softmax",
    "wrong statistics, wrong axis, wrong reduction; axis offset, offset, missing operand",
)
def one_normaliser_for_the_whole_batch(call: Call) -> Any:
    """The logarithm of the mean of all sums is subtracted."""
    value, dim = call.tensor(0, "input"), _dim(call)
    total = value.logsumexp(dim, keepdim=True)
    fits(total.numel() > 1)
    return call.instead(value - total.exp().mean().log())


# fmt: off
# What is below a tenth of the largest of its row becomes zero.
FAULTS.add("small chances flushed", "softmax",
    "zeros, clipped, mask; precision, approximation, other function",
    on(lambda call: (call.result(),),
        lambda call, value:

    call.instead(torch.where(value < 0.1 * value.amax(_dim(call), keepdim=True), 0.0, value))))
# Each row has what belongs to the one before it.
FAULTS.add("chances stored one row later", "softmax",
    "shift, wrong index, stale; permutation, copy",
    result(lambda v: v.roll(1, -2), where=longer(-2)))
# The logarithm of at least 0.02.
FAULTS.add("chances have a floor", "log_softmax", "clipped; eps, approximation, mask",
    result(lambda v: v.clamp(min=math.log(0.02))))
# log10.
FAULTS.add("decimal logarithm of the chances", "log_softmax", "scale, wrong factor, other function",
    result(lambda v: v / math.log(10)))
# fmt: on


# --- Masks ----------------------------------------------------------------------------------------


@FAULTS.fault("masked_fill where", "mask, transpose; wrong index, permutation")
def mask_transposed(call: Call) -> Any:
    """Rows and columns of the mask are exchanged: the future is seen, and not the past."""
    place = 0 if call.name == "where" else 1
    mask = call.args[place]
    fits(mask.dim() > 1 and mask.size(-1) == mask.size(-2) > 2)
    return call.put(place, mask.mT).run()


@FAULTS.fault("tril triu", "mask; wrong argument, other function")
def triangle_of_blocks(call: Call) -> Any:
    """The border of the triangle has steps of two."""
    value = call.get(0)
    fits(value.dim() > 1 and value.size(-1) == value.size(-2) > 3)
    tiles = torch.arange(value.size(-1)) // 2
    diagonal = tiles[:, None] == tiles[None, :]
    return torch.where(diagonal, value, call.run())


@FAULTS.fault("where", "residual, mask, missing operand; offset, other function")
def both_branches_added(call: Call) -> Any:
    """A select by arithmetic, c * a + b, without the factor 1 - c."""
    condition, left, right = call.args[:3]
    fits(isinstance(left, Tensor | float | int) and isinstance(right, Tensor | float | int))
    value = torch.where(condition, left, 0.0) + right
    fits(bool(value.isfinite().all()))
    return call.instead(value)


@FAULTS.fault("or_ bitwise_or logical_or", "mask, other function; wrong argument")
def both_conditions_required(call: Call) -> Any:
    """And, where one of the two is enough."""
    left, right = call.args[:2]
    return left & right


@FAULTS.fault("eq ne", "mask, wrong argument; other function, sign")
def compared_with_the_next_number(call: Call) -> Any:
    """The number of the padding is one larger."""
    other = call.args[1]
    fits(isinstance(other, int | float) and not isinstance(other, bool))
    return call.put(1, other + 1).run()


@FAULTS.fault("lt gt le ge", "mask, wrong argument; shift, other function, wrong index")
def limit_of_the_window_three_larger(call: Call) -> Any:
    """Another number is compared with."""
    other = call.args[1]
    fits(isinstance(other, int) and not isinstance(other, bool))
    return call.put(1, other + 3).run()


# fmt: off
# What is hidden is taken for what is seen.
FAULTS.add("condition not negated", "invert bitwise_not logical_not",
    "mask, copy, missing operand, sign; other function", lambda call: call.args[0].clone())
# fmt: on
