"""A wrong operator is named, whatever follows from it; other rounding is never called a fault."""

from __future__ import annotations

import os
import random

import pytest
import torch

import paritas
from paritas.core.results.findings import Status
from quality.families import FAMILIES
from quality.spoiled_operators import FAULTS, record, rounding, spoil_one

# More of them where that is asked for: see tests/README.md.
WHOLE = os.environ.get("PARITAS_WHOLE_CORPUS") == "1"
SPOILED = 12 if WHOLE else 2
NARROW = list(FAMILIES) if WHOLE else ["experts"]
WIDE = list(FAMILIES) if WHOLE else ["attentive"]
CASES = [
    *((name, torch.float32) for name in WIDE),
    *((name, torch.bfloat16) for name in NARROW),
]


def program(name, dtype):
    torch.manual_seed(0)
    make, give = FAMILIES[name]
    model, x = make().to(dtype), give()
    return model, (x.to(dtype) if x.is_floating_point() else x,)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_the_operator_that_is_wrong_is_named_and_rounding_is_not(name, dtype, tmp_path):
    model, inputs = program(name, dtype)
    operators = record(tmp_path / "golden", model, inputs, backward=True)
    record(tmp_path / "rounding", model, inputs, rounding(1), backward=True)
    benign = paritas.compare(tmp_path / "rounding", tmp_path / "golden")
    assert benign.passed, benign.first
    assert benign.first is None
    assert any(row.status is Status.EQUIVALENT for row in benign.rows)
    draw = random.Random(f"{name} {dtype}")
    for place in draw.sample(range(operators), SPOILED):
        fault = draw.choice(list(FAULTS))
        path = tmp_path / f"{place}"
        record(path, model, inputs, spoil_one(place, fault), backward=True)
        found = paritas.compare(path, tmp_path / "golden")
        # Nothing before the operator was touched: its result is the first that has other bits.
        changed = [r for r in found.rows if r.side == "output" and r.status != Status.IDENTICAL]
        if not changed:  # a gradient of zero, scaled
            assert found.status is Status.IDENTICAL
            continue
        assert found.first is not None, (place, fault, changed[0].name)
        assert (found.first.kind, found.first.row) == ("made", changed[0].index), (place, fault)
        later = [row for row in found.rows if row.made == "here" and row.index != changed[0].index]
        assert all(row.side == "output" for row in later)
