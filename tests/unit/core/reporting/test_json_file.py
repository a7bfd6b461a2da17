"""A verdict on disk."""

from __future__ import annotations

import pytest

from paritas.core.errors import UsageError
from paritas.core.reporting.files import check_writable, write_whole
from paritas.core.results.findings import Aspect, Coverage, Finding, Score, Status, Verdict
from paritas.core.results.items import Item, ItemKind

VERDICT = Verdict(
    findings=(
        Finding(
            item=Item(ItemKind.OUTPUT, "output"),
            aspect=Aspect.VALUE,
            status=Status.DIFFERENT,
            native=Score(max_z=float("inf"), max_limit=12.0, rms_z=3.0, rms_limit=2.5),
        ),
    ),
    coverage=Coverage(compared=1, skipped=("why",)),
)


def test_what_is_written_is_read_back_equal(tmp_path):
    path = tmp_path / "verdict.json"
    write_whole(path, VERDICT.to_json())
    assert Verdict.from_json(path.read_bytes()) == VERDICT


def test_an_older_file_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "verdict.json"
    path.write_text("older and longer than what comes now" * 99)
    write_whole(path, VERDICT.to_json())
    assert Verdict.from_json(path.read_bytes()) == VERDICT
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    with pytest.raises(UsageError, match="cannot write"):
        write_whole(tmp_path, VERDICT.to_json())
    assert list(tmp_path.iterdir()) == []


def test_checking_makes_no_file(tmp_path):
    check_writable(tmp_path / "verdict.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/verdict.json", "No such file or directory"),
        ("file/verdict.json", "Not a directory"),
        ("folder", "it is a directory; give a file"),
    ],
)
def test_what_cannot_be_written_is_told_at_once(tmp_path, name, reason):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError) as caught:
        check_writable(tmp_path / name)
    assert str(caught.value) == f"cannot write {str(tmp_path / name)!r}: {reason}"
