"""The page about the pytest plugin: its tests pass as written, its options are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from integration.pytest_runs import run_suite

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[2] / "docs" / "pytest.md"


@pytest.mark.slow
def test_the_tests_of_the_page_pass(pytester):
    torch.compiler.reset()
    text = PAGE.read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    pytester.makepyfile(test_page="\n".join(code))
    result = run_suite(pytester, "--paritas-update")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["goldens: 1 written, 0 unchanged"])
    run_suite(pytester).assert_outcomes(passed=4)


def test_every_option_is_on_the_page(pytester):
    result = pytester.runpytest_inprocess("--help")
    offered = set(re.findall(r"--paritas-[a-z-]+", result.stdout.str()))
    told = set(re.findall(r"--paritas-[a-z-]+", PAGE.read_text(encoding="utf-8")))
    assert offered == told
