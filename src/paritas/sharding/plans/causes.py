"""The cause of what is wrong: the first item, the module where it starts, and the diagnosis."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec
import torch

from paritas.core.diagnosis.case import Case, Context
from paritas.core.diagnosis.diagnose import ACROSS_RANKS, rank_patterns
from paritas.core.diagnosis.patterns.ranks import Prediction, claim, factor_of
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
from paritas.core.results.items import ItemKind
from paritas.sharding.plans.assembling import natural_chunk
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


# --- Cases for the diagnosis ----------------------------------------------------------------------

# Stands for the value that ranks hold together if it is unknown.
_NOTHING = torch.empty(0)


def explain(case: Case) -> Diagnosis | None:
    """Which collective is missing, doubled or mis-scaled; None if the numbers do not show it."""
    patterns = rank_patterns(case, ACROSS_RANKS)
    return Diagnosis(patterns=patterns) if patterns else None


def case_of_item(judge: Judge, judged: Judged) -> Case | None:
    """The case of a wrong item; None if there is no reference."""
    item = judged.best
    if item.reference is None:
        return None
    earlier: dict[str, Tensor] = {}
    if item.kind in {ItemKind.PARAMETER, ItemKind.BUFFER}:
        wide = judged.lifted is not None and item is judged.lifted
        trace = judge.lifted[0] if wide and judge.lifted is not None else judge.reference
        if item.name in trace.initial:
            earlier["the initial value"] = trace.initial[item.name].local
        for number, step in enumerate(trace.steps[: judged.step - 1], start=1):
            table = step.parameters if item.kind is ItemKind.PARAMETER else step.buffers
            if item.name in table:
                earlier[f"the value after step {number}"] = table[item.name].local
    value, reference, values_by_rank = item.ranks.value, item.reference, item.ranks.by_rank
    if item.ranks.disagreement is not None and judged.ranks:
        value = values_by_rank[judged.ranks[0]]
    elif item.ranks.disagreement is not None:
        value, reference, values_by_rank = _replicas_of_a_shard(item)
    context = Context(
        world=judge.program.mesh,
        item=item.kind,
        unit=judge.unit,
        splits_samples=judge.program.data_ranks > 1,
        # Ranks with other samples have another loss.
        held={} if item.kind is ItemKind.LOSS else values_by_rank,
        earlier=earlier,
    )
    return Case(_NOTHING if value is None else value, reference, context=context)


def _replicas_of_a_shard(item: StepItem) -> tuple[Tensor | None, Tensor, dict[int, Tensor]]:
    """One rank's value, the reference and all replicas of the part that ranks disagree about."""
    rank_value, reference = item.ranks, item.reference
    assert rank_value.disagreement is not None  # noqa: S101  (the caller knows)
    assert reference is not None  # noqa: S101
    segments = rank_value.where.get(rank_value.disagreement.rank)
    if segments is None or tuple(map(length, segments)) == tuple(reference.shape):
        return rank_value.value, reference, rank_value.by_rank
    replicas = {
        rank: rank_value.by_rank[rank]
        for rank, where in rank_value.where.items()
        if where == segments
    }
    return replicas[rank_value.disagreement.rank], take(reference, segments), replicas


def case_of_module(judge: Judge, location: Location, number: int) -> Case | None:
    """The case of a module's output, on the ranks with the samples of the first wrong rank."""
    related, program = location.related, judge.program
    first = next(iter(related.ranks or related.pieces))
    group = [r for r in related.pieces if program.data_rank(r) == program.data_rank(first)]
    expected = related.expected[first]
    values_by_rank = {rank: related.pieces[rank].local for rank in group}
    value: Tensor | None = values_by_rank[first]
    if not expected.dim() and program.data_ranks > 1:
        value, values_by_rank = mean_of(related.pieces), {}
    elif related.pieces[first].placement is not None:
        value = assemble({rank: related.pieces[rank] for rank in group}, expected.shape).value
        if is_partial(related.pieces[first]):
            values_by_rank = {}  # known to be terms, so their sum is wrong
    elif values_by_rank[first].shape != expected.shape:
        expected, values_by_rank = (
            _part_of(judge, first, values_by_rank[first], expected),
            {first: values_by_rank[first]},
        )
    trace = judge.reference if judge.lifted is None else judge.lifted[0]
    before = trace.steps[number - 1].parameters if number else trace.initial
    own_parameters = {n: p.local for n, p in before.items() if n.startswith(f"{location.module}.")}
    other = {n: p.local for n, p in before.items() if n not in own_parameters}
    terms = {n: t for n, t in {**own_parameters, **other}.items() if t.dim() == 1}
    forward = not location.backward
    context = Context(
        world=program.mesh,
        item=ItemKind.TRAINING_GRADIENT if location.module == LOSS_MODULE else "module",
        unit=judge.unit,
        splits_samples=program.data_ranks > 1,
        held=values_by_rank,
        everywhere=related.held,
        wholes=related.expected,
        summands=location.parts if forward else {},
        biases=terms,
        added={
            **location.passing,
            **{n: t for n, t in own_parameters.items() if n in terms and forward},
        },
    )
    return Case(_NOTHING if value is None else value, expected, context=context)


def _part_of(judge: Judge, rank: int, value: Tensor, full_value: Tensor) -> Tensor:
    """The shard that a rank should hold, in the order of ranks."""
    dims = [d for d in range(full_value.dim()) if value.shape[d] != full_value.shape[d]]
    dim = dims[0]
    length = value.shape[dim]
    chunk = natural_chunk(judge.program, rank, full_value.shape[dim] // length)
    return full_value.narrow(
        dim, chunk * length, min(length, full_value.shape[dim] - chunk * length)
    )


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
    reference_value, dim = judge.reference.initial[name].local, slots.dim or 0
    right, taken = (
        reference_value.narrow(dim, local.shape[dim] * (part or 0), local.shape[dim])
        for part in (slots.natural, slots.chunk)
    )
    sentence = (
        f"rank {rank} holds part {slots.chunk} of {name} along dim {dim} instead of part "
        f"{slots.natural}: the shard of another rank"
    )
    evidence: dict[str, float | str] = {"parameter": name, "dim": float(dim)}
    case = Case(local, right, context=Context(unit=judge.unit))
    kind = PatternKind.WRONG_RANKS_SHARD
    claimed_patterns = claim(case, local, Prediction(taken), kind, sentence, evidence)
    stated = Diagnosis(patterns=with_confidence(claimed_patterns, at_output=False))
    return (stated, tuple(moved[name])) if claimed_patterns else None


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

    def explain_finding(self, finding: Finding) -> Finding:
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
    step = min(judged_item.step for judged_item in wrong)
    here = [judged_item for judged_item in wrong if judged_item.step == step]
    others = {}
    for wrong_item in here:
        case = case_of_item(judge, wrong_item)
        diagnosis = None if case is None else explain(case)
        if diagnosis is not None:
            others[(wrong_item.step, wrong_item.item.item.text)] = diagnosis
    watched_step = None
    if reference is not None:
        watched_step = WatchedStep.of(judge.program, reference, ranks, max(0, step - 1), judge.unit)
    kinds = {judged_item.item.kind for judged_item in here}
    if ItemKind.INITIAL in kinds:
        return _at_owner(here[0], watched_step, others)
    if kinds & {ItemKind.OUTPUT, ItemKind.LOSS}:
        return _forward_cause(judge, here, watched_step, others)
    if kinds & {ItemKind.TRAINING_GRADIENT, ItemKind.GRADIENT}:
        return _backward_cause(judge, here, watched_step, others)
    first = next(
        (
            judged_item
            for kind in (ItemKind.PARAMETER, ItemKind.BUFFER)
            for judged_item in here
            if judged_item.item.kind is kind
        ),
        here[0],
    )
    return _at_owner(first, watched_step, others)


def excuse_late_reductions(judge: Judge, judged: list[Judged]) -> list[Judged]:
    """Pass gradients that are reduced between backward and the optimizer's step.

    They are terms of the right gradient, and the parameter after the step is right.
    """
    stepped = {
        (stepped_item.step, stepped_item.item.name): stepped_item
        for stepped_item in judged
        if stepped_item.item.kind is ItemKind.PARAMETER and stepped_item.status.passes(strict=True)
    }
    judgeds: list[Judged] = []
    for judged_item in judged:
        after = stepped.get((judged_item.step, judged_item.item.name))
        if (
            judged_item.item.kind is ItemKind.TRAINING_GRADIENT
            and not judged_item.status.passes()
            and after is not None
        ):
            case = case_of_item(judge, judged_item)
            moved = case is not None and _is_moved_by_step(judge, after)
            why = explain(case) if moved and case is not None else None
            if why is not None and why.best and why.best.kind == PatternKind.MISSING_REDUCTION:
                findings = tuple(reconsider(judged_item.findings[:1], _rule_on_late_reduction))
                judgeds.append(
                    dataclasses.replace(judged_item, findings=findings, ranks=(), is_judged=True)
                )
                continue
        judgeds.append(judged_item)
    return judge.reconsider(judgeds)


def _rule_on_late_reduction(_: Finding) -> Ruling:
    return Ruling(Status.EQUIVALENT, _LATE, {"diagnosis": None})


def _is_moved_by_step(judge: Judge, stepped: Judged) -> bool:
    trace, name = judge.reference, stepped.item.name
    before = trace.initial if stepped.step == 1 else trace.steps[stepped.step - 2].parameters
    value = stepped.item.reference
    return value is not None and name in before and not torch.equal(before[name].local, value)


Explained = dict[tuple[int, str], Diagnosis]


def _item_key(judged: Judged) -> tuple[int, str]:
    return judged.step, judged.item.item.text


def _at_owner(judged: Judged, watched_step: WatchedStep | None, others: Explained) -> ParallelCause:
    """The cause in the module that owns the parameter or buffer."""
    path, kind = owner_of(judged.item.name, watched_step)
    origin = Origin(kind=OriginKind.MODULE, name=path, operator=kind, ranks=judged.ranks)
    return ParallelCause(judged, origin, others.get(_item_key(judged)), others=others)


def _forward_cause(
    judge: Judge, here: list[Judged], watched_step: WatchedStep | None, others: Explained
) -> ParallelCause:
    """The cause if outputs or the loss are wrong: the first module with a wrong output."""
    first_output = next(
        wrong_output
        for wrong_output in here
        if wrong_output.item.kind in {ItemKind.OUTPUT, ItemKind.LOSS}
    )
    location = None if watched_step is None else locate_forward(watched_step)
    if location is not None:
        cause = _cause_at_location(judge, first_output, location, others)
        stale = _stale_state(here, location.module, others)
        return cause if stale is None else dataclasses.replace(cause, diagnosis=stale)
    if first_output.item.kind is ItemKind.LOSS:
        # Every module is right, so the loss is computed wrongly.
        origin = Origin(kind=OriginKind.TRAINING, name=LOSS_MODULE, ranks=first_output.ranks)
        return ParallelCause(
            first_output, origin, others.get(_item_key(first_output)), others=others
        )
    return ParallelCause(first_output, None, others.get(_item_key(first_output)), others=others)


def _stale_state(here: list[Judged], module: str, others: Explained) -> Diagnosis | None:
    """The diagnosis of a stale buffer of the module, which makes its output wrong."""
    for wrong_item in here:
        diagnosis = others.get(_item_key(wrong_item))
        owns = (
            wrong_item.item.kind is ItemKind.BUFFER
            and owner_of(wrong_item.item.name, None)[0] == module
        )
        if (
            owns
            and diagnosis is not None
            and diagnosis.best is not None
            and diagnosis.best.kind == PatternKind.STALE
        ):
            return diagnosis
    return None


def _cause_at_location(
    judge: Judge, judged: Judged, location: Location, others: Explained
) -> ParallelCause:
    ranks = location.related.ranks
    case = case_of_module(judge, location, judged.step - 1)
    diagnosis = None if case is None else explain(case)
    swapped = swapped_shards(judge, location.module)
    if swapped is not None:
        diagnosis, ranks = swapped
    if diagnosis is None and location.module == LOSS_MODULE:
        diagnosis = others.get(_item_key(judged))
    kind = OriginKind.TRAINING if location.module == LOSS_MODULE else OriginKind.MODULE
    origin = Origin(kind=kind, name=location.module, operator=location.kind, ranks=ranks)
    return ParallelCause(judged, origin, diagnosis, location.words, others)


def _backward_cause(
    judge: Judge, here: list[Judged], watched_step: WatchedStep | None, others: Explained
) -> ParallelCause:
    """The cause if the forward pass is right and gradients are not."""
    wrong = [
        wrong_item for wrong_item in here if wrong_item.item.kind is ItemKind.TRAINING_GRADIENT
    ]
    wrong = wrong or [
        wrong_item for wrong_item in here if wrong_item.item.kind is ItemKind.GRADIENT
    ]
    location = None if watched_step is None else locate_backward(watched_step)
    if location is not None:
        inside = [
            wrong_gradient
            for wrong_gradient in wrong
            if owner_of(wrong_gradient.item.name, watched_step)[0] == location.module
        ]
        first_backward = inside[0] if inside else _first_backward(wrong, watched_step)
        return _cause_at_location(judge, first_backward, location, others)
    first_backward = _first_backward(wrong, watched_step)
    if not _all_are(judge, wrong):
        return _at_owner(first_backward, watched_step, others)
    factor = _common_factor(wrong, Near(judge.unit))
    if factor is not None:
        return _all_scaled(judge, wrong, watched_step, factor, others)
    if watched_step is None:
        return _at_owner(first_backward, watched_step, others)
    words = f"all {len(wrong)} gradients are wrong, but {_AT_MODULES}"
    origin = Origin(kind=OriginKind.TRAINING, name=GRADIENT_REDUCTION)
    return ParallelCause(
        first_backward, origin, others.get(_item_key(first_backward)), words, others
    )


def _all_scaled(
    judge: Judge,
    wrong: list[Judged],
    watched_step: WatchedStep | None,
    factor: float,
    others: Explained,
) -> ParallelCause:
    """The cause if every gradient is the same multiple, and right at every module."""
    wrong_item = wrong[0]
    diagnosis = others.get(_item_key(wrong_item))
    if diagnosis is not None and diagnosis.best is not None:
        sentence = f"every gradient is {diagnosis.best.sentence}"
        best = msgspec.structs.replace(diagnosis.best, sentence=sentence)
        diagnosis = Diagnosis(patterns=(best, *diagnosis.patterns[1:]))
    alike = f"all {len(wrong)} gradients have the same factor"
    if watched_step is None:
        words = f"{alike}: the loss is scaled, or every reduction of gradients"
        return ParallelCause(wrong_item, None, diagnosis, words, others)
    parts = judge.program.data_ranks
    if parts > 1 and own_share(watched_step) == 1 and abs(factor * parts - 1) < _SAME_FACTOR:
        # Divided once before backward, and again by an average at its end.
        words = f"{alike}, and are {parts} times too small before they reach any module"
        origin = Origin(kind=OriginKind.TRAINING, name=LOSS_MODULE)
        return ParallelCause(wrong_item, origin, diagnosis, words, others)
    words = f"{alike}, but {_AT_MODULES}"
    origin = Origin(kind=OriginKind.TRAINING, name=GRADIENT_REDUCTION)
    return ParallelCause(wrong_item, origin, diagnosis, words, others)


def _all_are(judge: Judge, wrong: list[Judged]) -> bool:
    """Whether all gradients are wrong, of more than one module."""
    step = judge.reference.steps[wrong[0].step - 1]
    present = [
        name
        for name, piece in step.gradients.items()
        if piece is not None and bool(piece.local.any())
    ]
    owners = {owner_of(wrong_item.item.name, None)[0] for wrong_item in wrong}
    return len(wrong) >= len(present) and len(owners) > 1


def _common_factor(wrong: list[Judged], near: Near) -> float | None:
    """The factor that all of them have in common; None if there is none."""
    factors: list[float] = []
    for wrong_item in wrong:
        item = wrong_item.best
        if item.reference is None or item.ranks.value is None or item.ranks.disagreement:
            return None
        factor = factor_of(item.ranks.value, item.reference, near)
        if factor is None:
            return None
        factors.append(factor)
    spread = max(factors) - min(factors)
    return factors[0] if spread <= 100 * near.reach * abs(factors[0]) else None


def _first_backward(wrong: list[Judged], watched_step: WatchedStep | None) -> Judged:
    """The gradient whose module comes first in backward."""
    if watched_step is None:
        return wrong[-1]
    places = {call.name: position for position, call in enumerate(watched_step.reference.modules)}
    return max(
        wrong,
        key=lambda wrong_item: places.get(owner_of(wrong_item.item.name, watched_step)[0], -1),
    )
