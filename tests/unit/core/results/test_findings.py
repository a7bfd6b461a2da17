from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from letters import LETTERS
from paritas.core.errors import MismatchError, UsageError
from paritas.core.results.findings import Aspect, Coverage, Finding, Score, Status, Verdict
from paritas.core.results.items import Item, Metrics

NAN, INF = math.nan, math.inf

# --- building blocks ------------------------------------------------------------------------------

FLOATS = st.floats(allow_nan=True, allow_infinity=True)
WORDS = st.text(LETTERS, max_size=8) | st.sampled_from(
    ["nan", "inf", "null", "None", "true", "1", ""]
)
COUNTS = st.integers(0, 2**53)
INDICES = st.none() | st.lists(st.integers(0, 99), max_size=3).map(tuple)

SCORES = st.builds(
    Score,
    max_z=FLOATS,
    max_limit=FLOATS,
    rms_z=FLOATS,
    rms_limit=FLOATS,
    index=INDICES,
    slice_axis=st.none() | st.integers(0, 4),
    slice_index=st.none() | COUNTS,
    slice_z=st.none() | FLOATS,
    slice_limit=st.none() | FLOATS,
    noise=WORDS,
)
_BY_TYPE = {
    "int": COUNTS,
    "float": FLOATS,
    "float | None": st.none() | FLOATS,
    "tuple[int, ...] | None": INDICES,
}
METRICS = st.builds(Metrics, **{name: _BY_TYPE[t] for name, t in Metrics.__annotations__.items()})
FINDINGS = st.builds(
    Finding,
    item=st.builds(Item, name=WORDS),
    aspect=st.sampled_from(Aspect),
    status=st.sampled_from(Status),
    reason=WORDS,
    advice=WORDS,
    dtype=st.none() | WORDS,
    shape=INDICES,
    metrics=st.none() | METRICS,
    native=st.none() | SCORES,
    lifted=st.none() | SCORES,
    source=st.none() | WORDS,
)
COVERAGES = st.builds(
    Coverage,
    compared=st.integers(0, 3),
    skipped=st.lists(WORDS, max_size=2).map(tuple),
    unmatched=st.lists(WORDS, max_size=2).map(tuple),
)
VERDICTS = st.builds(
    Verdict,
    findings=st.lists(FINDINGS, max_size=3).map(tuple),
    coverage=COVERAGES,
    notes=st.lists(WORDS, max_size=2).map(tuple),
    strict=st.booleans(),
    enabled=st.booleans(),
)


def found(status: Status, path: str = "output") -> Finding:
    return Finding(item=Item(name=path), aspect=Aspect.VALUE, status=status)


def verdict_of(*statuses: Status, **fields) -> Verdict:
    findings = tuple(found(status, f"output[{i}]") for i, status in enumerate(statuses))
    return Verdict(findings=findings, coverage=Coverage(compared=len(statuses)), **fields)


def score(**figures) -> Score:
    within = {"max_z": 1.0, "max_limit": 12.0, "rms_z": 1.0, "rms_limit": 2.5}
    return Score(**{**within, **figures})


# --- statuses -------------------------------------------------------------------------------------


def test_the_statuses_are_a_closed_list_in_order_of_gravity():
    names = ["identical", "equivalent", "unstable", "unverified", "degraded", "different"]
    assert [status.value for status in Status] == names
    assert [status.gravity for status in Status] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("status", "passes", "passes_strictly"),
    [
        (Status.IDENTICAL, True, True),
        (Status.EQUIVALENT, True, True),
        (Status.UNSTABLE, True, False),
        (Status.UNVERIFIED, False, False),
        (Status.DEGRADED, False, False),
        (Status.DIFFERENT, False, False),
    ],
)
def test_which_status_passes(status, passes, passes_strictly):
    assert status.passes() is passes
    assert status.passes(strict=True) is passes_strictly
    assert bool(verdict_of(status)) is passes
    assert bool(verdict_of(status, strict=True)) is passes_strictly


@pytest.mark.parametrize(("left", "right"), [*itertools.product(Status, repeat=2)])
def test_the_graver_status_wins_the_roll_up(left, right):
    assert verdict_of(left, right).status is max(left, right, key=list(Status).index)


# --- verdicts -------------------------------------------------------------------------------------


def test_nothing_compared_is_unverified():
    verdict = Verdict()
    assert verdict.status is Status.UNVERIFIED
    assert not verdict.passed
    assert verdict.exit_code == 3


def test_a_passing_finding_without_a_comparison_behind_it_is_unverified():
    verdict = Verdict(findings=(found(Status.IDENTICAL),), coverage=Coverage(compared=0))
    assert verdict.status is Status.UNVERIFIED
    assert not verdict


def test_a_comparison_without_a_finding_is_unverified():
    verdict = Verdict(coverage=Coverage(compared=1))
    assert verdict.status is Status.UNVERIFIED
    assert not verdict


def test_a_difference_is_still_a_difference_where_nothing_else_was_compared():
    verdict = Verdict(findings=(found(Status.DIFFERENT),), coverage=Coverage(compared=0))
    assert verdict.status is Status.DIFFERENT
    assert verdict.exit_code == 1


@pytest.mark.parametrize(
    ("statuses", "code", "strict_code"),
    [
        ([Status.IDENTICAL, Status.EQUIVALENT], 0, 0),
        ([Status.IDENTICAL, Status.UNSTABLE], 0, 1),
        ([Status.IDENTICAL, Status.UNVERIFIED], 3, 3),
        ([Status.IDENTICAL, Status.DEGRADED], 1, 1),
        ([Status.DIFFERENT, Status.UNVERIFIED], 1, 1),
        ([Status.DEGRADED, Status.UNVERIFIED], 1, 1),
    ],
)
def test_exit_codes(statuses, code, strict_code):
    assert verdict_of(*statuses).exit_code == code
    assert verdict_of(*statuses, strict=True).exit_code == strict_code


def test_a_verdict_that_was_switched_off_is_no_pass_and_no_error():
    verdict = verdict_of(Status.IDENTICAL, enabled=False)
    assert not verdict
    assert verdict.exit_code == 3
    verdict.raise_if_failed()


def test_failures_come_gravest_first_and_otherwise_in_program_order():
    statuses = [Status.UNSTABLE, Status.UNVERIFIED, Status.DIFFERENT, Status.IDENTICAL]
    verdict = verdict_of(*statuses, Status.DEGRADED, Status.DIFFERENT)
    assert [f.path for f in verdict.failures] == [f"output[{i}]" for i in (2, 5, 4, 1)]


def test_unstable_findings_are_failures_only_when_strict():
    assert not verdict_of(Status.UNSTABLE).failures
    assert len(verdict_of(Status.UNSTABLE, strict=True).failures) == 1


@pytest.mark.parametrize("status", [Status.UNVERIFIED, Status.DEGRADED, Status.DIFFERENT])
def test_a_failed_verdict_raises_itself(status):
    verdict = verdict_of(status)
    with pytest.raises(MismatchError) as caught:
        verdict.raise_if_failed()
    assert caught.value.verdict is verdict
    assert str(caught.value) == str(verdict)


@pytest.mark.parametrize("status", [Status.IDENTICAL, Status.EQUIVALENT, Status.UNSTABLE])
def test_a_passing_verdict_raises_nothing(status):
    verdict_of(status).raise_if_failed()


# --- merging --------------------------------------------------------------------------------------


def test_merging_keeps_findings_coverage_and_notes():
    first = Verdict(
        findings=(found(Status.IDENTICAL, "a"),),
        coverage=Coverage(compared=2, skipped=("s",), unmatched=("u",)),
        notes=("n", "shared"),
    )
    second = Verdict(
        findings=(found(Status.DIFFERENT, "b"),),
        coverage=Coverage(compared=3, skipped=("t",), unmatched=("u", "v")),
        notes=("shared", "m"),
    )
    merged = Verdict.merge([first, second])
    assert [finding.path for finding in merged.findings] == ["a", "b"]
    assert merged.coverage == Coverage(compared=5, skipped=("s", "t"), unmatched=("u", "v"))
    assert merged.notes == ("n", "shared", "m")


def test_merging_nothing_is_unverified():
    assert Verdict.merge([]).status is Status.UNVERIFIED


def test_one_strict_part_makes_the_whole_strict():
    merged = Verdict.merge([verdict_of(Status.UNSTABLE, strict=True), verdict_of(Status.IDENTICAL)])
    assert not merged.passed


def test_a_part_that_was_switched_off_is_not_passed_by_the_others():
    merged = Verdict.merge([verdict_of(Status.IDENTICAL), Verdict(enabled=False)])
    assert not merged.passed


def test_a_part_that_compared_nothing_is_not_passed_by_the_others():
    merged = Verdict.merge([verdict_of(Status.IDENTICAL), Verdict()])
    assert not merged.passed
    assert merged.status is Status.UNVERIFIED


@given(st.lists(VERDICTS, max_size=4))
def test_merging_loses_nothing_and_never_turns_a_failure_into_a_pass(parts):
    merged = Verdict.merge(parts)
    for part in parts:
        assert set(map(id, part.findings)) <= set(map(id, merged.findings))
        assert set(part.notes) <= set(merged.notes)
        assert set(part.coverage.skipped) <= set(merged.coverage.skipped)
        assert set(part.coverage.unmatched) <= set(merged.coverage.unmatched)
        assert part.passed or not merged.passed
    assert merged.coverage.compared == sum(part.coverage.compared for part in parts)


# --- JSON -----------------------------------------------------------------------------------------


@given(VERDICTS)
def test_a_verdict_survives_json(verdict):
    back = Verdict.from_json(verdict.to_json())
    # NaN differs from itself, so the verdicts are compared as they are spelled.
    assert repr(back) == repr(verdict)
    assert back.status is verdict.status
    assert back.exit_code == verdict.exit_code


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nan_and_infinity_survive_json(value):
    finding = Finding(
        item=Item(name="x"), aspect=Aspect.VALUE, status=Status.DIFFERENT, native=score(max_z=value)
    )
    data = Verdict(findings=(finding,), coverage=Coverage(compared=1)).to_json()
    back = Verdict.from_json(data).findings[0].native.max_z
    assert type(back) is float
    assert repr(back) == repr(value)


def test_the_text_of_json_is_read_like_its_bytes():
    verdict = verdict_of(Status.DEGRADED, notes=("größer",))
    assert Verdict.from_json(verdict.to_json().decode()) == verdict


@pytest.mark.parametrize(
    "data",
    [
        b'{"surprise": 1}',
        b'{"coverage": {"compered": 3}}',
        b'{"findings": [{"path": "x", "aspect": "value", "status": "fine"}]}',
        b'{"findings": [{"path": "x", "aspect": "colour", "status": "identical"}]}',
        b'{"findings": [{"path": "x", "aspect": "value"}]}',
        b'{"coverage": {"compared": "many"}}',
        b"[]",
        b"null",
        b"",
        b"{",
        b'{"notes": ["\xff"]}',
    ],
)
def test_what_is_not_a_verdict_is_a_usage_error(data):
    with pytest.raises(UsageError, match="cannot read a verdict from JSON"):
        Verdict.from_json(data)


def test_truncated_json_is_a_usage_error_wherever_it_ends():
    data = verdict_of(Status.IDENTICAL, Status.DIFFERENT, notes=("a note",)).to_json()
    for end in range(len(data)):
        with pytest.raises(UsageError, match="the data starts with"):
            Verdict.from_json(data[:end])


def test_the_error_shows_what_arrived():
    with pytest.raises(UsageError, match="the data starts with '<html>'"):
        Verdict.from_json("<html>")


def test_verdicts_are_frozen():
    with pytest.raises(AttributeError):
        Verdict().strict = True
    assert msgspec.structs.replace(Verdict(), strict=True).strict


# --- scores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "figures",
    [
        {},
        {"max_z": 12.0},
        {"rms_z": 2.5},
        {"slice_z": 4.0, "slice_limit": 4.0},
        {"max_limit": INF, "max_z": 1e9},
    ],
)
def test_a_score_within_all_limits_passes(figures):
    assert score(**figures).passed
    assert score(**figures).excess <= 1


@pytest.mark.parametrize(
    "figures",
    [
        {"max_z": 12.1},
        {"max_z": INF},
        {"rms_z": 2.6},
        {"slice_z": 4.1, "slice_limit": 4.0},
        {"slice_z": INF, "slice_limit": 4.0},
    ],
)
def test_a_score_over_any_limit_fails(figures):
    assert not score(**figures).passed
    assert score(**figures).excess > 1


@pytest.mark.parametrize(
    "figures",
    [
        {"max_z": NAN},
        {"rms_z": NAN},
        {"max_limit": NAN},
        {"rms_limit": NAN},
        {"slice_z": NAN, "slice_limit": 4.0},
        {"slice_z": 1.0, "slice_limit": NAN},
    ],
)
def test_a_score_with_a_nan_fails(figures):
    assert not score(**figures).passed
    assert math.isnan(score(**figures).excess)


def test_a_slice_without_a_limit_fails():
    assert not score(slice_z=0.1, slice_limit=None).passed
