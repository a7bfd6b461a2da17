"""Exit codes are a promise: 0 pass, 1 fail, 2 wrong usage, 3 unverified, 130 interrupted.

The work behind each command is replaced, so that only what becomes of its outcome is tested.
"""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from paritas.app.cli import _HOMES, main
from paritas.app.doctor.examination import Check
from paritas.comparison.rows import Comparison, ComparisonRow, DumpFacts
from paritas.core.commands.scripts import Ending
from paritas.core.errors import ClusterLostError, ParitasError, UsageError
from paritas.core.results.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.core.results.items import Item, ItemKind
from paritas.guarding.report import RankReport
from paritas.sharding.graphs.rows import CallOutcome, CallSite, GraphReport, OperatorResult
from paritas.sharding.operator_check import CheckedOperator

CODES = {
    Status.IDENTICAL: 0,
    Status.EQUIVALENT: 0,
    Status.UNSTABLE: 0,
    Status.UNVERIFIED: 3,
    Status.DEGRADED: 1,
    Status.DIFFERENT: 1,
}
OUTCOMES = {
    CallOutcome.VERIFIED: 0,
    CallOutcome.FAILED: 1,
    CallOutcome.UNSUPPORTED: 3,
    CallOutcome.NOTHING: 3,
}


def invoke(*args):
    return CliRunner().invoke(main, ["--no-config", *args])


def verdict(status, *, strict=False):
    finding = Finding(item=Item(ItemKind.OUTPUT, "output 0"), aspect=Aspect.VALUE, status=status)
    return Verdict(findings=(finding,), coverage=Coverage(compared=1), strict=strict)


def comparison(status, *, strict=False):
    facts = DumpFacts(path="dump", kind="paritas")
    row = ComparisonRow(index=0, step=0, name="layer", status=status)
    return Comparison(
        my=facts, golden=facts, rows=(row,), coverage=Coverage(compared=1), strict=strict
    )


def graph(outcome):
    operator = OperatorResult(
        key="k",
        operator="aten.relu",
        signature="relu(f32[2])",
        sites=(CallSite(position=0, node="relu"),),
        outcome=outcome,
    )
    return GraphReport(graph="model.pt2", kind="pt2", operators=(operator,), calls=1)


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """How each command is called, and how its outcome is put in place of its work."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")

    def instead(where, value):
        monkeypatch.setattr(where, lambda *_args, **_kwargs: value)

    def run(found):
        instead("paritas.core.commands.scripts.run_last_program", Ending())
        instead("paritas.guarding.report.report_on", RankReport((), found))
        return ["run", "script.py"]

    def verify(found):
        instead("paritas.verification.command._run_verify", found)
        return ["verify", "nets:make"]

    def verify_parallel(found):
        instead("paritas.sharding.commands._run_verify_parallel", found)
        return ["verify-parallel", "nets:make", "--plan", "ddp"]

    def partition(found):
        instead(
            "paritas.sharding.commands._run_partition",
            CheckedOperator("relu", (), "given", 2, (), found),
        )
        return ["partition", "torch:relu"]

    def compare(found):
        instead("paritas.comparison.compare.compare", found)
        return ["compare", "--my-path", "a", "--golden-path", "b", "--no-html", "--overwrite"]

    def verify_graph(found):
        instead("paritas.sharding.commands._run_verify_graph", found)
        return ["verify-graph", "--graph", "model.pt2", "--outdir", "out"]

    return {
        "run": run,
        "verify": verify,
        "verify-parallel": verify_parallel,
        "partition": partition,
        "compare": compare,
        "verify-graph": verify_graph,
    }


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("name", ["run", "verify", "verify-parallel", "partition", "compare"])
def test_every_status_has_its_exit_code(commands, name, status):
    found = comparison(status) if name == "compare" else verdict(status)
    assert invoke(*commands[name](found)).exit_code == CODES[status]


@pytest.mark.parametrize("name", ["run", "verify", "verify-parallel", "partition", "compare"])
def test_unstable_is_a_failure_where_it_counts_as_one_and_nothing_compared_is_unverified(
    commands, name
):
    make = comparison if name == "compare" else verdict
    strict = make(Status.UNSTABLE, strict=True)
    assert invoke(*commands[name](strict)).exit_code == 1
    facts = DumpFacts(path="dump", kind="paritas")
    empty = Comparison(my=facts, golden=facts) if name == "compare" else Verdict()
    assert invoke(*commands[name](empty)).exit_code == 3


@pytest.mark.parametrize("outcome", CallOutcome)
def test_every_outcome_of_a_graph_has_its_exit_code(commands, outcome):
    assert invoke(*commands["verify-graph"](graph(outcome))).exit_code == OUTCOMES[outcome]


@pytest.mark.parametrize("form", ["github", "sarif", "junit"])
@pytest.mark.parametrize("name", ["run", "verify", "verify-parallel", "partition", "compare"])
def test_another_form_of_the_result_changes_neither_the_code_nor_the_last_line(
    commands, name, form, tmp_path
):
    make = comparison if name == "compare" else verdict
    command, *args = commands[name](make(Status.DIFFERENT))
    plain = invoke(command, *args)
    result = invoke(command, "--format", form, "--format-file", str(tmp_path / "told"), *args)
    assert result.exit_code == plain.exit_code == 1
    assert result.output.splitlines()[-1] == plain.output.splitlines()[-1]
    assert "different" in (tmp_path / "told").read_text()


def test_a_document_takes_stdout_and_the_text_then_goes_to_stderr(commands):
    result = invoke(*commands["verify"](verdict(Status.DIFFERENT)), "--format", "junit")
    assert result.stdout.startswith("<?xml ")
    assert result.stdout.endswith("</testsuites>\n")
    assert result.stderr.splitlines()[-1].startswith("different: the candidate ")


def test_annotations_come_before_the_text_whose_last_line_is_the_verdict(commands):
    result = invoke(*commands["verify"](verdict(Status.DIFFERENT)), "--format", "github")
    first, *_, last = result.stdout.splitlines()
    assert first.startswith(
        "::error file=nets%3Amake,line=1,title=paritas%3A output 0%3A different::"
    )
    assert last.startswith("different: the candidate ")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["verify", "nets:make", "--format-file", "x"], "needs a --format other than text"),
        (["verify", "nets:make", "--format", "junit", "--format-file", "no/x"], "cannot write"),
        (["verify", "nets:make", "--format", "pdf"], "'pdf' is not one of"),
        (["run", "--format", "sarif", "script.py"], "needs --format-file FILE"),
    ],
)
def test_a_form_that_cannot_be_given_is_refused_before_the_work(commands, args, words):
    result = invoke(*args)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("checks", "code"),
    [
        ([Check("torch", "torch", "ok", "2.13")], 0),
        ([Check("torch", "torch", "failed", "too old")], 1),
        ([Check("self-test", "process", "failed", "killed")], 3),
    ],
)
def test_the_doctor_s_exit_code_is_about_this_machine(monkeypatch, checks, code):
    monkeypatch.setattr("paritas.app.doctor.examination.examine", lambda **_: iter(checks))
    assert invoke("doctor").exit_code == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("no such dump"), 2),
        (ParitasError("this cannot be"), 2),
        (click.UsageError("no such option"), 2),
        (RuntimeError("a fault of paritas itself"), 3),
        (AssertionError("likewise"), 3),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("name", _HOMES)
def test_what_a_command_raises_becomes_the_same_code_in_every_command(
    monkeypatch, name, error, code
):
    def failing(*_args, **_kwargs):
        raise error

    command = main.get_command(click.Context(main), name)
    monkeypatch.setattr(command, "params", [])
    monkeypatch.setattr(command, "callback", failing)
    assert invoke(name).exit_code == code


@pytest.mark.parametrize("name", _HOMES)
def test_an_unknown_option_is_wrong_usage_in_every_command(name):
    assert invoke(name, "--no-such-option").exit_code == 2


@pytest.mark.parametrize("option", ["--tolerance", "--atol", "--pcc"])
def test_a_tolerance_is_not_taken_for_an_option_that_is_spelled_alike(option):
    result = invoke("verify", "package:factory", option, "1e-3")
    assert result.exit_code == 2
    assert f"no option {option}: the limit is measured, not given" in result.stderr
    assert "Did you mean" not in result.stderr


def test_a_cluster_that_is_lost_leaves_it_unverified_in_one_line(monkeypatch):
    def lost(*_args, **_kwargs):
        raise ClusterLostError("the connection to the scheduler is lost")

    monkeypatch.setattr("paritas.comparison.compare.compare", lost)
    done = invoke("compare", "--my-path", "a", "--golden-path", "b")
    assert done.exit_code == 3
    assert done.output == "Error: the connection to the scheduler is lost\n"
