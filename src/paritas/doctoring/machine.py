"""What can be told of a machine without torch: versions, cores, memory, folders, compilers."""

from __future__ import annotations

import functools
import getpass
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from paritas.doctoring.checks import FAILED, MISSING, OK, Check, looked_at

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COMPILED_CODE", "compilers", "find_compiler", "folders", "machine", "versions"]

# Besides torch, which is asked itself.
PACKAGES = ("click", "jinja2", "msgspec", "numpy", "rich", "safetensors", "xxhash")
# What inductor asks for on a machine of this kind, if CXX names no other.
_USUAL_COMPILER = "clang++" if sys.platform == "darwin" else "g++"
COMPILED_CODE = "compiled code"
_SECONDS = 20
_GIB = 1024**3


def versions() -> Iterator[Check]:
    """Python, paritas and what it is built on."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Check("versions", "python", OK, found)
    for name in ("paritas", *PACKAGES):
        yield looked_at("versions", name, functools.partial(_package, name), f"pip install {name}")


def _package(name: str) -> Check:
    return Check("versions", name, OK, metadata.version(name))


def machine() -> Iterator[Check]:
    """Cores and memory that this process may use."""
    yield looked_at("machine", "cores", _cores, "")
    yield looked_at("machine", "memory", _memory, "")


def _cores() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Check("machine", "cores", OK, f"{usable} of {os.cpu_count()}")


def _memory() -> Check:
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return Check("machine", "memory", MISSING, "this system does not tell")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Check("machine", "memory", OK, f"{total / _GIB:.1f} GiB")


def folders() -> Iterator[Check]:
    """Whether what has to be written can be."""
    advice = "set TMPDIR to a writable folder"
    yield looked_at("folders", "temporary files", lambda: _temporary(advice), advice)
    more = "set TORCHINDUCTOR_CACHE_DIR to a writable folder"
    yield looked_at("folders", COMPILED_CODE, lambda: _compiled_code(more), more)


def _temporary(advice: str) -> Check:
    found = tempfile.gettempdir()
    asked = os.environ.get("TMPDIR")
    if asked and Path(asked).absolute() != Path(found):
        text = f"TMPDIR={asked} cannot be written; {found} is used"
        return Check("folders", "temporary files", FAILED, text, advice)
    return _writable("temporary files", Path(found), advice)


def _compiled_code(advice: str) -> Check:
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    usual = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    return _writable(COMPILED_CODE, Path(given) if given else usual, advice)


def _writable(name: str, folder: Path, advice: str) -> Check:
    """Try it, in the nearest folder above that exists: asking for permission tells less."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror}"
        return Check("folders", name, FAILED, text, advice)
    free = shutil.disk_usage(there).free
    return Check("folders", name, OK, f"{folder}, {free / _GIB:.1f} GiB free")


# --- compilers ------------------------------------------------------------------------------------


def find_compiler() -> tuple[str, str | None]:
    """The C++ compiler that torch.compile would call, by name, and where it is, if it is."""
    name = os.environ.get("CXX") or _USUAL_COMPILER
    return name, shutil.which(name)


def compilers() -> Iterator[Check]:
    """The C++ compiler, and the headers of Python that its code includes."""
    advice = f"install {_USUAL_COMPILER}, or let CXX name another; without, use backend='aot_eager'"
    yield looked_at("compiler", "C++ compiler", lambda: _compiler(advice), advice)
    yield looked_at("compiler", "headers of Python", _headers, "")


def _compiler(advice: str) -> Check:
    name, path = find_compiler()
    if path is None and os.environ.get("CXX"):
        advice = "let CXX name a C++ compiler, or unset it"
        return Check("compiler", "C++ compiler", FAILED, f"CXX={name} is not there", advice)
    if path is None:
        return Check("compiler", "C++ compiler", MISSING, f"no {name}", advice)
    told = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    first = (told.stdout or told.stderr).partition("\n")[0]
    if told.returncode:
        found = f"{path} --version ends with {told.returncode}: {first}"
        return Check("compiler", "C++ compiler", FAILED, found, advice)
    return Check("compiler", "C++ compiler", OK, first or path)


def _headers() -> Check:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.is_file():
        return Check("compiler", "headers of Python", OK, str(header.parent))
    advice = "install Python's development package, such as python3-dev; compiled code needs it"
    return Check("compiler", "headers of Python", MISSING, f"no {header}", advice)
