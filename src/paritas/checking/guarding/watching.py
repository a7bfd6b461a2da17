"""Guarding from the first compiled call of the process on, without importing torch before it.

`paritas run`, `pytest --paritas-guard` and PARITAS_GUARD=1 in the environment all begin like this.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import TYPE_CHECKING

from paritas._torch.arrival import on_first_compile
from paritas.checking.guarding.settings import SWITCH, GuardSettings, switched_on
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from paritas.checking.guarding.everywhere import GuardEverywhere
    from paritas.checking.guarding.journal import Journal

NOTHING = "nothing was compiled: no call of anything that torch.compile made was seen"


class Watch:
    """Guards everything that is compiled, from when something first is.

    Attributes:
        settings: of the guards.
        failure: why it could not be guarded, for the report: the program may pass over the error.
    """

    def __init__(
        self, settings: GuardSettings, make_journal: Callable[[], Journal] | None = None
    ) -> None:
        """Nothing is watched before `start`."""
        self.settings = settings
        self.failure: Exception | None = None
        self._make_journal = make_journal
        self._everywhere: GuardEverywhere | None = None
        self._stack = contextlib.ExitStack()

    @property
    def journal(self) -> Journal | None:
        """What the guards saw; None if nothing was compiled."""
        return None if self._everywhere is None else self._everywhere.journal

    def start(self) -> None:
        """Wait for the first compiled call; after a `stop`, go on with the same journal."""
        self._stack.enter_context(on_first_compile(self._arm))

    def stop(self) -> None:
        """Leave torch as it was."""
        self._stack.close()

    def __enter__(self) -> Self:
        """Watch what is compiled in here."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave torch as it was, also after an exception."""
        self.stop()

    def _arm(self) -> None:
        if self.failure is not None:
            raise self.failure
        try:
            if self._everywhere is None:
                from paritas.checking.guarding.everywhere import GuardEverywhere

                journal = None if self._make_journal is None else self._make_journal()
                self._everywhere = GuardEverywhere(self.settings, journal)
            self._stack.enter_context(self._everywhere)
        except Exception as error:
            self.failure = error
            raise


# --- switched on by the environment ---------------------------------------------------------------

_watch: Watch | None = None
# Whether a command of paritas ran in this process: it checks by itself, and reports by itself.
_commands = 0


def watch_by_environment() -> None:
    """What `import paritas` does where PARITAS_GUARD is set: guard all that is compiled.

    A value that means nothing is refused at the first compiled call, and told at the end: `import
    paritas` is no place to fail, because the commands of paritas have an exit code for that.
    """
    global _watch  # noqa: PLW0603  (there is one environment)
    try:
        action, refused = switched_on(), None
    except UsageError as error:
        action, refused = "raise", error
    if action is None or _watch is not None:
        return
    _watch = Watch(GuardSettings(on_mismatch=action))
    _watch.failure = refused
    _watch.start()
    atexit.register(_tell_at_exit)


@contextlib.contextmanager
def environment_set_aside() -> Iterator[None]:
    """Leave what is compiled in here to a command of paritas, which checks what it is asked to.

    Raises:
        UsageError: the environment asks for what means nothing.
    """
    global _commands  # noqa: PLW0603
    _commands += 1
    if _watch is None:
        yield
        return
    if isinstance(_watch.failure, UsageError):
        raise _watch.failure
    _watch.stop()
    try:
        yield
    finally:
        _watch.start()


def _tell_at_exit() -> None:
    if _watch is not None and (told := summary_line(_watch)):
        with contextlib.suppress(OSError, ValueError):  # nobody listens any more
            sys.stderr.write(f"{told}\n")
            sys.stderr.flush()


def summary_line(watch: Watch) -> str:
    """What was checked, in one line; nothing of a process that had nothing to do with torch."""
    rank = f", rank {os.environ['RANK']}" if "RANK" in os.environ else ""
    prefix = f"paritas ({SWITCH}={os.environ.get(SWITCH, '')}{rank}): "
    if watch.failure is not None:
        told = f"{prefix}unverified: nothing was guarded: {watch.failure}"
        return "" if _is_beside_the_point() else told
    if watch.journal is None:
        return "" if _is_beside_the_point() else f"{prefix}unverified: {NOTHING}"
    return prefix + watch.journal.summary()


def _is_beside_the_point() -> bool:
    """Whether nobody would expect this process to compile: a command of ours, a worker."""
    if "torch" not in sys.modules or _commands:
        return True
    import multiprocessing

    return multiprocessing.parent_process() is not None
