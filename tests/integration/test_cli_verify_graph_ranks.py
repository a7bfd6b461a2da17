"""`paritas verify-graph --confirm gloo`: what real ranks say, in every place where it is told.

One command is run for all of these tests, on ranks that are forked.
"""

from __future__ import annotations

import csv
import json
import sys

import pytest
import torch
from click.testing import CliRunner

from paritas.app.cli import main
from paritas.core.results.findings import Status
from paritas.sharding.graphs.rows import CallOutcome, GraphReport
from paritas.sharding.graphs.verify import verify_graph
from paritas.sharding.plans import rank_pool
from unit.sharding.graphs.small_graphs import graph, linear, relu

pytestmark = pytest.mark.slow

# In one process there is no rank to ask for; on real ranks the second of them adds something.
OPERATORS = """
from torch import distributed


def shifted(x):
    return x + distributed.get_rank() if distributed.is_initialized() else x.clone()
"""

NET = """
import torch
import ranked_operators

torch.fx.wrap("shifted")
from ranked_operators import shifted


class Net(torch.nn.Module):
    def forward(self, x):
        return shifted(torch.relu(x))


def build():
    return torch.fx.symbolic_trace(Net()), (torch.randn(4, 6),)
"""

RULES = """
import ranked_operators
from paritas.partition import register

register(ranked_operators.shifted, "a b -> a b", overwrite=True)
"""


@pytest.fixture(scope="module")
def _forked_ranks():
    """A parallel test runner has a thread that only listens; new interpreters would take long."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.accelerator.is_available():
            patch.setattr(rank_pool, "start_method", lambda: "fork")
        yield
        rank_pool.close_pools()


@pytest.fixture(scope="module")
def checked(tmp_path_factory, _forked_ranks):
    """What the command printed, and the folder that it wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    names = {"ranked_operators": OPERATORS, "ranked_net": NET, "ranked_rules": RULES}
    for name, text in names.items():
        (folder / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        asked = ["--graph", "ranked_net:build", "--outdir", "out", "--import", "ranked_rules"]
        result = CliRunner().invoke(main, ["verify-graph", *asked, "--confirm", "gloo"])
        yield result, folder / "out"
        for name in names:
            sys.modules.pop(name, None)
    from paritas.sharding.operators.library import unregister

    unregister("ranked_operators.shifted")


def operators(checked):
    report = GraphReport.from_json((checked[1] / "results.json").read_bytes())
    return {one.operator.rpartition(".")[2]: one for one in report.operators}


def test_a_rule_that_real_ranks_refuse_fails_though_simulated_ones_accept_it(checked):
    result, _ = checked
    assert result.exit_code == 1, result.output
    wrong = operators(checked)["shifted"]
    assert wrong.outcome is CallOutcome.FAILED
    assert [one.split for one in wrong.options] == ["split by a", "split by b"]
    for option in wrong.options:
        told = option.confirmation
        assert (told.backend, told.simulated, told.status) == (
            "gloo",
            Status.IDENTICAL,
            Status.DIFFERENT,
        )
        assert option.status is Status.DIFFERENT
        assert option.reason.startswith("on gloo ranks, output: ")
        assert not option.verdict.passed


def test_a_rule_that_both_accept_is_verified_and_says_so(checked):
    right = operators(checked)["relu"]
    assert right.outcome is CallOutcome.VERIFIED
    assert {one.confirmation.status for one in right.options} == {Status.IDENTICAL}
    paths = [finding.path for one in right.options for finding in one.verdict.findings]
    assert "output" in paths
    assert "on gloo ranks, output" in paths


def test_the_table_and_the_line_of_the_settings_mention_real_ranks(checked):
    result, folder = checked
    with (folder / "results.csv").open() as file:
        told = {(line["node"], line["confirmation"]) for line in csv.DictReader(file)}
    assert told == {
        ("relu", "simulated identical, gloo identical"),
        ("shifted", "simulated identical, gloo different"),
    }
    words = " ".join(result.stdout.split())
    assert "4 splits over 2 ranks, 2 of 4 confirmed on gloo ranks" in words
    assert "ranks: simulated identical, gloo different" in words
    assert "ranks: simulated identical, gloo different" in (folder / "report.html").read_text()
    assert json.loads((folder / "results.json").read_text())["settings"]["confirm"] == "gloo"


def test_there_is_no_script_if_simulated_ranks_do_not_show_the_failure(checked):
    wrong = operators(checked)["shifted"]
    assert not wrong.script
    assert any("it fails only on gloo ranks" in note for note in wrong.notes)


@pytest.mark.usefixtures("_forked_ranks")
def test_an_operator_that_real_ranks_cannot_run_is_not_confirmed():
    report = verify_graph(graph(relu(0, "mine.op", lambda x: x.relu())), confirm="gloo")
    assert report.exit_code == 3
    [one] = report.operators
    assert one.outcome is CallOutcome.UNSUPPORTED
    assert "can neither be imported by its name nor pickled" in one.reason
    assert {option.confirmation.simulated for option in one.options} == {Status.IDENTICAL}


@pytest.mark.usefixtures("_forked_ranks")
def test_the_python_call_confirms_too():
    """Operators of aten travel by their names."""
    report = verify_graph(graph(linear(0)), confirm="gloo")
    assert report.passed
    [one] = report.operators
    assert {option.confirmation.backend for option in one.options} == {"gloo"}
    paths = {finding.path for option in one.options for finding in option.verdict.findings}
    assert "on gloo ranks, gradient of args[0]" in paths
    exported = torch.export.export(torch.nn.Linear(4, 6), (torch.randn(2, 4),))
    report = verify_graph(exported, confirm="gloo")
    assert report.passed
    assert report.operators[0].operator == "aten.linear.default"


def test_partition_confirms_by_the_same_runner(checked, monkeypatch):
    monkeypatch.chdir(checked[1].parent)
    monkeypatch.syspath_prepend(checked[1].parent)
    asked = ["ranked_operators:shifted", "--arg", "4x6", "--annotation", "a b -> a b"]
    alone = CliRunner().invoke(main, ["partition", *asked])
    assert alone.exit_code == 0, alone.output
    confirmed = CliRunner().invoke(main, ["partition", *asked, "--confirm", "gloo"])
    assert confirmed.exit_code == 1
    assert "on gloo ranks, output" in " ".join(confirmed.stdout.split())
