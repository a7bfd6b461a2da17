"""Write the records of a dump into another one: as statistics, or in another layout."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

import msgspec
import torch

from paritas.core.errors import ParitasError, UsageError
from paritas.core.numerics.sketch import sketch
from paritas.core.numerics.statistics import summarize
from paritas.formats.files.records import Entry
from paritas.formats.files.tensor_bytes import (
    as_stored,
    bytes_needed,
    check_repeats,
    digest,
    known_dtype,
    stored_dtype,
    stored_shape,
)
from paritas.recording.conversion_sources import LatestFiles

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from paritas.formats.dumps.reading import Dump
    from paritas.formats.dumps.writing import DumpWriter
    from paritas.formats.files.records import Record, TensorFacts
    from paritas.recording.conversion_sources import SourceRank

Target = Literal["stats", "packed", "msit", "ge"]


class Rewriter:
    """Writes the records of one rank into a new dump.

    Equal values are read once. Later records of a growing dump may point to values that were
    deleted in the meantime; these are known by then.

    Attributes:
        records: the number of records written.
        value_bytes: the size of their values, counting equal values each time.
        problems: records that could not be read, and why.
        used: files of the old dump that its index points to, and how often.
        needed: those of them with something that could not be converted.
        latest: those at the end of the index.
    """

    def __init__(self, writer: DumpWriter, dump: Dump, target: Target) -> None:
        """`dump` reads what the writer writes."""
        self.records = 0
        self.value_bytes = 0
        self.problems: list[str] = []
        self.used: Counter[str] = Counter()
        self.needed: set[str] = set()
        self.latest = LatestFiles()
        self._writer = writer
        self._made = dump
        self._target = target
        self._done: set[int] = set()
        self._latest = -1
        # The records of the new dump by their values; a few kilobytes each.
        self._known: dict[Hashable, Record] = {}
        self._digests: set[str] = set()
        # Files of records that the writer holds back until the call is complete.
        self._waiting: dict[int, set[str]] = {}

    def safe(self) -> dict[str, int]:
        """Files of the old dump whose records so far are all written, with their number."""
        needed_files = self.needed.union(*self._waiting.values())
        return {file: count for file, count in self.used.items() if file not in needed_files}

    def settle(self) -> None:
        """Note that the writer was closed and holds nothing back."""
        self._waiting.clear()

    def rewrite(self, record: Record, source: SourceRank) -> bool:
        """Convert a record, unless it already is; return whether it was converted now."""
        files = _files_of(record)
        self.used.update(files)
        self.latest.note(record, files)
        if record.sequence in self._done:
            return False
        try:
            # An index is in order, so a record that was skipped cannot be added now.
            if record.sequence < self._latest:
                raise UsageError(f"{record.id} of step {record.step} could not be read in time")
            entry = self._entry(record, source)
        except ParitasError as error:
            self.problems.append(f"rank {record.rank}: {error}")
            self.needed |= files
            return False
        self._add(entry, files)
        return True

    def take_over(self, record: Record, earlier: Dump) -> None:
        """Copy a record of an earlier conversion."""
        entry = _without_values(record)
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
            self.value_bytes += _stored_bytes(entry.tensor)
        for record in written:
            self._waiting.pop(record.sequence, None)
            if record.digest:
                self._known.setdefault(_content_key(record), record)
                self._digests.add(record.digest)

    def _entry(self, record: Record, source: SourceRank) -> Entry:
        entry = _without_values(record)
        if record.value is not None:
            return entry
        if record.payload is None and record.statistics is not None and self._target == "stats":
            return entry  # another tool's statistics
        if record.tensor is None:
            source.read(record)  # raises with the reason
            return entry
        if self._target == "stats":
            return self._summary(entry, record, source)
        if record.sketch is not None:
            entry = msgspec.structs.replace(entry, sketch=source.read_sketch(record))
        if record.digest in self._digests:
            return entry  # the writer already has these bytes
        stored = as_stored(_read_values(record, source))
        return msgspec.structs.replace(entry, stored=stored, digest=entry.digest or digest(stored))

    def _summary(self, entry: Entry, record: Record, source: SourceRank) -> Entry:
        written_record = self._known.get(_content_key(record)) if record.digest else None
        if written_record is not None and written_record.sketch is not None:
            drawn = self._made.read_sketch(written_record)
            return msgspec.structs.replace(
                entry, statistics=written_record.statistics, sketch=drawn
            )
        if record.sketch is not None and record.statistics is not None:
            return msgspec.structs.replace(entry, sketch=source.read_sketch(record))
        values, part = _read_values(record, source), record.placement
        check_repeats(values)
        drawn = sketch(
            values,
            global_shape=None if part is None else part.global_shape,
            global_offset=None if part is None else part.global_offset,
        )
        statistics = record.statistics
        if statistics is None or not statistics.counts_all:
            statistics = summarize(values)  # those of other tools are rounded and incomplete
        return msgspec.structs.replace(
            entry,
            statistics=statistics,
            sketch=drawn,
            digest=entry.digest or digest(as_stored(values)),
        )


def _files_of(record: Record) -> set[str]:
    return {payload.file for payload in (record.payload, record.sketch) if payload is not None}


def _without_values(record: Record) -> Entry:
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


def _read_values(record: Record, source: SourceRank) -> Tensor:
    try:
        return source.read(record)
    except ParitasError:
        # Zeros are the same bytes in every dtype. The file that had them first may be deleted.
        payload, facts = record.payload, record.tensor
        if payload is None or facts is None:
            raise
        dtype = stored_dtype(known_dtype(facts.dtype))
        zeros = torch.zeros(_stored_bytes(facts), dtype=torch.uint8)
        if digest(zeros) != record.digest:
            raise
        return (
            zeros.view(dtype).reshape(stored_shape(facts.shape, facts.stride)).expand(facts.shape)
        )


def _stored_bytes(facts: TensorFacts) -> int:
    dtype = stored_dtype(known_dtype(facts.dtype))
    return bytes_needed(dtype, stored_shape(facts.shape, facts.stride))


def _content_key(record: Record) -> Hashable:
    """Records with equal keys have the same statistics and sketch."""
    facts = record.tensor
    if facts is None:
        return None
    repeated = stored_shape(facts.shape, facts.stride) != facts.shape
    # A view with another shape has the same values in the same order.
    shape = (facts.shape, facts.stride) if repeated or record.placement else None
    return record.digest, facts.dtype, shape, record.placement
