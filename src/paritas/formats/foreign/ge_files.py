"""Tensor files of Ascend's graph engine: parsing their names and headers."""

from __future__ import annotations

import csv
import dataclasses
import re
import struct
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from paritas.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


# --- Names of files and folders -------------------------------------------------------------------

# ::
#
#     [msit_ge_dump/][worldsize{W}_global_rank{r}/]{time}/{device}/{model}/{model id}/{step}/
#         {operator's type}.{operator}.{task}.{stream}.{time}[.{thread} ...]
#
# An operator's name may contain dots. A name that is too long for a file is replaced by a number,
# which `mapping.csv` in the same folder explains.

MAPPING = "mapping.csv"
_RANK = re.compile(r"worldsize(\d{1,9})_global_rank(\d{1,9})")
_TIME = re.compile(r"\d{14}")
_LARGEST_MAPPING = 64 << 20
_LONGEST_NAME = 4096
_LONGEST_OF_FILE = 255
# Microseconds since 1970 have 16 digits; thread and task numbers have few.
_SHORTEST_TIME, _LONGEST_NUMBER = 10, 20
_MOST_AFTER_TIME = 4
_TYPE_AND_NAME = 2
_TASK_AND_STREAM = 2


@dataclasses.dataclass(frozen=True, slots=True)
class FileName:
    """The parts of a file name.

    Attributes:
        time: of the dump, in microseconds.
        numbers: task and stream, and the numbers after the time, which identify threads.
    """

    op_type: str
    op_name: str
    time: int
    numbers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Levels:
    """What the folders above a file say; zero or empty if they do not.

    Attributes:
        step: which run of the graph.
    """

    rank: int = 0
    world_size: int = 1
    time: str = ""
    model: str = ""
    model_id: str = ""
    step: int = 0


def parse_name(name: str) -> FileName | None:
    """Parse the name of a tensor file; None if it is not of this kind."""
    parts = name.split(".")
    last = len(parts) - 1
    if len(name) > _LONGEST_NAME:
        return None
    for at in range(last, max(last - _MOST_AFTER_TIME, _TYPE_AND_NAME) - 1, -1):
        if not _is_number(parts[at]):
            return None
        if len(parts[at]) >= _SHORTEST_TIME:
            parsed = _parse_parts(parts, at)
            if parsed is not None:
                return parsed
    return None


def _parse_parts(parts: list[str], at: int) -> FileName | None:
    """Parse a name whose time is part `at`; older engines write a task but no stream."""
    before = 0
    for number in reversed(parts[_TYPE_AND_NAME:at][-_TASK_AND_STREAM:]):
        if not _is_number(number):
            break
        before += 1
    op_name = ".".join(parts[1 : at - before])
    if not before or not parts[0] or not op_name.strip("."):
        return None
    numbers = (*parts[at - before : at], *parts[at + 1 :])
    return FileName(parts[0], op_name, int(parts[at]), tuple(map(int, numbers)))


def spell_name(name: str) -> str:
    """The name of an operator as the engine spells it in file names."""
    return re.sub(r"[./\\ ]", "_", name)


def fitting_name(folder: Path, name: str, ending: str = "") -> str:
    """The name of a file, or, if it is too long, a number that the folder's `mapping.csv` explains.

    `ending` is appended to the number.
    """
    if len(name.encode()) <= _LONGEST_OF_FILE:
        return name
    short = f"{xxhash.xxh3_64_intdigest(name.encode())}{ending}"
    with (folder / MAPPING).open("a", encoding="utf-8") as mapping:
        mapping.write(f"{short},{name}\n")
    return short


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _LONGEST_NUMBER


def parse_levels(root: Path, inside: tuple[str, ...]) -> Levels:
    """Parse the folders of a file: `root`, which may be any of the levels, and those inside it."""
    parts = (*root.absolute().parts, *inside)
    ranks = (_RANK.fullmatch(part) for part in parts)
    rank = next((file_rank for file_rank in ranks if file_rank), None)
    for at in range(len(parts) - 2, -1, -1):
        if _TIME.fullmatch(parts[at]) and _is_number(parts[at + 1]):
            device, model, model_id, step = (*parts[at + 1 : at + 5], "", "", "")[:4]
            break
    else:
        # A folder of files rather than a tree: at most its name is a step.
        step = parts[-1] if inside else root.name
        at, device, model, model_id = -1, "0", "", ""
    return Levels(
        rank=int(rank[2]) if rank else int(device),
        world_size=int(rank[1]) if rank else 1,
        time=parts[at] if at >= 0 else "",
        model=model,
        model_id=model_id,
        step=int(step) if _is_number(step) and len(step) < _SHORTEST_TIME else 0,
    )


def read_mapping(path: Path) -> dict[str, str]:
    """The names behind the numbers, from a `mapping.csv`."""
    if path.stat().st_size > _LARGEST_MAPPING:
        raise UsageError(f"{path.name} is larger than {_LARGEST_MAPPING} bytes")
    names_by_hash: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            for row in csv.reader(file):
                if len(row) > 1:
                    # A name may contain a comma, and names are not quoted.
                    names_by_hash[row[0].strip()] = ",".join(row[1:]).strip()
    except csv.Error as error:
        raise UsageError(f"{path.name} is damaged: {error}") from error
    return names_by_hash


# --- Headers --------------------------------------------------------------------------------------

# A file is the length of its header in eight bytes, the header, and the bytes of each tensor:
# inputs, outputs, buffers, scratch space. The header is a protobuf message of one of two
# generations, or a small binary one from devices without protobuf. It is decoded by hand, so no
# vendor library is needed, and everything in it is checked against the size of the file.

GeTensorKind = Literal["input", "output", "buffer", "space"]

_LARGEST_HEADER = 16 << 20
MOST_TENSORS = 4096
MOST_DIMS = 32
_LONGEST_OP_NAME = 64 << 10
_LENGTH = struct.Struct("<Q")
_NANO_MAGIC = struct.pack("<I", 0x5A5A5A5A)
# The size -1 as an unsigned number: the device does not know it.
UNKNOWN = 1 << 63
# Set in each byte of a number except the last.
_CONTINUED = 128
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclasses.dataclass(frozen=True, slots=True)
class GeTensor:
    """One tensor of a file.

    Attributes:
        kind: its role for the operator.
        index: its position among tensors of that kind.
        dtype: the engine's number of the dtype; None for plain bytes.
        format: the engine's number of the device layout.
        sub_format: the number of groups of a layout; 0 also means one.
        shape: in the device layout.
        original_shape: in the program; empty if the device does not say.
        original_format: the program's layout; None if the device does not say.
        begin: byte in the file.
        nbytes: including padding.
    """

    kind: GeTensorKind
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
    """The header of a file.

    Attributes:
        op_name: the operator, as spelt in the graph; empty if the header does not say.
        tensors: in the order of their bytes.
        end: the size that the file should have.
    """

    op_name: str
    tensors: tuple[GeTensor, ...]
    end: int


def read_ge_header(path: Path) -> GeFile:
    """Read the header of a file."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        first = file.read(_LENGTH.size)
        if len(first) < _LENGTH.size:
            raise UsageError(f"{path.name} has only {size} bytes: not a tensor file")
        (length,) = _LENGTH.unpack(first)
        if length > min(size - _LENGTH.size, _LARGEST_HEADER):
            raise UsageError(
                f"{path.name} claims a header of {length} bytes, but the file has {size}: it is "
                f"truncated, or not a tensor file"
            )
        header = file.read(length)
    try:
        return decode_header(header)
    except (ValueError, struct.error) as error:
        raise UsageError(f"the header of {path.name} is damaged: {error}") from error


def decode_header(header: bytes) -> GeFile:
    """Decode a header of any generation.

    Raises:
        ValueError, struct.error: it is damaged.
    """
    if header[:4] == _NANO_MAGIC:
        return _place_tensors("", decode_nano(header), len(header))
    view = memoryview(header)
    tensors: dict[GeTensorKind, list[GeTensor]] = {
        "input": [],
        "output": [],
        "buffer": [],
        "space": [],
    }
    op_name = ""
    for number, _, value in _decode_fields(view):
        if number == _OP_NAME:
            op_name = _as_text(value)
        if number not in _KINDS:
            continue
        body, kind = _as_message(value), _KINDS[number]
        if number == _SPACE_OR_ATTRIBUTE and not _is_space(body):
            continue  # an attribute: the generation that has these uses field 8 for scratch space
        if sum(map(len, tensors.values())) >= MOST_TENSORS:
            raise ValueError(f"it lists more than {MOST_TENSORS} tensors")
        tensors[kind].append(_decode_tensor(kind, len(tensors[kind]), body))
    return _place_tensors(
        op_name, [tensor for kind in tensors.values() for tensor in kind], len(header)
    )


# Field numbers of the whole message.
_KINDS: dict[int, GeTensorKind] = {3: "output", 4: "input", 5: "buffer", 7: "space", 8: "space"}
_OP_NAME = 6
_SPACE_OR_ATTRIBUTE = 7


def _decode_tensor(kind: GeTensorKind, index: int, body: memoryview) -> GeTensor:
    # protobuf omits zeros
    tensor_fields: dict[str, Any] = {"dtype": 0, "format": 0} if kind in ("input", "output") else {}
    fields = _TENSOR_FIELDS[kind]
    for number, _, value in _decode_fields(body):
        if number in fields:
            name, decode = fields[number]
            tensor_fields[name] = decode(value)
    return GeTensor(kind=kind, index=index, **tensor_fields)


def _original_format(value: int | memoryview) -> int | None:
    """The program's layout; None also for NCHW, because the message omits zeros."""
    as_number: int | None = None
    for number, _, field in _decode_fields(_as_message(value)):
        if number == _FORMAT_OF_ORIGINAL:
            as_number = _as_number(field)
    return as_number


def _is_space(body: memoryview) -> bool:
    """Field 7 was the scratch space, whose first field is a number; now it is an attribute."""
    return next((wire == _VARINT for number, wire, _ in _decode_fields(body) if number == 1), True)


def _decode_dims(value: int | memoryview) -> tuple[int, ...]:
    dims: list[int] = []
    for number, wire, field in _decode_fields(_as_message(value)):
        if number != 1:
            continue
        if wire == _VARINT:
            dims.append(_as_number(field))
        else:
            packed, at = _as_message(field), 0
            while at < len(packed) and len(dims) <= MOST_DIMS:
                dim, at = _decode_varint(packed, at)
                dims.append(dim)
        if len(dims) > MOST_DIMS:
            raise ValueError(f"a shape has more than {MOST_DIMS} dimensions")
    # One unknown size makes the shape unknown.
    return () if any(dim >= UNKNOWN for dim in dims) else tuple(dims)


# By hand: protobuf's own library needs classes generated from the vendor's schema, which is not
# ours to ship.
def _decode_fields(data: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """The fields of a protobuf message: number, wire type, value."""
    at = 0
    while at < len(data):
        tag, at = _decode_varint(data, at)
        number, wire = tag >> 3, tag & 7
        if not number:
            raise ValueError(f"a field with number 0 ends at byte {at}")
        value: int | memoryview
        if wire == _VARINT:
            value, at = _decode_varint(data, at)
        elif wire == _BYTES:
            length, at = _decode_varint(data, at)
            value, at = data[at : at + length], at + length
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
            value, at = int.from_bytes(data[at : at + length], "little"), at + length
        else:
            raise ValueError(f"field {number} has wire type {wire}")
        if at > len(data):
            raise ValueError(f"field {number} ends at byte {at} of {len(data)}")
        yield number, wire, value


def _decode_varint(data: memoryview, at: int) -> tuple[int, int]:
    if at < len(data) and data[at] < _CONTINUED:  # most numbers are small
        return data[at], at + 1
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("a number is truncated")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < _CONTINUED:
            return value & ((1 << 64) - 1), at
    raise ValueError(f"a number before byte {at} has more than 10 bytes")


def _as_number(value: int | memoryview) -> int:
    if isinstance(value, int):
        return value
    raise ValueError(f"{len(value)} bytes where a number is expected")


def _as_message(value: int | memoryview) -> memoryview:
    if isinstance(value, memoryview):
        return value
    raise ValueError(f"the number {value} where a message is expected")


# Of the message of each kind of tensor: the number, name and decoder of its fields.
_TENSOR_FIELDS: dict[GeTensorKind, dict[int, tuple[str, Callable[[int | memoryview], Any]]]] = {
    "input": {
        1: ("dtype", _as_number),
        2: ("format", _as_number),
        3: ("shape", _decode_dims),
        5: ("nbytes", _as_number),
        6: ("original_shape", _decode_dims),
        7: ("sub_format", _as_number),
    },
    "output": {
        1: ("dtype", _as_number),
        2: ("format", _as_number),
        3: ("shape", _decode_dims),
        4: ("original_format", _original_format),
        6: ("nbytes", _as_number),
        7: ("original_shape", _decode_dims),
        8: ("sub_format", _as_number),
    },
    "buffer": {3: ("nbytes", _as_number)},
    "space": {3: ("nbytes", _as_number)},
}
_FORMAT_OF_ORIGINAL = 4


def _as_text(value: int | memoryview) -> str:
    return bytes(_as_message(value)[:_LONGEST_OP_NAME]).decode("utf-8", "replace")


def _place_tensors(op_name: str, tensors: list[GeTensor], length: int) -> GeFile:
    """Set where the bytes of each begin: they follow the header in the order of the kinds."""
    begin = _LENGTH.size + length
    placed: list[GeTensor] = []
    for tensor in tensors:
        placed.append(dataclasses.replace(tensor, begin=begin))
        begin += tensor.nbytes
        if begin >= UNKNOWN:
            raise ValueError(f"its tensors would end at byte {begin}")
    return GeFile(op_name, tuple(placed), begin)


# --- Headers of small devices, without protobuf ---------------------------------------------------

# After a magic number and a version come two lists of tensors, inputs and outputs, each with a tag
# and a length. All numbers are little-endian.

# dtype, layout, kind of address; address, offset, size; length of what follows. An output also has
# its number, dtype and layout in the program.
_INPUT = struct.Struct("<iiiQQQI")
_OUTPUT = struct.Struct("<iiiiiiQQQI")
_INPUT_DESCRIPTIONS, _OUTPUT_DESCRIPTIONS = 4, 5
# Devices with the binary header number some dtypes differently.
# Their number is the index; the value is the usual number.
_DTYPES_OF_BINARY = (1, 2, 3, 7, 4, -1, 5, 6, 9, 8, 10, 12, 11, *range(13, 28), 0, 28, 29, 30, 31)


def decode_nano(header: bytes) -> list[GeTensor]:
    """The tensors of a binary header, in the order of their bytes; raises like `decode_header`."""
    ge_tensors: list[GeTensor] = []
    visited: set[str] = set()
    at = 8
    while at + 12 <= len(header):
        tag, length, count = struct.unpack_from("<III", header, at)
        kind: GeTensorKind = "input" if tag == _INPUT_DESCRIPTIONS else "output"
        if tag not in (_INPUT_DESCRIPTIONS, _OUTPUT_DESCRIPTIONS) or kind in visited:
            raise ValueError(f"unexpected list with tag {tag} after {sorted(visited)}")
        visited.add(kind)
        if count > MOST_TENSORS:
            raise ValueError(f"it lists {count} tensors, the limit is {MOST_TENSORS}")
        end, item = at + 8 + length, at + 12
        for index in range(count):
            tensor, item = _decode_nano_tensor(header, item, kind, index)
            ge_tensors.append(tensor)
        if item != end:
            raise ValueError(f"the list of {kind}s ends at byte {item}, not at {end}")
        at = item
    # Their bytes are in this order, whichever list comes first.
    return sorted(ge_tensors, key=lambda ge_tensor: ge_tensor.kind)


def _decode_nano_tensor(
    header: bytes, at: int, kind: GeTensorKind, index: int
) -> tuple[GeTensor, int]:
    original_format: int | None = None
    if kind == "input":
        dtype, layout, _, _, _, nbytes, _ = _INPUT.unpack_from(header, at)
        at += _INPUT.size
    else:
        dtype, layout, _, _, _, original_format, _, _, nbytes, _ = _OUTPUT.unpack_from(header, at)
        at += _OUTPUT.size
    # Two shapes, and for an output a name; each has a tag, in this order, and may be missing.
    parts: dict[int, bytes] = {}
    for expected in (0, 1) if kind == "input" else (0, 1, 2):
        if at + 8 > len(header):
            break
        tag, length = struct.unpack_from("<II", header, at)
        if tag != expected:
            continue
        end = at + 8 + length
        if end > len(header):
            raise ValueError(f"a shape ends at byte {end} of {len(header)}")
        parts[tag], at = header[at + 8 : end], end
    tensor = GeTensor(
        kind=kind,
        index=index,
        dtype=_DTYPES_OF_BINARY[dtype] if 0 <= dtype < len(_DTYPES_OF_BINARY) else -1,
        format=layout,
        shape=_decode_nano_dims(parts.get(0, b"")),
        original_shape=_decode_nano_dims(parts.get(1, b"")),
        original_format=original_format,
        nbytes=nbytes,
    )
    return tensor, at


def _decode_nano_dims(data: bytes) -> tuple[int, ...]:
    if len(data) > 8 * MOST_DIMS or len(data) % 8:
        raise ValueError(f"a shape has {len(data)} bytes")
    dims = struct.unpack(f"<{len(data) // 8}Q", data)
    return () if any(dim >= UNKNOWN for dim in dims) else dims
