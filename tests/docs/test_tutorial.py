"""The tutorial: every step of it does what it says, to the end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from docs.pages import DOCS, assert_shown, blocks, run_page

PAGE = DOCS / "tutorial.md"


@pytest.mark.slow
def test_the_tutorial_goes_as_it_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # A loaded machine finds it, too, and shrinks it to the end.
    monkeypatch.setenv("PARITAS_LOCATE_SECONDS", "600")
    monkeypatch.setenv("PARITAS_SHRINK_TIME", "600")
    torch.compiler.reset()
    printed = []
    run_page(PAGE, after=lambda block, text: printed.append(text))
    usual, located, _ = printed
    assert re.fullmatch(r"tensor\((1\.0000|0\.9999\d*)\)\nTrue\n", usual)
    verdict, program = [block.text for block in blocks(PAGE) if block.language == "text"]
    assert_shown(verdict.splitlines(), located)
    assert_shown(program.splitlines(), Path("bug/repro.py").read_text(encoding="utf-8"))
    assert Path("out/report.html").exists()
    torch.compiler.reset()
