"""Results of `torch.compile`: their backends, and how to replace these."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import gc
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch._dynamo.config
import torch._inductor.config
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.convert_frame import CatchErrorsWrapper, catch_errors_wrapper, input_codes
from torch._dynamo.eval_frame import (
    OptimizedModule,
    _debug_get_cache_entry_list,
    _TorchDynamoContext,
    get_compiler_fn,
    innermost_backend,
)

from paritas.core.errors import UnsupportedTorchError, UsageError, did_you_mean
from paritas.core.torch_private.arrival import asking_first
from paritas.core.torch_private.graphs import computes_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import GraphModule


# --- Results of `torch.compile` -------------------------------------------------------------------

# Torch's own backends, which compute in the dtype of their graph.
FAITHFUL = frozenset({"inductor", "eager", "aot_eager", "aot_eager_decomp_partition", "ts"})
# Cache entries that verifying adds must not push the user's function over the recompile limit:
# beyond it Dynamo silently runs eagerly, and there would be nothing to verify.
_ROOM_FOR_ENTRIES = 512


def backends_of(function: Any) -> list[Callable[..., Any]]:
    """The backends of every `torch.compile` in a callable: itself, or submodules of a module."""
    backends = [_backend_of_context(context) for context in _find_contexts(function)]
    unique: list[Callable[..., Any]] = []
    for backend in backends:
        if not any(backend is earlier or backend == earlier for earlier in unique):
            unique.append(backend)
    return unique


def dynamic_of(function: Any) -> bool | None:
    """The `dynamic` argument of the first `torch.compile` in a callable."""
    for context in _find_contexts(function):
        dynamic = getattr(context, "_dynamic", None)
        return dynamic if isinstance(dynamic, bool) else None
    return None


def backend_name(backend: Callable[..., Any]) -> str:
    """The name that the user gave, or the name of the function."""
    inner = getattr(backend, "compiler_fn", backend)  # _TorchCompileWrapper holds the function
    name = getattr(backend, "compiler_name", None) or getattr(inner, "__name__", None)
    return str(name or type(backend).__name__)


def is_faithful(backend: Callable[..., Any]) -> bool:
    """Whether a backend is known to compute in the dtype of its graph."""
    inner = getattr(backend, "compiler_fn", backend)
    module = str(getattr(inner, "__module__", ""))
    return backend_name(backend) in FAITHFUL and module.split(".", maxsplit=1)[0] == "torch"


def raised_by_backend(error: Exception) -> Exception:
    """What a backend raised, without what Dynamo wraps it in; `error` itself otherwise."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, Exception) else error


def draws_like_eager(backend: Callable[..., Any]) -> bool:
    """Whether a backend draws its random numbers from eager's stream.

    Inductor has its own generators, unless `fallback_random` is set; others run eager operators.
    """
    if backend_name(backend) != "inductor":
        return True
    config = getattr(backend, "config", {})
    return bool(config.get("fallback_random", torch._inductor.config.fallback_random))


def reuses_outputs(backend: Callable[..., Any]) -> bool:
    """Whether a backend's outputs are in CUDA graph memory, which the next run overwrites.

    Torch documents this, and raises if such an output is read afterwards.
    """
    if backend_name(backend) == "cudagraphs":
        return True
    if backend_name(backend) != "inductor":
        return False
    config = getattr(backend, "config", {})
    return bool(config.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs))


def is_compiled_in_place(function: Any) -> bool:
    """Whether `module.compile()` was called on it."""
    return getattr(function, "_compiled_call_impl", None) is not None


def is_made_by_compile(value: Any) -> bool:
    """Whether a function is the result of `torch.compile`, and not of `torch.compiler.disable`."""
    is_wrapper = getattr(value, "_torchdynamo_wrapper_id", None) == id(value)
    return is_wrapper and not getattr(value, "_torchdynamo_disable", False)


def original_of(function: Any) -> Any:
    """The module or function that was compiled, or `function` itself."""
    if isinstance(function, OptimizedModule):
        return function._orig_mod
    if is_made_by_compile(function):
        return function._torchdynamo_orig_callable
    return function


def undo_compile(function: Any) -> Any:
    """The same program without the `torch.compile` around it; `function` itself if there is none.

    What is compiled inside of it stays compiled.
    """
    if is_compiled_in_place(function):
        return function._call_impl
    return original_of(function)


def compile_like(function: Any, other: Callable[..., Any]) -> Any:
    """Compile `other` as `function` is compiled: by the same backend, with the same options.

    Dynamo keeps compiled code with the code of a class and checks its assumptions at each call, so
    modules that differ only in their weights are compiled once.
    """
    for context in _find_contexts(function):
        compiled: Any = context(other)
        return compiled
    message = f"{function!r:.80} is not a result of torch.compile"
    raise UnsupportedTorchError(message)


@contextlib.contextmanager
def room_for_entries() -> Iterator[None]:
    """Temporarily raise Dynamo's recompile limit."""
    patch = torch._dynamo.config.patch(
        recompile_limit=_ROOM_FOR_ENTRIES, accumulated_recompile_limit=2 * _ROOM_FOR_ENTRIES
    )
    with patch:
        yield


@contextlib.contextmanager
def leaving_no_entries() -> Iterator[None]:
    """Compile as if for the first time, and leave no compiled code behind.

    Dynamo keeps its results with code objects, and counts them there. So functions that have any
    run with copies of their code meanwhile, and get back their own.
    """
    ids = {id(code) for code in _codes_seen()}
    codes = [code for code in _codes_seen() if _debug_get_cache_entry_list(code)]
    owners = gc.get_referrers(*codes) if codes else []
    own_codes = [
        (owner, owner.__code__) for owner in owners if isinstance(owner, types.FunctionType)
    ]
    for function, code in own_codes:
        function.__code__ = code.replace()
    try:
        yield
    finally:
        for function, code in own_codes:
            function.__code__ = code
        for code in _codes_seen():
            if id(code) not in ids:
                reset_code(code)


def _codes_seen() -> list[types.CodeType]:
    """The code that Dynamo was asked to compile, as far as it still exists."""
    codes = (reference() for reference in list(input_codes.seen))
    return [code for code in codes if code is not None]


def count_graph_breaks() -> int:
    """The graph breaks of this process so far: code that Dynamo left to eager."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def count_compiled_frames() -> int:
    """The functions that Dynamo has compiled in this process so far."""
    return int(torch._dynamo.utils.counters["frames"]["ok"])


def compile_seconds() -> float:
    """The seconds that compilations have taken since the process or the last reset of the compiler.

    Forward and backward passes count.
    """
    return float(torch._dynamo.utils.calculate_time_spent()["total_wall_time"])


def seconds_to_compile(function: Any) -> float | None:
    """The seconds that the compilations of a function or module have taken in this process.

    None if there were none, or none under its own code: a `Sequential` is compiled under code of
    torch. Functions with the same decorator have the decorator's code in common, and its time. Only
    the last 64 compilations are known.
    """
    codes = {(code.co_filename, code.co_firstlineno) for code in _codes_of(original_of(function))}
    # The backward pass of a frame is compiled later, under the same number; after a reset of the
    # compiler, another frame may have it.
    numbers: set[str | None] = set()
    microseconds = []
    for record in torch._dynamo.utils.get_compilation_metrics():
        if record.co_filename is not None:
            numbers.discard(record.compile_id)
        if (record.co_filename, record.co_firstlineno) in codes and record.fail_type is None:
            numbers.add(record.compile_id)
        if record.compile_id in numbers:
            microseconds.append(record.duration_us or 0)
    return sum(microseconds) / 1e6 if microseconds else None


def _codes_of(function: Any) -> Iterator[types.CodeType]:
    """The code that Dynamo compiles for a function or module: its own, and what decorators wrap."""
    called = getattr(function, "forward", function)
    while called is not None:
        called = getattr(called, "__func__", called)
        code = getattr(called, "__code__", None)
        if isinstance(code, types.CodeType):
            yield code
        called = getattr(called, "__wrapped__", None)


def run_as_it_is(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """A backend that runs graphs unchanged."""
    del example_inputs
    return graph.forward


class CountingBackend:
    """A backend that runs graphs unchanged and counts them: does Dynamo capture anything?"""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Count the graph and return it uncompiled."""
        del example_inputs
        self.graphs += computes_tensors(graph)
        return graph.forward


def _find_contexts(function: Any) -> Iterator[_TorchDynamoContext]:
    if isinstance(function, OptimizedModule):
        yield function.dynamo_ctx
        yield from _find_contexts(function._orig_mod)
        return
    if isinstance(function, torch.nn.Module):
        for module in function.modules():
            if isinstance(module, OptimizedModule):
                yield module.dynamo_ctx
            elif (impl := getattr(module, "_compiled_call_impl", None)) is not None:
                yield from _find_contexts(impl)
        return
    if is_made_by_compile(function):
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        contexts = [cell for cell in cells if isinstance(cell, _TorchDynamoContext)]
        if not contexts:
            message = f"torch {torch.__version__} hides the context of compiled {function!r}"
            raise UnsupportedTorchError(message)
        yield contexts[0]


def _backend_of_context(context: _TorchDynamoContext) -> Callable[..., Any]:
    return innermost_backend(context.callback)  # type: ignore[arg-type]


# --- Backends, to be called by another backend ----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend and its settings in `torch.compile`.

    Attributes:
        name: its name for the user.
        function: takes a graph and example inputs, returns a callable.
        settings: its keyword arguments; for Inductor, its options.
        is_inductor: whether graphs can be watched below AOTAutograd.
    """

    name: str
    function: Callable[..., Any]
    settings: dict[str, Any]
    is_inductor: bool

    def compile(self, graph: GraphModule, example_inputs: list[Any], **options: Any) -> Any:
        """Compile one captured graph; `options` is the mode and options of `torch.compile`."""
        if self.is_inductor:
            patches = self.inductor_options(options)
            return self.function(graph, example_inputs, config_patches=patches or None)
        return self.function(graph, example_inputs, **self.settings, **options)

    def inductor_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Inductor's options: those of the backend, then those of `torch.compile`."""
        inductor_options = _inductor_options(options.get("mode"), options.get("options"))
        return {**self.settings, **inductor_options}


def inductor_backend() -> Callable[..., Any]:
    """The function of `torch.compile(backend="inductor")`, from a captured graph to a callable."""
    try:
        backend: Any = torch._dynamo.lookup_backend("inductor")
    except (AttributeError, RuntimeError) as error:
        message = f"torch {torch.__version__} cannot find its backend 'inductor': {error}"
        raise UnsupportedTorchError(message) from error
    if not callable(backend):
        message = (
            f"torch {torch.__version__}: the backend 'inductor' is not callable: {backend!r:.80}"
        )
        raise UnsupportedTorchError(message)
    return backend  # type: ignore[no-any-return]


def find_backend(backend: Any, options: dict[str, Any] | None = None) -> Backend:
    """A backend by its name, as a function, or as `torch.compile` wraps either."""
    if options is not None and not isinstance(options, dict):
        message = f"options must be a dict of compiler options, got {options!r:.80}"
        raise UsageError(message)
    if isinstance(backend, str):
        return _find_named_backend(backend, options)
    if not callable(backend):
        message = f"backend must be a name or a function, got {backend!r:.80}"
        raise UsageError(message)
    name = backend_name(backend)
    inner = getattr(backend, "compiler_fn", backend)
    if inner is inductor_backend() or type(backend) is torch._TorchCompileInductorWrapper:
        config = getattr(backend, "config", {})
        settings = {**config, **_inductor_options(None, options)}
        return Backend(name, inductor_backend(), settings, is_inductor=True)
    settings = {**getattr(backend, "kwargs", {}), **({"options": options} if options else {})}
    return Backend(name, inner, settings, is_inductor=False)


def is_registered(name: str, function: Callable[..., Any]) -> bool:
    """Whether this function is registered as a backend with this name."""
    if name not in torch._dynamo.list_backends(exclude_tags=()):
        return False
    return torch._dynamo.lookup_backend(name) is function


def _find_named_backend(name: str, options: dict[str, Any] | None) -> Backend:
    backends = torch._dynamo.list_backends(exclude_tags=())
    if name not in backends:
        hint = did_you_mean(name, sorted(backends))
        message = f"torch.compile has no backend {name!r}; {hint}"
        raise UsageError(message)
    if name == "inductor":
        return Backend(name, inductor_backend(), _inductor_options(None, options), is_inductor=True)
    settings = {"options": options} if options else {}
    return Backend(name, torch._dynamo.lookup_backend(name), settings, is_inductor=False)


def _inductor_options(mode: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
    """Options in Inductor's own spelling, checked by torch."""
    try:
        wrapper = torch._TorchCompileInductorWrapper(mode, options, None)
    except RuntimeError as error:
        message = str(error).split(", known options")[0]
        raise UsageError(f"{message}; see torch._inductor.list_options()") from None
    return dict(wrapper.config)


# --- Another backend for every call ---------------------------------------------------------------

# Torch's own switch, `torch.compiler.set_stance(force_backend=...)`, drops the backend, mode and
# options of each `torch.compile`. Here they are kept.

if TYPE_CHECKING:
    BackendFunction = Callable[..., Any]
    ReplaceBackend = Callable[[BackendFunction], BackendFunction | None]

# Why a call keeps its backend, if it does: it is ours, or the user requested that.
OURS, ASKED = "ours", "asked"
_kept_reason = contextvars.ContextVar("paritas_kept", default="")


@contextlib.contextmanager
def unguarded(why: str = OURS) -> Iterator[None]:
    """Keep the backend of everything compiled in this context: it belongs to paritas."""
    token = _kept_reason.set(why)
    try:
        yield
    finally:
        _kept_reason.reset(token)


@contextlib.contextmanager
def replacing_backends(
    replace: ReplaceBackend, on_kept: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Make every `torch.compile` of the process, in any thread, use another backend.

    Args:
        replace: takes a backend as `torch.compile` stores it, with its mode and options, and
            returns the one to use, or None to keep it. For equal backends it must return the same
            object, because Dynamo compares them to find compiled code. Its results may be passed to
            it again.
        on_kept: called when a call keeps its backend because of `keeping_backends`.

    Raises:
        UnsupportedTorchError: this torch has no such hook.
    """
    replaced = _ReplacedCallbacks(replace)

    def with_another_backend(callback: Any, ask: Callable[[Any], Any]) -> Any:
        if why := _kept_reason.get():
            if why == ASKED:
                on_kept()
            return ask(callback)
        # A stance may replace the callback, so the result is replaced too.
        return replaced.of(ask(replaced.of(callback)))

    with asking_first(with_another_backend):
        yield


@contextlib.contextmanager
def keeping_backends() -> Iterator[None]:
    """Make every `torch.compile` of the process keep its backend, whatever replaces it outside."""

    def as_it_is(callback: Any, ask: Callable[[Any], Any]) -> Any:
        with unguarded(ASKED):
            return ask(callback)

    with asking_first(as_it_is):
        yield


class _ReplacedCallbacks:
    """Callbacks with a replaced backend, each created once."""

    def __init__(self, replace: ReplaceBackend) -> None:
        self.replace = replace
        self._known: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()

    def of(self, callback: Any) -> Any:
        """The callback to use instead; callbacks that compile nothing stay the same."""
        if callback is None or callback is False:
            return callback
        with self._lock:
            if callback not in self._known:
                self._known[callback] = self._make(callback)
            wrapped = self._known[callback]
        return callback if wrapped is None else wrapped

    def _make(self, callback: Any) -> CatchErrorsWrapper | None:
        convert = getattr(callback, "_torchdynamo_orig_backend", None)
        if getattr(convert, "_export", False):  # export needs the graph, not code
            return None
        backend = self.replace(innermost_backend(callback))
        if backend is None:
            return None
        try:
            # As in DDP's optimizer: fullgraph, hooks and limits stay.
            clone = convert._clone_with_backend(get_compiler_fn(backend))  # type: ignore[union-attr]
            return catch_errors_wrapper(clone, callback.hooks)
        except (AttributeError, TypeError) as error:
            message = f"torch {torch.__version__} does not allow replacing a backend: {error}"
            raise UnsupportedTorchError(message) from error
