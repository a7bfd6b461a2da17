"""Reading the index of a rank, whatever state it is in; nothing is used unchecked."""

from __future__ import annotations

import math
import os
import re
import stat
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from paritas.compat.ge_tensors import read_min_max
from paritas.errors import UsageError
from paritas.files.dtypes import bytes_needed, known_dtype, sketch_dtype, stored_dtype
from paritas.files.folders import INDEX, LOCK, RANK, index_home, is_locked, read_header, volumes_of
from paritas.files.npy_files import array_place, read_npy_header, summary_of
from paritas.files.records import FORMAT, RankDump, Record, State
from paritas.files.trees import Problems

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from paritas.files.records import Header, Layout, Payload
    from paritas.numerics.statistics import Statistics


# --- Checking an index ----------------------------------------------------------------------------

# Everything here is arithmetic on Python integers, before any memory is allocated or file is read.

_MOST_ELEMENTS = 2**63 - 1
_DIGEST = re.compile(r"[0-9a-f]{32}")


class DumpFiles:
    """The files of a dump, by the names in its index. Nothing outside its folder belongs to it."""

    def __init__(self, root: Path) -> None:
        """`root` is the dump's folder. Ascend's old tree has its index in another folder."""
        self._root = root.resolve()
        self._home = index_home(root).resolve()
        self._found: dict[str, tuple[Path, int]] = {}

    def find(self, name: str, least: int) -> Path:
        """The file of that name, with at least so many bytes."""
        path, size = self._found.get(name, (None, -1))
        if path is None or size < least:
            # A file that is being written may have grown.
            path, size = self._found[name] = self._locate(name)
        if size < least:
            raise UsageError(f"{name} ends at byte {size}, before byte {least}: it is truncated")
        return path

    def _locate(self, name: str) -> tuple[Path, int]:
        pure = PurePosixPath(name)
        odd = pure.is_absolute() or ".." in pure.parts or not pure.parts
        if odd or any(letter in name for letter in "\\:\0"):
            raise UsageError(f"{name!r} is not a path inside the dump")
        root = self._home if RANK.fullmatch(pure.parts[0]) else self._root
        try:
            path = root.joinpath(*pure.parts).resolve(strict=True)
            facts = os.stat(path)  # noqa: PTH116  (one call, on a path without links)
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"{name} is missing: {reason}") from error
        if not path.is_relative_to(root):
            raise UsageError(f"{name} is a link to {path}, outside the dump")
        if not stat.S_ISREG(facts.st_mode):
            raise UsageError(f"{name} is not a regular file")
        return path, facts.st_size


def check_record(record: Record, rank: int) -> None:
    """Refuse a record that contradicts itself, or belongs to another rank."""
    if record.rank != rank:
        raise UsageError(f"it belongs to rank {record.rank}")
    if record.id != record.site.id:
        raise UsageError(f"its id is {record.id!r}, but its site's id is {record.site.id!r}")
    if min(record.sequence, record.step) < 0:
        raise UsageError(f"its sequence {record.sequence} or step {record.step} is negative")
    if record.digest and _DIGEST.fullmatch(record.digest) is None:
        raise UsageError(f"its digest is {record.digest[:64]!r}, not 32 hexadecimal digits")
    shape = () if record.tensor is None else record.tensor.shape
    if min(shape, default=0) < 0 or math.prod(shape) > _MOST_ELEMENTS:
        raise UsageError(f"its shape {shape} is not valid")


def check_payload(record: Record, files: DumpFiles, layout: Layout) -> Path:
    """The file with the values of a record, after checking that both agree."""
    payload, facts = record.payload, record.tensor
    if payload is None:
        raise UsageError("it has no values: only statistics were recorded")
    if layout == "msit":
        return files.find(payload.file, max(payload.nbytes, 0))
    if facts is None:
        raise UsageError(f"it is not a tensor: its value is {record.value}")
    dtype = stored_dtype(known_dtype(facts.dtype))
    _check_extent(payload, dtype.itemsize, bytes_needed(dtype, payload.shape))
    fits = len(payload.shape) == len(facts.shape) and all(
        kept in (extent, 1) for kept, extent in zip(payload.shape, facts.shape, strict=True)
    )
    if not fits or math.prod(facts.shape) > _MOST_ELEMENTS:
        raise UsageError(f"the stored shape {payload.shape} does not expand to {facts.shape}")
    return files.find(payload.file, payload.begin + payload.nbytes)


def check_sketch(record: Record, files: DumpFiles) -> tuple[Path, Payload]:
    """The file with the sketch of a record, and its place in it."""
    sketch = record.sketch
    if sketch is None:
        raise UsageError("it has no sketch")
    dtype = sketch_dtype(sketch)
    _check_extent(sketch, dtype.itemsize, bytes_needed(dtype, sketch.shape))
    return files.find(sketch.file, sketch.begin + sketch.nbytes), sketch


def _check_extent(payload: Payload, itemsize: int, needed: int) -> None:
    if min(payload.shape, default=0) < 0 or needed != payload.nbytes:
        raise UsageError(
            f"{payload.nbytes} bytes are stored, but shape {payload.shape} of {itemsize} bytes "
            f"each needs {needed}"
        )
    if payload.begin < 0:
        raise UsageError(f"its offset {payload.begin} is negative")


# --- Minimum and maximum in place of tensors ------------------------------------------------------

# A script distributed with msit replaces tensors of a dump by their minimum and maximum:
# `{name}.npy` by `{name}_min_max.npy`, a pair; a file of Ascend's graph engine by
# `{file}_min_max.npz`, a list of pairs for the operator's inputs and one for its outputs.

_PLAIN, _ARCHIVE = "_min_max.npy", "_min_max.npz"


def read_extremes(payload: Payload, files: DumpFiles) -> Statistics | None:
    """The minimum and maximum that replaced a missing payload, if they can be read."""
    try:
        if payload.file.endswith(".npy"):
            name = payload.file.removesuffix(".npy") + _PLAIN
            path = files.find(name, 0)
            with path.open("rb") as file:
                place = array_place(name, read_npy_header(file), path.stat().st_size)
            return summary_of(path, place)
        found = read_min_max(files.find(payload.file + _ARCHIVE, 0))
    except (UsageError, OSError):
        return None
    return next((one.statistics for one in found if f"{one.kind}.{one.index}" == payload.key), None)


# --- The index ------------------------------------------------------------------------------------

LONGEST_LINE = 4 << 20
_MOST_PROBLEMS = 20
_DECODER = msgspec.json.Decoder(Record)


class _IndexLine(NamedTuple):
    """One line of an index."""

    number: int
    text: bytes
    is_whole: bool
    is_last: bool


class _RankProblems(Problems):
    """The problems of a rank; `replaced` counts tensors replaced by their minimum and maximum."""

    replaced = 0


def read_rank(rank: int, folder: Path, files: DumpFiles) -> RankDump:
    """Read what a rank recorded, and check that its files exist."""
    # Before the index is read: a run that ends meanwhile should count as unfinished.
    is_written = is_locked(folder / LOCK)
    header = read_header(folder)
    if header.format != FORMAT:
        raise UsageError(
            f"{folder} has format {header.format}, but this version of paritas reads {FORMAT}: "
            f"use the version that wrote it"
        )
    if header.rank != rank:
        raise UsageError(f"{folder} has the header of rank {header.rank}")
    state: State = "being written" if is_written else "closed" if header.closed else "ended early"
    damage = _RankProblems(_MOST_PROBLEMS)
    records: list[Record] = []
    for volume in volumes_of(folder):
        records += _read_index(volume, header, files, damage, is_written=is_written)
    problems = damage.all()
    if damage.replaced:
        note = f"{damage.replaced} tensors were replaced by their minimum and maximum"
        header = msgspec.structs.replace(header, notes=(*header.notes, note))
    if state == "being written":
        problems.append(f"it is still being written; {len(records)} records can be read so far")
    elif state == "ended early":
        problems.append(
            f"it was not closed, so the run ended early; {len(records)} records can be read"
        )
    elif header.records != len(records):
        problems.append(f"{header.records} records were written, but {len(records)} can be read")
    return RankDump(rank, folder, header, state, records, problems)


def _read_index(
    volume: Path, header: Header, files: DumpFiles, damage: _RankProblems, *, is_written: bool
) -> list[Record]:
    """The records of one index; damaged lines are reported and skipped."""
    path = volume / INDEX
    records: list[Record] = []
    latest = -1
    try:
        with path.open("rb") as file:
            for line in _read_lines(file):
                where = f"{volume.name}/{INDEX}, line {line.number}"
                if not line.is_whole and line.is_last:
                    if not is_written:  # otherwise it is the record being written
                        damage.add(f"{where} is truncated: the record being written was lost")
                    continue
                try:
                    record = _decode_record(line, header.rank, latest)
                except UsageError as error:
                    damage.add(f"{where} is damaged: {error}")
                    continue
                latest = record.sequence
                records.append(_check_present(record, files, header.layout, where, damage))
    except OSError as error:
        if not (is_written and isinstance(error, FileNotFoundError)):  # its step was dropped
            damage.add(f"{volume.name}/{INDEX} cannot be read: {error.strerror or error}")
    return records


def _read_lines(file: BinaryIO) -> Iterator[_IndexLine]:
    """Lines of bounded length; the rest of a longer one is skipped."""
    number = 0
    while text := file.readline(LONGEST_LINE):
        number += 1
        is_whole = text.endswith(b"\n")
        rest = text
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST_LINE)
        yield _IndexLine(number, text, is_whole, is_last=not rest)


def _decode_record(line: _IndexLine, rank: int, latest: int) -> Record:
    if not line.is_whole:
        raise UsageError(f"it is longer than {LONGEST_LINE} bytes")
    try:
        record = _DECODER.decode(line.text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(str(error)) from error
    check_record(record, rank)
    if record.sequence <= latest:
        raise UsageError(f"record {record.sequence} comes after record {latest}")
    return record


def _check_present(
    record: Record, files: DumpFiles, layout: Layout, where: str, damage: _RankProblems
) -> Record:
    """Check a record's files; a missing tensor may be replaced by its minimum and maximum."""
    try:
        if record.payload is not None:
            check_payload(record, files, layout)
        if record.sketch is not None:
            check_sketch(record, files)
    except UsageError as error:
        summed_up = None if layout == "packed" else _replace_by_extremes(record, files)
        if summed_up is not None:
            damage.replaced += summed_up.tensor is not None
            return summed_up
        damage.add(f"{where}, {record.id}: {error}")
    return record


def _replace_by_extremes(record: Record, files: DumpFiles) -> Record | None:
    """The record without values, if their minimum and maximum were stored instead.

    Statistics in the index say more, so they stay.
    """
    if record.payload is None:
        return None
    statistics = read_extremes(record.payload, files)
    if statistics is None:
        return None
    if record.tensor is None:  # a number, which the index holds as text
        return msgspec.structs.replace(record, payload=None)
    return msgspec.structs.replace(record, payload=None, statistics=record.statistics or statistics)
