"""Samples of operators from torch's own tests."""

from __future__ import annotations

import sys

import pytest
import torch

from paritas._torch.operator_samples import find_operator, sample_calls


@pytest.mark.slow
def test_samples_have_the_arguments_of_the_operator_itself() -> None:
    calls = list(sample_calls("aten.add.Tensor", torch.float32))
    assert all(isinstance(args[0], torch.Tensor) for args, _ in calls)
    assert any(kwargs.get("alpha", 1) != 1 for _, kwargs in calls)
    # torch's tests need this package; it is replaced only while they are imported.
    package = sys.modules.get("expecttest")
    assert package is None or hasattr(package, "__file__")


def test_an_operator_is_found_by_its_name() -> None:
    assert find_operator("aten.relu") is torch.ops.aten.relu.default
    assert find_operator("aten::add.Tensor") is torch.ops.aten.add.Tensor
    assert find_operator("aten.no_such_operator") is None
