"""What verify() costs, in runs of the eager model; and what it holds in memory.

Everything is a ratio within this one run. Compile time is left out: both the native and the lifted
graph are compiled by a first verify(), and the second one is timed.
"""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING

import torch
from torch import nn

import paritas

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS = 7
QUIET = paritas.VerifyConfig(raise_on_mismatch=False)


class Block(nn.Module):
    """A pre-LN transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then transform."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def seconds(function: Callable[[], object]) -> float:
    """The best of a few timings, after one for warming up: what disturbs only ever adds."""
    function()
    timings = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        timings.append(time.perf_counter() - start)
    return min(timings)


def forward_only() -> None:
    """Inference: nothing requires grad."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(256, 4) for _ in range(4)]).requires_grad_(requires_grad=False)
    compiled = torch.compile(model)
    x = torch.randn(8, 128, 256)
    unit = seconds(lambda: model(x))
    status = ""

    def once() -> None:
        nonlocal status
        status = paritas.verify([x], model, compiled, QUIET).status.value

    cost = seconds(once)
    print(f"forward only: one eager run {unit * 1e3:.0f} ms; verify {cost / unit:.2f} of them")
    print(f"  ({status}; bar: 8)")


def with_gradients() -> None:
    """Training: outputs and gradients of every parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(256, 4) for _ in range(2)])
    compiled = torch.compile(model)
    x = torch.randn(8, 128, 256)
    cotangent = torch.randn(8, 128, 256)
    parameters = list(model.parameters())
    unit = seconds(lambda: torch.autograd.grad(model(x), parameters, cotangent))
    status = ""

    def once() -> None:
        nonlocal status
        status = paritas.verify([x], model, compiled, QUIET).status.value

    cost = seconds(once)
    print(f"with gradients: one eager forward and backward {unit * 1e3:.0f} ms; ", end="")
    print(f"verify {cost / unit:.2f} of them ({status})")


def memory_by_outputs() -> None:
    """Peak memory of verify() over what its outputs alone take, for few and for many outputs."""
    size = 1 << 20

    def outputs(count: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        return lambda x: [x.sin() * (i + 1) for i in range(count)]

    def halves(count: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        return lambda x: [x.sin() * ((i + 1) / 2) * 2 for i in range(count)]

    x = torch.randn(size)
    paritas.verify([x], outputs(1), halves(1), QUIET)
    for count in (8, 32):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        paritas.verify([x], outputs(count), halves(count), QUIET)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        held = count * size * 4
        print(f"{count} outputs of {size} floats: peak grew by {grown / held:.2f} times their size")


def main() -> None:
    """Print every figure."""
    torch.set_num_threads(1)
    forward_only()
    with_gradients()
    memory_by_outputs()


if __name__ == "__main__":
    main()
