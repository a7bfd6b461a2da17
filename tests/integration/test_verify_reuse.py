"""The compiled program of the caller is called as it is: verifying compiles it natively no more."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import processes
from paritas import Inputs, Status, VerifyConfig, verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.fx import GraphModule

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # Dynamo asks each input for its gradient.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Counting:
    """A backend that runs graphs as they are, and counts its native ones.

    Attributes:
        native: the number of nodes of each graph that was not widened to float64.
        dynamic: of each graph, also of the others, whether it has symbolic sizes.
    """

    def __init__(self) -> None:
        self.native: list[int] = []
        self.dynamic: list[bool] = []

    def __call__(
        self, graph: GraphModule, example_inputs: list[Any], mode: str = ""
    ) -> Callable[..., Any]:
        """Count the graph and return it."""
        del mode
        self.dynamic.append(any(isinstance(value, torch.SymInt) for value in example_inputs))
        values = [value for value in example_inputs if isinstance(value, torch.Tensor)]
        if all(value.dtype is not torch.float64 for value in values):
            self.native.append(len(graph.graph.nodes))
        return graph.forward


@dataclasses.dataclass(frozen=True)
class Case:
    """A program as a user compiles, calls and verifies it.

    Attributes:
        make: makes the model or function.
        inputs: makes its inputs.
        compile: compiles it, with a backend.
        around: what is set around the call and the check.
        trains: whether the user makes a backward pass.
    """

    make: Callable[[], Any]
    inputs: Callable[[], Inputs]
    compile: Callable[[Any, Any], Any] = lambda model, backend: torch.compile(
        model, backend=backend
    )
    around: Callable[[], Any] = torch.enable_grad
    trains: bool = True


def normal(*shape: int, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).requires_grad_(grad)


def layers(*extra: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), *extra, nn.Linear(16, 8))


class Language(nn.Module):
    """A model with a loss, a weight that is used twice, and an object of keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        """Return logits, and a loss if there are labels."""
        logits = self.head(self.layer(self.embedding(ids)).tanh())
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Counter(nn.Module):
    """A model with buffers that change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count the calls."""
        self.calls += 1
        return self.norm(self.layer(x)) + self.calls


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Leave the graph between two layers."""
        y = self.first(x)
        torch._dynamo.graph_break()  # noqa: TID251
        return self.second(y).relu()


class Outer(nn.Module):
    """An eager model around a compiled submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = layers()
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run both."""
        return self.last(self.inner(x))


@dataclasses.dataclass
class Cache:
    """An object that a model gets and returns."""

    keys: torch.Tensor


class Holder:
    """An object of a class that nobody knows."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def combine(a: torch.Tensor, b: torch.Tensor | None = None, scale: float = 2.0) -> torch.Tensor:
    return (a * scale if b is None else a + b).sin()


def of_batch(batch: dict[str, Any]) -> dict[str, Any]:
    first, second = batch["pair"]
    return {"y": first * second.sum() + batch["x"], "same": batch["x"] is first}


def of_holder(x: torch.Tensor, holder: Holder) -> torch.Tensor:
    return x + holder.tensor if holder.tensor is x else x - holder.tensor


def of_caches(first: Cache, second: Cache) -> torch.Tensor:
    return first.keys + 1 if first is second else second.keys - 1


def of_lists(first: list[torch.Tensor], second: list[torch.Tensor]) -> torch.Tensor:
    return first[0] + 1 if first is second else second[0] - 1


def compile_inner(outer: Any, backend: Any) -> Any:
    outer.inner = torch.compile(outer.inner, backend=backend)
    return outer


def compile_in_place(model: Any, backend: Any) -> Any:
    model.compile(backend=backend)
    return model


_IN_PLACE = (compile_inner, compile_in_place)


def positional(*shape: int, grad: bool = False) -> Callable[[], Inputs]:
    return lambda: Inputs((normal(*shape, grad=grad),))


def twice() -> Inputs:
    x = normal(4, 8)
    return Inputs((x,), {"b": x})


def tokens() -> torch.Tensor:
    return torch.arange(12).reshape(2, 6) % 32


def with_labels() -> Inputs:
    ids = tokens()
    return Inputs((), {"ids": ids, "labels": ids})


def nested() -> Inputs:
    x = normal(4, 8)
    return Inputs(({"x": x, "pair": [x, x]},))


def slice_and_base() -> Inputs:
    base = normal(4, 8)
    return Inputs((base[:2], base.narrow(0, 2, 2)))


def held() -> Inputs:
    x = normal(4, 8)
    return Inputs((x, Holder(x)))


def one_cache() -> Inputs:
    cache = Cache(normal(4, 8))
    return Inputs((cache, cache))


def one_list() -> Inputs:
    items = [normal(4, 8)]
    return Inputs((items, items))


def marked() -> Inputs:
    x = normal(4, 8)
    torch._dynamo.mark_dynamic(x, 0)  # noqa: TID251
    return Inputs((x,))


def written_leaf() -> Inputs:
    x = normal(4, 8, grad=True).clone()
    return Inputs((x, x))


def write_twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.mul_(2)
    return a + b if a is b else a - b


def with_gradient() -> Inputs:
    x = normal(4, 8, grad=True)
    x.grad = torch.ones_like(x)
    return Inputs((x,))


CASES = {
    "plain": Case(layers, positional(4, 8)),
    "eval": Case(lambda: layers().eval(), positional(4, 8), trains=False),
    "no_grad": Case(layers, positional(4, 8), around=torch.no_grad, trains=False),
    "inference": Case(layers, positional(4, 8), around=torch.inference_mode, trains=False),
    "parameter": Case(lambda: combine, lambda: Inputs((nn.Parameter(normal(4)),))),
    "autocast": Case(
        layers, positional(4, 8), around=lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    ),
    "bfloat16": Case(
        lambda: layers().bfloat16(), lambda: Inputs((normal(4, 8).bfloat16(),))
    ),
    "gradient of the input": Case(layers, positional(4, 8, grad=True)),
    "input with a gradient": Case(layers, with_gradient),
    "input that is not a leaf": Case(layers, lambda: Inputs((normal(4, 8, grad=True) * 2,))),
    "keyword": Case(layers, lambda: Inputs((), {"input": normal(4, 8)})),
    "one tensor twice": Case(lambda: combine, twice, trains=False),
    "ids are labels": Case(Language, with_labels),
    "no labels": Case(Language, lambda: Inputs((tokens(),))),
    "nested, one tensor thrice": Case(lambda: of_batch, nested, trains=False),
    "in an object and beside it": Case(lambda: of_holder, held, trains=False),
    "one cache twice": Case(lambda: of_caches, one_cache, trains=False),
    "one list twice": Case(lambda: of_lists, one_list, trains=False),
    "written, twice, not a leaf": Case(lambda: write_twice, written_leaf, trains=False),
    "buffers that change": Case(Counter, positional(4, 8)),
    "dropout": Case(lambda: layers(nn.Dropout(0.5)), positional(4, 8)),
    "graph break": Case(Breaking, positional(4, 8)),
    "slices of one base": Case(lambda: combine, slice_and_base, trains=False),
    "not contiguous": Case(layers, lambda: Inputs((normal(8, 4).t(),))),
    "a part of a tensor": Case(layers, lambda: Inputs((normal(8, 16)[::2, 1:9],))),
    "expanded": Case(layers, lambda: Inputs((normal(1, 8).expand(4, 8),))),
    "channels last": Case(
        lambda: nn.Conv2d(3, 4, 3),
        lambda: Inputs((normal(2, 3, 5, 5).to(memory_format=torch.channels_last),)),
    ),
    "no dimensions": Case(lambda: combine, lambda: Inputs((normal(),)), trains=False),
    "Python numbers": Case(lambda: combine, lambda: Inputs((normal(4), None, 3.5)), trains=False),
    "dynamic": Case(
        layers, positional(5, 8), lambda m, b: torch.compile(m, backend=b, dynamic=True)
    ),
    "mode": Case(
        layers, positional(4, 8), lambda m, b: torch.compile(m, backend=b, mode="default")
    ),
    "marked as dynamic": Case(layers, marked),
    "whole graph": Case(
        layers, positional(4, 8), lambda m, b: torch.compile(m, backend=b, fullgraph=True)
    ),
    "compiled in place": Case(Outer, positional(4, 8), compile_in_place),
    "compiled inside": Case(Outer, positional(4, 8), compile_inner),
}  # fmt: skip


def call_as_user(case: Case, candidate: Any, inputs: Inputs) -> None:
    """Call a compiled program as its user does, and train it if the user does."""
    result = candidate(*inputs.args, **inputs.kwargs)
    if not case.trains:
        return
    value = result.get("loss", next(iter(result.values()))) if isinstance(result, dict) else result
    value.sum().backward()
    if isinstance(candidate, nn.Module):
        candidate.zero_grad()


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_program_that_has_run_is_not_compiled_again(name: str) -> None:
    case = CASES[name]
    backend = Counting()
    model = case.make()
    reference = copy.deepcopy(model) if case.compile in _IN_PLACE else model
    candidate = case.compile(model, backend)
    with case.around():
        call_as_user(case, candidate, case.inputs())
        compiled = len(backend.native)
        assert compiled
        for _ in range(2):
            verdict = verify(case.inputs(), reference, candidate)
            assert verdict.status is Status.IDENTICAL
            assert len(backend.native) == compiled


class Deep(nn.Module):
    """A model with three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Outer() for _ in range(3))
        self.head = nn.Linear(8, 32)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return logits and a loss."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_by_blocks_only_the_blocks_are_compiled_alone_and_only_once(mode: str) -> None:
    backend = Counting()
    model = Deep().train(mode == "train")
    case = Case(Deep, with_labels, trains=mode == "train")
    candidate = torch.compile(model, backend=backend)
    call_as_user(case, candidate, with_labels())
    (whole,) = backend.native
    assert verify(with_labels(), model, candidate, by="blocks").status is Status.IDENTICAL
    alone = backend.native[1:]
    assert len(alone) == 4, "the embedding, all layers together, the head, and the rest"
    assert max(alone) < whole
    assert verify(with_labels(), model, candidate, by="blocks").status is Status.IDENTICAL
    assert verify(with_labels(), model, candidate).status is Status.IDENTICAL
    assert len(backend.native) == 1 + len(alone)


def test_a_dimension_that_the_user_marked_is_dynamic_in_float64_too() -> None:
    backend = Counting()
    model = layers()
    candidate = torch.compile(model, backend=backend)
    assert verify(marked(), model, candidate).status is Status.IDENTICAL
    assert len(backend.native) == 1
    assert backend.dynamic == [True, True]


def add_unless_same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a if a is b else a + b


def test_a_fault_where_two_arguments_are_one_object_is_found() -> None:
    x = normal(4, 8)
    verdict = verify([x, x], torch.add, add_unless_same, VerifyConfig(raise_on_mismatch=False))
    assert verdict.status is Status.DIFFERENT
    assert verify([x, x.clone()], torch.add, add_unless_same).passed


def test_a_tensor_that_is_passed_twice_has_one_gradient() -> None:
    x = normal(4, 8, grad=True)
    verdict = verify([x, x], torch.mul, lambda a, b: b * a)
    gradients = [f.path for f in verdict.findings if f.path.startswith("gradient of")]
    assert gradients == ["gradient of input[0]"]


# --- The compiled float64 form, in the next process -----------------------------------------------

PROGRAM = """
import json
import torch
from torch import nn
from torch._dynamo.utils import counters
from paritas import VerifyConfig, verify


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, labels):
        noisy = x + 0.1 * torch.randn_like(x).view(-1, 8).tanh()
        with torch.autocast("cpu", enabled=False):
            logits = self.head(nn.functional.gelu(self.layer(noisy)))
        return nn.functional.cross_entropy(logits, labels), logits


torch.manual_seed(0)
model, x, labels = Model(), torch.randn(4, 8), torch.arange(4)
compiled = torch.compile(model, options={"fallback_random": True})
compiled(x, labels)[0].backward()
model.zero_grad()


def read():
    names = {"inductor": "fxgraph_cache", "aot_autograd": "autograd_cache"}
    return {
        f"{name}_{what}": counters[home][f"{name}_{what}"]
        for home, name in names.items()
        for what in ("hit", "miss", "bypass")
    }


before = read()
verdict = verify([x, labels], model, compiled, VerifyConfig(raise_on_mismatch=False))
change = {name: count - before[name] for name, count in read().items()}
lifted = sum(finding.lifted is not None for finding in verdict.findings)
print(json.dumps([verdict.status.value, lifted, change]))
"""


@pytest.mark.slow
def test_a_second_process_finds_the_compiled_float64_form_on_disk(tmp_path: Path) -> None:
    results = []
    for _ in range(2):
        done = processes.run("-c", PROGRAM, environment={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
        assert not done.returncode, done.stderr
        results.append(json.loads(done.stdout.splitlines()[-1]))
    (first_status, first_lifted, first), (status, lifted, second) = results
    assert (status, lifted) == (first_status, first_lifted)
    assert status in {"identical", "equivalent"}
    # One graph, which is compiled forward and backward.
    compiled = {"autograd_cache_miss": 1, "fxgraph_cache_miss": 2}
    loaded = {"autograd_cache_hit": 1, "fxgraph_cache_hit": 2}
    assert {name: count for name, count in first.items() if count} == compiled
    assert {name: count for name, count in second.items() if count} == loaded
