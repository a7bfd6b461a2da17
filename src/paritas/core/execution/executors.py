"""Executors: threads, processes, a cluster, or any executor of the caller.

Nothing here imports torch at the top: a new process first limits the number of torch's threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import importlib.metadata
import logging
import multiprocessing
import os
import signal
import threading
import uuid
import weakref
from collections import deque
from concurrent.futures import (
    ALL_COMPLETED,
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

from paritas.core.errors import ClusterLostError, UsageError, in_one_line
from paritas.core.settings import own_version
from paritas.core.time_limit import TimeLimit

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
# How often a cluster is looked at while it works, and how long it may be without workers, which a
# cluster that scales itself is for a while.
_LOOK_SECONDS, _WORKERLESS_SECONDS = 2.0, 120.0
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
    cause. An exception of the function itself cancels all waiting batches and is raised here; so
    does the loss of a whole cluster, as `ClusterLostError`.

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
            at = _first_done(executor, pending, ordered=ordered)
            batch, future = pending[at]
            result = _take_result(batch, future)
            if isinstance(result, Failed):
                _wait(executor, [other for _, other in pending], ALL_COMPLETED)
                again = _submit(executor, work, batch)
                _wait(executor, [again], ALL_COMPLETED)
                result = _take_result(batch, again)
            del pending[at]
            yield batch, result
    finally:
        for _, future in pending:
            future.cancel()


_END: Any = object()


def _first_done(
    executor: Executor, pending: deque[tuple[_Batch, Future[_Result]]], *, ordered: bool
) -> int:
    futures = [future for _, future in pending][: 1 if ordered else None]
    _wait(executor, futures, FIRST_COMPLETED)
    return next(at for at, future in enumerate(futures) if future.done())


def _wait(executor: Executor, futures: list[Future[Any]], until: str) -> None:
    """Wait for futures; a cluster is looked at meanwhile, since nobody reports its loss."""
    if not isinstance(executor, _Cluster):
        wait(futures, return_when=until)
        return
    while not wait(futures, timeout=_LOOK_SECONDS, return_when=until).done or (
        until == ALL_COMPLETED and not all(future.done() for future in futures)
    ):
        executor.check()


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
        self._pool = self._make_pool()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a call; see `Executor.submit`."""
        try:
            return self._pool.submit(fn, *args, **kwargs)
        except BrokenExecutor:
            self._pool.shutdown(wait=False)
            self._pool = self._make_pool()
            return self._pool.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002  (the signature of executors)
        """Shut the pool down; see `Executor.shutdown`."""
        self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)

    def _make_pool(self) -> ProcessPoolExecutor:
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
    with _closing_client(client):
        try:
            client.wait_for_workers(1, timeout=_DASK_PATIENCE)
        except TimeoutError as error:
            raise UsageError(
                f"executor='{_DASK}{address}': the cluster has no workers after {_DASK_PATIENCE}"
            ) from error
        _check_workers(client, address)
        cluster = _Cluster(client, address)
        try:
            yield cluster, max(sum(client.nthreads().values()), 1)
        finally:
            cluster.shutdown(wait=False)


@contextlib.contextmanager
def _closing_client(client: Any) -> Iterator[None]:
    """Close the connection, however the block ends."""
    log = logging.getLogger("distributed.client")
    try:
        yield
    finally:
        # If the scheduler is gone, closing fails, and dask logs how at length: we have said it.
        before, log.disabled = log.disabled, log.disabled or client.status != "running"
        with contextlib.suppress(Exception):
            client.close(timeout=_LOOK_SECONDS)
        log.disabled = before


def _check_workers(client: Any, address: str) -> None:
    """Refuse workers without paritas, or with another version: they could not read their orders."""
    local_version = own_version()
    versions_by_worker = client.run(importlib.metadata.version, "paritas", on_error="return")
    for worker, version in versions_by_worker.items():
        if version != local_version:
            has = (
                f"has paritas {version}"
                if isinstance(version, str)
                else f"has no paritas ({in_one_line(version)})"
            )
            raise UsageError(
                f"executor='{_DASK}{address}': the worker at {worker} {has}: install paritas "
                f"{local_version}, as here, in the environment of every worker"
            )


class _Cluster(Executor):
    """The workers of a scheduler of dask; whoever waits for them looks whether they are there."""

    def __init__(self, client: Any, address: str) -> None:
        self._client, self._address = client, address
        # The same arguments are not the same work: a batch may be tried again.
        self._executor: Executor = client.get_executor(pure=False)
        self._without_workers = TimeLimit(_WORKERLESS_SECONDS)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a call; see `Executor.submit`."""
        self.check()
        return self._executor.submit(fn, *args, **kwargs)

    def check(self) -> None:
        """Raise `ClusterLostError` if the scheduler, or every worker for a while, is gone."""
        if self._client.status != "running":
            raise ClusterLostError(
                f"executor='{_DASK}{self._address}': the connection to the scheduler is lost; "
                "look at its log, start it again, and repeat the command"
            )
        try:
            workers = self._client.scheduler_info(n_workers=1)["workers"]
        except OSError:  # being lost: its status says so next time
            return
        if workers:
            self._without_workers.begin()
        elif self._without_workers.is_over:
            raise ClusterLostError(
                f"executor='{_DASK}{self._address}': the cluster has had no workers for "
                f"{_WORKERLESS_SECONDS:.0f} s; look at their logs, start them, and repeat the "
                "command"
            )

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002  (the signature of executors)
        """Cancel what waits; see `Executor.shutdown`."""
        if self._client.status == "running":
            with contextlib.suppress(Exception):  # it may be lost just now
                self._executor.shutdown(wait=wait)

    def tell_workers(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function once in the process of each worker, as far as they can be reached."""
        if self._client.status == "running":
            with contextlib.suppress(Exception):
                self._client.run(function, *args, on_error="ignore")


def tell_workers(executor: Executor, function: Callable[..., Any], *args: Any) -> None:
    """Call a function once in the process of each worker of a cluster; elsewhere do nothing."""
    if isinstance(executor, _Cluster):
        executor.tell_workers(function, *args)
