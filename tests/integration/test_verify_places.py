"""verify() says where a failure of a compiled candidate starts."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import paritas
from paritas import Inputs, VerifyConfig
from paritas.app.cli import main
from paritas.core.compiled import locate_compiled
from paritas.core.judging import failures
from paritas.core.locating.places import Place
from paritas.core.results.findings import OriginKind, PatternKind, Status, Verdict
from paritas.core.time_limit import TimeLimit
from paritas.core.torch_private.dynamo import count_compiled_frames
from paritas.verification import blocks, places
from quality.faulty_backends import (
    gradient_of_sin_wrong,
    sin_as_cos,
    sin_raises,
    value_of_exp_and_gradient_of_sin_wrong,
)
from spying import Spy

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.locating.places import FailedCall
    from paritas.core.results.findings import Finding

pytest_plugins = ["pytester"]
X = torch.linspace(-1, 1, 12).reshape(3, 4)
LOCATES = VerifyConfig(raise_on_mismatch=False, locate_seconds=600)
FORWARD = VerifyConfig(raise_on_mismatch=False, locate_seconds=600, verify_gradients=False)


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + 1  # the wrong line


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x)).exp()


def located(verdict: Verdict) -> list[Finding]:
    return [finding for finding in verdict.findings if finding.origin is not None]


@pytest.mark.usefixtures("undiagnosed")
def test_a_wrong_node_of_a_registered_backend_is_named_with_its_line_and_module() -> None:
    net = Net()
    verdict = paritas.verify([X], net, torch.compile(net, backend=sin_as_cos), LOCATES)
    (place,) = located(verdict)
    assert verdict.findings[0] is place
    assert place.origin.operator == "sin"
    assert place.origin.module == "inner"
    assert "test_verify_places.py:" in place.source
    assert "torch.sin(x) + 1" in place.origin.code
    others = [finding for finding in verdict.failures if finding is not place]
    assert len(others) > 2
    assert {finding.cause for finding in others} == {place.path}
    assert not any("where it starts" in note for note in verdict.notes)


@pytest.mark.usefixtures("undiagnosed")
def test_searches_do_not_use_up_the_recompiles_of_the_candidate() -> None:
    graphs = Spy()

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + 1

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.note(graph)
        return sin_as_cos(graph, inputs)

    compiled = torch.compile(program, backend=backend)
    compiled(X)
    for _ in range(8):  # as many as Dynamo keeps of one function
        assert located(paritas.verify([X], program, compiled, FORWARD))
    before = len(graphs.notes())
    assert torch.equal(compiled(X), torch.cos(X) + 1)
    assert len(graphs.notes()) == before  # what it had compiled is still there
    compiled(X.double())
    assert len(graphs.notes()) == before + 1


def test_what_passes_has_no_cause_and_the_verdict_is_what_it_was() -> None:
    net = Net()
    compiled = torch.compile(net, backend=sin_as_cos)
    plain = paritas.verify([X], net, compiled, VerifyConfig(raise_on_mismatch=False))
    verdict = paritas.verify([X], net, compiled, LOCATES)
    assert verdict.status is plain.status
    assert verdict.coverage == plain.coverage
    assert verdict.notes == plain.notes
    assert [(f.path, f.status) for f in verdict.findings if f.origin is None] == [
        (f.path, f.status) for f in plain.findings
    ]
    assert not any(f.cause for f in verdict.findings if f.status.passes())


@pytest.mark.usefixtures("undiagnosed")
def test_a_wrong_gradient_alone_is_located_and_explains_the_gradients() -> None:
    net = Net()
    candidate = torch.compile(net, backend=gradient_of_sin_wrong)
    verdict = paritas.verify([X], net, candidate, LOCATES)
    (place,) = located(verdict)
    assert place.origin.operator == "sin"
    assert {f.cause for f in verdict.failures if f is not place} == {place.path}


@pytest.mark.usefixtures("undiagnosed")
def test_a_wrong_value_does_not_hide_a_gradient_that_is_wrong_elsewhere() -> None:
    net = Net()
    candidate = torch.compile(net, backend=value_of_exp_and_gradient_of_sin_wrong)
    verdict = paritas.verify([X], net, candidate, LOCATES)
    value, gradient = located(verdict)
    assert (value.origin.operator, gradient.origin.operator) == ("exp", "sin")
    assert gradient.item.kind.is_gradient or "gradients" in gradient.path


@pytest.mark.usefixtures("undiagnosed")
def test_a_wrong_value_alone_is_the_only_cause_of_wrong_gradients() -> None:
    net = Net()
    candidate = torch.compile(net, backend=sin_as_cos)
    verdict = paritas.verify([X], net, candidate, LOCATES)
    (place,) = located(verdict)
    assert {f.cause for f in verdict.failures if f is not place} == {place.path}


@pytest.mark.usefixtures("undiagnosed")
def test_two_faulty_graphs_are_two_causes() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x) * 2
        torch.compiler.disable(len)([])  # a graph break
        return torch.sin(y) - 1

    candidate = torch.compile(program, backend=sin_as_cos)
    verdict = paritas.verify([X], program, candidate, FORWARD)
    first, second = located(verdict)
    assert first.source != second.source
    assert next(f for f in verdict.findings if f.path == "output").cause == first.path


@pytest.mark.usefixtures("undiagnosed")
def test_a_compiled_child_of_a_module_is_located() -> None:
    net = Net()
    candidate = copy.deepcopy(net)
    candidate.inner = torch.compile(candidate.inner, backend=sin_as_cos)
    verdict = paritas.verify([X], net, candidate, FORWARD)
    (place,) = located(verdict)
    assert place.origin.operator == "sin"
    assert "torch.sin(x) + 1" in place.origin.code


@pytest.mark.usefixtures("undiagnosed")
def test_the_first_failing_set_of_inputs_is_located() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) if x.shape[0] > 1 else torch.cos(x)

    sets = [Inputs((X[:1],)), Inputs((X,))]
    candidate = torch.compile(program, backend=sin_as_cos)
    verdict = paritas.verify(sets, program, candidate, FORWARD)
    (place,) = located(verdict)
    assert place.item.inputs == 2
    assert place.origin.operator == "sin"


@pytest.mark.usefixtures("undiagnosed")
def test_a_fault_that_only_the_second_call_shows_is_located() -> None:
    calls = [0]

    def later(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        wrong = sin_as_cos(copy.deepcopy(graph), inputs)

        def run(*args: Any) -> Any:
            calls[0] += 1
            return (graph.forward if calls[0] % 2 else wrong)(*args)

        return run

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + 1

    config = VerifyConfig(
        raise_on_mismatch=False, locate_seconds=600, verify_gradients=False, lift=False
    )
    verdict = paritas.verify([X], program, torch.compile(program, backend=later), config)
    assert {finding.item.call for finding in verdict.failures if finding.cause} == {2}
    assert located(verdict)[0].item.graph == "graph 0"


def test_code_that_raises_is_located_in_its_graph() -> None:
    def raises(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            raise NotImplementedError("no kernel")

        return run

    net = Net()
    verdict = paritas.verify([X], net, torch.compile(net, backend=raises), FORWARD)
    (place,) = located(verdict)
    assert place.origin.kind is OriginKind.GRAPH
    assert place.raised == "NotImplementedError"
    assert "test_verify_places.py:" in place.source
    assert {f.cause for f in verdict.failures if f is not place} == {place.path}


def test_a_compiler_that_raises_is_located_in_the_graph_that_it_was_given() -> None:
    net = Net()
    verdict = paritas.verify([X], net, torch.compile(net, backend=sin_raises), FORWARD)
    assert verdict.status is Status.DIFFERENT
    (place,) = located(verdict)
    assert place.origin.kind is OriginKind.GRAPH
    assert "NotImplementedError: sin" in place.reason
    assert "test_verify_places.py:" in place.source


def test_a_compiled_port_whose_graphs_are_right_is_searched_in_its_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[FailedCall] = []

    def search(call: FailedCall) -> Place:
        asked.append(call)
        return Place(reason="not here")

    monkeypatch.setattr(places, "_locate_in_source", search)

    def port(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x)

    candidate = torch.compile(port, backend="eager")
    verdict = paritas.verify([X], torch.sin, candidate, FORWARD)
    assert asked[0].candidate.call is port
    assert not asked[0].candidate.is_compiled
    (note,) = (note for note in verdict.notes if "where it starts" in note)
    assert "each of 1 compiled graph (eager) computes what was captured" in note
    assert "the command paritas shrink" in note


def test_no_time_and_an_interrupt_leave_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    candidate = torch.compile(net, backend=sin_as_cos)
    steps: list[str] = []
    off = VerifyConfig(raise_on_mismatch=False, verify_gradients=False, locate_seconds=0)
    plain = paritas.verify([X], net, candidate, off, on_progress=steps.append)
    assert not any("where it starts" in step for step in steps)
    assert not located(plain)

    def interrupt(call: FailedCall) -> Place:
        raise KeyboardInterrupt

    monkeypatch.setattr(places, "locate_failure", interrupt)
    verdict = paritas.verify([X], net, candidate, FORWARD, on_progress=steps.append)
    assert "looking for where it starts (at most 600 s)" in steps
    assert verdict.findings == plain.findings
    assert verdict.notes[-1] == "where it starts is not known: the search was interrupted"


def test_an_interrupt_during_the_diagnosis_leaves_the_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    net = Net()
    monkeypatch.setattr(failures, "_diagnose_value", interrupt)
    verdict = paritas.verify([X], net, torch.compile(net, backend=sin_as_cos), FORWARD)
    assert verdict.status is Status.DIFFERENT
    assert "the kind of error is not known: the diagnosis was interrupted" in verdict.notes
    assert "where it starts is not known: the search was interrupted" in verdict.notes


def test_a_search_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Place:
        raise RuntimeError("a bug of the search")

    monkeypatch.setattr(locate_compiled, "_run_guarded", fail)
    net = Net()
    verdict = paritas.verify([X], net, torch.compile(net, backend=sin_as_cos), FORWARD)
    assert verdict.status is Status.DIFFERENT
    assert verdict.notes[-1] == (
        "where it starts is not known: the search failed: RuntimeError: a bug of the search"
    )


def test_the_time_is_kept_between_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimeLimit, "is_over", True)
    net = Net()
    verdict = paritas.verify([X], net, torch.compile(net, backend=sin_as_cos), FORWARD)
    assert not located(verdict)
    assert verdict.notes[-1] == (
        "where it starts is not known: the 600 seconds for the search were over; to find it: more "
        "time: --locate-seconds, or locate_seconds= in Python"
    )


def test_the_search_leaves_generators_state_gradients_and_compiled_code_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(nn.functional.dropout(self.norm(x), 0.5, training=self.training))

    net = Counting().train()
    candidate = torch.compile(net, backend=sin_as_cos)
    candidate(X).sum().backward()
    state = copy.deepcopy(net.state_dict())
    gradients = {name: one.grad.clone() for name, one in net.named_parameters()}
    before = torch.get_rng_state()
    verdict = paritas.verify([X], net, candidate, LOCATES)
    assert located(verdict)[0].origin.operator == "sin"
    assert torch.equal(torch.get_rng_state(), before)
    assert net.training
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert all(torch.equal(p.grad, gradients[name]) for name, p in net.named_parameters())
    frames = count_compiled_frames()
    candidate(X)
    assert count_compiled_frames() == frames


@pytest.mark.usefixtures("undiagnosed")
def test_a_wrong_pass_of_inductor_is_located_at_its_node(scalar_kernels: None) -> None:
    def swap(graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.target = torch.ops.aten.neg.default

    net = Net()
    options = {"post_grad_custom_post_pass": swap, "fx_graph_cache": False}
    candidate = torch.compile(net, options=options)
    verdict = paritas.verify([X], net, candidate, FORWARD)
    (place,) = located(verdict)
    assert place.origin.operator == "aten.sin.default"
    assert place.origin.module == "inner"
    assert "torch.sin(x) + 1" in place.origin.code
    assert "post_grad_custom_post_pass" in place.reason


@pytest.mark.usefixtures("undiagnosed")
def test_a_wrong_pass_over_the_joint_graph_is_named(scalar_kernels: None) -> None:
    """Each compiled graph is right by itself: the pass works before the graph is split."""

    def swap(graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.target = torch.ops.aten.neg.default

    net = Net()
    options = {"joint_custom_pre_pass": swap, "fx_graph_cache": False}
    verdict = paritas.verify([X], net, torch.compile(net, options=options), FORWARD)
    (place,) = located(verdict)
    assert place.origin.kind is OriginKind.PASS
    assert place.origin.name == "joint_custom_pre_pass"
    assert "torch.sin(x) + 1" in place.origin.code


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), Inner()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_by_blocks_the_place_is_inside_of_the_wrong_block() -> None:
    def second_sin(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        # Both blocks are compiled once, and the weights tell which one runs.
        wrong = sin_as_cos(copy.deepcopy(graph), inputs)

        def run(*args: Any) -> Any:
            is_second = any(
                isinstance(one, torch.Tensor) and one.data_ptr() == weight.data_ptr()
                for one in args
            )
            return (wrong if is_second else graph.forward)(*args)

        return run

    tower = Tower()
    weight = tower.layers[1][0].weight
    candidate = torch.compile(tower, backend=second_sin)
    verdict = paritas.verify([X], tower, candidate, FORWARD, by="blocks")
    assert verdict.status is Status.DIFFERENT
    place = located(verdict)[0]
    assert place.item.graph.startswith("layers.1: ")
    assert place.origin.module.startswith("layers.1")
    assert next(f for f in verdict.findings if f.path == "output").cause == place.path


@pytest.mark.usefixtures("undiagnosed")
def test_an_interrupt_by_blocks_leaves_what_has_failed_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    tower, wrong = Tower(), Tower()
    with torch.no_grad():
        wrong.layers[1][0].bias += 1
    monkeypatch.setattr(blocks._WholeVerification, "compare", interrupt)
    verdict = paritas.verify([X], tower, wrong, FORWARD, by="blocks")
    assert verdict.status is Status.DIFFERENT
    assert located(verdict)[0].item.graph == "layers.1"
    last = "interrupted: the pieces after the last one that is listed were not compared"
    assert last in verdict.notes
    with pytest.raises(KeyboardInterrupt):
        paritas.verify([X], tower, Tower(), FORWARD, by="blocks")


def test_the_command_takes_a_function_as_backend_and_prints_the_place(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "import torch\n"
        "def build():\n"
        "    return (lambda x: torch.sin(x) + 1), [torch.ones(3)]\n"
        "def wrong(graph, inputs):\n"
        "    for node in graph.graph.find_nodes(op='call_function', target=torch.sin):\n"
        "        node.target = torch.cos\n"
        "    graph.recompile()\n"
        "    return graph.forward\n"
    )
    (tmp_path / "places_net.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    asked = ["verify", "places_net:build", "--backend", "places_net:wrong"]
    ran = CliRunner().invoke(main, [*asked, "--locate-seconds", "600"])
    assert ran.exit_code == 1, ran.output
    assert "places_net.py:3" in ran.output
    missing = CliRunner().invoke(main, ["verify", "places_net:build", "--backend", "places_net:no"])
    assert missing.exit_code == 2
    assert "the backend 'places_net:no' cannot be imported" in missing.output


def test_parity_locates_and_takes_a_config(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch
        from paritas import VerifyConfig

        def wrong(graph, inputs):
            for node in graph.graph.find_nodes(op="call_function", target=torch.sin):
                node.target = torch.cos
            graph.recompile()
            return graph.forward

        def program(x):
            return torch.sin(x) + 1

        def located(parity, config=None, **settings):
            torch.compiler.reset()
            compiled = torch.compile(program, backend=wrong)
            verdict = parity.verify([torch.ones(3)], program, compiled, config, **settings)
            return [finding for finding in verdict.findings if finding.origin is not None]

        def test_by_the_option(parity):
            assert len(located(parity, raise_on_mismatch=False)) == 1

        @pytest.mark.parity(locate_seconds=0)
        def test_by_a_mark(parity):
            assert not located(parity, raise_on_mismatch=False)

        def test_by_a_config(parity):
            config = VerifyConfig(raise_on_mismatch=False, locate_seconds=0)
            assert not located(parity, config)
        """
    )
    ran = pytester.runpytest_inprocess("--paritas-locate-seconds=600", "-p", "no:cacheprovider")
    ran.assert_outcomes(passed=3)


# --- less precise candidates ----------------------------------------------------------------------


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(24, 64) / 8)
        self.bias = nn.Parameter(torch.randn(24))

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x.sin()).tanh()


class ProductInHalf(Product):
    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        half = (one.bfloat16() for one in (x, self.weight, self.bias))
        return nn.functional.linear(*half).float()


def rounds_some_sums(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
    """A backend whose product in float32 is rounded on the way, in an order that nobody knows."""

    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            return nn.functional.linear(x, weight, bias)
        total = torch.zeros(())
        for start, end in ((0, 5), (5, 23), (23, 40), (40, 64)):
            total = (total + x[:, start:end] @ weight[:, start:end].t()).bfloat16().float()
        return total + bias

    for node in graph.graph.nodes:
        if node.target is nn.functional.linear:
            node.target = multiply
    graph.recompile()
    return graph.forward


def test_a_product_in_half_precision_is_called_so_though_the_place_differs_in_dtype() -> None:
    verdict = paritas.verify([torch.randn(16, 64)], Product(), ProductInHalf(), FORWARD)
    (place,) = located(verdict)
    assert place.diagnosis.best.kind == PatternKind.PRECISION
    assert place.diagnosis.best.sentence == "computed in bfloat16"


def test_a_loss_of_precision_in_compiled_code_is_called_so_if_float64_agrees() -> None:
    torch.compiler.reset()
    net = Product()
    candidate = torch.compile(net, backend=rounds_some_sums)
    verdict = paritas.verify([torch.randn(16, 64)], net, candidate, FORWARD)
    (place,) = located(verdict)
    assert place.origin.operator == "linear"
    assert place.diagnosis.best.kind == PatternKind.PRECISION
    assert place.diagnosis.best.evidence["lifted run"] == "agrees"
