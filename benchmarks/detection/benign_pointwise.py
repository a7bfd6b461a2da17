"""Functions of single elements by other formulas, none of which cancels where torch's does not.

A narrow dtype is computed in float32 and rounded once, as kernels do.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.detection.benign_kinds import Rewrite, always, is_float, narrow, wide
from torch import Tensor
from torch.fx import Node

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
LOG2_E = math.log2(math.e)
# As written in the papers, and in torch: the constant of the approximate gelu.
CUBIC = 0.044715

BY_EXP = Rewrite("activation_by_exp", "sigmoid, silu, tanh and friends by their exponentials")
BY_ERFC = Rewrite("gelu_by_erfc", "gelu by the complementary error function")
BY_SIGMOID = Rewrite("gelu_by_sigmoid", "the approximate gelu by a sigmoid")
BY_SELECTION = Rewrite("activation_by_selection", "relu and friends by comparing and selecting")
ACTIVATION_GRADIENT = Rewrite("activation_gradient", "an activation's gradient by its formula")
BY_RECIPROCAL = Rewrite("division_by_reciprocal", "a division as a product with the reciprocal")
BY_DIVISION = Rewrite("product_by_division", "a product with a number as a division by 1/number")
BY_ROOT = Rewrite("rsqrt_by_root", "rsqrt as 1/sqrt")
BY_PRODUCTS = Rewrite("power_by_products", "a power as products, roots and reciprocals")
BASE_TWO = Rewrite("base_two", "exponential and logarithm to the base of two")
BY_NEGATION = Rewrite("subtraction_by_negation", "a difference as a sum with the negative")
LOSS = Rewrite("loss_by_formula", "a loss by its formula, averaged in float32")

POINTWISE = (
    BY_EXP,
    BY_ERFC,
    BY_SIGMOID,
    BY_SELECTION,
    ACTIVATION_GRADIENT,
    BY_RECIPROCAL,
    BY_DIVISION,
    BY_ROOT,
    BY_PRODUCTS,
    BASE_TWO,
    BY_NEGATION,
    LOSS,
)


def _floats(node: Node) -> dict[str, dict[str, Any]]:
    return always(node) if is_float(node) else {}


def _in_float32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Take and give any dtype, compute in float32 at least."""

    def widened(*args: Any, **kwargs: Any) -> Tensor:
        first = next(value for value in args if isinstance(value, Tensor))
        wider = (wide(value) if isinstance(value, Tensor) else value for value in args)
        return narrow(function(*wider, **kwargs), first)

    widened.__name__ = widened.__qualname__ = function.__name__
    return widened


def _sigmoid(x: Tensor) -> Tensor:
    small = torch.exp(-x.abs())
    return torch.where(x >= 0, 1 / (1 + small), small / (1 + small))


@BY_EXP.of(aten.sigmoid.default)
@_in_float32
def sigmoid_by_exp(x: Tensor) -> Tensor:
    return _sigmoid(x)


@BY_EXP.of(aten.silu.default)
@_in_float32
def silu_by_exp(x: Tensor) -> Tensor:
    return x * _sigmoid(x)


@BY_EXP.of(aten.tanh.default)
@_in_float32
def tanh_by_exp(x: Tensor) -> Tensor:
    small = torch.expm1(-2 * x.abs())
    return torch.where(x >= 0, -small / (2 + small), small / (2 + small))


def _usual_softplus(node: Node) -> dict[str, dict[str, Any]]:
    return always(node) if len(node.args) == 1 else {}


@BY_EXP.of(aten.softplus.default, settings=_usual_softplus)
@_in_float32
def softplus_by_exp(x: Tensor) -> Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


@BY_EXP.of(aten.elu.default, settings=lambda node: always(node) if len(node.args) < 3 else {})
@_in_float32
def elu_by_exp(x: Tensor, alpha: float = 1.0) -> Tensor:
    return x.clamp(min=0) + alpha * torch.expm1(x.clamp(max=0))


@BY_EXP.of(aten.mish.default)
@_in_float32
def mish_by_exp(x: Tensor) -> Tensor:
    # tanh(log(1 + e)) is e (e + 2) / (e (e + 2) + 2), and e stays small if x is not large.
    grown = torch.exp(-x.abs())
    up = torch.where(x >= 0, 1 + 2 * grown, grown * (grown + 2))
    return x * up / (up + torch.where(x >= 0, 2 * grown * grown, 2 * torch.ones_like(x)))


def _exact(node: Node) -> dict[str, dict[str, Any]]:
    return {} if "approximate" in node.kwargs else always(node)


def _approximate(node: Node) -> dict[str, dict[str, Any]]:
    return {"": {}} if "approximate" in node.kwargs else {}


@BY_ERFC.of(aten.gelu.default, settings=_exact)
@_in_float32
def gelu_by_erfc(x: Tensor) -> Tensor:
    return 0.5 * x * torch.erfc(-x * math.sqrt(0.5))


@BY_SIGMOID.of(aten.gelu.default, settings=_approximate)
@_in_float32
def gelu_by_sigmoid(x: Tensor, *, approximate: str) -> Tensor:
    assert approximate == "tanh", approximate
    return x * _sigmoid(math.sqrt(8 / math.pi) * (x + CUBIC * x * x * x))


@BY_SELECTION.of(aten.relu.default)
def relu_by_selection(x: Tensor) -> Tensor:
    return torch.where(x <= 0, torch.zeros_like(x), x)


@BY_SELECTION.of(aten.leaky_relu.default)
def leaky_by_selection(x: Tensor, slope: float = 0.01) -> Tensor:
    return torch.where(x > 0, x, x * slope)


@BY_SELECTION.of(aten.hardswish.default)
@_in_float32
def hardswish_by_selection(x: Tensor) -> Tensor:
    return x * ((x + 3).clamp(0, 6) * (1 / 6))


@BY_SELECTION.of(aten.masked_fill.Scalar)
def filled_by_selection(x: Tensor, mask: Tensor, value: float) -> Tensor:
    return torch.where(mask, torch.full_like(x, value), x)


@BY_SELECTION.of(aten.threshold_backward.default)
def threshold_by_product(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    return torch.where(x > threshold, grad, torch.zeros_like(grad))


@ACTIVATION_GRADIENT.of(aten.sigmoid_backward.default)
@_in_float32
def sigmoid_gradient(grad: Tensor, out: Tensor) -> Tensor:
    return (grad * out) * (1 - out)


@ACTIVATION_GRADIENT.of(aten.tanh_backward.default)
@_in_float32
def tanh_gradient(grad: Tensor, out: Tensor) -> Tensor:
    return grad * ((1 - out) * (1 + out))


@ACTIVATION_GRADIENT.of(aten.silu_backward.default)
@_in_float32
def silu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    share = _sigmoid(x)
    return grad * (share + x * share * _sigmoid(-x))


@ACTIVATION_GRADIENT.of(aten.gelu_backward.default)
@_in_float32
def gelu_gradient(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "none":
        density = torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
        return grad * (0.5 * torch.erfc(-x * math.sqrt(0.5)) + x * density)
    scale = math.sqrt(8 / math.pi)
    share = _sigmoid(scale * (x + CUBIC * x * x * x))
    inner = scale * (1 + 3 * CUBIC * x * x)
    return grad * (share + x * share * (1 - share) * inner)


@ACTIVATION_GRADIENT.of(aten.softplus_backward.default)
@_in_float32
def softplus_gradient(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    return torch.where(x * beta > threshold, grad, grad * _sigmoid(x * beta))


@BY_RECIPROCAL.of(aten.div.Tensor, settings=_floats)
@_in_float32
def divide_by_reciprocal(x: Tensor, y: Tensor | float) -> Tensor:
    return x * (torch.reciprocal(y) if isinstance(y, Tensor) else 1 / y)


BY_RECIPROCAL.of(aten.div.Scalar, settings=_floats)(divide_by_reciprocal)


def _by_number(node: Node) -> dict[str, dict[str, Any]]:
    number = node.args[1]
    usable = isinstance(number, (int, float)) and math.isfinite(number) and number != 0
    return _floats(node) if usable else {}


@BY_DIVISION.of(aten.mul.Tensor, aten.mul.Scalar, settings=_by_number)
@_in_float32
def multiply_by_division(x: Tensor, number: float) -> Tensor:
    return x / (1 / number)


@BY_ROOT.of(aten.rsqrt.default)
@_in_float32
def rsqrt_by_root(x: Tensor) -> Tensor:
    return 1 / x.sqrt()


def _known_power(node: Node) -> dict[str, dict[str, Any]]:
    return _floats(node) if node.args[1] in {2, 3, -0.5, 0.5, -1} else {}


@BY_PRODUCTS.of(aten.pow.Tensor_Scalar, settings=_known_power)
@_in_float32
def power_by_products(x: Tensor, power: float) -> Tensor:
    powers = {2: lambda: x * x, 3: lambda: x * x * x, 0.5: x.sqrt, -0.5: x.rsqrt, -1: x.reciprocal}
    return powers[power]()


@BASE_TWO.of(aten.exp.default)
@_in_float32
def exp_base_two(x: Tensor) -> Tensor:
    return torch.exp2(x * LOG2_E)


@BASE_TWO.of(aten.log.default)
@_in_float32
def log_base_two(x: Tensor) -> Tensor:
    return torch.log2(x) * math.log(2)


def _two_tensors(node: Node) -> dict[str, dict[str, Any]]:
    plain = len(node.args) == 2 and not node.kwargs and isinstance(node.args[1], Node)
    return _floats(node) if plain else {}


@BY_NEGATION.of(aten.sub.Tensor, settings=_two_tensors)
def subtract_by_negation(x: Tensor, y: Tensor) -> Tensor:
    return -(y - x)


@LOSS.of(aten.binary_cross_entropy_with_logits.default)
@_in_float32
def logistic_loss(x: Tensor, y: Tensor, weight=None, positive=None, reduction: int = 1) -> Tensor:
    assert (weight, positive, reduction) == (None, None, 1)
    return (x.clamp(min=0) - x * y + torch.log1p(torch.exp(-x.abs()))).mean()


@LOSS.of(aten.mse_loss.default)
@_in_float32
def squared_loss(x: Tensor, y: Tensor, reduction: int = 1) -> Tensor:
    assert reduction == 1, reduction
    return ((x - y) * (x - y)).sum() * (1 / x.numel())


@LOSS.of(aten.huber_loss.default)
@_in_float32
def huber_loss(x: Tensor, y: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    assert reduction == 1, reduction
    far = (x - y).abs()
    near = far.clamp(max=delta)
    return (near * (far - 0.5 * near)).mean()
