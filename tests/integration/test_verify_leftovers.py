"""What a call leaves behind: attributes, flags, modes, hooks, a graph that is spoilt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from paritas import Status, VerifyConfig, verify
from paritas.core.execution.leftovers import undoing_leftovers
from paritas.core.precision.lifting import DtypeLog

QUIET = VerifyConfig(raise_on_mismatch=False)
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
HOOKS = nn.modules.module


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def verdict_on(reference: Any, candidate: Any, *inputs: Any) -> Any:
    return verify([X, *inputs] if inputs else [X], reference, candidate, QUIET)


def reasons(verdict: Any) -> dict[str, str]:
    return {finding.path: finding.reason for finding in verdict.failures}


# --- Attributes of tensors ------------------------------------------------------------------------


def tagging(net: nn.Linear, **given: Any) -> Any:
    def call(x: torch.Tensor) -> torch.Tensor:
        out = net(x)
        for name, value in given.items():
            setattr(out, name, value(x) if callable(value) else value)
        return out

    return call


def test_an_attribute_of_an_output_tensor_is_compared() -> None:
    net = model()
    extra = reasons(verdict_on(net, tagging(net, scale=3)))
    assert extra == {"output.scale": "the reference leaves nothing there, the candidate 3"}
    lost = reasons(verdict_on(tagging(net, scale=3), net))
    assert lost == {"output.scale": "the reference leaves 3 there, the candidate nothing"}
    assert "output.scale" in reasons(verdict_on(tagging(net, scale=3), tagging(net, scale=4)))
    assert verdict_on(tagging(net, scale=3), tagging(net, scale=3)).status is Status.IDENTICAL


def test_a_tensor_in_an_attribute_is_judged_by_its_noise() -> None:
    net = model()
    reference = tagging(net, state={"total": 0}, mean=lambda x: x.mean(0))
    honest = tagging(net, state={"total": 0}, mean=lambda x: x.sum(0) / 2)
    wrong = tagging(net, state={"total": 1}, mean=lambda x: x.sum(0) / 3)
    assert verdict_on(reference, honest).passed
    assert set(reasons(verdict_on(reference, wrong))) == {
        "output.state['total']",
        "output.mean",
    }


def test_a_compiled_program_keeps_the_attributes_that_it_sets() -> None:
    reference = tagging(model(), scale=3, total=torch.sum)
    torch.compiler.reset()
    assert verdict_on(reference, torch.compile(reference, backend="aot_eager")).passed


def test_attributes_of_inputs_reach_both_sides_and_are_compared_afterwards() -> None:
    x = X.clone()
    x.scale = torch.full((4,), 1.5)  # type: ignore[attr-defined]
    x.calls = [0]  # type: ignore[attr-defined]

    def reference(x: Any) -> torch.Tensor:
        return torch.tanh(x * x.scale)

    def writes(x: Any) -> torch.Tensor:
        x.calls.append(1)
        x.scale.mul_(2)
        return torch.tanh(x * x.scale / 2)

    assert verify([x], reference, lambda x: (x.scale * x).tanh(), QUIET).passed
    assert set(reasons(verify([x], reference, writes, QUIET))) >= {
        "input[0].calls[1] after the call",
        "input[0].scale after the call",
    }
    assert vars(x)["calls"] == [0]


def test_attributes_and_hooks_that_a_call_puts_on_a_shared_parameter_are_removed() -> None:
    net = model()

    def candidate(x: torch.Tensor) -> torch.Tensor:
        net.weight.packed = net.weight.detach() * 2  # type: ignore[attr-defined]
        net.bias.register_hook(lambda gradient: gradient)
        return net(x)

    found = reasons(verdict_on(net, candidate))
    assert found["state weight.packed after the call"] == (
        "the reference leaves nothing there, the candidate a tensor of shape [4, 4]"
    )
    assert found["state bias._backward_hooks after the call"] == (
        "the reference leaves nothing there, the candidate 1"
    )
    assert vars(net.weight) == {}
    assert not net.bias._backward_hooks


def test_attributes_of_parameters_take_part_in_float64() -> None:
    net = model()
    net.weight.scale = torch.full((4,), 1 / 3)  # type: ignore[attr-defined]

    def reference(x: torch.Tensor) -> Any:
        return (net(x) * net.weight.scale).exp()

    verdict = verdict_on(reference, lambda x: (net.weight.scale * net(x) + 1).exp() / torch.e)
    assert verdict.status is Status.EQUIVALENT
    assert not verdict.notes


# --- requires_grad --------------------------------------------------------------------------------


def test_requires_grad_that_a_call_sets_on_an_input_is_compared() -> None:
    net = model()

    def sets(x: torch.Tensor) -> torch.Tensor:
        out = net(x)
        x.requires_grad_()
        return out

    found = reasons(verdict_on(net, sets))
    assert found == {"input[0] after the call": "requires_grad is True instead of False"}
    assert verdict_on(sets, sets).passed
    assert not X.requires_grad
    quiet = VerifyConfig(raise_on_mismatch=False, verify_requires_grad=False)
    assert verify([X], net, sets, quiet).passed


def test_requires_grad_that_a_call_sets_on_a_parameter_is_compared() -> None:
    net = model()

    def freezes(x: torch.Tensor) -> torch.Tensor:
        net.bias.requires_grad_(False)
        return net(x)

    with torch.no_grad():
        found = reasons(verdict_on(net, freezes))
    assert found["state bias after the call"] == "requires_grad is False instead of True"
    assert net.bias.requires_grad


# --- Modes and hooks ------------------------------------------------------------------------------


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def saves_as_it_is() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


LEFT: dict[str, tuple[str, Any]] = {
    "function mode Functions": ("left on", lambda: Functions().__enter__()),
    "dispatch mode DtypeLog": ("left on", lambda: DtypeLog().__enter__()),
    "hooks of all modules: _global_forward_hooks": (
        "left with 1 hook",
        lambda: HOOKS.register_module_forward_hook(lambda *_: None),
    ),
    "hooks of all modules: _global_backward_hooks": (
        "left with 1 hook",
        lambda: HOOKS.register_module_full_backward_hook(lambda *_: None),
    ),
    "hooks of all optimizers: _global_optimizer_pre_hooks": (
        "left with 1 hook",
        lambda: register_optimizer_step_pre_hook(lambda *_: None),
    ),
    "torch.autograd.graph.saved_tensors_hooks": ("left on", lambda: saves_as_it_is().__enter__()),
    "torch.set_flush_denormal": ("set to True", lambda: torch.set_flush_denormal(True)),
    "torch.is_inference_mode_enabled()": (
        "set to True",
        lambda: KEPT.append(torch.inference_mode()) or KEPT[-1].__enter__(),
    ),
    "torch.nn.modules.linear.Linear.forward": (
        "replaced",
        lambda: setattr(nn.Linear, "forward", lambda m, x: nn.functional.linear(x, m.weight)),
    ),
}
KEPT: list[Any] = []


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_on_for_all_later_code_is_told_and_ended(name: str) -> None:
    how, leave = LEFT[name]
    net = model()

    def candidate(x: torch.Tensor) -> torch.Tensor:
        out = net(x)
        leave()
        return out

    forward = nn.Linear.forward
    with torch.no_grad():
        verdict = verify([X], net, candidate, QUIET)
    assert reasons(verdict)[name] == f"{how} by the candidate, unchanged by the reference"
    left: dict[str, str] = {}
    with undoing_leftovers(left):
        pass
    assert left == {}
    assert torch.overrides._get_current_function_mode() is None
    assert nn.Linear.forward is forward
    assert not torch.is_inference_mode_enabled()
    assert not HOOKS._global_forward_hooks
    assert HOOKS._global_is_full_backward_hook is None


def test_modes_of_the_caller_that_a_candidate_ends_are_told_and_begun_again() -> None:
    net = model()

    def candidate(x: torch.Tensor) -> torch.Tensor:
        mode.__exit__(None, None, None)
        return net(x)

    with torch.no_grad(), saves_as_it_is(), Functions() as mode:
        found = reasons(verify([X], net, candidate, QUIET))
        assert torch.overrides._get_current_function_mode() is mode
    assert found["function mode Functions"] == "ended by the candidate, unchanged by the reference"


def test_modes_that_a_program_ends_itself_are_no_difference() -> None:
    net = model()

    def candidate(x: torch.Tensor) -> torch.Tensor:
        with Functions(), DtypeLog(), saves_as_it_is():
            handle = HOOKS.register_module_forward_hook(lambda *_: None)
            out = net(x)
            handle.remove()
        return out

    assert verdict_on(net, candidate).passed


# --- A second backward pass over one graph --------------------------------------------------------


class Sine(torch.autograd.Function):
    spoils, frees = False, False

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.slope, ctx.cls = x.cos(), cls
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        slope = ctx.slope
        if ctx.cls.frees:
            del ctx.slope
        return slope.mul_(gradient) if ctx.cls.spoils else slope * gradient


class SpoiltSine(Sine):
    spoils = True


class FreedSine(Sine):
    frees = True


def through(function: Any) -> Any:
    net = model()
    return lambda x: function(net(x))


def test_a_backward_that_spoils_what_it_saved_is_different() -> None:
    verdict = verdict_on(through(torch.sin), through(SpoiltSine.apply))
    (first, *_) = verdict.failures
    assert first.path == "gradient of weight (second backward pass over one graph)"
    assert first.advice.startswith("do not overwrite in backward what forward has saved")
    assert {f.path.endswith("(second backward pass over one graph)") for f in verdict.failures} == {
        True
    }
    quiet = VerifyConfig(raise_on_mismatch=False, verify_double_backward=False)
    assert verify([X], through(torch.sin), through(SpoiltSine.apply), quiet).passed


def test_a_large_program_is_asked_for_a_second_backward_pass_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paritas.verification.further_gradients.MOST_NUMBERS", 0)
    assert not verdict_on(through(torch.sin), through(SpoiltSine.apply)).passed
    monkeypatch.setattr("paritas.verification.further_gradients.MOST_REPEATED", 0)
    verdict = verdict_on(through(torch.sin), through(SpoiltSine.apply))
    assert verdict.passed
    assert (
        "a second backward pass over one graph: the gradients take more than 0 B"
        in verdict.coverage.skipped
    )


def test_an_honest_backward_may_be_repeated_or_raise() -> None:
    assert verdict_on(through(torch.sin), through(Sine.apply)).passed
    freed = verdict_on(through(torch.sin), through(FreedSine.apply))
    assert freed.passed
    assert any(
        skipped.startswith("a second backward pass over one graph: the candidate raises Attribute")
        for skipped in freed.coverage.skipped
    )
    assert verdict_on(through(SpoiltSine.apply), through(SpoiltSine.apply)).passed


def test_compiled_code_is_not_asked_for_a_second_backward_pass() -> None:
    torch.compiler.reset()
    net = model()
    compiled = torch.compile(net, backend="aot_eager")
    verdict = verify([X], lambda x: net(x).sin(), lambda x: Sine.apply(compiled(x)), QUIET)
    assert verdict.passed
    assert not any("second backward pass" in skipped for skipped in verdict.coverage.skipped)
