"""Comparisons and checked graphs for Model Explorer, by the fields that it reads."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
from click.testing import CliRunner

from paritas.app.cli import main
from paritas.comparison.model_explorer import comparison_graphs, error_data, status_data
from paritas.core.reporting.tables import COLOURS
from paritas.core.results.findings import Status
from paritas.sharding.graphs.page import graph_report_data
from paritas.sharding.graphs.rows import CallOutcome, CallSite, GraphReport, OperatorResult
from unit.comparison.comparison_samples import score, transformer


@pytest.fixture(scope="module")
def comparison():
    return transformer(layers=2, faulty=1)


def test_every_call_is_a_node_with_its_module_status_and_colour(comparison):
    collection = comparison_graphs(comparison)
    assert " against " in collection["label"]
    nodes = [node for graph in collection["graphs"] for node in graph["nodes"]]
    assert {node["id"] for node in nodes} == {row.call or row.name for row in comparison.rows}
    for node in nodes:
        told = {pair["key"]: pair["value"] for pair in node["attrs"]}
        assert node["style"]["backgroundColor"] == COLOURS[Status(told["status"])]
        assert "." not in node["namespace"]
    first = [n for n in nodes if {"key": "first divergence", "value": "yes"} in n["attrs"]]
    assert [n["id"] for n in first] == [comparison.rows[comparison.first.row].call]


def test_edges_lead_from_nodes_of_the_same_graph(comparison):
    known = {row.index: row for row in comparison.rows}
    expected = {
        (known[source].call, row.call)
        for row in comparison.rows
        for source in row.sources
        if known[source].call != row.call
    }
    found = set()
    for graph in comparison_graphs(comparison)["graphs"]:
        ids = {node["id"] for node in graph["nodes"]}
        for node in graph["nodes"]:
            for edge in node["incomingEdges"]:
                assert edge["sourceNodeId"] in ids
                found.add((edge["sourceNodeId"], node["id"]))
    assert found == expected


def test_the_status_of_a_call_is_the_gravest_of_its_values(comparison):
    data = status_data(comparison)
    gravest = {}
    for row in comparison.rows:
        known = gravest.get(row.call, Status.IDENTICAL)
        gravest[row.call] = max(known, row.status, key=lambda status: status.gravity)
    found = {
        call: one["value"] for graph in data.values() for call, one in graph["results"].items()
    }
    assert found == gravest


@pytest.mark.parametrize("worst", [math.nan, math.inf])
def test_an_error_that_is_no_number_is_over_every_limit(comparison, worst):
    broken = msgspec.structs.replace(score(1.0), max_z=worst)
    row = msgspec.structs.replace(comparison.rows[0], score=broken)
    data = error_data(msgspec.structs.replace(comparison, rows=(row,)))
    ((graph, found),) = data.items()
    assert graph == "step 0, rank 0"
    assert found["results"][row.call]["value"] == found["thresholds"][-1]["value"]
    json.dumps(data, allow_nan=False)


def report():
    sites = (CallSite(position=1, node="addmm"), CallSite(position=3, node="addmm_1"))
    good = OperatorResult(
        key="a", operator="aten.addmm", signature="", sites=sites, outcome=CallOutcome.VERIFIED
    )
    bad = OperatorResult(
        key="b",
        operator="aten.relu",
        signature="",
        sites=(CallSite(position=2, node="relu"),),
        outcome=CallOutcome.UNSUPPORTED,
    )
    return GraphReport(graph="model.pt2", kind="pt2", operators=(good, bad), calls=3)


def test_a_checked_graph_gives_data_for_each_node_of_its_file():
    (found,) = graph_report_data(report()).values()
    values = {node: result["value"] for node, result in found["results"].items()}
    assert values == {"addmm": "verified", "addmm_1": "verified", "relu": "unsupported"}


def test_the_command_writes_both_kinds(tmp_path, comparison):
    (tmp_path / "comparison.json").write_bytes(comparison.to_json())
    target = tmp_path / "explored.json"
    done = CliRunner().invoke(main, ["report", str(tmp_path), "--model-explorer", str(target)])
    assert done.exit_code == 0, done.output
    assert json.loads(target.read_bytes())["graphs"]
    assert json.loads((tmp_path / "explored.status.json").read_bytes())
    assert not (tmp_path / "report.html").exists()
    checked = tmp_path / "checked"
    checked.mkdir()
    (checked / "results.json").write_bytes(report().to_json())
    done = CliRunner().invoke(main, ["report", str(checked), "--model-explorer", str(target)])
    assert done.exit_code == 0, done.output
    assert json.loads(target.read_bytes())["graph"]["results"]["relu"]
