"""Do the parts of torch that simulate ranks still answer? A new torch fails here first."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

from paritas.core.errors import UnsupportedTorchError, UsageError
from paritas.core.precision.lifting import RankLiftMode
from paritas.core.torch_private import ranks
from paritas.core.torch_private.ranks import gradient_factors


def test_a_simulated_tensor_is_another_on_each_rank():
    parts = [torch.ones(2, 3), torch.full((2, 3), 2.0)]
    with ranks.simulated_ranks(2) as mesh:
        local = ranks.of_ranks(parts)
        split = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        found = ranks.parts_of(split.full_tensor(), 2)
        terms = DTensor.from_local(local, mesh, [Partial()], run_check=False)
        summed = ranks.parts_of(terms.full_tensor(), 2)
    assert all(torch.equal(part, torch.cat(parts)) for part in found)
    assert all(torch.equal(part, torch.full((2, 3), 3.0)) for part in summed)
    assert not distributed.is_initialized()


def test_a_plain_tensor_is_the_same_on_each_rank():
    assert len(ranks.parts_of(torch.ones(2), 3)) == 3


def test_threads_that_enter_modes_leave_the_process_in_none():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def program(rank):
        if rank == 1:
            first_in.wait(600)
        with Mode():
            (first_in if rank == 0 else second_in).set()
            (second_in if rank == 0 else first_out).wait(600)
        first_out.set()

    ranks.run_in_threads(program, 2, 600.0)
    assert not is_in_torch_dispatch_mode()


def test_simulated_ranks_leave_the_exception_hook_alone():
    hook = sys.excepthook
    with ranks.simulated_ranks(2):
        pass
    ranks.run_in_threads(lambda rank: rank, 2, 600.0)
    assert sys.excepthook is hook


def test_ranks_are_not_simulated_within_a_process_group(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the group puts its own there
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with (
            pytest.raises(UsageError, match="already a rank of a process group"),
            ranks.simulated_ranks(2),
        ):
            pass
    finally:
        distributed.destroy_process_group()


def test_collectives_of_a_lifted_program_write_to_what_they_are_given(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the group puts its own there
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        given, filled = torch.full((2,), 0.3), torch.zeros(2)
        with RankLiftMode(torch.float32, torch.float32):
            distributed.all_gather([filled], given)
            total = given.double() + filled
    finally:
        distributed.destroy_process_group()
    assert filled.dtype is torch.float32
    assert torch.equal(filled, given)
    assert total.dtype is torch.float64


def test_moved_arguments_are_seen_and_the_others_are_not():
    parts = [torch.ones(2, 4), torch.ones(2, 4)]
    with ranks.simulated_ranks(2) as mesh:
        local = ranks.of_ranks(parts)
        whole = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        terms = DTensor.from_local(local, mesh, [Partial()], run_check=False)
        with ranks.watch_redistribution() as moved:
            torch.relu(whole)
            assert moved == []
            torch.relu(terms)
            assert len(moved) == 1  # nameless, if the same call was made before
        with (
            ranks.watch_redistribution(stop=True),
            pytest.raises(ranks.Redistributed),
        ):
            torch.relu(terms)


def test_each_thread_knows_its_rank_and_joins_in_collectives():
    def program(rank: int) -> tuple[int, float]:
        value = torch.tensor(float(rank + 1))
        distributed.all_reduce(value)
        return distributed.get_rank(), float(value)

    outcomes = ranks.run_in_threads(program, 3, timeout=600)
    assert [outcome.value for outcome in outcomes] == [(0, 6.0), (1, 6.0), (2, 6.0)]
    assert all(outcome.done for outcome in outcomes)
    assert not distributed.is_initialized()


def test_threads_that_are_held_keep_their_group_and_are_new_after_a_failure():
    kept: dict[int, object] = {}

    def join(rank: int) -> None:
        kept[rank] = distributed.group.WORLD

    def add(rank: int) -> float:
        value = torch.tensor(float(rank + 1))
        distributed.all_reduce(value, group=kept[rank])
        return float(value)

    def fail(rank: int) -> None:
        if rank:
            raise ValueError("no")
        distributed.barrier()

    with ranks.RankThreads(2) as threads:
        threads.run(join, 600)
        assert [outcome.value for outcome in threads.run(add, 600)] == [3.0, 3.0]
        assert [outcome.done for outcome in threads.run(fail, 600)] == [False, True]
        threads.run(join, 600)
        assert [outcome.value for outcome in threads.run(add, 600)] == [3.0, 3.0]
    assert not distributed.is_initialized()


def test_threads_are_let_go_where_the_wait_for_them_is_interrupted(monkeypatch):
    def wait_for_rank_one(rank: int) -> None:
        if rank == 0:
            distributed.barrier()

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks, "TimeLimit", interrupted)
    with pytest.raises(KeyboardInterrupt), ranks.RankThreads(2) as threads:
        threads.run(wait_for_rank_one, 600)
    assert not distributed.is_initialized()


def test_a_part_that_torch_has_not_is_named():
    with pytest.raises(UnsupportedTorchError, match=r"has no torch\.distributed\.nowhere"):
        ranks._import_private("torch.distributed.nowhere")
    with pytest.raises(UnsupportedTorchError, match="has no nothing"):
        ranks._import_private("torch.distributed", "nothing")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fsdp_sums_and_divides_by_a_factor_on_simulated_ranks(device):
    """They have none of NCCL's reductions, on a GPU either."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    def program(rank):
        given = (distributed.group.WORLD, None, torch.float32, device, 4.0)
        return collectives._get_gradient_divide_factors(*given)

    with gradient_factors(once=False):
        outcomes = ranks.run_in_threads(program, 2, 60)
    assert [one.error for one in outcomes] == [None, None]
    for one in outcomes:
        assert one.value[1] == 4.0
        assert one.value[2] == distributed.ReduceOp.SUM


def test_collectives_of_a_process_are_heard_where_torch_dispatches_them():
    heard: list[ranks.Message] = []
    with ranks.Listener(heard), pytest.raises(RuntimeError):  # there is no such group
        torch.ops._c10d_functional.reduce_scatter_tensor(torch.ones(2), "sum", 2, "nowhere")
    assert [message.kind for message in heard] == ["reducescattertensor"]
    assert heard[0].scatters_a_sum
