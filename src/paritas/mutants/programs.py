"""A model written down as one flat graph, forward and backward: what faults are planted in.

Parameters, buffers, inputs and the gradients that flow in are placeholders; outputs, gradients and
changed buffers are results. So a fault of the backward pass is a fault of one node like any other,
and a wrong program is run, lifted and compared like a right one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paritas._torch.tracing import trace_calls
from paritas.errors import UsageError
from paritas.numerics.trees import leaves, map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import GraphModule, Node

# What marks the border between forward and backward while a program is traced.
_MARK = torch.ops.aten.alias.default


@dataclasses.dataclass(frozen=True)
class Program:
    """A flat graph of aten calls, with what it is called with.

    Attributes:
        module: one placeholder for each input; gives a flat tuple.
        inputs: parameters, buffers, the model's own inputs, then cotangents.
        results: what each result is: `output[0]`, `gradient of first.weight`, `buffer norm.mean`.
        backward: names of the nodes that belong to the backward pass.
    """

    module: GraphModule
    inputs: tuple[Any, ...]
    results: tuple[str, ...]
    backward: frozenset[str]

    @property
    def calls(self) -> list[Node]:
        """The operator calls, in the order in which they run."""
        return [node for node in self.module.graph.nodes if node.op == "call_function"]

    def fresh_inputs(self) -> list[Any]:
        """Inputs to call the module with: copies, since it may write to them."""
        return [
            value.detach().clone() if isinstance(value, Tensor) else value for value in self.inputs
        ]


def trace_program(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    gradients: bool = True,
    autocast: torch.dtype | None = None,
    seed: int = 0,
) -> Program:
    """Write down what `model` does on `inputs`, with the gradients of all that requires them.

    Args:
        model: an `nn.Module`, whose parameters and buffers become inputs, or any function.
        inputs: positional inputs; tensors may be anywhere in them.
        gradients: whether to go backward too, if anything can be differentiated.
        autocast: run the forward pass under `torch.autocast` to this dtype.
        seed: of the cotangents.

    Raises:
        UsageError: the model gives no tensor, or cannot be traced.
    """
    tracing = _Tracing(model, list(inputs), gradients=gradients, autocast=autocast)
    try:
        return tracing.program(seed)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        message = f"the model cannot be written down as one graph: {text:.200}"
        raise UsageError(message) from error


class _Tracing:
    """One model on its way to a flat graph."""

    def __init__(
        self,
        model: Callable[..., Any],
        inputs: list[Any],
        *,
        gradients: bool,
        autocast: torch.dtype | None,
    ) -> None:
        self.model = model
        self.autocast = autocast
        self.gradients = gradients
        module = model if isinstance(model, nn.Module) else nn.Module()
        self.parameters = dict(module.named_parameters())
        self.buffers = dict(module.named_buffers())
        self.inputs = inputs
        self.tensors = [leaf for _, leaf in leaves(inputs) if isinstance(leaf, Tensor)]
        self.results: list[str] = []

    def program(self, seed: int) -> Program:
        given: list[Any] = [*self.parameters.values(), *self.buffers.values(), *self.tensors]
        given = [value.detach().clone() for value in given]
        shapes = self._outputs(given)
        generator = torch.Generator().manual_seed(seed)
        cotangents = [
            torch.randn(out.shape, generator=generator, dtype=torch.float64).to(
                out.device, out.dtype
            )
            for out in shapes
        ]
        if not self.gradients:
            cotangents = []
        module = trace_calls(self._step, [*given, *cotangents])
        backward = _split_off(module)
        return Program(module, (*given, *cotangents), tuple(self.results), backward)

    def _outputs(self, given: list[Any]) -> list[Tensor]:
        """What of the outputs can be differentiated; nothing is, if there is nothing."""
        copies = [value.clone() for value in given]
        outputs, wanted, _ = self._forward(copies)
        if not outputs:
            message = f"the model gives no tensor on these inputs: {self.model!r:.120}"
            raise UsageError(message)
        differentiable = [out for out in outputs if out.requires_grad]
        self.gradients = self.gradients and bool(differentiable) and bool(wanted)
        return differentiable

    def _forward(
        self, given: Sequence[Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Outputs, what gradients are asked for, and buffers, which the call may have changed."""
        many, more = len(self.parameters), len(self.parameters) + len(self.buffers)
        values = [value.detach() for value in given]
        parameters = {
            name: values[i].requires_grad_(self.gradients and parameter.requires_grad)
            for i, (name, parameter) in enumerate(self.parameters.items())
        }
        buffers = {name: values[many + i].clone() for i, name in enumerate(self.buffers)}
        tensors = [
            value.requires_grad_(self.gradients and own.requires_grad)
            # Cotangents may follow.
            for value, own in zip(values[more:], self.tensors, strict=False)
        ]
        device = values[0].device.type if values else "cpu"
        with torch.autocast(device, self.autocast, enabled=self.autocast is not None):
            if isinstance(self.model, nn.Module):
                state = {**parameters, **buffers}
                outputs = torch.func.functional_call(self.model, state, tuple(self._with(tensors)))
                # A buffer that was bound anew, not written to, is found where it was handed over.
                buffers = {name: state[name] for name in buffers}
            else:
                outputs = self.model(*self._with(tensors))
        wanted = {name: value for name, value in parameters.items() if value.requires_grad}
        wanted |= {f"input[{i}]": value for i, value in enumerate(tensors) if value.requires_grad}
        given_back = [leaf for _, leaf in leaves(outputs) if isinstance(leaf, Tensor)]
        return given_back, wanted, buffers

    def _with(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The inputs, with these tensors in the place of their own."""
        those = iter(tensors)
        rebuilt: list[Any] = map_leaves(
            self.inputs, lambda leaf: next(those) if isinstance(leaf, Tensor) else leaf
        )
        return rebuilt

    def _step(self, *given: Tensor) -> list[Tensor]:
        outputs, wanted, buffers = self._forward(given)
        self.results = [f"output[{i}]" for i in range(len(outputs))]
        results = [out.detach() for out in outputs]
        if self.gradients:
            differentiable = [out for out in outputs if out.requires_grad]
            cotangents = [_MARK(value) for value in given[-len(differentiable) :]]
            found = torch.autograd.grad(
                differentiable, list(wanted.values()), cotangents, allow_unused=True
            )
            for name, gradient in zip(wanted, found, strict=True):
                if gradient is not None:
                    self.results.append(f"gradient of {name}")
                    results.append(gradient)
        self.results += [f"buffer {name}" for name in buffers]
        kept = [value.detach() if value.requires_grad else value for value in buffers.values()]
        return [*results, *kept]


def _split_off(module: GraphModule) -> frozenset[str]:
    """The names of the nodes behind the mark; the mark itself is taken out."""
    nodes = list(module.graph.nodes)
    placeholders = {node for node in nodes if node.op == "placeholder"}
    marks = [node for node in nodes if node.target is _MARK and node.args[0] in placeholders]
    if not marks:
        return frozenset()
    behind = nodes[nodes.index(marks[0]) :]
    for mark in marks:
        mark.replace_all_uses_with(mark.args[0])
        module.graph.erase_node(mark)
    module.recompile()
    return frozenset(
        node.name for node in behind if node.op == "call_function" and node not in marks
    )
