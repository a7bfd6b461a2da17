"""Operators written as index algebra: a call with symbolic sizes, and the parts of definitions.

A definition says which elements of the arguments each element of a result depends on, and how.
Where it is not worth writing out what is computed (a softmax, a sort), the operator itself is taken
as an unknown function of the slices that it needs: `softmax(x, -1)[i, j]` is `softmax(x[i, :])[j]`.
So each term can be evaluated: `validation` does it, and compares the result with torch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch

from paritas.core.operators import indices
from paritas.core.operators.calls import Bound, letters
from paritas.core.operators.indices import ONE, ZERO, Poly, symbol
from paritas.core.operators.terms import OutsideTheoryError, Term
from paritas.core.torch_private.operators import tensors_in

if TYPE_CHECKING:
    from paritas.core.operators.calls import OperatorCall, Place

# --- Tensors with symbolic sizes ------------------------------------------------------------------


# The dimensions of a tensor: names of those in which the operator works on each index alone; those
# that it needs as a whole are `b^`, their length in a result, or None if that is another elsewhere.
Layout = Sequence["str | None"]


def is_whole(dim: str | None) -> bool:
    """Whether a dimension of a layout is needed as a whole."""
    return dim is None or dim.isdecimal() or dim.endswith("^")


@dataclasses.dataclass(frozen=True)
class Array:
    """A tensor: its sizes, its element at indices, and the names of its dimensions."""

    shape: tuple[Poly, ...]
    element: Callable[..., Term]
    names: Layout = ()

    def __getitem__(self, places: tuple[Poly, ...] | Poly) -> Term:
        if len(places) != self.dim:  # the definition is not about tensors of this rank
            raise OutsideTheoryError(f"{len(places)} indices into {self.dim} dimensions")
        return self.element(*places)

    @property
    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def at(self, places: Sequence[Poly]) -> Term:
        """Its element under broadcasting: the last dimensions count, and those of length 1."""
        own_places = places[len(places) - self.dim :]
        pairs = zip(self.shape, own_places, strict=True)
        return self.element(*(ZERO if size == ONE else at for size, at in pairs))


# --- The call -------------------------------------------------------------------------------------

# Evaluates an unknown function: from the arrays that it needs to a tensor of its results.
Evaluator = Callable[[list[torch.Tensor]], torch.Tensor]


class SymbolicCall:
    """A call whose tensors have symbolic sizes, with what a definition says about it.

    Attributes:
        functions: how to evaluate the unknown functions.
        requires: what sizes must satisfy for the operator to run.
        assumes: what is taken for granted about values, in words.
        reads_values: whether that depends on the values given.
        without_values: the names of tensors whose values do not count.
        draws: the random tensors that the operator draws, by name; drawn when they are asked for.
        writes: what the operator writes to its arguments, by their names.
        names: the names of the dimensions of its arguments, where they have any.
        written: what the last call with other values wrote to running statistics.
    """

    def __init__(
        self,
        call: OperatorCall,
        bound: Bound,
        symbolic: Iterable[tuple[Place, int | None]],
        assumed: Sequence[str] | None = None,
    ) -> None:
        self.call = call
        self.bound = bound
        self.symbolic = set(symbolic)
        self._assumed = assumed
        self._as_lengths: set[tuple[Place, int | None]] = set()
        self.functions: dict[str, Evaluator] = {}
        self.requires: list[tuple[Any, ...]] = []
        self.assumes: list[str] = []
        self.reads_values = False
        self.without_values: set[str] = set()
        self.draws: dict[str, Callable[[], torch.Tensor]] = {}
        self.writes: dict[str, Array] = {}
        self.names: dict[str, Layout] = {}
        self.written: dict[str, torch.Tensor] = {}
        self._count = itertools.count()

    # --- arguments --------------------------------------------------------------------------------

    def get(self, name: str, default: Any = None) -> Any:
        """An argument as it was given.

        Raises:
            OutsideTheoryError: it is a length, which has another value in other calls.
        """
        if self._is_length(name):
            raise OutsideTheoryError(
                f"argument {name} as a length: the definition needs it as a number"
            )
        return self.bound.get(name, default)

    def _is_length(self, name: str) -> bool:
        """Whether a rule ties an argument, or an item of it, to a length."""
        return any(argument_place in self.places(name) for argument_place, _ in self.symbolic)

    def places(self, name: str) -> list[Place]:
        """Where an argument is; several places if its items were passed one by one."""
        places: list[Place] = [
            i for i, position in enumerate(self.bound.positions) if position == name
        ]
        return places or [
            key for key, bound_name in self.bound.keywords.items() if bound_name == name
        ]

    def tensor(self, name: str) -> Array | None:
        """A tensor argument."""
        value = self.bound.get(name)
        if not isinstance(value, torch.Tensor):
            return None
        return _argument(str(self.places(name)[0]), value)

    def tensors(self, name: str) -> list[Array | None]:
        """The tensors of an argument that is a list, or of arguments passed one by one."""
        values, places = self.get(name), self.places(name)
        names = [str(position) for position in places]
        if not self.bound.spread(name):
            names = [f"{places[0]}[{at}]" for at in range(len(values))]
        return [
            _argument(argument_name, value) if isinstance(value, torch.Tensor) else None
            for argument_name, value in zip(names, values, strict=True)
        ]

    def given(self, name: str) -> Array:
        """A tensor argument that the definition needs."""
        array = self.tensor(name)
        if array is None:
            raise OutsideTheoryError(f"a call in which {name} is not a tensor")
        return array

    def number(self, name: str, default: int | None = None) -> Poly:
        """A number that may be a length."""
        value = self.bound.get(name, default)
        argument_places = self.places(name)
        if argument_places and (argument_places[0], None) in self.symbolic:
            return self._length(argument_places[0], None)
        if isinstance(value, bool) or not isinstance(value, int):
            raise OutsideTheoryError(f"a call in which {name} is {value!r:.40}")
        return indices.constant(value)

    def numbers(self, name: str) -> list[Poly]:
        """The items of a sequence of numbers that may be lengths."""
        values, places, polies = self.bound.get(name), self.places(name), []
        for at, value in enumerate(values):
            spread = self.bound.spread(name)
            argument_place, item = (places[at], None) if spread else (places[0], at)
            if (argument_place, item) in self.symbolic and value != -1:
                polies.append(self._length(argument_place, item))
            elif isinstance(value, int):
                polies.append(indices.constant(value))
            else:
                raise OutsideTheoryError(f"a call in which {name} is {value!r:.40}")
        return polies

    def _length(self, argument_place: Place, item: int | None) -> Poly:
        self._as_lengths.add((argument_place, item))
        return symbol(number_name(argument_place, item))

    def keep_unused_lengths(self) -> None:
        """A number that the definition does not use as a length must be the same on a rank."""
        for argument_place, item in sorted(self.symbolic - self._as_lengths, key=repr):
            self.keep(symbol(number_name(argument_place, item)))

    def all_tensors(self) -> dict[str, Array]:
        """All tensor arguments by parameter, without those in lists."""
        named = {name: self.tensor(name) for name in self.bound.values}
        return {name: array for name, array in named.items() if array is not None}

    def tensors_in_terms(self) -> dict[str, tuple[str, torch.Tensor]]:
        """All tensors by their names in terms, with their parameters; items of lists as `x[0]`."""
        tensors: dict[str, tuple[str, torch.Tensor]] = {}
        for parameter, value in self.bound.values.items():
            places = self.places(parameter)
            if isinstance(value, torch.Tensor):
                tensors[str(places[0])] = parameter, value
                continue
            for at, item in enumerate(value if isinstance(value, list | tuple) else ()):
                if isinstance(item, torch.Tensor):
                    spread = self.bound.spread(parameter)
                    name = str(places[at]) if spread else f"{places[0]}[{at}]"
                    tensors[name] = f"{parameter}[{at}]", item
        return tensors

    def floats(self) -> bool:
        """Whether all tensors are floating."""
        values = [v for v in self.bound.values.values() if isinstance(v, torch.Tensor)]
        return all(value.is_floating_point() for value in values)

    # --- what a definition says -------------------------------------------------------------------

    def same(self, left: Poly, right: Poly) -> None:
        """The operator needs two sizes to be equal."""
        if left != right:
            self.requires.append(("same", left, right))

    def keep(self, size: Poly) -> None:
        """The operator depends on a size in a way that is not written out."""
        self.requires.append(("keep", size))

    def assume(self, words: str, holds: Callable[[], bool] | None = None) -> bool:
        """Whether to take something for granted: always, or if it holds for the values given.

        A call that is rebuilt from a certificate has no values; the certificate says it.
        """
        if holds is None:
            taken = True
        else:
            self.reads_values = True
            taken = holds() if self._assumed is None else words in self._assumed
        if taken:
            self.assumes.append(words)
        return taken

    def count_results(self, count: int) -> int:
        """How many tensors it returns, if that depends on lengths: it is assumed for others."""
        self.assume(f"{operator_word(self.call)} returns {count} tensors")
        return count

    def fresh(self) -> str:
        """A name for an index."""
        return f"%g{next(self._count)}"

    def reduce(self, kind: str, size: Poly, body: Callable[[Poly], Term]) -> Term:
        """A sum, maximum, minimum or product over an index."""
        name = self.fresh()
        return (kind, name, size, body(symbol(name)))

    def function(
        self, name: str, evaluate: Evaluator, replaced_arguments: Mapping[str, Any]
    ) -> str:
        """Name the operator as an unknown function, by all of its arguments that are not tensors.

        A number that is a length cannot be in the name, so it must be the same on all ranks.

        Args:
            replaced_arguments: the arguments that `evaluate` replaces, other than tensors.
        """
        settings = {**self.bound.values, **replaced_arguments}
        words = []
        for key, value in settings.items():
            if tensors_in(value):
                continue
            if key in replaced_arguments or not self._is_length(key):
                words.append(f"{key}={value!r}")
                continue
            for argument_place, item in sorted(self.symbolic, key=repr):
                if argument_place in self.places(key):
                    self.keep(symbol(number_name(argument_place, item)))
        return self.known_function(f"{name}({', '.join(words)})", evaluate)

    def known_function(self, name: str, evaluate: Evaluator) -> str:
        """Name a function that depends on nothing but what it is given."""
        self.functions[name] = evaluate
        return name

    def run(self, values: Mapping[str, Any]) -> list[torch.Tensor]:
        """Call the operator with other values of parameters; items of lists as `name[0]`."""
        args, kwargs = list(self.call.args), dict(self.call.kwargs)
        self.written = {}
        for name, new_value in values.items():
            value = new_value
            if name.startswith("running_") and isinstance(value, torch.Tensor):
                value = self.written[name] = value.detach().clone()
            base, bracket, at = name.partition("[")
            places = self.places(base)
            if bracket and not self.bound.spread(base):
                _set(args, kwargs, places[0], value, int(at[:-1]))
            elif places:
                _set(args, kwargs, places[int(at[:-1])] if bracket else places[0], value)
            else:
                kwargs[base] = value
        return flat(self.call.function(*args, **kwargs))


def number_name(argument_place: Place, item: int | None) -> str:
    """The name of a number that is a length."""
    return f"#{argument_place}" if item is None else f"#{argument_place}[{item}]"


def _set(
    args: list[Any],
    kwargs: dict[str, Any],
    argument_place: Place,
    value: Any,
    item: int | None = None,
) -> None:
    holder: Any = kwargs if isinstance(argument_place, str) else args
    if item is not None:
        items = list(holder[argument_place])
        items[item] = value
        value = items
    holder[argument_place] = value


def flat(result: Any) -> list[torch.Tensor]:
    """The tensors of a result."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return [tensor for part in result for tensor in flat(part)]
    raise OutsideTheoryError(f"a result of type {type(result).__name__}")


def _argument(name: str, value: torch.Tensor) -> Array:
    shape = tuple(
        ONE if size == 1 else symbol(f"{name}.{at}") for at, size in enumerate(value.shape)
    )
    return Array(shape, lambda *places: ("read", name, places))


# --- Functions of slices --------------------------------------------------------------------------


def by_slices(
    call: SymbolicCall,
    layouts: Mapping[str, tuple[Array, Layout]],
    outputs: Sequence[Layout],
    *,
    settings: Mapping[str, Any] | None = None,
    name: str = "",
    pick: Callable[[list[torch.Tensor]], list[torch.Tensor]] = list,
) -> list[Array]:
    """The operator itself as a function of slices of its arguments.

    Args:
        layouts: the tensors that it needs, by parameter, and their dimensions.
        outputs: the dimensions of each result.
        settings: other arguments for a call with slices.
        pick: the results of such a call.
    """
    lengths: dict[str | None, Poly] = {}
    for array, layout in layouts.values():
        for size, dim in zip(array.shape, layout, strict=True):
            if not is_whole(dim) and size != ONE:
                call.same(lengths.setdefault(dim, size), size)
    inner = tuple(
        size
        for array, layout in layouts.values()
        for size, dim in zip(array.shape, layout, strict=True)
        if is_whole(dim)
    )
    call.names |= {name: layout for name, (_, layout) in layouts.items()}
    arrays = []
    for at, layout in enumerate(outputs):
        evaluate = functools.partial(
            _run_on_slices, call, {n: inner for n, (_, inner) in layouts.items()}, at, layout,
            dict(settings or {}), pick,
        )  # fmt: skip
        word = f"{name or operator_word(call.call)}{f'#{at}' if at else ''}"
        function_name = call.function(word, evaluate, settings or {})
        shape = tuple(
            symbol(("size", f"{function_name}.{axis}", inner))
            if is_whole(dim)
            else lengths.get(dim, ONE)
            for axis, dim in enumerate(layout)
        )
        element = functools.partial(_slice_element, call, layouts, layout, function_name)
        arrays.append(Array(shape, element, layout))
    return arrays


def _slice_element(
    call: SymbolicCall,
    layouts: Mapping[str, tuple[Array, Layout]],
    outside: Layout,
    function: str,
    *places: Poly,
) -> Term:
    at = {dim: position for dim, position in zip(outside, places, strict=True) if not is_whole(dim)}
    arrays = []
    for array, layout in layouts.values():
        binders, array_places = [], []
        for size, dim in zip(array.shape, layout, strict=True):
            if is_whole(dim) and size != ONE:
                name = call.fresh()
                binders.append((name, size))
                array_places.append(symbol(name))
            else:
                array_places.append(ZERO if size == ONE or is_whole(dim) else at[dim])
        arrays.append((tuple(binders), array[tuple(array_places)]))
    inside = tuple(position for dim, position in zip(outside, places, strict=True) if is_whole(dim))
    if not inside and not any(binders for binders, _ in arrays):
        return ("fn", function, tuple(body for _, body in arrays))
    return ("fun", function, tuple(arrays), inside)


def _run_on_slices(
    call: SymbolicCall,
    layouts: Mapping[str, Layout],
    output: int,
    outside: Layout,
    settings: Mapping[str, Any],
    pick: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    arrays: list[torch.Tensor],
) -> torch.Tensor:
    values: dict[str, Any] = dict(settings)
    for (name, layout), array in zip(layouts.items(), arrays, strict=True):
        sizes = iter(array.shape)
        whole_tensor = _value(call, name)
        shape = [
            1 if not is_whole(dim) or whole_tensor.shape[axis] == 1 else next(sizes)
            for axis, dim in enumerate(layout)
        ]
        values[name] = array.reshape(shape).to(whole_tensor.dtype)
    result = pick(call.run(values))[output]
    return result[tuple(slice(None) if is_whole(dim) else 0 for dim in outside)]


def _value(call: SymbolicCall, name: str) -> torch.Tensor:
    base, bracket, at = name.partition("[")
    value = call.get(base)
    tensor: torch.Tensor = value[int(at[:-1])] if bracket else value
    return tensor


def operator_word(call: OperatorCall) -> str:
    """The last part of the operator's name."""
    return call.name.rpartition(".")[2]


def align_names(array: Array, count: int) -> list[str | None]:
    """The names of dimensions that broadcast to this number of dimensions."""
    return list(letters(count)[count - array.dim :])


# --- The registry ---------------------------------------------------------------------------------

Define = Callable[[SymbolicCall], "Array | Sequence[Array]"]
D = TypeVar("D", bound=Define)


@dataclasses.dataclass(frozen=True)
class DefinedOperator:
    """What an operator is.

    Attributes:
        parameters: their names in order, as `bind` reads them.
        define: what it computes.
    """

    parameters: str
    define: Define


OPERATORS: dict[str, DefinedOperator] = {}


def operator(parameters: str, *names: str) -> Callable[[D], D]:
    """Register a function as the definition of operators.

    Args:
        parameters: of the operators, in order; see `bind`.
        names: full names (`torch.add`), several in one string.
    """

    def add(function: D) -> D:
        for name in " ".join(names).split():
            if name in OPERATORS:
                raise ValueError(f"{name} has two definitions")
            OPERATORS[name] = DefinedOperator(parameters, function)
        return function

    return add


# How an operator adds many terms up: `precision` has the error of each way.
Summation = Literal[
    "products", "products added to a tensor", "products in groups", "trilinear products",
    "sum", "mean", "running sum", "indexed sum", "terms of one sign", "averages of windows",
    "softmax", "log softmax", "softmax backward", "log softmax backward", "logarithm of a sum",
    "attention", "attention backward", "variance", "deviation",
    "layer norm", "layer norm backward", "group norm", "group norm backward",
    "batch norm", "functional batch norm", "batch norm backward", "batch norm backward of cuDNN",
    "convolution", "convolution backward", "embedding backward", "error function", "gelu",
]  # fmt: skip
# What an operator is apart from that: planted faults and patterns of wrong values follow these.
Kind = Literal[
    "arithmetic", "roots and reciprocals", "limits", "random masks",
    "reductions", "maximum", "orders", "running values", "softmaxes",
    "rms norm", "losses of pairs", "losses of classes",
    "maxima of windows", "maxima of windows backward",
    "slices", "selections", "joins", "triangles", "writes at indices",
    "copies", "fills", "new tensors", "values passed on", "shapes changed in place",
    "comparisons", "whole numbers", "choices", "random fills", "random numbers",
    "random integers", "random choices", "exact", "rounded once", "smooth",
]  # fmt: skip
Group = Summation | Kind
GROUPS: dict[Group, frozenset[str]] = {}


def belongs_to(group: Group, *names: str) -> None:
    """Register what operators are, by their names in aten, several in one string.

    An operator may belong to many groups, but sums in one way. Operators that only autograd calls
    have no definition, but belong to groups too.
    """
    members = frozenset(" ".join(names).split())
    for other in get_args(Summation) if group in get_args(Summation) else ():
        if twice := members & GROUPS.get(other, frozenset()):
            raise ValueError(f"{', '.join(sorted(twice))} sums in two ways")
    GROUPS[group] = GROUPS.get(group, frozenset()) | members


def everywhere(*short: str) -> str:
    """Full names of operators that are torch functions, tensor methods and aten operators."""
    words = " ".join(short).split()
    return " ".join(f"torch.{word} torch.Tensor.{word} aten.{word}" for word in words)


# Where the operators of nnScaler are.
NNSCALER = "nnscaler.runtime.function."
NNSCALER_WRAPPED = "nnscaler.graph.function.wrapnn."


def functional(*short: str) -> str:
    """Full names of operators in `torch.nn.functional`."""
    return " ".join(f"torch.nn.functional.{word}" for word in " ".join(short).split())
