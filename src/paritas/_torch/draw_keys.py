"""Which random numbers the nodes of a graph draw, so that two graphs can be given the same ones.

A node that draws has a key, by default its name, and its numbers are made from the key alone. When
a pass puts one drawing node in another's place, the new one inherits the key. Inductor's own random
operators take a seed that another node made: there the key is the seed's, and the numbers depend on
the value that arrives, so that a draw wired to another's seed is seen.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor.inductor_prims  # defines the operators below
from torch._ops import HigherOrderOperator, OpOverload

from paritas._torch import attention
from paritas._torch.operators import traits

if TYPE_CHECKING:
    from torch.fx import Node

    from paritas._torch.frozen import FrozenGraph

    Keys = dict[str, str]

PRIMS = torch.ops.prims
SAVE_STATE, WITH_STATE = "run_and_save_rng_state", "run_with_rng_state"
GRAPH_SAFE = "graphsafe_run_with_rng_state"
# What makes seeds, one or many; the eager ones are there for CUDA alone, and in a newer torch.
SEED, SEEDS = PRIMS.inductor_seed.default, PRIMS.inductor_seeds.default
OFFSET = getattr(PRIMS, "inductor_rand_eager_offset", None)
OFFSETS = getattr(PRIMS, "inductor_rand_eager_offsets", None)
LOOKUP = PRIMS.inductor_lookup_seed.default
RANDOM, RANDINT = PRIMS.inductor_random.default, PRIMS.inductor_randint.default
# Words in the names of torch's functions and methods that draw.
_DRAWING = frozenset(
    """
    rand dropout bernoulli normal multinomial uniform exponential poisson cauchy geometric rrelu
    gumbel scaled_dot_product
    """.split()  # noqa: SIM905
)


@dataclasses.dataclass
class Draw:
    """A node that gives random numbers.

    Attributes:
        path: its name, behind the names of the nodes it runs in.
        kind: what is drawn, and of which shape.
        source: path of what decides the numbers: its own, or that of a seed.
        key: what its numbers are made from.
        reaches: names of the nodes that stay and that its numbers flow into.
    """

    path: str
    kind: tuple[str, str]
    source: str
    key: str = ""
    reaches: frozenset[str] = frozenset()


def value_of(key: str) -> int:
    """The seed that a key stands for."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def may_draw(target: Any) -> bool:
    """Whether calling this may draw from torch's own generators."""
    if isinstance(target, OpOverload):
        return traits(target).random
    return not isinstance(target, HigherOrderOperator)


def following_keys(before: FrozenGraph, keys: Keys, after: FrozenGraph) -> Keys:
    """The keys of a graph that was made from another, whose keys are known."""
    old, new = _draws(before), _draws(after)
    gone = {path: draw for path, draw in old.items() if path not in new}
    come = {path: draw for path, draw in new.items() if path not in old}
    _note_reaches(before, gone, {node.name for node in after.nodes})
    _note_reaches(after, come, {node.name for node in before.nodes})
    known = {draw.source for draw in old.values()}
    result: Keys = {}
    for path, draw in new.items():
        if draw.source in known:
            result[draw.source] = keys.get(draw.source, draw.source)
            continue
        partner = old.get(path) or _partner(draw, gone)
        if partner is not None:
            gone.pop(partner.path, None)
            # The first draw of a seed decides: a second one that shares it gets the same numbers.
            result.setdefault(draw.source, keys.get(partner.source, partner.source))
    return result


def draws_of(graph: FrozenGraph, keys: Keys) -> list[Draw]:
    """The draws of a graph, in order, with the key of each."""
    draws = list(_draws(graph).values())
    for draw in draws:
        draw.key = keys.get(draw.source, draw.source)
    return draws


def _partner(draw: Draw, gone: dict[str, Draw]) -> Draw | None:
    """The vanished draw whose place a new one takes: of its kind, and flowing the same way."""
    (what, shape), best = draw.kind, None
    most = (False, False, -1)
    for old in gone.values():
        same = old.kind[1] == shape or "" in {old.kind[1], shape}
        likeness = (same, old.kind[0] == what, len(old.reaches & draw.reaches))
        if any(likeness[:2]) and likeness > most:
            best, most = old, likeness
    return best


def _draws(graph: FrozenGraph, prefix: str = "") -> dict[str, Draw]:
    found: dict[str, Draw] = {}
    for node in graph.nodes:
        path = f"{prefix}{node.name}"
        for name, body in graph.bodies(node):
            found |= _draws(body, f"{path}/{name}/")
        kind = _drawn_kind(node)
        source = _source(node, prefix) if kind else ""
        if kind and source:
            shape = _shape(node) if node.target not in attention.FORWARD else _mask(node)
            found[path] = Draw(path, (kind, shape), source)
    return found


def _drawn_kind(node: Node) -> str:
    """What a node draws, in a word; empty if it does not."""
    if node.op in {"placeholder", "output", "get_attr"}:
        return ""
    target: Any = node.target
    if isinstance(target, HigherOrderOperator):
        name = target.name()
        op: Any = node.args[0] if name in {SAVE_STATE, GRAPH_SAFE} else None
        return traits(op).name if isinstance(op, OpOverload) else ""
    if target is RANDOM:
        return str(node.args[2])
    if target is RANDINT:
        return "randint"
    if target in attention.FORWARD:
        return "rand"
    if target in attention.BACKWARD:
        return ""  # it is handed what the forward pass drew
    if isinstance(target, OpOverload):
        makes_seeds = target in {SEED, SEEDS} or _is_offset(target)
        return traits(target).name if traits(target).random and not makes_seeds else ""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name if any(word in name.lower() for word in _DRAWING) else ""


def _source(node: Node, prefix: str) -> str:
    """What decides a draw's numbers; empty if they come from outside of the graph."""
    if node.target in {RANDOM, RANDINT}:
        seed: Any = node.args[1 if node.target is RANDOM else 3]
        index: Any = ""
        if seed.target in {LOOKUP, torch.ops.aten.select.int}:
            seed, index = seed.args[0], f"[{seed.args[-1]}]"
        made = seed.target in {SEED, SEEDS} or _is_offset(seed.target)
        return f"{prefix}{seed.name}{index}" if made else ""
    if isinstance(node.target, HigherOrderOperator) and node.target.name() == GRAPH_SAFE:
        state: Any = node.kwargs.get("rng_state")
        return f"{prefix}{state.name}"
    return f"{prefix}{node.name}"


def _note_reaches(graph: FrozenGraph, draws: dict[str, Draw], stay: set[str]) -> None:
    """Follow each draw through the nodes that the other graph does not have."""
    by_name = {node.name: node for node in graph.nodes}
    for draw in draws.values():
        pending = list(by_name[draw.path.partition("/")[0]].users)
        seen: set[str] = set()
        while pending:
            user = pending.pop()
            if user.name in seen:
                continue
            seen.add(user.name)
            if user.name not in stay:
                pending += user.users
        draw.reaches = frozenset(seen & stay)


def _shape(node: Node) -> str:
    value = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return str(tuple(map(str, value.shape))) if isinstance(value, torch.Tensor) else ""


def _mask(node: Node) -> str:
    """The shape of the dropout mask of attention."""
    query, key = (getattr(arg, "meta", {}).get("val") for arg in node.args[:2])
    if not isinstance(query, torch.Tensor) or not isinstance(key, torch.Tensor):
        return ""
    return str((*map(str, query.shape[:-1]), str(key.shape[-2])))


def _is_offset(target: Any) -> bool:
    packet = getattr(target, "overloadpacket", None)
    return packet is not None and packet in {OFFSET, OFFSETS}
