"""Faults that were measured fourth and have been seen: attention, softmax, rotary positions."""

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


@FAULTS.fault(
    _FUSED, kinds=["mask"], loose=["wrong argument", "partial sum", "off by one reduction"]
)
def oldest_key_of_each_query_dropped(call: Call) -> Any:
    """A window that is one too short at its far end."""
    scores, mask, value = _parts(call)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool) if mask is None else mask
    fits(seen.dtype == torch.bool and scores.size(-1) > 3)
    oldest = (seen.cumsum(-1) == 1) & seen & (seen.sum(-1, keepdim=True) > 1)
    return _weigh(call, scores, seen & ~oldest, value)


@FAULTS.fault(_FUSED, kinds=["wrong argument", "wrong factor", "scale"], loose=["other function"])
def scale_of_the_padded_width(call: Call) -> Any:
    """The width of a head is padded to the next power of two but one before its root is taken."""
    scores, mask, value = _parts(call)
    width = call.tensor(0, "query").size(-1)
    padded = 2 ** (width.bit_length() + 1)
    return _weigh(call, scores * math.sqrt(width / padded), mask, value)


@FAULTS.fault(
    _FUSED, kinds=["wrong reduction", "wrong factor", "wrong statistics"],
    loose=["partial sum", "other function", "scale", "axis scale"],
)  # fmt: skip
def splits_merged_with_equal_weights(call: Call) -> Any:
    """Two splits of the keys: their results are averaged, whatever their sums are."""
    scores, mask, value = _parts(call)
    hidden = _hide(scores, mask)
    half = scores.size(-1) // 2
    fits(half > 0 and mask is None)
    first = hidden[..., :half].softmax(-1) @ value[..., :half, :]
    return call.instead((first + hidden[..., half:].softmax(-1) @ value[..., half:, :]) / 2)


@FAULTS.fault(_FUSED, kinds=["scale", "wrong factor"], loose=["wrong argument"])
def dropout_undone_that_was_not_done(call: Call) -> Any:
    """Divided by the chance to be kept although nothing is dropped."""
    return call.instead(call.result() / 0.9)


@FAULTS.fault(_FUSED, kinds=["permutation", "wrong index"], loose=["swapped operands", "shift"])
def values_of_the_heads_from_the_last(call: Call) -> Any:
    """The pointer to the values counts heads down."""
    scores, mask, value = _parts(call)
    fits(value.dim() == 4 and value.size(1) > 1)
    return _weigh(call, scores, mask, value.flip(1))


@FAULTS.fault(_FUSED, kinds=["copy", "wrong index", "stale"], loose=["permutation"])
def cache_of_the_first_sequence(call: Call) -> Any:
    """Every sequence of the batch reads keys and values of the first."""
    key, value = call.tensor(1, "key"), call.tensor(2, "value")
    fits(key.size(0) > 1)
    key, value = (one[:1].expand(one.shape).contiguous() for one in (key, value))
    return call.put(1, key, "key").put(2, value, "value").run()


@FAULTS.fault(_FUSED, kinds=["precision"], loose=["approximation"])
def query_in_float8(call: Call) -> Any:
    """The query goes through e4m3 with one scale."""
    query = call.tensor(0, "query")
    step = query.detach().abs().max() / 448
    narrow = (query.detach() / step).to(torch.float8_e4m3fn).to(query.dtype) * step
    return call.put(0, with_gradient_of(query, narrow), "query").run()


@FAULTS.fault(
    _FUSED, kinds=["partial sum"],
    loose=["missing operand", "mask", "wrong factor", "off by one reduction", "zeros"],
)  # fmt: skip
def last_features_not_in_the_scores(call: Call) -> Any:
    """Scores are summed over whole tiles of features only; the factor is the right one."""
    query, key, value, scale = _operands(call)
    width = query.size(-1) * 3 // 4
    fits(0 < width < query.size(-1))
    scores = query[..., :width] @ key[..., :width].mT * scale
    return _weigh(call, scores, _mask(call, *scores.shape[-2:]), value)


@FAULTS.fault(_FUSED, kinds=["mask"], loose=["wrong argument", "missing operand", "wrong index"])
def mask_of_the_first_head_only(call: Call) -> Any:
    """The mask is not broadcast: the other heads see everything."""
    scores, mask, value = _parts(call)
    fits(mask is not None and scores.dim() == 4 and scores.size(1) > 1)
    right, free = _hide(scores, mask), scores
    mixed = torch.cat([right[:, :1], free[:, 1:]], 1)
    return call.instead(mixed.softmax(-1) @ value)


@FAULTS.fault(
    _FUSED, kinds=["missing operand", "wrong argument", "wrong factor", "other function"],
    loose=["wrong reduction", "constant", "scale"],
)  # fmt: skip
def all_that_is_seen_weighs_the_same(call: Call) -> Any:
    """Scores of zero: a mean over the values."""
    scores, mask, value = _parts(call)
    return _weigh(call, 0 * scores, mask, value)


@FAULTS.fault(_FUSED, kinds=["precision"], loose=["approximation"])
def attention_stored_in_half(call: Call) -> Any:
    """The result goes through float16."""
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().half().to(value.dtype)))


@FAULTS.fault(
    _FUSED, kinds=["other function", "clipped"], loose=["wrong factor", "mask", "approximation"]
)
def scores_limited(call: Call) -> Any:
    """Scores beyond half of the largest are cut to it."""
    scores, mask, value = _parts(call)
    high = 0.5 * float(scores.detach().abs().max())
    return _weigh(call, scores.clamp(-high, high), mask, value)


@FAULTS.fault(_FUSED, kinds=["copy", "wrong index", "stale", "shift"], loose=["permutation"])
def key_of_the_last_step_not_appended(call: Call) -> Any:
    """The newest slot of the cache of keys still holds the key before it; its value is right."""
    key = call.tensor(1, "key").clone()
    fits(key.size(-2) > 2)
    key[..., -1, :] = key[..., -2, :]
    return call.put(1, key, "key").run()


@FAULTS.fault(_FUSED, kinds=["wrong factor", "axis scale"], loose=["scale", "wrong argument"])
def scale_counts_the_heads(call: Call) -> Any:
    """Each head has a factor of its own, as if the layer had a temperature for heads."""
    query = call.tensor(0, "query")
    fits(query.dim() == 4 and query.size(1) > 1)
    factor = torch.linspace(1, 2, query.size(1)).view(1, -1, 1, 1)
    return call.put(0, query * factor, "query").run()


@FAULTS.fault(_FUSED, kinds=["shift", "wrong index", "permutation"], loose=["copy"])
def queries_one_token_late(call: Call) -> Any:
    """Each token asks with the query of the one before it."""
    query = call.tensor(0, "query")
    fits(query.size(-2) > 2)
    return call.put(0, query.roll(1, -2), "query").run()


# --- Softmax --------------------------------------------------------------------------------------


@FAULTS.fault(
    "softmax _safe_softmax", kinds=["mask", "zeros", "off by one reduction", "partial sum"],
    loose=["wrong argument", "axis scale", "scale"],
)  # fmt: skip
def first_score_left_out(call: Call) -> Any:
    """The loop over a row begins at 1: the first chance is zero, and the others are larger."""
    value = call.tensor(0, "input")
    fits(value.size(-1) > 2)
    rest = value[..., 1:].softmax(-1)
    return call.instead(torch.cat([torch.zeros_like(value[..., :1]), rest], -1))


@FAULTS.fault("softmax log_softmax", kinds=["precision", "approximation"], loose=["other function"])
def scores_in_steps_of_a_half(call: Call) -> Any:
    """An integer softmax: scores are rounded to halves first."""
    value = call.tensor(0, "input")
    coarse = with_gradient_of(value, (2 * value.detach()).round() / 2)
    return call.put(0, coarse, "input").run()


@FAULTS.fault(
    "log_softmax", kinds=["wrong reduction", "other function", "wrong statistics"],
    loose=["axis offset", "offset", "missing operand"],
)  # fmt: skip
def mean_of_the_scores_subtracted(call: Call) -> Any:
    """The mean of a row in the place of the logarithm of its sum."""
    value = call.tensor(0, "input")
    return call.instead(value - value.mean(-1, keepdim=True))


@FAULTS.fault("softmax", kinds=["scale", "wrong factor"], loose=["axis scale", "wrong argument"])
def chances_times_their_number(call: Call) -> Any:
    """A row sums to its length: the mean of exponentials divides."""
    return call.instead(call.result() * call.tensor(0, "input").size(-1))


@FAULTS.fault("softmax", kinds=["other function"], loose=["approximation", "wrong factor"])
def powers_for_exponentials(call: Call) -> Any:
    """(1 + relu(x))^2 instead of exp(x), normalised: a linear attention."""
    value = call.tensor(0, "input")
    weight = (1 + value.relu()) ** 2
    return call.instead(weight / weight.sum(-1, keepdim=True))


@FAULTS.fault("softmax", kinds=["permutation", "wrong index"], loose=["shift", "transpose"])
def chances_stored_from_the_end_of_the_row(call: Call) -> Any:
    """Written with a negative stride."""
    return call.instead(call.result().flip(-1))


@FAULTS.fault(
    "softmax", kinds=["other function", "wrong statistics"],
    loose=["approximation", "wrong factor", "mask"],
)  # fmt: skip
def chances_made_sharper_and_smoothed(call: Call) -> Any:
    """A tenth of the mass is shared by all of the row."""
    value = call.result()
    return call.instead(0.9 * value + 0.1 / value.size(-1))


# --- Masks ----------------------------------------------------------------------------------------


@FAULTS.fault("masked_fill", kinds=["wrong argument", "constant"], loose=["mask", "offset"],
              backward=False)  # fmt: skip
def filled_with_the_smallest_score(call: Call) -> Any:
    """The smallest of all values is written where a large negative number was asked for."""
    value = call.tensor(0, "input")
    return call.put(2, float(value.detach().min()), "value").run()


@FAULTS.fault("where masked_fill", kinds=["mask", "copy", "wrong index"],
              loose=["wrong argument", "stale"], backward=False)  # fmt: skip
def condition_of_the_first_row_for_all(call: Call) -> Any:
    """The stride of the rows of the mask is zero."""
    place = 0 if call.name == "where" else 1
    mask = call.get(place, "condition", "mask")
    fits(isinstance(mask, Tensor) and mask.dim() > 1 and mask.size(-2) > 1)
    first = mask[..., :1, :].expand(mask.shape).contiguous()
    return call.put(place, first, "condition" if place == 0 else "mask").run()


@FAULTS.fault("where", kinds=["zeros", "missing operand", "mask", "constant"],
              loose=["other function", "wrong argument"], backward=False)  # fmt: skip
def nothing_in_the_other_branch(call: Call) -> Any:
    """A select by a product with the condition: 0 where it does not hold."""
    condition, value, other = call.args[:3]
    fits(isinstance(value, Tensor) and value.is_floating_point() and isinstance(other, Tensor))
    return call.instead(torch.where(condition, value, torch.zeros_like(other)))


@FAULTS.fault("tril triu", kinds=["mask"], loose=["wrong argument", "copy", "missing operand"])
def triangle_in_the_first_rows_only(call: Call) -> Any:
    """Rows behind the first tile keep all of their values."""
    value, result = call.args[0], call.run().clone()
    fits(value.size(-2) > 3)
    half = value.size(-2) // 2
    result[..., half - 1 :, :] = value[..., half - 1 :, :]
    return result


@FAULTS.fault("le ge lt gt eq ne", kinds=["constant", "mask", "missing operand"],
              loose=["other function", "wrong argument"], backward=False)  # fmt: skip
def condition_always_holds(call: Call) -> Any:
    """The comparison is folded to true."""
    return torch.ones_like(call.run())


@FAULTS.fault("and_ bitwise_and", kinds=["other function", "mask"], loose=["sign", "zeros"])
def either_and_not_both(call: Call) -> Any:
    """Exclusive or."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor) and left.dtype == torch.bool)
    return left ^ right


@FAULTS.fault("le ge lt gt", kinds=["swapped operands", "mask", "sign", "other function"],
              loose=["wrong argument"], backward=False)  # fmt: skip
def compared_by_magnitude(call: Call) -> Any:
    """The absolute values are compared."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor))
    return call.put(0, left.abs()).put(1, abs(right)).run()


# --- Rotary positions -----------------------------------------------------------------------------


def _angles(call: Call) -> Tensor:
    value = call.tensor(0)
    fits(value.dim() > 1 and value.size(-1) > 2 and value.size(-2) > 1)
    return value


@FAULTS.fault(
    "sin cos", kinds=["axis scale", "wrong factor", "wrong argument"], loose=["scale", "precision"]
)
def frequencies_of_another_base(call: Call) -> Any:
    """Each next frequency is lower by a little more."""
    value = _angles(call)
    fall = torch.linspace(0, 1, value.size(-1)).to(value.dtype)
    return call.put(0, value * 0.5**fall).run()


@FAULTS.fault("sin cos", kinds=["wrong factor", "axis scale", "scale"],
              loose=["mask", "wrong argument"])  # fmt: skip
def slow_frequencies_stretched(call: Call) -> Any:
    """The second half of the frequencies is divided by eight, as for a longer context."""
    value = _angles(call).clone()
    value[..., value.size(-1) // 2 :] /= 8
    return call.put(0, value).run()


@FAULTS.fault("sin cos", kinds=["copy", "constant", "wrong index", "stale"],
              loose=["missing operand"])  # fmt: skip
def angles_of_the_last_position_for_all(call: Call) -> Any:
    """Decoding one token: the table is read at one position."""
    value = _angles(call)
    return call.put(0, value[..., -1:, :].expand(value.shape).contiguous()).run()


@FAULTS.fault("sin cos", kinds=["scale", "wrong factor"], loose=["wrong argument"])
def table_of_angles_times_a_factor(call: Call) -> Any:
    """The factor of another way to stretch positions."""
    return call.instead(call.result() * 1.14)


@FAULTS.fault("sin cos", kinds=["approximation"], loose=["other function", "precision"])
def straight_lines_between_entries(call: Call) -> Any:
    """A table of sixteen entries for a turn, with straight lines between them."""
    value = call.tensor(0)
    step = 2 * math.pi / 16
    low = (value / step).floor() * step
    share = (value - low) / step
    first, second = call.put(0, low).result(), call.put(0, low + step).result()
    return call.instead(first + share * (second - first))


@FAULTS.fault("sin cos", kinds=["wrong factor", "scale", "wrong argument"],
              loose=["approximation", "constant"])  # fmt: skip
def degrees_for_radians(call: Call) -> Any:
    """The angle is taken as degrees."""
    return call.put(0, call.tensor(0) * (math.pi / 180)).run()
