from __future__ import annotations

import torch

from paritas.sharding.plans.traces import INPUT_SIDE, OUTPUT_SIDE, Flows, ValuePlace


def marked(flows, tensor, number, side):
    flows.mark(tensor, [number], side, "")
    return tensor, ValuePlace(number, side, "")


def test_a_gradient_comes_from_those_that_read_the_value_and_from_no_others():
    flows, x = Flows(), torch.ones(3, requires_grad=True)
    value, given = marked(flows, x * 2, 0, OUTPUT_SIDE)
    left, to_left = marked(flows, value.view_as(value), 1, INPUT_SIDE)
    right, to_right = marked(flows, value.view_as(value), 2, INPUT_SIDE)
    _, of_left = marked(flows, left.exp(), 1, OUTPUT_SIDE)
    assert right.requires_grad
    assert flows.sources() == {given: (to_left, to_right), to_left: (of_left,)}


def test_a_tensor_that_two_modules_give_reaches_the_inner_one_by_way_of_the_outer_one():
    flows, x = Flows(), torch.ones(3, requires_grad=True)
    given, at_input = marked(flows, x.view_as(x), 0, INPUT_SIDE)
    value, inner = marked(flows, given * 2, 0, OUTPUT_SIDE)
    _, outer = marked(flows, value, 1, OUTPUT_SIDE)
    assert flows.sources() == {inner: (outer,), at_input: (inner,)}


def test_parts_of_one_tensor_are_told_apart():
    flows, x = Flows(), torch.ones(4, requires_grad=True)
    whole, before = marked(flows, x * 2, 0, OUTPUT_SIDE)
    first, second = whole.split(2)
    _, of_first = marked(flows, first, 1, OUTPUT_SIDE)
    _, after = marked(flows, second.exp(), 2, OUTPUT_SIDE)
    assert flows.sources() == {before: (of_first, after)}


def test_a_call_that_never_ended_is_left_out():
    flows, x = Flows(), torch.ones(3, requires_grad=True)
    value, given = marked(flows, x * 2, 0, OUTPUT_SIDE)
    flows.mark(value.exp(), [], OUTPUT_SIDE, "")
    assert flows.sources() == {}
    assert given.call == 0
