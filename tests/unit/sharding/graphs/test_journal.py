"""Finished results are written at once, and reused only by the same run."""

from __future__ import annotations

import msgspec
import pytest

from paritas.core.errors import UsageError
from paritas.core.results.findings import Status
from paritas.formats.files.records import Lock
from paritas.sharding.graphs.results_folder import JOURNAL_LOCK, JOURNAL_NAME, About, GraphJournal
from paritas.sharding.graphs.rows import (
    CallOutcome,
    CallSite,
    GraphReport,
    OperatorResult,
    OptionResult,
)

ABOUT = About(graph="model.pt2", calls="abc", settings={"ranks": "2"}, versions={"torch": "2.13.0"})
OTHER = msgspec.structs.replace(ABOUT, graph="other.pt2", calls="xyz")


def opened(folder, about=ABOUT, **more):
    return GraphJournal(
        folder, about, GraphReport(graph=about.graph, kind="fx", ended=False), **more
    )


def result(key, outcome=CallOutcome.VERIFIED, **more):
    site = CallSite(position=0, node="mm")
    return OperatorResult(
        key=key,
        operator="aten.mm.default",
        signature="mm",
        sites=(site,),
        outcome=outcome,
        **more,
    )


def write(folder, *keys, about=ABOUT):
    with opened(folder, about) as journal:
        for key in keys:
            journal.begin(key)
            journal.finish(result(key))


def test_a_second_run_takes_over_what_is_finished(tmp_path):
    write(tmp_path, "one", "two")
    with opened(tmp_path) as journal:
        assert list(journal.finished) == ["one", "two"]
        assert journal.finished["one"] == result("one")
        assert not journal.notes
        assert not journal.suspects


def test_nan_and_infinity_survive_the_journal(tmp_path):
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
    with opened(tmp_path) as journal:
        journal.finish(result("one", options=(option,)))
    with opened(tmp_path) as journal:
        assert journal.finished["one"].options == (option,)


def test_a_last_line_that_was_cut_short_is_dropped_with_a_note_and_the_rest_goes_on(tmp_path):
    write(tmp_path, "one", "two")
    path = tmp_path / JOURNAL_NAME
    path.write_bytes(path.read_bytes()[:-20])
    with opened(tmp_path) as journal:
        assert list(journal.finished) == ["one"]
        [note] = journal.notes
        assert "was truncated" in note
        journal.finish(result("two"))
    with opened(tmp_path) as journal:
        assert list(journal.finished) == ["one", "two"]
        assert not journal.notes


def test_a_journal_with_a_truncated_first_line_starts_over(tmp_path):
    (tmp_path / JOURNAL_NAME).write_bytes(b'{"format": 1, "ab')
    with opened(tmp_path) as journal:
        assert not journal.finished
    write(tmp_path, "one")
    with opened(tmp_path) as journal:
        assert list(journal.finished) == ["one"]


def test_a_damaged_line_in_the_middle_is_refused(tmp_path):
    write(tmp_path, "one", "two")
    path = tmp_path / JOURNAL_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"{}]\n", *lines[2:]]))
    with pytest.raises(UsageError, match=r"line 2 is damaged .*--overwrite"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"settings": {"ranks": "4"}}, r"other settings \(ranks was 2, now it is 4\)"),
        ({"versions": {"torch": "2.12.0"}}, r"other versions \(torch was 2.13.0, now it is 2.12.0"),
        ({"inputs": "1234"}, "other sample inputs or weights"),
        ({"modules": {"own_ops": "1234"}}, "another version of the module own_ops"),
    ],
)
def test_results_of_something_else_are_refused_and_it_is_said_of_what(tmp_path, changes, told):
    write(tmp_path, "one")
    other = msgspec.structs.replace(ABOUT, **changes)
    with pytest.raises(UsageError, match=f"holds results with {told}.*--overwrite"):
        opened(tmp_path, other)
    with opened(tmp_path, other, resume=False) as journal:
        assert not journal.finished


def test_what_was_begun_and_never_finished_is_a_suspect(tmp_path):
    with opened(tmp_path) as journal:
        journal.begin("deadly")
    with opened(tmp_path) as journal:
        assert journal.suspects == {"deadly"}
        journal.finish(result("deadly"))
    with opened(tmp_path) as journal:
        assert not journal.suspects


def test_an_interrupted_operator_is_not_a_suspect(tmp_path):
    with opened(tmp_path) as journal:
        journal.begin("slow")
        journal.interrupt()
    with opened(tmp_path) as journal:
        assert not journal.suspects


def test_two_runs_cannot_write_to_one_folder_at_the_same_time(tmp_path):
    with (
        opened(tmp_path),
        pytest.raises(UsageError, match="another process is writing its results there"),
    ):
        opened(tmp_path)
    write(tmp_path, "one")


# --- several graphs in one folder -----------------------------------------------------------------


def test_another_graph_is_registered_beside_the_first_and_both_are_kept(tmp_path):
    write(tmp_path, "one")
    write(tmp_path, "two", about=OTHER)
    with opened(tmp_path) as journal:
        assert list(journal.finished) == ["one"]
        [other] = journal.others()
        assert (other.number, other.report.graph) == (2, "other.pt2")
        assert [one.key for one in other.whole_report().operators] == ["two"]
        journal.finish(result("three"))
    with opened(tmp_path, OTHER) as journal:
        assert (journal.own.number, list(journal.finished)) == (2, ["two"])
        assert list(journal.graphs["abc"].finished) == ["one", "three"]


def test_the_end_of_a_run_is_kept_for_its_graph(tmp_path):
    with opened(tmp_path) as journal:
        journal.finish(result("one"))
        journal.end(GraphReport(graph="model.pt2", kind="fx", calls=3, notes=("a note",)))
    with opened(tmp_path, OTHER):  # and is killed
        pass
    with opened(tmp_path, msgspec.structs.replace(ABOUT, calls="third")) as journal:
        ended, killed = (one.whole_report() for one in journal.others())
    assert (ended.ended, ended.calls, ended.notes) == (True, 3, ("a note",))
    assert [one.key for one in ended.operators] == ["one"]
    assert not killed.ended


def test_what_was_verified_for_another_graph_is_known_and_nothing_else_is(tmp_path):
    with opened(tmp_path) as journal:
        journal.finish(result("right"))
        journal.finish(result("wrong", CallOutcome.FAILED))
        journal.finish(result("silent", CallOutcome.NOTHING))
    with opened(tmp_path, OTHER) as journal:
        found, graph = journal.verified_elsewhere("right")
        assert (found.key, graph) == ("right", "model.pt2")
        assert journal.verified_elsewhere("wrong") is None
        assert journal.verified_elsewhere("silent") is None
        assert journal.verified_elsewhere("unknown") is None


@pytest.mark.parametrize(
    "changes",
    [{"versions": {"torch": "2.12.0"}}, {"inputs": "1234"}, {"modules": {"own_ops": "1234"}}],
)
def test_what_was_verified_under_other_conditions_is_not_known(tmp_path, changes):
    write(tmp_path, "right")
    with opened(tmp_path, msgspec.structs.replace(OTHER, **changes)) as journal:
        assert journal.verified_elsewhere("right") is None


def test_an_operator_that_ended_a_run_of_one_graph_is_a_suspect_for_the_next(tmp_path):
    with opened(tmp_path) as journal:
        journal.begin("deadly")
    with opened(tmp_path, OTHER) as journal:
        assert journal.suspects == {"deadly"}


def test_starting_over_because_of_other_settings_says_what_else_is_deleted(tmp_path):
    write(tmp_path, "one")
    write(tmp_path, "two", about=OTHER)
    changed = msgspec.structs.replace(ABOUT, settings={"ranks": "4"})
    with pytest.raises(UsageError, match="which also deletes the results of 1 other graph"):
        opened(tmp_path, changed)


def test_a_journal_of_an_older_format_or_of_another_program_is_refused(tmp_path):
    for text in (b'{"format":1,"about":null}\n', b'{"entry": "somebody else\'s"}\n', b"notes\n"):
        (tmp_path / JOURNAL_NAME).write_bytes(text)
        with pytest.raises(UsageError, match="line 1 is damaged or from another version"):
            opened(tmp_path)
        assert (tmp_path / JOURNAL_NAME).read_bytes() == text


def test_a_lock_that_was_taken_in_between_is_seen(tmp_path, monkeypatch):
    """Two runs that start at once: the second must not find out too late."""
    held = Lock(tmp_path / JOURNAL_LOCK)
    monkeypatch.setattr(
        "paritas.sharding.graphs.results_folder.is_locked", lambda path: False, raising=False
    )
    with pytest.raises(UsageError, match="another process is writing its results there"):
        opened(tmp_path)
    held.release()
