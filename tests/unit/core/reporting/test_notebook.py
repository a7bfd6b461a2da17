"""Results in a cell of a notebook: a small piece of HTML that stays what it is."""

from __future__ import annotations

import html.parser
import os
import re
import subprocess
import sys

import msgspec
import pytest

from paritas.comparison.rows import Comparison, ComparisonRow, DumpFacts
from paritas.core.reporting.notebook import MOST_TOLD
from paritas.core.reporting.tables import MOST_IN_CELL
from paritas.core.results.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.core.results.items import Item
from paritas.mutants.rows import FaultResult, PowerReport
from paritas.sharding.graphs.rows import GraphReport
from unit.comparison import comparison_samples
from unit.sharding.graphs import graph_samples

EVIL = "</style></div><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
VOID = {"br", "img", "meta", "link", "input", "hr"}


class Tags(html.parser.HTMLParser):
    """The elements of a piece of HTML, with those that are not closed in their order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words += data


def failing(count: int = 1, path: str = "output", **fields) -> Verdict:
    found = [
        Finding(
            item=Item(name=f"{path}[{place}]"),
            aspect=Aspect.VALUE,
            status=Status.DIFFERENT,
            **fields,
        )
        for place in range(count)
    ]
    return Verdict(findings=tuple(found), coverage=Coverage(compared=count))


def power(**fields) -> PowerReport:
    fault = FaultResult(
        mutation="scale",
        text="times 1.01",
        node="mul",
        operator="aten.mul",
        relative=1e-2,
        over_noise=9.0,
        band="clear",
        status=Status.DIFFERENT,
        native=Status.DIFFERENT,
    )
    return PowerReport(faults=(msgspec.structs.replace(fault, **fields),), planned=1)


RESULTS = {
    "verdict": failing(reason="off"),
    "passing verdict": Verdict(
        findings=(Finding(item=Item(name="x"), aspect=Aspect.VALUE, status=Status.IDENTICAL),),
        coverage=Coverage(compared=1),
    ),
    "nothing compared": Verdict(),
    "switched off": Verdict(enabled=False),
    "comparison": comparison_samples.transformer(),
    "graph": graph_samples.transformer(),
    "empty graph": graph_samples.empty(),
    "power": power(),
    "empty power": PowerReport(),
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_a_cell_is_one_element_that_loads_and_runs_nothing(result):
    shown = result._repr_html_()
    tags = Tags(shown)
    assert tags.open == []
    assert tags.seen[0] == ("div", {"class": "paritas-result"})
    assert shown.count("paritas-result") == 2 + 1  # its class, and the one scope of its styles
    names = {name for name, _ in tags.seen}
    assert not names & {"script", "link", "iframe", "img", "object", "html", "body", "h1", "h2"}
    attributes = {name for _, given in tags.seen for name in given}
    assert attributes <= {"class", "scope", "aria-hidden", "open"}
    assert "http" not in shown
    assert "url(" not in shown
    assert "@import" not in shown
    assert len(shown.encode()) < 32_000


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_every_rule_is_below_the_scope(result):
    style = re.search(r"<style>(.*?)</style>", result._repr_html_(), re.DOTALL).group(1).strip()
    assert style.startswith(".paritas-result.paritas-result {")
    depth = 0
    for place, letter in enumerate(style):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        assert depth > 0 or place == len(style) - 1 or "{" not in style[:place]
    assert depth == 0


def test_the_cell_has_the_table_of_the_report():
    words = Tags(failing(2, reason="off by one", dtype="float32", shape=(3,))._repr_html_()).words
    for text in ("different", "the candidate computes something else", "off by one"):
        assert text in words
    for text in ("status", "item", "value", "off by", "worst / allowed", "output[1]", "float32[3]"):
        assert text in words
    words = Tags(comparison_samples.transformer()._repr_html_()).words
    for text in ("52 of 139 rows do not pass.", "First divergence", "aten.gelu.default"):
        assert text in words
    words = Tags(graph_samples.transformer()._repr_html_()).words
    for text in ("failed: ", "splits right", "outcome"):
        assert text in words
    words = Tags(power()._repr_html_()).words
    for text in ("detection power", "1 of 1 faults above 8 times", "native alone", "at least"):
        assert text in words


@pytest.mark.parametrize(
    "result",
    [
        failing(path=EVIL, reason=EVIL, advice=EVIL, dtype=EVIL),
        Verdict(notes=(EVIL,), coverage=Coverage(skipped=(EVIL,), unmatched=(EVIL,))),
        Comparison(
            my=DumpFacts(path=EVIL, kind=EVIL, problems=(EVIL,)),
            golden=DumpFacts(path=EVIL, kind=EVIL),
            rows=(
                ComparisonRow(
                    index=0, name=EVIL, step=0, status=Status.DIFFERENT, op=EVIL, reason=EVIL
                ),
            ),
            coverage=Coverage(compared=1),
            notes=(EVIL,),
        ),
        graph_samples.hostile(),
        GraphReport(graph=EVIL, kind=EVIL, notes=(EVIL,)),
        power(mutation=EVIL, node=EVIL, reason=EVIL, status=Status.EQUIVALENT, text=EVIL),
    ],
)
def test_names_stay_text(result):
    shown = result._repr_html_()
    assert "<script" not in shown
    assert "<img" not in shown
    assert shown.count("</style>") == 1
    assert Tags(shown).open == []


def test_a_cell_stays_small_whatever_it_shows():
    long = failing(1_000, path="x" * 2_000, reason="y" * 100_000)
    notes = tuple("z" * 10_000 for _ in range(1_000))
    shown = msgspec.structs.replace(long, notes=notes)._repr_html_()
    assert len(shown.encode()) < 100_000
    words = Tags(shown).words
    assert f"and {1_000 - MOST_IN_CELL:,} more rows" in words
    assert f"and {1_000 - MOST_TOLD:,} more" in words
    assert "and 980 more" in words


def test_what_was_read_from_a_file_is_shown_as_well(tmp_path):
    """Nothing above numerics is imported by then."""
    path = tmp_path / "verdict.json"
    path.write_bytes(failing().to_json())
    code = (
        "import sys; from pathlib import Path; from paritas.core.results.findings import Verdict; "
        f"print(Verdict.from_json(Path({str(path)!r}).read_bytes())._repr_html_())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == failing()._repr_html_().strip()
