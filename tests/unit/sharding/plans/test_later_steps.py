"""Faults that begin after the first steps."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from paritas.core.execution.observation import MOST_KEPT
from paritas.core.results.findings import Status
from paritas.sharding.plans.verify import verify_parallel

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
ALL = "6 steps were compared: the first 2 in full, 4 more in float64"


class Small(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Small()


class From:
    """Averages gradients by hand; from one step on, each rank changes them."""

    def __init__(self, step, change) -> None:
        self.step, self.change = step, change

    def __call__(self, model, mesh):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._average(mesh))

    def _average(self, mesh):
        calls = []

        def average(parameter):
            calls.append(1)
            if len(calls) >= self.step:
                self.change(parameter, mesh)
            else:
                _average(parameter, mesh)

        return average


def _average(parameter, mesh):
    distributed.all_reduce(parameter.grad)
    parameter.grad /= mesh.size()


def add_up(parameter, mesh):
    distributed.all_reduce(parameter.grad)


def keep_own(parameter, mesh):
    pass


def fail(parameter, mesh):
    raise RuntimeError("no memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_six_steps_are_compared_by_default(model, dtype):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    verdict = verify_parallel(model.to(dtype), plan, [BATCH.to(dtype)])
    assert verdict.passed, str(verdict)
    assert verdict.notes == (ALL,)
    assert not any(finding.item.step > 2 for finding in verdict.findings)


@pytest.mark.parametrize(
    ("step", "change", "first"),
    [
        (3, add_up, "step 3: gradient down.weight"),
        (6, add_up, "step 6: gradient down.weight"),
        (4, keep_own, "step 4: gradient down.weight"),
    ],
)
def test_a_fault_that_begins_later_is_found_in_its_step(model, step, change, first):
    verdict = verify_parallel(model, From(step, change), [BATCH], split="ranks")
    assert verdict.status is Status.DIFFERENT
    failures = [one.path for one in verdict.failures if one.status is Status.DIFFERENT]
    assert first in failures
    assert all(path.startswith(f"step {step}: ") for path in failures)
    assert verdict.notes[-1] == "6 steps were compared in full"


def test_a_rank_that_fails_in_a_later_step_is_told(model):
    verdict = verify_parallel(model, From(3, fail), [BATCH], split="ranks")
    assert verdict.status is Status.DIFFERENT
    assert "failed: RuntimeError: no memory" in verdict.failures[0].reason


def test_large_parameters_are_compared_by_their_sketches():
    torch.manual_seed(0)
    model = Small(MOST_KEPT // 8 + 1)
    assert model.up.weight.numel() > MOST_KEPT
    right = verify_parallel(model, From(7, add_up), [BATCH], split="ranks")
    assert right.notes == (ALL,)
    wrong = verify_parallel(model, From(5, add_up), [BATCH], split="ranks")
    assert wrong.failures[0].path.startswith("step 5: ")


def test_a_number_of_steps_is_what_is_compared(model):
    verdict = verify_parallel(model, From(3, add_up), [BATCH], split="ranks", steps=2)
    assert verdict.passed
    assert verdict.notes == ()


def fail_alone(parameter, mesh):
    """Rank 0 fails, before rank 1 has ended the step before."""
    if mesh.get_local_rank() == 0:
        raise RuntimeError("no memory")


class Lagging(From):
    """Rank 1 is lost after the last collective of step 2, in float64."""

    def __call__(self, model, mesh):
        super().__call__(model, mesh)
        left = [2 * len(list(model.parameters()))]

        def lag(parameter):
            left[0] -= 1
            if left[0] == 0 and mesh.get_local_rank() == 1 and parameter.dtype == torch.float64:
                raise RuntimeError("connection closed by peer")

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lag)


def test_a_rank_that_fails_in_a_later_step_is_told_though_another_lags_behind(model):
    verdict = verify_parallel(model, Lagging(3, fail_alone), [BATCH], split="ranks")
    assert verdict.status is Status.DIFFERENT
    assert "failed: RuntimeError: no memory" in verdict.failures[0].reason
