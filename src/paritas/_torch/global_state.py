"""What torch has one of for the whole process, changed for a while: its logs, its stance.

Threads overlap: what the last one restores has to be what the first one found. `paritas doctor`
imports this before it looks at torch, so only public names of torch may be imported here.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import logging
import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# --- Logs and warnings ----------------------------------------------------------------------------

# A program is run again in float64, perturbed, in parts; where it cannot be, torch says so at
# length, in the user's terminal. What the user's own runs log and warn of, in whatever thread,
# stays.

_TORCH_LOGGER = "torch"
# A file that the user asked for by TORCH_TRACE; it is no terminal.
_TRACE_LOGGER = "torch.__trace"

_is_own_run = contextvars.ContextVar("paritas_run_of_ours", default=False)


class _OwnLogFilter(logging.Filter):
    """Lets through what torch does not log on our behalf."""

    def filter(self, record: logging.LogRecord) -> bool:
        is_torchs = record.name == _TORCH_LOGGER or record.name.startswith(f"{_TORCH_LOGGER}.")
        return not (is_torchs and _is_own_run.get())


class _DuringOwnRun(type):
    def __subclasscheck__(cls, subclass: type) -> bool:
        return _is_own_run.get()


class _OwnWarning(Warning, metaclass=_DuringOwnRun):
    """In a filter, any warning that comes of a run of ours, and none of other runs."""


_LOG_FILTER = _OwnLogFilter()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep what torch logs, and what anything warns of, from the user; in this thread alone."""
    if _is_own_run.get():
        yield
        return
    _install_filters()
    token = _is_own_run.set(True)
    try:
        yield
    finally:
        _is_own_run.reset(token)


def _install_filters() -> None:
    """Put our filters where logs and warnings pass; they stay, and let all others through.

    Taken out again, they would not be there for another thread; and everything that was warned of
    once would be warned of again.
    """
    for handler in _find_handlers():
        if _LOG_FILTER not in handler.filters:
            handler.addFilter(_LOG_FILTER)
    # Others may have been put before it since.
    if not warnings.filters or warnings.filters[0][2] is not _OwnWarning:
        warnings.simplefilter("ignore", _OwnWarning)


def _find_handlers() -> Iterator[logging.Handler]:
    """Wherever a record of torch's may arrive."""
    yield from logging.root.handlers
    for logger in _find_loggers(len(logging.root.manager.loggerDict)):
        yield from logger.handlers


@functools.lru_cache(maxsize=1)
def _find_loggers(_known: int) -> list[logging.Logger]:
    """All of torch's, looked for anew when there are more loggers than before."""
    return [
        logger
        for name, logger in list(logging.root.manager.loggerDict.items())
        if name.startswith(_TORCH_LOGGER)
        and name != _TRACE_LOGGER
        and isinstance(logger, logging.Logger)
    ]


# --- The compiler's stance ------------------------------------------------------------------------

# Torch has one for the whole process, and whoever leaves puts back what it found. Where two threads
# overlap, that may be what the other had taken, which would then stay for good: no program would be
# compiled any more.

if TYPE_CHECKING:
    ForcedBackend = Callable[..., Any] | str | None


@dataclasses.dataclass(frozen=True, eq=False)
class _TakenStance:
    """One that was taken, and torch's own switch that knows what was in force before the first."""

    name: str
    backend: ForcedBackend
    first: Any


# Those that were taken and not left yet, of all threads; the last is in force.
_taken_stances: list[_TakenStance] = []
_stances_lock = threading.Lock()


@contextlib.contextmanager
def taking_stance(name: str, *, backend: ForcedBackend = None) -> Iterator[None]:
    """`torch.compiler.set_stance`; when the last has left, all is as the first found it."""
    with _stances_lock:
        switch = torch.compiler.set_stance(name, force_backend=backend)
        mine = _TakenStance(name, backend, _taken_stances[0].first if _taken_stances else switch)
        _taken_stances.append(mine)
    try:
        yield
    finally:
        with _stances_lock:
            _taken_stances.remove(mine)
            if _taken_stances:
                torch.compiler.set_stance(
                    _taken_stances[-1].name, force_backend=_taken_stances[-1].backend
                )
            else:
                mine.first.__exit__(None, None, None)
