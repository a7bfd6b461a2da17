"""guard(): a backend for `torch.compile` that checks every graph as it runs.

guard_everywhere() does the same for every `torch.compile` of a process.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import unittest
from typing import TYPE_CHECKING, Any

from paritas.core.call_options import takes_options
from paritas.core.compiled.guard_settings import (
    OFF,
    EverywhereOptions,
    GuardOptions,
    GuardSettings,
    is_enabled,
    require_time,
)
from paritas.core.compiled.guarded_calls import GuardJournal
from paritas.core.compiled.guarded_graphs import GuardedCapture, GuardedGraph, LoweredSuspect
from paritas.core.errors import UsageError
from paritas.core.judging.failures import GraphMaker
from paritas.core.torch_private.dynamo import (
    Backend,
    find_backend,
    keeping_backends,
    replacing_backends,
)
from paritas.core.torch_private.graphs import captured_input_names, computes_tensors, graph_source
from paritas.core.torch_private.inductor import compile_watched

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self, TypeVar

    from torch.fx import GraphModule

    from paritas.core.compiled.passes import PassChecks
    from paritas.core.results.findings import Finding, Verdict
    from paritas.core.torch_private.inductor import LoweredGraph


# --- guard() --------------------------------------------------------------------------------------


@takes_options(GuardOptions)
def guard(options: GuardOptions) -> Guard:
    """Make a backend for `torch.compile` that checks every graph as it runs.

    Inductor's code is checked below AOTAutograd: the forward and the backward graph are each
    compared with the same graph run op by op, natively and in float64. The code of any other
    backend is compared with the captured graph, and so are its gradients, if there are any.

    Args:
        options: given as arguments, the backend first; see `GuardOptions`.
    """
    backend = find_backend(options.backend, options.options)
    return Guard(backend, options.settings, enabled=is_enabled(options.enabled))


class Guard:
    """A guarded backend: pass it to `torch.compile(backend=...)`.

    Attributes:
        settings: the options of `guard()`.
        enabled: if False, every graph goes to the plain backend.
        journal: graphs, calls and findings so far.
    """

    def __init__(
        self,
        backend: Backend,
        settings: GuardSettings,
        *,
        enabled: bool = True,
        journal: GuardJournal | None = None,
    ) -> None:
        """Several guards can share one journal."""
        self.backend = backend
        self.settings = settings
        self.enabled = enabled
        self.journal = GuardJournal(strict=settings.strict) if journal is None else journal
        self.__name__ = f"guarded_{backend.name}"
        if not enabled:
            self.journal.add((), [OFF])

    def verdict(self) -> Verdict:
        """Roll up everything this guard has seen so far."""
        return self.journal.verdict()

    def __call__(self, graph: GraphModule, example_inputs: list[Any], **options: Any) -> Any:
        """Compile and guard one captured graph; `options` is the mode and options of the compile.

        A graph that computes only sizes goes to the backend: there is nothing to compare.
        """
        if not self.enabled or not computes_tensors(graph):
            return self.backend.compile(graph, example_inputs, **options)
        require_time(self.settings.limit)
        number = self.journal.next_capture()
        if self.backend.is_inductor:
            return self._guard_lowered(graph, example_inputs, number, options)
        return self._guard_captured(graph, example_inputs, number, options)

    def _guard_captured(
        self, graph: GraphModule, example_inputs: list[Any], number: int, options: dict[str, Any]
    ) -> GuardedCapture:
        compile_graph = functools.partial(self.backend.compile, **options)
        guarded = GuardedCapture(
            graph, example_inputs, compile_graph, self.settings, self.journal, f"graph {number}"
        )
        guarded.made_by = GraphMaker(self.backend, options)
        return guarded

    def _guard_lowered(
        self, graph: GraphModule, example_inputs: list[Any], number: int, options: dict[str, Any]
    ) -> Any:
        names = captured_input_names(graph)
        source = graph_source(graph)
        guarded: list[GuardedGraph] = []
        checks: PassChecks | None = None
        locator: Callable[[LoweredSuspect], list[Finding]] | None = None
        if self.settings.check_passes:
            from paritas.core.compiled.passes import PassChecks

            checks = PassChecks()
        if self.settings.locate:
            from paritas.core.compiled.locate import locate

            locator = locate

        def watch(lowered: LoweredGraph, compiled: Callable[..., Any]) -> GuardedGraph:
            kind = "backward" if lowered.is_backward else "forward"
            entry = self.journal.enter(f"graph {number} {kind}", source)
            entry.is_backward = lowered.is_backward
            result = GuardedGraph(
                lowered, compiled, names, self.settings, self.journal, entry, locator
            )
            result.made_by = GraphMaker(self.backend, options)
            if checks is not None:
                # Reported at the next call: errors raised during a compile do not reach the user.
                result.late_findings = self._take(checks)
            guarded.append(result)
            return result

        compiled = compile_watched(
            graph,
            example_inputs,
            watch,
            self.backend.inductor_options(options),
            around=contextlib.nullcontext if checks is None else checks.watching,
        )
        if not guarded:
            reason = "torch returned code for this graph that the guard never saw"
            self.journal.enter(f"graph {number}", source, unguarded=reason)
        if checks is not None and checks.stages == 0:
            reason = "the compiler reported no pass, so none was checked"
            self.journal.enter(f"graph {number} passes", source, unguarded=reason)
        return compiled

    def _take(self, checks: PassChecks) -> list[Finding]:
        """Take the findings of the pass checks since the last call."""
        findings, checks.findings = checks.findings, []
        self.journal.passes += checks.passes
        self.journal.splits += checks.splits
        checks.passes = checks.splits = 0
        self.journal.add((), checks.notes)
        return findings


# --- guard_everywhere() ---------------------------------------------------------------------------

if TYPE_CHECKING:
    BackendFunction = Callable[..., Any]
    T = TypeVar("T", bound=Callable[..., Any])

OWN_GUARD = (
    "a torch.compile of the program has its own paritas.guard or guard_everywhere, which was left "
    "unchanged: its findings are in its own verdict"
)
RECORDED = "a torch.compile of the program uses the backend paritas.record, which is not guarded"
SWITCHED_OFF = "part of the program was not guarded: guard_everywhere(enabled=False)"


@takes_options(EverywhereOptions)
def guard_everywhere(options: EverywhereOptions) -> GuardEverywhere:
    """Guard every `torch.compile` of this process, in every thread.

    Guarding starts at once and lasts until `off()` is called on the result. In a `with` statement
    it lasts until the block ends; as the decorator of a function or a `unittest.TestCase`, while
    that runs. `verdict()` covers everything that was compared. Each `torch.compile` keeps its own
    backend, mode and options. Code that was compiled before is compiled once more, guarded, at its
    next call; the unguarded code is used again afterwards. If two are nested, the inner one wins.

    Args:
        options: given as keyword arguments; see `EverywhereOptions`.

    Raises:
        UsageError: an argument is not valid.
        UnsupportedTorchError: paritas cannot reach every `torch.compile` in this version of torch.
    """
    return GuardEverywhere(options.settings, enabled=is_enabled(options.enabled)).on()


class GuardEverywhere:
    """Guards a whole process between `on()` and `off()`.

    Attributes:
        settings: the options of `guard_everywhere()`.
        enabled: if False, nothing is guarded while it is on.
        journal: graphs, calls and findings so far.
    """

    def __init__(
        self, settings: GuardSettings, journal: GuardJournal | None = None, *, enabled: bool = True
    ) -> None:
        """Nothing is guarded before `on()`."""
        self.settings = settings
        self.enabled = enabled
        self.journal = GuardJournal(strict=settings.strict) if journal is None else journal
        self._guards = _Guards(settings, self.journal)
        self._stack: contextlib.ExitStack | None = None
        self._entered = 0
        if not enabled:
            self.journal.add((), [OFF])

    def on(self) -> Self:
        """Start guarding; do nothing if it is on already."""
        with _lock:
            if self._stack is None:
                stack = contextlib.ExitStack()
                stack.enter_context(self._over_the_process())
                self._stack = stack
        return self

    def off(self) -> None:
        """Stop guarding: later calls use their own backend."""
        with _lock:
            if self._stack is None:
                return
            self._stack.close()
            self._stack = None
        if self._guards.known and not self.journal.graphs:
            names = ", ".join(dict.fromkeys(guard.backend.name for _, guard in self._guards.known))
            self.journal.add((), [f"torch.compile was called ({names}), but captured no graph"])

    def _over_the_process(self) -> contextlib.AbstractContextManager[None]:
        if not self.enabled:
            return keeping_backends()
        return replacing_backends(
            self._guards.of, on_kept=lambda: self.journal.add((), [SWITCHED_OFF])
        )

    def verdict(self) -> Verdict:
        """Roll up everything the guards have seen so far."""
        return self.journal.verdict()

    def __enter__(self) -> Self:
        """Start guarding."""
        with _lock:
            self._entered += 1
            return self.on()

    def __exit__(self, *_: object) -> None:
        """Stop guarding when the outermost block ends, also after an exception."""
        with _lock:
            self._entered -= 1
            if not self._entered:
                self.off()

    def __call__(self, decorated: T) -> T:
        """Guard every call of a function, or every test of a `unittest.TestCase`, and no more."""
        self.off()
        if isinstance(decorated, type) and issubclass(decorated, unittest.TestCase):
            prepare = decorated.setUp

            @functools.wraps(prepare)
            def set_up(test: unittest.TestCase) -> None:
                test.enterContext(self)
                prepare(test)

            decorated.setUp = set_up  # type: ignore[assignment, method-assign]
            return decorated
        if isinstance(decorated, type) or not callable(decorated):
            raise UsageError(
                f"guard_everywhere() decorates a function or a unittest.TestCase, not "
                f"{decorated!r:.80}; use it in a with statement"
            )

        @functools.wraps(decorated)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self:
                return decorated(*args, **kwargs)

        return guarded  # type: ignore[return-value]


_lock = threading.RLock()


class _Guards:
    """One guard per backend: Dynamo finds compiled code again by comparing backends."""

    def __init__(self, settings: GuardSettings, journal: GuardJournal) -> None:
        self.settings = settings
        self.journal = journal
        self.known: list[tuple[BackendFunction, Guard]] = []

    def of(self, backend: BackendFunction) -> Guard | None:
        """The guard that replaces a backend; None for paritas' own backends."""
        inner = getattr(backend, "compiler_fn", backend)  # what torch.compile wraps
        package, _, home = type(inner).__module__.partition(".")
        if package == "paritas":
            if isinstance(inner, Guard) and inner.journal is not self.journal:
                self.journal.add((), [OWN_GUARD])
            elif home.startswith("recording"):
                self.journal.add((), [RECORDED])
            return None
        # By comparison, as in Dynamo: such wrappers have no hash.
        for known_backend, guard in self.known:
            if known_backend is backend or known_backend == backend:
                return guard
        guard = Guard(find_backend(backend), self.settings, journal=self.journal)
        self.known.append((backend, guard))
        return guard
