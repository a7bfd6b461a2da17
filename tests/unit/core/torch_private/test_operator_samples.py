"""Samples of operators from torch's own tests."""

from __future__ import annotations

import sys

import pytest
import torch

from paritas.core.torch_private.named_operators import find_operator, sample_calls


@pytest.mark.slow
def test_samples_have_the_arguments_of_the_operator_itself() -> None:
    calls = list(sample_calls("aten.add.Tensor", torch.float32))
    assert all(isinstance(args[0], torch.Tensor) for args, _ in calls)
    assert any(kwargs.get("alpha", 1) != 1 for _, kwargs in calls)
    # torch's tests need this package; it is replaced only while they are imported.
    package = sys.modules.get("expecttest")
    assert package is None or hasattr(package, "__file__")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "count"),
    [
        ("aten.relu_", torch.float32, 1),
        ("aten.gelu_backward", torch.float32, 2),
        ("aten.add", torch.float32, 2),
        ("aten.bitwise_and", torch.int64, 2),
    ],
)
def test_there_are_samples_of_operators_that_tests_do_not_name(
    name: str, dtype: torch.dtype, count: int
) -> None:
    calls = list(sample_calls(name, dtype, most=3))
    tensors = [[one for one in args if isinstance(one, torch.Tensor)] for args, _ in calls]
    assert tensors
    assert all(len(one) == count for one in tensors)


def test_an_operator_is_found_by_its_name() -> None:
    assert find_operator("aten.relu") is torch.ops.aten.relu.default
    assert find_operator("aten::add.Tensor") is torch.ops.aten.add.Tensor
    assert find_operator("aten.add") is torch.ops.aten.add  # not `default`, which adds two numbers
    assert find_operator("aten.no_such_operator") is None
