"""Kernels that compute in float32 inside, whatever they are given."""

from __future__ import annotations

import pytest
import torch

from paritas._torch.kernels import float64_kernel

ATEN = torch.ops.aten


@pytest.mark.parametrize("op", [ATEN.hardswish.default, ATEN.hardswish_.default])
def test_hardswish_is_computed_in_float64_in_place_too(op):
    x = torch.linspace(-4.1, 4.1, 64, dtype=torch.float64)
    true = x * (x + 3).clamp(0, 6) / 6
    given = x.clone()
    result = float64_kernel(op, (given,))(given)
    torch.testing.assert_close(result, true, rtol=1e-15, atol=1e-15)
    assert (result is given) == (op is ATEN.hardswish_.default)
