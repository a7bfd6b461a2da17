"""Run a frozen graph node by node, with the random numbers of its keys.

Everything runs on the CPU: inputs are made up, and an index out of range is an error there, while
on a GPU it would kill the process. Collectives are simulated by one rank that represents all.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import hashlib
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor.inductor_prims
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

from paritas.core.torch_private import kernels
from paritas.core.torch_private.graphs import UNINITIALISED
from paritas.core.torch_private.operators import WIDE, traits
from paritas.core.torch_private.passes import FrozenGraph, UnplayableError, concrete, record_sizes
from paritas.core.torch_private.vmapped import leaving_transforms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.fx import Node

    DrawKeys = dict[str, str]


# --- Keys of the random numbers that nodes draw ---------------------------------------------------

# A node that draws has a key, by default its name, and its numbers depend only on the key. If a
# pass replaces one drawing node by another, the new one inherits the key. Inductor's own random
# operators take a seed from another node: there the key is that of the seed, and the numbers depend
# on the seed's value, so a draw that is wired to another's seed is detected.

PRIMS = torch.ops.prims
SAVE_STATE, WITH_STATE = "run_and_save_rng_state", "run_with_rng_state"
GRAPH_SAFE = "graphsafe_run_with_rng_state"
# Operators that make one or many seeds; the eager ones exist only for CUDA, in a newer torch.
SEED, SEEDS = PRIMS.inductor_seed.default, PRIMS.inductor_seeds.default
OFFSET = getattr(PRIMS, "inductor_rand_eager_offset", None)
OFFSETS = getattr(PRIMS, "inductor_rand_eager_offsets", None)
LOOKUP = PRIMS.inductor_lookup_seed.default
RANDOM, RANDINT = PRIMS.inductor_random.default, PRIMS.inductor_randint.default
# Words in the names of torch functions and methods that draw.
_DRAWING_WORDS = frozenset(
    """
    rand dropout bernoulli normal multinomial uniform exponential poisson cauchy geometric rrelu
    gumbel scaled_dot_product
    """.split()  # noqa: SIM905
)


@dataclasses.dataclass
class RandomDraw:
    """A node that draws random numbers.

    Attributes:
        path: its name, after the names of the nodes it runs in.
        kind: what is drawn, and its shape.
        source: path of the node that decides the numbers: itself, or a seed.
        key: the key of its numbers.
        reaches: names of the remaining nodes that its numbers flow into.
    """

    path: str
    kind: tuple[str, str]
    source: str
    key: str = ""
    reaches: frozenset[str] = frozenset()


def seed_of_key(key: str) -> int:
    """The seed for a key."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def may_draw(target: Any) -> bool:
    """Whether calling this may draw from torch's generators."""
    if isinstance(target, OpOverload):
        return traits(target).random
    return not isinstance(target, HigherOrderOperator)


def carry_keys_over(before: FrozenGraph, keys: DrawKeys, after: FrozenGraph) -> DrawKeys:
    """The keys of a graph that was rewritten from another one with known keys."""
    old, new = _find_draws(before), _find_draws(after)
    gone = {path: draw for path, draw in old.items() if path not in new}
    come = {path: draw for path, draw in new.items() if path not in old}
    _note_reaches(before, gone, {node.name for node in after.nodes})
    _note_reaches(after, come, {node.name for node in before.nodes})
    sources = {draw.source for draw in old.values()}
    result: DrawKeys = {}
    for path, draw in new.items():
        if draw.source in sources:
            result[draw.source] = keys.get(draw.source, draw.source)
            continue
        partner = old.get(path) or _find_partner(draw, gone)
        if partner is not None:
            gone.pop(partner.path, None)
            # The first draw of a seed decides: a second one with this seed gets the same numbers.
            result.setdefault(draw.source, keys.get(partner.source, partner.source))
    return result


def draws_of(graph: FrozenGraph, keys: DrawKeys) -> list[RandomDraw]:
    """The draws of a graph, in order, with the key of each."""
    draws = list(_find_draws(graph).values())
    for draw in draws:
        draw.key = keys.get(draw.source, draw.source)
    return draws


def _find_partner(draw: RandomDraw, gone: dict[str, RandomDraw]) -> RandomDraw | None:
    """The removed draw that a new one replaces: of its kind, and with the same users."""
    (what, shape), best = draw.kind, None
    most = (False, False, -1)
    for old in gone.values():
        same = old.kind[1] == shape or "" in {old.kind[1], shape}
        likeness = (same, old.kind[0] == what, len(old.reaches & draw.reaches))
        if any(likeness[:2]) and likeness > most:
            best, most = old, likeness
    return best


def _find_draws(graph: FrozenGraph, prefix: str = "") -> dict[str, RandomDraw]:
    draws: dict[str, RandomDraw] = {}
    for node in graph.nodes:
        path = f"{prefix}{node.name}"
        for name, body in graph.bodies(node):
            draws |= _find_draws(body, f"{path}/{name}/")
        kind = _describe_draw(node)
        source = _find_source(node, prefix) if kind else ""
        if kind and source:
            shape = (
                _describe_shape(node)
                if node.target not in kernels.FORWARD
                else _describe_mask_shape(node)
            )
            draws[path] = RandomDraw(path, (kind, shape), source)
    return draws


def _describe_draw(node: Node) -> str:
    """The kind of draw of a node, in a word; empty if it does not draw."""
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
    if target in kernels.FORWARD:
        return "rand"
    if target in kernels.BACKWARD:
        return ""  # it gets what the forward pass drew
    if isinstance(target, OpOverload):
        makes_seeds = target in {SEED, SEEDS} or _is_offset(target)
        return traits(target).name if traits(target).random and not makes_seeds else ""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name if any(word in name.lower() for word in _DRAWING_WORDS) else ""


def _find_source(node: Node, prefix: str) -> str:
    """The node that decides a draw's numbers; empty if they come from outside the graph."""
    if node.target in {RANDOM, RANDINT}:
        seed: Any = node.args[1 if node.target is RANDOM else 3]
        index: Any = ""
        if seed.target in {LOOKUP, torch.ops.aten.select.int}:
            seed, index = seed.args[0], f"[{seed.args[-1]}]"
        is_seed = seed.target in {SEED, SEEDS} or _is_offset(seed.target)
        return f"{prefix}{seed.name}{index}" if is_seed else ""
    if isinstance(node.target, HigherOrderOperator) and node.target.name() == GRAPH_SAFE:
        state: Any = node.kwargs.get("rng_state")
        return f"{prefix}{state.name}"
    return f"{prefix}{node.name}"


def _note_reaches(graph: FrozenGraph, draws: dict[str, RandomDraw], stay: set[str]) -> None:
    """Follow each draw through the nodes that the other graph does not have."""
    by_name = {node.name: node for node in graph.nodes}
    for draw in draws.values():
        pending = list(by_name[draw.path.partition("/")[0]].users)
        visited: set[str] = set()
        while pending:
            user = pending.pop()
            if user.name in visited:
                continue
            visited.add(user.name)
            if user.name not in stay:
                pending += user.users
        draw.reaches = frozenset(visited & stay)


def _describe_shape(node: Node) -> str:
    value = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return str(tuple(map(str, value.shape))) if isinstance(value, torch.Tensor) else ""


def _describe_mask_shape(node: Node) -> str:
    """The shape of the dropout mask of attention."""
    query, key = (getattr(arg, "meta", {}).get("val") for arg in node.args[:2])
    if not isinstance(query, torch.Tensor) or not isinstance(key, torch.Tensor):
        return ""
    return str((*map(str, query.shape[:-1]), str(key.shape[-2])))


def _is_offset(target: Any) -> bool:
    packet = getattr(target, "overloadpacket", None)
    return packet is not None and packet in {OFFSET, OFFSETS}


# --- Indices brought into range -------------------------------------------------------------------

# Indices are taken modulo the length: all valid ones, including negative ones, keep their meaning.

# Operators that take (tensor, dimension, index, ...).
_INDEXED_ALONG = {"gather", "index_add", "index_copy", "index_fill", "index_select", "scatter"}
_INDEXED_ALONG |= {"scatter_add", "scatter_reduce"}
# Operators that take (tensor, one index for each dimension or None, ...).
_INDEXED_EACH = {"index", "index_put", "_unsafe_index", "_unsafe_index_put"}


def in_bounds(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an operator, with indices in range."""
    name = name.rstrip("_")
    first = args[0] if args else None
    if not isinstance(first, torch.Tensor):
        return args
    if name in _INDEXED_ALONG and len(args) > 2 and first.dim():  # noqa: PLR2004
        return (first, args[1], _wrap_index(args[2], first.shape[args[1]]), *args[3:])
    if name == "embedding" and len(args) > 1:
        return (first, _wrap_index(args[1], first.shape[0]), *args[2:])
    if name in _INDEXED_EACH and len(args) > 1 and not any(_is_mask(index) for index in args[1]):
        indices = [_wrap_index(i, size) for i, size in zip(args[1], first.shape, strict=False)]
        return (first, indices, *args[2:])
    return args


def _wrap_index(index: Any, length: int) -> Any:
    is_integer_tensor = isinstance(index, torch.Tensor) and not index.is_floating_point()
    return index.remainder(length) if is_integer_tensor and length > 0 else index


def _is_mask(index: Any) -> bool:
    """Whether this is a mask, which replaces as many indices as it has dimensions."""
    return isinstance(index, torch.Tensor) and index.dtype in {torch.bool, torch.uint8}


# --- The run --------------------------------------------------------------------------------------

ATEN = torch.ops.aten
# Positions of a higher-order operator's branch, and of the branch's first argument.
_BODY_AT = {
    "invoke_subgraph": (0, 2),
    "wrap": (0, 1),
    "tag_activation_checkpoint": (0, 1),
    "wrap_activation_checkpoint": (0, 1),
    "invoke_quant": (0, 1),
    "control_deps": (1, 2),
    "wrap_with_set_grad_enabled": (1, 2),
    "wrap_with_autocast": (4, 5),
}

# Printing and assertions are not part of the computation.
_IGNORED = ("_assert", "sym_constrain", "_check", "_print", "print")
# On made-up inputs these may write out of bounds.
_UNSAFE_HIGHER_ORDER = ("triton_kernel_wrapper",)
_LARGEST_SEED = 2**62 - 1
_COLLECTIVES = {"_c10d_functional", "_c10d_functional_autograd"}


@dataclasses.dataclass(frozen=True)
class Stream:
    """Represents a generator that is passed to the graph."""

    key: str


@dataclasses.dataclass(frozen=True)
class Unsized:
    """An input with a size that is known only while the graph runs."""

    make: Callable[[dict[Any, int]], Tensor]


def replay(
    graph: FrozenGraph, inputs: Sequence[Any], keys: dict[str, str], *, wide: bool = False
) -> Any:
    """Run a graph on inputs that it may write to; `wide`: in float64, under a lifting mode."""
    return _Player(keys, wide=wide).play(graph, inputs)


@dataclasses.dataclass
class _Branch:
    """A branch that a higher-order operator can call."""

    player: _Player
    graph: FrozenGraph
    path: str

    def __call__(self, *args: Any, **_: Any) -> Any:
        return self.player.play(self.graph, args, self.path)


class _Player:
    def __init__(self, keys: dict[str, str], *, wide: bool) -> None:
        self.keys = keys
        self.wide = wide
        self.visits: collections.Counter[str] = collections.Counter()
        self.sizes: dict[Any, int] = {}

    def play(self, graph: FrozenGraph, inputs: Sequence[Any], path: str = "") -> Any:
        values: dict[Node, Any] = {}
        uses = {node: len(node.users) for node in graph.graph.nodes}
        input_values = iter(inputs)
        with _leaving_contexts() as entered:
            for node in graph.nodes:
                if node.op == "placeholder":
                    values[node] = next(input_values)
                    record_sizes(node, values[node], self.sizes)
                    continue
                if node.op == "get_attr":
                    values[node] = self._attribute(graph, str(node.target))
                    continue
                here = f"{path}{node.name}"
                real = functools.partial(self._real, values=values, here=here)
                args = map_aggregate(node.args, real)
                kwargs = dict(map_aggregate(node.kwargs, real))
                if node.op == "output":
                    return args[0]
                target, args = _resolve_call(graph, node, args)
                name = _target_name(node.target)
                values[node] = self._run(target, name, args, kwargs, here)
                record_sizes(node, values[node], self.sizes)
                entered.note(node, args, values[node])
                for used in node.all_input_nodes:
                    uses[used] -= 1
                    if uses[used] == 0:
                        del values[used]
        message = "the graph has no output"
        raise UnplayableError(message)

    def _real(self, leaf: Any, values: dict[Node, Any], here: str) -> Any:
        if isinstance(leaf, torch.fx.Node):
            value = values[leaf]
            if isinstance(value, Unsized):
                value = values[leaf] = value.make(self.sizes)
            if isinstance(value, _Branch):  # its draws include the name of the node that runs it
                value = dataclasses.replace(value, path=f"{here}/{value.path}")
            return value
        if isinstance(leaf, torch.device):
            return torch.device("cpu") if leaf.type != "meta" else leaf
        return concrete(leaf, self.sizes)

    def _attribute(self, graph: FrozenGraph, target: str) -> Any:
        value = graph.attributes[target]
        if isinstance(value, FrozenGraph):
            return _Branch(self, value, f"{target}/")
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            # A copy: the graph may write to it, and it belongs to the user.
            wide = WIDE.get(value.dtype, value.dtype) if self.wide else value.dtype
            return value.detach().to("cpu", wide, copy=True)
        return value

    def _run(
        self, target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], path: str
    ) -> Any:
        if name.startswith(_IGNORED):
            return None
        if isinstance(target, HigherOrderOperator):
            return self._higher_order(target, args, kwargs, path)
        result = self._stand_in(target, name, args, kwargs, path)
        if result is not None:
            return result
        if "generator" in kwargs:
            kwargs = {**kwargs, "generator": None}  # it belongs to the user
        args = in_bounds(name, args)
        if may_draw(target):
            result = self._draw_numbers(target, args, kwargs, self._value(path))
        else:
            result = target(*args, **kwargs)
        if result is None and name.startswith("_foreach_"):
            return args[0]  # Inductor treats the written argument as the result
        return _zero_memory(result) if name in UNINITIALISED else result

    def _stand_in(
        self, target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], path: str
    ) -> Any:
        """The result of an operator that is simulated; None for others."""
        if target in {RANDOM, RANDINT}:
            value = _seed_value(args[1 if target is RANDOM else 3])
            return self._canonical(target, args, kwargs, value)
        if target in kernels.FORWARD:
            return self._draw_numbers(target, args, kwargs, self._value(path))
        if target in kernels.BACKWARD:
            return kernels.attend_backward(target, args, kwargs, self._uniform)
        if isinstance(target, OpOverload) and target.namespace in _COLLECTIVES:
            return _run_collective_alone(name, args)
        if target is ATEN.view.default:
            return _view_or_copy(*args)
        if target in {ATEN.eq.Tensor, ATEN.ne.Tensor} and _are_floats(args):
            same = args[0].floor() == args[1].floor()
            return same if target is ATEN.eq.Tensor else ~same
        return self._seeds(target, args, path)

    def _value(self, path: str) -> int:
        """The seed of a draw, a new one in each iteration of a loop."""
        self.visits[path] += 1
        round_ = self.visits[path]
        key = self.keys.get(path, path)
        return seed_of_key(key if round_ == 1 else f"{key} round {round_}")

    def _draw_numbers(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: int
    ) -> Any:
        drawn = self._canonical(target, args, kwargs, value)
        if drawn is not None:
            return drawn
        if target in kernels.FORWARD:
            return kernels.attend(target, args, kwargs, value, self._uniform)
        torch.default_generator.manual_seed(value)
        return target(*args, **kwargs)

    def _uniform(self, size: list[int], value: int) -> Tensor | None:
        return self._canonical(RANDOM, (size, None, "rand"), {}, value & _LARGEST_SEED)

    def _canonical(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: int
    ) -> Tensor | None:
        """Numbers that depend neither on the operator nor on the dtype."""
        generator = torch.Generator("cpu").manual_seed(value)
        dtype = kwargs.get("dtype")
        packet = getattr(target, "overloadpacket", None)
        with _disable_current_modes():
            if target is RANDOM or packet in {ATEN.rand, ATEN.randn}:
                mode = args[2] if target is RANDOM else _target_name(target)
                draw = torch.rand if mode == "rand" else torch.randn
                drawn = draw(args[0], generator=generator, dtype=torch.float32, device="cpu")
                native = torch.float32 if target is RANDOM else dtype or torch.get_default_dtype()
                return drawn.double() if self.wide else drawn.to(native)
            if target is RANDINT or packet is ATEN.randint:
                *bounds, size = args[:3] if target is RANDINT else args
                low, high = bounds if len(bounds) > 1 else (0, bounds[0])
                drawn = torch.randint(low, high, size, generator=generator, device="cpu")
                dtype = dtype or torch.int64
                return drawn.to(WIDE.get(dtype, dtype) if self.wide else dtype)
        return None

    def _seeds(self, target: Any, args: tuple[Any, ...], path: str) -> Tensor | None:
        packet = getattr(target, "overloadpacket", None)
        with _disable_current_modes():
            if target is SEED:
                return torch.tensor(self._value(path))
            if target is SEEDS:
                return torch.tensor([self._value(f"{path}[{i}]") for i in range(args[0])])
            if packet is not None and packet is OFFSET:
                return torch.tensor([self._value(path), 0])
            if packet is not None and packet is OFFSETS:
                values = [self._value(f"{path}[{i}]") for i in range(len(args[0]))]
                return torch.tensor([[value, 0] for value in values])
        return None

    def _higher_order(
        self, op: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any], path: str
    ) -> Any:
        name = op.name()
        if name in {SAVE_STATE, WITH_STATE, GRAPH_SAFE}:
            return self._drawn_with_state(name, args, kwargs, path)
        if name.startswith(_UNSAFE_HIGHER_ORDER):
            message = f"{name} cannot run on made-up inputs"
            raise UnplayableError(message)
        if name in _BODY_AT:
            body, first = _BODY_AT[name]
            return args[body](*args[first:])
        if name == "cond":
            return args[1 if bool(args[0]) else 2](*args[3])
        if name == "strict_mode":
            return args[0](*args[1])
        if name == "autograd_function_apply":
            return args[0](*args[2:])[0]
        if name == "with_effects":
            token, effect, *rest = args
            result = self._run(effect, _target_name(effect), tuple(rest), kwargs, path)
            return (token, *(result if isinstance(result, tuple) else (result,)))
        return self._dense(op, args, kwargs)

    def _drawn_with_state(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], path: str
    ) -> Any:
        """A draw with a generator state that is saved, or comes from another graph."""
        if name == WITH_STATE:
            value = int.from_bytes(bytes(args[0][:8].tolist()), "little")
            return self._draw_numbers(args[1], args[2:], kwargs, value & _LARGEST_SEED)
        if name == GRAPH_SAFE:
            stream = kwargs.pop("rng_state")
            return self._draw_numbers(args[0], args[1:], kwargs, self._value(stream.key))
        value = self._value(path)
        state = torch.tensor(list(value.to_bytes(8, "little")), dtype=torch.uint8, device="cpu")
        return state, self._draw_numbers(args[0], args[1:], kwargs, value)

    def _dense(self, op: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator as torch does on plain tensors."""
        kernel = op.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
        if kernel is None:
            message = f"paritas cannot run {op.name()}"
            raise UnplayableError(message)
        # Some refuse to run under a mode, but float64 needs one.
        with contextlib.nullcontext() if self.wide else _disable_current_modes():
            return kernel(*args, **kwargs)


class _EnteredContexts:
    """Contexts entered by nodes, such as autocast, to exit even if a later node raises."""

    def __init__(self) -> None:
        self.contexts: list[tuple[Callable[..., Any], Any]] = []

    def note(self, node: Node, args: tuple[Any, ...], value: Any) -> None:
        name = _target_name(node.target)
        if name.startswith("_enter_"):
            module = sys.modules[str(node.target.__module__)]
            leave = getattr(module, name.replace("_enter_", "_exit_"))
            self.contexts.append((leave, value))
        elif name.startswith("_exit_"):
            self.contexts = [entry for entry in self.contexts if entry[1] is not args[0]]


@contextlib.contextmanager
def _leaving_contexts() -> Iterator[_EnteredContexts]:
    entered = _EnteredContexts()
    try:
        with leaving_transforms():
            yield entered
    finally:
        for leave, context in reversed(entered.contexts):
            leave(context)


def _resolve_call(
    graph: FrozenGraph, node: Node, args: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...]]:
    target: Any = node.target
    if node.op == "call_method":
        if target == "cuda":
            return torch.Tensor.cpu, args[:1]
        return getattr(args[0], target), args[1:]
    if node.op == "call_module":
        # A copy: it may count, or keep statistics, and it belongs to the user.
        return copy.deepcopy(graph.attributes[target]), args
    return target, args


def _target_name(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target.overloadpacket.__name__)
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def _zero_memory(result: Any) -> Any:
    """Zero uninitialized memory, to make all runs equal."""
    return result.zero_() if isinstance(result, torch.Tensor) else result


def _view_or_copy(tensor: Tensor, size: list[int]) -> Tensor:
    """A view, or a copy if strides differ on another device than the traced one."""
    try:
        return ATEN.view.default(tensor, size)  # type: ignore[no-any-return]
    except RuntimeError:
        return tensor.reshape(size)


def _are_floats(values: Sequence[Any]) -> bool:
    """Whether all are floating tensors: made-up ones are never equal, so dependent code is dead.

    They are compared by their integer parts instead. That is reflexive and symmetric too, and both
    sides of a comparison do the same.
    """
    return all(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values)


def _seed_value(seed: Tensor) -> int:
    values = seed.reshape(-1).tolist()
    return int(values[0]) & _LARGEST_SEED


def _run_collective_alone(name: str, args: tuple[Any, ...]) -> Any:
    """The result of a collective among ranks that all hold the same values."""
    first = args[0]
    if name in {"wait_tensor", "broadcast", "broadcast_", "all_reduce", "all_reduce_"}:
        return first
    if name == "all_gather_into_tensor":
        return torch.cat([first] * args[1])
    if name == "reduce_scatter_tensor":
        return first.chunk(args[2])[0]
    message = f"paritas cannot simulate the collective {name} on one rank"
    raise UnplayableError(message)
