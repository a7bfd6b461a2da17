"""The examples of the verify() documents we serve, run as written but for the import line.

`forge` stands for whatever compiler the user has; here it is torch.compile behind the same call.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

from paritas import (
    AllCloseValueChecker,
    AutomaticValueChecker,
    FullValueChecker,
    MismatchError,
    VerifyConfig,
    verify,
)
from spying import Spy


def compile_like_forge(model: nn.Module, sample_inputs: list[torch.Tensor]) -> Any:
    compiled = torch.compile(model, backend="aot_eager")
    compiled(*sample_inputs)
    return compiled


forge = types.SimpleNamespace(compile=compile_like_forge)


class Add(nn.Module):
    def __init__(self) -> None:
        super().__init__()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


@pytest.fixture(name="example")
def _example() -> tuple[list[torch.Tensor], nn.Module, Any]:
    inputs = [torch.rand(2, 32, 32), torch.rand(2, 32, 32)]
    framework_model = Add()
    return inputs, framework_model, forge.compile(framework_model, sample_inputs=inputs)


def test_add() -> None:
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b

    inputs = [torch.rand(2, 32, 32), torch.rand(2, 32, 32)]

    framework_model = Add()
    compiled_model = forge.compile(framework_model, sample_inputs=inputs)

    verify(inputs, framework_model, compiled_model)


def test_forward_without_comparing(example: Any) -> None:
    inputs, framework_model, compiled_model = example
    fw_out = framework_model(*inputs)
    co_out = compiled_model(*inputs)
    assert torch.equal(fw_out, co_out)


@pytest.mark.parametrize(
    "verify_cfg",
    [
        VerifyConfig(verify_dtype=False),
        VerifyConfig(value_checker=AutomaticValueChecker()),
        VerifyConfig(value_checker=AutomaticValueChecker(pcc=0.95, rtol=1e-03)),
        VerifyConfig(value_checker=AllCloseValueChecker()),
        VerifyConfig(value_checker=AllCloseValueChecker(rtol=1e-03)),
        VerifyConfig(value_checker=FullValueChecker()),
        VerifyConfig(value_checker=FullValueChecker(pcc=0.95, rtol=1e-03)),
    ],
    ids=lambda config: str(config.value_checker) + str(config.verify_dtype),
)
def test_configuration(example: Any, verify_cfg: VerifyConfig) -> None:
    inputs, framework_model, compiled_model = example
    assert verify(inputs, framework_model, compiled_model, verify_cfg)


class Scaled(nn.Module):
    """A wrong candidate: the sum times 1.01, as float64 or with another shape on request."""

    def __init__(self, factor: float = 1.01, **change: Any) -> None:
        super().__init__()
        self.factor, self.change = factor, change

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        out = (a + b) * self.factor
        if "dtype" in self.change:
            out = out.to(self.change["dtype"])
        if "shape" in self.change:
            out = out.reshape(self.change["shape"])
        return (out, out) if self.change.get("twice") else out


@pytest.mark.parametrize(
    ("checker", "passes"),
    [
        (AutomaticValueChecker(), False),
        (AutomaticValueChecker(pcc=0.95, rtol=1e-3), True),
        (AllCloseValueChecker(), False),
        (AllCloseValueChecker(rtol=0.02), True),
        (FullValueChecker(pcc=0.95, rtol=1e-3), False),
        (FullValueChecker(pcc=0.95, rtol=0.02), True),
    ],
    ids=str,
)
def test_what_is_given_is_enforced_and_the_rest_automatic(
    example: Any, checker: Any, *, passes: bool
) -> None:
    inputs, framework_model, _ = example
    config = VerifyConfig(value_checker=checker)
    if passes:
        assert verify(inputs, framework_model, Scaled(), config)
    else:
        with pytest.raises(MismatchError, match="different"):
            verify(inputs, framework_model, Scaled(), config)


@pytest.mark.parametrize(
    ("change", "switch"),
    [
        ({"dtype": torch.float64}, "verify_dtype"),
        ({"shape": (2, 1024)}, "verify_shape"),
        ({"twice": True}, "verify_size"),
    ],
)
def test_each_check_can_be_switched_off(example: Any, change: Any, switch: str) -> None:
    inputs, framework_model, _ = example
    candidate = Scaled(1.0, **change)
    with pytest.raises(MismatchError):
        verify(inputs, framework_model, candidate)
    verdict = verify(
        inputs,
        framework_model,
        candidate,
        VerifyConfig(**{switch: False}, raise_on_mismatch=False),
    )
    assert not [f for f in verdict.failures if f.aspect.value == switch.removeprefix("verify_")]


def test_disabled_runs_both_sides_and_says_so(example: Any) -> None:
    inputs, framework_model, _ = example
    calls = Spy()

    class Counted(Scaled):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
            calls.note(1)
            return super().forward(a, b)

    verdict = verify(inputs, framework_model, Counted(), VerifyConfig(enabled=False))
    assert calls.notes()
    assert not verdict
    assert "switched off" in str(verdict)
