from __future__ import annotations

import pytest
import torch

from paritas.core.precision.lifting import LiftMode
from paritas.core.torch_private.operators import default_dtype, own_default

COUNT = torch.arange(1, 5)
MASK = COUNT > 2

MADE = {
    "ones": lambda: torch.ones(3),
    "full": lambda: torch.full((2,), 1 / 3),
    "full of integers": lambda: torch.full((2,), 3),
    "full of complex numbers": lambda: torch.full((2,), 1 / 3 + 1j),
    "arange": lambda: torch.arange(0, 1, 0.1),
    "arange of integers": lambda: torch.arange(3),
    "linspace": lambda: torch.linspace(0, 1, 7),
    "eye": lambda: torch.eye(2),
    "window": lambda: torch.hann_window(5),
    "frequencies": lambda: torch.fft.fftfreq(5),
    "a legacy constructor": lambda: torch.Tensor(2, 2).zero_(),
    "integers divided": lambda: COUNT / 3,
    "integers times a float": lambda: COUNT * 0.1,
    "integers times a complex number": lambda: COUNT * 0.1j,
    "a power of integers": lambda: 0.1**COUNT,
    "a root of integers": lambda: torch.sqrt(COUNT),
    "a sum of integers": lambda: torch.sum(COUNT),
    "a mask and numbers": lambda: torch.where(MASK, 0.1, 0.2),
    "a mask and a float": lambda: torch.where(MASK, COUNT, 0.2),
    "a mask times a float": lambda: MASK * 0.1,
    "several integers": lambda: torch.atan2(COUNT, COUNT + 2),
    "integers transformed": lambda: torch.fft.fft(COUNT),
    "integers written in place": lambda: torch.zeros(4, dtype=torch.int64).add_(COUNT),
    "draws": lambda: (torch.manual_seed(0), torch.rand(3))[1],
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_what_states_no_dtype_is_in_a_lifted_run_as_if_float64_were_the_default(make):
    mode = LiftMode(torch.float32, torch.float32)
    with mode:
        made = make()
    with default_dtype(torch.float64), LiftMode(torch.float32, torch.float32):
        wanted = make()
    assert not mode.asked_default
    assert made.dtype is wanted.dtype
    assert torch.equal(made, wanted)


@pytest.mark.parametrize("size", [2, 3])
def test_a_dtype_found_once_is_used_for_other_values_of_the_same_kinds(size):
    with LiftMode(torch.float32, torch.float32):
        wide = torch.full((size,), 1 / size)
    assert wide.tolist() == [1 / size] * size


@torch.library.custom_op("paritas_test::thirds", mutates_args=())
def thirds(x: torch.Tensor) -> torch.Tensor:
    return x + torch.full((3,), 1 / 3)


UNSEEN = {
    "torch.tensor": lambda: torch.tensor([0.1]),
    "torch.Tensor": lambda: torch.Tensor([0.1]),
    "torch.as_tensor": lambda: torch.as_tensor(0.1),
    "of complex numbers": lambda: torch.tensor(0.1j),
    "an operator from elsewhere": lambda: thirds(torch.zeros(3, dtype=torch.float64)),
}


@pytest.mark.parametrize("make", UNSEEN.values(), ids=UNSEEN)
def test_a_default_that_is_asked_where_no_mode_looks_is_told(make):
    mode = LiftMode(torch.float32, torch.float32)
    with mode:
        make()
    assert mode.asked_default


def test_integers_and_stated_dtypes_do_not_ask_the_default():
    mode = LiftMode(torch.float32, torch.float32)
    with mode:
        torch.tensor([1, 2])
        torch.tensor(0.1, dtype=torch.float64)
    assert not mode.asked_default


def test_the_process_keeps_its_own_default_in_mind():
    with default_dtype(torch.float64), default_dtype(torch.bfloat16):
        assert own_default() is torch.float32
    assert own_default() is torch.float32
