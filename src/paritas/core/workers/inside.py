"""What a worker does before it works: its session, its output, its limits.

It dies with its parent, writes to its log only, leaves no core, and is killed first if the memory
of the machine runs out.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from paritas.core.workers.channel import Channel, ChannelClosedError

if sys.platform != "win32":
    import resource

if TYPE_CHECKING:
    from collections.abc import Callable


# The exit code of a worker that raised.
FAILED = 71


class CannotForkError(Exception):
    """What was prepared in a process does not survive a fork."""


class Program(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What workers run.

    Attributes:
        name: `module:function`. The function is called with the settings, and with whether workers
            are going to be forked from this process; it imports what they need, and returns what a
            worker does with its channel. It raises `CannotForkError` if they must not be forked.
        settings: for the function, encoded.
    """

    name: str
    settings: bytes = b""

    def prepare(self, *, forks: bool) -> Callable[[Channel], None]:
        """Import what workers need; returns what a worker does."""
        module, _, function = self.name.partition(":")
        work: Callable[[Channel], None] = getattr(importlib.import_module(module), function)(
            self.settings, forks=forks
        )
        return work


class Start(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The command line of a new interpreter.

    Attributes:
        memory: how many bytes a worker may allocate; 0 for no limit.
        is_server: start workers on orders, instead of being one.
        idle_seconds: a server without workers ends after this time without an order; 0 for never.
        dies_with_parent: see `die_with_parent`.
    """

    program: Program
    memory: int = 0
    is_server: bool = False
    idle_seconds: float = 0.0
    dies_with_parent: bool = True

    def to_text(self) -> str:
        """Encode as one argument."""
        return msgspec.json.encode(self).decode()


def begin() -> NoReturn:
    """Be what the command line of this new interpreter asks for."""
    start = msgspec.json.decode(sys.argv[1], type=Start)
    channel = Channel.of(int(sys.argv[2]))
    if start.is_server:
        from paritas.core.workers.serving import serve

        serve(channel, start)
    become_worker(memory=start.memory, dies_with_parent=start.dies_with_parent)
    work(start.program.prepare(forks=False), channel)


def work(do: Callable[[Channel], None], channel: Channel) -> NoReturn:
    """Work until the channel is closed, and skip the exit handlers: they are not this process's."""
    code = 0
    try:
        do(channel)
    except ChannelClosedError:
        pass
    except BaseException:  # noqa: BLE001  (whoever watches has the exit code and the log)
        traceback.print_exc()
        code = FAILED
    sys.stdout.flush()
    os._exit(code)


def become_worker(log: int = 2, *, memory: int = 0, dies_with_parent: bool = True) -> None:
    """Make this process a worker.

    Args:
        log: the file descriptor of its output.
        memory: how many bytes it may allocate beyond those that it has; 0 for no limit.
        dies_with_parent: see `die_with_parent`.
    """
    if dies_with_parent:
        die_with_parent()
    with contextlib.suppress(OSError):  # it is the leader of a session already
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for target in (1, 2):
        os.dup2(log, target)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.stdout = sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["python"]
    faulthandler.enable(file=2)
    leave_no_core()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    _limit_memory(memory)


def dies_with_starter() -> bool:
    """Whether a process that is started here, and used by any thread, may die with its parent.

    The system asks for the thread that started it, and only the main one lives as long.
    """
    return threading.current_thread() is threading.main_thread()


def die_with_parent() -> None:
    """End this process when the thread that started it ends, or its process is killed."""
    _control_process(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Be the parent of the processes whose parents end, if they descend from this one."""
    _control_process(36, 1)  # PR_SET_CHILD_SUBREAPER


def leave_no_core() -> None:
    """Write no core file if this process crashes."""
    # A limit of 1 byte also keeps a core from a program that collects them, a limit of 0 does not.
    most = resource.getrlimit(resource.RLIMIT_CORE)[1]
    least = 1 if most == resource.RLIM_INFINITY else min(1, most)
    resource.setrlimit(resource.RLIMIT_CORE, (least, least))


def _limit_memory(more: int) -> None:
    if not more:
        return
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _control_process(option: int, value: Any) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value)
