"""A candidate of another runtime: what is asked of it, and what is said where it cannot answer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paritas
from paritas.candidates import ForeignProgram, LiftedProgram
from paritas.core.errors import UsageError
from paritas.core.results.findings import Status

QUIET = paritas.VerifyConfig(raise_on_mismatch=False)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(8, 4)


@pytest.fixture
def x():
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def in_numpy(model, dtype):
    weight, bias = (p.detach().to(dtype).numpy() for p in (model.weight, model.bias))
    return lambda x: torch.from_numpy(x.numpy() @ weight.T + bias)


def test_it_needs_no_gradients_although_the_model_has_them(model, x):
    candidate = ForeignProgram("numpy", in_numpy(model, torch.float32))
    verdict = paritas.verify([x], model, candidate, QUIET)
    assert verdict.passed
    assert "numpy returns values only: gradients and aliases were not compared" in verdict.notes
    assert x.requires_grad is False
    assert torch.is_grad_enabled()


def test_gradients_that_are_asked_for_by_name_are_refused(model, x):
    candidate = ForeignProgram("numpy", in_numpy(model, torch.float32))
    with pytest.raises(UsageError, match="but numpy computes no gradients; drop the option"):
        paritas.verify([x], model, candidate, paritas.VerifyConfig(verify_gradients=True))


def spoiled(call):
    return lambda x: call(x) * (1 + 3e-6)


def test_its_lifted_form_tells_meaning_from_rounding(model, x):
    def lift(used):
        assert used == {torch.float32}
        return LiftedProgram(spoiled(in_numpy(model, torch.float64)))

    candidate = ForeignProgram("numpy", spoiled(in_numpy(model, torch.float32)), lift)
    verdict = paritas.verify([x], model, candidate, QUIET)
    assert verdict.status is Status.DIFFERENT
    assert verdict.failures[0].lifted.max_z > 1e6


def test_what_its_lifted_form_does_in_less_than_float64_is_told(model, x):
    def lift(used):
        return LiftedProgram(in_numpy(model, torch.float64), frozenset({"a table has 9 digits"}))

    shaken = ForeignProgram("numpy", lambda x: model(x) * (1 + 1e-7), lift)
    verdict = paritas.verify([x], model, shaken, QUIET)
    assert verdict.passed
    assert "the lifted run is judged at float32 noise: a table has 9 digits" in verdict.notes


def test_without_a_lifted_form_the_native_run_decides_and_says_so(model, x):
    def lift(used):
        raise RuntimeError("no float64 here")

    for given, note in [
        (None, "only the native run was made: numpy has no float64 form"),
        (lift, "numpy cannot run in float64: RuntimeError: no float64 here"),
    ]:
        candidate = ForeignProgram("numpy", lambda x: model(x) * (1 + 1e-7), given)
        verdict = paritas.verify([x], model, candidate, QUIET)
        assert verdict.passed
        assert any(note in told for told in verdict.notes)


def test_a_lifted_run_that_failed_is_not_said_to_be_judged_as_well(model, x):
    def fails(x):
        raise ValueError("cannot reshape")

    def lift(used):
        return LiftedProgram(fails, frozenset({"a table has 9 digits"}))

    candidate = ForeignProgram("numpy", lambda x: model(x) * (1 + 1e-7), lift)
    verdict = paritas.verify([x], model, candidate, QUIET)
    assert verdict.passed
    assert list(verdict.notes) == [
        "numpy returns values only: gradients and aliases were not compared",
        "only the native run was made: the candidate in float64 raised ValueError: cannot reshape",
    ]
