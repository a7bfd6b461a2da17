"""When a call is checked, and what a guard writes down."""

from __future__ import annotations

import pytest

from paritas.core.compiled.guard_settings import (
    SIZES_CHECKED,
    GuardSettings,
    Schedule,
    is_enabled,
    switched_on,
)
from paritas.core.compiled.guarded_calls import GuardJournal
from paritas.core.errors import UsageError
from paritas.core.results.findings import (
    Aspect,
    Coverage,
    Finding,
    Origin,
    OriginKind,
    Status,
    Verdict,
)
from paritas.core.results.items import Item, ItemKind


def checked(schedule, calls, sizes=()):
    return [number for number in range(calls) if schedule.due(sizes)]


@pytest.mark.parametrize(
    ("every", "due"), [(1, [0, 1, 2, 3, 4, 5]), (3, [0, 3]), (100, [0]), (1.0, [0, 1, 2, 3, 4, 5])]
)
def test_the_first_call_is_checked_and_then_each_nth(every, due):
    assert checked(Schedule(every, seed=0), 6) == due


def test_a_share_of_the_calls_is_checked_and_the_first_always():
    due = checked(Schedule(0.1, seed=0), 2000)
    assert due[0] == 0
    assert 140 < len(due) < 260
    assert due != list(range(0, 2000, 10))  # at random: no period of the program can hide a call


def test_new_dynamic_sizes_are_checked_whatever_was_asked_but_not_without_end():
    schedule = Schedule(1000, seed=0)
    due = [schedule.due((size,)) for size in range(20)]
    assert due == [True] * SIZES_CHECKED + [False] * (20 - SIZES_CHECKED)


@pytest.mark.parametrize(
    ("asked", "environment", "enabled"),
    [(None, None, True), (True, "0", False), (False, "1", False), (None, "off", False)],
)
def test_either_the_caller_or_the_environment_may_turn_it_off(
    asked, environment, enabled, monkeypatch
):
    monkeypatch.delenv("PARITAS_GUARD", raising=False)
    if environment is not None:
        monkeypatch.setenv("PARITAS_GUARD", environment)
    assert is_enabled(asked) is enabled


def test_a_switch_that_makes_no_sense_is_shown(monkeypatch):
    monkeypatch.setenv("PARITAS_GUARD", "perhaps")
    with pytest.raises(UsageError) as caught:
        is_enabled(None)
    assert str(caught.value) == (
        "PARITAS_GUARD must be 0, 1, or the action on a mismatch (raise, warn, record, fallback), "
        "not 'perhaps'"
    )


@pytest.mark.parametrize(
    ("value", "action"),
    [
        *[(None, None), ("", None), ("0", None), ("off", None)],
        *[("1", "raise"), ("on", "raise"), (" Yes ", "raise")],
        *[("raise", "raise"), ("warn", "warn"), ("record", "record"), ("FALLBACK", "fallback")],
    ],
)
def test_the_environment_says_what_guards_do_on_a_mismatch(value, action, monkeypatch):
    monkeypatch.delenv("PARITAS_GUARD", raising=False)
    if value is not None:
        monkeypatch.setenv("PARITAS_GUARD", value)
    assert switched_on() == action
    assert is_enabled(None) is (value not in {"0", "off"})


def test_a_setting_that_makes_no_sense_is_shown():
    with pytest.raises(UsageError, match=r"on_mismatch must be one of raise, .*, not 'explode'"):
        GuardSettings(on_mismatch="explode")


def part(status, compared=1, origin=None):
    found = Finding(
        item=Item(ItemKind.OUTPUT, "output[0]", graph="graph 0"),
        aspect=Aspect.VALUE,
        status=status,
        origin=origin,
    )
    return Verdict(findings=(found,), coverage=Coverage(compared=compared))


def test_a_failure_in_any_call_is_kept_and_counted():
    journal = GuardJournal()
    entry = journal.enter("graph 0")
    for status in (Status.IDENTICAL, Status.DIFFERENT, Status.EQUIVALENT, Status.DIFFERENT):
        entry.calls += 1
        journal.note_call(entry, part(status))
    verdict = journal.verdict()
    assert verdict.status is Status.DIFFERENT
    assert verdict.coverage.compared == 4
    assert verdict.notes == ("graph 0: output[0]: different in 2 calls",)
    assert (entry.checked, entry.failed) == (4, 2)


def test_calls_that_were_not_checked_are_told():
    journal = GuardJournal()
    entry = journal.enter("graph 0")
    entry.calls = 10
    journal.note_call(entry, part(Status.IDENTICAL))
    assert journal.verdict().coverage.skipped == ("graph 0: 9 of 10 calls, because of `every`",)


def test_a_graph_that_was_not_guarded_is_unverified():
    journal = GuardJournal()
    journal.note_call(journal.enter("graph 0"), part(Status.IDENTICAL))
    journal.enter("graph 1", unguarded="it came out of a cache")
    verdict = journal.verdict()
    assert verdict.exit_code == 3
    assert [finding.reason for finding in verdict.failures] == ["it came out of a cache"]


def test_nothing_seen_is_unverified():
    assert GuardJournal().verdict().exit_code == 3


def test_where_it_starts_survives_json():
    origin = Origin(kind=OriginKind.FUSION, name="a, b", nodes=("a", "b"), remedies=("x=1",))
    verdict = part(Status.DIFFERENT, origin=origin)
    assert Verdict.from_json(verdict.to_json()) == verdict
