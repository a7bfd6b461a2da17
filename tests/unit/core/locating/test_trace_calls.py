"""The place is a call of the reference, whatever operators the candidate has instead."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import paritas
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.results.findings import Finding, Origin

WIDTH = 12


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.act = nn.GELU()
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.up(self.norm(x)))).log_softmax(-1)


X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2))


def first_failure(candidate: Any, reference: Any = None) -> tuple[Finding, Origin]:
    config = paritas.VerifyConfig(
        raise_on_mismatch=False, locate_seconds=120, verify_gradients=False
    )
    verdict = paritas.verify([X], reference or Model().eval(), candidate, config)
    finding = next(one for one in verdict.failures if one.origin is not None)
    assert finding.origin is not None
    return finding, finding.origin


def with_forward(path: str, forward: Callable[..., torch.Tensor]) -> nn.Module:
    """A copy of the model in which one module computes something else."""
    model = Model().eval()
    module: Any = model.get_submodule(path)

    class Rewritten(type(module)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self, x)

    module.__class__ = Rewritten
    return model


def repeat_the_bias(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ module.weight.t() + module.bias * 4


def sum_half_of_the_terms(module: Any, x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x[..., :half] @ module.weight[:, :half].t() + module.bias


def take_statistics_of_all_positions(module: Any, x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean((1, 2), keepdim=True)
    scale = torch.rsqrt(centred.square().mean((1, 2), keepdim=True) + module.eps)
    return centred * scale * module.weight + module.bias


@pytest.mark.parametrize(
    ("path", "forward", "operator", "words", "kind"),
    [
        (
            "act",
            lambda _, x: functional.gelu(-x),
            "aten.gelu.default",
            "the candidate also calls aten.neg before it",
            PatternKind.SIGN,
        ),
        (
            "up",
            lambda m, x: functional.linear(x, m.weight, m.bias).roll(1, -1),
            "aten.linear",
            "the candidate also calls aten.roll after it",
            PatternKind.SHIFT,
        ),
        (
            "last",
            repeat_the_bias,
            "aten.linear",
            "aten.mul.Tensor and aten.add.Tensor where the reference calls aten.linear",
            PatternKind.REPEATED_BIAS,
        ),
        (
            "up",
            sum_half_of_the_terms,
            "aten.linear",
            "where the reference calls aten.linear",
            PatternKind.PARTIAL_SUM,
        ),
        (
            "norm",
            take_statistics_of_all_positions,
            "aten.native_layer_norm.default",
            "where the reference calls aten.native_layer_norm",
            PatternKind.WRONG_AXIS,
        ),
    ],
)
def test_a_module_with_another_forward_is_named_by_what_the_reference_calls(
    path: str, forward: Any, operator: str, words: str, kind: PatternKind
) -> None:
    finding, origin = first_failure(with_forward(path, forward))
    assert (origin.module, origin.operator) == (path, operator)
    assert words in finding.reason
    assert finding.diagnosis is not None
    assert finding.diagnosis.best is not None
    assert finding.diagnosis.best.kind is kind


@pytest.mark.usefixtures("undiagnosed")
def test_a_function_in_a_graph_stands_for_the_operator_that_it_replaced() -> None:
    def rewritten(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        right = functional.linear(x, weight, bias)  # nothing uses its values
        return (x @ weight.t() + 4 * bias).view_as(right)

    graph: Any = torch.export.export(Model().eval(), (X,)).module()
    nodes = [one for one in graph.graph.nodes if one.target is torch.ops.aten.linear.default]
    nodes[-1].target = rewritten
    graph.recompile()
    finding, origin = first_failure(graph)
    assert (origin.module, origin.operator) == ("last", "aten.linear")
    assert "where the reference calls aten.linear" in finding.reason


@pytest.mark.usefixtures("undiagnosed")
def test_what_is_inserted_on_the_line_of_a_call_belongs_to_it() -> None:
    def compute(x: torch.Tensor, factor: float | None) -> torch.Tensor:
        h = functional.linear(x, WEIGHT) * factor if factor else functional.linear(x, WEIGHT)
        return h.tanh().softmax(-1)

    finding, origin = first_failure(lambda x: compute(x, 1.01), lambda x: compute(x, None))
    assert origin.operator == "aten.linear"
    assert origin.arguments == ("float32 [2, 5, 12]", "float32 [8, 12]")
    assert "the candidate also calls aten.mul.Tensor after it" in finding.reason


@pytest.mark.usefixtures("undiagnosed")
def test_two_wrong_modules_are_two_places() -> None:
    model = with_forward("up", repeat_the_bias)
    other = copy.deepcopy(with_forward("last", repeat_the_bias))
    model.last = other.last  # type: ignore[assignment]
    config = paritas.VerifyConfig(
        raise_on_mismatch=False, locate_seconds=120, verify_gradients=False
    )
    verdict = paritas.verify([X], Model().eval(), model, config)
    places = [one.origin.module for one in verdict.failures if one.origin is not None]
    assert places == ["up", "last"]


def test_what_is_written_to_a_part_of_a_value_belongs_to_what_reads_it() -> None:
    def best_two(x: torch.Tensor) -> torch.Tensor:
        share = torch.sigmoid(x.topk(2).values)
        return share / share.sum(-1, keepdim=True)

    def best_one(x: torch.Tensor) -> torch.Tensor:
        best = x.topk(2).values.clone()
        best[..., -1] = 0
        share = torch.sigmoid(best)
        return share / share.sum(-1, keepdim=True)

    finding, origin = first_failure(best_one, best_two)
    assert origin.operator == "aten.sigmoid.default"
    assert finding.reason.startswith("starts here: the candidate also calls aten.fill_.Tensor")
    assert origin.code == "best[..., -1] = 0"
    assert finding.shape == (2, 5, 2)


@pytest.mark.usefixtures("undiagnosed")
def test_a_call_is_known_in_the_native_run_if_casts_compute_nothing_there() -> None:
    def compute(x: torch.Tensor, factor: float | None) -> torch.Tensor:
        x = x.to(torch.float32)
        h = functional.linear(x, WEIGHT) * factor if factor else functional.linear(x, WEIGHT)
        return h.to(torch.float32).softmax(-1)

    _, origin = first_failure(lambda x: compute(x, 1.01), lambda x: compute(x, None))
    assert origin.arguments == ("float32 [2, 5, 12]", "float32 [8, 12]")
