"""`paritas.compare`: two dumps, one table, and where they begin to differ."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import math
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import torch

from paritas.comparison.gathering import operands
from paritas.comparison.judgement import Measured, measure
from paritas.comparison.opened_dumps import opened
from paritas.comparison.operands import describe_side
from paritas.comparison.pairing import RecordedSelection, match
from paritas.comparison.rules import Rules, align_steps
from paritas.comparison.table import Table, resolve
from paritas.errors import ParitasError, UsageError
from paritas.execution.executors import (
    Failed,
    executor_of,
    few_full_collections,
    run_batches,
)
from paritas.files.trees import local_copy
from paritas.numerics.mismatch_maps import mismatch_detail
from paritas.results.comparisons import Comparison, Divergence, DumpFacts
from paritas.results.findings import Aspect, Coverage, Status
from paritas.results.progress import Progress, shows_progress
from paritas.settings.versions import own_version

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Executor

    from torch import Tensor

    from paritas.comparison.operands import Operand, Pair
    from paritas.comparison.pairing import Matches
    from paritas.dumps.opening import ReadableDump
    from paritas.files.records import Record, Site
    from paritas.numerics.requirements import Requirement
    from paritas.results.comparisons import ComparisonRow, Detail
    from paritas.results.findings import Diagnosis


# --- All pairs, in batches ------------------------------------------------------------------------

# A batch is worth being sent to a worker, and small enough that all of them have something to do.
_BATCH_PAIRS = 128
_BATCH_BYTES = 64 << 20
# To say what kind of wrong a value is takes many times its own memory, up to some 250 MiB: beyond
# so many elements that is done for one at a time, however many threads there are.
_ELEMENTS_SIDE_BY_SIDE = 1 << 17
_one_large = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where the two dumps are, for workers that open them themselves."""

    my: str
    my_kind: str
    golden: str
    golden_kind: str


@dataclasses.dataclass(frozen=True)
class MeasureOptions:
    """How pairs are measured; `judging.measure` says what each means."""

    quick: bool = False
    trust_digests: bool = False


@dataclasses.dataclass(frozen=True)
class _PairBatch:
    sources: Sources
    pairs: tuple[Pair, ...]
    requirements: tuple[Requirement | None, ...]
    how: MeasureOptions = MeasureOptions()
    look: DetailRequest | None = None


@dataclasses.dataclass(frozen=True)
class DetailRequest:
    """A pair to look at closely.

    Attributes:
        fails: whether to ask what kind of wrong it is.
        operator: what made it.
        given: what that was given, on the golden side.
    """

    pair: Pair
    fails: bool = False
    operator: str = ""
    given: tuple[Operand, ...] = ()


def measure_all(
    executor: Executor,
    workers: int,
    sources: Sources,
    pairs: Sequence[Pair],
    requirement_for: Callable[[Pair], Requirement | None],
    how: MeasureOptions,
) -> Iterator[list[Measured]]:
    """Measure all pairs, batch by batch, in their order.

    A batch whose worker died is measured no further: its pairs are unverified, and say why.
    """
    batches = (
        dataclasses.replace(batch, how=how)
        for batch in _make_batches(sources, pairs, requirement_for)
    )
    for batch, result in run_batches(executor, _measure_batch, batches, ahead=2 * workers):
        if isinstance(result, Failed):
            yield [_report_lost(pair, batch.sources, result) for pair in batch.pairs]
        else:
            yield result


def details(
    executor: Executor, workers: int, sources: Sources, looks: Sequence[DetailRequest]
) -> Iterator[Detail | None]:
    """A closer look at each of a few pairs."""
    batches = (_PairBatch(sources, (look.pair,), (None,), look=look) for look in looks)
    for _, result in run_batches(executor, _detail_batch, batches, ahead=workers):
        yield None if isinstance(result, Failed) else result


def _make_batches(
    sources: Sources,
    pairs: Sequence[Pair],
    requirement_for: Callable[[Pair], Requirement | None],
) -> Iterator[_PairBatch]:
    waiting: list[Pair] = []
    size = 0
    for pair in pairs:
        waiting.append(pair)
        size += sum(_estimate_bytes(side) for side in (pair.my, pair.golden) if side is not None)
        if len(waiting) >= _BATCH_PAIRS or size >= _BATCH_BYTES:
            yield _PairBatch(sources, tuple(waiting), tuple(map(requirement_for, waiting)))
            waiting, size = [], 0
    if waiting:
        yield _PairBatch(sources, tuple(waiting), tuple(map(requirement_for, waiting)))


def _estimate_bytes(operand: Operand) -> int:
    """About how many bytes it has."""
    total = 0
    for record in operand.records():
        if record.tensor is not None:
            dtype = getattr(torch, record.tensor.dtype, torch.float32)
            total += math.prod(record.tensor.shape) * getattr(dtype, "itemsize", 4)
    return total


def _measure_batch(batch: _PairBatch) -> list[Measured]:
    """What a worker does, maybe in another process or on another machine."""
    my = opened(batch.sources.my, batch.sources.my_kind)
    golden = opened(batch.sources.golden, batch.sources.golden_kind)
    how = dataclasses.asdict(batch.how)
    return [
        measure(pair, my, golden, requirement, **how)
        for pair, requirement in zip(batch.pairs, batch.requirements, strict=True)
    ]


def _detail_batch(batch: _PairBatch) -> Detail | None:
    my = opened(batch.sources.my, batch.sources.my_kind)
    golden = opened(batch.sources.golden, batch.sources.golden_kind)
    (pair,) = batch.pairs
    if pair.my is None or pair.golden is None:
        return None
    try:
        reference, candidate = pair.golden.read(golden.view), pair.my.read(my.view)
        candidate = candidate.reshape(reference.shape)
        found = mismatch_detail(reference, candidate)
        if batch.look is None or not batch.look.fails:
            return found
        told = _diagnose(batch.look, reference, candidate, golden.view)
        return msgspec.structs.replace(found, diagnosis=told)
    except (ParitasError, OSError, RuntimeError):  # the row says already what is wrong
        return None


def _diagnose(
    look: DetailRequest, reference: Tensor, candidate: Tensor, read: Callable[[Record], Tensor]
) -> Diagnosis | None:
    """What kind of wrong it is; None where nothing can be said of it."""
    from paritas.diagnosis.case import MOST_ELEMENTS, Context
    from paritas.diagnosis.diagnose import diagnose

    is_large = reference.numel() > _ELEMENTS_SIDE_BY_SIDE
    try:
        with _one_large if is_large else contextlib.nullcontext():
            # Of a large tensor a part is looked at, to which no part of the inputs belongs.
            given = () if reference.numel() > MOST_ELEMENTS else look.given
            inputs = tuple(operand.read(read) for operand in given)
            context = Context(operator=look.operator, inputs=inputs)
            found = diagnose(candidate, reference, context=context)
    except Exception:  # noqa: BLE001  (an extra: the row stands without it)
        return None
    return found if found.where is not None or found.patterns else None


def _report_lost(pair: Pair, sources: Sources, failed: Failed[_PairBatch]) -> Measured:
    return Measured(
        status=Status.UNVERIFIED,
        settled=True,
        my=None if pair.my is None else describe_side(pair.my, sources.my_kind),
        golden=None if pair.golden is None else describe_side(pair.golden, sources.golden_kind),
        aspect=Aspect.HARNESS,
        reason=f"the worker that was to compare it failed: {failed.error}",
        advice="compare again with fewer workers, or with --executor threads",
    )


# --- Where two dumps begin to differ --------------------------------------------------------------

_FAILS = {Status.DIFFERENT, Status.DEGRADED}


def first_divergence(rows: Sequence[ComparisonRow]) -> Divergence | None:
    """The first row whose difference was made there, not the first that looks large."""
    return _find_first(rows, lambda _: True)


def first_non_finite(rows: Sequence[ComparisonRow]) -> Divergence | None:
    """The same, of NaN and infinities that one side has and the other has not."""
    return _find_first(rows, _is_unlike)


def _is_unlike(row: ComparisonRow) -> bool:
    metrics = row.figures.metrics if row.figures is not None else None
    if metrics is not None:
        return metrics.nonfinite_mismatches > 0
    return row.figures is None and any(word in row.reason for word in ("NaN", "Inf"))


def _find_first(
    rows: Sequence[ComparisonRow], wanted: Callable[[ComparisonRow], bool]
) -> Divergence | None:
    """Of all ranks, the one that comes first in its rank's own order."""
    counts: dict[tuple[int, int | None], int] = {}
    ran: set[tuple[int, int | None]] = set()  # those of which a call has given something
    best: tuple[tuple[int, int], Divergence] | None = None
    for row in rows:
        key = (row.step, row.rank)
        counts[key] = counts.get(key, 0) + 1
        is_result = row.side == "output" and row.op != "placeholder"
        if row.status in _FAILS and row.made != "before" and wanted(row):
            found = _make_divergence(row, at_the_start=key not in ran and not is_result)
            order = (row.step, counts[key])
            if best is None or order < best[0]:
                best = (order, found)
        if is_result:
            ran.add(key)
    return None if best is None else best[1]


def _make_divergence(row: ComparisonRow, *, at_the_start: bool) -> Divergence:
    if row.op == "placeholder" or at_the_start:
        reason = "the two programs were given different values, so what follows cannot agree"
        return Divergence(kind="given", row=row.index, reason=reason)
    if row.made == "here":
        reason = "what it was computed from agrees, or is wrong by less: the rest was added here"
        return Divergence(kind="made", row=row.index, reason=reason)
    reason = "what it was computed from is not recorded: it, or what ran before it, is to blame"
    return Divergence(kind="unclear", row=row.index, reason=reason)


# --- The comparison -------------------------------------------------------------------------------

if TYPE_CHECKING:
    Tell = Callable[[Progress], None]


# Operators that fill their first argument and do not look at what is in it.
_FILLS = {
    "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_",
    "normal_", "random_", "uniform_", "zero_",
}  # fmt: skip
# So many rows get a closer look; that of a first divergence is always among them.
MOST_DETAILS = 48
# Of those that fail, so many are asked what kind of wrong they are, if they have no more elements;
# the first is asked in any case.
MOST_DIAGNOSED = 24
MOST_DIAGNOSED_ELEMENTS = 1 << 20
# And no more bytes of them than this, but for the first of them.
MOST_DETAIL_BYTES = 64 << 20


@few_full_collections()
@functools.partial(shows_progress, hears="progress")
def compare(  # noqa: PLR0913  (each is a choice of the user's)
    my: str | os.PathLike[str],
    golden: str | os.PathLike[str],
    *,
    my_kind: str | None = None,
    golden_kind: str | None = None,
    config: str | os.PathLike[str] | None = None,
    rules: Sequence[tuple[str, str]] = (),
    renames: Sequence[tuple[str, str]] = (),
    dims: Sequence[tuple[str, str]] = (),
    mesh: str = "",
    steps: Sequence[str] = (),
    ranks: Sequence[int] | None = None,
    ignore: Sequence[str] = (),
    unmatched: Literal["fail", "list"] = "fail",
    replay: bool = True,
    quick: bool = False,
    strict: bool = False,
    trust_digests: bool = False,
    executor: str | Executor = "threads",
    jobs: int | None = None,
    progress: Tell | None = None,
) -> Comparison:
    """Compare two dumps, value by value.

    Args:
        my: the candidate's dump: a folder, a file, or a URL that fsspec knows.
        golden: the reference's.
        my_kind: which tool made it; found out where it is not given. So is `golden_kind`.
        config: a TOML file with rules, renames, dims and the like.
        rules: (regular expression, requirement) by name: `("attn", "rel_l2 <= 1e-3")`.
        renames: (regular expression, replacement): what my names are on the golden side.
        dims: (regular expression, annotation): how tensors are split over ranks, where the dump
            does not say: `("attn", "b s h[tp] d")`.
        mesh: the sizes of the axes that `dims` name: `"tp=2,cp=2"`.
        steps: which steps: `"3"`, `"0-4"`, or mine against golden ones, `"1:0"`.
        ranks: which ranks; all of both, unless given.
        ignore: regular expressions; what they find is left out, and counted as skipped.
        unmatched: whether a value without counterpart fails, or is only listed.
        replay: run operators again in float64, where their inputs are recorded, to tell the error
            they made from that which came in.
        quick: tell of rows that surely pass only how far they are off, not all figures.
        strict: `unstable` fails, too.
        trust_digests: do not check that stored data fits its checksums, and do not read values
            whose recorded digests are equal.
        executor: `"threads"`, `"processes"`, `"dask://host:port"`, or an executor of yours.
        jobs: how many workers; as many as there are processors, unless given.
        progress: called with a few words before each step, and how far it has come.

    Raises:
        UsageError: a dump cannot be opened, or an argument makes no sense.
    """
    if unmatched not in {"fail", "list"}:
        raise UsageError(f"unmatched={unmatched!r}: give 'fail' or 'list'")
    chosen = Rules.of(
        None if config is None else Path(config),
        rules=rules,
        renames=renames,
        dims=dims,
        mesh=mesh,
        steps=steps,
        ignore=ignore,
    )
    began = time.monotonic()
    tell: Tell = progress or (lambda _: None)
    with local_copy(my) as my_path, local_copy(golden) as golden_path:
        tell(Progress("opening the dumps"))
        mine, theirs = opened(str(my_path), my_kind), opened(str(golden_path), golden_kind)
        tell(Progress("matching"))
        matched = _match_dumps(mine, theirs, chosen, ranks)
        alone = [pair for pair in matched.pairs if pair.my is None or pair.golden is None]
        pairs = matched.pairs
        if unmatched == "list":
            pairs = [pair for pair in pairs if pair.my is not None and pair.golden is not None]
        sources = Sources(str(my_path), mine.kind, str(golden_path), theirs.kind)
        with executor_of(executor, jobs) as (pool, workers):
            how = MeasureOptions(quick=quick, trust_digests=trust_digests)
            measured = _measure_pairs(pool, workers, sources, pairs, chosen, how, tell)
            table = Table(mine, theirs, pairs, measured)
            replays = table.replay(tell, trust_digests=trust_digests) if replay else {}
            rows = table.rows(resolve(table.drafts, replays))
            rows = _with_details(pool, workers, sources, rows, table, tell)
    return Comparison(
        my=_dump_facts(mine, str(my)),
        golden=_dump_facts(theirs, str(golden)),
        rows=tuple(rows),
        coverage=_count_coverage(rows, matched, alone),
        notes=(*matched.notes, *table.notes, *_note_unread(rows)),
        first=first_divergence(rows),
        first_non_finite=first_non_finite(rows),
        strict=strict,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        paritas=own_version(),
        torch=str(torch.__version__),
        seconds=time.monotonic() - began,
        nbytes=sum(item.nbytes for item in measured),
    )


def _match_dumps(
    mine: ReadableDump, theirs: ReadableDump, rules: Rules, ranks: Sequence[int] | None
) -> Matches:
    """Which values belong together."""
    my_operands, golden_operands, notes = operands(mine, theirs, rules)
    my_operands, overwritten = _without_overwritten(my_operands)
    golden_operands, _ = _without_overwritten(golden_operands)
    if ranks is not None:
        _check_ranks(ranks, mine, theirs)
        wanted = set(ranks)
        my_operands = [one for one in my_operands if wanted.intersection(one.ranks)]
        golden_operands = [one for one in golden_operands if wanted.intersection(one.ranks)]
    asked = (RecordedSelection.of(mine), RecordedSelection.of(theirs))
    my_steps = {one.step for one in my_operands}
    golden_steps = {one.step for one in golden_operands}
    if not rules.steps and mine.kind == theirs.kind:  # which count alike
        my_steps, golden_steps = _selected_steps(my_steps, golden_steps, *asked)
    aligned, told = align_steps(my_steps, golden_steps, rules.steps)
    if rules.steps:  # the others were not asked for
        my_operands = [one for one in my_operands if one.step in aligned]
        golden = set(aligned.values())
        golden_operands = [one for one in golden_operands if one.step in golden]
    found = match(my_operands, golden_operands, rules, aligned, asked)
    skipped = list(found.skipped)
    if overwritten:
        skipped.append(f"{overwritten} arguments are overwritten before anything reads them")
    return dataclasses.replace(found, notes=[*notes, *told, *found.notes], skipped=skipped)


def _selected_steps(
    my: set[int], golden: set[int], my_asked: RecordedSelection, golden_asked: RecordedSelection
) -> tuple[set[int], set[int]]:
    """The steps of either side that the other was asked for."""
    ours = {step for step in my if golden_asked.selection.wants_step(step)}
    theirs = {step for step in golden if my_asked.selection.wants_step(step)}
    return ours, theirs


def _without_overwritten(found: list[Operand]) -> tuple[list[Operand], int]:
    """Leave out what lay in memory that an operator fills: it means nothing."""
    kept = [one for one in found if not _is_overwritten(one.record.site)]
    return kept, len(found) - len(kept)


def _is_overwritten(site: Site) -> bool:
    if site.side != "input" or site.position != "0" or site.level not in {"op", "node"}:
        return False
    return site.op.removeprefix("aten.").partition(".")[0] in _FILLS


def _check_ranks(ranks: Sequence[int], mine: ReadableDump, theirs: ReadableDump) -> None:
    for rank in ranks:
        if rank not in mine.ranks and rank not in theirs.ranks:
            there = ", ".join(map(str, sorted({*mine.ranks, *theirs.ranks})))
            raise UsageError(f"ranks={rank}: no such rank in either dump; there are {there}")


def _measure_pairs(
    pool: Executor,
    workers: int,
    sources: Sources,
    pairs: Sequence[Pair],
    rules: Rules,
    how: MeasureOptions,
    tell: Tell,
) -> list[Measured]:
    found: list[Measured] = []
    nbytes = failing = 0

    def requirement(pair: Pair) -> Requirement | None:
        record = pair.leading.record
        return rules.requirement_for(record.id, record.site.module)

    for batch in measure_all(pool, workers, sources, pairs, requirement, how):
        found += batch
        nbytes += sum(item.nbytes for item in batch)
        failing += sum(not item.status.passes() for item in batch)
        tell(Progress("comparing", len(found), len(pairs), nbytes=nbytes, failing=failing))
    return found


def _with_details(
    pool: Executor,
    workers: int,
    sources: Sources,
    rows: list[ComparisonRow],
    table: Table,
    tell: Tell,
) -> list[ComparisonRow]:
    """The rows, with a closer look at those that a reader will want to look at."""
    chosen = worth_a_look(rows)
    tell(Progress("looking closer", 0, len(chosen)))
    looks = [_request_details(rows[place], table, rank) for rank, place in enumerate(chosen)]
    found = details(pool, workers, sources, looks)
    for done, (place, detail) in enumerate(zip(chosen, found, strict=True)):
        rows[place] = msgspec.structs.replace(rows[place], detail=detail)
        tell(Progress("looking closer", done + 1, len(chosen)))
    return rows


def _request_details(row: ComparisonRow, table: Table, rank: int) -> DetailRequest:
    """What to ask about a row; the first of those that fail are asked what kind of wrong it is."""
    fails = row.status in {Status.DIFFERENT, Status.DEGRADED} and rank < MOST_DIAGNOSED
    numel = row.figures.metrics.numel if row.figures and row.figures.metrics else 0
    fails = fails and (rank == 0 or numel <= MOST_DIAGNOSED_ELEMENTS)
    given = [table.pairs[place].golden for place in row.sources] if fails else []
    known = tuple(one for one in given if one is not None)
    # Of an operator that was given something else besides, too little is known.
    return DetailRequest(
        table.pairs[row.index],
        fails=fails,
        operator=row.op,
        given=known if len(known) == len(given) else (),
    )


def worth_a_look(rows: Sequence[ComparisonRow]) -> list[int]:
    """Rows to look at closely: where a difference was made, then what fails, then the shaky."""

    def rank(row: ComparisonRow) -> tuple[int, int]:
        fails = row.status in {Status.DIFFERENT, Status.DEGRADED}
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
        metrics = row.figures.metrics if row.figures is not None else None
        # Eight bytes stand for both sides; of which dtype they are does not matter here.
        room -= 8 * metrics.numel if metrics is not None else 0
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
    """That digests were compared in the place of values, where they were."""
    found = Counter(row.judged_by for row in rows if row.is_by_digest)
    return [f"{count} of {len(rows)} rows are judged by {how}" for how, count in found.items()]


def _describe_alone(pair: Pair) -> str:
    record = pair.leading.record
    whose = "golden" if pair.my is None else "mine"
    rank = f", rank {record.rank}" if record.rank else ""
    near = f"; nearest: {', '.join(pair.nearest)}" if pair.nearest else ""
    return f"{record.id} (step {record.step}{rank}; {whose} only{near})"


def _dump_facts(dump: ReadableDump, path: str) -> DumpFacts:
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
        problems=tuple(dump.problems),
    )
