"""What a check would have caught: faults planted on purpose, and how each ended.

Everything here is data. `paritas.mutants` fills it in, `paritas.reporting` puts it into words.
"""

from __future__ import annotations

import math
from typing import Literal, Self

import msgspec

from paritas import notebooks
from paritas.errors import UsageError
from paritas.numerics.findings import Status, spell_nonfinite

__all__ = ["BANDS", "BlindSpot", "Fault", "Grade", "PowerReport", "Reordering", "Share"]

# The size of a fault's exact effect in multiples of the program's own rounding noise.
Band = Literal["clear", "moderate", "faint", "none"]
BANDS: tuple[Band, ...] = ("clear", "moderate", "faint")
# The share of places at which a fault of the size that is named as the smallest is caught.
USUAL = 0.9
# The normal quantile of an interval that holds in 95 of 100 cases.
QUANTILE = 1.959964
CAUGHT = (Status.DIFFERENT, Status.DEGRADED)


class Share(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """So many of so many, with what can be said about all those that were not tried.

    Attributes:
        caught: how many were.
        of: how many there were.
    """

    caught: int
    of: int

    @property
    def value(self) -> float:
        """The share itself; NaN of nothing, which is below any bar."""
        return self.caught / self.of if self.of else math.nan

    @property
    def least(self) -> float:
        """The lower end of Wilson's interval of 95 % confidence; 0 of nothing."""
        if not self.of:
            return 0.0
        share, weight = self.value, QUANTILE**2 / self.of
        middle = share + weight / 2
        reach = math.sqrt(weight * (share * (1 - share) + weight / 4))
        return max(0.0, (middle - reach) / (1 + weight))


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault that was planted.

    Attributes:
        mutation: its kind.
        text: what that does, for people.
        node: where in the graph.
        operator: what is called there.
        near: the module, by the nearest parameter; empty where there is none.
        backward: whether it sits in the backward pass.
        detail: what else tells it from others of its kind at this node.
        relative: the largest relative change of a result in exact arithmetic.
        over_noise: that change in multiples of the program's own rounding noise.
        band: the same in a word; a fault that changes nothing is not judged.
        status: how the check ended, lifted and native; None if it was not asked.
        native: how it ended with the native run alone.
        reason: why it went unseen, or changes nothing.
    """

    mutation: str
    text: str
    node: str
    operator: str
    near: str = ""
    backward: bool = False
    detail: str = ""
    relative: float
    over_noise: float
    band: Band
    status: Status | None = None
    native: Status | None = None
    reason: str = ""

    def is_caught(self, *, native: bool = False) -> bool:
        """Whether the check reports it; what it could not compare it has not caught."""
        return (self.native if native else self.status) in CAUGHT


class Grade(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One place whose result was scaled by 1 + delta, for ever smaller delta.

    Attributes:
        node: where in the graph.
        operator: what is called there.
        near: the module, by the nearest parameter.
        backward: whether it sits in the backward pass.
        lifted: the smallest relative change of a result that the check caught; None if it caught
            none.
        native: the same of the native run alone.
        tried: how many sizes were tried.
    """

    node: str
    operator: str
    near: str = ""
    backward: bool = False
    lifted: float | None = None
    native: float | None = None
    tried: int = 0


class Reordering(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One harmless rewrite, which the check must not report.

    Attributes:
        rewrite: what was done.
        node: where in the graph.
        status: how the check ended.
    """

    rewrite: str
    node: str
    status: Status

    @property
    def is_alarm(self) -> bool:
        """Whether the check reported what is no fault."""
        return not self.status.passes()


class BlindSpot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults of one kind that went unseen for one reason.

    Attributes:
        mutation: their kind.
        text: what that does.
        reason: why.
        faults: the unseen ones, the largest effect first.
        tried: how many of this kind were tried in all.
    """

    mutation: str
    text: str
    reason: str
    faults: tuple[Fault, ...]
    tried: int


class PowerReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `paritas.verify` would have caught in one model on one set of inputs.

    Attributes:
        dtypes: the floating dtypes of the program, the most used first.
        operators: how many operators the program calls.
        backward: how many of them in the backward pass.
        results: how many outputs, gradients and buffers are compared.
        sites: how many faults could have been planted.
        planned: how many were meant to be.
        faults: those that were, in the order in which they were tried.
        grades: faults of graded size.
        planned_grades: at how many places they were meant to be.
        reorderings: harmless rewrites.
        seed: of the draw.
        seconds: all of it took.
        stopped: why it ended early; empty if it did not.
        notes: what a reader should know.
    """

    dtypes: tuple[str, ...] = ()
    operators: int = 0
    backward: int = 0
    results: int = 0
    sites: int = 0
    planned: int = 0
    faults: tuple[Fault, ...] = ()
    grades: tuple[Grade, ...] = ()
    planned_grades: int = 0
    reorderings: tuple[Reordering, ...] = ()
    seed: int = 0
    seconds: float = 0.0
    stopped: Literal["", "time", "interrupt"] = ""
    notes: tuple[str, ...] = ()

    @property
    def judged(self) -> tuple[Fault, ...]:
        """The faults that change something, and that the check gave an answer to."""
        return tuple(one for one in self.faults if one.status not in {None, Status.UNVERIFIED})

    @property
    def unverified(self) -> tuple[Fault, ...]:
        """Those that it could not compare: neither caught nor missed."""
        return tuple(one for one in self.faults if one.status is Status.UNVERIFIED)

    @property
    def silent(self) -> tuple[Fault, ...]:
        """Those that change no result on these inputs, so that nothing can catch them."""
        return tuple(one for one in self.faults if one.band == "none")

    def share(self, band: Band, *, native: bool = False) -> Share:
        """How many of the faults of this size are caught; `native`: by the native run alone."""
        those = [one for one in self.judged if one.band == band]
        return Share(caught=sum(one.is_caught(native=native) for one in those), of=len(those))

    def smallest(self, *, native: bool = False) -> float | None:
        """The smallest relative change of a result that is caught at nine of ten places.

        At each place a fault is taken to be caught from its smallest caught size on. None where
        too few places caught anything, or none was tried.
        """
        sizes = [one.native if native else one.lifted for one in self.grades]
        caught = sorted(size for size in sizes if size is not None)
        needed = math.ceil(USUAL * len(sizes))
        return caught[needed - 1] if 0 < needed <= len(caught) else None

    def blind_spots(self) -> tuple[BlindSpot, ...]:
        """Where clear and moderate faults went unseen, those with most of them first."""
        missed: dict[tuple[str, str, str], list[Fault]] = {}
        for one in self.judged:
            if one.band in {"clear", "moderate"} and not one.is_caught():
                missed.setdefault((one.mutation, one.text, one.reason), []).append(one)
        spots = [
            BlindSpot(
                mutation=mutation,
                text=text,
                reason=reason,
                faults=tuple(sorted(faults, key=lambda one: -one.over_noise)),
                tried=sum(one.mutation == mutation for one in self.judged),
            )
            for (mutation, text, reason), faults in missed.items()
        ]
        return tuple(sorted(spots, key=lambda spot: -len(spot.faults)))

    @property
    def false_alarms(self) -> tuple[Reordering, ...]:
        """The harmless rewrites that the check reported."""
        return tuple(one for one in self.reorderings if one.is_alarm)

    def exit_code(self, at_least: float | None = None) -> int:
        """0 there is a report, 1 too few clear faults are caught, 3 there is nothing to report.

        Args:
            at_least: the share of clear faults that has to be caught.
        """
        if not self.judged:
            return 3
        if at_least is None:
            return 0
        clear = self.share("clear")
        if not clear.of:
            return 3
        return 0 if clear.value >= at_least else 1

    def __str__(self) -> str:
        from paritas.numerics.power_wording import power_lines

        return "\n".join(power_lines(self))

    def _repr_html_(self) -> str:
        return notebooks.html_of(self)

    def to_json(self) -> bytes:
        """Encode as JSON; `from_json` gives back an equal report, infinities included."""
        return msgspec.json.encode(spell_nonfinite(msgspec.to_builtins(self)))

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Decode what `to_json` wrote; an unknown field or status is an error."""
        try:
            return msgspec.convert(msgspec.json.decode(data), cls, strict=False)
        except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(
                f"not a report of detection power in JSON: {error}; it starts with {data[:80]!r}"
            ) from None
