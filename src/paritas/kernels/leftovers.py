"""What a call leaves behind in its process that runs later, or with everything else.

A kernel may return at once and let its work be done by a timer, a hook or a mode that it leaves
behind; or change what other programs compute. Settings and functions of torch are not listed here:
`ProcessState` compares them.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.watching import (
    close_modes,
    mode_depths,
    module_hooks,
    replaced_kernels,
    restore_module_hooks,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
_TIMERS = tuple(
    getattr(signal, name)
    for name in ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")
    if hasattr(signal, name)
)
# The smallest product of float32 that is not zero, unless denormal numbers are flushed.
_DENORMAL = 2.0**-140

# Bound before a candidate can replace them.
_read = {
    "sys.getprofile()": sys.getprofile,
    "sys.gettrace()": sys.gettrace,
    "threading.getprofile()": threading.getprofile,
    "threading.gettrace()": threading.gettrace,
}
_write: dict[str, Callable[[Any], Any]] = {
    "sys.getprofile()": sys.setprofile,
    "sys.gettrace()": sys.settrace,
    "threading.getprofile()": threading.setprofile,
    "threading.gettrace()": threading.settrace,
}
_handler, _set_handler = signal.getsignal, signal.signal
_set_timer, _timer = signal.setitimer, signal.getitimer
_is_inference = torch.is_inference_mode_enabled
_set_flush = torch.set_flush_denormal


class Leftovers:
    """What is there before a call."""

    def __init__(self) -> None:
        self._functions = {name: read() for name, read in _read.items()}
        self._handlers = {number: _handler(number) for number in _SIGNALS}
        self._callbacks, self._thresholds = list(gc.callbacks), gc.get_threshold()
        self._modes = mode_depths()
        self._hooks = module_hooks()
        self._kernels = replaced_kernels()
        self._flushes, self._inference = _flushes(), _is_inference()

    def put_back(self) -> dict[str, str]:
        """Restore it, where possible; returns name -> what happened."""
        changed: dict[str, str] = {}
        for number in _TIMERS:
            if _timer(number)[0]:
                _set_timer(number, 0)
                changed[f"{signal.Signals(_signal_of(number)).name} timer"] = "left running"
        for number, handler in self._handlers.items():
            if _handler(number) != handler:
                _set_handler(number, handler)
                changed[f"the handler of {signal.Signals(number).name}"] = "changed"
        for name, function in self._functions.items():
            if _read[name]() is not function:
                _write[name](function)
                changed[name] = "changed"
        if list(gc.callbacks) != self._callbacks:
            gc.callbacks[:] = self._callbacks
            changed["gc.callbacks"] = "changed"
        if gc.get_threshold() != self._thresholds:
            gc.set_threshold(*self._thresholds)
            changed["gc.get_threshold()"] = "changed"
        return changed | self._put_back_torch()

    def _put_back_torch(self) -> dict[str, str]:
        changed: dict[str, str] = {}
        if mode_depths() != self._modes:
            close_modes(self._modes)
            changed["a mode of torch's dispatcher"] = "left on"
        if _is_inference() != self._inference:
            changed["torch.inference_mode()"] = "left on"
        if module_hooks() != self._hooks:
            restore_module_hooks(self._hooks)
            changed["hooks of all modules"] = "changed"
        for name in sorted(replaced_kernels() - self._kernels):
            changed[f"the kernel aten::{name}"] = "replaced"
        if _flushes() != self._flushes:
            _set_flush(self._flushes)
            changed["torch.set_flush_denormal"] = "changed"
        return changed


def _flushes() -> bool:
    """Whether denormal numbers are taken for zeros."""
    return not (torch.full((1,), _DENORMAL) * 1.0).item()


def _signal_of(timer: int) -> int:
    return int(_SIGNALS[_TIMERS.index(timer)])
