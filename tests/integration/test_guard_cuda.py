"""guard() on a CUDA device, with Triton; skipped where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paritas import guard

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Attention(nn.Module):
    """Causal attention by torch's fused kernels, and a feed-forward part."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = self.project(self.norm(x)).view(batch, tokens, 3, self.heads, -1)
        y = F.scaled_dot_product_attention(*split.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.merge(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.feed(x)


class Convolution(nn.Module):
    """Convolutions with a batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 16, 3, stride=2)
        self.norm, self.last = nn.BatchNorm2d(32), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.norm(self.first(x)).relu()).relu()
        return self.last(hidden.mean((2, 3)))


def train(model: nn.Module, x: Tensor, backend: Any) -> None:
    model = model.cuda()
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(3):
        compiled(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_silent(run: Callable[[Any], None]) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    backend = guard("inductor", on_mismatch="record", check_passes=True, locate=False)
    run(backend)
    verdict = backend.verdict()
    assert verdict.passed, str(verdict)
    assert verdict.coverage.compared > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_training_is_silent(dtype: torch.dtype) -> None:
    def attend(backend: Any) -> None:
        x = torch.randn(4, 32, 64, device="cuda", dtype=dtype)
        train(Attention().to(dtype), x, backend)

    def convolve(backend: Any) -> None:
        x = torch.randn(4, 3, 32, 32, device="cuda", dtype=dtype)
        train(Convolution().to(dtype), x, backend)

    assert_silent(attend)
    assert_silent(convolve)


def test_autocast_and_a_checkpoint_are_silent() -> None:
    def run(backend: Any) -> None:
        model = Attention().cuda()

        def program(x: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return checkpoint(model, x, use_reentrant=False)

        compiled = torch.compile(program, backend=backend)
        for _ in range(2):
            x = torch.randn(4, 32, 64, device="cuda", requires_grad=True)
            compiled(x).float().sum().backward()

    assert_silent(run)


# Torch makes an empty graph first, to have its pool, and since 2.11 warns of it.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_random_numbers_and_cuda_graphs_are_silent() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.rand_like(x) * 0.1, torch.randint(0, 9, (5,), device=x.device)

    def run(backend: Any) -> None:
        compiled = torch.compile(program, backend=backend, options={"triton.cudagraphs": True})
        for _ in range(4):
            compiled(torch.randn(4, 8, device="cuda"))

    assert_silent(run)
