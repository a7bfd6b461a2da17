"""verify(): does the compiled model compute what the framework model computes?"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas._torch.compiled import room_for_entries
from paritas.checking.comparing import Collected, Comparer
from paritas.checking.config import Inputs, VerifyConfig, input_sets
from paritas.checking.foreign import limited
from paritas.checking.observing import Conditions, Observation, input_tensors, running
from paritas.checking.remembering import FailedPair, remember
from paritas.checking.runs import Runs
from paritas.checking.subjects import Subject, subject
from paritas.errors import MismatchError, UsageError
from paritas.numerics.findings import Aspect, Coverage, Status, Verdict
from paritas.numerics.metrics import bitwise_equal
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
        inputs: a list or tuple of positional inputs, `Inputs(args, kwargs)`, or a list of
            `Inputs`, each of which is compared.
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
        self.conditions = Conditions(gradients=self._differentiates(), seed=config.seed)

    def run(self) -> Verdict:
        natives = self._run_reference()
        mine = self._run_candidate(len(natives))
        if not self.config.enabled:
            note = "comparison was switched off (enabled=False); both sides ran"
            return Verdict(coverage=Coverage(), notes=(note,), enabled=False)
        runs = Runs(
            self.reference,
            self.candidate,
            self.inputs,
            self.rng,
            self.conditions,
            natives,
            lift=self.config.lift,
        )
        runs.tell = self.tell
        runs.changing = frozenset(name for seen in (*natives, *mine) for name in seen.changed_state)
        collected = Comparer(runs, self.config, 0, self.label).compare(natives[0], mine[0])
        verdicts = [collected.verdict(strict=self.config.strict)]
        if self.repeats or len(mine) > 1:
            second = self._compare_second(runs, natives, mine)
            verdicts.append(second.verdict(strict=self.config.strict))
        if all(verdict.passed for verdict in verdicts) and runs.ran_uncompiled():
            verdicts.append(self._uncompiled().verdict(strict=self.config.strict))
        merged = Verdict.merge(verdicts)
        notes = tuple(dict.fromkeys((*merged.notes, *runs.notes)))
        return msgspec.structs.replace(merged, notes=notes)

    def _uncompiled(self) -> Collected:
        collected = Collected()
        collected.add(
            f"candidate{self.label}",
            Aspect.HARNESS,
            Status.UNVERIFIED,
            "torch.compile compiled nothing of it, so that eager was compared with eager",
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
        with self._room(), running(self.candidate, self.rng, self.conditions) as call:
            seen = [call(self.inputs)]
            if seen[0].error is None and (again or reference_calls > 1):
                seen.append(call(self.inputs))
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


def _same_observation(first: Observation, second: Observation) -> bool:
    if second.error is not None or first.aliases != second.aliases:
        return False
    left, right = dict(first.items()), dict(second.items())
    if left.keys() != right.keys():
        return False
    return all(_same_value(value, right[path]) for path, value in left.items())


def _same_value(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bitwise_equal(left, right)
    return type(left) is type(right) and bool(left == right)
