"""`paritas.compare`: two dumps, one table, and where they begin to differ."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import torch

from paritas.comparison.attributing import resolve
from paritas.comparison.collecting import few_full_collections
from paritas.comparison.diverging import first_divergence, first_non_finite
from paritas.comparison.executors import executor_of, opened
from paritas.comparison.matching.aligning import align_steps
from paritas.comparison.matching.pairing import match
from paritas.comparison.matching.rules import Rules
from paritas.comparison.matching.selecting import Asked
from paritas.comparison.measuring import How, Look, Sources, details, measure_all
from paritas.comparison.sharding.assembling import operands
from paritas.comparison.tabling import Table
from paritas.dumps.remote import local_copy
from paritas.errors import UsageError
from paritas.numerics.comparisons import Comparison, DumpFacts
from paritas.numerics.findings import Aspect, Coverage, Status
from paritas.reporting.progress import Progress, shows_progress
from paritas.settings.versions import own_version

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from paritas.comparison.judging import Measured
    from paritas.comparison.matching.pairing import Matches
    from paritas.comparison.operands import Operand, Pair
    from paritas.dumps.opening import ReadableDump
    from paritas.dumps.records import Site
    from paritas.numerics.comparisons import Row
    from paritas.numerics.requirements import Requirement

    Tell = Callable[[Progress], None]

__all__ = ["compare"]

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
        matched = _matched(mine, theirs, chosen, ranks)
        alone = [pair for pair in matched.pairs if pair.my is None or pair.golden is None]
        pairs = matched.pairs
        if unmatched == "list":
            pairs = [pair for pair in pairs if pair.my is not None and pair.golden is not None]
        sources = Sources(str(my_path), mine.kind, str(golden_path), theirs.kind)
        with executor_of(executor, jobs) as (pool, workers):
            how = How(quick=quick, trust_digests=trust_digests)
            measured = _measured(pool, workers, sources, pairs, chosen, how, tell)
            table = Table(mine, theirs, pairs, measured)
            replays = table.replay(tell, trust_digests=trust_digests) if replay else {}
            rows = table.rows(resolve(table.drafts, replays))
            rows = _with_details(pool, workers, sources, rows, table, tell)
    return Comparison(
        my=_facts(mine, str(my)),
        golden=_facts(theirs, str(golden)),
        rows=tuple(rows),
        coverage=_coverage(rows, matched, alone),
        notes=(*matched.notes, *table.notes, *_unread(rows)),
        first=first_divergence(rows),
        first_non_finite=first_non_finite(rows),
        strict=strict,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        paritas=own_version(),
        torch=str(torch.__version__),
        seconds=time.monotonic() - began,
        nbytes=sum(item.nbytes for item in measured),
    )


def _matched(
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
    asked = (Asked.of(mine), Asked.of(theirs))
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
    my: set[int], golden: set[int], my_asked: Asked, golden_asked: Asked
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


def _measured(
    pool: Executor,
    workers: int,
    sources: Sources,
    pairs: Sequence[Pair],
    rules: Rules,
    how: How,
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
    rows: list[Row],
    table: Table,
    tell: Tell,
) -> list[Row]:
    """The rows, with a closer look at those that a reader will want to look at."""
    chosen = worth_a_look(rows)
    tell(Progress("looking closer", 0, len(chosen)))
    looks = [_look(rows[place], table, rank) for rank, place in enumerate(chosen)]
    found = details(pool, workers, sources, looks)
    for done, (place, detail) in enumerate(zip(chosen, found, strict=True)):
        rows[place] = msgspec.structs.replace(rows[place], detail=detail)
        tell(Progress("looking closer", done + 1, len(chosen)))
    return rows


def _look(row: Row, table: Table, rank: int) -> Look:
    """What to ask about a row; the first of those that fail are asked what kind of wrong it is."""
    fails = row.status in {Status.DIFFERENT, Status.DEGRADED} and rank < MOST_DIAGNOSED
    numel = row.figures.metrics.numel if row.figures and row.figures.metrics else 0
    fails = fails and (rank == 0 or numel <= MOST_DIAGNOSED_ELEMENTS)
    given = [table.pairs[place].golden for place in row.sources] if fails else []
    known = tuple(one for one in given if one is not None)
    # Of an operator that was given something else besides, too little is known.
    return Look(
        table.pairs[row.index],
        fails=fails,
        operator=row.op,
        given=known if len(known) == len(given) else (),
    )


def worth_a_look(rows: Sequence[Row]) -> list[int]:
    """Rows to look at closely: where a difference was made, then what fails, then the shaky."""

    def rank(row: Row) -> tuple[int, int]:
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


def _coverage(rows: Sequence[Row], matched: Matches, alone: Sequence[Pair]) -> Coverage:
    return Coverage(
        compared=sum(
            row.my is not None and row.golden is not None and row.aspect is not Aspect.HARNESS
            for row in rows
        ),
        skipped=tuple(matched.skipped),
        not_selected=tuple(map(_alone, matched.not_selected)),
        unmatched=tuple(map(_alone, alone)),
    )


def _unread(rows: Sequence[Row]) -> list[str]:
    """That digests were compared in the place of values, where they were."""
    found = Counter(row.judged_by for row in rows if row.is_by_digest)
    return [f"{count} of {len(rows)} rows are judged by {how}" for how, count in found.items()]


def _alone(pair: Pair) -> str:
    record = pair.leading.record
    whose = "golden" if pair.my is None else "mine"
    rank = f", rank {record.rank}" if record.rank else ""
    near = f"; nearest: {', '.join(pair.nearest)}" if pair.nearest else ""
    return f"{record.id} (step {record.step}{rank}; {whose} only{near})"


def _facts(dump: ReadableDump, path: str) -> DumpFacts:
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
