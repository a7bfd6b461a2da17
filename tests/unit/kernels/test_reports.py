"""A judgement as text and JSON: limits do not fail it, and a task that accepts zeros does."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from paritas.core.errors import MismatchError
from paritas.core.results.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.core.results.items import output
from paritas.kernels.report import kernel_report
from paritas.kernels.rows import (
    CaseFamily,
    KernelReport,
    KernelRow,
    KernelTiming,
    TaskRating,
    TrivialCandidate,
)


def row(case: str, status: Status, *, is_limit: bool = False) -> KernelRow:
    finding = Finding(item=output(), aspect=Aspect.VALUE, status=status, reason=f"it is {status}")
    verdict = Verdict(findings=(finding,), coverage=Coverage(compared=1))
    family = CaseFamily.SIZES
    return KernelRow(case=case, family=family, status=status, is_limit=is_limit, verdict=verdict)


def report(*rows: KernelRow, **further: object) -> KernelReport:
    return KernelReport(reference="task.py", candidate="kernel.py", rows=rows, **further)


def shown(judged: KernelReport) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(kernel_report(judged))
    return console.export_text()


def test_a_failing_case_fails_the_kernel() -> None:
    judged = report(row("as given", Status.IDENTICAL), row("size 5", Status.DIFFERENT))
    assert judged.exit_code == 1
    assert str(judged) == "different: computes something else; 1 of 2 cases fails"
    with pytest.raises(MismatchError, match="size 5: it is different"):
        judged.raise_if_failed()


def test_a_limit_does_not_fail_the_kernel_and_is_shown() -> None:
    judged = report(
        row("as given", Status.EQUIVALENT), row("size 5", Status.DIFFERENT, is_limit=True)
    )
    assert judged.exit_code == 0
    assert "limits of the kernel, not failures: size 5" in shown(judged)


def test_without_cases_nothing_is_verified() -> None:
    assert report().exit_code == 3


def test_a_task_that_accepts_zeros_verifies_nothing() -> None:
    zeros = TrivialCandidate(name="zeros", given=True, passed=4, cases=4)
    judged = report(row("as given", Status.IDENTICAL), rating=TaskRating(trivial=(zeros,)))
    assert judged.exit_code == 3
    assert str(judged) == "unverified: this task accepts zeros"


def test_a_speed_up_is_not_shown_without_the_verdict() -> None:
    timing = KernelTiming(
        reference=4e-3,
        candidate=1e-3,
        reference_spread=1e-4,
        candidate_spread=1e-4,
        calls=30,
        is_cold=False,
    )
    judged = report(row("as given", Status.DIFFERENT), timing=timing)
    assert "4.00 times as fast (the kernel is different)" in " ".join(shown(judged).split())


def test_json_returns_the_same_report() -> None:
    judged = report(row("as given", Status.DIFFERENT), notes=("a note",))
    assert KernelReport.from_json(judged.to_json()) == judged
    assert msgspec.json.decode(judged.to_json())["rows"][0]["case"] == "as given"


def test_a_notebook_shows_the_headline() -> None:
    judged = report(row("as given", Status.DIFFERENT))
    assert "1 of 1 case fails" in judged._repr_html_()
