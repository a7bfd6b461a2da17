"""Cases that the tools of the field get wrong, each with the verdict it must have."""

from __future__ import annotations

import pytest

from paritas import VerifyConfig, verify
from quality.degenerate import degenerate_cases
from quality.traps import zero_scale_cases

ROWS = [case.name for case in degenerate_cases()]
TRAPS = [case.name for case in zero_scale_cases()]


@pytest.mark.parametrize("name", ROWS)
def test_row_of_the_table(name: str) -> None:
    case = next(case for case in degenerate_cases() if case.name == name)
    verdict = verify(
        list(case.inputs), case.reference, case.candidate, VerifyConfig(raise_on_mismatch=False)
    )
    assert verdict.passed is (case.expected == "pass"), f"{case.reason}\n{verdict}"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", TRAPS)
def test_trap(name: str) -> None:
    case = next(case for case in zero_scale_cases() if case.name == name)
    verdict = verify(
        list(case.inputs), case.reference, case.candidate, VerifyConfig(raise_on_mismatch=False)
    )
    assert verdict.passed is (case.expected == "pass"), f"{case.reason}\n{verdict}"
