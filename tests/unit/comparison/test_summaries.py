"""Statistics and sketches of parts: what they say of the whole."""

from __future__ import annotations

import pytest
import torch

from paritas.comparison.operands import merge_sketches, merge_statistics
from paritas.core.errors import UsageError
from paritas.core.numerics.sketch import sketch
from paritas.core.numerics.statistics import summarize
from paritas.core.placement.assembly import ReplicasDisagreeError
from unit.comparison.shards import Ranks, numbers, only


@pytest.mark.parametrize("placements", [("shard(0)", "shard(1)"), ("shard(1)", "replicate")])
def test_statistics_of_parts_add_up_to_those_of_the_whole(placements):
    whole = numbers(6, 8) - 20
    whole[2, 3], whole[5, 5] = torch.nan, torch.inf
    ranks = Ranks().distribute(whole, (2, 2), placements)
    plan = only(ranks).recipe
    merged, limits = merge_statistics(plan, [summarize(ranks.read(part)) for part in ranks.parts])
    expected = summarize(whole)
    assert not limits
    assert merged.mean == pytest.approx(expected.mean, rel=1e-14)
    assert merged.l2 == pytest.approx(expected.l2, rel=1e-14)
    for name in ("count", "minimum", "maximum", "zeros", "nans", "exponents"):
        assert getattr(merged, name) == getattr(expected, name)


def test_of_the_statistics_of_terms_the_mean_is_left_and_words_say_so():
    ranks = Ranks().distribute(numbers(6, 8), (2,), ("partial(sum)",))
    parts = [summarize(ranks.read(part)) for part in ranks.parts]
    merged, limits = merge_statistics(only(ranks).recipe, parts)
    assert merged.mean == pytest.approx(summarize(numbers(6, 8)).mean)
    assert (merged.l2, merged.maximum) == (None, None)
    assert limits == "only the mean of the sum over ranks can be derived from statistics"


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
    with pytest.raises(UsageError, match="do not contain each part's position in the whole"):
        merge_sketches(plan, [sketch(numbers(4))] * 2)
