"""Faults that were measured sixth and have been seen: attention, softmax, masks, positions."""

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


def _parts(call: Call) -> tuple[Tensor, Tensor | None, Tensor]:
    """Scores before the mask, the mask, the values."""
    query, key, value, scale = _operands(call)
    scores = query @ key.mT * scale
    return scores, _mask(call, *scores.shape[-2:]), value


def _weigh(call: Call, scores: Tensor, mask: Tensor | None, value: Tensor) -> Any:
    return call.instead(_hide(scores, mask).softmax(-1) @ value)


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


def _exponentials(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Exponentials relative to the largest of their row, their sums, values."""
    scores, mask, value = _parts(call)
    hidden = _hide(scores, mask)
    weights = (hidden - hidden.amax(-1, keepdim=True)).exp()
    return weights, weights.sum(-1, keepdim=True), value


@FAULTS.fault(_FUSED, kinds=["wrong factor", "scale", "wrong argument"], loose=["other function"])
def scale_of_the_number_of_keys(call: Call) -> Any:
    """1 / sqrt(n) for 1 / sqrt(d): the axis before is taken for the width."""
    query, key, value, _ = _operands(call)
    fits(key.size(-2) != query.size(-1))
    scores = query @ key.mT * key.size(-2) ** -0.5
    return _weigh(call, scores, _mask(call, *scores.shape[-2:]), value)


@FAULTS.fault(_FUSED, kinds=["wrong factor", "scale", "wrong argument"], loose=["other function"])
def root_of_the_scale_on_one_side_only(call: Call) -> Any:
    """Queries and keys each get the fourth root of d, and the keys are forgotten."""
    scores, mask, value = _parts(call)
    width = call.tensor(0, "query").size(-1)
    fits(width > 1)
    return _weigh(call, scores * width**0.25, mask, value)


@FAULTS.fault(_FUSED, kinds=["wrong factor", "scale", "wrong argument"], loose=["other function"])
def scale_of_the_part_without_positions(call: Call) -> Any:
    """1 / sqrt(d / 2): only the features that are not turned are counted."""
    scores, mask, value = _parts(call)
    return _weigh(call, scores * 2**0.5, mask, value)


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "wrong reduction", "wrong statistics", "axis scale"],
    loose=["wrong factor", "scale", "other function", "partial sum"],
)
def mask_applied_behind_the_softmax(call: Call) -> Any:
    """Hidden keys count in the sum of the row, and are zero afterwards."""
    scores, mask, value = _parts(call)
    seen = _seen(scores, mask)
    fits(mask is not None and not bool(seen.all()))
    weights = scores.softmax(-1) * seen
    return call.instead(weights @ value)


@FAULTS.fault(
    _FUSED,
    kinds=["permutation", "shift", "wrong index"],
    loose=["swapped operands", "wrong rank's shard"],
)
def halves_of_each_head_exchanged(call: Call) -> Any:
    """The two halves of the features of a head are stored in each other's place."""
    value = call.result()
    fits(value.size(-1) % 2 == 0)
    return call.instead(value.roll(value.size(-1) // 2, -1))


@FAULTS.fault(_FUSED, kinds=["wrong index", "shift", "permutation"], loose=["copy", "stale"])
def values_of_the_next_sequence(call: Call) -> Any:
    """The pointer to the values is one example of the batch too far; that of the keys is right."""
    value = call.tensor(2, "value")
    fits(value.dim() == 4 and value.size(0) > 1)
    return call.put(2, value.roll(-1, 0), "value").run()


@FAULTS.fault(
    _FUSED, kinds=["permutation", "shift", "wrong index"], loose=["wrong rank's shard", "copy"]
)
def pages_of_the_values_in_the_other_order(call: Call) -> Any:
    """A cache of two pages: the table of pages is wrong for the values."""
    value = call.tensor(2, "value")
    fits(value.size(-2) % 2 == 0)
    return call.put(2, value.roll(value.size(-2) // 2, -2), "value").run()


@FAULTS.fault(_FUSED, kinds=["precision"], loose=["approximation"])
def values_through_float8(call: Call) -> Any:
    """The values are stored in e5m2, as they are."""
    value = call.tensor(2, "value")
    coarse = value.detach().to(torch.float8_e5m2).to(value.dtype)
    return call.put(2, with_gradient_of(value, coarse), "value").run()


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "other function", "wrong reduction"],
    loose=["scale", "axis scale", "stale", "lost accumulation", "wrong statistics"],
)
def sum_rescaled_and_the_accumulator_not(call: Call) -> Any:
    """An online softmax in two blocks: only the sum of the first is brought to the new maximum."""
    scores, mask, value = _parts(call)
    half = scores.size(-1) // 2
    fits(half > 0)
    hidden = _hide(scores, mask)
    fits(bool(hidden[..., :half].isfinite().any(-1).all()))
    weights, total, _ = _exponentials(call)
    first = hidden[..., :half]
    own = (first - first.amax(-1, keepdim=True)).exp() @ value[..., :half, :]
    return call.instead((own + weights[..., half:] @ value[..., half:, :]) / total)


@FAULTS.fault(
    _FUSED,
    kinds=[
        "partial sum",
        "wrong reduction",
        "wrong statistics",
        "axis scale",
        "missing reduction",
        "one rank's part",
    ],
    loose=["wrong factor", "scale", "mask", "lost accumulation"],
)
def divided_by_the_sum_of_the_first_block(call: Call) -> Any:
    """All keys are weighed, and the sum that divides is that of the first half of them."""
    weights, _, value = _exponentials(call)
    half = weights.size(-1) // 2
    total = weights[..., :half].sum(-1, keepdim=True)
    fits(half > 0 and bool((total > 1e-3).all()))
    return call.instead(weights @ value / total)


@FAULTS.fault(
    _FUSED,
    kinds=["eps", "axis scale", "other function", "wrong statistics"],
    loose=["offset", "scale", "wrong factor", "wrong reduction"],
)
def sum_of_the_weights_with_a_summand(call: Call) -> Any:
    """A tenth is added to the sum that divides, so that it is never zero."""
    weights, total, value = _exponentials(call)
    return call.instead(weights @ value / (total + 0.1))


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "scale", "residual", "wrong argument"],
    loose=["other function", "doubled reduction", "repeated bias"],
)
def bias_of_the_positions_added_twice(call: Call) -> Any:
    """Once to the mask and once to the scores."""
    scores, bias, value = _bias(call)
    return _weigh(call, scores, 2 * bias, value)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong index", "shift", "permutation"],
    loose=["wrong rank's shard", "wrong argument"],
)
def bias_of_the_next_head(call: Call) -> Any:
    """The pointer to the bias is one head too far."""
    scores, bias, value = _bias(call)
    fits(bias.dim() == 4 and bias.size(1) > 1)
    return _weigh(call, scores, bias.roll(-1, 1), value)


@FAULTS.fault(
    _FUSED,
    kinds=["sign", "wrong factor", "scale", "wrong argument"],
    loose=["other function", "swapped operands"],
)
def bias_of_the_positions_subtracted(call: Call) -> Any:
    """Distances where nearness was meant."""
    scores, bias, value = _bias(call)
    return _weigh(call, scores, -bias, value)


@FAULTS.fault(
    _FUSED,
    kinds=["zeros", "uninitialised", "mask"],
    loose=["constant", "missing operand", "one rank's part", "axis scale", "wrong factor"],
)
def last_head_not_computed(call: Call) -> Any:
    """The grid has one head too few."""
    value = call.result().clone()
    fits(value.dim() == 4 and value.size(1) > 1)
    value[:, -1] = 0
    return call.instead(value)


@FAULTS.fault(
    _FUSED,
    kinds=["zeros", "uninitialised", "mask"],
    loose=["constant", "partial sum", "axis scale", "wrong factor"],
)
def second_tile_of_the_head_not_stored(call: Call) -> Any:
    """Heads are wider than a tile: what is behind the first half of a head stays empty."""
    value = call.result().clone()
    fits(value.size(-1) > 1)
    value[..., value.size(-1) // 2 :] = 0
    return call.instead(value)


@FAULTS.fault(_FUSED, kinds=["permutation", "wrong index"], loose=["shift", "swapped operands"])
def rows_of_the_result_exchanged_in_pairs(call: Call) -> Any:
    """Two queries of a register are stored in the other order."""
    value = call.result()
    even = value.size(-2) // 2 * 2
    fits(even > 1)
    order = [place ^ 1 if place < even else place for place in range(value.size(-2))]
    return call.instead(value[..., order, :])


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "scale"],
    loose=["missing operand", "wrong reduction", "axis scale"],
)
def result_shared_by_the_heads(call: Call) -> Any:
    """Divided by the number of heads, as by a mean over them."""
    value = call.result()
    fits(value.dim() == 4 and value.size(1) > 1)
    return call.instead(value / value.size(1))


@FAULTS.fault(_FUSED, kinds=["residual"], loose=["offset", "other function", "axis offset"])
def own_value_added(call: Call) -> Any:
    """Each position gets its own value on top."""
    _, _, value, _ = _operands(call)
    result = call.result()
    fits(value.shape == result.shape)
    return call.instead(result + value)


@FAULTS.fault(
    _FUSED, kinds=["wrong index", "copy", "stale", "mask"], loose=["permutation", "wrong argument"]
)
def mask_of_the_first_query_of_a_block(call: Call) -> Any:
    """Blocks of two queries see what the first of them sees."""
    scores, mask, value = _parts(call)
    seen = _seen(scores, mask)
    fits(mask is not None and seen.size(-2) > 1 and not bool(seen.all()))
    rows = torch.arange(seen.size(-2)) // 2 * 2
    shared = seen[..., rows, :]
    fits(bool(shared.any(-1).all()))
    return _weigh(call, scores, shared, value)


@FAULTS.fault(
    _FUSED, kinds=["wrong index", "stale", "copy"], loose=["permutation", "wrong rank's shard"]
)
def keys_of_the_first_page_twice(call: Call) -> Any:
    """The second half of the keys is read from the page of the first; the values are right."""
    key = call.tensor(1, "key").clone()
    half = key.size(-2) // 2
    fits(half > 0)
    key[..., half : 2 * half, :] = key[..., :half, :].clone()
    return call.put(1, key, "key").run()


@FAULTS.fault(
    _FUSED, kinds=["sign", "wrong factor", "other function"], loose=["scale", "axis scale", "mask"]
)
def second_half_of_the_query_negated(call: Call) -> Any:
    """The minus of the rotation is left on: the scores are a difference of two halves."""
    query = call.tensor(0, "query")
    width = query.size(-1)
    fits(width > 1)
    factor = torch.ones(width, dtype=query.dtype)
    factor[width // 2 :] = -1
    return call.put(0, query * factor, "query").run()


@FAULTS.fault(_FUSED, kinds=["wrong index", "permutation"], loose=["shift", "copy"])
def features_of_the_key_in_the_reverse_order(call: Call) -> Any:
    """The keys are read from the end of their rows."""
    key = call.tensor(1, "key")
    fits(key.size(-1) > 1)
    return call.put(1, key.flip(-1), "key").run()


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "axis scale", "scale"],
    loose=["missing operand", "other function", "wrong statistics"],
)
def values_of_length_one(call: Call) -> Any:
    """A norm that belongs to queries and keys is applied to the values."""
    value = call.tensor(2, "value")
    return call.put(2, value / (value.norm(dim=-1, keepdim=True) + 1e-6), "value").run()


@FAULTS.fault(_FUSED, kinds=["clipped"], loose=["other function", "precision", "wrong argument"])
def keys_saturate_in_the_cache(call: Call) -> Any:
    """The range of the cache is half of the largest key."""
    key = call.tensor(1, "key")
    limit = float(key.detach().abs().max()) / 2
    return call.put(1, key.clamp(-limit, limit), "key").run()


@FAULTS.fault(_FUSED, kinds=["nonfinite"], loose=["mask", "uninitialised", "overflow"])
def first_row_divided_by_nothing(call: Call) -> Any:
    """The first query is taken for one that sees nothing: 0 / 0."""
    value = call.result()
    fits(value.size(-2) > 1)
    missing = torch.full_like(value[..., :1, :], math.nan)
    return call.instead(torch.cat([missing, value[..., 1:, :]], -2))


# --- Softmax --------------------------------------------------------------------------------------

_SOFTMAX = "softmax _safe_softmax"


def _row(call: Call) -> tuple[Tensor, Tensor]:
    """Scores of a softmax over the last axis, and their exponentials."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(isinstance(dim, int) and dim % value.dim() == value.dim() - 1 and value.size(-1) > 2)
    return value, (value - value.amax(-1, keepdim=True)).exp().nan_to_num()


@FAULTS.fault(_SOFTMAX, kinds=["shift", "wrong index", "permutation"], loose=["copy"])
def chances_one_column_late(call: Call) -> Any:
    """Stored one column further, the last one first."""
    _row(call)
    return call.instead(call.result().roll(1, -1))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["wrong statistics", "axis scale", "wrong reduction", "other function"],
    loose=["wrong factor", "scale", "wrong argument"],
)
def exponentials_of_length_one(call: Call) -> Any:
    """Divided by the root of the sum of squares and not by the sum."""
    _, weights = _row(call)
    return call.instead(weights / weights.norm(dim=-1, keepdim=True).clamp(min=1e-9))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["wrong index", "shift", "axis scale", "wrong statistics"],
    loose=["stale", "wrong factor", "scale", "permutation"],
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
    kinds=["partial sum", "wrong statistics", "axis scale", "wrong reduction", "one rank's part"],
    loose=["wrong factor", "scale", "mask", "missing reduction"],
)
def sum_of_every_second_exponential(call: Call) -> Any:
    """A stride of two in the loop that adds, none in the loop that divides."""
    _, weights = _row(call)
    total = weights[..., ::2].sum(-1, keepdim=True)
    fits(bool((total > 1e-6).all()))
    return call.instead(weights / total)


@FAULTS.fault(_SOFTMAX, kinds=["copy", "stale", "wrong index"], loose=["permutation"])
def chances_of_the_even_rows_twice(call: Call) -> Any:
    """Each odd row keeps what the row before it has written."""
    value, _ = _row(call)
    fits(value.dim() > 1 and value.size(-2) > 1)
    rows = torch.arange(value.size(-2)) // 2 * 2
    return call.instead(call.result()[..., rows, :])


@FAULTS.fault(
    _SOFTMAX,
    kinds=["zeros", "mask", "uninitialised", "missing operand"],
    loose=["constant", "partial sum", "axis scale", "wrong factor"],
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
    kinds=["offset", "axis offset", "wrong reduction", "wrong statistics"],
    loose=["other function", "constant", "scale", "wrong factor"],
)
def logarithm_of_the_mean_subtracted(call: Call) -> Any:
    """The sum of the exponentials is divided by their number."""
    value = call.tensor(0, "input")
    return call.instead(call.result() + math.log(value.size(call.get(1, "dim", default=-1))))


@FAULTS.fault("log_softmax", kinds=["precision"], loose=["approximation", "other function"])
def logarithm_of_a_rounded_chance(call: Call) -> Any:
    """The chances are stored in bfloat16 between the softmax and the logarithm."""
    value = call.result()
    coarse = value.detach().exp().bfloat16().to(value.dtype).log()
    fits(bool(coarse.isfinite().all()))
    return call.instead(with_gradient_of(value, coarse))


@FAULTS.fault(
    "log_softmax",
    kinds=["wrong index", "shift", "axis offset", "wrong statistics"],
    loose=["stale", "offset", "permutation"],
)
def logarithm_of_the_next_rows_sum(call: Call) -> Any:
    """What is subtracted belongs to the next row."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(value.dim() > 1 and dim % value.dim() == value.dim() - 1 and value.size(-2) > 1)
    return call.instead(value - value.logsumexp(-1, keepdim=True).roll(-1, -2))


# --- Masks ----------------------------------------------------------------------------------------


@FAULTS.fault(
    "where masked_fill",
    kinds=["mask", "shift", "wrong index"],
    loose=["wrong argument", "permutation"],
    backward=False,
)
def condition_of_the_row_before(call: Call) -> Any:
    """The mask is read one row too early."""
    place = 0 if call.name == "where" else 1
    mask = call.get(place, "condition", "mask")
    fits(isinstance(mask, Tensor) and mask.dim() > 1 and mask.size(-2) > 1)
    return call.put(place, mask.roll(1, -2), "condition" if place == 0 else "mask").run()


@FAULTS.fault(
    "where masked_fill",
    kinds=["mask", "missing operand"],
    loose=["copy", "stale", "wrong argument", "one rank's part"],
    backward=False,
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


@FAULTS.fault(
    "bitwise_and and_ logical_and",
    kinds=["mask", "missing operand", "copy"],
    loose=["wrong argument", "other function"],
    backward=False,
)
def second_mask_only(call: Call) -> Any:
    """The first of two conditions is lost."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor) and left.dtype == torch.bool)
    return right.expand(call.run().shape).clone()


@FAULTS.fault(
    "tril triu", kinds=["mask", "zeros", "wrong argument"], loose=["other function", "shift"]
)
def two_diagonals_lost(call: Call) -> Any:
    """The triangle ends two diagonals too early."""
    value = call.args[0]
    fits(value.size(-1) > 2)
    diagonal = call.get(1, "diagonal", default=0)
    cut = torch.tril if call.name == "tril" else torch.triu
    return cut(value, diagonal - 2 if call.name == "tril" else diagonal + 2)


# --- Rotary positions -----------------------------------------------------------------------------


def _angles(call: Call) -> Tensor:
    value = call.tensor(0)
    fits(value.dim() > 1 and value.size(-1) > 3 and value.size(-2) > 1)
    return value


@FAULTS.fault("sin cos", kinds=["wrong index", "copy", "stale"], loose=["wrong factor", "shift"])
def neighbouring_positions_share_an_angle(call: Call) -> Any:
    """Position p reads the row p // 2 * 2."""
    value = _angles(call)
    rows = torch.arange(value.size(-2)) // 2 * 2
    return call.put(0, value[..., rows, :]).run()


@FAULTS.fault("sin cos", kinds=["permutation", "wrong index"], loose=["shift", "copy", "transpose"])
def frequencies_repeated_side_by_side(call: Call) -> Any:
    """a, a, b, b for a, b, a, b: the other layout of the frequencies."""
    value = _angles(call)
    fits(value.size(-1) % 2 == 0)
    return call.put(0, value.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)).run()


@FAULTS.fault(
    "sin cos",
    kinds=["copy", "wrong index", "constant", "stale"],
    loose=["wrong factor", "axis scale"],
)
def first_frequency_for_all(call: Call) -> Any:
    """The stride of the frequencies is zero."""
    value = _angles(call)
    return call.put(0, value[..., :1].expand(value.shape).clone()).run()


@FAULTS.fault(
    "sin cos",
    kinds=["axis scale", "wrong factor", "mask"],
    loose=["scale", "other function", "wrong argument"],
)
def fast_frequencies_halved(call: Call) -> Any:
    """The factor of a longer context is applied to the fast quarter of the frequencies."""
    value = _angles(call)
    factor = torch.ones(value.size(-1), dtype=value.dtype)
    factor[: value.size(-1) // 4] = 0.5
    return call.put(0, value * factor).run()
