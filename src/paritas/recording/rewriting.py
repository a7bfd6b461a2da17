"""Records of one dump written into another: their values, or statistics of them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
import torch

from paritas.dumps.dtypes import (
    as_stored,
    bytes_needed,
    digest,
    known_dtype,
    stored_dtype,
    stored_shape,
)
from paritas.dumps.writing import Entry
from paritas.errors import ParitasError, UsageError
from paritas.numerics.sketch import sketch
from paritas.numerics.statistics import summarize
from paritas.recording.following import note_use

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from paritas.dumps.reading import Dump
    from paritas.dumps.records import Record, TensorFacts
    from paritas.dumps.writing import DumpWriter

__all__ = ["Rewriter", "Target"]

Target = Literal["stats", "packed", "msit", "ge"]


class Readable(Protocol):
    """What gives the values of records."""

    def read(self, record: Record) -> Tensor:
        """The values of a record."""

    def read_sketch(self, record: Record) -> Tensor:
        """The sketch of its values."""


class Rewriter:
    """Writes the records of one rank into a new dump.

    Equal values are looked at once. Later records of a dump that is being written may point to
    values that were deleted meanwhile: these are known by then.

    Attributes:
        records: how many were written.
        value_bytes: size of the values that they have, equal ones counted each time.
        problems: records that could not be read, and why.
        used: files of the old dump that its index points to, and how often.
        needed: those of them that hold what could not be converted.
        newest: the last data file in use of each folder.
    """

    def __init__(self, writer: DumpWriter, made: Dump, target: Target) -> None:
        """`made` reads what the writer writes."""
        self.records = 0
        self.value_bytes = 0
        self.problems: list[str] = []
        self.used: Counter[str] = Counter()
        self.needed: set[str] = set()
        self.newest: dict[str, int] = {}
        self._writer = writer
        self._made = made
        self._target = target
        self._done: set[int] = set()
        self._latest = -1
        # What the new dump has of values, by what they are. Some kilobytes for each.
        self._known: dict[Hashable, Record] = {}
        self._digests: set[str] = set()
        # Files of records that the writer has and did not write: it waits for the rest of a call.
        self._waiting: dict[int, set[str]] = {}

    def safe(self) -> dict[str, int]:
        """Files of the old dump all of whose records so far are written, and how many these are."""
        kept = self.needed.union(*self._waiting.values())
        return {file: count for file, count in self.used.items() if file not in kept}

    def settle(self) -> None:
        """The writer was closed: nothing waits any more."""
        self._waiting.clear()

    def rewrite(self, record: Record, source: Readable) -> bool:
        """Convert a record, unless an earlier conversion has; whether it did."""
        for payload in (record.payload, record.sketch):
            note_use(payload, self.used, self.newest)
        if record.sequence in self._done:
            return False
        try:
            # An index is in order: what was left out before cannot be put in now.
            if record.sequence < self._latest:
                raise UsageError(f"{record.id} of step {record.step} could not be read earlier")
            entry = self._entry(record, source)
        except ParitasError as error:
            self.problems.append(f"rank {record.rank}: {error}")
            self.needed |= _files(record)
            return False
        self._add(entry, _files(record))
        return True

    def take_over(self, record: Record, earlier: Dump) -> None:
        """Copy a record that was converted before."""
        entry = _bare(record)
        if record.sketch is not None:
            entry = msgspec.structs.replace(entry, sketch=earlier.read_sketch(record))
        if record.payload is not None and record.tensor is not None:
            entry = msgspec.structs.replace(entry, stored=as_stored(earlier.read(record)))
        self._add(entry)

    def _add(self, entry: Entry, files: set[str] | None = None) -> None:
        self._waiting[entry.sequence] = files or set()
        written = self._writer.add_many([entry])
        self._done.add(entry.sequence)
        self._latest = entry.sequence
        self.records += 1
        if entry.tensor is not None:
            self.value_bytes += _nbytes(entry.tensor)
        for record in written:
            self._waiting.pop(record.sequence, None)
            if record.digest:
                self._known.setdefault(_content(record), record)
                self._digests.add(record.digest)

    def _entry(self, record: Record, source: Readable) -> Entry:
        entry = _bare(record)
        if record.value is not None:
            return entry
        if record.payload is None and record.statistics is not None and self._target == "stats":
            return entry  # what another tool kept instead of values
        if record.tensor is None:
            source.read(record)  # says why that cannot be
            return entry
        if self._target == "stats":
            return self._summary(entry, record, source)
        if record.sketch is not None:
            entry = msgspec.structs.replace(entry, sketch=source.read_sketch(record))
        if record.digest in self._digests:
            return entry  # the writer has these bytes
        stored = as_stored(_values(record, source))
        return msgspec.structs.replace(entry, stored=stored, digest=entry.digest or digest(stored))

    def _summary(self, entry: Entry, record: Record, source: Readable) -> Entry:
        known = self._known.get(_content(record)) if record.digest else None
        if known is not None and known.sketch is not None:
            drawn = self._made.read_sketch(known)
            return msgspec.structs.replace(entry, statistics=known.statistics, sketch=drawn)
        if record.sketch is not None and record.statistics is not None:
            return msgspec.structs.replace(entry, sketch=source.read_sketch(record))
        values, part = _values(record, source), record.placement
        drawn = sketch(
            values,
            global_shape=None if part is None else part.global_shape,
            global_offset=None if part is None else part.global_offset,
        )
        statistics = record.statistics
        if statistics is None or not statistics.counts_all:
            statistics = summarize(values)  # other tools' say less, and are rounded
        return msgspec.structs.replace(
            entry,
            statistics=statistics,
            sketch=drawn,
            digest=entry.digest or digest(as_stored(values)),
        )


def _files(record: Record) -> set[str]:
    return {payload.file for payload in (record.payload, record.sketch) if payload is not None}


def _bare(record: Record) -> Entry:
    """A record without its values."""
    return Entry(
        sequence=record.sequence,
        step=record.step,
        site=record.site,
        tensor=record.tensor,
        value=record.value,
        digest=record.digest,
        statistics=record.statistics,
        alias_of=record.alias_of,
        placement=record.placement,
        dtype=record.dtype,
    )


def _values(record: Record, source: Readable) -> Tensor:
    try:
        return source.read(record)
    except ParitasError:
        # Zeros of all dtypes are the same bytes. The file that had them first may be deleted.
        payload, facts = record.payload, record.tensor
        if payload is None or facts is None:
            raise
        dtype = stored_dtype(known_dtype(facts.dtype))
        zeros = torch.zeros(_nbytes(facts), dtype=torch.uint8)
        if digest(zeros) != record.digest:
            raise
        return (
            zeros.view(dtype).reshape(stored_shape(facts.shape, facts.stride)).expand(facts.shape)
        )


def _nbytes(facts: TensorFacts) -> int:
    dtype = stored_dtype(known_dtype(facts.dtype))
    return bytes_needed(dtype, stored_shape(facts.shape, facts.stride))


def _content(record: Record) -> Hashable:
    """Records that agree in this have the same statistics and the same sketch."""
    facts = record.tensor
    if facts is None:
        return None
    repeated = stored_shape(facts.shape, facts.stride) != facts.shape
    # A view of another shape holds the same values in the same order.
    shape = (facts.shape, facts.stride) if repeated or record.placement else None
    return record.digest, facts.dtype, shape, record.placement
