"""One thing that was looked at. Standard library alone: it has to work where little else does."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FAILED", "GROUPS", "MISSING", "OK", "Check", "State", "looked_at"]

State = Literal["ok", "failed", "not available"]
OK: State = "ok"
FAILED: State = "failed"
MISSING: State = "not available"
# In the order in which they are looked at, and shown.
GROUPS = ("versions", "machine", "folders", "compiler", "torch", "hooks into torch", "self-test")
_LONGEST = 300


@dataclasses.dataclass(frozen=True)
class Check:
    """How one thing was found.

    Attributes:
        group: of `GROUPS`.
        name: what was looked at.
        state: `not available` is no failure: paritas does without it, and `advice` says how.
        found: the version, the size, the answer, or what was raised.
        advice: what to do about it; empty if nothing has to be done.
    """

    group: str
    name: str
    state: State
    found: str
    advice: str = ""

    def to_line(self) -> str:
        """As one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Check:
        """Read what `to_line` wrote."""
        fields: dict[str, Any] = json.loads(line)
        return cls(**fields)


def looked_at(group: str, name: str, look: Callable[[], Check], advice: str) -> Check:
    """What `look` says; whatever it raises is a check that failed, and never ends the others."""
    try:
        return look()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (it becomes a failed check; SystemExit, too)
        text = " ".join(str(error).split())
        kind = type(error).__name__
        found = f"{kind}: {text}" if text else kind
        return Check(group, name, FAILED, found[:_LONGEST], advice)
