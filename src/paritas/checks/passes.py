"""Every pass of Inductor over a graph, and its split of the graph, checked as it compiles."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.frozen_graphs import Fingerprint, UnplayableError, freeze
from paritas._torch.global_state import quietly
from paritas._torch.graphs import NodeProvenance, as_traced, provenance
from paritas._torch.passes import JOINT, listening_to_passes, run_post_grad_passes
from paritas._torch.replaying import carry_keys_over
from paritas.checks.failures import make_origin
from paritas.checks.pass_programs import (
    FrozenProgram,
    SplitProgram,
    compare,
    inputs_for,
    output_dtypes,
)
from paritas.errors import in_one_line
from paritas.results.findings import Aspect, Finding, OriginKind, Status
from paritas.results.wording import enumerated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor
    from torch.fx import GraphModule, Node

    from paritas._torch.frozen_graphs import FrozenGraph
    from paritas._torch.inductor import LoweredGraph
    from paritas.checks.pass_programs import MadeUpInputs, PassComparison, PassProgram


# --- Findings about passes and splits -------------------------------------------------------------

SPLIT = "forward/backward split"
MOST_NODES_NAMED = 8


def could_not_check(path: str, reason: str) -> Finding:
    """A finding about something that was not compared."""
    return Finding(path=path, aspect=Aspect.HARNESS, status=Status.UNVERIFIED, reason=reason)


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
    told = f"on made-up inputs ({inputs.numbers.value}), the graph after it computes something else"
    if nodes:
        told += f"; it changed {enumerated([node.name for node in nodes], MOST_NODES_NAMED)}"
    return _pass_finding(path, OriginKind.PASS, name, told, comparison, nodes)


def wrong_split(comparison: PassComparison, parts: SplitProgram) -> Finding:
    """A split whose parts together compute something else than the whole."""
    again = parts.drawn_again
    told = "forward and backward graph together compute something else than the joint graph"
    if again:
        told += (
            f"; the backward graph draws random numbers again that the forward graph drew already "
            f"({enumerated(again, MOST_NODES_NAMED)}), and gets others"
        )
    nodes = [node for node in parts.backward.nodes if node.name in again]
    return _pass_finding(SPLIT, OriginKind.PARTITION, SPLIT, told, comparison, nodes)


def changed_nodes(before: FrozenGraph, after: FrozenGraph) -> list[Node]:
    """The nodes that two graphs do not share: as they were, or as they came to be."""
    old = {node.name: node for node in before.nodes}
    new = {node.name: node for node in after.nodes}
    kept = old.keys() & new.keys()
    changed = [new[name] for name in new if name in kept and _nodes_differ(old[name], new[name])]
    gone = [node for name, node in old.items() if name not in new]
    come = [node for name, node in new.items() if name not in old]
    # An output or a user that now takes another node says less than that node does.
    rewired = [node for node in changed if node.target == old[node.name].target]
    own = [node for node in changed if node.target != old[node.name].target]
    return [*own, *gone, *come] or rewired


def _pass_finding(
    path: str,
    kind: OriginKind,
    name: str,
    told: str,
    comparison: PassComparison,
    nodes: list[Node],
) -> Finding:
    worst = comparison.differ[0]
    where = _first_with_source(map(provenance, nodes))
    count = f"{len(comparison.differ)} of {comparison.compared} results differ"
    reason = f"{told}: {count}, the first in {worst.path}: {worst.reason}"
    return Finding(
        path=path,
        aspect=worst.aspect,
        status=Status.DIFFERENT,
        reason=reason,
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


def _first_with_source(known: Iterable[NodeProvenance]) -> NodeProvenance:
    places = list(known)
    with_source = [place for place in places if place.source]
    return (with_source or places or [NodeProvenance("", "")])[0]


def _nodes_differ(left: Node, right: Node) -> bool:
    return left.target != right.target or (str(left.args), str(left.kwargs)) != (
        str(right.args),
        str(right.kwargs),
    )


# --- The checks -----------------------------------------------------------------------------------

# A graph is frozen when a pass begins and when it ends; if it changed in between, both are run on
# made-up inputs and have to give the same. Passes run inside passes, and stages around them: a
# change is laid at the innermost, and what a part got wrong but the whole made good is no fault.

# What the pattern matcher calls itself inside passes that have names of their own.
ANONYMOUS = "pattern_matcher"
HARNESS = "the check itself raised"


@dataclasses.dataclass
class PassLineage:
    """A graph and all that passes make of it: they are run on the same inputs.

    Attributes:
        constants: inputs with values of their own.
        latest: the graph as it was last seen.
        inputs: sets of inputs that the first of them runs on; made when first asked for.
    """

    constants: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    latest: GraphState | None = None
    inputs: list[MadeUpInputs] | None = None

    def input_sets(self, program: FrozenProgram) -> list[MadeUpInputs]:
        """The inputs; raises `UnplayableError` if the graph runs on none."""
        if self.inputs is None:
            self.inputs = inputs_for(program, self.constants)
        return self.inputs


@dataclasses.dataclass
class GraphState:
    """A graph at one moment of the compile.

    Attributes:
        fingerprint: to tell whether it was changed since.
        lineage: what it was made of.
        module: torch's own, kept alive so that no other graph takes its address.
        program: the graph, ready to be run; None if it could not be frozen.
        problem: why not.
    """

    fingerprint: Fingerprint
    lineage: PassLineage
    module: GraphModule
    program: FrozenProgram | None = None
    problem: str = ""


@dataclasses.dataclass
class PassFrame:
    """A pass or stage that has begun and not ended.

    Attributes:
        name: the pass; for a stage, its name.
        stage: the stage it belongs to.
        is_stage: whether it is a stage.
        before: the graph when it began; None for a graph that is none of ours.
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
    """Keep a fault of ours out of the compile: it becomes a finding."""

    @functools.wraps(method)
    def run(self: PassChecks, *args: Any) -> None:
        try:
            with quietly(), torch.inference_mode(mode=False), as_traced():
                method(self, *args)
        except Exception as error:  # noqa: BLE001  (it becomes a finding)
            name = self.frames[-1].name if self.frames else "the compile"
            self.findings.append(
                could_not_check(f"pass {name}", f"{HARNESS} {in_one_line(error, 160)}")
            )

    return run


class PassChecks:
    """Hears of passes as they run, and checks them.

    Attributes:
        findings: one for each pass or split that is wrong or could not be checked.
        passes: how many times a pass changed a graph and was compared.
        splits: how many splits were compared.
        stages: how many stages ran: none at all means that nothing was heard.
        notes: what is worth knowing beside the findings.
        frames: the passes and stages that have begun.
    """

    def __init__(self) -> None:
        """Nothing is heard yet."""
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
        """Check the passes that run meanwhile."""
        with listening_to_passes(self):
            yield

    # --- what the compiler tells ------------------------------------------------------------------

    @_keep_compile_safe
    def enter_stage(
        self, stage: str, module: GraphModule, constants: dict[str, Tensor] | None = None
    ) -> None:
        """A stage begins."""
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
        """The innermost stage ended."""
        frame, after = self._leave(module)
        if frame.stage == JOINT:
            self._joint = after
        if not self.frames:
            self.findings += frame.found
            self._latest.clear()

    def abandon_stage(self) -> None:
        """The innermost stage raised: nothing of it can be told."""
        while self.frames and not self.frames.pop().is_stage:
            pass

    @_keep_compile_safe
    def enter_pass(self, name: str, module: GraphModule) -> None:
        """A pass begins; one over a graph of the compiler's own, a pattern's, is let be."""
        if not self.frames:
            return
        outer = self.frames[-1]
        own = outer.name if name == ANONYMOUS and not outer.is_stage else name
        frame = PassFrame(own, outer.stage, is_stage=False)
        self.frames.append(frame)
        lineage = self._lineage(module)
        if lineage is not None:
            frame.before = self._state(module, lineage, outer)

    @_keep_compile_safe
    def leave_pass(self, module: GraphModule) -> None:
        """The innermost pass ended."""
        if self.frames and not self.frames[-1].is_stage:
            self._leave(module)

    @_keep_compile_safe
    def split(self, outputs: int, forward: GraphModule, backward: GraphModule) -> None:
        """The last joint graph was split."""
        joint, self._joint = self._joint, None
        try:
            if joint is None or joint.program is None:
                problem = joint.problem if joint is not None else "the joint graph was not seen"
                raise UnplayableError(problem)
            parts = SplitProgram(joint.program, outputs, freeze(forward), freeze(backward))
            comparison, _ = self._compare(joint, parts)
        except UnplayableError as error:
            self.findings.append(could_not_check("forward/backward split", str(error)))
            return
        self.splits += 1
        if comparison.differ:
            self.findings.append(wrong_split(comparison, parts))

    # --- what is made of it -----------------------------------------------------------------------

    def _leave(self, module: GraphModule) -> tuple[PassFrame, GraphState | None]:
        frame = self.frames.pop()
        if frame.before is None:
            return frame, None
        after = self._state(module, frame.before.lineage, frame)
        frame.found = self._judged(frame, after)
        if self.frames:
            self.frames[-1].found += frame.found
        return frame, after

    def _judged(self, frame: PassFrame, after: GraphState) -> list[Finding]:
        before = frame.before
        if before is None or after is before or before.fingerprint.same(after.fingerprint):
            return []
        if not frame.touched and not frame.found:
            return []  # all of it happened in passes that were compared by themselves
        where = f"pass {frame.name} ({frame.stage})"
        if frame.is_stage:
            where = f"{frame.stage}, outside of its named passes"
        try:
            if before.program is None or after.program is None:
                raise UnplayableError(before.problem or after.problem)
            comparison, inputs = self._compare(before, after.program)
        except UnplayableError as error:
            return frame.found or [could_not_check(where, str(error))]
        except Exception as error:  # noqa: BLE001  (it becomes a finding)
            return [*frame.found, could_not_check(where, f"{HARNESS} {in_one_line(error, 160)}")]
        self.passes += 1
        if not comparison.differ:
            return []
        wrong = [finding for finding in frame.found if finding.status is Status.DIFFERENT]
        graphs = before.program.graph, after.program.graph
        return wrong or [wrong_pass(where, frame.name, comparison, inputs, *graphs)]

    def _compare(
        self, before: GraphState, after: PassProgram
    ) -> tuple[PassComparison, MadeUpInputs]:
        """Compare on every set of inputs; the first on which they differ is given back."""
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
        """The graph as it is now; a change since it was last seen is its owner's."""
        fingerprint = Fingerprint(module)
        known = self._latest.get(id(module))
        if known is not None and known.fingerprint.same(fingerprint):
            return known
        if owner is not None:
            owner.touched = True
        if known is not None:
            lineage = known.lineage
        state = GraphState(fingerprint, lineage, module)
        origin = lineage.latest.program if lineage.latest is not None else None
        try:
            graph = freeze(module, origin.graph if origin is not None else None)
        except UnplayableError as error:
            state.problem = str(error)
        else:
            if graph.assumed:
                names = ", ".join(graph.assumed)
                self.notes.append(f"passes: taken to compute what they replaced: {names}")
            keys = carry_keys_over(origin.graph, origin.keys, graph) if origin is not None else {}
            state.program = FrozenProgram(graph, keys)
            lineage.latest = state
        self._latest[id(module)] = state
        return state

    def _lineage(self, module: GraphModule) -> PassLineage | None:
        """What a graph was made of, if it is the one of an open stage or made of it."""
        known = self._latest.get(id(module))
        if known is not None:
            return known.lineage
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        for frame in reversed(self.frames):
            program = frame.before.program if frame.before is not None else None
            if program is not None and frame.before is not None:
                taken = [node.name for node in program.graph.placeholders]
                if names == taken:
                    return frame.before.lineage
        return None


@quietly()
def check_graph_passes(lowered: LoweredGraph) -> list[Finding]:
    """Run the passes after the gradient alone on a copy of a graph, and check each."""
    checks = PassChecks()
    try:
        with checks.watching():
            run_post_grad_passes(lowered)
    except Exception as error:  # noqa: BLE001  (it becomes a finding)
        reason = f"the passes could not be run by themselves: {in_one_line(error, 160)}"
        return [*checks.findings, could_not_check("passes", reason)]
    return checks.findings
