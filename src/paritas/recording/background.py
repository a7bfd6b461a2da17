"""Work done beside the program, in order, by one thread, within a bound of memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Background"]

Job = TypeVar("Job")

# Python runs one thread at a time: one that wakes for every job would stop the program for each.
# So jobs are done in batches, begun when so many wait, so many bytes, or for so long.
_BATCH_JOBS = 1024
_BATCH_BYTES = 16 * 2**20
_BATCH_SECONDS = 0.1


class Background(Generic[Job]):
    """A queue before one thread.

    The program waits when what is queued would exceed the bound: it is slowed down, and the memory
    does not grow. A job larger than the bound is let in alone. After a failure nothing more is
    done; it is raised to whoever submits next, and by `finish`.
    """

    def __init__(self, work: Callable[[list[Job]], None], most_bytes: int) -> None:
        """With no bytes to queue, the work is done by whoever submits it."""
        self._work = work
        self._most = most_bytes
        self._batch_bytes = min(_BATCH_BYTES, most_bytes // 2)
        self._waiting: list[Job] = []
        self._waiting_bytes = 0
        self._bytes = 0  # of what waits and of what is being worked on
        self._failure: BaseException | None = None
        self._ending = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if most_bytes > 0:
            # A daemon: Python joins others before it lets anybody close what feeds them.
            self._thread = threading.Thread(target=self._run, name="paritas-writer", daemon=True)
            self._thread.start()

    def submit(self, job: Job, nbytes: int) -> None:
        """Queue a job that holds so many bytes, waiting for room."""
        if self._thread is None:
            self._raise_failure()
            self._do([job])
            self._raise_failure()
            return
        with self._changed:
            while self._failure is None and self._bytes and self._bytes + nbytes > self._most:
                self._changed.notify_all()
                self._changed.wait()
            self._raise_failure()
            self._waiting.append(job)
            self._waiting_bytes += nbytes
            self._bytes += nbytes
            if self._is_batch() or len(self._waiting) == 1:
                self._changed.notify_all()

    def finish(self) -> None:
        """Wait until everything is done, end the thread, and raise what failed."""
        if self._thread is not None:
            with self._changed:
                self._ending = True
                self._changed.notify_all()
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def _is_batch(self) -> bool:
        return (
            len(self._waiting) >= _BATCH_JOBS
            or self._waiting_bytes >= self._batch_bytes
            or self._ending
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ending)
                self._changed.wait_for(self._is_batch, timeout=_BATCH_SECONDS)
                if not self._waiting:
                    return
                jobs, self._waiting = self._waiting, []
                nbytes, self._waiting_bytes = self._waiting_bytes, 0
            self._do(jobs)
            del jobs
            with self._changed:
                self._bytes -= nbytes
                self._changed.notify_all()
                if self._failure is not None:
                    return

    def _do(self, jobs: list[Job]) -> None:
        try:
            self._work(jobs)
        except BaseException as error:  # noqa: BLE001  (raised where the program can see it)
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
