"""Definitions of elementwise operators and reductions."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.operators.calls import letters, positive_dims
from paritas.core.operators.definitions import (
    NNSCALER,
    Array,
    Define,
    SymbolicCall,
    align_names,
    belongs_to,
    by_slices,
    everywhere,
    functional,
    operator,
    operator_word,
)
from paritas.core.operators.indices import ONE, Poly, symbol
from paritas.core.operators.terms import (
    OutsideTheoryError,
    Term,
    number_term,
    plus,
    size_term,
    times,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# --- Elementwise: each element of the result is a function of one element of each argument --------

belongs_to("error function", "erf erfc")
belongs_to("gelu", "gelu gelu_backward")
belongs_to("arithmetic", "add sub mul div")
belongs_to("roots and reciprocals", "sqrt rsqrt reciprocal")
belongs_to("limits", "clamp clamp_min clamp_max")
belongs_to("comparisons", "gt ge lt le eq ne")
belongs_to("whole numbers", "round floor ceil trunc fix")
belongs_to("rounded once", "addcdiv addcmul addr lerp neg reciprocal rsub sqrt _to_copy")
# Exact, rounded once and smooth are what other groups do not say: `core.operators.rounding` and
# `core.precision.perturbing` join them.
belongs_to(
    "smooth",
    "addcmul addr atan contiguous cos cosh exp exp2 expm1 lerp log log10 log1p log2",
    "log_sigmoid_backward log_sigmoid_forward masked_fill native_dropout_backward neg pow prod",
    "rsub sigmoid sigmoid_backward silu silu_backward sin sinh square tanh tanh_backward where",
)
belongs_to(
    "exact",
    "abs bitwise_not complex _conj conj_physical resolve_conj copysign fmax fmin hardtanh",
    "heaviside imag real isfinite isinf isnan logical_and logical_not logical_or logical_xor",
    "masked_fill maximum minimum nan_to_num neg relu sgn sign threshold threshold_backward where",
    "clone contiguous copy _local_scalar_dense view_as_complex view_as_real",
)
# Of these nothing is computed.
belongs_to("copies", "clone copy _to_copy")
belongs_to("fills", "fill zero")
belongs_to(
    "new tensors",
    "arange empty empty_like empty_strided eye full full_like new_empty new_empty_strided new_full",
    "new_ones new_zeros ones ones_like scalar_tensor zeros zeros_like",
)
belongs_to("values passed on", "alias detach lift_fresh lift_fresh_copy _unsafe_view")


@operator(
    "x",
    everywhere(
        "abs absolute exp exp2 expm1 log log2 log10 log1p sqrt rsqrt",
        "reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid",
        "erf erfc erfinv ceil floor trunc frac sign sgn lgamma digamma i0 sinc deg2rad rad2deg",
        "isnan isinf isfinite isposinf isneginf signbit logical_not bitwise_not relu",
        "arcsin arccos arctan detach",
    ),
    functional("sigmoid tanh softsign tanhshrink logsigmoid"),
    "torch.Tensor.float torch.Tensor.double torch.Tensor.half torch.Tensor.bfloat16",
    "torch.Tensor.int torch.Tensor.long torch.Tensor.bool torch.special.expit",
    "torch.selu aten.selu torch.special.erf torch.special.log1p torch.special.ndtr",
    "aten.silu aten.mish aten.hardswish aten.hardsigmoid",
)
@operator("x decimals", everywhere("round"))
@operator("x eps", everywhere("logit"))
@operator("x nan posinf neginf", everywhere("nan_to_num"))
@operator("x inplace", functional("relu relu6 selu silu mish hardswish hardsigmoid"))
@operator("x approximate", functional("gelu"), "aten.gelu")
@operator("x alpha inplace", functional("elu celu"), "torch.celu aten.celu")
@operator("x alpha scale input_scale", "aten.elu")
@operator("x negative_slope inplace", functional("leaky_relu"), "aten.leaky_relu")
@operator("x beta threshold", functional("softplus"), "aten.softplus")
@operator("x lambd", functional("hardshrink softshrink"), "aten.hardshrink aten.softshrink")
@operator("x min_val max_val inplace", functional("hardtanh"), "aten.hardtanh")
@operator("x threshold value inplace", functional("threshold"), "torch.threshold aten.threshold")
@operator(
    "x dtype layout device pin_memory memory_format requires_grad",
    "torch.zeros_like torch.ones_like aten.zeros_like aten.ones_like",
)
@operator("x dtype layout device pin_memory non_blocking memory_format", "aten._to_copy")
@operator("x dtype", "torch.Tensor.type")
@operator("x dtype non_blocking copy memory_format", "torch.Tensor.to")
@operator(
    "x other",
    everywhere(
        "maximum minimum fmax fmin atan2 arctan2 remainder fmod hypot eq ne lt le gt ge greater",
        "greater_equal less less_equal not_equal logical_and logical_or logical_xor bitwise_and",
        "bitwise_or bitwise_xor copysign logaddexp logaddexp2 xlogy floor_divide ldexp float_power",
    ),
)
@operator("x end weight", everywhere("lerp"))
@operator("x tensor1 tensor2 value", everywhere("addcmul addcdiv"))
@operator("x min max", everywhere("clamp clip"))
@operator("x mask value", everywhere("masked_fill"))
@operator("x other rtol atol equal_nan", everywhere("isclose"))
@operator("x exponent", everywhere("pow"))
@operator("condition x other", "torch.where aten.where")
def elementwise(call: SymbolicCall) -> Array:
    """The operator as an unknown function of elements that broadcast."""
    # Of a tensor in place of a dtype, as in `x.to(other)`, no element is read.
    arrays = {name: array for name, array in call.all_tensors().items() if name != "dtype"}
    if "condition" in arrays and "other" not in call.bound.values:
        raise OutsideTheoryError("the places where a condition holds: how many depends on values")
    count = max((array.dim for array in arrays.values()), default=0)
    layouts = {name: (array, align_names(array, count)) for name, array in arrays.items()}
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
            if not isinstance(value, int | float):
                raise OutsideTheoryError(f"a call in which {name} is {value!r:.40}")
            if isinstance(value, bool) or not math.isfinite(value):
                return elementwise(call)
            array = Array((), _constant(number_term(value)))
        sides.append(array)
    first, second = sides
    shape = broadcast_sizes(call, first, second)
    call.names |= {
        name: align_names(side, len(shape))
        for name, side in zip(("x", "other"), sides, strict=True)
    }
    return Array(shape, lambda *at: combine(first.at(at), second.at(at)))


def _constant(term: Term) -> Callable[..., Term]:
    return lambda *_: term


@operator("x other alpha", everywhere("add sub subtract"), "torch.rsub aten.rsub")
@operator("x other rounding_mode", everywhere("div divide"))
@operator("x other", everywhere("mul multiply true_divide"))
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


@operator("x", everywhere("neg negative"))
def _negative(call: SymbolicCall) -> Array:
    x = call.given("x")
    return Array(x.shape, lambda *at: times(number_term(-1), x[at]))


@operator("x memory_format", everywhere("clone"), "torch.Tensor.contiguous")
@operator("x", f"{NNSCALER}identity")
@operator("x", everywhere("positive"), "aten.alias")
def _pass_unchanged(call: SymbolicCall) -> Array:
    return call.given("x")


@operator("x", everywhere("square"))
def _square(call: SymbolicCall) -> Array:
    x = call.given("x")
    return Array(x.shape, lambda *at: times(x[at], x[at]))


@operator("x other", "torch.Tensor.type_as torch.Tensor.expand_as")
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

belongs_to("random masks", "bernoulli native_dropout rand rand_like uniform")
# Floats in the requested dtype, which decides the random stream.
belongs_to("random fills", "uniform normal cauchy exponential log_normal geometric")
belongs_to("random numbers", "rand randn rand_like randn_like normal_functional bernoulli")
belongs_to("random integers", "randint randint_like random")
# Attention, for example, may draw a dropout mask, but also computes.
belongs_to("random choices", "multinomial native_dropout poisson randperm")


@operator("x p training inplace", functional("dropout dropout1d dropout2d dropout3d"))
@operator("x p train", "torch.dropout aten.dropout")
@operator("x p train", "aten.native_dropout")
@operator("x p inplace", f"{NNSCALER}nndropout")
def _dropout(call: SymbolicCall) -> Array | list[Array]:
    """What is drawn multiplies the elements; a channel draws one number."""
    x, word = call.given("x"), operator_word(call.call)
    switch = call.get("training", call.get("train", True))
    if not switch:
        layout = letters(x.dim)
        outputs = [layout, layout] if word == "native_dropout" else [layout]
        return by_slices(call, {"x": (x, layout)}, outputs)
    channels = {"dropout1d": 1, "dropout2d": 2, "dropout3d": 3}.get(word, 0)
    kept_count = x.dim - channels

    @functools.cache
    def draw() -> list[torch.Tensor]:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(call.call.seed)
            drawn = call.run({"x": torch.ones_like(call.get("x"))})
        for _ in range(channels):
            drawn[0] = drawn[0].select(-1, 0)
        return drawn

    call.draws["factor"] = lambda: draw()[0]
    call.assume("each rank draws its part of the random numbers of the whole")
    shape = x.shape[:kept_count]
    result = Array(x.shape, lambda *at: times(x[at], ("draw", "factor", shape, at[:kept_count])))
    if word != "native_dropout":
        return result
    call.draws["mask"] = lambda: draw()[1]
    return [result, Array(x.shape, lambda *at: ("draw", "mask", shape, at), letters(x.dim))]


@operator("x weight", functional("prelu"), "torch.prelu torch.Tensor.prelu aten.prelu")
def _prelu(call: SymbolicCall) -> Array:
    """One weight for each channel, the second dimension."""
    x, weight = call.given("x"), call.given("weight")
    names = letters(x.dim)
    channel = names[1] if x.dim > 1 else "b"
    return by_slices(call, {"x": (x, names), "weight": (weight, [channel])}, [names])[0]


@operator("x dim", functional("glu"), "aten.glu")
def _glu(call: SymbolicCall) -> Array:
    x, at = call.given("x"), call.get("dim", -1)
    names = letters(x.dim)
    halves = list(names)
    names[at], halves[at] = f"{names[at]}^", "half^"
    return by_slices(call, {"x": (x, names)}, [halves])[0]


def along(call: SymbolicCall, dims: Any, outputs: int = 1) -> list[Array]:
    """An operator that works along dimensions of `x`, which keep their places."""
    return _along(call, dims, outputs, keeps_length=False)


def accumulate_along(call: SymbolicCall, dims: Any) -> list[Array]:
    """An operator that works along dimensions of `x`, which keep their lengths too."""
    return _along(call, dims, 1, keeps_length=True)


def _along(call: SymbolicCall, dims: Any, outputs: int, *, keeps_length: bool) -> list[Array]:
    x = call.given("x")
    inside = positive_dims(dims, tuple(call.get("x").shape))
    if inside is None:
        raise OutsideTheoryError(f"dimensions {dims!r:.40}")
    layout: list[str | None] = list(letters(x.dim))
    for at in inside:
        layout[at] = f"{layout[at]}^" if keeps_length else None
    return by_slices(call, {"x": (x, layout)}, [layout] * outputs)


# --- Reductions -----------------------------------------------------------------------------------

belongs_to("sum", "sum")
belongs_to("mean", "mean")
belongs_to("terms of one sign", "prod norm linalg_vector_norm")
belongs_to("logarithm of a sum", "logsumexp")
belongs_to("variance", "var var_mean")
belongs_to("deviation", "std std_mean")
# Their second argument is the axes.
belongs_to(
    "reductions",
    "sum mean amax amin var std var_mean logsumexp max min argmax argmin prod any all",
)
belongs_to("maximum", "amax max")
belongs_to("orders", "sort argsort topk")
belongs_to("choices", "argmax argmin max min sort topk kthvalue median")
belongs_to("exact", "amin aminmax cummax cummin equal mode nanmedian nonzero")


def reduced_dims(call: SymbolicCall, default: int | None = None) -> tuple[int, ...]:
    """The dimensions that are reduced."""
    value = call.get("x")
    if value.dim() == 0:
        return ()
    dims = positive_dims(call.get("dim", default), tuple(value.shape))
    if dims is None:
        raise OutsideTheoryError(f"a call in which dim is {call.get('dim')!r:.40}")
    return dims


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
    kept_dims = [at for at in range(x.dim) if at not in dims]
    outside = [at for at in range(x.dim) if keepdim or at in kept_dims]

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
        operand = arrays[0].reshape(shape).to(call.get("x").dtype)
        return call.run({"x": operand, **settings})[0]

    name = call.function(operator_word(call.call), evaluate, settings)
    return lambda term: ("fn", name, (term,))


def _reduction(kind: str, *, own: bool = False, mean: bool = False) -> Define:
    def definition(call: SymbolicCall) -> Array:
        x, dims = call.given("x"), reduced_dims(call)
        body = _own_scalar(call) if own else _identity
        reduced_array = reduce_array(call, kind, x, dims, body, keepdim=bool(call.get("keepdim")))
        if not mean:
            return reduced_array
        count = ("inv", size_term(*(x.shape[dim] for dim in dims)))
        return Array(reduced_array.shape, lambda *at: times(count, reduced_array[at]))

    return definition


def _identity(term: Term) -> Term:
    return term


operator("x dim keepdim dtype", everywhere("sum"))(_reduction("sum"))
operator("x dim keepdim dtype", everywhere("nansum"))(_reduction("sum", own=True))
operator("x dim", everywhere("count_nonzero"))(_reduction("sum", own=True))
operator("x dim keepdim dtype", everywhere("mean"))(_reduction("sum", mean=True))
operator("x dim keepdim", everywhere("amax"))(_reduction("max"))
operator("x dim keepdim", everywhere("amin"))(_reduction("min"))
operator("x dim keepdim", everywhere("any"))(_reduction("max", own=True))
operator("x dim keepdim", everywhere("all"))(_reduction("min", own=True))
operator("x dim keepdim dtype", everywhere("prod"))(_reduction("prod"))


def whole_along(call: SymbolicCall, outputs: int = 1, default: int | None = None) -> list[Array]:
    """A reduction that is not written out."""
    x, dims = call.given("x"), reduced_dims(call, default)
    names = [f"{name}^" if at in dims else name for at, name in enumerate(letters(x.dim))]
    ones = ["1"] if call.get("keepdim") else []
    remaining_names = [
        each for at, name in enumerate(names) for each in (ones if at in dims else [name])
    ]
    return by_slices(call, {"x": (x, names)}, [remaining_names] * outputs)


@operator("x dim keepdim", everywhere("logsumexp argmax argmin"))
def _whole(call: SymbolicCall) -> list[Array]:
    return whole_along(call)


@operator(
    "x dim unbiased keepdim correction", "torch.var torch.Tensor.var torch.std torch.Tensor.std"
)
@operator("x dim correction keepdim", "aten.var aten.std")
@operator("x dim unbiased keepdim correction", "torch.var_mean torch.std_mean")
def _spread(call: SymbolicCall) -> list[Array]:
    """Where a number or a switch is instead of the dimensions, it belongs to another overload."""
    dim, of_dims = call.get("dim"), call.call.name.startswith("aten.")
    if isinstance(dim, bool) or (of_dims and not isinstance(dim, list | tuple)):
        raise OutsideTheoryError("a variance without dimensions")
    return whole_along(call, 2 if operator_word(call.call).endswith("_mean") else 1)


@operator("x dim keepdim", everywhere("mode"))
@operator("x k dim keepdim", everywhere("kthvalue"))
def _last_pair(call: SymbolicCall) -> list[Array]:
    return whole_along(call, 2, -1)


@operator("x dim keepdim", everywhere("median nanmedian"))
def _median(call: SymbolicCall) -> list[Array]:
    return whole_along(call, 2 if "dim" in call.bound.values else 1)


@operator("x dim keepdim", everywhere("max"))
@operator("x dim keepdim", everywhere("min"))
def _extremum(call: SymbolicCall) -> Array | list[Array]:
    if call.bound.has("dim"):
        return elementwise(call)
    if "dim" in call.bound.values:
        return whole_along(call, 2)
    return reduce_array(call, operator_word(call.call), call.given("x"), reduced_dims(call))


@operator("x dim keepdim", "torch.aminmax torch.Tensor.aminmax aten.aminmax")
def _extrema(call: SymbolicCall) -> list[Array]:
    x, dims, keep = call.given("x"), reduced_dims(call), bool(call.get("keepdim"))
    return [reduce_array(call, kind, x, dims, keepdim=keep) for kind in ("min", "max")]


@operator("x ord dim keepdim dtype", "torch.linalg.vector_norm aten.linalg_vector_norm")
@operator("x p dim keepdim dtype", everywhere("norm") + " torch.functional.norm")
def _norm(call: SymbolicCall) -> Array | list[Array]:
    order = call.get("ord", call.get("p", 2))
    if not isinstance(order, int | float) and order != "fro":
        raise OutsideTheoryError(f"a norm of order {order!r:.40}")
    kinds = {0: "sum", 1: "sum", math.inf: "max", -math.inf: "min"}
    if order not in kinds:
        return whole_along(call)
    dims, keep = reduced_dims(call), bool(call.get("keepdim"))
    return reduce_array(call, kinds[order], call.given("x"), dims, _own_scalar(call), keepdim=keep)


@operator("x k dim largest sorted", everywhere("topk"))
@operator("x dim descending stable", everywhere("sort"))
@operator("x dim", everywhere("cummax cummin"))
def _order_along_dim(call: SymbolicCall) -> list[Array]:
    return along(call, [call.get("dim", -1)], 2)


@operator("x dim descending stable", everywhere("argsort"))
def _order(call: SymbolicCall) -> list[Array]:
    return along(call, [call.get("dim", -1)])


@operator("tensor num_classes", functional("one_hot"))
def _one_hot(call: SymbolicCall) -> list[Array]:
    tensor = call.given("tensor")
    classes = call.bound.get("num_classes", -1)
    if classes == -1:
        raise OutsideTheoryError("one_hot without num_classes: its size depends on the values")
    names = letters(tensor.dim)
    return by_slices(call, {"tensor": (tensor, names)}, [[*names, str(classes)]])
