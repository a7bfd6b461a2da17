"""A dump made into another: into statistics, or into another layout; also while it is written."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from typing import TYPE_CHECKING

import msgspec

from paritas.dumps.folders import discard, rank_folders, read_header
from paritas.dumps.ge_layout import Operator
from paritas.dumps.locks import LOCK, is_locked
from paritas.dumps.msit_layout import is_of_tree
from paritas.dumps.reading import Dump
from paritas.dumps.writing import DumpWriter
from paritas.errors import ParitasError, UsageError
from paritas.recording.conversion_sources import (
    DumpSource,
    is_there,
    reader_without_index,
    source_of,
)
from paritas.recording.following import see_onto_disk
from paritas.recording.rewriting import Rewriter, Target

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paritas.dumps.ge_layout import Place
    from paritas.dumps.records import Header, Record

__all__ = ["Conversion", "Converter", "Target"]

# So many looks in a row at a program that neither writes nor holds its lock, and it is given up.
PATIENCE = 20
TOLD_EACH = 10.0  # seconds
_MOST_PROBLEMS = 10
_TREES = frozenset({"msit", "ge"})


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
        is_ours: whether the old dump is one of paritas, which keeps its index.
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
    """Converts one dump into a folder of its own.

    The new dump is written like any other, record by record, and can be read at any moment. Where
    there is one that an earlier converter of the same dump left, its records are taken over.
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
        """Look at the folders only; `run` converts.

        Args:
            kind: which tool made the source; None finds out.
            delete: delete files of the source once all that they hold is safe in the output.
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
            raise UsageError(f"cannot convert {source} into {output}: give a folder outside of it")

    def run(
        self, *, interval: float | None = None, on_progress: Callable[[str], None] | None = None
    ) -> None:
        """Convert what is there.

        Args:
            interval: go on with what comes, looking each so many seconds, until every rank is
                closed, or has not been heard of for long and has no process any more. Dumps of
                other tools are never closed: who follows one has to interrupt this.
            on_progress: told what is being done.
        """
        tell = on_progress or (lambda _: None)
        if interval is not None and not is_there(self.source):
            tell(f"waiting for {self.source}")
            while not is_there(self.source):
                time.sleep(interval)
        self._dump = source_of(
            self.source, grows=interval is not None, kind=self.kind, earlier=self._earlier_headers()
        )
        self._take_over(self._dump, tell)
        quiet, told = 0, 0.0
        while True:
            busy = self._look(self._dump)
            quiet = 0 if busy else quiet + 1
            ended = all(part.finished for part in self._ranks.values())
            given_up = quiet >= PATIENCE and not self._dump.is_endless
            if interval is None or ended or given_up:
                return
            if time.monotonic() > told + TOLD_EACH:
                told = time.monotonic()
                records = sum(part.rewriter.records for part in self._ranks.values())
                tell(f"{records} records converted, watching {self.source}")
            time.sleep(interval)

    @property
    def is_ours(self) -> bool:
        """Whether the source is a dump of paritas."""
        return self._dump is not None and self._dump.kind == "paritas"

    def close(self) -> None:
        """Close the new dump: as closed as the old one is, and as whole."""
        for part in self._ranks.values():
            part.close()
        if self._ranks and self.target in _TREES:
            _copy_graphs(self.source, self.output)

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
            is_ours=self.is_ours,
        )

    def _look(self, dump: DumpSource) -> bool:
        """Convert what is new; whether there was something, or somebody is still at it."""
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

    # --- what an interrupted conversion left ------------------------------------------------------

    def _earlier_headers(self) -> list[Header]:
        """What an earlier conversion says of its ranks."""
        before = self.output.with_name(f".{self.output.name}.before")
        found = next((path for path in (before, self.output) if path.is_dir()), None)
        headers = []
        for folder in rank_folders(found).values() if found is not None else ():
            with contextlib.suppress(ParitasError):  # what is there is refused later, with reasons
                headers.append(read_header(folder))
        return [header for header in headers if _mark(self.target) in header.notes]

    def _take_over(self, dump: DumpSource, tell: Callable[[str], None]) -> None:
        """Copy the records of an earlier conversion into the new one.

        They may be all that is left of files that were deleted, so the earlier one goes only when
        its copy is on the disk. Killed in between, there are both, and the copy is begun anew.
        """
        if self.output.exists() and not self.output.is_dir():
            raise UsageError(f"{self.output} is a file: give a folder as --output")
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
        tell(f"taking over what is in {self.output}")
        earlier = Dump.open(before)
        for rank in sorted(earlier.ranks):
            part = self._part(dump, rank)
            for record in part.rank.resume(earlier.ranks[rank]):
                part.take_over(record, earlier)
                self._earlier += 1
        if self._ranks:
            see_onto_disk(self.output)
        discard(before)


class _RankConversion:
    """One rank of it.

    Attributes:
        rank: the same one of the old dump.
        finished: whether that is closed, and all of it converted.
    """

    def __init__(self, converter: Converter, dump: DumpSource, rank: int) -> None:
        self.rank = dump.part(rank)
        _check_useful(self.rank.header, dump.kind, converter.source, converter.target)
        self.finished = False
        self._is_through = False
        self.freed_bytes = self.freed_files = 0
        self._converter = converter
        self._marked = self._header()
        # Its operators have the names and types that the engine gave them.
        self._is_of_engine = dump.kind == "ge"
        self.writer = DumpWriter(converter.output, self._marked)
        self.rank.attach(self.writer.folder)
        made = reader_without_index(converter.output, self.writer.folder, self._marked)
        self.rewriter = Rewriter(self.writer, made, converter.target)

    def advance(self) -> bool:
        """Convert what is new; whether there was something."""
        self.rank.refresh()
        if self._header() != self._marked:
            self._marked = self._header()
            self.writer.describe(self._marked)
        before = self.rewriter.records
        self._is_through = False
        for record in self.rank.new_records():
            if self._is_of_engine:
                site = record.site
                place: Place = (site.phase, site.graph, site.name)
                self.writer.name_operators({place: Operator(site.op, site.name)})
            if self.rewriter.rewrite(record, self.rank):
                self.rank.note(record)
        self._is_through = True
        self.finished = self.rank.header.closed
        return self.rewriter.records != before

    def take_over(self, record: Record, earlier: Dump) -> None:
        """Copy a record that was converted before."""
        self.rewriter.take_over(record, earlier)
        self.rank.note(record)

    def free(self) -> None:
        """Delete files whose values are in the new dump."""
        if not self._is_through:  # interrupted: a file may hold more than was converted of it
            return
        files = self.rank.deletable(self.rewriter.safe(), self.rewriter.newest)
        if not files:
            return
        try:
            see_onto_disk(self._converter.output)
        except OSError as error:
            raise ParitasError(
                f"cannot write to {self._converter.output}: {error.strerror or error}; nothing was "
                f"deleted"
            ) from error
        for path in files:
            found = path.stat()
            self.rank.delete(path)
            self.freed_files += bool(found.st_size)
            # A second name of the same file frees nothing; the last one does.
            self.freed_bytes += found.st_size if found.st_nlink == 1 else 0
        self.rank.mark(f"values were deleted by paritas convert; see {self._converter.output.name}")

    def problems(self) -> list[str]:
        """What could not be converted, and what no record could be made of."""
        own = self.rewriter.problems
        return [
            *(one for one in self.rank.problems if not any(one in told for told in own)),
            *own,
        ]

    def close(self) -> None:
        """Close the new part."""
        failed = len(self.rewriter.problems)
        if self._converter.is_ours:  # each is a line of the index
            failed += len(self.rank.problems)
        header = self._header()
        if failed:
            records = "record" if failed == 1 else "records"
            notes = (*header.notes, f"{failed} {records} could not be converted")
            header = msgspec.structs.replace(header, notes=notes)
        self.writer.close(header, complete=self.finished and not failed)
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
            notes=(*header.notes, _mark(target)),
            closed=False,
            records=0,
        )


def _mark(target: Target) -> str:
    return f"made by paritas convert --to {target}"


def _copy_graphs(source: Path, output: Path) -> None:
    """The graphs in words that lie beside the folders of ranks in torchair's trees."""
    for path in sorted(source.iterdir()) if source.is_dir() else []:
        if path.is_file() and is_of_tree(path.name):
            shutil.copyfile(path, output / path.name)


def _check_useful(header: Header, kind: str, source: Path, target: Target) -> None:
    # Statistics of another tool become an index of ours.
    if header.data == "stats" and (kind == "paritas" or target != "stats"):
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
