"""Findings about wrong values say what kind of wrong it is, within bounds."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch

import paritas
from paritas import VerifyConfig, verify
from paritas.core.diagnosis import diagnose
from paritas.core.judging.failures import Explainer, call_context, judging_only, without_kind
from paritas.core.numerics.judge_evidence import NoEvidence
from paritas.core.operators.calls import OperatorCall
from paritas.core.placement.placement import Recipe
from paritas.core.results.findings import Aspect, Finding, Score, Status, Verdict
from paritas.core.results.items import Item, ItemKind, Partial, Shard
from paritas.partition import check_recipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Net(torch.nn.Module):
    """A linear layer and something after it."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 8)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        """Apply both."""
        return self.after(self.linear(x))


def _verdict(after: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> Verdict:
    torch.manual_seed(0)
    reference = Net(lambda y: y).to(dtype)
    candidate = copy.deepcopy(reference)
    candidate.after = after
    config = paritas.VerifyConfig(raise_on_mismatch=False, verify_gradients=False)
    return paritas.verify([torch.randn(4, 16, dtype=dtype)], reference, candidate, config)


def _zero_column(y: Tensor) -> Tensor:
    return torch.cat([y[:, :7], torch.zeros_like(y[:, 7:])], dim=1)


@pytest.mark.parametrize(
    ("after", "kind"),
    [(lambda y: 1.5 * y, "scale"), (_zero_column, "zeros"), (lambda y: y.roll(1, 0), "shift")],
    ids=["scale", "zeros", "shift"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_wrong_output_says_what_kind_of_wrong_it_is(
    after: Callable[[Tensor], Tensor], kind: str, dtype: torch.dtype
) -> None:
    found = _verdict(after, dtype).failures[0].diagnosis
    assert found is not None
    assert found.best is not None
    assert found.best.kind == kind


def test_a_verdict_in_words_and_in_json_holds_the_diagnosis() -> None:
    verdict = _verdict(lambda y: 1.5 * y)
    diagnosis = verdict.failures[0].diagnosis
    assert diagnosis is not None
    assert f"    {diagnosis.sentence}" in str(verdict).splitlines()
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_the_first_wrong_value_has_a_picture_and_the_others_have_none() -> None:
    model = torch.nn.Linear(4, 3)
    config = paritas.VerifyConfig(raise_on_mismatch=False)
    verdict = paritas.verify([torch.randn(2, 4)], model, lambda x: 1.5 * model(x), config)
    first, *others = verdict.failures
    assert first.picture is not None
    assert first.picture.shape == (2, 3)
    assert others
    assert all(finding.picture is None for finding in others)


def test_every_value_of_one_operator_has_a_picture() -> None:
    explainer = Explainer()
    context = call_context("aten.mul.Tensor", (torch.ones(3), 2.0), {})
    wrong = Finding(item=Item(ItemKind.NODE, "mul"), aspect=Aspect.VALUE, status=Status.DIFFERENT)
    for _ in range(2):
        pair = torch.arange(1.0, 4.0), torch.arange(2.0, 5.0)
        (found,) = explainer.explain([wrong], *pair, context=context)
        assert found.picture is not None
        assert found.picture.difference == ((1.0, 1.0, 1.0),)


class _LiftedPair(NoEvidence):
    """Float64 runs that differ by far less than the rounding of float32."""

    def arbiter(self) -> Tensor:
        return torch.arange(1.0, 4.0, dtype=torch.float64)

    def lift_candidate(self) -> Tensor:
        return self.arbiter() + 1e-9


def test_what_differs_only_in_float64_is_drawn_in_float64() -> None:
    wrong = Finding(
        item=Item(ItemKind.OUTPUT, "output"),
        aspect=Aspect.VALUE,
        status=Status.DIFFERENT,
        native=Score(max_z=1.0, max_limit=12.0, rms_z=1.0, rms_limit=2.5),
        lifted=Score(max_z=1e6, max_limit=12.0, rms_z=1e6, rms_limit=2.5),
    )
    native = torch.arange(1.0, 4.0)
    (found,) = Explainer().explain([wrong], native, native.clone(), _LiftedPair())
    assert found.picture is not None
    assert found.picture.lifted
    assert found.picture.largest_difference == 1e-9


def test_a_picture_that_cannot_be_drawn_leaves_the_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no paper")

    monkeypatch.setattr("paritas.core.diagnosis.pictures.draw_picture", refuse)
    verdict = _verdict(lambda y: 1.5 * y)
    assert verdict.failures
    assert any("no paper" in note for note in verdict.notes)


def test_what_passes_is_not_diagnosed() -> None:
    verdict = _verdict(lambda y: y * 1.0)
    assert verdict.passed
    assert all(finding.diagnosis is None for finding in verdict.findings)


def test_a_missing_bias_is_named_by_its_parameter() -> None:
    torch.manual_seed(0)
    reference = Net(lambda y: y)
    bias = reference.linear.bias.detach()
    candidate = copy.deepcopy(reference)
    candidate.after = lambda y: y - bias.to(y.dtype)
    config = paritas.VerifyConfig(raise_on_mismatch=False, verify_gradients=False)
    verdict = paritas.verify([torch.randn(4, 16)], reference, candidate, config)
    found = verdict.failures[0].diagnosis
    assert found is not None
    assert "linear.bias" in found.sentence


class Deep(torch.nn.Module):
    """A fault in the first layer reaches the output through others."""

    def __init__(self, inside: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = torch.nn.Linear(32, 32)
        self.norm = torch.nn.LayerNorm(32)
        self.last = torch.nn.Linear(32, 64)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        """Apply them."""
        x = x + self.inside(self.first(x))
        return self.last(self.norm(x).tanh())


def _deep_verdict(inside: Callable[[Tensor], Tensor]) -> Verdict:
    torch.manual_seed(0)
    reference = Deep(lambda y: y)
    candidate = copy.deepcopy(reference)
    candidate.inside = inside
    config = paritas.VerifyConfig(raise_on_mismatch=False, verify_gradients=False)
    return paritas.verify([torch.randn(16, 32)], reference, candidate, config)


def _in_bfloat16(y: Tensor) -> Tensor:
    return y if y.dtype == torch.float64 else y.bfloat16().float()


@pytest.mark.parametrize(
    "inside",
    [
        lambda y: y + 2e-3 * torch.sin(40 * y),
        lambda y: y.masked_fill(torch.ones(16, 32).tril(-10).bool(), 0.0),
        lambda y: 1.003 * y,
    ],
    ids=["a formula", "a mask", "a factor"],
)
def test_a_fault_that_stays_in_float64_is_no_rounding_and_has_no_kind_at_an_output(
    inside: Callable[[Tensor], Tensor],
) -> None:
    (finding,) = _deep_verdict(inside).failures
    assert finding.lifted is not None
    assert not finding.lifted.passed
    assert finding.diagnosis is not None
    assert finding.diagnosis.where is not None
    assert finding.diagnosis.patterns == ()


def test_a_rounding_inside_is_one_at_the_output_too_because_it_vanishes_in_float64() -> None:
    (finding,) = _deep_verdict(_in_bfloat16).failures
    assert finding.lifted is not None
    assert finding.lifted.passed
    assert finding.diagnosis is not None
    assert [pattern.kind for pattern in finding.diagnosis.patterns] == ["precision"]
    assert "in float64 it agrees" in finding.diagnosis.sentence


def test_a_finding_that_results_from_another_keeps_where_and_loses_the_kind() -> None:
    finding = _verdict(lambda y: 1.5 * y).failures[0]
    assert finding.diagnosis is not None
    assert finding.diagnosis.patterns
    left = without_kind(finding).diagnosis
    assert left is not None
    assert left.where == finding.diagnosis.where
    assert left.patterns == ()
    assert without_kind(_failing(0)) == _failing(0)


def _kinds(verdict: Verdict) -> dict[str, str]:
    best = {f.path: f.diagnosis and f.diagnosis.best for f in verdict.failures}
    return {path: str(pattern.kind) for path, pattern in best.items() if pattern}


class _OfTwoSummands(torch.nn.Module):
    """Without the second summand, the gradients of the second layer are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 5), torch.nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both to the same input."""
        return self.first(x) + self.second(x)


def _lose_a_summand(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
    graph = copy.deepcopy(graph)
    (node,) = [node for node in graph.graph.nodes if "add" in str(node.target)]
    node.replace_all_uses_with(node.args[0])
    graph.recompile()
    return graph.forward


@pytest.mark.parametrize("locate", [True, False])
def test_gradients_of_a_wrong_graph_state_no_kind(locate: bool) -> None:
    guarded = paritas.guard(_lose_a_summand, on_mismatch="record", locate=locate)
    compiled = torch.compile(_OfTwoSummands(), backend=guarded)
    compiled(torch.randn(4, 6)).square().sum().backward()
    verdict = guarded.verdict()
    of_second = next(f for f in verdict.failures if "second" in f.path)
    assert of_second.diagnosis is not None
    assert of_second.diagnosis.patterns == ()
    assert not any("gradient" in path for path in _kinds(verdict))


def test_gradients_of_wrong_outputs_state_no_kind_and_of_right_outputs_they_do() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    model, wrong = _OfTwoSummands(), torch.nn.Linear(6, 5)

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(_: object, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(_: object, *entering: Tensor) -> Tensor:
            return entering[0] / 2

    config = VerifyConfig(raise_on_mismatch=False, locate_seconds=0)
    outputs_differ = verify([x], model, model.first, config)
    assert any("gradient" in finding.path for finding in outputs_differ.failures)
    assert not any("gradient" in path for path in _kinds(outputs_differ))
    gradients_differ = verify([x], wrong, lambda x: Halved.apply(wrong(x)), config)
    assert set(_kinds(gradients_differ).values()) == {"scale"}


def test_gradients_that_only_result_from_wrong_outputs_need_no_note() -> None:
    explainer = Explainer(left=1)
    values = torch.arange(1.0, 9.0)
    explainer.explain([_failing(0)], values, 2 * values)
    gradient = Finding(
        item=Item(ItemKind.GRADIENT, "w"), aspect=Aspect.VALUE, status=Status.DIFFERENT
    )
    assert explainer.explain([gradient], values, 2 * values) == [gradient]
    assert explainer.notes == []


def _failing(number: int) -> Finding:
    return Finding(
        item=Item(ItemKind.OUTPUT, f"output[{number}]"),
        aspect=Aspect.VALUE,
        status=Status.DIFFERENT,
    )


def test_no_more_are_diagnosed_than_allowed_and_a_note_says_so() -> None:
    explainer = Explainer(left=2)
    values = torch.arange(1.0, 9.0)
    found = [
        finding
        for number in range(4)
        for finding in explainer.explain([_failing(number)], values, 2 * values)
    ]
    assert [finding.diagnosis is not None for finding in found] == [True, True, False, False]
    assert explainer.notes == ["only the first failing values were diagnosed"]


def test_a_diagnosis_that_fails_costs_a_note_and_not_the_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("no luck")

    monkeypatch.setattr(diagnose, "diagnose", broken)
    verdict = _verdict(lambda y: 1.5 * y)
    assert verdict.status is Status.DIFFERENT
    assert "output was not diagnosed: ZeroDivisionError: no luck" in verdict.notes


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        (torch.ones(2), torch.ones(3)),
        (1.0, 2.0),
        (torch.ones(0), torch.ones(0)),
    ],
    ids=["shapes", "numbers", "nothing"],
)
def test_what_cannot_be_laid_side_by_side_is_left_alone(
    reference: object, candidate: object
) -> None:
    finding = _failing(0)
    assert Explainer().explain([finding], reference, candidate) == [finding]


def test_the_context_of_a_call_names_its_arguments_as_the_operator_does() -> None:
    x = torch.ones(2, 3)
    known = call_context(torch.ops.aten.sum.dim_IntList, (x, [1], True), {})
    assert known.operator == "aten.sum.dim_IntList"
    assert known.inputs[0].shape == x.shape
    assert known.arguments == {"dim": [1], "keepdim": True}


def _wrong_relu(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
    for node in graph.graph.find_nodes(op="call_function", target=torch.relu):
        node.target = _relu_and_one
    graph.recompile()
    return graph.forward


def _relu_and_one(x: Tensor) -> Tensor:
    return torch.relu(x) + 1


def test_a_guard_says_it_of_the_operator_that_it_starts_at_and_not_of_its_results() -> None:
    torch.compiler.reset()
    guard = paritas.guard(_wrong_relu, on_mismatch="record")
    torch.manual_seed(0)
    torch.compile(lambda x: torch.relu(x * 2), backend=guard)(torch.randn(8, 16))
    found = {finding.path: finding.diagnosis for finding in guard.verdict().failures}
    assert {path: told.sentence if told else "" for path, told in found.items()} == {
        "graph 0: node relu": (
            "1 is added to the result (reproduces the candidate bit for bit); everywhere (100 % of "
            "the elements)"
        ),
        "graph 0: output[0]": "everywhere (100 % of the elements)",
    }


def test_a_wrong_split_of_an_operator_says_it_too() -> None:
    def doubled_bias(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return x @ w + bias

    torch.manual_seed(0)
    call = OperatorCall(doubled_bias, (torch.randn(4, 8), torch.randn(8, 6), torch.randn(6)))
    recipe = Recipe(inputs=((0, Shard(1)), (1, Shard(0))), outputs=(Partial("sum"),))
    verdict = check_recipe(call, recipe, 2)
    found = next(f.diagnosis for f in verdict.failures if f.path.startswith("output"))
    assert found is not None
    assert found.best is not None
    assert "args[2]" in found.best.sentence


def test_a_search_that_asks_only_whether_it_fails_gets_no_diagnosis():
    x = torch.arange(12.0).reshape(3, 4)
    config = VerifyConfig(raise_on_mismatch=False)
    with judging_only():
        plain = verify([x], torch.sin, lambda x: 2 * x.sin(), config)
    explained = verify([x], torch.sin, lambda x: 2 * x.sin(), config)
    assert plain.status is explained.status is Status.DIFFERENT
    assert [one.diagnosis is None for one in plain.failures] == [True] * len(explained.failures)
    assert explained.failures[0].diagnosis is not None
