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
import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas._torch.operators import Operator, checks_arguments
from paritas.checks.failures import is_judging_only
from paritas.checks.places import find_place, wrong_findings
from paritas.execution.evidence import Demand, Evidence
from paritas.execution.item_evidence import ItemEvidence
from paritas.execution.observation import RunOptions, input_tensors, storage_address
from paritas.execution.similar_inputs import SimilarCase, SimilarInputs
from paritas.execution.subject_runs import SubjectLift
from paritas.execution.subjects import inspect_subject
from paritas.numerics import criterion
from paritas.numerics.automatic import FEW_RUNS, judge_floats, nonfinite_mismatch
from paritas.numerics.bits import dtype_name, is_inexact
from paritas.numerics.criterion import UNIT_F32, Noise, smallest_step, unit_roundoff
from paritas.numerics.judge import Checks, check_pair
from paritas.numerics.metrics import bitwise_equal
from paritas.precision.lifting import DtypeLog
from paritas.results.findings import Aspect, Finding, Score, Status, Verdict
from paritas.results.items import Item, ItemKind

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from torch import Tensor

    from paritas.checks.failures import FailedPair
    from paritas.checks.places import FailedCall, Place
    from paritas.execution.observation import Observation
    from paritas.execution.subject_runs import SubjectProgram
    from paritas.execution.subjects import Inputs, Subject, VerifyConfig

# A search that takes longer settles nothing.
MOST_SECONDS = 20.0
# Steps of the search that follow the largest difference so far, after all kinds were tried.
STEPS = 48
# The inputs from which these steps start.
_MOST_STARTS = 4
# A program of more operators than this is not the place where a difference starts: what reaches an
# operator deep inside cannot be chosen by its inputs.
MOST_OPERATORS = 24
# How far two programs may differ in float64, in multiples of the native noise: an element, and the
# root mean square of a tensor or a slice. A last bit is two roundings, and noise one to two.
MOST_Z, MOST_RMS = 4.0, 1.5
# Above this share of a limit, noise is measured, not only taken from the reference's own error.
NEAR = 0.5
# One factor that all elements share is a constant. A rounded constant is off by one rounding of
# float32 at most, whatever the dtype of the results: torch computes with it in float32.
MOST_FACTOR = 1.5
# How much the factors of the elements may differ: an approximation of a function has one error
# here and another there, even where its arguments are close together.
SAME_FACTOR = 1e-3
# ... and results this many times larger than others, or they are all one value.
WIDE = 4.0
# A native error this many times over the limit of the reference's own error is visible, where no
# decision is within rounding: perturbed runs do not show a hundred times the noise.
PLAINLY = 100.0
# Roundings of a native value that may hide a difference.
HIDDEN = 4.0
# A candidate may overflow where the true value is above this share of the dtype's largest.
NEAR_OVERFLOW = 0.25
# The candidate's own rounding excuses a difference that is well below it in float64.
EXCUSED = 0.6
# Perturbed runs can show more rounding than there is. A difference that is this many times what
# there is on both sides is not rounding.
SYSTEMATIC = 2.0
# Where the reference itself is natively off by more than this share, it says little.
LOST = 0.1
# Many devices and libraries make zeros of denormal float32 and bfloat16 numbers. Those of float16
# are as large as values that matter.
MOST_DENORMAL = 1e-30
_ENOUGH_ELEMENTS = 8
_MOST_WEIGHTS = 8
_MOST_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Settled:
    """A verdict after the experiment.

    Attributes:
        verdict: the given one, the one of an approximation, or the given one with what shows it.
        shown: what shows the difference, in words; empty if nothing does.
        inputs: the inputs of the whole programs that show it, if there are.
        is_visible: it is visible on the given inputs, so that there is nothing to find out.
    """

    verdict: Verdict
    shown: str = ""
    inputs: Inputs | None = None
    is_visible: bool = False


def settle_and_locate(
    call: FailedCall, verdict: Verdict, place: Place | None = None
) -> tuple[Settled, Place | None]:
    """Settle a verdict, and find where the difference starts if there is one.

    What the whole program does not show, the place may: its inputs can be chosen.

    Args:
        call: the call that failed.
        verdict: its verdict.
        place: where earlier inputs have shown that it starts.
    """
    settled = settle_approximation(call, verdict, place)
    if place is not None or not wrong_findings(settled.verdict):
        return settled, place
    place = find_place(call)
    is_open = not settled.shown and not settled.is_visible
    if place is not None and place.pair is not None and is_open:
        settled = settle_approximation(call, verdict, place)
    if place is not None and place.findings and settled.shown:
        first, *others = place.findings
        first = msgspec.structs.replace(first, reason=f"{first.reason}; {settled.shown}")
        place = dataclasses.replace(place, findings=(first, *others))
    return settled, place


def settle_approximation(call: FailedCall, verdict: Verdict, place: Place | None = None) -> Settled:
    """Find out whether a candidate that differs in float64 only is an approximation.

    Args:
        call: the call that failed.
        verdict: its verdict.
        place: where the difference starts, if that is known. Otherwise the whole program is the
            place if it is small.
    """
    if is_judging_only() or not _is_only_lifted(verdict, call.config):
        return Settled(verdict)
    call.tell("looking for inputs on which the difference is visible natively")
    try:
        return _settle(call, verdict, place)
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


def _settle(call: FailedCall, verdict: Verdict, place: Place | None) -> Settled:
    pair = None if place is None else place.pair
    if place is not None and place.findings and (pair is None or len(place.findings) > 1):
        return Settled(_with_note(verdict, "it does not start in one place that can be called"))
    search = _Search.at(call, pair)
    obstacle = search if isinstance(search, str) else ""
    if any(_is_visible_by_own_error(call, one, sure=not obstacle) for one in verdict.failures):
        return Settled(verdict, is_visible=True)
    if isinstance(search, str):
        return Settled(_with_note(verdict, search))
    if _is_visible(call, verdict.failures[0]):
        return Settled(verdict, is_visible=True)
    native = _native_verdict(call, verdict.failures[0].item.inputs)
    if not native.passed:
        known = {finding.item for finding in verdict.failures}
        others = [finding for finding in native.failures if finding.item not in known]
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
    value, mine = pair
    arbiter = ItemEvidence(call.compared[0], finding.item.during(0, 0)).arbiter()
    if arbiter is None or mine.shape != value.shape or value.dtype is not mine.dtype:
        return False
    value, mine = value.to(arbiter.device), mine.to(arbiter.device)
    if nonfinite_mismatch(value, mine) is not None:
        return not sure
    unit = unit_roundoff(value.dtype)
    noise = Noise(
        unit=unit,
        step=smallest_step(value.dtype),
        inner=min(unit, UNIT_F32),
        own=criterion.own_noise(value, arbiter),
        reference=value,
    )
    return criterion.score(mine, arbiter, noise).score.excess > (PLAINLY if sure else 1.0)


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
    findings, _ = check_pair(item, *pair, Checks(checkers=call.config.checkers), about)
    return not all(one.status.passes() for one in findings)


def _native_pair(call: FailedCall, item: Item) -> tuple[Tensor, Tensor] | None:
    """The value of both sides in their first call, if both have one."""
    if call.compared is None:
        return None
    left, right = (one.value(item.during(0, 0)) for one in call.compared[1:])
    both = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
    return (left, right) if both else None


def _native_verdict(call: FailedCall, number: int) -> Verdict:
    """The verdict on the given inputs without a lifted run."""
    from paritas.checks.verify import Verification

    one = Verification(
        call.reference, call.candidate, call.inputs, call.config, number, call.tell, lifts=False
    )
    one.rng = call.rng
    given = call.conditions
    one.conditions = dataclasses.replace(
        one.conditions, upstream=given.upstream, gradients=given.gradients
    )
    return one.run()


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
    findings = tuple(
        msgspec.structs.replace(
            finding,
            status=Status.EQUIVALENT,
            reason=short,
            lifted=failed[finding.item].lifted,
        )
        if finding.item in failed and finding.aspect is Aspect.VALUE
        else finding
        for finding in native.findings
    )
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


def _with_evidence(verdict: Verdict, shown: _Trial) -> Verdict:
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
class _Trial:
    """Both programs on other inputs.

    Attributes:
        case: the inputs.
        weights: how the weights were changed; empty if they were not.
        ratio: the largest figure as a multiple of its limit; above 1, it is visible.
        item: the item of that figure.
        index: where in the item.
        how: the figure in words.
        factor: the factor, less one, by which all elements are off in float64; 0 if there is none,
            None if it cannot be measured.
        is_native: the figure is that of the native run.
        is_weaker: visible, but only by the candidate's own rounding.
    """

    case: SimilarCase
    weights: str
    ratio: float
    item: Item
    index: tuple[int, ...] | None = None
    how: str = ""
    factor: float | None = None
    is_native: bool = False
    is_weaker: bool = False

    @property
    def is_visible(self) -> bool:
        """Whether the native run shows it."""
        return self.is_native and self.ratio > 1 and not self.is_weaker

    @property
    def kind(self) -> str:
        """What was changed."""
        return self.weights or f"inputs {self.case.name}"

    @property
    def words(self) -> str:
        """What shows it."""
        what = "visible natively" if self.is_native else "not as accurate as the reference"
        return f"{what} for {self.kind}: {self.how}, with {_ranges(self.case.inputs)}"


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What a search found; without a reason and a trial, it is an approximation."""

    reason: str = ""
    shown: _Trial | None = None
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
        self.deadline = min(call.deadline, time.monotonic() + MOST_SECONDS)
        self.trials: list[_Trial] = []
        # What is beyond the noise in float64: from then on, inputs are only looked for to show it.
        self.beyond: _Trial | None = None

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

    def _follow(self, trials: Iterator[_Trial | None]) -> _Outcome:
        weaker = ""
        count, last = 0, 10**6
        for trial in trials:
            count += 1
            if time.monotonic() > self.deadline and count <= self.planned:
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

    def _with_same_factor(self) -> _Trial | None:
        """A trial whose results are off by one factor, which is that of most trials.

        A wrong constant is a factor everywhere. An approximation has one where a function is a
        straight line, and another error elsewhere.
        """
        measured = [(t, t.factor) for t in self.trials if t.factor is not None]
        off = [(t, by) for t, by in measured if abs(by) > MOST_FACTOR * UNIT_F32]
        for trial, factor in off:
            alike = sum(abs(by / factor - 1) < SAME_FACTOR for _, by in off)
            if alike >= _ENOUGH_ELEMENTS and 2 * alike > len(measured):
                how = f"all values are off by one factor, {1 + factor:.9g}"
                return dataclasses.replace(trial, how=how, is_native=False)
        return None

    def _all_trials(self) -> Generator[_Trial | None, None, None]:
        self.planned = 10**6
        given = SimilarCase("as given", self.inputs)
        yield self._try(given)
        for case in self.similar.over_whole_range():
            yield self._try(case)
        for names, by, words in _weight_changes(self.weights):
            with _scaled_weights([self.weights[name] for name in names], by):
                yield self._try(given, words)
        self.planned = 0
        for _ in range(STEPS if self.similar.free_paths else 0):
            if time.monotonic() > self.deadline:
                return
            usable = [t for t in self.trials if not t.weights and not t.is_weaker]
            best = sorted(usable, key=lambda t: -t.ratio)
            start = best[len(self.trials) % min(_MOST_STARTS, len(best))] if best else None
            if start is None:
                return
            step = self.similar.step_from(start.case.inputs, start.index)
            if step is not None:
                yield self._try(step)

    def _observe(self, case: SimilarCase, *, fresh: bool = False) -> _Run | None:
        from paritas.checks.verify import Verification

        reference, candidate = self.reference, self.candidate
        if fresh:  # their saved state has other weights
            reference = inspect_subject(reference.call, "reference", "reference")
            candidate = inspect_subject(candidate.call, "candidate", "candidate", reference.state)
        one = Verification(
            reference, candidate, case.inputs, self.config, 0, lambda _: None, lifts=False
        )
        one.rng = self.call.rng
        verdict = one.run()
        if one.compared is None:
            return None
        evidence, _, my_first = one.compared
        return _Run(candidate, evidence, verdict, my_first)

    def _try(self, case: SimilarCase, weights: str = "") -> _Trial | None:
        """Both programs on other inputs; None if the reference refuses them."""
        run = self._observe(case, fresh=bool(weights))
        if run is None or run.evidence.native[0].error is not None:
            return None
        if any(finding.status is Status.UNVERIFIED for finding in run.verdict.failures):
            return None
        judging = _Judging(run, case, weights, self.config.seed)
        trial = judging.trial() if self.beyond is None else judging.trial_to_show()
        self.trials.append(trial)
        return trial


@dataclasses.dataclass(frozen=True)
class _Run:
    """Both programs natively; `mine` is what the candidate gave."""

    candidate: Subject
    evidence: Evidence[SubjectProgram]
    verdict: Verdict
    mine: Observation


class _Judging:
    """Judges one trial."""

    def __init__(self, run: _Run, case: SimilarCase, weights: str, seed: int) -> None:
        self.case, self.weights, self.seed = case, weights, seed
        self.candidate, self.evidence = run.candidate, run.evidence
        self.verdict, self.mine = run.verdict, run.mine
        self.lift = SubjectLift(self.evidence, run.candidate)
        self._mine: Evidence[SubjectProgram] | None = None

    def trial_to_show(self) -> _Trial:
        """As `trial`, but what is not visible only guides the search: its noise is not measured."""
        native = self._native()
        if native.ratio > 1:
            return self.trial()
        return max(native, self._lifted((), measures=False), key=lambda trial: trial.ratio)

    def trial(self) -> _Trial:
        native = self._native()
        lifted = self._lifted(())
        worst = max(native, lifted, key=lambda trial: trial.ratio)
        worst = dataclasses.replace(worst, factor=lifted.factor)
        if worst.ratio <= 1 or not self._may_be_weaker():
            return worst
        is_excused = self._passes_with_own_noise() and self._lifted((self._own(),)).ratio <= EXCUSED
        return dataclasses.replace(worst, is_weaker=is_excused)

    def _make(self, ratio: float, item: Item, index: Any, how: str) -> _Trial:
        return _Trial(self.case, self.weights, ratio, item, index, how)

    def _native(self) -> _Trial:
        failures = self.verdict.failures
        if failures:
            made = self._make(math.inf, failures[0].item, None, _how_visible(failures[0]))
            return dataclasses.replace(made, is_native=True)
        scores = [(f.native, f.item) for f in self.verdict.findings if f.native is not None]
        if not scores:
            return self._make(0.0, Item(), None, "")
        score, item = max(scores, key=lambda pair: pair[0].excess)
        return self._make(min(score.excess, 1.0), item, score.index, "")

    def _lifted(self, also: Sequence[Evidence[SubjectProgram]], *, measures: bool = True) -> _Trial:
        """The largest difference in float64, as a multiple of what the native noise allows."""
        found = [self._make(0.0, Item(), None, "")]
        for item, value in self.evidence.native[0].items():
            if is_inexact(value):
                found.append(self._lifted_item(item, value, tuple(also), measures=measures))
        return max(found, key=lambda trial: trial.ratio)

    def _lifted_item(
        self,
        item: Item,
        value: Tensor,
        also: tuple[Evidence[SubjectProgram], ...],
        *,
        measures: bool,
    ) -> _Trial:
        about = ItemEvidence(self.evidence, item, lifted=self.lift, also=also)
        arbiter, lifted = about.arbiter(), about.lifted()
        if arbiter is None or lifted is None:
            return self._make(math.inf, item, None, "it has no value in float64")
        mine = self.mine.value(item)
        if mine is None:  # gradients that a compiled program has in float64 only
            mine = lifted.to(value.dtype)
        if mine.shape != value.shape:
            return self._make(math.inf, item, None, "the candidate has no such value")
        factor = shared_factor(lifted, arbiter, value.dtype)
        arbiter, lifted = _as_native(arbiter, lifted, value, mine)
        if nonfinite_mismatch(arbiter, lifted) is not None:
            return self._make(math.inf, item, None, "one side is not finite")
        accuracy = accuracy_of(value.dtype)
        unit = unit_roundoff(accuracy)
        noise = Noise(unit=unit, step=smallest_step(accuracy), inner=unit)
        if accuracy is value.dtype:
            own = criterion.own_noise(value, arbiter)
            noise = dataclasses.replace(noise, own=own, reference=value)
        score = criterion.score(lifted, arbiter, noise).score
        # Perturbed runs show noise that the reference's own error does not.
        if measures and _ratio(score) > NEAR:
            noise = dataclasses.replace(noise, spread=about.spread(unit, FEW_RUNS))
            score = criterion.score(lifted, arbiter, noise).score
        ratio, rms = _ratio(score), max(score.rms_z, score.slice_z or 0.0)
        how = (
            f"in float64 off by {score.max_z:.3g} times the noise of {dtype_name(accuracy)}, "
            f"{rms:.3g} times on average"
        )
        ratio = max(ratio, _systematic_units(arbiter, lifted, value, mine) / MOST_Z)
        made = self._make(ratio, item, score.index, how)
        return dataclasses.replace(made, factor=factor)

    def _may_be_weaker(self) -> bool:
        """Whether the rounding of the candidate itself can be measured."""
        candidate, failures = self.candidate, self.verdict.failures
        return (
            not candidate.is_compiled
            and not candidate.is_foreign
            and all(finding.aspect is Aspect.VALUE for finding in failures)
        )

    def _own(self) -> Evidence[SubjectProgram]:
        if self._mine is None:
            program = dataclasses.replace(self.evidence.program, subject=self.candidate)
            self._mine = Evidence(program, seed=self.seed)
        return self._mine

    def _passes_with_own_noise(self) -> bool:
        """Whether the candidate's native values pass with the noise of its own rounding."""
        mine = self._own()
        for finding in self.verdict.failures:
            item = finding.item
            left, right = (side.native[0].value(item) for side in (self.evidence, mine))
            if not is_inexact(left) or not is_inexact(right):
                return False
            about = ItemEvidence(self.evidence, item, also=(mine,))
            right = _without_edges(left, right, about.arbiter())
            if nonfinite_mismatch(left, right) is not None:
                return False
            if not judge_floats(left, right, about).status.passes():
                return False
        return True


def accuracy_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype whose accuracy an approximation must have: float32 for halves.

    Operators on halves compute in float32 inside, and what is less accurate than that is hidden by
    the rounding of results only, whatever it is: a bias of a tenth of a percent, for example.
    """
    return torch.float32 if dtype in {torch.float16, torch.bfloat16} else dtype


def _as_native(
    arbiter: Tensor, lifted: Tensor, value: Tensor, mine: Tensor
) -> tuple[Tensor, Tensor]:
    """The two in float64, with a difference that is no larger than the native one.

    In float64, numbers inside of a program do not overflow, underflow or saturate where they do
    natively. A difference that a few roundings cannot hide is seen in the native values as well.
    """
    info = torch.finfo(value.dtype)
    outside = (arbiter.abs() > info.max) | ~torch.isfinite(value)
    outside |= _differ_below_normal(arbiter, lifted, value.dtype)
    own, native = (
        (side.to(arbiter.device).to(arbiter.dtype) - arbiter).abs() for side in (value, mine)
    )
    outside |= (own > LOST * arbiter.abs()) & (native <= 2 * own)
    lifted = torch.where(outside, arbiter, lifted)
    most = native + HIDDEN * unit_roundoff(value.dtype) * arbiter.abs()
    difference = lifted - arbiter
    size = difference.abs()
    shrunk = arbiter + difference * (most / size)
    return arbiter, torch.where((size > most) & torch.isfinite(shrunk), shrunk, lifted)


def _without_edges(left: Tensor, right: Tensor, arbiter: Tensor | None) -> Tensor:
    """The candidate as the reference where only the edge of the dtype's range is elsewhere.

    It overflows a little before the reference does, or has zero for a denormal number.
    """
    if arbiter is None or right.is_complex():
        return right
    near = arbiter.abs() > torch.finfo(left.dtype).max * NEAR_OVERFLOW
    early = right.isinf() & near & (right.signbit() == arbiter.signbit())
    return torch.where(early | _differ_below_normal(arbiter, right, left.dtype), left, right)


def _differ_below_normal(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Where two differ by a denormal number, in a dtype that has hardly any use for such."""
    tiny = torch.finfo(dtype).tiny
    if tiny > MOST_DENORMAL:
        return torch.zeros_like(left, dtype=torch.bool)
    return (left - right).abs() < 2 * tiny


def _systematic_units(arbiter: Tensor, lifted: Tensor, value: Tensor, mine: Tensor) -> float:
    """The difference in float64, in unit roundoffs; 0 if the sides are rounded as much natively."""
    if value.numel() < _ENOUGH_ELEMENTS:
        return 0.0

    def root_mean_square(values: Tensor) -> float:
        return float(values.abs().double().square().mean().sqrt())

    ours, theirs = (side.to(arbiter.device).to(arbiter.dtype) for side in (value, mine))
    rounding = max(root_mean_square(ours - arbiter), root_mean_square(theirs - lifted))
    difference, size = root_mean_square(lifted - arbiter), root_mean_square(arbiter)
    if not difference > SYSTEMATIC * rounding or size == 0:
        return 0.0
    return difference / (unit_roundoff(accuracy_of(value.dtype)) * size)


def shared_factor(lifted: Tensor, arbiter: Tensor, dtype: torch.dtype) -> float | None:
    """The factor, less one, that all elements share; 0 if they share none, None if all are zero.

    Values that are all about one value share one, whatever is wrong.
    """
    if lifted.is_complex():
        return None
    # Where numbers are denormal, each rounds by another factor.
    info, size = torch.finfo(dtype), arbiter.abs()
    usable = torch.isfinite(lifted) & (size > info.tiny) & (size < info.max)
    true = arbiter[usable].double()
    if not true.numel():
        return None
    is_narrow = len(true.unique()) < _ENOUGH_ELEMENTS or true.abs().max() < WIDE * true.abs().min()
    if is_narrow and arbiter.numel() >= _ENOUGH_ELEMENTS:
        return None
    shares = lifted[usable].double() / true - 1
    middle = float(shares.median())
    return middle if float((shares - middle).abs().max()) < SAME_FACTOR * abs(middle) else 0.0


def _ranges(inputs: Inputs) -> str:
    """The values of the first floating inputs, in words."""
    tensors = [
        (path, t) for path, t in input_tensors(inputs) if t.is_floating_point() and t.numel()
    ]
    ends = [(path, *(float(end) for end in t.detach().aminmax())) for path, t in tensors]
    shown = [f"{path} from {low:.3g} to {high:.3g}" for path, low, high in ends[:_MOST_SHOWN]]
    return ", ".join(shown) or "no floating inputs"


def _ratio(score: Score) -> float:
    return max(score.max_z / MOST_Z, max(score.rms_z, score.slice_z or 0.0) / MOST_RMS)


def _how_visible(finding: Finding) -> str:
    metrics, score = finding.metrics, finding.native
    if metrics is None or score is None or not math.isfinite(metrics.max_abs):
        return finding.reason
    return f"off by {metrics.max_abs:.3g} ({score.max_z:.3g} times the noise)"


# --- Weights --------------------------------------------------------------------------------------


def _shared_weights(reference: Subject, candidate: Subject) -> dict[str, list[Tensor]] | None:
    """The weights of the reference with those of the candidate; None if that lacks one."""
    theirs = candidate.state.tensors
    places = {storage_address(tensor) for tensor in theirs.values()}
    found: dict[str, list[Tensor]] = {}
    seen: set[int] = set()
    for name, tensor in reference.state.tensors.items():
        place = storage_address(tensor)
        if not is_inexact(tensor) or place in seen or not tensor.numel():
            continue
        seen.add(place)
        twin = theirs.get(name)
        if place in places:
            found[name] = [tensor]
        elif twin is not None and twin.dtype is tensor.dtype and bitwise_equal(tensor, twin):
            found[name] = [tensor, twin]
        else:
            return None
    return found


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
