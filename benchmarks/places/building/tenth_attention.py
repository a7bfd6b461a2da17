"""Faults of the tenth set: attention, softmax, masks, positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_FUSED = "scaled_dot_product_attention flash_attention"
_NAMES = ("query", "key", "value")


# --- Attention ------------------------------------------------------------------------------------


def _operands(call: Call) -> tuple[Tensor, Tensor, Tensor, float]:
    """Query, key and value with the same number of heads, and the factor of the scores."""
    query, key, value = (call.tensor(i, n) for i, n in enumerate(_NAMES))
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


def _hidden(call: Call) -> tuple[Tensor, Tensor]:
    """Scores with the mask, and values."""
    scores, mask, value = _parts(call)
    return _hide(scores, mask).clamp(min=-1e30), value


def _weigh(call: Call, scores: Tensor, mask: Tensor | None, value: Tensor) -> Any:
    return call.instead(_hide(scores, mask).softmax(-1).nan_to_num(0) @ value)


def _seen(mask: Tensor) -> Tensor:
    """Which keys are seen, as booleans."""
    return mask if mask.dtype == torch.bool else mask > -1e4


def _scaled(call: Call, scale: float) -> Any:
    """Attention with another factor of the scores."""
    query, key, value, _ = _operands(call)
    scores = query @ key.mT * scale
    return _weigh(call, scores, _mask(call, *scores.shape[-2:]), value)


def _heads(call: Call, least: int = 2) -> Tensor:
    """The result, with several heads."""
    value = call.result()
    fits(value.dim() == 4 and value.size(1) >= least)
    return value


def _with(call: Call, place: int, value: Tensor) -> Any:
    """The call with another query, key or value."""
    return call.instead(call.put(place, value, _NAMES[place]).result())


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "scale", "wrong argument"],
    loose=["axis scale", "other function"],
)
def factor_written_for_heads_of_128(call: Call) -> Any:
    """The factor of the scores is the number 128 ** -0.5, whatever the width of a head is."""
    fits(call.tensor(0, "query").size(-1) != 128)
    return _scaled(call, 128**-0.5)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "scale", "wrong argument"],
    loose=["axis scale", "other function", "off by one reduction"],
)
def width_of_the_head_counted_with_one_more(call: Call) -> Any:
    """The factor of the scores is 1 / sqrt(d + 1)."""
    return _scaled(call, (call.tensor(0, "query").size(-1) + 1) ** -0.5)


@FAULTS.fault(
    _FUSED,
    kinds=["sign", "wrong factor", "wrong argument"],
    loose=["scale", "other function", "axis scale"],
)
def scores_with_a_minus(call: Call) -> Any:
    """The factor of the scores has the wrong sign: what is least alike weighs most."""
    scores, mask, value = _parts(call)
    return _weigh(call, -scores, mask, value)


@FAULTS.fault(
    _FUSED,
    kinds=["scale", "wrong factor"],
    loose=["axis scale", "wrong reduction"],
)
def result_averaged_over_two_ranks(call: Call) -> Any:
    """Two ranks each hold the whole result, and a mean with an empty buffer halves it."""
    return call.instead(0.5 * call.result())


@FAULTS.fault(
    _FUSED,
    kinds=["other function"],
    loose=["wrong factor", "wrong reduction", "wrong statistics", "axis scale", "approximation"],
)
def weights_squared(call: Call) -> Any:
    """The weights of the softmax are multiplied with themselves before the values."""
    scores, value = _hidden(call)
    return call.instead(scores.softmax(-1).square() @ value)


@FAULTS.fault(
    _FUSED, kinds=["precision"], loose=["approximation", "other function", "wrong argument"]
)
def values_of_the_cache_in_bfloat16(call: Call) -> Any:
    """The cache of the values has eight bits for each number; the keys are right."""
    value = call.tensor(2, "value")
    return _with(call, 2, with_gradient_of(value, value.detach().bfloat16().to(value.dtype)))


@FAULTS.fault(
    _FUSED, kinds=["precision"], loose=["approximation", "other function", "wrong argument"]
)
def keys_of_the_cache_in_e4m3(call: Call) -> Any:
    """The keys are stored in float8 without a scale; the values are right."""
    key = call.tensor(1, "key")
    coarse = key.detach().to(torch.float8_e4m3fn).to(key.dtype)
    return _with(call, 1, with_gradient_of(key, coarse))


@FAULTS.fault(_FUSED, kinds=["precision"], loose=["approximation", "other function"])
def scores_through_half(call: Call) -> Any:
    """The scores are stored in float16 before the softmax."""
    scores, mask, value = _parts(call)
    coarse = with_gradient_of(scores, scores.detach().half().to(scores.dtype))
    return _weigh(call, coarse, mask, value)


@FAULTS.fault(
    _FUSED,
    kinds=["clipped"],
    loose=["other function", "approximation", "mask", "wrong argument"],
)
def queries_keys_and_values_cut_at_a_half(call: Call) -> Any:
    """The option `clip_qkv` of another model is on, with 0.5."""
    for place in range(3):
        call = call.put(place, call.tensor(place, _NAMES[place]).clamp(-0.5, 0.5), _NAMES[place])
    return call.instead(call.result())


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "copy", "wrong argument"],
    loose=["partial sum", "wrong index", "stale", "missing operand", "other function"],
)
def newest_query_sees_itself_only(call: Call) -> Any:
    """The last position attends with a cache that is empty: it gets its own value."""
    _, _, value, _ = _operands(call)
    right = call.result()
    fits(right.shape == value.shape and value.size(-2) > 1)
    return call.instead(torch.cat([right[..., :-1, :], value[..., -1:, :]], -2))


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "missing operand", "copy", "wrong argument"],
    loose=["partial sum", "other function", "missing reduction"],
)
def every_query_sees_itself_only(call: Call) -> Any:
    """Nothing but the diagonal is left of the mask: the result is the values."""
    _, _, value, _ = _operands(call)
    fits(value.size(-2) > 1)
    return call.instead(value.clone())


@FAULTS.fault(
    _FUSED,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument", "wrong rank's shard", "swapped operands"],
)
def values_of_the_next_head(call: Call) -> Any:
    """The pointer to the values is one head too far; queries and keys are right."""
    value = call.tensor(2, "value")
    fits(value.dim() == 4 and value.size(1) > 1)
    return _with(call, 2, value.roll(-1, 1))


@FAULTS.fault(
    _FUSED,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument", "mask"],
)
def queries_one_token_early(call: Call) -> Any:
    """Each position asks with the query of the next one; the mask is right."""
    query = call.tensor(0, "query")
    fits(query.size(-2) > 2)
    return _with(call, 0, query.roll(-1, -2))


@FAULTS.fault(
    _FUSED,
    kinds=["shift", "wrong index", "permutation"],
    loose=["stale", "copy", "wrong argument", "mask"],
)
def keys_of_the_next_slot(call: Call) -> Any:
    """The cache of the keys is read one slot too far; the values are right."""
    key = call.tensor(1, "key")
    fits(key.size(-2) > 2)
    return _with(call, 1, key.roll(-1, -2))


@FAULTS.fault(
    _FUSED,
    kinds=["permutation", "wrong index"],
    loose=["shift", "swapped operands", "wrong argument"],
)
def values_from_the_last_position(call: Call) -> Any:
    """A cache that grows downwards: the first key meets the last value."""
    value = call.tensor(2, "value")
    fits(value.size(-2) > 1)
    return _with(call, 2, value.flip(-2))


@FAULTS.fault(
    _FUSED,
    kinds=["clipped", "other function"],
    loose=["zeros", "mask", "sign", "wrong argument"],
)
def negative_queries_lost(call: Call) -> Any:
    """A relu is fused into the load of the queries."""
    return _with(call, 0, call.tensor(0, "query").relu())


@FAULTS.fault(
    _FUSED,
    kinds=["sign", "other function"],
    loose=["wrong argument"],
)
def magnitudes_of_the_keys(call: Call) -> Any:
    """The keys are stored as numbers without a sign."""
    return _with(call, 1, call.tensor(1, "key").abs())


@FAULTS.fault(
    _FUSED,
    kinds=["doubled reduction", "wrong factor", "wrong statistics"],
    loose=["scale", "wrong reduction", "mask", "offset", "axis scale", "partial sum"],
)
def first_half_of_the_keys_counted_twice(call: Call) -> Any:
    """The loop over blocks of keys visits the first again, in the sum and above it."""
    scores, value = _hidden(call)
    half = scores.size(-1) // 2
    fits(half > 0)
    twice = (torch.arange(scores.size(-1)) < half) * math.log(2)
    return call.instead((scores + twice).softmax(-1) @ value)


@FAULTS.fault(
    _FUSED,
    kinds=["stale", "wrong statistics", "wrong index", "wrong factor", "axis scale"],
    loose=["scale", "residual", "wrong reduction", "shift"],
)
def sum_of_the_query_before_divides(call: Call) -> Any:
    """The sum of the exponentials is stored after it was used: each query has that before it."""
    scores, value = _hidden(call)
    fits(scores.size(-2) > 1)
    weights = (scores - scores.detach().amax((-2, -1), keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    before = torch.cat([total[..., :1, :], total[..., :-1, :]], -2)
    return call.instead(weights @ value / before)


@FAULTS.fault(
    _FUSED,
    kinds=["other function"],
    loose=["wrong reduction", "wrong statistics", "approximation", "clipped", "zeros"],
)
def rectified_scores_for_exponentials(call: Call) -> Any:
    """Relu(s) / sum relu(s), as in a kernel for integers."""
    scores, value = _hidden(call)
    weights = scores.relu()
    total = weights.sum(-1, keepdim=True)
    return call.instead(weights @ value / (total + 1e-6))


@FAULTS.fault(
    _FUSED,
    kinds=["other function"],
    loose=["offset", "wrong statistics", "residual", "wrong reduction", "wrong argument"],
)
def distance_for_the_product(call: Call) -> Any:
    """The scores are -|q - k|^2 / 2, times the factor, and not the product of both."""
    query, key, value, scale = _operands(call)
    far = query.square().sum(-1, keepdim=True) - 2 * query @ key.mT
    scores = -0.5 * scale * (far + key.square().sum(-1)[..., None, :])
    return _weigh(call, scores, _mask(call, *scores.shape[-2:]), value)


@FAULTS.fault(
    _FUSED,
    kinds=["other function", "axis scale", "wrong factor", "wrong statistics"],
    loose=["scale", "wrong argument", "missing operand"],
)
def cosine_of_query_and_key(call: Call) -> Any:
    """Both are divided by their length, and a factor of ten is taken, as in another model."""
    query, key, value, _ = _operands(call)
    scores = 10 * functional.normalize(query, dim=-1) @ functional.normalize(key, dim=-1).mT
    return _weigh(call, scores, _mask(call, *scores.shape[-2:]), value)


@FAULTS.fault(
    _FUSED,
    kinds=["copy", "wrong index", "stale"],
    loose=["constant", "permutation", "wrong argument", "wrong rank's shard"],
)
def one_head_of_keys_and_values_for_all(call: Call) -> Any:
    """Taken for a model with one head of keys: the stride of the heads is zero."""
    query, key, value, _ = _operands(call)
    fits(key.dim() == 4 and call.tensor(1, "key").size(1) > 1)
    mask = _mask(call, query.size(-2), key.size(-2))
    scores = query @ key[:, :1].mT * (call.kwargs.get("scale") or query.size(-1) ** -0.5)
    return _weigh(call, scores, mask, value[:, :1].expand(value.shape))


@FAULTS.fault(
    _FUSED,
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "partial sum", "axis scale", "wrong factor"],
)
def last_feature_of_each_head_not_stored(call: Call) -> Any:
    """The bound of the store is one feature too small."""
    value = call.result()
    fits(value.size(-1) > 2)
    return call.instead(value * (torch.arange(value.size(-1)) < value.size(-1) - 1))


@FAULTS.fault(
    _FUSED,
    kinds=["copy", "stale", "wrong index"],
    loose=["shift", "permutation", "mask"],
)
def odd_positions_are_those_before(call: Call) -> Any:
    """Two queries share a register: each odd position is stored with the even one's result."""
    value = call.result()
    fits(value.size(-2) > 1)
    return call.instead(value[..., torch.arange(value.size(-2)) // 2 * 2, :])


@FAULTS.fault(
    _FUSED,
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "shift", "wrong rank's shard", "wrong argument"],
)
def result_of_the_first_example_for_all(call: Call) -> Any:
    """The pointers are not moved on along the batch."""
    value = call.result()
    fits(value.dim() == 4 and value.size(0) > 1)
    return call.instead(value[:1].expand(value.shape).contiguous())


@FAULTS.fault(
    _FUSED,
    kinds=["partial sum", "mask", "wrong index"],
    loose=["missing operand", "wrong reduction", "zeros", "lost accumulation", "wrong factor"],
)
def even_features_only_in_the_scores(call: Call) -> Any:
    """The loop over the features of query and key has a stride of two; the factor is right."""
    query = call.tensor(0, "query")
    fits(query.size(-1) > 1)
    return _with(call, 0, query * (torch.arange(query.size(-1)) % 2 == 0))


@FAULTS.fault(
    _FUSED,
    kinds=["permutation", "wrong index", "shift"],
    loose=["swapped operands", "wrong argument"],
)
def halves_of_the_query_exchanged(call: Call) -> Any:
    """The rotary kernel leaves the halves of a query in each other's place; the keys are right."""
    query = call.tensor(0, "query")
    fits(query.size(-1) % 2 == 0 and query.size(-1) > 1)
    return _with(call, 0, query.roll(query.size(-1) // 2, -1))


@FAULTS.fault(
    _FUSED,
    kinds=["approximation", "other function"],
    loose=["wrong statistics", "precision"],
)
def exponential_by_a_parabola(call: Call) -> Any:
    """1 + s + s^2 / 2 for exp(s), normalised, as by a linear attention of second order."""
    scores, mask, value = _parts(call)
    weights = 1 + scores + scores.square() / 2
    if mask is not None:
        weights = weights * _seen(mask)
        fits(mask.dtype == torch.bool or not bool(mask[_seen(mask)].any()))
    total = weights.sum(-1, keepdim=True)
    fits(bool((total.detach() > 1e-3).all()))
    return call.instead(weights @ value / total)


@FAULTS.fault(
    _FUSED,
    kinds=["other function", "mask", "wrong reduction"],
    loose=["approximation", "copy", "partial sum", "wrong index", "missing reduction"],
)
def value_of_the_best_key_only(call: Call) -> Any:
    """A temperature of zero: each query gets the value of the key with the largest score."""
    scores, value = _hidden(call)
    best = scores.detach().argmax(-1)
    chosen = functional.one_hot(best, scores.size(-1)).to(value.dtype)
    return call.instead(chosen @ value)


@FAULTS.fault(
    _FUSED,
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
)
def queries_in_eight_bits_with_one_step(call: Call) -> Any:
    """The queries are integers with one step for the whole tensor."""
    query = call.tensor(0, "query")
    step = query.detach().abs().max() / 127
    fits(bool(step > 0))
    return _with(call, 0, with_gradient_of(query, (query.detach() / step).round() * step))


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "wrong argument"],
    loose=["partial sum", "wrong index", "other function"],
)
def older_half_of_the_keys_forgotten(call: Call) -> Any:
    """A sliding window of half of the length, on a layer that has none."""
    scores, mask, value = _parts(call)
    rows, columns = scores.shape[-2:]
    fits(rows == columns and columns > 3)
    far = torch.arange(rows)[:, None] - torch.arange(columns)[None, :] >= columns // 2
    return _weigh(call, scores.masked_fill(far, -math.inf), mask, value)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong index", "permutation", "transpose"],
    loose=["shift", "swapped operands", "wrong argument"],
)
def strides_of_the_query_ignored(call: Call) -> Any:
    """The queries are a view of (position, head), and are read as if they were contiguous."""
    query = call.tensor(0, "query")
    fits(query.dim() == 4 and query.size(1) > 1 and query.size(2) > 1)
    return _with(call, 0, query.transpose(1, 2).reshape(query.shape))


@FAULTS.fault(
    _FUSED,
    kinds=["precision"],
    loose=["approximation", "other function"],
)
def weights_in_e4m3_before_the_values(call: Call) -> Any:
    """A kernel in float8: what multiplies the values has three bits behind the point."""
    scores, value = _hidden(call)
    weights = scores.softmax(-1)
    coarse = weights.detach().to(torch.float8_e4m3fn).to(weights.dtype)
    return call.instead(with_gradient_of(weights, coarse) @ value)


@FAULTS.fault(
    _FUSED,
    kinds=["approximation", "other function"],
    loose=["precision", "wrong statistics"],
)
def exponential_by_straight_lines_between_powers(call: Call) -> Any:
    """Exp2 without its unit: 2 ** n times 1 + f, in the weights and in their sum."""
    scores, value = _hidden(call)
    power = (scores - scores.amax(-1, keepdim=True)) / math.log(2)
    whole = power.detach().clamp(min=-100).floor()
    weights = torch.exp2(whole) * (1 + power.clamp(min=-100) - whole)
    return call.instead(weights @ value / weights.sum(-1, keepdim=True))


@FAULTS.fault(
    _FUSED,
    kinds=["permutation", "wrong index", "wrong rank's shard"],
    loose=["shift", "swapped operands", "wrong argument"],
)
def chunks_of_a_ring_not_put_back(call: Call) -> Any:
    """Two ranks hold the first and the last, and the two middle quarters: 0, 3, 1, 2."""
    value = call.result()
    fits(value.size(-2) % 4 == 0)
    return call.instead(value.unflatten(-2, (4, -1))[..., [0, 3, 1, 2], :, :].flatten(-3, -2))


def _blocks(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores of two blocks of keys, and their values."""
    scores, value = _hidden(call)
    half = scores.size(-1) // 2
    fits(half > 1)
    return scores[..., :half], scores[..., half:], value[..., :half, :], value[..., half:, :]


@FAULTS.fault(
    _FUSED,
    kinds=["wrong statistics", "axis scale", "wrong factor"],
    loose=["scale", "wrong reduction", "stale", "other function"],
)
def accumulator_rescaled_and_the_sum_not(call: Call) -> Any:
    """An online softmax in two blocks: the sum of the first keeps its old maximum."""
    first, second, left, right = _blocks(call)
    old = first.amax(-1, keepdim=True)
    new = torch.maximum(old, second.amax(-1, keepdim=True))
    fits(bool((old.detach() > -1e4).all()))
    after = (second - new).exp()
    total = (first - old).exp().sum(-1, keepdim=True) + after.sum(-1, keepdim=True)
    return call.instead(((first - new).exp() @ left + after @ right) / total)


@FAULTS.fault(
    _FUSED,
    kinds=["partial sum", "mask", "wrong reduction", "lost accumulation"],
    loose=["missing reduction", "one rank's part", "other function", "missing operand",
           "wrong index"],
)  # fmt: skip
def split_with_the_larger_maximum_only(call: Call) -> Any:
    """Two splits of the keys are merged by choosing that which has the largest score."""
    first, second, left, right = _blocks(call)
    is_first = first.amax(-1, keepdim=True) >= second.amax(-1, keepdim=True)
    both = first.softmax(-1) @ left, second.softmax(-1) @ right
    return call.instead(torch.where(is_first, *both))


@FAULTS.fault(
    _FUSED,
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "wrong argument", "doubled reduction", "missing operand"],
)
def last_page_of_the_cache_is_the_first(call: Call) -> Any:
    """The table of four pages ends with a zero: keys and values are those of the first page."""
    key, value = call.tensor(1, "key"), call.tensor(2, "value")
    page = key.size(-2) // 4
    fits(page > 0)
    places = torch.arange(key.size(-2))
    places[-page:] = torch.arange(page)
    call = call.put(1, key[..., places, :], "key")
    return _with(call, 2, value[..., places, :])


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "axis scale", "wrong index"],
    loose=["scale", "shift", "stale", "wrong argument", "wrong rank's shard"],
)
def values_with_the_step_of_the_next_head(call: Call) -> Any:
    """Each head of the cached values has a step; that of the next head is multiplied back."""
    value = call.tensor(2, "value")
    fits(value.dim() == 4 and value.size(1) > 1)
    step = value.detach().abs().amax((-2, -1), keepdim=True)
    fits(bool((step > 0).all()))
    return _with(call, 2, value / step * step.roll(-1, 1))


# --- Softmax --------------------------------------------------------------------------------------

_SOFTMAX = "softmax _safe_softmax"


def _row(call: Call) -> tuple[Tensor, Tensor]:
    """Scores over the last axis, and the result."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(isinstance(dim, int) and dim % value.dim() == value.dim() - 1 and value.size(-1) > 2)
    return value, call.result()


def _finite(value: Tensor) -> Tensor:
    """Scores of which none is hidden."""
    fits(bool((value.detach() > -1e4).all()))
    return value


@FAULTS.fault(_SOFTMAX, kinds=["precision"], loose=["approximation", "other function"])
def chances_in_bfloat16(call: Call) -> Any:
    """The chances are stored with eight bits."""
    _, chances = _row(call)
    coarse = chances.detach().bfloat16().to(chances.dtype)
    return call.instead(with_gradient_of(chances, coarse))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["scale", "wrong factor"],
    loose=["axis scale", "wrong argument"],
)
def chances_scaled_up_for_a_dropout(call: Call) -> Any:
    """Divided by 0.9, although nothing was dropped."""
    _, chances = _row(call)
    return call.instead(chances / 0.9)


@FAULTS.fault(
    _SOFTMAX,
    kinds=["other function"],
    loose=["sign", "offset", "wrong factor", "wrong statistics"],
)
def chance_of_the_others(call: Call) -> Any:
    """1 - p, as for a gate that closes."""
    _, chances = _row(call)
    return call.instead(1 - chances)


@FAULTS.fault(
    f"{_SOFTMAX} log_softmax",
    kinds=["scale", "wrong factor", "wrong argument"],
    loose=["axis scale", "other function"],
)
def temperature_of_a_distillation_left(call: Call) -> Any:
    """The scores are divided by five."""
    value, _ = _row(call)
    return call.put(0, value / 5, "input").run()


@FAULTS.fault(
    f"{_SOFTMAX} log_softmax",
    kinds=["sign", "wrong factor", "other function"],
    loose=["scale", "wrong argument"],
)
def chances_of_the_opposite_scores(call: Call) -> Any:
    """A softmin: the scores are taken for costs."""
    value, _ = _row(call)
    return call.put(0, -_finite(value), "input").run()


@FAULTS.fault(
    _SOFTMAX,
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "partial sum", "axis scale", "wrong factor",
           "one rank's part"],
)  # fmt: skip
def second_half_of_the_chances_not_stored(call: Call) -> Any:
    """The grid has one tile of columns; the sum is right."""
    _, chances = _row(call)
    return call.instead(chances * (torch.arange(chances.size(-1)) < chances.size(-1) // 2))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["eps", "wrong statistics", "axis scale", "wrong factor"],
    loose=["scale", "offset", "other function", "wrong argument"],
)
def summand_of_a_tenth_in_the_sum(call: Call) -> Any:
    """Exp(x - max) / (sum + 0.1), so that nothing divides by zero."""
    value, chances = _row(call)
    top = value.amax(-1, keepdim=True)
    total = (value - top).exp().sum(-1, keepdim=True)
    fits(bool(total.detach().isfinite().all()))
    return call.instead(chances * total / (total + 0.1))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["other function"],
    loose=[
        "missing reduction",
        "wrong statistics",
        "wrong reduction",
        "approximation",
        "missing operand",
    ],
)
def gate_of_each_score(call: Call) -> Any:
    """A sigmoid, as the router of another model has."""
    value, _ = _row(call)
    return call.instead(value.sigmoid())


@FAULTS.fault(
    _SOFTMAX,
    kinds=["other function"],
    loose=["clipped", "approximation", "wrong statistics", "wrong reduction", "zeros"],
)
def shares_of_the_rectified_scores(call: Call) -> Any:
    """Relu(x) / sum relu(x): the exponential is lost."""
    value, _ = _row(call)
    positive = value.relu()
    return call.instead(positive / (positive.sum(-1, keepdim=True) + 1e-9))


@FAULTS.fault(
    f"{_SOFTMAX} log_softmax",
    kinds=["clipped", "other function"],
    loose=["approximation", "mask", "wrong argument"],
)
def scores_not_above_one_half(call: Call) -> Any:
    """An upper limit for the scores that is far too low."""
    value, _ = _row(call)
    return call.put(0, value.clamp(max=0.5), "input").run()


@FAULTS.fault("log_softmax", kinds=["precision"], loose=["approximation", "other function"])
def logarithms_in_e5m2(call: Call) -> Any:
    """The logarithms are stored with two bits behind the point."""
    _, logarithms = _row(call)
    coarse = logarithms.detach().to(torch.float8_e5m2).to(logarithms.dtype)
    return call.instead(with_gradient_of(logarithms, coarse))


@FAULTS.fault(
    "log_softmax",
    kinds=["scale", "wrong factor"],
    loose=["other function", "axis scale"],
)
def logarithms_halved(call: Call) -> Any:
    """The result is averaged over two ranks, of which one holds zeros."""
    _, logarithms = _row(call)
    return call.instead(0.5 * logarithms)


@FAULTS.fault(
    _SOFTMAX,
    kinds=["precision"],
    loose=["approximation", "other function", "clipped"],
)
def chances_in_steps_of_a_256th(call: Call) -> Any:
    """A byte with a fixed scale of 1 / 256, so that a chance is 255 / 256 at most."""
    _, chances = _row(call)
    codes = (chances.detach() * 256).round().clamp(max=255)
    return call.instead(with_gradient_of(chances, codes / 256))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["approximation"],
    loose=["other function", "precision", "wrong statistics"],
)
def exponential_by_the_parabola_of_an_integer_kernel(call: Call) -> Any:
    """0.3585 (r + 1.353)^2 + 0.344 for exp(r), with r between -ln 2 and 0, as for integers."""
    value, _ = _row(call)
    far = (value - value.amax(-1, keepdim=True)).clamp(min=-60)
    whole = (-far.detach() / math.log(2)).floor()
    rest = far + whole * math.log(2)
    weights = (0.3585 * (rest + 1.353).square() + 0.344) * torch.exp2(-whole)
    return call.instead(weights / weights.sum(-1, keepdim=True))


@FAULTS.fault(_SOFTMAX, kinds=["precision"], loose=["approximation", "other function"])
def distance_to_the_largest_in_bfloat16(call: Call) -> Any:
    """X - max(x) is rounded before the exponential; the sum has all bits."""
    value, _ = _row(call)
    far = (value - value.amax(-1, keepdim=True)).clamp(min=-1e30)
    coarse = with_gradient_of(far, far.detach().bfloat16().to(far.dtype))
    return call.instead(coarse.softmax(-1))


# --- Masks ----------------------------------------------------------------------------------------


def _condition(call: Call) -> tuple[int, Tensor, str]:
    """Where the condition is, it, and the name of its argument."""
    place, name = (0, "condition") if call.name == "where" else (1, "mask")
    mask = call.get(place, name)
    fits(isinstance(mask, Tensor) and mask.dim() > 0 and mask.dtype == torch.bool)
    return place, mask, name


@FAULTS.fault(
    "where masked_fill",
    kinds=["shift", "mask", "wrong index", "permutation"],
    loose=["wrong argument", "stale", "copy"],
    backward=False,
)
def condition_of_the_next_column(call: Call) -> Any:
    """The mask is read one column too far, around the end."""
    place, mask, name = _condition(call)
    fits(mask.size(-1) > 1)
    return call.put(place, mask.roll(-1, -1), name).run()


@FAULTS.fault(
    "where",
    kinds=["mask", "missing operand", "copy"],
    loose=["wrong argument", "stale", "other function"],
    backward=False,
)
def second_branch_everywhere(call: Call) -> Any:
    """The condition is folded to false."""
    place, mask, name = _condition(call)
    return call.put(place, torch.zeros_like(mask), name).run()


@FAULTS.fault(
    "masked_fill",
    kinds=["wrong argument", "constant", "mask"],
    loose=["offset", "approximation", "clipped", "other function"],
    backward=False,
)
def filled_with_minus_ten(call: Call) -> Any:
    """A large negative number is written by hand, and is not large enough."""
    number = call.get(2, "value")
    fits(isinstance(number, int | float) and number < -100)
    return call.put(2, -10.0, "value").run()


@FAULTS.fault(
    "masked_fill where",
    kinds=["mask"],
    loose=["wrong argument", "zeros", "wrong index", "other function", "stale"],
    backward=False,
)
def condition_of_the_row_or_the_next(call: Call) -> Any:
    """Two rows of the mask share a byte, and either of them sets it."""
    place, mask, name = _condition(call)
    fits(mask.dim() > 1 and mask.size(-2) > 1)
    return call.put(place, mask | mask.roll(-1, -2), name).run()


@FAULTS.fault(
    "tril triu",
    kinds=["mask", "wrong argument", "copy"],
    loose=["other function", "stale"],
    backward=False,
)
def triangle_forgotten(call: Call) -> Any:
    """The whole matrix is kept."""
    return call.get(0, "input").clone()


_INVERSES = {"lt": torch.ge, "ge": torch.lt, "gt": torch.le, "le": torch.gt}


@FAULTS.fault(
    "lt gt le ge",
    kinds=["other function", "mask"],
    loose=["sign", "wrong argument", "swapped operands"],
    backward=False,
)
def comparison_negated(call: Call) -> Any:
    """Greater or equal for less, and so on: what is seen and what is hidden are exchanged."""
    return _INVERSES[call.name](call.get(0, "input"), call.get(1, "other"))


@FAULTS.fault(
    "lt gt eq ne",
    kinds=["transpose", "permutation", "wrong index"],
    loose=["swapped operands", "mask", "wrong argument"],
    backward=False,
)
def comparison_stored_by_columns(call: Call) -> Any:
    """The square of the comparison is stored with rows and columns exchanged."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dim() > 1 and value.size(-1) == value.size(-2))
    return value.mT.contiguous()


@FAULTS.fault(
    "lt gt le ge eq ne bitwise_and and_ bitwise_or or_",
    kinds=["mask", "zeros", "uninitialised"],
    loose=["constant", "missing operand", "partial sum", "wrong index"],
    backward=False,
)
def last_column_of_the_condition_false(call: Call) -> Any:
    """The bound of the store is one column too small."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 0)
    fits(value.size(-1) > 1)
    return value & (torch.arange(value.size(-1)) < value.size(-1) - 1)


# --- Positions ------------------------------------------------------------------------------------


def _angles(call: Call) -> Tensor:
    value = call.tensor(0)
    fits(value.dim() > 1 and value.size(-1) > 3 and value.size(-2) > 2)
    return value


@FAULTS.fault("sin cos", kinds=["precision"], loose=["approximation", "other function"])
def table_of_the_turns_in_bfloat16(call: Call) -> Any:
    """Sine and cosine are stored with eight bits."""
    _angles(call)
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().bfloat16().to(value.dtype)))


@FAULTS.fault("sin cos", kinds=["precision"], loose=["approximation", "other function"])
def angles_in_half(call: Call) -> Any:
    """Positions times frequencies are stored in float16."""
    value = _angles(call)
    return call.put(0, with_gradient_of(value, value.detach().half().to(value.dtype))).run()


@FAULTS.fault(
    "sin cos",
    kinds=["approximation", "other function"],
    loose=["precision", "clipped"],
)
def turn_by_two_terms_of_its_series(call: Call) -> Any:
    """1 - x^2 / 2 and x - x^3 / 6, with x reduced to half a turn."""
    value = _angles(call)
    small = torch.remainder(value + math.pi, 2 * math.pi) - math.pi
    wrong = small - small**3 / 6 if call.name == "sin" else 1 - small**2 / 2
    return call.instead(wrong)


@FAULTS.fault(
    "sin cos",
    kinds=["axis offset", "wrong argument"],
    loose=["offset", "shift", "wrong index", "other function"],
)
def positions_begin_with_minus_one(call: Call) -> Any:
    """Each position turns by one step less than it should."""
    value = _angles(call)
    step = value[..., 1:2, :] - value[..., :1, :]
    linear = value[..., :1, :] + step * torch.arange(value.size(-2))[:, None]
    fits(bool(torch.allclose(linear, value, atol=1e-4)))
    return call.put(0, value - step).run()


@FAULTS.fault("sin cos", kinds=["precision"], loose=["approximation", "other function"])
def turns_in_steps_of_a_127th(call: Call) -> Any:
    """The table of sines and cosines has integers of eight bits."""
    _angles(call)
    value = call.result()
    return call.instead(with_gradient_of(value, (value.detach() * 127).round() / 127))


@FAULTS.fault(
    "sin cos",
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
)
def frequencies_in_bfloat16(call: Call) -> Any:
    """The buffer of the frequencies was cast with the model; the positions are exact."""
    value = _angles(call)
    step = value[..., 1:2, :] - value[..., :1, :]
    places = torch.arange(value.size(-2))[:, None]
    fits(bool(torch.allclose(value[..., :1, :] + step * places, value, atol=1e-4)))
    coarse = step.detach().bfloat16().to(value.dtype)
    return call.put(0, value + (coarse - step.detach()) * places).run()
