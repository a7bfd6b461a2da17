"""One recording: which values of which steps are wanted, and handing them to the writer."""

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

from paritas.core.errors import UsageError
from paritas.core.settings import own_version
from paritas.core.torch_private.tensors import local_part
from paritas.formats.dumps.selection import SelectionFilter
from paritas.formats.dumps.writing import DumpWriter
from paritas.formats.files.records import NPY_LAYOUTS, Header, run_identity
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

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from paritas.formats.dumps.selection import Selection, Within
    from paritas.formats.files.records import Observed, Site, Source
    from paritas.formats.foreign.ge_calls import Operator, SiteKey

_LONGEST_VALUE = 1000
_PLAIN = frozenset({Tensor, torch.nn.Parameter})


class RecordingSession:
    """Takes values from hooks and hands them to the writer.

    Attributes:
        step: the number of the current step.
        active: whether values are wanted now; hooks check this first.
        rank: the rank of this process.
    """

    def __init__(
        self, path: str | os.PathLike[str], selection: Selection, options: SessionOptions
    ) -> None:
        """Open the dump, in a folder that must be empty."""
        self.selection = selection
        self.options = options
        self.path = Path(path)
        self.rank, world_size = rank_and_world()
        self.step = 0
        self.selection_filter = SelectionFilter(selection)
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
        """Note that an outermost part of the program is about to run."""
        if self.options.stepping == "manual" or self._paused:
            return
        with self._lock:
            if key in self._entered:
                self._advance()
            self._entered.add(key)

    def advance(self) -> None:
        """End the step manually."""
        if self.options.stepping != "manual":
            raise UsageError('steps end automatically: to call step(), use stepping="manual"')
        with self._lock:
            self._advance()

    def next_call(self, name: str) -> int:
        """The number of this call of that name in the step."""
        with self._lock:
            count = self._calls.get(name, 0)
            self._calls[name] = count + 1
            return count

    def pause(self) -> None:
        """Record nothing until `resume`; steps in between are not counted."""
        self._paused = True
        self._update()

    def resume(self) -> None:
        """Continue recording."""
        self._paused = False
        self._update()

    def keep(self) -> None:
        """Keep the steps that are now in the ring permanently."""
        if not self.options.last:
            raise UsageError("keep() needs last=k; without it, every step is kept anyway")
        with self._lock:
            if self._pipeline is not None:
                self._pipeline.keep()

    def _advance(self) -> None:
        self.selection_filter.saw_step(self.step)
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
        """Whether to record a value at this site; see `SelectionFilter.wants`."""
        return self.active and self.selection_filter.wants(site, within)

    def put(self, site: Site, value: Any) -> None:
        """Record a wanted value: a tensor as it is now, or the text of any other object."""
        with self._lock:  # gradients arrive in other threads
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
                # A file of a whole call must contain all its values, even repeated ones.
                stored_keys = (
                    self._known if self.options.layout in {"packed", *NPY_LAYOUTS} else set()
                )
                snapshot = Snapshot(plain, kind, placement, stored_keys, self._pool)
        except UsageError as error:
            # This kind of tensor cannot be stored: record the reason in its place.
            self._put_value(site, f"{type(tensor).__name__} not stored: {error}")
            return
        alias_of = self._alias_of(plain) if plain.layout is torch.strided else None
        self._submit(site, facts, None, alias_of, placement, snapshot, pending)

    def _alias_of(self, tensor: Tensor) -> int | None:
        """The first record of this step in the same memory, if that was not freed since."""
        storage = tensor.untyped_storage()
        memory_address = storage.data_ptr()
        if not memory_address:
            return None
        earlier = self._places.get(memory_address)
        if earlier is not None and not earlier[0].expired():
            return earlier[1]
        self._places[memory_address] = (StorageWeakRef(storage), self._sequence)
        return None

    def _submit(self, *facts: Any) -> None:
        job = RecordingJob(self._sequence, self.step, *facts)
        self._sequence += 1
        if self._pipeline is None:
            return
        try:
            self._pipeline.submit(job)
        except BaseException:
            # Report the loss once to the running program, then stop recording.
            self._wanted = False
            self._update()
            raise

    # --- the header ---------------------------------------------------------------------------

    def note_observed(self, what: Observed) -> None:
        """Note whether recording a graph changed what it computes."""
        self._describe(observed=(*self._header.observed, what))

    def note(self, text: str) -> None:
        """Add a note for readers of the dump, once."""
        if text not in self._header.notes:
            self._describe(notes=(*self._header.notes, text))

    def lose(self, text: str) -> None:
        """Note that a selected value cannot be recorded; `close` will raise it."""
        self.note(text)
        self._lost.append(text)

    def source(self, source: Source, *, taps: bool = False, fusion: str = "on") -> None:
        """Note what kind of program is recorded."""
        sources = tuple(dict.fromkeys((*self._header.sources, source)))
        self._describe(sources=sources, taps=taps or self._header.taps, fusion=fusion)

    def name_operators(self, operators: Mapping[SiteKey, Operator]) -> None:
        """Set the operator names that Ascend's graph engine would use."""
        if self._writer is not None:
            self._writer.name_operators(operators)

    def _describe(self, **changes: Any) -> None:
        with self._lock:
            self._header = msgspec.structs.replace(self._header, **changes)
            if self._writer is not None and not self._closed:
                self._writer.describe(self._header)

    def close(self, *, raising: bool = True) -> None:
        """Write what is queued and close the dump, then raise what went wrong.

        Args:
            raising: False if another exception is being raised already.
        """
        if self._closed:
            return
        self.selection_filter.saw_step(self.step)
        self._closed = True
        self._update()
        failure: BaseException | None = None
        try:
            if self._pipeline is not None:
                self._pipeline.finish()
        except BaseException as error:  # noqa: BLE001  (raised below, after closing the dump)
            failure = error
            self._header = msgspec.structs.replace(
                self._header, notes=(*self._header.notes, f"recording failed: {error}")
            )
        if self._writer is not None:
            self._writer.close(self._header, complete=failure is None)
        # A capture that is kept must not keep the memory of its copies.
        self._pool, self._known, self._places = CopyPool(0), set(), {}
        if not raising:
            return
        if failure is not None:
            raise failure
        self._complain()

    def leave_to_parent(self) -> None:
        """End the recording in a forked process, which has the writer's files but not its thread.

        Otherwise values would be queued forever, or be written between those of the parent.
        """
        self._lock = threading.RLock()  # a thread of the parent may have held it
        self._closed = True
        self._pipeline = None
        self._update()

    def _complain(self) -> None:
        if self._writer is None:
            return
        problems = [*self._lost, *self.selection_filter.report_unmatched()]
        if self._sequence == 0 and not problems:
            problems = ["nothing ran: run the program while it is being recorded"]
        if problems:
            first = f"part of the selection was not recorded; {self._sequence} values are in"
            raise UsageError("\n  ".join([f"{first} {self.path}", *problems]))


_sessions: weakref.WeakSet[RecordingSession] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for session in list(_sessions):
        session.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
