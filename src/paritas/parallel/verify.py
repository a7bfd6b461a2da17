"""Does a model under a parallel plan train as it does on one device?"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from torch import distributed

from paritas._torch.global_state import quietly
from paritas.checks.failures import Explainer
from paritas.execution.evidence import Demand, Evidence
from paritas.execution.item_evidence import NO_LIFT, GivenLift, ItemEvidence
from paritas.execution.observation import Observation
from paritas.execution.program import Program, count_dtypes
from paritas.numerics import criterion
from paritas.numerics.bits import is_inexact
from paritas.numerics.criterion import UNIT_F32, UNIT_F64
from paritas.numerics.gates import (
    GROSS_SHAKES,
    Near,
    gross_difference,
    near_in_float64,
    near_natively,
)
from paritas.numerics.judge import Checks, check_pair
from paritas.numerics.metrics import bitwise_equal, pair_metrics
from paritas.parallel.assembling import (
    INITIAL,
    StepItem,
    find_slots,
    initial_items,
    reference_values,
    step_items,
    unmatched,
)
from paritas.parallel.causes import ParallelCause, excuse_late_reductions, find_cause
from paritas.parallel.dropout import KEYED
from paritas.parallel.plan import ParallelProgram, make_program
from paritas.parallel.traces import Trace
from paritas.parallel.training import Team, device_here, run_ranks, run_reference
from paritas.results.findings import Aspect, Coverage, Finding, Origin, OriginKind, Status, Verdict
from paritas.results.items import Item, ItemKind, harness
from paritas.results.progress import shows_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor, nn

    from paritas.execution.observation import RunOptions
    from paritas.parallel.assembling import Slots
    from paritas.parallel.dropout import Dropout
    from paritas.placement.assembly import ReplicaDisagreement

    RunReference = Callable[..., Trace]


# --- Further runs of the reference ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingProgram(Program):
    """The training of the reference; one observation for each step."""

    sets_default = True
    notes_float64 = False

    program: ParallelProgram
    native: Trace
    train: RunReference

    def dtypes(self, native: list[Observation]) -> dict[torch.dtype, int]:
        """Count those of the initial parameters and of the outputs of the first step."""
        pieces = [*self.native.initial.values(), *self.native.steps[0].outputs.values()]
        return count_dtypes(piece.local for piece in pieces)

    def run(self, options: RunOptions) -> list[Observation]:
        """Train the reference again."""
        trace = self.train(self.program, wide=options.wide, mode=options.around())
        return _observe_steps(trace)


def _observe_steps(trace: Trace) -> list[Observation]:
    """One observation for each step; an error is the last one."""
    seen = [Observation(outputs=dict(reference_values(step))) for step in trace.steps]
    if trace.error is not None:
        seen.append(Observation(error=RuntimeError(trace.error)))
    return seen


# --- The judge ------------------------------------------------------------------------------------

# Replicas that differ by less than this in float64 differ by rounding.
ROUNDING_IN_FLOAT64 = 1e-9
# The same without a lifted run, in roundings of the dtype.
ROUNDINGS = 64.0
# A model that casts to float32 itself has a noisier run in float64. There a difference is gross at
# this multiple of what a perturbed run shows.
NARROW_SHAKES = 1e3
# Limits of the general diagnosis: most faults of a plan are explained across its ranks.
MOST_EXPLAINED, MOST_SECONDS = 8, 10.0
_EVAL = "remove random numbers from the check: call model.eval(), or set the dropout to 0"


@dataclasses.dataclass(frozen=True)
class Judged:
    """An item and its findings.

    Attributes:
        step: counted from 1; 0 is before the first.
        item: its native values.
        lifted: its values in float64, if there was such a run.
        ranks: the ranks that are wrong; empty for all of them.
        is_judged: False if it was left out because an earlier step is wrong.
    """

    step: int
    item: StepItem
    lifted: StepItem | None
    findings: tuple[Finding, ...]
    ranks: tuple[int, ...] = ()
    is_judged: bool = True

    @property
    def status(self) -> Status:
        """The most severe of its findings."""
        return max((f.status for f in self.findings), key=lambda status: status.gravity)

    @property
    def best(self) -> StepItem:
        """In float64 if there is such a run, since patterns show best there."""
        known = self.lifted is not None and self.lifted.ranks.value is not None
        return self.lifted if known and self.lifted is not None else self.item


def complete_steps(reference: Trace, ranks: list[Trace]) -> int:
    """Number of steps that all of them completed."""
    traces = [reference, *ranks]
    return min(
        sum(1 for step in trace.steps if step.parameters or not trace.initial) for trace in traces
    )


class Judge:
    """Judges all items; makes further runs of the reference when first needed.

    Attributes:
        slots: where plain parts of parameters lie.
        runs: the further runs.
        steps: how many steps are compared.
    """

    def __init__(
        self,
        program: ParallelProgram,
        reference: Trace,
        ranks: list[Trace],
        lifted: tuple[Trace, list[Trace]] | None,
        run: RunReference,
    ) -> None:
        """`lifted` holds the runs of both sides in float64; `run` is `run_reference`."""
        self.program = program
        self.reference = reference
        self.ranks = ranks
        self.lifted = lifted
        self.steps = complete_steps(reference, ranks)
        self.slots: dict[str, dict[int, Slots]] = find_slots(program, reference.initial, ranks)
        self._lifted_items: list[dict[Item, StepItem]] = []
        if lifted is not None:
            self.steps = min(self.steps, complete_steps(*lifted))
            self._lifted_items = [
                {
                    item.item: item
                    for item in step_items(program, lifted[0].steps[n], lifted[1], n, self.slots)
                }
                for n in range(self.steps)
            ]
        training = TrainingProgram(program, reference, run)
        self.runs = Evidence(training, _observe_steps(reference), program.seed)
        self.demand = Demand()
        ranks_in_float64 = [
            Observation(outputs={item: held.ranks.value for item, held in items.items()})
            for items in self._lifted_items
        ]
        # The ranks run a model in float64, not under our dispatch mode. What the model itself casts
        # to float32 is rounded there.
        self.lift = GivenLift(lambda: ranks_in_float64, self.runs.casts)
        self._explainer = Explainer(MOST_EXPLAINED, MOST_SECONDS, self.runs.notes)

    @property
    def unit(self) -> float:
        """Unit roundoff of the runs in which patterns are looked for."""
        return self.runs.unit if self.lifted is None else self.lift.unit

    def judge(self) -> list[Judged]:
        """Judge everything, in the order in which it is computed."""
        found = [
            self._initial(item) for item in initial_items(self.reference, self.ranks, self.slots)
        ]
        for number in range(self.steps):
            step = self.reference.steps[number]
            items = step_items(self.program, step, self.ranks, number, self.slots)
            wrong = any(one.status is Status.DIFFERENT for one in found)
            if wrong and number:
                # It continues from wrong values, so further differences say nothing new.
                found += [self._glance(item, number) for item in items]
            else:
                found += [self._judge(item, number) for item in items]
        return found

    def _glance(self, item: StepItem, number: int) -> Judged:
        """Compare without measuring noise; unverified unless they are plainly equal."""
        lifted = self._lifted_items[number].get(item.item) if self._lifted_items else None
        held, status = item.ranks, None
        if item.reference is not None and held.value is not None and held.disagreement is None:
            status = self._plainly(item.reference, held.value, lifted)
        elif item.reference is None and held.value is None and not held.fault:
            status = Status.IDENTICAL
        reason = "" if status is not None else "not judged: an earlier step is wrong"
        finding = self._finding(item, number + 1, status or Status.UNVERIFIED, reason)
        return Judged(number + 1, item, lifted, (finding,), is_judged=status is not None)

    def reconsider(self, judged: list[Judged]) -> list[Judged]:
        """Judge what was left out because of an earlier step that turned out to be right."""
        first = min((one.step for one in judged if one.status is Status.DIFFERENT), default=None)
        return [
            one
            if one.is_judged or (first is not None and first < one.step)
            else self._judge(one.item, one.step - 1)
            for one in judged
        ]

    def _initial(self, item: StepItem) -> Judged:
        """Initial values must be equal bit for bit."""
        faults = self._faults(item, None, 0)
        if faults or item.reference is None or item.ranks.value is None:
            return Judged(0, item, None, tuple(faults), self._wrong_ranks(item))
        value = item.ranks.value
        same = value.dtype is item.reference.dtype and bitwise_equal(item.reference, value)
        if same:
            finding = self._finding(item, 0, Status.IDENTICAL, "")
            return Judged(0, item, None, (finding,))
        metrics = pair_metrics(item.reference, value)
        reason = (
            f"the ranks start with other values than the reference: {metrics.mismatched} of "
            f"{metrics.numel} elements differ"
        )
        if value.dtype is not item.reference.dtype:
            reason += f"; {_dtype(value)} instead of {_dtype(item.reference)}"
        finding = self._finding(item, 0, Status.DIFFERENT, reason)
        finding = msgspec.structs.replace(finding, metrics=metrics)
        return Judged(0, item, None, (finding,), self._wrong_ranks(item))

    def _judge(self, item: StepItem, number: int) -> Judged:
        lifted = self._lifted_items[number].get(item.item) if self._lifted_items else None
        faults = self._faults(item, lifted, number + 1)
        wrong = self._wrong_ranks(lifted or item) if faults else ()
        grave = [f for f in faults if f.status is not Status.DEGRADED]
        found = list(faults)
        if not grave:
            found += self._values(item, lifted, number)
        if self.reference.random:
            found = [_random(finding) for finding in found]
        self.demand.settle(number, item.item)
        return Judged(number + 1, item, lifted, tuple(found), wrong)

    # --- structure --------------------------------------------------------------------------------

    def _faults(self, item: StepItem, lifted: StepItem | None, step: int) -> list[Finding]:
        """Faults that need no reference: the parts make no whole, or replicas differ."""
        held = item.ranks
        if held.disagreement is not None:
            status, words = self._disagreement(held.disagreement, lifted, item)
            return [self._finding(item, step, status, words)]
        if held.fault:
            advice = "use a DTensor, or keep the reference's names and the order of ranks"
            found = self._finding(item, step, Status.UNVERIFIED, held.fault, Aspect.STRUCTURE)
            return [msgspec.structs.replace(found, advice=advice)]
        return []

    def _disagreement(
        self, found: ReplicaDisagreement, lifted: StepItem | None, item: StepItem
    ) -> tuple[Status, str]:
        """Replicas that differ by rounding are a fault too, since they drift apart."""
        words = f"should be replicated, but {found}"
        apart = lifted.ranks.disagreement if lifted is not None else None
        value = next(iter(item.ranks.by_rank.values()))
        if not is_inexact(value) or item.kind == INITIAL:
            return Status.DIFFERENT, words
        if lifted is None:
            rounding = found.relative <= ROUNDINGS * criterion.unit_roundoff(value.dtype)
        else:
            limit = max(ROUNDING_IN_FLOAT64, ROUNDINGS * self.lift.unit)
            rounding = apart is None or apart.relative <= limit
        if rounding:
            return Status.DEGRADED, f"{words}; this is rounding, but it grows with each step"
        return Status.DIFFERENT, words

    def _wrong_ranks(self, item: StepItem) -> tuple[int, ...]:
        """The ranks whose replica differs from the reference; empty if all do, or it is unknown."""
        value = item.reference
        if value is None:
            return ()
        near = Near(self.unit)
        wrong = [
            rank
            for rank, local in item.ranks.by_rank.items()
            if local.shape == value.shape and not near(local, value)
        ]
        return tuple(wrong) if len(wrong) < len(item.ranks.by_rank) else ()

    # --- values -----------------------------------------------------------------------------------

    def _values(self, item: StepItem, lifted: StepItem | None, number: int) -> list[Finding]:
        step = number + 1
        reference, candidate = item.reference, item.ranks.value
        if reference is None and candidate is None:
            return [self._finding(item, step, Status.IDENTICAL, "unused on both sides")]
        some: Any = reference if reference is not None else candidate
        reference = torch.zeros_like(some) if reference is None else reference
        candidate = torch.zeros_like(some) if candidate is None else candidate
        status = self._plainly(reference, candidate, lifted)
        if status is not None:
            return [self._finding(item, step, status, "")]
        gross = self._gross(item, lifted, number)
        findings = [] if gross is None else [gross]
        lift = NO_LIFT if lifted is None else self.lift
        evidence = ItemEvidence(self.runs, item.item, number, lifted=lift, demand=self.demand)
        if gross is None:
            shown = msgspec.structs.replace(item.item, step=step)
            findings, _ = check_pair(shown, reference, candidate, Checks(), evidence)
        findings = self._explained(findings, item, (reference, candidate), evidence)
        missing = ", ".join(map(str, item.ranks.without))
        if missing and any(not f.status.passes() for f in findings):
            where = f"no gradient arrives on rank{'s' * (len(item.ranks.without) > 1)} {missing}"
            findings = [msgspec.structs.replace(f, reason=f"{where}: {f.reason}") for f in findings]
        return findings

    def _explained(
        self,
        findings: list[Finding],
        item: StepItem,
        pair: tuple[Tensor, Tensor],
        evidence: ItemEvidence,
    ) -> list[Finding]:
        """The findings with a diagnosis; what is specific to a plan is diagnosed later."""
        from paritas.diagnosis.case import Context

        whole = pair[0].shape
        held = {rank: one for rank, one in item.ranks.by_rank.items() if one.shape == whole}
        context = Context(world=dict(self.program.mesh), held=held)
        return self._explainer.explain(findings, *pair, evidence, context)

    def _plainly(
        self, reference: Tensor, candidate: Tensor, lifted: StepItem | None
    ) -> Status | None:
        """The status, if it needs no measured noise."""
        if reference.dtype is not candidate.dtype or reference.shape != candidate.shape:
            return None
        exact = not is_inexact(reference) or criterion.unit_roundoff(reference.dtype) <= UNIT_F32
        if exact and bitwise_equal(reference, candidate):
            return Status.IDENTICAL
        if lifted is None or lifted.reference is None or lifted.ranks.value is None:
            return None
        if not near_in_float64(lifted.reference, lifted.ranks.value):
            return None
        return near_natively(reference, candidate, lifted.reference)

    def _gross(self, item: StepItem, lifted: StepItem | None, number: int) -> Finding | None:
        """The finding for a difference in float64 far above rounding; None if it is not."""
        if lifted is None or not is_inexact(lifted.reference):
            return None
        whole: Any = lifted.reference
        split = lifted.ranks.value
        if split is None or split.shape != whole.shape or not bool(torch.isfinite(whole).all()):
            return None

        def limit() -> float | None:
            self.runs.arbiter()
            unit = self.lift.unit
            shakes = GROSS_SHAKES if unit == UNIT_F64 else NARROW_SHAKES
            spread = self.runs.spread(unit, number, item.item, 1, self.demand)
            return None if spread is None else shakes * criterion.rms(spread)

        reason = gross_difference(whole, split, limit)
        if reason is None:
            return None
        finding = self._finding(item, number + 1, Status.DIFFERENT, reason)
        return msgspec.structs.replace(finding, metrics=pair_metrics(whole, split))

    def _finding(
        self, item: StepItem, step: int, status: Status, reason: str, aspect: Aspect = Aspect.VALUE
    ) -> Finding:
        some = item.reference if item.reference is not None else item.ranks.value
        return Finding(
            item=msgspec.structs.replace(item.item, step=step),
            aspect=aspect,
            status=status,
            reason=reason,
            dtype=None if some is None else _dtype(some),
            shape=None if some is None else tuple(some.shape),
        )


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _random(finding: Finding) -> Finding:
    """With dropout the ranks draw other numbers, so a difference proves nothing."""
    if finding.status.passes():
        return finding
    reason = f"depends on random numbers, which differ between ranks ({finding.reason})"
    return msgspec.structs.replace(
        finding,
        status=Status.UNVERIFIED,
        reason=reason,
        advice=_EVAL,
        metrics=None,
        diagnosis=None,
    )


# --- The check of a plan --------------------------------------------------------------------------

T = TypeVar("T")


@shows_progress
def verify_parallel(  # noqa: PLR0913  (each is a thing that a training has)
    model: nn.Module | Callable[[], nn.Module],
    plan: Any,
    inputs: Any,
    mesh: int | Sequence[int] | Mapping[str, int] = 2,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    steps: int = 2,
    split: str | Sequence[str] | None = None,
    ranks: Team = "simulated",
    seed: int = 0,
    strict: bool = False,
    timeout: float = 120.0,
    on_progress: Callable[[str], None] | None = None,
) -> Verdict:
    """Train a model a few steps on one device and under a plan on ranks, and compare everything.

    This compares outputs, losses, the assembled gradient of every parameter, parameters after each
    step, and buffers. Replicas must be equal bit for bit between ranks.

    Args:
        model: the model on one device, which is copied; or a function that makes it.
        plan: a `dict[str, ParallelStyle]`, `"ddp"`, `"fsdp"`, or a function of the model and the
            device mesh that returns the parallel model (None: it changed the model in place).
        inputs: a batch `[x, ...]` or `Inputs`, or a list of `Inputs`, one for each step.
        mesh: how many ranks, along one axis or several: `4`, `(2, 2)`, `{"dp": 2, "tp": 2}`.
        loss: a function of the output and the batch; by default the output if it is a scalar, and
            otherwise a weighted mean of it.
        optimizer: a function of the parameters; by default SGD with momentum.
        steps: how many.
        split: axes of the mesh along which ranks have different samples; by default all of them
            for `"ddp"` and `"fsdp"`, none otherwise.
        ranks: `"simulated"` for threads of this process, `"gloo"` for processes, `"here"` if this
            process is a rank itself: all ranks call this and get the same verdict.
        seed: for making the model and for every random draw.
        strict: count `unstable` as a failure.
        timeout: of the ranks in one run, in seconds.
        on_progress: called with a message before every run.

    Returns:
        A verdict. The first failure is the earliest; where it starts and which collective is
        missing, doubled or mis-scaled are in its `origin` and `diagnosis`.

    Raises:
        UsageError: an argument is not valid, or the model on one device cannot be trained.
    """
    program = make_program(
        model,
        plan,
        inputs,
        mesh,
        loss=loss,
        optimizer=optimizer,
        steps=steps,
        split=split,
        seed=seed,
    )
    runs = _Runs(program, ranks, timeout, on_progress or (lambda _: None))
    runs.tell("training on one device")
    reference = runs.native = runs.reference()
    if reference.error is not None:
        return Verdict(findings=(_unusable(reference),), strict=strict)
    drops = reference.random and runs.without_dropout()
    runs.tell(f"training on {program.ranks} ranks")
    traces = runs.ranks()
    lifted, notes = _lifted(runs, traces)
    verdict = judge_traces(
        runs.program, runs.native, traces, lifted, strict=strict, runs=runs, notes=tuple(notes)
    )
    verdict = runs.agreed(verdict)
    return _with_dropout(verdict, runs) if drops else verdict


class _Runs:
    """Runs the program again."""

    def __init__(
        self, program: ParallelProgram, team: Team, timeout: float, tell: Callable[[str], None]
    ) -> None:
        self.program = program
        self.team = team
        self.timeout = timeout
        self.tell = tell
        self.native = Trace()

    def reference(self, program: ParallelProgram | None = None, **how: Any) -> Trace:
        """Train on one device: that of this rank, if this process is one."""
        device = device_here() if self.team == "here" else None
        return run_reference(program or self.program, device=device, **how)

    def ranks(self, program: ParallelProgram | None = None, **how: Any) -> list[Trace]:
        """Train on the ranks."""
        return run_ranks(program or self.program, self.team, timeout=self.timeout, **how)

    def without_dropout(self) -> bool:
        """Switch dropout off on both sides, if nothing else draws random numbers."""
        off = dataclasses.replace(self.program, dropout="off")
        reference = self.reference(off)
        if reference.random or reference.error is not None:
            return False
        self.program, self.native = off, reference
        return True

    def agreed(self, value: T) -> T:
        """The value of the first rank, if this process is a rank.

        Each rank judges for itself, and on real devices two runs of one program may round
        differently. But all ranks must take part in the same runs and return the same.
        """
        if self.team != "here":
            return value
        box = [value]
        group = distributed.new_group(backend="gloo")
        distributed.broadcast_object_list(box, src=0, group=group)
        distributed.destroy_process_group(group)
        return box[0]


_DROPOUT = (
    "dropout was switched off, and checked in float64 with masks that depend on the masked values; "
    "the numbers that ranks draw were not compared"
)


def _with_dropout(verdict: Verdict, runs: _Runs) -> Verdict:
    """The verdict without dropout, and the failures of a check with masks by value.

    A mask by value differs by chance where a value is next to where its leading bits change. Only
    what fails with two kinds of masks is a fault.
    """
    found: tuple[Finding, ...] = ()
    if verdict.status.passes():
        for kind in KEYED:
            found = _failures_with_masks(kind, runs, strict=verdict.strict)
            if not found:
                break
    return msgspec.structs.replace(
        verdict, findings=(*found, *verdict.findings), notes=(*verdict.notes, _DROPOUT)
    )


@quietly()
def _failures_with_masks(kind: Dropout, runs: _Runs, *, strict: bool) -> tuple[Finding, ...]:
    """What fails in float64 with masks by value."""
    program = dataclasses.replace(runs.program, dropout=kind)
    masked = _Runs(program, runs.team, runs.timeout, runs.tell)
    runs.tell("training on one device and on ranks, in float64, with dropout by value")
    reference = masked.native = masked.reference(wide=True)
    ranks = masked.ranks(wide=True)
    failed = next((one.error for one in (reference, *ranks) if one.error is not None), None)
    if failed is not None:
        finding = Finding(
            item=harness("dropout"),
            aspect=Aspect.HARNESS,
            status=Status.UNVERIFIED,
            reason=f"dropout could not be checked: {failed}",
            advice=_EVAL,
        )
        return (finding,)
    verdict = judge_traces(
        program, reference, ranks, (reference, ranks), strict=strict, runs=masked
    )
    verdict = masked.agreed(verdict)
    return tuple(
        msgspec.structs.replace(finding, reason=f"with dropout: {finding.reason}")
        for finding in verdict.findings
        if not finding.status.passes()
    )


def judge_traces(
    program: ParallelProgram,
    reference: Trace,
    ranks: list[Trace],
    lifted: tuple[Trace, list[Trace]] | None,
    *,
    strict: bool = False,
    runs: _Runs | None = None,
    notes: tuple[str, ...] = (),
) -> Verdict:
    """Judge what the ranks did by what the reference did.

    Args:
        lifted: both in float64; None if there are no such runs.
        runs: makes the runs that locate a fault; without it, nothing is located.
    """
    errors = _errors(ranks)
    judged: list[Judged] = []
    noted = [*notes]
    if complete_steps(reference, ranks) or not errors:
        judge = Judge(
            program, reference, ranks, lifted, run_reference if runs is None else runs.reference
        )
        if runs is not None:
            judge.runs.tell = runs.tell
        judged = excuse_late_reductions(judge, judge.judge())
        noted += judge.runs.notes
        wrong = [one for one in judged if not one.status.passes()]
        cause = None
        located = bool(wrong) and not errors
        if located if runs is None else runs.agreed(located):
            first = min((one.step for one in wrong), default=1)
            watched = _watched(runs, lifted, first if runs is None else runs.agreed(first))
            cause = find_cause(judge, wrong, *watched) if wrong else None
            noted += _affected(judged, wrong)
        findings = _ordered(judged, cause)
    else:
        findings = []
    compared = sum(1 for one in judged if one.item.reference is not None)
    extra = tuple(f"{name} is on the ranks only" for name in unmatched(reference, ranks))
    coverage = Coverage(compared=compared, unmatched=extra)
    return Verdict(
        findings=(*errors, *findings),
        coverage=coverage,
        notes=tuple(dict.fromkeys(noted)),
        strict=strict,
    )


@quietly()
def _watched(
    runs: _Runs | None, lifted: tuple[Trace, list[Trace]] | None, step: int
) -> tuple[Trace | None, list[Trace]]:
    """Run both sides again, up to the first wrong step, and watch every module there."""
    if runs is None:
        return None, []
    runs.tell("looking for the module where it starts")
    wide = lifted is not None
    shorter = dataclasses.replace(runs.program, steps=max(1, step))
    reference = runs.reference(shorter, wide=wide, watch_modules=True)
    return reference, runs.ranks(shorter, wide=wide, watch_modules=True)


@quietly()
def _lifted(
    runs: _Runs, natively: list[Trace]
) -> tuple[tuple[Trace, list[Trace]] | None, list[str]]:
    """Both sides in float64, or a note that says why not."""
    if any(trace.error is not None for trace in natively):
        return None, []
    if _all_float64(runs.native):
        return (runs.native, natively), []
    runs.tell("training on one device, in float64")
    reference = runs.reference(wide=True)
    if reference.error is not None:
        return None, [f"no run in float64: on one device {reference.error}; judged natively"]
    runs.tell("training on ranks, in float64")
    ranks = runs.ranks(wide=True)
    failed = next((trace for trace in ranks if trace.error is not None), None)
    if failed is not None:
        return None, [f"no run in float64: rank {failed.rank} {failed.error}; judged natively"]
    return (reference, ranks), []


def _all_float64(trace: Trace) -> bool:
    """Whether the model itself runs in float64, so there is no wider run."""
    pieces = [*trace.initial.values(), *trace.steps[0].outputs.values()]
    dtypes = {piece.local.dtype for piece in pieces if piece.local.is_floating_point()}
    return dtypes == {torch.float64}


def _unusable(reference: Trace) -> Finding:
    at = f" in module {reference.error_at}" if reference.error_at else ""
    return Finding(
        item=harness("reference"),
        aspect=Aspect.HARNESS,
        status=Status.UNVERIFIED,
        reason=f"the model fails on one device{at}: {reference.error}",
        advice="fix the training on one device first",
    )


def _errors(ranks: list[Trace]) -> list[Finding]:
    """One finding for all ranks that raised: the first that did not just wait for another."""
    failed = [trace for trace in ranks if trace.error is not None]
    if not failed:
        return []
    # Prefer ranks that did not just wait, then those that know the module.
    first = max(failed, key=lambda trace: (not trace.waited, bool(trace.error_at), -trace.rank))
    if any(trace.unsupported for trace in failed):
        first = next(trace for trace in failed if trace.unsupported)
        return [
            Finding(
                item=harness("plan"),
                aspect=Aspect.HARNESS,
                status=Status.UNVERIFIED,
                reason=str(first.error),
            )
        ]
    alike = tuple(trace.rank for trace in failed if trace.error == first.error)
    step = len(first.steps)
    which = ", ".join(map(str, alike))
    reason = f"rank{'s' * (len(alike) > 1)} {which} failed: {first.error}"
    origin = None
    if first.error_at:
        origin = Origin(
            kind=OriginKind.MODULE,
            name=first.error_at,
            ranks=alike if len(alike) < len(ranks) else (),
        )
    return [
        Finding(
            item=Item(ItemKind.HARNESS, "ranks", step=step),
            aspect=Aspect.EXCEPTION,
            status=Status.DIFFERENT,
            reason=reason,
            origin=origin,
        )
    ]


def _affected(judged: list[Judged], wrong: list[Judged]) -> list[str]:
    """How many values of each kind are wrong in the first wrong step."""
    if not wrong:
        return []
    step = min(one.step for one in wrong)
    bad = Counter(one.item.kind for one in wrong if one.step == step)
    whole = Counter(one.item.kind for one in judged if one.step == step)
    when = f"in step {step}" if step else "before the first step"
    parts = [f"{count} of {whole[kind]} {kind} values" for kind, count in bad.items()]
    return [f"affected {when}: {', '.join(parts)}"]


def _ordered(judged: list[Judged], cause: ParallelCause | None) -> list[Finding]:
    """All findings, the cause first; one finding for each step after the first wrong one."""
    wrong = [one.step for one in judged if one.status is Status.DIFFERENT]
    # Wrong initial values are a cause of their own, and step 1 shows their effect.
    last = max(min(wrong), 1) if wrong else None
    found: list[Finding] = []
    later: dict[int, list[Judged]] = {}
    for one in judged:
        if last is not None and one.step > last and not one.status.passes():
            later.setdefault(one.step, []).append(one)
            continue
        findings = list(one.findings)
        if cause is not None and one is cause.judged:
            at = next(i for i, f in enumerate(findings) if not f.status.passes())
            findings[at] = cause.explained(findings[at])
            found = [findings.pop(at), *found]
        found += [_explained(finding, one, cause) for finding in findings]
    for step, those in later.items():
        whole = sum(1 for one in judged if one.step == step)
        reason = (
            f"{len(those)} of its {whole} values are not plainly the reference's, the first is "
            f"{those[0].item.path}; not judged, since it continues from wrong values"
        )
        found.append(
            Finding(
                item=Item(name=f"step {step}"),
                aspect=Aspect.VALUE,
                status=Status.UNVERIFIED,
                reason=reason,
            )
        )
    return found


def _explained(finding: Finding, one: Judged, cause: ParallelCause | None) -> Finding:
    if cause is None or finding.status.passes():
        return finding
    diagnosis = cause.others.get((one.step, one.item.path))
    return finding if diagnosis is None else msgspec.structs.replace(finding, diagnosis=diagnosis)
