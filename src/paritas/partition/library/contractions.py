"""Products of matrices, attention, convolutions and other windows."""

from __future__ import annotations

from collections import Counter
from typing import Any

from paritas.partition.library.registry import (
    SUM,
    Bound,
    RuleClaim,
    broadcast,
    everywhere,
    functional,
    letters,
    named,
    once,
    rule,
)

# --- Products of matrices: what is summed over gives terms, all else is split as it is ------------


def _matrices(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[str, str, str] | None:
    """The dimensions of a product with torch's own rules for vectors and stacks of matrices."""
    if not first or not second:
        return None
    stacks = broadcast((first[:-2], second[:-2]))
    if stacks is None:
        return None
    (left, right), stack, _ = stacks
    k = "1" if first[-1] == 1 else f"k{SUM}"
    rows = [] if len(first) == 1 else ["1" if first[-2] == 1 else "m"]
    columns = [] if len(second) == 1 else ["1" if second[-1] == 1 else "n"]
    return (
        " ".join([*left.split(), *rows, k]),
        " ".join([*right.split(), k, *columns]),
        " ".join([*stack, *rows, *columns]),
    )


@rule("x other", everywhere("matmul"), "torch.linalg.matmul torch.Tensor.__matmul__")
@rule("x mat2", everywhere("mm bmm"))
@rule("x vec", everywhere("mv"))
@rule("x tensor", "torch.dot aten.dot torch.vdot")
@rule("x other", "torch.Tensor.dot")
def _matmul(bound: Bound) -> RuleClaim | None:
    second = next((n for n in ("other", "mat2", "vec", "tensor") if bound.has(n)), None)
    first, other = bound.shape("x"), bound.shape(second or "")
    dims = _matrices(first, other) if first and other else None
    if dims is None or second is None:
        return None
    return RuleClaim({"x": dims[0], second: dims[1]}, (dims[2],))


@rule("x mat1 mat2 beta alpha", everywhere("addmm"))
@rule("x batch1 batch2 beta alpha", everywhere("baddbmm"))
@rule("x mat vec beta alpha", everywhere("addmv"))
def _add_product(bound: Bound) -> RuleClaim | None:
    """What is added to the product is added once, however many terms the product has."""
    names = [n for n in bound.values if n in ("mat1", "mat2", "batch1", "batch2", "mat", "vec")]
    added = bound.shape("x")
    shapes = [bound.shape(name) for name in sorted(names)]
    if len(names) != 2 or added is None or not all(shapes):  # noqa: PLR2004 - two factors
        return None
    dims = _matrices(shapes[0] or (), shapes[1] or ())
    if dims is None:
        return None
    first, second = sorted(names)
    outside = dims[2].split()
    inputs = {
        "x": once(_right(added, outside), dims[0].split()[-1]),
        first: dims[0],
        second: dims[1],
    }
    return RuleClaim(inputs, (dims[2],))


@rule("x batch1 batch2 beta alpha", everywhere("addbmm"))
def _add_sum_of_products(bound: Bound) -> RuleClaim | None:
    """The matrices of a stack are terms as well."""
    added, first, second = bound.shape("x"), bound.shape("batch1"), bound.shape("batch2")
    if added is None or first is None or second is None:
        return None
    names = {"b": first[0], "m": first[1], "k": first[2], "n": second[2]}
    b, m, k, n = ("1" if size == 1 else name for name, size in names.items())
    b, k = (name if name == "1" else name + SUM for name in (b, k))
    inputs = {
        "x": once(_right(added, [m, n]), b, k),
        "batch1": f"{b} {m} {k}",
        "batch2": f"{b} {k} {n}",
    }
    return RuleClaim(inputs, (f"{m} {n}",))


def _right(shape: tuple[int, ...], names: list[str]) -> str:
    return named(shape, names[len(names) - len(shape) :])


@rule("x vec2", "torch.outer torch.Tensor.outer aten.outer torch.ger torch.Tensor.ger")
def _outer(bound: Bound) -> RuleClaim | None:
    first, second = bound.shape("x"), bound.shape("vec2")
    if first is None or second is None:
        return None
    m, n = named(first, ["m"]), named(second, ["n"])
    return RuleClaim({"x": m, "vec2": n}, (f"{m} {n}",))


@rule("x vec1 vec2 beta alpha", everywhere("addr"))
def _add_outer(bound: Bound) -> RuleClaim | None:
    added, first, second = bound.shape("x"), bound.shape("vec1"), bound.shape("vec2")
    if added is None or first is None or second is None:
        return None
    m, n = named(first, ["m"]), named(second, ["n"])
    inputs = {"x": _right(added, [m, n]), "vec1": m, "vec2": n}
    return RuleClaim(inputs, (f"{m} {n}",))


@rule("x other", "torch.inner torch.Tensor.inner")
def _inner(bound: Bound) -> RuleClaim | None:
    """All but the last dimension of both, one after the other."""
    first, second = bound.shape("x"), bound.shape("other")
    if not first or not second:
        return None
    rows = named(first[:-1], [f"m{i}" for i in range(len(first) - 1)]).split()
    columns = named(second[:-1], [f"n{i}" for i in range(len(second) - 1)]).split()
    k = "1" if first[-1] == 1 else f"k{SUM}"
    inputs = {"x": " ".join([*rows, k]), "other": " ".join([*columns, k])}
    return RuleClaim(inputs, (" ".join([*rows, *columns]),))


@rule("x weight bias", functional("linear"), "aten.linear")
def _linear(bound: Bound) -> RuleClaim | None:
    """Split by what is summed over, the bias is counted once."""
    shape, weight = bound.shape("x"), bound.shape("weight")
    if not shape or weight is None or len(weight) != 2:  # noqa: PLR2004 - a matrix
        return None
    rows = named(shape[:-1], [f"m{i}" for i in range(len(shape) - 1)]).split()
    k = "1" if weight[1] == 1 else f"k{SUM}"
    n = "1" if weight[0] == 1 else "n"
    inputs = {"x": " ".join([*rows, k]), "weight": f"{n} {k}"}
    if bound.has("bias"):
        inputs["bias"] = once(n, k)
    return RuleClaim(inputs, (" ".join([*rows, n]),))


@rule("input1 input2 weight bias", functional("bilinear"), "torch.bilinear aten.bilinear")
def _bilinear(bound: Bound) -> RuleClaim | None:
    first, weight = bound.shape("input1"), bound.shape("weight")
    if not first or weight is None or not bound.has("input2"):
        return None
    rows = named(first[:-1], [f"m{i}" for i in range(len(first) - 1)]).split()
    n, i, j = ("1" if size == 1 else name for name, size in zip("nij", weight, strict=True))
    i, j = (name if name == "1" else name + SUM for name in (i, j))
    inputs = {
        "input1": " ".join([*rows, i]),
        "input2": " ".join([*rows, j]),
        "weight": f"{n} {i} {j}",
    }
    if bound.has("bias"):
        inputs["bias"] = once(n, i, j)
    return RuleClaim(inputs, (" ".join([*rows, n]),))


@rule("equation *operands", "torch.einsum torch.functional.einsum")
def _einsum(bound: Bound) -> RuleClaim | None:
    """The equation says it all: a letter that is not in the result is summed over."""
    equation, operands = bound.get("equation"), bound.get("operands", ())
    if not isinstance(equation, str) or "." in equation or "operands" in bound.keywords.values():
        return None
    if not bound.spread("operands"):
        return None  # they came as one list, of which the items have no place of their own
    inside, arrow, outside = equation.replace(" ", "").partition("->")
    terms = inside.split(",")
    if not arrow:
        counts = Counter(inside.replace(",", ""))
        outside = "".join(sorted(letter for letter, count in counts.items() if count == 1))
    if len(terms) != len(operands) or any(len(set(term)) != len(term) for term in terms):
        return None
    lengths: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        for letter, size in zip(term, operand.shape, strict=True):
            lengths[letter] = max(lengths.get(letter, 1), size)

    def dims(term: str, shape: tuple[int, ...]) -> str:
        marks = (letter if letter in outside else letter + SUM for letter in term)
        return " ".join("1" if size == 1 else mark for mark, size in zip(marks, shape, strict=True))

    texts = [
        dims(term, tuple(operand.shape)) for term, operand in zip(terms, operands, strict=True)
    ]
    result = dims(outside, tuple(lengths[letter] for letter in outside))
    return RuleClaim({f"operands[{i}]": text for i, text in enumerate(texts)}, (result,))


@rule("x1 x2 p compute_mode", "torch.cdist aten.cdist")
def _distances(bound: Bound) -> RuleClaim | None:
    """Every row of one with every row of the other; only a sum of distances is a sum of terms."""
    first, second = bound.shape("x1"), bound.shape("x2")
    if first is None or second is None:
        return None
    dims = _matrices(first, (*second[:-2], second[-1], second[-2]))
    if dims is None:
        return None
    k = f"k{SUM}" if bound.get("p", 2.0) == 1 else "k^"
    left = [k if dim.startswith("k") else dim for dim in dims[0].split()]
    right = [k if dim.startswith("k") else dim for dim in dims[1].split()]
    right[-1], right[-2] = right[-2], right[-1]
    return RuleClaim({"x1": " ".join(left), "x2": " ".join(right)}, (dims[2],))


@rule("a b dims", "torch.tensordot torch.functional.tensordot")
def _tensordot(bound: Bound) -> RuleClaim | None:
    """Pairs of dimensions are summed over; the others follow each other."""
    first, second, dims = bound.shape("a"), bound.shape("b"), bound.get("dims", 2)
    if first is None or second is None:
        return None
    if isinstance(dims, int):
        dims = (list(range(len(first) - dims, len(first))), list(range(dims)))
    if not isinstance(dims, list | tuple) or len(dims) != 2:  # noqa: PLR2004 - a pair of lists
        return None
    left = [dim % len(first) for dim in dims[0]]
    right = [dim % len(second) for dim in dims[1]]
    if any(first[i] != second[j] for i, j in zip(left, right, strict=True)):
        return None
    inside = ["1" if size == 1 else f"m{i}" for i, size in enumerate(first)]
    outside = ["1" if size == 1 else f"n{i}" for i, size in enumerate(second)]
    rows = [dim for i, dim in enumerate(inside) if i not in left]
    columns = [dim for i, dim in enumerate(outside) if i not in right]
    for count, (i, j) in enumerate(zip(left, right, strict=True)):
        inside[i] = outside[j] = "1" if first[i] == 1 else f"k{count}{SUM}"
    return RuleClaim(
        {"a": " ".join(inside), "b": " ".join(outside)}, (" ".join([*rows, *columns]),)
    )


# --- Attention: stacks of heads by themselves, queries by themselves unless their places count ----


@rule(
    "query key value attn_mask dropout_p is_causal scale enable_gqa",
    functional("scaled_dot_product_attention"),
    "aten.scaled_dot_product_attention",
)
def _attention(bound: Bound) -> RuleClaim | None:
    """Keys are weighed against each other and stay whole.

    A causal mask counts queries from the first, so they stay together under one.
    """
    query, key, value = (bound.shape(name) for name in ("query", "key", "value"))
    if query is None or key is None or value is None or bound.get("dropout_p", 0.0) != 0:
        return None
    stacks = _stacks(query[:-2], key[:-2], value[:-2], shared=bool(bound.get("enable_gqa")))
    if stacks is None or min(map(len, (query, key, value))) < 2:  # noqa: PLR2004 - a matrix
        return None
    left, middle, right, stack = stacks
    rows = "1" if query[-2] == 1 else "q^" if bound.get("is_causal") else "q"
    keys = "1" if key[-2] == 1 else "s^"
    inner = "1" if query[-1] == 1 else "e^"
    width = "1" if value[-1] == 1 else "v"
    inputs = {
        "query": f"{left} {rows} {inner}".strip(),
        "key": f"{middle} {keys} {inner}".strip(),
        "value": f"{right} {keys} {width}".strip(),
    }
    mask = bound.shape("attn_mask")
    if mask is not None:
        if len(mask) > len(stack) + 2:
            return None
        inputs["attn_mask"] = named(mask, [*stack, rows, keys])
    return RuleClaim(inputs, (" ".join([*stack, rows, width]),))


def _stacks(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *, shared: bool
) -> tuple[str, str, str, list[str]] | None:
    """The dimensions before the matrices: of queries, keys, values and of the result.

    Args:
        shared: neighbouring heads of queries share a head of keys, with which they go.
    """
    if not shared:
        found = broadcast((query, key, value))
        return None if found is None else (*found[0], found[1])  # type: ignore[return-value]
    if not query or not key or key != value or query[:-1] != key[:-1] or query[-1] % key[-1]:
        return None
    front = named(query[:-1], letters(len(query) - 1)).split()
    share = query[-1] // key[-1]
    heads = "h" if share == 1 or key[-1] == 1 else f"(h {share})"
    inside = " ".join([*front, "1" if key[-1] == 1 else "h"])
    outside = [*front, "1" if query[-1] == 1 else heads]
    return " ".join(outside), inside, inside, outside


# --- Convolutions: samples, channels and groups of channels can be split; space is left whole -----

_PLAIN = "x weight bias stride padding dilation groups"
_TRANSPOSED = "x weight bias stride padding output_padding groups dilation"
_SPACE = ("t", "h", "w")


def _claim(bound: Bound, groups: int, *, transposed: bool) -> RuleClaim | None:
    shape, weight = bound.shape("x"), bound.shape("weight")
    if shape is None or weight is None:
        return None
    space = _SPACE[len(_SPACE) - (len(weight) - 2) :]
    samples = [] if len(shape) == len(weight) - 1 else ["1" if shape[0] == 1 else "b"]
    if len(shape) != len(samples) + 1 + len(space):
        return None
    inside, outside, kernel = _channels(weight, groups, transposed=transposed)
    inputs = {
        "x": " ".join([*samples, inside, *(f"{s}^" for s in space)]),
        "weight": " ".join([*kernel, *(f"k{s}^" for s in space)]),
    }
    if bound.has("bias"):
        inputs["bias"] = once(outside, inside)
    numbers = () if groups == 1 else (("groups", None, "g"),)
    return RuleClaim(inputs, (" ".join([*samples, outside, *(f"{s}o^" for s in space)]),), numbers)


def _channels(
    weight: tuple[int, ...], groups: int, *, transposed: bool
) -> tuple[str, str, tuple[str, str]]:
    """The channels of the input, of the result, and those two of the weight.

    The channels of a group make those of the same group. So groups go to ranks as they are, and
    their number is divided; inside of a group, channels of the result are not in a row.
    """
    if groups == 1:
        taken, made = (weight[0], weight[1]) if transposed else (weight[1], weight[0])
        inside = "1" if taken == 1 else f"c{SUM}"
        outside = "1" if made == 1 else "o"
        return inside, outside, (inside, outside) if transposed else (outside, inside)
    inside, outside = "(g c^)", "(g o^)"
    return inside, outside, (inside, "o^") if transposed else (outside, "c^")


@rule(
    _PLAIN,
    functional("conv1d conv2d conv3d"),
    "torch.conv1d torch.conv2d torch.conv3d aten.conv1d aten.conv2d aten.conv3d",
)
def _convolution(bound: Bound) -> RuleClaim | None:
    return _claim(bound, bound.get("groups", 1), transposed=False)


@rule(
    _TRANSPOSED,
    functional("conv_transpose1d conv_transpose2d conv_transpose3d"),
    "torch.conv_transpose1d torch.conv_transpose2d torch.conv_transpose3d",
    "aten.conv_transpose1d aten.conv_transpose2d aten.conv_transpose3d",
)
def _transposed(bound: Bound) -> RuleClaim | None:
    return _claim(bound, bound.get("groups", 1), transposed=True)


@rule(
    "x weight bias stride padding dilation transposed output_padding groups",
    "torch.convolution aten.convolution",
)
def _general(bound: Bound) -> RuleClaim | None:
    return _claim(bound, bound.get("groups", 1), transposed=bool(bound.get("transposed")))


# --- Pooling, resampling and windows: samples and channels apart, space where it falls apart ------


def _front(shape: tuple[int, ...], spatial: int) -> list[str] | None:
    """Samples, if there are any, and channels."""
    names = {1: ["c"], 2: ["b", "c"]}.get(len(shape) - spatial)
    if names is None:
        return None
    return ["1" if size == 1 else name for name, size in zip(names, shape, strict=False)]


def _each(value: Any, count: int, default: Any = None) -> tuple[Any, ...]:
    """A setting for each dimension of space."""
    value = default if value is None or value in ((), []) else value
    each = tuple(value) if isinstance(value, list | tuple) else (value,)
    return each * count if len(each) == 1 else each


def _pooled(
    bound: Bound, spatial: int, *, windows: bool = False, indices: bool = False
) -> RuleClaim | None:
    """Pool each channel.

    Args:
        windows: windows of a fixed size, which may fall apart: neither overlap nor padding.
        indices: places are counted within the plane, which must be whole then.
    """
    shape = bound.shape("x")
    front = _front(shape, spatial) if shape else None
    if shape is None or front is None:
        return None
    inside, outside = ["_"] * spatial, ["_"] * spatial
    if windows and not indices:
        kernel = _each(bound.get("kernel_size"), spatial)
        stride = _each(bound.get("stride"), spatial, kernel)
        padding = _each(bound.get("padding"), spatial, 0)
        dilation = _each(bound.get("dilation"), spatial, 1)
        space = zip(kernel, stride, padding, dilation, strict=True)
        for i, (name, settings) in enumerate(zip(_SPACE[-spatial:], space, strict=True)):
            width = settings[0]
            if settings == (width, width, 0, 1) and shape[len(front) + i] % width == 0:
                outside[i] = name
                inside[i] = name if width == 1 else f"({name} {width})"
    text = " ".join([*front, *outside])
    return RuleClaim({"x": " ".join([*front, *inside])}, (text, text) if indices else (text,))


_MAX = "x kernel_size stride padding dilation ceil_mode return_indices"
_AVG = "x kernel_size stride padding ceil_mode count_include_pad divisor_override"


def _rules_of(spatial: int) -> None:
    """The pooling operators for so many dimensions of space."""
    end = f"{spatial}d"

    def maximum(bound: Bound) -> RuleClaim | None:
        indices = bool(bound.get("return_indices"))
        return _pooled(bound, spatial, windows=True, indices=indices)

    def average(bound: Bound) -> RuleClaim | None:
        return _pooled(bound, spatial, windows=True)

    def adaptive(bound: Bound) -> RuleClaim | None:
        return _pooled(bound, spatial, indices=bool(bound.get("return_indices")))

    rule(_MAX, functional(f"max_pool{end}"), f"torch.max_pool{end} aten.max_pool{end}")(maximum)
    average_names = "torch.avg_pool1d aten.avg_pool1d" if spatial == 1 else f"aten.avg_pool{end}"
    rule(_AVG, functional(f"avg_pool{end}"), average_names)(average)
    lp = "x norm_type kernel_size stride ceil_mode"
    rule(lp, functional(f"lp_pool{end}"))(average)
    rule("x output_size", functional(f"adaptive_avg_pool{end}"))(adaptive)
    rule("x output_size return_indices", functional(f"adaptive_max_pool{end}"))(adaptive)


for _count in (1, 2, 3):
    _rules_of(_count)


@rule("x kernel_size stride padding dilation ceil_mode", "aten.max_pool2d_with_indices")
def _with_indices(bound: Bound) -> RuleClaim | None:
    return _pooled(bound, 2, indices=True)


@rule(
    "x size scale_factor mode align_corners recompute_scale_factor antialias",
    functional("interpolate"),
)
def _interpolate(bound: Bound) -> RuleClaim | None:
    """Copies of pixels fall apart; other modes look at neighbours."""
    shape = bound.shape("x")
    if shape is None or not 3 <= len(shape) <= 5:  # noqa: PLR2004 - one to three dimensions of space
        return None
    spatial = len(shape) - 2
    front = _front(shape, spatial) or []
    inside, outside = ["_"] * spatial, ["_"] * spatial
    scale = _each(bound.get("scale_factor"), spatial)
    if bound.get("mode", "nearest") == "nearest" and bound.get("size") is None:
        for i, (name, factor) in enumerate(zip(_SPACE[-spatial:], scale, strict=True)):
            if factor == int(factor) and factor >= 1 and shape[2 + i] > 1:
                inside[i] = name
                outside[i] = name if factor == 1 else f"({name} {int(factor)})"
    return RuleClaim({"x": " ".join([*front, *inside])}, (" ".join([*front, *outside]),))


@rule("x grid mode padding_mode align_corners", functional("grid_sample"))
def _grid_sample(bound: Bound) -> RuleClaim | None:
    """Every place of the grid is looked up by itself in the whole picture."""
    shape, grid = bound.shape("x"), bound.shape("grid")
    if shape is None or grid is None or len(shape) != len(grid):
        return None
    spatial = len(shape) - 2
    front = _front(shape, spatial) or []
    places = [
        "1" if size == 1 else name for name, size in zip(_SPACE[-spatial:], grid[1:-1], strict=True)
    ]
    inputs = {
        "x": " ".join([*front, *["_"] * spatial]),
        "grid": " ".join([front[0], *places, str(spatial)]),
    }
    return RuleClaim(inputs, (" ".join([*front, *places]),))


@rule("x kernel_size dilation padding stride", functional("unfold"))
def _windows(bound: Bound) -> RuleClaim | None:
    """A column for each window; the elements of a channel lie together in it."""
    shape = bound.shape("x")
    front = _front(shape, 2) if shape else None
    if front is None:
        return None
    rows = _rows(bound)
    channels = str(rows) if front[-1] == "1" else f"({front[-1]} {rows})"
    inputs = {"x": " ".join([*front, "_", "_"])}
    return RuleClaim(inputs, (" ".join([*front[:-1], channels, "_"]),))


@rule("x output_size kernel_size dilation padding stride", functional("fold"))
def _unwindowed(bound: Bound) -> RuleClaim | None:
    shape = bound.shape("x")
    front = _front(shape, 1) if shape else None
    if front is None or shape is None:
        return None
    rows = _rows(bound)
    single = shape[-2] == rows
    channels = str(rows) if single else f"(c {rows})"
    outside = [*front[:-1], "1" if single else "c", "_", "_"]
    return RuleClaim({"x": " ".join([*front[:-1], channels, "_"])}, (" ".join(outside),))


def _rows(bound: Bound) -> int:
    """How many elements a window has."""
    first, second = _each(bound.get("kernel_size"), 2)
    return int(first) * int(second)
