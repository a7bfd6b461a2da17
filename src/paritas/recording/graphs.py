"""A captured graph run node by node in eager, every node recorded."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.fx import Interpreter, Node

from paritas._torch.graphs import as_traced, copy_graph, placeholders, provenance
from paritas._torch.naming import lowered_input_names
from paritas._torch.random_twins import use_twins
from paritas.dumps.records import Site
from paritas.recording.observation import observe_once

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.fx import GraphModule

    from paritas._torch.inductor import LoweredGraph
    from paritas.dumps.records import Phase, Source
    from paritas.recording.session import Session

__all__ = ["NodeSites", "RecordedGraph"]


class NodeSites:
    """The sites of a graph's nodes: what a record of each begins with.

    Attributes:
        graph: name of the graph.
        phase: whether it computes gradients.
    """

    def __init__(
        self,
        module: GraphModule,
        graph: str,
        source: Source,
        captured: list[str],
        *,
        is_backward: bool,
    ) -> None:
        """`captured` are the names of the inputs of the captured graph it comes from."""
        self.graph = graph
        self.phase: Phase = "backward" if is_backward else "forward"
        self._source: Source = source
        self._nodes = {node.name: node for node in module.graph.nodes}
        names = lowered_input_names(module, captured)
        self._inputs = {
            node.name: name for node, name in zip(placeholders(module), names, strict=True)
        }

    @functools.cache  # noqa: B019  (lives as long as its graph)
    def of(self, name: str) -> Site:
        """The site of a node's value."""
        if name in self._inputs:
            given = self._inputs[name]
            return self._site(name, op="placeholder", module="" if given == name else given)
        found = provenance(self._nodes[name])
        return self._site(
            name, op=found.operator, module=found.module, line=found.source, code=found.code
        )

    def _site(self, name: str, op: str, module: str, line: str = "", code: str = "") -> Site:
        return Site(
            source=self._source,
            level="node",
            phase=self.phase,
            graph=self.graph,
            name=name,
            nodes=(name,),
            op=op,
            module=module,
            line=line,
            code=code,
        )


class RecordedGraph:
    """Takes its arguments in a list and empties it, as compiled code does."""

    def __init__(
        self, lowered: LoweredGraph, session: Session, graph: str, captured: list[str], entry: Any
    ) -> None:
        """`entry` is what a step begins with: the user's function that was compiled."""
        # On the instance, where torch's own wrappers around it look for it.
        self._boxed_call = True
        self.module = copy_graph(lowered.module)
        self.session = session
        self.sites = NodeSites(
            lowered.module, graph, "fx", captured, is_backward=lowered.is_backward
        )
        self._entry = entry
        self._observed = False
        use_twins(self.module)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the graph, and record it where that is wanted."""
        if self.sites.phase == "forward":
            self.session.enter(self._entry)
        given = list(args)
        args.clear()
        with as_traced():
            if not self.session.active:
                return self.module.forward(*given)  # type: ignore[no-any-return]
            if self._observed:
                return self._record(given)
            self._observed = True
            label = f"{self.sites.graph} {self.sites.phase}"
            results, seen = observe_once(
                label, self.module.forward, self._record, given, changes=range(len(given))
            )
            self.session.observed(seen)
            return results

    def _record(self, given: list[Any]) -> Sequence[Any]:
        call = self.session.next_call(f"{self.sites.graph} {self.sites.phase}")
        results: Sequence[Any] = _Recorder(self.module, self.session, self.sites, call).run(*given)
        return results


class _Recorder(Interpreter):
    def __init__(self, module: GraphModule, session: Session, sites: NodeSites, call: int) -> None:
        super().__init__(module)
        self._session = session
        self._sites = sites
        self._call = call

    def run_node(self, n: Node) -> Any:
        if n.op in {"output", "get_attr"}:
            return super().run_node(n)
        site = msgspec.structs.replace(self._sites.of(n.name), call=self._call)
        if n.op != "placeholder":
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            # Before it runs: it may write to them.
            for place, value in arguments(args, kwargs):
                given = msgspec.structs.replace(site, side="input", position=place)
                if self._session.wants(given):
                    made_by = producer(n, place)
                    nodes = (made_by,) if made_by else ()
                    self._session.put(msgspec.structs.replace(given, nodes=nodes), value)
        result = super().run_node(n)
        if isinstance(result, list | tuple):
            for position, value in enumerate(result):
                self._put(msgspec.structs.replace(site, position=str(position)), value)
        else:
            self._put(site, result)
        return result

    def _put(self, site: Site, value: Any) -> None:
        if self._session.wants(site):
            self._session.put(site, value)


def producer(node: Node, place: str) -> str:
    """The node that made the argument at a place; empty where it is no node's value."""
    first, *inner = place.split(".")
    found: Any = node.kwargs.get(first)
    if first.isdecimal():
        found = node.args[int(first)]
    for key in inner:
        # A node of several values is taken apart only where it runs.
        if not isinstance(found, list | tuple):
            break
        found = found[int(key)]
    return found.name if isinstance(found, Node) else ""


def arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each argument of an operator with its place: `0`, `1.2` within a list, or its name."""
    for place, value in (*enumerate(args), *kwargs.items()):
        holds_tensors = isinstance(value, list | tuple) and any(
            isinstance(item, torch.Tensor) for item in value
        )
        if holds_tensors:
            yield from ((f"{place}.{inner}", item) for inner, item in enumerate(value))
        else:
            yield str(place), value
