"""Links of the documentation: files and headings are there, and the navigation has every page.

Links to other sites are not followed: no test needs the network.
"""

from __future__ import annotations

import re
import tomllib

import pytest

from docs.pages import DOCS, ROOT

PAGES = sorted(DOCS.rglob("*.md"))
OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]


def prose(page):
    """A page without its code, in which brackets mean something else."""
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return re.sub(r"`[^`\n]*`", "`code`", text)


def anchors(page):
    """The anchors that the headings of a page have, on the site and on code hosts alike."""
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.add(re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain)))
    return found


def links(page):
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def named(entries):
    """The files of a navigation, however deep."""
    for entry in entries:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from named(value)


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in links(page):
        if re.match(r"(https?|mailto):", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no {target}"
        if anchor:
            assert anchor in anchors(target), f"{link}: {sorted(anchors(target))}"
        if page.is_relative_to(DOCS):
            # What lies outside the folder is not on the site.
            assert target.is_relative_to(DOCS), link


def test_the_navigation_has_every_page_once():
    site = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    found = list(named(site["nav"]))
    assert len(found) == len(set(found))
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES}
    # The pages of single findings are reached from their index.
    listed = {page for page in pages if not re.match(r"findings/(?!README)", page)}
    assert set(found) == listed
