"""The way of recorded values from the program's thread to the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from paritas.dumps.records import Placement, Site, TensorFacts
from paritas.dumps.writing import Entry
from paritas.recording.background import Background
from paritas.recording.snapshots import Snapshot
from paritas.recording.summaries import Asked, PendingSummary, Summaries, Summary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.dumps.writing import DumpWriter
    from paritas.recording.options import SessionOptions

__all__ = ["KEEP", "Job", "Pipeline"]

KEEP = object()  # a job that pins what is in the ring
_NOTHING = Summary()


class Job(msgspec.Struct, gc=False):
    """A value on its way: everything but what the writer's thread finds out."""

    sequence: int
    step: int
    site: Site
    tensor: TensorFacts | None = None
    value: str | None = None
    alias_of: int | None = None
    placement: Placement | None = None
    snapshot: Snapshot | None = None
    pending: PendingSummary | None = None


class Pipeline:
    """Takes values in the order in which they were seen, and writes them in that order."""

    def __init__(self, writer: DumpWriter, options: SessionOptions) -> None:
        """Begin the thread, unless values are to be written at once."""
        self._writer = writer
        self._whole = options.data == "tensor"
        self._forgets = options.forgets
        self._summaries = Summaries(sketches=not self._whole)
        self._background: Background[Any] = Background(self._write, options.queue_bytes)

    def submit(self, job: Job) -> None:
        """Hand a value on, waiting for room."""
        self._background.submit(job, job.snapshot.nbytes if job.snapshot is not None else 0)

    def keep(self) -> None:
        """Pin what the ring will hold when all that was submitted so far is written."""
        self._background.submit(KEEP, 0)

    def finish(self) -> None:
        """Write everything, and raise what failed."""
        self._background.finish()

    def _write(self, jobs: list[Any]) -> None:
        batch: list[Job] = []
        for job in jobs:
            if job is KEEP:
                self._write_batch(batch)
                batch = []
                self._writer.keep()
            else:
                batch.append(job)
        self._write_batch(batch)

    def _write_batch(self, batch: list[Job]) -> None:
        if not batch:
            return
        values = [None if job.snapshot is None else job.snapshot.wait() for job in batch]
        found = self._summaries.of(
            [
                Asked(job.step, value, job.snapshot.key, job.tensor, job.placement)
                for job, value in zip(batch, values, strict=True)
                if job.snapshot is not None and job.tensor is not None
            ]
        )
        self._writer.add_many(self._entries(batch, values, iter(found)))
        for job in batch:
            if job.snapshot is not None:
                job.snapshot.release()
        if self._forgets:
            self._summaries.forget(batch[-1].step)

    def _entries(
        self, batch: list[Job], values: list[Tensor | None], found: Iterator[Summary]
    ) -> list[Entry]:
        entries = []
        for job, value in zip(batch, values, strict=True):
            summary, digest = _NOTHING, ""
            if job.snapshot is not None and job.tensor is not None:
                summary, digest = next(found), job.snapshot.digest
            elif job.pending is not None:
                summary = job.pending.finish()
            entries.append(
                Entry(
                    sequence=job.sequence,
                    step=job.step,
                    site=job.site,
                    tensor=job.tensor,
                    value=job.value,
                    stored=value if self._whole else None,
                    digest=digest,
                    statistics=summary.statistics,
                    sketch=summary.sketch,
                    alias_of=job.alias_of,
                    placement=job.placement,
                )
            )
        return entries
