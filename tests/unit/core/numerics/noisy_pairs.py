"""Pairs of tensors that differ by noise, and how near to the truth their figures have to be."""

from __future__ import annotations

import pytest
import torch

from paritas.core.numerics import pair_figures, pair_totals
from paritas.core.numerics.block_sums import BLOCK

# What is worked on in float64 throughout, and what in float32.
EXACT, NARROW = 1e-12, 1e-6
# Two blocks and a bit.
LARGE = 2 * BLOCK + 1234


def approx(value, *, rel=EXACT, absolute=0.0):
    """Without pytest's own absolute tolerance, to which small numbers are all alike."""
    return pytest.approx(value, rel=rel, abs=absolute, nan_ok=True)


def noisy(numel=LARGE, noise=1e-4, *, scale=1.0, mean=0.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x, e = torch.randn(2, numel, generator=generator, dtype=torch.float64)
    return tuple((mean + scale * side).to(dtype) for side in (x, x + noise * e))


def use_tiny_blocks(monkeypatch):
    """Seven elements a block, and float32 wherever it holds the numbers."""
    monkeypatch.setattr(pair_totals, "BLOCK", 7)
    monkeypatch.setattr(pair_figures, "BLOCK", 7)
    monkeypatch.setattr(pair_totals, "_SMALL", 0)
