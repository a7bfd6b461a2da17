"""The whole model at its edges: natively, large values as sketches, at the noise of its blocks.

By blocks, no run in float64 has the whole model. Both sides train it natively: outputs, losses,
gradients and parameters are compared at the noise that the errors of the blocks become on their way
through the model. Large tensors are kept as their sketches, which add up over shards.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.checks.blocks import ComposedEvidence
from paritas.checks.failures import Explainer
from paritas.execution.block_runs import ComposedNoise, Shaken
from paritas.execution.observation import MOST_KEPT, Observation
from paritas.numerics.bits import is_inexact
from paritas.numerics.sketch import sketch
from paritas.parallel.assembling import find_slots_of_rank, locate, reference_values
from paritas.parallel.judging import Judge
from paritas.parallel.traces import RankPiece, watched_modules
from paritas.placement.assembly import put
from paritas.placement.assembly import whole as all_of
from paritas.results.items import LocalPlacement, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from paritas.execution.block_runs import Parked
    from paritas.numerics.automatic import JudgeEvidence
    from paritas.parallel.assembling import StepItem
    from paritas.parallel.judging import Judged
    from paritas.parallel.plan import ParallelProgram
    from paritas.parallel.traces import ModelNames, Trace
    from paritas.placement.assembly import Where
    from paritas.results.findings import Finding
    from paritas.results.items import Item

# For each step, (block, call) -> path of a result -> the error of the reference there.
Errors = list[dict[tuple[str, int], dict[str, "Parked"]]]


# --- Sketches -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Abridger:
    """Replaces what a rank holds of a large tensor by its part of the sketch.

    Attributes:
        program: the whole model under its plan.
        wholes: parameter or buffer -> its initial value on one device.
    """

    program: ParallelProgram
    wholes: Mapping[str, Tensor]
    _slots: dict[tuple[str, int], Where | None] = dataclasses.field(default_factory=dict)

    def __call__(self, name: str, rank: int, piece: RankPiece) -> RankPiece:
        """The piece itself if it is small."""
        whole = self.wholes.get(name)
        if whole is None or whole.numel() <= MOST_KEPT or not is_inexact(piece.local):
            return piece
        shape, place = tuple(whole.shape), piece.placement
        if place is None and piece.whole_shape == shape:
            where = tuple(map(all_of, shape))
            return RankPiece(_sums_of_part(piece.local, where, shape))
        if place is None:
            return self._part_by_hand(name, rank, piece, whole)
        if place.global_shape != shape or not place.coordinate:
            return piece
        sums = _sums_of_part(piece.local, locate(rank, piece), shape)
        roles = zip(place.placements, place.roles, strict=True)
        # The sketches of shards are terms of the sketch of the whole.
        words = tuple(_TERM if isinstance(role, Shard) else word for word, role in roles)
        moved = msgspec.structs.replace(
            place, placements=words, global_shape=tuple(sums.shape), global_offset=(0,)
        )
        return RankPiece(sums, moved)

    def _part_by_hand(self, name: str, rank: int, piece: RankPiece, whole: Tensor) -> RankPiece:
        """The sketch of a plain shard, whose place the initial values show."""
        if (name, rank) not in self._slots:
            slots = find_slots_of_rank(self.program, rank, whole, piece.local)
            self._slots[name, rank] = None if slots is None else slots.where
        where = self._slots[name, rank]
        if where is None:
            return piece
        sums = _sums_of_part(piece.local, where, tuple(whole.shape))
        # Ranks that hold the same part are at the same place of a mesh of parts.
        part = sum(segment.target for segments in where for segment in segments)
        term = LocalPlacement(
            mesh=(part + 1,),
            coordinate=(part,),
            placements=(_TERM,),
            global_shape=tuple(sums.shape),
            global_offset=(0,),
        )
        return RankPiece(sums, term)


_TERM = "partial(sum)"


def _sums_of_part(local: Tensor, where: Where, shape: tuple[int, ...]) -> Tensor:
    """A part's share of the sketch of the whole; NaN if it has values that are not finite.

    In float64: rounded to float32, the terms of a small sum would have larger errors than the sum.
    """
    local = local.double()
    if all(len(segments) == 1 for segments in where):
        offset = [segments[0].target for segments in where]
        sums = sketch(local, global_shape=shape, global_offset=offset)
    else:
        padded = torch.zeros(shape, dtype=local.dtype)
        put(padded, where, local)
        sums = sketch(padded)
    return sums if bool(torch.isfinite(local).all()) else torch.full_like(sums, torch.nan)


# --- The judge ------------------------------------------------------------------------------------


class EdgeJudge(Judge):
    """Judges the whole model natively, at the noise of its blocks."""

    def __init__(
        self,
        program: ParallelProgram,
        reference: Trace,
        ranks: list[Trace],
        run: Callable[..., Trace],
        shaking: Shaking,
        tell: Callable[[str], None],
    ) -> None:
        """`run` is `run_reference`; `shaking` moves the values between blocks."""
        super().__init__(program, reference, ranks, None, run)
        base = _observed(reference)

        def shaken(seed: int) -> Observation:
            trace = run(
                program,
                record=dataclasses.replace(shaking, seed=seed),
                abridge=shaking.abridge,
            )
            failed = None if trace.error is None else RuntimeError(trace.error)
            return dataclasses.replace(_observed(trace), error=failed)

        self.noise = ComposedNoise(shaken, base, program.seed, tell)
        self._wholes = shaking.abridge.wholes

    def judge(self) -> list[Judged]:
        """Judge everything but the initial values, which each piece compares."""
        return [one for one in super().judge() if one.step]

    def _evidence(self, item: StepItem, lifted: StepItem | None, number: int) -> JudgeEvidence:
        shown = msgspec.structs.replace(item.item, step=number + 1)
        return ComposedEvidence(self.noise, shown, item.reference, self.runs.unit)

    def _values(self, item: StepItem, lifted: StepItem | None, number: int) -> list[Finding]:
        whole = self._wholes.get(item.name)
        some = item.reference if item.reference is not None else item.ranks.value
        is_sketch = whole is not None and some is not None and some.shape != whole.shape
        if not is_sketch or whole is None:
            return super()._values(item, lifted, number)
        # A sketch has no rows and columns in which a pattern could be seen.
        explainer, self._explainer = self._explainer, Explainer(left=0)
        findings = super()._values(item, lifted, number)
        self._explainer = explainer
        return [_about_sketch(finding, whole) for finding in findings]


def _about_sketch(finding: Finding, whole: Tensor) -> Finding:
    reason = finding.reason
    if not finding.status.passes():
        reason = f"{reason} (its sketch was compared)"
    dtype = str(whole.dtype).removeprefix("torch.")
    return msgspec.structs.replace(
        finding, shape=tuple(whole.shape), dtype=dtype, reason=reason, metrics=None
    )


def _observed(trace: Trace) -> Observation:
    """All steps as one observation."""
    outputs: dict[Item, Any] = {
        msgspec.structs.replace(item, step=number): value
        for number, step in enumerate(trace.steps, start=1)
        for item, value in reference_values(step).items()
    }
    return Observation(outputs=outputs)


@dataclasses.dataclass(frozen=True)
class Shaking:
    """Moves what blocks get and return, in each step of a training.

    Attributes:
        blocks: their names.
        errors: the errors of their results.
        abridge: what is kept of large values.
        seed: of the signs.
    """

    blocks: tuple[str, ...]
    errors: Errors
    abridge: Abridger
    seed: int = 0

    def __call__(self, names: ModelNames, trace: Trace) -> Shaken:
        """The context around the forward pass of the current step."""
        known = watched_modules(names)
        blocks = {name: known[name][0] for name in self.blocks if name in known}
        step = len(trace.steps) - 1
        errors = self.errors[step] if step < len(self.errors) else {}
        return Shaken(blocks, errors, self.seed + 7919 * step)
