"""What guards are asked for, and guarding from the first compiled call of a process on.

No torch is imported here: `import paritas`, `paritas run` and pytest begin like this.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import random
import sys
from typing import TYPE_CHECKING, Any

from paritas._torch.arrival import on_first_compile
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from paritas.checks.guard import GuardEverywhere
    from paritas.checks.guarded_calls import GuardJournal


# --- What the caller asks for, and when a call is due ---------------------------------------------

ACTIONS = ("raise", "warn", "record", "fallback")
SWITCH = "PARITAS_GUARD"
OFF = f"guards are switched off (enabled=False, or {SWITCH}=0 in the environment)"
_OFF = {"0", "off", "false", "no"}
_ON = {"1", "on", "true", "yes"}
# Of a graph with dynamic sizes, the first call of so many different ones is checked, whatever
# `every` says: code that is right for one size may be wrong for the next.
SIZES_CHECKED = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """The settings of one guard, checked.

    Attributes:
        on_mismatch: `raise`, `warn`, `record` or `fallback`.
        every: check each n-th call of a graph, or, below 1, that share of its calls.
        locate: find the first wrong operator of what differs.
        check_passes: check the compiler's passes and its split of the graph, at compile time.
        strict: count `unstable` as a failure.
        seed: of the perturbed runs.
    """

    on_mismatch: str = "raise"
    every: float = 1
    locate: bool = True
    check_passes: bool = False
    strict: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.on_mismatch not in ACTIONS:
            message = f"on_mismatch must be one of {', '.join(ACTIONS)}, not {self.on_mismatch!r}"
            raise UsageError(message)
        every = self.every
        is_number = isinstance(every, int | float) and not isinstance(every, bool)
        if not is_number or not every > 0 or (every > 1 and every % 1 != 0):
            message = (
                f"every must be a whole number n (each n-th call is checked) or a share of the "
                f"calls between 0 and 1, not {every!r}"
            )
            raise UsageError(message)
        for name in ("locate", "check_passes", "strict"):
            if not isinstance(getattr(self, name), bool):
                message = f"{name} must be True or False, not {getattr(self, name)!r}"
                raise UsageError(message)


def is_enabled(asked: Any) -> bool:
    """Whether to guard at all: as asked, unless the environment says no."""
    if not isinstance(asked, bool | None):
        message = f"enabled must be True, False or None, not {asked!r}"
        raise UsageError(message)
    return asked is not False and _read_switch() not in _OFF


def switched_on() -> str | None:
    """What guards do by the environment's wish on a mismatch; None if it does not wish for any."""
    value = _read_switch()
    if value == "" or value in _OFF:
        return None
    return value if value in ACTIONS else "raise"


def _read_switch() -> str:
    """What the environment says, or ""."""
    given = os.environ.get(SWITCH, "")
    value = given.strip().lower()
    if value not in {"", *_ON, *_OFF, *ACTIONS}:
        known = ", ".join(ACTIONS)
        message = f"{SWITCH} must be 0, 1, or what to do on a mismatch ({known}), not {given!r}"
        raise UsageError(message)
    return value


class Schedule:
    """Says which calls of one graph are checked: the first always, then as asked."""

    def __init__(self, every: float, seed: int) -> None:
        """See `GuardSettings.every`."""
        self.every = every
        self.calls = 0
        self._sizes: set[tuple[Any, ...]] = set()
        self._draws = random.Random(seed)

    def due(self, sizes: tuple[Any, ...]) -> bool:
        """Count one call with these dynamic sizes and say whether to check it."""
        self.calls += 1
        if sizes not in self._sizes and len(self._sizes) < SIZES_CHECKED:
            self._sizes.add(sizes)
            return True
        if self.every < 1:
            return self._draws.random() < self.every
        return (self.calls - 1) % int(self.every) == 0


# --- Waiting for the first compiled call ----------------------------------------------------------

# `paritas run`, `pytest --paritas-guard` and PARITAS_GUARD=1 in the environment all begin like
# this.

NOTHING_COMPILED = "nothing was compiled: no call of anything that torch.compile made was seen"


class GuardWatch:
    """Guards everything that is compiled, from when something first is.

    Attributes:
        settings: of the guards.
        failure: why it could not be guarded, for the report: the program may pass over the error.
    """

    def __init__(
        self, settings: GuardSettings, make_journal: Callable[[], GuardJournal] | None = None
    ) -> None:
        """Nothing is watched before `start`."""
        self.settings = settings
        self.failure: Exception | None = None
        self._make_journal = make_journal
        self._everywhere: GuardEverywhere | None = None
        self._stack = contextlib.ExitStack()

    @property
    def journal(self) -> GuardJournal | None:
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
                from paritas.checks.guard import GuardEverywhere

                journal = None if self._make_journal is None else self._make_journal()
                self._everywhere = GuardEverywhere(self.settings, journal)
            self._stack.enter_context(self._everywhere)
        except Exception as error:
            self.failure = error
            raise


# --- switched on by the environment ---------------------------------------------------------------

_watch: GuardWatch | None = None
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
    _watch = GuardWatch(GuardSettings(on_mismatch=action))
    _watch.failure = refused
    _watch.start()
    atexit.register(_report_at_exit)


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


def _report_at_exit() -> None:
    if _watch is not None and (told := summary_line(_watch)):
        with contextlib.suppress(OSError, ValueError):  # nobody listens any more
            sys.stderr.write(f"{told}\n")
            sys.stderr.flush()


def summary_line(watch: GuardWatch) -> str:
    """What was checked, in one line; nothing of a process that had nothing to do with torch."""
    rank = f", rank {os.environ['RANK']}" if "RANK" in os.environ else ""
    prefix = f"paritas ({SWITCH}={os.environ.get(SWITCH, '')}{rank}): "
    if watch.failure is not None:
        told = f"{prefix}unverified: nothing was guarded: {watch.failure}"
        return "" if _expects_no_compiling() else told
    if watch.journal is None:
        return "" if _expects_no_compiling() else f"{prefix}unverified: {NOTHING_COMPILED}"
    return prefix + watch.journal.summary()


def _expects_no_compiling() -> bool:
    """Whether nobody would expect this process to compile: a command of ours, a worker."""
    if "torch" not in sys.modules or _commands:
        return True
    import multiprocessing

    return multiprocessing.parent_process() is not None
