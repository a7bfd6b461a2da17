"""The values of a tensor in a file of Ascend's graph engine.

What torch has no dtype for is widened to one that holds each of its values: integers of less than a
byte to whole bytes, floating-point numbers of four bits and HiFloat8 to float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Literal

import torch

from paritas.dumps.dtypes import known_dtype
from paritas.dumps.foreign.ge_formats import plan_layout
from paritas.dumps.foreign.raw_values import bools, contiguous_stride
from paritas.dumps.mapped_files import OpenFiles, typed
from paritas.dumps.records import TensorFacts
from paritas.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from paritas.dumps.foreign.ge_headers import GeTensor

__all__ = ["code_of_dtype", "dtype_of_name", "facts_of", "read_values", "torch_dtype"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Coding:
    """How elements lie in bytes.

    Attributes:
        name: the engine's, without `DT_`.
        dtype: torch's name of what they become; empty where they are not read.
        bits: of one element.
        widening: how smaller ones become that dtype; empty where they are of it.
    """

    name: str
    dtype: str = ""
    bits: int = 8
    widening: Literal["", "signed", "unsigned", "float4", "hifloat8"] = ""


_CODINGS = {
    0: _Coding("UNDEFINED", "int8"),
    1: _Coding("FLOAT", "float32", 32),
    2: _Coding("FLOAT16", "float16", 16),
    3: _Coding("INT8", "int8"),
    4: _Coding("UINT8", "uint8"),
    5: _Coding("INT16", "int16", 16),
    6: _Coding("UINT16", "uint16", 16),
    7: _Coding("INT32", "int32", 32),
    8: _Coding("INT64", "int64", 64),
    9: _Coding("UINT32", "uint32", 32),
    10: _Coding("UINT64", "uint64", 64),
    11: _Coding("BOOL", "bool"),
    12: _Coding("DOUBLE", "float64", 64),
    13: _Coding("STRING"),
    14: _Coding("DUAL_SUB_INT8", "int8"),
    15: _Coding("DUAL_SUB_UINT8", "uint8"),
    16: _Coding("COMPLEX64", "complex64", 64),
    17: _Coding("COMPLEX128", "complex128", 128),
    18: _Coding("QINT8", "int8"),
    19: _Coding("QINT16", "int16", 16),
    20: _Coding("QINT32", "int32", 32),
    21: _Coding("QUINT8", "uint8"),
    22: _Coding("QUINT16", "uint16", 16),
    23: _Coding("RESOURCE", "int64", 64),
    24: _Coding("STRING_REF"),
    25: _Coding("DUAL"),
    26: _Coding("VARIANT"),
    27: _Coding("BF16", "bfloat16", 16),
    28: _Coding("INT4", "int8", 4, "signed"),
    29: _Coding("UINT1", "uint8", 1, "unsigned"),
    30: _Coding("INT2", "int8", 2, "signed"),
    31: _Coding("UINT2", "uint8", 2, "unsigned"),
    32: _Coding("COMPLEX32", "complex32", 32),
    33: _Coding("HIFLOAT8", "float32", 8, "hifloat8"),
    34: _Coding("FLOAT8_E5M2", "float8_e5m2"),
    35: _Coding("FLOAT8_E4M3FN", "float8_e4m3fn"),
    36: _Coding("FLOAT8_E8M0", "float8_e8m0fnu"),
    37: _Coding("FLOAT6_E3M2"),
    38: _Coding("FLOAT6_E2M3"),
    39: _Coding("FLOAT4_E2M1", "float32", 4, "float4"),
    40: _Coding("FLOAT4_E1M2"),
    41: _Coding("HIFLOAT4"),
    42: _Coding("HIFLOAT4_SCALE"),
}
_BYTES = _Coding("BYTES", "uint8")
_CODES_BY_NAME = {f"DT_{coding.name}": code for code, coding in _CODINGS.items()}
# The plain ones: each is stored as torch has it.
_PLAIN_CODES: tuple[int, ...] = (*range(1, 13), 16, 17, 27, 32, 34, 35, 36)
_CODES_BY_DTYPE: dict[str, int] = {_CODINGS[code].dtype: code for code in _PLAIN_CODES} | {
    "float4_e2m1fn_x2": 39
}
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# To move elements by: torch moves integers of any width, and keeps every bit of them.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def dtype_of_name(name: str) -> int | None:
    """The number of a dtype that is called, for example, `DT_FLOAT16`."""
    return _CODES_BY_NAME.get(name)


def code_of_dtype(dtype: torch.dtype) -> int:
    """The engine's number of one of torch's dtypes.

    Raises:
        UsageError: it has none for that.
    """
    code = _CODES_BY_DTYPE.get(str(dtype).removeprefix("torch."))
    if code is None:
        raise UsageError(f"{dtype} has no number in the engine's list of dtypes: cast the tensor")
    return code


def torch_dtype(code: int | None) -> str:
    """Torch's name of the dtype in which values are read.

    Raises:
        UsageError: they are not read; the message says why.
    """
    return _coding(code).dtype


def facts_of(tensor: GeTensor) -> TensorFacts:
    """What the tensor is to the program: dtype and shape as `read_values` gives them.

    Raises:
        UsageError: it cannot be read.
    """
    coding = _coding(tensor.dtype)
    shape = plan_layout(_with_plain_bytes(tensor), _room(tensor, coding)).shape
    return TensorFacts(dtype=coding.dtype, shape=shape, stride=contiguous_stride(shape))


def read_values(
    path: Path, tensor: GeTensor, size: int | None = None, files: OpenFiles | None = None
) -> Tensor:
    """The values of a tensor, in the dtype and shape that the program means.

    Args:
        size: what the file had when its header was read.
        files: to map the values by, rather than to read them; what is widened or brought into
            another order is in memory of its own all the same.

    Raises:
        UsageError: they cannot be decoded, or the file has changed.
    """
    coding = _coding(tensor.dtype)
    tensor = _with_plain_bytes(tensor)
    room = _room(tensor, coding)
    layout = plan_layout(tensor, room)
    count = math.prod(layout.blocks)
    width = 1 if coding.widening else known_dtype(coding.dtype).itemsize
    _check_size(path, size)
    place = (path, tensor.begin, -(-count * coding.bits // 8), path.name)
    raw = OpenFiles().read(*place) if files is None else files.view(*place, itemsize=width)
    if coding.widening:
        return layout.undo(_widened(raw, coding, count)).contiguous()
    dtype = known_dtype(coding.dtype)
    if dtype is torch.bool:
        return layout.undo(bools(raw) if count else raw.view(dtype)).contiguous()
    moved = layout.undo(raw.view(_CARRIERS[dtype.itemsize])).contiguous()
    return typed(moved, dtype)


def _coding(code: int | None) -> _Coding:
    if code is None:
        return _BYTES
    coding = _CODINGS.get(code)
    if coding is None:
        raise UsageError(f"its dtype has the number {code}, which is not known")
    if not coding.dtype:
        raise UsageError(f"its dtype is DT_{coding.name}, of which no tensor can be made")
    return coding


def _room(tensor: GeTensor, coding: _Coding) -> int:
    """How many elements the bytes of a tensor are enough for."""
    return tensor.nbytes * 8 // coding.bits


def _with_plain_bytes(tensor: GeTensor) -> GeTensor:
    """What has no dtype is bytes; a shape that counts something else says nothing of them."""
    if tensor.dtype == 0 and math.prod(tensor.shape) != tensor.nbytes:
        return dataclasses.replace(tensor, shape=(), original_shape=(), format=2)
    return tensor


def _check_size(path: Path, size: int | None) -> None:
    present = path.stat().st_size
    if size not in (None, present):
        raise UsageError(
            f"{path.name} had {size} bytes and has {present}: it has changed since the dump was "
            f"opened"
        )


def _widened(raw: Tensor, coding: _Coding, count: int) -> Tensor:
    """What elements of less than a byte, or of a kind that torch lacks, stand for.

    The first of a byte is in its lowest bits; single bits are counted from the highest on, as the
    vendor's own reader does.
    """
    if coding.widening == "hifloat8":
        return _hifloat8_values()[raw.int()]
    bits = coding.bits
    places = range(0, 8, bits) if bits > 1 else range(7, -1, -1)
    parts = torch.stack([(raw >> place) & (1 << bits) - 1 for place in places], -1)
    codes = parts.reshape(-1)[:count]
    if coding.widening == "float4":
        return torch.tensor([*_FLOAT4, *(-value for value in _FLOAT4)])[codes.int()]
    if coding.widening == "signed":
        left = 8 - bits
        return (codes << left).view(torch.int8) >> left
    return codes


@functools.cache
def _hifloat8_values() -> Tensor:
    """What each byte stands for.

    After the sign, a prefix tells how many bits the exponent has: 11 for 4, 10 for 3, 01 for 2, 001
    for 1, 0001 for none; the rest is the mantissa. The exponent has a sign of its own and a
    leading one that is not stored. Prefix 0000 is for small powers of two.
    """
    values: list[float] = []
    for byte in range(128):
        for exponent_bits, width, prefix in ((4, 2, 3), (3, 2, 2), (2, 2, 1), (1, 3, 1), (0, 4, 1)):
            if byte >> 7 - width != prefix:
                continue
            mantissa_bits = 7 - width - exponent_bits
            field = byte >> mantissa_bits & (1 << exponent_bits) - 1
            mantissa = 1 + (byte & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
            half = 1 << exponent_bits >> 1
            exponent = half + (field & half - 1) if exponent_bits else 0
            is_negative = exponent_bits and field & half
            values.append(math.ldexp(mantissa, -exponent if is_negative else exponent))
            break
        else:
            values.append(math.ldexp(1, byte - 23))
    values[0] = 0.0
    values[0x6F] = math.inf
    return torch.tensor([*values, math.nan, *(-value for value in values[1:])])
