"""The header of one tensor file of Ascend's graph engine: what lies in the file, and where.

A file is the length of its header in eight bytes, the header, and the bytes of each tensor back to
back: what the operator took, what it gave, its buffers, its scratch space. The header is a protobuf
message of two generations, or a small binary one that devices without protobuf write. It is decoded
here by hand, so that no vendor's library is needed, and nothing in it is believed before it is
compared with the size of the file.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING, Literal, NamedTuple

from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "MOST_DIMS",
    "MOST_TENSORS",
    "UNKNOWN",
    "GeFile",
    "GeTensor",
    "Kind",
    "decode_header",
    "read_header",
]

Kind = Literal["input", "output", "buffer", "space"]

_LARGEST_HEADER = 16 << 20
MOST_TENSORS = 4096
MOST_DIMS = 32
_LONGEST_NAME = 64 << 10
_LENGTH = struct.Struct("<Q")
_NANO_MAGIC = struct.pack("<I", 0x5A5A5A5A)
# What a device that does not know a size writes: -1 as an unsigned number.
UNKNOWN = 1 << 63
# A byte of a number to which another belongs has this bit.
_CONTINUED = 128
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclasses.dataclass(frozen=True, slots=True)
class GeTensor:
    """One tensor of a file.

    Attributes:
        kind: what it was to the operator.
        index: which of that kind.
        dtype: the engine's number of the dtype; None for bytes without one.
        format: the engine's number of the device layout.
        sub_format: how many groups a layout has, 0 and 1 alike for one.
        shape: in the device layout.
        original_shape: in the program; empty where the device does not tell.
        original_format: the program's own layout; None where the device does not tell.
        begin: byte in the file.
        nbytes: how many, with padding.
    """

    kind: Kind
    index: int
    dtype: int | None = None
    format: int = 2
    sub_format: int = 0
    shape: tuple[int, ...] = ()
    original_shape: tuple[int, ...] = ()
    original_format: int | None = None
    begin: int = 0
    nbytes: int = 0

    @property
    def key(self) -> str:
        """Its name within the file."""
        return f"{self.kind}.{self.index}"


@dataclasses.dataclass(frozen=True, slots=True)
class GeFile:
    """What the header of a file says.

    Attributes:
        op_name: of the operator, as the graph spells it; empty where the header does not say.
        tensors: in the order of their bytes.
        end: the size that the file should have.
    """

    op_name: str
    tensors: tuple[GeTensor, ...]
    end: int


def read_header(path: Path) -> GeFile:
    """Read the header of a file.

    Raises:
        UsageError: it is damaged, or no such file.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        first = file.read(_LENGTH.size)
        if len(first) < _LENGTH.size:
            raise UsageError(f"{path.name} has {size} bytes: no tensor file is that short")
        (length,) = _LENGTH.unpack(first)
        if length > min(size - _LENGTH.size, _LARGEST_HEADER):
            raise UsageError(
                f"{path.name} says that its header has {length} bytes, and the file has {size}: it "
                f"was cut off, or is no tensor file"
            )
        header = file.read(length)
    try:
        return decode_header(header)
    except (ValueError, struct.error) as error:
        raise UsageError(f"the header of {path.name} is damaged: {error}") from error


def decode_header(header: bytes) -> GeFile:
    """Decode a header, of any generation.

    Raises:
        ValueError: it is none.
    """
    if header[:4] == _NANO_MAGIC:
        from paritas.dumps.foreign.ge_nano import decode_nano  # few files are of this kind

        return _placed("", decode_nano(header), len(header))
    view = memoryview(header)
    found: dict[Kind, list[GeTensor]] = {"input": [], "output": [], "buffer": [], "space": []}
    op_name = ""
    for number, _, value in _fields(view):
        if number == _OP_NAME:
            op_name = _text(value)
        if number not in _KINDS:
            continue
        body, kind = _message(value), _KINDS[number]
        if number == _SPACE_OR_ATTRIBUTE and not _is_space(body):
            continue  # an attribute: the generation that has these keeps its scratch space in 8
        if sum(map(len, found.values())) >= MOST_TENSORS:
            raise ValueError(f"it lists more than {MOST_TENSORS} tensors")
        found[kind].append(_tensor(kind, len(found[kind]), body))
    return _placed(op_name, [one for kind in found.values() for one in kind], len(header))


# The numbers of the fields of the whole message.
_KINDS: dict[int, Kind] = {3: "output", 4: "input", 5: "buffer", 7: "space", 8: "space"}
_OP_NAME = 6
_SPACE_OR_ATTRIBUTE = 7


class _Numbers(NamedTuple):
    """The numbers of the fields of one kind of message; 0 where it has none of that sort."""

    shape: int
    size: int
    original_shape: int
    sub_format: int
    original: int = 0


_NUMBERS: dict[Kind, _Numbers] = {
    "input": _Numbers(shape=3, size=5, original_shape=6, sub_format=7),
    "output": _Numbers(shape=3, size=6, original_shape=7, sub_format=8, original=4),
}
_DTYPE, _FORMAT = 1, 2
_SIZE_OF_BYTES = 3
_FORMAT_OF_ORIGINAL = 4


def _tensor(kind: Kind, index: int, body: memoryview) -> GeTensor:
    numbers = _NUMBERS.get(kind)
    fields: dict[str, int | tuple[int, ...] | None] = {"dtype": 0} if numbers else {}
    if numbers:
        fields["format"] = 0  # protobuf leaves a zero out
    for number, _, value in _fields(body):
        if numbers is None:
            if number == _SIZE_OF_BYTES:
                fields["nbytes"] = _number(value)
        elif number == _DTYPE:
            fields["dtype"] = _number(value)
        elif number == _FORMAT:
            fields["format"] = _number(value)
        elif number == numbers.shape:
            fields["shape"] = _dims(_message(value))
        elif number == numbers.size:
            fields["nbytes"] = _number(value)
        elif number == numbers.original_shape:
            fields["original_shape"] = _dims(_message(value))
        elif number == numbers.sub_format:
            fields["sub_format"] = _number(value)
        elif number == numbers.original:
            fields["original_format"] = _original_format(_message(value))
    return GeTensor(kind=kind, index=index, **fields)  # type: ignore[arg-type]


def _original_format(body: memoryview) -> int | None:
    """A zero is left out of the message, so that NCHW and nothing look alike."""
    found: int | None = None
    for number, _, value in _fields(body):
        if number == _FORMAT_OF_ORIGINAL:
            found = _number(value)
    return found


def _is_space(body: memoryview) -> bool:
    """Field 7 was the scratch space, whose first field is a number, and is now an attribute."""
    return next((wire == _VARINT for number, wire, _ in _fields(body) if number == 1), True)


def _dims(body: memoryview) -> tuple[int, ...]:
    dims: list[int] = []
    for number, wire, value in _fields(body):
        if number != 1:
            continue
        if wire == _VARINT:
            dims.append(_number(value))
        else:
            packed, at = _message(value), 0
            while at < len(packed) and len(dims) <= MOST_DIMS:
                dim, at = _varint(packed, at)
                dims.append(dim)
        if len(dims) > MOST_DIMS:
            raise ValueError(f"a shape has more than {MOST_DIMS} dimensions")
    # One size that is not known makes the shape unknown.
    return () if any(dim >= UNKNOWN for dim in dims) else tuple(dims)


def _fields(data: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """The fields of a protobuf message: number, wire type, value."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if not number:
            raise ValueError(f"a field with number 0 ends at byte {at}")
        value: int | memoryview
        if wire == _VARINT:
            value, at = _varint(data, at)
        elif wire == _BYTES:
            length, at = _varint(data, at)
            value, at = data[at : at + length], at + length
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
            value, at = int.from_bytes(data[at : at + length], "little"), at + length
        else:
            raise ValueError(f"field {number} has wire type {wire}")
        if at > len(data):
            raise ValueError(f"field {number} ends at byte {at} of {len(data)}")
        yield number, wire, value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    if at < len(data) and data[at] < _CONTINUED:  # most numbers are small
        return data[at], at + 1
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("a number is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < _CONTINUED:
            return value & ((1 << 64) - 1), at
    raise ValueError(f"a number of more than 10 bytes ends at byte {at}")


def _number(value: int | memoryview) -> int:
    if isinstance(value, int):
        return value
    raise ValueError(f"{len(value)} bytes stand where a number belongs")


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, memoryview):
        return value
    raise ValueError(f"the number {value} stands where a message belongs")


def _text(value: int | memoryview) -> str:
    return bytes(_message(value)[:_LONGEST_NAME]).decode("utf-8", "replace")


def _placed(op_name: str, tensors: list[GeTensor], length: int) -> GeFile:
    """Say where the bytes of each begin: they follow the header in the order of the kinds."""
    begin = _LENGTH.size + length
    placed: list[GeTensor] = []
    for tensor in tensors:
        placed.append(dataclasses.replace(tensor, begin=begin))
        begin += tensor.nbytes
        if begin >= UNKNOWN:
            raise ValueError(f"its tensors end at byte {begin}, which no file has")
    return GeFile(op_name, tuple(placed), begin)
