"""The rows of the table: what was measured, where it is in the program, and its status."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

from paritas.comparison.dataflow import RecordedCalls
from paritas.dumps.survey import is_result
from paritas.numerics.automatic import BLIND_NOISE
from paritas.numerics.criterion import MAX_Z, RMS_Z
from paritas.results.comparisons import ComparisonRow
from paritas.results.findings import Status
from paritas.results.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paritas.comparison.judgement import Measured
    from paritas.comparison.operands import Operand, Pair
    from paritas.comparison.replay import Replayed
    from paritas.dumps.opening import ReadableDump
    from paritas.files.records import Record
    from paritas.results.comparisons import Attributed, Made
    from paritas.results.findings import Score


# --- What came in, and what was added -------------------------------------------------------------

# A value that is over the limit of its dtype's noise need not be a fault of the call that gave it.
# Rounding adds up along a program, and a fault is carried on by everything after it. So each value
# is seen together with those it was computed from:
#
# - Where the operator could be run again in float64 on the very inputs that the candidate had, its
#   own error is known, and judged by the noise of that operator alone.
# - Where it could not, the error of the inputs, relative to their size, is what may have come in.
#   An
#   operator may amplify it; so a multiple of it is allowed, and the row says that it is an
#   estimate.

# What an operator may make of its inputs' relative error without being suspected, beyond the limits
# that hold for noise in any case.
AMPLIFICATION = 2.0
# Drift that is a larger share of the value than this is no rounding any more that one would accept
# unseen, though no single call is to blame.
LARGE_DRIFT = 0.1


@dataclasses.dataclass(frozen=True)
class Draft:
    """A row before it is seen together with the others.

    Attributes:
        name: what it is called.
        measured: what the two values alone show.
        is_result: whether a call gave it, rather than being given it.
        sources: rows (by place) of the values that it was computed from; of an argument, the row
            of the value that it is.
        neighbour: where no sources are recorded, the row before it in the program; None where the
            order means nothing.
    """

    name: str
    measured: Measured
    is_result: bool
    sources: tuple[int, ...] = ()
    neighbour: int | None = None


@dataclasses.dataclass(frozen=True)
class Resolved:
    """The end of a row."""

    status: Status
    reason: str
    judged_by: str
    advice: str = ""
    own: float | None = None
    inherited: float | None = None
    attributed: Attributed = ""
    made: Made = ""
    score: Score | None = None

    @property
    def fails(self) -> bool:
        """Whether it differs by more than rounding."""
        return self.status in {Status.DIFFERENT, Status.DEGRADED}


def resolve(drafts: Sequence[Draft], replays: Mapping[int, Replayed]) -> list[Resolved]:
    """Resolve all rows, each after those that it was computed from."""
    found: dict[int, Resolved] = {}
    for place in _in_order(drafts):
        found[place] = _resolve_one(drafts[place], drafts, found, replays.get(place))
    return [found[place] for place in range(len(drafts))]


def _in_order(drafts: Sequence[Draft]) -> list[int]:
    """Sources first, whatever the order of the table: a fused kernel reads what is told later."""
    order: list[int] = []
    seen: set[int] = set()
    for start in range(len(drafts)):
        waiting = [(start, False)]
        while waiting:
            place, is_ready = waiting.pop()
            if is_ready:
                order.append(place)
            elif place not in seen:
                seen.add(place)
                waiting.append((place, True))
                waiting += [(source, False) for source in _list_needed(drafts[place])]
    return order


def _list_needed(draft: Draft) -> tuple[int, ...]:
    if draft.sources or draft.neighbour is None:
        return draft.sources
    return (draft.neighbour,)


def _resolve_one(
    draft: Draft,
    drafts: Sequence[Draft],
    found: Mapping[int, Resolved],
    replayed: Replayed | None,
) -> Resolved:
    measured = draft.measured
    if measured.status is Status.IDENTICAL:  # as most are
        return Resolved(
            measured.status,
            measured.reason,
            measured.judged_by,
            measured.advice,
            own=0.0,
            inherited=0.0,
            score=measured.score,
        )
    plain = Resolved(
        measured.status,
        measured.reason,
        measured.judged_by,
        measured.advice,
        score=measured.score,
    )
    if measured.status is Status.UNVERIFIED:
        return plain
    # One that is missing here is part of a ring, and tells nothing.
    sources = [source for source in draft.sources if source in found]
    failing = [source for source in sources if found[source].fails]
    if not draft.is_result:
        return _resolve_argument(draft, plain, sources, drafts, found)
    if replayed is not None and not measured.settled:
        known = sources and all(found[one].status is not Status.UNVERIFIED for one in sources)
        named = [drafts[source].name for source in failing]
        return _resolve_replayed(draft, plain, replayed, named, inputs_known=bool(known))
    return _resolve_estimated(draft, plain, sources, drafts, found)


def _resolve_argument(
    draft: Draft,
    plain: Resolved,
    sources: list[int],
    drafts: Sequence[Draft],
    found: Mapping[int, Resolved],
) -> Resolved:
    """What a call was given is what another call gave, unless something happened on the way."""
    if not sources or found[sources[0]].status is Status.UNVERIFIED:
        return plain
    source = sources[0]
    if _same_difference(draft.measured, drafts[source].measured):
        same = found[source]
        reason = f"it is {drafts[source].name}" if same.fails else same.reason
        return dataclasses.replace(
            plain,
            status=same.status,
            reason=reason,
            judged_by=same.judged_by,
            made="before" if same.fails else "",
        )
    if not plain.fails:
        return plain
    if found[source].fails:
        return dataclasses.replace(plain, made="before")
    reason = f"{plain.reason}; {drafts[source].name}, which it is, was right: changed on the way"
    return dataclasses.replace(plain, reason=reason, made="here")


def _same_difference(left: Measured, right: Measured) -> bool:
    if left.figures is None or right.figures is None:
        return left.distance == right.distance and left.status is right.status
    one, other = left.figures.metrics, right.figures.metrics
    if one is None or other is None:
        return one is other and left.distance == right.distance
    return (one.rel_l2, one.max_abs, one.mismatched, one.nonfinite_mismatches) == (
        other.rel_l2,
        other.max_abs,
        other.mismatched,
        other.nonfinite_mismatches,
    )


def _resolve_replayed(
    draft: Draft, plain: Resolved, replayed: Replayed, failing: list[str], *, inputs_known: bool
) -> Resolved:
    judgement = replayed.judgement
    known = dataclasses.replace(
        plain,
        own=replayed.own,
        inherited=replayed.inherited,
        attributed="replayed",
        judged_by=f"float64 replay ({replayed.words})" if replayed.words else "float64 replay",
    )
    if not judgement.status.passes():
        return dataclasses.replace(
            known,
            status=judgement.status,
            reason=judgement.reason,
            made="here",
            score=judgement.native,
        )
    if not replayed.golden_ok and plain.fails:
        reason = (
            "the golden value is not what the operator gives for the golden inputs, and mine is "
            "for mine"
        )
        return dataclasses.replace(known, reason=reason, made="here")
    if not plain.fails:
        status = Status.UNSTABLE if judgement.status is Status.UNSTABLE else plain.status
        return dataclasses.replace(known, status=status, reason=judgement.reason)
    if failing:
        reason = f"{plain.reason}; it came in with {failing[0]}"
        return dataclasses.replace(known, reason=reason, made="before")
    if not inputs_known:
        # What came in is excused only where it was compared itself, and found to be rounding.
        reason = f"{plain.reason}; it came in with inputs that nothing was compared with"
        return dataclasses.replace(known, reason=reason)
    return _resolve_drifted(draft, known)


def _resolve_drifted(draft: Draft, known: Resolved) -> Resolved:
    """Inputs that differ by rounding explain all of it."""
    exact = draft.measured.figures is not None and draft.measured.score is None
    distance = draft.measured.distance
    large = distance is not None and not distance <= LARGE_DRIFT
    if exact or large:
        reason = "rounding of what it was computed from decides it; no call is to blame"
        return dataclasses.replace(known, status=Status.UNSTABLE, reason=reason)
    return dataclasses.replace(known, status=Status.EQUIVALENT, reason="")


def _resolve_estimated(
    draft: Draft,
    plain: Resolved,
    sources: list[int],
    drafts: Sequence[Draft],
    found: Mapping[int, Resolved],
) -> Resolved:
    near = draft.neighbour
    used = sources or ([near] if near is not None and near in found else [])
    if not used:
        return plain
    failing = [source for source in used if found[source].fails]
    inherited = _find_largest(drafts[source].measured.distance for source in used)
    total = draft.measured.distance
    known = plain
    if inherited is not None and total is not None:
        own = math.sqrt(max(total**2 - inherited**2, 0.0)) if math.isfinite(total) else total
        known = dataclasses.replace(plain, own=own, inherited=inherited, attributed="estimated")
    if not plain.fails:
        return known
    if failing:
        reason = f"{plain.reason}; it came in with {drafts[failing[0]].name}"
        return dataclasses.replace(known, reason=reason, made="before")
    unknown = any(found[source].status is Status.UNVERIFIED for source in used)
    excusable = not draft.measured.settled and not unknown
    if excusable and inherited and _is_explained(draft.measured, inherited):
        judged_by = f"{plain.judged_by}, and the error of its inputs"
        return _resolve_drifted(draft, dataclasses.replace(known, judged_by=judged_by))
    return dataclasses.replace(known, made="here" if sources and not unknown else "")


def _find_largest(distances: object) -> float | None:
    known = [one for one in distances if isinstance(one, float)]  # type: ignore[attr-defined]
    return max(known, default=None)


def _is_explained(measured: Measured, inherited: float) -> bool:
    """Whether noise and a multiple of the inputs' error are as large as the difference."""
    metrics = measured.figures.metrics if measured.figures is not None else None
    allowed = AMPLIFICATION * inherited
    if metrics is None:
        return measured.distance is not None and measured.distance <= RMS_Z * allowed
    if metrics.nonfinite_mismatches or measured.score is None:
        return False
    scale = metrics.rmse / metrics.rel_l2 if metrics.rel_l2 else 0.0
    noise = allowed * scale
    return metrics.max_abs <= MAX_Z * noise * BLIND_NOISE and metrics.rmse <= RMS_Z * noise


# --- Rows -----------------------------------------------------------------------------------------

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
        self._rows_of_mine = _find_rows(pairs, mine=True)
        self._rows_of_golden = _find_rows(pairs, mine=False)
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
            key = (record.step, _find_rank(pair), site.phase, site.level)
            sources = self._sources(pair, place)
            value = _stored_value_key(pair.my)
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
        from paritas.comparison.replay import Replayed, replay

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

    def _calls(self, pair: Pair) -> tuple[Record, Record, RecordedCalls, RecordedCalls] | None:
        """The records of a pair, and the calls among which they are."""
        if pair.my is None or pair.golden is None or pair.my.recipe or pair.golden.recipe:
            return None
        mine, golden = pair.my.record, pair.golden.record
        calls = self._my_calls.get((mine.rank, mine.step))
        others = self._golden_calls.get((golden.rank, golden.step))
        return None if calls is None or others is None else (mine, golden, calls, others)

    def rows(self, resolved: Sequence[Resolved]) -> list[ComparisonRow]:
        """The table, with how each row ended."""
        rows = []
        ends = zip(self.pairs, self._measured, resolved, self.drafts, strict=True)
        for place, (pair, measured, end, draft) in enumerate(ends):
            guess = _GUESS if pair.matched_by == "order" else ""
            known = (measured.limits, self._unreplayed.get(place), guess)
            limits = "; ".join(filter(None, known))
            rows.append(_make_row(place, pair, measured, end, limits, draft.sources))
        return rows


def _make_row(
    place: int,
    pair: Pair,
    measured: Measured,
    end: Resolved,
    limits: str,
    sources: tuple[int, ...],
) -> ComparisonRow:
    record = pair.leading.record
    site = record.site
    # The side of the fused code knows the kernel and the nodes it stands for.
    own = site if pair.my is None else pair.my.record.site
    return ComparisonRow(
        index=place,
        step=pair.golden.step if pair.golden is not None else record.step,
        rank=_find_rank(pair),
        name=record.id,
        call=_call_name(record),
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


def _stored_value_key(operand: Operand | None) -> tuple[object, ...] | None:
    """The same for records of the same values on one rank; None where that is not known."""
    if operand is None or operand.recipe is not None or not operand.record.digest:
        return None
    record = operand.record
    facts = record.tensor
    return None if facts is None else (record.rank, record.digest, facts.dtype, facts.shape)


def _call_name(record: Record) -> str:
    return record.id.rpartition("/")[0]


def _find_rank(pair: Pair) -> int | None:
    operand = pair.leading
    return operand.ranks[0] if len(operand.ranks) == 1 else None


def _all_calls(records: Iterable[Record]) -> dict[_Key, RecordedCalls]:
    """The calls of each rank and step."""
    grouped: dict[_Key, list[Record]] = {}
    for record in records:
        grouped.setdefault((record.rank, record.step), []).append(record)
    return {key: RecordedCalls(found) for key, found in grouped.items()}


def _find_rows(pairs: Sequence[Pair], *, mine: bool) -> dict[_Key, int]:
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
