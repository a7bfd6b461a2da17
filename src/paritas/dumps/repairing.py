"""The headers of data files: given to those of a killed run, and held against the index."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from paritas.dumps.dtypes import in_safetensors, known_dtype, sketch_dtype, stored_dtype
from paritas.dumps.folders import is_data, volumes_of
from paritas.dumps.foreign.raw_values import Place
from paritas.dumps.foreign.safetensors_files import read_entries
from paritas.dumps.locks import LOCK, is_locked
from paritas.dumps.packing import Piece, complete, is_complete
from paritas.dumps.validating import check_payload, check_sketch
from paritas.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from paritas.dumps.foreign.torch_files import Unreadable
    from paritas.dumps.index import RankDump
    from paritas.dumps.records import Payload, Record
    from paritas.dumps.validating import Files

__all__ = ["complete_files", "header_problems"]


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


def header_problems(found: RankDump, files: Files) -> list[str]:
    """What the headers of a rank's data files say otherwise than its index does.

    The index alone is read here; the headers are for other programs. Those that a run did not
    come to write are none.
    """
    pieces = _pieces(found, files)
    problems: list[str] = []
    for path in (one for volume in volumes_of(found.folder) for one in sorted(volume.iterdir())):
        if not is_data(path) or not (found.state == "closed" or is_complete(path)):
            continue
        name = path.relative_to(found.folder.parent).as_posix()
        try:
            entries = dict(read_entries(path, name))
        except (UsageError, OSError) as error:
            problems.append(f"{name}: {error}")
            continue
        own = pieces.get(name, {}).values()
        wrong = [piece.key for piece in own if not _describes(entries.get(piece.key), piece)]
        if wrong:
            problems.append(
                f"{name}: its header does not describe {len(wrong)} of {len(own)} values as the "
                f"index does; the first is {wrong[0]!r}"
            )
    return problems


def _describes(entry: Place | Unreadable | None, piece: Piece) -> bool:
    """Whether a header has the values of a piece where they are, as what they are."""
    if not isinstance(entry, Place) or (entry.begin, entry.nbytes) != (piece.begin, piece.nbytes):
        return False
    told = in_safetensors(known_dtype(entry.dtype), entry.shape)
    return told == in_safetensors(piece.dtype, piece.shape)


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
