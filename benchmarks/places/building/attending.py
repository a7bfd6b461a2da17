"""Faults for building: attention, softmax and masks."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, longer, on, operand, result
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


@FAULTS.fault(
    "scaled_dot_product_attention flash_attention masked_fill where", "mask; shift, wrong index"
)
def mask_off_by_one(call: Call) -> Any:
    """The mask is moved by one position."""
    if call.name == "where":
        mask = call.get(0)
        fits(isinstance(mask, Tensor) and mask.dim() >= 1 and mask.shape[-1] > 1)
        return call.put(0, mask.roll(1, -1)).run()
    if call.name == "masked_fill":
        mask = call.get(1)
        fits(isinstance(mask, Tensor) and mask.dim() >= 1 and mask.shape[-1] > 1)
        return call.put(1, mask.roll(1, -1), "mask").run()
    mask = call.get(3, "attn_mask")
    if isinstance(mask, Tensor):
        return _attention(call, mask=mask.roll(1, -1))
    fits(call.get(5, "is_causal", default=False))
    rows, columns = call.tensor(0).shape[-2], call.tensor(1).shape[-2]
    return _attention(call, mask=torch.ones(rows, columns, dtype=torch.bool).tril(1))


def _attention(call: Call, scale: float | None = None, mask: Tensor | None = None) -> Any:
    query, key, value = call.tensor(0, "query"), call.tensor(1, "key"), call.tensor(2, "value")
    flash = call.name == "flash_attention"
    if mask is None:
        mask = call.kwargs.get("attn_mask") if flash else call.get(3, "attn_mask")
    causal = call.get(4 if flash else 5, "is_causal", default=False)
    scale = scale if scale is not None else call.kwargs.get("scale")
    groups = query.shape[-3] // key.shape[-3]
    if groups > 1:
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.mT * (scale or 1 / math.sqrt(query.shape[-1]))
    if causal and mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return call.instead(functional.softmax(scores, -1) @ value)


def _attend(call: Call, *, columns: slice | None = None, unmasked: bool = False) -> Any:
    """Attention written out, with some of its settings changed."""
    is_flash = call.name == "flash_attention"
    query, key, value = (call.tensor(i, n) for i, n in enumerate(("query", "key", "value")))
    mask = call.kwargs.get("attn_mask") if is_flash else call.get(3, "attn_mask")
    causal = call.get(4 if is_flash else 5, "is_causal", default=False)
    repeats = query.size(-3) // key.size(-3)
    key, value = (one.repeat_interleave(repeats, -3) for one in (key, value))
    scores = torch.einsum("...qd,...kd->...qk", query, key)
    scores = scores * (call.kwargs.get("scale") or query.size(-1) ** -0.5)
    if causal:
        mask = torch.ones(scores.shape[-2:]).tril() > 0
    if unmasked:
        fits(isinstance(mask, Tensor) and not causal)
        mask = None
    if isinstance(mask, Tensor):
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    if columns is not None:
        fits(scores.size(-1) > 2 and not causal and mask is None)
        scores, value = scores[..., columns], value[..., columns, :]
    return call.instead(scores.softmax(-1) @ value)


@FAULTS.fault("scaled_dot_product_attention flash_attention", "mask")
def tokens_do_not_see_themselves(call: Call) -> Any:
    """The causal mask begins one position too early."""
    query = call.tensor(0, "query")
    causal = call.get(4 if call.name == "flash_attention" else 5, "is_causal", default=False)
    fits(causal and query.size(-2) > 2)
    # The first token keeps itself: it has nobody else.
    allowed = torch.ones(query.size(-2), call.tensor(1).size(-2)).tril(-1) > 0
    allowed[0, 0] = True
    scale = call.kwargs.get("scale") or query.size(-1) ** -0.5
    scores = (query @ call.tensor(1).mT * scale).masked_fill(~allowed, -math.inf)
    return call.instead(scores.softmax(-1) @ call.tensor(2))


@FAULTS.fault("softmax", "off by one reduction, mask, partial sum; wrong reduction")
def sum_of_softmax_without_one_column(call: Call) -> Any:
    """The denominator lacks the last exponential."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(value.size(dim) > 2)
    exps = (value - value.amax(dim, keepdim=True)).exp()
    return call.instead(exps / exps.narrow(dim, 0, value.size(dim) - 1).sum(dim, keepdim=True))


@FAULTS.fault("le ge lt gt", "mask, tie-breaking, other function")
def comparison_with_or_without_equality(call: Call) -> Any:
    """< instead of <=."""
    other = {"le": "lt", "lt": "le", "ge": "gt", "gt": "ge"}[call.name]
    fits(isinstance(call.args[0], Tensor))
    return getattr(torch, other)(*call.args)


# fmt: off
# The last but one axis.
FAULTS.add("softmax over the axis before", "softmax log_softmax", "wrong axis, wrong argument",
    on(lambda call: (call.tensor(0, "input"),),
        lambda call, value:
            call.put(1, call.get(1, "dim", default=-1) % value.dim() - 1, "dim").run(),
        where=lambda value: value.dim() >= 2))
# The factor of the scores is 1.
FAULTS.add("attention not scaled", "scaled_dot_product_attention flash_attention",
    "scale, wrong factor, wrong argument", lambda call: _attention(call, scale=1.0))
# The mask is not applied.
FAULTS.add("padding is attended to", "scaled_dot_product_attention flash_attention",
    "mask, missing operand, wrong argument", lambda call: _attend(call, unmasked=True))
# The loop over the keys ends one too early.
FAULTS.add("last key left out", "scaled_dot_product_attention flash_attention",
    "partial sum, off by one reduction, mask", lambda call: _attend(call, columns=slice(None, -1)))
# One more diagonal.
FAULTS.add("diagonal one off", "tril triu", "mask, wrong argument; shift",
    lambda call: call.put(1, call.get(1, "diagonal", default=0) + 1, "diagonal").run())
# The mask is reversed along its last axis.
FAULTS.add("mask read from the other end", "masked_fill where", "mask; permutation, wrong index",
    on(lambda call: (0 if call.name == "where" else 1,),
        lambda call, place: call.put(place, call.args[place].flip(-1)).run()))
# fmt: on


# --- Attention kernels ----------------------------------------------------------------------------

_ATTENTION = "scaled_dot_product_attention flash_attention"


def _scores(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scores before the mask, values, and what is added to the scores."""
    is_flash = call.name == "flash_attention"
    query, key, value = (call.tensor(i, n) for i, n in enumerate(("query", "key", "value")))
    mask = call.kwargs.get("attn_mask") if is_flash else call.get(3, "attn_mask")
    causal = call.get(4 if is_flash else 5, "is_causal", default=False)
    repeats = query.shape[-3] // key.shape[-3]
    key, value = (one.repeat_interleave(repeats, -3) for one in (key, value))
    scores = query @ key.mT * (call.kwargs.get("scale") or query.shape[-1] ** -0.5)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    return scores, value, mask if isinstance(mask, Tensor) else None


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    return scores if mask is None else scores + mask


@FAULTS.fault(_ATTENTION, "mask; partial sum, zeros")
def window_of_three_keys(call: Call) -> Any:
    """A sliding window that this layer does not have."""
    scores, value, mask = _scores(call)
    rows, columns = scores.shape[-2:]
    fits(rows == columns and rows > 4)
    far = torch.ones(rows, columns, dtype=torch.bool).tril(-3)
    return call.instead(_masked(scores, mask).masked_fill(far, -math.inf).softmax(-1) @ value)


@FAULTS.fault(_ATTENTION, "mask, wrong argument; other function")
def causal_where_it_should_not_be(call: Call) -> Any:
    """An encoder gets the mask of a decoder."""
    scores, value, mask = _scores(call)
    fits(mask is None and scores.shape[-2] > 2)
    mask = torch.full(scores.shape[-2:], -math.inf).triu(1)
    return call.instead((scores + mask).softmax(-1) @ value)


@FAULTS.fault(_ATTENTION, "wrong index, permutation; shift, copy")
def groups_of_heads_tiled(call: Call) -> Any:
    """Heads of keys are repeated as a, b, a, b instead of a, a, b, b."""
    query, key, value = (call.tensor(i) for i in range(3))
    repeats = query.shape[-3] // key.shape[-3]
    if repeats > 1 and key.shape[-3] > 1:
        tiled = call.put(1, torch.cat([key] * repeats, -3)).put(2, torch.cat([value] * repeats, -3))
        return tiled.run()
    # A repetition that was written out before: two heads for each.
    heads = key.shape[-3]
    fits(heads >= 4 and torch.equal(key[:, 0], key[:, 1]) and not torch.equal(key[:, 0], key[:, 2]))
    order = [*range(0, heads, 2), *range(0, heads, 2)]
    return call.put(1, key[:, order]).put(2, value[:, order]).run()


@FAULTS.fault(_ATTENTION, "missing reduction, wrong statistics; axis scale, scale, wrong factor")
def not_divided_by_the_sum(call: Call) -> Any:
    """The epilogue of an online softmax forgets the denominator."""
    scores, value, mask = _scores(call)
    scores = _masked(scores, mask)
    return call.instead((scores - scores.amax(-1, keepdim=True)).exp() @ value)


@FAULTS.fault(_ATTENTION, "wrong statistics, lost accumulation; axis scale")
def running_maximum_not_corrected(call: Call) -> Any:
    """The second block of keys does not rescale what the first has summed."""
    scores, value, mask = _scores(call)
    scores = _masked(scores, mask)
    half = scores.shape[-1] // 2
    fits(half >= 1 and bool(scores[..., :half].isfinite().any(-1).all()))
    first, second = scores[..., :half], scores[..., half:]
    before = first.amax(-1, keepdim=True)
    top = torch.maximum(before, second.amax(-1, keepdim=True))
    left, right = (first - before).exp(), (second - top).exp()
    total = left.sum(-1, keepdim=True) + right.sum(-1, keepdim=True)
    return call.instead((left @ value[..., :half, :] + right @ value[..., half:, :]) / total)


@FAULTS.fault(_ATTENTION, "partial sum; mask, missing operand")
def only_the_first_block_of_keys(call: Call) -> Any:
    """The loop over blocks of keys ends after the first."""
    scores, value, mask = _scores(call)
    kept = scores.shape[-1] // 2
    scores = _masked(scores, mask)[..., :kept]
    fits(kept >= 1 and bool(scores.isfinite().any(-1).all()))
    return call.instead(scores.softmax(-1) @ value[..., :kept, :])


@FAULTS.fault(_ATTENTION, "zeros; mask, uninitialised")
def last_queries_not_written(call: Call) -> Any:
    """The last block of queries is smaller than a tile and is left out."""
    value = call.result().clone()
    fits(value.shape[-2] > 2)
    value[..., -(value.shape[-2] % 4 or 1) :, :] = 0
    return call.instead(value)


# fmt: off
# 1 / d instead of 1 / sqrt(d).
FAULTS.add("scaled by the dimension itself", _ATTENTION, "scale, wrong factor, wrong argument",
    lambda call: _attention(call, scale=1 / call.tensor(0, "query").shape[-1]))
# 1 / sqrt of the width of the model, not of one head.
FAULTS.add("scaled by all heads", _ATTENTION, "scale, wrong factor, wrong argument",
    on(lambda call: (call.tensor(0, "query"),),
        lambda call, query:
            _attention(call, scale=(query.shape[-1] * query.shape[-3]) ** (-0.5)),
        where=lambda query: query.shape[-3] > 1))
# The query is scaled before a kernel that scales.
FAULTS.add("scaled twice", _ATTENTION, "scale, wrong factor, wrong argument",
    on(lambda call: (call.tensor(0, "query"),),
        lambda call, query:

    call.put(0, query * (call.kwargs.get("scale") or query.shape[-1] ** (-0.5)), "query").run()))
# A softcap of 2 that this model does not have.
FAULTS.add("scores capped", _ATTENTION, "other function; approximation, clipped",
    computed(_scores,
        lambda scores, value, mask:
            _masked(2 * torch.tanh(scores / 2), mask).softmax(-1) @ value))
# The head of the keys is one too large.
FAULTS.add("keys of the next head", _ATTENTION, "wrong index, permutation, shift; copy",
    operand(1, lambda v: v.roll(-1, -3), "key", where=longer(-3)))
# The cache stores them in the other order.
FAULTS.add("keys and values exchanged", _ATTENTION, "swapped operands; wrong index, permutation",
    on(lambda call: (call.tensor(1, "key"), call.tensor(2, "value")),
        lambda call, key, value: call.put(1, value, "key").put(2, key, "value").run(),
        where=lambda key, value: key.shape == value.shape))
# The scores are transposed.
FAULTS.add("queries and keys exchanged", _ATTENTION, "swapped operands; transpose, wrong index",
    on(lambda call: (call.tensor(0, "query"), call.tensor(1, "key")),
        lambda call, query, key: call.put(0, key, "query").put(1, query, "key").run(),
        where=lambda query, key: query.shape == key.shape))
# What multiplies the values is rounded.
FAULTS.add("probabilities in bfloat16", _ATTENTION, "precision",
    computed(_scores,
        lambda scores, value, mask:
            _masked(scores, mask).softmax(-1).bfloat16().to(value.dtype) @ value))
# Written as (batch, position, head, d) and read as (batch, head, position, d).
FAULTS.add("heads and positions exchanged in the result", _ATTENTION,
    "transpose, permutation; wrong index",
    result(lambda v: v.transpose(-2, -3).contiguous().view(v.shape)))
# exp2 without the factor log2(e).
FAULTS.add("exponent of two", _ATTENTION,
    "other function, approximation, wrong factor, scale, wrong argument",
    computed(_scores,
        lambda scores, value, mask: (_masked(scores, mask) * math.log(2)).softmax(-1) @ value))
# fmt: on


# --- Softmax and masks ----------------------------------------------------------------------------


@FAULTS.fault("softmax", "other function; axis scale, wrong statistics")
def softmax_with_one_more(call: Call) -> Any:
    """1 is added to the denominator, as by an attention sink of zero."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    top = value.amax(dim, keepdim=True).clamp(min=0)
    exps = (value - top).exp()
    return call.instead(exps / (exps.sum(dim, keepdim=True) + (-top).exp()))


@FAULTS.fault("softmax", "approximation; precision, other function")
def exponential_of_third_order(call: Call) -> Any:
    """A polynomial in the place of exp, after a reduction by halves."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    x = (value - value.amax(dim, keepdim=True)).clamp(min=-60) / 8
    exps = (1 + x + x * x / 2 + x**3 / 6).clamp(min=0) ** 8
    return call.instead(exps / exps.sum(dim, keepdim=True))


@FAULTS.fault("softmax", "wrong reduction, wrong axis, wrong statistics")
def sum_over_all_rows(call: Call) -> Any:
    """The denominator is that of the whole tile of rows."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1) % call.tensor(0).dim()
    fits(value.dim() >= 2 and dim == value.dim() - 1)
    exps = (value - value.amax(dim, keepdim=True)).exp()
    return call.instead(exps / exps.sum((-1, -2), keepdim=True))


@FAULTS.fault("masked_fill where", "mask, sign, swapped operands")
def mask_inverted(call: Call) -> Any:
    """True means kept in the one convention and removed in the other."""
    place = 0 if call.name == "where" else 1
    mask = call.get(place, "mask", "condition")
    fits(isinstance(mask, Tensor) and mask.dtype == torch.bool)
    return call.put(place, ~mask, "mask", "condition").run()


@FAULTS.fault("tril triu", "other function, transpose, mask")
def other_triangle(call: Call) -> Any:
    """Upper instead of lower."""
    value, diagonal = call.get(0), call.get(1, "diagonal", default=0)
    return getattr(torch, "triu" if call.name == "tril" else "tril")(value, diagonal)


# fmt: off
# The scores are halved.
FAULTS.add("temperature of two", "softmax log_softmax", "scale, wrong factor; other function",
    operand(0, lambda v: v / 2, "input"))
# log_softmax.
FAULTS.add("logarithm of softmax", "softmax", "other function; axis offset, wrong statistics",
    result(lambda v: v.clamp(min=1e-30).log()))
# The division by the sum is lost in a fusion.
FAULTS.add("exponentials not normalised", "softmax",
    "other function, missing reduction, missing operand; axis scale",
    on(lambda call: (call.tensor(0, "input"),),
        lambda call, value:
            call.instead((value - value.amax(call.get(1, "dim", default=-1), keepdim=True)).exp())))
# Computed in float16 and cast back.
FAULTS.add("softmax in half", "softmax log_softmax", "precision",
    on(lambda call: (call.tensor(0, "input"),),
        lambda call, value: call.instead(call.put(0, value.half(), "input").result()),
        where=lambda value: bool((value.abs() < 60000.0).all())))
# The values as they came.
FAULTS.add("mask forgotten", "masked_fill", "mask, missing operand, copy",
    lambda call: call.instead(call.tensor(0).clone()))
# 0 where a large negative number was given.
FAULTS.add("filled with zero", "masked_fill", "wrong argument, mask; constant, zeros, offset",
    lambda call: call.put(2, 0.0, "value").run())
# fmt: on
