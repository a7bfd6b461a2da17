"""The page of figures is what the files of results give, and tells which bars are met."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.lab.figures import RESULTS, Figure, Report, Table, read, write  # noqa: E402
from benchmarks.lab.page import PAGE, page  # noqa: E402
from benchmarks.lab.slopes import slope  # noqa: E402


def test_the_page_is_what_the_files_give():
    reports = read()
    assert reports, f"no file in {RESULTS.name}: this test would pass on nothing"
    assert PAGE.read_text(encoding="utf-8") == page(reports), "say: make bench-page"


def test_a_file_bears_the_name_of_its_script_and_says_where_and_when():
    for path in sorted(RESULTS.glob("*.json")):
        told = path.read_text(encoding="utf-8")
        assert f'"script": "{path.stem}"' in told
        assert '"date"' in told
        assert str(ROOT) not in told, f"{path.name} names a folder of the machine"


@pytest.mark.parametrize(
    ("value", "better", "met"),
    [
        (8.0, "lower", True),
        (8.1, "lower", False),
        (7.9, "higher", False),
        (math.nan, "lower", False),
        (None, "higher", False),
    ],
)
def test_a_bar_is_met_by_a_measured_value_on_its_good_side_alone(value, better, met):
    assert Figure("cost", value, "x", 8.0, better).met is met


def test_a_missed_bar_stands_on_top_of_the_page_and_in_its_row():
    figures = [Figure("cost", 9.5, "x", 8.0), Figure("size", 2.0, "MiB")]
    told = page([Report("verify", figures, [Table("Each", ["a", "b"], [["x|y", 1.5]])], "What.")])
    assert "**0 of 1 bars are met.**" in told
    assert "- [Verify](#verify): cost: 9.5 x, bar ≤ 8" in told
    assert "| cost | 9.5 x | ≤ 8 | **no** |  |" in told
    assert "| size | 2 MiB |  |  |  |" in told
    assert "| x\\|y | 1.5 |" in told


def test_the_reason_of_a_missed_bar_stands_next_to_it():
    missed, met = Figure("bits, equal", 0.5, "x", 0.8, "higher"), Figure("bits, equal", 0.9, "x")
    assert "bar ≥ 0.8. A single memcmp of the C library" in page([Report("compare", [missed])])
    assert "memcmp" not in page([Report("compare", [met])])


def test_what_was_written_is_read_again(tmp_path, capsys):
    report = Report("drawn", [Figure("share", math.nan, "%", 90.0, "higher", "of 7")])
    write(report, tmp_path)
    (found,) = read(tmp_path)
    assert found.figures[0].value is None
    assert found.measured is not None
    assert found.measured.versions["torch"]
    assert "(at least 90: MISSED)" in capsys.readouterr().out


def test_nothing_measured_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="nothing was measured"):
        write(Report("empty", []), tmp_path)


def test_a_slope_is_that_of_the_power_and_needs_a_range():
    assert slope({n: 3e-4 * n**1.5 for n in (4, 16, 64)}) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="over 16 times"):
        slope({4: 1.0, 8: 2.0, 16: 4.0})
