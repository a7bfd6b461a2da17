"""Which ways of putting the ranks' results together give the whole."""

from __future__ import annotations

import torch

from paritas.partition.recipes import Combine, Concat, Reduce, Reduction, Same

__all__ = ["agree", "combined", "could_be_part", "is_telling", "ways"]

# In float64, rounding is near 1e-15 of the largest value; what is wrong is many orders above it.
CLOSE_F64 = 1e-9
# In a narrower dtype, so many units of its last place; what does not fit is not claimed.
CLOSE_UNITS = 64


def closeness(dtype: torch.dtype) -> float:
    """How near values are that differ by rounding, relative to the largest of them."""
    if dtype in (torch.float64, torch.complex128):
        return CLOSE_F64
    return CLOSE_UNITS * torch.finfo(dtype).eps


def agree(found: torch.Tensor, truth: torch.Tensor, floor: float = 0.0) -> bool:
    """Whether two tensors are the same but for rounding; NaN and infinities by their places.

    Args:
        floor: an absolute difference that is rounding in any case.
    """
    if found.shape != truth.shape or found.dtype != truth.dtype:
        return False
    if not (truth.is_floating_point() or truth.is_complex()):
        return torch.equal(found, truth)
    size = truth.abs().max().item() if truth.numel() else 0.0
    if not size < float("inf"):  # NaN, too
        finite = truth[truth.isfinite()]
        size = finite.abs().max().item() if finite.numel() else 0.0
    near = closeness(truth.dtype) * size + floor
    return torch.allclose(found, truth, rtol=0.0, atol=near, equal_nan=True)


def is_telling(whole: torch.Tensor) -> bool:
    """Whether there is anything to compare: an empty result, or all NaN, agrees with anything."""
    if whole.numel() == 0:
        return False
    exact = not (whole.is_floating_point() or whole.is_complex())
    return exact or bool(whole.isfinite().any())


def is_constant(whole: torch.Tensor) -> bool:
    """Whether all its values are the same, so that their order says nothing."""
    return whole.numel() > 1 and bool((whole == whole.flatten()[0]).all())


def could_be_part(first: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether the first rank's result can be part of the whole: most wrong cuts end here."""
    if first.dtype != whole.dtype or first.dim() != whole.dim():
        return False
    dim = _short_dim(first, whole)
    if dim is None:
        return first.shape == whole.shape
    return agree(first, whole.narrow(dim, 0, first.shape[dim]))


def ways(parts: list[torch.Tensor], whole: torch.Tensor) -> list[Combine]:
    """Every way that gives the whole, the most plausible first."""
    dim = _short_dim(parts[0], whole)
    if dim is not None:
        return [way for way in [Concat(dim)] if _holds(way, parts, whole)]
    if any(part.shape != whole.shape or part.dtype != whole.dtype for part in parts):
        return []
    found: list[Combine] = [Same()] if all(agree(part, whole) for part in parts) else []
    return found + [way for way in _reductions(whole) if _holds(way, parts, whole)]


def combined(way: Combine, parts: list[torch.Tensor]) -> torch.Tensor:
    """The ranks' results put together, differentiably.

    Of results that are all the same, each rank's has an equal share in the gradient.
    """
    if isinstance(way, Concat):
        return torch.cat(parts, way.dim)
    stacked = torch.stack(parts)
    if isinstance(way, Same):
        return stacked.mean(0)
    match way.reduction:
        case "sum":
            return stacked.sum(0, dtype=stacked.dtype)
        case "avg":
            return stacked.mean(0)
        case "max":
            return stacked.amax(0)
        case "min":
            return stacked.amin(0)
        case "product":
            return stacked.prod(0, dtype=stacked.dtype)


def _holds(way: Combine, parts: list[torch.Tensor], whole: torch.Tensor) -> bool:
    try:
        return agree(combined(way, parts), whole)
    except (RuntimeError, TypeError):  # parts that do not fit, or a dtype that cannot be reduced
        return False


def _reductions(whole: torch.Tensor) -> list[Combine]:
    kinds: tuple[Reduction, ...] = ("sum", "max", "min", "product")
    if whole.dtype is torch.bool:
        kinds = ("max", "min")
    elif whole.is_complex():
        kinds = ("sum", "avg", "product")
    elif whole.is_floating_point():
        kinds = ("sum", "avg", "max", "min", "product")
    return [Reduce(kind) for kind in kinds]


def _short_dim(first: torch.Tensor, whole: torch.Tensor) -> int | None:
    """The one dimension along which a part is shorter than the whole."""
    if first.dim() != whole.dim():
        return None
    pairs = list(zip(first.shape, whole.shape, strict=True))
    shorter = [dim for dim, (mine, all_of_it) in enumerate(pairs) if mine != all_of_it]
    if len(shorter) != 1 or pairs[shorter[0]][0] > pairs[shorter[0]][1]:
        return None
    return shorter[0]
