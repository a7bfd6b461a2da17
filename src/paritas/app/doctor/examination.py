"""All checks of `paritas doctor`.

Imports no torch: checks that involve torch run in a process of their own. It is no worker of
`core/workers`, which are sent messages by msgspec: this must also work where msgspec is broken.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import getpass
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paritas.core.errors import in_one_line
from paritas.core.workers.starting import describe_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


# --- One check; only the standard library, which works even in a broken environment ---------------

State = Literal["ok", "failed", "not available"]
OK: State = "ok"
FAILED: State = "failed"
MISSING: State = "not available"
# In the order in which they are run and shown.
GROUPS = ("versions", "machine", "folders", "compiler", "torch", "hooks into torch", "self-test")
_LONGEST = 300


@dataclasses.dataclass(frozen=True)
class Check:
    """One check and its result.

    Attributes:
        group: one of `GROUPS`.
        name: what was checked.
        state: `not available` is not a failure: paritas works without it.
        found: the version, the size, the result, or the exception.
        advice: what to do; empty if nothing has to be done.
    """

    group: str
    name: str
    state: State
    found: str
    advice: str = ""

    def to_line(self) -> str:
        """Encode as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Check:
        """Decode a line of `to_line`."""
        fields: dict[str, Any] = json.loads(line)
        return cls(**fields)


# What was found if it is ok; otherwise also the state and the advice.
Found = str | tuple[State, str, str]


def run_check(group: str, name: str, look: Callable[[], Found], advice: str) -> Check:
    """Run a check; an exception becomes a failed check and does not stop the others."""
    try:
        outcome = look()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (it becomes a failed check; also SystemExit)
        outcome = FAILED, in_one_line(error, _LONGEST, whole=True)[:_LONGEST], advice
    return Check(group, name, *((OK, outcome) if isinstance(outcome, str) else outcome))


# --- The machine without torch: versions, cores, memory, folders, compilers -----------------------

# The version of torch is checked in the other process.
PACKAGES = ("click", "jinja2", "msgspec", "numpy", "rich", "safetensors", "xxhash")
# The compiler that inductor uses unless CXX is set.
_USUAL_COMPILER = "clang++" if sys.platform == "darwin" else "g++"
COMPILED_CODE = "compiled code"
_SECONDS = 20
_GIB = 1024**3


def package_versions() -> Iterator[Check]:
    """Python, paritas and the packages that it needs."""
    python_version = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Check("versions", "python", OK, python_version)
    for name in ("paritas", *PACKAGES):
        look = functools.partial(metadata.version, name)
        yield run_check("versions", name, look, f"pip install {name}")


def machine_resources() -> Iterator[Check]:
    """Cores and memory that this process may use."""
    yield run_check("machine", "cores", _cores, "")
    yield run_check("machine", "memory", _memory, "")


def _cores() -> Found:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{usable} of {os.cpu_count()}"


def _memory() -> Found:
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return MISSING, "unknown on this system", ""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{total / _GIB:.1f} GiB"


def folders() -> Iterator[Check]:
    """Whether the folders for temporary files and compiled code are writable."""
    advice = "set TMPDIR to a writable folder"
    yield run_check("folders", "temporary files", lambda: _temporary_folder(advice), advice)
    more = "set TORCHINDUCTOR_CACHE_DIR to a writable folder"
    yield run_check("folders", COMPILED_CODE, lambda: _compiled_code_folder(more), more)


def _temporary_folder(advice: str) -> Found:
    temporary_folder = tempfile.gettempdir()
    tmpdir_setting = os.environ.get("TMPDIR")
    if tmpdir_setting and Path(tmpdir_setting).absolute() != Path(temporary_folder):
        return (
            FAILED,
            f"TMPDIR={tmpdir_setting} is not writable; {temporary_folder} is used instead",
            advice,
        )
    return _check_writable(Path(temporary_folder), advice)


def _compiled_code_folder(advice: str) -> Found:
    cache_folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    usual = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    return _check_writable(Path(cache_folder) if cache_folder else usual, advice)


def _check_writable(folder: Path, advice: str) -> Found:
    """Write a file in the nearest existing parent: permission bits alone are not reliable."""
    there = next(ancestor for ancestor in (folder, *folder.absolute().parents) if ancestor.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        return FAILED, f"{folder} is not writable: {error.strerror}", advice
    return f"{folder}, {shutil.disk_usage(there).free / _GIB:.1f} GiB free"


def find_compiler() -> tuple[str, str | None]:
    """The name of the C++ compiler that torch.compile uses, and its path, if it exists."""
    name = os.environ.get("CXX") or _USUAL_COMPILER
    return name, shutil.which(name)


def compilers() -> Iterator[Check]:
    """The C++ compiler, and the Python headers that compiled code includes."""
    advice = f"install {_USUAL_COMPILER}, or set CXX to another; without one, use 'aot_eager'"
    yield run_check("compiler", "C++ compiler", lambda: _compiler(advice), advice)
    yield run_check("compiler", "Python headers", _headers, "")


def _compiler(advice: str) -> Found:
    name, path = find_compiler()
    if path is None and os.environ.get("CXX"):
        return FAILED, f"CXX={name} does not exist", "set CXX to a C++ compiler, or unset it"
    if path is None:
        return MISSING, f"{name} is not installed", advice
    done = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    first = (done.stdout or done.stderr).partition("\n")[0]
    if done.returncode:
        return FAILED, f"{path} --version exits with {done.returncode}: {first}", advice
    return first or path


def _headers() -> Found:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.is_file():
        return str(header.parent)
    advice = "install Python's development package, such as python3-dev; compiled code needs it"
    return MISSING, f"{header} does not exist", advice


# --- The examination ------------------------------------------------------------------------------

# For all checks that involve torch; on two busy cores with empty caches they took 100.
SECONDS = 600.0
SELF_TEST = "self-test"
# A check that only exists if it failed; the checks after it were not run.
PROCESS = "process"
_LAST_LINES = 3


def examine(*, quick: bool) -> Iterator[Check]:
    """Check the machine here, and torch in a process of its own."""
    yield from package_versions()
    yield from machine_resources()
    usable = True
    for check in folders():
        usable = usable and not (check.name == COMPILED_CODE and check.state == FAILED)
        yield check
    yield from compilers()
    with contextlib.ExitStack() as stack:
        instead = {}
        if not usable:  # already reported; without another folder, every check of torch would fail
            with contextlib.suppress(OSError):
                folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
                instead["TORCHINDUCTOR_CACHE_DIR"] = stack.enter_context(folder)
        yield from _examine_torch(instead, quick=quick)


def exit_code(checks: Sequence[Check]) -> int:
    """0 everything works, 1 something failed, 3 the self-test did not finish."""
    if any(check.name == PROCESS for check in checks):
        return 3
    return 1 if any(check.state == FAILED for check in checks) else 0


def _examine_torch(environment: dict[str, str], *, quick: bool) -> Iterator[Check]:
    # -P: do not import modules from the working directory.
    command = ["-P", "-m", "paritas.app.doctor", *(["--quick"] if quick else [])]
    last_lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
    last, late = "the start", threading.Event()
    with subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Compiling in the child itself is faster than starting workers.
        env={"TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ, **environment},
    ) as child:
        listening = threading.Thread(target=_listen, args=(child, last_lines), daemon=True)
        listening.start()
        timer = threading.Timer(SECONDS, _kill_late, (child, late))
        timer.start()
        nonsense = ""
        try:
            for line in child.stdout or ():
                check = _parse_line(line)
                if check is None:
                    nonsense = line.strip()
                    break
                last = check.name
                yield check
            else:
                child.wait()
        finally:
            timer.cancel()
            child.kill()  # no effect if it has ended
            listening.join(timeout=1)
    if child.returncode or nonsense:
        why = describe_end(child.returncode)
        if late.is_set():
            why = f"did not finish within {SECONDS:g} s"
        elif nonsense:
            why = f"printed {nonsense!r:.80}, which is not a check,"
        text = " | ".join(line for line in last_lines if line)
        failure_text = f"it {why} after {last!r}" + (f": {text}" if text else "")
        advice = f"run python {' '.join(command)} to see its output"
        yield Check(SELF_TEST, PROCESS, FAILED, failure_text, advice)


def _parse_line(line: str) -> Check | None:
    try:
        return Check.from_line(line)
    except (TypeError, ValueError):
        return None


def _kill_late(child: subprocess.Popen[str], late: threading.Event) -> None:
    late.set()
    child.kill()


def _listen(child: subprocess.Popen[str], last_lines: collections.deque[str]) -> None:
    for line in child.stderr or ():
        last_lines.append(line.strip())
