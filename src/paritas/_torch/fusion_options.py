"""What turns Inductor's rewriting of graphs, and its fusion into kernels, off: its own settings."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx import Node

from paritas._torch.inductor import current_settings
from paritas._torch.operators import traits
from paritas.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from torch.fx import Graph

_STAGES = ("pre_grad", "joint_graph", "post_grad")
# A graph that has not been through these cannot be lowered, or is not the user's graph.
_NEEDED = (
    "decompose_",
    "fix_",
    "stable_sort",
    "chain_random",
    "custom",
    "remove_assert",
    "profiler",
)
# Names of settings that rewrite or lay out graphs, with the value that turns each off.
_GRAPH_SETTINGS: dict[str, Any] = {
    "pattern_matcher": False,
    "layout_optimization": False,
    "shape_padding": False,
    "joint_graph_constant_folding": False,
    "reorder_for_locality": False,
    "b2b_gemm_pass": False,
    "permute_fusion": False,
    "efficient_conv_bn_eval_fx_passes": False,
}
# Ways in which several operations get into one kernel, with the settings that turn each off.
_KERNEL_SETTINGS: dict[str, dict[str, Any]] = {
    "loop_fusion": {"max_fusion_size": 1, "aggressive_fusion": False},
    "horizontal_fusion": {"cpp.max_horizontal_fusion_size": 1},
    "epilogue_fusion": {
        "epilogue_fusion": False,
        "epilogue_fusion_user_defined_triton_kernel": False,
        "cutlass.cutlass_epilogue_fusion_enabled": False,
    },
    "prologue_fusion": {"prologue_fusion": False},
    "pointwise_cat": {
        "max_pointwise_cat_inputs": 0,
        "max_complex_pointwise_cat_inputs": 0,
        "force_pointwise_cat": False,
    },
    "combo_kernels": {"combo_kernels": False},
    "grouped_gemm": {"cpp.enable_grouped_gemm_template": False},
    "mix_order_reduction": {"triton.mix_order_reduction": False},
    "nested_reduction": {"triton.nested_reduction": False},
    # See `Materialize`. In C++ many loops may be one kernel: what one of them computes must not be
    # overwritten by the next.
    "inlining": {"inplace_buffers": False},
}
INLINING = "inlining"
_AFTER_PASSES = "post_grad_custom_post_pass"
_DISABLED = "disabled_passes"


@functools.cache
def graph_passes() -> tuple[str, ...]:
    """The passes over graphs that can be turned off one by one, by the names torch gives them."""
    found: dict[str, None] = {}
    for stage in _STAGES:
        module = importlib.import_module(f"torch._inductor.fx_passes.{stage}")
        for name in _announced(module):
            if not any(needed in name for needed in _NEEDED):
                found[name] = None
    if not found:
        message = (
            f"torch {torch.__version__} announces its passes in another way than paritas knows"
        )
        raise UnsupportedTorchError(message)
    return tuple(found) if _DISABLED in current_settings() else ()


def graph_names() -> tuple[str, ...]:
    """All that rewrites graphs and can be turned off: passes, and settings that stand for some."""
    settings = [name for name in _GRAPH_SETTINGS if name in current_settings()]
    return tuple(dict.fromkeys((*settings, *graph_passes())))


def kernel_names() -> tuple[str, ...]:
    """All that puts several operations into one kernel and can be turned off."""
    present = current_settings()
    return tuple(
        name
        for name, settings in _KERNEL_SETTINGS.items()
        if not settings or any(key in present for key in settings)
    )


def graph_options(off: set[str]) -> dict[str, Any]:
    """The settings that turn these names of `graph_names` off, and no others."""
    options = {name: value for name, value in _GRAPH_SETTINGS.items() if name in off}
    options = {name: value for name, value in options.items() if name in current_settings()}
    passes = [name for name in graph_passes() if name in off]
    on = [name for name in graph_passes() if name not in off]
    if on and set(graph_passes()) & off and "pattern_matcher" in options:
        # It would take with it passes that are to stay on; each of the others is off by its name.
        del options["pattern_matcher"]
    if passes:
        # Torch looks for the name anywhere in this text.
        told = ",".join(passes).upper()
        also = [name for name in on if name.upper() in told]
        if also:
            message = f"torch {torch.__version__} cannot turn {passes} off and leave {also} on"
            raise UnsupportedTorchError(message)
        before = current_settings()[_DISABLED]
        options[_DISABLED] = f"{before},{told}" if before else told
    return options


def kernel_options(off: set[str]) -> dict[str, Any]:
    """The settings that turn these names of `kernel_names` off."""
    present = current_settings()
    options = {
        key: value
        for name in _KERNEL_SETTINGS
        if name in off
        for key, value in _KERNEL_SETTINGS[name].items()
        if key in present
    }
    if INLINING in off:
        options[_AFTER_PASSES] = Materialize(present[_AFTER_PASSES])
    return options


class Materialize(CustomGraphPass):
    """Has every value laid out in memory, so that none is computed inside of what uses it.

    Inductor inlines a value into its users unless its layout matters; so each is asked for by its
    layout, with an operator that computes nothing. Views stay views, and numbers of a single
    element are always inlined.
    """

    def __init__(self, before: Any = None) -> None:
        """`before` is the user's own pass in this place, or several."""
        self.before = before

    def __call__(self, graph: Graph) -> None:
        """Insert the operator after each value."""
        passes = self.before if isinstance(self.before, list | tuple) else [self.before]
        for custom in passes:
            if custom is not None:
                custom(graph)
        for node in list(graph.nodes):
            if is_materializable(node):
                _keep(graph, node)

    def uuid(self) -> Any:
        """For torch's caches of compiled code."""
        if self.before is not None:
            return None
        return get_hash_for_files((__file__,))


def _keep(graph: Graph, node: Node) -> None:
    """Ask for a value in the layout that it has."""
    users = list(node.users)
    with graph.inserting_before(node.next):
        stride = [
            step if isinstance(step, int) else _stride(graph, node, dim, step)
            for dim, step in enumerate(node.meta["val"].stride())
        ]
        kept = graph.call_function(
            torch.ops.prims.inductor_force_stride_order.default, (node, stride)
        )
    kept.meta = dict(node.meta)
    for user in users:
        user.replace_input_with(node, kept)


def _stride(graph: Graph, node: Node, dim: int, step: Any) -> Node:
    made = graph.call_function(torch.ops.aten.sym_stride.int, (node, dim))
    made.meta["val"] = step
    return made


def is_materializable(node: Node) -> bool:
    """Whether a node computes a tensor that can be had in memory of its own."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, FakeTensor) or not node.users:
        return False
    computed = node.args[0] if node.target is operator.getitem else node
    if not isinstance(computed, Node) or not isinstance(computed.target, OpOverload):
        return False  # the state of a generator, for one, is no value of the graph
    kind = traits(computed.target)
    if kind.view or kind.mutates:
        return False
    return value.layout is torch.strided and value.ndim > 0


def _announced(module: Any) -> list[str]:
    """The names under which a stage of passes asks whether it may run them."""
    found: list[str] = []
    for call in ast.walk(ast.parse(inspect.getsource(module))):
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in {"apply_graph_pass", "apply_gm_pass"}
            and isinstance(call.func.value, ast.Call)
            and len(call.func.value.args) > 1
        ):
            name = call.func.value.args[1]
            if isinstance(name, ast.Constant):
                found.append(str(name.value))
            elif isinstance(name, ast.JoinedStr) and isinstance(name.values[0], ast.Constant):
                count = len(getattr(module, "pass_patterns", ()))
                prefix = str(name.values[0].value)
                found += [f"{prefix}{index}" for index in range(count)]
    return found
