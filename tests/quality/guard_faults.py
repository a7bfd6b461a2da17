"""Faults of a compiler that guard must find and name: planted in Inductor, or its own.

Each comes with a program that shows it and with what a report should say. All compile for the CPU
and without caches: a cache does not know that the compiler was tampered with.
"""

# ruff: noqa: TID251  (a fault in a compiler is planted in its private parts)

from __future__ import annotations

import contextlib
import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, fx, nn

from quality.guard_program_table import Program, gradients, under

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """A way in which compiled code is wrong.

    Attributes:
        program: what shows it.
        kind: what it should be traced back to: a node, a fusion, a pass or a partition.
        names: the operator of the node, the name of the pass, or names that nodes of a set begin
            with.
        plant: while this is entered, programs are compiled wrongly.
        heal: while this is entered instead, they are not.
        backward: whether it shows in gradients alone.
    """

    program: Program
    kind: str
    names: frozenset[str]
    plant: Callable[[], AbstractContextManager[Any]] = nullcontext
    heal: Callable[[], AbstractContextManager[Any]] = nullcontext
    backward: bool = False


FAULTS: dict[str, Fault] = {}


def shown_by(kind: str, *names: str, **more: Any) -> Callable[[Program], Program]:
    """Enter a fault into the table under the name of the program that shows it."""

    def enter(program: Program) -> Program:
        FAULTS[program.__name__] = Fault(program, kind, frozenset(names), **more)
        return program

    return enter


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[None]:
    with without_caches(), fault.plant():
        yield


@contextlib.contextmanager
def healed(fault: Fault) -> Iterator[None]:
    with without_caches(), fault.heal():
        yield


@contextlib.contextmanager
def without_caches() -> Iterator[None]:
    """The compiler's own caches off; code that reads the same in C++ may still be found built."""
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


# --- ways to plant --------------------------------------------------------------------------------


def setting(name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: torch._inductor.config.patch({name: value})


def wrong_operation(name: str, wrong: str) -> Callable[[], AbstractContextManager[Any]]:
    """Let the C++ of an operation read as `wrong`, in which `{}` stands for the right one."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides

        with contextlib.ExitStack() as stack:
            for generator in (CppOverrides, CppVecOverrides):
                right = getattr(generator, name)
                # Of the operand's own type: a bare number would turn a vector into a scalar.
                template = staticmethod(
                    lambda x, right=right: wrong.format(right(x), number=f"decltype({x})")
                )
                stack.enter_context(mock.patch.object(generator, name, template))
            yield

    return plant


@contextlib.contextmanager
def wrong_exp_beside_tanh() -> Iterator[None]:
    """Let exp be one percent off, but only in a kernel that computes a tanh before it."""
    from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides
    from torch._inductor.virtualized import V

    kernels: list[Any] = []
    with contextlib.ExitStack() as stack:
        for generator in (CppOverrides, CppVecOverrides):

            def tanh(x: Any, right: Any = generator.tanh) -> str:
                kernels.append(V.kernel)
                return right(x)

            def exp(x: Any, right: Any = generator.exp) -> str:
                beside = any(kernel is V.kernel for kernel in kernels)
                return f"({right(x)}) * decltype({x})(1.01)" if beside else right(x)

            stack.enter_context(mock.patch.object(generator, "tanh", staticmethod(tanh)))
            stack.enter_context(mock.patch.object(generator, "exp", staticmethod(exp)))
        yield


def wrong_pass(
    option: str, change: Callable[[fx.Graph], None]
) -> Callable[[], AbstractContextManager[Any]]:
    """Let Inductor run a pass of the user's own that changes what is computed."""
    return setting(option, change)


@contextlib.contextmanager
def no_copy_back() -> Iterator[None]:
    """Let the generated code leave out what it should write to its inputs."""
    from torch._inductor.lowering import lowerings

    with mock.patch.dict(lowerings, {aten.copy_.default: lambda target, *_: target}):
        yield


def replace(old: Any, new: Any) -> Callable[[fx.Graph], None]:
    def change(graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=old):
            node.target = new

    return change


def negate_gradients_of_sin(graph: fx.Graph) -> None:
    """Of a backward graph, which alone has tangents among its inputs."""
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    if any(name.startswith("tangents") for name in names):
        replace(aten.cos.default, aten.sin.default)(graph)


# --- planted faults -------------------------------------------------------------------------------

WRONG_RELU = setting("cpp.inject_relu_bug_TESTING_ONLY", "accuracy")


@shown_by("node", "aten.relu.default", plant=WRONG_RELU)
def relu_codegen(backend: Any) -> Any:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(4, 8)
    with torch.no_grad():
        return under(backend, model)(x)


@shown_by(
    "node", "aten.log1p.default", plant=setting("cpp.inject_log1p_bug_TESTING_ONLY", "accuracy")
)
def log1p_codegen(backend: Any) -> Any:
    return under(backend, lambda x: x.abs().log1p())(torch.randn(8, 16))


@shown_by(
    "node",
    "aten.exp.default",
    plant=wrong_operation("exp", "({}) * {number}(1.0005)"),
    backward=True,
)
def exp_slightly_wrong_in_backward(backend: Any) -> Any:
    linear, x = nn.Linear(8, 16), torch.randn(4, 8, requires_grad=True)
    y = under(backend, lambda x: F.gelu(linear(x)))(x)
    y.sum().backward()
    return [y, x.grad, *gradients(linear)]


@shown_by("fusion", "exp", "tanh", plant=wrong_exp_beside_tanh)
def exp_wrong_when_fused_with_tanh(backend: Any) -> Any:
    return under(backend, lambda x: x.tanh().exp() + 1)(torch.randn(16, 16))


@shown_by("node", "aten.relu.default", plant=WRONG_RELU)
def relu_codegen_behind_dropout(backend: Any) -> Any:
    model = nn.Sequential(nn.Dropout(0.5), nn.ReLU())
    y = under(backend, model)(torch.randn(4, 8))
    return (y >= 0).all() & (y == 0).any()


@shown_by(
    "pass",
    "post_grad_custom_post_pass",
    plant=wrong_pass("post_grad_custom_post_pass", replace(aten.sin.default, aten.cos.default)),
)
def post_grad_pass_in_forward(backend: Any) -> Any:
    return under(backend, lambda x: torch.sin(x) + x)(torch.randn(8, 8))


@shown_by(
    "pass",
    "post_grad_custom_post_pass",
    plant=wrong_pass("post_grad_custom_post_pass", negate_gradients_of_sin),
    backward=True,
)
def post_grad_pass_in_backward(backend: Any) -> Any:
    x = torch.randn(8, 8, requires_grad=True)
    y = under(backend, lambda x: torch.sin(x) + x)(x)
    y.sum().backward()
    return [y, x.grad]


@shown_by(
    "pass",
    "joint_custom_post_pass",
    plant=wrong_pass("joint_custom_post_pass", replace(aten.sin.default, aten.cos.default)),
)
def joint_pass(backend: Any) -> Any:
    x = torch.randn(8, 8, requires_grad=True)
    y = under(backend, lambda x: torch.sin(x) + x)(x)
    y.sum().backward()
    return [y, x.grad]


@shown_by(
    "pass",
    "pre_grad_custom_pass",
    plant=wrong_pass("pre_grad_custom_pass", replace(torch.sin, torch.cos)),
)
def pre_grad_pass(backend: Any) -> Any:
    return under(backend, lambda x: torch.sin(x) + x)(torch.randn(8, 8))


@shown_by("node", "aten.copy_.default", plant=no_copy_back)
def mutation_left_out(backend: Any) -> Any:
    def write(x: Tensor) -> Tensor:
        x.mul_(2).add_(1)
        return x.sum()

    x = torch.randn(4, 8)
    return [under(backend, write)(x), x]


@shown_by("node", "aten.tanh.default", plant=wrong_operation("tanh", "({}) * {number}(1.9)"))
def tiny_output_wrong(backend: Any) -> Any:
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)
    with torch.no_grad():
        return under(backend, lambda x: linear(x).tanh() * 1e-5)(x)


@contextlib.contextmanager
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def healed_layout() -> Iterator[None]:
    with two_threads(), torch._inductor.config.patch(layout_optimization=False):
        yield


# --- faults that torch 2.13 has of itself ---------------------------------------------------------


def budget(share: float) -> Callable[[], AbstractContextManager[Any]]:
    """How much of the activations the split into forward and backward may keep."""
    return lambda: torch._functorch.config.patch(activation_memory_budget=share)


@shown_by("partition", plant=budget(0.5), heal=budget(1.0), backward=True)
def dropout_drawn_again_in_backward(backend: Any) -> Any:
    """pytorch#190758: the mask is drawn a second time, so gradients flow through other elements."""
    x, weight = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32)
    y = under(backend, lambda x: F.dropout((x @ weight).sin(), 0.5, training=True).sin())(x)
    y.sum().backward()
    hidden = (x @ weight).detach().requires_grad_()
    (hidden.sin() * (y != 0) * 2).sin().sum().backward()
    return torch.allclose(x.grad, hidden.grad @ weight.T, atol=1e-4)


@shown_by(
    "fusion",
    "convolution_backward",
    # With one thread another loop is generated, and the fault does not show.
    plant=two_threads,
    heal=healed_layout,
    backward=True,
)
def gradients_of_pooled_convolution(backend: Any) -> Any:
    """pytorch#185509: gradients are off by hundreds unless layouts are left alone."""

    def choose(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = F.interpolate(x, scale_factor=(1.5, 1.25), mode="bilinear", align_corners=False)
        convolved = F.conv2d(y[:, :, 1:7, 1:8], weight, bias, padding=1)
        pooled = F.max_pool2d(convolved, kernel_size=3, stride=1, padding=1)
        return torch.where(convolved > pooled.mean((2, 3), keepdim=True), convolved, pooled)

    shapes = [(2, 2, 5, 7), (2, 2, 3, 3), (2,)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    y = under(backend, choose)(*inputs)
    y.square().sum().backward()
    return [y, *(x.grad for x in inputs)]


@shown_by(
    "pass", "constant_fold_uniform_value", heal=setting("joint_graph_constant_folding", False)
)
def nan_times_zero(backend: Any) -> Any:
    """A product with zero is folded to zero, although NaN times zero is NaN."""
    return under(backend, lambda x: x.log() * 0)(torch.randn(8, 8))
