"""Operators that move elements without computing anything: views, slices, look-ups."""

from __future__ import annotations

from math import gcd, prod
from typing import Any

import torch

from paritas.core.operators.calls import Bound, dim_of, letters, named, positive_dims
from paritas.sharding.operators.library.registry import (
    AVERAGE,
    SUM,
    RuleClaim,
    frozen,
    once,
    rule,
    unary,
)

# --- Views and permutations -----------------------------------------------------------------------

# Of dimensions that are merged or unflattened, the first one can be split, because its parts are
# contiguous. Sizes in the call are divided with it.


def _regroup(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[list[str], list[str]] | None:
    """The dimensions of a tensor and of its view, which have the same elements in the same order.

    The dimensions form runs of equal products. In a run, the first dimensions of both sides share a
    factor by which both can be split.
    """
    if prod(shape) != prod(sizes) or prod(shape) == 0:
        return None
    before, after = ["1"] * len(shape), ["1"] * len(sizes)
    i = j = 0
    for name in letters(len(shape) + len(sizes)):
        while i < len(shape) and shape[i] == 1:
            i += 1
        while j < len(sizes) and sizes[j] == 1:
            j += 1
        if i == len(shape) or j == len(sizes):
            break
        common = gcd(shape[i], sizes[j])
        before[i], after[j] = _factored(name, common, shape[i]), _factored(name, common, sizes[j])
        left, right, i, j = shape[i], sizes[j], i + 1, j + 1
        while left != right:
            if left < right:
                left, before[i], i = left * shape[i], str(shape[i]), i + 1
            else:
                right, after[j], j = right * sizes[j], str(sizes[j]), j + 1
    return before, after


def _factored(name: str, common: int, size: int) -> str:
    if common == 1:
        return str(size)
    return name if common == size else f"({name} {size // common})"


def _view(bound: Bound, sizes: Any, parameter: str, first: int = 0) -> RuleClaim | None:
    """A view of a tensor with these sizes; the call names those from `first` on."""
    shape = bound.shape()
    if shape is None or not all(isinstance(size, int) for size in sizes):
        return None
    sizes = tuple(sizes)
    if -1 in sizes:
        rest = prod(size for size in sizes if size != -1)
        sizes = tuple(prod(shape) // rest if size == -1 and rest else size for size in sizes)
    dims = _regroup(shape, sizes)
    if dims is None:
        return None
    numbers = tuple(
        (parameter, i, dims[1][first + i])
        for i, size in enumerate(bound.get(parameter))
        if size != -1 and not dims[1][first + i].isdecimal()
    )
    return RuleClaim({"x": dims[0]}, (dims[1],), numbers)


@rule("view _unsafe_view view_copy reshape")
def _as_sizes(bound: Bound) -> RuleClaim | None:
    parameter = "shape" if "shape" in bound.values else "size"
    sizes = bound.get(parameter)
    return _view(bound, sizes, parameter) if isinstance(sizes, list | tuple) else None


@rule("flatten ravel")
def _flatten(bound: Bound) -> RuleClaim | None:
    shape = bound.shape()
    if not shape:
        return None
    start = bound.get("start_dim", 0) % len(shape)
    end = bound.get("end_dim", -1) % len(shape)
    dims = _regroup(shape, (*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]))
    return dims and unary(*dims)


@rule("unflatten")
def _unflatten(bound: Bound) -> RuleClaim | None:
    shape, sizes = bound.shape(), bound.get("sizes")
    at = positive_dims(bound.get("dim"), shape)
    if shape is None or at is None or not isinstance(sizes, list | tuple):
        return None
    rest = prod(size for size in sizes if size != -1)
    full = tuple(shape[at[0]] // rest if size == -1 else size for size in sizes)
    return _view(bound, (*shape[: at[0]], *full, *shape[at[0] + 1 :]), "sizes", at[0])


def _permuted(bound: Bound, order: tuple[int, ...]) -> RuleClaim | None:
    dims = bound.dims()
    if dims is None or sorted(order) != list(range(len(dims))):
        return None
    return unary(dims, [dims[i] for i in order])


@rule("permute")
def _permute(bound: Bound) -> RuleClaim | None:
    order = positive_dims(bound.get("dims"), bound.shape())
    return None if order is None else _permuted(bound, order)


@rule("transpose swapdims swapaxes")
def _transpose(bound: Bound) -> RuleClaim | None:
    pair = [value for name, value in bound.values.items() if name != "x"]
    shape = bound.shape()
    dims = positive_dims(pair, shape)
    if shape is None or dims is None or len(pair) != 2:  # noqa: PLR2004 - a pair
        return None
    order = list(range(len(shape)))
    order[dims[0]], order[dims[1]] = order[dims[1]], order[dims[0]]
    return _permuted(bound, tuple(order))


@rule("t adjoint")
def _matrix_transpose(bound: Bound) -> RuleClaim | None:
    count = len(bound.shape() or ())
    if count < 2:  # noqa: PLR2004 - a matrix
        return None
    return _permuted(bound, (*range(count - 2), count - 1, count - 2))


@rule("movedim moveaxis")
def _move(bound: Bound) -> RuleClaim | None:
    shape = bound.shape()
    source = positive_dims(bound.get("source"), shape)
    destination = positive_dims(bound.get("destination"), shape)
    if shape is None or source is None or destination is None or len(source) != len(destination):
        return None
    place = dict(zip(destination, source, strict=True))
    others = iter([i for i in range(len(shape)) if i not in source])
    order = tuple(place[i] if i in place else next(others) for i in range(len(shape)))
    return _permuted(bound, order)


# --- Dimensions of length 1, and repetition -------------------------------------------------------


@rule("unsqueeze")
def _unsqueeze(bound: Bound) -> RuleClaim | None:
    dims, dim = bound.dims(), bound.get("dim")
    if dims is None or not isinstance(dim, int):
        return None
    at = dim % (len(dims) + 1)
    return unary(dims, [*dims[:at], "1", *dims[at:]])


@rule("squeeze")
def _squeeze(bound: Bound) -> RuleClaim | None:
    """A part of length 1 would be removed too, so squeezed dimensions are not split."""
    dims, asked = bound.dims(), positive_dims(bound.get("dim"), bound.shape())
    if dims is None or asked is None or bound.get("dim") in ((), []):
        return None
    dims = frozen(dims, asked)
    return unary(dims, [d for i, d in enumerate(dims) if not (i in asked and d == "1")])


@rule("expand broadcast_to")
def _expand(bound: Bound) -> RuleClaim | None:
    """New lengths are the same on all ranks; existing ones may be repeated in the call."""
    dims, sizes = bound.dims(), bound.get("size")
    if dims is None or not isinstance(sizes, list | tuple) or len(sizes) < len(dims):
        return None
    new = len(sizes) - len(dims)
    outside = [
        str(size) if i < new or (dims[i - new] == "1" and size != -1) else dims[i - new]
        for i, size in enumerate(sizes)
    ]
    numbers = tuple(
        ("size", i, dim) for i, dim in enumerate(outside) if not dim.isdecimal() and sizes[i] != -1
    )
    return RuleClaim({"x": dims}, (outside,), numbers)


@rule("repeat tile")
def _repeat(bound: Bound) -> RuleClaim | None:
    """A repeated dimension is not split."""
    dims, times = bound.dims(), bound.get("repeats", bound.get("dims"))
    if dims is None or not isinstance(times, list | tuple) or len(times) < len(dims):
        return None
    new = len(times) - len(dims)
    inside = frozen(dims, [i for i in range(len(dims)) if times[new + i] != 1])
    outside = ["_" if i < new or times[i] != 1 else inside[i - new] for i in range(len(times))]
    return unary(inside, outside)


@rule("repeat_interleave")
def _interleave(bound: Bound) -> RuleClaim | None:
    """The copies of an element are adjacent."""
    dims, times = bound.dims(), bound.get("repeats")
    at = positive_dims(bound.get("dim"), bound.shape())
    if dims is None or at is None or not isinstance(bound.get("dim"), int):
        return None
    if not isinstance(times, int) or bound.get("output_size") is not None:
        return None
    outside = list(dims)
    dim = dims[at[0]]
    outside[at[0]] = str(times) if dim == "1" else f"({dim} {times})"
    return unary(dims, outside)


@rule("pixel_shuffle")
def _pixel_shuffle(bound: Bound) -> RuleClaim | None:
    dims = _pixels(bound, bound.get("upscale_factor"))
    return dims and unary(*dims)


@rule("pixel_unshuffle")
def _pixel_unshuffle(bound: Bound) -> RuleClaim | None:
    dims = _pixels(bound, bound.get("downscale_factor"))
    return dims and unary(dims[1], dims[0])


def _pixels(bound: Bound, factor: Any) -> tuple[list[str], list[str]] | None:
    """The dimensions with deep channels, and those with channels unfolded into pixels."""
    shape = bound.shape()
    if shape is None or len(shape) < 3 or not isinstance(factor, int):  # noqa: PLR2004
        return None
    stack = named(shape[:-3], [f"s{i}" for i in range(len(shape) - 3)])
    deep = [*stack, f"(c {factor * factor})", "h", "w"]
    return deep, [*stack, "c", f"(h {factor})", f"(w {factor})"]


# --- Joining, cutting, padding and moving along a dimension, which is not split -------------------


def _whole_along(bound: Bound, dim: Any, parameter: str = "x") -> list[str] | None:
    """The dimensions of a tensor, with `_` for those that an operator works along."""
    dims, whole = bound.dims(parameter), positive_dims(dim, bound.shape(parameter))
    if dims is None or whole is None:
        return None
    return ["_" if i in whole else d for i, d in enumerate(dims)]


def _common_dims(tensors: Any, dim: Any, *, new: bool) -> tuple[list[str], int] | None:
    """The dimensions that the tensors of a list have in common, and the one they are joined at."""
    if not isinstance(tensors, list | tuple) or not tensors or not isinstance(dim, int):
        return None
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return None
    shape = tuple(tensors[0].shape)
    if not shape or any(tensor.dim() != len(shape) for tensor in tensors):
        return None
    return named(shape, letters(len(shape))), dim % (len(shape) + new)


@rule("cat concat concatenate")
def _cat(bound: Bound) -> RuleClaim | None:
    return _concatenated(bound.get("tensors"), bound.get("dim", 0))


@rule("hstack")
def _hstack(bound: Bound) -> RuleClaim | None:
    tensors = bound.get("tensors")
    first = tensors[0] if isinstance(tensors, list | tuple) and tensors else None
    is_vector = isinstance(first, torch.Tensor) and first.dim() == 1
    return _concatenated(tensors, 0 if is_vector else 1)


def _concatenated(tensors: Any, dim: Any) -> RuleClaim | None:
    found = _common_dims(tensors, dim, new=False)
    if found is None:
        return None
    dims, at = found
    dims[at] = "_"
    return RuleClaim({"tensors": dims}, (dims,))


@rule("stack")
def _stack(bound: Bound) -> RuleClaim | None:
    found = _common_dims(bound.get("tensors"), bound.get("dim", 0), new=True)
    if found is None:
        return None
    dims, at = found
    outside = [*dims[:at], str(len(bound.get("tensors"))), *dims[at:]]
    return RuleClaim({"tensors": dims}, (outside,))


@rule("chunk split split_with_sizes tensor_split")
def _cut(bound: Bound) -> RuleClaim | None:
    """The dimension is not split, so the number of results stays the same."""
    shape = bound.shape()
    at = positive_dims(bound.get("dim", 0), shape)
    dims = _whole_along(bound, bound.get("dim", 0))
    how = next((value for name, value in bound.values.items() if name not in ("x", "dim")), None)
    if shape is None or at is None or dims is None or how is None or isinstance(how, torch.Tensor):
        return None
    return RuleClaim({"x": dims}, (dims,) * _pieces(bound, shape[at[0]], how))


def _pieces(bound: Bound, size: int, how: Any) -> int:
    if "indices_or_sections" in bound.values:
        return how if isinstance(how, int) else len(how) + 1
    if not isinstance(how, int):
        return len(how)
    width = -(-size // how) if "chunks" in bound.values else how
    return max(1, -(-size // width)) if width else 1


@rule("unbind")
def _unbind(bound: Bound) -> RuleClaim | None:
    shape = bound.shape()
    at = positive_dims(bound.get("dim", 0), shape)
    dims = _whole_along(bound, bound.get("dim", 0))
    if shape is None or at is None or dims is None:
        return None
    outside = [*dims[: at[0]], *dims[at[0] + 1 :]]
    return RuleClaim({"x": dims}, (outside,) * shape[at[0]])


@rule("select")
def _select(bound: Bound) -> RuleClaim | None:
    at = positive_dims(bound.get("dim"), bound.shape())
    dims = _whole_along(bound, bound.get("dim"))
    if at is None or dims is None or bound.has("index"):
        return None
    return unary(dims, [*dims[: at[0]], *dims[at[0] + 1 :]])


@rule("narrow diff")
def _shorter(bound: Bound) -> RuleClaim | None:
    return None if bound.has("start") else unary(_whole_along(bound, bound.get("dim", -1)))


@rule("Tensor.unfold aten.unfold")
def _unfold(bound: Bound) -> RuleClaim | None:
    """The windows are a new last dimension."""
    dims = _whole_along(bound, bound.get("dimension", -1))
    return None if dims is None else unary(dims, [*dims, "_"])


@rule("slice")
def _slice(bound: Bound) -> RuleClaim | None:
    return unary(_whole_along(bound, bound.get("dim", 0)))


@rule("flip roll rot90")
def _moved(bound: Bound) -> RuleClaim | None:
    """Elements move within the dimensions."""
    rotates = "k" in bound.values
    given = bound.get("dims", (0, 1) if rotates else None)
    at = positive_dims(given, bound.shape())
    if at is None or (rotates and len(at) != 2):  # noqa: PLR2004 - a plane
        return None
    return unary(_whole_along(bound, given))


@rule("triu tril")
def _triangle(bound: Bound) -> RuleClaim | None:
    return unary(_whole_along(bound, (-2, -1)))


@rule("diagonal")
def _diagonal(bound: Bound) -> RuleClaim | None:
    plane = (bound.get("dim1", 0), bound.get("dim2", 1))
    at, dims = positive_dims(plane, bound.shape()), _whole_along(bound, plane)
    if at is None or dims is None:
        return None
    return unary(dims, [*(d for i, d in enumerate(dims) if i not in at), "_"])


@rule("pad constant_pad_nd")
def _pad(bound: Bound) -> RuleClaim | None:
    """Pairs start at the last dimension; a dimension without padding can be split."""
    dims, pad = bound.dims(), bound.get("pad")
    if not dims or not isinstance(pad, list | tuple):
        return None
    pairs = [tuple(pad[2 * i : 2 * i + 2]) for i in range(len(pad) // 2)]
    padded = [len(dims) - 1 - i for i, pair in enumerate(pairs) if pair != (0, 0)]
    return unary(["_" if i in padded else d for i, d in enumerate(dims)])


@rule("fft ifft rfft irfft hfft")
def _fourier(bound: Bound) -> RuleClaim | None:
    return unary(_whole_along(bound, bound.get("dim", -1)))


@rule("cross")
def _cross(bound: Bound) -> RuleClaim | None:
    dims = _whole_along(bound, bound.get("dim", -1))
    if dims is None or bound.shape() != bound.shape("other"):
        return None
    return RuleClaim({"x": dims, "other": dims}, (dims,))


@rule("inv inverse cholesky matrix_exp")
def _of_matrices(bound: Bound) -> RuleClaim | None:
    """One matrix for each matrix of a batch."""
    dims = _whole_along(bound, (-2, -1), "A")
    return None if dims is None else RuleClaim({"A": dims}, (dims,))


@rule("det logdet")
def _determinant(bound: Bound) -> RuleClaim | None:
    """One number for each matrix of a batch."""
    dims = _whole_along(bound, (-2, -1), "A")
    return None if dims is None else RuleClaim({"A": dims}, (dims[:-2],))


# --- Look-ups by index ----------------------------------------------------------------------------


def _rows(bound: Bound, index: str) -> RuleClaim | None:
    """Rows of a table; gradients that are scaled by the frequency of an index need all indices."""
    dims, table = bound.dims(index), bound.shape("weight")
    if dims is None or table is None or len(table) != 2:  # noqa: PLR2004 - a table
        return None
    if bound.get("scale_grad_by_freq"):
        dims = frozen(dims, range(len(dims)))
    width = dim_of(table[1], "w")
    return RuleClaim({index: dims, "weight": ["v^", width]}, ([*dims, width],))


@rule("functional.embedding")
def _embedding(bound: Bound) -> RuleClaim | None:
    """With `max_norm` the table is modified, so there is no claim."""
    if bound.get("max_norm") is not None or bound.get("sparse"):
        return None
    return _rows(bound, "x")


@rule("aten.embedding torch.embedding")
def _table_first(bound: Bound) -> RuleClaim | None:
    return None if bound.get("sparse") else _rows(bound, "indices")


@rule("embedding_bag")
def _bags(bound: Bound) -> RuleClaim | None:
    """Bags of equal size; the items of a bag are terms, unless some of them do not count."""
    ids, table = bound.shape(), bound.shape("weight")
    refused = ("max_norm", "sparse", "scale_grad_by_freq", "offsets", "include_last_offset")
    plain = all(bound.get(name) is None or bound.get(name) is False for name in refused)
    if ids is None or table is None or len(ids) != 2 or not plain:  # noqa: PLR2004 - bags of ids
        return None
    mode = bound.get("mode", "mean")
    mark = {"sum": SUM, "mean": AVERAGE}.get(mode, "^")
    if bound.get("padding_idx") is not None and mode != "sum":
        mark = "^"
    width = dim_of(table[1], "w")
    items = named(ids, ["b", f"i{mark}"])
    inputs = {"x": items, "weight": ["v^", width]}
    if bound.has("per_sample_weights"):
        inputs["per_sample_weights"] = items
    return RuleClaim(inputs, ([items[0], width],))


def _along_index(
    bound: Bound, mark: str, index: str = "index"
) -> tuple[list[str], list[str], int] | None:
    """A tensor, an index into it along `dim`, and that dimension.

    Other dimensions are split if they are equally long.
    """
    shape, counts = bound.shape(), bound.shape(index)
    at = positive_dims(bound.get("dim"), shape)
    if shape is None or counts is None or at is None or len(counts) != len(shape):
        return None
    pairs = zip(letters(len(shape)), shape, counts, strict=True)
    table = [dim_of(size, name) if size == count else "_" for name, size, count in pairs]
    table[at[0]] = "_"
    ids = list(table)
    ids[at[0]] = dim_of(counts[at[0]], mark)
    return table, ids, at[0]


@rule("gather")
def _gather(bound: Bound) -> RuleClaim | None:
    found = _along_index(bound, "i")
    return found and RuleClaim({"x": found[0], "index": found[1]}, (found[1],))


@rule("take_along_dim")
def _take_along(bound: Bound) -> RuleClaim | None:
    """Like gather, but without a claim for shapes that broadcast."""
    found = _along_index(bound, "i", "indices")
    if found is None or not isinstance(bound.get("dim"), int):
        return None
    table, ids, at = found
    if "_" in [*table[:at], *table[at + 1 :]]:
        return None
    return RuleClaim({"x": table, "indices": ids}, (ids,))


@rule("scatter")
def _scatter(bound: Bound) -> RuleClaim | None:
    """The last of equal indices wins, so indices are not split."""
    return None if bound.get("reduce") is not None else _scattered(bound, "i^")


@rule("scatter_add")
def _scatter_add(bound: Bound) -> RuleClaim | None:
    """The added values are terms of a sum, and so is the tensor that they are added to."""
    return _scattered(bound, f"i{SUM}")


def _scattered(bound: Bound, mark: str) -> RuleClaim | None:
    found = _along_index(bound, mark)
    if found is None or bound.shape("src") != bound.shape("index"):
        return None
    table, ids, at = found
    return RuleClaim({"x": once(table, ids[at]), "index": ids, "src": ids}, (table,))


@rule("torch.index_select Tensor.index_select aten.index_select")
def index_select(bound: Bound) -> RuleClaim | None:
    """Rows in the order of the index, which can be split with the result."""
    found = _row_dims(bound, "i")
    if found is None:
        return None
    table, rows, ids = found
    return RuleClaim({"x": table, "index": [ids]}, (rows,))


@rule("index_add")
def _index_add(bound: Bound) -> RuleClaim | None:
    return _indexed(bound, f"i{SUM}")


@rule("index_copy index_fill")
def _index_copy(bound: Bound) -> RuleClaim | None:
    return _indexed(bound, "i^")


def _indexed(bound: Bound, mark: str) -> RuleClaim | None:
    """Writing to the rows that an index names."""
    found = _row_dims(bound, mark)
    if found is None:
        return None
    table, rows, ids = found
    source = {"source": rows} if bound.has("source") else {}
    return RuleClaim({"x": once(table, ids), "index": [ids], **source}, (table,))


def _row_dims(bound: Bound, mark: str) -> tuple[list[str], list[str], str] | None:
    """The dimensions of a table, of the rows that an index selects, and of the index."""
    dims, index = bound.dims(), bound.shape("index")
    at = positive_dims(bound.get("dim"), bound.shape())
    if dims is None or index is None or at is None or len(index) != 1:
        return None
    ids = dim_of(index[0], mark)
    table = ["_" if i in at else d for i, d in enumerate(dims)]
    return table, [ids if i in at else d for i, d in enumerate(dims)], ids


@rule("take bucketize isin")
def _looked_up(bound: Bound) -> RuleClaim | None:
    """Each element of one tensor is looked up in the whole other tensor."""
    asked = {"index": "x", "boundaries": "boundaries", "test_elements": "test_elements"}
    name = next((name for name in asked if bound.has(name)), "")
    table = asked.get(name, "")
    elements = name if name == "index" else next(iter(bound.values))
    dims, whole = bound.dims(elements), bound.shape(table)
    if dims is None or whole is None:
        return None
    return RuleClaim({elements: dims, table: ["_"] * len(whole)}, (dims,))


@rule("searchsorted")
def _search(bound: Bound) -> RuleClaim | None:
    """One sequence for all, or one for each row."""
    sequence, dims = bound.shape("sorted_sequence"), bound.dims()
    if not sequence or not dims:
        return None
    rows = dims[:-1] if len(sequence) > 1 else []
    return RuleClaim({"sorted_sequence": [*rows, "_"], "x": dims}, (dims,))
