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
