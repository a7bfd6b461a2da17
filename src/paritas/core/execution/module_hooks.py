"""Hooks around the calls of chosen modules of one model: what they get and return.

They are torch's own hooks, so that Dynamo traces them into a module that is compiled. To watch all
modules of whatever runs, unseen by compiled code, there is `watch_module_calls`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.utils.hooks import RemovableHandle


class ModuleHooks:
    """Hooks around the calls of modules; a subclass says what happens before and after a call.

    They are the outermost: the hooks of the caller, of a plan or of a library belong to the module
    and run inside of them.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        self._handles: list[RemovableHandle] = []
        self._entered: list[tuple[str, Any]] = []

    def __enter__(self) -> Self:
        for name, module in self.modules.items():
            self._handles += [
                module.register_forward_pre_hook(
                    functools.partial(self._before, name), with_kwargs=True, prepend=True
                ),
                module.register_forward_hook(
                    functools.partial(self._after, name), with_kwargs=True
                ),
            ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._entered.clear()

    def enter_call(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """What to remember about a call, and the arguments to call the module with."""
        raise NotImplementedError

    def leave_call(
        self, name: str, entered: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """The result to return instead; None for its own."""
        raise NotImplementedError

    def open_calls(self) -> list[Any]:
        """What is remembered about the calls that have not returned, the outermost first."""
        return [entered for _, entered in self._entered]

    def forget_calls(self) -> None:
        """Forget the calls that have not returned, and will not: something raised inside."""
        self._entered.clear()

    def _before(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        entered, new_args, new_kwargs = self.enter_call(name, module, args, kwargs)
        self._entered.append((name, entered))
        return None if new_args is args and new_kwargs is kwargs else (new_args, new_kwargs)

    def _after(
        self,
        name: str,
        _module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> Any:
        # A call inside of this one that raised, and was caught, has not left.
        while self._entered:
            entered_name, entered = self._entered.pop()
            if entered_name == name:
                return self.leave_call(name, entered, args, kwargs, result)
        return None  # it was forgotten while it ran
