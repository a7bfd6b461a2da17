"""Where a backend that shows no graphs goes wrong: guard() names the node, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from diagnosing import without_diagnosis
from paritas import guard
from paritas.core.judging.failures import node_origin
from paritas.core.results.findings import Aspect, Finding, OriginKind, PatternKind

Edit = Callable[[fx.GraphModule], None]

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def calls(graph: fx.GraphModule, name: str) -> list[fx.Node]:
    """The nodes that call a function or method of this name."""
    return [
        node
        for node in graph.graph.nodes
        if node.op.startswith("call_")
        and name == (node.target if isinstance(node.target, str) else node.target.__name__)
    ]


def spoil(node: fx.Node, change: Callable[[Any], Any] = lambda value: value * 1.5) -> None:
    """Make one node wrong."""
    target = node.target

    def wrong(*args: Any, **kwargs: Any) -> Any:
        call = getattr(type(args[0]), target) if isinstance(target, str) else target
        return change(call(*args, **kwargs))

    node.op, node.target = "call_function", wrong


def edited_by(edit: Edit) -> Callable[..., Any]:
    def backend(graph: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        edit(graph)
        graph.recompile()
        return graph.forward

    return backend


def wrong_at(name: str, number: int = 0) -> Callable[..., Any]:
    """A backend that gets the n-th call of a function wrong, in each graph that has so many."""

    def edit(graph: fx.GraphModule) -> None:
        for node in calls(graph, name)[number : number + 1]:
            spoil(node)

    return edited_by(edit)


def place(program: Callable[..., Any], backend: Any, *args: Tensor) -> Finding:
    """The finding with the place where it starts."""
    guarded = guard(backend, on_mismatch="record")
    results = torch.compile(program, backend=guarded)(*args)
    if results.requires_grad:
        results.square().sum().backward()
    verdict = guarded.verdict()
    (found,) = [finding for finding in verdict.failures if finding.origin is not None]
    others = [finding for finding in verdict.failures if finding is not found]
    assert {finding.cause for finding in others} == {found.path}
    return found


def named(program: Callable[..., Any], backend: Any, *args: Tensor) -> tuple[str, str]:
    with without_diagnosis():
        origin = place(program, backend, *args).origin
    assert origin is not None
    return origin.kind.value, origin.operator


# --- operators with several outputs ---------------------------------------------------------------

SEVERAL: dict[str, Callable[[Tensor], Any]] = {
    "chunk": lambda x: x.chunk(2, -1),
    "split": lambda x: x.split(4, -1),
    "unbind": lambda x: x.unbind(0),
    "topk": lambda x: x.topk(2),
    "max": lambda x: x.max(-1),
    "sort": lambda x: x.sort(-1),
    "var_mean": lambda x: torch.var_mean(x, -1),
    "aminmax": lambda x: torch.aminmax(x, dim=-1),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SEVERAL)
def test_a_wrong_neighbour_of_an_operator_with_several_outputs_is_named(name: str) -> None:
    def program(x: Tensor) -> Tensor:
        return torch.relu(SEVERAL[name](x.sin())[0]) + 1

    x = torch.rand(4, 8)
    assert named(program, wrong_at("relu"), x) == ("node", "relu")
    torch.compiler.reset()
    assert named(program, wrong_at("sin"), x) == ("node", "sin")


@pytest.mark.parametrize("name", ["chunk", "unbind", "var_mean"])
def test_a_wrong_operator_with_several_outputs_is_named_and_not_its_getitem(name: str) -> None:
    def edit(graph: fx.GraphModule) -> None:
        spoil(calls(graph, name)[0], lambda value: (value[0], value[1] * 1.5, *value[2:]))

    def program(x: Tensor) -> Tensor:
        first, second, *_ = SEVERAL[name](x.sin())
        return first + torch.relu(second)

    assert named(program, edited_by(edit), torch.randn(4, 8)) == ("node", name)


def test_a_getitem_that_takes_another_output_is_named() -> None:
    def edit(graph: fx.GraphModule) -> None:
        taken = calls(graph, "getitem")[0]
        taken.args = (taken.args[0], 1)

    def program(x: Tensor) -> Tensor:
        first, second = x.sin().chunk(2, -1)
        return first - 2 * second

    assert named(program, edited_by(edit), torch.randn(4, 8)) == ("node", "getitem")


# --- as it ran in the whole graph -----------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_one_of_several_calls_that_is_wrong_is_named(number: int) -> None:
    def program(x: Tensor) -> Tensor:
        for _ in range(3):
            x = F.softmax(x * 3, -1)
        return x

    found = place(program, wrong_at("softmax", number), torch.randn(4, 8)).origin
    assert found is not None
    assert found.name == ["x", "x_1", "x_2"][number]


def in_vmap(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: torch.relu(row.sin()).cumsum(0))(x).exp()


def in_place(x: Tensor) -> Tensor:
    y = x.exp()
    z = y.sin()
    y += z
    y[0] = torch.relu(y[1])
    return y.cos() + z


def in_place_through_a_view(x: Tensor) -> Tensor:
    y = x.exp()
    y[0].mul_(2)
    return torch.relu(y - 1).sum(0)


def with_dropout(x: Tensor) -> Tensor:
    return torch.relu(F.dropout(x.exp(), 0.5)).sin() + F.dropout(x, 0.2)


def under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x.t()
    return torch.relu(y.float()) @ x


def in_a_checkpoint(x: Tensor) -> Tensor:
    return torch.relu(checkpoint(torch.sin, x, use_reentrant=False) * 3) + 1


def of_expanded(x: Tensor) -> Tensor:
    return torch.relu(x[:1].expand(4, -1).t()[2:] * 2).flatten()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("program", "name"),
    [
        *((in_vmap, name) for name in ("sin", "relu", "cumsum", "exp")),
        *((in_place, name) for name in ("exp", "sin", "relu", "cos")),
        *((in_place_through_a_view, name) for name in ("exp", "relu")),
        *((with_dropout, name) for name in ("exp", "dropout", "relu", "sin")),
        *((under_autocast, name) for name in ("t", "matmul", "relu")),
        (in_a_checkpoint, "relu"),
        *((of_expanded, name) for name in ("expand", "t", "relu", "flatten")),
    ],
)
def test_a_wrong_node_is_named_whatever_is_around_it(program: Any, name: str) -> None:
    assert named(program, wrong_at(name), torch.rand(4, 4) + 0.5) == ("node", name)


def test_a_write_that_is_left_out_is_named() -> None:
    def edit(graph: fx.GraphModule) -> None:
        calls(graph, "mul_")[0].target = "mul"

    found = named(in_place_through_a_view, edited_by(edit), torch.rand(4, 4))
    assert found == ("node", "mul_")


def test_other_random_numbers_are_no_matter_of_memory() -> None:
    def edit(graph: fx.GraphModule) -> None:
        drawn = calls(graph, "dropout")[0]
        with graph.graph.inserting_before(drawn):
            graph.graph.call_function(torch.rand, (3,))

    found = place(with_dropout, edited_by(edit), torch.rand(4, 8))
    assert found.origin is not None
    assert (found.origin.operator, found.aspect) == ("dropout", Aspect.VALUE)


def test_a_node_that_draws_random_numbers_is_named_though_its_result_is_right() -> None:
    def draw(value: Tensor) -> Tensor:
        torch.rand(3)
        return value

    def program(x: Tensor) -> Tensor:
        return torch.sigmoid(torch.tanh(x)) + 1

    edit = edited_by(lambda graph: spoil(calls(graph, "sigmoid")[0], draw))
    assert named(program, edit, torch.rand(4, 8)) == ("node", "sigmoid")


@pytest.mark.parametrize("source", ["value", "view", "input"])
def test_a_node_that_writes_to_what_it_reads_is_named_and_not_the_maker_of_that(
    source: str,
) -> None:
    def program(x: Tensor) -> Tensor:
        value = x if source == "input" else torch.relu(x * 2)
        read = value.view(-1) if source == "view" else value
        return torch.sigmoid(read).sum() + value

    def edit(graph: fx.GraphModule) -> None:
        (node,) = calls(graph, "sigmoid")
        node.target = torch.sigmoid_

    assert named(program, edited_by(edit), torch.randn(4, 4)) == ("node", "sigmoid")


def test_a_fusion_that_other_uses_prevent_is_named_at_its_end() -> None:
    def fuse(graph: fx.GraphModule) -> None:
        for node in calls(graph, "cos"):
            if node.args[0].target in calls(graph, "sin") or len(node.args[0].users) == 1:
                spoil(node)

    def program(x: Tensor) -> Tensor:
        return (torch.exp(x) + 1).sin().cos() * 2

    found = place(program, edited_by(fuse), torch.rand(4, 8))
    assert found.origin is not None
    assert found.origin.operator == "cos"


@pytest.mark.parametrize("result", [torch.sum, torch.nonzero])
def test_a_wrong_shape_explains_a_wrong_value_and_a_wrong_value_a_wrong_shape(result: Any) -> None:
    def program(x: Tensor) -> Tensor:
        return result(torch.relu(x) + 0.0)

    def change(value: Tensor) -> Tensor:
        return value[1:] if result is torch.sum else value + 1

    edit = edited_by(lambda graph: spoil(calls(graph, "relu")[0], change))
    assert named(program, edit, torch.randn(4, 8)) == ("node", "relu")


# --- gradients ------------------------------------------------------------------------------------


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.5


@pytest.mark.parametrize("name", ["chunk", "mul"])
def test_the_node_with_a_wrong_gradient_is_named(name: str) -> None:
    def change(value: Any) -> Any:
        if isinstance(value, tuple):
            return (value[0], _WrongGradient.apply(value[1]))
        return _WrongGradient.apply(value)

    def program(x: Tensor) -> Tensor:
        first, second = x.sin().chunk(2, -1)
        return torch.relu(first * second + 1).sum(0)

    edit = edited_by(lambda graph: spoil(calls(graph, name)[0], change))
    x = torch.rand(4, 8, requires_grad=True)
    assert named(program, edit, x) == ("node", name)


def test_a_wrong_gradient_does_not_go_on_to_the_results() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.relu(x.sin() * 2).sum(0)

    edit = edited_by(lambda graph: spoil(calls(graph, "sin")[0], _WrongGradient.apply))
    found = place(program, edit, torch.rand(4, 8, requires_grad=True)).origin
    assert found is not None
    assert (found.name, found.chain) == ("sin", ())


def test_a_wrong_gradient_in_a_long_graph_is_found_in_a_few_runs() -> None:
    runs = 0

    def backend(graph: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        for node in calls(graph, "tanh"):
            spoil(node, _WrongGradient.apply)
        graph.recompile()

        def run(*args: Any) -> Any:
            nonlocal runs
            runs += 1
            return graph.forward(*args)

        return run

    def program(x: Tensor) -> Tensor:
        for step in range(40):
            x = torch.tanh(x) if step == 11 else torch.exp(-x)
        return x

    assert named(program, backend, torch.rand(4, 8, requires_grad=True)) == ("node", "tanh")
    # The call itself, with all values, with all gradients, and the node alone.
    assert runs == 4


class _LastRowWins(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor) -> Tensor:
        ctx.index, ctx.rows = index, len(weight)
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        result = gradient.new_zeros(ctx.rows, gradient.shape[-1])
        for index, row in zip(ctx.index.tolist(), gradient, strict=True):
            result[index] = row
        return None, result


def embed_wrongly(index: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = _LastRowWins.apply(index, weight)
    return result


def test_the_kind_of_a_wrong_gradient_is_that_of_its_own_operator() -> None:
    def edit(graph: fx.GraphModule) -> None:
        (node,) = calls(graph, "embedding")
        node.target, node.args, node.kwargs = embed_wrongly, node.args[:2], {}

    index = torch.tensor([3, 1, 3, 0, 5, 1, 3, 2])
    weight = torch.rand(9, 6, requires_grad=True)
    program = lambda index, weight: torch.tanh(F.embedding(index, weight))  # noqa: E731
    found = place(program, edited_by(edit), index, weight)
    assert found.diagnosis is not None
    assert found.diagnosis.best is not None
    assert found.diagnosis.best.kind == "lost accumulation"
    assert found.diagnosis.best.sentence == (
        "rows with the same index are not added up: the last one wins"
    )


def test_the_gradient_of_a_view_is_diagnosed_like_that_of_an_operator() -> None:
    """Outputs that are views are made, and differentiated, outside of a compiler's code."""

    def backend(graph: fx.GraphModule, args: list[Any]) -> Callable[..., Any]:
        ends = [node for node in graph.graph.nodes if node.op == "output"]
        handed_on = {node for end in ends for node in end.all_input_nodes}
        for node in calls(graph, "getitem"):
            if node not in handed_on:
                spoil(node, _Doubled.apply)
        graph.recompile()
        return graph.forward

    def program(x: Tensor) -> Tensor:
        return torch.tanh(x.sin()[:, :3])

    found = place(program, backend, torch.rand(4, 8, requires_grad=True))
    assert found.origin is not None
    assert found.origin.name == "getitem"
    assert found.diagnosis is not None
    assert found.diagnosis.best is not None
    assert found.diagnosis.best.kind == "scale"


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_wrong_values_that_only_show_in_gradients_are_named() -> None:
    # Layer norm undoes the factor, but not in its gradient.
    def program(x: Tensor, other: Tensor) -> Tensor:
        return F.layer_norm(torch.add(x, other), (8,), eps=0.0).exp()

    def half_more(value: Tensor) -> Tensor:
        return value + value.detach() / 2

    edit = edited_by(lambda graph: spoil(calls(graph, "add")[0], half_more))
    args = torch.rand(4, 8, requires_grad=True), torch.rand(4, 8)
    assert named(program, edit, *args) == ("node", "add")


def test_a_gradient_that_is_cut_off_is_named_where_it_is() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.relu(x.sin() * 2).exp()

    edit = edited_by(lambda graph: spoil(calls(graph, "mul")[0], lambda value: value.detach()))
    assert named(program, edit, torch.rand(4, requires_grad=True)) == ("node", "mul")


def test_a_gradient_that_is_cut_off_before_another_one_is_named_where_it_is() -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        return torch.relu(torch.tanh(x.sin()) @ weight).exp()

    edit = edited_by(lambda graph: spoil(calls(graph, "tanh")[0], lambda value: value.detach()))
    args = torch.rand(4, 4, requires_grad=True), torch.rand(4, 4, requires_grad=True)
    assert named(program, edit, *args) == ("node", "tanh")


# --- in words -------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x.softmax(-1), x], 0)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def test_an_origin_has_the_arguments_and_the_chain_to_the_results() -> None:
    seen: dict[str, fx.Node] = {}

    def edit(graph: fx.GraphModule) -> None:
        for name in ("layer_norm", "softmax", "cat"):
            seen.setdefault(name, calls(graph, name)[0])
        spoil(calls(graph, "linear")[5])

    found = place(Layers(), edited_by(edit), torch.rand(2, 4)).origin
    assert found is not None
    assert (found.kind, found.module) == (OriginKind.NODE, "layers.5")
    assert found.arguments == (
        "input: float32 [4, 4]",
        "weight: float32 [4, 4]",
        "bias: float32 [4]",
    )
    assert found.chain == ("layers.5", "layers.6", "layers.7", "layers.8", "norm")
    assert node_origin(seen["softmax"]).arguments == ("self: float32 [2, 4]", "dim=-1")
    layers = [f"layers.{number}" for number in range(9)]
    assert node_origin(seen["cat"]).chain == ("x", *layers, "norm")
    assert "eps=1e-05" in node_origin(seen["layer_norm"]).arguments


# --- less precise operators -----------------------------------------------------------------------


def in_bfloat16(call: Callable[..., Tensor], *args: Any) -> Tensor:
    return call(*(one.bfloat16() if isinstance(one, Tensor) else one for one in args)).float()


def with_rounded_weight(call: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Tensor:
    return call(x, weight.half().float())


def in_rounded_sums(call: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Tensor:
    total = torch.zeros(())
    for start in range(0, x.shape[-1], 16):
        part = slice(start, start + 16)
        total = (total + call(x[:, part], weight[:, part])).bfloat16().float()
    return total


LESS_PRECISE: dict[str, tuple[str, Callable[..., Tensor], str]] = {
    "format": ("linear", in_bfloat16, "computed in bfloat16"),
    "weight": ("linear", with_rounded_weight, "computed on input 1 rounded to tf32 or float16"),
    "method": ("sum", in_bfloat16, "computed in bfloat16"),
    "sums": (
        "linear",
        in_rounded_sums,
        "accumulated in bfloat16: the sum is rounded after every 16 terms",
    ),
}


@pytest.mark.parametrize("case", LESS_PRECISE)
def test_what_a_less_precise_operator_rounds_is_named(case: str) -> None:
    name, less_precise, sentence = LESS_PRECISE[case]

    def program(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.sin(), weight).tanh() * x.sum(-1, keepdim=True)

    def edit(graph: fx.GraphModule) -> None:
        (node,) = calls(graph, name)
        target = node.target

        def wrong(*args: Any, **kwargs: Any) -> Tensor:
            call = getattr(Tensor, target) if isinstance(target, str) else target
            return less_precise(lambda *given: call(*given, **kwargs), *args)

        node.op, node.target = "call_function", wrong

    found = place(program, edited_by(edit), torch.randn(16, 64), torch.randn(24, 64) / 8)
    assert found.origin is not None
    assert found.origin.operator == name
    assert found.diagnosis is not None
    assert found.diagnosis.best is not None
    assert found.diagnosis.best.kind == PatternKind.PRECISION
    assert found.diagnosis.best.sentence == sentence
