"""Tell an approximation from a wrong parameter, by experiment.

Two programs may agree in float32 and differ in float64: one computes an exponential by a polynomial
that is as accurate as float32 is, or one has a wrong eps that is too small to be seen on the given
inputs. So other inputs of the same kind are tried, and other weights, and on each of them two
figures are compared with the noise of the native dtype: the error of the candidate's native run,
and the difference of the two programs in float64, which no rounding blurs. A wrong parameter shows
on some of them; an approximation stays below the noise on all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING

import msgspec
import torch

from paritas.core.execution.evidence import Demand
from paritas.core.execution.item_evidence import ItemEvidence
from paritas.core.execution.observation import RunOptions, storage_address
from paritas.core.execution.similar_inputs import SimilarCase, SimilarInputs
from paritas.core.execution.subjects import inspect_subject
from paritas.core.judging.failures import is_judging_only
from paritas.core.judging.pairs import Checks, Pair, Ruling, judge_pair, reconsider
from paritas.core.numerics import criterion
from paritas.core.numerics.automatic import nonfinite_mismatch
from paritas.core.numerics.bits import dtype_name, is_inexact
from paritas.core.numerics.criterion import UNIT_F32, Noise, smallest_step, unit_roundoff
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.precision.lifting import DtypeLog
from paritas.core.results.findings import Aspect, Finding, Status, Verdict
from paritas.core.results.items import Item, ItemKind
from paritas.core.torch_private.operators import Operator, checks_arguments
from paritas.verification.places import find_place, wrong_findings
from paritas.verification.similar_trials import (
    ENOUGH_ELEMENTS,
    SAME_FACTOR,
    ProgramRuns,
    Trial,
    TrialJudge,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from torch import Tensor

    from paritas.core.execution.subjects import Inputs, Subject, VerifyConfig
    from paritas.core.judging.failures import FailedPair
    from paritas.core.locating.places import FailedCall, Place

# A search that takes longer settles nothing.
MOST_SECONDS = 20.0
# Steps of the search that follow the largest difference so far, after all kinds were tried.
STEPS = 48
# The inputs from which these steps start.
_MOST_STARTS = 4
# A program of more operators than this is not the place where a difference starts: what reaches an
# operator deep inside cannot be chosen by its inputs.
MOST_OPERATORS = 24
# One factor that all elements share is a constant. A rounded constant is off by one rounding of
# float32 at most, whatever the dtype of the results: torch computes with it in float32.
MOST_FACTOR = 1.5
# A native error this many times over the limit of the reference's own error is visible, where no
# decision is within rounding: perturbed runs do not show a hundred times the noise.
PLAINLY = 100.0
_INTERRUPTED = "it was interrupted"
_MOST_WEIGHTS = 8


@dataclasses.dataclass(frozen=True)
class Settled:
    """A verdict after the experiment.

    Attributes:
        verdict: the given one, the one of an approximation, or the given one with what shows it.
        shown: what shows the difference, in words; empty if nothing does.
        inputs: the inputs of the whole programs that show it, if there are.
        is_visible: it is visible on the given inputs, so that there is nothing to find out.
        is_interrupted: Ctrl-C has ended the experiment.
    """

    verdict: Verdict
    shown: str = ""
    inputs: Inputs | None = None
    is_visible: bool = False
    is_interrupted: bool = False


def settle_and_locate(
    call: FailedCall, verdict: Verdict, location: Place | None = None
) -> tuple[Settled, Place | None]:
    """Settle a verdict, and find where the difference starts if there is one.

    What the whole program does not show, the place may: its inputs can be chosen.

    Args:
        call: the call that failed.
        verdict: its verdict.
        location: where earlier inputs have shown that it starts.
    """
    settled = settle_approximation(call, verdict, location)
    if location is not None or not wrong_findings(settled.verdict):
        return settled, location
    if settled.is_interrupted:
        call = dataclasses.replace(call, is_interrupted=True)
    location = find_place(call)
    is_open = not settled.shown and not settled.is_visible
    if location is not None and location.pair is not None and is_open:
        settled = settle_approximation(call, verdict, location)
    if location is not None and location.findings and settled.shown:
        first, *others = location.findings
        first = msgspec.structs.replace(first, reason=f"{first.reason}; {settled.shown}")
        location = dataclasses.replace(location, findings=(first, *others))
    return settled, location


def settle_approximation(
    call: FailedCall, verdict: Verdict, location: Place | None = None
) -> Settled:
    """Find out whether a candidate that differs in float64 only is an approximation.

    Args:
        call: the call that failed.
        verdict: its verdict.
        location: where the difference starts, if that is known. Otherwise the whole program is the
            place if it is small.
    """
    if is_judging_only() or not _is_only_lifted(verdict, call.config):
        return Settled(verdict)
    call.tell("looking for inputs on which the difference is visible natively")
    try:
        return _settle(call, verdict, location)
    except KeyboardInterrupt:
        return Settled(_with_note(verdict, _INTERRUPTED), is_interrupted=True)
    except Exception as error:  # noqa: BLE001  (the verdict stands; a note reports it)
        why = f"the search failed: {type(error).__name__}: {error}"[:200]
        return Settled(_with_note(verdict, why))
    finally:
        call.rng.restore()


def _is_only_lifted(verdict: Verdict, config: VerifyConfig) -> bool:
    """Whether everything that fails is a value that differs in the lifted run of the first call."""
    return (
        config.lift
        and config.verify_values
        and bool(verdict.failures)
        and all(
            finding.status is Status.DIFFERENT
            and finding.aspect is Aspect.VALUE
            and finding.lifted is not None
            and not finding.lifted.passed
            and finding.native is None
            and finding.item.call == 0
            for finding in verdict.failures
        )
    )


def _settle(call: FailedCall, verdict: Verdict, location: Place | None) -> Settled:
    pair = None if location is None else location.pair
    if location is not None and location.findings and (pair is None or len(location.findings) > 1):
        return Settled(_with_note(verdict, "it does not start in one place that can be called"))
    search = _Search.at(call, pair)
    obstacle = search if isinstance(search, str) else ""
    if any(
        _is_visible_by_own_error(call, failure, sure=not obstacle) for failure in verdict.failures
    ):
        return Settled(verdict, is_visible=True)
    if isinstance(search, str) or call.is_interrupted:
        return Settled(_with_note(verdict, obstacle or _INTERRUPTED))
    if _is_visible(call, verdict.failures[0]):
        return Settled(verdict, is_visible=True)
    native = _native_verdict(call, verdict.failures[0].item.inputs)
    if not native.passed:
        items = {finding.item for finding in verdict.failures}
        others = [finding for finding in native.failures if finding.item not in items]
        why = f"natively, {others[0].path} differs as well: {others[0].reason}" if others else ""
        return Settled(_with_note(verdict, why) if why else verdict, is_visible=True)
    outcome = search.run()
    if outcome.reason:
        return Settled(_with_note(verdict, outcome.reason))
    if outcome.shown is None:
        return Settled(_as_approximation(native, verdict, outcome))
    shown = outcome.shown
    is_whole = pair is None and not shown.weights
    inputs = shown.case.inputs if is_whole else None
    return Settled(_with_evidence(verdict, shown), shown.words, inputs)


def _is_visible_by_own_error(call: FailedCall, finding: Finding, *, sure: bool) -> bool:
    """Whether a native value is off by more than the reference's own error explains.

    It takes no run. With `sure`, only in a program without decisions, and if it is off by far more.
    """
    pair = _native_pair(call, finding.item)
    if pair is None or call.compared is None or (sure and not call.compared[0].is_smooth):
        return False
    value, candidate_value = pair
    arbiter = ItemEvidence(call.compared[0], finding.item.during(0, 0)).arbiter()
    if (
        arbiter is None
        or candidate_value.shape != value.shape
        or value.dtype is not candidate_value.dtype
    ):
        return False
    value, candidate_value = value.to(arbiter.device), candidate_value.to(arbiter.device)
    if nonfinite_mismatch(value, candidate_value) is not None:
        return not sure
    summed_unit = call.compared[0].summed_unit(finding.item.during(0, 0))
    unit = max(summed_unit, unit_roundoff(value.dtype))
    noise = Noise(
        unit=unit,
        step=smallest_step(value.dtype),
        inner=max(summed_unit, min(unit, UNIT_F32)),
        own=criterion.own_noise(value, arbiter),
        reference=value,
    )
    return criterion.score(candidate_value, arbiter, noise).score.excess > (
        PLAINLY if sure else 1.0
    )


def _is_visible(call: FailedCall, finding: Finding) -> bool:
    """Whether a value also fails natively, judged by the runs that are there already.

    Of the values that fail, one that does is enough. Otherwise, all are judged.
    """
    item = finding.item.during(0, 0)
    pair = _native_pair(call, item)
    if pair is None or call.compared is None:
        return False
    evidence, first, _ = call.compared
    demand = Demand()  # perturbed runs leave out what is settled
    demand.settled |= {(0, other) for other, _ in first.items() if other != item}
    about = ItemEvidence(evidence, item, demand=demand)
    findings, _ = judge_pair(Pair(item, *pair, about), Checks(checkers=call.config.checkers))
    return not all(native_finding.status.passes() for native_finding in findings)


def _native_pair(call: FailedCall, item: Item) -> tuple[Tensor, Tensor] | None:
    """The value of both sides in their first call, if both have one."""
    if call.compared is None:
        return None
    left, right = (observation.value(item.during(0, 0)) for observation in call.compared[1:])
    both = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
    return (left, right) if both else None


def _native_verdict(call: FailedCall, number: int) -> Verdict:
    """The verdict on the given inputs without a lifted run."""
    from paritas.verification.verify import Verification

    verification = Verification(
        call.reference, call.candidate, call.inputs, call.config, number, call.tell, lifts=False
    )
    verification.rng = call.rng
    conditions = call.conditions
    verification.conditions = dataclasses.replace(
        verification.conditions, upstream=conditions.upstream, gradients=conditions.gradients
    )
    return verification.run()


# --- What the verdict says ------------------------------------------------------------------------


def _with_note(verdict: Verdict, why: str) -> Verdict:
    note = f"whether the difference in float64 is only an approximation was not found out: {why}"
    return msgspec.structs.replace(verdict, notes=(*verdict.notes, note))


_ACCURACY = {
    dtype_name(dtype): dtype_name(torch.float32) for dtype in (torch.float16, torch.bfloat16)
}


def _as_approximation(native: Verdict, verdict: Verdict, outcome: _Outcome) -> Verdict:
    failed = {finding.item: finding for finding in verdict.failures}
    natives = sorted({finding.dtype or "" for finding in failed.values()})
    accuracy = " and ".join(dict.fromkeys(_ACCURACY.get(name, name) for name in natives))
    short = f"agrees to the accuracy of {accuracy}, not beyond"

    def rule_on_approximation(finding: Finding) -> Ruling | None:
        if finding.item not in failed or finding.aspect is not Aspect.VALUE:
            return None
        return Ruling(Status.EQUIVALENT, short, {"lifted": failed[finding.item].lifted})

    findings = tuple(reconsider(native.findings, rule_on_approximation))
    hidden_in = " and ".join(natives)
    note = (
        f"{short}: float64 shows a difference that none of {outcome.tried} other inputs of the "
        f"same kind{' and weights' if outcome.weights else ''} makes visible in {hidden_in} "
        f"({outcome.kinds}; at most {outcome.most:.2g} of the limit)"
    )
    if outcome.weaker:
        note += f"; natively less accurate than the reference for inputs {outcome.weaker}"
    notes = tuple(dict.fromkeys((*native.notes, note)))
    return msgspec.structs.replace(native, findings=findings, notes=notes)


def _with_evidence(verdict: Verdict, shown: Trial) -> Verdict:
    """Add to the finding which inputs show it."""
    shown_item = shown.item
    failures = verdict.failures
    about = next((f for f in failures if f.item.during(0, 0) == shown_item), failures[0])
    findings = tuple(
        msgspec.structs.replace(finding, reason=f"{finding.reason}; {shown.words}")
        if finding is about
        else finding
        for finding in verdict.findings
    )
    return msgspec.structs.replace(verdict, findings=findings)


# --- The search -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What a search found; without a reason and a trial, it is an approximation."""

    reason: str = ""
    shown: Trial | None = None
    tried: int = 0
    most: float = 0.0
    kinds: str = ""
    weaker: str = ""
    weights: bool = False


class _Search:
    """Looks for inputs and weights on which two programs differ visibly in their own dtype."""

    def __init__(
        self, call: FailedCall, reference: Subject, candidate: Subject, inputs: Inputs
    ) -> None:
        self.call = call
        self.reference, self.candidate, self.inputs = reference, candidate, inputs
        asks_second = any(f.item.kind is ItemKind.SECOND_GRADIENT for f in call.failures)
        self.config = dataclasses.replace(
            call.config,
            verify_second_call=False,
            verify_aliasing=False,
            verify_rng=False,
            verify_double_backward=call.config.verify_double_backward if asks_second else False,
        )
        self.limit = call.limit.shorten(MOST_SECONDS)
        self.trials: list[Trial] = []
        # What is beyond the noise in float64: from then on, inputs are only looked for to show it.
        self.beyond: Trial | None = None

    @classmethod
    def at(cls, call: FailedCall, pair: FailedPair | None) -> _Search | str:
        """A search at the place where the difference starts, or why there can be none."""
        reference, candidate, inputs = call.reference, call.candidate, call.inputs
        if pair is not None:
            reference = inspect_subject(pair.reference, "reference", "reference")
            candidate = inspect_subject(pair.candidate, "candidate", "candidate", reference.state)
            inputs = pair.inputs[0]
        search = cls(call, reference, candidate, inputs)
        return search._why_not(is_place=pair is not None) or search

    def _why_not(self, *, is_place: bool) -> str:
        if self.reference.is_compiled or self.reference.is_foreign:
            return "the reference is not a plain program of torch"
        if is_place:
            first = self._observe(SimilarCase("as given", self.inputs))
            evidence = None if first is None else first.evidence
        else:
            evidence = None if self.call.compared is None else self.call.compared[0]
        if evidence is None:
            return "the programs cannot be run alone"
        if len(evidence.dtypes) > 1:
            return "the program mixes floating dtypes"
        log = DtypeLog()
        evidence.run(RunOptions(watch=log, forward_once=True))
        if not is_place and len(log.calls) > MOST_OPERATORS:
            return (
                f"the reference calls {len(log.calls)} operators, and the one that differs is "
                "not known"
            )
        self.similar = SimilarInputs(
            self.inputs,
            self.config.seed,
            keeps_signs=True,
            keeps_ranges=not all(
                checks_arguments(func) for func, _ in log.calls if isinstance(func, Operator)
            ),
        )
        weights = _shared_weights(self.reference, self.candidate)
        if weights is None:
            return "the two sides do not have the same weights"
        self.weights = weights
        if not self.similar.free_paths and not weights:
            return "it has no inputs that may be any numbers"
        return ""

    def run(self) -> _Outcome:
        """Try all kinds, then follow the largest difference."""
        with contextlib.closing(self._all_trials()) as trials:  # closing it restores the weights
            return self._follow(trials)

    def _follow(self, trials: Iterator[Trial | None]) -> _Outcome:
        weaker = ""
        count, last = 0, 10**6
        for trial in trials:
            count += 1
            if self.limit.is_over and count <= self.planned:
                if self.beyond is not None:
                    break
                return _Outcome(reason=f"the time was over after {count} inputs")
            if trial is None:
                continue
            if trial.is_visible:
                return _Outcome(shown=trial)
            if trial.is_weaker:
                weaker = weaker or trial.case.name
            elif trial.ratio > 1 and self.beyond is None:
                self.beyond, last = trial, count + STEPS
            if count >= last:
                break
        beyond = self.beyond or self._with_same_factor()
        if beyond is not None:
            return _Outcome(shown=beyond)
        most = max((t.ratio for t in self.trials if not t.is_weaker), default=math.inf)
        if math.isinf(most):
            return _Outcome(reason="no other inputs could be tried")
        return _Outcome(
            tried=len(self.trials),
            most=most,
            kinds="scales, offsets, extremes, mixtures, other values",
            weaker=weaker,
            weights=bool(self.weights),
        )

    def _with_same_factor(self) -> Trial | None:
        """A trial whose results are off by one factor, which is that of most trials.

        A wrong constant is a factor everywhere. An approximation has one where a function is a
        straight line, and another error elsewhere.
        """
        measured = [(t, t.factor) for t in self.trials if t.factor is not None]
        off = [(t, by) for t, by in measured if abs(by) > MOST_FACTOR * UNIT_F32]
        for trial, factor in off:
            alike = sum(abs(by / factor - 1) < SAME_FACTOR for _, by in off)
            if alike >= ENOUGH_ELEMENTS and 2 * alike > len(measured):
                how = f"all values are off by one factor, {1 + factor:.9g}"
                return dataclasses.replace(trial, how=how, is_native=False)
        return None

    def _all_trials(self) -> Generator[Trial | None, None, None]:
        self.planned = 10**6
        similar_case = SimilarCase("as given", self.inputs)
        yield self._try(similar_case)
        for case in self.similar.over_whole_range():
            yield self._try(case)
        for names, by, words in _weight_changes(self.weights):
            with _scaled_weights([self.weights[name] for name in names], by):
                yield self._try(similar_case, words)
        self.planned = 0
        for _ in range(STEPS if self.similar.free_paths else 0):
            if self.limit.is_over:
                return
            usable = [t for t in self.trials if not t.weights and not t.is_weaker]
            best = sorted(usable, key=lambda t: -t.ratio)
            start = best[len(self.trials) % min(_MOST_STARTS, len(best))] if best else None
            if start is None:
                return
            step = self.similar.step_from(start.case.inputs, start.index)
            if step is not None:
                yield self._try(step)

    def _observe(self, case: SimilarCase, *, fresh: bool = False) -> ProgramRuns | None:
        from paritas.verification.verify import Verification

        reference, candidate = self.reference, self.candidate
        if fresh:  # their saved state has other weights
            reference = inspect_subject(reference.call, "reference", "reference")
            candidate = inspect_subject(candidate.call, "candidate", "candidate", reference.state)
        verification = Verification(
            reference, candidate, case.inputs, self.config, 0, lambda _: None, lifts=False
        )
        verification.rng = self.call.rng
        verdict = verification.run()
        if verification.compared is None:
            return None
        evidence, _, my_first = verification.compared
        return ProgramRuns(candidate, evidence, verdict, my_first)

    def _try(self, case: SimilarCase, weights: str = "") -> Trial | None:
        """Both programs on other inputs; None if the reference refuses them."""
        run = self._observe(case, fresh=bool(weights))
        if run is None or run.evidence.native[0].error is not None:
            return None
        if any(finding.status is Status.UNVERIFIED for finding in run.verdict.failures):
            return None
        judging = TrialJudge(run, case, weights, self.config.seed)
        trial = judging.trial() if self.beyond is None else judging.trial_to_show()
        self.trials.append(trial)
        return trial


# --- Weights --------------------------------------------------------------------------------------


def _shared_weights(reference: Subject, candidate: Subject) -> dict[str, list[Tensor]] | None:
    """The weights of the reference with those of the candidate; None if that lacks one."""
    tensors = candidate.state.tensors
    places = {storage_address(tensor) for tensor in tensors.values()}
    shared_weights: dict[str, list[Tensor]] = {}
    seen_addresses: set[int] = set()
    for name, tensor in reference.state.tensors.items():
        address = storage_address(tensor)
        if not is_inexact(tensor) or address in seen_addresses or not tensor.numel():
            continue
        seen_addresses.add(address)
        twin = tensors.get(name)
        if address in places:
            shared_weights[name] = [tensor]
        elif twin is not None and twin.dtype is tensor.dtype and bitwise_equal(tensor, twin):
            shared_weights[name] = [tensor, twin]
        else:
            return None
    return shared_weights


def _weight_changes(weights: dict[str, list[Tensor]]) -> Iterator[tuple[list[str], float, str]]:
    names = list(weights)
    powers = (-1, 1, -2, 2, -4, 4, -8, 8)
    for power in powers if names else ():
        yield names, 10.0**power, f"weights scaled by 1e{power}"
    for name in names[:_MOST_WEIGHTS] if len(names) > 1 else ():
        for power in powers[2:]:
            yield [name], 10.0**power, f"{name} scaled by 1e{power}"


@contextlib.contextmanager
def _scaled_weights(groups: list[list[Tensor]], by: float) -> Iterator[None]:
    tensors = [tensor for group in groups for tensor in group]
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data.mul_(by)
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.data.copy_(value)
