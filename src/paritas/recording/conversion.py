"""Convert a dump to statistics or to another layout, also while it is being written."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from typing import TYPE_CHECKING

import msgspec

from paritas.core.errors import ParitasError, UsageError
from paritas.core.results.wording import count_things, list_first
from paritas.formats.dumps.completeness import describe_missing, missing_ranks
from paritas.formats.dumps.reading import Dump
from paritas.formats.dumps.writing import DumpWriter
from paritas.formats.files.records import LOCK, discard, is_locked, rank_folders, read_header
from paritas.formats.foreign.ge_calls import Operator
from paritas.formats.foreign.npy_tree import is_of_tree
from paritas.recording.conversion_sources import (
    DumpSource,
    is_there,
    reader_without_index,
    source_of,
    sync_to_disk,
)
from paritas.recording.rewriting import Rewriter, Target

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paritas.formats.files.records import Header, Record
    from paritas.formats.foreign.ge_calls import SiteKey

# Stop after this many scans in a row in which the program neither wrote nor held its lock.
PATIENCE = 20
SECONDS_BETWEEN_REPORTS = 10.0
_MOST_PROBLEMS = 10
_TREES = frozenset({"msit", "ge"})


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
