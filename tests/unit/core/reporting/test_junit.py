"""Findings as JUnit's XML."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from paritas.comparison.report import comparison_account
from paritas.core.reporting.annotations import junit_document
from paritas.core.results.causes import group_causes
from paritas.core.results.findings import Aspect, Status
from paritas.sharding.graphs.report import graph_account
from unit.comparison import comparison_samples
from unit.core.results.account_samples import HOSTILE, account, finding, traced
from unit.sharding.graphs import graph_samples


def read(text):
    """The one suite of a document, its counts checked."""
    suites = ET.fromstring(text.encode())
    assert suites.tag == "testsuites"
    (suite,) = suites
    cases = suite.findall("testcase")
    counts = {
        "tests": len(cases),
        "failures": len(suite.findall("testcase/failure")),
        "errors": len(suite.findall("testcase/error")),
        "skipped": len(suite.findall("testcase/skipped")),
    }
    assert {name: int(suite.get(name)) for name in counts} == counts
    assert {name: int(suites.get(name)) for name in counts} == counts
    for case in cases:
        assert case.get("name")
        assert case.get("classname").startswith("paritas.")
        assert len(case) < 2
    return suite


def kinds(suite):
    return {case.get("name"): case[0].tag if len(case) else "" for case in suite.iter("testcase")}


def test_every_status_is_what_a_runner_of_tests_takes_it_for():
    found = kinds(read(junit_document(account(*(finding(one.value, one) for one in Status)))))
    assert found == {
        "identical": "",
        "equivalent": "",
        "unstable": "system-out",
        "unverified": "error",
        "degraded": "failure",
        "different": "failure",
    }


def test_unstable_is_a_failure_where_it_counts_as_one():
    unstable = finding(status=Status.UNSTABLE)
    assert kinds(read(junit_document(account(unstable, strict=True)))) == {"output 0": "failure"}


def test_what_was_left_out_is_skipped():
    found = kinds(
        read(junit_document(account(finding(status=Status.IDENTICAL), skipped=["gradients: off"])))
    )
    assert found == {"output 0": "", "gradients: off": "skipped"}


def test_all_that_is_wrong_with_an_item_is_in_its_one_case_the_gravest_first():
    bad = [
        finding(status=Status.UNVERIFIED, aspect=Aspect.STRIDE, reason="no stride"),
        finding(status=Status.DIFFERENT, reason="off by 3"),
        finding(status=Status.IDENTICAL, aspect=Aspect.DTYPE),
    ]
    (case,) = read(junit_document(account(*bad))).iter("testcase")
    (failure,) = case
    assert failure.get("message") == "output 0: different: off by 3"
    assert (
        failure.text == "output 0: different\noff by 3\n\noutput 0 (stride): unverified\nno stride"
    )


def test_the_verdict_is_a_property_of_the_suite():
    suite = read(junit_document(account(finding())))
    assert suite.get("name") == "paritas verify nets:make"
    assert suite.find("properties/property").get("value").startswith("different: the candidate ")


def test_nothing_compared_is_an_error():
    assert kinds(read(junit_document(account(compared=0)))) == {"nets:make": "error"}


def test_hostile_names_give_a_document_that_can_be_read():
    suite = read(junit_document(account(finding(HOSTILE, reason=HOSTILE), subject=HOSTILE)))
    (failure,) = suite.iter("failure")
    assert r"\x1b[31m</failure>]]>\x00\xd800" in failure.text


@pytest.mark.parametrize("make", ["transformer", "unsupported", "empty", "hostile", "passing"])
def test_graphs_fail_as_their_report_does(make):
    report = getattr(graph_samples, make)()
    suite = read(junit_document(graph_account(report, subject="model.pt2")))
    assert (int(suite.get("failures")) + int(suite.get("errors")) == 0) is report.passed


def test_every_row_of_a_comparison_is_in_a_case():
    comparison = comparison_samples.transformer(layers=3, faulty=1)
    found = kinds(read(junit_document(comparison_account(comparison, subject="mine golden"))))
    assert {f"{row.name} (step {row.step})" for row in comparison.rows} <= found.keys()
    causes = group_causes(comparison.verdict.failures)
    assert sum(kind in {"failure", "error"} for kind in found.values()) == len(causes)


def test_a_cause_is_one_failure_at_its_line_and_what_results_from_it_is_skipped(
    tmp_path, monkeypatch
):
    (tmp_path / ".git").mkdir()
    (tmp_path / "net.py").write_text("")
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    monkeypatch.chdir(tmp_path)
    results = [finding(f"output {n}", cause="node mm") for n in range(2)]
    suite = read(junit_document(account(*results, traced("net.py:7", "node mm"))))
    assert kinds(suite) == {"output 0": "skipped", "output 1": "skipped", "node mm": "failure"}
    case = suite.findall("testcase")[-1]
    assert (case.get("file"), case.get("line")) == ("net.py", "7")
    assert case[0].text.endswith("as a result, also 2 values: output 0, output 1")
    (skipped, _) = suite.iter("skipped")
    assert skipped.get("message") == "output 0: different, as a result of node mm"


def test_a_failure_without_a_line_is_put_down_to_the_definition_of_the_subject():
    (case,) = read(junit_document(account(finding(), file="net.py", line=12))).iter("testcase")
    assert (case.get("file"), case.get("line")) == ("net.py", "12")
