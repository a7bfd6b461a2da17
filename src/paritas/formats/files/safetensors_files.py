"""safetensors files: read in place, and written incrementally."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch

from paritas.core.errors import UsageError
from paritas.formats.files.tensor_bytes import (
    SAFETENSORS_NAMES,
    contiguous_stride,
    in_safetensors,
    place_of,
)
from paritas.formats.files.torch_files import Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import xxhash
    from torch import Tensor

    from paritas.formats.files.tensor_bytes import FilePlace


# --- Reading --------------------------------------------------------------------------------------

_LARGEST_HEADER = 100_000_000  # the limit of safetensors itself
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header
_NAMES = {name: str(dtype).removeprefix("torch.") for dtype, name in SAFETENSORS_NAMES.items()} | {
    "C64": "complex64",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}


class _TensorEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_entries(path: Path, name: str) -> Iterator[tuple[str, FilePlace | Unreadable]]:
    """The tensors of a file by key, or why one cannot be read; `name` is its path in the dump."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        length = int.from_bytes(start, "little") if len(start) == _LENGTH_BYTES else 0
        if not 0 < length <= min(_LARGEST_HEADER, size - _LENGTH_BYTES):
            raise UsageError(
                f"its header claims {length} bytes and the file has {size}: it is damaged, or not "
                f"a safetensors file"
            )
        text = file.read(length)
    try:
        header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {key: msgspec.json.decode(raw, type=_TensorEntry) for key, raw in header.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"its header is damaged: {error}") from error
    begin = _LENGTH_BYTES + length
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        try:
            yield key, _locate_entry(name, key, entry, begin, size)
        except UsageError as error:
            yield key, Unreadable(str(error))


def _locate_entry(name: str, key: str, entry: _TensorEntry, begin: int, size: int) -> FilePlace:
    dtype = _NAMES.get(entry.dtype)
    if dtype is None:
        raise UsageError(f"unknown dtype {entry.dtype[:32]!r}")
    shape = tuple(entry.shape)
    if dtype == "float4_e2m1fn_x2":  # torch counts bytes of two numbers each
        if not shape or shape[-1] % 2:
            raise UsageError(f"shape {shape} of 4-bit numbers does not fill whole bytes")
        shape = (*shape[:-1], shape[-1] // 2)
    first, last = entry.data_offsets
    if not 0 <= first <= last <= size - begin:
        raise UsageError(f"its bytes {first} to {last} are not in the file: the file is truncated")
    position = place_of(name, dtype, shape, contiguous_stride(shape), begin + first, last - first)
    if position.nbytes != last - first:
        raise UsageError(
            f"shape {shape} of {dtype} takes {position.nbytes} bytes, not {last - first}"
        )
    return dataclasses.replace(position, key=key)


# --- Writing incrementally ------------------------------------------------------------------------

# The file begins with the length of a header that does not exist yet, and with room for it.
# Payloads are appended after that room and can be read at once by their offset. Closing writes the
# header into the room, padded with spaces.

LARGEST_FILE = 1 << 30
_LEAST_ROOM = 64 << 10
_MOST_ROOM = 4 << 20
_METADATA = b'{"__metadata__":{"format":"pt","writer":"paritas"}'
_CACHED = 256 << 10  # bytes that stay in a processor's cache
_LONGEST_FILLER = 160  # the largest header entry of a filler, in bytes
_MOST_AT_ONCE = 1024  # the most buffers that systems accept in one call


class PackedPiece(NamedTuple):
    """A payload in a file; `begin` is an offset from the start of the file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def write_whole(file: io.FileIO, data: Any, nbytes: int) -> None:
    """Write all the bytes: the system may accept fewer in one call."""
    done = file.write(data)
    if done == nbytes:
        return
    rest = memoryview(data).cast("B")
    while done < nbytes:
        done += file.write(rest[done:]) or 0


def _write_all(file: io.FileIO, buffers: list[Any]) -> None:
    """Write buffers one after the other, in one system call where possible."""
    done = 0
    if len(buffers) > 1 and hasattr(os, "writev"):
        done = os.writev(file.fileno(), buffers)
    for data in buffers:
        length = data.nbytes if isinstance(data, np.ndarray) else len(data)
        if done < length:  # the system may accept fewer bytes than given
            rest = memoryview(data).cast("B")[done:] if done else data
            write_whole(file, rest, length - done)
        done = max(0, done - length)


def _write_length(file: io.FileIO, room: int) -> None:
    write_whole(file, (room - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little"), _LENGTH_BYTES)


def header_room(number: int) -> int:
    """Room for the header of a dump's n-th file: small at first, larger in large dumps."""
    return min(_LEAST_ROOM << min(number, 16), _MOST_ROOM)


class PackedFile:
    """One data file, open for appending.

    Small payloads are collected and written together by `flush`: a system call for each would take
    longer than writing its bytes.

    Attributes:
        end: bytes in the file, including those still to be flushed.
    """

    def __init__(self, path: Path, *, number: int = 0, largest: int = LARGEST_FILE) -> None:
        """Create the file and reserve its header, so that it can be closed on a full disk.

        Args:
            number: index of the file in the dump, from 0.
            largest: limit on payload bytes; a larger payload gets a file of its own.
        """
        self.path = path
        self._largest = largest
        self._file = io.FileIO(path, "xb")
        self._room = header_room(number)
        self._used = len(_METADATA)
        self._entries: list[bytes] = []
        self._keys: dict[str, int] = {}
        self._fillers = 0
        self._buffers: list[Any] = []  # to be flushed; the last entries, one each
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), 0, self._room)
            _write_length(self._file, self._room)
            self._file.seek(self._room)
        except BaseException:
            self._file.close()
            path.unlink(missing_ok=True)
            raise
        self.end = self._written = self._room

    def has_room(self, key: str, tensor: Tensor) -> bool:
        """Whether the values of a tensor fit into this file."""
        # Every character may need escaping; an extent has up to twenty digits.
        entry = 6 * len(key) + 22 * tensor.dim() + 3 * _LONGEST_FILLER
        if self._used + entry > self._room - _LENGTH_BYTES:
            return False
        filled = self.end - self._room
        return not filled or filled + tensor.nbytes <= self._largest

    def append(
        self, key: str, tensor: Tensor, data: Any, hasher: xxhash.xxh3_128 | None = None
    ) -> tuple[str, int]:
        """Write the values of a contiguous CPU tensor; return their key and offset.

        `data` is its `raw_bytes`; `hasher` is updated with them while they are written. If it
        fails, the partial write is undone.
        """
        if hasher is not None:
            self.flush()
        placed = self._add(key, tensor, data)
        self.flush(hasher)
        return placed

    def gather(self, key: str, tensor: Tensor, data: Any) -> tuple[str, int]:
        """Collect the values of a contiguous CPU tensor for `flush`; return their key and offset.

        `data` is its `raw_bytes`, which must not change until then. Calls `flush` when enough is
        collected.
        """
        placed = self._add(key, tensor, data)
        if self.end - self._written >= _CACHED:
            self.flush()  # while the bytes just hashed are in the cache
        return placed

    def _add(self, key: str, tensor: Tensor, data: Any) -> tuple[str, int]:
        dtype, nbytes = tensor.dtype, tensor.nbytes
        # Empty tensors need no alignment.
        over = self.end % dtype.itemsize if nbytes else 0
        if over:
            self._fillers += 1
            filler = bytes(dtype.itemsize - over)
            described = _describe_tensor(torch.uint8, (len(filler),))
            self._enter(f".filler.{self._fillers}", described, len(filler), filler)
        if key in self._keys:
            key = self._unique(key)
        begin = self.end
        self._enter(key, _describe_tensor(dtype, tensor.shape), nbytes, data)
        return key, begin

    def flush(self, hasher: xxhash.xxh3_128 | None = None) -> None:
        """Write what was collected; `hasher` is updated with the last payload.

        If that fails, the file ends after the last payload that was written completely.
        """
        buffers = self._buffers
        if not buffers:
            return
        try:
            # After an interruption the position of the file is unknown.
            self._file.seek(self._written)
            if hasher is not None:
                _write_all(self._file, buffers[:-1])
                self._write_hashing(buffers[-1], hasher)
            else:
                for first in range(0, len(buffers), _MOST_AT_ONCE):
                    _write_all(self._file, buffers[first : first + _MOST_AT_ONCE])
        except BaseException:
            self._undo()
            raise
        self._buffers = []
        self._written = self.end

    def close(self) -> None:
        """Flush, and write the header."""
        try:
            self.flush()
            self._file.truncate(self.end)  # a failed write may not have been undone
            _write_header(self._file, self._entries, self._room)
        finally:
            self._file.close()

    def _write_hashing(self, data: Any, hasher: xxhash.xxh3_128) -> None:
        """Hash each block just before it is written, while it is in the cache."""
        raw = memoryview(data).cast("B")
        for begin in range(0, len(raw), _CACHED):
            piece = raw[begin : begin + _CACHED]
            hasher.update(piece)
            write_whole(self._file, piece, len(piece))

    def _undo(self) -> None:
        """After a failure, keep only what was written completely."""
        reached = self._file.tell()
        buffers, self._buffers = self._buffers, []
        first = len(self._entries) - len(buffers)
        count = 0
        for data in buffers:
            nbytes = memoryview(data).nbytes
            if self._written + nbytes > reached:
                break
            self._written += nbytes
            count += 1
        self._used -= sum(len(entry) + 1 for entry in self._entries[first + count :])
        del self._entries[first + count :]
        self.end = self._written
        # If this fails, bytes remain after the last payload; no index line points to them.
        with contextlib.suppress(OSError):
            self._file.truncate(self.end)
            self._file.seek(self.end)

    def _enter(self, key: str, described: str, nbytes: int, data: Any) -> None:
        begin = self.end
        entry = _encode_entry(key, described, begin - self._room, nbytes)
        self._used += len(entry) + 1
        self._entries.append(entry)
        self._keys[key] = 1
        self._buffers.append(data)
        self.end = begin + nbytes

    def _unique(self, key: str) -> str:
        unique = key
        while unique in self._keys:
            self._keys[key] += 1
            unique = f"{key}@{self._keys[key]}"
        return unique


_encode = msgspec.json.Encoder().encode


@functools.lru_cache(maxsize=4096)
def _describe_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    name, extents = in_safetensors(dtype, shape)
    return f'"dtype":"{name}","shape":{extents}'


def _encode_entry(key: str, described: str, begin: int, nbytes: int) -> bytes:
    """The header entry of one payload; offsets count from the end of the header."""
    facts = f':{{{described},"data_offsets":[{begin},{begin + nbytes}]}}'
    return _encode(key) + facts.encode()


def _write_header(file: io.FileIO, entries: Iterable[bytes], room: int) -> None:
    header = b",".join((_METADATA, *entries)) + b"}"
    if len(header) > room - _LENGTH_BYTES:
        raise ValueError(
            f"a header of {len(header)} bytes does not fit into {room - _LENGTH_BYTES} bytes"
        )
    # The brace comes last: a header that begins with it is complete.
    file.seek(_LENGTH_BYTES + 1)
    rest = room - _LENGTH_BYTES - 1
    write_whole(file, header[1:].ljust(rest), rest)
    file.seek(_LENGTH_BYTES)
    write_whole(file, b"{", 1)


def is_complete(path: Path) -> bool:
    """Whether the file has its header."""
    with path.open("rb") as file:
        return file.read(_LENGTH_BYTES + 1)[_LENGTH_BYTES:] == b"{"


def complete(path: Path, pieces: Iterable[PackedPiece]) -> None:
    """Write the missing header of a file whose writer was killed; unknown bytes become filler."""
    ordered = sorted(pieces, key=lambda piece: (piece.begin, piece.nbytes))
    with io.FileIO(path, "r+b") as file:
        room = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES) or b"", "little")
        if room == _LENGTH_BYTES and not ordered:
            # The writer was killed while it created the file.
            room = _LEAST_ROOM
            file.truncate(room)
            file.seek(0)
            _write_length(file, room)
        size = file.seek(0, io.SEEK_END)
        if size < room or not _LEAST_ROOM <= room <= _MOST_ROOM:
            raise ValueError(f"{path} does not begin with a header length, or is too short for it")
        entries: list[bytes] = []
        end = room
        last = PackedPiece(".filler.end", torch.uint8, (0,), size, 0)
        for piece in (*ordered, last):
            if piece.begin < end:
                raise ValueError(f"{path}: {piece.key} begins at {piece.begin}, before byte {end}")
            if piece.begin > end:
                key, gap = f".filler.{len(entries)}", piece.begin - end
                entries.append(
                    _encode_entry(key, _describe_tensor(torch.uint8, (gap,)), end - room, gap)
                )
            described = _describe_tensor(piece.dtype, piece.shape)
            entries.append(_encode_entry(piece.key, described, piece.begin - room, piece.nbytes))
            end = piece.begin + piece.nbytes
        _write_header(file, entries, room)
