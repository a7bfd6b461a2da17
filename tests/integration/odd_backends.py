"""Backends for `torch.compile` that run the captured graph and then do something of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Change = Callable[[Callable[..., Any], Sequence[Any], int], Any]


def backend_that(change: Change) -> Callable[..., Any]:
    """A backend whose code calls `change` with the graph, its arguments and the call's number."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        del inputs
        calls = 0

        def run(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return change(graph, args, calls - 1)

        return run

    return compile_graph


def on_results(change: Callable[[Tensor], Tensor], first: int = 0) -> Callable[..., Any]:
    """A backend that changes each result, from one call on."""

    def apply(graph: Callable[..., Any], args: Sequence[Any], call: int) -> Any:
        results = graph(*args)
        return tuple(map(change, results)) if call >= first else results

    return backend_that(apply)
