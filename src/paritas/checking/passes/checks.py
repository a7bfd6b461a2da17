"""Every pass of Inductor over a graph, and its split of the graph, checked as the compile goes.

A graph is frozen when a pass begins and when it ends; if it changed in between, both are run on
made-up inputs and have to give the same. Passes run inside passes, and stages around them: a change
is laid at the innermost, and what a part got wrong but the whole made good is no fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.draw_keys import following_keys
from paritas._torch.frozen import Fingerprint, UnplayableError, freeze
from paritas._torch.graphs import as_traced
from paritas._torch.passes import JOINT, run_post_grad_passes, telling
from paritas._torch.quiet import quietly
from paritas.checking.passes.findings import could_not_check, wrong_pass, wrong_split
from paritas.checking.passes.runs import GraphProgram, compare, inputs_for, output_dtypes, told
from paritas.checking.passes.splits import SplitProgram
from paritas.numerics.findings import Finding, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.fx import GraphModule

    from paritas._torch.inductor import LoweredGraph
    from paritas.checking.passes.inputs import Inputs
    from paritas.checking.passes.runs import Comparison, Program

# What the pattern matcher calls itself inside passes that have names of their own.
ANONYMOUS = "pattern_matcher"
HARNESS = "the check itself raised"


@dataclasses.dataclass
class Lineage:
    """A graph and all that passes make of it: they are run on the same inputs.

    Attributes:
        constants: inputs with values of their own.
        latest: the graph as it was last seen.
        inputs: sets of inputs that the first of them runs on; made when first asked for.
    """

    constants: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    latest: State | None = None
    inputs: list[Inputs] | None = None

    def input_sets(self, program: GraphProgram) -> list[Inputs]:
        """The inputs; raises `UnplayableError` if the graph runs on none."""
        if self.inputs is None:
            self.inputs = inputs_for(program, self.constants)
        return self.inputs


@dataclasses.dataclass
class State:
    """A graph at one moment of the compile.

    Attributes:
        fingerprint: to tell whether it was changed since.
        lineage: what it was made of.
        module: torch's own, kept alive so that no other graph takes its address.
        program: the graph, ready to be run; None if it could not be frozen.
        problem: why not.
    """

    fingerprint: Fingerprint
    lineage: Lineage
    module: GraphModule
    program: GraphProgram | None = None
    problem: str = ""


@dataclasses.dataclass
class Frame:
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
    before: State | None = None
    touched: bool = False
    found: list[Finding] = dataclasses.field(default_factory=list)


def _unharmed(method: Callable[..., None]) -> Callable[..., None]:
    """Keep a fault of ours out of the compile: it becomes a finding."""

    @functools.wraps(method)
    def run(self: PassChecks, *args: Any) -> None:
        try:
            with quietly(), torch.inference_mode(mode=False), as_traced():
                method(self, *args)
        except Exception as error:  # noqa: BLE001  (it becomes a finding)
            name = self.frames[-1].name if self.frames else "the compile"
            self.findings.append(could_not_check(f"pass {name}", f"{HARNESS} {told(error)}"))

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
        self.frames: list[Frame] = []
        self._latest: dict[int, State] = {}
        self._joint: State | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Check the passes that run meanwhile."""
        with telling(self):
            yield

    # --- what the compiler tells ------------------------------------------------------------------

    @_unharmed
    def enter_stage(
        self, stage: str, module: GraphModule, constants: dict[str, Tensor] | None = None
    ) -> None:
        """A stage begins."""
        self.stages += 1
        if not self.frames:
            self._latest.clear()
        outer = self.frames[-1] if self.frames else None
        frame = Frame(stage, stage, is_stage=True)
        self.frames.append(frame)
        if constants:
            self._latest.pop(id(module), None)
        frame.before = self._state(module, Lineage(constants or {}), outer)

    @_unharmed
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

    @_unharmed
    def enter_pass(self, name: str, module: GraphModule) -> None:
        """A pass begins; one over a graph of the compiler's own, a pattern's, is let be."""
        if not self.frames:
            return
        outer = self.frames[-1]
        own = outer.name if name == ANONYMOUS and not outer.is_stage else name
        frame = Frame(own, outer.stage, is_stage=False)
        self.frames.append(frame)
        lineage = self._lineage(module)
        if lineage is not None:
            frame.before = self._state(module, lineage, outer)

    @_unharmed
    def leave_pass(self, module: GraphModule) -> None:
        """The innermost pass ended."""
        if self.frames and not self.frames[-1].is_stage:
            self._leave(module)

    @_unharmed
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

    def _leave(self, module: GraphModule) -> tuple[Frame, State | None]:
        frame = self.frames.pop()
        if frame.before is None:
            return frame, None
        after = self._state(module, frame.before.lineage, frame)
        frame.found = self._judged(frame, after)
        if self.frames:
            self.frames[-1].found += frame.found
        return frame, after

    def _judged(self, frame: Frame, after: State) -> list[Finding]:
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
            return [*frame.found, could_not_check(where, f"{HARNESS} {told(error)}")]
        self.passes += 1
        if not comparison.differ:
            return []
        wrong = [finding for finding in frame.found if finding.status is Status.DIFFERENT]
        graphs = before.program.graph, after.program.graph
        return wrong or [wrong_pass(where, frame.name, comparison, inputs, *graphs)]

    def _compare(self, before: State, after: Program) -> tuple[Comparison, Inputs]:
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

    def _state(self, module: GraphModule, lineage: Lineage, owner: Frame | None) -> State:
        """The graph as it is now; a change since it was last seen is its owner's."""
        fingerprint = Fingerprint(module)
        known = self._latest.get(id(module))
        if known is not None and known.fingerprint.same(fingerprint):
            return known
        if owner is not None:
            owner.touched = True
        if known is not None:
            lineage = known.lineage
        state = State(fingerprint, lineage, module)
        origin = lineage.latest.program if lineage.latest is not None else None
        try:
            graph = freeze(module, origin.graph if origin is not None else None)
        except UnplayableError as error:
            state.problem = str(error)
        else:
            if graph.assumed:
                names = ", ".join(graph.assumed)
                self.notes.append(f"passes: taken to compute what they replaced: {names}")
            keys = following_keys(origin.graph, origin.keys, graph) if origin is not None else {}
            state.program = GraphProgram(graph, keys)
            lineage.latest = state
        self._latest[id(module)] = state
        return state

    def _lineage(self, module: GraphModule) -> Lineage | None:
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
        reason = f"the passes could not be run by themselves: {told(error)}"
        return [*checks.findings, could_not_check("passes", reason)]
    return checks.findings
