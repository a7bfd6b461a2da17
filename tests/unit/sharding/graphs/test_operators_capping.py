"""Shorter dimensions: what belongs together shrinks together, and the call still runs."""

from __future__ import annotations

import pytest
import torch

from paritas.sharding.graphs.calls import GraphCall, GraphSettings, TensorValue
from paritas.sharding.graphs.checking import check_call
from paritas.sharding.graphs.rows import CallOutcome


def value(name, *shape, dtype=torch.float32):
    return TensorValue(name, shape, dtype)


def capped(operator, *args, cap=64, annotation=None, **kwargs):
    call = GraphCall(0, "node", operator, args=args, kwargs=kwargs, annotation=annotation)
    return check_call(call, GraphSettings(cap=cap, seed=0))


@pytest.mark.parametrize(
    ("note", "operator", "args", "kwargs"),
    [
        (
            "capped: 4096 -> 62, 11008 -> 64",
            "torch.nn.functional.linear",
            (value("x", 2, 8, 4096), value("w", 11008, 4096)),
            {},
        ),
        (
            "capped: 4096 -> 64",
            "torch.nn.functional.layer_norm",
            (value("x", 8, 4096), [4096], value("w", 4096), value("b", 4096)),
            {},
        ),
        (
            "capped: 32 -> 8, 128 -> 8, 4096 -> 64",
            "aten.view.default",
            (value("x", 2, 8, 4096), [2, 8, 32, 128]),
            {},
        ),
        (
            "capped: 512 -> 62, 1024 -> 64, 8192 -> 512",
            "torch.Tensor.view",
            (value("x", 8, 1024, 512), 8192, 512),
            {},
        ),
        (
            "capped: 300 -> 60",
            "aten.index.Tensor",
            (value("x", 2, 300, 6), [None, value("i", 5, dtype=torch.int64)]),
            {},
        ),
        (
            "capped: 4096 -> 16, 12288 -> 48",
            "aten.split.Tensor",
            (value("x", 2, 12288), 4096, -1),
            {},
        ),
        (
            "capped: 256 -> 64",
            "torch.nn.functional.conv2d",
            (value("x", 2, 256, 6, 6), value("w", 256, 1, 3, 3)),
            {"groups": 256},
        ),
        (
            "capped: 768 -> 62, 50257 -> 64",
            "aten.embedding.default",
            (value("w", 50257, 768), value("i", 2, 8, dtype=torch.int64)),
            {},
        ),
    ],
)
def test_lengths_that_belong_together_shrink_together(note, operator, args, kwargs):
    result = capped(operator, *args, **kwargs)
    assert result.outcome is CallOutcome.VERIFIED, result.reason
    assert result.notes[0] == note


def test_a_call_that_would_not_run_keeps_its_shapes():
    result = capped("torch.Tensor.unfold", value("x", 4, 41), 1, 31, 5, cap=8)
    assert result.notes[0] == "not capped: it does not run with 41 cut to 8"


def test_an_annotation_with_a_number_in_it_still_fits():
    rule = "a (b 100) -> a b 100 ; size[0]=a, size[1]=b"
    result = capped("torch.Tensor.view", value("x", 4, 200), annotation=rule, size=(4, 2, 100))
    assert result.outcome is CallOutcome.VERIFIED, result.reason


def test_nothing_is_said_where_nothing_is_too_long():
    result = capped("torch.relu", value("x", 4, 8))
    assert result.notes == ("values drawn with seed 0",)
