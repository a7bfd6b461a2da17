"""`paritas verify-graph`, from the command line to the exit code."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys

import pytest
import torch
from click.testing import CliRunner

import processes
from paritas.app.cli import main
from paritas.sharding.graphs.rows import CallOutcome, GraphReport
from paritas.sharding.graphs.verify import verify_graph
from paritas.sharding.operators.library.registry import unregister
from paritas.sharding.proofs.graph_checker import GraphChecker
from unit.sharding.graphs.small_graphs import graph, linear, relu

NET = """
import torch
from torch import nn

import net_operators

torch.fx.wrap("centred")
from net_operators import centred


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x):
        return centred(torch.relu(self.second(torch.relu(self.first(x)))))


def build():
    torch.manual_seed(0)
    return torch.fx.symbolic_trace(Net()), (torch.randn(4, 8),)


def inputs():
    return (torch.ones(4, 8),)


def nothing():
    return 3
"""

OPERATORS = """
from paritas.partition import register


def centred(x):
    return x - x.mean(dim=0)


def refused(x):
    raise KeyboardInterrupt
"""

# What a user registers for the operator: the mean is over all rows, so that rows cannot be split.
RULES = """
import net_operators
from paritas.partition import register

register(net_operators.centred, "{}", overwrite=True)
"""

DEADLY = '''
import os
import signal
from pathlib import Path


def once(x):
    """Kills the process that runs it, the first time."""
    if not Path("{marker}").exists():
        Path("{marker}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return x.relu()
'''


BUILT = ("--graph", "net:build", "--outdir", "out")


@pytest.fixture
def net(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "net_operators.py").write_text(OPERATORS)
    (tmp_path / "right_rules.py").write_text(RULES.format("a^ b -> a^ b"))
    (tmp_path / "wrong_rules.py").write_text(RULES.format("a b -> a b"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("net", "net_operators", "right_rules", "wrong_rules"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("net", "net_operators", "right_rules", "wrong_rules"):
        sys.modules.pop(name, None)
    if "net_operators.centred" in known_names():
        unregister("net_operators.centred")


def known_names():
    from paritas.sharding.operators.library import known

    return known()


def run(*arguments):
    return CliRunner().invoke(main, ["verify-graph", *map(str, arguments)])


def words(text):
    return " ".join(text.split())


# --- what it says ---------------------------------------------------------------------------------


def test_a_graph_with_correct_splits_passes_and_all_files_are_written(net, monkeypatch):
    monkeypatch.setattr("paritas.core.results.progress.SECONDS_BETWEEN_LINES", 0.0)
    result = run("--graph", "net:build", "--outdir", "out", "--import", "right_rules")
    assert result.exit_code == 0, result.output
    assert "checking operators" in result.stderr
    assert result.stdout.splitlines()[-1].startswith("verified: 5 of 5 calls verified")
    assert max(map(len, result.stdout.splitlines())) <= 120
    names = {path.name for path in (net / "out").iterdir() if not path.name.startswith(".")}
    assert names == {"journal.jsonl", "report.html", "results.csv", "results.json"}


def test_a_wrong_rule_fails_with_a_script_and_the_exit_code_is_1(net, untried):
    result = run("--graph", "net:build", "--outdir", "out", "--import", "wrong_rules", "--no-html")
    assert result.exit_code == 1, result.output
    assert "centred" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("failed:")
    [script] = (net / "out" / "repro").glob("*.py")
    assert script.name.endswith("_centred.py")
    assert "It imports net_operators: run it where Python can find that." in script.read_text()
    assert not (net / "out" / "report.html").exists()


def test_without_a_rule_for_every_operator_there_is_something_that_was_not_checked(net):
    result = run("--graph", "net:build", "--outdir", "out", "--quiet")
    assert result.exit_code == 0, result.output
    assert not result.stderr
    assert len(result.stdout.splitlines()) == 1
    report = GraphReport.from_json((net / "out" / "results.json").read_bytes())
    assert report.counts()[CallOutcome.NOTHING] == 1


ROWS = """
outputs = "replicate"
[inputs]
"first.*" = "shard(0)"
"second.weight" = "shard(1)"
"second.bias" = "once"
[collectives]
{}
"""


def test_proofs_are_shown_everywhere_and_their_certificates_are_written(net):
    """The network without the user's operator, columns before rows."""
    (net / "tp.toml").write_text(ROWS.format('"linear_1" = "all_reduce"'))
    (net / "plain.py").write_text(NET.replace("centred(torch.relu(self", "(torch.relu(self"))
    given = ("--graph", "plain:build", "--outdir", "out", "--placements", "tp.toml")
    ended = run(*given, "--certificates", "proofs", "--format", "junit", "--format-file", "j.xml")
    assert ended.exit_code == 0, ended.output
    shown = words(ended.output)
    assert "the graph under its placements: proved proved over the reals" in shown
    assert "of 8 proved over the reals; the graph under its placements is proved" in shown
    assert "proved over the reals" in (net / "j.xml").read_text()
    assert "proof under the placements" in (net / "out" / "report.html").read_text()
    assert "proved over the reals" in (net / "out" / "results.csv").read_text()
    (GraphChecker(json.loads((net / "proofs" / "graph.json").read_text()))).check()
    assert len(list((net / "proofs").iterdir())) > 1

    (net / "tp.toml").write_text(ROWS.format(""))
    ended = run(*given[:3], "other", *given[4:])
    assert ended.exit_code == 1
    assert "an all_reduce of linear_1 is missing before it" in words(ended.output)


def test_values_of_a_run_feed_the_operators(net):
    by_function = ("--inputs", "net:inputs")
    torch.save([torch.ones(4, 8)], net / "x.pt")
    for number, inputs in enumerate([by_function, ("--inputs", "x.pt")]):
        result = run("--graph", "net:build", "--outdir", f"out{number}", *inputs, "--no-html")
        assert result.exit_code == 0, result.output
        report = GraphReport.from_json((net / f"out{number}" / "results.json").read_bytes())
        assert any("recorded" in note for note in report.operators[0].notes)


def test_the_same_command_again_takes_everything_over(net):
    asked = ("--graph", "net:build", "--outdir", "out", "--no-html")
    assert run(*asked).exit_code == 0
    again = run(*asked)
    assert again.exit_code == 0
    assert "from an earlier run" in words(again.stdout)


def test_several_numbers_of_ranks_are_all_checked(net):
    assert run("--graph", "net:build", "--outdir", "out", "--ranks", "2,3").exit_code == 0
    report = GraphReport.from_json((net / "out" / "results.json").read_bytes())
    assert {one.ranks for operator in report.operators for one in operator.options} == {2, 3}


# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--outdir", "out"), "Missing option '--graph'"),
        (("--graph", "net:build"), "Missing option '--outdir'"),
        (("--graph", "gone.pt2", "--outdir", "out"), "'gone.pt2': no such file"),
        (("--graph", "net:bild", "--outdir", "out"), "did you mean 'build'?"),
        (("--graph", "net:nothing", "--outdir", "out"), "cannot read a graph from int 3"),
        (("--graph", "net:build", "--outdir", "net.py"), "it is a file; use a folder"),
        (
            ("--graph", "net:build", "--outdir", "out", "--ranks", "1"),
            "must be 2 or more, as in 2 or 2,4; got '1'",
        ),
        (("--graph", "net:build", "--outdir", "out", "--options", "some"), "'some' is not one of"),
        (("--graph", "net:build", "--outdir", "out", "--cap", "0"), "0 is not in the range"),
        (("--graph", "net:build", "--outdir", "out", "--jobs", "0"), "0 is not in the range"),
        (("--graph", "net:build", "--outdir", "out", "--executor", "threads"), "random state"),
        (("--graph", "net:build", "--outdir", "out", "--executor", "x", "--jobs", "2"), "'x'"),
        (("--graph", "net:build", "--outdir", "out", "--import", "gone"), "no module 'gone'"),
        (("--graph", "net:build", "--outdir", "out", "--inputs", "gone.pt"), "no such file"),
        (("--graph", "net.py", "--outdir", "out"), "is not a graph that paritas can read"),
        ((*BUILT, "--device", "abacus"), "--device 'abacus' cannot be used: Expected one"),
        ((*BUILT, "--device", "meta"), "--device 'meta' holds no values"),
        ((*BUILT, "--confirm", "mpi"), "'mpi' is not one of 'gloo', 'nccl'"),
        ((*BUILT, "--confirm", "nccl"), "NCCL needs tensors on GPUs, but the device is 'cpu'"),
    ],
)
def test_invalid_arguments_are_refused_by_name_with_exit_code_2(net, arguments, told):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert told in words(result.stderr)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one")
def test_a_gpu_that_is_not_there_is_an_error_and_nothing_is_written(net):
    for asked in ((), ("--confirm", "nccl")):
        result = run(*BUILT, "--device", "cuda", *asked)
        assert result.exit_code == 2, result.output
        assert "Error: --device 'cuda' cannot be used: " in result.stderr
        assert not (net / "out").exists()


def test_inputs_that_would_run_code_are_refused(net):
    class Payload:
        def __reduce__(self):
            return os.system, ("touch owned",)

    torch.save(Payload(), net / "x.pt")
    result = run("--graph", "net:build", "--outdir", "out", "--inputs", "x.pt")
    assert result.exit_code == 2, result.output
    assert "cannot be read" in result.stderr
    assert not (net / "owned").exists()


def test_results_of_another_graph_are_not_mixed_with_these(net):
    assert run("--graph", "net:build", "--outdir", "out", "--no-html").exit_code == 0
    other = run("--graph", "net:build", "--outdir", "out", "--no-html", "--seed", "1")
    assert other.exit_code == 2
    assert "holds results with other settings (seed was 0, now it is 1)" in words(other.stderr)
    asked = ("--graph", "net:build", "--outdir", "out", "--no-html", "--seed", "1", "--overwrite")
    assert run(*asked).exit_code == 0


# --- several graphs ------------------------------------------------------------------------------


def test_a_second_graph_is_registered_into_the_same_folder(net):
    """What both have in common is verified once, and the first graph stays in all reports."""
    (net / "net2.py").write_text(NET.replace("self.second(torch.relu(", "self.second(torch.tanh("))
    assert run(*BUILT).exit_code == 0
    result = run("--graph", "net2:build", "--outdir", "out")
    sys.modules.pop("net2", None)
    assert result.exit_code == 0, result.output
    told = words(result.stdout)
    # Both linears and relu; `centred` is a function of the user's, in memory.
    assert "3 operators already verified for another graph here" in told
    assert "also in this folder: 1 graph" in told
    report = GraphReport.from_json((net / "out" / "results.json").read_bytes())
    assert [len(one.operators) for one in (report, *report.others)] == [5, 4]
    names = {path.name for path in (net / "out").glob("*.html")}
    assert names == {"report.html", "report_1.html"}


# --- what cuts it short ---------------------------------------------------------------------------


def test_an_interruption_ends_with_130_and_the_same_command_goes_on(net, monkeypatch):
    from paritas.sharding.graphs import verify

    check, seen = verify.check_call, []

    def interrupted(call, settings, values=None):
        seen.append(call.name)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return check(call, settings, values)

    monkeypatch.setattr(verify, "check_call", interrupted)
    asked = ("--graph", "net:build", "--outdir", "out", "--no-html")
    result = run(*asked)
    assert result.exit_code == 130, result.output
    assert "interrupted after 2 of 4 operators; run the same command to resume" in result.stderr
    report = GraphReport.from_json((net / "out" / "results.json").read_bytes())
    assert not report.ended
    again = run(*asked)
    assert again.exit_code == 0, again.output
    assert "2 operators from an earlier run" in words(again.stdout)


@pytest.mark.slow
def test_a_killed_run_resumes_and_gives_the_crashing_operator_its_own_process(
    tmp_path, monkeypatch
):
    """A process that is killed, and those of its workers."""
    forking = processes.context()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forking)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "deadly.py").write_text(DEADLY.format(marker=tmp_path / "marker"))
    out = tmp_path / "out"
    program = (
        "from unit.sharding.graphs.small_graphs import graph, linear, relu\n"
        "from paritas.sharding.graphs.verify import verify_graph\n"
        f"verify_graph(graph(linear(0), relu(1, 'deadly.once')), {str(out)!r}, "
        "imports=['deadly'])\n"
    )
    killed = processes.run("-c", program)
    assert killed.returncode == -signal.SIGKILL
    assert not (out / "results.json").exists()
    report = verify_graph(graph(linear(0), relu(1, "deadly.once")), out, imports=["deadly"])
    assert report.resumed == 1
    assert [one.outcome for one in report.operators] == [CallOutcome.VERIFIED] * 2


@pytest.mark.slow
def test_the_name_of_the_original_script_works_too(net):
    asked = ("--graph", "gone.ckp", "--outdir", "out")
    done = processes.run("-m", "paritas.verify_graph_operations", *asked)
    assert done.returncode == 2
    assert "'gone.ckp': no such file" in done.stderr
