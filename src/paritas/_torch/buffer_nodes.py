"""Which nodes of a graph a buffer of the compiled code stands for.

Inductor rewrites the graph before it makes buffers of it. What each new node replaced is noted as
it happens, so that a buffer can be named after the nodes that the graph had when it came.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.graphs import is_view, node_traits
from paritas._torch.passes import POST_GRAD

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule, Node

    from paritas._torch.variables import Held
    from paritas._torch.wrapper_lines import Lines, Unit


class Lineage:
    """Follows a graph through the passes after the gradient, as a listener of those.

    Attributes:
        rewritten: the graph as it was lowered, once known.
    """

    def __init__(self, module: GraphModule) -> None:
        """`module` is the graph before them, which stays as it is."""
        self.rewritten: GraphModule | None = None
        self._before = {node.name: node for node in module.graph.nodes}
        self._order = {name: index for index, name in enumerate(self._before)}
        self._replaced: dict[str, list[str]] = {}
        self._depth = 0

    # --- while the passes run -----------------------------------------------------------------

    def enter_stage(
        self, stage: str, module: GraphModule, constants: dict[str, Tensor] | None = None
    ) -> None:
        """The first stage is that of the graph itself; those within are of its branches."""
        if self._depth == 0 and stage == POST_GRAD and self.rewritten is None:
            self.rewritten = module
            module._register_replace_node_hook(self._note)
        self._depth += 1

    def leave_stage(self, module: GraphModule) -> None:
        """See `enter_stage`."""
        self._depth -= 1
        if self._depth == 0 and self.rewritten is not None:
            self.rewritten._unregister_replace_node_hook(self._note)

    def abandon_stage(self) -> None:
        """See `enter_stage`."""
        self._depth -= 1

    def enter_pass(self, name: str, module: GraphModule) -> None:
        """Passes are all alike here."""

    def leave_pass(self, module: GraphModule) -> None:
        """Passes are all alike here."""

    def split(self, outputs: int, forward: GraphModule, backward: GraphModule) -> None:
        """Nothing is split after the gradient."""

    def _note(self, old: Node, new: str, user: Node) -> None:
        before = self._replaced.setdefault(new, [])
        if old.name not in before:
            before.append(old.name)

    # --- afterwards ---------------------------------------------------------------------------

    def is_known(self, node: Any) -> bool:
        """Whether a node is one of the lowered graph, not of a branch within."""
        return self.rewritten is not None and node.graph is self.rewritten.graph

    def given(self) -> dict[str, str]:
        """The inputs and constants of the graph, as Inductor calls them, with their nodes."""
        given = {"placeholder", "get_attr"}
        return {str(node.target): node.name for node in self._before.values() if node.op in given}

    def same_value(self, node: Node) -> str | None:
        """The node before the passes that has the value of one after them."""
        node = _computed(node)
        if node.name in self._before:
            return node.name if _alike(node, self._before[node.name]) else None
        for name in reversed(self._ancestors(node.name)):
            # Where the old one is still there, the new one was put after it, not in its place.
            if name not in self._alive and _alike(node, self._before[name]):
                return name
        return None

    def origins(self, node: Node) -> list[str]:
        """The nodes before the passes that one after them comes from."""
        node = _computed(node)
        if node.name in self._before:
            return [node.name]
        return self._ancestors(node.name)

    def in_order(self, names: set[str]) -> list[str]:
        """As they stood in the graph."""
        return sorted(names, key=self._order.__getitem__)

    def leading_to(self, name: str, within: set[str], until: set[str]) -> set[str]:
        """What is computed among some nodes, or was rewritten away, on the way to one of them."""
        found: set[str] = set()
        waiting = [self._before[name]]
        while waiting:
            node = waiting.pop()
            skipped = node.op in {"placeholder", "get_attr"} or node.name in until
            if node.name in found or (skipped and node.name != name):
                continue
            inside = node.name == name or node.name in within or node.name not in self._alive
            if not inside and not is_view(node):
                continue
            found.add(node.name)
            waiting += node.all_input_nodes
        return found

    @functools.cached_property
    def _alive(self) -> set[str]:
        if self.rewritten is None:
            return set()
        return {node.name for node in self.rewritten.graph.nodes}

    def _ancestors(self, name: str, seen: frozenset[str] = frozenset()) -> list[str]:
        found: list[str] = []
        for old in self._replaced.get(name, ()):
            if old in self._before:
                found.append(old)
            elif old not in seen:
                found += self._ancestors(old, seen | {name})
        return found


@dataclasses.dataclass(frozen=True)
class Standing:
    """What a buffer stands for.

    Attributes:
        nodes: of the graph, in its order.
        exact: the one whose value it is, if known.
    """

    nodes: tuple[str, ...] = ()
    exact: str | None = None


class Naming:
    """Names the buffers of one compile, kernel by kernel in the order in which they run."""

    def __init__(self, lineage: Lineage, lines: Lines) -> None:
        """Both as the compile left them."""
        self._lineage = lineage
        self._lines = lines
        self._done: set[str] = set()
        # What the operators that are called as they are read, and the nodes they stand for.
        self._called: dict[str, set[Node]] = {}
        for unit in lines.units:
            for leaf in unit.leaves():
                if leaf.is_extern():
                    for held in unit.reads:
                        self._called.setdefault(held.name, set()).update(self._origins(leaf.node))

    def name(self, unit: Unit) -> list[Standing]:
        """What each buffer that a kernel writes stands for."""
        within = self._within(unit)
        standing = [self._standing(held, within) for held in unit.writes]
        self._done |= {one.exact for one in standing if one.exact is not None}
        return standing

    def of_kernel(self, unit: Unit) -> tuple[str, ...]:
        """The nodes that a kernel stands for as a whole."""
        return tuple(self._lineage.in_order(self._within(unit)))

    def _within(self, unit: Unit) -> set[str]:
        """The nodes computed inside a kernel; within a branch, the node that has the branch."""
        found: set[str] = set()
        for leaf in unit.leaves():
            nodes = self._origins(leaf.node)
            # What an operator that is called as it is was given, was computed before.
            found |= self._names(_sinks(nodes) if leaf.is_extern() else nodes)
        if not found and unit.parent is not None:
            return self._within(unit.parent)
        return found

    def _standing(self, held: Held, within: set[str]) -> Standing:
        exact = self._exact(held)
        own = {exact} if exact is not None else self._names(self._origins(held.ir)) or within
        if not own:
            return Standing()
        last = self._lineage.in_order(own)[-1]
        nodes = self._lineage.leading_to(last, within, self._done)
        return Standing(tuple(self._lineage.in_order(nodes)), exact)

    def _origins(self, ir: Any) -> set[Node]:
        nodes = getattr(ir, "origins", None) or ()
        return {node for node in nodes if self._lineage.is_known(node)}

    def _names(self, nodes: set[Node]) -> set[str]:
        return {name for node in nodes for name in self._lineage.origins(node)}

    def _exact(self, held: Held) -> str | None:
        """The node whose value a buffer holds, where Inductor's word for it can be trusted."""
        writes = self._lines.mutated.get(held.variable, [])
        if held.name != held.variable:
            node = self._writer(held) if writes and writes[-1] == held.name else None
        elif writes:
            return None  # it is called after what is written into it later
        else:
            node = held.ir.get_origin_node() or self._argument(held)
        if node is None or not self._lineage.is_known(node) or not _fits(held, node):
            return None
        return self._lineage.same_value(node)

    def _writer(self, held: Held) -> Node | None:
        """The node that writes into another's memory, the whole of it."""
        origins = self._origins(held.ir)
        named = held.place.get_origin_node()
        if named is not None and _computed(named) in origins:
            return _computed(named)
        found = [
            node
            for node in origins
            if node.op == "call_function"
            and (kind := node_traits(node)) is not None
            and 0 in kind.mutates
            and getattr(node.args[0], "name", "") == held.variable
        ]
        return found[0] if len(found) == 1 else None

    def _argument(self, held: Held) -> Node | None:
        """A value that was laid out anew for an operator that is called as it is."""
        nodes = self._origins(held.ir)
        callers = _sinks(nodes)
        if len(callers) != 1 or not callers <= self._called.get(held.name, set()):
            return None
        (caller,) = callers
        values = _sinks(nodes - callers)
        if len(values) != 1 or not values <= set(caller.all_input_nodes):
            return None
        return next(iter(values))


def _sinks(nodes: set[Node]) -> set[Node]:
    """Those that none of the others is computed from."""
    return {node for node in nodes if not any(user in nodes for user in node.users)}


# What gives back what it is given, with its values.
_SAME = {"prims.inductor_force_stride_order.default", "aten.alias.default", "aten.detach.default"}


def _computed(node: Node) -> Node:
    """The node that computes the value of one which only hands it on."""
    while str(node.target) in _SAME:
        node = node.all_input_nodes[0]
    return node


def _alike(new: Node, old: Node) -> bool:
    mine, theirs = new.meta.get("val"), old.meta.get("val")
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return False
    return mine.dtype is theirs.dtype and _texts(mine.shape) == _texts(theirs.shape)


def _fits(held: Held, node: Node) -> bool:
    """Whether a buffer has the shape and dtype of a node's value."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    memory = held.ir if held.place is None else held.place
    return memory.get_dtype() is value.dtype and _texts(memory.get_size()) == _texts(value.shape)


def _texts(sizes: Any) -> list[str]:
    return [str(getattr(getattr(size, "node", None), "expr", size)) for size in sizes]
