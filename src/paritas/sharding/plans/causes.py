"""The cause of what is wrong: the first item, the module where it starts, and the diagnosis."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec
import torch

from paritas.core.diagnosis.patterns.ranks import factor_of
from paritas.core.judging.pairs import Ruling, reconsider
from paritas.core.numerics.gates import Near
from paritas.core.results.findings import (
    Diagnosis,
    Finding,
    Origin,
    OriginKind,
    PatternKind,
    Status,
)
from paritas.core.results.items import ItemKind
from paritas.sharding.plans.cases import case_of_item, case_of_module, explain, swapped_shards
from paritas.sharding.plans.locating import (
    LOSS_MODULE,
    Location,
    WatchedStep,
    locate_backward,
    locate_forward,
    own_share,
    owner_of,
)

if TYPE_CHECKING:
    from paritas.sharding.plans.judging import Judge, Judged
    from paritas.sharding.plans.traces import Trace

_BATCH_NORM = (
    "batch normalisation takes its statistics over the samples of one rank: to use all samples, "
    "convert it with torch.nn.SyncBatchNorm.convert_sync_batchnorm"
)
GRADIENT_REDUCTION = "gradient reduction"
_AT_MODULES = "they are right at every module: they are reduced wrongly, or not at all"
_SAME_FACTOR = 1e-3
_LATE = "still the ranks' terms when backward ends, but reduced before the optimizer's step"


def find_cause(
    judge: Judge, wrong: list[Judged], reference: Trace | None, ranks: list[Trace]
) -> ParallelCause:
    """Find the cause of the first wrong item.

    Args:
        wrong: all wrong items, in order.
        reference: the run that watched its modules, as `ranks` did; None if there is none.
    """
    step = min(judged_item.step for judged_item in wrong)
    here = [judged_item for judged_item in wrong if judged_item.step == step]
    others = {}
    for wrong_item in here:
        case = case_of_item(judge, wrong_item)
        diagnosis = None if case is None else explain(case)
        if diagnosis is not None:
            others[(wrong_item.step, wrong_item.item.item.text)] = diagnosis
    watched_step = None
    if reference is not None:
        watched_step = WatchedStep.of(judge.program, reference, ranks, max(0, step - 1), judge.unit)
    kinds = {judged_item.item.kind for judged_item in here}
    if ItemKind.INITIAL in kinds:
        return _at_owner(here[0], watched_step, others)
    if kinds & {ItemKind.OUTPUT, ItemKind.LOSS}:
        return _forward_cause(judge, here, watched_step, others)
    if kinds & {ItemKind.TRAINING_GRADIENT, ItemKind.GRADIENT}:
        return _backward_cause(judge, here, watched_step, others)
    first = next(
        (
            judged_item
            for kind in (ItemKind.PARAMETER, ItemKind.BUFFER)
            for judged_item in here
            if judged_item.item.kind is kind
        ),
        here[0],
    )
    return _at_owner(first, watched_step, others)


def excuse_late_reductions(judge: Judge, judged: list[Judged]) -> list[Judged]:
    """Pass gradients that are reduced between backward and the optimizer's step.

    They are terms of the right gradient, and the parameter after the step is right.
    """
    stepped = {
        (stepped_item.step, stepped_item.item.name): stepped_item
        for stepped_item in judged
        if stepped_item.item.kind is ItemKind.PARAMETER and stepped_item.status.passes(strict=True)
    }
    judgeds: list[Judged] = []
    for judged_item in judged:
        after = stepped.get((judged_item.step, judged_item.item.name))
        if (
            judged_item.item.kind is ItemKind.TRAINING_GRADIENT
            and not judged_item.status.passes()
            and after is not None
        ):
            case = case_of_item(judge, judged_item)
            moved = case is not None and _is_moved_by_step(judge, after)
            why = explain(case) if moved and case is not None else None
            if why is not None and why.best and why.best.kind == PatternKind.MISSING_REDUCTION:
                findings = tuple(reconsider(judged_item.findings[:1], _rule_on_late_reduction))
                judgeds.append(
                    dataclasses.replace(judged_item, findings=findings, ranks=(), is_judged=True)
                )
                continue
        judgeds.append(judged_item)
    return judge.reconsider(judgeds)


@dataclasses.dataclass(frozen=True)
class ParallelCause:
    """Where a fault starts and what it is.

    Attributes:
        judged: the item that shows it first.
        origin: the module; None if it is unknown.
        diagnosis: which collective; None if the numbers do not show it.
        words: what was seen at the module.
        others: step and path -> diagnosis of other items.
    """

    judged: Judged
    origin: Origin | None
    diagnosis: Diagnosis | None
    words: str = ""
    others: dict[tuple[int, str], Diagnosis] = dataclasses.field(default_factory=dict)

    def explain_finding(self, finding: Finding) -> Finding:
        """The finding with origin, diagnosis and advice."""
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
        """What to do, if the class of the module shows it."""
        if self.origin is not None and self.origin.operator.startswith("BatchNorm"):
            return _BATCH_NORM
        return ""


def _rule_on_late_reduction(_: Finding) -> Ruling:
    return Ruling(Status.EQUIVALENT, _LATE, {"diagnosis": None})


def _is_moved_by_step(judge: Judge, stepped: Judged) -> bool:
    trace, name = judge.reference, stepped.item.name
    before = trace.initial if stepped.step == 1 else trace.steps[stepped.step - 2].parameters
    value = stepped.item.reference
    return value is not None and name in before and not torch.equal(before[name].local, value)


Explained = dict[tuple[int, str], Diagnosis]


def _item_key(judged: Judged) -> tuple[int, str]:
    return judged.step, judged.item.item.text


def _at_owner(judged: Judged, watched_step: WatchedStep | None, others: Explained) -> ParallelCause:
    """The cause in the module that owns the parameter or buffer."""
    path, kind = owner_of(judged.item.name, watched_step)
    origin = Origin(kind=OriginKind.MODULE, name=path, operator=kind, ranks=judged.ranks)
    return ParallelCause(judged, origin, others.get(_item_key(judged)), others=others)


def _forward_cause(
    judge: Judge, here: list[Judged], watched_step: WatchedStep | None, others: Explained
) -> ParallelCause:
    """The cause if outputs or the loss are wrong: the first module with a wrong output."""
    first_output = next(
        wrong_output
        for wrong_output in here
        if wrong_output.item.kind in {ItemKind.OUTPUT, ItemKind.LOSS}
    )
    location = None if watched_step is None else locate_forward(watched_step)
    if location is not None:
        cause = _cause_at_location(judge, first_output, location, others)
        stale = _stale_state(here, location.module, others)
        return cause if stale is None else dataclasses.replace(cause, diagnosis=stale)
    if first_output.item.kind is ItemKind.LOSS:
        # Every module is right, so the loss is computed wrongly.
        origin = Origin(kind=OriginKind.TRAINING, name=LOSS_MODULE, ranks=first_output.ranks)
        return ParallelCause(
            first_output, origin, others.get(_item_key(first_output)), others=others
        )
    return ParallelCause(first_output, None, others.get(_item_key(first_output)), others=others)


def _stale_state(here: list[Judged], module: str, others: Explained) -> Diagnosis | None:
    """The diagnosis of a stale buffer of the module, which makes its output wrong."""
    for wrong_item in here:
        diagnosis = others.get(_item_key(wrong_item))
        owns = (
            wrong_item.item.kind is ItemKind.BUFFER
            and owner_of(wrong_item.item.name, None)[0] == module
        )
        if (
            owns
            and diagnosis is not None
            and diagnosis.best is not None
            and diagnosis.best.kind == PatternKind.STALE
        ):
            return diagnosis
    return None


def _cause_at_location(
    judge: Judge, judged: Judged, location: Location, others: Explained
) -> ParallelCause:
    ranks = location.related.ranks
    case = case_of_module(judge, location, judged.step - 1)
    diagnosis = None if case is None else explain(case)
    swapped = swapped_shards(judge, location.module)
    if swapped is not None:
        diagnosis, ranks = swapped
    if diagnosis is None and location.module == LOSS_MODULE:
        diagnosis = others.get(_item_key(judged))
    kind = OriginKind.TRAINING if location.module == LOSS_MODULE else OriginKind.MODULE
    origin = Origin(kind=kind, name=location.module, operator=location.kind, ranks=ranks)
    return ParallelCause(judged, origin, diagnosis, location.words, others)


def _backward_cause(
    judge: Judge, here: list[Judged], watched_step: WatchedStep | None, others: Explained
) -> ParallelCause:
    """The cause if the forward pass is right and gradients are not."""
    wrong = [
        wrong_item for wrong_item in here if wrong_item.item.kind is ItemKind.TRAINING_GRADIENT
    ]
    wrong = wrong or [
        wrong_item for wrong_item in here if wrong_item.item.kind is ItemKind.GRADIENT
    ]
    location = None if watched_step is None else locate_backward(watched_step)
    if location is not None:
        inside = [
            wrong_gradient
            for wrong_gradient in wrong
            if owner_of(wrong_gradient.item.name, watched_step)[0] == location.module
        ]
        first_backward = inside[0] if inside else _first_backward(wrong, watched_step)
        return _cause_at_location(judge, first_backward, location, others)
    first_backward = _first_backward(wrong, watched_step)
    if not _all_are(judge, wrong):
        return _at_owner(first_backward, watched_step, others)
    factor = _common_factor(wrong, Near(judge.unit))
    if factor is not None:
        return _all_scaled(judge, wrong, watched_step, factor, others)
    if watched_step is None:
        return _at_owner(first_backward, watched_step, others)
    words = f"all {len(wrong)} gradients are wrong, but {_AT_MODULES}"
    origin = Origin(kind=OriginKind.TRAINING, name=GRADIENT_REDUCTION)
    return ParallelCause(
        first_backward, origin, others.get(_item_key(first_backward)), words, others
    )


def _all_scaled(
    judge: Judge,
    wrong: list[Judged],
    watched_step: WatchedStep | None,
    factor: float,
    others: Explained,
) -> ParallelCause:
    """The cause if every gradient is the same multiple, and right at every module."""
    wrong_item = wrong[0]
    diagnosis = others.get(_item_key(wrong_item))
    if diagnosis is not None and diagnosis.best is not None:
        sentence = f"every gradient is {diagnosis.best.sentence}"
        best = msgspec.structs.replace(diagnosis.best, sentence=sentence)
        diagnosis = Diagnosis(patterns=(best, *diagnosis.patterns[1:]))
    alike = f"all {len(wrong)} gradients have the same factor"
    if watched_step is None:
        words = f"{alike}: the loss is scaled, or every reduction of gradients"
        return ParallelCause(wrong_item, None, diagnosis, words, others)
    parts = judge.program.data_ranks
    if parts > 1 and own_share(watched_step) == 1 and abs(factor * parts - 1) < _SAME_FACTOR:
        # Divided once before backward, and again by an average at its end.
        words = f"{alike}, and are {parts} times too small before they reach any module"
        origin = Origin(kind=OriginKind.TRAINING, name=LOSS_MODULE)
        return ParallelCause(wrong_item, origin, diagnosis, words, others)
    words = f"{alike}, but {_AT_MODULES}"
    origin = Origin(kind=OriginKind.TRAINING, name=GRADIENT_REDUCTION)
    return ParallelCause(wrong_item, origin, diagnosis, words, others)


def _all_are(judge: Judge, wrong: list[Judged]) -> bool:
    """Whether all gradients are wrong, of more than one module."""
    step = judge.reference.steps[wrong[0].step - 1]
    present = [
        name
        for name, piece in step.gradients.items()
        if piece is not None and bool(piece.local.any())
    ]
    owners = {owner_of(wrong_item.item.name, None)[0] for wrong_item in wrong}
    return len(wrong) >= len(present) and len(owners) > 1


def _common_factor(wrong: list[Judged], near: Near) -> float | None:
    """The factor that all of them have in common; None if there is none."""
    factors: list[float] = []
    for wrong_item in wrong:
        item = wrong_item.best
        if item.reference is None or item.ranks.value is None or item.ranks.disagreement:
            return None
        factor = factor_of(item.ranks.value, item.reference, near)
        if factor is None:
            return None
        factors.append(factor)
    spread = max(factors) - min(factors)
    return factors[0] if spread <= 100 * near.reach * abs(factors[0]) else None


def _first_backward(wrong: list[Judged], watched_step: WatchedStep | None) -> Judged:
    """The gradient whose module comes first in backward."""
    if watched_step is None:
        return wrong[-1]
    places = {call.name: position for position, call in enumerate(watched_step.reference.modules)}
    return max(
        wrong,
        key=lambda wrong_item: places.get(owner_of(wrong_item.item.name, watched_step)[0], -1),
    )
