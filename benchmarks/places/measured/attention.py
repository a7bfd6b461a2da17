"""Faults for measuring: attention, softmax, masks, positions."""

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
_EMPTY: dict[str, Any] = {
    "kinds": ["zeros", "mask", "uninitialised"],
    "loose": ["constant", "missing operand", "partial sum", "axis scale", "wrong factor"],
}
_MOVED: dict[str, Any] = {
    "kinds": ["shift", "wrong index", "permutation"],
    "loose": ["stale", "copy", "wrong argument", "wrong rank's shard"],
}
_COPIED: dict[str, Any] = {
    "kinds": ["copy", "stale", "wrong index"],
    "loose": ["permutation", "shift", "constant", "wrong argument", "wrong rank's shard"],
}
_ROUNDED: dict[str, Any] = {
    "kinds": ["precision"],
    "loose": ["approximation", "other function", "wrong argument"],
}
_FACTOR: dict[str, Any] = {
    "kinds": ["wrong factor", "scale", "wrong argument"],
    "loose": ["axis scale", "other function"],
}
_HIDDEN: dict[str, Any] = {
    "kinds": ["mask", "wrong argument"],
    "loose": ["partial sum", "wrong index", "other function", "missing operand", "zeros"],
}


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


def _scaled(call: Call, factor: float) -> Any:
    """Attention with its scores times one more factor, before the mask."""
    scores, mask, value = _parts(call)
    return _weigh(call, factor * scores, mask, value)


def _narrowed(call: Call, seen: Tensor) -> Any:
    """Attention in which some of the keys are hidden as well."""
    scores, value = _hidden(call)
    return _weigh(call, scores, seen, value)


def _heads(call: Call, least: int = 2) -> Tensor:
    """The result, with several heads."""
    value = call.result()
    fits(value.dim() == 4 and value.size(1) >= least)
    return value


def _with(call: Call, place: int, value: Tensor) -> Any:
    """The call with another query, key or value."""
    return call.instead(call.put(place, value, _NAMES[place]).result())


def _coarse(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in a narrower format, with its own gradient."""
    return with_gradient_of(value, value.detach().to(dtype).to(value.dtype))


@FAULTS.fault(_FUSED, **_FACTOR)
def factor_written_for_heads_of_80(call: Call) -> Any:
    """The factor of the scores is the number 80 ** -0.5, whatever the width of a head is."""
    return _scaled(call, 80**-0.5 / _operands(call)[3])


@FAULTS.fault(_FUSED, **_FACTOR)
def factor_of_a_context_sixteen_times_as_long(call: Call) -> Any:
    """Scores times (1 + 0.1 log 16)^2, the temperature of a stretched context that is not used."""
    return _scaled(call, (1 + 0.1 * math.log(16)) ** 2)


@FAULTS.fault(
    _FUSED,
    kinds=[*_FACTOR["kinds"], "other function"],
    loose=["axis scale", "approximation"],
)
def weights_as_powers_of_ten(call: Call) -> Any:
    """10 ** s for exp(s): the scores after the mask are read as decimal exponents."""
    scores, value = _hidden(call)
    return _weigh(call, math.log(10) * scores, None, value)


@FAULTS.fault(_FUSED, **_HIDDEN)
def window_of_four_tokens(call: Call) -> Any:
    """Each token sees itself and the three before it: a sliding window of another model."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    rows = query.size(-2)
    fits(rows == key.size(-2) and rows > 4)
    distance = torch.arange(rows)[:, None] - torch.arange(rows)
    return _narrowed(call, (distance >= 0) & (distance < 4))


@FAULTS.fault(_FUSED, **_HIDDEN)
def last_two_keys_taken_for_padding(call: Call) -> Any:
    """The lengths are two too small: the last two keys are hidden from all who see others."""
    keys = call.tensor(1, "key").size(-2)
    fits(keys > 3)
    return _narrowed(call, torch.arange(keys) < keys - 2)


@FAULTS.fault(_FUSED, **_HIDDEN)
def every_third_key_hidden(call: Call) -> Any:
    """The bits of the keys 2, 5, 8 and so on are not set in the mask."""
    keys = call.tensor(1, "key").size(-2)
    fits(keys > 3)
    return _narrowed(call, torch.arange(keys) % 3 != 2)


@FAULTS.fault(_FUSED, **_HIDDEN)
def encoder_sees_itself_and_what_follows(call: Call) -> Any:
    """An encoder without a mask gets a triangle, and that of the wrong side."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    rows = query.size(-2)
    fits(rows == key.size(-2) and rows > 2 and _mask(call, rows, rows) is None)
    return _narrowed(call, torch.ones(rows, rows, dtype=torch.bool).triu())


@FAULTS.fault(
    _FUSED,
    kinds=["axis offset", "wrong argument", "mask"],
    loose=["offset", "residual", "other function", "missing operand"],
)
def first_key_favoured_by_one(call: Call) -> Any:
    """A learned bias for the first key is left on: its scores are larger by one."""
    scores, value = _hidden(call)
    fits(scores.size(-1) > 2)
    return _weigh(call, scores + (torch.arange(scores.size(-1)) == 0).to(scores), None, value)


@FAULTS.fault(_FUSED, **_MOVED)
def values_of_the_slot_before(call: Call) -> Any:
    """The cache of the values is read one slot too early, around the end; the keys are right."""
    query, value = call.tensor(0, "query"), call.tensor(2, "value")
    fits(value.size(-2) > 2 and _mask(call, query.size(-2), value.size(-2)) is not None)
    return _with(call, 2, value.roll(1, -2))


@FAULTS.fault(_FUSED, **_MOVED)
def features_of_each_head_one_late(call: Call) -> Any:
    """Each feature of the result is stored one place too far, the last of a head first."""
    value = call.result()
    fits(value.size(-1) > 2)
    return call.instead(value.roll(1, -1))


@FAULTS.fault(_FUSED, **_MOVED)
def keys_of_the_head_before(call: Call) -> Any:
    """The pointer to the keys is one head behind, around the end; the values are right."""
    key = call.tensor(1, "key")
    fits(key.dim() == 4 and key.size(1) > 2)
    return _with(call, 1, key.roll(1, 1))


@FAULTS.fault(_FUSED, **_COPIED)
def values_of_the_first_head_for_all(call: Call) -> Any:
    """The stride of the heads of the values is zero; queries and keys are right."""
    value = call.tensor(2, "value")
    fits(value.dim() == 4 and value.size(1) > 1)
    return _with(call, 2, value[:, :1].expand(value.shape).contiguous())


@FAULTS.fault(_FUSED, **_COPIED)
def lower_half_of_each_head_stored_twice(call: Call) -> Any:
    """The second tile along the features is that of the first."""
    value = call.result()
    fits(value.size(-1) % 2 == 0 and value.size(-1) > 2)
    half = value[..., : value.size(-1) // 2]
    return call.instead(torch.cat([half, half], -1))


@FAULTS.fault(
    _FUSED,
    kinds=["transpose", "permutation", "wrong index"],
    loose=["shift", "wrong axis", "swapped operands", "wrong argument"],
)
def values_of_the_cache_with_the_features_first(call: Call) -> Any:
    """The memory of the values is (feature, position), and is read as (position, feature)."""
    value = call.tensor(2, "value")
    fits(min(value.shape[-2:]) > 1)
    return _with(call, 2, value.mT.reshape(value.shape))


@FAULTS.fault(_FUSED, **_MOVED)
def features_of_the_query_two_early(call: Call) -> Any:
    """The features of a query are read two places too far, around the end; the keys are right."""
    query = call.tensor(0, "query")
    fits(query.size(-1) > 4)
    return _with(call, 0, query.roll(-2, -1))


@FAULTS.fault(_FUSED, **_ROUNDED)
def result_of_the_heads_in_bfloat16(call: Call) -> Any:
    """The epilogue stores with eight bits."""
    return call.instead(_coarse(call.result(), torch.bfloat16))


@FAULTS.fault(_FUSED, **_ROUNDED)
def scores_of_the_heads_in_e4m3(call: Call) -> Any:
    """The scores have three bits behind the point when they come to the softmax."""
    scores, mask, value = _parts(call)
    return _weigh(call, _coarse(scores, torch.float8_e4m3fn), mask, value)


@FAULTS.fault(
    _FUSED,
    kinds=["clipped"],
    loose=["other function", "approximation", "mask", "wrong argument"],
)
def keys_cut_at_a_quarter(call: Call) -> Any:
    """The range of the stored keys is -0.25 to 0.25."""
    return _with(call, 1, call.tensor(1, "key").clamp(-0.25, 0.25))


@FAULTS.fault(
    _FUSED,
    kinds=["scale", "wrong factor", "doubled reduction"],
    loose=["axis scale", "wrong argument", "wrong reduction"],
)
def result_summed_over_three_ranks_that_have_it_all(call: Call) -> Any:
    """Three ranks compute all heads, and their results are added."""
    return call.instead(3 * call.result())


@FAULTS.fault(
    _FUSED,
    kinds=["sign", "wrong factor", "axis scale", "mask"],
    loose=["scale", "other function"],
)
def odd_features_of_the_heads_negated(call: Call) -> Any:
    """The minus of a rotation is left on the result: every second feature of a head has it."""
    value = call.result()
    fits(value.size(-1) > 1)
    return call.instead(value * (1 - 2 * (torch.arange(value.size(-1)) % 2)).to(value))


@FAULTS.fault(_FUSED, **_EMPTY)
def first_head_not_stored(call: Call) -> Any:
    """The grid over the heads begins with one."""
    value = _heads(call, 3)
    return call.instead(value * (torch.arange(value.size(1)) > 0)[:, None, None])


@FAULTS.fault(_FUSED, **_EMPTY)
def every_third_query_not_stored(call: Call) -> Any:
    """Of three queries of a program, the last one is masked out when they are stored."""
    value = call.result()
    fits(value.size(-2) > 4)
    return call.instead(value * (torch.arange(value.size(-2)) % 3 != 2)[:, None])


@FAULTS.fault(
    _FUSED,
    kinds=["residual", "axis offset"],
    loose=["offset", "missing operand", "doubled reduction", "other function", "wrong index"],
)
def first_value_left_in_the_accumulator(call: Call) -> Any:
    """The accumulator is loaded with the first value instead of zeros, and nothing divides it."""
    value, result = _operands(call)[2], call.result()
    return call.instead(result + value[..., :1, :])


@FAULTS.fault(
    _FUSED,
    kinds=["axis scale", "wrong factor", "wrong statistics", "missing reduction"],
    loose=["scale", "missing operand", "mask", "wrong reduction", "other function"],
)
def newest_query_not_divided_by_its_sum(call: Call) -> Any:
    """The epilogue that divides by the sum of the exponentials ends one row too early."""
    scores, value = _hidden(call)
    fits(scores.size(-2) > 1)
    total = (scores - scores.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)
    last = (torch.arange(scores.size(-2)) == scores.size(-2) - 1)[:, None]
    return call.instead(scores.softmax(-1) @ value * torch.where(last, total, 1.0))


# --- Softmax --------------------------------------------------------------------------------------

_SOFTMAX = "softmax _safe_softmax"
_BOTH = f"{_SOFTMAX} log_softmax"


def _row(call: Call) -> tuple[Tensor, Tensor]:
    """Scores over the last axis, and the result."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(isinstance(dim, int) and dim % value.dim() == value.dim() - 1 and value.size(-1) > 2)
    return value, call.result()


@FAULTS.fault(_BOTH, **_FACTOR)
def temperature_of_ten(call: Call) -> Any:
    """The scores are divided by ten."""
    value, _ = _row(call)
    return call.put(0, value / 10, "input").run()


@FAULTS.fault(_BOTH, **_MOVED)
def two_columns_late_behind_the_softmax(call: Call) -> Any:
    """Each chance is stored two columns too far, the last two first."""
    _, chances = _row(call)
    fits(chances.size(-1) > 4)
    return call.instead(chances.roll(2, -1))


@FAULTS.fault(
    _BOTH,
    kinds=["permutation", "wrong index"],
    loose=["shift", "wrong argument", "swapped operands", "copy", "stale"],
)
def rows_of_chances_from_the_last(call: Call) -> Any:
    """The stride of the rows of the result is negative: the first row is stored last."""
    _, chances = _row(call)
    fits(chances.dim() > 1 and chances.size(-2) > 1)
    return call.instead(chances.flip(-2))


@FAULTS.fault(
    _BOTH,
    kinds=["transpose", "permutation", "wrong index"],
    loose=["wrong axis", "swapped operands", "shift", "wrong argument"],
)
def chances_of_a_square_transposed(call: Call) -> Any:
    """The softmax runs along the right axis and is stored with rows and columns exchanged."""
    _, chances = _row(call)
    fits(chances.dim() > 1 and chances.size(-2) == chances.size(-1))
    return call.instead(chances.mT)


@FAULTS.fault(_SOFTMAX, **_ROUNDED)
def chances_with_two_digits(call: Call) -> Any:
    """The chances have two digits behind the point."""
    _, chances = _row(call)
    return call.instead(with_gradient_of(chances, (chances.detach() * 100).round() / 100))


@FAULTS.fault("log_softmax", **_ROUNDED)
def logarithms_of_the_chances_in_e4m3(call: Call) -> Any:
    """The logarithms are stored with three bits behind the point."""
    return call.instead(_coarse(_row(call)[1], torch.float8_e4m3fn))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["clipped"],
    loose=["other function", "constant", "mask", "offset", "approximation"],
)
def no_chance_below_a_twentieth(call: Call) -> Any:
    """Chances are at least 0.05, so that a later logarithm is finite."""
    return call.instead(_row(call)[1].clamp(min=0.05))


@FAULTS.fault(
    _BOTH,
    kinds=["zeros", "mask", "constant"],
    loose=["wrong argument", "missing operand", "axis offset", "wrong index", "uninitialised",
           "wrong statistics"],
)  # fmt: skip
def last_score_loaded_as_zero(call: Call) -> Any:
    """The bound of the load is one too small, and what is not loaded is zero."""
    value, _ = _row(call)
    kept = torch.arange(value.size(-1)) < value.size(-1) - 1
    return call.put(0, torch.where(kept, value, 0.0), "input").run()


@FAULTS.fault(
    _SOFTMAX,
    kinds=["partial sum", "wrong reduction", "wrong statistics", "axis scale", "wrong factor"],
    loose=["scale", "mask", "missing reduction", "one rank's part", "wrong argument",
           "wrong axis", "wrong index"],
)  # fmt: skip
def each_two_columns_have_their_own_sum(call: Call) -> Any:
    """A pair of lanes is reduced, and not the whole row."""
    value, _ = _row(call)
    fits(value.size(-1) % 2 == 0 and value.size(-1) > 4)
    groups = value.clamp(min=-1e30).unflatten(-1, (-1, 2))
    return call.instead(groups.softmax(-1).flatten(-2))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["other function"],
    loose=["approximation", "wrong statistics", "wrong reduction", "wrong factor"],
)
def one_plus_elu_for_the_exponential(call: Call) -> Any:
    """(1 + elu(x)) / sum (1 + elu(x)), the map of a linear attention, in a softmax of its own."""
    value, _ = _row(call)
    weights = functional.elu(value) + 1
    return call.instead(weights / (weights.sum(-1, keepdim=True) + 1e-9))


# --- Masks ----------------------------------------------------------------------------------------


def _condition(call: Call) -> tuple[int, Tensor, str]:
    """Where the condition is, it, and the name of its argument."""
    place, name = (0, "condition") if call.name == "where" else (1, "mask")
    mask = call.get(place, name)
    fits(isinstance(mask, Tensor) and mask.dim() > 0 and mask.dtype == torch.bool)
    return place, mask, name


def _compared(call: Call) -> Tensor:
    """A comparison of more than one row and column."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 1)
    fits(min(value.shape[-2:]) > 2)
    return value


@FAULTS.fault(
    "masked_fill",
    kinds=["wrong argument", "constant", "mask"],
    loose=["offset", "approximation", "clipped", "other function"],
    backward=False,
)
def filled_with_minus_three(call: Call) -> Any:
    """What is hidden gets -3, and is only a little less likely."""
    number = call.get(2, "value")
    fits(isinstance(number, int | float) and number < -100)
    return call.put(2, -3.0, "value").run()


@FAULTS.fault(
    "where masked_fill",
    kinds=["mask", "shift", "wrong index", "permutation"],
    loose=["wrong argument", "stale", "copy"],
    backward=False,
)
def condition_of_the_next_row(call: Call) -> Any:
    """The mask is read one row too late, around the end."""
    place, mask, name = _condition(call)
    fits(mask.dim() > 1 and mask.size(-2) > 2)
    return call.put(place, mask.roll(-1, -2), name).run()


@FAULTS.fault(
    "where masked_fill",
    kinds=["mask", "zeros", "uninitialised"],
    loose=["missing operand", "stale", "copy", "wrong argument", "wrong index", "constant"],
    backward=False,
)
def condition_of_the_odd_columns_not_read(call: Call) -> Any:
    """A stride of two in the loop over the columns of the mask: the others are false."""
    place, mask, name = _condition(call)
    fits(mask.size(-1) > 2)
    return call.put(place, mask & (torch.arange(mask.size(-1)) % 2 == 0), name).run()


@FAULTS.fault(
    "lt gt le ge",
    kinds=["mask", "zeros", "uninitialised"],
    loose=["wrong index", "constant", "wrong argument", "missing operand", "other function"],
    backward=False,
)
def first_column_of_the_comparison_false(call: Call) -> Any:
    """The loop over the columns of the mask begins at one, and the memory is cleared."""
    value = _compared(call)
    return value & (torch.arange(value.size(-1)) > 0)


@FAULTS.fault(
    "lt gt le ge eq ne",
    kinds=["shift", "wrong index", "permutation", "mask"],
    loose=["copy", "stale", "wrong argument"],
    backward=False,
)
def comparison_stored_one_row_late(call: Call) -> Any:
    """Each row of the mask is stored one too far, the last one first."""
    return _compared(call).roll(1, -2)


# --- Positions ------------------------------------------------------------------------------------


def _angles(call: Call) -> Tensor:
    value = call.tensor(0)
    fits(value.dim() > 1 and value.size(-1) > 3 and value.size(-2) > 2)
    return value


@FAULTS.fault("sin cos", **_FACTOR)
def context_three_times_as_long(call: Call) -> Any:
    """All angles are a third: positions are interpolated where they should not be."""
    return call.put(0, _angles(call) / 3).run()


@FAULTS.fault("sin cos", **_ROUNDED)
def angles_in_bfloat16(call: Call) -> Any:
    """Positions times frequencies are computed under autocast."""
    return call.put(0, _coarse(_angles(call), torch.bfloat16)).run()


@FAULTS.fault("sin cos", **_ROUNDED)
def table_of_the_turns_in_half(call: Call) -> Any:
    """Sine and cosine are kept in float16."""
    _angles(call)
    return call.instead(_coarse(call.result(), torch.float16))


@FAULTS.fault(
    "sin cos",
    kinds=["mask", "constant", "zeros", "wrong factor", "axis scale"],
    loose=["scale", "missing operand", "other function", "wrong argument", "uninitialised"],
)
def first_quarter_of_the_features_not_turned(call: Call) -> Any:
    """The fastest frequencies are not written: their angles are zero."""
    value = _angles(call)
    return call.put(0, value * (torch.arange(value.size(-1)) >= value.size(-1) // 4)).run()


@FAULTS.fault(
    "sin cos",
    kinds=["axis offset", "wrong argument"],
    loose=["offset", "shift", "wrong index", "residual", "other function"],
)
def positions_counted_from_the_middle(call: Call) -> Any:
    """The angle of the position in the middle is subtracted from all."""
    value = _angles(call)
    middle = value.size(-2) // 2
    return call.put(0, value - value[..., middle : middle + 1, :]).run()
