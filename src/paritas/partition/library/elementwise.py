"""Operators that work on each element by itself, and reductions."""

from __future__ import annotations

from paritas.partition.library.registry import (
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
)

# --- Operators that work on each element by itself: every dimension can be split ------------------

# Parameters that are tensors or numbers, and broadcast with each other.
_OPERANDS = ("x", "other", "end", "weight", "tensor1", "tensor2", "min", "max", "mask", "value")


def same(bound: Bound) -> RuleClaim | None:
    """One tensor, one result of the same shape; in place, nothing is claimed of what it writes."""
    shape = bound.shape("x")
    if shape is None or bound.get("inplace"):
        return None
    dims = named(shape, letters(len(shape)))
    return RuleClaim({"x": dims}, (dims,))


def broadcasting(bound: Bound) -> RuleClaim | None:
    """Several tensors that broadcast."""
    shapes = {n: bound.shape(n) for n in bound.values if n in _OPERANDS and bound.has(n)}
    dims = broadcast(shape for shape in shapes.values() if shape is not None)
    if dims is None or not shapes:
        return None
    return RuleClaim(dict(zip(shapes, dims[0], strict=True)), (" ".join(dims[1]),))


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
    """A number may be the base as well as the exponent."""
    inputs = {n: s for n in ("x", "exponent") if (s := bound.shape(n)) is not None}
    dims = broadcast(inputs.values())
    if dims is None or not inputs:
        return None
    return RuleClaim(dict(zip(inputs, dims[0], strict=True)), (" ".join(dims[1]),))


@rule("condition x other", "torch.where aten.where")
def _where(bound: Bound) -> RuleClaim | None:
    """A condition alone asks for positions, of which there may be any number."""
    if "other" not in bound.values:
        return None
    inputs = {n: s for n in ("condition", "x", "other") if (s := bound.shape(n)) is not None}
    dims = broadcast(inputs.values())
    if dims is None or "condition" not in inputs:
        return None
    return RuleClaim(dict(zip(inputs, dims[0], strict=True)), (" ".join(dims[1]),))


@rule("x other", "torch.Tensor.type_as torch.Tensor.expand_as")
def _like(bound: Bound) -> RuleClaim | None:
    """The other tensor says what the result is like; its values do not matter."""
    shape, other = bound.shape("x"), bound.shape("other")
    if shape is None or other is None or len(shape) > len(other):
        return None
    names = letters(len(other))
    return RuleClaim(
        {"x": named(shape, names), "other": named(other, names)}, (named(other, names),)
    )


@rule("x p training inplace", functional("dropout dropout1d dropout2d dropout3d"))
@rule("x p train", "torch.dropout aten.dropout")
def _dropout(bound: Bound) -> RuleClaim | None:
    """The splits of a random draw are right if every rank draws its part of the whole's numbers.

    A check pins the draws so; ranks of their own have to see to it.
    """
    return same(bound)


@rule("x weight", functional("prelu"), "torch.prelu torch.Tensor.prelu aten.prelu")
def _prelu(bound: Bound) -> RuleClaim | None:
    """A weight for each channel, which is the second dimension, or one for all."""
    shape, weight = bound.shape("x"), bound.shape("weight")
    if shape is None or weight is None or len(weight) != 1:
        return None
    dims = named(shape, letters(len(shape)))
    channel = "1" if weight == (1,) else dims.split()[1] if len(shape) > 1 else None
    if channel is None:
        return None
    if channel == "1" and weight != (1,):
        return None
    return RuleClaim({"x": dims, "weight": channel}, (dims,))


@rule("x dim", functional("glu"), "aten.glu")
def _glu(bound: Bound) -> RuleClaim | None:
    """Halves of a dimension gate each other: it stays whole."""
    shape = bound.shape("x")
    if not shape:
        return None
    dims = named(shape, letters(len(shape))).split()
    dim = bound.get("dim", -1) % len(shape)
    inside = [*dims[:dim], f"{letters(1, dim)[0]}^", *dims[dim + 1 :]]
    outside = [*dims[:dim], "half^", *dims[dim + 1 :]]
    return RuleClaim({"x": " ".join(inside)}, (" ".join(outside),))


# --- Reductions: a dimension that is reduced leaves terms behind where the reduction can be -------

# A mean of means is the mean only of equal parts; the extrema are exact as long as no two elements
# share one (the gradient of a tie depends on who is asked first).


def reduce(
    shape: tuple[int, ...] | None, dim: object, mark: str, *, keepdim: bool, outputs: int = 1
) -> RuleClaim | None:
    """Reduce dimensions of a tensor.

    Args:
        mark: what the reduced dimensions are: terms of a kind, or whole (`^`).
    """
    reduced = positive_dims(dim, shape)
    if shape is None or reduced is None:
        return None
    dims = named(shape, letters(len(shape))).split()
    inside = [d + mark if i in reduced and d != "1" else d for i, d in enumerate(dims)]
    kept = ["1" if i in reduced else d for i, d in enumerate(dims) if keepdim or i not in reduced]
    return RuleClaim({"x": " ".join(inside)}, (" ".join(kept),) * outputs)


def _marked(bound: Bound, mark: str, outputs: int = 1) -> RuleClaim | None:
    keepdim = bool(bound.get("keepdim"))
    return reduce(bound.shape("x"), bound.get("dim"), mark, keepdim=keepdim, outputs=outputs)


@rule("x dim keepdim dtype", everywhere("sum nansum"))
@rule("x dim", everywhere("count_nonzero"))
def _sum(bound: Bound) -> RuleClaim | None:
    return _marked(bound, SUM)


@rule("x dim keepdim dtype", everywhere("mean"))
def _mean(bound: Bound) -> RuleClaim | None:
    return _marked(bound, AVERAGE)


@rule("x dim keepdim", everywhere("amax any"))
def _maximum(bound: Bound) -> RuleClaim | None:
    """Whether any is true is the largest of truths."""
    return _marked(bound, MAXIMUM)


@rule("x dim keepdim", everywhere("amin all"))
def _minimum(bound: Bound) -> RuleClaim | None:
    return _marked(bound, MINIMUM)


@rule("x dim keepdim dtype", everywhere("prod"))
def _product(bound: Bound) -> RuleClaim | None:
    return _marked(bound, PRODUCT)


@rule("x dim keepdim", everywhere("max"))
def _max(bound: Bound) -> RuleClaim | None:
    return _extremum(bound, MAXIMUM)


@rule("x dim keepdim", everywhere("min"))
def _min(bound: Bound) -> RuleClaim | None:
    return _extremum(bound, MINIMUM)


def _extremum(bound: Bound, mark: str) -> RuleClaim | None:
    """Along a dimension they say where it is too; of two tensors they go by element."""
    if bound.has("dim"):
        elements = Bound({"x": bound.get("x"), "other": bound.get("dim")}, ("x", "other"), {})
        claim = broadcasting(elements) if bound.positions == ("x", "dim") else None
        return claim and RuleClaim(
            {"x": claim.inputs["x"], "dim": claim.inputs["other"]}, claim.outputs
        )
    return _marked(bound, mark) if "dim" not in bound.values else _marked(bound, "^", 2)


@rule("x dim keepdim", everywhere("logsumexp argmax argmin"))
def _whole(bound: Bound) -> RuleClaim | None:
    return _marked(bound, "^")


@rule("x dim keepdim", everywhere("median nanmedian"))
def _median(bound: Bound) -> RuleClaim | None:
    """Along a dimension it comes with its place."""
    return _marked(bound, "^", 2 if "dim" in bound.values else 1)


@rule("x dim keepdim", everywhere("mode"))
@rule("x k dim keepdim", everywhere("kthvalue"))
def _ranked(bound: Bound) -> RuleClaim | None:
    """A value and its place; along the last dimension unless another is named."""
    keepdim = bool(bound.get("keepdim"))
    return reduce(bound.shape("x"), bound.get("dim", -1), "^", keepdim=keepdim, outputs=2)


@rule("x dim unbiased keepdim correction", "torch.var torch.Tensor.var torch.std torch.Tensor.std")
def _spread(bound: Bound) -> RuleClaim | None:
    """The spread within parts does not give the spread of the whole."""
    return None if isinstance(bound.get("dim"), bool) else _marked(bound, "^")


@rule("x dim correction keepdim", "aten.var aten.std")
def _spread_of_dims(bound: Bound) -> RuleClaim | None:
    """A number in place of the list would be the correction of another overload."""
    return _marked(bound, "^") if isinstance(bound.get("dim"), list | tuple) else None


@rule("x dim unbiased keepdim correction", "torch.var_mean torch.std_mean")
def _spread_and_mean(bound: Bound) -> RuleClaim | None:
    return None if isinstance(bound.get("dim"), bool) else _marked(bound, "^", 2)


@rule("x dim keepdim", "torch.aminmax torch.Tensor.aminmax aten.aminmax")
def _extrema(bound: Bound) -> RuleClaim | None:
    """The same dimension leaves minima in one result and maxima in the other."""
    claim = _marked(bound, MINIMUM)
    shape = bound.shape("x")
    reduced = positive_dims(bound.get("dim"), shape)
    if claim is None or shape is None or reduced is None:
        return None
    kept = claim.outputs[0] or "1"
    own = [f"{letters(1, i)[0]}{MAXIMUM}" for i in sorted(reduced) if shape[i] != 1]
    return RuleClaim(claim.inputs, (kept, f"{kept} : {' '.join(own)}" if own else kept))


@rule("x ord dim keepdim dtype", "torch.linalg.vector_norm aten.linalg_vector_norm")
@rule("x p dim keepdim dtype", everywhere("norm") + " torch.functional.norm")
def _norm(bound: Bound) -> RuleClaim | None:
    """Norms that are a sum, or an extremum, of what the elements give."""
    order = bound.get("ord", bound.get("p", 2))
    if order == "fro":
        order = 2
    if not isinstance(order, int | float):
        return None
    marks = {0: SUM, 1: SUM, float("inf"): MAXIMUM, float("-inf"): MINIMUM}
    return _marked(bound, marks.get(order, "^"))


@rule("x k dim largest sorted", everywhere("topk"))
@rule("x dim descending stable", everywhere("sort"))
@rule("x dim", everywhere("cummax cummin"))
def _ordered(bound: Bound) -> RuleClaim | None:
    """Places are within the whole dimension; of the result it may have another length."""
    shape = bound.shape("x")
    whole = positive_dims(bound.get("dim", -1), shape)
    if shape is None or whole is None:
        return None
    dims = named(shape, letters(len(shape))).split()
    text = " ".join("_" if i in whole else d for i, d in enumerate(dims))
    return RuleClaim({"x": text}, (text, text))


@rule("x dim descending stable", everywhere("argsort"))
def _order(bound: Bound) -> RuleClaim | None:
    claim = _ordered(bound)
    return None if claim is None else RuleClaim(claim.inputs, claim.outputs[:1])


@rule("tensor num_classes", functional("one_hot"))
def _one_hot(bound: Bound) -> RuleClaim | None:
    """How many classes there are must not be left to the largest index that a rank sees."""
    shape, classes = bound.shape("tensor"), bound.get("num_classes", -1)
    if shape is None or classes < 1:
        return None
    dims = named(shape, letters(len(shape)))
    return RuleClaim({"tensor": dims}, (f"{dims} {classes}".strip(),))
