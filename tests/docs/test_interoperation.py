"""The page about other tools: its code runs as written."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from paritas.core.candidates.loading import NAMED

PAGE = Path(__file__).parents[2] / "docs" / "interoperation.md"


def test_the_code_runs_as_written(capsys):
    text = PAGE.read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    torch.manual_seed(0)
    exec(compile(code, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith(("identical: ", "equivalent: "))
    assert "numpy returns values only" in printed
    assert "paritas/share/identical" in printed


def test_every_named_candidate_has_its_row():
    text = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w-]+)` \|", text, flags=re.MULTILINE)) == set(NAMED)
