"""Mistakes that people make in kernels and ports, each in a program of a few lines."""

from __future__ import annotations

import dataclasses
import math
import re
import types
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    Part = Callable[["Program", Tensor], Tensor]

X = torch.randn(6, 10, 16, generator=torch.Generator().manual_seed(0))


class Program(nn.Module):
    """A part, with something before and something behind it."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part
        torch.manual_seed(1)
        self.weight = nn.Parameter(0.3 * torch.randn(24, 16))
        self.bias = nn.Parameter(torch.randn(24))
        self.gain = nn.Parameter(torch.rand(16) + 0.5)
        self.shift = nn.Parameter(torch.randn(16))
        self.filters = nn.Parameter(0.2 * torch.randn(8, 4, 3, 3))
        self.table = nn.Parameter(torch.randn(30, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self, torch.sin(x) + 0.1 * x + self.shift).tanh()


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A part, the same with a mistake, and the words that are true of it.

    Attributes:
        gradients: the mistake is in the backward pass.
    """

    right: Part
    wrong: Part
    kinds: frozenset[str]
    gradients: bool = False


MISTAKES: dict[str, Mistake] = {}


def hidden(name: str, part: Part) -> Part:
    """The part as one operator, as a kernel is: what it calls is not seen."""
    of_torch = Program(part)
    names = [one for one, _ in of_torch.named_parameters()]

    def compute(x: Tensor, parameters: list[Tensor]) -> Tensor:
        values = dict(zip(names, parameters, strict=True))
        return part(cast("Program", types.SimpleNamespace(**values)), x).clone()

    kernel = torch.library.custom_op(
        f"plain_mistakes::{re.sub('[^a-z0-9]', '_', name.lower())}",
        compute,
        mutates_args=(),
        schema="(Tensor x, Tensor[] parameters) -> Tensor",
    )
    return lambda program, x: kernel(x, [getattr(program, one) for one in names])


def _add(name: str, kinds: str, right: Part, wrong: Part, *, gradients: bool = False) -> None:
    MISTAKES[name] = Mistake(right, wrong, frozenset(kinds.split(", ")), gradients)


# --- Products -------------------------------------------------------------------------------------


def _linear(p: Program, x: Tensor) -> Tensor:
    return functional.linear(x, p.weight, p.bias)


def _images(x: Tensor) -> Tensor:
    return x.reshape(-1)[: 2 * 4 * 6 * 6].reshape(2, 4, 6, 6)


_add("a bias that multiplies", "other function, axis scale", _linear,
     lambda p, x: functional.linear(x, p.weight) * p.bias)  # fmt: skip
_add("a bias that is subtracted", "sign", _linear,
     lambda p, x: functional.linear(x, p.weight) - p.bias)  # fmt: skip
_add("no bias", "missing bias", _linear, lambda p, x: functional.linear(x, p.weight))
_add("a bias of the neighbor", "shift, wrong index, permutation", _linear,
     lambda p, x: functional.linear(x, p.weight, p.bias.roll(1)))  # fmt: skip
_add("the tail of the summed axis", "partial sum", _linear,
     lambda p, x: functional.linear(x[..., :12], p.weight[:, :12], p.bias))  # fmt: skip
_add("a weight in eight bits", "precision", _linear,
     lambda p, x: functional.linear(x, _in_eight_bits(p.weight), p.bias))  # fmt: skip
_add("a kernel that is flipped", "permutation",
     lambda p, x: functional.conv2d(_images(x), p.filters, padding=1),
     lambda p, x: functional.conv2d(_images(x), p.filters.flip(-1, -2), padding=1))  # fmt: skip
_add("padding by the edge", "wrong argument",
     lambda p, x: functional.conv2d(_images(x), p.filters, padding=1),
     lambda p, x: functional.conv2d(
         functional.pad(_images(x), (1, 1, 1, 1), mode="replicate"), p.filters))  # fmt: skip


_add("the input of the row before last", "shift, wrong index, permutation",
     lambda p, x: functional.linear(x, p.weight),
     lambda p, x: functional.linear(x.roll(2, -1), p.weight))  # fmt: skip
_add("memory with the channels last, read as if they were first", "permutation",
     lambda p, x: functional.conv2d(_images(x), p.filters),
     lambda p, x: functional.conv2d(
         _images(x).movedim(1, -1).reshape(2, 4, 6, 6), p.filters))  # fmt: skip


def _in_eight_bits(weight: Tensor) -> Tensor:
    scale = weight.abs().max() / 127
    return (weight / scale).round() * scale


# --- Norms, statistics, functions -----------------------------------------------------------------


_PLACES = torch.tensor([3, 1, 4, 15, 9, 2, 6, 5, 8, 7])


def _layer_norm(p: Program, x: Tensor) -> Tensor:
    return functional.layer_norm(x, (16,), p.gain, p.shift)


def _rms_norm(x: Tensor, gain: Tensor | float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * gain


_add("another eps", "eps", _layer_norm,
     lambda p, x: functional.layer_norm(x, (16,), p.gain, p.shift, eps=1e-2))  # fmt: skip
_add("a norm of half of the row", "partial sum, off by one reduction",
     lambda p, x: _rms_norm(x, p.gain),
     lambda p, x: x * torch.rsqrt(x[..., :8].pow(2).mean(-1, keepdim=True) + 1e-5)
     * p.gain)  # fmt: skip
_add("a norm that is left out", "missing operand, copy, other function",
     lambda p, x: _rms_norm(x.view(6, 10, 4, 4), 1.0).view(6, 10, 16) @ p.weight.mT,
     lambda p, x: x.view(6, 10, 4, 4).view(6, 10, 16) @ p.weight.mT)  # fmt: skip
_add("a gelu that reads an earlier value", "other function",
     lambda _, x: functional.gelu(2 * x),
     lambda _, x: 2 * x * torch.sigmoid(1.702 * x * 2))  # fmt: skip
_add("an exponential of base 2", "wrong factor, other function, scale",
     lambda _, x: torch.softmax(3 * x, -1),
     lambda _, x: torch.softmax(3 * math.log(2) * x, -1))  # fmt: skip
_add("a softmax that is doubled", "scale", lambda _, x: x.softmax(-1),
     lambda _, x: 2 * x.softmax(-1))  # fmt: skip
_add("a softmax that is not divided", "missing reduction", lambda _, x: x.softmax(-1),
     lambda _, x: (x - x.amax(-1, keepdim=True)).exp())  # fmt: skip
_add("a gelu with an upper bound", "clipped", lambda _, x: functional.gelu(x),
     lambda _, x: functional.gelu(x).clamp(max=1.25))  # fmt: skip
_add("only the lower bound", "constant, missing operand", lambda _, x: x.clamp(min=-2.5),
     lambda _, x: torch.full_like(x, -2.5))  # fmt: skip
_add("rows of the table three places away", "shift, wrong index, permutation",
     lambda p, x: x + functional.embedding(_PLACES, p.table),
     lambda p, x: x + functional.embedding(_PLACES.roll(3), p.table))  # fmt: skip
_add("a mean over n - 1", "off by one reduction, scale", lambda _, x: x.mean(1),
     lambda _, x: x.sum(1) / 9)  # fmt: skip
_add("another loss", "other function",
     lambda _, x: functional.mse_loss(x, x.flip(0)) + x,
     lambda _, x: functional.l1_loss(x, x.flip(0)) + x)  # fmt: skip


# --- Attention ------------------------------------------------------------------------------------


def _attend(x: Tensor, diagonal: int | None = 1, scale: float = 0.25) -> Tensor:
    scores = x @ x.flip(-1).mT * scale
    if diagonal is not None:
        hidden = torch.ones(10, 10, dtype=torch.bool).triu(diagonal)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ (2 * x)


def _heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = x.view(6, 10, 2, 8).transpose(1, 2)
    return heads, heads.flip(0), 2 * heads


def _with_low_scores(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    hidden = torch.ones(10, 10, dtype=torch.bool).triu(1)
    scores = (query @ key.mT / math.sqrt(8)).masked_fill(hidden, -1.0)
    return scores.softmax(-1) @ value


_add("no mask", "mask", lambda _, x: _attend(x), lambda _, x: _attend(x, diagonal=None))
_add("a mask that is off by one", "mask", lambda _, x: _attend(x),
     lambda _, x: _attend(x, diagonal=2))  # fmt: skip
_add("a scale of one over the width", "scale, wrong factor", lambda _, x: _attend(x),
     lambda _, x: _attend(x, scale=1 / 16))  # fmt: skip


_add("a scale of one more than the width", "wrong factor, wrong argument, scale",
     lambda _, x: functional.scaled_dot_product_attention(*_heads(x)),
     lambda _, x: functional.scaled_dot_product_attention(
         *_heads(x), scale=1 / 3))  # fmt: skip
_add("hidden scores of -1", "mask",
     lambda _, x: functional.scaled_dot_product_attention(*_heads(x), is_causal=True),
     lambda _, x: _with_low_scores(*_heads(x)))  # fmt: skip
_add("a product in bfloat16 with its bias in float32", "precision", _linear,
     lambda p, x: functional.linear(x.bfloat16(), p.weight.bfloat16()).float()
     + p.bias)  # fmt: skip
_add(
    "a gelu of another scale",
    "missing operand, wrong factor, scale, other function",
    lambda _, x: functional.gelu(x),
    lambda _, x: x * 0.5 * (1 + torch.erf(x)),
)
_add("a layer norm for an RMS norm", "wrong statistics, other function",
     lambda p, x: functional.rms_norm(x, (16,), p.gain),
     lambda p, x: functional.layer_norm(x, (16,), p.gain))  # fmt: skip
_add("a norm without its eps", "eps",
     lambda p, x: functional.rms_norm(0.01 * x, (16,), p.gain, eps=1e-5),
     lambda p, x: functional.rms_norm(0.01 * x, (16,), p.gain, eps=0.0))  # fmt: skip
_add("a cosine similarity without lengths", "missing operand",
     lambda p, x: functional.cosine_similarity(x, p.gain, dim=-1),
     lambda p, x: (x * p.gain).sum(-1))  # fmt: skip
_add("a loss of another name", "other function, scale, wrong factor",
     lambda _, x: x + functional.smooth_l1_loss(x, x.flip(0), beta=0.3),
     lambda _, x: x + functional.huber_loss(x, x.flip(0), delta=0.3))  # fmt: skip
_add("statistics of all rows", "wrong statistics, wrong axis", _layer_norm,
     lambda p, x: (x - x.mean()) * torch.rsqrt(x.var(correction=0) + 1e-5) * p.gain
     + p.shift)  # fmt: skip


# --- Backward passes ------------------------------------------------------------------------------


def _function(forward: Callable[..., Tensor], backward: Callable[..., Any]) -> Any:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, *given: Tensor) -> Tensor:
            context.save_for_backward(*given)
            return forward(*given)

        @staticmethod
        def backward(context: Any, grad: Tensor) -> Any:
            return backward(grad, *context.saved_tensors)

    return Function.apply


def _norm_gradients(grad: Tensor, x: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """The sum for the mean."""
    root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    normal, inner = x * root, grad * gain
    total = (inner * normal).sum(-1, keepdim=True)
    return root * (inner - normal * total), (grad * normal).sum((0, 1))


def _unweighted_gradients(grad: Tensor, x: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """The weight is forgotten."""
    root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    normal = x * root
    mean = (grad * normal).mean(-1, keepdim=True)
    return root * (grad - normal * mean), (grad * normal).sum((0, 1))


def _product_gradients(
    change: Callable[[Tensor], Tensor],
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def gradients(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        rows, inputs = grad.reshape(-1, 24), x.reshape(-1, 16)
        return grad @ weight, change(rows.T @ inputs), grad.sum((0, 1))

    return gradients


def _silu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return grad * x.sigmoid() * (1 + x)


_doubled = _function(functional.linear, _product_gradients(lambda one: 2 * one))
_zeroed = _function(functional.linear, _product_gradients(torch.zeros_like))
_rounded = _function(functional.linear, _product_gradients(lambda one: one.bfloat16().float()))
_summed = _function(_rms_norm, _norm_gradients)
_unweighted = _function(_rms_norm, _unweighted_gradients)
_bent = _function(functional.silu, _silu_gradient)

_add("a gradient of the weight that is doubled", "scale, doubled reduction", _linear,
     lambda p, x: _doubled(x, p.weight, p.bias), gradients=True)  # fmt: skip
_add("a gradient of the weight that is not written", "zeros", _linear,
     lambda p, x: _zeroed(x, p.weight, p.bias), gradients=True)  # fmt: skip
_add("a gradient of the weight in bfloat16", "precision", _linear,
     lambda p, x: _rounded(x, p.weight, p.bias), gradients=True)  # fmt: skip
_add("a sum for a mean in the gradient of a norm",
     "wrong reduction, missing operand, wrong factor",
     lambda p, x: _rms_norm(x, p.gain), lambda p, x: _summed(x, p.gain),
     gradients=True)  # fmt: skip
_add("a gradient of a norm without its weight", "missing operand",
     lambda p, x: _rms_norm(x, p.gain), lambda p, x: _unweighted(x, p.gain),
     gradients=True)  # fmt: skip
_add("a factor of the gradient of silu", "missing operand, other function",
     lambda _, x: functional.silu(x), lambda _, x: _bent(x), gradients=True)  # fmt: skip


# --- What the calls show --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shown:
    """A mistake in plain operators that both programs call, and the words for it."""

    right: Part
    wrong: Part
    kind: str
    sentence: str


def _smoothed(x: Tensor, smoothing: float) -> Tensor:
    labels = torch.arange(60) % 16
    return x + functional.cross_entropy(x.reshape(60, 16), labels, label_smoothing=smoothing)


def _gated(p: Program, x: Tensor, *, swapped: bool = False) -> Tensor:
    gate, value = functional.linear(x, p.weight[:12]), functional.linear(x, p.weight[12:])
    gate, value = (value, gate) if swapped else (gate, value)
    return functional.silu(gate) * value


SHOWN = {
    "a base": Shown(
        lambda _, x: x * 10000 ** -(torch.arange(16) / 16),
        lambda _, x: x * 500000 ** -(torch.arange(16) / 16),
        "wrong argument",
        "self is 500000 instead of 10000",
    ),
    "a scale": Shown(
        lambda _, x: x.flip(0) * 0.5,
        lambda _, x: x.flip(0) * 0.25,
        "wrong factor",
        "other is 0.25 instead of 0.5",
    ),
    "positions from 1": Shown(
        lambda _, x: x + (torch.arange(16) + 0) * 1.0,
        lambda _, x: x + (torch.arange(16) + 1) * 1.0,
        "offset",
        "in aten.add.Tensor: other is 1 instead of 0",
    ),
    "a mask": Shown(
        lambda _, x: x.tril(-3), lambda _, x: x.tril(-4), "mask", "diagonal is -4 instead of -3"
    ),
    "fewer results": Shown(
        lambda _, x: x.topk(3, -1).values.sum(-1),
        lambda _, x: x.topk(2, -1).values.sum(-1),
        "wrong argument",
        "k is 2 instead of 3",
    ),
    "an argument of a function": Shown(
        lambda _, x: _smoothed(x, 0.1),
        lambda _, x: _smoothed(x, 0.0),
        "wrong argument",
        "label_smoothing is 0 instead of 0.1",
    ),
    "inputs of two operators": Shown(
        _gated,
        lambda p, x: _gated(p, x, swapped=True),
        "swapped operands",
        "the values that aten.silu and aten.mul.Tensor read are swapped",
    ),
}
