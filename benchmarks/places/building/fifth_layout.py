"""Faults that were measured fifth and have been seen: what moves values, tables and indices."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor

FAULTS = Catalogue()


def _floats(value: Any) -> Tensor:
    fits(isinstance(value, Tensor) and value.is_floating_point())
    return value


def _indices(call: Call) -> tuple[int, Tensor]:
    """Where the indices of a lookup are, and they."""
    place = next(i for i, one in enumerate(call.args) if isinstance(one, Tensor)
                 and not one.is_floating_point())  # fmt: skip
    return place, call.args[place]


# --- What moves values ----------------------------------------------------------------------------


@FAULTS.fault("transpose permute", kinds=["permutation", "transpose", "wrong index"],
              loose=["shift"], backward=False)  # fmt: skip
def tiles_moved_and_not_turned(call: Call) -> Any:
    """Squares of two by two are in the right place, and each is not transposed inside."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-1) % 2 == 0 and value.size(-2) % 2 == 0)
    fits(value.size(-1) > 2)
    tiles = value.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))
    return call.instead(tiles.transpose(-1, -3).flatten(-4, -3).flatten(-2))


@FAULTS.fault("transpose permute movedim", kinds=["zeros", "uninitialised", "mask"],
              loose=["constant"], backward=False)  # fmt: skip
def last_row_of_the_copy_not_written(call: Call) -> Any:
    """The grid of the copy is one row too small."""
    value = call.result().clone()
    fits(value.dim() > 1 and value.size(-2) > 1)
    value[..., -1, :] = 0
    return call.instead(value)


@FAULTS.fault("view reshape flatten unflatten _unsafe_view", backward=False,
              kinds=["copy", "stale", "wrong index"], loose=["permutation"])  # fmt: skip
def second_half_of_the_memory_is_the_first(call: Call) -> Any:
    """The offset of the second block of memory is not added."""
    value = call.result()
    fits(value.numel() % 2 == 0 and value.numel() > 2)
    flat = value.reshape(2, -1)
    return call.instead(flat[:1].expand(flat.shape).reshape(value.shape))


@FAULTS.fault("view reshape flatten unflatten _unsafe_view contiguous clone", backward=False,
              kinds=["wrong index", "permutation"], loose=["shift"])  # fmt: skip
def addresses_mixed_within_four(call: Call) -> Any:
    """A swizzle that is not undone: in each four values, the middle ones are exchanged."""
    value = call.result()
    fits(value.numel() % 4 == 0 and value.dim() > 0)
    return call.instead(value.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(value.shape))


@FAULTS.fault("chunk split unbind split_with_sizes", backward=False,
              kinds=["permutation", "shift", "wrong index", "swapped operands"])  # fmt: skip
def three_parts_turned_by_one(call: Call) -> Any:
    """Key, value, query for query, key, value."""
    parts = list(call.run())
    fits(len(parts) > 2 and all(one.shape == parts[0].shape for one in parts))
    _floats(parts[0])
    return (*parts[1:], parts[0])


@FAULTS.fault(
    "chunk split unbind split_with_sizes",
    backward=False,
    kinds=["zeros", "uninitialised", "missing operand"],
    loose=["constant", "mask"],
)
def last_part_empty(call: Call) -> Any:
    """The buffer of the last part is not filled."""
    parts = list(call.run())
    fits(len(parts) > 1)
    parts[-1] = torch.zeros_like(_floats(parts[-1]))
    return tuple(parts)


@FAULTS.fault("cat", kinds=["wrong index", "shift", "permutation"], loose=["copy"], backward=False)
def second_part_of_the_next_example(call: Call) -> Any:
    """The pointer of the second part is one batch too far."""
    parts, dim = list(call.args[0]), call.get(1, "dim", default=0)
    fits(len(parts) > 1 and _floats(parts[1]).dim() > 1 and parts[1].size(0) > 1)
    fits(dim % parts[1].dim() != 0)
    parts[1] = parts[1].roll(-1, 0)
    return call.put(0, parts).run()


@FAULTS.fault("cat", kinds=["precision"], loose=["approximation"], backward=False)
def first_part_through_bfloat16(call: Call) -> Any:
    """The parts have different types, and the first is cast to the narrower one."""
    parts = list(call.args[0])
    first = _floats(parts[0])
    parts[0] = first + (first.bfloat16().to(first.dtype) - first).detach()
    return call.put(0, parts).run()


@FAULTS.fault(
    "stack",
    kinds=["zeros", "uninitialised", "missing operand"],
    loose=["mask", "constant"],
    backward=False,
)
def second_of_the_stack_not_written(call: Call) -> Any:
    """The buffer is zero where the second part belongs."""
    parts = list(call.args[0])
    fits(len(parts) > 1)
    parts[1] = torch.zeros_like(_floats(parts[1]))
    return call.put(0, parts).run()


@FAULTS.fault("stack", kinds=["sign", "wrong factor", "scale"], loose=["missing operand"],
              backward=False)  # fmt: skip
def first_of_the_stack_negated(call: Call) -> Any:
    """The minus of a rotation is given to the wrong part."""
    parts = list(call.args[0])
    parts[0] = -_floats(parts[0])
    return call.put(0, parts).run()


@FAULTS.fault("getitem slice narrow", kinds=["stale", "copy", "wrong index"],
              loose=["permutation", "shift"], backward=False)  # fmt: skip
def last_row_of_the_part_is_the_first(call: Call) -> Any:
    """A ring buffer that wraps one row too early."""
    value = _floats(call.run())
    fits(isinstance(call.args[0], Tensor) and value.dim() > 1 and value.size(-2) > 2)
    return torch.cat([value[..., :-1, :], value[..., :1, :]], -2)


@FAULTS.fault("getitem slice narrow select", kinds=["wrong index", "permutation", "shift"],
              loose=["copy"], backward=False)  # fmt: skip
def columns_of_the_part_exchanged_in_pairs(call: Call) -> Any:
    """Words of two values are read in the other order."""
    value = _floats(call.run())
    fits(isinstance(call.args[0], Tensor) and value.dim() > 0 and value.size(-1) % 2 == 0)
    fits(value.size(-1) > 2)
    return value.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


@FAULTS.fault("flip", kinds=["copy", "wrong index", "constant"], loose=["stale", "permutation"],
              backward=False)  # fmt: skip
def last_slice_for_all(call: Call) -> Any:
    """The index n - 1 - i is folded to n - 1."""
    value, dims = _floats(call.args[0]), call.args[1]
    dim = dims[0] if isinstance(dims, list | tuple) else dims
    return value.narrow(dim, value.size(dim) - 1, 1).expand(value.shape).clone()


@FAULTS.fault("roll", kinds=["wrong argument", "shift", "wrong index", "permutation"],
              backward=False)  # fmt: skip
def rolled_twice_as_far(call: Call) -> Any:
    """The shift is applied by both kernels."""
    value, shifts, dims = _floats(call.args[0]), call.get(1, "shifts"), call.get(2, "dims")
    more = 2 * shifts if isinstance(shifts, int) else [2 * one for one in shifts]
    return torch.roll(value, more, dims)


@FAULTS.fault("expand", kinds=["wrong index", "copy", "permutation", "shift"], loose=["stale"],
              backward=False)  # fmt: skip
def copies_of_the_next_example(call: Call) -> Any:
    """What is expanded is read one row too far."""
    value = _floats(call.args[0])
    fits(value.dim() > 1 and value.size(0) > 1)
    return call.put(0, value.roll(-1, 0)).run()


@FAULTS.fault("repeat repeat_interleave tile", kinds=["zeros", "uninitialised", "mask"],
              loose=["constant", "missing operand"], backward=False)  # fmt: skip
def only_the_first_copy_written(call: Call) -> Any:
    """The buffer is as long as all copies, and one of them is written."""
    value, result = _floats(call.args[0]), call.result().clone()
    fits(result.numel() > value.numel())
    result.view(-1)[value.numel() :] = 0
    return call.instead(result)


@FAULTS.fault(
    "channel_shuffle", kinds=["permutation", "wrong index", "wrong argument", "transpose"]
)
def shuffled_back(call: Call) -> Any:
    """The inverse: groups and channels of a group are exchanged."""
    value, groups = _floats(call.args[0]), call.args[1]
    return torch.nn.functional.channel_shuffle(value, value.size(1) // groups)


@FAULTS.fault("channel_shuffle", kinds=["copy", "missing operand"],
              loose=["permutation", "wrong index", "wrong argument"])  # fmt: skip
def channels_left_in_their_order(call: Call) -> Any:
    """Nothing is shuffled."""
    return _floats(call.args[0]).clone()


@FAULTS.fault("rot90", kinds=["permutation", "wrong argument", "wrong index", "sign"],
              loose=["transpose"], backward=False)  # fmt: skip
def turned_to_the_right(call: Call) -> Any:
    """The other direction."""
    return torch.rot90(_floats(call.args[0]), -call.get(1, "k", default=1), (0, 1))


@FAULTS.fault("rot90", kinds=["transpose", "missing operand", "permutation", "wrong index"],
              loose=["wrong argument"], backward=False)  # fmt: skip
def transposed_for_turned(call: Call) -> Any:
    """The rows are not reversed afterwards."""
    return _floats(call.args[0]).t().clone()


@FAULTS.fault("diagonal", kinds=["shift", "wrong argument", "wrong index"], loose=["copy"],
              backward=False)  # fmt: skip
def line_beside_the_diagonal(call: Call) -> Any:
    """An offset of one, which wraps."""
    value = _floats(call.args[0])
    fits(value.dim() == 2)
    return torch.diagonal(value.roll(-1, 1)).clone()


@FAULTS.fault("diag_embed", kinds=["permutation", "wrong index", "transpose"],
              loose=["shift", "sign"])  # fmt: skip
def written_on_the_other_diagonal(call: Call) -> Any:
    """From the upper right to the lower left."""
    return call.instead(call.result().flip(-1))


@FAULTS.fault(
    "tril triu", kinds=["transpose", "mask"], loose=["other function", "wrong index", "permutation"]
)
def triangle_stored_transposed(call: Call) -> Any:
    """Columns are written as rows."""
    value = call.run()
    fits(value.size(-1) == value.size(-2))
    return value.mT.contiguous()


# --- Tables and indices ---------------------------------------------------------------------------


@FAULTS.fault("embedding", kinds=["wrong index", "permutation"], loose=["copy", "shift"])
def words_looked_up_in_sorted_order(call: Call) -> Any:
    """The words are sorted for the memory, and the rows are not put back."""
    place, words = _indices(call)
    fits(words.dim() > 0 and words.size(-1) > 1)
    return call.put(place, words.sort(-1)[0]).run()


@FAULTS.fault("embedding", kinds=["wrong index", "copy"], loose=["mask", "wrong argument"])
def smallest_word_reads_the_last_row(call: Call) -> Any:
    """An index of -1 that counts from the end."""
    place, words = _indices(call)
    table = call.args[1 - place]
    last = torch.full_like(words, table.size(0) - 1)
    return call.put(place, torch.where(words == words.min(), last, words)).run()


@FAULTS.fault("embedding", kinds=["zeros", "uninitialised", "mask"], loose=["constant"])
def last_columns_of_the_rows_not_copied(call: Call) -> Any:
    """A row is copied by whole vectors."""
    value = call.result().clone()
    fits(value.size(-1) > 3)
    value[..., -2:] = 0
    return call.instead(value)


@FAULTS.fault("embedding", kinds=["axis scale", "wrong factor", "other function"],
              loose=["scale", "wrong statistics"])  # fmt: skip
def rows_of_length_one(call: Call) -> Any:
    """Each row is divided by its length."""
    place, _ = _indices(call)
    table = call.tensor(1 - place)
    return call.put(1 - place, table / (table.norm(dim=-1, keepdim=True) + 1e-6)).run()


@FAULTS.fault("embedding", kinds=["offset", "axis offset"], loose=["residual", "missing operand"])
def mean_row_subtracted(call: Call) -> Any:
    """The table is centred when it is converted."""
    place, _ = _indices(call)
    table = call.tensor(1 - place)
    return call.put(1 - place, table - table.mean(0)).run()


@FAULTS.fault("arange", kinds=["wrong factor", "scale", "wrong argument"], loose=["wrong index"],
              backward=False)  # fmt: skip
def positions_in_steps_of_two(call: Call) -> Any:
    """0, 2, 4."""
    value = call.run()
    fits(value.numel() > 2)
    return 2 * value


@FAULTS.fault("arange", kinds=["copy", "stale", "clipped", "wrong index"], loose=["constant"],
              backward=False)  # fmt: skip
def last_position_is_the_one_before(call: Call) -> Any:
    """The counter is not moved on for the last token."""
    value = call.run()
    fits(value.numel() > 3)
    return torch.cat([value[:-1], value[-2:-1]])


@FAULTS.fault("gather take_along_dim", kinds=["copy", "wrong index", "missing operand"],
              loose=["constant", "stale"], backward=False)  # fmt: skip
def always_the_first_index(call: Call) -> Any:
    """The index is not loaded: zero."""
    place = 1 if call.name == "take_along_dim" else 2
    index = call.get(place, "index", "indices")
    return call.put(place, torch.zeros_like(index), "index").run()


@FAULTS.fault("index index_select getitem", kinds=["wrong index", "permutation"],
              loose=["copy", "shift"], backward=False)  # fmt: skip
def rows_gathered_in_the_reverse_order(call: Call) -> Any:
    """The list of indices is read from its end."""
    asked = call.args[1] if call.name != "index_select" else call.args[2]
    index = asked[0] if isinstance(asked, list | tuple) and len(asked) == 1 else asked
    fits(isinstance(index, Tensor) and index.dim() == 1 and not index.is_floating_point())
    fits((index.dtype != torch.bool and call.name != "index_select") or call.args[1] == 0)
    return call.instead(call.result().flip(0))


@FAULTS.fault("one_hot", kinds=["shift", "wrong index", "permutation"], loose=["offset"])
def one_in_the_next_column(call: Call) -> Any:
    """Classes are counted from one."""
    return call.run().roll(1, -1)


@FAULTS.fault(
    "one_hot",
    kinds=["other function", "sign"],
    loose=["mask", "wrong argument", "constant", "swapped operands", "offset"],
)
def all_but_one_are_hot(call: Call) -> Any:
    """Ones and zeros exchanged."""
    return 1 - call.run()


@FAULTS.fault("argsort", kinds=["wrong axis", "wrong argument", "wrong index", "permutation"],
              loose=["sign"])  # fmt: skip
def order_along_the_last_axis(call: Call) -> Any:
    """Rows are ordered and not columns; places beyond the columns wrap."""
    value, dim = call.args[0], call.get(1, "dim", default=-1)
    fits(value.dim() == 2 and dim == 0)
    return value.argsort(-1, descending=True) % value.size(0)


@FAULTS.fault(
    "bucketize",
    kinds=["other function", "missing operand", "clipped"],
    loose=["copy", "offset", "wrong index"],
)
def distance_for_its_bucket(call: Call) -> Any:
    """The distance as it came, cut to the number of buckets."""
    return call.args[0].clamp(0, call.args[1].numel()).to(call.run().dtype)


# --- What is written at indices -------------------------------------------------------------------


@FAULTS.fault("embedding_bag", kinds=["wrong reduction", "wrong argument", "other function"],
              loose=["wrong statistics"])  # fmt: skip
def largest_of_the_bag(call: Call) -> Any:
    """Mode max for mean."""
    return call.instead(torch.nn.functional.embedding_bag(*call.args[:3], mode="max"))


@FAULTS.fault("embedding_bag", kinds=["permutation", "wrong index", "shift"], loose=["copy"])
def bags_of_the_next_row(call: Call) -> Any:
    """Each bag is stored one row too early."""
    return call.instead(call.result().roll(-1, 0))


@FAULTS.fault("index_add scatter_add", kinds=["sign", "wrong factor", "wrong argument"],
              loose=["scale", "swapped operands"], backward=False)  # fmt: skip
def rows_subtracted_at_their_index(call: Call) -> Any:
    """A minus for what is added."""
    return call.put(3, -call.tensor(3)).run()


@FAULTS.fault("scatter_reduce", kinds=["wrong argument", "wrong reduction", "other function"],
              loose=["axis scale", "scale", "wrong factor"])  # fmt: skip
def scattered_and_summed(call: Call) -> Any:
    """reduce='sum'."""
    return call.put(4, "sum", "reduce").run()


@FAULTS.fault("index_copy", kinds=["wrong index", "shift", "permutation"], loose=["copy"])
def rows_written_to_the_next_slot(call: Call) -> Any:
    """The slot after the one that was asked for, modulo the length."""
    value, dim, index = call.args[:3]
    return call.put(2, (index + 1) % value.size(dim)).run()


@FAULTS.fault("index_copy", kinds=["mask", "zeros", "missing operand", "stale", "uninitialised"],
              loose=["copy", "lost accumulation", "off by one reduction"])  # fmt: skip
def last_slot_not_written(call: Call) -> Any:
    """The loop over the rows ends one too early."""
    value, dim, index, source = call.args[:4]
    return torch.index_copy(value, dim, index[:-1], source[:-1])


@FAULTS.fault(
    "index_fill",
    kinds=["wrong argument", "constant", "zeros"],
    loose=["missing operand", "offset", "wrong factor"],
    backward=False,
)
def filled_with_nothing(call: Call) -> Any:
    """Zero for the value."""
    return call.put(3, 0.0).run()


@FAULTS.fault("scatter", kinds=["wrong argument", "residual", "other function"],
              loose=["wrong reduction", "offset"], backward=False)  # fmt: skip
def added_and_not_written(call: Call) -> Any:
    """reduce='add'."""
    value, dim, index, source = call.args[:4]
    return torch.scatter_add(_floats(value), dim, index, source)


@FAULTS.fault("select_scatter slice_scatter", kinds=["wrong index", "shift", "wrong argument"],
              loose=["permutation", "copy"], backward=False)  # fmt: skip
def written_one_row_before(call: Call) -> Any:
    """The start is one too small."""
    fits(call.args[3] > 0)
    less = call.put(3, call.args[3] - 1)
    return (less.put(4, call.args[4] - 1) if call.name == "slice_scatter" else less).run()


@FAULTS.fault("select_scatter slice_scatter", backward=False,
              kinds=["copy", "stale", "missing operand"], loose=["mask", "residual"])  # fmt: skip
def part_not_written_at_all(call: Call) -> Any:
    """The buffer as it was."""
    return _floats(call.args[0]).clone()


@FAULTS.fault("unfold", kinds=["wrong argument", "wrong index", "shift"], loose=["copy"],
              backward=False)  # fmt: skip
def windows_one_step_apart(call: Call) -> Any:
    """A step of one; the first windows of them."""
    value = _floats(call.args[0])
    fits(len(call.args) == 4 and call.args[3] > 1)
    _, dim, size, _ = call.args
    return value.unfold(dim, size, 1).narrow(dim, 0, call.run().size(dim)).clone()
