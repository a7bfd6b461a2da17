"""Runs of ours without torch's logs and Python's warnings: a note or a finding comes of them.

A program is run again in float64, perturbed, in parts; where it cannot be, torch says so at length,
in the user's terminal. What the user's own runs log and warn of, in whatever thread, stays.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["quietly"]

_TORCH = "torch"
# A file that the user asked for by TORCH_TRACE; it is no terminal.
_TRACE = "torch.__trace"

_ours = contextvars.ContextVar("paritas_run_of_ours", default=False)


class _OfOurs(logging.Filter):
    """Lets through what torch does not log on our behalf."""

    def filter(self, record: logging.LogRecord) -> bool:
        is_torchs = record.name == _TORCH or record.name.startswith(f"{_TORCH}.")
        return not (is_torchs and _ours.get())


class _DuringOurs(type):
    def __subclasscheck__(cls, subclass: type) -> bool:
        return _ours.get()


class _WarningOfOurs(Warning, metaclass=_DuringOurs):
    """In a filter, any warning that comes of a run of ours, and none of other runs."""


_FILTER = _OfOurs()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep what torch logs, and what anything warns of, from the user; in this thread alone."""
    if _ours.get():
        yield
        return
    _listen()
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)


def _listen() -> None:
    """Put our filters where logs and warnings pass; they stay, and let all others through.

    Taken out again, they would not be there for another thread; and everything that was warned of
    once would be warned of again.
    """
    for handler in _handlers():
        if _FILTER not in handler.filters:
            handler.addFilter(_FILTER)
    # Others may have been put before it since.
    if not warnings.filters or warnings.filters[0][2] is not _WarningOfOurs:
        warnings.simplefilter("ignore", _WarningOfOurs)


def _handlers() -> Iterator[logging.Handler]:
    """Wherever a record of torch's may arrive."""
    yield from logging.root.handlers
    for logger in _loggers(len(logging.root.manager.loggerDict)):
        yield from logger.handlers


@functools.lru_cache(maxsize=1)
def _loggers(_known: int) -> list[logging.Logger]:
    """All of torch's, looked for anew when there are more loggers than before."""
    return [
        logger
        for name, logger in list(logging.root.manager.loggerDict.items())
        if name.startswith(_TORCH) and name != _TRACE and isinstance(logger, logging.Logger)
    ]
