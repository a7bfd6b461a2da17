"""guard() around backends it cannot look into: what it catches, lets pass, and does about it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx._lazy_graph_module import _force_skip_lazy_graph_module
from torch.utils.checkpoint import checkpoint

from integration.odd_backends import backend_that, on_results
from paritas import MismatchError, ParityWarning, Status, guard
from quality.guard_program_table import disagreements

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler", "undiagnosed"),
    # What TorchScript says of itself, and of what Dynamo gives it.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The TorchScript type system"),
]


def aspects(backend: Any) -> set[str]:
    """What the guard says is wrong, leaving out what it says of where it begins."""
    return {f.aspect.value for f in backend.verdict().failures if f.origin is None}


def failing_paths(backend: Any) -> str:
    return " ".join(finding.path for finding in backend.verdict().failures)


# --- wrong backends -------------------------------------------------------------------------------


def test_a_backend_that_turns_wrong_is_caught_at_the_first_wrong_call() -> None:
    backend = guard(on_results(lambda y: y * 1.001, first=1))
    compiled = torch.compile(lambda x: x.sin(), backend=backend)
    compiled(torch.randn(8))
    assert backend.verdict().passed
    with pytest.raises(MismatchError):
        compiled(torch.randn(8))
    assert not backend.verdict().passed


def test_a_wrong_gradient_behind_right_values_is_caught() -> None:
    # 2 y - y is y, to the bit, but its gradient is twice that of y.
    backend = guard(on_results(lambda y: y * 2 - y.detach()))
    x = torch.randn(8, requires_grad=True)
    y = torch.compile(lambda x: x.sin(), backend=backend)(x)
    assert backend.verdict().passed
    with pytest.raises(MismatchError, match="gradient"):
        y.sum().backward()


def test_a_gradient_that_is_cut_off_is_caught() -> None:
    backend = guard(on_results(lambda y: y.detach()), on_mismatch="record")
    x = torch.randn(8, requires_grad=True)
    torch.compile(lambda x: x.sin(), backend=backend)(x)
    assert aspects(backend) == {"requires_grad"}


def test_a_write_to_an_input_that_is_left_out_is_caught() -> None:
    def on_copies(graph: Callable[..., Any], args: Sequence[Any], _: int) -> Any:
        return graph(*(value.clone() for value in args))

    backend = guard(backend_that(on_copies), on_mismatch="record")
    x = torch.randn(8)
    torch.compile(lambda x: x.add_(1).sum(), backend=backend)(x)
    assert "x" in failing_paths(backend)
    assert aspects(backend) <= {"value", "alias"}
    assert not backend.verdict().passed


def test_an_output_that_is_the_input_instead_of_a_copy_is_caught() -> None:
    backend = guard(backend_that(lambda _, args, __: (args[0],)), on_mismatch="record")
    torch.compile(lambda x: x.clone(), backend=backend)(torch.randn(8))
    assert aspects(backend) == {"alias"}


def test_an_output_that_is_a_copy_instead_of_a_view_is_caught() -> None:
    backend = guard(on_results(lambda y: y.clone()), on_mismatch="record")
    torch.compile(lambda x: (x.sin(), x.view(2, 4)), backend=backend)(torch.randn(8))
    assert "alias" in aspects(backend)


def test_another_dtype_is_caught() -> None:
    backend = guard(on_results(lambda y: y.double()), on_mismatch="record")
    torch.compile(lambda x: x * 2, backend=backend)(torch.ones(8))
    assert aspects(backend) == {"dtype"}


def test_a_shape_that_would_broadcast_is_caught() -> None:
    backend = guard(on_results(lambda y: y[None]), on_mismatch="record")
    torch.compile(lambda x: x * 2, backend=backend)(torch.ones(8))
    assert "shape" in aspects(backend)


def test_another_layout_in_memory_is_caught() -> None:
    backend = guard(on_results(lambda y: y.t().contiguous().t()), on_mismatch="record")
    torch.compile(lambda x: x * 2, backend=backend)(torch.ones(4, 8))
    assert aspects(backend) == {"stride"}


def test_a_write_to_an_input_that_should_not_be_is_caught() -> None:
    def overwriting(graph: Callable[..., Any], args: Sequence[Any], _: int) -> Any:
        results = graph(*args)
        args[0].add_(1)
        return results

    backend = guard(backend_that(overwriting), on_mismatch="record")
    torch.compile(lambda x: x.sin(), backend=backend)(torch.randn(8))
    assert "x" in failing_paths(backend)
    assert not backend.verdict().passed


def test_random_numbers_that_should_not_be_drawn_are_caught() -> None:
    def drawing(graph: Callable[..., Any], args: Sequence[Any], _: int) -> Any:
        torch.rand(3)
        return graph(*args)

    backend = guard(backend_that(drawing), on_mismatch="record")
    torch.compile(lambda x: x.sin(), backend=backend)(torch.randn(8))
    assert aspects(backend) == {"rng"}


@pytest.mark.parametrize(
    ("what", "path"), [("write", "x after backward"), ("draw", "random state"), ("nothing", "")]
)
def test_what_a_backward_pass_does_besides_is_caught(what: str, path: str) -> None:
    def besides(graph: Callable[..., Any], args: Sequence[Any], _: int) -> Any:
        def hook(_: Tensor) -> None:
            if what == "write":
                args[0].data.add_(1)  # where autograd does not see it
            elif what == "draw":
                torch.rand(1)

        args[0].register_hook(hook)
        return graph(*args)

    backend = guard(backend_that(besides), on_mismatch="record", locate=False)
    x = torch.randn(8, requires_grad=True)
    for _ in range(2):
        y = torch.compile(lambda x: x * 2, backend=backend)(x)
        torch.rand(1)  # the caller's own, between the two passes
        y.sum().backward()
    assert path in failing_paths(backend)
    assert backend.verdict().passed is (what == "nothing")


def test_a_missing_output_is_caught() -> None:
    backend = guard(backend_that(lambda graph, args, _: graph(*args)[:1]), on_mismatch="record")
    with pytest.raises(Exception):  # noqa: B017, PT011  (whatever Dynamo's own code runs into)
        torch.compile(lambda x: (x.sin(), x.cos()), backend=backend)(torch.randn(8))
    assert not backend.verdict().passed


def test_an_exception_of_the_compiled_code_is_a_finding_and_goes_on() -> None:
    def failing(*_: Any) -> Any:
        raise ArithmeticError("no such kernel")

    backend = guard(backend_that(failing), on_mismatch="record")
    with pytest.raises(ArithmeticError, match="no such kernel"):
        torch.compile(lambda x: x.sin(), backend=backend)(torch.randn(8))
    assert aspects(backend) == {"exception"}
    (finding,) = backend.verdict().failures
    assert (finding.path, finding.status) == ("graph 0: call", Status.UNVERIFIED)
    assert finding.reason == (
        "the compiled code raises ArithmeticError: no such kernel; the graph does not"
    )


def test_an_exception_of_the_compiled_code_is_the_programs_own_and_falls_back_if_asked() -> None:
    def failing(*_: Any) -> Any:
        raise ArithmeticError("no such kernel")

    x = torch.randn(8)
    raising, falling_back = (
        torch.compile(lambda x: x.sin(), backend=guard(backend_that(failing), on_mismatch=action))
        for action in ("raise", "fallback")
    )
    told = pytest.warns(ParityWarning, match="unverified")
    with told, pytest.raises(ArithmeticError, match="no such kernel"):
        raising(x)
    with told:
        given = falling_back(x)
    assert torch.equal(given, x.sin())


def test_a_backend_that_compiles_no_other_graph_is_said_to() -> None:
    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        if len(graph.graph.find_nodes(op="output")[0].args[0]) > 1 or len(graph.graph.nodes) < 5:
            raise NotImplementedError("one output, and three operators at least")
        return lambda *args: [result * 1.5 for result in graph(*args)]

    guarded = guard(backend, on_mismatch="record")
    torch.compile(lambda x: x.sin().cos().exp(), backend=guarded)(torch.randn(6))
    (finding,) = [one for one in guarded.verdict().failures if one.origin is not None]
    assert "parts of the graph could not be run, the first: NotImplementedError" in finding.reason
    assert "one output, and three operators at least" in finding.reason


def test_a_fault_that_is_not_seen_again_is_reported_for_the_whole_graph() -> None:
    calls = []

    def wrong_once(graph: Any, args: Any, _: Any) -> Any:
        calls.append(1)
        return [value + (len(calls) == 1) for value in graph(*args)]

    backend = guard(backend_that(wrong_once), on_mismatch="record")
    torch.compile(lambda x: x.sin(), backend=backend)(torch.randn(8))
    assert "graph 0: the whole graph" in failing_paths(backend)


# --- right backends -------------------------------------------------------------------------------


def training(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm((x @ weight).relu(), (8,)).softmax(-1)


def with_dropout(x: Tensor, weight: Tensor) -> Tensor:
    return F.dropout((x @ weight).sin(), 0.5, training=True)


def with_autocast(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ weight).relu()


def with_checkpoint(x: Tensor, weight: Tensor) -> Tensor:
    return checkpoint(training, x, weight, use_reentrant=False).cos()


def with_a_write(x: Tensor, weight: Tensor) -> Tensor:
    y = x * 2
    y[0].add_(1)
    return y @ weight


def with_checkpoint_and_dropout(x: Tensor, weight: Tensor) -> Tensor:
    return checkpoint(with_dropout, x, weight, use_reentrant=False).cos()


ANYWHERE = (training, with_dropout, with_a_write)
RIGHT = {
    # Of a captured checkpoint, the backend "eager" draws a dropout's mask anew in backward.
    "eager": (*ANYWHERE, with_autocast, with_checkpoint),
    "aot_eager": (*ANYWHERE, with_autocast, with_checkpoint, with_checkpoint_and_dropout),
    # TorchScript takes neither autocast nor checkpoints from Dynamo.
    "ts": ANYWHERE,
}


@pytest.mark.parametrize(("name", "program"), [(n, p) for n, all_ in RIGHT.items() for p in all_])
def test_a_right_backend_is_silent(name: str, program: Callable[..., Tensor]) -> None:
    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        x, weight = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
        results = []
        for _ in range(2):
            y = function(x, weight)
            y.float().square().sum().backward()
            results.append(y)
        return [*results, x.grad, weight.grad, torch.rand(1)]

    backend = guard(name)
    with _force_skip_lazy_graph_module():  # TorchScript cannot read a lazy one
        result = run(torch.compile(program, backend=backend))
    assert not disagreements(run(program), result)
    verdict = backend.verdict()
    assert verdict.passed, str(verdict)
    compared = {finding.path.split(": ")[-1] for finding in verdict.findings}
    assert any("gradient" in path for path in compared), compared
    assert not [f for f in verdict.findings if f.status is Status.UNVERIFIED]


def test_a_compiler_may_leave_out_random_numbers_that_nothing_uses() -> None:
    def program(x: Tensor) -> Tensor:
        torch.rand([])  # as layers that may be dropped, in evaluation
        return x.sin()

    backend = guard("aot_eager")
    torch.compile(program, backend=backend)(torch.ones(3, requires_grad=True)).sum().backward()
    assert backend.verdict().passed, str(backend.verdict())


def trained(backend: Any) -> list[Tensor]:
    """The parameters after three steps of an optimizer that is compiled."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    step = optimizer.step if backend is None else torch.compile(optimizer.step, backend=backend)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_compiled_step_of_an_optimizer_is_checked_and_done_once() -> None:
    backend = guard("eager")
    assert all(map(torch.equal, trained(None), trained(backend)))
    assert backend.verdict().status is Status.IDENTICAL


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_step_of_an_optimizer_that_writes_something_else_is_caught() -> None:
    def wrong(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            results = graph.forward(*args)
            next(graph.parameters()).data.mul_(1.01)
            return results

        return run

    backend = guard(wrong, on_mismatch="record", locate=False)
    trained(backend)
    assert "params" in failing_paths(backend)


# --- what follows a mismatch ----------------------------------------------------------------------


def test_raise_stops_the_program_before_it_goes_on_with_wrong_values() -> None:
    compiled = torch.compile(lambda x: x.sin(), backend=guard(on_results(lambda y: y + 1)))
    with pytest.raises(MismatchError) as caught:
        compiled(torch.randn(8))
    assert caught.value.verdict.exit_code == 1


def test_warn_goes_on_with_the_candidates_values() -> None:
    backend = guard(on_results(lambda y: y + 1), on_mismatch="warn")
    x = torch.randn(8)
    with pytest.warns(ParityWarning, match="different"):
        y = torch.compile(lambda x: x.sin(), backend=backend)(x)
    torch.testing.assert_close(y, x.sin() + 1)


def test_record_says_nothing_and_goes_on_with_the_candidates_values() -> None:
    backend = guard(on_results(lambda y: y + 1), on_mismatch="record")
    x = torch.randn(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = torch.compile(lambda x: x.sin(), backend=backend)(x)
    torch.testing.assert_close(y, x.sin() + 1)
    assert backend.verdict().exit_code == 1


def test_fallback_gives_the_references_values_and_their_gradients() -> None:
    backend = guard(on_results(lambda y: y + 1), on_mismatch="fallback")
    x = torch.randn(8, requires_grad=True)
    with pytest.warns(ParityWarning):
        y = torch.compile(lambda x: x.sin(), backend=backend)(x)
    torch.testing.assert_close(y, x.sin())
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_fallback_makes_the_references_writes_to_inputs() -> None:
    def on_copies(graph: Callable[..., Any], args: Sequence[Any], _: int) -> Any:
        return graph(*(value.clone() for value in args))

    backend = guard(backend_that(on_copies), on_mismatch="fallback")
    x = torch.zeros(8)
    with pytest.warns(ParityWarning):
        torch.compile(lambda x: x.add_(1).sum(), backend=backend)(x)
    assert torch.equal(x, torch.ones(8))


def test_fallback_undoes_writes_that_should_not_be() -> None:
    def overwriting(graph: Callable[..., Any], args: Sequence[Any], _: int) -> Any:
        results = graph(*args)
        args[0].add_(1)
        return results

    backend = guard(backend_that(overwriting), on_mismatch="fallback")
    x = torch.zeros(8)
    with pytest.warns(ParityWarning):
        torch.compile(lambda x: x.cos(), backend=backend)(x)
    assert torch.equal(x, torch.zeros(8))


def test_fallback_trains_as_eager_does() -> None:
    def trained(run: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = run(model)
        for _ in range(3):
            optimizer.zero_grad()
            compiled(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        return list(model.parameters())

    backend = guard(on_results(lambda y: y * 1.5), on_mismatch="fallback")
    with pytest.warns(ParityWarning):
        result = trained(lambda model: torch.compile(model, backend=backend))
    assert not disagreements(trained(lambda model: model), result)
