"""Functions and settings that a call leaves changed in the process are restored and reported."""

# ruff: noqa: NPY002  (programs draw from NumPy's global generator)
from __future__ import annotations

import builtins
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paritas.core.execution.saved_state import ProcessState, RandomState


def swap_sine_and_cosine():
    math.sin, math.cos = math.cos, math.sin


def anything(*_):
    return True


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda: setattr(F, "linear", anything), {"torch.nn.functional.linear"}),
        (lambda: setattr(F, "brand_new", anything), {"torch.nn.functional.brand_new"}),
        (lambda: delattr(F, "gelu"), {"torch.nn.functional.gelu"}),
        (lambda: setattr(torch.Tensor, "relu", anything), {"torch.Tensor.relu"}),
        (swap_sine_and_cosine, {"math.sin", "math.cos"}),
        # What the comparison itself might call.
        (lambda: setattr(builtins, "all", anything), {"builtins.all"}),
        (lambda: setattr(builtins, "map", anything), {"builtins.map"}),
        (lambda: setattr(builtins, "len", anything), {"builtins.len"}),
        (lambda: None, set()),
    ],
)
def test_functions_that_were_replaced_are_put_back_and_told(change, told):
    spaces = (torch, F, torch.Tensor, math, builtins)
    before = [dict(vars(space)) for space in spaces]
    state = ProcessState()
    change()
    try:
        changed = state.put_back()
        after = [dict(vars(space)) for space in spaces]
    finally:
        vars(builtins).update(before[-1])  # without them pytest could not even tell
    assert changed.keys() == told
    assert after == before


def nothing():
    pass


@pytest.mark.parametrize(
    ("draws", "told"),
    [
        (np.random.rand, True),
        (np.random.randn, True),
        (lambda: np.random.seed(5), True),
        (lambda: np.random.set_state(np.random.RandomState(5).get_state()), True),
        (nothing, False),
    ],
    ids=["uniform", "normal", "seed", "state", "nothing"],
)
@pytest.mark.parametrize("kept", [0, 1], ids=["", "a normal number is kept"])
@pytest.mark.parametrize("again", [1, 3], ids=["once", "again"])
def test_numbers_that_numpy_draws_are_told_and_drawn_again(draws, told, kept, again):
    """A normal number that is kept for the next call is no part of the generator's own memory."""
    np.random.seed(3)
    for _ in range(kept):
        np.random.randn()
    expected = np.random.get_state()
    for _ in range(again):
        drawn, state = RandomState.now(), ProcessState()
        draws()
        assert bool(state.put_back()) is told
        now = np.random.get_state()
        assert all(map(np.array_equal, now, expected))
        draws()
        drawn.restore()
        assert all(map(np.array_equal, np.random.get_state(), expected))
