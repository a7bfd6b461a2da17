"""Faults a compiler can make, each planted by a backend or a callable of our own."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from paritas import Inputs, MismatchError, Status, Verdict, VerifyConfig, verify

if TYPE_CHECKING:
    from collections.abc import Callable


def verdict_on(inputs: Any, reference: Any, candidate: Any, **options: Any) -> Verdict:
    config = VerifyConfig(raise_on_mismatch=False, **options)
    return verify(inputs, reference, candidate, config)


def swaps_mul_for_add(graph: Any, example_inputs: Any) -> Callable[..., Any]:
    del example_inputs
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is operator.mul:
            node.target = operator.add
    graph.recompile()
    return graph.forward


def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sin() + x


PAIR = [torch.linspace(-2, 2, 50), torch.linspace(1, 3, 50)]


def test_wrong_transform_of_the_graph() -> None:
    with pytest.raises(MismatchError) as caught:
        verify(PAIR, program, torch.compile(program, backend=swaps_mul_for_add))
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.verdict.status is Status.DIFFERENT
    assert "output: different (value)" in str(caught.value)


def test_wrong_gradient_only() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            (x,) = ctx.saved_tensors
            return grads[0] * x.cos() * 1.001

    x = torch.linspace(-2, 2, 50, requires_grad=True)
    verdict = verdict_on([x], torch.sin, Wrong.apply)
    assert [f.path for f in verdict.failures] == ["gradient of input[0]"]


def test_right_at_first_and_wrong_from_the_second_call_on() -> None:
    calls = []

    def candidate(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * 2 if len(calls) == 1 else x * 2.01

    verdict = verdict_on([torch.ones(5)], lambda x: x * 2, candidate)
    assert verdict.status is Status.DIFFERENT
    assert all("(second call)" in finding.path for finding in verdict.failures)


def test_state_that_is_not_carried_on() -> None:
    class Running(nn.Module):
        def __init__(self, *, broken: bool) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))
            self.broken = broken

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.broken:
                self.total = x.sum(0)  # forgets what was there
            else:
                self.total += x.sum(0)
            return x + self.total

    verdict = verdict_on([torch.ones(2, 3)], Running(broken=False), Running(broken=True))
    assert verdict.status is Status.DIFFERENT
    assert any("second call" in finding.path for finding in verdict.failures)


def test_dropped_mutation_of_an_input() -> None:
    verdict = verdict_on([torch.ones(5)], lambda x: x.add_(1) * 2, lambda x: (x + 1) * 2)
    assert "input[0] after the call" in {finding.path for finding in verdict.failures}


def test_writing_to_an_input_that_should_be_left_alone() -> None:
    verdict = verdict_on([torch.ones(5)], lambda x: x + 1, lambda x: x.add_(1).clone())
    assert "input[0] after the call" in {finding.path for finding in verdict.failures}


def test_an_output_that_became_an_alias_and_one_that_is_none_any_more() -> None:
    became = verdict_on([torch.ones(5)], lambda x: x.clone(), lambda x: x)
    ceased = verdict_on([torch.ones(5)], lambda x: x.view(-1), lambda x: x.clone())
    for verdict in (became, ceased):
        assert [finding.aspect.value for finding in verdict.failures] == ["alias"]
    assert verdict_on([torch.ones(5)], torch.clone, lambda x: x, verify_aliasing=False)


@pytest.mark.parametrize(
    ("candidate", "aspect"),
    [
        (lambda x: (x * 2).double(), "dtype"),
        (lambda x: (x * 2)[None], "shape"),
        (lambda x: (x * 2, x), "structure"),
        (lambda x: (x * 2).detach(), "requires_grad"),
    ],
    ids=["dtype", "shape", "structure", "requires_grad"],
)
def test_metadata(candidate: Any, aspect: str) -> None:
    x = torch.ones(5, requires_grad=True)
    verdict = verdict_on([x], lambda x: x * 2, candidate)
    assert aspect in {finding.aspect.value for finding in verdict.failures}


def test_gradients_that_a_module_no_longer_gives_are_never_passed_over() -> None:
    class Detached(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).detach()

    reference, candidate = nn.Linear(4, 4), Detached(4, 4)
    candidate.load_state_dict(reference.state_dict())
    verdict = verdict_on([torch.ones(2, 4)], reference, candidate, verify_requires_grad=False)
    assert [finding.path for finding in verdict.failures] == ["gradients"]
    assert verdict.status is Status.DIFFERENT


def test_strides_are_a_note_unless_asked() -> None:
    x = torch.randn(4, 5)
    candidate = lambda x: (x * 2).t().contiguous().t()  # noqa: E731
    noted = verdict_on([x], lambda x: x * 2, candidate)
    assert noted.passed
    assert any("strides" in note for note in noted.notes)
    assert not verdict_on([x], lambda x: x * 2, candidate, verify_strides=True)


def test_constants_baked_in_at_compile_time_need_a_second_input_set() -> None:
    def bakes(x: torch.Tensor) -> torch.Tensor:
        return x - 3.0  # the mean of the sample it was compiled for

    first, second = torch.tensor([2.0, 4.0]), torch.tensor([5.0, 9.0])
    reference = lambda x: x - x.mean()  # noqa: E731
    assert verdict_on([first], reference, bakes)
    verdict = verdict_on([Inputs((first,)), Inputs((second,))], reference, bakes)
    assert [finding.path for finding in verdict.failures] == ["output (inputs 2)"]


def test_one_side_raises() -> None:
    def raises(x: torch.Tensor) -> torch.Tensor:
        message = "no such kernel"
        raise NotImplementedError(message)

    verdict = verdict_on([torch.ones(5)], torch.sin, raises)
    assert verdict.status is Status.DIFFERENT
    assert "NotImplementedError: no such kernel" in str(verdict)
    assert not verdict_on([torch.ones(5)], raises, torch.sin)


def test_both_sides_raising_is_no_pass() -> None:
    wrong_shape = [torch.ones(2, 3), torch.ones(2, 3)]
    verdict = verdict_on(wrong_shape, torch.mm, torch.compile(torch.mm, backend="eager"))
    assert verdict.status is Status.UNVERIFIED
    assert "both sides raised" in str(verdict)


def test_random_numbers_that_only_the_candidate_draws() -> None:
    verdict = verdict_on([torch.ones(5)], lambda x: x, lambda x: x + 0 * torch.rand(5))
    assert "rng" in {finding.aspect.value for finding in verdict.failures}


def test_a_nan_where_the_reference_has_none() -> None:
    verdict = verdict_on([torch.tensor([0.0, 1.0])], lambda x: x * 0, lambda x: x / x - 1)
    assert verdict.status is Status.DIFFERENT
    assert "NaN" in str(verdict)


def test_index_may_differ_only_inside_the_references_margin() -> None:
    torch.manual_seed(0)
    scores = torch.randn(50, 20)
    scores[:, 7] = scores.max(dim=1).values * (1 + 1e-8)  # ties up to rounding
    scores[:, 3] = scores[:, 7]
    reference = lambda s: (s.exp() / 3).argmax(1)  # noqa: E731
    tie = lambda s: torch.where((s.exp() / 3).argmax(1) == 3, 7, 3)  # noqa: E731
    assert verdict_on([scores], reference, tie).status is Status.UNSTABLE
    assert not verdict_on([scores], reference, tie, strict=True)
    wrong = lambda s: (s.exp() / 3).topk(4, dim=1).indices[:, 3]  # noqa: E731
    assert verdict_on([scores], reference, wrong).status is Status.DIFFERENT


def test_rounding_to_integers_may_differ_only_at_the_edge() -> None:
    x = torch.arange(-50, 50) / 10 + 0.05  # every fifth lies on an edge, up to rounding
    quantize = lambda x: (x * 10 / 5).round().to(torch.int8)  # noqa: E731
    otherwise = lambda x: (x / (5 / 10.0000005)).round().to(torch.int8)  # noqa: E731
    verdict = verdict_on([x], quantize, otherwise)
    assert verdict.passed, str(verdict)
    assert not verdict_on([x], quantize, lambda x: (x * 10 / 5 + 0.3).round().to(torch.int8))


@pytest.mark.parametrize("factor", [1.3, 1.0001])
def test_a_fault_behind_an_exact_mask_is_found(factor: float) -> None:
    """Masks are exact in every precision: they must not be taken for a source of noise."""
    torch.manual_seed(0)

    def attend(scale: float) -> Any:
        def call(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            scores = x @ x.mT * scale + (1.0 - mask.float()) * torch.finfo(torch.float32).min
            return scores.softmax(-1) @ x

        return call

    inputs = [torch.randn(2, 8, 16), torch.tril(torch.ones(8, 8, dtype=torch.int64))]
    assert verdict_on(inputs, attend(0.25), attend(0.25 * factor)).status is Status.DIFFERENT


class Runtime:
    """Another framework's runtime: float32 inside, whatever it is given."""

    def __init__(self, weight: torch.Tensor, factor: float = 1.0) -> None:
        self.weight, self.factor = weight.detach().numpy(), np.float32(factor)

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        narrow = x.detach().numpy().astype(np.float32)
        return [torch.from_numpy(narrow @ self.weight.T * self.factor)]


@pytest.mark.parametrize(
    ("factor", "noise", "reason"),
    [
        (3e-7, 0.0, None),
        (8.4e-7, 0.0, "all of it is off by one factor, +8"),
        (0.0, 3e-7, None),
        (0.0, 4e-7, "its error as a whole is 1."),
    ],
)
def test_a_kernel_that_is_less_accurate_in_float32_alone(
    factor: float, noise: float, reason: str | None
) -> None:
    # Each element is within its limit; what all of them share, or the whole error, is not.
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(64, 64, generator=generator) / 8 for _ in range(12)]
    errors = noise * torch.randn(256, 64, generator=generator).sign()

    def reference(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.tanh(x @ weight.to(x.dtype)) + x * 0.5
        return x

    def candidate(x: torch.Tensor) -> torch.Tensor:
        result = reference(x)
        return result * (1 + factor) + errors if x.dtype is torch.float32 else result

    inputs = [torch.randn(256, 64, generator=generator)]
    verdict = verdict_on(inputs, reference, candidate, verify_gradients=False)
    assert verdict.status is (Status.DEGRADED if reason else Status.EQUIVALENT)
    assert (reason or "") in str(verdict)


def test_another_runtime_behind_a_callable() -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 20, bias=False)
    x = torch.randn(7, 300)
    with torch.no_grad():
        fine = verdict_on([x], model, Runtime(model.weight), match_by_order=True)
        assert fine.passed, str(fine)
        assert not verdict_on([x], model, Runtime(model.weight, 1.0001), match_by_order=True)
    fine = verdict_on(
        [x], model, Runtime(model.weight), verify_gradients=False, match_by_order=True
    )
    assert fine.passed, str(fine)
    assert not verdict_on([x], model, Runtime(model.weight))


def test_a_list_in_place_of_a_dict_passes_only_where_order_is_asked_for() -> None:
    def named(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": x * 2, "b": x + 1}

    def flat(x: torch.Tensor) -> list[torch.Tensor]:
        return [x * 2, x + 1]

    def rounded(x: torch.Tensor) -> list[torch.Tensor]:
        return [(x * 3 + x) / 2, x + 1]

    def swapped(x: torch.Tensor) -> list[torch.Tensor]:
        return [x + 1, x * 2]

    x = torch.randn(4, requires_grad=True)
    assert verdict_on([x], named, flat).status is Status.DIFFERENT
    ordered = verdict_on([x], named, flat, match_by_order=True)
    assert ordered.passed, str(ordered)
    assert "outputs are matched by order: the two sides name them differently" in ordered.notes
    assert "gradient of input[0]" in [finding.path for finding in ordered.findings]
    (first, *_) = verdict_on([x], named, rounded, match_by_order=True).findings[1:]
    assert first.lifted is not None or first.status is Status.IDENTICAL
    assert verdict_on([x], named, swapped, match_by_order=True).status is Status.DIFFERENT
