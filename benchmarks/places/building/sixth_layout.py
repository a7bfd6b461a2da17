"""Faults that were measured sixth and have been seen: what moves values, tables, indices."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor

FAULTS = Catalogue()
_MEMORY = "view reshape flatten unflatten _unsafe_view"
_PARTS = "chunk split unbind split_with_sizes"


def _floats(value: Any) -> Tensor:
    fits(isinstance(value, Tensor) and value.is_floating_point())
    return value


def _indices(call: Call) -> tuple[int, Tensor]:
    """Where the indices of a lookup are, and they."""
    place = next(
        i
        for i, one in enumerate(call.args)
        if isinstance(one, Tensor) and not one.is_floating_point()
    )
    return place, call.args[place]


def _given(call: Call, least: int) -> list[Tensor]:
    """The parts that are joined."""
    parts = list(call.args[0])
    fits(len(parts) >= least)
    return [_floats(one) for one in parts]


# --- What moves values ----------------------------------------------------------------------------


@FAULTS.fault(
    "transpose permute t movedim",
    kinds=["permutation", "wrong index"],
    loose=["shift", "swapped operands"],
    backward=False,
)
def neighbouring_rows_of_the_copy_exchanged(call: Call) -> Any:
    """Two rows of a tile are stored in the other order."""
    value = call.result()
    even = value.size(-2) // 2 * 2
    fits(value.dim() > 1 and even > 2)
    order = [place ^ 1 if place < even else place for place in range(value.size(-2))]
    return call.instead(value[..., order, :])


@FAULTS.fault(
    "transpose permute",
    kinds=["permutation", "wrong index"],
    loose=["shift", "wrong rank's shard", "swapped operands"],
    backward=False,
)
def second_and_third_head_exchanged(call: Call) -> Any:
    """The heads are stored in the order 0, 2, 1, 3."""
    value = call.result()
    fits(value.dim() == 4 and value.size(1) > 3)
    order = [0, 2, 1, *range(3, value.size(1))]
    return call.instead(value[:, order])


@FAULTS.fault(
    "transpose permute t",
    kinds=["zeros", "uninitialised", "mask"],
    loose=["constant", "axis scale", "wrong factor"],
    backward=False,
)
def blocks_off_the_diagonal_not_moved(call: Call) -> Any:
    """Of four tiles, only the two on the diagonal are copied."""
    value = call.result().clone()
    fits(value.dim() > 1 and value.size(-1) > 1 and value.size(-2) > 1)
    rows, columns = value.size(-2) // 2, value.size(-1) // 2
    value[..., :rows, columns:] = 0
    value[..., rows:, :columns] = 0
    return call.instead(value)


@FAULTS.fault(
    _MEMORY, kinds=["wrong index", "shift"], loose=["permutation", "copy"], backward=False
)
def rows_overlap_by_one(call: Call) -> Any:
    """The stride of a row is one too small: each begins one element earlier than the one before."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-1) > 1 and value.numel() > value.size(-1))
    width = value.size(-1)
    rows = value.numel() // width
    places = torch.arange(rows)[:, None] * (width - 1) + torch.arange(width)
    return call.instead(value.reshape(-1)[places].reshape(value.shape))


@FAULTS.fault(
    _MEMORY, kinds=["permutation", "wrong index"], loose=["transpose", "shift"], backward=False
)
def halves_of_the_memory_interleaved(call: Call) -> Any:
    """Two buffers are read in turn and not one after the other."""
    value = call.result()
    fits(value.numel() % 2 == 0 and value.numel() > 4 and value.dim() > 0)
    return call.instead(value.reshape(2, -1).t().reshape(value.shape))


@FAULTS.fault(
    _MEMORY,
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "axis scale", "wrong factor"],
    backward=False,
)
def every_fourth_element_empty(call: Call) -> Any:
    """One lane of a vector of four is not copied."""
    value = call.result().reshape(-1).clone()
    fits(value.numel() > 4)
    value[3::4] = 0
    return call.instead(value.reshape(call.result().shape))


@FAULTS.fault(
    "clone contiguous",
    kinds=["wrong index", "copy", "stale"],
    loose=["permutation", "shift"],
    backward=False,
)
def second_row_copied_from_the_first(call: Call) -> Any:
    """The source is moved on after the second row and not after the first."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-2) > 2)
    order = [0, 0, *range(2, value.size(-2))]
    return call.instead(value[..., order, :])


@FAULTS.fault(
    "clone contiguous",
    kinds=["zeros", "mask", "uninitialised"],
    loose=["constant", "axis scale", "wrong factor"],
    backward=False,
)
def odd_elements_not_copied(call: Call) -> Any:
    """A stride of two in the copy."""
    value = call.result().clone()
    fits(value.dim() > 0 and value.size(-1) > 1)
    value[..., 1::2] = 0
    return call.instead(value)


@FAULTS.fault(
    "clone contiguous",
    kinds=["nonfinite"],
    loose=["uninitialised", "mask", "overflow"],
    backward=False,
)
def first_element_of_the_copy_never_written(call: Call) -> Any:
    """It is no number: what the allocator gave."""
    value = call.result()
    fits(value.numel() > 4 and value.is_contiguous())
    flat = value.reshape(-1)
    missing = torch.full_like(flat[:1], torch.nan)
    return call.instead(torch.cat([missing, flat[1:]]).reshape(value.shape))


@FAULTS.fault(
    _PARTS,
    kinds=["permutation", "swapped operands", "wrong index"],
    loose=["shift", "copy"],
    backward=False,
)
def last_two_parts_exchanged(call: Call) -> Any:
    """Key and value of a packed projection in the other order."""
    parts = list(call.run())
    fits(len(parts) > 2 and parts[-1].shape == parts[-2].shape)
    _floats(parts[-1])
    return (*parts[:-2], parts[-1], parts[-2])


@FAULTS.fault(_PARTS, kinds=["copy", "stale", "wrong index"], loose=["permutation"], backward=False)
def second_part_is_the_last(call: Call) -> Any:
    """The offset of the second part is that of the last."""
    parts = list(call.run())
    fits(len(parts) > 2 and parts[-1].shape == parts[1].shape)
    parts[1] = _floats(parts[-1]).clone()
    return tuple(parts)


@FAULTS.fault(
    _PARTS, kinds=["wrong index", "shift", "permutation"], loose=["stale", "copy"], backward=False
)
def first_part_of_the_next_row(call: Call) -> Any:
    """The pointer of the first part is one row too far."""
    parts = list(call.run())
    fits(len(parts) > 1 and _floats(parts[0]).dim() > 1 and parts[0].size(0) > 1)
    parts[0] = parts[0].roll(-1, 0)
    return tuple(parts)


@FAULTS.fault(_PARTS, kinds=["scale", "wrong factor"], loose=["missing operand"], backward=False)
def first_part_halved(call: Call) -> Any:
    """The factor of the queries is applied when they are split."""
    parts = list(call.run())
    fits(len(parts) > 1)
    parts[0] = _floats(parts[0]) / 2
    return tuple(parts)


@FAULTS.fault("cat", kinds=["copy", "stale", "wrong index"], loose=["permutation"], backward=False)
def joined_parts_of_the_first_example(call: Call) -> Any:
    """The stride of the batch is zero when the parts are joined."""
    value = call.result()
    fits(value.dim() > 2 and value.size(0) > 1 and len(call.args[0]) > 1)
    return call.instead(value[:1].expand(value.shape).clone())


@FAULTS.fault(
    "cat",
    kinds=["sign", "wrong factor", "mask"],
    loose=["scale", "missing operand", "axis scale"],
    backward=False,
)
def first_part_without_its_minus(call: Call) -> Any:
    """The opposite of the first part: a minus that was folded twice."""
    parts = _given(call, 2)
    parts[0] = -parts[0]
    return call.put(0, parts).run()


@FAULTS.fault(
    "cat",
    kinds=["zeros", "uninitialised", "mask"],
    loose=["constant", "missing operand", "axis scale", "wrong factor"],
    backward=False,
)
def last_row_of_the_last_part_lost(call: Call) -> Any:
    """The newest token is not appended: its row is empty."""
    parts = _given(call, 2)
    last = parts[-1].clone()
    fits(last.dim() > 1 and last.size(-2) > 1)
    last[..., -1, :] = 0
    return call.put(0, [*parts[:-1], last]).run()


@FAULTS.fault("cat", kinds=["clipped"], loose=["other function", "mask"], backward=False)
def second_part_saturates(call: Call) -> Any:
    """The second part has a narrower type: half of its largest magnitude."""
    parts = _given(call, 2)
    limit = float(parts[1].detach().abs().max()) / 2
    parts[1] = parts[1].clamp(-limit, limit)
    return call.put(0, parts).run()


@FAULTS.fault("stack", kinds=["precision"], loose=["approximation"], backward=False)
def stack_in_bfloat16(call: Call) -> Any:
    """The buffer of the stack is narrow."""
    _given(call, 1)
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().bfloat16().to(value.dtype)))


@FAULTS.fault(
    "getitem slice narrow",
    kinds=["sign", "wrong factor", "scale"],
    loose=["other function"],
    backward=False,
)
def part_with_a_minus(call: Call) -> Any:
    """The minus of a rotated half is on the other half as well."""
    value = _floats(call.run())
    fits(isinstance(call.args[0], Tensor) and value.numel() < call.args[0].numel())
    return -value


@FAULTS.fault(
    "getitem slice narrow",
    kinds=["copy", "stale", "wrong index"],
    loose=["constant", "permutation"],
    backward=False,
)
def first_row_of_the_part_for_all(call: Call) -> Any:
    """The stride of the rows is zero."""
    value = _floats(call.run())
    fits(isinstance(call.args[0], Tensor) and value.dim() > 1 and value.size(-2) > 1)
    return value[..., :1, :].expand(value.shape).clone()


@FAULTS.fault(
    "getitem slice narrow",
    kinds=["zeros", "uninitialised", "mask"],
    loose=["constant", "one rank's part", "axis scale", "wrong factor"],
    backward=False,
)
def second_half_of_the_part_not_read(call: Call) -> Any:
    """The length of the part is that of one shard."""
    value = _floats(call.run())
    fits(isinstance(call.args[0], Tensor) and value.dim() > 0 and value.size(-1) > 1)
    value = value.clone()
    value[..., value.size(-1) // 2 :] = 0
    return value


@FAULTS.fault(
    "expand", kinds=["permutation", "wrong index"], loose=["shift", "copy"], backward=False
)
def columns_of_the_copies_reversed(call: Call) -> Any:
    """What is expanded is read from the end of its rows."""
    value = _floats(call.args[0])
    fits(value.dim() > 1 and value.size(-1) > 1)
    return call.put(0, value.flip(-1)).run()


@FAULTS.fault(
    "expand", kinds=["sign", "wrong factor", "mask"], loose=["scale", "axis scale"], backward=False
)
def every_second_copy_negated(call: Call) -> Any:
    """A sign that changes from copy to copy."""
    value, result = _floats(call.args[0]), call.result()
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


@FAULTS.fault(
    "roll",
    kinds=["mask", "missing operand", "copy"],
    loose=["stale", "permutation", "wrong index"],
    backward=False,
)
def rolled_in_the_first_example_only(call: Call) -> Any:
    """The other examples of the batch stay as they are."""
    value, result = _floats(call.args[0]), call.result()
    fits(value.dim() > 1 and value.size(0) > 1)
    return call.instead(torch.cat([result[:1], value[1:]]))


@FAULTS.fault(
    "unsqueeze squeeze",
    kinds=["wrong index", "permutation", "shift"],
    loose=["copy"],
    backward=False,
)
def new_axis_over_the_reversed_values(call: Call) -> Any:
    """The stride of the last axis is negative behind the change of shape."""
    value = _floats(call.run())
    fits(value.numel() > 1)
    axis = next(i for i in reversed(range(value.dim())) if value.size(i) > 1)
    return value.flip(axis)


# --- Tables and indices ---------------------------------------------------------------------------


@FAULTS.fault(
    "embedding", kinds=["permutation", "wrong index"], loose=["shift", "swapped operands"]
)
def columns_of_the_rows_exchanged_in_pairs(call: Call) -> Any:
    """Words of two values are stored in the other order."""
    value = call.result()
    fits(value.size(-1) % 2 == 0)
    return call.instead(value.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


@FAULTS.fault("embedding", kinds=["copy", "stale", "wrong index"], loose=["permutation", "shift"])
def last_word_is_the_one_before(call: Call) -> Any:
    """The newest word is not written to the buffer of indices."""
    place, words = _indices(call)
    fits(words.dim() > 0 and words.size(-1) > 1)
    return call.put(place, torch.cat([words[..., :-1], words[..., -2:-1]], -1)).run()


@FAULTS.fault(
    "embedding",
    kinds=["zeros", "mask"],
    loose=["constant", "uninitialised", "missing operand", "axis scale", "wrong factor"],
)
def every_third_word_dropped(call: Call) -> Any:
    """A dropout of whole words that was left on."""
    value = call.result().clone()
    fits(value.dim() > 1 and value.size(-2) > 2)
    value[..., 2::3, :] = 0
    return call.instead(value)


@FAULTS.fault("embedding", kinds=["copy", "stale", "wrong index"], loose=["permutation"])
def words_of_the_first_example_for_all(call: Call) -> Any:
    """The pointer to the words is not moved on."""
    place, words = _indices(call)
    fits(words.dim() > 1 and words.size(0) > 1)
    return call.put(place, words[:1].expand(words.shape).clone()).run()


@FAULTS.fault(
    "embedding",
    kinds=["sign", "wrong factor", "mask", "axis scale"],
    loose=["scale", "other function"],
)
def second_half_of_the_columns_negated(call: Call) -> Any:
    """Sines and cosines of a table with another sign convention."""
    value = call.result()
    half = value.size(-1) // 2
    fits(half > 0)
    return call.instead(torch.cat([value[..., :half], -value[..., half:]], -1))


@FAULTS.fault("embedding", kinds=["wrong index", "copy"], loose=["constant", "mask", "permutation"])
def odd_words_read_the_row_before(call: Call) -> Any:
    """The lowest bit of the index is lost."""
    place, words = _indices(call)
    return call.put(place, words // 2 * 2).run()


@FAULTS.fault(
    "embedding",
    kinds=["wrong reduction", "wrong statistics", "constant", "copy"],
    loose=["wrong index", "axis offset", "stale"],
)
def mean_of_the_words_for_each(call: Call) -> Any:
    """The rows of a sequence are pooled, and each word gets the mean."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-2) > 1)
    return call.instead(value.mean(-2, keepdim=True).expand(value.shape).clone())


@FAULTS.fault(
    "arange",
    kinds=["wrapped", "wrong index"],
    loose=["copy", "permutation", "clipped"],
    backward=False,
)
def positions_wrap_two_before_the_end(call: Call) -> Any:
    """The table of positions is too short by two, and the last ones begin again."""
    value = call.run()
    fits(value.numel() > 6 and int(value[1] - value[0]) == 1)
    return value % (value.numel() - 2)


@FAULTS.fault(
    "arange", kinds=["sign", "wrong factor", "scale"], loose=["wrong argument"], backward=False
)
def positions_with_a_minus(call: Call) -> Any:
    """0, -1, -2."""
    value = call.run()
    fits(value.numel() > 2)
    return -value


@FAULTS.fault(
    "index index_select gather take_along_dim",
    kinds=["precision"],
    loose=["approximation"],
    backward=False,
)
def gathered_rows_in_bfloat16(call: Call) -> Any:
    """The buffer of the gathered rows is narrow."""
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().bfloat16().to(value.dtype)))


@FAULTS.fault(
    "index index_select gather take_along_dim",
    kinds=["zeros", "uninitialised", "mask"],
    loose=["constant", "missing operand", "axis scale", "wrong factor"],
    backward=False,
)
def last_gathered_row_empty(call: Call) -> Any:
    """The loop over the indices ends one too early."""
    value = call.result().clone()
    fits(value.dim() > 0 and value.size(0) > 1)
    value[-1] = 0
    return call.instead(value)


@FAULTS.fault(
    "gather take_along_dim",
    kinds=["wrong index", "shift", "permutation"],
    loose=["copy", "stale"],
    backward=False,
)
def gathered_from_the_next_row(call: Call) -> Any:
    """The pointer to the values is one row too far; the indices are right."""
    value = _floats(call.args[0])
    fits(value.dim() > 1 and value.size(0) > 1)
    return call.put(0, value.roll(-1, 0)).run()


@FAULTS.fault(
    "bucketize floor_divide", kinds=["clipped", "wrong index"], loose=["constant", "wrong argument"]
)
def first_bucket_cut_off(call: Call) -> Any:
    """Nothing is below the second bucket."""
    value = call.run()
    fits(not value.is_floating_point())
    return value.clamp(min=int(value.min()) + 1)


# --- What is written at indices -------------------------------------------------------------------


@FAULTS.fault(
    "index_add scatter_add",
    kinds=["wrong index", "shift", "permutation"],
    loose=["copy"],
    backward=False,
)
def rows_added_to_the_next_index(call: Call) -> Any:
    """The index after the one that was asked for, modulo the length."""
    value, dim, index = call.args[:3]
    return call.put(2, (index + 1) % value.size(dim)).run()


@FAULTS.fault(
    "index_add scatter_add",
    kinds=["wrong reduction", "other function", "lost accumulation"],
    loose=["partial sum", "clipped"],
    backward=False,
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
