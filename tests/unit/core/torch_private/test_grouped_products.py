"""The product of mixtures of experts, in float64, which torch's own kernel refuses."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from paritas.core.precision.lifting import LiftMode
from paritas.core.torch_private.kernels import GROUPED, grouped_mm

ENDS = torch.tensor([4, 4, 12], dtype=torch.int32)  # the second group is empty
FORMS = {
    "rows": ((12, 16), (3, 16, 8), ENDS),
    "columns": ((3, 8, 16), (16, 12), ENDS),
    "terms": ((8, 12), (12, 16), ENDS),
    "batch": ((3, 8, 16), (3, 16, 8), None),
}


def draw(form):
    left, right, ends = FORMS[form]
    torch.manual_seed(0)
    # Small whole numbers, so that every order of summation gives one result.
    return torch.randint(-3, 4, left).float(), torch.randint(-3, 4, right).float(), ends


def test_torch_refuses_float64():
    left, right, ends = draw("rows")
    with pytest.raises(RuntimeError, match="Double"):
        functional.grouped_mm(left.double(), right.double(), offs=ends)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_what_torch_computes(form):
    left, right, ends = draw(form)
    expected = functional.grouped_mm(left, right, offs=ends)
    found = grouped_mm(left.double(), right.double(), ends)
    assert torch.equal(found, expected.double())


def test_what_lies_behind_the_last_group_is_zero():
    left, right, _ = draw("rows")
    found = grouped_mm(left, right, torch.tensor([2, 3, 5]))
    assert found.shape == (12, 8)
    assert not found[5:].any()


def test_a_lifted_run_goes_through_it_and_back():
    assert GROUPED
    left, right, ends = draw("rows")
    left, right = (t.double().requires_grad_() for t in (left, right))
    with LiftMode(torch.float32, torch.float32):
        out = functional.grouped_mm(left, right, offs=ends)
        (out * torch.ones(8).double()).sum().backward()
    assert out.dtype is torch.float64
    expected = torch.cat([left[:4] @ right[0], left[4:] @ right[2]])
    assert torch.equal(out, expected)
    assert not right.grad[1].any()
    assert torch.equal(right.grad[2], left[4:].T.detach() @ torch.ones(8, 8).double())
