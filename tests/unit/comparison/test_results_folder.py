"""The folder of a comparison: written whole, read back the same, refused in time."""

from __future__ import annotations

import sys

import msgspec
import pytest

from paritas.comparison import results_folder
from paritas.comparison.results_folder import check_output, read_comparison, write_all
from paritas.comparison.rows import Comparison
from paritas.core.errors import UsageError
from unit.comparison.comparison_samples import dump, transformer


@pytest.fixture(autouse=True)
def plain_page(monkeypatch):
    """What the page looks like is asked elsewhere."""
    monkeypatch.setattr(
        "paritas.comparison.page.html_report", lambda found: f"page of {found.status}"
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_read_back_the_same(tmp_path):
    comparison = transformer(layers=2, faulty=1)
    written = write_all(tmp_path / "new" / "out", comparison)
    assert [path.name for path in written] == ["report.html", "comparison.csv", "comparison.json"]
    assert read_comparison(tmp_path / "new" / "out") == comparison
    assert read_comparison(tmp_path / "new" / "out" / "comparison.json") == comparison
    assert (tmp_path / "new" / "out" / "report.html").read_text() == "page of different\n"


def test_files_that_are_not_asked_for_this_time_do_not_stay_behind(tmp_path):
    write_all(tmp_path, transformer(), parquet=True)
    assert names(tmp_path) == [
        "comparison.csv",
        "comparison.json",
        "comparison.parquet",
        "report.html",
    ]
    write_all(tmp_path, transformer(faulty=None), html=False)
    assert names(tmp_path) == ["comparison.csv", "comparison.json"]


def test_nothing_is_written_where_a_part_cannot_be_rendered(tmp_path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("paritas.comparison.page.html_report", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_all(tmp_path / "out", transformer(), parquet=True)
    assert names(tmp_path) == []


def test_a_name_that_is_no_text_costs_nobody_the_results(tmp_path):
    comparison = transformer()
    odd = msgspec.structs.replace(comparison, my=dump("runs/\udcff"))
    write_all(tmp_path, odd)
    assert read_comparison(tmp_path).my.path == "runs/\\udcff"
    assert read_comparison(tmp_path).rows == comparison.rows


# --- before any work ------------------------------------------------------------------------------


def test_an_earlier_comparison_is_refused_and_named(tmp_path):
    write_all(tmp_path, transformer(), html=False)
    with pytest.raises(UsageError, match=r"\(comparison.json, comparison.csv\).*--overwrite"):
        check_output(tmp_path)
    check_output(tmp_path, overwrite=True)


def test_a_report_of_somebody_else_is_refused_too(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(UsageError, match=r"report\.html"):
        check_output(tmp_path)


def test_other_files_do_not_matter_and_nothing_is_created(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    check_output(tmp_path)
    check_output(tmp_path / "new" / "deeper")
    assert names(tmp_path) == ["notes.txt"]


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match="it is a file; give a folder"):
        check_output(tmp_path / "out")
    with pytest.raises(UsageError, match="cannot write"):
        check_output(tmp_path / "out" / "below")


def test_a_directory_in_the_place_of_a_file_is_told(tmp_path):
    (tmp_path / "comparison.csv").mkdir()
    with pytest.raises(UsageError, match=r"comparison\.csv': it is a directory"):
        check_output(tmp_path, overwrite=True)


def test_missing_duckdb_is_told_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    check_output(tmp_path)
    with pytest.raises(UsageError, match=r"paritas\[table\]"):
        check_output(tmp_path, parquet=True)


# --- reading --------------------------------------------------------------------------------------


def test_a_folder_without_a_comparison_says_what_is_missing(tmp_path):
    with pytest.raises(
        UsageError, match=r"has no comparison.json: give an output folder of `paritas compare"
    ):
        read_comparison(tmp_path)
    with pytest.raises(UsageError, match=r"nowhere' does not exist"):
        read_comparison(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b'{"my": 1}', b"\xff\xfe", b"[" * 5000])
def test_a_damaged_file_is_told_by_its_name(tmp_path, content):
    (tmp_path / "comparison.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"comparison.json is damaged or from another version"):
        read_comparison(tmp_path)


def test_a_cut_off_file_is_damaged(tmp_path):
    whole = transformer().to_json()
    (tmp_path / "comparison.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="is damaged"):
        read_comparison(tmp_path)


def test_a_divergence_at_a_row_that_is_not_there_is_damage(tmp_path):
    found = transformer()
    kept = msgspec.structs.replace(found, rows=found.rows[:3])
    (tmp_path / "comparison.json").write_bytes(kept.to_json())
    with pytest.raises(UsageError, match="refers to row 85, which is missing"):
        read_comparison(tmp_path)


def test_another_format_is_told_with_the_version_that_reads_it(tmp_path):
    later = Comparison(my=dump("a"), golden=dump("b"), format=7, paritas="9.1")
    (tmp_path / "comparison.json").write_bytes(later.to_json())
    with pytest.raises(UsageError, match=r"has format 7.*reads format 1.*paritas 9\.1"):
        read_comparison(tmp_path)


def test_reading_needs_no_rights_to_write(tmp_path):
    results_folder.write_all(tmp_path, transformer(), html=False)
    (tmp_path / "comparison.json").chmod(0o400)
    assert read_comparison(tmp_path).rows
