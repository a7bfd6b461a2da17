"""A captured graph whose backend cannot be looked into: its results and gradients, checked."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas._torch.graphs import graph_source
from paritas.checking.guarding.calls import GuardedCode, located
from paritas.checking.guarding.captured_runs import (
    CapturedReference,
    CapturedRuns,
    GradientRuns,
    Surroundings,
)
from paritas.checking.guarding.graph_runs import copy_argument
from paritas.checking.guarding.journal import Journal
from paritas.checking.observing import AFTER, AFTER_BACKWARD, Observation, memory
from paritas.numerics.findings import Aspect, Status
from paritas.numerics.metrics import bitwise_equal
from paritas.recording.isolation import Copier, RandomState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.fx import GraphModule

    from paritas.checking.guarding.journal import GraphEntry
    from paritas.checking.guarding.settings import GuardSettings
    from paritas.numerics.findings import Finding, Verdict


class GuardedCapture(GuardedCode):
    """A backend's code for a captured graph, checked on the calls its schedule names."""

    def __init__(
        self,
        reference: CapturedReference,
        compile_graph: Callable[[GraphModule, list[Any]], Callable[..., Any]],
        compiled: Callable[..., Any],
        settings: GuardSettings,
        journal: Journal,
        entry: GraphEntry,
    ) -> None:
        """`compiled` is what `compile_graph` made after `reference` was copied."""
        super().__init__(settings, journal, entry)
        self.reference = reference
        self.compile_graph = compile_graph
        self.compiled = compiled
        self._backward: GuardedCode | None = None
        self._given_away: list[weakref.ref[Tensor]] = []
        self._located: dict[bool, list[Finding]] = {}

    @classmethod
    def of(
        cls,
        graph: GraphModule,
        example_inputs: list[Any],
        compile_graph: Callable[[GraphModule, list[Any]], Callable[..., Any]],
        settings: GuardSettings,
        journal: Journal,
        label: str,
    ) -> GuardedCapture:
        """Compile a graph and guard what comes of it."""
        entry = journal.enter(label, graph_source(graph))
        reference = CapturedReference.of(graph)
        compiled = compile_graph(graph, example_inputs)
        return cls(reference, compile_graph, compiled, settings, journal, entry)

    @property
    def backward(self) -> GuardedCode:
        """The gradients, with a page of their own."""
        if self._backward is None:
            entry = self.journal.enter(f"{self.entry.label} gradients", self.entry.source)
            self._backward = GuardedCode(self.settings, self.journal, entry)
            self._backward.made_by = self.made_by
        return self._backward

    def __call__(self, *args: Any) -> Any:
        """Run the compiled code, and the check where one is due."""
        if not self.is_due(args):
            return self.compiled(*args)
        copier = Copier()
        kept = [copy_argument(copier, value) for value in args]
        rng = RandomState.now()
        surroundings = Surroundings.now()
        runs = CapturedRuns(self.reference, kept, rng, surroundings, self.settings.seed)
        watch = GradientWatch(self, kept, rng, surroundings)
        rng.restore()
        candidate = Observation(rng_before=rng)
        results: Any = ()
        try:
            results = self.compiled(*watch.entering(list(args), runs.native[0]))
        except Exception as error:  # noqa: BLE001  (what it raises is a finding, then raised)
            candidate.error = error
        candidate.rng_after = RandomState.now()
        try:
            if candidate.error is None:
                self.reference.name_results(candidate, results, list(args), kept)
            reused = [] if candidate.error else self._reused(results, runs.native[0])
            verdict = self._judge(runs, candidate, reused)
            verdict = self._with_origin(verdict, runs, self.entry.label, gradients=False)
        except Exception as error:  # noqa: BLE001  (of ours; the program must not suffer from it)
            verdict = self.own_failure(error)
        finally:
            candidate.rng_after.restore()
        watch.leaving(results)
        return self.conclude(
            verdict,
            results,
            candidate.error,
            lambda: self._run_reference(args, kept, rng),
            (self.reference.module, kept),
        )

    def _reused(self, results: Any, reference: Observation) -> list[str]:
        """The outputs in the memory of one that the call before gave away and that still exists.

        What the graph itself hands out again and again, an input or a constant, is none.
        """
        named = dict(zip(reference.outputs, results, strict=False))
        tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        held = {memory(tensor) for ref in self._given_away if (tensor := ref()) is not None} - {0}
        self._given_away = [weakref.ref(tensor) for tensor in tensors.values()]
        handed_on = {name for pair in reference.aliases for name in pair}
        if self.made_by is not None and self.made_by.backend.name == "cudagraphs":
            return []  # as torch documents it
        return [
            name
            for name, tensor in tensors.items()
            if memory(tensor) in held and name not in handed_on
        ]

    def _judge(
        self, runs: CapturedRuns, candidate: Observation, reused: Sequence[str] = ()
    ) -> Verdict:
        comparer = self.comparer(runs)
        reference = runs.native[0]
        if self.judge_errors(comparer.out, reference.error, candidate.error):
            return self.rolled_up(comparer.out, runs)
        comparer.compare_random(reference, candidate)
        comparer.compare_values(reference.outputs, candidate.outputs)
        written = sorted(reference.after.keys() | candidate.after.keys())
        comparer.compare_values(
            {name: runs.complete(reference, name) for name in written},
            {name: runs.complete(candidate, name) for name in written},
        )
        comparer.compare_strides(reference, candidate, dict(reference.strides))
        comparer.compare_aliases(reference, candidate, set(reference.outputs))
        for name in reused:
            reason = "is in the memory of the output of the call before, which it overwrites"
            path = f"{self.entry.label}: {name}"
            comparer.out.add(path, Aspect.ALIAS, Status.DIFFERENT, reason)
        for name, needs in reference.requires_grad.items():
            if candidate.requires_grad.get(name, needs) != needs:
                reason = f"requires_grad is {not needs} instead of {needs}"
                path = f"{self.entry.label}: {name}"
                comparer.out.add(path, Aspect.REQUIRES_GRAD, Status.DIFFERENT, reason)
        return self.rolled_up(comparer.out, runs)

    def _run_reference(self, args: tuple[Any, ...], kept: list[Any], rng: RandomState) -> Any:
        """The reference on the caller's own arguments, so that gradients flow through it."""
        with torch.no_grad():
            for value, before in zip(args, kept, strict=True):
                if isinstance(value, torch.Tensor):
                    value.detach().copy_(before.detach())
        rng.restore()
        return self.reference.module(*args)

    def judge_gradients(
        self,
        kept: list[Any],
        rng: RandomState,
        surroundings: Surroundings,
        cotangents: dict[int, Tensor],
        found: dict[str, Tensor | None],
        besides: dict[str, tuple[Aspect, str]],
    ) -> dict[str, Tensor | None]:
        """Compare gradients; give those that the program is to go on with.

        `besides` is what the backward pass did besides: those of torch's own operators do nothing.
        """
        now = RandomState.now()
        code = self.backward
        code.entry.calls += 1
        try:
            runs = GradientRuns(
                self.reference, kept, rng, surroundings, self.settings.seed, cotangents
            )
            comparer = code.comparer(runs)
            reference = runs.native[0]
            if not code.judge_errors(comparer.out, reference.error, None):
                for name, gradient in found.items():
                    _compare_gradient(comparer, name, reference.gradients.get(name), gradient)
            for name, (aspect, reason) in besides.items():
                path = f"{code.entry.label}: {name}"
                comparer.out.add(path, aspect, Status.DIFFERENT, reason)
            verdict = code.rolled_up(comparer.out, runs)
            verdict = self._with_origin(verdict, runs, code.entry.label, gradients=True)
            instead = {name: reference.gradients.get(name) for name in found}
        except Exception as error:  # noqa: BLE001  (of ours; the program must not suffer from it)
            verdict, instead = code.own_failure(error), found
        finally:
            now.restore()
        called = (self.reference.module, kept)
        result: dict[str, Tensor | None] = code.conclude(
            verdict, found, None, lambda: instead, called
        )
        return result

    def _with_origin(
        self, verdict: Verdict, runs: CapturedRuns, label: str, *, gradients: bool
    ) -> Verdict:
        differs = any(f.status is not Status.UNVERIFIED for f in verdict.failures)
        if not differs or not self.settings.locate or runs.native[0].error is not None:
            return verdict
        if gradients not in self._located:
            from paritas.checking.locating.captured import CapturedSuspect, locate_captured

            suspect = CapturedSuspect(runs, label, verdict.failures, gradients, self._check_part)
            self._located[gradients] = located(locate_captured, suspect)
        findings = (*self._located[gradients], *verdict.findings)
        return msgspec.structs.replace(verdict, findings=findings)

    def _check_part(
        self,
        graph: GraphModule,
        args: list[Any],
        gradients: bool,  # noqa: FBT001
        calls: int,
    ) -> Verdict:
        """Guard what the backend makes of another graph, on given arguments."""
        settings = dataclasses.replace(
            self.settings, on_mismatch="record", every=1, locate=False, check_passes=False
        )
        journal = Journal(strict=settings.strict)
        with torch.set_grad_enabled(gradients):
            code = GuardedCapture.of(graph, args, self.compile_graph, settings, journal, "part")
            for _ in range(calls):
                copier = Copier()
                results = code(*[copy_argument(copier, value) for value in args])
                ends = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
                if gradients and ends:
                    torch.autograd.backward(ends, [torch.randn_like(end) for end in ends])
        return journal.verdict()


def _compare_gradient(comparer: Any, name: str, reference: Any, candidate: Any) -> None:
    """No gradient and a gradient of zeros are the same to whoever adds it up."""
    if (reference is None) != (candidate is None):
        known = candidate if reference is None else reference
        zeros = torch.zeros_like(known)
        reference, candidate = (zeros if v is None else v for v in (reference, candidate))
    comparer.compare_value(name, reference, candidate)


class GradientWatch:
    """Sees what gradients come down to a call's outputs and what its code makes of them.

    Inputs that require grad go through an identity whose backward sees their gradients all at
    once; outputs get hooks. An input that the graph writes to, or hands out, cannot be replaced so.
    """

    def __init__(
        self, code: GuardedCapture, kept: list[Any], rng: RandomState, surroundings: Surroundings
    ) -> None:
        """For one call."""
        self.code = code
        self.kept = kept
        self.rng = rng
        self.surroundings = surroundings
        self.names: list[str] = []
        self.cotangents: dict[int, Tensor] = {}
        self._given: list[Any] = []
        self._untouched: dict[str, tuple[Tensor, Tensor]] = {}
        self._rng: RandomState | None = None

    def entering(self, args: list[Any], reference: Observation) -> list[Any]:
        """The arguments for the compiled code."""
        if not torch.is_grad_enabled() or reference.error is not None:
            return args
        handed_out = {name for pair in reference.aliases for name in pair}
        positions = []
        names = self.code.reference.inputs
        for position, (name, value) in enumerate(zip(names, args, strict=False)):
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                continue
            if name in handed_out or f"{name}{AFTER}" in reference.after:
                label = self.code.entry.label
                reason = "is not checked, since the graph writes to it or hands it out"
                self.code.journal.add((), [f"{label}: the gradient of {name} {reason}"])
            else:
                positions.append(position)
        if not positions:
            return args
        self._given = list(args)
        self.names = [f"gradient of {names[p]}" for p in positions]
        entering = [args[position] for position in positions]
        replaced = _Entrance.apply(self, *entering)  # type: ignore[no-untyped-call]
        args = list(args)
        for position, value in zip(positions, replaced, strict=True):
            args[position] = value
        return args

    def leaving(self, results: Any) -> None:
        """Watch the outputs."""
        if not self.names:
            return
        seen: set[int] = set()
        for position, value in enumerate(results):
            if isinstance(value, torch.Tensor) and value.requires_grad and id(value) not in seen:
                seen.add(id(value))
                value.register_hook(_Remember(self, position))

    def arrive(self, position: int, cotangent: Tensor) -> None:
        """The gradient of an output is there. With the first one the backward pass begins."""
        if not self.cotangents:
            named = zip(self.code.reference.inputs, self._given, self.kept, strict=False)
            self._untouched = {
                name: (value, before)
                for name, value, before in named
                if isinstance(value, torch.Tensor)
                and bitwise_equal(value.detach(), before.detach())
            }
            self._rng = RandomState.of_torch()
        self.cotangents[position] = cotangent.detach().clone()

    def _besides(self) -> dict[str, tuple[Aspect, str]]:
        """What changed since the backward pass began."""
        found = {
            f"{name}{AFTER_BACKWARD}": (Aspect.VALUE, "the backward pass writes to this input")
            for name, (value, before) in self._untouched.items()
            if not bitwise_equal(value.detach(), before.detach())
        }
        if self._rng is not None and not self._rng.same_torch(RandomState.of_torch()):
            found["random state"] = (Aspect.RNG, "the backward pass draws random numbers")
        self._untouched, self._rng = {}, None
        return found

    def check(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Compare the gradients of the inputs, once they are there."""
        cotangents, found = dict(self.cotangents), dict(zip(self.names, gradients, strict=True))
        besides = self._besides()
        self.cotangents.clear()
        if not cotangents:
            return gradients
        result = self.code.judge_gradients(
            self.kept, self.rng, self.surroundings, cotangents, found, besides
        )
        return tuple(result.values())


class _Remember:
    """A hook that keeps the gradient of one output."""

    def __init__(self, watch: GradientWatch, position: int) -> None:
        self.watch = watch
        self.position = position

    def __call__(self, gradient: Tensor) -> None:
        self.watch.arrive(self.position, gradient)


class _Entrance(torch.autograd.Function):
    """The identity, whose backward shows the gradients to a watch."""

    @staticmethod
    def forward(ctx: Any, watch: GradientWatch, *values: Tensor) -> tuple[Tensor, ...]:
        """Hand on views."""
        ctx.watch = watch
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Hand on gradients."""
        return (None, *ctx.watch.check(gradients))
