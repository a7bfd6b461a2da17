from __future__ import annotations

import dataclasses

import pytest
import torch
from msgspec.structs import replace

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


def test_shards_lie_where_their_offsets_say_also_if_uneven():
    pieces = {0: shard(WHOLE[:4], (0, 0)), 1: shard(WHOLE[4:], (4, 0), coordinate=(1,))}
    assert torch.equal(assemble(pieces, WHOLE.shape).value, WHOLE)


def test_terms_are_added_up_over_the_axis_on_which_they_are_partial():
    pieces = {
        rank: shard(
            WHOLE[3 * half : 3 * half + 3] * share,
            (3 * half, 0),
            placements=("partial(sum)", "shard(0)"),
            mesh=(2, 2),
            coordinate=(place, half),
        )
        for rank, (place, half, share) in enumerate(
            [(0, 0, 0.25), (0, 1, 0.25), (1, 0, 0.75), (1, 1, 0.75)]
        )
    }
    together = assemble(pieces, WHOLE.shape)
    assert torch.equal(together.value, WHOLE)
    assert together.disagreement is None


def test_an_average_and_an_extreme_are_reduced_as_such():
    for operator, terms in (("avg", (0.5, 1.5)), ("max", (1.0, 0.5)), ("min", (1.0, 2.0))):
        pieces = {
            rank: shard(
                WHOLE * term, (0, 0), placements=(f"partial({operator})",), coordinate=(rank,)
            )
            for rank, term in enumerate(terms)
        }
        assert torch.equal(assemble(pieces, WHOLE.shape).value, WHOLE), operator


def test_replicas_that_differ_by_one_bit_are_told_with_their_ranks():
    other = WHOLE.clone()
    other[5, 1] = torch.nextafter(other[5, 1], torch.tensor(99.0))
    pieces = {rank: RankPiece(value) for rank, value in enumerate([WHOLE, WHOLE, other])}
    together = assemble(pieces, WHOLE.shape)
    assert str(together.disagreement).startswith(
        "rank 2 differs from rank 0 in 1 of 12 elements, by at most "
    )
    assert torch.equal(together.value, WHOLE)


def test_replicas_with_the_same_nans_agree():
    value = WHOLE.clone()
    value[0] = float("nan")
    together = assemble({0: RankPiece(value), 1: RankPiece(value.clone())}, WHOLE.shape)
    assert together.disagreement is None


def test_elements_that_no_rank_holds_are_a_fault():
    together = assemble({0: shard(WHOLE[:4], (0, 0))}, WHOLE.shape)
    assert together.value is None
    assert together.fault == "4 of 12 elements are on no rank"


def test_a_plain_tensor_of_another_shape_is_not_guessed_at():
    together = assemble({0: RankPiece(torch.ones(5))}, (6, 2))
    assert together.fault == (
        "rank 0 holds a tensor of shape [5], and which part of [6, 2] it is cannot be known"
    )


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


def test_a_part_of_each_of_several_pieces_lies_where_its_words_say():
    # Split over the inner axis first: of rows 0 to 5 the ranks have 0, 3 and so on.
    words, place = ("_S(0, 3)", "shard(0)"), [(0, 0), (0, 1), (1, 0), (1, 1)]
    rows = [[0, 2], [4], [1, 3], [5]]
    pieces = {
        rank: shard(WHOLE[own], (own[0], 0), placements=words, mesh=(2, 2), coordinate=place[rank])
        for rank, own in enumerate(rows)
    }
    together = assemble(pieces, WHOLE.shape)
    assert torch.equal(together.value, WHOLE)
    assert together.disagreement is None


def test_a_placement_that_is_not_known_is_not_taken_for_a_replica():
    pieces = {r: shard(WHOLE, (0, 0), placements=("masked",), coordinate=(r,)) for r in (0, 1)}
    together = assemble(pieces, WHOLE.shape)
    assert (together.value, together.fault) == (None, "unknown placement 'masked'")


def test_whole_numbers_have_no_average():
    pieces = {
        rank: shard(WHOLE.long(), (0, 0), placements=("partial(avg)",), coordinate=(rank,))
        for rank in (0, 1)
    }
    together = assemble(pieces, WHOLE.shape)
    assert (together.value, together.fault) == (None, "cannot reduce terms of torch.int64 by avg")


def test_complex_terms_are_added_up_in_twice_the_digits():
    terms = [torch.full((6, 2), value, dtype=torch.complex64) for value in (1.0, 1e8, -1e8)]
    pieces = {
        rank: shard(term, (0, 0), placements=("partial(sum)",), mesh=(3,), coordinate=(rank,))
        for rank, term in enumerate(terms)
    }
    together = assemble(pieces, WHOLE.shape)
    assert torch.equal(together.value, torch.ones(6, 2, dtype=torch.complex64))


def test_a_rank_outside_of_the_mesh_holds_nothing():
    pieces = {0: shard(WHOLE, (0, 0), mesh=(1,)), 1: shard(WHOLE[:0], (6, 0), mesh=(1,))}
    outside = dataclasses.replace(pieces[1], placement=replace(pieces[1].placement, coordinate=()))
    assert torch.equal(assemble({0: pieces[0], 1: outside}, WHOLE.shape).value, WHOLE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_zeros_of_either_sign_are_not_the_same(dtype):
    zeros = torch.zeros(6, 2, dtype=dtype)
    other = zeros.clone()
    other[1, 0] = -other[1, 0]
    together = assemble({0: RankPiece(zeros), 1: RankPiece(other)}, zeros.shape)
    assert str(together.disagreement) == (
        "rank 1 differs from rank 0 in 1 of 12 elements, only in the signs of zeros"
    )


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
