"""The examples of the documents about verify() and about Inductor's tests, run as written.

The import line aside: `forge` stands for whatever compiler the user has; here it is torch.compile
behind the same call. Sizes and devices are smaller.
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
    UsageError,
    VerifyConfig,
    verify,
)
from quality.guard_programs_special import group_of_one
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


def test_what_users_of_tt_forge_catch_is_raised(example: Any) -> None:
    inputs, framework_model, _ = example
    with pytest.raises(ValueError, match="different"):
        verify(inputs, framework_model, Scaled())


def test_a_configuration_is_made_first_and_set_afterwards(example: Any) -> None:
    inputs, framework_model, _ = example
    config = VerifyConfig()
    config.verify_dtype = False
    config.value_checker = AllCloseValueChecker()
    config.value_checker.rtol = 0.02
    assert verify(inputs, framework_model, Scaled(dtype=torch.float64), config)
    config.value_checker.rtol = -1
    with pytest.raises(UsageError, match="rtol must be a number from 0 to inf, got -1"):
        verify(inputs, framework_model, Scaled(), config)


@pytest.mark.parametrize(("checker", "passes"), [({"atol": 2}, True), ({"atol": 1}, False)])
def test_integers_obey_allclose(checker: dict[str, float], *, passes: bool) -> None:
    config = VerifyConfig(value_checker=AllCloseValueChecker(**checker), raise_on_mismatch=False)
    verdict = verify([torch.arange(4)], lambda x: x + 1, lambda x: x + 3, config)
    assert verdict.passed is passes


# --- training in a function of its own, as Inductor's tests of layouts do -------------------------


class Model2Conv(nn.Module):
    def __init__(self, dim: int = 4, manual_graph_break: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, dim, kernel_size=3, stride=2, bias=False)
        self.conv2 = nn.Conv2d(dim, dim, kernel_size=3, stride=2, bias=False)
        self.manual_graph_break = manual_graph_break

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1(x)
        if self.manual_graph_break:
            torch.compiler.disable(lambda: None)()
        return self.conv2(x)

    def get_example_inputs(self) -> tuple[torch.Tensor]:
        return (torch.rand(2, 3, 16, 16),)


def wrap_mod(m: nn.Module, factor: float = 1.0) -> Any:
    def f(*inp: torch.Tensor) -> list[torch.Tensor]:
        x = m(*inp)
        (x.sum() * factor).backward()
        grads = []
        for _name, param in m.named_parameters():
            grad = param.grad
            if param.grad is None:
                grad = torch.zeros_like(param)
            grads.append(grad)
        return grads

    return f


def grads_of(mod: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in mod.parameters()]


def assert_put_back(mod: nn.Module, before: list[Any]) -> None:
    for grad, now in zip(before, grads_of(mod), strict=True):
        assert now is None if grad is None else torch.equal(grad, now)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_training_through_wrap_mod_is_the_same_compiled_and_leaves_grad_alone() -> None:
    mod = Model2Conv(manual_graph_break=True)
    inp = list(mod.get_example_inputs())
    expected_out = wrap_mod(mod)(*inp)
    before = grads_of(mod)
    opt_mod = torch.compile(wrap_mod(mod), backend="aot_eager")
    verdict = verify(inp, wrap_mod(mod), opt_mod)
    assert verdict.passed
    assert any("second call" in finding.path for finding in verdict.findings)
    assert_put_back(mod, before)
    assert all(map(torch.equal, expected_out, before))


def test_training_through_wrap_mod_with_other_gradients_is_different() -> None:
    mod = Model2Conv()
    inp = list(mod.get_example_inputs())
    with pytest.raises(MismatchError, match="different"):
        verify(inp, wrap_mod(mod), wrap_mod(mod, factor=1.001))
    assert_put_back(mod, [None, None])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_training_through_wrap_mod_under_ddp() -> None:
    mod = Model2Conv()
    inp = list(mod.get_example_inputs())
    with group_of_one():
        ddp_wrapped_mod = nn.parallel.DistributedDataParallel(mod)
        opt_mod = torch.compile(wrap_mod(ddp_wrapped_mod), backend="aot_eager")
        assert verify(inp, wrap_mod(mod), opt_mod)
    assert_put_back(mod, [None, None])
