"""How recorded values get to the disk: copies, statistics, and the writer thread."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import threading
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, get_args

import msgspec
import torch

from paritas.core.errors import UsageError
from paritas.core.numerics.bits import dtype_name, holds_numbers
from paritas.core.numerics.sketch import PendingSketch, begin_sketch
from paritas.core.numerics.statistics import Statistics, begin_statistics, summarize, summarize_all
from paritas.core.results.items import LocalPlacement
from paritas.formats.dumps.selection import Mode, Selection, check_one_of
from paritas.formats.files.records import Entry, Layout, Site, TensorFacts
from paritas.formats.files.tensor_bytes import as_stored, digest

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

    from torch import Tensor

    from paritas.formats.dumps.writing import DumpWriter


# --- How a recording is stored --------------------------------------------------------------------

Stepping = Literal["auto", "manual"]
QUEUE_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """How a recording is stored.

    Attributes:
        data: record whole tensors, or statistics only.
        layout: packed files; `msit`, one `.npy` file per tensor in torchair's tree; `ge`, one file
            per call in the tree of Ascend's graph engine; `msit-7.1.0` and `ge-7.1.0` are the trees
            of old releases.
        last: keep only this many of the last steps; 0 keeps all.
        overwrite: replace an earlier dump in the same folder.
        stepping: with `manual`, only `step()` ends a step: for gradient accumulation and
            generation.
        queue_bytes: how much data may be queued for writing before the program has to wait; 0
            writes before it continues. Another quarter of it is kept for future copies.
    """

    data: Literal["tensor", "stats"] = "tensor"
    layout: Layout = "packed"
    last: int = 0
    overwrite: bool = False
    stepping: Stepping = "auto"
    queue_bytes: int = QUEUE_BYTES

    @property
    def forgets(self) -> bool:
        """Whether values, or their statistics, are forgotten after their step."""
        return bool(self.last) or self.data == "stats"

    def __post_init__(self) -> None:
        check_one_of("data", self.data, ("tensor", "stats"))
        check_one_of("layout", self.layout, get_args(Layout))
        check_one_of("stepping", self.stepping, get_args(Stepping))
        for name in ("last", "queue_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise UsageError(f"{name} must be a whole number, 0 or more, got {value!r}")
        if self.data == "stats" and self.layout != "packed":
            raise UsageError(
                f'layout="{self.layout}" cannot hold statistics: use data="tensor" or '
                'layout="packed"'
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordingOptions(SessionOptions):
    """What is recorded, and how it is stored.

    Attributes:
        mode: record only inputs, only outputs, or all: `input`, `output` or `all`.
        steps: the steps to record, such as `[1, 2, 5]`, `range(10, 20)` or `"0|1|2-5"`.
        layers: names or globs of modules, nodes and parameters; a module includes everything inside
            it.
        ops: names or globs of operators (`aten.mm`, `mm`) and of module classes (`Linear`).
        ranks: the processes of a distributed run to record.
        phases: "forward" or "backward"; both by default.
        every: record every n-th step, from step 0.
    """

    mode: Mode = "all"
    steps: Any = None
    layers: str | Iterable[str] | None = None
    ops: str | Iterable[str] | None = None
    ranks: int | Iterable[int] | None = None
    phases: str | Iterable[str] | None = None
    every: int = 1

    def selection(self) -> Selection:
        """What is recorded, validated."""
        return Selection.of(
            mode=self.mode,
            steps=self.steps,
            layers=self.layers,
            ops=self.ops,
            ranks=self.ranks,
            phases=self.phases,
            every=self.every,
        )


def rank_and_world() -> tuple[int, int]:
    """Rank and world size, from torch's process group or torchrun's environment variables."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise UsageError(
            f"the environment variable RANK or WORLD_SIZE is not a number ({error}): unset them"
        ) from error


# --- The writer thread ----------------------------------------------------------------------------

Job = TypeVar("Job")

# Python runs one thread at a time: a thread that wakes for every job would stop the program each
# time. So jobs are done in batches, by number, bytes, or time.
_BATCH_JOBS = 1024
_BATCH_BYTES = 16 * 2**20
_BATCH_SECONDS = 0.1


class Background(Generic[Job]):
    """A queue with one worker thread.

    If the queue would exceed the limit, the program waits, so memory does not grow. A job larger
    than the limit is queued alone. After a failure nothing more is done; the next `submit` and
    `finish` raise it.
    """

    def __init__(self, work: Callable[[list[Job]], None], most_bytes: int) -> None:
        """With `most_bytes` 0, `submit` does the work itself."""
        self._work = work
        self._most = most_bytes
        self._batch_bytes = min(_BATCH_BYTES, most_bytes // 2)
        self._waiting: list[Job] = []
        self._waiting_bytes = 0
        self._bytes = 0  # of queued and running jobs
        self._failure: BaseException | None = None
        self._ending = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if most_bytes > 0:
            # A daemon: Python joins other threads before anything can close the queue.
            self._thread = threading.Thread(target=self._run, name="paritas-writer", daemon=True)
            self._thread.start()

    def submit(self, job: Job, nbytes: int) -> None:
        """Queue a job of that size, waiting for room."""
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
        """Wait until everything is done, end the thread, and raise any failure."""
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
        except BaseException as error:  # noqa: BLE001  (raised in the program's thread)
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


# --- Copies of tensors at one moment --------------------------------------------------------------


class TensorKind(NamedTuple):
    """What many tensors of a program have in common, computed once.

    Attributes:
        differs: how tensors with the same bytes may differ. An expanded tensor is stored once, and
            its bytes do not show how it was expanded.
        on_host: whether hashing them is cheap.
        simple: whether they can be stored as they are in memory, according to the facts.
        extent: bytes from the start of the memory to the end of the last value, if simple.
    """

    facts: TensorFacts
    differs: Hashable
    on_host: bool
    simple: bool
    extent: int


def kind_of(tensor: Tensor) -> TensorKind:
    """What is known of a tensor besides its values."""
    is_strided = tensor.layout is torch.strided
    return _make_kind(
        tensor.dtype,
        tensor.shape,
        tensor.stride() if is_strided else None,
        tensor.storage_offset() if is_strided else 0,
        tensor.device,
        tensor.requires_grad,
    )


@functools.lru_cache(maxsize=1 << 14)
def _make_kind(
    dtype: torch.dtype,
    shape: torch.Size,
    stride: tuple[int, ...] | None,
    offset: int,
    device: torch.device,
    requires_grad: bool,  # noqa: FBT001  (a key of the cache)
) -> TensorKind:
    facts = TensorFacts(
        dtype=dtype_name(dtype),
        shape=tuple(shape),
        stride=tuple(stride or ()),
        offset=int(offset),
        device=str(device),
        requires_grad=requires_grad,
    )
    simple = dtype in _QUICK and device.type == "cpu" and _is_row_major(facts.shape, stride)
    return TensorKind(
        facts,
        (facts.dtype, facts.shape if 0 in facts.stride else None),
        device.type != "cuda",
        simple,
        (facts.offset + math.prod(facts.shape)) * dtype.itemsize,
    )


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> bool:
    """Whether it is not empty, and its values are in order without gaps."""
    if stride is None or 0 in shape or 0 in stride:
        return False
    expected = 1
    for extent, step in zip(reversed(shape), reversed(stride), strict=True):
        if extent != 1 and step != expected:
            return False
        expected *= extent
    return True


class CopyPool:
    """Reuses the memory of written copies for later copies of the same size.

    Fresh memory is mapped page by page at the first access, which takes longer than the copy.
    """

    def __init__(self, most_bytes: int) -> None:
        """Keep at most this many bytes."""
        self._most = most_bytes
        self._bytes = 0
        self._free: dict[tuple[str, tuple[int, ...]], list[Tensor]] = {}

    def copy(self, tensor: Tensor, kind: TensorKind) -> Tensor:
        """Copy a tensor of a simple kind."""
        free = self._free.get((kind.facts.dtype, kind.facts.shape))
        try:
            room = free.pop() if free else None
        except IndexError:  # another thread took it
            room = None
        if room is None:
            return tensor.clone()
        self._bytes -= room.nbytes
        return room.copy_(tensor)

    def give(self, room: Tensor, kind: TensorKind) -> None:
        """Take the memory of a copy back."""
        if self._bytes + room.nbytes > self._most:
            # Sizes may have changed for good: memory of unused sizes would stay forever.
            self._free = {}
            self._bytes = 0
            if room.nbytes > self._most:
                return
        self._bytes += room.nbytes
        self._free.setdefault((kind.facts.dtype, kind.facts.shape), []).append(room)


class Snapshot:
    """The values of a tensor at one moment, on their way to the host.

    A CPU tensor is hashed in place, and copied only if its bytes are new. A GPU tensor is copied on
    the GPU, so the program can continue to write to it, and then transferred on a separate stream.

    Attributes:
        nbytes: the host memory that it uses.
        digest: hash of the bytes; for a GPU tensor only after `wait`.
    """

    # Most values were seen before, and only the first two are set.
    digest = ""
    key: Hashable = None
    nbytes = 0
    _host: Tensor | None = None
    _arrived: Any = None
    _pool: CopyPool | None = None

    def __init__(
        self,
        tensor: Tensor,
        kind: TensorKind,
        part: LocalPlacement | None,
        hashables: set[Hashable],
        pool: CopyPool,
    ) -> None:
        """Copy a tensor, unless it is known.

        Args:
            tensor: detached.
            kind: from `kind_of`.
            part: its placement in a distributed tensor.
            hashables: keys of values that need not be copied again; the new key is added.
            pool: memory for the copy.
        """
        if not kind.on_host:
            self._kind, self._part = kind, part
            self._fetch(tensor)
            return
        simple = kind.simple and _is_as_it_lies(tensor, kind)
        stored = tensor if simple else as_stored(tensor.cpu())
        self.digest = hashed = digest(stored)
        self.key = key = (hashed, kind.differs, part)
        if key in hashables:
            return
        hashables.add(key)
        if simple:
            self._host, self._kind, self._pool = pool.copy(tensor, kind), kind, pool
        else:
            self._host = _copy_bytes(stored) if _shares_memory(stored, tensor) else stored
        self.nbytes = self._host.nbytes

    def wait(self) -> Tensor | None:
        """The values on the host; None if they were known."""
        if self._arrived is not None and self._host is not None:
            self._arrived.synchronize()
            self._arrived = None
            self.digest = digest(self._host)
            self.key = (self.digest, self._kind.differs, self._part)
        return self._host

    def release(self) -> None:
        """Give the memory back, once the values are no longer used."""
        if self._pool is not None and self._host is not None:
            self._pool.give(self._host, self._kind)
        self._host = self._pool = None

    def _fetch(self, tensor: Tensor) -> None:
        stored = as_stored(tensor)
        if _shares_memory(stored, tensor):
            stored = _copy_bytes(stored)
        stream = _copy_stream(stored.device)
        stream.wait_stream(torch.cuda.current_stream(stored.device))
        with torch.cuda.stream(stream):
            self._host = torch.empty(stored.shape, dtype=stored.dtype, pin_memory=True)
            self._host.copy_(stored, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(stream)
        stored.record_stream(stream)
        self.nbytes = self._host.nbytes


def _is_as_it_lies(tensor: Tensor, kind: TensorKind) -> bool:
    """Whether a tensor of a simple kind really has its values in its memory."""
    return (
        type(tensor) is torch.Tensor
        and not tensor.is_neg()
        # The storage of an unused tensor may have been resized to 0.
        and tensor.untyped_storage().nbytes() >= kind.extent
    )


_QUICK = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64})


def _copy_bytes(stored: Tensor) -> Tensor:
    """Copy bytes: torch cannot copy every dtype, and normalises unusual bytes of bools."""
    # With new strides: an expanded tensor of one value may still have stride 0.
    flat = stored.as_strided((stored.numel(),), (1,)).view(torch.uint8).clone()
    return flat.view(stored.dtype).view(stored.shape)


def _shares_memory(stored: Tensor, tensor: Tensor) -> bool:
    return stored.data_ptr() == tensor.data_ptr()


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


# --- Statistics and sketches ----------------------------------------------------------------------


class TensorSummary(NamedTuple):
    """What is stored of a tensor in addition to its values, or instead of them."""

    statistics: Statistics | None = None
    sketch: Tensor | None = None


class SummaryRequest(NamedTuple):
    """Values to summarise; None if they were already summarised under the same key."""

    step: int
    values: Tensor | None
    key: Hashable
    facts: TensorFacts
    part: LocalPlacement | None


class Summaries:
    """Summarises tensors on the writer thread, and caches the results.

    In a dump of modules and operators, most tensors occur several times: as an output, as the next
    input, as an operator's result.
    """

    def __init__(self, *, sketches: bool) -> None:
        """Sketches are needed only if values are not stored."""
        self.sketches = sketches
        self._found: dict[Hashable, TensorSummary] = {}
        self._met: dict[Hashable, int] = {}

    def forget(self, step: int) -> None:
        """Drop what did not occur in this step; if it occurs again, its values come with it."""
        for key in [key for key, met in self._met.items() if met < step]:
            del self._met[key], self._found[key]

    def of(self, summary_requests: list[SummaryRequest]) -> list[TensorSummary]:
        """Summarise values, in order."""
        self._met.update(
            (summary_request.key, summary_request.step) for summary_request in summary_requests
        )
        summaries = self._found
        new = {
            summary_request.key: summary_request
            for summary_request in summary_requests
            if summary_request.values is not None and summary_request.key not in summaries
        }
        # Whole tensors with all values stored are summarised together.
        plain = {
            key: new_request.values
            for key, new_request in new.items()
            if new_request.values is not None
            and new_request.part is None
            and 0 not in new_request.facts.stride
            and holds_numbers(new_request.values.dtype)
        }
        rows = summarize_all(list(plain.values()), sketches=self.sketches)
        for key, row in zip(plain, rows, strict=True):
            summaries[key] = TensorSummary(row.statistics, row.sketch)
        for key, request in new.items():
            if request.values is not None and key not in plain:
                summaries[key] = self._alone(request.values, request.facts, request.part)
        return [summaries[summary_request.key] for summary_request in summary_requests]

    def _alone(
        self, values: Tensor, facts: TensorFacts, part: LocalPlacement | None
    ) -> TensorSummary:
        if not holds_numbers(values.dtype):
            return TensorSummary()
        drawn = None
        if self.sketches:
            drawn = _begin_sketch(values.expand(facts.shape), part).finish()
        return TensorSummary(_repeat_statistics(summarize(values), facts), drawn)


class PendingSummary:
    """A summary that a GPU is computing; the program does not wait for it."""

    def __init__(self, tensor: Tensor, part: LocalPlacement | None) -> None:
        """Queue the work after that of the program."""
        self._statistics = begin_statistics(tensor)
        self._sketch = _begin_sketch(tensor, part)

    def finish(self) -> TensorSummary:
        """Wait for it."""
        return TensorSummary(self._statistics.finish(), self._sketch.finish())


def _begin_sketch(tensor: Tensor, part: LocalPlacement | None) -> PendingSketch:
    if part is None:
        return begin_sketch(tensor)
    return begin_sketch(tensor, global_shape=part.global_shape, global_offset=part.global_offset)


def _repeat_statistics(statistics: Statistics, facts: TensorFacts) -> Statistics:
    """The statistics of an expanded tensor, from those of its stored values."""
    numel = math.prod(facts.shape)
    if statistics.count in (numel, 0):
        return statistics
    times = numel // statistics.count
    counts = {
        name: getattr(statistics, name) * times
        for name in ("count", "zeros", "nans", "positive_infinities", "negative_infinities")
    }
    return msgspec.structs.replace(
        statistics,
        **counts,
        l2=None if statistics.l2 is None else statistics.l2 * times**0.5,
        exponents=tuple((exponent, many * times) for exponent, many in statistics.exponents),
    )


# --- From the program's thread to the disk --------------------------------------------------------

KEEP = object()  # a job that pins the steps in the ring
_NOTHING = TensorSummary()


class RecordingJob(msgspec.Struct, gc=False):
    """A value to write: everything except what the writer thread computes."""

    sequence: int
    step: int
    site: Site
    tensor: TensorFacts | None = None
    value: str | None = None
    alias_of: int | None = None
    placement: LocalPlacement | None = None
    snapshot: Snapshot | None = None
    pending: PendingSummary | None = None


class Pipeline:
    """Writes values in the order in which they were submitted."""

    def __init__(self, writer: DumpWriter, options: SessionOptions) -> None:
        """Start the thread, unless values are written immediately."""
        self._writer = writer
        self._whole = options.data == "tensor"
        self._forgets = options.forgets
        self._summaries = Summaries(sketches=not self._whole)
        self._background: Background[Any] = Background(self._write, options.queue_bytes)

    def submit(self, job: RecordingJob) -> None:
        """Queue a value, waiting for room."""
        self._background.submit(job, job.snapshot.nbytes if job.snapshot is not None else 0)

    def keep(self) -> None:
        """Pin the steps in the ring, after writing what was submitted so far."""
        self._background.submit(KEEP, 0)

    def finish(self) -> None:
        """Write everything, and raise any failure."""
        self._background.finish()

    def _write(self, jobs: list[Any]) -> None:
        batch: list[RecordingJob] = []
        for job in jobs:
            if job is KEEP:
                self._write_batch(batch)
                batch = []
                self._writer.keep()
            else:
                batch.append(job)
        self._write_batch(batch)

    def _write_batch(self, batch: list[RecordingJob]) -> None:
        if not batch:
            return
        values = [None if job.snapshot is None else job.snapshot.wait() for job in batch]
        summaries = self._summaries.of(
            [
                SummaryRequest(job.step, value, job.snapshot.key, job.tensor, job.placement)
                for job, value in zip(batch, values, strict=True)
                if job.snapshot is not None and job.tensor is not None
            ]
        )
        self._writer.add_many(self._entries(batch, values, iter(summaries)))
        for job in batch:
            if job.snapshot is not None:
                job.snapshot.release()
        if self._forgets:
            self._summaries.forget(batch[-1].step)

    def _entries(
        self,
        batch: list[RecordingJob],
        values: list[Tensor | None],
        tensor_summaries: Iterator[TensorSummary],
    ) -> list[Entry]:
        entries = []
        for job, value in zip(batch, values, strict=True):
            summary, digest = _NOTHING, ""
            if job.snapshot is not None and job.tensor is not None:
                summary, digest = next(tensor_summaries), job.snapshot.digest
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
