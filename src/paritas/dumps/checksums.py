"""Which bytes of which files were held against their checksum already."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Checked"]

# Bytes that are sooner hashed than remembered.
_FEW = 1 << 16
# Some 300 bytes each: beyond that it begins anew, so that memory does not grow with the dump.
_MOST_KEPT = 1 << 16


class Checked:
    """Remembers what fits its checksum, so that bytes of many records are read once for it.

    What does not fit is not remembered, nor what was written to since. Threads may share it.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], None] = {}

    def misfit(
        self,
        path: str | os.PathLike[str],
        begin: int,
        nbytes: int,
        checksum: str | int,
        compute: Callable[[], str | int],
    ) -> str | int | None:
        """The checksum that these bytes have, or None where it is the one they should have.

        Args:
            checksum: the one they should have.
            compute: finds the one they have.

        Raises:
            OSError: the file cannot be read.
        """
        if nbytes < _FEW:
            found = compute()
            return None if found == checksum else found
        facts = os.stat(path)  # noqa: PTH116  (asked for each tensor)
        place = (os.fspath(path), facts.st_ino, facts.st_mtime_ns, facts.st_size)
        key = (*place, begin, nbytes, checksum)
        if key in self._known:
            return None
        found = compute()
        if found != checksum:
            return found
        if len(self._known) >= _MOST_KEPT:
            self._known.clear()
        self._known[key] = None
        return None
