"""Many wrong programs against one right one, judged as `verify` judges each.

What is known of the reference (its arbiter, its perturbed runs) is measured once and shared, which
is most of the work. A candidate is then run natively, and in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from paritas.checking.comparing import Comparer
from paritas.checking.config import VerifyConfig
from paritas.checking.observing import running
from paritas.checking.runs import Runs
from paritas.checking.subjects import subject
from paritas.recording.isolation import RandomState

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule

    from paritas.checking.observing import Observation
    from paritas.checking.subjects import Subject
    from paritas.mutants.effects import ProgramNoise
    from paritas.numerics.findings import Verdict

__all__ = ["judge_mutant"]


def judge_mutant(mutant: GraphModule, noise: ProgramNoise, *, lift: bool = True) -> Verdict:
    """The verdict of `verify` on a changed copy of the program that `noise` was measured of.

    Without a second call and without diagnoses; gradients are results of the program.

    Args:
        mutant: the changed copy.
        noise: of the program, from `program_noise`; what is measured on the way is kept in it.
        lift: whether to compare in float64 as well, or by the native run alone.
    """
    known = noise.runs
    candidate = subject(mutant, "candidate", "mutant")
    config = VerifyConfig(
        raise_on_mismatch=False, verify_gradients=False, verify_second_call=False, lift=lift
    )
    before = RandomState.now()
    try:
        with running(candidate, known.rng, known.conditions) as call:
            seen = call(known.inputs)
        runs = _SharedRuns(known, candidate, lift=lift)
        comparer = Comparer(runs, config, 0, "")
        comparer.explainer.left = 0  # whether it is wrong is asked, not what kind of wrong
        verdict = comparer.compare(noise.native, seen).verdict(strict=False)
        notes = tuple(dict.fromkeys((*verdict.notes, *known.notes, *runs.notes)))
        return msgspec.structs.replace(verdict, notes=notes)
    finally:
        before.restore()


class _SharedRuns(Runs):
    """The runs of one candidate, with what others have already learnt of the reference."""

    def __init__(self, shared: Runs, candidate: Subject, *, lift: bool) -> None:
        super().__init__(
            shared.reference,
            candidate,
            shared.inputs,
            shared.rng,
            shared.conditions,
            shared.native,
            lift=lift,
        )
        self.dtypes = shared.dtypes
        self._shared = shared

    def arbiter(self) -> list[Observation] | None:
        return self._shared.arbiter()

    def spread(self, unit: float, call: int, path: str, runs: int) -> Tensor | None:
        return self._shared.spread(unit, call, path, runs)

    def decided(self, unit: float) -> list[list[Observation]]:
        return self._shared.decided(unit)
