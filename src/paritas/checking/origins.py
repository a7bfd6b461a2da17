"""Where a difference starts, put together from what a node's provenance tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas._torch.graphs import Provenance, provenance
from paritas.numerics.findings import Origin, OriginKind

if TYPE_CHECKING:
    from torch.fx import Node


def node_origin(node: Node) -> Origin:
    """A single node."""
    return origin(OriginKind.NODE, node.name, provenance(node))


def origin(
    kind: OriginKind,
    name: str,
    where: Provenance | None,
    nodes: tuple[str, ...] = (),
    remedies: tuple[str, ...] = (),
) -> Origin:
    """Anything, with the place in the user's program that stands for it."""
    where = where or Provenance("", "")
    return Origin(
        kind=kind,
        name=name,
        operator=where.operator,
        module=where.module,
        source=where.source,
        code=where.code,
        nodes=nodes,
        remedies=remedies,
    )
