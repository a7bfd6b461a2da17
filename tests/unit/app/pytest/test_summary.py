"""What is printed at the end of a run."""

from __future__ import annotations

from paritas.app.pytest import PluginOptions
from paritas.app.pytest.session import (
    LONGEST_LINE,
    CheckOutcome,
    ReportedOutcome,
    RunAccount,
    outcome_of,
    outcomes_in,
    summary_lines,
)
from paritas.core.results.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.core.results.items import Item, ItemKind


def lines_of(tmp_path, told, account=None, **options):
    asked = PluginOptions(root=tmp_path, **options)
    return summary_lines(told, [], account or RunAccount(), asked)


def test_nothing_asked_is_nothing_said(tmp_path):
    assert lines_of(tmp_path, []) == []


def test_a_guard_that_saw_nothing_says_so(tmp_path):
    assert lines_of(tmp_path, [], guard=True) == [
        "guarded: nothing, because no test called a compiled function"
    ]


def test_verdicts_are_counted_by_status_and_failures_have_a_line_each(tmp_path):
    good = CheckOutcome(kind="verify", status="equivalent", passed=True, compared=3)
    bad = CheckOutcome(
        kind="suite guard",
        status="different",
        passed=False,
        worst="graph 0: output[0]: off",
        graphs=2,
        calls=5,
        checked=4,
    )
    off = CheckOutcome(kind="verify", status="unverified", passed=False, enabled=False)
    told = [
        ReportedOutcome("t.py::a", good),
        ReportedOutcome("t.py::a", off),
        ReportedOutcome("t.py::b", bad),
    ]
    assert lines_of(tmp_path, told) == [
        "2 verdicts in 2 tests: 1 different, 1 equivalent",
        "1 check disabled: nothing was compared there",
        "guarded: 2 graphs, 4 of 5 calls checked",
        "different: t.py::b (suite guard) graph 0: output[0]: off",
    ]


def test_what_an_update_wrote_is_told(tmp_path, monkeypatch):
    for name in ("CI", "GITHUB_ACTIONS", "GITLAB_CI", "BUILDKITE", "TF_BUILD"):
        monkeypatch.delenv(name, raising=False)
    same = CheckOutcome(kind="golden", status="identical", passed=True, golden="golden/t/a/out")
    new = CheckOutcome(
        kind="golden", status="identical", passed=True, golden="golden/t/b/out", written="written"
    )
    changed = CheckOutcome(
        kind="golden",
        status="identical",
        passed=True,
        golden="golden/t/c/out",
        written="changed",
        worst="value: dtype float64 instead of float32",
    )
    told = [
        ReportedOutcome("t.py::a", same),
        ReportedOutcome("t.py::b", new),
        ReportedOutcome("t.py::c", changed),
    ]
    expected = [
        "3 verdicts in 3 tests: 3 identical",
        "goldens: 1 written, 1 changed, 1 unchanged",
        "  written: golden/t/b/out",
        "  changed: golden/t/c/out (it was off: value: dtype float64 instead of float32)",
    ]
    assert lines_of(tmp_path, told) == expected
    monkeypatch.setenv("CI", "true")
    assert lines_of(tmp_path, told) == [
        *expected,
        "  this looks like a build server: new goldens are lost unless they are committed",
    ]


def test_a_verdict_in_short_stays_short_and_survives_its_way():
    found = Finding(
        item=Item(ItemKind.OUTPUT, "output"),
        aspect=Aspect.VALUE,
        status=Status.DIFFERENT,
        reason="off\n" * 1000,
    )
    verdict = Verdict(findings=(found,), coverage=Coverage(compared=7))
    outcome = outcome_of("verify", verdict)
    assert (outcome.status, outcome.passed, outcome.compared) == ("different", False, 7)
    assert len(outcome.worst) == LONGEST_LINE
    assert list(outcomes_in([("other", 1), ("paritas", outcome.encode())])) == [outcome]


def test_accounts_of_workers_are_merged():
    first = RunAccount(notes=["a"], files={"f": ["f/x"]})
    other = RunAccount(
        outside=[CheckOutcome(kind="suite guard", status="different", passed=False)],
        notes=["a", "b"],
        files={"g": []},
    )
    first.merge(RunAccount.decode(other.encode()))
    assert (len(first.outside), first.notes, sorted(first.files)) == (1, ["a", "b"], ["f", "g"])
