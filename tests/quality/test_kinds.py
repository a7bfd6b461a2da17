"""Results of every kind: what is wrong is found, and what is right is left alone."""

from __future__ import annotations

import pytest

from paritas import Status, VerifyConfig, judge, verify
from quality import kinds_of_structures, kinds_of_tensors
from quality.kinds_of_structures import STRUCTURES
from quality.kinds_of_tensors import KINDS

QUIET = VerifyConfig(raise_on_mismatch=False)
# torch announces that sparse compressed, masked and nested tensors are young.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def cases(table, what):
    return [
        pytest.param(kind.reference, other, id=f"{name}, {case}")
        for name, kind in table.items()
        for case, other in getattr(kind, what).items()
    ]


@pytest.mark.parametrize("gradients", [False, True], ids=["", "with gradients"])
@pytest.mark.parametrize(("reference", "twin"), cases(KINDS, "twins"))
def test_a_tensor_of_the_same_kind_and_content_passes(reference, twin, gradients):
    x = kinds_of_tensors.example().requires_grad_(gradients)
    verdict = verify([x], reference, twin, QUIET)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(("reference", "wrong"), cases(KINDS, "wrong"))
def test_a_tensor_of_another_kind_or_content_does_not_pass(reference, wrong):
    assert not verify([kinds_of_tensors.example()], reference, wrong, QUIET)


@pytest.mark.parametrize("name", KINDS)
def test_judge_sees_tensors_of_every_kind(name):
    x, kind = kinds_of_tensors.example(), KINDS[name]
    assert bool(judge(kind.reference(x), kind.reference(x))) == bool(kind.twins)


# Without a program, its noise is guessed by the dtype: a fifth is little in one of eight bits.
JUDGED = {name: kind for name, kind in KINDS.items() if name not in {"float8", "scales"}}


@pytest.mark.parametrize(("reference", "wrong"), cases(JUDGED, "wrong"))
def test_judge_does_not_pass_other_tensors_either(reference, wrong):
    x = kinds_of_tensors.example()
    assert not judge(reference(x), wrong(x))


@pytest.mark.parametrize(("reference", "twin"), cases(STRUCTURES, "twins"))
def test_the_same_structure_and_content_passes(reference, twin):
    verdict = verify([kinds_of_structures.example()], reference, twin, QUIET)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(("reference", "wrong"), cases(STRUCTURES, "wrong"))
def test_another_structure_or_content_is_different(reference, wrong):
    verdict = verify([kinds_of_structures.example()], reference, wrong, QUIET)
    assert verdict.status is Status.DIFFERENT


@pytest.mark.parametrize(("reference", "other"), cases(STRUCTURES, "unverified"))
def test_what_nobody_can_compare_is_unverified(reference, other):
    verdict = verify([kinds_of_structures.example()], reference, other, QUIET)
    assert verdict.status is Status.UNVERIFIED
