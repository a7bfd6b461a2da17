"""How much is run for a verdict: no more than what is undecided asks for."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import nn

import paritas
from paritas.core.execution.evidence import Evidence
from paritas.core.execution.subjects import inspect_subject
from paritas.core.results.findings import Status
from paritas.core.results.items import gradient

QUIET = paritas.VerifyConfig(raise_on_mismatch=False)
ROWS, WIDTH = 600, 24


class SlowSum(torch.autograd.Function):
    """x + bias: the gradient of the bias is summed row by row."""

    @staticmethod
    def forward(ctx, x, bias):
        return x + bias

    @staticmethod
    def backward(ctx, gradient):
        total = torch.zeros_like(gradient[0])
        for row in gradient:
            total = total + row
        return gradient, total


class Coarse(torch.autograd.Function):
    """x + bias: the gradient of the bias sums values that were rounded to bfloat16."""

    @staticmethod
    def forward(ctx, x, bias):
        return x + bias

    @staticmethod
    def backward(ctx, gradient):
        wide = gradient.dtype is torch.float64
        told = gradient if wide else gradient.bfloat16().to(gradient.dtype)
        return gradient, told.sum(dim=0)


class Affine(nn.Module):
    def __init__(self, add):
        super().__init__()
        self.add = add
        self.weight = nn.Parameter(torch.eye(WIDTH) + 0.1)
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.add(torch.tanh(x @ self.weight), self.bias)


@pytest.fixture
def perturbed(monkeypatch):
    """The gradients that each perturbed run makes."""
    made = []
    real = Evidence.run_perturbed

    def noted(self, *args, **kwargs):
        seen = real(self, *args, **kwargs)
        made.append([list(one.gradients) for one in seen])
        return seen

    monkeypatch.setattr(Evidence, "run_perturbed", noted)
    return made


def inputs():
    return [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))]


def by_path(verdict):
    return {finding.path: finding for finding in verdict.findings}


def test_a_bias_gradient_added_up_otherwise_needs_no_perturbed_run(perturbed):
    verdict = paritas.verify(inputs(), Affine(torch.add), Affine(SlowSum.apply), QUIET)
    found = by_path(verdict)["gradient of bias"]
    assert found.status is Status.EQUIVALENT
    assert found.native.noise == "the rounding of its last sum alone"
    assert perturbed == []


def test_a_bias_gradient_that_is_less_accurate_is_still_degraded(perturbed):
    verdict = paritas.verify(inputs(), Affine(torch.add), Affine(Coarse.apply), QUIET)
    statuses = {path: finding.status for path, finding in by_path(verdict).items()}
    assert statuses["gradient of bias"] is Status.DEGRADED
    assert statuses["gradient of weight"].passes()
    # Only what was undecided is made again.
    assert perturbed
    assert all(run == [[gradient("bias")]] for run in perturbed)


class Stack(nn.Module):
    def __init__(self, *adds):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Affine(add)) for add in adds)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_by_blocks_only_a_block_that_is_undecided_is_run_with_noise(monkeypatch):
    perturbed = []
    real = Evidence.run_perturbed

    def noted(self, *args, **kwargs):
        perturbed.append(self.program.subject.call)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Evidence, "run_perturbed", noted)
    reference = Stack(torch.add, torch.add, torch.add)
    candidate = Stack(SlowSum.apply, Coarse.apply, SlowSum.apply)
    verdict = paritas.verify(inputs(), reference, candidate, QUIET, by="blocks")
    degraded = [f.path for f in verdict.failures if f.status is Status.DEGRADED]
    assert degraded == ["layers.1: gradient of 0.bias"]
    assert perturbed
    assert all(block is reference.layers[1] for block in perturbed)


def test_findings_keep_their_order_when_some_have_to_wait():
    # Where gradients differ, those of gradients are not compared.
    config = dataclasses.replace(QUIET, verify_double_backward=False)

    def paths(reference, candidate):
        return [f.path for f in paritas.verify(inputs(), reference, candidate, config).findings]

    class Rough(Affine):
        def forward(self, x):
            return super().forward(x) * (1 + 3e-6)

    plain = paths(Affine(torch.add), Affine(torch.add))
    assert paths(Affine(torch.add), Rough(torch.add)) == plain
    assert plain.index("output") < plain.index("gradient of bias")


def test_a_model_and_what_is_made_of_it_share_one_copy_of_the_state():
    model = Affine(torch.add)
    reference = inspect_subject(model, "reference", "framework_model")
    same = inspect_subject(functools.partial(model), "candidate", "compiled_model", reference.state)
    other = inspect_subject(Affine(torch.add), "candidate", "compiled_model", reference.state)
    again = inspect_subject(model, "candidate", "compiled_model", reference.state)
    assert again.state is reference.state
    assert all(same.state.saved[name] is saved for name, saved in reference.state.saved.items())
    assert not any(
        other.state.saved[name] is saved for name, saved in reference.state.saved.items()
    )


def test_a_candidate_that_changes_its_mind_is_judged_by_measured_noise():
    calls = []

    def fickle(x):
        calls.append(None)
        wide = x.dtype is torch.float64
        return x.exp().sum(dim=-1) if len(calls) != 2 or wide else x.exp().flip(-1).sum(dim=-1)

    verdict = paritas.verify(inputs(), lambda x: x.exp().sum(dim=-1), fickle, QUIET)
    assert verdict.passed
    second = [f for f in verdict.findings if f.path == "output (second call)"]
    assert [f.status for f in second] == [Status.EQUIVALENT]
    assert "without a program to measure" not in second[0].native.noise
