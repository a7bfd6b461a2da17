"""What differs in float64 only: an approximation passes, a wrong parameter does not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drawing import normal
from paritas import Status, VerifyConfig, verify
from paritas.core.execution.observation import input_tensors
from paritas.core.execution.similar_inputs import SimilarInputs
from paritas.core.judging.failures import recall_failed
from paritas.verification import approximations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas import Verdict
    from paritas.core.execution.similar_inputs import SimilarCase


@pytest.fixture(autouse=True)
def _without_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximations, "MOST_SECONDS", 600.0)
    monkeypatch.setattr(approximations, "STEPS", 8)


def check(
    inputs: list[Any], reference: Callable[..., Any], candidate: Callable[..., Any]
) -> Verdict:
    return verify(inputs, reference, candidate, VerifyConfig(raise_on_mismatch=False))


def polynomial_exp(x: Tensor) -> Tensor:
    """Cephes' exp for float32."""
    x = x.clamp(-104.0, 89.0)
    k = torch.floor(x * 1.4426950408889634 + 0.5)
    r = x - k * 0.693359375 + k * 2.12194440e-4
    p = torch.full_like(r, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + c
    half = torch.floor(k / 2)
    return (p * r * r + r + 1) * torch.exp2(half) * torch.exp2(k - half)


def layer_norm(eps: float) -> Callable[[Tensor], Tensor]:
    def norm(x: Tensor) -> Tensor:
        d = x - x.mean(-1, keepdim=True)
        return d / torch.sqrt(d.square().mean(-1, keepdim=True) + eps)

    return norm


def bce_by_softplus(x: Tensor, z: Tensor) -> Tensor:
    return (functional.softplus(x) - x * z).mean()


def test_a_polynomial_exp_that_is_as_accurate_as_float32_is_equivalent() -> None:
    verdict = check([normal(8, 16)], torch.exp, polynomial_exp)
    assert verdict.status is Status.EQUIVALENT
    finding = next(finding for finding in verdict.findings if finding.path == "output")
    assert finding.reason == "agrees to the accuracy of float32, not beyond"
    assert finding.lifted is not None
    assert not finding.lifted.passed
    note = next(note for note in verdict.notes if "not beyond" in note)
    assert note.startswith(
        "agrees to the accuracy of float32, not beyond: float64 shows a difference that none of "
    )


def test_a_loss_by_softplus_is_equivalent() -> None:
    x, z = normal(16, 16) * 10, (normal(16, 16, seed=1) > 0).float()
    loss = functional.binary_cross_entropy_with_logits
    verdict = check([x, z], loss, bce_by_softplus)
    assert verdict.passed


@pytest.mark.slow
def test_a_constant_that_is_stored_in_float32_is_equivalent() -> None:
    scale = torch.tensor(1 / math.sqrt(48))
    verdict = check([normal(8, 16)], lambda x: x / math.sqrt(48), lambda x: x * scale)
    assert verdict.status is Status.EQUIVALENT


def test_a_wrong_eps_that_the_inputs_hide_is_different_with_inputs_that_show_it() -> None:
    x = normal(8, 32) * 100

    def reference(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (32,), eps=1e-5)

    verdict = check([x], reference, layer_norm(1e-6))
    assert verdict.status is Status.DIFFERENT
    assert "; visible natively for inputs scaled by 1e-2: off by " in verdict.failures[0].reason
    pair = recall_failed(verdict)[0]
    ((_, shown),) = input_tensors(pair.inputs[0])  # type: ignore[union-attr]
    torch.testing.assert_close(shown, x * 0.01)
    natively = VerifyConfig(raise_on_mismatch=False, lift=False)
    assert not verify(pair.inputs[0], reference, layer_norm(1e-6), natively).passed


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        (
            lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-9),
            lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True)),
        ),
        (lambda x: torch.log(x.abs() + 1e-8), lambda x: torch.log2(x.abs()) * math.log(2)),
        (torch.exp, lambda x: torch.exp(x) * 1.0000001),
        (lambda x: torch.tanh(x) + 1e-8, torch.tanh),
    ],
    ids=["guard", "log", "factor", "bias"],
)
def test_a_wrong_parameter_is_different(
    reference: Callable[[Tensor], Tensor], candidate: Callable[[Tensor], Tensor]
) -> None:
    assert not check([normal(8, 32) + 0.01], reference, candidate).passed


class Scaled(nn.Module):
    """Divides by a buffer, with a guard."""

    def __init__(self, eps: float, *, by_reciprocal: bool = False) -> None:
        super().__init__()
        self.register_buffer("variance", torch.linspace(100.0, 500.0, 16))
        self.eps, self.by_reciprocal = eps, by_reciprocal

    def forward(self, x: Tensor) -> Tensor:
        root = torch.sqrt(self.variance + self.eps)
        return x * (1 / root) if self.by_reciprocal else x / root


def test_a_wrong_eps_that_only_other_weights_show_is_different() -> None:
    reference, candidate = Scaled(1e-6), Scaled(2e-6, by_reciprocal=True)
    before = reference.variance.clone()
    verdict = check([normal(8, 16)], reference, candidate)
    assert verdict.status is Status.DIFFERENT
    assert "visible natively for weights scaled by 1e-" in verdict.failures[0].reason
    assert torch.equal(reference.variance, before)
    assert torch.equal(candidate.variance, before)


def test_a_program_of_many_operators_is_not_the_place_and_stays_different() -> None:
    def reference(x: Tensor) -> Tensor:
        for _ in range(30):
            x = torch.sin(x)
        return torch.exp(x)

    def candidate(x: Tensor) -> Tensor:
        for _ in range(30):
            x = torch.sin(x)
        return polynomial_exp(x)

    verdict = check([normal(8, 16)], reference, candidate)
    assert verdict.status is Status.DIFFERENT
    note = (
        "whether the difference in float64 is only an approximation was not found out: the "
        "reference calls 31 operators, and the one that differs is not known"
    )
    assert note in verdict.notes


def test_a_search_without_time_settles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximations, "MOST_SECONDS", -1.0)
    verdict = check([normal(8, 16)], torch.exp, polynomial_exp)
    assert verdict.status is Status.DIFFERENT
    assert any("the time was over after 1 inputs" in note for note in verdict.notes)


def test_integers_stay_in_range_if_an_operator_does_not_check_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    largest: list[int] = []

    class Watched(SimilarInputs):
        def over_whole_range(self) -> Iterator[SimilarCase]:
            for case in super().over_whole_range():
                largest.append(int(case.inputs.args[1].max()))
                yield case

    def total(weight: Tensor, indices: Tensor) -> Tensor:
        return functional.embedding_bag(indices, weight, mode="sum")

    monkeypatch.setattr(approximations, "SimilarInputs", Watched)
    monkeypatch.setattr(approximations, "STEPS", 0)  # these only follow what was tried before
    check(
        [normal(40, 16), torch.arange(32).square().reshape(8, 4) % 8],
        lambda weight, indices: total(weight, indices).exp(),
        # the square, since some machines compute exp by this very polynomial
        lambda weight, indices: polynomial_exp(total(weight, indices) / 2).square(),
    )
    assert len(largest) > 5
    assert max(largest) == 4


# --- what it costs to see that a fault is plain ---------------------------------------------------


def test_a_plain_fault_runs_neither_side_again_to_see_it_natively() -> None:
    said: list[str] = []
    config = VerifyConfig(raise_on_mismatch=False)
    inputs = [normal(4, 8).requires_grad_()]
    verdict = verify(
        inputs, torch.tanh, lambda x: x.tanh() * 1.001, config, on_progress=said.append
    )
    assert verdict.status is Status.DIFFERENT
    assert said.count("running the reference") == 1
    assert said.count("running the reference in float64") == 1


def test_one_wrong_element_of_a_program_without_decisions_is_measured_once() -> None:
    said: list[str] = []

    def candidate(x: Tensor) -> Tensor:
        return torch.cat([functional.gelu(x[:-1]), x[-1:]])

    config = VerifyConfig(raise_on_mismatch=False)
    verdict = verify([normal(999)], functional.gelu, candidate, config, on_progress=said.append)
    assert [finding.path for finding in verdict.failures] == ["output"]
    assert [text for text in said if "measuring rounding in float64" in text] == [
        "measuring rounding in float64, run 1"
    ]


def test_a_plain_fault_of_a_large_program_with_decisions_is_not_measured_for_a_note() -> None:
    said: list[str] = []

    def reference(x: Tensor) -> Tensor:
        for _ in range(approximations.MOST_OPERATORS):
            x = functional.relu(x + 0.5)
        return x

    config = VerifyConfig(raise_on_mismatch=False)
    verdict = verify(
        [normal(4, 8)], reference, lambda x: reference(x) * 1.001, config, on_progress=said.append
    )
    assert verdict.status is Status.DIFFERENT
    assert not any("only an approximation was not found out" in note for note in verdict.notes)
    assert not any("looking for decisions" in text for text in said)


def test_a_wrong_root_of_gelu_that_its_own_rounding_does_not_explain_is_different() -> None:
    def candidate(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x * 0.707107))

    assert not check([normal(8, 32)], functional.gelu, candidate).passed


def softplus_by_log1p(x: Tensor) -> Tensor:
    size = torch.where(x < 0, -x, x)
    return x.clamp(min=0) + torch.log1p(torch.exp(-size))


class Inner(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Deep(nn.Module):
    """More operators than a search over the whole program allows, with one function inside."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(14)])
        self.inner = Inner(function)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * 3
            if number == 7:
                x = self.inner(x * 100)
        return x


def test_a_wrong_eps_deep_inside_is_shown_at_the_place_where_it_starts() -> None:
    def reference(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (32,), eps=1e-5)

    def candidate(x: Tensor) -> Tensor:
        d = x - x.mean(-1, keepdim=True)
        return d * torch.rsqrt(d.square().mean(-1, keepdim=True) + 1e-6)

    config = VerifyConfig(raise_on_mismatch=False, locate_seconds=600.0)
    verdict = verify([normal(8, 32, seed=1)], Deep(reference), Deep(candidate), config)
    assert verdict.status is Status.DIFFERENT
    place = verdict.failures[0]
    assert place.origin is not None
    assert "; visible natively for inputs " in place.reason
    assert ", with input[0] from " in place.reason
    assert place.reason in str(verdict)
    (pair,) = recall_failed(verdict)
    assert len(pair.inputs) == 1  # type: ignore[union-attr]  # the place's are not the model's


class Layer(nn.Module):
    """A layer after a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.function(x))


def layers(function: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(function), Layer(functional.softplus))


@pytest.mark.parametrize(
    ("candidate", "passes"),
    [(softplus_by_log1p, True), (lambda x: softplus_by_log1p(x) * 1.00001, False)],
    ids=["approximation", "factor"],
)
def test_an_approximation_is_settled_by_blocks_as_well(
    candidate: Callable[[Tensor], Tensor], passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approximations, "STEPS", 4)  # how to search is not what this is about
    verdict = verify(
        [normal(16, 8) * 20],
        layers(functional.softplus),
        layers(candidate),
        VerifyConfig(raise_on_mismatch=False, locate_seconds=600.0),
        by="blocks",
    )
    assert verdict.passed is passes
    assert any("float32, not beyond" in note for note in verdict.notes) is passes
