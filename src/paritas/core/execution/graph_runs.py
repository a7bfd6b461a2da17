"""Runs of one graph on the arguments of one call: natively, in float64, perturbed.

First graphs from below autograd, then graphs as Dynamo captured them, which autograd records.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.execution.differences import all_equal
from paritas.core.execution.evidence import Evidence
from paritas.core.execution.held_values import MISSING
from paritas.core.execution.observation import (
    Observation,
    find_aliases,
    note_decisions,
    storage_address,
)
from paritas.core.execution.program import Program
from paritas.core.execution.saved_state import Copier, RandomState, Surroundings
from paritas.core.numerics.contents import detach_value
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.precision.widening import widen_graph
from paritas.core.results.items import Item, after_call, gradient, input_of, nth_output
from paritas.core.torch_private.eager_graphs import (
    draws_random_numbers,
    has_twins,
    overwrite_operands,
    use_twins,
)
from paritas.core.torch_private.global_state import running_eagerly
from paritas.core.torch_private.graphs import (
    as_traced,
    captured_graph_may_draw,
    captured_graph_uses_draws,
    captured_input_names,
    copy_graph,
    lift_tensors,
    node_dtypes,
    placeholders,
    returned_values,
    written_placeholders,
)
from paritas.core.torch_private.operators import WIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.fx import GraphModule

    from paritas.core.execution.observation import RunOptions
    from paritas.core.precision.lifting import LiftMode


# --- The reference as a program that needs less memory --------------------------------------------


class LeanGraph:
    """A graph that is replaced, once trusted, by one that writes results over operands.

    A guarded call holds the results of the compiled code and of the reference at once. Their size
    decides whether a program that barely fits into memory can be guarded.
    """

    def __init__(self, module: GraphModule) -> None:
        """The graph is rewritten by `compare_once`, when it is known to be called again."""
        self.module = module
        self.is_settled = False

    def compare_once(self, expected: list[Any], run: Callable[[GraphModule], list[Any]]) -> None:
        """Use the rewritten graph from now on if `run` gives the expected results with it."""
        if self.is_settled:
            return
        self.is_settled = True
        lean = overwrite_operands(self.module)
        if lean is None:
            return
        try:
            lean_results = run(lean)
        except Exception:  # noqa: BLE001  (the original stays in use)
            return
        if len(lean_results) == len(expected) and all(
            map(_have_same_layout, lean_results, expected)
        ):
            pairs = zip(lean_results, expected, strict=True)
            tensors = [pair for pair in pairs if isinstance(pair[0], torch.Tensor)]
            if all(
                all_equal(
                    [(lean_tensor.detach(), other.detach()) for lean_tensor, other in tensors]
                )
            ):
                self.module = lean


def _have_same_layout(left: Any, right: Any) -> bool:
    """Whether two results are tensors with the same layout and strides, or equal values."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.layout is right.layout and _strides_of(left) == _strides_of(right)
    return type(left) is type(right) and bool(left == right)


def _strides_of(value: torch.Tensor) -> tuple[int, ...]:
    return value.stride() if value.layout is torch.strided else ()


# --- A graph from below autograd ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ReferenceGraph:
    """A graph from below autograd that runs op by op.

    Attributes:
        module: the graph; it draws the same random numbers as the compiled code.
        inputs: a name for each input.
        outputs: an item for each output.
        written: positions of the inputs it may write to.
        dtypes: counts of the floating dtypes it computes in.
        draws: whether it draws random numbers.
        wide: the same graph in float64.
        lean: the same graph with less memory.
    """

    module: GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[Item, ...]
    written: frozenset[int]
    dtypes: dict[torch.dtype, int]
    draws: bool
    wide: WideGraph
    lean: LeanGraph

    @classmethod
    def of(
        cls,
        module: GraphModule,
        inputs: list[str] | None = None,
        outputs: list[Item] | None = None,
    ) -> ReferenceGraph:
        """Copy a graph; by default, inputs have the names of nodes and outputs are numbered."""
        graph = copy_graph(module)
        use_twins(graph)
        written = written_placeholders(module)
        return cls(
            module=graph,
            inputs=tuple(inputs or [node.name for node in placeholders(graph)]),
            outputs=tuple(outputs or map(nth_output, range(len(returned_values(graph))))),
            written=written,
            dtypes=node_dtypes(module),
            draws=draws_random_numbers(module),
            wide=WideGraph(graph, written),
            lean=LeanGraph(graph),
        )

    def observe(
        self,
        args: list[Any],
        mode: LiftMode | None = None,
        module: GraphModule | None = None,
        *,
        returns_written: bool = False,
    ) -> Observation:
        """Run it, or `module` in its place, on arguments that it may write to.

        With `returns_written`, it returns them after its results instead.
        """
        observation = Observation()
        try:
            with as_traced(), mode or contextlib.nullcontext():
                results = list((module or self.module).forward(*args))
        except Exception as error:  # noqa: BLE001  (the observation carries it)
            observation.error = error
            return observation
        if returns_written:
            after = dict(zip(sorted(self.written), results[len(self.outputs) :], strict=True))
            args = [after.get(position) for position in range(len(args))]
        self.name_results(observation, results, args)
        note_decisions(observation, observation.outputs, mode, floats=True)
        return observation

    def name_results(self, observation: Observation, results: list[Any], args: list[Any]) -> None:
        """Put results and written inputs into an observation, by their names."""
        observation.outputs = dict(zip(self.outputs, results, strict=False))
        for position in sorted(self.written):
            value = args[position]
            if isinstance(value, torch.Tensor):
                observation.after[after_call(self.inputs[position])] = value.detach()

    def aliases(
        self, observation: Observation, args: list[Any], addresses: list[int], items: Iterable[Item]
    ) -> frozenset[tuple[Item, Item]]:
        """Which of these outputs share memory with what; `addresses` are those of the inputs."""
        outputs = {item: observation.outputs[item] for item in items if item in observation.outputs}
        places = {storage_address(value) for value in outputs.values()}
        named_inputs = zip(self.inputs, args, addresses, strict=False)
        return find_aliases(
            outputs, {input_of(name): value for name, value, at in named_inputs if at in places}
        )


class WideGraph:
    """The graph rewritten for float64, trusted once it gives the same as the dispatch mode."""

    def __init__(self, module: GraphModule, written: frozenset[int]) -> None:
        """The graph is rewritten by `compare_once`."""
        self._original = module
        self._written = written
        self._module: GraphModule | None = None
        self._trusted: bool | None = None

    def run(self, reference: ReferenceGraph, args: list[Any]) -> Observation | None:
        """Run it on native arguments; None if it is not trusted."""
        if not self._trusted or self._module is None:
            return None
        return reference.observe(args, module=self._module, returns_written=True)

    def compare_once(self, reference: ReferenceGraph, args: list[Any], truth: Observation) -> None:
        """Rewrite the graph, and trust it from now on if it gives the same bits as the mode."""
        if self._trusted is not None or truth.error is not None:
            return
        self._trusted = False
        self._module = widen_graph(self._original, self._written)
        if self._module is None:
            return
        observation = reference.observe(args, module=self._module, returns_written=True)
        values = dict(truth.items())
        self._trusted = observation.error is None and all(
            _is_same_value(value, values.get(item)) for item, value in observation.items()
        )


class GraphProgram(Program):
    """A reference graph on the arguments of one call.

    Attributes:
        kept: the arguments before the call; nothing writes to them.
        used: the arguments of the native run: `kept`, with copies of those that it writes to.
    """

    knows_dtypes = True
    notes_float64 = False

    def __init__(self, reference: ReferenceGraph, kept_args: list[Any], rng: RandomState) -> None:
        """`rng` is the state of torch's generators before the call."""
        self.reference = reference
        self.kept = kept_args
        self.rng = rng
        self.used = self.arguments()

    @classmethod
    def evidence(
        cls, reference: ReferenceGraph, kept_args: list[Any], rng: RandomState, seed: int = 0
    ) -> Evidence[GraphProgram]:
        """Run a graph natively, with as little memory as possible."""
        program = cls(reference, kept_args, rng)
        program.restore_random()
        observation = reference.observe(program.used, module=reference.lean.module)
        observation.rng_after = RandomState.of_torch() if reference.draws else rng
        return Evidence(program, [observation], seed)

    def dtypes(self, native: list[Observation]) -> dict[torch.dtype, int]:
        """The dtypes of its nodes."""
        return self.reference.dtypes

    def become_lean(self, observation: Observation) -> None:
        """Try whether later calls of this graph can use less memory; `observation` is native."""
        if self.reference.lean.is_settled or observation.error is not None:
            return

        def run(module: GraphModule) -> list[Any]:
            self.restore_random()
            again = self.reference.observe(self.arguments(), module=module)
            if again.error is not None:
                raise again.error
            return [value for _, value in again.items()]

        self.reference.lean.compare_once([value for _, value in observation.items()], run)

    def known_arguments(self) -> dict[str, Any]:
        """The arguments by name, before the call."""
        return dict(zip(self.reference.inputs, self.kept, strict=False))

    def quick_wide(self) -> Observation | None:
        """Run the rewritten graph; None if there is none, or if it fails on these arguments."""
        self.restore_random()
        observation = self.reference.wide.run(self.reference, self.kept)
        return observation if observation is not None and observation.error is None else None

    def arbiter_made(self, runs: list[Observation]) -> None:
        """Trust the rewritten graph from now on if it gives the same bits."""
        self.restore_random()
        self.reference.wide.compare_once(self.reference, self.kept, runs[0])

    def run(self, options: RunOptions) -> list[Observation]:
        """Run the graph once more."""
        args = copy_arguments(self.kept, wide=True) if options.wide else self.arguments()
        self.restore_random()
        # `as_traced` hides a watch, so a mixed graph is perturbed by its coarsest dtype throughout.
        with options.watch or contextlib.nullcontext():
            return [self.reference.observe(args, options.mode)]

    def arguments(self) -> list[Any]:
        """The arguments, with copies of those that the graph may write to."""
        return copy_written(self.kept, self.reference.written)

    def restore_random(self) -> None:
        """Restore torch's generators to their state before the call, if the graph draws."""
        if self.reference.draws:
            self.rng.restore()


def copy_argument(copier: Copier, value: Any) -> Any:
    """Copy a tensor; return other values unchanged."""
    return copier.copy_tensor(value) if isinstance(value, torch.Tensor) else value


def copy_arguments(args: Iterable[Any], *, wide: bool = False) -> list[Any]:
    """Copy all arguments of a call; the copies share memory as the originals do."""
    copier = Copier(widen=wide)
    return [copy_argument(copier, value) for value in args]


def copy_written(args: list[Any], written: frozenset[int]) -> list[Any]:
    """The arguments, with copies of the written ones and of all that share memory with them."""
    if not written:
        return list(args)
    shared = {storage_address(args[position]) for position in written if position < len(args)} - {0}
    copier = Copier()
    return [
        copy_argument(copier, value)
        if position in written or storage_address(value) in shared
        else value
        for position, value in enumerate(args)
    ]


def _is_same_value(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return bitwise_equal(left.detach(), right.detach())
    return type(left) is type(right) and bool(left == right)


# --- A captured graph, which autograd records -----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CapturedReference:
    """A graph as Dynamo captured it, made of torch functions that autograd records.

    Attributes:
        graph: a copy that no backend has changed, with inputs for the tensors it holds.
        module: the same graph, which runs eagerly.
        inputs: a name for each input.
        held: the tensors that the graph itself holds; they are the last inputs.
        dtypes: counts of the floating dtypes it computes in.
        draws: whether it may draw random numbers.
        uses_draws: whether something may depend on them.
    """

    graph: GraphModule
    module: GraphModule
    inputs: tuple[str, ...]
    held: tuple[Tensor, ...]
    dtypes: dict[torch.dtype, int]
    draws: bool
    uses_draws: bool

    @classmethod
    def of(cls, module: GraphModule) -> CapturedReference:
        """Copy a graph."""
        graph = copy_graph(module)
        lifted_tensors = lift_tensors(graph)
        runnable_graph = copy_graph(graph) if has_twins(graph) else graph
        use_twins(runnable_graph)
        names = _make_unique([*captured_input_names(module), *lifted_tensors])
        return cls(
            graph=graph,
            module=runnable_graph,
            inputs=tuple(names),
            held=tuple(lifted_tensors.values()),
            dtypes=node_dtypes(module),
            draws=captured_graph_may_draw(module),
            uses_draws=captured_graph_uses_draws(module),
        )

    def name_arguments(self, args: list[Any]) -> dict[str, Any]:
        """The arguments by name."""
        return dict(zip(self.inputs, args, strict=False))

    def name_results(
        self, observation: Observation, results: Any, args: list[Any], kept_args: list[Any]
    ) -> None:
        """Put results and written arguments into an observation."""
        for position, value in enumerate(results):
            item = nth_output(position)
            observation.outputs[item] = value
            if isinstance(value, torch.Tensor):
                observation.requires_grad[item] = value.requires_grad
                if value.layout is torch.strided:
                    observation.strides[item] = tuple(value.stride())
        named = zip(self.inputs, args, kept_args, strict=False)
        tensors = {name: pair for name, *pair in named if isinstance(pair[0], torch.Tensor)}
        pairs = [(value.detach(), before.detach()) for value, before in tensors.values()]
        for name, (value, _), same in zip(tensors, pairs, all_equal(pairs), strict=True):
            if not same:
                observation.after[after_call(name)] = value.clone()
        inputs_by_item = {
            input_of(name): value for name, value in self.name_arguments(args).items()
        }
        observation.aliases = find_aliases(observation.outputs, inputs_by_item)


@dataclasses.dataclass(frozen=True, eq=False)
class Cotangent:
    """The gradient of an output in the backward pass of compiled code.

    Attributes:
        total: all of it.
        inside: the parts that come from the code itself, which uses the output too. The rest comes
            from the program, and is what the reference gets.
    """

    total: Tensor
    inside: tuple[Tensor, ...] = ()

    def enter(self, output: Tensor) -> Tensor:
        """The gradient to begin with at an output of the reference."""
        if not self.inside:
            return self.total.to(output.dtype)
        output.register_hook(self._complete)
        return torch.zeros_like(output)

    def outside(self) -> Tensor:
        """The part that comes from the program."""
        return self._complete(torch.zeros_like(self.total)) if self.inside else self.total

    def _complete(self, arrived: Tensor) -> Tensor:
        """Add what comes from the program to what has arrived from the reference's own inside."""
        dtype = self.total.dtype
        if arrived.dtype is dtype and bitwise_equal(arrived, self._add_up(dtype)):
            return self.total  # the same sum, so nothing is lost to rounding
        wide = WIDE.get(dtype, dtype)
        inside = self._add_up(wide)
        outside = torch.where(inside.isfinite(), self.total.to(wide) - inside, 0)
        return arrived + outside.to(arrived.dtype)

    def _add_up(self, dtype: torch.dtype) -> Tensor:
        # As autograd does it: a part may have to be summed over dimensions it was expanded to.
        shape, total_dtype = self.total.shape, self.total.dtype
        total = torch.zeros_like(self.total, dtype=dtype)
        for part in self.inside:
            total = total + part.sum_to_size(shape).to(total_dtype).to(dtype)
        return total


@dataclasses.dataclass(frozen=True, eq=False)
class CapturedProgram(Program):
    """A captured graph on the arguments of one call.

    Attributes:
        reference: the graph.
        kept: the arguments before the call; nothing writes to them.
        rng: the state of the generators before the call.
        surroundings: grad mode and autocast of the call.
        cotangents: the gradients of its outputs, by position; if None, it runs forward only.
    """

    reference: CapturedReference
    kept: list[Any]
    rng: RandomState
    surroundings: Surroundings
    cotangents: dict[int, Cotangent] | None = None

    def dtypes(self, native: list[Observation]) -> dict[torch.dtype, int]:
        """The dtypes of its nodes."""
        return self.reference.dtypes

    def run(self, options: RunOptions) -> list[Observation]:
        """Run the graph once more."""
        args = self.arguments(wide=options.wide)
        before = self.kept if not options.wide else self.arguments(wide=True)
        self.restore_random()
        observation = Observation(rng_before=self.rng)
        try:
            with self.surroundings.around(), running_eagerly(), options.around():
                results = self.reference.module(*args)
            observation.rng_after = RandomState.now() if self.reference.draws else self.rng
            self.reference.name_results(observation, results, args, before)
            if self.cotangents is not None:
                observation.gradients |= self._differentiate(
                    results, args, self.cotangents, options
                )
        except Exception as error:  # noqa: BLE001  (the observation carries it)
            observation.error = error
        note_decisions(observation, observation.outputs, options.mode)
        observation.outputs = {
            item: detach_value(value) for item, value in observation.outputs.items()
        }
        return [observation]

    def _differentiate(
        self, results: Any, args: list[Any], cotangents: dict[int, Cotangent], options: RunOptions
    ) -> dict[Item, Tensor | None]:
        outputs = [results[position] for position in cotangents]
        output_gradients = [
            cotangent.enter(output)
            for output, cotangent in zip(outputs, cotangents.values(), strict=True)
        ]
        differentiable_inputs = {
            name: value
            for name, value in self.reference.name_arguments(args).items()
            if isinstance(value, torch.Tensor) and value.requires_grad
        }
        with options.around():
            gradients = torch.autograd.grad(
                outputs, list(differentiable_inputs.values()), output_gradients, allow_unused=True
            )
        return dict(zip(map(gradient, differentiable_inputs), gradients, strict=True))

    def restore_random(self) -> None:
        """Restore the generators to their state before the call, if the graph may draw.

        Other threads draw from them, too.
        """
        if self.reference.draws:
            self.rng.restore()

    def arguments(self, *, wide: bool = False) -> list[Any]:
        """Copies of the arguments, which may be written to."""
        return copy_arguments(self.kept, wide=wide)

    def known_arguments(self) -> dict[str, Any]:
        """The arguments by name, before the call."""
        return self.reference.name_arguments(self.kept)

    def initial(self, item: Item) -> Any:
        """The argument before the call."""
        return self.known_arguments().get(item.name, MISSING)


def _make_unique(names: list[str]) -> list[str]:
    name_counts: dict[str, int] = {}
    result = []
    for name in names:
        name_counts[name] = name_counts.get(name, 0) + 1
        result.append(name if name_counts[name] == 1 else f"{name} ({name_counts[name]})")
    return result
