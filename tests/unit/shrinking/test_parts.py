import torch
from torch import fx

from paritas.core.execution.compilation import Candidate
from paritas.core.time_limit import TimeLimit
from paritas.shrinking.parts import islands, record_values
from paritas.shrinking.programs import FailingProgram
from paritas.shrinking.shrink import shrink
from quality.faulty_backends import backend


def traced(function, *inputs):
    return FailingProgram(fx.symbolic_trace(function), inputs)


def test_parts_side_by_side_do_not_write_to_one_tensor():
    program = traced(lambda x: (x.add_(1), x.mul(2)), torch.arange(3.0))
    recorded = record_values(program)
    add, _ = program.calls
    part = islands(program, recorded, [[add], [add]])
    first, second = part.program.inputs
    assert first.equal(second)
    assert first.data_ptr() != second.data_ptr()
    assert part.input_of == (0, 1)


def test_operators_that_only_read_the_same_value_are_tried_together(tmp_path):
    def waves(x):
        angles = x * 3
        for _ in range(6):
            angles = angles + 1
        return torch.cos(angles).square() + torch.sin(angles).abs() * 2

    program = traced(waves, torch.linspace(0, 1, 8))
    candidate = Candidate(backend("sin_wrong_beside_cos"))
    result = shrink(program, candidate, limit=TimeLimit(3600), outdir=tmp_path)
    assert {node.target for node in result.program.calls} == {torch.cos, torch.sin}
    assert result.script.shows, result.script.output
