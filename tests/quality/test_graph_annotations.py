"""Wrong annotations of a graph's operators are all found; right ones raise nothing."""

from __future__ import annotations

import pytest
import torch

from paritas.core.results.findings import Status
from paritas.sharding.graphs.calls import GraphSettings
from paritas.sharding.graphs.checking import check_call
from paritas.sharding.graphs.rows import CallOutcome, GraphReport
from quality.graph_faults import CNN, MISFITS, TRANSFORMER, Planted, call_of

SPLITS = [*TRANSFORMER, *CNN]
RIGHT = [planted for planted in SPLITS if planted.right is not None]
DTYPES = [torch.float32, torch.bfloat16]


def names(planted: Planted) -> str:
    return planted.kind


def test_there_are_enough_kinds_of_them():
    assert len({planted.kind for planted in [*SPLITS, *MISFITS]}) >= 45


@pytest.mark.one_in(4)
@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("planted", [*SPLITS, *MISFITS], ids=names)
def test_a_wrong_annotation_is_reported_with_its_source_line(planted, dtype):
    result = check_call(call_of(planted, planted.wrong, dtype, line=30), GraphSettings(seed=0))
    assert result.outcome is CallOutcome.FAILED
    assert result.failures
    assert result.failures[0].status is Status.DIFFERENT
    assert planted.told in result.reason
    report = GraphReport(graph="g", kind="nnscaler", operators=(result,), calls=1)
    assert report.exit_code == 1
    assert {finding.source for finding in report.verdict.failures} == {"block.py:30"}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("planted", RIGHT, ids=names)
def test_its_right_twin_raises_nothing(planted, dtype):
    result = check_call(call_of(planted, planted.right, dtype), GraphSettings(seed=0, ranks=(2, 4)))
    assert result.outcome is CallOutcome.VERIFIED, result.reason
    assert result.options


@pytest.mark.one_in(4)
@pytest.mark.parametrize("planted", RIGHT, ids=names)
def test_the_library_claims_nothing_wrong_of_the_same_calls(planted):
    settings = GraphSettings(seed=0, options="library", ranks=(2, 3))
    result = check_call(call_of(planted, planted.wrong, torch.float32), settings)
    assert result.outcome in {CallOutcome.VERIFIED, CallOutcome.NOTHING}, result.reason
