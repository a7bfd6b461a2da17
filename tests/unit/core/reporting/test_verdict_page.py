"""The page of one verdict: it tells what fails, and runs nothing that a name smuggles in."""

from __future__ import annotations

import re

import torch

from paritas.core.diagnosis.pictures import draw_picture
from paritas.core.reporting.pages import PageLink, index_page, verdict_page
from paritas.core.results.findings import (
    Aspect,
    Coverage,
    Finding,
    Origin,
    OriginKind,
    Status,
    Verdict,
)
from paritas.core.results.items import Item, ItemKind

EVIL = "<script>alert(1)</script>"


def verdict_of(path: str) -> Verdict:
    found = [
        Finding(item=Item(name="input"), aspect=Aspect.VALUE, status=Status.IDENTICAL),
        Finding(
            item=Item(name=path), aspect=Aspect.SHAPE, status=Status.DIFFERENT, reason="shape [2]"
        ),
    ]
    return Verdict(findings=tuple(found), coverage=Coverage(compared=2), notes=("a note",))


def test_the_page_tells_status_failures_and_where_the_rest_is():
    page = verdict_page(verdict_of("output[0]"), "t.py::test_a", "verify", "a-0.json")
    for words in ("different: the candidate computes something else", "shape [2]", "a note"):
        assert words in page
    assert 'href="a-0.json"' in page
    assert page.rindex("output[0]") < page.rindex("input")


def test_names_stay_text():
    page = verdict_page(verdict_of(EVIL), EVIL, EVIL, f"{EVIL}.json")
    page += index_page([PageLink(EVIL, EVIL, "different", EVIL, f"{EVIL}.html")], verdicts=1)
    assert EVIL not in page
    assert "http://" not in page
    assert "https://" not in page


def test_the_list_has_the_gravest_first():
    links = [
        PageLink("t.py::a", "golden out", "unverified", "none", "a-0.html"),
        PageLink("t.py::b", "verify", "different", "off", "b-0.html"),
    ]
    page = index_page(links, verdicts=9)
    assert "2 of 9 verdicts do not pass." in page
    assert page.index("t.py::b") < page.index("t.py::a")


def located_verdict(source="model.py:18, in forward"):
    reference = torch.arange(12.0).reshape(3, 4)
    candidate = reference.clone()
    candidate[:, 3] = torch.nan
    origin = Origin(
        kind=OriginKind.NODE,
        name="mm",
        operator=f"aten.mm{EVIL}",
        source=source,
        code="y = x @ w",
        arguments=("input: float32 [3, 4]", EVIL),
        chain=("mm", "relu"),
    )
    start = Finding(
        item=Item(ItemKind.NODE, "mm"),
        aspect=Aspect.VALUE,
        status=Status.DIFFERENT,
        origin=origin,
        picture=draw_picture(reference, candidate, None),
    )
    result = Finding(
        item=Item(ItemKind.OUTPUT, "output[0]"),
        aspect=Aspect.VALUE,
        status=Status.DIFFERENT,
        cause="node mm",
    )
    return Verdict(findings=(result, start), coverage=Coverage(compared=2))


def test_a_place_is_told_with_its_line_its_operator_its_picture_and_its_results():
    page = verdict_page(located_verdict(), "t", "verify", "a.json", ["paritas shrink nets:make"])
    for words in (
        "model.py:18, in forward",
        "<code>y = x @ w</code>",
        "input: float32 [3, 4]",
        "mm -&gt; relu",
        "down: axis 0 (0 to 2), across: axis 1 (0 to 3)",
        "crossed: NaN or Inf (3 cells)",
        "as a result, also 1 value: output[0]",
        "paritas shrink nets:make",
    ):
        assert words in page, words
    assert EVIL not in page
    assert page.count("<svg") == 3
    stories = page[: page.index("All findings")]
    assert stories.count('class="story ') == 1


def test_a_picture_marks_only_what_differs_and_crosses_what_is_not_finite():
    page = verdict_page(located_verdict(), "t", "verify", "a.json")
    apart = page[page.index('class="apart"') :]
    paths = re.findall(r'<path class="(\w+)" d="([^"]*)"', apart)
    assert [kind for kind, _ in paths] == ["bad", "cross"]
    assert paths[0][1] == "M3 0h1v1h-1zM3 1h1v1h-1zM3 2h1v1h-1z"
