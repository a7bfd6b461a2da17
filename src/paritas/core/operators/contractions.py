"""Definitions of matrix products, attention, convolutions and other windows."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from paritas.core.operators import indices
from paritas.core.operators.calls import letters, setting_of_each
from paritas.core.operators.definitions import (
    Array,
    Layout,
    SymbolicCall,
    align_names,
    belongs_to,
    by_slices,
    everywhere,
    functional,
    operator,
    operator_word,
)
from paritas.core.operators.elementwise import broadcast_sizes
from paritas.core.operators.indices import ONE, ZERO, Poly, constant, floor_divide, symbol
from paritas.core.operators.terms import OutsideTheoryError, Term, number_term, plus, times

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

# --- Products -------------------------------------------------------------------------------------

belongs_to("products", "mm bmm mv dot")
belongs_to("products added to a tensor", "addmm baddbmm addmv")
belongs_to("products in groups", "_grouped_mm")
belongs_to("trilinear products", "_trilinear")


def _product(call: SymbolicCall, *factors: str) -> Array:
    """A matrix product with torch's rules for vectors and batches of matrices."""
    first, second = map(call.given, factors)
    inner = second.shape[-2] if second.dim > 1 else second.shape[0]
    call.same(first.shape[-1], inner)
    rows = first.shape[-2:-1]
    columns = second.shape[-1:] if second.dim > 1 else ()
    left, right = Array(first.shape[:-2], _nothing), Array(second.shape[:-2], _nothing)
    stack = broadcast_sizes(call, left, right)
    count = len(stack)
    row_names, column_names = ["m"][: len(rows)], ["n"][: len(columns)]
    call.names[factors[0]] = [*align_names(left, count), *row_names, "k"]
    call.names[factors[1]] = [*align_names(right, count), "k", *column_names]

    def element(*at: Poly) -> Term:
        row, column = at[count : count + len(rows)], at[count + len(rows) :]

        def term(k: Poly) -> Term:
            first_element = first[(*_broadcast(at[:count], left), *row, k)]
            other = second[(*_broadcast(at[:count], right), k, *column)]
            return times(first_element, other)

        return call.reduce("sum", first.shape[-1], term)

    names = [*letters(count), *row_names, *column_names]
    return Array((*stack, *rows, *columns), element, names)


def _nothing(*_: Poly) -> Term:
    raise AssertionError("only its shape is used")


def _broadcast(places: Sequence[Poly], array: Array) -> list[Poly]:
    own_places = places[len(places) - array.dim :]
    return [ZERO if size == ONE else at for size, at in zip(array.shape, own_places, strict=True)]


@operator("x other", everywhere("matmul"), "torch.linalg.matmul torch.Tensor.__matmul__")
@operator("x mat2", everywhere("mm bmm"))
@operator("x vec", everywhere("mv"))
@operator("x tensor", "torch.dot aten.dot torch.vdot")
@operator("x other", "torch.Tensor.dot")
def _matmul(call: SymbolicCall) -> Array:
    second = next(n for n in ("other", "mat2", "vec", "tensor") if call.bound.has(n))
    return _product(call, "x", second)


def _add_scaled_tensor(call: SymbolicCall, result: Array) -> Array:
    """Beta times a tensor that broadcasts, plus alpha times the result."""
    added = call.given("x")
    call.names["x"] = result.names[result.dim - added.dim :]
    beta, alpha = number_term(call.get("beta", 1)), number_term(call.get("alpha", 1))
    for size, result_size in zip(reversed(added.shape), reversed(result.shape), strict=False):
        if size != ONE:
            call.same(size, result_size)
    return Array(
        result.shape, lambda *at: plus(times(beta, added.at(at)), times(alpha, result[at]))
    )


@operator("x mat1 mat2 beta alpha", everywhere("addmm"))
@operator("x batch1 batch2 beta alpha", everywhere("baddbmm"))
@operator("x mat vec beta alpha", everywhere("addmv"))
def _add_product(call: SymbolicCall) -> Array:
    names = ("mat1", "mat2", "batch1", "batch2", "mat", "vec")
    product = _product(call, *(name for name in names if call.bound.has(name)))
    return _add_scaled_tensor(call, product)


@operator("x batch1 batch2 beta alpha", everywhere("addbmm"))
def _add_sum_of_products(call: SymbolicCall) -> Array:
    products = _product(call, "batch1", "batch2")
    call.names |= {"batch1": ["b", "m", "k"], "batch2": ["b", "k", "n"]}
    total = Array(
        products.shape[1:],
        lambda *at: call.reduce("sum", products.shape[0], lambda b: products[(b, *at)]),
        products.names[1:],
    )
    return _add_scaled_tensor(call, total)


@operator("x vec2", "torch.outer torch.Tensor.outer aten.outer torch.ger torch.Tensor.ger")
def _outer(call: SymbolicCall) -> Array:
    return _outer_product(call, "x", "vec2")


def _outer_product(call: SymbolicCall, *factors: str) -> Array:
    first, second = map(call.given, factors)
    call.names |= {factors[0]: ["m"], factors[1]: ["n"]}
    return Array(
        (*first.shape, *second.shape), lambda i, j: times(first[(i,)], second[(j,)]), ["m", "n"]
    )


@operator("x vec1 vec2 beta alpha", everywhere("addr"))
def _add_outer(call: SymbolicCall) -> Array:
    return _add_scaled_tensor(call, _outer_product(call, "vec1", "vec2"))


def _number_letters(letter: str, count: int) -> list[str]:
    return [f"{letter}{at}" for at in range(count)]


@operator("x other", "torch.inner torch.Tensor.inner")
def _inner(call: SymbolicCall) -> Array:
    first, second = call.given("x"), call.given("other")
    call.same(first.shape[-1], second.shape[-1])
    rows = first.dim - 1
    call.names["x"] = [*_number_letters("m", rows), "k"]
    call.names["other"] = [*_number_letters("n", second.dim - 1), "k"]

    def element(*at: Poly) -> Term:
        return call.reduce(
            "sum",
            first.shape[-1],
            lambda k: times(first[(*at[:rows], k)], second[(*at[rows:], k)]),
        )

    return Array((*first.shape[:-1], *second.shape[:-1]), element)


@operator("x weight bias", functional("linear"), "aten.linear")
def _linear(call: SymbolicCall) -> Array:
    x, weight, bias = call.given("x"), call.given("weight"), call.tensor("bias")
    call.same(x.shape[-1], weight.shape[-1])
    call.names |= {
        "x": [*_number_letters("m", x.dim - 1), "k"],
        "weight": ["n", "k"],
        "bias": ["n"],
    }
    if bias is not None:
        call.same(bias.shape[-1], weight.shape[0])

    def element(*at: Poly) -> Term:
        result = call.reduce(
            "sum", x.shape[-1], lambda k: times(x[(*at[:-1], k)], weight[(at[-1], k)])
        )
        return result if bias is None else plus(result, bias.at(at[-1:]))

    return Array((*x.shape[:-1], weight.shape[0]), element)


@operator("input1 input2 weight bias", functional("bilinear"), "torch.bilinear aten.bilinear")
def _bilinear(call: SymbolicCall) -> Array:
    first, second = call.given("input1"), call.given("input2")
    weight, bias = call.given("weight"), call.tensor("bias")
    call.same(first.shape[-1], weight.shape[1])
    call.same(second.shape[-1], weight.shape[2])
    for first_size, other in zip(first.shape[:-1], second.shape[:-1], strict=True):
        call.same(first_size, other)
    rows = _number_letters("m", first.dim - 1)
    call.names |= {"input1": [*rows, "i"], "input2": [*rows, "j"]}
    call.names |= {"weight": ["n", "i", "j"], "bias": ["n"]}

    def element(*at: Poly) -> Term:
        def term(i: Poly, j: Poly) -> Term:
            return times(first[(*at[:-1], i)], second[(*at[:-1], j)], weight[(at[-1], i, j)])

        result = call.reduce(
            "sum",
            first.shape[-1],
            lambda i: call.reduce("sum", second.shape[-1], lambda j: term(i, j)),
        )
        return result if bias is None else plus(result, bias[(at[-1],)])

    if bias is not None:
        call.same(bias.shape[0], weight.shape[0])
    return Array((*first.shape[:-1], weight.shape[0]), element)


def _contract(
    call: SymbolicCall,
    arrays: Sequence[Array],
    terms: Sequence[Sequence[str]],
    outside: Sequence[str],
) -> Array:
    """A sum of products over the letters that the result does not have."""
    lengths: dict[str, Poly] = {}
    for array, term in zip(arrays, terms, strict=True):
        for letter, size in zip(term, array.shape, strict=True):
            if size == ONE:
                lengths.setdefault(letter, ONE)
            elif lengths.get(letter, ONE) == ONE:
                lengths[letter] = size
            else:
                call.same(lengths[letter], size)
    inside = [letter for letter in lengths if letter not in outside]

    def element(*at: Poly) -> Term:
        places = dict(zip(outside, at, strict=True))
        names = {letter: call.fresh() for letter in inside}
        places |= {letter: symbol(name) for letter, name in names.items()}
        factors = [
            array[
                tuple(
                    ZERO if size == ONE else places[letter]
                    for letter, size in zip(term, array.shape, strict=True)
                )
            ]
            for array, term in zip(arrays, terms, strict=True)
        ]
        result: Term = times(*factors)
        for letter, name in names.items():
            result = ("sum", name, lengths[letter], result)
        return result

    return Array(tuple(lengths[letter] for letter in outside), element)


@operator("equation *operands", "torch.einsum torch.functional.einsum")
def _einsum(call: SymbolicCall) -> Array:
    inside, arrow, outside = call.get("equation").replace(" ", "").partition("->")
    arrays = [array for array in call.tensors("operands") if array is not None]
    written = inside.split(",")
    others = [len(text.replace(_ELLIPSIS, "")) for text in written]
    counts = [array.dim - count for array, count in zip(arrays, others, strict=True)]
    most = max(
        (count for count, text in zip(counts, written, strict=True) if _ELLIPSIS in text), default=0
    )
    terms = [_einsum_dims(text, most, count) for text, count in zip(written, counts, strict=True)]
    if not arrow:
        letters = Counter(inside.replace(",", "").replace(_ELLIPSIS, ""))
        single = sorted(letter for letter, count in letters.items() if count == 1)
        outside = "".join([_ELLIPSIS, *single])
    return _contract(call, arrays, terms, _einsum_dims(outside, most, most))


_ELLIPSIS = "..."


def _einsum_dims(text: str, most: int, count: int) -> list[str]:
    """The names of dimensions; the last ones that `...` stands for are the same in all tensors."""
    before, ellipsis, after = text.partition(_ELLIPSIS)
    rest = [f"{_ELLIPSIS}{at}" for at in range(most - count, most)]
    return [*before, *(rest if ellipsis else ()), *after]


@operator("a b dims", "torch.tensordot torch.functional.tensordot")
def _tensordot(call: SymbolicCall) -> Array:
    first, second, dims = call.given("a"), call.given("b"), call.get("dims", 2)
    if isinstance(dims, int):
        dims = (range(first.dim - dims, first.dim), range(dims))
    left = [f"m{at}" for at in range(first.dim)]
    right = [f"n{at}" for at in range(second.dim)]
    for at, (i, j) in enumerate(zip(*dims, strict=True)):
        left[i % first.dim] = right[j % second.dim] = f"k{at}"
    call.names |= {"a": left, "b": right}
    outside = [name for name in left + right if not name.startswith("k")]
    return _contract(call, [first, second], [left, right], outside)


@operator("x1 x2 p compute_mode", "torch.cdist aten.cdist")
def _distances(call: SymbolicCall) -> Array | list[Array]:
    """The 1-norm is a sum over the elements of the rows; other norms are not written out."""
    first, second = call.given("x1"), call.given("x2")
    if first.dim != second.dim:
        raise OutsideTheoryError("cdist of tensors with different numbers of dimensions")
    stack = letters(first.dim - 2)
    if call.get("p", 2.0) != 1:
        layouts: dict[str, tuple[Array, Layout]] = {
            "x1": (first, [*stack, "m", "k^"]),
            "x2": (second, [*stack, "n", "k^"]),
        }
        return by_slices(call, layouts, [[*stack, "m", "n"]])
    call.names |= {"x1": [*stack, "m", "k"], "x2": [*stack, "n", "k"]}
    call.same(first.shape[-1], second.shape[-1])
    for first_size, other in zip(first.shape[:-2], second.shape[:-2], strict=True):
        if ONE not in (first_size, other):
            call.same(first_size, other)
    distance = call.known_function("distance", lambda pair: (pair[0] - pair[1]).abs())
    shape = (
        broadcast_sizes(call, Array(first.shape[:-2], _nothing), Array(second.shape[:-2], _nothing))
        if stack
        else ()
    )

    def element(*at: Poly) -> Term:
        def term(k: Poly) -> Term:
            first_place, other = ((*at[:-2], at[-2], k), (*at[:-2], at[-1], k))
            return ("fn", distance, (first.at(first_place), second.at(other)))

        return call.reduce("sum", first.shape[-1], term)

    return Array((*shape, first.shape[-2], second.shape[-2]), element)


# --- Attention: each query row and each column of values ------------------------------------------

_FUSED_KERNELS = "flash_attention flash_attention_for_cpu efficient_attention cudnn_attention"
for _kernel in _FUSED_KERNELS.split():
    belongs_to("attention", f"_scaled_dot_product_{_kernel}")
    belongs_to("attention backward", f"_scaled_dot_product_{_kernel}_backward")


@operator(
    "query key value attn_mask dropout_p is_causal scale enable_gqa",
    functional("scaled_dot_product_attention"),
    "aten.scaled_dot_product_attention",
)
def _attention(call: SymbolicCall) -> list[Array]:
    query, key, value = (call.given(name) for name in ("query", "key", "value"))
    if call.get("dropout_p", 0.0) != 0:
        raise OutsideTheoryError("attention with dropout")
    mask = call.tensor("attn_mask")
    if call.get("enable_gqa"):
        key, value = (_shared_heads(query, array) for array in (key, value))
    count = max(query.dim, key.dim, value.dim)
    names = letters(count)
    rows = "q^" if call.get("is_causal") else "q"
    layouts: dict[str, tuple[Array, Layout]] = {
        "query": (query, [*align_names(query, count)[:-2], rows, "e^"]),
        "key": (key, [*align_names(key, count)[:-2], "s^", "e^"]),
        "value": (value, [*align_names(value, count)[:-2], "s^", "v"]),
    }
    if mask is not None:
        mask_layout: list[str | None] = [*align_names(mask, count)[:-2], rows, "s^"]
        layouts["attn_mask"] = (mask, mask_layout[-mask.dim :])
    return by_slices(call, layouts, [[*names[:-2], rows, "v"]])


def _shared_heads(query: Array, shared_array: Array) -> Array:
    """Heads of keys that several heads of queries share, repeated."""
    heads, shared_heads = query.shape[-3], shared_array.shape[-3]
    share = floor_divide(heads, shared_heads, {})

    def element(*at: Poly) -> Term:
        head = ZERO if shared_heads == ONE else floor_divide(at[-3], share, {})
        return shared_array[(*at[:-3], head, *at[-2:])]

    return Array((*shared_array.shape[:-3], heads, *shared_array.shape[-2:]), element)


# --- Convolutions: a sum over channels of convolutions of planes ----------------------------------

belongs_to("convolution", "convolution")
belongs_to("convolution backward", "convolution_backward")


@operator(
    "x weight bias stride padding dilation groups",
    functional("conv1d conv2d conv3d"),
    "torch.conv1d torch.conv2d torch.conv3d aten.conv1d aten.conv2d aten.conv3d",
)
@operator(
    "x weight bias stride padding output_padding groups dilation",
    functional("conv_transpose1d conv_transpose2d conv_transpose3d"),
    "torch.conv_transpose1d torch.conv_transpose2d torch.conv_transpose3d",
    "aten.conv_transpose1d aten.conv_transpose2d aten.conv_transpose3d",
)
@operator(
    "x weight bias stride padding dilation transposed output_padding groups",
    "torch.convolution aten.convolution",
)
def _convolution(call: SymbolicCall) -> Array:
    x, weight, bias = call.given("x"), call.given("weight"), call.tensor("bias")
    word = operator_word(call.call)
    transposed = "transpose" in word or bool(call.get("transposed"))
    space = weight.dim - 2
    samples = x.dim - 1 - space
    groups = call.number("groups", 1)
    channels = x.shape[samples]
    each = floor_divide(weight.shape[0] if transposed else channels, groups, {})
    call.same(
        channels, weight.shape[0] if transposed else indices.multiply(groups, weight.shape[1])
    )
    group_outputs = weight.shape[1] if transposed else floor_divide(weight.shape[0], groups, {})
    outside = indices.multiply(group_outputs, groups) if transposed else weight.shape[0]
    if not transposed:
        call.same(indices.multiply(group_outputs, groups), outside)
    planes = (*x.shape[samples + 1 :], *weight.shape[2:])
    single = {"groups": 1, "bias": None}
    overrides = {name: value for name, value in single.items() if name in call.bound.values}
    function = call.function(
        "convolve", lambda arrays: _convolve_planes(call, arrays, space, overrides), overrides
    )
    sizes = [symbol(("size", f"{function}.{at}", planes)) for at in range(space)]

    def element(*at: Poly) -> Term:
        channel = at[samples]
        group = floor_divide(channel, group_outputs, {}) if group_outputs != ONE else channel
        within = indices.remainder(channel, group_outputs, {})

        def term(c: Poly) -> Term:
            inside = indices.add(indices.multiply(group, each), c)
            if groups == ONE:
                inside, output_channel = c, channel
            else:
                output_channel = within
            kernel = (inside, output_channel) if transposed else (channel, c)
            return ("fun", function, (
                _plane(call, x, (*at[:samples], inside)),
                _plane(call, weight, kernel),
            ), at[samples + 1 :])  # fmt: skip

        result = call.reduce("sum", each, term)
        return result if bias is None else plus(result, bias[(channel,)])

    if bias is not None:
        call.same(bias.shape[0], outside)
    return Array((*x.shape[:samples], outside, *sizes), element)


def _plane(call: SymbolicCall, array: Array, front: Sequence[Poly]) -> tuple[Any, Term]:
    names = [call.fresh() for _ in array.shape[len(front) :]]
    fixed = [ZERO if size == ONE else at for size, at in zip(array.shape, front, strict=False)]
    binders, places = [], []
    for name, size in zip(names, array.shape[len(front) :], strict=True):
        if size != ONE:
            binders.append((name, size))
        places.append(ZERO if size == ONE else symbol(name))
    return tuple(binders), array[(*fixed, *places)]


def _convolve_planes(
    call: SymbolicCall, arrays: list[torch.Tensor], space: int, overrides: Mapping[str, Any]
) -> torch.Tensor:
    """The operator itself with one channel."""
    input_tensor, kernel = call.get("x"), call.get("weight")
    plane = arrays[0].reshape(1, 1, *input_tensor.shape[input_tensor.dim() - space :])
    weight = arrays[1].reshape(1, 1, *kernel.shape[2:])
    return call.run({"x": plane, "weight": weight, **overrides})[0][0, 0]


# --- Pooling and resampling -----------------------------------------------------------------------

belongs_to("maxima of windows", "max_pool2d_with_indices max_pool3d_with_indices")
belongs_to(
    "maxima of windows backward",
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward",
)
belongs_to(
    "exact",
    "adaptive_max_pool2d adaptive_max_pool3d im2col max_unpool2d max_unpool3d upsample_nearest1d",
    "upsample_nearest2d",
)
belongs_to(
    "smooth",
    "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward avg_pool1d avg_pool2d avg_pool2d_backward",
    "avg_pool3d im2col matmul upsample_bilinear2d upsample_nearest2d",
    "_scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
belongs_to("averages of windows", "avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d")


def _planes(call: SymbolicCall, space: int, outputs: int = 1) -> list[Array]:
    """An operator that works on each plane alone."""
    x = call.given("x")
    layout: list[str | None] = [*["b", "c"][space - x.dim :], *[None] * space]
    return by_slices(call, {"x": (x, layout)}, [layout] * outputs)


def _pooling(call: SymbolicCall) -> Array | list[Array]:
    word = operator_word(call.call)
    space = int(next(letter for letter in word if letter.isdigit()))
    outputs = 2 if call.get("return_indices") else 1
    kernel = setting_of_each(call.get("kernel_size"), space)
    stride = setting_of_each(call.get("stride"), space, kernel)
    padding = setting_of_each(call.get("padding"), space, 0)
    dilation = setting_of_each(call.get("dilation"), space, 1)
    apart = kernel == stride and set(padding) == {0} and set(dilation) == {1}
    if outputs > 1 or not apart or call.get("ceil_mode"):
        return _planes(call, space, outputs)
    return _windows_apart(call, kernel)


def _windows_apart(call: SymbolicCall, kernel: tuple[int, ...]) -> Array:
    """Windows that do not overlap: each result is a function of its own window."""
    x, space = call.given("x"), len(kernel)
    front = x.dim - space

    def evaluate(arrays: list[torch.Tensor]) -> torch.Tensor:
        window = arrays[0].reshape(*[1] * front, *kernel)
        return call.run({"x": window})[0].reshape(())

    function = call.function("window", evaluate, {})
    sizes = []
    for size, width in zip(x.shape[front:], kernel, strict=True):
        if size == ONE and width == 1:
            sizes.append(ONE)
        else:
            sizes.append(floor_divide(size, constant(width), {}))

    def element(*at: Poly) -> Term:
        binders, places = [], []
        for window_index, width in zip(at[front:], kernel, strict=True):
            name = call.fresh()
            begin = indices.multiply(window_index, constant(width))
            if width != 1:
                binders.append((name, constant(width)))
                begin = indices.add(begin, symbol(name))
            places.append(begin)
        fixed = [ZERO if size == ONE else p for size, p in zip(x.shape, at[:front], strict=False)]
        return ("fun", function, ((tuple(binders), x[(*fixed, *places)]),), ())

    return Array((*x.shape[:front], *sizes), element)


_MAXIMUM = "x kernel_size stride padding dilation ceil_mode return_indices"
_AVERAGE = "x kernel_size stride padding ceil_mode count_include_pad divisor_override"

for _space in (1, 2, 3):
    _end = f"{_space}d"
    operator(_MAXIMUM, functional(f"max_pool{_end}"), f"torch.max_pool{_end} aten.max_pool{_end}")(
        _pooling
    )
    operator(_AVERAGE, functional(f"avg_pool{_end}"), f"aten.avg_pool{_end}")(_pooling)
    operator("x norm_type kernel_size stride ceil_mode", functional(f"lp_pool{_end}"))(_pooling)
operator(_AVERAGE, "torch.avg_pool1d")(_pooling)


@operator("x kernel_size stride padding dilation ceil_mode", "aten.max_pool2d_with_indices")
def _pool_with_indices(call: SymbolicCall) -> list[Array]:
    return _planes(call, 2, 2)


@operator(
    "x output_size",
    functional("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"),
)
@operator(
    "x output_size return_indices",
    functional("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"),
)
def _adaptive(call: SymbolicCall) -> list[Array]:
    space = int(operator_word(call.call)[-2])
    return _planes(call, space, 2 if call.get("return_indices") else 1)


@operator(
    "x *how",
    "aten.upsample_nearest1d aten.upsample_nearest2d aten.upsample_nearest3d",
    "aten.upsample_linear1d aten.upsample_bilinear2d aten.upsample_bicubic2d",
    "aten.upsample_trilinear3d",
)
def _upsample(call: SymbolicCall) -> list[Array]:
    x = call.given("x")
    layout = [*letters(2), *[None] * (x.dim - 2)]
    return by_slices(call, {"x": (x, layout)}, [layout])


@operator(
    "x size scale_factor mode align_corners recompute_scale_factor antialias",
    functional("interpolate"),
)
def _interpolate(call: SymbolicCall) -> Array | list[Array]:
    x = call.given("x")
    space = x.dim - 2
    scale = setting_of_each(call.get("scale_factor"), space)
    copied = call.get("mode", "nearest") == "nearest" and call.get("size") is None
    if not copied or any(factor != int(factor) or factor < 1 for factor in scale):
        return _planes(call, space)
    factors = [constant(int(factor)) for factor in scale]

    def element(*at: Poly) -> Term:
        places = [floor_divide(p, f, {}) for p, f in zip(at[2:], factors, strict=True)]
        return x.at((*at[:2], *places))

    sizes = [indices.multiply(s, f) for s, f in zip(x.shape[2:], factors, strict=True)]
    return Array((*x.shape[:2], *sizes), element)


@operator("x grid mode padding_mode align_corners", functional("grid_sample"))
def _grid_sample(call: SymbolicCall) -> list[Array]:
    x, grid = call.given("x"), call.given("grid")
    points = [f"p{at}" for at in range(grid.dim - 2)]
    layouts: dict[str, tuple[Array, Layout]] = {
        "x": (x, ["b", "c", *[None] * (x.dim - 2)]),
        "grid": (grid, ["b", *points, None]),
    }
    return by_slices(call, layouts, [["b", "c", *points]])


@operator("x kernel_size dilation padding stride", functional("unfold"))
def _unfold(call: SymbolicCall) -> Array:
    """The elements of the windows of a channel are adjacent."""
    x = call.given("x")
    front, width = x.dim - 2, constant(math.prod(setting_of_each(call.get("kernel_size"), 2)))
    shape = call.get("x").shape

    def evaluate(arrays: list[torch.Tensor]) -> torch.Tensor:
        return call.run({"x": arrays[0].reshape(1, 1, *shape[-2:])})[0][0]

    function = call.function("windows", evaluate, {})
    size = symbol(("size", function, x.shape[front:]))

    def element(*at: Poly) -> Term:
        channel = floor_divide(at[-2], width, {})
        places = [
            ZERO if s == ONE else p for s, p in zip(x.shape, (*at[:-2], channel), strict=False)
        ]
        inside = (indices.remainder(at[-2], width, {}), at[-1])
        return ("fun", function, (_plane(call, x, places),), inside)

    return Array(
        (*x.shape[: front - 1], indices.multiply(x.shape[front - 1], width), size), element
    )


@operator("x output_size kernel_size dilation padding stride", functional("fold"))
def _fold(call: SymbolicCall) -> Array:
    x = call.given("x")
    front, width = x.dim - 1, math.prod(setting_of_each(call.get("kernel_size"), 2))
    channels = floor_divide(x.shape[front - 1], constant(width), {})
    call.same(indices.multiply(channels, constant(width)), x.shape[front - 1])
    single = call.get("x").shape[front - 1] == width

    def evaluate(arrays: list[torch.Tensor]) -> torch.Tensor:
        return call.run({"x": arrays[0].reshape(1, width, -1)})[0][0, 0]

    function = call.function("fold", evaluate, {})
    sizes = [symbol(("size", f"{function}.{at}", x.shape[front:])) for at in range(2)]

    def element(*at: Poly) -> Term:
        names = call.fresh(), call.fresh()
        channel = ZERO if single else at[-3]
        row = indices.add(indices.multiply(channel, constant(width)), symbol(names[0]))
        fixed = [ZERO if s == ONE else p for s, p in zip(x.shape, at[:-3], strict=False)]
        binders = [(names[0], constant(width))] if width != 1 else []
        if x.shape[-1] != ONE:
            binders.append((names[1], x.shape[-1]))
        last = ZERO if x.shape[-1] == ONE else symbol(names[1])
        return ("fun", function, ((tuple(binders), x[(*fixed, row, last)]),), at[-2:])

    outside = ONE if single else channels
    if single:
        call.same(x.shape[front - 1], constant(width))
    return Array((*x.shape[: front - 1], outside, *sizes), element)
