"""The page of one verdict: it tells what fails, and runs nothing that a name smuggles in."""

from __future__ import annotations

from paritas.reports.pages import PageLink, index_page, verdict_page
from paritas.results.findings import Aspect, Coverage, Finding, Status, Verdict

EVIL = "<script>alert(1)</script>"


def verdict_of(path: str) -> Verdict:
    found = [
        Finding(path="input", aspect=Aspect.VALUE, status=Status.IDENTICAL),
        Finding(path=path, aspect=Aspect.SHAPE, status=Status.DIFFERENT, reason="shape [2]"),
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
