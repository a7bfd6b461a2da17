"""Inductor's graph passes: which changes which graph, and snapshots of graphs that can run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import threading
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch._functorch.config
import torch._inductor.config
from torch._guards import TracingContext, tracing
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paritas.core.torch_private.graphs import copy_graph, placeholders
from paritas.core.torch_private.inductor import allowing_constants, using_settings
from paritas.core.torch_private.operators import traits
from paritas.core.torch_private.patching import patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.torch_private.inductor import LoweredGraph

    Sizes = dict[Any, int]


# --- Snapshots of a graph during a compile, in an order in which it can run -----------------------
# Passes rewrite graphs in place, leave them unsorted for a later pass to sort, and remove tensors
# and branches from the module around them. So the nodes are copied in sorted order, together with
# the attributes that they use. Sizes are those of the call that is being compiled: asking torch
# for a number would add a guard.

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Stands for a size that is unknown before the program runs.
UNKNOWN_SIZE = 4
# Python operators that write to their argument.
_WRITING_PREFIXES = ("setitem", "delitem", "i")


class UnplayableError(RuntimeError):
    """A graph that cannot be run on made-up inputs, and why."""


@dataclasses.dataclass(frozen=True)
class FrozenGraph:
    """A copy of a graph that no pass changes.

    Attributes:
        graph: the nodes, sorted, under the names they had.
        attributes: target -> its value in the module; branches are frozen too.
        assumed: nodes that are assumed to compute what they replaced.
    """

    graph: Graph
    attributes: dict[str, Any]
    assumed: tuple[str, ...] = ()

    @property
    def nodes(self) -> list[Node]:
        """The nodes, in the order in which they run."""
        return list(self.graph.nodes)

    @property
    def placeholders(self) -> list[Node]:
        """The inputs, in order."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def returned(self) -> Any:
        """The returned nodes and constants, in their nesting."""
        return self.nodes[-1].args[0]

    def bodies(self, node: Node) -> Iterator[tuple[str, FrozenGraph]]:
        """The branches among a node's arguments, by name."""
        for input_node in node.all_input_nodes:
            body = (
                self.attributes.get(str(input_node.target)) if input_node.op == "get_attr" else None
            )
            if isinstance(body, FrozenGraph):
                yield str(input_node.target), body


def freeze(module: GraphModule, origin: FrozenGraph | None = None) -> FrozenGraph:
    """Copy a graph, sorted; raises `UnplayableError` if that is impossible.

    A node with a custom lowering of Inductor is not an operator: the nodes that it replaced are
    copied from `origin`, the graph before, and run in its place.
    """
    result = Graph()
    copies: dict[Node, Node] = {}
    by_name: dict[str, Node] = {}
    attributes: dict[str, Any] = {}
    assumed: list[str] = []
    for node in _sort_nodes(list(module.graph.nodes)):
        replaced = _names_replaced_by(node)
        if replaced:
            _restore_replaced(replaced, origin, result, by_name, attributes)
            copies[node] = by_name[replaced[-1]]
            assumed.append(node.name)
            continue
        copies[node] = by_name[node.name] = result.node_copy(node, copies.__getitem__)
        if node.op in {"get_attr", "call_module"}:
            target = str(node.target)
            attributes[target] = _freeze_attribute(module, target)
    return FrozenGraph(result, attributes, tuple(assumed))


def _names_replaced_by(node: Node) -> list[str]:
    """The names of the nodes replaced by one with a custom lowering, its value last."""
    if not isinstance(node.target, functools.partial):
        return []
    from torch._inductor.pattern_matcher import Match  # all of Inductor, which takes seconds

    match = node.target.args[0]
    return [old.name for old in match.nodes] if isinstance(match, Match) else []


def _restore_replaced(
    names: list[str],
    origin: FrozenGraph | None,
    graph: Graph,
    by_name: dict[str, Node],
    attributes: dict[str, Any],
) -> None:
    expected = {*names} - by_name.keys()
    for node in origin.nodes if origin is not None else ():
        if node.name not in expected:
            continue
        missing = [
            input_node.name for input_node in node.all_input_nodes if input_node.name not in by_name
        ]
        if missing:
            message = f"{node.name} needs {missing[0]}, which the graph no longer has"
            raise UnplayableError(message)
        by_name[node.name] = graph.node_copy(
            node, lambda original_node: by_name[original_node.name]
        )
        if origin is not None and str(node.target) in origin.attributes:
            attributes[str(node.target)] = origin.attributes[str(node.target)]
    if names[-1] not in by_name:
        message = f"the graph before has no {names[-1]}, which Inductor lowers by its own function"
        raise UnplayableError(message)


def may_write(graph: FrozenGraph) -> bool:
    """Whether running a graph may change its inputs."""
    for node in graph.nodes:
        if node.op in {"call_method", "call_module"}:
            return True
        if node.op == "call_function":
            target = node.target
            is_operator = isinstance(target, OpOverload | HigherOrderOperator) or _is_arithmetic(
                target
            )
            if not is_operator or (isinstance(target, OpOverload) and traits(target).mutates):
                return True
            if any(may_write(body) for _, body in graph.bodies(node)):
                return True
    return False


def _is_arithmetic(target: Any) -> bool:
    """Whether a function is Python arithmetic or one of `torch.sym_*`."""
    name = str(getattr(target, "__name__", ""))
    if getattr(target, "__module__", "") in {"_operator", "math", "builtins"}:
        return not name.startswith(_WRITING_PREFIXES)
    return name.startswith(("sym_", "_sym_"))


class Fingerprint:
    """A summary of a graph, to detect changes."""

    def __init__(self, module: GraphModule) -> None:
        """Remember the nodes of a graph and of its branches."""
        self._parts = list(_list_nodes(module))

    def same(self, other: Fingerprint) -> bool:
        """Whether the two graphs are equal, node for node."""
        if len(self._parts) != len(other._parts):
            return False
        # Arguments are never changed in place, so the same objects mean the same graph.
        return all(
            all(map(operator.is_, left, right)) or self._describe(left) == self._describe(right)
            for left, right in zip(self._parts, other._parts, strict=True)
        )

    @staticmethod
    def _describe(part: tuple[Any, ...]) -> tuple[Any, ...]:
        node, target, args, kwargs, attribute = part
        return node.op, node.name, target, str(args), str(kwargs), id(attribute)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape, strides and dtype of a traced tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def traced_value(node: Node, sizes: Sizes | None = None) -> Any:
    """The traced value of a node: a tensor's spec, or a plain value."""
    traced = node.meta.get("val", node.meta.get("example_value"))
    if traced is None and not {"val", "example_value"} & node.meta.keys():
        message = f"the input {node.name} has no traced value"
        raise UnplayableError(message)
    if not isinstance(traced, torch.Tensor):
        return concrete(traced, sizes)
    is_plain = traced.layout is torch.strided and not is_traceable_wrapper_subclass(traced)
    if not is_plain or traced.is_quantized:
        message = f"{node.name} is a {type(traced).__name__}, layout {traced.layout}"
        raise UnplayableError(message)
    shape = tuple(int(concrete(size, sizes)) for size in traced.shape)
    stride = tuple(int(concrete(step, sizes)) for step in traced.stride())
    return TensorSpec(shape, stride, traced.dtype)


def has_known_size(node: Node) -> bool:
    """Whether a node's size or number is known before the program runs."""
    traced = node.meta.get("val", node.meta.get("example_value"))
    parts = [*traced.shape, *traced.stride()] if isinstance(traced, torch.Tensor) else [traced]
    return all(part.node.hint is not None for part in parts if isinstance(part, SYMBOLS))


def concrete(value: Any, sizes: Sizes | None = None) -> Any:
    """The value of a symbol: in the call that is being compiled, or in `sizes`."""
    if not isinstance(value, SYMBOLS):
        return value
    node = value.node
    if node.hint is not None:
        return node.hint
    symbol_values = getattr(node.shape_env, "backed_var_to_val", None)
    symbol_values = node.shape_env.var_to_val if symbol_values is None else symbol_values
    symbol_values = {**symbol_values, **(sizes or {})}
    symbols = getattr(node.expr, "free_symbols", ())
    filled = {symbol: symbol_values.get(symbol, UNKNOWN_SIZE) for symbol in symbols}
    return node.pytype(node.expr.xreplace(filled))


def record_sizes(node: Node, value: Any, sizes: Sizes) -> None:
    """Record the actual sizes of a node's value."""
    traced = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(traced, torch.Tensor) and isinstance(value, torch.Tensor):
        pairs: list[tuple[Any, Any]] = list(zip(traced.shape, value.shape, strict=False))
    else:
        pairs = [(traced, value)]
    for symbol, size in pairs:
        if isinstance(symbol, torch.SymInt) and symbol.node.hint is None:
            sizes[symbol.node.expr] = size


def _sort_nodes(nodes: list[Node]) -> list[Node]:
    """The nodes in their order, each moved after its inputs, as torch sorts them."""
    order: list[Node] = []
    done: set[Node] = set()
    waiting: dict[Node, list[Node]] = {}
    pending = list(reversed(nodes))
    while pending:
        node = pending.pop()
        missing = [input_node for input_node in node.all_input_nodes if input_node not in done]
        if missing:
            waiting.setdefault(missing[-1], []).append(node)
            continue
        done.add(node)
        order.append(node)
        pending.extend(reversed(waiting.pop(node, ())))
    if waiting:
        stuck = next(iter(waiting.values()))[0]
        message = f"{stuck.name} needs a node that is not in the graph, or needs itself"
        raise UnplayableError(message)
    return order


def _list_nodes(module: GraphModule) -> Iterator[tuple[Any, ...]]:
    for node in module.graph.nodes:
        value = None
        if node.op in {"get_attr", "call_module"}:
            value = _find_attribute(module, str(node.target))
        if isinstance(value, GraphModule):
            yield from _list_nodes(value)
            value = None
        yield node, node.target, node.args, node.kwargs, value


def _freeze_attribute(module: GraphModule, target: str) -> Any:
    try:
        value = functools.reduce(getattr, target.split("."), module)
    except AttributeError:
        message = f"the graph names {target}, which its module does not have"
        raise UnplayableError(message) from None
    return freeze(value) if isinstance(value, GraphModule) else value


def _find_attribute(module: GraphModule, target: str) -> Any:
    try:
        return functools.reduce(getattr, target.split("."), module)
    except AttributeError:
        return None


# --- Watching the passes --------------------------------------------------------------------------
# Most passes announce themselves to torch's `GraphTransformObserver`. Not all do, so each stage
# is also reported as a whole: pre-grad, joint graph, post-grad, and the freezing of parameters.
# The split of a joint graph into forward and backward is reported too.

PRE_GRAD, JOINT, POST_GRAD = "pre_grad_passes", "joint_graph_passes", "post_grad_passes"
FREEZING = "freezing"
_STAGES = {
    "_recursive_pre_grad_passes": PRE_GRAD,
    "_recursive_joint_graph_passes": JOINT,
    "_recursive_post_grad_passes": POST_GRAD,
}


class PassListener(Protocol):
    """Is notified of passes. The graphs belong to torch and must not be changed."""

    def enter_stage(
        self, stage: str, module: GraphModule, constants: dict[str, Tensor] | None = None
    ) -> None:
        """A stage begins; `constants` are the inputs that it may treat as constants."""

    def leave_stage(self, module: GraphModule) -> None:
        """The innermost stage ended with this graph."""

    def abandon_stage(self) -> None:
        """The innermost stage was left by an exception."""

    def enter_pass(self, name: str, module: GraphModule) -> None:
        """A pass within a stage begins."""

    def leave_pass(self, module: GraphModule) -> None:
        """The innermost pass ended."""

    def split(self, outputs: int, forward: GraphModule, backward: GraphModule) -> None:
        """The graph that the last joint stage ended with was split.

        The first `outputs` results of the forward graph are the program's, the others are saved.
        """


# By thread: a backward pass is compiled in the one that first needs it.
_listening = threading.local()
_lock = threading.Lock()
_installed: list[contextlib.ExitStack] = []
_watchers = 0


@contextlib.contextmanager
def listening_to_passes(listener: PassListener) -> Iterator[None]:
    """Notify a listener of the passes that run in this thread.

    The graph cache is disabled meanwhile: no pass runs on a cached graph.
    """
    before = getattr(_listening, "to", None)
    _install()
    _listening.to = listener
    try:
        with (
            torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            yield
    finally:
        _listening.to = before
        _uninstall()


def run_post_grad_passes(lowered: LoweredGraph) -> None:
    """Run only the post-grad passes, on a copy; a listener is notified."""
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.virtualized import V

    module = copy_graph(lowered.module)
    fake_mode = lowered.fake_mode
    with (
        using_settings(lowered.options),
        torch.no_grad(),
        torch._C._DisableAutocast(),
        tracing(TracingContext(fake_mode)),
        allowing_constants(fake_mode),
    ):
        view_to_reshape(module)
        compile_fx.fake_tensor_prop(module, list(lowered.inputs))
        compile_fx._recursive_record_original_output_strides(module)
        with V.set_fake_mode(fake_mode):
            is_inference = bool(lowered.arguments.get("is_inference"))
            compile_fx._recursive_post_grad_passes(module, is_inference=is_inference)


def _install() -> None:
    global _watchers  # noqa: PLW0603  (torch is patched once, however many listen)
    with _lock:
        if _watchers == 0:
            stack = contextlib.ExitStack()
            with contextlib.ExitStack() as undo:
                undo.callback(stack.close)
                _patch_all(stack)
                undo.pop_all()
            _installed.append(stack)
        _watchers += 1


def _uninstall() -> None:
    global _watchers  # noqa: PLW0603
    with _lock:
        _watchers -= 1
        if _watchers == 0:
            _installed.pop().close()


def _patch_all(stack: contextlib.ExitStack) -> None:
    from torch._inductor import compile_fx, freezing
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver

    wrappers: list[tuple[Any, str, Callable[..., Any]]] = [
        *(
            (compile_fx, name, functools.partial(_wrap_in_stage, stage))
            for name, stage in _STAGES.items()
        ),
        (compile_fx, "partition_fn", _splitting),
        (freezing, "freeze", _freezing),
        (freezing, "convert_conv_weights_to_channels_last", _laying_out),
        (GraphTransformObserver, "__enter__", _entering),
        (GraphTransformObserver, "__exit__", _leaving),
    ]
    for owner, name, wrap in wrappers:
        patch(stack, owner, name, wrap, "runs passes")


def _listener() -> PassListener | None:
    return getattr(_listening, "to", None)


@contextlib.contextmanager
def _reporting_stage(
    stage: str, module: GraphModule, constants: dict[str, Tensor] | None = None
) -> Iterator[list[GraphModule]]:
    """Report a stage; the body appends its final graph."""
    listener = _listener()
    result: list[GraphModule] = []
    if listener is None:
        yield result
        return
    listener.enter_stage(stage, module, constants)
    try:
        yield result
    except BaseException:
        listener.abandon_stage()
        raise
    listener.leave_stage(result[0] if result else module)


def _wrap_in_stage(stage: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def run(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        with _reporting_stage(stage, gm) as ended:
            result = original(gm, *args, **kwargs)
            ended.append(gm if result is None else result)
        return result

    return run


def _freezing(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(dynamo_gm: Any, gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        context = TracingContext.try_get()
        values = getattr(context, "params_flat_unwrap_subclasses", None) or []
        named = zip(placeholders(gm), values, strict=False)
        constants = {node.name: value for node, value in named if isinstance(value, torch.Tensor)}
        with _reporting_stage(FREEZING, gm, constants) as ended:
            result = original(dynamo_gm, gm, *args, **kwargs)
            ended.append(result[0])
        return result

    return run


def _laying_out(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        with _reporting_stage(FREEZING, gm):
            return original(gm, *args, **kwargs)

    return run


def _splitting(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        listener = _listener()
        if listener is not None:
            forward, backward = result
            listener.split(int(kwargs["num_fwd_outputs"]), forward, backward)
        return result

    return run


def _entering(original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: Any) -> Any:
        listener = _listener()
        if listener is not None:
            listener.enter_pass(self.passname, self.gm)
        return original(self)

    return enter


def _leaving(original: Callable[..., Any]) -> Callable[..., Any]:
    def leave(self: Any, *error: Any) -> Any:
        result = original(self, *error)
        listener = _listener()
        if listener is not None:
            listener.leave_pass(self.gm)
        return result

    return leave
