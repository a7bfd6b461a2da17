"""What is wrong on the ranks, as cases for the diagnosis of collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.case import Case, Context
from paritas.diagnosis.patterns.ranks import explain_by_equations, state_equation
from paritas.parallel.assembling import (
    BUFFER,
    GRADIENT,
    LOSS,
    PARAMETER,
    assemble,
    is_partial,
    natural_chunk,
)
from paritas.parallel.relating import mean_of
from paritas.results.findings import Diagnosis, PatternKind

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.parallel.causes import Location
    from paritas.parallel.verify import Judge, Judged

# What ranks hold together, where that cannot be said.
_NOTHING = torch.empty(0)


def explain(case: Case) -> Diagnosis | None:
    """Which collective is missing, doubled or mis-scaled; None if the numbers do not show it."""
    found = explain_by_equations(case)
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
    sentence = (
        f"rank {rank} holds part {slots.chunk} of {name} along dim {slots.dim}, where its place is "
        f"part {slots.natural}: the shard of another rank"
    )
    evidence: dict[str, float | str] = {"parameter": name, "dim": float(slots.dim or 0)}
    pattern = state_equation(PatternKind.WRONG_RANKS_SHARD, sentence, evidence)
    return Diagnosis(patterns=(pattern,)), tuple(moved[name])
