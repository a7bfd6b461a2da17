"""Pooling, resampling and windows: samples and channels apart, space where it falls apart."""

from __future__ import annotations

from typing import Any

from paritas.partition.library.claims import Bound, Claim
from paritas.partition.library.registry import functional, rule

_SPACE = ("t", "h", "w")


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
) -> Claim | None:
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
    return Claim({"x": " ".join([*front, *inside])}, (text, text) if indices else (text,))


_MAX = "x kernel_size stride padding dilation ceil_mode return_indices"
_AVG = "x kernel_size stride padding ceil_mode count_include_pad divisor_override"


def _rules_of(spatial: int) -> None:
    """The pooling operators for so many dimensions of space."""
    end = f"{spatial}d"

    def maximum(bound: Bound) -> Claim | None:
        indices = bool(bound.get("return_indices"))
        return _pooled(bound, spatial, windows=True, indices=indices)

    def average(bound: Bound) -> Claim | None:
        return _pooled(bound, spatial, windows=True)

    def adaptive(bound: Bound) -> Claim | None:
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
def _with_indices(bound: Bound) -> Claim | None:
    return _pooled(bound, 2, indices=True)


@rule(
    "x size scale_factor mode align_corners recompute_scale_factor antialias",
    functional("interpolate"),
)
def _interpolate(bound: Bound) -> Claim | None:
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
    return Claim({"x": " ".join([*front, *inside])}, (" ".join([*front, *outside]),))


@rule("x grid mode padding_mode align_corners", functional("grid_sample"))
def _grid_sample(bound: Bound) -> Claim | None:
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
    return Claim(inputs, (" ".join([*front, *places]),))


@rule("x kernel_size dilation padding stride", functional("unfold"))
def _windows(bound: Bound) -> Claim | None:
    """A column for each window; the elements of a channel lie together in it."""
    shape = bound.shape("x")
    front = _front(shape, 2) if shape else None
    if front is None:
        return None
    rows = _rows(bound)
    channels = str(rows) if front[-1] == "1" else f"({front[-1]} {rows})"
    inputs = {"x": " ".join([*front, "_", "_"])}
    return Claim(inputs, (" ".join([*front[:-1], channels, "_"]),))


@rule("x output_size kernel_size dilation padding stride", functional("fold"))
def _unwindowed(bound: Bound) -> Claim | None:
    shape = bound.shape("x")
    front = _front(shape, 1) if shape else None
    if front is None or shape is None:
        return None
    rows = _rows(bound)
    single = shape[-2] == rows
    channels = str(rows) if single else f"(c {rows})"
    outside = [*front[:-1], "1" if single else "c", "_", "_"]
    return Claim({"x": " ".join([*front[:-1], channels, "_"])}, (" ".join(outside),))


def _rows(bound: Bound) -> int:
    """How many elements a window has."""
    first, second = _each(bound.get("kernel_size"), 2)
    return int(first) * int(second)
