"""verify() names plain mistakes in programs that nothing compiles: where, and what kind."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

import paritas
from paritas import VerifyConfig
from quality.plain_mistakes import MISTAKES, SHOWN, Mistake, Program, X, hidden

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
    mistake = MISTAKES[name]
    if not mistake.gradients:
        mistake = dataclasses.replace(mistake, wrong=hidden(name, mistake.wrong))
    verdict, (place,) = located(mistake)
    assert {finding.cause for finding in verdict.failures if finding is not place} == {place.path}
    assert place.diagnosis is not None
    assert place.diagnosis.best is not None
    assert place.diagnosis.best.kind in MISTAKES[name].kinds, place.diagnosis.best.sentence


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SHOWN)
def test_what_the_calls_of_both_programs_show_is_stated(name: str) -> None:
    shown = SHOWN[name]
    _, (place,) = located(Mistake(shown.right, shown.wrong, frozenset()))
    assert place.diagnosis is not None
    assert place.diagnosis.best is not None
    assert (place.diagnosis.best.kind, place.diagnosis.best.sentence) == (
        shown.kind,
        shown.sentence,
    )


@pytest.mark.usefixtures("undiagnosed")
def test_the_backward_pass_of_a_function_is_the_place_not_what_its_forward_pass_computes() -> None:
    _, (place,) = located(MISTAKES["a gradient of a norm without its weight"])
    assert "no gradient flows back" not in place.reason
    assert "plain_mistakes.py" in place.source
