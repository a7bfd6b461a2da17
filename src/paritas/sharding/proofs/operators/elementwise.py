"""Definitions of elementwise operators and reductions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from paritas.sharding.operators.library.elementwise import broadcasting, same
from paritas.sharding.operators.library.registry import positive_dims, rule_of, shipped
from paritas.sharding.proofs.algebra import OutsideTheoryError, Term
from paritas.sharding.proofs.definitions import (
    Array,
    Define,
    SymbolicCall,
    aligned,
    by_slices,
    defines,
    defines_unless,
    letters,
    number_term,
    operator_word,
    plus,
    size_term,
    times,
)
from paritas.sharding.proofs.indices import ONE, Poly, symbol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# --- Elementwise: each element of the result is a function of one element of each argument --------


def elementwise(call: SymbolicCall) -> Array:
    """The operator as an unknown function of elements that broadcast."""
    arrays = call.all_tensors()
    count = max((array.dim for array in arrays.values()), default=0)
    layouts = {name: (array, aligned(array, count)) for name, array in arrays.items()}
    return by_slices(call, layouts, [letters(count)])[0]


def broadcast_sizes(call: SymbolicCall, *arrays: Array) -> tuple[Poly, ...]:
    """The sizes of the result of arrays that broadcast."""
    count = max(array.dim for array in arrays)
    sizes = [ONE] * count
    for array in arrays:
        for at, size in enumerate(array.shape, count - array.dim):
            if size != ONE:
                if sizes[at] != ONE:
                    call.same(sizes[at], size)
                sizes[at] = sizes[at] if sizes[at] != ONE else size
    return tuple(sizes)


def _linear_in_both(call: SymbolicCall, combine: Callable[[Term, Term], Term]) -> Array:
    """A sum or a product of two tensors, or of a tensor and a number."""
    sides: list[Array] = []
    for name in ("x", "other"):
        value = call.get(name)
        array = call.tensor(name)
        if array is None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise OutsideTheoryError(f"a call in which {name} is {value!r:.40}")
            if not math.isfinite(value):
                return elementwise(call)
            array = Array((), _constant(number_term(value)))
        sides.append(array)
    first, second = sides
    shape = broadcast_sizes(call, first, second)
    return Array(shape, lambda *at: combine(first.at(at), second.at(at)))


def _constant(term: Term) -> Callable[..., Term]:
    return lambda *_: term


@defines("add sub subtract rsub mul multiply div divide true_divide")
def _arithmetic(call: SymbolicCall) -> Array:
    alpha = call.get("alpha", 1)
    plain = call.floats() and call.get("rounding_mode") is None and math.isfinite(alpha)
    if not plain:
        return elementwise(call)
    word = operator_word(call.call)
    if word in ("mul", "multiply"):
        return _linear_in_both(call, times)
    if word in ("div", "divide", "true_divide"):
        return _linear_in_both(call, lambda a, b: times(a, ("inv", b)))
    scale = number_term(alpha if word == "add" else -alpha)
    if word == "rsub":
        return _linear_in_both(call, lambda a, b: plus(b, times(scale, a)))
    return _linear_in_both(call, lambda a, b: plus(a, times(scale, b)))


@defines("neg negative")
def _negative(call: SymbolicCall) -> Array:
    x = call.given("x")
    return Array(x.shape, lambda *at: times(number_term(-1), x[at]))


@defines("positive clone contiguous alias identity")
def _unchanged(call: SymbolicCall) -> Array:
    return call.given("x")


@defines("square")
def _square(call: SymbolicCall) -> Array:
    x = call.given("x")
    return Array(x.shape, lambda *at: times(x[at], x[at]))


@defines("type_as expand_as")
def _like(call: SymbolicCall) -> Array:
    """The other tensor gives its shape or its dtype."""
    x, other = call.given("x"), call.given("other")
    broadcast_sizes(call, x, other)
    call.without_values |= set(map(str, call.places("other")))
    return Array(other.shape, x_at(x))


def x_at(x: Array) -> Callable[..., Term]:
    """The elements of a tensor under broadcasting."""
    return lambda *at: x.at(at)


# --- Dropout: each rank draws its part of the numbers of the whole --------------------------------


@defines("dropout dropout1d dropout2d dropout3d nndropout native_dropout")
def _dropout(call: SymbolicCall) -> Array | list[Array]:
    """What is drawn multiplies the elements; a channel draws one number."""
    x, word = call.given("x"), operator_word(call.call)
    switch = call.get("training", call.get("train", True))
    if not switch:
        layout = letters(x.dim)
        outputs = [layout, layout] if word == "native_dropout" else [layout]
        return by_slices(call, {"x": (x, layout)}, outputs)
    value = call.get("x")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(call.call.seed)
        drawn = call.run({"x": torch.ones_like(value)})
    channels = {"dropout1d": 1, "dropout2d": 2, "dropout3d": 3}.get(word, 0)
    kept = x.dim - channels
    for _ in range(channels):
        drawn[0] = drawn[0].select(-1, 0)
    call.draws["factor"] = drawn[0]
    call.assume("each rank draws its part of the random numbers of the whole")
    shape = x.shape[:kept]
    result = Array(x.shape, lambda *at: times(x[at], ("draw", "factor", shape, at[:kept])))
    if word != "native_dropout":
        return result
    call.draws["mask"] = drawn[1]
    return [result, Array(x.shape, lambda *at: ("draw", "mask", shape, at))]


@defines("prelu")
def _prelu(call: SymbolicCall) -> Array:
    """One weight for each channel, the second dimension."""
    x, weight = call.given("x"), call.given("weight")
    names = letters(x.dim)
    channel = names[1] if x.dim > 1 else names[0]
    return by_slices(call, {"x": (x, names), "weight": (weight, [channel])}, [names])[0]


@defines("glu")
def _glu(call: SymbolicCall) -> Array:
    return along(call, [call.get("dim", -1)])[0]


def along(call: SymbolicCall, dims: Sequence[int], outputs: int = 1) -> list[Array]:
    """An operator that works along dimensions of `x`, which keep their places."""
    x = call.given("x")
    inside = {dim % x.dim for dim in dims}
    layout = [None if at in inside else name for at, name in enumerate(letters(x.dim))]
    return by_slices(call, {"x": (x, layout)}, [layout] * outputs)


# --- Reductions -----------------------------------------------------------------------------------


def reduced_dims(call: SymbolicCall, default: int | None = None) -> tuple[int, ...]:
    """The dimensions that are reduced."""
    value = call.get("x")
    if value.dim() == 0:
        return ()
    found = positive_dims(call.get("dim", default), tuple(value.shape))
    if found is None:
        raise OutsideTheoryError(f"a call in which dim is {call.get('dim')!r:.40}")
    return found


def reduce_array(
    call: SymbolicCall,
    kind: str,
    x: Array,
    dims: Sequence[int],
    body: Callable[[Term], Term] = lambda term: term,
    *,
    keepdim: bool = False,
) -> Array:
    """The sum, maximum, minimum or product of elements over dimensions."""
    kept = [at for at in range(x.dim) if at not in dims]
    outside = [at for at in range(x.dim) if keepdim or at in kept]

    def element(*places: Poly) -> Term:
        at = dict(zip(outside, places, strict=True))
        inner: dict[int, Poly] = {}
        names = {dim: call.fresh() for dim in dims}
        for dim in range(x.dim):
            inner[dim] = symbol(names[dim]) if dim in names else at[dim]
        term = body(x[tuple(inner[dim] for dim in range(x.dim))])
        for dim, name in names.items():
            term = (kind, name, x.shape[dim], term)
        return term

    return Array(tuple(ONE if at in dims else x.shape[at] for at in outside), element)


def _own_scalar(call: SymbolicCall) -> Callable[[Term], Term]:
    """The operator itself, applied to one element."""
    single = {"dim": 0, "keepdim": False}
    settings = {name: value for name, value in single.items() if name in call.bound.values}

    def evaluate(arrays: list[torch.Tensor]) -> torch.Tensor:
        shape = (1,) if "dim" in settings else ()
        one = arrays[0].reshape(shape).to(call.get("x").dtype)
        return call.run({"x": one, **settings})[0]

    name = call.function(operator_word(call.call), evaluate, settings)
    return lambda term: ("fn", name, (term,))


def _reduction(kind: str, *, own: bool = False, mean: bool = False) -> Define:
    def definition(call: SymbolicCall) -> Array:
        x, dims = call.given("x"), reduced_dims(call)
        body = _own_scalar(call) if own else _identity
        found = reduce_array(call, kind, x, dims, body, keepdim=bool(call.get("keepdim")))
        if not mean:
            return found
        count = ("inv", size_term(*(x.shape[dim] for dim in dims)))
        return Array(found.shape, lambda *at: times(count, found[at]))

    return definition


def _identity(term: Term) -> Term:
    return term


defines("sum")(_reduction("sum"))
defines("nansum count_nonzero")(_reduction("sum", own=True))
defines("mean")(_reduction("sum", mean=True))
defines("amax")(_reduction("max"))
defines("amin")(_reduction("min"))
defines("any")(_reduction("max", own=True))
defines("all")(_reduction("min", own=True))
defines("prod")(_reduction("prod"))


def whole_along(call: SymbolicCall, outputs: int = 1, default: int | None = None) -> list[Array]:
    """A reduction that is not written out."""
    x, dims = call.given("x"), reduced_dims(call, default)
    names: list[str | None] = [None if at in dims else n for at, n in enumerate(letters(x.dim))]
    left = names if call.get("keepdim") else [n for n in names if n is not None]
    return by_slices(call, {"x": (x, names)}, [left] * outputs)


@defines("logsumexp argmax argmin var std")
def _whole(call: SymbolicCall) -> list[Array]:
    return whole_along(call)


@defines("var_mean std_mean")
def _whole_pair(call: SymbolicCall) -> list[Array]:
    return whole_along(call, 2)


@defines("mode kthvalue")
def _last_pair(call: SymbolicCall) -> list[Array]:
    return whole_along(call, 2, -1)


@defines("median nanmedian")
def _median(call: SymbolicCall) -> list[Array]:
    return whole_along(call, 2 if "dim" in call.bound.values else 1)


@defines("max min")
def _extremum(call: SymbolicCall) -> Array | list[Array]:
    if call.bound.has("dim"):
        return elementwise(call)
    if "dim" in call.bound.values:
        return whole_along(call, 2)
    return reduce_array(call, operator_word(call.call), call.given("x"), reduced_dims(call))


@defines("aminmax")
def _extrema(call: SymbolicCall) -> list[Array]:
    x, dims, keep = call.given("x"), reduced_dims(call), bool(call.get("keepdim"))
    return [reduce_array(call, kind, x, dims, keepdim=keep) for kind in ("min", "max")]


@defines("vector_norm linalg_vector_norm norm")
def _norm(call: SymbolicCall) -> Array | list[Array]:
    order = call.get("ord", call.get("p", 2))
    kinds = {0: "sum", 1: "sum", math.inf: "max", -math.inf: "min"}
    if order not in kinds:
        return whole_along(call)
    dims, keep = reduced_dims(call), bool(call.get("keepdim"))
    return reduce_array(call, kinds[order], call.given("x"), dims, _own_scalar(call), keepdim=keep)


@defines("topk sort cummax cummin")
def _ordered(call: SymbolicCall) -> list[Array]:
    return along(call, [call.get("dim", -1)], 2)


@defines("argsort")
def _order(call: SymbolicCall) -> list[Array]:
    return along(call, [call.get("dim", -1)])


@defines("one_hot")
def _one_hot(call: SymbolicCall) -> list[Array]:
    tensor = call.given("tensor")
    if call.bound.get("num_classes", -1) == -1:
        raise OutsideTheoryError("one_hot without num_classes: its size depends on the values")
    names = letters(tensor.dim)
    return by_slices(call, {"tensor": (tensor, names)}, [[*names, None]])


# --- All operators that the library splits element by element -------------------------------------

_OF_ELEMENTS = (same, broadcasting)
_OTHERS = "pow where"


def _is_elementwise(name: str) -> bool:
    rule: Any = rule_of(name)
    return rule in _OF_ELEMENTS or name.rpartition(".")[2] in _OTHERS.split()


for _name in shipped():
    if _is_elementwise(_name):
        defines_unless(_name.rpartition(".")[2], elementwise)
