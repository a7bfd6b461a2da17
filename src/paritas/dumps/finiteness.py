"""Where a recorded program stops being finite: the first NaN, the first infinity, who made it."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Literal

import msgspec

from paritas.dumps.records import Site

if TYPE_CHECKING:
    from paritas.dumps.records import Record
    from paritas.numerics.statistics import Statistics

__all__ = ["FirstNonFinite", "NonFinite", "Origin", "is_result", "value_is_finite"]

Kind = Literal["NaN", "Inf"]
Origin = Literal["made", "entered", "unknown"]

_NON_FINITE_VALUE = re.compile(r"""(float\(['"])?[+-]?(nan|inf)(['"]\))?""")


class NonFinite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first value of a rank that is not finite, in the order of recording.

    Attributes:
        kind: NaN, or Inf where there is an infinity and no NaN.
        sequence: the number of the record.
        earlier: how many tensors of the rank were recorded before it.
        count: how many values of the tensor are not finite.
        of: how many values it has.
        origin: "made" where every recorded input of the same call is finite, "entered" where one
            is not, or where it is itself what a call was given; "unknown" where none is recorded.
        inputs: how many inputs of the same call are recorded.
        bad_inputs: how many of these are not finite.
    """

    kind: Kind
    rank: int
    step: int
    sequence: int
    id: str
    site: Site
    count: int
    of: int
    earlier: int
    origin: Origin
    inputs: int = 0
    bad_inputs: int = 0

    @property
    def is_given(self) -> bool:
        """Whether it is what a call was given, rather than what it gave."""
        return not is_result(self.site)


@dataclasses.dataclass
class _Call:
    """The recorded inputs of one call."""

    inputs: int = 0
    bad: int = 0


@dataclasses.dataclass(frozen=True)
class _Found:
    record: Record
    statistics: Statistics
    call: _Call
    earlier: int


class FirstNonFinite:
    """Watches the records of one rank go by, in their order.

    An infinity is often meant (a mask), a NaN hardly ever: each is looked for by itself.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        # The calls of the present step only, so that memory stays bounded.
        self._calls: dict[tuple[str, ...], _Call] = {}
        self._found: dict[Kind, _Found] = {}
        self._tensors = 0

    def offer(self, record: Record, statistics: Statistics | None) -> None:
        """Look at the next record; without statistics it counts as a value that is no tensor."""
        if record.step != self._step:
            self._step = record.step
            self._calls = {}
        call = self._calls.setdefault(_call_key(record.site), _Call())
        finite = value_is_finite(record.value) if statistics is None else statistics.is_finite
        if not is_result(record.site) and (statistics is not None or not finite):
            call.inputs += 1
            call.bad += not finite
        if statistics is not None:
            if not finite:
                kind: Kind = "NaN" if statistics.nans else "Inf"
                self._found.setdefault(kind, _Found(record, statistics, call, self._tensors))
            self._tensors += 1

    def findings(self) -> list[NonFinite]:
        """What was found, in the order of recording; an infinity after a NaN is left out."""
        found = sorted(self._found.items(), key=lambda item: item[1].record.sequence)
        if found and found[0][0] == "NaN":
            found = found[:1]
        return [_non_finite(kind, item) for kind, item in found]


def is_result(site: Site) -> bool:
    """Whether it is what a call gave, rather than what it was given.

    The gradients of eager modules bear the names of the forward pass: there, a call is given the
    gradients of its outputs and makes those of its inputs.
    """
    backwards = site.source == "eager" and site.phase == "backward" and site.level == "module"
    return (site.side == "output") is not backwards


def value_is_finite(value: str | None) -> bool:
    """Whether the text of a value that is no tensor is anything but a NaN or an infinity."""
    return value is None or _NON_FINITE_VALUE.fullmatch(value) is None


def _call_key(site: Site) -> tuple[str, ...]:
    return (site.source, site.level, site.phase, site.graph, site.name, str(site.call))


def _non_finite(kind: Kind, found: _Found) -> NonFinite:
    record, statistics, call = found.record, found.statistics, found.call
    origin: Origin = "unknown"
    if not is_result(record.site) or call.bad:
        origin = "entered"
    elif call.inputs:
        origin = "made"
    infinities = statistics.positive_infinities + statistics.negative_infinities
    return NonFinite(
        kind=kind,
        rank=record.rank,
        step=record.step,
        sequence=record.sequence,
        id=record.id,
        site=record.site,
        count=statistics.nans + infinities,
        of=statistics.count,
        earlier=found.earlier,
        origin=origin,
        inputs=call.inputs,
        bad_inputs=call.bad,
    )
