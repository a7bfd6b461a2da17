import dataclasses

import torch
from torch import fx

from paritas.core.results.findings import Aspect, Status
from paritas.shrinking.parts import extract_part, record_values
from paritas.shrinking.programs import FailingProgram, FailureSignature, same_failure

WRONG = FailureSignature(status=Status.DIFFERENT, aspect=Aspect.VALUE, role="output", kind="scale")


def test_failures_are_distinguished():
    assert same_failure(WRONG, WRONG)
    assert same_failure(WRONG, dataclasses.replace(WRONG, status=Status.DEGRADED))
    for other in (
        dataclasses.replace(WRONG, role="gradient"),
        dataclasses.replace(WRONG, nonfinite=True),
        dataclasses.replace(WRONG, aspect=Aspect.SHAPE),
        dataclasses.replace(WRONG, status=Status.UNVERIFIED),
        FailureSignature(Status.DIFFERENT, Aspect.EXCEPTION, "exception", exception="KeyError"),
        None,
    ):
        assert not same_failure(WRONG, other)


def test_the_kind_of_diagnosis_counts_if_requested():
    other = dataclasses.replace(WRONG, kind="offset")
    assert same_failure(WRONG, other)
    assert not same_failure(WRONG, other, kind=True)
    assert same_failure(WRONG, dataclasses.replace(WRONG, kind=""), kind=True)


def test_a_part_gets_the_values_its_operators_read_at_that_time():
    def write(x):
        y = x + 1
        y.mul_(2)
        return torch.sin(y)

    program = FailingProgram(fx.symbolic_trace(write), (torch.ones(3),))
    recorded = record_values(program)
    (sin,) = program.graph.graph.find_nodes(op="call_function", target=torch.sin)
    part = extract_part(program, recorded, [sin])
    assert torch.equal(part.inputs[0], torch.full((3,), 4.0))
    assert torch.equal(part.graph(*part.inputs)[0], program.graph(*program.inputs))


def test_equal_programs_on_other_values_are_other_queries():
    graph = fx.symbolic_trace(lambda x: x + 1)
    one, other = FailingProgram(graph, (torch.ones(3),)), FailingProgram(graph, (torch.zeros(3),))
    assert one.key == FailingProgram(graph, (torch.ones(3),)).key
    assert one.key != other.key
