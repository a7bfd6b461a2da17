"""Everything paritas raises on purpose.

::

    ParitasError                 catch this to catch all of them
    ├── UsageError             also ValueError: what was asked for makes no sense
    ├── MismatchError          also AssertionError, RuntimeError, ValueError: the candidate failed
    └── UnsupportedTorchError  also RuntimeError: this torch does not answer as it should
    ParityWarning                also UserWarning: told, not raised, because that was asked for

A message shows the offending value and ends with what to do next. A failure inside the user's own
program is no error of this tree: it becomes a finding, or passes through as it was raised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


class ParitasError(Exception):
    """The root of the tree."""


class UsageError(ParitasError, ValueError):
    """The input is wrong: an argument, an option, a configuration key, a file.

    The message shows the value that arrived and says what to give instead.
    """


class MismatchError(ParitasError, AssertionError, RuntimeError, ValueError):
    """The candidate does not compute what the reference computes, or that could not be told.

    It is an ``AssertionError`` so that test runners show it as a failed check, and a
    ``RuntimeError`` and a ``ValueError`` because that is what callers of such checks have always
    caught: Dynamo raises the one, tt-forge the other.

    Attributes:
        verdict: The ``Verdict`` behind the message: every finding, and the coverage.
    """

    # A Verdict lives in paritas.numerics, and nothing is below this module: naming the type here,
    # even for a type checker alone, would make an import run upwards.
    verdict: Any

    def __init__(self, message: str, verdict: Any) -> None:
        super().__init__(message)
        self.verdict = verdict

    def __reduce__(self) -> tuple[type[MismatchError], tuple[str, Any], dict[str, Any]]:
        # An exception is rebuilt from `args`, which hold the message alone; process pools and
        # parallel test runners would otherwise fail on the way back. The last item carries notes.
        return type(self), (str(self), self.verdict), dict(self.__dict__)


class ParityWarning(UserWarning):
    """A mismatch, or something that could not be checked, which the caller asked to be told of."""


class UnsupportedTorchError(ParitasError, RuntimeError):
    """A private part of torch is missing or answers differently than paritas was written for.

    The message names the part and the version of torch. Nothing was verified: the way out is a
    version of torch, or of paritas, that knows the other.
    """


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The word that was probably meant: `did you mean 'strict'?`; else all that are known."""
    import difflib

    listed = list(known)
    near = difflib.get_close_matches(word, listed, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(listed) or 'none'}"


def in_one_line(
    error: BaseException, longest: int = 200, *, whole: bool = False, cut: str = ""
) -> str:
    """An exception's kind and text, `ValueError: too large`; the kind alone if it has no text.

    Args:
        error: what was raised.
        longest: how many characters of the text are shown.
        whole: show all its lines, joined, and not the first alone.
        cut: what follows where there was more text.
    """
    text = first_line(error, longest, whole=whole, cut=cut)
    kind = type(error).__name__
    return f"{kind}: {text}" if text else kind


def first_line(
    error: BaseException, longest: int = 200, *, whole: bool = False, cut: str = ""
) -> str:
    """The text of an exception without its kind, as `in_one_line` shows it."""
    lines = str(error).strip().splitlines() or [""]
    text = " ".join(str(error).split()) if whole else lines[0]
    return text[:longest] + cut if len(text) > longest else text
