"""Random arguments like those that were given: what holds of several draws is no accident.

A draw stays in the domain of what was given (positive, a probability, an index in range, unique
along a dimension), so that the operator can be run on it.
"""

from __future__ import annotations

import torch

from paritas.partition.recipes import Place

__all__ = ["SHADES", "lifted", "recounted", "redrawn", "reshuffled", "shaded", "varied"]

Tensors = dict[Place, torch.Tensor]
# Draws that tell reductions apart which agree on ordinary values: max and "the same on all ranks"
# of `any`, min and sum of a `relu` that is zero everywhere, anything of a threshold never reached.
SHADES = ("one", "all but one", "few", "all but few", "positive", "negative", "large", "special")

MOST_CLASSES = 3
FEW_VALUES_OF = 64


def lifted(tensors: Tensors) -> Tensors:
    """The same in float64, where rounding is far from what is wrong."""
    return {place: _lifted(tensor.detach()) for place, tensor in tensors.items()}


def varied(tensors: Tensors, generator: torch.Generator) -> Tensors:
    """What was given, but for values that are all the same, which would hide what they do.

    A bias of zeros may be added once or on every rank.
    """
    return {
        place: _redrawn(tensor, generator) if _is_constant(tensor) else tensor
        for place, tensor in tensors.items()
    }


def reshuffled(tensors: Tensors, generator: torch.Generator) -> Tensors:
    """The same values in another order."""
    return {place: _shuffled(tensor, generator) for place, tensor in tensors.items()}


def redrawn(tensors: Tensors, generator: torch.Generator) -> Tensors:
    """New values of the same kind."""
    return {place: _redrawn(tensor, generator) for place, tensor in tensors.items()}


def recounted(tensors: Tensors, generator: torch.Generator) -> Tensors:
    """The same with other counts of each class, index and truth value."""
    return {place: _recounted(tensor, generator) for place, tensor in tensors.items()}


def shaded(tensors: Tensors, shade: str, generator: torch.Generator) -> Tensors:
    """The same with many or few zeros in it, or with all values on one side of zero."""
    return {place: _shaded(tensor, shade, generator) for place, tensor in tensors.items()}


def _lifted(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def _is_constant(tensor: torch.Tensor) -> bool:
    # Not integers: an index that is always the same may be the only one that is in range.
    if not (tensor.is_floating_point() or tensor.dtype is torch.bool) or tensor.numel() == 0:
        return False
    return bool((tensor == tensor.flatten()[0]).all())


def _redrawn(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_complex():
        drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.complex128)
        return drawn.to(tensor)
    if not tensor.is_floating_point():
        if tensor.dtype is torch.bool and _is_constant(tensor):
            return (torch.rand(tensor.shape, generator=generator) < 0.5).to(tensor.device)  # noqa: PLR2004
        return _shuffled(tensor, generator)
    if _is_discrete(tensor):
        return _shuffled(tensor, generator)
    finite = tensor.isfinite()
    known = tensor if finite.all() else tensor[finite]
    if known.numel() == 0:
        return tensor
    drawn = _in_range(known, tensor.shape, generator).to(tensor)
    if known is tensor:
        return drawn
    masked = _shuffled(tensor, generator)  # a mask of -inf stays one, elsewhere
    return torch.where(masked.isfinite(), drawn, masked)


def _is_discrete(tensor: torch.Tensor) -> bool:
    """Whether it holds classes and no quantities: targets of -1 and 1, a mask of 0 and 1."""
    some = tensor.flatten()[:FEW_VALUES_OF].unique()
    if not 1 < len(some) <= MOST_CLASSES:
        return False
    return len(tensor.unique()) <= MOST_CLASSES


def _in_range(known: torch.Tensor, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    low, high = known.min().item(), known.max().item()
    if low >= 0 and 0 < high <= 1:
        return 0.05 + 0.9 * torch.rand(shape, generator=generator, dtype=torch.float64)
    if low > 0 or high < 0:
        drawn = 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
        return drawn * known.double().mean().item()
    spread = known.double().std(correction=0).item() or 1.0
    return spread * torch.randn(shape, generator=generator, dtype=torch.float64)


def _shuffled(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Along each dimension: what is unique along one stays so."""
    for dim, length in enumerate(tensor.shape):
        order = torch.randperm(length, generator=generator).to(tensor.device)
        tensor = tensor.index_select(dim, order)
    return tensor


def _recounted(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    inexact = tensor.is_floating_point() or tensor.is_complex()
    if tensor.numel() == 0 or (inexact and not _is_discrete(tensor)):
        return tensor
    chosen = torch.randint(tensor.numel(), tensor.shape, generator=generator)
    return tensor.flatten()[chosen.to(tensor.device)]


def _shaded(tensor: torch.Tensor, shade: str, generator: torch.Generator) -> torch.Tensor:
    if shade in ("positive", "negative", "large", "special"):
        return _tinted(tensor, shade, generator) if tensor.is_floating_point() else tensor
    count = max(1, tensor.numel())
    if shade.endswith("one"):
        chosen = torch.zeros(count, dtype=torch.bool)
        chosen[int(torch.randint(count, (), generator=generator))] = True
        chosen = chosen[: tensor.numel()].view(tensor.shape)
    else:
        # So many that a row has none, or one, about as often as not.
        likely = 0.7 / max((1, *tensor.shape))
        chosen = torch.rand(tensor.shape, generator=generator) < likely
    chosen = (~chosen if shade.startswith("all but") else chosen).to(tensor.device)
    if tensor.dtype is torch.bool:
        return chosen
    return torch.where(chosen, tensor, 0)


def _tinted(tensor: torch.Tensor, shade: str, generator: torch.Generator) -> torch.Tensor:
    if shade in ("positive", "negative"):
        return tensor.abs() if shade == "positive" else -tensor.abs()
    drawn = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
    if shade == "large":
        return tensor * 10 ** (6 * drawn)
    for number, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        tensor = tensor.masked_fill((drawn * 6).floor() == number, value)
    return tensor
