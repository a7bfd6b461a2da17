"""Run a frozen graph node by node, with the random numbers that its keys say.

Everything runs on the CPU: inputs are made up, and an index out of range there is an error, while
on a GPU it would end the process. Collectives are played by one rank that stands for all.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

from paritas._torch import attention
from paritas._torch.draw_keys import (
    GRAPH_SAFE,
    OFFSET,
    OFFSETS,
    RANDINT,
    RANDOM,
    SAVE_STATE,
    SEED,
    SEEDS,
    WITH_STATE,
    may_draw,
    value_of,
)
from paritas._torch.frozen import FrozenGraph, UnplayableError, concrete, note_sizes
from paritas._torch.indexing import in_bounds
from paritas._torch.lifting import WIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.fx import Node

ATEN = torch.ops.aten
# Where the branch of a higher-order operator stands among its arguments, and where its own begin.
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
_UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted"}
_UNINITIALISED |= {"new_empty", "new_empty_strided"}
# What is said or asserted of values is no part of what is computed.
_IGNORED = ("_assert", "sym_constrain", "_check", "_print", "print")
# What these do to tensors on made-up inputs may reach beyond them.
_UNSAFE = ("triton_kernel_wrapper",)
_LARGEST_SEED = 2**62 - 1
_COLLECTIVES = {"_c10d_functional", "_c10d_functional_autograd"}


@dataclasses.dataclass(frozen=True)
class Stream:
    """Stands for a generator that is handed to the graph."""

    key: str


@dataclasses.dataclass(frozen=True)
class Unsized:
    """An input whose size is known only when the graph is half run."""

    make: Callable[[dict[Any, int]], Tensor]


def replay(
    graph: FrozenGraph, inputs: Sequence[Any], keys: dict[str, str], *, wide: bool = False
) -> Any:
    """Run a graph on inputs that it may write to; `wide` in float64, under a lifting mode."""
    return _Player(keys, wide=wide).play(graph, inputs)


@dataclasses.dataclass
class _Body:
    """A branch, called as a higher-order operator calls it."""

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
        given = iter(inputs)
        with _closing() as entered:
            for node in graph.nodes:
                if node.op == "placeholder":
                    values[node] = next(given)
                    note_sizes(node, values[node], self.sizes)
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
                target, args = _called(graph, node, args)
                name = _name(node.target)
                values[node] = self._run(target, name, args, kwargs, here)
                note_sizes(node, values[node], self.sizes)
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
            if isinstance(value, _Body):  # its draws are named after the node that runs it, too
                value = dataclasses.replace(value, path=f"{here}/{value.path}")
            return value
        if isinstance(leaf, torch.device):
            return torch.device("cpu") if leaf.type != "meta" else leaf
        return concrete(leaf, self.sizes)

    def _attribute(self, graph: FrozenGraph, target: str) -> Any:
        value = graph.attributes[target]
        if isinstance(value, FrozenGraph):
            return _Body(self, value, f"{target}/")
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            # A copy: the graph may write to it, and it is the user's own.
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
            kwargs = {**kwargs, "generator": None}  # it is the user's own
        args = in_bounds(name, args)
        if may_draw(target):
            result = self._drawn(target, args, kwargs, self._value(path))
        else:
            result = target(*args, **kwargs)
        if result is None and name.startswith("_foreach_"):
            return args[0]  # Inductor takes what an operator wrote to for what it returned
        return _zeroed(result) if name in _UNINITIALISED else result

    def _stand_in(
        self, target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], path: str
    ) -> Any:
        """What an operator gives that is not run as it is; None for the others."""
        if target in {RANDOM, RANDINT}:
            value = _seed_value(args[1 if target is RANDOM else 3])
            return self._canonical(target, args, kwargs, value)
        if target in attention.FORWARD:
            return self._drawn(target, args, kwargs, self._value(path))
        if target in attention.BACKWARD:
            return attention.attend_backward(target, args, kwargs, self._uniform)
        if isinstance(target, OpOverload) and target.namespace in _COLLECTIVES:
            return _as_if_alone(name, args)
        if target is ATEN.view.default:
            return _viewed(*args)
        if target in {ATEN.eq.Tensor, ATEN.ne.Tensor} and _are_floats(args):
            same = args[0].floor() == args[1].floor()
            return same if target is ATEN.eq.Tensor else ~same
        return self._seeds(target, args, path)

    def _value(self, path: str) -> int:
        """The seed of a draw, another one each time that a loop comes by."""
        self.visits[path] += 1
        round_ = self.visits[path]
        key = self.keys.get(path, path)
        return value_of(key if round_ == 1 else f"{key} round {round_}")

    def _drawn(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: int) -> Any:
        drawn = self._canonical(target, args, kwargs, value)
        if drawn is not None:
            return drawn
        if target in attention.FORWARD:
            return attention.attend(target, args, kwargs, value, self._uniform)
        torch.default_generator.manual_seed(value)
        return target(*args, **kwargs)

    def _uniform(self, size: list[int], value: int) -> Tensor | None:
        return self._canonical(RANDOM, (size, None, "rand"), {}, value & _LARGEST_SEED)

    def _canonical(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: int
    ) -> Tensor | None:
        """Numbers that do not depend on which operator is asked for them, nor for which dtype."""
        generator = torch.Generator("cpu").manual_seed(value)
        dtype = kwargs.get("dtype")
        packet = getattr(target, "overloadpacket", None)
        with _disable_current_modes():
            if target is RANDOM or packet in {ATEN.rand, ATEN.randn}:
                mode = args[2] if target is RANDOM else _name(target)
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
        if name.startswith(_UNSAFE):
            message = f"{name} is not run on made-up inputs"
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
            result = self._run(effect, _name(effect), tuple(rest), kwargs, path)
            return (token, *(result if isinstance(result, tuple) else (result,)))
        return self._dense(op, args, kwargs)

    def _drawn_with_state(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], path: str
    ) -> Any:
        """A draw whose generator's state is saved, or comes from another graph."""
        if name == WITH_STATE:
            value = int.from_bytes(bytes(args[0][:8].tolist()), "little")
            return self._drawn(args[1], args[2:], kwargs, value & _LARGEST_SEED)
        if name == GRAPH_SAFE:
            stream = kwargs.pop("rng_state")
            return self._drawn(args[0], args[1:], kwargs, self._value(stream.key))
        value = self._value(path)
        state = torch.tensor(list(value.to_bytes(8, "little")), dtype=torch.uint8, device="cpu")
        return state, self._drawn(args[0], args[1:], kwargs, value)

    def _dense(self, op: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A higher-order operator as torch runs it on plain tensors."""
        kernel = op.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
        if kernel is None:
            message = f"nothing is known of how to run {op.name()}"
            raise UnplayableError(message)
        # Some refuse to run below a mode; in float64 there is no way around it.
        with contextlib.nullcontext() if self.wide else _disable_current_modes():
            return kernel(*args, **kwargs)


class _Entered:
    """What nodes entered, autocast for one, to be left even when a later node raises."""

    def __init__(self) -> None:
        self.contexts: list[tuple[Callable[..., Any], Any]] = []

    def note(self, node: Node, args: tuple[Any, ...], value: Any) -> None:
        name = _name(node.target)
        if name.startswith("_enter_"):
            module = sys.modules[str(node.target.__module__)]
            leave = getattr(module, name.replace("_enter_", "_exit_"))
            self.contexts.append((leave, value))
        elif name.startswith("_exit_"):
            self.contexts = [entry for entry in self.contexts if entry[1] is not args[0]]


@contextlib.contextmanager
def _closing() -> Iterator[_Entered]:
    entered = _Entered()
    depth = _interpreters()
    try:
        yield entered
    finally:
        while _interpreters() > depth:
            torch._C._functorch.pop_dynamic_layer_stack()
        for leave, context in reversed(entered.contexts):
            leave(context)


def _interpreters() -> int:
    """How many of functorch's transforms are entered."""
    return len(torch._C._functorch.get_interpreter_stack() or ())


def _called(graph: FrozenGraph, node: Node, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """What a node calls, and with what."""
    target: Any = node.target
    if node.op == "call_method":
        if target == "cuda":
            return torch.Tensor.cpu, args[:1]
        return getattr(args[0], target), args[1:]
    if node.op == "call_module":
        # A copy: it may count, or keep statistics, and it is the user's own.
        return copy.deepcopy(graph.attributes[target]), args
    return target, args


def _name(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target.overloadpacket.__name__)
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def _zeroed(result: Any) -> Any:
    """Memory that nobody wrote to, the same in every run."""
    return result.zero_() if isinstance(result, torch.Tensor) else result


def _viewed(tensor: Tensor, size: list[int]) -> Tensor:
    """A view; on another device than the graph was traced for, a copy where strides differ."""
    try:
        return ATEN.view.default(tensor, size)  # type: ignore[no-any-return]
    except RuntimeError:
        return tensor.reshape(size)


def _are_floats(values: Sequence[Any]) -> bool:
    """Two floating tensors: on made-up numbers they are never equal, and what hangs on it is dead.

    Whether they are within the same whole number is as reflexive and symmetric, and both sides of
    a comparison ask it alike.
    """
    return all(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values)


def _seed_value(seed: Tensor) -> int:
    values = seed.reshape(-1).tolist()
    return int(values[0]) & _LARGEST_SEED


def _as_if_alone(name: str, args: tuple[Any, ...]) -> Any:
    """A collective among ranks that all hold the same."""
    first = args[0]
    if name in {"wait_tensor", "broadcast", "broadcast_", "all_reduce", "all_reduce_"}:
        return first
    if name == "all_gather_into_tensor":
        return torch.cat([first] * args[1])
    if name == "reduce_scatter_tensor":
        return first.chunk(args[2])[0]
    message = f"nothing is known of how one rank alone runs {name}"
    raise UnplayableError(message)
