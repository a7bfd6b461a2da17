"""sweep(): does any of my models compute something else now?"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import os
import shutil
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from paritas.core.call_options import takes_options
from paritas.core.errors import ClusterLostError, UsageError
from paritas.core.execution.executors import (
    Failed,
    count_processors,
    executor_of,
    run_batches,
    tell_workers,
)
from paritas.core.reporting.files import check_writable, write_whole
from paritas.core.results.progress import Progress, shows_progress
from paritas.core.results.report import json_of
from paritas.core.settings import own_version
from paritas.formats.files.records import Lock
from paritas.sweeping import places, processes
from paritas.sweeping.plan import plan_tasks
from paritas.sweeping.processes import RunOrder
from paritas.sweeping.rows import (
    CLUSTER_LOST,
    INTERRUPT,
    SweepReport,
    SweepRow,
    SweepRun,
    changes,
)
from paritas.sweeping.rows import FORMAT as REPORT_FORMAT
from paritas.sweeping.runs import libraries_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from paritas.sweeping.places import RunPlace
    from paritas.sweeping.plan import RunTask

LOCAL = "processes"
JOURNAL, REPORT_JSON = "journal.jsonl", "sweep.json"
_LOCK = ".journal.lock"
_FORMAT = 1
_AGAIN = "use another --output, or start again with --restart, which deletes its rows"
JUNIT, HTML = "junit.xml", "report.html"
_CACHE = "inductor-cache"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Where `sweep` runs, its limits, and where it writes.

    Attributes:
        output: the folder for the journal, `sweep.json`, `junit.xml` and `report.html`.
        against: the output of an earlier sweep, to compare with.
        jobs: number of parallel runs; by default the processors, or the cluster's threads.
        executor: `processes`, `dask://host:port`, or an executor of `concurrent.futures`.
        seconds: the time limit of each run; it overrides the file's `[defaults]`.
        memory: the memory limit of each run, in bytes or as `"8 GB"`.
        strict: count `unstable` as a failure.
        restart: delete the rows in the output, and run everything again.
        on_progress: called with a `Progress` after each run.
    """

    output: str | os.PathLike[str]
    against: str | os.PathLike[str] | None = None
    jobs: int | None = None
    executor: str | Executor = LOCAL
    seconds: float | None = None
    memory: int | str | None = None
    strict: bool = False
    restart: bool = False
    on_progress: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise UsageError(f"jobs={self.jobs}: the number of jobs must be 1 or more")


@shows_progress
@takes_options(SweepOptions)
def sweep(
    targets: str | os.PathLike[str] | Sequence[str | Mapping[str, Any]], options: SweepOptions
) -> SweepReport:
    """Verify many targets under many settings, each run in its own process.

    An aborted sweep resumes when it is called again with the same targets and the same output.
    Ctrl-C ends it, and so does the loss of a cluster: the results so far are written and returned.

    Args:
        targets: the path of a TOML file, or a list of its rows: dicts such as
            `{"name": "hf:LlamaForCausalLM", "dtypes": ["float32", "bfloat16"]}`, or names.
        options: given as keyword arguments; see `SweepOptions`.

    Returns:
        The report; true in a boolean context if all runs pass.

    Raises:
        UsageError: the targets are not valid, or the output holds another sweep.
    """
    processes.check_system()
    tasks = plan_tasks(targets, seconds=options.seconds, memory=options.memory)
    earlier = None if options.against is None else read_rows(Path(options.against))
    folder = Path(options.output)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"cannot write to {str(folder)!r}: it is a file; use a folder")
    runs = [task.run for task in tasks]
    began, start = dt.datetime.now(dt.UTC).isoformat(timespec="seconds"), time.monotonic()
    with SweepJournal(folder, runs, processes.versions(), restart=options.restart) as journal:
        check_writable(folder / REPORT_JSON)
        remaining_tasks = [task for task in tasks if task.run not in journal.rows]
        stopped, why = "", ""

        def show_progress(running: Iterable[SweepRun]) -> None:
            if options.on_progress is not None:
                done = journal.rows.values()
                failing = sum(not row.passes() for row in done)
                names = tuple(map(str, running))
                step = Progress("sweeping", len(done), len(tasks), failing=failing, running=names)
                options.on_progress(step)

        try:
            runner = _run_all(
                remaining_tasks, folder, options.executor, options.jobs, show_progress
            )
            with contextlib.closing(runner) as finished_rows:
                for row in finished_rows:
                    journal.add(row)
        except KeyboardInterrupt:
            stopped = INTERRUPT
        except ClusterLostError as error:
            stopped, why = CLUSTER_LOST, str(error)
        rows = tuple(journal.rows[run] for run in runs if run in journal.rows)
        resumed_note = (
            f"{journal.resumed} of {len(tasks)} rows are from before this sweep was resumed"
        )
        report = SweepReport(
            rows=rows,
            planned=len(tasks),
            strict=options.strict,
            stopped=stopped,
            began=began,
            seconds=round(time.monotonic() - start, 3),
            versions=processes.versions(),
            against="" if options.against is None else os.fspath(options.against),
            changes=()
            if earlier is None
            else changes(rows, earlier, strict=options.strict, whole=not stopped),
            notes=(*((resumed_note,) if journal.resumed else ()), *((why,) if why else ())),
        )
        write_report(folder, report)
        if not stopped:
            shutil.rmtree(folder / _CACHE, ignore_errors=True)
    return report


def write_report(folder: Path, report: SweepReport) -> None:
    """Write the files of a report, each one completely or not at all."""
    from paritas.core.reporting.annotations import junit_document
    from paritas.sweeping.report import sweep_account, sweep_page

    write_whole(folder / REPORT_JSON, report.to_json())
    document = junit_document(sweep_account(report, subject=str(folder)))
    write_whole(folder / JUNIT, document.removesuffix("\n").encode())
    write_whole(folder / HTML, sweep_page(report).encode(errors="backslashreplace"))


def _run_all(
    tasks: Sequence[RunTask],
    folder: Path,
    spec: str | Executor,
    jobs: int | None,
    show_progress: Callable[[Iterable[SweepRun]], None],
) -> Generator[SweepRow]:
    """Yield rows in order of completion; closing the generator ends the runs in progress."""
    if not tasks:
        return
    with contextlib.ExitStack() as stack:
        local = spec == LOCAL
        if local:
            jobs = min(jobs or count_processors(), len(tasks))
            # Each thread waits for a process. The threads end last, after the processes.
            spec = stack.enter_context(ThreadPoolExecutor(jobs, "paritas-sweep"))
        elif isinstance(spec, str) and not spec.startswith("dask://"):
            raise UsageError(f"executor={spec!r}: use {LOCAL}, dask://host:port, or an executor")
        executor, workers = stack.enter_context(executor_of(spec, jobs))
        run_place = _place_of(tasks, folder, workers, local=local)
        code = None if local else places.pack_code((task.run for task in tasks), run_place.paths)
        running: dict[SweepRun, None] = {}
        orders = _mark_started(
            (RunOrder(task=task, place=run_place, code=code) for task in tasks),
            running,
            show_progress,
        )
        if local:
            stack.callback(processes.stop_servers, run_place.sweep)
        else:
            stack.callback(tell_workers, executor, processes.stop_servers, run_place.sweep)
        for order, row in run_batches(
            executor, processes.run_order, orders, ahead=workers, ordered=False
        ):
            del running[order.task.run]
            yield _lost(order, row.error) if isinstance(row, Failed) else row
            show_progress(running)


def _mark_started(
    orders: Iterable[RunOrder],
    running: dict[SweepRun, None],
    show_progress: Callable[[Iterable[SweepRun]], None],
) -> Iterator[RunOrder]:
    """The orders; each is running as soon as it is taken."""
    for order in orders:
        running[order.task.run] = None
        show_progress(running)
        yield order


def _place_of(tasks: Sequence[RunTask], folder: Path, jobs: int, *, local: bool) -> RunPlace:
    cache = folder / _CACHE
    cache.mkdir(parents=True, exist_ok=True)
    runs = [task.run for task in tasks]
    return msgspec.structs.replace(
        places.new_place(cache, jobs=jobs, local=local),
        libraries=libraries_of(runs),
        compiles=places.compiles_any(runs),
    )


def _lost(order: RunOrder, error: str) -> SweepRow:
    """The row of a run whose worker died twice."""
    reason, advice = f"its worker died: {error}", "look at the worker's own log"
    return processes.row_without_run(order.task, reason, advice)


# --- The journal ----------------------------------------------------------------------------------

# Each finished row is written at once, and an aborted sweep resumes there. The first line of JSON
# describes the sweep, then each row has a line. A kill loses only the runs in progress; an
# incomplete last line is ignored.


class SweepSubject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of a sweep: the first line of its journal."""

    format: int = _FORMAT
    paritas: str = ""
    versions: dict[str, str] = {}
    runs: tuple[SweepRun, ...] = ()


class SweepJournal:
    """The file, open for writing, and its rows.

    Attributes:
        rows: the finished rows, by run.
        resumed: number of rows when it was opened.
    """

    def __init__(
        self, folder: Path, runs: Sequence[SweepRun], versions: dict[str, str], *, restart: bool
    ) -> None:
        """Open it, and create the folder.

        Raises:
            UsageError: it holds a sweep of other targets or with another torch, is damaged, cannot
                be written, or is in use by another process.
        """
        self._path = folder / JOURNAL
        subject = SweepSubject(paritas=own_version(), versions=versions, runs=tuple(runs))
        self.rows: dict[SweepRun, SweepRow] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(folder / _LOCK)
            try:
                self._open(subject, restart=restart)
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise UsageError(
                f"cannot write {str(self._path)!r}: {error.strerror or error}"
            ) from error
        self.resumed = len(self.rows)

    def _open(self, subject: SweepSubject, *, restart: bool) -> None:
        if not self._lock.is_held:
            raise UsageError(
                f"{str(self._path.parent)!r}: another sweep is writing there; wait for it, or use "
                "another --output"
            )
        length = 0 if restart else self._read(subject)
        self._file = self._path.open("r+b" if length else "wb")
        self._file.truncate(length)
        self._file.seek(length)
        if not length:
            self._write(subject)

    def add(self, row: SweepRow) -> None:
        """Write a row at once; it survives a kill of this process."""
        self._write(row)
        self.rows[row.run] = row

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

    def _write(self, line: msgspec.Struct) -> None:
        self._file.write(json_of(line) + b"\n")
        self._file.flush()

    def _read(self, subject: SweepSubject) -> int:
        """Read the existing rows; return the position to continue writing at."""
        if not self._path.exists():
            return 0
        journal_subject, rows, length = read_journal(self._path)
        if journal_subject is None:
            return 0
        self._refuse_other(journal_subject, subject)
        self.rows = {row.run: row for row in rows}
        return length

    def _refuse_other(self, sweep_subject: SweepSubject, subject: SweepSubject) -> None:
        was, now = (
            sweep_subject.versions.get("torch", "none"),
            subject.versions.get("torch", "none"),
        )
        if was != now:
            raise UsageError(
                f"{str(self._path.parent)!r} holds a sweep with torch {was}, but this is torch "
                f"{now}: {_AGAIN}; to compare the two, use another --output and add "
                f"--against {self._path.parent}"
            )
        if set(sweep_subject.runs) != set(subject.runs):
            more, fewer = (
                set(subject.runs) - set(sweep_subject.runs),
                set(sweep_subject.runs) - set(subject.runs),
            )
            example = min(map(str, more or fewer))
            raise UsageError(
                f"{str(self._path.parent)!r} holds a sweep of other targets ({len(more)} runs are "
                f"new and {len(fewer)} are gone, such as {example}): {_AGAIN}"
            )


def read_journal(path: Path) -> tuple[SweepSubject | None, list[SweepRow], int]:
    """Return the description in a journal, its rows, and the length of its complete lines.

    Raises:
        UsageError: a complete line cannot be read.
    """
    content = path.read_bytes()
    length = content.rfind(b"\n") + 1
    lines = content[:length].splitlines()
    if not lines:
        return None, [], 0
    subject: SweepSubject = _decode_line(path, 1, lines[0], SweepSubject)
    if subject.format != _FORMAT:
        raise _make_damage_error(path, 1, f"format {subject.format} instead of {_FORMAT}")
    rows = [_decode_line(path, at, line, SweepRow) for at, line in enumerate(lines[1:], start=2)]
    return subject, rows, length


def read_rows(path: Path) -> tuple[SweepRow, ...]:
    """Read the rows of an earlier sweep from its folder or its JSON file.

    Raises:
        UsageError: there is no sweep, or it is damaged.
    """
    file = path / REPORT_JSON if path.is_dir() else path
    try:
        if path.is_dir() and not file.exists():  # it was killed
            file = path / JOURNAL
            return tuple(read_journal(file)[1])
        report = SweepReport.from_json(file.read_bytes())
    except FileNotFoundError:
        raise UsageError(
            f"--against {str(path)!r}: there is no earlier sweep; use the --output of one"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {str(file)!r}: {error.strerror or error}") from error
    if report.format != REPORT_FORMAT:
        raise UsageError(
            f"{str(file)!r} has format {report.format}, but this paritas reads format "
            f"{REPORT_FORMAT}: use the paritas that wrote it"
        )
    return report.rows


def _decode_line(path: Path, number: int, text: bytes, kind: Any) -> Any:
    try:
        # Lax: NaN and infinity are written as strings.
        return msgspec.convert(msgspec.json.decode(text), kind, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _make_damage_error(path, number, str(error)) from None


def _make_damage_error(path: Path, number: int, what: str) -> UsageError:
    return UsageError(
        f"{str(path)!r}, line {number} is damaged or of another version: {what}; {_AGAIN}"
    )
