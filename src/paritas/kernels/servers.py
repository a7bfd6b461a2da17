"""The servers from which candidates' processes are forked. Nothing here imports torch."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paritas.core.workers.inside import Program
from paritas.core.workers.server import WorkerServer
from paritas.core.workers.starting import environment_here

if TYPE_CHECKING:
    from collections.abc import Sequence

_lock = threading.Lock()
_servers: dict[tuple[str, ...], WorkerServer] = {}


def shared_server(preload: Sequence[str] = (), *, forks: bool = False) -> WorkerServer:
    """The server of this process that has imported these modules.

    It is started on first use and ends with the process.

    Args:
        preload: modules that it imports; one that starts threads makes it useless.
        forks: if there is none yet, fork it from this process, which holds no reference yet.
    """
    with _lock:
        if not _servers:
            atexit.register(stop_servers)
        key = tuple(preload)
        if key not in _servers:
            program = candidate_program(key)
            _servers[key] = WorkerServer(program, candidate_environment(), forks=forks)
        return _servers[key]


def fork_server() -> None:
    """Fork the server of this process, which has imported torch and holds no reference yet.

    On Linux, and as long as this process has one thread; otherwise the server is started on first
    use, which takes as long as importing torch.
    """
    threads = Path("/proc/self/task")
    if threads.is_dir() and len(list(threads.iterdir())) == 1:
        shared_server(forks=True)


def stop_servers() -> None:
    """End the servers and all candidates' processes."""
    with _lock:
        while _servers:
            _servers.popitem()[1].stop()


def candidate_program(preload: Sequence[str] = ()) -> Program:
    """What a candidate's process runs."""
    settings = msgspec.json.encode(list(preload))
    return Program(name="paritas.kernels.candidate:prepare_candidates", settings=settings)


def candidate_environment() -> dict[str, str]:
    """One thread, so that the server can fork, and modules where this process finds them.

    Python's own come first, so that a file beside a kernel cannot hide one that torch imports, such
    as `dis.py`. A candidate is imported with the order of this process.
    """
    standard = os.path.dirname(os.__file__)  # noqa: PTH120
    packages = os.path.join(standard, "site-packages")  # noqa: PTH118
    paths = [path for path in sys.path if path]
    paths.sort(key=lambda path: not path.startswith(standard) or path.startswith(packages))
    return {**environment_here(paths), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
