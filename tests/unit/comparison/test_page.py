"""The HTML report: what is in the file. What it does in a browser is asked in `integration`."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from importlib import resources

import msgspec
import pytest

from paritas.comparison.page import (
    MOST_NODES,
    comparison_headline,
    html_report,
    neighbourhood,
    stories,
)
from paritas.comparison.rows import Comparison, Divergence
from paritas.core.reporting.pages import number_column, text_column
from paritas.core.results.findings import Status
from unit.comparison.comparison_extremes import (
    HOSTILE,
    empty,
    hostile,
    identical,
    many_ranks,
    non_finite,
    wide,
)
from unit.comparison.comparison_samples import transformer

ASSETS = resources.files("paritas.core.reporting") / "assets"


def data_of(page: str) -> dict:
    [found] = re.findall(r'<script type="application/gzip" id="data">([^<]*)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(found)))


def text_at(data: dict, name: str, row: int) -> str:
    column = data["texts"][name]
    return column["texts"][0 if column["rows"] is None else column["rows"][row]]


# --- the file -------------------------------------------------------------------------------------


def test_the_page_names_no_address_and_loads_nothing():
    page = html_report(transformer())
    assert "default-src 'none'" in page
    assert "sourceMappingURL" not in page
    assert not re.search(r"<script[^>]+src=", page)
    shown = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"<(link|img|iframe|object)\b|@import|url\(|https?:", shown)


def test_only_the_scripts_of_the_page_are_allowed_to_run():
    page = html_report(hostile())
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert re.findall(r"'sha256-([^']+)'", html.unescape(policy)) == digests
    assert "unsafe-inline" not in policy.partition("script-src")[2]
    assert len(scripts) == 4


def test_the_same_comparison_gives_the_same_file():
    assert html_report(transformer()) == html_report(transformer())


def test_a_comparison_read_from_json_gives_the_same_file():
    whole = non_finite()
    assert html_report(Comparison.from_json(whole.to_json())) == html_report(whole)


def test_hostile_names_are_escaped_in_the_page_and_whole_in_the_data():
    page = html_report(hostile())
    assert HOSTILE not in page
    assert "document.title=" in page, "the text is there, escaped"
    assert "<b onclick" not in page
    assert page.count("<script") == 5
    assert text_at(data_of(page), "name", 3) == f"{HOSTILE}3"


def test_what_is_vendored_is_what_versions_says_it_is():
    listed = [
        line.split() for line in (ASSETS / "VERSIONS").read_text().splitlines() if line[0] != "#"
    ]
    vendored = {file.name for file in (ASSETS / "vendor").iterdir()}
    assert {file for *_, file, _ in listed} == {n for n in vendored if not n.endswith("LICENSE")}
    for _, _, licence, file, digest in listed:
        found = (ASSETS / "vendor" / file).read_bytes()
        assert hashlib.sha256(found).hexdigest() == digest, file
        assert b"</script" not in found
        assert licence == "MIT"


def test_the_page_bears_the_licence_of_every_script_of_others():
    page = html_report(transformer())
    texts = [file.read_text() for file in (ASSETS / "vendor").iterdir() if "LICENSE" in file.name]
    assert len(texts) == 3
    assert all(f"/*\n{text}*/" in page for text in texts)


# --- what it says ---------------------------------------------------------------------------------


def test_verdict_dumps_counts_and_coverage_are_on_the_page():
    page = html_report(transformer())
    assert "<h1>different</h1>" in page
    assert "52 of 139 rows do not pass." in page
    for words in ("runs/compiled", "runs/eager", "12 parameters: the same file on both sides"):
        assert words in page
    counts = re.findall(r'<span class="count">([\d,]+)</span>\n\s+<span class="word">', page)
    assert counts == ["48", "1", "3", "1", "82", "4"], "gravest first; they add up to all rows"


def test_the_first_divergence_is_told_in_words():
    (story,) = stories(transformer())
    assert story.title == "First divergence"
    assert story.sentence == (
        "It starts at step 0, rank 0, module layers.7.mlp.act: "
        "forward/graph_0/layers_7_mlp_act#0 (aten.gelu.default). "
        "The inputs of this call are right, its output is not."
    )
    told = {fact.label: f"{fact.text} {fact.code}".strip() for fact in story.facts}
    assert told == {
        "what is wrong": "7372 of 8192 elements differ, the worst by 0.28; 0.0074 is allowed",
        "error": "own 0.031, inherited 0.0009806, relative to the golden norm; "
        "measured by running the operator again",
        "worst element": "[1, 3, 17]: mine 1.53, golden 1.25, 320 ulp apart",
        "judged by": "noise of bfloat16",
        "fused": "4 graph nodes, compiled into cpp_fused_mul_erf_add_mul_1_85: "
        "mul, erf, add, mul_1",
        "source": "model/mlp.py:47, in forward x = self.act(x)",
        "what to do": "run this call by itself: paritas verify",
    }


@pytest.mark.parametrize(
    ("kind", "reason", "words"),
    [
        ("given", "", "This call did not cause it: it was in the inputs."),
        ("unclear", "no input was recorded", "whether this call caused it: no input was recorded."),
    ],
)
def test_a_divergence_that_no_call_is_known_to_have_made_says_so(kind, reason, words):
    divergence = Divergence(kind=kind, row=85, reason=reason)
    (story,) = stories(msgspec.structs.replace(transformer(), first=divergence))
    assert story.sentence.endswith(words)


def test_the_first_nan_is_told_once_where_it_is_also_the_first_divergence():
    assert html_report(non_finite()).count("<article") == 1
    apart = msgspec.structs.replace(non_finite(), first=Divergence(kind="made", row=80))
    assert html_report(apart).count("<article") == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (empty, "Nothing was compared, so nothing is verified."),
        (identical, "All 44 rows are equal bit for bit."),
        (many_ranks, "294 of 2,049 rows do not pass."),
    ],
)
def test_the_headline_says_how_it_ended(make, words):
    assert comparison_headline(make()) == words
    assert words in html_report(make())


def test_rows_that_fail_are_on_paper_and_the_rest_is_counted():
    page = html_report(many_ranks())
    assert "The first 200 of 294 rows that fail" in page
    assert "All 52 rows that fail" in html_report(transformer())


# --- the data -------------------------------------------------------------------------------------


def test_every_row_is_in_the_data_with_its_status_and_figures():
    whole = transformer()
    data = data_of(html_report(whole))
    assert data["count"] == len(data["status"]) == len(whole.rows)
    assert [list(Status)[place] for place in data["status"]] == [row.status for row in whole.rows]
    assert data["first"] == 85
    assert data["numbers"]["own"][85] == 0.031
    assert data["numbers"]["cosine"][40] < 1, "four digits would make it a 1"
    assert data["numbers"]["rel_l2"][0] == 0
    assert data["numbers"]["max_abs"][0] == 0, "the same bit for bit"
    assert data["numbers"]["rel_l2"][-1] is None, "no tensor, no figure"
    assert text_at(data, "my_dtype", 0) == "bfloat16"
    assert text_at(data, "golden_there", 133) == ""


def test_what_was_put_together_from_several_ranks_is_of_no_rank():
    data = data_of(html_report(many_ranks(16)))
    assert [text_at(data, "rank", row) for row in (15, 16)] == ["15", "joined"]
    assert text_at(data, "my_ranks", 16) == "0-15"


def test_only_rows_with_a_closer_look_carry_one():
    whole = transformer()
    looked = {str(row.index) for row in whole.rows if row.detail is not None}
    assert set(data_of(html_report(whole))["details"]) == looked == {"85", "136"}


def test_figures_that_are_no_numbers_are_spelled():
    data = data_of(html_report(non_finite()))
    assert data["numbers"]["own"][85] == "inf"
    assert data["numbers"]["own"][86] == "nan"
    assert data["details"]["85"]["worst"][0]["my"] == "nan"


def test_columns_keep_counts_exact_and_texts_once():
    assert (
        bytes(number_column([1234567, 0.123456, None, -0.0]) or b"") == b"[1234567,0.1235,null,-0]"
    )
    assert number_column([None, None]) is None
    assert text_column(["a", "b", "a"]) == {"texts": ["a", "b"], "rows": [0, 1, 0]}
    assert text_column(["a", "a"]) == {"texts": ["a"], "rows": None}


# --- the graph ------------------------------------------------------------------------------------


def test_the_graph_begins_at_the_divergence_and_stays_small():
    found = neighbourhood(wide(528 * 2))
    assert found is not None
    assert found["flows"]
    assert found["nodes"][0]["row"] == 528 + 85
    assert len(found["nodes"]) == MOST_NODES
    beside = {pair[1 - pair.index(0)] for pair in found["edges"] if 0 in pair}
    labels = {found["nodes"][place]["label"] for place in beside}
    assert labels == {"layers.7.mlp.up", "layers.7.mlp.down"}


def test_without_data_flow_the_graph_shows_the_order_and_says_so():
    whole = transformer()
    rows = tuple(msgspec.structs.replace(row, sources=()) for row in whole.rows)
    found = neighbourhood(msgspec.structs.replace(whole, rows=rows))
    assert found is not None
    assert not found["flows"]
    assert len(found["nodes"]) == 17
    assert neighbourhood(identical()) is None
