"""A wrong compiler pass, or a wrong split, is named in one compile."""

# ruff: noqa: TID251  (a fault in a compiler is planted in its private parts)

from __future__ import annotations

import operator
import os
from unittest import mock

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import nn

import paritas
from integration.pass_checks import checked, inputs, without_kernels
from paritas.core.compiled import passes
from paritas.core.compiled.passes import PassChecks, check_graph_passes
from paritas.core.results.findings import Aspect, OriginKind, Status
from paritas.core.torch_private.inductor import compile_watched

# Where it is wrong is asked, and not how.
pytestmark = pytest.mark.usefixtures("fresh_compiler", "undiagnosed")
ATEN = torch.ops.aten
PRIMS = torch.ops.prims


def replace(old, new):
    """A pass that puts one operator in another's place."""

    def change(graph):
        for node in graph.nodes:
            if node.target is old:
                node.target = new

    return change


def wave(x):
    return torch.sin(x * 2) + x


# --- wrong passes ---------------------------------------------------------------------------------


# Another operator of the same stage where all is asked for: see tests/README.md.
WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
WRONG = [
    ("pre_grad_custom_pass", torch.sin, torch.cos),
    *([("pre_grad_custom_pass", operator.mul, operator.add)] if WHOLE else []),
    ("joint_custom_pre_pass", ATEN.sin.default, ATEN.tanh.default),
    ("joint_custom_post_pass", ATEN.mul.Tensor, ATEN.add.Tensor),
    ("post_grad_custom_pre_pass", ATEN.sin.default, ATEN.cos.default),
    ("post_grad_custom_post_pass", ATEN.mul.Tensor, ATEN.sub.Tensor),
]
STAGES = {
    "pre": "pre_grad_passes",
    "joint": "joint_graph_passes",
    "post": "post_grad_passes",
}


@pytest.mark.parametrize(("option", "old", "new"), WRONG)
def test_a_wrong_pass_is_named_with_its_stage_and_line(option, old, new):
    checks = checked(wave, *inputs(4, 8), **{option: replace(old, new)})
    stage = STAGES[option.partition("_")[0]]
    assert {finding.path for finding in checks.findings} == {f"pass {option} ({stage})"}
    finding = checks.findings[0]
    assert finding.status is Status.DIFFERENT
    assert finding.origin.kind is OriginKind.PASS
    assert finding.origin.name == option
    assert finding.origin.nodes
    assert finding.origin.code == "return torch.sin(x * 2) + x"
    assert "results differ, the first in output[0]" in finding.reason


def test_a_constant_wrong_in_its_tenth_digit_is_seen():
    def change(graph):
        for node in graph.find_nodes(op="call_function", target=ATEN.mul.Tensor):
            if node.args[1] == 2:
                node.args = (node.args[0], 2 * (1 + 1e-10))

    (finding,) = checked(wave, torch.randn(4, 8), post_grad_custom_post_pass=change).findings
    assert finding.origin.name == "post_grad_custom_post_pass"


def test_a_pass_wrong_in_the_backward_graph_alone_is_named():
    change = replace(ATEN.cos.default, ATEN.sin.default)  # of the gradient of sin
    checks = checked(wave, *inputs(4, 8), post_grad_custom_pre_pass=change)
    (finding,) = checks.findings
    assert finding.origin.name == "post_grad_custom_pre_pass"


def test_a_wrong_pattern_of_the_joint_graph_is_named():
    from torch._inductor.fx_passes import fuse_attention

    right = fuse_attention._scaled_dot_product_attention

    def wrong(query, *args, **kwargs):
        return right(query * 1.01, *args, **kwargs)

    def attend(q, k, v):
        return (q @ k.transpose(-2, -1)).div(4.0).softmax(-1) @ v

    with mock.patch.object(fuse_attention, "_scaled_dot_product_attention", wrong):
        checks = checked(attend, *inputs(2, 2, 8, 16, count=3))
    (finding,) = checks.findings
    assert finding.path == "pass pass_pattern_0 (joint_graph_passes)"


def test_what_is_wrong_outside_of_all_named_passes_is_laid_at_the_stage():
    from torch._inductor.fx_passes import joint_graph

    def wrong(module):
        replace(ATEN.sin.default, ATEN.cos.default)(module.graph)

    with mock.patch.object(joint_graph, "canonicalize_aten_ir_passes", wrong):
        checks = checked(wave, torch.randn(4, 8))
    (finding,) = checks.findings
    assert finding.path == "joint_graph_passes, outside of its named passes"
    assert finding.origin.name == "joint_graph_passes"


def test_two_draws_from_one_seed_are_seen():
    from torch._inductor.fx_passes import replace_random

    right = replace_random.fuse_seed_creation_pass

    def wrong(graph):
        count = right(graph)
        for node in graph.find_nodes(op="call_function", target=PRIMS.inductor_lookup_seed.default):
            node.args = (node.args[0], 0)
        return count

    def noisy(x):
        return x + torch.rand(4, 8) * torch.rand(4, 8)

    with mock.patch.object(replace_random, "fuse_seed_creation_pass", wrong):
        checks = checked(noisy, torch.randn(4, 8))
    (finding,) = checks.findings
    assert finding.origin.name == "fuse_seed_creation_pass"


def test_a_draw_of_another_distribution_is_seen():
    def change(graph):
        for node in graph.find_nodes(op="call_function", target=PRIMS.inductor_random.default):
            node.args = (*node.args[:2], "randn")

    checks = checked(
        lambda x: x + torch.rand(4, 8), torch.randn(4, 8), joint_custom_post_pass=change
    )
    (finding,) = checks.findings
    assert finding.origin.name == "joint_custom_post_pass"


def test_a_pass_that_changes_the_dtype_of_a_result_is_named():
    def change(graph):
        for node in graph.find_nodes(op="call_function", target=PRIMS.convert_element_type.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)

    checks = checked(
        lambda x: (x * 2).to(torch.bfloat16), torch.randn(4, 8), post_grad_custom_pre_pass=change
    )
    (finding,) = checks.findings
    assert finding.aspect is Aspect.DTYPE
    assert "dtype torch.float32 instead of torch.bfloat16" in finding.reason


def test_a_pass_that_rounds_what_was_not_rounded_is_named():
    def change(graph):
        (node,) = graph.find_nodes(op="call_function", target=ATEN.sin.default)
        with graph.inserting_after(node):
            narrow = graph.call_function(PRIMS.convert_element_type.default, (node, torch.bfloat16))
        with graph.inserting_after(narrow):
            wide = graph.call_function(PRIMS.convert_element_type.default, (narrow, torch.float32))
        node.replace_all_uses_with(wide, delete_user_cb=lambda user: user not in {narrow, wide})

    checks = checked(wave, torch.randn(4, 8), post_grad_custom_post_pass=change)
    (finding,) = checks.findings
    assert finding.origin.name == "post_grad_custom_post_pass"


def test_a_pass_wrong_inside_a_branch_is_named_once():
    def choose(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.sin() * 3, (x,))

    change = replace(ATEN.sin.default, ATEN.cos.default)
    checks = checked(choose, torch.randn(4, 8), post_grad_custom_pre_pass=change)
    assert {finding.origin.name for finding in checks.findings} == {"post_grad_custom_pre_pass"}
    assert len(checks.findings) == 2, "one for each branch, none for what is around them"


def test_a_write_that_a_pass_drops_is_seen():
    def change(graph):
        for node in graph.find_nodes(op="call_function", target=ATEN.copy_.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)

    def write(x):
        x.mul_(2)
        return x.sum()

    checks = checked(write, torch.randn(4, 8), post_grad_custom_post_pass=change)
    (finding,) = checks.findings
    assert "after the call" in finding.reason


def test_what_one_pass_undoes_of_another_is_no_fault():
    def change(factor):
        def scale(graph):
            (output,) = graph.find_nodes(op="output")
            (result,) = output.args[0]
            with graph.inserting_before(output):
                scaled = graph.call_function(ATEN.mul.Tensor, (result, factor))
            output.args = ((scaled,),)

        return scale

    checks = checked(
        wave,
        torch.randn(4, 8),
        post_grad_custom_pre_pass=change(2.0),
        post_grad_custom_post_pass=change(0.5),
    )
    assert checks.findings == []
    assert checks.passes >= 3, "the two, and the stage around them"


# --- wrong splits ---------------------------------------------------------------------------------


def test_a_mask_drawn_again_in_the_backward_graph_is_laid_at_the_split():
    weight = torch.randn(32, 32)

    def drop(x):
        return F.dropout((x @ weight).sin(), 0.5, training=True).sin()

    with torch._functorch.config.patch(activation_memory_budget=0.5):
        checks = checked(drop, *inputs(32, 32))
    (finding,) = checks.findings
    assert finding.path == "forward/backward split"
    assert finding.origin.kind is OriginKind.PARTITION
    assert finding.origin.nodes == ("inductor_random_default",)
    assert (
        "the backward graph draws random numbers that the forward graph has drawn already"
        in finding.reason
    )
    assert checks.splits == 1


def test_saved_values_in_the_wrong_order_are_laid_at_the_split():
    from torch._inductor import compile_fx

    right = compile_fx.partition_fn

    def wrong(graph, joint_inputs, **kwargs):
        forward, backward = right(graph, joint_inputs, **kwargs)
        (output,) = forward.graph.find_nodes(op="output")
        saved = output.args[0]
        output.args = ((*saved[:-2], saved[-1], saved[-2]),)
        forward.recompile()
        return forward, backward

    with mock.patch.object(compile_fx, "partition_fn", wrong):
        checks = checked(lambda x, y: x.sin() * y, *inputs(4, 8, count=2))
    (finding,) = checks.findings
    assert finding.path == "forward/backward split"
    assert finding.origin.nodes == ()


# --- manners --------------------------------------------------------------------------------------


def test_watching_changes_neither_the_result_nor_the_random_numbers():
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    x = torch.randn(4, 8)

    def trained():
        torch.compiler.reset()
        torch.manual_seed(3)
        net.zero_grad()
        y = torch.compile(net)(x)
        y.square().sum().backward()
        grads = [parameter.grad.clone() for parameter in net.parameters()]
        return [y.detach(), *grads, torch.get_rng_state()]

    plain = trained()
    checks = PassChecks()
    with checks.watching():
        watched = trained()
    assert checks.passes > 0
    assert all(map(torch.equal, plain, watched))


def test_a_fault_of_the_check_is_a_finding_and_leaves_the_compile_alone(monkeypatch):
    def broken(*_):
        message = "a fault of ours"
        raise ZeroDivisionError(message)

    monkeypatch.setattr(passes, "compare", broken)
    change = replace(ATEN.sin.default, ATEN.cos.default)
    checks = checked(wave, torch.randn(4, 8), post_grad_custom_post_pass=change)
    assert checks.findings
    assert {finding.status for finding in checks.findings} == {Status.UNVERIFIED}
    assert "the check itself raised ZeroDivisionError: a fault of ours" in checks.findings[0].reason


@torch.library.custom_op("paritas_tests::only_ones", mutates_args=())
def only_ones(x: torch.Tensor) -> torch.Tensor:
    if not bool((x == 1).all()):
        message = "ones are wanted"
        raise ValueError(message)
    return x * 2


@only_ones.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_pass_over_a_graph_that_runs_on_no_made_up_inputs_is_unverified():
    change = replace(ATEN.sin.default, ATEN.cos.default)
    checks = checked(
        lambda x: only_ones(x).sin(), torch.ones(4, 8), post_grad_custom_post_pass=change
    )
    (finding,) = checks.findings
    assert finding.path == "pass post_grad_custom_post_pass (post_grad_passes)"
    assert finding.status is Status.UNVERIFIED
    assert "ValueError: ones are wanted" in finding.reason


def test_torch_is_as_it_was_when_nobody_watches():
    from torch._inductor import compile_fx, freezing
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver

    def patched():
        return [
            compile_fx._recursive_pre_grad_passes,
            compile_fx._recursive_joint_graph_passes,
            compile_fx._recursive_post_grad_passes,
            compile_fx.partition_fn,
            freezing.freeze,
            GraphTransformObserver.__enter__,
            GraphTransformObserver.__exit__,
        ]

    before = patched()
    with PassChecks().watching():
        with PassChecks().watching():
            assert not set(before) & set(patched())
        assert not set(before) & set(patched())
    assert patched() == before


# --- for locating, and by guard -------------------------------------------------------------------


def test_the_passes_of_one_graph_can_be_checked_alone():
    lowered = []

    def backend(graph, example_inputs):
        def watch(graph, compiled):
            lowered.append(graph)
            return compiled

        return compile_watched(graph, example_inputs, watch)

    change = replace(ATEN.sin.default, ATEN.cos.default)
    with torch._inductor.config.patch(post_grad_custom_post_pass=change), without_kernels():
        torch.compile(wave, backend=backend)(torch.randn(4, 8))
    (finding,) = check_graph_passes(lowered[0])  # under the settings of its compile
    assert finding.origin.name == "post_grad_custom_post_pass"
    with without_kernels():
        torch.compile(wave, backend=backend)(torch.randn(4, 4))
    assert check_graph_passes(lowered[-1]) == []


def test_guard_tells_of_a_wrong_pass_when_asked_to():
    backend = paritas.guard(on_mismatch="record", check_passes=True, locate=False)
    change = replace(torch.sin, torch.cos)
    with torch._inductor.config.patch(pre_grad_custom_pass=change):
        torch.compile(wave, backend=backend)(torch.randn(4, 8))
    failed = backend.verdict().failures
    assert [finding.origin.name for finding in failed] == ["pre_grad_custom_pass"]
