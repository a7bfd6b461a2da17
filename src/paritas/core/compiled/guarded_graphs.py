"""Compiled code that is checked as it is called.

Code for a graph from below AOTAutograd is compared with that graph. For backends that do not show
such graphs, results and gradients are compared with the captured graph.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.compiled.gradient_watch import GradientWatch
from paritas.core.compiled.guard_settings import require_time
from paritas.core.compiled.guarded_calls import (
    OTHERS_DRAW,
    GuardedCode,
    GuardJournal,
    Suspect,
    are_other_states,
    caused_by,
    is_same_memory,
    locate_safely,
    with_places,
)
from paritas.core.execution.cotangents import draw_cotangent
from paritas.core.execution.differences import all_equal
from paritas.core.execution.evidence import Evidence
from paritas.core.execution.graph_runs import (
    CapturedProgram,
    CapturedReference,
    GraphProgram,
    ReferenceGraph,
    copy_arguments,
    copy_written,
)
from paritas.core.execution.observation import Observation, storage_address
from paritas.core.execution.saved_state import RandomState, Surroundings
from paritas.core.execution.threads import ThreadTimes
from paritas.core.judging.failures import MOST_EXPLAINED, GraphCode, is_wrong_output, without_kind
from paritas.core.judging.pairs import Ruling, reconsider
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.results.findings import Aspect, Status
from paritas.core.results.items import Item, input_of, nth_output
from paritas.core.torch_private.eager_graphs import with_tolerant_equality
from paritas.core.torch_private.graphs import (
    copy_graph,
    graph_source,
    is_undefined,
    lowered_input_names,
    lowered_outputs,
    placeholders,
    returned_values,
)
from paritas.core.torch_private.tensors import lay_out_like

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor
    from torch.fx import GraphModule

    from paritas.core.compiled.guard_settings import GuardSettings
    from paritas.core.compiled.guarded_calls import CallComparer, GraphEntry
    from paritas.core.execution.graph_runs import Cotangent
    from paritas.core.judging.comparer import CollectedFindings
    from paritas.core.results.findings import Finding, Verdict
    from paritas.core.torch_private.inductor import LoweredGraph


# --- Replacing the candidate's results by the reference's -----------------------------------------


def substitute_reference(
    runs: Evidence[GraphProgram],
    candidate: Observation,
    arguments: list[Any],
    visible: frozenset[int],
) -> list[Any]:
    """Return the reference's outputs, and repeat its writes on the caller's arguments."""
    reference = runs.native[0]
    if reference.rng_after is not None:
        reference.rng_after.restore()
    _correct_inputs(runs.program.used, arguments)
    results = []
    for position, (name, value) in enumerate(reference.outputs.items()):
        result = _rebase_view(value, runs.program.used, arguments)
        candidate_output = candidate.outputs.get(name)
        if position not in visible:  # the compiled backward pass expects the candidate's strides
            result = lay_out_like(result, candidate_output)
        results.append(result)
    return results


def _correct_inputs(used: list[Any], arguments: list[Any]) -> None:
    """Write the reference's values to the caller's arguments; undo all other writes."""
    with torch.no_grad():
        for reference_value, value in zip(used, arguments, strict=True):
            if isinstance(value, torch.Tensor) and not bitwise_equal(
                value.detach(), reference_value
            ):
                value.detach().copy_(reference_value)


def _rebase_view(value: Any, used: list[Any], arguments: list[Any]) -> Any:
    """Make an output that is a view of an argument a view of the caller's argument."""
    key = storage_address(value)
    if not key:
        return value
    for used_argument, caller_argument in zip(used, arguments, strict=True):
        if storage_address(used_argument) == key and isinstance(caller_argument, torch.Tensor):
            same = used_argument.stride() == value.stride() and used_argument.shape == value.shape
            if same and used_argument.storage_offset() == value.storage_offset():
                return caller_argument
            shift = caller_argument.storage_offset() - used_argument.storage_offset()
            return caller_argument.as_strided(
                value.shape, value.stride(), value.storage_offset() + shift
            )
    return value


# --- A graph from below AOTAutograd ---------------------------------------------------------------

if TYPE_CHECKING:
    Locator = Callable[["LoweredSuspect"], list[Finding]]


# Inputs that must not change are compared in this many checked calls, then in every n-th one.
CALLS_WATCHED = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoweredSuspect(Suspect):
    """A call of a graph from below AOTAutograd that differed.

    Attributes:
        lowered: the graph and how it was compiled.
        runs: the reference's runs on the arguments of the call.
        candidate: the results of the compiled code.
        compare: compares the results of other code for this graph, and its arguments after the
            call, with the reference.
    """

    lowered: LoweredGraph
    runs: Evidence[GraphProgram]
    candidate: Observation
    compare: Callable[[Observation, list[Any]], list[Finding]]


class GuardedGraph(GuardedCode):
    """Compiled code that takes its arguments in a list and empties it.

    Attributes:
        late_findings: findings from the compile, reported with the next call.
    """

    def __init__(
        self,
        lowered: LoweredGraph,
        compiled: Callable[[list[Any]], Sequence[Any]],
        captured_names: list[str],
        settings: GuardSettings,
        journal: GuardJournal,
        entry: GraphEntry,
        locator: Locator | None,
    ) -> None:
        """`captured_names` are the input names of the captured graph."""
        super().__init__(settings, journal, entry)
        # Torch's wrappers look for it on the instance.
        self._boxed_call = True
        self.lowered = lowered
        self.compiled = compiled
        self.locator = locator
        self.reference = ReferenceGraph.of(
            lowered.module,
            lowered_input_names(lowered.module, captured_names),
            lowered_outputs(lowered.module, captured_names),
        )
        self.late_findings: list[Finding] = []
        self._may_change = self.reference.written | lowered.donated
        self._promised = self._promised_strides()
        self._located: list[Finding] | None = None
        self._tolerant: tuple[ReferenceGraph, ...] | None = None
        positions = {node.name: index for index, node in enumerate(placeholders(lowered.module))}
        named = zip(self.reference.outputs, returned_values(lowered.module), strict=False)
        self._undefined = {item for item, node in named if is_undefined(node)}
        self._handed_on = [positions.get(str(value)) for value in returned_values(lowered.module)]
        # Arguments that the compiled code may consume and that are not read afterwards.
        self._given_away = lowered.donated - self.reference.written - {*self._handed_on}

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the compiled code, and check the call if the schedule says so."""
        draws = self.reference.draws
        if not self.is_due(args, draws=draws):
            return self.compiled(args)
        arguments = list(args)
        written = copy_written(arguments, self._may_change)
        for position in self._given_away:
            arguments[position] = None  # do not hold it longer than necessary
        before = self._clones(written, arguments) if self._looks_at_inputs() else {}
        threads = ThreadTimes.now()
        rng = RandomState.of_torch()
        candidate = Observation()
        results: Sequence[Any] = ()
        try:
            results = self.compiled(args)
        except Exception as error:  # noqa: BLE001  (it becomes a finding, then it is raised)
            candidate.error = error
        after = candidate.rng_after = RandomState.of_torch()
        if candidate.error is None:
            self.reference.name_results(candidate, list(results), arguments)
        for position in _changed_arguments(arguments, before):
            written[position] = before[position]
        before.clear()  # free the memory before the reference runs
        runs = GraphProgram.evidence(self.reference, written, rng, self.settings.seed)
        if self.is_disturbed(runs.native[0].rng_after, after, threads, draws=draws):
            if draws:
                after.restore()
                return _return_or_raise(results, candidate.error)  # type: ignore[no-any-return]
            candidate.rng_after = None  # nothing to compare
        verdict = None
        try:
            verdict = self.judge_safely(lambda: self._judge(runs, candidate, arguments))
        finally:
            # A check draws if the graph does; so does a search for what is wrong.
            if draws or verdict is None or not verdict.passed:
                after.restore()
        return self.conclude(  # type: ignore[no-any-return]
            verdict,
            results,
            candidate.error,
            lambda: substitute_reference(runs, candidate, arguments, self.lowered.visible),
            (self.lowered.module, written),
        )

    def _looks_at_inputs(self) -> bool:
        """Whether to check that no other input was written to.

        Generated code writes to an input always or never, so the first calls show most of it.
        """
        checked = self.entry.checked
        return checked < CALLS_WATCHED or checked % CALLS_WATCHED == 0

    def _clones(self, copies: list[Any], arguments: list[Any]) -> dict[int, Tensor]:
        """Clone the arguments that nothing should write to."""
        return {
            position: value.detach().clone()
            for position, (kept_argument, value) in enumerate(zip(copies, arguments, strict=True))
            if kept_argument is value and isinstance(value, torch.Tensor)
        }

    def _judge(
        self, runs: Evidence[GraphProgram], candidate: Observation, arguments: list[Any]
    ) -> Verdict:
        collected = self._compare(runs, candidate, arguments)
        self._ask_again(collected, runs, candidate, arguments)
        verdict = self.rolled_up(collected, runs)
        if verdict.failures and candidate.error is None and runs.native[0].error is None:
            verdict = self._with_origin(verdict, runs, candidate)
        if verdict.passed:
            runs.program.become_lean(runs.native[0])
        if not self.late_findings:
            return verdict
        late, self.late_findings = self.late_findings, []
        return msgspec.structs.replace(verdict, findings=(*late, *verdict.findings))

    def _ask_again(
        self,
        collected: CollectedFindings,
        runs: Evidence[GraphProgram],
        candidate: Observation,
        arguments: list[Any],
    ) -> None:
        """Mark as unstable what differs only in an equality test of rounded numbers."""
        if all(f.status.passes() for f in collected.findings) or candidate.error is not None:
            return
        if self._tolerant is None:
            module = with_tolerant_equality(self.reference.module)
            self._tolerant = (
                ()
                if module is None
                else (
                    ReferenceGraph.of(module, [*self.reference.inputs], [*self.reference.outputs]),
                )
            )
        for reference in self._tolerant:
            others = GraphProgram.evidence(
                reference, runs.program.kept, runs.program.rng, self.settings.seed
            )
            again = self._compare(others, candidate, arguments)
            better = {(f.path, f.aspect) for f in again.findings if f.status.passes()}
            rule = functools.partial(_rule_on_tolerant_equality, better)
            collected.findings = reconsider(collected.findings, rule)

    def _compare(
        self, runs: Evidence[GraphProgram], candidate: Observation, arguments: list[Any]
    ) -> CollectedFindings:
        comparer = self.comparer(runs)
        reference = runs.native[0]
        if self.judge_errors(comparer.out, reference.error, candidate.error):
            return comparer.out
        same = self._handed_on_items(candidate, arguments)
        comparer.out.compared += len(same)
        comparer.out.skipped += [
            f"{item.in_graph(self.entry.label)}, which is not defined" for item in self._undefined
        ]
        same |= self._undefined
        comparer.compare_random(reference.rng_after, candidate.rng_after)
        comparer.compare_values(
            _leave_out(reference.outputs, same), _leave_out(candidate.outputs, same)
        )
        comparer.compare_values(reference.after, candidate.after)
        comparer.compare_strides(reference, candidate, self._promised)
        self._compare_aliases(comparer, runs, candidate, arguments)
        pairs = enumerate(zip(runs.program.kept, arguments, strict=True))
        comparer.compare_untouched(
            {
                self.reference.inputs[position]: (before, after)
                for position, (before, after) in pairs
                if before is not after and position not in self._may_change
            }
        )
        return comparer.out

    def _compare_aliases(
        self,
        comparer: CallComparer,
        runs: Evidence[GraphProgram],
        candidate: Observation,
        arguments: list[Any],
    ) -> None:
        """Compare aliases of outputs that the user sees: others make no difference."""
        reference = runs.native[0]
        places = [storage_address(value) for value in arguments]
        reference_arguments = runs.program.used
        pairs = zip(reference_arguments, arguments, places, strict=True)
        used = [
            address
            if reference_argument is caller_argument
            else storage_address(reference_argument)
            for reference_argument, caller_argument, address in pairs
        ]
        reference.aliases = self.reference.aliases(
            reference, runs.program.used, used, self._promised
        )
        candidate.aliases = self.reference.aliases(candidate, arguments, places, self._promised)
        donated = {input_of(self.reference.inputs[position]) for position in self.lowered.donated}
        comparer.compare_aliases(reference, candidate, set(self._promised), donated)

    def _handed_on_items(self, candidate: Observation, arguments: list[Any]) -> set[Item]:
        """The outputs that are inputs, as in the graph: their bits need no comparison."""
        same = set()
        for item, position in zip(self.reference.outputs, self._handed_on, strict=False):
            if position is None or position in self.reference.written:
                continue
            value, original = candidate.outputs.get(item), arguments[position]
            if value is original or is_same_memory(value, original):
                same.add(item)
        return same

    def _with_origin(
        self, verdict: Verdict, runs: Evidence[GraphProgram], candidate: Observation
    ) -> Verdict:
        if self._located is None:
            self._located = []
            if self.locator is not None:
                suspect = LoweredSuspect(
                    label=self.entry.label,
                    failures=verdict.failures,
                    settings=self.settings,
                    lowered=self.lowered,
                    runs=runs,
                    candidate=candidate,
                    compare=lambda observation, arguments: (
                        self._compare(runs, observation, arguments).findings
                    ),
                )
                self._located = locate_safely(self.locator, suspect)
        return with_places(self._located, verdict)

    def _promised_strides(self) -> dict[Item, tuple[int, ...]]:
        """The traced strides of the outputs that the user sees."""
        promised = {}
        values = returned_values(self.lowered.module)
        for position in sorted(self.lowered.visible):
            traced = getattr(values[position], "meta", {}).get("val")
            if isinstance(traced, torch.Tensor) and traced.layout is torch.strided:
                strides = tuple(step if isinstance(step, int) else -1 for step in traced.stride())
                promised[self.reference.outputs[position]] = strides
        return promised


def _rule_on_tolerant_equality(better: set[tuple[str, Aspect]], finding: Finding) -> Ruling | None:
    """A failure that passes if almost equal values count as equal is decided by rounding."""
    if finding.status.passes() or (finding.path, finding.aspect) not in better:
        return None
    reason = "it depends on whether rounded values are equal; apart from that, the two sides agree"
    return Ruling(Status.UNSTABLE, reason)


def _changed_arguments(arguments: list[Any], before: dict[int, Tensor]) -> list[int]:
    """The positions of the arguments whose bits changed."""
    pairs = [(arguments[position].detach(), value) for position, value in before.items()]
    return [position for position, same in zip(before, all_equal(pairs), strict=True) if not same]


def _return_or_raise(results: Any, error: Exception | None) -> Any:
    if error is not None:
        raise error
    return results


def _leave_out(values: dict[Item, Any], items: set[Item]) -> dict[Item, Any]:
    return {item: value for item, value in values.items() if item not in items}


# --- A captured graph -----------------------------------------------------------------------------


class GuardedCapture(GuardedCode):
    """A backend's code for a captured graph, checked on the scheduled calls."""

    def __init__(
        self,
        graph: GraphModule,
        example_inputs: list[Any],
        compile_graph: Callable[[GraphModule, list[Any]], Callable[..., Any]],
        settings: GuardSettings,
        journal: GuardJournal,
        label: str,
    ) -> None:
        """Compile a graph."""
        super().__init__(settings, journal, journal.enter(label, graph_source(graph)))
        self.reference = CapturedReference.of(graph)
        self.compile_graph = compile_graph
        self.compiled = compile_graph(graph, example_inputs)
        self._backward: GuardedCode | None = None
        self._given_away: list[weakref.ref[Tensor]] = []
        self._located: dict[bool, list[Finding]] = {}
        self._outputs_fail = False

    def start_journal(self, *, diagnosed: bool) -> GuardJournal:
        """Note the next calls in a journal of their own, with or without diagnoses."""
        self.journal = GuardJournal(strict=self.settings.strict)
        self.entry = self.journal.enter(self.entry.label, self.entry.source)
        self._backward = None
        for code in (self, self.backward):
            code.experience.explainer.left = MOST_EXPLAINED if diagnosed else 0
        return self.journal

    @property
    def backward(self) -> GuardedCode:
        """The gradients, which have their own entry in the journal."""
        if self._backward is None:
            entry = self.journal.enter(f"{self.entry.label} gradients", self.entry.source)
            self._backward = GuardedCode(self.settings, self.journal, entry)
            self._backward.made_by = self.made_by
            entry.of_gradients = entry.is_backward = True
        return self._backward

    def __call__(self, *args: Any) -> Any:
        """Run the compiled code, and check the call if the schedule says so."""
        draws = self.reference.draws
        if not self.is_due(args, draws=draws):
            return self.compiled(*args)
        call_inputs = [*args, *self.reference.held]
        arguments = copy_arguments(call_inputs)
        threads = ThreadTimes.now()
        program = CapturedProgram(self.reference, arguments, RandomState.now(), Surroundings.now())
        runs = Evidence(program, seed=self.settings.seed)
        reference = runs.native[0]
        watch = GradientWatch(self, program)
        entered = watch.entering(list(args), reference)
        program.restore_random()
        candidate = Observation(rng_before=program.rng)
        if not draws:  # what other threads did until now does not matter
            threads = ThreadTimes.now()
            candidate.rng_before = RandomState.of_torch()
        results: Any = ()
        try:
            results = self.compiled(*entered)
        except Exception as error:  # noqa: BLE001  (it becomes a finding, then it is raised)
            candidate.error = error
        after = candidate.rng_after = RandomState.now() if draws else RandomState.of_torch()
        expected = self._expected_state(reference, candidate)
        if self.is_disturbed(expected, after, threads, draws=draws):
            if draws:
                watch.give_up(OTHERS_DRAW)
                return _return_or_raise(results, candidate.error)
            candidate.rng_after = None  # nothing to compare

        def judge() -> Verdict:
            reused: list[Item] = []
            if candidate.error is None:
                self.reference.name_results(candidate, results, call_inputs, arguments)
                reused = self._find_reused_outputs(results, reference)
            verdict = self._judge(runs, candidate, reused)
            return self._with_origin(verdict, runs, self.entry.label, gradients=False)

        try:
            verdict = self.judge_safely(judge)
        finally:
            if draws:
                after.restore()
        watch.leaving(results, entered, candidate)
        return self.conclude(
            verdict,
            results,
            candidate.error,
            lambda: self._run_reference(call_inputs, program),
            (self.reference.module, arguments),
        )

    def _find_reused_outputs(self, results: Any, reference: Observation) -> list[Item]:
        """The outputs in the memory of an output of the call before that is still alive.

        Inputs and constants that the graph itself returns each time do not count.
        """
        named = dict(zip(reference.outputs, results, strict=False))
        tensors = {item: value for item, value in named.items() if isinstance(value, torch.Tensor)}
        live_addresses = {
            storage_address(tensor) for ref in self._given_away if (tensor := ref()) is not None
        } - {0}
        self._given_away = [weakref.ref(tensor) for tensor in tensors.values()]
        handed_on = {item for pair in reference.aliases for item in pair}
        if self.made_by is not None and self.made_by.backend.name == "cudagraphs":
            return []  # torch documents that it reuses memory
        return [
            item
            for item, tensor in tensors.items()
            if storage_address(tensor) in live_addresses and item not in handed_on
        ]

    def _judge(
        self, runs: Evidence[CapturedProgram], candidate: Observation, reused: Sequence[Item] = ()
    ) -> Verdict:
        comparer = self.comparer(runs)
        reference = runs.native[0]
        if self.judge_errors(comparer.out, reference.error, candidate.error):
            return self.rolled_up(comparer.out, runs)
        comparer.compare_random(self._expected_state(reference, candidate), candidate.rng_after)
        comparer.compare_values(reference.outputs, candidate.outputs)
        written = sorted(reference.after.keys() | candidate.after.keys(), key=str)
        comparer.compare_values(
            {item: runs.complete(reference, item) for item in written},
            {item: runs.complete(candidate, item) for item in written},
        )
        comparer.compare_strides(reference, candidate, dict(reference.strides))
        comparer.compare_aliases(reference, candidate, set(reference.outputs))
        for item in reused:
            reason = "overwrites the memory of an output of the previous call"
            comparer.note(item, Aspect.ALIAS, reason)
        for item, needs in reference.requires_grad.items():
            if candidate.requires_grad.get(item, needs) != needs:
                reason = f"requires_grad is {not needs} instead of {needs}"
                comparer.note(item, Aspect.REQUIRES_GRAD, reason)
        return self.rolled_up(comparer.out, runs)

    def _expected_state(self, reference: Observation, candidate: Observation) -> RandomState | None:
        """The generators after a right call: if the graph does not draw, those before it.

        They are also those before it if a compiler has left out draws that nothing uses.
        """
        before = candidate.rng_before
        leaves_out = not self.reference.uses_draws and not are_other_states(
            before, candidate.rng_after
        )
        return before if leaves_out or not self.reference.draws else reference.rng_after

    def _run_reference(self, args: list[Any], program: CapturedProgram) -> Any:
        """Run the reference on the caller's own arguments, to let gradients flow through it."""
        with torch.no_grad():
            for value, before in zip(args, program.kept, strict=True):
                if isinstance(value, torch.Tensor):
                    value.detach().copy_(before.detach())
        program.rng.restore()
        return self.reference.module(*args)

    def judge_gradients(
        self,
        program: CapturedProgram,
        gradients: dict[Item, Tensor | None],
        besides: dict[Item, tuple[Aspect, str]],
        rng_after: RandomState | None,
    ) -> dict[Item, Tensor | None]:
        """Compare gradients; return those that the program continues with.

        Args:
            program: the reference.
            gradients: the gradients of the inputs.
            besides: side effects of the backward pass; the reference's has none.
            rng_after: the random generators after the call itself.
        """
        require_time(self.settings.limit)
        draws = self.reference.draws
        threads, now = ThreadTimes.now(), RandomState.now()
        code = self.backward
        self.journal.count_call(code.entry)
        try:
            runs = Evidence(program, seed=self.settings.seed)
            compiled = GraphCode(self.compiled, self._compile_for)
            comparer = code.comparer(runs, compiled)
            reference = runs.native[0]
            if draws and code.is_disturbed(reference.rng_after, rng_after, threads, draws=draws):
                return gradients
            if not code.judge_errors(comparer.out, reference.error, None):
                for item, value in gradients.items():
                    _compare_gradient(comparer, item, reference.gradients.get(item), value)
            for item, (aspect, reason) in besides.items():
                comparer.note(item, aspect, reason)
            verdict = code.rolled_up(comparer.out, runs)
            verdict = self._with_origin(verdict, runs, code.entry.label, gradients=True)
            instead = {item: reference.gradients.get(item) for item in gradients}
        except Exception as error:  # noqa: BLE001  (our own error must not break the program)
            verdict, instead = code.own_failure(error), gradients
        finally:
            if draws:
                now.restore()
        called = (self.reference.module, program.kept)
        result: dict[Item, Tensor | None] = code.conclude(
            verdict, gradients, None, lambda: instead, called
        )
        return result

    def _with_origin(
        self, verdict: Verdict, runs: Evidence[CapturedProgram], label: str, *, gradients: bool
    ) -> Verdict:
        # What rounding decides fails under strict, and has no place.
        differs = any(f.status.is_wrong for f in verdict.failures)
        self._outputs_fail |= any(map(is_wrong_output, verdict.findings))
        if gradients and self._outputs_fail:
            findings = tuple(map(without_kind, verdict.findings))
            verdict = msgspec.structs.replace(verdict, findings=findings)
        if not differs or not self.settings.locate or runs.native[0].error is not None:
            return verdict
        # Wrong values give wrong gradients, but a node may hand back wrong ones besides.
        output_findings = self._located.get(False, []) if gradients else []
        if gradients not in self._located:
            from paritas.core.compiled.locate_captured import (
                CapturedSuspect,
                locate_captured,
                locate_gradients_besides,
            )

            suspect = CapturedSuspect(
                label=label,
                failures=verdict.failures,
                settings=self.settings,
                runs=runs,
                gradients=gradients,
                compile_part=self._compile_part,
                compare=lambda observation: self._judge(runs, observation).findings,
            )
            locate = (
                functools.partial(locate_gradients_besides, output_findings)
                if output_findings
                else locate_captured
            )
            self._located[gradients] = locate_safely(locate, suspect)
        located_findings = self._located[gradients]
        if not output_findings:
            return with_places(located_findings, verdict)
        verdict = caused_by(output_findings, verdict)
        return msgspec.structs.replace(verdict, findings=(*located_findings, *verdict.findings))

    def _compile_for(self, args: list[Any]) -> Callable[..., Any]:
        """The same graph, compiled for other arguments."""
        return self.compile_graph(copy_graph(self.reference.graph), args)

    def _compile_part(
        self,
        graph: GraphModule,
        args: list[Any],
        surroundings: Surroundings,
        rng: RandomState,
    ) -> CompiledPart:
        """Compile another graph as this one."""
        settings = dataclasses.replace(
            self.settings, on_mismatch="record", every=1, locate=False, check_passes=False
        )
        with surroundings.around():
            code = GuardedCapture(graph, args, self.compile_graph, settings, GuardJournal(), "part")
        return CompiledPart(code, args, surroundings, rng)


@dataclasses.dataclass(frozen=True)
class CompiledPart:
    """A backend's code for another graph than the user's.

    Attributes:
        code: the code and its reference.
        args: its arguments.
        surroundings: grad mode and autocast of its calls.
        rng: the random generators before each call.
    """

    code: GuardedCapture
    args: list[Any]
    surroundings: Surroundings
    rng: RandomState

    def run(self) -> tuple[list[Any], Sequence[Any]]:
        """Call it without a check; returns its arguments after the call and its results."""
        arguments = copy_arguments(self.args)
        self.rng.restore()
        with self.surroundings.around():
            return arguments, list(self.code.compiled(*arguments))

    def differentiate(self, cotangents: Mapping[int, Cotangent], count: int) -> list[Tensor | None]:
        """The gradients of its last arguments, for those of its outputs."""
        arguments = copy_arguments(self.args)
        self.rng.restore()
        with self.surroundings.around(), torch.enable_grad():
            results = self.code.compiled(*arguments)
            ends = [results[position] for position in cotangents]
            entering = [
                cotangent.enter(end)
                for end, cotangent in zip(ends, cotangents.values(), strict=True)
            ]
            return list(torch.autograd.grad(ends, arguments[-count:], entering, allow_unused=True))

    def check(self, ends: Collection[int] | None, *, diagnosed: bool) -> Verdict:
        """Check a call; `ends` are the outputs to differentiate, if any."""
        journal = self.code.start_journal(diagnosed=diagnosed)
        is_recorded = self.surroundings.grad or ends is not None
        self.rng.restore()
        with self.surroundings.around(), torch.set_grad_enabled(is_recorded):
            results = self.code(*copy_arguments(self.args))
            if ends is not None:
                _differentiate([results[position] for position in ends])
        return journal.verdict()


def _differentiate(values: Sequence[Any]) -> None:
    recorded = [
        value for value in values if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    if recorded:
        upstream = [
            draw_cotangent(nth_output(number), value, seed=0)
            for number, value in enumerate(recorded)
        ]
        torch.autograd.backward(recorded, upstream)


def _compare_gradient(comparer: CallComparer, item: Item, reference: Any, candidate: Any) -> None:
    """Compare gradients; None counts as zeros, because both add nothing."""
    if (reference is None) != (candidate is None):
        present_gradient = candidate if reference is None else reference
        zeros = torch.zeros_like(present_gradient)
        reference, candidate = (zeros if v is None else v for v in (reference, candidate))
    comparer.compare_value(item, reference, candidate)
