"""One call of a graph, checked: whole, and split in each way that is asked for.

Whatever goes wrong on the way becomes the result of this call; the rest of the graph goes on.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.quiet import quietly
from paritas.errors import UsageError
from paritas.graphs.calls import tensor_values
from paritas.graphs.operators.capping import capped
from paritas.graphs.operators.foretelling import bytes_words, foretold, most_bytes
from paritas.graphs.operators.losses import gradient_words, loss_of, reason_of
from paritas.graphs.operators.resolving import subject_of
from paritas.graphs.operators.rules import Offer, SplitOption, annotation_of, offers
from paritas.graphs.operators.signatures import key_of, signature_of
from paritas.graphs.operators.values import CallValues, draw_values, hollow, ungraded
from paritas.numerics.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.numerics.graph_reports import (
    Confirmation,
    OperatorResult,
    OptionResult,
    Outcome,
    Site,
)
from paritas.partition.checking import Wholes, drifting, examine_recipe
from paritas.partition.confirming import confirmation
from paritas.partition.recipes import OperatorCall
from paritas.partition.running.placing import moved
from paritas.partition.running.runner import OUTPUT

if TYPE_CHECKING:
    from paritas.graphs.calls import GraphCall
    from paritas.graphs.operators.resolving import Subject
    from paritas.graphs.settings import Settings

__all__ = ["check_call", "prepare"]

# A check changes the default dtype and the random state of the process: one at a time.
_ALONE = threading.RLock()
_MOST_NAMED = 3


def check_call(
    call: GraphCall, settings: Settings, values: CallValues | None = None
) -> OperatorResult:
    """Check one call of a graph.

    Args:
        values: what the call was given when the graph ran; otherwise fitting values are drawn.

    Returns:
        How it ended, with this call as its only site. Nothing that the operator raises gets out.
    """
    started = time.perf_counter()
    with _ALONE:
        try:
            found = _checked(call, settings, values)
        except UsageError as error:
            found = _Found(Outcome.UNSUPPORTED, str(error))
        except Exception as error:  # noqa: BLE001  (becomes the result of this call)
            found = _Found(Outcome.UNSUPPORTED, f"checking it raised {_words(error)}")
    return OperatorResult(
        key=key_of(call, settings),
        operator=call.operator,
        signature=signature_of(call),
        sites=(
            Site(
                position=call.position,
                node=call.name,
                source=call.source,
                code=call.code,
                module=call.module,
            ),
        ),
        outcome=found.outcome,
        reason=found.reason,
        options=found.options,
        notes=found.notes,
        seconds=time.perf_counter() - started,
    )


@dataclasses.dataclass(frozen=True)
class _Found:
    outcome: Outcome
    reason: str = ""
    options: tuple[OptionResult, ...] = ()
    notes: tuple[str, ...] = ()


def _checked(call: GraphCall, settings: Settings, values: CallValues | None) -> _Found:
    if call.idle:
        return _Found(Outcome.NOTHING, call.idle)
    if call.obstacle:
        return _Found(Outcome.UNSUPPORTED, call.obstacle)
    subject = subject_of(call, settings.imports)
    if not any(value.shape for value in call.tensors()):
        given = "tensors without dimensions" if next(call.tensors(), None) else "no tensor"
        return _Found(Outcome.NOTHING, f"it is given {given}: there is nothing to split")
    subject, operator_call, notes = prepare(subject, call, settings, values)
    return _ended(_Splits(subject, call, settings, operator_call), notes)


def prepare(
    subject: Subject, call: GraphCall, settings: Settings, values: CallValues | None = None
) -> tuple[Subject, OperatorCall, list[str]]:
    """What is run, with its tensors: capped if that is asked for, the same for the same settings.

    Returns:
        What is run, the call with its tensors, and notes about both.

    Raises:
        UsageError: no values can be drawn, or they would take too much memory.
    """
    notes: list[str] = []
    if values is None:
        subject, told = _shrunk(subject, call, settings)
        notes += told
    elif settings.cap is not None and any(
        n > settings.cap for t in call.tensors() for n in t.shape
    ):
        notes.append("not capped: recorded values are used as they are")
    _refuse_huge(subject, call, settings)
    operator_call, told = _operator_call(subject, settings, values)
    return subject, operator_call, [*notes, *told]


def _shrunk(subject: Subject, call: GraphCall, settings: Settings) -> tuple[Subject, list[str]]:
    """With no dimension longer than the cap, if that is asked for and can be done."""
    if settings.cap is None:
        return subject, []
    hollows = hollow(subject.args, subject.kwargs)
    bare = OperatorCall(subject.function, hollows.args, dict(hollows.kwargs), name=subject.name)
    annotation = annotation_of(subject.name, bare, call.annotation, settings)
    declared = call.annotation is not None and settings.options in {None, "declared", "all"}
    small = capped(subject, call.outputs, settings, annotation, declared=declared)
    if small is None:
        return subject, []
    return small.subject, [small.note]


def _refuse_huge(subject: Subject, call: GraphCall, settings: Settings) -> None:
    """Raise `UsageError` if the values would take more memory than is allowed."""
    given = sum(
        math.prod(value.shape) * value.dtype.itemsize
        for value in {
            t.name: t for t in tensor_values((subject.args, dict(subject.kwargs)))
        }.values()
    )
    if (given + most_bytes(subject)) * max(settings.ranks) <= settings.memory:
        return
    made = foretold(subject)
    results = made.bytes if made is not None else _declared_bytes(call)
    need = (given + results) * max(settings.ranks)
    if need > settings.memory:
        raise UsageError(
            f"its values take {bytes_words(given + results)}, {bytes_words(need)} with those of "
            f"{max(settings.ranks)} ranks, more than the {bytes_words(settings.memory)} allowed; "
            "--cap N checks it with shorter dimensions"
        )


def _declared_bytes(call: GraphCall) -> int:
    return sum(math.prod(value.shape) * value.dtype.itemsize for value in call.outputs)


def _operator_call(
    subject: Subject, settings: Settings, values: CallValues | None
) -> tuple[OperatorCall, list[str]]:
    """The call with its tensors."""
    if values is None:
        values = draw_values(subject.name, subject.args, subject.kwargs, settings.seed)
        note = f"values drawn with seed {settings.seed}"
    else:
        values = subject.spread(values)
        note = "values recorded from a run of the graph"
    device = torch.device(settings.device or "cpu")
    made = OperatorCall(
        subject.function,
        _on_device(values.args, device),
        _on_device(dict(values.kwargs), device),
        name=subject.name,
        without_gradient=ungraded(subject.name, subject.args, subject.kwargs),
        seed=settings.seed,
    )
    return made, [note]


def _on_device(tree: Any, device: torch.device) -> Any:
    """Devices that a graph names are those of another machine: everything is checked on this."""
    if isinstance(tree, dict):
        return {key: _on_device(item, device) for key, item in tree.items()}
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(_on_device(item, device) for item in tree)
    if isinstance(tree, list):
        return [_on_device(item, device) for item in tree]
    return moved(tree, device)


# --- the splits -----------------------------------------------------------------------------------


class _Splits:
    """All splits of one call, over all numbers of ranks."""

    def __init__(
        self, subject: Subject, call: GraphCall, settings: Settings, operator_call: OperatorCall
    ) -> None:
        self.subject = subject
        self.call = call
        self.settings = settings
        self.operator_call = operator_call
        self.results: list[OptionResult] = []
        self.left_out: list[str] = []
        self.missing: list[str] = []
        self.drifting: list[str] = []
        self.wholes = Wholes()

    def check(self) -> None:
        for ranks in self.settings.ranks:
            offer = offers(
                self.subject.name, self.operator_call, self.call.annotation, self.settings, ranks
            )
            if offer.fault:
                self.results.append(self._wrong_claim(offer, ranks))
                continue
            self.left_out += offer.left_out
            self.missing += offer.missing
            for option in offer.options:
                self._check(option, ranks)

    def _check(self, option: SplitOption, ranks: int) -> None:
        started, strict = time.perf_counter(), self.settings.strict
        result = OptionResult(
            idx=option.idx,
            dim=option.dim,
            split=option.split,
            rule=option.rule,
            origin=option.origin,
            ranks=ranks,
            **self._figures(option, ranks),
            seconds=time.perf_counter() - started,
        )
        found = result.confirmation.simulated if result.confirmation else result.status
        if option.origin == "declared" and not option.even and not found.passes(strict=strict):
            # A graph's annotation is a claim about equal parts.
            self.left_out.append(
                f"{option.split} over {ranks} ranks: the parts would not be equal, and so it is "
                f"{result.status}"
            )
            return
        self.drifting += drifting(result.verdict, self.operator_call, option.recipe)
        self.results.append(result)

    def _figures(self, option: SplitOption, ranks: int) -> dict[str, Any]:
        settings = self.settings
        try:
            with quietly():  # torch warns about parts that make no sense
                examined = examine_recipe(
                    self.operator_call,
                    option.recipe,
                    ranks,
                    seed=settings.seed,
                    strict=settings.strict,
                    wholes=self.wholes,
                )
                verdict, confirmation = self._confirmed(examined.verdict, option, ranks)
        except Exception as error:  # noqa: BLE001  (becomes the result of this split)
            reason = str(error) if isinstance(error, UsageError) else _words(error)
            return {"status": Status.UNVERIFIED, "reason": f"the check raised: {reason}"}
        whole, split = examined.native or (None, None)
        return {
            "status": verdict.status,
            "reason": reason_of(verdict),
            "loss_whole": loss_of(whole),
            "loss_split": loss_of(split),
            "gradients": gradient_words(examined),
            "verdict": verdict,
            "confirmation": confirmation,
        }

    def _confirmed(
        self, simulated: Verdict, option: SplitOption, ranks: int
    ) -> tuple[Verdict, Confirmation | None]:
        """With what real ranks say of it, if they are to be asked."""
        settings = self.settings
        if settings.confirm is None:
            return simulated, None
        try:
            real = confirmation(
                settings.confirm,
                self.operator_call,
                option.recipe,
                ranks,
                seed=settings.seed,
                strict=settings.strict,
                imports=settings.imports,
            )
        except UsageError as error:  # the ranks cannot be given it: simulated ones still say what
            real = _unverified(f"on {settings.confirm} ranks", str(error))
        merged = Verdict.merge([simulated, real])
        told = Confirmation(
            backend=settings.confirm, status=real.status, simulated=simulated.status
        )
        return merged, told

    def other_shapes(self) -> list[str]:
        """A note where the operator, run here, gives other shapes than the graph has."""
        seen = self.wholes.native
        known = self.subject.args == self.call.args  # not capped, not spread
        if seen is None or seen.error is not None or not known or not self.call.outputs:
            return []
        made = [
            tuple(value.shape)
            for path, value in seen.results.items()
            if path.startswith(OUTPUT) and isinstance(value, torch.Tensor)
        ]
        said = [value.shape for value in self.call.outputs]
        if made == said:
            return []
        return [f"run here it gives {made}, where the graph has {said}"]

    def _wrong_claim(self, offer: Offer, ranks: int) -> OptionResult:
        """An annotation is none, or does not fit: the claim itself is wrong."""
        finding = Finding(
            path="annotation",
            aspect=Aspect.STRUCTURE,
            status=Status.DIFFERENT,
            reason=offer.fault,
            advice="correct the annotation of this operator",
        )
        return OptionResult(
            idx=0,
            dim=0,
            split="annotation",
            rule=str(self.call.annotation or "") if offer.faulty == "declared" else "",
            origin=offer.faulty,
            ranks=ranks,
            status=Status.DIFFERENT,
            reason=offer.fault,
            verdict=Verdict(findings=(finding,), coverage=Coverage(compared=1)),
        )


def _unverified(path: str, reason: str) -> Verdict:
    finding = Finding(path=path, aspect=Aspect.HARNESS, status=Status.UNVERIFIED, reason=reason)
    return Verdict(findings=(finding,))


def _ended(splits: _Splits, notes: list[str]) -> _Found:
    """Roll the splits up into an outcome."""
    splits.check()
    results, left = splits.results, list(dict.fromkeys(splits.left_out))
    strict = splits.settings.strict
    if not results:
        why = list(dict.fromkeys([*splits.missing, *left]))
        return _Found(Outcome.NOTHING, _listed(why) or "nothing can be split", (), tuple(notes))
    if left:
        notes.append(f"left out: {_listed(left)}")
    notes += splits.other_shapes()
    notes += dict.fromkeys(note for one in results for note in one.verdict.notes)
    bad = [one for one in results if not one.status.passes(strict=strict)]
    wrong = [one for one in bad if one.status is not Status.UNVERIFIED]
    if not bad:
        own = ", ".join(dict.fromkeys(splits.drifting))
        told = f"outputs and gradients are right; after the call each rank has its own {own}"
        return _Found(Outcome.VERIFIED, told if own else "", tuple(results), tuple(notes))
    gravest = max(wrong or bad, key=lambda one: one.status.gravity)
    where = f"{gravest.split}, {gravest.ranks} ranks"
    more = f"; {len(wrong or bad)} of {len(results)} splits" if len(results) > 1 else ""
    reason = f"{where}: {gravest.reason or gravest.status}{more}"
    outcome = Outcome.FAILED if wrong else Outcome.UNSUPPORTED
    return _Found(outcome, reason, tuple(results), tuple(notes))


def _listed(reasons: list[str]) -> str:
    more = len(reasons) - _MOST_NAMED
    return "; ".join(reasons[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]:.200}" if lines else type(error).__name__
