"""verify() names plain mistakes in programs that nothing compiles: where, and what kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import paritas
from paritas import VerifyConfig
from quality.plain_mistakes import MISTAKES, Mistake, Program, X

if TYPE_CHECKING:
    from paritas.core.results.findings import Finding, Verdict


def located(mistake: Mistake) -> tuple[Verdict, list[Finding]]:
    config = VerifyConfig(
        raise_on_mismatch=False,
        locate_seconds=600,
        verify_gradients=mistake.gradients,
        verify_double_backward=False,
    )
    verdict = paritas.verify([X], Program(mistake.right), Program(mistake.wrong), config)
    return verdict, [finding for finding in verdict.findings if finding.origin is not None]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_plain_mistake_is_named(name: str) -> None:
    verdict, (place,) = located(MISTAKES[name])
    assert {finding.cause for finding in verdict.failures if finding is not place} == {place.path}
    assert place.diagnosis is not None
    assert place.diagnosis.best is not None
    assert place.diagnosis.best.kind in MISTAKES[name].kinds, place.diagnosis.best.sentence


@pytest.mark.usefixtures("undiagnosed")
def test_the_backward_pass_of_a_function_is_the_place_not_what_its_forward_pass_computes() -> None:
    _, (place,) = located(MISTAKES["a gradient of a norm without its weight"])
    assert "no gradient flows back" not in place.reason
    assert "plain_mistakes.py" in place.source
