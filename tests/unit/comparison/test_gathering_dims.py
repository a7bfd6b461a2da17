"""Parts that are put together as an annotation says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paritas.comparison.gathering import gather
from paritas.core.placement.meshes import coordinates_by_axis
from unit.comparison.shards import Ranks, numbers, only, refusal, same_bits


def test_zigzag_parts_come_back_in_order():
    whole = torch.arange(16.0).reshape(2, 8)
    chunks = whole.chunk(4, dim=1)
    ranks = Ranks()
    ranks.add(0, torch.cat([chunks[0], chunks[3]], dim=1))
    ranks.add(1, torch.cat([chunks[1], chunks[2]], dim=1))
    assert same_bits(only(ranks, "b s[cp:zigzag]", {"cp": 2}).read(ranks.read), whole)


@settings(max_examples=40)
@given(cp=st.integers(1, 4), sp=st.integers(1, 3), tp=st.integers(1, 3), length=st.integers(1, 3))
def test_zigzag_within_which_a_second_axis_splits_is_undone(cp, sp, tp, length):
    # Parts of the second axis may lie across the fold.
    whole = numbers(2 * cp * sp * length, 1, 2 * tp)
    ranks = Ranks()
    by_cp = [torch.cat([c[r], c[2 * cp - 1 - r]]) for c in [whole.chunk(2 * cp)] for r in range(cp)]
    for rank in range(cp * sp * tp):
        at = coordinates_by_axis(rank, {"tp": tp, "cp": cp, "sp": sp})
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
    assert "split a dimension over the axis, such as b[dp], or add # dp:replicated" in refusal(
        ranks, "t h", {"dp": 2}
    )
    assert same_bits(only(ranks, "t h # dp:replicated", {"dp": 2}).read(ranks.read), numbers(3, 4))


@pytest.mark.parametrize(
    ("dims", "mesh", "reason"),
    [
        ("b h[tp] x", {"tp": 2}, "has 3 dimensions, but rank 0 holds a tensor of shape (2, 3)"),
        ("b h[tpp]", {"tp": 2}, "unknown axis 'tpp'; did you mean tp?"),
        ("b[tp] h[cp]", {}, "give the mesh, such as --mesh cp=2,tp=2"),
        ("b h[cp:zigzag]", {"cp": 2}, "must all have the same even length, got 3, 3"),
        ("b 1", {"tp": 2}, "has a 1 where shape (2, 3) is longer"),
        ("b h[", {"tp": 2}, "not a dimension"),
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
