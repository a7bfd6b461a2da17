"""A Python script as the main program of this process: run it, and say how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.machinery
import importlib.util
import os
import runpy
import signal
import sys
import threading
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from paritas.core.commands.options import INTERRUPTED
from paritas.core.errors import UsageError, in_one_line
from paritas.core.time_limit import TimeLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType


TERMINATED = 128 + signal.SIGTERM
_OUR_FRAMES = {__file__, runpy.__file__, "<frozen runpy>"}
_LONGEST_TEXT = 160
_WORK_SECONDS = 60.0
_POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class ScriptProgram:
    """The program of `paritas run [-m] target args...`."""

    target: str
    is_module: bool
    args: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a program ended.

    Attributes:
        code: the exit code of python.
        words: what happened, or "" if it finished normally.
        by_signal: whether a signal stopped it.
        is_replaced: whether another program continues in its process.
    """

    code: int = 0
    words: str = ""
    by_signal: bool = False
    is_replaced: bool = False


class _Terminated(BaseException):
    """SIGTERM, raised in the program like Ctrl-C: torchrun and batch systems send it."""


def check_program(program: ScriptProgram) -> None:
    """Raise `UsageError` unless the program can be run."""
    target = program.target
    if program.is_module:
        _check_module(target)
        return
    path = Path(target)
    if path.is_dir() and (path / "__main__.py").is_file():
        return
    if path.is_dir():
        raise UsageError(f"SCRIPT {target!r} is a directory without a __main__.py; give a file")
    if not path.exists():
        raise UsageError(f"SCRIPT {target!r} does not exist{_hint(path)}")


def run_program(program: ScriptProgram) -> Ending:
    """Run it as the main program of a process that continues afterwards.

    This waits for threads that are still working, but not forever: some threads stop only when the
    process ends.
    """
    there = frozenset(threading.enumerate())
    with StopSignals():
        return _ending_with(program, lambda: _wait_for_work(there))


def run_last_program(program: ScriptProgram, signals: StopSignals) -> Ending:
    """Run it as the last program of this process, up to the point where python calls `atexit`."""
    try:
        ending = _ending_with(program, _end_threads)
    finally:
        signals.only_hurry()
    if ending.code == TERMINATED:
        _leave_threads()  # SIGTERM ends python without waiting for them
    return ending


def _ending_with(program: ScriptProgram, wait: Callable[[], None]) -> Ending:
    """Run a program, then wait for its threads."""
    with _as_main_program(program):
        ending = _ending_of(lambda: _run(program))
        if ending.by_signal:
            return ending
        waited = _ending_of(wait)
        return ending if ending.words else waited


def _run(program: ScriptProgram) -> None:
    if program.is_module:
        runpy.run_module(program.target, run_name="__main__", alter_sys=True)
    elif Path(program.target).is_dir():
        runpy.run_path(program.target, run_name="__main__")
    else:
        _run_file(Path(program.target).absolute())


def _ending_of(run: Callable[[], None]) -> Ending:
    try:
        run()
    except SystemExit as error:
        return ending_of_exit(error.code)
    except KeyboardInterrupt:
        return Ending(INTERRUPTED, "was interrupted by Ctrl-C", by_signal=True)
    except _Terminated:
        return Ending(TERMINATED, "was terminated by SIGTERM", by_signal=True)
    except BaseException as error:  # noqa: BLE001  (any exception ends the program)
        _show(error)
        return Ending(1, f"ended with {in_one_line(error, _LONGEST_TEXT)}")
    return Ending()


def _run_file(path: Path) -> None:
    """Run a file like python, which keeps `sys.argv[0]` as typed; `runpy.run_path` does not."""
    loader = importlib.machinery.SourceFileLoader("__main__", str(path))
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    vars(main).update(__file__=str(path), __loader__=loader, __cached__=None)
    sys.modules["__main__"] = main
    exec(code, vars(main))  # noqa: S102  (running it is the purpose)


class StopSignals:
    """Handlers of Ctrl-C and SIGTERM: they stop the program; afterwards they hurry its report.

    At no moment in between would a signal end the process and lose the report. Signals that are
    ignored from the start (`nohup`, a background job) stay ignored.
    """

    def __init__(self) -> None:
        self.hurried = threading.Event()
        self._process = os.getpid()
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Turn SIGTERM into an exception, unless it has a handler; Ctrl-C already raises one."""
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._handle(signal.SIGTERM, self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers."""
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def only_hurry(self) -> None:
        """From now on signals only set `hurried`."""
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handle(number, lambda *_: self.hurried.set())

    def ignore_termination(self) -> None:
        """Ignore SIGTERM for the rest of the process, which keeps its own exit code."""
        self._handle(signal.SIGTERM, signal.SIG_IGN)
        self._former.pop(signal.SIGTERM, None)

    def _handle(self, number: signal.Signals, handler: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # required by `signal`
            self._former.setdefault(number, signal.signal(number, handler))

    def _raise(self, number: int, _: Any) -> None:
        if os.getpid() == self._process:
            raise _Terminated
        # In a process that the program forked: the default, which ends that process.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _check_module(name: str) -> None:
    if name.endswith(".py"):
        raise UsageError(f"-m {name!r} is a file; drop -m, or give the module's dotted name")
    path = list(sys.path)
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except Exception as error:  # importing the parent packages may raise anything
        raised = in_one_line(error, _LONGEST_TEXT)
        raise UsageError(f"-m {name!r} cannot be run: {raised}") from error
    finally:
        sys.path[:] = path
    if spec is None:
        raise UsageError(f"-m {name!r}: no such module, or it has no __main__")


def _hint(path: Path) -> str:
    name = path.name
    if name == "torchrun":
        return "; start paritas by torchrun: torchrun ... --no-python paritas run script.py"
    if name.startswith("python"):
        return "; drop the interpreter: paritas run script.py"
    if path.suffix != ".py" and path.parent == Path() and "." in name:
        return f"; for a module, use paritas run -m {name}"
    beside = path.parent if path.parent.is_dir() else Path()
    near = difflib.get_close_matches(
        name, [script_path.name for script_path in beside.glob("*.py")], n=1
    )
    return f"; did you mean {str(beside / near[0])!r}?" if near else ""


@contextlib.contextmanager
def _as_main_program(program: ScriptProgram) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as python would for the program."""
    argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    sys.argv = [program.target, *program.args]
    if not sys.flags.safe_path:
        folder = Path() if program.is_module else Path(program.target).resolve()
        folder = folder if folder.is_dir() else folder.parent
        # The first entry is the folder of the program that python started, paritas.
        sys.path[:1] = [str(folder.absolute())]
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = path
        sys.modules["__main__"] = main


def _end_threads() -> None:
    """Do what python does first at the end of a program: close pools and join threads.

    Python does not do it a second time, and stops waiting after Ctrl-C or a failure.
    """
    # Imported now: during the report it would be too late to register their shutdown functions.
    import concurrent.futures.process
    import concurrent.futures.thread  # noqa: F401

    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    except Exception as error:  # noqa: BLE001  (shown and ignored, as python does)
        _leave_threads()
        _show(error)
    except BaseException:
        _leave_threads()
        raise


def _leave_threads() -> None:
    """Make python exit without waiting for threads."""
    threading._shutdown = lambda: None  # type: ignore[attr-defined]  # noqa: SLF001


def _wait_for_work(there: frozenset[threading.Thread]) -> None:
    """Wait for new threads that are working, up to a limit."""
    limit = TimeLimit(_WORK_SECONDS)
    while working := [thread for thread in threading.enumerate() if _is_at_work(thread, there)]:
        working[0].join(_POLL_SECONDS)
        if limit.is_over:
            names = ", ".join(thread.name for thread in working)
            click.echo(
                f"stopped waiting for threads that the script left running: {names}", err=True
            )
            return


def _is_at_work(thread: threading.Thread, there: frozenset[threading.Thread]) -> bool:
    if thread in there or thread.daemon or not thread.is_alive():
        return False
    from concurrent.futures import thread as pools

    # A pool ends its idle threads when it is closed, at the end of the process.
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001
    idle_worker = frame is not None and frame.f_code is pools._worker.__code__  # noqa: SLF001
    idle_manager = getattr(thread, "pending_work_items", None) == {}  # of a pool of processes
    return not idle_worker and not idle_manager


def ending_of_exit(code: Any) -> Ending:
    """The ending that `sys.exit(code)` stands for."""
    if code is None or code == 0:
        return Ending()
    if isinstance(code, int):
        return Ending(code & 0xFF, f"exited with {code}")
    _say(code)
    return Ending(1, f"exited with {str(code)[:_LONGEST_TEXT]!r}")


def _show(error: BaseException) -> None:
    """Print the traceback as python does, without the frames that started the program."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _OUR_FRAMES:
        frames = frames.tb_next
    error.__traceback__ = frames
    try:
        sys.excepthook(type(error), error, frames)
    except BaseException as another:  # noqa: BLE001  (shown, as python does)
        another.__context__ = None
        another.__traceback__ = another.__traceback__ and another.__traceback__.tb_next
        for title, exception in (
            ("Error in sys.excepthook", another),
            ("\nOriginal exception was", error),
        ):
            _say(f"{title}:")
            sys.__excepthook__(type(exception), exception, exception.__traceback__)


def _say(text: Any) -> None:
    """Print to stderr, which the program may have closed."""
    with contextlib.suppress(OSError, ValueError):
        click.echo(text, err=True)
