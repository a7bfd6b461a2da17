"""What a guarded run looks like on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from paritas.core.results.findings import (
    Aspect,
    Coverage,
    Finding,
    Origin,
    OriginKind,
    Status,
    Verdict,
)
from paritas.core.results.items import Item
from paritas.core.results.wording import headline
from paritas.guarding.report import GraphCounts
from paritas.guarding.summary import MOST_GRAPHS, guard_report


def printed(graphs, verdict, width=80):
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False)
    console.print(guard_report(graphs, verdict), crop=False)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def graph(label, **counts):
    defaults = {"source": "", "calls": 2, "checked": 2, "failed": 0, "compared": 8, "unguarded": ""}
    return GraphCounts(label=label, **{**defaults, **counts})


def finding(path, status=Status.DIFFERENT, aspect=Aspect.VALUE, **fields):
    graph, _, name = path.rpartition(": ")
    item = Item(name=name, graph=graph)
    return Finding(item=item, status=status, aspect=aspect, **fields)


def node(name, **fields):
    return Origin(kind=OriginKind.NODE, name=name, **fields)


def verdict_of(*findings, compared=8, **fields):
    return Verdict(findings=findings, coverage=Coverage(compared=compared), **fields)


def test_a_run_with_a_located_fault_reads_like_this(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = f"{tmp_path}/model.py:18, in forward"
    origin = node(
        "relu_1",
        operator="aten.relu.default",
        module="layers.0.act",
        source=line,
        code="x = torch.relu(x)",
    )
    graphs = [
        graph("graph 0 forward", source=line, failed=1),
        graph("graph 0 backward", source=line, calls=20, checked=2),
    ]
    verdict = verdict_of(
        finding("graph 0 forward: output[0]", reason="far off"),
        finding("graph 0 forward: output[1]", Status.IDENTICAL),
        finding("graph 0 forward: node relu_1", reason="starts here", source=line, origin=origin),
        finding("graph 0 forward: output[2]", reason="further off"),
        finding("graph 0 backward: gradient of w", Status.EQUIVALENT),
        compared=16,
        notes=("a remark",),
    )
    assert printed(graphs, verdict) == [
        "graph             calls  checked  failed  items  from",
        "────────────────────────────────────────────────────────────────────────",
        "graph 0 forward       2        2       1      8  model.py:18, in forward",
        "graph 0 backward     20        2       0      8  model.py:18, in forward",
        "",
        "graph 0 forward: node relu_1: different (value)",
        "  starts here",
        "  node relu_1: aten.relu.default in module layers.0.act",
        "  at model.py:18, in forward",
        "    x = torch.relu(x)",
        "  as a result, also 2 values: output[0], output[2]",
        "",
        "findings: 3 different, 1 equivalent, 1 identical",
        "coverage: 16 compared, 0 skipped, 0 unmatched",
        "  note: a remark",
        "different: the candidate computes something else; 3 findings, 16 items compared",
    ]


def test_a_pass_is_a_table_and_the_verdict():
    lines = printed(
        [graph("graph 0", source="m.py:3, in f")], verdict_of(finding("a", Status.IDENTICAL))
    )
    assert lines[3:] == [
        "",
        "findings: 1 identical",
        "coverage: 8 compared, 0 skipped, 0 unmatched",
        "identical: the candidate is equal bit for bit; 8 items compared",
    ]


def test_without_a_graph_there_is_no_table():
    lost = finding("script x.py", Status.UNVERIFIED, Aspect.HARNESS, reason="nothing was compiled")
    assert printed([], verdict_of(lost, compared=0))[:2] == [
        "script x.py: unverified (harness)",
        "  nothing was compiled",
    ]


def test_what_a_wrong_node_does_not_explain_is_told_in_full():
    verdict = verdict_of(
        finding("graph 0: output[0]", reason="far off"),
        finding("graph 0: output[1]", aspect=Aspect.STRIDE, reason="other strides"),
        finding("graph 0: node mul", reason="starts here", origin=node("mul")),
        finding("graph 1: output[0]", reason="off by itself"),
    )
    lines = printed([graph("graph 0", failed=1), graph("graph 1", failed=1)], verdict)
    assert [line for line in lines if "output" in line or "node" in line] == [
        "graph 0: node mul: different (value)",
        "  node mul",
        "  as a result, also 1 value: output[0]",
        "graph 0: output[1]: different (stride)",
        "graph 1: output[0]: different (value)",
    ]


def test_a_search_that_failed_explains_nothing():
    verdict = verdict_of(
        finding("graph 0: output[0]", reason="far off"),
        finding(
            "graph 0: search",
            Status.UNVERIFIED,
            Aspect.HARNESS,
            reason="looking for it failed",
            origin=Origin(kind=OriginKind.GRAPH, name="graph 0"),
        ),
    )
    lines = printed([graph("graph 0", failed=1)], verdict)
    assert "  far off" in lines
    assert not any("and with it" in line for line in lines)


def test_the_graph_of_one_label_is_not_taken_for_another():
    verdict = verdict_of(
        finding("graph 1: node mul", reason="starts here", origin=node("mul")),
        finding("graph 10: output", reason="off by itself"),
    )
    lines = printed([graph("graph 1", failed=1), graph("graph 10", failed=1)], verdict)
    assert "  off by itself" in lines


def test_a_graph_that_could_not_be_guarded_has_unknown_calls():
    row = printed([graph("graph 0", calls=0, checked=0, unguarded="why")], verdict_of())[2]
    assert row.split()[:4] == ["graph", "0", "?", "0"]


def test_many_graphs_share_a_row_but_for_those_that_failed():
    graphs = [graph(f"graph {i}", calls=3, compared=5) for i in range(MOST_GRAPHS + 10)]
    graphs[-1] = graph(graphs[-1].label, failed=1)
    lines = printed(graphs, verdict_of(finding("a", Status.IDENTICAL)))
    rows = lines[2 : lines.index("")]
    assert len(rows) == MOST_GRAPHS + 1
    assert rows[-2].split()[:2] == ["graph", str(MOST_GRAPHS + 9)]
    assert rows[-1].split() == ["10", "more", "30", "20", "0", "50"]


def test_many_located_faults_are_counted():
    graphs = [graph(f"graph {i}", failed=1) for i in range(12)]
    found = [finding(f"graph {i}: node n", reason=f"no. {i}", origin=node("n")) for i in range(12)]
    lines = printed(graphs, verdict_of(*found))
    assert "and 2 more" in lines


def test_what_is_unstable_is_told_where_nothing_fails():
    shaky = finding("graph 0: output", Status.UNSTABLE, reason="a tie")
    lines = printed([graph("graph 0")], verdict_of(shaky))
    assert lines[4:6] == ["graph 0: output: unstable (value)", "  a tie"]


@pytest.mark.parametrize("width", [80, 60])
def test_long_labels_and_paths_fit(width):
    source = "a_package_with_a_name/of_quite_some_length/and_a_module.py:1234, in a_function"
    graphs = [graph(f"rank {i}: graph {i} backward", source=source) for i in range(9, 12)]
    verdict = verdict_of(finding("rank 9: graph 9 backward: output", reason="long " * 40))
    lines = printed(graphs, verdict, width)
    assert max(map(len, lines[:-1])) <= width
    assert lines[-1] == headline(verdict)
