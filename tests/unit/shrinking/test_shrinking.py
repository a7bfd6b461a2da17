import dataclasses
import operator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paritas.core.errors import UsageError
from paritas.core.execution.compilation import Candidate
from paritas.core.results.findings import Aspect, Diagnosis, Pattern, Status
from paritas.core.time_limit import TimeLimit
from paritas.shrinking.programs import (
    FailureSignature,
    Oracle,
    is_failure_of_part,
)
from paritas.shrinking.shrink import shrink
from paritas.shrinking.sources import capture_programs
from quality.faulty_backends import backend

# These tests check what is written; test_scripts.py and the integration tests run scripts.
pytestmark = pytest.mark.usefixtures("untried", "undiagnosed")


class Model(nn.Module):
    """Every operator that the faulty backends get wrong, among others."""

    def __init__(self, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.sin(layer(x)) + x
        return torch.exp(torch.tanh(x) * 2), torch.tanh(x).sum(-1)


def shrunk(model, inputs, name, tmp_path, **more):
    candidate = Candidate(backend(name), dynamic=more.pop("dynamic", None))
    programs = capture_programs(model, inputs, candidate)
    return shrink(programs, candidate, outdir=tmp_path, **more)


def targets(result):
    return [node.target for node in result.program.calls]


def test_a_wrong_operator_is_left_alone_and_without_its_backward_pass(tmp_path):
    result = shrunk(Model(), [torch.randn(4, 8)], "sin_as_cos", tmp_path)
    assert targets(result) == [torch.sin]
    assert not result.program.gradients
    assert len(result.original.calls) == 14
    assert result.report.ended
    assert result.signature.role == "output"
    assert result.report.queries <= 10


def test_a_known_failure_does_not_need_the_whole_program_compiled(tmp_path):
    known = FailureSignature(status=Status.DIFFERENT, aspect=Aspect.VALUE, role="output")
    result = shrunk(Model(), [torch.randn(4, 8)], "sin_as_cos", tmp_path, signature=known)
    assert targets(result) == [torch.sin]
    assert len(result.original.calls) == 14
    assert result.report.queries <= 4


@pytest.mark.parametrize("known", [{"role": "gradient"}, {"role": "output", "nonfinite": True}])
def test_a_call_that_is_wrong_by_itself_counts_however_the_program_shows_it(tmp_path, known):
    known = FailureSignature(status=Status.DIFFERENT, aspect=Aspect.VALUE, **known)
    model, inputs = Model(), [torch.randn(4, 8)]
    result = shrunk(model, inputs, "sin_as_cos", tmp_path, signature=known)
    assert targets(result) == [torch.sin]
    assert (result.signature.role, result.signature.nonfinite) == ("output", False)


def test_another_shape_is_not_shown_by_other_values():
    values = FailureSignature(status=Status.DIFFERENT, aspect=Aspect.VALUE, role="output")
    assert is_failure_of_part(values, dataclasses.replace(values, role="gradient"))
    for aspect, status in (
        (Aspect.SHAPE, Status.DIFFERENT),
        (Aspect.VALUE, Status.UNVERIFIED),
    ):
        whole = dataclasses.replace(values, aspect=aspect, status=status, role="gradient")
        assert not is_failure_of_part(values, whole)


def test_a_part_of_an_input_is_a_call(tmp_path):
    def model(x):
        return torch.sin(x)[:, 1:] * 2

    result = shrunk(model, [torch.randn(4, 8)], "slice_one_early", tmp_path)
    assert targets(result) == [operator.getitem]
    assert result.report.after == "1 operator call"


def test_a_wrong_gradient_stays_a_wrong_gradient(tmp_path):
    result = shrunk(Model(), [torch.randn(4, 8)], "gradient_of_sin_wrong", tmp_path)
    assert targets(result) == [torch.sin]
    assert result.signature.role == "gradient"
    assert result.program.gradients


def test_a_fault_of_two_operators_together_keeps_both(tmp_path):
    def model(x):
        return torch.exp(torch.tanh(torch.exp(x * 2)) + 0) + torch.exp(torch.tanh(x - 1)) * 3

    result = shrunk(model, [torch.randn(4, 8)], "exp_wrong_after_tanh", tmp_path)
    assert targets(result) == [torch.tanh, torch.exp]


def test_a_write_that_is_left_out_stays_a_wrong_mutation(tmp_path):
    def model(x, count):
        y = (x * 2).sum(-1)
        count.add_(1)
        return y.exp()

    inputs = [torch.randn(4, 8), torch.zeros(3)]
    result = shrunk(model, inputs, "writes_left_out", tmp_path)
    assert targets(result) == ["add_"]
    assert result.signature.role == "mutation"


def test_a_mismatch_never_turns_into_a_crash(tmp_path):
    with torch.no_grad():
        result = shrunk(Model(), [torch.randn(4, 8)], "sin_as_cos_of_more_than_it", tmp_path)
    assert torch.sin in targets(result)
    assert len(targets(result)) == 2
    assert result.signature.exception == ""


def test_a_crash_stays_a_crash(tmp_path):
    with torch.no_grad():
        result = shrunk(Model(), [torch.randn(4, 8)], "sin_raises", tmp_path)
    assert targets(result) == [torch.sin]
    assert result.signature.role == "exception"


def test_of_two_faults_the_first_is_followed_and_never_the_other(tmp_path):
    def model(x):
        return torch.sin(x * 3) + 1, torch.exp(x - 1) * 2

    result = shrunk(model, [torch.randn(4, 8)], "sin_wrong_and_exp_nan", tmp_path)
    assert targets(result) == [torch.sin]
    assert not result.signature.nonfinite


def test_shapes_shrink_together_and_values_get_round(tmp_path):
    def model(x, y):
        return torch.sin(x @ y.T).relu()

    torch.manual_seed(0)
    result = shrunk(model, [torch.randn(32, 48), torch.randn(16, 48)], "sin_as_cos", tmp_path)
    (value,) = result.program.inputs
    assert value.shape == (2, 2)
    assert torch.equal(value, value.round())


def test_dynamic_shapes_stay_dynamic(tmp_path):
    def model(x):
        return torch.sin(x.reshape(x.shape[0] * 2, -1) * 2).sum(0)

    result = shrunk(model, [torch.randn(6, 8)], "sin_as_cos", tmp_path, dynamic=True)
    assert targets(result) == [torch.sin]
    assert result.program.dynamic
    assert "dynamic=True" in result.script.path.read_text()


def test_best_so_far_is_kept_when_the_time_is_over(tmp_path, monkeypatch):
    limit = TimeLimit(3600)
    judge = Oracle._judge

    def third_takes_long(self, *given, **how):
        if self.queries == 2:
            limit.begin(spent=3600)
        return judge(self, *given, **how)

    monkeypatch.setattr(Oracle, "_judge", third_takes_long)
    with torch.no_grad():
        result = shrunk(Model(), [torch.randn(4, 8)], "sin_as_cos", tmp_path, limit=limit)
    assert not result.report.ended
    assert targets(result) == [torch.sin]
    assert result.script.path.exists()


def test_a_pass_that_counts_calls_needs_only_those_that_it_counts(tmp_path):
    result = shrunk(Model(6), [torch.randn(4, 8)], "third_sin_as_cos", tmp_path)
    assert targets(result) == [torch.sin] * 3
    assert result.report.queries <= 16


def test_a_query_that_takes_longer_than_the_limit_is_stopped(tmp_path):
    # Compiling takes an hour: without an end, nobody would see what is known by then.
    limit = TimeLimit(4)
    result = shrunk(Model(), [torch.randn(4, 8)], "takes_an_hour", tmp_path, limit=limit)
    assert not result.report.ended
    assert "the 4 seconds for shrinking are over" in result.report.steps
    assert result.report.after == "14 operator calls"
    assert "the time was over before any graph was seen to fail" in result.report.what
    assert "may disagree" in result.script.path.read_text()


def test_calls_at_the_place_where_it_starts_are_tried_first(tmp_path):
    # A small batch of calls is compiled first, and the last layer's is not among the smallest.
    kind = Diagnosis(patterns=(Pattern(kind="other function", confidence=1, sentence="a cosine"),))
    places = {"sin_8": kind}
    result = shrunk(Model(9), [torch.randn(4, 8)], "sin_as_cos", tmp_path, places=places)
    assert targets(result) == [torch.sin]
    assert result.program.calls[0].name == "sin_8"
    assert result.report.queries <= 4
    assert result.report.diagnosis == kind


def test_of_a_pass_that_counts_calls_those_before_the_place_are_tried(tmp_path):
    known = FailureSignature(status=Status.DIFFERENT, aspect=Aspect.VALUE, role="output")
    more = {"places": {"sin_2": None}, "signature": known}
    result = shrunk(Model(6), [torch.randn(4, 8)], "third_sin_as_cos", tmp_path, **more)
    assert targets(result) == [torch.sin] * 3
    assert result.report.queries <= 11


def test_best_so_far_is_kept_on_interrupt(tmp_path):
    def interrupt(words):
        if "shapes" in words:
            raise KeyboardInterrupt

    with torch.no_grad():
        result = shrunk(Model(), [torch.randn(4, 8)], "sin_as_cos", tmp_path, on_progress=interrupt)
    assert not result.report.ended
    assert targets(result) == [torch.sin]


@torch.compiler.disable
def pause(x):
    return x


def test_of_several_graphs_the_first_failing_one_is_shrunk(tmp_path):
    def model(x):
        y = x.exp() + 1
        return torch.sin(pause(y))

    result = shrunk(model, [torch.randn(4, 8)], "sin_as_cos", tmp_path)
    assert len(result.original.calls) == 1


def test_a_checkpointed_body_is_laid_open(tmp_path):
    def model(x):
        return checkpoint(lambda y: torch.sin(y * 2) + 1, x, use_reentrant=False) * 3

    x = torch.randn(4, 8, requires_grad=True)
    result = shrunk(model, [x], "sin_as_cos", tmp_path)
    assert targets(result) == [torch.sin]


def test_nothing_that_fails_is_nothing_to_shrink(tmp_path):
    with pytest.raises(UsageError, match="none of the 1 graphs fails on its own"):
        shrunk(Model(1), [torch.randn(4, 8)], "right", tmp_path)


def test_a_missing_backend_is_refused():
    with pytest.raises(UsageError, match="cannot be imported"):
        Candidate("quality.faulty_backends:nothing").resolve()
