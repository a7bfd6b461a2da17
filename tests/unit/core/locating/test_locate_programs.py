"""Where an uncompiled candidate starts to compute something else."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import paritas
from drawing import normal
from paritas import VerifyConfig
from paritas.core.execution.observation import RunConditions, input_tensors
from paritas.core.execution.saved_state import RandomState
from paritas.core.execution.subjects import input_sets, inspect_subject
from paritas.core.locating.locate_programs import locate_programs
from paritas.core.locating.places import FailedCall, Place
from paritas.core.time_limit import TimeLimit

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.results.findings import Finding, Origin

WIDTH = 16
pytestmark = pytest.mark.usefixtures("undiagnosed")


def find_place(
    inputs: Any,
    reference: Callable[..., Any],
    candidate: Callable[..., Any],
    seconds: float = 600.0,
) -> Place:
    """Verify, and locate what fails."""
    config = VerifyConfig(raise_on_mismatch=False)
    verdict = paritas.verify(inputs, reference, candidate, config)
    assert not verdict.passed
    (given,) = input_sets(inputs)
    ours = inspect_subject(reference, "reference", "framework_model")
    mine = inspect_subject(candidate, "candidate", "compiled_model", ours.state)
    tensors = [*ours.state.tensors.values(), *(tensor for _, tensor in input_tensors(given))]
    gradients = any(tensor.requires_grad for tensor in tensors)
    call = FailedCall(
        reference=ours,
        candidate=mine,
        inputs=given,
        rng=RandomState.now(),
        config=config,
        conditions=RunConditions(gradients=gradients, seed=config.seed),
        failures=verdict.failures,
        limit=TimeLimit(seconds),
        tell=lambda _: None,
    )
    return locate_programs(call)


def origin_of(finding: Finding) -> Origin:
    assert finding.origin is not None
    return finding.origin


def line_with(text: str) -> str:
    """This file and the line that has a text."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if text in line and "line_with" not in line]
    return f"{__file__}:{number}"


# --- Functions ------------------------------------------------------------------------------------


def gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate).cos() * up.exp()


def test_parts_that_are_read_in_another_order_are_one_place_and_a_kind() -> None:
    def exchanged(x: torch.Tensor) -> torch.Tensor:
        up, gate = x.chunk(2, -1)  # the other way round
        return functional.silu(gate).cos() * up.exp()

    (finding,) = find_place([normal(4, 6)], gated, exchanged).findings
    assert origin_of(finding).source.startswith(line_with("# the other way round"))
    assert finding.reason == (
        "starts here: the candidate reads the parts of aten.split.Tensor in another order"
    )
    assert finding.diagnosis is not None
    assert finding.diagnosis.best is not None
    assert finding.diagnosis.best.kind == "permutation"
    assert "in the order 2, 1" in finding.diagnosis.sentence


def test_one_part_that_is_read_twice_is_named_where_it_is_read() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        gate, _ = x.chunk(2, -1)
        return functional.silu(gate).cos() * gate.exp()

    (finding,) = find_place([normal(4, 6)], gated, twice).findings
    assert origin_of(finding).operator == "aten.exp.default"


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention without parameters, right or with a fault."""

    fault: str = ""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        eps = 1e-3 if self.fault == "eps" else 1e-5
        h = functional.layer_norm(x, (WIDTH,), eps=eps)  # here: eps
        q, k, v = h.sin(), h.cos(), h.tanh()
        k = k.sigmoid() if self.fault == "more" else k  # here: more
        q, k = (k, q) if self.fault == "swap" else (q, k)
        s = q @ k.transpose(-1, -2)  # here: swap
        if self.fault != "scale":
            s = s * 0.25  # here: scale
        first = 1 if self.fault == "mask" else 0
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(first)  # here: mask
        p = s.masked_fill(~mask, -math.inf).softmax(1 if self.fault == "dim" else -1)  # here: dim
        o = p @ (h if self.fault == "other" else v)  # here: other
        return o.exp() if self.fault == "residual" else x + o.exp()  # here: residual


@pytest.mark.parametrize(
    ("fault", "operator", "words"),
    [
        ("eps", "aten.native_layer_norm.default", "with eps=0.001 instead of 1e-05"),
        ("more", "aten.sigmoid.default", "the candidate also calls aten.sigmoid"),
        ("swap", "aten.bmm.default", "the candidate calls aten.bmm with swapped inputs"),
        ("scale", "aten.mul.Tensor", "the candidate leaves out aten.mul.Tensor"),
        ("mask", "aten.tril.default", "with diagonal=1 instead of 0"),
        ("dim", "aten._softmax.default", "with dim=1 instead of -1"),
        ("other", "aten.bmm.default", "the candidate calls aten.bmm with another input"),
        ("residual", "aten.add.Tensor", "the candidate leaves out aten.add.Tensor"),
    ],
)
def test_a_fault_in_a_function_has_its_operator_and_line(
    fault: str, operator: str, words: str
) -> None:
    place = find_place([normal(2, 8, WIDTH)], Attention(), Attention(fault))
    (finding,) = place.findings
    origin = origin_of(finding)
    assert origin.operator == operator
    assert words in finding.reason
    assert origin.source == f"{line_with(f'# here: {fault}')}, in __call__"
    assert finding.source == origin.source
    assert origin.chain[-1] == "output"


def test_the_place_can_be_called_alone_on_its_inputs() -> None:
    place = find_place([normal(2, 8, WIDTH)], Attention(), Attention("eps"))
    assert place.pair is not None
    (inputs,) = place.pair.inputs
    (given,) = inputs.args
    assert torch.equal(given, normal(2, 8, WIDTH))
    torch.testing.assert_close(
        place.pair.reference(given), functional.layer_norm(given, (WIDTH,), eps=1e-5)
    )
    torch.testing.assert_close(
        place.pair.candidate(given), functional.layer_norm(given, (WIDTH,), eps=1e-3)
    )


def test_arguments_are_described_as_in_the_dtype_of_the_run() -> None:
    place = find_place([normal(2, 8, WIDTH)], Attention(), Attention("eps"))
    assert origin_of(place.findings[0]).arguments == (
        "input: float32 [2, 8, 16]",
        "normalized_shape=[16]",
        "eps=1e-05",
    )


def test_two_independent_faults_are_two_places() -> None:
    def compute(x: torch.Tensor, factor: float, second: float) -> torch.Tensor:
        h = x.tanh() * factor
        for _ in range(3):
            h = (h @ h.t() @ h).tanh()
        return (h * second).softmax(-1) * h

    place = find_place(
        [normal(4, 8)], lambda x: compute(x, 1.5, 0.5), lambda x: compute(x, 1.6, 0.7)
    )
    words = [finding.reason for finding in place.findings]
    assert "aten.mul.Tensor with other=1.6 instead of 1.5" in words[0]
    assert "aten.mul.Tensor with other=0.7 instead of 0.5" in words[1]
    assert len(words) == 2


def test_a_fault_that_only_float64_shows_is_found() -> None:
    place = find_place(
        [normal(4, 8)],
        lambda x: torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * x,
        lambda x: torch.rsqrt(x.square().mean(-1, keepdim=True) + 1.5e-6) * x,
    )
    (finding,) = place.findings
    assert "other=1.5e-06 instead of 1e-06" in finding.reason


def test_a_loss_of_precision_is_found_natively() -> None:
    place = find_place(
        [normal(64, 256)], lambda x: x.sin().sum(-1), lambda x: x.sin().bfloat16().float().sum(-1)
    )
    (finding,) = place.findings
    assert origin_of(finding).operator == "aten.sum.dim_IntList"
    assert "the candidate also calls aten._to_copy (2 times) before it" in finding.reason


def test_a_wrong_slice_that_is_written_to_is_one_place() -> None:
    def compute(x: torch.Tensor, column: int) -> torch.Tensor:
        h = x.sin()
        h[:, column].add_(1)
        return h.cos()

    place = find_place([normal(4, 8)], lambda x: compute(x, 0), lambda x: compute(x, 1))
    (finding,) = place.findings
    assert "aten.select.int with index=1 instead of 0" in finding.reason


def test_swapped_results_are_named() -> None:
    place = find_place([normal(4, 8)], lambda x: (x.sin(), x.cos()), lambda x: (x.cos(), x.sin()))
    (finding,) = place.findings
    assert "returns the result of aten.cos where the reference returns that of aten.sin" in (
        finding.reason
    )


# --- Graphs ---------------------------------------------------------------------------------------


class Called(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def test_an_edited_graph_is_located_at_the_line_of_the_reference() -> None:
    x = normal(2, 8, WIDTH)
    graph: Any = torch.export.export(Called(Attention()), (x,)).module()
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.mul.Tensor:
            node.args = (node.args[0], 0.3)
    graph.recompile()
    (finding,) = find_place([x], Attention(), graph).findings
    assert origin_of(finding).source == f"{line_with('# here: scale')}, in __call__"
    assert "other=0.3 instead of 0.25" in finding.reason


def test_a_constant_that_differs_only_in_float64_is_no_place() -> None:
    def compute(x: torch.Tensor, factor: float, smallest: float) -> torch.Tensor:
        fill = torch.full((8, 8), smallest).triu(1)
        return (x @ x.t() * factor + fill).softmax(-1)

    def reference(x: torch.Tensor) -> torch.Tensor:
        return compute(x, 0.25, torch.finfo(x.dtype).min)

    def candidate(x: torch.Tensor) -> torch.Tensor:
        return compute(x, 0.3, torch.finfo(torch.float32).min)

    (finding,) = find_place([normal(8, 8)], reference, candidate).findings
    assert "other=0.3 instead of 0.25" in finding.reason


# --- Modules --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ScaledLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return functional.linear(input, self.weight, self.bias) * 1.01  # here: linear


def test_a_wrong_layer_of_the_same_structure_has_its_path() -> None:
    torch.manual_seed(0)
    model = Model()
    candidate = copy.deepcopy(model)
    block: Any = candidate.blocks[1]
    wrong = ScaledLinear(WIDTH, 2 * WIDTH)
    wrong.load_state_dict(block.up.state_dict())
    block.up = wrong
    (finding,) = find_place([normal(2, 4, WIDTH)], model, candidate).findings
    origin = origin_of(finding)
    assert origin.module == "blocks.1.up"
    assert origin.operator == "aten.linear"
    assert "the candidate also calls aten.mul.Tensor after it" in finding.reason
    assert origin.source == f"{line_with('# here: linear')}, in forward"
    assert "blocks.2.down" in origin.chain


def test_a_wrong_weight_has_its_name() -> None:
    torch.manual_seed(0)
    model = Model()
    candidate = copy.deepcopy(model)
    with torch.no_grad():
        candidate.get_parameter("blocks.2.down.weight")[3, 4] += 0.5
    (finding,) = find_place([normal(2, 4, WIDTH)], model, candidate).findings
    assert origin_of(finding).module == "blocks.2.down"
    assert "blocks.2.down.weight is not the reference's" in finding.reason


def test_a_wrong_update_of_a_buffer_is_located() -> None:
    model = nn.BatchNorm1d(8)
    candidate = copy.deepcopy(model)
    candidate.momentum = 0.2
    (finding,) = find_place([normal(4, 8)], model, candidate).findings
    assert "aten.native_batch_norm with momentum=0.2 instead of 0.1" in finding.reason


# --- Ports with another structure -----------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (
            one(h).view(*h.shape[:2], 4, 4).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        p = (q @ k.transpose(-1, -2) / 2).softmax(-1)
        return (p @ v).transpose(1, 2).reshape(x.shape)


class FusedHeads(nn.Module):
    """The same with one product for q, k and v, and norm and softmax written out."""

    def __init__(self, other: Heads, fault: str) -> None:
        super().__init__()
        parts = other.q, other.k, other.v
        self.weight = nn.Parameter(torch.cat([part.weight for part in parts]).detach())
        self.bias = nn.Parameter(torch.cat([part.bias for part in parts]).detach())
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        d = x - x.mean(-1, keepdim=True)
        count = WIDTH - 1 if self.fault == "norm" else WIDTH
        h = d * torch.rsqrt(d.square().sum(-1, keepdim=True) / count + 1e-5)  # port: norm
        h = functional.linear(h, self.weight, self.bias)
        q, k, v = h.view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        if self.fault == "values":
            k, v = v, k
        s = torch.einsum("bhqd,bhkd->bhqk", q, k)  # port: values
        s = s * (0.6 if self.fault == "factor" else 0.5)  # port: factor
        e = (s - s.amax(-1, keepdim=True)).exp()
        p = e / e.sum(-1, keepdim=True)
        return torch.einsum("bhqk,bhkd->bqhd", p, v).reshape(x.shape)


def scale_and_sum(x: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
    wave = x.cos()
    several = scaled.unsqueeze(0)
    total = several.sum(0)  # of one: the same values
    return wave * total


def test_an_operator_whose_input_is_read_instead_of_its_result_is_left_out() -> None:
    def right(x: torch.Tensor) -> torch.Tensor:
        scaled = x.exp() / x  # here: divide
        return scale_and_sum(x, scaled)

    def wrong(x: torch.Tensor) -> torch.Tensor:
        scaled = x.exp().clone()
        return scale_and_sum(x, scaled)

    (finding,) = find_place([normal(3, 4)], right, wrong).findings
    assert origin_of(finding).operator == "aten.div.Tensor"
    assert origin_of(finding).source == f"{line_with('# here: divide')}, in right"
    assert "the candidate leaves out aten.div.Tensor" in finding.reason


def test_an_operator_that_is_called_to_no_effect_has_no_kind() -> None:
    def compute(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return (x.exp() * factor).sin()  # here: multiply

    factor, unit = torch.tensor(1.5), torch.tensor(1.0)
    programs = [functools.partial(compute, factor=one) for one in (factor, unit)]
    (finding,) = find_place([normal(3, 4)], *programs).findings
    assert origin_of(finding).source == f"{line_with('# here: multiply')}, in compute"
    assert "the candidate's aten.mul.Tensor changes nothing" in finding.reason
    assert finding.diagnosis is None or finding.diagnosis.best is None


def test_an_operator_that_reads_another_value_is_at_fault_if_the_right_one_is_there() -> None:
    def compute(x: torch.Tensor, *, right: bool) -> torch.Tensor:
        first = x.exp()
        second = first / x
        return scale_and_sum(x, second if right else first) + second.sin()

    programs = [functools.partial(compute, right=right) for right in (True, False)]
    (finding,) = find_place([normal(3, 4)], *programs).findings
    assert origin_of(finding).operator == "aten.mul.Tensor"
    assert "the candidate calls aten.mul.Tensor with another input" in finding.reason


def test_an_index_in_another_order_is_named_where_it_is_made() -> None:
    def read(x: torch.Tensor, *, right: bool) -> torch.Tensor:
        index = torch.arange(1, 3)
        index = index if right else index.flip(0)  # here: flip
        rows = torch.index_select(x, 0, index)
        return rows.exp()

    programs = [functools.partial(read, right=right) for right in (True, False)]
    (finding,) = find_place([normal(4, 4)], *programs).findings
    assert origin_of(finding).operator == "aten.arange.start"
    assert origin_of(finding).source == f"{line_with('# here: flip')}, in read"
    assert "the candidate also calls aten.flip after it" in finding.reason


@pytest.mark.parametrize(
    ("fault", "operator"),
    [
        ("norm", "aten.native_layer_norm.default"),
        ("factor", "aten.div.Tensor"),
        ("values", "aten.bmm.default"),
    ],
)
def test_a_port_is_located_by_values(fault: str, operator: str) -> None:
    torch.manual_seed(0)
    model = Heads().requires_grad_(requires_grad=False)
    port = FusedHeads(model, fault).requires_grad_(requires_grad=False)
    place = find_place([normal(2, 6, WIDTH)], model, port)
    origin = origin_of(place.findings[0])
    assert origin.operator == operator
    lines = [line_with(f"# port: {fault}")]
    if fault == "norm":  # the place is all that stands for the norm
        lines.append(line_with("d = x - x.mean"))
    assert origin.source.removesuffix(", in forward") in lines


@torch.library.custom_op("paritas_tests::normalized", mutates_args=())
def normalized(x: torch.Tensor) -> torch.Tensor:
    """A fused kernel in the place of three operators."""
    return x / (x.abs().sum(-1, keepdim=True) + 0.25)


@torch.library.custom_op("paritas_tests::magnitude", mutates_args=())
def magnitude(x: torch.Tensor) -> torch.Tensor:
    """A kernel in the place of one operator."""
    return x.abs() + 0.25


def test_a_fused_operator_is_one_place_with_all_that_it_stands_for() -> None:
    def write_out(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x / x.abs().sum(-1, keepdim=True))

    place = find_place([normal(4, 8)], write_out, lambda x: torch.relu(normalized(x)))
    (finding,) = place.findings
    words = (
        "calls paritas_tests.normalized where the reference calls aten.abs, aten.sum.dim_IntList"
    )
    assert f"{words} and aten.div.Tensor" in finding.reason


def test_an_operator_for_one_of_several_is_told_of_that_one() -> None:
    def write_out(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x / x.abs().sum(-1, keepdim=True))

    def port(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x / magnitude(x).sum(-1, keepdim=True))

    (finding,) = find_place([normal(4, 8)], write_out, port).findings
    words = "starts here: the candidate calls paritas_tests.magnitude where the reference calls"
    assert finding.reason.startswith(f"{words} aten.abs;")


# --- Gradients ------------------------------------------------------------------------------------


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * x * 2.5  # here: backward


def test_a_wrong_backward_is_located_in_the_function() -> None:
    x = normal(4, 8).requires_grad_()
    place = find_place([x], lambda x: (x * x).tanh(), lambda x: Square.apply(x).tanh())
    (finding,) = place.findings
    origin = origin_of(finding)
    assert origin.operator == "Square"
    assert origin.source == f"{line_with('# here: backward')}, in backward"


def test_an_operator_of_the_backward_pass_is_shown_as_the_call_that_it_belongs_to() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.embed(ids)))

    model = Tied()
    candidate = copy.deepcopy(model)
    candidate.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    (finding,) = find_place([torch.tensor([[1, 2, 3]])], model, candidate).findings
    assert "leaves out aten.add.Tensor of the backward pass" in finding.reason
    origin = origin_of(finding)
    assert origin.operator == "aten.embedding.default"
    assert origin.arguments == ("weight: float32 [20, 8]", "indices: int64 [1, 3]")


def test_a_gradient_that_is_cut_off_is_located() -> None:
    class Cut(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(self.norm(x)).detach()  # here: cut
            return x + self.down(functional.gelu(h))

    torch.manual_seed(0)
    model = Block()
    candidate = Cut()
    candidate.load_state_dict(model.state_dict())
    (finding,) = find_place([normal(2, WIDTH)], model, candidate).findings
    assert origin_of(finding).operator == "aten.detach.default"
    assert origin_of(finding).source == f"{line_with('# here: cut')}, in forward"


# --- Other differences ----------------------------------------------------------------------------


def test_an_exception_is_located_at_the_line_that_raises() -> None:
    def join(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x[0]])  # here: raises

    (finding,) = find_place([normal(4, 8)], lambda x: x + 1, join).findings
    origin = origin_of(finding)
    assert origin.operator == "aten.cat.default"
    assert origin.source == f"{line_with('# here: raises')}, in join"
    assert finding.raised == "RuntimeError"


def test_another_dtype_is_located() -> None:
    (finding,) = find_place([normal(4)], torch.tanh, lambda x: torch.tanh(x).double()).findings
    assert "aten._to_copy gives float64, not float32" in finding.reason


def test_another_shape_is_located() -> None:
    place = find_place(
        [normal(4, 8)], lambda x: x.exp().sum(-1), lambda x: x.exp().sum(-1, keepdim=True)
    )
    assert "keepdim=True instead of False" in place.findings[0].reason


def test_an_additional_draw_of_random_numbers_is_located() -> None:
    def candidate(x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)  # here: draws
        return functional.dropout(x, 0.5)

    place = find_place([normal(4, 8)], lambda x: functional.dropout(x, 0.5), candidate)
    origin = origin_of(place.findings[0])
    assert origin.operator == "aten.rand.default"
    assert origin.source == f"{line_with('# here: draws')}, in candidate"


def test_an_input_that_is_written_to_is_located() -> None:
    place = find_place([normal(4, 8)], lambda x: x.clone().mul_(2), lambda x: x.mul_(2))
    assert "writes to input[0] by aten.mul_.Tensor" in place.findings[0].reason


# --- No answer ------------------------------------------------------------------------------------


def test_without_time_there_is_a_reason_and_a_command() -> None:
    place = find_place([normal(2, 8, WIDTH)], Attention(), Attention("eps"), seconds=0.0)
    assert not place.findings
    assert place.reason == "the time was over before the place was found"
    assert "--locate-seconds" in place.command


def test_values_that_no_operator_gives_have_a_reason() -> None:
    place = find_place([normal(4)], lambda x: x.tolist(), lambda x: (x + 1).tolist())
    assert not place.findings
    assert place.reason
    assert "paritas.capture" in place.command


def test_the_search_leaves_state_and_random_numbers_as_they_were() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    candidate = copy.deepcopy(model)
    candidate[1].eps = 0.1
    before = {name: value.clone() for name, value in candidate.state_dict().items()}
    paritas.verify([normal(4, 8)], model, candidate, VerifyConfig(raise_on_mismatch=False))
    expected = torch.get_rng_state()
    find_place([normal(4, 8)], model, candidate)
    assert torch.equal(torch.get_rng_state(), expected)
    for name, value in candidate.state_dict().items():
        assert torch.equal(value, before[name])


def test_of_several_parts_the_one_that_nobody_reads_any_more_is_wrong() -> None:
    def parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.chunk(3, -1)

    def rolled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, third = x.chunk(3, -1)
        return first, second.roll(2, -1), third

    def program(x: torch.Tensor, *, split: Callable[..., Any]) -> torch.Tensor:
        first, second, third = split(x)
        return first.sigmoid() + second.sigmoid() * third

    reference, candidate = (functools.partial(program, split=one) for one in (parts, rolled))
    (finding,) = find_place([normal(4, 24)], reference, candidate).findings
    assert origin_of(finding).operator == "aten.roll.default"
    assert origin_of(finding).source.startswith(line_with("second.roll(2, -1), third"))
