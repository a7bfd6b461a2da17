"""A tensor as one `.npy` file, and back bit for bit."""

from __future__ import annotations

import ast
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paritas.core.errors import ParitasError, UsageError
from paritas.formats.files.npy_files import NUMPY_DTYPES, read_npy_header
from paritas.formats.files.records import whole_file
from paritas.formats.files.tensor_bytes import known_dtype, stored_dtype, view_as_dtype
from paritas.formats.foreign.ge_tensors import FLOAT4_VALUES

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from paritas.formats.files.records import TensorFacts
    from paritas.formats.files.tensor_bytes import OpenFiles


# numpy lacks bfloat16, float8 and complex32: these are widened to float32 and complex64, which hold
# all their values. The payload bits of a NaN would be lost, so they are stored in the spare bits of
# the wider NaN.

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


_NATIVE = {getattr(torch, name): name for name in NUMPY_DTYPES}
_FLOAT4 = torch.float4_e2m1fn_x2
_QUIET_NAN = 0x7FC00000
# Dtypes to extract bits with: torch has few operators for uint16.
_CARRIERS = {1: torch.uint8, 2: torch.int16}


def array_of(stored: Tensor, shape: tuple[int, ...]) -> Array:
    """The values of a contiguous CPU tensor in a numpy dtype, expanded to `shape`."""
    dtype = stored.dtype
    if dtype in _NATIVE:
        return _expand(stored, shape).numpy()
    if dtype is _FLOAT4:
        return _unpack_float4(_expand(stored.view(torch.uint8), shape))
    if dtype is torch.complex32:
        parts = _widen_floats(torch.view_as_real(_expand(stored, shape)).contiguous())
        return torch.view_as_complex(parts).numpy()
    if dtype.is_floating_point:
        return _widen_floats(_expand(stored, shape)).numpy()
    # Integers smaller than a byte, and plain bits: as they are in memory.
    return _expand(stored.view(_carrier_dtype(dtype)), shape).numpy()


def tensor_of(array: Array, facts: TensorFacts) -> Tensor:
    """The tensor given to `array_of`, with repeated dimensions expanded."""
    dtype = stored_dtype(known_dtype(facts.dtype))
    values, shape = _check_array(array, facts, dtype)
    if not values.size:
        return torch.empty(0, dtype=torch.uint8).view(dtype).reshape(shape)
    if dtype in _NATIVE:
        return torch.from_numpy(values).reshape(shape)
    if dtype is _FLOAT4:
        return _pack_float4(values).view(_FLOAT4).reshape(shape)
    if dtype is torch.complex32:
        halves = _narrow_floats(
            torch.from_numpy(values.reshape(-1)).view(torch.float32), torch.float16
        )
        return view_as_dtype(halves, dtype).reshape(shape)
    if dtype.is_floating_point:
        return _narrow_floats(torch.from_numpy(values.reshape(-1)), dtype).reshape(shape)
    return torch.from_numpy(values).view(dtype).reshape(shape)


def array_of_value(text: str) -> Array:
    """A value other than a tensor, from its text: numbers as such, the rest as text."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}.get(text, text)
    if isinstance(value, str) or value is None:
        return np.array(str(value))
    try:
        array = np.array(value)
    except (ValueError, OverflowError):  # ragged rows, or a huge number
        return np.array(text)
    return array if array.dtype.kind in "biufc" else np.array(text)


def write_array(path: Path, array: Array) -> int:
    """Write the file atomically; returns its size in bytes."""
    with whole_file(path) as file:
        plain = np.ascontiguousarray(array).reshape(array.shape)
        np.lib.format.write_array(file, plain, allow_pickle=False)
        return file.tell()


def read_array(path: Path, files: OpenFiles | None = None) -> Array:
    """Read an untrusted file, checked before memory is allocated; with `files`, map it."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            header = read_npy_header(file)
            shape, dtype = header.shape, np.dtype(header.descr)
        except (UsageError, ValueError, TypeError) as error:
            raise ParitasError(f"{path} cannot be read: {error}") from error
        count = math.prod(shape)
        needed, present = count * dtype.itemsize, size - header.begin
        if dtype.hasobject or min(shape, default=0) < 0 or needed != present:
            raise ParitasError(
                f"{path} is damaged: its header says {shape} of {dtype}, which is {needed} bytes, "
                f"but {present} follow"
            )
        if files is None or not needed:
            file.seek(header.begin)
            values = np.fromfile(file, dtype=dtype, count=count)
        else:
            position = (path, header.begin, needed, path.name)
            values = files.view(*position, itemsize=dtype.itemsize).numpy().view(dtype)
    return values.reshape(shape[::-1]).T if header.is_fortran else values.reshape(shape)


def _check_array(
    array: Array, facts: TensorFacts, dtype: torch.dtype
) -> tuple[Array, tuple[int, ...]]:
    """Refuse a file that does not match its index."""
    shape, expected = facts.shape, facts.shape
    if dtype in _NATIVE:
        name = _NATIVE[dtype]
    elif dtype is torch.complex32:
        name = "complex64"
    elif dtype.is_floating_point:
        name = "float32"
        expected = _unpacked_shape(shape) if dtype is _FLOAT4 else shape
    else:
        name = str(_carrier_dtype(dtype)).removeprefix("torch.")
    if array.dtype.name != name or array.shape != expected:
        raise ParitasError(
            f"the file holds {array.shape} of {array.dtype}, but {facts.dtype} of {shape} is "
            f"stored as {expected} of {name}"
        )
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return np.ascontiguousarray(native).reshape(expected), shape


def _expand(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return tensor.detach().expand(shape).contiguous()


def _carrier_dtype(dtype: torch.dtype) -> torch.dtype:
    return {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[dtype.itemsize]


def _widen_floats(narrow: Tensor) -> Tensor:
    wide = narrow.to(torch.float32)
    is_nan = wide.isnan()
    if is_nan.any():
        bits = narrow.view(_CARRIERS[narrow.itemsize])[is_nan].to(torch.int32)
        wide.view(torch.int32)[is_nan] = (bits & _all_bits(narrow.dtype)) | _QUIET_NAN
    return wide


def _narrow_floats(wide: Tensor, dtype: torch.dtype) -> Tensor:
    narrow = wide.to(dtype)
    is_nan = wide.isnan()
    if is_nan.any():
        carrier = _CARRIERS[dtype.itemsize]
        payload = (wide.view(torch.int32)[is_nan] & _all_bits(dtype)).to(carrier)
        # Only NaNs that were widened here carry the narrow one's bits.
        is_ours = payload.view(dtype).to(torch.float32).isnan()
        present = narrow.view(carrier)
        present[is_nan] = torch.where(is_ours, payload, present[is_nan])
    return narrow


def _all_bits(dtype: torch.dtype) -> int:
    return (1 << 8 * dtype.itemsize) - 1


def _unpacked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], 2 * shape[-1]) if shape else (2,)


def _unpack_float4(pairs: Tensor) -> Array:
    """A byte holds two 4-bit numbers, the first in its lower half."""
    signed = torch.tensor([*FLOAT4_VALUES, *(-value for value in FLOAT4_VALUES)])
    halves = torch.stack((pairs & 15, pairs >> 4), dim=-1).long()
    return signed[halves].reshape(_unpacked_shape(tuple(pairs.shape))).numpy()


def _pack_float4(values: Array) -> Tensor:
    magnitudes = torch.tensor(FLOAT4_VALUES)
    wide = torch.from_numpy(values).reshape(-1)
    codes = torch.searchsorted(magnitudes, wide.abs())
    if codes.numel() and (
        codes.max() >= len(magnitudes) or not magnitudes[codes].equal(wide.abs())
    ):
        raise ParitasError("the file contains numbers that 4-bit floats cannot represent")
    nibbles = (codes + 8 * wide.signbit().long()).to(torch.uint8).reshape(-1, 2)
    return nibbles[:, 0] | (nibbles[:, 1] << 4)
