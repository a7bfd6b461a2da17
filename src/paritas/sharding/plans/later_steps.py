"""Later steps: trained in float64 after those that are compared in full, and compared cheaply.

Some faults begin late: at the end of a cycle of micro-batches, or once a wrapper has seen a few
steps. Of the later steps, the loss, gradients, parameters and buffers are compared in float64,
large tensors by their sketches. This passes what is equal and refuses nothing: what is not equal is
left to the full rule, on all steps.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.numerics.criterion import UNIT_F64
from paritas.core.numerics.gates import Near
from paritas.sharding.plans.assembling import find_slots, step_items
from paritas.sharding.plans.judging import ROUNDING_IN_FLOAT64, complete_steps
from paritas.sharding.plans.sketches import Abridger

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.placement.plain_parts import PlainPart
    from paritas.sharding.plans.assembling import StepItem
    from paritas.sharding.plans.plan import ParallelProgram
    from paritas.sharding.plans.traces import Trace


@dataclasses.dataclass(frozen=True)
class LaterSteps:
    """The steps after those that are compared in full.

    Attributes:
        program: with all steps.
        slots: where plain parts of parameters lie.
        how: of these steps, what is kept.
        first: number of the first of them, from 0.
    """

    program: ParallelProgram
    slots: dict[str, dict[int, PlainPart]]
    how: dict[str, Any]
    first: int

    @classmethod
    def after(cls, program: ParallelProgram, native: Trace, ranks: list[Trace]) -> LaterSteps:
        """Those of a program of which the first steps were trained natively."""
        if not program.later:
            return cls(program, {}, {}, program.steps)
        slots = find_slots(program, native.initial, ranks)
        where_by_key = {
            (name, rank): plain_part.where
            for name, plain_parts in slots.items()
            for rank, plain_part in plain_parts.items()
        }
        places = {
            (name, trace.rank): where_by_key.get((name, trace.rank))
            for name in native.initial
            for trace in ranks
        }
        wholes = {name: piece.local for name, piece in native.initial.items()}
        longer = dataclasses.replace(program, steps=program.steps + program.later, later=0)
        how = {"abridge": Abridger(longer, wholes, places), "abridge_from": program.steps + 1}
        return cls(longer, slots, how, program.steps)

    def begin(self, trace: Trace) -> Trace:
        """The trace up to these steps; what fails in them is not an error of those before."""
        if trace.error is None or not self.is_in_them(trace):
            return trace
        return dataclasses.replace(trace, steps=trace.steps[: self.first], error=None)

    def is_in_them(self, trace: Trace) -> bool:
        """Whether a rank had begun one of these steps when its trace ended."""
        return len(trace.steps) > self.first

    def are_near(self, reference: Trace, ranks: list[Trace]) -> bool:
        """Whether the ranks plainly do in these steps what one device does."""
        if complete_steps(reference, ranks) < self.program.steps:
            return False
        near = Near(UNIT_F64)
        return all(
            _is_near(item, near)
            for number in range(self.first, self.program.steps)
            for item in step_items(self.program, reference.steps[number], ranks, number, self.slots)
        )


def _is_near(item: StepItem, near: Callable[..., bool]) -> bool:
    reference, rank_value = item.reference, item.ranks
    apart = rank_value.disagreement
    if apart is not None and apart.relative > ROUNDING_IN_FLOAT64:
        return False
    if reference is None or rank_value.value is None:
        some = reference if rank_value.value is None else rank_value.value
        return not rank_value.fault and (some is None or not bool(torch.count_nonzero(some)))
    return near(rank_value.value, reference)
