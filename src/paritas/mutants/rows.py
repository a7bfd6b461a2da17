"""What a check would have caught: faults planted on purpose, the result of each, as text."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from paritas.core.results.findings import Status
from paritas.core.results.report import Result
from paritas.core.results.wording import MOST_SHOWN, count_things

if TYPE_CHECKING:
    from collections.abc import Iterator


# --- The data -------------------------------------------------------------------------------------

# Everything here is data. `paritas.mutants` fills it in.

# The size of a fault's exact effect in multiples of the program's own rounding noise.
Band = Literal["clear", "moderate", "faint", "none"]
BANDS: tuple[Band, ...] = ("clear", "moderate", "faint")
# A size counts as caught if faults of it are caught at this share of places.
USUAL = 0.9
# The normal quantile of a two-sided 95 % interval.
QUANTILE = 1.959964


class Share(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The share of faults that were caught, with a bound for those that were not tried."""

    caught: int
    of: int

    @property
    def value(self) -> float:
        """The share; NaN if nothing was tried, which is below any limit."""
        return self.caught / self.of if self.of else math.nan

    @property
    def least(self) -> float:
        """The lower end of Wilson's 95 % interval; 0 if nothing was tried."""
        if not self.of:
            return 0.0
        share, weight = self.value, QUANTILE**2 / self.of
        middle = share + weight / 2
        reach = math.sqrt(weight * (share * (1 - share) + weight / 4))
        return max(0.0, (middle - reach) / (1 + weight))


class FaultResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault that was planted.

    Attributes:
        mutation: its kind.
        text: what it does, for people.
        node: where in the graph.
        operator: what is called there.
        near: the module, by the nearest parameter; may be empty.
        block: the block that it was planted and judged in; empty for the whole model.
        backward: whether it is in the backward pass.
        detail: what else distinguishes it from others of its kind at this node.
        relative: the largest relative change of a result in exact arithmetic.
        over_noise: that change in multiples of the program's own rounding noise.
        band: the same as a word; a fault that changes nothing is not judged.
        status: the result of the check, lifted and native; None if it was not run.
        native: the result with the native run alone.
        reason: why it was missed, or changes nothing.
        is_dead: whether no result depends on the node.
    """

    mutation: str
    text: str
    node: str
    operator: str
    near: str = ""
    block: str = ""
    backward: bool = False
    detail: str = ""
    relative: float
    over_noise: float
    band: Band
    status: Status | None = None
    native: Status | None = None
    reason: str = ""
    is_dead: bool = False

    def is_caught(self, *, native: bool = False) -> bool:
        """Whether the check reports it; a fault that could not be compared is not caught."""
        status = self.native if native else self.status
        return status is not None and status.is_wrong


class Grade(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node with a result that was scaled by 1 + delta, for smaller and smaller delta.

    Attributes:
        node: where in the graph.
        operator: what is called there.
        near: the module, by the nearest parameter.
        block: the block that it was planted and judged in; empty for the whole model.
        backward: whether it is in the backward pass.
        lifted: the smallest relative change of a result that the check caught, if any.
        native: the same for the native run alone.
        tried: number of sizes tried.
    """

    node: str
    operator: str
    near: str = ""
    block: str = ""
    backward: bool = False
    lifted: float | None = None
    native: float | None = None
    tried: int = 0


class Reordering(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One harmless rewrite, which the check must not report.

    Attributes:
        rewrite: what was done.
        node: where in the graph.
        block: the block that it was made in; empty for the whole model.
        status: the result of the check.
    """

    rewrite: str
    node: str
    block: str = ""
    status: Status

    @property
    def is_alarm(self) -> bool:
        """Whether the check reported it, although it is not a fault."""
        return not self.status.passes()


class BlindSpot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults of one kind that were missed for one reason.

    Attributes:
        mutation: their kind.
        text: what it does.
        reason: why they were missed.
        faults: the missed ones, the largest effect first.
        tried: number of all tried faults of this kind.
    """

    mutation: str
    text: str
    reason: str
    faults: tuple[FaultResult, ...]
    tried: int


class PowerReport(Result, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `paritas.verify` would have caught in one model on one set of inputs.

    Attributes:
        dtypes: the floating dtypes of the program, the most used first.
        operators: number of operators that the program calls.
        backward: how many of them are in the backward pass.
        results: number of outputs, gradients and buffers compared.
        sites: number of faults that could have been planted.
        planned: number of faults that were planned.
        faults: the planted faults, in the order in which they were tried.
        grades: faults of graded size.
        planned_grades: number of places planned for them.
        reorderings: harmless rewrites.
        seed: seed of the random choice.
        stopped: why it ended early; empty if it did not.
        notes: what a reader should know.
    """

    _called: ClassVar[str] = "a report of detection power"
    _summary: ClassVar[str] = "paritas.mutants.report:notebook_summary"

    dtypes: tuple[str, ...] = ()
    operators: int = 0
    backward: int = 0
    results: int = 0
    sites: int = 0
    planned: int = 0
    faults: tuple[FaultResult, ...] = ()
    grades: tuple[Grade, ...] = ()
    planned_grades: int = 0
    reorderings: tuple[Reordering, ...] = ()
    seed: int = 0
    seconds: float = 0.0
    stopped: Literal["", "time", "interrupt"] = ""
    notes: tuple[str, ...] = ()

    @property
    def judged(self) -> tuple[FaultResult, ...]:
        """The faults that change a result and were compared."""
        return tuple(
            fault for fault in self.faults if fault.status not in {None, Status.UNVERIFIED}
        )

    @property
    def unverified(self) -> tuple[FaultResult, ...]:
        """The faults that could not be compared: neither caught nor missed."""
        return tuple(fault for fault in self.faults if fault.status is Status.UNVERIFIED)

    @property
    def silent(self) -> tuple[FaultResult, ...]:
        """The faults that change no result on these inputs, so nothing can catch them."""
        return tuple(fault for fault in self.faults if fault.band == "none")

    def share(self, band: Band, *, native: bool = False) -> Share:
        """The share of caught faults of this size; `native`: by the native run alone."""
        those = [fault for fault in self.judged if fault.band == band]
        return Share(caught=sum(fault.is_caught(native=native) for fault in those), of=len(those))

    def smallest(self, *, native: bool = False) -> float | None:
        """The smallest relative change of a result that is caught at nine of ten places.

        At each place, every fault above the smallest caught size counts as caught. None if too few
        places caught anything, or none was tried.
        """
        sizes = [grade.native if native else grade.lifted for grade in self.grades]
        caught = sorted(size for size in sizes if size is not None)
        needed = math.ceil(USUAL * len(sizes))
        return caught[needed - 1] if 0 < needed <= len(caught) else None

    def blind_spots(self) -> tuple[BlindSpot, ...]:
        """Kinds of clear and moderate faults that were missed, the most frequent first."""
        missed: dict[tuple[str, str, str], list[FaultResult]] = {}
        for judged_fault in self.judged:
            if judged_fault.band in {"clear", "moderate"} and not judged_fault.is_caught():
                missed.setdefault(
                    (judged_fault.mutation, judged_fault.text, judged_fault.reason), []
                ).append(judged_fault)
        spots = [
            BlindSpot(
                mutation=mutation,
                text=text,
                reason=reason,
                faults=tuple(sorted(faults, key=lambda fault: -fault.over_noise)),
                tried=sum(fault.mutation == mutation for fault in self.judged),
            )
            for (mutation, text, reason), faults in missed.items()
        ]
        return tuple(sorted(spots, key=lambda spot: -len(spot.faults)))

    @property
    def false_alarms(self) -> tuple[Reordering, ...]:
        """The harmless rewrites that the check reported."""
        return tuple(reordering for reordering in self.reorderings if reordering.is_alarm)

    def exit_code(self, at_least: float | None = None) -> int:
        """0 there is a report, 1 too few clear faults are caught, 3 there is nothing to report.

        Args:
            at_least: the share of clear faults that must be caught.
        """
        if not self.judged:
            return 3
        if at_least is None:
            return 0
        clear = self.share("clear")
        if not clear.of:
            return 3
        return 0 if clear.value >= at_least else 1

    @property
    def headline(self) -> str:
        """The answer in one line: the share of caught faults that stand out."""
        clear = self.share("clear")
        if not self.judged:
            return "no result: no planted fault changed a result and could be compared"
        if not clear.of:
            return "no planted fault stands out from the model's own rounding noise"
        native = self.share("clear", native=True)
        return (
            f"{_share(clear)} faults above 8 times the rounding noise are caught "
            f"({_confidence(clear)}), {percent(native.value)} by the native run alone"
        )

    def __str__(self) -> str:
        return "\n".join(power_lines(self))


# --- The data in plain words ----------------------------------------------------------------------

SIZES = {
    "clear": "more than 8 times",
    "moderate": "2 to 8 times",
    "faint": "less than 2 times",
}


def power_lines(report: PowerReport) -> list[str]:
    """The report as plain lines, the answer first."""
    lines = [report.headline, f"  {power_subject(report)}"]
    for band in BANDS:
        verdict_share, native = report.share(band), report.share(band, native=True)
        if verdict_share.of:
            lines.append(
                f"  {SIZES[band]} the noise: {_share(verdict_share)} caught "
                f"({_confidence(verdict_share)}); by the "
                f"native run alone {_share(native)}"
            )
    for title, below in power_sections(report):
        lines.append(f"  {title}")
        lines += [f"    {line}" for line in below]
    return lines


def power_subject(report: PowerReport) -> str:
    """What was checked."""
    backward = f", {report.backward} of them backward" if report.backward else ""
    return (
        f"{count_things(report.operators, 'operator')}{backward}; "
        f"{count_things(report.results, 'result')}; "
        f"{', '.join(report.dtypes) or 'no floating dtype'}; seed {report.seed}"
    )


def power_sections(report: PowerReport) -> Iterator[tuple[str, list[str]]]:
    """What the table of shares does not show: titles, each with the lines below it."""
    yield "smallest fault caught", _describe_smallest(report)
    spots = report.blind_spots()
    if spots:
        many = sum(len(spot.faults) for spot in spots)
        lines = [line for spot in spots[:MOST_SHOWN] for line in _describe_blind_spot(spot)]
        if len(spots) > MOST_SHOWN:
            lines.append(f"and {len(spots) - MOST_SHOWN} more kinds")
        yield f"blind spots: {many} missed above 2 times the noise", lines
    elif report.judged:
        yield "blind spots: none above 2 times the noise", []
    if report.silent:
        yield _silent_title(report), _describe_silent(report)
    yield (
        _alarms_title(report),
        [
            f"{false_alarm.rewrite} at {false_alarm.node}: {false_alarm.status.value}"
            for false_alarm in report.false_alarms
        ],
    )
    limits = list(_describe_limits(report))
    if limits:
        yield "limits of this report", limits


def _describe_smallest(report: PowerReport) -> list[str]:
    if not report.grades:
        return ["not measured: no result could be scaled, or the time ran out"]
    lines = []
    places = f"at {100 * USUAL:.0f} % of {count_things(len(report.grades), 'place')}"
    for native, name in ((False, "lifted and native"), (True, "native run alone")):
        size = report.smallest(native=native)
        if size is None:
            caught = [grade.native if native else grade.lifted for grade in report.grades]
            blind = sum(smallest_caught is None for smallest_caught in caught)
            lines.append(f"{name}: at {blind} of {len(caught)} places even 10 % is missed")
        else:
            lines.append(f"{name}: a relative change of {size:.1e} in a result, {places}")
    return lines


def _describe_blind_spot(spot: BlindSpot) -> list[str]:
    worst = spot.faults[0]
    return [
        f"{spot.mutation} ({spot.text}): {len(spot.faults)} of {spot.tried}; {spot.reason}",
        f"  such as {_describe_fault_site(worst)}, {_describe_size(worst.over_noise)}",
    ]


def _describe_size(over_noise: float) -> str:
    return "exactly different" if math.isinf(over_noise) else f"{over_noise:.2g} times the noise"


def _describe_fault_site(fault: FaultResult) -> str:
    near = f" near {fault.near}" if fault.near else ""
    way = "backward" if fault.backward else "forward"
    return f"{fault.node} ({fault.operator}, {way}){near}"


def _silent_title(report: PowerReport) -> str:
    many = len(report.silent)
    return f"changed no result on these inputs: {many} of {len(report.faults)} planted faults"


def _describe_silent(report: PowerReport) -> list[str]:
    kinds = Counter(silent_fault.mutation for silent_fault in report.silent)
    dead = sorted({silent_fault.node for silent_fault in report.silent if silent_fault.is_dead})
    shown = [f"{mutation} {many}" for mutation, many in kinds.most_common(MOST_SHOWN)]
    lines = [f"{', '.join(shown)}{' ...' if len(kinds) > MOST_SHOWN else ''}"]
    if dead:
        lines.append(f"no result depends on {', '.join(dead[:MOST_SHOWN])}")
    return lines


def _alarms_title(report: PowerReport) -> str:
    if not report.reorderings:
        return "false alarms: not tried, no operator of this model has a known harmless rewrite"
    many = count_things(len(report.reorderings), "harmless rewrite")
    return f"false alarms: {len(report.false_alarms)} of {many}"


def _describe_limits(report: PowerReport) -> Iterator[str]:
    missing = report.planned - len(report.faults)
    why = {"time": "the time ran out", "interrupt": "interrupted"}.get(report.stopped, "")
    if missing > 0:
        reason = why or "they did not apply"
        yield f"{missing} of {report.planned} planned faults were not tried: {reason}"
    missing_grades = report.planned_grades - len(report.grades)
    if missing_grades > 0:
        reason = why or "a scale has no effect there"
        yield f"no graded faults at {missing_grades} of {report.planned_grades} places: {reason}"
    if report.unverified:
        many = count_things(len(report.unverified), "fault")
        yield f"{many} could not be compared: neither caught nor missed"
    yield f"{count_things(report.sites, 'fault')} of the known kinds could have been planted"
    yield from report.notes


def _share(share: Share) -> str:
    return f"{share.caught} of {share.of}"


def percent(share: float) -> str:
    """Rounded down: 100 % means all."""
    return "-" if math.isnan(share) else f"{math.floor(1000 * share) / 10:g} %"


def _confidence(share: Share) -> str:
    return f"at least {percent(share.least)} with 95 % confidence"
