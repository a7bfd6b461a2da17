"""Everything that `paritas doctor` looks at, as it is found; imports no torch itself."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING

from paritas.doctoring import machine
from paritas.doctoring.checks import FAILED, Check

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["PROCESS", "SECONDS", "SELF_TEST", "examine", "exit_code"]

# For all that torch takes part in; on two cores with nothing cached and a load of 15 it took 100.
SECONDS = 600.0
SELF_TEST = "self-test"
# What is only looked at when it failed: everything after that was not.
PROCESS = "process"
_LAST_LINES = 3


def examine(*, quick: bool) -> Iterator[Check]:
    """Look at the machine here, and at torch in a process of its own."""
    yield from machine.versions()
    yield from machine.machine()
    usable = True
    for check in machine.folders():
        usable = usable and not (check.name == machine.COMPILED_CODE and check.state == FAILED)
        yield check
    yield from machine.compilers()
    with contextlib.ExitStack() as stack:
        instead = {}
        if not usable:  # it was told; without another folder, torch would fail at everything
            with contextlib.suppress(OSError):
                folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
                instead["TORCHINDUCTOR_CACHE_DIR"] = stack.enter_context(folder)
        yield from _of_torch(instead, quick=quick)


def exit_code(checks: Sequence[Check]) -> int:
    """0 all is well, 1 something failed, 3 the self-test did not come to its end."""
    if any(check.name == PROCESS for check in checks):
        return 3
    return 1 if any(check.state == FAILED for check in checks) else 0


def _of_torch(environment: dict[str, str], *, quick: bool) -> Iterator[Check]:
    # -P: what lies in the working directory is not what is installed.
    command = ["-P", "-m", "paritas.doctoring", *(["--quick"] if quick else [])]
    said: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
    last, late = "the start", threading.Event()
    with subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Compiling in the child itself takes less time than starting workers for it.
        env={"TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ, **environment},
    ) as child:
        listening = threading.Thread(target=_listen, args=(child, said), daemon=True)
        listening.start()
        timer = threading.Timer(SECONDS, _end, (child, late))
        timer.start()
        nonsense = ""
        try:
            for line in child.stdout or ():
                check = _read(line)
                if check is None:
                    nonsense = line.strip()
                    break
                last = check.name
                yield check
            else:
                child.wait()
        finally:
            timer.cancel()
            child.kill()  # of one that nobody listens to any more; of one that ended, nothing
            listening.join(timeout=1)
    if child.returncode or nonsense:
        why = _death(child.returncode)
        if late.is_set():
            why = f"did not end within {SECONDS:g} s"
        elif nonsense:
            why = f"said {nonsense!r:.80}, which is no answer,"
        text = " | ".join(line for line in said if line)
        found = f"it {why} after {last!r}" + (f": {text}" if text else "")
        advice = f"see what python {' '.join(command)} says"
        yield Check(SELF_TEST, PROCESS, FAILED, found, advice)


def _read(line: str) -> Check | None:
    try:
        return Check.from_line(line)
    except (TypeError, ValueError):
        return None


def _end(child: subprocess.Popen[str], late: threading.Event) -> None:
    late.set()
    child.kill()


def _listen(child: subprocess.Popen[str], said: collections.deque[str]) -> None:
    for line in child.stderr or ():
        said.append(line.strip())


def _death(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
