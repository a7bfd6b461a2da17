"""Of all that is wrong, the cause: which item shows it first, in which module, and what it is."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec
import torch

from paritas.diagnosis.case import Case, Context
from paritas.diagnosis.diagnose import ACROSS_RANKS, calibrated, rank_patterns
from paritas.diagnosis.patterns.ranks import claim, factor_of
from paritas.numerics.gates import Near
from paritas.parallel.assembling import (
    BUFFER,
    GRADIENT,
    INITIAL,
    LOSS,
    OUTPUT,
    PARAMETER,
    assemble,
    is_partial,
    natural_chunk,
)
from paritas.parallel.relating import Related, Relation, alike, mean_of, relate
from paritas.parallel.traces import INPUT_SIDE, OUTPUT_SIDE
from paritas.results.findings import Diagnosis, Finding, Origin, OriginKind, PatternKind, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from paritas.parallel.plan import ParallelProgram
    from paritas.parallel.traces import ModuleCall, RankPiece, StepTrace, Trace, ValuePlace
    from paritas.parallel.verify import Judge, Judged


# --- The first module, in forward order, that gives the ranks something else ----------------------

# A part of the reference's value is as good as the whole, and so is a sum that is still to be taken
# over ranks: that is *pending*, and under suspicion as soon as a later module is wrong.

LOSS_MODULE = "loss"
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
class WatchedStep:
    """One step of runs that watched their modules, in float64 if that is possible.

    Attributes:
        reference: on one device.
        ranks: rank -> the same step.
        samples: rank -> which of the batch it has.
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


def locate_forward(seen: WatchedStep) -> Location | None:
    """The first module whose output is wrong, or never reduced before something else is wrong."""
    calls = seen.calls()
    near = seen.near(p.local for call, _ in calls for p in call.outputs.values())
    pending: list[Location] = []
    passed: dict[str, Tensor] = {}
    for call, others in calls:
        pieces = {rank: other.outputs for rank, other in others.items()}
        for related in related_of(seen, call.outputs, pieces, near, (1.0,)):
            words = f"the output of {call.name or 'the model'} {describe_related(related)}"
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


def _suspect(seen: WatchedStep, pending: list[Location], here: Location, near: Near) -> Location:
    """What is under suspicion when a module is wrong.

    One that only passes on what a child of its never reduced is not the first.
    """
    if not pending or misreduced(seen, here.related, [pending[-1].related], near):
        return here
    return pending[0]


def misreduced(seen: WatchedStep, related: Related, before: list[Related], near: Near) -> bool:
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


def owner_of(name: str, seen: WatchedStep | None) -> tuple[str, str]:
    """Path and class of the module that a parameter or buffer belongs to."""
    path = name.rpartition(".")[0]
    calls = seen.reference.modules if seen is not None else []
    return path, next((call.kind for call in calls if call.name == path), "")


def related_of(
    seen: WatchedStep,
    reference: dict[str, RankPiece],
    ranks: dict[int, dict[str, RankPiece]],
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


def describe_related(related: Related) -> str:
    """What is seen there, for people."""
    match related.relation:
        case Relation.PARTIAL:
            return "is one rank's term of a sum that is never taken"
        case Relation.PERMUTED:
            return "is the part of another rank"
        case _:
            return "is not the reference's, nor a part or a term of it"


# --- The module on whose way back the gradient first goes wrong -----------------------------------

# Gradients are known on both sides of every module, and from which of them each comes: what one of
# several readers of a value does wrong is found at its own input.

_PENDING = frozenset({Relation.PARTIAL, Relation.PERMUTED})


def locate_backward(seen: WatchedStep) -> Location | None:
    """Where gradients go wrong, or where a sum over them is due that nobody takes."""
    way = _Way(seen)
    passed: dict[str, Tensor] = {}
    pending: list[ValuePlace] = []
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


def own_share(seen: WatchedStep) -> float | None:
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

    def __init__(self, seen: WatchedStep) -> None:
        self.seen = seen
        self.calls = seen.calls()
        both = (call.back(side) for call, _ in self.calls for side in (INPUT_SIDE, OUTPUT_SIDE))
        self.near = seen.near(piece.local for table in both for piece in table.values())
        parts = float(seen.program.data_ranks)
        self.factors = (parts, 1.0) if parts > 1 else (1.0,)
        self._order = {place: n for n, place in enumerate(seen.reference.backward)}
        self._known: dict[ValuePlace, Related | None] = {}
        self._targets: dict[ValuePlace, list[ValuePlace]] = {}
        for place, sources in seen.reference.sources.items():
            for source in sources:
                self._targets.setdefault(source, []).append(place)

    def relate(self, place: ValuePlace, factors: tuple[float, ...]) -> Related | None:
        """How the ranks' gradients belong to the reference's; None if that cannot be said."""
        call, others = self.calls[place.call]
        table = {place.path: call.back(place.side)[place.path]}
        pieces = {rank: other.back(place.side) for rank, other in others.items()}
        return next(related_of(self.seen, table, pieces, self.near, factors), None)

    def related(self, place: ValuePlace) -> Related | None:
        """The same, once for all."""
        if place not in self._known:
            arrives = place in self._order
            self._known[place] = self.relate(place, self.factors) if arrives else None
        return self._known[place]

    def relation(self, place: ValuePlace) -> Relation:
        related = self.related(place)
        return Relation.UNKNOWN if related is None else related.relation

    def side(self, place: ValuePlace) -> str:
        return f"{place.side} of {self.calls[place.call][0].name or 'the model'}"

    def _beyond(
        self, place: ValuePlace, ways: dict[ValuePlace, list[ValuePlace]]
    ) -> list[ValuePlace]:
        """The next places on the way, through those of which nothing can be said, in order."""
        found: set[ValuePlace] = set()
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

    def before(self, place: ValuePlace) -> list[ValuePlace]:
        """From where its gradient comes."""
        ways = {one: list(places) for one, places in self.seen.reference.sources.items()}
        return self._beyond(place, ways)

    def taken_up(self, place: ValuePlace) -> bool:
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

    def blamed(self, place: ValuePlace) -> ValuePlace:
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

    def _late(self, place: ValuePlace) -> list[ValuePlace]:
        """Those before a place at which a sum is still to be taken."""
        return [one for one in self.before(place) if self.relation(one) in _PENDING]

    def location(self, place: ValuePlace, passed: dict[str, Tensor]) -> Location:
        related = self.related(place)
        assert related is not None  # noqa: S101  (only what is known is blamed)
        name, kind = self._module(place)
        words = f"the gradient at the {self.side(place)} {describe_related(related)}"
        return Location(name, kind, related, words, backward=True, passing=dict(passed))

    def _module(self, place: ValuePlace) -> tuple[str, str]:
        """Name and class of the module in which a gradient came to be as it is at a place."""
        call = self.calls[place.call][0]
        if place.side == INPUT_SIDE:
            return call.name, call.kind
        sources = self.seen.reference.sources.get(place, ())
        readers = [one for one in sources if one.side == INPUT_SIDE and self.related(one) is None]
        if readers:  # it passes through one of which nothing can be said
            reader = self.calls[readers[0].call][0]
            return reader.name, reader.kind
        for outer, _ in self.calls[place.call + 1 :] if sources else ():
            if not outer.name or call.name.startswith(f"{outer.name}."):
                return outer.name, outer.kind
        return LOSS_MODULE, ""


# --- Cases for the diagnosis ----------------------------------------------------------------------

# What ranks hold together, where that cannot be said.
_NOTHING = torch.empty(0)


def explain(case: Case) -> Diagnosis | None:
    """Which collective is missing, doubled or mis-scaled; None if the numbers do not show it."""
    found = rank_patterns(case, ACROSS_RANKS)
    return Diagnosis(patterns=found) if found else None


def case_of_item(judge: Judge, judged: Judged) -> Case | None:
    """An item that is wrong; None if there is nothing to set against each other."""
    item = judged.best
    if item.reference is None:
        return None
    earlier: dict[str, Tensor] = {}
    if item.kind in {PARAMETER, BUFFER}:
        wide = judged.lifted is not None and item is judged.lifted
        trace = judge.lifted[0] if wide and judge.lifted is not None else judge.reference
        if item.name in trace.initial:
            earlier["the initial value"] = trace.initial[item.name].local
        for number, step in enumerate(trace.steps[: judged.step - 1], start=1):
            table = step.parameters if item.kind == PARAMETER else step.buffers
            if item.name in table:
                earlier[f"the value after step {number}"] = table[item.name].local
    value = item.ranks.value
    if item.ranks.disagreement is not None and judged.ranks:
        value = item.ranks.by_rank[judged.ranks[0]]
    context = Context(
        world=judge.program.mesh,
        item=item.kind,
        unit=judge.unit,
        splits_samples=judge.program.data_ranks > 1,
        # Ranks with other samples have another loss: that says nothing.
        held={} if item.kind == LOSS else item.ranks.by_rank,
        earlier=earlier,
    )
    return Case(_NOTHING if value is None else value, item.reference, context=context)


def case_of_module(judge: Judge, location: Location, number: int) -> Case | None:
    """What a module gave, on the ranks that have the same samples as the first that is wrong."""
    related, program = location.related, judge.program
    first = next(iter(related.ranks or related.pieces))
    group = [r for r in related.pieces if program.data_rank(r) == program.data_rank(first)]
    expected = related.expected[first]
    held = {rank: related.pieces[rank].local for rank in group}
    value: Tensor | None = held[first]
    if not expected.dim() and program.data_ranks > 1:
        value, held = mean_of(related.pieces), {}
    elif related.pieces[first].placement is not None:
        value = assemble({rank: related.pieces[rank] for rank in group}, expected.shape).value
        if is_partial(related.pieces[first]):
            held = {}  # terms that are known to be terms: it is their sum that is wrong
    elif held[first].shape != expected.shape:
        expected, held = _part_of(judge, first, held[first], expected), {first: held[first]}
    wide = judge.lifted is not None
    trace = judge.lifted[0] if wide and judge.lifted is not None else judge.reference
    before = trace.steps[number - 1].parameters if number else trace.initial
    own = {n: p.local for n, p in before.items() if n.startswith(f"{location.module}.")}
    other = {n: p.local for n, p in before.items() if n not in own}
    terms = {n: t for n, t in {**own, **other}.items() if t.dim() == 1}
    forward = not location.backward
    context = Context(
        world=program.mesh,
        item=GRADIENT if location.module == LOSS else "module",
        unit=judge.unit,
        splits_samples=program.data_ranks > 1,
        held=held,
        everywhere=related.held,
        wholes=related.expected,
        summands=location.parts if forward else {},
        biases=terms,
        added={**location.passing, **{n: t for n, t in own.items() if n in terms and forward}},
    )
    return Case(_NOTHING if value is None else value, expected, context=context)


def _part_of(judge: Judge, rank: int, value: Tensor, whole: Tensor) -> Tensor:
    """The part that a rank should hold of the whole, in the order of ranks."""
    dims = [d for d in range(whole.dim()) if value.shape[d] != whole.shape[d]]
    dim = dims[0]
    length = value.shape[dim]
    chunk = natural_chunk(judge.program, rank, whole.shape[dim] // length)
    return whole.narrow(dim, chunk * length, min(length, whole.shape[dim] - chunk * length))


def swapped_shards(judge: Judge, module: str) -> tuple[Diagnosis, tuple[int, ...]] | None:
    """Parameters of a module, split by hand, that other ranks should have; None if there are none.

    Where most parameters lie in another order than the ranks', that is how the model is split.
    """
    split = {
        name: {rank: slots for rank, slots in table.items() if slots.chunk is not None}
        for name, table in judge.slots.items()
    }
    moved = {
        name: {rank: s for rank, s in table.items() if s.chunk != s.natural}
        for name, table in split.items()
    }
    odd = [name for name, table in moved.items() if table]
    if 2 * len(odd) > len([name for name, table in split.items() if table]) and len(split) > 1:
        return None
    name = next((n for n in odd if n == module or n.startswith(f"{module}.")), None)
    if name is None:
        return None
    rank, slots = next(iter(moved[name].items()))
    local = next(trace for trace in judge.ranks if trace.rank == rank).initial[name].local
    whole, dim = judge.reference.initial[name].local, slots.dim or 0
    right, taken = (
        whole.narrow(dim, local.shape[dim] * (part or 0), local.shape[dim])
        for part in (slots.natural, slots.chunk)
    )
    sentence = (
        f"rank {rank} holds part {slots.chunk} of {name} along dim {dim} instead of part "
        f"{slots.natural}: the shard of another rank"
    )
    evidence: dict[str, float | str] = {"parameter": name, "dim": float(dim)}
    case = Case(local, right, context=Context(unit=judge.unit))
    found = claim(case, local, taken, PatternKind.WRONG_RANKS_SHARD, sentence, evidence)
    return (Diagnosis(patterns=calibrated(found)), tuple(moved[name])) if found else None


# --- The cause ------------------------------------------------------------------------------------

_BATCH_NORM = (
    "batch normalisation takes its statistics over the samples of one rank: convert it with "
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm if all of them are meant"
)
GRADIENT_REDUCTION = "gradient reduction"
_AT_MODULES = "at every module they are right: they are reduced in a wrong way, or not at all"
_SAME_FACTOR = 1e-3
_LATE = "the ranks' terms when backward ends: reduced before the step, which is right"


@dataclasses.dataclass(frozen=True)
class ParallelCause:
    """Where a fault starts and what it is.

    Attributes:
        judged: the item that shows it first.
        origin: the module; None if that is not known.
        diagnosis: which collective; None if the numbers do not show it.
        words: what was seen at the module.
        others: step and path -> what is plain about other items.
    """

    judged: Judged
    origin: Origin | None
    diagnosis: Diagnosis | None
    words: str = ""
    others: dict[tuple[int, str], Diagnosis] = dataclasses.field(default_factory=dict)

    def told(self, finding: Finding) -> Finding:
        """The finding with all that."""
        reason = f"{finding.reason}; {self.words}" if self.words else finding.reason
        return msgspec.structs.replace(
            finding,
            reason=reason,
            origin=self.origin,
            diagnosis=self.diagnosis or finding.diagnosis,
            advice=finding.advice or self.advice,
        )

    @property
    def advice(self) -> str:
        """What to do, where the kind of module says it."""
        if self.origin is not None and self.origin.operator.startswith("BatchNorm"):
            return _BATCH_NORM
        return ""


def find_cause(
    judge: Judge, wrong: list[Judged], reference: Trace | None, ranks: list[Trace]
) -> ParallelCause:
    """What the first thing that is wrong comes from.

    Args:
        wrong: everything that is, in order.
        reference: the run that watched its modules, and `ranks` likewise; None if there is none.
    """
    step = min(one.step for one in wrong)
    here = [one for one in wrong if one.step == step]
    others = {}
    for one in here:
        case = case_of_item(judge, one)
        found = None if case is None else explain(case)
        if found is not None:
            others[(one.step, one.item.path)] = found
    seen = None
    if reference is not None:
        seen = WatchedStep.of(judge.program, reference, ranks, max(0, step - 1), judge.unit)
    kinds = {one.item.kind for one in here}
    if INITIAL in kinds:
        return _at_owner(here[0], seen, others)
    if kinds & {OUTPUT, LOSS}:
        return _forward_cause(judge, here, seen, others)
    if GRADIENT in kinds:
        return _backward_cause(judge, here, seen, others)
    first = next(
        (one for kind in (PARAMETER, BUFFER) for one in here if one.item.kind == kind), here[0]
    )
    return _at_owner(first, seen, others)


def excuse_late_reductions(judge: Judge, judged: list[Judged]) -> list[Judged]:
    """Gradients that are reduced between backward and the optimizer's step are no fault.

    They are terms of the right gradient, and the parameter that the step makes of them is right.
    """
    stepped = {
        (one.step, one.item.name): one
        for one in judged
        if one.item.kind == PARAMETER and one.status.passes(strict=True)
    }
    found: list[Judged] = []
    for one in judged:
        after = stepped.get((one.step, one.item.name))
        if one.item.kind == GRADIENT and not one.status.passes() and after is not None:
            case = case_of_item(judge, one)
            told = None if case is None or not _is_moved_by_step(judge, after) else explain(case)
            if told is not None and told.best and told.best.kind == PatternKind.MISSING_REDUCTION:
                finding = msgspec.structs.replace(
                    one.findings[0], status=Status.EQUIVALENT, reason=_LATE, diagnosis=None
                )
                found.append(
                    dataclasses.replace(one, findings=(finding,), ranks=(), is_judged=True)
                )
                continue
        found.append(one)
    return judge.reconsider(found)


def _is_moved_by_step(judge: Judge, stepped: Judged) -> bool:
    """Whether the step changed the parameter at all."""
    trace, name = judge.reference, stepped.item.name
    before = trace.initial if stepped.step == 1 else trace.steps[stepped.step - 2].parameters
    value = stepped.item.reference
    return value is not None and name in before and not torch.equal(before[name].local, value)


Explained = dict[tuple[int, str], Diagnosis]


def _item_key(one: Judged) -> tuple[int, str]:
    return one.step, one.item.path


def _at_owner(one: Judged, seen: WatchedStep | None, others: Explained) -> ParallelCause:
    """In the module that owns the parameter or buffer."""
    path, kind = owner_of(one.item.name, seen)
    origin = Origin(kind=OriginKind.MODULE, name=path, operator=kind, ranks=one.ranks)
    return ParallelCause(one, origin, others.get(_item_key(one)), others=others)


def _forward_cause(
    judge: Judge, here: list[Judged], seen: WatchedStep | None, others: Explained
) -> ParallelCause:
    """Outputs or the loss are wrong: the first module that gave something else."""
    one = next(one for one in here if one.item.kind in {OUTPUT, LOSS})
    location = None if seen is None else locate_forward(seen)
    if location is not None:
        cause = _cause_at_location(judge, one, location, others)
        stale = _stale_state(here, location.module, others)
        return cause if stale is None else dataclasses.replace(cause, diagnosis=stale)
    if one.item.kind == LOSS:
        # Every module is right: it is made of the right outputs in a wrong way.
        origin = Origin(kind=OriginKind.TRAINING, name=LOSS, ranks=one.ranks)
        return ParallelCause(one, origin, others.get(_item_key(one)), others=others)
    return ParallelCause(one, None, others.get(_item_key(one)), others=others)


def _stale_state(here: list[Judged], module: str, others: Explained) -> Diagnosis | None:
    """What a module gives is wrong because of a buffer of its own that was not updated."""
    for one in here:
        found = others.get(_item_key(one))
        owns = one.item.kind == BUFFER and owner_of(one.item.name, None)[0] == module
        if (
            owns
            and found is not None
            and found.best is not None
            and found.best.kind == PatternKind.STALE
        ):
            return found
    return None


def _cause_at_location(
    judge: Judge, one: Judged, location: Location, others: Explained
) -> ParallelCause:
    ranks = location.related.ranks
    case = case_of_module(judge, location, one.step - 1)
    diagnosis = None if case is None else explain(case)
    swapped = swapped_shards(judge, location.module)
    if swapped is not None:
        diagnosis, ranks = swapped
    if diagnosis is None and location.module == LOSS:
        diagnosis = others.get(_item_key(one))
    kind = OriginKind.TRAINING if location.module == LOSS else OriginKind.MODULE
    origin = Origin(kind=kind, name=location.module, operator=location.kind, ranks=ranks)
    return ParallelCause(one, origin, diagnosis, location.words, others)


def _backward_cause(
    judge: Judge, here: list[Judged], seen: WatchedStep | None, others: Explained
) -> ParallelCause:
    """The forward pass is right, gradients are not."""
    wrong = [one for one in here if one.item.kind == GRADIENT]
    location = None if seen is None else locate_backward(seen)
    if location is not None:
        inside = [one for one in wrong if owner_of(one.item.name, seen)[0] == location.module]
        one = inside[0] if inside else _first_backward(wrong, seen)
        return _cause_at_location(judge, one, location, others)
    one = _first_backward(wrong, seen)
    if not _all_are(judge, wrong):
        return _at_owner(one, seen, others)
    factor = _common_factor(wrong, Near(judge.unit))
    if factor is not None:
        return _all_scaled(judge, wrong, seen, factor, others)
    if seen is None:
        return _at_owner(one, seen, others)
    words = f"all {len(wrong)} gradients, while {_AT_MODULES}"
    origin = Origin(kind=OriginKind.TRAINING, name=GRADIENT_REDUCTION)
    return ParallelCause(one, origin, others.get(_item_key(one)), words, others)


def _all_scaled(
    judge: Judge, wrong: list[Judged], seen: WatchedStep | None, factor: float, others: Explained
) -> ParallelCause:
    """Every gradient is the same multiple of what it should be, and right at every module."""
    one = wrong[0]
    told = others.get(_item_key(one))
    if told is not None and told.best is not None:
        best = msgspec.structs.replace(
            told.best, sentence=f"every gradient is {told.best.sentence}"
        )
        told = Diagnosis(patterns=(best, *told.patterns[1:]))
    alike = f"all {len(wrong)} gradients alike"
    if seen is None:
        words = f"{alike}: the loss is scaled, or every reduction of them"
        return ParallelCause(one, None, told, words, others)
    parts = judge.program.data_ranks
    if parts > 1 and own_share(seen) == 1 and abs(factor * parts - 1) < _SAME_FACTOR:
        # Divided once before the way back, and once more by an average at its end.
        words = f"{alike}, and {parts} times too small before they reach any module"
        return ParallelCause(one, Origin(kind=OriginKind.TRAINING, name=LOSS), told, words, others)
    words = f"{alike}, while {_AT_MODULES}"
    origin = Origin(kind=OriginKind.TRAINING, name=GRADIENT_REDUCTION)
    return ParallelCause(one, origin, told, words, others)


def _all_are(judge: Judge, wrong: list[Judged]) -> bool:
    """Whether all gradients are wrong, of more than one module."""
    step = judge.reference.steps[wrong[0].step - 1]
    present = [
        name
        for name, piece in step.gradients.items()
        if piece is not None and bool(piece.local.any())
    ]
    owners = {owner_of(one.item.name, None)[0] for one in wrong}
    return len(wrong) >= len(present) and len(owners) > 1


def _common_factor(wrong: list[Judged], near: Near) -> float | None:
    """The multiple that all of them are of what they should be."""
    factors: list[float] = []
    for one in wrong:
        item = one.best
        if item.reference is None or item.ranks.value is None or item.ranks.disagreement:
            return None
        factor = factor_of(item.ranks.value, item.reference, near)
        if factor is None:
            return None
        factors.append(factor)
    spread = max(factors) - min(factors)
    return factors[0] if spread <= 100 * near.reach * abs(factors[0]) else None


def _first_backward(wrong: list[Judged], seen: WatchedStep | None) -> Judged:
    """The gradient whose module comes first on the way back."""
    if seen is None:
        return wrong[-1]
    places = {call.name: place for place, call in enumerate(seen.reference.modules)}
    return max(wrong, key=lambda one: places.get(owner_of(one.item.name, seen)[0], -1))
