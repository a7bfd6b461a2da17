"""A server that starts workers: it imports what they need once, and forks them where possible."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import tempfile
import threading
from typing import IO, TYPE_CHECKING, NoReturn

from paritas.core.workers.channel import Channel, ChannelClosedError
from paritas.core.workers.inside import Start, dies_with_starter
from paritas.core.workers.serving import LookAtWorker, Prepared, Started, StartWorker, WorkerEnd
from paritas.core.workers.serving import serve as be_server
from paritas.core.workers.starting import (
    describe_end,
    fork_process,
    read_output,
    start_interpreter,
    wait_for_end,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paritas.core.workers.inside import Program
    from paritas.core.workers.starting import ForkedProcess

_LONGEST_LOG = 1000
# The time to end its workers.
_FAREWELL_SECONDS = 10.0


class LostServerError(ConnectionError):
    """The server has ended, and its workers with it."""


class WorkerServer:
    """The process that starts workers. Thread-safe.

    A fork of the process that started it may use it, too, as long as no other process does so.

    Attributes:
        insists: fork although there are other threads, which somebody knows to be idle.
    """

    def __init__(
        self,
        program: Program,
        environment: Mapping[str, str],
        *,
        folder: str | None = None,
        idle_seconds: float = 0.0,
        forks: bool = False,
    ) -> None:
        """Start it.

        Args:
            program: what its workers run.
            environment: its environment variables, and those of its workers.
            folder: its current folder.
            idle_seconds: it ends after this time without a worker; 0 for never. If the process
                that gives the orders is killed on another machine, nobody else ends it.
            forks: fork it from this process instead of starting a new interpreter.

        Raises:
            OSError: the process cannot be started.
        """
        self._lock, self._owner = threading.Lock(), os.getpid()
        start = Start(
            program=program,
            is_server=True,
            idle_seconds=idle_seconds,
            dies_with_parent=dies_with_starter(),
        )
        self._orders, there = Channel.pair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with it)
        self._process: subprocess.Popen[bytes] | ForkedProcess
        log = self._log.fileno()
        try:
            if forks:
                self._process = _fork_server(start, there, log, environment)
            else:
                self._process = start_interpreter(
                    start, there.fileno(), log, environment=environment, folder=folder
                )
        except OSError:
            self._orders.close()
            self._log.close()
            raise
        finally:
            there.forget()
        self._prepared: Prepared | None = None
        self._running = 0
        self.insists = False

    @property
    def is_usable(self) -> bool:
        """Wait until it is ready; whether it can fork."""
        if not self.problem:
            return True
        return self.insists and self._prepared is not None and not self.has_ended

    @property
    def problem(self) -> str:
        """Wait until it is ready; why it cannot fork, or an empty string."""
        with self._lock, contextlib.suppress(ChannelClosedError, OSError):
            if self._prepared is None:
                self._prepared = self._orders.receive(Prepared)
        if self._prepared is None or self.has_ended:
            return f"it has ended: {self.read_log()}"
        return self._prepared.problem

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more."""
        if os.getpid() == self._owner:
            return self._process.poll() is not None
        # In a fork of the process that started it, it is no child.
        try:
            os.kill(self._process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def start(
        self, channel: Channel, log: IO[bytes], *, memory: int = 0, forks: bool = True
    ) -> ServedProcess:
        """Start a worker.

        Args:
            channel: its end.
            log: where it prints.
            memory: how many bytes it may allocate; 0 for no limit.
            forks: fork it, if that is possible.

        Raises:
            OSError: it cannot be started.
            LostServerError: the server has ended.
        """
        order = StartWorker(memory=memory, forks=forks and self.is_usable)
        with self._lock:
            try:
                self._orders.send(order, descriptors=[channel.fileno(), log.fileno()])
                started = self._orders.receive(Started)
            except ChannelClosedError as error:
                raise LostServerError(self.describe_end()) from error
            if started.error:
                raise OSError(started.error)
            self._running += 1
        return ServedProcess(self, started.process)

    def look_at(self, process: int) -> WorkerEnd:
        """Whether, and how, one of its workers has ended.

        Raises:
            LostServerError: the server has ended.
        """
        with self._lock:
            try:
                self._orders.send(LookAtWorker(process=process))
                end = self._orders.receive(WorkerEnd)
            except ChannelClosedError as error:
                raise LostServerError(self.describe_end()) from error
            self._running -= end.code is not None
            return end

    def describe_end(self) -> str:
        """How it ended, and what it printed last."""
        code = wait_for_end(self._process, _FAREWELL_SECONDS)
        lines = [line.strip() for line in self.read_log().splitlines() if line.strip()]
        how = "closed its channel" if code is None else describe_end(code)
        return f"{how}: {lines[-1]}" if lines else how

    def read_log(self) -> str:
        """The end of what it printed."""
        return read_output(self._log).strip()[-_LONGEST_LOG:]

    def stop(self) -> None:
        """End it, and all its workers."""
        is_owner = os.getpid() == self._owner
        # Not under the lock: whoever has it may wait for a server that does not answer.
        self._orders.close()
        if self._running and is_owner:  # it kills its workers when it notices
            wait_for_end(self._process, _FAREWELL_SECONDS)
        if not is_owner or self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if is_owner:
            wait_for_end(self._process, _FAREWELL_SECONDS)
        self._log.close()


@dataclasses.dataclass
class ServedProcess:
    """A worker that a server has started.

    Attributes:
        pid: its id.
        end: how it ended.
    """

    server: WorkerServer
    pid: int
    end: WorkerEnd = dataclasses.field(default_factory=WorkerEnd)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None as long as it runs.

        Raises:
            LostServerError: the server has ended.
        """
        if self.end.code is None:
            self.end = self.server.look_at(self.pid)
        return self.end.code


def _fork_server(
    start: Start, channel: Channel, log: int, environment: Mapping[str, str]
) -> ForkedProcess:
    def begin() -> NoReturn:
        os.environ.update(environment)
        be_server(channel, start)

    # A worker must not be able to write to what this process has open.
    used = {0, 1, 2, log, channel.fileno()}
    return fork_process(begin, log, set(map(int, os.listdir("/proc/self/fd"))) - used)  # noqa: PTH208
