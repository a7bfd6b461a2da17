"""Writing a dump: each value's bytes first, then its line in the index."""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import itertools
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import xxhash

from paritas.errors import ParitasError, UsageError
from paritas.files.dtypes import (
    bytes_needed,
    digest_of,
    known_dtype,
    raw_bytes,
    stored_dtype,
    stored_shape,
)
from paritas.files.folders import (
    DATA,
    HEADER,
    INDEX,
    LOCK,
    RANK,
    STEP,
    TIME,
    TORCHAIR,
    Lock,
    alone_in,
    data_name,
    discard,
    index_home,
    is_locked,
    rank_name,
    read_header,
    step_name,
    write_header,
)
from paritas.files.records import Entry, Payload, Record
from paritas.files.safetensors_files import LARGEST_FILE, PackedFile, write_whole
from paritas.results.wording import enumerated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from paritas.compat.ge_writing import CallFiles, Operator, SiteKey
    from paritas.compat.npy_tree import NpyTree
    from paritas.files.records import Header


# --- Claiming a folder for a rank -----------------------------------------------------------------

_PASSING = re.compile(r"\.(starting|removing)-.+")
_MOST_NAMED = 5
_ADVICE = "give a new folder, or overwrite=True to replace the dump in it"


def claim(root: Path, header: Header, *, overwrite: bool) -> Path:
    """Make the folder of a rank with its header in it, at once and for this process alone.

    Raises:
        UsageError: the folder has something else in it.
    """
    home = index_home(root, header.layout)
    try:
        for folder in (root, home):
            folder.mkdir(parents=True, exist_ok=True)
        # Ranks that start together and replace an older dump must not take each other for it.
        with alone_in(home):
            _clear_folder(root, home, header, overwrite=overwrite)
            return _make_folder(home, header)
    except OSError as error:
        raise ParitasError(
            f"cannot record into {root}: {error.strerror or error}; give a folder that can be made "
            f"and written to"
        ) from error


def _make_folder(root: Path, header: Header) -> Path:
    """The folder, which others see with its header in it or not at all."""
    mine = root / rank_name(header.rank)
    starting = root / f".starting-{header.rank}-{uuid.uuid4().hex}"
    starting.mkdir()
    try:
        write_header(starting, header)
        starting.rename(mine)
    except BaseException as error:
        shutil.rmtree(starting, ignore_errors=True)
        if isinstance(error, OSError) and mine.exists():
            raise UsageError(f"{mine} was made by another process just now: {_ADVICE}") from error
        raise
    return mine


class _ClaimedPart(NamedTuple):
    """What one rank has in a folder already."""

    path: Path
    header: Header

    def is_in_the_way_of(self, header: Header) -> bool:
        """Whether it is the same rank's, or another run's."""
        mine, its = header, self.header
        other_run = (its.run, its.world_size) != (mine.run, mine.world_size)
        return other_run or its.rank == mine.rank

    def told(self, header: Header) -> str:
        """Why it is in the way."""
        when = f", recorded {self.header.created}" if self.header.created else ""
        if self.header.rank == header.rank:
            return f"{self.path.name} is there already{when}"
        run, size = self.header.run[:8], self.header.world_size
        return f"{self.path.name} is of another run, {run} of {size} rank(s){when}"


def _clear_folder(root: Path, home: Path, header: Header, *, overwrite: bool) -> None:
    """Refuse a folder that is in use, or remove the dump that is in it."""
    parts, foreign = _survey_folder(home)
    if home != root:
        known = any(part.header.layout == header.layout for part in parts)
        foreign += [path for path in root.iterdir() if not (known and _is_of_old_tree(path))]
    if foreign:
        names = enumerated((path.name for path in foreign), _MOST_NAMED)
        raise UsageError(
            f"{root} is not empty: it holds {names}, "
            f"which is not of a dump of paritas and would not be removed: give a new folder"
        )
    others = [part for part in parts if part.is_in_the_way_of(header)]
    if others and not overwrite:
        told = "; ".join(other.told(header) for other in others[:_MOST_NAMED])
        more = f"; and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        raise UsageError(f"{root} is not empty: {told}{more}: {_ADVICE}")
    for other in others:
        _refuse_removal(other.path)
    for other in others:
        _remove_part(root, other)


def _survey_folder(root: Path) -> tuple[list[_ClaimedPart], list[Path]]:
    """The parts of ranks, and what is nobody's."""
    parts: list[_ClaimedPart] = []
    foreign: list[Path] = []
    for path in sorted(root.iterdir()):
        if path.name.startswith(".removing-"):
            shutil.rmtree(path, ignore_errors=True)  # of a process that died over it
            continue
        match = RANK.fullmatch(path.name)
        found = _header_or_none(path) if match else None
        if found is not None:
            parts.append(_ClaimedPart(path, found))
        elif not (path.name.startswith(".starting-") or _is_of_torchair_layout(path)):
            foreign.append(path)
    return parts, foreign


def _is_of_torchair_layout(path: Path) -> bool:
    """Whether it is the tree, or a graph, of a rank of ours, whose own folder came before it."""
    match = TORCHAIR.fullmatch(path.name)
    if match is None:
        return False
    found = _header_or_none(path.with_name(rank_name(int(match[1] or match[2]))))
    return found is not None and found.layout in ("msit", "ge")


def _is_of_old_tree(path: Path) -> bool:
    return bool(TIME.fullmatch(path.name) or TORCHAIR.fullmatch(path.name))


def _refuse_removal(folder: Path) -> None:
    stray = [path for path in folder.rglob("*") if not _is_ours(path, folder)]
    if stray:
        names = enumerated((path.name for path in stray), _MOST_NAMED)
        raise UsageError(
            f"{folder} holds {names}, which paritas did not write: "
            f"it is not overwritten; give a new folder"
        )
    if is_locked(folder / LOCK):
        raise UsageError(
            f"{folder} is being written by a process that is still running: end it, or give "
            f"another folder"
        )


def _remove_part(root: Path, part: _ClaimedPart) -> None:
    if part.header.layout != "packed":
        for path in root.iterdir():
            if TIME.fullmatch(path.name):
                discard(path / str(part.header.rank))
                with contextlib.suppress(OSError):  # another rank's is in it
                    path.rmdir()
            match = TORCHAIR.fullmatch(path.name)
            if match is None or int(match[1] or match[2]) != part.header.rank:
                continue
            discard(path) if path.is_dir() else path.unlink(missing_ok=True)
    discard(part.path)


def _is_ours(path: Path, folder: Path) -> bool:
    """Whether something in the folder of a rank is what a writer puts there."""
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


# --- The writer -----------------------------------------------------------------------------------

_MOST_SKETCHES = 1 << 12


class DumpWriter:
    """Writes one rank's part of a dump; one thread at a time, but `describe` in any.

    After a failure to write, nothing more is taken; what was written before stays readable, and the
    header goes on saying that the dump was not closed.

    Attributes:
        folder: where this rank writes.
        written_bytes: of payloads and sketches in the files.
        saved_bytes: of those that need not be written, since their bytes were there already.
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
        """Take the folder of the rank.

        Args:
            path: of the dump; it is made.
            overwrite: replace a dump that is there. Nothing else is ever removed.
            last: keep so many of the last steps, and those that `keep` was called for; 0 keeps all.
            largest_file: bytes of payloads after which a new data file is begun.

        Raises:
            UsageError: the folder holds something else.
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
        if header.layout == "msit":
            from paritas.compat import npy_tree  # which imports this module

            self._tree = npy_tree.NpyTree(path, header.rank, header.world_size)
        elif header.layout != "packed":
            from paritas.compat import ge_writing

            self._calls = ge_writing.CallFiles(path, header.layout, header.rank, header.world_size)
        self.folder = claim(path, self._header, overwrite=overwrite)
        self._home = self.folder.parent
        self._volume: Volume | None = None
        try:
            self._lock = Lock(self.folder / LOCK)
            if not last:
                self._volume = Volume(self._home, self.folder, largest_file)
                self._kept.append(self._volume)
        except OSError as error:
            raise self._failed(error, self.folder) from error

    def begin_step(self, step: int) -> None:
        """Say which step the next entries are of; in a ring, the oldest one makes room."""
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
            raise self._failed(error, folder) from error

    def keep(self) -> None:
        """Keep for good the steps that are in the ring now."""
        self._kept += [volume for _, volume in self._ring]
        self._ring.clear()

    def add(self, entry: Entry) -> Record:
        """Write a value, and then its line in the index; not for layouts of whole calls.

        Raises:
            ParitasError: it could not be written; the message says where, and how much it was.
        """
        return self.add_many([entry])[0]

    def add_many(self, entries: Sequence[Entry]) -> list[Record]:
        """Write values, and then the lines of all of them at once.

        A layout that has a file for each call gives back those of the calls that are over.

        Raises:
            ParitasError: as `add` does; those before the one that failed are in the index.
        """
        if self._calls is not None:
            return self._add_to_calls(self._calls, entries)
        records: list[Record] = []
        entered = 0
        self._sketched = {}  # by identity: good as long as the entries hold them
        for entry in entries:
            if entry.step != self._step and self._last:
                entered = self._enter(records, entered)  # into the folder of their own step
                self.begin_step(entry.step)
            volume = self._volume
            if volume is None or self._failure or self._closed:
                raise ParitasError(
                    self._failure or f"{self.folder} was closed: nothing can be added"
                )
            try:
                records.append(self._record(volume, entry))
            except BaseException as error:
                self._enter(records, entered, sound=False)
                if not isinstance(error, OSError):
                    raise
                needed = 0 if entry.stored is None else entry.stored.nbytes
                raise self._failed(error, volume.folder, needed) from error
        self._enter(records, entered)
        if self._header.data == "stats" and self._volume is not None:
            # All that is stored are sketches, and each comes with its values: a run may be long.
            self._volume.forget_old(_MOST_SKETCHES)
        return records

    def _add_to_calls(self, calls: CallFiles, entries: Sequence[Entry]) -> list[Record]:
        records: list[Record] = []
        for entry in entries:
            if calls.is_over(entry):
                records += self._write_calls(calls)
            if self._failure or self._closed:
                raise ParitasError(
                    self._failure or f"{self.folder} was closed: nothing can be added"
                )
            calls.put(entry)
        calls.detach()
        return records

    def _write_calls(self, calls: CallFiles) -> list[Record]:
        """Write the files of the calls that are over, then the lines of what they hold."""
        if calls.step is None or self._failure:
            return []
        self.begin_step(calls.step)
        volume = self._volume
        if volume is None:
            raise ParitasError(f"{self.folder} was closed: nothing can be added")
        try:
            placed = calls.write()
            records = [self._record(volume, entry, payload) for entry, payload in placed]
        except OSError as error:
            raise self._failed(error, self.path) from error
        self._enter(records, 0)
        calls.remember(records)
        return records

    def _enter(self, records: list[Record], start: int, *, sound: bool = True) -> int:
        """Write the bytes of the records from there on, then their lines; how many are in all.

        Args:
            sound: False after a failure: some of the bytes may be lost already.
        """
        volume = self._volume
        if volume is None or start == len(records):
            return len(records)
        fresh, failure = records[start:], None
        try:
            volume.flush()
        except OSError as error:
            failure = error
        held = fresh
        if failure is not None or not sound:
            held = list(itertools.takewhile(functools.partial(_is_held, volume), fresh))
        self._write_lines(volume, held)
        if failure is not None:
            needed = _count_bytes(fresh[len(held)]) if len(held) < len(fresh) else 0
            raise self._failed(failure, volume.folder, needed) from failure
        return len(records)

    def _write_lines(self, volume: Volume, records: Sequence[Record]) -> None:
        if not records:
            return
        encode = self._encode
        try:
            volume.enter([encode(record) + b"\n" for record in records])
        except OSError as error:
            raise self._failed(error, volume.folder) from error

    def name_operators(self, operators: Mapping[SiteKey, Operator]) -> None:
        """Say how Ascend's graph engine would call what is to come, where that is the layout."""
        if self._calls is not None:
            self._calls.name_operators(operators)

    def describe(self, header: Header) -> None:
        """Say anew what this part of the dump is, while it is written."""
        self._header = msgspec.structs.replace(header, closed=False, records=0)
        write_header(self.folder, self._header)

    def close(self, header: Header, *, complete: bool = True) -> None:
        """Make the data files safetensors files, see all of it onto the disk, and say so.

        Args:
            complete: False where the recording failed elsewhere: the header then goes on saying
                that the dump was not closed.

        Raises:
            ParitasError: that failed; the header says so, if it could be written.
        """
        if self._closed:
            return
        failed_before = self._failure
        if self._calls is not None:
            try:
                self._write_calls(self._calls)
            except ParitasError as error:  # raised below, when what is there is closed
                self._failure = self._failure or str(error)
        self._closed = True
        volumes = [*self._kept, *(volume for _, volume in self._ring)]
        try:
            if self._volume is not None:
                self._volume.close()
            for volume in volumes:
                volume.see_onto_disk()
        except OSError as error:
            self._failed(error, self.folder)
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
        """What the index says of an entry, whose values are written unless they have a place."""
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
        """Where the values of an entry are, written if need be, and their digest."""
        facts, stored, hashed = entry.tensor, entry.stored, entry.digest
        has_values = facts is not None and (stored is not None or bool(hashed))
        if self._tree is not None and (has_values or facts is None):
            payload = self._tree.write(entry)
            self.written_bytes += payload.nbytes
            return payload, hashed
        if facts is None or not has_values or self._header.data == "stats":
            return None, hashed
        if stored is None:
            found = volume.place_of(hashed)
            if found is None:
                raise ParitasError(
                    f"{key} came without its values, and {volume.folder} holds none of digest "
                    f"{hashed}"
                )
            place, is_new = found, False
            shape = stored_shape(facts.shape, facts.stride)
            nbytes = bytes_needed(stored_dtype(known_dtype(facts.dtype)), shape)
        else:
            place, hashed, is_new = volume.put(key, stored, hashed)
            shape, nbytes = tuple(stored.shape), stored.nbytes
        if place.nbytes != nbytes:
            raise ParitasError(
                f"{key} has {nbytes} bytes, and its digest was written before with {place.nbytes}, "
                f"as {place.key}: it is not the digest of its bytes"
            )
        return self._counted(place, shape, is_new=is_new), hashed

    def _sketch(self, volume: Volume, sketch: Tensor, key: str) -> Payload:
        """Where a sketch is; of values that come by again it is the same one, not only an equal."""
        known = self._sketched.get(id(sketch))
        if known is not None:
            self.saved_bytes += known.nbytes
            return known
        place, _, is_new = volume.put(f"{key}/sketch", sketch)
        placed = self._counted(place, tuple(sketch.shape), is_new=is_new)
        self._sketched[id(sketch)] = placed
        return placed

    def _counted(self, place: Payload, shape: tuple[int, ...], *, is_new: bool) -> Payload:
        if is_new:
            self.written_bytes += place.nbytes
            return place
        self.saved_bytes += place.nbytes
        return place if place.shape == shape else msgspec.structs.replace(place, shape=shape)

    def _drop(self, step: int, volume: Volume) -> None:
        # Its index goes first: no line may point to what is gone.
        discard(volume.folder)
        for tree in (self._tree, self._calls):
            if tree is not None:
                tree.drop_step(step)

    def _failed(self, error: OSError, path: Path, needed: int = 0) -> ParitasError:
        amount = f" ({needed} bytes more)" if needed else ""
        self._failure = (
            f"cannot write to {path}{amount}: {error.strerror or error}; what was written before "
            f"can be read"
        )
        return ParitasError(self._failure)


def _is_held(volume: Volume, record: Record) -> bool:
    return volume.holds(record.payload) and volume.holds(record.sketch)


def _count_bytes(record: Record) -> int:
    return sum(place.nbytes for place in (record.payload, record.sketch) if place is not None)
