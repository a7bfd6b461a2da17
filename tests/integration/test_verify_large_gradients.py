"""Gradients that are too large to be kept from all runs: their sketches are compared."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import paritas.verification.verify as verifying
from paritas import Status, Verdict, VerifyConfig, verify
from paritas.core.execution import fitting
from paritas.core.execution.evidence import Evidence
from paritas.core.execution.observation import MOST_KEPT

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 160  # more numbers in a square than are kept as they are
assert WIDTH * WIDTH > MOST_KEPT
SKETCHED = "its sketch was compared: 1024 random sums"


@pytest.fixture(autouse=True)
def few_whole_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "MOST_WHOLE_GRADIENTS", 1 << 10)


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(dtype)


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)]


def verdict_on(reference: Any, candidate: Any, **options: Any) -> Verdict:
    dtype = next(reference.parameters()).dtype
    config = VerifyConfig(raise_on_mismatch=False, **options)
    return verify(inputs(dtype), reference, candidate, config)


def failures(verdict: Verdict) -> dict[str, str]:
    return {finding.path: finding.reason for finding in verdict.failures}


def with_gradient(change: Callable[[torch.Tensor], torch.Tensor]) -> nn.Sequential:
    """The same model, of which the gradient of the last weight is changed."""
    candidate = model()
    candidate[2].weight.register_hook(change)
    return candidate


class Other(nn.Module):
    """The same as the model, rounded otherwise."""

    def __init__(self, program: nn.Sequential) -> None:
        super().__init__()
        self.add_module("0", program[0])
        self.add_module("2", program[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        first, last = self.get_submodule("0"), self.get_submodule("2")
        y = (x.unsqueeze(-2) * first.weight).sum(-1) + first.bias
        return torch.tanh(y) @ last.weight.T + last.bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_passes(dtype):
    program = model(dtype)
    verdict = verdict_on(program, Other(program))
    assert verdict.passed, str(verdict)
    assert any("sketches were compared" in note for note in verdict.notes)
    shown = {finding.path: finding for finding in verdict.findings}["gradient of 0.weight"]
    assert shown.shape == (WIDTH, WIDTH)
    assert shown.dtype == str(dtype).removeprefix("torch.")


def test_a_fault_in_one_element_is_found():
    def change(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[3, 5] *= 1.001
        return value

    verdict = verdict_on(model(), with_gradient(change))
    assert verdict.status is Status.DIFFERENT
    assert SKETCHED in failures(verdict)["gradient of 2.weight"]
    assert set(failures(verdict)) == {"gradient of 2.weight"}


def test_swapped_rows_are_found():
    verdict = verdict_on(model(), with_gradient(lambda value: value.roll(1, 0)))
    assert set(failures(verdict)) == {"gradient of 2.weight"}


def test_a_gradient_that_is_missing_is_found():
    verdict = verdict_on(model(), with_gradient(torch.zeros_like))
    assert set(failures(verdict)) == {"gradient of 2.weight"}


def test_nan_in_other_places_is_found():
    def put_nan(row: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda value: value.index_fill(0, torch.tensor([row]), torch.nan)

    assert verdict_on(with_gradient(put_nan(0)), with_gradient(put_nan(0))).passed
    verdict = verdict_on(with_gradient(put_nan(0)), with_gradient(put_nan(1)))
    assert set(failures(verdict)) == {"gradient of 2.weight"}


def test_another_dtype_of_a_parameter_is_found():
    candidate = copy.deepcopy(model())

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("0", candidate[0])
            self.add_module("2", candidate[2].double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.get_submodule("0")(x))
            last = self.get_submodule("2")
            return nn.functional.linear(y, last.weight.float(), last.bias.float())

    shown = failures(verdict_on(model(), Cast()))
    assert shown["gradient of 2.weight"] == "dtype float64 instead of float32"


def test_no_run_keeps_a_large_gradient(monkeypatch):
    observations = []
    run = Evidence.run

    def watched(self: Evidence[Any], *args: Any) -> Any:
        result = run(self, *args)
        observations.extend([*self.native, *result] if hasattr(self, "native") else result)
        return result

    monkeypatch.setattr(Evidence, "run", watched)
    program = model(torch.bfloat16)
    assert verdict_on(program, Other(program)).passed
    gradients = [value for seen in observations for value in seen.gradients.values()]
    assert len(observations) > 1
    assert gradients
    assert max(value.numel() for value in gradients) == 1024


def test_a_compiled_candidate_is_compiled_as_often_as_without():
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch.compiler.reset()
    program = model()
    candidate = torch.compile(program, backend=backend)
    candidate(*inputs())
    assert len(compiled) == 1
    assert verdict_on(program, candidate).passed
    after_first = len(compiled)
    assert verdict_on(program, candidate).passed
    candidate(*inputs()).sum().backward()
    assert len(compiled) == after_first <= 2


def test_few_gradients_are_compared_as_they_are(monkeypatch):
    monkeypatch.setattr(verifying, "MOST_WHOLE_GRADIENTS", 1 << 30)
    verdict = verdict_on(model(), with_gradient(lambda value: 1.01 * value))
    assert SKETCHED not in failures(verdict)["gradient of 2.weight"]
    assert not any("sketches were compared" in note for note in verdict.notes)


def test_the_estimate_of_the_memory_knows_that_large_gradients_are_sketched(monkeypatch):
    parameters = WIDTH * (WIDTH + 1) * 2
    monkeypatch.setattr(fitting, "free_bytes", lambda _: (4 + 3 * 8) * parameters)
    monkeypatch.setattr(fitting, "MOST_WHOLE_GRADIENTS", 1 << 10)
    assert fitting.describe_shortage(model(), gradients=True)[0]
    assert not fitting.describe_shortage(model(), gradients=True, sketches=True)[0]
    monkeypatch.setattr(fitting, "MOST_WHOLE_GRADIENTS", 1 << 30)
    assert fitting.describe_shortage(model(), gradients=True, sketches=True)[0]
