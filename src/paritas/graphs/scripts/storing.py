"""Tensors of a script in a safetensors file beside it, which does not know every dtype of torch."""

from __future__ import annotations

import functools

import torch
from safetensors.torch import save

__all__ = ["is_storable", "stored_form", "taken_back"]


def is_storable(dtype: torch.dtype) -> bool:
    """Whether `stored_form` of a tensor can be put into a file."""
    return dtype.is_complex or _is_known(dtype)


def stored_form(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that a file can hold: complex numbers that it does not know as pairs of real ones."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().clone()
    return torch.view_as_real(plain) if _in_pairs(tensor.dtype) else plain


def taken_back(text: str, dtype: torch.dtype) -> str:
    """The expression that gives the tensor again, where `text` gives what was stored of it."""
    return f"torch.view_as_complex({text})" if _in_pairs(dtype) else text


def _in_pairs(dtype: torch.dtype) -> bool:
    return dtype.is_complex and not _is_known(dtype)


@functools.cache
def _is_known(dtype: torch.dtype) -> bool:
    """Asked of the library itself: a later one may know more."""
    try:
        save({"nothing": torch.empty(0, dtype=torch.uint8).view(dtype)})
    except (KeyError, RuntimeError, ValueError):
        return False
    return True
