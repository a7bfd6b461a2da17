"""Faults of the tenth set: attention, softmax, masks, positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, longer, on, result
from benchmarks.places.parts import (
    any_condition_of,
    attention_operands,
    hidden_scores,
    mask_of,
    read_long_angles,
    scores_before_mask,
    seen_keys,
    softmax_row,
    weigh_seen_values,
    with_operand,
)
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_FUSED = "scaled_dot_product_attention flash_attention"
_NAMES = ("query", "key", "value")


# --- Attention ------------------------------------------------------------------------------------


def _scaled(call: Call, scale: float) -> Any:
    """Attention with another factor of the scores."""
    query, key, value, _ = attention_operands(call)
    scores = query @ key.mT * scale
    return weigh_seen_values(call, scores, mask_of(call, *scores.shape[-2:]), value)


@FAULTS.fault(_FUSED, "wrong factor, scale, wrong argument; axis scale, other function")
def factor_written_for_heads_of_128(call: Call) -> Any:
    """The factor of the scores is the number 128 ** -0.5, whatever the width of a head is."""
    fits(call.tensor(0, "query").size(-1) != 128)
    return _scaled(call, 128**-0.5)


@FAULTS.fault(_FUSED, words.ROUNDED)
def keys_of_the_cache_in_e4m3(call: Call) -> Any:
    """The keys are stored in float8 without a scale; the values are right."""
    key = call.tensor(1, "key")
    coarse = key.detach().to(torch.float8_e4m3fn).to(key.dtype)
    return with_operand(call, 1, with_gradient_of(key, coarse))


@FAULTS.fault(_FUSED, "precision; approximation, other function")
def scores_through_half(call: Call) -> Any:
    """The scores are stored in float16 before the softmax."""
    scores, mask, value = scores_before_mask(call)
    coarse = with_gradient_of(scores, scores.detach().half().to(scores.dtype))
    return weigh_seen_values(call, coarse, mask, value)


@FAULTS.fault(_FUSED, words.LIMITED)
def queries_keys_and_values_cut_at_a_half(call: Call) -> Any:
    """The option `clip_qkv` of another model is on, with 0.5."""
    for place in range(3):
        call = call.put(place, call.tensor(place, _NAMES[place]).clamp(-0.5, 0.5), _NAMES[place])
    return call.instead(call.result())


@FAULTS.fault(
    _FUSED,
    "mask, copy, wrong argument; partial sum, wrong index, stale, missing operand, other function",
)
def newest_query_sees_itself_only(call: Call) -> Any:
    """The last position attends with a cache that is empty: it gets its own value."""
    _, _, value, _ = attention_operands(call)
    right = call.result()
    fits(right.shape == value.shape and value.size(-2) > 1)
    return call.instead(torch.cat([right[..., :-1, :], value[..., -1:, :]], -2))


@FAULTS.fault(
    _FUSED,
    "mask, missing operand, copy, wrong argument; partial sum, other function, missing reduction",
)
def every_query_sees_itself_only(call: Call) -> Any:
    """Nothing but the diagonal is left of the mask: the result is the values."""
    _, _, value, _ = attention_operands(call)
    fits(value.size(-2) > 1)
    return call.instead(value.clone())


@FAULTS.fault(
    _FUSED,
    "doubled reduction, wrong factor, wrong statistics; scale, wrong reduction, mask, "
    "offset, axis scale, partial sum",
)
def first_half_of_the_keys_counted_twice(call: Call) -> Any:
    """The loop over blocks of keys visits the first again, in the sum and above it."""
    scores, value = hidden_scores(call)
    half = scores.size(-1) // 2
    fits(half > 0)
    twice = (torch.arange(scores.size(-1)) < half) * math.log(2)
    return call.instead((scores + twice).softmax(-1) @ value)


@FAULTS.fault(
    _FUSED,
    "stale, wrong statistics, wrong index, wrong factor, axis scale; scale, residual, "
    "wrong reduction, shift",
)
def sum_of_the_query_before_divides(call: Call) -> Any:
    """The sum of the exponentials is stored after it was used: each query has that before it."""
    scores, value = hidden_scores(call)
    fits(scores.size(-2) > 1)
    weights = (scores - scores.detach().amax((-2, -1), keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    before = torch.cat([total[..., :1, :], total[..., :-1, :]], -2)
    return call.instead(weights @ value / before)


@FAULTS.fault(
    _FUSED, "other function; wrong reduction, wrong statistics, approximation, clipped, zeros"
)
def rectified_scores_for_exponentials(call: Call) -> Any:
    """Relu(s) / sum relu(s), as in a kernel for integers."""
    scores, value = hidden_scores(call)
    weights = scores.relu()
    total = weights.sum(-1, keepdim=True)
    return call.instead(weights @ value / (total + 1e-6))


@FAULTS.fault(
    _FUSED, "other function; offset, wrong statistics, residual, wrong reduction, wrong argument"
)
def distance_for_the_product(call: Call) -> Any:
    """The scores are -|q - k|^2 / 2, times the factor, and not the product of both."""
    query, key, value, scale = attention_operands(call)
    far = query.square().sum(-1, keepdim=True) - 2 * query @ key.mT
    scores = -0.5 * scale * (far + key.square().sum(-1)[..., None, :])
    return weigh_seen_values(call, scores, mask_of(call, *scores.shape[-2:]), value)


@FAULTS.fault(
    _FUSED,
    "other function, axis scale, wrong factor, wrong statistics; scale, wrong argument, "
    "missing operand",
)
def cosine_of_query_and_key(call: Call) -> Any:
    """Both are divided by their length, and a factor of ten is taken, as in another model."""
    query, key, value, _ = attention_operands(call)
    scores = 10 * functional.normalize(query, dim=-1) @ functional.normalize(key, dim=-1).mT
    return weigh_seen_values(call, scores, mask_of(call, *scores.shape[-2:]), value)


@FAULTS.fault(
    _FUSED, "copy, wrong index, stale; constant, permutation, wrong argument, wrong rank's shard"
)
def one_head_of_keys_and_values_for_all(call: Call) -> Any:
    """Taken for a model with one head of keys: the stride of the heads is zero."""
    query, key, value, _ = attention_operands(call)
    fits(key.dim() == 4 and call.tensor(1, "key").size(1) > 1)
    mask = mask_of(call, query.size(-2), key.size(-2))
    scores = query @ key[:, :1].mT * (call.kwargs.get("scale") or query.size(-1) ** -0.5)
    return weigh_seen_values(call, scores, mask, value[:, :1].expand(value.shape))


@FAULTS.fault(_FUSED, "approximation, other function; wrong statistics, precision")
def exponential_by_a_parabola(call: Call) -> Any:
    """1 + s + s^2 / 2 for exp(s), normalised, as by a linear attention of second order."""
    scores, mask, value = scores_before_mask(call)
    weights = 1 + scores + scores.square() / 2
    if mask is not None:
        weights = weights * seen_keys(mask)
        fits(mask.dtype == torch.bool or not bool(mask[seen_keys(mask)].any()))
    total = weights.sum(-1, keepdim=True)
    fits(bool((total.detach() > 1e-3).all()))
    return call.instead(weights @ value / total)


@FAULTS.fault(_FUSED, words.ROUNDED)
def queries_in_eight_bits_with_one_step(call: Call) -> Any:
    """The queries are integers with one step for the whole tensor."""
    query = call.tensor(0, "query")
    step = query.detach().abs().max() / 127
    fits(bool(step > 0))
    return with_operand(call, 0, with_gradient_of(query, (query.detach() / step).round() * step))


@FAULTS.fault(_FUSED, "mask, wrong argument; partial sum, wrong index, other function")
def older_half_of_the_keys_forgotten(call: Call) -> Any:
    """A sliding window of half of the length, on a layer that has none."""
    scores, mask, value = scores_before_mask(call)
    rows, columns = scores.shape[-2:]
    fits(rows == columns and columns > 3)
    far = torch.arange(rows)[:, None] - torch.arange(columns)[None, :] >= columns // 2
    return weigh_seen_values(call, scores.masked_fill(far, -math.inf), mask, value)


@FAULTS.fault(_FUSED, "precision; approximation, other function")
def weights_in_e4m3_before_the_values(call: Call) -> Any:
    """A kernel in float8: what multiplies the values has three bits behind the point."""
    scores, value = hidden_scores(call)
    weights = scores.softmax(-1)
    coarse = weights.detach().to(torch.float8_e4m3fn).to(weights.dtype)
    return call.instead(with_gradient_of(weights, coarse) @ value)


@FAULTS.fault(_FUSED, "approximation, other function; precision, wrong statistics")
def exponential_by_straight_lines_between_powers(call: Call) -> Any:
    """Exp2 without its unit: 2 ** n times 1 + f, in the weights and in their sum."""
    scores, value = hidden_scores(call)
    power = (scores - scores.amax(-1, keepdim=True)) / math.log(2)
    whole = power.detach().clamp(min=-100).floor()
    weights = torch.exp2(whole) * (1 + power.clamp(min=-100) - whole)
    return call.instead(weights @ value / weights.sum(-1, keepdim=True))


def _blocks(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores of two blocks of keys, and their values."""
    scores, value = hidden_scores(call)
    half = scores.size(-1) // 2
    fits(half > 1)
    return scores[..., :half], scores[..., half:], value[..., :half, :], value[..., half:, :]


@FAULTS.fault(
    _FUSED,
    "wrong statistics, axis scale, wrong factor; scale, wrong reduction, stale, other function",
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
    "partial sum, mask, wrong reduction, lost accumulation; missing reduction, "
    "one rank's part, other function, missing operand, wrong index",
)
def split_with_the_larger_maximum_only(call: Call) -> Any:
    """Two splits of the keys are merged by choosing that which has the largest score."""
    first, second, left, right = _blocks(call)
    is_first = first.amax(-1, keepdim=True) >= second.amax(-1, keepdim=True)
    both = first.softmax(-1) @ left, second.softmax(-1) @ right
    return call.instead(torch.where(is_first, *both))


@FAULTS.fault(
    _FUSED,
    "copy, stale, wrong index; permutation, wrong argument, doubled reduction, missing operand",
)
def last_page_of_the_cache_is_the_first(call: Call) -> Any:
    """The table of four pages ends with a zero: keys and values are those of the first page."""
    key, value = call.tensor(1, "key"), call.tensor(2, "value")
    page = key.size(-2) // 4
    fits(page > 0)
    places = torch.arange(key.size(-2))
    places[-page:] = torch.arange(page)
    call = call.put(1, key[..., places, :], "key")
    return with_operand(call, 2, value[..., places, :])


@FAULTS.fault(
    _FUSED,
    "wrong factor, axis scale, wrong index; scale, shift, stale, wrong argument, "
    "wrong rank's shard",
)
def values_with_the_step_of_the_next_head(call: Call) -> Any:
    """Each head of the cached values has a step; that of the next head is multiplied back."""
    value = call.tensor(2, "value")
    fits(value.dim() == 4 and value.size(1) > 1)
    step = value.detach().abs().amax((-2, -1), keepdim=True)
    fits(bool((step > 0).all()))
    return with_operand(call, 2, value / step * step.roll(-1, 1))


# fmt: off
# The factor of the scores is 1 / sqrt(d + 1).
FAULTS.add("width of the head counted with one more", _FUSED,
    "wrong factor, scale, wrong argument; axis scale, other function, off by one reduction",
    lambda call: _scaled(call, (call.tensor(0, "query").size(-1) + 1) ** (-0.5)))
# The factor of the scores has the wrong sign: what is least alike weighs most.
FAULTS.add("scores with a minus", _FUSED,
    "sign, wrong factor, wrong argument; scale, other function, axis scale",
    on(scores_before_mask,
        lambda call, scores, mask, value: weigh_seen_values(call, -scores, mask, value)))
# Two ranks each hold the whole result, and a mean with an empty buffer halves it.
FAULTS.add("result averaged over two ranks", _FUSED,
    "scale, wrong factor; axis scale, wrong reduction", result(lambda v: 0.5 * v))
# The weights of the softmax are multiplied with themselves before the values.
FAULTS.add("weights squared", _FUSED,
    "other function; wrong factor, wrong reduction, wrong statistics, axis scale, approximation",
    computed(hidden_scores, lambda scores, value: scores.softmax(-1).square() @ value))
# The cache of the values has eight bits for each number; the keys are right.
FAULTS.add("values of the cache in bfloat16", _FUSED, words.ROUNDED,
    on(lambda call: (call.tensor(2, "value"),),
        lambda call, value:

    with_operand(call, 2, with_gradient_of(value, value.detach().bfloat16().to(value.dtype)))))
# The pointer to the values is one head too far; queries and keys are right.
FAULTS.add("values of the next head", _FUSED, words.MOVED_OR_SWAPPED,
    on(lambda call: (call.tensor(2, "value"),),
        lambda call, value: with_operand(call, 2, value.roll(-1, 1)),
        where=lambda value: value.dim() == 4 and value.size(1) > 1))
# Each position asks with the query of the next one; the mask is right.
FAULTS.add("queries one token early", _FUSED,
    "shift, wrong index, permutation; stale, copy, wrong argument, mask",
    on(lambda call: (call.tensor(0, "query"),),
        lambda call, query: with_operand(call, 0, query.roll(-1, -2)),
        where=lambda query: query.size(-2) > 2))
# The cache of the keys is read one slot too far; the values are right.
FAULTS.add("keys of the next slot", _FUSED,
    "shift, wrong index, permutation; stale, copy, wrong argument, mask",
    on(lambda call: (call.tensor(1, "key"),),
        lambda call, key: with_operand(call, 1, key.roll(-1, -2)),
        where=lambda key: key.size(-2) > 2))
# A cache that grows downwards: the first key meets the last value.
FAULTS.add("values from the last position", _FUSED,
    "permutation, wrong index; shift, swapped operands, wrong argument",
    on(lambda call: (call.tensor(2, "value"),),
        lambda call, value: with_operand(call, 2, value.flip(-2)),
        where=lambda value: value.size(-2) > 1))
# A relu is fused into the load of the queries.
FAULTS.add("negative queries lost", _FUSED,
    "clipped, other function; zeros, mask, sign, wrong argument",
    lambda call: with_operand(call, 0, call.tensor(0, "query").relu()))
# The keys are stored as numbers without a sign.
FAULTS.add("magnitudes of the keys", _FUSED, "sign, other function; wrong argument",
    lambda call: with_operand(call, 1, call.tensor(1, "key").abs()))
# The bound of the store is one feature too small.
FAULTS.add("last feature of each head not stored", _FUSED, words.EMPTY_IN_A_SUM,
    result(lambda v: v * (torch.arange(v.size(-1)) < v.size(-1) - 1), where=longer(-1, 2)))
# Two queries share a register: each odd position is stored with the even one's result.
FAULTS.add("odd positions are those before", _FUSED,
    "copy, stale, wrong index; shift, permutation, mask",
    result(lambda v: v[..., torch.arange(v.size(-2)) // 2 * 2, :], where=longer(-2)))
# The pointers are not moved on along the batch.
FAULTS.add("result of the first example for all", _FUSED,
    "copy, stale, wrong index; permutation, shift, wrong rank's shard, wrong argument",
    result(lambda v: v[:1].expand(v.shape).contiguous(),
        where=lambda v: v.dim() == 4 and v.size(0) > 1))
# The loop over the features of query and key has a stride of two; the factor is right.
FAULTS.add("even features only in the scores", _FUSED,
    "partial sum, mask, wrong index; missing operand, wrong reduction, zeros, "
    "lost accumulation, wrong factor",
    on(lambda call: (call.tensor(0, "query"),),
        lambda call, query:
            with_operand(call, 0, query * (torch.arange(query.size(-1)) % 2 == 0)),
        where=lambda query: query.size(-1) > 1))
# The rotary kernel leaves the halves of a query in each other's place; the keys are right.
FAULTS.add("halves of the query exchanged", _FUSED,
    "permutation, wrong index, shift; swapped operands, wrong argument",
    on(lambda call: (call.tensor(0, "query"),),
        lambda call, query: with_operand(call, 0, query.roll(query.size(-1) // 2, -1)),
        where=lambda query: query.size(-1) % 2 == 0 and query.size(-1) > 1))
# A temperature of zero: each query gets the value of the key with the largest score.
FAULTS.add("value of the best key only", _FUSED,
    "other function, mask, wrong reduction; approximation, copy, partial sum, wrong index, "
    "missing reduction",
    computed(hidden_scores,
        lambda scores, value:

    functional.one_hot(scores.detach().argmax(-1), scores.size(-1)).to(value.dtype) @ value))
# The queries are a view of (position, head), and are read as if they were contiguous.
FAULTS.add("strides of the query ignored", _FUSED,
    "wrong index, permutation, transpose; shift, swapped operands, wrong argument",
    on(lambda call: (call.tensor(0, "query"),),
        lambda call, query: with_operand(call, 0, query.transpose(1, 2).reshape(query.shape)),
        where=lambda query: query.dim() == 4 and query.size(1) > 1 and (query.size(2) > 1)))
# Two ranks hold the first and the last, and the two middle quarters: 0, 3, 1, 2.
FAULTS.add("chunks of a ring not put back", _FUSED,
    "permutation, wrong index, wrong rank's shard; shift, swapped operands, wrong argument",
    result(lambda v: v.unflatten(-2, (4, -1))[..., [0, 3, 1, 2], :, :].flatten(-3, -2),
        where=lambda v: v.size(-2) % 4 == 0))
# fmt: on


# --- Softmax --------------------------------------------------------------------------------------

_SOFTMAX = "softmax _safe_softmax"


def _finite(value: Tensor) -> Tensor:
    """Scores of which none is hidden."""
    fits(bool((value.detach() > -1e4).all()))
    return value


@FAULTS.fault(
    _SOFTMAX,
    "eps, wrong statistics, axis scale, wrong factor; scale, offset, other function, "
    "wrong argument",
)
def summand_of_a_tenth_in_the_sum(call: Call) -> Any:
    """Exp(x - max) / (sum + 0.1), so that nothing divides by zero."""
    value, chances = softmax_row(call)
    top = value.amax(-1, keepdim=True)
    total = (value - top).exp().sum(-1, keepdim=True)
    fits(bool(total.detach().isfinite().all()))
    return call.instead(chances * total / (total + 0.1))


@FAULTS.fault(
    _SOFTMAX, "other function; clipped, approximation, wrong statistics, wrong reduction, zeros"
)
def shares_of_the_rectified_scores(call: Call) -> Any:
    """Relu(x) / sum relu(x): the exponential is lost."""
    value, _ = softmax_row(call)
    positive = value.relu()
    return call.instead(positive / (positive.sum(-1, keepdim=True) + 1e-9))


@FAULTS.fault(_SOFTMAX, "approximation; other function, precision, wrong statistics")
def exponential_by_the_parabola_of_an_integer_kernel(call: Call) -> Any:
    """0.3585 (r + 1.353)^2 + 0.344 for exp(r), with r between -ln 2 and 0, as for integers."""
    value, _ = softmax_row(call)
    far = (value - value.amax(-1, keepdim=True)).clamp(min=-60)
    whole = (-far.detach() / math.log(2)).floor()
    rest = far + whole * math.log(2)
    weights = (0.3585 * (rest + 1.353).square() + 0.344) * torch.exp2(-whole)
    return call.instead(weights / weights.sum(-1, keepdim=True))


@FAULTS.fault(_SOFTMAX, "precision; approximation, other function")
def distance_to_the_largest_in_bfloat16(call: Call) -> Any:
    """X - max(x) is rounded before the exponential; the sum has all bits."""
    value, _ = softmax_row(call)
    far = (value - value.amax(-1, keepdim=True)).clamp(min=-1e30)
    coarse = with_gradient_of(far, far.detach().bfloat16().to(far.dtype))
    return call.instead(coarse.softmax(-1))


# fmt: off
# The chances are stored with eight bits.
FAULTS.add("chances in bfloat16", _SOFTMAX, "precision; approximation, other function",
    computed(softmax_row,
        lambda _, chances:
            with_gradient_of(chances, chances.detach().bfloat16().to(chances.dtype))))
# Divided by 0.9, although nothing was dropped.
FAULTS.add("chances scaled up for a dropout", _SOFTMAX,
    "scale, wrong factor; axis scale, wrong argument",
    computed(softmax_row, lambda _, chances: chances / 0.9))
# 1 - p, as for a gate that closes.
FAULTS.add("chance of the others", _SOFTMAX,
    "other function; sign, offset, wrong factor, wrong statistics",
    computed(softmax_row, lambda _, chances: 1 - chances))
# The scores are divided by five.
FAULTS.add("temperature of a distillation left", f"{_SOFTMAX} log_softmax",
    "scale, wrong factor, wrong argument; axis scale, other function",
    on(softmax_row, lambda call, value, *_: call.put(0, value / 5, "input").run()))
# A softmin: the scores are taken for costs.
FAULTS.add("chances of the opposite scores", f"{_SOFTMAX} log_softmax",
    "sign, wrong factor, other function; scale, wrong argument",
    on(softmax_row, lambda call, value, *_: call.put(0, -_finite(value), "input").run()))
# The grid has one tile of columns; the sum is right.
FAULTS.add("second half of the chances not stored", _SOFTMAX, words.EMPTY_IN_A_RANKS_SUM,
    computed(softmax_row,
        lambda _, chances: chances * (torch.arange(chances.size(-1)) < chances.size(-1) // 2)))
# A sigmoid, as the router of another model has.
FAULTS.add("gate of each score", _SOFTMAX,
    "other function; missing reduction, wrong statistics, wrong reduction, approximation, "
    "missing operand", computed(softmax_row, lambda value, *_: value.sigmoid()))
# An upper limit for the scores that is far too low.
FAULTS.add("scores not above one half", f"{_SOFTMAX} log_softmax",
    "clipped, other function; approximation, mask, wrong argument",
    on(softmax_row, lambda call, value, *_: call.put(0, value.clamp(max=0.5), "input").run()))
# The logarithms are stored with two bits behind the point.
FAULTS.add("logarithms in e5m2", "log_softmax", "precision; approximation, other function",
    computed(softmax_row,
        lambda _, logarithms:

    with_gradient_of(logarithms, logarithms.detach().to(torch.float8_e5m2).to(logarithms.dtype))))
# The result is averaged over two ranks, of which one holds zeros.
FAULTS.add("logarithms halved", "log_softmax", "scale, wrong factor; other function, axis scale",
    computed(softmax_row, lambda _, logarithms: 0.5 * logarithms))
# A byte with a fixed scale of 1 / 256, so that a chance is 255 / 256 at most.
FAULTS.add("chances in steps of a 256th", _SOFTMAX,
    "precision; approximation, other function, clipped",
    computed(softmax_row,
        lambda _, chances:
            with_gradient_of(chances, (chances.detach() * 256).round().clamp(max=255) / 256)))
# fmt: on


# --- Masks ----------------------------------------------------------------------------------------


@FAULTS.forward(
    "where masked_fill", "shift, mask, wrong index, permutation; wrong argument, stale, copy"
)
def condition_of_the_next_column(call: Call) -> Any:
    """The mask is read one column too far, around the end."""
    place, mask, name = any_condition_of(call)
    fits(mask.size(-1) > 1)
    return call.put(place, mask.roll(-1, -1), name).run()


@FAULTS.forward(
    "masked_fill where", "mask; wrong argument, zeros, wrong index, other function, stale"
)
def condition_of_the_row_or_the_next(call: Call) -> Any:
    """Two rows of the mask share a byte, and either of them sets it."""
    place, mask, name = any_condition_of(call)
    fits(mask.dim() > 1 and mask.size(-2) > 1)
    return call.put(place, mask | mask.roll(-1, -2), name).run()


_INVERSES = {"lt": torch.ge, "ge": torch.lt, "gt": torch.le, "le": torch.gt}


@FAULTS.forward(
    "lt gt eq ne", "transpose, permutation, wrong index; swapped operands, mask, wrong argument"
)
def comparison_stored_by_columns(call: Call) -> Any:
    """The square of the comparison is stored with rows and columns exchanged."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dim() > 1 and value.size(-1) == value.size(-2))
    return value.mT.contiguous()


@FAULTS.forward(
    "lt gt le ge eq ne bitwise_and and_ bitwise_or or_",
    "mask, zeros, uninitialised; constant, missing operand, partial sum, wrong index",
)
def last_column_of_the_condition_false(call: Call) -> Any:
    """The bound of the store is one column too small."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 0)
    fits(value.size(-1) > 1)
    return value & (torch.arange(value.size(-1)) < value.size(-1) - 1)


# fmt: off
# The condition is folded to false.
FAULTS.add("second branch everywhere", "where",
    "mask, missing operand, copy; wrong argument, stale, other function",
    on(any_condition_of,
        lambda call, place, mask, name: call.put(place, torch.zeros_like(mask), name).run()),
    backward=False)
# A large negative number is written by hand, and is not large enough.
FAULTS.add("filled with minus ten", "masked_fill",
    "wrong argument, constant, mask; offset, approximation, clipped, other function",
    on(lambda call:
            (call.get(2, "value"),), lambda call, _: call.put(2, -10.0, "value").run(),
        where=lambda number: isinstance(number, int | float) and number < -100), backward=False)
# The whole matrix is kept.
FAULTS.add("triangle forgotten", "tril triu", "mask, wrong argument, copy; other function, stale",
    lambda call: call.get(0, "input").clone(), backward=False)
# Greater or equal for less, and so on: what is seen and what is hidden are exchanged.
FAULTS.add("comparison negated", "lt gt le ge",
    "other function, mask; sign, wrong argument, swapped operands",
    lambda call: _INVERSES[call.name](call.get(0, "input"), call.get(1, "other")), backward=False)
# fmt: on


# --- Positions ------------------------------------------------------------------------------------


@FAULTS.fault("sin cos", "precision; approximation, other function")
def table_of_the_turns_in_bfloat16(call: Call) -> Any:
    """Sine and cosine are stored with eight bits."""
    read_long_angles(call)
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().bfloat16().to(value.dtype)))


@FAULTS.fault("sin cos", "axis offset, wrong argument; offset, shift, wrong index, other function")
def positions_begin_with_minus_one(call: Call) -> Any:
    """Each position turns by one step less than it should."""
    value = read_long_angles(call)
    step = value[..., 1:2, :] - value[..., :1, :]
    linear = value[..., :1, :] + step * torch.arange(value.size(-2))[:, None]
    fits(bool(torch.allclose(linear, value, atol=1e-4)))
    return call.put(0, value - step).run()


@FAULTS.fault("sin cos", "precision; approximation, other function")
def turns_in_steps_of_a_127th(call: Call) -> Any:
    """The table of sines and cosines has integers of eight bits."""
    read_long_angles(call)
    value = call.result()
    return call.instead(with_gradient_of(value, (value.detach() * 127).round() / 127))


@FAULTS.fault("sin cos", words.ROUNDED)
def frequencies_in_bfloat16(call: Call) -> Any:
    """The buffer of the frequencies was cast with the model; the positions are exact."""
    value = read_long_angles(call)
    step = value[..., 1:2, :] - value[..., :1, :]
    places = torch.arange(value.size(-2))[:, None]
    fits(bool(torch.allclose(value[..., :1, :] + step * places, value, atol=1e-4)))
    coarse = step.detach().bfloat16().to(value.dtype)
    return call.put(0, value + (coarse - step.detach()) * places).run()


# fmt: off
# Positions times frequencies are stored in float16.
FAULTS.add("angles in half", "sin cos", "precision; approximation, other function",
    on(read_long_angles,
        lambda call, value:
            call.put(0, with_gradient_of(value, value.detach().half().to(value.dtype))).run()))
# 1 - x^2 / 2 and x - x^3 / 6, with x reduced to half a turn.
FAULTS.add("turn by two terms of its series", "sin cos",
    "approximation, other function; precision, clipped",
    on(lambda call:
            (torch.remainder(read_long_angles(call) + math.pi, 2 * math.pi) - math.pi,),
        lambda call, small:
            call.instead(small - small**3 / 6 if call.name == "sin" else 1 - small**2 / 2)))
# fmt: on
