"""The programs for which compilers' checks were first written, run under guard().

Half of them ask whether the check itself works, with backends that are right or wrong on purpose;
the other half are convolutions, whose layout in memory a compiler likes to change.
"""

from __future__ import annotations

import operator
import os
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx._lazy_graph_module import _force_skip_lazy_graph_module

from paritas import guard
from quality.guard_program_table import disagreements, inductor_settings, outside
from quality.guard_programs_special import group_of_one

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    # Dynamo looks at the inputs of the graph after a break.
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    # Layouts are asked for here, and kernels with vectors in `quality/test_guard_planted.py`.
    pytest.mark.usefixtures("fresh_compiler", "scalar_kernels"),
]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
on_devices = pytest.mark.parametrize("device", DEVICES)
# Training has all of inference in it, which is run by itself where all is asked for.
WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
TRAIN = [False, True] if WHOLE else [True]
in_training = pytest.mark.parametrize(
    "train", TRAIN, ids=lambda train: "training" if train else "inference"
)


@pytest.fixture(autouse=True)
def without_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """These compare with eager closely, which on a GPU may round to TF32 and back."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def guarded(
    function: Callable[..., Any], *, check_passes: bool = True, **options: Any
) -> tuple[Callable[..., Any], Any]:
    """The function compiled by Inductor, and the guard that watches it and raises.

    Passes are checked where they are not like those over programs of test_guard_passes_correct.py.
    """
    backend = guard("inductor", check_passes=check_passes)
    return torch.compile(function, backend=backend, **options), backend


def assert_checked(backend: Any) -> None:
    verdict = backend.verdict()
    assert verdict.passed, str(verdict)
    assert verdict.coverage.compared > 0


# --- backends that are right or wrong on purpose --------------------------------------------------


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def branching(a: Tensor, b: Tensor) -> Tensor:
    """Two graphs: the branch depends on values."""
    scaled = a / (a.abs() + 1)
    if b.sum() < 0:
        b = b * -1
    return scaled * b


def adding_instead_of_multiplying(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    del inputs
    for node in graph.graph.find_nodes(op="call_function", target=operator.mul):
        node.target = operator.add
    graph.graph.lint()
    graph.recompile()
    return graph.forward


def test_a_backend_is_given_example_inputs_it_can_run_the_graph_on() -> None:
    seen: list[Tensor] = []

    def running(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append(graph(*inputs)[0])
        return graph.forward

    def fractions(a: Tensor, pair: tuple[Tensor, Tensor], d: int) -> Tensor:
        return a / d - pair[0] / pair[1]

    inputs = torch.full((2,), 1.0), (torch.full((2,), 2.0), torch.full((2,), 3.0)), 4
    backend = guard(running)
    result = torch.compile(fractions, backend=backend, fullgraph=True)(*inputs)
    expected = fractions(*inputs)
    assert [(value.shape, value.device) for value in seen] == [(expected.shape, expected.device)]
    torch.testing.assert_close(result, expected)
    assert_checked(backend)


@pytest.mark.filterwarnings("ignore:The TorchScript type system")  # of what Dynamo gives it
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_is_silent() -> None:
    model, x = Layers(), torch.randn(10)
    backend = guard("ts")
    with _force_skip_lazy_graph_module():  # TorchScript cannot read a lazy one
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert_checked(backend)


def test_a_wrong_transform_raises() -> None:
    a, b = torch.randn(10), torch.randn(10)
    backend = guard(adding_instead_of_multiplying)
    with pytest.raises(RuntimeError, match="different"):
        torch.compile(branching, backend=backend)(a, b)
    assert backend.verdict().exit_code == 1


def test_a_wrong_transform_is_let_through_where_the_guard_is_off() -> None:
    a, b = torch.randn(10), torch.randn(10)
    backend = guard(adding_instead_of_multiplying, enabled=False)
    result = torch.compile(branching, backend=backend)(a, b)
    assert disagreements(branching(a, b), result)
    assert not backend.verdict().passed


# --- convolutions across graph breaks -------------------------------------------------------------


class TwoConvolutions(nn.Module):
    def __init__(self, *, breaking: bool, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, kernel_size=3, stride=2, bias=False)
        self.second = nn.Conv2d(width, width, kernel_size=3, stride=2, bias=False)
        self.between = outside if breaking else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


class ThreeConvolutions(nn.Module):
    """A patch embedding, one kernel for each channel, and one for each pixel."""

    def __init__(self, *, breaking: bool, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=7, stride=7, bias=False)
        self.spatial = nn.Conv2d(width, width, 7, groups=width, padding="same", bias=False)
        self.mixing = nn.Conv2d(width, width, kernel_size=1, bias=False)
        self.between = outside if breaking else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.mixing(self.between(self.spatial(self.patches(x))))


def run_or_train(model: nn.Module, x: Tensor, *, train: bool) -> list[Tensor]:
    y = model(x)
    if not train:
        return [y]
    model.zero_grad()
    y.sum().backward()
    return [y, *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.slow
@on_devices
@in_training
@pytest.mark.parametrize("model_class", [ThreeConvolutions, *([TwoConvolutions] if WHOLE else [])])
def test_convolutions_across_a_graph_break(model_class: Any, train: bool, device: str) -> None:
    model, x = model_class(breaking=True).to(device), torch.rand(2, 3, 16, 16, device=device)
    expected = run_or_train(model, x, train=train)
    compiled, backend = guarded(model, check_passes=WHOLE)
    assert not disagreements(expected, run_or_train(compiled, x, train=train))
    assert_checked(backend)
    assert len(backend.journal.graphs) == (4 if train else 2)


@pytest.mark.slow
@on_devices
# Of a depthwise weight, whose strides can be told in two ways; torch says so without compiling.
@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")
@in_training
@pytest.mark.parametrize("model_class", [TwoConvolutions, *([ThreeConvolutions] if WHOLE else [])])
def test_convolutions_of_a_data_parallel_model(model_class: Any, train: bool, device: str) -> None:
    model, x = model_class(breaking=False).to(device), torch.rand(2, 3, 16, 16, device=device)
    expected = run_or_train(model, x, train=train)
    with group_of_one():
        parallel = nn.parallel.DistributedDataParallel(model)
        compiled, backend = guarded(parallel, check_passes=WHOLE)
        result = run_or_train(compiled, x, train=train)
    assert not disagreements(expected, result)
    assert_checked(backend)


# --- layout of what the user sees -----------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("freezing", [False, True], ids=["plain", "frozen"])
def test_the_output_of_a_convolution_can_be_viewed_as_in_eager(freezing: bool, device: str) -> None:
    model = nn.Conv2d(3, 128, kernel_size=3, padding=1, bias=False).to(device)
    x = torch.randn(2, 3, 5, 5, device=device)
    with torch.no_grad(), inductor_settings(freezing=freezing):
        compiled, backend = guarded(model)
        expected, result = model(x), compiled(x)
    assert not disagreements(expected.view(5, -1), result.view(5, -1))
    assert_checked(backend)


# --- writing to a view, or to what is viewed ------------------------------------------------------


@on_devices
def test_writing_to_a_view_or_to_what_is_viewed(device: str) -> None:
    """Of inputs, and of the output of a convolution; all in one program, which is compiled once."""
    convolution = nn.Conv2d(3, 64, kernel_size=3, stride=2, bias=False).to(device)

    def doubled(x: Tensor, written: str) -> Tensor:
        base = convolution(x)
        view = base.view(-1)
        (base if written == "base" else view).mul_(2)
        return view if written == "base" else base

    def program(viewed: Tensor, base: Tensor, image: Tensor) -> list[Tensor]:
        viewed.view(3, 2).mul_(2)
        view = base.view(3, 2)
        base.mul_(2)
        return [view, doubled(image, "base"), doubled(image, "view")]

    viewed, base = torch.ones(2, 3, device=device), torch.ones(2, 3, device=device)
    image = torch.rand(2, 3, 16, 16, device=device)
    compiled, backend = guarded(program)
    view, *outputs = compiled(viewed, base, image)
    assert torch.equal(viewed, torch.full_like(viewed, 2))
    assert torch.equal(view, torch.full_like(view, 2))
    assert torch.equal(base.view(3, 2), view)
    assert not disagreements([doubled(image, "base"), doubled(image, "view")], outputs)
    assert_checked(backend)


# --- sizes that change, losses --------------------------------------------------------------------


@on_devices
def test_dynamic_sizes_with_their_gradients(device: str) -> None:
    def waves(a: Tensor, b: Tensor) -> Tensor:
        return a.sin() + b.cos()

    compiled, backend = guarded(waves, dynamic=True)
    for size in (4, 8, 16):
        a = torch.randn(2, size, device=device, requires_grad=True)
        b = torch.randn(2, size, device=device)
        y = compiled(a, b)
        y.sum().backward()
        assert not disagreements([waves(a, b), a.cos()], [y, a.grad])
    assert_checked(backend)
    assert [entry.checked for entry in backend.journal.graphs] == [3, 3]


class Labelling(nn.Module):
    """A class for every step of a sequence, by way of a convolution and two reshapes."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, classes, 3, padding="same")
        self.linear = nn.Linear(features * classes, classes)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.convolution(x)
        batch, classes, steps, features = x.shape
        x = self.linear(x.reshape(batch, steps, classes * features))
        return F.cross_entropy(x.reshape(batch, classes, steps), targets)


@on_devices
def test_a_loss_over_reshaped_convolutions_trains(device: str) -> None:
    model = Labelling(features=9, classes=11).to(device)
    x = torch.ones(4, 1, 12, 9, device=device)
    targets = torch.randint(0, 10, (4, 12), device=device)
    expected = run_loss(model, model, x, targets)
    compiled, backend = guarded(model, check_passes=WHOLE)
    assert not disagreements(expected, run_loss(compiled, model, x, targets))
    assert_checked(backend)


def run_loss(run: Any, model: nn.Module, x: Tensor, targets: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = run(x, targets)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def test_nothing_here_warns_of_what_was_not_checked() -> None:
    """`warn` tells of a mismatch and of what could not be checked; a right program does neither."""
    backend = guard("inductor", on_mismatch="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(lambda x: x.sin() * 2, backend=backend)(torch.randn(8))
    assert_checked(backend)
