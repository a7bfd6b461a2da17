"""What `torch.compile` made: which backend stands behind a callable, and the same in float64."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo.config
import torch._inductor.config
from torch._dynamo.eval_frame import OptimizedModule, _TorchDynamoContext, innermost_backend

from paritas._torch.graphs import computes_tensors
from paritas._torch.lifting import WIDE, is_rounding
from paritas.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import GraphModule, Node

# Backends of torch's own, which compute in the dtype of the graph they are given.
FAITHFUL = frozenset({"inductor", "eager", "aot_eager", "aot_eager_decomp_partition", "ts"})
# Entries that verifying adds to a function's cache must not push the user's own over the limit,
# beyond which Dynamo silently runs eagerly and there would be nothing to verify.
_ROOM_FOR_ENTRIES = 512

_DRAWS = {torch.rand, torch.randn, torch.rand_like, torch.randn_like}
_FILLS = frozenset({"uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "geometric_"})
_NAMED_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}


def backends_of(function: Any) -> list[Callable[..., Any]]:
    """The backends of every `torch.compile` in a callable: itself, or submodules of a module."""
    found = [_backend(context) for context in _contexts(function)]
    unique: list[Callable[..., Any]] = []
    for backend in found:
        if not any(backend is known or backend == known for known in unique):
            unique.append(backend)
    return unique


def dynamic_of(function: Any) -> bool | None:
    """What the first `torch.compile` in a callable was told of dynamic shapes."""
    for context in _contexts(function):
        found = getattr(context, "_dynamic", None)
        return found if isinstance(found, bool) else None
    return None


def backend_name(backend: Callable[..., Any]) -> str:
    """What the user called it, or the name of the function they passed."""
    inner = getattr(backend, "compiler_fn", backend)  # _TorchCompileWrapper holds the function
    name = getattr(backend, "compiler_name", None) or getattr(inner, "__name__", None)
    return str(name or type(backend).__name__)


def is_faithful(backend: Callable[..., Any]) -> bool:
    """Whether a backend is known to compute in the dtype of its graph."""
    inner = getattr(backend, "compiler_fn", backend)
    module = str(getattr(inner, "__module__", ""))
    return backend_name(backend) in FAITHFUL and module.split(".", maxsplit=1)[0] == "torch"


def draws_like_eager(backend: Callable[..., Any]) -> bool:
    """Whether a backend draws its random numbers from eager's stream.

    Inductor has generators of its own, unless told to fall back; the others run eager's operators.
    """
    if backend_name(backend) != "inductor":
        return True
    own = getattr(backend, "config", {})
    return bool(own.get("fallback_random", torch._inductor.config.fallback_random))


def reuses_outputs(backend: Callable[..., Any]) -> bool:
    """Whether a backend's outputs lie in CUDA graphs, whose next run overwrites them.

    Torch documents that, and raises where such an output is read afterwards.
    """
    if backend_name(backend) == "cudagraphs":
        return True
    if backend_name(backend) != "inductor":
        return False
    own = getattr(backend, "config", {})
    return bool(own.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs))


def is_compiled_in_place(function: Any) -> bool:
    """Whether `module.compile()` was called on it."""
    return getattr(function, "_compiled_call_impl", None) is not None


def is_made_by_compile(value: Any) -> bool:
    """Whether a function is what `torch.compile` made of another."""
    return getattr(value, "_torchdynamo_wrapper_id", None) == id(value)


def original_of(function: Any) -> Any:
    """The module or function that was compiled, or `function` itself."""
    if isinstance(function, OptimizedModule):
        return function._orig_mod
    if is_made_by_compile(function):
        return function._torchdynamo_orig_callable
    return function


@contextlib.contextmanager
def room_for_entries() -> Iterator[None]:
    """Lift Dynamo's recompile limit for a while."""
    patch = torch._dynamo.config.patch(
        recompile_limit=_ROOM_FOR_ENTRIES, accumulated_recompile_limit=2 * _ROOM_FOR_ENTRIES
    )
    with patch:
        yield


class CountingBackend:
    """A backend that runs each graph as it is and counts them: does Dynamo capture anything?"""

    def __init__(self) -> None:
        """Start at none."""
        self.graphs = 0

    def __call__(self, graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Count the graph and give it back uncompiled."""
        del example_inputs
        self.graphs += computes_tensors(graph)
        return graph.forward


class LiftedBackend:
    """The same backend, given each graph with its narrow dtypes widened.

    Attributes:
        graphs: how many graphs were compiled; none means that nothing was compiled at all.
        leaks: what of the graphs could not be lifted, in words.
    """

    def __init__(
        self, backend: Callable[..., Any], native: torch.dtype, used: frozenset[torch.dtype]
    ) -> None:
        """Wrap `backend` for a program that runs in `native` and whose reference uses `used`."""
        self.backend = backend
        self.native = native
        self.lifts = functools.partial(is_rounding, used=used)
        self.graphs = 0
        self.leaks: set[str] = set()

    def __call__(self, graph: GraphModule, example_inputs: list[Any], **options: Any) -> Any:
        """Widen the graph in place and hand it to the wrapped backend."""
        self.graphs += computes_tensors(graph)
        if any(isinstance(t, torch.Tensor) and t.dtype in WIDE for t in example_inputs):
            self.leaks.add("narrow values enter a graph between two compiled parts")
        for module in graph.modules():
            if isinstance(module, torch.fx.GraphModule):
                self._lift(module)
        return self.backend(graph, example_inputs, **options)

    def _lift(self, module: GraphModule) -> None:
        for node in list(module.graph.nodes):
            if node.op not in {"call_function", "call_method"} or "autocast" in str(node.target):
                continue
            if node.op == "call_method" and node.target in _FILLS:
                self.leaks.add(f"random numbers are drawn in place by {node.target}")
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
        if node.op == "call_function" and isinstance(target, torch._ops.OpOverload):
            if target.namespace not in {"aten", "prims", "prim"}:
                self.leaks.add(f"the operator {target} may compute in any precision inside")
        elif isinstance(target, torch._ops.HigherOrderOperator) and "triton" in str(target):
            self.leaks.add("a Triton kernel may compute in any precision inside")

    def _draw_natively(self, module: GraphModule, node: Node) -> None:
        """Random numbers come from the stream of the dtype that the program draws in."""
        node.kwargs = {**node.kwargs, "dtype": node.kwargs.get("dtype") or self.native}
        with module.graph.inserting_after(node):
            wide = module.graph.call_method("to", (node, torch.float64))
        node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)


# Compiled once, a candidate's float64 form serves every later verification of it.
_LIFTED: weakref.WeakKeyDictionary[Any, dict[Any, LiftedBackend]] = weakref.WeakKeyDictionary()


def lifted_backend(
    function: Any, backend: Callable[..., Any], native: torch.dtype, used: frozenset[torch.dtype]
) -> LiftedBackend:
    """The lifted form of the backend behind `function`, the same one every time."""
    known = _LIFTED.setdefault(function, {})
    key = (id(backend), native, used)
    if key not in known:
        known[key] = LiftedBackend(backend, native, used)
    return known[key]


def _widened_dtypes(value: Any, lifts: Callable[[torch.dtype], bool]) -> Any:
    if isinstance(value, torch.dtype):
        return WIDE[value] if value in WIDE and lifts(value) else value
    if isinstance(value, dict):
        return {name: _widened_dtypes(item, lifts) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_widened_dtypes(item, lifts) for item in value)
    if isinstance(value, list):
        return [_widened_dtypes(item, lifts) for item in value]
    return value


def _contexts(function: Any) -> Iterator[_TorchDynamoContext]:
    if isinstance(function, OptimizedModule):
        yield function.dynamo_ctx
        yield from _contexts(function._orig_mod)
        return
    if isinstance(function, torch.nn.Module):
        for module in function.modules():
            if isinstance(module, OptimizedModule):
                yield module.dynamo_ctx
            elif (impl := getattr(module, "_compiled_call_impl", None)) is not None:
                yield from _contexts(impl)
        return
    if is_made_by_compile(function):
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        contexts = [cell for cell in cells if isinstance(cell, _TorchDynamoContext)]
        if not contexts:
            message = f"torch {torch.__version__} hides the context of compiled {function!r}"
            raise UnsupportedTorchError(message)
        yield contexts[0]


def _backend(context: _TorchDynamoContext) -> Callable[..., Any]:
    return innermost_backend(context.callback)  # type: ignore[arg-type]
