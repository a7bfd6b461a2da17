"""Split a tensor over a mesh of ranks and assemble it again, in all possible ways."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paritas.core.errors import UsageError
from paritas.core.placement.assembly import (
    ReplicasDisagreeError,
    join,
    positions,
    put,
    rank_bounds,
    reduce_terms,
    take,
)
from paritas.core.placement.placement import HeldPart, MeshAxis, Placement, Terms, split_tensor
from paritas.core.results.items import Partial, Replicate, Shard, read_role, role_word

SHAPE = (8, 6)
WHOLE = torch.arange(48.0, dtype=torch.float64).reshape(SHAPE)
TERMS = Terms(3, lifted=True)

shards = st.builds(
    Shard,
    st.integers(0, 1),
    pieces=st.integers(1, 3),
    cut=st.sampled_from(["balanced", "chunk"]),
    order=st.sampled_from(["natural", "zigzag"]),
)
roles = st.one_of(shards, st.just(Replicate()), st.just(Partial()))


def held(place):
    coordinates = itertools.product(*(range(axis.size) for axis in place.axes))
    return [HeldPart(rank, one, place.where(one)) for rank, one in enumerate(coordinates)]


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(1, 3), roles), min_size=1, max_size=3))
def test_what_is_split_in_any_way_is_put_together_again(axes):
    # Copies have to be of the same terms, not of others that were drawn for them.
    axes = sorted(axes, key=lambda axis: isinstance(axis[1], Replicate))
    named = tuple(MeshAxis(f"axis {at}", size, role) for at, (size, role) in enumerate(axes))
    place = Placement(named, SHAPE)
    # Of fewer elements than ranks a balanced split has nothing to give: that is refused.
    parts = [WHOLE]
    try:
        for axis in named:
            parts = [
                part
                for above in parts
                for part in split_tensor(above, axis.role, axis.size, TERMS, "it")
            ]
    except UsageError:
        return
    ranks = held(place)
    for part, rank in zip(parts, ranks, strict=True):
        assert tuple(part.shape) == tuple(sum(s.length for s in dim) for dim in rank.where)
    together = place.assembly(ranks).apply(parts)
    torch.testing.assert_close(together, WHOLE)


@pytest.mark.parametrize(
    ("cut", "expected"),
    [("balanced", [(0, 2), (2, 3), (3, 4)]), ("chunk", [(0, 2), (2, 4), (4, 4)])],
)
def test_the_two_cuts_differ_where_ranks_do_not_divide_the_size(cut, expected):
    assert [rank_bounds(4, rank, 3, cut=cut) for rank in range(3)] == expected
    halves = [rank_bounds(8, rank, 3, unit=2, cut=cut) for rank in range(3)]
    assert halves == [(2 * begin, 2 * end) for begin, end in expected]


def test_a_chunk_is_what_torch_gives():
    for size, ranks in itertools.product(range(1, 9), range(1, 6)):
        found = [rank_bounds(size, rank, ranks, cut="chunk") for rank in range(ranks)]
        lengths = [len(part) for part in torch.arange(size).chunk(ranks)]
        assert [end - begin for begin, end in found if end > begin] == lengths


@pytest.mark.parametrize("word", ["shard(0)", "shard(12)", "_S(1, 4)", "replicate", "partial(max)"])
def test_words_are_read_as_they_are_written(word):
    assert role_word(read_role(word)) == word


def test_an_unknown_word_has_no_role():
    assert read_role("_MaskPartial(offset_shape=None)") is None
    with pytest.raises(UsageError, match="unknown placement 'nested'"):
        Placement.parse(["nested"], [("tp", 2)], (4,))


def test_terms_are_rounded_once_or_at_each_step():
    terms = [torch.tensor([value], dtype=torch.float16) for value in (2048.0, 1.0, 1.0)]
    assert reduce_terms(terms, "sum", accumulate="wide").item() == 2050.0
    assert reduce_terms(terms, "sum", accumulate="own").dtype is torch.float16
    whole = [torch.tensor([1 + 2j]), torch.tensor([3 - 1j])]
    assert reduce_terms(whole, "sum", accumulate="wide").tolist() == [4 + 1j]
    with pytest.raises(UsageError, match=r"cannot reduce terms of torch\.int64 by avg"):
        reduce_terms([torch.tensor([1]), torch.tensor([2])], "avg", accumulate="wide")


def test_copies_are_compared_mixed_or_averaged():
    place = Placement((MeshAxis("dp", 2, Replicate()),), (2,))
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])]
    with pytest.raises(ReplicasDisagreeError, match="rank 1 differs from rank 0 in 1 of 2"):
        place.assembly(held(place)).apply(parts)
    assert join(parts, Replicate(), copies="mean").tolist() == [1.0, 3.0]
    mixed = join(parts, Replicate(), terms=TERMS)
    assert mixed[0] == 1.0
    assert mixed[1] not in (2.0, 4.0)
    with pytest.raises(ValueError, match="pass `terms`"):
        join(parts, Replicate())


@pytest.mark.parametrize("rows", [[0, 1, 2], [5, 0, 3], list(range(0, 4096, 2))])
def test_chosen_positions_are_taken_and_put_back(rows):
    whole = torch.randn(4096, 3, generator=torch.Generator().manual_seed(0))
    where = (positions(rows), positions([2, 0]))
    part = take(whole, where)
    assert torch.equal(part, whole[rows][:, [2, 0]])
    empty = torch.zeros_like(whole)
    put(empty, where, part)
    assert torch.equal(empty[rows][:, [2, 0]], part)
    assert empty.count_nonzero() == part.count_nonzero()
