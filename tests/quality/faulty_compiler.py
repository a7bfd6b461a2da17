"""Plants faults of `shrink_faults` or `guard_faults` for good: a fresh process compiles wrongly.

A standalone script that shows a planted fault names it in its first lines.
"""

from __future__ import annotations

import contextlib

from quality.guard_faults import without_caches
from quality.shrink_faults import PLANTS

_STACK = contextlib.ExitStack()


def plant(*names: str) -> None:
    """From now on, until the process ends."""
    _STACK.enter_context(without_caches())
    for name in names:
        _STACK.enter_context(PLANTS[name]())


def setup(*names: str) -> tuple[str, ...]:
    """The statements that plant faults in another process."""
    listed = ", ".join(map(repr, names))
    return ("from quality.faulty_compiler import plant", f"plant({listed})")
