"""Each run has its own process, with a time limit and a memory limit.

A thread of the process that sweeps, or of a worker of a cluster, watches each run, and makes a row
however it ends. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paritas.core import transformers_library
from paritas.core.errors import UsageError, in_one_line
from paritas.core.results.progress import clock_words
from paritas.core.results.wording import size
from paritas.core.time_limit import TimeLimit
from paritas.core.workers.channel import ChannelClosedError, MessageError
from paritas.core.workers.inside import Program
from paritas.core.workers.server import LostServerError, ServedProcess, WorkerServer
from paritas.core.workers.starting import environment_here, kill_group, signal_name
from paritas.core.workers.worker import Worker
from paritas.sweeping.places import RunPlace, WorkerPlace
from paritas.sweeping.plan import RunTask
from paritas.sweeping.rows import RunEnd, SweepRow, trim_verdict, without_verdict
from paritas.sweeping.runs import RunMessage

if TYPE_CHECKING:
    from paritas.core.results.findings import Verdict

_LOOK_SECONDS = 0.1
# After a run has closed its channel, it ends at once.
_END_SECONDS = 0.01
# The time to write a traceback, before a run is killed.
_LAST_WORDS_SECONDS = 1.0
# An idle server ends after this time: if the process that sweeps is killed, nobody else ends those
# of a cluster.
_IDLE_SECONDS = 60.0
_LONGEST_LOG = 4000
# The share of the machine's memory for all runs together, if no limit is given.
_SHARE_OF_MEMORY = 0.8


class RunOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The task of a worker.

    Attributes:
        place: where the sweep was started.
        code: for a worker that may be elsewhere: the files that its runs name, by their path here;
            None for this process.
    """

    task: RunTask
    place: RunPlace
    code: dict[str, bytes] | None = None


def run_order(order: RunOrder) -> SweepRow:
    """Do one run in its own process, and wait for its row.

    Raises:
        BrokenExecutor: the server died; the run may be tried again.
    """
    try:
        server, run_place = _server_of(order)
        return _watch_run(order.task, server, run_place)
    except LostServerError as error:
        raise BrokenExecutor(f"the server of runs {error}") from error
    except OSError as error:
        return row_without_run(
            order.task,
            f"no process can be started for it on {platform.node()}: {in_one_line(error)}",
            "see whether the worker may start processes and write temporary files",
        )


def _server_of(order: RunOrder) -> tuple[WorkerServer, RunPlace]:
    with _servers_lock:
        sweep, run_place = order.place.sweep, order.place
        if order.code is not None:
            if sweep not in _worker_places:
                _worker_places[sweep] = WorkerPlace(order.place, order.code)
            run_place = _worker_places[sweep].place
        server = _servers.get(sweep)
        if server is None or server.has_ended:
            _forget_ended(sweep)
            server = _servers[sweep] = _start_server(run_place)
        return server, run_place


def _start_server(run_place: RunPlace) -> WorkerServer:
    program = Program(
        name="paritas.sweeping.runs:prepare_runs", settings=msgspec.json.encode(run_place)
    )
    return WorkerServer(
        program, _environment(run_place), folder=run_place.folder, idle_seconds=_IDLE_SECONDS
    )


def _environment(run_place: RunPlace) -> dict[str, str]:
    """The environment of the server: one thread and no compile workers, to allow forks."""
    usual = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": run_place.cache}
    usual["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"  # see `_COLLECT_RARELY` of the runs
    # Set here because transformers reads them on import, perhaps before a target is built.
    usual |= transformers_library.OFFLINE
    return {**usual, **environment_here(dict.fromkeys([run_place.folder, *run_place.paths]))}


def _forget_ended(sweep: str) -> None:
    """Remove what other sweeps left here that could not say that they ended."""
    ended = [
        other
        for other, other_server in _servers.items()
        if other_server.has_ended and other != sweep
    ]
    for other in ended:
        del _servers[other]
        if other in _worker_places:
            _worker_places.pop(other).remove()


def stop_servers(sweep: str) -> None:
    """End the server of a sweep in this process, and its runs."""
    with _servers_lock:
        server, worker_place = _servers.pop(sweep, None), _worker_places.pop(sweep, None)
    if server is not None:
        server.stop()
    if worker_place is not None:
        worker_place.remove()


def row_without_run(task: RunTask, reason: str, advice: str) -> SweepRow:
    """The row of a run that no process did."""
    verdict = without_verdict(reason, advice)
    return SweepRow(
        run=task.run,
        ended=RunEnd.CRASHED,
        verdict=verdict,
        counts=trim_verdict(verdict)[1],
        versions=versions(),
    )


# By the id of a sweep.
_servers: dict[str, WorkerServer] = {}
_worker_places: dict[str, WorkerPlace] = {}
_servers_lock = threading.Lock()


@functools.cache
def versions() -> dict[str, str]:
    """The installed versions of everything in a run, read without importing torch."""
    installed_versions = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("torch", "paritas", "triton", transformers_library.LIBRARY, "timm", "torchvision"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed_versions[name] = importlib.metadata.version(name)
    return installed_versions


# --- Watching a run -------------------------------------------------------------------------------


def _watch_run(task: RunTask, server: WorkerServer, run_place: RunPlace) -> SweepRow:
    forks = task.run.device == "cpu"
    worker = Worker(lambda there, log: server.start(there, log, forks=forks))
    try:
        run = _Run(task, worker, _memory_limit(task, run_place))
        run.watch()
        return run.row()
    finally:
        worker.close()


def _memory_limit(task: RunTask, run_place: RunPlace) -> int:
    if task.memory is not None:
        return task.memory
    machine_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # the limit of a container; "max" if none
        machine_memory = min(machine_memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return int(_SHARE_OF_MEMORY * machine_memory / run_place.jobs)


class _Run:
    """A run in progress."""

    def __init__(self, task: RunTask, worker: Worker, memory: int) -> None:
        self._task, self._worker = task, worker
        self._began = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        self._time = TimeLimit(task.seconds)
        self._last_words = TimeLimit(_LAST_WORDS_SECONDS)
        self._seconds = 0.0
        self._limit, self._memory = memory, 0
        self._stage = "starting"
        self._result: RunMessage | None = None
        self._stopped: RunEnd | None = None
        self._code = 0

    def watch(self) -> None:
        """Follow it to its end; a run that exceeds a limit is stopped."""
        is_open = self._is_told()
        while (code := self._worker.poll()) is None:
            if is_open:
                is_open = self._listen(_LOOK_SECONDS)
            else:
                time.sleep(_END_SECONDS)
            self._stop_beyond_limits()
        self._code, self._seconds = code, self._time.spent
        while is_open and self._worker.channel.has_content():
            is_open = self._listen(0)

    def _is_told(self) -> bool:
        try:
            self._worker.channel.send(self._task)
        except ChannelClosedError:
            return False
        return True

    def _listen(self, seconds: float) -> bool:
        """Read a message, if there is one in this time; False if it has closed its end."""
        if not self._worker.channel.has_content(seconds):
            return True
        try:
            message = self._worker.channel.receive(RunMessage, seconds=_LAST_WORDS_SECONDS)
        except (ChannelClosedError, MessageError, TimeoutError):
            return False
        if message.ended is None:
            self._stage = message.stage
        else:
            self._result = message
        return True

    def _stop_beyond_limits(self) -> None:
        process = self._worker.process.pid
        if self._stopped is RunEnd.TIMED_OUT and self._last_words.is_over:
            kill_group(process)
        elif self._stopped is None and self._time.is_over:
            self._stopped = RunEnd.TIMED_OUT
            self._last_words.begin()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGABRT)  # it writes a traceback to its log
        elif self._stopped is None:
            self._memory = max(self._memory, _resident(process))
            if self._memory > self._limit:
                self._stopped = RunEnd.OUT_OF_MEMORY
                kill_group(process)

    def row(self) -> SweepRow:
        """Make its row."""
        ended, verdict, counts = self._outcome()
        process = self._worker.process
        assert isinstance(process, ServedProcess)  # noqa: S101  (for the type checker)
        return SweepRow(
            run=self._task.run,
            ended=ended,
            verdict=verdict,
            counts=counts,
            began=self._began,
            seconds=round(self._seconds, 3),
            processor_seconds=round(process.end.processor_seconds, 3),
            memory=max(self._memory, process.end.memory),
            versions={**versions(), **({} if self._result is None else self._result.versions)},
            log="" if ended is RunEnd.VERDICT else _end_of_log(self._worker.read_log()),
        )

    def _outcome(self) -> tuple[RunEnd, Verdict, dict[str, int]]:
        task, during = self._task, f", during: {self._stage}"
        if self._stopped is RunEnd.TIMED_OUT:
            reason = f"not finished after {clock_words(task.seconds)}, the time limit{during}"
            return self._no_verdict(RunEnd.TIMED_OUT, reason, "raise seconds, or see the log")
        if self._stopped is RunEnd.OUT_OF_MEMORY:
            used = f"{size(self._memory)}, more than the limit of {size(self._limit)}"
            advice = "raise memory, or lower --jobs"
            return self._no_verdict(RunEnd.OUT_OF_MEMORY, f"it used {used}{during}", advice)
        if self._result is not None and self._code == 0:
            result = self._result
            verdict = result.verdict
            if verdict is None:  # not `if not verdict`: a failing verdict is false
                return self._no_verdict(RunEnd.CRASHED, "the run sent no verdict", "")
            return result.ended or RunEnd.CRASHED, verdict, result.counts
        code = self._code
        if code == -signal.SIGKILL:
            reason = f"killed by SIGKILL, probably by the system for lack of memory{during}"
            return self._no_verdict(RunEnd.OUT_OF_MEMORY, reason, "lower --jobs, or set memory")
        how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
        reason = f"the process crashed ({how}){during}"
        return self._no_verdict(RunEnd.CRASHED, reason, "the end of its log shows where")

    def _no_verdict(
        self, ended: RunEnd, reason: str, advice: str
    ) -> tuple[RunEnd, Verdict, dict[str, int]]:
        verdict = without_verdict(reason, advice)
        return ended, verdict, trim_verdict(verdict)[1]


def _resident(process: int) -> int:
    """The memory of a process and its children in bytes; 0 if it cannot be read."""
    if sys.platform != "linux":
        return _resident_by_ps(process)
    resident_bytes, pending_processes = 0, [process]
    while pending_processes:
        folder = Path("/proc") / str(pending_processes.pop())
        with contextlib.suppress(OSError, ValueError, IndexError):
            resident_bytes += int((folder / "statm").read_text().split()[1]) * os.sysconf(
                "SC_PAGE_SIZE"
            )
            for thread in (folder / "task").iterdir():
                pending_processes += map(int, (thread / "children").read_text().split())
    return resident_bytes


def _resident_by_ps(group: int) -> int:
    shown = subprocess.run(
        ["ps", "-axo", "pgid=,rss="],  # noqa: S607  (wherever it is)
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    pairs = [line.split() for line in shown.splitlines()]
    return sum(int(rss) * 1024 for owner, rss in pairs if int(owner) == group)


def _end_of_log(text: str) -> str:
    """The end of a log, without the list of modules that Python writes when it crashes."""
    lines = [line for line in text.splitlines() if not line.startswith("Extension modules: ")]
    return "\n".join(lines)[-_LONGEST_LOG:].strip()


def check_system() -> None:
    """Raise `UsageError` on systems where processes cannot be watched."""
    if sys.platform == "win32":
        raise UsageError("paritas sweep does not run on win32: use Linux or macOS")
