"""Programs compiled with every pass of the compiler checked."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.config  # noqa: TID251  (settings of the compiler under test)

from paritas.checking.passes.checks import PassChecks


def checked(function: Any, *args: Any, **settings: Any) -> PassChecks:
    """Compile and run, forward and backward, with every pass checked."""
    checks = PassChecks()
    with torch._inductor.config.patch(settings), checks.watching():  # noqa: TID251
        y = torch.compile(function)(*args)
        if y.requires_grad:
            y.sum().backward()
    return checks


def inputs(*shape: int, count: int = 1) -> list[torch.Tensor]:
    return [torch.randn(*shape, requires_grad=True) for _ in range(count)]
