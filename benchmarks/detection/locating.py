"""Which node of a wrong program is the first wrong one, and what kind of wrong it is called.

The candidate is run as another backend would run it: every operator that rounds is computed in
float64 and rounded once, so that no value has the bits the reference would give. Each node is then
judged alone, as `guard` does it: the reference's operator on what the candidate had for its inputs,
against what the candidate had for its result. Where all of them pass, a fault is below the rounding
of the node that has it; then the same is asked in float64.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.detection.node_values import (
    Call,
    Elsewhere,
    Lifted,
    called,
    is_tensor,
    parent_of,
    same_call,
    table_of,
)

from paritas.core.compiled.locate import pair_node
from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.judging.failures import PLAIN_SHARE, Explainer, call_context
from paritas.core.judging.pairs import Pair, judge_pair
from paritas.core.numerics import criterion
from paritas.core.numerics.automatic import nonfinite_mismatch
from paritas.core.precision.lifting import LiftMode
from paritas.core.results.items import Item, ItemKind
from paritas.core.torch_private.graphs import as_traced, is_undefined, node_draws
from paritas.core.torch_private.operators import default_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.fx import GraphModule, Node

    from paritas.core.results.findings import Diagnosis, Finding
    from paritas.mutants.planting import ProgramNoise
    from paritas.mutants.programs import FlatProgram

# Of the size of a value: far above what one operator loses in float64, far below any fault.
LIFTED_SHARE = 1e-10


@dataclasses.dataclass(frozen=True)
class Located:
    """The first wrong node.

    Attributes:
        node: its name; empty if every node is right by itself.
        pattern: the kind of the pattern that was named first; empty if none was.
        confidence: stated with it.
        how: `native`, `lifted`, or `memory` where values are right and only their place is not.
    """

    node: str = ""
    pattern: str = ""
    confidence: float = 0.0
    how: str = ""


class Locator:
    """Finds the first wrong node in candidates of one program; what they share is judged once."""

    def __init__(self, program: FlatProgram, noise: ProgramNoise) -> None:
        """`noise` knows in which dtype the program runs."""
        self.program = program
        self.seed = noise.evidence.seed
        self.dtypes = noise.evidence.dtype, noise.evidence.default
        self.clean = self._native(program.module)
        self._judged: dict[str, list[Finding]] = {}

    def _native(self, module: GraphModule) -> dict[str, Call]:
        recorder = Elsewhere(module)
        torch.manual_seed(self.seed)
        with as_traced():
            recorder.run(*self.program.fresh_inputs())
        return recorder.calls

    def locate(self, mutant: GraphModule) -> Located:
        """The first node of the reference that is wrong in a candidate with the same nodes."""
        calls = self._native(mutant)
        for node in self.program.calls:
            bad = [one for one in self._judge(node, calls) if not one.status.passes()]
            if bad:
                worst = max(bad, key=lambda finding: finding.status.gravity)
                return _located(node, worst.diagnosis, "native")
        found = self._locate_lifted(mutant)
        if found is not None:
            return found
        moved = self._other_memory(calls)
        return Located(moved, how="memory" if moved else "")

    def _locate_lifted(self, mutant: GraphModule) -> Located | None:
        """The first node that gives something else in float64."""
        mode = LiftMode(*self.dtypes)
        recorder = Lifted(mutant, mode)
        torch.manual_seed(self.seed)
        with as_traced(), default_dtype(torch.float64):
            recorder.run(*self.program.fresh_inputs())
            for node in self.program.calls:
                own = recorder.calls[node.name].value
                if node_draws(node) or is_undefined(node) or not is_tensor(own):
                    continue
                parent = parent_of(node)
                table = table_of(parent, recorder.calls[parent.name])
                with mode:
                    value = called(parent, table)
                right = value if parent is node else value[node.args[1]]
                if not _near(right, own):
                    return _located(node, _lifted_diagnosis(parent, right, own, table), "lifted")
        return None

    def _judge(self, node: Node, calls: dict[str, Call]) -> list[Finding]:
        if node_draws(node) or is_undefined(node):
            return []
        parent = parent_of(node)
        names = {node.name, parent.name}
        untouched = all(same_call(calls[name], self.clean[name]) for name in names)
        if untouched and node.name in self._judged:
            return self._judged[node.name]
        found = self._alone(node, parent, calls)
        if node is parent:
            found += self._writes(node, calls[node.name])
        if untouched:
            self._judged[node.name] = found
        return found

    def _alone(self, node: Node, parent: Node, calls: dict[str, Call]) -> list[Finding]:
        own = calls[node.name].value
        if not is_tensor(own):
            return []
        table = table_of(parent, calls[parent.name])
        item = Item(ItemKind.NODE, node.name)
        pair = pair_node(self.program.module, node, table, own, item=item, seed=self.seed)
        return [] if pair is None else judge_pair(pair, explainer=Explainer())[0]

    def _writes(self, node: Node, call: Call) -> list[Finding]:
        """What a call leaves in its inputs, some of which no schema speaks of."""
        written = {*self.clean[node.name].after, *call.after}
        if not written:
            return []
        table = table_of(node, call)
        with as_traced():
            called(node, table)
        found: list[Finding] = []
        for given, value in table.items():
            if given.name in written and is_tensor(value):
                item = Item(ItemKind.NODE, f"{node.name}, what it leaves in {given.name}")
                left = call.after.get(given.name, call.before[given.name])
                found += judge_pair(Pair(item, value, left))[0]
        return found

    def _other_memory(self, calls: dict[str, Call]) -> str:
        """The first node that shares memory with an input, or no longer does, unlike the clean."""
        for node in self.program.calls:
            for given in node.all_input_nodes:
                was = self.clean[node.name].memory & self.clean[given.name].memory
                is_now = calls[node.name].memory & calls[given.name].memory
                if bool(was) != bool(is_now):
                    return node.name
        return ""


def _located(node: Node, diagnosis: Diagnosis | None, how: str) -> Located:
    best = None if diagnosis is None else diagnosis.best
    if best is None:
        return Located(node.name, how=how)
    return Located(node.name, best.kind, best.confidence, how)


def _lifted_diagnosis(
    parent: Node, right: Tensor, own: Tensor, table: dict[Node, Any]
) -> Diagnosis | None:
    if right.shape != own.shape or right.dtype != own.dtype:
        return None
    args = torch.fx.node.map_arg((parent.args, parent.kwargs), table.__getitem__)
    size = right.abs().nan_to_num(0.0, 0.0, 0.0).double()
    noise = PLAIN_SHARE * (size + criterion.rms(right))
    return diagnose(own, right, noise=noise, context=call_context(parent.target, *args))


def _near(right: Tensor, own: Tensor) -> bool:
    """Whether two values of float64 runs differ by no more than rounding there."""
    if right.shape != own.shape or right.dtype != own.dtype:
        return False
    if not right.is_floating_point() and not right.is_complex():
        return torch.equal(right, own)
    if nonfinite_mismatch(right, own) is not None:
        return False
    return criterion.rms_difference(own, right) <= LIFTED_SHARE * criterion.rms(right)


# --- how far off ----------------------------------------------------------------------------------


def distance(program: FlatProgram, site: str, said: str) -> int | None:
    """Edges between the node named and the wrong one; None if none was named.

    A node that gives several values is wrong where one of them is.
    """
    nodes = {node.name: node for node in program.module.graph.nodes}
    if said not in nodes or site not in nodes:
        return None
    handles = [user for user in nodes[site].users if user.target is operator.getitem]
    steps = dict.fromkeys([nodes[site], *handles], 0)
    queue = list(steps)
    for node in queue:
        for near in _neighbours(node):
            if near not in steps:
                steps[near] = steps[node] + 1
                queue.append(near)
    return steps.get(nodes[said])


def _neighbours(node: Node) -> Iterable[Node]:
    return (n for n in (*node.all_input_nodes, *node.users) if n.op == "call_function")
