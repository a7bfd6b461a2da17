"""What a process of a pool does: join the group, then task after task."""

from __future__ import annotations

import contextlib
import datetime as dt
import faulthandler
import os
import pickle
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from paritas.numerics.graph_reports import Confirm as Backend

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Backend", "Seat", "described", "serve", "serve_anew"]

# A rank, how many there are, by what they talk, and the folder in which they meet.
Seat = tuple[int, int, Backend, str]

# The parent's time-out ends a task; this one is for a parent that is gone.
_COLLECTIVE_SECONDS = 1800


def serve(seat: Seat, pipe: Connection, foreign: Iterable[Connection]) -> None:
    """Be a rank until the pipe ends."""
    rank, ranks, backend, folder = seat
    for end in foreign:
        end.close()
    _keep_quiet(Path(folder) / f"rank{rank}.log")
    # One thread: those of the parent's pool are not in a forked child, and ranks share the cores.
    torch.set_num_threads(1)
    # A fork may happen within a pass that is not recorded.
    torch.set_grad_enabled(True)
    try:
        _join_group(rank, ranks, backend, folder)
    except Exception as error:  # noqa: BLE001  (the parent reports it)
        _say(pipe, None, described(error))
        return
    _say(pipe, None, None)
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            _do_one(rank, ranks, pipe)
    # Without the farewell of interpreter and libraries: a forked child's are its parent's.
    os._exit(0)


def serve_anew() -> None:
    """Be a rank in an interpreter of its own, as its command line says."""
    rank, ranks, backend, folder, descriptor = sys.argv[1:]
    by: Backend = "nccl" if backend == "nccl" else "gloo"
    serve((int(rank), int(ranks), by, folder), Connection(int(descriptor)), [])


def _do_one(rank: int, ranks: int, pipe: Connection) -> None:
    message = pipe.recv_bytes()
    try:
        task, payload = pickle.loads(message)  # noqa: S301  (the parent's own)
        value = task(rank, ranks, payload)
        answer = pickle.dumps((value, None))
    except Exception as error:  # noqa: BLE001  (the parent reports it)
        _say(pipe, getattr(error, "so_far", None), described(error))
        return
    pipe.send_bytes(answer)


def described(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]:.300}"


def _say(pipe: Connection, value: Any, error: str | None) -> None:
    with contextlib.suppress(ConnectionError):
        pipe.send_bytes(pickle.dumps((value, error)))


def _join_group(rank: int, ranks: int, backend: Backend, folder: str) -> None:
    # All ranks are here: the loopback needs no name that resolves and no open network.
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store: Any = distributed.FileStore(  # type: ignore[attr-defined]
        str(Path(folder) / "rendezvous"), ranks
    )
    distributed.init_process_group(
        # What ranks tell each other before a collective lies on the host.
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=dt.timedelta(seconds=_COLLECTIVE_SECONDS),
    )


def _keep_quiet(log: Path) -> None:
    """Write what this process prints, gloo's greetings among it, where its parent can read it."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.disable()  # a parent's may write elsewhere
    os.close(descriptor)
