"""A real engine: what vLLM serves is let pass, and what it serves wrongly is named.

`make test-engines` runs this in an environment of its own; without vLLM these tests skip.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

import paritas
from quality import vllm_cases
from quality.vllm_cases import ADAPTERS, FAULTS, can_be_served, right_cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    # Transformers warns of itself.
    pytest.mark.filterwarnings("default"),
]

WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
RIGHT = [
    *right_cases(102 if WHOLE else 18),
    *right_cases(6, "float32"),
    *ADAPTERS[: None if WHOLE else 3],
]
WRONG = FAULTS if WHOLE else FAULTS[::3]
CASES = [one for one in [*RIGHT, *WRONG] if can_be_served(one)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints, and the records of all cases: served by one process of vLLM."""
    path = tmp_path_factory.mktemp("served")
    vllm_cases.serve(path, CASES)
    return path


def report(folder, case):
    """The report about one case."""
    if case not in CASES:
        pytest.skip("vLLM cannot do it on this processor")
    records = vllm_cases.records(folder, case)
    older = vllm_cases.older_weights(folder, case)
    return paritas.check_engine(
        vllm_cases.reference(folder, case), records, older=older, seconds=3600
    )


@pytest.mark.parametrize("case", RIGHT, ids=lambda one: f"{one.dtype} {one.name}"[:60])
def test_what_vllm_serves_rightly_passes(folder, case):
    found = report(folder, case)
    assert found.passed, str(found)


@pytest.mark.parametrize("case", WRONG, ids=lambda one: one.name)
def test_what_vllm_serves_wrongly_is_named(folder, case):
    found = report(folder, case)
    assert found.exit_code == 1, str(found)
    expected = {case.kind} if case.kind else set()
    assert {one.kind for one in found.causes if one.to_rounding} == expected, str(found)
