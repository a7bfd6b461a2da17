"""Views and permutations: where the elements of a part go as one piece, the part can be split.

Of dimensions that are merged or taken apart, the first one can be split: what belongs to a part of
it is contiguous. Sizes that the call names are divided with it.
"""

from __future__ import annotations

from math import gcd, prod
from typing import Any

from paritas.partition.library.claims import (
    Bound,
    Claim,
    frozen,
    letters,
    named,
    positive_dims,
)
from paritas.partition.library.registry import everywhere, functional, rule


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


def _view(bound: Bound, sizes: Any, parameter: str, first: int = 0) -> Claim | None:
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
    return Claim({"x": " ".join(dims[0])}, (" ".join(dims[1]),), numbers)


@rule("x *size", "torch.Tensor.view aten.view aten._unsafe_view aten.view_copy")
@rule("x *shape", everywhere("reshape"))
def _as_sizes(bound: Bound) -> Claim | None:
    parameter = "shape" if "shape" in bound.values else "size"
    sizes = bound.get(parameter)
    return _view(bound, sizes, parameter) if isinstance(sizes, list | tuple) else None


@rule("x start_dim end_dim", everywhere("flatten"))
@rule("x", everywhere("ravel"))
def _flatten(bound: Bound) -> Claim | None:
    shape = bound.shape("x")
    if not shape:
        return None
    start = bound.get("start_dim", 0) % len(shape)
    end = bound.get("end_dim", -1) % len(shape)
    sizes = (*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :])
    dims = regroup(shape, sizes)
    return dims and Claim({"x": " ".join(dims[0])}, (" ".join(dims[1]),))


@rule("x dim sizes", everywhere("unflatten"))
def _unflatten(bound: Bound) -> Claim | None:
    shape, sizes = bound.shape("x"), bound.get("sizes")
    at = positive_dims(bound.get("dim"), shape)
    if shape is None or at is None or not isinstance(sizes, list | tuple):
        return None
    rest = prod(size for size in sizes if size != -1)
    full = tuple(shape[at[0]] // rest if size == -1 else size for size in sizes)
    return _view(bound, (*shape[: at[0]], *full, *shape[at[0] + 1 :]), "sizes", at[0])


# --- permutations ---------------------------------------------------------------------------------


def _permuted(bound: Bound, order: tuple[int, ...]) -> Claim | None:
    shape = bound.shape("x")
    if shape is None or sorted(order) != list(range(len(shape))):
        return None
    dims = named(shape, letters(len(shape))).split()
    return Claim({"x": " ".join(dims)}, (" ".join(dims[i] for i in order),))


@rule("x *dims", everywhere("permute"))
def _permute(bound: Bound) -> Claim | None:
    order = positive_dims(bound.get("dims"), bound.shape("x"))
    return None if order is None else _permuted(bound, order)


@rule("x dim0 dim1", everywhere("transpose"))
@rule("x dim0 dim1", "torch.swapdims torch.Tensor.swapdims")
@rule("x axis0 axis1", "torch.swapaxes torch.Tensor.swapaxes")
def _transpose(bound: Bound) -> Claim | None:
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
def _matrix_transpose(bound: Bound) -> Claim | None:
    count = len(bound.shape("x") or ())
    if count < 2:  # noqa: PLR2004 - a matrix
        return None
    return _permuted(bound, (*range(count - 2), count - 1, count - 2))


@rule("x source destination", everywhere("movedim moveaxis"))
def _move(bound: Bound) -> Claim | None:
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
def _unsqueeze(bound: Bound) -> Claim | None:
    shape, dim = bound.shape("x"), bound.get("dim")
    if shape is None or not isinstance(dim, int):
        return None
    dims = named(shape, letters(len(shape))).split()
    at = dim % (len(shape) + 1)
    return Claim({"x": " ".join(dims)}, (" ".join([*dims[:at], "1", *dims[at:]]),))


@rule("x dim", everywhere("squeeze"))
def _squeeze(bound: Bound) -> Claim | None:
    """A part of length 1 would be taken away too, so dimensions that are asked about stay whole."""
    shape = bound.shape("x")
    asked = positive_dims(bound.get("dim"), shape)
    if shape is None or asked is None or bound.get("dim") in ((), []):
        return None
    dims = frozen(named(shape, letters(len(shape))), asked).split()
    kept = [d for i, d in enumerate(dims) if not (i in asked and shape[i] == 1)]
    return Claim({"x": " ".join(dims)}, (" ".join(kept),))


@rule("x *size", "torch.Tensor.expand aten.expand torch.broadcast_to torch.Tensor.broadcast_to")
def _expand(bound: Bound) -> Claim | None:
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
    return Claim({"x": " ".join(dims)}, (" ".join(outside),), numbers)


@rule("x *repeats", "torch.Tensor.repeat aten.repeat")
@rule("x dims", "torch.tile torch.Tensor.tile")
def _repeat(bound: Bound) -> Claim | None:
    """What is repeated as a whole stays whole."""
    shape, times = bound.shape("x"), bound.get("repeats", bound.get("dims"))
    if shape is None or not isinstance(times, list | tuple) or len(times) < len(shape):
        return None
    new = len(times) - len(shape)
    dims = named(shape, letters(len(shape)))
    dims = frozen(dims, [i for i in range(len(shape)) if times[new + i] != 1])
    inside = dims.split()
    outside = ["_" if i < new or times[i] != 1 else inside[i - new] for i in range(len(times))]
    return Claim({"x": dims}, (" ".join(outside),))


@rule("x repeats dim output_size", everywhere("repeat_interleave"))
def _interleave(bound: Bound) -> Claim | None:
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
    return Claim({"x": " ".join(dims)}, (" ".join(outside),))


@rule("x upscale_factor", functional("pixel_shuffle"), "torch.pixel_shuffle aten.pixel_shuffle")
def _pixel_shuffle(bound: Bound) -> Claim | None:
    return _pixels(bound, "upscale_factor", up=True)


@rule("x downscale_factor", functional("pixel_unshuffle"), "torch.pixel_unshuffle")
def _pixel_unshuffle(bound: Bound) -> Claim | None:
    return _pixels(bound, "downscale_factor", up=False)


def _pixels(bound: Bound, parameter: str, *, up: bool) -> Claim | None:
    """Channels become squares of pixels, or the other way."""
    shape, factor = bound.shape("x"), bound.get(parameter)
    if shape is None or len(shape) < 3 or not isinstance(factor, int):  # noqa: PLR2004
        return None
    stack = named(shape[:-3], [f"s{i}" for i in range(len(shape) - 3)]).split()
    deep = " ".join([*stack, f"(c {factor * factor})", "h", "w"])
    wide = " ".join([*stack, "c", f"(h {factor})", f"(w {factor})"])
    return Claim({"x": deep}, (wide,)) if up else Claim({"x": wide}, (deep,))
