"""The folder that the results of a graph go to: journal, scripts, tables.

Nothing is written outside of it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from paritas.errors import UsageError
from paritas.execution.observation import AFTER
from paritas.files.folders import Lock
from paritas.graphs.checking import offers, prepare_call
from paritas.graphs.operators import subject_of
from paritas.graphs.script_text import (
    Facts,
    NoScriptError,
    is_storable,
    script_text,
    stored_tensors,
)
from paritas.placement.parts import name_of, tensors_in
from paritas.reports.files import check_writable, write_whole
from paritas.reports.graphs import counted
from paritas.results.findings import Status
from paritas.results.graph_reports import CallOutcome, GraphReport, OperatorResult
from paritas.results.report import json_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

    import torch

    from paritas.graphs.verify import OperatorWork
    from paritas.placement.recipes import OperatorCall, Recipe
    from paritas.results.graph_reports import OptionResult


# --- A script is tried before it is handed over: one that does not show the failure says so -------

SCRIPTS_FOLDER = "repro"
SHOWN = "the fault is there"
_PATIENCE = 120.0  # seconds
_MOST_BYTES = 64 << 20  # of arguments in a file beside the script


@dataclasses.dataclass(frozen=True)
class Handed:
    """What came of a script.

    Attributes:
        path: relative to the folder of the results; empty if there is none.
        note: what a reader should know of it.
    """

    path: str = ""
    note: str = ""


def stem_of(number: int, operator: str) -> str:
    """A file's name: `03_linear`, whatever the operator is called."""
    parts = operator.split(".")
    # Of `aten.mm.default` the overload says nothing.
    short = parts[1] if parts[0] in {"aten", "prims"} and len(parts) > 1 else parts[-1]
    return f"{number:02}_{re.sub(r'[^A-Za-z0-9_]+', '_', short)[:60] or 'operator'}"


def write_script(
    folder: Path, stem: str, facts: Facts, *, recorded: bool = False, degraded: bool = False
) -> Handed:
    """Write a script that shows a failure, and run it once.

    Values are drawn in the script, if that shows the failure; otherwise the very ones of the check
    lie in a file beside it.

    Args:
        folder: of the results; the script goes below it.
        stem: the file's name, without its ending.
        facts: the failure.
        recorded: the values are those of a run, and no others will do.
        degraded: it is only in the dtype of the call that anything is wrong.
    """
    below = folder / SCRIPTS_FOLDER
    below.mkdir(exist_ok=True)
    script, values = below / f"{stem}.py", below / f"{stem}.safetensors"
    told = ""
    for stored, native in _script_variants(facts, recorded=recorded, degraded=degraded):
        name = values.name if stored else ""
        try:
            text = script_text(dataclasses.replace(facts, native=native, stored=name))
        except NoScriptError as error:
            return Handed(note=f"no script shows it by itself: {error}")
        if stored:
            _store_tensors(values, _tensors_to_store(facts))
        write_whole(script, text.removesuffix("\n").encode())
        told = _try_script(script)
        if not told:
            if not stored:
                values.unlink(missing_ok=True)
            return Handed(f"{SCRIPTS_FOLDER}/{script.name}")
    note = f"{SCRIPTS_FOLDER}/{script.name} does not show the failure by itself: {told}"
    return Handed(f"{SCRIPTS_FOLDER}/{script.name}", note)


def _script_variants(
    facts: Facts, *, recorded: bool, degraded: bool
) -> Iterator[tuple[bool, bool]]:
    """Whether values are stored and whether it runs natively, the simplest way first."""
    tensors = [one for value in facts.values.values() for one in tensors_in(value)]
    size = sum(one.numel() * one.element_size() for one in tensors)
    can_store = size <= _MOST_BYTES and all(is_storable(one.dtype) for one in tensors)
    if not (recorded and can_store):
        yield False, degraded
    if can_store:
        yield True, degraded
        yield True, not degraded


def _tensors_to_store(facts: Facts) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for place, value in facts.values.items():
        found |= stored_tensors(value, name_of(place))
    return found


def _store_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save

    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_bytes(save(tensors))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _try_script(script: Path) -> str:
    """Run it; empty if it shows the failure, otherwise what it does instead."""
    environment = dict(os.environ)
    # A module of the user's is found as this process finds it.
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)  # noqa: PTH109
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        done = subprocess.run(
            [sys.executable, str(script.absolute())],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {_PATIENCE:.0f} s"
    except OSError as error:
        return f"it cannot be run: {error}"
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode == 1 and SHOWN in done.stdout.splitlines():
        return ""
    return f"it exits with {done.returncode}: {lines[-1] if lines else 'it prints nothing'}"


# --- From a failed operator of a graph to the script that shows it --------------------------------

_DRAWS = "it draws random numbers"


def with_script(
    folder: Path,
    work: OperatorWork,
    result: OperatorResult,
    versions: Mapping[str, str],
    *,
    graph: int = 1,
) -> OperatorResult:
    """The result with its script, or with a note that says why it has none.

    Args:
        graph: the number of the graph in the folder: scripts of the first have plain names.
    """
    handed = Handed(note="no script shows it by itself: none of its splits is wrong for certain")
    for option in result.failures:
        try:
            facts = _collect_facts(work, result, option, versions)
        except UsageError as error:
            handed = Handed(note=f"no script shows it by itself: {error}")
            continue
        stem = stem_of(work.number, result.operator)
        stem = stem if graph == 1 else f"graph{graph}_{stem}"
        recorded, degraded = work.values is not None, option.status is Status.DEGRADED
        handed = write_script(folder, stem, facts, recorded=recorded, degraded=degraded)
        if handed.path:
            break
    notes = (*result.notes, handed.note) if handed.note else result.notes
    return msgspec.structs.replace(result, script=handed.path, notes=notes)


def _collect_facts(
    work: OperatorWork, result: OperatorResult, option: OptionResult, versions: Mapping[str, str]
) -> Facts:
    """Everything again as it was when it was checked.

    Raises:
        UsageError: why a script could not do the same.
    """
    if any(note.startswith(_DRAWS) for note in (*result.notes, *option.verdict.notes)):
        raise UsageError(f"{_DRAWS}, and each rank was given its part of the whole's")
    seen = option.confirmation
    if seen is not None and seen.simulated.passes(strict=work.settings.strict):
        raise UsageError(
            f"it shows on {seen.backend} ranks alone, and a script has simulated ones; run the "
            "command again to see it"
        )
    # A script runs where torch alone is: on the host.
    settings = dataclasses.replace(work.settings, device=None)
    subject, call, _ = prepare_call(
        subject_of(work.call, settings.imports), work.call, settings, work.values
    )
    return Facts(
        operator=work.call.operator,
        call=call,
        recipe=_find_recipe(subject.name, call, work, option),
        ranks=option.ranks,
        heading=_script_heading(result, option, versions),
        written=tuple(
            place
            for place in (*range(len(call.args)), *call.kwargs)
            if any(one.path == f"{name_of(place)}{AFTER}" for one in option.verdict.findings)
        ),
        seed=work.settings.seed,
        imports=work.settings.imports,
    )


def _find_recipe(name: str, call: OperatorCall, work: OperatorWork, option: OptionResult) -> Recipe:
    offer = offers(name, call, work.call.annotation, work.settings, option.ranks)
    if offer.fault:
        raise UsageError(f"the annotation itself is refused: {offer.fault}")
    wanted = (option.idx, option.dim, option.split, option.rule, option.origin)
    for one in offer.options:
        if (one.idx, one.dim, one.split, one.rule, one.origin) == wanted:
            return one.recipe
    raise UsageError(f"{option.split} is not offered a second time")


def _script_heading(
    result: OperatorResult, option: OptionResult, versions: Mapping[str, str]
) -> tuple[str, ...]:
    site = result.sites[0]
    more = len(result.sites) - 1
    others = f", and {more} more like it" if more else ""
    place = f" at {site.source}" if site.source else ""
    return (
        f"{result.operator}, {option.split} over {option.ranks} ranks, against the whole of it.",
        "",
        *([f"Node:       {site.node}{place}{others}"] if site.node else []),
        *([f"Code:       {site.code.strip()}"] if site.code.strip() else []),
        f"Signature:  {result.signature}",
        f"Annotation: {option.rule} ({option.origin})",
        f"Verdict:    {option.status}: {option.reason}",
        f"Versions:   {', '.join(f'{name} {version}' for name, version in versions.items())}",
        "",
        "Exit code 1: the fault is there; 0: no fault is seen; 3: the operator itself fails.",
    )


# --- What is finished of graphs, written down at once: a run that was cut short goes on from ------

# One line of JSON each: what a run is about, an operator that is begun in this process, an operator
# that is finished, an interruption, how the run ended. A kill costs the operators in progress. One
# that was begun and neither finished nor interrupted may have been what ended the process.
#
# A folder may hold several graphs, one after the other. What was verified for one of them is not
# verified again for the next.

JOURNAL_NAME = "journal.jsonl"
JOURNAL_LOCK = ".journal.lock"
_FORMAT = 2
_LONGEST_VALUE = 60


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run is about: a graph, and what is asked of it.

    Attributes:
        graph: what it was read from, for people.
        calls: the digest of its calls.
        settings: as they were asked, each in words.
        versions: of what took part.
        inputs: the digest of sample inputs and of the weights they meet; empty if there are none.
        modules: digest by module that brings operators or annotations.
    """

    graph: str
    calls: str
    settings: dict[str, str]
    versions: dict[str, str]
    inputs: str = ""
    modules: dict[str, str] = {}

    def difference(self, earlier: About) -> str:
        """In what an earlier run of this graph asked something else; empty if in nothing."""
        for words, old, new in (
            ("settings", earlier.settings, self.settings),
            ("versions", earlier.versions, self.versions),
        ):
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    was, now = (str(one.get(name, "none"))[:_LONGEST_VALUE] for one in (old, new))
                    return f"other {words} ({name} was {was}, and is {now} now)"
        if earlier.inputs != self.inputs:
            return "other sample inputs or weights"
        if earlier.modules != self.modules:
            changed = sorted(dict(earlier.modules.items() ^ self.modules.items()))
            return f"another text of the module {', '.join(changed)}"
        return ""

    def answers(self, other: About) -> bool:
        """Whether what was verified for this graph is verified for an operator of another, too.

        Values of a run of the graph are its own: only drawn ones are the same for both.
        """
        same = self.versions == other.versions and self.modules == other.modules
        return same and not self.inputs and not other.inputs


class _JournalLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line: what a run is about, or one thing that happened in it.

    What follows a line about a graph belongs to that graph. The report is without operators: they
    have lines of their own.
    """

    format: int | None = None
    about: About | None = None
    report: GraphReport | None = None
    begun: str | None = None
    finished: OperatorResult | None = None
    interrupted: bool | None = None


@dataclasses.dataclass
class Registered:
    """A graph that the folder holds results of.

    Attributes:
        number: in the order in which they came, from 1 on.
        finished: result by key.
    """

    number: int
    about: About
    report: GraphReport
    finished: dict[str, OperatorResult] = dataclasses.field(default_factory=dict)

    def whole_report(self) -> GraphReport:
        """All that is known of it."""
        found = sorted(self.finished.values(), key=lambda one: one.sites[0].position)
        return msgspec.structs.replace(self.report, operators=tuple(found), number=self.number)


class GraphJournal:
    """The file, open for writing, and what it holds from earlier runs.

    Attributes:
        own: the graph of this run.
        graphs: all of them, by the digests of their calls.
        suspects: keys during which an earlier run ended without a word.
        notes: what became of a line that was cut short.
    """

    def __init__(
        self, folder: Path, about: About, report: GraphReport, *, resume: bool = True
    ) -> None:
        """Open it, take over what is finished, and register the graph.

        Args:
            report: what there is to say of the graph before any operator is checked.

        Raises:
            UsageError: it asked something else of this graph, is damaged, or another process
                writes to it.
        """
        self.graphs: dict[str, Registered] = {}
        self.suspects: set[str] = set()
        self.notes: list[str] = []
        self._begun = ""
        self._told: Registered | None = None
        path = folder / JOURNAL_NAME
        self._lock = _alone_in(folder)
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
        """Result by key, of earlier runs of this graph."""
        return self.own.finished

    def verified_elsewhere(self, key: str) -> tuple[OperatorResult, str] | None:
        """An operator that was verified for another graph of the folder, and that graph's name."""
        for other in self.others():
            known = other.finished.get(key)
            if known is None or known.outcome is not CallOutcome.VERIFIED:
                continue
            if other.about.answers(self.own.about):
                return known, other.report.graph
        return None

    def others(self) -> tuple[Registered, ...]:
        """The other graphs of the folder."""
        return tuple(one for one in self.graphs.values() if one is not self.own)

    def begin(self, key: str) -> None:
        """An operator is checked in this process from now on."""
        self._write(_JournalLine(begun=key))

    def finish(self, result: OperatorResult) -> None:
        """An operator is done."""
        self._write(_JournalLine(finished=result))
        self.own.finished[result.key] = result

    def end(self, report: GraphReport) -> None:
        """The run has come to its end, or is interrupted: what there is to say of the graph."""
        bare = msgspec.structs.replace(report, operators=(), others=())
        self._write(_JournalLine(report=bare))
        self.own.report = bare

    def interrupt(self) -> None:
        """Somebody asked to stop: what was begun is no suspect."""
        self._write(_JournalLine(interrupted=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self._file.close()
        self._lock.release()

    def _write(self, line: _JournalLine) -> None:
        self._file.write(json_of(line) + b"\n")
        # As far as the system: that survives a kill of this process.
        self._file.flush()

    # --- what is there already -------------------------------------------------------------------

    def _read(self, path: Path) -> int:
        """Take over what is there; gives where to go on writing."""
        content = path.read_bytes()
        length = content.rfind(b"\n") + 1
        if length < len(content):
            lost = len(content) - length
            self.notes.append(
                f"the last line of an earlier run's journal was cut short ({lost} bytes): what it "
                "was about is checked again"
            )
        for number, text in enumerate(content[:length].splitlines(), start=1):
            line = _decode_line(path, number, text)
            if line.about is not None or number == 1:
                if line.format != _FORMAT or line.about is None or line.report is None:
                    raise _damaged_line(
                        path, number, f"format {line.format!r} instead of {_FORMAT}"
                    )
                self._told = self._register(line.about, line.report)
            else:
                self._take(line)
        return length

    def _register(self, about: About, report: GraphReport) -> Registered:
        """The graph that a run is about, known or new."""
        new = Registered(len(self.graphs) + 1, about, report)
        known = self.graphs.setdefault(about.calls, new)
        known.about, known.report = about, report
        return known

    def _refuse_other_questions(self, folder: Path, about: About) -> None:
        earlier = self.graphs.get(about.calls)
        difference = about.difference(earlier.about) if earlier is not None else ""
        if not difference:
            return
        rest = len(self.graphs) - 1
        lost = f", which drops those of {counted(rest, 'other graph')}, too" if rest else ""
        raise UsageError(
            f"{str(folder)!r} holds results of {difference}: name another folder, or start anew "
            f"with --overwrite (resume=False){lost}"
        )

    def _take(self, line: _JournalLine) -> None:
        if line.begun is not None:
            self._begun = line.begun
            self.suspects.add(line.begun)
        elif line.finished is not None and self._told is not None:
            self._told.finished[line.finished.key] = line.finished
            self.suspects.discard(line.finished.key)
        elif line.report is not None and self._told is not None:
            self._told.report = line.report
        elif line.interrupted:
            self.suspects.discard(self._begun)


def _alone_in(folder: Path) -> Lock:
    try:
        lock = Lock(folder / JOURNAL_LOCK)
    except OSError as error:
        path = str(folder / JOURNAL_LOCK)
        raise UsageError(f"cannot write {path!r}: {error.strerror or error}") from error
    if not lock.is_held:
        lock.release()
        raise UsageError(
            f"{str(folder)!r}: another process writes its results there; wait for it, or name "
            "another folder"
        )
    return lock


def _decode_line(path: Path, number: int, text: bytes) -> _JournalLine:
    try:
        plain: Any = msgspec.json.decode(text)
        # Lax: numbers that are none are spelled out.
        return msgspec.convert(plain, _JournalLine, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged_line(path, number, str(error)) from None


def _damaged_line(path: Path, number: int, what: str) -> UsageError:
    return UsageError(
        f"{str(path)!r}, line {number} is damaged or of another version: {what}; start anew with "
        "--overwrite (resume=False)"
    )


# --- The folder -----------------------------------------------------------------------------------

JSON, CSV, HTML = "results.json", "results.csv", "report.html"
_FILES = (HTML, CSV, JSON)
# A script, or the values beside it, as `scripts.writing` names them.
_SCRIPT = re.compile(r"(graph\d+_)?\d{2,}_\w+\.(py|safetensors)")
# The page of a graph beside that of the latest run.
_PAGE = re.compile(r"report_\d+\.html")


def prepare_folder(folder: Path, *, resume: bool) -> None:
    """Create the folder, and see that nothing of somebody else's would be lost.

    Args:
        folder: of the results.
        resume: whether to go on with what is there, which has to be ours.

    Raises:
        UsageError: it cannot be written to, or holds what another program wrote.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"cannot write to {str(folder)!r}: it is a file; name a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create {str(folder)!r}: {error.strerror or error}") from error
    check_writable(folder / JSON.replace("results", ".tried"))
    for name in (*_FILES, JOURNAL_NAME):
        if (folder / name).is_dir():
            raise UsageError(f"cannot write {str(folder / name)!r}: it is a directory")
    for name in (JOURNAL_NAME, JOURNAL_LOCK):  # the others are replaced, these are written into
        if (folder / name).is_symlink():
            raise UsageError(f"cannot write {str(folder / name)!r}: it leads out of the folder")
    scripts = folder / SCRIPTS_FOLDER
    if os.path.lexists(scripts) and (scripts.is_symlink() or not scripts.is_dir()):
        raise UsageError(f"cannot write to {str(scripts)!r}: it is no folder of its own")
    if resume and not (folder / JOURNAL_NAME).exists():
        _refuse_strangers(folder)


def clear_folder(folder: Path) -> None:
    """Take away what an earlier run wrote, and nothing else."""
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


def _refuse_strangers(folder: Path) -> None:
    there = [name for name in (*_FILES, SCRIPTS_FOLDER) if os.path.lexists(folder / name)]
    if there:
        raise UsageError(
            f"{str(folder)!r} holds {', '.join(there)}, but no {JOURNAL_NAME} to go on from: name "
            "another folder, or replace them with --overwrite (resume=False)"
        )


def write_results(folder: Path, report: GraphReport, *, html: bool = True) -> tuple[Path, ...]:
    """Write a report in all its forms, each file whole or not at all.

    Other graphs of the folder have a page each, named by their numbers.

    Returns:
        The files, that for people first.
    """
    from paritas.reports.tables import graph_csv

    written = [folder / JSON, folder / CSV]
    write_whole(folder / JSON, report.to_json())
    write_whole(folder / CSV, graph_csv(report).encode(errors="backslashreplace").rstrip(b"\n"))
    from paritas.reports.graph_page import graph_page_name

    for number in range(1, len(report.others) + 2):  # those of an earlier run would not fit
        (folder / graph_page_name(number)).unlink(missing_ok=True)
    if html:
        for other in report.others:
            _write_page(folder / graph_page_name(other.number), other)
        _write_page(folder / HTML, report)
        written.append(folder / HTML)
    else:
        (folder / HTML).unlink(missing_ok=True)
    return tuple(reversed(written))


def _write_page(path: Path, report: GraphReport) -> None:
    from paritas.reports.graph_page import write_graph_page

    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        write_graph_page(report, unfinished)
        unfinished.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
