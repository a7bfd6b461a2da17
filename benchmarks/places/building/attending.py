"""Faults for building: attention, softmax and masks."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


@FAULTS.fault("softmax log_softmax", kinds=["wrong axis"], loose=["wrong argument"])
def softmax_over_the_axis_before(call: Call) -> Any:
    """The last but one axis."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(value.dim() >= 2)
    return call.put(1, (dim % value.dim()) - 1, "dim").run()


@FAULTS.fault(
    "scaled_dot_product_attention flash_attention",
    kinds=["scale", "wrong factor"],
    loose=["wrong argument"],
)
def attention_not_scaled(call: Call) -> Any:
    """The factor of the scores is 1."""
    return _attention(call, scale=1.0)


@FAULTS.fault(
    "scaled_dot_product_attention flash_attention masked_fill where",
    kinds=["mask", "causality"],
    loose=["shift"],
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


@FAULTS.fault("scaled_dot_product_attention flash_attention", kinds=["mask", "causality"])
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


@FAULTS.fault(
    "scaled_dot_product_attention flash_attention", kinds=["mask"], loose=["missing operand"]
)
def padding_is_attended_to(call: Call) -> Any:
    """The mask is not applied."""
    return _attend(call, unmasked=True)


@FAULTS.fault(
    "scaled_dot_product_attention flash_attention",
    kinds=["partial sum", "tail", "off by one reduction", "mask"],
)
def last_key_left_out(call: Call) -> Any:
    """The loop over the keys ends one too early."""
    return _attend(call, columns=slice(None, -1))


@FAULTS.fault(
    "softmax",
    kinds=["off by one reduction", "mask", "partial sum", "tail"],
    loose=["wrong reduction"],
)
def sum_of_softmax_without_one_column(call: Call) -> Any:
    """The denominator lacks the last exponential."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(value.size(dim) > 2)
    exps = (value - value.amax(dim, keepdim=True)).exp()
    return call.instead(exps / exps.narrow(dim, 0, value.size(dim) - 1).sum(dim, keepdim=True))


@FAULTS.fault("tril triu", kinds=["mask", "causality"], loose=["shift", "wrong argument"])
def diagonal_one_off(call: Call) -> Any:
    """One more diagonal."""
    return call.put(1, call.get(1, "diagonal", default=0) + 1, "diagonal").run()


@FAULTS.fault("le ge lt gt", kinds=["mask", "causality", "tie-breaking", "other function"])
def comparison_with_or_without_equality(call: Call) -> Any:
    """< instead of <=."""
    other = {"le": "lt", "lt": "le", "ge": "gt", "gt": "ge"}[call.name]
    fits(isinstance(call.args[0], Tensor))
    return getattr(torch, other)(*call.args)


@FAULTS.fault("masked_fill where", kinds=["mask"])
def mask_read_from_the_other_end(call: Call) -> Any:
    """The mask is reversed along its last axis."""
    place = 0 if call.name == "where" else 1
    mask = call.args[place]
    return call.put(place, mask.flip(-1)).run()
