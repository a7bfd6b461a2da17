"""Looking on while a program runs in eager mode: its module calls and its operators.

Calls of modules are seen by putting a function in front of `nn.Module.__call__`. Torch's own global
hooks would not do: those that come before a call are not given its keyword arguments, none runs
when a `KeyboardInterrupt` passes, and Dynamo guards compiled code on their number, so that looking
on would make the program compile anew. No guard asks for `__call__`, and where Dynamo traces the
function it sees nothing but a call of the one behind it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.fx
from torch import nn
from torch.distributed import is_available as distributed_is_available
from torch.utils._python_dispatch import TorchDispatchMode

from paritas._torch.operators import Operator, traits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    ModuleCall = Callable[..., Any]
    Around = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], ModuleCall], Any]

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_VIEWS = torch._C.DispatchKey.ADInplaceOrView
_KEYS = torch._C._TorchDispatchModeKey
_SYMBOLIC = (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)
# Under short names: what is asked of every module and value is found without a search.
_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_mode = torch._C._get_dispatch_mode
_tracing_state = torch._C._get_tracing_state
_transforms = torch._C._functorch.peek_interpreter_stack
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_fx_tracing = torch.fx._symbolic_trace.is_fx_symbolic_tracing
_graph_task = torch._C._current_graph_task_id
_call = nn.Module.__call__
_around: tuple[Around, ...] = ()
_lock = threading.Lock()


def _watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or not _around:
        return _call(module, *args, **kwargs)
    # The module is called inside the last of those who look on, that one inside the one before.
    call = functools.partial(_call, module)
    for look in _around[:-1]:
        call = functools.partial(_call_within, look, module, call)
    return _around[-1](module, args, kwargs, call)


def _call_within(
    around: Around, module: nn.Module, call: ModuleCall, *args: Any, **kwargs: Any
) -> Any:
    return around(module, args, kwargs, call)


def watch_module_calls(around: Around) -> Callable[[], None]:
    """Have every call of every module pass through `around`, in all threads.

    Args:
        around: is given module, arguments, keyword arguments and the call to make; returns what
            the call returned.

    Returns:
        What ends it; `nn.Module` is then as it was.
    """
    global _around, _call  # noqa: PLW0603  (the class is patched for everybody alike)
    with _lock:
        if not _around and nn.Module.__call__ is not _watched_call:
            _call = nn.Module.__call__
            nn.Module.__call__ = _watched_call  # type: ignore[method-assign]
        _around = (*_around, around)

    def end() -> None:
        global _around  # noqa: PLW0603
        with _lock:
            _around = tuple(each for each in _around if each is not around)
            # Somebody else, fx's tracer for one, may have put theirs before ours meanwhile.
            if not _around and nn.Module.__call__ is _watched_call:
                nn.Module.__call__ = _call  # type: ignore[method-assign]

    return end


class OperatorWatcher(Protocol):
    """Whoever looks on at operators."""

    def listens(self) -> bool:
        """Whether the next operator is of interest."""

    def before(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator is about to run on these; what is returned is given to `after`."""

    def after(self, token: Any, result: Any) -> None:
        """It gave this."""


class OperatorWatch(TorchDispatchMode):
    """Shows each operator below autograd, with its arguments, to a watcher.

    In inference mode operators that are made of others arrive whole; they are taken apart, so that
    a program shows the same operators with and without gradients. Tensors of foreign classes are
    left to these.
    """

    # A higher-order operator runs as if nobody looked, rather than not at all.
    supports_higher_order_operators = True

    def __init__(self, watcher: OperatorWatcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watcher = watcher

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code be compiled, and run, as if nobody looked."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Show one operator."""
        kwargs = kwargs or {}
        if not isinstance(func, Operator) or not self._watcher.listens():
            return func(*args, **kwargs)
        if not all(_is_dtensor(kind) for kind in types):
            return func(*args, **kwargs)
        if _is_composite(func):
            # Not `decompose`: it prefers decompositions that are written for tracing. And views
            # must know their base, as they do when nobody looks: `matmul` chooses its kernel by it.
            with torch._C._SetExcludeDispatchKeyGuard(_VIEWS, False), self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        token = self._watcher.before(func, args, kwargs)
        result = func(*args, **kwargs)
        self._watcher.after(token, result)
        return result


def push_watch(watcher: OperatorWatcher) -> Callable[[], bool]:
    """Show every operator of this thread, and of its backward passes, to a watcher.

    Returns:
        What ends it, if nobody's mode was put on top meanwhile; whether it did.
    """
    mode = OperatorWatch(watcher)
    mode.__enter__()  # type: ignore[no-untyped-call]
    depth = torch._C._len_torch_dispatch_stack()

    def end() -> bool:
        if torch._C._len_torch_dispatch_stack() != depth:
            return False
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return True

    return end


def mode_depth() -> int:
    """How many dispatch modes this thread is in."""
    return int(torch._C._len_torch_dispatch_stack())


@functools.cache
def written_arguments(func: Operator) -> list[tuple[int, str]]:
    """Position and name of the arguments that an operator writes to and does not return."""
    if func._schema.returns:
        return []
    names = [argument.name for argument in func._schema.arguments]
    return [(place, name) for place, name in enumerate(names) if name in traits(func).mutates]


@functools.cache
def out_arguments(func: Operator) -> frozenset[str]:
    """The names of the arguments that are there to be written to: what they held does not count."""
    return frozenset(argument.name for argument in func._schema.arguments if argument.is_out)


def in_backward() -> bool:
    """Whether autograd is at work: modules called now are called again, for their gradients."""
    return bool(_graph_task() != -1)


def upcoming_node() -> int:
    """Number of the autograd node that the present operator made, if it made one."""
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]


def running_node() -> tuple[int, Tensor | None]:
    """Number of the autograd node that runs now, and the leaf whose gradient it accumulates."""
    node = torch._C._current_autograd_node()
    if node is None:
        return -1, None
    return int(node._sequence_nr()), getattr(node, "variable", None)


def rebuilds_graph() -> bool:
    """Whether what is run again in the backward pass makes a graph that gradients pass through.

    A re-entrant checkpoint does, from within a function of its own; others only need the values.
    """
    return isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction)


def is_symbolic() -> bool:
    """Whether the program is being traced or transformed: what modules are given are no values."""
    return (
        torch.compiler.is_compiling()
        or _tracing_state() is not None
        or _is_fx_tracing()
        or _transforms() is not None
        # Asked of every call of a module: of the modes, first whether there are any.
        or (_modes() > 0 and any(_mode(key) is not None for key in _SYMBOLIC))
    )


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor holds values of its own, or is a part of a distributed one that does."""
    if tensor.is_meta or _is_wrapped(tensor):
        return False
    # A subclass without a dispatch of its own is a tensor with a name.
    kind = type(tensor)
    return (
        kind is torch.Tensor
        or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        or _is_dtensor(kind)
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether calling a module runs what `torch.compile` made of it."""
    # Dynamo takes seconds to import; a module of its class does not exist before.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or module._compiled_call_impl is not None


def is_seen() -> bool:
    """Whether there are modes that see what is done now; if not, `unseen` changes nothing."""
    return bool(_modes() or _function_modes())


def unseen() -> contextlib.AbstractContextManager[Any]:
    """Let nobody's modes see, or change, what is done inside; ours among them."""
    return _modes_off() if is_seen() else _NOBODY


_NOBODY = contextlib.nullcontext()


@contextlib.contextmanager
def _modes_off() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


@functools.cache
def _is_composite(func: Operator) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)


@functools.cache
def _is_dtensor(kind: type) -> bool:
    if not distributed_is_available():
        return False
    from torch.distributed.tensor import DTensor

    return issubclass(kind, DTensor)
