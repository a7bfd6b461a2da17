"""The nursery of candidates' processes, seen from the judge. Nothing here imports torch."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

READY = "ready"
_LONGEST_LOG = 1000
_SERVE = "from paritas.kernels.processes import serve; serve()"


class Nursery:
    """A process that has imported torch and forks candidates' processes. Thread-safe.

    A fork of the process that started it may use it, too, as long as no other process does so.

    Attributes:
        is_usable: whether it can fork; otherwise each candidate gets a new interpreter.
        insists: fork although there are other threads, which somebody knows to be idle.
    """

    def __init__(self, preload: Sequence[str] = (), *, forks: bool = False) -> None:
        """Start it.

        Args:
            preload: modules that it imports; one that starts threads makes it useless.
            forks: fork it from this process instead of starting a new interpreter.
        """
        self._lock, self._owner = threading.Lock(), os.getpid()
        ours, theirs = socket.socketpair()
        self._orders = ours
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with it)
        start = _forked if forks else _started
        self._process = start(theirs, self._log.fileno(), preload)
        theirs.close()
        self._lines = ours.makefile("r", encoding="ascii")
        self._answer: str | None = None
        self.insists = False

    @property
    def is_usable(self) -> bool:
        """Wait until it is ready; whether it can fork."""
        if not self.problem:
            return True
        return self.insists and bool(self._answer) and not self._has_ended()

    @property
    def problem(self) -> str:
        """Wait until it is ready; why it cannot fork, or an empty string."""
        with self._lock:
            if self._answer is None:
                self._answer = self._lines.readline().strip()
            if not self._answer or self._has_ended():
                return f"it has ended: {self._read_log()}"
            return "" if self._answer == READY else self._answer

    def _read_log(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            content = os.pread(self._log.fileno(), 1 << 16, 0)
            return content.decode(errors="replace").strip()[-_LONGEST_LOG:]
        return ""

    def _has_ended(self) -> bool:
        if os.getpid() == self._owner:
            return self._process.poll() is not None
        # In a fork of the process that started it, it is no child.
        try:
            os.kill(self._process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def start(self, channel: int, log: int, memory: int) -> int:
        """Fork a process that follows the orders from `channel`; return its id."""
        with self._lock:
            socket.send_fds(self._orders, [f"start {memory}".encode()], [channel, log])
            return int(self._lines.readline())

    def wait(self, process: int) -> int:
        """Wait for the end of a process that it forked; return its exit code."""
        with self._lock:
            self._orders.sendall(f"wait {process}".encode())
            return int(self._lines.readline())

    def stop(self) -> None:
        """End it, and all processes that it forked."""
        with contextlib.suppress(OSError):
            self._lines.close()
            self._orders.close()
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if os.getpid() == self._owner:
            self._process.wait()
        self._log.close()


def _started(channel: socket.socket, log: int, preload: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _SERVE, str(channel.fileno()), *preload],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[channel.fileno()],
        env=environment(),
        start_new_session=True,
    )


class _Fork:
    """A forked process, with the methods of `subprocess.Popen` that are needed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._has_ended = False

    def poll(self) -> int | None:
        self._has_ended = self._has_ended or os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return 0 if self._has_ended else None

    def wait(self) -> int:
        if not self._has_ended:
            os.waitpid(self.pid, 0)
            self._has_ended = True
        return 0


def _forked(channel: socket.socket, log: int, preload: Sequence[str]) -> _Fork:
    process = os.fork()
    if process:
        return _Fork(process)
    try:
        os.setsid()
        for target in (1, 2):
            os.dup2(log, target)
        # A candidate must not be able to write to what this process has open.
        kept = {0, 1, 2, channel.fileno()}
        for end in set(map(int, os.listdir("/proc/self/fd"))) - kept:  # noqa: PTH208
            with contextlib.suppress(OSError):
                os.close(end)
        os.environ.update(environment())
        from paritas.kernels.processes import be_nursery

        be_nursery(channel, preload)
    except BaseException:  # noqa: BLE001  (the log shows it)
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(70)


def environment() -> dict[str, str]:
    """One thread, so that the nursery can fork, and modules where this process finds them.

    Python's own come first, so that a file beside a kernel cannot hide one that torch imports, such
    as `dis.py`. A candidate is imported with the order of this process.
    """
    own = os.path.dirname(os.__file__)  # noqa: PTH120
    packages = os.path.join(own, "site-packages")  # noqa: PTH118
    paths = [path for path in sys.path if path]
    paths.sort(key=lambda path: not path.startswith(own) or path.startswith(packages))
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


# --- The nurseries of the process -----------------------------------------------------------------

_lock = threading.Lock()
_nurseries: dict[tuple[str, ...], Nursery] = {}


def shared_nursery(preload: Sequence[str] = (), *, forks: bool = False) -> Nursery:
    """The nursery of this process that has imported these modules.

    It is started on first use and ends with the process.

    Args:
        preload: modules that it imports.
        forks: if there is none yet, fork it from this process, which holds no reference yet.
    """
    with _lock:
        if not _nurseries:
            atexit.register(stop_nurseries)
        key = tuple(preload)
        if key not in _nurseries:
            _nurseries[key] = Nursery(key, forks=forks)
        return _nurseries[key]


def fork_nursery() -> None:
    """Fork the nursery of this process, which has imported torch and holds no reference yet.

    On Linux, and as long as this process has one thread; otherwise the nursery is started on first
    use, which takes as long as importing torch.
    """
    threads = Path("/proc/self/task")
    if threads.is_dir() and len(list(threads.iterdir())) == 1:
        shared_nursery(forks=True)


def stop_nurseries() -> None:
    """End the nurseries and all candidates' processes."""
    with _lock:
        while _nurseries:
            _nurseries.popitem()[1].stop()
