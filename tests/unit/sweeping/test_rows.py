"""Rows of a sweep, their roll-up, and what changed since an earlier one."""

from __future__ import annotations

import json

import msgspec
import pytest

from paritas.core.results.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.core.results.items import output
from paritas.sweeping.rows import (
    MOST_FAILING,
    MOST_PASSING,
    SweepReport,
    changes,
    column_name,
    columns,
    trim_verdict,
)
from unit.sweeping.sweep_samples import crashed, report, row


@pytest.mark.parametrize(
    ("rows", "code", "line"),
    [
        ([row("a:a")], 0, "equivalent: 1 run; all pass"),
        (
            [row("a:a"), row("b:b", Status.UNSTABLE)],
            0,
            "unstable: 2 runs; all pass, 1 of them unstable (a warning, not a failure)",
        ),
        ([row("a:a"), crashed("b:b")], 3, "unverified: 2 runs; 1 of 2 fail (1 unverified)"),
        (
            [row("a:a", Status.DEGRADED), crashed("b:b"), row("c:c", Status.DIFFERENT)],
            1,
            "different: 3 runs; 3 of 3 fail (1 different, 1 degraded, 1 unverified)",
        ),
        ([], 3, "unverified: 0 runs; nothing was compared"),
    ],
)
def test_the_gravest_row_decides(rows, code, line):
    found = report(*rows)
    assert (found.exit_code, found.headline, bool(found)) == (code, line, code == 0)
    assert found.verdict.exit_code == code


def test_unstable_fails_under_strict():
    found = report(row("a:a", Status.UNSTABLE), strict=True)
    assert (found.exit_code, found.verdict.exit_code) == (1, 1)
    assert found.headline == "unstable: 1 run; 1 of 1 fail (1 unstable)"


def test_a_sweep_that_was_stopped_is_no_pass():
    found = report(row("a:a"), planned=3, stopped="interrupt")
    assert found.exit_code == found.verdict.exit_code == 3
    assert found.headline == "unverified: interrupted after 1 of 3 runs; all pass"


def test_the_findings_of_all_rows_say_which_run_they_are_of():
    found = report(row("a:a", Status.DIFFERENT), crashed("b:b"))
    assert [one.path for one in found.verdict.failures] == [
        "a:a (float32, cpu, eval, inductor): output",
        "b:b (float32, cpu, eval, inductor): run",
    ]


def test_a_report_survives_json():
    found = report(row("a:a"), crashed("b:b"))
    assert SweepReport.from_json(found.to_json()) == found


def test_of_many_findings_those_that_fail_are_kept_and_all_are_counted():
    def made(status, many):
        return [
            Finding(item=output(f"o{at}"), aspect=Aspect.VALUE, status=status) for at in range(many)
        ]

    findings = (*made(Status.IDENTICAL, 300), *made(Status.DIFFERENT, 90))
    whole = Verdict(findings=findings, coverage=Coverage(compared=390))
    small, counts = trim_verdict(whole)
    assert counts == {"identical": 300, "different": 90}
    assert len(small.findings) == MOST_FAILING + MOST_PASSING
    assert (small.status, small.coverage) == (whole.status, whole.coverage)


# --- against an earlier sweep ---------------------------------------------------------------------


def changed(rows, earlier, **more):
    return [
        (one.run.target, one.kind.value, one.fails)
        for one in changes(rows, earlier, **{"strict": False, **more})
    ]


def test_what_changed_is_told_by_kind():
    earlier = [
        row("same:a"),
        row("wrong:a"),
        row("lost:a"),
        row("fixed:a", Status.DIFFERENT),
        row("still:a", Status.DIFFERENT),
        row("worse:a", Status.DEGRADED),
        row("slow:a", seconds=20.0),
        row("gone:a"),
    ]
    rows = [
        row("same:a", Status.IDENTICAL),
        row("wrong:a", Status.DEGRADED),
        crashed("lost:a"),
        row("fixed:a"),
        crashed("still:a"),
        row("worse:a", Status.DIFFERENT),
        row("slow:a", seconds=31.0),
        row("new:a"),
        crashed("new:b"),
    ]
    assert changed(rows, earlier) == [
        ("wrong:a", "newly different", True),
        ("worse:a", "newly different", True),
        ("lost:a", "newly unverified", True),
        ("fixed:a", "newly fixed", False),
        ("slow:a", "newly slow", False),
        ("new:a", "new", False),
        ("new:b", "new", True),
        ("gone:a", "gone", False),
    ]


def test_another_setting_is_another_row():
    assert changed([row("a:a", dtype="bfloat16")], [row("a:a")]) == [
        ("a:a", "new", False),
        ("a:a", "gone", False),
    ]


def test_a_little_slower_is_not_newly_slow():
    assert changed([row("a:a", seconds=29.0)], [row("a:a", seconds=20.0)]) == []
    assert changed([row("a:a", seconds=3.0)], [row("a:a", seconds=1.0)]) == []


def test_a_sweep_that_was_stopped_has_lost_nothing():
    assert changed([], [row("a:a")], whole=False) == []


def test_unstable_is_newly_wrong_under_strict():
    rows, earlier = [row("a:a", Status.UNSTABLE)], [row("a:a")]
    assert changed(rows, earlier) == []
    assert changed(rows, earlier, strict=True) == [("a:a", "newly different", True)]


@pytest.mark.parametrize(
    ("rows", "code", "line"),
    [
        (
            [row("a:a"), row("b:b", Status.DIFFERENT)],
            0,
            "no run is newly wrong (nothing changed); 2 runs, 1 failing",
        ),
        (
            [row("a:a", Status.DIFFERENT), row("b:b")],
            1,
            "different: 1 run newly wrong (1 newly different, 1 newly fixed); 2 runs, 1 failing",
        ),
        (
            [crashed("a:a"), row("b:b", Status.DIFFERENT)],
            3,
            "unverified: 1 run newly wrong (1 newly unverified); 2 runs, 2 failing",
        ),
    ],
)
def test_against_an_earlier_sweep_what_is_newly_wrong_decides(rows, code, line):
    earlier = [row("a:a"), row("b:b", Status.DIFFERENT)]
    found = report(*rows, against="before", changes=changes(rows, earlier, strict=False))
    assert (found.exit_code, found.headline) == (code, line)


def test_against_an_earlier_sweep_one_that_was_stopped_is_no_pass():
    found = report(row("a:a"), planned=2, stopped="interrupt", against="before")
    assert found.exit_code == 3


def test_columns_leave_out_what_all_runs_share():
    rows = [row("a:a"), row("a:a", dtype="bfloat16"), row("b:b", mode="train")]
    common, settings = columns(rows)
    assert common == ("cpu", "inductor")
    names = [column_name(one, common) for one in settings]
    assert names == ["float32, eval", "bfloat16, eval", "float32, train"]
    assert column_name(("cpu",), ("cpu",)) == "verdict"


def test_a_row_of_another_version_is_refused():
    plain = msgspec.to_builtins(row("a:a")) | {"colour": "red"}
    with pytest.raises(ValueError, match=r"cannot read a row of a sweep from JSON: .*`colour`"):
        type(row("a:a")).from_json(msgspec.json.encode(plain))


def test_the_json_of_a_sweep_has_a_format_and_the_status_of_each_row():
    found = report(row("m:a", Status.DIFFERENT), row("m:b", Status.EQUIVALENT))
    content = json.loads(found.to_json())
    assert content["format"] == 1
    assert [one["status"] for one in content["rows"]] == ["different", "equivalent"]


def test_the_status_of_a_row_is_that_of_its_verdict_whatever_a_file_says():
    content = json.loads(report(row("m:a", Status.DIFFERENT)).to_json())
    content["rows"][0]["status"] = "identical"
    (read,) = SweepReport.from_json(json.dumps(content)).rows
    assert read.status is Status.DIFFERENT
    assert msgspec.structs.replace(read, verdict=row("m:b").verdict).status is Status.EQUIVALENT
