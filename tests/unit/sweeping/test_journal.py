"""The journal of a sweep: what is finished is there, whatever ended the process."""

from __future__ import annotations

import pytest

from paritas.core.errors import UsageError
from paritas.core.results.findings import Status
from paritas.sweeping.sweep import JOURNAL, REPORT_JSON, SweepJournal, read_rows
from unit.sweeping.sweep_samples import crashed, report, row

ROWS = [row("a:a"), row("b:b", Status.DIFFERENT), crashed("c:c")]
RUNS = [one.run for one in ROWS]
TORCH = {"torch": "2.13.0"}


def opened(folder, runs=RUNS, versions=TORCH, *, restart=False):
    return SweepJournal(folder, runs, versions, restart=restart)


def written(folder, rows):
    with opened(folder) as journal:
        for one in rows:
            journal.add(one)


def test_rows_are_there_again(tmp_path):
    written(tmp_path / "out", ROWS[:2])
    with opened(tmp_path / "out") as journal:
        assert journal.rows == {one.run: one for one in ROWS[:2]}
        assert journal.resumed == 2
        journal.add(ROWS[2])
    assert read_rows(tmp_path / "out") == tuple(ROWS)


def test_a_last_line_that_was_cut_short_is_not_read(tmp_path):
    written(tmp_path, ROWS[:2])
    path = tmp_path / JOURNAL
    path.write_bytes(path.read_bytes()[:-20])
    with opened(tmp_path) as journal:
        assert list(journal.rows) == RUNS[:1]
        journal.add(ROWS[2])
    assert read_rows(tmp_path) == (ROWS[0], ROWS[2])


def test_a_first_line_that_was_cut_short_is_no_journal(tmp_path):
    (tmp_path / JOURNAL).write_bytes(b'{"format": 1')
    written(tmp_path, ROWS)
    assert read_rows(tmp_path) == tuple(ROWS)


def test_another_torch_is_refused(tmp_path):
    written(tmp_path, ROWS)
    with pytest.raises(UsageError) as raised:
        opened(tmp_path, versions={"torch": "2.14.0"})
    assert str(raised.value) == (
        f"{str(tmp_path)!r} holds a sweep with torch 2.13.0, but this is torch 2.14.0: use "
        "another --output, or start again with --restart, which deletes its rows; to compare the "
        f"two, use another --output and add --against {tmp_path}"
    )


def test_other_targets_are_refused(tmp_path):
    written(tmp_path, ROWS)
    with pytest.raises(UsageError) as raised:
        opened(tmp_path, RUNS[:1])
    assert str(raised.value) == (
        f"{str(tmp_path)!r} holds a sweep of other targets (0 runs are new and 2 are gone, such as "
        "b:b (float32, cpu, eval, inductor)): use another --output, or start again with "
        "--restart, which deletes its rows"
    )
    with opened(tmp_path):  # it has let go of the folder
        pass


def test_the_order_of_targets_does_not_matter(tmp_path):
    written(tmp_path, ROWS)
    with opened(tmp_path, RUNS[::-1]) as journal:
        assert journal.resumed == 3


def test_a_restart_deletes_the_rows(tmp_path):
    written(tmp_path, ROWS)
    with opened(tmp_path, RUNS[:1], {"torch": "2.14.0"}, restart=True) as journal:
        assert journal.rows == {}
    assert read_rows(tmp_path) == ()


def test_two_sweeps_do_not_write_to_one_folder(tmp_path):
    with opened(tmp_path), pytest.raises(UsageError, match="another sweep is writing there; wait"):
        opened(tmp_path)


def test_a_damaged_line_is_refused(tmp_path):
    written(tmp_path, ROWS)
    path = tmp_path / JOURNAL
    path.write_bytes(path.read_bytes().replace(b'"different"', b'"strange"'))
    with pytest.raises(UsageError, match=r"line 3 is damaged or of another version: .*--restart"):
        opened(tmp_path)


def test_an_earlier_sweep_is_read_from_its_report(tmp_path):
    (tmp_path / REPORT_JSON).write_bytes(report(*ROWS).to_json())
    assert read_rows(tmp_path) == read_rows(tmp_path / REPORT_JSON) == tuple(ROWS)


def test_where_no_sweep_was_nothing_is_read(tmp_path):
    with pytest.raises(UsageError) as raised:
        read_rows(tmp_path)
    assert str(raised.value) == (
        f"--against {str(tmp_path)!r}: there is no earlier sweep; use the --output of one"
    )
