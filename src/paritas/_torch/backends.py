"""Backends of `torch.compile`, to be called from within another backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo

from paritas.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule

    Backend = Callable[[GraphModule, list[Any]], Callable[..., Any]]


def inductor_backend() -> Backend:
    """What `torch.compile(backend="inductor")` calls: a captured graph in, a callable out."""
    try:
        backend: Any = torch._dynamo.lookup_backend("inductor")
    except (AttributeError, RuntimeError) as error:
        message = f"torch {torch.__version__} does not give its backend 'inductor': {error}"
        raise UnsupportedTorchError(message) from error
    if not callable(backend):
        message = f"torch {torch.__version__} gives as its backend 'inductor' {backend!r:.80}"
        raise UnsupportedTorchError(message)
    return backend  # type: ignore[no-any-return]
