"""The whole model at its edges: natively, large values as sketches, at the noise of its blocks.

By blocks, no run in float64 has the whole model. Both sides train it natively: outputs, losses,
gradients and parameters are compared at the noise that the errors of the blocks become on their
way through the model. Large tensors are kept as their sketches, which add up over shards.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

from paritas.core.execution.block_noise import ComposedEvidence, ComposedNoise, Shaken
from paritas.core.execution.observation import Observation
from paritas.sharding.plans.assembling import reference_values
from paritas.sharding.plans.judging import Judge
from paritas.sharding.plans.traces import watched_modules

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.execution.block_runs import Parked
    from paritas.core.numerics.judge_evidence import JudgeEvidence
    from paritas.core.results.items import Item
    from paritas.sharding.plans.assembling import StepItem
    from paritas.sharding.plans.judging import Judged
    from paritas.sharding.plans.plan import ParallelProgram
    from paritas.sharding.plans.sketches import Abridger
    from paritas.sharding.plans.traces import ModelNames, Trace


# For each step, (block, call) -> path of a result -> the error of the reference there.
Errors = list[dict[tuple[str, int], dict[str, "Parked"]]]


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
        base = _merge_steps(reference)

        def shaken(seed: int) -> Observation:
            trace = run(
                program,
                record=dataclasses.replace(shaking, seed=seed),
                abridge=shaking.abridge,
            )
            failed = None if trace.error is None else RuntimeError(trace.error)
            return dataclasses.replace(_merge_steps(trace), error=failed)

        self.noise = ComposedNoise(shaken, base, program.seed, tell, {})
        self._wholes = shaking.abridge.wholes

    def judge(self) -> list[Judged]:
        """Judge everything but the initial values, which each piece compares."""
        return [judged_item for judged_item in super().judge() if judged_item.step]

    def _evidence(self, item: StepItem, lifted: StepItem | None, number: int) -> JudgeEvidence:
        shown = msgspec.structs.replace(item.item, step=number + 1)
        return ComposedEvidence(self.noise, shown, item.reference, self.runs.unit)


def _merge_steps(trace: Trace) -> Observation:
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
        modules_by_name = watched_modules(names)
        blocks = {name: modules_by_name[name][0] for name in self.blocks if name in modules_by_name}
        step = len(trace.steps) - 1
        errors = self.errors[step] if step < len(self.errors) else {}
        return Shaken(blocks, errors, self.seed + 7919 * step)
