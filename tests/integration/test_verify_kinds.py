"""The kinds of things people pass: what verify() makes of each, and never a crash."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from paritas import Status, UsageError, VerifyConfig, verify

QUIET = VerifyConfig(raise_on_mismatch=False)
# torch.jit announces its end on every use, and torch.export on copying a graph.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).eval()


def traced(module: nn.Module) -> Any:
    return torch.jit.trace(module, torch.randn(4, 16))


def exported(module: nn.Module) -> Any:
    return torch.export.export(module, (torch.randn(4, 16),)).module()


@pytest.mark.parametrize(
    "make", [copy.deepcopy, traced, torch.jit.script, exported, torch.vmap, nn.DataParallel]
)
def test_the_same_model_in_another_form_passes_with_its_gradients(make: Any) -> None:
    reference = model()
    verdict = verify([torch.randn(4, 16)], reference, make(reference), QUIET)
    assert verdict.passed, str(verdict)
    gradients = [f for f in verdict.findings if f.path.startswith("gradient of")]
    assert len(gradients) == len(list(reference.parameters())) + 1  # and of the input


def test_a_quantized_model_is_told_from_the_original() -> None:
    reference = model().requires_grad_(requires_grad=False)

    def quantized(x: torch.Tensor) -> torch.Tensor:
        first, gelu, second = reference
        for layer in (first, gelu, second):
            x = layer((x * 16).round() / 16)
        return x

    verdict = verify([torch.randn(4, 16)], reference, quantized, QUIET)
    assert verdict.status is Status.DIFFERENT


def test_a_scripted_fault_is_found() -> None:
    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 1.0001

    reference = model()
    config = VerifyConfig(raise_on_mismatch=False, verify_gradients=False)
    assert not verify([torch.randn(4, 16)], reference, torch.jit.script(Scaled(reference)), config)


def test_what_cannot_be_compared_is_unverified() -> None:
    verdict = verify([torch.ones(3)], lambda x: (t for t in [x]), lambda x: (t for t in [x]), QUIET)
    assert verdict.status is Status.UNVERIFIED
    assert "generator" in str(verdict)


def test_a_model_without_its_parameters_yet_is_a_clear_error() -> None:
    lazy = nn.LazyLinear(4)
    with pytest.raises(UsageError, match="call the model once before verifying"):
        verify([torch.ones(2, 3)], lazy, lazy)


@pytest.mark.parametrize(
    ("left", "right", "x"),
    [
        (lambda x: x >= 2, lambda x: x > 2, torch.tensor([1.0, 2.0, 3.0])),
        (lambda x: x.relu() <= 0, lambda x: x.relu() < 0, torch.tensor([-1.0, 0.5])),
        (lambda x: x >= 1, lambda x: x > 1, torch.arange(8)),
    ],
    ids=["float", "relu", "integer"],
)
def test_an_edge_that_no_rounding_moves_is_where_the_reference_puts_it(left, right, x):
    verdict = verify([x], left, right, VerifyConfig(raise_on_mismatch=False))
    assert verdict.status is Status.DIFFERENT


def test_a_mask_of_relu_that_rounding_decides_is_no_fault():
    """How near to its edge a value was, relu hides: what it was given tells."""
    torch.manual_seed(0)
    weight = torch.randn(64, 64, dtype=torch.bfloat16)

    def whole(x):
        return (x @ weight).relu() <= 0

    def halves(x):
        return (x[:, :32] @ weight[:32] + x[:, 32:] @ weight[32:]).relu() <= 0

    x = torch.randn(512, 64, dtype=torch.bfloat16)
    assert not torch.equal(whole(x), halves(x))
    assert verify([x], halves, whole).status is Status.UNSTABLE
    config = VerifyConfig(raise_on_mismatch=False)
    assert verify([x], halves, lambda x: whole(x * -1), config).status is Status.DIFFERENT
