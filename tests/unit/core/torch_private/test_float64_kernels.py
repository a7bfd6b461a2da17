"""Kernels that compute in float32 inside, whatever they are given."""

from __future__ import annotations

import pytest
import torch

from paritas.core.torch_private.kernels import float64_kernel
from paritas.core.torch_private.operators import DispatchMode

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


def test_a_fused_step_gets_the_float32_counts_that_its_kernel_on_a_gpu_reads():
    seen = []

    class Steps(DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is op:
                seen.extend(one.dtype for one in args[5])
            return func(*args, **(kwargs or {}))

    op = ATEN._fused_adamw_.default
    one, step = torch.ones(3, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    args = ([one.clone()], [one], [one * 0], [one * 0], [], [step])
    settings = {"lr": 0.1, "beta1": 0.5, "beta2": 0.5, "weight_decay": 0.0, "eps": 1e-8}
    with Steps():
        float64_kernel(op, args)(*args, **settings, amsgrad=False, maximize=False)
    assert seen == [torch.float32]
    torch.testing.assert_close(args[0][0], one * 0.9)
