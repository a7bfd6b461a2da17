"""Ranks hand in what they saw, and one of them makes one report of it."""

from __future__ import annotations

import os
import threading

import pytest

from paritas.core.commands import ranks as ranks_module
from paritas.core.commands.ranks import Meeting, Ranks
from paritas.core.results.findings import (
    Aspect,
    Coverage,
    Finding,
    Origin,
    OriginKind,
    Status,
    Verdict,
    unverified,
)
from paritas.core.results.items import Item, ItemKind
from paritas.guarding.report import GraphCounts, RankReport, merge_ranks

HERE = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks_module.tempfile, "tempdir", str(tmp_path))


def environment(rank, world, **more):
    return {**HERE, "RANK": str(rank), "WORLD_SIZE": str(world), **more}


def meet(rank, world=2, **more):
    given = environment(rank, world, **more)
    return Meeting(Ranks.from_environment(given), given)


def seen(status=Status.IDENTICAL, compared=1):
    finding = Finding(
        item=Item(ItemKind.OUTPUT, "output", graph="graph 0"),
        aspect=Aspect.VALUE,
        status=status,
        origin=Origin(kind=OriginKind.NODE, name="mul"),
    )
    graph = GraphCounts(
        label="graph 0", source="m.py:1", calls=2, checked=1, failed=0, compared=1, unguarded=""
    )
    coverage = Coverage(compared=compared, skipped=("graph 0: 1 of 2 calls",), unmatched=("x",))
    return RankReport((graph,), Verdict(findings=(finding,), coverage=coverage, notes=("a note",)))


# --- who is who -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "one", "WORLD_SIZE": "2"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Ranks(1, 2, range(2))),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            Ranks(5, 8, range(4, 8)),
        ),
    ],
)
def test_the_environment_says_who_is_who(given, expected):
    assert Ranks.from_environment(given) == expected


def test_the_only_rank_of_torchrun_counts_where_it_is_asked_for():
    given = {"RANK": "0", "WORLD_SIZE": "1"}
    assert Ranks.from_environment(given, alone=True) is None  # a scheduler's, not torchrun's
    given["TORCHELASTIC_RUN_ID"] = "none"
    assert Ranks.from_environment(given) is None
    assert Ranks.from_environment(given, alone=True) == Ranks(0, 1, range(1))


def test_the_first_rank_of_each_machine_merges():
    local = {"LOCAL_WORLD_SIZE": "2"}
    merging = [
        rank
        for rank in range(4)
        if Ranks.from_environment(environment(rank, 4, LOCAL_RANK=str(rank % 2), **local)).merges
    ]
    assert merging == [0, 2]


# --- meeting --------------------------------------------------------------------------------------


def test_what_is_handed_in_is_collected_and_the_folder_goes():
    first, second = meet(0), meet(1)
    assert first.folder == second.folder
    second.hand_in(b"seen")
    assert first.collect(5, threading.Event()) == {1: b"seen"}
    assert not second.wait_until_closed(0, threading.Event())
    first.close()
    assert second.wait_until_closed(0, threading.Event())


def test_a_report_that_does_not_come_is_waited_for_no_longer_than_said(capsys, monkeypatch):
    monkeypatch.setattr(ranks_module, "_NOTICE_AFTER_SECONDS", 0.0)
    assert meet(0, 3).collect(0.3, threading.Event()) == {}
    assert capsys.readouterr().err == "waiting up to 0.3 s for the report of rank 1, 2\n"


def test_nobody_waits_in_a_hurry():
    hurried = threading.Event()
    hurried.set()
    meeting = meet(1)
    meeting.hand_in(b"seen")
    assert meet(0, 2).collect(600, hurried) == {}
    meeting.hand_in(b"seen")
    assert not meeting.wait_until_closed(600, hurried)


def test_what_an_earlier_launch_left_is_not_taken_for_a_report():
    meet(1).hand_in(b"old")
    assert meet(0).collect(0, threading.Event()) == {}


@pytest.mark.parametrize(
    "name", ["MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"]
)
def test_launches_do_not_meet_each_other(name):
    assert meet(0, **{name: "1"}).folder != meet(0, **{name: "2"}).folder


@pytest.mark.skipif(os.name == "nt", reason="there are no such permissions")
def test_a_folder_that_others_can_write_to_is_not_used():
    meeting = meet(1)
    meeting.folder.mkdir()
    meeting.folder.chmod(0o777)
    with pytest.raises(PermissionError, match="belongs to another user"):
        meeting.hand_in(b"seen")
    (meeting.folder / "1.json").write_bytes(b"planted")
    assert meet(0).collect(0, threading.Event()) == {}


def test_a_link_is_not_used(tmp_path):
    meeting = meet(1)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    meeting.folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        meeting.hand_in(b"seen")


# --- one report -----------------------------------------------------------------------------------


def test_a_report_survives_being_handed_in():
    report = seen(Status.DIFFERENT)
    assert RankReport.from_json(report.to_json()) == report


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"graphs": [], "verdict": "{"}'])
def test_a_report_that_cannot_be_read_is_unverified(data):
    verdict = RankReport.from_json(data).verdict
    assert verdict.status is Status.UNVERIFIED
    assert verdict.failures[0].reason.startswith("its report cannot be read: ")


def test_a_merged_report_says_which_rank_saw_what():
    merged = merge_ranks(Ranks(0, 2, range(2)), {0: seen(), 1: seen(Status.DIFFERENT)})
    verdict = merged.verdict
    assert [graph.label for graph in merged.graphs] == ["rank 0: graph 0", "rank 1: graph 0"]
    assert [finding.path for finding in verdict.findings] == [
        "rank 0: graph 0: output",
        "rank 1: graph 0: output",
    ]
    assert verdict.failures[0].origin == Origin(kind=OriginKind.NODE, name="mul")
    assert verdict.coverage == Coverage(
        compared=2,
        skipped=("rank 0: graph 0: 1 of 2 calls", "rank 1: graph 0: 1 of 2 calls"),
        unmatched=("rank 0: x", "rank 1: x"),
    )
    assert verdict.notes == ("rank 0: a note", "rank 1: a note")
    assert verdict.exit_code == 1


def test_a_rank_without_a_report_is_unverified():
    verdict = merge_ranks(Ranks(0, 2, range(2)), {0: seen()}).verdict
    assert [(finding.path, finding.status) for finding in verdict.failures] == [
        ("rank 1", Status.UNVERIFIED)
    ]
    assert verdict.exit_code == 3


def test_a_rank_that_compared_nothing_is_unverified_under_its_name():
    empty = RankReport((), Verdict())
    verdict = merge_ranks(Ranks(0, 2, range(2)), {0: seen(), 1: empty}).verdict
    assert [finding.path for finding in verdict.failures] == ["rank 1: verdict"]


def test_strictness_of_one_rank_holds_for_all():
    strict = RankReport((), Verdict(findings=(unverified("a", "b"),), strict=True))
    assert merge_ranks(Ranks(0, 2, range(2)), {0: seen(), 1: strict}).verdict.strict


def test_ranks_of_other_machines_are_mentioned_not_missed():
    verdict = merge_ranks(Ranks(2, 4, range(2, 4)), {2: seen(), 3: seen()}).verdict
    assert verdict.exit_code == 0
    assert verdict.notes[0] == (
        "this report covers ranks 2 to 3 of 4, those on this machine; the first rank of each other "
        "machine reports for its own"
    )
