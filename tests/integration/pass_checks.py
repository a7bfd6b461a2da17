"""Programs compiled with every pass of the compiler checked."""

# ruff: noqa: TID251  (settings and code of the compiler under test)

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch._inductor.config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache

from paritas.core.compiled.passes import PassChecks

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Compile graphs down to their kernels, which then only fill their results with zeros.

    Passes are checked on inputs of their own while a graph is compiled, so what a kernel computes
    is of no account there, and building it in C++ takes nearly all the time. To write it with
    vectors too takes most of the rest.
    """

    def kernel(_: Any, argtypes: list[str], *rest: Any, **options: Any) -> Any:
        del rest, options

        def fill(*args: Any) -> None:
            for kind, arg in zip(argtypes, args, strict=True):
                if kind.endswith("*") and not kind.startswith("const"):
                    arg.zero_()

        return fill

    try:
        with (
            mock.patch.object(AsyncCompile, "cpp_pybinding", kernel),
            torch._inductor.config.patch({"cpp.simdlen": 1}),
        ):
            yield
    finally:
        PyCodeCache.cache_clear()  # no other test may be given code with such kernels


def checked(function: Any, *args: Any, **settings: Any) -> PassChecks:
    """Compile and run, forward and backward, with every pass checked."""
    checks = PassChecks()
    with torch._inductor.config.patch(settings), without_kernels(), checks.watching():
        y = torch.compile(function)(*args)
        if y.requires_grad:
            y.sum().backward()
    return checks


def inputs(*shape: int, count: int = 1) -> list[torch.Tensor]:
    return [torch.randn(*shape, requires_grad=True) for _ in range(count)]
