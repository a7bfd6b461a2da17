"""What is finished of graphs, written down at once: a run that was cut short goes on from there.

One line of JSON each: what a run is about, an operator that is begun in this process, an operator
that is finished, an interruption, how the run ended. A kill costs the operators in progress. One
that was begun and neither finished nor interrupted may have been what ended the process.

A folder may hold several graphs, one after the other. What was verified for one of them is not
verified again for the next.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Self

import msgspec

from paritas.dumps.locks import Lock
from paritas.errors import UsageError
from paritas.numerics.findings import spell_nonfinite
from paritas.numerics.graph_reports import GraphReport, OperatorResult, Outcome
from paritas.reporting.graph_words import counted

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = ["LOCK", "NAME", "About", "Journal", "Registered"]

NAME = "journal.jsonl"
LOCK = ".journal.lock"
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


class _Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
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


class Journal:
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
        path = folder / NAME
        self._lock = _alone_in(folder)
        try:
            length = self._read(path) if resume and path.exists() else 0
            self._refuse_other_questions(folder, about)
            self._file = path.open("r+b" if length else "wb")
            self._file.truncate(length)
            self._file.seek(length)
            self._write(_Line(format=_FORMAT, about=about, report=report))
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
            if known is None or known.outcome is not Outcome.VERIFIED:
                continue
            if other.about.answers(self.own.about):
                return known, other.report.graph
        return None

    def others(self) -> tuple[Registered, ...]:
        """The other graphs of the folder."""
        return tuple(one for one in self.graphs.values() if one is not self.own)

    def begin(self, key: str) -> None:
        """An operator is checked in this process from now on."""
        self._write(_Line(begun=key))

    def finish(self, result: OperatorResult) -> None:
        """An operator is done."""
        self._write(_Line(finished=result))
        self.own.finished[result.key] = result

    def end(self, report: GraphReport) -> None:
        """The run has come to its end, or is interrupted: what there is to say of the graph."""
        bare = msgspec.structs.replace(report, operators=(), others=())
        self._write(_Line(report=bare))
        self.own.report = bare

    def interrupt(self) -> None:
        """Somebody asked to stop: what was begun is no suspect."""
        self._write(_Line(interrupted=True))

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

    def _write(self, line: _Line) -> None:
        plain = spell_nonfinite(msgspec.to_builtins(line))
        self._file.write(msgspec.json.encode(plain) + b"\n")
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
            line = _decoded(path, number, text)
            if line.about is not None or number == 1:
                if line.format != _FORMAT or line.about is None or line.report is None:
                    raise _damage(path, number, f"format {line.format!r} instead of {_FORMAT}")
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

    def _take(self, line: _Line) -> None:
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
        lock = Lock(folder / LOCK)
    except OSError as error:
        path = str(folder / LOCK)
        raise UsageError(f"cannot write {path!r}: {error.strerror or error}") from error
    if not lock.is_held:
        lock.release()
        raise UsageError(
            f"{str(folder)!r}: another process writes its results there; wait for it, or name "
            "another folder"
        )
    return lock


def _decoded(path: Path, number: int, text: bytes) -> _Line:
    try:
        plain: Any = msgspec.json.decode(text)
        # Lax: numbers that are none are spelled out.
        return msgspec.convert(plain, _Line, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damage(path, number, str(error)) from None


def _damage(path: Path, number: int, what: str) -> UsageError:
    return UsageError(
        f"{str(path)!r}, line {number} is damaged or of another version: {what}; start anew with "
        "--overwrite (resume=False)"
    )
