"""Parameters and buffers: which of a candidate's are the reference's, and other values for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paritas.core.execution.computable import as_computable, is_number, stored_as
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.numerics.random_tensors import redraw_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn


def redraw_weights(module: nn.Module, seed: int) -> None:
    """Change all floating parameters and buffers in place; positive ones stay positive.

    Of float4, whose bytes hold two numbers, the bytes are shuffled.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, value in _iterate_named_tensors(module):
            if value.is_floating_point() and value.numel():
                value.copy_(_redraw_weight(value, generator))


def _redraw_weight(value: Tensor, generator: torch.Generator) -> Tensor:
    old = as_computable(value).cpu()
    if not is_number(value.dtype):
        order = torch.randperm(value.numel(), generator=generator)
        return stored_as(old.reshape(-1)[order].reshape(value.shape), value.dtype)
    return stored_as(redraw_values(old, generator, keeps_choices=False), value.dtype)


def _iterate_named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def match_weights(
    reference: dict[str, Tensor], candidate: dict[str, Tensor], *, reshapes: bool = True
) -> dict[str, str]:
    """The candidate's name of each parameter -> the reference's: by name, or by value.

    With `reshapes`, a parameter may have another shape, or be the transpose of a matrix.
    """
    names = {
        name: name
        for name, value in candidate.items()
        if name in reference
        and (
            reference[name].shape == value.shape
            or (reshapes and _has_reshaped_values(reference[name], value, fewest=1))
        )
    }
    for fits in (_has_same_values, _has_reshaped_values) if reshapes else (_has_same_values,):
        unmatched = {name: value for name, value in reference.items() if name not in names.values()}
        for name, value in candidate.items():
            same = [
                reference_name
                for reference_name, reference_tensor in unmatched.items()
                if fits(reference_tensor, value)
            ]
            # Of several equal ones, such as zeros, the one with the same last name.
            last = [
                reference_name
                for reference_name in same
                if reference_name.rpartition(".")[2] == name.rpartition(".")[2]
            ]
            same = last if len(same) > 1 else same
            if name not in names and len(same) == 1:
                names[name] = same[0]
                del unmatched[same[0]]
    return names


def _has_same_values(reference: Tensor, candidate: Tensor) -> bool:
    return (
        reference.shape == candidate.shape
        and reference.dtype is candidate.dtype
        and bitwise_equal(reference.detach().cpu(), candidate.detach().cpu())
    )


def _has_reshaped_values(reference: Tensor, candidate: Tensor, fewest: int = 2) -> bool:
    if reference.numel() != candidate.numel() or candidate.numel() < fewest:
        return False
    return is_transpose(reference, candidate) or _has_same_values(
        reference.reshape(candidate.shape), candidate
    )


def is_transpose(reference: Tensor, candidate: Tensor) -> bool:
    """Whether a parameter is kept as the transpose of a matrix."""
    return reference.dim() == 2 and _has_same_values(reference.mT.contiguous(), candidate)  # noqa: PLR2004


def fitting(reference: Tensor, candidate: Tensor) -> Callable[[Tensor], Tensor]:
    """Brings a parameter of the reference into the form in which the candidate keeps it."""
    if reference.shape == candidate.shape and not _is_other_transpose(reference, candidate):
        return lambda value: value
    if is_transpose(reference, candidate):
        return lambda value: value.mT.contiguous()
    return lambda value: value.reshape(candidate.shape)


def _is_other_transpose(reference: Tensor, candidate: Tensor) -> bool:
    return is_transpose(reference, candidate) and not _has_same_values(reference, candidate)
