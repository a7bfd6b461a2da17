"""Read a dump: one that was closed, one whose run was killed, or one still being written."""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
import xxhash

from paritas.core.errors import UsageError
from paritas.core.file_trees import Problems, open_plain
from paritas.core.results.wording import list_first
from paritas.formats.files.npy_files import array_place, read_npy_header, summary_of
from paritas.formats.files.records import (
    FORMAT,
    HEADER,
    INDEX,
    LOCK,
    NPY_LAYOUTS,
    RANK,
    RankDump,
    Record,
    State,
    index_home,
    is_data,
    is_locked,
    rank_folders,
    read_header,
    volumes_of,
)
from paritas.formats.files.safetensors_files import PackedPiece, complete, is_complete, read_entries
from paritas.formats.files.tensor_bytes import (
    FilePlace,
    OpenFiles,
    bytes_needed,
    digest,
    in_safetensors,
    known_dtype,
    sketch_dtype,
    stored_dtype,
    stored_shape,
    view_as_dtype,
)
from paritas.formats.foreign.foreign_dump import name_record_in_errors
from paritas.formats.foreign.ge_tensors import read_min_max
from paritas.formats.foreign.npy_tree import read_npy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    from torch import Tensor

    from paritas.core.numerics.statistics import Statistics
    from paritas.formats.files.records import Header, Layout, Payload
    from paritas.formats.files.torch_files import Unreadable


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
    if layout in NPY_LAYOUTS:
        return files.find(payload.file, max(payload.nbytes, 0))
    if facts is None:
        raise UsageError(f"it is not a tensor: its value is {record.value}")
    dtype = stored_dtype(known_dtype(facts.dtype))
    _check_extent(payload, dtype.itemsize, bytes_needed(dtype, payload.shape))
    fits = len(payload.shape) == len(facts.shape) and all(
        size in (extent, 1) for size, extent in zip(payload.shape, facts.shape, strict=True)
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
                position = array_place(name, read_npy_header(file), path.stat().st_size)
            return summary_of(path, position)
        rows = read_min_max(files.find(payload.file + _ARCHIVE, 0))
    except (UsageError, OSError):
        return None
    return next((row.statistics for row in rows if f"{row.kind}.{row.index}" == payload.key), None)


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
    if rank >= header.world_size:
        damage.add(f"its header is damaged: it is rank {rank} of {header.world_size}")
    records: list[Record] = []
    for volume in volumes_of(folder):
        records += _read_index(volume, header, files, damage, is_written=is_written)
    _check_unique(records, damage)
    if damage.replaced:
        note = f"{damage.replaced} tensors were replaced by their minimum and maximum"
        header = msgspec.structs.replace(header, notes=(*header.notes, note))
    amount = ""
    if state == "being written":
        amount = f"it is still being written; {len(records)} records can be read so far"
    elif state == "ended early":
        amount = f"it was not closed, so the run ended early; {len(records)} records can be read"
    elif header.records != len(records):
        amount = f"{header.records} records were written, but {len(records)} can be read"
    last = [amount] if amount else []  # always listed, however many lines are damaged
    problems, losses = [*damage.all(), *last], [*damage.losses(), *last]
    return RankDump(rank, folder, header, state, records, problems, losses)


def _check_unique(records: list[Record], damage: _RankProblems) -> None:
    """Report names that are not unique: only one of their values would be compared."""
    counts = Counter((record.step, record.id) for record in records)
    for (step, name), count in counts.items():
        if count > 1:
            damage.add(f"{name} of step {step} is recorded {count} times")


def _read_index(
    volume: Path, header: Header, files: DumpFiles, damage: _RankProblems, *, is_written: bool
) -> list[Record]:
    """The records of one index; damaged lines are reported and skipped."""
    path = volume / INDEX
    records: list[Record] = []
    latest = -1
    try:
        with open_plain(path) as file:
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
        damage.add(f"{where}, {record.id}: {error}", is_loss=False)
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


# --- Headers of data files ------------------------------------------------------------------------


def complete_files(rank_dump: RankDump, files: DumpFiles) -> tuple[list[Path], list[str]]:
    """Write the missing headers of a rank's data files; the repaired files, and the problems."""
    if is_locked(rank_dump.folder / LOCK):
        raise UsageError(f"{rank_dump.folder} is still being written: wait, or stop its process")
    lacking = [
        path
        for volume in volumes_of(rank_dump.folder)
        for path in sorted(volume.iterdir())
        if is_data(path) and not is_complete(path)
    ]
    pieces = _collect_pieces(rank_dump, files) if lacking else {}
    named = {record.payload.file for record in rank_dump.records if record.payload is not None}
    repaired: list[Path] = []
    problems: list[str] = []
    for path in lacking:
        name = path.relative_to(rank_dump.folder.parent).as_posix()
        if name in named - pieces.keys():
            problems.append(f"{name} was not repaired: none of its values in the index exist")
            continue
        try:
            complete(path, pieces.get(name, {}).values())
            repaired.append(path)
        except (ValueError, OSError) as error:
            problems.append(f"{name} was not repaired: {error}")
    return repaired, problems


def header_problems(rank_dump: RankDump, files: DumpFiles) -> list[str]:
    """How the headers of a rank's data files differ from its index.

    paritas reads only the index; the headers are for other programs. A header that an unfinished
    run did not write is not a problem.
    """
    pieces = _collect_pieces(rank_dump, files)
    problems: list[str] = []
    for path in (
        entry for volume in volumes_of(rank_dump.folder) for entry in sorted(volume.iterdir())
    ):
        if not is_data(path) or not (rank_dump.state == "closed" or is_complete(path)):
            continue
        name = path.relative_to(rank_dump.folder.parent).as_posix()
        try:
            entries = dict(read_entries(path, name))
        except (UsageError, OSError) as error:
            problems.append(f"{name}: {error}")
            continue
        own_pieces = pieces.get(name, {}).values()
        wrong = [
            piece.key for piece in own_pieces if not _describes_piece(entries.get(piece.key), piece)
        ]
        if wrong:
            problems.append(
                f"{name}: its header differs from the index for {len(wrong)} of {len(own_pieces)} "
                f"values, first {wrong[0]!r}"
            )
    return problems


def _describes_piece(entry: FilePlace | Unreadable | None, piece: PackedPiece) -> bool:
    """Whether a header describes a piece as the index does."""
    if not isinstance(entry, FilePlace):
        return False
    if (entry.begin, entry.nbytes) != (piece.begin, piece.nbytes):
        return False
    described = in_safetensors(known_dtype(entry.dtype), entry.shape)
    return described == in_safetensors(piece.dtype, piece.shape)


def _collect_pieces(
    rank_dump: RankDump, files: DumpFiles
) -> dict[str, dict[tuple[int, str], PackedPiece]]:
    """The index's values in each file; for shared bytes, the record that wrote them."""
    pieces: dict[str, dict[tuple[int, str], PackedPiece]] = {}
    for record in rank_dump.records:
        for payload, dtype in _list_whole_payloads(record, files):
            piece = PackedPiece(payload.key, dtype, payload.shape, payload.begin, payload.nbytes)
            pieces.setdefault(payload.file, {}).setdefault((payload.begin, payload.key), piece)
    return pieces


def _list_whole_payloads(record: Record, files: DumpFiles) -> list[tuple[Payload, torch.dtype]]:
    """The payloads that are complete; reading the index reported the others."""
    there: list[tuple[Payload, torch.dtype]] = []
    if record.payload is not None and record.tensor is not None:
        with contextlib.suppress(UsageError):
            check_payload(record, files, "packed")
            there.append((record.payload, stored_dtype(known_dtype(record.tensor.dtype))))
    if record.sketch is not None:
        with contextlib.suppress(UsageError):
            sketch = check_sketch(record, files)[1]
            there.append((sketch, sketch_dtype(sketch)))
    return there


# --- The dump -------------------------------------------------------------------------------------

_MOST_NAMED = 5
# Dtypes to compare as: some dtypes support few operators, and NaN does not equal NaN.
_CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Dump:
    """A readable dump.

    Nothing in it is trusted: index lines, sizes and paths are checked before they are used; what
    fails is listed as a problem, and the rest can be read.

    Attributes:
        problems: of all ranks, and between them.
        losses: of the dump as a whole; ranks have their own.
        unreadable: the reason, for each rank that cannot be read at all.
    """

    kind = "paritas"

    def __init__(
        self,
        path: Path,
        ranks: dict[int, RankDump],
        problems: list[str],
        unreadable: dict[int, str] | None = None,
    ) -> None:
        """Use `open`."""
        self.path = path
        self.ranks = ranks
        self.problems = problems
        self.losses: list[str] = []
        self.unreadable = unreadable or {}
        self._files = DumpFiles(path)
        self._open = OpenFiles()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Dump:
        """Read the index of every rank."""
        root = Path(path)
        problems: list[str] = []
        ranks: dict[int, RankDump] = {}
        unreadable: dict[int, str] = {}
        files = DumpFiles(root)
        for rank, folder in _found_ranks(index_home(root)).items():
            try:
                rank_dump = read_rank(rank, folder, files)
            except (UsageError, OSError) as error:
                unreadable[rank] = str(error)
                problems.append(f"rank {rank}: {error}")
                continue
            ranks[rank] = rank_dump
            problems += [f"rank {rank}: {problem}" for problem in rank_dump.problems]
        if not ranks:
            raise UsageError(f"{root} cannot be read: {'; '.join(problems)}")
        dump = cls(root, ranks, problems, unreadable)
        runs = {part.header.run for part in ranks.values()}
        if len(runs) > 1:
            names = ", ".join(f"rank {rank} of {ranks[rank].header.run[:8]}" for rank in ranks)
            dump.losses.append(f"it mixes {len(runs)} runs: {names}")
            problems += dump.losses
        return dump

    def header(self, rank: int) -> Header:
        """The header of a rank."""
        return self._rank(rank).header

    def records(self) -> Iterator[Record]:
        """All records, rank by rank, in the order of recording."""
        for rank in self.ranks.values():
            yield from rank.records

    def read(self, record: Record, *, check: bool = True) -> Tensor:
        """The values of a record, in memory of their own, in its dtype and shape.

        Repeated dimensions are expanded, not copied. The values of a quantised tensor are float32.

        Args:
            check: verify their digest.
        """
        return self._values(record, is_view=False, check=check)

    def view(self, record: Record, *, check: bool = False) -> Tensor:
        """The values of a record like `read`, but mapped from the file where possible.

        Small tensors are read, and so are dtypes that numpy lacks in the layout of `.npy` files.
        Writing to the result changes a private copy.

        Args:
            check: verify their digest, unless that was done before.
        """
        return self._values(record, is_view=True, check=check)

    def verify(self, record: Record) -> bool:
        """Verify the digest of a record's stored bytes, block by block.

        Bytes that were verified before, and not written to since, are not read again.

        Returns:
            Whether there is a digest.
        """
        payload = record.payload
        if payload is None or not record.digest:
            self._rank(record.rank)
            return False
        if self._layout(record) != "packed":
            self.view(record, check=True)
            return True
        with name_record_in_errors(record):
            path = check_payload(record, self._files, "packed")
            self._verify(record, payload, path, lambda: self._digest_stored(path, payload))
        return True

    def check_files(self) -> list[str]:
        """Problems of the files other than damaged values: headers that differ from the index."""
        return [
            f"rank {rank.rank}: {problem}"
            for rank in self.ranks.values()
            for problem in header_problems(rank, self._files)
        ]

    def read_sketch(self, record: Record) -> Tensor:
        """The linear sketch of a record's values."""
        try:
            path, sketch = check_sketch(record, self._files)
            raw = self._open.read(path, sketch.begin, sketch.nbytes, sketch.file)
            return view_as_dtype(raw, sketch_dtype(sketch)).reshape(sketch.shape)
        except (UsageError, OSError) as error:
            raise UsageError(f"sketch of {record.id} of step {record.step}: {error}") from error

    def repair(self) -> list[Path]:
        """Complete the data files of a killed run; returns the repaired ones.

        What cannot be repaired becomes a problem.
        """
        repaired: list[Path] = []
        for rank in self.ranks.values():
            paths, problems = complete_files(rank, self._files)
            repaired += paths
            self.problems += [f"rank {rank.rank}: {problem}" for problem in problems]
        return repaired

    def _values(self, record: Record, *, is_view: bool, check: bool) -> Tensor:
        layout = self._layout(record)
        with name_record_in_errors(record):
            path = check_payload(record, self._files, layout)
            payload, facts = record.payload, record.tensor
            if payload is None or facts is None:
                raise UsageError(f"it is not a tensor: its value is {record.value}")
            if layout in NPY_LAYOUTS:
                values = npy = read_npy(path, record, self._open if is_view else None)
            else:
                dtype = stored_dtype(known_dtype(facts.dtype))
                position = (path, payload.begin, payload.nbytes, payload.file)
                if is_view:
                    raw = self._open.view(*position, itemsize=dtype.itemsize)
                else:
                    raw = self._open.read(*position)
                values = view_as_dtype(raw, dtype).reshape(payload.shape)
                npy = values.expand(facts.shape)
            if check and record.digest and layout == "packed":
                self._verify(record, payload, path, lambda: digest(values))
            elif check and record.digest:
                self._verify(record, payload, path, lambda: _digest_expanded(npy, record))
            return npy

    def _verify(
        self, record: Record, payload: Payload, path: Path, compute: Callable[[], str]
    ) -> None:
        """Refuse bytes that do not match their digest."""
        position = (path, payload.begin, payload.nbytes)
        mismatch = self._open.checked.mismatch(*position, record.digest, compute)
        if mismatch is not None:
            raise UsageError(
                f"the bytes at {payload.begin} of {payload.file} have digest {mismatch}, but the "
                f"index says {record.digest}: the file or the index is damaged; copy or record the "
                f"dump again"
            )

    def _digest_stored(self, path: Path, payload: Payload) -> str:
        hasher = xxhash.xxh3_128()
        for block in self._open.blocks(path, payload.begin, payload.nbytes, payload.file):
            hasher.update(block)
        return hasher.hexdigest()

    def _layout(self, record: Record) -> Layout:
        return self._rank(record.rank).header.layout

    def _rank(self, rank: int) -> RankDump:
        if rank not in self.ranks:
            there = ", ".join(map(str, sorted(self.ranks)))
            raise UsageError(f"{self.path} has no rank {rank}; it has {there}")
        return self.ranks[rank]


def _found_ranks(root: Path) -> dict[int, Path]:
    """The folders of the ranks, or an error that says what was looked for."""
    if not root.is_dir():
        reason = "is not a folder" if root.exists() else "does not exist"
        raise UsageError(f"{root} {reason}: give the folder of a dump")
    ranks = rank_folders(root)
    if ranks:
        return ranks
    if (root / HEADER).is_file():
        raise UsageError(f"{root} is one rank of a dump: give its parent folder, {root.parent}")
    names = sorted(path.name for path in root.iterdir())
    listing = list_first(names, _MOST_NAMED) or "nothing"
    raise UsageError(
        f"{root} is not a paritas dump: looked for rank0/{HEADER}, rank1/{HEADER} and so on, found "
        f"{listing}"
    )


def _digest_expanded(values: Tensor, record: Record) -> str:
    """The digest of values from a file that stores repeated dimensions expanded."""
    facts = record.tensor
    extents = values.shape if facts is None else stored_shape(facts.shape, facts.stride)
    if values.dtype.itemsize in _CARRIERS:
        values = values.view(_CARRIERS[values.dtype.itemsize])
    once = values[tuple(slice(extent) for extent in extents)].contiguous()
    if tuple(extents) != tuple(values.shape) and not once.expand(values.shape).equal(values):
        raise UsageError("it was recorded with repeated values, but they differ in the file")
    return digest(once)
