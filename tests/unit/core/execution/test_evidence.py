"""What is run again of a program, when, and for whom."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch

from paritas.core.execution.evidence import Demand, Evidence, NoiseNotYetMeasured
from paritas.core.execution.item_evidence import GivenLift, ItemEvidence
from paritas.core.execution.observation import Observation, RunOptions
from paritas.core.execution.program import VALUE, Program, ValueProgram, count_dtypes
from paritas.core.numerics.criterion import UNIT_F32, UNIT_F64
from paritas.core.results.items import gradient, output

OUTPUT, GRADIENT = output(), gradient("x")


class Squares(Program):
    """x * x and its gradient, with a list of how it was run."""

    def __init__(self, x):
        self.x = x
        self.ran = []

    def dtypes(self, native):
        return count_dtypes([self.x])

    def run(self, options):
        self.ran.append(options)
        x = (self.x.double() if options.wide else self.x).clone().requires_grad_()
        seen = Observation()
        with options.around():
            value = x * x
            (slope,) = torch.autograd.grad(value.sum(), x)
        seen.outputs[OUTPUT] = value.detach()
        if options.wanted is None or GRADIENT in options.wanted:
            seen.gradients[GRADIENT] = slope
        return [seen]


@pytest.fixture
def known():
    return Evidence(Squares(torch.rand(64, generator=torch.Generator().manual_seed(0)) + 1))


def test_the_native_run_comes_first_and_the_arbiter_is_made_once(known):
    assert [options.wide for options in known.program.ran] == [False]
    first = known.arbiter()
    assert first is known.arbiter()
    assert [options.wide for options in known.program.ran] == [False, True]
    assert first[0].outputs[OUTPUT].dtype is torch.float64


def test_a_settled_gradient_is_made_for_nobody_but_whoever_settles_nothing(known):
    demand = Demand()
    demand.settle(0, GRADIENT)
    assert known.spread(known.unit, 0, OUTPUT, 1, demand) is not None
    assert known.spread(known.unit, 0, GRADIENT, 1, demand) is None
    assert known.program.ran[-1].wanted == frozenset()
    # Another comparison with the same evidence is not starved by it.
    assert known.spread(known.unit, 0, GRADIENT, 1, Demand()) is not None
    known.everything.settle(0, GRADIENT)
    assert known.spread(known.unit, 0, GRADIENT, 1) is not None
    count = len(known.program.ran)
    assert known.spread(known.unit, 0, OUTPUT, 1) is not None
    assert len(known.program.ran) == count


def test_while_they_are_put_off_no_perturbed_run_is_made(known):
    demand = Demand()
    demand.puts_off = True
    known.arbiter()
    count = len(known.program.ran)
    with pytest.raises(NoiseNotYetMeasured):
        known.spread(known.unit, 0, OUTPUT, 1, demand)
    with pytest.raises(NoiseNotYetMeasured):
        known.run_with_decisions(known.unit, 1, demand)
    assert len(known.program.ran) == count


@pytest.mark.parametrize("says_so", [True, False])
def test_of_a_program_in_float64_there_is_no_arbiter(says_so):
    program = Squares(torch.ones(3, dtype=torch.float64))
    program.notes_float64 = says_so
    known = Evidence(program)
    assert known.arbiter() is None
    assert bool(known.notes) is bool(known.notes.weaker) is says_so
    assert len(program.ran) == 1


def test_what_a_program_raises_is_a_note_and_no_error():
    def prepare(options):
        def run():
            if options.wide:
                raise RuntimeError("no kernel for float64")
            return torch.ones(3)

        return run

    known = Evidence(ValueProgram(prepare, [torch.ones(3)]))
    assert known.arbiter() is None
    assert known.notes == [
        "no arbiter: the reference in float64 raised RuntimeError: no kernel for float64"
    ]
    assert known.notes.weaker == {*known.notes}
    assert ItemEvidence(known, VALUE).arbiter() is None


def test_a_lift_that_rounds_inside_is_judged_by_that():
    assert GivenLift().unit == UNIT_F64
    casts = set()
    lift = GivenLift(lambda: None, casts)
    casts.add(torch.float32)  # seen only when the arbiter is made
    assert lift.unit == UNIT_F32


def test_the_watch_is_outside_the_mode_and_both_can_be_entered_again():
    order = []

    class Manager(contextlib.AbstractContextManager):
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            order.append(self.name)

        def __exit__(self, *_):
            order.append(f"/{self.name}")

    around = RunOptions(watch=Manager("watch"), mode=Manager("mode")).around()
    for _ in range(2):
        with around:
            pass
    assert order == ["watch", "mode", "/mode", "/watch"] * 2
    with RunOptions().around():
        pass


class Gates(Squares):
    """relu(exp(x) - e) and its gradient, which rounding decides for x within rounding of 1."""

    def run(self, options):
        self.ran.append(options)
        x = (self.x.double() if options.wide else self.x).clone().requires_grad_()
        seen = Observation()
        with options.around():
            value = torch.relu(x.exp() - math.e)
            (slope,) = torch.autograd.grad(value.sum(), x)
        seen.outputs[OUTPUT] = value.detach()
        seen.gradients[GRADIENT] = slope
        return [seen]


def test_jumps_are_what_decisions_move_and_nothing_else():
    x = torch.linspace(0.5, 1.5, 64)
    x[10] = 1 + 2**-23
    known = Evidence(Gates(x))
    jumps = known.jumps(UNIT_F32, 0, GRADIENT, 6)
    assert jumps.size[10] > 1
    assert jumps.decides.nonzero().tolist() == [[10]]
    others = torch.arange(64) != 10
    # What moves with the rounding does not jump: next to nothing is left of two opposite moves.
    for item in (GRADIENT, OUTPUT):
        spread = known.spread(UNIT_F32, 0, item, 3)
        assert (known.jumps(UNIT_F32, 0, item, 6).size <= 1e-3 * spread.max())[others].all()
    assert known.open_decisions == {"relu": (1, 64)}
    assert len(known.program.ran) == 2 + 12 + 3


def test_jumps_are_put_off_like_other_runs(known):
    demand = Demand()
    demand.puts_off = True
    with pytest.raises(NoiseNotYetMeasured):
        known.jumps(UNIT_F32, 0, GRADIENT, 2, demand)


class Reads(Squares):
    """x * x, with a look at its values that no dispatch mode sees."""

    def __init__(self, x, look):
        super().__init__(x)
        self.look = look

    def run(self, options):
        seen = super().run(options)
        with options.around():
            self.look(self.x * 1.0)
        return seen


def test_a_program_is_smooth_once_a_perturbed_run_has_shown_it(known):
    assert not known.is_smooth
    for runs in (1, 2):
        known.spread(UNIT_F32, 0, OUTPUT, runs)
        assert known.is_smooth
    for program in (
        Gates(torch.ones(4)),
        Reads(torch.ones(4), torch.Tensor.tolist),
        Reads(torch.ones(4), torch.Tensor.numpy),
        Reads(torch.ones(4), np.asarray),
    ):
        other = Evidence(program)
        for runs in (1, 2):
            other.spread(UNIT_F32, 0, OUTPUT, runs)
            assert not other.is_smooth
