"""Tensors in few bits: whole numbers or narrow floats, with a scale for all or for slices."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.formats import NarrowFormat

    Round = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]

# The sizes of groups of a row, of which each has a scale.
_GROUPS = (8, 16, 32, 64, 128)
# The largest of so few values is most of them, so a scale of their own is a factor.
_FEWEST = 4


def quantisations(tensors: Sequence[Tensor]) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """What a tensor may be rounded to, in words, and how.

    Args:
        tensors: the tensors that may be rounded.
    """
    extents: dict[str, Callable[[Tensor], tuple[Tensor, tuple[int, ...]]]] = {"tensor": _whole}
    rank = max((tensor.dim() for tensor in tensors), default=0)
    if rank > 1:
        extents["row"] = functools.partial(_along, axis=-1)
        extents["column"] = functools.partial(_along, axis=-2)
        extents["slice along axis 0"] = functools.partial(_all_but, axis=0)
        extents["slice along axis 1"] = functools.partial(_all_but, axis=1)
    if rank > 2:  # noqa: PLR2004
        extents["slice along axes 0 and 1"] = _channels
    for group in _GROUPS:
        if any(tensor.dim() and tensor.shape[-1] > group for tensor in tensors):
            extents[f"{group} elements"] = functools.partial(_group_last_axis, group=group)
    for kind, quantise in _KINDS.items():
        for words, extent in extents.items():
            change = functools.partial(_quantise_value, extent=extent, quantise=quantise)
            yield f"{kind} with a scale per {words}", change


def _quantise_value(
    value: Tensor,
    extent: Callable[[Tensor], tuple[Tensor, tuple[int, ...]]],
    quantise: Callable[[Tensor, tuple[int, ...]], Tensor],
) -> Tensor:
    try:
        viewed, dims = extent(value)
    except (RuntimeError, IndexError):
        return value  # it has no such slices
    if math.prod(viewed.shape[dim] for dim in dims) < _FEWEST:
        return value
    return quantise(viewed, dims).reshape(value.shape)


# --- Which values share a scale -------------------------------------------------------------------


def _whole(value: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    return value, tuple(range(value.dim()))


def _along(value: Tensor, axis: int) -> tuple[Tensor, tuple[int, ...]]:
    return value, (range(value.dim())[axis],)


def _all_but(value: Tensor, axis: int) -> tuple[Tensor, tuple[int, ...]]:
    axis_index = range(value.dim())[axis]
    return value, tuple(dim for dim in range(value.dim()) if dim != axis_index)


def _channels(value: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Of each sample by itself."""
    if value.dim() <= 2:  # noqa: PLR2004
        raise IndexError("no channels")
    return value, tuple(range(2, value.dim()))


def _group_last_axis(value: Tensor, group: int) -> tuple[Tensor, tuple[int, ...]]:
    if not value.dim() or value.shape[-1] % group:
        raise IndexError("no such groups")
    viewed = value.unflatten(-1, (-1, group))
    return viewed, (viewed.dim() - 1,)


# --- How they are rounded -------------------------------------------------------------------------


def _scale_to_levels(value: Tensor, dims: tuple[int, ...], most: float) -> tuple[Tensor, Tensor]:
    scale = value.abs().amax(dims, keepdim=True) / most
    scale = torch.where(scale > 0, scale, 1.0)
    return value / scale, scale


def _symmetric(value: Tensor, dims: tuple[int, ...], most: float) -> Tensor:
    level, scale = _scale_to_levels(value, dims, most)
    return level.round() * scale


def _cut(value: Tensor, dims: tuple[int, ...], most: float) -> Tensor:
    """By a cast, which does not round to the nearest level."""
    level, scale = _scale_to_levels(value, dims, most)
    return level.trunc() * scale


def _one_more_below(value: Tensor, dims: tuple[int, ...], most: float) -> Tensor:
    """There is a negative level without a positive one."""
    level, scale = _scale_to_levels(value, dims, most)
    return level.round().clamp(-most, most - 1) * scale


def _with_zero_point(value: Tensor, dims: tuple[int, ...], most: float) -> Tensor:
    # Zero is one of the levels, as everywhere: padding must not change.
    least = value.amin(dims, keepdim=True).clamp(max=0)
    largest = value.amax(dims, keepdim=True).clamp(min=0)
    scale = (largest - least) / most
    scale = torch.where(scale > 0, scale, 1.0)
    zero = (-least / scale).round()
    return ((value / scale + zero).round().clamp(0, most) - zero) * scale


def _float(value: Tensor, dims: tuple[int, ...], form: NarrowFormat) -> Tensor:
    level, scale = _scale_to_levels(value, dims, form.largest)
    return form.rounded(level) * scale


_KINDS: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "int8": functools.partial(_symmetric, most=127.0),
    "int8 of 128 levels": functools.partial(_symmetric, most=128.0),
    "int8 clipped at 127": functools.partial(_one_more_below, most=128.0),
    "uint8 with a zero point": functools.partial(_with_zero_point, most=255.0),
    "int4": functools.partial(_symmetric, most=7.0),
    "int4 clipped at 7": functools.partial(_one_more_below, most=8.0),
    "uint4 with a zero point": functools.partial(_with_zero_point, most=15.0),
    "int8, cut towards zero,": functools.partial(_cut, most=127.0),
    "int4, cut towards zero,": functools.partial(_cut, most=7.0),
    "3 bits": functools.partial(_symmetric, most=3.0),
    **{
        form.name: functools.partial(_float, form=form)
        for form in FORMATS
        if form.name.startswith("float8")
    },
}
