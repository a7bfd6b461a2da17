"""The cause of what is wrong: the first item, the module where it starts, and the diagnosis."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec
import torch

from paritas.core.diagnosis.case import Case, Context
from paritas.core.diagnosis.diagnose import ACROSS_RANKS, rank_patterns
from paritas.core.diagnosis.patterns.ranks import claim, factor_of
from paritas.core.diagnosis.stating import with_confidence
from paritas.core.judging.pairs import Ruling, reconsider
from paritas.core.numerics.gates import Near
from paritas.core.placement.assembly import length, take
from paritas.core.placement.rank_pieces import assemble, is_partial
from paritas.core.results.findings import (
    Diagnosis,
    Finding,
    Origin,
    OriginKind,
    PatternKind,
    Status,
)
from paritas.sharding.plans.assembling import (
    BUFFER,
    GRADIENT,
    INITIAL,
    LOSS,
    OUTPUT,
    PARAMETER,
    RETURNED,
    natural_chunk,
)
from paritas.sharding.plans.relating import Related, Relation, alike, mean_of, relate
from paritas.sharding.plans.traces import INPUT_SIDE, OUTPUT_SIDE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from torch import Tensor

    from paritas.core.placement.rank_pieces import RankPiece
    from paritas.sharding.plans.assembling import StepItem
    from paritas.sharding.plans.judging import Judge, Judged
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
        known = {rank: dict(_numbered(step.modules)) for rank, step in self.ranks.items()}
        return [
            (call, {rank: calls[key] for rank, calls in known.items() if key in calls})
            for key, call in _numbered(self.reference.modules)
        ]


def _numbered(calls: list[ModuleCall]) -> Iterator[tuple[tuple[str, int], ModuleCall]]:
    """Calls by name and number among the calls of that name."""
    counts: dict[str, int] = {}
    for call in calls:
        turn = counts.get(call.name, 0)
        counts[call.name] = turn + 1
        yield (call.name, turn), call


def locate_forward(seen: WatchedStep) -> Location | None:
    """The first module whose output is wrong, or was not reduced before a later one is wrong."""
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
    """Keep the last few values that are right and the same on all ranks."""
    if related is None:
        return
    wholes = list(related.expected.values())
    if all(whole is wholes[0] for whole in wholes):
        passed[words] = wholes[0]
        for old in list(passed)[:-_MOST_PASSING]:
            del passed[old]


def _suspect(seen: WatchedStep, pending: list[Location], here: Location, near: Near) -> Location:
    """The location to report when a module is wrong.

    If it only passes on a sum that was never reduced, that is the pending location.
    """
    if not pending or misreduced(seen, here.related, [pending[-1].related], near):
        return here
    return pending[0]


def misreduced(seen: WatchedStep, related: Related, before: list[Related], near: Near) -> bool:
    """Whether the ranks reduced their terms there, but wrongly.

    The value is then a multiple of the right one, or the term of one rank.
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
    """How each tensor of a module relates to the reference's, if that is known."""
    for path, piece in reference.items():
        pieces = {rank: tables[path] for rank, tables in ranks.items() if path in tables}
        if not pieces:
            continue
        found = relate(seen.program, seen.samples, pieces, piece.local, near, factors)
        if found.relation is not Relation.UNKNOWN:
            yield found


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


def locate_backward(seen: WatchedStep) -> Location | None:
    """Where gradients go wrong, or where a sum of them is never reduced."""
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
    """The factor on the first gradient, before it reaches any module; None if unknown.

    If ranks have different samples, it is the number of parts if each rank takes the mean over its
    own samples, and 1 if it already divides by that number.
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
    """The gradients of one step, compared with the reference's on demand."""

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
        """How the ranks' gradients relate to the reference's; None if that is unknown."""
        call, others = self.calls[place.call]
        table = {place.path: call.back(place.side)[place.path]}
        pieces = {rank: other.back(place.side) for rank, other in others.items()}
        return next(related_of(self.seen, table, pieces, self.near, factors), None)

    def related(self, place: ValuePlace) -> Related | None:
        """The same, cached."""
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
        """The next known places along the paths, in order; unknown ones are passed through."""
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
        """The places its gradient comes from."""
        ways = {one: list(places) for one, places in self.seen.reference.sources.items()}
        return self._beyond(place, ways)

    def taken_up(self, place: ValuePlace) -> bool:
        """Whether a term here becomes whole, or a right shard, at a later place."""
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
        """The place where a wrong gradient starts."""
        place = self._follow(place, {Relation.WRONG})
        late = self._late(place)
        here, terms = self.related(place), [self._known[one] for one in late]
        before = [one for one in terms if one is not None]
        if here is not None and misreduced(self.seen, here, before, self.near):
            return place
        return self._follow(place, _PENDING)

    def _follow(self, place: ValuePlace, relations: Collection[Relation]) -> ValuePlace:
        """The last place of a path; a tensor that was passed around may lead back to it."""
        met = {place}
        while ahead := [
            p for p in self.before(place) if p not in met and self.relation(p) in relations
        ]:
            place = ahead[0]
            met.add(place)
        return place

    def _late(self, place: ValuePlace) -> list[ValuePlace]:
        """The places before it at which a sum is pending."""
        return [one for one in self.before(place) if self.relation(one) in _PENDING]

    def location(self, place: ValuePlace, passed: dict[str, Tensor]) -> Location:
        related = self.related(place)
        assert related is not None  # noqa: S101  (only known places are blamed)
        name, kind = self._module(place)
        words = f"the gradient at the {self.side(place)} {describe_related(related)}"
        return Location(name, kind, related, words, backward=True, passing=dict(passed))

    def _module(self, place: ValuePlace) -> tuple[str, str]:
        """Name and class of the module that computed the gradient at a place."""
        call = self.calls[place.call][0]
        if place.side == INPUT_SIDE:
            return call.name, call.kind
        sources = self.seen.reference.sources.get(place, ())
        readers = [one for one in sources if one.side == INPUT_SIDE and self.related(one) is None]
        if readers:  # it passes through a module whose gradient is unknown
            reader = self.calls[readers[0].call][0]
            return reader.name, reader.kind
        for outer, _ in self.calls[place.call + 1 :] if sources else ():
            if not outer.name or call.name.startswith(f"{outer.name}."):
                return outer.name, outer.kind
        return LOSS_MODULE, ""


# --- Cases for the diagnosis ----------------------------------------------------------------------

# Stands for the value that ranks hold together if it is unknown.
_NOTHING = torch.empty(0)


def explain(case: Case) -> Diagnosis | None:
    """Which collective is missing, doubled or mis-scaled; None if the numbers do not show it."""
    found = rank_patterns(case, ACROSS_RANKS)
    return Diagnosis(patterns=found) if found else None


def case_of_item(judge: Judge, judged: Judged) -> Case | None:
    """The case of a wrong item; None if there is no reference."""
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
    value, reference, held = item.ranks.value, item.reference, item.ranks.by_rank
    if item.ranks.disagreement is not None and judged.ranks:
        value = held[judged.ranks[0]]
    elif item.ranks.disagreement is not None:
        value, reference, held = _replicas_of_a_shard(item)
    context = Context(
        world=judge.program.mesh,
        item=item.kind,
        unit=judge.unit,
        splits_samples=judge.program.data_ranks > 1,
        # Ranks with other samples have another loss.
        held={} if item.kind == LOSS else held,
        earlier=earlier,
    )
    return Case(_NOTHING if value is None else value, reference, context=context)


def _replicas_of_a_shard(item: StepItem) -> tuple[Tensor | None, Tensor, dict[int, Tensor]]:
    """One rank's value, the reference and all replicas of the part that ranks disagree about."""
    found, whole = item.ranks, item.reference
    assert found.disagreement is not None  # noqa: S101  (the caller knows)
    assert whole is not None  # noqa: S101
    place = found.where.get(found.disagreement.rank)
    if place is None or tuple(map(length, place)) == tuple(whole.shape):
        return found.value, whole, found.by_rank
    held = {rank: found.by_rank[rank] for rank, where in found.where.items() if where == place}
    return held[found.disagreement.rank], take(whole, place), held


def case_of_module(judge: Judge, location: Location, number: int) -> Case | None:
    """The case of a module's output, on the ranks with the samples of the first wrong rank."""
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
            held = {}  # known to be terms, so their sum is wrong
    elif held[first].shape != expected.shape:
        expected, held = _part_of(judge, first, held[first], expected), {first: held[first]}
    trace = judge.reference if judge.lifted is None else judge.lifted[0]
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
    """The shard that a rank should hold, in the order of ranks."""
    dims = [d for d in range(whole.dim()) if value.shape[d] != whole.shape[d]]
    dim = dims[0]
    length = value.shape[dim]
    chunk = natural_chunk(judge.program, rank, whole.shape[dim] // length)
    return whole.narrow(dim, chunk * length, min(length, whole.shape[dim] - chunk * length))


def swapped_shards(judge: Judge, module: str) -> tuple[Diagnosis, tuple[int, ...]] | None:
    """The diagnosis and ranks if a module's hand-made shards are on the wrong ranks, or None.

    If most parameters lie in another order than the ranks, that is how the model is split.
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
    stated = Diagnosis(patterns=with_confidence(found, at_output=False))
    return (stated, tuple(moved[name])) if found else None


# --- The cause ------------------------------------------------------------------------------------

_BATCH_NORM = (
    "batch normalisation takes its statistics over the samples of one rank: to use all samples, "
    "convert it with torch.nn.SyncBatchNorm.convert_sync_batchnorm"
)
GRADIENT_REDUCTION = "gradient reduction"
_AT_MODULES = "they are right at every module: they are reduced wrongly, or not at all"
_SAME_FACTOR = 1e-3
_LATE = "still the ranks' terms when backward ends, but reduced before the optimizer's step"


@dataclasses.dataclass(frozen=True)
class ParallelCause:
    """Where a fault starts and what it is.

    Attributes:
        judged: the item that shows it first.
        origin: the module; None if it is unknown.
        diagnosis: which collective; None if the numbers do not show it.
        words: what was seen at the module.
        others: step and path -> diagnosis of other items.
    """

    judged: Judged
    origin: Origin | None
    diagnosis: Diagnosis | None
    words: str = ""
    others: dict[tuple[int, str], Diagnosis] = dataclasses.field(default_factory=dict)

    def explained(self, finding: Finding) -> Finding:
        """The finding with origin, diagnosis and advice."""
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
        """What to do, if the class of the module shows it."""
        if self.origin is not None and self.origin.operator.startswith("BatchNorm"):
            return _BATCH_NORM
        return ""


def find_cause(
    judge: Judge, wrong: list[Judged], reference: Trace | None, ranks: list[Trace]
) -> ParallelCause:
    """Find the cause of the first wrong item.

    Args:
        wrong: all wrong items, in order.
        reference: the run that watched its modules, as `ranks` did; None if there is none.
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
    if kinds & {GRADIENT, RETURNED}:
        return _backward_cause(judge, here, seen, others)
    first = next(
        (one for kind in (PARAMETER, BUFFER) for one in here if one.item.kind == kind), here[0]
    )
    return _at_owner(first, seen, others)


def excuse_late_reductions(judge: Judge, judged: list[Judged]) -> list[Judged]:
    """Pass gradients that are reduced between backward and the optimizer's step.

    They are terms of the right gradient, and the parameter after the step is right.
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
            moved = case is not None and _is_moved_by_step(judge, after)
            why = explain(case) if moved and case is not None else None
            if why is not None and why.best and why.best.kind == PatternKind.MISSING_REDUCTION:
                findings = tuple(reconsider(one.findings[:1], _rule_on_late_reduction))
                found.append(dataclasses.replace(one, findings=findings, ranks=(), is_judged=True))
                continue
        found.append(one)
    return judge.reconsider(found)


def _rule_on_late_reduction(_: Finding) -> Ruling:
    return Ruling(Status.EQUIVALENT, _LATE, {"diagnosis": None})


def _is_moved_by_step(judge: Judge, stepped: Judged) -> bool:
    """Whether the step changed the parameter."""
    trace, name = judge.reference, stepped.item.name
    before = trace.initial if stepped.step == 1 else trace.steps[stepped.step - 2].parameters
    value = stepped.item.reference
    return value is not None and name in before and not torch.equal(before[name].local, value)


Explained = dict[tuple[int, str], Diagnosis]


def _item_key(one: Judged) -> tuple[int, str]:
    return one.step, one.item.path


def _at_owner(one: Judged, seen: WatchedStep | None, others: Explained) -> ParallelCause:
    """The cause in the module that owns the parameter or buffer."""
    path, kind = owner_of(one.item.name, seen)
    origin = Origin(kind=OriginKind.MODULE, name=path, operator=kind, ranks=one.ranks)
    return ParallelCause(one, origin, others.get(_item_key(one)), others=others)


def _forward_cause(
    judge: Judge, here: list[Judged], seen: WatchedStep | None, others: Explained
) -> ParallelCause:
    """The cause if outputs or the loss are wrong: the first module with a wrong output."""
    one = next(one for one in here if one.item.kind in {OUTPUT, LOSS})
    location = None if seen is None else locate_forward(seen)
    if location is not None:
        cause = _cause_at_location(judge, one, location, others)
        stale = _stale_state(here, location.module, others)
        return cause if stale is None else dataclasses.replace(cause, diagnosis=stale)
    if one.item.kind == LOSS:
        # Every module is right, so the loss is computed wrongly.
        origin = Origin(kind=OriginKind.TRAINING, name=LOSS, ranks=one.ranks)
        return ParallelCause(one, origin, others.get(_item_key(one)), others=others)
    return ParallelCause(one, None, others.get(_item_key(one)), others=others)


def _stale_state(here: list[Judged], module: str, others: Explained) -> Diagnosis | None:
    """The diagnosis of a stale buffer of the module, which makes its output wrong."""
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
    """The cause if the forward pass is right and gradients are not."""
    wrong = [one for one in here if one.item.kind == GRADIENT]
    wrong = wrong or [one for one in here if one.item.kind == RETURNED]
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
    words = f"all {len(wrong)} gradients are wrong, but {_AT_MODULES}"
    origin = Origin(kind=OriginKind.TRAINING, name=GRADIENT_REDUCTION)
    return ParallelCause(one, origin, others.get(_item_key(one)), words, others)


def _all_scaled(
    judge: Judge, wrong: list[Judged], seen: WatchedStep | None, factor: float, others: Explained
) -> ParallelCause:
    """The cause if every gradient is the same multiple, and right at every module."""
    one = wrong[0]
    found = others.get(_item_key(one))
    if found is not None and found.best is not None:
        sentence = f"every gradient is {found.best.sentence}"
        best = msgspec.structs.replace(found.best, sentence=sentence)
        found = Diagnosis(patterns=(best, *found.patterns[1:]))
    alike = f"all {len(wrong)} gradients have the same factor"
    if seen is None:
        words = f"{alike}: the loss is scaled, or every reduction of gradients"
        return ParallelCause(one, None, found, words, others)
    parts = judge.program.data_ranks
    if parts > 1 and own_share(seen) == 1 and abs(factor * parts - 1) < _SAME_FACTOR:
        # Divided once before backward, and again by an average at its end.
        words = f"{alike}, and are {parts} times too small before they reach any module"
        origin = Origin(kind=OriginKind.TRAINING, name=LOSS)
        return ParallelCause(one, origin, found, words, others)
    words = f"{alike}, but {_AT_MODULES}"
    origin = Origin(kind=OriginKind.TRAINING, name=GRADIENT_REDUCTION)
    return ParallelCause(one, origin, found, words, others)


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
    """The factor that all of them have in common; None if there is none."""
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
    """The gradient whose module comes first in backward."""
    if seen is None:
        return wrong[-1]
    places = {call.name: place for place, call in enumerate(seen.reference.modules)}
    return max(wrong, key=lambda one: places.get(owner_of(one.item.name, seen)[0], -1))
