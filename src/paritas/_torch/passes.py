"""Watch Inductor's graph passes: which pass changes which graph, before and after.

Most passes announce themselves to torch's `GraphTransformObserver`. Not all do, so each stage is
also reported as a whole: pre-grad, joint graph, post-grad, and the freezing of parameters. The
split of a joint graph into forward and backward is reported too.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch._functorch.config
import torch._inductor.config
from torch._guards import TracingContext, tracing

from paritas._torch.graphs import copy_graph, placeholders
from paritas._torch.inductor import allowing_constants, using_settings
from paritas.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.fx import GraphModule

    from paritas._torch.inductor import LoweredGraph

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

    for name, stage in _STAGES.items():
        _patch(stack, compile_fx, name, functools.partial(_staged, stage))
    _patch(stack, compile_fx, "partition_fn", _splitting)
    _patch(stack, freezing, "freeze", _freezing)
    _patch(stack, freezing, "convert_conv_weights_to_channels_last", _laying_out)
    _patch(stack, GraphTransformObserver, "__enter__", _entering)
    _patch(stack, GraphTransformObserver, "__exit__", _leaving)


def _patch(
    stack: contextlib.ExitStack, owner: Any, name: str, wrap: Callable[..., Callable[..., Any]]
) -> None:
    original = getattr(owner, name, None)
    if not callable(original):
        message = f"torch {torch.__version__} has no {owner.__name__}.{name}, which runs passes"
        raise UnsupportedTorchError(message)
    setattr(owner, name, functools.wraps(original)(wrap(original)))
    stack.callback(setattr, owner, name, original)


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


def _staged(stage: str, original: Callable[..., Any]) -> Callable[..., Any]:
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
