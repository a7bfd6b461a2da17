"""The server, inside: it prepares what workers need once, and starts each as it is ordered."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from paritas.core.workers.channel import Channel, ChannelClosedError
from paritas.core.workers.inside import (
    CannotForkError,
    Start,
    adopt_orphans,
    become_worker,
    die_with_parent,
    work,
)
from paritas.core.workers.starting import kill_group, start_interpreter

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_WAITS = 20
# `ru_maxrss` is in bytes on macOS, in kB elsewhere.
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


class StartWorker(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order: start a worker that has the channel and the log that come with this.

    Attributes:
        memory: how many bytes it may allocate; 0 for no limit.
        forks: fork it, instead of starting a new interpreter.
    """

    memory: int = 0
    forks: bool = True


class LookAtWorker(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order: say whether a worker has ended."""

    process: int


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Sent once; `problem` is why workers cannot be forked, or empty."""

    problem: str = ""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `StartWorker`; `error` is why it could not be started, or empty."""

    process: int = 0
    error: str = ""


class WorkerEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker ended.

    Attributes:
        code: the exit code, negative for a signal; None as long as it runs.
        processor_seconds: the time that processors spent on it.
        memory: the most memory that it held at once, in bytes.
    """

    code: int | None = None
    processor_seconds: float = 0.0
    memory: int = 0


def serve(orders: Channel, start: Start) -> NoReturn:
    """Start the workers that are ordered, until the channel is closed."""
    if start.dies_with_parent:
        die_with_parent()
    do: Callable[[Channel], None] | None = None
    try:
        do = start.program.prepare(forks=True)
        gc.collect()
        gc.freeze()  # otherwise a collection in a worker would copy all these objects
        threads = _other_threads()
        problem = f"it has threads: {', '.join(threads)}" if threads else ""
    except CannotForkError as error:
        problem = str(error)
    orders.send(Prepared(problem=problem))
    adopt_orphans()
    _Server(orders, start, do).run()
    os._exit(0)  # skip the exit handlers of imported modules


class _Server:
    def __init__(self, orders: Channel, start: Start, do: Callable[[Channel], None] | None) -> None:
        self._orders, self._start, self._do = orders, start, do
        self._running: set[int] = set()

    def run(self) -> None:
        try:
            while True:
                idle = self._start.idle_seconds
                if idle and not self._running and not self._orders.has_content(idle):
                    return
                order, ends = self._orders.receive_with_descriptors(StartWorker | LookAtWorker)  # type: ignore[arg-type]
                if isinstance(order, StartWorker):
                    self._orders.send(self._start_worker(order, ends[0], ends[1]))
                else:
                    self._orders.send(self._look_at(order.process))
        except ChannelClosedError:
            for process in self._running:
                kill_group(process)

    def _start_worker(self, order: StartWorker, channel: int, log: int) -> Started:
        try:
            if order.forks:
                process = self._fork(order, channel, log)
            else:
                start = Start(program=self._start.program, memory=order.memory)
                child = start_interpreter(start, channel, log)
                child.returncode = 0  # this server waits for it
                process = child.pid
        except OSError as error:
            return Started(error=str(error))
        finally:
            os.close(channel)
            os.close(log)
        self._running.add(process)
        return Started(process=process)

    def _fork(self, order: StartWorker, channel: int, log: int) -> int:
        process = os.fork()
        if process:
            return process
        try:
            self._orders.forget()
            become_worker(log, memory=order.memory)
            assert self._do is not None, "nothing was prepared"  # noqa: S101
            work(self._do, Channel.of(channel))
        finally:
            os._exit(70)

    def _look_at(self, process: int) -> WorkerEnd:
        ended, status, used = os.wait4(process, os.WNOHANG)
        if not ended:
            return WorkerEnd()
        self._running.discard(process)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process, signal.SIGKILL)
        self._end_survivors()
        return WorkerEnd(
            code=os.waitstatus_to_exitcode(status),
            processor_seconds=used.ru_utime + used.ru_stime,
            memory=used.ru_maxrss * _RSS_UNIT,
        )

    def _end_survivors(self) -> None:
        """End the processes that workers have left behind: they are this one's children now."""
        for _ in range(_MOST_WAITS):
            try:
                listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
            except OSError:
                return
            survivors = {int(process) for process in listed.split()} - self._running
            if not survivors:
                return
            for process in survivors:
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)


def _other_threads() -> list[str]:
    """The names of the threads beside this one: what holds a lock in one of them is never freed.

    A thread that is about to end is waited for.
    """
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return ["unknown, since there is no /proc/self/task"]
    own_thread = threading.get_native_id()
    names: list[str] = []
    for _ in range(_MOST_WAITS):
        names = [_name_of(task) for task in tasks.iterdir() if task.name != str(own_thread)]
        if not names:
            break
        time.sleep(0.05)
    return names


def _name_of(task: Path) -> str:
    for thread in threading.enumerate():
        if str(thread.native_id) == task.name:
            return thread.name
    try:
        return (task / "comm").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return "one that has ended"
