"""guard() around backends whose code autograd records: right gradients pass, wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from integration.odd_backends import backend_that
from paritas import MismatchError, Verdict, guard

pytestmark = pytest.mark.usefixtures("fresh_compiler", "undiagnosed")

Program = Callable[[Tensor, Tensor], Sequence[Tensor]]
Use = Callable[..., None]


def forward(graph: GraphModule, _: list[Any]) -> Callable[..., Any]:
    return graph.forward


def interpreter(graph: GraphModule, _: list[Any]) -> Callable[..., Any]:
    return Interpreter(graph).run


def run(program: Program, use: Use, backend: Any, *, locate: bool = False) -> tuple[Verdict, bool]:
    """The verdict, and whether the gradients are eager's bit for bit."""
    guarded = guard(backend, on_mismatch="record", locate=locate)
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    gradients = []
    for function in (torch.compile(program, backend=guarded), program):
        leaves = [value.clone().requires_grad_() for value in (x, w)]
        use(function, *leaves)
        gradients.append([leaf.grad for leaf in leaves])
    return guarded.verdict(), all(map(torch.equal, *gradients))


# --- programs -------------------------------------------------------------------------------------


def used_inside(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    h = x @ w
    return h, torch.tanh(h)


def used_often(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    h = x @ w
    a = h.tanh()
    return h, a, a * h, h.sin(), (h * h).sum(), h[0] + h


def with_views(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    h = x @ w
    first, second, _ = h.unbind(0)
    return h.t(), h, first, first * second, h.view(-1).tanh()


def with_writes(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    h = x @ w
    h[0].mul_(2)
    return h, h[0], h.tanh()


def without_gradients(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    h = x @ w
    return h, h.detach(), h.argmax(), h > 0, h.relu()


def of_inputs(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    v = x.view(-1)
    return v, v.view(3, 4) @ w, (x @ w).sin(), x


def use_all(function: Program, x: Tensor, w: Tensor) -> None:
    results = [result for result in function(x, w) if result.requires_grad]
    torch.stack([(i + 1) * result.sum() for i, result in enumerate(results)]).sum().backward()


PROGRAMS = [used_inside, used_often, with_views, with_writes, without_gradients, of_inputs]


@pytest.mark.parametrize(
    ("program", "backend"),
    [
        *((program, backend) for program in PROGRAMS for backend in (forward, "aot_eager")),
        (used_often, interpreter),
    ],
)
def test_outputs_that_are_used_inside_too_are_no_alarm(program: Program, backend: Any) -> None:
    verdict, same = run(program, use_all, backend)
    assert verdict.passed, str(verdict)
    assert not verdict.coverage.skipped
    if backend != "aot_eager":  # that adds in another order
        assert same
        assert verdict.status == "identical"


# --- what a caller does with outputs --------------------------------------------------------------


def with_one_output(function: Program, x: Tensor, w: Tensor) -> None:
    function(x, w)[1].sum().backward()


def without_grad_mode(function: Program, x: Tensor, w: Tensor) -> None:
    with torch.no_grad():
        function(x, w)
    use_all(function, x, w)


def with_autocast(function: Program, x: Tensor, w: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        h, t = function(x, w)
    (3 * h.float().sum() + t.float().sum()).backward()


def with_several_passes(function: Program, x: Tensor, w: Tensor) -> None:
    h, t = function(x, w)
    h.sum().backward(retain_graph=True)
    t.sum().backward(retain_graph=True)
    (h * t).sum().backward()


def with_a_hook_on_the_last(function: Program, x: Tensor, w: Tensor) -> None:
    h, t = function(x, w)
    t.register_hook(lambda gradient: 2 * gradient)
    (3 * h.sum() + t.sum()).backward()


def with_a_write_to_an_output(function: Program, x: Tensor, w: Tensor) -> None:
    h, t = function(x, w)
    h.mul_(2)
    (3 * h.sum() + t.sum()).backward()


@pytest.mark.parametrize("backend", [forward, "aot_eager"])
@pytest.mark.parametrize(
    "use",
    [
        with_one_output,
        without_grad_mode,
        with_autocast,
        with_several_passes,
        with_a_hook_on_the_last,
        with_a_write_to_an_output,
    ],
)
def test_whatever_the_caller_does_with_outputs_is_no_alarm(use: Use, backend: Any) -> None:
    verdict, same = run(used_inside, use, backend)
    assert verdict.passed, str(verdict)
    assert same
    assert not verdict.coverage.skipped


def with_a_hook(function: Program, x: Tensor, w: Tensor) -> None:
    h, t = function(x, w)
    h.register_hook(lambda gradient: 2 * gradient)
    h.retain_grad()
    (3 * h.sum() + t.sum()).backward()
    assert h.grad is not None
    x.grad += h.grad  # compared below


def with_a_pass_that_ends_at_an_output(function: Program, x: Tensor, w: Tensor) -> None:
    h, t = function(x, w)
    torch.autograd.grad(t.sum(), h, retain_graph=True)
    h.sum().backward()


@pytest.mark.parametrize("use", [with_a_hook, with_a_pass_that_ends_at_an_output])
def test_hooks_of_the_caller_get_what_they_get_in_eager_mode(use: Use) -> None:
    verdict, same = run(used_inside, use, forward)
    assert same
    assert verdict.status == "identical"
    assert not verdict.coverage.skipped


def of_second_order(function: Program, x: Tensor, w: Tensor) -> None:
    h, t = function(x, w)
    (inner,) = torch.autograd.grad(t.sum(), x, create_graph=True)
    (inner.square().sum() + h.sum()).backward()


def test_gradients_of_gradients_are_told_to_be_unchecked_and_are_no_alarm() -> None:
    verdict, same = run(used_inside, of_second_order, forward)
    assert same
    assert verdict.passed, str(verdict)
    assert verdict.coverage.skipped == (
        "graph 0 gradients: 1 of 2 calls, because gradients of gradients may be part of them",
    )


def of_a_view(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    return (x @ w).view(-1), x * 2


def test_a_view_that_is_written_to_after_the_call_is_told_to_be_unchecked() -> None:
    verdict, same = run(of_a_view, with_a_write_to_an_output, forward)
    assert same
    assert verdict.passed, str(verdict)
    assert verdict.coverage.skipped == (
        "graph 0 gradients: 1 of 1 calls, because an output was changed in place after the call",
    )


# --- faults ---------------------------------------------------------------------------------------


def twice(value: Tensor) -> Tensor:
    """The value to the bit, with twice its gradient."""
    return value * 2 - value.detach()


def test_a_wrong_gradient_inside_is_caught_behind_an_output_that_is_used_inside() -> None:
    def wrong(_: Callable[..., Any], args: Sequence[Any], __: int) -> Any:
        h = args[0] @ args[1]
        return h, twice(torch.tanh(h))

    verdict, same = run(used_inside, use_all, backend_that(wrong), locate=True)
    assert not same
    assert {f.path for f in verdict.failures if f.origin is None} == {
        "graph 0 gradients: gradient of x",
        "graph 0 gradients: gradient of w",
    }


def test_a_wrong_gradient_below_an_output_that_is_used_inside_is_caught() -> None:
    def wrong(_: Callable[..., Any], args: Sequence[Any], __: int) -> Any:
        h = twice(args[0]) @ args[1]
        return h, torch.tanh(h)

    verdict, _ = run(used_inside, use_all, backend_that(wrong))
    assert {f.path for f in verdict.failures} == {"graph 0 gradients: gradient of x"}


def test_code_that_does_not_use_its_output_where_the_graph_does_is_no_alarm() -> None:
    def computes_it_twice(_: Callable[..., Any], args: Sequence[Any], __: int) -> Any:
        x, w = args
        return x @ w, torch.tanh(x @ w)

    verdict, _ = run(used_inside, use_all, backend_that(computes_it_twice))
    assert verdict.passed, str(verdict)


def test_the_program_goes_on_with_right_gradients_under_fallback() -> None:
    def wrong(_: Callable[..., Any], args: Sequence[Any], __: int) -> Any:
        h = args[0] @ args[1]
        return h, twice(torch.tanh(h))

    backend = guard(backend_that(wrong), on_mismatch="fallback", locate=False)
    leaves = [torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)]
    with pytest.warns(Warning, match="gradient"):
        use_all(torch.compile(used_inside, backend=backend), *leaves)
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    use_all(used_inside, *leaves)
    assert all(torch.allclose(leaf.grad, value) for leaf, value in zip(leaves, found, strict=True))


def test_a_wrong_gradient_still_raises_by_default() -> None:
    def wrong(_: Callable[..., Any], args: Sequence[Any], __: int) -> Any:
        h = twice(args[0] @ args[1])
        return h, torch.tanh(h)

    with pytest.raises(MismatchError, match="gradient of x"):
        use_all(
            torch.compile(used_inside, backend=guard(backend_that(wrong))),
            torch.randn(3, 4, requires_grad=True),
            torch.randn(4, 4, requires_grad=True),
        )
