"""What is finished is written down at once, and taken over only by the same run."""

from __future__ import annotations

import msgspec
import pytest

from paritas.errors import UsageError
from paritas.graphs.journal import NAME, About, Journal
from paritas.numerics.findings import Status
from paritas.numerics.graph_reports import OperatorResult, OptionResult, Outcome, Site

ABOUT = About(graph="model.pt2", calls="abc", settings={"ranks": "2"}, versions={"torch": "2.13.0"})


def result(key, **more):
    site = Site(position=0, node="mm")
    return OperatorResult(
        key=key,
        operator="aten.mm.default",
        signature="mm",
        sites=(site,),
        outcome=Outcome.VERIFIED,
        **more,
    )


def write(folder, *keys, about=ABOUT):
    with Journal(folder, about) as journal:
        for key in keys:
            journal.begin(key)
            journal.finish(result(key))


def test_a_second_run_takes_over_what_is_finished(tmp_path):
    write(tmp_path, "one", "two")
    with Journal(tmp_path, ABOUT) as journal:
        assert list(journal.finished) == ["one", "two"]
        assert journal.finished["one"] == result("one")
        assert not journal.notes
        assert not journal.suspects


def test_figures_that_are_no_numbers_come_back(tmp_path):
    option = OptionResult(
        idx=0,
        dim=0,
        split="split by m",
        rule="m -> m",
        origin="declared",
        ranks=2,
        status=Status.DIFFERENT,
        loss_whole=float("inf"),
        loss_split=float("-inf"),
    )
    with Journal(tmp_path, ABOUT) as journal:
        journal.finish(result("one", options=(option,)))
    with Journal(tmp_path, ABOUT) as journal:
        assert journal.finished["one"].options == (option,)


def test_a_last_line_that_was_cut_short_is_dropped_with_a_note_and_the_rest_goes_on(tmp_path):
    write(tmp_path, "one", "two")
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes()[:-20])
    with Journal(tmp_path, ABOUT) as journal:
        assert list(journal.finished) == ["one"]
        [note] = journal.notes
        assert "was cut short" in note
        journal.finish(result("two"))
    with Journal(tmp_path, ABOUT) as journal:
        assert list(journal.finished) == ["one", "two"]
        assert not journal.notes


def test_a_journal_whose_first_line_was_cut_short_starts_anew(tmp_path):
    (tmp_path / NAME).write_bytes(b'{"format": 1, "ab')
    with Journal(tmp_path, ABOUT) as journal:
        assert not journal.finished
    write(tmp_path, "one")
    with Journal(tmp_path, ABOUT) as journal:
        assert list(journal.finished) == ["one"]


def test_a_damaged_line_in_the_middle_is_refused(tmp_path):
    write(tmp_path, "one", "two")
    path = tmp_path / NAME
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"{}]\n", *lines[2:]]))
    with pytest.raises(UsageError, match=r"line 2 is damaged .*--overwrite"):
        Journal(tmp_path, ABOUT)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"calls": "xyz", "graph": "other.pt2"}, r"another graph \(model.pt2\)"),
        ({"settings": {"ranks": "4"}}, r"other settings \(ranks was 2, and is 4 now\)"),
        ({"versions": {"torch": "2.12.0"}}, r"other versions \(torch was 2.13.0, and is 2.12.0"),
        ({"inputs": "1234"}, "other sample inputs or weights"),
        ({"modules": {"own_ops": "1234"}}, "another text of the module own_ops"),
    ],
)
def test_results_of_something_else_are_refused_and_it_is_said_of_what(tmp_path, changes, told):
    write(tmp_path, "one")
    other = msgspec.structs.replace(ABOUT, **changes)
    with pytest.raises(UsageError, match=f"holds results of {told}.*--overwrite"):
        Journal(tmp_path, other)
    with Journal(tmp_path, other, resume=False) as journal:
        assert not journal.finished


def test_what_was_begun_and_never_finished_is_a_suspect(tmp_path):
    with Journal(tmp_path, ABOUT) as journal:
        journal.begin("deadly")
    with Journal(tmp_path, ABOUT) as journal:
        assert journal.suspects == {"deadly"}
        journal.finish(result("deadly"))
    with Journal(tmp_path, ABOUT) as journal:
        assert not journal.suspects


def test_what_was_interrupted_is_no_suspect(tmp_path):
    with Journal(tmp_path, ABOUT) as journal:
        journal.begin("slow")
        journal.interrupt()
    with Journal(tmp_path, ABOUT) as journal:
        assert not journal.suspects


def test_two_runs_cannot_write_to_one_folder_at_the_same_time(tmp_path):
    with (
        Journal(tmp_path, ABOUT),
        pytest.raises(UsageError, match="another process writes its results there"),
    ):
        Journal(tmp_path, ABOUT)
    write(tmp_path, "one")
