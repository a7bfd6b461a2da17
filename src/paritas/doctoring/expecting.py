"""How a probe says that torch did not answer as expected."""

from __future__ import annotations

from typing import Any

__all__ = ["UnexpectedAnswerError", "expect"]


class UnexpectedAnswerError(AssertionError):
    """Torch answered, but not what paritas was written for."""


def expect(what: str, found: Any, wanted: Any = True) -> None:  # noqa: FBT002  (an answer)
    """Raise, showing the answer, unless it is the one that is wanted."""
    if found != wanted:
        raise UnexpectedAnswerError(f"{what}: {found!r:.120}, expected {wanted!r:.120}")
