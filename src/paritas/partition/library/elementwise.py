"""Operators that work on each element by itself: every dimension can be split."""

from __future__ import annotations

from paritas.partition.library.claims import Bound, Claim, broadcast, letters, named
from paritas.partition.library.registry import everywhere, functional, rule

# Parameters that are tensors or numbers, and broadcast with each other.
_OPERANDS = ("x", "other", "end", "weight", "tensor1", "tensor2", "min", "max", "mask", "value")


def same(bound: Bound) -> Claim | None:
    """One tensor, one result of the same shape; in place, nothing is claimed of what it writes."""
    shape = bound.shape("x")
    if shape is None or bound.get("inplace"):
        return None
    dims = named(shape, letters(len(shape)))
    return Claim({"x": dims}, (dims,))


def broadcasting(bound: Bound) -> Claim | None:
    """Several tensors that broadcast."""
    shapes = {n: bound.shape(n) for n in bound.values if n in _OPERANDS and bound.has(n)}
    dims = broadcast(shape for shape in shapes.values() if shape is not None)
    if dims is None or not shapes:
        return None
    return Claim(dict(zip(shapes, dims[0], strict=True)), (" ".join(dims[1]),))


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
def _power(bound: Bound) -> Claim | None:
    """A number may be the base as well as the exponent."""
    inputs = {n: s for n in ("x", "exponent") if (s := bound.shape(n)) is not None}
    dims = broadcast(inputs.values())
    if dims is None or not inputs:
        return None
    return Claim(dict(zip(inputs, dims[0], strict=True)), (" ".join(dims[1]),))


@rule("condition x other", "torch.where aten.where")
def _where(bound: Bound) -> Claim | None:
    """A condition alone asks for positions, of which there may be any number."""
    if "other" not in bound.values:
        return None
    inputs = {n: s for n in ("condition", "x", "other") if (s := bound.shape(n)) is not None}
    dims = broadcast(inputs.values())
    if dims is None or "condition" not in inputs:
        return None
    return Claim(dict(zip(inputs, dims[0], strict=True)), (" ".join(dims[1]),))


@rule("x other", "torch.Tensor.type_as torch.Tensor.expand_as")
def _like(bound: Bound) -> Claim | None:
    """The other tensor says what the result is like; its values do not matter."""
    shape, other = bound.shape("x"), bound.shape("other")
    if shape is None or other is None or len(shape) > len(other):
        return None
    names = letters(len(other))
    return Claim({"x": named(shape, names), "other": named(other, names)}, (named(other, names),))


@rule("x p training inplace", functional("dropout dropout1d dropout2d dropout3d"))
@rule("x p train", "torch.dropout aten.dropout")
def _dropout(bound: Bound) -> Claim | None:
    """The splits of a random draw are right if every rank draws its part of the whole's numbers.

    A check pins the draws so; ranks of their own have to see to it.
    """
    return same(bound)


@rule("x weight", functional("prelu"), "torch.prelu torch.Tensor.prelu aten.prelu")
def _prelu(bound: Bound) -> Claim | None:
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
    return Claim({"x": dims, "weight": channel}, (dims,))


@rule("x dim", functional("glu"), "aten.glu")
def _glu(bound: Bound) -> Claim | None:
    """Halves of a dimension gate each other: it stays whole."""
    shape = bound.shape("x")
    if not shape:
        return None
    dims = named(shape, letters(len(shape))).split()
    dim = bound.get("dim", -1) % len(shape)
    inside = [*dims[:dim], f"{letters(1, dim)[0]}^", *dims[dim + 1 :]]
    outside = [*dims[:dim], "half^", *dims[dim + 1 :]]
    return Claim({"x": " ".join(inside)}, (" ".join(outside),))
