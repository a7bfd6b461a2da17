"""Start a process: a new interpreter, or a fork of this one. Only the standard library."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from typing import IO, TYPE_CHECKING, Protocol

from paritas.core.time_limit import TimeLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from paritas.core.workers.inside import Start

_BEGIN = "from paritas.core.workers.inside import begin; begin()"
_LOOK_SECONDS = 0.005


class Process(Protocol):
    """A started process: `subprocess.Popen`, a fork, or one that a server has started."""

    @property
    def pid(self) -> int:
        """Its id."""

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None as long as it runs."""


def start_interpreter(
    start: Start,
    channel: int,
    log: int,
    *,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start a new interpreter with its end of a channel, in a session of its own.

    Ctrl-C is for the process that starts it. Modules of the current folder are not imported,
    unless the environment names it.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _BEGIN, start.to_text(), str(channel)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[channel],
        env=None if environment is None else dict(environment),
        cwd=folder,
        start_new_session=True,
    )


def environment_here(paths: Iterable[str]) -> dict[str, str]:
    """The environment of workers that find modules on these paths; one thread allows forks."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


class ForkedProcess:
    """A fork of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None as long as it runs."""
        if self._code is None:
            try:
                process, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # the program ignores the ends of its children
                process, status = self.pid, 0
            self._code = os.waitstatus_to_exitcode(status) if process else None
        return self._code


def fork_process(begin: Callable[[], None], log: int, foreign: Iterable[int] = ()) -> ForkedProcess:
    """Fork this process, to do something in a session of its own.

    Args:
        begin: what the fork does; it ends when this returns.
        log: the file descriptor of its output.
        foreign: file descriptors that it must not have.
    """
    with warnings.catch_warnings():
        # Newer Pythons warn about any thread; the caller has looked for those that matter.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        return ForkedProcess(process)
    try:
        os.setsid()
        for target in (1, 2):
            os.dup2(log, target)
        for descriptor in foreign:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        begin()
        os._exit(0)
    except BaseException:  # noqa: BLE001  (the log shows it)
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(70)


def wait_for_end(process: Process, seconds: float) -> int | None:
    """Wait for the exit code; None if the process still runs after this time."""
    limit = TimeLimit(seconds)
    while (code := process.poll()) is None and not limit.is_over:
        time.sleep(_LOOK_SECONDS)
    return code


def kill_group(process: int) -> None:
    """Kill a worker and the processes that it has started."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)


def read_output(log: IO[bytes]) -> str:
    """What a process has printed to its log; it may go on printing where it is."""
    with contextlib.suppress(OSError, ValueError):  # the log is closed
        descriptor = log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
    return ""


def describe_end(code: int) -> str:
    """How a process ended: `ended with exit code 3`, `was killed by SIGSEGV`."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def signal_name(number: int) -> str:
    """The name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
