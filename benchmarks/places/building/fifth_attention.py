"""Faults that were measured fifth and have been seen: attention, softmax, masks, positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor

FAULTS = Catalogue()
_FUSED = "scaled_dot_product_attention flash_attention"


# --- Attention ------------------------------------------------------------------------------------


def _operands(call: Call) -> tuple[Tensor, Tensor, Tensor, float]:
    """Query, key and value with the same number of heads, and what multiplies the scores."""
    query, key, value = (call.tensor(i, n) for i, n in enumerate(("query", "key", "value")))
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


def _weigh(call: Call, scores: Tensor, mask: Tensor | None, value: Tensor) -> Any:
    return call.instead(_hide(scores, mask).softmax(-1) @ value)


def _parts(call: Call) -> tuple[Tensor, Tensor | None, Tensor]:
    """Scores before the mask, the mask, the values."""
    query, key, value, scale = _operands(call)
    scores = query @ key.mT * scale
    return scores, _mask(call, *scores.shape[-2:]), value


def _seen(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Which keys are seen, as booleans."""
    if mask is None:
        return torch.ones(scores.shape[-2:], dtype=torch.bool)
    return mask if mask.dtype == torch.bool else mask > -1e4


def _bias(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, what is added to them (finite numbers), values."""
    scores, mask, value = _parts(call)
    fits(mask is not None and mask.is_floating_point())
    assert mask is not None
    fits(bool((mask.detach().abs() < 1e3).all()) and bool(mask.detach().any()))
    return scores, mask, value


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "other function"],
    loose=["scale", "axis scale", "wrong argument"],
)
def scale_applied_behind_the_softmax(call: Call) -> Any:
    """The factor of the scores multiplies the result instead."""
    query, key, value, scale = _operands(call)
    scores = query @ key.mT
    weights = _hide(scores, _mask(call, *scores.shape[-2:])).softmax(-1)
    return call.instead(weights @ value * scale)


@FAULTS.fault(_FUSED, kinds=["wrong factor", "scale", "wrong argument"], loose=["other function"])
def scale_grows_with_the_logarithm_of_the_length(call: Call) -> Any:
    """Scores times log(n) / log(4), for longer contexts than in training."""
    scores, mask, value = _parts(call)
    fits(scores.size(-1) not in {1, 4})
    return _weigh(call, scores * math.log(scores.size(-1)) / math.log(4), mask, value)


@FAULTS.fault(
    _FUSED,
    kinds=["other function", "wrong factor", "axis scale"],
    loose=["scale", "wrong argument", "wrong statistics"],
)
def queries_normalised_first(call: Call) -> Any:
    """A norm of the queries that belongs to another model."""
    query = call.tensor(0, "query")
    length = query.square().mean(-1, keepdim=True).sqrt()
    return call.put(0, query / (length + 1e-6), "query").run()


@FAULTS.fault(
    _FUSED, kinds=["missing operand", "axis offset", "offset"], loose=["residual", "wrong argument"]
)
def mean_value_not_added_back(call: Call) -> Any:
    """Values are centred for a narrow format, and their mean is not restored."""
    value = call.tensor(2, "value")
    return call.put(2, value - value.mean(-2, keepdim=True), "value").run()


@FAULTS.fault(
    _FUSED, kinds=["wrong rank's shard", "permutation", "shift", "wrong index"],
    loose=["swapped operands"],
)  # fmt: skip
def heads_of_two_ranks_gathered_in_the_wrong_order(call: Call) -> Any:
    """The second half of the heads comes first."""
    value = call.result()
    fits(value.dim() == 4 and value.size(1) % 2 == 0)
    return call.instead(value.roll(value.size(1) // 2, 1))


@FAULTS.fault(_FUSED, kinds=["stale", "copy", "wrong index"], loose=["permutation", "shift"])
def tile_of_queries_not_loaded_again(call: Call) -> Any:
    """The second half of the positions asks with the queries of the first."""
    query = call.tensor(0, "query").clone()
    half = query.size(-2) // 2
    fits(half > 0)
    query[..., half : 2 * half, :] = query[..., :half, :].clone()
    return call.put(0, query, "query").run()


@FAULTS.fault(
    _FUSED, kinds=["mask", "partial sum", "wrong index"],
    loose=["wrong argument", "off by one reduction", "missing operand"],
)  # fmt: skip
def every_second_key_skipped(call: Call) -> Any:
    """A stride of two in the loop over the keys."""
    scores, mask, value = _parts(call)
    fits(scores.size(-1) > 3)
    even = (torch.arange(scores.size(-1)) % 2 == 0).expand(scores.shape[-2:])
    return _weigh(call, scores.masked_fill(~even, -math.inf), mask, value)


@FAULTS.fault(
    _FUSED, kinds=["permutation", "wrong index"], loose=["shift", "copy", "swapped operands"]
)
def last_two_keys_exchanged(call: Call) -> Any:
    """Two tokens are accepted at once, and their keys are written in the other order."""
    key = call.tensor(1, "key")
    fits(key.size(-2) > 2)
    order = [*range(key.size(-2) - 2), key.size(-2) - 1, key.size(-2) - 2]
    return call.put(1, key[..., order, :], "key").run()


@FAULTS.fault(_FUSED, kinds=["precision"], loose=["approximation"])
def weights_in_steps_of_a_127th(call: Call) -> Any:
    """What multiplies the values is an integer of eight bits."""
    scores, mask, value = _parts(call)
    weights = _hide(scores, mask).softmax(-1)
    coarse = with_gradient_of(weights, (weights.detach() * 127).round() / 127)
    return call.instead(coarse @ value)


@FAULTS.fault(_FUSED, kinds=["wrong factor", "scale", "wrong argument"],
              loose=["missing operand", "other function"])  # fmt: skip
def scale_of_the_cached_keys_forgotten(call: Call) -> Any:
    """Keys are stored divided by their largest value, and read as they are stored."""
    key = call.tensor(1, "key")
    return call.put(1, key / key.detach().abs().max(), "key").run()


@FAULTS.fault(_FUSED, kinds=["axis scale", "wrong factor", "scale", "missing operand"],
              loose=["wrong argument"])  # fmt: skip
def scale_of_the_values_of_each_head_forgotten(call: Call) -> Any:
    """Values are stored divided by the largest of their head, and not multiplied by it."""
    value = call.tensor(2, "value")
    fits(value.dim() == 4 and value.size(1) > 1)
    return call.put(2, value / value.detach().abs().amax((-1, -2), keepdim=True), "value").run()


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "partial sum"],
    loose=["wrong argument", "missing operand", "wrong index"],
)
def attention_within_chunks_of_four(call: Call) -> Any:
    """Tokens see those of their own chunk only, as some layers of another model."""
    scores, mask, value = _parts(call)
    fits(scores.size(-1) == scores.size(-2) > 4)
    chunk = torch.arange(scores.size(-1)) // 4
    other = chunk[:, None] != chunk[None, :]
    return _weigh(call, scores.masked_fill(other, -math.inf), mask, value)


@FAULTS.fault(_FUSED, kinds=["mask"], loose=["wrong argument", "missing operand"])
def prefix_is_seen_from_everywhere(call: Call) -> Any:
    """The first half of the tokens is taken for a prompt, which is not causal."""
    scores, mask, value = _parts(call)
    fits(mask is not None and mask.dtype == torch.bool and scores.size(-1) > 3)
    prefix = torch.arange(scores.size(-1)) < scores.size(-1) // 2
    return _weigh(call, scores, mask | prefix, value)


@FAULTS.fault(_FUSED, kinds=["mask"], loose=["wrong argument", "missing operand", "wrong index"])
def first_token_never_leaves_the_window(call: Call) -> Any:
    """A window that keeps the first key as a sink."""
    scores, mask, value = _parts(call)
    seen = _seen(scores, mask)
    fits(mask is not None and not bool(seen[..., 0].all()))
    kept = seen.clone()
    kept[..., 0] = True
    return _weigh(call, scores, kept, value)


@FAULTS.fault(_FUSED, kinds=["mask", "missing operand"], loose=["wrong argument"])
def last_query_sees_all(call: Call) -> Any:
    """The newest token goes through the kernel for decoding, which knows no window."""
    scores, mask, value = _parts(call)
    seen = _seen(scores, mask)
    fits(mask is not None and not bool(seen[..., -1, :].all()))
    open_ = seen.clone()
    open_[..., -1, :] = True
    return _weigh(call, scores, open_, value)


@FAULTS.fault(_FUSED, kinds=["wrong factor", "scale", "wrong argument"], loose=["other function"])
def bias_of_the_positions_scaled_too(call: Call) -> Any:
    """The bias is added before the factor of the scores is applied."""
    scores, bias, value = _bias(call)
    return _weigh(call, scores, bias * _operands(call)[3], value)


@FAULTS.fault(_FUSED, kinds=["transpose", "wrong index", "permutation"], loose=["wrong argument"])
def bias_of_the_positions_transposed(call: Call) -> Any:
    """The distance from key to query for that from query to key."""
    scores, bias, value = _bias(call)
    fits(bias.size(-1) == bias.size(-2))
    return _weigh(call, scores, bias.mT, value)


@FAULTS.fault(
    _FUSED, kinds=["copy", "wrong index", "stale"], loose=["wrong argument", "permutation"]
)
def bias_of_the_first_head_for_all(call: Call) -> Any:
    """The stride of the heads of the bias is zero."""
    scores, bias, value = _bias(call)
    fits(bias.dim() == 4 and bias.size(1) > 1)
    return _weigh(call, scores, bias[:, :1], value)


# --- Softmax --------------------------------------------------------------------------------------


@FAULTS.fault(
    "softmax _safe_softmax", kinds=["mask", "zeros", "other function", "partial sum"],
    loose=["wrong argument", "clipped"],
)  # fmt: skip
def lower_half_of_the_scores_dropped(call: Call) -> Any:
    """A filter for sampling is left on: scores below the median of their row get no chance."""
    value = call.tensor(0, "input")
    fits(value.size(-1) > 3)
    low = value < value.median(-1, keepdim=True)[0]
    return call.instead(value.masked_fill(low, -math.inf).softmax(-1))


@FAULTS.fault("softmax _safe_softmax", kinds=["precision"],
              loose=["approximation", "axis scale", "scale"])  # fmt: skip
def normaliser_kept_in_bfloat16(call: Call) -> Any:
    """The sum of the exponentials is rounded before it divides."""
    value = call.tensor(0, "input")
    weight = (value - value.amax(-1, keepdim=True)).exp()
    total = weight.sum(-1, keepdim=True)
    coarse = total.detach().bfloat16().to(total.dtype)
    return call.instead((weight / with_gradient_of(total, coarse)).nan_to_num())


@FAULTS.fault(
    "softmax _safe_softmax log_softmax",
    kinds=[
        "partial sum",
        "wrong reduction",
        "missing reduction",
        "wrong statistics",
        "one rank's part",
        "axis scale",
        "axis offset",
    ],
    loose=["scale", "wrong factor", "offset", "mask", "wrong argument"],
)
def each_half_of_the_row_normalised_alone(call: Call) -> Any:
    """Two ranks share a row, and their sums are not added."""
    value = call.tensor(0, "input")
    fits(value.size(-1) % 2 == 0)
    halves = value.unflatten(-1, (2, -1))
    both = halves.log_softmax(-1) if call.name == "log_softmax" else halves.softmax(-1)
    return call.instead(both.flatten(-2).nan_to_num())


@FAULTS.fault("log_softmax", kinds=["sign", "wrong factor", "scale"], loose=["other function"])
def chances_as_positive_costs(call: Call) -> Any:
    """The opposite of the logarithm."""
    return call.instead(-call.result())


@FAULTS.fault(
    "softmax _safe_softmax",
    kinds=["copy", "stale", "missing operand", "mask"],
    loose=["partial sum", "other function", "uninitialised"],
)
def tail_of_the_row_keeps_its_scores(call: Call) -> Any:
    """In place and by whole vectors: the last two columns stay as they came."""
    value, result = call.tensor(0, "input"), call.result()
    fits(value.size(-1) > 4 and bool((value.detach().abs() < 1e3).all()))
    return call.instead(torch.cat([result[..., :-2], value[..., -2:]], -1))


@FAULTS.fault("softmin", kinds=["sign", "other function", "wrong factor"], loose=["scale"])
def softmin_without_its_minus(call: Call) -> Any:
    """Softmax."""
    return call.instead(call.tensor(0, "input").softmax(-1))


# --- Masks ----------------------------------------------------------------------------------------


@FAULTS.fault("tril triu", kinds=["mask", "zeros"], loose=["wrong argument", "other function"])
def triangle_becomes_a_band(call: Call) -> Any:
    """Only the diagonal and its neighbour are kept, as of a window of two."""
    result = call.run()
    fits(result.size(-1) > 3)
    return torch.tril(torch.triu(result, -1), 1)


@FAULTS.fault("eq ne", kinds=["other function", "mask", "sign"], loose=["wrong argument"],
              backward=False)  # fmt: skip
def equality_inverted(call: Call) -> Any:
    """Eq for ne, and ne for eq."""
    return ~call.run()


@FAULTS.fault("le ge lt gt", kinds=["mask", "wrong argument", "missing operand", "constant"],
              loose=["other function", "zeros"], backward=False)  # fmt: skip
def compared_with_zero(call: Call) -> Any:
    """The second operand is not loaded."""
    other = call.args[1]
    nothing = torch.zeros_like(other) if isinstance(other, Tensor) else 0
    return call.put(1, nothing).run()


@FAULTS.fault("where masked_fill", kinds=["mask", "missing operand"],
              loose=["wrong argument", "wrong index", "copy", "one rank's part"],
              backward=False)  # fmt: skip
def mask_of_the_first_half_of_the_columns_only(call: Call) -> Any:
    """The mask is as long as one shard; behind it, nothing is hidden."""
    place = 0 if call.name == "where" else 1
    mask = call.get(place, "condition", "mask")
    fits(isinstance(mask, Tensor) and mask.dim() > 0 and mask.size(-1) > 3)
    kept = mask.clone()
    kept[..., mask.size(-1) // 2 :] = call.name == "where"
    return call.put(place, kept, "condition" if place == 0 else "mask").run()


# --- Rotary positions -----------------------------------------------------------------------------


def _angles(call: Call) -> Tensor:
    value = call.tensor(0)
    fits(value.dim() > 1 and value.size(-1) > 3 and value.size(-2) > 1)
    return value


@FAULTS.fault("sin cos", kinds=["mask", "constant", "zeros", "wrong factor", "axis scale"],
              loose=["scale", "missing operand", "other function"])  # fmt: skip
def upper_half_of_the_features_not_turned(call: Call) -> Any:
    """Positions turn a part of each head, as in another model: the other angles are zero."""
    value = _angles(call).clone()
    value[..., value.size(-1) // 2 :] = 0
    return call.put(0, value).run()


@FAULTS.fault(
    "sin cos", kinds=["wrong factor", "scale", "wrong argument"], loose=["other function"]
)
def positions_in_steps_of_a_quarter(call: Call) -> Any:
    """All angles divided by four: the factor of a longer context is applied to a short one."""
    return call.put(0, _angles(call) / 4).run()
