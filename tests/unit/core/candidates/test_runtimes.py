"""A model as another runtime's program, with a runtime that is torch itself, or a wrong one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import paritas
from paritas.core.candidates.makers import BuiltRuntime, foreign_program
from paritas.core.errors import UsageError
from paritas.core.results.findings import Status

QUIET = paritas.VerifyConfig(raise_on_mismatch=False)


@dataclasses.dataclass
class Result:
    scaled: torch.Tensor
    extra: tuple[int, None, torch.Tensor]


class Norm(nn.Module):
    """Computes in float32 whatever it is given; takes a tree by keyword, gives a dataclass."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x, *, factors=None, power=2):
        wide = x.float() * 0.3
        y = self.weight * (wide * torch.rsqrt(wide.pow(power).mean(-1, keepdim=True))).to(x.dtype)
        y = y * factors["a"]
        return Result(y, (3, None, y.argmax(-1)))


def inputs(rows=4, dtype=torch.float32, **kwargs):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 16, generator=generator).to(dtype)
    return paritas.Inputs((x,), {"factors": {"a": torch.tensor(2.0, dtype=dtype)}, **kwargs})


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Norm().eval()


def right(captured):
    """Runs the captured program, a little less exactly: in another order."""
    module = captured.program.module()
    return BuiltRuntime(lambda tensors: [_shaken(value) for value in module(*tensors)])


def _shaken(value):
    return value * (1 + torch.finfo(value.dtype).eps) if value.is_floating_point() else value


def wrong(captured):
    """Is off by a hundred thousandth, which float32 alone hardly shows."""
    module = captured.program.module()
    scale = 1 + 1e-5
    return BuiltRuntime(
        lambda tensors: [v * scale if v.is_floating_point() else v for v in module(*tensors)]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_runtime_is_equivalent_with_its_trees_and_its_lifted_run(model, dtype):
    given = inputs(dtype=dtype)
    model.to(dtype)
    verdict = paritas.verify(given, model, foreign_program("mine", model, given, right), QUIET)
    assert verdict.status is Status.EQUIVALENT
    found = {finding.path: finding for finding in verdict.findings}
    assert found["output.scaled"].lifted.max_z < 12
    assert found["output.extra[0]"].status is Status.IDENTICAL
    assert verdict.notes == ("mine returns values only: gradients and aliases were not compared",)


def test_a_wrong_runtime_is_different_by_its_lifted_run_in_bfloat16(model):
    given = inputs(dtype=torch.bfloat16)
    model.bfloat16()
    verdict = paritas.verify(given, model, foreign_program("mine", model, given, wrong), QUIET)
    assert verdict.status is Status.DIFFERENT
    (finding,) = verdict.failures
    assert finding.path == "output.scaled"
    assert finding.lifted.max_z > 1e6


def test_each_set_of_inputs_has_its_program(model):
    sets = [inputs(4), inputs(2, power=4)]
    candidate = foreign_program("mine", model, sets, right)
    assert paritas.verify(sets, model, candidate, QUIET).status is Status.EQUIVALENT
    other = inputs(3)
    with pytest.raises(UsageError, match=r"mine was not built for the inputs torch\.float32\[3"):
        candidate(*other.args, **other.kwargs)
    different_constant = inputs(4, power=4)
    with pytest.raises(UsageError, match="mine was not built for the inputs"):
        candidate(*different_constant.args, **different_constant.kwargs)


class Mixed(nn.Module):
    def forward(self, left, right):
        return left.sin() + 2 * right


def test_a_program_captured_with_one_tensor_twice_computes_with_two():
    x, y = torch.randn(4), torch.randn(4)
    sets = [paritas.Inputs((x, y)), paritas.Inputs((x, x))]
    candidate = foreign_program("torch", Mixed(), sets, right)
    verdict = paritas.verify(sets, Mixed(), candidate, QUIET)
    assert verdict.status is Status.EQUIVALENT


def test_the_model_is_left_as_it_was(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = inputs()
    candidate = foreign_program("mine", model, given, right)
    candidate.lift(frozenset({torch.float32}))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.weight.dtype is torch.float32
    assert torch.get_default_dtype() is torch.float32


def test_what_was_done_to_the_model_since_is_no_part_of_the_candidate(model):
    def frozen(captured):
        state = {name: value.clone() for name, value in captured.program.state_dict.items()}
        module = captured.program.module()
        return BuiltRuntime(lambda tensors: torch.func.functional_call(module, state, tensors))

    given = inputs()
    candidate = foreign_program("mine", model, given, frozen)
    with torch.no_grad():
        model.weight[3] += 1e-3
    assert paritas.verify(given, model, candidate, QUIET).status is Status.DIFFERENT


def test_a_runtime_that_gives_too_few_tensors_has_not_computed_it(model):
    def short(captured):
        return BuiltRuntime(lambda tensors: captured.program.module()(*tensors)[:1])

    given = inputs()
    verdict = paritas.verify(given, model, foreign_program("mine", model, given, short), QUIET)
    assert not verdict.passed
    assert "returned 1 tensors, but the model returns 2" in str(verdict)


def test_what_cannot_be_captured_or_built_is_told():
    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(UsageError, match=r"torch\.export failed: "):
        foreign_program("mine", Branching(), [torch.ones(2)], right)
    with pytest.raises(UsageError, match=r"takes an nn\.Module, not builtin"):
        foreign_program("mine", torch.sin, [torch.ones(2)], right)

    def failing(captured):
        raise ValueError("no such operator") from KeyError("gather")

    with pytest.raises(UsageError) as caught:
        foreign_program("mine", nn.Identity(), [torch.ones(2)], failing)
    assert str(caught.value) == (
        "mine cannot take the model: ValueError: no such operator; the cause is KeyError: 'gather'"
    )
