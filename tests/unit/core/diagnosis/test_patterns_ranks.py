from __future__ import annotations

import pytest
import torch

from drawing import normal64
from paritas.core.diagnosis.case import Case, Context
from paritas.core.diagnosis.diagnose import ACROSS_RANKS, rank_patterns
from paritas.core.diagnosis.stating import CONFIDENCE


def case(item, expected, value, *, mesh=None, **more):
    context = Context(world=mesh or {"dp": 4}, item=item, unit=2.0**-53, **more)
    return Case(value, expected, context=context)


def best(*args, **more):
    return next(iter(rank_patterns(case(*args, **more), ACROSS_RANKS)), None)


@pytest.mark.parametrize(
    ("factor", "name"),
    [
        (4.0, "the number of ranks"),
        (0.25, "1 / the number of ranks"),
        (16.0, "the square of the number of ranks"),
    ],
)
def test_a_factor_is_called_by_what_it_is_in_the_mesh(factor, name):
    expected = normal64(3, 5)
    pattern = best("gradient", expected, expected * factor)
    assert (pattern.kind, pattern.evidence["equals"]) == ("scale", name)


def test_a_factor_that_is_the_size_of_one_axis_names_the_axis():
    expected = normal64(3, 5)
    pattern = best("gradient", expected, expected * 3, mesh={"dp": 2, "tp": 3})
    assert pattern.sentence == (
        "3 times the reference, which is the number of ranks along tp: summed over ranks instead "
        "of averaged, or reduced once too often"
    )


def test_a_module_that_gives_the_sum_of_sums_was_reduced_twice():
    expected = normal64(3, 5)
    pattern = best("module", expected, expected * 4)
    assert "all-reduced once too often" in pattern.sentence


def test_one_number_is_only_explained_by_a_size_of_the_mesh():
    expected = torch.tensor(0.3, dtype=torch.float64)
    assert best("loss", expected, expected * 1.7) is None
    assert best("loss", expected, expected * 4).evidence["factor"] == pytest.approx(4)


@pytest.mark.parametrize(("operator", "share"), [("sum", 1.0), ("mean", 4.0)])
def test_terms_that_were_never_reduced_name_the_missing_collective(operator, share):
    terms = [normal64(3, 5, seed=seed) for seed in range(4)]
    expected = torch.stack(terms).sum(0) / share
    pattern = best("gradient", expected, terms[0], held=dict(enumerate(terms)))
    assert (pattern.kind, pattern.evidence["operator"]) == ("missing reduction", operator)
    assert f"an all-reduce ({operator}) over the 4 ranks is missing" in pattern.sentence


def test_a_bias_that_every_rank_adds_is_named():
    expected, bias = normal64(3, 5), normal64(5, seed=1)
    pattern = best("module", expected, expected + 3 * bias, biases={"down.bias": bias})
    assert pattern.kind == "repeated bias"
    assert pattern.sentence.startswith("the difference is 3 x down.bias: each of the 4 ranks adds")


def test_a_bias_that_nobody_adds_is_named():
    expected, bias = normal64(3, 5), normal64(5, seed=1)
    pattern = best("module", expected, expected - bias, biases={"down.bias": bias})
    assert pattern.kind == "missing bias"


def test_terms_are_recognised_behind_a_bias_that_is_added_to_each():
    terms, bias = [normal64(3, 5, seed=seed) for seed in range(4)], normal64(5, seed=9)
    held = {rank: term + bias for rank, term in enumerate(terms)}
    expected = torch.stack(terms).sum(0) + bias
    pattern = best("module", expected, held[0], held=held, added={"down.bias": bias})
    assert pattern.kind == "missing reduction"
    assert pattern.sentence.startswith("apart from down.bias, the ranks' values add up")


def test_one_rank_s_term_in_place_of_the_sum_is_recognised():
    terms = {rank: normal64(3, 5, seed=rank) for rank in range(4)}
    expected = torch.stack(list(terms.values())).sum(0)
    pattern = best("module", expected, terms[2], summands=terms)
    assert (pattern.kind, pattern.evidence["rank"]) == ("one rank's part", 2)


def test_parts_in_another_order_name_whose_they_are():
    expected = normal64(8, 3)
    value = expected.chunk(4)
    swapped = torch.cat([value[0], value[2], value[1], value[3]])
    pattern = best("initial", expected, swapped)
    assert pattern.sentence == (
        "part 1 of 4 along dim 0 is what part 2 should be: rank 1 holds the shard of rank 2"
    )


def test_parts_that_every_rank_has_joined_in_another_order_are_told():
    expected = normal64(3, 8)
    backwards = torch.cat(expected.chunk(4, 1)[::-1], 1)
    pattern = best("module", expected, backwards, held=dict.fromkeys(range(4), backwards))
    assert pattern.kind == "wrong rank's shard"
    assert pattern.sentence == (
        "part 0 of 4 along dim 1 is what part 3 should be: the ranks' parts are joined in the "
        "order 3, 2, 1, 0"
    )


def test_sums_over_some_of_the_ranks_name_the_groups():
    terms = [normal64(3, 5, seed=seed) for seed in range(4)]
    total = torch.stack(terms).sum(0)
    some = total - terms[3]
    pattern = best("module", total, some, held={0: some, 1: some, 2: some, 3: terms[3]})
    assert (pattern.kind, pattern.evidence["groups"]) == (
        "missing reduction",
        "(0, 1, 2) and (3)",
    )


def test_a_sum_along_the_wrong_axis_names_both():
    # Rank (d, t) has the term of t for the samples of d.
    places = [(d, t) for d in (0, 1) for t in (0, 1)]
    terms = {(d, t): normal64(3, 5, seed=2 * d + t) for d, t in places}
    wholes = {n: terms[d, 0] + terms[d, 1] for n, (d, _) in enumerate(places)}
    held = {n: terms[0, t] + terms[1, t] for n, (_, t) in enumerate(places)}
    pattern = best(
        "module",
        wholes[0],
        held[0],
        mesh={"dp": 2, "tp": 2},
        held={0: held[0], 1: held[1]},
        everywhere=held,
        wholes=wholes,
    )
    assert (pattern.kind, pattern.evidence["axis"], pattern.evidence["due"]) == (
        "wrong axis",
        "dp",
        "tp",
    )


def test_terms_along_one_of_two_axes_name_that_axis():
    own = [normal64(3, 5), normal64(3, 5, seed=1)]
    held = {0: own[0], 1: own[0], 2: own[1], 3: own[1]}
    pattern = best("gradient", sum(own) / 2, own[0], mesh={"dp": 2, "tp": 2}, held=held)
    assert "an all-reduce (mean) over the ranks along dp is missing" in pattern.sentence


def test_equal_parts_are_in_no_order():
    expected = torch.ones(8, dtype=torch.float64)
    assert best("initial", expected, expected.clone()) is None


def test_a_value_that_is_still_an_earlier_one_is_stale_on_the_ranks_that_have_it():
    initial, expected = normal64(5), normal64(5, seed=1)
    pattern = best(
        "buffer",
        expected,
        initial,
        held={0: expected, 1: initial},
        earlier={"the initial value": initial},
    )
    assert pattern.sentence == "it is still the initial value on rank 1: never updated there"


def test_a_count_that_stands_still_is_stale_too():
    pattern = best(
        "buffer", torch.tensor(1), torch.tensor(0), earlier={"the initial value": torch.tensor(0)}
    )
    assert pattern.kind == "stale"


def test_the_confidence_is_one_that_was_counted():
    expected = normal64(3, 5)
    stated = {share for share, *_ in CONFIDENCE.values()}
    assert best("gradient", expected, expected * 4).confidence in stated
    one = torch.tensor(0.3, dtype=torch.float64)
    assert (
        best("loss", one, one * 4).confidence < best("gradient", expected, expected * 4).confidence
    )


def test_zeros_are_called_zeros():
    assert best("gradient", normal64(3, 5), torch.zeros(3, 5, dtype=torch.float64)).kind == "zeros"


def test_nothing_is_claimed_where_nothing_fits():
    assert best("gradient", normal64(3, 5), normal64(3, 5, seed=1)) is None
    expected = normal64(3, 5)
    nearly = expected * 4
    nearly[0, 0] += 1e-3
    assert best("gradient", expected, nearly) is None
