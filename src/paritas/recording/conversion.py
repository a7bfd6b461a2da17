"""Convert a dump to statistics or to another layout, also while it is being written."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections import Counter
from typing import TYPE_CHECKING, Literal

import msgspec
import torch

from paritas.core.errors import ParitasError, UsageError
from paritas.core.numerics.sketch import sketch
from paritas.core.numerics.statistics import summarize
from paritas.core.results.wording import count_things, list_first
from paritas.formats.dumps.completeness import describe_missing, missing_ranks
from paritas.formats.dumps.reading import Dump
from paritas.formats.dumps.writing import DumpWriter
from paritas.formats.files.records import LOCK, Entry, discard, is_locked, rank_folders, read_header
from paritas.formats.files.tensor_bytes import (
    as_stored,
    bytes_needed,
    check_repeats,
    digest,
    known_dtype,
    stored_dtype,
    stored_shape,
)
from paritas.formats.foreign.ge_writing import Operator
from paritas.formats.foreign.npy_tree import is_of_tree
from paritas.recording.conversion_sources import (
    DumpSource,
    LatestFiles,
    is_there,
    reader_without_index,
    source_of,
    sync_to_disk,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from pathlib import Path

    from torch import Tensor

    from paritas.formats.files.records import Header, Record, TensorFacts
    from paritas.formats.foreign.ge_writing import SiteKey
    from paritas.recording.conversion_sources import SourceRank


# --- Writing records into another dump ------------------------------------------------------------

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


# --- Converting a whole dump ----------------------------------------------------------------------

# Stop after this many scans in a row in which the program neither wrote nor held its lock.
PATIENCE = 20
SECONDS_BETWEEN_REPORTS = 10.0
_MOST_PROBLEMS = 10
_TREES = frozenset({"msit", "ge"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """The result of a conversion.

    Attributes:
        records: the number of records in the new dump.
        earlier: how many of them come from an interrupted conversion.
        ranks: the number of ranks.
        value_bytes: the size of the values, counting equal values each time.
        written_bytes: the size of what was written of them, without the index.
        freed_bytes: the size of what was deleted from the old dump.
        freed_files: the number of files that were deleted.
        problems: what could not be converted.
        closed: whether the old dump is closed in all ranks, so no more records follow.
        is_ours: whether the old dump is a paritas dump, which keeps its index.
    """

    records: int
    earlier: int
    ranks: int
    value_bytes: int
    written_bytes: int
    freed_bytes: int
    freed_files: int
    problems: tuple[str, ...]
    closed: bool
    is_ours: bool


class Converter:
    """Converts one dump into another folder.

    The new dump is written record by record and can be read at any time. The records of an earlier,
    interrupted conversion of the same dump are reused.
    """

    def __init__(
        self,
        source: Path,
        output: Path,
        target: Target,
        *,
        kind: str | None = None,
        delete: bool = False,
    ) -> None:
        """Check the folders; `run` converts.

        Args:
            kind: the tool that made the source; None detects it.
            delete: delete files of the source once their content is safely in the output.
        """
        self.source = source
        self.output = output
        self.target = target
        self.kind = kind
        self.delete = delete
        self._dump: DumpSource | None = None
        self._ranks: dict[int, _RankConversion] = {}
        self._earlier = 0
        inside = output.resolve().is_relative_to(source.resolve())
        if inside or source.resolve().is_relative_to(output.resolve()):
            raise UsageError(f"cannot convert {source} into {output}: use a folder outside of it")

    def run(
        self, *, interval: float | None = None, on_progress: Callable[[str], None] | None = None
    ) -> None:
        """Convert the dump.

        Args:
            interval: follow a growing dump, scanning it with this interval in seconds, until every
                rank is closed, or its process has ended and nothing was written for a while. Dumps
                of other tools are never closed; interrupt this to stop following one.
            on_progress: called with a message about the progress.
        """
        tell = on_progress or (lambda _: None)
        if interval is not None and not is_there(self.source):
            tell(f"waiting for {self.source}")
            while not is_there(self.source):
                time.sleep(interval)
        self._dump = source_of(
            self.source, grows=interval is not None, kind=self.kind, earlier=self._earlier_headers()
        )
        self._resume(self._dump, tell)
        quiet, reported = 0, 0.0
        while True:
            busy = self._convert_new(self._dump)
            quiet = 0 if busy else quiet + 1
            ended = all(part.finished for part in self._ranks.values())
            given_up = quiet >= PATIENCE and not self._dump.is_endless
            if interval is None or ended or given_up:
                return
            if time.monotonic() > reported + SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                records = sum(part.rewriter.records for part in self._ranks.values())
                tell(f"{records} records converted, watching {self.source}")
            time.sleep(interval)

    @property
    def is_ours(self) -> bool:
        """Whether the source is a paritas dump."""
        return self._dump is not None and self._dump.kind == "paritas"

    def close(self) -> None:
        """Close the new dump; it is marked complete if the old one is."""
        for part in self._ranks.values():
            part.close()
        if self._ranks and self.target in _TREES:
            _copy_graphs(self.source, self.output)

    def result(self) -> Conversion:
        """What was converted."""
        parts = list(self._ranks.values())
        problems = [problem for part in parts for problem in part.problems()]
        if self.is_ours and parts:
            missing = missing_ranks([part.rank.header for part in parts], self._ranks)
            problems += map(describe_missing, missing)
        more = len(problems) - _MOST_PROBLEMS
        if more > 0:
            problems = [*problems[:_MOST_PROBLEMS], f"and {more} more like these"]
        return Conversion(
            records=sum(part.rewriter.records for part in parts),
            earlier=self._earlier,
            ranks=len(parts),
            value_bytes=sum(part.rewriter.value_bytes for part in parts),
            written_bytes=sum(part.writer.written_bytes for part in parts),
            freed_bytes=sum(part.freed_bytes for part in parts),
            freed_files=sum(part.freed_files for part in parts),
            problems=tuple(problems),
            closed=bool(parts) and all(part.finished for part in parts),
            is_ours=self.is_ours,
        )

    def _convert_new(self, dump: DumpSource) -> bool:
        """Convert new records; return whether there were any, or a program is still writing."""
        busy = False
        for rank in dump.ranks():
            part = self._part(dump, rank)
            busy |= part.advance() or part.rank.is_busy
            if self.delete:
                part.free()
        return busy

    def _part(self, dump: DumpSource, rank: int) -> _RankConversion:
        if rank not in self._ranks:
            self._ranks[rank] = _RankConversion(self, dump, rank)
        return self._ranks[rank]

    # --- resuming an interrupted conversion -------------------------------------------------------

    def _earlier_headers(self) -> list[Header]:
        """The headers of an earlier conversion."""
        before = self.output.with_name(f".{self.output.name}.before")
        earlier_output = next((path for path in (before, self.output) if path.is_dir()), None)
        headers = []
        for folder in rank_folders(earlier_output).values() if earlier_output is not None else ():
            with contextlib.suppress(ParitasError):  # reported later, with the reason
                headers.append(read_header(folder))
        return [header for header in headers if _made_by_mark(self.target) in header.notes]

    def _resume(self, dump: DumpSource, tell: Callable[[str], None]) -> None:
        """Copy the records of an earlier conversion into the new one.

        They may be all that is left of deleted files, so the earlier conversion is deleted only
        after its copy is on the disk. If killed in between, both exist, and the copy starts again.
        """
        if self.output.exists() and not self.output.is_dir():
            raise UsageError(f"{self.output} is a file: use a folder as --output")
        before = self.output.with_name(f".{self.output.name}.before")
        runs = dump.runs()
        if before.exists():
            _check_resumable(before, runs, self.target)
            if self.output.exists():
                discard(self.output)
        elif self.output.exists() and any(self.output.iterdir()):
            _check_resumable(self.output, runs, self.target)
            self.output.rename(before)
        else:
            return
        tell(f"reusing the earlier conversion in {self.output}")
        earlier = Dump.open(before)
        for rank in sorted(earlier.ranks):
            part = self._part(dump, rank)
            for record in part.rank.resume(earlier.ranks[rank]):
                part.take_over(record, earlier)
                self._earlier += 1
        if self._ranks:
            sync_to_disk(self.output)
        discard(before)


class _RankConversion:
    """The conversion of one rank.

    Attributes:
        rank: the rank of the old dump.
        finished: whether that is closed and converted.
    """

    def __init__(self, converter: Converter, dump: DumpSource, rank: int) -> None:
        self.rank = dump.part(rank)
        _check_useful(self.rank.header, dump.kind, converter.source, converter.target)
        self.finished = False
        self._is_through = False
        self.freed_bytes = self.freed_files = 0
        self._converter = converter
        self._marked = self._header()
        # Its operators keep the names and types of the engine.
        self._is_of_engine = dump.kind == "ge"
        self.writer = DumpWriter(converter.output, self._marked)
        self.rank.attach(self.writer.folder)
        reader = reader_without_index(converter.output, self.writer.folder, self._marked)
        self.rewriter = Rewriter(self.writer, reader, converter.target)

    def advance(self) -> bool:
        """Convert new records; return whether there were any."""
        self.rank.refresh()
        if self._header() != self._marked:
            self._marked = self._header()
            self.writer.describe(self._marked)
        before = self.rewriter.records
        self._is_through = False
        for record in self.rank.new_records():
            if self._is_of_engine:
                site = record.site
                site_key: SiteKey = (site.phase, site.graph, site.name)
                self.writer.name_operators({site_key: Operator(site.op, site.name)})
            if self.rewriter.rewrite(record, self.rank):
                self.rank.note(record)
        self._is_through = True
        self.finished = self.rank.header.closed
        return self.rewriter.records != before

    def take_over(self, record: Record, earlier: Dump) -> None:
        """Copy a record of an earlier conversion."""
        self.rewriter.take_over(record, earlier)
        self.rank.note(record)

    def free(self) -> None:
        """Delete files whose values are in the new dump."""
        if not self._is_through:  # interrupted: a file may be converted only in part
            return
        files = self.rank.deletable(self.rewriter.safe(), self.rewriter.latest)
        if not files:
            return
        try:
            sync_to_disk(self._converter.output)
        except OSError as error:
            raise ParitasError(
                f"cannot write to {self._converter.output}: {error.strerror or error}; nothing was "
                f"deleted"
            ) from error
        for path in files:
            file_stat = path.stat()
            self.rank.delete(path)
            self.freed_files += bool(file_stat.st_size)
            # Deleting a hard link frees space only if it is the last one.
            self.freed_bytes += file_stat.st_size if file_stat.st_nlink == 1 else 0
        self.rank.mark(f"values were deleted by paritas convert; see {self._converter.output.name}")

    def problems(self) -> list[str]:
        """What could not be converted, or not be read as a record."""
        problems = self.rewriter.problems
        rank_problems = (
            problem
            for problem in self.rank.problems
            if not any(problem in each for each in problems)
        )
        return [*rank_problems, *problems, *filter(None, [self._find_lost()])]

    def _find_lost(self) -> str:
        """How many records the index of a closed dump lacks; empty if none."""
        written = self.rank.header.records
        readable_count = self.rewriter.records + len(self.rewriter.problems) + len(self.rank.losses)
        if not (self._converter.is_ours and self.finished and written != readable_count):
            return ""
        return f"{written} records were written, but {readable_count} can be read"

    def close(self) -> None:
        """Close the new part."""
        failed = len(self.rewriter.problems)
        header = self._header()
        notes = [*header.notes]
        if self._converter.is_ours:  # each problem is a line of the index
            failed += len(self.rank.losses)
        elif self.rank.losses:
            notes.append(f"the original was incomplete: {list_first(self.rank.losses)}")
        if failed:
            notes.append(f"{count_things(failed, 'record')} could not be converted")
        lost = self._find_lost()
        notes += filter(None, [lost])
        header = msgspec.structs.replace(header, notes=tuple(notes))
        is_whole = not failed and not lost and not self.rank.losses
        self.writer.close(header, complete=self.finished and is_whole)
        self.rewriter.settle()
        if self._converter.delete:
            self.free()

    def _header(self) -> Header:
        target = self._converter.target
        header = self.rank.header
        return msgspec.structs.replace(
            header,
            data="stats" if target == "stats" else "tensor",
            layout="packed" if target == "stats" else target,
            notes=(*header.notes, _made_by_mark(target)),
            closed=False,
            records=0,
        )


def _made_by_mark(target: Target) -> str:
    return f"made by paritas convert --to {target}"


def _copy_graphs(source: Path, output: Path) -> None:
    """Copy the text files of graphs that are next to the folders of ranks in torchair's trees."""
    for path in sorted(source.iterdir()) if source.is_dir() else []:
        if path.is_file() and is_of_tree(path.name):
            shutil.copyfile(path, output / path.name)


def _check_useful(header: Header, kind: str, source: Path, target: Target) -> None:
    # Statistics of another tool can become a paritas index.
    if header.data == "stats" and (kind == "paritas" or target != "stats"):
        why = "there is nothing to convert" if target == "stats" else "its values are not recorded"
        raise UsageError(f"{source} holds statistics only, so {why}; convert a dump of tensors")


def _check_resumable(path: Path, runs: set[str], target: Target) -> None:
    """Refuse to touch what is not an earlier conversion of the same dump."""
    folders = rank_folders(path).values()
    if any(is_locked(folder / LOCK) for folder in folders):
        raise UsageError(f"another process is writing {path}: wait for it, or stop it")
    try:
        headers = [read_header(folder) for folder in folders]
    except ParitasError as error:
        raise UsageError(f"{path} is not empty: {error}; use another --output") from error
    for header in headers:
        if header.run not in runs or _made_by_mark(target) not in header.notes:
            raise UsageError(
                f"{path} is not empty and is not a conversion of this dump to {target} (it is of "
                f"run {header.run}): use another --output"
            )
    if not headers:
        raise UsageError(f"{path} is not empty and is not a dump: use another --output")
