"""One recording: what is wanted of which step, and the way of each value to the disk."""

from __future__ import annotations

import datetime as dt
import os
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from paritas._torch.tensors import local_part
from paritas.dumps.writing import DumpWriter
from paritas.errors import UsageError
from paritas.files.folders import run_identity
from paritas.files.records import Header
from paritas.recording.pipeline import (
    CopyPool,
    PendingSummary,
    Pipeline,
    RecordingJob,
    SessionOptions,
    Snapshot,
    kind_of,
    rank_and_world,
)
from paritas.recording.selection import Sieve
from paritas.settings.versions import own_version

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from paritas.compat.ge_writing import Operator, SiteKey
    from paritas.files.records import Observed, Site, Source
    from paritas.recording.selection import Selection, Within

_LONGEST_VALUE = 1000
_PLAIN = frozenset({Tensor, torch.nn.Parameter})


class RecordingSession:
    """Takes values from hooks, and hands them to the writer.

    Attributes:
        step: the number of the present step.
        active: whether values are wanted now; hooks ask this first.
        rank: this process among those of the run.
    """

    def __init__(
        self, path: str | os.PathLike[str], selection: Selection, options: SessionOptions
    ) -> None:
        """Open the dump; refuses a folder that is not empty."""
        self.selection = selection
        self.options = options
        self.path = Path(path)
        self.rank, world_size = rank_and_world()
        self.step = 0
        self.sieve = Sieve(selection)
        self._header = Header(
            run=run_identity(self.rank, world_size),
            rank=self.rank,
            world_size=world_size,
            created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            torch=str(torch.__version__),
            paritas=own_version(),
            program=" ".join(sys.argv[:1]),
            data=options.data,
            layout=options.layout,
            selection=selection.describe(),
        )
        self._wanted = selection.wants_rank(self.rank)
        self._paused = False
        self._closed = False
        self._entered: set[Hashable] = set()
        self._calls: dict[str, int] = {}
        self._places: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known: set[Hashable] = set()
        self._on_device = options.data == "stats"
        self._sequence = 0
        self._lost: list[str] = []
        self._pool = CopyPool(options.queue_bytes // 4)
        self._lock = threading.RLock()
        self._writer: DumpWriter | None = None
        self._pipeline: Pipeline | None = None
        if self._wanted:
            self._writer = DumpWriter(
                self.path, self._header, overwrite=options.overwrite, last=options.last
            )
            self._pipeline = Pipeline(self._writer, options)
        self.active = False
        self._update()
        _sessions.add(self)

    # --- steps --------------------------------------------------------------------------------

    def enter(self, key: Hashable) -> None:
        """Say that an outermost part of the program is about to run."""
        if self.options.stepping == "manual" or self._paused:
            return
        with self._lock:
            if key in self._entered:
                self._advance()
            self._entered.add(key)

    def advance(self) -> None:
        """End the step by hand."""
        if self.options.stepping != "manual":
            raise UsageError(
                'steps end by themselves here; to end them by hand, ask for stepping="manual"'
            )
        with self._lock:
            self._advance()

    def next_call(self, name: str) -> int:
        """Which call of that name this is in the step."""
        with self._lock:
            count = self._calls.get(name, 0)
            self._calls[name] = count + 1
            return count

    def pause(self) -> None:
        """Record nothing until `resume`; no step passes meanwhile."""
        self._paused = True
        self._update()

    def resume(self) -> None:
        """Go on recording."""
        self._paused = False
        self._update()

    def keep(self) -> None:
        """Keep for good the steps that are in the ring now."""
        if not self.options.last:
            raise UsageError("every step is kept already; last=k asks for a ring of the last k")
        with self._lock:
            if self._pipeline is not None:
                self._pipeline.keep()

    def _advance(self) -> None:
        self.sieve.saw_step(self.step)
        self.step += 1
        self._entered.clear()
        self._calls.clear()
        self._places.clear()
        if self.options.forgets:
            self._known.clear()
        self._update()

    def _update(self) -> None:
        self.active = (
            self._wanted
            and not self._paused
            and not self._closed
            and self.selection.wants_step(self.step)
        )

    # --- values -------------------------------------------------------------------------------

    def wants(self, site: Site, within: tuple[Within, ...] = ()) -> bool:
        """Whether a value seen there is to be recorded; see `Sieve.wants`."""
        return self.active and self.sieve.wants(site, within)

    def put(self, site: Site, value: Any) -> None:
        """Record a value that is wanted: a tensor as it is now, or whatever else it is."""
        with self._lock:  # gradients come in threads of their own
            if isinstance(value, Tensor):
                self._put_tensor(site, value)
            else:
                self._put_value(site, value)

    def _put_value(self, site: Site, value: Any) -> None:
        text = repr(value)
        if len(text) > _LONGEST_VALUE:
            text = text[: _LONGEST_VALUE - 3] + "..."
        self._submit(site, None, text)

    def _put_tensor(self, site: Site, tensor: Tensor) -> None:
        part = None if type(tensor) in _PLAIN else local_part(tensor)
        placement = None
        if part is not None:
            placement = part.placement
            tensor = part.local
        kind = kind_of(tensor)
        facts = kind.facts
        plain = tensor.detach() if facts.requires_grad or type(tensor) is not Tensor else tensor
        snapshot = pending = None
        try:
            if self._on_device and plain.is_cuda:
                pending = PendingSummary(plain, placement)
            else:
                # Files of whole calls hold all that belongs to them, again and again.
                known = self._known if self.options.layout in ("packed", "msit") else set()
                snapshot = Snapshot(plain, kind, placement, known, self._pool)
        except UsageError as error:
            # A kind of tensor that cannot be stored: said in its place, and the rest goes on.
            self._put_value(site, f"{type(tensor).__name__} not stored: {error}")
            return
        alias_of = self._alias_of(plain) if plain.layout is torch.strided else None
        self._submit(site, facts, None, alias_of, placement, snapshot, pending)

    def _alias_of(self, tensor: Tensor) -> int | None:
        """The first record of this step that lies in the same memory, if that is still its own."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if not place:
            return None
        earlier = self._places.get(place)
        if earlier is not None and not earlier[0].expired():
            return earlier[1]
        self._places[place] = (StorageWeakRef(storage), self._sequence)
        return None

    def _submit(self, *facts: Any) -> None:
        job = RecordingJob(self._sequence, self.step, *facts)
        self._sequence += 1
        if self._pipeline is None:
            return
        try:
            self._pipeline.submit(job)
        except BaseException:
            # What is lost is said once, to whoever runs the program; then it is let alone.
            self._wanted = False
            self._update()
            raise

    # --- what the dump says of itself ---------------------------------------------------------

    def observed(self, what: Observed) -> None:
        """Say whether looking at a graph changed what it computes."""
        self._describe(observed=(*self._header.observed, what))

    def note(self, text: str) -> None:
        """Say something that a reader of the dump should know, once."""
        if text not in self._header.notes:
            self._describe(notes=(*self._header.notes, text))

    def lose(self, text: str) -> None:
        """Say that something which was asked for cannot be recorded; `close` will raise it."""
        self.note(text)
        self._lost.append(text)

    def source(self, source: Source, *, taps: bool = False, fusion: str = "on") -> None:
        """Say which program is looked at."""
        sources = tuple(dict.fromkeys((*self._header.sources, source)))
        self._describe(sources=sources, taps=taps or self._header.taps, fusion=fusion)

    def name_operators(self, operators: Mapping[SiteKey, Operator]) -> None:
        """Say how Ascend's graph engine would call what is recorded."""
        if self._writer is not None:
            self._writer.name_operators(operators)

    def _describe(self, **changes: Any) -> None:
        with self._lock:
            self._header = msgspec.structs.replace(self._header, **changes)
            if self._writer is not None and not self._closed:
                self._writer.describe(self._header)

    def close(self, *, raising: bool = True) -> None:
        """Write what is queued and close the dump; then raise what went wrong.

        Args:
            raising: False where another exception is on its way already.
        """
        if self._closed:
            return
        self.sieve.saw_step(self.step)
        self._closed = True
        self._update()
        failure: BaseException | None = None
        try:
            if self._pipeline is not None:
                self._pipeline.finish()
        except BaseException as error:  # noqa: BLE001  (raised below, when the dump is closed)
            failure = error
            self._header = msgspec.structs.replace(
                self._header, notes=(*self._header.notes, f"recording failed: {error}")
            )
        if self._writer is not None:
            self._writer.close(self._header, complete=failure is None)
        # Whoever keeps the capture does not keep the memory that its copies were made in.
        self._pool, self._known, self._places = CopyPool(0), set(), {}
        if not raising:
            return
        if failure is not None:
            raise failure
        self._complain()

    def leave_to_parent(self) -> None:
        """End it in a forked process, which has the writer's files, but not its thread.

        Values would wait there for ever, or be written into the middle of the parent's.
        """
        self._lock = threading.RLock()  # a thread that is not here may have held it
        self._closed = True
        self._pipeline = None
        self._update()

    def _complain(self) -> None:
        if self._writer is None:
            return
        problems = [*self._lost, *self.sieve.unmatched()]
        if self._sequence == 0 and not problems:
            problems = ["no value came by: run the program while it is recorded"]
        if problems:
            first = f"not all that was asked for came; {self._sequence} values are in {self.path}"
            raise UsageError("\n  ".join([first, *problems]))


_sessions: weakref.WeakSet[RecordingSession] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for session in list(_sessions):
        session.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
