"""Rewrite graphs to compute in float64: traced, captured and exported ones.

A dispatch mode around every operator costs more than small operators do. A graph states its dtypes,
so they can be rewritten once.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paritas.core.numerics.bits import has_inexact
from paritas.core.operators.catalogue import operators_of
from paritas.core.operators.rounding import rounds
from paritas.core.precision.lifting import is_rounding, without_half_to_float
from paritas.core.torch_private.graphs import (
    computes_tensors,
    copy_graph,
    erase_idle_autocast,
    node_draws,
    output_node,
    placeholders,
    returned_values,
)
from paritas.core.torch_private.kernels import float64_kernel
from paritas.core.torch_private.operators import WIDE, HigherOrder, Operator, takes_dtype, traits

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.export import ExportedProgram
    from torch.fx import GraphModule


# --- Traced graphs: the arbiter without a mode around every call ----------------------------------

# Graphs that this does not cover are refused, and run under the mode instead.

# Operators that depend on the memory layout of a tensor, which widening an input may change.
_BY_LAYOUT = frozenset({"as_strided", "as_strided_copy", "as_strided_scatter", "set", "resize"})


def widen_graph(module: GraphModule, written: frozenset[int]) -> GraphModule | None:
    """The graph in float64, for the original arguments; None if it cannot be rewritten.

    It returns its outputs and then, in order, the new values of the `written` inputs. Each input is
    widened at its first use, to save memory.
    """
    result = copy_graph(module)
    if not all(_can_be_widened(node) for node in result.graph.nodes):
        return None
    inputs = placeholders(result)
    originals = {node: index for index, node in enumerate(inputs)}
    for node in list(result.graph.nodes):
        if node.op == "call_function":
            _widen_dtypes(node)
            if _uses_default_dtype(node):
                _state_dtype(result, node)
    after = {originals[node]: _widen_value(result, node) for node in inputs}
    for node in list(result.graph.nodes):
        if node.op == "get_attr" or (node.op == "call_function" and _is_random_twin(node)):
            _widen_value(result, node)
    out = output_node(result)
    ends = [after[position] for position in sorted(written)]
    out.args = ((*returned_values(result), *ends),)
    result.graph.lint()
    result.recompile()
    return result


def _can_be_widened(node: Node) -> bool:
    if node.op not in {"placeholder", "output", "get_attr", "call_function"}:
        return False
    target = node.target
    if isinstance(target, HigherOrder):
        return False
    if not isinstance(target, Operator):
        return True
    kind = traits(target)
    if kind.name in _BY_LAYOUT or kind.reads_bits:
        return False
    return not node_draws(node) and kind.namespace in {"aten", "prims"}


def _widen_dtypes(node: Node) -> None:
    node.args = _widened_dtypes(node.args)
    node.kwargs = _widened_dtypes(node.kwargs)
    if not isinstance(node.target, Operator):
        return
    kind = traits(node.target)
    node.args = without_half_to_float(kind, node.args)
    if rounds(kind):
        values = [_float64_example(value) for value in node.args]
        kernel = float64_kernel(node.target, tuple(values))
        if kernel is not node.target:
            node.target = kernel


def _uses_default_dtype(node: Node) -> bool:
    """Whether torch's default dtype decides the result: floats computed from no floats.

    The default dtype is global to the process, and other threads create tensors too.
    """
    if not isinstance(node.target, Operator) or node.kwargs.get("dtype") is not None:
        return False
    input_values = [value.meta.get("val") for value in node.all_input_nodes]
    return has_inexact(node.meta.get("val")) and not any(
        has_inexact(value) for value in input_values
    )


def _state_dtype(module: GraphModule, node: Node) -> None:
    if isinstance(node.target, Operator) and takes_dtype(node.target):
        traced = node.meta["val"]
        node.kwargs = {**node.kwargs, "dtype": WIDE.get(traced.dtype, traced.dtype)}
        return
    for input_node in node.all_input_nodes:
        if isinstance(input_node.meta.get("val"), torch.Tensor):
            with module.graph.inserting_before(node):
                wide = module.graph.call_method("to", (input_node, torch.float64))
            node.replace_input_with(input_node, wide)


def _float64_example(value: Any) -> Any:
    """An example argument of a float64 kernel: only shape, dtype and device matter."""
    if not isinstance(value, Node):
        return value
    traced = value.meta.get("val")
    if not isinstance(traced, torch.Tensor) or not traced.is_floating_point():
        return traced
    sizes = [size if isinstance(size, int) else 2 for size in traced.shape]
    return torch.zeros((), dtype=torch.float64, device=traced.device).expand(sizes)


def _widen_value(module: GraphModule, node: Node) -> Node:
    """Make all users of a value use it in float64."""
    traced = node.meta.get("val")
    dtype = traced.dtype if isinstance(traced, torch.Tensor) else None
    if dtype not in WIDE:
        return node
    users = [user for user in node.users if user.op != "output"]
    first = next((user for user in module.graph.nodes if user in users), None)
    insertion_point = output_node(module) if first is None else first
    with module.graph.inserting_before(insertion_point):
        wide = module.graph.call_method("to", (node, WIDE[dtype]))
    node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)
    return wide


def _is_random_twin(node: Node) -> bool:
    """Whether a value comes from a random twin, which is a plain function."""
    return not isinstance(node.target, Operator) and "draw" in getattr(node.target, "__name__", "")


# --- Captured graphs: for a backend, or to be exported again --------------------------------------

_DRAWS = {torch.rand, torch.randn, torch.rand_like, torch.randn_like}
_FILLS = frozenset(f"{name}_" for name in operators_of("random fills"))
_NAMED_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}


class LiftedBackend:
    """The same backend, given each graph with its narrow dtypes widened.

    Attributes:
        graphs: number of compiled graphs; 0 means that nothing was compiled.
        leaks: what could not be lifted, in words.
        breaks: whether Dynamo left code between graphs to eager.
    """

    def __init__(
        self, backend: Callable[..., Any], native: torch.dtype, used: frozenset[torch.dtype]
    ) -> None:
        """Wrap `backend` for a program in `native`; its reference uses the dtypes `used`."""
        self.backend = backend
        self.native = native
        self.lifts = functools.partial(is_rounding, used=used)
        self.graphs = 0
        self.leaks: set[str] = set()
        self.breaks = False

    def __call__(self, graph: GraphModule, example_inputs: list[Any], **options: Any) -> Any:
        """Widen the graph in place and hand it to the wrapped backend."""
        self.graphs += computes_tensors(graph)
        if any(isinstance(t, torch.Tensor) and t.dtype in WIDE for t in example_inputs):
            self.leaks.add("values in a narrow dtype enter a graph between two compiled parts")
        erase_idle_autocast(graph)
        for module in graph.modules():
            if isinstance(module, torch.fx.GraphModule):
                self._lift(module)
        return self.backend(graph, example_inputs, **options)

    def _lift(self, module: GraphModule) -> None:
        for node in list(module.graph.nodes):
            if node.op not in {"call_function", "call_method"} or "autocast" in str(node.target):
                continue
            if node.op == "call_method" and node.target in _FILLS:
                self.leaks.add(f"{node.target} draws random numbers in place")
            elif node.op == "call_function" and node.target in _DRAWS:
                self._draw_natively(module, node)
            else:
                self._widen(node)
        module.recompile()

    def _widen(self, node: Node) -> None:
        narrow = _NAMED_CASTS.get(str(node.target)) if node.op == "call_method" else None
        if narrow is not None and self.lifts(narrow):
            node.target = "double"
        node.args = _widened_dtypes(node.args, self.lifts)
        node.kwargs = _widened_dtypes(node.kwargs, self.lifts)
        target = node.target
        if node.op == "call_function" and isinstance(target, Operator):
            if target.namespace not in {"aten", "prims", "prim"}:
                self.leaks.add(f"the operator {target} may compute in any precision inside")
        elif isinstance(target, HigherOrder) and "triton" in str(target):
            self.leaks.add("a Triton kernel may compute in any precision inside")

    def _draw_natively(self, module: GraphModule, node: Node) -> None:
        """Draw random numbers in the program's dtype, to get the same random stream."""
        node.kwargs = {**node.kwargs, "dtype": node.kwargs.get("dtype") or self.native}
        with module.graph.inserting_after(node):
            wide = module.graph.call_method("to", (node, torch.float64))
        # Torch caches no graph with methods of something that it does not know to be a tensor.
        wide.meta = dict(node.meta)
        node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)


# A candidate's float64 form is compiled once, for all its later verifications.
_LIFTED: weakref.WeakKeyDictionary[Any, dict[Any, LiftedBackend]] = weakref.WeakKeyDictionary()


def lifted_backend(
    function: Any, backend: Callable[..., Any], native: torch.dtype, used: frozenset[torch.dtype]
) -> LiftedBackend:
    """The lifted form of the backend behind `function`, the same one every time."""
    backends_by_key = _LIFTED.setdefault(function, {})
    key = (id(backend), native, used)
    if key not in backends_by_key:
        backends_by_key[key] = LiftedBackend(backend, native, used)
    return backends_by_key[key]


def lift_captured(
    program: ExportedProgram, tensors: tuple[Tensor, ...], used: frozenset[torch.dtype]
) -> tuple[ExportedProgram, frozenset[str]]:
    """Rewrite the casts of a program that was captured on float64 tensors, and capture it again.

    Args:
        program: has float64 state and inputs, but may still cast to narrower dtypes.
        tensors: its inputs.
        used: the floating dtypes that the reference uses.

    Returns:
        The program, and what could not be lifted, in words.
    """
    lifting = LiftedBackend(lambda graph, _: graph, torch.float64, used)
    module: Any = lifting(program.module(), [])
    return torch.export.export(module, tensors), frozenset(lifting.leaks)


def _widened_dtypes(value: Any, lifts: Callable[[torch.dtype], bool] = lambda _: True) -> Any:
    """Replace each narrow dtype in a nested argument by its wide one, if `lifts` says so."""
    if isinstance(value, torch.dtype):
        return WIDE[value] if value in WIDE and lifts(value) else value
    if isinstance(value, dict):
        return {name: _widened_dtypes(item, lifts) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_widened_dtypes(item, lifts) for item in value)
    if isinstance(value, list):
        return [_widened_dtypes(item, lifts) for item in value]
    return value
