"""A guard, a capture and `verify` that are used again and again hold no more than at first.

What is held is counted, not weighed: tensors, and all objects that the garbage collector knows.
The benchmark `soak` weighs 10,000 calls.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import paritas

WARM, MORE = 10, 50


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))


def held():
    """Tensors, and objects of any kind."""
    gc.collect()
    # By type: to ask a proxy for its class may warn or compute.
    objects = gc.get_objects()
    return sum(issubclass(type(one), torch.Tensor) for one in objects), len(objects)


def assert_flat(step, warm, more):
    gc.collect()
    gc.freeze()  # what there is by now is not looked at again: after other tests it is much
    for _ in range(warm):
        step()
    tensors, objects = held()
    for _ in range(more):
        step()
    later_tensors, later_objects = held()
    assert later_tensors <= tensors
    # One object kept of each call would be `more`; caches of Python and torch still fill a little.
    assert later_objects - objects < more


def test_a_guard_over_60_calls_holds_nothing_of_them():
    model = net()
    guarded = paritas.guard("eager", on_mismatch="record")
    compiled = torch.compile(model, backend=guarded)

    def step():
        compiled(torch.randn(3, 8)).sum().backward()
        model.zero_grad()

    assert_flat(step, WARM, MORE)
    assert guarded.verdict().passed
    assert all(entry.checked == entry.calls > 0 for entry in guarded.journal.graphs)


def wrong(graph, inputs):
    def run(*args):
        return [value + 1 for value in graph.forward(*args)]

    return run


def test_a_guard_whose_every_call_fails_keeps_the_first_alone():
    model = net().requires_grad_(False)
    guarded = paritas.guard(wrong, on_mismatch="record", locate=False)
    compiled = torch.compile(model, backend=guarded)
    assert_flat(lambda: compiled(torch.randn(3, 8)), WARM, 10)
    verdict = guarded.verdict()
    assert not verdict.passed
    assert any("20 calls" in note for note in verdict.notes)


def test_verify_over_and_over_holds_nothing_of_it():
    model, inputs = net(), [torch.ones(3, 8)]
    assert_flat(lambda: paritas.verify(inputs, model, model), 3, 8)


def test_a_failed_verify_is_let_go_with_its_error():
    model, inputs = net(), [torch.ones(3, 8)]

    def step():
        with pytest.raises(paritas.MismatchError):
            paritas.verify(inputs, model, lambda x: model(x) + 1)

    assert_flat(step, 9, 8)


def test_captures_one_after_another_hold_nothing(tmp_path):
    model = net()

    def step():
        with paritas.capture(tmp_path / "dump", overwrite=True):
            model(torch.ones(3, 8))

    assert_flat(step, 3, 8)
