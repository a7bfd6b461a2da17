"""The kernel judge: does a kernel that may cheat compute what its reference computes?

This file holds how a kernel is judged: limits, and what the task promises. It imports no torch.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import TYPE_CHECKING

from paritas.core.errors import UsageError
from paritas.kernels.rows import CaseFamily

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_CASES = 40
_GIB = 1 << 30
PROMISES = {
    "shapes": CaseFamily.SIZES,
    "layouts": CaseFamily.LAYOUTS,
    "dtypes": CaseFamily.DTYPES,
    "weights": CaseFamily.WEIGHTS,
    "finite": CaseFamily.NONFINITE,
    "aliases": CaseFamily.ALIASES,
    "arguments": CaseFamily.ARGUMENTS,
    "callers": CaseFamily.CALLERS,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """How a kernel is judged.

    Attributes:
        cases: how many cases are made.
        families: make cases of these families only; None for all.
        seconds: the time limit of one judgement; that of the first includes making the cases. What
            is not judged by then is named in the report.
        call_seconds: the time limit of one call of the candidate.
        seed: of everything that is drawn.
        device: where both sides run.
        fixed: what the task promises not to change: names of `PROMISES`.
        forbid: operators that the candidate must not call.
        gradients: compare gradients of inputs and parameters too.
        compiled: call it from compiled code, too; importing torch's compiler takes seconds.
        memory: how many bytes the candidate may allocate; 0 for no limit.
        fresh_outputs: a result in memory that a later call uses again is a failure, not a limit.
        strict: count unstable findings as failures.
        stop_early: end at the first case that fails.
        rate_task: plant faults in the reference, and count those that the given inputs show.
        timing: after the verdict, time both sides: `warm` or `cold` caches; empty for no timing.
        script: where to write a script that shows the smallest failing case.
        preload: modules that are imported once for all candidates, before any of them runs.
    """

    cases: int = DEFAULT_CASES
    families: frozenset[CaseFamily] | None = None
    seconds: float = 120.0
    call_seconds: float = 20.0
    seed: int = 0
    device: str = "cpu"
    fixed: frozenset[str] = frozenset()
    forbid: tuple[str, ...] = ()
    gradients: bool = False
    compiled: bool = False
    memory: int = 8 * _GIB
    fresh_outputs: bool = False
    strict: bool = False
    stop_early: bool = False
    rate_task: bool = False
    timing: str = ""
    script: Path | None = None
    preload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = sorted(self.fixed - PROMISES.keys())
        if unknown:
            raise UsageError(f"fixed={unknown[0]!r}: known are {', '.join(PROMISES)}")
        for name in self.preload:
            if importlib.util.find_spec(name) is None:
                raise UsageError(f"preload={name!r}: there is no such module")
        if self.cases < 1:
            raise UsageError(f"the number of cases must be 1 or more, got {self.cases}")

    @property
    def promised(self) -> set[CaseFamily]:
        """The families of cases of which the task promises that they do not occur."""
        return {PROMISES[name] for name in self.fixed}
