"""Calls that need the same check are one group, and every call is in one."""

from __future__ import annotations

import dataclasses

import torch

from paritas.sharding.graphs.calls import (
    GraphCall,
    GraphSettings,
    calls_digest,
    group_calls,
    values_digest,
)
from unit.sharding.graphs.small_graphs import RIGHT, WRONG, graph, idle, linear, relu, value


def test_identical_calls_are_one_group_with_all_their_sites():
    groups = group_calls(graph(linear(0), relu(1), linear(2), idle(3)), GraphSettings())
    assert [[call.position for call in group.calls] for group in groups] == [[0, 2], [1], [3]]
    assert [site.node for site in groups[0].sites] == ["linear_0", "linear_2"]
    assert groups[0].sites[1].source == "model.py:12"
    assert [group.number for group in groups] == [0, 1, 2]


def test_another_shape_annotation_or_plain_argument_is_another_group():
    def summed(position, dim):
        return GraphCall(
            position, f"sum_{position}", "torch.sum", (value("x", 4, 4),), {"dim": dim}
        )

    calls = (linear(0, RIGHT), linear(1, WRONG), linear(2, width=16), summed(3, 0), summed(4, 1))
    assert len(group_calls(graph(*calls), GraphSettings())) == len(calls)


def test_a_graph_is_identified_by_its_calls_and_not_by_the_addresses_of_its_functions():
    assert calls_digest([linear(0)]) == calls_digest([linear(0)])
    assert calls_digest([linear(0)]) != calls_digest([linear(0, WRONG)])
    here = calls_digest([relu(0, "own.f", lambda x: x)])
    assert here == calls_digest([relu(0, "own.f", lambda x: x)])
    assert here != calls_digest([relu(0, "own.f", lambda x: x + 1)])


def test_an_object_without_a_text_of_its_own_does_not_change_the_digest():
    class Opaque:
        pass

    def call():
        return dataclasses.replace(relu(0), kwargs={"mode": Opaque()})

    assert calls_digest([call()]) == calls_digest([call()])


def test_inputs_are_identified_by_their_bits_shapes_and_names():
    x = torch.arange(6.0)
    same = values_digest({"x": x})
    assert same == values_digest({"x": x.clone()})
    others = [{"y": x}, {"x": x.view(2, 3)}, {"x": x.double()}, {"x": -x}, [x], {"x": x, "n": 1}]
    assert len({same, *map(values_digest, others)}) == len(others) + 1
