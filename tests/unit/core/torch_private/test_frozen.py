"""Graphs as they are in the middle of a compile: unsorted, half rewritten, about to change."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._inductor.pattern_matcher import Match  # noqa: TID251  (what passes.py reads)
from torch.fx import Graph, GraphModule, symbolic_trace

from paritas.core.torch_private.passes import Fingerprint, UnplayableError, freeze, may_write
from paritas.core.torch_private.replaying import replay

ATEN = torch.ops.aten
X = torch.arange(4.0)


def chain():
    """cos(sin(x)), with the nodes by name."""
    graph = Graph()
    x = graph.placeholder("x")
    sin = graph.call_function(ATEN.sin.default, (x,))
    cos = graph.call_function(ATEN.cos.default, (sin,))
    graph.output((cos,))
    module = GraphModule({}, graph)
    return module, {node.name: node for node in graph.nodes}


def names(graph):
    return [node.name for node in graph.nodes]


def test_a_frozen_graph_stays_as_it_was():
    module, nodes = chain()
    kept = freeze(module)
    nodes["sin_default"].target = ATEN.exp.default
    assert names(kept) == ["x", "sin_default", "cos_default", "output"]
    assert torch.equal(replay(kept, [X], {})[0], X.sin().cos())


def test_an_unsorted_graph_is_frozen_sorted():
    module, nodes = chain()
    nodes["cos_default"].append(nodes["sin_default"])
    assert names(module.graph) == ["x", "cos_default", "sin_default", "output"]
    assert names(freeze(module)) == ["x", "sin_default", "cos_default", "output"]


def test_a_graph_that_needs_what_it_does_not_have_is_refused():
    module, nodes = chain()
    _, others = chain()
    nodes["cos_default"].args = (others["sin_default"],)
    with pytest.raises(UnplayableError, match="cos_default needs a node that is not in the graph"):
        freeze(module)


def test_a_graph_that_names_what_its_module_lost_is_refused():
    graph = Graph()
    graph.output((graph.get_attr("weight"),))
    module = GraphModule({"weight": torch.ones(2)}, graph)
    del module.weight
    with pytest.raises(UnplayableError, match="the graph names weight"):
        freeze(module)


def test_constants_are_remembered_with_the_graph():
    graph = Graph()
    graph.output((graph.get_attr("weight"),))
    module = GraphModule({"weight": torch.ones(2)}, graph)
    kept = freeze(module)
    module.weight = torch.zeros(2)
    assert torch.equal(replay(kept, [], {})[0], torch.ones(2))


def test_a_node_with_a_lowering_of_its_own_is_run_as_what_it_replaced():
    module, nodes = chain()
    before = freeze(module)
    match = Match.__new__(Match)
    match.nodes = [nodes["sin_default"], nodes["cos_default"]]
    match.args, match.kwargs = [], {}
    handler = functools.wraps(print)(functools.partial(print, match))
    with module.graph.inserting_before(nodes["cos_default"]):
        lowered = module.graph.call_function(handler, (nodes["x"],))
    nodes["cos_default"].replace_all_uses_with(lowered)
    for name in ("cos_default", "sin_default"):
        module.graph.erase_node(nodes[name])
    after = freeze(module, before)
    assert after.assumed == (lowered.name,)
    assert torch.equal(replay(after, [X], {})[0], X.sin().cos())
    with pytest.raises(UnplayableError, match="the graph before has no cos_default"):
        freeze(module)


# --- fingerprints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda nodes: setattr(nodes["sin_default"], "target", ATEN.exp.default),
        lambda nodes: setattr(nodes["cos_default"], "args", (nodes["x"],)),
        lambda nodes: nodes["sin_default"].append(
            nodes["sin_default"].graph.create_node("call_function", ATEN.neg.default, (nodes["x"],))
        ),
        lambda nodes: nodes["cos_default"].append(nodes["sin_default"]),
    ],
)
def test_a_change_changes_the_fingerprint(change):
    module, nodes = chain()
    before = Fingerprint(module)
    assert before.same(Fingerprint(module))
    change(nodes)
    assert not before.same(Fingerprint(module))


def test_another_constant_under_the_same_name_changes_the_fingerprint():
    graph = Graph()
    graph.output((graph.get_attr("weight"),))
    module = GraphModule({"weight": torch.ones(2)}, graph)
    before = Fingerprint(module)
    module.weight = torch.ones(2)
    assert not before.same(Fingerprint(module))


def test_a_change_inside_a_branch_changes_the_fingerprint():
    body, nodes = chain()
    graph = Graph()
    graph.output((graph.get_attr("body"),))
    module = GraphModule({"body": body}, graph)
    before = Fingerprint(module)
    nodes["sin_default"].target = ATEN.exp.default
    assert not before.same(Fingerprint(module))


# --- writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "writes"),
    [
        (lambda x: torch.ops.aten.add.Tensor(x, 1), False),
        (lambda x: torch.ops.aten.add_.Tensor(x, 1), True),
        (lambda x: x[0], False),
        (lambda x: x.add_(1), True),
        (lambda x: torch.sin(x + 1), True),  # nothing is known of a function of torch's
    ],
)
def test_whether_a_graph_may_write_to_its_inputs(function, writes):
    assert may_write(freeze(symbolic_trace(function))) is writes
