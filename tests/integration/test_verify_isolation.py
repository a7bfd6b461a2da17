"""What the caller passed in is left as it was, and bad input is a clear error."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paritas import Inputs, UsageError, VerifyConfig, verify
from spying import Spy

QUIET = VerifyConfig(raise_on_mismatch=False)


class Careless(nn.Module):
    """Changes everything it can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.history, self.cache = 0, [], {}

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.cache[self.calls] = x
        self.last = x
        self.seen += 1
        random.random()
        np.random.rand()  # noqa: NPY002
        scale.mul_(2)
        return nn.functional.dropout(self.linear(x), 0.5) * scale


def test_nothing_of_the_callers_is_changed() -> None:
    torch.manual_seed(0)
    model = Careless()
    model.linear.weight.grad = torch.ones(4, 4)
    x, scale = torch.randn(2, 4), torch.ones(4)
    weight = model.linear.weight.detach().clone()
    version = model.linear.weight._version
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    verdict = verify([x, scale], model, model, QUIET)
    assert verdict.passed, str(verdict)
    assert torch.equal(scale, torch.ones(4))
    assert torch.equal(model.linear.weight, weight)
    assert model.linear.weight._version == version
    assert torch.equal(model.linear.weight.grad, torch.ones(4, 4))
    assert model.seen == 0
    assert (model.calls, model.history, model.cache) == (0, [], {})
    assert not hasattr(model, "last")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002


def test_a_graph_the_caller_holds_can_still_be_differentiated() -> None:
    model = Careless()
    out = model(torch.randn(2, 4), torch.ones(4)).sum()
    verify([torch.randn(2, 4), torch.ones(4)], model, model, QUIET)
    out.backward()
    assert model.linear.weight.grad is not None


def test_both_sides_get_the_same_bits_in_storage_of_their_own() -> None:
    spy = Spy()

    def note(side: str) -> Any:
        def call(x: torch.Tensor, y: torch.Tensor, *, z: torch.Tensor) -> torch.Tensor:
            spy.note((side, (x, y, z)))
            return x + y.sum() + z.sum()

        return call

    base = torch.randn(6)
    x, y = base[::2], base[1:4]
    verify(Inputs((x, y), {"z": base}), note("reference"), note("candidate"), QUIET)
    seen = spy.notes()
    given = {side: next(tensors for who, tensors in seen if who == side) for side, _ in seen}
    ours = {tensor.untyped_storage().data_ptr() for tensor in given["reference"]}
    theirs = {tensor.untyped_storage().data_ptr() for tensor in given["candidate"]}
    assert len(ours) == len(theirs) == 1  # views of one storage stay views of one storage
    assert not ours & theirs
    assert base.untyped_storage().data_ptr() not in ours | theirs
    for side in given.values():
        assert [t.stride() for t in side] == [x.stride(), y.stride(), base.stride()]
        assert torch.equal(side[2], base)


def test_training_mode_is_respected_and_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    assert verify([torch.randn(2, 4)], model.train(), model, QUIET)
    assert model.training
    assert verify([torch.randn(2, 4)], model.eval(), model, QUIET)
    assert not model.training


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_grad_modes_are_respected(mode: Any) -> None:
    model = nn.Linear(4, 4)
    with mode():
        verdict = verify([torch.randn(2, 4)], model, model, QUIET)
    assert verdict.passed
    assert not [f for f in verdict.findings if f.path.startswith("gradient")]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: verify([], torch.sin, torch.sin), "inputs is empty"),
        (lambda: verify(torch.ones(3), torch.sin, torch.sin), "pass [x]"),
        (lambda: verify([torch.ones(3)], 7, torch.sin), "framework_model is not callable: 7"),
        (lambda: verify([torch.ones(3)], torch.sin, None), "compiled_model is not callable: None"),
        (lambda: verify([torch.ones(3)], nn.ReLU, torch.sin), "a class; pass an instance"),
        (lambda: verify([torch.ones(3)], torch.sin, torch.sin, {"a": 1}), "VerifyConfig"),
        (lambda: VerifyConfig(verify_shape="no"), "verify_shape must be True or False, not 'no'"),
        (lambda: VerifyConfig.from_options(verify_shap=False), "did you mean 'verify_shape'?"),
        (lambda: VerifyConfig(value_checker=0.99), "value_checker must be a checker"),
    ],
)
def test_bad_input_is_a_clear_error(call: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert said in str(caught.value)
