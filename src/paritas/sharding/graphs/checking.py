"""Checks one call of a graph: the whole operator against each requested split."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.errors import UsageError, in_one_line
from paritas.core.operators.calls import OperatorCall
from paritas.core.placement.placement import Recipe, first_split, move_argument
from paritas.core.results.findings import (
    Aspect,
    Coverage,
    Finding,
    Status,
    Verdict,
    mismatch,
    unverified,
)
from paritas.core.results.items import ItemKind, Partial, harness
from paritas.core.results.wording import list_first
from paritas.core.torch_private.global_state import quietly
from paritas.sharding.graphs.calls import (
    CallValues,
    draw_values,
    key_of,
    signature_of,
    tensor_values,
    without_gradient_in,
)
from paritas.sharding.graphs.operators import (
    bytes_words,
    cap_lengths,
    most_bytes,
    predict_results,
    subject_of,
)
from paritas.sharding.graphs.rows import CallOutcome, Confirmation, OperatorResult, OptionResult
from paritas.sharding.operators.annotation import Annotation, CannotSplitError, Option, expand
from paritas.sharding.operators.library import annotation_for, annotation_of_call
from paritas.sharding.operators.library.registry import is_registered
from paritas.sharding.operators.recipe_checks import Wholes, confirmation, drifting, examine_recipe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.sharding.graphs.calls import GraphCall, GraphSettings
    from paritas.sharding.graphs.operators import GraphSubject
    from paritas.sharding.graphs.rows import RuleOrigin
    from paritas.sharding.operators.recipe_checks import ExaminedRecipe
    from paritas.sharding.operators.runner import OperatorRun
    from paritas.sharding.rows import RuleProof


# --- The check of one call ------------------------------------------------------------------------

# Any error becomes the result of this call; the rest of the graph is still checked.

# A check changes the default dtype and the random state of the process: run one at a time.
_ALONE = threading.RLock()
_MOST_NAMED = 3


def check_call(
    call: GraphCall, settings: GraphSettings, values: CallValues | None = None
) -> OperatorResult:
    """Check one call of a graph; exceptions of the operator become the result.

    Args:
        values: the arguments the call had when the graph ran; None draws suitable ones.
    """
    started = time.perf_counter()
    with _ALONE:
        try:
            outcome = _check_subject(call, settings, values)
        except UsageError as error:
            outcome = {"outcome": CallOutcome.UNSUPPORTED, "reason": str(error)}
        except Exception as error:  # noqa: BLE001  (becomes the result of this call)
            reason = f"checking it raised {in_one_line(error)}"
            outcome = {"outcome": CallOutcome.UNSUPPORTED, "reason": reason}
    return OperatorResult(
        key=key_of(call, settings),
        operator=call.operator,
        signature=signature_of(call),
        sites=(call.site,),
        **outcome,
        seconds=time.perf_counter() - started,
    )


def _check_subject(
    call: GraphCall, settings: GraphSettings, values: CallValues | None
) -> dict[str, Any]:
    """The outcome of a call, with its reason, its splits and notes."""
    if call.idle:
        return {"outcome": CallOutcome.NOTHING, "reason": call.idle}
    if call.obstacle:
        return {"outcome": CallOutcome.UNSUPPORTED, "reason": call.obstacle}
    subject = subject_of(call, settings.imports)
    if not any(value.shape for value in call.tensors()):
        received = "only 0-d tensors" if next(call.tensors(), None) else "no tensor"
        reason = f"it receives {received}: there is nothing to split"
        return {"outcome": CallOutcome.NOTHING, "reason": reason}
    subject, operator_call, notes = prepare_call(subject, call, settings, values)
    return _roll_up_splits(_Splits(subject, call, settings, operator_call), notes)


def prepare_call(
    subject: GraphSubject,
    call: GraphCall,
    settings: GraphSettings,
    values: CallValues | None = None,
) -> tuple[GraphSubject, OperatorCall, list[str]]:
    """The subject to run, its call with tensors, and notes about both.

    Dimensions are capped if the settings say so. The same settings give the same call.
    """
    notes: list[str] = []
    if settings.cap is not None and values is None:
        annotation = annotation_of(subject.name, subject.meta_call(), call.annotation, settings)
        declared = call.annotation is not None and settings.options in {None, "declared", "all"}
        subject, note = cap_lengths(subject, call.outputs, settings, annotation, declared=declared)
        notes += [note] if note else []
    elif settings.cap is not None and any(
        n > settings.cap for t in call.tensors() for n in t.shape
    ):
        notes.append("not capped: recorded values keep their shapes")
    _refuse_huge(subject, call, settings)
    operator_call, note = _operator_call(subject, settings, values)
    return subject, operator_call, [*notes, note]


def _refuse_huge(subject: GraphSubject, call: GraphCall, settings: GraphSettings) -> None:
    """Raise `UsageError` if the values would take more memory than allowed."""
    tensors = {
        tensor_value.name: tensor_value
        for tensor_value in tensor_values((subject.args, dict(subject.kwargs)))
    }
    argument_bytes = sum(tensor.bytes for tensor in tensors.values())
    if (argument_bytes + most_bytes(subject)) * max(settings.ranks) <= settings.memory:
        return
    predicted = predict_results(subject)
    results = (
        predicted.bytes if predicted is not None else sum(output.bytes for output in call.outputs)
    )
    need = (argument_bytes + results) * max(settings.ranks)
    if need > settings.memory:
        raise UsageError(
            f"its values take {bytes_words(argument_bytes + results)}, and "
            f"{bytes_words(need)} with those "
            f"of {max(settings.ranks)} ranks; {bytes_words(settings.memory)} are allowed. "
            "Use --cap N to check it with shorter dimensions"
        )


def _operator_call(
    subject: GraphSubject, settings: GraphSettings, values: CallValues | None
) -> tuple[OperatorCall, str]:
    if values is None:
        values = draw_values(subject.name, subject.args, subject.kwargs, settings.seed)
        note = f"values drawn with seed {settings.seed}"
    else:
        values = subject.spread(values)
        note = "values recorded in a run of the graph"
    # The graph may name devices of another machine: everything runs on this one.
    device = torch.device(settings.device or "cpu")
    values = values.map(lambda item: move_argument(item, device))
    operator_call = OperatorCall(
        subject.function,
        values.args,
        dict(values.kwargs),
        name=subject.name,
        without_gradient=without_gradient_in(subject.name, subject.args, subject.kwargs),
        seed=settings.seed,
    )
    return operator_call, note


# --- the splits -----------------------------------------------------------------------------------


@dataclasses.dataclass
class _Splits:
    """All splits of one call, over all numbers of ranks."""

    subject: GraphSubject
    call: GraphCall
    settings: GraphSettings
    operator_call: OperatorCall
    results: list[OptionResult] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)
    drifting: list[str] = dataclasses.field(default_factory=list)
    wholes: Wholes = dataclasses.field(default_factory=Wholes)

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
        simulated_status = result.confirmation.simulated if result.confirmation else result.status
        if (
            option.origin == "declared"
            and not option.even
            and not simulated_status.passes(strict=strict)
        ):
            # A declared annotation only claims that equal parts work.
            self.left_out.append(
                f"{option.split} over {ranks} ranks is {result.status}: the parts are not equal"
            )
            return
        self.drifting += drifting(result.verdict, self.operator_call, option.recipe)
        self.results.append(result)

    def _figures(self, option: SplitOption, ranks: int) -> dict[str, Any]:
        settings = self.settings
        try:
            with quietly():  # torch warns about odd parts
                examined = examine_recipe(
                    self.operator_call,
                    option.recipe,
                    ranks,
                    seed=settings.seed,
                    strict=settings.strict,
                    wholes=self.wholes,
                )
                verdict, confirmation = self._confirm_split(examined.verdict, option, ranks)
        except Exception as error:  # noqa: BLE001  (becomes the result of this split)
            reason = str(error) if isinstance(error, UsageError) else in_one_line(error)
            return {"status": Status.UNVERIFIED, "reason": f"the check raised: {reason}"}
        unsplit_run, split = examined.native or (None, None)
        proof = self._proof(option) if settings.prove else None
        if proof is not None:
            unproved = proof.finding()
            findings = (*verdict.findings, *([] if unproved is None else [unproved]))
            verdict = msgspec.structs.replace(verdict, findings=findings)
        return {
            "proof": proof,
            "status": verdict.status,
            "reason": reason_of(verdict),
            "loss_whole": sum_of_results(unsplit_run),
            "loss_split": sum_of_results(split),
            "gradients": gradient_words(examined),
            "verdict": verdict,
            "confirmation": confirmation,
        }

    def _proof(self, option: SplitOption) -> RuleProof:
        """What is known for all shapes; an annotation is needed."""
        from paritas.sharding.graphs.proving import prove_split

        recipe = option.recipe
        split = recipe.identifier or recipe.words
        proof_arguments = (self.operator_call, option.rule, option.idx, option.dim, split)
        return prove_split(*proof_arguments, self.settings)

    def _confirm_split(
        self, simulated: Verdict, option: SplitOption, ranks: int
    ) -> tuple[Verdict, Confirmation | None]:
        """Add the verdict of real ranks, if requested."""
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
        except UsageError as error:  # real ranks cannot run it: keep the simulated verdict
            real = Verdict(findings=(unverified(f"on {settings.confirm} ranks", str(error)),))
        merged = Verdict.merge([simulated, real])
        return merged, Confirmation(
            backend=settings.confirm, status=real.status, simulated=simulated.status
        )

    def other_shapes(self) -> list[str]:
        """A note if the operator returns other shapes here than in the graph."""
        native = self.wholes.native
        is_unchanged_call = (
            self.subject.args == self.call.args
        )  # neither capped nor an unpacked subscript
        if (
            native is None
            or native.error is not None
            or not is_unchanged_call
            or not self.call.outputs
        ):
            return []
        actual_shapes = [
            tuple(value.shape)
            for item, value in native.results.items()
            if item.kind is ItemKind.OUTPUT and isinstance(value, torch.Tensor)
        ]
        shapes = [value.shape for value in self.call.outputs]
        if actual_shapes == shapes:
            return []
        return [f"it returns {actual_shapes} here, but {shapes} in the graph"]

    def _wrong_claim(self, offer: Offer, ranks: int) -> OptionResult:
        """The result for an annotation that cannot be parsed or does not fit the call."""
        advice = "correct the annotation of this operator"
        finding = mismatch(harness("annotation"), Aspect.STRUCTURE, offer.fault, advice)
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


def _roll_up_splits(splits: _Splits, notes: list[str]) -> dict[str, Any]:
    splits.check()
    results, left_out = splits.results, list(dict.fromkeys(splits.left_out))
    strict = splits.settings.strict
    if not results:
        why = list(dict.fromkeys([*splits.missing, *left_out]))
        reason = list_first(why, _MOST_NAMED, between="; ") or "nothing can be split"
        return {"outcome": CallOutcome.NOTHING, "reason": reason, "notes": tuple(notes)}
    if left_out:
        notes.append(f"left out: {list_first(left_out, _MOST_NAMED, between='; ')}")
    notes += splits.other_shapes()
    notes += dict.fromkeys(note for split_result in results for note in split_result.verdict.notes)
    bad = [
        split_result for split_result in results if not split_result.status.passes(strict=strict)
    ]
    wrong = [split_result for split_result in bad if split_result.status is not Status.UNVERIFIED]
    if not bad:
        drifting_names = ", ".join(dict.fromkeys(splits.drifting))
        right = "outputs and gradients are right; after the call each rank has its own "
        outcome, reason = CallOutcome.VERIFIED, f"{right}{drifting_names}" if drifting_names else ""
    else:
        gravest = max(wrong or bad, key=lambda split_result: split_result.status.gravity)
        where = f"{gravest.split}, {gravest.ranks} ranks"
        more = f"; {len(wrong or bad)} of {len(results)} splits" if len(results) > 1 else ""
        reason = f"{where}: {gravest.reason or gravest.status}{more}"
        outcome = CallOutcome.FAILED if wrong else CallOutcome.UNSUPPORTED
    splits_and_notes = {"options": tuple(results), "notes": tuple(notes)}
    return {"outcome": outcome, "reason": reason, **splits_and_notes}


# --- The ways to split a call: declared, known to the library, discovered -------------------------


def offers(
    name: str,
    call: OperatorCall,
    declared: str | Recipe | None,
    settings: GraphSettings,
    ranks: int,
) -> Offer:
    """The splits from every requested source, each once, under the first source that has it."""
    if isinstance(declared, Recipe):
        return Offer((option_of(declared, call),))
    option_by_meaning: dict[Any, SplitOption] = {}
    left_out: list[str] = []
    missing: list[str] = []
    for source in _rule_sources(declared, settings):
        try:
            if source == "discover":
                options = list(_discovered_splits(call, ranks, missing))
            else:
                rule = _find_rule(source, name, call, declared, missing)
                options = (
                    [] if rule is None else list(_annotated_splits(*rule, call, ranks, left_out))
                )
        except UsageError as error:
            if source == "declared":
                return Offer(fault=str(error))
            if source == "library" and _is_claimed(name, call):
                return Offer(fault=str(error), faulty="registered")
            missing.append(str(error))
            continue
        for option in options:
            option_by_meaning.setdefault(_recipe_meaning(option.recipe, call), option)
    even_first = sorted(option_by_meaning.values(), key=lambda option: not option.even)
    return Offer(tuple(even_first), tuple(dict.fromkeys(left_out)), tuple(missing))


@dataclasses.dataclass(frozen=True)
class SplitOption:
    """One way to split a call over a number of ranks.

    Attributes:
        idx: position of the first tensor that is split; inputs come before outputs.
        dim: the dimension along which that tensor is split.
        split: what is split, in the words of the rule.
        rule: the annotation.
        even: whether all ranks get parts of equal size.
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
    """The splits of a call that can be checked over a number of ranks.

    Attributes:
        options: the splits, even ones first.
        left_out: what could not be split, and why.
        missing: why a source has no rule.
        fault: why an annotation of the graph or the user is wrong before anything runs.
        faulty: where that annotation comes from.
    """

    options: tuple[SplitOption, ...] = ()
    left_out: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    fault: str = ""
    faulty: RuleOrigin = "declared"


def annotation_of(
    name: str, call: OperatorCall, declared: str | Recipe | None, settings: GraphSettings
) -> Annotation | None:
    """The rule that says which lengths belong together; None if no rule fits."""
    if isinstance(declared, Recipe):
        return None
    try:
        if "declared" in _rule_sources(declared, settings) and declared is not None:
            annotation: Annotation | None = Annotation.parse(declared)
        else:
            annotation = annotation_for(name, call.args, call.kwargs)
        if annotation is not None:
            annotation.check(call)
    except (UsageError, RuntimeError):  # a rule may read values, and meta tensors have none
        return None
    return annotation


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
        missing.append("the graph declares no split for it; try --options library")
        return None
    annotation = annotation_of_call(call)
    if annotation is not None:
        return annotation, "registered" if _is_claimed(name, call) else "library"
    missing.append(f"the library has no rule for this call of {name}; try --options discover")
    return None


def _is_claimed(name: str, call: OperatorCall) -> bool:
    """Whether the user registered the rule: then a rule that does not fit is a failure."""
    return is_registered(name) or is_registered(call.function)


def _annotated_splits(
    annotation: Annotation, origin: RuleOrigin, call: OperatorCall, ranks: int, left_out: list[str]
) -> Iterator[SplitOption]:
    expansion = expand(annotation.signature, call)
    options = annotation.options(call)
    for option in options:
        dims = expansion.operands[option.idx].dims or ()
        identifier = expansion.first_factor(dims[option.dim]).name
        try:
            recipe = annotation.recipe(call, Option(option.idx, option.dim, ranks))
        except CannotSplitError as error:
            left_out.append(error.obstacle)
            continue
        except UsageError as error:
            left_out.append(str(error))
            continue
        length = expansion.lengths.get(identifier)
        even = length is None or length % ranks == 0
        if not even and Partial("avg") in recipe.outputs:
            left_out.append(
                f"{identifier} has length {length}: the average of the means of {ranks} unequal "
                "parts is not the mean of the whole"
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
        frozen = [f"{name} {reason}" for name, reason in expansion.frozen.items() if name.isalnum()]
        why = ", ".join(frozen) or "no dimension has a name"
        left_out.append(f"`{annotation.text}` allows no split: {why}")


def _discovered_splits(call: OperatorCall, ranks: int, missing: list[str]) -> Iterator[SplitOption]:
    from paritas.sharding.operators.discovery import discover_splits

    right = [
        discover_split
        for discover_split in discover_splits(call, ranks)
        if discover_split.backward is not False
    ]
    for discovered in right:
        rule, words = str(discovered.annotation or ""), discovered.recipe.split_words
        yield SplitOption(
            *first_split(discovered.recipe, call), words, rule, "discovered", discovered.recipe
        )
    if not right:
        missing.append(f"running {call.name} over {ranks} ranks found no correct split")


def option_of(recipe: Recipe, call: OperatorCall) -> SplitOption:
    """A single recipe as an option. Nothing claims that its parts are equal."""
    words, where = recipe.words or "a recipe", first_split(recipe, call)
    return SplitOption(*where, recipe.split_words, words, "declared", recipe)


def _recipe_meaning(recipe: Recipe, call: OperatorCall) -> Any:
    """What a recipe does, regardless of its name and of what it says is replicated."""
    places = [*range(len(call.args)), *call.kwargs]
    inputs = tuple(recipe.placement(position) for position in places)
    return inputs, recipe.outputs, frozenset(recipe.numbers)


# --- A check in a few figures: losses, gradients, the worst finding -------------------------------

# The largest relative residual at which a gradient counts as a multiple of another.
_LEFT_OVER = 1e-6
# How far the factors of several gradients may differ and still be reported as one.
_NEAR = 1e-4
_LONGEST = 400


def sum_of_results(operator_run: OperatorRun | None) -> float | None:
    """The sum of all floating-point results; None if there is none or the run failed."""
    if operator_run is None or operator_run.error is not None:
        return None
    sums = [
        float(value.detach().sum(dtype=torch.float64))
        for item, value in operator_run.results.items()
        if item.kind is ItemKind.OUTPUT
        and isinstance(value, torch.Tensor)
        and value.is_floating_point()
    ]
    return sum(sums) if sums else None


def gradient_words(examined: ExaminedRecipe) -> str:
    """`2 equal; gradient of args[1]: different, 2x`; empty if no gradient was compared."""
    verdict = examined.verdict
    findings = [finding for finding in verdict.findings if finding.item.kind is ItemKind.GRADIENT]
    overall_findings = [
        finding for finding in verdict.findings if finding.item.kind is ItemKind.GRADIENTS
    ]
    bad = [finding for finding in findings if not finding.status.passes(strict=True)]
    words = [f"{len(findings) - len(bad)} equal"] if len(findings) > len(bad) else []
    for bad_finding in bad:
        factor = _factor(examined, bad_finding)
        words.append(f"{bad_finding.path}: {bad_finding.status}{', ' * bool(factor)}{factor}")
    words += [f"{finding.status}: {finding.reason}" for finding in overall_findings]
    if not words:
        runs = () if examined.lifted is None else examined.lifted[0].gradients
        values = [value for gradients in runs for value in gradients.values()]
        unused = bool(values) and all(value is None for value in values)
        return "none: no result depends on the arguments" if unused else ""
    return "; ".join(words)


def _factor(examined: ExaminedRecipe, finding: Finding) -> str:
    """The multiple that the ranks' gradient is of the unsplit one, for example `2x`."""
    if examined.lifted is None or finding.status is not Status.DIFFERENT:
        return ""
    unsplit_run, split = examined.lifted
    factors: list[float] = []
    for gradient, other in zip(unsplit_run.gradients, split.gradients, strict=False):
        expected, got = gradient.get(finding.item), other.get(finding.item)
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
    residual_norm = float(torch.linalg.vector_norm(got - factor * expected))
    return factor if residual_norm <= _LEFT_OVER * float(torch.linalg.vector_norm(got)) else None


def reason_of(verdict: Verdict) -> str:
    """Why a verdict does not pass: its worst finding, and how many others there are."""
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
