"""Values between processes: what arrives is what was sent, and nothing else is believed."""

from __future__ import annotations

import math

import pytest
import torch

from paritas.kernels.messages import Encoded
from paritas.kernels.wire import WireError, decode, encode


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        1 << 70,
        -2.5,
        math.inf,
        "text",
        2 + 1j,
        torch.float16,
        torch.channels_last,
        torch.device("cpu"),
        slice(1, None, 2),
        [1, (2, [3.0]), {"a": None}],
    ],
)
def test_a_plain_value_arrives_unchanged(value: object) -> None:
    assert decode(encode(value)) == value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(12)[3::2],
        torch.ones(1, 4).expand(3, 4),
        torch.zeros(0, 5),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
    ],
)
def test_a_tensor_keeps_its_values_strides_and_offset(tensor: torch.Tensor) -> None:
    found = decode(encode(tensor))
    assert torch.equal(found, tensor)
    assert found.dtype is tensor.dtype
    assert found.stride() == tensor.stride()


def test_tensors_of_one_storage_still_share_it() -> None:
    whole = torch.arange(8.0)
    left, right = decode(encode([whole[:4], whole[2:]]))
    left[3] = 100
    assert right[1] == 100


def test_an_object_is_not_sent() -> None:
    with pytest.raises(WireError, match="a value of type object cannot be sent"):
        encode([object()])


@pytest.mark.parametrize(
    "tree",
    [
        ["tensor", 0, "float32", [5], [1], 0, False, "cpu"],
        ["tensor", 0, "float32", [2], [-1], 0, False, "cpu"],
        ["tensor", 0, "float32", [2], [1], -4, False, "cpu"],
        ["tensor", 3, "float32", [1], [1], 0, False, "cpu"],
        ["tensor", 0, "os", [1], [1], 0, False, "cpu"],
        ["torch", "load"],
        ["class", "x"],
        [],
        None,
    ],
)
def test_a_forged_value_is_refused(tree: object) -> None:
    with pytest.raises(WireError):
        decode(Encoded(tree, [bytes(8)]))
