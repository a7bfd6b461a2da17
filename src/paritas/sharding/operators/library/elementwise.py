"""Operators that work on each element separately, and reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.core.operators.calls import Bound, broadcast, letters, named, positive_dims
from paritas.sharding.operators.library.registry import (
    AVERAGE,
    MAXIMUM,
    MINIMUM,
    PRODUCT,
    SUM,
    RuleClaim,
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
    "abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt",
    "reciprocal square sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid",
    "erf erfc erfinv ceil floor trunc frac sign sgn lgamma digamma i0 sinc deg2rad rad2deg",
    "isnan isinf isfinite isposinf isneginf signbit logical_not bitwise_not relu arcsin",
    "arccos arctan detach softsign tanhshrink logsigmoid float double half bfloat16 int",
    "long bool expit selu ndtr silu mish hardswish hardsigmoid alias round logit",
    "nan_to_num clone contiguous relu6 gelu elu celu leaky_relu softplus hardshrink",
    "softshrink hardtanh threshold zeros_like ones_like _to_copy type to dropout dropout1d",
    "dropout2d dropout3d",
)(same)

rule(
    "maximum minimum fmax fmin atan2 arctan2 remainder fmod hypot eq ne lt le gt ge",
    "greater greater_equal less less_equal not_equal logical_and logical_or logical_xor",
    "bitwise_and bitwise_or bitwise_xor copysign logaddexp logaddexp2 xlogy floor_divide",
    "ldexp float_power multiply true_divide mul add sub subtract rsub div divide lerp",
    "addcmul addcdiv clamp clip masked_fill isclose",
)(broadcasting)


@rule("pow")
def _power(bound: Bound) -> RuleClaim | None:
    """Either the base or the exponent may be a number."""
    return broadcasting(bound, ("x", "exponent"))


@rule("where")
def _where(bound: Bound) -> RuleClaim | None:
    """A condition alone asks for positions, and their number depends on the values."""
    if "other" not in bound.values or not bound.has("condition"):
        return None
    return broadcasting(bound, ("condition", "x", "other"))


@rule("type_as expand_as")
def _like(bound: Bound) -> RuleClaim | None:
    """The result has the shape or dtype of the other tensor, whose values do not matter."""
    shape, outside = bound.shape(), bound.dims("other")
    if shape is None or outside is None or len(shape) > len(outside):
        return None
    inside = named(shape, letters(len(outside)))
    return RuleClaim({"x": inside, "other": outside}, (outside,))


# A split of dropout is right if each rank draws its part of the numbers of the whole. The check
# arranges that; real ranks have to do so themselves.


@rule("prelu")
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


@rule("glu")
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

rule("sum nansum count_nonzero")(reduction(SUM))
rule("mean")(reduction(AVERAGE))
rule("amax any")(reduction(MAXIMUM))
rule("amin all")(reduction(MINIMUM))
rule("prod")(reduction(PRODUCT))
rule("logsumexp argmax argmin")(_WHOLE)
# A value and its index.
rule("mode kthvalue")(reduction("^", 2, -1))


@rule("max")
def _max(bound: Bound) -> RuleClaim | None:
    return _extremum(bound, MAXIMUM)


@rule("min")
def _min(bound: Bound) -> RuleClaim | None:
    return _extremum(bound, MINIMUM)


def _extremum(bound: Bound, mark: str) -> RuleClaim | None:
    """With a dimension, the result includes the index; two tensors are compared elementwise."""
    if bound.has("dim"):
        return broadcasting(bound, ("x", "dim")) if bound.positions == ("x", "dim") else None
    return reduction(mark)(bound) if "dim" not in bound.values else _WHOLE_PAIR(bound)


@rule("median nanmedian")
def _median(bound: Bound) -> RuleClaim | None:
    """With a dimension, the result includes the index."""
    return _WHOLE_PAIR(bound) if "dim" in bound.values else _WHOLE(bound)


@rule("torch.var Tensor.var torch.std Tensor.std")
def _spread(bound: Bound) -> RuleClaim | None:
    """The variances of parts do not give the variance of the whole."""
    return None if isinstance(bound.get("dim"), bool) else _WHOLE(bound)


@rule("aten.var aten.std")
def _spread_of_dims(bound: Bound) -> RuleClaim | None:
    """A number instead of the list would be the correction of another overload."""
    return _WHOLE(bound) if isinstance(bound.get("dim"), list | tuple) else None


@rule("var_mean std_mean")
def _spread_and_mean(bound: Bound) -> RuleClaim | None:
    return None if isinstance(bound.get("dim"), bool) else _WHOLE_PAIR(bound)


@rule("aminmax")
def _extrema(bound: Bound) -> RuleClaim | None:
    """The same dimension leaves minima in one result and maxima in the other."""
    claim, shape = reduction(MINIMUM)(bound), bound.shape()
    reduced = positive_dims(bound.get("dim"), shape)
    if claim is None or shape is None or reduced is None:
        return None
    kept = claim.outputs[0] or ["1"]
    own = [f"{letters(1, i)[0]}{MAXIMUM}" for i in sorted(reduced) if shape[i] != 1]
    return RuleClaim(claim.inputs, (kept, [*kept, ":", *own] if own else kept))


@rule("vector_norm linalg_vector_norm norm")
def _norm(bound: Bound) -> RuleClaim | None:
    """Some norms are a sum or an extremum over the elements."""
    order = bound.get("ord", bound.get("p", 2))
    if order == "fro":
        order = 2
    if not isinstance(order, int | float):
        return None
    marks = {0: SUM, 1: SUM, float("inf"): MAXIMUM, float("-inf"): MINIMUM}
    return reduction(marks.get(order, "^"))(bound)


@rule("topk sort cummax cummin")
def _ordered(bound: Bound) -> RuleClaim | None:
    """Indices refer to the whole dimension, which may have another length in the result."""
    dims, whole = bound.dims(), positive_dims(bound.get("dim", -1), bound.shape())
    if dims is None or whole is None:
        return None
    text = ["_" if i in whole else d for i, d in enumerate(dims)]
    return unary(text, text, text)


@rule("argsort")
def _order(bound: Bound) -> RuleClaim | None:
    claim = _ordered(bound)
    return None if claim is None else RuleClaim(claim.inputs, claim.outputs[:1])


@rule("one_hot")
def _one_hot(bound: Bound) -> RuleClaim | None:
    """Without a number of classes, it would depend on the largest index of each rank."""
    dims, classes = bound.dims("tensor"), bound.get("num_classes", -1)
    if dims is None or classes < 1:
        return None
    return RuleClaim({"tensor": dims}, ([*dims, str(classes)],))
