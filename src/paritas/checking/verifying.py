"""verify(): does the compiled model compute what the framework model computes?"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas._torch.compiled import reuses_outputs, room_for_entries
from paritas._torch.hooks import accumulation_hooks
from paritas.checking.comparing import Collected, Comparer
from paritas.checking.config import Inputs, VerifyConfig, input_sets
from paritas.checking.foreign import limited
from paritas.checking.further_gradients import FurtherGradients
from paritas.checking.observing import (
    AFTER,
    OUTPUT,
    STATE,
    Conditions,
    Observation,
    input_tensors,
    memory,
    running,
    same_value,
)
from paritas.checking.remembering import FailedPair, remember
from paritas.checking.runs import Runs
from paritas.checking.subjects import Subject, subject
from paritas.errors import MismatchError, UsageError
from paritas.numerics.contents import SEQUENCE
from paritas.numerics.findings import Aspect, Coverage, Status, Verdict
from paritas.recording.isolation import RandomState
from paritas.reporting.progress import shows_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@shows_progress
def verify(
    inputs: Any,
    framework_model: Callable[..., Any],
    compiled_model: Callable[..., Any],
    verify_cfg: VerifyConfig | None = None,
    *,
    on_progress: Callable[[str], None] | None = None,
) -> Verdict:
    """Compare a model with its compiled, fused or ported form.

    Args:
        inputs: a list or tuple of positional inputs, a dict of keyword arguments,
            `Inputs(args, kwargs)`, or a list of `Inputs`, each of which is compared.
        framework_model: the reference, an `nn.Module` or any callable.
        compiled_model: the candidate, an `nn.Module` or any callable.
        verify_cfg: what to compare; everything, by default.
        on_progress: called with a few words before each step that may take long.

    Returns:
        The verdict, true if the candidate computes what the reference computes.

    Raises:
        MismatchError: unless the verdict passes, or `raise_on_mismatch` is off.
        UsageError: if there is nothing to call, or nothing to call it with.
    """
    __tracebackhide__ = True
    config = VerifyConfig() if verify_cfg is None else verify_cfg
    if not isinstance(config, VerifyConfig):
        message = f"verify_cfg must be a VerifyConfig, not {config!r:.120}"
        raise UsageError(message)
    config = config.as_used()
    sets = input_sets(inputs)
    reference = subject(framework_model, "reference", "framework_model")
    candidate = subject(compiled_model, "candidate", "compiled_model", reference.state)
    config, limits, around = limited(config, compiled_model)
    tell = on_progress or (lambda _: None)
    rng = RandomState.now()
    verdicts = []
    try:
        with around:
            for position, given in enumerate(sets):
                label = f" (inputs {position + 1})" if len(sets) > 1 else ""
                one = _Verification(reference, candidate, given, config, label, tell)
                verdicts.append(one.run())
    finally:
        rng.restore()
    verdict = Verdict.merge(verdicts)
    if limits:
        verdict = msgspec.structs.replace(verdict, notes=(limits, *verdict.notes))
    if verdict.enabled and not verdict.passed:
        remember(verdict, [FailedPair(framework_model, compiled_model, sets)])
    if config.raise_on_mismatch and verdict.enabled and not verdict.passed:
        raise MismatchError(str(verdict), verdict)
    return verdict


class _Verification:
    """One set of inputs: run both sides, compare what they did, then a second call."""

    def __init__(
        self,
        reference: Subject,
        candidate: Subject,
        inputs: Inputs,
        config: VerifyConfig,
        label: str,
        tell: Callable[[str], None],
    ) -> None:
        self.reference = reference
        self.candidate = candidate
        self.inputs = inputs
        self.config = config
        self.label = label
        self.tell = tell
        self.rng = RandomState.now()
        self.repeats = False
        self.overwritten: list[str] = []
        self.reused: list[str] = []
        self.conditions = Conditions(
            gradients=self._differentiates(),
            seed=config.seed,
            accumulates=_hang_on_accumulation(reference, candidate),
        )

    def run(self) -> Verdict:
        natives = self._run_reference()
        mine = self._run_candidate(len(natives))
        intruded = self._intrusions()
        if not self.config.enabled:
            note = "comparison was switched off (enabled=False); both sides ran"
            return Verdict(coverage=Coverage(), notes=(note,), enabled=False)
        further = FurtherGradients(
            (self.reference, self.candidate), self.inputs, self.rng, self.config, self.conditions
        )
        first, my_first = further.ask((natives[0], mine[0]))
        runs = Runs(
            self.reference,
            self.candidate,
            self.inputs,
            self.rng,
            further.conditions,
            [first, *natives[1:]],
            lift=self.config.lift,
        )
        runs.tell = self.tell
        if self._goes_by_order(natives[0], mine[0]):
            runs.by_order = True
            runs.notes.append("outputs are matched by order: the two sides name them differently")
            mine, (my_first,) = runs.named(mine), runs.named([my_first])
        runs.changing = frozenset(name for seen in (*natives, *mine) for name in seen.changed_state)
        collected = Comparer(runs, self.config, 0, self.label).compare(first, my_first)
        further.report(collected)
        collected.take(intruded)
        if self.repeats or len(mine) > 1:
            collected.take(self._compare_second(runs, natives, mine))
        if collected.passes and runs.ran_uncompiled():
            collected.take(self._uncompiled())
        if collected.passes:
            collected.take(self._run_again(runs, natives[0]))
        if self.config.verify_aliasing:
            collected.take(self._compare_memory(mine[0]))
        collected.notes += runs.notes
        return collected.verdict(strict=self.config.strict)

    def _intrusions(self) -> Collected:
        """What the candidate's calls changed of the reference's own state, which is put back."""
        collected = Collected()
        ours, theirs = self.reference.state, self.candidate.state
        if ours is theirs or not self.config.enabled:
            return collected
        for name in ours.changed():
            collected.compared += 1
            reason = "the candidate's call changes this part of the reference, and not its own"
            path = f"{STATE} {name}{AFTER}{self.label}"
            collected.add(path, Aspect.VALUE, Status.DIFFERENT, reason)
        ours.restore()
        return collected

    @property
    def _outputs_are_reused(self) -> bool:
        return torch.cuda.is_available() and any(map(reuses_outputs, self.candidate.backends))

    def _unreadable(self) -> dict[str, str]:
        return {**self.reference.state.unreadable, **self.candidate.state.unreadable}

    def _compare_memory(self, first: Observation) -> Collected:
        """An output belongs to the caller: nobody writes to it later."""
        collected = Collected()
        if self._outputs_are_reused:
            collected.notes.append("outputs lie in CUDA graphs: the next call overwrites them")
        wrong = dict.fromkeys(first.written_later, "is written to after the call")
        wrong |= dict.fromkeys(self.reused, "is in the memory of the next call's output")
        wrong |= dict.fromkeys(self.overwritten, "is overwritten by the next call")
        if not wrong:
            return collected
        conditions = dataclasses.replace(self.conditions, gradients=False, holds=True)
        with running(self.reference, self.rng, conditions) as call:
            one, two = call(self.inputs), call(self.inputs)
        usual = {*one.written_later, *_reused(one, two)}
        for path, what in wrong.items():
            if path not in usual:
                collected.compared += 1
                reason = f"{what}, unlike the reference's"
                advice = "return a tensor of its own, or a copy"
                collected.add(f"{path}{self.label}", Aspect.ALIAS, Status.DIFFERENT, reason, advice)
        return collected

    def _run_again(self, runs: Runs, first: Observation) -> Collected:
        """The reference must still be what it was: else it is unknown what was compared."""
        self.tell("running the reference once more")
        collected = Collected()
        first = dataclasses.replace(first, further={}, again={})
        with running(self.reference, self.rng, self.conditions) as call:
            last = call(self.inputs)
        for name, reason in self._unreadable().items():
            collected.skipped.append(f"{STATE} {name}{self.label}: {reason}")
        failures = {**self.reference.state.failures, **self.candidate.state.failures}
        for name, reason in failures.items():
            path = f"{STATE} {name}{self.label}"
            collected.add(path, Aspect.HARNESS, Status.UNVERIFIED, reason)
        if first.error is not None or _same_observation(first, last):
            return collected
        runs.unsettle()
        quiet = dataclasses.replace(self.config, verify_rng=False)
        found = Comparer(runs, quiet, 0, "", lifts=False).compare(first, last)
        moved = [finding.path for finding in found.findings if not finding.status.passes()]
        moved += [path for path, _ in first.items() if not runs.repeats(path, first, last)]
        if not moved:
            collected.notes.append("the reference does not give the same bits every time")
            return collected
        named = ", ".join(list(dict.fromkeys(moved))[:3])
        reason = f"run once more at the end, it no longer gives the same {named}"
        advice = "what the two share was changed and could not be put back, or it is not repeatable"
        collected.add(f"reference{self.label}", Aspect.HARNESS, Status.UNVERIFIED, reason, advice)
        return collected

    def _goes_by_order(self, reference: Observation, candidate: Observation) -> bool:
        """Whether the candidate's outputs have other names, and that is no difference.

        Other runtimes give their results in a list, whatever the model gives.
        """
        root = candidate.kinds.get(OUTPUT)
        is_list = root is not None and root.family == SEQUENCE
        asked = self.config.match_by_order or (self.candidate.is_foreign and is_list)
        return asked and reference.outputs.keys() != candidate.outputs.keys()

    def _uncompiled(self) -> Collected:
        collected = Collected()
        collected.add(
            f"candidate{self.label}",
            Aspect.HARNESS,
            Status.UNVERIFIED,
            "torch.compile compiled nothing, so eager was compared with eager",
            "see TORCH_LOGS=graph_breaks; torch skips recurrent modules, and after one of them its "
            "own containers as well: compile a function or module of your own around them",
        )
        return collected

    def _differentiates(self) -> bool:
        """By default where anything requires grad and gradients are on."""
        if self.config.verify_gradients is not None:
            return self.config.verify_gradients
        tensors = [*self.reference.state.tensors.values()]
        tensors += [tensor for _, tensor in input_tensors(self.inputs)]
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    def _run_reference(self) -> list[Observation]:
        """One call, and a second where the first left something behind."""
        self.tell("running the reference")
        with running(self.reference, self.rng, self.conditions) as call:
            seen = [call(self.inputs)]
            again = self.config.verify_second_call and self.config.enabled
            if again and seen[0].error is None and not seen[0].is_stateless:
                seen.append(call(self.inputs))
        return seen

    def _run_candidate(self, reference_calls: int) -> list[Observation]:
        self.tell("running the candidate (a compiler works on the first call)")
        again = self.config.verify_second_call and self.config.enabled
        holds = self.config.verify_aliasing and not self._outputs_are_reused
        conditions = dataclasses.replace(self.conditions, holds=holds)
        with self._room(), running(self.candidate, self.rng, conditions) as call:
            seen = [call(self.inputs)]
            if seen[0].error is None and (again or reference_calls > 1):
                seen.append(call(self.inputs))
                self.overwritten = seen[0].written_later
                self.reused = _reused(*seen)
        if reference_calls == 1 and len(seen) > 1 and _same_observation(*seen):
            # Nothing more is to be learned from it: it need not be held while others run.
            seen.pop()
            self.repeats = True
        return seen

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        """Our own entries in Dynamo's caches must not push the candidate into eager mode."""
        with room_for_entries() if self.candidate.is_compiled else contextlib.nullcontext():
            yield

    def _compare_second(
        self, runs: Runs, natives: list[Observation], mine: list[Observation]
    ) -> Collected:
        """A program without state does the same again; one with state goes on from it."""
        label = f" (second call){self.label}"
        unseen = sorted({*self.reference.state.unseen, *self.candidate.state.unseen})
        if unseen:
            collected = Collected()
            note = f"the second call was not judged: {unseen[0]} cannot be put back"
            collected.notes.append(note)
            return collected
        if self.repeats:
            collected = Collected(compared=1)
            reason = "the candidate does the same again, bit for bit"
            collected.add(f"call{label}", Aspect.VALUE, Status.IDENTICAL, reason)
            return collected
        if len(natives) == 1:
            # It changed its mind. Its lifted run was of the first call only.
            runs.unsettle()
            return Comparer(runs, self.config, 0, label, lifts=False).compare(natives[0], mine[1])
        return Comparer(runs, self.config, 1, label).compare(natives[1], mine[1])


def _reused(first: Observation, second: Observation) -> list[str]:
    """The outputs of a call that stand in memory which the call before gave away."""
    taken = {memory(tensor) for tensor in first.live.values()} - {0}
    return [path for path, tensor in second.live.items() if memory(tensor) in taken]


def _same_observation(first: Observation, second: Observation) -> bool:
    if second.error is not None or first.aliases != second.aliases:
        return False
    if first.kinds != second.kinds:
        return False
    left, right = dict(first.items()), dict(second.items())
    if left.keys() != right.keys():
        return False
    return all(same_value(value, right[path]) for path, value in left.items())


def _hang_on_accumulation(reference: Subject, candidate: Subject) -> bool:
    """Whether hooks that only `.backward()` runs tell the two sides apart.

    The hooks of a shared parameter run for both alike. Those are the caller's, an optimizer
    behind them perhaps, and are left alone.
    """
    left, right = reference.state.tensors, candidate.state.tensors
    return any(
        left.get(name) is not right.get(name)
        and any(accumulation_hooks(side[name]) for side in (left, right) if name in side)
        for name in {**left, **right}
    )
