"""Each run has its own process, with a time limit and a memory limit.

Importing torch with its compilers takes six seconds. So a server imports them once, and forks a
process for each run on the CPU, if the server has one thread and there is no accelerator.
Otherwise it starts a new interpreter for each run. The server watches all of them, and answers with
a row however a run ends.

Nothing here imports torch at the top: only the server and the runs do.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import faulthandler
import functools
import importlib
import importlib.metadata
import os
import platform
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import BrokenExecutor, Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from paritas.core.candidates.loading import NAMED, CandidateOptions
from paritas.core.errors import ParitasError, UsageError, in_one_line
from paritas.core.results.findings import Verdict
from paritas.core.results.progress import clock_words
from paritas.core.results.report import json_of
from paritas.core.results.wording import size
from paritas.sweeping.places import RunPlace, WorkerPlace
from paritas.sweeping.plan import INDUCTOR_MODES, INVARIANTS, RunTask, is_own_function
from paritas.sweeping.rows import RunEnd, SweepRow, trimmed, without_verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paritas.sweeping.rows import KernelSettings, SweepRun

_LOOK_SECONDS = 0.1
# The time to write a traceback, before a run is killed.
_LAST_WORDS_SECONDS = 1.0
# An idle server ends after this time: if the process that sweeps is killed, nobody else ends those
# of a cluster.
_IDLE_SECONDS = 60.0
_LONGEST_LOG, _LONGEST_REASON = 4000, 600
# The share of the machine's memory for all runs together, if no limit is given.
_SHARE_OF_MEMORY = 0.8
_CHUNK = 1 << 16
# Compilers make millions of objects, of which few are garbage, and a run ends soon. Looking for
# garbage as often as Python does takes a second of each run.
_COLLECT_RARELY = (20_000, 20, 20)


class RunOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The task of a worker.

    Attributes:
        place: where the sweep was started.
        code: for a worker that may be elsewhere: the files that its runs name, by their path here;
            None for this process.
    """

    task: RunTask
    place: RunPlace
    code: dict[str, bytes] | None = None


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    task: RunTask


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    row: SweepRow


class _Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message from a run to the server: the step that begins, or the result."""

    stage: str = ""
    ended: RunEnd | None = None
    verdict: Verdict | None = None
    counts: dict[str, int] = {}
    versions: dict[str, str] = {}


# --- In the process that sweeps, or in a worker of a cluster --------------------------------------


def run_order(order: RunOrder) -> SweepRow:
    """Do one run in its own process, and wait for its row.

    Raises:
        BrokenExecutor: the server died; the run may be tried again.
    """
    try:
        server = _server_of(order)
    except OSError as error:
        return row_without_run(
            order.task,
            f"no process can be started for it on {platform.node()}: {in_one_line(error)}",
            "see whether the worker may start processes and write temporary files",
        )
    return server.run(order.task)


def _server_of(order: RunOrder) -> _Server:
    with _servers_lock:
        sweep, place = order.place.sweep, order.place
        if order.code is not None:
            if sweep not in _worker_places:
                _worker_places[sweep] = WorkerPlace(order.place, order.code)
            place = _worker_places[sweep].place
        server = _servers.get(sweep)
        if server is None or server.is_gone:
            _forget_ended(sweep)
            server = _servers[sweep] = _Server(place)
        return server


def _forget_ended(sweep: str) -> None:
    """Remove what other sweeps left here that could not say that they ended."""
    ended = [other for other, one in _servers.items() if one.is_gone and other != sweep]
    for other in ended:
        del _servers[other]
        if other in _worker_places:
            _worker_places.pop(other).remove()


def stop_servers(sweep: str) -> None:
    """End the server of a sweep in this process, and its runs."""
    with _servers_lock:
        server, place = _servers.pop(sweep, None), _worker_places.pop(sweep, None)
    if server is not None:
        server.stop()
    if place is not None:
        place.remove()


def row_without_run(task: RunTask, reason: str, advice: str) -> SweepRow:
    """The row of a run that no process did."""
    verdict = without_verdict(reason, advice)
    return SweepRow(
        run=task.run,
        ended=RunEnd.CRASHED,
        verdict=verdict,
        counts=_counts(verdict),
        versions=versions(),
    )


# By the id of a sweep.
_servers: dict[str, _Server] = {}
_worker_places: dict[str, WorkerPlace] = {}
_servers_lock = threading.Lock()
_SCRIPT = "from paritas.sweeping.processes import serve; serve()"
_ONE_RUN = "from paritas.sweeping.processes import run_alone; run_alone()"


class _Server:
    """A client of the server; it is thread-safe."""

    def __init__(self, place: RunPlace) -> None:
        with contextlib.ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SCRIPT, msgspec.json.encode(place).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=_environment(place),
                cwd=place.folder,
                start_new_session=True,  # Ctrl-C is for the process that sweeps
            )
            stack.pop_all()  # the log is closed when it ends
        self._lock = threading.Lock()
        self._number = 0
        self._waiting: dict[int, Future[SweepRow]] = {}
        self.is_gone = False
        threading.Thread(target=self._listen, name="paritas-sweep", daemon=True).start()

    def run(self, task: RunTask) -> SweepRow:
        row: Future[SweepRow] = Future()
        with self._lock:
            if self.is_gone:
                raise BrokenExecutor("the server of runs has ended")
            self._number += 1
            self._waiting[self._number] = row
            request = _Request(number=self._number, task=task)
            with contextlib.suppress(OSError):  # it died: the listener notifies all waiting calls
                _stream(self._process.stdin).write(msgspec.json.encode(request) + b"\n")
                _stream(self._process.stdin).flush()
        return row.result()

    def stop(self) -> None:
        """End it; when its input is closed, it kills its runs."""
        with contextlib.suppress(OSError):
            _stream(self._process.stdin).close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        for line in _stream(self._process.stdout):
            answer = msgspec.convert(msgspec.json.decode(line), _Answer, strict=False)
            with self._lock:
                waiting = self._waiting.pop(answer.number)
            waiting.set_result(answer.row)
        code = self._process.wait()
        with self._lock:
            self.is_gone = True
            left, self._waiting = list(self._waiting.values()), {}
        if left:
            self._log.seek(0)
            last = _last_line(self._log.read().decode(errors="replace"))
            reason = f"the server of runs ended with exit code {code}{f': {last}' if last else ''}"
            for waiting in left:
                waiting.set_exception(BrokenExecutor(reason))
        _stream(self._process.stdout).close()
        self._log.close()


def _stream(stream: Any) -> Any:
    return stream


def _environment(place: RunPlace) -> dict[str, str]:
    """The environment of the server: one thread and no compile workers, to allow forks."""
    usual = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": place.cache}
    usual["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"  # see `_COLLECT_RARELY`
    # Set here because transformers reads them on import, perhaps before a target is built.
    usual |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    set_here = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(place.paths)}
    return {**usual, **os.environ, **set_here}


@functools.cache
def versions() -> dict[str, str]:
    """The installed versions of everything in a run, read without importing torch."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("torch", "paritas", "triton", "transformers", "timm", "torchvision"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# --- The server -----------------------------------------------------------------------------------


def serve() -> NoReturn:
    """Be the server: start the requested runs, watch them, and answer with rows."""
    place = msgspec.json.decode(sys.argv[1], type=RunPlace)
    requests, answers = os.dup(0), os.dup(1)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # keep the output of libraries out of the answers
    _Watch(place, requests, answers).watch()
    os._exit(0)  # skip the exit handlers of imported modules


class _Watch:
    def __init__(self, place: RunPlace, requests: int, answers: int) -> None:
        self.place = place
        self._requests, self._answers = requests, answers
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._running: list[_Running] = []
        self._forks: bool | None = None

    def watch(self) -> None:
        """Serve until the client closes its end, or nothing was requested for a while."""
        while True:
            patience = _LOOK_SECONDS if self._running else _IDLE_SECONDS
            ready = self._selector.select(patience)
            if not ready and not self._running:
                return
            for key, _ in ready:
                if key.data is not None:
                    if not key.data.read():
                        self._selector.unregister(key.fd)
                elif not self._take_requests():
                    for running in self._running:
                        running.kill()
                    return
            for running in list(self._running):
                if running.look():
                    self._finish(running)

    def _take_requests(self) -> bool:
        content = os.read(self._requests, _CHUNK)
        *lines, self._buffer = (self._buffer + content).split(b"\n")
        for line in lines:
            self._start(msgspec.json.decode(line, type=_Request))
        return bool(content)

    def _start(self, request: _Request) -> None:
        if self._forks is None:
            self._forks = _prepare(self.place)
        read, write = os.pipe()
        log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the run)
        os.set_blocking(read, False)
        began = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        if self._forks and request.task.run.device == "cpu":
            process = self._fork(request.task, write, log.fileno())
        else:
            process = _start_anew(self.place, request.task, write, log.fileno())
        os.close(write)
        running = _Running(request, process, read, log, began, _memory_limit(request, self.place))
        self._selector.register(read, selectors.EVENT_READ, running)
        self._running.append(running)

    def _fork(self, task: RunTask, write: int, log: int) -> int:
        process = os.fork()
        if process:
            return process
        try:
            _die_with_parent()
            os.setsid()
            self._selector.close()
            for end in (self._requests, self._answers, *(one.read_end for one in self._running)):
                os.close(end)
            _run_here(self.place, task, write, log)
        finally:
            os._exit(70)

    def _finish(self, running: _Running) -> None:
        with contextlib.suppress(KeyError):  # it closed its end before it exited
            self._selector.unregister(running.read_end)
        self._running.remove(running)
        answer = _Answer(number=running.request.number, row=running.row())
        content = json_of(answer) + b"\n"
        while content:
            content = content[os.write(self._answers, content) :]


def _prepare(place: RunPlace) -> bool:
    """Import what runs need; return whether they can be forked from this process."""
    if sys.platform != "linux":
        return False
    import torch

    if torch.accelerator.is_available():  # accelerators do not survive a fork
        return False
    for name in preloaded_modules(place.libraries):
        with contextlib.suppress(Exception):  # the runs that need it report the error
            importlib.import_module(name)
    torch.set_num_threads(1)
    if "tqdm" in sys.modules:
        # torch.fx creates a progress bar that leaves a lock: a compiler would seem to change the
        # state of a model that can reach it. The first bar would also start a thread.
        sys.modules["tqdm"].tqdm.monitor_interval = 0
        sys.modules["tqdm"].tqdm.get_lock()
    if place.compiles:
        with contextlib.suppress(Exception):  # the runs report the error
            _compile_once()
    import gc

    gc.collect()
    gc.freeze()  # otherwise a collection in a forked process would copy all these objects
    gc.set_threshold(*_COLLECT_RARELY)
    return len(list(Path("/proc/self/task").iterdir())) == 1


def _compile_once() -> None:
    """Compile a small program, with loops and sums that are vectorized.

    The first compile takes seconds longer: for imports, for the features of the processor, for
    precompiled headers, for the first simplifications of indices.
    """
    import torch
    from torch.nn import functional

    from paritas.core.torch_private.compile_time import quick_compiles

    def program(x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(functional.layer_norm(x, x.shape[1:])).softmax(-1)

    with quick_compiles():
        torch.compile(program)(torch.ones(32, 32, requires_grad=True)).sum().backward()
    torch.compiler.reset()


def _start_anew(place: RunPlace, task: RunTask, write: int, log: int) -> int:
    order = msgspec.json.encode(RunOrder(task=task, place=place)).decode()
    threads = {"OMP_NUM_THREADS": str(place.threads)}
    process = subprocess.Popen(
        [sys.executable, "-c", _ONE_RUN, str(write), order],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[write],
        env={**os.environ, **threads},
        start_new_session=True,
    )
    process.returncode = 0  # `_Running` waits for it
    return process.pid


def _memory_limit(request: _Request, place: RunPlace) -> int:
    if request.task.memory is not None:
        return request.task.memory
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # the limit of a container; "max" if none
        whole = min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return int(_SHARE_OF_MEMORY * whole / place.jobs)


class _Running:
    """A run in progress, as the server sees it."""

    def __init__(
        self, request: _Request, process: int, read_end: int, log: Any, began: str, memory: int
    ) -> None:
        self.request = request
        self.read_end = read_end
        self._process = process
        self._log = log
        self._began, self._start = began, time.monotonic()
        self._limit, self._memory = memory, 0
        self._buffer = b""
        self._stage = "starting"
        self._result: _Message | None = None
        self._stopped: RunEnd | None = None
        self._asked_at = 0.0
        self._code: int | None = None
        self._seconds = self._processor_seconds = 0.0

    def read(self) -> bool:
        """Read its messages; False if it has closed its end."""
        try:
            while content := os.read(self.read_end, _CHUNK):
                *lines, self._buffer = (self._buffer + content).split(b"\n")
                for line in lines:
                    message = msgspec.convert(msgspec.json.decode(line), _Message, strict=False)
                    if message.ended is None:
                        self._stage = message.stage
                    else:
                        self._result = message
        except BlockingIOError:
            return True
        return False

    def look(self) -> bool:
        """Whether it has ended; a run that exceeds a limit is stopped."""
        process, status, used = os.wait4(self._process, os.WNOHANG)
        now = time.monotonic()
        if process:
            self._code = os.waitstatus_to_exitcode(status)
            self._seconds = now - self._start
            self._processor_seconds = used.ru_utime + used.ru_stime
            self._memory = max(self._memory, used.ru_maxrss * _RSS_UNIT)
            self.read()
            self.kill()  # processes that it left behind
            return True
        if self._stopped is RunEnd.TIMED_OUT and now > self._asked_at + _LAST_WORDS_SECONDS:
            self.kill()
        elif self._stopped is None and now > self._start + self.request.task.seconds:
            self._stopped, self._asked_at = RunEnd.TIMED_OUT, now
            os.kill(self._process, signal.SIGABRT)  # it writes a traceback to its log
        elif self._stopped is None:
            self._memory = max(self._memory, _resident(self._process))
            if self._memory > self._limit:
                self._stopped = RunEnd.OUT_OF_MEMORY
                self.kill()
        return False

    def kill(self) -> None:
        """Kill it and the compilers that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process, signal.SIGKILL)

    def row(self) -> SweepRow:
        """Make its row."""
        os.close(self.read_end)
        ended, verdict, counts = self._outcome()
        log = ""
        if ended is not RunEnd.VERDICT:
            self._log.seek(0)
            log = _end_of_log(self._log.read().decode(errors="replace"))
        self._log.close()
        took = {} if self._result is None else self._result.versions
        return SweepRow(
            run=self.request.task.run,
            ended=ended,
            verdict=verdict,
            counts=counts,
            began=self._began,
            seconds=round(self._seconds, 3),
            processor_seconds=round(self._processor_seconds, 3),
            memory=self._memory,
            versions={**versions(), **took},
            log=log,
        )

    def _outcome(self) -> tuple[RunEnd, Verdict, dict[str, int]]:
        task, during = self.request.task, f", during: {self._stage}"
        if self._stopped is RunEnd.TIMED_OUT:
            reason = f"not finished after {clock_words(task.seconds)}, the time limit{during}"
            return self._no_verdict(RunEnd.TIMED_OUT, reason, "raise seconds, or see the log")
        if self._stopped is RunEnd.OUT_OF_MEMORY:
            used = f"{size(self._memory)}, more than the limit of {size(self._limit)}"
            advice = "raise memory, or lower --jobs"
            return self._no_verdict(RunEnd.OUT_OF_MEMORY, f"it used {used}{during}", advice)
        if self._result is not None and self._code == 0:
            result = self._result
            verdict = result.verdict
            if verdict is None:  # not `if not verdict`: a failing verdict is false
                return self._no_verdict(RunEnd.CRASHED, "the run sent no verdict", "")
            return result.ended or RunEnd.CRASHED, verdict, result.counts
        code = self._code or 0
        if code == -signal.SIGKILL:
            reason = f"killed by SIGKILL, probably by the system for lack of memory{during}"
            return self._no_verdict(RunEnd.OUT_OF_MEMORY, reason, "lower --jobs, or set memory")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        reason = f"the process crashed ({how}){during}"
        return self._no_verdict(RunEnd.CRASHED, reason, "the end of its log shows where")

    def _no_verdict(
        self, ended: RunEnd, reason: str, advice: str
    ) -> tuple[RunEnd, Verdict, dict[str, int]]:
        verdict = without_verdict(reason, advice)
        return ended, verdict, _counts(verdict)


def _counts(verdict: Verdict) -> dict[str, int]:
    return trimmed(verdict)[1]


# `ru_maxrss` is in bytes on macOS, in kB elsewhere.
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def _resident(process: int) -> int:
    """The memory of a process and its children in bytes; 0 if it cannot be read."""
    if sys.platform != "linux":
        return _resident_by_ps(process)
    held, left = 0, [process]
    while left:
        folder = Path("/proc") / str(left.pop())
        with contextlib.suppress(OSError, ValueError, IndexError):
            held += int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            for thread in (folder / "task").iterdir():
                left += map(int, (thread / "children").read_text().split())
    return held


def _resident_by_ps(group: int) -> int:
    shown = subprocess.run(
        ["ps", "-axo", "pgid=,rss="],  # noqa: S607  (wherever it is)
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    pairs = [line.split() for line in shown.splitlines()]
    return sum(int(rss) * 1024 for owner, rss in pairs if int(owner) == group)


def _end_of_log(text: str) -> str:
    """The end of a log, without the list of modules that Python writes when it crashes."""
    lines = [line for line in text.splitlines() if not line.startswith("Extension modules: ")]
    return "\n".join(lines)[-_LONGEST_LOG:].strip()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_LONGEST_REASON] if lines else ""


# --- One run: build a target, make a candidate from it, and compare the two -----------------------

KERNELS = "kernels"
# Modules that take long to import, for each kind of target.
_LIBRARIES = {
    "hf": (
        "paritas.core.targets.hugging_face",
        "transformers.generation.utils",
        "transformers.modeling_layers",
        "transformers.modeling_outputs",
        "transformers.modeling_utils",
        "transformers.models.auto.modeling_auto",
        "transformers.processing_utils",
    ),
    "timm": ("timm",),
    "torchvision": ("torchvision.models",),
    KERNELS: ("paritas.kernels.judge", "paritas.kernels.observing", "paritas.kernels.calling"),
}
_OWN = (
    "paritas.verification.verify",
    "paritas.core.candidates.makers",
    "paritas.core.diagnosis.diagnose",
)


def preloaded_modules(libraries: tuple[str, ...], *, own: bool = True) -> tuple[str, ...]:
    """The modules that a process imports before it forks runs."""
    found = [name for library in libraries for name in _LIBRARIES.get(library, ())]
    return (*(_OWN if own else ()), *found)


def _options_of(run: SweepRun) -> CandidateOptions:
    named = run.candidate in NAMED or is_own_function(run.candidate)
    mode = run.candidate if run.candidate in INDUCTOR_MODES else None
    return CandidateOptions(
        inputs=run.inputs or None,
        dtype=run.dtype or None,
        device=run.device,
        train=run.mode.startswith("train"),
        candidate=run.candidate if named else None,
        backend="inductor" if named or mode else run.candidate,
        mode=mode,
    )


def verify_run(run: SweepRun, tell: Callable[[str], None]) -> tuple[Verdict, dict[str, str]]:
    """Compare; returns the verdict, and versions that only this process knows."""
    if run.kernel is not None:
        return _judge_kernel(run, run.kernel, tell), _device_versions(run.device)
    from paritas.core.candidates.makers import build_candidate, build_reference
    from paritas.core.execution.subjects import VerifyConfig
    from paritas.verification.verify import verify

    options = _options_of(run)
    tell(f"building {run.target}")
    is_exported = run.target.endswith(".pt2")
    built = _load_exported(run) if is_exported else build_reference(run.target, options)
    model, inputs = built
    if run.candidate == INVARIANTS:
        from paritas.relations.checking import invariants

        report = invariants(model, inputs, target=run.target, on_progress=tell)
        return report.verdict, _device_versions(run.device)
    tell(f"making the candidate {run.candidate}")
    candidate = build_candidate(model, inputs, options)
    config = VerifyConfig(
        verify_gradients=False if run.mode.endswith("-forward") else None,
        raise_on_mismatch=False,
        locate_seconds=0,  # it would take from the time limit of the run
    )
    verdict = verify(inputs, model, candidate, config, on_progress=tell)
    return verdict, _device_versions(run.device)


def _judge_kernel(run: SweepRun, settings: KernelSettings, tell: Callable[[str], None]) -> Verdict:
    """Judge a kernel; its processes are forked from this one, before the reference is loaded."""
    from paritas.kernels import KernelOptions
    from paritas.kernels.forking import fork_nursery
    from paritas.kernels.judge import judge_kernel

    if run.device == "cpu":
        fork_nursery()
    options = KernelOptions(
        cases=settings.cases,
        seed=settings.seed,
        device=run.device,
        fixed=frozenset(settings.fixed),
        forbid=settings.forbid,
        gradients=settings.gradients,
        fresh_outputs=settings.fresh_outputs,
    )
    report = judge_kernel(
        run.target, run.candidate, options, inputs=run.inputs or None, on_progress=tell
    )
    return report.verdict


def _load_exported(run: SweepRun) -> tuple[Any, Any]:
    """Load a `.pt2` program with its example inputs."""
    import torch
    from torch.export.passes import move_to_device_pass

    from paritas.core.candidates.makers import move_leaf
    from paritas.core.execution.subjects import Inputs, usable_device
    from paritas.core.numerics.contents import map_leaves

    try:
        program = torch.export.load(Path(run.target))
    except Exception as error:
        raise UsageError(f"{run.target!r} cannot be read: {in_one_line(error)}") from error
    if program.example_inputs is None:
        raise UsageError(
            f"{run.target!r} has no example inputs: export it with them, or name a factory that "
            "returns (model, inputs)"
        )
    device = usable_device(run.device)
    program = move_to_device_pass(program, device)
    args, kwargs = map_leaves(program.example_inputs, lambda leaf: move_leaf(leaf, device, None))
    return program.module(), Inputs(args, kwargs)


def _device_versions(device: str) -> dict[str, str]:
    import torch

    if not device.startswith("cuda"):
        return {}
    return {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}


# --- The process of a run -------------------------------------------------------------------------


def run_alone() -> NoReturn:
    """Be the process of a run in a new interpreter."""
    _die_with_parent()
    order = msgspec.json.decode(sys.argv[2], type=RunOrder)
    _run_here(order.place, order.task, int(sys.argv[1]), 2)


def _run_here(place: RunPlace, task: RunTask, channel: int, log: int) -> NoReturn:
    """Be the process of a run: send progress and the result, and exit."""
    for target in (1, 2):
        os.dup2(log, target)
    sys.stdout = sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
    _be_killed_first()
    code = 0
    try:
        message = _verify(place, task, lambda stage: _send(channel, _Message(stage=str(stage))))
        _send(channel, message)
    except BaseException:  # noqa: BLE001  (the server makes a row from the exit code and the log)
        import traceback

        traceback.print_exc()
        code = 71
    sys.stdout.flush()
    os._exit(code)  # imported modules may have threads that would delay the exit


def _verify(place: RunPlace, task: RunTask, tell: Callable[[str], None]) -> _Message:
    try:
        tell("importing torch")
        import torch

        from paritas.core.torch_private.compile_time import quick_compiles

        torch.set_num_threads(place.threads)
        with quick_compiles():  # the same code, in less time
            verdict, seen = verify_run(task.run, tell)
    except MemoryError as error:
        return _raised(RunEnd.OUT_OF_MEMORY, in_one_line(error), "use smaller inputs")
    except ParitasError as error:
        return _raised(RunEnd.RAISED, str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001  (it becomes the row's finding)
        import traceback

        traceback.print_exc()
        reason = in_one_line(error, _LONGEST_REASON, whole=True)
        is_memory = isinstance(error, torch.OutOfMemoryError)
        ended = RunEnd.OUT_OF_MEMORY if is_memory else RunEnd.RAISED
        return _raised(ended, reason, "the end of its log has the traceback")
    small, counts = trimmed(verdict)
    return _Message(ended=RunEnd.VERDICT, verdict=small, counts=counts, versions=seen)


def _raised(ended: RunEnd, reason: str, advice: str = "") -> _Message:
    verdict = without_verdict(reason, advice)
    return _Message(ended=ended, verdict=verdict, counts=_counts(verdict))


def _send(channel: int, message: _Message) -> None:
    content = json_of(message) + b"\n"
    while content:
        content = content[os.write(channel, content) :]


def _be_killed_first() -> None:
    """If memory runs out, let the system kill this process first; write no core files."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")


def _die_with_parent() -> None:
    """End this process when its parent is killed."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def check_system() -> None:
    """Raise `UsageError` on systems where processes cannot be watched."""
    if sys.platform == "win32":
        raise UsageError("paritas sweep does not run on win32: use Linux or macOS")


def libraries_of(runs: Iterable[SweepRun]) -> tuple[str, ...]:
    """What is imported before runs are forked: `hf`, `timm`, `kernels` ..."""
    known = {KERNELS if run.kernel is not None else run.target.partition(":")[0] for run in runs}
    return tuple(sorted(name for name in known if preloaded_modules((name,), own=False)))
