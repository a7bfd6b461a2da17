"""Which cases a reference defines."""

from __future__ import annotations

import pytest
import torch

from paritas.core.execution.subjects import Inputs
from paritas.kernels.cases import KernelCase
from paritas.kernels.messages import SideName
from paritas.kernels.references import KernelTask, RefusedCase
from paritas.kernels.rows import CaseFamily
from paritas.kernels.sides import Side


def to_bytes(x):
    return x.to(torch.uint8)


def to_long(x):
    return x.long()


def written(x):
    out = torch.zeros(x.shape, dtype=torch.int8)
    out.copy_(x)
    return out


def places(x):
    return x.argmax(-1)


def asked(function, values, *, is_given=False):
    inputs = Inputs((torch.tensor(values),))
    side = Side(SideName(module=__name__, name=function.__name__), function, None)
    task = KernelTask(side, lambda: [torch.ones(3)], device="cpu", seed=0)
    case = KernelCase(name="as given", family=CaseFamily.GIVEN, inputs=inputs, is_given=is_given)
    return task.run(case, gradients=False)


@pytest.mark.parametrize(
    ("function", "values", "shown"),
    [
        (to_bytes, [1.0, -2.5], "-2.5 to torch.uint8"),
        (to_bytes, [256.0, 0.0], "256 to torch.uint8"),
        (to_long, [2.0**63, 0.0], "9.22337e\\+18 to torch.int64"),
        (written, [float("nan"), 0.0], "nan to torch.int8"),
    ],
)
def test_integers_that_cannot_hold_a_number_are_not_asked(function, values, shown):
    with pytest.raises(RefusedCase, match=f"the reference converts {shown}"):
        asked(function, values)


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (to_bytes, [255.9, -0.9]),
        (to_long, [-(2.0**63), 2.0**62]),
        (written, [-128.0, 127.5]),
        (places, [float("inf"), 1e30]),
    ],
)
def test_integers_that_hold_every_number_are_asked(function, values):
    assert asked(function, values).native.outputs


def rows_of(indices):
    return torch.arange(6.0).reshape(3, 2)[indices.cpu()]


def test_an_index_out_of_range_is_not_asked_of_a_device_where_it_ends_the_process():
    side = Side(SideName(module=__name__, name="rows_of"), rows_of, None)
    task = KernelTask(side, lambda: [torch.tensor([0, 2])], device="cpu", seed=0)
    task.device = "cuda"  # nothing is moved there: the case has its inputs
    case = KernelCase("others", CaseFamily.VALUES, Inputs((torch.tensor([0, 3]),)))
    with pytest.raises(RefusedCase, match="out of bounds"):
        task.run(case, gradients=False)


def in_memory(x):
    return torch.empty_like(x)


def test_what_is_in_memory_is_no_reference():
    with pytest.raises(RefusedCase, match="uninitialized memory"):
        asked(in_memory, [1.0, 2.0], is_given=True)
