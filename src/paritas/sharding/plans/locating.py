"""The module where a wrong step starts: the first in forward order, or in the backward."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paritas.core.diagnosis.patterns.ranks import factor_of
from paritas.core.numerics.gates import Near
from paritas.sharding.plans.relating import Related, Relation, alike, relate
from paritas.sharding.plans.traces import INPUT_SIDE, OUTPUT_SIDE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from torch import Tensor

    from paritas.core.placement.rank_pieces import RankPiece
    from paritas.sharding.plans.plan import ParallelProgram
    from paritas.sharding.plans.traces import ModuleCall, StepTrace, Trace, ValuePlace


# --- The first module, in forward order, with a wrong output --------------------------------------

# A shard of the reference's value is right. So is a term of a sum that is still to be reduced over
# ranks: it is *pending*, and becomes a suspect as soon as a later module is wrong.

LOSS_MODULE = "loss"
# Values below this share of the largest typical value of all modules are treated as zero.
_FLOOR = 1e-6
_MOST_PASSING = 8


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a fault starts.

    Attributes:
        module: path of the module; `loss` if the gradient is wrong before any module.
        kind: its class.
        related: what the ranks hold there, and what they should hold.
        words: what was seen.
        backward: whether it is about gradients.
        parts: rank -> term of the last pending sum before it.
        passing: name -> earlier right values, which a residual connection may add to its output.
    """

    module: str
    kind: str
    related: Related
    words: str
    backward: bool = False
    parts: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    passing: dict[str, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class WatchedStep:
    """One step with the values of every module, in float64 if that is possible.

    Attributes:
        reference: on one device.
        ranks: rank -> the same step.
        samples: rank -> its samples of the batch.
        unit: unit roundoff of these runs.
    """

    program: ParallelProgram
    reference: StepTrace
    ranks: dict[int, StepTrace]
    samples: dict[int, tuple[int, int] | None]
    unit: float

    @classmethod
    def of(
        cls,
        program: ParallelProgram,
        reference: Trace,
        ranks: list[Trace],
        number: int,
        unit: float,
    ) -> WatchedStep | None:
        """Step `number`, counted from 0; None if a rank did not reach it."""
        if any(len(trace.steps) <= number for trace in (reference, *ranks)):
            return None
        return cls(
            program,
            reference.steps[number],
            {trace.rank: trace.steps[number] for trace in ranks},
            {trace.rank: trace.samples for trace in ranks},
            unit,
        )

    def near(self, values: Iterable[Tensor]) -> Near:
        """The comparison for these values."""
        sizes = [
            float(value.double().square().mean().sqrt())
            for value in values
            if value.is_floating_point() and value.numel()
        ]
        return Near(self.unit, _FLOOR * max((s for s in sizes if s == s), default=0.0))  # noqa: PLR0124

    def calls(self) -> list[tuple[ModuleCall, dict[int, ModuleCall]]]:
        """Each call of the reference and the same call on the ranks that made it."""
        calls_by_rank = {
            rank: dict(_number_calls(step.modules)) for rank, step in self.ranks.items()
        }
        return [
            (call, {rank: calls[key] for rank, calls in calls_by_rank.items() if key in calls})
            for key, call in _number_calls(self.reference.modules)
        ]


def _number_calls(calls: list[ModuleCall]) -> Iterator[tuple[tuple[str, int], ModuleCall]]:
    """Calls by name and number among the calls of that name."""
    counts: dict[str, int] = {}
    for call in calls:
        turn = counts.get(call.name, 0)
        counts[call.name] = turn + 1
        yield (call.name, turn), call


def locate_forward(watched_step: WatchedStep) -> Location | None:
    """The first module whose output is wrong, or was not reduced before a later one is wrong."""
    calls = watched_step.calls()
    near = watched_step.near(p.local for call, _ in calls for p in call.outputs.values())
    pending: list[Location] = []
    passed: dict[str, Tensor] = {}
    for call, others in calls:
        pieces = {rank: other.outputs for rank, other in others.items()}
        for related in related_of(watched_step, call.outputs, pieces, near, (1.0,)):
            words = f"the output of {call.name or 'the model'} {describe_related(related)}"
            parts = pending[-1].related.held if pending else {}
            here = Location(call.name, call.kind, related, words, parts=parts, passing=dict(passed))
            if related.relation is Relation.WRONG:
                return _suspect(watched_step, pending, here, near)
            if related.relation in {Relation.PARTIAL, Relation.PERMUTED}:
                pending.append(here)
            elif related.relation is Relation.WHOLE:
                pending.clear()
                pass_by(passed, f"the output of {call.name}", related)
    return pending[0] if pending else None


def pass_by(passed: dict[str, Tensor], words: str, related: Related | None) -> None:
    """Keep the last few values that are right and the same on all ranks."""
    if related is None:
        return
    wholes = list(related.expected.values())
    if all(whole_value is wholes[0] for whole_value in wholes):
        passed[words] = wholes[0]
        for old in list(passed)[:-_MOST_PASSING]:
            del passed[old]


def _suspect(
    watched_step: WatchedStep, pending: list[Location], here: Location, near: Near
) -> Location:
    """The location to report when a module is wrong.

    If it only passes on a sum that was never reduced, that is the pending location.
    """
    if not pending or is_misreduced(watched_step, here.related, [pending[-1].related], near):
        return here
    return pending[0]


def is_misreduced(
    watched_step: WatchedStep, related: Related, before: list[Related], near: Near
) -> bool:
    """Whether the ranks reduced their terms there, but wrongly.

    The value is then a multiple of the right one, or the term of one rank.
    """
    if not alike(watched_step.program, related.pieces, near):
        return False
    rank, piece = next(iter(related.pieces.items()))
    terms = [term for related_before in before for term in related_before.held.values()]
    return factor_of(piece.local, related.expected[rank], near) is not None or any(
        near(piece.local, term) for term in terms
    )


def owner_of(name: str, watched_step: WatchedStep | None) -> tuple[str, str]:
    """Path and class of the module that a parameter or buffer belongs to."""
    path = name.rpartition(".")[0]
    calls = watched_step.reference.modules if watched_step is not None else []
    return path, next((call.kind for call in calls if call.name == path), "")


def related_of(
    watched_step: WatchedStep,
    reference: dict[str, RankPiece],
    ranks: dict[int, dict[str, RankPiece]],
    near: Near,
    factors: tuple[float, ...],
) -> Iterator[Related]:
    """How each tensor of a module relates to the reference's, if that is known."""
    for path, piece in reference.items():
        pieces = {rank: tables[path] for rank, tables in ranks.items() if path in tables}
        if not pieces:
            continue
        related = relate(
            watched_step.program, watched_step.samples, pieces, piece.local, near, factors
        )
        if related.relation is not Relation.UNKNOWN:
            yield related


def describe_related(related: Related) -> str:
    """What is wrong there, in words."""
    match related.relation:
        case Relation.PARTIAL:
            return "is one rank's term of a sum that is never reduced"
        case Relation.PERMUTED:
            return "is the shard of another rank"
        case _:
            return "is neither the reference's value nor a shard or term of it"


# --- The module in whose backward the gradient first goes wrong -----------------------------------

# Gradients are known on both sides of every module, and so are the places each comes from. A fault
# of one of several readers of a value is therefore found at its own input.

_PENDING = frozenset({Relation.PARTIAL, Relation.PERMUTED})


def locate_backward(watched_step: WatchedStep) -> Location | None:
    """Where gradients go wrong, or where a sum of them is never reduced."""
    way = _Way(watched_step)
    passed: dict[str, Tensor] = {}
    pending: list[ValuePlace] = []
    for value_place in watched_step.reference.backward:
        match way.relation(value_place):
            case Relation.WRONG:
                return way.location(way.blame_place(value_place), passed)
            case Relation.PARTIAL | Relation.PERMUTED:
                pending.append(value_place)
            case Relation.WHOLE:
                pass_by(
                    passed,
                    f"the gradient at the {way.side(value_place)}",
                    way.relate_once(value_place),
                )
    untaken_places = [pending_place for pending_place in pending if not way.taken_up(pending_place)]
    return way.location(untaken_places[0], passed) if untaken_places else None


def own_share(watched_step: WatchedStep) -> float | None:
    """The factor on the first gradient, before it reaches any module; None if unknown.

    If ranks have different samples, it is the number of parts if each rank takes the mean over its
    own samples, and 1 if it already divides by that number.
    """
    way = _Way(watched_step)
    for value_place in watched_step.reference.backward:
        local = (
            watched_step.reference.modules[value_place.call]
            .back(value_place.side)[value_place.path]
            .local
        )
        if not local.dim():
            continue
        for factor in way.factors:
            related = way.relate(value_place, (factor,))
            if related is not None and related.relation is Relation.WHOLE:
                return factor
        return None
    return None


class _Way:
    """The gradients of one step, compared with the reference's on demand."""

    def __init__(self, watched_step: WatchedStep) -> None:
        self.seen = watched_step
        self.calls = watched_step.calls()
        both = (call.back(side) for call, _ in self.calls for side in (INPUT_SIDE, OUTPUT_SIDE))
        self.near = watched_step.near(piece.local for table in both for piece in table.values())
        parts = float(watched_step.program.data_ranks)
        self.factors = (parts, 1.0) if parts > 1 else (1.0,)
        self._order = {
            gradient_place: n for n, gradient_place in enumerate(watched_step.reference.backward)
        }
        self._known: dict[ValuePlace, Related | None] = {}
        self._targets: dict[ValuePlace, list[ValuePlace]] = {}
        for value_place, sources in watched_step.reference.sources.items():
            for source in sources:
                self._targets.setdefault(source, []).append(value_place)

    def relate(self, value_place: ValuePlace, factors: tuple[float, ...]) -> Related | None:
        """How the ranks' gradients relate to the reference's; None if that is unknown."""
        call, others = self.calls[value_place.call]
        table = {value_place.path: call.back(value_place.side)[value_place.path]}
        pieces = {rank: other.back(value_place.side) for rank, other in others.items()}
        return next(related_of(self.seen, table, pieces, self.near, factors), None)

    def relate_once(self, value_place: ValuePlace) -> Related | None:
        """The same, cached."""
        if value_place not in self._known:
            arrives = value_place in self._order
            self._known[value_place] = self.relate(value_place, self.factors) if arrives else None
        return self._known[value_place]

    def relation(self, value_place: ValuePlace) -> Relation:
        related = self.relate_once(value_place)
        return Relation.UNKNOWN if related is None else related.relation

    def side(self, value_place: ValuePlace) -> str:
        return f"{value_place.side} of {self.calls[value_place.call][0].name or 'the model'}"

    def _beyond(
        self, value_place: ValuePlace, ways: dict[ValuePlace, list[ValuePlace]]
    ) -> list[ValuePlace]:
        """The next known places along the paths, in order; unknown ones are passed through."""
        value_places: set[ValuePlace] = set()
        stack, met = [*ways.get(value_place, ())], {value_place}
        while stack:
            next_place = stack.pop()
            if next_place in met:
                continue
            met.add(next_place)
            if self.relate_once(next_place) is None:
                stack += ways.get(next_place, ())
            else:
                value_places.add(next_place)
        return sorted(value_places, key=self._order.__getitem__)

    def before(self, value_place: ValuePlace) -> list[ValuePlace]:
        """The places its gradient comes from."""
        ways = {
            target_place: list(places)
            for target_place, places in self.seen.reference.sources.items()
        }
        return self._beyond(value_place, ways)

    def taken_up(self, value_place: ValuePlace) -> bool:
        """Whether a term here becomes whole, or a right shard, at a later place."""
        stack, met = [value_place], set()
        while stack:
            next_place = stack.pop()
            for after in self._beyond(next_place, self._targets):
                if self.relation(after) in {Relation.WHOLE, Relation.SHARD}:
                    return True
                if after not in met:
                    met.add(after)
                    stack.append(after)
        return False

    def blame_place(self, value_place: ValuePlace) -> ValuePlace:
        """The place where a wrong gradient starts."""
        value_place = self._follow(value_place, {Relation.WRONG})
        late = self._late(value_place)
        here, terms = (
            self.relate_once(value_place),
            [self._known[late_place] for late_place in late],
        )
        before = [term for term in terms if term is not None]
        if here is not None and is_misreduced(self.seen, here, before, self.near):
            return value_place
        return self._follow(value_place, _PENDING)

    def _follow(self, value_place: ValuePlace, relations: Collection[Relation]) -> ValuePlace:
        """The last place of a path; a tensor that was passed around may lead back to it."""
        met = {value_place}
        while ahead := [
            p for p in self.before(value_place) if p not in met and self.relation(p) in relations
        ]:
            value_place = ahead[0]
            met.add(value_place)
        return value_place

    def _late(self, value_place: ValuePlace) -> list[ValuePlace]:
        """The places before it at which a sum is pending."""
        return [
            earlier_place
            for earlier_place in self.before(value_place)
            if self.relation(earlier_place) in _PENDING
        ]

    def location(self, value_place: ValuePlace, passed: dict[str, Tensor]) -> Location:
        related = self.relate_once(value_place)
        assert related is not None  # noqa: S101  (only known places are blamed)
        name, kind = self._module(value_place)
        words = f"the gradient at the {self.side(value_place)} {describe_related(related)}"
        return Location(name, kind, related, words, backward=True, passing=dict(passed))

    def _module(self, value_place: ValuePlace) -> tuple[str, str]:
        """Name and class of the module that computed the gradient at a place."""
        call = self.calls[value_place.call][0]
        if value_place.side == INPUT_SIDE:
            return call.name, call.kind
        sources = self.seen.reference.sources.get(value_place, ())
        readers = [
            source
            for source in sources
            if source.side == INPUT_SIDE and self.relate_once(source) is None
        ]
        if readers:  # it passes through a module whose gradient is unknown
            reader = self.calls[readers[0].call][0]
            return reader.name, reader.kind
        for outer, _ in self.calls[value_place.call + 1 :] if sources else ():
            if not outer.name or call.name.startswith(f"{outer.name}."):
                return outer.name, outer.kind
        return LOSS_MODULE, ""
