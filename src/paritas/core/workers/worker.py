"""A worker, seen from the process that it works for."""

from __future__ import annotations

import contextlib
import tempfile
from typing import IO, TYPE_CHECKING, NoReturn

from paritas.core.workers.channel import Channel, forget_ends
from paritas.core.workers.inside import Start, become_worker, dies_with_starter, work
from paritas.core.workers.starting import (
    fork_process,
    kill_group,
    read_output,
    start_interpreter,
    wait_for_end,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paritas.core.workers.inside import Program
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
        return read_output(self._log)

    def close(self) -> None:
        """Forget it; it has ended."""
        with contextlib.suppress(OSError):
            self.channel.close()
        self._log.close()


def start_worker(
    program: Program, environment: Mapping[str, str], *, memory: int = 0, outlives: bool = False
) -> Worker:
    """Start a worker in a new interpreter.

    Args:
        memory: how many bytes it may allocate; 0 for no limit.
        outlives: it may go on when the thread that starts it ends.
    """
    dies_with_parent = not outlives or dies_with_starter()
    start = Start(program=program, memory=memory, dies_with_parent=dies_with_parent)
    return Worker(
        lambda there, log: start_interpreter(
            start, there.fileno(), log.fileno(), environment=environment
        )
    )


def fork_worker(program: Program) -> Worker:
    """Start a worker that is a fork of this process, with everything that is in its memory."""
    dies_with_parent = dies_with_starter()

    def start(there: Channel, log: IO[bytes]) -> Process:
        def begin() -> NoReturn:
            forget_ends()
            become_worker(dies_with_parent=dies_with_parent)
            work(program.prepare(forks=False), there)

        return fork_process(begin, log.fileno())

    return Worker(start)
