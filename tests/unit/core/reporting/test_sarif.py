"""Findings as SARIF 2.1.0."""

from __future__ import annotations

import json

import msgspec
import pytest

from paritas.comparison.report import comparison_account
from paritas.core.reporting.annotations import sarif_document
from paritas.core.results.causes import group_causes
from paritas.core.results.findings import Status
from paritas.sharding.graphs.report import graph_account
from unit.comparison import comparison_samples
from unit.core.results.account_samples import HOSTILE, account, finding, scaled, traced
from unit.sharding.graphs import graph_samples


@pytest.fixture(autouse=True)
def repository(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    (tmp_path / "a net.py").write_text("")
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text):
    """The one run of a document, its structure checked against what the standard demands."""
    document = json.loads(text)
    assert document["version"] == "2.1.0"
    assert document["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = document["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "paritas"
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(ids) == len(set(ids))
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"].endswith(".")
        assert rule["defaultConfiguration"]["level"] in {"error", "warning"}
    for one in run["results"]:
        assert ids[one["ruleIndex"]] == one["ruleId"]
        assert one["level"] in {"none", "note", "warning", "error"}
        assert one["message"]["text"]
        assert len(one["partialFingerprints"]["paritasItem/v1"]) == 64
        (location,) = one["locations"]
        place = location["physicalLocation"]
        uri = place["artifactLocation"]["uri"]
        assert uri
        whole = "uriBaseId" not in place["artifactLocation"]
        assert not set(uri) & set(' <>"\\^`{|}:%') - {"%", *(":" if whole else "")}
        assert whole or place["artifactLocation"]["uriBaseId"] in run["originalUriBaseIds"]
        assert place["region"]["startLine"] >= 1
        assert all(logical["fullyQualifiedName"] for logical in location["logicalLocations"])
    (invocation,) = run["invocations"]
    assert isinstance(invocation["executionSuccessful"], bool)
    return run


def test_a_failure_is_a_result_with_its_line_its_item_and_its_module(repository):
    run = read(sarif_document(account(traced(f"{repository}/a net.py:7"))))
    (one,) = run["results"]
    assert (one["ruleId"], one["level"]) == ("different", "error")
    assert one["message"]["text"].startswith("output 0: different\nnode mm: aten.mm.default")
    (place,) = one["locations"]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == "a%20net.py"
    assert place["physicalLocation"]["region"] == {
        "startLine": 7,
        "snippet": {"text": "return x @ self.weight"},
    }
    names = [logical["fullyQualifiedName"] for logical in place["logicalLocations"]]
    assert names == ["output 0", "layers.0"]
    assert run["invocations"][0]["exitCode"] == 1


def test_the_pattern_of_an_error_is_a_rule_of_its_own():
    run = read(sarif_document(account(scaled(), finding("output 1"))))
    assert [one["ruleId"] for one in run["results"]] == ["different/partial-sum", "different"]
    rules = {
        rule["id"]: rule["shortDescription"]["text"] for rule in run["tool"]["driver"]["rules"]
    }
    assert rules["different/partial-sum"] == "The candidate computes something else: partial sum."


def test_what_passes_is_no_result_and_what_is_unstable_is_a_warning():
    run = read(
        sarif_document(account(*(finding(f"output {n}", one) for n, one in enumerate(Status))))
    )
    levels = {one["ruleId"]: one["level"] for one in run["results"]}
    assert levels == {
        "different": "error",
        "degraded": "error",
        "unverified": "error",
        "unstable": "warning",
    }
    assert read(sarif_document(account(finding(status=Status.IDENTICAL))))["results"] == []


def test_a_result_without_a_line_is_put_down_to_what_was_asked_about():
    given = [({"file": "nets.py", "line": 12}, "nets.py", 12), ({}, "nets%3Amake", 1)]
    for options, uri, line in given:
        (one,) = read(sarif_document(account(finding(), **options)))["results"]
        place = one["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == uri
        assert place["region"] == {"startLine": line}


def test_a_cause_is_one_result_that_relates_to_what_results_from_it(repository):
    start = traced(f"{repository}/a net.py:7", "node mm")
    results = [finding(f"output {n}", cause="node mm") for n in range(3)]
    run = read(sarif_document(account(*results, start, file="nets.py", line=12)))
    (one,) = run["results"]
    assert one["locations"][0]["physicalLocation"]["region"]["startLine"] == 7
    assert [related["id"] for related in one["relatedLocations"]] == [1, 2, 3]
    first = one["relatedLocations"][0]
    assert first["message"]["text"] == "as a result, also output 0"
    assert first["physicalLocation"] == {
        "artifactLocation": {"uri": "nets.py", "uriBaseId": "SRCROOT"},
        "region": {"startLine": 12},
    }


def test_an_item_keeps_its_fingerprint_while_its_figures_change():
    def mark(reason):
        (one,) = read(sarif_document(account(finding(reason=reason))))["results"]
        return one["partialFingerprints"]

    assert mark("off by 1e-3") == mark("off by 2e-3")


def test_nothing_compared_is_an_unsuccessful_run_with_a_result():
    run = read(sarif_document(account(compared=0)))
    assert not run["invocations"][0]["executionSuccessful"]
    assert [one["ruleId"] for one in run["results"]] == ["unverified"]


def test_no_more_results_are_written_than_are_taken_and_the_rest_is_counted(monkeypatch):
    monkeypatch.setattr("paritas.core.reporting.annotations.MOST_RESULTS", 2)
    bad = [finding(f"output {n}", one) for n, one in enumerate([*Status, *Status])]
    run = read(sarif_document(account(*bad)))
    assert [one["ruleId"] for one in run["results"]] == ["different", "different"]
    (told,) = run["invocations"][0]["toolExecutionNotifications"]
    assert told["message"]["text"].startswith("6 more results")


def test_hostile_names_give_a_document_that_can_be_read():
    text = sarif_document(account(finding(HOSTILE, reason=HOSTILE), subject=HOSTILE))
    (one,) = read(text)["results"]
    assert r"\x1b[31m" in one["message"]["text"]
    text.encode()


@pytest.mark.parametrize("make", ["transformer", "unsupported", "empty", "hostile", "passing"])
def test_graphs_give_documents_that_keep_to_the_standard(make):
    report = getattr(graph_samples, make)()
    run = read(sarif_document(graph_account(report, subject="model.pt2")))
    assert any(one["level"] == "error" for one in run["results"]) is not report.passed


def test_comparisons_give_documents_that_keep_to_the_standard():
    comparison = comparison_samples.transformer(layers=3, faulty=1)
    run = read(sarif_document(comparison_account(comparison, subject="mine golden")))
    causes = group_causes(comparison.verdict.failures)
    assert sum(one["level"] == "error" for one in run["results"]) == len(causes)


@pytest.mark.parametrize(
    ("mine", "artifact"),
    [
        ("runs/my dump", {"uri": "runs/my%20dump", "uriBaseId": "SRCROOT"}),
        ("/data/my dump", {"uri": "file:///data/my%20dump"}),
        ("s3://bucket/my dump", {"uri": "s3://bucket/my%20dump"}),
    ],
)
def test_a_comparison_is_placed_in_the_candidate_s_dump(mine, artifact):
    found = comparison_samples.transformer(layers=3, faulty=1)
    found = msgspec.structs.replace(found, my=msgspec.structs.replace(found.my, path=mine))
    run = read(sarif_document(comparison_account(found, subject=f"{mine} golden")))
    places = [one["locations"][0]["physicalLocation"] for one in run["results"]]
    assert places
    assert all(one["artifactLocation"] == artifact for one in places)
