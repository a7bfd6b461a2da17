"""The module on whose way back the gradient first goes wrong.

Gradients are known on both sides of every module, and from which of them each comes: what one of
several readers of a value does wrong is found at its own input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.partition.plans.locating import (
    LOSS,
    Location,
    Seen,
    misreduced,
    pass_by,
    related_of,
    words_of,
)
from paritas.partition.plans.relating import Relation
from paritas.partition.plans.traces import INPUT, OUTPUT

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.partition.plans.relating import Related
    from paritas.partition.plans.traces import Place

__all__ = ["locate_backward", "own_share"]

_PENDING = frozenset({Relation.PARTIAL, Relation.PERMUTED})


def locate_backward(seen: Seen) -> Location | None:
    """Where gradients go wrong, or where a sum over them is due that nobody takes."""
    way = _Way(seen)
    passed: dict[str, Tensor] = {}
    pending: list[Place] = []
    for place in seen.reference.backward:
        match way.relation(place):
            case Relation.WRONG:
                return way.location(way.blamed(place), passed)
            case Relation.PARTIAL | Relation.PERMUTED:
                pending.append(place)
            case Relation.WHOLE:
                pass_by(passed, f"the gradient at the {way.side(place)}", way.related(place))
    left = [place for place in pending if not way.taken_up(place)]
    return way.location(left[0], passed) if left else None


def own_share(seen: Seen) -> float | None:
    """By what the first gradient of all is multiplied, before any module has it; None if unknown.

    Of ranks with different samples it is the number of parts where each takes the mean over its
    own, and one where it already divides by them.
    """
    way = _Way(seen)
    for place in seen.reference.backward:
        whole = seen.reference.modules[place.call].back(place.side)[place.path].local
        if not whole.dim():
            continue
        for factor in way.factors:
            found = way.relate(place, (factor,))
            if found is not None and found.relation is Relation.WHOLE:
                return factor
        return None
    return None


class _Way:
    """The gradients of one step, set against the reference's when they are asked for."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.calls = seen.calls()
        both = (call.back(side) for call, _ in self.calls for side in (INPUT, OUTPUT))
        self.near = seen.near(piece.local for table in both for piece in table.values())
        parts = float(seen.program.data_ranks)
        self.factors = (parts, 1.0) if parts > 1 else (1.0,)
        self._order = {place: n for n, place in enumerate(seen.reference.backward)}
        self._known: dict[Place, Related | None] = {}
        self._targets: dict[Place, list[Place]] = {}
        for place, sources in seen.reference.sources.items():
            for source in sources:
                self._targets.setdefault(source, []).append(place)

    def relate(self, place: Place, factors: tuple[float, ...]) -> Related | None:
        """How the ranks' gradients belong to the reference's; None if that cannot be said."""
        call, others = self.calls[place.call]
        table = {place.path: call.back(place.side)[place.path]}
        pieces = {rank: other.back(place.side) for rank, other in others.items()}
        return next(related_of(self.seen, table, pieces, self.near, factors), None)

    def related(self, place: Place) -> Related | None:
        """The same, once for all."""
        if place not in self._known:
            arrives = place in self._order
            self._known[place] = self.relate(place, self.factors) if arrives else None
        return self._known[place]

    def relation(self, place: Place) -> Relation:
        related = self.related(place)
        return Relation.UNKNOWN if related is None else related.relation

    def side(self, place: Place) -> str:
        return f"{place.side} of {self.calls[place.call][0].name or 'the model'}"

    def _beyond(self, place: Place, ways: dict[Place, list[Place]]) -> list[Place]:
        """The next places on the way, through those of which nothing can be said, in order."""
        found: set[Place] = set()
        stack, met = [*ways.get(place, ())], {place}
        while stack:
            one = stack.pop()
            if one in met:
                continue
            met.add(one)
            if self.related(one) is None:
                stack += ways.get(one, ())
            else:
                found.add(one)
        return sorted(found, key=self._order.__getitem__)

    def before(self, place: Place) -> list[Place]:
        """From where its gradient comes."""
        ways = {one: list(places) for one, places in self.seen.reference.sources.items()}
        return self._beyond(place, ways)

    def taken_up(self, place: Place) -> bool:
        """Whether what is a term here is whole, or a proper part, somewhere further on."""
        stack, met = [place], set()
        while stack:
            one = stack.pop()
            for after in self._beyond(one, self._targets):
                if self.relation(after) in {Relation.WHOLE, Relation.SHARD}:
                    return True
                if after not in met:
                    met.add(after)
                    stack.append(after)
        return False

    def blamed(self, place: Place) -> Place:
        """Of a gradient that is wrong, where that starts."""
        while wrong := [p for p in self.before(place) if self.relation(p) is Relation.WRONG]:
            place = wrong[0]
        late = self._late(place)
        here, terms = self.related(place), [self._known[one] for one in late]
        before = [one for one in terms if one is not None]
        if here is not None and misreduced(self.seen, here, before, self.near):
            return place
        while late:
            place = late[0]
            late = self._late(place)
        return place

    def _late(self, place: Place) -> list[Place]:
        """Those before a place at which a sum is still to be taken."""
        return [one for one in self.before(place) if self.relation(one) in _PENDING]

    def location(self, place: Place, passed: dict[str, Tensor]) -> Location:
        related = self.related(place)
        assert related is not None  # noqa: S101  (only what is known is blamed)
        name, kind = self._module(place)
        words = f"the gradient at the {self.side(place)} {words_of(related)}"
        return Location(name, kind, related, words, backward=True, passing=dict(passed))

    def _module(self, place: Place) -> tuple[str, str]:
        """Name and class of the module in which a gradient came to be as it is at a place."""
        call = self.calls[place.call][0]
        if place.side == INPUT:
            return call.name, call.kind
        sources = self.seen.reference.sources.get(place, ())
        readers = [one for one in sources if one.side == INPUT and self.related(one) is None]
        if readers:  # it passes through one of which nothing can be said
            reader = self.calls[readers[0].call][0]
            return reader.name, reader.kind
        for outer, _ in self.calls[place.call + 1 :] if sources else ():
            if not outer.name or call.name.startswith(f"{outer.name}."):
                return outer.name, outer.kind
        return LOSS, ""
