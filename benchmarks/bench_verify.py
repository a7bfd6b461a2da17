"""What `verify()` of a compiled model costs, in runs of the eager one, and its peak memory.

Compilation is not included: the first verify() compiles the native and the lifted graph, and later
ones are timed, alternating with the eager model, on one thread; the minimum of each counts
(processor time). Of the five runs of a verify(), two are in float64; what the eager model takes in
it is next to the figure. Memory is the peak of torch's allocator.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from benchmarks.lab.figures import Figure, Report, write
from benchmarks.lab.memory import peak_bytes
from benchmarks.lab.timing import in_turns
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


def cost(
    name: str, model: nn.Module, unit: Callable[[nn.Module, torch.Tensor], object], bar: float
) -> Figure:
    """How many times what the user runs anyway."""
    compiled, x = torch.compile(model), torch.randn(8, 128, 256)
    wide, wide_x = copy.deepcopy(model).double(), x.double()
    told = paritas.verify([x], model, compiled, QUIET)
    assert told.passed, str(told)
    functions = {
        "unit": lambda: unit(model, x),
        "float64": lambda: unit(wide, wide_x),
        "verify": lambda: paritas.verify([x], model, compiled, QUIET),
    }
    spent = in_turns(functions, REPEATS, take="least")
    one = spent["unit"].processor
    wall = spent["verify"].wall / spent["unit"].wall
    double = spent["float64"].processor / one
    note = (
        f"one takes {one * 1e3:.0f} ms, in float64 {double:.2f} times that; {wall:.2f} by the wall "
        f"clock; {told.status.value}"
    )
    return Figure(name, spent["verify"].processor / one, "x", bar, note=note)


def forward_only() -> Figure:
    """Inference: nothing requires grad."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(256, 4) for _ in range(4)]).requires_grad_(requires_grad=False)
    return cost("verify, in eager forwards", model, lambda run, x: run(x), 8.0)


def with_gradients() -> Figure:
    """Training: outputs and gradients of every parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(256, 4) for _ in range(2)])
    cotangent = torch.randn(8, 128, 256)

    def step(run: nn.Module, x: torch.Tensor) -> object:
        return torch.autograd.grad(run(x), list(run.parameters()), cotangent.to(x.dtype))

    return cost("verify with gradients, in eager forwards with backwards", model, step, 12.0)


def memory_by_outputs() -> list[Figure]:
    """What one more output takes, of few and of many; all of them differ by rounding.

    They are large: outputs of up to 64 MB in all are held to the end.
    """
    numel = 1 << 22

    def outputs(count: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        return lambda x: [x.sin() * (i + 1) for i in range(count)]

    def thirds(count: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        return lambda x: [x.sin() * ((i + 1) / 3) * 3 for i in range(count)]

    x = torch.randn(numel)

    def peak(count: int) -> float:
        def once() -> object:
            return paritas.verify([x], outputs(count), thirds(count), QUIET)

        return peak_bytes(once, warm=1, times=1) / (4 * numel)

    peaks = {count: peak(count) for count in (8, 16, 32)}
    each = (peaks[32] - peaks[16]) / 16
    # Both programs return all outputs at once, natively and in float64, which has twice the size.
    own = 1 + 1 + 2 + 2
    extra = {count: held - own * count for count, held in peaks.items()}
    ratio = extra[32] / extra[8]
    note = f"beyond what the four runs return; with it {peaks[32] / peaks[8]:.2f} x"
    return [
        Figure("extra peak memory, 32 outputs over 8", ratio, "x", 1.1, note=note),
        Figure("memory for one output more", each, "x its size", note="of it, results: 6 x"),
    ]


def main() -> None:
    """Measure every figure."""
    torch.set_num_threads(1)
    figures = [forward_only(), with_gradients(), *memory_by_outputs()]
    write(Report("verify", figures, what=__doc__))


if __name__ == "__main__":
    main()
