"""The header of a `.npy` file: read by its grammar alone, nothing in it is evaluated."""

from __future__ import annotations

import dataclasses
import math
import re
import struct
from typing import TYPE_CHECKING

from paritas.dumps.foreign.raw_values import contiguous_stride, place_of
from paritas.errors import UsageError

if TYPE_CHECKING:
    from typing import IO

    from paritas.dumps.foreign.raw_values import Place

__all__ = ["ArrayHeader", "array_place", "read_header"]

_MAGIC = b"\x93NUMPY"
_LONGEST = 1 << 16
# Magic, two bytes of version, and two or four of the length of what follows.
_START = 12
_HEADER = re.compile(
    r"\{\s*'descr':\s*'([^'\\]{1,64})',\s*'fortran_order':\s*(True|False),"
    r"\s*'shape':\s*\(([\d,\sL]{0,2000})\),?\s*\}\s*"
)
_NAMES = {
    "b1": "bool",
    "u1": "uint8",
    "u2": "uint16",
    "u4": "uint32",
    "u8": "uint64",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "c8": "complex64",
    "c16": "complex128",
}
_REASONS = {
    "O": "its values are pickled, which only Python could read by running what is in them",
    "V": "its values are bytes of unknown meaning, as numpy keeps bfloat16: save it as float32",
    "U": "it is text",
    "S": "it is text",
}


@dataclasses.dataclass(frozen=True)
class ArrayHeader:
    """What a `.npy` file says of itself.

    Attributes:
        descr: numpy's name of the dtype, for example `<f4`.
        is_fortran: whether the first dimension is the one whose values lie together.
        begin: byte at which the values begin.
    """

    descr: str
    shape: tuple[int, ...]
    is_fortran: bool
    begin: int

    @property
    def kind(self) -> str:
        """The letter of the dtype: `f` for floating point, `U` for text, `O` for pickled ones."""
        return self.descr.lstrip("<>|=")[:1]


def read_header(file: IO[bytes]) -> ArrayHeader:
    """Read the header from the beginning of a file.

    Raises:
        UsageError: it is none.
    """
    start = file.read(_START)
    if start[:6] != _MAGIC or len(start) < _START:
        raise UsageError(f"it is no .npy file: it begins with {start[:6]!r}, not {_MAGIC!r}")
    major = start[6]
    if major == 1:
        (length,), begin = struct.unpack("<H", start[8:10]), 10
    elif major in (2, 3):
        (length,), begin = struct.unpack("<I", start[8:12]), _START
    else:
        raise UsageError(f"version {major} of the .npy format is not known")
    if length > _LONGEST:
        raise UsageError(f"its header claims {length} bytes, where {_LONGEST} would be many")
    text = (start[begin:] + file.read(max(length - (_START - begin), 0))).decode("latin-1")
    found = _HEADER.fullmatch(text) if len(text) == length else None
    if found is None:
        raise UsageError(f"its header is not of one plain array: {text[:80]!r}")
    try:
        shape = tuple(int(part.rstrip("L")) for part in re.findall(r"\d+L?", found[3]))
    except ValueError as error:  # a number of thousands of digits
        raise UsageError(f"its shape is no shape: {error}") from error
    return ArrayHeader(found[1], shape, found[2] == "True", begin + length)


def array_place(name: str, header: ArrayHeader, size: int) -> Place:
    """Where the values of an array are.

    Args:
        name: of the file.
        size: of the file, or of the member of an archive, in bytes.

    Raises:
        UsageError: torch has no such numbers, or the file is too short or too long.
    """
    order, code = header.descr[:1], header.descr.lstrip("<>|=")
    if code not in _NAMES:
        reason = _REASONS.get(header.kind, "torch has none such")
        raise UsageError(f"its dtype is {header.descr!r}: {reason}")
    stride = contiguous_stride(header.shape)
    if header.is_fortran:
        stride = contiguous_stride(header.shape[::-1])[::-1]
    room = size - header.begin
    place = place_of(name, _NAMES[code], header.shape, stride, header.begin, room)
    if place.nbytes != room:
        raise UsageError(
            f"its header says {header.shape} of {header.descr}, which is {place.nbytes} bytes, and "
            f"{room} follow"
        )
    swaps = order == ">" and math.prod(header.shape) > 0 and code not in ("b1", "u1", "i1")
    return dataclasses.replace(place, is_swapped=swaps)
