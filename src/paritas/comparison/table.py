"""The rows of the table: the measurement, the position in the program, and the final status."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from paritas.comparison.rows import Basis
from paritas.core.judging.pairs import Ruling, reconsider
from paritas.core.numerics.automatic import BLIND_NOISE
from paritas.core.numerics.criterion import MAX_Z, RMS_Z
from paritas.core.results.findings import Aspect, Status
from paritas.core.results.progress import Progress
from paritas.formats.dumps.survey import RecordedCalls, is_result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paritas.comparison.judgement import Measured
    from paritas.comparison.operands import Operand, Pair
    from paritas.comparison.replay import Replayed
    from paritas.comparison.rows import ComparisonRow
    from paritas.formats.dumps.opening import ReadableDump
    from paritas.formats.files.records import Record


# --- Inherited error and own error ----------------------------------------------------------------

# A value above the noise limit of its dtype is not always the fault of the call that computed it.
# Rounding accumulates along a program, and everything after a fault inherits it. So each value is
# judged together with its inputs:
#
# - If the operator could be rerun in float64 on the candidate's inputs, its own error is known, and
#   judged by the noise of that operator alone.
# - Otherwise the relative error of the inputs is an estimate of what was inherited. An operator may
#   amplify it, so a multiple of it is allowed, and the row says that it is an estimate.

# How much an operator may amplify the relative error of its inputs, on top of the limits for noise.
AMPLIFICATION = 2.0
# Drift above this share of the value is not accepted as rounding without a warning, although no
# single call caused it.
LARGE_DRIFT = 0.1


@dataclasses.dataclass(frozen=True)
class Draft:
    """A row before it is combined with the others.

    Attributes:
        measured: what the two values alone show.
        is_result: whether it is an output of a call rather than an input.
        sources: rows of the values that it was computed from; for an input, the row of the output
            that it is.
        neighbour: the previous row in the program, used if there are no sources; None if the order
            has no meaning.
        is_guess: whether the two may not belong together.
    """

    name: str
    measured: Measured
    is_result: bool
    sources: tuple[int, ...] = ()
    neighbour: int | None = None
    is_guess: bool = False

    @property
    def needed(self) -> tuple[int, ...]:
        """The rows to resolve first."""
        near = () if self.neighbour is None else (self.neighbour,)
        return self.sources or near


def resolve(drafts: Sequence[Draft], replays: Mapping[int, Replayed]) -> list[Measured]:
    """Judge all rows together with their sources: what each row measured, in its final state."""
    resolved_rows: dict[int, Measured] = {}
    for row_index in _in_order(drafts):
        draft = drafts[row_index]
        rule = functools.partial(
            _rule_on_sources,
            draft=draft,
            drafts=drafts,
            resolved_rows=resolved_rows,
            replayed=replays.get(row_index),
        )
        rules = (rule, _rule_on_guess) if draft.is_guess else (rule,)
        (resolved_rows[row_index],) = reconsider([draft.measured], *rules)
    return [resolved_rows[row_position] for row_position in range(len(drafts))]


def _in_order(drafts: Sequence[Draft]) -> list[int]:
    """Sources first, since a fused kernel may read a value that has a later row."""
    order: list[int] = []
    visited_rows: set[int] = set()
    for start in range(len(drafts)):
        waiting = [(start, False)]
        while waiting:
            row_index, is_ready = waiting.pop()
            if is_ready:
                order.append(row_index)
            elif row_index not in visited_rows:
                visited_rows.add(row_index)
                waiting.append((row_index, True))
                waiting += [(source, False) for source in drafts[row_index].needed]
    return order


def _rule_on_sources(
    plain: Measured,
    draft: Draft,
    drafts: Sequence[Draft],
    resolved_rows: Mapping[int, Measured],
    replayed: Replayed | None,
) -> Ruling | None:
    if plain.status in {Status.IDENTICAL, Status.UNVERIFIED}:
        return None
    # A source that is not resolved yet is part of a cycle.
    sources = [source for source in draft.sources if source in resolved_rows]
    failing = [source for source in sources if resolved_rows[source].fails]
    if not draft.is_result:
        return _rule_on_argument(plain, sources, drafts, resolved_rows)
    if replayed is not None and not plain.settled:
        are_inputs_known = sources and all(
            resolved_rows[source].status is not Status.UNVERIFIED for source in sources
        )
        named = [drafts[source].name for source in failing]
        return _rule_on_replay(plain, replayed, named, inputs_known=bool(are_inputs_known))
    return _rule_on_estimate(plain, draft, sources, drafts, resolved_rows)


def _rule_on_guess(end: Measured) -> Ruling | None:
    """A difference of two values that may not belong together shows nothing."""
    if not end.fails:
        return None
    reason = f"the two are matched by order only, and differ: {end.reason}"
    advice = "map the names with --rename, and compare again"
    about = {"aspect": Aspect.STRUCTURE, "advice": advice, "made": ""}
    return Ruling(Status.UNVERIFIED, reason, about)


def _rule_on_argument(
    plain: Measured,
    sources: list[int],
    drafts: Sequence[Draft],
    resolved_rows: Mapping[int, Measured],
) -> Ruling | None:
    """An input is the output of another call, unless something changed it in between."""
    if not sources or resolved_rows[sources[0]].status is Status.UNVERIFIED:
        return None
    source = sources[0]
    if _same_difference(plain, drafts[source].measured):
        same = resolved_rows[source]
        reason = f"same value as {drafts[source].name}" if same.fails else same.reason
        error_origin = "before" if same.fails else ""
        about = {"judged_by": same.judged_by, "basis": same.basis, "made": error_origin}
        return Ruling(same.status, reason, about)
    if not plain.fails:
        return None
    if resolved_rows[source].fails:
        return Ruling(plain.status, about={"made": "before"})
    reason = f"{plain.reason}; it was correct as {drafts[source].name} and changed since then"
    return Ruling(plain.status, reason, {"made": "here"})


def _same_difference(left: Measured, right: Measured) -> bool:
    if left.figures is None or right.figures is None:
        return left.distance == right.distance and left.status is right.status
    if left.metrics is None or right.metrics is None:
        return left.metrics is right.metrics and left.distance == right.distance
    return _DIFFERENCE(left.metrics) == _DIFFERENCE(right.metrics)


_DIFFERENCE = attrgetter("rel_l2", "max_abs", "mismatched", "nonfinite_mismatches")


def _rule_on_replay(
    plain: Measured, replayed: Replayed, failing: list[str], *, inputs_known: bool
) -> Ruling:
    judgement = replayed.judgement
    about = {
        "own": replayed.own,
        "inherited": replayed.inherited,
        "attributed": "replayed",
        "judged_by": f"float64 replay ({replayed.words})" if replayed.words else "float64 replay",
        "basis": Basis.VALUES,
    }
    if not judgement.status.passes():
        about |= {"made": "here", "score": judgement.native}
        return Ruling(judgement.status, judgement.reason, about)
    if not replayed.golden_ok and plain.fails:
        reason = (
            "rerunning the operator on the golden inputs does not reproduce the golden value, but "
            "on my inputs it reproduces mine"
        )
        return Ruling(plain.status, reason, about | {"made": "here"})
    if not plain.fails:
        status = Status.UNSTABLE if judgement.status is Status.UNSTABLE else plain.status
        return Ruling(status, judgement.reason, about)
    if failing:
        reason = f"{plain.reason}; inherited from {failing[0]}"
        return Ruling(plain.status, reason, about | {"made": "before"})
    if not inputs_known:
        # An inherited error is excused only if the inputs were compared and differ by rounding.
        reason = f"{plain.reason}; inherited from inputs that were not compared"
        return Ruling(plain.status, reason, about)
    return _rule_on_drift(plain, about)


def _rule_on_drift(measured: Measured, about: dict[str, Any]) -> Ruling:
    """A difference that the rounding of the inputs explains."""
    exact = measured.figures is not None and measured.score is None
    large = measured.distance is not None and not measured.distance <= LARGE_DRIFT
    if exact or large:
        reason = "the rounding of its inputs explains the difference; no single call caused it"
        return Ruling(Status.UNSTABLE, reason, about)
    return Ruling(Status.EQUIVALENT, "", about)


def _rule_on_estimate(
    plain: Measured,
    draft: Draft,
    sources: list[int],
    drafts: Sequence[Draft],
    resolved_rows: Mapping[int, Measured],
) -> Ruling | None:
    near = draft.neighbour
    used = sources or ([near] if near is not None and near in resolved_rows else [])
    if not used:
        return None
    failing = [source for source in used if resolved_rows[source].fails]
    distances = (drafts[source].measured.distance for source in used)
    inherited = max((distance for distance in distances if distance is not None), default=None)
    total = plain.distance
    about: dict[str, Any] = {}
    if inherited is not None and total is not None:
        own_error = math.sqrt(max(total**2 - inherited**2, 0.0)) if math.isfinite(total) else total
        about = {"own": own_error, "inherited": inherited, "attributed": "estimated"}
    if not plain.fails:
        return Ruling(plain.status, about=about)
    if failing:
        reason = f"{plain.reason}; inherited from {drafts[failing[0]].name}"
        return Ruling(plain.status, reason, about | {"made": "before"})
    unknown = any(resolved_rows[source].status is Status.UNVERIFIED for source in used)
    excusable = not plain.settled and not unknown
    if excusable and inherited and _is_explained(plain, inherited):
        about["judged_by"] = f"{plain.judged_by} and the error of its inputs"
        return _rule_on_drift(plain, about)
    return Ruling(plain.status, about=about | {"made": "here" if sources and not unknown else ""})


def _is_explained(measured: Measured, inherited: float) -> bool:
    """Whether noise and a multiple of the inputs' error cover the difference."""
    metrics = measured.metrics
    allowed = AMPLIFICATION * inherited
    if metrics is None:
        return measured.distance is not None and measured.distance <= RMS_Z * allowed
    if metrics.nonfinite_mismatches or measured.score is None:
        return False
    scale = metrics.rmse / metrics.rel_l2 if metrics.rel_l2 else 0.0
    noise = allowed * scale
    return metrics.max_abs <= MAX_Z * noise * BLIND_NOISE and metrics.rmse <= RMS_Z * noise


# --- Rows -----------------------------------------------------------------------------------------

# At most this many operators are rerun, those with a clear difference first.
MOST_REPLAYS = 4000
# Sources that record in program order.
_IN_ORDER = {"eager", "fx", "fused"}

# Levels with one operator or a few, which can be rerun.
_OPERATORS = {"op", "node", "buffer"}
_NAMED = {"aten", "prims", "operator", "getitem"}
_GUESS = "matched by order and shape only: the two may not belong together"

_INTEGER = re.compile(r"-?\d{1,18}")
_AGREE = {Status.IDENTICAL, Status.EQUIVALENT}

_Key = tuple[int, int]  # of a record: rank and sequence number


class Table:
    """All pairs in program order, with their sources.

    Attributes:
        drafts: the rows before they are combined.
        notes: for the user.
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
        drafts: list[Draft] = []
        before: dict[tuple[int, int | None, str, str], int] = {}
        maker_rows: dict[tuple[object, ...], int] = {}
        for row_index, (pair, measured) in enumerate(zip(self.pairs, self._measured, strict=True)):
            record = pair.leading.record
            site = record.site
            # A graph's input is the output of another graph, or comes from outside.
            gave = is_result(site) and site.op != "placeholder"
            key = (record.step, pair.rank, site.phase, site.level)
            sources = self._sources(pair, row_index)
            value = _stored_value_key(pair.my)
            if not sources and not gave and value in maker_rows:
                sources = (maker_rows[value],)  # of an earlier step
            neighbour = before.get(key) if site.source in _IN_ORDER or site.module else None
            is_guess = pair.matched_by == "order"
            drafts.append(Draft(record.id, measured, gave, sources, neighbour, is_guess))
            if gave and measured.distance is not None:
                before[key] = row_index
            if gave and value is not None:
                maker_rows[value] = row_index
        return drafts

    def _accept_spellings(self, resolved: Sequence[Measured]) -> list[Measured]:
        """Accept another integer for an operator's argument, such as 1 for -1, if results agree."""
        calls: dict[tuple[object, ...], list[Measured]] = {}
        for pair, end in zip(self.pairs, resolved, strict=True):
            if is_result(pair.leading.record.site):
                calls.setdefault(_call_key(pair), []).append(end)

        def rule_on_spelling(end: Measured, pair: Pair) -> Ruling | None:
            if not end.fails or end.my is None or end.golden is None:
                return None
            is_operator = pair.leading.record.site.level in ("op", "node")
            if not is_operator or not _are_integers(end.my.value, end.golden.value):
                return None
            results = calls.get(_call_key(pair), [])
            if not results or any(call_result.status not in _AGREE for call_result in results):
                return None
            limits = f"the argument is {end.reason}, but the results of the call agree"
            return Ruling(Status.EQUIVALENT, "", {"limits": limits})

        return [
            row
            for pair, end in zip(self.pairs, resolved, strict=True)
            for row in reconsider([end], functools.partial(rule_on_spelling, pair=pair))
        ]

    def _sources(self, pair: Pair, row_index: int) -> tuple[int, ...]:
        """The rows of the values that a pair was computed from, according to either dump."""
        source_rows: dict[int, None] = {}
        sides = (
            (pair.my, self._my_calls, self._rows_of_mine),
            (pair.golden, self._golden_calls, self._rows_of_golden),
        )
        for operand, calls, places in sides:
            if operand is None or source_rows:
                continue
            for record in operand.records():
                recorded_calls = calls.get((record.rank, record.step))
                for source in recorded_calls.sources(record) if recorded_calls is not None else ():
                    row = places.get((source.rank, source.sequence))
                    if row is not None and row != row_index:
                        source_rows[row] = None
        return tuple(source_rows)

    def replay(
        self, tell: Callable[[Progress], None], *, trust_digests: bool
    ) -> dict[int, Replayed]:
        """Rerun operators with different results, to separate their own error from inherited."""
        replayable_rows = [
            row_position
            for row_position in range(len(self.drafts))
            if self._is_replayable(row_position)
        ]
        replayable_rows.sort(
            key=lambda row_position: self._measured[row_position].status is not Status.DIFFERENT
        )
        if len(replayable_rows) > MOST_REPLAYS:
            self.notes.append(
                f"{len(replayable_rows) - MOST_REPLAYS} of {len(replayable_rows)} operators "
                "that differ were not "
                f"rerun: their own errors are estimated"
            )
            replayable_rows = replayable_rows[:MOST_REPLAYS]
        replays: dict[int, Replayed] = {}
        if not replayable_rows:
            return replays
        # This imports torch's compiler, which takes seconds and is rarely needed.
        from paritas.comparison.replay import Replayed, replay

        readers = [
            functools.partial(dump.view, check=not trust_digests)
            for dump in (self._my, self._golden)
        ]
        for done, row_index in enumerate(replayable_rows):
            calls = self._calls(self.pairs[row_index])
            if calls is not None:
                result = replay(*calls, *readers)
                if isinstance(result, Replayed):
                    replays[row_index] = result
                else:
                    self._unreplayed[row_index] = f"not rerun: {result.reason}"
            tell(Progress("rerunning operators in float64", done + 1, len(replayable_rows)))
        return replays

    def _is_replayable(self, row_index: int) -> bool:
        draft, pair = self.drafts[row_index], self.pairs[row_index]
        if not draft.is_result or draft.measured.settled or not draft.measured.nbytes:
            return False
        side_records = [
            (operand.record, dump)
            for operand, dump in ((pair.my, self._my), (pair.golden, self._golden))
            if operand is not None
        ]
        # Other tools record functions, not operators.
        if not any(record.site.op.partition(".")[0] in _NAMED for record, _ in side_records):
            return False
        return all(
            record.site.level in _OPERATORS and not _is_of_other_code(record, dump)
            for record, dump in side_records
        )

    def _calls(self, pair: Pair) -> tuple[Record, Record, RecordedCalls, RecordedCalls] | None:
        """The records of a pair, and the calls that contain them."""
        if pair.my is None or pair.golden is None or pair.my.recipe or pair.golden.recipe:
            return None
        my_record, golden = pair.my.record, pair.golden.record
        calls = self._my_calls.get((my_record.rank, my_record.step))
        others = self._golden_calls.get((golden.rank, golden.step))
        return None if calls is None or others is None else (my_record, golden, calls, others)

    def rows(self, resolved: Sequence[Measured]) -> list[ComparisonRow]:
        """The finished rows."""
        rows = []
        resolved = self._accept_spellings(resolved)
        for row_index, (pair, end) in enumerate(zip(self.pairs, resolved, strict=True)):
            guess = _GUESS if pair.matched_by == "order" else ""
            limit_texts = (end.limits, self._unreplayed.get(row_index), guess)
            limits = "; ".join(filter(None, limit_texts))
            rows.append(end.in_table(row_index, limits, self.drafts[row_index].sources))
        return rows


def _are_integers(*texts: str | None) -> bool:
    return all(text is not None and _INTEGER.fullmatch(text) for text in texts)


def _is_of_other_code(record: Record, dump: ReadableDump) -> bool:
    """Whether an output comes from code that rounds differently from the recorded buffers.

    The outputs of a fused graph are those of the unmodified code. If recording changed the results,
    buffers and outputs come from different code.
    """
    site = record.site
    if site.source != "fused" or site.level != "node":
        return False
    label = f"{site.graph} {site.phase}"
    observed = dump.header(record.rank).observed
    return any(
        observed_graph.graph == label and observed_graph.status != "unchanged"
        for observed_graph in observed
    )


def _stored_value_key(operand: Operand | None) -> tuple[object, ...] | None:
    """Equal for records of the same values on one rank; None if unknown."""
    if operand is None or operand.recipe is not None or not operand.record.digest:
        return None
    record = operand.record
    facts = record.tensor
    return None if facts is None else (record.rank, record.digest, facts.dtype, facts.shape)


def _call_key(pair: Pair) -> tuple[object, ...]:
    record = pair.leading.record
    return record.step, pair.rank, record.id.rpartition("/")[0]


def _all_calls(records: Iterable[Record]) -> dict[_Key, RecordedCalls]:
    """The calls of each rank and step."""
    grouped: dict[_Key, list[Record]] = {}
    for record in records:
        grouped.setdefault((record.rank, record.step), []).append(record)
    return {key: RecordedCalls(call_records) for key, call_records in grouped.items()}


def _find_rows(pairs: Sequence[Pair], *, mine: bool) -> dict[_Key, int]:
    """The row of each record; if it is in several, the one in which it is an output."""
    rows_by_record: dict[_Key, int] = {}
    for row_index, pair in enumerate(pairs):
        operand = pair.my if mine else pair.golden
        if operand is None:
            continue
        is_main = pair.my is None or is_result(pair.my.record.site)
        for record in operand.records():
            key = (record.rank, record.sequence)
            if is_main or key not in rows_by_record:
                rows_by_record[key] = row_index
    return rows_by_record
