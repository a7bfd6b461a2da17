"""Parts of several ranks: put together bit for bit, or refused with the reason."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from paritas.comparison.rank_axes import row_major
from paritas.comparison.shard_summaries import merge_sketches, merge_statistics
from paritas.comparison.sharding import ReplicasDisagreeError, gather, split_alike
from paritas.errors import UsageError
from paritas.numerics.sketch import sketch
from paritas.numerics.statistics import summarize
from unit.comparison.shards import Ranks


def numbers(*shape):
    """Whole numbers, all of them different."""
    count = torch.Size(shape).numel()
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).float().reshape(shape)


def gathered(ranks, dims=None, mesh=None, known=True):
    """All operands; `dims` for every record, ranks in row-major order on the mesh."""
    mesh = mesh or {}
    return gather(
        ranks.parts,
        dims_for=lambda _: dims,
        coordinates=lambda rank: row_major(mesh, rank) if mesh and known else None,
        mesh=mesh,
    )


def only(ranks, *given, **more):
    (operand,) = gathered(ranks, *given, **more)
    return operand


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


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


@settings(max_examples=120, deadline=None)
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
        (("shard(1)", "replicate"), "dimension 1 over dp, the same over tp"),
        (("shard(0)", "shard(0)"), "dimension 0 over dp, dimension 0 over tp"),
        (("partial(sum)", "shard(1)"), "dimension 1 over tp, summed over dp"),
        (("replicate", "replicate"), "the same over dp and tp"),
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


def refusal(ranks, *given, **more):
    operand = only(ranks, *given, **more)
    with pytest.raises(UsageError) as caught:
        operand.read(ranks.read)
    assert not isinstance(caught.value, ReplicasDisagreeError)
    return str(caught.value)


def test_a_missing_rank_is_named():
    ranks = Ranks().distribute(numbers(6, 4), (3,), ("shard(0)",), leave_out={1})
    assert refusal(ranks) == (
        "1 of 3 parts are missing: rank 1 (dp 1). It was recorded by ranks 0, 2"
    )


def test_a_missing_term_of_a_sum_is_named():
    ranks = Ranks().distribute(
        numbers(6, 4), (2, 2), ("partial(sum)", "replicate"), leave_out={2, 3}
    )
    assert refusal(ranks) == "1 of 2 parts are missing: dp 1. It was recorded by ranks 0-1"


def test_a_missing_copy_is_not_missed():
    ranks = Ranks().distribute(numbers(6, 4), (2, 2), ("replicate", "shard(0)"), leave_out={0})
    assert same_bits(only(ranks).read(ranks.read), numbers(6, 4))


def test_parts_that_overlap_are_refused():
    ranks = Ranks().distribute(numbers(6, 4), (2,), ("shard(0)",))
    second = ranks.parts[1]
    ranks.parts[1] = replace(second, placement=replace(second.placement, global_offset=(2, 0)))
    assert "overlap, or leave gaps in a whole of shape (6, 4)" in refusal(ranks)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"placements": ("nested(0)",)}, "the placement 'nested(0)' is not known"),
        ({"placements": ("partial(norm)",)}, "placed as partial(norm) cannot be reduced"),
        ({"placements": ("shard(7)",)}, "shard(7) is of a tensor of 2 dimensions"),
        ({"mesh": (2, 2)}, "makes no sense"),
        ({"coordinate": (5,)}, "makes no sense"),
        ({"global_shape": (6, 4, 1)}, "makes no sense"),
        ({"global_offset": (5, 0)}, "is not within (6, 4)"),
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
        "the value should be the same on these ranks, and is not: "
        "rank 3 differs from rank 2 in 4 of 12 elements, by at most 0.5"
    )
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.disagreements) == (str(caught.value), caught.value.disagreements)


def test_copies_that_differ_in_the_sign_of_a_zero_differ():
    ranks = Ranks().distribute(torch.zeros(3), (2,), ("replicate",))
    ranks.values[1, 0] = -torch.zeros(3)
    with pytest.raises(ReplicasDisagreeError, match="in the signs of zeros alone"):
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


# --- annotations ----------------------------------------------------------------------------------


def test_zigzag_parts_come_back_in_order():
    whole = torch.arange(16.0).reshape(2, 8)
    chunks = whole.chunk(4, dim=1)
    ranks = Ranks()
    ranks.add(0, torch.cat([chunks[0], chunks[3]], dim=1))
    ranks.add(1, torch.cat([chunks[1], chunks[2]], dim=1))
    assert same_bits(only(ranks, "b s[cp:zigzag]", {"cp": 2}).read(ranks.read), whole)


@settings(max_examples=40, deadline=None)
@given(cp=st.integers(1, 4), sp=st.integers(1, 3), tp=st.integers(1, 3), length=st.integers(1, 3))
def test_zigzag_within_which_a_second_axis_splits_is_undone(cp, sp, tp, length):
    # Parts of the second axis may lie across the fold.
    whole = numbers(2 * cp * sp * length, 1, 2 * tp)
    ranks = Ranks()
    by_cp = [torch.cat([c[r], c[2 * cp - 1 - r]]) for c in [whole.chunk(2 * cp)] for r in range(cp)]
    for rank in range(cp * sp * tp):
        at = row_major({"tp": tp, "cp": cp, "sp": sp}, rank)
        local = by_cp[at["cp"]].chunk(sp)[at["sp"]].chunk(tp, dim=2)[at["tp"]]
        ranks.add(rank, local)
    dims = "t[cp:zigzag,sp] 1 h[tp]"
    operand = only(ranks, dims, {"tp": tp, "cp": cp, "sp": sp})
    assert same_bits(operand.read(ranks.read), whole.squeeze(1))


def test_an_axis_that_goes_with_another_one_is_no_second_split():
    # Sequence parallelism has the ranks of tensor parallelism.
    whole = numbers(6, 2)
    ranks = Ranks()
    for rank in range(2):
        ranks.add(rank, whole[3 * rank : 3 * rank + 3])
    (operand,) = gather(
        ranks.parts,
        dims_for=lambda _: "t[sp] h # tp:replicated",
        coordinates=lambda rank: {"tp": rank, "sp": rank},
        mesh={"tp": 2, "sp": 2},
    )
    assert same_bits(operand.read(ranks.read), whole)


def test_a_single_axis_is_that_of_all_ranks():
    whole = numbers(2, 6)
    ranks = Ranks()
    for rank, part in enumerate(whole.chunk(3, dim=1)):
        ranks.add(rank, part)
    assert same_bits(only(ranks, "b h[tp]").read(ranks.read), whole)


def test_of_several_data_parallel_ranks_the_one_with_values_counts():
    ranks = Ranks()
    ranks.add(0, torch.zeros(0, 4))
    ranks.add(1, numbers(3, 4))
    operand = only(ranks, "t h", {"dp": 2})
    assert same_bits(operand.read(ranks.read), numbers(3, 4))
    ranks.parts.clear()
    ranks.add(0, numbers(3, 4))
    ranks.add(1, numbers(3, 4))
    assert "split a dimension over it, as b[dp], or add # dp:replicated" in refusal(
        ranks, "t h", {"dp": 2}
    )
    assert same_bits(only(ranks, "t h # dp:replicated", {"dp": 2}).read(ranks.read), numbers(3, 4))


@pytest.mark.parametrize(
    ("dims", "mesh", "reason"),
    [
        ("b h[tp] x", {"tp": 2}, "names 3 dimensions, and rank 0 holds a tensor of shape (2, 3)"),
        ("b h[tpp]", {"tp": 2}, "nothing is known of the axis 'tpp'; did you mean tp?"),
        ("b[tp] h[cp]", {}, "give the mesh, as cp=2,tp=2"),
        ("b h[cp:zigzag]", {"cp": 2}, "of one even length, and are of 3, 3"),
        ("b 1", {"tp": 2}, "has a 1 for a dimension of the shape (2, 3)"),
        ("b h[", {"tp": 2}, "this is no dimension"),
        ("b h[tp]", {"tp": 4}, "parts are missing: rank 2 (tp 2); rank 3 (tp 3)"),
    ],
)
def test_parts_that_are_not_as_the_annotation_says_are_refused(dims, mesh, reason):
    ranks = Ranks()
    for rank in (0, 1):
        ranks.add(rank, torch.ones(2, 3))
    assert reason in refusal(ranks, dims, mesh)


def test_parts_of_different_dtypes_are_refused():
    ranks = Ranks()
    ranks.add(0, torch.ones(2))
    ranks.add(1, torch.ones(2).double())
    reason = refusal(ranks, "h[tp]", {"tp": 2})
    assert reason == "the ranks hold different dtypes: rank 0 torch.float32, rank 1 torch.float64"


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
    assert split_alike(split, list(reversed(split)))
    assert not split_alike(split, other)
    assert not split_alike(split, more)
    assert not split_alike(split, split[:1])


# --- what is left of values -----------------------------------------------------------------------


@pytest.mark.parametrize("placements", [("shard(0)", "shard(1)"), ("shard(1)", "replicate")])
def test_statistics_of_parts_add_up_to_those_of_the_whole(placements):
    whole = numbers(6, 8) - 20
    whole[2, 3], whole[5, 5] = torch.nan, torch.inf
    ranks = Ranks().distribute(whole, (2, 2), placements)
    plan = only(ranks).recipe
    merged = merge_statistics(plan, [summarize(ranks.read(part)) for part in ranks.parts])
    expected = summarize(whole)
    assert merged.exact
    assert merged.statistics.mean == pytest.approx(expected.mean, rel=1e-14)
    assert merged.statistics.l2 == pytest.approx(expected.l2, rel=1e-14)
    for name in ("count", "minimum", "maximum", "zeros", "nans", "exponents"):
        assert getattr(merged.statistics, name) == getattr(expected, name)


def test_of_the_statistics_of_terms_the_mean_is_left_and_words_say_so():
    ranks = Ranks().distribute(numbers(6, 8), (2,), ("partial(sum)",))
    parts = [summarize(ranks.read(part)) for part in ranks.parts]
    merged = merge_statistics(only(ranks).recipe, parts)
    assert merged.statistics.mean == pytest.approx(summarize(numbers(6, 8)).mean)
    assert (merged.statistics.l2, merged.statistics.maximum, merged.exact) == (None, None, False)
    assert merged.limits == "of the statistics of terms only the mean is that of their sum"


def test_statistics_of_copies_must_agree():
    ranks = Ranks().distribute(numbers(6), (2,), ("replicate",))
    parts = [summarize(numbers(6)), summarize(numbers(6) + 1)]
    with pytest.raises(ReplicasDisagreeError, match="rank 1 differs from rank 0 in its statistics"):
        merge_statistics(only(ranks).recipe, parts)


@pytest.mark.parametrize("placements", [("shard(0)", "shard(1)"), ("shard(1)", "partial(sum)")])
def test_sketches_of_placed_parts_add_up(placements):
    whole = numbers(6, 8)
    ranks = Ranks().distribute(whole, (2, 2), placements)
    parts = [
        sketch(
            ranks.read(part),
            global_shape=part.placement.global_shape,
            global_offset=part.placement.global_offset,
        )
        for part in ranks.parts
    ]
    torch.testing.assert_close(merge_sketches(only(ranks).recipe, parts), sketch(whole))


def test_sketches_of_parts_that_did_not_know_their_place_do_not_add_up():
    ranks = Ranks()
    for rank in (0, 1):
        ranks.add(rank, numbers(4))
    plan = only(ranks, "h[tp]", {"tp": 2}).recipe
    with pytest.raises(UsageError, match="without their place in the whole"):
        merge_sketches(plan, [sketch(numbers(4))] * 2)
