"""Functions and settings that a call leaves changed in the process are restored and reported."""

from __future__ import annotations

import builtins
import math

import pytest
import torch
import torch.nn.functional as F

from paritas.execution.saved_state import ProcessState


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
