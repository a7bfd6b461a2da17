"""What the memory of a candidate's results shows."""

from __future__ import annotations

import pytest
import torch

from paritas.core.execution.observation import Observation
from paritas.core.results.items import output
from paritas.kernels.comparing import _memory_findings


def observed(value: torch.Tensor) -> Observation:
    seen = Observation()
    seen.outputs = {output("output"): value}
    seen.strides = {output("output"): value.stride()}
    return seen


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1)])
def test_a_result_without_elements_to_share_may_have_any_strides(shape: tuple[int, ...]) -> None:
    found = _memory_findings(
        observed(torch.zeros(shape)), observed(torch.empty_strided(shape, (0, 0)))
    )
    assert not found.findings


def test_elements_that_share_memory_are_different() -> None:
    expanded = torch.zeros(1, 3).expand(2, 3)
    found = _memory_findings(observed(torch.zeros(2, 3)), observed(expanded))
    assert [one.reason for one in found.findings] == ["strides [0, 1]: its elements share memory"]
