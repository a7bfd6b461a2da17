"""Scripts that end or replace their process without a farewell, or close its streams."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas.core.commands.scripts import Ending, ending_of_exit
from paritas.guarding import supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import TextIO


# --- os._exit and os.exec -------------------------------------------------------------------------


@contextlib.contextmanager
def exits_reported(report: Callable[[Ending], int]) -> Iterator[None]:
    """Report before `os._exit` and `os.exec*`, which skip all handlers, and use its exit code."""
    end, execv, execve = os._exit, os.execv, os.execve
    process = os.getpid()

    def report_and_exit(status: int) -> Any:
        status = operator.index(status)
        if os.getpid() == process:  # not in a process that the program forked
            status = report(ending_of_exit(status))
        end(status)

    def report_and_execve(path: Any, argv: Any, env: Mapping[Any, Any]) -> Any:
        if os.getpid() == process and argv and _is_executable(path):
            name = path if isinstance(path, int) else os.fsdecode(path)
            words = f"replaced itself with {name!r}, which is not checked"
            code = report(Ending(words=words, is_replaced=True))
            if isinstance(path, int):  # an open file
                os.set_inheritable(path, True)
                path = f"/dev/fd/{path}"
            # The exit code of that program would hide what was found before it. Another small
            # process waits for it, so that this one goes: its threads, its locks, its memory.
            argv = [sys.executable, "-I", "-S", supervisor.__file__, str(code), path, *argv]
            path = sys.executable
        execve(path, argv, env)

    def report_and_execv(path: Any, argv: Any) -> Any:
        report_and_execve(path, argv, os.environ)

    # The other functions of the family call these two.
    os._exit, os.execv, os.execve = report_and_exit, report_and_execv, report_and_execve
    try:
        yield
    finally:
        os._exit, os.execv, os.execve = end, execv, execve


def _is_executable(path: Any) -> bool:
    """Whether `os.execv` would find a program: it raises otherwise, and the script continues."""
    if isinstance(path, int):
        return _file_behind(path) is not None
    return Path(os.fsdecode(path)).is_file() and os.access(path, os.X_OK)


# --- Closed streams -------------------------------------------------------------------------------


class _Lenient:
    """A stream that drops what cannot be written: nobody may be reading it any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or drop."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or drop."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """The rest, such as `isatty`."""
        return getattr(self._stream, name)


class ReportStreams:
    """Where the report goes, whatever the script does to its streams.

    It goes to stderr; if the script has closed that, to stdout; if that is closed too, nowhere.
    """

    def __init__(self) -> None:
        """Remember the files behind the descriptors: one that is closed may be used again."""
        self._files = {number: _file_behind(number) for number in (2, 1)}

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Set `sys.stderr` for the report; afterwards the streams can be flushed, as python does.

        Python's exit code would be 120 otherwise.
        """
        sys.stdout = _flush_stream(sys.stdout)  # the script's output comes before the report
        with contextlib.ExitStack() as stack:
            stream: Any = _Lenient(self._choose(stack))
            stack.enter_context(contextlib.redirect_stderr(stream))
            yield
            stream.flush()
        sys.stderr = _flush_stream(sys.stderr)

    def _choose(self, stack: contextlib.ExitStack) -> TextIO:
        for number, stream in ((2, sys.stderr), (1, sys.stdout)):
            if _is_open(stream):
                return stream
            file = _file_behind(number)
            if file is not None and file == self._files[number]:
                return stack.enter_context(os.fdopen(os.dup(number), "w", encoding="utf-8"))
        return stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))


def _file_behind(number: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_open(stream: TextIO | None) -> bool:
    if stream is None or getattr(stream, "closed", False):
        return False
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return True  # not a file
    return _file_behind(number) is not None


def _flush_stream(stream: TextIO) -> TextIO:
    """The stream, or None in its place if it cannot be flushed."""
    try:
        if not getattr(stream, "closed", False):
            stream.flush()
    except (AttributeError, OSError, ValueError):
        return None  # type: ignore[return-value]  # python allows that
    return stream
