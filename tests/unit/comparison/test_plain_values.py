from __future__ import annotations

import math

import pytest
import torch

from paritas.comparison.operands import read_value
from paritas.core.errors import UsageError


@pytest.mark.parametrize(
    "value",
    [
        1,
        -2.5,
        1e-05,
        True,
        None,
        "tanh",
        [1, -1],
        [],
        [None, 2],
        (2, 3),
        1 - 2j,
        -3j,
        math.inf,
        [-math.inf],
        torch.bfloat16,
        torch.strided,
        torch.channels_last,
    ],
)
def test_what_python_writes_is_read_back(value):
    assert read_value(repr(value)) == value


def test_a_nan_is_read_back():
    assert math.isnan(read_value("nan"))
    assert math.isnan(read_value("float('nan')"))


def test_any_device_is_the_host():
    assert read_value("device(type='cuda', index=3)") == torch.device("cpu")


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "torch.load('x')",
        "open('x')",
        "[x for x in y]",
        "2**10000",
        "10 * 'a'",
        "'a' + 'b'",
        "FakeTensor(...)",
        "[1, 2, ...",
        "",
        "(" * 5000,
        "9" * 5000,
        "1" * 20_000,
    ],
)
def test_what_is_no_plain_value_is_refused(text):
    with pytest.raises(UsageError, match="as a plain value"):
        read_value(text)
