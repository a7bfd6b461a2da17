"""verify(): does the compiled model compute what the framework model computes?"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from paritas.core.errors import MismatchError, UsageError
from paritas.core.execution.evidence import Demand, Evidence
from paritas.core.execution.fitting import (
    check_by,
    describe_saving,
    describe_shortage,
    verify_where_it_fits,
)
from paritas.core.execution.observation import (
    MOST_WHOLE_GRADIENTS,
    OUTPUT,
    Observation,
    RunConditions,
    input_tensors,
    same_value,
    storage_address,
)
from paritas.core.execution.run_plan import RunStep, follow_plans
from paritas.core.execution.running import running_subject
from paritas.core.execution.saved_state import RandomState
from paritas.core.execution.subject_runs import SubjectLift, SubjectProgram
from paritas.core.execution.subjects import (
    Inputs,
    Subject,
    VerifyConfig,
    input_sets,
    inspect_subject,
    limit_to_candidate,
)
from paritas.core.judging.comparer import CollectedFindings, Comparer, LiftOf
from paritas.core.judging.failures import Explainer, FailedPair, remember_failed
from paritas.core.locating.places import FailedCall, Place
from paritas.core.numerics.contents import SEQUENCE
from paritas.core.results.findings import Aspect, Coverage, Status, Verdict, agreement, mismatch
from paritas.core.results.items import CALL, Item, ItemKind, gradient, harness
from paritas.core.results.progress import shows_progress
from paritas.core.results.wording import size
from paritas.core.time_limit import UNLIMITED
from paritas.core.torch_private.dynamo import reuses_outputs, room_for_entries
from paritas.core.torch_private.global_state import quietly
from paritas.core.torch_private.tensors import accumulation_hooks
from paritas.verification.approximations import settle_and_locate
from paritas.verification.further_gradients import FurtherGradients
from paritas.verification.places import add_place, gather_places, wrong_findings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paritas.core.execution.block_noise import ComposedNoise
    from paritas.core.results.findings import Finding


@shows_progress
def verify(
    inputs: Any,
    framework_model: Callable[..., Any],
    compiled_model: Callable[..., Any],
    verify_cfg: VerifyConfig | None = None,
    *,
    by: Literal["whole", "blocks"] | None = None,
    blocks: Sequence[str] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Verdict:
    """Compare a model with its compiled, fused or ported form.

    Args:
        inputs: a list or tuple of positional inputs, a dict of keyword arguments,
            `Inputs(args, kwargs)`, or a list of `Inputs`, each of which is compared.
        framework_model: the reference, an `nn.Module` or any callable.
        compiled_model: the candidate, an `nn.Module` or any callable.
        verify_cfg: what to compare; by default, everything.
        by: "whole" to run the models in float64 as a whole, or "blocks" to check their blocks one
            by one, in the memory of a few of them. By default the whole, and blocks for
            models of billions of parameters or where memory does not suffice; a note says so.
        blocks: names or globs of the blocks, such as `layers.*`; by default, the repeated modules
            of the reference. With them, `by` is "blocks".
        on_progress: called with a short text before each step that may take long. The text is a
            `Progress`, whose `plan` has the number of the step and the time that is left.

    Returns:
        The verdict, true if the candidate computes what the reference computes.

    Raises:
        MismatchError: the verdict does not pass, and `raise_on_mismatch` is on.
        UsageError: a model cannot be called, or the inputs are not valid.
    """
    __tracebackhide__ = True
    config = VerifyConfig() if verify_cfg is None else verify_cfg
    if not isinstance(config, VerifyConfig):
        raise UsageError(f"verify_cfg must be a VerifyConfig, not {config!r:.120}")
    config = config.as_used()
    sets = input_sets(inputs)
    check_by(by, blocks)
    pair = framework_model, compiled_model
    tell_whole, tell_blocks = follow_plans(on_progress, pair, config, len(sets))

    whole = functools.partial(_verify_whole, pair, sets, config, tell_whole)
    in_blocks = functools.partial(_verify_by_blocks, pair, sets, config, blocks, tell_blocks)
    asks_blocks = by == "blocks" or blocks is not None
    gradients = config.verify_gradients is not False and torch.is_grad_enabled()
    shortage, device = describe_shortage(framework_model, gradients=gradients, sketches=True)
    if asks_blocks:
        verdict = verify_where_it_fits(in_blocks, None, "", device)
    elif by == "whole":
        verdict = verify_where_it_fits(whole, None, "", device)
    elif not shortage and (saving := describe_saving(framework_model, compiled_model)):
        verdict = _verify_blocks_first(in_blocks, whole, saving, device)
    else:
        verdict = verify_where_it_fits(whole, in_blocks, shortage, device)
    if config.raise_on_mismatch and verdict.enabled and not verdict.passed:
        raise MismatchError(str(verdict), verdict)
    return verdict


_Pair = tuple["Callable[..., Any]", "Callable[..., Any]"]


def _verify_blocks_first(
    in_blocks: Callable[..., Verdict],
    whole: Callable[[], Verdict],
    saving: str,
    device: torch.device,
) -> Verdict:
    """Check by blocks, and as a whole only where the blocks do not decide.

    They do not if the model cannot be cut, and if all of them agree but the whole models do not:
    then the fault may lie in what the compiler does across blocks, or in the noise of the whole.
    """
    try:
        verdict = verify_where_it_fits(lambda: in_blocks(least_share=LEAST_SHARE), None, "", device)
    except UsageError:
        return verify_where_it_fits(whole, None, "", device)
    wrong = wrong_findings(verdict)
    is_decided = any(finding.item.graph for finding in wrong)
    if not verdict.passed and not is_decided:
        return verify_where_it_fits(whole, None, "", device)
    note = (
        f"checked by blocks, which compiles less and takes less memory: {saving}; by='whole' "
        "checks it as a whole"
    )
    return msgspec.structs.replace(verdict, notes=(note, *verdict.notes))


def _verify_by_blocks(
    pair: _Pair,
    sets: list[Inputs],
    config: VerifyConfig,
    patterns: Sequence[str] | None,
    tell: Callable[[str], None],
    *,
    least_share: float = 0.0,
) -> Verdict:
    from paritas.verification.blocks import BlocksCheck

    check = BlocksCheck(*pair, config, patterns, tell)
    check.least_share = least_share
    rng = RandomState.now()
    try:
        verdict = Verdict.merge(
            check.run(inputs, position + 1 if len(sets) > 1 else 0)
            for position, inputs in enumerate(sets)
        )
    finally:
        rng.restore()
    if config.locate_seconds > 0:
        verdict = gather_places(verdict)
    if verdict.enabled and not verdict.passed:
        remember_failed(verdict, check.failed or [FailedPair(*pair, sets)])
    return verdict


def _verify_whole(
    pair: _Pair, sets: list[Inputs], config: VerifyConfig, tell: Callable[[str], None]
) -> Verdict:
    framework_model, compiled_model = pair
    reference = inspect_subject(framework_model, "reference", "framework_model")
    candidate = inspect_subject(compiled_model, "candidate", "compiled_model", reference.state)
    config, limits, around = limit_to_candidate(config, compiled_model)
    rng = RandomState.now()
    verdicts = []
    shown: list[Inputs] = []
    failure_place: Place | None = None
    try:
        with around:
            for position, inputs in enumerate(sets):
                number = position + 1 if len(sets) > 1 else 0
                verification = Verification(reference, candidate, inputs, config, number, tell)
                verdict = verification.run()
                call = verification.failed_call(verdict)
                settled, failure_place = settle_and_locate(call, verdict, failure_place)
                verdicts.append(settled.verdict)
                shown += [] if settled.inputs is None else [settled.inputs]
            verdict = Verdict.merge(verdicts)
            if failure_place is not None and wrong_findings(verdict):
                verdict = add_place(verdict, failure_place)
    finally:
        rng.restore()
    if limits:
        verdict = msgspec.structs.replace(verdict, notes=(limits, *verdict.notes))
    if verdict.enabled and not verdict.passed:
        # Inputs that show the difference natively come first: a script is about them.
        remember_failed(verdict, [FailedPair(framework_model, compiled_model, [*shown, *sets])])
    return verdict


# Outputs are held to the end, to see what is written to them later, unless they are larger.
MOST_HELD = 64 << 20


# Of the parameters, in blocks that can be cut out: else a check by blocks saves little.
LEAST_SHARE = 0.5


class Verification:
    """Runs both sides on one set of inputs, and compares a first and a second call.

    Attributes:
        conditions: the conditions of all runs.
        later_conditions: those of the runs that also compute the further gradients.
        evidence: evidence about the reference, once it has run.
        runs_again_later: the reference is run once more by the caller, as part of a whole.
        compared: the evidence, and what the two sides gave in their first call, once compared.
    """

    def __init__(
        self,
        reference: Subject,
        candidate: Subject,
        inputs: Inputs,
        config: VerifyConfig,
        number: int,
        tell: Callable[[str], None],
        *,
        lifts: bool = True,
    ) -> None:
        """Compare two sides; without `lifts`, natively only."""
        self.reference = reference
        self.candidate = candidate
        self.inputs = inputs
        self.config = config
        self.number = number
        self.tell = tell
        self.rng = RandomState.now()
        self.evidence: Evidence[SubjectProgram] | None = None
        self.runs_again_later = False
        self.lifts = lifts
        self.compared: tuple[Evidence[SubjectProgram], Observation, Observation] | None = None
        self.repeats = False
        self.released: list[Item] | None = None
        self.overwritten: list[Item] = []
        self.reused: list[Item] = []
        self.conditions = RunConditions(
            gradients=self._differentiates(),
            seed=config.seed,
            accumulates=_hang_on_accumulation(reference, candidate),
            sketches=_gradient_bytes(reference) > MOST_WHOLE_GRADIENTS,
        )
        self.later_conditions = self.conditions
        self.explainers: list[_InterruptibleExplainer] = []

    def run(self) -> Verdict:
        """Run both sides, and compare them."""
        natives = self._run_reference()
        # What torch logs about inputs that the reference already refuses is no news.
        with quietly() if natives[0].error else contextlib.nullcontext():
            candidate = self._run_candidate(len(natives))
        intruded = self._intrusions()
        if not self.config.enabled:
            note = "comparison was switched off (enabled=False); both sides ran"
            return Verdict(coverage=Coverage(), notes=(note,), enabled=False)
        further = FurtherGradients(
            (self.reference, self.candidate), self.inputs, self.rng, self.config, self.conditions
        )
        first, my_first = further.ask((natives[0], candidate[0]))
        self.later_conditions = further.conditions
        changing = frozenset(
            name for observation in (*natives, *candidate) for name in observation.changed_state
        )
        program = SubjectProgram(
            self.reference,
            self.inputs,
            self.rng,
            dataclasses.replace(further.conditions, changing=changing),
            len(natives),
        )
        evidence = Evidence(program, [first, *natives[1:]], self.config.seed)
        evidence.tell = self.tell
        self.evidence = evidence
        by_order = self._goes_by_order(natives[0], candidate[0])
        sides = SubjectLift(
            evidence,
            self.candidate,
            lift=self.config.lift and self.lifts,
            by_order=by_order,
            notes=evidence.notes if self.lifts else None,
        )
        if by_order:
            evidence.notes.append(
                "outputs are matched by order: the two sides name them differently"
            )
            candidate, (my_first,) = (
                sides.rename_outputs(candidate),
                sides.rename_outputs([my_first]),
            )
        demand = Demand()
        comparer = self._explains(Comparer(sides, demand, self.config, 0, self._label_item(CALL)))
        self.compared = evidence, first, my_first
        if not self.lifts:
            comparer.explainer.left = 0
        collected = comparer.compare(first, my_first)
        further.report(collected)
        collected.take(intruded)
        if self.repeats or len(candidate) > 1:
            collected.take(self._compare_second(sides, demand, natives, candidate))
        if collected.passes and sides.ran_uncompiled():
            collected.take(self._report_uncompiled())
        if collected.passes:
            collected.take(self._run_again(sides, demand, natives[0]))
        if self.config.verify_aliasing:
            collected.take(self._compare_memory(candidate[0]))
        collected.notes += evidence.notes
        if self.conditions.sketches:
            most = size(MOST_WHOLE_GRADIENTS)
            note = f"the gradients take more than {most}: of large ones, sketches were compared"
            collected.notes.append(note)
        return collected.verdict(strict=self.config.strict)

    def failed_call(self, verdict: Verdict) -> FailedCall:
        """The call on these inputs, for a search for what its failures are and where they start."""
        failures = [f for f in wrong_findings(verdict) if f.item.inputs == self.number]
        later = self.later_conditions
        items = {finding.item.without_place for finding in failures}
        asks_later = {*map(gradient, later.also)} & {item.during(0, 0) for item in items}
        return FailedCall(
            reference=self.reference,
            candidate=self.candidate,
            inputs=self.inputs,
            rng=self.rng,
            config=self.config,
            conditions=later if asks_later else self.conditions,
            failures=tuple(failures),
            limit=UNLIMITED,
            tell=self.tell,
            compared=self.compared,
            is_interrupted=self.is_interrupted,
        )

    def _label_item(self, item: Item, call: int = 0) -> Item:
        """The item as findings name it: with the set of inputs, if there are several."""
        return item.during(call, self.number)

    def _intrusions(self) -> CollectedFindings:
        """Report and undo changes that the candidate's calls made to the reference's state."""
        collected = CollectedFindings()
        ours, candidate_state = self.reference.state, self.candidate.state
        if ours is candidate_state or not self.config.enabled:
            return collected
        for name in ours.changed_values():
            collected.compared += 1
            reason = "the candidate's call changes this part of the reference, not its own"
            item = self._label_item(Item(ItemKind.STATE_AFTER_CALL, name))
            collected.findings.append(mismatch(item, Aspect.VALUE, reason))
        ours.restore()
        return collected

    @property
    def _outputs_are_reused(self) -> bool:
        return torch.cuda.is_available() and any(map(reuses_outputs, self.candidate.backends))

    def _compare_memory(self, first: Observation) -> CollectedFindings:
        """Check that nothing writes to an output after it was returned."""
        collected = CollectedFindings()
        written = first.written_later
        if self.released is not None:
            written = self.released
            what = f"writes to outputs after the calls: they take more than {size(MOST_HELD)}"
            collected.skipped.append(what)
        if self._outputs_are_reused:
            collected.notes.append("outputs are in CUDA graphs: the next call overwrites them")
        wrong = dict.fromkeys(written, "is written to after the call")
        wrong |= dict.fromkeys(self.reused, "is in the memory of the next call's output")
        wrong |= dict.fromkeys(self.overwritten, "is overwritten by the next call")
        if not wrong:
            return collected
        conditions = dataclasses.replace(self.conditions, gradients=False, holds=True)
        with running_subject(self.reference, self.rng, conditions) as call:
            first_call, two = call(self.inputs), call(self.inputs)
        usual = {*first_call.written_later, *_outputs_in_reused_memory(first_call, two)}
        for item, what in wrong.items():
            if item not in usual:
                collected.compared += 1
                reason = f"{what}, unlike in the reference"
                advice = "return a new tensor or a copy"
                shown = self._label_item(item)
                collected.add(shown, Aspect.ALIAS, Status.DIFFERENT, reason, advice)
        return collected

    def _run_again(
        self, sides: SubjectLift, demand: Demand, first: Observation
    ) -> CollectedFindings:
        """Check that the reference still computes the same; otherwise nothing is known."""
        collected = CollectedFindings()
        first = dataclasses.replace(first, further={}, again={})
        last = first
        if not (self.runs_again_later or sides.repetition.is_shown_by_arbiter(first)):
            self.tell(RunStep.AGAIN)
            with running_subject(self.reference, self.rng, self.conditions) as call:
                last = call(self.inputs)
        ours, candidate_state = self.reference.state, self.candidate.state
        for name, reason in {**ours.unreadable, **candidate_state.unreadable}.items():
            collected.skipped.append(f"{self._label_item(Item(ItemKind.STATE, name))}: {reason}")
        for name, reason in {**ours.failures, **candidate_state.failures}.items():
            item = self._label_item(Item(ItemKind.STATE, name))
            collected.add(item, Aspect.HARNESS, Status.UNVERIFIED, reason)
        if last is first or first.error is not None or same_observation(first, last):
            return collected
        steady = sides.repetition
        if _have_same_items(first, last) and all(
            steady.is_as_accurate(item, first, last) for item, _ in last.items()
        ):
            collected.notes.append("the reference does not give the same bits every time")
            return collected
        demand.unsettle()
        moved = self._find_moved(sides, demand, first, last)
        items = {item.text: item for item, _ in first.items()}
        moved += [item for item in items.values() if not steady.agrees(item, first, last, demand)]
        moved = [
            item
            for item in dict.fromkeys(moved)
            if item.text not in items
            or not steady.is_as_near(items[item.text], first, last, demand)
        ]
        self._report_moved(collected, moved)
        return collected

    def _find_moved(
        self,
        sides: SubjectLift,
        demand: Demand,
        first: Observation,
        last: Observation,
        noise: ComposedNoise | None = None,
    ) -> list[Item]:
        """What differs beyond rounding between two runs of the reference."""
        quiet = dataclasses.replace(self.config, verify_rng=False)
        comparer = Comparer(sides, demand, quiet, 0, CALL, lift=LiftOf.NO_CALL, noise=noise)
        findings = comparer.compare(first, last).findings
        return [finding.item for finding in findings if not finding.status.passes()]

    def _report_moved(self, collected: CollectedFindings, moved: Sequence[Item]) -> None:
        """Report what another run of the reference at the end changed beyond rounding."""
        if not moved:
            collected.notes.append("the reference does not give the same bits every time")
            return
        named = ", ".join([item.text for item in moved][:3])
        reason = f"when run once more at the end, it no longer gives the same {named}"
        advice = (
            "either something that both sides share was changed and could not be restored, or the "
            "reference is not repeatable"
        )
        item = self._label_item(harness("reference"))
        collected.add(item, Aspect.HARNESS, Status.UNVERIFIED, reason, advice)

    def _goes_by_order(self, reference: Observation, candidate: Observation) -> bool:
        """Whether outputs with other names are matched by their order.

        Other runtimes return their results in a list, whatever the model returns.
        """
        root = candidate.kinds.get(OUTPUT)
        is_list = root is not None and root.family == SEQUENCE
        may_match_by_order = self.config.match_by_order or (self.candidate.is_foreign and is_list)
        return may_match_by_order and reference.outputs.keys() != candidate.outputs.keys()

    def _report_uncompiled(self) -> CollectedFindings:
        collected = CollectedFindings()
        collected.add(
            self._label_item(harness("candidate")),
            Aspect.HARNESS,
            Status.UNVERIFIED,
            "torch.compile compiled nothing, so eager was compared with eager",
            "see TORCH_LOGS=graph_breaks; torch skips recurrent modules, and after one of them "
            "also its own containers: compile your own function or module that calls them",
        )
        return collected

    def _differentiates(self) -> bool:
        """Whether to compare gradients; by default, if anything requires grad and grad is on."""
        if self.config.verify_gradients is not None:
            return self.config.verify_gradients
        state = self.reference.state
        tensors = [*state.tensors.values(), *state.lent.values()]
        tensors += [tensor for _, tensor in input_tensors(self.inputs)]
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    def _run_reference(self) -> list[Observation]:
        """Call it once, and a second time if the first call left state behind."""
        self.tell(RunStep.REFERENCE)
        with running_subject(self.reference, self.rng, self.conditions) as call:
            observations = [call(self.inputs)]
            again = self.config.verify_second_call and self.config.enabled
            if again and observations[0].error is None and not observations[0].is_stateless:
                observations.append(call(self.inputs))
        return observations

    def _run_candidate(self, reference_calls: int) -> list[Observation]:
        self.tell(RunStep.CANDIDATE)
        again = self.config.verify_second_call and self.config.enabled
        holds = self.config.verify_aliasing and not self._outputs_are_reused
        conditions = dataclasses.replace(self.conditions, holds=holds)
        # Our own entries in Dynamo's caches must not push the candidate into eager mode.
        room = room_for_entries() if self.candidate.is_compiled else contextlib.nullcontext()
        with room, running_subject(self.candidate, self.rng, conditions) as call:
            observations = [call(self.inputs)]
            if observations[0].error is None and (again or reference_calls > 1):
                observations.append(call(self.inputs))
                self.overwritten = observations[0].written_later
                self.reused = _outputs_in_reused_memory(*observations)
        if (
            sum(live_observation.nbytes for live_observation in observations[0].live.values())
            > MOST_HELD
        ):
            self.released = observations[0].written_later
            for observation in observations:
                observation.live.clear()
        if reference_calls == 1 and len(observations) > 1 and same_observation(*observations):
            # It shows nothing more; free its memory.
            observations.pop()
            self.repeats = True
        return observations

    def _compare_second(
        self,
        sides: SubjectLift,
        demand: Demand,
        natives: list[Observation],
        observations: list[Observation],
    ) -> CollectedFindings:
        """Compare the second call: without state it repeats the first, with state it continues."""
        occasion = self._label_item(CALL, call=2)
        unseen = sorted({*self.reference.state.unseen, *self.candidate.state.unseen})
        if unseen:
            collected = CollectedFindings()
            note = f"the second call was not judged: {unseen[0]} cannot be restored"
            collected.notes.append(note)
            return collected
        if self.repeats:
            collected = CollectedFindings(compared=1)
            reason = "the candidate's second call gives the same bits"
            collected.findings.append(agreement(occasion, Aspect.VALUE, reason))
            return collected
        if len(natives) == 1:
            # Its second call differs from its first, though it starts from the same state. If it is
            # as accurate, the same code has run, whose meaning the first call's lifted run shows.
            # If not, nothing is known of what it means.
            demand.unsettle()
            comparer = Comparer(sides, demand, self.config, 0, occasion, lift=LiftOf.FIRST_CALL)
            comparer.explainer.left = 0
            collected = comparer.compare(natives[0], observations[1])
            if collected.passes:
                return collected
            demand.unsettle()
            comparer = Comparer(sides, demand, self.config, 0, occasion, lift=LiftOf.NO_CALL)
            return self._explains(comparer).compare(natives[0], observations[1])
        comparer = Comparer(sides, demand, self.config, 1, occasion)
        return self._explains(comparer).compare(natives[1], observations[1])

    def _explains(self, comparer: Comparer) -> Comparer:
        """Let Ctrl-C end what a comparer finds out beyond the verdict, for all of this call."""
        comparer.explainer = _InterruptibleExplainer(notes=comparer.out.notes)
        if self.is_interrupted:
            comparer.explainer.left = 0
        self.explainers.append(comparer.explainer)
        return comparer

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C has ended the diagnosis."""
        return any(explainer.is_interrupted for explainer in self.explainers)


@dataclasses.dataclass
class _InterruptibleExplainer(Explainer):
    """Ctrl-C ends the diagnosis, not the comparison: the verdict is nearly known."""

    is_interrupted: bool = False

    def explain(self, findings: Iterable[Finding], *about: Any, **more: Any) -> list[Finding]:
        """Return the findings, explained until Ctrl-C comes."""
        findings = list(findings)
        try:
            return super().explain(findings, *about, **more)
        except KeyboardInterrupt:
            self.left, self.is_interrupted = 0, True
            self.notes.append("the kind of error is not known: the diagnosis was interrupted")
            return findings


def _gradient_bytes(subject: Subject) -> int:
    """The size of the gradients of all parameters."""
    tensors = {**subject.state.tensors, **subject.state.lent}.values()
    return sum(tensor.nbytes for tensor in tensors if tensor.is_leaf and tensor.requires_grad)


def _outputs_in_reused_memory(first: Observation, second: Observation) -> list[Item]:
    """The outputs of a call that are in the memory of an output of the call before."""
    taken = {storage_address(tensor) for tensor in first.live.values()} - {0}
    return [item for item, tensor in second.live.items() if storage_address(tensor) in taken]


def _have_same_items(first: Observation, last: Observation) -> bool:
    """Whether two calls gave values of the same names and kinds, and none of them raised."""
    errors = (last.error, last.gradient_error, first.gradient_error)
    if any(error is not None for error in errors) or first.aliases != last.aliases:
        return False
    return first.kinds == last.kinds and dict(first.items()).keys() == dict(last.items()).keys()


def same_observation(first: Observation, second: Observation) -> bool:
    """Whether two calls gave the same bits."""
    if second.error is not None or first.aliases != second.aliases:
        return False
    if first.kinds != second.kinds:
        return False
    left, right = dict(first.items()), dict(second.items())
    if left.keys() != right.keys():
        return False
    return all(same_value(value, right[item]) for item, value in left.items())


def _hang_on_accumulation(reference: Subject, candidate: Subject) -> bool:
    """Whether the two sides have different hooks that only `.backward()` runs.

    Hooks of a shared parameter run for both sides. They belong to the caller, perhaps to an
    optimizer, and are not called.
    """
    left, right = reference.state.tensors, candidate.state.tensors
    return any(
        left.get(name) is not right.get(name)
        and any(accumulation_hooks(side[name]) for side in (left, right) if name in side)
        for name in {**left, **right}
    )
