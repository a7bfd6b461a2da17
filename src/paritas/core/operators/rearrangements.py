"""Definitions of views, slices and look-ups by index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paritas.core.operators import indices
from paritas.core.operators.calls import letters, positive_dims
from paritas.core.operators.definitions import (
    NNSCALER,
    Array,
    Layout,
    SymbolicCall,
    belongs_to,
    by_slices,
    everywhere,
    functional,
    operator,
    operator_word,
)
from paritas.core.operators.elementwise import along
from paritas.core.operators.indices import (
    ONE,
    ZERO,
    Poly,
    constant,
    floor_divide,
    multiply,
    remainder,
)
from paritas.core.operators.terms import OutsideTheoryError, Term, number_term, plus, times

if TYPE_CHECKING:
    from collections.abc import Sequence

# --- Views ----------------------------------------------------------------------------------------

belongs_to(
    "exact",
    "as_strided as_strided_copy diag diagonal diagonal_copy expand expand_copy flip permute",
    "permute_copy pixel_shuffle pixel_unshuffle _reshape_alias roll repeat squeeze squeeze_copy t",
    "t_copy transpose transpose_copy unfold unfold_copy unsqueeze unsqueeze_copy view view_copy",
)
belongs_to("shapes changed in place", "squeeze unsqueeze t transpose as_strided resize set")


def _view(call: SymbolicCall, x: Array, sizes: Sequence[Poly]) -> Array:
    """The same elements in the same order; a size of -1 is what is left."""
    known_sizes = [size for size in sizes if size != constant(-1)]
    inferred_size = floor_divide(multiply(*x.shape), multiply(*known_sizes), {})
    shape = tuple(inferred_size if size == constant(-1) else size for size in sizes)
    call.same(multiply(*shape), multiply(*x.shape))

    def element(*at: Poly) -> Term:
        flat_index = ZERO
        for size, axis_index in zip(shape, at, strict=True):
            flat_index = indices.add(multiply(flat_index, size), axis_index)
        polies: list[Poly] = []
        for size in reversed(x.shape[1:]):
            polies.append(ZERO if size == ONE else remainder(flat_index, size, {}))
            flat_index = floor_divide(flat_index, size, {})
        if x.shape:
            polies.append(ZERO if x.shape[0] == ONE else flat_index)
        return x[tuple(reversed(polies))]

    return Array(shape, element)


@operator("x *size", "torch.Tensor.view aten.view aten._unsafe_view aten.view_copy")
@operator("x *shape", everywhere("reshape"))
def _as_sizes(call: SymbolicCall) -> Array:
    parameter = "shape" if "shape" in call.bound.values else "size"
    return _view(call, call.given("x"), call.numbers(parameter))


@operator("x start_dim end_dim", everywhere("flatten"))
@operator("x", everywhere("ravel"))
def _flatten(call: SymbolicCall) -> Array:
    x = call.given("x")
    start, end = call.get("start_dim", 0) % x.dim, call.get("end_dim", -1) % x.dim
    merged = multiply(*x.shape[start : end + 1])
    return _view(call, x, (*x.shape[:start], merged, *x.shape[end + 1 :]))


@operator("x dim sizes", everywhere("unflatten"))
def _unflatten(call: SymbolicCall) -> Array:
    x = call.given("x")
    at = call.get("dim") % x.dim
    sizes = call.numbers("sizes")
    known_product = multiply(*(size for size in sizes if size != constant(-1)))
    full = [floor_divide(x.shape[at], known_product, {}) if s == constant(-1) else s for s in sizes]
    call.same(multiply(*full), x.shape[at])
    return _view(call, x, (*x.shape[:at], *full, *x.shape[at + 1 :]))


def _permute_dims(x: Array, order: Sequence[int]) -> Array:
    def element(*at: Poly) -> Term:
        places: list[Poly] = [ZERO] * x.dim
        for new_dim, dim in enumerate(order):
            places[dim] = at[new_dim]
        return x[tuple(places)]

    return Array(tuple(x.shape[dim] for dim in order), element)


def _dims(call: SymbolicCall, value: Any, name: str = "x") -> tuple[int, ...]:
    shape = tuple(call.get(name).shape)
    dims = positive_dims(value, shape)
    if dims is None:
        raise OutsideTheoryError(f"dimensions {value!r:.40}")
    return dims


@operator("x *dims", everywhere("permute"))
def _permute(call: SymbolicCall) -> Array:
    return _permute_dims(call.given("x"), _dims(call, call.get("dims")))


@operator("x dim0 dim1", everywhere("transpose"))
@operator("x dim0 dim1", "torch.swapdims torch.Tensor.swapdims")
@operator("x axis0 axis1", "torch.swapaxes torch.Tensor.swapaxes")
def _transpose(call: SymbolicCall) -> Array:
    x = call.given("x")
    pair = [call.get(name) for name in call.bound.values if name != "x"]
    first, second = _dims(call, pair)
    order = list(range(x.dim))
    order[first], order[second] = order[second], order[first]
    return _permute_dims(x, order)


@operator("x", everywhere("t"))
@operator("x", "torch.adjoint torch.Tensor.adjoint")
def _matrix_transpose(call: SymbolicCall) -> Array:
    x = call.given("x")
    if x.dim < 2:  # noqa: PLR2004 - a matrix
        raise OutsideTheoryError("the transpose of what is no matrix")
    return _permute_dims(x, [*range(x.dim - 2), x.dim - 1, x.dim - 2])


@operator("x source destination", everywhere("movedim moveaxis"))
def _move(call: SymbolicCall) -> Array:
    x = call.given("x")
    source, target = _dims(call, call.get("source")), _dims(call, call.get("destination"))
    source_by_target = dict(zip(target, source, strict=True))
    others = iter([at for at in range(x.dim) if at not in source])
    return _permute_dims(
        x, [source_by_target[at] if at in source_by_target else next(others) for at in range(x.dim)]
    )


@operator("x dim", everywhere("unsqueeze"))
def _unsqueeze(call: SymbolicCall) -> Array:
    x = call.given("x")
    at = call.get("dim") % (x.dim + 1)
    return Array((*x.shape[:at], ONE, *x.shape[at:]), lambda *p: x[(*p[:at], *p[at + 1 :])])


@operator("x dim", everywhere("squeeze"))
def _squeeze(call: SymbolicCall) -> Array:
    """A part of length 1 would be removed too, so lengths that are asked for must stay."""
    x = call.given("x")
    dims = _dims(call, call.get("dim"))
    removed = [at for at in dims if x.shape[at] == ONE]
    for at in dims:
        if x.shape[at] != ONE:
            call.keep(x.shape[at])
    kept_dims = [at for at in range(x.dim) if at not in removed]

    def element(*at: Poly) -> Term:
        places = dict(zip(kept_dims, at, strict=True))
        return x[tuple(places.get(dim, ZERO) for dim in range(x.dim))]

    return Array(tuple(x.shape[at] for at in kept_dims), element)


@operator("x *size", "torch.Tensor.expand aten.expand torch.broadcast_to torch.Tensor.broadcast_to")
def _expand(call: SymbolicCall) -> Array:
    x, sizes = call.given("x"), call.numbers("size")
    new = len(sizes) - x.dim
    shape = []
    for at, size in enumerate(sizes):
        own_size = ONE if at < new else x.shape[at - new]
        if own_size != ONE and size != constant(-1):
            call.same(size, own_size)
        shape.append(size if own_size == ONE and size != constant(-1) else own_size)
    return Array(tuple(shape), lambda *at: x.at(at))


@operator("x *repeats", "torch.Tensor.repeat aten.repeat")
@operator("x dims", "torch.tile torch.Tensor.tile")
def _repeat(call: SymbolicCall) -> Array:
    x = call.given("x")
    counts = [int(n) for n in call.get("repeats", call.get("dims"))]
    counts = [1] * (x.dim - len(counts)) + counts
    new = len(counts) - x.dim

    def element(*at: Poly) -> Term:
        repeated_axes = zip(at[new:], x.shape, counts[new:], strict=True)
        return x[
            tuple(p if count == 1 else remainder(p, size, {}) for p, size, count in repeated_axes)
        ]

    shape = [constant(count) for count in counts[:new]]
    shape += [multiply(constant(c), size) for c, size in zip(counts[new:], x.shape, strict=True)]
    return Array(tuple(shape), element)


@operator("x repeats dim output_size", everywhere("repeat_interleave"))
def _interleave(call: SymbolicCall) -> Array:
    x, count = call.given("x"), call.number("repeats")
    (dim,) = _dims(call, call.get("dim"))

    def element(*at: Poly) -> Term:
        source_index = ZERO if x.shape[dim] == ONE else floor_divide(at[dim], count, {})
        return x[(*at[:dim], source_index, *at[dim + 1 :])]

    return Array((*x.shape[:dim], multiply(x.shape[dim], count), *x.shape[dim + 1 :]), element)


@operator("x upscale_factor", functional("pixel_shuffle"), "torch.pixel_shuffle aten.pixel_shuffle")
def _pixel_shuffle(call: SymbolicCall) -> Array:
    x, factor = call.given("x"), constant(call.get("upscale_factor"))
    square = multiply(factor, factor)

    def element(*at: Poly) -> Term:
        channel, row, column = at[-3:]
        deep = indices.add(
            multiply(channel, square),
            multiply(remainder(row, factor, {}), factor),
            remainder(column, factor, {}),
        )
        places = (floor_divide(row, factor, {}), floor_divide(column, factor, {}))
        return x.at((*at[:-3], deep, *places))

    deep, rows, columns = x.shape[-3:]
    channels = floor_divide(deep, square, {})
    call.same(multiply(channels, square), deep)
    shape = (*x.shape[:-3], channels, multiply(rows, factor), multiply(columns, factor))
    return Array(shape, element)


@operator("x downscale_factor", functional("pixel_unshuffle"), "torch.pixel_unshuffle")
def _pixel_unshuffle(call: SymbolicCall) -> Array:
    x, factor = call.given("x"), constant(call.get("downscale_factor"))
    square = multiply(factor, factor)

    def element(*at: Poly) -> Term:
        deep, row, column = at[-3:]
        within = remainder(deep, square, {})
        places = (
            indices.add(multiply(row, factor), floor_divide(within, factor, {})),
            indices.add(multiply(column, factor), remainder(deep, factor, {})),
        )
        return x.at((*at[:-3], floor_divide(deep, square, {}), *places))

    channels, rows, columns = x.shape[-3:]
    sizes = [floor_divide(size, factor, {}) for size in (rows, columns)]
    for size, whole_size in zip(sizes, (rows, columns), strict=True):
        call.same(multiply(size, factor), whole_size)
    return Array((*x.shape[:-3], multiply(channels, square), *sizes), element)


# --- Along a dimension ----------------------------------------------------------------------------

belongs_to("joins", "cat stack")
belongs_to("slices", "slice slice_backward slice_scatter")
belongs_to("selections", "select select_backward select_scatter")
belongs_to("triangles", "triu tril")
belongs_to(
    "exact",
    "as_strided_scatter constant_pad_nd diagonal_scatter reflection_pad1d reflection_pad2d",
    "replication_pad1d replication_pad2d select select_copy slice slice_copy split",
    "split_with_sizes split_with_sizes_copy unbind unsafe_split",
)


def _join_tensors(call: SymbolicCall, dim: int, *, new: bool) -> list[Array]:
    arrays = [array for array in call.tensors("tensors") if array is not None]
    count = arrays[0].dim
    names: list[str | None] = list(letters(count))
    at = dim % (count + new)
    if not new:
        names[at] = None
    outside = [*names[:at], str(len(arrays)), *names[at:]] if new else names
    layouts: dict[str, tuple[Array, Layout]] = {
        f"tensors[{i}]": (array, names) for i, array in enumerate(arrays)
    }
    return by_slices(call, layouts, [outside])


@operator("tensors dim", "torch.cat torch.concat torch.concatenate aten.cat")
def _cat(call: SymbolicCall) -> list[Array]:
    return _join_tensors(call, call.get("dim", 0), new=False)


@operator("tensors", "torch.hstack")
def _hstack(call: SymbolicCall) -> list[Array]:
    return _join_tensors(call, 0 if call.get("tensors")[0].dim() == 1 else 1, new=False)


@operator("tensors dim", "torch.stack aten.stack")
def _stack(call: SymbolicCall) -> list[Array]:
    return _join_tensors(call, call.get("dim", 0), new=True)


@operator("x chunks dim", everywhere("chunk"))
@operator("x split_size dim", "torch.Tensor.split torch.functional.split aten.split")
@operator("x split_sizes dim", "torch.split_with_sizes aten.split_with_sizes")
@operator("x split_size_or_sections dim", "torch.split")
@operator("x indices_or_sections dim", everywhere("tensor_split"))
def _cut(call: SymbolicCall) -> list[Array]:
    size = call.get("x").shape[call.get("dim", 0)]
    return along(call, [call.get("dim", 0)], call.count_results(_count_pieces(call, size)))


def _count_pieces(call: SymbolicCall, size: int) -> int:
    how = next((call.get(name) for name in call.bound.values if name not in ("x", "dim")), None)
    if how is None or isinstance(how, torch.Tensor):
        raise OutsideTheoryError("pieces whose sizes are a tensor")
    if "indices_or_sections" in call.bound.values:
        return how if isinstance(how, int) else len(how) + 1
    if not isinstance(how, int):
        return len(how)
    width = -(-size // how) if "chunks" in call.bound.values else how
    return max(1, -(-size // width)) if width else 1


def _remove_dim(call: SymbolicCall, dim: int, outputs: int) -> list[Array]:
    x = call.given("x")
    names: list[str | None] = list(letters(x.dim))
    names[dim] = None
    remaining_names = [name for name in names if name is not None]
    return by_slices(call, {"x": (x, names)}, [remaining_names] * outputs)


@operator("x dim", everywhere("unbind"))
def _unbind(call: SymbolicCall) -> list[Array]:
    dim = call.get("dim", 0)
    return _remove_dim(call, dim, call.count_results(call.get("x").shape[dim]))


@operator("x dim index", everywhere("select"))
def _select(call: SymbolicCall) -> list[Array]:
    return _remove_dim(call, call.get("dim"), 1)


@operator("x dim start length", everywhere("narrow"))
@operator("x n dim", everywhere("diff"))
def _shorter(call: SymbolicCall) -> list[Array]:
    return along(call, [call.get("dim", -1)])


@operator("x dim start end step", "aten.slice")
def _slice(call: SymbolicCall) -> list[Array]:
    return along(call, [call.get("dim", 0)])


@operator("x dimension size step", "torch.Tensor.unfold aten.unfold")
def _unfold(call: SymbolicCall) -> list[Array]:
    """The windows are a new last dimension."""
    x = call.given("x")
    names: list[str | None] = list(letters(x.dim))
    names[call.get("dimension", -1)] = None
    return by_slices(call, {"x": (x, names)}, [[*names, None]])


@operator("x *dims", everywhere("flip"))
@operator("x shifts dims", everywhere("roll"))
def _move_along_dims(call: SymbolicCall) -> list[Array]:
    return along(call, _dims(call, call.get("dims")))


@operator("x k dims", everywhere("rot90"))
def _rotate_along_dims(call: SymbolicCall) -> list[Array]:
    return along(call, _dims(call, call.get("dims", (0, 1))))


@operator("x diagonal", everywhere("triu tril"))
def _triangle(call: SymbolicCall) -> list[Array]:
    return along(call, (-2, -1))


@operator("x offset dim1 dim2", everywhere("diagonal"))
def _diagonal(call: SymbolicCall) -> list[Array]:
    x = call.given("x")
    inside = _dims(call, (call.get("dim1", 0), call.get("dim2", 1)))
    names: list[str | None] = [None if at in inside else n for at, n in enumerate(letters(x.dim))]
    return by_slices(call, {"x": (x, names)}, [[*(n for n in names if n is not None), None]])


@operator("x pad mode value", functional("pad"))
@operator("x pad value", "torch.constant_pad_nd aten.constant_pad_nd")
def _pad(call: SymbolicCall) -> list[Array]:
    """Pairs start at the last dimension; a dimension without padding is not touched."""
    x, pad = call.given("x"), call.get("pad")
    pairs = [tuple(pad[2 * at : 2 * at + 2]) for at in range(len(pad) // 2)]
    inside = [x.dim - 1 - at for at, pair in enumerate(pairs) if pair != (0, 0)]
    names: list[str | None] = [None if at in inside else n for at, n in enumerate(letters(x.dim))]
    return by_slices(call, {"x": (x, names)}, [names])


@operator(
    "x n dim norm", "torch.fft.fft torch.fft.ifft torch.fft.rfft torch.fft.irfft torch.fft.hfft"
)
def _fourier(call: SymbolicCall) -> list[Array]:
    return along(call, [call.get("dim", -1)])


@operator("x other dim", "torch.linalg.cross")
def _cross(call: SymbolicCall) -> list[Array]:
    x, other = call.given("x"), call.given("other")
    names: list[str | None] = list(letters(x.dim))
    names[call.get("dim", -1)] = None
    return by_slices(call, {"x": (x, names), "other": (other, names)}, [names])


@operator("A", "torch.linalg.inv torch.inverse torch.linalg.cholesky torch.linalg.matrix_exp")
@operator("A", "torch.linalg.det torch.det torch.logdet")
def _of_matrices(call: SymbolicCall) -> list[Array]:
    """Each matrix of a batch alone."""
    x = call.given("A")
    names: list[str | None] = [*letters(x.dim - 2), None, None]
    outside = names[:-2] if "det" in operator_word(call.call) else names
    return by_slices(call, {"A": (x, names)}, [outside])


@operator("x *slicers", f"{NNSCALER}fullslice")
def _fullslice(call: SymbolicCall) -> list[Array]:
    """A dimension with a full slice is not touched."""
    x, slicers = call.given("x"), call.get("slicers", ())
    rest = iter(letters(x.dim))
    inside: list[str | None] = []
    outside: list[str | None] = []
    for slicer in slicers:
        if slicer is None:
            outside.append("1")
            continue
        if not isinstance(slicer, int | slice):
            raise OutsideTheoryError(f"a slice by {slicer!r:.40}")
        name = next(rest)
        is_full = isinstance(slicer, slice) and slicer == slice(None)
        inside.append(name if is_full else None)
        outside += inside[-1:] if isinstance(slicer, slice) else []
    remaining_names = list(rest)
    return by_slices(call, {"x": (x, [*inside, *remaining_names])}, [[*outside, *remaining_names]])


# --- Look-ups -------------------------------------------------------------------------------------

belongs_to(
    "exact",
    "embedding gather index index_fill index_select masked_scatter masked_select _unsafe_index",
    "_unsafe_index_put _unsafe_masked_index",
)
belongs_to(
    "smooth",
    "as_strided constant_pad_nd embedding expand flip gather index index_put index_select permute",
    "repeat _reshape_alias roll scatter select select_backward slice slice_backward split",
    "split_with_sizes squeeze t transpose unbind _unsafe_index _unsafe_index_put unsqueeze view",
)
# If an argument makes them add duplicates up.
belongs_to("rounded once", "index_put scatter _unsafe_index_put")
belongs_to("embedding backward", "embedding_dense_backward")
belongs_to("indexed sum", "index_add scatter_add")
belongs_to("writes at indices", "index_copy index_put scatter select_scatter slice_scatter")


def _is(call: SymbolicCall) -> str:
    """The function that is 1 where an index is a number, and 0 elsewhere."""
    return call.known_function(
        "is", lambda pair: (pair[0].reshape(()) == pair[1]).to(torch.float64)
    )


def _looked_up(call: SymbolicCall, index: Term, size: Poly, row: Any, start: Poly = ZERO) -> Term:
    """The row that an index names, as a sum over all rows."""
    equal = _is(call)

    def term(k: Poly) -> Term:
        return times(("fn", equal, (index, ("int", indices.add(start, k)))), row(k))

    return call.reduce("sum", size, term)


def _frequencies(call: SymbolicCall) -> None:
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if call.get(name):
            raise OutsideTheoryError(f"an embedding with {name}")


def _table(call: SymbolicCall, ids: Array, weight: Array, start: Poly = ZERO) -> Array:
    """Rows of a table; the gradient of the padding row is not passed on."""
    _frequencies(call)
    padding = call.get("padding_idx")
    row_of_padding = constant(padding or 0)
    if padding is not None and padding < 0 and start == ZERO:
        row_of_padding = indices.add(weight.shape[0], row_of_padding)
    stopped = call.known_function("constant", lambda arrays: arrays[0].detach())
    equal = _is(call)

    def element(*at: Poly) -> Term:
        index, column = ids[at[:-1]], at[-1]

        def row(k: Poly) -> Term:
            entry = weight.at((k, column))
            if padding is None:
                return entry
            term: Term = ("int", indices.add(start, k))
            is_padding: Term = ("fn", equal, (("int", row_of_padding), term))
            keep_factor = plus(("num", "1"), times(("num", "-1"), is_padding))
            return plus(times(keep_factor, entry), times(is_padding, ("fn", stopped, (entry,))))

        return _looked_up(call, index, weight.shape[0], row, start)

    return Array((*ids.shape, weight.shape[1]), element)


@operator(
    "x weight padding_idx max_norm norm_type scale_grad_by_freq sparse", functional("embedding")
)
@operator("weight indices padding_idx scale_grad_by_freq sparse", "aten.embedding torch.embedding")
def _embedding(call: SymbolicCall) -> Array:
    name = "indices" if call.bound.has("indices") else "x"
    return _table(call, call.given(name), call.given("weight"))


@operator("x weight padding_idx start stop", f"{NNSCALER}embedding")
def _embedding_part(call: SymbolicCall) -> Array:
    """A part of the table, which begins at `start`; other ids give zeros."""
    weight, start = call.given("weight"), call.number("start")
    call.same(indices.add(start, weight.shape[0]), call.number("stop"))
    return _table(call, call.given("x"), weight, start)


@operator(
    "x weight offsets max_norm norm_type scale_grad_by_freq mode sparse per_sample_weights "
    "include_last_offset padding_idx",
    functional("embedding_bag"),
)
def _bags(call: SymbolicCall) -> Array | list[Array]:
    _frequencies(call)
    ids, weight, scale = call.given("x"), call.given("weight"), call.tensor("per_sample_weights")
    mode = call.get("mode", "mean")
    if ids.dim != 2 or call.get("offsets") is not None or call.get("include_last_offset"):  # noqa: PLR2004
        raise OutsideTheoryError("bags of unequal size")
    if mode == "max" or call.get("padding_idx") is not None:
        layouts: dict[str, tuple[Array, Layout]] = {
            "x": (ids, ["b", None]),
            "weight": (weight, [None, "w"]),
        }
        if scale is not None:
            layouts["per_sample_weights"] = (scale, ["b", None])
        return by_slices(call, layouts, [["b", "w"]])

    def element(bag: Poly, column: Poly) -> Term:
        def item(i: Poly) -> Term:
            looked_up = _looked_up(
                call, ids.at((bag, i)), weight.shape[0], lambda k: weight.at((k, column))
            )
            return looked_up if scale is None else times(scale.at((bag, i)), looked_up)

        total = call.reduce("sum", ids.shape[1], item)
        return total if mode == "sum" else times(("inv", ("int", ids.shape[1])), total)

    if scale is not None:
        for scale_size, size in zip(scale.shape, ids.shape, strict=True):
            call.same(scale_size, size)
    return Array((ids.shape[0], weight.shape[1]), element)


def _has_equal_other_dims(call: SymbolicCall, dim: int, *names: str) -> bool:
    """Whether all other dimensions of tensors are equally long, which is then needed."""
    shapes = [tuple(call.get(name).shape) for name in names]
    if len(set(map(len, shapes))) > 1:
        raise OutsideTheoryError("an index with another number of dimensions")
    others = [at for at in range(len(shapes[0])) if at != dim]
    equal = len({tuple(shape[at] for at in others) for shape in shapes}) == 1
    if equal:
        first = call.given(names[0])
        for name in names[1:]:
            for at in others:
                call.same(first.shape[at], call.given(name).shape[at])
    return equal


@operator("x dim index sparse_grad", everywhere("gather"))
@operator("x indices dim", everywhere("take_along_dim"))
def _gather(call: SymbolicCall) -> Array:
    name = "index" if call.bound.has("index") else "indices"
    x, index = call.given("x"), call.given(name)
    (dim,) = _dims(call, call.get("dim"))
    if not _has_equal_other_dims(call, dim, "x", name):
        for at, size in enumerate(index.shape):
            if at != dim:  # shorter than the table: each rank must have the same rows
                call.keep(size)
                call.keep(x.shape[at])

    def element(*at: Poly) -> Term:
        return _looked_up(
            call, index.at(at), x.shape[dim], lambda k: x.at((*at[:dim], k, *at[dim + 1 :]))
        )

    return Array(index.shape, element)


@operator("x dim index src reduce", everywhere("scatter"))
def _scatter(call: SymbolicCall) -> list[Array]:
    """Along the dimension, the last of equal indices wins."""
    return _written_along(call)


def _written_along(call: SymbolicCall) -> list[Array]:
    names = [name for name in ("x", "index", "src") if call.bound.has(name)]
    (dim,) = _dims(call, call.get("dim"))
    matched = _has_equal_other_dims(call, dim, *names)
    count = call.given("x").dim
    layout = [name if matched and at != dim else None for at, name in enumerate(letters(count))]
    layouts = {name: (call.given(name), layout) for name in names}
    return by_slices(call, layouts, [layout])


@operator("x dim index src", everywhere("scatter_add"))
def _scatter_add(call: SymbolicCall) -> Array | list[Array]:
    x, index, source = call.given("x"), call.given("index"), call.given("src")
    (dim,) = _dims(call, call.get("dim"))
    if not _has_equal_other_dims(call, dim, "x", "index", "src"):
        return _written_along(call)
    if call.get("src").shape[dim] == call.get("index").shape[dim]:  # it may be longer
        call.same(source.shape[dim], index.shape[dim])
    equal = _is(call)

    def element(*at: Poly) -> Term:
        def term(k: Poly) -> Term:
            source_place = (*at[:dim], k, *at[dim + 1 :])
            chosen: Term = ("fn", equal, (index.at(source_place), ("int", at[dim])))
            return times(chosen, source.at(source_place))

        return plus(x.at(at), call.reduce("sum", index.shape[dim], term))

    return Array(x.shape, element)


@operator("x dim index", everywhere("index_select"))
@operator("x index dim", f"{NNSCALER}index_select")
def _index_select(call: SymbolicCall) -> Array:
    x, index = call.given("x"), call.given("index")
    (dim,) = _dims(call, call.get("dim"))
    call.names["x"] = [None if at == dim else name for at, name in enumerate(letters(x.dim))]
    call.names["index"] = ["i"]

    def element(*at: Poly) -> Term:
        return _looked_up(
            call, index.at(at[dim : dim + 1]), x.shape[dim],
            lambda k: x.at((*at[:dim], k, *at[dim + 1 :])),
        )  # fmt: skip

    return Array((*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]), element)


@operator("x dim index source alpha", everywhere("index_add"))
def _index_add(call: SymbolicCall) -> Array:
    x, index, source = call.given("x"), call.given("index"), call.given("source")
    (dim,) = _dims(call, call.get("dim"))
    names = [None if at == dim else name for at, name in enumerate(letters(x.dim))]
    call.names |= {"x": names, "index": ["i"], "source": [name or "i" for name in names]}
    alpha, equal = number_term(call.get("alpha", 1)), _is(call)
    for at, (source_size, size) in enumerate(zip(source.shape, x.shape, strict=True)):
        call.same(source_size, index.shape[0] if at == dim else size)

    def element(*at: Poly) -> Term:
        def term(k: Poly) -> Term:
            chosen: Term = ("fn", equal, (index.at((k,)), ("int", at[dim])))
            return times(alpha, chosen, source.at((*at[:dim], k, *at[dim + 1 :])))

        return plus(x.at(at), call.reduce("sum", index.shape[0], term))

    return Array(x.shape, element)


@operator("x dim index source", everywhere("index_copy"))
@operator("x dim index value", everywhere("index_fill"))
def _index_copy(call: SymbolicCall) -> list[Array]:
    x, index = call.given("x"), call.given("index")
    (dim,) = _dims(call, call.get("dim"))
    names = [None if at == dim else name for at, name in enumerate(letters(x.dim))]
    layouts: dict[str, tuple[Array, Layout]] = {"x": (x, names), "index": (index, ["i^"])}
    source = call.tensor("source")
    if source is not None:
        layouts["source"] = (source, [name or "i^" for name in names])
    return by_slices(call, layouts, [names])


@operator("x index", everywhere("take"))
@operator("x boundaries out_int32 right", "torch.bucketize aten.bucketize")
@operator("elements test_elements assume_unique invert", "torch.isin")
def _in_all(call: SymbolicCall) -> list[Array]:
    """Each element of one tensor with the whole other tensor."""
    arrays = call.all_tensors()
    sliced_name = {"take": "index", "bucketize": "x", "isin": "elements"}[operator_word(call.call)]
    layouts: dict[str, tuple[Array, Layout]] = {
        name: (array, letters(array.dim) if name == sliced_name else [None] * array.dim)
        for name, array in arrays.items()
    }
    return by_slices(call, layouts, [layouts[sliced_name][1]])


@operator("sorted_sequence x out_int32 right", "torch.searchsorted aten.searchsorted")
def _search(call: SymbolicCall) -> list[Array]:
    """One sequence for all, or one for each row."""
    sequence, x = call.given("sorted_sequence"), call.given("x")
    names = letters(x.dim)
    rows = names[:-1] if sequence.dim > 1 else []
    layouts: dict[str, tuple[Array, Layout]] = {
        "sorted_sequence": (sequence, [*rows, None]),
        "x": (x, names),
    }
    return by_slices(call, layouts, [names])


@operator("x indices", "aten.index")
def _index(call: SymbolicCall) -> list[Array]:
    """Dimensions without an index are not touched."""
    x, items = call.given("x"), call.tensors("indices")
    picked = [at for at, item in enumerate(items) if item is not None]
    arrays = [item for item in items if item is not None]
    if any(call.get("indices")[at].dtype == torch.bool for at in picked):
        raise OutsideTheoryError("an index of truth values")
    names = letters(x.dim)
    inside: list[str | None] = [None if at in picked else n for at, n in enumerate(names)]
    index_layout: list[str | None] = [None] * max(array.dim for array in arrays)
    first = picked[0] if picked[-1] - picked[0] + 1 == len(picked) else 0
    kept_names: list[str | None] = [n for at, n in enumerate(names) if at not in picked]
    layouts: dict[str, tuple[Array, Layout]] = {"x": (x, inside)}
    for at in picked:
        array = items[at]
        if array is not None:
            layouts[f"indices[{at}]"] = (array, [None] * array.dim)
    return by_slices(call, layouts, [[*kept_names[:first], *index_layout, *kept_names[first:]]])
