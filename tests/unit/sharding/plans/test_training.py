"""What a training notes, and what it leaves alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from paritas.core.errors import UsageError
from paritas.core.execution.subjects import Inputs
from paritas.core.precision.lifting import LiftMode
from paritas.core.precision.perturbing import PerturbMode
from paritas.sharding.plans.plan import make_program
from paritas.sharding.plans.traces import ModelNames, ValuePlace, plain_name, watched_modules
from paritas.sharding.plans.training import run_ranks, run_reference
from unit.sharding.plans.small_programs import TinyMLP, batch, tower


def squared(output, *_batch):
    return output.square().mean()


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def test_a_step_is_what_a_loop_by_hand_does():
    program = make_program(tower, "ddp", [batch()], loss=squared, optimizer=adam, steps=2)
    trace = run_reference(program)
    model = tower()
    optimizer = adam(model.parameters())
    for step in trace.steps:
        loss = squared(model(batch()))
        loss.backward()
        assert torch.equal(step.loss.local, loss.detach())
        for name, parameter in model.named_parameters():
            assert torch.equal(step.gradients[name].local, parameter.grad), name
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            assert torch.equal(step.parameters[name].local, parameter.detach()), name
    assert trace.error is None
    assert not trace.random


def test_the_model_the_batch_and_the_random_numbers_of_the_user_are_left_alone():
    model, x = tower(), batch()
    model(x).sum().backward()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    gradient = model.norm.weight.grad.clone()
    trace = run_reference(make_program(model, "ddp", [x]), wide=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.norm.weight.grad, gradient)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, batch())
    assert torch.get_default_dtype() is torch.float32
    assert not torch.equal(trace.steps[0].parameters["norm.weight"].local, before["norm.weight"])


def test_a_factory_that_gives_the_same_model_twice_does_not_share_it():
    model = tower()
    before = copy.deepcopy(model.state_dict())
    first = run_reference(make_program(lambda: model, "ddp", [batch()]))
    second = run_reference(make_program(lambda: model, "ddp", [batch()]))
    assert torch.equal(first.steps[0].loss.local, second.steps[0].loss.local)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_simulated_ranks_share_what_is_equal_and_nothing_else():
    program = make_program(TinyMLP, _own_bias, [batch()], 2, steps=1)
    first, second = run_ranks(program)
    replica, own = "up.weight", "up.bias"
    pairs = {
        name: (one[name].local, two[name].local)
        for one, two in [(first.steps[0].parameters, second.steps[0].parameters)]
        for name in (replica, own)
    }
    assert pairs[replica][0] is pairs[replica][1]
    assert not torch.equal(*pairs[own])
    assert first.equal is None


def _own_bias(model, mesh):
    """Each rank adds another number to its bias, and nobody reduces a gradient."""
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False)
    model.up.bias = nn.Parameter(model.up.bias + mesh.get_rank())


def test_the_default_loss_sees_elements_that_change_places():
    class Turned(nn.Module):
        def __init__(self, turned: bool) -> None:
            super().__init__()
            self.inner, self.turned = tower(), turned

        def forward(self, x):
            out = self.inner(x)
            return out.flip(-1) if self.turned else out

    losses = [
        run_reference(make_program(Turned(turned), "ddp", [batch()], steps=1)).steps[0].loss.local
        for turned in (False, True)
    ]
    assert not torch.allclose(*losses)


def test_a_loss_that_the_model_gives_itself_is_taken():
    class Trained(TinyMLP):
        def forward(self, x):
            return {"logits": x, "loss": super().forward(x).square().mean()}

    trace = run_reference(make_program(Trained, "ddp", [batch()], steps=1))
    assert torch.equal(trace.steps[0].loss.local, trace.steps[0].outputs["['loss']"].local)


def test_modules_are_noted_in_order_with_the_gradients_that_arrive():
    program = make_program(TinyMLP, "ddp", [batch()], loss=squared, steps=1)
    step = run_reference(program, watch_modules=True).steps[0]
    assert [(call.name, call.kind) for call in step.modules] == [
        ("up", "Linear"),
        ("act", "ReLU"),
        ("down", "Linear"),
        ("", "TinyMLP"),
    ]
    arrived = [(step.modules[place.call].name, place.side) for place in step.backward]
    assert arrived[-3:] == [("act", "output"), ("act", "input"), ("up", "output")]
    output, gradient = step.modules[2].outputs[""].local, step.modules[2].gradients[""].local
    torch.testing.assert_close(gradient, 2 * output / output.numel())
    assert run_reference(program).steps[0].modules == []


def test_each_reader_of_a_value_has_the_gradient_that_it_sends_back_itself():
    class Siblings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(6, 6), nn.Linear(6, 6)
            self.norm = nn.LayerNorm(6)

        def forward(self, x):
            x = self.norm(x)
            return self.gate(x) + 2 * self.up(x)

    torch.manual_seed(0)
    program = make_program(Siblings(), "ddp", [batch()], loss=squared, steps=2)
    trace = run_reference(program, watch_modules=True)
    assert trace.steps[0].modules == []  # the last step is watched, and no other
    step = trace.steps[1]
    calls = {call.name: call for call in step.modules}
    parts = [calls[name].input_gradients["args[0]"].local for name in ("gate", "up")]
    torch.testing.assert_close(sum(parts), calls["norm"].gradients[""].local)
    names = [call.name for call in step.modules]
    at_norm = ValuePlace(names.index("norm"), "output", "")
    assert {names[place.call] for place in step.sources[at_norm]} == {"gate", "up"}


def test_a_tensor_that_is_given_twice_stays_one_and_lists_are_left_alone():
    met = []

    class Meets(nn.Module):
        def forward(self, a, b, *, kept):
            met.append((a is b, kept))
            return a + b

    kept: list[torch.Tensor] = []

    class Outer(TinyMLP):
        def __init__(self) -> None:
            super().__init__()
            self.meets = Meets()

        def forward(self, x):
            y = self.up(x)
            return self.meets(y, y, kept=kept)

    run_reference(make_program(Outer, "ddp", [batch()], steps=1), watch_modules=True)
    assert [(same, held is kept) for same, held in met] == [(True, True)]


def test_modules_that_are_computed_again_in_the_backward_pass_are_noted_once():
    model = tower()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    program = make_program(model, "ddp", [batch()], steps=1)
    step = run_reference(program, watch_modules=True).steps[0]
    names = [call.name for call in step.modules]
    assert names.count("blocks.0.up") == 1
    assert "blocks.0.up.weight" in step.gradients


def test_wrappers_are_left_out_of_names():
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = nn.Linear(2, 2)

    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), Compiled())
    names = [plain_name(model, path) for path, _ in model.named_parameters()]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert {name: kind for name, (_, kind) in watched_modules(ModelNames(model)).items()} == {
        "": "Sequential",
        "0": "Linear",
        "1": "Linear",
    }
    assert plain_name(nn.Sequential(nn.Module()), "0.module.weight") == "0.module.weight"


def test_a_wide_run_lifts_the_casts_of_the_program_too():
    class Cast(TinyMLP):
        def forward(self, x):
            return super().forward(x.float().to(torch.bfloat16))

    model = Cast().to(torch.bfloat16)
    given = [batch().to(torch.bfloat16)]
    program = make_program(model, "ddp", given, loss=squared, steps=1)
    wide = run_reference(program, wide=True)
    assert wide.error is None
    exact = copy.deepcopy(model).double()
    expected = TinyMLP.forward(exact, given[0].double()).square().mean()
    assert wide.steps[0].loss.local.dtype is torch.float64
    torch.testing.assert_close(wide.steps[0].loss.local, expected.detach(), rtol=1e-14, atol=0)


def test_a_mode_is_around_forward_backward_and_optimizer():
    program = make_program(tower, "ddp", [batch()], loss=squared)
    native = run_reference(program)
    lifted = run_reference(program, wide=True, mode=LiftMode(torch.float32, torch.float32))
    noisy = run_reference(
        program, wide=True, mode=PerturbMode(torch.float32, torch.float32, 2.0**-24, 5)
    )
    assert [trace.error for trace in (native, lifted, noisy)] == [None] * 3
    name = "blocks.0.up.weight"
    ends = [trace.steps[-1].parameters[name].local.double() for trace in (native, lifted, noisy)]
    assert 0 < float((ends[1] - ends[2]).abs().max()) < 1e-5
    assert 0 < float((ends[0] - ends[1]).abs().max()) < 1e-5


def test_random_numbers_that_a_step_draws_are_told():
    model = nn.Sequential(TinyMLP(), nn.Dropout(0.5))
    assert run_reference(make_program(model, "ddp", [batch()])).random
    assert not run_reference(make_program(model.eval(), "ddp", [batch()])).random


def test_what_the_model_raises_is_told_with_its_module():
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("shapes do not fit")

    model = tower()
    model.blocks[1].act = Broken()
    trace = run_reference(make_program(model, "ddp", [batch()]))
    assert trace.error == "RuntimeError: shapes do not fit"
    assert trace.error_at == "blocks.1.act"


def test_what_is_raised_in_the_backward_pass_is_told_with_its_module():
    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("no gradient here")

    class Doubled(nn.Module):
        def forward(self, x):
            return Refusing.apply(x)

    model = tower()
    model.blocks[0].act = Doubled()
    trace = run_reference(make_program(model, "ddp", [batch()]))
    assert trace.error == "RuntimeError: no gradient here"
    assert trace.error_at == "blocks.0.act"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"loss": lambda output, *_: output}, r"the loss must be one number, got \[4, 6\]"),
        ({"loss": lambda output, *_: output.detach().mean()}, "does not depend on anything"),
        ({"optimizer": lambda _: 3}, "makes the optimizer returned 3"),
        ({"model": lambda: 3}, "makes the model returned 3, not a module"),
    ],
)
def test_a_program_that_makes_no_sense_is_refused(said, message):
    told = {"model": tower, "plan": "ddp", "inputs": Inputs((batch(),)), **said}
    with pytest.raises(UsageError, match=message):
        run_reference(make_program(**told))
