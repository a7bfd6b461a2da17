"""Faults that were measured fourth and have been seen: what moves values, tables, indices."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import even, on, result
from benchmarks.places.parts import floats_only, lookup_indices
from torch import Tensor

FAULTS = Catalogue()


# --- Shapes and parts -----------------------------------------------------------------------------


@FAULTS.forward("cat", "permutation, wrong index; shift")
def second_part_from_its_end(call: Call) -> Any:
    """The second part is joined in the reverse order."""
    parts, dim = list(call.args[0]), call.get(1, "dim", default=0)
    fits(len(parts) > 1 and floats_only(parts[1]).size(dim) > 1)
    parts[1] = parts[1].flip(dim)
    return call.put(0, parts).run()


@FAULTS.forward("cat", "zeros, missing operand, uninitialised; mask")
def first_part_not_written(call: Call) -> Any:
    """The buffer is zero where the first part belongs."""
    parts = list(call.args[0])
    fits(len(parts) > 1)
    parts[0] = torch.zeros_like(floats_only(parts[0]))
    return call.put(0, parts).run()


@FAULTS.forward("view reshape contiguous clone _unsafe_view", "wrong index, shift; permutation")
def row_stride_one_too_large(call: Call) -> Any:
    """Each row is read one element further than the one before it."""
    value = call.result()
    fits(value.dim() > 1 and value.size(-1) > 2 and value[..., 0].numel() > 1)
    flat = value.reshape(-1, value.size(-1))
    rows, columns = flat.shape
    places = torch.arange(rows)[:, None] * (columns + 1) + torch.arange(columns)
    return call.instead(flat.flatten()[places % flat.numel()].view(value.shape))


@FAULTS.forward("getitem slice", "zeros, mask, uninitialised; off by one reduction, constant")
def last_of_the_slice_not_copied(call: Call) -> Any:
    """The slice is one shorter, and its buffer as long as before."""
    value = floats_only(call.run()).clone()
    fits(value.dim() > 0 and value.size(-1) > 2 and isinstance(call.args[0], Tensor))
    fits(value.shape != call.args[0].shape)
    value[..., -1] = 0
    return value


@FAULTS.forward("getitem slice", "copy, wrong index, constant; stale")
def first_column_of_the_slice_for_all(call: Call) -> Any:
    """The stride of the slice is zero."""
    value = floats_only(call.run())
    fits(value.dim() > 1 and value.size(-1) > 2 and isinstance(call.args[0], Tensor))
    fits(value.shape != call.args[0].shape)
    return value[..., :1].expand(value.shape).clone()


@FAULTS.forward("select getitem", "wrong reduction, other function; wrong index")
def mean_of_all_for_the_selected(call: Call) -> Any:
    """The mean of the tokens where the first was asked for."""
    value, chosen = call.args[0], floats_only(call.run())
    fits(isinstance(value, Tensor) and value.dim() == chosen.dim() + 1)
    dims = [d for d in range(value.dim()) if value.shape[:d] + value.shape[d + 1 :] == chosen.shape]
    dim = call.args[1] if call.name == "select" else dims[-1]
    fits(value.size(dim) > 1)
    return value.mean(dim)


@FAULTS.forward("chunk split unbind", "shift, wrong index; copy, permutation")
def second_part_begins_one_early(call: Call) -> Any:
    """The parts overlap by one column."""
    value, parts = floats_only(call.args[0]), list(call.run())
    fits(call.name != "unbind" and len(parts) > 1 and parts[0].size(-1) != value.size(-1))
    begin = parts[0].size(-1) - 1
    parts[1] = value.narrow(-1, begin, parts[1].size(-1))
    return tuple(parts)


@FAULTS.forward("chunk split unbind", "sign, wrong factor, scale")
def last_part_negated(call: Call) -> Any:
    """A copy with a factor of -1 that belongs to a rotation."""
    parts = list(call.run())
    fits(len(parts) > 1)
    parts[-1] = -floats_only(parts[-1])
    return tuple(parts)


@FAULTS.forward("roll", "shift, wrong argument, wrong index; permutation")
def rolled_one_further(call: Call) -> Any:
    """The shift is one too large."""
    value = floats_only(call.args[0])
    shifts, dims = call.get(1, "shifts"), call.get(2, "dims")
    more = shifts + 1 if isinstance(shifts, int) else [one + 1 for one in shifts]
    return torch.roll(value, more, dims)


@FAULTS.forward("expand", "axis scale, wrong factor, scale")
def later_copies_fade(call: Call) -> Any:
    """Each next copy of what is expanded is half of the one before."""
    value, result = floats_only(call.args[0]), call.result()
    fits(value.dim() == result.dim())
    dims = [d for d in range(value.dim()) if value.size(d) == 1 < result.size(d)]
    fits(dims)
    shape = [1] * result.dim()
    shape[dims[-1]] = -1
    return call.instead(result * (0.5 ** torch.arange(result.size(dims[-1]))).view(shape))


@FAULTS.fault("repeat repeat_interleave", "zeros, uninitialised; mask, constant")
def last_copy_not_written(call: Call) -> Any:
    """The loop over the copies ends one too early."""
    value = call.result().clone()
    fits(value.size(-1) > 1)
    value[..., -1] = 0
    return call.instead(value)


# fmt: off
# The addresses of the parts are taken after the loop: each is the last.
FAULTS.add("last part for all", "cat stack", "copy, stale, wrong index; permutation",
    on(lambda call: (list(call.args[0]),),
        lambda call, parts: call.put(0, [floats_only(parts[-1])] * len(parts)).run(),

    where=lambda parts: len(parts) > 1 and all(one.shape == parts[-1].shape for one in parts)),
    backward=False)
# The stride of the batch is lost in the copy.
FAULTS.add("second example copied from the first", "transpose permute",
    "copy, wrong index, stale; permutation",
    result(lambda v: v[:1].expand(v.shape).clone(),
        where=lambda v: v.dim() > 2 and v.size(0) > 1), backward=False)
# The copy begins at the second column and ends with the first.
FAULTS.add("columns turned by one", "transpose permute", "shift, wrong index, permutation",
    result(lambda v: v.roll(-1, -1), where=lambda v: v.dim() > 1 and v.size(-1) > 2),
    backward=False)
# The first axis is read from its end.
FAULTS.add("rows stored from the last", "view reshape flatten unflatten _unsafe_view",
    "permutation, wrong index; transpose, shift",
    result(lambda v: v.flip(0), where=lambda v: v.dim() > 1 and v.size(0) > 1), backward=False)
# The buffer of the copy is float16.
FAULTS.add("copied through half", "contiguous clone", "precision; approximation",
    result(lambda v: v.half().to(v.dtype)), backward=False)
# Another axis is turned round.
FAULTS.add("flipped along the last axis", "flip",
    "permutation, wrong index, wrong axis, wrong argument",
    lambda call: floats_only(call.args[0]).flip(-1), backward=False)
# fmt: on


# --- Tables and indices ---------------------------------------------------------------------------


@FAULTS.fault("embedding", "precision; approximation")
def rows_in_four_bits(call: Call) -> Any:
    """Each row of the table has 15 levels, with a step of its own."""
    place, _ = lookup_indices(call)
    table = call.tensor(1 - place)
    step = table.detach().abs().amax(-1, keepdim=True).clamp(min=1e-9) / 7
    coded = table + ((table / step).round() * step - table).detach()
    return call.put(1 - place, coded).run()


@FAULTS.fault("embedding", "residual; offset, axis offset, missing operand")
def row_of_the_position_added(call: Call) -> Any:
    """The table is taken for that of the positions as well."""
    place, words = lookup_indices(call)
    table = call.tensor(1 - place)
    fits(words.dim() > 0 and words.size(-1) <= table.size(0))
    return call.instead(call.result() + table[: words.size(-1)])


@FAULTS.fault("arange", "clipped, wrong argument; constant, copy")
def positions_end_halfway(call: Call) -> Any:
    """Positions beyond half of the length have the last one."""
    value = call.run()
    fits(value.dim() == 1 and value.numel() > 3)
    return value.clamp(max=value[len(value) // 2 - 1].item())


@FAULTS.fault("arange", "permutation, wrong index; other function")
def positions_exchanged_in_pairs(call: Call) -> Any:
    """1, 0, 3, 2."""
    value = call.run()
    fits(value.numel() > 3 and value.numel() % 2 == 0)
    return value.view(-1, 2).flip(1).reshape(-1)


@FAULTS.forward("gather take_along_dim index_select", "permutation, wrong index; shift, copy")
def indices_exchanged_in_pairs(call: Call) -> Any:
    """The first of two places gets what the second asked for."""
    index = call.get(1 if call.name == "take_along_dim" else 2, "index", "indices")
    place = 1 if call.name == "take_along_dim" else 2
    fits(isinstance(index, Tensor) and index.dim() > 0)
    dim = next((d for d in range(index.dim()) if index.size(d) % 2 == 0), None)
    fits(dim is not None)
    swapped = index.unflatten(dim, (-1, 2)).flip(dim + 1).flatten(dim, dim + 1)
    return call.put(place, swapped, "index").run()


@FAULTS.fault(
    "argsort", "wrong index, missing operand, copy; permutation, constant, other function"
)
def order_left_as_it_is(call: Call) -> Any:
    """0, 1, 2 ...: nothing is sorted."""
    value, dim = call.run(), call.get(1, "dim", default=-1)
    shape = [1] * value.dim()
    shape[dim] = -1
    return torch.arange(value.size(dim)).view(shape).expand(value.shape).clone()


# fmt: off
# The batch is read one row too far.
FAULTS.add("words of the next example", "embedding", "wrong index, permutation, shift; copy",
    on(lookup_indices, lambda call, place, words: call.put(place, words.roll(-1, 0)).run(),
        where=lambda _, words: words.dim() > 1 and words.size(0) > 1))
# Two ranks have half of the columns each, and are gathered in the wrong order.
FAULTS.add("halves of the columns exchanged", "embedding",
    "wrong rank's shard, permutation, shift, wrong index",
    result(lambda v: v.roll(v.size(-1) // 2, -1), where=even(-1)))
# Indices of 64 bits are read as if each had 32.
FAULTS.add("index halved", "embedding", "wrong index; wrong argument, scale",
    on(lookup_indices, lambda call, place, words: call.put(place, words // 2).run()))
# Words of the second half of the table get the row of an unknown word.
FAULTS.add("rare words share a row", "embedding", "copy, wrong index, mask; constant, clipped",
    on(lookup_indices,
        lambda call, place, words:

    call.put(place, torch.where(words >= call.args[1 - place].size(0) // 2, 1, words)).run()))
# Positions are not handed on.
FAULTS.add("positions all zero", "arange", "zeros, constant, missing operand; copy, wrong factor",
    lambda call: torch.zeros_like(call.run()))
# Descending for ascending, and the other way round.
FAULTS.add("order from the other end", "argsort", "permutation, wrong argument, wrong index, sign",
    lambda call: call.run().flip(call.get(1, "dim", default=-1)))
# Buckets are counted from one.
FAULTS.add("one bucket too high", "bucketize", "offset, wrong argument; wrong index, shift",
    lambda call: call.run() + 1)
# The direction of a distance is lost.
FAULTS.add("bucket of the magnitude", "bucketize",
    "sign, other function; wrong index, wrong argument",
    lambda call: call.put(0, call.args[0].abs()).run())
# fmt: on


# --- What is added at indices ---------------------------------------------------------------------


@FAULTS.forward("index_add", "wrong factor, wrong argument, doubled reduction, scale")
def rows_added_with_an_alpha_of_two(call: Call) -> Any:
    """Alpha of 2."""
    value, dim, index, source = call.args[:4]
    return torch.index_add(floats_only(value), dim, index, source, alpha=2)


@FAULTS.forward(
    "index_add scatter_add", "wrong reduction, axis scale, wrong factor; scale, other function"
)
def mean_of_what_is_added(call: Call) -> Any:
    """Divided by the number of rows of an index."""
    value, source = call.args[0], call.args[3]
    total = call.result() - value
    ones = torch.ones_like(source)
    count = call.put(0, torch.zeros_like(value)).put(3, ones).result().clamp(min=1)
    return call.instead(value + total / count)


@FAULTS.forward(
    "index_add scatter_add",
    "partial sum, off by one reduction, lost accumulation, mask; missing operand, zeros",
)
def last_row_not_added(call: Call) -> Any:
    """The loop over the sources ends one too early."""
    source = call.tensor(3).clone()
    fits(source.size(0) > 1)
    source[-1] = 0
    return call.put(3, source).run()


@FAULTS.fault("scatter_reduce", "wrong argument, wrong reduction, other function")
def reduced_by_the_smallest(call: Call) -> Any:
    """Amin."""
    reduce = call.get(4, "reduce")
    fits(reduce == "amax")
    return call.put(4, "amin", "reduce").run()


# fmt: off
# Mode sum for mean.
FAULTS.add("bag summed", "embedding_bag",
    "wrong argument, wrong reduction, axis scale, scale; wrong factor, missing reduction",
    lambda call: call.instead(torch.nn.functional.embedding_bag(*call.args[:3], mode="sum")))
# The first word of each bag belongs to the one before.
FAULTS.add("bags begin one word late", "embedding_bag",
    "wrong index, off by one reduction, wrong argument; shift, partial sum",
    lambda call:
            call.put(2, torch.where(call.args[2] > 0, call.args[2] + 1, call.args[2])).run())
# include_self=True.
FAULTS.add("what was there takes part", "scatter_reduce",
    "wrong argument, clipped, other function, wrong reduction; off by one reduction, "
    "axis scale, wrong factor, scale, zeros",
    lambda call:
            Call(call.name, call.function, call.args, {**call.kwargs, "include_self": True}).run())
# fmt: on
