"""Benign rewrites: what a good compiler or kernel author does to a program, one site at a time.

All are equal in real arithmetic and none is less accurate than an implementation people ship. A
check must stay silent about each of them, whether or not it changes a bit (`changes_bits`).
"""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

from benchmarks.detection.benign_attention import ATTENTION
from benchmarks.detection.benign_contractions import CONTRACTIONS
from benchmarks.detection.benign_graphs import GRAPH_REWRITES
from benchmarks.detection.benign_norms import NORMS
from benchmarks.detection.benign_picking import PICKING
from benchmarks.detection.benign_pointwise import POINTWISE
from benchmarks.detection.benign_reductions import REDUCTIONS

from paritas.core.errors import UsageError
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.torch_private.graphs import copy_graph

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.detection.benign_kinds import Rewrite
    from torch.fx import GraphModule, Node

    from paritas.mutants.programs import FlatProgram

EVERYWHERE = "*"
MIXTURE = "mixture"
MIXTURES = 3

# By name; those of one call first, then those of the graph.
CALL_REWRITES: dict[str, Rewrite] = {
    one.name: one for one in (*CONTRACTIONS, *ATTENTION, *REDUCTIONS, *NORMS, *POINTWISE, *PICKING)
}
REWRITES: dict[str, str] = {
    **{name: one.text for name, one in CALL_REWRITES.items()},
    **{name: one.text for name, one in GRAPH_REWRITES.items()},
    MIXTURE: "every call that can be is rewritten, each in one of its ways",
}


@dataclasses.dataclass(frozen=True)
class BenignSite:
    """Where a rewrite is made.

    Attributes:
        node: the call's name, or `*` for the whole graph.
        rewrite: one of `REWRITES`.
        detail: which variant of it.
    """

    node: str
    rewrite: str
    detail: str = ""


def benign_sites(program: FlatProgram) -> list[BenignSite]:
    """Every place and way in which the program can be rewritten, in graph order; then wholes."""
    found = [site for node in program.calls for site in _sites_at(node)]
    kinds = dict.fromkeys((site.rewrite, site.detail) for site in found)
    for name, one in GRAPH_REWRITES.items():
        found += [BenignSite(node, name, detail) for node, detail in one.sites(program)]
    counts = {kind: sum((s.rewrite, s.detail) == kind for s in found) for kind in kinds}
    found += [BenignSite(EVERYWHERE, *kind) for kind, count in counts.items() if count > 1]
    if len(kinds) > 1:
        found += [BenignSite(EVERYWHERE, MIXTURE, str(number)) for number in range(MIXTURES)]
    return found


def rewrite(program: FlatProgram, site: BenignSite) -> GraphModule | None:
    """A changed copy of the program's graph, or None if the site turns out not to be one.

    Raises:
        UsageError: there is no such rewrite.
    """
    if site.rewrite not in REWRITES:
        raise UsageError(f"no benign rewrite {site.rewrite!r}; REWRITES lists them")
    module = copy_graph(program.module)
    nodes = {node.name: node for node in module.graph.nodes}
    if site.rewrite in GRAPH_REWRITES:
        done = GRAPH_REWRITES[site.rewrite].apply(module, nodes.get(site.node), site.detail)
    else:
        done = _replace(nodes, _meant(program, site))
    if not done:
        return None
    module.graph.lint()
    module.recompile()
    return module


def changes_bits(program: FlatProgram, changed: GraphModule) -> bool:
    """Whether the rewritten program gives other bits at all in the dtype it runs in."""
    expected = program.module(*program.fresh_inputs())
    found = changed(*program.fresh_inputs())
    return not all(map(bitwise_equal, expected, found))


def _sites_at(node: Node) -> list[BenignSite]:
    return [
        BenignSite(node.name, kind.name, detail)
        for kind in CALL_REWRITES.values()
        if node.target in kind.forms
        for detail in kind.forms[node.target][1](node)
    ]


def _meant(program: FlatProgram, site: BenignSite) -> Iterable[BenignSite]:
    """The single calls that a site of one call, or of all of them, stands for."""
    by_node = [sites for node in program.calls if (sites := _sites_at(node))]
    if site.rewrite == MIXTURE:
        draw = random.Random(site.detail)
        return [draw.choice(sites) for sites in by_node]
    every = [one for sites in by_node for one in sites]
    if site.node == EVERYWHERE:
        wanted = (site.rewrite, site.detail)
        return [one for one in every if (one.rewrite, one.detail) == wanted]
    return [one for one in every if one == site]


def _replace(nodes: dict[str, Node], sites: Iterable[BenignSite]) -> bool:
    """Let each call be made by the function that stands in for it."""
    done = False
    for site in sites:
        node = nodes[site.node]
        function, settings = CALL_REWRITES[site.rewrite].forms[node.target]
        node.kwargs = {**node.kwargs, **settings(node)[site.detail]}
        node.target = function
        done = True
    return done
