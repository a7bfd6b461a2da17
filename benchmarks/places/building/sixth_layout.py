"""Faults that were measured sixth and have been seen: what moves values, tables, indices."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places import words
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from benchmarks.places.changes import computed, even, longer, on, result, rounded
from benchmarks.places.parts import floats_only, lookup_indices
from torch import Tensor

FAULTS = Catalogue()
_MEMORY = "view reshape flatten unflatten _unsafe_view"
_PARTS = "chunk split unbind split_with_sizes"


def _given(call: Call, least: int) -> list[Tensor]:
    """The parts that are joined."""
    parts = list(call.args[0])
    fits(len(parts) >= least)
    return [floats_only(one) for one in parts]


# --- What moves values ----------------------------------------------------------------------------


@FAULTS.forward("transpose permute t movedim", "permutation, wrong index; shift, swapped operands")
def neighbouring_rows_of_the_copy_exchanged(call: Call) -> Any:
    """Two rows of a tile are stored in the other order."""
    value = call.result()
    even = value.size(-2) // 2 * 2
    fits(value.dim() > 1 and even > 2)
    order = [place ^ 1 if place < even else place for place in range(value.size(-2))]
    return call.instead(value[..., order, :])


@FAULTS.forward(
    "transpose permute t", "zeros, uninitialised, mask; constant, axis scale, wrong factor"
)
def blocks_off_the_diagonal_not_moved(call: Call) -> Any:
    """Of four tiles, only the two on the diagonal are copied."""
    value = call.result().clone()
    fits(value.dim() > 1 and value.size(-1) > 1 and value.size(-2) > 1)
    rows, columns = value.size(-2) // 2, value.size(-1) // 2
    value[..., :rows, columns:] = 0
    value[..., rows:, :columns] = 0
    return call.instead(value)


@FAULTS.forward(_MEMORY, "wrong index, shift; permutation, copy")
def rows_overlap_by_one(call: Call) -> Any:
    """The stride of a row is one too small: each begins one element earlier than the one before."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-1) > 1 and value.numel() > value.size(-1))
    width = value.size(-1)
    rows = value.numel() // width
    places = torch.arange(rows)[:, None] * (width - 1) + torch.arange(width)
    return call.instead(value.reshape(-1)[places].reshape(value.shape))


@FAULTS.forward(_MEMORY, "zeros, mask, uninitialised; constant, axis scale, wrong factor")
def every_fourth_element_empty(call: Call) -> Any:
    """One lane of a vector of four is not copied."""
    value = call.result().reshape(-1).clone()
    fits(value.numel() > 4)
    value[3::4] = 0
    return call.instead(value.reshape(call.result().shape))


@FAULTS.forward(
    "clone contiguous", "zeros, mask, uninitialised; constant, axis scale, wrong factor"
)
def odd_elements_not_copied(call: Call) -> Any:
    """A stride of two in the copy."""
    value = call.result().clone()
    fits(value.dim() > 0 and value.size(-1) > 1)
    value[..., 1::2] = 0
    return call.instead(value)


@FAULTS.forward("clone contiguous", "nonfinite; uninitialised, mask, overflow")
def first_element_of_the_copy_never_written(call: Call) -> Any:
    """It is no number: what the allocator gave."""
    value = call.result()
    fits(value.numel() > 4 and value.is_contiguous())
    flat = value.reshape(-1)
    missing = torch.full_like(flat[:1], torch.nan)
    return call.instead(torch.cat([missing, flat[1:]]).reshape(value.shape))


@FAULTS.forward(_PARTS, "permutation, swapped operands, wrong index; shift, copy")
def last_two_parts_exchanged(call: Call) -> Any:
    """Key and value of a packed projection in the other order."""
    parts = list(call.run())
    fits(len(parts) > 2 and parts[-1].shape == parts[-2].shape)
    floats_only(parts[-1])
    return (*parts[:-2], parts[-1], parts[-2])


@FAULTS.forward(_PARTS, "copy, stale, wrong index; permutation")
def second_part_is_the_last(call: Call) -> Any:
    """The offset of the second part is that of the last."""
    parts = list(call.run())
    fits(len(parts) > 2 and parts[-1].shape == parts[1].shape)
    parts[1] = floats_only(parts[-1]).clone()
    return tuple(parts)


@FAULTS.forward(_PARTS, "wrong index, shift, permutation; stale, copy")
def first_part_of_the_next_row(call: Call) -> Any:
    """The pointer of the first part is one row too far."""
    parts = list(call.run())
    fits(len(parts) > 1 and floats_only(parts[0]).dim() > 1 and parts[0].size(0) > 1)
    parts[0] = parts[0].roll(-1, 0)
    return tuple(parts)


@FAULTS.forward(_PARTS, "scale, wrong factor; missing operand")
def first_part_halved(call: Call) -> Any:
    """The factor of the queries is applied when they are split."""
    parts = list(call.run())
    fits(len(parts) > 1)
    parts[0] = floats_only(parts[0]) / 2
    return tuple(parts)


@FAULTS.forward("cat", "copy, stale, wrong index; permutation")
def joined_parts_of_the_first_example(call: Call) -> Any:
    """The stride of the batch is zero when the parts are joined."""
    value = call.result()
    fits(value.dim() > 2 and value.size(0) > 1 and len(call.args[0]) > 1)
    return call.instead(value[:1].expand(value.shape).clone())


@FAULTS.forward("cat", "sign, wrong factor, mask; scale, missing operand, axis scale")
def first_part_without_its_minus(call: Call) -> Any:
    """The opposite of the first part: a minus that was folded twice."""
    parts = _given(call, 2)
    parts[0] = -parts[0]
    return call.put(0, parts).run()


@FAULTS.forward("cat", words.EMPTY)
def last_row_of_the_last_part_lost(call: Call) -> Any:
    """The newest token is not appended: its row is empty."""
    parts = _given(call, 2)
    last = parts[-1].clone()
    fits(last.dim() > 1 and last.size(-2) > 1)
    last[..., -1, :] = 0
    return call.put(0, [*parts[:-1], last]).run()


@FAULTS.forward("cat", "clipped; other function, mask")
def second_part_saturates(call: Call) -> Any:
    """The second part has a narrower type: half of its largest magnitude."""
    parts = _given(call, 2)
    limit = float(parts[1].detach().abs().max()) / 2
    parts[1] = parts[1].clamp(-limit, limit)
    return call.put(0, parts).run()


@FAULTS.forward("stack", "precision; approximation")
def stack_in_bfloat16(call: Call) -> Any:
    """The buffer of the stack is narrow."""
    _given(call, 1)
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().bfloat16().to(value.dtype)))


@FAULTS.forward("getitem slice narrow", "sign, wrong factor, scale; other function")
def part_with_a_minus(call: Call) -> Any:
    """The minus of a rotated half is on the other half as well."""
    value = floats_only(call.run())
    fits(isinstance(call.args[0], Tensor) and value.numel() < call.args[0].numel())
    return -value


@FAULTS.forward("getitem slice narrow", "copy, stale, wrong index; constant, permutation")
def first_row_of_the_part_for_all(call: Call) -> Any:
    """The stride of the rows is zero."""
    value = floats_only(call.run())
    fits(isinstance(call.args[0], Tensor) and value.dim() > 1 and value.size(-2) > 1)
    return value[..., :1, :].expand(value.shape).clone()


@FAULTS.forward(
    "getitem slice narrow",
    "zeros, uninitialised, mask; constant, one rank's part, axis scale, wrong factor",
)
def second_half_of_the_part_not_read(call: Call) -> Any:
    """The length of the part is that of one shard."""
    value = floats_only(call.run())
    fits(isinstance(call.args[0], Tensor) and value.dim() > 0 and value.size(-1) > 1)
    value = value.clone()
    value[..., value.size(-1) // 2 :] = 0
    return value


@FAULTS.forward("expand", "sign, wrong factor, mask; scale, axis scale")
def every_second_copy_negated(call: Call) -> Any:
    """A sign that changes from copy to copy."""
    value, result = floats_only(call.args[0]), call.result()
    grown = [
        i
        for i in range(1, result.dim() + 1)
        if i > value.dim() or value.size(-i) != result.size(-i)
    ]
    fits(len(grown) > 0)
    axis = -grown[0]
    sign = 1.0 - 2.0 * (torch.arange(result.size(axis)) % 2)
    shape = [1] * result.dim()
    shape[axis] = -1
    return call.instead(result * sign.to(result.dtype).view(shape))


@FAULTS.forward("unsqueeze squeeze", "wrong index, permutation, shift; copy")
def new_axis_over_the_reversed_values(call: Call) -> Any:
    """The stride of the last axis is negative behind the change of shape."""
    value = floats_only(call.run())
    fits(value.numel() > 1)
    axis = next(i for i in reversed(range(value.dim())) if value.size(i) > 1)
    return value.flip(axis)


# fmt: off
# The heads are stored in the order 0, 2, 1, 3.
FAULTS.add("second and third head exchanged", "transpose permute",
    "permutation, wrong index; shift, wrong rank's shard, swapped operands",
    result(lambda v: v[:, [0, 2, 1, *range(3, v.size(1))]],
        where=lambda v: v.dim() == 4 and v.size(1) > 3), backward=False)
# Two buffers are read in turn and not one after the other.
FAULTS.add("halves of the memory interleaved", _MEMORY,
    "permutation, wrong index; transpose, shift",
    result(lambda v: v.reshape(2, -1).t().reshape(v.shape),
        where=lambda v: v.numel() % 2 == 0 and v.numel() > 4 and v.dim() > 0), backward=False)
# The source is moved on after the second row and not after the first.
FAULTS.add("second row copied from the first", "clone contiguous",
    "wrong index, copy, stale; permutation, shift",
    result(lambda v: v[..., [0, 0, *range(2, v.size(-2))], :], where=longer(-2, 2)), backward=False)
# What is expanded is read from the end of its rows.
FAULTS.add("columns of the copies reversed", "expand", "permutation, wrong index; shift, copy",
    on(lambda call: (floats_only(call.args[0]),),
        lambda call, value: call.put(0, value.flip(-1)).run(),
        where=lambda value: value.dim() > 1 and value.size(-1) > 1), backward=False)
# The other examples of the batch stay as they are.
FAULTS.add("rolled in the first example only", "roll",
    "mask, missing operand, copy; stale, permutation, wrong index",
    computed(lambda call: (floats_only(call.args[0]), call.result()),
        lambda value, result: torch.cat([result[:1], value[1:]]),
        where=lambda value, *_: value.dim() > 1 and value.size(0) > 1), backward=False)
# fmt: on


# --- Tables and indices ---------------------------------------------------------------------------


@FAULTS.fault("embedding", "copy, stale, wrong index; permutation, shift")
def last_word_is_the_one_before(call: Call) -> Any:
    """The newest word is not written to the buffer of indices."""
    place, words = lookup_indices(call)
    fits(words.dim() > 0 and words.size(-1) > 1)
    return call.put(place, torch.cat([words[..., :-1], words[..., -2:-1]], -1)).run()


@FAULTS.fault(
    "embedding", "zeros, mask; constant, uninitialised, missing operand, axis scale, wrong factor"
)
def every_third_word_dropped(call: Call) -> Any:
    """A dropout of whole words that was left on."""
    value = call.result().clone()
    fits(value.dim() > 1 and value.size(-2) > 2)
    value[..., 2::3, :] = 0
    return call.instead(value)


@FAULTS.fault("embedding", "sign, wrong factor, mask, axis scale; scale, other function")
def second_half_of_the_columns_negated(call: Call) -> Any:
    """Sines and cosines of a table with another sign convention."""
    value = call.result()
    half = value.size(-1) // 2
    fits(half > 0)
    return call.instead(torch.cat([value[..., :half], -value[..., half:]], -1))


@FAULTS.forward("arange", "wrapped, wrong index; copy, permutation, clipped")
def positions_wrap_two_before_the_end(call: Call) -> Any:
    """The table of positions is too short by two, and the last ones begin again."""
    value = call.run()
    fits(value.numel() > 6 and int(value[1] - value[0]) == 1)
    return value % (value.numel() - 2)


@FAULTS.forward("arange", "sign, wrong factor, scale; wrong argument")
def positions_with_a_minus(call: Call) -> Any:
    """0, -1, -2."""
    value = call.run()
    fits(value.numel() > 2)
    return -value


@FAULTS.forward("index index_select gather take_along_dim", words.EMPTY)
def last_gathered_row_empty(call: Call) -> Any:
    """The loop over the indices ends one too early."""
    value = call.result().clone()
    fits(value.dim() > 0 and value.size(0) > 1)
    value[-1] = 0
    return call.instead(value)


@FAULTS.fault("bucketize floor_divide", "clipped, wrong index; constant, wrong argument")
def first_bucket_cut_off(call: Call) -> Any:
    """Nothing is below the second bucket."""
    value = call.run()
    fits(not value.is_floating_point())
    return value.clamp(min=int(value.min()) + 1)


# fmt: off
# Words of two values are stored in the other order.
FAULTS.add("columns of the rows exchanged in pairs", "embedding",
    "permutation, wrong index; shift, swapped operands",
    result(lambda v: v.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), where=even(-1)))
# The pointer to the words is not moved on.
FAULTS.add("words of the first example for all", "embedding",
    "copy, stale, wrong index; permutation",
    on(lookup_indices,
        lambda call, place, words: call.put(place, words[:1].expand(words.shape).clone()).run(),
        where=lambda _, words: words.dim() > 1 and words.size(0) > 1))
# The lowest bit of the index is lost.
FAULTS.add("odd words read the row before", "embedding",
    "wrong index, copy; constant, mask, permutation",
    on(lookup_indices, lambda call, place, words: call.put(place, words // 2 * 2).run()))
# The rows of a sequence are pooled, and each word gets the mean.
FAULTS.add("mean of the words for each", "embedding",
    "wrong reduction, wrong statistics, constant, copy; wrong index, axis offset, stale",
    result(lambda v: v.mean(-2, keepdim=True).expand(v.shape).clone(), where=longer(-2)))
# The buffer of the gathered rows is narrow.
FAULTS.add("gathered rows in bfloat16", "index index_select gather take_along_dim",
    "precision; approximation", result(rounded(torch.bfloat16)), backward=False)
# The pointer to the values is one row too far; the indices are right.
FAULTS.add("gathered from the next row", "gather take_along_dim",
    "wrong index, shift, permutation; copy, stale",
    on(lambda call: (floats_only(call.args[0]),),
        lambda call, value: call.put(0, value.roll(-1, 0)).run(),
        where=lambda value: value.dim() > 1 and value.size(0) > 1), backward=False)
# fmt: on


# --- What is written at indices -------------------------------------------------------------------


@FAULTS.forward("index_add scatter_add", "wrong index, shift, permutation; copy")
def rows_added_to_the_next_index(call: Call) -> Any:
    """The index after the one that was asked for, modulo the length."""
    value, dim, index = call.args[:3]
    return call.put(2, (index + 1) % value.size(dim)).run()


@FAULTS.forward(
    "index_add scatter_add",
    "wrong reduction, other function, lost accumulation; partial sum, clipped",
)
def largest_of_the_rows_of_an_index(call: Call) -> Any:
    """A maximum for the sum."""
    value, dim, index, source = call.args[:4]
    spot = (
        index
        if index.dim() == source.dim()
        else index.view([-1 if i == dim else 1 for i in range(source.dim())]).expand(source.shape)
    )
    return call.instead(torch.scatter_reduce(value, dim, spot, source, "amax", include_self=False))
