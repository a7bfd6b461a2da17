"""`paritas.compare`: compare two dumps value by value, and find where they start to differ."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import math
import platform
import threading
import time
import weakref
from collections import Counter, OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import torch

from paritas.comparison.gathering import operands
from paritas.comparison.judgement import measure, unjudged_row
from paritas.comparison.pairing import match
from paritas.comparison.rows import Comparison, Divergence, DumpFacts
from paritas.comparison.rules import Rules, align_steps
from paritas.comparison.selections import RecordedSelection
from paritas.comparison.table import Table, resolve
from paritas.core.call_options import takes_options
from paritas.core.errors import ParitasError, UsageError, in_one_line
from paritas.core.execution.executors import (
    Failed,
    executor_of,
    few_full_collections,
    run_batches,
    session_of_work,
)
from paritas.core.file_trees import local_copy
from paritas.core.judging.pairs import Ruling, apply_ruling
from paritas.core.numerics.mismatch_maps import mismatch_detail
from paritas.core.operators.catalogue import operators_of
from paritas.core.results.findings import Aspect, Coverage, Diagnosis, Status
from paritas.core.results.progress import Progress, shows_progress
from paritas.core.results.wording import count_things
from paritas.core.settings import own_version
from paritas.formats.dumps.completeness import find_losses, list_problems

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from concurrent.futures import Executor

    from torch import Tensor

    from paritas.comparison.judgement import Measured
    from paritas.comparison.operands import Operand, Pair
    from paritas.comparison.pairing import Matches
    from paritas.comparison.rows import ComparisonRow
    from paritas.core.numerics.requirements import Requirement
    from paritas.core.results.details import Detail
    from paritas.formats.dumps.opening import ReadableDump
    from paritas.formats.files.records import Record, Site

    _Key = tuple[str, str | None]

    Tell = Callable[[Progress], None]


# --- Open dumps, shared by the threads of a process and cached in worker processes ----------------

_MOST_KEPT = 4

_dumps_lock = threading.RLock()
# While a dump is in use, the threads of this process share it.
_held: weakref.WeakValueDictionary[_Key, ReadableDump] = weakref.WeakValueDictionary()
# A worker process keeps dumps only during one comparison: later, another dump may be at that path.
_kept: OrderedDict[_Key, ReadableDump] = OrderedDict()
_kept_for = ""


def open_reusable(path: str, kind: str | None = None) -> ReadableDump:
    """Open a dump; a worker reuses one that is already open."""
    session = session_of_work()
    key = (path, kind)
    with _dumps_lock:
        _forget_others(session)
        opened_dump = _held.get(key) if session is not None else None
        if opened_dump is None:
            opened_dump = _open_for_worker(path, kind, session)
            _held[key] = _held[path, opened_dump.kind] = opened_dump
        if session:
            _kept[key] = opened_dump
            _kept.move_to_end(key)
            if len(_kept) > _MOST_KEPT:
                _kept.popitem(last=False)
        return opened_dump


def _forget_others(session: str | None) -> None:
    global _kept_for  # noqa: PLW0603  (one for each process)
    if session and session != _kept_for:
        for key in _kept:
            _held.pop(key, None)
        _kept.clear()
        _kept_for = session


def _open_for_worker(path: str, kind: str | None, session: str | None) -> ReadableDump:
    from paritas.formats.dumps.opening import open_dump

    try:
        return open_dump(path, kind)
    except UsageError as error:
        if not session:
            raise
        raise UsageError(f"a worker on {platform.node()} cannot open the dump: {error}") from error


# --- All pairs, in batches ------------------------------------------------------------------------

# Large enough to be worth sending to a worker, small enough to keep all workers busy.
_BATCH_PAIRS = 128
_BATCH_BYTES = 64 << 20
# Diagnosing a value takes many times its own memory, up to about 250 MiB. Above this many elements,
# only one value is diagnosed at a time, whatever the number of threads.
_ELEMENTS_SIDE_BY_SIDE = 1 << 17
_one_large = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Sources:
    """The paths of the two dumps, for workers that open them themselves."""

    my: str
    my_kind: str
    golden: str
    golden_kind: str


@dataclasses.dataclass(frozen=True)
class _PairBatch:
    """Pairs to measure, and how; see `judgement.measure`."""

    sources: Sources
    pairs: tuple[Pair, ...]
    requirements: tuple[Requirement | None, ...]
    quick: bool
    trust_digests: bool


@dataclasses.dataclass(frozen=True)
class DetailRequest:
    """A pair to examine closely.

    Attributes:
        fails: whether to diagnose it.
        is_result: it was computed from a row that is wrong already.
        operator: the operator that made it wrong; empty if that may be far from it.
        given: the operator's golden inputs.
    """

    sources: Sources
    pair: Pair
    fails: bool
    is_result: bool
    operator: str
    given: tuple[Operand, ...]


def _measure_pairs(
    pool: Executor, workers: int, batches: Iterable[_PairBatch], total: int, tell: Tell
) -> list[Measured]:
    """Measure all pairs in order.

    If a worker dies, the pairs of its batch are unverified, with the reason.
    """
    measureds: list[Measured] = []
    nbytes = failing = 0
    for batch, result in run_batches(pool, _measure_batch, batches, ahead=2 * workers):
        if isinstance(result, Failed):
            measured = [_report_lost(pair, batch.sources, result) for pair in batch.pairs]
        else:
            measured = result
        measureds += measured
        nbytes += sum(item.nbytes for item in measured)
        failing += sum(not item.status.passes() for item in measured)
        tell(Progress("comparing", len(measureds), total, nbytes=nbytes, failing=failing))
    return measureds


def _requirements(pairs: Iterable[Pair], rules: Rules) -> tuple[Requirement | None, ...]:
    records = (pair.leading.record for pair in pairs)
    return tuple(rules.requirement_for(record.id, record.site.module) for record in records)


def _make_batches(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    waiting: list[Pair] = []
    size = 0
    for pair in pairs:
        waiting.append(pair)
        size += sum(_estimate_bytes(side) for side in (pair.my, pair.golden) if side is not None)
        if len(waiting) >= _BATCH_PAIRS or size >= _BATCH_BYTES:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting


def _estimate_bytes(operand: Operand) -> int:
    total = 0
    for record in operand.records():
        if record.tensor is not None:
            dtype = getattr(torch, record.tensor.dtype, torch.float32)
            total += math.prod(record.tensor.shape) * getattr(dtype, "itemsize", 4)
    return total


def _open_both(sources: Sources) -> tuple[ReadableDump, ReadableDump]:
    return open_reusable(sources.my, sources.my_kind), open_reusable(
        sources.golden, sources.golden_kind
    )


def _measure_batch(batch: _PairBatch) -> list[Measured]:
    """Runs in a worker, which may be another process or machine."""
    my, golden = _open_both(batch.sources)
    how = {"quick": batch.quick, "trust_digests": batch.trust_digests}
    return [
        measure(pair, my, golden, requirement, **how)
        for pair, requirement in zip(batch.pairs, batch.requirements, strict=True)
    ]


def _measure_detail(request: DetailRequest) -> Detail | None:
    """Runs in a worker, which may be another process or machine."""
    my, golden = _open_both(request.sources)
    pair = request.pair
    if pair.my is None or pair.golden is None:
        return None
    try:
        reference, candidate = pair.golden.read(golden.view), pair.my.read(my.view)
        candidate = candidate.reshape(reference.shape)
        detail = mismatch_detail(reference, candidate)
        if not request.fails:
            return detail
        diagnosis = _diagnose(request, reference, candidate, golden.view)
        return msgspec.structs.replace(detail, diagnosis=diagnosis)
    except (ParitasError, OSError, RuntimeError):  # the row already says what is wrong
        return None


def _diagnose(
    request: DetailRequest, reference: Tensor, candidate: Tensor, read: Callable[[Record], Tensor]
) -> Diagnosis | None:
    """What kind of wrong it is, or why that is not known; None if there is nothing to say."""
    from paritas.core.diagnosis.boxes import MOST_ELEMENTS
    from paritas.core.diagnosis.case import Context
    from paritas.core.diagnosis.diagnose import diagnose

    is_large = reference.numel() > _ELEMENTS_SIDE_BY_SIDE
    try:
        with _one_large if is_large else contextlib.nullcontext():
            # Only a sample of a large tensor is diagnosed, and the inputs do not belong to it.
            input_operands = () if reference.numel() > MOST_ELEMENTS else request.given
            inputs = tuple(operand.read(read) for operand in input_operands)
            context = Context(
                operator=request.operator, inputs=inputs, only_where=request.is_result
            )
            diagnosis = diagnose(candidate, reference, context=context)
    except Exception as error:  # noqa: BLE001  (the row stands; the note in it reports it)
        return Diagnosis(note=f"it was not diagnosed: {in_one_line(error, 200)}")
    return diagnosis if diagnosis.where is not None or diagnosis.patterns else None


def _report_lost(pair: Pair, sources: Sources, failed: Failed[_PairBatch]) -> Measured:
    reason = f"the worker that compared it failed: {failed.error}"
    advice = "compare again with fewer workers, or with --executor threads"
    ruling = Ruling(Status.UNVERIFIED, reason, {"aspect": Aspect.HARNESS, "advice": advice})
    return apply_ruling(unjudged_row(pair, sources.my_kind, sources.golden_kind), ruling)


# --- Where two dumps start to differ --------------------------------------------------------------


def first_divergence(rows: Sequence[ComparisonRow]) -> Divergence | None:
    """The first row that caused a difference, rather than the first with a large one."""
    return _find_first(rows, lambda _: True)


def first_non_finite(rows: Sequence[ComparisonRow]) -> Divergence | None:
    """The first row that caused a NaN or infinity on one side only."""
    return _find_first(rows, _differs_in_nonfinite)


def _differs_in_nonfinite(row: ComparisonRow) -> bool:
    if row.metrics is not None:
        return row.metrics.nonfinite_mismatches > 0
    return row.figures is None and row.nonfinite


def _find_first(
    rows: Sequence[ComparisonRow], predicate: Callable[[ComparisonRow], bool]
) -> Divergence | None:
    """The row that comes first in the order of its own rank."""
    counts: dict[tuple[int, int | None], int] = {}
    ran: set[tuple[int, int | None]] = set()  # where a call has already returned something
    doubtful: Counter[tuple[int, int | None]] = Counter()  # rows without a certain counterpart
    begun: dict[tuple[int, int | None, str], int] = {}  # how many of them when a call began
    best: tuple[tuple[int, int], Divergence] | None = None
    for row in rows:
        key = (row.step, row.rank)
        counts[key] = counts.get(key, 0) + 1
        is_result = row.side == "output" and row.op != "placeholder"
        if row.status.is_wrong and row.made != "before" and predicate(row):
            before = begun.get((*key, row.call), 0) if row.made == "here" else 0
            divergence = _make_divergence(
                row,
                at_the_start=key not in ran and not is_result,
                unmatched=doubtful[key] - before,
            )
            order = (row.step, counts[key])
            if best is None or order < best[0]:
                best = (order, divergence)
        if is_result:
            ran.add(key)
        begun.setdefault((*key, row.call), doubtful[key])
        doubtful[key] += row.status is Status.UNVERIFIED and row.aspect is Aspect.STRUCTURE
    return None if best is None else best[1]


def _make_divergence(row: ComparisonRow, *, at_the_start: bool, unmatched: int) -> Divergence:
    """What a row shows.

    Args:
        unmatched: how many values that it may come from have no certain counterpart.
    """
    if row.op == "placeholder" or at_the_start:
        reason = "the two programs received different inputs, so later values cannot agree"
        return Divergence(kind="given", row=row.index, reason=reason)
    is_number = row.golden is not None and row.golden.value is not None
    is_certain = row.attributed == "replayed" or is_number
    # A module may have made it anywhere inside.
    if unmatched and not is_certain and (row.made != "here" or row.level == "module"):
        values, have = ("value", "has") if unmatched == 1 else ("values", "have")
        reason = f"{unmatched} {values} before it {have} no certain counterpart in the other dump"
        return Divergence(kind="unmatched", row=row.index, reason=reason)
    if row.made == "here":
        reason = "its inputs agree or have a smaller error: the rest was added here"
        return Divergence(kind="made", row=row.index, reason=reason)
    reason = "its inputs are not recorded: the cause is this value or something before it"
    return Divergence(kind="unclear", row=row.index, reason=reason)


# Operators that overwrite their first argument without reading it.
_FILLS = {f"{name}_" for name in operators_of("fills", "random fills")} | {
    *("bernoulli_", "copy_", "random_"),
}
# How many rows get details; the first divergence is always among them.
MOST_DETAILS = 48
# How many failing rows are diagnosed, and up to how many elements. The first always is.
MOST_DIAGNOSED = 24
MOST_DIAGNOSED_ELEMENTS = 1 << 20
# The total size of the rows with details, after the first.
MOST_DETAIL_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """How `compare` compares two dumps.

    Attributes:
        my_kind: the tool that made the dump `my`; detected by default.
        golden_kind: the tool that made the dump `golden`; detected by default.
        config: a TOML file with rules, renames, dims and so on.
        rules: (regular expression, requirement) by name: `("attn", "rel_l2 <= 1e-3")`.
        renames: (regular expression, replacement), from my names to golden names.
        dims: (regular expression, annotation): how tensors are split over ranks, if the dump does
            not say: `("attn", "b s h[tp] d")`.
        mesh: the sizes of the axes that `dims` uses: `"tp=2,cp=2"`.
        steps: the steps to compare: `"3"`, `"0-4"`, or `"1:0"` for my step 1 and golden step 0.
        ranks: the ranks to compare; all of them by default.
        ignore: regular expressions for values to leave out; they are counted as skipped.
        unmatched: whether a value without a counterpart fails or is only listed.
        replay: rerun operators in float64 where their inputs are recorded, to separate the error
            they made from the error in their inputs.
        quick: compute only a few figures for rows that clearly pass.
        strict: treat `unstable` as a failure.
        trust_digests: do not verify checksums, and do not read values with equal digests.
        executor: `"threads"`, `"processes"`, `"dask://host:port"`, or your own executor.
        jobs: the number of workers; by default the number of processors.
        on_progress: called before each stage and as it advances.
    """

    my_kind: str | None = None
    golden_kind: str | None = None
    config: str | os.PathLike[str] | None = None
    rules: Sequence[tuple[str, str]] = ()
    renames: Sequence[tuple[str, str]] = ()
    dims: Sequence[tuple[str, str]] = ()
    mesh: str = ""
    steps: Sequence[str] = ()
    ranks: Sequence[int] | None = None
    ignore: Sequence[str] = ()
    unmatched: Literal["fail", "list"] = "fail"
    replay: bool = True
    quick: bool = False
    strict: bool = False
    trust_digests: bool = False
    executor: str | Executor = "threads"
    jobs: int | None = None
    on_progress: Tell | None = None

    def __post_init__(self) -> None:
        if self.unmatched not in {"fail", "list"}:
            raise UsageError(f"unmatched={self.unmatched!r} is not supported: use 'fail' or 'list'")

    def read_rules(self) -> Rules:
        """The rules of the file and of the arguments."""
        return Rules.of(
            None if self.config is None else Path(self.config),
            rules=self.rules,
            renames=self.renames,
            dims=self.dims,
            mesh=self.mesh,
            steps=self.steps,
            ignore=self.ignore,
        )


@few_full_collections()
@shows_progress
@takes_options(CompareOptions)
def compare(
    my: str | os.PathLike[str], golden: str | os.PathLike[str], options: CompareOptions
) -> Comparison:
    """Compare two dumps, value by value.

    Args:
        my: the candidate's dump: a folder, a file, or a URL that fsspec can open.
        golden: the reference's dump.
        options: given as keyword arguments; see `CompareOptions`.

    Raises:
        UsageError: a dump cannot be opened, or an argument is invalid.
    """
    chosen = options.read_rules()
    began = time.monotonic()
    tell: Tell = options.on_progress or (lambda _: None)
    with local_copy(my) as my_path, local_copy(golden) as golden_path:
        tell(Progress("opening the dumps"))
        my_dump = open_reusable(str(my_path), options.my_kind)
        golden_dump = open_reusable(str(golden_path), options.golden_kind)
        tell(Progress("matching"))
        matched, losses = _match_dumps(my_dump, golden_dump, chosen, options.ranks)
        alone = [pair for pair in matched.pairs if pair.my is None or pair.golden is None]
        pairs = matched.pairs
        if options.unmatched == "list":
            pairs = [pair for pair in pairs if pair.my is not None and pair.golden is not None]
        sources = Sources(str(my_path), my_dump.kind, str(golden_path), golden_dump.kind)
        with executor_of(options.executor, options.jobs) as (pool, workers):
            batches = (
                _PairBatch(
                    sources,
                    tuple(batch),
                    _requirements(batch, chosen),
                    options.quick,
                    options.trust_digests,
                )
                for batch in _make_batches(pairs)
            )
            measured = _measure_pairs(pool, workers, batches, len(pairs), tell)
            table = Table(my_dump, golden_dump, pairs, measured)
            replays = {}
            if options.replay:
                replays = table.replay(tell, trust_digests=options.trust_digests)
            rows = table.rows(resolve(table.drafts, replays))
            rows = _with_details(pool, workers, sources, rows, table, tell)
    return Comparison(
        my=_dump_facts(my_dump, str(my), losses[0]),
        golden=_dump_facts(golden_dump, str(golden), losses[1]),
        rows=tuple(rows),
        coverage=_count_coverage(rows, matched, alone),
        notes=(*matched.notes, *table.notes, *_note_unread(rows)),
        first=first_divergence(rows),
        first_non_finite=first_non_finite(rows),
        strict=options.strict,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        paritas=own_version(),
        torch=str(torch.__version__),
        seconds=time.monotonic() - began,
        nbytes=sum(item.nbytes for item in measured),
    )


def _match_dumps(
    my_dump: ReadableDump,
    golden_dump: ReadableDump,
    rules: Rules,
    ranks: Sequence[int] | None,
) -> tuple[Matches, tuple[list[str], list[str]]]:
    """The pairs, and what my dump and the golden one lack of the compared steps and ranks."""
    my_operands, golden_operands, notes = operands(my_dump, golden_dump, rules)
    my_operands, overwritten = _without_overwritten(my_operands)
    golden_operands, _ = _without_overwritten(golden_operands)
    if ranks is not None:
        _check_ranks(ranks, my_dump, golden_dump)
        selected_ranks = set(ranks)
        my_operands = [
            my_operand
            for my_operand in my_operands
            if selected_ranks.intersection(my_operand.ranks)
        ]
        golden_operands = [
            golden_operand
            for golden_operand in golden_operands
            if selected_ranks.intersection(golden_operand.ranks)
        ]
    selections = (RecordedSelection.of(my_dump), RecordedSelection.of(golden_dump))
    my_steps = {my_operand.step for my_operand in my_operands}
    golden_steps = {golden_operand.step for golden_operand in golden_operands}
    if not rules.steps and my_dump.kind == golden_dump.kind:  # both number their steps the same way
        my_steps, golden_steps = (
            {step for step in my_steps if selections[1].selection.wants_step(step)},
            {step for step in golden_steps if selections[0].selection.wants_step(step)},
        )
    aligned, step_notes = align_steps(my_steps, golden_steps, rules.steps)
    if rules.steps:  # the other steps were not selected
        my_operands = [my_operand for my_operand in my_operands if my_operand.step in aligned]
        golden = set(aligned.values())
        golden_operands = [
            golden_operand for golden_operand in golden_operands if golden_operand.step in golden
        ]
    matches = match(my_operands, golden_operands, rules, aligned, selections)
    skipped = list(matches.skipped)
    if overwritten:
        skipped.append(f"{count_things(overwritten, 'argument')} overwritten before being read")
    notes = [*notes, *step_notes, *matches.notes]
    losses = (
        _list_losses(my_dump, ranks, aligned.keys() if rules.steps else None),
        _list_losses(golden_dump, ranks, aligned.values() if rules.steps else None),
    )
    return dataclasses.replace(matches, notes=notes, skipped=skipped), losses


def _list_losses(
    dump: ReadableDump, ranks: Sequence[int] | None, steps: Collection[int] | None
) -> list[str]:
    return [loss.text for loss in find_losses(dump) if loss.concerns(ranks, steps)]


def _without_overwritten(all_operands: list[Operand]) -> tuple[list[Operand], int]:
    """Leave out the old content of memory that an operator overwrites: it is arbitrary."""
    kept_operands = [
        operand for operand in all_operands if not _is_overwritten(operand.record.site)
    ]
    return kept_operands, len(all_operands) - len(kept_operands)


def _is_overwritten(site: Site) -> bool:
    if site.side != "input" or site.position != "0" or site.level not in {"op", "node"}:
        return False
    return site.op.removeprefix("aten.").partition(".")[0] in _FILLS


def _check_ranks(ranks: Sequence[int], my_dump: ReadableDump, golden_dump: ReadableDump) -> None:
    for rank in ranks:
        if rank not in my_dump.ranks and rank not in golden_dump.ranks:
            known_ranks = ", ".join(map(str, sorted({*my_dump.ranks, *golden_dump.ranks})))
            raise UsageError(f"neither dump has rank {rank}: choose from {known_ranks}")


def _with_details(
    pool: Executor,
    workers: int,
    sources: Sources,
    rows: list[ComparisonRow],
    table: Table,
    tell: Tell,
) -> list[ComparisonRow]:
    """Add details to the rows that matter most to a reader."""
    chosen = rows_for_details(rows)
    tell(Progress("examining differences", 0, len(chosen)))
    requests = (
        _request_details(rows[row_number], table, sources, rank)
        for rank, row_number in enumerate(chosen)
    )
    results = run_batches(pool, _measure_detail, requests, ahead=workers)
    for done, (row_index, (_, detail)) in enumerate(zip(chosen, results, strict=True)):
        if not isinstance(detail, Failed):
            rows[row_index] = msgspec.structs.replace(rows[row_index], detail=detail)
        tell(Progress("examining differences", done + 1, len(chosen)))
    return rows


def _request_details(
    row: ComparisonRow, table: Table, sources: Sources, rank: int
) -> DetailRequest:
    fails = row.status.is_wrong and rank < MOST_DIAGNOSED
    numel = row.metrics.numel if row.metrics is not None else 0
    fails = fails and (rank == 0 or numel <= MOST_DIAGNOSED_ELEMENTS)
    source_operands = [table.pairs[source].golden for source in row.sources] if fails else []
    known_operands = tuple(operand for operand in source_operands if operand is not None)
    # What was wrong before, or inside a module, was made wrong by another operator. And one with an
    # unknown input cannot be diagnosed from the others.
    is_operator = row.level != "module" and row.made != "before"
    return DetailRequest(
        sources,
        table.pairs[row.index],
        fails=fails,
        is_result=row.made == "before" and bool(row.sources),
        operator=row.op if is_operator else "",
        given=known_operands if len(known_operands) == len(source_operands) else (),
    )


def rows_for_details(rows: Sequence[ComparisonRow]) -> list[int]:
    """Rows that get details: causes of a difference first, then failures, then unstable rows."""

    def rank(row: ComparisonRow) -> tuple[int, int]:
        fails = row.status.is_wrong
        if fails and row.made != "before":
            return (0, row.index)
        return (1 if fails else 2, row.index)

    differing = [
        row
        for row in rows
        if row.figures is not None
        and not row.figures.identical
        and row.status is not Status.EQUIVALENT
    ]
    chosen: list[int] = []
    room = MOST_DETAIL_BYTES
    for row in sorted(differing, key=rank)[:MOST_DETAILS]:
        # Eight bytes for both sides together, whatever the dtype.
        room -= 8 * row.metrics.numel if row.metrics is not None else 0
        if chosen and room < 0:
            break
        chosen.append(row.index)
    return chosen


def _count_coverage(
    rows: Sequence[ComparisonRow], matched: Matches, alone: Sequence[Pair]
) -> Coverage:
    return Coverage(
        compared=sum(
            row.my is not None and row.golden is not None and row.aspect is not Aspect.HARNESS
            for row in rows
        ),
        skipped=tuple(matched.skipped),
        not_selected=tuple(map(_describe_alone, matched.not_selected)),
        unmatched=tuple(map(_describe_alone, alone)),
    )


def _note_unread(rows: Sequence[ComparisonRow]) -> list[str]:
    """Notes on rows where digests were compared instead of values."""
    counter = Counter(row.judged_by for row in rows if row.is_by_digest)
    return [f"{count} of {len(rows)} rows are judged by {how}" for how, count in counter.items()]


def _describe_alone(pair: Pair) -> str:
    record = pair.leading.record
    whose = "golden" if pair.my is None else "mine"
    rank = f", rank {record.rank}" if record.rank else ""
    near = f"; nearest: {', '.join(pair.nearest)}" if pair.nearest else ""
    return f"{record.id} (step {record.step}{rank}; {whose} only{near})"


def _dump_facts(dump: ReadableDump, path: str, losses: Sequence[str]) -> DumpFacts:
    header = dump.header(min(dump.ranks))
    ranks = sorted(dump.ranks)
    return DumpFacts(
        path=path,
        kind=dump.kind,
        records=sum(len(dump.ranks[rank].records) for rank in ranks),
        ranks=tuple(ranks),
        steps=tuple(sorted({record.step for record in dump.records()})),
        program=header.program,
        torch=header.torch,
        sources=header.sources,
        fusion=header.fusion if dump.kind == "paritas" else "",
        problems=tuple(list_problems(dump)),
        losses=tuple(losses),
    )
