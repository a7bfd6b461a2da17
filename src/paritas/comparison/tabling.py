"""The rows of the table: what was measured, where it is in the program, and how it ended."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from paritas.comparison.attributing import Draft
from paritas.comparison.replaying.dataflow import Calls
from paritas.dumps.finiteness import is_result
from paritas.numerics.comparisons import Row
from paritas.numerics.findings import Status
from paritas.reporting.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paritas.comparison.attributing import Resolved
    from paritas.comparison.judging import Measured
    from paritas.comparison.operands import Operand, Pair
    from paritas.comparison.replaying.replay import Replayed
    from paritas.dumps.opening import ReadableDump
    from paritas.dumps.records import Record

__all__ = ["Table"]

# More operators than this are not run again: those that differ most clearly come first.
MOST_REPLAYS = 4000
# Where these were found, their order is that of the program.
_IN_ORDER = {"eager", "fx", "fused"}

# What is one operator, or a few: it can be run again.
_OPERATORS = {"op", "node", "buffer"}
_NAMED = {"aten", "prims", "operator", "getitem"}
_GUESS = "matched by order and shape alone: the two may not belong together"

_Key = tuple[int, int]  # of a record: rank and sequence number


class Table:
    """All pairs in the order of the program, and what they were computed from.

    Attributes:
        pairs: as they were matched.
        drafts: the rows before they are seen together.
        notes: what should be known of how it was made.
    """

    def __init__(
        self,
        my: ReadableDump,
        golden: ReadableDump,
        pairs: Sequence[Pair],
        measured: Sequence[Measured],
    ) -> None:
        self.pairs = pairs
        self.notes: list[str] = []
        self._my = my
        self._golden = golden
        self._measured = measured
        self._unreplayed: dict[int, str] = {}
        self._my_calls = _all_calls(my.records())
        self._golden_calls = _all_calls(golden.records())
        self._rows_of_mine = _places(pairs, mine=True)
        self._rows_of_golden = _places(pairs, mine=False)
        self.drafts = self._drafts()

    def _drafts(self) -> list[Draft]:
        found: list[Draft] = []
        before: dict[tuple[int, int | None, str, str], int] = {}
        made: dict[tuple[object, ...], int] = {}
        for place, (pair, measured) in enumerate(zip(self.pairs, self._measured, strict=True)):
            record = pair.leading.record
            site = record.site
            # What a graph is given was made by another, or comes from outside of all.
            gave = is_result(site) and site.op != "placeholder"
            key = (record.step, _rank(pair), site.phase, site.level)
            sources = self._sources(pair, place)
            value = _value(pair.my)
            if not sources and not gave and value in made:
                sources = (made[value],)  # of an earlier step
            neighbour = before.get(key) if site.source in _IN_ORDER or site.module else None
            found.append(Draft(record.id, measured, gave, sources, neighbour))
            if gave and measured.distance is not None:
                before[key] = place
            if gave and value is not None:
                made[value] = place
        return found

    def _sources(self, pair: Pair, place: int) -> tuple[int, ...]:
        """Rows of the values that a pair's was computed from, as either dump tells."""
        found: dict[int, None] = {}
        sides = (
            (pair.my, self._my_calls, self._rows_of_mine),
            (pair.golden, self._golden_calls, self._rows_of_golden),
        )
        for operand, calls, places in sides:
            if operand is None or found:
                continue
            for record in operand.records():
                known = calls.get((record.rank, record.step))
                for source in known.sources(record) if known is not None else ():
                    row = places.get((source.rank, source.sequence))
                    if row is not None and row != place:
                        found[row] = None
        return tuple(found)

    def replay(
        self, tell: Callable[[Progress], None], *, trust_digests: bool
    ) -> dict[int, Replayed]:
        """Run operators again whose results differ, to tell what they made from what came in."""
        wanted = [place for place in range(len(self.drafts)) if self._is_replayable(place)]
        wanted.sort(key=lambda place: self._measured[place].status is not Status.DIFFERENT)
        if len(wanted) > MOST_REPLAYS:
            self.notes.append(
                f"{len(wanted) - MOST_REPLAYS} of {len(wanted)} operators that differ were not "
                f"run again: their own errors are estimated"
            )
            wanted = wanted[:MOST_REPLAYS]
        found: dict[int, Replayed] = {}
        if not wanted:
            return found
        # Torch's compiler comes with it, which takes seconds that most comparisons need not spend.
        from paritas.comparison.replaying.replay import Replayed, replay

        readers = [
            functools.partial(dump.view, check=not trust_digests)
            for dump in (self._my, self._golden)
        ]
        for done, place in enumerate(wanted):
            calls = self._calls(self.pairs[place])
            if calls is not None:
                result = replay(*calls, *readers)
                if isinstance(result, Replayed):
                    found[place] = result
                else:
                    self._unreplayed[place] = f"not run again: {result.reason}"
            tell(Progress("running operators again in float64", done + 1, len(wanted)))
        return found

    def _is_replayable(self, place: int) -> bool:
        draft, pair = self.drafts[place], self.pairs[place]
        if not draft.is_result or draft.measured.settled or not draft.measured.nbytes:
            return False
        found = [
            (one.record, dump)
            for one, dump in ((pair.my, self._my), (pair.golden, self._golden))
            if one is not None
        ]
        # Other tools name functions, not operators.
        if not any(record.site.op.partition(".")[0] in _NAMED for record, _ in found):
            return False
        return all(
            record.site.level in _OPERATORS and not _is_of_other_code(record, dump)
            for record, dump in found
        )

    def _calls(self, pair: Pair) -> tuple[Record, Record, Calls, Calls] | None:
        """The records of a pair, and the calls among which they are."""
        if pair.my is None or pair.golden is None or pair.my.recipe or pair.golden.recipe:
            return None
        mine, golden = pair.my.record, pair.golden.record
        calls = self._my_calls.get((mine.rank, mine.step))
        others = self._golden_calls.get((golden.rank, golden.step))
        return None if calls is None or others is None else (mine, golden, calls, others)

    def rows(self, resolved: Sequence[Resolved]) -> list[Row]:
        """The table, with how each row ended."""
        rows = []
        ends = zip(self.pairs, self._measured, resolved, self.drafts, strict=True)
        for place, (pair, measured, end, draft) in enumerate(ends):
            guess = _GUESS if pair.matched_by == "order" else ""
            known = (measured.limits, self._unreplayed.get(place), guess)
            limits = "; ".join(filter(None, known))
            rows.append(_row(place, pair, measured, end, limits, draft.sources))
        return rows


def _row(
    place: int,
    pair: Pair,
    measured: Measured,
    end: Resolved,
    limits: str,
    sources: tuple[int, ...],
) -> Row:
    record = pair.leading.record
    site = record.site
    # The side of the fused code knows the kernel and the nodes it stands for.
    own = site if pair.my is None else pair.my.record.site
    return Row(
        index=place,
        step=pair.golden.step if pair.golden is not None else record.step,
        rank=_rank(pair),
        name=record.id,
        call=_call(record),
        level=site.level,
        phase=site.phase,
        side=site.side,
        position=site.position,
        op=site.op,
        module=site.module or own.module,
        line=site.line or own.line,
        code=site.code or own.code,
        graph=site.graph,
        kernel=own.kernel,
        nodes=own.nodes or site.nodes,
        matched_by=pair.matched_by,
        my=measured.my,
        golden=measured.golden,
        status=end.status,
        aspect=measured.aspect,
        reason=end.reason,
        advice=end.advice,
        judged_by=end.judged_by,
        limits=limits,
        figures=measured.figures,
        score=end.score,
        own=end.own,
        inherited=end.inherited,
        attributed=end.attributed,
        made=end.made,
        sources=sources,
    )


def _is_of_other_code(record: Record, dump: ReadableDump) -> bool:
    """Whether a result comes from code that rounds unlike the code whose buffers were recorded.

    What a fused graph gives is taken from the code as it would run unwatched. Where watching it
    changed its results, buffers and results are not those of one and the same code.
    """
    site = record.site
    if site.source != "fused" or site.level != "node":
        return False
    label = f"{site.graph} {site.phase}"
    observed = dump.header(record.rank).observed
    return any(one.graph == label and one.status != "unchanged" for one in observed)


def _value(operand: Operand | None) -> tuple[object, ...] | None:
    """The same for records of the same values on one rank; None where that is not known."""
    if operand is None or operand.recipe is not None or not operand.record.digest:
        return None
    record = operand.record
    facts = record.tensor
    return None if facts is None else (record.rank, record.digest, facts.dtype, facts.shape)


def _call(record: Record) -> str:
    return record.id.rpartition("/")[0]


def _rank(pair: Pair) -> int | None:
    operand = pair.leading
    return operand.ranks[0] if len(operand.ranks) == 1 else None


def _all_calls(records: Iterable[Record]) -> dict[_Key, Calls]:
    """The calls of each rank and step."""
    grouped: dict[_Key, list[Record]] = {}
    for record in records:
        grouped.setdefault((record.rank, record.step), []).append(record)
    return {key: Calls(found) for key, found in grouped.items()}


def _places(pairs: Sequence[Pair], *, mine: bool) -> dict[_Key, int]:
    """The row of each record: where one is in several, that in which it is a result."""
    found: dict[_Key, int] = {}
    for place, pair in enumerate(pairs):
        operand = pair.my if mine else pair.golden
        if operand is None:
            continue
        is_main = pair.my is None or is_result(pair.my.record.site)
        for record in operand.records():
            key = (record.rank, record.sequence)
            if is_main or key not in found:
                found[key] = place
    return found
