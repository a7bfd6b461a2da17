"""Judge what the ranks hold together against the reference: plain cases at once, then by noise."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.checking.evidence import ItemEvidence
from paritas.checking.explaining import Explainer
from paritas.checking.noise import is_inexact
from paritas.numerics import criterion
from paritas.numerics.criterion import UNIT_F32, UNIT_F64
from paritas.numerics.findings import Aspect, Finding, Status
from paritas.numerics.metrics import bitwise_equal, pair_metrics
from paritas.numerics.pairing import Checks, check_pair
from paritas.partition.judging import GROSS_SHAKES, GROSS_SHARE, near_in_float64, near_natively
from paritas.partition.plans.items import INITIAL, Item, initial_items, items_of
from paritas.partition.plans.layouts import find_slots
from paritas.partition.plans.noise import PlanRuns
from paritas.partition.plans.relating import Near

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.partition.plans.assembling import Disagreement
    from paritas.partition.plans.layouts import Slots
    from paritas.partition.plans.noise import RunReference
    from paritas.partition.plans.program import Program
    from paritas.partition.plans.traces import Trace

__all__ = ["Judge", "Judged", "complete_steps"]

# Replicas that are apart by less than this in float64 are apart by rounding.
ROUNDING_IN_FLOAT64 = 1e-9
# Natively, where there is no lifted run: by so many roundings.
ROUNDINGS = 64.0
# A model that casts to float32 itself has a noisier run in float64: there a difference is gross at
# so many times what a perturbed run shows.
NARROW_SHAKES = 1e3
# Most of what a plan does wrong is explained by its ranks, not by these.
MOST_EXPLAINED, MOST_SECONDS = 8, 10.0
_EVAL = "take random numbers out of the check: model.eval(), or a dropout probability of 0"


@dataclasses.dataclass(frozen=True)
class Judged:
    """An item and how it ended.

    Attributes:
        step: counted from 1; 0 is before the first.
        item: natively.
        lifted: the same in float64, if there was such a run.
        findings: about it.
        ranks: those whose part is wrong; empty for all of them.
        is_judged: off, it was left out because an earlier step is wrong.
    """

    step: int
    item: Item
    lifted: Item | None
    findings: tuple[Finding, ...]
    ranks: tuple[int, ...] = ()
    is_judged: bool = True

    @property
    def status(self) -> Status:
        """The gravest of its findings."""
        return max((f.status for f in self.findings), key=lambda status: status.gravity)

    @property
    def best(self) -> Item:
        """In float64 where there is such a run: patterns show there."""
        known = self.lifted is not None and self.lifted.ranks.value is not None
        return self.lifted if known and self.lifted is not None else self.item


def complete_steps(reference: Trace, ranks: list[Trace]) -> int:
    """How many steps all of them ended."""
    traces = [reference, *ranks]
    return min(
        sum(1 for step in trace.steps if step.parameters or not trace.initial) for trace in traces
    )


class Judge:
    """Judges all items; further runs of the reference are made when first needed.

    Attributes:
        slots: where plain parts of parameters lie.
        runs: the further runs.
        steps: how many steps are compared.
    """

    def __init__(
        self,
        program: Program,
        reference: Trace,
        ranks: list[Trace],
        lifted: tuple[Trace, list[Trace]] | None,
        run: RunReference,
    ) -> None:
        """`lifted` are the runs of both in float64; `run` is `run_reference`."""
        self.program = program
        self.reference = reference
        self.ranks = ranks
        self.lifted = lifted
        self.steps = complete_steps(reference, ranks)
        self.slots: dict[str, dict[int, Slots]] = find_slots(program, reference.initial, ranks)
        self._lifted_items: list[dict[str, Item]] = []
        if lifted is not None:
            self.steps = min(self.steps, complete_steps(*lifted))
            self._lifted_items = [
                {
                    item.path: item
                    for item in items_of(program, lifted[0].steps[n], lifted[1], n, self.slots)
                }
                for n in range(self.steps)
            ]
        values = [
            {path: item.ranks.value for path, item in items.items()} for items in self._lifted_items
        ]
        self.runs = PlanRuns(program, reference, values if lifted is not None else None, run)
        self._explainer = Explainer(MOST_EXPLAINED, MOST_SECONDS, self.runs.notes)

    @property
    def unit(self) -> float:
        """Unit roundoff of the runs in which a fault is looked for."""
        return self.runs.unit if self.lifted is None else self.runs.lift_unit

    def judge(self) -> list[Judged]:
        """Everything, in the order in which it comes about."""
        found = [
            self._initial(item) for item in initial_items(self.reference, self.ranks, self.slots)
        ]
        for number in range(self.steps):
            step = self.reference.steps[number]
            items = items_of(self.program, step, self.ranks, number, self.slots)
            wrong = any(one.status is Status.DIFFERENT for one in found)
            if wrong and number:
                # It goes on from wrong values: what differs now says nothing new.
                found += [self._glance(item, number) for item in items]
            else:
                found += [self._judge(item, number) for item in items]
        return found

    def _glance(self, item: Item, number: int) -> Judged:
        """Equal as far as is plain at once, otherwise not judged."""
        lifted = self._lifted_items[number].get(item.path) if self._lifted_items else None
        held, status = item.ranks, None
        if item.reference is not None and held.value is not None and held.disagreement is None:
            status = self._plainly(item.reference, held.value, lifted)
        elif item.reference is None and held.value is None and not held.fault:
            status = Status.IDENTICAL
        reason = "" if status is not None else "not judged: an earlier step is wrong"
        finding = self._finding(item, number + 1, status or Status.UNVERIFIED, reason)
        return Judged(number + 1, item, lifted, (finding,), is_judged=status is not None)

    def reconsider(self, judged: list[Judged]) -> list[Judged]:
        """Judge what was left out because of an earlier step that has turned out to be right."""
        first = min((one.step for one in judged if one.status is Status.DIFFERENT), default=None)
        return [
            one
            if one.is_judged or (first is not None and first < one.step)
            else self._judge(one.item, one.step - 1)
            for one in judged
        ]

    def _initial(self, item: Item) -> Judged:
        """What is there before the first step must be the same bit for bit."""
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
            f"the ranks begin with other values than the reference: {metrics.mismatched} of "
            f"{metrics.numel} elements, {_dtype(value)} instead of {_dtype(item.reference)}"
        )
        if value.dtype is item.reference.dtype:
            reason = reason.rpartition(",")[0]
        finding = self._finding(item, 0, Status.DIFFERENT, reason)
        finding = msgspec.structs.replace(finding, metrics=metrics)
        return Judged(0, item, None, (finding,), self._wrong_ranks(item))

    def _judge(self, item: Item, number: int) -> Judged:
        lifted = self._lifted_items[number].get(item.path) if self._lifted_items else None
        faults = self._faults(item, lifted, number + 1)
        wrong = self._wrong_ranks(lifted or item) if faults else ()
        grave = [f for f in faults if f.status is not Status.DEGRADED]
        found = list(faults)
        if not grave:
            found += self._values(item, lifted, number)
        if self.reference.random:
            found = [_random(finding) for finding in found]
        self.runs.settled.add((number, item.path))
        return Judged(number + 1, item, lifted, tuple(found), wrong)

    # --- structure --------------------------------------------------------------------------------

    def _faults(self, item: Item, lifted: Item | None, step: int) -> list[Finding]:
        """What is wrong whatever the reference's values: no whole, or replicas that differ."""
        held = item.ranks
        if held.disagreement is not None:
            status, words = self._disagreement(held.disagreement, lifted, item)
            return [self._finding(item, step, status, words)]
        if held.fault:
            advice = "place it with a DTensor, or keep the reference's names and order of ranks"
            found = self._finding(item, step, Status.UNVERIFIED, held.fault, Aspect.STRUCTURE)
            return [msgspec.structs.replace(found, advice=advice)]
        return []

    def _disagreement(
        self, found: Disagreement, lifted: Item | None, item: Item
    ) -> tuple[Status, str]:
        """A difference by rounding is a fault too: replicas drift apart from there."""
        apart = lifted.ranks.disagreement if lifted is not None else None
        value = next(iter(item.ranks.by_rank.values()))
        if not is_inexact(value) or item.kind == INITIAL:
            return Status.DIFFERENT, found.words
        if lifted is None:
            rounding = found.relative <= ROUNDINGS * criterion.unit_roundoff(value.dtype)
        else:
            limit = max(ROUNDING_IN_FLOAT64, ROUNDINGS * self.runs.lift_unit)
            rounding = apart is None or apart.relative <= limit
        if rounding:
            return Status.DEGRADED, f"{found.words}: by rounding, which grows from step to step"
        return Status.DIFFERENT, found.words

    def _wrong_ranks(self, item: Item) -> tuple[int, ...]:
        """The ranks whose replica is not the reference's; empty where that is all or unknown."""
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

    def _values(self, item: Item, lifted: Item | None, number: int) -> list[Finding]:
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
        evidence = ItemEvidence(self.runs, item.path, number, lifts=lifted is not None)
        if gross is None:
            path = f"step {step}: {item.path}"
            findings, _ = check_pair(path, reference, candidate, Checks(), evidence)
        findings = self._explained(findings, item, (reference, candidate), evidence)
        missing = ", ".join(map(str, item.ranks.without))
        if missing and any(not f.status.passes() for f in findings):
            told = f"no gradient arrives on rank{'s' * (len(item.ranks.without) > 1)} {missing}: "
            findings = [msgspec.structs.replace(f, reason=f"{told}{f.reason}") for f in findings]
        return findings

    def _explained(
        self,
        findings: list[Finding],
        item: Item,
        pair: tuple[Tensor, Tensor],
        evidence: ItemEvidence,
    ) -> list[Finding]:
        """With what kind of wrong they are; what is particular to a plan is found out later."""
        from paritas.diagnosis.cases import Context

        held = [one for one in item.ranks.by_rank.values() if one.shape == pair[0].shape]
        context = Context(world=dict(self.program.mesh), parts=tuple(held))
        return self._explainer.explain(findings, *pair, evidence, context)

    def _plainly(self, reference: Tensor, candidate: Tensor, lifted: Item | None) -> Status | None:
        """How it ended, where no noise has to be measured for that."""
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

    def _gross(self, item: Item, lifted: Item | None, number: int) -> Finding | None:
        """A difference in float64 that no rounding makes; None where that is not plain."""
        if lifted is None or not is_inexact(lifted.reference):
            return None
        whole: Any = lifted.reference
        split = lifted.ranks.value
        if split is None or split.shape != whole.shape or not bool(torch.isfinite(whole).all()):
            return None
        apart, typical = criterion.rms_difference(split, whole), criterion.rms(whole)
        if not apart > GROSS_SHARE * typical:
            return None
        self.runs.arbiter()
        unit = self.runs.lift_unit
        shakes = GROSS_SHAKES if unit == UNIT_F64 else NARROW_SHAKES
        spread = self.runs.spread(unit, number, item.path, 1)
        if spread is None or not apart > shakes * criterion.rms(spread):
            return None
        share = f"{apart / typical:.2g} times the typical value" if typical else f"{apart:.3g}"
        finding = self._finding(
            item,
            number + 1,
            Status.DIFFERENT,
            f"in float64, where rounding is negligible, it is off by {share}",
        )
        return msgspec.structs.replace(finding, metrics=pair_metrics(whole, split))

    def _finding(
        self, item: Item, step: int, status: Status, reason: str, aspect: Aspect = Aspect.VALUE
    ) -> Finding:
        some = item.reference if item.reference is not None else item.ranks.value
        return Finding(
            path=f"step {step}: {item.path}" if step else item.path,
            aspect=aspect,
            status=status,
            reason=reason,
            dtype=None if some is None else _dtype(some),
            shape=None if some is None else tuple(some.shape),
        )


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _random(finding: Finding) -> Finding:
    """With dropout the ranks draw other numbers: what differs by that says nothing."""
    if finding.status.passes():
        return finding
    reason = f"depends on random numbers, which ranks draw differently ({finding.reason})"
    return msgspec.structs.replace(
        finding,
        status=Status.UNVERIFIED,
        reason=reason,
        advice=_EVAL,
        metrics=None,
        diagnosis=None,
    )
