"""A model as flat graphs, forward and backward, whole or block by block, for faults to change."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from paritas.core.errors import UsageError, in_one_line
from paritas.core.execution.block_notes import describe_uncut, name_blocks
from paritas.core.execution.block_runs import Recorder
from paritas.core.execution.blocks import require_blocks
from paritas.core.execution.cotangents import draw_cotangent
from paritas.core.execution.cut_models import BETWEEN, Rest, Side
from paritas.core.execution.observation import OUTPUT, RunConditions, RunOptions
from paritas.core.execution.reachable import reachable_modules
from paritas.core.execution.running import running_subject
from paritas.core.execution.saved_state import RandomState
from paritas.core.execution.subjects import inspect_subject
from paritas.core.numerics.contents import leaves, replace_leaves
from paritas.core.operators.catalogue import operators_of
from paritas.core.results.items import Item, ItemKind, gradient, nth_output, output
from paritas.core.results.wording import count_things
from paritas.core.torch_private.dynamo import backends_of, original_of
from paritas.core.torch_private.graphs import node_traits, trace_calls
from paritas.core.torch_private.kernels import place_of_argument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.fx import GraphModule

    from paritas.core.execution.block_runs import BlockCall
    from paritas.core.execution.subjects import Inputs
    from paritas.core.torch_private.operators import Traits


# --- The flat graph -------------------------------------------------------------------------------

# Parameters, buffers, inputs and incoming gradients are placeholders; outputs, gradients and
# changed buffers are results. So a fault in the backward pass is a fault of one node, and a mutant
# is run, lifted and compared like any program.

# Marks the border between forward and backward during tracing.
_MARK = torch.ops.aten.alias.default


@dataclasses.dataclass(frozen=True)
class FlatProgram:
    """A flat graph of aten calls, with its inputs.

    Attributes:
        module: one placeholder for each input; returns a flat tuple.
        inputs: parameters, buffers, the model's own inputs, then cotangents.
        results: what each result is: `output[0]`, `gradient of first.weight`, `buffer norm.mean`.
        backward: names of the nodes of the backward pass.
    """

    module: GraphModule
    inputs: tuple[Any, ...]
    results: tuple[Item, ...]
    backward: frozenset[str]

    @property
    def calls(self) -> list[Node]:
        """The operator calls, in execution order."""
        return [node for node in self.module.graph.nodes if node.op == "call_function"]

    def fresh_inputs(self) -> list[Any]:
        """Copies of the inputs, because the module may write to them."""
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
    upstream: Mapping[str, Tensor] | None = None,
) -> FlatProgram:
    """Trace what `model` does on `inputs`, with the gradients of everything that requires them.

    The parameters and buffers of an `nn.Module` become inputs. `seed` is for the cotangents;
    `upstream` are the known ones, by the path of the output, and no gradient flows back to others.
    """
    tracing = _Tracing(
        model, list(inputs), gradients=gradients, autocast=autocast, upstream=upstream
    )
    try:
        return tracing.program(seed)
    except UsageError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        raise UsageError(
            f"the model cannot be traced as one graph: {in_one_line(error)}"
        ) from error


class _Tracing:
    """Traces one model to a flat graph."""

    def __init__(
        self,
        model: Callable[..., Any],
        inputs: list[Any],
        *,
        gradients: bool,
        autocast: torch.dtype | None,
        upstream: Mapping[str, Tensor] | None,
    ) -> None:
        self.model = model
        self.autocast = autocast
        self.upstream = upstream
        self.gradients = gradients
        module = model if isinstance(model, nn.Module) else nn.Module()
        self.parameters = dict(module.named_parameters())
        self.buffers = dict(module.named_buffers())
        self.inputs = inputs
        self.tensors = [leaf for _, leaf in leaves(inputs) if isinstance(leaf, Tensor)]
        self.results: list[Item] = []

    def program(self, seed: int) -> FlatProgram:
        program_inputs: list[Any] = [
            *self.parameters.values(),
            *self.buffers.values(),
            *self.tensors,
        ]
        program_inputs = [value.detach().clone() for value in program_inputs]
        cotangents = [
            self._cotangent(path, out, seed) for path, out in self._outputs(program_inputs).items()
        ]
        if not self.gradients:
            cotangents = []
        module = trace_calls(self._step, [*program_inputs, *cotangents])
        backward = _split_off(module)
        return FlatProgram(module, (*program_inputs, *cotangents), tuple(self.results), backward)

    def _cotangent(self, path: str, out: Tensor, seed: int) -> Tensor:
        if self.upstream is not None:
            return self.upstream[path].to(out.device, out.dtype)
        return draw_cotangent(output(path), out, seed)

    def _outputs(self, program_inputs: list[Any]) -> dict[str, Tensor]:
        """The outputs to differentiate; turns gradients off if there are none."""
        copies = [value.clone() for value in program_inputs]
        outputs, gradient_targets, _ = self._forward(copies)
        if not outputs:
            raise UsageError(f"the model returns no tensor on these inputs: {self.model!r:.120}")
        differentiable = self._differentiable(outputs)
        self.gradients = self.gradients and bool(differentiable) and bool(gradient_targets)
        return differentiable

    def _differentiable(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        known_outputs = outputs if self.upstream is None else self.upstream
        return {
            path: out
            for path, out in outputs.items()
            if out.requires_grad and path in known_outputs
        }

    def _forward(
        self, program_inputs: Sequence[Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Outputs, tensors that get gradients, and buffers, which the call may have changed."""
        many, more = len(self.parameters), len(self.parameters) + len(self.buffers)
        values = [value.detach() for value in program_inputs]
        parameters = {
            name: values[i].requires_grad_(self.gradients and parameter.requires_grad)
            for i, (name, parameter) in enumerate(self.parameters.items())
        }
        buffers = {name: values[many + i].clone() for i, name in enumerate(self.buffers)}
        tensors = [
            value.requires_grad_(self.gradients and tensor.requires_grad)
            # Cotangents may follow.
            for value, tensor in zip(values[more:], self.tensors, strict=False)
        ]
        device = values[0].device.type if values else "cpu"
        with torch.autocast(device, self.autocast, enabled=self.autocast is not None):
            if isinstance(self.model, nn.Module):
                state = {**parameters, **buffers}
                outputs = torch.func.functional_call(self.model, state, tuple(self._with(tensors)))
                # functional_call updates `state` if the model rebinds a buffer.
                buffers = {name: state[name] for name in buffers}
            else:
                outputs = self.model(*self._with(tensors))
        gradient_targets = {
            name: value for name, value in parameters.items() if value.requires_grad
        }
        gradient_targets |= {
            f"input[{i}]": value for i, value in enumerate(tensors) if value.requires_grad
        }
        given_back = {path: leaf for path, leaf in leaves(outputs) if isinstance(leaf, Tensor)}
        return given_back, gradient_targets, buffers

    def _with(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The inputs, with their tensors replaced by these."""
        those = iter(tensors)
        values = [
            next(those) if isinstance(leaf, Tensor) else leaf for _, leaf in leaves(self.inputs)
        ]
        rebuilt: list[Any] = replace_leaves(self.inputs, values)
        return rebuilt

    def _step(self, *program_inputs: Tensor) -> list[Tensor]:
        outputs, gradient_targets, buffers = self._forward(program_inputs)
        self.results = list(map(nth_output, range(len(outputs))))
        results = [out.detach() for out in outputs.values()]
        if self.gradients:
            differentiable = list(self._differentiable(outputs).values())
            cotangents = [_MARK(value) for value in program_inputs[-len(differentiable) :]]
            gradient_values = torch.autograd.grad(
                differentiable, list(gradient_targets.values()), cotangents, allow_unused=True
            )
            for name, found_one in zip(gradient_targets, gradient_values, strict=True):
                if found_one is not None:
                    self.results.append(gradient(name))
                    results.append(found_one)
        self.results += [Item(ItemKind.BUFFER, name) for name in buffers]
        final_buffers = [
            value.detach() if value.requires_grad else value for value in buffers.values()
        ]
        return [*results, *final_buffers]


def _split_off(module: GraphModule) -> frozenset[str]:
    """The names of the nodes after the mark; removes the mark itself."""
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

# A faulty call replaces the correct one in the graph, with the same name and arguments, so the two
# programs can be compared node by node. Inside it uses plain operators, so a lifted run lifts it
# like any other call.

# Operators that only allocate, fill or pass on values: there is nothing to compute wrongly.
IDLE = operators_of("copies", "fills", "new tensors", "values passed on")


@dataclasses.dataclass(frozen=True)
class CallPlace:
    """A call of a graph, as a fault rule sees it.

    Attributes:
        kind: what its operator does.
        backward: whether it belongs to the backward pass.
        ends: the program results that it computes, possibly through views; by position if it
            returns several values.
        writes: positions of arguments it writes to, with the program result that each is, or None.
        donor: position of an argument that is a program input like the result.
    """

    node: Node
    kind: Traits
    backward: bool = False
    ends: dict[int | None, Item] = dataclasses.field(default_factory=dict)
    writes: dict[int, Item | None] = dataclasses.field(default_factory=dict)
    donor: int | None = None

    def writes_buffer(self, position: int) -> bool:
        """Whether a written argument is a buffer of the model."""
        item = self.writes[position]
        return item is not None and item.kind is ItemKind.BUFFER

    @property
    def name(self) -> str:
        """The operator's name, without overload and trailing underscore."""
        return self.kind.name

    @property
    def value(self) -> Any:
        """The traced result: shapes and dtypes only."""
        return self.node.meta.get("val")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result; the first if there are several."""
        value = self.value
        first = value if isinstance(value, Tensor) else next(iter(value or ()), None)
        return tuple(first.shape) if isinstance(first, Tensor) else ()

    @property
    def only_given_back(self) -> bool:
        """Whether the result is only returned, and nothing computes with it."""
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
        """Whether the call computes or selects anything."""
        return not (self.kind.view or self.kind.random or self.name in IDLE)

    def argument(self, position: int, default: Any = None) -> Any:
        """A positional argument, as it is in the graph."""
        args = self.node.args
        return args[position] if position < len(args) else default

    def place_of(self, name: str) -> int:
        """The position of an argument, by its name in the operator's schema."""
        return place_of_argument(self.node.target, name)

    def tensor_argument(self, position: int) -> Tensor | None:
        """The shape and dtype of a tensor argument."""
        value = self.argument(position)
        traced = value.meta.get("val") if isinstance(value, Node) else None
        return traced if isinstance(traced, Tensor) else None

    def parts(self, *, floating: bool = True) -> list[tuple[str, Tensor]]:
        """The results that are used, each with the detail that names it."""
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
    """One call while it runs, with its argument values.

    With `in_place`, it writes to its first argument and returns it. Here it runs on a copy, and the
    caller writes the result.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    in_place: bool = False
    writes: frozenset[int | str] = frozenset()

    @property
    def name(self) -> str:
        """The operator's name, without overload and trailing underscore."""
        return str(self.target.__name__).partition(".")[0].rstrip("_")

    def place_of(self, name: str) -> int:
        """The position of an argument, by its name in the operator's schema."""
        return place_of_argument(self.target, name)

    def right(self) -> Any:
        """The correct result."""
        return self.call_with()

    def call_with(self, *changes: tuple[int, Any], **kwargs: Any) -> Any:
        """The result with some arguments replaced."""
        args = list(self.args)
        for position, value in changes:
            args[position] = value
        if self.in_place:
            args[0] = args[0].clone()
        return self.target(*args, **{**self.kwargs, **kwargs})

    def spoil(self, detail: str, change: Callable[[Tensor], Tensor]) -> Any:
        """The changed result; of several, the one that `detail` names is changed."""
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
    """The number at the end of a detail such as `argument 2` or `axis -1`."""
    return int(detail.rsplit(" ", 1)[1])


@dataclasses.dataclass(frozen=True)
class FaultRule:
    """Where a fault can be planted, and what the call then does.

    Attributes:
        where: the variants that fit a place, each named by a detail; empty if it does not apply.
        act: the faulty call.
        exact: its equivalent in exact arithmetic, if running `act` in float64 does not give that.
    """

    where: Callable[[CallPlace], Iterable[str]]
    act: Callable[[RunningCall, str], Any]
    exact: Callable[[RunningCall, str], Any] | None = None


class FaultyCall:
    """Replaces an operator in the graph.

    A class, not a closure, because the generated code contains the name of what it calls.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        name: str,
        fault: FaultRule,
        detail: str,
        call_place: CallPlace,
    ) -> None:
        self.target = target
        self.fault = fault
        self.detail = detail
        self.writes = call_place.kind.mutates
        values = (
            [call_place.value] if isinstance(call_place.value, Tensor) else list(call_place.value)
        )
        self.layouts = [part.stride() if isinstance(part, Tensor) else None for part in values]
        self.__name__ = f"{call_place.name}_{name}"
        self.__module__ = __name__
        self.__qualname__ = self.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the faulty operator."""
        act = self.fault.act
        in_place = 0 in self.writes
        result = act(RunningCall(self.target, args, kwargs, in_place, self.writes), self.detail)
        if not in_place:
            return self._laid_out(result)
        # It must still write in place, because others share the memory.
        return args[0] if result is args[0] else args[0].copy_(result)

    def in_exact_arithmetic(self) -> FaultyCall:
        """The same call with its fault in exact arithmetic."""
        other = copy.copy(self)
        other.fault = dataclasses.replace(self.fault, act=self.fault.exact or self.fault.act)
        return other

    def _laid_out(self, result: Any) -> Any:
        """The result with the strides of the correct one: later views depend on them."""
        if isinstance(result, Tensor):
            return _with_strides(result, self.layouts[0])
        parts = [
            _with_strides(part, strides) if isinstance(part, Tensor) else part
            for part, strides in zip(result, self.layouts, strict=True)
        ]
        return parts if isinstance(result, list) else tuple(parts)

    def __repr__(self) -> str:
        return f"<{self.__name__}>"


def _with_strides(result: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    if strides is None or result.stride() == strides or len(strides) != result.dim():
        return result
    if 0 in strides:  # an expanded view is read-only
        return result
    laid = torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)
    return laid.copy_(result)


def is_number(value: Any) -> bool:
    """Whether an argument is a plain number, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- Pieces: the whole model, or one block at a time ----------------------------------------------
# By blocks, the model runs once, natively, and what its blocks get is recorded, with the
# gradients that flow into them. Each piece is then traced, measured and released before the next,
# so only one block has a graph, float64 copies and noise in memory.


@dataclasses.dataclass(frozen=True)
class Piece:
    """A program to plant faults in.

    Attributes:
        model: a module or function.
        inputs: its inputs.
        gradients: whether its backward pass belongs to it.
        autocast: the dtype of autocast around it; None if that is off.
        upstream: path of an output -> the gradient that flows into it; None to draw them.
        block: the name of the block; empty for the whole model.
        prefix: what the names of its parameters begin with in the whole model.
    """

    model: Callable[..., Any]
    inputs: Inputs
    gradients: bool
    autocast: torch.dtype | None = None
    upstream: Mapping[str, Tensor] | None = None
    block: str = ""
    prefix: str = ""


class ModelInPieces:
    """A model that is cut at its blocks.

    Attributes:
        names: the pieces: the blocks, in the order of the model, then what lies between them.
        notes: what a reader of the report should know.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        inputs: Inputs,
        patterns: Sequence[str] | None,
        *,
        gradients: bool,
        autocast: torch.dtype | None,
        seed: int,
    ) -> None:
        """Run the model once, and record what its blocks get.

        Raises:
            UsageError: the model has no blocks, cannot be cut at them, or raises.
        """
        if backends_of(model):
            raise UsageError("by='blocks' needs a model that is not compiled")
        modules = dict(reachable_modules(model, original_of))
        blocks = require_blocks(modules, patterns, "model")
        self._model, self._inputs = model, inputs
        self._gradients, self._autocast = gradients, autocast
        rng = RandomState.now()
        recorder = self._record(blocks, rng, seed)
        side = Side(model, model, modules, blocks)
        self._rest = Rest(side, side, inputs, recorder.cut_calls())
        self._find_rest(rng)
        uncut = {**recorder.uncut, **self._rest.uncut}
        if not self._rest.calls:
            why = next(iter(uncut.values()), "the model calls none of them")
            raise UsageError(f"the model cannot be cut at its blocks: {why}; use by='whole'")
        self.names = [*self._rest.calls, *([BETWEEN] if self._rest.computes else [])]
        self.notes = list(self._describe(uncut))

    def _record(self, blocks: dict[str, nn.Module], rng: RandomState, seed: int) -> Recorder:
        subject = inspect_subject(self._model, "reference", "model", lends_parameters=True)
        recorder = Recorder(blocks)
        conditions = RunConditions(
            gradients=self._gradients and torch.is_grad_enabled(),
            seed=seed,
            options=RunOptions(watch=recorder),
            sketches=True,
        )
        with self._casting(), running_subject(subject, rng, conditions) as call:
            observation = call(self._inputs)
        error = observation.error or observation.gradient_error
        if error is not None:
            raise UsageError(f"the model cannot be run: {in_one_line(error, 120)}") from error
        return recorder

    def _casting(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        tensors = [leaf for _, leaf in leaves(list(self._inputs.args)) if isinstance(leaf, Tensor)]
        kind = tensors[0].device.type if tensors else "cpu"
        return torch.autocast(kind, self._autocast)

    def _find_rest(self, rng: RandomState) -> None:
        try:
            with self._casting():
                self._rest.look_for_passages(rng)
        except Exception as error:
            reason = in_one_line(error, 120)
            raise UsageError(
                f"without its blocks, the model raises {reason}; name other blocks, or use "
                "by='whole'"
            ) from error

    def _describe(self, uncut: Mapping[str, str]) -> Iterator[str]:
        calls = self._rest.calls
        between = ", and between them" if self._rest.computes else ""
        yield (
            f"by blocks: {count_things(len(calls), 'block')} ({name_blocks(list(calls))})"
            f"{between}; each fault is judged on its block, and compared with the noise of its "
            "block"
        )
        yield from describe_uncut(uncut, "treated as a part of")
        if any(len(call) > 1 for call in calls.values()):
            yield "a block that is called several times is judged on its first call"

    @contextlib.contextmanager
    def piece(self, name: str) -> Iterator[Piece]:
        """One of the pieces; the model is cut while it is used."""
        if name != BETWEEN:
            yield self._block(self._rest.calls[name][0])
            return
        with self._rest.cut() as (rest, _):
            yield Piece(
                _standing_for(self._model, rest),
                self._rest.inputs(),
                self._gradients,
                self._autocast,
                block=BETWEEN,
            )

    def _block(self, call: BlockCall) -> Piece:
        upstream = {
            item.name.removeprefix(OUTPUT): value
            for item, value in call.upstream_gradients().items()
        }
        block = self._rest.reference.blocks[call.name]
        parameter = next(block.parameters(), None)
        kind = "cpu" if parameter is None else parameter.device.type
        casts = {name: dtype for name, is_on, dtype in call.around.autocast if is_on}
        return Piece(
            block,
            call.inputs(),
            self._gradients and bool(upstream),
            casts.get(kind),
            upstream or None,
            block=call.name,
            prefix=f"{call.name}.",
        )


def _standing_for(model: Callable[..., Any], rest: Callable[..., Any]) -> Callable[..., Any]:
    """The rest of a model as another object with the same parameters under the same names."""
    if not isinstance(model, nn.Module):
        return rest
    other = copy.copy(model)
    other.forward = rest
    return other
