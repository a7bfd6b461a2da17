"""Write a dump: first the bytes of each value, then its line in the index."""

from __future__ import annotations

import collections
import contextlib
import io
import itertools
import os
import re
import shutil
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import xxhash

from paritas.core.errors import ParitasError, UsageError
from paritas.core.results.wording import list_first
from paritas.formats.files.records import (
    DATA,
    HEADER,
    INDEX,
    LOCK,
    NPY_LAYOUTS,
    OLD_FX_TOP,
    RANK,
    STEP,
    TIME,
    TORCHAIR,
    Entry,
    Lock,
    Payload,
    Record,
    data_name,
    discard,
    exclusive,
    index_home,
    is_locked,
    rank_name,
    read_header,
    step_name,
    write_header,
)
from paritas.formats.files.safetensors_files import LARGEST_FILE, PackedFile, write_whole
from paritas.formats.files.tensor_bytes import (
    bytes_needed,
    digest_of,
    known_dtype,
    raw_bytes,
    stored_dtype,
    stored_shape,
)
from paritas.formats.foreign.ge_writing import CallFiles
from paritas.formats.foreign.npy_tree import NpyTree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from paritas.formats.files.records import Header
    from paritas.formats.foreign.ge_writing import Operator, SiteKey


# --- Claiming a folder for a rank -----------------------------------------------------------------

_PASSING = re.compile(r"\.(starting|removing)-.+")
_MOST_NAMED = 5
_ADVICE = "give a new folder, or overwrite=True to replace the dump"


def claim(root: Path, header: Header, *, overwrite: bool) -> Path:
    """Create the folder of a rank with its header, atomically and for this process only."""
    home = index_home(root, header.layout)
    try:
        for folder in (root, home):
            folder.mkdir(parents=True, exist_ok=True)
        # Ranks that start together and replace an older dump must not remove each other.
        with exclusive(home):
            _clear_folder(root, home, header, overwrite=overwrite)
            return _make_folder(home, header)
    except OSError as error:
        raise ParitasError(
            f"cannot record into {root}: {error.strerror or error}; give a folder that can be "
            f"created and written to"
        ) from error


def _make_folder(root: Path, header: Header) -> Path:
    """Create the folder; others see it with its header or not at all."""
    rank_folder = root / rank_name(header.rank)
    starting = root / f".starting-{header.rank}-{uuid.uuid4().hex}"
    starting.mkdir()
    try:
        write_header(starting, header)
        starting.rename(rank_folder)
    except BaseException as error:
        shutil.rmtree(starting, ignore_errors=True)
        if isinstance(error, OSError) and rank_folder.exists():
            raise UsageError(
                f"another process has just created {rank_folder}: {_ADVICE}"
            ) from error
        raise
    return rank_folder


class _ClaimedPart(NamedTuple):
    """The part of a rank that is already in a folder."""

    path: Path
    header: Header

    def conflicts_with(self, header: Header) -> bool:
        """Whether it belongs to the same rank, or to another run."""
        its = self.header
        other_run = (its.run, its.world_size) != (header.run, header.world_size)
        return other_run or its.rank == header.rank

    def describe_conflict(self, header: Header) -> str:
        """Why it conflicts."""
        when = f", recorded {self.header.created}" if self.header.created else ""
        if self.header.rank == header.rank:
            return f"{self.path.name} exists already{when}"
        run, size = self.header.run[:8], self.header.world_size
        return f"{self.path.name} belongs to another run, {run} with {size} rank(s){when}"


def _clear_folder(root: Path, home: Path, header: Header, *, overwrite: bool) -> None:
    """Refuse a folder that is in use, or remove the dump in it."""
    parts, foreign = _survey_folder(home)
    if home != root:
        has_layout = any(part.header.layout == header.layout for part in parts)
        foreign += [
            path
            for path in root.iterdir()
            if not has_layout or not (TIME.fullmatch(path.name) or TORCHAIR.fullmatch(path.name))
        ]
    if foreign:
        names = list_first((path.name for path in foreign), _MOST_NAMED)
        raise UsageError(
            f"{root} is not empty: it contains {names}, which is not part of a paritas dump and "
            f"would not be removed: give a new folder"
        )
    others = [part for part in parts if part.conflicts_with(header)]
    if others and not overwrite:
        conflicts = "; ".join(other.describe_conflict(header) for other in others[:_MOST_NAMED])
        more = f"; and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        raise UsageError(f"{root} is not empty: {conflicts}{more}: {_ADVICE}")
    for other in others:
        _refuse_removal(other.path)
    for other in others:
        _remove_part(root, other)


def _survey_folder(root: Path) -> tuple[list[_ClaimedPart], list[Path]]:
    """The parts of ranks, and paths that belong to no dump."""
    parts: list[_ClaimedPart] = []
    foreign: list[Path] = []
    for path in sorted(root.iterdir()):
        if path.name.startswith(".removing-"):
            shutil.rmtree(path, ignore_errors=True)  # left by a process that died
            continue
        match = RANK.fullmatch(path.name)
        header = _header_or_none(path) if match else None
        if header is not None:
            parts.append(_ClaimedPart(path, header))
        elif not (path.name.startswith(".starting-") or _is_of_torchair_layout(path)):
            foreign.append(path)
    return parts, foreign


def _is_of_torchair_layout(path: Path) -> bool:
    """Whether it is the tree or a graph of one of our ranks, whose own folder comes first."""
    if path.name == OLD_FX_TOP:
        header = _header_or_none(path.with_name(rank_name(0)))
        return header is not None and header.layout == "msit-7.1.0"
    match = TORCHAIR.fullmatch(path.name)
    if match is None:
        return False
    header = _header_or_none(path.with_name(rank_name(int(match[1] or match[2]))))
    return header is not None and header.layout in ("msit", "ge")


def _refuse_removal(folder: Path) -> None:
    stray = [path for path in folder.rglob("*") if not _is_ours(path, folder)]
    if stray:
        names = list_first((path.name for path in stray), _MOST_NAMED)
        raise UsageError(
            f"{folder} contains {names}, which paritas did not write, so it is not overwritten: "
            f"give a new folder"
        )
    if is_locked(folder / LOCK):
        raise UsageError(
            f"{folder} is being written by a running process: stop it, or give another folder"
        )


def _remove_part(root: Path, part: _ClaimedPart) -> None:
    if part.header.layout == "msit-7.1.0":
        discard(root / OLD_FX_TOP)
    elif part.header.layout != "packed":
        for path in root.iterdir():
            if TIME.fullmatch(path.name):
                discard(path / str(part.header.rank))
                with contextlib.suppress(OSError):  # another rank is in it
                    path.rmdir()
            match = TORCHAIR.fullmatch(path.name)
            if match is None or int(match[1] or match[2]) != part.header.rank:
                continue
            discard(path) if path.is_dir() else path.unlink(missing_ok=True)
    discard(part.path)


def _is_ours(path: Path, folder: Path) -> bool:
    """Whether a path in the folder of a rank was written by paritas."""
    for name in path.relative_to(folder).parts[:-1]:
        if not (STEP.fullmatch(name) or _PASSING.fullmatch(name)):
            return False
    if path.is_symlink():
        return False
    if path.is_dir():
        return bool(STEP.fullmatch(path.name) or _PASSING.fullmatch(path.name))
    return path.name in (HEADER, INDEX, LOCK, f".{HEADER}.part") or bool(DATA.fullmatch(path.name))


def _header_or_none(folder: Path) -> Header | None:
    try:
        return read_header(folder)
    except UsageError:
        return None


# --- The index and the data files of one folder ---------------------------------------------------

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


# --- The writer -----------------------------------------------------------------------------------

_MOST_SKETCHES = 1 << 12


class DumpWriter:
    """Writes one rank's part of a dump; from one thread at a time, except `describe`.

    After a failed write nothing more is accepted; what was written stays readable, and the header
    says that the dump was not closed.

    Attributes:
        folder: where this rank writes.
        written_bytes: payloads and sketches in the files.
        saved_bytes: payloads and sketches that were stored already.
    """

    def __init__(
        self,
        path: Path,
        header: Header,
        *,
        overwrite: bool = False,
        last: int = 0,
        largest_file: int = LARGEST_FILE,
    ) -> None:
        """Claim the folder of the rank.

        Args:
            path: of the dump; created if missing.
            overwrite: replace an existing dump. Nothing else is ever removed.
            last: keep this many of the last steps, and those kept by `keep`; 0 keeps all.
            largest_file: payload bytes after which a new data file begins.
        """
        self.path = path
        self.written_bytes = 0
        self.saved_bytes = 0
        self._header = msgspec.structs.replace(header, closed=False, records=0)
        self._last = last
        self._largest = largest_file
        self._failure = ""
        self._closed = False
        self._step: int | None = None
        self._ring: collections.deque[tuple[int, Volume]] = collections.deque()
        self._kept: list[Volume] = []
        self._sketched: dict[int, Payload] = {}
        self._encode = msgspec.json.Encoder().encode
        self._tree: NpyTree | None = None
        self._calls: CallFiles | None = None
        if header.layout in NPY_LAYOUTS:
            has_ranks = header.layout == "msit"
            self._tree = NpyTree(path, header.rank, header.world_size, has_ranks=has_ranks)
        elif header.layout != "packed":
            self._calls = CallFiles(path, header.layout, header.rank, header.world_size)
        self.folder = claim(path, self._header, overwrite=overwrite)
        self._home = self.folder.parent
        self._volume: Volume | None = None
        try:
            self._lock = Lock(self.folder / LOCK)
            if not last:
                self._volume = Volume(self._home, self.folder, largest_file)
                self._kept.append(self._volume)
        except OSError as error:
            raise self._note_failure(error, self.folder) from error

    def begin_step(self, step: int) -> None:
        """Set the step of the next entries; the oldest step may be dropped."""
        if not self._last or step == self._step or self._failure or self._closed:
            return
        folder = self.folder / step_name(step)
        try:
            volume, self._volume = self._volume, None
            self._sketched = {}
            if volume is not None:
                volume.close()
            folder.mkdir()
            self._volume = Volume(self._home, folder, self._largest)
            self._step = step
            self._ring.append((step, self._volume))
            while len(self._ring) > self._last:
                self._drop(*self._ring.popleft())
        except OSError as error:
            raise self._note_failure(error, folder) from error

    def keep(self) -> None:
        """Keep the steps that are now in the ring."""
        self._kept += [volume for _, volume in self._ring]
        self._ring.clear()

    def add(self, entry: Entry) -> Record:
        """Write a value, then its line in the index; not for layouts with a file per call.

        Raises:
            ParitasError: it could not be written.
        """
        return self.add_many([entry])[0]

    def add_many(self, entries: Sequence[Entry]) -> list[Record]:
        """Write values, then all their index lines at once.

        Layouts with a file per call return the records of finished calls.

        Raises:
            ParitasError: one could not be written; those before it are in the index.
        """
        if self._calls is not None:
            return self._add_to_calls(self._calls, entries)
        records: list[Record] = []
        entered = 0
        self._sketched = {}  # by identity, valid while the entries hold them
        for entry in entries:
            if entry.step != self._step and self._last:
                entered = self._enter(records, entered)  # into the folder of their step
                self.begin_step(entry.step)
            volume = self._volume
            if volume is None or self._failure or self._closed:
                raise self._refusal()
            try:
                records.append(self._record(volume, entry))
            except BaseException as error:
                self._enter(records, entered, sound=False)
                if not isinstance(error, OSError):
                    raise
                needed = 0 if entry.stored is None else entry.stored.nbytes
                raise self._note_failure(error, volume.folder, needed) from error
        self._enter(records, entered)
        if self._header.data == "stats" and self._volume is not None:
            # Only sketches are stored, and a long run has many.
            self._volume.forget_old(_MOST_SKETCHES)
        return records

    def _refusal(self) -> ParitasError:
        return ParitasError(self._failure or f"{self.folder} was closed: nothing can be added")

    def _add_to_calls(self, calls: CallFiles, entries: Sequence[Entry]) -> list[Record]:
        records: list[Record] = []
        for entry in entries:
            if calls.is_over(entry):
                records += self._write_calls(calls)
            if self._failure or self._closed:
                raise self._refusal()
            calls.put(entry)
        calls.detach()
        return records

    def _write_calls(self, calls: CallFiles) -> list[Record]:
        """Write the files of the finished calls, then their index lines."""
        if calls.step is None or self._failure:
            return []
        self.begin_step(calls.step)
        volume = self._volume
        if volume is None:
            raise self._refusal()
        try:
            placed = calls.write()
            records = [self._record(volume, entry, payload) for entry, payload in placed]
        except OSError as error:
            raise self._note_failure(error, self.path) from error
        self._enter(records, 0)
        calls.remember(records)
        return records

    def _enter(self, records: list[Record], start: int, *, sound: bool = True) -> int:
        """Write the bytes of the records from `start` on, then their lines; returns the total.

        Args:
            sound: False after a failure: some of the bytes may be lost.
        """
        volume = self._volume
        if volume is None or start == len(records):
            return len(records)
        fresh, failure = records[start:], None
        try:
            volume.flush()
        except OSError as error:
            failure = error
        stored = fresh
        if failure is not None or not sound:
            stored = list(itertools.takewhile(volume.holds, fresh))
        self._write_lines(volume, stored)
        if failure is not None:
            lost = fresh[len(stored) : len(stored) + 1]
            needed = sum(
                location.nbytes
                for lost_record in lost
                for location in (lost_record.payload, lost_record.sketch)
                if location
            )
            raise self._note_failure(failure, volume.folder, needed) from failure
        return len(records)

    def _write_lines(self, volume: Volume, records: Sequence[Record]) -> None:
        if not records:
            return
        encode = self._encode
        try:
            volume.enter([encode(record) + b"\n" for record in records])
        except OSError as error:
            raise self._note_failure(error, volume.folder) from error

    def name_operators(self, operators: Mapping[SiteKey, Operator]) -> None:
        """Set the operator names that Ascend's graph engine would use, if that is the layout."""
        if self._calls is not None:
            self._calls.name_operators(operators)

    def describe(self, header: Header) -> None:
        """Replace the header while the dump is being written."""
        self._header = msgspec.structs.replace(header, closed=False, records=0)
        write_header(self.folder, self._header)

    def close(self, header: Header, *, complete: bool = True) -> None:
        """Complete the data files, flush everything to disk, and write the final header.

        Args:
            complete: False if the recording failed elsewhere: the header then says that the dump
                was not closed.

        Raises:
            ParitasError: that failed; the header says so, if it could be written.
        """
        if self._closed:
            return
        failed_before = self._failure
        if self._calls is not None:
            try:
                self._write_calls(self._calls)
            except ParitasError as error:  # raised below, after everything is closed
                self._failure = self._failure or str(error)
        self._closed = True
        volumes = [*self._kept, *(volume for _, volume in self._ring)]
        try:
            if self._volume is not None:
                self._volume.close()
            for volume in volumes:
                volume.see_onto_disk()
        except OSError as error:
            self._note_failure(error, self.folder)
        notes = header.notes
        if self._failure and not any(self._failure in note for note in notes):
            notes = (*notes, self._failure)
        closed = complete and not self._failure
        records = sum(volume.records for volume in volumes)
        header = msgspec.structs.replace(header, notes=notes, closed=closed, records=records)
        try:
            write_header(self.folder, header, durable=True)
        finally:
            self._lock.release()
        if self._failure and not failed_before:
            raise ParitasError(self._failure)

    def _record(self, volume: Volume, entry: Entry, placed: Payload | None = None) -> Record:
        """The index record of an entry; its values are written unless `placed` says where."""
        name = entry.site.id
        key = f"{entry.step}/{name}"
        payload, hashed = placed, entry.digest
        if placed is None:
            payload, hashed = self._payload(volume, entry, key)
        else:
            self.written_bytes += placed.nbytes
        sketch = None if entry.sketch is None else self._sketch(volume, entry.sketch, key)
        return Record(
            sequence=entry.sequence,
            step=entry.step,
            rank=self._header.rank,
            id=name,
            site=entry.site,
            tensor=entry.tensor,
            value=entry.value,
            digest=hashed,
            payload=payload,
            statistics=entry.statistics,
            sketch=sketch,
            alias_of=entry.alias_of,
            placement=entry.placement,
            dtype=entry.dtype,
        )

    def _payload(self, volume: Volume, entry: Entry, key: str) -> tuple[Payload | None, str]:
        """Where the values of an entry are, written if necessary, and their digest."""
        facts, stored, hashed = entry.tensor, entry.stored, entry.digest
        has_values = facts is not None and (stored is not None or bool(hashed))
        if self._tree is not None and (has_values or facts is None):
            payload = self._tree.write(entry)
            self.written_bytes += payload.nbytes
            return payload, hashed
        if facts is None or not has_values or self._header.data == "stats":
            return None, hashed
        if stored is None:
            stored_location = volume.place_of(hashed)
            if stored_location is None:
                raise ParitasError(
                    f"{key} has no values, and {volume.folder} has none with digest {hashed}"
                )
            location, is_new = stored_location, False
            shape = stored_shape(facts.shape, facts.stride)
            nbytes = bytes_needed(stored_dtype(known_dtype(facts.dtype)), shape)
        else:
            location, hashed, is_new = volume.put(key, stored, hashed)
            shape, nbytes = tuple(stored.shape), stored.nbytes
        if location.nbytes != nbytes:
            raise ParitasError(
                f"{key} has {nbytes} bytes, but {location.key} was written with "
                f"{location.nbytes} bytes under the same digest: it is not the digest of its bytes"
            )
        return self._count_bytes(location, shape, is_new=is_new), hashed

    def _sketch(self, volume: Volume, sketch: Tensor, key: str) -> Payload:
        """Where a sketch is; repeated values share the same sketch object."""
        cached = self._sketched.get(id(sketch))
        if cached is not None:
            self.saved_bytes += cached.nbytes
            return cached
        location, _, is_new = volume.put(f"{key}/sketch", sketch)
        placed = self._count_bytes(location, tuple(sketch.shape), is_new=is_new)
        self._sketched[id(sketch)] = placed
        return placed

    def _count_bytes(self, payload: Payload, shape: tuple[int, ...], *, is_new: bool) -> Payload:
        if is_new:
            self.written_bytes += payload.nbytes
            return payload
        self.saved_bytes += payload.nbytes
        return payload if payload.shape == shape else msgspec.structs.replace(payload, shape=shape)

    def _drop(self, step: int, volume: Volume) -> None:
        # The index goes first: no line may point to removed bytes.
        discard(volume.folder)
        for tree in (self._tree, self._calls):
            if tree is not None:
                tree.drop_step(step)

    def _note_failure(self, error: OSError, path: Path, needed: int = 0) -> ParitasError:
        amount = f" ({needed} more bytes)" if needed else ""
        self._failure = (
            f"cannot write to {path}{amount}: {error.strerror or error}; what was written before "
            f"can be read"
        )
        return ParitasError(self._failure)
