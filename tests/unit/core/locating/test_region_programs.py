"""Operators of a trace as programs of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from paritas.core.locating.region_programs import Region, judge_regions
from paritas.core.results.items import Item, ItemKind
from paritas.core.tracing.traces import Operation, ValueRef

aten = torch.ops.aten


def _call(index: int, func: Any, read: int, given: int, *rest: Any) -> Operation:
    return Operation(index, func, (ValueRef(read), *rest), {}, (read,), (given,))


def test_a_value_of_the_reference_that_the_candidate_reads_is_no_operand() -> None:
    """The sum of the exponentials, and half of it: the candidate begins at the exponentials."""
    x = torch.linspace(-1.0, 1.0, 6)
    whole = [_call(0, aten.exp.default, 0, 1), _call(1, aten.sum.default, 1, 2)]
    half = [_call(0, aten.sum.default, 4, 5), _call(1, aten.mul.Tensor, 5, 6, 0.5)]
    reference = Region(whole, 2, {0: 0}, {})
    candidate = Region(half, 6, {4: 1}, {})
    item, tensors = Item(kind=ItemKind.OUTPUT), [x, x.exp()]
    (alone,) = judge_regions(item, reference, candidate, tensors, 0)
    assert alone.diagnosis is not None
    assert not alone.diagnosis.patterns  # one number, which cannot be asked for again
    reference = dataclasses.replace(reference, shared={1: 1})
    (finding,) = judge_regions(item, reference, candidate, tensors, 0)
    assert finding.diagnosis is not None
    assert finding.diagnosis.patterns[0].sentence == "scaled by one half"


def test_the_evidence_names_the_operators_of_a_region() -> None:
    x = torch.linspace(-1.0, 2.0, 24).reshape(4, 6)
    whole = [_call(0, aten.square.default, 0, 1), _call(1, aten.mean.dim, 1, 2, [1])]
    part = [
        _call(0, aten.slice.Tensor, 0, 1, 1, 0, 3),
        _call(1, aten.square.default, 1, 2),
        _call(2, aten.mean.dim, 2, 3, [1]),
    ]
    regions = Region(whole, 2, {0: 0}, {}), Region(part, 3, {0: 0}, {})
    (finding,) = judge_regions(Item(kind=ItemKind.OUTPUT), *regions, [x], 0)
    assert finding.diagnosis is not None
    assert finding.diagnosis.best is not None
    assert finding.diagnosis.best.evidence["operator"] == "region of square, mean"


def test_arguments_that_follow_from_others_are_computed_again() -> None:
    """A gelu of the double, which the candidate computes from the double and from the value."""
    x = torch.linspace(-2.0, 2.0, 24).reshape(4, 6)
    reference = Region([_call(0, aten.gelu.default, 1, 2)], 2, {1: 1}, {})
    steps = [
        _call(0, aten.mul.Tensor, 0, 2, 3.404),
        _call(1, aten.sigmoid.default, 2, 3),
        Operation(2, aten.mul.Tensor, (ValueRef(1), ValueRef(3)), {}, (1, 3), (4,)),
    ]
    candidate = Region(steps, 4, {0: 0, 1: 1}, {})
    between = Region([_call(0, aten.mul.Tensor, 0, 1, 2.0)], -1, {0: 0}, {}, shared={1: 1})
    for doubling, said in ((None, "another function"), (between, "x * sigmoid(1.702 x) instead")):
        known = dataclasses.replace(reference, before=doubling)
        (finding,) = judge_regions(Item(kind=ItemKind.OUTPUT), known, candidate, [x, 2 * x], 0)
        assert finding.diagnosis is not None
        assert finding.diagnosis.patterns[0].sentence.startswith(said)
