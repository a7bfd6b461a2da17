"""Inductor below AOTAutograd: watch its graphs, recompile one, in part or without fusion."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import operator
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch._guards import CompileContext, TracingContext, tracing
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx import Node

from paritas.core.errors import UnsupportedTorchError
from paritas.core.torch_private.graphs import copy_graph, output_node
from paritas.core.torch_private.operators import traits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
    from pathlib import Path

    from torch.export import ExportedProgram
    from torch.fx import Graph, GraphModule

    Boxed = Callable[[list[Any]], Sequence[Any]]


# --- The graphs that Inductor is given ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LoweredGraph:
    """A graph as Inductor gets it, before any post-grad pass.

    Attributes:
        module: a copy that does not change.
        is_backward: whether it computes gradients.
        visible: positions of the outputs that the user sees, with guaranteed strides.
        donated: positions of the inputs with memory that the compiled code may reuse.
        options: the settings when it was compiled.
        inputs: the example inputs: fake tensors, possibly with other strides than traced.
        fake_mode: the mode of these tensors.
        arguments: other arguments of the compiler.
    """

    module: GraphModule
    is_backward: bool
    visible: frozenset[int]
    donated: frozenset[int]
    options: dict[str, Any]
    inputs: tuple[Any, ...]
    fake_mode: Any
    arguments: dict[str, Any]

    def with_module(self, module: GraphModule) -> LoweredGraph:
        """The same settings for another graph."""
        return dataclasses.replace(self, module=module)


def compile_watched(
    graph: GraphModule,
    example_inputs: list[Any],
    watch: Callable[[LoweredGraph, Boxed], Boxed],
    options: dict[str, Any] | None = None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Callable[..., Any]:
    """Compile with Inductor; `watch` may replace the code of each graph below AOTAutograd.

    A backward graph comes later, when it is first needed. The cache above Inductor is disabled,
    because a hit would return code that `watch` never saw. The context `around` is entered for each
    part of the compilation.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    def inner(module: GraphModule, inputs: Sequence[Any], **arguments: Any) -> Any:
        lowered = _describe_lowered(module, inputs, arguments)
        with around():
            compiled = compile_fx_inner(module, inputs, **arguments)
        return watch(lowered, compiled)

    with around():
        return _compile_with(inner, graph, example_inputs, options)


def capture_lowered(
    graph: GraphModule,
    example_inputs: list[Any],
    run: Callable[[LoweredGraph], Boxed],
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Run each graph by the result of `run` instead of compiling it with Inductor."""

    def inner(module: GraphModule, inputs: Sequence[Any], **arguments: Any) -> Any:
        return run(_describe_lowered(module, inputs, arguments))

    return _compile_with(inner, graph, example_inputs, options)


def compiled_frame() -> Hashable:
    """The user's function that is being compiled; the same when it is recompiled."""
    identity = CompileContext.current_compile_id()
    return getattr(identity, "frame_id", None)


def _compile_with(
    inner: Callable[..., Any],
    graph: GraphModule,
    example_inputs: list[Any],
    options: dict[str, Any] | None,
) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    caches_off = torch._functorch.config.patch(
        enable_autograd_cache=False, bundled_autograd_cache=False
    )
    with caches_off:
        compiled: Any = compile_fx(
            graph, example_inputs, inner_compile=inner, config_patches=options or None
        )
    return compiled  # type: ignore[no-any-return]


def compile_again(lowered: LoweredGraph, options: dict[str, Any] | None = None) -> Boxed:
    """Compile a graph with the settings of its first compilation, and other options on top.

    For use while the program runs: during a compile it would disturb torch's bookkeeping.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    module = copy_graph(lowered.module)
    arguments = {**lowered.arguments, "cudagraphs": BoxedBool(False)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(using_settings(lowered.options, options))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(V.set_fake_mode(lowered.fake_mode))
        stack.enter_context(tracing(TracingContext(lowered.fake_mode)))
        stack.enter_context(allowing_constants(lowered.fake_mode))
        compiled: Boxed = compile_fx_inner(module, list(lowered.inputs), **arguments)
    return compiled


@contextlib.contextmanager
def using_settings(options: dict[str, Any], more: dict[str, Any] | None = None) -> Iterator[None]:
    """Use recorded settings of Inductor, and some on top."""
    present = current_settings()
    expected = {**options, **(more or {})}
    changed = {
        key: value
        for key, value in expected.items()
        if key in present and not _are_equal(present[key], value)
    }
    unknown = [key for key in more or {} if key not in present]
    if unknown:
        message = f"torch {torch.__version__} has no inductor option {unknown[0]!r}"
        raise UnsupportedTorchError(message)
    with torch._inductor.config.patch(changed):
        yield


def current_settings() -> dict[str, Any]:
    """Every setting of Inductor."""
    values: dict[str, Any] = torch._inductor.config.get_config_copy()
    return values


def _describe_lowered(
    module: GraphModule, inputs: Sequence[Any], arguments: dict[str, Any]
) -> LoweredGraph:
    context = TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    is_backward = bool(arguments.get("is_backward"))
    donated = (getattr(metadata, "bw_donated_idxs", None) or ()) if is_backward else ()
    visible = output_node(module).meta.get("user_visible_output_idxs", ())
    fake_mode = torch._guards.detect_fake_mode(inputs) or V.fake_mode
    return LoweredGraph(
        module=copy_graph(module),
        is_backward=is_backward,
        visible=frozenset(visible),
        donated=frozenset(donated),
        options=current_settings(),
        inputs=tuple(inputs),
        fake_mode=fake_mode,
        arguments=dict(arguments),
    )


@contextlib.contextmanager
def allowing_constants(fake_mode: Any) -> Iterator[None]:
    """Let a fake mode accept real tensors, such as constants."""
    before = fake_mode.allow_non_fake_inputs
    fake_mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        fake_mode.allow_non_fake_inputs = before


def _are_equal(left: Any, right: Any) -> bool:
    try:
        return left is right or bool(left == right)
    except (RuntimeError, TypeError, ValueError):  # tensors and arrays have no single truth value
        return False


# --- Compiling some nodes, and running the rest with torch's own kernels --------------------------

# With this option only nodes marked by `with_compiled` are compiled.
ONLY_MARKED = {"fallback_by_default": True}


def compilable(module: GraphModule) -> list[str]:
    """The nodes that Inductor may compile or leave to torch, in order."""
    return [
        node.name
        for node in module.graph.nodes
        if node.op == "call_function" and isinstance(node.target, OpOverload)
    ]


def with_compiled(module: GraphModule, names: Collection[str]) -> GraphModule:
    """A copy with only the named nodes marked for compilation."""
    result = copy_graph(module)
    for node in result.graph.nodes:
        if node.name in names:
            marks = dict(node.meta.get("custom") or {})
            node.meta["custom"] = {**marks, "compile_with_inductor": True}
    return result


# --- Turning off rewriting and fusion -------------------------------------------------------------

_STAGES_OF_PASSES = ("pre_grad", "joint_graph", "post_grad")
# Passes without which a graph cannot be lowered, or is not the user's graph.
_NEEDED_PASSES = (
    "decompose_",
    "fix_",
    "stable_sort",
    "chain_random",
    "custom",
    "remove_assert",
    "profiler",
)
# Settings that rewrite or lay out graphs, with the value that turns each off.
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
    # See `Materialize`. In C++ many loops may be one kernel: the result of one must not be
    # overwritten by the next.
    "inlining": {"inplace_buffers": False},
}
INLINING = "inlining"
_AFTER_PASSES = "post_grad_custom_post_pass"
_DISABLED = "disabled_passes"


@functools.cache
def graph_passes() -> tuple[str, ...]:
    """The graph passes that can be turned off one by one, by their names in torch."""
    names: dict[str, None] = {}
    for stage in _STAGES_OF_PASSES:
        module = importlib.import_module(f"torch._inductor.fx_passes.{stage}")
        for name in _find_announced_passes(module):
            if not any(needed in name for needed in _NEEDED_PASSES):
                names[name] = None
    if not names:
        message = f"torch {torch.__version__} announces its passes in a way unknown to paritas"
        raise UnsupportedTorchError(message)
    return tuple(names) if _DISABLED in current_settings() else ()


def graph_names() -> tuple[str, ...]:
    """Everything that rewrites graphs and can be turned off: passes and settings."""
    settings = [name for name in _GRAPH_SETTINGS if name in current_settings()]
    return tuple(dict.fromkeys((*settings, *graph_passes())))


def kernel_names() -> tuple[str, ...]:
    """Everything that merges operations into one kernel and can be turned off."""
    present = current_settings()
    return tuple(
        name
        for name, settings in _KERNEL_SETTINGS.items()
        if not settings or any(key in present for key in settings)
    )


def graph_options(off: set[str]) -> dict[str, Any]:
    """The settings that turn off only these names of `graph_names`."""
    options = {name: value for name, value in _GRAPH_SETTINGS.items() if name in off}
    options = {name: value for name, value in options.items() if name in current_settings()}
    passes = [name for name in graph_passes() if name in off]
    on = [name for name in graph_passes() if name not in off]
    if on and set(graph_passes()) & off and "pattern_matcher" in options:
        # It would also turn off passes that must stay on; the others are turned off by name.
        del options["pattern_matcher"]
    if passes:
        # Torch searches for the name anywhere in this text.
        disabled = ",".join(passes).upper()
        also = [name for name in on if name.upper() in disabled]
        if also:
            message = f"torch {torch.__version__} cannot turn {passes} off and leave {also} on"
            raise UnsupportedTorchError(message)
        before = current_settings()[_DISABLED]
        options[_DISABLED] = f"{before},{disabled}" if before else disabled
    return options


def kernel_options(off: set[str]) -> dict[str, Any]:
    """The settings that turn off these names of `kernel_names`."""
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
    """Forces every value into memory, so that none is inlined into its users.

    Inductor inlines a value into its users unless its layout matters. So an operator that computes
    nothing requests each value in its layout. Views stay views, and 0-dimensional values are always
    inlined.
    """

    def __init__(self, before: Any = None) -> None:
        """`before` is the user's own pass (or passes) for this hook."""
        self.before = before

    def __call__(self, graph: Graph) -> None:
        """Insert the operator after each value."""
        passes = self.before if isinstance(self.before, list | tuple) else [self.before]
        for custom in passes:
            if custom is not None:
                custom(graph)
        for node in list(graph.nodes):
            if is_materializable(node):
                _force_layout(graph, node)

    def uuid(self) -> Any:
        """For torch's caches of compiled code."""
        if self.before is not None:
            return None
        return get_hash_for_files((__file__,))


def _force_layout(graph: Graph, node: Node) -> None:
    """Request a value in its own layout."""
    users = list(node.users)
    with graph.inserting_before(node.next):
        stride = [
            step if isinstance(step, int) else _insert_stride(graph, node, dim, step)
            for dim, step in enumerate(node.meta["val"].stride())
        ]
        function = graph.call_function(
            torch.ops.prims.inductor_force_stride_order.default, (node, stride)
        )
    function.meta = dict(node.meta)
    for user in users:
        user.replace_input_with(node, function)


def _insert_stride(graph: Graph, node: Node, dim: int, step: Any) -> Node:
    function = graph.call_function(torch.ops.aten.sym_stride.int, (node, dim))
    function.meta["val"] = step
    return function


def is_materializable(node: Node) -> bool:
    """Whether a node computes a tensor that can have its own memory."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, FakeTensor) or not node.users:
        return False
    computed = node.args[0] if node.target is operator.getitem else node
    if not isinstance(computed, Node) or not isinstance(computed.target, OpOverload):
        return False  # for example the state of a generator
    kind = traits(computed.target)
    if kind.view or kind.mutates:
        return False
    return value.layout is torch.strided and value.ndim > 0


def _find_announced_passes(module: Any) -> list[str]:
    """The names of the passes in a stage, from its source code."""
    names: list[str] = []
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
                names.append(str(name.value))
            elif isinstance(name, ast.JoinedStr) and isinstance(name.values[0], ast.Constant):
                count = len(getattr(module, "pass_patterns", ()))
                prefix = str(name.values[0].value)
                names += [f"{prefix}{index}" for index in range(count)]
    return names


# --- Ahead of time --------------------------------------------------------------------------------


def compiled_package(program: ExportedProgram, path: Path) -> Callable[..., Any]:
    """Compile a program into the file `path`, and load it."""
    import torch._inductor

    for name in ("aoti_compile_and_package", "aoti_load_package"):
        if not hasattr(torch._inductor, name):
            raise UnsupportedTorchError(f"torch {torch.__version__} has no torch._inductor.{name}")
    written = torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    loaded: Callable[..., Any] = torch._inductor.aoti_load_package(written)
    return loaded
