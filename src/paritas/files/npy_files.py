"""Files of numpy, `.npy` and `.npz`: read by their grammar, nothing in them is evaluated."""

from __future__ import annotations

import dataclasses
import math
import re
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING

from paritas.errors import UsageError
from paritas.files.pickles import Call, follow, plain_text
from paritas.files.tensor_bytes import Member, contiguous_stride, place_of, values_at
from paritas.files.torch_files import Unreadable, open_archive, stored_at
from paritas.numerics.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import IO

    from paritas.files.tensor_bytes import FilePlace


# --- Headers --------------------------------------------------------------------------------------

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


def read_npy_header(file: IO[bytes]) -> ArrayHeader:
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


def array_place(name: str, header: ArrayHeader, size: int) -> FilePlace:
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


# --- Archives, `.npz` -----------------------------------------------------------------------------

# More than this no byte of the compressed kind can stand for.
_MOST_OF_DEFLATE = 1040
# A member may unpack to this many times the whole file, or to so many bytes in any case.
_MOST_TIMES = 64
_ALWAYS_TAKEN = 64 << 20


def read_arrays(path: Path, name: str) -> Iterator[tuple[str, FilePlace | Unreadable]]:
    """The arrays of an archive, by their keys; those that cannot be read with the reason.

    Args:
        name: of the file, inside the dump.

    Raises:
        UsageError: the archive is damaged.
    """
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
                    place = dataclasses.replace(
                        inner, begin=begin + inner.begin, key=key, member=around
                    )
                else:
                    place = _locate_member(archive, member, name, size)
            except (UsageError, OSError) as error:
                yield key, Unreadable(str(error))
            else:
                yield key, place


def _locate_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str, size: int
) -> FilePlace:
    if member.compress_type != zipfile.ZIP_DEFLATED or member.flag_bits & 1:
        raise UsageError("it is compressed in a way numpy does not write, or encrypted")
    claimed = member.file_size
    if claimed > member.compress_size * _MOST_OF_DEFLATE + 4096:
        raise UsageError(
            f"{member.compress_size} compressed bytes claim to be {claimed}: more than they can be"
        )
    if claimed > max(_MOST_TIMES * size, _ALWAYS_TAKEN):
        raise UsageError(
            f"it unpacks to {claimed} bytes, more than {_MOST_TIMES} times the file: if that is "
            f"right, save it uncompressed"
        )
    try:
        with archive.open(member) as unpacked:
            header = read_npy_header(unpacked)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise UsageError(f"it is damaged: {error}") from error
    place = array_place(name, header, claimed)
    around = Member(member.filename, member.header_offset, member.compress_size, member.CRC)
    return dataclasses.replace(place, key=member.filename, member=around, is_packed=True)


# --- Files that hold no tensor --------------------------------------------------------------------

_LARGEST_OBJECT = 1 << 16
# What numpy makes of Python's numbers.
_PYTHON_NUMBERS = {"<i8": "<q", "<f8": "<d", "|b1": "<?", "<c16": "<dd"}


def python_text(file: IO[bytes], header: ArrayHeader) -> str | None:
    """A number of Python's as text; None for what is an array.

    Args:
        file: just behind its header.
    """
    code = _PYTHON_NUMBERS.get(header.descr)
    if code is None or header.shape:
        return None
    parts = struct.unpack(code, file.read(struct.calcsize(code)))
    return repr(complex(*parts) if len(parts) > 1 else parts[0])


def object_text(file: IO[bytes], header: ArrayHeader, size: int) -> str:
    """Text, or an object that is pickled, as Python would write it.

    Args:
        file: just behind its header.
        size: of the file, in bytes.

    Raises:
        UsageError: it is no plain value, or damaged.
    """
    if size - header.begin > _LARGEST_OBJECT:
        raise UsageError(f"it is no tensor, and {size - header.begin} bytes are much for text")
    data = file.read(_LARGEST_OBJECT)
    if header.kind == "O":
        return _describe_object(data, header)
    if header.shape:
        raise UsageError(f"it is an array of text, shape {header.shape}, no tensor")
    code = "utf-32-be" if header.descr[:1] == ">" else "utf-32-le"
    try:
        text = data.decode(code if header.kind == "U" else "latin-1").rstrip("\0")
    except UnicodeDecodeError as error:
        raise UsageError(f"its text is damaged: {error}") from error
    # Some write what is missing as the word for it.
    return text if text == "None" else repr(text)


def _describe_object(data: bytes, header: ArrayHeader) -> str:
    """An array of one object: a pickle, of which the last part is the list of objects."""
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
        raise UsageError("it holds objects of Python, pickled: none of them is made")
    return text


def summary_of(path: Path, place: FilePlace) -> Statistics:
    """The statistics that a pair of the least and the greatest value amounts to.

    How many values there were is not in it (the count is 0). Of those that are not finite it shows
    that there is one at least, which is the number given.

    Raises:
        UsageError: it is no such pair.
    """
    if place.shape != (2,):
        raise UsageError(f"shape {place.shape} is not a least and a greatest value")
    values = values_at(path, place)
    if values.is_complex():
        raise UsageError("complex numbers have no least and greatest value")
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
