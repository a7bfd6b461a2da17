"""Faults of the ninth set: attention, softmax, masks, positions."""

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
    """Query, key and value with the same number of heads, and the factor of the scores."""
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
    return call.instead(_hide(scores, mask).softmax(-1).nan_to_num(0) @ value)


def _seen(mask: Tensor) -> Tensor:
    """Which keys are seen, as booleans."""
    return mask if mask.dtype == torch.bool else mask > -1e4


def _some_hidden(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, what is seen, values; only of a mask that hides something and adds nothing else."""
    scores, mask, value = _parts(call)
    fits(mask is not None)
    assert mask is not None
    seen = _seen(mask).expand(scores.shape)
    fits(bool((~seen).any()))
    fits(mask.dtype == torch.bool or not bool(mask[_seen(mask)].any()))
    return scores, seen, value


def _bias(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, what is added to them (finite numbers), values."""
    scores, mask, value = _parts(call)
    fits(mask is not None and mask.is_floating_point())
    assert mask is not None
    fits(bool((mask.detach().abs() < 1e3).all()) and bool(mask.detach().any()))
    return scores, mask, value


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "scale", "wrong argument"],
    loose=["axis scale", "other function"],
)
def cube_root_of_the_width(call: Call) -> Any:
    """The exponent of the factor is a third and not a half."""
    query, key, value, _ = _operands(call)
    scores = query @ key.mT * query.size(-1) ** (-1 / 3)
    return _weigh(call, scores, _mask(call, *scores.shape[-2:]), value)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "scale", "wrong argument"],
    loose=["axis scale", "other function"],
)
def scores_divided_by_the_number_of_the_layer(call: Call) -> Any:
    """The option of another model: the scores of the third layer are a third."""
    scores, mask, value = _parts(call)
    return _weigh(call, scores / 3, mask, value)


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "wrong index"],
    loose=["wrong argument", "partial sum", "copy", "wrong factor"],
)
def limit_of_packed_rows(call: Call) -> Any:
    """Two heads are packed into the rows, which are not: query i sees keys up to i // 2."""
    scores, mask, value = _parts(call)
    fits(scores.size(-1) == scores.size(-2) and mask is not None)
    assert mask is not None
    rows, columns = torch.arange(scores.size(-2)), torch.arange(scores.size(-1))
    causal = columns[None, :] <= rows[:, None]
    fits(bool((_seen(mask) <= causal).all()))
    near = columns[None, :] <= rows[:, None] // 2
    return _weigh(call, scores.masked_fill(~near, -math.inf), mask, value)


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "partial sum", "off by one reduction"],
    loose=["wrong index", "wrong argument", "zeros", "wrong reduction", "missing operand"],
)
def first_key_not_seen(call: Call) -> Any:
    """The loop over the keys begins at 1; who sees nothing else gets zeros."""
    scores, mask, value = _parts(call)
    fits(scores.size(-1) > 2)
    rest = torch.arange(scores.size(-1)) > 0
    return _weigh(call, scores.masked_fill(~rest, -math.inf), mask, value)


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "partial sum"],
    loose=["wrong argument", "wrong index", "wrong reduction", "missing operand"],
)
def keys_of_the_middle_not_seen(call: Call) -> Any:
    """Of three blocks of keys, the loop visits the first and the last."""
    scores, mask, value = _parts(call)
    third = scores.size(-1) // 3
    fits(third > 0)
    at = torch.arange(scores.size(-1))
    middle = (at >= third) & (at < 2 * third)
    return _weigh(call, scores.masked_fill(middle, -math.inf), mask, value)


@FAULTS.fault(
    _FUSED,
    kinds=["scale", "wrong factor", "doubled reduction"],
    loose=["axis scale", "wrong reduction"],
)
def result_summed_over_two_ranks_that_have_it_all(call: Call) -> Any:
    """Both ranks compute all heads, and their results are added."""
    return call.instead(2 * call.result())


@FAULTS.fault(
    _FUSED,
    kinds=["shift", "wrong index", "permutation"],
    loose=["wrong rank's shard", "stale", "copy"],
)
def result_of_the_next_head(call: Call) -> Any:
    """Heads are stored one too early, around the end."""
    value = call.result()
    fits(value.dim() == 4 and value.size(1) > 1)
    return call.instead(value.roll(-1, 1))


@FAULTS.fault(
    _FUSED,
    kinds=["permutation", "wrong index"],
    loose=["swapped operands", "shift", "transpose"],
)
def features_of_the_result_in_pairs(call: Call) -> Any:
    """Words of two features are stored in the other order."""
    value = call.result()
    fits(value.size(-1) % 2 == 0 and value.size(-1) > 2)
    return call.instead(value.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


@FAULTS.fault(
    _FUSED,
    kinds=["precision"],
    loose=["approximation", "other function", "wrong argument"],
)
def keys_of_the_cache_in_bfloat16(call: Call) -> Any:
    """The cache of the keys has eight bits for each number; the values are right."""
    key = call.tensor(1, "key")
    coarse = key.detach().bfloat16().to(key.dtype)
    return call.instead(call.put(1, with_gradient_of(key, coarse), "key").result())


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "wrong statistics", "other function"],
    loose=["scale", "axis scale", "wrong reduction", "doubled reduction", "approximation"],
)
def first_block_corrected_twice(call: Call) -> Any:
    """An online softmax: what the first keys have summed is brought to the new maximum twice."""
    scores, mask, value = _parts(call)
    half = scores.size(-1) // 2
    fits(half > 1)
    hidden = _hide(scores, mask).clamp(min=-1e30)
    old = hidden[..., :half].amax(-1, keepdim=True)
    new = hidden.amax(-1, keepdim=True)
    weights = (hidden - new).exp()
    weights = torch.cat([weights[..., :half] * (old - new).exp(), weights[..., half:]], -1)
    return call.instead(weights @ value / weights.sum(-1, keepdim=True))


@FAULTS.fault(
    _FUSED,
    kinds=["mask"],
    loose=["wrong argument", "swapped operands", "wrong index", "other function"],
)
def hidden_keys_seen_and_the_others_not(call: Call) -> Any:
    """True means hidden in one library and seen in the other; who sees nothing gets zeros."""
    scores, seen, value = _some_hidden(call)
    return _weigh(call, scores, ~seen, value)


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "wrong argument"],
    loose=["constant", "zeros", "wrong factor", "clipped", "other function"],
)
def scores_multiplied_by_the_mask(call: Call) -> Any:
    """A hidden key has a score of zero, and still a weight."""
    scores, seen, value = _some_hidden(call)
    return call.instead((scores * seen).softmax(-1) @ value)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "scale", "wrong argument"],
    loose=["other function", "missing operand", "residual"],
)
def bias_of_the_positions_halved(call: Call) -> Any:
    """Two ranks share the bias, and its parts are averaged."""
    scores, bias, value = _bias(call)
    return _weigh(call, scores, bias / 2, value)


@FAULTS.fault(
    _FUSED,
    kinds=["shift", "wrong index", "permutation"],
    loose=["wrong argument", "stale", "copy", "mask"],
)
def bias_of_the_next_key(call: Call) -> Any:
    """The columns of the bias are read one too late, around the end."""
    scores, bias, value = _bias(call)
    fits(bias.size(-1) > 1)
    return _weigh(call, scores, bias.roll(-1, -1), value)


@FAULTS.fault(
    _FUSED,
    kinds=["copy", "stale", "wrong index"],
    loose=["constant", "permutation", "wrong argument"],
)
def query_of_the_first_position_for_all(call: Call) -> Any:
    """The pointer to the queries is not moved on; the mask is right."""
    query = call.tensor(0, "query")
    fits(query.size(-2) > 1)
    same = query[..., :1, :].expand(query.shape).contiguous()
    return call.instead(call.put(0, same, "query").result())


@FAULTS.fault(
    _FUSED,
    kinds=["permutation", "wrong index"],
    loose=["shift", "swapped operands", "transpose"],
)
def positions_of_the_result_from_the_last(call: Call) -> Any:
    """Blocks of queries are numbered from the last, for a better balance, and stored so."""
    value = call.result()
    fits(value.size(-2) > 1)
    return call.instead(value.flip(-2))


@FAULTS.fault(
    _FUSED,
    kinds=["wrong statistics", "wrong reduction", "axis scale", "wrong factor"],
    loose=["scale", "other function", "offset", "eps"],
)
def sink_in_the_sum_of_the_weights(call: Call) -> Any:
    """A key with a score of zero and no value is added, as in a model with sinks."""
    scores, mask, value = _parts(call)
    hidden = _hide(scores, mask)
    total = hidden.logsumexp(-1, keepdim=True)
    return call.instead((hidden.softmax(-1) @ value) * total.sigmoid())


@FAULTS.fault(
    _FUSED,
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "partial sum", "axis scale", "wrong factor"],
)
def odd_heads_not_computed(call: Call) -> Any:
    """The grid has one program for two heads, which computes the first of them."""
    value = call.result()
    fits(value.dim() == 4 and value.size(1) > 1)
    return call.instead(value * (torch.arange(value.size(1)) % 2 == 0)[:, None, None])


@FAULTS.fault(
    _FUSED,
    kinds=["wrong index", "permutation", "transpose"],
    loose=["shift", "swapped operands", "wrong argument"],
)
def keys_with_heads_and_positions_exchanged(call: Call) -> Any:
    """The memory of the keys is (position, head), and they are read as (head, position)."""
    key = call.tensor(1, "key")
    fits(key.dim() == 4 and key.size(1) > 1 and key.size(2) > 1)
    turned = key.transpose(1, 2).reshape(key.shape)
    return call.instead(call.put(1, turned, "key").result())


@FAULTS.fault(
    _FUSED,
    kinds=["wrong statistics", "partial sum", "off by one reduction", "axis scale", "wrong factor"],
    loose=["scale", "wrong reduction", "mask", "other function"],
)
def last_key_not_in_the_sum(call: Call) -> Any:
    """The last key is weighed and its weight is not in the sum that divides."""
    scores, mask, value = _parts(call)
    fits(scores.size(-1) > 2)
    weights = _hide(scores, mask).softmax(-1)
    rest = 1 - weights[..., -1:]
    fits(bool((rest.detach() > 0.01).all()))
    return call.instead(weights @ value / rest)


# --- Softmax --------------------------------------------------------------------------------------

_SOFTMAX = "softmax _safe_softmax"


def _row(call: Call) -> tuple[Tensor, Tensor]:
    """Scores over the last axis, and the result."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(isinstance(dim, int) and dim % value.dim() == value.dim() - 1 and value.size(-1) > 2)
    return value, call.result()


@FAULTS.fault(_SOFTMAX, kinds=["precision"], loose=["approximation", "other function"])
def chances_in_e4m3(call: Call) -> Any:
    """What is stored has three bits behind the point."""
    _, chances = _row(call)
    coarse = chances.detach().to(torch.float8_e4m3fn).to(chances.dtype)
    return call.instead(with_gradient_of(chances, coarse))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["wrong statistics", "partial sum", "axis scale", "wrong factor", "one rank's part",
           "missing reduction"],
    loose=["scale", "wrong reduction", "lost accumulation"],
)  # fmt: skip
def sum_of_the_first_rank_divides(call: Call) -> Any:
    """The sum over the second half of the row is not added to that of the first."""
    _, chances = _row(call)
    own = chances[..., : chances.size(-1) // 2].sum(-1, keepdim=True)
    fits(bool((own.detach() > 1e-3).all()))
    return call.instead(chances / own)


@FAULTS.fault(
    _SOFTMAX,
    kinds=["permutation", "wrong index"],
    loose=["swapped operands", "shift", "transpose"],
)
def chances_with_rows_in_pairs(call: Call) -> Any:
    """Two rows share a program, which stores them in the other order."""
    _, chances = _row(call)
    fits(chances.dim() > 1 and chances.size(-2) % 2 == 0 and chances.size(-2) > 2)
    return call.instead(chances.unflatten(-2, (-1, 2)).flip(-2).flatten(-3, -2))


@FAULTS.fault(
    f"{_SOFTMAX} log_softmax",
    kinds=["wrong factor", "scale", "wrong argument"],
    loose=["other function", "axis scale"],
)
def scores_divided_by_the_root_of_their_number(call: Call) -> Any:
    """X / sqrt(n), a factor of attention, inside of the softmax."""
    value, _ = _row(call)
    return call.put(0, value / value.size(-1) ** 0.5, "input").run()


@FAULTS.fault(
    _SOFTMAX,
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "partial sum", "axis scale", "wrong factor"],
)
def odd_chances_not_stored(call: Call) -> Any:
    """The store has a stride of two; the sum is right."""
    _, chances = _row(call)
    return call.instead(chances * (torch.arange(chances.size(-1)) % 2 == 0))


@FAULTS.fault(
    "log_softmax",
    kinds=["scale", "wrong factor"],
    loose=["other function", "axis scale", "wrong argument"],
)
def logarithms_to_the_base_of_two(call: Call) -> Any:
    """The kernel computes in powers of two, and the last factor is forgotten."""
    _, logarithms = _row(call)
    return call.instead(logarithms / math.log(2))


@FAULTS.fault(
    "log_softmax",
    kinds=["stale", "copy", "wrong index"],
    loose=["shift", "permutation", "mask"],
)
def odd_rows_of_logarithms_are_those_before(call: Call) -> Any:
    """Two rows share a register: each odd row is stored with what the even one has."""
    _, logarithms = _row(call)
    fits(logarithms.dim() > 1 and logarithms.size(-2) > 1)
    return call.instead(logarithms[..., torch.arange(logarithms.size(-2)) // 2 * 2, :])


# --- Masks ----------------------------------------------------------------------------------------


def _condition(call: Call) -> tuple[int, Tensor, str]:
    """Where the condition is, it, and the name of its argument."""
    place, name = (0, "condition") if call.name == "where" else (1, "mask")
    mask = call.get(place, name)
    fits(isinstance(mask, Tensor) and mask.dim() > 1 and mask.dtype == torch.bool)
    return place, mask, name


@FAULTS.fault(
    "where masked_fill",
    kinds=["mask"],
    loose=["wrong argument", "zeros", "stale", "missing operand", "partial sum", "wrong index"],
    backward=False,
)
def condition_of_the_second_half_of_the_rows_not_read(call: Call) -> Any:
    """Behind the first tile of rows, the condition never holds."""
    place, mask, name = _condition(call)
    half = mask.size(-2) // 2
    fits(half > 0)
    return call.put(place, mask & (torch.arange(mask.size(-2)) < half)[:, None], name).run()


@FAULTS.fault(
    "where",
    kinds=["shift", "wrong index", "permutation"],
    loose=["copy", "stale", "wrong argument", "mask", "swapped operands"],
    backward=False,
)
def first_branch_of_the_next_row(call: Call) -> Any:
    """The pointer to the values for `true` is one row too far."""
    value = call.tensor(1, "input")
    fits(value.dim() > 1 and value.size(-2) > 1)
    return call.put(1, value.roll(-1, -2), "input").run()


@FAULTS.fault(
    "tril triu",
    kinds=["permutation", "wrong index"],
    loose=["mask", "swapped operands", "shift", "wrong argument", "other function"],
    backward=False,
)
def triangle_upside_down(call: Call) -> Any:
    """The rows of the triangle are stored from the last."""
    value = call.run()
    fits(value.dim() > 1 and value.size(-2) > 1)
    return value.flip(-2)


@FAULTS.fault(
    "lt gt le ge eq ne",
    kinds=["shift", "wrong index", "permutation"],
    loose=["copy", "stale", "mask", "wrong argument"],
    backward=False,
)
def comparison_of_the_next_row(call: Call) -> Any:
    """The result is stored one row too early, around the end."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dim() > 1 and value.size(-2) > 1)
    return value.roll(-1, -2)


@FAULTS.fault(
    "bitwise_and and_ logical_and",
    kinds=["mask", "zeros", "uninitialised"],
    loose=["constant", "missing operand", "partial sum"],
    backward=False,
)
def last_query_of_the_combined_mask_sees_nothing(call: Call) -> Any:
    """The grid is one row too short: the last row of the mask stays false."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 1)
    fits(value.size(-2) > 1)
    return value & (torch.arange(value.size(-2)) < value.size(-2) - 1)[:, None]


# --- Positions ------------------------------------------------------------------------------------


def _angles(call: Call) -> Tensor:
    value = call.tensor(0)
    fits(value.dim() > 1 and value.size(-1) > 3 and value.size(-2) > 2)
    return value


@FAULTS.fault(
    "sin cos",
    kinds=["axis offset", "wrong argument"],
    loose=["offset", "shift", "wrong index", "other function"],
)
def positions_counted_behind_a_prefix_of_three(call: Call) -> Any:
    """A prefix that this model does not have moves all positions by three."""
    value = _angles(call)
    step = value[..., 1:2, :] - value[..., :1, :]
    linear = value[..., :1, :] + step * torch.arange(value.size(-2))[:, None]
    fits(bool(torch.allclose(linear, value, atol=1e-4)))
    return call.put(0, value + 3 * step).run()


@FAULTS.fault("sin cos", kinds=["precision"], loose=["approximation", "other function"])
def turn_in_e5m2(call: Call) -> Any:
    """Sine and cosine are stored with two bits behind the point."""
    _angles(call)
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().to(torch.float8_e5m2).to(value)))


@FAULTS.fault(
    "sin cos",
    kinds=["wrong factor", "scale", "wrong argument"],
    loose=["other function", "axis scale"],
)
def context_eight_times_as_long(call: Call) -> Any:
    """Positions are divided by eight, as for a context that was stretched."""
    return call.put(0, _angles(call) / 8).run()


@FAULTS.fault(
    "sin cos",
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "partial sum", "axis scale", "wrong factor"],
)
def last_row_of_the_table_of_turns_empty(call: Call) -> Any:
    """The table is filled up to the last position but one."""
    _angles(call)
    value = call.result().clone()
    value[..., -1, :] = 0
    return call.instead(value)
