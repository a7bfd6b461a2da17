"""What every search for a smaller failing case has: a time limit, a script at its end, a report."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from paritas.core.errors import UsageError
from paritas.core.reporting.scripts import write
from paritas.core.results.findings import Diagnosis
from paritas.core.results.progress import Progress
from paritas.core.results.report import Result
from paritas.core.results.wording import count_things
from paritas.core.time_limit import OutOfTime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas.core.reporting.scripts import Script, WrittenScript
    from paritas.core.time_limit import TimeLimit

SCRIPT = "repro.py"
# The share of the time reserved for running the script, and seconds that it needs to import torch
# and to compile, if they are not more than half of the time.
_SCRIPT_SHARE = 0.25
_SCRIPT_SECONDS = 20.0


class NothingFailsError(UsageError):
    """No graph fails on its own: there is nothing to shrink."""


class ShrinkSearch:
    """A search: its time, its folder, and how it ended.

    Attributes:
        limit: for the search and the run of the script.
        folder: where the script goes.
        ended: False if it was stopped while the case could still get smaller.
        interrupted: whether Ctrl-C stopped it.
    """

    def __init__(
        self,
        outdir: str | Path | None,
        limit: TimeLimit,
        on_progress: Callable[[str], None] | None,
    ) -> None:
        """Without an `outdir`, the folder is a new one."""
        if not limit.seconds > 0:
            raise UsageError(f"seconds must be positive, got {limit.seconds!r}")
        self.folder = Path(tempfile.mkdtemp(prefix="paritas-shrink-") if outdir is None else outdir)
        self.limit = limit
        self.ended, self.interrupted = True, False
        self.show = on_progress or (lambda _: None)

    def show_step(self, words: str) -> None:
        """Report a step that ends when the time is over."""
        self.show(Progress(words, at_most=max(self.limit.left, 0.0)))

    @contextlib.contextmanager
    def searching(self) -> Iterator[None]:
        """Search inside; out of time or interrupted, it goes on behind this block."""
        seconds = self.limit.seconds
        script_seconds = max(_SCRIPT_SHARE * seconds, min(_SCRIPT_SECONDS, seconds / 2))
        try:
            with self.limit.reserving(script_seconds):
                yield
        except OutOfTime:
            self.ended = False
        except KeyboardInterrupt:
            self.ended, self.interrupted = False, True

    def write(self, script: Script) -> WrittenScript:
        """Write a script without running it."""
        return write(script, self.folder / SCRIPT, None)

    def write_and_run(self, make_script: Callable[[], Script]) -> WrittenScript:
        """Write the script and run it; interrupted, only write it."""
        self.show("running the script")
        try:
            return write(make_script(), self.folder / SCRIPT, max(self.limit.left, 1.0))
        except KeyboardInterrupt:
            self.interrupted = True
            return self.write(make_script())

    def report(self, written: WrittenScript, **facts: Any) -> ShrinkReport:
        """The report on the script; the facts are further fields of it."""
        return ShrinkReport(
            script=str(written.path),
            data=None if written.data_path is None else str(written.data_path),
            shows=written.shows,
            said=written.said,
            seconds=self.limit.spent,
            ended=self.ended,
            interrupted=self.interrupted,
            **facts,
        )


class ShrinkReport(Result, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A script, and how it was found.

    Attributes:
        script: its path.
        data: path of the values it loads, if they are in a separate file.
        shows: whether the script ran and showed the failure.
        what: the failure.
        before: the size of the original program.
        after: the size of the shrunk program.
        diagnosis: what kind of wrong it is.
        steps: the reductions, in order.
        remedies: compiler options each of which makes the failure go away.
        queries: how many programs were tried.
        seconds: the total time.
        ended: False if it was stopped while it could still get smaller.
        interrupted: whether Ctrl-C stopped it.
        said: the last line that the script printed.
    """

    _called: ClassVar[str] = "a report on what was shrunk"

    script: str
    shows: bool
    what: str
    data: str | None = None
    before: str = ""
    after: str = ""
    diagnosis: Diagnosis | None = None
    steps: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    queries: int = 0
    seconds: float = 0.0
    ended: bool = True
    interrupted: bool = False
    said: str = ""

    @property
    def exit_code(self) -> int:
        """1: the script shows the failure; 3: it does not; 130: Ctrl-C."""
        if self.interrupted:
            return 130
        return 1 if self.shows else 3

    @property
    def lines(self) -> list[str]:
        """The result for a terminal; the last line names the script."""
        smaller = f"{self.before} -> {self.after}" if self.before else self.after
        lines = [f"{self.what}: {smaller}" if smaller else self.what]
        if self.diagnosis is not None and self.diagnosis.sentence:
            lines.append(f"  {self.diagnosis.sentence}")
        lines += [f"  {step}" for step in self.steps]
        lines += [f"  it goes away with {remedy}" for remedy in self.remedies]
        how = "interrupted" if self.interrupted else "stopped"
        stopped = "" if self.ended else f", {how} before the search was finished"
        tried = f"{count_things(self.queries, 'program')} tried"
        lines.append(f"  {tried} in {self.seconds:.0f} s{stopped}")
        if self.shows:
            result = f"run by itself it fails: {self.said}"
        elif self.interrupted and not self.said:
            result = "interrupted before it was run by itself"
        else:
            result = f"run by itself it does NOT show the failure: {self.said}"
        beside = f", with its values in {self.data}" if self.data else ""
        return [*lines, f"script: {self.script}{beside}; {result}"]


class _ShrinkFolder(Protocol):
    def __call__(
        self,
        folder: Path,
        outdir: Path,
        *,
        graph: str | None,
        seconds: float,
        on_progress: Callable[[str], None],
    ) -> ShrinkReport: ...


@dataclasses.dataclass(frozen=True)
class FolderShrinker:
    """How a failure in the output folder of another command is shrunk.

    Attributes:
        file: the name of the results by which the folder is recognized.
        run: writes the script; `graph` is the `--graph` of the command.
    """

    file: str
    run: _ShrinkFolder
