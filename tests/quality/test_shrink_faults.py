"""Are faults inside whole models brought down to a few calls, each shown by a script alone?"""

import os

import pytest
import torch

from paritas.core.execution.compilation import Candidate
from paritas.core.time_limit import TimeLimit
from paritas.shrinking.shrink import shrink
from paritas.shrinking.sources import capture_programs
from quality.faulty_compiler import setup
from quality.guard_faults import without_caches
from quality.shrink_faults import FAULTS, PLANTS

# Each compiles a whole model several times; `test_shrink.py` has a small one for every run.
NAMES = list(FAULTS) if os.environ.get("PARITAS_WHOLE_CORPUS") else []
# What a script calls the things that it finds wrong.
WORDS = {"output": "output ", "gradient": "gradient of ", "mutation": " after the call"}


def wrong_lines(output):
    return [line for line in output.splitlines() if ": WRONG (" in line]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_fault_inside_a_model_ends_as_a_script_of_a_few_calls(name, tmp_path):
    # What was compiled before with other sizes would now be compiled with dynamic ones.
    torch.compiler.reset()
    fault = FAULTS[name]
    model, inputs = fault.model(seed=0)
    candidate = Candidate(dynamic=fault.dynamic, setup=setup(fault.plant))
    with without_caches(), PLANTS[fault.plant](), torch.set_grad_enabled(fault.training):
        programs = capture_programs(model, list(inputs), candidate)
        result = shrink(programs, candidate, limit=TimeLimit(3600), outdir=tmp_path)
    assert 50 <= len(result.original.calls) <= 400
    assert len(result.program.calls) <= fault.most_calls, result.report.steps
    assert (result.signature.role, result.signature.nonfinite) == (fault.role, fault.nonfinite)
    assert bool(result.program.dynamic) == bool(fault.dynamic)
    assert result.script.shows, result.script.output
    wrong = wrong_lines(result.script.output)
    assert wrong
    # An output that is right may hand on to gradients that are not, but not the reverse.
    assert WORDS[fault.role] in wrong[0], result.script.output
    assert ("(inf times" in wrong[0]) == fault.nonfinite or fault.role == "mutation"


def test_every_fault_is_told_apart_by_its_plant_and_model():
    kinds = {(fault.role, fault.fusion) for fault in FAULTS.values()}
    assert kinds >= {("output", False), ("gradient", False), ("mutation", False), ("output", True)}
    assert len(FAULTS) >= 12
    assert {fault.plant for fault in FAULTS.values()} <= set(PLANTS)
