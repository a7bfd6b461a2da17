"""The first module, in forward order, that gives the ranks something else.

A part of the reference's value is as good as the whole, and so is a sum that is still to be taken
over ranks: that is *pending*, and under suspicion as soon as a later module is wrong.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paritas.partition.plans.relating import Near, Related, Relation, alike, factor_of, relate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from paritas.partition.plans.program import Program
    from paritas.partition.plans.traces import ModuleCall, Piece, StepTrace, Trace

__all__ = [
    "LOSS",
    "Location",
    "Seen",
    "locate_forward",
    "misreduced",
    "owner_of",
    "pass_by",
    "related_of",
    "words_of",
]

LOSS = "loss"
# Of the largest typical value of all modules: what lies below is not looked at closely.
_FLOOR = 1e-6
_MOST_PASSING = 8


@dataclasses.dataclass(frozen=True)
class Location:
    """Where it starts.

    Attributes:
        module: path of the module; `loss` if the gradient is wrong before any module.
        kind: its class.
        related: what the ranks hold there, and what they should.
        words: what was seen, for people.
        backward: whether it is about gradients.
        parts: rank -> term of the last sum that was still to be taken, before this.
        passing: in words -> values before it that are right: what goes past a module is added to
            what comes out of it.
    """

    module: str
    kind: str
    related: Related
    words: str
    backward: bool = False
    parts: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    passing: dict[str, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Seen:
    """One step of runs that watched their modules, in float64 if that is possible.

    Attributes:
        reference: on one device.
        ranks: rank -> the same step.
        samples: rank -> which of the batch it has.
        unit: unit roundoff of these runs.
    """

    program: Program
    reference: StepTrace
    ranks: dict[int, StepTrace]
    samples: dict[int, tuple[int, int] | None]
    unit: float

    @classmethod
    def of(
        cls, program: Program, reference: Trace, ranks: list[Trace], number: int, unit: float
    ) -> Seen | None:
        """Step `number`, counted from 0; None if somebody did not get that far."""
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
        """What counts as the same, among such values."""
        sizes = [
            float(value.double().square().mean().sqrt())
            for value in values
            if value.is_floating_point() and value.numel()
        ]
        return Near(self.unit, _FLOOR * max((s for s in sizes if s == s), default=0.0))  # noqa: PLR0124

    def calls(self) -> list[tuple[ModuleCall, dict[int, ModuleCall]]]:
        """Each call of the reference and the same call on the ranks that made it."""
        known = {rank: dict(_numbered(step.modules)) for rank, step in self.ranks.items()}
        return [
            (call, {rank: calls[key] for rank, calls in known.items() if key in calls})
            for key, call in _numbered(self.reference.modules)
        ]


def _numbered(calls: list[ModuleCall]) -> Iterator[tuple[tuple[str, int], ModuleCall]]:
    """Calls by name and by how many of that name came before."""
    counts: dict[str, int] = {}
    for call in calls:
        turn = counts.get(call.name, 0)
        counts[call.name] = turn + 1
        yield (call.name, turn), call


def locate_forward(seen: Seen) -> Location | None:
    """The first module whose output is wrong, or never reduced before something else is wrong."""
    calls = seen.calls()
    near = seen.near(p.local for call, _ in calls for p in call.outputs.values())
    pending: list[Location] = []
    passed: dict[str, Tensor] = {}
    for call, others in calls:
        pieces = {rank: other.outputs for rank, other in others.items()}
        for related in related_of(seen, call.outputs, pieces, near, (1.0,)):
            words = f"the output of {call.name or 'the model'} {words_of(related)}"
            parts = pending[-1].related.held if pending else {}
            here = Location(call.name, call.kind, related, words, parts=parts, passing=dict(passed))
            if related.relation is Relation.WRONG:
                return _suspect(seen, pending, here, near)
            if related.relation in {Relation.PARTIAL, Relation.PERMUTED}:
                pending.append(here)
            elif related.relation is Relation.WHOLE:
                pending.clear()
                pass_by(passed, f"the output of {call.name}", related)
    return pending[0] if pending else None


def pass_by(passed: dict[str, Tensor], words: str, related: Related | None) -> None:
    """Remember the last few values that are right and the same on all ranks."""
    if related is None:
        return
    wholes = list(related.expected.values())
    if all(whole is wholes[0] for whole in wholes):
        passed[words] = wholes[0]
        for old in list(passed)[:-_MOST_PASSING]:
            del passed[old]


def _suspect(seen: Seen, pending: list[Location], here: Location, near: Near) -> Location:
    """What is under suspicion when a module is wrong.

    One that only passes on what a child of its never reduced is not the first.
    """
    if not pending or misreduced(seen, here.related, [pending[-1].related], near):
        return here
    return pending[0]


def misreduced(seen: Seen, related: Related, before: list[Related], near: Near) -> bool:
    """Whether ranks have made one value of their terms there, though not the right one.

    It is a multiple of what it should be, or the term of one of them.
    """
    if not alike(seen.program, related.pieces, near):
        return False
    rank, piece = next(iter(related.pieces.items()))
    terms = [term for one in before for term in one.held.values()]
    return factor_of(piece.local, related.expected[rank], near) is not None or any(
        near(piece.local, term) for term in terms
    )


def owner_of(name: str, seen: Seen | None) -> tuple[str, str]:
    """Path and class of the module that a parameter or buffer belongs to."""
    path = name.rpartition(".")[0]
    calls = seen.reference.modules if seen is not None else []
    return path, next((call.kind for call in calls if call.name == path), "")


def related_of(
    seen: Seen,
    reference: dict[str, Piece],
    ranks: dict[int, dict[str, Piece]],
    near: Near,
    factors: tuple[float, ...],
) -> Iterator[Related]:
    """How each tensor of a module belongs to the reference's, where that can be said."""
    for path, piece in reference.items():
        pieces = {rank: tables[path] for rank, tables in ranks.items() if path in tables}
        if not pieces:
            continue
        found = relate(seen.program, seen.samples, pieces, piece.local, near, factors)
        if found.relation is not Relation.UNKNOWN:
            yield found


def words_of(related: Related) -> str:
    """What is seen there, for people."""
    match related.relation:
        case Relation.PARTIAL:
            return "is one rank's term of a sum that is never taken"
        case Relation.PERMUTED:
            return "is the part of another rank"
        case _:
            return "is not the reference's, nor a part or a term of it"
