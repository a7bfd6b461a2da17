"""Cases for the diagnosis: what the ranks hold of an item or at a module, and should hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.case import Case, Context
from paritas.core.diagnosis.diagnose import ACROSS_RANKS, rank_patterns
from paritas.core.diagnosis.patterns.ranks import Prediction, claim
from paritas.core.diagnosis.stating import with_confidence
from paritas.core.placement.assembly import length, take
from paritas.core.placement.rank_pieces import assemble, is_partial
from paritas.core.results.findings import Diagnosis, PatternKind
from paritas.core.results.items import ItemKind
from paritas.sharding.plans.assembling import natural_chunk
from paritas.sharding.plans.locating import LOSS_MODULE, Location
from paritas.sharding.plans.relating import mean_of

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.sharding.plans.assembling import StepItem
    from paritas.sharding.plans.judging import Judge, Judged

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
