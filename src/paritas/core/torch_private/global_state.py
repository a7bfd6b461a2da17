"""Temporary changes of process-wide state of torch: its logs and its stance.

Threads overlap: the last one must restore what the first one found. `paritas doctor` imports this
before it checks torch, so only public names of torch may be imported here.
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

from paritas.core.torch_private.arrival import asking_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# --- Logs and warnings ----------------------------------------------------------------------------

# Programs are run again in float64, perturbed, or in parts. If that fails, torch prints long
# messages to the user's terminal; so do the packages that its ONNX exporter calls. The logs and
# warnings of the user's own runs stay, in any thread.

_PACKAGES = {"torch", "onnxscript", "onnx_ir"}
# A file that the user requested with TORCH_TRACE, not the terminal.
_TRACE_LOGGER = "torch.__trace"

_is_own_run = contextvars.ContextVar("paritas_run_of_ours", default=False)


class _OwnLogFilter(logging.Filter):
    """Drops what torch and its exporter log during our own runs."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (_package(record.name) in _PACKAGES and _is_own_run.get())


def _package(logger: str) -> str:
    return logger.partition(".")[0]


class _DuringOwnRun(type):
    def __subclasscheck__(cls, subclass: type) -> bool:
        return _is_own_run.get()


class _OwnWarning(Warning, metaclass=_DuringOwnRun):
    """In a filter, matches any warning during our own runs, and no others."""


_LOG_FILTER = _OwnLogFilter()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Hide the logs of torch and of its exporter, and all warnings, in this thread."""
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
    """Install our filters for logs and warnings permanently; they let everything else through.

    If they were removed, other threads would lose them, and warnings shown once would be shown
    again.
    """
    for handler in _find_handlers():
        if _LOG_FILTER not in handler.filters:
            handler.addFilter(_LOG_FILTER)
    # Other filters may have been inserted before it.
    if not warnings.filters or warnings.filters[0][2] is not _OwnWarning:
        warnings.simplefilter("ignore", _OwnWarning)


def _find_handlers() -> list[logging.Handler]:
    """All handlers that may get a record of these packages."""
    loggers = _find_loggers(len(logging.root.manager.loggerDict))
    # It prints warnings of loggers for which nobody has installed a handler.
    last = [] if logging.lastResort is None else [logging.lastResort]
    return [
        *last,
        *logging.root.handlers,
        *(handler for logger in loggers for handler in logger.handlers),
    ]


@functools.lru_cache(maxsize=1)
def _find_loggers(_known: int) -> list[logging.Logger]:
    """The loggers of these packages, searched again when there are more loggers than before."""
    return [
        logger
        for name, logger in list(logging.root.manager.loggerDict.items())
        if _package(name) in _PACKAGES
        and name != _TRACE_LOGGER
        and isinstance(logger, logging.Logger)
    ]


# --- The compiler's stance ------------------------------------------------------------------------

# Torch has one stance per process, and each context restores what it found. If two threads overlap,
# that may be the stance of the other one, which would then stay: nothing would be compiled again.

if TYPE_CHECKING:
    ForcedBackend = Callable[..., Any] | str | None


@dataclasses.dataclass(frozen=True, eq=False)
class _TakenStance:
    """An active stance, and torch's own context that knows the stance before the first."""

    name: str
    backend: ForcedBackend
    first: Any


# The active stances of all threads; the last one applies.
_taken_stances: list[_TakenStance] = []
_stances_lock = threading.Lock()


# A check of one thread runs beside the calls of others, which must run what they would run.
_runs_eagerly = contextvars.ContextVar("paritas_runs_eagerly", default=False)


@contextlib.contextmanager
def running_eagerly() -> Iterator[None]:
    """Run everything that is compiled eagerly, in this thread alone."""

    def stay_eager(callback: Any, ask: Callable[[Any], Any]) -> Any:
        return None if _runs_eagerly.get() else ask(callback)

    token = _runs_eagerly.set(True)
    try:
        with asking_first(stay_eager):
            yield
    finally:
        _runs_eagerly.reset(token)


@contextlib.contextmanager
def taking_stance(name: str, *, backend: ForcedBackend = None) -> Iterator[None]:
    """`torch.compiler.set_stance`; the last to leave restores what the first found."""
    token = _runs_eagerly.set(False)
    with _stances_lock:
        switch = torch.compiler.set_stance(name, force_backend=backend)
        taken_stance = _TakenStance(
            name, backend, _taken_stances[0].first if _taken_stances else switch
        )
        _taken_stances.append(taken_stance)
    try:
        yield
    finally:
        _runs_eagerly.reset(token)
        with _stances_lock:
            _taken_stances.remove(taken_stance)
            if _taken_stances:
                torch.compiler.set_stance(
                    _taken_stances[-1].name, force_backend=_taken_stances[-1].backend
                )
            else:
                taken_stance.first.__exit__(None, None, None)
