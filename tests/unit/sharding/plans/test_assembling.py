from __future__ import annotations

import pytest
import torch

from paritas.core.placement.assembly import positions
from paritas.core.placement.rank_pieces import RankPiece, assemble
from paritas.core.results.items import LocalPlacement
from paritas.sharding.plans.assembling import find_slots, natural_chunk, step_items
from paritas.sharding.plans.plan import make_program
from paritas.sharding.plans.traces import StepTrace, Trace
from paritas.sharding.plans.verify import verify_parallel

WHOLE = torch.arange(12.0).reshape(6, 2)


def program(mesh=2):
    return make_program(torch.nn.Linear(2, 6), "ddp", [torch.ones(4, 2)], mesh)


def shard(local, offset, *, placements=("shard(0)",), mesh=(2,), coordinate=(0,)):
    place = LocalPlacement(
        mesh=mesh,
        coordinate=coordinate,
        placements=placements,
        global_shape=tuple(WHOLE.shape),
        global_offset=offset,
    )
    return RankPiece(local, place)


def slots_of(whole, locals_, mesh=2):
    ranks = [Trace(rank=r, initial={"w.weight": RankPiece(v)}) for r, v in enumerate(locals_)]
    return find_slots(program(mesh), {"w.weight": RankPiece(whole)}, ranks).get("w.weight", {})


def test_a_part_cut_out_by_hand_is_found_by_its_initial_values():
    found = slots_of(WHOLE, [WHOLE[:, 1:], WHOLE[:, :1]])
    assert [(found[r].dim, found[r].chunk, found[r].natural) for r in (0, 1)] == [
        (1, 1, 0),
        (1, 0, 1),
    ]


def test_uneven_and_interleaved_parts_are_found_too():
    uneven = slots_of(WHOLE, [WHOLE[:4], WHOLE[4:]])
    pieces = {0: RankPiece(-WHOLE[:4]), 1: RankPiece(-WHOLE[4:])}
    assert torch.equal(assemble(pieces, WHOLE.shape, uneven).value, -WHOLE)
    halves = [WHOLE[[0, 2, 4]], WHOLE[[1, 3, 5]]]
    mixed = slots_of(WHOLE, halves)
    pieces = {rank: RankPiece(-half) for rank, half in enumerate(halves)}
    assert torch.equal(assemble(pieces, WHOLE.shape, mixed).value, -WHOLE)


def test_a_block_of_two_split_dims_is_found():
    whole = torch.arange(16.0).reshape(4, 4)
    blocks = [whole[:2, :2], whole[:2, 2:], whole[2:, :2], whole[2:, 2:]]
    found = slots_of(whole, blocks, mesh=(2, 2))
    pieces = {rank: RankPiece(2 * block) for rank, block in enumerate(blocks)}
    assert torch.equal(assemble(pieces, whole.shape, found).value, 2 * whole)


def test_a_bias_of_zeros_is_split_as_the_weight_beside_it():
    rows = [[0, 2, 4], [1, 3, 5]]
    reference = {"w.weight": RankPiece(WHOLE), "w.bias": RankPiece(torch.zeros(6))}
    ranks = [
        Trace(
            rank=r, initial={"w.weight": RankPiece(WHOLE[own]), "w.bias": RankPiece(torch.zeros(3))}
        )
        for r, own in enumerate(rows)
    ]
    found = find_slots(program(), reference, ranks)["w.bias"]
    assert [found[r].where[0] for r in (0, 1)] == [positions(own) for own in rows]


def test_a_gradient_that_does_not_arrive_is_a_zero_of_any_sign():
    minus = RankPiece(-torch.zeros(6, 2))
    step = StepTrace(gradients={"w": minus})
    ranks = [
        Trace(rank=rank, steps=[StepTrace(gradients={"w": held}, parameters={"w": minus})])
        for rank, held in enumerate([None, minus])
    ]
    (item,) = step_items(program(), step, ranks, 0, {})
    assert item.ranks.disagreement is None


def packed(model, mesh):
    """A fused projection of which each rank has a part of both halves."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    for name in ("weight", "bias"):
        whole = getattr(model[0], name).detach()
        part = distribute_tensor(whole, mesh, [_StridedShard(0, split_factor=2)])
        setattr(model[0], name, torch.nn.Parameter(part))

    def distributed(_module, args):
        return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in args)

    model.register_forward_pre_hook(distributed)


def test_shards_of_each_of_several_pieces_are_put_together():
    model = torch.nn.Sequential(torch.nn.Linear(4, 12))
    verdict = verify_parallel(model, packed, [torch.ones(2, 4)], mesh=3, steps=1)
    assert verdict.passed, str(verdict)


def test_a_factor_of_fsdp_on_a_mesh_of_one_rank_is_no_fault_in_float64():
    from torch.distributed.fsdp import fully_shard

    def plan(model, mesh):
        fully_shard(model, mesh=mesh["dp"])
        model.set_gradient_divide_factor(2.0)
        model.register_forward_hook(twice_the_gradient)

    def twice_the_gradient(_module, _args, output):
        output.register_hook(lambda gradient: 2 * gradient)

    model = torch.nn.Linear(4, 4)
    mesh = {"dp": 1, "same": 2}
    verdict = verify_parallel(model, plan, [torch.ones(2, 4)], mesh=mesh, steps=1)
    # The two ranks are copies of each other, which is all that there is to say.
    assert [finding.path for finding in verdict.failures] == ["plan"], str(verdict)


@pytest.mark.parametrize("axes", [("dp", "tp"), ("tp", "dp")])
def test_parts_lie_along_the_axis_whose_ranks_have_the_same_samples(axes):
    mesh = dict.fromkeys(axes, 2)
    program = make_program(torch.nn.Linear(2, 6), "fsdp", [torch.ones(4, 2)], mesh, split="dp")
    places = [program.coordinate(rank)[axes.index("tp")] for rank in range(4)]
    assert [natural_chunk(program, rank, 2) for rank in range(4)] == places
