"""Modes and hooks of eager programs: watch module calls and operators, undo what is left behind."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.fx
import torch.nn.modules.module as _modules
import torch.optim.optimizer as _optimizers
from torch import library, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed import is_available as distributed_is_available
from torch.overrides import _get_current_function_mode_stack as _function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack as _dispatch_mode_stack,
)
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from paritas.core.torch_private.operators import Operator, traits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    ModuleCall = Callable[..., Any]

    Around = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], ModuleCall], Any]


# --- Watching the module calls and operators of a program -----------------------------------------
# Module calls are watched by wrapping `nn.Module.__call__`. Torch's own global hooks are not
# enough: pre-hooks do not get keyword arguments, no hook runs on a `KeyboardInterrupt`, and
# Dynamo guards compiled code on their number, so watching would cause recompiles. No guard checks
# `__call__`, and when Dynamo traces the wrapper it only sees a call of the original.

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_VIEWS = torch._C.DispatchKey.ADInplaceOrView
_KEYS = torch._C._TorchDispatchModeKey
_SYMBOLIC = (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)
# Short names: functions called for every module and value are found without a search.
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
    # The last watcher is the outermost: it calls the others, and these call the module.
    call = functools.partial(_call, module)
    for look in _around[:-1]:
        call = functools.partial(_call_within, look, module, call)
    return _around[-1](module, args, kwargs, call)


def _call_within(
    around: Around, module: nn.Module, call: ModuleCall, *args: Any, **kwargs: Any
) -> Any:
    return around(module, args, kwargs, call)


def watch_module_calls(around: Around) -> Callable[[], None]:
    """Route every call of every module through `around`, in all threads.

    Args:
        around: takes the module, arguments, keyword arguments and the call to make; returns the
            result of the call.

    Returns:
        A function that ends it and restores `nn.Module`.
    """
    global _around, _call  # noqa: PLW0603  (the class is patched globally)
    with _lock:
        if not _around and nn.Module.__call__ is not _watched_call:
            _call = nn.Module.__call__
            nn.Module.__call__ = _watched_call  # type: ignore[method-assign]
        _around = (*_around, around)

    def end() -> None:
        global _around  # noqa: PLW0603
        with _lock:
            _around = tuple(each for each in _around if each is not around)
            # Others, such as fx's tracer, may have wrapped ours meanwhile.
            if not _around and nn.Module.__call__ is _watched_call:
                nn.Module.__call__ = _call  # type: ignore[method-assign]

    return end


class OperatorWatcher(Protocol):
    """The interface of an observer of operators."""

    def listens(self) -> bool:
        """Whether the next operator is of interest."""

    def before(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called before an operator; the return value is passed to `after`."""

    def after(self, token: Any, result: Any) -> Any:
        """Called with the result of the operator; anything but None replaces it."""


class OperatorWatch(TorchDispatchMode):
    """Shows each operator below autograd, with its arguments, to a watcher.

    In inference mode composite operators are not decomposed; here they are, so that a program shows
    the same operators with and without gradients. Tensors of foreign classes are not watched.
    """

    # Higher-order operators run unwatched instead of failing.
    supports_higher_order_operators = True

    def __init__(self, watcher: OperatorWatcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watcher = watcher

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compile and run compiled code as if unwatched."""
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
            # Not `decompose`: it prefers decompositions written for tracing. Views must know their
            # base, as without a watcher: `matmul` chooses its kernel by it.
            with torch._C._SetExcludeDispatchKeyGuard(_VIEWS, False), self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        token = self._watcher.before(func, args, kwargs)
        result = func(*args, **kwargs)
        instead = self._watcher.after(token, result)
        return result if instead is None else instead


def push_watch(watcher: OperatorWatcher) -> Callable[[], bool]:
    """Show every operator of this thread, and of its backward passes, to a watcher.

    Returns:
        A function that ends it, unless another mode is on top by now; returns whether it did.
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
    """The number of active dispatch modes of this thread."""
    return int(torch._C._len_torch_dispatch_stack())


@functools.cache
def written_arguments(func: Operator) -> list[tuple[int, str]]:
    """Position and name of the arguments that an operator writes to and does not return."""
    if func._schema.returns:
        return []
    names = [argument.name for argument in func._schema.arguments]
    return [(position, name) for position, name in enumerate(names) if name in traits(func).mutates]


@functools.cache
def out_arguments(func: Operator) -> frozenset[str]:
    """The names of `out` arguments: their old contents do not matter."""
    return frozenset(argument.name for argument in func._schema.arguments if argument.is_out)


def in_backward() -> bool:
    """Whether a backward pass runs: modules called now are recomputed for their gradients."""
    return backward_pass() != -1


def backward_pass() -> int:
    """The number of the backward pass that runs in this thread; -1 if there is none."""
    return int(_graph_task())


def upcoming_node() -> int:
    """Number of the autograd node that the current operator created, if it did."""
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]


def running_node() -> tuple[int, Tensor | None]:
    """Number of the running autograd node, and the leaf for which it accumulates a gradient."""
    node = torch._C._current_autograd_node()
    if node is None:
        return -1, None
    return int(node._sequence_nr()), getattr(node, "variable", None)


def running_function() -> str:
    """The class of the user's autograd function whose backward pass runs; "" if there is none."""
    node = torch._C._current_autograd_node()
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return ""
    return str(node._forward_cls.__name__)


def rebuilds_graph() -> bool:
    """Whether recomputation in the backward pass builds a graph that gradients flow through.

    A re-entrant checkpoint does, from its own autograd function; others only need the values.
    """
    return isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction)


def is_symbolic() -> bool:
    """Whether the program is being traced or transformed, so that inputs are not real values."""
    return (
        torch.compiler.is_compiling()
        or _tracing_state() is not None
        or _is_fx_tracing()
        or _transforms() is not None
        # Called for every module call, so the cheap check for any mode comes first.
        or (_modes() > 0 and any(_mode(key) is not None for key in _SYMBOLIC))
    )


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor, or the local part of a distributed one, holds real values."""
    if tensor.is_meta or _is_wrapped(tensor):
        return False
    # A subclass without its own dispatch is an ordinary tensor.
    kind = type(tensor)
    return (
        kind is torch.Tensor
        or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        or _is_dtensor(kind)
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether calling a module runs code compiled by `torch.compile`."""
    # Dynamo takes seconds to import; without it no module of its class exists.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or module._compiled_call_impl is not None


def is_seen() -> bool:
    """Whether any mode is active; if not, `unseen` does nothing."""
    return bool(_modes() or _function_modes())


def unseen() -> contextlib.AbstractContextManager[Any]:
    """Disable all modes inside, including ours."""
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


# --- What programs leave behind that runs with everything later: modes, hooks, kernels ------------

# The kernels that eager programs run. Importing parts of torch registers others: for meta tensors.
_EAGER_KEYS = ("/CPU", "/CUDA", "/Autograd", "/AutogradCPU", "/AutogradCUDA")


def mode_depths() -> tuple[int, int]:
    """The number of dispatch modes and of function modes of this thread."""
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


def close_modes(depths: tuple[int, int]) -> None:
    """End the innermost modes, until as many are left."""
    while mode_depths()[0] > depths[0]:
        _pop_dispatch_mode()
    while mode_depths()[1] > depths[1]:
        _pop_function_mode()


def present_modes() -> tuple[list[Any], list[Any]]:
    """The dispatch modes and the function modes of this thread, the outermost first.

    Without the mode of `torch.set_default_device`, which is a setting.
    """
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    functions = [mode for mode in _function_mode_stack() if mode is not default]
    return _dispatch_mode_stack(), functions


def restore_modes(modes: tuple[list[Any], list[Any]]) -> None:
    """Make these the modes of this thread."""
    if not _are_same(_dispatch_mode_stack(), modes[0]):
        while mode_depths()[0]:
            _pop_dispatch_mode()
        for mode in modes[0]:
            _push_dispatch_mode(mode)
    if not _are_same(present_modes()[1], modes[1]):
        current_modes = present_modes()[1]
        default = [
            mode
            for mode in _function_mode_stack()
            if not any(mode is own_mode for own_mode in current_modes)
        ]
        while mode_depths()[1]:
            _pop_function_mode()
        for mode in (*default, *modes[1]):
            _push_function_mode(mode)


def _are_same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


# A program that never ends its `saved_tensors_hooks` has no more than this.
_MOST_SAVED_HOOKS = 1000


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The innermost `torch.autograd.graph.saved_tensors_hooks` of this thread: pack and unpack."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def restore_saved_tensor_hooks(hooks: tuple[Any, Any] | None) -> None:
    """End those inside of these; if these were ended, begin them again."""
    for _ in range(_MOST_SAVED_HOOKS):
        now = saved_tensor_hooks()
        if now is None or (hooks is not None and _are_same([*now], [*hooks])):
            break
        torch._C._autograd._pop_saved_tensors_default_hooks()
    if hooks is not None and saved_tensor_hooks() is None:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


_HOOK_TABLES = [
    (owner, name)
    for owner in (_modules, _optimizers)
    for name, table in vars(owner).items()
    if name.startswith("_global_") and isinstance(table, dict)
]


def module_hooks() -> dict[str, dict[Any, Any]]:
    """The hooks that all modules call, and all optimizers, by their kind: copies."""
    return {name: dict(vars(owner)[name]) for owner, name in _HOOK_TABLES}


def restore_module_hooks(hooks: dict[str, dict[Any, Any]]) -> None:
    """Make these the hooks that all modules and all optimizers call."""
    for owner, name in _HOOK_TABLES:
        now = vars(owner)[name]
        now.clear()
        now.update(hooks[name])
    if not hooks["_global_backward_hooks"]:
        _modules._global_is_full_backward_hook = None  # its kind, which excludes the other one


def library_kernels() -> frozenset[str]:
    """The kernels that were registered with `torch.library` so far, by torch itself too."""
    return frozenset(library._impls)


def replaced_kernels(since: frozenset[str]) -> list[str]:
    """The kernels of torch's own operators that were registered since then: `sign/CPU`."""
    return sorted(
        name.removeprefix("aten/")
        for name in library._impls - since
        if name.startswith("aten/") and name.endswith(_EAGER_KEYS)
    )


def loaded_operators() -> list[tuple[Any, Any]]:
    """The overloads of torch's own operators that were used so far, each with what it calls."""
    packets = [
        packet for packet in vars(torch.ops.aten).values() if isinstance(packet, OpOverloadPacket)
    ]
    overloads = [overload for packet in packets for overload in vars(packet).values()]
    return [(overload, overload._op) for overload in overloads if isinstance(overload, OpOverload)]


def put_back_operators(overloads: list[tuple[Any, Any]]) -> dict[str, str]:
    """Restore what these overloads call; returns name -> `replaced`."""
    changed = [(overload, call) for overload, call in overloads if overload._op is not call]
    for overload, call in changed:
        overload._op = call
    return {f"torch.ops.{overload}": "replaced" for overload, _ in changed}
