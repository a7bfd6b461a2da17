"""The processes in which candidates run, seen from the judge.

Whatever a candidate does, the judge gets an answer: a record, or how the process ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from paritas.kernels.forking import environment
from paritas.kernels.wire import ChannelClosedError, WireError, encode, receive, send

if TYPE_CHECKING:
    from paritas.kernels.forking import Nursery
    from paritas.kernels.sides import SideName

_ALONE = "from paritas.kernels.nursery import run_alone; run_alone()"
_LONGEST_LOG = 2000
_GRACE_SECONDS = 5.0


class CandidateEnded(Exception):  # noqa: N818  (how a process ended, not an error of ours)
    """A candidate's process is gone.

    Attributes:
        how: what happened, in words.
        kind: `crashed`, `timed out`.
        log: the end of what it printed.
    """

    def __init__(self, how: str, kind: str, log: str = "") -> None:
        super().__init__(how)
        self.how, self.kind, self.log = how, kind, log


class CandidateProcess:
    """The process of one candidate, or of a reference that is timed against it.

    Attributes:
        loaded: what its import did.
    """

    def __init__(
        self,
        side: SideName,
        nursery: Nursery | None,
        *,
        device: str = "cpu",
        memory: int = 0,
        seconds: float = 60.0,
        is_candidate: bool = True,
    ) -> None:
        ours, theirs = socket.socketpair()
        self._channel = ours
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with it)
        self._folder = tempfile.TemporaryDirectory(prefix="kernel-", ignore_cleanup_errors=True)
        self._nursery = nursery if nursery is not None and nursery.is_usable else None
        if device.startswith("cuda"):
            memory = 0  # CUDA reserves far more addresses than it uses
        if self._nursery is not None:
            self._pid = self._nursery.start(theirs.fileno(), self._log.fileno(), memory)
            self._child = None
        else:
            self._child = _start_interpreter(theirs, self._log.fileno(), memory)
            self._pid = self._child.pid
        theirs.close()
        self.is_gone = False
        self._device = device
        order = {
            "do": "load",
            "side": msgspec.to_builtins(side),
            "device": device,
            "folder": str(Path.cwd()),
            "temporary": self._folder.name,
            "paths": [path for path in sys.path if path],
            "is_candidate": is_candidate,
        }
        try:
            self.loaded = self.ask(order, seconds)
        except CandidateEnded:
            self.close()
            raise

    def ask(self, order: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Give one order and wait for the answer.

        Raises:
            CandidateEnded: the process ended, hung, or sent something else.
        """
        try:
            self._channel.settimeout(max(seconds, 0.05))
            send(self._channel, order)
            return receive(self._channel)
        except TimeoutError:
            self._kill()
            raise CandidateEnded(f"it did not return within {seconds:.3g} s", "timed out") from None
        except (ChannelClosedError, WireError) as error:
            was = str(error) if isinstance(error, WireError) else ""
            raise self._ending(was) from None

    def construct(
        self, init: Any, seed: int, seconds: float, dtype: str = "", *, moves: bool = False
    ) -> dict[str, Any]:
        """Make what is called, and move it, if asked; return its parameters and buffers."""
        order = {
            "do": "construct",
            "init": encode(init),
            "seed": seed,
            "device": self._device,
            "dtype": [dtype] if dtype else [],
            "moves": moves,
        }
        return self.ask(order, seconds)

    def _ending(self, was: str) -> CandidateEnded:
        with contextlib.suppress(OSError):
            self._channel.close()
        code = self._wait()
        log = self._read_log()
        if was:
            return CandidateEnded(f"it sent {was} instead of a result", "crashed", log)
        if code < 0:
            return CandidateEnded(
                f"its process was killed by {_signal_name(-code)}", "crashed", log
            )
        return CandidateEnded(f"its process ended with exit code {code}", "crashed", log)

    def _wait(self) -> int:
        """The exit code; a process that closed its channel but goes on is killed."""
        self.is_gone = True
        if not _is_ended(self._pid, _GRACE_SECONDS):
            self._kill_group()
        if self._nursery is not None:
            return self._nursery.wait(self._pid)
        return self._child.wait() if self._child is not None else 0

    def _kill(self) -> None:
        if not self.is_gone:
            self._kill_group()
            self._wait()

    def _kill_group(self) -> None:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self._pid, signal.SIGKILL)

    def _read_log(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            self._log.seek(0)
            return self._log.read().decode(errors="replace")[-_LONGEST_LOG:]
        return ""

    def close(self) -> None:
        """End it."""
        self._kill()
        with contextlib.suppress(OSError):
            self._channel.close()
        self._log.close()
        self._folder.cleanup()

    @property
    def temporary(self) -> str:
        """Its own folder for temporary files."""
        return self._folder.name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _start_interpreter(channel: socket.socket, log: int, memory: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _ALONE, str(channel.fileno()), str(log), str(memory)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[channel.fileno(), log],
        env=environment(),
        start_new_session=True,
    )


def _is_ended(process: int, seconds: float) -> bool:
    """Wait until a process has ended, as a zombie or entirely."""
    import time

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2]
        except OSError:
            return True
        if state.split()[:1] == ["Z"]:
            return True
        time.sleep(0.005)
    return False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
