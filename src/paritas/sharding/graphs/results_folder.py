"""The results folder of a graph: journal, scripts, tables. Nothing is written outside it."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import TYPE_CHECKING, Any, Self

import msgspec

from paritas.core.errors import UsageError
from paritas.core.reporting.files import GRAPH_JSON, check_writable, replacing, write_whole
from paritas.core.results.report import json_of
from paritas.core.results.wording import count_things
from paritas.formats.files.records import Lock
from paritas.sharding.graphs.rows import CallOutcome, GraphReport, OperatorResult
from paritas.sharding.graphs.scripts import SCRIPTS_FOLDER

if TYPE_CHECKING:
    from pathlib import Path

# --- The journal: finished operators are written at once, and an interrupted run resumes ----------

# One line of JSON each: what a run is about, an operator that this process starts, an operator that
# is finished, an interruption, how the run ended. A kill loses only the operators in progress. An
# operator that was started and neither finished nor interrupted may have crashed the process.
#
# A folder may hold several graphs. What was verified for one is not verified again for the next.

JOURNAL_NAME = "journal.jsonl"
JOURNAL_LOCK = ".journal.lock"
_FORMAT = 2
_LONGEST_VALUE = 60


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run is about: a graph and its settings.

    Attributes:
        calls: the digest of its calls.
        inputs: the digest of sample inputs and the weights; empty if there are none.
        modules: digest by module that provides operators or annotations.
    """

    graph: str
    calls: str
    settings: dict[str, str]
    versions: dict[str, str]
    inputs: str = ""
    modules: dict[str, str] = {}

    def difference(self, earlier: About) -> str:
        """How an earlier run of this graph differs; empty if it does not."""
        for words, old, new in (
            ("settings", earlier.settings, self.settings),
            ("versions", earlier.versions, self.versions),
        ):
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    was, now = (
                        str(about.get(name, "none"))[:_LONGEST_VALUE] for about in (old, new)
                    )
                    return f"other {words} ({name} was {was}, now it is {now})"
        if earlier.inputs != self.inputs:
            return "other sample inputs or weights"
        if earlier.modules != self.modules:
            changed = sorted(dict(earlier.modules.items() ^ self.modules.items()))
            return f"another version of the module {', '.join(changed)}"
        return ""

    def holds_for(self, other: About) -> bool:
        """Whether what this run verified also holds for an operator of another graph.

        Values recorded in a run belong to that graph; only drawn ones are the same for both.
        """
        same = self.versions == other.versions and self.modules == other.modules
        return same and not self.inputs and not other.inputs


class _JournalLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line: what a run is about, or one event of it.

    Lines after one about a graph belong to that graph. The report has no operators: they have their
    own lines.
    """

    format: int | None = None
    about: About | None = None
    report: GraphReport | None = None
    begun: str | None = None
    finished: OperatorResult | None = None
    interrupted: bool | None = None


@dataclasses.dataclass
class Registered:
    """A graph whose results are in the folder, numbered from 1; results by key."""

    number: int
    about: About
    report: GraphReport
    finished: dict[str, OperatorResult] = dataclasses.field(default_factory=dict)

    def whole_report(self) -> GraphReport:
        """The report with all finished operators."""
        operators = sorted(
            self.finished.values(), key=lambda operator_result: operator_result.sites[0].position
        )
        return msgspec.structs.replace(self.report, operators=tuple(operators), number=self.number)


class GraphJournal:
    """The journal, open for writing, and what earlier runs left in it.

    Attributes:
        own: the graph of this run.
        graphs: all graphs, by the digests of their calls.
        suspects: keys of operators that may have crashed an earlier run.
        notes: about a truncated line.
    """

    def __init__(
        self, folder: Path, about: About, report: GraphReport, *, resume: bool = True
    ) -> None:
        """Open the journal, read what is finished, and register the graph."""
        self.graphs: dict[str, Registered] = {}
        self.suspects: set[str] = set()
        self.notes: list[str] = []
        self._begun = ""
        self._current: Registered | None = None
        path = folder / JOURNAL_NAME
        self._lock = _lock_folder(folder)
        try:
            length = self._read(path) if resume and path.exists() else 0
            self._refuse_other_questions(folder, about)
            self._file = path.open("r+b" if length else "wb")
            self._file.truncate(length)
            self._file.seek(length)
            self._write(_JournalLine(format=_FORMAT, about=about, report=report))
            self.own = self._register(about, report)
        except OSError as error:
            self._lock.release()
            raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
        except BaseException:
            self._lock.release()
            raise

    @property
    def finished(self) -> dict[str, OperatorResult]:
        """Result by key, from earlier runs of this graph."""
        return self.own.finished

    def verified_elsewhere(self, key: str) -> tuple[OperatorResult, str] | None:
        """The result of an operator verified for another graph, and that graph."""
        for other in self.others():
            finished_result = other.finished.get(key)
            if finished_result is None or finished_result.outcome is not CallOutcome.VERIFIED:
                continue
            if other.about.holds_for(self.own.about):
                return finished_result, other.report.graph
        return None

    def others(self) -> tuple[Registered, ...]:
        """The other graphs of the folder."""
        return tuple(graph for graph in self.graphs.values() if graph is not self.own)

    def begin(self, key: str) -> None:
        """Record that this process starts checking an operator."""
        self._write(_JournalLine(begun=key))

    def finish(self, result: OperatorResult) -> None:
        """Record the result of an operator."""
        self._write(_JournalLine(finished=result))
        self.own.finished[result.key] = result

    def end(self, report: GraphReport) -> None:
        """Record the report of a run that ended or was interrupted."""
        bare = msgspec.structs.replace(report, operators=(), others=())
        self._write(_JournalLine(report=bare))
        self.own.report = bare

    def interrupt(self) -> None:
        """Record that the user stopped the run: the operator in progress is no suspect."""
        self._write(_JournalLine(interrupted=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._lock.release()

    def _write(self, line: _JournalLine) -> None:
        self._file.write(json_of(line) + b"\n")
        # To the operating system: this survives a kill of the process.
        self._file.flush()

    # --- what is there already -------------------------------------------------------------------

    def _read(self, path: Path) -> int:
        """Read the existing lines; returns where to continue writing."""
        content = path.read_bytes()
        length = content.rfind(b"\n") + 1
        if length < len(content):
            lost = len(content) - length
            self.notes.append(
                f"the last line of an earlier run's journal was truncated ({lost} bytes); its "
                "operator is checked again"
            )
        for number, text in enumerate(content[:length].splitlines(), start=1):
            line = _decode_line(path, number, text)
            if line.about is not None or number == 1:
                if line.format != _FORMAT or line.about is None or line.report is None:
                    raise _damaged_line(path, number, f"format {line.format!r}, expected {_FORMAT}")
                self._current = self._register(line.about, line.report)
            else:
                self._apply(line)
        return length

    def _register(self, about: About, report: GraphReport) -> Registered:
        """The entry of a graph, existing or new."""
        new = Registered(len(self.graphs) + 1, about, report)
        registered = self.graphs.setdefault(about.calls, new)
        registered.about, registered.report = about, report
        return registered

    def _refuse_other_questions(self, folder: Path, about: About) -> None:
        earlier = self.graphs.get(about.calls)
        difference = about.difference(earlier.about) if earlier is not None else ""
        if not difference:
            return
        rest = len(self.graphs) - 1
        lost = (
            f", which also deletes the results of {count_things(rest, 'other graph')}"
            if rest
            else ""
        )
        raise UsageError(
            f"{str(folder)!r} holds results with {difference}; use another folder, or start over "
            f"with --overwrite (resume=False){lost}"
        )

    def _apply(self, line: _JournalLine) -> None:
        if line.begun is not None:
            self._begun = line.begun
            self.suspects.add(line.begun)
        elif line.finished is not None and self._current is not None:
            self._current.finished[line.finished.key] = line.finished
            self.suspects.discard(line.finished.key)
        elif line.report is not None and self._current is not None:
            self._current.report = line.report
        elif line.interrupted:
            self.suspects.discard(self._begun)


def _lock_folder(folder: Path) -> Lock:
    try:
        lock = Lock(folder / JOURNAL_LOCK)
    except OSError as error:
        path = str(folder / JOURNAL_LOCK)
        raise UsageError(f"cannot write {path!r}: {error.strerror or error}") from error
    if not lock.is_held:
        lock.release()
        raise UsageError(
            f"{str(folder)!r}: another process is writing its results there; wait for it, or use "
            "another folder"
        )
    return lock


def _decode_line(path: Path, number: int, text: bytes) -> _JournalLine:
    try:
        plain: Any = msgspec.json.decode(text)
        # Lax: NaN and infinity are written as strings.
        return msgspec.convert(plain, _JournalLine, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged_line(path, number, str(error)) from None


def _damaged_line(path: Path, number: int, what: str) -> UsageError:
    return UsageError(
        f"{str(path)!r}, line {number} is damaged or from another version: {what}; start over with "
        "--overwrite (resume=False)"
    )


# --- The folder -----------------------------------------------------------------------------------

JSON, CSV, HTML = GRAPH_JSON, "results.csv", "report.html"
_FILES = (HTML, CSV, JSON)
# A script, or the file with its values, as `graphs.scripts` names them.
_SCRIPT = re.compile(r"(graph\d+_)?\d{2,}_\w+\.(py|safetensors)")
# The page of a graph other than that of the latest run.
_PAGE = re.compile(r"report_\d+\.html")


def prepare_folder(folder: Path, *, resume: bool) -> None:
    """Create the folder, and make sure that nobody else's files would be lost."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"cannot write to {str(folder)!r}: it is a file; use a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create {str(folder)!r}: {error.strerror or error}") from error
    check_writable(folder / JSON.replace("results", ".tried"))
    for name in (*_FILES, JOURNAL_NAME):
        if (folder / name).is_dir():
            raise UsageError(f"cannot write {str(folder / name)!r}: it is a directory")
    for name in (
        JOURNAL_NAME,
        JOURNAL_LOCK,
    ):  # the others are replaced; these are opened for writing
        if (folder / name).is_symlink():
            raise UsageError(
                f"cannot write {str(folder / name)!r}: it is a symbolic link; remove it"
            )
    scripts = folder / SCRIPTS_FOLDER
    if os.path.lexists(scripts) and (scripts.is_symlink() or not scripts.is_dir()):
        raise UsageError(
            f"cannot write to {str(scripts)!r}: it is a link or a file, not a folder; remove it"
        )
    there = [name for name in (*_FILES, SCRIPTS_FOLDER) if os.path.lexists(folder / name)]
    if resume and there and not (folder / JOURNAL_NAME).exists():
        raise UsageError(
            f"{str(folder)!r} holds {', '.join(there)}, but no {JOURNAL_NAME} to resume from; use "
            "another folder, or replace them with --overwrite (resume=False)"
        )


def clear_folder(folder: Path) -> None:
    """Delete what an earlier run wrote, and nothing else."""
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    for path in folder.iterdir():
        if _PAGE.fullmatch(path.name):
            path.unlink()
    scripts = folder / SCRIPTS_FOLDER
    if not scripts.is_dir():
        return
    for path in scripts.iterdir():
        if _SCRIPT.fullmatch(path.name):
            path.unlink()
    if not any(scripts.iterdir()):
        scripts.rmdir()


def write_results(folder: Path, report: GraphReport, *, html: bool = True) -> tuple[Path, ...]:
    """Write a report in all formats, each file completely or not at all.

    Other graphs of the folder have a page each, named by their numbers. Returns the HTML page
    first.
    """
    from paritas.sharding.graphs.report import graph_csv

    written = [folder / JSON, folder / CSV]
    write_whole(folder / JSON, report.to_json())
    write_whole(folder / CSV, graph_csv(report).encode(errors="backslashreplace").rstrip(b"\n"))
    from paritas.sharding.graphs.page import graph_page_name, write_graph_page

    for number in range(1, len(report.others) + 2):  # pages of an earlier run are outdated
        (folder / graph_page_name(number)).unlink(missing_ok=True)
    if not html:
        (folder / HTML).unlink(missing_ok=True)
        return tuple(reversed(written))
    pages = {graph_page_name(other.number): other for other in report.others} | {HTML: report}
    for name, page_report in pages.items():
        with replacing(folder / name) as unfinished:
            write_graph_page(page_report, unfinished)
    return folder / HTML, *reversed(written)
