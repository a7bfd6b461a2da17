"""Of all that is wrong, the cause: which item shows it first, in which module, and what it is."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec
import torch

from paritas.numerics.diagnoses import Diagnosis
from paritas.numerics.findings import Finding, Origin, OriginKind, Status
from paritas.partition.plans.cases import case_of_item, case_of_module, swapped_shards
from paritas.partition.plans.explaining import explain
from paritas.partition.plans.items import BUFFER, GRADIENT, INITIAL, LOSS, OUTPUT, PARAMETER
from paritas.partition.plans.locating import (
    Location,
    Seen,
    locate_forward,
    owner_of,
)
from paritas.partition.plans.locating_back import locate_backward, own_share
from paritas.partition.plans.relating import Near, factor_of

if TYPE_CHECKING:
    from paritas.partition.plans.judging import Judge, Judged
    from paritas.partition.plans.traces import Trace

__all__ = ["GRADIENT_REDUCTION", "Cause", "excuse_late_reductions", "find_cause"]

_BATCH_NORM = (
    "batch normalisation takes its statistics over the samples of one rank: convert it with "
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm if all of them are meant"
)
GRADIENT_REDUCTION = "gradient reduction"
_AT_MODULES = "at every module they are right: they are reduced in a wrong way, or not at all"
_SAME_FACTOR = 1e-3
_LATE = "the ranks' terms when backward ends: reduced before the step, which is right"


@dataclasses.dataclass(frozen=True)
class Cause:
    """Where a fault starts and what it is.

    Attributes:
        judged: the item that shows it first.
        origin: the module; None if that is not known.
        diagnosis: which collective; None if the numbers do not show it.
        words: what was seen at the module.
        others: step and path -> what is plain about other items.
    """

    judged: Judged
    origin: Origin | None
    diagnosis: Diagnosis | None
    words: str = ""
    others: dict[tuple[int, str], Diagnosis] = dataclasses.field(default_factory=dict)

    def told(self, finding: Finding) -> Finding:
        """The finding with all that."""
        reason = f"{finding.reason}; {self.words}" if self.words else finding.reason
        return msgspec.structs.replace(
            finding,
            reason=reason,
            origin=self.origin,
            diagnosis=self.diagnosis or finding.diagnosis,
            advice=finding.advice or self.advice,
        )

    @property
    def advice(self) -> str:
        """What to do, where the kind of module says it."""
        if self.origin is not None and self.origin.operator.startswith("BatchNorm"):
            return _BATCH_NORM
        return ""


def find_cause(
    judge: Judge, wrong: list[Judged], reference: Trace | None, ranks: list[Trace]
) -> Cause:
    """What the first thing that is wrong comes from.

    Args:
        wrong: everything that is, in order.
        reference: the run that watched its modules, and `ranks` likewise; None if there is none.
    """
    step = min(one.step for one in wrong)
    here = [one for one in wrong if one.step == step]
    near = Near(judge.unit)
    others = {}
    for one in here:
        case = case_of_item(judge, one)
        found = None if case is None else explain(case, near)
        if found is not None:
            others[(one.step, one.item.path)] = found
    seen = None
    if reference is not None:
        seen = Seen.of(judge.program, reference, ranks, max(0, step - 1), judge.unit)
    kinds = {one.item.kind for one in here}
    if INITIAL in kinds:
        return _at_owner(here[0], seen, others)
    if kinds & {OUTPUT, LOSS}:
        return _forward(judge, here, seen, others, near)
    if GRADIENT in kinds:
        return _backward(judge, here, seen, others, near)
    first = next(
        (one for kind in (PARAMETER, BUFFER) for one in here if one.item.kind == kind), here[0]
    )
    return _at_owner(first, seen, others)


def excuse_late_reductions(judge: Judge, judged: list[Judged]) -> list[Judged]:
    """Gradients that are reduced between backward and the optimizer's step are no fault.

    They are terms of the right gradient, and the parameter that the step makes of them is right.
    """
    near = Near(judge.unit)
    stepped = {
        (one.step, one.item.name): one
        for one in judged
        if one.item.kind == PARAMETER and one.status.passes(strict=True)
    }
    found: list[Judged] = []
    for one in judged:
        after = stepped.get((one.step, one.item.name))
        if one.item.kind == GRADIENT and not one.status.passes() and after is not None:
            case = case_of_item(judge, one)
            told = None if case is None or not _moved(judge, after) else explain(case, near)
            if told is not None and told.best and told.best.kind == "missing reduction":
                finding = msgspec.structs.replace(
                    one.findings[0], status=Status.EQUIVALENT, reason=_LATE, diagnosis=None
                )
                found.append(
                    dataclasses.replace(one, findings=(finding,), ranks=(), is_judged=True)
                )
                continue
        found.append(one)
    return judge.reconsider(found)


def _moved(judge: Judge, stepped: Judged) -> bool:
    """Whether the step changed the parameter at all."""
    trace, name = judge.reference, stepped.item.name
    before = trace.initial if stepped.step == 1 else trace.steps[stepped.step - 2].parameters
    value = stepped.item.reference
    return value is not None and name in before and not torch.equal(before[name].local, value)


Explained = dict[tuple[int, str], Diagnosis]


def _key(one: Judged) -> tuple[int, str]:
    return one.step, one.item.path


def _at_owner(one: Judged, seen: Seen | None, others: Explained) -> Cause:
    """In the module that owns the parameter or buffer."""
    path, kind = owner_of(one.item.name, seen)
    origin = Origin(kind=OriginKind.MODULE, name=path, operator=kind, ranks=one.ranks)
    return Cause(one, origin, others.get(_key(one)), others=others)


def _forward(
    judge: Judge, here: list[Judged], seen: Seen | None, others: Explained, near: Near
) -> Cause:
    """Outputs or the loss are wrong: the first module that gave something else."""
    one = next(one for one in here if one.item.kind in {OUTPUT, LOSS})
    location = None if seen is None else locate_forward(seen)
    if location is not None:
        cause = _located(judge, one, location, others, near)
        stale = _stale_state(here, location.module, others)
        return cause if stale is None else dataclasses.replace(cause, diagnosis=stale)
    if one.item.kind == LOSS:
        # Every module is right: it is made of the right outputs in a wrong way.
        origin = Origin(kind=OriginKind.TRAINING, name=LOSS, ranks=one.ranks)
        return Cause(one, origin, others.get(_key(one)), others=others)
    return Cause(one, None, others.get(_key(one)), others=others)


def _stale_state(here: list[Judged], module: str, others: Explained) -> Diagnosis | None:
    """What a module gives is wrong because of a buffer of its own that was not updated."""
    for one in here:
        found = others.get(_key(one))
        owns = one.item.kind == BUFFER and owner_of(one.item.name, None)[0] == module
        if owns and found is not None and found.best is not None and found.best.kind == "stale":
            return found
    return None


def _located(judge: Judge, one: Judged, location: Location, others: Explained, near: Near) -> Cause:
    ranks = location.related.ranks
    case = case_of_module(judge, location, one.step - 1)
    diagnosis = None if case is None else explain(case, near)
    swapped = swapped_shards(judge, location.module)
    if swapped is not None:
        diagnosis, ranks = swapped
    if diagnosis is None and location.module == LOSS:
        diagnosis = others.get(_key(one))
    kind = OriginKind.TRAINING if location.module == LOSS else OriginKind.MODULE
    origin = Origin(kind=kind, name=location.module, operator=location.kind, ranks=ranks)
    return Cause(one, origin, diagnosis, location.words, others)


def _backward(
    judge: Judge, here: list[Judged], seen: Seen | None, others: Explained, near: Near
) -> Cause:
    """The forward pass is right, gradients are not."""
    wrong = [one for one in here if one.item.kind == GRADIENT]
    location = None if seen is None else locate_backward(seen)
    if location is not None:
        inside = [one for one in wrong if owner_of(one.item.name, seen)[0] == location.module]
        one = inside[0] if inside else _first_backward(wrong, seen)
        return _located(judge, one, location, others, near)
    one = _first_backward(wrong, seen)
    if not _all_are(judge, wrong):
        return _at_owner(one, seen, others)
    factor = _common_factor(wrong, near)
    if factor is not None:
        return _all_scaled(judge, wrong, seen, factor, others)
    if seen is None:
        return _at_owner(one, seen, others)
    words = f"all {len(wrong)} gradients, while {_AT_MODULES}"
    origin = Origin(kind=OriginKind.TRAINING, name=GRADIENT_REDUCTION)
    return Cause(one, origin, others.get(_key(one)), words, others)


def _all_scaled(
    judge: Judge, wrong: list[Judged], seen: Seen | None, factor: float, others: Explained
) -> Cause:
    """Every gradient is the same multiple of what it should be, and right at every module."""
    one = wrong[0]
    told = others.get(_key(one))
    if told is not None and told.best is not None:
        best = msgspec.structs.replace(
            told.best, sentence=f"every gradient is {told.best.sentence}"
        )
        told = Diagnosis(patterns=(best, *told.patterns[1:]))
    alike = f"all {len(wrong)} gradients alike"
    if seen is None:
        words = f"{alike}: the loss is scaled, or every reduction of them"
        return Cause(one, None, told, words, others)
    parts = judge.program.data_ranks
    if parts > 1 and own_share(seen) == 1 and abs(factor * parts - 1) < _SAME_FACTOR:
        # Divided once before the way back, and once more by an average at its end.
        words = f"{alike}, and {parts} times too small before they reach any module"
        return Cause(one, Origin(kind=OriginKind.TRAINING, name=LOSS), told, words, others)
    words = f"{alike}, while {_AT_MODULES}"
    origin = Origin(kind=OriginKind.TRAINING, name=GRADIENT_REDUCTION)
    return Cause(one, origin, told, words, others)


def _all_are(judge: Judge, wrong: list[Judged]) -> bool:
    """Whether all gradients are wrong, of more than one module."""
    step = judge.reference.steps[wrong[0].step - 1]
    present = [
        name
        for name, piece in step.gradients.items()
        if piece is not None and bool(piece.local.any())
    ]
    owners = {owner_of(one.item.name, None)[0] for one in wrong}
    return len(wrong) >= len(present) and len(owners) > 1


def _common_factor(wrong: list[Judged], near: Near) -> float | None:
    """The multiple that all of them are of what they should be."""
    factors: list[float] = []
    for one in wrong:
        item = one.best
        if item.reference is None or item.ranks.value is None or item.ranks.disagreement:
            return None
        factor = factor_of(item.ranks.value, item.reference, near)
        if factor is None:
            return None
        factors.append(factor)
    spread = max(factors) - min(factors)
    return factors[0] if spread <= 100 * near.reach * abs(factors[0]) else None


def _first_backward(wrong: list[Judged], seen: Seen | None) -> Judged:
    """The gradient whose module comes first on the way back."""
    if seen is None:
        return wrong[-1]
    places = {call.name: place for place, call in enumerate(seen.reference.modules)}
    return max(wrong, key=lambda one: places.get(owner_of(one.item.name, seen)[0], -1))
