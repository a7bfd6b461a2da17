"""A program of the set, and the three forms in which a function stands in one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

Function = Callable[..., Any]
Label = Literal["approximation", "wrong parameter", "invisible"]
Form = Literal["function", "module", "compiled"]


@dataclasses.dataclass(frozen=True)
class Program:
    """A reference, a candidate, and what is known about them before anything is run.

    Attributes:
        name: what the candidate does.
        label: what it is. `invisible`: no input shows it in the native dtype, since the number
            rounds to the same float32, or is far below a rounding of the results.
        reference: the right function.
        candidate: the other one.
        inputs: makes the arguments.
        form: `function`: both alone; `module`: between two layers; `compiled`: as that, with the
            candidate compiled.
        dtype: of all floating inputs and weights.
    """

    name: str
    label: Label
    reference: Function
    candidate: Function
    inputs: Callable[[], list[Tensor]]
    form: Form = "function"
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.name}, {self.form}, {str(self.dtype).removeprefix('torch.')}"

    def arguments(self) -> list[Tensor]:
        """New ones, always the same."""
        return [t.to(self.dtype) if t.is_floating_point() else t for t in self.inputs()]

    def sides(self) -> tuple[Function, Function]:
        """The reference and the candidate."""
        if self.form == "function":
            return self.reference, self.candidate
        reference, candidate = (
            Between(one, self.dtype) for one in (self.reference, self.candidate)
        )
        if self.form == "module":
            return reference, candidate
        return reference, torch.compile(candidate, backend="aot_eager")


class Between(nn.Module):
    """A function of one argument between two layers, whose weights are always the same."""

    def __init__(self, function: Function, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 16)
        self.to(dtype)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """The function of the first layer's result, then the last layer."""
        return self.last(self.function(self.first(x)))


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one() -> list[Tensor]:
    """A matrix of normal numbers."""
    return [normal(8, 32)]


def positive() -> list[Tensor]:
    """A matrix of positive numbers."""
    return [normal(8, 32).abs() * 3 + 0.05]


def in_float32(function: Function) -> Function:
    """A kernel for halves: computes in float32, and rounds its result once."""

    def kernel(*args: Tensor) -> Tensor:
        wide = [t.float() if t.is_floating_point() else t for t in args]
        return function(*wide).to(args[0].dtype)

    return kernel
