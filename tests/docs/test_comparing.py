"""The guide to comparing: it explains every column and every option, and its rules can be read."""

from __future__ import annotations

import re
from pathlib import Path

from paritas.comparison.columns import comparison_columns
from paritas.comparison.commands import compare
from paritas.comparison.rules import Rules
from paritas.core.results.findings import Status

GUIDE = Path(__file__).parents[2] / "docs" / "comparing.md"
TEXT = GUIDE.read_text(encoding="utf-8")


def test_every_column_is_explained():
    # `golden_max_value`, `_min_value` ... stand for two sides.
    told = set(re.findall(r"`([a-z_]+)`", TEXT))
    short = {f"{side}{name}" for side in ("golden", "my") for name in ("_min_value", "_mean_value")}
    assert {column.name for column in comparison_columns()} - told - short == {"my_max_value"}


def test_every_option_is_explained_and_no_other():
    options = {name for option in compare.params for name in option.opts if name.startswith("--")}
    assert set(re.findall(r"--[a-z][a-z-]*", TEXT)) == options - {"--help"}


def test_every_status_has_its_row():
    assert sorted(re.findall(r"^\| `(\w+)` \| ", TEXT, flags=re.MULTILINE)[:6]) == sorted(Status)


def test_the_rules_can_be_read(tmp_path):
    (rules,) = re.findall(r"^```toml\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "rules.toml").write_text(rules)
    found = Rules.of(tmp_path / "rules.toml")
    assert len(found.renamings) == 3
    assert found.mesh == {"cp": 2, "tp": 4}
