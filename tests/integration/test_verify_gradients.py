"""Wrong gradients, and what a backward pass does besides: wrong candidates and honest twins."""

from __future__ import annotations

import copy
import os
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from paritas import Status, Verdict, VerifyConfig, verify

if TYPE_CHECKING:
    from collections.abc import Callable


def verdict_on(inputs: Any, reference: Any, candidate: Any, **options: Any) -> Verdict:
    config = VerifyConfig(raise_on_mismatch=False, **options)
    return verify(inputs, reference, candidate, config)


def failing(verdict: Verdict) -> dict[str, str]:
    return {finding.path: finding.aspect.value for finding in verdict.failures}


def paths(verdict: Verdict) -> set[str]:
    return {finding.path for finding in verdict.findings}


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def sample(*, requires_grad: bool = False) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 4, requires_grad=requires_grad)


def sine(
    backward: Callable[..., torch.Tensor], *, once: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """sin() with a backward of one's own, given the upstream gradient and the saved input."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(grads[0], *ctx.saved_tensors)

    if once:
        Sine.backward = staticmethod(once_differentiable(Sine.backward))  # type: ignore[method-assign]
    return Sine.apply


def right(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return grad * x.cos()


# --- outputs that cannot be differentiated --------------------------------------------------------


def under_no_grad(model: nn.Module) -> Callable[..., Any]:
    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    return call


def under_inference_mode(model: nn.Module) -> Callable[..., Any]:
    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return model(x)

    return call


class Runtime:
    """An object of a class that torch does not know."""

    def __init__(self, model: nn.Module) -> None:
        self.weight, self.bias = (p.detach().numpy() for p in model.parameters())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.detach().numpy() @ self.weight.T + self.bias)


@pytest.mark.parametrize(
    "make",
    [under_no_grad, under_inference_mode, lambda model: lambda x: model(x).detach(), Runtime],
    ids=["no_grad", "inference_mode", "detach", "runtime"],
)
def test_a_candidate_that_gives_no_gradients_is_different(make: Any) -> None:
    model = linear()
    verdict = verdict_on([sample()], model, make(model))
    assert verdict.status is Status.DIFFERENT
    assert failing(verdict) == {"output": "requires_grad", "gradients": "requires_grad"}
    words = "for a candidate that is for inference only, verify under torch.no_grad()"
    assert all(finding.advice.startswith(words) for finding in verdict.failures)
    assert verdict_on([sample()], model, make(model), verify_gradients=False).passed
    with torch.no_grad():
        assert verdict_on([sample()], model, make(model)).passed


def test_one_output_of_two_that_is_detached_is_different() -> None:
    model = linear()
    both = lambda x: (model(x), model(x) * 2)  # noqa: E731
    verdict = verdict_on([sample()], both, lambda x: (model(x), model(x).detach() * 2))
    assert failing(verdict)["output[1]"] == "requires_grad"
    assert verdict_on([sample()], both, lambda x: (model(x), model(x) * 2)).passed


def test_an_inference_tensor_is_told_where_nothing_requires_grad() -> None:
    def inference(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return x.sin()

    verdict = verdict_on([sample()], torch.sin, inference)
    assert failing(verdict) == {"output": "requires_grad"}
    assert "inference tensor" in verdict.failures[0].reason
    with torch.inference_mode():
        assert verdict_on([sample()], torch.sin, inference).passed


# --- gradients of inputs that do not require grad -------------------------------------------------


def negated(x: torch.Tensor) -> torch.Tensor:
    return sine(lambda grad, x: -right(grad, x))(x)


@pytest.mark.parametrize(
    ("first", "wrong"),
    [
        (torch.clone, torch.detach),
        (torch.clone, lambda x: x * 0.5 + x.detach() * 0.5),
        (torch.sin, negated),
    ],
    ids=["detached", "halved", "negated"],
)
def test_the_gradient_of_an_input_that_does_not_require_grad_is_compared(
    first: Any, wrong: Any
) -> None:
    model = linear()
    reference, candidate = lambda x: model(first(x)), lambda x: model(wrong(x))
    verdict = verdict_on([sample()], reference, candidate)
    assert list(failing(verdict)) == ["gradient of input[0]"]
    assert "verify_input_gradients=False" in verdict.failures[0].advice
    options = {"verify_double_backward": False, "verify_input_gradients": False}
    assert verdict_on([sample()], reference, candidate, **options).passed


def test_inputs_of_every_kind_are_asked_where_it_can_be() -> None:
    model = linear()

    def call(x: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor, keep: torch.Tensor) -> Any:
        return model(x[ids] * mask + torch.where(keep, x, 0))

    given = [sample(), torch.rand(3, 4), torch.tensor([2, 0, 1]), torch.ones(3, 4).bool()]
    verdict = verdict_on(given, call, copy.copy(call))
    assert verdict.passed, str(verdict)
    assert {"gradient of input[0]", "gradient of input[1]"} <= paths(verdict)
    assert not any("input[2]" in path or "input[3]" in path for path in paths(verdict))


def test_an_input_that_is_written_to_is_still_differentiated() -> None:
    model = linear()
    writes = lambda x: model(x.mul_(2))  # noqa: E731
    verdict = verdict_on([sample()], writes, lambda x: model(x.mul_(2)))
    assert verdict.passed, str(verdict)
    assert {"input[0] after the call", "gradient of input[0]"} <= paths(verdict)
    wrong = lambda x: model(x.copy_(x.detach() * 2))  # noqa: E731
    assert "gradient of input[0]" in failing(verdict_on([sample()], writes, wrong))


def test_a_written_input_that_shares_memory_is_listed() -> None:
    model, whole = linear(), sample()
    writes = lambda x, y: model(x.mul_(2)) + y.sum()  # noqa: E731
    verdict = verdict_on([whole, whole[0]], writes, copy.copy(writes))
    assert verdict.passed, str(verdict)
    assert any("gradient of input[0]" in item for item in verdict.coverage.skipped)


def test_a_non_leaf_input_may_be_written_to() -> None:
    x = sample(requires_grad=True) * 1.0
    verdict = verdict_on([x], lambda x: x.mul_(2).sin(), lambda x: x.mul_(2).sin())
    assert verdict.passed, str(verdict)
    assert "gradient of input[0]" in paths(verdict)
    wrong = verdict_on([x], lambda x: x.mul_(2).sin(), lambda x: x.mul_(2).detach().sin())
    assert wrong.status is Status.DIFFERENT


def test_what_is_written_into_an_input_carries_its_gradient() -> None:
    model = linear()

    def writes(x: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(model(x))

    def drops(x: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(model(x).detach())

    given = [sample(), torch.zeros(3, 4)]
    fine = verdict_on(given, writes, copy.copy(writes))
    assert fine.passed, str(fine)
    assert "gradient of weight" in paths(fine)
    assert verdict_on(given, writes, drops).status is Status.DIFFERENT


def test_a_program_that_looks_at_requires_grad_is_compared_as_it_is_called() -> None:
    model = linear()

    def looks(x: torch.Tensor) -> torch.Tensor:
        return model(x) * (3 if x.requires_grad else 1)

    def also_looks(x: torch.Tensor) -> torch.Tensor:
        return model(x / 3 * 3) * (3 if x.requires_grad else 1)

    verdict = verdict_on([sample()], looks, also_looks)
    assert verdict.passed, str(verdict)
    assert any("gives other outputs" in item for item in verdict.coverage.skipped)
    alone = verdict_on(
        [sample()], model, lambda x: model(x / 3 * 3) * (3 if x.requires_grad else 1)
    )
    assert alone.passed, str(alone)


def test_a_program_that_refuses_inputs_that_require_grad_is_compared_without() -> None:
    model = linear()

    def refuses(x: torch.Tensor) -> torch.Tensor:
        assert not x.requires_grad
        return model(x / 3 * 3)

    verdict = verdict_on([sample()], model, refuses)
    assert verdict.passed, str(verdict)
    assert "gradient of weight" in paths(verdict)
    assert any("raises AssertionError" in item for item in verdict.coverage.skipped)


def test_inputs_are_differentiated_on_demand_where_nothing_requires_grad() -> None:
    model = linear().requires_grad_(requires_grad=False)
    assert verdict_on([sample()], model, lambda x: model(x.detach())).passed
    asked = verdict_on([sample()], model, lambda x: model(x.detach()), verify_gradients=True)
    assert list(failing(asked)) == ["gradient of input[0]"]
    fine = verdict_on([sample()], model, copy.deepcopy(model), verify_gradients=True)
    assert fine.passed, str(fine)
    assert "gradient of input[0]" in paths(fine)


# --- what a backward pass does besides ------------------------------------------------------------


class Leaves(nn.Module):
    """A linear layer whose backward pass has a side effect, selected by a word."""

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.what = nn.Linear(4, 4), what
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.what:
            y.register_hook(lambda grad: self.besides(x, grad))
        return y

    def besides(self, x: torch.Tensor, grad: torch.Tensor) -> None:
        with torch.no_grad():
            if self.what == "input":
                x.data.add_(1.0)  # where autograd does not see it
            elif self.what == "parameter":
                self.inner.bias.add_(1.0)
            elif self.what == "buffer":
                self.seen += grad.sum(0)
            elif self.what == "random":
                torch.rand(3)


@pytest.mark.parametrize(
    ("what", "path"),
    [
        ("input", "input[0] after backward"),
        ("parameter", "state inner.bias after backward"),
        ("buffer", "state seen after backward"),
        ("random", "random state"),
    ],
)
def test_what_the_backward_pass_does_besides_is_compared(what: str, path: str) -> None:
    verdict = verdict_on([sample()], Leaves(""), Leaves(what))
    assert path in failing(verdict), str(verdict)
    assert path in failing(verdict_on([sample()], Leaves(what), Leaves("")))
    both = verdict_on([sample()], Leaves(what), Leaves(what))
    assert both.passed, str(both)
    assert path in paths(both)


def test_a_buffer_that_backward_puts_back_is_compared() -> None:
    class Undone(Leaves):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            self.seen += 1.0
            if self.what:
                y.register_hook(lambda grad: self.seen.sub_(1.0) * 0 + grad)
            return y

    verdict = verdict_on([sample()], Undone(""), Undone("undoes"), verify_second_call=False)
    assert list(failing(verdict)) == ["state seen after backward"]
    assert verdict_on([sample()], Undone("undoes"), Undone("undoes")).passed


# --- who receives gradients -----------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear layer, and a parameter more that starts at nothing."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        inner = linear()
        self.weight, self.bias = inner.weight, inner.bias
        self.extra = nn.Parameter(torch.zeros(4), requires_grad=trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias) + self.extra


def test_a_parameter_that_only_the_candidate_would_train_is_reported() -> None:
    verdict = verdict_on([sample()], linear(), Adapted(trained=True))
    assert failing(verdict) == {"gradient of extra": "structure"}
    frozen = verdict_on([sample()], linear(), Adapted(trained=False))
    assert frozen.passed, str(frozen)
    thawed = verdict_on([sample()], Adapted(trained=False), Adapted(trained=True))
    assert "gradient of extra" in failing(thawed)


def test_a_parameter_that_the_candidate_no_longer_trains_is_different() -> None:
    verdict = verdict_on([sample()], Adapted(trained=True), Adapted(trained=False))
    assert failing(verdict) == {"gradient of extra": "requires_grad"}


@pytest.mark.parametrize("when", ["call", "backward"])
def test_a_grad_that_is_written_by_the_program_itself_is_compared(when: str) -> None:
    class Writes(nn.Module):
        def __init__(self, when: str) -> None:
            super().__init__()
            self.inner, self.when = linear(), when

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            if self.when == "call":
                self.write()
            elif self.when == "backward":
                y.register_hook(lambda _: self.write())
            return y

        def write(self) -> None:
            self.inner.weight.grad = torch.ones(4, 4)

    path = "state inner.weight.grad after " + {"call": "the call"}.get(when, when)
    assert path in failing(verdict_on([sample()], Writes(""), Writes(when)))
    assert path in failing(verdict_on([sample()], Writes(when), Writes("")))
    both = verdict_on([sample()], Writes(when), Writes(when))
    assert both.passed, str(both)


def hooked(kind: str, factor: float) -> nn.Module:
    model = linear()
    if kind == "accumulated":

        def scale(p: torch.Tensor) -> None:
            p.grad *= factor

        model.weight.register_post_accumulate_grad_hook(scale)
    elif kind == "gradient":
        model.weight.register_hook(lambda grad: grad * factor)
    elif kind == "step":

        def step(p: torch.Tensor) -> None:
            with torch.no_grad():
                p.sub_(p.grad * factor)
            p.grad = None

        model.weight.register_post_accumulate_grad_hook(step)
    return model


@pytest.mark.parametrize("kind", ["accumulated", "gradient", "step"])
def test_hooks_on_a_parameter_are_what_a_user_sees(kind: str) -> None:
    wrong = verdict_on([sample()], linear(), hooked(kind, 2.0))
    assert "gradient of weight" in failing(wrong), str(wrong)
    assert not verdict_on([sample()], hooked(kind, 3.0), hooked(kind, 2.0))
    same, twin = hooked(kind, 2.0), hooked(kind, 2.0)
    verdict = verdict_on([sample()], same, lambda x: twin(x / 3 * 3))
    assert verdict.passed, str(verdict)
    assert same.weight.grad is None


def test_the_callers_own_hooks_are_left_alone_where_both_sides_share_them() -> None:
    model, calls = linear(), []
    model.weight.register_post_accumulate_grad_hook(calls.append)
    assert verdict_on([sample()], model, lambda x: model(x / 3 * 3)).passed
    assert not calls


# --- gradients of gradients -----------------------------------------------------------------------


def test_a_wrong_double_backward_is_different() -> None:
    x = sample(requires_grad=True)
    verdict = verdict_on([x], torch.sin, sine(lambda g, x: g * x.detach().cos()))
    assert set(failing(verdict)) == {"second gradient of input[0]"}
    assert "verify_double_backward=False" in verdict.failures[0].advice
    assert verdict_on([x], torch.sin, sine(right)).passed
    off = {"verify_double_backward": False}
    assert verdict_on([x], torch.sin, sine(lambda g, x: g * x.detach().cos()), **off).passed


def test_a_double_backward_that_ignores_the_upstream_gradient_is_different() -> None:
    x = sample(requires_grad=True)
    verdict = verdict_on([x], torch.sin, sine(lambda g, x: g.detach() * x.cos()))
    assert set(failing(verdict)) == {"second gradient of the cotangent of output"}


def test_a_double_backward_that_raises_is_listed_and_fails_if_asked_for() -> None:
    x = sample(requires_grad=True)
    candidate = sine(right, once=True)
    verdict = verdict_on([x], torch.sin, candidate)
    assert verdict.passed, str(verdict)
    assert any("gradients of gradients" in item for item in verdict.coverage.skipped)
    asked = verdict_on([x], torch.sin, candidate, verify_double_backward=True)
    assert failing(asked) == {"gradients of gradients": "exception"}
    unknown = verdict_on([x], candidate, torch.sin, verify_double_backward=True)
    assert unknown.status is Status.UNVERIFIED


def test_a_large_program_is_not_differentiated_twice_unless_asked() -> None:
    x = torch.linspace(-1, 1, 1 << 18, requires_grad=True)
    wrong = sine(lambda g, x: g * x.detach().cos())
    verdict = verdict_on([x], torch.sin, wrong)
    assert verdict.passed
    assert any("has 524288 numbers" in item for item in verdict.coverage.skipped)
    assert not verdict_on([x], torch.sin, wrong, verify_double_backward=True)


def normalized(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        (lambda x: x.softmax(-1), lambda x: (x - x.logsumexp(-1, keepdim=True)).exp()),
        (nn.functional.silu, lambda x: x * x.sigmoid()),
        (lambda x: x * 2, lambda x: x + x),
        (lambda x: x.exp().log() * 2, lambda x: x.exp().log() + x),
        (lambda x: x.relu(), lambda x: x.clamp(min=0)),
        (torch.clone, lambda x: x.exp().log()),
        (lambda x: nn.functional.layer_norm(x, (4,)), normalized),
    ],
    ids=["softmax", "silu", "linear", "inverse", "relu", "nothing", "layer_norm"],
)
def test_honest_rewrites_pass_twice_differentiated(reference: Any, candidate: Any) -> None:
    x = sample(requires_grad=True)
    verdict = verdict_on([x], reference, candidate, verify_double_backward=True)
    assert verdict.passed, str(verdict)
    assert "second gradient of input[0]" in paths(verdict)


def test_a_model_passes_twice_differentiated_in_bfloat16() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).bfloat16()

    def halves(x: torch.Tensor) -> torch.Tensor:
        first, gelu, second = model
        hidden = gelu(first(x))
        left = hidden[:, :16] @ second.weight[:, :16].T
        return left + hidden[:, 16:] @ second.weight[:, 16:].T + second.bias

    verdict = verdict_on([torch.randn(4, 16).bfloat16()], model, halves)
    assert verdict.passed, str(verdict)
    assert {"second gradient of 0.weight", "gradient of input[0]"} <= paths(verdict)


def test_a_backward_that_spoils_what_it_saved_is_found_in_the_second_pass() -> None:
    class Spoils(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.cosine = x.cos()
            return x.sin()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            result = grads[0] * ctx.cosine
            ctx.cosine.data.mul_(2.0)
            return result

    x = sample(requires_grad=True)
    verdict = verdict_on([x], torch.sin, Spoils.apply)
    assert any("second backward pass" in path for path in failing(verdict)), str(verdict)


# --- through torch.compile ------------------------------------------------------------------------


def test_a_compiled_program_gives_input_gradients_in_float64() -> None:
    model = linear()
    compiled = torch.compile(model, backend="aot_eager")
    verdict = verdict_on([sample()], model, compiled)
    assert verdict.passed, str(verdict)
    assert "gradient of input[0]" in paths(verdict)
    assert any("float64 run only" in note for note in verdict.notes)
    assert any("gradients of gradients" in item for item in verdict.coverage.skipped)

    class Detached(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.detach())

    wrong = Detached(4, 4)
    wrong.load_state_dict(model.state_dict())
    verdict = verdict_on([sample()], model, torch.compile(wrong, backend="aot_eager"))
    assert list(failing(verdict)) == ["gradient of input[0]"]
    turned = verdict_on([sample()], compiled, model)
    assert turned.passed, str(turned)
    assert "gradient of input[0]" not in paths(turned)
    assert any("the reference is compiled" in item for item in turned.coverage.skipped)


def test_a_compiled_program_asked_for_double_backward_by_name_fails() -> None:
    x = sample(requires_grad=True)
    compiled = torch.compile(torch.sin, backend="aot_eager")
    verdict = verdict_on([x], torch.sin, compiled, verify_double_backward=True)
    assert failing(verdict) == {"gradients of gradients": "exception"}


class AddsInAnyOrder(torch.autograd.Function):
    """A product of matrices that sums in another order in every call, as atomic additions do."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(left, right)
        cut = 1 + os.urandom(1)[0] % (left.shape[1] - 1)
        return left[:, :cut] @ right[:cut] + left[:, cut:] @ right[cut:]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = ctx.saved_tensors
        return AddsInAnyOrder.apply(gradients[0], right.T), AddsInAnyOrder.apply(left.T, *gradients)


def test_a_gradient_that_cancels_may_be_other_noise_in_every_run_of_the_reference() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            keys = AddsInAnyOrder.apply(x, self.key.weight.T) + self.key.bias
            scores = AddsInAnyOrder.apply(self.query(x), keys.T)
            return AddsInAnyOrder.apply(scores.softmax(-1), x)

    torch.manual_seed(0)
    model = Attention()
    verdict = verdict_on([torch.randn(24, 32)], model, copy.deepcopy(model))
    assert verdict.status is Status.EQUIVALENT
    assert any("does not give the same bits every time" in note for note in verdict.notes)


def rounds_some_values_badly(x: torch.Tensor) -> torch.Tensor:
    """Few values have large errors, others in every call, as with atomic additions on a GPU."""
    drawn = torch.frombuffer(bytearray(os.urandom(2 * x.numel())), dtype=torch.uint8)
    chosen, error = drawn.double().reshape(2, *x.shape)
    error = 3000 * torch.finfo(x.dtype).eps * (chosen < 5) * (error / 128 - 1)
    return (x + 1000) - 1000 + error.to(x.dtype)


def test_a_reference_with_more_noise_than_rounding_explains_is_still_judged() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(32, 32)]
    verdict = verdict_on(inputs, rounds_some_values_badly, lambda x: (x + 1000) - 1000)
    assert verdict.status is Status.EQUIVALENT
    assert any("does not give the same bits every time" in note for note in verdict.notes)
    wrong = verdict_on(inputs, rounds_some_values_badly, lambda x: (x + 1000) - 999.99)
    assert wrong.status is Status.DIFFERENT


def test_a_copy_of_a_reference_with_more_noise_than_rounding_explains_is_equivalent() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(32, 32)]
    verdict = verdict_on(inputs, rounds_some_values_badly, rounds_some_values_badly)
    assert verdict.status is Status.EQUIVALENT, str(verdict)

    def worse(x: torch.Tensor) -> torch.Tensor:
        exact = (x + 1000) - 1000
        return exact + 8 * (rounds_some_values_badly(x) - exact)

    assert verdict_on(inputs, rounds_some_values_badly, worse).status is not Status.EQUIVALENT


def test_a_noisy_reference_that_the_candidate_has_changed_is_unverified(monkeypatch: Any) -> None:
    def candidate(x: torch.Tensor) -> torch.Tensor:
        monkeypatch.setattr(
            sys.modules[__name__], "SHARED_OFFSET", types.MappingProxyType({0: 0.01})
        )
        return (x + 1000) - 1000

    def reference(x: torch.Tensor) -> torch.Tensor:
        return rounds_some_values_badly(x) + sys.modules[__name__].__dict__["SHARED_OFFSET"][0]

    torch.manual_seed(0)
    verdict = verdict_on([torch.randn(32, 32)], reference, candidate)
    assert not verdict.status.passes()


SHARED_OFFSET = types.MappingProxyType({0: 0.0})
