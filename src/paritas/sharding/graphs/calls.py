"""The calls of a graph, the values they receive, and which calls are equivalent for a check."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from paritas.core.errors import UsageError
from paritas.core.execution.subjects import Inputs
from paritas.core.numerics.bits import dtype_name
from paritas.core.numerics.random_tensors import indices, normal
from paritas.sharding.graphs.rows import CallSite
from paritas.sharding.operators.configuration import (
    TensorInfo,
    WantedCall,
    domain_of,
    generator_for,
    is_buffer,
    make_value,
)
from paritas.sharding.operators.library.registry import registration
from paritas.sharding.operators.nnscaler_functions import SUBSCRIPT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paritas.core.operators.calls import Place
    from paritas.core.placement.placement import Recipe
    from paritas.core.results.rank_backends import BackendName


# --- A graph as it was read -----------------------------------------------------------------------

# Readers fill this in; nothing here has been run. Symbolic sizes are replaced by the numbers they
# had when the graph was made.

Kind = Literal["input", "parameter", "buffer", "constant", "intermediate"]


@dataclasses.dataclass(frozen=True)
class TensorValue:
    """A tensor of the graph. The same value has the same name wherever it is used."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind = "intermediate"
    requires_grad: bool = True

    @property
    def bytes(self) -> int:
        """The memory it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class GraphCall:
    """One node of a graph.

    Attributes:
        position: in graph order, counted from 0.
        operator: the full name: `torch.nn.functional.linear`, `aten.mm.default`.
        args: with a `TensorValue` in place of each tensor, also inside lists, tuples, dicts and
            slices.
        outputs: the tensors it returns, in order.
        annotation: how the graph says it can be split, in the language of `partition.annotations`,
            or a single split; None if the graph says nothing.
        source: the user's file and line, `model.py:30`.
        code: the text of that line.
        module: path of the module that makes the call.
        function: the function called, if the graph is in memory and holds it.
        idle: why there is nothing to check, for example because it unpacks a tuple.
        obstacle: why the reader knows that it cannot be checked.
    """

    position: int
    name: str
    operator: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    outputs: tuple[TensorValue, ...] = ()
    annotation: str | Recipe | None = None
    source: str = ""
    code: str = ""
    module: str = ""
    function: Callable[..., Any] | None = None
    idle: str = ""
    obstacle: str = ""

    def tensors(self) -> Iterator[TensorValue]:
        """The input tensors, in order."""
        yield from tensor_values((self.args, dict(self.kwargs)))

    @property
    def site(self) -> CallSite:
        """Where the call is in the graph."""
        return CallSite(
            position=self.position,
            node=self.name,
            source=self.source,
            code=self.code,
            module=self.module,
        )


@dataclasses.dataclass(frozen=True)
class Graph:
    """A graph that was read.

    Attributes:
        name: where it came from, for people.
        kind: `torch.export`, `fx` or `nnscaler`.
        calls: every node that calls something, in order.
        values: inputs, parameters and buffers by name.
        state: returns the parameters, buffers and constants that the graph holds; called only when
            needed, because they may be large.
        notes: what was left out and why.
        outputs: the values that it returns, without buffers that it updates.
        names: the names in the model of parameters, buffers and constants, by those in the graph.
    """

    name: str
    kind: str
    calls: tuple[GraphCall, ...]
    values: Mapping[str, TensorValue] = dataclasses.field(default_factory=dict)
    state: Callable[[], Mapping[str, torch.Tensor]] | None = None
    notes: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)


def tensor_values(tree: Any) -> Iterator[TensorValue]:
    """The tensors of an argument, in order."""
    for item in items_in(tree):
        if isinstance(item, TensorValue):
            yield item
        elif isinstance(item, slice):
            yield from tensor_values((item.start, item.stop, item.step))


def items_in(tree: Any) -> Iterator[Any]:
    """The items of an argument that are not containers, in order."""
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for item in tree:
            yield from items_in(item)
    else:
        yield tree


def map_items(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to each item of an argument that is not a container."""
    if isinstance(tree, Mapping):
        return {key: map_items(item, change) for key, item in tree.items()}
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(map_items(item, change) for item in tree)
    if isinstance(tree, list):
        return [map_items(item, change) for item in tree]
    return change(tree)


# --- How to check a graph -------------------------------------------------------------------------

Source = Literal["declared", "library", "discover", "all"]
OPTION_SOURCES = ("declared", "library", "discover", "all")


@dataclasses.dataclass(frozen=True)
class GraphSettings:
    """How every operator of a graph is checked; see `verify_graph`.

    `memory` is the most bytes that the values of one call may take.
    """

    options: Source | None = None
    ranks: tuple[int, ...] = (2,)
    cap: int | None = None
    seed: int = 0
    strict: bool = False
    imports: tuple[str, ...] = ()
    device: str | None = None
    confirm: BackendName | None = None
    prove: bool = False
    memory: int = 4 << 30

    def __post_init__(self) -> None:
        if self.options is not None and self.options not in OPTION_SOURCES:
            known_sources = ", ".join(OPTION_SOURCES)
            raise UsageError(f"options={self.options!r} is unknown; use one of {known_sources}")
        if not self.ranks or any(type(n) is not int or n < 2 for n in self.ranks):  # noqa: PLR2004
            raise UsageError(f"ranks={self.ranks!r}: give integers of 2 or more")
        if self.cap is not None and (type(self.cap) is not int or self.cap < 1):
            raise UsageError(f"cap={self.cap!r}: give the longest dimension allowed, 1 or more")


# --- The input tensors of a call ------------------------------------------------------------------

# A graph knows shapes and dtypes. The operator's name says which values suit it: table indices, a
# positive variance, a mask.

_INDEXED_BY_LIST = {"aten.index", "aten.index_put", "torch.index_put", "torch.Tensor.index_put"}


@dataclasses.dataclass(frozen=True)
class CallValues:
    """The arguments of a call, with a tensor in place of each `TensorValue`."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def map(self, change: Callable[[Any], Any]) -> CallValues:
        """The same call with `change` applied to each value."""
        return CallValues(map_items(self.args, change), map_items(self.kwargs, change))


def values_for(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tensor_of: Callable[[TensorValue], torch.Tensor],
) -> CallValues:
    """The arguments with `TensorValue`s replaced by tensors."""
    return CallValues(args, kwargs).map(
        lambda item: tensor_of(item) if isinstance(item, TensorValue) else item
    )


def copy_values(call_values: CallValues) -> CallValues:
    """Copies that later calls do not modify; one tensor passed twice stays one."""
    copies: dict[int, torch.Tensor] = {}

    def copy(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        return copies.setdefault(id(item), item.detach().clone())

    return call_values.map(copy)


def split_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Model inputs as users pass them, split into positional and named arguments."""
    if isinstance(inputs, Inputs):
        return inputs.args, inputs.kwargs
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        return tuple(inputs), {}
    return (inputs,), {}


def on_meta(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallValues:
    """The arguments with meta tensors, for what depends on shapes alone."""

    def empty(value: TensorValue) -> torch.Tensor:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    return values_for(args, kwargs, empty)


def without_gradient_in(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> frozenset[Place]:
    """The arguments that get no gradient: the graph says so, or the operator gives none.

    A list of tensors gets gradients if any of its tensors does.
    """
    wanted_arguments = _wanted_arguments(name, args, kwargs)
    places: set[Place] = set()
    for place_of_argument, value in _places(args, kwargs):
        tensors = list(tensor_values(value))
        if tensors and (
            is_buffer(wanted_arguments, place_of_argument)
            or not any(t.requires_grad for t in tensors)
        ):
            places.add(place_of_argument)
    return frozenset(places)


def draw_values(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int
) -> CallValues:
    """Draw tensors that suit the operator, the same for the same seed.

    A value used twice is one tensor: `x * x` is not the product of two random tensors.
    """
    wanted_arguments = _wanted_arguments(name, args, kwargs)
    uses: dict[str, list[tuple[Place, str, TensorValue]]] = {}
    for (argument_place, *keys), value in tensors_by_path(args, kwargs):
        path = "".join([str(argument_place), *(f"[{key!r}]" for key in keys)])
        uses.setdefault(value.name, []).append((argument_place, path, value))
    sizes = _subscripts(name, args)
    drawn = {
        key: _draw_tensor(wanted_arguments, value_uses, sizes, seed)
        for key, value_uses in uses.items()
    }

    def tensor_of(value: TensorValue) -> torch.Tensor:
        if value.name not in drawn:
            raise UsageError(f"tensor {value.name} is inside a slice, where no value can be drawn")
        return drawn[value.name]

    return values_for(args, kwargs, tensor_of)


def _draw_tensor(
    wanted_call: WantedCall,
    uses: list[tuple[Place, str, TensorValue]],
    sizes: dict[str, int],
    seed: int,
) -> torch.Tensor:
    """Draw one tensor that meets the strictest of its uses."""
    domain_at = [(use, domain_of(wanted_call, use[0])) for use in uses]
    demanding = [use for use, domain in domain_at if domain is not normal]
    indexing = [use for use in uses if use[1] in sizes and not use[2].dtype.is_floating_point]
    argument_place, path, value = (indexing or demanding or uses)[0]
    generator = generator_for(seed, path)
    if indexing and value.dtype != torch.bool:
        return indices(0, sizes[path])(value.shape, generator).to(value.dtype)
    info = TensorInfo("shape", value.shape, value.dtype, generator=generator)
    return make_value(wanted_call, argument_place, info, seed)  # type: ignore[no-any-return]


def _wanted_arguments(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> WantedCall:
    def info(value: Any) -> TensorInfo:
        if isinstance(value, TensorValue):
            return TensorInfo("shape", value.shape, value.dtype)
        return TensorInfo("value", value)

    named = {
        key: info(value) if isinstance(value, TensorValue) else value
        for key, value in kwargs.items()
    }
    return WantedCall(name, [info(value) for value in args], named)


def _places(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Place, Any]]:
    return [*enumerate(args), *kwargs.items()]


def tensors_by_path(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], TensorValue]]:
    """Every tensor of a call, with its argument's place and the keys inside that argument."""

    def below(path: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], TensorValue]]:
        if isinstance(value, TensorValue):
            yield path, value
        elif isinstance(value, (list, tuple)):
            for at, item in enumerate(value):
                yield from below((*path, at), item)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from below((*path, key), item)

    for argument_place, value in _places(args, kwargs):
        yield from below((argument_place,), value)


def _subscripts(name: str, args: tuple[Any, ...]) -> dict[str, int]:
    """The length of the dimension that each index tensor picks from, by tensor path."""
    if not args or not isinstance(args[0], TensorValue):
        return {}
    if name == SUBSCRIPT:
        items = [(str(at), item) for at, item in enumerate(args) if at]
    elif name in _INDEXED_BY_LIST and len(args) > 1 and isinstance(args[1], (list, tuple)):
        # In such a list, None is a dimension taken whole, not a new one.
        items = [
            (f"1[{at}]", slice(None) if item is None else item) for at, item in enumerate(args[1])
        ]
    else:
        return {}
    shape = args[0].shape
    taken = sum(_dims_of(item) for _, item in items)
    index_sizes: dict[str, int] = {}
    dim = 0
    for path, item in items:
        if item is Ellipsis:
            dim += len(shape) - taken
            continue
        if isinstance(item, TensorValue) and item.dtype != torch.bool and dim < len(shape):
            index_sizes[path] = shape[dim]
        dim += _dims_of(item)
    return index_sizes


def _dims_of(item: Any) -> int:
    """The number of dimensions that one item of a subscript covers."""
    if item is None or item is Ellipsis:
        return 0
    masks = isinstance(item, TensorValue) and item.dtype == torch.bool
    return len(item.shape) if masks else 1


# --- A call as one line of text, and as a key -----------------------------------------------------

_LONGEST = 120
# The default repr of an object has its address, which differs in each process.
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


def signature_of(call: GraphCall) -> str:
    """`linear(f32[16, 8], f32[32, 8], bias=None)`, shortened if it is too long."""
    name = call.operator
    parts = name.split(".")
    # The overload of `aten.mm.default` means nothing alone.
    is_overload = name.removeprefix("torch.ops.").startswith(("aten.", "prims."))
    short = ".".join(parts[-2:]) if is_overload else parts[-1]
    arguments = [_value_text(value) for value in call.args]
    arguments += [f"{key}={_value_text(value)}" for key, value in call.kwargs.items()]
    text = f"{short}({', '.join(arguments)})"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 5]} ...)"


def _value_text(value: Any) -> str:
    if isinstance(value, TensorValue):
        dtype = _SHORT.get(value.dtype, dtype_name(value.dtype))
        return f"{dtype}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_value_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_value_text, value))
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return ":".join(
            "" if part is None else _value_text(part) for part in parts[: 2 + bool(value.step)]
        )
    if isinstance(value, torch.dtype):
        return _SHORT.get(value, str(value))
    return f"{value!r:.40}"


def key_of(call: GraphCall, settings: GraphSettings) -> str:
    """The same for calls that need the same check, and for no others.

    Value names do not count, but which arguments are the same value does.
    """
    names: dict[str, int] = {}

    def describe_value(value: Any) -> Any:
        if isinstance(value, TensorValue):
            same = names.setdefault(value.name, len(names))
            return ("tensor", same, value.shape, str(value.dtype), value.requires_grad)
        if isinstance(value, Mapping):
            return ("dict", [(str(key), describe_value(item)) for key, item in value.items()])
        if isinstance(value, (list, tuple)):
            return (type(value).__name__, [describe_value(item) for item in value])
        if isinstance(value, slice):
            return ("slice", *map(describe_value, (value.start, value.stop, value.step)))
        return (type(value).__name__, repr(value))

    question: tuple[Any, ...] = (call.operator, call.idle)
    if not call.idle:  # an idle call is not checked: its arguments do not matter
        question = (
            call.operator,
            _function_body(call.function),
            _registered_rule(call),
            describe_value(call.args),
            sorted((str(key), describe_value(value)) for key, value in call.kwargs.items()),
            [(value.shape, str(value.dtype)) for value in call.outputs],
            call.annotation,
            call.idle,
            call.obstacle,
            sorted(dataclasses.asdict(settings).items(), key=lambda item: item[0]),
        )
    return hashlib.sha256(repr(question).encode()).hexdigest()[:24]


def _function_body(function: Any) -> tuple[Any, ...]:
    """Distinguishes functions of one name: lambdas, and what a script defines twice."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ()
    cells = list(map(_cell_value, function.__closure__ or ()))
    constants = (code.co_consts, function.__defaults__, function.__kwdefaults__, cells)
    try:
        text = repr(constants)
    except Exception as error:  # noqa: BLE001  (the object's own; its type becomes part of the key)
        text = type(error).__name__
    return (code.co_filename, code.co_firstlineno, code.co_code.hex(), ADDRESS.sub("", text))


def _cell_value(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def _registered_rule(call: GraphCall) -> tuple[Any, ...]:
    """The rule a user registered for the operator: another rule needs another check."""
    rules = [registration(call.operator)]
    if call.function is not None:
        rules.append(registration(call.function))
    return tuple(rule if isinstance(rule, str) else _function_body(rule) for rule in rules if rule)


# --- Calls that need the same check are checked once ----------------------------------------------


@dataclasses.dataclass(frozen=True)
class CallGroup:
    """Calls that one check covers, in graph order. Groups are numbered by their first calls."""

    number: int
    key: str
    calls: tuple[GraphCall, ...]

    @property
    def first(self) -> GraphCall:
        """The call that is checked for the group."""
        return self.calls[0]

    @property
    def sites(self) -> tuple[CallSite, ...]:
        """Where all the calls are."""
        return tuple(call.site for call in self.calls)


def group_calls(graph: Graph, settings: GraphSettings) -> tuple[CallGroup, ...]:
    """Group the calls that need the same check; every call of the graph is in one group."""
    calls_by_key: dict[str, list[GraphCall]] = {}
    for call in graph.calls:
        calls_by_key.setdefault(key_of(call, settings), []).append(call)
    return tuple(
        CallGroup(number, key, tuple(calls))
        for number, (key, calls) in enumerate(calls_by_key.items())
    )


# --- Digests: which graph is it, and with which values? -------------------------------------------


def calls_digest(calls: Iterable[GraphCall]) -> str:
    """The same for graphs that call the same functions with the same arguments in order."""
    digest = hashlib.sha256()
    for call in calls:
        text = repr(dataclasses.replace(call, function=None))
        digest.update(ADDRESS.sub("", text).encode(errors="surrogatepass"))
        digest.update(_code_of(call.function))
    return digest.hexdigest()


def _code_of(function: Callable[..., Any] | None) -> bytes:
    """The bytecode of a function in memory: a corrected function counts as another."""
    code = getattr(function, "__code__", None)
    if code is None:
        return b""
    constants = ADDRESS.sub("", repr(code.co_consts))
    return bytes(code.co_code) + constants.encode(errors="surrogatepass")


def values_digest(tree: Any) -> str:
    """The same for the same tensors: sample inputs and the weights they are used with."""
    digest = hashlib.sha256()
    _add_values(digest, tree)
    return digest.hexdigest()


def _add_values(digest: Any, tree: Any) -> None:
    if isinstance(tree, torch.Tensor):
        digest.update(f"{tree.dtype}{tuple(tree.shape)}".encode())
        flat = tree.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(tree, Mapping):
        for name, item in tree.items():
            digest.update(f"{name}:".encode())
            _add_values(digest, item)
    elif isinstance(tree, (list, tuple)):
        digest.update(f"{len(tree)}[".encode())
        for item in tree:
            _add_values(digest, item)
    else:
        digest.update(ADDRESS.sub("", repr(tree)).encode(errors="surrogatepass"))
