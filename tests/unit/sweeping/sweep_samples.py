"""Rows of sweeps, made up."""

from __future__ import annotations

from paritas.core.results.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.core.results.items import output
from paritas.sweeping.rows import RunEnd, SweepReport, SweepRow, SweepRun, without_verdict

VERSIONS = {"torch": "2.13.0", "python": "3.11.7", "platform": "Linux"}


def row(target, status=Status.EQUIVALENT, *, seconds=4.0, **settings):
    run = SweepRun(target=target, **{"dtype": "float32", **settings})
    finding = Finding(item=output(), aspect=Aspect.VALUE, status=status, reason="by 7 times")
    return SweepRow(
        run=run,
        ended=RunEnd.VERDICT,
        verdict=Verdict(findings=(finding,), coverage=Coverage(compared=1)),
        counts={status.value: 1},
        began="2026-01-01T00:00:00+00:00",
        seconds=seconds,
        processor_seconds=seconds,
        memory=300_000_000,
        versions=VERSIONS,
    )


def crashed(target, **settings):
    return SweepRow(
        run=SweepRun(target=target, **{"dtype": "float32", **settings}),
        ended=RunEnd.CRASHED,
        verdict=without_verdict("the process crashed (killed by SIGSEGV)", "see its log"),
        counts={"unverified": 1},
        seconds=1.0,
        versions=VERSIONS,
        log="Fatal Python error: <Segmentation fault>",
    )


def report(*rows, planned=None, **more):
    planned = len(rows) if planned is None else planned
    return SweepReport(rows=rows, planned=planned, versions=VERSIONS, seconds=75.0, **more)
