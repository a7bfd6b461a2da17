"""Calls that ask the same question are checked once: cost grows with operators, not with layers."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paritas.graphs.operators.signatures import ADDRESS, key_of
from paritas.numerics.graph_reports import Site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paritas.graphs.calls import Graph, GraphCall
    from paritas.graphs.settings import Settings

__all__ = ["Group", "calls_digest", "group_calls", "values_digest"]


@dataclasses.dataclass(frozen=True)
class Group:
    """Calls of one operator on arguments of one kind.

    Attributes:
        number: in the order of first calls, from 0.
        key: the same for the same question.
        calls: in the order of the graph.
    """

    number: int
    key: str
    calls: tuple[GraphCall, ...]

    @property
    def first(self) -> GraphCall:
        """The call that is checked for all of them."""
        return self.calls[0]

    @property
    def sites(self) -> tuple[Site, ...]:
        """Where all of them stand."""
        return tuple(
            Site(
                position=call.position,
                node=call.name,
                source=call.source,
                code=call.code,
                module=call.module,
            )
            for call in self.calls
        )


def group_calls(graph: Graph, settings: Settings) -> tuple[Group, ...]:
    """Put calls that ask the same together; every call of the graph is in one group."""
    found: dict[str, list[GraphCall]] = {}
    for call in graph.calls:
        found.setdefault(key_of(call, settings), []).append(call)
    return tuple(
        Group(number, key, tuple(calls)) for number, (key, calls) in enumerate(found.items())
    )


# --- telling one graph from another ---------------------------------------------------------------


def calls_digest(calls: Iterable[GraphCall]) -> str:
    """The same for graphs that make the same calls of the same functions in the same order."""
    digest = hashlib.sha256()
    for call in calls:
        text = repr(dataclasses.replace(call, function=None))
        digest.update(ADDRESS.sub("", text).encode(errors="surrogatepass"))
        digest.update(_code_of(call.function))
    return digest.hexdigest()


def _code_of(function: Callable[..., Any] | None) -> bytes:
    """What a function in memory does, as far as that shows: one mended meanwhile is another."""
    code = getattr(function, "__code__", None)
    if code is None:
        return b""
    constants = ADDRESS.sub("", repr(code.co_consts))
    return bytes(code.co_code) + constants.encode(errors="surrogatepass")


def values_digest(tree: Any) -> str:
    """The same for the same tensors: of sample inputs, and of the weights that they meet."""
    digest = hashlib.sha256()
    _add_values(digest, tree)
    return digest.hexdigest()


def _add_values(digest: Any, tree: Any) -> None:
    import torch

    if isinstance(tree, torch.Tensor):
        digest.update(f"{tree.dtype}{tuple(tree.shape)}".encode())
        flat = tree.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(tree, Mapping):
        for name, item in tree.items():
            digest.update(f"{name}:".encode())
            _add_values(digest, item)
    elif isinstance(tree, (list, tuple)):
        digest.update(f"{len(tree)}[".encode())
        for item in tree:
            _add_values(digest, item)
    else:
        digest.update(ADDRESS.sub("", repr(tree)).encode(errors="surrogatepass"))
