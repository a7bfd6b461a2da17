"""What an index says is believed only once it is checked: anybody may have written it.

Everything here is arithmetic on Python's integers, before any memory is taken or file is read.
"""

from __future__ import annotations

import math
import os
import re
import stat
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from paritas.dumps.dtypes import bytes_needed, known_dtype, sketch_dtype, stored_dtype
from paritas.dumps.folders import RANK, index_home
from paritas.errors import UsageError

if TYPE_CHECKING:
    from paritas.dumps.records import Layout, Payload, Record

__all__ = ["Files", "check_payload", "check_record", "check_sketch"]

_MOST_ELEMENTS = 2**63 - 1
_DIGEST = re.compile(r"[0-9a-f]{32}")


class Files:
    """The files of a dump, by the names that its index gives them."""

    def __init__(self, root: Path) -> None:
        """`root` is the folder of the dump; nothing outside of it is a part of it.

        What Ascend's old tree has no room for lies in the folder of the index.
        """
        self._root = root.resolve()
        self._home = index_home(root).resolve()
        self._found: dict[str, tuple[Path, int]] = {}

    def find(self, name: str, least: int) -> Path:
        """The file of that name, which has so many bytes at least.

        Raises:
            UsageError: there is none, it is too short, or it is none of this dump.
        """
        path, size = self._found.get(name, (None, -1))
        if path is None or size < least:
            # A file that is being written may have grown since.
            path, size = self._found[name] = self._locate(name)
        if size < least:
            raise UsageError(f"{name} ends at byte {size}, before byte {least}: it was cut off")
        return path

    def _locate(self, name: str) -> tuple[Path, int]:
        pure = PurePosixPath(name)
        odd = pure.is_absolute() or ".." in pure.parts or not pure.parts
        if odd or any(letter in name for letter in "\\:\0"):
            raise UsageError(f"{name!r} is no file inside the dump")
        root = self._home if RANK.fullmatch(pure.parts[0]) else self._root
        try:
            path = root.joinpath(*pure.parts).resolve(strict=True)
            facts = os.stat(path)  # noqa: PTH116  (asked once, of a path without links)
        except (OSError, RuntimeError) as error:
            raise UsageError(f"{name} is missing: {_reason(error)}") from error
        if not path.is_relative_to(root):
            raise UsageError(f"{name} is a link to {path}, outside of the dump")
        if not stat.S_ISREG(facts.st_mode):
            raise UsageError(f"{name} is no file")
        return path, facts.st_size


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def check_record(record: Record, rank: int) -> None:
    """Refuse a line that contradicts itself, or is another rank's."""
    if record.rank != rank:
        raise UsageError(f"it is of rank {record.rank}")
    if record.id != record.site.id:
        raise UsageError(f"its id is {record.id!r}, and its site's is {record.site.id!r}")
    if min(record.sequence, record.step) < 0:
        raise UsageError(f"its sequence is {record.sequence}, its step {record.step}")
    if record.digest and _DIGEST.fullmatch(record.digest) is None:
        raise UsageError(f"its digest is {record.digest[:64]!r}, not 32 hexadecimal digits")
    facts = record.tensor
    if facts is None:
        return
    if min(facts.shape, default=0) < 0 or math.prod(facts.shape) > _MOST_ELEMENTS:
        raise UsageError(f"its shape is {facts.shape}")


def check_payload(record: Record, files: Files, layout: Layout) -> Path:
    """The file with the values of a record, where the record and the file agree.

    Raises:
        UsageError: there are no values, or not those that the index promises.
    """
    payload, facts = record.payload, record.tensor
    if payload is None:
        raise UsageError("it has no values: statistics are all that was recorded")
    if layout == "msit":
        return files.find(payload.file, max(payload.nbytes, 0))
    if facts is None:
        raise UsageError(f"it is no tensor: its value is {record.value}")
    dtype = stored_dtype(known_dtype(facts.dtype))
    _check_extent(payload, dtype.itemsize, bytes_needed(dtype, payload.shape))
    fits = len(payload.shape) == len(facts.shape) and all(
        kept in (extent, 1) for kept, extent in zip(payload.shape, facts.shape, strict=True)
    )
    if not fits or math.prod(facts.shape) > _MOST_ELEMENTS:
        raise UsageError(f"shape {payload.shape} is stored, which does not make {facts.shape}")
    return files.find(payload.file, payload.begin + payload.nbytes)


def check_sketch(record: Record, files: Files) -> tuple[Path, Payload]:
    """The file with the sketch of a record, and where in it that is."""
    sketch = record.sketch
    if sketch is None:
        raise UsageError("it has no sketch")
    dtype = sketch_dtype(sketch)
    _check_extent(sketch, dtype.itemsize, bytes_needed(dtype, sketch.shape))
    return files.find(sketch.file, sketch.begin + sketch.nbytes), sketch


def _check_extent(payload: Payload, itemsize: int, needed: int) -> None:
    if min(payload.shape, default=0) < 0 or needed != payload.nbytes:
        raise UsageError(
            f"{payload.nbytes} bytes are stored as shape {payload.shape} of {itemsize} bytes each, "
            f"which is {needed}"
        )
    if payload.begin < 0:
        raise UsageError(f"its bytes begin at {payload.begin}")
