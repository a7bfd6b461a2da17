"""Files of safetensors: the header is checked against the file, and values are read in place."""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING

import msgspec

from paritas.dumps.foreign.raw_values import contiguous_stride, place_of
from paritas.dumps.foreign.torch_files import Unreadable
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paritas.dumps.foreign.raw_values import Place

__all__ = ["read_entries"]

_LARGEST_HEADER = 100_000_000  # what safetensors itself takes
_LENGTH = struct.Struct("<Q")
_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_entries(path: Path, name: str) -> Iterator[tuple[str, Place | Unreadable]]:
    """The tensors of a file, by their keys, in the order of their bytes.

    Args:
        name: of the file, inside the dump.

    Raises:
        UsageError: the file is damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
        if not 0 < length <= min(_LARGEST_HEADER, size - _LENGTH.size):
            raise UsageError(
                f"its header claims {length} bytes and the file has {size}: it is damaged, or no "
                f"safetensors file"
            )
        text = file.read(length)
    try:
        found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        found.pop("__metadata__", None)
        entries = {key: msgspec.json.decode(raw, type=_Entry) for key, raw in found.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"its header is damaged: {error}") from error
    begin = _LENGTH.size + length
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        try:
            yield key, _place(name, key, entry, begin, size)
        except UsageError as error:
            yield key, Unreadable(str(error))


def _place(name: str, key: str, entry: _Entry, begin: int, size: int) -> Place:
    dtype = _NAMES.get(entry.dtype)
    if dtype is None:
        raise UsageError(f"its dtype {entry.dtype[:32]!r} is not known")
    shape = tuple(entry.shape)
    if dtype == "float4_e2m1fn_x2":  # torch counts the bytes, of two numbers each
        if not shape or shape[-1] % 2:
            raise UsageError(f"shape {shape} of numbers of four bits does not fill its bytes")
        shape = (*shape[:-1], shape[-1] // 2)
    first, last = entry.data_offsets
    if not 0 <= first <= last <= size - begin:
        raise UsageError(f"its bytes {first} to {last} are not in the file: it was cut off")
    place = place_of(name, dtype, shape, contiguous_stride(shape), begin + first, last - first)
    if place.nbytes != last - first:
        raise UsageError(f"shape {shape} of {dtype} does not take {last - first} bytes")
    return dataclasses.replace(place, key=key)
