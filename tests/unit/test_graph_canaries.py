"""Does torch still trace, and round, as the graphs that guard runs assume? More canaries."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from paritas.core.errors import UnsupportedTorchError
from paritas.core.torch_private import (
    buffers,
    eager_graphs,
    generated_code,
    graphs,
    inductor,
    named_operators,
    operators,
    passes,
    replaying,
    tensors,
    watching,
)


def gradient_of_a_maximum(x):
    y = (x * 3.3).amax(0)
    return torch.autograd.grad(y.sum(), x)[0]


def test_the_place_of_a_maximum_is_asked_for_by_equality():
    x = torch.randn(5, 3, requires_grad=True)
    graph = make_fx(gradient_of_a_maximum, tracing_mode="fake")(x)
    tolerant = eager_graphs.with_tolerant_equality(graph)
    assert tolerant is not None
    targets = [node.target for node in tolerant.graph.nodes]
    assert eager_graphs.nearly_equal in targets
    assert torch.ops.aten.eq.Tensor in [node.target for node in graph.graph.nodes]
    assert torch.equal(tolerant(x), graph(x))


def test_a_graph_without_an_equality_of_floats_has_no_other_form():
    graph = make_fx(lambda x: (x == 2) & (x.int() == x.int()), tracing_mode="fake")(torch.ones(3))
    assert eager_graphs.with_tolerant_equality(graph) is None


def test_what_only_looks_at_memory_otherwise_is_told_from_what_computes():
    def program(x):
        return torch.ops.aten.max.dim(x.t().view(-1, 2), 0)[0] * 2

    traced = make_fx(program)(torch.ones(2, 2))
    calls = [node for node in traced.graph.nodes if node.op == "call_function"]
    views = [node.name for node in calls if graphs.is_view(node)]
    assert [node.name for node in calls if node.name not in views] == ["max_1", "mul"]
    assert {"t", "view"} <= set(views)
    assert any(name.startswith("getitem") for name in views)


def test_numbers_a_few_roundings_apart_are_equal_and_no_others():
    left = torch.tensor([1.0, 1.0, 1.0, 0.0, torch.inf, torch.nan])
    right = torch.tensor([1.0, 1 + 2e-7, 1 + 2e-5, 1e-12, torch.inf, torch.nan])
    nearly = eager_graphs.nearly_equal(left, right, unit=2.0**-24)
    assert nearly.tolist() == [True, True, False, False, True, False]


def test_indices_that_fit_stay_and_others_are_made_to():
    x = torch.arange(12.0).view(3, 4)
    columns = torch.tensor([[0, -1, 9, 3]])
    _, _, index = replaying.in_bounds("gather", (x, 1, columns))
    assert index.tolist() == [[0, 3, 1, 3]]
    _, indices = replaying.in_bounds("index", (x, [None, torch.tensor([-1, 5])]))
    assert indices[0] is None
    assert indices[1].tolist() == [3, 1]
    mask = x > 3
    assert replaying.in_bounds("index", (x, [mask]))[1][0] is mask
    assert torch.ops.aten.gather(*replaying.in_bounds("gather", (x, 1, columns))).shape == (1, 4)


def test_whether_tensor_cores_may_be_used_is_told_without_a_device():
    for name in ("convolution", "convolution_backward", "mm", "add"):
        assert isinstance(operators.may_use_tf32(name), bool)
    assert not operators.may_use_tf32("add")


# --- watching -------------------------------------------------------------------------------------


class Seen:
    """Notes what operators it is shown, and which autograd nodes they belong to."""

    def __init__(self):
        self.operators, self.made, self.ran = [], {}, {}

    def listens(self):
        return True

    def before(self, func, args, kwargs):
        self.operators.append(str(func))
        if watching.in_backward():
            self.ran.setdefault(watching.running_node()[0], str(func))
        else:
            self.made.setdefault(watching.upcoming_node(), str(func))

    def after(self, token, result):
        pass


def test_an_operator_of_the_backward_pass_leads_to_the_one_that_made_its_node():
    seen = Seen()
    w = torch.ones(2, 2, requires_grad=True)
    end = watching.push_watch(seen)
    (w @ w).tanh().sum().backward()
    assert end()
    assert watching.mode_depth() == 0
    served = {seen.made[node]: op for node, op in seen.ran.items() if node in seen.made}
    assert served["aten.tanh.default"] == "aten.tanh_backward.default"
    assert "aten.mm.default" in served


def test_a_users_autograd_function_is_named_in_its_backward_pass():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            names.append(watching.running_function())
            return gradient * 2

    names = [watching.running_function()]
    Twice.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert names == ["", "Twice"]


def test_operators_made_of_others_are_taken_apart_as_torch_itself_does():
    layer = torch.nn.Linear(8, 24)
    x = torch.rand(2, 5, 8).transpose(0, 1)  # by its strides, matmul chooses what it calls
    shown = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            plain, seen = layer(x), Seen()
            end = watching.push_watch(seen)
            assert torch.equal(layer(x), plain)
            assert end()
        shown.append(seen.operators)
    assert shown[0] == shown[1]
    assert "aten.mm.default" in shown[0]


def test_module_calls_are_seen_until_one_looks_away():
    plain, calls = torch.nn.Module.__call__, []

    def around(module, args, kwargs, call):
        calls.append((args, kwargs))
        return call(*args, **kwargs)

    end = watching.watch_module_calls(around)
    torch.nn.Identity()(3)
    end()
    torch.nn.Identity()(4)
    assert calls == [((3,), {})]
    assert torch.nn.Module.__call__ is plain


def test_what_is_traced_or_transformed_is_told():
    told = []

    class Asks(torch.nn.Module):
        def forward(self, x):
            told.append(watching.is_symbolic())
            return x + 1

    model, x = Asks(), torch.ones(2)
    model(x)
    torch.fx.symbolic_trace(model)
    torch.vmap(model)(x)
    make_fx(model, tracing_mode="fake")(x)
    with FakeTensorMode():
        model(torch.ones(2))
    assert told == [False, True, True, True, True]


def test_tensors_with_and_without_values_are_told_apart():
    class Named(torch.Tensor):
        pass

    assert watching.has_values(torch.ones(1))
    assert watching.has_values(torch.nn.Parameter(torch.ones(1)))
    assert watching.has_values(torch.ones(1).as_subclass(Named))
    assert not watching.has_values(torch.ones(1, device="meta"))
    with FakeTensorMode():
        assert not watching.has_values(torch.ones(1))
    told = []
    torch.vmap(lambda x: told.append(watching.has_values(x)) or x)(torch.ones(2))
    assert told == [False]


def test_compiled_modules_are_told_and_arguments_that_are_written_to():
    model = torch.nn.Linear(2, 2)
    assert not watching.is_compiled(model)
    assert watching.is_compiled(torch.compile(model))
    model.compile()
    assert watching.is_compiled(model)
    aten = torch.ops.aten
    assert watching.out_arguments(aten.mm.out) == {"out"}
    assert watching.written_arguments(aten._foreach_add_.Scalar) == [(0, "self")]
    assert watching.written_arguments(aten.add_.Tensor) == []


def test_nobodys_mode_sees_what_is_done_unseen():
    seen = Seen()
    end = watching.push_watch(seen)
    with torch.device("meta"), watching.unseen():
        made = torch.ones(2).clone()
    assert end()
    assert seen.operators == []
    assert made.device.type == "cpu"


# --- buffers, buffer_nodes, wrapper_lines, variables, fusion_options ------------------------------


def listened_to(function, *inputs):
    """What the code of the one graph of a function told, and torch's class of its wrapper."""
    heard = []

    def watch(lowered, compiled):
        code = []

        def call(args):
            if not code:
                code.append(buffers.compile_listening(lowered, heard.append))
                code[0](list(args))
            return compiled(args)

        call._boxed_call = True
        return call

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(function, backend=lambda g, i: inductor.compile_watched(g, i, watch))(*inputs)
    return heard


def test_generated_code_still_tells_of_its_kernels_by_name_and_node():
    heard = listened_to(lambda x: (torch.sin(x) + 1) @ x, torch.eye(4))
    told = [(seen.side, seen.buffer.exact, seen.buffer.nodes) for seen in heard]
    assert told == [
        ("input", "arg0_1", ("arg0_1",)),
        ("output", "add", ("sin", "add")),
        ("input", "add", ("sin", "add")),
        ("input", "arg0_1", ("arg0_1",)),
        ("output", "mm", ("mm",)),
    ]
    assert [seen.kernel.name for seen in heard][-1] == "extern_kernels.mm"


def test_a_graph_tells_which_node_took_the_place_of_which():
    with FakeTensorMode():
        graph = make_fx(lambda a, b: torch.mm(a, b) + a, tracing_mode="real")(*torch.ones(2, 3, 3))
    lineage = buffers.NodeLineage(graph)
    changed = graphs.copy_graph(graph)
    lineage.enter_stage(passes.POST_GRAD, changed)
    old = next(node for node in changed.graph.nodes if node.name == "add")
    first, second = graphs.placeholders(changed)
    with changed.graph.inserting_before(old):
        new = changed.graph.call_function(torch.ops.aten.addmm.default, (first, first, second))
    new.meta["val"] = old.meta["val"]
    old.replace_all_uses_with(new)
    changed.graph.erase_node(old)
    lineage.leave_stage(changed)
    assert lineage.same_value(new) == "add"
    assert not changed._replace_hooks


def test_lines_of_generated_code_are_of_the_kinds_that_are_known():
    kinds = generated_code.line_kinds()
    fields = {field.name for field in dataclasses.fields(kinds.reuse)}
    assert {"node", "reused_as", "delete_old"} <= fields
    assert "is_reused" in {field.name for field in dataclasses.fields(kinds.free_unless_reused)}
    assert "kernel_name" in {field.name for field in dataclasses.fields(kinds.call)}


def test_nothing_stays_patched_and_no_cache_keeps_code_that_tells():
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.scheduler import NopKernelSchedulerNode
    from torch._inductor.utils import run_and_get_code

    def function(x):
        return torch.sin(x) @ x

    before = PythonWrapperCodegen.writeline, PythonWrapperCodegen.run_wrapper_ir_passes
    assert listened_to(function, torch.eye(7))
    after = PythonWrapperCodegen.writeline, PythonWrapperCodegen.run_wrapper_ir_passes
    assert after == before
    assert "mark_run" not in vars(NopKernelSchedulerNode)
    torch.compiler.reset()
    with torch.no_grad():
        _, codes = run_and_get_code(torch.compile(function), torch.eye(7))
    assert codes
    assert not any("paritas" in code for code in codes)
    assert listened_to(function, torch.eye(7))


def test_a_torch_without_a_method_that_writes_kernels_is_refused_by_its_name(monkeypatch):
    from torch._inductor.codegen.cpp import CppScheduling

    monkeypatch.delattr(CppScheduling, "flush")
    monkeypatch.setattr(CppScheduling.__mro__[1], "flush", None)
    lines = generated_code.WrapperLines("none")
    with (
        pytest.raises(UnsupportedTorchError, match=r"has no CppScheduling\.flush"),
        generated_code.instrumenting(lines),
    ):
        pass


def test_passes_can_be_turned_off_by_the_names_they_announce():
    assert {"remove_noop_ops", "pass_pattern_0", "pass_pattern_2"} <= {*inductor.graph_passes()}
    assert {"pattern_matcher", "layout_optimization"} <= {*inductor.graph_names()}
    present = inductor.current_settings()
    options = inductor.kernel_options({*inductor.kernel_names()})
    assert {*options} <= {*present}
    assert {"max_fusion_size", "epilogue_fusion", "post_grad_custom_post_pass"} <= {*options}


def test_every_value_can_be_asked_for_in_memory():
    with FakeTensorMode():
        x = torch.ones(3, 4)
        graph = make_fx(lambda x: torch.sin(x).cos().t() * 2, tracing_mode="real")(x)
    before = [str(node.target) for node in graph.graph.nodes]
    inductor.Materialize()(graph.graph)
    graph.graph.lint()
    after = [str(node.target) for node in graph.graph.nodes]
    assert after.count("prims.inductor_force_stride_order.default") == 3
    assert [name for name in after if "force_stride" not in name] == before


def test_a_distributed_tensor_tells_its_part_without_a_collective(monkeypatch):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the group puts its own there
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        whole = torch.randn(4, 3)
        part = tensors.local_part(distribute_tensor(whole, mesh, [Shard(1)]))
        assert torch.equal(part.local, whole)
        place = part.placement
        assert (place.mesh, place.mesh_names, place.coordinate) == ((1,), ("tp",), (0,))
        assert (place.placements, place.global_shape) == (("shard(1)",), (4, 3))
        assert place.global_offset == (0, 0)
        other = torch.distributed.tensor.DTensor.from_local(whole, mesh, [Partial()])
        assert tensors.local_part(other).placement.placements == ("partial(sum)",)
        same = distribute_tensor(whole, mesh, [Replicate()])
        assert tensors.local_part(same).placement.placements == ("replicate",)
        assert tensors.local_part(whole) is None
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("native_layer_norm_backward", {"grad_out", "input", "normalized_shape", "mean", "rstd"}),
        ("native_group_norm_backward", {"grad_out", "input", "mean", "rstd", "N", "C", "HxW"}),
        ("native_batch_norm_backward", {"grad_out", "input", "save_mean", "save_invstd", "train"}),
        ("nll_loss_backward", {"grad_output", "self", "target", "weight", "total_weight"}),
        ("embedding_dense_backward", {"grad_output", "indices", "num_weights"}),
        ("max_pool2d_with_indices_backward", {"grad_output", "self", "indices"}),
    ],
)
def test_the_arguments_that_kernels_believe_are_called_as_they_are_looked_for(name, arguments):
    found = named_operators.operator_named(f"aten.{name}.default")
    assert arguments <= {argument for argument, _ in found.takes}
    assert not named_operators.fits_kernel(name, {})


def test_a_symbol_says_the_number_it_had_and_its_range():
    length = torch.export.Dim("length", min=3, max=64)
    given = {"args": (torch.ones(4, 2),), "dynamic_shapes": ({0: length},)}
    program = torch.export.export(torch.nn.ReLU(), **given)
    size = next(iter(program.graph.nodes)).meta["val"].shape[0]
    assert graphs.size_number(size, lambda _: 1) == 4
    assert list(graphs.symbol_ranges(program).values()) == [(3, 64)]
    # Without a number it takes the guess.
    with FakeTensorMode(shape_env=ShapeEnv()):
        size = torch.ones(5).nonzero().shape[0]
        assert graphs.size_number(size * 2 + 1, lambda _: 3) == 7


def test_values_are_foretold_without_touching_the_module():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    found, reasons = graphs.predict_values(torch.fx.symbolic_trace(model), [torch.ones(2, 3)])
    assert [tuple(value.shape) for value in found.values()] == [(2, 3), (2, 4), (2, 4)]
    assert not reasons
    assert int(model[1].num_batches_tracked) == 0
    assert model[1].running_mean.tolist() == [0.0] * 4


def test_operators_are_told_from_those_that_are_given_graphs():
    assert named_operators.is_operator(torch.ops.aten.relu.default)
    assert not named_operators.is_operator(torch.relu)
    assert graphs.is_higher_order(torch.ops.higher_order.cond)
    bracket = torch.ops.higher_order.wrap_with_set_grad_enabled
    assert graphs.is_bracket(bracket, (False, None))


def capture(program, x):
    captured = []

    def keep(module, _):
        captured.append(module)
        return module.forward

    result = torch.compile(program, backend=keep)(x)
    return captured[0], result


def autocast_nodes(module):
    return [node for node in module.graph.nodes if "autocast" in str(node.target)]


def without_autocast(x):
    with torch.autocast("cpu", enabled=False):
        y = x @ x
        with torch.autocast("cpu", enabled=False):
            return y.sin() @ x


def within_autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x
        with torch.autocast("cpu", enabled=False):
            return y.float() @ x


def test_autocast_that_is_off_is_erased_from_a_graph():
    x = torch.eye(4) / 3
    module, result = capture(without_autocast, x)
    assert len(autocast_nodes(module)) == 4
    graphs.erase_idle_autocast(module)
    module.recompile()
    assert not autocast_nodes(module)
    assert torch.equal(module(x)[0], result)


def test_autocast_stays_where_something_switches_it_on():
    x = torch.eye(4) / 3
    module, _ = capture(within_autocast, x)
    graphs.erase_idle_autocast(module)
    assert len(autocast_nodes(module)) == 4
    module, _ = capture(without_autocast, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graphs.erase_idle_autocast(module)
    assert len(autocast_nodes(module)) == 4
