from __future__ import annotations

import pytest
import torch

from paritas.core.numerics.contents import Opaque
from paritas.core.numerics.flattening import as_plain, flatten_value, is_dense


def test_a_sparse_tensor_falls_into_the_parts_that_torch_names():
    flat = flatten_value({"w": torch.eye(2).to_sparse()}, "out")
    assert list(flat.leaves) == ["out['w'].indices()", "out['w'].values()"]
    kinds = {path: kind.name for path, kind in flat.kinds.items()}
    assert kinds == {"out": "dict", "out['w']": "sparse_coo tensor of shape [2, 2]"}


def test_parts_are_live():
    x = torch.ones(3, requires_grad=True)
    values = flatten_value(x.to_sparse()).leaves[".values()"]
    (gradient,) = torch.autograd.grad(values.sum(), x)
    assert torch.equal(gradient, torch.ones(3))


def test_a_float_is_a_tensor_that_no_tensor_stands_for():
    flat = flatten_value(1.5, "out")
    assert flat.leaves["out"].dtype is torch.float64
    assert not flat.kinds["out"].is_tensor


def test_a_tensor_that_is_dense_is_its_own_leaf():
    x = torch.ones(3)
    flat = flatten_value([x])
    assert flat.leaves["[0]"] is x
    assert list(flat.kinds) == [""]
    assert is_dense(torch.nn.Parameter(x))
    assert not is_dense(x.to("meta"))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_nested_tensor_with_a_nan_is_told_from_its_padding():
    nested = torch.nested.nested_tensor([torch.ones(1), torch.full((2,), torch.nan)])
    flat = flatten_value(nested)
    assert flat.leaves[".sizes"].tolist() == [[1], [2]]
    assert flat.leaves[".values"].isnan().tolist() == [False, True, True]


def test_one_dense_tensor_is_made_of_what_has_a_layout_that_nobody_compares():
    assert torch.equal(as_plain(torch.eye(2).to_sparse()), torch.eye(2))
    assert as_plain(2.0).dtype is torch.float64
    assert as_plain("text") == "text"
    assert isinstance(as_plain(torch.ones(2, device="meta")), Opaque)
