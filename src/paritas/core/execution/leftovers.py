"""Modes and hooks that a call leaves behind, which would run with everything that runs later."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from paritas.core.results.wording import count_things
from paritas.core.torch_private.watching import (
    module_hooks,
    present_modes,
    restore_modes,
    restore_module_hooks,
    restore_saved_tensor_hooks,
    saved_tensor_hooks,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_SAVED = "torch.autograd.graph.saved_tensors_hooks"
# Tables of flags of the hooks in other tables, under the same keys.
_FLAGS = ("_always_called", "_with_kwargs")


@contextlib.contextmanager
def undoing_leftovers(changed: dict[str, str]) -> Iterator[None]:
    """End modes, and remove hooks, that the block leaves; puts name -> how it changed in `changed`.

    To be used inside of our own modes: they end the innermost mode, whatever it is.
    """
    modes, hooks, saved = present_modes(), module_hooks(), saved_tensor_hooks()
    try:
        yield
    finally:
        now = present_modes()
        for kind, before, after in zip(("dispatch", "function"), modes, now, strict=True):
            changed |= _changed_modes(kind, before, after)
        restore_modes(modes)
        if saved_tensor_hooks() != saved:
            changed[_SAVED] = "left on" if saved_tensor_hooks() is not None else "ended"
            restore_saved_tensor_hooks(saved)
        changed |= _changed_hooks(hooks)


def _changed_modes(kind: str, before: list[Any], after: list[Any]) -> dict[str, str]:
    changed_modes = {}
    for mode in after:
        if not any(mode is earlier_mode for earlier_mode in before):
            changed_modes[f"{kind} mode {type(mode).__qualname__}"] = "left on"
    for mode in before:
        if not any(mode is later_mode for later_mode in after):
            changed_modes[f"{kind} mode {type(mode).__qualname__}"] = "ended"
    return changed_modes


def _changed_hooks(before: dict[str, dict[Any, Any]]) -> dict[str, str]:
    now = module_hooks()
    if now == before:
        return {}
    restore_module_hooks(before)
    return {
        f"hooks of all {_callers_of(name)}: {name}": (
            f"left with {count_things(len(now[name]), 'hook')}"
        )
        for name in now
        if now[name] != before[name] and not name.endswith(_FLAGS)
    }


def _callers_of(table: str) -> str:
    return "optimizers" if "optimizer" in table else "modules"
