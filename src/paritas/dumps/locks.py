"""Whether a rank's part of a dump is still being written: the system knows, even after a kill."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows: there nobody can tell, and nothing is refused
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCK", "Lock", "alone_in", "is_locked"]

LOCK = ".lock"


class Lock:
    """Held by the process that writes, until it lets go or ends in whatever way.

    Attributes:
        is_held: whether it was to be had; otherwise another process has it.
    """

    def __init__(self, path: Path) -> None:
        """Take it; a file system without locks lets it pass."""
        self._file: BinaryIO | None = path.open("wb")
        self.is_held = _try_lock(self._file)

    def release(self) -> None:
        """Let go, also on behalf of processes that were forked meanwhile."""
        if self._file is None:
            return
        if fcntl is not None:
            with contextlib.suppress(OSError):  # the file system has no locks
                fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()
        self._file = None


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let one process at a time do what is done inside; a file system without locks lets all."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # which lets go


def is_locked(path: Path) -> bool:
    """Whether a process that still runs holds it."""
    try:
        with path.open("rb") as file:
            return not _try_lock(file)
    except OSError:
        return False


def _try_lock(file: BinaryIO) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return True
    return True
