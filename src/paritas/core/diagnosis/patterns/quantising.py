"""Tensors in few bits: whole numbers or narrow floats, with a scale for all or for slices."""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.case import roundoff
from paritas.core.diagnosis.formats import FORMATS
from paritas.core.diagnosis.patterns.steps import first_of, with_altered
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.numerics.bits import dtype_name
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.formats import NarrowFormat

    Round = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]
    from collections.abc import Callable

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

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
    return form.round_to_nearest(level) * scale


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


# --- Values between the operators of a call, in a narrower format ---------------------------------


# The fewest different values that are rounded: one constant may be another for any reason.
_FEWEST_ROUNDED = 4


def _narrower_formats(step: Step) -> Iterator[NarrowFormat]:
    units = [
        roundoff(value)
        for value in step.values.values()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    yield from (form for form in FORMATS if units and all(form.unit > unit for unit in units))


def rounding_variations(step: Step) -> Iterator[Variation]:
    """The result of one of several operators in a narrower format."""
    for form in _narrower_formats(step):
        sentence = f"the result is rounded to {form.name}"
        yield Variation(PatternKind.PRECISION, sentence, partial(_round_to_format, form=form))


_PRODUCTS = frozenset({"linear", "addmm", "baddbmm", "convolution"})


def computed_variations(step: Step) -> Iterator[Variation]:
    """A product that is computed in a narrower format, before something else is done with it."""
    if step.name not in _PRODUCTS:
        return
    for dtype in (torch.bfloat16, torch.float16):
        sentence = f"computed in {dtype_name(dtype)}"
        yield Variation(PatternKind.PRECISION, sentence, partial(_compute_in_dtype, dtype=dtype))


def _compute_in_dtype(step: Step, dtype: torch.dtype) -> Any:
    result = step.run()
    narrow = {
        name: value.to(dtype)
        for name, value in step.values.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    return step.run(**narrow).to(result)


def _round_to_format(step: Step, form: NarrowFormat) -> Any:
    value = _round_several(first_of(step.run()), form.round_to_nearest)
    value = torch.where(value.abs() > form.largest, torch.copysign(value + torch.inf, value), value)
    return step.with_first(value)


def _round_several(value: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    narrow = rounded(value)
    if len(value[narrow != value].unique()) < _FEWEST_ROUNDED:
        raise ValueError("too few values are rounded")
    return narrow


def saved_variations(step: Step) -> Iterator[Variation]:
    """A tensor that a backward kernel got from the forward pass, kept with fewer bits."""
    if "backward" not in step.name:
        return
    for name, value in step.values.items():
        is_saved = isinstance(value, torch.Tensor) and value.is_floating_point()
        if not is_saved or value.numel() < _FEWEST_ROUNDED:
            continue
        for form in _narrower_formats(step):
            sentence = f"{name} is rounded to {form.name}"
            change = with_altered(name, partial(_round_several, rounded=form.round_to_nearest))
            yield Variation(PatternKind.PRECISION, sentence, change)
        for words, rounded in quantisations([value]):
            change = with_altered(name, partial(_round_several, rounded=rounded))
            yield Variation(PatternKind.PRECISION, f"{name} is rounded to {words}", change)


def reciprocal_variations(step: Step) -> Iterator[Variation]:
    """A division as a product with a reciprocal in a narrower format."""
    if step.name != "div" or step.values.get("rounding_mode") is not None:
        return
    for form in _narrower_formats(step):
        sentence = f"the reciprocal of other is rounded to {form.name}"
        yield Variation(PatternKind.PRECISION, sentence, partial(_by_reciprocal, form=form))


def _by_reciprocal(step: Step, form: NarrowFormat) -> Any:
    x, other = step.values["self"], step.values["other"]
    reciprocal = 1 / torch.as_tensor(other, dtype=x.dtype, device=x.device)
    return x * _round_several(reciprocal, form.round_to_nearest)
