"""How two observations of the same call differ."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.errors import chain_of_causes, in_one_line
from paritas.core.execution.block_noise import ComposedEvidence
from paritas.core.execution.evidence import NoiseNotYetMeasured
from paritas.core.execution.held_values import MISSING
from paritas.core.execution.item_evidence import NO_LIFT, ItemEvidence
from paritas.core.execution.observation import input_tensors, same_value
from paritas.core.execution.subjects import ForeignProgram
from paritas.core.judging.failures import Explainer, likely_mixups, state_kinds_at_starts
from paritas.core.judging.matching import match
from paritas.core.judging.pairs import (
    UNTYPED,
    Checks,
    Pair,
    Ruling,
    judge_pair,
    settle_pair,
    sketch_rule,
)
from paritas.core.numerics.bits import dtype_name
from paritas.core.numerics.contents import Opaque
from paritas.core.results.findings import (
    Aspect,
    Coverage,
    Finding,
    Status,
    Verdict,
    agreement,
    finding_about,
)
from paritas.core.results.items import (
    BACKWARD,
    CALL,
    GRADIENTS,
    RANDOM_STATE,
    Item,
    ItemKind,
    in_order,
    output,
)
from paritas.core.torch_private.dynamo import draws_like_eager

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paritas.core.diagnosis.case import Context
    from paritas.core.execution.block_noise import ComposedNoise
    from paritas.core.execution.evidence import Demand
    from paritas.core.execution.observation import Observation
    from paritas.core.execution.subject_runs import SubjectLift
    from paritas.core.execution.subjects import VerifyConfig
    from paritas.core.judging.pairs import FindingRule
    from paritas.core.numerics.judge_evidence import JudgeEvidence

INPUT_ADVICE = "if nothing in front of this input is trained, set verify_input_gradients=False"
SECOND_ADVICE = (
    "if gradients are never differentiated, set verify_double_backward=False; mark a backward that "
    "cannot be differentiated with torch.autograd.function.once_differentiable: then it raises"
)
AGAIN_ADVICE = (
    "do not overwrite in backward what forward has saved: with retain_graph=True, the next "
    "backward pass computes from it; if that never happens, set verify_double_backward=False"
)
RANDOM_ADVICE = (
    "set torch._inductor.config.fallback_random = True before compiling: then the compiled program "
    "draws the same numbers as eager"
)
# Runs with other draws before a value fails, in case it depends on random numbers only rarely.
THOROUGH_DRAWS = 12
ALL_INPUTS = Item(ItemKind.INPUT_AFTER_CALL, "inputs")
ALL_STATE = Item(ItemKind.STATE_AFTER_CALL)
# Rounding in float64 is 5e8 times smaller than in float32, and a fault is as large as ever.
VANISHING = 1e-4
INFERENCE_ADVICE = (
    "for a candidate that is for inference only, verify under torch.no_grad(), or set "
    "verify_gradients=False"
)


@dataclasses.dataclass
class CollectedFindings:
    """Findings and coverage, collected one by one."""

    findings: list[Finding] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    skipped: list[str] = dataclasses.field(default_factory=list)
    unmatched: list[str] = dataclasses.field(default_factory=list)
    compared: int = 0

    def add(
        self,
        item: Item,
        aspect: Aspect,
        status: Status,
        reason: str,
        advice: str = "",
        raised: str = "",
    ) -> None:
        """Add a finding about something other than a value, which `judge_pair` judges."""
        self.findings.append(finding_about(item, aspect, status, reason, advice, raised=raised))

    def take(self, other: CollectedFindings) -> None:
        """Add everything from another collection."""
        self.findings += other.findings
        self.notes += other.notes
        self.skipped += other.skipped
        self.unmatched += other.unmatched
        self.compared += other.compared

    @property
    def passes(self) -> bool:
        """Whether all findings pass, perhaps with a warning."""
        return all(finding.status.passes() for finding in self.findings)

    def verdict(self, *, strict: bool) -> Verdict:
        """Roll up into a verdict."""
        coverage = Coverage(
            compared=self.compared,
            skipped=tuple(dict.fromkeys(self.skipped)),
            unmatched=tuple(self.unmatched),
        )
        return Verdict(
            findings=state_kinds_at_starts(self.findings),
            coverage=coverage,
            notes=tuple(dict.fromkeys(self.notes)),
            strict=strict,
        )


class LiftOf(enum.Enum):
    """The call of the candidate that its lifted run is of, for the comparison of one call.

    A further call of a program without state has the meaning of the first one.
    """

    THIS_CALL = enum.auto()
    FIRST_CALL = enum.auto()
    NO_CALL = enum.auto()


class Comparer:
    """Compares what the candidate did in one call with what the reference did."""

    def __init__(
        self,
        sides: SubjectLift,
        demand: Demand,
        config: VerifyConfig,
        call: int,
        occasion: Item,
        *,
        lift: LiftOf = LiftOf.THIS_CALL,
        noise: ComposedNoise | None = None,
    ) -> None:
        """Compare a call of both sides.

        Args:
            call: the number of the call within a run.
            occasion: the call as findings name it.
            lift: the call that the lifted run is of.
            noise: that of all blocks together, for models that run natively only; large gradients
                are then compared by their sketches.
        """
        self.sides = sides
        self.evidence = sides.evidence
        self.demand = demand
        self.config = config
        self.call = call
        self.occasion = occasion
        self.lift = lift
        self.noise = noise
        self.out = CollectedFindings()
        self.checks = Checks(
            size=config.verify_size,
            dtype=config.verify_dtype,
            shape=config.verify_shape,
            values=config.verify_values,
            device=config.verify_device,
            containers=sides.candidate.is_wholly_compiled,
            checkers=config.checkers,
        )
        self.random_differs = False
        self._put_off: list[tuple[int, Item, Any, Any]] = []
        self.explainer = Explainer(notes=self.out.notes)

    def compare(self, reference: Observation, candidate: Observation) -> CollectedFindings:
        """Collect everything in which the two differ."""
        if reference.error is not None or candidate.error is not None:
            self._compare_errors(reference.error, candidate.error, self._label_item(CALL))
            return self.out
        self._compare_random(reference, candidate)
        # A perturbed run with a backward pass for everything costs as much as all other runs.
        self.demand.puts_off = self.evidence.program.conditions.gradients
        self._compare_outputs(reference, candidate)
        if self.config.verify_aliasing:
            self._compare_aliases(reference, candidate)
        if self.config.verify_mutation:
            written = list(dict.fromkeys((*reference.after, *candidate.after)))
            self._compare_after(ALL_INPUTS, written, reference, candidate)
            for item in reference.after:
                if item in candidate.after:
                    self._compare_flags(item, reference, candidate)
        self._compare_set_flags(reference, candidate)
        if self.config.verify_state:
            self._compare_state(reference, candidate)
            self._compare_process(reference, candidate)
        if self.evidence.program.conditions.gradients:
            self._compare_gradients(reference, candidate)
        is_first = self.call == 0 and self.lift is LiftOf.THIS_CALL
        if is_first:
            self._compare_further(reference, candidate)
        self._compare_put_off()
        if is_first:
            self._compare_second(reference, candidate)
            self._compare_repeated(reference, candidate)
        return self.out

    def _label_item(self, item: Item) -> Item:
        """The item as findings name it: with the call and the set of inputs."""
        return item.during(self.occasion.call, self.occasion.inputs)

    def _add(
        self,
        item: Item,
        aspect: Aspect,
        status: Status,
        reason: str,
        advice: str = "",
        *,
        counts: bool = True,
    ) -> None:
        """Add what was found in this call about an item; with `counts`, as a comparison."""
        self.out.compared += counts
        self.out.add(self._label_item(item), aspect, status, reason, advice)

    def _add_findings(self, findings: Iterable[Finding]) -> None:
        self.out.findings += [
            msgspec.structs.replace(finding, item=self._label_item(finding.item))
            for finding in findings
        ]

    def _compare_errors(
        self, reference: Exception | None, candidate: Exception | None, item: Item
    ) -> None:
        left, right = _describe_exception(reference), _describe_exception(candidate)
        if reference is not None and candidate is not None and _same_kind(reference, candidate):
            reason = f"both sides raised, so nothing was compared: the reference {left}"
            advice = "if the inputs are as intended, both sides reject them; otherwise fix them"
            self.out.add(item, Aspect.EXCEPTION, Status.UNVERIFIED, reason, advice)
        else:
            self.out.compared += 1
            reason = f"the reference {left}, the candidate {right}"
            raised = "" if candidate is None else type(candidate).__name__
            self.out.add(item, Aspect.EXCEPTION, Status.DIFFERENT, reason, raised=raised)

    def _compare_random(self, reference: Observation, candidate: Observation) -> None:
        left, right = reference.rng_after, candidate.rng_after
        if left is None or right is None:
            return
        # Inductor's own generators may happen to leave torch's where eager leaves them.
        own_streams = not all(map(draws_like_eager, self.sides.candidate.backends))
        self.random_differs = reference.drew_random_numbers and own_streams
        if left.same_torch(right) and not self.random_differs:
            if self.config.verify_rng:
                self._compare_random_backward(reference, candidate)
            return
        candidate_side = self.sides.candidate
        if reference.drew_random_numbers and (
            candidate_side.is_compiled or candidate_side.is_foreign
        ):
            # Its numbers come from another stream: values that depend on them prove nothing.
            self.random_differs = True
            if not self.evidence.depends_on_draws(runs=THOROUGH_DRAWS):
                reason = "the candidate draws other random numbers, but no value depends on them"
                self._add(RANDOM_STATE, Aspect.RNG, Status.EQUIVALENT, reason)
                return
            advice = RANDOM_ADVICE if candidate_side.is_compiled else ""
            reason = "the program draws random numbers, and the candidate draws others"
            self._add(RANDOM_STATE, Aspect.RNG, Status.UNVERIFIED, reason, advice, counts=False)
        elif self.config.verify_rng:
            drew = "draws" if reference.drew_random_numbers else "draws no"
            reason = (
                f"the generators are left in another state; the reference {drew} random numbers"
            )
            self._add(RANDOM_STATE, Aspect.RNG, Status.DIFFERENT, reason)

    def _compare_random_backward(self, reference: Observation, candidate: Observation) -> None:
        """Compare the generators after the backward pass; after the call they agree."""
        left, right = reference.rng_after_backward, candidate.rng_after_backward
        if left is None or right is None or left.same_torch(right):
            self._add(RANDOM_STATE, Aspect.RNG, Status.IDENTICAL, "the generators agree")
            return
        drew = "draws" if reference.backward_drew else "draws no"
        reason = (
            "the backward pass leaves the generators in another state; the reference's "
            f"{drew} random numbers"
        )
        self._add(RANDOM_STATE, Aspect.RNG, Status.DIFFERENT, reason)

    def _compare_outputs(self, reference: Observation, candidate: Observation) -> None:
        matching = match(reference.returned, candidate.returned, self.checks, output())
        self.out.findings += matching.findings
        self.out.notes += matching.notes
        self.out.unmatched += matching.unmatched
        for item, left, right in matching.pairs:
            self._compare_item(item, left, right)
            self._compare_layout(item, reference, candidate)
        self._compare_attributes(reference, candidate)

    def _compare_attributes(self, reference: Observation, candidate: Observation) -> None:
        """Compare the Python attributes that the programs give to the tensors they return."""
        items = dict.fromkeys((*reference.attributes, *candidate.attributes))
        if items and (self.sides.by_order or isinstance(self.sides.candidate.call, ForeignProgram)):
            self.out.skipped.append("attributes of output tensors: another runtime returns values")
            return
        for item in items:
            left, right = (
                observation.attributes.get(item, MISSING) for observation in (reference, candidate)
            )
            self._compare_effect(item, left, right)

    def _compare_layout(self, item: Item, reference: Observation, candidate: Observation) -> None:
        left, right = reference.strides.get(item), candidate.strides.get(item)
        if left is not None and right is not None and left != right and len(left) == len(right):
            shape = tuple(candidate.outputs[item].shape)
            reason = f"strides {list(right)} instead of {list(left)}"
            if self.config.verify_strides:
                self._add(item, Aspect.STRIDE, Status.DIFFERENT, reason, counts=False)
            elif self.config.verify_aliasing and _overlaps(shape, right) > _overlaps(shape, left):
                reason += ": its elements share memory, so a write to one changes others"
                self._add(item, Aspect.ALIAS, Status.DIFFERENT, reason, counts=False)
            else:
                self.out.notes.append(f"{self._label_item(item)}: {reason}")
        self._compare_flags(item, reference, candidate)

    def _compare_flags(self, item: Item, reference: Observation, candidate: Observation) -> None:
        """Compare whether a tensor can be differentiated further."""
        flags = reference.requires_grad.get(item), candidate.requires_grad.get(item)
        if None in flags or not self.config.compares_requires_grad:
            return
        aspect = Aspect.REQUIRES_GRAD
        if flags[0] != flags[1]:
            reason = f"requires_grad is {flags[1]} instead of {flags[0]}"
            advice = INFERENCE_ADVICE if flags[0] else ""
            self._add(item, aspect, Status.DIFFERENT, reason, advice, counts=False)
        elif item in candidate.inference and item not in reference.inference:
            reason = "it is an inference tensor, which autograd rejects; the reference's is not"
            if torch.is_grad_enabled():
                self._add(item, aspect, Status.DIFFERENT, reason, INFERENCE_ADVICE, counts=False)
            else:
                self.out.notes.append(f"{self._label_item(item)}: {reason}")

    def _compare_aliases(self, reference: Observation, candidate: Observation) -> None:
        if reference.outputs.keys() != candidate.outputs.keys():
            self.out.skipped.append("aliases: the two sides name their outputs differently")
            return
        for pair in in_order(reference.aliases ^ candidate.aliases):
            other, item = pair
            dropped = pair in reference.aliases
            what = "no longer shares" if dropped else "shares"
            reason = f"{what} memory with {other}, unlike in the reference"
            self._add(item, Aspect.ALIAS, Status.DIFFERENT, reason, counts=False)

    def _compare_after(
        self, whole_item: Item, items: list[Item], reference: Observation, candidate: Observation
    ) -> None:
        """Compare changed items; if only one side changed one, the other has its old value."""
        for item in items:
            left = self.evidence.complete(reference, item)
            right = self.sides.complete(candidate, item)
            if left is MISSING and right is MISSING:
                continue  # gone on both sides: something else replaced it
            if not self._is_known_to_both(item, reference, candidate):
                self._note_one_sided(item, candidate)
            else:
                self._compare_effect(item, left, right)
        if not items:
            self.out.compared += 1
            reason = "unchanged on both sides"
            self.out.findings.append(agreement(self._label_item(whole_item), Aspect.VALUE, reason))

    def _compare_set_flags(self, reference: Observation, candidate: Observation) -> None:
        """Compare `requires_grad` of inputs and state that one of the calls has set."""
        for item in dict.fromkeys((*reference.flags, *candidate.flags)):
            is_asked = (
                self.config.verify_state if item.kind.is_state else self.config.verify_mutation
            )
            if not is_asked or not self.config.compares_requires_grad:
                continue
            initial = self._initial_flags(item)
            left, right = (
                observation.flags.get(item, flag)
                for observation, flag in zip((reference, candidate), initial, strict=True)
            )
            if left is None or right is None:
                continue  # only one side has it
            status = Status.IDENTICAL if left is right else Status.DIFFERENT
            reason = f"requires_grad is set to {right} on both sides"
            if left is not right:
                reason = f"requires_grad is {right} instead of {left}"
            self._add(item, Aspect.REQUIRES_GRAD, status, reason)

    def _initial_flags(self, item: Item) -> list[bool | None]:
        """What `requires_grad` of an input or of state is before the call, on either side."""
        if not item.kind.is_state:
            flag = dict(input_tensors(self.evidence.program.inputs))[item.name].requires_grad
            return [flag, flag]
        states = self.sides.reference.state, self.sides.candidate.state
        state_flags = [state.flags.get(item.name) for state in states]
        return [None if flags is None else flags[1] for flags in state_flags]

    def _compare_effect(self, item: Item, left: Any, right: Any) -> None:
        """Compare what a call left behind; functions and similar objects are not values."""
        shown = self._label_item(item)
        if not self._is_judged_by_noise(left, right) and not self.sides.repetition.is_repeated(
            item, self.call
        ):
            # A time, an address, a random name: no other run repeats it.
            self.out.skipped.append(f"{shown}: it differs between runs of the reference")
        elif left is MISSING or right is MISSING:
            ours, candidate_words = _show_value(left), _show_value(right)
            reason = f"the reference leaves {ours} there, the candidate {candidate_words}"
            self._add(item, Aspect.STRUCTURE, Status.DIFFERENT, reason)
        elif self._is_replaced(item, left, right):
            reason = "the candidate replaces it by other code; paritas restored it"
            self._add(item, Aspect.STRUCTURE, Status.DIFFERENT, reason)
        elif isinstance(left, Opaque) or isinstance(right, Opaque):
            opaque = left if isinstance(left, Opaque) else right
            self.out.skipped.append(f"{shown}: {opaque.reason}")
        else:
            self._compare_item(item, left, right)

    @staticmethod
    def _is_judged_by_noise(left: Any, right: Any) -> bool:
        """Whether two values are equal, or tensors, for which noise can be measured."""
        both = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
        return both or same_value(left, right)

    def _is_replaced(self, item: Item, left: Any, right: Any) -> bool:
        """Whether the candidate's call replaced a function or class that both sides use."""
        first = self.evidence.program.initial(item)
        opaque = all(
            isinstance(value, Opaque) and value.by_identity for value in (left, right, first)
        )
        return (
            opaque
            and left.value is first.value
            and right.value is not first.value
            and self._is_shared(item)
        )

    def _is_known_to_both(self, item: Item, reference: Observation, candidate: Observation) -> bool:
        """Whether both sides have, had or created what one of them changed."""
        sides = (self.evidence.program, reference), (self.sides.program, candidate)
        are_known = [
            item in observation.state
            or item in observation.after
            or side.initial(item) is not MISSING
            for side, observation in sides
        ]
        return all(are_known) or self._is_shared(item)

    def _is_shared(self, item: Item) -> bool:
        """Whether both sides reach the object in which one of them left something.

        A global is reached by a side whose code names it. Parameters of the same name count as
        shared: their `.grad` is read from either.
        """
        if not item.kind.is_state:
            return True  # inputs: both sides get the same
        name = item.name
        states = self.sides.reference.state, self.sides.candidate.state
        if name.endswith(".grad") and all(name[:-5] in state.tensors for state in states):
            return True
        places = [state.places.get(name) for state in states]
        return any(
            position is not None and all(state.reaches(position) for state in states)
            for position in places
        )

    def _note_one_sided(self, item: Item, candidate: Observation) -> None:
        """Skip a side's own bookkeeping; report a buffer of the model."""
        owned = self.sides.reference.state.owned | self.sides.candidate.state.owned
        if item.name not in owned:
            who = "candidate" if item in candidate.state else "reference"
            self.out.skipped.append(f"{self._label_item(item)}: only the {who} has it")
            return
        self.out.unmatched.append(self._label_item(item).text)
        reason = "changed on one side and missing on the other"
        self._add(item, Aspect.STRUCTURE, Status.UNVERIFIED, reason, counts=False)

    def _compare_state(self, reference: Observation, candidate: Observation) -> None:
        left, right = self.sides.reference.state, self.sides.candidate.state
        if left.owned and not right.owned:
            # The candidate's parameters are not visible: another runtime, or a server.
            if reference.state:
                self.out.skipped.append("the candidate's buffers after the call cannot be read")
            return
        if left.tensors or right.tensors or reference.state or candidate.state:
            changed = list(dict.fromkeys((*reference.state, *candidate.state)))
            self._compare_after(ALL_STATE, changed, reference, candidate)

    def _compare_process(self, reference: Observation, candidate: Observation) -> None:
        """Compare the settings of the process that the calls changed; they were restored."""
        ours, candidate_settings = reference.process, candidate.process
        for name in sorted(ours.keys() | candidate_settings.keys()):
            item = Item(ItemKind.SETTING, name)
            if ours.get(name) == candidate_settings.get(name):
                self._add(item, Aspect.SETTING, Status.IDENTICAL, "both sides leave it changed")
                continue
            reference_setting = ours.get(name, "unchanged")
            reason = (
                f"{candidate_settings.get(name, 'unchanged')} by the candidate, "
                f"{reference_setting} by the reference"
            )
            advice = "paritas restored it; otherwise, code that runs later would be affected"
            self._add(item, Aspect.SETTING, Status.DIFFERENT, reason, advice)

    def _compare_gradients(self, reference: Observation, candidate: Observation) -> None:
        self.out.skipped += [
            f"gradients through {self._label_item(output(path))}, {reference.kinds[path].name}: "
            "none of its parts can be differentiated"
            for path in reference.cut_off
        ]
        if reference.gradient_error is not None or candidate.gradient_error is not None:
            errors = reference.gradient_error, candidate.gradient_error
            self._compare_errors(*errors, self._label_item(BACKWARD))
            return
        aspect = Aspect.REQUIRES_GRAD
        if reference.gradients and not any(candidate.requires_grad.values()):
            count = len(reference.gradients)
            reason = f"{count} gradients: none of the candidate's outputs can be differentiated"
            self._add(GRADIENTS, aspect, Status.DIFFERENT, reason, INFERENCE_ADVICE)
            return
        missing = [item for item in reference.gradients if item not in candidate.gradients]
        for item, reference_gradient in reference.gradients.items():
            if item not in missing:
                if self._are_of_one_form(item, reference, candidate):
                    self._compare_gradient(item, reference_gradient, candidate.gradients[item])
                self._compare_gradient_layout(item, reference, candidate)
        frozen = [item for item in missing if self._is_frozen(item)]
        for item in frozen:
            missing.remove(item)
            reason = "the candidate's parameter does not require grad, the reference's does"
            self._add(item, aspect, Status.DIFFERENT, reason)
        if missing:
            self.out.unmatched += [self._label_item(item).text for item in missing]
            reason = f"{len(missing)} gradients have no counterpart by name: {missing[0]} ..."
            advice = "give the candidate the same parameter names, or set verify_gradients=False"
            self._add(GRADIENTS, Aspect.STRUCTURE, Status.UNVERIFIED, reason, advice, counts=False)
        else:
            self._compare_extra_gradients(reference, candidate)

    def _is_frozen(self, item: Item) -> bool:
        """Whether the candidate has the parameter of a gradient, but does not train it."""
        state = self.sides.candidate.state
        state_tensor = state.tensors.get(item.name, state.lent.get(item.name))
        return state_tensor is not None and not state_tensor.requires_grad

    def _compare_extra_gradients(self, reference: Observation, candidate: Observation) -> None:
        """Report gradients that only the candidate has. Zeros train nothing and pass."""
        for item, gradient in candidate.gradients.items():
            if item in reference.gradients or gradient is None or not bool(gradient.any()):
                continue
            self.out.unmatched.append(f"{self._label_item(item)} (candidate only)")
            reason = "the candidate computes this gradient, the reference does not"
            advice = "set requires_grad=False on a parameter that is not trained"
            self._add(item, Aspect.STRUCTURE, Status.DIFFERENT, reason, advice)

    def _compare_further(self, reference: Observation, candidate: Observation) -> None:
        """Compare the gradients that the caller's own call does not compute."""
        for item, reference_gradient in reference.further.items():
            if item.kind is ItemKind.SECOND_GRADIENT:
                continue
            if item in candidate.further or not self.sides.candidate.is_compiled:
                self._compare_gradient(item, reference_gradient, candidate.further.get(item))
            else:
                self._compare_in_float64(item, reference_gradient)

    def _compare_second(self, reference: Observation, candidate: Observation) -> None:
        """Compare gradients of gradients. If gradients differ, these add nothing."""
        items = [item for item in reference.further if item.kind is ItemKind.SECOND_GRADIENT]
        if not items:
            return
        if not all(finding.status.passes() for finding in self.out.findings):
            what = self._label_item(GRADIENTS.named("gradients of gradients"))
            self.out.skipped.append(f"{what}: the values they are computed from differ already")
            return
        self.demand.go_on_to_second()
        self.demand.puts_off = True
        for item in items:
            left, right = reference.further[item], candidate.further.get(item)
            if left is not None or right is None or not self._vanishes(item, right):
                self._compare_gradient(item, left, right)
        self._compare_put_off()

    def _compare_repeated(self, reference: Observation, candidate: Observation) -> None:
        """Compare the gradients of a second backward pass that are not those of the first."""
        differing = {self._label_item(item) for item in candidate.again}
        wrong = {finding.item for finding in self.out.findings if not finding.status.passes()}
        if not candidate.again or differing & wrong:
            return  # equal bits, or the first ones are wrong already
        self.demand.unsettle()
        for item, right in candidate.again.items():
            self._compare_again(item, reference.again.get(item, reference.value(item)), right)

    def _vanishes(self, item: Item, right: torch.Tensor) -> bool:
        """Whether a gradient that the reference lacks is only rounding: in float64 it vanishes.

        A value that is zero by its formula has no noise that could be measured on the reference.
        """
        lifted = self.sides.runs()
        value = None if lifted is None else lifted[0].further.get(item)
        if value is None or not bool(right.any()):
            return False
        largest = float(right.detach().abs().max())
        if not float(value.abs().max()) <= VANISHING * largest:
            return False
        self.out.compared += 1
        reason = f"zero up to rounding: at most {largest:.3g}, and almost zero in float64"
        pair = Pair(self._label_item(item), None, right)
        self.out.findings.append(settle_pair(pair, Ruling(Status.EQUIVALENT, reason, UNTYPED)))
        return True

    def _compare_again(self, item: Item, left: Any, right: Any) -> None:
        """Compare the gradients of a second backward pass over the same graph.

        A differentiable formula may round differently, so this is judged like any value.
        """
        some = left if left is not None else right
        if some is None:
            return
        left, right = (
            torch.zeros_like(some) if gradient is None else gradient for gradient in (left, right)
        )
        evidence = ItemEvidence(self.evidence, item, self.call, demand=self.demand)
        pair = Pair(item.of(ItemKind.GRADIENT_AGAIN), left, right, evidence)
        findings, _ = judge_pair(pair, self.checks)
        self.out.compared += 1
        self._add_findings(
            finding
            if finding.status.passes()
            else msgspec.structs.replace(finding, advice=AGAIN_ADVICE)
            for finding in findings
        )

    def _compare_in_float64(self, item: Item, left: torch.Tensor | None) -> None:
        """Compare a gradient that only the lifted run of the compiled program computes."""
        lifted = self.sides.runs()
        if lifted is None or item not in lifted[0].further:
            why = "neither a native nor a float64 run of the compiled program computed it"
            self.out.skipped.append(f"{item}, which does not require grad: {why}")
            return
        right, arbiter = lifted[0].further[item], self.evidence.arbiter()
        note = (
            "gradients of inputs that do not require grad: compared with the compiled program's "
            "float64 run only"
        )
        self.out.notes.append(note)
        if arbiter is not None and same_value(arbiter[0].further.get(item), right):
            right = left
        elif left is not None and right is not None:
            right = right.to(left.dtype)
        self._compare_gradient(item, left, right)

    def _compare_gradient(
        self, item: Item, left: torch.Tensor | None, right: torch.Tensor | None
    ) -> None:
        """Compare gradients; None and zeros are the same, as for unused inputs."""
        if left is None and right is None:
            self.out.compared += 1
            reason = "unused on both sides"
            self.out.findings.append(agreement(self._label_item(item), Aspect.VALUE, reason))
            return
        some = left if left is not None else right
        if some is None:
            return
        zeros = torch.zeros_like(some)
        self._compare_item(item, zeros if left is None else left, zeros if right is None else right)

    def _are_of_one_form(self, item: Item, reference: Observation, candidate: Observation) -> bool:
        """Whether two gradients have one shape and dtype; their sketches do not show it."""
        sides = reference, candidate
        left, right = (side.gradient_forms.get(item, side.gradients.get(item)) for side in sides)
        is_sketched = any(item in side.gradient_forms for side in sides)
        if not is_sketched or left is None or right is None:
            return True
        pair = Pair(item, left, right)
        structure = dataclasses.replace(self.checks, values=False)
        findings, notes = judge_pair(pair, structure)
        self.out.notes += notes
        if all(finding.status.passes() for finding in findings):
            return True
        self.out.compared += 1
        self._add_findings(findings)
        return False

    def _compare_gradient_layout(
        self, item: Item, reference: Observation, candidate: Observation
    ) -> None:
        """Compare layouts: optimizers treat sparse gradients differently, or reject them."""
        left, right = (
            observation.gradient_layouts.get(item) for observation in (reference, candidate)
        )
        if left is not None and right is not None and left is not right:
            reason = f"layout {dtype_name(right)} instead of {dtype_name(left)}"
            self._add(item, Aspect.STRUCTURE, Status.DIFFERENT, reason, counts=False)

    def _evidence_about(self, item: Item) -> JudgeEvidence:
        if self.noise is not None:
            native = self.evidence.native[self.call].value(item)
            return ComposedEvidence(self.noise, item, native, self.evidence.unit)
        lifted = NO_LIFT if self.lift is LiftOf.NO_CALL else self.sides
        return ItemEvidence(self.evidence, item, self.call, lifted=lifted, demand=self.demand)

    def _compare_item(self, item: Item, left: Any, right: Any) -> None:
        if self.random_differs and self._depends_on_draws(item):
            self._compare_random_item(item, left, right)
            return
        context = functools.partial(self._context, item, left)
        pair = Pair(item, left, right, self._evidence_about(item), context)
        sketch_rules = self._sketch_rules(item, left)
        try:
            findings, notes = judge_pair(
                pair,
                self.checks,
                rules=(self._refuse_draws, *sketch_rules),
                explainer=None if sketch_rules else self.explainer,
            )
        except DependsOnDraws:
            self._compare_random_item(item, left, right)
            return
        except NoiseNotYetMeasured:
            self._put_off.append((len(self.out.findings), item, left, right))
            return
        self.out.compared += 1
        self.demand.settle(self.call, item)
        self._add_findings(_add_advice(finding, self.evidence.native[0]) for finding in findings)
        self.out.notes += notes

    def _sketch_rules(self, item: Item, left: Any) -> tuple[FindingRule, ...]:
        """The rule for a large gradient, of which both sides keep a sketch; else none."""
        form = self.evidence.native[self.call].gradient_forms.get(item)
        if form is None:
            return ()
        words = f"its sketch was compared: {left.numel()} random sums"
        return (sketch_rule(form, words, dtype=dtype_name(form.dtype)),)

    def _refuse_draws(self, finding: Finding) -> None:
        """A rule: a value that other random numbers may have made is not judged by its noise."""
        is_doubtful = self.random_differs and not finding.status.passes()
        if is_doubtful and self._depends_on_draws(finding.item, THOROUGH_DRAWS):
            raise DependsOnDraws

    def _depends_on_draws(self, item: Item, runs: int = 1) -> bool:
        return self.evidence.depends_on_draws(self.call, item, runs)

    def _compare_put_off(self) -> None:
        """Compare items that need perturbed runs; these runs can leave out all other items."""
        self.demand.puts_off = False
        before, self.out.findings = self.out.findings, []
        told = 0
        for position, item, left, right in self._put_off:
            self.out.findings += before[told:position]
            told = position
            self._compare_item(item, left, right)
        self.out.findings += before[told:]
        self._put_off = []

    def _context(self, item: Item, value: Any) -> Context:
        """The context for a diagnosis: what a value may have been mixed up with."""
        from paritas.core.diagnosis.case import Context

        before = self.sides.initial(item) if item.kind.is_afterwards else None
        earlier = {"what it was before the call": before}
        if self.call:
            first = self.evidence.complete(self.evidence.native[0], item)
            earlier["what it was in the call before"] = first
        shape = getattr(value, "shape", None)
        near = {
            **self.sides.reference.state.tensors,
            **dict(input_tensors(self.evidence.program.inputs)),
        }
        earlier_tensors = {
            name: old
            for name, old in earlier.items()
            if isinstance(old, torch.Tensor) and old.shape == shape
        }
        draws = self._depends_on_draws(item)
        return Context(named=likely_mixups(near, value), earlier=earlier_tensors, draws=draws)

    def _compare_random_item(self, item: Item, left: Any, right: Any) -> None:
        """Compare shapes and dtypes, and values only if they do not depend on the draws."""
        pair, sketch_rules = Pair(item, left, right), self._sketch_rules(item, left)
        structure = dataclasses.replace(self.checks, values=False)
        findings, _ = judge_pair(pair, structure, rules=sketch_rules)
        if all(finding.status.passes() for finding in findings):
            rules = (_rule_on_other_draws, *sketch_rules)
            findings, _ = judge_pair(pair, self.checks, rules=rules)
        if not any(finding.status is Status.UNVERIFIED for finding in findings):
            self.out.compared += 1
        self._add_findings(findings)


class DependsOnDraws(Exception):  # noqa: N818  (it ends a judgement, and is no error)
    """A value that fails depends on random numbers, which the candidate draws differently."""


def _rule_on_other_draws(finding: Finding) -> Ruling | None:
    if finding.status is Status.IDENTICAL:
        return None
    reason = "depends on random numbers that the candidate draws differently"
    about = {"advice": "", "metrics": None, "native": None, "lifted": None}
    return Ruling(Status.UNVERIFIED, reason, about)


def _add_advice(finding: Finding, reference: Observation) -> Finding:
    """Add how to switch off the check, for gradients that the caller did not request."""
    if finding.advice or finding.item not in reference.further or finding.status.passes():
        return finding
    is_second = finding.item.kind is ItemKind.SECOND_GRADIENT
    return msgspec.structs.replace(finding, advice=SECOND_ADVICE if is_second else INPUT_ADVICE)


def _overlaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements share memory along an axis."""
    return any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True))


def _show_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"{value!r:.60}"


def _describe_exception(error: Exception | None) -> str:
    if error is None:
        return "returns"
    return f"raises {in_one_line(error, 120)}"


def _same_kind(reference: Exception, candidate: Exception) -> bool:
    """Whether the candidate raised the same kind; compilers wrap it, so causes count too."""
    return any(isinstance(cause, type(reference)) for cause in chain_of_causes(candidate))
