"""Faults that were measured fourth and have been seen: what moves values, tables, indices."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from torch import Tensor

FAULTS = Catalogue()


def _floats(value: Any) -> Tensor:
    fits(isinstance(value, Tensor) and value.is_floating_point())
    return value


# --- Shapes and parts -----------------------------------------------------------------------------


@FAULTS.fault("cat", kinds=["permutation", "wrong index"], loose=["shift"], backward=False)
def second_part_from_its_end(call: Call) -> Any:
    """The second part is joined in the reverse order."""
    parts, dim = list(call.args[0]), call.get(1, "dim", default=0)
    fits(len(parts) > 1 and _floats(parts[1]).size(dim) > 1)
    parts[1] = parts[1].flip(dim)
    return call.put(0, parts).run()


@FAULTS.fault(
    "cat stack", kinds=["copy", "stale", "wrong index"], loose=["permutation"], backward=False
)
def last_part_for_all(call: Call) -> Any:
    """The addresses of the parts are taken after the loop: each is the last."""
    parts = list(call.args[0])
    fits(len(parts) > 1 and all(one.shape == parts[-1].shape for one in parts))
    return call.put(0, [_floats(parts[-1])] * len(parts)).run()


@FAULTS.fault(
    "cat", kinds=["zeros", "missing operand", "uninitialised"], loose=["mask"], backward=False
)
def first_part_not_written(call: Call) -> Any:
    """The buffer is zero where the first part belongs."""
    parts = list(call.args[0])
    fits(len(parts) > 1)
    parts[0] = torch.zeros_like(_floats(parts[0]))
    return call.put(0, parts).run()


@FAULTS.fault("transpose permute", kinds=["copy", "wrong index", "stale"], loose=["permutation"],
              backward=False)  # fmt: skip
def second_example_copied_from_the_first(call: Call) -> Any:
    """The stride of the batch is lost in the copy."""
    value = call.result()
    fits(value.dim() > 2 and value.size(0) > 1)
    return call.instead(value[:1].expand(value.shape).clone())


@FAULTS.fault("transpose permute", kinds=["shift", "wrong index", "permutation"], backward=False)
def columns_turned_by_one(call: Call) -> Any:
    """The copy begins at the second column and ends with the first."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-1) > 2)
    return call.instead(value.roll(-1, -1))


@FAULTS.fault("view reshape contiguous clone _unsafe_view", kinds=["wrong index", "shift"],
              loose=["permutation"], backward=False)  # fmt: skip
def row_stride_one_too_large(call: Call) -> Any:
    """Each row is read one element further than the one before it."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-1) > 2 and value[..., 0].numel() > 1)
    flat = value.reshape(-1, value.size(-1))
    rows, columns = flat.shape
    places = torch.arange(rows)[:, None] * (columns + 1) + torch.arange(columns)
    return call.instead(flat.flatten()[places % flat.numel()].view(value.shape))


@FAULTS.fault("view reshape flatten unflatten _unsafe_view", kinds=["permutation", "wrong index"],
              loose=["transpose", "shift"], backward=False)  # fmt: skip
def rows_stored_from_the_last(call: Call) -> Any:
    """The first axis is read from its end."""
    value = call.result()
    fits(value.dim() > 1 and value.size(0) > 1)
    return call.instead(value.flip(0))


@FAULTS.fault("contiguous clone", kinds=["precision"], loose=["approximation"], backward=False)
def copied_through_half(call: Call) -> Any:
    """The buffer of the copy is float16."""
    value = call.result()
    return call.instead(value.half().to(value.dtype))


@FAULTS.fault("getitem slice", kinds=["zeros", "mask", "uninitialised"],
              loose=["off by one reduction", "constant"], backward=False)  # fmt: skip
def last_of_the_slice_not_copied(call: Call) -> Any:
    """The slice is one shorter, and its buffer as long as before."""
    value = _floats(call.run()).clone()
    fits(value.dim() > 0 and value.size(-1) > 2 and isinstance(call.args[0], Tensor))
    fits(value.shape != call.args[0].shape)
    value[..., -1] = 0
    return value


@FAULTS.fault("getitem slice", kinds=["copy", "wrong index", "constant"], loose=["stale"],
              backward=False)  # fmt: skip
def first_column_of_the_slice_for_all(call: Call) -> Any:
    """The stride of the slice is zero."""
    value = _floats(call.run())
    fits(value.dim() > 1 and value.size(-1) > 2 and isinstance(call.args[0], Tensor))
    fits(value.shape != call.args[0].shape)
    return value[..., :1].expand(value.shape).clone()


@FAULTS.fault("select getitem", kinds=["wrong reduction", "other function"],
              loose=["wrong index"], backward=False)  # fmt: skip
def mean_of_all_for_the_selected(call: Call) -> Any:
    """The mean of the tokens where the first was asked for."""
    value, chosen = call.args[0], _floats(call.run())
    fits(isinstance(value, Tensor) and value.dim() == chosen.dim() + 1)
    dims = [d for d in range(value.dim()) if value.shape[:d] + value.shape[d + 1 :] == chosen.shape]
    dim = call.args[1] if call.name == "select" else dims[-1]
    fits(value.size(dim) > 1)
    return value.mean(dim)


@FAULTS.fault("chunk split unbind", kinds=["shift", "wrong index"], loose=["copy", "permutation"],
              backward=False)  # fmt: skip
def second_part_begins_one_early(call: Call) -> Any:
    """The parts overlap by one column."""
    value, parts = _floats(call.args[0]), list(call.run())
    fits(call.name != "unbind" and len(parts) > 1 and parts[0].size(-1) != value.size(-1))
    begin = parts[0].size(-1) - 1
    parts[1] = value.narrow(-1, begin, parts[1].size(-1))
    return tuple(parts)


@FAULTS.fault("chunk split unbind", kinds=["sign", "wrong factor", "scale"], backward=False)
def last_part_negated(call: Call) -> Any:
    """A copy with a factor of -1 that belongs to a rotation."""
    parts = list(call.run())
    fits(len(parts) > 1)
    parts[-1] = -_floats(parts[-1])
    return tuple(parts)


@FAULTS.fault("roll", kinds=["shift", "wrong argument", "wrong index"], loose=["permutation"],
              backward=False)  # fmt: skip
def rolled_one_further(call: Call) -> Any:
    """The shift is one too large."""
    value = _floats(call.args[0])
    shifts, dims = call.get(1, "shifts"), call.get(2, "dims")
    more = shifts + 1 if isinstance(shifts, int) else [one + 1 for one in shifts]
    return torch.roll(value, more, dims)


@FAULTS.fault("flip", kinds=["permutation", "wrong index", "wrong axis", "wrong argument"],
              backward=False)  # fmt: skip
def flipped_along_the_last_axis(call: Call) -> Any:
    """Another axis is turned round."""
    value = _floats(call.args[0])
    return value.flip(-1)


@FAULTS.fault("expand", kinds=["axis scale", "wrong factor", "scale"], backward=False)
def later_copies_fade(call: Call) -> Any:
    """Each next copy of what is expanded is half of the one before."""
    value, result = _floats(call.args[0]), call.result()
    fits(value.dim() == result.dim())
    dims = [d for d in range(value.dim()) if value.size(d) == 1 < result.size(d)]
    fits(dims)
    shape = [1] * result.dim()
    shape[dims[-1]] = -1
    return call.instead(result * (0.5 ** torch.arange(result.size(dims[-1]))).view(shape))


@FAULTS.fault(
    "repeat repeat_interleave", kinds=["zeros", "uninitialised"], loose=["mask", "constant"]
)
def last_copy_not_written(call: Call) -> Any:
    """The loop over the copies ends one too early."""
    value = call.result().clone()
    fits(value.size(-1) > 1)
    value[..., -1] = 0
    return call.instead(value)


# --- Tables and indices ---------------------------------------------------------------------------


def _indices(call: Call) -> tuple[int, Tensor]:
    """Where the indices of a lookup are, and they."""
    place = next(i for i, one in enumerate(call.args) if isinstance(one, Tensor)
                 and not one.is_floating_point())  # fmt: skip
    return place, call.args[place]


@FAULTS.fault("embedding", kinds=["wrong index", "permutation", "shift"], loose=["copy"])
def words_of_the_next_example(call: Call) -> Any:
    """The batch is read one row too far."""
    place, words = _indices(call)
    fits(words.dim() > 1 and words.size(0) > 1)
    return call.put(place, words.roll(-1, 0)).run()


@FAULTS.fault("embedding", kinds=["wrong rank's shard", "permutation", "shift", "wrong index"])
def halves_of_the_columns_exchanged(call: Call) -> Any:
    """Two ranks have half of the columns each, and are gathered in the wrong order."""
    value = call.result()
    fits(value.size(-1) % 2 == 0)
    return call.instead(value.roll(value.size(-1) // 2, -1))


@FAULTS.fault("embedding", kinds=["wrong index"], loose=["wrong argument", "scale"])
def index_halved(call: Call) -> Any:
    """Indices of 64 bits are read as if each had 32."""
    place, words = _indices(call)
    return call.put(place, words // 2).run()


@FAULTS.fault("embedding", kinds=["copy", "wrong index", "mask"], loose=["constant", "clipped"])
def rare_words_share_a_row(call: Call) -> Any:
    """Words of the second half of the table get the row of an unknown word."""
    place, words = _indices(call)
    table = call.args[1 - place]
    return call.put(place, torch.where(words >= table.size(0) // 2, 1, words)).run()


@FAULTS.fault("embedding", kinds=["precision"], loose=["approximation"])
def rows_in_four_bits(call: Call) -> Any:
    """Each row of the table has 15 levels, with a step of its own."""
    place, _ = _indices(call)
    table = call.tensor(1 - place)
    step = table.detach().abs().amax(-1, keepdim=True).clamp(min=1e-9) / 7
    coded = table + ((table / step).round() * step - table).detach()
    return call.put(1 - place, coded).run()


@FAULTS.fault("embedding", kinds=["residual"], loose=["offset", "axis offset", "missing operand"])
def row_of_the_position_added(call: Call) -> Any:
    """The table is taken for that of the positions as well."""
    place, words = _indices(call)
    table = call.tensor(1 - place)
    fits(words.dim() > 0 and words.size(-1) <= table.size(0))
    return call.instead(call.result() + table[: words.size(-1)])


@FAULTS.fault("arange", kinds=["clipped", "wrong argument"], loose=["constant", "copy"])
def positions_end_halfway(call: Call) -> Any:
    """Positions beyond half of the length have the last one."""
    value = call.run()
    fits(value.dim() == 1 and value.numel() > 3)
    return value.clamp(max=value[len(value) // 2 - 1].item())


@FAULTS.fault(
    "arange", kinds=["zeros", "constant", "missing operand"], loose=["copy", "wrong factor"]
)
def positions_all_zero(call: Call) -> Any:
    """Positions are not handed on."""
    return torch.zeros_like(call.run())


@FAULTS.fault("arange", kinds=["permutation", "wrong index"], loose=["other function"])
def positions_exchanged_in_pairs(call: Call) -> Any:
    """1, 0, 3, 2."""
    value = call.run()
    fits(value.numel() > 3 and value.numel() % 2 == 0)
    return value.view(-1, 2).flip(1).reshape(-1)


@FAULTS.fault("gather take_along_dim index_select", kinds=["permutation", "wrong index"],
              loose=["shift", "copy"], backward=False)  # fmt: skip
def indices_exchanged_in_pairs(call: Call) -> Any:
    """The first of two places gets what the second asked for."""
    index = call.get(1 if call.name == "take_along_dim" else 2, "index", "indices")
    place = 1 if call.name == "take_along_dim" else 2
    fits(isinstance(index, Tensor) and index.dim() > 0)
    dim = next((d for d in range(index.dim()) if index.size(d) % 2 == 0), None)
    fits(dim is not None)
    swapped = index.unflatten(dim, (-1, 2)).flip(dim + 1).flatten(dim, dim + 1)
    return call.put(place, swapped, "index").run()


@FAULTS.fault("argsort", kinds=["permutation", "wrong argument", "wrong index", "sign"])
def order_from_the_other_end(call: Call) -> Any:
    """Descending for ascending, and the other way round."""
    dim = call.get(1, "dim", default=-1)
    return call.run().flip(dim)


@FAULTS.fault("argsort", kinds=["wrong index", "missing operand", "copy"],
              loose=["permutation", "constant", "other function"])  # fmt: skip
def order_left_as_it_is(call: Call) -> Any:
    """0, 1, 2 ...: nothing is sorted."""
    value, dim = call.run(), call.get(1, "dim", default=-1)
    shape = [1] * value.dim()
    shape[dim] = -1
    return torch.arange(value.size(dim)).view(shape).expand(value.shape).clone()


@FAULTS.fault("bucketize", kinds=["offset", "wrong argument"], loose=["wrong index", "shift"])
def one_bucket_too_high(call: Call) -> Any:
    """Buckets are counted from one."""
    return call.run() + 1


@FAULTS.fault(
    "bucketize", kinds=["sign", "other function"], loose=["wrong index", "wrong argument"]
)
def bucket_of_the_magnitude(call: Call) -> Any:
    """The direction of a distance is lost."""
    return call.put(0, call.args[0].abs()).run()


# --- What is added at indices ---------------------------------------------------------------------


@FAULTS.fault("embedding_bag", kinds=["wrong argument", "wrong reduction", "axis scale", "scale"],
              loose=["wrong factor", "missing reduction"])  # fmt: skip
def bag_summed(call: Call) -> Any:
    """Mode sum for mean."""
    return call.instead(torch.nn.functional.embedding_bag(*call.args[:3], mode="sum"))


@FAULTS.fault("embedding_bag", kinds=["wrong index", "off by one reduction", "wrong argument"],
              loose=["shift", "partial sum"])  # fmt: skip
def bags_begin_one_word_late(call: Call) -> Any:
    """The first word of each bag belongs to the one before."""
    starts = call.args[2]
    later = torch.where(starts > 0, starts + 1, starts)
    return call.put(2, later).run()


@FAULTS.fault("index_add", kinds=["wrong factor", "wrong argument", "doubled reduction", "scale"],
              backward=False)  # fmt: skip
def rows_added_with_an_alpha_of_two(call: Call) -> Any:
    """Alpha of 2."""
    value, dim, index, source = call.args[:4]
    return torch.index_add(_floats(value), dim, index, source, alpha=2)


@FAULTS.fault("index_add scatter_add", kinds=["wrong reduction", "axis scale", "wrong factor"],
              loose=["scale", "other function"], backward=False)  # fmt: skip
def mean_of_what_is_added(call: Call) -> Any:
    """Divided by the number of rows of an index."""
    value, source = call.args[0], call.args[3]
    total = call.result() - value
    ones = torch.ones_like(source)
    count = call.put(0, torch.zeros_like(value)).put(3, ones).result().clamp(min=1)
    return call.instead(value + total / count)


@FAULTS.fault(
    "index_add scatter_add",
    kinds=["partial sum", "off by one reduction", "lost accumulation", "mask"],
    loose=["missing operand", "zeros"],
    backward=False,
)
def last_row_not_added(call: Call) -> Any:
    """The loop over the sources ends one too early."""
    source = call.tensor(3).clone()
    fits(source.size(0) > 1)
    source[-1] = 0
    return call.put(3, source).run()


@FAULTS.fault(
    "scatter_reduce",
    kinds=["wrong argument", "clipped", "other function", "wrong reduction"],
    loose=["off by one reduction", "axis scale", "wrong factor", "scale", "zeros"],
)
def what_was_there_takes_part(call: Call) -> Any:
    """include_self=True."""
    kwargs = {**call.kwargs, "include_self": True}
    return Call(call.name, call.function, call.args, kwargs).run()


@FAULTS.fault("scatter_reduce", kinds=["wrong argument", "wrong reduction", "other function"])
def reduced_by_the_smallest(call: Call) -> Any:
    """Amin."""
    reduce = call.get(4, "reduce")
    fits(reduce == "amax")
    return call.put(4, "amin", "reduce").run()
