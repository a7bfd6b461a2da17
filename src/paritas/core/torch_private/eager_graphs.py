"""Rewrite a compiler's graph to run op by op, as the reference.

Inductor draws its own random numbers, higher-order operators hide their contents, equality of
floats depends on their rounding, and a graph run op by op needs more memory than compiled code.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch._inductor.config
import torch._inductor.inductor_prims
from torch._higher_order_ops.auto_functionalize import (
    auto_functionalized_dense,
    auto_functionalized_v2_dense,
)
from torch._ops import HigherOrderOperator
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from paritas.core.torch_private.dynamo import unguarded
from paritas.core.torch_private.global_state import taking_stance
from paritas.core.torch_private.graphs import copy_graph, node_draws

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.fx import GraphModule


# --- Higher-order operators as plain functions ----------------------------------------------------

# Torch runs them under a dispatch mode only if it has a rule for the mode. Plain functions that
# call their contents need none.


def run_checkpoint(body: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """A checkpoint that draws the same numbers again in backward, like the user's.

    For a captured checkpoint torch leaves that to the compiler; its eager form does not do it.
    """
    context = {key: value for key, value in how.items() if key == "context_fn"}
    return checkpoint(body, *args, use_reentrant=False, preserve_rng_state=True, **context)


def run_and_save_state(op: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Run an operator that draws; returns the generator's state before, and the result."""
    if _is_on_cuda(args, kwargs):
        return torch.cuda.get_rng_state(), op(*args, **kwargs)
    return torch.get_rng_state(), op(*args, **kwargs)


def run_with_state(state: Any, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an operator from a saved state, and restore the generator afterwards."""
    if _is_on_cuda(args, kwargs):
        before = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(state.cpu())
        result = op(*args, **kwargs)
        torch.cuda.set_rng_state(before)
        return result
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    result = op(*args, **kwargs)
    torch.set_rng_state(before)
    return result


def run_with_generator(
    op: Callable[..., Any], *args: Any, rng_state: torch.Generator | None = None, **kwargs: Any
) -> Any:
    """Run an operator from the state of a generator that was passed as an argument.

    Torch draws from this state and advances it; here a copy is used, so a second run of the graph
    draws the same numbers.
    """
    if rng_state is None:
        return op(*args, **kwargs)
    generator = torch.cuda.default_generators[rng_state.device.index or 0]
    before = generator.graphsafe_get_state()
    generator.graphsafe_set_state(rng_state.clone_state())
    try:
        return op(*args, **kwargs)
    finally:
        generator.graphsafe_set_state(before)


def choose(condition: Any, yes: Callable[..., Any], no: Callable[..., Any], operands: Any) -> Any:
    """`torch.cond`."""
    return (yes if bool(condition) else no)(*operands)


def invoke(body: Callable[..., Any], _name: str, *operands: Any) -> Any:
    """A subgraph that is called in several places."""
    return body(*operands)


def _is_on_cuda(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "cuda"
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in args)


_HIGHER_ORDER = torch.ops.higher_order
PLAIN_FORMS: dict[Any, Callable[..., Any]] = {
    _HIGHER_ORDER.tag_activation_checkpoint: run_checkpoint,
    _HIGHER_ORDER.run_and_save_rng_state: run_and_save_state,
    _HIGHER_ORDER.run_with_rng_state: run_with_state,
    _HIGHER_ORDER.graphsafe_run_with_rng_state: run_with_generator,
    _HIGHER_ORDER.cond: choose,
    _HIGHER_ORDER.invoke_subgraph: invoke,
    _HIGHER_ORDER.auto_functionalized: auto_functionalized_dense,
    _HIGHER_ORDER.auto_functionalized_v2: auto_functionalized_v2_dense,
}


# --- Inductor's random numbers, drawn outside the checked program ---------------------------------

# Inductor draws from its own generators inside its kernels, and torch's eager forms of those
# operators draw other numbers. So a reference draws with a kernel that Inductor compiles for the
# draw alone: one for each kind of number and any size, because a draw depends only on the seed and
# on the flat position of each number.

_SMALLEST_SEED, _LARGEST_SEED = -(2**63), 2**63 - 1


def has_twins(module: GraphModule) -> bool:
    """Whether `use_twins` would replace an operator."""
    graphs = [
        submodule for submodule in module.modules() if isinstance(submodule, torch.fx.GraphModule)
    ]
    return any(
        node.op == "call_function" and node.target in _EAGER_FORMS
        for graph in graphs
        for node in graph.graph.nodes
    )


def use_twins(module: GraphModule) -> None:
    """Replace operators of a graph by eager forms: fast, and with Inductor's random numbers."""
    for node in module.graph.nodes:
        twin = None
        if node.op == "call_function":
            twin = _EAGER_FORMS.get(node.target)
        if twin is not None:
            node.target = twin
    module.recompile()
    for child in module.children():
        if isinstance(child, torch.fx.GraphModule):
            use_twins(child)


def draws_random_numbers(module: GraphModule) -> bool:
    """Whether running a graph may advance torch's random generators."""
    for node in module.graph.nodes:
        if isinstance(node.target, HigherOrderOperator) or node_draws(node):
            return True
    return False


def draws_by_inductor(target: Any) -> bool:
    """Whether an operator is one of Inductor's random operators, or its eager form."""
    return target in _TWINS or target in _TWINS.values()


def draw_seeds(count: int, device: torch.device) -> Tensor:
    """Seeds from torch's generator, as compiled code draws them."""
    seeds = torch.empty(count, dtype=torch.int64, device=device)
    torch.ops.aten.randint.low_out(_SMALLEST_SEED, _LARGEST_SEED, [count], out=seeds)
    return seeds


def draw_floats(size: list[int], seed: Tensor, mode: str, **alignment: Any) -> Tensor:
    """Uniform (`rand`) or normal (`randn`) float32 numbers of one seed."""
    count = math.prod(size)
    if count == 0:
        return torch.empty(size, dtype=torch.float32, device=seed.device)
    alignment_items = tuple(
        sorted((key, value) for key, value in alignment.items() if value is not None)
    )
    return _run_kernel(_float_kernel(mode, alignment_items), (seed,), count).view(size)


def draw_integers(low: int, high: int, size: list[int], seed: Tensor) -> Tensor:
    """Integers of one seed."""
    count = math.prod(size)
    if count == 0:
        return torch.empty(size, dtype=torch.int64, device=seed.device)
    return _run_kernel(_integer_kernel(low, high), (seed,), count).view(size)


def _run_kernel(kernel: Callable[..., Tensor], args: tuple[Any, ...], count: int) -> Tensor:
    # At least two numbers: sizes 0 and 1 would be compiled separately.
    shape = torch.empty(max(count, 2), dtype=torch.int8, device="cpu")
    with (
        _disable_current_modes(),
        torch.no_grad(),
        taking_stance("default"),
        unguarded(),
        torch._inductor.config.patch(fallback_random=False, cpp_wrapper=False),
    ):
        torch._dynamo.maybe_mark_dynamic(shape, 0)
        return kernel(*args, shape)[:count]


@functools.cache
def _float_kernel(mode: str, alignment: tuple[tuple[str, Any], ...]) -> Callable[..., Tensor]:
    def draw(seed: Tensor, shape: Tensor) -> Tensor:
        alignment_options = dict(alignment)
        drawn: Tensor = torch.ops.prims.inductor_random(
            [shape.shape[0]], seed, mode, **alignment_options
        )
        return drawn

    return torch.compile(draw, fullgraph=True)


@functools.cache
def _integer_kernel(low: int, high: int) -> Callable[..., Tensor]:
    def draw(seed: Tensor, shape: Tensor) -> Tensor:
        drawn: Tensor = torch.ops.prims.inductor_randint(low, high, [shape.shape[0]], seed)
        return drawn

    return torch.compile(draw, fullgraph=True)


def count_up(length: int, *, start: int, step: int, **how: Any) -> Tensor:
    """`prims.iota`, without the overhead of a prim."""
    how.pop("requires_grad", None)
    return torch.arange(start, start + length * step, step, **how)


def convert_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`prims.convert_element_type`, without the overhead of a prim."""
    return tensor.to(dtype, copy=True)


def reshape_tensor(tensor: Tensor, size: list[int]) -> Tensor:
    """`aten.view` as in Inductor: in eager mode the value may have another layout."""
    return tensor.reshape(size)


# Prims are written in Python, and cost more than the computation.
_DIRECT_FORMS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.view.default: reshape_tensor,
    torch.ops.prims.iota.default: count_up,
    torch.ops.prims.convert_element_type.default: convert_dtype,
}
_TWINS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.prims.inductor_seeds.default: draw_seeds,
    torch.ops.prims.inductor_random.default: draw_floats,
    torch.ops.prims.inductor_randint.default: draw_integers,
}
_EAGER_FORMS = {**_TWINS, **_DIRECT_FORMS, **PLAIN_FORMS}


# --- Equality up to rounding ----------------------------------------------------------------------

# A backward graph recomputes some values of the forward graph and checks which of them equals a
# saved one: the position of a maximum. Compiled code rounds both in the same way. Run op by op, one
# is rounded as in compiled code and the other as in eager mode, and no maximum is found.

# In unit roundoffs of the dtype of the comparison.
EQUALITY_ROUNDINGS = 16.0


def with_tolerant_equality(module: GraphModule) -> GraphModule | None:
    """A copy with equality up to rounding; None if the graph does not compare floats."""
    result = copy_graph(module)
    changed = False
    for node in result.graph.nodes:
        if node.op != "call_function" or node.target is not torch.ops.aten.eq.Tensor:
            continue
        units = [_unit_roundoff(argument) for argument in node.args]
        if None in units:
            continue
        changed = True
        node.target = nearly_equal
        node.kwargs = {"unit": max(unit for unit in units if unit is not None)}
    result.recompile()
    return result if changed else None


def nearly_equal(left: Tensor, right: Tensor, *, unit: float) -> Tensor:
    """Equality up to a few roundings."""
    size = torch.maximum(left.abs(), right.abs())
    return ((left - right).abs() <= EQUALITY_ROUNDINGS * unit * size) | (left == right)


def _unit_roundoff(argument: Any) -> float | None:
    value = getattr(argument, "meta", {}).get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    return torch.finfo(value.dtype).eps / 2


# --- Overwriting operands that are no longer needed -----------------------------------------------

# Run op by op, a graph holds operand and result of every operator at once, unlike compiled code.
# Only elementwise operators are rewritten, and only if operand and result have the same shape,
# dtype and layout. Callers compare the rewritten graph with the original once.

_ATEN = torch.ops.aten
# Operator -> its `out` form, which reads its operands once, in order.
_ELEMENTWISE = {
    _ATEN.add.Tensor: _ATEN.add.out,
    _ATEN.cos.default: _ATEN.cos.out,
    _ATEN.div.Tensor: _ATEN.div.out,
    _ATEN.erf.default: _ATEN.erf.out,
    _ATEN.exp.default: _ATEN.exp.out,
    _ATEN.log.default: _ATEN.log.out,
    _ATEN.mul.Tensor: _ATEN.mul.out,
    _ATEN.neg.default: _ATEN.neg.out,
    _ATEN.reciprocal.default: _ATEN.reciprocal.out,
    _ATEN.rsqrt.default: _ATEN.rsqrt.out,
    _ATEN.sigmoid.default: _ATEN.sigmoid.out,
    _ATEN.sin.default: _ATEN.sin.out,
    _ATEN.sqrt.default: _ATEN.sqrt.out,
    _ATEN.sub.Tensor: _ATEN.sub.out,
    _ATEN.tanh.default: _ATEN.tanh.out,
    _ATEN.where.self: _ATEN.where.self_out,
}
# Operators that return new memory; any other operator may return a view of its arguments.
_FRESH = {
    *_ELEMENTWISE,
    _ATEN.addmm.default,
    _ATEN.amax.default,
    _ATEN.bmm.default,
    _ATEN.mean.dim,
    _ATEN.mm.default,
    _ATEN.sum.dim_IntList,
    _ATEN.var_mean.correction,
}
# The same memory in another shape, or a copy, which works too.
_RESHAPED = {_ATEN.view.default, _ATEN._unsafe_view.default, reshape_tensor}


def overwrite_operands(module: GraphModule) -> GraphModule | None:
    """The graph with results written over operands; None if that is possible nowhere."""
    result = copy_graph(module)
    lifetimes = _Lifetimes(result)
    changed = False
    for node in result.graph.nodes:
        target = _ELEMENTWISE.get(node.target)
        over = None if target is None else lifetimes.overwritable(node)
        if over is not None:
            node.target = target
            node.kwargs = {**node.kwargs, "out": over}
            changed = True
    if not changed:
        return None
    result.graph.lint()
    result.recompile()
    return result


class _Lifetimes:
    """How long each value of a graph is needed, and which values have their own memory.

    For the original graph: a result that overwrites an operand is needed as long as before, and
    the operand is not.
    """

    def __init__(self, module: GraphModule) -> None:
        self.order = {node: index for index, node in enumerate(module.graph.nodes)}
        self.fresh = {node for node in self.order if node.target in _FRESH}
        self.last: dict[Node, int] = {}
        for node in reversed(self.order):
            # Users of what may be a view of a value are users of the value.
            ends = [self.order[u] if u in self.fresh else self.last[u] for u in node.users]
            self.last[node] = max([self.order[node], *ends])

    def overwritable(self, node: Node) -> Node | None:
        """An operand with the layout of the result that only this operator needs."""
        operands = [value for value in node.args if isinstance(value, Node)]
        for value in operands:
            owner = value
            while owner.target in _RESHAPED and isinstance(owner.args[0], Node):
                owner = owner.args[0]
            if owner not in self.fresh or self.last[owner] != self.order[node]:
                continue
            # Another operand could be a view of it, and be read after the write.
            others = list(operands)
            others.remove(value)
            if not any(self._reaches(o, owner) for o in others) and _have_same_layout(value, node):
                return value
        return None

    def _reaches(self, node: Node, source: Node) -> bool:
        """Whether a value may be a view of another."""
        waiting, visited = [node], set[Node]()
        while waiting:
            current = waiting.pop()
            if current is source:
                return True
            if current not in visited and current not in self.fresh:
                visited.add(current)
                waiting += current.all_input_nodes
        return False


def _have_same_layout(left: Node, right: Node) -> bool:
    layout, other = (_describe_layout(node) for node in (left, right))
    return layout is not None and layout == other


def _describe_layout(node: Node) -> tuple[Any, ...] | None:
    """Shape, strides, dtype and device; symbolic sizes as expressions."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    numbers = (*value.shape, *value.stride())
    formulas = [n.node.expr if isinstance(n, torch.SymInt) else n for n in numbers]
    return (value.dim(), formulas, value.dtype, value.device)
