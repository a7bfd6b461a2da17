"""The page of a graph: what is in the file. What it does in a browser is asked in `integration`."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re

import msgspec
import pytest

from paritas.core.results.findings import Status
from paritas.sharding.graphs.page import (
    RuleToken,
    drawn_rules,
    graph_page,
    overview,
    write_graph_page,
)
from paritas.sharding.graphs.rows import CallOutcome, GraphReport
from unit.sharding.graphs.graph_samples import (
    HOSTILE,
    empty,
    hostile,
    interrupted,
    option,
    passing,
    transformer,
    unsupported,
    wide,
)


def data_of(page: str) -> list[dict]:
    [found] = re.findall(r'<script type="application/gzip" id="data">([^<]*)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(found)))["operators"]


def text_of(page: str) -> str:
    body = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body)))


# --- the file -------------------------------------------------------------------------------------


def test_the_page_names_no_address_and_loads_nothing():
    page = graph_page(transformer())
    assert "default-src 'none'" in page
    assert "sourceMappingURL" not in page
    shown = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"<(link|img|iframe|object)\b|@import|url\(|https?:", shown)
    assert not re.search(r"<script[^>]+src=", page)


def test_only_the_scripts_of_the_page_are_allowed_to_run():
    page = graph_page(hostile())
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert re.findall(r"'sha256-([^']+)'", html.unescape(policy)) == digests
    assert "unsafe-inline" not in policy.partition("script-src")[2]
    assert len(scripts) == 2


def test_hostile_names_are_escaped_in_the_page_and_whole_in_the_data():
    page = graph_page(hostile())
    assert HOSTILE not in page
    assert "<b onclick" not in page
    assert page.count("<script") == 3
    assert "document.title=" in page, "the text is there, escaped"
    assert data_of(page)[0]["sites"][0][0] == HOSTILE


@pytest.mark.parametrize(
    ("script", "linked"),
    [
        ("repro/01_linear.py", True),
        ("javascript:alert(1)", False),
        ("//elsewhere/x.py", False),
        ("../x.py", False),
        ("/etc/x.py", False),
    ],
)
def test_only_a_script_beside_the_page_is_linked(script, linked):
    one = msgspec.structs.replace(transformer().operators[3], script=script)
    page = graph_page(msgspec.structs.replace(transformer(), operators=(one,)))
    assert (f'<a href="{script}">' in page) is linked
    assert f"<code>{script}</code>" in page


def test_the_same_report_gives_the_same_file_also_when_read_from_json(tmp_path):
    for make in (transformer, hostile, empty):
        whole = make()
        assert graph_page(GraphReport.from_json(whole.to_json())) == graph_page(whole)
    write_graph_page(transformer(), tmp_path / "report.html")
    written = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert written.rstrip("\n") == graph_page(transformer()).rstrip("\n")


def test_a_name_that_is_no_text_does_not_cost_the_page(tmp_path):
    report = msgspec.structs.replace(empty(), graph="\udc80.pt2")
    write_graph_page(report, tmp_path / "report.html")
    assert b"\\udc80.pt2" in (tmp_path / "report.html").read_bytes()


# --- what it says ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "heading", "words"),
    [
        (transformer, "failed", "2 calls of 1 operator wrong in 1 split; 5 of 16 calls verified"),
        (passing, "verified", "nothing to check in the other 7"),
        (unsupported, "unverified", "2 calls could not be checked"),
        (interrupted, "unverified", "14 calls not looked at. The same command goes on from here."),
        (empty, "unverified", "nothing was checked"),
    ],
)
def test_the_heading_says_how_it_ended(make, heading, words):
    page = graph_page(make())
    assert f"<h1>{heading}: transformer_block.ckp</h1>" in page
    assert words in text_of(page)


def test_what_was_not_looked_at_is_never_said_to_be_all_there():
    assert "Nothing was left out." not in graph_page(interrupted())
    assert "14 calls not looked at." in graph_page(interrupted())
    assert "The graph has no calls." in graph_page(empty())


def test_the_other_graphs_of_the_folder_are_linked_with_how_each_ended():
    other = msgspec.structs.replace(unsupported(), graph="<b>.ckp", number=2)
    page = graph_page(msgspec.structs.replace(passing(), others=(other,)))
    assert '<a href="report_2.html">&lt;b&gt;.ckp</a>' in page
    assert "Other graphs of this folder" in text_of(page)
    assert 'id="beside"' not in graph_page(passing())


def test_counts_are_of_calls_and_add_up():
    page = graph_page(transformer())
    counts = re.findall(r'<span class="count">([\d,]+)</span>\n\s+<span class="word">', page)
    assert counts == ["2", "2", "5", "7"], "what needs a person first"
    assert sum(map(int, counts)) == transformer().calls
    assert "2 failed, 2 unsupported, 5 verified, 7 nothing to check of 16 calls" in page
    missing = graph_page(interrupted())
    assert 'class="missing" style="flex-grow: 14"' in missing


def test_a_failure_is_told_with_its_source_line_without_any_script():
    text = text_of(graph_page(transformer()))
    assert "linear_down_0 models/block.py:31 return self.down(gelu(h)) * self.scale" in text
    assert "idx 0, dim 2: split by k 2 ≠ different 12.25 25.75 1.10e0" in text
    assert "rule, declared: * k, n k -> * n" in text
    assert "my_ops.rotate is not an operator of torch: name its module with --import" in text


def test_many_failures_are_folded_and_the_rest_counted():
    page = graph_page(wide(60, every=1))
    assert page.count('<details class="story o-failed" open>') == 3
    assert page.count('<details class="story o-failed"') == 50
    assert "and 10 more: they are in the table." in page


def test_every_operator_is_in_the_data_with_its_calls_splits_and_findings():
    report = transformer()
    data = data_of(graph_page(report))
    assert [one["operator"] for one in data] == [one.operator for one in report.operators]
    assert [len(one["sites"]) for one in data] == [len(one.sites) for one in report.operators]
    wrong = data[3]["options"][1]
    assert (wrong["whole"], wrong["split"], wrong["passes"]) == (12.25, 25.75, False)
    assert [f["status"] for f in wrong["findings"]] == ["different", "identical", "different"]
    assert wrong["findings"][0]["worst"] == "4.2e+09 / 12 lifted"
    assert data_of(graph_page(hostile()))[0]["options"][0]["whole"] == "nan"


# --- which dimensions can be split ----------------------------------------------------------------


def test_a_rule_is_drawn_with_what_became_of_each_dimension():
    rule = "* k, n^ k -> * n^; size=k"
    wrong = option((0, 2), "k", rule, status=Status.DIFFERENT)
    [drawn] = drawn_rules([option((0, 0), "*0", rule), option((0, 1), "*1", rule), wrong])
    assert "".join(token.text for token in drawn.tokens) == rule, "as it is written"
    found = {token.text: (token.kind, token.status) for token in drawn.tokens}
    assert found["*"] == ("split", Status.EQUIVALENT)
    assert found["k"] == ("split", Status.DIFFERENT)
    assert found["n"] == ("whole", None)
    assert found["size"] == ("text", None)
    star = next(token for token in drawn.tokens if token.text == "*")
    assert star.hint == (
        "split by *0 at idx 0, dim 0, 2 ranks: equivalent\n"
        "split by *1 at idx 0, dim 1, 2 ranks: equivalent"
    )


def test_a_split_that_the_rule_does_not_name_is_shown_beside_it():
    [drawn] = drawn_rules([option((0, 2), "z", "a -> a")])
    assert drawn.loose[0].text == "z"
    nameless = msgspec.structs.replace(option((0, 2), "z", ""), split="", identifier="")
    [drawn] = drawn_rules([nameless])
    assert drawn.loose == (
        RuleToken(
            "idx 0, dim 2", "split", Status.EQUIVALENT, " at idx 0, dim 2, 2 ranks: equivalent"
        ),
    )


def test_operators_that_ended_alike_are_one_line_and_wrong_ones_come_first():
    rows = overview(wide(60).operators)
    assert [(row.operator.rpartition(".")[2], row.kinds, row.calls) for row in rows] == [
        ("linear", 2, 4),
        ("linear", 19, 38),
        ("softmax", 19, 38),
    ]
    assert rows[0].place == 7
    assert {token.status for token in rows[0].rules[0].tokens} >= {Status.DIFFERENT}


def test_an_operator_without_splits_is_no_line_of_the_overview_but_has_its_reason():
    page = text_of(graph_page(transformer()))
    listed = {row.operator for row in overview(transformer().operators)}
    for one in transformer().operators:
        assert (one.operator in listed) is (
            one.outcome in {CallOutcome.VERIFIED, CallOutcome.FAILED}
        )
        assert one.operator in page
