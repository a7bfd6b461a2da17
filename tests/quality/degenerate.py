"""Small pairs of programs on which tolerance checkers go wrong, each with the right verdict.

The 21 rows of the published table of verdicts, under the names they have there. Every call makes
new cases: untouched inputs, and programs without history.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Output = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
Program = Callable[..., Output]
Verdict = Literal["pass", "fail"]
# What a judge has to look at, beyond the outputs of one call, to reach the verdict.
Aspect = Literal["outputs", "gradients", "inputs after the call", "aliases", "second call"]


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Two programs, their inputs, and whether the second may replace the first."""

    name: str
    reference: Program
    candidate: Program
    inputs: tuple[Tensor, ...]
    expected: Verdict
    reason: str
    aspect: Aspect = "outputs"


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal noise that leaves the global generator alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


# --- programs of the published rows ---------------------------------------------------------------


def two_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x.clamp(min=0).sqrt()


def two_outputs_without_clamp(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x.sqrt()


def unit_rows(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12)


def unit_rows_without_floor(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def regression_gradient(samples: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return samples.t() @ (samples @ weight - target) * (2 / len(samples))


def regression_gradient_floor_division(samples: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return samples.t() @ (samples @ weight - target) * (2 // len(samples))


def regression_gradient_flipped(samples: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return samples.t() @ (target - samples @ weight) * (2 / len(samples))


def named_outputs(x: Tensor) -> dict[str, Tensor]:
    return {"mean": x.mean(0), "scaled": x * 3}


def degenerate_cases() -> list[Case]:
    """The 21 published rows, with fresh inputs."""
    x = noise(1000)
    # Targets near the prediction make the gradient of the loss about 1e-3.
    samples, weight = noise(256, 64, seed=1), noise(64, seed=2)
    regression = (samples, samples @ weight + 0.01 * noise(256, seed=3), weight)
    with_zero_rows = noise(50, 20, seed=4)
    with_zero_rows[::10] = 0
    with_zero = noise(1000, seed=5).abs()
    with_zero[17] = 0
    ones_and_zero = torch.ones(1000)
    ones_and_zero[17] = 0
    three_to_minus_1000 = torch.linspace(-1000, 3, 1000)
    ranks = torch.randperm(100_000, generator=torch.Generator().manual_seed(6)).float()
    return [
        Case(
            "identical", torch.tanh, torch.tanh, (x,), "pass", "the same program, equal bit for bit"
        ),
        Case(
            "scale x2 +5",
            torch.tanh,
            lambda x: torch.tanh(x) * 2 + 5,
            (x,),
            "fail",
            "correlation is blind to scale and shift",
        ),
        Case(
            "NaN only in 2nd output",
            two_outputs,
            two_outputs_without_clamp,
            (x,),
            "fail",
            "a good first output must not speak for the second",
        ),
        Case(
            "NaN where ref small",
            unit_rows,
            unit_rows_without_floor,
            (with_zero_rows,),
            "fail",
            "a NaN read as zero matches a reference that is zero there",
        ),
        Case(
            "matching NaN both",
            torch.sqrt,
            lambda x: x * x.rsqrt(),
            (x,),
            "pass",
            "NaN at the same places: compared by position",
        ),
        Case(
            "matching +inf both",
            torch.rsqrt,
            lambda x: 1 / x.sqrt(),
            (with_zero,),
            "pass",
            "inf - inf is NaN, yet both are right",
        ),
        Case(
            "zeros vs grads 1e-3",
            regression_gradient,
            regression_gradient_floor_division,
            regression,
            "fail",
            "an absolute tolerance takes a small gradient for none",
        ),
        Case(
            "sign-flipped grads 1e-3",
            regression_gradient,
            regression_gradient_flipped,
            regression,
            "fail",
            "twice a small value is still under an absolute tolerance",
        ),
        Case(
            "const1 vs const5 (+inf)",
            lambda x: 1 / x,
            lambda x: 5 / x,
            (ones_and_zero,),
            "fail",
            "without its one inf each side is constant, and correlation undefined",
        ),
        Case(
            "const vs const+1ulp-ish",
            lambda x: x / 3,
            lambda x: x * (1 / 3),
            (torch.full((1000,), 7.0),),
            "pass",
            "the same constant, one ulp apart in float32 and in float64",
        ),
        Case(
            "near-const 1e-5 noise",
            torch.sigmoid,
            lambda x: 0.5 + 0.5 * torch.tanh(x / 2),
            # sigmoid(x) is 0.5 + x/4: at 7e-8 that varies by less than one ulp of 0.5.
            (7e-8 * x,),
            "pass",
            "the output varies as little as it is rounded: correlation sees only rounding",
        ),
        Case(
            "const vs noise",
            lambda x: x.mean() * torch.ones_like(x),
            lambda x: x * torch.ones_like(x),
            (x,),
            "fail",
            "correlation with a constant is 0/0",
        ),
        Case(
            "scalar 3 vs -1000",
            torch.amax,
            torch.amin,
            (three_to_minus_1000,),
            "fail",
            "correlation of single elements is undefined",
        ),
        Case(
            "missing 2nd output",
            lambda x: (x * 2, x * 3),
            lambda x: (x * 2,),
            (x,),
            "fail",
            "zip() ends with the shorter side",
        ),
        Case(
            "extra output",
            lambda x: (x * 2,),
            lambda x: (x * 2, x * 3),
            (x,),
            "fail",
            "zip() ends with the shorter side",
        ),
        Case(
            "int tokens 2% wrong",
            lambda logits: logits.argmax(-1),
            # The last column is never looked at, and one row in fifty has its maximum there.
            lambda logits: logits[:, :-1].argmax(-1),
            (noise(1000, 50, seed=7),),
            "fail",
            "an index is right or wrong; how near it is to the right one means nothing",
        ),
        Case(
            "bool mask 40/1e5 flipped",
            # Thresholds between the integers, so that no element sits on the edge.
            lambda ranks: ranks < 49_999.5,
            lambda ranks: ranks < 50_039.5,
            (ranks,),
            "fail",
            "bools are exact: 99.96 % right is wrong",
        ),
        Case(
            "dict output identical",
            named_outputs,
            named_outputs,
            (noise(20, 50, seed=8),),
            "pass",
            "the outputs of a model need not be a tuple",
        ),
        Case(
            "float64 identical",
            torch.tanh,
            torch.tanh,
            (noise(1000, seed=9, dtype=torch.float64),),
            "pass",
            "the reference already has the arbiter's precision",
        ),
        Case(
            "shape (1000,) vs (1,1000)",
            lambda x: x * 2,
            lambda x: (x * 2).unsqueeze(0),
            (x,),
            "fail",
            "a shape that broadcasts is another shape",
        ),
        Case(
            "bf16 vs f32 dtype",
            lambda x: x * 2,
            lambda x: x.float() * 2,
            (x.bfloat16(),),
            "fail",
            "equal values of another dtype are another result",
        ),
    ]
