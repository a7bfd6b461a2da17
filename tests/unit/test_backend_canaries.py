"""Canaries for a compiled program's backend and for tracing calls: see test_torch_canaries."""

from __future__ import annotations

import logging
import threading
import warnings

import pytest
import torch
from torch import nn

from paritas.core.precision import summing, widening
from paritas.core.torch_private import (
    dynamo,
    eager_graphs,
    global_state,
    graphs,
    operators,
    tensors,
)


def test_a_backend_is_known_by_its_name_and_its_function():
    assert dynamo.is_registered("inductor", dynamo.inductor_backend())
    assert not dynamo.is_registered("inductor", lambda graph, inputs: graph)
    assert not dynamo.is_registered("no such backend", dynamo.inductor_backend())


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_what_a_compile_was_told_of_dynamic_shapes_can_be_read_back(dynamic):
    module = nn.Linear(2, 2)
    assert dynamo.dynamic_of(torch.compile(module, dynamic=dynamic)) is dynamic
    assert dynamo.dynamic_of(torch.compile(torch.sin, dynamic=dynamic)) is dynamic
    assert dynamo.dynamic_of(module) is None


def test_a_traced_function_is_one_flat_graph_of_operators_with_its_gradients():
    def step(x, y):
        x = x.detach().requires_grad_()
        out = (x @ y).relu()
        return {"out": out.detach(), "gradient": list(torch.autograd.grad(out.sum(), x))}

    x, y = torch.randn(2, 3), torch.randn(3, 4)
    module = graphs.trace_calls(step, [x, y])
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    assert all(isinstance(node.target, torch._ops.OpOverload) for node in calls)
    assert {"mm", "relu", "threshold_backward"} <= {node.name for node in calls}
    assert all(isinstance(node.meta["val"], torch.Tensor) for node in calls)
    results = module(x, y)
    assert isinstance(results, tuple)
    expected = step(x, y)
    torch.testing.assert_close(results, (expected["out"], expected["gradient"][0]))


def test_what_batch_norm_writes_to_is_known_though_its_schema_does_not_say():
    mean, variance = torch.zeros(2), torch.ones(2)
    norm = torch.ops.aten.native_batch_norm.default
    norm(torch.randn(4, 2) + 1, None, None, mean, variance, True, 0.1, 1e-5)
    assert bool((mean != 0).all())
    assert {3, 4} <= operators.traits(norm).mutates


def test_a_function_that_branches_on_a_value_is_traced_along_the_branch_it_took():
    def step(x):
        return x * 2 if x.sum().item() > 0 else x * 3

    module = graphs.trace_calls(step, [torch.ones(2)])
    (result,) = module(torch.ones(2))
    assert result.tolist() == [2.0, 2.0]


def test_an_exported_program_is_lifted_with_the_casts_in_it():
    class Rounds(nn.Module):
        def forward(self, x):
            return (x.float() * 0.1).to(torch.bfloat16) + torch.ones(2, dtype=torch.float16)

    x = torch.tensor([1.0, 3.0], dtype=torch.float64)
    program = torch.export.export(Rounds(), (x,))
    used = frozenset({torch.float32, torch.bfloat16, torch.float16})
    lifted, leaks = widening.lift_captured(program, (x,), used)
    assert torch.equal(lifted.module()(x), x * 0.1 + 1)
    assert not leaks
    # A cast narrower than anything the reference uses is part of what is computed.
    kept, _ = widening.lift_captured(program, (x,), frozenset({torch.float32}))
    assert not torch.equal(kept.module()(x).double(), x * 0.1 + 1)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        torch.Tensor.to_sparse_csc,
        lambda x: x.to_sparse_bsr((2, 2)),
        lambda x: x.to_sparse_bsc((2, 2)),
    ],
)
def test_the_values_of_a_sparse_tensor_are_changed_where_they_are(make):
    dense = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).repeat(1, 2) * torch.tensor([1, 1, 0, 0])
    tensor = make(dense)
    assert tensor.layout in tensors.SPARSE_LAYOUTS
    doubled = tensors.map_values(tensor, lambda values: values * 2)
    assert doubled.layout is tensor.layout
    assert torch.equal(tensors.as_dense(doubled), dense * 2)
    assert tensors.as_dense(dense) is dense


def test_a_mode_hears_of_what_is_made_without_a_dtype_but_not_of_numbers_before_they_are_rounded():
    heard = []

    class Listener(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            heard.append((func, (kwargs or {}).get("dtype"), args))
            return func(*args, **(kwargs or {}))

    with Listener():
        torch.ones(2)
        torch.tensor([0.1])
    (ones, dtype, _), (lift, _, (fresh,)) = heard
    assert ones is torch.ops.aten.ones.default
    assert dtype is None
    assert operators.takes_dtype(ones)
    assert lift is torch.ops.aten.lift_fresh.default
    assert operators.traits(lift).view
    assert operators.is_of_default(fresh, torch.float32)
    assert not operators.is_of_default(fresh, torch.float64)


def test_norms_and_extremes_of_many_tensors_are_had_in_one_call():
    references = [torch.tensor([3.0, 4.0]), torch.tensor(2.0), torch.tensor([[1.0, 0.0]]).t()]
    candidates = [torch.tensor([3.0, 4.5]), torch.tensor(1.0), torch.tensor([[1.0], [0.0]])]
    wanted = [(5.0, 0.5, 0.5, 0.5 / 4.5), (2.0, 1.0, 1.0, 1 / 3), (1.0, 0.0, 0.0, 0.0)]
    found = tensors.figures_of_pairs(candidates, references)
    assert found == [pytest.approx(one) for one in wanted]
    narrow = [tensor.half() for tensor in references]
    found = tensors.figures_of_pairs([t.half() for t in candidates], narrow, torch.float32)
    assert found == [pytest.approx(one, rel=1e-3) for one in wanted]


def test_a_sum_is_known_again_by_the_memory_that_it_lies_in():
    terms = torch.linspace(0, 1, 96, dtype=torch.float64).reshape(32, 3) / 3
    sums = summing.LastSums()
    total = terms.sum(0)
    sums.note(operators.traits(torch.ops.aten.sum.dim_IntList), (terms, [0]), {}, total)
    assert sums.behind(total.view(3, 1)).shape == (3, 1)
    assert sums.behind(total.clone()) is None


def test_a_graph_writes_over_operands_by_operators_told_where_to_write():
    graph = graphs.trace_calls(lambda x: ((x @ x).exp() * 2).sum(0), [torch.ones(3, 3)])
    lean = eager_graphs.overwrite_operands(graph)
    targets = [node.target for node in lean.graph.nodes]
    assert torch.ops.aten.exp.out in targets
    x = torch.linspace(-1, 1, 9).reshape(3, 3)
    assert torch.equal(lean(x)[0], graph(x)[0])


LOG = logging.getLogger("torch._subclasses.fake_tensor")


@pytest.fixture
def heard():
    """What torch's own handlers write, and what arrives at the root."""
    lines = []

    class Hears(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler = Hears()
    for logger in (logging.root, LOG):
        logger.addHandler(handler)
    yield lines
    for logger in (logging.root, LOG):
        logger.removeHandler(handler)


def test_what_torch_logs_in_a_run_of_ours_is_left_out_and_the_rest_is_not(heard):
    with global_state.quietly():
        LOG.error("of ours")
        logging.getLogger("torchvision").error("of another")
        with global_state.quietly():
            LOG.error("of ours")
        LOG.error("of ours")
    LOG.error("of the user")
    assert set(heard) == {"of another", "of the user"}


@pytest.mark.parametrize("package", ["torch", "onnxscript", "onnx_ir"])
def test_what_nobody_has_a_handler_for_is_left_out_too(package, monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])
    log = logging.getLogger(f"{package}.of_a_test")
    monkeypatch.setattr(log, "parent", logging.root)
    with global_state.quietly():
        log.warning("of ours")
    log.warning("of the user")
    assert capsys.readouterr().err == "of the user\n"


def test_a_run_of_ours_is_quiet_in_its_own_thread_alone(heard):
    both_in, first_out = threading.Barrier(2), threading.Event()

    def ours(name):
        with global_state.quietly():
            both_in.wait(60)
            LOG.error("of ours")
            if name == "second":
                first_out.wait(60)
                LOG.error("of ours")

    threads = [threading.Thread(target=ours, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    LOG.error("of the user")
    threads[0].join(60)
    first_out.set()
    threads[1].join(60)
    LOG.error("of the user")
    assert set(heard) == {"of the user"}


def test_warnings_of_a_run_of_ours_are_left_out_also_where_they_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with global_state.quietly():
            warnings.warn("of ours", UserWarning, stacklevel=1)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with pytest.raises(DeprecationWarning):  # somebody asks for it within the run
                    warnings.warn("asked for", DeprecationWarning, stacklevel=1)
        with pytest.raises(UserWarning, match="of the user"):
            warnings.warn("of the user", UserWarning, stacklevel=1)


def test_a_warning_that_was_left_out_once_is_shown_to_the_user_later():
    def warn():
        warnings.warn("the same line", UserWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        with global_state.quietly():
            warn()
        assert not shown
        warn()
        with global_state.quietly():  # which does not make it new again
            warn()
        warn()
    assert [str(one.message) for one in shown] == ["the same line"]


def test_a_stance_is_left_by_threads_in_whatever_order():
    compiled = torch.compile(lambda x: x + 1, backend=lambda graph, _: lambda *args: [args[0] + 2])
    first, second = (global_state.taking_stance("force_eager") for _ in range(2))
    x = torch.zeros(2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(compiled(x), x + 1)  # the second still holds it
    second.__exit__(None, None, None)
    assert torch.equal(compiled(x), x + 2)
