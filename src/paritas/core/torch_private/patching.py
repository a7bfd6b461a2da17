"""Replace functions of torch for a while."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.errors import UnsupportedTorchError

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable


def patch(
    stack: contextlib.ExitStack,
    owner: Any,
    name: str,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    does: str,
) -> None:
    """Replace a function by what `wrap` makes of it, until the stack closes.

    Args:
        owner: the module or class that has it, or inherits it.
        does: what it does, if torch does not have it: "runs passes".

    Raises:
        UnsupportedTorchError: torch does not have it.
    """
    original = getattr(owner, name, None)
    if not callable(original):
        raise UnsupportedTorchError(
            f"torch {torch.__version__} has no {owner.__name__}.{name}, which {does}"
        )
    if name in vars(owner):
        stack.callback(setattr, owner, name, original)
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, functools.wraps(original)(wrap(original)))
