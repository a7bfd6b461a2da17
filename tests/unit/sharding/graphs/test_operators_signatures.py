"""A call as one line of text, and its key."""

from __future__ import annotations

import dataclasses

import torch

from paritas.sharding.graphs.calls import (
    GraphCall,
    GraphSettings,
    TensorValue,
    key_of,
    signature_of,
)
from unit.sharding.graphs.small_graphs import relu

X = TensorValue("x", (16, 8), torch.float32)
W = TensorValue("w", (32, 8), torch.bfloat16)


def called(*args, operator="torch.nn.functional.linear", **kwargs):
    return GraphCall(3, "node", operator, args=args, kwargs=kwargs)


def test_a_signature_shows_shapes_dtypes_and_other_arguments():
    assert signature_of(called(X, W, None)) == "linear(f32[16, 8], bf16[32, 8], None)"
    assert signature_of(called(X, dim=(0,), keepdim=False, operator="torch.sum")) == (
        "sum(f32[16, 8], dim=(0,), keepdim=False)"
    )
    assert signature_of(called([X, X], 1, operator="aten.cat.default")) == (
        "cat.default([f32[16, 8], f32[16, 8]], 1)"
    )
    assert signature_of(called(X, slice(1, None), operator="a.fullslice")) == (
        "fullslice(f32[16, 8], 1:)"
    )


def test_a_long_signature_is_cut():
    text = signature_of(called(*[X] * 40))
    assert len(text) <= 120
    assert text.endswith(" ...)")


def test_calls_that_ask_the_same_have_one_key():
    settings = GraphSettings()
    y = dataclasses.replace(X, name="y")
    assert key_of(called(X, W), settings) == key_of(called(y, W), settings)
    other = dataclasses.replace(called(X, W), position=9, name="n", source="a.py:1", module="m")
    assert key_of(other, settings) == key_of(called(X, W), settings)


def test_calls_that_ask_something_else_have_other_keys():
    settings = GraphSettings()
    y = dataclasses.replace(X, name="y")
    calls = [
        called(X, dim=0),
        called(X, dim=1),
        called(X, dim=True),
        called(X, dim=(0,)),
        called(X, dim=[0]),
        called(dataclasses.replace(X, shape=(8, 16)), dim=0),
        called(dataclasses.replace(X, dtype=torch.float16), dim=0),
        called(dataclasses.replace(X, requires_grad=False), dim=0),
        called(X, X),
        called(X, y),
        called(X, dim=0, operator="torch.sum"),
        dataclasses.replace(called(X, dim=0), annotation="a b -> a b"),
        dataclasses.replace(called(X, dim=0), function=lambda x: x),
        dataclasses.replace(called(X, dim=0), function=lambda x: x + 1),
    ]
    keys = {key_of(call, settings) for call in calls}
    keys |= {key_of(calls[0], GraphSettings(seed=1)), key_of(calls[0], GraphSettings(ranks=(2, 4)))}
    assert len(keys) == len(calls) + 2


def test_functions_of_one_text_that_hold_other_values_are_others():
    def times(factor):
        return lambda x: x * factor

    def plus(x, more=1):
        return x + more

    def call(function):
        return relu(0, "mine.op", function)

    assert key_of(call(times(2)), GraphSettings()) == key_of(call(times(2)), GraphSettings())
    assert key_of(call(times(2)), GraphSettings()) != key_of(call(times(3)), GraphSettings())
    before = key_of(call(plus), GraphSettings())
    plus.__defaults__ = (2,)
    assert key_of(call(plus), GraphSettings()) != before


def test_another_device_or_real_ranks_are_another_question():
    keys = {key_of(relu(0), GraphSettings(**asked)) for asked in ({}, {"device": "cuda"})}
    keys.add(key_of(relu(0), GraphSettings(confirm="gloo")))
    assert len(keys) == 3
