"""Checks every graph pass of Inductor, and its split of the graph, as it compiles."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.compiled.pass_programs import (
    FrozenProgram,
    SplitProgram,
    compare,
    inputs_for,
    output_dtypes,
)
from paritas.core.errors import in_one_line
from paritas.core.judging.failures import make_origin
from paritas.core.results.findings import Finding, OriginKind, Status, mismatch, unverified
from paritas.core.results.items import Item, ItemKind
from paritas.core.results.wording import list_first
from paritas.core.torch_private.global_state import quietly
from paritas.core.torch_private.graphs import NodeProvenance, as_traced, provenance
from paritas.core.torch_private.passes import (
    JOINT,
    Fingerprint,
    UnplayableError,
    freeze,
    listening_to_passes,
    run_post_grad_passes,
)
from paritas.core.torch_private.replaying import carry_keys_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor
    from torch.fx import GraphModule, Node

    from paritas.core.compiled.pass_programs import MadeUpInputs, PassComparison, PassProgram
    from paritas.core.torch_private.inductor import LoweredGraph
    from paritas.core.torch_private.passes import FrozenGraph


# --- The checks -----------------------------------------------------------------------------------

# A graph is frozen when a pass begins and when it ends. If it changed, both versions run on
# generated inputs and have to give the same results. Passes run inside passes, and inside stages:
# a change belongs to the innermost one, and an error that the outer one corrects is not a fault.

# The name of the pattern matcher inside passes that have their own names.
ANONYMOUS = "pattern_matcher"
HARNESS = "the check itself raised"


@quietly()
def check_graph_passes(lowered: LoweredGraph) -> list[Finding]:
    """Run the post-grad passes alone on a copy of a graph, and check each."""
    checks = PassChecks()
    try:
        with checks.watching():
            run_post_grad_passes(lowered)
    except Exception as error:  # noqa: BLE001  (it becomes a finding)
        reason = f"the passes could not be run separately: {in_one_line(error, 160)}"
        return [*checks.findings, unverified("passes", reason)]
    return checks.findings


@dataclasses.dataclass
class GraphState:
    """A graph at one moment of the compile.

    Attributes:
        fingerprint: shows whether the graph has changed since.
        lineage: the graph's lineage.
        module: torch's own module, kept alive because it is identified by its address.
        program: the graph, ready to run; None if it could not be frozen.
        problem: why it could not be frozen.
    """

    fingerprint: Fingerprint
    lineage: PassLineage
    module: GraphModule
    program: FrozenProgram | None = None
    problem: str = ""


@dataclasses.dataclass
class PassFrame:
    """A pass or stage that is running.

    Attributes:
        name: the name of the pass or stage.
        stage: the stage it belongs to.
        is_stage: whether it is a stage.
        before: the graph when it began; None for a graph that is not checked.
        touched: whether the graph changed outside of the passes inside it.
        found: findings of the passes inside it.
    """

    name: str
    stage: str
    is_stage: bool
    before: GraphState | None = None
    touched: bool = False
    found: list[Finding] = dataclasses.field(default_factory=list)


def _keep_compile_safe(method: Callable[..., None]) -> Callable[..., None]:
    """Turn an exception of the check into a finding, and keep it out of the compile."""

    @functools.wraps(method)
    def run(self: PassChecks, *args: Any) -> None:
        try:
            with quietly(), torch.inference_mode(mode=False), as_traced():
                method(self, *args)
        except Exception as error:  # noqa: BLE001  (it becomes a finding)
            name = self.frames[-1].name if self.frames else "the compile"
            self.findings.append(unverified(f"pass {name}", f"{HARNESS} {in_one_line(error, 160)}"))

    return run


class PassChecks:
    """Listens to passes as they run, and checks them.

    Attributes:
        findings: one for each pass or split that is wrong or could not be checked.
        passes: number of times that a pass changed a graph and was compared.
        splits: number of compared splits.
        stages: number of stages that ran; 0 means that the compiler reported nothing.
        notes: further remarks.
        frames: the running passes and stages.
    """

    def __init__(self) -> None:
        """Start without findings."""
        self.findings: list[Finding] = []
        self.passes = 0
        self.splits = 0
        self.stages = 0
        self.notes: list[str] = []
        self.frames: list[PassFrame] = []
        self._latest: dict[int, GraphState] = {}
        self._joint: GraphState | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Check the passes that run inside the block."""
        with listening_to_passes(self):
            yield

    # --- Events from the compiler -----------------------------------------------------------------

    @_keep_compile_safe
    def enter_stage(
        self, stage: str, module: GraphModule, constants: dict[str, Tensor] | None = None
    ) -> None:
        """Handle the start of a stage."""
        self.stages += 1
        if not self.frames:
            self._latest.clear()
        outer = self.frames[-1] if self.frames else None
        frame = PassFrame(stage, stage, is_stage=True)
        self.frames.append(frame)
        if constants:
            self._latest.pop(id(module), None)
        frame.before = self._state(module, PassLineage(constants or {}), outer)

    @_keep_compile_safe
    def leave_stage(self, module: GraphModule) -> None:
        """Handle the end of the innermost stage."""
        frame, after = self._leave(module)
        if frame.stage == JOINT:
            self._joint = after
        if not self.frames:
            self.findings += frame.found
            self._latest.clear()

    def abandon_stage(self) -> None:
        """Drop the innermost stage, which raised."""
        while self.frames and not self.frames.pop().is_stage:
            pass

    @_keep_compile_safe
    def enter_pass(self, name: str, module: GraphModule) -> None:
        """Handle the start of a pass; passes over the compiler's own patterns are ignored."""
        if not self.frames:
            return
        outer = self.frames[-1]
        pass_name = outer.name if name == ANONYMOUS and not outer.is_stage else name
        frame = PassFrame(pass_name, outer.stage, is_stage=False)
        self.frames.append(frame)
        lineage = self._lineage(module)
        if lineage is not None:
            frame.before = self._state(module, lineage, outer)

    @_keep_compile_safe
    def leave_pass(self, module: GraphModule) -> None:
        """Handle the end of the innermost pass."""
        if self.frames and not self.frames[-1].is_stage:
            self._leave(module)

    @_keep_compile_safe
    def split(self, outputs: int, forward: GraphModule, backward: GraphModule) -> None:
        """Check the split of the last joint graph."""
        joint, self._joint = self._joint, None
        try:
            if joint is None or joint.program is None:
                problem = joint.problem if joint is not None else "the joint graph was not seen"
                raise UnplayableError(problem)
            parts = SplitProgram(joint.program, outputs, freeze(forward), freeze(backward))
            comparison, _ = self._compare(joint, parts)
        except UnplayableError as error:
            self.findings.append(unverified(SPLIT, str(error)))
            return
        self.splits += 1
        if comparison.differ:
            self.findings.append(wrong_split(comparison, parts))

    # --- The checks -------------------------------------------------------------------------------

    def _leave(self, module: GraphModule) -> tuple[PassFrame, GraphState | None]:
        frame = self.frames.pop()
        if frame.before is None:
            return frame, None
        after = self._state(module, frame.before.lineage, frame)
        frame.found = self._judge_change(frame, after)
        if self.frames:
            self.frames[-1].found += frame.found
        return frame, after

    def _judge_change(self, frame: PassFrame, after: GraphState) -> list[Finding]:
        before = frame.before
        if before is None or after is before or before.fingerprint.same(after.fingerprint):
            return []
        if not frame.touched and not frame.found:
            return []  # all changes happened in inner passes, which were compared
        where = f"pass {frame.name} ({frame.stage})"
        if frame.is_stage:
            where = f"{frame.stage}, outside of its named passes"
        try:
            if before.program is None or after.program is None:
                raise UnplayableError(before.problem or after.problem)
            comparison, inputs = self._compare(before, after.program)
        except UnplayableError as error:
            return frame.found or [unverified(where, str(error))]
        except Exception as error:  # noqa: BLE001  (it becomes a finding)
            return [*frame.found, unverified(where, f"{HARNESS} {in_one_line(error, 160)}")]
        self.passes += 1
        if not comparison.differ:
            return []
        wrong = [finding for finding in frame.found if finding.status is Status.DIFFERENT]
        graphs = before.program.graph, after.program.graph
        return wrong or [wrong_pass(where, frame.name, comparison, inputs, *graphs)]

    def _compare(
        self, before: GraphState, after: PassProgram
    ) -> tuple[PassComparison, MadeUpInputs]:
        """Compare on each set of inputs, up to the first on which the two differ."""
        reference = before.program
        if reference is None:
            raise UnplayableError(before.problem)
        for inputs in before.lineage.input_sets(reference):
            comparison = compare(reference, after, inputs)
            comparison.differ += output_dtypes(reference, after, inputs)
            self.notes += [f"passes: {text}" for text in comparison.undecided]
            if comparison.differ:
                break
            if comparison.unknown:
                raise UnplayableError(comparison.unknown[0])
        return comparison, inputs

    def _state(
        self, module: GraphModule, lineage: PassLineage, owner: PassFrame | None
    ) -> GraphState:
        """The graph as it is now; a change since the last call belongs to the owner."""
        fingerprint = Fingerprint(module)
        latest_state = self._latest.get(id(module))
        if latest_state is not None and latest_state.fingerprint.same(fingerprint):
            return latest_state
        if owner is not None:
            owner.touched = True
        if latest_state is not None:
            lineage = latest_state.lineage
        state = GraphState(fingerprint, lineage, module)
        origin = lineage.latest.program if lineage.latest is not None else None
        try:
            graph = freeze(module, origin.graph if origin is not None else None)
        except UnplayableError as error:
            state.problem = str(error)
        else:
            if graph.assumed:
                names = ", ".join(graph.assumed)
                self.notes.append(f"passes: assumed to compute what they replaced: {names}")
            keys = carry_keys_over(origin.graph, origin.keys, graph) if origin is not None else {}
            state.program = FrozenProgram(graph, keys)
            lineage.latest = state
        self._latest[id(module)] = state
        return state

    def _lineage(self, module: GraphModule) -> PassLineage | None:
        """The lineage of a graph, if it belongs to a running stage."""
        latest_state = self._latest.get(id(module))
        if latest_state is not None:
            return latest_state.lineage
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        for frame in reversed(self.frames):
            program = frame.before.program if frame.before is not None else None
            if program is not None and frame.before is not None:
                taken = [node.name for node in program.graph.placeholders]
                if names == taken:
                    return frame.before.lineage
        return None


@dataclasses.dataclass
class PassLineage:
    """A graph and everything that passes make of it; all run on the same inputs.

    Attributes:
        constants: inputs with known values.
        latest: the last known state of the graph.
        inputs: sets of inputs that the first graph accepts; made on first use.
    """

    constants: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    latest: GraphState | None = None
    inputs: list[MadeUpInputs] | None = None

    def input_sets(self, program: FrozenProgram) -> list[MadeUpInputs]:
        """The sets of inputs; raises `UnplayableError` if the graph accepts none."""
        if self.inputs is None:
            self.inputs = inputs_for(program, self.constants)
        return self.inputs


# --- Findings about passes and splits -------------------------------------------------------------

SPLIT = "forward/backward split"
MOST_NODES_NAMED = 8


def wrong_pass(
    path: str,
    name: str,
    comparison: PassComparison,
    inputs: MadeUpInputs,
    before: FrozenGraph,
    after: FrozenGraph,
) -> Finding:
    """A pass after which the graph computes something else."""
    nodes = changed_nodes(before, after)
    reason = (
        f"on generated inputs ({inputs.numbers.value}), the graph after it computes something else"
    )
    if nodes:
        reason += f"; it changed {list_first([node.name for node in nodes], MOST_NODES_NAMED)}"
    return _pass_finding(path, OriginKind.PASS, name, reason, comparison, nodes)


def wrong_split(comparison: PassComparison, parts: SplitProgram) -> Finding:
    """A split after which the two graphs compute something else than the joint graph."""
    again = parts.drawn_again
    reason = "forward and backward graph together compute something else than the joint graph"
    if again:
        reason += (
            "; the backward graph draws random numbers that the forward graph has drawn already "
            f"({list_first(again, MOST_NODES_NAMED)}), and gets different ones"
        )
    nodes = [node for node in parts.backward.nodes if node.name in again]
    return _pass_finding(SPLIT, OriginKind.PARTITION, SPLIT, reason, comparison, nodes)


def changed_nodes(before: FrozenGraph, after: FrozenGraph) -> list[Node]:
    """The nodes that two graphs do not share: changed, removed or added."""
    old = {node.name: node for node in before.nodes}
    new = {node.name: node for node in after.nodes}
    common_names = old.keys() & new.keys()
    changed = [
        new[name] for name in new if name in common_names and _nodes_differ(old[name], new[name])
    ]
    gone = [node for name, node in old.items() if name not in new]
    come = [node for name, node in new.items() if name not in old]
    # A node whose inputs alone changed says less than the nodes that were changed.
    rewired = [node for node in changed if node.target == old[node.name].target]
    replaced_nodes = [node for node in changed if node.target != old[node.name].target]
    return [*replaced_nodes, *gone, *come] or rewired


def _pass_finding(
    path: str,
    kind: OriginKind,
    name: str,
    what: str,
    comparison: PassComparison,
    nodes: list[Node],
) -> Finding:
    worst = comparison.differ[0]
    where = _first_with_source(map(provenance, nodes))
    count = f"{len(comparison.differ)} of {comparison.compared} results differ"
    reason = f"{what}: {count}, the first in {worst.path}: {worst.reason}"
    return mismatch(
        Item(ItemKind.ORIGIN, path),
        worst.aspect,
        reason,
        dtype=worst.dtype,
        shape=worst.shape,
        metrics=worst.metrics,
        native=worst.native,
        lifted=worst.lifted,
        diagnosis=worst.diagnosis,
        source=where.source or None,
        origin=make_origin(
            kind, name, where, tuple(node.name for node in nodes[:MOST_NODES_NAMED])
        ),
    )


def _first_with_source(node_provenances: Iterable[NodeProvenance]) -> NodeProvenance:
    places = list(node_provenances)
    with_source = [position for position in places if position.source]
    return (with_source or places or [NodeProvenance("", "")])[0]


def _nodes_differ(left: Node, right: Node) -> bool:
    return left.target != right.target or (str(left.args), str(left.kwargs)) != (
        str(right.args),
        str(right.kwargs),
    )
