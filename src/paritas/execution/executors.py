"""Executors: threads, processes, a cluster, or any executor of the caller.

Nothing here imports torch at the top: a new process first limits the number of torch's threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import multiprocessing
import os
import signal
import threading
import uuid
import weakref
from collections import deque
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# --- Python's garbage collector, while a large table grows ----------------------------------------

# A full collection after this many collections of the younger generation.
_SELDOM = 1000
# The thresholds before each use in progress: all threads share the setting, and the last user must
# restore what the first one found.
_thresholds_before: list[tuple[int, int, int]] = []
_thresholds_lock = threading.Lock()


@contextlib.contextmanager
def few_full_collections() -> Iterator[None]:
    """Make full garbage collections rare inside the block.

    A table of 50,000 rows has a million objects that stay, and scanning all of them repeatedly
    takes as long as matching. Young objects are collected as often as before.
    """
    with _thresholds_lock:
        _thresholds_before.append(gc.get_threshold())
        gc.set_threshold(*_thresholds_before[-1][:2], max(_thresholds_before[-1][2], _SELDOM))
    try:
        yield
    finally:
        with _thresholds_lock:
            gc.set_threshold(*_thresholds_before.pop())


# --- Which session a worker works for -------------------------------------------------------------

_thread = threading.local()


@contextlib.contextmanager
def working(session: str) -> Iterator[None]:
    """Mark the block as a worker's work for a session.

    Args:
        session: empty in the process that distributes the work.
    """
    before = session_of_work()
    _thread.session = session
    try:
        yield
    finally:
        _thread.session = before


def session_of_work() -> str | None:
    """The session of the surrounding `working` block; None outside of one."""
    session: str | None = getattr(_thread, "session", None)
    return session


# --- Executors ------------------------------------------------------------------------------------

# Work comes in batches, and only a limited number run at once, to bound memory. A worker that dies
# loses only its own batch.

_Batch = TypeVar("_Batch")
_Result = TypeVar("_Result")

_DASK = "dask://"
_DASK_PATIENCE = "20s"
# By executor, an id that separates the work of one comparison from that of the next.
_sessions: weakref.WeakKeyDictionary[Executor, str] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Failed(Generic[_Batch]):
    """The result of a batch whose worker died."""

    batch: _Batch
    error: str


@contextlib.contextmanager
def executor_of(spec: str | Executor, jobs: int | None = None) -> Iterator[tuple[Executor, int]]:
    """Provide an executor and its number of workers; an executor made here is shut down at the end.

    Args:
        spec: `threads`, `processes`, `dask://host:port`, or an executor, which is not shut down.
        jobs: number of workers; by default the number of processors, or of the cluster's threads.

    Raises:
        UsageError: there is no such executor, or it cannot be reached.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs={jobs}: the number of jobs must be 1 or more")
    with contextlib.ExitStack() as stack:
        if isinstance(spec, Executor):
            executor, workers = spec, jobs or count_processors()
        elif spec == "threads":
            workers = jobs or count_processors()
            stack.enter_context(_torch_threads(workers))
            executor = stack.enter_context(_closing(ThreadPoolExecutor(workers, "paritas")))
        elif spec == "processes":
            workers = jobs or count_processors()
            executor = stack.enter_context(_closing(_Processes(workers)))
        elif isinstance(spec, str) and spec.startswith(_DASK):
            executor, threads = stack.enter_context(_connect_dask(spec.removeprefix(_DASK)))
            workers = min(jobs or threads, threads)
        else:
            raise UsageError(
                f"executor={spec!r}: use threads, processes, dask://host:port, or an executor of "
                f"concurrent.futures"
            )
        # The caller of an executor may record new dumps before the next comparison.
        stack.callback(_sessions.pop, executor, None)
        yield executor, workers


def run_batches(
    executor: Executor,
    function: Callable[[_Batch], _Result],
    batches: Iterable[_Batch],
    *,
    ahead: int,
    ordered: bool = True,
) -> Iterator[tuple[_Batch, _Result | Failed[_Batch]]]:
    """Apply a function to batches; yields each with its result.

    A batch whose worker died is tried once more, alone, because another batch may have been the
    cause. An exception of the function itself cancels all waiting batches and is raised here.

    Args:
        function: must be importable by name if work goes to other processes.
        batches: consumed only as fast as there is room.
        ahead: how many may run at once.
        ordered: yield results in the order of the batches; otherwise each as soon as it is ready.
    """
    work = _WorkerFunction(function, _session_of(executor))
    pending: deque[tuple[_Batch, Future[_Result]]] = deque()
    remaining = iter(batches)
    try:
        while True:
            while len(pending) < max(ahead, 1):
                batch = next(remaining, _END)
                if batch is _END:
                    break
                pending.append((batch, _submit(executor, work, batch)))
            if not pending:
                return
            at = 0 if ordered else _first_done(pending)
            batch, future = pending[at]
            result = _take_result(batch, future)
            if isinstance(result, Failed):
                wait([other for _, other in pending])
                result = _take_result(batch, _submit(executor, work, batch))
            del pending[at]
            yield batch, result
    finally:
        for _, future in pending:
            future.cancel()


_END: Any = object()


def _first_done(pending: deque[tuple[_Batch, Future[_Result]]]) -> int:
    wait([future for _, future in pending], return_when=FIRST_COMPLETED)
    return next(at for at, (_, future) in enumerate(pending) if future.done())


@dataclasses.dataclass(frozen=True)
class _WorkerFunction(Generic[_Batch, _Result]):
    """The function as it is sent to a worker."""

    function: Callable[[_Batch], _Result]
    session: str

    def __call__(self, batch: _Batch) -> _Result:
        with working(self.session):
            return self.function(batch)


def _session_of(executor: Executor) -> str:
    """The id of the work; empty if workers share the memory of this process."""
    if isinstance(executor, ThreadPoolExecutor):
        return ""
    return _sessions.setdefault(executor, uuid.uuid4().hex)


def _submit(
    executor: Executor, work: Callable[[_Batch], _Result], batch: _Batch
) -> Future[_Result]:
    try:
        return executor.submit(work, batch)
    except Exception as error:
        if not _is_death(error):
            raise
        failed: Future[_Result] = Future()
        failed.set_exception(error)
        return failed


def _take_result(batch: _Batch, future: Future[_Result]) -> _Result | Failed[_Batch]:
    try:
        return future.result()
    except Exception as error:
        if not _is_death(error):
            raise
        return Failed(batch, f"{type(error).__name__}: {error}".removesuffix(": "))


def _is_death(error: BaseException) -> bool:
    """Whether the worker or its memory failed, and not the function."""
    if isinstance(error, (BrokenExecutor, CancelledError, MemoryError)):
        return True
    # Errors of dask, which may not be installed: a killed worker, a broken connection.
    return type(error).__module__.partition(".")[0] == "distributed"


def count_processors() -> int:
    """The number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _closing(executor: Executor) -> Iterator[Executor]:
    try:
        yield executor
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _torch_threads(workers: int) -> Iterator[None]:
    """Limit torch's threads: together with ours, they should not exceed the processors."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(max(before // workers, 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Processes(Executor):
    """A pool of processes that is restarted if one of them dies."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pool = self._made()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a call; see `Executor.submit`."""
        try:
            return self._pool.submit(fn, *args, **kwargs)
        except BrokenExecutor:
            self._pool.shutdown(wait=False)
            self._pool = self._made()
            return self._pool.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002  (the signature of executors)
        """Shut the pool down; see `Executor.shutdown`."""
        self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)

    def _made(self) -> ProcessPoolExecutor:
        # Forking a process whose threads hold locks may hang.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._workers, context, initializer=_prepare_worker)


def _prepare_worker() -> None:
    """Configure a new process before torch is imported."""
    os.environ["OMP_NUM_THREADS"] = "1"
    # The parent process handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def _connect_dask(address: str) -> Iterator[tuple[Executor, int]]:
    try:
        distributed: Any = importlib.import_module("distributed")  # it has no types
    except ImportError as error:
        raise UsageError(
            f"executor='{_DASK}{address}' needs dask, which is not installed: "
            f"pip install 'paritas[dask]'"
        ) from error
    if not address:
        raise UsageError(f"executor='{_DASK}': add the scheduler's host and port")
    try:
        client = distributed.Client(
            f"tcp://{address}", timeout=_DASK_PATIENCE, set_as_default=False
        )
    except (OSError, ValueError) as error:
        raise UsageError(
            f"executor='{_DASK}{address}': no dask scheduler answers there ({error})"
        ) from error
    with client:
        try:
            client.wait_for_workers(1, timeout=_DASK_PATIENCE)
        except TimeoutError as error:
            raise UsageError(
                f"executor='{_DASK}{address}': the cluster has no workers after {_DASK_PATIENCE}"
            ) from error
        threads = max(sum(client.nthreads().values()), 1)
        # The same arguments are not the same work: a batch may be tried again.
        executor = client.get_executor(pure=False)
        try:
            yield executor, threads
        finally:
            executor.shutdown(wait=False)
