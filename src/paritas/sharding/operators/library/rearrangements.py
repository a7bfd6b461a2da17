"""Rules of operators that move elements, of which a part is named or merged with another length.

A derived rule has one name for each dimension: it has no `(a 4)`, no number that is divided with a
length, and no length that another tensor decides.
"""

from __future__ import annotations

from math import gcd, prod
from typing import Any

from paritas.core.operators.calls import Bound, dim_of, letters, name_dims, positive_dims
from paritas.sharding.operators.library.claims import AVERAGE, SUM, RuleClaim, frozen, once, unary
from paritas.sharding.operators.library.registry import DERIVED, Derived, rule

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
        before[i], after[j] = (
            _factor_dimension(name, common, shape[i]),
            _factor_dimension(name, common, sizes[j]),
        )
        left, right, i, j = shape[i], sizes[j], i + 1, j + 1
        while left != right:
            if left < right:
                left, before[i], i = left * shape[i], str(shape[i]), i + 1
            else:
                right, after[j], j = right * sizes[j], str(sizes[j]), j + 1
    return before, after


def _factor_dimension(name: str, common: int, size: int) -> str:
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


@rule("Tensor.to")
def _keep_dims(bound: Bound) -> RuleClaim | None:
    """Of `other` in `x.to(other)`, no element is read, which a definition cannot say."""
    return unary(bound.dims())


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


# --- Dimensions of length 1, and repetition -------------------------------------------------------


@rule("squeeze")
def _squeeze(bound: Bound) -> RuleClaim | None:
    """A part of length 1 would be removed too, so squeezed dimensions are not split."""
    dims, squeezed_dims = bound.dims(), positive_dims(bound.get("dim"), bound.shape())
    if dims is None or squeezed_dims is None or bound.get("dim") in ((), []):
        return None
    dims = frozen(dims, squeezed_dims)
    return unary(dims, [d for i, d in enumerate(dims) if not (i in squeezed_dims and d == "1")])


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


@rule("type_as expand_as")
def _like(bound: Bound) -> RuleClaim | None:
    """The result has the shape or dtype of the other tensor, whose values do not matter."""
    shape, outside = bound.shape(), bound.dims("other")
    if shape is None or outside is None or len(shape) > len(outside):
        return None
    inside = name_dims(shape, letters(len(outside)))
    return RuleClaim({"x": inside, "other": outside}, (outside,))


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
    stack = name_dims(shape[:-3], [f"s{i}" for i in range(len(shape) - 3)])
    deep = [*stack, f"(c {factor * factor})", "h", "w"]
    return deep, [*stack, "c", f"(h {factor})", f"(w {factor})"]


@rule("stack")
def _stack(bound: Bound) -> RuleClaim | Derived | None:
    """Numbers have no dimension that could be split."""
    return DERIVED if any(tensor.dim() for tensor in bound.get("tensors", ())) else None


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
    items = name_dims(ids, ["b", f"i{mark}"])
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
    along_index = _along_index(bound, "i")
    return along_index and RuleClaim(
        {"x": along_index[0], "index": along_index[1]}, (along_index[1],)
    )


@rule("take_along_dim")
def _take_along(bound: Bound) -> RuleClaim | None:
    """Like gather, but without a claim for shapes that broadcast."""
    along_index = _along_index(bound, "i", "indices")
    if along_index is None or not isinstance(bound.get("dim"), int):
        return None
    table, ids, at = along_index
    if "_" in [*table[:at], *table[at + 1 :]]:
        return None
    return RuleClaim({"x": table, "indices": ids}, (ids,))


@rule("scatter")
def _scatter(bound: Bound) -> RuleClaim | None:
    """The last of equal indices wins, so indices are not split."""
    return None if bound.get("reduce") is not None else _scatter_source(bound, "i^")


@rule("scatter_add")
def _scatter_add(bound: Bound) -> RuleClaim | None:
    """The added values are terms of a sum, and so is the tensor that they are added to."""
    return _scatter_source(bound, f"i{SUM}")


def _scatter_source(bound: Bound, mark: str) -> RuleClaim | None:
    along_index = _along_index(bound, mark)
    if along_index is None or bound.shape("src") != bound.shape("index"):
        return None
    table, ids, at = along_index
    return RuleClaim({"x": once(table, ids[at]), "index": ids, "src": ids}, (table,))
