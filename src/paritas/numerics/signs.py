"""A pseudo-random sign for every index: the same on every machine, device and version.

    sign(i) = 1 - 2 * (mix(o + i mod 2^16) >> 31),  o = mix(2^20 + i // 2^16) mod 2^16

where `mix` is the fixed hash of 32-bit integers below. Each block of 2^16 indices thus takes its
signs in a row out of a table of 2^17, from a place of its own.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np

__all__ = ["SIGN_BLOCK", "first_sign", "sign_table", "signs", "signs_from"]

Integer = TypeVar("Integer", int, Tensor)

SIGN_BLOCK = 1 << 16
_SIGN_BITS = 16
_FIRST_BLOCK = 1 << 20


def signs(indices: Tensor) -> Tensor:
    """The sign, +1 or -1 as int8, of each flat index; on the device of the indices."""
    within = indices & (SIGN_BLOCK - 1)
    return _table_on(indices.device)[first_sign(indices >> _SIGN_BITS) + within]


def signs_from(start: int, count: int, device: torch.device) -> Tensor:
    """The signs of so many indices in a row."""
    first, last = start >> _SIGN_BITS, (start + count - 1) >> _SIGN_BITS
    rows = first_sign(torch.arange(first, last + 1, device=device))
    # All windows of the table, as a view: a block's signs are one of them.
    windows = _table_on(device).unfold(0, SIGN_BLOCK, 1)
    return windows[rows].flatten().narrow(0, start & (SIGN_BLOCK - 1), count)


def first_sign(block: Integer) -> Integer:
    """Where in the table the signs of a block of indices begin."""
    return _mix(block + _FIRST_BLOCK) & (SIGN_BLOCK - 1)


@functools.cache
def sign_table(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The table, for numpy to multiply with."""
    return _table_on(torch.device("cpu")).numpy().astype(dtype)


@functools.cache
def _table_on(device: torch.device) -> Tensor:
    return (1 - 2 * (_mix(torch.arange(2 * SIGN_BLOCK)) >> 31)).to(device, torch.int8)


def _mix(number: Integer) -> Integer:
    """Hash integers below 2^32; one and the same in Python's integers and in int64 tensors."""
    number = (number ^ (number >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    number = (number ^ (number >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return number ^ (number >> 16)
