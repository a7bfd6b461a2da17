"""Rules of attention, convolutions and other windows, and of sums that are written as text.

They are not derived: heads, groups and windows are lengths within a dimension (`(g c^)`), and a
definition covers more equations and shapes than a rule should promise.
"""

from __future__ import annotations

import functools
from collections import Counter

from paritas.core.operators.calls import (
    Bound,
    broadcast,
    dim_of,
    letters,
    name_dims,
    setting_of_each,
)
from paritas.sharding.operators.library.claims import SUM, RuleClaim, once, unary
from paritas.sharding.operators.library.registry import rule

# --- Products: contracted dimensions give terms of a sum, all others are split as they are --------


@rule("einsum")
def _einsum(bound: Bound) -> RuleClaim | None:
    """A letter that is not in the result is summed over."""
    equation, operands = bound.get("equation"), bound.get("operands", ())
    if not isinstance(equation, str) or "." in equation or "operands" in bound.keywords.values():
        return None
    if not bound.spread("operands"):
        return None  # the items of a list have no positions of their own
    inside, arrow, outside = equation.replace(" ", "").partition("->")
    terms = inside.split(",")
    if not arrow:
        counts = Counter(inside.replace(",", ""))
        outside = "".join(sorted(letter for letter, count in counts.items() if count == 1))
    if len(terms) != len(operands) or any(len(set(term)) != len(term) for term in terms):
        return None
    lengths: dict[str, int] = {}
    inputs = {}
    for i, (term, operand) in enumerate(zip(terms, operands, strict=True)):
        dims = []
        for letter, size in zip(term, operand.shape, strict=True):
            lengths[letter] = max(lengths.get(letter, 1), size)
            dims.append(dim_of(size, letter if letter in outside else letter + SUM))
        inputs[f"operands[{i}]"] = dims
    return RuleClaim(inputs, ([dim_of(lengths[letter], letter) for letter in outside],))


@rule("cdist")
def _distances(bound: Bound) -> RuleClaim | None:
    """Each row of one tensor with each row of the other; only the 1-norm is a sum of terms."""
    first, second = bound.shape("x1"), bound.shape("x2")
    stacks = broadcast((first[:-2], second[:-2])) if first and second else None
    if not first or not second or stacks is None:
        return None
    (left, right), stack = stacks
    k = dim_of(first[-1], f"k{SUM}" if bound.get("p", 2.0) == 1 else "k^")
    rows, columns = name_dims(first[-2:-1], ["m"]), name_dims(second[-2:-1], ["n"])
    inputs = {"x1": [*left, *rows, k], "x2": [*right, *columns, k]}
    return RuleClaim(inputs, ([*stack, *rows, *columns],))


# --- Attention ------------------------------------------------------------------------------------


@rule("scaled_dot_product_attention")
def _attention(bound: Bound) -> RuleClaim | None:
    """The softmax needs all keys, so they are not split.

    A causal mask counts queries from the first one, so with it they are not split either.
    """
    query, key, value = (bound.shape(name) for name in ("query", "key", "value"))
    if query is None or key is None or value is None or bound.get("dropout_p", 0.0) != 0:
        return None
    stacks = _stacks(query[:-2], key[:-2], value[:-2], shared=bool(bound.get("enable_gqa")))
    if stacks is None or min(map(len, (query, key, value))) < 2:  # noqa: PLR2004 - a matrix
        return None
    left, middle, right = stacks[0]
    stack = stacks[1]
    rows = dim_of(query[-2], "q^" if bound.get("is_causal") else "q")
    keys, inner = dim_of(key[-2], "s^"), dim_of(query[-1], "e^")
    width = dim_of(value[-1], "v")
    inputs = {
        "query": [*left, rows, inner],
        "key": [*middle, keys, inner],
        "value": [*right, keys, width],
    }
    mask = bound.shape("attn_mask")
    if mask is not None:
        if len(mask) > len(stack) + 2:
            return None
        inputs["attn_mask"] = name_dims(mask, [*stack, rows, keys])
    return RuleClaim(inputs, ([*stack, rows, width],))


def _stacks(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *, shared: bool
) -> tuple[list[list[str]], list[str]] | None:
    """The dimensions before the matrices: of queries, keys and values, and of the result.

    Args:
        shared: neighbouring heads of queries share a head of keys, and are split with it.
    """
    if not shared:
        return broadcast((query, key, value))
    if not query or not key or key != value or query[:-1] != key[:-1] or query[-1] % key[-1]:
        return None
    front = name_dims(query[:-1], letters(len(query) - 1))
    share = query[-1] // key[-1]
    heads = "h" if share == 1 or key[-1] == 1 else f"(h {share})"
    inside = [*front, dim_of(key[-1], "h")]
    outside = [*front, dim_of(query[-1], heads)]
    return [outside, inside, inside], outside


# --- Convolutions: samples, channels and groups of channels can be split, space cannot ------------

_SPACE = ("t", "h", "w")


def _convolve(bound: Bound, *, transposed: bool) -> RuleClaim | None:
    """The channels of a group depend only on the channels of the same group.

    So groups are split as a whole, and their number is divided. The channels within a group are
    not split, because those of the result are not contiguous.
    """
    shape, weight, groups = bound.shape(), bound.shape("weight"), bound.get("groups", 1)
    if shape is None or weight is None:
        return None
    space = _SPACE[len(_SPACE) - (len(weight) - 2) :]
    samples = [] if len(shape) == len(weight) - 1 else [dim_of(shape[0], "b")]
    if len(shape) != len(samples) + 1 + len(space):
        return None
    if groups == 1:
        taken, output_channels = (weight[0], weight[1]) if transposed else (weight[1], weight[0])
        inside, outside = dim_of(taken, f"c{SUM}"), dim_of(output_channels, "o")
        kernel = (inside, outside) if transposed else (outside, inside)
    else:
        inside, outside = "(g c^)", "(g o^)"
        kernel = (inside, "o^") if transposed else (outside, "c^")
    inputs = {
        "x": [*samples, inside, *(f"{s}^" for s in space)],
        "weight": [*kernel, *(f"k{s}^" for s in space)],
    }
    if bound.has("bias"):
        inputs["bias"] = [*once([outside], inside)]
    numbers = () if groups == 1 else (("groups", None, "g"),)
    return RuleClaim(inputs, ([*samples, outside, *(f"{s}o^" for s in space)],), numbers)


@rule("conv1d conv2d conv3d")
def _convolution(bound: Bound) -> RuleClaim | None:
    return _convolve(bound, transposed=False)


@rule("conv_transpose1d conv_transpose2d conv_transpose3d")
def _convolve_transposed(bound: Bound) -> RuleClaim | None:
    return _convolve(bound, transposed=True)


@rule("convolution")
def _general(bound: Bound) -> RuleClaim | None:
    return _convolve(bound, transposed=bool(bound.get("transposed")))


# --- Pooling, resampling and windows: space is split where windows do not overlap -----------------


def _front(shape: tuple[int, ...] | None, spatial: int) -> list[str] | None:
    """The dimensions before space: samples, if there are any, and channels."""
    names = {1: ["c"], 2: ["b", "c"]}.get(len(shape or ()) - spatial)
    return None if shape is None or names is None else name_dims(shape[: len(names)], names)


def _pool(bound: Bound, spatial: int) -> RuleClaim | None:
    """Windows of a fixed size; without overlap and padding, space can be split.

    Indices are counted within the plane, so space cannot be split if they are returned.
    """
    shape, indices = bound.shape(), bool(bound.get("return_indices"))
    front = _front(shape, spatial)
    if shape is None or front is None:
        return None
    inside, outside = ["_"] * spatial, ["_"] * spatial
    if not indices:
        kernel = setting_of_each(bound.get("kernel_size"), spatial)
        stride = setting_of_each(bound.get("stride"), spatial, kernel)
        padding = setting_of_each(bound.get("padding"), spatial, 0)
        dilation = setting_of_each(bound.get("dilation"), spatial, 1)
        space = zip(kernel, stride, padding, dilation, strict=True)
        for i, (name, settings) in enumerate(zip(_SPACE[-spatial:], space, strict=True)):
            width = settings[0]
            if settings == (width, width, 0, 1) and shape[len(front) + i] % width == 0:
                outside[i] = name
                inside[i] = name if width == 1 else f"({name} {width})"
    result = [*front, *outside]
    return unary([*front, *inside], *[result] * (1 + indices))


for _spatial in (1, 2, 3):
    _pools = (f"{kind}_pool{_spatial}d" for kind in ("max", "avg", "lp"))
    rule(*_pools)(functools.partial(_pool, spatial=_spatial))


@rule("interpolate")
def _interpolate(bound: Bound) -> RuleClaim | None:
    """Space can be split if pixels are copied; other modes need the neighbours."""
    shape = bound.shape()
    if shape is None or not 3 <= len(shape) <= 5:  # noqa: PLR2004 - one to three dimensions of space
        return None
    spatial = len(shape) - 2
    front = _front(shape, spatial) or []
    inside, outside = ["_"] * spatial, ["_"] * spatial
    scale = setting_of_each(bound.get("scale_factor"), spatial)
    if bound.get("mode", "nearest") == "nearest" and bound.get("size") is None:
        for i, (name, factor) in enumerate(zip(_SPACE[-spatial:], scale, strict=True)):
            if factor == int(factor) and factor >= 1 and shape[2 + i] > 1:
                inside[i] = name
                outside[i] = name if factor == 1 else f"({name} {int(factor)})"
    return unary([*front, *inside], [*front, *outside])


@rule("grid_sample")
def _grid_sample(bound: Bound) -> RuleClaim | None:
    """Each point of the grid is looked up in the whole picture."""
    shape, grid = bound.shape(), bound.shape("grid")
    if shape is None or grid is None or len(shape) != len(grid):
        return None
    spatial = len(shape) - 2
    front = _front(shape, spatial) or []
    points = name_dims(grid[1:-1], _SPACE[-spatial:])
    inputs = {"x": [*front, *["_"] * spatial], "grid": [front[0], *points, str(spatial)]}
    return RuleClaim(inputs, ([*front, *points],))


@rule("functional.unfold")
def _windows(bound: Bound) -> RuleClaim | None:
    """One column for each window; the elements of a channel are contiguous in it."""
    front = _front(bound.shape(), 2)
    if front is None:
        return None
    size = _window_size(bound)
    channels = str(size) if front[-1] == "1" else f"({front[-1]} {size})"
    return unary([*front, "_", "_"], [*front[:-1], channels, "_"])


@rule("fold")
def _fold(bound: Bound) -> RuleClaim | None:
    shape = bound.shape()
    front = _front(shape, 1)
    if front is None or shape is None:
        return None
    size = _window_size(bound)
    single = shape[-2] == size
    channels = str(size) if single else f"(c {size})"
    outside = [*front[:-1], "1" if single else "c", "_", "_"]
    return unary([*front[:-1], channels, "_"], outside)


def _window_size(bound: Bound) -> int:
    """The number of elements of a window."""
    first, second = setting_of_each(bound.get("kernel_size"), 2)
    return int(first) * int(second)
