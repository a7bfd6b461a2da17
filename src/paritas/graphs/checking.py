"""One call of a graph, checked: whole, and split in each way that is asked for."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.global_state import quietly
from paritas.errors import UsageError, in_one_line
from paritas.graphs.calls import (
    CallValues,
    draw_values,
    key_of,
    signature_of,
    tensor_values,
    ungraded,
)
from paritas.graphs.operators import bytes_words, capped, foretold, most_bytes, subject_of
from paritas.partition.annotation import Annotation, Option, expand
from paritas.partition.library import annotation_for
from paritas.partition.library.registry import is_registered
from paritas.partition.recipe_checks import Wholes, confirmation, drifting, examine_recipe
from paritas.placement.recipes import OperatorCall, Recipe, moved
from paritas.results.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.results.graph_reports import (
    CallOutcome,
    Confirmation,
    OperatorResult,
    OptionResult,
)
from paritas.results.items import ItemKind, harness
from paritas.results.placements import Partial, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.graphs.calls import GraphCall, GraphSettings
    from paritas.graphs.operators import GraphSubject
    from paritas.partition.recipe_checks import ExaminedRecipe
    from paritas.partition.runner import OperatorRun
    from paritas.results.graph_reports import RuleOrigin


# --- The ways to split a call: claimed, known, found by running -----------------------------------


@dataclasses.dataclass(frozen=True)
class SplitOption:
    """One way to split a call over a number of ranks.

    Attributes:
        idx: the first tensor that is split, by position: the inputs, then the outputs.
        dim: its dimension.
        split: what is split, in the words of the rule.
        rule: the annotation.
        even: whether all ranks have equal parts.
    """

    idx: int
    dim: int
    split: str
    rule: str
    origin: RuleOrigin
    recipe: Recipe
    even: bool = True


@dataclasses.dataclass(frozen=True)
class Offer:
    """What there is to check of a call over a number of ranks.

    Attributes:
        options: the splits, even ones first.
        left_out: what could not be split, and why.
        missing: sources that know no rule.
        fault: why an annotation of the graph's or the user's is wrong before anything is run.
        faulty: which of the two.
    """

    options: tuple[SplitOption, ...] = ()
    left_out: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    fault: str = ""
    faulty: RuleOrigin = "declared"


def annotation_of(
    name: str, call: OperatorCall, declared: str | Recipe | None, settings: GraphSettings
) -> Annotation | None:
    """The rule that says which lengths belong together; None where none fits."""
    if isinstance(declared, Recipe):
        return None
    asked = _rule_sources(declared, settings)
    try:
        if "declared" in asked and declared is not None:
            annotation: Annotation | None = Annotation.parse(declared)
        else:
            annotation = annotation_for(name, call.args, call.kwargs)
        if annotation is not None:
            annotation.check(call)
    except (UsageError, RuntimeError):  # a rule may look at values, and here there are none
        return None
    return annotation


def offers(
    name: str,
    call: OperatorCall,
    declared: str | Recipe | None,
    settings: GraphSettings,
    ranks: int,
) -> Offer:
    """Everything that is asked for, each split once, under the first source that has it."""
    if isinstance(declared, Recipe):
        return Offer((option_of(declared, call),))
    found: dict[Any, SplitOption] = {}
    left: list[str] = []
    missing: list[str] = []
    for source in _rule_sources(declared, settings):
        try:
            if source == "discover":
                options = list(_discovered_splits(call, ranks, missing))
            else:
                rule = _find_rule(source, name, call, declared, missing)
                options = [] if rule is None else list(_annotated_splits(*rule, call, ranks, left))
        except UsageError as error:
            if source == "declared":
                return Offer(fault=str(error))
            if source == "library" and _is_claimed(name, call):
                return Offer(fault=str(error), faulty="registered")
            missing.append(str(error))
            continue
        for option in options:
            found.setdefault(_recipe_meaning(option.recipe, call), option)
    even_first = sorted(found.values(), key=lambda option: not option.even)
    return Offer(tuple(even_first), tuple(dict.fromkeys(left)), tuple(missing))


def _rule_sources(declared: str | None, settings: GraphSettings) -> tuple[str, ...]:
    if settings.options is None:
        return ("declared",) if declared is not None else ("library",)
    if settings.options == "all":
        return ("declared", "library", "discover")
    return (settings.options,)


def _find_rule(
    source: str, name: str, call: OperatorCall, declared: str | None, missing: list[str]
) -> tuple[Annotation, RuleOrigin] | None:
    if source == "declared":
        if declared is not None:
            return Annotation.parse(declared), "declared"
        missing.append("the graph declares no split of it; --options library looks for a rule")
        return None
    known = annotation_for(name, call.args, call.kwargs) or annotation_for(
        call.function, call.args, call.kwargs
    )
    if known is not None:
        return known, "registered" if _is_claimed(name, call) else "library"
    hint = "--options discover looks for one"
    missing.append(f"the library has no rule for such a call of {name}; {hint}")
    return None


def _is_claimed(name: str, call: OperatorCall) -> bool:
    """Whether the rule is the user's own: one that does not fit is as wrong as the graph's."""
    return is_registered(name) or is_registered(call.function)


def _annotated_splits(
    annotation: Annotation, origin: RuleOrigin, call: OperatorCall, ranks: int, left: list[str]
) -> Iterator[SplitOption]:
    expansion = expand(annotation.signature, call)
    options = annotation.options(call)
    for option in options:
        dims = expansion.operands[option.idx].dims or ()
        identifier = expansion.first_factor(dims[option.dim]).name
        try:
            recipe = annotation.recipe(call, Option(option.idx, option.dim, ranks))
        except UsageError as error:
            left.append(str(error).rpartition("`: ")[2] or str(error))
            continue
        length = expansion.lengths.get(identifier)
        even = length is None or length % ranks == 0
        if not even and Partial("avg") in recipe.outputs:
            left.append(
                f"{identifier} has length {length}: {ranks} ranks would have unequal parts, whose "
                "means do not average to that of the whole"
            )
            continue
        yield SplitOption(
            option.idx,
            option.dim,
            f"split by {identifier}",
            annotation.text,
            origin,
            recipe,
            even=even,
        )
    if not options:
        why = [f"{name} {reason}" for name, reason in expansion.frozen.items() if name.isalnum()]
        told = ", ".join(why) or "no dimension has a name"
        left.append(f"`{annotation.text}` lets nothing be split: {told}")


def _discovered_splits(call: OperatorCall, ranks: int, missing: list[str]) -> Iterator[SplitOption]:
    from paritas.partition.discovery import discover_splits

    right = [one for one in discover_splits(call, ranks) if one.backward is not False]
    for one in right:
        idx, dim = _first_split(one.recipe, call)
        words = one.recipe.split_words
        yield SplitOption(
            idx, dim, words, str(one.annotation or ""), "discovered", one.recipe, even=True
        )
    if not right:
        missing.append(f"running {call.name} over {ranks} ranks shows no split to be right")


def option_of(recipe: Recipe, call: OperatorCall) -> SplitOption:
    """A recipe as it is: nobody claims of it that the parts are equal."""
    idx, dim = _first_split(recipe, call)
    return SplitOption(idx, dim, recipe.split_words, recipe.words or "a recipe", "declared", recipe)


def _first_split(recipe: Recipe, call: OperatorCall) -> tuple[int, int]:
    """Which tensor a recipe splits first, and along which dimension."""
    places = [*range(len(call.args)), *call.kwargs]
    for at, place in enumerate(places):
        placement = recipe.placement(place)
        if isinstance(placement, Shard):
            return at, placement.dim
    for at, combine in enumerate(recipe.outputs):
        if isinstance(combine, Shard):
            return len(places) + at, combine.dim
    return 0, 0


def _recipe_meaning(recipe: Recipe, call: OperatorCall) -> Any:
    """What a recipe does, whatever it is called and whether it names what it leaves whole."""
    places = [*range(len(call.args)), *call.kwargs]
    inputs = tuple(recipe.placement(place) for place in places)
    return inputs, recipe.outputs, frozenset(recipe.numbers)


# --- What a check compared, in a few figures and words: losses, gradients, the gravest finding ----

# A gradient is a multiple of another if so little of it is left over.
_LEFT_OVER = 1e-6
# A factor is told as a number of the whole's if it is so near to it.
_NEAR = 1e-4
_LONGEST = 400


def sum_of_results(seen: OperatorRun | None) -> float | None:
    """The sum of all floating results; None where there is none, or the run failed."""
    if seen is None or seen.error is not None:
        return None
    sums = [
        float(value.detach().sum(dtype=torch.float64))
        for item, value in seen.results.items()
        if item.kind is ItemKind.OUTPUT
        and isinstance(value, torch.Tensor)
        and value.is_floating_point()
    ]
    return sum(sums) if sums else None


def gradient_words(examined: ExaminedRecipe) -> str:
    """`2 equal; gradient of args[1]: different, 2x`; empty where no gradient was compared."""
    verdict = examined.verdict
    found = [one for one in verdict.findings if one.item.kind is ItemKind.GRADIENT]
    whole = [one for one in verdict.findings if one.item.kind is ItemKind.GRADIENTS]
    bad = [one for one in found if not one.status.passes(strict=True)]
    told = [f"{len(found) - len(bad)} equal"] if len(found) > len(bad) else []
    for one in bad:
        factor = _factor(examined, one)
        told.append(f"{one.path}: {one.status}{', ' * bool(factor)}{factor}")
    told += [f"{one.status}: {one.reason}" for one in whole]
    if not told:
        runs = () if examined.lifted is None else examined.lifted[0].gradients
        values = [value for gradients in runs for value in gradients.values()]
        unused = bool(values) and all(value is None for value in values)
        return "none: nothing depends on the arguments" if unused else ""
    return "; ".join(told)


def _factor(examined: ExaminedRecipe, finding: Finding) -> str:
    """By what the ranks' gradient is the whole's, if it is a multiple of it: `2x`."""
    if examined.lifted is None or finding.status is not Status.DIFFERENT:
        return ""
    whole, split = examined.lifted
    factors: list[float] = []
    for one, other in zip(whole.gradients, split.gradients, strict=False):
        expected, got = one.get(finding.item), other.get(finding.item)
        if expected is None:
            return ""
        if got is None:
            return "no gradient arrives"
        factor = _multiple(expected, got)
        if factor is None:
            return ""
        factors.append(factor)
    if not factors or max(factors) - min(factors) > _NEAR * abs(factors[0]):
        return ""
    return "no gradient arrives" if factors[0] == 0 else f"{factors[0]:.4g}x"


def _multiple(expected: Tensor, got: Tensor) -> float | None:
    if expected.shape != got.shape or expected.is_complex() or got.is_complex():
        return None
    expected, got = expected.double(), got.double()
    size = float((expected * expected).sum())
    if not size:
        return None
    factor = float((expected * got).sum()) / size
    left = float(torch.linalg.vector_norm(got - factor * expected))
    return factor if left <= _LEFT_OVER * float(torch.linalg.vector_norm(got)) else None


def reason_of(verdict: Verdict) -> str:
    """Why a verdict does not pass: its gravest finding, and how many others there are."""
    if verdict.passed:
        return ""
    if not verdict.failures:
        return "nothing was compared"
    worst = verdict.failures[0]
    parts = [worst.reason or f"is {worst.status}"]
    if worst.diagnosis is not None and worst.diagnosis.sentence:
        parts.append(worst.diagnosis.sentence)
    more = len(verdict.failures) - 1
    if more:
        parts.append(f"and {more} more")
    return f"{worst.path}: {'; '.join(parts)}"[:_LONGEST]


# --- The check of one call ------------------------------------------------------------------------

# Whatever goes wrong on the way becomes the result of this call; the rest of the graph goes on.

# A check changes the default dtype and the random state of the process: one at a time.
_ALONE = threading.RLock()
_MOST_NAMED = 3


def check_call(
    call: GraphCall, settings: GraphSettings, values: CallValues | None = None
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
            found = _check_subject(call, settings, values)
        except UsageError as error:
            found = _CallOutcome(CallOutcome.UNSUPPORTED, str(error))
        except Exception as error:  # noqa: BLE001  (becomes the result of this call)
            found = _CallOutcome(
                CallOutcome.UNSUPPORTED, f"checking it raised {in_one_line(error)}"
            )
    return OperatorResult(
        key=key_of(call, settings),
        operator=call.operator,
        signature=signature_of(call),
        sites=(call.site,),
        outcome=found.outcome,
        reason=found.reason,
        options=found.options,
        notes=found.notes,
        seconds=time.perf_counter() - started,
    )


@dataclasses.dataclass(frozen=True)
class _CallOutcome:
    outcome: CallOutcome
    reason: str = ""
    options: tuple[OptionResult, ...] = ()
    notes: tuple[str, ...] = ()


def _check_subject(
    call: GraphCall, settings: GraphSettings, values: CallValues | None
) -> _CallOutcome:
    if call.idle:
        return _CallOutcome(CallOutcome.NOTHING, call.idle)
    if call.obstacle:
        return _CallOutcome(CallOutcome.UNSUPPORTED, call.obstacle)
    subject = subject_of(call, settings.imports)
    if not any(value.shape for value in call.tensors()):
        given = "tensors without dimensions" if next(call.tensors(), None) else "no tensor"
        return _CallOutcome(CallOutcome.NOTHING, f"it is given {given}: there is nothing to split")
    subject, operator_call, notes = prepare_call(subject, call, settings, values)
    return _roll_up_splits(_Splits(subject, call, settings, operator_call), notes)


def prepare_call(
    subject: GraphSubject,
    call: GraphCall,
    settings: GraphSettings,
    values: CallValues | None = None,
) -> tuple[GraphSubject, OperatorCall, list[str]]:
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


def _shrunk(
    subject: GraphSubject, call: GraphCall, settings: GraphSettings
) -> tuple[GraphSubject, list[str]]:
    """With no dimension longer than the cap, if that is asked for and can be done."""
    if settings.cap is None:
        return subject, []
    annotation = annotation_of(subject.name, subject.hollow(), call.annotation, settings)
    declared = call.annotation is not None and settings.options in {None, "declared", "all"}
    small = capped(subject, call.outputs, settings, annotation, declared=declared)
    if small is None:
        return subject, []
    return small.subject, [small.note]


def _refuse_huge(subject: GraphSubject, call: GraphCall, settings: GraphSettings) -> None:
    """Raise `UsageError` if the values would take more memory than is allowed."""
    tensors = {one.name: one for one in tensor_values((subject.args, dict(subject.kwargs)))}
    given = sum(one.bytes for one in tensors.values())
    if (given + most_bytes(subject)) * max(settings.ranks) <= settings.memory:
        return
    made = foretold(subject)
    results = made.bytes if made is not None else sum(one.bytes for one in call.outputs)
    need = (given + results) * max(settings.ranks)
    if need > settings.memory:
        raise UsageError(
            f"its values take {bytes_words(given + results)}, {bytes_words(need)} with those of "
            f"{max(settings.ranks)} ranks, more than the {bytes_words(settings.memory)} allowed; "
            "--cap N checks it with shorter dimensions"
        )


def _operator_call(
    subject: GraphSubject, settings: GraphSettings, values: CallValues | None
) -> tuple[OperatorCall, list[str]]:
    """The call with its tensors."""
    if values is None:
        values = draw_values(subject.name, subject.args, subject.kwargs, settings.seed)
        note = f"values drawn with seed {settings.seed}"
    else:
        values = subject.spread(values)
        note = "values recorded from a run of the graph"
    # Devices that a graph names are those of another machine: everything is checked on this.
    device = torch.device(settings.device or "cpu")
    values = values.map(lambda item: moved(item, device))
    made = OperatorCall(
        subject.function,
        values.args,
        dict(values.kwargs),
        name=subject.name,
        without_gradient=ungraded(subject.name, subject.args, subject.kwargs),
        seed=settings.seed,
    )
    return made, [note]


# --- the splits -----------------------------------------------------------------------------------


class _Splits:
    """All splits of one call, over all numbers of ranks."""

    def __init__(
        self,
        subject: GraphSubject,
        call: GraphCall,
        settings: GraphSettings,
        operator_call: OperatorCall,
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
            identifier=option.recipe.identifier,
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
            reason = str(error) if isinstance(error, UsageError) else in_one_line(error)
            return {"status": Status.UNVERIFIED, "reason": f"the check raised: {reason}"}
        whole, split = examined.native or (None, None)
        return {
            "status": verdict.status,
            "reason": reason_of(verdict),
            "loss_whole": sum_of_results(whole),
            "loss_split": sum_of_results(split),
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
            for item, value in seen.results.items()
            if item.kind is ItemKind.OUTPUT and isinstance(value, torch.Tensor)
        ]
        said = [value.shape for value in self.call.outputs]
        if made == said:
            return []
        return [f"run here it gives {made}, where the graph has {said}"]

    def _wrong_claim(self, offer: Offer, ranks: int) -> OptionResult:
        """An annotation is none, or does not fit: the claim itself is wrong."""
        finding = Finding(
            item=harness("annotation"),
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
    item = harness(path)
    finding = Finding(item=item, aspect=Aspect.HARNESS, status=Status.UNVERIFIED, reason=reason)
    return Verdict(findings=(finding,))


def _roll_up_splits(splits: _Splits, notes: list[str]) -> _CallOutcome:
    """Roll the splits up into an outcome."""
    splits.check()
    results, left = splits.results, list(dict.fromkeys(splits.left_out))
    strict = splits.settings.strict
    if not results:
        why = list(dict.fromkeys([*splits.missing, *left]))
        return _CallOutcome(
            CallOutcome.NOTHING, _list_reasons(why) or "nothing can be split", (), tuple(notes)
        )
    if left:
        notes.append(f"left out: {_list_reasons(left)}")
    notes += splits.other_shapes()
    notes += dict.fromkeys(note for one in results for note in one.verdict.notes)
    bad = [one for one in results if not one.status.passes(strict=strict)]
    wrong = [one for one in bad if one.status is not Status.UNVERIFIED]
    if not bad:
        own = ", ".join(dict.fromkeys(splits.drifting))
        told = f"outputs and gradients are right; after the call each rank has its own {own}"
        return _CallOutcome(CallOutcome.VERIFIED, told if own else "", tuple(results), tuple(notes))
    gravest = max(wrong or bad, key=lambda one: one.status.gravity)
    where = f"{gravest.split}, {gravest.ranks} ranks"
    more = f"; {len(wrong or bad)} of {len(results)} splits" if len(results) > 1 else ""
    reason = f"{where}: {gravest.reason or gravest.status}{more}"
    outcome = CallOutcome.FAILED if wrong else CallOutcome.UNSUPPORTED
    return _CallOutcome(outcome, reason, tuple(results), tuple(notes))


def _list_reasons(reasons: list[str]) -> str:
    more = len(reasons) - _MOST_NAMED
    return "; ".join(reasons[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
