"""From the layout in which a device keeps a tensor to the one that the program means.

Devices cut dimensions into blocks and pad the last one: NC1HWC0 has channels in blocks of C0,
FRACTAL_NZ matrices in small tiles. A layout is undone by four steps, which are planned from the
shapes alone: look at the bytes as blocks, bring the blocks in order, merge each with its dimension,
drop the padding. A plan that the shapes do not bear out is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from paritas.dumps.foreign.ge_headers import GeTensor

__all__ = ["FORMATS", "Layout", "plan_layout"]

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
# Programs of torch have these; the others are tried where the shapes speak for them.
_PROGRAM_LAYOUTS = {4: ("NCHW", "NHWC", "HWCN"), 5: ("NCDHW", "NDHWC")}
# More combinations are no layout of anything.
_TILE_DIMS = 4
_MOST_ELEMENTS = 2**62


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How to get from the elements of a device to those of the program.

    Attributes:
        blocks: the shape in which the elements lie.
        order: the blocks as the program wants them.
        merged: the shape once each block is merged with its dimension.
        kept: of each dimension, how much is no padding.
        shape: of the result.
    """

    blocks: tuple[int, ...]
    order: tuple[int, ...]
    merged: tuple[int, ...]
    kept: tuple[int, ...]
    shape: tuple[int, ...]

    def undo(self, elements: Tensor) -> Tensor:
        """The tensor of the program, from the elements as they lie in the file."""
        blocks = elements.reshape(self.blocks).permute(self.order).reshape(self.merged)
        return blocks[tuple(slice(extent) for extent in self.kept)].reshape(self.shape)


def plan_layout(tensor: GeTensor, count: int) -> Layout:
    """Plan how to undo the layout of a tensor.

    Args:
        count: how many elements its bytes are enough for.

    Raises:
        UsageError: the shapes contradict each other or the layout is not known.
    """
    shape, original = tensor.shape, tensor.original_shape
    if not shape and not original:
        # Nothing is known of it, but a single element is what an empty shape means.
        return _as_it_is(() if count == 1 else (count,))
    if not shape or not original:
        shape = original = shape or original
    if max(_extent(shape), _extent(original)) > _MOST_ELEMENTS or math.prod(shape) > count:
        raise UsageError(
            f"{tensor.key} has shape {shape}, which is {math.prod(shape)} elements, and its "
            f"{tensor.nbytes} bytes are enough for {count}"
        )
    name = FORMATS.get(tensor.format & 0xFF, "")
    if not tensor.original_shape or not tensor.shape:
        return _as_it_is(shape)
    if name == "FRACTAL_NZ":
        found = _tiles(shape, original)
    elif name in _AXES and (name in _WEIGHTS or len(shape) == len(_AXES[name])):
        found = _by_axes(name, tensor, shape, original)
    else:
        found = _plainly(shape, original, is_known=name != "")
    if found is None:
        label = name or f"number {tensor.format}"
        raise UsageError(
            f"{tensor.key} has shape {shape} in layout {label}, which does not make the shape "
            f"{original} of the program"
        )
    return found


def _extent(shape: tuple[int, ...]) -> int:
    """What torch multiplies on its way to a stride, also where there is nothing to stride over."""
    return math.prod(max(size, 1) for size in shape)


def _as_it_is(shape: tuple[int, ...]) -> Layout:
    return Layout(shape, tuple(range(len(shape))), shape, shape, shape)


def _plainly(shape: tuple[int, ...], original: tuple[int, ...], *, is_known: bool) -> Layout | None:
    """The same order of elements, perhaps with padding at the ends."""
    if shape == original:
        return _as_it_is(shape)
    if not is_known:
        return None
    order = tuple(range(len(shape)))
    if math.prod(shape) == math.prod(original):
        return Layout(shape, order, shape, shape, original)
    fits = len(shape) == len(original)
    if fits and all(kept <= extent for kept, extent in zip(original, shape, strict=True)):
        return Layout(shape, order, shape, original, original)
    return None


def _tiles(shape: tuple[int, ...], original: tuple[int, ...]) -> Layout | None:
    """FRACTAL_NZ: a matrix in tiles, tile by tile down its columns.

    The device has (..., columns of tiles, rows of tiles, rows of a tile, columns of a tile).
    """
    if len(shape) < _TILE_DIMS or not original:
        return None
    c1, n1, n0, c0 = shape[-_TILE_DIMS:]
    # A vector is one row.
    rows, columns = original[-2] if len(original) > 1 else 1, original[-1]
    many = math.prod(original[:-2])
    fits = math.prod(shape[:-_TILE_DIMS]) == many and _blocks(rows, n0) == n1
    if not fits or _blocks(columns, c0) != c1:
        return None
    return Layout(
        blocks=(many, c1, n1, n0, c0),
        order=(0, 2, 3, 1, 4),
        merged=(many, n1 * n0, c1 * c0),
        kept=(many, rows, columns),
        shape=original,
    )


def _by_axes(
    name: str, tensor: GeTensor, shape: tuple[int, ...], original: tuple[int, ...]
) -> Layout | None:
    """Layouts whose dimensions have names: the first of the program's that the shapes bear out."""
    groups = max(tensor.sub_format, tensor.format >> 8)
    if name in _WEIGHTS and groups > 1:
        raise UsageError(
            f"{tensor.key} is in layout {name} with {groups} groups, which is not read: "
            f"dump the operator's output, or convert it with the vendor's tool"
        )
    for target in _targets(name, len(original), tensor.original_format):
        wanted = dict(zip(target, original, strict=True))
        extents = _extents(name, shape, wanted)
        if extents is not None and _fits(extents, wanted):
            return _reordered(_AXES[name], extents, target, wanted)
    if math.prod(shape) == math.prod(original) and not {"C1", "N1"} & set(_AXES[name]):
        return _plainly(shape, original, is_known=name in ("NCHW", "NCDHW"))
    return None


def _targets(name: str, rank: int, original_format: int | None) -> Iterator[tuple[str, ...]]:
    """The program's layouts of that rank, likely ones first."""
    told = FORMATS.get(original_format if original_format is not None else -1, "")
    full = 5 if "D" in _AXES[name] else 4
    layouts = _PROGRAM_LAYOUTS[full]
    for layout in sorted(layouts, key=lambda one: one != told):
        # What has fewer dimensions has lost some of extent 1.
        yield from itertools.combinations(_AXES[layout], rank)


def _extents(name: str, shape: tuple[int, ...], wanted: Mapping[str, int]) -> dict[str, int] | None:
    """The device's extents by axis; of weights the first dimension is several axes in one."""
    axes = _AXES[name]
    if name not in _WEIGHTS:
        return dict(zip(axes, shape, strict=True))
    if len(shape) != _TILE_DIMS or len(wanted) != len(axes) - 2:
        return None
    first = axes[:-3]
    extents = dict(zip(axes[-3:], shape[1:], strict=True))
    extents |= {axis: wanted[axis] for axis in first if axis != "C1"}
    extents["C1"] = _blocks(wanted["C"], extents["C0"])
    is_whole = math.prod(extents[axis] for axis in first) == shape[0]
    return {axis: extents[axis] for axis in axes} if is_whole else None


def _fits(extents: Mapping[str, int], wanted: Mapping[str, int]) -> bool:
    for axis in {name[0] for name in extents}:
        kept = wanted.get(axis, 1)
        if axis in extents:
            if extents[axis] != kept:
                return False
        elif _blocks(kept, extents[f"{axis}0"]) != extents[f"{axis}1"]:
            return False
    return True


def _reordered(
    axes: tuple[str, ...],
    extents: Mapping[str, int],
    target: tuple[str, ...],
    wanted: Mapping[str, int],
) -> Layout:
    letters = [*target, *({name[0] for name in axes} - set(target))]
    parts = [[axis for axis in (name, f"{name}1", f"{name}0") if axis in axes] for name in letters]
    return Layout(
        blocks=tuple(extents[axis] for axis in axes),
        order=tuple(axes.index(axis) for part in parts for axis in part),
        merged=tuple(math.prod(extents[axis] for axis in part) for part in parts),
        kept=tuple(wanted.get(name, 1) for name in letters),
        shape=tuple(wanted.values()),
    )


def _blocks(extent: int, block: int) -> int:
    """How many blocks hold so much; -1 where a block holds nothing."""
    return -(-extent // block) if block else -1
