"""Random numbers of a test: always the same ones, and the global generator is left alone."""

from __future__ import annotations

import torch


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def normal64(*shape: int, seed: int = 0) -> torch.Tensor:
    return normal(*shape, seed=seed, dtype=torch.float64)
