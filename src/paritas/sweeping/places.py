"""Where runs happen: here, or on a worker in another folder, environment or machine.

A worker keeps its own environment and search path. The folder of the sweep is used there if the
worker sees the same files in it, as on a shared file system; otherwise the code that the runs name
travels with their orders, with what it imports from the same folders. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import modulefinder
import os
import re
import sys
import sysconfig
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paritas.core.execution.executors import count_processors
from paritas.sweeping.plan import INDUCTOR_MODES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paritas.sweeping.rows import SweepRun

# What travels is code. A large file is found by its name there, or its run says that it is missing.
MOST_BYTES = 8_000_000
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class RunPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The environment of runs: the arguments of a server.

    Attributes:
        sweep: the id of the sweep, which ends its servers.
        folder: the current directory.
        paths: the search path for modules, in front of the one of the environment.
        cache: Inductor's cache, shared by all runs.
        libraries: what the server imports in addition to torch.
        compiles: whether the server should warm up Inductor.
        jobs: number of runs that share the machine.
        threads: number of torch's threads in each run.
    """

    sweep: str = ""
    folder: str
    paths: tuple[str, ...]
    cache: str
    libraries: tuple[str, ...] = ()
    compiles: bool = False
    jobs: int = 1
    threads: int = 1


def new_place(folder: Path, *, jobs: int, local: bool) -> RunPlace:
    """The place of the sweep that this process starts.

    Args:
        folder: for Inductor's cache.
        jobs: number of runs that share this machine.
        local: runs happen in this environment; otherwise only our own folders are of use.
    """
    here = str(Path.cwd())
    paths = dict.fromkeys([here, *(path or here for path in sys.path)])
    return RunPlace(
        sweep=uuid.uuid4().hex,
        folder=here,
        paths=tuple(paths) if local else _outside_environment(paths),
        cache=str(folder.absolute()),
        jobs=jobs,
        threads=threads_for(jobs),
    )


def compiles_any(runs: Iterable[SweepRun]) -> bool:
    """Whether Inductor compiles in a run, as far as its candidate's name says it."""
    names = {run.candidate for run in runs if run.kernel is None}
    return not names.isdisjoint(("inductor", "aot_inductor", *INDUCTOR_MODES))


def threads_for(jobs: int) -> int:
    """The number of torch's threads: what the user has set, else a share of the processors."""
    thread_setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if thread_setting.isascii() and thread_setting.isdigit() and int(thread_setting):
        return int(thread_setting)
    return max(count_processors() // max(jobs, 1), 1)


def _outside_environment(paths: Iterable[str]) -> tuple[str, ...]:
    """The folders that the user added; those of an environment are of no use elsewhere."""
    named = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = [Path(sysconfig.get_path(name)) for name in named]
    return tuple(
        path
        for path in paths
        if _allows(path, os.R_OK | os.X_OK)
        and not any(Path(path).is_relative_to(installed_folder) for installed_folder in installed)
        and not {"site-packages", "dist-packages"} & set(Path(path).parts)
    )


# --- Code that travels ----------------------------------------------------------------------------


def pack_code(runs: Iterable[SweepRun], paths: Sequence[str]) -> dict[str, bytes]:
    """The files that runs name, and the modules of `paths` that these import, by absolute path.

    Nothing is executed. Imports are followed as they are written; a module that is imported by a
    computed name, and data, are not among them.
    """
    names = {name for run in runs for name in (run.target, run.candidate, run.inputs) if name}
    finder = modulefinder.ModuleFinder([*paths], excludes=["paritas"])
    files: dict[str, None] = {}
    for name in sorted(names):
        before = name.partition(":")[0]
        if before.endswith((".py", ".pt2")) and Path(before).is_file():
            files[os.path.normpath(Path.cwd() / before)] = None
            if before.endswith(".py"):
                with contextlib.suppress(Exception):  # the run reports what is wrong with it
                    finder.load_file(before)
        elif ":" in name and _MODULE.fullmatch(before):
            top = before.partition(".")[0]
            files |= dict.fromkeys(str(Path(path) / f"{top}.py") for path in paths)
            with contextlib.suppress(Exception):
                finder.import_hook(before)
    module_files = [getattr(module, "__file__", None) for module in finder.modules.values()]
    files |= dict.fromkeys(os.path.normpath(Path.cwd() / file) for file in module_files if file)
    return _read_files(files)


def _read_files(names: Iterable[str]) -> dict[str, bytes]:
    packed: dict[str, bytes] = {}
    room = MOST_BYTES
    for name in names:
        with contextlib.suppress(OSError):
            if Path(name).stat().st_size <= room:
                packed[name] = Path(name).read_bytes()
                room -= len(packed[name])
    return packed


# --- On a worker ----------------------------------------------------------------------------------


class WorkerPlace:
    """The place of a sweep on a worker: the folder of the sweep, or a copy of its code.

    Attributes:
        place: where its runs happen.
    """

    def __init__(self, run_place: RunPlace, code: dict[str, bytes]) -> None:
        self._copies: list[tempfile.TemporaryDirectory[str]] = []
        folder, paths = run_place.folder, run_place.paths
        if not _allows(folder, os.R_OK | os.X_OK) or not all(
            _holds(Path(name), content) for name, content in code.items()
        ):
            root = Path(self._temporary())
            for name, content in code.items():
                file = _below(root, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            _below(root, folder).mkdir(parents=True, exist_ok=True)
            folder, paths = str(_below(root, folder)), tuple(str(_below(root, p)) for p in paths)
        here = str(Path.cwd())
        outside_environment = _outside_environment(path or here for path in sys.path)
        cache = (
            run_place.cache if _allows(run_place.cache, os.W_OK | os.X_OK) else self._temporary()
        )
        jobs = _runs_at_once()
        self.place = msgspec.structs.replace(
            run_place,
            folder=folder,
            paths=tuple(dict.fromkeys([*paths, *outside_environment, here])),
            cache=cache,
            jobs=jobs,
            threads=threads_for(jobs),
        )

    def _temporary(self) -> str:
        self._copies.append(tempfile.TemporaryDirectory(prefix="paritas-sweep-"))
        return self._copies[-1].name

    def remove(self) -> None:
        """Remove the copies."""
        for copy in self._copies:
            copy.cleanup()


def _below(root: Path, name: str) -> Path:
    return root / Path(name).relative_to(Path(name).anchor)


def _holds(file: Path, content: bytes) -> bool:
    try:
        return file.read_bytes() == content
    except OSError:
        return False


def _allows(folder: str, uses: int) -> bool:
    """Whether this is a folder that this user may use so; `Path.is_dir` raises if it is hidden."""
    return os.access(os.path.join(folder, os.curdir), uses)  # noqa: PTH118  (a path drops the dot)


def _runs_at_once() -> int:
    """The number of threads of the worker of dask that this is; 1 elsewhere."""
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return 1
    try:
        return max(int(distributed.get_worker().state.nthreads), 1)
    except ValueError:  # not in a worker
        return 1
