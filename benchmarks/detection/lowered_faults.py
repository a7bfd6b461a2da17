"""Faults in the graphs that Inductor compiles, and where `guard` says that they start.

The program goes through `torch.compile` with `paritas.guard`, as a user would have it, and one of
Inductor's own hooks for passes (`post_grad_custom_pre_pass`) puts a fault behind the guard's back:
the compiler was given the right graph and compiles a wrong one. Nodes are those of that graph,
below AOTAutograd; a fault is first written down as plain operators, which are fused like any other.
"""

# ruff: noqa: TID251  (what a pass writes has to be what Inductor takes: its own decompositions)

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.detection.benign_compiled import SAME_DRAWS
from benchmarks.detection.locating import distance
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

import paritas
from paritas.core.errors import UsageError
from paritas.core.results.items import output
from paritas.core.torch_private.graphs import as_traced, returned_values
from paritas.core.torch_private.inductor import capture_lowered
from paritas.mutants.programs import FlatProgram

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import GraphModule

    from paritas.core.results.findings import Verdict
    from paritas.core.torch_private.inductor import LoweredGraph


def lowered_program(program: FlatProgram) -> FlatProgram:
    """The program as Inductor is given it: one graph of its own operators.

    Raises:
        UsageError: it is not one graph that gives tensors.
    """
    seen: list[FlatProgram] = []

    def run(lowered: LoweredGraph) -> _Seen:
        return _Seen(lowered.module, seen)

    def backend(graph: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        return capture_lowered(graph, examples, run, dict(SAME_DRAWS))

    torch.compiler.reset()
    torch.compile(program.module, backend=backend)(*program.fresh_inputs())
    if len(seen) != 1:
        raise UsageError(f"the program becomes {len(seen)} graphs, and faults need one")
    return seen[0]


class _Seen:
    """A graph that writes down what it is called with."""

    # By this Dynamo knows that it takes its arguments in a list.
    _boxed_call = True

    def __init__(self, module: GraphModule, seen: list[FlatProgram]) -> None:
        self.module = module
        self.seen = seen

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        given = tuple(v.detach().clone() if isinstance(v, Tensor) else v for v in arguments)
        ends = returned_values(self.module)
        if not all(isinstance(end, Node) for end in ends):
            raise UsageError("the graph that Inductor is given has results that are none")
        items = tuple(output(f"result {number}") for number in range(len(ends)))
        self.seen.append(FlatProgram(self.module, given, items, frozenset()))
        results: Sequence[Any] = self.module(*arguments)
        return results


@dataclasses.dataclass(frozen=True)
class FaultyPass:
    """A pass of the compiler that puts a faulty call in the place of one node.

    Attributes:
        node: its name.
        call: what is computed instead.
    """

    node: str
    call: Callable[..., Any]

    def __call__(self, graph: Graph) -> None:
        """Change the graph, if it has the node."""
        node = next((each for each in graph.nodes if each.name == self.node), None)
        if node is None:
            return
        inputs = list(node.all_input_nodes)
        examples = [given.meta["val"] for given in inputs]

        def faulty(*values: Any) -> Any:
            table = dict(zip(inputs, values, strict=True))
            args, kwargs = map_arg((node.args, node.kwargs), table.__getitem__)
            return self.call(*args, **kwargs)

        mode = next(value.fake_mode for value in examples if isinstance(value, Tensor))
        with mode:
            # What Inductor decomposes was decomposed when it is given the graph.
            write = make_fx(torch.func.functionalize(faulty), select_decomp_table())
            traced: GraphModule = write(*examples)
        written = _without_constants(traced, mode)
        places = dict(zip(written.find_nodes(op="placeholder"), inputs, strict=True))
        with graph.inserting_before(node):
            result: Any = graph.graph_copy(written, places)
        _read_instead(node, result)


def _without_constants(traced: GraphModule, mode: Any) -> Graph:
    """The graph with its constant numbers written into it: a pass brings no tensors along."""
    graph = traced.graph
    for node in graph.find_nodes(op="get_attr"):
        held = getattr(traced, str(node.target))
        number = getattr(held, "constant", held)  # a fake tensor knows what it stands for
        if number is None or number.dim():
            raise UsageError("the fault holds a tensor of its own, which a pass cannot bring along")
        with as_traced():  # out of every mode, where a number can be read
            value = number.item()
        settings = {"dtype": number.dtype, "device": number.device}
        with graph.inserting_before(node):
            call = graph.call_function(torch.ops.aten.full.default, ([], value), settings)
        with mode:
            call.meta["val"] = torch.full([], value, **settings)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
    return graph


def _read_instead(node: Node, result: Any) -> None:
    """Let everybody who reads a node, or one of its several values, read something else."""
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise UsageError(f"{user.name} reads all values of {node.name} at once")
            user.replace_all_uses_with(result[user.args[1]])
            user.graph.erase_node(user)
    node.graph.erase_node(node)


def guarded_verdict(program: FlatProgram, fault: FaultyPass | None = None) -> Verdict:
    """What `guard` says of the program when Inductor compiles it, with a fault or without."""
    torch.compiler.reset()
    options: dict[str, Any] = dict(SAME_DRAWS)
    if fault is not None:
        options["post_grad_custom_pre_pass"] = fault
    guard = paritas.guard("inductor", on_mismatch="record", options=options)
    torch.manual_seed(0)
    torch.compile(program.module, backend=guard)(*program.fresh_inputs())
    return guard.verdict()


def said_of(verdict: Verdict, lowered: FlatProgram, site: str) -> tuple[str, str, int | None]:
    """What was named, what kind of place it is, and how many edges it is from the truth.

    Of a set of nodes the farthest counts: naming half of the graph is no hit.
    """
    origins = [finding.origin for finding in verdict.failures if finding.origin is not None]
    for origin in origins:
        if origin.kind in {"node", "fusion"}:
            nodes = origin.nodes or (origin.name,)
            steps = [distance(lowered, site, name) for name in nodes]
            known = [step for step in steps if step is not None]
            away = max(known) if len(known) == len(steps) else None
            return ", ".join(nodes), origin.kind.value, away
    for origin in origins[:1]:
        return origin.name, origin.kind.value, None
    return "", "", None
