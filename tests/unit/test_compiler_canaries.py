"""Canaries for what `core.torch_private` knows of compilers: see test_torch_canaries."""

from __future__ import annotations

import contextlib
import inspect
from unittest import mock

import pytest
import torch
import torch._dynamo.eval_frame
import torch._functorch.config
import torch._inductor.config
import torch._inductor.inductor_prims
from torch import nn
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._inductor import compile_fx, freezing
from torch._inductor.pattern_matcher import Match
from torch._prims import rng_prims
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from paritas.core.errors import UnsupportedTorchError
from paritas.core.torch_private import dynamo, graphs, inductor, kernels, passes, replaying, vmapped

ATEN = torch.ops.aten
PRIMS = torch.ops.prims
X = torch.linspace(-2, 2, 12).reshape(3, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


def wave(x):
    return torch.sin(x) * 2 + x


def traced(function, *args):
    return make_fx(function, tracing_mode="fake")(*args)


def captured(function, *args, look=lambda graph: graph):
    """The graph that Dynamo captures, or what is seen in it before it is gone."""
    seen = []

    def backend(graph, example_inputs):
        seen.append(look(graph))
        return graph.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend)(*args)
    torch.compiler.reset()
    return seen[0]


# --- paritas.core.torch_private.kernels -----------------------------------------------------------


@pytest.mark.parametrize("op", sorted(kernels.FORWARD, key=str))
def test_every_attention_kernel_takes_and_gives_what_its_twin_does(op):
    taken = {argument.name for argument in op._schema.arguments}
    given = [result.name for result in op._schema.returns]
    assert {"query", "key", "value", "dropout_p", "is_causal", "scale"} <= taken
    assert given[0] == "output"
    assert kernels._STATES & {*given}


@pytest.mark.parametrize("op", sorted(kernels.BACKWARD, key=str))
def test_every_backward_kernel_is_given_the_state_of_the_generator(op):
    taken = {argument.name for argument in op._schema.arguments}
    assert {"query", "key", "value", "philox_seed", "dropout_p", "is_causal", "scale"} <= taken
    assert {"grad_out", "grad_out_"} & taken


# --- paritas.core.torch_private.replaying ---------------------------------------------------------


def test_inductor_s_random_operators_take_what_keys_are_read_from():
    def names(op):
        return [argument.name for argument in op._schema.arguments]

    assert names(replaying.SEED) == ["device"]
    assert names(replaying.SEEDS) == ["count", "device"]
    assert names(replaying.LOOKUP) == ["seeds", "index"]
    assert names(replaying.RANDOM)[:3] == ["size", "seed", "mode"]
    assert names(replaying.RANDINT) == ["low", "high", "size", "seed"]
    for op in (replaying.SEED, replaying.SEEDS, ATEN.rand.default, ATEN.native_dropout.default):
        assert replaying.may_draw(op)
    assert not replaying.may_draw(replaying.RANDOM)


@pytest.mark.parametrize("name", [replaying.SAVE_STATE, replaying.WITH_STATE, replaying.GRAPH_SAFE])
def test_the_operators_that_keep_a_generator_s_state_are_called_that(name):
    assert getattr(rng_prims, name).name() == name
    assert getattr(torch.ops.higher_order, name) is getattr(rng_prims, name)


# --- paritas.core.torch_private.passes: snapshots -------------------------------------------------


def test_the_arguments_of_a_node_are_other_objects_once_they_change():
    module = symbolic_trace(wave)
    before = passes.Fingerprint(module)
    assert before.same(passes.Fingerprint(module))
    node = next(node for node in module.graph.nodes if node.op == "call_function")
    given = node.args
    assert node.args is given
    node.args = tuple(node.args)
    assert before.same(passes.Fingerprint(module)), "the same in other objects"
    (placeholder,) = module.graph.find_nodes(op="placeholder")
    module.graph.erase_node(module.graph.find_nodes(op="output")[0])
    module.graph.output(placeholder)
    assert not before.same(passes.Fingerprint(module))


def test_the_size_behind_a_symbol_is_told_without_a_guard():
    module = make_fx(lambda x: x.reshape(-1), tracing_mode="symbolic")(X)
    (node,) = module.graph.find_nodes(op="placeholder")
    environment = node.meta["val"].fake_mode.shape_env
    guards = len(environment.guards)
    spec = passes.traced_value(node)
    assert spec == passes.TensorSpec((3, 4), (4, 1), torch.float32)
    assert passes.has_known_size(node)
    assert len(environment.guards) == guards


def test_a_size_that_only_the_data_tell_is_known_not_to_be_known():
    module = make_fx(torch.nonzero, tracing_mode="symbolic")(X)
    (node,) = module.graph.find_nodes(op="call_function", target=ATEN.nonzero.default)
    assert not passes.has_known_size(node)
    sizes = {}
    passes.record_sizes(node, torch.nonzero(X), sizes)
    assert list(sizes.values()) == [12]
    assert passes.traced_value(node, sizes).shape == (12, 2)


def test_a_lowering_pattern_leaves_the_match_in_what_it_puts_into_the_graph():
    source = inspect.getsource(torch._inductor.pattern_matcher.LoweringPatternEntry.apply)
    assert "functools.partial(self.handler, match)" in source
    assert "self.nodes" in inspect.getsource(Match.__init__)


# --- paritas.core.torch_private.graphs ------------------------------------------------------------


def test_a_copied_graph_stays_as_it_was_and_shares_its_tensors():
    module = symbolic_trace(Net())
    copied = graphs.copy_graph(module)
    (linear,) = module.graph.find_nodes(op="call_module", target="linear")
    module.graph.erase_node(module.graph.find_nodes(op="output")[0])
    module.graph.output(linear)
    module.recompile()
    assert torch.equal(copied(X), Net.forward(module, X).relu())
    assert copied.linear.weight is module.linear.weight


def test_a_captured_node_knows_its_module_and_the_user_s_line():
    graph = captured(Net(), X)
    node = graphs.returned_values(graph)[0]
    where = graphs.provenance(node)
    assert where.operator == "relu"
    assert where.source.endswith(", in forward")
    assert where.code == "return self.linear(x).relu()"
    assert graphs.module_path("L['self']._modules['layers'].0") == "layers.0"


def test_the_inputs_that_a_graph_writes_to_are_told():
    def write(x, y):
        return x.add_(y).view(-1)

    module = make_fx(write)(X.clone(), X)
    assert graphs.written_placeholders(module) == {0}
    assert graphs.node_dtypes(traced(wave, X)) == {torch.float32: 4}


# --- paritas.core.torch_private.inductor ----------------------------------------------------------


def test_outputs_in_cuda_graphs_are_told_by_the_settings_of_the_backend():
    def backend_of(**given):
        (found,) = dynamo.backends_of(torch.compile(torch.sin, **given))
        return found

    assert dynamo.reuses_outputs(backend_of(mode="reduce-overhead"))
    assert dynamo.reuses_outputs(backend_of(backend="cudagraphs"))
    assert not dynamo.reuses_outputs(backend_of())
    assert not dynamo.reuses_outputs(backend_of(mode="max-autotune-no-cudagraphs"))
    assert not dynamo.reuses_outputs(backend_of(backend="eager"))


def test_a_graph_of_sizes_alone_computes_no_tensor():
    seen = []

    def backend(graph, inputs):
        seen.append(graphs.computes_tensors(graph))
        return graph.forward

    torch.compile(lambda x: x.shape[0] * 2 + 1, backend=backend, dynamic=True)(torch.ones(3))
    assert seen in ([], [False])
    torch.compile(lambda x: (x.sin(), x.shape[0] * 2), backend=backend, dynamic=True)(torch.ones(3))
    assert seen[-1] is True


def test_inductor_can_be_given_an_inner_compiler_and_settings():
    taken = inspect.signature(compile_fx.compile_fx).parameters
    assert {"inner_compile", "config_patches"} <= taken.keys()
    functorch = torch._functorch.config.get_config_copy()
    assert {"enable_autograd_cache", "bundled_autograd_cache"} <= functorch.keys()


def test_settings_of_another_time_are_in_force_only_inside():
    before = inductor.current_settings()
    assert {"fallback_random", "max_fusion_size", "layout_optimization"} <= before.keys()
    with inductor.using_settings({**before, "max_fusion_size": 1}):
        assert torch._inductor.config.max_fusion_size == 1
    assert inductor.current_settings()["max_fusion_size"] == before["max_fusion_size"]
    with (
        pytest.raises(UnsupportedTorchError, match="no inductor option 'no_such_option'"),
        inductor.using_settings({}, {"no_such_option": 1}),
    ):
        pass


# --- paritas.core.torch_private.graphs ------------------------------------------------------------


def test_the_inputs_of_a_captured_graph_are_named_as_the_user_would():
    names = captured(Net(), X, look=graphs.captured_input_names)
    assert sorted(names) == ["linear.bias", "linear.weight", "x"]


def test_lowered_graphs_are_described_in_words_that_are_known():
    from torch._functorch._aot_autograd import descriptors

    for kind in ("PlainAOTInput", "ParamAOTInput", "TangentAOTInput"):
        assert hasattr(descriptors, kind)
    for kind in ("PlainAOTOutput", "GradAOTOutput", "InputMutationAOTOutput"):
        assert hasattr(descriptors, kind)


# --- paritas.core.torch_private.passes ------------------------------------------------------------


def heard_by(listener):
    """What a listener was told, and of what."""
    return [(name, args[0]) for name, args, _ in listener.method_calls if args]


@pytest.mark.parametrize("name", ["partition_fn", *passes._STAGES])
def test_what_runs_the_stages_is_looked_up_when_it_is_called(name):
    assert callable(getattr(compile_fx, name))
    source = inspect.getsource(compile_fx)
    assert source.count(f"{name}(") + source.count(f"={name}") > 1, "called, not only defined"


def test_passes_and_stages_are_heard_of_and_torch_is_left_as_it_was():
    listener = mock.Mock()
    module = traced(wave, X)
    originals = compile_fx._recursive_joint_graph_passes, GraphTransformObserver.__enter__
    with passes.listening_to_passes(listener):
        compile_fx._recursive_joint_graph_passes(module, input_device=torch.device("cpu"))
        assert not torch._inductor.config.fx_graph_cache
    heard = heard_by(listener)
    assert heard[0] == ("enter_stage", "joint_graph_passes")
    assert heard[-1] == ("leave_stage", module)
    assert ("enter_pass", "remove_noop_ops") in heard
    assert ("leave_pass", module) in heard
    after = compile_fx._recursive_joint_graph_passes, GraphTransformObserver.__enter__
    assert after == originals


def test_a_stage_that_raises_is_heard_of_as_left():
    listener = mock.Mock()
    with passes.listening_to_passes(listener), contextlib.suppress(AttributeError):
        compile_fx._recursive_joint_graph_passes(None)
    assert [name for name, *_ in listener.method_calls] == ["enter_stage", "abandon_stage"]


def test_a_split_is_heard_of():
    listener = mock.Mock()
    x = X.clone().requires_grad_()
    with passes.listening_to_passes(listener):
        compiled = aot_function(
            wave,
            fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
            partition_fn=compile_fx.partition_fn,
        )
        compiled(x).sum().backward()
    assert heard_by(listener)[-1] == ("split", 1)
    assert torch.allclose(x.grad, x.detach().cos() * 2 + 1)


def test_a_torch_without_one_of_the_stages_is_named():
    with (
        mock.patch.object(freezing, "freeze", None),
        pytest.raises(UnsupportedTorchError, match=r"no torch\._inductor\.freezing\.freeze"),
        passes.listening_to_passes(mock.Mock()),
    ):
        pass
    assert callable(compile_fx.partition_fn)
    assert compile_fx.partition_fn.__module__ == compile_fx.__name__


# --- paritas.core.torch_private.replaying ---------------------------------------------------------


def test_the_operators_with_branches_take_them_where_they_are_looked_for():
    def parameters(op):
        return list(inspect.signature(op.__call__).parameters)

    ops = torch.ops.higher_order
    assert parameters(ops.invoke_subgraph)[:3] == ["subgraph", "identifier", "operands"]
    assert parameters(ops.tag_activation_checkpoint)[0] == "gmod"
    assert parameters(ops.wrap_with_set_grad_enabled)[1] == "wrapped_func"
    assert parameters(ops.wrap_with_autocast)[4] == "wrapped_func"
    assert parameters(ops.cond)[:4] == ["pred", "true_fn", "false_fn", "operands"]
    assert parameters(ops.strict_mode)[:2] == ["callable", "operands"]
    assert parameters(ops.autograd_function_apply)[:2] == ["fwd", "bwd"]
    assert parameters(ops.with_effects)[:2] == ["token", "op"]


def test_a_branch_is_run_by_the_player():
    from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

    body = symbolic_trace(wave)
    graph = Graph()
    x = graph.placeholder("x")
    branch = graph.get_attr("branch")
    result = graph.call_function(invoke_subgraph, (branch, "branch", x))
    graph.output(result)
    module = GraphModule({"branch": body}, graph)
    assert torch.equal(replaying.replay(passes.freeze(module), [X], {}), wave(X))


def test_the_depth_of_functorch_s_transforms_is_told():
    assert vmapped._count_transforms() == 0
    seen = []
    torch.func.vmap(lambda x: seen.append(vmapped._count_transforms()) or x)(X)
    assert seen == [1]
    assert callable(torch._C._functorch.pop_dynamic_layer_stack)


# --- paritas.core.torch_private.inductor and paritas.core.torch_private.graphs --------------------


def test_nodes_can_be_marked_for_compilation_and_made_outputs():
    assert inductor.ONLY_MARKED.keys() <= torch._inductor.config.get_config_copy().keys()
    module = traced(wave, X)
    assert inductor.compilable(module) == ["sin", "mul", "add"]
    marked = inductor.with_compiled(module, ["sin"])
    (node,) = marked.graph.find_nodes(op="call_function", target=ATEN.sin.default)
    assert node.meta["custom"]["compile_with_inductor"]
    tapped, names = graphs.tap_values(module)
    assert names == ["sin", "mul", "add"]
    assert len(tapped(X)) == 4
