"""Operators that move elements and compute nothing: views, slices, look-ups."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd, prod
from typing import Any

import torch

from paritas.partition.library.registry import (
    AVERAGE,
    SUM,
    Bound,
    RuleClaim,
    everywhere,
    frozen,
    functional,
    letters,
    named,
    once,
    positive_dims,
    rule,
)

# --- Views and permutations -----------------------------------------------------------------------

# Of dimensions that are merged or taken apart, the first one can be split: what belongs to a part
# of it is contiguous. Sizes that the call names are divided with it.


def regroup(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[list[str], list[str]] | None:
    """The dimensions of a tensor and of its view, where both go through the elements in order.

    Dimensions fall into runs of equal products. In a run the first dimensions on both sides share
    a factor; by that factor both can be split.
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
    """A view of a tensor as sizes, of which the call names those from `first` on."""
    shape = bound.shape("x")
    if shape is None or not all(isinstance(size, int) for size in sizes):
        return None
    sizes = tuple(sizes)
    if -1 in sizes:
        rest = prod(size for size in sizes if size != -1)
        sizes = tuple(prod(shape) // rest if size == -1 and rest else size for size in sizes)
    dims = regroup(shape, sizes)
    if dims is None:
        return None
    named_sizes = bound.get(parameter)
    numbers = tuple(
        (parameter, i, dims[1][first + i])
        for i, size in enumerate(named_sizes)
        if size != -1 and not dims[1][first + i].isdecimal()
    )
    return RuleClaim({"x": " ".join(dims[0])}, (" ".join(dims[1]),), numbers)


@rule("x *size", "torch.Tensor.view aten.view aten._unsafe_view aten.view_copy")
@rule("x *shape", everywhere("reshape"))
def _as_sizes(bound: Bound) -> RuleClaim | None:
    parameter = "shape" if "shape" in bound.values else "size"
    sizes = bound.get(parameter)
    return _view(bound, sizes, parameter) if isinstance(sizes, list | tuple) else None


@rule("x start_dim end_dim", everywhere("flatten"))
@rule("x", everywhere("ravel"))
def _flatten(bound: Bound) -> RuleClaim | None:
    shape = bound.shape("x")
    if not shape:
        return None
    start = bound.get("start_dim", 0) % len(shape)
    end = bound.get("end_dim", -1) % len(shape)
    sizes = (*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :])
    dims = regroup(shape, sizes)
    return dims and RuleClaim({"x": " ".join(dims[0])}, (" ".join(dims[1]),))


@rule("x dim sizes", everywhere("unflatten"))
def _unflatten(bound: Bound) -> RuleClaim | None:
    shape, sizes = bound.shape("x"), bound.get("sizes")
    at = positive_dims(bound.get("dim"), shape)
    if shape is None or at is None or not isinstance(sizes, list | tuple):
        return None
    rest = prod(size for size in sizes if size != -1)
    full = tuple(shape[at[0]] // rest if size == -1 else size for size in sizes)
    return _view(bound, (*shape[: at[0]], *full, *shape[at[0] + 1 :]), "sizes", at[0])


# --- permutations ---------------------------------------------------------------------------------


def _permuted(bound: Bound, order: tuple[int, ...]) -> RuleClaim | None:
    shape = bound.shape("x")
    if shape is None or sorted(order) != list(range(len(shape))):
        return None
    dims = named(shape, letters(len(shape))).split()
    return RuleClaim({"x": " ".join(dims)}, (" ".join(dims[i] for i in order),))


@rule("x *dims", everywhere("permute"))
def _permute(bound: Bound) -> RuleClaim | None:
    order = positive_dims(bound.get("dims"), bound.shape("x"))
    return None if order is None else _permuted(bound, order)


@rule("x dim0 dim1", everywhere("transpose"))
@rule("x dim0 dim1", "torch.swapdims torch.Tensor.swapdims")
@rule("x axis0 axis1", "torch.swapaxes torch.Tensor.swapaxes")
def _transpose(bound: Bound) -> RuleClaim | None:
    pair = [value for name, value in bound.values.items() if name != "x"]
    shape = bound.shape("x")
    dims = positive_dims(pair, shape)
    if shape is None or dims is None or len(pair) != 2:  # noqa: PLR2004 - a pair
        return None
    order = list(range(len(shape)))
    order[dims[0]], order[dims[1]] = order[dims[1]], order[dims[0]]
    return _permuted(bound, tuple(order))


@rule("x", everywhere("t"))
@rule("x", "torch.adjoint torch.Tensor.adjoint")
def _matrix_transpose(bound: Bound) -> RuleClaim | None:
    count = len(bound.shape("x") or ())
    if count < 2:  # noqa: PLR2004 - a matrix
        return None
    return _permuted(bound, (*range(count - 2), count - 1, count - 2))


@rule("x source destination", everywhere("movedim moveaxis"))
def _move(bound: Bound) -> RuleClaim | None:
    shape = bound.shape("x")
    source = positive_dims(bound.get("source"), shape)
    destination = positive_dims(bound.get("destination"), shape)
    if shape is None or source is None or destination is None or len(source) != len(destination):
        return None
    place = dict(zip(destination, source, strict=True))
    others = iter([i for i in range(len(shape)) if i not in source])
    order = tuple(place[i] if i in place else next(others) for i in range(len(shape)))
    return _permuted(bound, order)


# --- lengths of 1, and repetition -----------------------------------------------------------------


@rule("x dim", everywhere("unsqueeze"))
def _unsqueeze(bound: Bound) -> RuleClaim | None:
    shape, dim = bound.shape("x"), bound.get("dim")
    if shape is None or not isinstance(dim, int):
        return None
    dims = named(shape, letters(len(shape))).split()
    at = dim % (len(shape) + 1)
    return RuleClaim({"x": " ".join(dims)}, (" ".join([*dims[:at], "1", *dims[at:]]),))


@rule("x dim", everywhere("squeeze"))
def _squeeze(bound: Bound) -> RuleClaim | None:
    """A part of length 1 would be taken away too, so dimensions that are asked about stay whole."""
    shape = bound.shape("x")
    asked = positive_dims(bound.get("dim"), shape)
    if shape is None or asked is None or bound.get("dim") in ((), []):
        return None
    dims = frozen(named(shape, letters(len(shape))), asked).split()
    kept = [d for i, d in enumerate(dims) if not (i in asked and shape[i] == 1)]
    return RuleClaim({"x": " ".join(dims)}, (" ".join(kept),))


@rule("x *size", "torch.Tensor.expand aten.expand torch.broadcast_to torch.Tensor.broadcast_to")
def _expand(bound: Bound) -> RuleClaim | None:
    """New lengths are the same on all ranks; those that were there may be named again."""
    shape, sizes = bound.shape("x"), bound.get("size")
    if shape is None or not isinstance(sizes, list | tuple) or len(sizes) < len(shape):
        return None
    new = len(sizes) - len(shape)
    dims = named(shape, letters(len(shape))).split()
    outside = [
        str(size) if i < new or (shape[i - new] == 1 and size != -1) else dims[i - new]
        for i, size in enumerate(sizes)
    ]
    numbers = tuple(
        ("size", i, dim) for i, dim in enumerate(outside) if not dim.isdecimal() and sizes[i] != -1
    )
    return RuleClaim({"x": " ".join(dims)}, (" ".join(outside),), numbers)


@rule("x *repeats", "torch.Tensor.repeat aten.repeat")
@rule("x dims", "torch.tile torch.Tensor.tile")
def _repeat(bound: Bound) -> RuleClaim | None:
    """What is repeated as a whole stays whole."""
    shape, times = bound.shape("x"), bound.get("repeats", bound.get("dims"))
    if shape is None or not isinstance(times, list | tuple) or len(times) < len(shape):
        return None
    new = len(times) - len(shape)
    dims = named(shape, letters(len(shape)))
    dims = frozen(dims, [i for i in range(len(shape)) if times[new + i] != 1])
    inside = dims.split()
    outside = ["_" if i < new or times[i] != 1 else inside[i - new] for i in range(len(times))]
    return RuleClaim({"x": dims}, (" ".join(outside),))


@rule("x repeats dim output_size", everywhere("repeat_interleave"))
def _interleave(bound: Bound) -> RuleClaim | None:
    """Each element by itself: as many copies, beside each other."""
    shape, times = bound.shape("x"), bound.get("repeats")
    at = positive_dims(bound.get("dim"), shape)
    if shape is None or at is None or not isinstance(bound.get("dim"), int):
        return None
    if not isinstance(times, int) or bound.get("output_size") is not None:
        return None
    dims = named(shape, letters(len(shape))).split()
    outside = list(dims)
    dim = dims[at[0]]
    outside[at[0]] = str(times) if dim == "1" else f"({dim} {times})"
    return RuleClaim({"x": " ".join(dims)}, (" ".join(outside),))


@rule("x upscale_factor", functional("pixel_shuffle"), "torch.pixel_shuffle aten.pixel_shuffle")
def _pixel_shuffle(bound: Bound) -> RuleClaim | None:
    return _pixels(bound, "upscale_factor", up=True)


@rule("x downscale_factor", functional("pixel_unshuffle"), "torch.pixel_unshuffle")
def _pixel_unshuffle(bound: Bound) -> RuleClaim | None:
    return _pixels(bound, "downscale_factor", up=False)


def _pixels(bound: Bound, parameter: str, *, up: bool) -> RuleClaim | None:
    """Channels become squares of pixels, or the other way."""
    shape, factor = bound.shape("x"), bound.get(parameter)
    if shape is None or len(shape) < 3 or not isinstance(factor, int):  # noqa: PLR2004
        return None
    stack = named(shape[:-3], [f"s{i}" for i in range(len(shape) - 3)]).split()
    deep = " ".join([*stack, f"(c {factor * factor})", "h", "w"])
    wide = " ".join([*stack, "c", f"(h {factor})", f"(w {factor})"])
    return RuleClaim({"x": deep}, (wide,)) if up else RuleClaim({"x": wide}, (deep,))


# --- Operators that put tensors together, cut them up, pad them or move elements along a ----------

# The dimension they work along stays whole; all others can be split.


def along(bound: Bound, dims: Iterable[int], parameter: str = "x") -> tuple[list[str], list[str]]:
    """The dimensions of a tensor and of a result that is longer or shorter along some of them."""
    shape = bound.shape(parameter) or ()
    stay = set(dims)
    text = ["_" if i in stay else d for i, d in enumerate(_names(shape))]
    return text, list(text)


def _names(shape: tuple[int, ...]) -> list[str]:
    return named(shape, letters(len(shape))).split()


# --- lists of tensors -----------------------------------------------------------------------------


def _alike(tensors: Any, dim: Any, *, new: bool) -> tuple[list[str], int] | None:
    """The dimensions that the tensors of a list have in common."""
    if not isinstance(tensors, list | tuple) or not tensors or not isinstance(dim, int):
        return None
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return None
    shape = tuple(tensors[0].shape)
    if not shape or any(tensor.dim() != len(shape) for tensor in tensors):
        return None
    return _names(shape), dim % (len(shape) + new)


@rule("tensors dim", "torch.cat torch.concat torch.concatenate aten.cat")
def _cat(bound: Bound) -> RuleClaim | None:
    found = _alike(bound.get("tensors"), bound.get("dim", 0), new=False)
    if found is None:
        return None
    dims, at = found
    dims[at] = "_"
    return RuleClaim({"tensors": " ".join(dims)}, (" ".join(dims),))


@rule("tensors dim", "torch.stack aten.stack")
def _stack(bound: Bound) -> RuleClaim | None:
    found = _alike(bound.get("tensors"), bound.get("dim", 0), new=True)
    if found is None:
        return None
    dims, at = found
    outside = [*dims[:at], str(len(bound.get("tensors"))), *dims[at:]]
    return RuleClaim({"tensors": " ".join(dims)}, (" ".join(outside),))


@rule("tensors", "torch.hstack")
def _beside(bound: Bound) -> RuleClaim | None:
    tensors = bound.get("tensors")
    first = tensors[0] if isinstance(tensors, list | tuple) and tensors else None
    dim = 0 if isinstance(first, torch.Tensor) and first.dim() == 1 else 1
    found = _alike(tensors, dim, new=False)
    if found is None:
        return None
    dims, at = found
    dims[at] = "_"
    return RuleClaim({"tensors": " ".join(dims)}, (" ".join(dims),))


# --- cuts -----------------------------------------------------------------------------------------


@rule("x chunks dim", everywhere("chunk"))
@rule("x split_size dim", "torch.Tensor.split torch.functional.split aten.split")
@rule("x split_sizes dim", "torch.split_with_sizes aten.split_with_sizes")
@rule("x split_size_or_sections dim", "torch.split")
@rule("x indices_or_sections dim", everywhere("tensor_split"))
def _cut(bound: Bound) -> RuleClaim | None:
    """As many results as the dimension gives: it stays whole, so their number does not change."""
    shape = bound.shape("x")
    at = positive_dims(bound.get("dim", 0), shape)
    how = next((value for name, value in bound.values.items() if name not in ("x", "dim")), None)
    if shape is None or at is None or how is None or isinstance(how, torch.Tensor):
        return None
    count = _pieces(bound, shape[at[0]], how)
    inside, outside = along(bound, at)
    return RuleClaim({"x": " ".join(inside)}, (" ".join(outside),) * count)


def _pieces(bound: Bound, size: int, how: Any) -> int:
    if "indices_or_sections" in bound.values:
        return how if isinstance(how, int) else len(how) + 1
    if not isinstance(how, int):
        return len(how)
    width = -(-size // how) if "chunks" in bound.values else how
    return max(1, -(-size // width)) if width else 1


@rule("x dim", everywhere("unbind"))
def _unbind(bound: Bound) -> RuleClaim | None:
    shape = bound.shape("x")
    at = positive_dims(bound.get("dim", 0), shape)
    if shape is None or at is None:
        return None
    inside, outside = along(bound, at)
    del outside[at[0]]
    return RuleClaim({"x": " ".join(inside)}, (" ".join(outside),) * shape[at[0]])


@rule("x dim index", everywhere("select"))
def _select(bound: Bound) -> RuleClaim | None:
    at = positive_dims(bound.get("dim"), bound.shape("x"))
    if at is None or bound.has("index"):
        return None
    inside, outside = along(bound, at)
    del outside[at[0]]
    return RuleClaim({"x": " ".join(inside)}, (" ".join(outside),))


@rule("x dim start length", everywhere("narrow"))
@rule("x n dim", everywhere("diff"))
@rule("x dimension size step", "torch.Tensor.unfold aten.unfold")
def _shorter(bound: Bound) -> RuleClaim | None:
    """A cut, or differences of neighbours; windows come as a last dimension."""
    at = positive_dims(bound.get("dimension", bound.get("dim", -1)), bound.shape("x"))
    if at is None or bound.has("start"):
        return None
    inside, outside = along(bound, at)
    windows = ["_"] if "dimension" in bound.values else []
    return RuleClaim({"x": " ".join(inside)}, (" ".join([*outside, *windows]),))


@rule("x dim start end step", "aten.slice")
def _slice(bound: Bound) -> RuleClaim | None:
    at = positive_dims(bound.get("dim", 0), bound.shape("x"))
    if at is None:
        return None
    inside, outside = along(bound, at)
    return RuleClaim({"x": " ".join(inside)}, (" ".join(outside),))


@rule("x *dims", everywhere("flip"))
@rule("x shifts dims", everywhere("roll"))
@rule("x k dims", everywhere("rot90"))
def _moved(bound: Bound) -> RuleClaim | None:
    """Elements change places within the dimensions."""
    given = bound.get("dims", (0, 1) if "k" in bound.values else None)
    at = positive_dims(given, bound.shape("x"))
    if at is None or ("k" in bound.values and len(at) != 2):  # noqa: PLR2004 - a plane
        return None
    inside, outside = along(bound, at)
    return RuleClaim({"x": " ".join(inside)}, (" ".join(outside),))


@rule("x diagonal", everywhere("triu tril"))
def _triangle(bound: Bound) -> RuleClaim | None:
    """A stack of triangles."""
    at = positive_dims((-2, -1), bound.shape("x"))
    if at is None:
        return None
    inside, outside = along(bound, at)
    return RuleClaim({"x": " ".join(inside)}, (" ".join(outside),))


@rule("x offset dim1 dim2", everywhere("diagonal"))
def _diagonal(bound: Bound) -> RuleClaim | None:
    at = positive_dims((bound.get("dim1", 0), bound.get("dim2", 1)), bound.shape("x"))
    if at is None:
        return None
    inside, _ = along(bound, at)
    outside = [d for i, d in enumerate(inside) if i not in at]
    return RuleClaim({"x": " ".join(inside)}, (" ".join([*outside, "_"]),))


@rule("x pad mode value", functional("pad"))
@rule("x pad value", "torch.constant_pad_nd aten.constant_pad_nd")
def _pad(bound: Bound) -> RuleClaim | None:
    """Pairs from the last dimension on; what gets no padding can be split."""
    shape, pad = bound.shape("x"), bound.get("pad")
    if not shape or not isinstance(pad, list | tuple):
        return None
    padded = [
        len(shape) - 1 - i for i in range(len(pad) // 2) if tuple(pad[2 * i : 2 * i + 2]) != (0, 0)
    ]
    inside, outside = along(bound, padded)
    return RuleClaim({"x": " ".join(inside)}, (" ".join(outside),))


# --- transforms along dimensions ------------------------------------------------------------------


@rule("x n dim norm", "torch.fft.fft torch.fft.ifft torch.fft.rfft torch.fft.irfft torch.fft.hfft")
def _fourier(bound: Bound) -> RuleClaim | None:
    at = positive_dims(bound.get("dim", -1), bound.shape("x"))
    if at is None:
        return None
    inside, outside = along(bound, at)
    return RuleClaim({"x": " ".join(inside)}, (" ".join(outside),))


@rule("x other dim", "torch.linalg.cross")
def _cross(bound: Bound) -> RuleClaim | None:
    shape, other = bound.shape("x"), bound.shape("other")
    at = positive_dims(bound.get("dim", -1), shape)
    if at is None or shape != other:
        return None
    inside, _ = along(bound, at)
    text = " ".join(inside)
    return RuleClaim({"x": text, "other": text}, (text,))


@rule("A", "torch.linalg.inv torch.inverse torch.linalg.cholesky torch.linalg.matrix_exp")
def _of_matrices(bound: Bound) -> RuleClaim | None:
    """A matrix for each matrix of a stack."""
    return _stacked(bound, of_matrix=["_", "_"])


@rule("A", "torch.linalg.det torch.det torch.logdet")
def _determinant(bound: Bound) -> RuleClaim | None:
    """A number for each matrix of a stack."""
    return _stacked(bound, of_matrix=[])


def _stacked(bound: Bound, of_matrix: list[str]) -> RuleClaim | None:
    at = positive_dims((-2, -1), bound.shape("A"))
    if at is None:
        return None
    inside, _ = along(bound, at, "A")
    return RuleClaim({"A": " ".join(inside)}, (" ".join([*inside[:-2], *of_matrix]),))


# --- Look-ups by index ----------------------------------------------------------------------------


def _rows(bound: Bound, index: str, *, counted: bool) -> RuleClaim | None:
    """Rows of a table; gradients that are divided by how often an index occurs bind the indices."""
    ids, table = bound.shape(index), bound.shape("weight")
    if ids is None or table is None or len(table) != 2:  # noqa: PLR2004 - a table
        return None
    dims = [
        d if d == "1" or not counted else f"{d}^" for d in named(ids, letters(len(ids))).split()
    ]
    width = "1" if table[1] == 1 else "w"
    inputs = {index: " ".join(dims), "weight": f"v^ {width}"}
    return RuleClaim(inputs, (" ".join([*dims, width]),))


@rule("x weight padding_idx max_norm norm_type scale_grad_by_freq sparse", functional("embedding"))
def _embedding(bound: Bound) -> RuleClaim | None:
    """The table is rewritten under a bound of its norms, so nothing is claimed then."""
    if bound.get("max_norm") is not None or bound.get("sparse"):
        return None
    return _rows(bound, "x", counted=bool(bound.get("scale_grad_by_freq")))


@rule("weight indices padding_idx scale_grad_by_freq sparse", "aten.embedding torch.embedding")
def _table_first(bound: Bound) -> RuleClaim | None:
    if bound.get("sparse"):
        return None
    return _rows(bound, "indices", counted=bool(bound.get("scale_grad_by_freq")))


_BAG = (
    "x weight offsets max_norm norm_type scale_grad_by_freq mode sparse per_sample_weights "
    "include_last_offset padding_idx"
)


@rule(_BAG, functional("embedding_bag"))
def _bags(bound: Bound) -> RuleClaim | None:
    """Bags of equal size; the items of a bag are terms of it, unless some do not count."""
    ids, table = bound.shape("x"), bound.shape("weight")
    refused = ("max_norm", "sparse", "scale_grad_by_freq", "offsets", "include_last_offset")
    plain = all(bound.get(name) is None or bound.get(name) is False for name in refused)
    if ids is None or table is None or len(ids) != 2 or not plain:  # noqa: PLR2004 - bags of ids
        return None
    mode = bound.get("mode", "mean")
    mark = {"sum": SUM, "mean": AVERAGE}.get(mode, "^")
    if bound.get("padding_idx") is not None and mode != "sum":
        mark = "^"
    width = "1" if table[1] == 1 else "w"
    bag = "1" if ids[0] == 1 else "b"
    item = "1" if ids[1] == 1 else f"i{mark}"
    inputs = {"x": f"{bag} {item}", "weight": f"v^ {width}"}
    if bound.has("per_sample_weights"):
        inputs["per_sample_weights"] = inputs["x"]
    return RuleClaim(inputs, (f"{bag} {width}",))


def _along_index(
    shape: tuple[int, ...], index: tuple[int, ...], at: int, along: tuple[str, str]
) -> tuple[list[str], list[str]]:
    """A tensor and an index into it along one dimension: others are split where equally long."""
    names = letters(len(shape))
    table, ids = [], []
    for i, (size, count) in enumerate(zip(shape, index, strict=True)):
        if i == at:
            table.append(along[0])
            ids.append("1" if count == 1 else along[1])
        else:
            dim = "1" if size == count == 1 else names[i] if size == count else "_"
            table.append(dim)
            ids.append(dim)
    return table, ids


@rule("x dim index sparse_grad", everywhere("gather"))
def _gather(bound: Bound) -> RuleClaim | None:
    shape, index = bound.shape("x"), bound.shape("index")
    at = positive_dims(bound.get("dim"), shape)
    if shape is None or index is None or at is None or len(index) != len(shape):
        return None
    table, ids = _along_index(shape, index, at[0], ("_", "i"))
    return RuleClaim({"x": " ".join(table), "index": " ".join(ids)}, (" ".join(ids),))


@rule("x indices dim", everywhere("take_along_dim"))
def _take_along(bound: Bound) -> RuleClaim | None:
    """Like gather; shapes that broadcast are left alone."""
    shape, index = bound.shape("x"), bound.shape("indices")
    at = positive_dims(bound.get("dim"), shape)
    if shape is None or index is None or at is None or not isinstance(bound.get("dim"), int):
        return None
    if len(index) != len(shape) or any(
        size != count
        for i, (size, count) in enumerate(zip(shape, index, strict=True))
        if i != at[0]
    ):
        return None
    table, ids = _along_index(shape, index, at[0], ("_", "i"))
    return RuleClaim({"x": " ".join(table), "indices": " ".join(ids)}, (" ".join(ids),))


@rule("x dim index src reduce", everywhere("scatter"))
def _scatter(bound: Bound) -> RuleClaim | None:
    """Where two indices are the same, the last one wins: they stay together."""
    if bound.get("reduce") is not None:
        return None
    return _scattered(bound, "i^")


@rule("x dim index src", everywhere("scatter_add"))
def _scatter_add(bound: Bound) -> RuleClaim | None:
    """What is added are terms; what it is added to is one of them."""
    return _scattered(bound, f"i{SUM}")


def _scattered(bound: Bound, mark: str) -> RuleClaim | None:
    shape, index = bound.shape("x"), bound.shape("index")
    source = bound.shape("src")
    at = positive_dims(bound.get("dim"), shape)
    if shape is None or index is None or source != index or at is None or len(index) != len(shape):
        return None
    table, ids = _along_index(shape, index, at[0], ("_", mark))
    text = " ".join(ids)
    inputs = {"x": once(" ".join(table), ids[at[0]]), "index": text, "src": text}
    return RuleClaim(inputs, (" ".join(table),))


@rule("x dim index", everywhere("index_select"))
def index_select(bound: Bound) -> RuleClaim | None:
    """Rows, in the order of the index, which can be split with the result."""
    shape, index = bound.shape("x"), bound.shape("index")
    at = positive_dims(bound.get("dim"), shape)
    if shape is None or index is None or at is None or len(index) != 1:
        return None
    dims = named(shape, letters(len(shape))).split()
    ids = "1" if index[0] == 1 else "i"
    inside = ["_" if i in at else d for i, d in enumerate(dims)]
    outside = [ids if i in at else d for i, d in enumerate(dims)]
    return RuleClaim({"x": " ".join(inside), "index": ids}, (" ".join(outside),))


@rule("x dim index source alpha", everywhere("index_add"))
def _index_add(bound: Bound) -> RuleClaim | None:
    return _indexed(bound, f"i{SUM}", "source")


@rule("x dim index source", everywhere("index_copy"))
@rule("x dim index value", everywhere("index_fill"))
def _index_copy(bound: Bound) -> RuleClaim | None:
    return _indexed(bound, "i^", "source")


def _indexed(bound: Bound, mark: str, source: str) -> RuleClaim | None:
    """Rows that are written to where an index says."""
    shape, index = bound.shape("x"), bound.shape("index")
    at = positive_dims(bound.get("dim"), shape)
    if shape is None or index is None or at is None or len(index) != 1:
        return None
    dims = named(shape, letters(len(shape))).split()
    ids = "1" if index[0] == 1 else mark
    table = ["_" if i in at else d for i, d in enumerate(dims)]
    rows = [ids if i in at else d for i, d in enumerate(dims)]
    inputs = {"x": once(" ".join(table), ids), "index": ids}
    if bound.has(source):
        inputs[source] = " ".join(rows)
    return RuleClaim(inputs, (" ".join(table),))


@rule("x index", everywhere("take"))
@rule("x boundaries out_int32 right", "torch.bucketize aten.bucketize")
@rule("elements test_elements assume_unique invert", "torch.isin")
def _looked_up(bound: Bound) -> RuleClaim | None:
    """One tensor is asked as a whole for every element of the other."""
    asked = {"index": "x", "boundaries": "boundaries", "test_elements": "test_elements"}
    name = next((name for name in asked if bound.has(name)), "")
    table = asked.get(name, "")
    elements = name if name == "index" else next(iter(bound.values))
    shape, whole = bound.shape(elements), bound.shape(table)
    if shape is None or whole is None:
        return None
    dims = named(shape, letters(len(shape)))
    return RuleClaim({elements: dims, table: " ".join(["_"] * len(whole))}, (dims,))


@rule("sorted_sequence x out_int32 right", "torch.searchsorted aten.searchsorted")
def _search(bound: Bound) -> RuleClaim | None:
    """One sequence for all, or one for each row."""
    sequence, shape = bound.shape("sorted_sequence"), bound.shape("x")
    if not sequence or not shape:
        return None
    dims = named(shape, letters(len(shape))).split()
    rows = dims[:-1] if len(sequence) > 1 else []
    inputs = {"sorted_sequence": " ".join([*rows, "_"]), "x": " ".join(dims)}
    return RuleClaim(inputs, (" ".join(dims),))
