"""Accounts of commands for the tests of the forms that systems read: ordinary and hostile ones."""

from __future__ import annotations

from paritas.core.reporting.annotations import verdict_account
from paritas.core.results.findings import (
    Aspect,
    Coverage,
    Diagnosis,
    Finding,
    Origin,
    OriginKind,
    Pattern,
    Status,
    Verdict,
)
from paritas.core.results.items import Item

HOSTILE = "a,b:c%d\r\n::error::e\x1b[31m</failure>]]>\x00\ud800"


def finding(path="output 0", status=Status.DIFFERENT, **more):
    return Finding(**{"item": Item(name=path), "aspect": Aspect.VALUE, "status": status, **more})


def traced(source, path="output 0", status=Status.DIFFERENT, **more):
    """A finding that was traced to a line of the user's."""
    origin = Origin(
        kind=OriginKind.NODE,
        name="mm",
        operator="aten.mm.default",
        module="layers.0",
        source=f"{source}, in forward",
        code="return x @ self.weight",
    )
    return finding(path, status, origin=origin, **more)


def scaled(**more):
    pattern = Pattern(kind="partial sum", confidence=0.9, sentence="half of a sum is missing")
    return finding(diagnosis=Diagnosis(patterns=(pattern,)), **more)


def account(*findings, compared=1, strict=False, skipped=(), subject="nets:make", **more):
    coverage = Coverage(compared=compared, skipped=tuple(skipped))
    verdict = Verdict(findings=findings, coverage=coverage, strict=strict)
    return verdict_account(verdict, command="verify", subject=subject, **more)
