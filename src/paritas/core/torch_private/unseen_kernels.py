"""Kernels that torch does not see, such as one in Triton that a Python function launches.

The dispatcher shows neither that they run nor what they write. What it does not show, the call does
that launches them: of an autograd function, or of a module. It stands for the kernel, and looks
like an operator to those who record these.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import re
import weakref
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    # Classes of autograd functions, and of modules: their static methods are set here.
    Function = Any
    Launcher = Any
    Around = Callable[[Function, tuple[Any, ...], dict[str, Any], Callable[..., Any]], Any]

NAMESPACE = "unseen"


class Launch(enum.Enum):
    """What launches a kernel."""

    MODULE = "a module"
    APPLY = "an autograd function"
    BACKWARD = "the backward pass of an autograd function"
    FUNCTION = "a function"
    PART = "something that also does more, and cannot be called for the kernel alone"


class UnseenKernel:
    """The call that launches a kernel, with what a recorder asks of an operator.

    Its arguments: of a function its own; of an autograd function those of `apply`; of its backward
    pass the saved tensors, the context and the gradients; of a module its parameters and buffers by
    name, the module, and the arguments of the call.
    """

    tags: tuple[torch.Tag, ...] = ()
    _overloadname = "default"

    def __init__(self, launcher: Launcher, launch: Launch) -> None:
        # Recorders keep operators for good: these must not keep a user's class.
        self._launcher = weakref.ref(launcher)
        self._launch = launch
        self._name = launcher.co_name if isinstance(launcher, CodeType) else launcher.__name__
        name = re.sub(r"\W", "_", self._name)
        names = ", ".join(
            f"Any {argument_name}" for argument_name in _argument_names(launcher, launch)
        )
        self._schema = torch._C.parse_schema(f"{NAMESPACE}::{name}({names}) -> Any")

    def __str__(self) -> str:
        return self._schema.name.replace("::", ".")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch it once more."""
        launcher: Any = self._launcher()
        if launcher is None:
            raise RuntimeError(f"{self} is gone")
        if self._launch is Launch.PART:
            raise RuntimeError(f"{self._name} does more than to launch a kernel")
        if self._launch is Launch.APPLY:
            return launcher.apply(*args, **kwargs)
        if self._launch is Launch.FUNCTION:
            result = launcher(*args)
            if not isinstance(result, torch.Tensor):
                raise TypeError(f"{self._name} returns more than one tensor")
            return result
        if self._launch is Launch.BACKWARD:
            saved, context, *gradients = args
            return launcher.backward(_OtherTensors(context, saved), *gradients)
        state, module, *rest = args
        return functional_call(module, dict(state), tuple(rest), kwargs)


class _OtherTensors:
    """The context of an autograd function with other saved tensors."""

    def __init__(self, context: Any, saved: Sequence[Tensor]) -> None:
        self._context = context
        self.saved_tensors = tuple(saved)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class WatchedContext:
    """The context of an autograd function, which shows its saved tensors when they are read.

    They are read once: activation checkpointing raises if they are read again.
    """

    def __init__(self, context: Any, look: Callable[[tuple[Tensor, ...]], None]) -> None:
        vars(self).update(_context=context, _look=look)

    @functools.cached_property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """As of the context of an autograd function."""
        tensors: tuple[Tensor, ...] = self._context.saved_tensors
        self._look(tensors)
        return tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._context, name, value)


def _argument_names(launcher: Launcher, launch: Launch) -> list[str]:
    if launch is Launch.BACKWARD:
        return ["saved", "ctx", *list(inspect.signature(launcher.backward).parameters)[1:]]
    if launch in (Launch.FUNCTION, Launch.PART):
        return []
    names = list(inspect.signature(launcher.forward).parameters)
    if launch is Launch.MODULE:
        return ["state", "module", *names[1:]]
    base = torch.autograd.function._SingleLevelFunction
    return names[1:] if launcher.setup_context is base.setup_context else names


_kernels: weakref.WeakKeyDictionary[Any, dict[Launch, UnseenKernel]] = weakref.WeakKeyDictionary()


def unseen_kernel(launcher: Launcher, launch: Launch) -> UnseenKernel:
    """The kernel that calls of a class launch; the same object in every run."""
    kernels = _kernels.setdefault(launcher, {})
    if launch not in kernels:
        kernels[launch] = UnseenKernel(launcher, launch)
    return kernels[launch]


def module_state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a module by name, as `UnseenKernel` takes them."""
    return [*module.named_parameters(), *module.named_buffers()]


def watch_autograd_functions(
    around: Around, around_backward: Around, functions: set[Function]
) -> Callable[[], None]:
    """Route `apply` of every autograd function, and `backward` of some, through another function.

    Args:
        around: takes the class, arguments, keyword arguments and the call to make.
        around_backward: the same; the first argument is the context.
        functions: whose backward passes are watched; those that are applied are added.

    Returns:
        A function that ends it and restores the classes.
    """
    original = torch.autograd.Function.__dict__["apply"]
    undo = contextlib.ExitStack()

    def watch_backward(function: Function) -> None:
        backward = function.backward
        if backward is torch.autograd.Function.backward:
            return  # it has none, or calls it `vjp`: torch refuses both
        is_own = "backward" in function.__dict__
        before = function.__dict__.get("backward")

        def watch_gradients(ctx: Any, *gradients: Any) -> Any:
            return around_backward(function, (ctx, *gradients), {}, backward)

        def restore() -> None:
            if is_own:
                function.backward = before
            else:
                del function.backward

        function.backward = staticmethod(watch_gradients)
        undo.callback(restore)

    def apply(cls: Function, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(original.__func__, cls)
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        if cls not in functions:
            functions.add(cls)
            watch_backward(cls)
        return around(cls, args, kwargs, call)

    for function in functions:
        watch_backward(function)
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    undo.callback(setattr, torch.autograd.Function, "apply", original)
    return undo.close
