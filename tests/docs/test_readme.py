"""The README: its code runs as written, its transcript is the tutorial's, and it stays short."""

from __future__ import annotations

import re

import pytest
import torch

from docs.pages import DOCS, ROOT, assert_shown, blocks, python_code, run_python
from paritas.core.results.findings import Status

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_code_runs_as_written(capsys):
    torch.compiler.reset()
    torch.manual_seed(0)
    assert "paritas.verify(" in python_code(README)
    run_python(README)
    printed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"(identical|equivalent) \d+ 0", printed[0])
    assert printed[1].startswith(("identical: ", "equivalent: "))  # of the guard
    torch.compiler.reset()


def test_the_transcript_is_that_of_the_tutorial():
    # Which is executed.
    tutorial = (DOCS / "tutorial.md").read_text(encoding="utf-8").replace("; echo $?", "")
    (transcript,) = [block.text for block in blocks(README) if block.language == "console"]
    explained = ("off by: ", "worst / allowed: ")
    shown = [line for line in transcript.splitlines() if not line.startswith(explained)]
    assert_shown(shown, tutorial)


@pytest.mark.parametrize("page", [README, DOCS / "index.md"], ids=lambda page: page.name)
def test_every_status_has_its_row(page):
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE) == list(Status)


def test_it_is_short_and_so_is_its_picture():
    assert len(TEXT.splitlines()) < 200
    picture = (DOCS / "images" / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 200_000
