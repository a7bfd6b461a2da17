"""A real engine: what vLLM serves is let pass, and what it serves wrongly is named.

`make test-engines` runs this in an environment of its own; without vLLM these tests skip.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import paritas
from quality import vllm_cases
from quality.vllm_cases import FAULTS, right_cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    # Transformers warns of itself.
    pytest.mark.filterwarnings("default"),
]

WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
RIGHT = [*right_cases(102 if WHOLE else 12), *right_cases(6, "float32")]
CASES = [*RIGHT, *FAULTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints, and the records of all cases: served by one process of vLLM."""
    path = tmp_path_factory.mktemp("served")
    (path / "cases").write_bytes(pickle.dumps(CASES))
    program = Path(vllm_cases.__file__).with_name("vllm_serving.py")
    subprocess.run([sys.executable, program, path / "cases", path], check=True)
    return path


def report(folder, case):
    """The report about one case."""
    made = folder / "records" / str(CASES.index(case))
    error = made.with_suffix(".error")
    assert not error.exists(), error.read_text()
    records = pickle.loads(made.with_suffix(".pickle").read_bytes())
    older = vllm_cases.older_weights(folder, case)
    return paritas.check_engine(vllm_cases.reference(folder, case), records, older=older)


@pytest.mark.parametrize("case", RIGHT, ids=lambda one: f"{one.dtype} {one.name}"[:60])
def test_what_vllm_serves_rightly_passes(folder, case):
    found = report(folder, case)
    assert found.passed, str(found)


@pytest.mark.parametrize("case", FAULTS, ids=lambda one: one.name)
def test_what_vllm_serves_wrongly_is_named(folder, case):
    found = report(folder, case)
    assert found.exit_code == 1, str(found)
    assert {one.kind for one in found.causes if one.to_rounding} == {case.kind}, str(found)
