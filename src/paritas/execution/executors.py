"""Who does the work: threads, processes, a cluster, or any executor that the caller brings.

Nothing here imports torch at the top: a new process first says how many threads torch may use.
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

# Full ones are so many times as rare as the next lesser ones.
_SELDOM = 1000
# What was in force before each use that is not over yet: the setting is one for all threads, and
# what the last of them puts back has to be what the first one found.
_thresholds_before: list[tuple[int, int, int]] = []
_thresholds_lock = threading.Lock()


@contextlib.contextmanager
def few_full_collections() -> Iterator[None]:
    """Within, Python seldom goes over all objects there are.

    A table of 50,000 rows is a million objects that stay, and looking through all of them again
    and again takes as long as matching does. What is young is looked through as often as ever.
    """
    with _thresholds_lock:
        _thresholds_before.append(gc.get_threshold())
        gc.set_threshold(*_thresholds_before[-1][:2], max(_thresholds_before[-1][2], _SELDOM))
    try:
        yield
    finally:
        with _thresholds_lock:
            gc.set_threshold(*_thresholds_before.pop())


# --- Whose work it is -----------------------------------------------------------------------------

_thread = threading.local()


@contextlib.contextmanager
def working(session: str) -> Iterator[None]:
    """What is done within is a worker's, for the work of that name.

    Args:
        session: empty where it is done in the process that hands out the work.
    """
    before = session_of_work()
    _thread.session = session
    try:
        yield
    finally:
        _thread.session = before


def session_of_work() -> str | None:
    """What `working` was told; None outside of it."""
    session: str | None = getattr(_thread, "session", None)
    return session


# --- Executors ------------------------------------------------------------------------------------

# Work comes in batches, of which only so many are under way that memory stays bounded. A worker
# that dies costs its own batch, no other.

_Batch = TypeVar("_Batch")
_Result = TypeVar("_Result")

_DASK = "dask://"
_DASK_PATIENCE = "20s"
# By executor, what tells the work of one comparison from that of the next.
_sessions: weakref.WeakKeyDictionary[Executor, str] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Failed(Generic[_Batch]):
    """What became of a batch whose worker died."""

    batch: _Batch
    error: str


@contextlib.contextmanager
def executor_of(spec: str | Executor, jobs: int | None = None) -> Iterator[tuple[Executor, int]]:
    """An executor, and how many workers it has; what was made here is shut down in the end.

    Args:
        spec: `threads`, `processes`, `dask://host:port`, or an executor, which is left as it is.
        jobs: how many workers; as many as there are processors, or threads of the cluster, unless
            given.

    Raises:
        UsageError: there is no such executor, or it cannot be reached.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs={jobs}: give one worker at least")
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
                f"executor={spec!r}: give threads, processes, dask://host:port, or an executor of "
                f"concurrent.futures"
            )
        # Whoever brings an executor may record its dumps anew before the next comparison.
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
    """Apply a function to batches; gives each with its result.

    A batch whose worker died is tried once more, with no other beside it that might have been the
    reason. What the function itself raises ends it all: what waits is cancelled, and the error is
    raised here.

    Args:
        function: must be importable by name where work goes to other processes.
        batches: taken from only as far as there is room.
        ahead: how many may be under way.
        ordered: give results in the order of the batches; otherwise each as soon as it is there.
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
    """The function as it goes to a worker."""

    function: Callable[[_Batch], _Result]
    session: str

    def __call__(self, batch: _Batch) -> _Result:
        with working(self.session):
            return self.function(batch)


def _session_of(executor: Executor) -> str:
    """Empty where workers share the memory of this process."""
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
    """Whether it is the worker that failed, or its memory: nothing that the function means."""
    if isinstance(error, (BrokenExecutor, CancelledError, MemoryError)):
        return True
    # Of a cluster, which may not be installed: a killed worker, a connection that broke.
    return type(error).__module__.partition(".")[0] == "distributed"


def count_processors() -> int:
    """Those that this process may use."""
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
    """Torch's own threads and ours together are not to be more than there are processors."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(max(before // workers, 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Processes(Executor):
    """Processes that are started afresh once one of them died."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pool = self._made()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As every executor does."""
        try:
            return self._pool.submit(fn, *args, **kwargs)
        except BrokenExecutor:
            self._pool.shutdown(wait=False)
            self._pool = self._made()
            return self._pool.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002  (the signature of executors)
        """As every executor does."""
        self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)

    def _made(self) -> ProcessPoolExecutor:
        # To fork a process whose threads hold locks may hang.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._workers, context, initializer=_prepare_worker)


def _prepare_worker() -> None:
    """In a new process, before torch is imported."""
    os.environ["OMP_NUM_THREADS"] = "1"
    # The one who started it decides what an interruption means.
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
        raise UsageError(f"executor='{_DASK}': give the scheduler's host and port behind it")
    try:
        client = distributed.Client(
            f"tcp://{address}", timeout=_DASK_PATIENCE, set_as_default=False
        )
    except (OSError, ValueError) as error:
        raise UsageError(
            f"executor='{_DASK}{address}': no scheduler of dask answers there ({error})"
        ) from error
    with client:
        try:
            client.wait_for_workers(1, timeout=_DASK_PATIENCE)
        except TimeoutError as error:
            raise UsageError(
                f"executor='{_DASK}{address}': its cluster has no workers after {_DASK_PATIENCE}"
            ) from error
        threads = max(sum(client.nthreads().values()), 1)
        # What has the same arguments is not the same work: a batch may be tried again.
        executor = client.get_executor(pure=False)
        try:
            yield executor, threads
        finally:
            executor.shutdown(wait=False)
