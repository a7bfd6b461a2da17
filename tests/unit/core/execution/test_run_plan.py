"""The plan of a check: its runs, what they cost, and how far it has come."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paritas import VerifyConfig, verify
from paritas.core.errors import UsageError
from paritas.core.execution.run_plan import (
    PlanFollower,
    PlannedCheck,
    RunCosts,
    RunStep,
    costs_on,
)
from paritas.core.results.progress import Progress

COSTS = RunCosts(lifted=4.0, perturbed=10.0, compilation=0.5)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


# --- the runs -------------------------------------------------------------------------------------


def costs_by_step(runs):
    return [(run.step.name, run.cost) for run in runs]


def test_a_check_of_whole_models_has_five_steps():
    assert costs_by_step(PlannedCheck(COSTS).plan_whole()) == [
        ("REFERENCE", 1),
        ("CANDIDATE", 2),
        ("ARBITER", 4.0),
        ("LIFTED", 4.0),
        ("AGAIN", 1.0),
    ]


def test_by_blocks_the_blocks_take_the_place_of_the_runs_in_float64():
    assert costs_by_step(PlannedCheck(COSTS).plan_blocks()) == [
        ("REFERENCE", 1),
        ("CANDIDATE", 2),
        ("BLOCKS", 11.0),  # 1 + 2 native runs, 2 lifted ones
        ("AGAIN", 1.0),
    ]


def test_state_that_a_call_leaves_behind_doubles_the_runs():
    runs = PlannedCheck(COSTS, calls=2, repeats=False).plan_whole()
    assert [run.cost for run in runs] == [2, 2, 8.0, 8.0, 1.0]


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        ({"lifts": False}, ["REFERENCE", "CANDIDATE", "ARBITER", "AGAIN"]),
        ({"is_narrow": False}, ["REFERENCE", "CANDIDATE", "AGAIN"]),
        ({"compares": False}, ["REFERENCE", "CANDIDATE"]),
    ],
)
def test_what_is_switched_off_is_not_planned(change, steps):
    runs = PlannedCheck(COSTS, **change).plan_whole()
    assert [run.step.name for run in runs] == steps


def test_a_compiler_works_on_the_candidate_only_and_only_if_there_is_one():
    compiled = PlannedCheck(COSTS, is_compiled=True)
    steps = {run.step for run in (*compiled.plan_whole(), *compiled.plan_blocks()) if run.compiles}
    assert steps == {RunStep.CANDIDATE, RunStep.LIFTED, RunStep.BLOCKS}
    assert not any(run.compiles for run in PlannedCheck(COSTS).plan_whole())


def test_what_was_not_measured_has_no_cost():
    assert costs_on(CPU, torch.bfloat16).lifted > costs_on(CPU, torch.float32).lifted > 1
    assert costs_on(CUDA, torch.bfloat16).lifted > costs_on(CPU, torch.bfloat16).lifted
    assert costs_on(CUDA, torch.float32) == costs_on(torch.device("mps"), torch.float16)
    runs = PlannedCheck(costs_on(CUDA, torch.float32)).plan_whole()
    assert [run.cost for run in runs] == [1, 2, None, None, 1.0]
    assert PlannedCheck(costs_on(CUDA, torch.float32)).plan_blocks()[2].cost is None


# --- how far it has come --------------------------------------------------------------------------


class Clocks:
    """The time, and the time that compilers have taken."""

    def __init__(self):
        self.now, self.compiling = 100.0, 7.0

    def go_on(self, seconds, compiling=0.0):
        self.now += seconds + compiling
        self.compiling += compiling


@pytest.fixture
def clocks():
    return Clocks()


def follow(clocks, heard, runs, **known):
    return PlanFollower(
        heard.append,
        runs,
        clock=lambda: clocks.now,
        compile_clock=lambda: clocks.compiling,
        **known,
    )


def whole(*, is_compiled=True):
    return PlannedCheck(COSTS, is_compiled=is_compiled).plan_whole()


def position(step):
    return step.plan["step"], step.plan["steps"], step.plan["is_between"]


def estimates(step):
    return step.plan["seconds"], step.plan["later"], step.plan["compiles_later"]


def test_nothing_is_estimated_before_the_reference_has_run(clocks):
    heard = []
    follow(clocks, heard, whole())(RunStep.REFERENCE)
    assert heard == ["running the reference"]
    assert position(heard[0]) == (1, 5, False)
    assert estimates(heard[0]) == (None, None, True)


def test_the_native_run_gives_the_estimate_of_all_others(clocks):
    heard = []
    tell = follow(clocks, heard, whole(is_compiled=False))
    tell(RunStep.REFERENCE)
    clocks.go_on(3)
    tell(RunStep.CANDIDATE)
    assert estimates(heard[-1]) == (6.0, 12.0 + 12.0 + 3.0, False)


def test_a_step_that_ends_corrects_the_estimate_of_what_is_like_it(clocks):
    heard = []
    tell = follow(clocks, heard, whole(is_compiled=False))
    for step, seconds in ((RunStep.REFERENCE, 3), (RunStep.CANDIDATE, 6), (RunStep.ARBITER, 30)):
        tell(step)
        clocks.go_on(seconds)
    tell(RunStep.LIFTED)
    assert position(heard[-1]) == (4, 5, False)
    assert estimates(heard[-1]) == (30.0, 3.0, False)


def test_a_compilation_of_unknown_length_is_not_estimated(clocks):
    heard = []
    tell = follow(clocks, heard, whole())
    tell(RunStep.REFERENCE)
    clocks.go_on(3)
    tell(RunStep.CANDIDATE)
    assert estimates(heard[-1]) == (None, 27.0, True)


def test_a_compilation_that_was_seen_is_the_estimate_of_the_next_one(clocks):
    heard = []
    tell = follow(clocks, heard, whole())
    tell(RunStep.REFERENCE)
    clocks.go_on(3)
    tell(RunStep.CANDIDATE)
    clocks.go_on(6, compiling=50)
    tell(RunStep.ARBITER)
    assert estimates(heard[-1]) == (12.0, 12.0 + 25.0 + 3.0, False)


def test_a_reset_of_the_compiler_is_no_time(clocks):
    heard = []
    tell = follow(clocks, heard, whole(is_compiled=False))
    tell(RunStep.REFERENCE)
    clocks.go_on(3)
    clocks.compiling = 0.0
    tell(RunStep.AGAIN)
    assert estimates(heard[-1]) == (3.0, 0, False)


def test_what_the_user_has_compiled_is_not_compiled_again_natively(clocks):
    heard = []
    tell = follow(clocks, heard, whole(), compilation=50.0)
    tell(RunStep.REFERENCE)
    clocks.go_on(3)
    tell(RunStep.CANDIDATE)
    assert estimates(heard[-1]) == (6.0, 12.0 + 12.0 + 25.0 + 3.0, False)


def test_where_no_compilation_in_float64_was_measured_none_is_estimated(clocks):
    heard = []
    costs = RunCosts(lifted=4.0, perturbed=None)
    runs = PlannedCheck(costs, is_compiled=True).plan_whole()
    tell = follow(clocks, heard, runs, compilation=50.0)
    tell(RunStep.REFERENCE)
    clocks.go_on(3)
    tell(RunStep.CANDIDATE)
    assert estimates(heard[-1]) == (6.0, 12.0 + 12.0 + 3.0, True)
    tell(RunStep.LIFTED)
    assert estimates(heard[-1])[0] is None


def test_a_run_that_is_not_planned_comes_after_one_that_is(clocks):
    heard = []
    tell = follow(clocks, heard, whole(is_compiled=False))
    tell(RunStep.REFERENCE)
    clocks.go_on(3)
    tell(RunStep.CANDIDATE)
    tell(RunStep.LIFTED)
    tell("measuring rounding in float64, run 1")
    assert position(heard[-1]) == (4, 5, True)
    assert estimates(heard[-1]) == (0.0, 3.0, False)


def test_a_step_that_is_not_needed_is_left_out(clocks):
    heard = []
    tell = follow(clocks, heard, whole())
    tell(RunStep.REFERENCE)
    clocks.go_on(3)
    tell(RunStep.CANDIDATE)
    tell(RunStep.AGAIN)
    assert position(heard[-1]) == (5, 5, False)
    assert estimates(heard[-1]) == (3.0, 0, False)


def test_several_sets_of_inputs_are_one_plan_and_the_second_costs_what_the_first_did(clocks):
    heard = []
    tell = follow(clocks, heard, whole() * 2)
    for step in (RunStep.REFERENCE, RunStep.CANDIDATE, RunStep.ARBITER, RunStep.LIFTED):
        tell(step)
        clocks.go_on(2, compiling=20 if step is RunStep.CANDIDATE else 0)
    tell(RunStep.AGAIN)
    clocks.go_on(1)
    tell(RunStep.REFERENCE)
    assert position(heard[-1]) == (6, 10, False)
    assert estimates(heard[-1]) == (2.0, 2.0 + 2.0 + 2.0 + 1.0, False)


def test_blocks_are_one_step_however_often_they_are_announced(clocks):
    heard = []
    tell = follow(clocks, heard, PlannedCheck(COSTS).plan_blocks())
    tell(RunStep.REFERENCE)
    clocks.go_on(2)
    tell(RunStep.CANDIDATE)
    for done in range(3):
        tell(Progress(RunStep.BLOCKS, done, 3, failing=1, peak=5))
    assert [position(step) for step in heard[-3:]] == [(3, 4, False)] * 3
    assert estimates(heard[-1]) == (22.0, 2.0, False)
    assert (heard[-1].done, heard[-1].total, heard[-1].failing, heard[-1].peak) == (2, 3, 1, 5)


def test_what_comes_before_the_plan_is_passed_on_as_it_is(clocks):
    heard = []
    follow(clocks, heard, whole())("importing torch")
    assert heard == ["importing torch"]
    assert type(heard[0]) is str


# --- in a check -----------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("by", "planned"),
    [
        (
            "whole",
            [
                (1, 5, "running the reference"),
                (2, 5, "running the candidate (a compiler works on the first call)"),
                (3, 5, "running the reference in float64"),
                (4, 5, "running the candidate in float64 (a compiler works on the first call)"),
                (5, 5, "running the reference once more"),
            ],
        ),
        (
            "blocks",
            [
                (1, 4, "running the reference"),
                (2, 4, "running the candidate (a compiler works on the first call)"),
                (3, 4, "checking blocks (0 of 3)"),
                (3, 4, "checking blocks (1 of 3)"),
                (3, 4, "checking blocks (2 of 3)"),
                (4, 4, "running the reference once more"),
            ],
        ),
    ],
)
def test_verify_makes_the_runs_that_it_announces(by, planned):
    torch.manual_seed(0)
    model, heard = Model().bfloat16(), []
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    config = VerifyConfig(verify_gradients=False)
    verify([x], model, model, config, by=by, on_progress=heard.append)
    assert [(step.plan["step"], step.plan["steps"], str(step)) for step in heard] == planned
    assert heard[-1].plan["seconds"] is not None  # as long as the first run


@pytest.mark.parametrize(
    ("candidate", "message"),
    [(5, "compiled_model is not callable: 5"), (Model, "compiled_model is a class")],
)
def test_verify_still_says_what_is_wrong_with_its_arguments_if_someone_listens(candidate, message):
    with pytest.raises(UsageError, match=message):
        verify([torch.ones(2)], Model(), candidate, on_progress=lambda _: None)
