"""A model as one flat graph, forward and backward, and the calls that a fault can change."""

from __future__ import annotations

import copy
import dataclasses
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from paritas._torch.graphs import node_traits, trace_calls
from paritas.errors import UsageError, in_one_line
from paritas.numerics.contents import leaves, map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.fx import GraphModule

    from paritas._torch.operators import Traits


# --- The flat graph -------------------------------------------------------------------------------

# Parameters, buffers, inputs and the gradients that flow in are placeholders; outputs, gradients
# and changed buffers are results. So a fault of the backward pass is a fault of one node like any
# other, and a wrong program is run, lifted and compared like a right one.

# What marks the border between forward and backward while a program is traced.
_MARK = torch.ops.aten.alias.default


@dataclasses.dataclass(frozen=True)
class FlatProgram:
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
) -> FlatProgram:
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
        message = f"the model cannot be written down as one graph: {in_one_line(error)}"
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

    def program(self, seed: int) -> FlatProgram:
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
        return FlatProgram(module, (*given, *cotangents), tuple(self.results), backward)

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


# --- Calls that go wrong --------------------------------------------------------------------------

# A faulty call stands in the graph in the place of the right one, under its name and with its
# arguments, so that a wrong program can be laid beside the right one node by node. What it does
# inside are plain operators on what it is given: in a lifted run it is lifted like any other call.

# What only makes room, fills it or passes a value on: nothing there can be computed wrongly.
IDLE = frozenset(
    """
    alias arange clone copy detach empty empty_like empty_strided eye fill full full_like
    lift_fresh lift_fresh_copy new_empty new_empty_strided new_full new_ones new_zeros ones
    ones_like scalar_tensor zero zeros zeros_like _to_copy _unsafe_view
    """.split()  # noqa: SIM905  (many quoted names are harder to read)
)


@dataclasses.dataclass(frozen=True)
class CallPlace:
    """A call of a graph, as a fault looks at it to see whether it can be planted there.

    Attributes:
        node: the call.
        kind: what its operator does.
        backward: whether it belongs to the backward pass.
        ends: names of the results that it gives, but for views; by position where it gives several.
        writes: positions of arguments it writes to, with the result that this argument is ("" for
            none).
        donor: position of an argument that is a program input which an equal output could take.
    """

    node: Node
    kind: Traits
    backward: bool = False
    ends: dict[int | None, str] = dataclasses.field(default_factory=dict)
    writes: dict[int, str] = dataclasses.field(default_factory=dict)
    donor: int | None = None

    @property
    def name(self) -> str:
        """The operator's name, without overload or underscore."""
        return self.kind.name

    @property
    def value(self) -> Any:
        """What the call gave when it was traced: shapes and dtypes only."""
        return self.node.meta.get("val")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a single result; of several, that of the first."""
        value = self.value
        first = value if isinstance(value, Tensor) else next(iter(value or ()), None)
        return tuple(first.shape) if isinstance(first, Tensor) else ()

    @property
    def only_given_back(self) -> bool:
        """Whether nothing computes with the result: it only leaves the program."""
        waiting = list(self.node.users)
        while waiting:
            user = waiting.pop()
            kind = node_traits(user)
            passes_on = user.target is operator.getitem or (kind is not None and kind.view)
            if user.op != "output" and not passes_on:
                return False
            waiting += [] if user.op == "output" else user.users
        return True

    @property
    def computes(self) -> bool:
        """Whether the call computes or chooses anything."""
        return not (self.kind.view or self.kind.random or self.name in IDLE)

    def argument(self, position: int, default: Any = None) -> Any:
        """A positional argument, as it stands in the graph."""
        args = self.node.args
        return args[position] if position < len(args) else default

    def given(self, position: int) -> Tensor | None:
        """A tensor argument: its shape and dtype."""
        value = self.argument(position)
        traced = value.meta.get("val") if isinstance(value, Node) else None
        return traced if isinstance(traced, Tensor) else None

    def parts(self, *, floating: bool = True) -> list[tuple[str, Tensor]]:
        """The results that somebody reads, each with the detail that names it."""
        value = self.value
        if isinstance(value, Tensor):
            return [("", value)] if _is_usable(value, floating=floating) else []
        read = {
            user.args[1]: user.meta.get("val")
            for user in self.node.users
            if user.target is operator.getitem and (user.users or ())
        }
        return [
            (f"result {position}", part)
            for position, part in sorted(read.items())
            if isinstance(part, Tensor) and _is_usable(part, floating=floating)
        ]


def _is_usable(value: Tensor, *, floating: bool) -> bool:
    return bool(value.numel()) and (value.is_floating_point() or not floating)


@dataclasses.dataclass(frozen=True)
class RunningCall:
    """One call as it happens, with the values it is given.

    Attributes:
        target: the operator.
        args: its positional arguments.
        kwargs: the others.
        in_place: it writes to its first argument and gives that back. Here it is always run on a
            copy; whoever made the call writes what comes out.
        writes: positions of all the arguments it writes to.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    in_place: bool = False
    writes: frozenset[int | str] = frozenset()

    @property
    def name(self) -> str:
        """The operator's name, without overload or underscore."""
        return str(self.target.__name__).partition(".")[0].rstrip("_")

    def right(self) -> Any:
        """What the operator gives."""
        return self.given()

    def given(self, *changes: tuple[int, Any], **kwargs: Any) -> Any:
        """What the operator gives if some of its arguments are others."""
        args = list(self.args)
        for position, value in changes:
            args[position] = value
        if self.in_place:
            args[0] = args[0].clone()
        return self.target(*args, **{**self.kwargs, **kwargs})

    def spoil(self, detail: str, change: Callable[[Tensor], Tensor]) -> Any:
        """The operator's result, changed; of several, the one that `detail` names."""
        result = self.right()
        if isinstance(result, Tensor):
            return change(result)
        position = result_position(detail)
        changed = list(result)
        changed[position] = change(changed[position])
        return type(result)(changed) if isinstance(result, list) else tuple(changed)


def result_position(detail: str) -> int:
    """Which of several results a detail such as `result 1` or `result 1, axis 0` names."""
    first = detail.partition(",")[0]
    return int(first.removeprefix("result ")) if first.startswith("result ") else 0


def number_in(detail: str) -> int:
    """The number that a detail such as `argument 2` or `axis -1` ends with."""
    return int(detail.rsplit(" ", 1)[1])


@dataclasses.dataclass(frozen=True)
class FaultRule:
    """Where a fault can be planted, and what the call does then.

    Attributes:
        where: the ways to plant it at a place, each named by a detail; none if it does not apply.
        act: the faulty call.
        exact: what it amounts to in exact arithmetic, where that cannot be had by running it in
            float64.
    """

    where: Callable[[CallPlace], Iterable[str]]
    act: Callable[[RunningCall, str], Any]
    exact: Callable[[RunningCall, str], Any] | None = None


class FaultyCall:
    """What stands in the graph in the place of an operator.

    A class and no closure, since a graph writes the name of what it calls into its code.
    """

    def __init__(
        self, target: Callable[..., Any], name: str, fault: FaultRule, detail: str, place: CallPlace
    ) -> None:
        self.target = target
        self.fault = fault
        self.detail = detail
        self.writes = place.kind.mutates
        self.layouts = _layouts(place.value)
        self.__name__ = f"{place.name}_{name}"
        self.__module__ = __name__
        self.__qualname__ = self.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the faulty operator gives."""
        act = self.fault.act
        in_place = 0 in self.writes
        result = act(RunningCall(self.target, args, kwargs, in_place, self.writes), self.detail)
        if not in_place:
            return self._laid_out(result)
        # Who writes in place has to keep doing so: others hold the same memory.
        return args[0] if result is args[0] else args[0].copy_(result)

    def in_exact_arithmetic(self) -> FaultyCall:
        """The same call with what its fault amounts to in exact arithmetic."""
        other = copy.copy(self)
        other.fault = dataclasses.replace(self.fault, act=self.fault.exact or self.fault.act)
        return other

    def _laid_out(self, result: Any) -> Any:
        """The result as it lies in memory when it is right: views further on count on that."""
        if isinstance(result, Tensor):
            return _with_strides(result, self.layouts[0])
        parts = [
            _with_strides(part, strides) if isinstance(part, Tensor) else part
            for part, strides in zip(result, self.layouts, strict=True)
        ]
        return parts if isinstance(result, list) else tuple(parts)

    def __repr__(self) -> str:
        return f"<{self.__name__}>"


def _layouts(value: Any) -> list[tuple[int, ...] | None]:
    values = [value] if isinstance(value, Tensor) else list(value)
    return [part.stride() if isinstance(part, Tensor) else None for part in values]


def _with_strides(result: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    if strides is None or result.stride() == strides or len(strides) != result.dim():
        return result
    if 0 in strides:  # a view over one value many times: it is read only
        return result
    laid = torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)
    return laid.copy_(result)


def is_number(value: Any) -> bool:
    """Whether an argument is a plain number (and no bool)."""
    return isinstance(value, int | float) and not isinstance(value, bool)
