"""The faults of released libraries: every script stands alone, has its page, and is listed."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import torch

import processes

FOLDER = Path(__file__).parents[2] / "docs" / "findings"
SCRIPTS = sorted(FOLDER.glob("*.py"))
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")
# Faults of eager are seen in a second or two each; most others call the C++ compiler, or ranks,
# and the one that reads beyond its memory is better not run in passing.
CHEAP = ["nll_loss_of_channels_last", "hardsigmoid_gradient_in_double"]


def imported(tree: ast.Module) -> set[str]:
    """The packages that a script needs."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_is_short_and_needs_only_what_has_the_fault(script):
    text = script.read_text(encoding="utf-8")
    tree = ast.parse(text)
    section = INDEX.partition("## Wrong in transformers")[2]
    allowed = {"torch", "transformers"} if f"({script.name})" in section else {"torch"}
    assert imported(tree) - set(sys.stdlib_module_names) <= allowed
    assert ast.get_docstring(tree)
    assert len(text.splitlines()) < 40
    assert "sys.exit(" in text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_has_a_page_that_tells_what_why_and_whether_it_is_known(script):
    page = script.with_suffix(".md").read_text(encoding="utf-8")
    title, *headings = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    headings = [heading for heading in headings if heading[0].isupper()]
    assert headings == ["The program", "What paritas says", "Why", "Known"]
    assert f"[{title}]({script.stem}.md)" in INDEX


def test_the_index_lists_all_and_nothing_else():
    linked = re.findall(r"\]\((\w+\.(?:md|py))\)", INDEX)
    files = {path.name for path in FOLDER.iterdir() if path.suffix in {".md", ".py"}}
    assert sorted(linked) == sorted(files - {"README.md"})


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="these are faults of torch 2.13"
)
@pytest.mark.parametrize("name", CHEAP)
def test_a_script_shows_its_fault(name):
    done = processes.run(FOLDER / f"{name}.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout
    assert not done.stderr
