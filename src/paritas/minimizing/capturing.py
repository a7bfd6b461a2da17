"""From a model and its inputs to the graphs that a compiler is given, with their real inputs."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from paritas.checking.config import input_sets
from paritas.checking.observing import Conditions, running
from paritas.checking.subjects import subject
from paritas.minimizing.programs import Candidate, Program
from paritas.recording.isolation import Copier, RandomState

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule, Node

__all__ = ["Capture", "capture_programs"]


def capture_programs(
    model: Callable[..., Any], inputs: Any, candidate: Candidate | None = None
) -> list[Program]:
    """The graphs that `torch.compile` makes of a model, in the order of their first calls.

    Args:
        model: a module or function, not compiled.
        inputs: as for `verify`; of several sets the first counts.
        candidate: whose `dynamic` decides which sizes are symbols.
    """
    given = input_sets(inputs)[0]
    capture = Capture()
    dynamic = candidate.dynamic if candidate is not None else None
    compiled = torch.compile(model, backend=capture, dynamic=dynamic)
    side = subject(compiled, "candidate", "model")
    rng = RandomState.now()
    try:
        with running(side, rng, Conditions(gradients=False, seed=0)) as call:
            seen = call(given)
    finally:
        rng.restore()
    if seen.error is not None and not capture.programs:
        raise seen.error
    return capture.programs


class Capture:
    """A backend that runs each graph as it is, and keeps it with the inputs of its first call.

    Attributes:
        programs: one for each graph that was called, in that order.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.programs: list[Program] = []

    def __call__(self, graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Keep a graph when it is first called."""
        del example_inputs
        kept = False

        def run(*args: Any) -> Any:
            nonlocal kept
            if not kept:
                kept = True
                self.programs.append(program_of(graph, args))
            return graph.forward(*args)

        return run


def program_of(graph: GraphModule, args: tuple[Any, ...] | list[Any]) -> Program:
    """A graph and the values it is called with, made into a program of its own."""
    copier = Copier()
    inputs = [copier.copy_tree(_plain(value)) for value in args]
    module = copy.deepcopy(graph)
    dynamic = {
        node.name: dims
        for node in module.graph.find_nodes(op="placeholder")
        if (dims := _symbolic_dims(node)) is not None
    }
    _settle_scalars(module, inputs)
    inputs += _lift_constants(module)
    module.recompile()
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return Program(module, tuple(inputs), dynamic, gradients)


def _plain(value: Any) -> Any:
    """Parameters as tensors: a class of its own is no part of what is computed."""
    if isinstance(value, torch.nn.Parameter):
        return value.detach().requires_grad_(value.requires_grad)
    return value


def _symbolic_dims(node: Node) -> tuple[int, ...] | None:
    """The dimensions of a placeholder that are symbols; () for a symbol itself."""
    example = node.meta.get("example_value")
    if isinstance(example, torch.SymInt):
        return ()
    if not isinstance(example, torch.Tensor):
        return None
    dims = tuple(i for i, size in enumerate(example.shape) if isinstance(size, torch.SymInt))
    return dims or None


def _settle_scalars(module: GraphModule, inputs: list[Any]) -> None:
    """Write numbers that come in as tensors (momentum, eps) into the calls that use them."""
    for node, value in zip(_placeholders(module), list(inputs), strict=True):
        users = list(node.users)
        is_number = isinstance(value, torch.Tensor) and value.dim() == 0
        if not is_number or not users:
            continue
        if all(user.op == "call_method" and user.target == "item" for user in users):
            for user in users:
                _replace_by(user, value.item())
    for position in reversed(range(len(inputs))):
        node = _placeholders(module)[position]
        if not node.users:
            module.graph.erase_node(node)
            del inputs[position]


def _replace_by(node: Node, number: float) -> None:
    for user in list(node.users):
        user.args = torch.fx.node.map_arg(user.args, lambda n: number if n is node else n)
        user.kwargs = torch.fx.node.map_arg(user.kwargs, lambda n: number if n is node else n)
    node.graph.erase_node(node)


def _lift_constants(module: GraphModule) -> list[Any]:
    """Make tensors that a graph holds into inputs; their values."""
    values = []
    for node in list(module.graph.find_nodes(op="get_attr")):
        value: Any = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            continue
        last = _placeholders(module)
        with module.graph.inserting_after(last[-1]) if last else module.graph.inserting_before():
            lifted = module.graph.placeholder(node.name)
        node.replace_all_uses_with(lifted)
        module.graph.erase_node(node)
        values.append(_plain(value).detach().clone().requires_grad_(value.requires_grad))
    return values


def _placeholders(module: GraphModule) -> list[Node]:
    return list(module.graph.find_nodes(op="placeholder"))
