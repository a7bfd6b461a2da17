"""The settings of guards, and guarding from the first compiled call of a process.

This module does not import torch: `import paritas`, `paritas run` and pytest load it first.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas.core.errors import UsageError
from paritas.core.time_limit import UNLIMITED, TimeLimit
from paritas.core.torch_private.arrival import on_first_compile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from paritas.core.compiled.guard import GuardEverywhere
    from paritas.core.compiled.guarded_calls import GuardJournal


# --- Settings, and which calls are checked --------------------------------------------------------

ACTIONS = ("raise", "warn", "record", "fallback")
SWITCH = "PARITAS_GUARD"
OFF = f"guards are switched off (enabled=False, or {SWITCH}=0 in the environment)"
_OFF = {"0", "off", "false", "no"}
_ON = {"1", "on", "true", "yes"}
# For a graph with dynamic sizes, the first call with each of this many sizes is checked, regardless
# of `every`: code that is right for one size may be wrong for the next.
SIZES_CHECKED = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardSwitches:
    """What every guard has.

    Attributes:
        on_mismatch: `raise` a `MismatchError`; `warn`; `record` for `verdict()`; or `fallback`,
            which gives the program the reference's result and continues.
        every: check each n-th call of a graph; below 1, that share of its calls. The first call of
            a graph, and the first with new dynamic sizes, is always checked.
        locate: find the first wrong operator if something differs.
        check_passes: also check Inductor's graph passes and its split into forward and backward.
        strict: count `unstable` as a failure.
    """

    on_mismatch: str = "raise"
    every: float = 1
    locate: bool = True
    check_passes: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        if self.on_mismatch not in ACTIONS:
            raise UsageError(
                f"on_mismatch must be one of {', '.join(ACTIONS)}, not {self.on_mismatch!r}"
            )
        every = self.every
        is_number = isinstance(every, int | float) and not isinstance(every, bool)
        if not is_number or not every > 0 or (every > 1 and every % 1 != 0):
            raise UsageError(
                f"every must be a whole number n (each n-th call is checked) or a share of the "
                f"calls between 0 and 1, not {every!r}"
            )
        for name in ("locate", "check_passes", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be True or False, not {getattr(self, name)!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardSettings(GuardSwitches):
    """The settings of one guard.

    Attributes:
        seed: the seed of the perturbed runs.
        limit: for a guard that only looks for the first wrong operator: the time for it. The
            program is then stopped by a `SearchOverError`.
        lifted_agrees: for such a guard: whether the fault vanishes if the program runs in float64,
            if that is known.
    """

    seed: int = 0
    limit: TimeLimit = UNLIMITED
    lifted_agrees: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EverywhereOptions(GuardSwitches):
    """The options of `guard_everywhere()`, and those of `GuardSwitches`.

    Attributes:
        enabled: False guards nothing, also inside another `guard_everywhere`; so does
            PARITAS_GUARD=0 in the environment.
    """

    enabled: bool | None = None

    @property
    def settings(self) -> GuardSettings:
        """The settings of the guard."""
        names = (field.name for field in dataclasses.fields(GuardSwitches))
        return GuardSettings(**{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True)
class GuardOptions(EverywhereOptions):
    """The options of `guard()`, and those of `GuardSwitches`.

    Attributes:
        backend: a name that `torch.compile` knows, or a function from a graph and example inputs
            to a callable.
        options: compiler options, as in `torch.compile(options=...)`.
        enabled: False returns the plain backend; so does PARITAS_GUARD=0 in the environment.
    """

    backend: str | Callable[..., Any] = "inductor"
    _: dataclasses.KW_ONLY
    options: dict[str, Any] | None = None


class SearchOverError(Exception):
    """The time for a search is over. It ends the search and never reaches the user."""


def require_time(limit: TimeLimit) -> None:
    """Raise `SearchOverError` if none is left."""
    if limit.is_over:
        raise SearchOverError


def is_enabled(switch: Any) -> bool:
    """Whether to guard: as requested, unless the environment switches guards off."""
    if not isinstance(switch, bool | None):
        raise UsageError(f"enabled must be True, False or None, not {switch!r}")
    return switch is not False and _read_switch() not in _OFF


def switched_on() -> str | None:
    """The action on a mismatch that the environment asks for; None if it asks for no guard."""
    value = _read_switch()
    if value == "" or value in _OFF:
        return None
    return value if value in ACTIONS else "raise"


def _read_switch() -> str:
    """The value of PARITAS_GUARD in lower case, or ""."""
    raw_value = os.environ.get(SWITCH, "")
    value = raw_value.strip().lower()
    if value not in {"", *_ON, *_OFF, *ACTIONS}:
        known_actions = ", ".join(ACTIONS)
        raise UsageError(
            f"{SWITCH} must be 0, 1, or the action on a mismatch ({known_actions}), not "
            f"{raw_value!r}"
        )
    return value


class Schedule:
    """Decides which calls of one graph are checked: always the first, then as `every` says."""

    def __init__(self, every: float, seed: int) -> None:
        """See `GuardSettings.every`."""
        self.every = every
        self.calls = 0
        self._sizes: set[tuple[Any, ...]] = set()
        self._draws = random.Random(seed)

    def due(self, sizes: tuple[Any, ...]) -> bool:
        """Count one call with these dynamic sizes; return whether to check it."""
        self.calls += 1
        if sizes not in self._sizes and len(self._sizes) < SIZES_CHECKED:
            self._sizes.add(sizes)
            return True
        if self.every < 1:
            return self._draws.random() < self.every
        return (self.calls - 1) % int(self.every) == 0


# --- Waiting for the first compiled call ----------------------------------------------------------

# `paritas run`, `pytest --paritas-guard` and PARITAS_GUARD=1 in the environment all start here.

NOTHING_COMPILED = "nothing was compiled: the program called nothing that torch.compile made"


class GuardWatch:
    """Guards everything that is compiled, starting with the first compiled call.

    Attributes:
        settings: the settings of the guards.
        failure: why guarding failed, kept for the report: the program may catch the error.
    """

    def __init__(
        self, settings: GuardSettings, make_journal: Callable[[], GuardJournal] | None = None
    ) -> None:
        """Watching begins with `start`."""
        self.settings = settings
        self.failure: Exception | None = None
        self._make_journal = make_journal
        self._everywhere: GuardEverywhere | None = None
        self._stack = contextlib.ExitStack()

    @property
    def journal(self) -> GuardJournal | None:
        """The journal of the guards; None if nothing was compiled."""
        return None if self._everywhere is None else self._everywhere.journal

    def start(self) -> None:
        """Wait for the first compiled call; after a `stop`, continue with the same journal."""
        self._stack.enter_context(on_first_compile(self._arm))

    def stop(self) -> None:
        """Restore torch."""
        self._stack.close()

    def __enter__(self) -> Self:
        """Start watching."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Restore torch, also after an exception."""
        self.stop()

    def _arm(self) -> None:
        if self.failure is not None:
            raise self.failure
        try:
            if self._everywhere is None:
                from paritas.core.compiled.guard import GuardEverywhere

                journal = None if self._make_journal is None else self._make_journal()
                self._everywhere = GuardEverywhere(self.settings, journal)
            self._stack.enter_context(self._everywhere)
        except Exception as error:
            self.failure = error
            raise


# --- Switched on by the environment ---------------------------------------------------------------

_watch: GuardWatch | None = None
# How many commands of paritas ran in this process: they check and report by themselves.
_commands = 0


def watch_by_environment() -> None:
    """Guard everything that is compiled, if PARITAS_GUARD is set; `import paritas` calls this.

    An invalid value raises at the first compiled call and is reported at exit. It does not make
    `import paritas` fail, because the commands of paritas have an exit code for wrong usage.
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
    """Suspend the environment's guards while a command of paritas does its own checks.

    Raises:
        UsageError: PARITAS_GUARD has an invalid value.
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
    if _watch is not None and (line := summary_line(_watch)):
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


def summary_line(watch: GuardWatch) -> str:
    """Describe in one line what was checked; "" for a process that is not expected to compile."""
    rank = f", rank {os.environ['RANK']}" if "RANK" in os.environ else ""
    prefix = f"paritas ({SWITCH}={os.environ.get(SWITCH, '')}{rank}): "
    if watch.failure is None and watch.journal is not None:
        return prefix + watch.journal.summary()
    if _expects_no_compiling():
        return ""
    if watch.failure is not None:
        return f"{prefix}unverified: nothing was guarded: {watch.failure}"
    return f"{prefix}unverified: {NOTHING_COMPILED}"


def _expects_no_compiling() -> bool:
    """Whether this process is not expected to compile: a command of paritas, torchrun, a worker."""
    if "torch" not in sys.modules or _is_torchrun() or _commands:
        return True
    import multiprocessing

    return multiprocessing.parent_process() is not None


def _is_torchrun() -> bool:
    """Whether this process only launches others: `torchrun`, `python -m torch.distributed.run`."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    by_module = getattr(spec, "name", "") == "torch.distributed.run"
    return by_module or Path(sys.argv[0] if sys.argv else "").name == "torchrun"
