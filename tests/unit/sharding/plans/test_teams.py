"""The same training on one device and on ranks, and ranks that do not come to an end."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import distributed, nn

from paritas.core.errors import UsageError
from paritas.core.results.items import Shard
from paritas.core.torch_private.tensors import hold_shared, is_shared
from paritas.sharding.plans import training
from paritas.sharding.plans.plan import make_program
from paritas.sharding.plans.rank_pool import LET_GO, RankPool, start_method
from paritas.sharding.plans.training import run_ranks, run_reference
from unit.sharding.plans import small_programs
from unit.sharding.plans.small_programs import TENSOR_PLAN, TinyMLP, batch, by_hand, tower

NEAR = {"rtol": 1e-12, "atol": 1e-14}
PLANS = {
    "tensor": (TinyMLP, TENSOR_PLAN),
    "by hand": (TinyMLP, by_hand),
    "fsdp": (tower, "fsdp"),
    "ddp": (tower, "ddp"),
}
# For ranks that never answer. Others must have done their part by then, on a loaded machine too.
TIMEOUT = 10.0
both_teams = pytest.mark.parametrize("team", ["simulated", "gloo"])


def assembled(pieces):
    """The whole, of pieces that lie one after the other or are all of it."""
    first = pieces[0]
    role = None if first.placement is None else first.placement.roles[0]
    return (
        torch.cat([one.local for one in pieces], role.dim)
        if isinstance(role, Shard)
        else first.local
    )


@pytest.mark.one_in(2)
@both_teams
@pytest.mark.parametrize("name", ["tensor", "fsdp", "ddp"])
def test_ranks_come_to_what_one_device_does(name, team):
    model, plan = PLANS[name]
    program = make_program(model, plan, [batch()], 2, seed=3)
    reference = run_reference(program, wide=True)
    ranks = run_ranks(program, team, wide=True)
    assert [trace.error for trace in ranks] == [None, None]
    for number, step in enumerate(reference.steps):
        steps = [trace.steps[number] for trace in ranks]
        mean = torch.stack([one.loss.local for one in steps]).mean()
        torch.testing.assert_close(mean, step.loss.local, **NEAR)
        for kind in ("gradients", "parameters"):
            found = [getattr(one, kind) for one in steps]
            for key, piece in getattr(step, kind).items():
                whole = assembled([one[key] for one in found])
                torch.testing.assert_close(whole, piece.local, **NEAR)


@both_teams
def test_code_of_the_users_own_runs_with_its_collectives(team):
    program = make_program(TinyMLP, by_hand, [batch()], 2)
    reference = run_reference(program, wide=True).steps[-1]
    steps = [trace.steps[-1] for trace in run_ranks(program, team, wide=True)]
    ups = torch.cat([step.parameters["up.weight"].local for step in steps])
    downs = torch.cat([step.parameters["down.weight"].local for step in steps], 1)
    torch.testing.assert_close(ups, reference.parameters["up.weight"].local, **NEAR)
    torch.testing.assert_close(downs, reference.parameters["down.weight"].local, **NEAR)


def test_modules_hand_on_what_the_plan_makes_of_it():
    program = make_program(TinyMLP, TENSOR_PLAN, [batch()], 2, steps=1)
    whole = run_reference(program, wide=True, watch_modules=True).steps[0]
    parts = [t.steps[0] for t in run_ranks(program, wide=True, watch_modules=True)]
    assert [call.name for call in parts[0].modules] == [call.name for call in whole.modules]
    ups = torch.cat([step.modules[0].outputs[""].local for step in parts], 1)
    torch.testing.assert_close(ups, whole.modules[0].outputs[""].local, **NEAR)
    down = parts[1].modules[2]
    torch.testing.assert_close(down.outputs[""].local, whole.modules[2].outputs[""].local, **NEAR)
    assert down.gradients[""].local.shape == (4, 6)


def test_classes_and_paths_are_the_users_under_fsdp_and_ddp():
    for plan in ("fsdp", "ddp"):
        program = make_program(tower, plan, [batch()], 2, steps=1)
        told = run_ranks(program, watch_modules=True)[1].steps[0]
        assert {(call.name, call.kind) for call in told.modules} >= {
            ("blocks.1", "TinyMLP"),
            ("blocks.1.up", "Linear"),
            ("", "Tower"),
        }
        assert "blocks.0.up.weight" in told.gradients


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args):
        return self.model(*args)


def test_a_model_that_the_plan_puts_into_another_keeps_its_names():
    def plan(model, mesh):
        return Wrapper(nn.parallel.DistributedDataParallel(model))

    program = make_program(tower, plan, [batch()], 2, steps=1)
    reference = run_reference(program, watch_modules=True).steps[0]
    told = run_ranks(program, watch_modules=True)[0].steps[0]
    assert told.parameters.keys() == reference.parameters.keys()
    assert [call.name for call in told.modules] == [call.name for call in reference.modules]


def test_shards_say_where_in_the_whole_they_lie():
    traces = run_ranks(make_program(tower, "fsdp", [batch()], 2, steps=1))
    place = traces[1].initial["blocks.0.up.weight"].placement
    assert (place.placements, place.mesh, place.coordinate) == (("shard(0)",), (2,), (1,))
    assert (place.global_shape, place.global_offset) == ((8, 6), (4, 0))
    assert (traces[1].samples, traces[1].data_rank, traces[1].data_ranks) == ((2, 4), 1, 2)


def test_buffers_of_ranks_are_noted():
    def model() -> nn.Module:
        return nn.Sequential(TinyMLP(), nn.BatchNorm1d(6))

    traces = run_ranks(make_program(model, "ddp", [batch()], 2))
    name = "1.running_mean"
    first, second = (trace.steps[0].buffers[name].local for trace in traces)
    assert not torch.equal(first, second)  # each of its own samples; rank 0's are sent next time
    assert torch.equal(traces[0].initial[name].local, torch.zeros(6))


def test_the_callers_model_and_random_numbers_are_left_alone():
    model, hook, threads = tower(), sys.excepthook, threading.active_count()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    run_ranks(make_program(model, "fsdp", [batch()], 2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert sys.excepthook is hook
    assert not distributed.is_initialized()
    assert threading.active_count() == threads


@both_teams
def test_what_one_rank_raises_is_told_with_its_module(team, monkeypatch):
    monkeypatch.setattr("paritas.sharding.plans.rank_pool._GRACE_SECONDS", 0.2)
    program = make_program(TinyMLP, small_programs.raises_on_rank_1, [batch()], 2)
    first, second = run_ranks(program, team)
    assert (second.error, second.error_at) == ("ValueError: no such head: 7", "act")
    assert first.error == LET_GO


def test_a_plan_that_raises_is_told():
    program = make_program(TinyMLP, small_programs.refuses_on_rank_1, [batch()], 2)
    told = run_ranks(program)[1].error
    assert told == "while the plan was applied: KeyError: 'layers.9'"


@both_teams
def test_ranks_that_wait_for_each_other_are_given_up(team):
    program = make_program(TinyMLP, small_programs.leaves_out_a_collective, [batch()], 2)
    first, second = run_ranks(program, team, timeout=TIMEOUT)
    assert f"had {TIMEOUT:g} s" in first.error
    assert "no answer" in first.error
    assert second.error is None
    assert len(second.steps) == 2


def test_a_rank_that_dies_is_told():
    program = make_program(TinyMLP, small_programs.dies_on_rank_1, [batch()], 2)
    first, second = run_ranks(program, "gloo")
    assert second.error == "rank 1 of 2 died by SIGKILL"
    assert first.error == LET_GO


def test_what_cannot_be_sent_to_a_new_process_is_refused(monkeypatch):
    monkeypatch.setattr(training, "start_method", lambda: "anew")
    program = make_program(lambda: TinyMLP().eval(), "ddp", [batch()], 2)
    with pytest.raises(UsageError, match="the model cannot be sent to another process"):
        run_ranks(program, "gloo")


def run_here(_rank, _ranks, payload):
    program, timeout = payload
    return run_ranks(program, "here", timeout=timeout)


def test_every_rank_of_a_group_that_is_there_has_all_traces():
    right = make_program(TinyMLP, TENSOR_PLAN, [batch()], 2)
    wrong = make_program(TinyMLP, small_programs.raises_on_rank_1, [batch()], 2)
    with RankPool(2) as pool:
        told = [answer.value for answer in pool.run(run_here, [(right, 600.0)] * 2, 600.0)]
        failed = [answer.value for answer in pool.run(run_here, [(wrong, TIMEOUT)] * 2, 600.0)]
    assert [[trace.rank for trace in traces] for traces in told] == [[0, 1], [0, 1]]
    losses = {float(trace.steps[-1].loss.local) for traces in told for trace in traces}
    expected = run_reference(right).steps[-1].loss.local
    torch.testing.assert_close(torch.tensor([*losses]), expected.expand(len(losses)))
    for traces in failed:
        assert (traces[1].error, traces[1].error_at) == ("ValueError: no such head: 7", "act")
        assert f"had {TIMEOUT:g} s: no answer" in traces[0].error
        assert traces[0].error_at == "act"


def test_a_mesh_that_is_not_the_group_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the group puts its own there
    program = make_program(TinyMLP, "ddp", [batch()], 4)
    with pytest.raises(UsageError, match="this process is not a rank of a process group"):
        run_ranks(program, "here")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError) as caught:
            run_ranks(program, "here")
    finally:
        distributed.destroy_process_group()
    assert str(caught.value) == (
        "the mesh has 4 ranks (ranks=4) but the process group has 1: make them equal"
    )


def test_a_team_that_is_not_known_is_refused():
    with pytest.raises(UsageError, match="ranks='mpi': use one of simulated, gloo, here"):
        run_ranks(make_program(TinyMLP, "ddp", [batch()], 2), "mpi")


def test_fork_is_for_processes_without_other_threads():
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait)
    thread.start()
    try:
        assert start_method() == "anew"
    finally:
        waiting.set()
        thread.join()


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_no_rank_takes_over_the_memory_that_ranks_share(plan, monkeypatch):
    """Two threads that give up the last references at once damage the heap (torch 2.13)."""
    kept = []

    def hold(module):
        kept.extend(hold_shared(module))
        return kept

    monkeypatch.setattr(training, "hold_shared", hold)
    program = make_program(tower, plan, [batch()], 2)
    ranks = run_ranks(program)
    assert [trace.error for trace in ranks] == [None, None]
    model = tower()
    assert len(kept) == len(list(model.parameters()))
    for held, initial in zip(kept, model.parameters(), strict=True):
        assert is_shared(held)
        assert torch.equal(held, initial)
