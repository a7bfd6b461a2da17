"""The two sides of a check: the reference as a program, and the candidate's lifted run.

The arbiter and the perturbed runs are evidence about the reference; the lifted run is the candidate
in float64. Each run is made on first use.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.errors import in_one_line
from paritas.core.execution.evidence import (
    Notes,
    WideDefault,
    complete_item,
    is_usable,
    run_quietly,
)
from paritas.core.execution.held_values import MISSING
from paritas.core.execution.observation import (
    Observation,
    RunConditions,
    RunOptions,
    input_contents,
    input_tensors,
    named_like,
    same_value,
)
from paritas.core.execution.program import Program, count_dtypes
from paritas.core.execution.responses import (
    computes_in_float64,
    nudge_inputs,
    responds_smoothly,
)
from paritas.core.execution.run_plan import RunStep
from paritas.core.execution.running import running_subject
from paritas.core.execution.subjects import ForeignProgram
from paritas.core.numerics import criterion
from paritas.core.numerics.automatic import FEW_PAIRS, FEW_RUNS, MOST_PAIRS
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.criterion import UNIT_F32, UNIT_F64, unit_roundoff
from paritas.core.numerics.flattening import as_plain, flatten_value, is_dense
from paritas.core.numerics.gates import own_error_score
from paritas.core.precision.lifting import DtypeLog, LiftMode, is_rounding
from paritas.core.precision.widening import lifted_backend
from paritas.core.torch_private.compile_time import quick_compiles
from paritas.core.torch_private.dynamo import (
    CountingBackend,
    count_graph_breaks,
    original_of,
    room_for_entries,
    run_as_it_is,
)
from paritas.core.torch_private.global_state import quietly, taking_stance
from paritas.core.torch_private.kernels import true_sums_of_attention
from paritas.core.torch_private.operators import WIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from paritas.core.execution.evidence import Demand, Evidence
    from paritas.core.execution.saved_state import RandomState
    from paritas.core.execution.subjects import Inputs, Subject
    from paritas.core.results.items import Item

_LONGEST_REASON = 200
# Far more than float64 rounds in any program, far less than one float32 cast does.
_FLOAT64_ROUNDS = 2.0**-40
# Of a value and of the typical value: more than most programs in float32 are off, and less than
# anyone would notice.
_NEAR_ARBITER = 2.0**-16


@dataclasses.dataclass(frozen=True, eq=False)
class SubjectProgram(Program):
    """One side on one set of inputs.

    Attributes:
        subject: the side.
        inputs: its inputs.
        rng: the state of the generators before every run.
        conditions: the conditions of every run.
        calls: number of calls in a run; state carries over from call to call.
    """

    subject: Subject
    inputs: Inputs
    rng: RandomState
    conditions: RunConditions
    calls: int = 1

    def dtypes(self, native: list[Observation]) -> dict[torch.dtype, int]:
        """Count the elements of each dtype in the program's state, inputs and outputs."""
        tensors = [*self.subject.state.saved.values()]
        tensors += [tensor for _, tensor in input_tensors(self.inputs)]
        tensors += native[0].outputs.values()
        inexact_tensors = [
            tensor
            for tensor in tensors
            if is_inexact(tensor) and (tensor.dtype in WIDE or _is_float64(tensor))
        ]
        return count_dtypes(inexact_tensors, torch.Tensor.numel)

    def run(self, options: RunOptions) -> list[Observation]:
        """Call it once more, or twice."""
        conditions = dataclasses.replace(
            self.conditions,
            options=options,
            second=self.conditions.second and options.second,
            gradients=self.conditions.gradients and not options.forward_once,
        )
        observations = self._observe(conditions)
        if conditions.also and any(
            observation.error or observation.gradient_error for observation in observations
        ):
            # Repeat it without the further gradients, to keep those of the caller's own call.
            if options.mode is not None:
                options.mode.start_over()
            conditions = dataclasses.replace(conditions, also=frozenset(), second=False)
            observations = self._observe(conditions)
        return observations

    def _observe(self, conditions: RunConditions) -> list[Observation]:
        calls = 1 if conditions.options.forward_once else self.calls
        seed = conditions.options.other_draws
        rng = self.rng.elsewhere(seed) if seed else self.rng
        with running_subject(self.subject, rng, conditions) as call:
            return [call(self.inputs) for _ in range(calls)]

    def initial(self, item: Item) -> Any:
        """The value of an input or state before the call, or `MISSING`."""
        name = item.name
        if not item.kind.is_state:
            return as_plain(_find_part(input_contents(self.inputs, copy_tensors=False), name))
        value = self.subject.state.initial(name)
        value = _find_part(self.subject.state.saved, name) if value is MISSING else value
        return value if value is MISSING else as_plain(value)


def _find_part(values_by_name: Mapping[str, Any], name: str) -> Any:
    """The value of that name, or the part of that name of a tensor that is not dense."""
    if name in values_by_name:
        return values_by_name[name]
    for whole_name, value in values_by_name.items():
        is_whole = isinstance(value, torch.Tensor) and name.startswith(whole_name)
        if is_whole and not is_dense(value):
            return flatten_value(value.detach(), whole_name).leaves.get(name, MISSING)
    return MISSING


def _is_float64(tensor: Tensor) -> bool:
    return tensor.dtype in {torch.float64, torch.complex128}


# --- The candidate in float64 ---------------------------------------------------------------------


class SubjectLift:
    """The lifted run of a candidate, and further questions about the two sides.

    Attributes:
        evidence: evidence about the reference.
        program: the candidate, run like the reference.
        unit: unit roundoff at which the lifted run is judged.
        by_order: the candidate's outputs get the names of the reference's, in order.
        notes: why there is no lifted run, for the verdict.
        repetition: whether the reference repeats its results.
    """

    def __init__(
        self,
        evidence: Evidence[SubjectProgram],
        candidate: Subject,
        *,
        lift: bool = True,
        by_order: bool = False,
        notes: Notes | None = None,
    ) -> None:
        """Without `lift` there is no lifted run."""
        self.evidence = evidence
        self.program = dataclasses.replace(evidence.program, subject=candidate)
        self.unit = UNIT_F64
        self.lift = lift
        self.by_order = by_order
        self.notes = Notes() if notes is None else notes
        self.repetition = Repetition(evidence)
        self._is_asked = False
        self._leaks: tuple[str, ...] = ()
        self._runs: list[Observation] | None = None
        self._graphs: int | None = None
        self._inside: float | None = None

    @property
    def reference(self) -> Subject:
        """The reference."""
        return self.evidence.program.subject

    @property
    def candidate(self) -> Subject:
        """The candidate."""
        return self.program.subject

    def complete(self, observation: Observation, item: Item) -> Any:
        """An item of a run of the candidate; unchanged items have their initial value."""
        return complete_item(observation, item, self.program)

    def initial(self, item: Item) -> Any:
        """A value before the call: the reference's, or else the candidate's."""
        value = self.evidence.program.initial(item)
        return self.program.initial(item) if value is MISSING else value

    def runs(self) -> list[Observation] | None:
        """The candidate in float64, call by call, or None if that is not possible."""
        if not self._is_asked:
            self._is_asked = True
            if self.evidence.arbiter() is None:
                return None
            reason = self._no_lift()
            if reason:
                self.notes.add_weaker(f"only the native run was made: {reason}")
                return None
            lifted_runs = self._lift_candidate()
            what = "only the native run was made: the candidate in float64"
            if lifted_runs is not None and is_usable(lifted_runs, what, self.notes):
                self._runs = self.rename_outputs(lifted_runs)
                if self._leaks:
                    reason = "; ".join(self._leaks)
                    self.notes.add_weaker(f"the lifted run is judged at float32 noise: {reason}")
        return self._runs

    def rename_outputs(self, observations: list[Observation]) -> list[Observation]:
        """Rename the candidate's outputs for the comparison, call by call."""
        if not self.by_order:
            return observations
        native = self.evidence.native
        last = len(native) - 1
        return [
            named_like(observation, native[min(call, last)])
            for call, observation in enumerate(observations)
        ]

    def coarsest(self) -> float | None:
        """Unit roundoff of the coarsest dtype inside the reference; None if it is not lifted.

        Inputs, state and results do not show what autocast does in between. The arbiter does;
        without one, a verdict about equal bits is worth one more forward run.
        """
        evidence = self.evidence
        if self._no_lift():
            return None
        if evidence.shows_dtypes:
            return evidence.unit
        if self._inside is None:
            log = DtypeLog()
            # Under a dispatch mode, compiled code would be compiled again.
            looks = evidence.unit <= UNIT_F32 and not self.reference.is_compiled
            if looks and evidence.native[0].error is None:
                evidence.run(RunOptions(watch=log, forward_once=True))
            inside = [unit_roundoff(dtype) for dtype in log.calls.values()]
            self._inside = max([evidence.unit, *inside])
        return self._inside

    def _no_lift(self) -> str | None:
        if not self.lift:
            return "the lifted run is switched off (lift=False)"
        if len(self.candidate.backends) > 1:
            return "the candidate is compiled by several backends"
        on_device = self.candidate.is_compiled and torch.cuda.is_available()
        if on_device and self.evidence.depends_on_draws():
            return "random numbers drawn on the device depend on the dtype"
        return None

    @quietly()
    def _lift_candidate(self) -> list[Observation] | None:
        evidence = self.evidence
        evidence.tell(RunStep.LIFTED)
        used = frozenset(evidence.dtypes)
        if self.candidate.is_compiled:
            family = self.candidate.family
            family = self.candidate.call if family is None else family
            backend = lifted_backend(family, self.candidate.backends[0], evidence.dtype, used)
            before = count_graph_breaks()
            with (
                room_for_entries(),
                taking_stance("default", backend=backend),
                quick_compiles(),
                true_sums_of_attention(),
            ):
                wide = self._run_wide()
            backend.breaks |= count_graph_breaks() > before
            self._graphs = backend.graphs or None  # native code may compile even if wide code fails
            if backend.graphs == 0:
                self.notes.add_weaker(
                    "only the native run was made: nothing was compiled in float64"
                )
                return None
            leaks = set(backend.leaks)
            if not self.candidate.is_wholly_compiled:
                leaks.add("eager code around the compiled code may compute in float32")
            elif backend.breaks and not leaks and self._rounds_between_graphs(used):
                leaks.add("eager code between the compiled graphs computes in float32")
        elif isinstance(self.candidate.call, ForeignProgram):
            return self._lift_foreign(self.candidate.call)
        elif self.candidate.is_foreign:
            leaks = set()
            wide = self._run_wide()
        else:
            mode = evidence.lift_mode(lifts=functools.partial(is_rounding, used=used))
            wide = self._run_wide(mode)
            leaks = {f"{name} may compute in any precision inside" for name in mode.foreign}
            if mode.unwritten.is_read and not leaks:
                leaks |= self._unseen_leaks(wide)
        if leaks or not self.candidate.is_faithful:
            self._judge_at_float32(leaks or {"the candidate may compute in float32 inside"})
        return wide

    def _unseen_leaks(self, observations: list[Observation]) -> set[str]:
        """Why the candidate's run in float64 may not be one, with kernels that torch does not see.

        Without inputs that are numbers, nothing shows it.
        """
        is_wide = self._computes_in_float64(observations)
        verb = "may compute" if is_wide is None else "computes"
        return set() if is_wide else {f"a kernel that torch does not see {verb} in float32 inside"}

    def _computes_in_float64(self, observations: list[Observation]) -> bool | None:
        """Whether the candidate's run in float64 is one: see `responses`."""
        arbiter = self.evidence.arbiter()
        if arbiter is None:
            return None
        reference = self.evidence.program
        before, after, right = (
            self._observe_nudged_inputs(program, direction)
            for program, direction in ((self.program, -1), (self.program, 1), (reference, 1))
        )
        return computes_in_float64(
            responds_smoothly(
                before.value(item),
                value,
                after.value(item),
                (right.value(item), arbiter[0].value(item)),
            )
            for item, value in observations[0].items()
        )

    def _observe_nudged_inputs(self, program: SubjectProgram, direction: int) -> Observation:
        inputs = nudge_inputs(program.inputs, self.evidence.seed, direction)
        options = RunOptions(wide=True, mode=self.evidence.lift_mode())
        return run_quietly(dataclasses.replace(program, inputs=inputs), options, WideDefault())[0]

    def _rounds_between_graphs(self, used: frozenset[torch.dtype]) -> bool:
        """Whether a cast that no graph contains still rounds in the lifted run.

        The backend gets graphs and widens their casts. Code at a graph break runs as it is, with
        its casts. With its graphs run by torch itself, the program is the reference; where that
        is off by more than float64 rounds, such a cast is why.
        """
        evidence = self.evidence
        arbiter = evidence.arbiter()
        if not evidence.casts or arbiter is None:
            return False
        family = self.candidate.call if self.candidate.family is None else self.candidate.family
        backend = lifted_backend(family, run_as_it_is, evidence.dtype, used)
        with room_for_entries(), taking_stance("default", backend=backend):
            (observation,) = run_quietly(
                self.program, RunOptions(wide=True, forward_once=True), WideDefault()
            )[:1]
        for item, true in arbiter[0].outputs.items():
            value: Any = observation.outputs.get(item)
            if is_inexact(true) and is_inexact(value) and value.shape == true.shape:
                difference = criterion.rms_difference(value, true)
                if difference > _FLOAT64_ROUNDS * criterion.rms(true):
                    return True
        return False

    def _lift_foreign(self, program: ForeignProgram) -> list[Observation] | None:
        if program.lift is None:
            self.notes.add_weaker(
                f"only the native run was made: {program.name} has no float64 form"
            )
            return None
        try:
            lifted = program.lift(frozenset(self.evidence.dtypes))
        except Exception as error:  # noqa: BLE001  (a note reports it)
            text = in_one_line(error, _LONGEST_REASON, whole=True)
            self.notes.add_weaker(
                f"only the native run was made: {program.name} cannot run in float64: {text}"
            )
            return None
        if lifted.leaks:
            self._judge_at_float32(lifted.leaks)
        return self._run_wide(call=lifted.call)

    def _judge_at_float32(self, leaks: Iterable[str]) -> None:
        """Judge the lifted run so; a note says it once that run has succeeded."""
        self.unit = UNIT_F32
        self._leaks = tuple(sorted(leaks))

    def _run_wide(
        self, mode: LiftMode | None = None, call: Callable[..., Any] | None = None
    ) -> list[Observation]:
        """Run the candidate, or `call` in its place, on inputs and state in float64."""
        program = self.program
        if call is not None:
            subject = dataclasses.replace(self.candidate, call=call)
            program = dataclasses.replace(program, subject=subject)
        return run_quietly(program, RunOptions(wide=True, mode=mode), WideDefault())

    @quietly()
    def ran_uncompiled(self) -> bool:
        """Whether a compiled candidate ran eagerly: Dynamo skips some code silently.

        A program without any operator has nothing to compile and does not count.
        """
        if not self.candidate.is_compiled:
            return False
        if self._graphs is None:
            backend = _counting_backend(self.candidate)
            with room_for_entries(), taking_stance("default", backend=backend):
                self.program.run(RunOptions(forward_once=True))
            self._graphs = backend.graphs
        return self._graphs == 0 and bool(self.evidence.dtype_log())


# A candidate is captured once for all its verifications, and so are programs of one family that run
# the same code.
_COUNTING: weakref.WeakKeyDictionary[Any, dict[Any, CountingBackend]] = weakref.WeakKeyDictionary()


def _counting_backend(candidate: Subject) -> CountingBackend:
    family = candidate.call if candidate.family is None else candidate.family
    original = original_of(candidate.call)
    code = getattr(original, "__code__", type(original))
    return _COUNTING.setdefault(family, {}).setdefault(code, CountingBackend())


# --- The reference once more ----------------------------------------------------------------------


class Repetition:
    """Whether a reference repeats its results."""

    def __init__(self, evidence: Evidence[SubjectProgram]) -> None:
        """Runs are made on first use."""
        self.evidence = evidence
        self._native: list[Observation] | None = None
        self._arbiter: list[Observation] | None = None

    def is_repeated(self, item: Item, call: int) -> bool:
        """Whether another native run of the reference gives the same bits for an item."""
        if self._native is None:
            self._native = self.evidence.run(RunOptions())
        first, again = (
            self.evidence.complete(observations[call], item)
            for observations in (self.evidence.native, self._native)
        )
        return same_value(first, again)

    def is_shown_by_arbiter(self, first: Observation) -> bool:
        """Whether the arbiter, which ran after both sides, shows that nothing has changed.

        If every value is as near to the first run as a good run in float32 is, a change since
        then is below what could matter. Perturbed runs come later, and measure such a change too.
        """
        evidence = self.evidence
        if evidence.has_perturbed or not evidence.has_arbiter:
            return False
        arbiter = evidence.arbiter()
        if arbiter is None or first.error is not None or first.gradient_error is not None:
            return False
        return all(
            _is_near(value, evidence.complete(arbiter[0], item)) for item, value in first.items()
        )

    def is_as_accurate(self, item: Item, first: Observation, last: Observation) -> bool:
        """Whether a later native run is as near to the arbiter as the first one, in every respect.

        This costs no further native run. Atomic additions give other bits in every run.
        """
        evidence = self.evidence
        values = evidence.complete(first, item), evidence.complete(last, item)
        if same_value(*values):
            return True
        arbiter = evidence.arbiter()
        wide: Any = None if arbiter is None else evidence.complete(arbiter[0], item)
        if not (is_inexact(values[0]) and is_inexact(values[1]) and is_inexact(wide)):
            return False
        if not values[0].shape == values[1].shape == wide.shape:
            return False
        if not self._arbiter_is_the_same(item, values[0]):
            return False
        return own_error_score(values[1], values[0], wide).passed

    def agrees(self, item: Item, first: Observation, last: Observation, demand: Demand) -> bool:
        """Whether two native runs of the reference differ in an item only by rounding.

        The reference's own error is not used here: if something changed the reference between the
        runs, the error contains that change. Two runs in float64 must agree far better than the
        reference rounds; then the spread of the perturbed runs measures rounding.
        """
        evidence = self.evidence
        values = evidence.complete(first, item), evidence.complete(last, item)
        if not (is_inexact(values[0]) and is_inexact(values[1])) or values[0].is_complex():
            return True
        if not self._arbiter_is_the_same(item, values[0]):
            return False
        spread = evidence.spread(evidence.unit, 0, item, FEW_RUNS, demand)
        if spread is None:
            return True
        unit = max(unit_roundoff(values[0].dtype), evidence.summed_unit(item))
        noise = criterion.Noise(unit=unit, spread=spread, factor=2.0)
        if criterion.score(values[1], values[0], noise).score.passed:
            return True
        for pairs in range(FEW_PAIRS, MOST_PAIRS + 1):
            jumps = evidence.jumps(evidence.unit, 0, item, pairs, demand)
            if jumps is None:
                return False
            noise = dataclasses.replace(noise, jumps=jumps)
            if criterion.score(values[1], values[0], noise).score.passed:
                return True
        return False

    def is_as_near(self, item: Item, first: Observation, last: Observation, demand: Demand) -> bool:
        """Whether two native runs are equally far from the arbiter, which has not changed.

        Libraries choose among algorithms, and atomic additions give other bits in every run; both
        can have a few times the noise of the perturbed runs. If something had changed the
        reference, one of the runs would be farther from the arbiter than the other.
        """
        evidence = self.evidence
        values = evidence.complete(first, item), evidence.complete(last, item)
        arbiter = evidence.arbiter()
        if arbiter is None or not all(map(is_inexact, values)):
            return False
        wide = evidence.complete(arbiter[0], item)
        if not is_inexact(wide) or not self._arbiter_is_the_same(item, values[0]):
            return False
        unit = max(unit_roundoff(values[0].dtype), evidence.summed_unit(item))
        if criterion.rms_difference(*values) > math.sqrt(unit) * criterion.rms(wide):
            return False
        spread = evidence.spread(evidence.unit, 0, item, FEW_RUNS, demand)
        if spread is not None:
            noise = criterion.Noise(unit=unit, spread=spread, factor=8.0)
            if not criterion.score(values[1], values[0], noise).score.passed:
                return False
        (typical, largest), (typical_last, largest_last) = (
            _distances(value, wide) for value in values
        )
        return _are_alike(typical, typical_last, 2.0) and _are_alike(largest, largest_last, 3.0)

    def _arbiter_is_the_same(self, item: Item, native: Tensor) -> bool:
        """Whether two runs in float64, if there are any, agree far better than float32 rounds."""
        arbiter, again = self.evidence.arbiter(), self._repeated_arbiter()
        if arbiter is None or again is None:
            return True
        wide = [self.evidence.complete(observations[0], item) for observations in (arbiter, again)]
        if not (is_inexact(wide[0]) and is_inexact(wide[1])):
            return False
        # Where everything cancels, the native value is all noise and larger than the true one.
        limit = UNIT_F32 * max(map(criterion.rms, (wide[0], native)))
        return criterion.rms_difference(wide[0], wide[1]) <= limit

    def _repeated_arbiter(self) -> list[Observation] | None:
        if self._arbiter is None and self.evidence.arbiter() is not None:
            mode = self.evidence.lift_mode()
            self._arbiter = self.evidence.run(RunOptions(mode=mode, wide=True))
        return self._arbiter


def _distances(value: Tensor, true: Tensor) -> tuple[float, float]:
    """How far the elements of a value are from the true ones: typically, and at most."""
    if value.shape != true.shape or not true.numel():
        return math.inf, math.inf
    error = criterion.real_view(value).double() - criterion.real_view(true).double()
    return criterion.rms(error), float(error.abs().max())


def _are_alike(first_error: float, two: float, factor: float) -> bool:
    return max(first_error, two) <= factor * min(first_error, two) < math.inf


def _is_near(value: Any, true: Any) -> bool:
    if not is_inexact(value) or not is_inexact(true) or true.dtype not in WIDE.values():
        return same_value(value, true)
    if value.shape != true.shape or value.device != true.device:
        return False
    limit = true.abs().add_(criterion.rms(true)).mul_(_NEAR_ARBITER)
    return bool(((value.to(true.dtype) - true).abs() <= limit).all())
