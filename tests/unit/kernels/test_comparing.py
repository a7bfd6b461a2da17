"""What the memory of a candidate's results shows."""

from __future__ import annotations

import pytest
import torch

from paritas.core.execution.observation import Observation
from paritas.core.results.items import output
from paritas.kernels.comparing import _memory_findings, _names_operator


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


@pytest.mark.parametrize(
    ("forbidden", "operator"),
    [
        ("torch.matmul", "aten.addmv.default"),
        ("torch.nn.functional.linear", "aten.addmm.default"),
        ("torch.batch_norm", "aten._batch_norm_with_update.default"),
        ("torch.batch_norm", "aten.miopen_batch_norm.default"),
        ("torch.softmax", "aten._safe_softmax.default"),
        ("torch.conv2d", "aten.convolution.default"),
        (
            "torch.nn.functional.scaled_dot_product_attention",
            "aten._scaled_dot_product_flash_attention_for_cpu.default",
        ),
    ],
)
def test_a_forbidden_function_is_forbidden_as_each_operator_that_it_becomes(
    forbidden: str, operator: str
) -> None:
    assert _names_operator(forbidden, operator.split("."))
    assert not _names_operator(forbidden, ["aten", "add", "Tensor"])
    assert not _names_operator("torch.relu", operator.split("."))
