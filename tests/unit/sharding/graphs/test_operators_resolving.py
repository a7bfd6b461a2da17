"""What runs for an operator name of a graph, and what does not."""

from __future__ import annotations

import operator
import os
import sys

import pytest
import torch

from paritas.core.errors import UsageError
from paritas.sharding.graphs.calls import CallValues, GraphCall, TensorValue
from paritas.sharding.graphs.operators import function_of, subject_of

X = TensorValue("x", (4, 8), torch.float32)


def called(name: str, *args: object, **kwargs: object) -> GraphCall:
    return GraphCall(0, "node", name, args=args, kwargs=kwargs)


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "builtins.eval",
        "builtins.getattr",
        "subprocess.run",
        "torch.load",
        "torch.save",
        "torch.hub.load",
        "torch.jit.load",
        "torch.compile",
        "torch.from_file",
        "torch.ops.aten.from_file",
        "aten.from_file.default",
        "torch.ops.load_library",
        "torch.os.system",
        "torch.nn.functional.importlib.import_module",
        "torch.nn.functional.torch",
        "torch.set_default_dtype",
        "torch.manual_seed",
        "torch.Tensor.apply_",
        "torch.Tensor.map_",
        "torch.Tensor.set_",
        "torch.Tensor.resize_",
        "torch.Tensor.tofile",
        "torch.Tensor.__reduce_ex__",
        "torch.Tensor.register_hook",
        "torch.Tensor.backward",
        "torch.Tensor.share_memory_",
        "torch.empty",
        "operator.attrgetter",
        "operator.methodcaller",
        "nnscaler.runtime.function.nonsense",
        "nnscaler.runtime.function.__builtins__",
        "",
        "linear",
    ],
)
def test_a_name_that_is_not_a_tensor_operator_is_refused(name):
    with pytest.raises(UsageError, match=r"paritas does not run .*--import MODULE"):
        function_of(called(name, X))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("torch.nn.functional.linear", torch.nn.functional.linear),
        ("torch.Tensor.view", torch.Tensor.view),
        ("torch.Tensor.relu_", torch.Tensor.relu_),
        ("torch.linalg.vector_norm", torch.linalg.vector_norm),
        ("aten.mm.default", torch.ops.aten.mm.default),
        ("torch.ops.aten.mm.default", torch.ops.aten.mm.default),
        ("aten::mm", torch.ops.aten.mm.default),
        ("aten.dropout.default", torch.ops.aten.dropout.default),
        ("operator.add", operator.add),
        ("_operator.getitem", operator.getitem),
    ],
)
def test_torch_s_own_operators_are_found(name, function):
    assert function_of(called(name, X)) is function


def test_an_operator_that_the_graph_holds_is_taken_as_it_is():
    def mine(x):
        return x

    call = GraphCall(0, "node", "anything.at.all", args=(X,), function=mine)
    assert function_of(call) is mine


def test_a_registration_does_not_allow_other_functions(monkeypatch):
    from paritas.sharding.operators.library import register, unregister

    register("torch.load", "a -> a")
    try:
        with pytest.raises(UsageError, match=r"does not run torch\.load"):
            function_of(called("torch.load", X))
    finally:
        unregister("torch.load")


@pytest.fixture
def my_ops(tmp_path, monkeypatch):
    (tmp_path / "my_graph_ops.py").write_text(
        "import os\n"
        "from subprocess import run\n"
        "import torch\n"
        "def double(x):\n    return x * 2\n"
        "def _private(x):\n    return x\n"
        "class Twice(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        return x * 2\n"
        "    @staticmethod\n    def backward(ctx, g):\n        return g * 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_graph_ops"
    sys.modules.pop("my_graph_ops", None)


def test_functions_of_an_imported_module_are_run(my_ops):
    assert function_of(called("my_graph_ops.double", X), (my_ops,))(3) == 6
    twice = function_of(called("my_graph_ops.Twice.apply", X), (my_ops,))
    assert torch.equal(twice(torch.ones(2)), torch.full((2,), 2.0))


def test_a_module_is_not_imported_because_a_graph_names_it(my_ops):
    with pytest.raises(UsageError, match="--import MODULE"):
        function_of(called("my_graph_ops.double", X))
    assert my_ops not in sys.modules


@pytest.mark.parametrize(
    "name", ["os.system", "run", "_private", "Twice", "torch.load", "__name__"]
)
def test_what_an_imported_module_merely_holds_is_not_run(my_ops, name):
    with pytest.raises(UsageError, match="does not run"):
        function_of(called(f"my_graph_ops.{name}", X), (my_ops,))


def test_an_import_that_fails_is_reported():
    with pytest.raises(
        UsageError, match=r"--import no_such_module_here: importing it raised Module"
    ):
        function_of(called("torch.relu", X), ("no_such_module_here",))


def test_a_subscript_is_spread_and_recorded_values_with_it():
    call = called("operator.getitem", X, (slice(None), 2))
    subject = subject_of(call)
    assert subject.args == (X, slice(None), 2)
    tensor = torch.randn(4, 8)
    values = subject.spread(CallValues((tensor, (slice(None), 2))))
    assert torch.equal(subject.function(*values.args), tensor[:, 2])


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("aten.relu_.default", "aten.relu"),
        ("torch.Tensor.add_", "torch.Tensor.add"),
        ("operator.mul", "torch.mul"),
        ("aten.adaptive_avg_pool2d.default", "torch.nn.functional.adaptive_avg_pool2d"),
        ("nnscaler.runtime.function.function.embedding", "nnscaler.runtime.function.embedding"),
    ],
)
def test_spellings_come_to_the_one_that_the_library_has(written, name):
    assert subject_of(called(written, X)).name == name


def test_nothing_was_run(monkeypatch):
    monkeypatch.setattr(os, "system", lambda _: pytest.fail("it was run"))
    with pytest.raises(UsageError):
        subject_of(called("os.system", "true"))
