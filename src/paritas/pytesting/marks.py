"""`@pytest.mark.parity(...)`: settings of a test, its class or its module; the inner one wins."""

from __future__ import annotations

import dataclasses
import difflib
from typing import TYPE_CHECKING, Any

from paritas.checking.config import VerifyConfig
from paritas.checking.guarding.settings import GuardSettings
from paritas.errors import UsageError

if TYPE_CHECKING:
    import pytest

__all__ = ["GUARD_NAMES", "VERIFY_NAMES", "settings_of"]

VERIFY_NAMES = frozenset(field.name for field in dataclasses.fields(VerifyConfig))
# Not read off `paritas.guard` itself, which imports all of the compiler.
_GUARD_FIELDS = frozenset(field.name for field in dataclasses.fields(GuardSettings)) - {"seed"}
GUARD_NAMES = _GUARD_FIELDS | {"enabled", "options"}


def settings_of(item: pytest.Item) -> dict[str, Any]:
    """What the marks of a test say, for `verify` and `guard` together.

    Raises:
        UsageError: a name is unknown, a value is not what it takes, or comes without its name.
    """
    settings: dict[str, Any] = {}
    marks = list(item.iter_markers("parity"))  # the nearest first
    for mark in reversed(marks):
        if mark.args:
            raise UsageError(
                f"@pytest.mark.parity of {item.nodeid} has {mark.args[0]!r:.80} without a name; "
                "write name=value, such as strict=True"
            )
        settings |= mark.kwargs
    check_names(settings, f"@pytest.mark.parity of {item.nodeid}")
    # Made and thrown away: a wrong value is told before the test runs.
    VerifyConfig(**{name: value for name, value in settings.items() if name in VERIFY_NAMES})
    GuardSettings(**{name: value for name, value in settings.items() if name in _GUARD_FIELDS})
    return settings


def check_names(settings: dict[str, Any], place: str) -> None:
    """Refuse a name that neither `verify` nor `guard` knows, and tell its nearest."""
    known = sorted(VERIFY_NAMES | GUARD_NAMES)
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise UsageError(f"{place}: unknown setting {name!r}; {hint}")
