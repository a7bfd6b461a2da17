"""Faults of Inductor itself, down to scripts that fail in a process of their own."""

import pytest
import torch
from torch import nn

from paritas.core.execution.compilation import Candidate
from paritas.core.time_limit import TimeLimit
from paritas.shrinking.shrink import shrink
from paritas.shrinking.sources import capture_programs
from quality.faulty_compiler import setup
from quality.guard_faults import FAULTS, planted


@pytest.mark.slow
def test_a_wrong_gradient_of_the_compiler_ends_as_a_script_that_shows_it(tmp_path):
    torch.manual_seed(0)
    fault = "exp_slightly_wrong_in_backward"
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    with planted(FAULTS[fault]):
        programs = capture_programs(model, [torch.randn(2, 2)])
        result = shrink(
            programs, Candidate(setup=setup(fault)), outdir=tmp_path, limit=TimeLimit(3600)
        )
    assert [node.target.__name__ for node in result.program.calls] == ["gelu"]
    assert result.signature.role == "gradient"
    assert result.script.shows, result.script.output
