"""The work of `paritas run`: run a script as python would, alone or on ranks, and report."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import importlib.machinery
import importlib.util
import os
import runpy
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import click
import msgspec

from paritas.app.cli.options import (
    OutputFormat,
    subject_source,
    with_shrink_command,
    write_json,
)
from paritas.core.compiled.guard_settings import NOTHING_COMPILED
from paritas.core.errors import UsageError, in_one_line
from paritas.core.results.findings import Coverage, Verdict, unverified
from paritas.core.results.graph_reports import GraphCounts
from paritas.core.results.report import Report
from paritas.core.results.wording import headline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from paritas.core.compiled.guarded_calls import GuardJournal

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
_OUR_FRAMES = {__file__, runpy.__file__, "<frozen runpy>"}
_LONGEST_TEXT = 160
_WORK_SECONDS = 60.0
_POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class ScriptProgram:
    """The program of `paritas run [-m] target args...`."""

    target: str
    is_module: bool
    args: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a program ended.

    Attributes:
        code: the exit code of python.
        words: what happened, or "" if it finished normally.
        by_signal: whether a signal stopped it.
        is_replaced: whether another program continues in its process.
    """

    code: int = 0
    words: str = ""
    by_signal: bool = False
    is_replaced: bool = False


class _Terminated(BaseException):
    """SIGTERM, raised in the program like Ctrl-C: torchrun and batch systems send it."""


def check_program(program: ScriptProgram) -> None:
    """Raise `UsageError` unless the program can be run."""
    target = program.target
    if program.is_module:
        _check_module(target)
        return
    path = Path(target)
    if path.is_dir() and (path / "__main__.py").is_file():
        return
    if path.is_dir():
        raise UsageError(f"SCRIPT {target!r} is a directory without a __main__.py; give a file")
    if not path.exists():
        raise UsageError(f"SCRIPT {target!r} does not exist{_hint(path)}")


def run_program(program: ScriptProgram) -> Ending:
    """Run it as the main program of a process that continues afterwards.

    This waits for threads that are still working, but not forever: some threads stop only when the
    process ends.
    """
    there = frozenset(threading.enumerate())
    with StopSignals():
        return _ending_with(program, lambda: _wait_for_work(there))


def run_last_program(program: ScriptProgram, signals: StopSignals) -> Ending:
    """Run it as the last program of this process, up to the point where python calls `atexit`."""
    try:
        ending = _ending_with(program, _end_threads)
    finally:
        signals.only_hurry()
    if ending.code == TERMINATED:
        _leave_threads()  # SIGTERM ends python without waiting for them
    return ending


def _ending_with(program: ScriptProgram, wait: Callable[[], None]) -> Ending:
    """Run a program, then wait for its threads."""
    with _as_main_program(program):
        ending = _ending_of(lambda: _run(program))
        if ending.by_signal:
            return ending
        waited = _ending_of(wait)
        return ending if ending.words else waited


def _run(program: ScriptProgram) -> None:
    if program.is_module:
        runpy.run_module(program.target, run_name="__main__", alter_sys=True)
    elif Path(program.target).is_dir():
        runpy.run_path(program.target, run_name="__main__")
    else:
        _run_file(Path(program.target).absolute())


def _ending_of(run: Callable[[], None]) -> Ending:
    try:
        run()
    except SystemExit as error:
        return ending_of_exit(error.code)
    except KeyboardInterrupt:
        return Ending(INTERRUPTED, "was interrupted by Ctrl-C", by_signal=True)
    except _Terminated:
        return Ending(TERMINATED, "was terminated by SIGTERM", by_signal=True)
    except BaseException as error:  # noqa: BLE001  (any exception ends the program)
        _show(error)
        return Ending(1, f"ended with {in_one_line(error, _LONGEST_TEXT)}")
    return Ending()


def _run_file(path: Path) -> None:
    """Run a file like python, which keeps `sys.argv[0]` as typed; `runpy.run_path` does not."""
    loader = importlib.machinery.SourceFileLoader("__main__", str(path))
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    vars(main).update(__file__=str(path), __loader__=loader, __cached__=None)
    sys.modules["__main__"] = main
    exec(code, vars(main))  # noqa: S102  (running it is the purpose)


class StopSignals:
    """Handlers of Ctrl-C and SIGTERM: they stop the program; afterwards they hurry its report.

    At no moment in between would a signal end the process and lose the report. Signals that are
    ignored from the start (`nohup`, a background job) stay ignored.
    """

    def __init__(self) -> None:
        self.hurried = threading.Event()
        self._process = os.getpid()
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Turn SIGTERM into an exception, unless it has a handler; Ctrl-C already raises one."""
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._handle(signal.SIGTERM, self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers."""
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def only_hurry(self) -> None:
        """From now on signals only set `hurried`."""
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handle(number, lambda *_: self.hurried.set())

    def ignore_termination(self) -> None:
        """Ignore SIGTERM for the rest of the process, which keeps its own exit code."""
        self._handle(signal.SIGTERM, signal.SIG_IGN)
        self._former.pop(signal.SIGTERM, None)

    def _handle(self, number: signal.Signals, handler: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # required by `signal`
            self._former.setdefault(number, signal.signal(number, handler))

    def _raise(self, number: int, _: Any) -> None:
        if os.getpid() == self._process:
            raise _Terminated
        # In a process that the program forked: the default, which ends that process.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _check_module(name: str) -> None:
    if name.endswith(".py"):
        raise UsageError(f"-m {name!r} is a file; drop -m, or give the module's dotted name")
    path = list(sys.path)
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except Exception as error:  # importing the parent packages may raise anything
        raised = in_one_line(error, _LONGEST_TEXT)
        raise UsageError(f"-m {name!r} cannot be run: {raised}") from error
    finally:
        sys.path[:] = path
    if spec is None:
        raise UsageError(f"-m {name!r}: no such module, or it has no __main__")


def _hint(path: Path) -> str:
    name = path.name
    if name == "torchrun":
        return "; start paritas by torchrun: torchrun ... --no-python paritas run script.py"
    if name.startswith("python"):
        return "; drop the interpreter: paritas run script.py"
    if path.suffix != ".py" and path.parent == Path() and "." in name:
        return f"; for a module, use paritas run -m {name}"
    beside = path.parent if path.parent.is_dir() else Path()
    near = difflib.get_close_matches(name, [found.name for found in beside.glob("*.py")], n=1)
    return f"; did you mean {str(beside / near[0])!r}?" if near else ""


@contextlib.contextmanager
def _as_main_program(program: ScriptProgram) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as python would for the program."""
    argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    sys.argv = [program.target, *program.args]
    if not sys.flags.safe_path:
        folder = Path() if program.is_module else Path(program.target).resolve()
        folder = folder if folder.is_dir() else folder.parent
        # The first entry is the folder of the program that python started, paritas.
        sys.path[:1] = [str(folder.absolute())]
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = path
        sys.modules["__main__"] = main


def _end_threads() -> None:
    """Do what python does first at the end of a program: close pools and join threads.

    Python does not do it a second time, and stops waiting after Ctrl-C or a failure.
    """
    # Imported now: during the report it would be too late to register their shutdown functions.
    import concurrent.futures.process
    import concurrent.futures.thread  # noqa: F401

    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    except Exception as error:  # noqa: BLE001  (shown and ignored, as python does)
        _leave_threads()
        _show(error)
    except BaseException:
        _leave_threads()
        raise


def _leave_threads() -> None:
    """Make python exit without waiting for threads."""
    threading._shutdown = lambda: None  # type: ignore[attr-defined]  # noqa: SLF001


def _wait_for_work(there: frozenset[threading.Thread]) -> None:
    """Wait for new threads that are working, up to a limit."""
    deadline = time.monotonic() + _WORK_SECONDS
    while working := [thread for thread in threading.enumerate() if _is_at_work(thread, there)]:
        working[0].join(_POLL_SECONDS)
        if time.monotonic() > deadline:
            names = ", ".join(thread.name for thread in working)
            click.echo(
                f"stopped waiting for threads that the script left running: {names}", err=True
            )
            return


def _is_at_work(thread: threading.Thread, there: frozenset[threading.Thread]) -> bool:
    if thread in there or thread.daemon or not thread.is_alive():
        return False
    from concurrent.futures import thread as pools

    # A pool ends its idle threads when it is closed, at the end of the process.
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001
    idle_worker = frame is not None and frame.f_code is pools._worker.__code__  # noqa: SLF001
    idle_manager = getattr(thread, "pending_work_items", None) == {}  # of a pool of processes
    return not idle_worker and not idle_manager


def ending_of_exit(code: Any) -> Ending:
    """The ending that `sys.exit(code)` stands for."""
    if code is None or code == 0:
        return Ending()
    if isinstance(code, int):
        return Ending(code & 0xFF, f"exited with {code}")
    _say(code)
    return Ending(1, f"exited with {str(code)[:_LONGEST_TEXT]!r}")


def _show(error: BaseException) -> None:
    """Print the traceback as python does, without the frames that started the program."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _OUR_FRAMES:
        frames = frames.tb_next
    error.__traceback__ = frames
    try:
        sys.excepthook(type(error), error, frames)
    except BaseException as another:  # noqa: BLE001  (shown, as python does)
        another.__context__ = None
        another.__traceback__ = another.__traceback__ and another.__traceback__.tb_next
        for title, one in (
            ("Error in sys.excepthook", another),
            ("\nOriginal exception was", error),
        ):
            _say(f"{title}:")
            sys.__excepthook__(type(one), one, one.__traceback__)


def _say(text: Any) -> None:
    """Print to stderr, which the program may have closed."""
    with contextlib.suppress(OSError, ValueError):
        click.echo(text, err=True)


# --- Several ranks of one program -----------------------------------------------------------------

# Ranks exchange reports in a temporary folder, which works even if the program's process group is
# broken. The first rank of each machine reports for all ranks of that machine.

WAIT_SECONDS = 60.0
# After a stop signal: torchrun kills it half a minute later.
HURRIED_SECONDS = 5.0
_MEETING_POLL_SECONDS = 0.1
_NOTICE_AFTER_SECONDS = 2.0
# Together unique to one launch among those that run at the same time.
_COMMON = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The rank of this process, the world size, and the ranks on this machine."""

    rank: int
    world: int
    here: range

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str], *, alone: bool = False
    ) -> Ranks | None:
        """Read the variables of torchrun.

        Args:
            environment: the variables of this process.
            alone: whether the only rank that torchrun started counts as one.

        Returns:
            None if this process is no rank.
        """
        try:
            rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local = int(environment.get("LOCAL_RANK", rank))
            count = int(environment.get("LOCAL_WORLD_SIZE", world))
        except (KeyError, ValueError):
            return None
        # Schedulers set the other variables for processes that are no ranks.
        one = alone and "TORCHELASTIC_RUN_ID" in environment
        least = 1 if one else 2
        here = range(rank - local, rank - local + count)
        return None if world < least else cls(rank, world, here)

    @property
    def merges(self) -> bool:
        """Whether this rank reports for all ranks on its machine."""
        return self.rank == self.here.start


class Meeting:
    """The folder where the ranks of one launch on one machine exchange reports."""

    def __init__(self, ranks: Ranks, environment: Mapping[str, str]) -> None:
        """Choose the folder; the merging rank removes what a killed launch left there."""
        self.ranks = ranks
        common = [str(os.getppid()), *(environment.get(name, "") for name in _COMMON)]
        digest = hashlib.sha256("\n".join(common).encode()).hexdigest()[:16]
        owner = os.getuid() if hasattr(os, "getuid") else "all"
        self.folder = Path(tempfile.gettempdir()) / f"paritas-run-{owner}-{digest}"
        if ranks.merges:
            self.close()

    def hand_in(self, report: bytes) -> None:
        """Leave a report for the merging rank; raises OSError if that fails."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not self._is_ours():
            raise PermissionError(f"{self.folder} belongs to another user")
        unfinished = self.folder / f"{self.ranks.rank}.unfinished"
        unfinished.write_bytes(report)
        unfinished.replace(self._file(self.ranks.rank))

    def collect(self, seconds: float, hurried: threading.Event) -> dict[int, bytes]:
        """The reports of the other ranks that arrive in time."""
        others = [rank for rank in self.ranks.here if rank != self.ranks.rank]
        start, noticed = time.monotonic(), False
        while time.monotonic() < start + seconds and not hurried.is_set():
            missing = [rank for rank in others if not self._file(rank).exists()]
            if not missing:
                break
            if not noticed and time.monotonic() > start + _NOTICE_AFTER_SECONDS:
                noticed = True
                listed = ", ".join(map(str, missing))
                click.echo(f"waiting up to {seconds:g} s for the report of rank {listed}", err=True)
            hurried.wait(_MEETING_POLL_SECONDS)
        if not self._is_ours():
            return {}
        return {rank: self._file(rank).read_bytes() for rank in others if self._file(rank).exists()}

    def wait_until_closed(self, seconds: float, hurried: threading.Event) -> bool:
        """Whether the merging rank read the reports in time."""
        deadline = time.monotonic() + seconds
        while self.folder.exists():
            if time.monotonic() >= deadline or hurried.is_set():
                return False
            hurried.wait(_MEETING_POLL_SECONDS)
        return True

    def close(self) -> None:
        """Remove the folder."""
        if self._is_ours():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _is_ours(self) -> bool:
        """Whether no other user can write there: folders for temporary files are open to all."""
        try:
            status = self.folder.lstat()
        except OSError:
            return False
        mine = not hasattr(os, "getuid") or status.st_uid == os.getuid()
        closed = os.name == "nt" or not stat.S_IMODE(status.st_mode) & 0o077
        return stat.S_ISDIR(status.st_mode) and mine and closed

    def _file(self, rank: int) -> Path:
        return self.folder / f"{rank}.json"


# --- One report for several ranks -----------------------------------------------------------------


class RankReport(Report, frozen=True):
    """The graphs and the verdict of one process."""

    _called: ClassVar[str] = "the report of a rank"

    graphs: tuple[GraphCounts, ...]
    verdict: Verdict

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Decode; unreadable data becomes a report that says so."""
        try:
            return super().from_json(data)
        except UsageError as error:
            reason = f"its report cannot be read: {error}"
            return cls((), Verdict(findings=(unverified("report", reason),)))


def merge_ranks(ranks: Ranks, reports: Mapping[int, RankReport]) -> RankReport:
    """One report for all ranks of this machine; a missing report is unverified."""
    graphs: list[GraphCounts] = []
    verdicts = []
    for rank in ranks.here:
        label = f"rank {rank}"
        if rank in reports:
            graphs += [
                msgspec.structs.replace(graph, label=f"{label}: {graph.label}")
                for graph in reports[rank].graphs
            ]
            verdicts.append(_label_verdict(reports[rank].verdict, rank))
        else:
            reason = "it sent no report in time: it was killed, or is still running"
            verdicts.append(Verdict(findings=(unverified(label, reason),)))
    verdict = Verdict.merge(verdicts)
    here = ranks.here
    if len(here) < ranks.world:
        which = f"rank {here[0]}" if len(here) == 1 else f"ranks {here[0]} to {here[-1]}"
        note = (
            f"this report covers {which} of {ranks.world}, those on this machine; the first rank "
            "of each other machine reports for its own"
        )
        verdict = msgspec.structs.replace(verdict, notes=(note, *verdict.notes))
    return RankReport(tuple(graphs), verdict)


def _label_verdict(verdict: Verdict, rank: int) -> Verdict:
    def named(items: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"rank {rank}: {item}" for item in items)

    coverage = verdict.coverage
    # `merge` adds a finding if nothing was compared; it gets the label too.
    merged = Verdict.merge([verdict])
    return msgspec.structs.replace(
        merged,
        findings=tuple(
            msgspec.structs.replace(finding, item=msgspec.structs.replace(finding.item, rank=rank))
            for finding in merged.findings
        ),
        coverage=Coverage(
            compared=coverage.compared,
            skipped=named(coverage.skipped),
            unmatched=named(coverage.unmatched),
        ),
        notes=named(verdict.notes),
    )


# --- The end of a run -----------------------------------------------------------------------------

UNREACHED = "the rest of the script was not checked"
NOTHING_BEFORE = "nothing was compiled before that"
NO_GRAPH = "nothing was compiled: torch.compile found no graph to capture"
NOTHING_ADVICE = (
    "only the script's own process is checked, not processes that it starts; and torch.compile has "
    "no effect if it is disabled (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE, set_stance)"
)


@dataclasses.dataclass(frozen=True)
class GuardedRun:
    """A guarded run and its result.

    Attributes:
        journal: of the guards; None if nothing was compiled.
        failure: why it could not be guarded.
    """

    program: ScriptProgram
    ending: Ending
    journal: GuardJournal | None
    failure: Exception | None
    strict: bool


@dataclasses.dataclass(frozen=True)
class OutputFiles:
    """The files of `--json` and `--format`."""

    json_path: Path | None = None
    form: OutputFormat = dataclasses.field(default_factory=OutputFormat)

    def of_rank(self, rank: int) -> OutputFiles:
        """Files of its own for the first rank of another machine: the file system may be shared."""
        if rank == 0:
            return self

        def own(path: Path | None) -> Path | None:
            return None if path is None else path.with_stem(f"{path.stem}.rank{rank}")

        form = dataclasses.replace(self.form, file=own(self.form.file))
        return OutputFiles(own(self.json_path), form)


def report_run(
    course: GuardedRun, meeting: Meeting | None, files: OutputFiles, signals: StopSignals
) -> int:
    """Report what the guards found, and return the exit code."""
    ending = course.ending
    report = report_on(course)
    if meeting is None:
        _print_report(_note_rank(report), course.program, files)
    elif meeting.ranks.merges:
        report = _merge_reports(report, ending, meeting, signals.hurried)
        _print_report(report, course.program, files.of_rank(meeting.ranks.rank))
    else:
        _hand_in(report, course, meeting, signals.hurried)
    if meeting is not None:
        # When the other ranks end, torchrun sends SIGTERM to this one, which is ending anyway.
        if not ending.is_replaced:
            signals.ignore_termination()
        if meeting.ranks.merges:
            meeting.close()
    return ending.code if ending.by_signal else report.verdict.exit_code


def report_on(course: GuardedRun) -> RankReport:
    """The report of this process, including how the script ended."""
    verdict = Verdict(strict=course.strict)
    graphs: tuple[GraphCounts, ...] = ()
    if course.journal is not None:
        verdict = course.journal.verdict()
        graphs = tuple(
            msgspec.convert(entry, GraphCounts, from_attributes=True)
            for entry in course.journal.graphs
        )
    found = list(verdict.findings)
    path = f"script {course.program.target}"
    if course.failure is not None:
        found.append(unverified(path, f"it could not be guarded: {course.failure}"))
    if course.ending.words:
        missed = UNREACHED if graphs else NOTHING_BEFORE
        found.append(unverified(path, f"it {course.ending.words}; {missed}"))
    elif course.journal is None and course.failure is None:
        found.append(unverified(path, NOTHING_COMPILED, NOTHING_ADVICE))
    elif not graphs and course.failure is None:
        found.append(unverified(path, NO_GRAPH))
    return RankReport(graphs, msgspec.structs.replace(verdict, findings=tuple(found)))


def _note_rank(report: RankReport) -> RankReport:
    """Note that this is one of several ranks that could not be merged."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return report
    note = (
        f"this report covers only rank {dist.get_rank()} of {dist.get_world_size()}: RANK and "
        "WORLD_SIZE are not set; start the ranks with torchrun for one report on all"
    )
    verdict = report.verdict
    noted = msgspec.structs.replace(verdict, notes=(note, *verdict.notes))
    return msgspec.structs.replace(report, verdict=noted)


def _merge_reports(
    report: RankReport, ending: Ending, meeting: Meeting, hurried: threading.Event
) -> RankReport:
    seconds = HURRIED_SECONDS if ending.by_signal else WAIT_SECONDS
    handed_in = meeting.collect(seconds, hurried)
    reports = {rank: RankReport.from_json(data) for rank, data in handed_in.items()}
    return merge_ranks(meeting.ranks, {**reports, meeting.ranks.rank: report})


def _hand_in(
    report: RankReport, course: GuardedRun, meeting: Meeting, hurried: threading.Event
) -> None:
    """Send the report to the merging rank; print it here if that fails."""
    rank = meeting.ranks.rank
    click.echo(f"rank {rank}: {headline(report.verdict)}", err=True)
    try:
        meeting.hand_in(report.to_json())
    except OSError as error:
        click.echo(f"rank {rank}: the report cannot be handed over: {error}", err=True)
        _print_report(report, course.program, OutputFiles())
        return
    if report.verdict.passed:
        return
    # torchrun ends all ranks when one fails, so wait until the report has been read.
    seconds = HURRIED_SECONDS if course.ending.words else WAIT_SECONDS
    if not meeting.wait_until_closed(seconds, hurried):
        click.echo(f"rank {rank}: its report was not read within {seconds:g} s", err=True)
        _print_report(report, course.program, OutputFiles())


def _print_report(report: RankReport, program: ScriptProgram, files: OutputFiles) -> None:
    from rich.console import Console

    from paritas.core.reporting.annotations import verdict_account
    from paritas.core.reporting.terminal import Printable, guard_report

    verdict, target = report.verdict, program.target
    if not program.is_module:
        arguments = ["--", *program.args] if program.args else []
        verdict = with_shrink_command(verdict, [target, *arguments])
    file, _ = subject_source(target)
    files.form.write(
        lambda: verdict_account(verdict, command="run", subject=target, file=file), err=True
    )
    console = Console(stderr=True, highlight=False)
    console.print()
    console.rule("paritas run", style="dim")
    console.print(Printable(guard_report(report.graphs, verdict)), crop=False)
    write_json(files.json_path, verdict.to_json)
