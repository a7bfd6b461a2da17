"""Faults of the eighth set: attention, softmax, masks, positions."""

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
    return call.instead(_hide(scores, mask).softmax(-1) @ value)


def _seen(mask: Tensor) -> Tensor:
    """Which keys are seen, as booleans."""
    return mask if mask.dtype == torch.bool else mask > -1e4


def _bias(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, what is added to them (finite numbers), values."""
    scores, mask, value = _parts(call)
    fits(mask is not None and mask.is_floating_point())
    assert mask is not None
    fits(bool((mask.detach().abs() < 1e3).all()) and bool(mask.detach().any()))
    return scores, mask, value


def _halves(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden scores of two blocks of keys, and their values."""
    scores, mask, value = _parts(call)
    half = scores.size(-1) // 2
    fits(half > 1)
    hidden = _hide(scores, mask).clamp(min=-1e30)
    return hidden[..., :half], hidden[..., half:], value[..., :half, :], value[..., half:, :]


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "scale", "wrong argument"],
    loose=["other function", "axis scale", "missing operand"],
)
def root_of_the_width_multiplies(call: Call) -> Any:
    """Scores times the root of the width of a head, and not divided by it."""
    query, key, value, _ = _operands(call)
    scores = query @ key.mT * query.size(-1) ** 0.5
    return _weigh(call, scores, _mask(call, *scores.shape[-2:]), value)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "axis scale", "other function", "wrong statistics"],
    loose=["scale", "wrong argument", "missing operand"],
)
def query_divided_by_its_length_over_all_heads(call: Call) -> Any:
    """A norm by the root mean square of heads and features together, as in another model."""
    query = call.tensor(0, "query")
    fits(query.dim() == 4)
    size = (query.square().mean((1, 3), keepdim=True) + 1e-6).sqrt()
    return call.put(0, query / size, "query").run()


@FAULTS.fault(
    _FUSED,
    kinds=["wrong index", "wrong factor", "axis scale", "stale"],
    loose=["scale", "wrong argument", "wrong rank's shard", "shift", "permutation"],
)
def keys_with_the_scale_of_the_other_block(call: Call) -> Any:
    """Two blocks of keys are stored with a step each, and read with the step of the other."""
    key = call.tensor(1, "key")
    half = key.size(-2) // 2
    fits(half > 1)
    first, second = key[..., :half, :], key[..., half:, :]
    sizes = [one.detach().abs().amax((-2, -1), keepdim=True) for one in (first, second)]
    ratio = sizes[1] / sizes[0]
    return call.put(1, torch.cat([first * ratio, second / ratio], -2), "key").run()


@FAULTS.fault(
    _FUSED,
    kinds=["sign", "wrong factor", "other function", "wrong statistics"],
    loose=["wrong reduction", "scale", "axis scale", "wrong argument", "approximation"],
)
def correction_of_the_first_block_inverted(call: Call) -> Any:
    """An online softmax: exp(new - old) for exp(old - new), in the sum and in the accumulator."""
    first, second, left, right = _halves(call)
    old = first.amax(-1, keepdim=True)
    new = torch.maximum(old, second.amax(-1, keepdim=True))
    fits(bool((new.detach() - old.detach() < 50).all()))
    before, after = (first - old).exp() * (new - old).exp(), (second - new).exp()
    total = before.sum(-1, keepdim=True) + after.sum(-1, keepdim=True)
    return call.instead((before @ left + after @ right) / total)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong factor", "wrong argument", "other function", "wrong statistics"],
    loose=["scale", "wrong reduction", "axis scale", "approximation"],
)
def blocks_merged_in_another_base(call: Call) -> Any:
    """Logarithms of the sums of two blocks are in base two, and are merged with that of e."""
    first, second, left, right = _halves(call)
    sums = [one.logsumexp(-1, keepdim=True) / math.log(2) for one in (first, second)]
    share = (sums[0] - sums[1]).sigmoid()
    mixed = share * (first.softmax(-1) @ left) + (1 - share) * (second.softmax(-1) @ right)
    return call.instead(mixed)


@FAULTS.fault(
    _FUSED,
    kinds=["clipped", "other function", "wrong statistics"],
    loose=["approximation", "stale", "wrong reduction", "mask", "wrong argument"],
)
def scores_not_above_the_first_blocks_largest(call: Call) -> Any:
    """The maximum is that of the first block, and exponents above zero are cut to zero."""
    scores, mask, value = _parts(call)
    half = scores.size(-1) // 2
    fits(half > 1)
    hidden = _hide(scores, mask)
    top = hidden[..., :half].amax(-1, keepdim=True)
    fits(bool(top.detach().isfinite().all()))
    return call.instead(torch.minimum(hidden, top).softmax(-1) @ value)


@FAULTS.fault(
    _FUSED,
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "shift", "constant", "wrong argument", "wrong rank's shard"],
)
def two_heads_ask_with_the_second_of_them(call: Call) -> Any:
    """Heads are taken in pairs, and the query of the first of a pair is overwritten."""
    query = call.tensor(0, "query")
    fits(query.dim() == 4 and query.size(1) % 2 == 0)
    places = torch.arange(query.size(1)) | 1
    return call.instead(call.put(0, query[:, places], "query").result())


@FAULTS.fault(
    _FUSED,
    kinds=["other function", "wrong reduction"],
    loose=["wrong statistics", "missing operand", "approximation", "zeros", "clipped"],
)
def rectified_scores_divided_by_the_keys(call: Call) -> Any:
    """Relu(s) / n in the place of a softmax, as in a variant for images."""
    scores, mask, value = _parts(call)
    return call.instead(_hide(scores, mask).relu() @ value / scores.size(-1))


@FAULTS.fault(
    _FUSED,
    kinds=["other function", "wrong reduction", "wrong axis"],
    loose=["approximation", "wrong statistics", "missing operand", "wrong argument"],
)
def queries_and_keys_normalised_apart(call: Call) -> Any:
    """Efficient attention: a softmax of each query, and one of the keys over the positions."""
    query, key, value, _ = _operands(call)
    fits(_mask(call, query.size(-2), key.size(-2)) is None)
    return call.instead(query.softmax(-1) @ (key.softmax(-2).mT @ value))


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "wrong argument"],
    loose=["wrong index", "other function", "partial sum", "wrong reduction"],
)
def newest_key_seen_by_every_query(call: Call) -> Any:
    """The slot that was just written has no bit in the mask."""
    scores, mask, value = _parts(call)
    fits(mask is not None and scores.size(-1) > 2)
    assert mask is not None
    fits(mask.size(-1) == scores.size(-1))
    changed = mask.clone()
    changed[..., -1] = True if mask.dtype == torch.bool else 0.0
    return _weigh(call, scores, changed, value)


@FAULTS.fault(
    _FUSED,
    kinds=["mask", "wrong argument", "constant", "clipped"],
    loose=["approximation", "offset", "other function", "precision", "wrong factor", "eps"],
)
def hidden_keys_get_minus_four(call: Call) -> Any:
    """The mask is too small a number: what is hidden still shines through."""
    scores, mask, value = _parts(call)
    fits(mask is not None)
    assert mask is not None
    hidden = ~_seen(mask)
    fits(bool(hidden.any()))
    added = torch.zeros(mask.shape, dtype=scores.dtype).masked_fill(hidden, -4.0)
    return _weigh(call, scores, added, value)


@FAULTS.fault(
    _FUSED,
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "missing operand", "partial sum", "axis scale", "wrong factor"],
)
def rows_of_the_second_warp_empty(call: Call) -> Any:
    """Of four queries, the last two are not stored."""
    value = call.result()
    fits(value.size(-2) > 2)
    kept = torch.arange(value.size(-2)) % 4 < 2
    return call.instead(value.masked_fill(~kept[:, None], 0))


@FAULTS.fault(
    _FUSED,
    kinds=["residual", "stale", "doubled reduction"],
    loose=["offset", "lost accumulation", "shift", "wrong index", "wrong reduction"],
)
def accumulator_kept_from_the_head_before(call: Call) -> Any:
    """Each head but the first begins with what the head before it has written."""
    value = call.result()
    fits(value.dim() == 4 and value.size(1) > 1)
    before = torch.cat([torch.zeros_like(value[:, :1]), value[:, :-1]], 1)
    return call.instead(value + before)


@FAULTS.fault(
    _FUSED,
    kinds=["shift", "wrong index", "permutation"],
    loose=["copy", "stale", "wrong argument", "swapped operands"],
)
def pointer_to_the_values_one_element_too_far(call: Call) -> Any:
    """The last feature of each position is the first of the next one; the very last goes around."""
    value = call.tensor(2, "value")
    fits(value.size(-1) > 1)
    moved = value.flatten().roll(-1).view(value.shape)
    return call.instead(call.put(2, moved, "value").result())


@FAULTS.fault(_FUSED, kinds=["precision"], loose=["approximation", "other function"])
def accumulator_of_the_values_in_bfloat16(call: Call) -> Any:
    """After every two keys, what was summed is rounded to eight bits."""
    scores, mask, value = _parts(call)
    weights = _hide(scores, mask).softmax(-1).detach()
    total = torch.zeros_like(call.result())
    for place in range(0, weights.size(-1), 2):
        term = weights[..., place : place + 2] @ value.detach()[..., place : place + 2, :]
        total = (total + term).bfloat16().to(total.dtype)
    return call.instead(with_gradient_of(call.result(), total))


@FAULTS.fault(
    _FUSED,
    kinds=["wrong statistics", "wrong index", "axis scale", "wrong factor"],
    loose=["scale", "shift", "stale", "wrong reduction", "permutation"],
)
def sums_of_the_next_head_divide(call: Call) -> Any:
    """The pointer to the sums of the exponentials is one head too far."""
    scores, mask, value = _parts(call)
    fits(scores.dim() == 4 and scores.size(1) > 1)
    hidden = _hide(scores, mask)
    weights = (hidden - hidden.detach().amax((1, 3), keepdim=True)).exp()
    return call.instead(weights @ value / weights.sum(-1, keepdim=True).roll(-1, 1))


@FAULTS.fault(
    _FUSED,
    kinds=["other function", "residual", "offset"],
    loose=["axis offset", "wrong argument", "mask", "missing operand", "wrong reduction"],
)
def bias_added_behind_the_softmax(call: Call) -> Any:
    """The weights get the bias of the positions, and not the scores."""
    scores, bias, value = _bias(call)
    return call.instead((scores.softmax(-1) + bias) @ value)


@FAULTS.fault(
    _FUSED,
    kinds=["wrong index", "copy", "mask"],
    loose=["transpose", "permutation", "stale", "sign", "wrong argument"],
)
def bias_of_the_distance_without_its_sign(call: Call) -> Any:
    """A key behind the query gets the bias of one as far before it."""
    scores, bias, value = _bias(call)
    fits(bias.size(-1) == bias.size(-2))
    return _weigh(call, scores, bias.tril() + bias.tril(-1).mT, value)


# --- Softmax --------------------------------------------------------------------------------------

_SOFTMAX = "softmax _safe_softmax"


def _row(call: Call) -> tuple[Tensor, Tensor]:
    """Scores over the last axis, and the result."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(isinstance(dim, int) and dim % value.dim() == value.dim() - 1 and value.size(-1) > 2)
    return value, call.result()


@FAULTS.fault(
    _SOFTMAX,
    kinds=["off by one reduction", "partial sum", "wrong statistics", "wrong reduction"],
    loose=["axis scale", "wrong factor", "scale", "lost accumulation", "missing operand"],
)
def one_of_the_largest_not_in_the_sum(call: Call) -> Any:
    """The first term of an online sum, exp(0), is not added: the sum begins with zero."""
    _, chances = _row(call)
    rest = 1 - chances.amax(-1, keepdim=True)
    fits(bool((rest.detach() > 0.01).all()))
    return call.instead(chances / rest)


@FAULTS.fault(
    _SOFTMAX,
    kinds=["other function"],
    loose=["wrong statistics", "approximation", "scale", "wrong argument", "doubled reduction"],
)
def softmax_of_the_softmax(call: Call) -> Any:
    """The scores come from a part that is normalised already."""
    _, chances = _row(call)
    return call.instead(chances.softmax(-1))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["partial sum", "missing reduction", "wrong reduction", "one rank's part"],
    loose=["wrong statistics", "axis scale", "wrong factor", "scale", "wrong index"],
)
def lanes_keep_their_own_sums(call: Call) -> Any:
    """Two lanes take the columns in turn, and each divides by its own sum."""
    value, chances = _row(call)
    lane = torch.arange(value.size(-1)) % 2
    own = [(chances * (lane == one)).sum(-1, keepdim=True) for one in (0, 1)]
    return call.instead(chances / torch.where(lane == 0, *own).clamp(min=1e-30))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["stale", "wrong index", "shift", "copy"],
    loose=["mask", "permutation", "wrong rank's shard"],
)
def second_half_of_the_row_before(call: Call) -> Any:
    """The second tile of a row is stored before it is computed: it has that of the last row."""
    _, chances = _row(call)
    fits(chances.dim() > 1 and chances.size(-2) > 1)
    half = chances.size(-1) // 2
    return call.instead(torch.cat([chances[..., :half], chances.roll(1, -2)[..., half:]], -1))


@FAULTS.fault(
    _SOFTMAX,
    kinds=["doubled reduction", "wrong factor", "scale", "wrong statistics"],
    loose=["wrong reduction", "axis scale", "one rank's part"],
)
def sum_reduced_over_two_ranks_with_the_same_row(call: Call) -> Any:
    """The sum that divides is added up over two ranks, which both have all of the row."""
    _, chances = _row(call)
    return call.instead(chances / 2)


@FAULTS.fault(
    "log_softmax",
    kinds=["axis offset", "missing operand", "wrong statistics", "residual"],
    loose=["offset", "other function", "wrong reduction", "missing reduction"],
)
def largest_not_added_back_to_the_logarithm(call: Call) -> Any:
    """X - log(sum exp(x - max)): the maximum is subtracted within, and forgotten outside."""
    value, _ = _row(call)
    top = value.amax(-1, keepdim=True)
    return call.instead(value - (value - top).logsumexp(-1, keepdim=True))


# --- Masks ----------------------------------------------------------------------------------------


def _condition(call: Call) -> tuple[int, Tensor, str]:
    """Where the condition is, it, and the name of its argument."""
    place, name = (0, "condition") if call.name == "where" else (1, "mask")
    mask = call.get(place, name)
    fits(isinstance(mask, Tensor) and mask.dim() > 1 and mask.dtype == torch.bool)
    return place, mask, name


@FAULTS.fault(
    "where masked_fill",
    kinds=["permutation", "wrong index", "mask"],
    loose=["shift", "swapped operands", "wrong argument", "transpose"],
    backward=False,
)
def bits_of_the_mask_from_the_high_end(call: Call) -> Any:
    """Four columns of a mask share a word, and its bits are read in the other order."""
    place, mask, name = _condition(call)
    whole = mask.size(-1) // 4 * 4
    fits(whole > 0)
    turned = mask[..., :whole].unflatten(-1, (-1, 4)).flip(-1).flatten(-2)
    return call.put(place, torch.cat([turned, mask[..., whole:]], -1), name).run()


@FAULTS.fault(
    "where masked_fill",
    kinds=["copy", "stale", "wrong index", "mask"],
    loose=["constant", "permutation", "wrong argument"],
    backward=False,
)
def condition_of_the_first_column_for_all(call: Call) -> Any:
    """The stride of the columns of the mask is zero."""
    place, mask, name = _condition(call)
    fits(mask.size(-1) > 1)
    return call.put(place, mask[..., :1].expand(mask.shape).clone(), name).run()


@FAULTS.fault(
    "where",
    kinds=["shift", "wrong index", "permutation"],
    loose=["copy", "stale", "wrong argument", "mask", "swapped operands"],
    backward=False,
)
def second_branch_of_the_next_row(call: Call) -> Any:
    """The pointer to the values for `false` is one row too far."""
    other = call.tensor(2, "other")
    fits(other.dim() > 1 and other.size(-2) > 1)
    return call.put(2, other.roll(-1, -2), "other").run()


@FAULTS.fault(
    "tril triu",
    kinds=["mask", "wrapped", "wrong index"],
    loose=["wrong argument", "other function", "copy", "zeros", "permutation"],
    backward=False,
)
def triangle_of_each_tile(call: Call) -> Any:
    """Rows and columns are compared by their numbers within a tile of four."""
    value = call.args[0]
    fits(value.size(-1) > 4 and value.size(-2) > 4)
    diagonal = call.get(1, "diagonal", default=0)
    rows, columns = torch.arange(value.size(-2)) % 4, torch.arange(value.size(-1)) % 4
    far = columns[None, :] - rows[:, None]
    kept = far <= diagonal if call.name == "tril" else far >= diagonal
    return value * kept.to(value.dtype)


@FAULTS.fault(
    "eq ne lt gt le ge",
    kinds=["copy", "stale", "wrong index", "mask"],
    loose=["permutation", "shift", "constant", "wrong argument"],
    backward=False,
)
def even_rows_of_the_comparison_twice(call: Call) -> Any:
    """A pair of rows shares one word of bits, that of the first."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dim() > 1 and value.size(-2) > 1)
    return value[..., torch.arange(value.size(-2)) // 2 * 2, :]


@FAULTS.fault(
    "bitwise_and and_ logical_and",
    kinds=["transpose", "permutation", "wrong index", "mask"],
    loose=["swapped operands", "wrong argument", "shift"],
    backward=False,
)
def combined_mask_transposed(call: Call) -> Any:
    """Keys by queries for queries by keys."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 1)
    fits(value.size(-1) == value.size(-2))
    return value.mT.contiguous()


# --- Rotary positions -----------------------------------------------------------------------------


def _angles(call: Call) -> Tensor:
    value = call.tensor(0)
    fits(value.dim() > 1 and value.size(-1) > 3 and value.size(-2) > 1)
    return value


@FAULTS.fault(
    "sin cos",
    kinds=["wrong factor", "scale", "wrong argument"],
    loose=["other function", "axis scale", "missing operand"],
)
def turns_taken_for_radians(call: Call) -> Any:
    """An instruction that takes turns: the angle is divided by 2 pi, and nothing undoes it."""
    return call.put(0, _angles(call) / (2 * math.pi)).run()


@FAULTS.fault(
    "sin cos",
    kinds=["permutation", "wrong index"],
    loose=["shift", "wrong argument", "transpose", "swapped operands"],
)
def table_of_the_turns_from_the_last_position(call: Call) -> Any:
    """The rows of the table are stored from the end."""
    return call.put(0, _angles(call).flip(-2)).run()


@FAULTS.fault(
    "sin cos",
    kinds=["copy", "stale", "wrong index"],
    loose=["permutation", "shift", "wrong argument", "constant"],
)
def two_frequencies_share_the_first(call: Call) -> Any:
    """Feature 2 i + 1 turns as feature 2 i does."""
    value = _angles(call)
    return call.put(0, value[..., torch.arange(value.size(-1)) // 2 * 2]).run()


@FAULTS.fault(
    "sin cos", kinds=["precision", "approximation"], loose=["other function", "wrong argument"]
)
def angle_in_steps_of_a_64th_of_a_turn(call: Call) -> Any:
    """A phase accumulator of six bits."""
    value = _angles(call)
    step = 2 * math.pi / 64
    coarse = (value.detach() / step).round() * step
    return call.put(0, with_gradient_of(value, coarse)).run()


@FAULTS.fault("sin cos", kinds=["approximation", "other function"], loose=["precision"])
def parabola_for_half_a_turn(call: Call) -> Any:
    """4 x (pi - x) / pi^2 for half a turn, and a sign: one step of a well-known fast sine."""
    value = _angles(call)
    turned = value + math.pi / 2 if call.name == "cos" else value
    within = turned.remainder(math.pi)
    sign = 1 - 2 * (turned.detach() / math.pi).floor().remainder(2)
    return call.instead(sign * 4 * within * (math.pi - within) / math.pi**2)


@FAULTS.fault("sin cos", kinds=["clipped"], loose=["other function", "wrong argument", "mask"])
def angle_limited_to_half_a_turn(call: Call) -> Any:
    """The function knows angles up to pi, and cuts larger ones."""
    return call.put(0, _angles(call).clamp(-math.pi, math.pi)).run()
