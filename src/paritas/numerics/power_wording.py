"""What a check would have caught, in plain words: by size, the smallest, blind spots, limits."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from paritas.numerics.power_reports import BANDS, USUAL
from paritas.numerics.wording import MOST_SHOWN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.numerics.power_reports import BlindSpot, Fault, PowerReport, Share

__all__ = ["SIZES", "headline", "percent", "power_lines", "sections", "subject"]

SIZES = {
    "clear": "more than 8 times",
    "moderate": "2 to 8 times",
    "faint": "less than 2 times",
}


def power_lines(report: PowerReport) -> list[str]:
    """The same as plain lines, the answer first."""
    lines = [headline(report), f"  {subject(report)}"]
    for band in BANDS:
        whole, native = report.share(band), report.share(band, native=True)
        if whole.of:
            lines.append(
                f"  {SIZES[band]} the noise: {_of(whole)} caught ({_confidence(whole)}); by the "
                f"native run alone {_of(native)}"
            )
    for title, below in sections(report):
        lines.append(f"  {title}")
        lines += [f"    {line}" for line in below]
    return lines


def headline(report: PowerReport) -> str:
    """The answer in one line: how many of the faults that stand out are caught."""
    clear = report.share("clear")
    if not report.judged:
        return "nothing can be said: no planted fault changed a result and was judged"
    if not clear.of:
        return "no planted fault stands out from the model's own rounding noise"
    native = report.share("clear", native=True)
    return (
        f"{_of(clear)} faults above 8 times the rounding noise are caught "
        f"({_confidence(clear)}), {percent(native.value)} by the native run alone"
    )


def subject(report: PowerReport) -> str:
    """What was looked at."""
    backward = f", {report.backward} of them backward" if report.backward else ""
    return (
        f"{_counted(report.operators, 'operator')}{backward}; "
        f"{_counted(report.results, 'result')}; "
        f"{', '.join(report.dtypes) or 'no floating dtype'}; seed {report.seed}"
    )


def sections(report: PowerReport) -> Iterator[tuple[str, list[str]]]:
    """All that the table of shares does not hold: a title, and the lines below it."""
    yield "smallest fault caught", _smallest(report)
    spots = report.blind_spots()
    if spots:
        many = sum(len(spot.faults) for spot in spots)
        lines = [line for spot in spots[:MOST_SHOWN] for line in _spot(spot)]
        if len(spots) > MOST_SHOWN:
            lines.append(f"and {len(spots) - MOST_SHOWN} kinds more")
        yield f"blind spots: {many} unseen above 2 times the noise", lines
    elif report.judged:
        yield "blind spots: none seen above 2 times the noise", []
    if report.silent:
        yield _silent_title(report), _silent(report)
    yield (
        _alarms_title(report),
        [f"{one.rewrite} at {one.node}: {one.status.value}" for one in report.false_alarms],
    )
    left = list(_left_out(report))
    if left:
        yield "not said here", left


def _smallest(report: PowerReport) -> list[str]:
    if not report.grades:
        return ["not measured: no result could be scaled, or the time was over"]
    lines = []
    places = f"at {100 * USUAL:.0f} % of {_counted(len(report.grades), 'place')}"
    for native, name in ((False, "lifted and native"), (True, "native run alone")):
        size = report.smallest(native=native)
        if size is None:
            caught = [one.native if native else one.lifted for one in report.grades]
            blind = sum(one is None for one in caught)
            lines.append(f"{name}: at {blind} of {len(caught)} places not even 10 % is caught")
        else:
            lines.append(f"{name}: a relative change of {size:.1e} in a result, {places}")
    return lines


def _spot(spot: BlindSpot) -> list[str]:
    worst = spot.faults[0]
    return [
        f"{spot.mutation} ({spot.text}): {len(spot.faults)} of {spot.tried}; {spot.reason}",
        f"  such as {_place(worst)}, {_size(worst.over_noise)}",
    ]


def _size(over_noise: float) -> str:
    return "exactly different" if math.isinf(over_noise) else f"{over_noise:.2g} times the noise"


def _place(fault: Fault) -> str:
    near = f" near {fault.near}" if fault.near else ""
    way = "backward" if fault.backward else "forward"
    return f"{fault.node} ({fault.operator}, {way}){near}"


def _silent_title(report: PowerReport) -> str:
    many = len(report.silent)
    return f"changed no result on these inputs: {many} of {len(report.faults)} planted faults"


def _silent(report: PowerReport) -> list[str]:
    kinds = Counter((one.mutation, one.reason) for one in report.silent)
    dead = sorted({one.node for one in report.silent if "depends" in one.reason})
    told: Counter[str] = Counter()
    for (mutation, _), many in kinds.items():
        told[mutation] += many
    shown = [f"{mutation} {many}" for mutation, many in told.most_common(MOST_SHOWN)]
    lines = [f"{', '.join(shown)}{' ...' if len(told) > MOST_SHOWN else ''}"]
    if dead:
        lines.append(f"no result depends on {', '.join(dead[:MOST_SHOWN])}")
    return lines


def _alarms_title(report: PowerReport) -> str:
    if not report.reorderings:
        return "false alarms: not tried, no operator of this model has a harmless rewrite here"
    many = _counted(len(report.reorderings), "harmless rewrite")
    return f"false alarms: {len(report.false_alarms)} of {many}"


def _left_out(report: PowerReport) -> Iterator[str]:
    missing = report.planned - len(report.faults)
    why = {"time": "the time was over", "interrupt": "interrupted"}.get(report.stopped, "")
    if missing > 0:
        reason = why or "they turned out not to apply"
        yield f"{missing} of {report.planned} planned faults were not tried: {reason}"
    left = report.planned_grades - len(report.grades)
    if left > 0:
        reason = why or "a scale has no effect there"
        yield f"graded faults at {left} of {report.planned_grades} places: {reason}"
    if report.unverified:
        many = _counted(len(report.unverified), "fault")
        yield f"{many} could not be compared: neither caught nor missed"
    yield f"{_counted(report.sites, 'fault')} could have been planted, all of kinds known here"
    yield from report.notes


def _of(share: Share) -> str:
    return f"{share.caught} of {share.of}"


def percent(share: float) -> str:
    """Rounded down, so that 100 % means all."""
    return "-" if math.isnan(share) else f"{math.floor(1000 * share) / 10:g} %"


def _confidence(share: Share) -> str:
    return f"at least {percent(share.least)} with 95 % confidence"


def _counted(many: int, thing: str) -> str:
    return f"{many} {thing}{'' if many == 1 else 's'}"
