"""The index and the data files of one folder, while they are written."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from typing import TYPE_CHECKING, Any

import xxhash

from paritas.dumps.dtypes import digest_of, raw_bytes
from paritas.dumps.folders import INDEX, data_name
from paritas.dumps.packing import PackedFile, write_whole
from paritas.dumps.records import Payload

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

__all__ = ["Volume"]

_LONGEST_KEY = 1000
_LARGE = 1 << 20
_GLIMPSE = 4096


class Volume:
    """The index and the data files of one folder: of a rank, or of one step of it.

    Attributes:
        files: all that were made, the index first.
        records: how many lines the index has.
    """

    def __init__(self, root: Path, folder: Path, largest: int) -> None:
        self.folder = folder
        self.files = [folder / INDEX]
        self.records = 0
        self._root = root
        self._name = ""  # of the present data file, in the index
        self._largest = largest
        self._data: PackedFile | None = None
        self._places: dict[str, Payload] = {}
        self._glimpses: set[tuple[int, int]] = set()
        self._index = io.FileIO(folder / INDEX, "xb")
        self._index_end = 0

    def place_of(self, digest: str) -> Payload | None:
        """Where bytes of that digest are."""
        return self._places.get(digest)

    def put(self, key: str, stored: Tensor, hashed: str = "") -> tuple[Payload, str, bool]:
        """See to it that bytes are in the data, once `flush` is called.

        Args:
            hashed: their digest, or "" to have it found out. Of large tensors it is, where it can
                be, while they are written: to go through them twice takes a third longer.

        Returns:
            Where they are, of the shape that they were written with; their digest; and whether
            that was just now.
        """
        data, nbytes = raw_bytes(stored), stored.nbytes
        glimpse = _glimpse(data) if nbytes >= _LARGE else None
        if not hashed and (glimpse is None or glimpse in self._glimpses):
            hashed = digest_of(data)  # these bytes may be there already
        if hashed:
            place = self._places.get(hashed)
            if place is not None:
                return place, hashed, False
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
        place = self._places[hashed] = Payload(
            file=self._name, nbytes=nbytes, shape=tuple(stored.shape), key=key, begin=begin
        )
        return place, hashed, True

    def forget_old(self, most: int) -> None:
        """Remember the places of so many contents: those of older ones would be written again."""
        if len(self._places) > most:
            self._places = dict(itertools.islice(self._places.items(), most // 2, None))

    def flush(self) -> None:
        """Write the bytes that wait; no line may point to them before."""
        if self._data is not None:
            self._data.flush()

    def holds(self, place: Payload | None) -> bool:
        """Whether bytes that were to be there are, after a failure to write."""
        if place is None or place.file != self._name or self._data is None:
            return True
        return place.begin + place.nbytes <= self._data.end

    def enter(self, lines: Sequence[bytes]) -> None:
        """Append lines to the index; if not all can be, those that can, and never half of one."""
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
        """Give the last data file its header."""
        self._index.close()
        self._close_data()

    def _next_file(self) -> PackedFile:
        self.flush()  # of a file that could not take all, what it took is still asked for
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
        """Wait until the disk has it."""
        # One by one: a dump may be closed at the end of the process, when no thread can start.
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
    """A part of the bytes at the beginning, the middle and the end.

    Two tensors that differ in it are different; only of those that do not must all be looked at to
    tell whether they are.
    """
    whole = memoryview(data).cast("B")
    middle, last = len(whole) // 2, len(whole) - _GLIMPSE
    hasher = xxhash.xxh3_64()
    for begin in (0, middle, last):
        hasher.update(whole[begin : begin + _GLIMPSE])
    return len(whole), hasher.intdigest()
