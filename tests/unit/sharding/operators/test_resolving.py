from __future__ import annotations

import operator
import sys
import types

import pytest
import torch
from torch.nn import functional as F

from paritas import UsageError
from paritas.sharding.operators import nnscaler_functions
from paritas.sharding.operators.resolving import resolve_operator


@pytest.mark.parametrize(
    ("fsig", "function"),
    [
        ("torch.conv2d", torch.conv2d),
        ("torch.nn.functional.dropout", F.dropout),
        ("torch.Tensor.view", torch.Tensor.view),
        ("operator.add", operator.add),
        ("torch.ops.aten.add.Tensor", torch.ops.aten.add.Tensor),
        ("torch:conv2d", torch.conv2d),
        ("torch.nn.functional:relu", F.relu),
        ("torch:Tensor.view", torch.Tensor.view),
    ],
)
def test_a_dotted_name_is_imported_as_far_as_it_is_a_module(fsig, function):
    assert resolve_operator(fsig) is function


@pytest.mark.parametrize(
    ("imports", "fsig", "function"),
    [
        ("from torch.nn.functional import conv2d", "conv2d", F.conv2d),
        ("from torch.nn import functional as F", "F.relu", F.relu),
        ("import torch.nn.functional as F\nimport math", "F.relu", F.relu),
        ("import torch.nn.functional", "torch.nn.functional.relu", F.relu),
        ("from torch.nn.functional import conv2d", "torch.add", torch.add),
        ("# nothing\n", "torch.add", torch.add),
    ],
)
def test_what_is_imported_can_be_named(imports, fsig, function):
    assert resolve_operator(fsig, imports) is function


def test_anything_but_an_import_is_refused_and_not_executed(capsys):
    text = "import math\nprint('executed')"
    with pytest.raises(UsageError, match=r"line 2: \"print\('executed'\)\" is not a plain import"):
        resolve_operator("torch.add", text)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("imports", "message"),
    [
        ("from math import *", "is not a plain import"),
        ("from . import this", "is not a plain import"),
        ("if True:\n    import math", "'if True:' is not a plain import"),
        ("import a b", "is not Python: 'import a b'"),
        ("import no_such_module_here", "raised ModuleNotFoundError"),
        ("from math import no_such_name", "raised ModuleNotFoundError"),
    ],
)
def test_a_failing_import_is_reported(imports, message):
    with pytest.raises(UsageError, match=message):
        resolve_operator("torch.add", imports)


@pytest.mark.parametrize(
    ("fsig", "message"),
    [
        ("torch.nn.functional.conv2", "has no 'conv2'; did you mean 'conv2d'"),
        ("torch.nn.functionals.relu", "torch.nn has no 'functionals'; did you mean 'functional'"),
        ("no_such_package.op", "raised ModuleNotFoundError"),
        ("relu", "has no module"),
        ("torch.add(1)", "not a dotted name"),
        ("torch.nn.Conv2d", "is a class, not a function"),
        ("torch.nn.functional", "is a module, not a function"),
        ("torch.float32", "is a dtype, not a function"),
    ],
)
def test_an_unknown_name_is_reported_with_a_suggestion(fsig, message):
    with pytest.raises(UsageError, match=message):
        resolve_operator(fsig)


def test_nnscaler_is_stood_in_for_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "nnscaler", None)
    fsig = "nnscaler.runtime.function.embedding"
    assert resolve_operator(fsig) is nnscaler_functions.embedding
    wrapped = resolve_operator("nnscaler.graph.function.wrapnn.wrap_batchnorm2d_func")
    assert wrapped is nnscaler_functions.wrap_batchnorm2d_func
    with pytest.raises(UsageError, match="nnscaler is not installed, and paritas implements only"):
        resolve_operator("nnscaler.runtime.function.embeding")


def test_our_batch_norm_replaces_that_of_an_installed_nnscaler(monkeypatch):
    name = "nnscaler.graph.function.wrapnn"
    for module in ("nnscaler", "nnscaler.graph", "nnscaler.graph.function", name):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    sys.modules[name].wrap_batchnorm2d_func = lambda *args: args
    found = resolve_operator(f"{name}.wrap_batchnorm2d_func")
    assert found is nnscaler_functions.wrap_batchnorm2d_func


def test_a_colon_separates_the_module_from_the_name(monkeypatch):
    package, module = types.ModuleType("shadowing"), types.ModuleType("shadowing.scale")
    package.scale = module.scale = lambda x: 2 * x  # a function of its module's name
    monkeypatch.setitem(sys.modules, "shadowing", package)
    monkeypatch.setitem(sys.modules, "shadowing.scale", module)
    assert resolve_operator("shadowing.scale:scale") is module.scale
    with pytest.raises(
        UsageError, match=r"OPERATOR 'shadowing.scale:scael': .*did you mean 'scale'"
    ):
        resolve_operator("shadowing.scale:scael", parameter="OPERATOR")


def test_an_installed_nnscaler_takes_precedence(monkeypatch):
    names = ["nnscaler", "nnscaler.runtime", "nnscaler.runtime.function"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[names[-1]].embedding = mine = lambda *args: args
    assert resolve_operator("nnscaler.runtime.function.embedding") is mine


# --- our own equivalents --------------------------------------------------------------------------


def test_the_parts_of_a_vocabulary_sum_up_to_the_whole_with_padding_and_gradients():
    torch.manual_seed(0)
    ids = torch.tensor([[0, 3, 6, 9]])
    table = torch.randn(10, 4, dtype=torch.float64, requires_grad=True)
    whole = F.embedding(ids, table, padding_idx=6)
    parts = [
        nnscaler_functions.embedding(ids, table[start:stop], 6, start, stop)
        for start, stop in [(0, 5), (5, 10)]
    ]
    assert torch.equal(parts[0] + parts[1], whole)
    cotangent = torch.randn_like(whole)
    (expected,) = torch.autograd.grad(whole, table, cotangent)
    (gradient,) = torch.autograd.grad(parts[0] + parts[1], table, cotangent)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("tracks", [True, False])
def test_batch_norm_does_what_the_module_does(momentum, training, tracks):
    torch.manual_seed(0)
    module = torch.nn.BatchNorm2d(4, momentum=momentum, track_running_stats=tracks).train(training)
    x = torch.randn(3, 4, 2, 2)
    mean, variance, count = torch.zeros(4), torch.ones(4), torch.tensor(0)
    buffers = (mean, variance, count) if tracks else (None, None, None)
    given = nnscaler_functions.wrap_batchnorm2d_func(
        x,
        module.weight,
        module.bias,
        *buffers,
        momentum=momentum,
        training=training,
        track_running_stats=tracks,
    )
    assert torch.equal(given, module(x))
    if tracks:
        assert torch.equal(mean, module.running_mean)
        assert torch.equal(variance, module.running_var)
        assert torch.equal(count, module.num_batches_tracked)


@pytest.mark.parametrize("shape", [(3, 4, 2, 2), (4, 2, 2)])
def test_instance_norm_does_what_the_module_does(shape):
    torch.manual_seed(0)
    module = torch.nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    x, mean, variance = torch.randn(shape), torch.zeros(4), torch.ones(4)
    given = nnscaler_functions.wrap_instancenorm2d_func(
        x, module.weight, module.bias, mean, variance, num_features=4, affine=True
    )
    assert torch.equal(given, module(x))
    assert torch.equal(mean, module.running_mean)


def test_convolutions_pad_each_side_separately():
    x, weight = torch.arange(12.0).reshape(1, 1, 3, 4), torch.ones(1, 1, 2, 2)
    given = nnscaler_functions.conv2d(x, weight, None, 1, [1, 0, 0, 2], 1)
    assert torch.equal(given, F.conv2d(F.pad(x, [0, 2, 1, 0]), weight))
    cube = torch.arange(24.0).reshape(1, 1, 2, 3, 4)
    given = nnscaler_functions.conv3d(cube, torch.ones(1, 1, 1, 2, 2), None, 1, [0, 1, 2], 1)
    assert torch.equal(given, F.conv3d(cube, torch.ones(1, 1, 1, 2, 2), padding=(0, 1, 2)))


def test_the_small_functions_do_what_their_names_say():
    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    index = torch.tensor([1, 0])
    assert torch.equal(nnscaler_functions.accum(a, b, b), a + 2)
    assert torch.equal(nnscaler_functions.fullslice(a, slice(None), None, 1), a[:, None, 1])
    assert torch.equal(nnscaler_functions.cat(a, b, dim=1), torch.cat([a, b], 1))
    assert torch.equal(nnscaler_functions.stack(a, b, dim=1), torch.stack([a, b], 1))
    assert torch.equal(nnscaler_functions.index_select(a, index, 0), a[index])
    assert torch.equal(nnscaler_functions.einsum(a, b, equation="ij,kj->ik"), a @ b.T)
    assert nnscaler_functions.multiref(a, 1) is a
    assert len(nnscaler_functions.multiref(a, 3)) == 3
    changed = nnscaler_functions.setitem(a.clone(), 0, slice(1, None), 7.0)
    assert changed.tolist() == [[0.0, 7.0, 7.0], [3.0, 4.0, 5.0]]
