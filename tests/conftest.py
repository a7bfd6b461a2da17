"""What every run of the tests has."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import gc
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

import processes
from diagnosing import without_diagnosis
from sampling import is_run

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

# Where GCC looks for its compiler and linker first.
PROGRAMS = "COMPILER_PATH"
# A kernel that needs the headers whole is built with them, and without those compiled beforehand,
# which do not fit another optimisation. A unit of several that fails is built again one by one.
QUICK = """#!/bin/sh
case "$*" in
*C10_USING_CUSTOM_GENERATED_MACROS*) ;;
*) exec '{0}' "$@" ;;
esac
case "$*" in
*--output-pch*) '{0}' -I'{1}' "$@" 2>/dev/null || exec '{0}' "$@" ;;
*.unit.cpp*" -O3 "*) exec '{0}' -I'{1}' "$@" -O1 -g0 -w ;;
*" -O3 "*) '{0}' -I'{1}' "$@" -O1 -g0 -w 2>/dev/null || exec '{0}' "$@" -O0 -g0 -w ;;
*" -O0 "*) exec '{0}' "$@" -g0 -w ;;
*) exec '{0}' -I'{1}' "$@" ;;
esac
"""
# Of the headers, what no kernel of a test needs: the blocking of products that are tuned, vectors
# of complex and quantized numbers, and the special functions of the standard library. GCC makes all
# their templates anew for each kernel, which takes more than a third of its time.
PREFIX = "torch/csrc/inductor/cpp_prefix.h"
BLOCKING = re.compile(
    r"^// NOLINTBEGIN.*\ninline std::tuple<.*> _get_factors\((?s:.)*?(?=^#else$)", re.MULTILINE
)
UNUSED = [
    "bits/specfun.h",
    *(
        f"ATen/cpu/vec/vec{size}/vec{size}_{kind}.h"
        for size in ("256", "512")
        for kind in ("qint", "complex_float", "complex_double")
    ),
]
# What the bindings of each kernel include is compiled beforehand with the others.
BINDINGS = """#if __has_include(<Python.h>)
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#endif
#include <sstream>
"""
QUICK_LINKER = """#!/bin/sh
case "$*" in
*.main.so*|*.unit.so*) exec '{0}' -L'{1}' "$@" --no-as-needed {2} ;;
*) exec '{0}' "$@" ;;
esac
"""
# A kernel is linked against all of them, and loaded where they have been loaded before.
LIBRARIES = ["torch", "torch_cpu", "torch_python"]


WHOLE = os.environ.get("PARITAS_WHOLE_CORPUS") == "1"

# A loaded machine is not a bug, and the same commit has the same result. The examples of a test may
# share its folder. The whole corpus draws more, and others each time.
hypothesis.settings.register_profile(
    "paritas",
    deadline=None,
    derandomize=not WHOLE,
    max_examples=100 if WHOLE else 16,
    database=None,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
hypothesis.settings.load_profile("paritas")


def pytest_configure(config: pytest.Config) -> None:
    """Set up what holds for the whole run."""
    _build_quickly(config)
    _outlive_commands(config)
    # After each of thousands of compiles, torch would let Python collect what is young.
    os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
    # Hundreds of tests fail a `verify`; those about where it starts ask for it.
    os.environ.setdefault("PARITAS_LOCATE_SECONDS", "0")
    processes.make_folder()
    config.add_cleanup(processes.stop_server)
    if not WHOLE:
        # Numbers that stand in our sources are no examples: to read them all takes seconds, and
        # which there are depends on what was imported before.
        providers.is_local_module_file = lambda _: False


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None, object, object]:
    """Let xdist fork its workers."""
    if not session.config.pluginmanager.hasplugin("dsession"):
        return (yield)
    with processes.forked_workers():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Let Python's collector wait: what is imported and collected stays to the end.

    The other workers collect after the first, which compiles the modules that have changed.
    """
    if session.config.pluginmanager.hasplugin("dsession"):  # which leaves it to its workers
        return (yield)
    gc.disable()
    server = os.environ.get(processes.SERVER)
    if not server or sys.dont_write_bytecode:
        return (yield)
    with Path(server).with_name("collecting").open("w") as turn:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(turn, fcntl.LOCK_SH)
        return (yield)


def pytest_collection_finish() -> None:
    """Let Python's collector pass over what is there, and seldom over what comes.

    The compilers leave many objects that live for some tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    gc.enable()
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        # It empties the caches of the processor to measure, for a log, each program that is traced.
        guards.profile_guard_manager = lambda *_: 0.0
    caches = sys.modules.get("torch._inductor.codecache")
    if hasattr(caches, "FxGraphCachePickler"):
        # They describe, for a log, each part of what a graph is looked up by.
        caches.FxGraphCachePickler.debug_lines = lambda *_: []
    torch = sys.modules.get("torch")
    if torch is not None and not torch.accelerator.is_available():
        # `torch.manual_seed` describes its stack for each kind of device that is not here.
        for devices in (torch.cuda, torch.xpu, torch.mtia):
            devices.manual_seed_all = lambda _: None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked `one_in(n)`, run one of each n.

    After all other choices, so that a case that is asked for by its name is run.
    """
    if WHOLE:
        return
    seen: collections.Counter[str] = collections.Counter()
    left_out = []
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None:
            (n,), test = mark.args, item.nodeid.partition("[")[0]
            number, seen[test] = seen[test], seen[test] + 1
            if not is_run(number, n):
                left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        dropped = set(left_out)
        items[:] = [item for item in items if item not in dropped]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let SIGINT interrupt this process and those it starts.

    In the background and on some CI runners it is ignored, which children inherit.
    """
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


def pytest_runtest_setup(item: pytest.Item) -> None:
    processes.run_scripts_forked = item.get_closest_marker("unforked") is None
    if "torch._inductor" in sys.modules:  # else nothing is compiled by now
        processes.build_kernels_together()


@pytest.fixture(autouse=True)
def _own_excepthook() -> Iterator[None]:
    """A script of paritas puts its own hook there, also if a test runs it in this process."""
    hook = sys.excepthook
    yield
    sys.excepthook = hook


@pytest.fixture(autouse=True, scope="session")
def _forked_scripts() -> Iterator[None]:
    """Scripts that paritas writes and tries are run by `processes`, unless a test is `unforked`."""

    def run(command: list[str], *, env: dict[str, str], cwd: Path | None = None, **how: object):
        if not processes.run_scripts_forked:
            return subprocess.run(command, env=env, cwd=cwd, **how)  # noqa: PLW1510  (it is said)
        return processes.run(*command[1:], environment=env, cwd=cwd)

    forking = types.SimpleNamespace(**{**vars(subprocess), "run": run})
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr("paritas.core.reporting.scripts.subprocess", forking)
        yield


@pytest.fixture(autouse=True, scope="session")
def _forked_server() -> Iterator[None]:
    """The process that candidates of `paritas kernel` are forked from is forked itself."""
    from paritas.core.workers import starting
    from paritas.kernels import servers

    def start(command: list[str], **how: object) -> object:
        is_server = '"is_server":true' in command[-2] and "paritas.kernels" in command[-2]
        is_forked = is_server and processes._can_fork()
        return (processes.ForkedServer if is_forked else subprocess.Popen)(command, **how)

    forked = types.SimpleNamespace(**{**vars(subprocess), "Popen": start})
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(starting, "subprocess", forked)
        yield
        servers.stop_servers()


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts are written, and taken at their word: to run each takes seconds."""
    shown = 1, "the fault is there\n"
    monkeypatch.setattr("paritas.core.reporting.scripts.run_script", lambda *_: shown)


@pytest.fixture
def scalar_kernels() -> Iterator[None]:
    """Leave vectors out of kernels, where it is not asked what a kernel computes.

    Each is written twice otherwise, and takes a fifth longer. They are built as those with vectors
    are: for others, all headers would be compiled once more.
    """
    from torch._inductor import codecache, config  # noqa: TID251

    usual = codecache.pick_vec_isa()
    with config.patch({"cpp.simdlen": 1}), pytest.MonkeyPatch.context() as patching:
        patching.setattr(codecache, "pick_vec_isa", lambda: usual)
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Forget what was compiled: beyond a limit, Dynamo would run the same function eagerly."""
    import torch

    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


@pytest.fixture
def undiagnosed() -> Iterator[None]:
    """Leave out what kind of wrong it is."""
    with without_diagnosis():
        yield


def _build_quickly(config: pytest.Config) -> None:
    """Let Inductor's kernels be built by GCC with less effort, where it is installed.

    Hundreds of them are built, each against the whole of torch. What a kernel computes is the same
    with little optimisation, which saves a fifth of a second; so does gold in place of the usual
    linker, where it need not read the names in torch's libraries, and so do headers without what
    no kernel here needs. Inductor names headers that are compiled beforehand by what is in them,
    so that these are not taken for others. Which vectors this GCC can build is not tried, which
    takes 12 seconds.
    """
    compiler, gold = shutil.which("g++"), shutil.which("ld.gold")
    if compiler is None or gold is None or PROGRAMS in os.environ:
        return
    folder = tempfile.TemporaryDirectory(prefix="paritas-programs-")
    for name in LIBRARIES:
        made = [f"-Wl,-soname,lib{name}.so", "-o", f"{folder.name}/lib{name}.so"]
        empty = [compiler, "-shared", "-x", "c", os.devnull]
        subprocess.run([*empty, *made], check=True)
    linker = Path(folder.name) / "ld"
    linker.write_text(QUICK_LINKER.format(gold, folder.name, " ".join(f"-l{n}" for n in LIBRARIES)))
    linker.chmod(0o755)
    asked = [compiler, "-print-prog-name=cc1plus"]
    proper = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if Path(proper).is_absolute():
        quick = Path(folder.name) / "cc1plus"
        quick.write_text(QUICK.format(proper, _lean_headers()))
        quick.chmod(0o755)
    os.environ[PROGRAMS] = folder.name
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

    def forget() -> None:
        del os.environ[PROGRAMS]
        folder.cleanup()

    config.add_cleanup(forget)


def _lean_headers() -> Path:
    """Write the headers that are read in place of the installed ones, without what is unused.

    They are always in the same place, which is a part of what Inductor names them by, so that they
    are compiled beforehand once and not in every session.
    """
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    proper = Path(torch.origin).with_name("include")
    source = BINDINGS + BLOCKING.sub("", (proper / PREFIX).read_text())
    key = hashlib.sha256(f"{proper}\n{UNUSED}\n{source}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"paritas-headers-{os.getuid()}-{key}")
    if not folder.exists():
        made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
        for name in UNUSED:
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (made / name).touch()
        prefix = made / PREFIX
        prefix.parent.mkdir(parents=True)
        prefix.write_text(source)
        with contextlib.suppress(OSError):  # another session was faster
            made.rename(folder)
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _outlive_commands(config: pytest.Config) -> None:
    """Let `paritas run` be called in this process, which does not end when the script does."""
    end_threads = threading._shutdown
    threading._shutdown = lambda: None

    def restore() -> None:
        threading._shutdown = end_threads

    config.add_cleanup(restore)
