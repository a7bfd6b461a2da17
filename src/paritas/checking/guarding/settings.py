"""What the caller of guard() asks for, and when a call is due for a check."""

from __future__ import annotations

import dataclasses
import os
import random
from typing import Any

from paritas.errors import UsageError

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
    return asked is not False and _switch() not in _OFF


def switched_on() -> str | None:
    """What guards do by the environment's wish on a mismatch; None if it does not wish for any."""
    value = _switch()
    if value == "" or value in _OFF:
        return None
    return value if value in ACTIONS else "raise"


def _switch() -> str:
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
