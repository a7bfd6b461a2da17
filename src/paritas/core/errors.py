"""Everything paritas raises on purpose.

::

    ParitasError                 catch this to catch all of them
    ├── UsageError             also ValueError: an argument, an option or a file is wrong
    ├── MismatchError          also AssertionError, RuntimeError, ValueError: the candidate failed
    ├── ClusterLostError       also ConnectionError: the cluster that did the work is gone
    └── UnsupportedTorchError  also RuntimeError: this torch does not behave as expected
    ParityWarning                also UserWarning: a mismatch that the caller asked to only warn of

A message shows the offending value and ends with what to do next. A failure in the user's own
program is not part of this tree: it becomes a finding, or passes through unchanged.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class ParitasError(Exception):
    """The base class of all errors of paritas."""


class UsageError(ParitasError, ValueError):
    """An argument, option, setting or file is wrong; the message shows it and what to do."""


class MismatchError(ParitasError, AssertionError, RuntimeError, ValueError):
    """The candidate does not compute what the reference computes, or nothing could be compared.

    It is an ``AssertionError`` because test runners show that as a failed check, and a
    ``RuntimeError`` and a ``ValueError`` because existing callers catch those: Dynamo raises the
    first, tt-forge the second.

    Attributes:
        verdict: The ``Verdict`` behind the message: every finding, and the coverage.
    """

    # Not typed as Verdict: that class is defined in a layer above this one.
    verdict: Any

    def __init__(self, message: str, verdict: Any) -> None:
        super().__init__(message)
        self.verdict = verdict

    def __reduce__(self) -> tuple[type[MismatchError], tuple[str, Any], dict[str, Any]]:
        # By default only `args`, the message, is pickled, and unpickling in a process pool or a
        # parallel test runner would fail. The last item carries notes.
        return type(self), (str(self), self.verdict), dict(self.__dict__)


class ClusterLostError(ParitasError, ConnectionError):
    """The scheduler or all workers of a cluster are gone; nothing more was verified."""


class ParityWarning(UserWarning):
    """A mismatch, or something unverified, that the caller asked to only warn of."""


class UnsupportedTorchError(ParitasError, RuntimeError):
    """A private API of torch is missing or behaves differently than paritas expects.

    The message names the API and the version of torch. Nothing was verified: use versions of torch
    and paritas that work together.
    """


def did_you_mean(word: str, known_words: Iterable[str]) -> str:
    """Suggest the closest known word, `did you mean 'strict'?`, or else list all known words."""
    import difflib

    listed = list(known_words)
    near = difflib.get_close_matches(word, listed, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(listed) or 'none'}"


def in_one_line(
    error: BaseException, longest: int = 200, *, whole: bool = False, cut: str = ""
) -> str:
    """The type and text of an exception: `ValueError: too large`.

    Args:
        error: what was raised.
        longest: the maximum length of the text.
        whole: join all lines of the text; by default only the first is shown.
        cut: appended to a text that was cut.
    """
    text = first_line(error, longest, whole=whole, cut=cut)
    kind = type(error).__name__
    return f"{kind}: {text}" if text else kind


# A program may raise its errors in a circle: each the cause of the other.
_MOST_CAUSES = 100


def chain_of_causes(
    error: BaseException,
    cause_of: Callable[[BaseException], BaseException | None] = lambda error: error.__cause__,
) -> list[BaseException]:
    """An exception, what caused it, what caused that, and so on; each one once."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and len(chain) < _MOST_CAUSES:
        if any(following is earlier_error for earlier_error in chain):
            break
        chain.append(following)
        following = cause_of(following)
    return chain


def first_line(
    error: BaseException, longest: int = 200, *, whole: bool = False, cut: str = ""
) -> str:
    """The text of an exception without its type, as `in_one_line` shows it."""
    lines = str(error).strip().splitlines() or [""]
    text = " ".join(str(error).split()) if whole else lines[0]
    return text[:longest] + cut if len(text) > longest else text


# Characters that are invalid in XML or control a terminal.
_UNPRINTABLE = re.compile(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def plain(text: str) -> str:
    """Escape characters that would break a document, or control the terminal that shows them."""
    return _UNPRINTABLE.sub(lambda match: f"\\x{ord(match.group()):02x}", text.replace("\r", ""))
