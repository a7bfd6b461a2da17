"""A worker, seen from the process that it works for."""

from __future__ import annotations

import contextlib
import tempfile
from typing import IO, TYPE_CHECKING

from paritas.core.workers.channel import Channel
from paritas.core.workers.inside import Start
from paritas.core.workers.starting import kill_group, start_interpreter, wait_for_end

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paritas.core.workers.inside import Program
    from paritas.core.workers.server import WorkerServer
    from paritas.core.workers.starting import Process

_LONG = 1e9


class Worker:
    """A process that works for this one.

    Attributes:
        channel: our end of the connection.
        process: its process.
    """

    def __init__(self, start: Callable[[Channel, IO[bytes]], Process]) -> None:
        """`start` starts it with its end of the channel, and the file of its output."""
        self.channel, there = Channel.pair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with it)
        self._is_reaped = False
        try:
            self.process = start(there, self._log)
        except BaseException:
            self.channel.close()
            self._log.close()
            raise
        finally:
            there.forget()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None as long as it runs."""
        return self.process.poll()

    def wait(self, seconds: float) -> int:
        """The exit code; a worker that goes on after this time is killed."""
        code = wait_for_end(self.process, seconds)
        if code is None:
            self.kill()
            code = wait_for_end(self.process, _LONG)
        assert code is not None, "nothing outlives SIGKILL"  # noqa: S101
        return code

    def kill(self) -> None:
        """Kill it and what it has started."""
        if self.process.poll() is None:
            kill_group(self.process.pid)

    def read_log(self) -> str:
        """What it printed."""
        with contextlib.suppress(OSError, ValueError):
            self._log.seek(0)
            return self._log.read().decode(errors="replace")
        return ""

    def close(self) -> None:
        """Forget it; it has ended."""
        with contextlib.suppress(OSError):
            self.channel.close()
        self._log.close()


def start_worker(
    program: Program,
    server: WorkerServer | None,
    environment: Mapping[str, str],
    *,
    memory: int = 0,
) -> Worker:
    """Start a worker: from the server if there is one, otherwise as a new interpreter."""

    def start(there: Channel, log: IO[bytes]) -> Process:
        if server is not None:
            return server.start(there, log, memory=memory)
        return start_interpreter(
            Start(program=program, memory=memory),
            there.fileno(),
            log.fileno(),
            environment=environment,
        )

    return Worker(start)
