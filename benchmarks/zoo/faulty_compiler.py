"""A compiler with one mistake at a time: a pass over the graphs of AOTAutograd, run eagerly.

A model is compiled once. Afterwards `FaultyCompiler.active` makes it wrong in one place, and None
right again, so that a fault costs no new compilation. Nothing of paritas is used here.

There are two backends. "trusted" is torch's `aot_eager_decomp_partition` with the pass put in: it
has Inductor's decompositions, and a verifier may know that it computes in the dtype of its graph.
"foreign" is a backend that nobody knows, with AOTAutograd's own operators. A `FaultyProgram` plants
the same faults in a graph that was traced elsewhere.
"""

# ruff: noqa: TID251  (a backend is built from torch's own)

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.zoo.mistakes import KINDS, Call, Place, donor_of
from torch import Tensor, fx

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a fault is planted; graphs in another dtype have the same sites.

    Attributes:
        ordinal: which of the graph's calls with this kind, operator and shape; None for all.
        size: the relative size of a fault of a kind in `SIZED`.
    """

    kind: str
    variant: str
    backward: bool
    operator: str
    shape: tuple[int, ...]
    ordinal: int | None
    size: float = dataclasses.field(default=1e-3, compare=False)


class FaultyCompiler:
    """Compiles graphs to themselves, with at most one fault."""

    def __init__(self) -> None:
        self.active: Site | None = None
        self.graphs: list[Graph] = []
        self.used = 0  # how often a run went through the fault

    def compile(self, graph: fx.GraphModule, *, backward: bool) -> Callable[[list[Any]], Any]:
        """The graph itself, or with the active fault if that fits it."""
        mine = Graph(graph, backward=backward)
        self.graphs.append(mine)

        def run(args: list[Any]) -> Any:
            given = list(args)
            args.clear()
            nodes = mine.nodes(self.active) if self.active is not None else set()
            if not nodes:
                return graph(*given)
            self.used += 1
            return _FaultyRun(graph, self.active, nodes).run(*given)

        run._boxed_call = True  # noqa: SLF001  (how torch is told)
        return run

    def sites(self) -> list[Site]:
        """All sites of the graphs so far."""
        return list(dict.fromkeys(site for graph in self.graphs for site in graph.sites))

    def backend(self, name: str) -> Any:
        """The backend to give to `torch.compile`: "trusted" or "foreign"."""
        from torch._dynamo.backends import debugging
        from torch._dynamo.backends.common import aot_autograd

        def forward(graph: fx.GraphModule, _: Any) -> Any:
            return self.compile(graph, backward=False)

        def backward(graph: fx.GraphModule, _: Any) -> Any:
            return self.compile(graph, backward=True)

        if name == "foreign":
            # Wrapped: torch's function would be known to verifiers by its module.
            compiler = aot_autograd(fw_compiler=forward, bw_compiler=backward)

            def foreign(graph: fx.GraphModule, inputs: list[Any]) -> Any:
                return compiler(graph, inputs)

            return foreign
        turns = [backward, forward]

        def next_compiler() -> Any:
            turns.reverse()
            return turns[0]

        debugging.get_nop_func = next_compiler  # it is asked for the forward one first
        return "aot_eager_decomp_partition"


class Graph:
    """A graph and the faults that fit it."""

    def __init__(self, graph: fx.GraphModule, *, backward: bool | frozenset[str]) -> None:
        """`backward` says whether it is a backward graph, or which nodes belong to that pass."""
        self.sites: dict[Site, fx.Node] = {}
        self.graph = graph
        counts: dict[Any, int] = {}
        for node in graph.graph.nodes:
            place = Place(node, backward if isinstance(backward, bool) else node.name in backward)
            if node.op != "call_function" or not place.name or not node.users:
                continue
            for name, (where, _) in KINDS.items():
                for variant in where(place):
                    what = (name, variant, place.backward, place.name, place.shape)
                    counts[what] = counts.get(what, -1) + 1
                    self.sites[Site(*what, counts[what])] = node

    def nodes(self, site: Site) -> set[fx.Node]:
        """The nodes that a fault changes."""
        if site.ordinal is not None:
            return {self.sites[site]} if site in self.sites else set()
        return {
            node
            for one, node in self.sites.items()
            if dataclasses.replace(one, ordinal=None) == site
        }


class FaultyProgram(torch.nn.Module):
    """A traced program with one fault."""

    def __init__(self, graph: Graph, site: Site) -> None:
        super().__init__()
        self.held = (graph, site)  # in a tuple: it is no submodule

    def forward(self, *given: Any) -> Any:
        """Run it."""
        graph, site = self.held
        return _FaultyRun(graph.graph, site, graph.nodes(site)).run(*given)


class _FaultyRun(fx.Interpreter):
    """One run of a graph with a fault."""

    def __init__(self, graph: fx.GraphModule, site: Site, nodes: set[fx.Node]) -> None:
        super().__init__(graph, garbage_collect_values=site.kind != "buffer_reused_too_early")
        self.site = site
        self.faulty = nodes

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, perhaps wrongly."""
        if n not in self.faulty:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        right = n.target(*args, **kwargs)
        donor = donor_of(n) if self.site.kind == "buffer_reused_too_early" else None
        value = None if donor is None else self.env[donor]
        call = Call(n.target, args, kwargs, right, value, self.site.size)
        wrong = KINDS[self.site.kind][1](call, self.site.variant)
        return _laid_out(wrong, right)


def _laid_out(wrong: Any, right: Any) -> Any:
    """The wrong result in the form of the right one: later views depend on its strides."""
    if isinstance(right, Tensor):
        if wrong.shape != right.shape:
            raise ValueError(f"the fault gives {tuple(wrong.shape)} for {tuple(right.shape)}")
        if 0 in right.stride():
            return wrong.to(right.dtype)
        return torch.empty_strided(
            right.shape, right.stride(), dtype=right.dtype, device=right.device
        ).copy_(wrong)
    if isinstance(right, list | tuple):
        return tuple(map(_laid_out, wrong, right))
    return right
