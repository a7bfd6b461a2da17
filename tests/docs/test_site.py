"""The site, built whole: every link of it leads somewhere, and nothing is fetched to read it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest

import paritas
from docs.pages import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("zensical") is None, reason="make docs installs zensical"
    ),
]


class Page(HTMLParser):
    """The anchors, the links and the loaded files of a page."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loaded = {""}, [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors.add(given.get("id"))
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in {"canonical", "next", "prev"}:
            self.loaded.append(given.get("href"))
        elif given.get("src"):
            self.loaded.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "src"):
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=skipped)
    shutil.copy(ROOT / "zensical.toml", folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    built = folder / "build" / "site"
    return built, {path: Page(path) for path in built.rglob("*.html") if path.stem != "404"}


def test_links_lead_somewhere(site):
    _, pages = site
    assert len(pages) > 30
    lost = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"(https?|mailto):", link):
                continue
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file).resolve() if file else path
            if not target.exists() or (anchor and anchor not in pages[target].anchors):
                lost.append(f"{path.name}: {link}")
    assert not lost


def test_nothing_is_fetched_to_read_it(site):
    _, pages = site
    loaded = {one for page in pages.values() for one in page.loaded}
    assert not {one for one in loaded if re.match(r"(https?:)?//", one)}


def test_the_reference_has_every_public_name(site):
    built, pages = site
    anchors = set().union(
        *(page.anchors for path, page in pages.items() if path.parent == built / "reference")
    )
    found = {str(anchor).rpartition(".")[2] for anchor in anchors}
    assert set(paritas.__all__) <= found
