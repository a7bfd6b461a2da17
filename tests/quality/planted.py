"""Faults planted in single nodes of the graphs that Inductor compiles: do they get named?

A fault is planted by Inductor's own `post_grad_custom_pre_pass`, on the graph below AOTAutograd:
behind one node stands something else than what the node computes, and everybody who read the node
reads that instead, the graph's outputs included. Nodes and faults are drawn by a seed, so the cases
are not chosen. A fault counts only if it moves a result of its graph by 1e-6 or more when all is
computed in float64; a constant added before a normalisation, say, does not.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.nn import functional as F

from paritas.core.torch_private.inductor import LoweredGraph, capture_lowered
from quality.planted_faults import FAULTS, OF_OPERATORS, Emit, handles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FORWARD, BACKWARD = "forward", "backward"
VISIBLE = 1e-6
# Of each graph; less of the programs that take long to compile.
CASES = {"perceptron": 8, "block": 8, "convolutional": 7, "recurrent": 9}


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x))).log_softmax(-1)


class Block(nn.Module):
    """A pre-LN transformer block; its attention is causal and spelled out."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.project(x).view(batch, tokens, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        return self.merge((weights @ value).transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.second = nn.Conv2d(6, 8, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return self.head(F.relu(self.second(x)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(8, 16), nn.Linear(16, 4)
        self.step = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 16)
        for moment in x.unbind(1):
            state = torch.tanh(self.read(moment) + self.step(state))
        return self.write(state)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (Perceptron, (6, 12)),
    "block": (Block, (2, 8, 16)),
    "convolutional": (Convolutional, (4, 3, 8, 8)),
    "recurrent": (Recurrent, (5, 4, 8)),
}


def execute(
    program: str, backend: Any, *, backward: bool, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Run a program once under `torch.compile`: outputs, gradients, buffers."""
    torch.compiler.reset()
    torch.manual_seed(0)
    build, shape = PROGRAMS[program]
    model, x = build().to(dtype), torch.randn(shape).to(dtype)
    output = (torch.compile(model, backend=backend) if backend else model)(x)
    results = [output.detach(), *model.buffers()]
    if backward:
        cotangent = torch.randn(output.shape).to(dtype)
        results += torch.autograd.grad(output, list(model.parameters()), cotangent)
    return results


# --- the graphs -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Lowered:
    """One graph of a program and what it was called with, in float64."""

    module: GraphModule
    inputs: list[Any]

    def results(self, graph: Graph) -> list[Any]:
        """What `graph` gives for the inputs of this one, and what it leaves in them."""
        inputs = copies(self.inputs)
        return [*interpreted(self.module, graph, inputs), *inputs]


def interpreted(module: GraphModule, graph: Graph, inputs: list[Any]) -> Sequence[Any]:
    """What `graph` gives, run node by node with the attributes of a module."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default  # as Inductor does: strides are its own
    with torch.no_grad():
        return GraphModule(module, graph)(*inputs)


@functools.cache
def lowered(program: str) -> dict[str, Lowered]:
    """The graphs of a program below AOTAutograd, forward and backward."""
    graphs: dict[str, Lowered] = {}

    def keep(graph: LoweredGraph) -> Callable[..., Any]:
        def run(arguments: list[Any]) -> Sequence[Any]:
            direction = direction_of(graph.module.graph)
            graphs[direction] = Lowered(graph.module, copies(arguments))
            return interpreted(graph.module, copy.deepcopy(graph.module.graph), arguments)

        run._boxed_call = True
        return run

    def backend(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return capture_lowered(graph, example_inputs, keep)

    execute(program, backend, backward=True, dtype=torch.float64)
    return graphs


def copies(items: list[Any]) -> list[Any]:
    return [item.detach().clone() if isinstance(item, Tensor) else item for item in items]


def direction_of(graph: Graph) -> str:
    tangents = any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder"))
    return BACKWARD if tangents else FORWARD


def distances(graph: Graph, names: Sequence[str]) -> dict[str, int]:
    """Every operator's distance from the nearest of `names`, along edges in either direction."""
    steps = dict.fromkeys(names, 0)
    nodes = {node.name: node for node in graph.nodes if node.op == "call_function"}
    queue = list(names)
    for name in queue:
        node = nodes[name]
        for near in (*node.all_input_nodes, *node.users):
            if near.name in nodes and near.name not in steps:
                steps[near.name] = steps[name] + 1
                queue.append(near.name)
    return steps


# --- the cases ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A fault in one node of one graph of a program."""

    program: str
    direction: str
    node: str
    fault: str

    def __str__(self) -> str:
        return f"{self.program} {self.direction}, {self.node}: {self.fault}"

    @property
    def options(self) -> dict[str, Any]:
        """Options of Inductor that plant it. A pass that is a plain callable is never cached."""
        return {"post_grad_custom_pre_pass": Plant(self)}

    @property
    def graph(self) -> Graph:
        """The graph without the fault."""
        return lowered(self.program)[self.direction].module.graph

    @property
    def names(self) -> list[str]:
        """The node, or, where it gives several values, the nodes that stand for them too."""
        node = next(node for node in self.graph.nodes if node.name == self.node)
        return [node.name, *(handle.name for handle in handles(node))]


@dataclasses.dataclass(frozen=True)
class Plant:
    """A pass over a graph that plants one case, wherever the graph has its node."""

    case: Case

    def __call__(self, graph: Graph) -> None:
        if direction_of(graph) == self.case.direction:
            plant(graph, self.case.node, self.case.fault)


def plant(graph: Graph, name: str, fault: str) -> bool:
    """Plant a fault in the node of that name; False, and nothing is changed, if it has no place."""
    node = next((node for node in graph.nodes if node.name == name), None)
    if node is None:
        return False
    emit = Emit(node)
    replaced = FAULTS[fault](node, emit)
    if replaced is None:
        emit.undo()
        return False
    old, new = replaced
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in emit.nodes)
    return True


def effect(case: Case) -> float:
    """How far a fault moves a result, over its norm, in float64; nan if it has no place."""
    whole = lowered(case.program)[case.direction]
    mutant = copy.deepcopy(case.graph)
    if not plant(mutant, case.node, case.fault):
        return math.nan
    pairs = zip(whole.results(copy.deepcopy(case.graph)), whole.results(mutant), strict=True)
    return max(_distance(left, right) for left, right in pairs)


def _distance(left: Any, right: Any) -> float:
    if not isinstance(left, Tensor):
        return 0.0
    left, right = left.double(), right.double()
    if not torch.equal(left.isfinite(), right.isfinite()):
        return math.inf
    left, right = left.nan_to_num(), right.nan_to_num()
    return float((left - right).norm() / left.norm().clamp_min(1e-30))


@functools.cache
def drawn(program: str, direction: str) -> tuple[Case, ...]:
    """Cases of one graph, each in another node.

    Every second draw takes any node and then a fault; the others a fault of an operator and then a
    node, because the faults of rare operators would hardly be drawn otherwise.
    """
    draw = random.Random(f"{program} {direction}")
    nodes = [node.name for node in lowered(program)[direction].module.graph.nodes]
    by_node = [
        [Case(program, direction, node, fault) for fault in draw.sample(list(FAULTS), len(FAULTS))]
        for node in draw.sample(nodes, len(nodes))
    ]
    by_fault = [
        [Case(program, direction, node, fault) for node in draw.sample(nodes, len(nodes))]
        for fault in draw.sample(list(OF_OPERATORS), len(OF_OPERATORS))
    ]
    cases: dict[str, Case] = {}
    for choice in (choice for pair in zip(by_node, by_fault, strict=False) for choice in pair):
        untouched = (case for case in choice if case.node not in cases)
        found = next((case for case in untouched if effect(case) > VISIBLE), None)
        if found is not None:
            cases[found.node] = found
        if len(cases) == CASES[program]:
            break
    return tuple(cases.values())
