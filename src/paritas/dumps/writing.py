"""Writing a dump: each value's bytes first, then its line in the index."""

from __future__ import annotations

import collections
import functools
import itertools
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from paritas.dumps.claiming import claim
from paritas.dumps.dtypes import (
    bytes_needed,
    known_dtype,
    stored_dtype,
    stored_shape,
)
from paritas.dumps.folders import (
    discard,
    run_identity,
    step_name,
    write_header,
)
from paritas.dumps.locks import LOCK, Lock
from paritas.dumps.packing import LARGEST_FILE
from paritas.dumps.records import Placement, Record, Site, TensorFacts
from paritas.dumps.volumes import Volume
from paritas.errors import ParitasError
from paritas.numerics.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paritas.dumps.ge_layout import CallFiles, Operator, Place
    from paritas.dumps.msit_layout import NpyTree
    from paritas.dumps.records import Header, Payload

__all__ = ["DumpWriter", "Entry", "run_identity"]

_MOST_SKETCHES = 1 << 12


class Entry(msgspec.Struct, kw_only=True, gc=False):
    """A value to be written; a struct, as one is made in a fourth of the time of a dataclass.

    Attributes:
        stored: contiguous, on the CPU, as `as_stored` gives it. None for statistics alone, for
            what is no tensor, and for bytes of a digest that was written before.
        digest: of those bytes; empty, it is found out, best for large tensors that are likely new.
        sketch: float32 or float64, of one dimension.

    The others are as in `Record`.
    """

    sequence: int
    step: int
    site: Site
    tensor: TensorFacts | None = None
    value: str | None = None
    stored: Tensor | None = None
    digest: str = ""
    statistics: Statistics | None = None
    sketch: Tensor | None = None
    alias_of: int | None = None
    placement: Placement | None = None
    dtype: str | msgspec.UnsetType = msgspec.UNSET


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
            from paritas.dumps import msit_layout  # which imports this module

            self._tree = msit_layout.NpyTree(path, header.rank, header.world_size)
        elif header.layout != "packed":
            from paritas.dumps import ge_layout

            self._calls = ge_layout.CallFiles(path, header.layout, header.rank, header.world_size)
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
            needed = _bytes_of(fresh[len(held)]) if len(held) < len(fresh) else 0
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

    def name_operators(self, operators: Mapping[Place, Operator]) -> None:
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


def _bytes_of(record: Record) -> int:
    return sum(place.nbytes for place in (record.payload, record.sketch) if place is not None)
