"""Kernels that compute in float32 inside, whatever they are given."""

from __future__ import annotations

import pytest
import torch

from paritas._torch.kernels import float64_kernel

ATEN = torch.ops.aten
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("op", [ATEN.hardswish.default, ATEN.hardswish_.default])
def test_hardswish_is_computed_in_float64_in_place_too(op):
    x = torch.linspace(-4.1, 4.1, 64, dtype=torch.float64)
    true = x * (x + 3).clamp(0, 6) / 6
    given = x.clone()
    result = float64_kernel(op, (given,))(given)
    torch.testing.assert_close(result, true, rtol=1e-15, atol=1e-15)
    assert (result is given) == (op is ATEN.hardswish_.default)


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NEEDS_CUDA])]
)
def test_the_norm_of_weights_is_computed_in_float64(dim, device):
    draw = torch.Generator().manual_seed(0)
    v = torch.randn(4, 3, 5, dtype=torch.float64, generator=draw)
    g = torch.rand([size if axis == dim else 1 for axis, size in enumerate(v.shape)]).double()
    op = ATEN._weight_norm_interface.default
    weight, norms = float64_kernel(op, (v, g, dim))(v.to(device), g.to(device), dim)
    true_weight, true_norms = op(v, g, dim)
    torch.testing.assert_close(weight.cpu(), true_weight, rtol=1e-14, atol=0)
    torch.testing.assert_close(norms.cpu(), true_norms, rtol=1e-14, atol=0)
