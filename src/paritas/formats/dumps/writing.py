"""Write a dump: first the bytes of each value, then its line in the index."""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING

import msgspec

from paritas.core.errors import ParitasError
from paritas.formats.dumps.claiming import claim
from paritas.formats.dumps.volumes import Volume
from paritas.formats.files.records import (
    LOCK,
    NPY_LAYOUTS,
    Entry,
    Lock,
    Payload,
    Record,
    discard,
    step_name,
    write_header,
)
from paritas.formats.files.safetensors_files import LARGEST_FILE
from paritas.formats.files.tensor_bytes import bytes_needed, known_dtype, stored_dtype, stored_shape
from paritas.formats.foreign.ge_calls import CallFiles
from paritas.formats.foreign.npy_tree import NpyTree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from paritas.formats.files.records import Header
    from paritas.formats.foreign.ge_calls import Operator, SiteKey

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
