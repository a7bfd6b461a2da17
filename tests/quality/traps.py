"""Further traps for tolerance checkers, beyond the published table."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quality.degenerate import Case, noise


class ScaledBackward(torch.autograd.Function):
    """Doubles its input; the backward is one per cent too large."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(
        ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor], output: Tensor
    ) -> None:
        """Nothing is saved: the gradient does not depend on the input."""

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        return grad * 2.02


class AccumulatorNeverReset:
    """Sums its input's rows into a total that the next call starts from."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.sum(0)
        self.total = rows if self.total is None else self.total + rows
        return self.total.clone()


def decay_in_place(state: Tensor) -> Tensor:
    state.mul_(0.9)
    return state + 1


def decay_of_a_copy(state: Tensor) -> Tensor:
    return state * 0.9 + 1


def saturating_add(left: Tensor, right: Tensor) -> Tensor:
    total = left + right
    overflowed = (left > 0) & (right > 0) & (total < 0)
    return torch.where(overflowed, torch.iinfo(total.dtype).max, total)


def product_split_k(left: Tensor, right: Tensor) -> Tensor:
    # Not in halves: there a matrix library may well cut the sum itself, and give the same bits.
    cut = left.shape[1] // 3
    return (left[:, :cut] @ right[:cut] + left[:, cut:] @ right[cut:]) * 1e30


def zero_scale_cases() -> list[Case]:
    """Further traps, with fresh inputs and programs that were never called."""
    x, y = noise(1000), noise(1000, seed=1)
    square = noise(8, 8, seed=2)
    million = noise(1_000_000, seed=3)
    large_ids = 2**60 + 1 + 2 * torch.arange(1000)
    row_scales = torch.tensor([1e6, 1.0, 1e-6])
    return [
        Case(
            "empty tensors of two shapes",
            lambda x: x[:0] * 2,
            lambda x: x[:, :0] * 2,
            (square,),
            "fail",
            "no element differs, but (0, 8) is not (8, 0)",
        ),
        Case(
            "empty tensors of one shape",
            lambda x: x[:0] * 2,
            lambda x: x[:0] + x[:0],
            (square,),
            "pass",
            "shape and dtype are compared and no element is left to be wrong",
        ),
        Case(
            "0-d vs one element",
            lambda x: x.sum(0),
            lambda x: x.sum(0, keepdim=True),
            (x,),
            "fail",
            "() broadcasts with (1,), and item() is the same",
        ),
        Case(
            "0-d in another order of summation",
            lambda x: x.sum(),
            lambda x: x[::2].sum() + x[1::2].sum(),
            (x,),
            "pass",
            "one element has no spread, so the noise must come from the program",
        ),
        Case(
            "complex with real and imag swapped",
            torch.complex,
            lambda real, imag: torch.complex(imag, real),
            (x, y),
            "fail",
            "the moduli agree",
        ),
        Case(
            "+0.0 vs -0.0",
            lambda x: x * 0.0,
            lambda x: x * -0.0,
            (x,),
            "pass",
            "the bits differ and the numbers do not",
        ),
        Case(
            "zeros vs 1e-30",
            F.relu,
            lambda x: F.leaky_relu(x, 1e-30),
            (-1 - x.abs(),),
            "fail",
            "an exact zero has no rounding: nothing but zero is as good",
        ),
        Case(
            "residue of a cancellation vs zero",
            lambda x: x.sin() ** 2 + x.cos() ** 2 - 1,
            torch.zeros_like,
            (x,),
            "pass",
            "all that the reference returns is rounding, in float64 too: 100 % relative error",
        ),
        Case(
            "int64 wrap",
            torch.add,
            saturating_add,
            (2**62 + torch.arange(1000), 2**62 - 500 + torch.arange(1000)),
            "fail",
            "integer overflow wraps, and a wrapped sum is the reference's meaning",
        ),
        Case(
            "int64 through float64",
            lambda ids: ids + 2,
            lambda ids: (ids.double() + 2).long(),
            (large_ids,),
            "fail",
            "wrong in the last digits; a checker that compares as float64 sees equal numbers",
        ),
        Case(
            "uint8 truncated, not rounded",
            lambda x: (x.sigmoid() * 255).round().to(torch.uint8),
            lambda x: (x.sigmoid() * 255).to(torch.uint8),
            (x,),
            "fail",
            "off by one in 255, and uint8 differences wrap",
        ),
        Case(
            "one wrong element of 1e6",
            F.gelu,
            lambda x: torch.cat([F.gelu(x[:-1]), x[-1:]]),
            (million,),
            "fail",
            "a tail that was left out drowns in every mean",
        ),
        Case(
            "tiny row among large ones",
            lambda x, scales: x * scales[:, None],
            lambda x, scales: x * (scales[:, None] + 1e-6),
            (noise(3, 1000, seed=4), row_scales),
            "fail",
            "the last row is doubled, 1e-12 of the norm of the whole",
        ),
        Case(
            "1 % wrong at 1e-30",
            lambda x: x * 1e-30,
            lambda x: x * 1.01e-30,
            (x,),
            "fail",
            "far below every absolute tolerance",
        ),
        Case(
            "split-K at 1e30",
            lambda left, right: left @ right * 1e30,
            product_split_k,
            (noise(32, 512, seed=5), noise(512, 32, seed=6)),
            "pass",
            "rounding, above every absolute tolerance; squares overflow float32",
        ),
        Case(
            "same values, reversed",
            lambda x: x * 2,
            lambda x: x.flip(0) * 2,
            (x,),
            "fail",
            "norm, mean, extremes and histogram agree",
        ),
        Case(
            "NaN swallowed",
            lambda x: torch.maximum(x.log(), torch.zeros_like(x)),
            lambda x: torch.fmax(x.log(), torch.zeros_like(x)),
            (x,),
            "fail",
            "a comparison with NaN is false, so a checker that counts excesses counts none",
        ),
        Case(
            "NaN of the other sign",
            lambda x: x.sqrt(),
            lambda x: -x.sqrt() * -1,
            (x,),
            "pass",
            "the sign bit of a NaN means nothing",
        ),
        Case(
            "-inf vs +inf",
            lambda x: 1 / (x * -0.0),
            lambda x: 1 / (x * 0.0),
            (x.abs() + 1,),
            "fail",
            "both are infinite everywhere: the sign must be compared",
        ),
        Case(
            "wrong gradient only",
            lambda x: x * 2,
            ScaledBackward.apply,
            (noise(1000, seed=7).requires_grad_(),),
            "fail",
            "the forward agrees bit for bit",
            "gradients",
        ),
        Case(
            "output detached",
            lambda x: x * 2,
            lambda x: x.detach() * 2,
            (noise(1000, seed=8).requires_grad_(),),
            "fail",
            "equal values that no gradient flows through",
            "gradients",
        ),
        Case(
            "input mutation dropped",
            decay_in_place,
            decay_of_a_copy,
            (noise(1000, seed=9),),
            "fail",
            "the outputs agree, the caller's state does not",
            "inputs after the call",
        ),
        Case(
            "alias of the input dropped",
            lambda x: x.view(-1),
            lambda x: x.view(-1).clone(),
            (noise(8, 8, seed=10),),
            "fail",
            "a later write to the output no longer reaches the input",
            "aliases",
        ),
        Case(
            "wrong from the second call on",
            lambda x: x.sum(0),
            AccumulatorNeverReset(),
            (noise(10, 100, seed=11),),
            "fail",
            "one call sees nothing",
            "second call",
        ),
        Case(
            "contiguous vs transposed strides",
            lambda x: (x * 2).t(),
            lambda x: (x.t() * 2).contiguous(),
            (noise(30, 40, seed=12),),
            "pass",
            "the layout of a fresh output is not promised",
        ),
    ]
