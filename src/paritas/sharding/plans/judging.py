"""The judge of a plan: what the ranks hold together, against what one device computed."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.execution.evidence import Demand, Evidence
from paritas.core.execution.item_evidence import NO_LIFT, GivenLift, ItemEvidence
from paritas.core.execution.observation import Observation
from paritas.core.execution.program import Program, count_dtypes
from paritas.core.judging.failures import Explainer
from paritas.core.judging.pairs import (
    Pair,
    Ruling,
    judge_pair,
    reconsider,
    settle_pair,
    sketch_rule,
)
from paritas.core.numerics import criterion
from paritas.core.numerics.bits import dtype_name, is_inexact
from paritas.core.numerics.criterion import UNIT_F32, UNIT_F64
from paritas.core.numerics.gates import (
    GROSS_SHAKES,
    Near,
    gross_difference,
    near_in_float64,
    near_natively,
)
from paritas.core.numerics.metrics import bitwise_equal, pair_metrics
from paritas.core.results.findings import Aspect, Finding, Status
from paritas.core.results.items import ItemKind
from paritas.sharding.plans.assembling import (
    StepItem,
    find_slots,
    initial_items,
    reference_values,
    step_items,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from paritas.core.diagnosis.case import Context
    from paritas.core.execution.observation import RunOptions
    from paritas.core.judging.pairs import FindingRule
    from paritas.core.numerics.judge_evidence import JudgeEvidence
    from paritas.core.placement.assembly import ReplicaDisagreement
    from paritas.core.placement.plain_parts import PlainPart
    from paritas.core.results.items import Item
    from paritas.sharding.plans.plan import ParallelProgram
    from paritas.sharding.plans.traces import Trace

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
        state_pieces = self.native.initial or self.native.steps[0].parameters
        pieces = [*state_pieces.values(), *self.native.steps[0].outputs.values()]
        dtypes = count_dtypes(piece.local for piece in pieces)
        narrow = self.program.compute_dtype
        return dtypes if narrow is None else {narrow: sum(dtypes.values())}

    def run(self, options: RunOptions) -> list[Observation]:
        """Train the reference again."""
        trace = self.train(self.program, wide=options.wide, mode=options.around())
        return _observe_steps(trace)


def _observe_steps(trace: Trace) -> list[Observation]:
    """One observation for each step; an error is the last one."""
    observations = [Observation(outputs=dict(reference_values(step))) for step in trace.steps]
    if trace.error is not None:
        observations.append(Observation(error=RuntimeError(trace.error)))
    return observations


# --- The judge ------------------------------------------------------------------------------------

# What a model keeps: parameters, their gradients, and buffers.
KEPT_KINDS = {ItemKind.TRAINING_GRADIENT, ItemKind.PARAMETER, ItemKind.BUFFER}
# Replicas that differ by less than this in float64 differ by rounding.
ROUNDING_IN_FLOAT64 = 1e-9
# The same without a lifted run, in roundings of the dtype.
ROUNDINGS = 64.0
# A model that casts to float32 itself has a noisier run in float64. There a difference is gross at
# this multiple of what a perturbed run shows.
NARROW_SHAKES = 1e3
# Limits of the general diagnosis: most faults of a plan are explained across its ranks.
MOST_EXPLAINED, MOST_SECONDS = 8, 10.0
ADVICE = "remove random numbers from the check: call model.eval(), or set the dropout to 0"


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
        has_lifted_value = self.lifted is not None and self.lifted.ranks.value is not None
        return self.lifted if has_lifted_value and self.lifted is not None else self.item


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
        self.slots: dict[str, dict[int, PlainPart]] = find_slots(program, reference.initial, ranks)
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
            Observation(outputs={item: step_item.ranks.value for item, step_item in items.items()})
            for items in self._lifted_items
        ]
        # The ranks run a model in float64, not under our dispatch mode. What the model itself casts
        # to float32 is rounded there.
        self.lift = GivenLift(lambda: ranks_in_float64, self.runs.casts)
        # Large tensors by name, if their sketches are compared.
        self._wholes: Mapping[str, Tensor] = {}
        self._explainer = Explainer(MOST_EXPLAINED, MOST_SECONDS, self.runs.notes)

    @property
    def unit(self) -> float:
        """Unit roundoff of the runs in which patterns are looked for."""
        return self.runs.unit if self.lifted is None else self.lift.unit

    def judge(self) -> list[Judged]:
        """Judge everything, in the order in which it is computed."""
        judged_items = [
            self._initial(item) for item in initial_items(self.reference, self.ranks, self.slots)
        ]
        for number in range(self.steps):
            step = self.reference.steps[number]
            items = step_items(self.program, step, self.ranks, number, self.slots)
            wrong = any(judged_item.status is Status.DIFFERENT for judged_item in judged_items)
            if wrong and number:
                # It continues from wrong values, so further differences say nothing new.
                judged_items += [self._glance(item, number) for item in items]
            else:
                judged_items += [self._judge(item, number) for item in items]
        return judged_items

    def _glance(self, item: StepItem, number: int) -> Judged:
        """Compare without measuring noise; unverified unless they are plainly equal."""
        lifted = self._lifted_items[number].get(item.item) if self._lifted_items else None
        pair, ruling = self._pair(item, number + 1), None
        ranks = item.ranks
        if item.reference is not None and ranks.value is not None and ranks.disagreement is None:
            ruling = self._settle_plainly(pair, lifted)
        elif item.reference is None and ranks.value is None and not ranks.fault:
            ruling = Ruling(Status.IDENTICAL)
        skipped = Ruling(Status.UNVERIFIED, "not judged: an earlier step is wrong")
        finding = settle_pair(pair, ruling or skipped)
        return Judged(number + 1, item, lifted, (finding,), is_judged=ruling is not None)

    def reconsider(self, judged: list[Judged]) -> list[Judged]:
        """Judge what was left out because of an earlier step that turned out to be right."""
        first = min(
            (judged_item.step for judged_item in judged if judged_item.status is Status.DIFFERENT),
            default=None,
        )
        return [
            judged_item
            if judged_item.is_judged or (first is not None and first < judged_item.step)
            else self._judge(judged_item.item, judged_item.step - 1)
            for judged_item in judged
        ]

    def _initial(self, item: StepItem) -> Judged:
        """Initial values must be equal bit for bit."""
        faults = self._faults(item, None, 0)
        if faults or item.reference is None or item.ranks.value is None:
            return Judged(0, item, None, tuple(faults), self._wrong_ranks(item))
        pair = self._pair(item, 0)
        finding = settle_pair(pair, _rule_on_initial(pair.reference, pair.candidate))
        wrong = () if finding.status is Status.IDENTICAL else self._wrong_ranks(item)
        return Judged(0, item, None, (finding,), wrong)

    def _judge(self, item: StepItem, number: int) -> Judged:
        lifted = self._lifted_items[number].get(item.item) if self._lifted_items else None
        faults = self._faults(item, lifted, number + 1)
        wrong = self._wrong_ranks(lifted or item) if faults else ()
        grave = [f for f in faults if f.status is not Status.DEGRADED]
        findings = list(faults)
        if not grave:
            findings += self._values(item, lifted, number)
        if self.reference.random:
            findings = reconsider(findings, _rule_on_random)
        self.demand.settle(number, item.item)
        return Judged(number + 1, item, lifted, tuple(findings), wrong)

    # --- structure --------------------------------------------------------------------------------

    def _faults(self, item: StepItem, lifted: StepItem | None, step: int) -> list[Finding]:
        """Faults that need no reference: the parts make no whole, or replicas differ."""
        ranks = item.ranks
        if ranks.disagreement is not None:
            ruling = self._rule_on_replicas(ranks.disagreement, lifted, item)
            return [settle_pair(self._pair(item, step), ruling)]
        if ranks.fault:
            advice = "use a DTensor, or keep the reference's names and the order of ranks"
            about = {"aspect": Aspect.STRUCTURE, "advice": advice}
            ruling = Ruling(Status.UNVERIFIED, ranks.fault, about)
            return [settle_pair(self._pair(item, step), ruling)]
        return []

    def _rule_on_replicas(
        self, replica_disagreement: ReplicaDisagreement, lifted: StepItem | None, item: StepItem
    ) -> Ruling:
        """Replicas that differ by rounding are a fault too, since they drift apart."""
        words = f"should be replicated, but {replica_disagreement}"
        apart = lifted.ranks.disagreement if lifted is not None else None
        value = next(iter(item.ranks.by_rank.values()))
        if not is_inexact(value) or item.kind is ItemKind.INITIAL:
            return Ruling(Status.DIFFERENT, words)
        if lifted is None:
            rounding = replica_disagreement.relative <= ROUNDINGS * criterion.unit_roundoff(
                value.dtype
            )
        else:
            limit = max(ROUNDING_IN_FLOAT64, ROUNDINGS * self.lift.unit)
            rounding = apart is None or apart.relative <= limit
        if rounding:
            reason = f"{words}; this is rounding, but it grows with each step"
            return Ruling(Status.DEGRADED, reason)
        return Ruling(Status.DIFFERENT, words)

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
        pair = self._pair(item, number + 1)
        if item.reference is None and item.ranks.value is None:
            return [settle_pair(pair, Ruling(Status.IDENTICAL, "unused on both sides"))]
        reference, candidate = pair.reference, pair.candidate
        reference = torch.zeros_like(candidate) if reference is None else reference
        candidate = torch.zeros_like(reference) if candidate is None else candidate
        if candidate.dtype is self.program.compute_dtype:
            candidate = candidate.to(reference.dtype)
        pair = Pair(
            pair.item,
            reference,
            candidate,
            self._evidence(item, lifted, number),
            functools.partial(self._context, item, number, reference.shape),
        )
        gates = (
            functools.partial(self._settle_plainly, lifted=lifted),
            functools.partial(self._settle_gross, lifted=lifted, number=number),
        )
        rules = self._sketch_rules(item)
        explainer = None if rules else self._explainer
        findings, _ = judge_pair(pair, gates=gates, rules=rules, explainer=explainer)
        missing = ", ".join(map(str, item.ranks.without))
        if missing and any(not f.status.passes() for f in findings):
            where = f"no gradient arrives on rank{'s' * (len(item.ranks.without) > 1)} {missing}"
            findings = [msgspec.structs.replace(f, reason=f"{where}: {f.reason}") for f in findings]
        return findings

    def _evidence(self, item: StepItem, lifted: StepItem | None, number: int) -> JudgeEvidence:
        lift = NO_LIFT if lifted is None else self.lift
        return ItemEvidence(self.runs, item.item, number, lifted=lift, demand=self.demand)

    def _sketch_rules(self, item: StepItem) -> tuple[FindingRule, ...]:
        """The rule for a value of which both sides keep a sketch; else none."""
        # The path of another value may be the name of a parameter.
        full_value = self._wholes.get(item.name) if item.kind in KEPT_KINDS else None
        some = item.reference if item.reference is not None else item.ranks.value
        if full_value is None or some is None or some.shape == full_value.shape:
            return ()
        name = dtype_name(full_value.dtype)
        return (sketch_rule(full_value, "its sketch was compared", dtype=name),)

    def _context(self, item: StepItem, number: int, shape: torch.Size) -> Context:
        """The context for a diagnosis; what is specific to a plan is diagnosed later."""
        from paritas.core.diagnosis.case import Context

        same_shape = {
            rank: rank_value
            for rank, rank_value in item.ranks.by_rank.items()
            if rank_value.shape == shape
        }
        draws = self.runs.depends_on_draws(number, item.item)
        return Context(world=dict(self.program.mesh), held=same_shape, draws=draws)

    def _settle_plainly(self, pair: Pair, lifted: StepItem | None) -> Ruling | None:
        """A gate: equal bits, or close in float64 and natively, need no measured noise."""
        reference, candidate = pair.reference, pair.candidate
        if reference.dtype is not candidate.dtype or reference.shape != candidate.shape:
            return None
        exact = not is_inexact(reference) or criterion.unit_roundoff(reference.dtype) <= UNIT_F32
        if exact and bitwise_equal(reference, candidate):
            return Ruling(Status.IDENTICAL)
        if lifted is None or lifted.reference is None or lifted.ranks.value is None:
            return None
        if not near_in_float64(lifted.reference, lifted.ranks.value):
            return None
        status = near_natively(reference, candidate, lifted.reference)
        return None if status is None else Ruling(status)

    def _settle_gross(self, pair: Pair, lifted: StepItem | None, number: int) -> Ruling | None:
        """A gate: a difference in float64 far above rounding is a fault."""
        if lifted is None or not is_inexact(lifted.reference):
            return None
        reference: Any = lifted.reference
        split = lifted.ranks.value
        if (
            split is None
            or split.shape != reference.shape
            or not bool(torch.isfinite(reference).all())
        ):
            return None

        item = lifted.item

        def limit() -> float | None:
            self.runs.arbiter()
            unit = self.lift.unit
            shakes = GROSS_SHAKES if unit == UNIT_F64 else NARROW_SHAKES
            spread = self.runs.spread(unit, number, item, 1, self.demand)
            return None if spread is None else shakes * criterion.rms(spread)

        reason = gross_difference(reference, split, limit)
        if reason is None:
            return None
        return Ruling(Status.DIFFERENT, reason, {"metrics": pair_metrics(reference, split)})

    def _pair(self, item: StepItem, step: int) -> Pair:
        """Both sides of an item; either may be None."""
        shown = msgspec.structs.replace(item.item, step=step)
        return Pair(shown, item.reference, item.ranks.value)


def _rule_on_initial(reference: Tensor, value: Tensor) -> Ruling:
    if value.dtype is reference.dtype and bitwise_equal(reference, value):
        return Ruling(Status.IDENTICAL)
    metrics = pair_metrics(reference, value)
    reason = (
        f"the ranks start with other values than the reference: {metrics.mismatched} of "
        f"{metrics.numel} elements differ"
    )
    if value.dtype is not reference.dtype:
        reason += f"; {dtype_name(value.dtype)} instead of {dtype_name(reference.dtype)}"
    return Ruling(Status.DIFFERENT, reason, {"metrics": metrics})


def _rule_on_random(finding: Finding) -> Ruling | None:
    """With dropout the ranks draw other numbers, so a difference proves nothing."""
    if finding.status.passes():
        return None
    reason = f"depends on random numbers, which differ between ranks ({finding.reason})"
    about = {"advice": ADVICE, "metrics": None, "diagnosis": None}
    return Ruling(Status.UNVERIFIED, reason, about)
