"""What came in, and what was added: the status of a value in the light of what it was made from.

A value that is over the limit of its dtype's noise need not be a fault of the call that gave it.
Rounding adds up along a program, and a fault is carried on by everything after it. So each value is
seen together with those it was computed from:

- Where the operator could be run again in float64 on the very inputs that the candidate had, its
  own error is known, and judged by the noise of that operator alone.
- Where it could not, the error of the inputs, relative to their size, is what may have come in. An
  operator may amplify it; so a multiple of it is allowed, and the row says that it is an estimate.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from paritas.numerics.automatic import BLIND_NOISE
from paritas.numerics.criterion import MAX_Z, RMS_Z
from paritas.numerics.findings import Status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paritas.comparison.judging import Measured
    from paritas.comparison.replaying.replay import Replayed
    from paritas.numerics.comparisons import Attributed, Made
    from paritas.numerics.findings import Score

__all__ = ["Draft", "Resolved", "resolve"]

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
        found[place] = _resolve(drafts[place], drafts, found, replays.get(place))
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
                waiting += [(source, False) for source in _needed(drafts[place])]
    return order


def _needed(draft: Draft) -> tuple[int, ...]:
    if draft.sources or draft.neighbour is None:
        return draft.sources
    return (draft.neighbour,)


def _resolve(
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
        return _argument(draft, plain, sources, drafts, found)
    if replayed is not None and not measured.settled:
        known = sources and all(found[one].status is not Status.UNVERIFIED for one in sources)
        named = [drafts[source].name for source in failing]
        return _replayed(draft, plain, replayed, named, inputs_known=bool(known))
    return _estimated(draft, plain, sources, drafts, found)


def _argument(
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


def _replayed(
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
    return _drifted(draft, known)


def _drifted(draft: Draft, known: Resolved) -> Resolved:
    """Inputs that differ by rounding explain all of it."""
    exact = draft.measured.figures is not None and draft.measured.score is None
    distance = draft.measured.distance
    large = distance is not None and not distance <= LARGE_DRIFT
    if exact or large:
        reason = "rounding of what it was computed from decides it; no call is to blame"
        return dataclasses.replace(known, status=Status.UNSTABLE, reason=reason)
    return dataclasses.replace(known, status=Status.EQUIVALENT, reason="")


def _estimated(
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
    inherited = _largest(drafts[source].measured.distance for source in used)
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
        return _drifted(draft, dataclasses.replace(known, judged_by=judged_by))
    return dataclasses.replace(known, made="here" if sources and not unknown else "")


def _largest(distances: object) -> float | None:
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
