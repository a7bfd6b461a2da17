"""Inductor below AOTAutograd: see every graph it is given, and compile a graph once more."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch._guards import CompileContext, TracingContext, tracing
from torch._inductor.virtualized import V

from paritas._torch.graphs import copy_graph, output_node
from paritas.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from torch.fx import GraphModule

    Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class LoweredGraph:
    """A graph as Inductor is given it, before any pass after the gradient changes it.

    Attributes:
        module: a copy that stays as it is.
        is_backward: whether it computes gradients.
        visible: positions of the outputs that the user sees, whose strides are promised.
        donated: positions of the inputs whose memory the compiled code may reuse.
        options: the settings in force when it was compiled.
        inputs: what it was compiled for: fake tensors, whose strides may differ from those traced.
        fake_mode: torch's, to which they belong.
        arguments: what else the compiler was told.
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
        """The same circumstances for another graph."""
        return dataclasses.replace(self, module=module)


def compile_watched(
    graph: GraphModule,
    example_inputs: list[Any],
    watch: Callable[[LoweredGraph, Boxed], Boxed],
    options: dict[str, Any] | None = None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Callable[..., Any]:
    """Compile by Inductor; `watch` may replace what was made of each graph below AOTAutograd.

    A graph for the backward pass comes later, when it is first needed. The cache above Inductor is
    left out, since a hit there would hand back code that was never shown to `watch`. `around` is
    entered for each piece of the compiler's work.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    def inner(module: GraphModule, inputs: Sequence[Any], **arguments: Any) -> Any:
        lowered = _describe(module, inputs, arguments)
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
    """Let each graph that Inductor would be given be run by what `run` makes of it instead."""

    def inner(module: GraphModule, inputs: Sequence[Any], **arguments: Any) -> Any:
        return run(_describe(module, inputs, arguments))

    return _compile_with(inner, graph, example_inputs, options)


def compiled_frame() -> Hashable:
    """The function of the user's that is being compiled: the same when it is compiled anew."""
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
    """Compile a graph as Inductor would have then, with other options on top.

    For use while the program runs: within a compile it would disturb torch's own bookkeeping.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    module = copy_graph(lowered.module)
    arguments = {**lowered.arguments, "cudagraphs": BoxedBool(False)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(settings(lowered.options, options))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(V.set_fake_mode(lowered.fake_mode))
        stack.enter_context(tracing(TracingContext(lowered.fake_mode)))
        if not lowered.fake_mode.allow_non_fake_inputs:
            stack.enter_context(_allowing_constants(lowered.fake_mode))
        compiled: Boxed = compile_fx_inner(module, list(lowered.inputs), **arguments)
    return compiled


@contextlib.contextmanager
def settings(options: dict[str, Any], more: dict[str, Any] | None = None) -> Iterator[None]:
    """Inductor's settings as they were at another time, and some on top."""
    present = current_settings()
    wanted = {**options, **(more or {})}
    changed = {
        key: value
        for key, value in wanted.items()
        if key in present and not _same(present[key], value)
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


def _describe(
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
def _allowing_constants(fake_mode: Any) -> Iterator[None]:
    fake_mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        fake_mode.allow_non_fake_inputs = False


def _same(left: Any, right: Any) -> bool:
    try:
        return left is right or bool(left == right)
    except Exception:  # noqa: BLE001  (a value that cannot be compared)
        return False
