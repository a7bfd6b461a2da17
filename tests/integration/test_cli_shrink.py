"""`paritas shrink`, from the command line to the exit code and the script."""

from __future__ import annotations

import json
import math
import sys
import types

import pytest
import torch
from click.testing import CliRunner

import paritas
from integration.dump_making import Making, values
from paritas.app.cli import main
from paritas.comparison import shrinking as comparison_shrinking
from paritas.core import time_limit
from paritas.shrinking import shrink as shrinking

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(torch.sin(self.first(x)) + x)


def build():
    return Net(), [torch.randn(4, 8)]
"""
WRONG = """
import torch


def wrong(graph, inputs):
    for node in graph.graph.find_nodes(op="call_function", target=torch.sin):
        node.target = torch.cos
    graph.recompile()
    return graph.forward


def right(graph, inputs):
    return graph.forward
"""
SCRIPT = """
import sys
import torch
import shrink_net
import shrink_backend

model, inputs = shrink_net.build()
compiled = torch.compile(model, backend=getattr(shrink_backend, sys.argv[1]))
compiled(*inputs)
print("the script has ended")
"""
SCALED = "scaled by 1.5 (reproduces the candidate bit for bit); in row 2 of 4"
MODULES = ("shrink_net", "shrink_backend")


@pytest.fixture(autouse=True)
def net(tmp_path, monkeypatch):
    (tmp_path / "shrink_net.py").write_text(NET)
    (tmp_path / "shrink_backend.py").write_text(WRONG)
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    torch.compiler.reset()
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def shrink(*arguments):
    return CliRunner().invoke(main, ["shrink", *map(str, arguments)])


# --- a model --------------------------------------------------------------------------------------


def test_a_wrong_operator_of_a_model_becomes_a_standalone_script_and_is_1(net, monkeypatch):
    monkeypatch.setattr("paritas.core.results.progress.SECONDS_BETWEEN_LINES", 0.0)
    result = shrink(
        "shrink_net:build", "--backend", "shrink_backend:wrong", "--output", "out", "--json", "j"
    )
    assert result.exit_code == 1, result.output
    assert "trying the 4 operator calls one by one: at most " in result.stderr
    assert result.stdout.splitlines()[0] == (
        "different: value of output: 4 operator calls -> 1 operator call"
    )
    assert result.stdout.splitlines()[-1] == (
        "script: out/repro.py; run by itself it fails: the fault is there"
    )
    told = json.loads((net / "j").read_bytes())
    assert (told["shows"], told["ended"], told["script"]) == (True, True, "out/repro.py")
    text = (net / "out" / "repro.py").read_text()
    assert "paritas" not in text


def test_a_place_that_verify_named_is_tried_before_all_other_operators(net, monkeypatch):
    monkeypatch.setattr("paritas.core.results.progress.SECONDS_BETWEEN_LINES", 0.0)
    backend = "--backend", "shrink_backend:wrong"
    for place, searches in (("sin", False), ("no_such_node", True)):
        result = shrink("shrink_net:build", *backend, "--at", place, "--output", place)
        assert result.exit_code == 1, result.output
        assert ("operator calls one by one" in result.stderr) is searches
        assert "4 operator calls -> 1 operator call" in result.stdout


def test_a_model_that_is_right_is_3_and_nothing_is_written(net):
    result = shrink("shrink_net:build", "--backend", "shrink_backend:right")
    assert result.exit_code == 3
    assert "nothing to shrink: none of the 1 graphs fails on its own" in result.stderr
    assert not (net / "shrunk").exists()


def interrupted(*_):
    raise KeyboardInterrupt


def test_an_interruption_keeps_the_best_so_far_and_is_130(net, untried, monkeypatch):
    monkeypatch.setattr(shrinking, "reduce_shapes", interrupted)
    result = shrink("shrink_net:build", "--backend", "shrink_backend:wrong", "--json", "j")
    assert result.exit_code == 130, result.output
    assert "interrupted before the search was finished" in result.stdout
    assert "-> 1 operator call" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("script: shrunk/repro.py; run by itself")
    told = json.loads((net / "j").read_bytes())
    assert (told["ended"], told["interrupted"], told["shows"]) == (False, True, True)


def test_a_script_is_kept_and_called_untried_if_its_run_is_interrupted(net, monkeypatch):
    monkeypatch.setattr("paritas.core.reporting.scripts.run_script", interrupted)
    result = shrink("shrink_net:build", "--backend", "shrink_backend:wrong", "--output", "out")
    assert result.exit_code == 130, result.output
    assert result.stdout.splitlines()[-1] == (
        "script: out/repro.py; interrupted before it was run by itself"
    )
    compile((net / "out" / "repro.py").read_bytes(), "repro.py", "exec")


# --- a script -------------------------------------------------------------------------------------


def test_the_first_graph_that_fails_in_a_script_is_shrunk(untried):
    result = shrink("train.py", "--output", "out", "--", "wrong")
    assert result.exit_code == 1, result.output
    assert "the script has ended" in result.stdout
    assert "4 operator calls -> 1 operator call" in result.stdout


def test_a_script_in_which_nothing_fails_is_3():
    result = shrink("train.py", "--", "right")
    assert result.exit_code == 3
    assert "nothing to shrink: identical: " in result.stderr


# --- a folder of compare --------------------------------------------------------------------------


def write_dump(path, fault=None):
    """Three products, each of the one before."""
    making = Making(path)
    x, weight, bias = values(4, 8), values(8, 8, seed=1), values(8, seed=2)
    for layer in range(3):
        y = torch.addmm(bias, x, weight)
        if layer == 1 and fault is not None:
            y = fault(y)
        op = "aten.addmm.default"
        making.call(f"layers.{layer}/{op}", [bias, x, weight], y, op=op, module=f"layers.{layer}")
        x = y.cos()
    making.close()


def one_row_scaled(y):
    y = y.clone()
    y[2] *= 1.5
    return y


@pytest.fixture
def compared(net):
    write_dump(net / "golden")
    write_dump(net / "mine", one_row_scaled)
    done = CliRunner().invoke(
        main, ["compare", "--my-path", "mine", "--golden-path", "golden", "--output", "compared"]
    )
    assert done.exit_code == 1
    return net / "compared"


def test_the_operator_of_the_first_divergence_is_shrunk_to_one_element(compared, net):
    result = shrink(compared, "--output", "out")
    assert result.exit_code == 1, result.output
    first, diagnosis, *_ = result.stdout.splitlines()
    assert first.endswith("different: 168 numbers -> 19 numbers")
    assert diagnosis == f"  {SCALED} (25 % of the elements)"
    assert "run by itself it fails: the fault is there" in result.stdout
    assert "torch.ops.aten.addmm.default(v0, v1, v2)" in (net / "out" / "repro.py").read_text()


@pytest.mark.parametrize(
    "where", ["comparison.shrinking._part", "core.reporting.scripts.run_script"]
)
def test_an_interruption_keeps_the_operator_as_small_as_it_is(
    compared, net, untried, monkeypatch, where
):
    monkeypatch.setattr(f"paritas.{where}", interrupted)
    result = shrink("compared", "--output", "out")
    assert result.exit_code == 130, result.output
    assert "script: out/repro.py" in result.stdout.splitlines()[-1]
    assert (net / "out" / "repro.py").exists()


@pytest.mark.parametrize("spare", [0, 1])
def test_a_search_whose_time_is_over_after_its_last_case_is_finished(
    compared, untried, monkeypatch, spare
):
    """With `spare`, the time is over before the last case."""
    now, tried = [0.0], []
    cut = comparison_shrinking._part

    def count_part(*args):
        tried.append(args)
        now[0] = 0.0 if len(tried) < last else 1000.0
        return cut(*args)

    last = math.inf
    monkeypatch.setattr(comparison_shrinking, "_part", count_part)
    monkeypatch.setattr(time_limit, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    assert comparison_shrinking.shrink_comparison(compared, compared / "out").ended
    last = len(tried) - spare
    tried.clear()
    assert comparison_shrinking.shrink_comparison(compared, compared / "out").ended is not bool(
        spare
    )


def test_the_diagnosis_is_in_the_table_and_the_report_of_compare(compared):
    assert SCALED in (compared / "comparison.csv").read_text()
    assert SCALED in (compared / "report.html").read_text()


def test_rows_that_only_inherit_an_error_state_no_kind(net):
    for name, factor in (("golden", 2.0), ("mine", 3.0)):
        making, x = Making(net / name), values(4, 8)
        y = factor * x
        making.call("a/mul", [x, 2.0], y, op="aten.mul.Tensor", module="a")
        making.call("b/neg", [y], -y, op="aten.neg.default", module="b")
        making.close()
    rows = paritas.compare(net / "mine", net / "golden").rows
    made = {row.op: row for row in rows if row.side == "output"}
    mul, neg = made["aten.mul.Tensor"], made["aten.neg.default"]
    assert (mul.made, neg.made) == ("here", "before")
    first, result = mul.detail.diagnosis, neg.detail.diagnosis
    assert first.patterns
    assert result.where is not None
    assert result.patterns == ()


def test_dumps_that_agree_have_nothing_to_shrink(net):
    write_dump(net / "golden")
    command = ["compare", "--my-path", "golden", "--golden-path", "golden", "--output", "same"]
    assert CliRunner().invoke(main, command).exit_code == 0
    result = shrink("same")
    assert result.exit_code == 3
    assert "nothing to shrink: the two dumps do not diverge" in result.stderr


def test_a_dump_that_is_gone_is_2(compared, net):
    (net / "mine").rename(net / "elsewhere")
    result = shrink(compared)
    assert result.exit_code == 2
    assert "mine" in result.stderr


# --- a folder of verify-graph ---------------------------------------------------------------------

GRAPH = """
import torch
from paritas.partition import register


def centred(x):
    return x - x.mean(dim=0)


torch.fx.wrap("centred")
register(centred, "a b -> a b", overwrite=True)


def build():
    def program(x):
        return centred(x)

    program.__globals__["centred"] = centred
    return torch.fx.symbolic_trace(program), (torch.randn(64, 32),)
"""


@pytest.fixture
def graph_results(net):
    from paritas.sharding.operators.library import unregister

    (net / "shrink_graph.py").write_text(GRAPH)
    command = ["verify-graph", "--graph", "shrink_graph:build", "--outdir", "results", "--no-html"]
    done = CliRunner().invoke(main, [*command, "--import", "shrink_graph"])
    assert done.exit_code == 1, done.output
    yield net / "results"
    sys.modules.pop("shrink_graph", None)
    unregister("shrink_graph.centred")


def test_a_wrong_split_is_shown_on_the_smallest_shapes(untried, graph_results, net):
    result = shrink(graph_results, "--graph", "shrink_graph:build", "--output", "out")
    assert result.exit_code == 1, result.output
    assert "centred(f32[64, 32]) -> no dimension longer than 2" in result.stdout
    assert "torch.randn([2, 2]" in (net / "out" / "repro" / "00_centred.py").read_text()


def test_a_graph_that_is_not_a_file_has_to_be_named(untried, graph_results):
    result = shrink(graph_results)
    assert result.exit_code == 2
    assert "use --graph with the graph that verify-graph checked" in result.stderr


# --- slips ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nowhere.py",), "'nowhere.py' does not exist"),
        (("shrink_net",), "is not of the form package.module:name"),
        ((".",), "contains neither comparison.json of paritas compare nor results.json"),
        ((".", "--mode", "default"), "--mode has no effect on the folder '.'"),
        ((".", "--at", "relu_3"), "--at has no effect on the folder '.'"),
        (("train.py", "--backend", "eager"), "--backend has no effect on the script 'train.py'"),
        (("train.py", "--graph", "x.pt2"), "--graph needs a folder of verify-graph"),
        (("shrink_net:build", "--time", "0"), "--time"),
        (("shrink_net:build", "--", "x"), "only a script takes arguments"),
        (("shrink_net:build", "--backend", "inductr"), "did you mean 'inductor'?"),
        (("shrink_net:build", "--setup", "no_such"), "--setup 'no_such' cannot be imported"),
        (("shrink_net:build", "--backend", "shrink_backend:gone"), "cannot be imported"),
    ],
)
def test_a_slip_is_2_and_named(arguments, told):
    result = shrink(*arguments)
    assert result.exit_code == 2, result.output
    assert told in " ".join(result.stderr.split())
