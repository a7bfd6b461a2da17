"""guard(): a backend for `torch.compile` whose every graph is checked as it runs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from paritas._torch.backends import Backend, find_backend
from paritas._torch.graphs import computes_tensors, graph_source
from paritas._torch.inductor import compile_watched
from paritas._torch.naming import captured_input_names
from paritas.checking.guarding.captured import GuardedCapture
from paritas.checking.guarding.journal import Journal
from paritas.checking.guarding.lowered import GuardedGraph, Suspect
from paritas.checking.guarding.settings import OFF, GuardSettings, is_enabled
from paritas.checking.remembering import MadeBy

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule

    from paritas._torch.inductor import LoweredGraph
    from paritas.checking.passes.checks import PassChecks
    from paritas.numerics.findings import Finding, Verdict


def guard(  # noqa: PLR0913  (each is a switch of its own)
    backend: str | Callable[..., Any] = "inductor",
    *,
    on_mismatch: str = "raise",
    every: float = 1,
    options: dict[str, Any] | None = None,
    locate: bool = True,
    enabled: bool | None = None,
    check_passes: bool = False,
    strict: bool = False,
) -> Guard:
    """Make a backend for `torch.compile` that checks every graph as it runs.

    Inductor's code is checked below AOTAutograd, forward and backward graph each against the graph
    run op by op, natively and in float64. Any other backend's code is checked against the captured
    graph, and its gradients, where they flow, against that graph's.

    Args:
        backend: a name that `torch.compile` knows, or a function from a graph and example inputs
            to a callable.
        on_mismatch: `raise` a `MismatchError`; `warn`; `record` for `verdict()`; or `fallback`,
            which gives the program the reference's result and goes on.
        every: check each n-th call of a graph; below 1, that share of its calls. The first call of
            a graph, and the first with new dynamic sizes, is always checked.
        options: of the compiler, as in `torch.compile(options=...)`.
        locate: find the first wrong operator of what differs.
        enabled: False gives the plain backend; so does PARITAS_GUARD=0 in the environment.
        check_passes: check Inductor's graph passes, and its split into forward and backward, too.
        strict: count `unstable` as a failure.
    """
    settings = GuardSettings(
        on_mismatch=on_mismatch,
        every=every,
        locate=locate,
        check_passes=check_passes,
        strict=strict,
    )
    return Guard(find_backend(backend, options), settings, enabled=is_enabled(enabled))


class Guard:
    """A guarded backend: pass it to `torch.compile(backend=...)`.

    Attributes:
        settings: what was asked for.
        enabled: off, it hands every graph to the plain backend.
        journal: graphs, calls and findings so far.
    """

    def __init__(
        self,
        backend: Backend,
        settings: GuardSettings,
        *,
        enabled: bool = True,
        journal: Journal | None = None,
    ) -> None:
        """Several guards may write to one journal."""
        self.backend = backend
        self.settings = settings
        self.enabled = enabled
        self.journal = Journal(strict=settings.strict) if journal is None else journal
        self.__name__ = f"guarded_{backend.name}"
        if not enabled:
            self.journal.add((), [OFF])

    def verdict(self) -> Verdict:
        """Everything this guard has seen so far, in one verdict."""
        return self.journal.verdict()

    def __call__(self, graph: GraphModule, example_inputs: list[Any], **given: Any) -> Any:
        """Compile and guard one captured graph; `given` is the mode and options of the compile.

        A graph of sizes alone is left to the backend: there is nothing in it to be compared.
        """
        if not self.enabled or not computes_tensors(graph):
            return self.backend.compile(graph, example_inputs, **given)
        number = self.journal.next_capture()
        if self.backend.is_inductor:
            return self._guard_lowered(graph, example_inputs, number, given)
        return self._guard_captured(graph, example_inputs, number, given)

    def _guard_captured(
        self, graph: GraphModule, example_inputs: list[Any], number: int, given: dict[str, Any]
    ) -> GuardedCapture:
        def compile_graph(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            compiled: Callable[..., Any] = self.backend.compile(module, inputs, **given)
            return compiled

        guarded = GuardedCapture.of(
            graph, example_inputs, compile_graph, self.settings, self.journal, f"graph {number}"
        )
        guarded.made_by = MadeBy(self.backend, given)
        return guarded

    def _guard_lowered(
        self, graph: GraphModule, example_inputs: list[Any], number: int, given: dict[str, Any]
    ) -> Any:
        names = captured_input_names(graph)
        source = graph_source(graph)
        guarded: list[GuardedGraph] = []
        checks = self._pass_checks()

        def watch(lowered: LoweredGraph, compiled: Callable[..., Any]) -> GuardedGraph:
            kind = "backward" if lowered.is_backward else "forward"
            entry = self.journal.enter(f"graph {number} {kind}", source)
            result = GuardedGraph(
                lowered, compiled, names, self.settings, self.journal, entry, self._locator()
            )
            result.made_by = MadeBy(self.backend, given)
            if checks is not None:
                # Told at the next call: what is raised during a compile is not for the user.
                result.late_findings = self._take(checks)
            guarded.append(result)
            return result

        compiled = compile_watched(
            graph,
            example_inputs,
            watch,
            self.backend.inductor_options(given),
            around=contextlib.nullcontext if checks is None else checks.watching,
        )
        if not guarded:
            reason = "torch gave back code for it that never came by the guard"
            self.journal.enter(f"graph {number}", source, unguarded=reason)
        if checks is not None and checks.stages == 0:
            reason = "no pass of the compiler was heard of, so none was checked"
            self.journal.enter(f"graph {number} passes", source, unguarded=reason)
        return compiled

    def _pass_checks(self) -> PassChecks | None:
        if not self.settings.check_passes:
            return None
        from paritas.checking.passes.checks import PassChecks

        return PassChecks()

    def _take(self, checks: PassChecks) -> list[Finding]:
        """What the checks of the passes found since they were last asked."""
        findings, checks.findings = checks.findings, []
        self.journal.passes += checks.passes
        self.journal.splits += checks.splits
        checks.passes = checks.splits = 0
        self.journal.add((), checks.notes)
        return findings

    def _locator(self) -> Callable[[Suspect], list[Finding]] | None:
        if not self.settings.locate:
            return None
        from paritas.checking.locating.lowered import locate

        return locate
