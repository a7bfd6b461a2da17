"""What ranks hold of a value, put together."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from msgspec.structs import replace

from paritas.core.placement.rank_pieces import RankPiece, assemble
from paritas.core.results.items import LocalPlacement

WHOLE = torch.arange(12.0).reshape(6, 2)


def shard(local, offset, *, placements=("shard(0)",), mesh=(2,), coordinate=(0,)):
    place = LocalPlacement(
        mesh=mesh,
        coordinate=coordinate,
        placements=placements,
        global_shape=tuple(WHOLE.shape),
        global_offset=offset,
    )
    return RankPiece(local, place)


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
