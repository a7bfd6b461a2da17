"""What two observations of the same call disagree in."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas._torch.compiled import draws_like_eager
from paritas.checking.evidence import ItemEvidence
from paritas.checking.explaining import Explainer, likely
from paritas.checking.noise import NoiseNotYetMeasured
from paritas.checking.observing import AFTER, input_tensors
from paritas.numerics.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.numerics.pairing import Checks, check_pair, match

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paritas.checking.config import VerifyConfig
    from paritas.checking.observing import Observation
    from paritas.checking.runs import Runs
    from paritas.diagnosis.cases import Context

RANDOM_ADVICE = (
    "set torch._inductor.config.fallback_random = True before compiling, so that the compiled "
    "program draws the numbers that eager draws"
)


@dataclasses.dataclass
class Collected:
    """Findings and coverage as they come in."""

    findings: list[Finding] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    skipped: list[str] = dataclasses.field(default_factory=list)
    unmatched: list[str] = dataclasses.field(default_factory=list)
    compared: int = 0

    def add(self, path: str, aspect: Aspect, status: Status, reason: str, advice: str = "") -> None:
        """Add a finding without numbers."""
        self.findings.append(
            Finding(path=path, aspect=aspect, status=status, reason=reason, advice=advice)
        )

    def verdict(self, *, strict: bool) -> Verdict:
        """Roll up."""
        coverage = Coverage(
            compared=self.compared,
            skipped=tuple(dict.fromkeys(self.skipped)),
            unmatched=tuple(self.unmatched),
        )
        return Verdict(
            findings=tuple(self.findings),
            coverage=coverage,
            notes=tuple(dict.fromkeys(self.notes)),
            strict=strict,
        )


class Comparer:
    """Compares what the candidate did in one call with what the reference did."""

    def __init__(
        self, runs: Runs, config: VerifyConfig, call: int, label: str, *, lifts: bool = True
    ) -> None:
        """`call` says which call of the runs is compared; `label` is appended to every path."""
        self.runs = runs
        self.config = config
        self.call = call
        self.label = label
        self.lifts = lifts
        self.out = Collected()
        self.checks = Checks(
            size=config.verify_size,
            dtype=config.verify_dtype,
            shape=config.verify_shape,
            values=config.verify_values,
            device=config.verify_device,
            containers=runs.candidate.is_wholly_compiled,
            checkers=config.checkers,
        )
        self.random_differs = False
        self._put_off: list[tuple[int, str, Any, Any]] = []
        self.explainer = Explainer(notes=self.out.notes)

    def compare(self, reference: Observation, candidate: Observation) -> Collected:
        """Collect everything the two disagree in."""
        if reference.error is not None or candidate.error is not None:
            self._compare_errors(reference.error, candidate.error, f"call{self.label}")
            return self.out
        self._compare_random(reference, candidate)
        # One perturbed run with a backward pass for everything costs as much as all other runs.
        self.runs.puts_off = self.runs.conditions.gradients
        self._compare_outputs(reference, candidate)
        if self.config.verify_aliasing:
            self._compare_aliases(reference, candidate)
        if self.config.verify_mutation:
            self._compare_after("inputs", reference.after, candidate.after)
        if self.config.verify_state:
            self._compare_state(reference, candidate)
        if self.runs.conditions.gradients:
            self._compare_gradients(reference, candidate)
        self._compare_put_off()
        return self.out

    def _compare_errors(
        self, reference: Exception | None, candidate: Exception | None, path: str
    ) -> None:
        left, right = _told(reference), _told(candidate)
        if reference is None or candidate is None:
            self.out.compared += 1
            reason = f"the reference {left}, the candidate {right}"
            self.out.add(path, Aspect.EXCEPTION, Status.DIFFERENT, reason)
        elif _same_kind(reference, candidate):
            reason = f"both sides raised, so nothing was compared: the reference {left}"
            advice = "if the inputs are as meant, the two agree in failing; otherwise mend them"
            self.out.add(path, Aspect.EXCEPTION, Status.UNVERIFIED, reason, advice)
        else:
            self.out.compared += 1
            reason = f"the reference {left}, the candidate {right}"
            self.out.add(path, Aspect.EXCEPTION, Status.DIFFERENT, reason)

    def _compare_random(self, reference: Observation, candidate: Observation) -> None:
        left, right = reference.rng_after, candidate.rng_after
        if left is None or right is None:
            return
        path = f"random state{self.label}"
        # Inductor's own generators may happen to leave torch's where eager leaves them.
        own_streams = not all(map(draws_like_eager, self.runs.candidate.backends))
        self.random_differs = reference.drew_random_numbers and own_streams
        if left.same_torch(right) and not self.random_differs:
            if self.config.verify_rng:
                self.out.compared += 1
                self.out.add(path, Aspect.RNG, Status.IDENTICAL, "the generators agree")
            return
        candidate_side = self.runs.candidate
        if reference.drew_random_numbers and (
            candidate_side.is_compiled or candidate_side.is_foreign
        ):
            # Its numbers come from another stream: values that depend on them prove nothing.
            self.random_differs = True
            advice = RANDOM_ADVICE if candidate_side.is_compiled else ""
            reason = "the program draws random numbers, and the candidate draws others"
            self.out.add(path, Aspect.RNG, Status.UNVERIFIED, reason, advice)
        elif self.config.verify_rng:
            self.out.compared += 1
            drew = "draws" if reference.drew_random_numbers else "draws none of"
            reason = (
                f"the generators are left in another state; the reference {drew} random numbers"
            )
            self.out.add(path, Aspect.RNG, Status.DIFFERENT, reason)

    def _compare_outputs(self, reference: Observation, candidate: Observation) -> None:
        matching = match(reference.returned, candidate.returned, self.checks)
        self.out.findings += matching.findings
        self.out.notes += matching.notes
        self.out.unmatched += matching.unmatched
        for path, left, right in matching.pairs:
            self._compare_item(path, left, right)
            self._compare_layout(path, reference, candidate)

    def _compare_layout(self, path: str, reference: Observation, candidate: Observation) -> None:
        shown = f"{path}{self.label}"
        left, right = reference.strides.get(path), candidate.strides.get(path)
        if left is not None and right is not None and left != right and len(left) == len(right):
            reason = f"strides {list(right)} instead of {list(left)}"
            if self.config.verify_strides:
                self.out.add(shown, Aspect.STRIDE, Status.DIFFERENT, reason)
            else:
                self.out.notes.append(f"{shown}: {reason}")
        if not self.config.verify_requires_grad or self._is_inference_only(candidate):
            return
        flags = reference.requires_grad.get(path), candidate.requires_grad.get(path)
        if None not in flags and flags[0] != flags[1]:
            reason = f"requires_grad is {flags[1]} instead of {flags[0]}"
            advice = "for a candidate that is for inference only, verify under torch.no_grad()"
            self.out.add(shown, Aspect.REQUIRES_GRAD, Status.DIFFERENT, reason, advice)

    def _is_inference_only(self, candidate: Observation) -> bool:
        """Whether nothing the candidate returns can be differentiated, nor is expected to be.

        A module, or what torch compiled, promises gradients. A runtime's wrapper does not, unless
        the caller asked by the configuration or by an input that requires grad.
        """
        promises = self.runs.candidate.is_module or self.runs.candidate.is_compiled
        asked = self.config.verify_gradients is True or any(
            tensor.requires_grad for _, tensor in input_tensors(self.runs.inputs)
        )
        return not (promises or asked or any(candidate.requires_grad.values()))

    def _compare_aliases(self, reference: Observation, candidate: Observation) -> None:
        if reference.outputs.keys() != candidate.outputs.keys():
            self.out.skipped.append("aliases: the two sides name their outputs differently")
            return
        for pair in sorted(reference.aliases ^ candidate.aliases):
            other, path = pair
            dropped = pair in reference.aliases
            what = "no longer shares" if dropped else "shares"
            reason = f"{what} memory with {other}, unlike the reference's"
            self.out.add(f"{path}{self.label}", Aspect.ALIAS, Status.DIFFERENT, reason)

    def _compare_after(
        self, what: str, reference: dict[str, Any], candidate: dict[str, Any]
    ) -> None:
        """Compare what was changed; an item changed on one side only meets its old value."""
        paths = [*reference, *(path for path in candidate if path not in reference)]
        for path in paths:
            left = reference.get(path, self.runs.initial(path))
            right = candidate.get(path, self.runs.initial(path))
            if left is None or right is None:
                self.out.unmatched.append(f"{path}{self.label}")
                reason = "changed on one side, and unknown on the other"
                shown = f"{path}{self.label}"
                self.out.add(shown, Aspect.STRUCTURE, Status.UNVERIFIED, reason)
                continue
            self._compare_item(path, left, right)
        if not paths:
            self.out.compared += 1
            shown = f"{what} after the call{self.label}"
            self.out.add(shown, Aspect.VALUE, Status.IDENTICAL, "unchanged on both sides")

    def _compare_state(self, reference: Observation, candidate: Observation) -> None:
        if not self.runs.reference.state.tensors and not self.runs.candidate.state.tensors:
            return
        if not self.runs.candidate.state.tensors:
            # Nothing of the candidate's parameters can be seen: another runtime, or a server.
            if reference.state:
                self.out.skipped.append("the candidate's buffers after the call cannot be seen")
            return
        self._compare_after("parameters and buffers", reference.state, candidate.state)

    def _compare_gradients(self, reference: Observation, candidate: Observation) -> None:
        self.out.skipped += [
            f"gradients through {path}{self.label}, {reference.kinds[path].name}: none of its "
            "parts can be differentiated"
            for path in reference.cut_off
        ]
        if self._is_inference_only(candidate):
            if reference.gradients:
                self.out.skipped.append(
                    f"{len(reference.gradients)} gradients: nothing the candidate returns can be "
                    "differentiated"
                )
            return
        if reference.gradient_error is not None or candidate.gradient_error is not None:
            errors = reference.gradient_error, candidate.gradient_error
            self._compare_errors(*errors, f"backward{self.label}")
            return
        missing = [path for path in reference.gradients if path not in candidate.gradients]
        for path, left in reference.gradients.items():
            if path not in missing:
                self._compare_gradient(path, left, candidate.gradients[path])
                self._compare_gradient_layout(path, reference, candidate)
        if missing:
            self.out.unmatched += [f"{path}{self.label}" for path in missing]
            reason = f"{len(missing)} gradients have no counterpart of their name: {missing[0]} ..."
            advice = "give the candidate the same parameter names, or set verify_gradients=False"
            shown = f"gradients{self.label}"
            self.out.add(shown, Aspect.STRUCTURE, Status.UNVERIFIED, reason, advice)

    def _compare_gradient(
        self, path: str, left: torch.Tensor | None, right: torch.Tensor | None
    ) -> None:
        """An unused input's gradient is None in one program and zeros in another: no difference."""
        if left is None and right is None:
            self.out.compared += 1
            reason = "unused on both sides"
            self.out.add(f"{path}{self.label}", Aspect.VALUE, Status.IDENTICAL, reason)
            return
        some = left if left is not None else right
        if some is None:
            return
        zeros = torch.zeros_like(some)
        self._compare_item(path, zeros if left is None else left, zeros if right is None else right)

    def _compare_gradient_layout(
        self, path: str, reference: Observation, candidate: Observation
    ) -> None:
        """Optimizers take sparse gradients in other ways than dense ones, or not at all."""
        left, right = (seen.gradient_layouts.get(path) for seen in (reference, candidate))
        if left is not None and right is not None and left is not right:
            reason = f"layout {_short(right)} instead of {_short(left)}"
            self.out.add(f"{path}{self.label}", Aspect.STRUCTURE, Status.DIFFERENT, reason)

    def _compare_item(self, path: str, left: Any, right: Any) -> None:
        evidence = ItemEvidence(self.runs, path, self.call, lifts=self.lifts)
        if self.random_differs:
            self._compare_random_item(path, left, right)
            return
        try:
            findings, notes = check_pair(path, left, right, self.checks, evidence)
            if not all(finding.status.passes() for finding in findings):
                context = self._context(path, left)
                findings = self.explainer.explain(findings, left, right, evidence, context)
        except NoiseNotYetMeasured:
            self._put_off.append((len(self.out.findings), path, left, right))
            return
        self.out.compared += 1
        self.runs.settled.add((self.call, path))
        self.out.findings += relabelled(findings, self.label)
        self.out.notes += notes

    def _compare_put_off(self) -> None:
        """Compare what needs perturbed runs, now that these can leave out all the rest."""
        self.runs.puts_off = False
        before, self.out.findings = self.out.findings, []
        told = 0
        for position, path, left, right in self._put_off:
            self.out.findings += before[told:position]
            told = position
            self._compare_item(path, left, right)
        self.out.findings += before[told:]

    def _context(self, path: str, value: Any) -> Context:
        """What a value may have been mixed up with."""
        from paritas.diagnosis.cases import Context

        before = self.runs.initial(path) if path.endswith(AFTER) else None
        earlier = {"what it was before the call": before}
        if self.call:
            first = self.runs.complete(self.runs.native[0], path)
            earlier["what it was in the call before"] = first
        shape = getattr(value, "shape", None)
        near = {**self.runs.reference.state.tensors, **dict(input_tensors(self.runs.inputs))}
        known = {
            name: old
            for name, old in earlier.items()
            if isinstance(old, torch.Tensor) and old.shape == shape
        }
        return Context(named=likely(near, value), earlier=known)

    def _compare_random_item(self, path: str, left: Any, right: Any) -> None:
        """Shapes and dtypes still count; values only if they do not depend on the draws."""
        structure = dataclasses.replace(self.checks, values=False)
        findings, _ = check_pair(path, left, right, structure)
        if all(finding.status.passes() for finding in findings):
            found, _ = check_pair(path, left, right, self.checks)
            if any(f.status is not Status.IDENTICAL for f in found):
                reason = "depends on random numbers that the candidate draws differently"
                findings = [
                    Finding(
                        path=path,
                        aspect=Aspect.VALUE,
                        status=Status.UNVERIFIED,
                        reason=reason,
                        dtype=findings[0].dtype,
                        shape=findings[0].shape,
                    )
                ]
                self.out.findings += relabelled(findings, self.label)
                return
            findings = found
        self.out.compared += 1
        self.out.findings += relabelled(findings, self.label)


def relabelled(findings: Iterable[Finding], label: str) -> list[Finding]:
    """The same findings with a label behind their paths."""
    return [msgspec.structs.replace(finding, path=f"{finding.path}{label}") for finding in findings]


def _short(layout: torch.layout) -> str:
    return str(layout).removeprefix("torch.")


def _told(error: Exception | None) -> str:
    if error is None:
        return "returns"
    text = str(error).strip().splitlines()
    return f"raises {type(error).__name__}: {text[0]:.120}" if text else f"raises {error!r}"


def _same_kind(reference: Exception, candidate: Exception) -> bool:
    """Compilers wrap what the program raised: look at the causes as well."""
    kinds = []
    cause: BaseException | None = candidate
    while cause is not None:
        kinds.append(cause)
        cause = cause.__cause__
    return any(isinstance(kind, type(reference)) for kind in kinds)
