"""Operators that work on each element separately, and reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.sharding.operators.library.registry import (
    AVERAGE,
    MAXIMUM,
    MINIMUM,
    PRODUCT,
    SUM,
    Bound,
    RuleClaim,
    broadcast,
    everywhere,
    functional,
    letters,
    named,
    positive_dims,
    rule,
    unary,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paritas.sharding.operators.library.registry import Rule

# --- Elementwise operators: every dimension can be split ------------------------------------------

# Parameters that are tensors or numbers, and broadcast with each other.
_OPERANDS = ("x", "other", "end", "weight", "tensor1", "tensor2", "min", "max", "mask", "value")


def same(bound: Bound) -> RuleClaim | None:
    """One tensor, one result of the same shape; there is no claim for in-place calls."""
    return None if bound.get("inplace") else unary(bound.dims())


def broadcasting(bound: Bound, operands: Iterable[str] = _OPERANDS) -> RuleClaim | None:
    """Several tensors that broadcast."""
    shapes = {name: shape for name in operands if (shape := bound.shape(name)) is not None}
    found = broadcast(shapes.values())
    if found is None or not shapes:
        return None
    return RuleClaim(dict(zip(shapes, found[0], strict=True)), (found[1],))


rule(
    "x",
    everywhere(
        "abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt",
        "reciprocal square sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid",
        "erf erfc erfinv ceil floor trunc frac sign sgn lgamma digamma i0 sinc deg2rad rad2deg",
        "isnan isinf isfinite isposinf isneginf signbit logical_not bitwise_not relu",
        "arcsin arccos arctan detach",
    ),
    functional("sigmoid tanh softsign tanhshrink logsigmoid"),
    "torch.Tensor.float torch.Tensor.double torch.Tensor.half torch.Tensor.bfloat16",
    "torch.Tensor.int torch.Tensor.long torch.Tensor.bool torch.special.expit",
    "torch.selu aten.selu torch.special.erf torch.special.log1p torch.special.ndtr",
    "aten.silu aten.mish aten.hardswish aten.hardsigmoid aten.alias",
)(same)
rule("x decimals", everywhere("round"))(same)
rule("x eps", everywhere("logit"))(same)
rule("x nan posinf neginf", everywhere("nan_to_num"))(same)
rule("x memory_format", everywhere("clone"), "torch.Tensor.contiguous")(same)
rule("x inplace", functional("relu relu6 selu silu mish hardswish hardsigmoid"))(same)
rule("x approximate", functional("gelu"), "aten.gelu")(same)
rule("x alpha inplace", functional("elu celu"), "torch.celu aten.celu")(same)
rule("x alpha scale input_scale", "aten.elu")(same)
rule("x negative_slope inplace", functional("leaky_relu"), "aten.leaky_relu")(same)
rule("x beta threshold", functional("softplus"), "aten.softplus")(same)
rule("x lambd", functional("hardshrink softshrink"), "aten.hardshrink aten.softshrink")(same)
rule("x min_val max_val inplace", functional("hardtanh"), "aten.hardtanh")(same)
rule("x threshold value inplace", functional("threshold"), "torch.threshold aten.threshold")(same)
rule(
    "x dtype layout device pin_memory memory_format requires_grad",
    "torch.zeros_like torch.ones_like aten.zeros_like aten.ones_like",
)(same)
rule("x dtype layout device pin_memory non_blocking memory_format", "aten._to_copy")(same)
rule("x dtype", "torch.Tensor.type")(same)
rule("x dtype non_blocking copy memory_format", "torch.Tensor.to")(same)

rule(
    "x other",
    everywhere(
        "maximum minimum fmax fmin atan2 arctan2 remainder fmod hypot eq ne lt le gt ge greater",
        "greater_equal less less_equal not_equal logical_and logical_or logical_xor bitwise_and",
        "bitwise_or bitwise_xor copysign logaddexp logaddexp2 xlogy floor_divide ldexp",
        "float_power multiply true_divide",
    ),
    "torch.mul torch.Tensor.mul aten.mul",
)(broadcasting)
rule("x other alpha", everywhere("add sub subtract"), "torch.rsub aten.rsub")(broadcasting)
rule("x other rounding_mode", everywhere("div divide"))(broadcasting)
rule("x end weight", everywhere("lerp"))(broadcasting)
rule("x tensor1 tensor2 value", everywhere("addcmul addcdiv"))(broadcasting)
rule("x min max", everywhere("clamp clip"))(broadcasting)
rule("x mask value", everywhere("masked_fill"))(broadcasting)
rule("x other rtol atol equal_nan", everywhere("isclose"))(broadcasting)


@rule("x exponent", everywhere("pow"))
def _power(bound: Bound) -> RuleClaim | None:
    """Either the base or the exponent may be a number."""
    return broadcasting(bound, ("x", "exponent"))


@rule("condition x other", "torch.where aten.where")
def _where(bound: Bound) -> RuleClaim | None:
    """A condition alone asks for positions, and their number depends on the values."""
    if "other" not in bound.values or not bound.has("condition"):
        return None
    return broadcasting(bound, ("condition", "x", "other"))


@rule("x other", "torch.Tensor.type_as torch.Tensor.expand_as")
def _like(bound: Bound) -> RuleClaim | None:
    """The result has the shape or dtype of the other tensor, whose values do not matter."""
    shape, outside = bound.shape(), bound.dims("other")
    if shape is None or outside is None or len(shape) > len(outside):
        return None
    inside = named(shape, letters(len(outside)))
    return RuleClaim({"x": inside, "other": outside}, (outside,))


# A split of dropout is right if each rank draws its part of the numbers of the whole. The check
# arranges that; real ranks have to do so themselves.
rule("x p training inplace", functional("dropout dropout1d dropout2d dropout3d"))(same)
rule("x p train", "torch.dropout aten.dropout")(same)


@rule("x weight", functional("prelu"), "torch.prelu torch.Tensor.prelu aten.prelu")
def _prelu(bound: Bound) -> RuleClaim | None:
    """One weight for each channel (the second dimension), or one for all."""
    dims, weight = bound.dims(), bound.shape("weight")
    if dims is None or weight is None or len(weight) != 1:
        return None
    if weight == (1,):
        return RuleClaim({"x": dims, "weight": ["1"]}, (dims,))
    if dims[1:2] in ([], ["1"]):
        return None
    return RuleClaim({"x": dims, "weight": dims[1:2]}, (dims,))


@rule("x dim", functional("glu"), "aten.glu")
def _glu(bound: Bound) -> RuleClaim | None:
    """The halves of a dimension gate each other, so it is not split."""
    dims = bound.dims()
    if not dims:
        return None
    at = bound.get("dim", -1) % len(dims)
    inside = [*dims[:at], f"{letters(1, at)[0]}^", *dims[at + 1 :]]
    return unary(inside, [*dims[:at], "half^", *dims[at + 1 :]])


# --- Reductions: a reduced dimension leaves partial results, if the reduction allows it -----------

# A mean of means is the mean only for equal parts. Extrema are exact only if no two elements share
# one: the gradient of a tie depends on the order.


def reduction(mark: str, outputs: int = 1, dim: int | None = None) -> Rule:
    """A rule for a reduction over `dim`.

    Args:
        mark: the suffix of reduced dimensions: a reduction, or `^` if they are not split.
        outputs: number of results.
        dim: default dimension; None means all.
    """

    def claim(bound: Bound) -> RuleClaim | None:
        dims, reduced = bound.dims(), positive_dims(bound.get("dim", dim), bound.shape())
        if dims is None or reduced is None:
            return None
        inside = [d + mark if i in reduced and d != "1" else d for i, d in enumerate(dims)]
        ones = ["1"] if bound.get("keepdim") else []
        kept = [name for i, d in enumerate(dims) for name in (ones if i in reduced else [d])]
        return unary(inside, *[kept] * outputs)

    return claim


_WHOLE = reduction("^")
_WHOLE_PAIR = reduction("^", 2)

rule("x dim keepdim dtype", everywhere("sum nansum"))(reduction(SUM))
rule("x dim", everywhere("count_nonzero"))(reduction(SUM))
rule("x dim keepdim dtype", everywhere("mean"))(reduction(AVERAGE))
rule("x dim keepdim", everywhere("amax any"))(reduction(MAXIMUM))
rule("x dim keepdim", everywhere("amin all"))(reduction(MINIMUM))
rule("x dim keepdim dtype", everywhere("prod"))(reduction(PRODUCT))
rule("x dim keepdim", everywhere("logsumexp argmax argmin"))(_WHOLE)
# A value and its index.
rule("x dim keepdim", everywhere("mode"))(reduction("^", 2, -1))
rule("x k dim keepdim", everywhere("kthvalue"))(reduction("^", 2, -1))


@rule("x dim keepdim", everywhere("max"))
def _max(bound: Bound) -> RuleClaim | None:
    return _extremum(bound, MAXIMUM)


@rule("x dim keepdim", everywhere("min"))
def _min(bound: Bound) -> RuleClaim | None:
    return _extremum(bound, MINIMUM)


def _extremum(bound: Bound, mark: str) -> RuleClaim | None:
    """With a dimension, the result includes the index; two tensors are compared elementwise."""
    if bound.has("dim"):
        return broadcasting(bound, ("x", "dim")) if bound.positions == ("x", "dim") else None
    return reduction(mark)(bound) if "dim" not in bound.values else _WHOLE_PAIR(bound)


@rule("x dim keepdim", everywhere("median nanmedian"))
def _median(bound: Bound) -> RuleClaim | None:
    """With a dimension, the result includes the index."""
    return _WHOLE_PAIR(bound) if "dim" in bound.values else _WHOLE(bound)


@rule("x dim unbiased keepdim correction", "torch.var torch.Tensor.var torch.std torch.Tensor.std")
def _spread(bound: Bound) -> RuleClaim | None:
    """The variances of parts do not give the variance of the whole."""
    return None if isinstance(bound.get("dim"), bool) else _WHOLE(bound)


@rule("x dim correction keepdim", "aten.var aten.std")
def _spread_of_dims(bound: Bound) -> RuleClaim | None:
    """A number instead of the list would be the correction of another overload."""
    return _WHOLE(bound) if isinstance(bound.get("dim"), list | tuple) else None


@rule("x dim unbiased keepdim correction", "torch.var_mean torch.std_mean")
def _spread_and_mean(bound: Bound) -> RuleClaim | None:
    return None if isinstance(bound.get("dim"), bool) else _WHOLE_PAIR(bound)


@rule("x dim keepdim", "torch.aminmax torch.Tensor.aminmax aten.aminmax")
def _extrema(bound: Bound) -> RuleClaim | None:
    """The same dimension leaves minima in one result and maxima in the other."""
    claim, shape = reduction(MINIMUM)(bound), bound.shape()
    reduced = positive_dims(bound.get("dim"), shape)
    if claim is None or shape is None or reduced is None:
        return None
    kept = claim.outputs[0] or ["1"]
    own = [f"{letters(1, i)[0]}{MAXIMUM}" for i in sorted(reduced) if shape[i] != 1]
    return RuleClaim(claim.inputs, (kept, [*kept, ":", *own] if own else kept))


@rule("x ord dim keepdim dtype", "torch.linalg.vector_norm aten.linalg_vector_norm")
@rule("x p dim keepdim dtype", everywhere("norm") + " torch.functional.norm")
def _norm(bound: Bound) -> RuleClaim | None:
    """Some norms are a sum or an extremum over the elements."""
    order = bound.get("ord", bound.get("p", 2))
    if order == "fro":
        order = 2
    if not isinstance(order, int | float):
        return None
    marks = {0: SUM, 1: SUM, float("inf"): MAXIMUM, float("-inf"): MINIMUM}
    return reduction(marks.get(order, "^"))(bound)


@rule("x k dim largest sorted", everywhere("topk"))
@rule("x dim descending stable", everywhere("sort"))
@rule("x dim", everywhere("cummax cummin"))
def _ordered(bound: Bound) -> RuleClaim | None:
    """Indices refer to the whole dimension, which may have another length in the result."""
    dims, whole = bound.dims(), positive_dims(bound.get("dim", -1), bound.shape())
    if dims is None or whole is None:
        return None
    text = ["_" if i in whole else d for i, d in enumerate(dims)]
    return unary(text, text, text)


@rule("x dim descending stable", everywhere("argsort"))
def _order(bound: Bound) -> RuleClaim | None:
    claim = _ordered(bound)
    return None if claim is None else RuleClaim(claim.inputs, claim.outputs[:1])


@rule("tensor num_classes", functional("one_hot"))
def _one_hot(bound: Bound) -> RuleClaim | None:
    """Without a number of classes, it would depend on the largest index of each rank."""
    dims, classes = bound.dims("tensor"), bound.get("num_classes", -1)
    if dims is None or classes < 1:
        return None
    return RuleClaim({"tensor": dims}, ([*dims, str(classes)],))
