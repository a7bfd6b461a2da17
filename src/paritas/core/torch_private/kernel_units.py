"""Build the C++ kernels of a graph in one translation unit.

Inductor calls the C++ compiler once for each kernel. Three quarters of each call are the same: the
compiler reads torch's headers and links torch's libraries. In one unit, with the same source files
and the same flags, sixteen kernels take less than a third of the time. The linker does not read
torch's libraries either: this process has loaded them.

This only saves time. Where a kernel cannot share a unit, or torch builds kernels in another way
than expected, torch builds it itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import functools
import inspect
import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

_log = logging.getLogger(__name__)
_asked = contextvars.ContextVar("paritas_one_unit", default=False)
_PENDING = "_paritas_pending_kernels"
_ARGUMENTS = ["self", "argtypes", "source_code"]
# Beyond this, a unit takes more memory than it saves time.
_MOST_KERNELS = 64
_INCLUDE = re.compile(r"^\s*#\s*include\b.*$", re.MULTILINE)
# Macros and conditions of one kernel could change the next one.
_DIRECTIVE = re.compile(r"^\s*#\s*(?!include\b|pragma\b)", re.MULTILINE)


@contextlib.contextmanager
def one_unit() -> Iterator[None]:
    """Build the C++ kernels of each graph that is compiled in this context in one unit.

    If torch has several threads or processes for compiling, it uses these instead: they build the
    kernels of a graph at the same time.
    """
    token = _asked.set(_install())
    try:
        yield
    finally:
        _asked.reset(token)


def can_share_units() -> bool:
    """Whether this torch builds its kernels in the way that is expected here."""
    try:
        from torch._inductor.async_compile import AsyncCompile, get_compile_threads
        from torch._inductor.codecache import CppPythonBindingsCodeCache, _worker_compile_cpp
    except ImportError:
        return False
    build: Any = getattr(CppPythonBindingsCodeCache, "load_pybinding_async", None)
    return (
        all(map(callable, (AsyncCompile.wait, get_compile_threads, _worker_compile_cpp, build)))
        and "submit_fn" in inspect.signature(build).parameters
        and [*inspect.signature(AsyncCompile.cpp_pybinding).parameters] == _ARGUMENTS
        and CppPythonBindingsCodeCache.entry_function == "kernel"
        and "PyInit_{entry_func}(void)" in CppPythonBindingsCodeCache.suffix_template
    )


@functools.cache
def _install() -> bool:
    """Defer Inductor's kernels to the end of their graph, in contexts that asked for it."""
    if not can_share_units():
        return False
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    build, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait

    @functools.wraps(build)
    def defer(self: Any, argtypes: list[str], source_code: str) -> Any:
        alone = functools.partial(build, self, argtypes, source_code)
        if not _asked.get() or get_compile_threads() > 1 or _DIRECTIVE.search(source_code):
            return alone()
        kernel = _Kernel(alone, argtypes, source_code)
        vars(self).setdefault(_PENDING, []).append(kernel)
        return kernel

    @functools.wraps(wait)
    def wait_for_all(self: Any, scope: dict[str, Any]) -> None:
        pending = vars(self).pop(_PENDING, [])
        for start in range(0, len(pending), _MOST_KERNELS):
            _build_together(pending[start : start + _MOST_KERNELS])
        for name, value in list(scope.items()):
            if isinstance(value, _Kernel):
                scope[name] = value.load_function()
        wait(self, scope)

    AsyncCompile.cpp_pybinding = defer  # type: ignore[method-assign]
    AsyncCompile.wait = wait_for_all  # type: ignore[method-assign]
    return True


@dataclasses.dataclass
class _Kernel:
    """A kernel that is not built yet.

    Attributes:
        build: builds and loads it in torch's own way.
        argtypes: the types of its arguments in C++.
        source: its C++ source, without the bindings for Python.
        module: the module with its bindings, once it was built in a unit.
    """

    build: Callable[[], Any]
    argtypes: list[str]
    source: str
    module: ModuleType | None = None

    def load_function(self) -> Any:
        """The function to call."""
        return self.build() if self.module is None else self.module.kernel


# --- One unit -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Part:
    """A kernel that has no library yet, as torch would build it alone.

    Attributes:
        key: its name in torch's caches.
        path: its source file, with the bindings for Python.
        options: torch's options of the compiler.
        command: the command line with these options.
    """

    kernel: _Kernel
    key: str
    path: Path
    options: Any
    command: str

    @property
    def entry(self) -> str:
        """Its name in a unit."""
        return f"kernel_{self.key}"


def _build_together(kernels: list[_Kernel]) -> None:
    """Build and load those kernels that have no library yet and share their options."""
    try:
        parts = [part for kernel in kernels if (part := _part_of(kernel)) is not None]
        for command in dict.fromkeys(part.command for part in parts):
            alike = {part.key: part for part in parts if part.command == command}
            _build_unit(list(alike.values()))
    except Exception as error:  # noqa: BLE001  (torch builds the kernels, and reports its own errors)
        _log.debug("kernels are built one by one: %s", error)


def _part_of(kernel: _Kernel) -> _Part | None:
    """What torch would build for a kernel; None if it is built already, or in several steps."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.cpp_builder import CppBuilder

    builders: list[Any] = []

    def take(work: Any) -> None:
        builders.extend(work.args[1])

    cache = CppPythonBindingsCodeCache.cache
    before = set(cache)
    CppPythonBindingsCodeCache.load_pybinding_async(kernel.argtypes, kernel.source, submit_fn=take)
    for key in set(cache) - before:
        del cache[key]  # it is requested again, by us or by torch
    if len(builders) != 1:
        return None
    (builder,) = builders
    path = Path(builder.get_target_file_path()).with_suffix(".cpp")
    key = path.name.split(".", maxsplit=1)[0]
    if not key.isidentifier() or not path.exists():
        return None
    options = builder._build_option
    command = CppBuilder("o", "i", options).get_command_line()
    return _Part(kernel, key, path, options, command)


def _build_unit(parts: list[_Part]) -> None:
    options = parts[0].options
    try:
        _load_unit(parts, with_stand_ins(options))
    except ImportError as error:  # a name that the loader does not find
        _log.debug("torch's libraries are linked: %s", error)
        _load_unit(parts, options)


def _load_unit(parts: list[_Part], options: Any) -> None:
    from torch._inductor import codecache as code
    from torch._inductor.cpp_builder import CppBuilder, get_name_and_dir_from_output_file_path

    command = CppBuilder("o", "i", options).get_command_line()
    key, path = code.write(_unit_source(parts), "unit.cpp", extra=command)
    name, folder = get_name_and_dir_from_output_file_path(path)
    builder = CppBuilder(name=name, sources=path, BuildOption=options, output_dir=folder)
    code._worker_compile_cpp(str(Path(code.get_lock_dir(), f"{key}.lock")), (builder,))
    for part in parts:
        bases = (code.CppPythonBindingsCodeCache,)
        kind: Any = type(part.entry, bases, {"entry_function": part.entry})
        module = kind._load_library(builder.get_target_file_path(), key)
        part.kernel.module = module
        # The same kernel in another graph of this process.
        code.CppPythonBindingsCodeCache.cache[part.key] = functools.partial(_same, module)


def _same(module: ModuleType) -> ModuleType:
    return module


def _unit_source(parts: list[_Part]) -> str:
    """Include all source files, each with its own names for what the linker sees."""
    texts = [part.path.read_text(encoding="utf-8") for part in parts]
    includes = dict.fromkeys(line.strip() for text in texts for line in _INCLUDE.findall(text))
    lines = ["#define PY_SSIZE_T_CLEAN", *includes]
    for part in parts:
        lines += [
            f"#define kernel {part.entry}",
            f"#define PyInit_kernel PyInit_{part.entry}",
            f"namespace unit_{part.key} {{",
            f'#include "{part.path}"',
            "}",
            "#undef kernel",
            "#undef PyInit_kernel",
        ]
    return "\n".join(lines) + "\n"


# --- Linking --------------------------------------------------------------------------------------


def with_stand_ins(options: Any) -> Any:
    """The options of a build that links empty libraries with the names of torch's own.

    A linker reads half a million names of torch's libraries. It writes none of this into a kernel's
    library, only which libraries must be loaded; these are loaded already, and the loader finds the
    names in them.
    """
    import torch
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    inside = Path(torch.__file__).with_name("lib")
    libraries = [name for name in options._libraries if (inside / f"lib{name}.so").exists()]
    if sys.platform != "linux" or not libraries:
        return options
    files = [_stand_in(f"lib{name}.so", options.get_compiler(), cache_dir()) for name in libraries]
    if None in files:
        return options
    changed = copy.copy(options)
    changed._libraries = [name for name in options._libraries if name not in libraries]
    linked = ",".join(("Wl,--push-state,--no-as-needed", *map(str, files), "--pop-state"))
    changed._ldflags = [*options._ldflags, linked]
    return changed


def _stand_in(name: str, compiler: str, cache: str) -> Path | None:
    """An empty library of that name; None if it cannot be built."""
    folder = Path(cache) / "paritas_stand_ins"
    path = folder / name
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as subfolder:
        library = Path(subfolder) / name
        command = [compiler, "-shared", "-nostdlib", f"-Wl,-soname,{name}", "-o", str(library)]
        command += ["-x", "c", os.devnull]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            _log.debug("torch's libraries are linked: %s", error)
            return None
        library.replace(path)
    return path
