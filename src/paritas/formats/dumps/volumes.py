"""The index and the data files of one folder of a dump."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from typing import TYPE_CHECKING, Any

import xxhash

from paritas.formats.files.records import INDEX, Payload, Record, data_name
from paritas.formats.files.safetensors_files import PackedFile, write_whole
from paritas.formats.files.tensor_bytes import digest_of, raw_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor


_LONGEST_KEY = 1000
_LARGE = 1 << 20
_GLIMPSE = 4096


class Volume:
    """The index and the data files of one folder: of a rank, or of one of its steps.

    Attributes:
        files: all files made, the index first.
        records: the number of lines in the index.
    """

    def __init__(self, root: Path, folder: Path, largest: int) -> None:
        self.folder = folder
        self.files = [folder / INDEX]
        self.records = 0
        self._root = root
        self._name = ""  # of the current data file, in the index
        self._largest = largest
        self._data: PackedFile | None = None
        self._places: dict[str, Payload] = {}
        self._glimpses: set[tuple[int, int]] = set()
        self._index = io.FileIO(folder / INDEX, "xb")
        self._index_end = 0

    def place_of(self, digest: str) -> Payload | None:
        """Where bytes with that digest are."""
        return self._places.get(digest)

    def put(self, key: str, stored: Tensor, hashed: str = "") -> tuple[Payload, str, bool]:
        """Store bytes, once `flush` is called, unless they are stored already.

        Args:
            hashed: their digest, or "" to compute it. For large tensors it is computed while they
                are written, if possible: a separate pass takes a third longer.

        Returns:
            Where they are, with the shape they were written with; their digest; and whether they
            are new.
        """
        data, nbytes = raw_bytes(stored), stored.nbytes
        glimpse = _glimpse(data) if nbytes >= _LARGE else None
        if not hashed and (glimpse is None or glimpse in self._glimpses):
            hashed = digest_of(data)  # these bytes may be stored already
        if hashed:
            payload = self._places.get(hashed)
            if payload is not None:
                return payload, hashed, False
        key = key[:_LONGEST_KEY]
        file = self._data
        if file is None or not file.has_room(key, stored):
            file = self._next_file()
        if hashed:
            key, begin = file.gather(key, stored, data)
        else:
            hasher = xxhash.xxh3_128()
            key, begin = file.append(key, stored, data, hasher)
            hashed = hasher.hexdigest()
        if glimpse is not None:
            self._glimpses.add(glimpse)
        payload = self._places[hashed] = Payload(
            file=self._name, nbytes=nbytes, shape=tuple(stored.shape), key=key, begin=begin
        )
        return payload, hashed, True

    def forget_old(self, most: int) -> None:
        """Forget all but the latest digests; older contents would be written again."""
        if len(self._places) > most:
            self._places = dict(itertools.islice(self._places.items(), most // 2, None))

    def flush(self) -> None:
        """Write pending bytes; index lines may point to them only afterwards."""
        if self._data is not None:
            self._data.flush()

    def holds(self, record: Record) -> bool:
        """Whether the bytes of a record are in the files, after a failed write."""
        data = self._data
        return data is None or all(
            location is None
            or location.file != self._name
            or location.begin + location.nbytes <= data.end
            for location in (record.payload, record.sketch)
        )

    def enter(self, lines: Sequence[bytes]) -> None:
        """Append lines to the index; if that fails, as many whole lines as possible."""
        try:
            self._write_lines(b"".join(lines), len(lines))
        except OSError:
            if len(lines) == 1:
                raise
            for line in lines:
                self._write_lines(line, 1)

    def _write_lines(self, text: bytes, count: int) -> None:
        try:
            write_whole(self._index, text, len(text))
        except BaseException:
            with contextlib.suppress(OSError):
                self._index.truncate(self._index_end)
                self._index.seek(self._index_end)
            raise
        self._index_end += len(text)
        self.records += count

    def close(self) -> None:
        """Write the header of the last data file."""
        self._index.close()
        self._close_data()

    def _next_file(self) -> PackedFile:
        self.flush()  # the old file may still have pending bytes
        self._close_data()
        number = len(self.files) - 1
        path = self.folder / data_name(number)
        self._data = PackedFile(path, number=number, largest=self._largest)
        self._name = path.relative_to(self._root).as_posix()
        self.files.append(path)
        return self._data

    def _close_data(self) -> None:
        data, self._data = self._data, None
        if data is not None:
            data.close()

    def see_onto_disk(self) -> None:
        """Wait until everything is on disk."""
        # One by one: at the end of a process no thread can start.
        for path in self.files:
            with path.open("r+b") as file:
                os.fsync(file.fileno())
        if hasattr(os, "O_DIRECTORY"):
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _glimpse(data: Any) -> tuple[int, int]:
    """The length, and a hash of some bytes at the beginning, middle and end.

    Tensors with different glimpses differ; those with equal ones must be hashed completely.
    """
    raw = memoryview(data).cast("B")
    middle, last = len(raw) // 2, len(raw) - _GLIMPSE
    hasher = xxhash.xxh3_64()
    for begin in (0, middle, last):
        hasher.update(raw[begin : begin + _GLIMPSE])
    return len(raw), hasher.intdigest()
