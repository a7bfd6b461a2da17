"""A tensor as one `.npy` file that plain numpy reads, and back again bit for bit.

numpy has no bfloat16, no float8 and no half complex numbers: these are widened to float32 and
complex64, which hold each of their values. The bits that tell one NaN from another would be lost on
that way, so they travel in the spare bits of the wider NaN.
"""

from __future__ import annotations

import ast
import math
import os
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paritas.dumps.dtypes import known_dtype, stored_dtype
from paritas.dumps.folders import whole_file
from paritas.dumps.foreign.npy_headers import read_header
from paritas.errors import ParitasError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from paritas.dumps.mapped_files import OpenFiles
    from paritas.dumps.records import TensorFacts

    Array = np.ndarray[Any, Any]

__all__ = ["array_of", "array_of_value", "read_array", "tensor_of", "write_array"]

_NATIVE = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
    torch.uint32: "uint32",
    torch.uint64: "uint64",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}
_FLOAT4 = torch.float4_e2m1fn_x2
# The sixteen numbers that four bits stand for: a sign, two bits of exponent, one of mantissa.
_FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_QUIET_NAN = 0x7FC00000
# To pick bits by: torch has few operators for the unsigned integers of two bytes.
_CARRIERS = {1: torch.uint8, 2: torch.int16}


def array_of(stored: Tensor, shape: tuple[int, ...]) -> Array:
    """The values of a CPU tensor, in a dtype that numpy has.

    Args:
        stored: contiguous, with what it repeats stored once.
        shape: with the repetitions, which other programs expect to find.
    """
    dtype = stored.dtype
    if dtype in _NATIVE:
        return _expanded(stored, shape).numpy()
    if dtype is _FLOAT4:
        return _unpacked(_expanded(stored.view(torch.uint8), shape))
    if dtype is torch.complex32:
        parts = _widened(torch.view_as_real(_expanded(stored, shape)).contiguous())
        return torch.view_as_complex(parts).numpy()
    if dtype.is_floating_point:
        return _widened(_expanded(stored, shape)).numpy()
    # Integers of less than a byte, and bits without a meaning: as they lie in memory.
    return _expanded(stored.view(_bits_of(dtype)), shape).numpy()


def tensor_of(array: Array, facts: TensorFacts) -> Tensor:
    """The tensor that `array_of` was given, dimensions that it repeated written out."""
    dtype = stored_dtype(known_dtype(facts.dtype))
    values, shape = _checked(array, facts, dtype)
    if not values.size:
        return torch.empty(0, dtype=torch.uint8).view(dtype).reshape(shape)
    if dtype in _NATIVE:
        return torch.from_numpy(values).reshape(shape)
    if dtype is _FLOAT4:
        return _packed(values).view(_FLOAT4).reshape(shape)
    if dtype is torch.complex32:
        halves = _narrowed(torch.from_numpy(values.reshape(-1)).view(torch.float32), torch.float16)
        with warnings.catch_warnings():
            # Torch warns that few operators know these numbers. None is asked for any here.
            warnings.simplefilter("ignore", UserWarning)
            return halves.view(torch.complex32).reshape(shape)
    if dtype.is_floating_point:
        return _narrowed(torch.from_numpy(values.reshape(-1)), dtype).reshape(shape)
    return torch.from_numpy(values).view(dtype).reshape(shape)


def array_of_value(text: str) -> Array:
    """What is no tensor, from its text: a number as one, all else as characters, never pickled."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}.get(text, text)
    if isinstance(value, str) or value is None:
        return np.array(str(value))
    try:
        array = np.array(value)
    except (ValueError, OverflowError):  # rows of different lengths, a number without end
        return np.array(text)
    return array if array.dtype.kind in "biufc" else np.array(text)


def write_array(path: Path, array: Array) -> int:
    """Write the file so that nobody ever sees half of it; its size in bytes."""
    with whole_file(path) as file:
        plain = np.ascontiguousarray(array).reshape(array.shape)
        np.lib.format.write_array(file, plain, allow_pickle=False)
        return file.tell()


def read_array(path: Path, files: OpenFiles | None = None) -> Array:
    """Read a file that anybody may have written: checked before memory is taken, no pickle.

    Args:
        files: to map the values by, rather than to read them.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            header = read_header(file)
            shape, dtype = header.shape, np.dtype(header.descr)
        except (UsageError, ValueError, TypeError) as error:
            raise ParitasError(f"{path} is no .npy file: {error}") from error
        count = math.prod(shape)
        needed, present = count * dtype.itemsize, size - header.begin
        if dtype.hasobject or min(shape, default=0) < 0 or needed != present:
            raise ParitasError(
                f"{path} is damaged: its header says {shape} of {dtype}, which is {needed} bytes, "
                f"and {present} follow"
            )
        if files is None or not needed:
            file.seek(header.begin)
            values = np.fromfile(file, dtype=dtype, count=count)
        else:
            place = (path, header.begin, needed, path.name)
            values = files.view(*place, itemsize=dtype.itemsize).numpy().view(dtype)
    return values.reshape(shape[::-1]).T if header.is_fortran else values.reshape(shape)


def _checked(array: Array, facts: TensorFacts, dtype: torch.dtype) -> tuple[Array, tuple[int, ...]]:
    """Refuse a file that does not hold what the index says of it."""
    shape, wanted = facts.shape, facts.shape
    if dtype in _NATIVE:
        name = _NATIVE[dtype]
    elif dtype is torch.complex32:
        name = "complex64"
    elif dtype.is_floating_point:
        name = "float32"
        wanted = _unpacked_shape(shape) if dtype is _FLOAT4 else shape
    else:
        name = str(_bits_of(dtype)).removeprefix("torch.")
    if array.dtype.name != name or array.shape != wanted:
        raise ParitasError(
            f"the file holds {array.shape} of {array.dtype}, where {facts.dtype} of "
            f"{shape} is kept as {wanted} of {name}"
        )
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return np.ascontiguousarray(native).reshape(wanted), shape


def _expanded(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return tensor.detach().expand(shape).contiguous()


def _bits_of(dtype: torch.dtype) -> torch.dtype:
    return {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[dtype.itemsize]


def _widened(narrow: Tensor) -> Tensor:
    wide = narrow.to(torch.float32)
    is_nan = wide.isnan()
    if is_nan.any():
        bits = narrow.view(_CARRIERS[narrow.itemsize])[is_nan].to(torch.int32)
        wide.view(torch.int32)[is_nan] = (bits & _mask(narrow.dtype)) | _QUIET_NAN
    return wide


def _narrowed(wide: Tensor, dtype: torch.dtype) -> Tensor:
    narrow = wide.to(dtype)
    is_nan = wide.isnan()
    if is_nan.any():
        carrier = _CARRIERS[dtype.itemsize]
        kept = (wide.view(torch.int32)[is_nan] & _mask(dtype)).to(carrier)
        # Only a NaN that was widened here carries the narrow one; another's bits are not its own.
        is_ours = kept.view(dtype).to(torch.float32).isnan()
        present = narrow.view(carrier)
        present[is_nan] = torch.where(is_ours, kept, present[is_nan])
    return narrow


def _mask(dtype: torch.dtype) -> int:
    return (1 << 8 * dtype.itemsize) - 1


def _unpacked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], 2 * shape[-1]) if shape else (2,)


def _unpacked(pairs: Tensor) -> Array:
    """Two numbers of four bits lie in a byte, the first in its lower half."""
    signed = torch.tensor([*_FLOAT4_VALUES, *(-value for value in _FLOAT4_VALUES)])
    halves = torch.stack((pairs & 15, pairs >> 4), dim=-1).long()
    return signed[halves].reshape(_unpacked_shape(tuple(pairs.shape))).numpy()


def _packed(values: Array) -> Tensor:
    magnitudes = torch.tensor(_FLOAT4_VALUES)
    wide = torch.from_numpy(values).reshape(-1)
    codes = torch.searchsorted(magnitudes, wide.abs())
    if codes.numel() and (
        codes.max() >= len(magnitudes) or not magnitudes[codes].equal(wide.abs())
    ):
        raise ParitasError("the file holds numbers that four bits cannot hold")
    nibbles = (codes + 8 * wide.signbit().long()).to(torch.uint8).reshape(-1, 2)
    return nibbles[:, 0] | (nibbles[:, 1] << 4)
