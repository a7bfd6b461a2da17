"""The runs that a check is going to make, what they cost, and how far it has come.

Everything is a multiple of one native run of the reference, which comes first. What other runs cost
is assumed in one place, until a run of the same kind has ended. What a compiler takes is known only
if it has compiled the same candidate before.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from typing import TYPE_CHECKING, Any

from paritas.core.execution.fitting import measure_model
from paritas.core.execution.reachable import reachable_modules
from paritas.core.results.progress import Progress
from paritas.core.torch_private.dynamo import (
    backends_of,
    compile_seconds,
    original_of,
    seconds_to_compile,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from paritas.core.execution.subjects import VerifyConfig


class RunStep(enum.StrEnum):
    """A planned step of a check, as it is announced.

    What is not among them is not planned: perturbed runs are made only while something is
    undecided, and a place is searched only after a failure.
    """

    REFERENCE = "running the reference"
    CANDIDATE = "running the candidate (a compiler works on the first call)"
    ARBITER = "running the reference in float64"
    LIFTED = "running the candidate in float64 (a compiler works on the first call)"
    BLOCKS = "checking blocks"
    AGAIN = "running the reference once more"


# --- What the runs cost ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RunCosts:
    """What other runs of a program cost, in native runs; None if that is not known.

    Attributes:
        lifted: a run in float64.
        perturbed: a run with random rounding errors.
        compilation: compiling the candidate in float64, in native compilations of it.
    """

    lifted: float | None
    perturbed: float | None
    compilation: float | None = None


# Typical values of transformer blocks and convolutions, forward and with gradients, on one thread
# of a CPU with instructions for bfloat16. In float32 a lifted run took 2.1 to 3.8 native runs and a
# perturbed one 5 to 15; in bfloat16 1.5 to 10, and 9 to 24 (65 for the smallest program). Inductor
# took 62 s to compile natively and 5 s in float64, and with gradients 82 s and 12 s: the first time
# it starts up, and in float64 it builds all kernels in one unit.
_CPU_SINGLE = RunCosts(lifted=3.0, perturbed=10.0, compilation=0.15)
_CPU_HALF = RunCosts(lifted=6.0, perturbed=18.0, compilation=0.15)
# A product of matrices in float64 takes an H200 about 12 times as long as one in bfloat16. Whole
# programs, other GPUs and other dtypes were not measured: there, the first run in float64 shows it.
# Inductor compiled a training step of 1.1 billion parameters in 42 s natively, 54 s in float64.
_CUDA_HALF = RunCosts(lifted=12.0, perturbed=None, compilation=1.3)
_NOT_MEASURED = RunCosts(lifted=None, perturbed=None)
_HALF_BYTES = 2


def costs_on(device: torch.device, dtype: torch.dtype | None) -> RunCosts:
    """What is assumed for programs of a dtype on a device."""
    is_half = dtype is not None and dtype.itemsize <= _HALF_BYTES
    if device.type == "cpu":
        return _CPU_HALF if is_half else _CPU_SINGLE
    return _CUDA_HALF if device.type == "cuda" and is_half else _NOT_MEASURED


# --- The plan -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One planned step.

    Attributes:
        step: what is run.
        cost: in native runs of the reference, without compilation; None if that is not known.
        compiles: a compiler may work on it.
        calls: of the program.
        compilation: what compiling costs, in native compilations of the candidate; None if that is
            not known.
    """

    step: RunStep
    cost: float | None
    compiles: bool = False
    calls: int = 1
    compilation: float | None = None


@dataclasses.dataclass(frozen=True)
class PlannedCheck:
    """What decides which runs a check makes.

    Attributes:
        costs: what runs other than native ones cost.
        compares: without it, both sides run and nothing is compared.
        lifts: the candidate runs in float64, too.
        is_narrow: there is a wider precision than that of the program.
        is_compiled: `torch.compile` may work on the candidate.
        repeats: the candidate is called twice in a native run.
        calls: the calls of the reference in each run: two if the first leaves state behind.
    """

    costs: RunCosts
    compares: bool = True
    lifts: bool = True
    is_narrow: bool = True
    is_compiled: bool = False
    repeats: bool = True
    calls: int = 1

    def plan_whole(self) -> tuple[PlannedRun, ...]:
        """The runs of a check of whole models, on one set of inputs."""
        if not self.compares:
            return self._plan_native()
        runs = [*self._plan_native()]
        if self.is_narrow:
            runs.append(PlannedRun(RunStep.ARBITER, self._lifted, calls=self.calls))
        if self.is_narrow and self.lifts:
            compilation = self.costs.compilation
            runs.append(
                PlannedRun(RunStep.LIFTED, self._lifted, self.is_compiled, self.calls, compilation)
            )
        return (*runs, _AGAIN)

    def plan_blocks(self) -> tuple[PlannedRun, ...]:
        """The runs of a check by blocks, on one set of inputs.

        Together the blocks are the model: each is run natively and in float64 on both sides.
        """
        if not self.compares:
            return self._plan_native()
        lifted = self._lifted if self.is_narrow else 0.0
        native = self.calls + self._candidate_calls
        sides = 2 if self.lifts else 1
        cost = None if lifted is None else native + sides * lifted
        blocks = PlannedRun(RunStep.BLOCKS, cost, self.is_compiled)
        return (*self._plan_native(), blocks, _AGAIN)

    @property
    def _candidate_calls(self) -> int:
        return 2 if self.repeats or self.calls > 1 else 1

    @property
    def _lifted(self) -> float | None:
        return None if self.costs.lifted is None else self.calls * self.costs.lifted

    def _plan_native(self) -> tuple[PlannedRun, ...]:
        calls = self._candidate_calls
        return (
            PlannedRun(RunStep.REFERENCE, self.calls, calls=self.calls),
            PlannedRun(RunStep.CANDIDATE, calls, self.is_compiled, calls=calls),
        )


_AGAIN = PlannedRun(RunStep.AGAIN, 1.0)


def plan_runs(
    model: Callable[..., Any], candidate: Callable[..., Any], config: VerifyConfig
) -> PlannedCheck:
    """What is known about a check before anything runs."""
    modules = reachable_modules(model, original_of).values()
    model_size = measure_model(modules, gradients=False)
    return PlannedCheck(
        costs=costs_on(model_size.device, model_size.dtype),
        compares=config.enabled,
        lifts=config.lift,
        is_compiled=bool(backends_of(candidate)),
        repeats=config.verify_second_call,
    )


# --- How far it has come --------------------------------------------------------------------------


def follow_plans(
    on_progress: Callable[[str], None] | None,
    pair: tuple[Callable[..., Any], Callable[..., Any]],
    config: VerifyConfig,
    sets: int,
) -> tuple[Callable[[str], None], Callable[[str], None]]:
    """What announces the steps of a check as a whole, and by blocks.

    Args:
        on_progress: gets the announcements; None for nobody.
        pair: the reference and the candidate.
        config: what is compared.
        sets: the number of sets of inputs.
    """
    if on_progress is None or not all(map(callable, pair)):
        return _tell_nobody, _tell_nobody
    planned, compilation = plan_runs(*pair, config), seconds_to_compile(pair[1])
    whole, by_blocks = (
        PlanFollower(on_progress, runs * sets, compilation=compilation)
        for runs in (planned.plan_whole(), planned.plan_blocks())
    )
    return whole, by_blocks


def _tell_nobody(_: str) -> None:
    pass


class PlanFollower:
    """Announces the steps of a check with their number in the plan and the time that is left.

    The time follows from the native run of the reference, and is corrected by each step that ends.
    """

    def __init__(
        self,
        tell: Callable[[str], None],
        runs: Sequence[PlannedRun],
        *,
        compilation: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        compile_clock: Callable[[], float] = compile_seconds,
    ) -> None:
        """Follow a plan.

        Args:
            tell: gets the announcements.
            runs: the planned runs, in order; what turns out to be unnecessary is left out.
            compilation: the seconds that the candidate took to compile, if it is compiled already.
            clock: the time.
            compile_clock: the time that compilers have taken in this process.
        """
        self._tell = tell
        self._runs = runs
        self._position = -1
        self._is_between = False
        self._compilation = compilation
        self._is_compiled = compilation is not None
        self._clock, self._compile_clock = clock, compile_clock
        self._began = clock(), compile_clock()
        # Step -> its seconds in this check, without compilation.
        self._seconds: dict[RunStep, float] = {}

    def __call__(self, text: str) -> None:
        """Announce the next step, planned or not."""
        step = text if isinstance(text, Progress) else Progress(text)
        if self._is_between or self._position < 0 or step.stage != self._current.step:
            self._end_step()
            self._begin_step(step.stage)
        self._tell(self._add_plan(step) if self._position >= 0 else text)

    @property
    def _current(self) -> PlannedRun:
        return self._runs[self._position]

    def _end_step(self) -> None:
        """Learn from the step that has ended what it takes."""
        now = self._clock(), self._compile_clock()
        compilation = max(0.0, now[1] - self._began[1])  # torch.compiler.reset() resets the clock
        if self._position >= 0 and not self._is_between:
            step = self._current.step
            self._seconds[step] = max(0.0, now[0] - self._began[0] - compilation)
            if step is RunStep.CANDIDATE:
                self._is_compiled = True
                self._compilation = compilation or self._compilation
        self._began = now

    def _begin_step(self, stage: str) -> None:
        following = range(self._position + 1, len(self._runs))
        position = next((at for at in following if self._runs[at].step == stage), None)
        self._is_between = position is None
        self._position = self._position if position is None else position

    def _add_plan(self, step: Progress) -> Progress:
        current = 0.0 if self._is_between else self._estimate(self._current)
        if not self._is_between and self._estimate_compilation(self._current) is None:
            current = None
        later_runs = self._runs[self._position + 1 :]
        later = [self._estimate(run) for run in later_runs]
        return step.with_plan(
            step=self._position + 1,
            steps=len(self._runs),
            is_between=self._is_between,
            seconds=current,
            later=None if None in later else sum(filter(None, later)),
            compiles_later=None in map(self._estimate_compilation, later_runs),
        )

    def _estimate(self, run: PlannedRun) -> float | None:
        """The seconds of a run, with its compilation if that is known."""
        native = self._seconds.get(RunStep.REFERENCE)
        if run.step in self._seconds:
            return self._seconds[run.step]
        if run.step is RunStep.LIFTED and RunStep.ARBITER in self._seconds:
            seconds: float | None = self._seconds[RunStep.ARBITER]
        elif run.cost is None or native is None:
            seconds = None
        else:
            seconds = run.cost * native / (self._runs[0].cost or 1.0)
        compilation = self._estimate_compilation(run)
        return seconds if seconds is None else seconds + (compilation or 0.0)

    def _estimate_compilation(self, run: PlannedRun) -> float | None:
        """The seconds that a compiler will work on a run; None if that is not known."""
        if not run.compiles or run.step in self._seconds:
            return 0.0
        if run.step is RunStep.CANDIDATE:
            return 0.0 if self._is_compiled else None
        if run.compilation is None or self._compilation is None:
            return None
        return run.compilation * self._compilation
