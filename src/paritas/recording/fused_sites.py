"""The sites of fused code: what each buffer that a kernel reads or writes is recorded under."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from paritas.dumps.records import Site

if TYPE_CHECKING:
    from paritas._torch.buffers import Buffer, Kernel, Seen
    from paritas.recording.graphs import NodeSites
    from paritas.recording.selection import Within

__all__ = ["BufferSites"]


class BufferSites:
    """Gives each buffer the name of the node it holds the value of.

    Where several buffers end with the same node, the one that is known to hold its value has the
    name, and to that of the others the buffer's is added. What a kernel reads is recorded under
    the last node of what it writes; `nodes` then tell what was read.
    """

    def __init__(self, kernels: tuple[Kernel, ...], nodes: NodeSites, order: list[str]) -> None:
        """`nodes` has the sites of the graph's nodes, `order` their names as they stand in it."""
        self._nodes = nodes
        self._order = {name: index for index, name in enumerate(order)}
        self._taken: set[str] = set()
        self._names: dict[tuple[str, str], str] = {}
        for kernel in kernels:
            for buffer in kernel.writes:
                if buffer.exact is not None:
                    self._name(buffer)
        self._readers: dict[int, tuple[str, str]] = {}
        for index, kernel in enumerate(kernels):
            for buffer in kernel.writes:
                self._name(buffer)
            self._readers[id(kernel)] = self._reader(kernel, index)
        self._sites: dict[tuple[int, str, int], Site] = {}
        self._within: dict[tuple[int, str, int], tuple[Within, ...]] = {}

    def of(self, seen: Seen) -> Site:
        """The site at which a tensor was seen."""
        key = (id(seen.kernel), seen.side, seen.position)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = self._make(seen)
        return site

    def within(self, seen: Seen) -> tuple[Within, ...]:
        """The nodes that are computed there, with their modules and operators."""
        key = (id(seen.kernel), seen.side, seen.position)
        found = self._within.get(key)
        if found is None:
            # Whoever asks for one node of a kernel wants what that kernel is given, too.
            reader = seen.kernel.nodes if seen.side == "input" else ()
            names = dict.fromkeys((*reader, *seen.buffer.nodes))
            sites = [self._nodes.of(name) for name in names if name in self._order]
            found = tuple((site.name, site.module, site.op) for site in sites)
            self._within[key] = found
        return found

    def _make(self, seen: Seen) -> Site:
        buffer, kernel = seen.buffer, seen.kernel
        if seen.side == "input":
            name, last = self._readers[id(kernel)]
        else:
            name, last = self._names[buffer.name, buffer.kernel], _last(buffer)
        return msgspec.structs.replace(
            self._about(last),
            level="buffer",
            name=name,
            side=seen.side,
            position=str(seen.position) if seen.side == "input" else "0",
            kernel=kernel.name,
            nodes=buffer.nodes,
            exact=buffer.exact is not None,
        )

    def _about(self, node: str) -> Site:
        if node:
            return self._nodes.of(node)
        return Site(
            source="fused",
            level="buffer",
            name="",
            phase=self._nodes.phase,
            graph=self._nodes.graph,
        )

    def _name(self, buffer: Buffer) -> None:
        key = (buffer.name, buffer.kernel)
        if key not in self._names:
            self._names[key] = self._free(_last(buffer), buffer.name)

    def _reader(self, kernel: Kernel, index: int) -> tuple[str, str]:
        """The name under which what a kernel reads is recorded, and the node it is about."""
        if kernel.writes:
            main = max(kernel.writes, key=lambda buffer: self._order.get(_last(buffer), -1))
            return self._names[main.name, main.kernel], _last(main)
        last = kernel.nodes[-1] if kernel.nodes else ""
        return self._free(last, f"kernel{index}"), last

    def _free(self, wanted: str, otherwise: str) -> str:
        name = wanted or otherwise
        if name in self._taken:
            name = f"{wanted}.{otherwise}" if wanted else otherwise
        self._taken.add(name)
        return name


def _last(buffer: Buffer) -> str:
    """The node that a buffer is nearest to."""
    return buffer.exact or (buffer.nodes[-1] if buffer.nodes else "")
