"""numpy files, `.npy` and `.npz`: parsed by their grammar; nothing in them is evaluated."""

from __future__ import annotations

import dataclasses
import math
import re
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING

import numpy as np

from paritas.core.errors import UsageError
from paritas.core.numerics.statistics import Statistics
from paritas.formats.files.tensor_bytes import Member, contiguous_stride, place_of, values_at
from paritas.formats.files.torch_files import (
    Call,
    Unreadable,
    follow,
    open_archive,
    plain_text,
    stored_at,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import IO

    from paritas.formats.files.tensor_bytes import FilePlace


# --- Headers --------------------------------------------------------------------------------------

_MAGIC = b"\x93NUMPY"
_LONGEST = 1 << 16
# Magic, two bytes of version, two or four bytes of header length.
_START = 12
_HEADER = re.compile(
    r"\{\s*'descr':\s*'([^'\\]{1,64})',\s*'fortran_order':\s*(True|False),"
    r"\s*'shape':\s*\(([\d,\sL]{0,2000})\),?\s*\}\s*"
)
# The numpy dtypes that torch also has, under the same names.
NUMPY_DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_NAMES = {np.dtype(name).str[1:]: name for name in NUMPY_DTYPES}
_REASONS = {
    "O": "its values are pickled Python objects, which paritas does not load",
    "V": "its values are raw bytes, which is how numpy saves bfloat16: save it as float32",
    "U": "it is text",
    "S": "it is text",
}


@dataclasses.dataclass(frozen=True)
class ArrayHeader:
    """The header of a `.npy` file.

    Attributes:
        descr: numpy's name of the dtype, for example `<f4`.
        is_fortran: whether the values are in column-major order.
        begin: byte at which the values begin.
    """

    descr: str
    shape: tuple[int, ...]
    is_fortran: bool
    begin: int

    @property
    def kind(self) -> str:
        """The letter for the kind of dtype: `f` floating point, `U` text, `O` objects."""
        return self.descr.lstrip("<>|=")[:1]


def read_npy_header(file: IO[bytes]) -> ArrayHeader:
    """Read the header at the beginning of a file."""
    start = file.read(_START)
    if start[:6] != _MAGIC or len(start) < _START:
        raise UsageError(f"not a .npy file: it begins with {start[:6]!r}, not {_MAGIC!r}")
    major = start[6]
    if major == 1:
        (length,), begin = struct.unpack("<H", start[8:10]), 10
    elif major in (2, 3):
        (length,), begin = struct.unpack("<I", start[8:12]), _START
    else:
        raise UsageError(f"unknown version {major} of the .npy format")
    if length > _LONGEST:
        raise UsageError(f"its header claims {length} bytes, the limit is {_LONGEST}")
    text = (start[begin:] + file.read(max(length - (_START - begin), 0))).decode("latin-1")
    match = _HEADER.fullmatch(text) if len(text) == length else None
    if match is None:
        raise UsageError(f"its header does not describe one plain array: {text[:80]!r}")
    try:
        shape = tuple(int(part.rstrip("L")) for part in re.findall(r"\d+L?", match[3]))
    except ValueError as error:  # a number with thousands of digits
        raise UsageError(f"its shape is not valid: {error}") from error
    return ArrayHeader(match[1], shape, match[2] == "True", begin + length)


def array_place(name: str, header: ArrayHeader, size: int) -> FilePlace:
    """Where the values of an array are, in a file or archive member of `size` bytes."""
    order, code = header.descr[:1], header.descr.lstrip("<>|=")
    if code not in _NAMES:
        reason = _REASONS.get(header.kind, "torch has no such dtype")
        raise UsageError(f"its dtype is {header.descr!r}: {reason}")
    stride = contiguous_stride(header.shape)
    if header.is_fortran:
        stride = contiguous_stride(header.shape[::-1])[::-1]
    room = size - header.begin
    location = place_of(name, _NAMES[code], header.shape, stride, header.begin, room)
    if location.nbytes != room:
        raise UsageError(
            f"its header says {header.shape} of {header.descr}, which is {location.nbytes} bytes, "
            f"but {room} bytes follow"
        )
    swaps = order == ">" and math.prod(header.shape) > 0 and code not in ("b1", "u1", "i1")
    return dataclasses.replace(location, is_swapped=swaps)


# --- Archives, `.npz` -----------------------------------------------------------------------------

# The highest compression ratio that deflate can reach.
_MOST_OF_DEFLATE = 1040
# A member may unpack to this many times the size of the file, and in any case to so many bytes.
_MOST_TIMES = 64
_ALWAYS_ACCEPTED = 64 << 20


def read_arrays(path: Path, name: str) -> Iterator[tuple[str, FilePlace | Unreadable]]:
    """The arrays of an archive by key, or why one cannot be read; `name` is in the dump."""
    size = path.stat().st_size
    with open_archive(path) as archive, path.open("rb") as file:
        for member in archive.infolist():
            if member.is_dir():
                continue
            key = member.filename.removesuffix(".npy")
            try:
                if member.compress_type == zipfile.ZIP_STORED:
                    begin = stored_at(file, member, size)
                    file.seek(begin)
                    inner = array_place(name, read_npy_header(file), member.file_size)
                    around = Member(member.filename, begin, member.file_size, member.CRC)
                    location = dataclasses.replace(
                        inner, begin=begin + inner.begin, key=key, member=around
                    )
                else:
                    location = _locate_member(archive, member, name, size)
            except (UsageError, OSError) as error:
                yield key, Unreadable(str(error))
            else:
                yield key, location


def _locate_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str, size: int
) -> FilePlace:
    if member.compress_type != zipfile.ZIP_DEFLATED or member.flag_bits & 1:
        raise UsageError("it is encrypted, or compressed with a method that numpy does not use")
    claimed = member.file_size
    if claimed > member.compress_size * _MOST_OF_DEFLATE + 4096:
        raise UsageError(
            f"{member.compress_size} compressed bytes claim to unpack to {claimed}: impossible"
        )
    if claimed > max(_MOST_TIMES * size, _ALWAYS_ACCEPTED):
        raise UsageError(
            f"it unpacks to {claimed} bytes, more than {_MOST_TIMES} times the file: if that is "
            f"correct, save it uncompressed"
        )
    try:
        with archive.open(member) as unpacked:
            header = read_npy_header(unpacked)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise UsageError(f"it is damaged: {error}") from error
    location = array_place(name, header, claimed)
    around = Member(member.filename, member.header_offset, member.compress_size, member.CRC)
    return dataclasses.replace(location, key=member.filename, member=around, is_packed=True)


# --- Files without a tensor -----------------------------------------------------------------------

_LARGEST_OBJECT = 1 << 16
# The dtypes that numpy gives to Python's numbers.
_PYTHON_NUMBERS = {"<i8": "<q", "<f8": "<d", "|b1": "<?", "<c16": "<dd"}


def python_text(file: IO[bytes], header: ArrayHeader) -> str | None:
    """A Python number as text, from a file positioned after the header; None for an array."""
    code = _PYTHON_NUMBERS.get(header.descr)
    if code is None or header.shape:
        return None
    parts = struct.unpack(code, file.read(struct.calcsize(code)))
    return repr(complex(*parts) if len(parts) > 1 else parts[0])


def object_text(file: IO[bytes], header: ArrayHeader, size: int) -> str:
    """Text or a pickled object as Python prints it, from a file positioned after the header."""
    if size - header.begin > _LARGEST_OBJECT:
        raise UsageError(
            f"it is not a tensor, and its {size - header.begin} bytes are too many for text"
        )
    data = file.read(_LARGEST_OBJECT)
    if header.kind == "O":
        return _describe_object(data, header)
    if header.shape:
        raise UsageError(f"it is an array of text of shape {header.shape}, not a tensor")
    code = "utf-32-be" if header.descr[:1] == ">" else "utf-32-le"
    try:
        text = data.decode(code if header.kind == "U" else "latin-1").rstrip("\0")
    except UnicodeDecodeError as error:
        raise UsageError(f"its text is damaged: {error}") from error
    # Some tools write the word None for a missing value.
    return text if text == "None" else repr(text)


def _describe_object(data: bytes, header: ArrayHeader) -> str:
    """An array of objects: the last part of its pickle's state is the list of objects."""
    tree, _ = follow(data)
    match tree:
        case Call(state=(_, _, _, _, [item])) if header.shape in ((), (1,)):
            text = plain_text(item)
        case Call(state=(_, _, _, _, [*items])) if len(header.shape) == 1:
            parts = [plain_text(item) for item in items]
            text = f"[{', '.join(part or '?' for part in parts)}]" if all(parts) else None
        case _:
            text = None
    if text is None:
        raise UsageError("it holds pickled Python objects, which paritas does not load")
    return text


def summary_of(path: Path, file_place: FilePlace) -> Statistics:
    """Statistics from a pair of minimum and maximum.

    The number of values is unknown: the count is 0. The counts of NaN and Inf are lower bounds, 0
    or 1.
    """
    if file_place.shape != (2,):
        raise UsageError(f"shape {file_place.shape} is not a pair of minimum and maximum")
    values = values_at(path, file_place)
    if values.is_complex():
        raise UsageError("complex numbers have no minimum and maximum")
    low, high = (float(value) for value in values.tolist())
    pair = (low, high)
    return Statistics(
        count=0,
        minimum=low if math.isfinite(low) else None,
        maximum=high if math.isfinite(high) else None,
        nans=int(any(map(math.isnan, pair))),
        positive_infinities=int(math.inf in pair),
        negative_infinities=int(-math.inf in pair),
    )
