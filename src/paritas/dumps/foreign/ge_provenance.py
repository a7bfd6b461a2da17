"""Which nodes of the captured graph a tensor of the graph engine stands for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paritas.dumps.foreign.ge_graphs import fx_node

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paritas.dumps.foreign.ge_graphs import GeGraph, GeOp, GraphKind

__all__ = ["Fusion", "Nodes", "Provenance"]

# In this order they are asked.
_KINDS: tuple[GraphKind, ...] = ("original", "optimized", "other")


@dataclasses.dataclass(frozen=True)
class Fusion:
    """What an operator of a dump is made of.

    Attributes:
        graph: the graph in which its parts were found.
        parts: operators of that graph, in order; one where nothing was fused.
    """

    graph: GeGraph
    parts: tuple[GeOp, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the captured graph whose values the parts compute, in order."""
        names = (fx_node(one.fx_name) for part in self.parts for one in part.outputs)
        return tuple(dict.fromkeys(name for name in names if name))


@dataclasses.dataclass(frozen=True)
class Nodes:
    """What one tensor stands for.

    Attributes:
        names: nodes of the captured graph, in order; the last is the tensor's value.
        exact: whether it is known to be that value.
    """

    names: tuple[str, ...] = ()
    exact: bool = False


class Provenance:
    """Answers for the operators of one model on one rank."""

    def __init__(self, graphs: Sequence[GeGraph], model: str, op_names: Iterable[str]) -> None:
        """`graphs` are those of the rank; `op_names` tell which of several belongs to the model."""
        names = list(dict.fromkeys(op_names))
        self.unclear: list[str] = []
        chosen = [self._choose(graphs, kind, model, names) for kind in _KINDS]
        self._graphs = [graph for graph in chosen if graph is not None]
        self._fusions: dict[str, Fusion | None] = {}

    def fusion(self, op_name: str) -> Fusion | None:
        """What an operator is made of, where a graph tells."""
        if op_name not in self._fusions:
            self._fusions[op_name] = self._told(op_name) or self._spelled(op_name)
        return self._fusions[op_name]

    def output(self, op_name: str, index: int, count: int) -> Nodes:
        """What the n-th of so many results stands for: the last part has computed it."""
        fusion = self.fusion(op_name)
        if fusion is None:
            return Nodes()
        outputs = fusion.parts[-1].outputs
        own = fx_node(outputs[index].fx_name) if index < len(outputs) == count else ""
        if not own:
            return Nodes(fusion.nodes)
        return Nodes((*(name for name in fusion.nodes if name != own), own), exact=True)

    def argument(self, op_name: str, index: int, count: int) -> Nodes:
        """What the n-th of so many arguments stands for: it comes from outside of the parts."""
        fusion = self.fusion(op_name)
        if fusion is None:
            return Nodes()
        sources = fusion.graph.outside(fusion.parts)
        if len(sources) != count:
            # What two parts both take, the whole may take once.
            sources = list(dict.fromkeys(sources))
        if len(sources) != count:
            return Nodes()
        producer, result = sources[index]
        own = fx_node(fusion.graph.fx_name(producer, result))
        if own:
            return Nodes((own,), exact=True)
        found = fusion.graph.find(producer)
        # What the program is given is called after the placeholder.
        return Nodes((producer,)) if found is not None and found.type == "Data" else Nodes()

    def _told(self, op_name: str) -> Fusion | None:
        """The parts as a graph lists them."""
        found = (graph.find(op_name) for graph in self._graphs)
        originals = next((op.originals for op in found if op is not None and op.originals), ())
        for graph in self._graphs if originals else ():
            parts = [graph.find(name) for name in originals]
            known = tuple(part for part in parts if part is not None)
            if len(known) == len(parts):
                return Fusion(graph, known)
        return None

    def _spelled(self, op_name: str) -> Fusion | None:
        """The parts as the name of the operator spells them."""
        for graph in self._graphs:
            parts = graph.split(op_name)
            if parts:
                return Fusion(graph, parts)
        return None

    def _choose(
        self, graphs: Sequence[GeGraph], kind: GraphKind, model: str, names: list[str]
    ) -> GeGraph | None:
        """Of the graphs of a kind, the one that the model was made of."""
        candidates = [graph for graph in graphs if graph.kind == kind]
        if len(candidates) < 2:  # noqa: PLR2004  (there is a choice among two)
            return candidates[0] if candidates else None
        named = [one for one in candidates if one.label == model]
        named = named or [one for one in candidates if f"_{one.label}_" in f"_{model}_"]
        if len(named) == 1:
            return named[0]
        scores = [sum(bool(graph.split(name)) for name in names) for graph in candidates]
        best = max(scores)
        if best and scores.count(best) == 1:
            return candidates[scores.index(best)]
        if best:
            told = ", ".join(graph.path.name for graph in candidates[:3])
            self.unclear.append(
                f"model {model!r} may have been made of any of {scores.count(best)} graphs "
                f"({told}): its operators are not traced to nodes"
            )
        return None
