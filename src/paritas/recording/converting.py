"""A dump made into another: into statistics, or into another layout; also while it is written."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING

import msgspec

from paritas.dumps.folders import discard, rank_folders, read_header, write_header
from paritas.dumps.locks import LOCK, is_locked
from paritas.dumps.reading import Dump, RankDump
from paritas.dumps.writing import DumpWriter
from paritas.errors import ParitasError, UsageError
from paritas.recording.following import Follower, freeable, see_onto_disk
from paritas.recording.rewriting import Rewriter, Target

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paritas.dumps.records import Header

__all__ = ["Conversion", "Converter", "Target"]

# So many looks in a row at a program that neither writes nor holds its lock, and it is given up.
PATIENCE = 20
TOLD_EACH = 10.0  # seconds
_MOST_PROBLEMS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """What became of a dump.

    Attributes:
        records: how many are in the new dump.
        earlier: how many of these an interrupted conversion had made.
        ranks: of how many ranks.
        value_bytes: size of the values they have, equal ones counted each time.
        written_bytes: size of what is kept of them, without the index.
        freed_bytes: size of what was deleted of the old dump.
        freed_files: how many files that was.
        problems: what could not be converted.
        closed: whether the old dump was closed in all its ranks, so that there is nothing to come.
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


class Converter:
    """Converts one dump into a folder of its own.

    The new dump is written like any other, record by record, and can be read at any moment. Where
    there is one that an earlier converter of the same dump left, its records are taken over.
    """

    def __init__(self, source: Path, output: Path, target: Target, *, delete: bool = False) -> None:
        """Look at the folders only; `run` converts.

        Args:
            delete: delete files of the source once all that they hold is safe in the output.
        """
        self.source = source
        self.output = output
        self.target = target
        self.delete = delete
        self._ranks: dict[int, _RankConversion] = {}
        self._earlier = 0
        inside = output.resolve().is_relative_to(source.resolve())
        if inside or source.resolve().is_relative_to(output.resolve()):
            raise UsageError(f"cannot convert {source} into {output}: give a folder outside of it")

    def run(
        self, *, interval: float | None = None, on_progress: Callable[[str], None] | None = None
    ) -> None:
        """Convert what is there.

        Args:
            interval: go on with what comes, looking each so many seconds, until every rank is
                closed, or has not been heard of for long and has no process any more.
            on_progress: told what is being done.
        """
        tell = on_progress or (lambda _: None)
        if interval is not None and not _has_ranks(self.source):
            tell(f"waiting for {self.source}")
            while not _has_ranks(self.source):
                time.sleep(interval)
        self._take_over(tell)
        quiet, told = 0, 0.0
        while True:
            busy = self._look()
            quiet = 0 if busy else quiet + 1
            ended = all(part.finished for part in self._ranks.values())
            if interval is None or ended or quiet >= PATIENCE:
                return
            if time.monotonic() > told + TOLD_EACH:
                told = time.monotonic()
                records = sum(part.rewriter.records for part in self._ranks.values())
                tell(f"{records} records converted, watching {self.source}")
            time.sleep(interval)

    def close(self) -> None:
        """Close the new dump: as closed as the old one is, and as whole."""
        for part in self._ranks.values():
            part.close()

    def result(self) -> Conversion:
        """What was done."""
        parts = list(self._ranks.values())
        problems = [problem for part in parts for problem in part.problems()]
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
        )

    def _look(self) -> bool:
        """Convert what is new; whether there was something, or somebody is still at it."""
        busy = False
        for rank in sorted(rank_folders(self.source)):
            part = self._part(rank)
            busy |= part.advance() or is_locked(part.folder / LOCK)
            if self.delete:
                part.free()
        return busy

    def _part(self, rank: int) -> _RankConversion:
        if rank not in self._ranks:
            self._ranks[rank] = _RankConversion(self, rank)
        return self._ranks[rank]

    # --- what an interrupted conversion left ------------------------------------------------------

    def _take_over(self, tell: Callable[[str], None]) -> None:
        """Copy the records of an earlier conversion into the new one.

        They may be all that is left of files that were deleted, so the earlier one goes only when
        its copy is on the disk. Killed in between, there are both, and the copy is begun anew.
        """
        before = self.output.with_name(f".{self.output.name}.before")
        runs = _runs(self.source)
        if before.exists():
            _check_resumable(before, runs, self.target)
            if self.output.exists():
                discard(self.output)
        elif self.output.exists() and any(self.output.iterdir()):
            _check_resumable(self.output, runs, self.target)
            self.output.rename(before)
        else:
            return
        tell(f"taking over what is in {self.output}")
        earlier = Dump.open(before)
        for rank in sorted(earlier.ranks):
            part = self._part(rank)
            for record in earlier.ranks[rank].records:
                part.rewriter.take_over(record, earlier)
                self._earlier += 1
        if self._ranks:
            see_onto_disk(self.output)
        discard(before)


class _RankConversion:
    """One rank of it.

    Attributes:
        header: of the old dump.
        finished: whether that is closed, and all of it converted.
    """

    def __init__(self, converter: Converter, rank: int) -> None:
        self.folder = rank_folders(converter.source)[rank]
        self.header = read_header(self.folder)
        _check_useful(self.header, converter.source, converter.target)
        self.finished = False
        self.freed_bytes = self.freed_files = 0
        self._converter = converter
        self._marked = self._header()
        self._source = _without_index(converter.source, self.folder, self.header)
        self.writer = DumpWriter(converter.output, self._marked)
        made = _without_index(converter.output, self.writer.folder, self._marked)
        self.rewriter = Rewriter(self.writer, made, converter.target)
        self._follower = Follower(self.folder, rank)

    def advance(self) -> bool:
        """Convert what is new; whether there was something."""
        # Read before the index: if it says that there is nothing to come, then all is in there.
        self.header = read_header(self.folder)
        if self._header() != self._marked:
            self._marked = self._header()
            self.writer.describe(self._marked)
        before = self.rewriter.records
        for record in self._follower.new_records():
            self.rewriter.rewrite(record, self._source)
        self.finished = self.header.closed
        return self.rewriter.records != before

    def free(self) -> None:
        """Delete files whose values are in the new dump."""
        root = self._converter.source
        used = self.rewriter.used - self.rewriter.needed
        files = freeable(root, self.header, used, self.rewriter.newest)
        if not files:
            return
        see_onto_disk(self._converter.output)
        for path in files:
            found = path.stat()
            if self.header.closed:
                path.unlink()
            else:
                # The program still knows it by name, and looks for it when it closes.
                os.truncate(path, 0)
            self.freed_files += bool(found.st_size)
            # A second name of the same file frees nothing; the last one does.
            self.freed_bytes += found.st_size if found.st_nlink == 1 else 0
        note = f"values were deleted by paritas convert; see {self._converter.output.name}"
        if self.header.closed and note not in self.header.notes:
            self.header = msgspec.structs.replace(self.header, notes=(*self.header.notes, note))
            write_header(self.folder, self.header)

    def problems(self) -> list[str]:
        """What could not be converted."""
        return [*self._follower.problems, *self.rewriter.problems]

    def close(self) -> None:
        """Close the new part."""
        failed = len(self.problems())
        header = self._header()
        if failed:
            records = "record" if failed == 1 else "records"
            notes = (*header.notes, f"{failed} {records} could not be converted")
            header = msgspec.structs.replace(header, notes=notes)
        self.writer.close(header, complete=self.finished and not failed)

    def _header(self) -> Header:
        target = self._converter.target
        return msgspec.structs.replace(
            self.header,
            data="stats" if target == "stats" else "tensor",
            layout="msit" if target == "msit" else "packed",
            notes=(*self.header.notes, _mark(target)),
            closed=False,
            records=0,
        )


def _mark(target: Target) -> str:
    return f"made by paritas convert --to {target}"


def _has_ranks(path: Path) -> bool:
    return path.is_dir() and bool(rank_folders(path))


def _runs(path: Path) -> set[str]:
    """The run that a dump is of; more than one where they were mixed."""
    if not _has_ranks(path):
        Dump.open(path)  # says what is wrong
    return {read_header(folder).run for folder in rank_folders(path).values()}


def _without_index(path: Path, folder: Path, header: Header) -> Dump:
    """A reader for one rank, without its index: the records that it is asked for are known."""
    rank = RankDump(
        rank=header.rank,
        folder=folder,
        header=header,
        state="being written",
        records=[],
        problems=[],
    )
    return Dump(path, {header.rank: rank}, [])


def _check_useful(header: Header, source: Path, target: Target) -> None:
    if header.data == "stats":
        why = "there is nothing to convert" if target == "stats" else "the values are not there"
        raise UsageError(f"{source} holds statistics, no tensors: {why}; give a dump of tensors")


def _check_resumable(path: Path, runs: set[str], target: Target) -> None:
    """Refuse to touch what is not an earlier conversion of the same dump."""
    folders = rank_folders(path).values()
    if any(is_locked(folder / LOCK) for folder in folders):
        raise UsageError(f"{path} is being written by another process: wait, or end that")
    try:
        headers = [read_header(folder) for folder in folders]
    except ParitasError as error:
        raise UsageError(f"{path} is not empty: {error}; give another --output") from error
    for header in headers:
        if header.run not in runs or _mark(target) not in header.notes:
            raise UsageError(
                f"{path} is not empty, and holds no conversion of this dump to {target} (run "
                f"{header.run}): give another --output"
            )
    if not headers:
        raise UsageError(f"{path} is not empty, and is no dump: give another --output")
