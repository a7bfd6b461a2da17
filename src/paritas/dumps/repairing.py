"""Giving the data files of a killed run the headers that closing would have written."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from paritas.dumps.dtypes import known_dtype, sketch_dtype, stored_dtype
from paritas.dumps.folders import is_data, volumes_of
from paritas.dumps.locks import LOCK, is_locked
from paritas.dumps.packing import Piece, complete, is_complete
from paritas.dumps.validating import check_payload, check_sketch
from paritas.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from paritas.dumps.index import RankDump
    from paritas.dumps.records import Payload, Record
    from paritas.dumps.validating import Files

__all__ = ["complete_files"]


def complete_files(found: RankDump, files: Files) -> tuple[list[Path], list[str]]:
    """Complete what data files of a rank lack their header; which were, and what hindered others.

    Raises:
        UsageError: the rank is still being written.
    """
    if is_locked(found.folder / LOCK):
        raise UsageError(f"{found.folder} is still being written: wait, or end its process")
    lacking = [
        path
        for volume in volumes_of(found.folder)
        for path in sorted(volume.iterdir())
        if is_data(path) and not is_complete(path)
    ]
    pieces = _pieces(found, files) if lacking else {}
    named = {record.payload.file for record in found.records if record.payload is not None}
    mended: list[Path] = []
    problems: list[str] = []
    for path in lacking:
        name = path.relative_to(found.folder.parent).as_posix()
        if name in named - pieces.keys():
            problems.append(f"{name} was not repaired: nothing that the index has in it is there")
            continue
        try:
            complete(path, pieces.get(name, {}).values())
            mended.append(path)
        except (ValueError, OSError) as error:
            problems.append(f"{name} was not repaired: {error}")
    return mended, problems


def _pieces(found: RankDump, files: Files) -> dict[str, dict[tuple[int, str], Piece]]:
    """What the index has in each file; of records that share bytes, the one that wrote them."""
    pieces: dict[str, dict[tuple[int, str], Piece]] = {}
    for record in found.records:
        for payload, dtype in _payloads(record, files):
            piece = Piece(payload.key, dtype, payload.shape, payload.begin, payload.nbytes)
            pieces.setdefault(payload.file, {}).setdefault((payload.begin, payload.key), piece)
    return pieces


def _payloads(record: Record, files: Files) -> list[tuple[Payload, torch.dtype]]:
    """The payloads that are there in full."""
    there: list[tuple[Payload, torch.dtype]] = []
    # What is not was listed among the problems when the index was read.
    if record.payload is not None and record.tensor is not None:
        with contextlib.suppress(UsageError):
            check_payload(record, files, "packed")
            there.append((record.payload, stored_dtype(known_dtype(record.tensor.dtype))))
    if record.sketch is not None:
        with contextlib.suppress(UsageError):
            sketch = check_sketch(record, files)[1]
            there.append((sketch, sketch_dtype(sketch)))
    return there
