"""Bytes of files as tensors: mapped into memory where that is worth it, read where it is not.

A mapping costs no memory of its own: the pages are those of the system's file cache, which it may
take back at any time. For few bytes it takes longer to set up and to take down than to read them.

A file must not shrink while it is mapped: whoever touches a page that is gone is ended by the
system. Writers of dumps append to files, or remove them, which leaves a mapping whole.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
import warnings
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from paritas.dumps.checksums import Checked
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["LEAST_MAPPED", "OpenFiles", "typed"]

# Measured: up to here, reading is quicker than mapping.
LEAST_MAPPED = 256 << 10
# To go through: mapped, and so large that to map them takes no time beside it.
_BLOCK = 16 << 20
_MOST_OPEN = 16
# A mapping of Python's keeps a descriptor, and a process has 1024 of them by default.
_MOST_MAPPED = 256

_preadv: Any = getattr(os, "preadv", None)
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class OpenFiles:
    """Reads from files, of which it keeps a few open. Threads may share it.

    Attributes:
        checked: which bytes of them fit their checksum.
    """

    def __init__(self) -> None:
        self.checked = Checked()
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _Descriptor] = OrderedDict()

    def read(self, path: str | os.PathLike[str], begin: int, nbytes: int, name: str) -> Tensor:
        """Bytes of a file, in memory of their own.

        Args:
            name: what the file is called in messages.

        Raises:
            UsageError: the file ends before them.
            OSError: the file cannot be read.
        """
        file = self._open(path, begin + nbytes, name)
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        if nbytes < LEAST_MAPPED:
            # Torch takes longer to make memory than Python, where it is little.
            few = bytearray(nbytes)
            file.fill(memoryview(few), begin, name)
            return torch.frombuffer(few, dtype=torch.uint8)
        raw = torch.empty(nbytes, dtype=torch.uint8)
        file.fill(raw.numpy().data, begin, name)
        return raw

    def view(
        self, path: str | os.PathLike[str], begin: int, nbytes: int, name: str, *, itemsize: int
    ) -> Tensor:
        """Bytes of a file, without memory of their own if they are many and lie as torch needs it.

        Whoever writes into them writes into a copy; the file stays as it is.

        Args:
            name: what the file is called in messages.
            itemsize: the numbers that they are must begin at a multiple of their own size.

        Raises:
            UsageError: the file ends before them.
            OSError: the file cannot be read.
        """
        if nbytes < LEAST_MAPPED or begin % itemsize or len(_mapped) >= _MOST_MAPPED:
            return self.read(path, begin, nbytes, name)
        file = self._open(path, begin + nbytes, name)
        skipped = begin % mmap.ALLOCATIONGRANULARITY
        try:
            # It holds the length against the file's own: nothing is mapped that is not there.
            found = mmap.mmap(
                file.number, skipped + nbytes, access=mmap.ACCESS_COPY, offset=begin - skipped
            )
        except (OSError, ValueError):
            # A file system without mappings, too many of them, or a file that has just shrunk.
            return self.read(path, begin, nbytes, name)
        _mapped.add(found)
        return torch.frombuffer(found, dtype=torch.uint8, offset=skipped, count=nbytes)

    def blocks(
        self, path: str | os.PathLike[str], begin: int, nbytes: int, name: str
    ) -> Iterator[memoryview]:
        """Bytes of a file, one block after the other: however many there are, few are held.

        Raises:
            UsageError: the file ends before them.
            OSError: the file cannot be read.
        """
        end = begin + nbytes
        for place in range(begin, end, _BLOCK):
            block = self.view(path, place, min(_BLOCK, end - place), name, itemsize=1)
            yield block.numpy().data

    def _open(self, path: str | os.PathLike[str], least: int, name: str) -> _Descriptor:
        """The file, which is still the one of that name and has so many bytes at least."""
        key = os.fspath(path)
        facts = os.stat(key)  # noqa: PTH116  (asked for each tensor)
        if facts.st_size < least:
            raise UsageError(
                f"{name} ends at byte {facts.st_size}, before byte {least}: it was cut off"
            )
        with self._lock:
            found = self._files.get(key)
            if found is not None and found.identity == (facts.st_dev, facts.st_ino):
                self._files.move_to_end(key)
                return found
        if not stat.S_ISREG(facts.st_mode):
            raise UsageError(f"{name} is no file")
        opened = _Descriptor(key)
        with self._lock:
            self._files[key] = opened
            self._files.move_to_end(key)
            if len(self._files) > _MOST_OPEN:
                # Who still reads from it keeps it open.
                self._files.popitem(last=False)
        return opened


class _Descriptor:
    """A file that is open for as long as somebody holds this."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        facts = os.fstat(self.number)
        self.identity = (facts.st_dev, facts.st_ino)
        self._lock = threading.Lock()

    def __del__(self) -> None:
        number = getattr(self, "number", None)
        if number is not None:
            os.close(number)

    def fill(self, room: memoryview, begin: int, name: str) -> None:
        """Read as many bytes as there is room for."""
        done = 0
        while done < len(room):
            count = self._take(room[done:], begin + done)
            if not count:
                raise UsageError(f"{name} was cut off while it was read")
            done += count

    def _take(self, room: memoryview, begin: int) -> int:
        if _preadv is not None:
            return int(_preadv(self.number, [room], begin))
        with self._lock:  # where the system cannot read at a place without going there
            os.lseek(self.number, begin, os.SEEK_SET)
            data = os.read(self.number, len(room))
            room[: len(data)] = data
            return len(data)


def typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers, in the same memory."""
    if dtype is not torch.complex32:
        return raw.view(dtype)
    with warnings.catch_warnings():
        # Torch warns that few operators know half complex numbers. None is asked for any here.
        warnings.simplefilter("ignore", UserWarning)
        return raw.view(dtype)
