"""From the layout of a tensor on Ascend's device to the program's."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

from paritas.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from paritas.formats.foreign.ge_files import GeTensor


# Devices split dimensions into blocks and pad the last one: NC1HWC0 has channels in blocks of C0,
# FRACTAL_NZ matrices in small tiles. Four steps, planned from the shapes alone, undo a layout: view
# the bytes as blocks, reorder the blocks, merge each with its dimension, drop the padding. A plan
# that contradicts the shapes is refused.

FORMATS = {
    0: "NCHW",
    1: "NHWC",
    2: "ND",
    3: "NC1HWC0",
    4: "FRACTAL_Z",
    16: "HWCN",
    27: "NDHWC",
    29: "FRACTAL_NZ",
    30: "NCDHW",
    32: "NDC1HWC0",
    33: "FRACTAL_Z_3D",
}
_AXES = {
    "NCHW": ("N", "C", "H", "W"),
    "NHWC": ("N", "H", "W", "C"),
    "HWCN": ("H", "W", "C", "N"),
    "NCDHW": ("N", "C", "D", "H", "W"),
    "NDHWC": ("N", "D", "H", "W", "C"),
    "NC1HWC0": ("N", "C1", "H", "W", "C0"),
    "NDC1HWC0": ("N", "D", "C1", "H", "W", "C0"),
    "FRACTAL_Z": ("C1", "H", "W", "N1", "N0", "C0"),
    "FRACTAL_Z_3D": ("D", "C1", "H", "W", "N1", "N0", "C0"),
}
_WEIGHTS = {"FRACTAL_Z", "FRACTAL_Z_3D"}
# The layouts of torch programs; the others are tried where the shapes suggest them.
_PROGRAM_LAYOUTS = {4: ("NCHW", "NHWC", "HWCN"), 5: ("NCDHW", "NDHWC")}
# Tiled layouts have four dimensions.
_TILE_DIMS = 4
_MOST_ELEMENTS = 2**62


def plan_layout(tensor: GeTensor, count: int) -> DeviceLayout:
    """Plan how to undo the layout of a tensor whose bytes can hold `count` elements."""
    shape, original = tensor.shape, tensor.original_shape
    if not shape and not original:
        # Nothing is known; a single element has an empty shape.
        return _plan_unchanged(() if count == 1 else (count,))
    if not shape or not original:
        shape = original = shape or original
    if (
        max(_multiply_sizes(shape), _multiply_sizes(original)) > _MOST_ELEMENTS
        or math.prod(shape) > count
    ):
        raise UsageError(
            f"{tensor.key} has shape {shape}, which is {math.prod(shape)} elements, but its "
            f"{tensor.nbytes} bytes hold only {count}"
        )
    name = FORMATS.get(tensor.format & 0xFF, "")
    if not tensor.original_shape or not tensor.shape:
        return _plan_unchanged(shape)
    if name == "FRACTAL_NZ":
        layout = _plan_tiles(shape, original)
    elif name in _AXES and (name in _WEIGHTS or len(shape) == len(_AXES[name])):
        layout = _plan_by_axes(name, tensor, shape, original)
    else:
        layout = _plan_plain(shape, original, is_known=name != "")
    if layout is None:
        label = name or f"number {tensor.format}"
        raise UsageError(
            f"{tensor.key} has shape {shape} in layout {label}, which does not match the shape "
            f"{original} of the program"
        )
    return layout


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceLayout:
    """How to convert the elements of a device to those of the program.

    Attributes:
        blocks: the shape in which the elements are stored.
        order: the permutation of the blocks for the program.
        merged: the shape after each block is merged with its dimension.
        kept: the extent of each dimension without padding.
        shape: of the result.
    """

    blocks: tuple[int, ...]
    order: tuple[int, ...]
    merged: tuple[int, ...]
    kept: tuple[int, ...]
    shape: tuple[int, ...]

    def undo(self, elements: Tensor) -> Tensor:
        """The tensor of the program, from the elements in the file."""
        blocks = elements.reshape(self.blocks).permute(self.order).reshape(self.merged)
        return blocks[tuple(slice(extent) for extent in self.kept)].reshape(self.shape)


def _multiply_sizes(shape: tuple[int, ...]) -> int:
    """The number that torch computes for strides, also for an empty tensor."""
    return math.prod(max(size, 1) for size in shape)


def _plan_unchanged(shape: tuple[int, ...]) -> DeviceLayout:
    return DeviceLayout(shape, tuple(range(len(shape))), shape, shape, shape)


def _plan_plain(
    shape: tuple[int, ...], original: tuple[int, ...], *, is_known: bool
) -> DeviceLayout | None:
    """The same order of elements, possibly with padding at the ends."""
    if shape == original:
        return _plan_unchanged(shape)
    if not is_known:
        return None
    order = tuple(range(len(shape)))
    if math.prod(shape) == math.prod(original):
        return DeviceLayout(shape, order, shape, shape, original)
    fits = len(shape) == len(original)
    if fits and all(size <= extent for size, extent in zip(original, shape, strict=True)):
        return DeviceLayout(shape, order, shape, original, original)
    return None


def _plan_tiles(shape: tuple[int, ...], original: tuple[int, ...]) -> DeviceLayout | None:
    """FRACTAL_NZ: a matrix in tiles, column of tiles by column of tiles.

    The device has (..., columns of tiles, rows of tiles, rows of a tile, columns of a tile).
    """
    if len(shape) < _TILE_DIMS or not original:
        return None
    c1, n1, n0, c0 = shape[-_TILE_DIMS:]
    # A vector is one row.
    rows, columns = original[-2] if len(original) > 1 else 1, original[-1]
    many = math.prod(original[:-2])
    fits = math.prod(shape[:-_TILE_DIMS]) == many and _count_blocks(rows, n0) == n1
    if not fits or _count_blocks(columns, c0) != c1:
        return None
    return DeviceLayout(
        blocks=(many, c1, n1, n0, c0),
        order=(0, 2, 3, 1, 4),
        merged=(many, n1 * n0, c1 * c0),
        kept=(many, rows, columns),
        shape=original,
    )


def _plan_by_axes(
    name: str, tensor: GeTensor, shape: tuple[int, ...], original: tuple[int, ...]
) -> DeviceLayout | None:
    """Layouts with named dimensions: the first program layout that matches the shapes."""
    groups = max(tensor.sub_format, tensor.format >> 8)
    if name in _WEIGHTS and groups > 1:
        raise UsageError(
            f"{tensor.key} has layout {name} with {groups} groups, which is not supported: dump "
            f"the operator's output, or convert it with the vendor's tool"
        )
    for target in _list_targets(name, len(original), tensor.original_format):
        expected = dict(zip(target, original, strict=True))
        extents = _find_extents(name, shape, expected)
        if extents is not None and _fits_blocks(extents, expected):
            return _plan_reordered(_AXES[name], extents, target, expected)
    if math.prod(shape) == math.prod(original) and not {"C1", "N1"} & set(_AXES[name]):
        return _plan_plain(shape, original, is_known=name in ("NCHW", "NCDHW"))
    return None


def _list_targets(name: str, rank: int, original_format: int | None) -> Iterator[tuple[str, ...]]:
    """The program's layouts of that rank, likely ones first."""
    likely = FORMATS.get(original_format if original_format is not None else -1, "")
    full = 5 if "D" in _AXES[name] else 4
    layouts = _PROGRAM_LAYOUTS[full]
    for layout in sorted(layouts, key=lambda possible: possible != likely):
        # Fewer dimensions: some of extent 1 were dropped.
        yield from itertools.combinations(_AXES[layout], rank)


def _find_extents(
    name: str, shape: tuple[int, ...], expected: Mapping[str, int]
) -> dict[str, int] | None:
    """The device's extents by axis; the first dimension of weights combines several axes."""
    axes = _AXES[name]
    if name not in _WEIGHTS:
        return dict(zip(axes, shape, strict=True))
    if len(shape) != _TILE_DIMS or len(expected) != len(axes) - 2:
        return None
    first = axes[:-3]
    extents = dict(zip(axes[-3:], shape[1:], strict=True))
    extents |= {axis: expected[axis] for axis in first if axis != "C1"}
    extents["C1"] = _count_blocks(expected["C"], extents["C0"])
    is_whole = math.prod(extents[axis] for axis in first) == shape[0]
    return {axis: extents[axis] for axis in axes} if is_whole else None


def _fits_blocks(extents: Mapping[str, int], expected: Mapping[str, int]) -> bool:
    for axis in {name[0] for name in extents}:
        extent = expected.get(axis, 1)
        if axis in extents:
            if extents[axis] != extent:
                return False
        elif _count_blocks(extent, extents[f"{axis}0"]) != extents[f"{axis}1"]:
            return False
    return True


def _plan_reordered(
    axes: tuple[str, ...],
    extents: Mapping[str, int],
    target: tuple[str, ...],
    expected: Mapping[str, int],
) -> DeviceLayout:
    letters = [*target, *({name[0] for name in axes} - set(target))]
    parts = [[axis for axis in (name, f"{name}1", f"{name}0") if axis in axes] for name in letters]
    return DeviceLayout(
        blocks=tuple(extents[axis] for axis in axes),
        order=tuple(axes.index(axis) for part in parts for axis in part),
        merged=tuple(math.prod(extents[axis] for axis in part) for part in parts),
        kept=tuple(expected.get(name, 1) for name in letters),
        shape=tuple(expected.values()),
    )


def _count_blocks(extent: int, block: int) -> int:
    """How many blocks an extent needs; -1 if a block is empty."""
    return -(-extent // block) if block else -1
