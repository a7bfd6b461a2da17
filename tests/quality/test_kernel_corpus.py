"""Kernels that cheat or are subtly wrong are caught; their honest twins pass."""

from __future__ import annotations

import functools
import os

import pytest

from paritas.core.results.findings import Status
from paritas.kernels import KernelOptions
from paritas.kernels.judge import KernelJudge
from quality import (
    kernel_candidates,
    kernel_candidates_callers,
    kernel_candidates_further,
    kernel_candidates_hostile,
    kernel_candidates_process,
    kernel_references,
)
from quality.kernel_registry import CHEATS, HONEST

assert kernel_candidates
assert kernel_candidates_callers
assert kernel_candidates_further
assert kernel_candidates_hostile
assert kernel_candidates_process
REFERENCES = kernel_references.__file__
WHOLE = os.environ.get("PARITAS_WHOLE_CORPUS") == "1"
# One of several is enough for most tests; the whole corpus has them all.
_EVERY = 1 if WHOLE else 20


def _sampled(table: dict[str, list[str]], every: int) -> list[tuple[str, str]]:
    pairs = [(reference, kernel) for reference, kernels in table.items() for kernel in kernels]
    return pairs[::every]


def _name(value: str) -> str:
    return value.rpartition(":")[2]


@functools.cache
def judge_of(reference: str, cases: int = 24) -> KernelJudge:
    cases = 40 if WHOLE else cases
    options = KernelOptions(
        call_seconds=600, seconds=600, cases=cases, stop_early=True, fresh_outputs=True
    )
    inputs = f"{REFERENCES}:{reference}_inputs"
    return KernelJudge(f"{REFERENCES}:{reference}", options, inputs=inputs)


@pytest.mark.parametrize(("reference", "kernel"), _sampled(HONEST, _EVERY), ids=_name)
def test_an_honest_kernel_passes(reference: str, kernel: str) -> None:
    report = judge_of(reference, cases=16).judge(kernel)
    assert report.passed, report


@pytest.mark.parametrize(("reference", "kernel"), _sampled(CHEATS, _EVERY), ids=_name)
def test_a_kernel_that_cheats_is_caught(reference: str, kernel: str) -> None:
    report = judge_of(reference).judge(kernel)
    assert report.status in {Status.DIFFERENT, Status.DEGRADED, Status.UNVERIFIED}, report


@pytest.mark.parametrize("task", ["centred_single", "softmax_of_one", "saturated"])
def test_a_task_that_accepts_a_constant_verifies_nothing(task: str) -> None:
    report = judge_of(task, cases=6).judge(f"{kernel_candidates_further.__file__}:{task}")
    assert report.status is Status.UNVERIFIED
    assert "a constant" in report.rating.accepts
    assert report.exit_code == 3


def test_the_corpus_has_a_twin_for_every_reference() -> None:
    assert CHEATS.keys() <= HONEST.keys()
    assert len(HONEST) >= 25
    assert sum(map(len, CHEATS.values())) >= 110
