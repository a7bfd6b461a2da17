"""Find where the code of a backend that shows no graphs goes wrong: the first bad node.

The backend compiles the whole graph once more, with every value as an output. Each node is judged
alone: its operator runs on the backend's own values for its inputs, and the result is compared with
the backend's own value for the node. If that hides the fault, or if gradients are wrong, the first
wrong part of the graph is found by bisection.

A part or a node is the place only if it fails for the same reason as the whole: wrong values are
not explained by memory that is shared, or by strides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.fx import Graph, GraphModule, Node

from paritas.core.compiled.guarded_calls import Suspect, origin_item
from paritas.core.compiled.locate import (
    JudgedNode,
    blame_worst,
    clear_findings,
    first_clear_node,
)
from paritas.core.errors import in_one_line
from paritas.core.execution.node_gradients import BackwardNodes, NodeGradient
from paritas.core.execution.node_runs import (
    NodeCall,
    Tap,
    all_taps,
    record_nodes,
    take_item,
    tap_captured,
    tensors_by_path,
)
from paritas.core.execution.observation import Observation, storage_address
from paritas.core.execution.saved_state import RandomState
from paritas.core.judging.failures import node_origin
from paritas.core.judging.pairs import judge_pair
from paritas.core.locating.values_alone import describe_call, pair_alone
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.results.findings import (
    Aspect,
    Finding,
    Origin,
    OriginKind,
    mismatch,
)
from paritas.core.results.items import Item, ItemKind, nth_output
from paritas.core.torch_private.global_state import quietly
from paritas.core.torch_private.graphs import (
    UNINITIALISED,
    copy_graph,
    placeholders,
    returned_values,
)
from paritas.core.torch_private.tensors import lay_out_like

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import Tensor

    from paritas.core.compiled.guarded_graphs import CompiledPart
    from paritas.core.diagnosis.case import Context
    from paritas.core.diagnosis.place_runs import PlaceRuns
    from paritas.core.execution.evidence import Evidence
    from paritas.core.execution.graph_runs import CapturedProgram
    from paritas.core.execution.node_runs import GraphRun, NodeRun, ValuePath
    from paritas.core.execution.saved_state import Surroundings

# The time limit: a backend may take long for every part.
SECONDS_FOR_PARTS = 60.0
# A pass that breaks every operator of a kind: the first is searched among so many.
MOST_WRONG = 32
# Some backends are correct in the first call and wrong in later ones.
CALLS_OF_PART = 2
# What a value is, as opposed to where it is in memory.
_CONTENTS = frozenset({Aspect.VALUE, Aspect.SHAPE, Aspect.DTYPE, Aspect.DEVICE, Aspect.STRUCTURE})


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapturedSuspect(Suspect):
    """A call of a captured graph that differed.

    Attributes:
        runs: the reference's runs on the arguments of the call.
        gradients: whether the gradients differ.
        compile_part: compiles a graph with the same backend, for given arguments, modes and
            random state.
        compare: compares the results of other code for this graph with the reference.
    """

    runs: Evidence[CapturedProgram]
    gradients: bool
    compile_part: Callable[[GraphModule, list[Any], Surroundings, RandomState], CompiledPart]
    compare: Callable[[Observation], Sequence[Finding]]

    @functools.cached_property
    def aspects(self) -> frozenset[Aspect]:
        """The aspects that explain the failures: all contents, if any of these is wrong.

        The sum of a wrong shape is a wrong value, and what `nonzero` finds in it a wrong shape.
        """
        failed = frozenset(f.aspect for f in _wrong(self.failures))
        return _CONTENTS if failed & _CONTENTS else failed

    def explains(self, finding: Finding) -> bool:
        """Whether a part that fails like this may be where it starts."""
        return finding.aspect in self.aspects and finding.item.kind.is_gradient == self.gradients


def _wrong(findings: Collection[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.status.is_wrong]


def locate_captured(suspect: CapturedSuspect) -> list[Finding]:
    """Find where the difference starts; returns one finding with an origin."""
    now = RandomState.now()
    try:
        with quietly():
            return [_Search(suspect).finding()]
    finally:
        now.restore()


def locate_gradients_besides(
    findings: Collection[Finding], suspect: CapturedSuspect
) -> list[Finding]:
    """A node that hands back wrong gradients, besides nodes whose values are wrong; often none."""
    now = RandomState.now()
    names = {
        located_finding.origin.name
        for located_finding in findings
        if located_finding.origin is not None
    }
    try:
        with quietly():
            finding = _Search(suspect).finding_of_gradients(names)
    finally:
        now.restore()
    return [] if finding is None else [finding]


class _Search:
    """The search for the first wrong node of one call."""

    def __init__(self, suspect: CapturedSuspect) -> None:
        self.suspect = suspect
        self.program = suspect.runs.program
        self.limit = suspect.settings.limit.shorten(SECONDS_FOR_PARTS)
        self.run: GraphRun = record_nodes(self.program)
        self.graph = self.program.reference.graph
        self.calls = [node for node in self.graph.graph.nodes if node.op.startswith("call_")]
        self.outputs = len(returned_values(self.graph))
        self.errors: list[str] = []
        self.changed_inputs: list[str] = []

    @contextlib.contextmanager
    def _showing_nothing_if_it_fails(self) -> Iterator[None]:
        """Code that raises is no place; if none is found, the finding says what was raised."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (a backend raises what it likes)
            self.errors.append(in_one_line(error, 160))

    def finding(self) -> Finding:
        """The finding about the place."""
        aspects = self.suspect.aspects
        if aspects & _CONTENTS or Aspect.REQUIRES_GRAD in aspects:
            nodes_alone = self._judge_nodes() or self._judge_gradients() or self._bisect()
        else:
            nodes_alone = self._try_nodes_alone()
        return nodes_alone or self._whole_graph()

    def finding_of_gradients(self, names: Collection[str]) -> Finding | None:
        """The finding about a node that hands back wrong gradients for right ones; None if none is.

        Args:
            names: nodes that are known to be wrong. A node with a wrong value hands back a wrong
                gradient as well.
        """
        wrong = set(names)
        if self.own_values is not None:
            judged = itertools.islice(self._judge_all(self.own_values), MOST_WRONG)
            wrong |= {judged_node.finding.item.name for judged_node in judged}
        nodes = [self.calls[number] for number in self.suspicious]
        return self._first_wrong_alone([node for node in nodes if node.name not in wrong])

    # --- Each node on the backend's own values ---

    @functools.cached_property
    def taps(self) -> list[Tap]:
        """Every value of the graph."""
        return all_taps(self.run)

    @functools.cached_property
    def tapped(self) -> CompiledPart | None:
        """Code that returns every value; None if the backend cannot make it."""
        with self._showing_nothing_if_it_fails():  # the parts are compiled one by one then
            return self._compile(tap_captured(self.graph, self.taps, self.run))
        return None

    def _judge_nodes(self) -> Finding | None:
        """The first node that is wrong for the inputs that it got; None if none is."""
        own_values = self.own_values
        if own_values is None:
            return None
        judged = list(itertools.islice(self._judge_all(own_values), MOST_WRONG))
        first = first_clear_node(judged, changed=False)
        writer = self._overwriting_node(() if first is None else (first.finding.item.name,))
        if writer is not None or first is None:
            return writer
        return first.explain()

    def _overwriting_node(self, names: Collection[str]) -> Finding | None:
        """A node that writes to what it should only read: a value that looks wrong, or an input."""
        values = {*names, *self.changed_inputs}
        readers: list[Node] = []
        for node in self.calls:
            if not values.isdisjoint(
                all_input_node.name for all_input_node in node.all_input_nodes
            ):
                readers.append(node)
                values |= {node.name} & self.run.shared  # the same memory
        ends = values.intersection(
            returned_node.name
            for returned_node in returned_values(self.graph)
            if returned_node is not None
        )
        if len(readers) + len(ends) < 2:  # noqa: PLR2004  (nobody reads it after that)
            return None
        for node in readers:
            if self.run.nodes[node.name].wrote or self.limit.is_over:
                continue
            with self._showing_nothing_if_it_fails():
                part = self._part_alone(node)
                if part is not None and _overwrites(part, node, values):
                    origin = self._origin(node)
                    reason = f"starts here: {origin.operator} writes to what it should only read"
                    return self._about(reason, Aspect.VALUE, origin)
        return None

    @functools.cached_property
    def own_values(self) -> dict[Tap, Tensor] | None:
        """The backend's values; None if they do not show the difference.

        The results of the call need not be wrong if the gradients are.
        """
        if self.tapped is None:
            return None
        with self._showing_nothing_if_it_fails():
            for _ in range(CALLS_OF_PART):
                arguments, results = self.tapped.run()
                if len(results) != self.outputs + len(self.taps):
                    return None
                if self.suspect.gradients or self._shows(arguments, results[: self.outputs]):
                    self.changed_inputs = self._find_changed(arguments)
                    return dict(zip(self.taps, results[self.outputs :], strict=True))
        return None

    def _find_changed(self, arguments: Sequence[Any]) -> list[str]:
        """The inputs of the graph that the backend's code has changed and the reference has not."""
        changed = []
        for node, before, after in zip(
            placeholders(self.graph), self.program.kept, arguments, strict=True
        ):
            # Some operators write to an input without a trace, such as the statistics of a norm.
            right = self.run.nodes[node.name].value
            is_read = node.name not in self.run.overwritten and isinstance(before, torch.Tensor)
            if is_read and _are_same(before, right) and not _are_same(before, after):
                changed.append(node.name)
        return changed

    def _shows(self, arguments: list[Any], results: Sequence[Any]) -> bool:
        observation = Observation(rng_before=self.program.rng)
        self.program.reference.name_results(observation, results, arguments, self.program.kept)
        failure_keys = {
            (finding.item.in_graph(""), finding.aspect) for finding in self.suspect.failures
        }
        return any(
            (finding.item.in_graph(""), finding.aspect) in failure_keys
            for finding in _wrong(self.suspect.compare(observation))
            if self.suspect.explains(finding)
        )

    def _judge_all(self, tapped_values: dict[Tap, Tensor]) -> Iterator[JudgedNode]:
        reference = self.program.reference.module
        originals = {node.name: node for node in self.graph.graph.nodes}
        values: dict[str, Any] = {}
        for node in reference.graph.nodes:
            if node.op == "output":
                return
            run = self.run.nodes[node.name]
            values[node.name] = run.value
            if not run.is_given:
                values[node.name] = self._own_value(node.name, tapped_values)
                call = NodeCall.in_run(reference, node, self.run, values)
                yield from self._worst_of(
                    originals[node.name], self._judge_node(call, tapped_values)
                )
                if not run.tensors() and call.inputs():
                    ran = self._run_alone(call)  # most depend on shapes only
                    values[node.name] = run.value if ran is None else ran[0]
            for changed in run.wrote:
                values[changed] = self._own_value(changed, tapped_values, after=node.name)

    def _own_value(self, name: str, tapped_values: dict[Tap, Tensor], after: str = "") -> Any:
        """The backend's value of a node; what is no tensor is taken from the reference."""
        run = self.run.nodes[name]
        value = run.value
        for path in run.tensors():
            tensor = tapped_values[Tap(name, path, after)].detach()
            if not run.is_batched:
                tensor = lay_out_like(tensor, _item_at(value, path))
            value = _with_item(value, path, tensor)
        return value

    def _judge_node(self, call: NodeCall, tapped_values: dict[Tap, Tensor]) -> list[JudgedNode]:
        name = call.node.name
        taps = [Tap(name, path) for path in call.run.tensors()]
        read = {node.name for node in call.node.all_input_nodes}
        taps += [
            Tap(written_name, path, after=name)
            for written_name in call.run.wrote
            if written_name in read
            for path in self.run.nodes[written_name].tensors()
        ]
        if not taps or _has_no_value(call.node):
            return []
        ran = self._run_alone(call)
        if ran is None:
            return []
        result, reads = ran
        findings: list[JudgedNode] = []
        for tap in taps:
            expected = _item_at(reads[tap.node] if tap.after else result, tap.path)
            if not isinstance(expected, torch.Tensor):
                continue
            if Aspect.REQUIRES_GRAD in self.suspect.aspects:
                findings += self._judge_requires_grad(tap, tapped_values[tap])
            elif not _are_same(expected, tapped_values[tap]):
                findings += self._judge_value(call, tap, tapped_values[tap])
        return findings

    def _run_alone(self, call: NodeCall) -> tuple[Any, dict[str, Any]] | None:
        with self._showing_nothing_if_it_fails():
            return call.once()
        return None

    def _judge_requires_grad(self, tap: Tap, tapped_value: Tensor) -> list[JudgedNode]:
        needs = _item_at(self.run.nodes[tap.node].value, tap.path).requires_grad
        if tapped_value.requires_grad == needs or tap.after:
            return []
        reason = f"requires_grad is {not needs} instead of {needs}"
        return [JudgedNode(mismatch(self._item(tap.node), Aspect.REQUIRES_GRAD, reason))]

    def _judge_value(self, call: NodeCall, tap: Tap, tapped_value: Tensor) -> list[JudgedNode]:
        program = call.program(tap.path, tap.node if tap.after else "")
        item, seed = self._item(call.node.name), self.suspect.runs.seed
        pair = pair_alone(item, program, tapped_value, seed)
        if pair is None:
            return []
        values = pair.reference, pair.candidate

        def describe() -> Context:
            runs = None if tap.after else self._runs_alone(call, tap.path, values)
            return dataclasses.replace(
                describe_call(call, lifted_agrees=self.suspect.settings.lifted_agrees), runs=runs
            )

        findings, _ = judge_pair(pair)
        pair = dataclasses.replace(pair, context=describe)
        return [JudgedNode(finding, pair) for finding in _wrong(findings)]

    def _runs_alone(
        self, call: NodeCall, path: ValuePath, pair: tuple[Tensor, Tensor]
    ) -> PlaceRuns | None:
        """The node alone, and the backend's code for it; None if it needs its surroundings."""
        from paritas.core.diagnosis.place_runs import PlaceRuns

        run = call.run
        node = next(other for other in self.calls if other.name == call.node.name)
        cut = self._cut_alone(node, call.reads)
        if cut is None:
            return None
        module, reads = cut
        read_values = [*reads.values()]
        places = [
            number
            for number, operand in enumerate(read_values)
            if isinstance(operand, torch.Tensor)
        ]

        def arguments(operands: Sequence[Tensor]) -> list[Any]:
            values = list(read_values)
            for position, operand in zip(places, operands, strict=True):
                values[position] = operand
            return values

        def run_reference(operands: Sequence[Tensor]) -> Any:
            changed = dict(zip(reads, arguments(operands), strict=True))
            with call.around():
                return _item_at(call.call({**call.reads, **changed}), path)

        def make_candidate(operands: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
            part = self._compile_alone(module, run, arguments(operands))
            position = run.tensors().index(path)

            def run_candidate(operands: Sequence[Tensor]) -> Any:
                return dataclasses.replace(part, args=arguments(operands)).run()[1][position]

            return run_candidate

        operands = tuple(read_values[position] for position in places)
        make_first = functools.partial(make_candidate, operands)
        return PlaceRuns(
            operands, run_reference, make_first, *pair, remake_candidate=make_candidate
        )

    def _worst_of(self, node: Node, judged: list[JudgedNode]) -> list[JudgedNode]:
        """The worst finding about a node, with its origin."""
        # A wrong gradient may come from a wrong value that does not show in the results.
        aspects = _CONTENTS if self.suspect.gradients else self.suspect.aspects
        fitting = [judged_node for judged_node in judged if judged_node.finding.aspect in aspects]
        return [blame_worst(fitting, self._origin(node))] if fitting else []

    def _item(self, name: str) -> Item:
        return Item(ItemKind.NODE, name, graph=self.suspect.label)

    def _origin(self, node: Node) -> Origin:
        origin = node_origin(node, self._failing_outputs())
        # A wrong gradient goes back to the inputs, not on to the results.
        return msgspec.structs.replace(origin, chain=()) if self.suspect.gradients else origin

    def _failing_outputs(self) -> list[Node]:
        """The nodes of the outputs that fail."""
        failed = {finding.item.in_graph("") for finding in _wrong(self.suspect.failures)}
        named = zip(self.suspect.runs.native[0].outputs, returned_values(self.graph), strict=False)
        return [node for item, node in named if item in failed and isinstance(node, Node)]

    # --- Each node on the gradients that the backend's own code brings to it ---

    def _judge_gradients(self) -> Finding | None:
        """The first node that hands back a wrong gradient for right ones; None if none does.

        Nodes are added to the graph to look at gradients, so such a node must be wrong alone, too.
        """
        if self.suspect.gradients and self.own_values is not None:
            for tap, tapped_value in self.own_values.items():
                for cut in self._judge_requires_grad(tap, tapped_value):
                    node = next(call for call in self.calls if call.name == tap.node)
                    wrong = msgspec.structs.replace(cut.finding, aspect=Aspect.VALUE)
                    return self._finding(node, "does not flow back", wrong)
        return self._first_wrong_alone([self.calls[number] for number in self.suspicious])

    @functools.cached_property
    def suspicious(self) -> list[int]:
        """The calls that seem to hand back wrong gradients, in the order of the graph."""
        if not self.suspect.gradients or not self.program.cotangents:
            return []
        wrong: list[Finding] = []
        with self._showing_nothing_if_it_fails():  # the parts are compiled one by one then
            wrong = list(itertools.islice(self._wrong_gradients(), MOST_WRONG))
        names = {finding.item.name for finding in clear_findings(wrong)}
        return [number for number, node in enumerate(self.calls) if node.name in names]

    def _wrong_gradients(self) -> Iterator[Finding]:
        """Findings about what nodes hand back, in the order of the graph."""
        cotangents = self.program.cotangents or {}
        backward = BackwardNodes(self.graph, self.run)
        zeros = backward.zeros()
        if not zeros:
            return
        program = self.program
        code = self.suspect.compile_part(
            backward.with_zeros(), [*program.kept, *zeros], program.surroundings, program.rng
        )
        backward_gradients = code.differentiate(cotangents, len(zeros))
        gradients = dict(zip(backward.uses, backward_gradients, strict=True))
        arrived = backward.arriving_gradients(gradients, cotangents)
        nodes = {node.name: node for node in program.reference.module.graph.nodes}
        values = self._values_in_forward_pass()
        for use, backend_gradient in gradients.items():
            if use.reader not in arrived or self.limit.is_over:
                continue
            call = NodeCall.in_run(program.reference.module, nodes[use.reader], self.run, values)
            gradient = NodeGradient(call, use.source, arrived[use.reader])
            item, seed = self._item(use.reader), self.suspect.runs.seed
            pair = pair_alone(item, gradient, backend_gradient, seed)
            if pair is not None and not _are_same(pair.reference, pair.candidate):
                yield from _wrong(judge_pair(pair)[0])

    def _values_in_forward_pass(self) -> dict[str, Any]:
        """The values of all nodes: the backend's own where these are known."""
        return {
            name: run.value
            if run.is_given or self.own_values is None
            else self._own_value(name, self.own_values)
            for name, run in self.run.nodes.items()
        }

    # --- The shortest part of the graph that is wrong ---

    def _bisect(self) -> Finding | None:
        """The last node of the shortest wrong part; None if no part is wrong."""
        shown: dict[int, Finding] = {}

        def fails(number: int) -> bool:
            worst = self._failure_before(number)
            if worst is not None:
                shown[number] = worst
            return worst is not None

        start = -1
        end = next(filter(fails, [*self.suspicious[:1], len(self.calls) - 1]), start)
        while end - start > 1 and not self.limit.is_over:
            middle = end - 1 if end in self.suspicious else (start + end) // 2
            start, end = (start, middle) if fails(middle) else (middle, end)
        if end == start:
            return None
        if end - start > 1:
            return self._report_unfinished_search(
                self.calls[start + 1], self.calls[end], shown[end]
            )
        order = [self.calls[end]]
        if self.suspect.gradients and end not in self.suspicious:
            # A backward node that adds something to whatever it gets shows in every part.
            order += [*self.calls[end + 1 :], *self.calls[:end]]
        alone = self._first_wrong_alone(order)
        if alone is not None:
            return alone
        why = "is correct alone, but not if compiled together with the nodes after it"
        if end > 0:
            why = f"is correct alone, but not if compiled together with the {end} nodes before it"
        return self._finding(self.calls[end], why, shown[end])

    def _failure_before(self, number: int) -> Finding | None:
        """How the values that the first nodes of the graph hand on are wrong."""
        taps = self._handed_on(number)
        if not taps:
            return None
        if self.suspect.gradients:
            places = {tap: self.outputs + number for number, tap in enumerate(self.taps)}
            worst = self._failure_of(self.tapped, [places[tap] for tap in taps])
            if worst is not None or self._shows_gradients:
                return worst
        with self._showing_nothing_if_it_fails():
            code = self._compile(tap_captured(self.graph, taps, self.run))
            return self._failure_of(code, range(self.outputs, self.outputs + len(taps)))
        return None

    @functools.cached_property
    def _shows_gradients(self) -> bool:
        """Whether the code that returns every value has wrong gradients, too."""
        return self._failure_of(self.tapped, range(self.outputs)) is not None

    def _is_differentiable(self, tap: Tap) -> bool:
        run = self.run.nodes[tap.node]
        return not run.is_batched and bool(_item_at(run.value, tap.path).requires_grad)

    def _handed_on(self, number: int) -> list[Tap]:
        """The values of the first nodes that later nodes, or the caller, use."""
        first = {node.name for node in self.calls[: number + 1]}
        ends = {node.name for node in returned_values(self.graph) if isinstance(node, Node)}
        latest: dict[tuple[str, ValuePath], Tap] = {}
        for tap in all_taps(self.run):
            if (tap.after or tap.node) in first:
                latest[tap.node, tap.path] = tap
        originals = {node.name: node for node in self.graph.graph.nodes}
        return [
            tap
            for tap in latest.values()
            if tap.node in originals
            and (not self.suspect.gradients or self._is_differentiable(tap))
            and (
                tap.node in ends
                or tap.after
                or any(user.name not in first for user in originals[tap.node].users)
            )
        ]

    def _failure_of(
        self, part: CompiledPart | None, ends: Collection[int], *, diagnosed: bool = False
    ) -> Finding | None:
        """The first failure of a part that explains the whole: in these outputs, or from them."""
        if part is None:
            return None
        gradients = self.suspect.gradients
        names = {nth_output(position) for position in ends}
        with self._showing_nothing_if_it_fails():
            for _ in range(CALLS_OF_PART):
                verdict = part.check(ends if gradients else None, diagnosed=diagnosed)
                for finding in _wrong(verdict.failures):
                    is_asked = gradients or finding.item.in_graph("") in names
                    is_asked |= finding.aspect is Aspect.RNG  # of the call, not of an output
                    if is_asked and self.suspect.explains(finding):
                        return finding
        return None

    def _compile(self, module: GraphModule) -> CompiledPart:
        program = self.program
        return self.suspect.compile_part(module, program.kept, program.surroundings, program.rng)

    # --- A node alone ---

    def _try_nodes_alone(self) -> Finding | None:
        """The first node that fails alone as the whole does; those behind the failures first."""
        behind = self._failing_outputs()
        nodes = [node for node in self.calls if node in behind]
        return self._first_wrong_alone(
            [*nodes, *(node for node in self.calls if node not in behind)]
        )

    def _first_wrong_alone(self, nodes: Sequence[Node]) -> Finding | None:
        for node in nodes:
            if self.limit.is_over:
                return None
            worst = self._failure_alone(node)
            if worst is not None:
                return self._finding(node, "is wrong even if compiled alone", worst)
        return None

    def _failure_alone(self, node: Node) -> Finding | None:
        """The failure of the backend's code for one node on the reference's values."""
        part = self._part_alone(node)
        ends = range(len(self.run.nodes[node.name].tensors()) or 1)
        return self._failure_of(part, ends, diagnosed=True)

    def _part_alone(self, node: Node) -> CompiledPart | None:
        """The backend's code for one node; None if it needs its surroundings."""
        run = self.run.nodes[node.name]
        cut = self._cut_alone(node, {name: other.value for name, other in self.run.nodes.items()})
        if cut is None:
            return None
        module, values = cut
        with self._showing_nothing_if_it_fails():
            if self.suspect.gradients and _gives_views(run.value, [*values.values()]):
                _copy_results(module)
            return self._compile_alone(module, run, [*values.values()])
        return None

    def _cut_alone(
        self, node: Node, values: Mapping[str, Any]
    ) -> tuple[GraphModule, dict[str, Any]] | None:
        """A graph of one node, and what it reads of these values; None if it cannot be alone."""
        run = self.run.nodes[node.name]
        if run.level is not None or run.is_hidden:
            return None
        module, names = _cut_node(node, run.tensors())
        reads = {name: values[name] for name in names}
        # No graph has a list as an input.
        return None if any(isinstance(v, list | tuple) for v in reads.values()) else (module, reads)

    def _compile_alone(self, module: GraphModule, run: NodeRun, values: list[Any]) -> CompiledPart:
        rng = run.rng or self.program.rng
        return self.suspect.compile_part(module, values, run.surroundings, rng)

    # --- Findings ---

    def _finding(self, node: Node, why: str, worst: Finding) -> Finding:
        origin = self._origin(node)
        what = "the gradient of " if self.suspect.gradients else ""
        reason = f"starts here: {what}{origin.operator} {why}; {worst.reason}"
        return msgspec.structs.replace(
            worst,
            item=origin_item(self.suspect.label, origin),
            reason=reason,
            source=origin.source or None,
            origin=origin,
        )

    def _report_unfinished_search(self, first: Node, last: Node, worst: Finding) -> Finding:
        """A finding about several nodes: the time ran out before one of them was found."""
        names = tuple(node.name for node in self.calls)
        inside = names[names.index(first.name) : names.index(last.name) + 1]
        origin = msgspec.structs.replace(
            self._origin(first), kind=OriginKind.GRAPH, name=self.suspect.label, nodes=inside
        )
        reason = (
            f"starts between {first.name} and {last.name}: the search stopped after "
            f"{SECONDS_FOR_PARTS:g} s; {worst.reason}"
        )
        return self._about(reason, worst.aspect, origin)

    def _whole_graph(self) -> Finding:
        again = None
        with self._showing_nothing_if_it_fails():
            again = self._failure_of(self._compile(copy_graph(self.graph)), range(self.outputs))
        why = "the difference does not occur when the graph is compiled once more"
        if again is not None:
            why = f"no node and no part of the graph shows it; {again.reason}"
        if self.errors:
            why += f"; {self._what_was_raised()}"
        origin = Origin(kind=OriginKind.GRAPH, name=self.suspect.label)
        return self._about(why, Aspect.VALUE, origin)

    def _what_was_raised(self) -> str:
        count, first = len(self.errors), self.errors[0]
        if count == 1:
            return f"one part of the graph could not be run: {first}"
        return f"{count} parts of the graph could not be run, the first: {first}"

    def _about(self, reason: str, aspect: Aspect, origin: Origin) -> Finding:
        about = _wrong(self.suspect.failures)[0]
        values = {"dtype": about.dtype, "shape": about.shape}
        return self.suspect.place(origin, reason, about, aspect=aspect, **values)


def _overwrites(part: CompiledPart, node: Node, names: Collection[str]) -> bool:
    """Whether the code for a node changes an argument that is one of these values."""
    # Nothing may be written to a leaf that autograd follows.
    args = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in part.args]
    args_after, _ = dataclasses.replace(part, args=args).run()
    sources = [
        all_input_node.name
        for all_input_node in node.all_input_nodes
        if all_input_node.op != "get_attr"
    ]
    return any(
        name in names and isinstance(before, torch.Tensor) and not _are_same(before, after)
        for name, before, after in zip(sources, args, args_after, strict=True)
    )


def _has_no_value(node: Node) -> bool:
    """Whether the result of a node is memory that nothing was written to."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in UNINITIALISED | {"as_strided"}


def _are_same(expected: Tensor, candidate: Tensor) -> bool:
    if expected.shape != candidate.shape or expected.dtype is not candidate.dtype:
        return False
    return bitwise_equal(expected.detach(), candidate.detach())


def _item_at(value: Any, path: ValuePath) -> Any:
    for number in path:
        value = value[number] if number < len(value) else None
    return value


def _with_item(value: Any, path: ValuePath, item: Any) -> Any:
    """A copy of nested tuples with another item."""
    if not path:
        return item
    items = list(value)
    items[path[0]] = _with_item(items[path[0]], path[1:], item)
    return items if isinstance(value, list) else tuple(items)


def _gives_views(result: Any, values: Sequence[Any]) -> bool:
    """Whether a result shares the memory of an argument."""
    memory = {storage_address(tensor) for value in values for _, tensor in tensors_by_path(value)}
    return any(
        storage_address(result_tensor) in memory for _, result_tensor in tensors_by_path(result)
    )


def _copy_results(module: GraphModule) -> None:
    """Return copies: an output that is a view is made, and differentiated, outside of the code."""
    (end,) = module.graph.find_nodes(op="output")
    with module.graph.inserting_before(end):
        end.args = (
            tuple(
                module.graph.call_function(torch.clone, (returned_value,))
                for returned_value in end.args[0]
            ),
        )
    module.recompile()


def _cut_node(node: Node, tensors: list[ValuePath]) -> tuple[GraphModule, list[str]]:
    """A graph of one node that returns its tensors, and the nodes that are its arguments."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    names: list[str] = []
    attributes = [
        all_input_node for all_input_node in node.all_input_nodes if all_input_node.op == "get_attr"
    ]
    for input_node in node.all_input_nodes:
        if input_node not in attributes:
            copies[input_node] = graph.placeholder(input_node.name)
            copies[input_node].meta = dict(input_node.meta)
            names.append(input_node.name)
    for input_node in attributes:
        copies[input_node] = graph.node_copy(input_node)
    copied = graph.node_copy(node, copies.__getitem__)
    copied.meta = dict(node.meta)
    graph.output(tuple(take_item(graph, copied, path) for path in tensors or [()]))
    return GraphModule(node.graph.owning_module or {}, graph), names
