"""What is wrong, put so that it can be explained: an item of a step, or what a module gave."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paritas.numerics.diagnoses import Diagnosis, Pattern
from paritas.partition.plans.assembling import assemble, is_partial
from paritas.partition.plans.items import BUFFER, GRADIENT, LOSS, PARAMETER
from paritas.partition.plans.layouts import natural_chunk
from paritas.partition.plans.relating import mean_of

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.partition.plans.judging import Judge, Judged
    from paritas.partition.plans.locating import Location
    from paritas.partition.plans.program import Program

__all__ = ["Case", "case_of_item", "case_of_module", "swapped_shards"]


@dataclasses.dataclass(frozen=True)
class Case:
    """Something that is wrong.

    Attributes:
        what: `loss`, `output`, `gradient`, `parameter`, `buffer`, `initial` or `module`.
        expected: what the ranks should hold together.
        value: what they do hold together; None if that cannot be said.
        held: rank -> its own.
        everywhere: rank -> its own, of all ranks, and `wholes` rank -> what it should hold, where
            ranks have different samples.
        terms: name -> parameter of one dim that may have been added too often.
        beside: in words -> what may have been added after the fault: a bias of the module, or what
            goes past it; the likeliest last.
        earlier: in words -> what the reference had before.
        parts: rank -> term of the sum that should have been taken.
    """

    program: Program
    what: str
    expected: Tensor
    value: Tensor | None
    held: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    everywhere: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    wholes: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    terms: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    beside: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    earlier: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    parts: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """How many ranks there are, in words -> number, the likeliest first."""
        mesh = self.program.mesh
        along = {f"ranks along {axis}": size for axis, size in mesh.items() if size > 1}
        world = self.program.ranks
        return {"ranks": world} if len(mesh) == 1 else {**along, "ranks": world}


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
    return Case(
        judge.program,
        item.kind,
        item.reference,
        value,
        # Ranks with other samples have another loss: that says nothing.
        held={} if item.kind == LOSS else item.ranks.by_rank,
        earlier=earlier,
    )


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
    elif related.pieces[first].placements is not None:
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
    parts = {} if location.backward else location.parts
    biases = {} if location.backward else {n: t for n, t in own.items() if n in terms}
    return Case(
        program,
        GRADIENT if location.module == LOSS else "module",
        expected,
        value,
        held=held,
        everywhere=related.held,
        wholes=related.expected,
        terms=terms,
        beside={**location.passing, **biases},
        parts=parts,
    )


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
    pattern = Pattern(
        kind="wrong rank's shard", confidence=0.9, sentence=sentence, evidence=evidence
    )
    return Diagnosis(patterns=(pattern,)), tuple(moved[name])
