"""What a candidate does beside its result: files, libraries, frames, our code, what it leaves.

It shares its process with the code that observes it. Nothing can keep it from changing that code;
so everything by which it is observed is compared with what it was before the candidate was loaded.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import gc
import inspect
import operator
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.torch_private.watching import (
    close_modes,
    library_kernels,
    loaded_operators,
    mode_depths,
    module_hooks,
    put_back_operators,
    replaced_kernels,
    restore_module_hooks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Functions that hand the memory of a tensor to code that no dispatch mode sees.
_ESCAPES = {"data_ptr", "numpy", "__array__", "__dlpack__"}
_MOST_NAMES = 200
# Bound before a candidate can replace them.
_vars, _isinstance, _all, _map, _zip, _is = vars, isinstance, all, map, zip, operator.is_


class EscapeWatch(torch.overrides.TorchFunctionMode):
    """Records that a tensor's memory is handed to code outside torch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the function."""
        name = getattr(func, "__name__", "")
        if name in _ESCAPES:
            self.seen.add(f"Tensor.{name}")
        return func(*args, **(kwargs or {}))


class CodeWatch:
    """Which Python functions run, as (file, qualified name)."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def __enter__(self) -> None:
        self._before = sys.getprofile()
        sys.setprofile(self._note)

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)

    def _note(self, frame: Any, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            self.seen.add((code.co_filename, code.co_qualname))


# --- Files, processes, frames ---------------------------------------------------------------------


class Audit:
    """Files that are opened, and processes and connections that are started, from now on.

    An audit hook cannot be removed again, not even by a candidate.
    """

    def __init__(self) -> None:
        self.events: dict[tuple[str, str], None] = {}
        # The candidate's file, and whether it is being called.
        self.own_file, self.is_calling = "", False
        self._is_ours = threading.local()
        sys.addaudithook(self._note)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Record nothing in this block."""
        self._is_ours.on = True
        try:
            yield
        finally:
            self._is_ours.on = False

    def _note(self, event: str, args: Any) -> None:
        if event in _LOOKS:
            self._note_look(event, args)
            return
        kind = _AUDITED.get(event)
        if kind is None or getattr(self._is_ours, "on", False) or len(self.events) > _MOST_NAMES:
            return
        what = str(args[0]) if args else ""
        if event == "open":
            mode, flags = args[1], args[2]
            writes = any(letter in str(mode or "") for letter in "wax+") or bool(
                isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            kind = "writes" if writes else "reads"
            what = self._real_path(args[0], what)
        elif event == "os.remove" and args[1] != -1:  # relative to an open folder: `rmtree` does so
            with contextlib.suppress(OSError):
                what = os.path.join(os.readlink(f"/proc/self/fd/{args[1]}"), what)  # noqa: PTH115, PTH118
        elif event == "os.fork":
            if not self._is_by_candidate():
                return
            what = "a process, which may outlive the call"
        elif event == "sys.addaudithook":
            if self._is_by_library():
                return
            what = "an audit hook, which sees everything that runs later"
        if not isinstance(args[0] if args else "", int):
            self.events[kind, what] = None

    def _real_path(self, path: Any, text: str) -> str:
        """Where a path leads: `/proc/self/../1` and links to it are `/proc/1`."""
        if isinstance(path, int) or not (self.is_calling or "proc" in text):
            return text
        with self.aside(), contextlib.suppress(OSError, ValueError):
            return str(os.path.realpath(path))
        return text

    def _is_by_candidate(self) -> bool:
        """Whether the innermost code that is not Python's own is the candidate's."""
        with self.aside():
            frame = sys._getframe(2)  # noqa: SLF001
            while frame is not None and frame.f_code.co_filename.startswith(_PYTHONS_OWN):
                frame = frame.f_back  # type: ignore[assignment]
        return frame is not None and frame.f_code.co_filename == self.own_file

    def _is_by_library(self) -> bool:
        """Whether another module's code does it: `filelock`, which compilers import, adds a hook.

        A module beside the candidate, or in its temporary folder, is the candidate's.
        """
        with self.aside():
            frame = sys._getframe(2)  # noqa: SLF001
            home = sys.modules.get(str(frame.f_globals.get("__name__")))
            file = frame.f_code.co_filename
            if home is None or vars(home) is not frame.f_globals or file == self.own_file:
                return False
            if getattr(home, "__file__", None) != file:
                return False
            own_folders = {os.path.dirname(self.own_file), os.environ.get("TMPDIR", "")} - {""}  # noqa: PTH120
            is_beside = any(file.startswith(folder + os.sep) for folder in own_folders)
        return not is_beside or any(part in file for part in _OF_PACKAGES)

    def _note_look(self, event: str, args: Any) -> None:
        """Whether the candidate's own code looks for what its caller holds.

        Libraries look at frames, too, such as those that log or inspect code.
        """
        if not self.is_calling or not self.own_file or getattr(self._is_ours, "on", False):
            return
        with self.aside():  # looking at a frame is such an event
            looker = sys._getframe(2).f_code.co_filename  # noqa: SLF001
            if event == "object.__getattr__" and args[1] != "tb_frame":
                return
            looked_at_file = (
                getattr(getattr(args[0], "f_code", None), "co_filename", "") if args else ""
            )
        is_helped = looker == _INSPECT and looked_at_file == self.own_file
        if looker == self.own_file or is_helped:
            self.events["looks at", "the frames or the objects of its caller"] = None

    def take(self) -> list[tuple[str, str]]:
        """The events since the last call."""
        events = list(self.events)
        self.events.clear()
        return events


# Ways to what the caller holds.
_LOOKS = {
    "sys._getframe",
    "sys._current_frames",
    "gc.get_objects",
    "gc.get_referrers",
    "gc.get_referents",
    "object.__getattr__",
}
_INSPECT = inspect.__file__
_PYTHONS_OWN = (os.path.dirname(os.__file__) + os.sep + "multiprocessing", os.__file__, "<frozen")  # noqa: PTH120
_AUDITED = {
    "open": "reads",
    "os.remove": "deletes",
    "os.rename": "renames",
    "subprocess.Popen": "starts",
    "os.system": "starts",
    "os.fork": "forks",
    "socket.connect": "connects to",
    "sys.addaudithook": "adds",
}


# --- Modules --------------------------------------------------------------------------------------


@contextlib.contextmanager
def our_modules_hidden() -> Iterator[None]:
    """Hide our modules in this block: a candidate that finds them knows that it is judged.

    Nothing in the block may import them.
    """
    hidden_modules = {name: sys.modules.pop(name) for name in _our_modules()}
    try:
        yield
    finally:
        for name in _our_modules():  # the candidate's own copies
            del sys.modules[name]
        sys.modules.update(hidden_modules)


def _our_modules() -> list[str]:
    # There are thousands of modules, and a call takes no longer than looking at them.
    modules = [name for name in sys.modules if name.startswith("paritas")]
    return [name for name in modules if name.partition(".")[0] == "paritas"]


# --- Libraries ------------------------------------------------------------------------------------

_OF_PACKAGES = ("/site-packages/", "/dist-packages/", "/lib-dynload/")
_OF_THE_SYSTEM = ("/usr/", "/lib", "/dev/")


def _foreign_libraries() -> set[str]:
    """Shared libraries in this process that belong neither to the system nor to a package.

    However a candidate loads code of its own, it is mapped into memory. What torch's compilers
    build is not counted: a lifted run does not use it.
    """
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[5] for line in lines if ".so" in line and " /" in line}
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "/torchinductor_"
    return {
        path.removesuffix(" (deleted)")
        for path in paths
        if not path.startswith((sys.prefix, sys.base_prefix, *_OF_THE_SYSTEM))
        and not any(part in path for part in (*_OF_PACKAGES, cache))
    }


# --- Our own code ---------------------------------------------------------------------------------


def _list_watched_names(space: Any) -> tuple[list[str], list[Any]]:
    """The functions and constants of a module or class; hooks for exceptions are for people."""
    watched_by_name = {
        name: value
        for name, value in vars(space).items()
        if (callable(value) or name.isupper()) and not name.endswith("hook")
    }
    return list(watched_by_name), list(watched_by_name.values())


_code_of: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(
    "__code__", "__defaults__", "__kwdefaults__"
)
_FIRST_CALLS, _SHARE = 4, 1 / 16


class OwnCode:
    """The functions, classes and constants by which candidates are observed and timed.

    `ProcessState` watches which functions torch has. A candidate that replaces one of these, its
    code, or what a constant contains would write its own record.
    """

    def __init__(self) -> None:
        """Take note of them before a candidate is loaded."""
        modules = [m for name, m in sys.modules.items() if name.partition(".")[0] == "paritas"]
        classes = [
            class_object
            for module in modules
            for class_object in vars(module).values()
            if isinstance(class_object, type) and class_object.__module__ == module.__name__
        ]
        used: list[Any] = [
            builtins,
            sys,
            time,
            os,
            gc,
            threading,
            socket,
            struct,
            random,
            contextlib,
            inspect,
        ]
        used += [msgspec, msgspec.msgpack, torch.accelerator, torch.cuda]
        used += [torch.Event, torch.Stream, torch.cuda.Event, torch.cuda.Stream]
        spaces = [*modules, *dict.fromkeys(classes), *used]
        self._known = [(space, *_list_watched_names(space)) for space in spaces]
        self._contents: list[tuple[Any, str, Any, Any]] = [
            (module, name, value, value.copy())
            for module in modules
            for name, value in vars(module).items()
            if isinstance(value, set | dict | list)
            and name.isupper()
            and module.__name__.startswith("paritas.kernels.")  # elsewhere, some are caches
        ]
        also = [torch, torch.Tensor, torch.nn.Module, torch.nn.functional]
        functions = {
            function: _code_of(function)
            for space in (*spaces, *also)
            for function in vars(space).values()
            if isinstance(function, types.FunctionType)
        }
        self._functions, self._codes = list(functions), list(functions.values())
        self._operators = loaded_operators()
        self._chance, self._calls = random.Random(), 0
        self._libraries = _foreign_libraries()

    def new_libraries(self) -> list[str]:
        """The names of the libraries that the candidate has loaded."""
        return sorted({Path(path).name for path in _foreign_libraries() - self._libraries})

    def put_back(self) -> dict[str, str]:
        """Restore what was replaced; returns name -> `replaced`."""
        changed: dict[str, str] = {}
        for space, names, values in self._known:
            now = _vars(space)
            if _all(_map(_is, values, _map(now.get, names))):
                continue
            for name, value in _zip(names, values):
                if now.get(name) is not value:
                    setattr(space, name, value)
                    changed[f"{getattr(space, '__name__', space)}.{name}"] = "replaced"
        for module, name, value, content in self._contents:
            if value != content:
                value.clear()
                (value.extend if _isinstance(value, list) else value.update)(content)
                changed[f"{module.__name__}.{name}"] = "changed"
        # Reading a function's code is an event of its own, which takes time: not after each call.
        self._calls += 1
        if self._calls <= _FIRST_CALLS or self._chance.random() < _SHARE:
            for function, code in _zip(self._functions, self._codes):
                if _code_of(function) != code:
                    function.__code__, function.__defaults__, function.__kwdefaults__ = code
                    changed[f"{function.__module__}.{function.__qualname__}"] = "rewritten"
            changed |= put_back_operators(self._operators)
        return changed


# --- What a call leaves behind --------------------------------------------------------------------

# A kernel may return at once and let its work be done by a timer, a hook or a mode that it leaves
# behind; or change what other programs compute. Settings and functions of torch are not listed
# here: `ProcessState` compares them.

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
_read: dict[str, Callable[[], Any]] = {
    "sys.getprofile()": sys.getprofile,
    "sys.gettrace()": sys.gettrace,
    "threading.getprofile()": threading.getprofile,
    "threading.gettrace()": threading.gettrace,
    "gc.isenabled()": gc.isenabled,
    "sys.getswitchinterval()": sys.getswitchinterval,
}
_write: dict[str, Callable[[Any], Any]] = {
    "sys.getprofile()": sys.setprofile,
    "sys.gettrace()": sys.settrace,
    "threading.getprofile()": threading.setprofile,
    "threading.gettrace()": threading.settrace,
    "gc.isenabled()": lambda is_on: gc.enable() if is_on else gc.disable(),
    "sys.getswitchinterval()": sys.setswitchinterval,
}
if hasattr(os, "sched_getaffinity"):  # Linux
    _read["os.sched_getaffinity()"] = functools.partial(os.sched_getaffinity, 0)
    _write["os.sched_getaffinity()"] = functools.partial(os.sched_setaffinity, 0)
_priority = functools.partial(os.getpriority, os.PRIO_PROCESS, 0)
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
        self._kernels = library_kernels()
        self._flushes, self._inference = _flushes(), _is_inference()
        self._priority = _priority()

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
            if _read[name]() != function:
                _write[name](function)
                changed[name] = "changed"
        if list(gc.callbacks) != self._callbacks:
            gc.callbacks[:] = self._callbacks
            changed["gc.callbacks"] = "changed"
        if gc.get_threshold() != self._thresholds:
            gc.set_threshold(*self._thresholds)
            changed["gc.get_threshold()"] = "changed"
        if _priority() != self._priority:  # only a superuser may raise it again
            changed["os.getpriority()"] = "changed"
        if not _rounds_to_nearest():
            ctypes.CDLL(None).fesetround(_TO_NEAREST)
            changed["the rounding of floating-point numbers"] = "changed"
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
        for name in replaced_kernels(self._kernels):
            changed[f"the kernel aten::{name}"] = "replaced"
        if _flushes() != self._flushes:
            _set_flush(self._flushes)
            changed["torch.set_flush_denormal"] = "changed"
        return changed


def _flushes() -> bool:
    """Whether denormal numbers are taken for zeros."""
    return not (torch.full((1,), _DENORMAL) * 1.0).item()


_ONE, _LITTLE = 1.0, 2.0**-60
_TO_NEAREST = 0  # FE_TONEAREST of x86-64 and AArch64


def _rounds_to_nearest() -> bool:
    return _ONE + _LITTLE == _ONE == _ONE - _LITTLE


def _signal_of(timer: int) -> int:
    return int(_SIGNALS[_TIMERS.index(timer)])
