"""Parts of several ranks: put together bit for bit, or refused with the reason."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from paritas.comparison.gathering import held_part
from paritas.core.placement.assembly import ReplicasDisagreeError
from unit.comparison.shards import Ranks, gathered, numbers, only, refusal, same_bits

# --- recorded placements --------------------------------------------------------------------------


@st.composite
def distributions(draw):
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    axis = st.integers(0, len(shape) - 1)
    kinds = st.one_of(
        st.builds("shard({})".format, axis),
        st.builds("_S({}, {})".format, axis, st.integers(1, 3)),
        st.sampled_from(["replicate", "partial(sum)"]),
    )
    placements = [draw(kinds) for _ in mesh]
    return tuple(shape), tuple(mesh), tuple(placements)


@settings(max_examples=120)
@given(distributions())
def test_any_distribution_is_put_together_bit_for_bit(case):
    shape, mesh, placements = case
    whole = numbers(*shape)
    ranks = Ranks().distribute(whole, mesh, placements)
    operand = only(ranks)
    assert same_bits(operand.read(ranks.read), whole), operand.words
    assert operand.ranks == tuple(range(len(ranks.parts)))


@pytest.mark.parametrize(
    ("placements", "words"),
    [
        (("shard(1)", "replicate"), "dimension 1 over dp, replicated over tp"),
        (("shard(0)", "shard(0)"), "dimension 0 over dp, dimension 0 over tp"),
        (("partial(sum)", "shard(1)"), "dimension 1 over tp, summed over dp"),
        (("replicate", "replicate"), "replicated over dp and tp"),
    ],
)
def test_words_say_what_was_done(placements, words):
    ranks = Ranks().distribute(numbers(4, 6), (2, 2), placements)
    assert only(ranks).words == f"put together from ranks 0-3: {words}"


def test_a_recipe_can_be_sent_to_another_process():
    ranks = Ranks().distribute(numbers(4, 6), (2, 2), ("shard(1)", "partial(sum)"))
    operand = only(ranks)
    again = pickle.loads(pickle.dumps(operand))
    assert again == operand
    assert same_bits(again.read(ranks.read), numbers(4, 6))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]
)
def test_every_dtype_is_put_together(dtype):
    whole = torch.tensor([[0, 1, 2, 3], [1, 0, 4, 6]]).to(dtype)
    ranks = Ranks()
    for rank in (0, 1):
        ranks.add(rank, whole[:, 2 * rank : 2 * rank + 2].contiguous())
    found = only(ranks, "a b[tp]", {"tp": 2}).read(ranks.read)
    assert torch.equal(found.to(torch.complex64), whole.to(torch.complex64))
    assert found.dtype == dtype


def test_a_part_split_otherwise_than_torch_does_lies_where_its_offset_says():
    whole = numbers(7, 2)
    ranks = Ranks()
    for rank, (begin, end) in enumerate([(0, 2), (2, 7)]):
        ranks.distribute(whole, (2,), ("shard(0)",), leave_out={1 - rank})
        moved = replace(ranks.parts.pop().placement, global_offset=(begin, 0))
        ranks.add(rank, whole[begin:end], placement=moved)
    assert same_bits(only(ranks).read(ranks.read), whole)


def test_a_missing_rank_is_named():
    ranks = Ranks().distribute(numbers(6, 4), (3,), ("shard(0)",), leave_out={1})
    assert refusal(ranks) == ("1 of 3 parts are missing: rank 1 (dp 1). Recorded by ranks 0, 2")


def test_a_missing_term_of_a_sum_is_named():
    ranks = Ranks().distribute(
        numbers(6, 4), (2, 2), ("partial(sum)", "replicate"), leave_out={2, 3}
    )
    assert refusal(ranks) == "1 of 2 parts are missing: dp 1. Recorded by ranks 0-1"


def test_a_missing_copy_is_not_missed():
    ranks = Ranks().distribute(numbers(6, 4), (2, 2), ("replicate", "shard(0)"), leave_out={0})
    assert same_bits(only(ranks).read(ranks.read), numbers(6, 4))


def test_parts_that_overlap_are_refused():
    ranks = Ranks().distribute(numbers(6, 4), (2,), ("shard(0)",))
    second = ranks.parts[1]
    ranks.parts[1] = replace(second, placement=replace(second.placement, global_offset=(2, 0)))
    assert "overlap or leave gaps in a tensor of shape (6, 4)" in refusal(ranks)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"placements": ("nested(0)",)}, "unknown placement 'nested(0)'"),
        ({"placements": ("partial(norm)",)}, "cannot reduce values placed as partial(norm)"),
        ({"placements": ("shard(7)",)}, "shard(7) does not fit a tensor of 2 dimensions"),
        ({"mesh": (2, 2)}, "recorded an inconsistent placement"),
        ({"coordinate": (5,)}, "recorded an inconsistent placement"),
        ({"global_shape": (6, 4, 1)}, "recorded an inconsistent placement"),
        ({"global_offset": (5, 0)}, "is outside of (6, 4)"),
    ],
)
def test_a_placement_that_makes_no_sense_is_refused(change, reason):
    ranks = Ranks().distribute(numbers(6, 4), (2,), ("shard(0)",))
    ranks.parts = [
        replace(part, placement=replace(part.placement, **change)) for part in ranks.parts[:1]
    ]
    assert reason in refusal(ranks)


def test_groups_of_ranks_with_a_mesh_each_stay_apart():
    ranks = Ranks()
    wholes = [numbers(4, 2), numbers(4, 2) + 100]
    for group in (0, 1):
        single = Ranks().distribute(wholes[group], (2,), ("shard(0)",))
        for part in single.parts:
            ranks.add(2 * group + part.rank, single.read(part), placement=part.placement)
    found = gathered(ranks)
    assert [operand.ranks for operand in found] == [(0, 1), (2, 3)]
    for operand, whole in zip(found, wholes, strict=True):
        assert same_bits(operand.read(ranks.read), whole)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("avg", [2.0, 3.0]), ("max", [3.0, 5.0]), ("min", [1.0, 1.0]), ("product", [3.0, 5.0])],
)
def test_other_reductions_are_known(how, expected):
    ranks = Ranks().distribute(torch.zeros(2), (2,), (f"partial({how})",))
    ranks.values[0, 0] = torch.tensor([1.0, 5.0])
    ranks.values[1, 0] = torch.tensor([3.0, 1.0])
    assert only(ranks).read(ranks.read).tolist() == expected


def test_terms_are_summed_wide_and_rounded_once():
    ranks = Ranks()
    for rank, value in enumerate([1.0, 2.0**-9, 2.0**-9, 2.0**-9]):
        ranks.add(rank, torch.tensor([value], dtype=torch.bfloat16))
    found = only(ranks, "h[tp:partial]", {"tp": 4}).read(ranks.read)
    # One after the other in bfloat16, none of the small terms would be seen.
    assert found.tolist() == [1.0078125]
    assert found.dtype == torch.bfloat16


# --- copies ---------------------------------------------------------------------------------------


def test_copies_that_differ_are_a_difference_that_names_the_ranks():
    ranks = Ranks().distribute(numbers(4, 6), (2, 2), ("shard(1)", "replicate"))
    ranks.values[3, 0] = ranks.values[3, 0] + torch.tensor([0.0, 0.0, 0.5])
    with pytest.raises(ReplicasDisagreeError) as caught:
        only(ranks).read(ranks.read)
    assert caught.value.is_difference
    assert str(caught.value) == (
        "the value should be the same on these ranks: "
        "rank 3 differs from rank 2 in 4 of 12 elements, by at most 0.5"
    )
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.disagreements) == (str(caught.value), caught.value.disagreements)


def test_copies_that_differ_in_the_sign_of_a_zero_differ():
    ranks = Ranks().distribute(torch.zeros(3), (2,), ("replicate",))
    ranks.values[1, 0] = -torch.zeros(3)
    with pytest.raises(ReplicasDisagreeError, match="only in the signs of zeros"):
        only(ranks).read(ranks.read)


def test_all_that_differ_are_counted_and_a_few_are_told():
    ranks = Ranks().distribute(torch.zeros(3), (6,), ("replicate",))
    for rank in range(1, 6):
        ranks.values[rank, 0] = torch.full((3,), float(rank))
    with pytest.raises(ReplicasDisagreeError, match="and 2 more ranks") as caught:
        only(ranks).read(ranks.read)
    assert [one.rank for one in caught.value.disagreements] == [1, 2, 3, 4, 5]


def test_copies_whose_digests_agree_are_not_compared_again():
    ranks = Ranks().distribute(numbers(3), (2,), ("replicate",), digest="0123456789abcdef" * 2)
    ranks.values[1, 0] = ranks.values[1, 0].to("meta")  # no value that could be looked at
    assert same_bits(only(ranks).read(ranks.read), numbers(3))


# --- names, steps and ranks -----------------------------------------------------------------------


def test_what_nothing_is_said_of_stays_with_its_rank():
    ranks = Ranks()
    for rank in (0, 1):
        ranks.add(rank, torch.ones(2))
    found = gathered(ranks)
    assert [(one.ranks, one.recipe) for one in found] == [((0,), None), ((1,), None)]


def test_steps_and_names_are_not_mixed():
    ranks = Ranks()
    for step in (0, 1):
        for name in ("x", "y"):
            ranks.distribute(numbers(4) + step, (2,), ("shard(0)",), name=name, step=step)
    found = [(one.step, one.record.site.name) for one in gathered(ranks)]
    assert found == [(0, "x"), (0, "y"), (1, "x"), (1, "y")]


def test_dumps_are_split_alike_if_the_same_ranks_hold_the_same_parts():
    split = Ranks().distribute(numbers(4, 6), (2,), ("shard(0)",)).parts
    other = Ranks().distribute(numbers(4, 6), (2,), ("shard(1)",)).parts
    more = Ranks().distribute(numbers(4, 6), (4,), ("shard(0)",)).parts
    held = [set(map(held_part, parts)) for parts in (split, split[::-1], other, more, split[:1])]
    assert [one == held[0] for one in held] == [True, True, False, False, False]
