"""Starting a process that is a rank, by fork or anew."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Protocol

import torch

from paritas.errors import UsageError
from paritas.partition.ranks.serving import Seat, serve

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RankProcess", "start_method", "start_rank"]

_SCRIPT = "from paritas.partition.ranks.serving import serve_anew; serve_anew()"


class RankProcess(Protocol):
    """What a pool asks of its processes."""

    def exit_code(self, patience: float = 0.0) -> int | None:
        """How it ended, negative for a signal; None if it is still there after so many seconds."""

    def kill(self) -> None:
        """End it and leave nothing of it."""


class _Forked:
    def __init__(self, seat: Seat, pipe: Connection, foreign: Sequence[Connection]) -> None:
        context = multiprocessing.get_context("fork")
        self._process = context.Process(
            target=serve, args=(seat, pipe, foreign), daemon=True, name=f"paritas-rank-{seat[0]}"
        )
        with warnings.catch_warnings():
            # Newer Pythons warn of any thread; `start_method` has looked for those that matter.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()

    def exit_code(self, patience: float = 0.0) -> int | None:
        self._process.join(patience)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class _Anew:
    """A new interpreter.

    Not one of `multiprocessing`: that would run the user's script again, once in each rank.
    """

    def __init__(self, seat: Seat, pipe: Connection) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # noqa: PTH109
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, *map(str, seat), str(pipe.fileno())],
            pass_fds=[pipe.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
        )

    def exit_code(self, patience: float = 0.0) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(patience)
        return None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def start_method() -> str:
    """`fork` where nothing is lost or stuck in the child, otherwise `anew`."""
    alone = threading.active_count() == 1
    # With an accelerator autograd has threads of its own, and refuses to work in a forked process.
    still = not torch.accelerator.is_available() and not torch.distributed.is_initialized()
    return "fork" if sys.platform == "linux" and alone and still else "anew"


def start_rank(
    method: str, seat: Seat, pipes: Sequence[tuple[Connection, Connection]]
) -> RankProcess:
    """Start one rank; `pipes` are our ends and theirs, one pair for each rank.

    Raises:
        UsageError: there is no such way on this system.
    """
    theirs = pipes[seat[0]][1]
    if method == "fork":
        # A forked process has every end that is open here; unless it closes those of the others,
        # nobody would see a pipe end when this process does.
        foreign = [end for pair in pipes for end in pair if end is not theirs]
        return _Forked(seat, theirs, foreign)
    if method != "anew" or sys.platform == "win32":
        raise UsageError(f"no ranks can be started by {method!r} on {sys.platform}")
    return _Anew(seat, theirs)
