from __future__ import annotations

import pytest
import torch

from drawing import normal64
from paritas.core.numerics.gates import Near
from paritas.core.placement.rank_pieces import RankPiece
from paritas.sharding.plans.locating import WatchedStep, locate_forward
from paritas.sharding.plans.plan import make_program
from paritas.sharding.plans.relating import Relation, relate
from paritas.sharding.plans.traces import ModuleCall, StepTrace

NEAR = Near(2.0**-53)


def program(split=(), mesh=2):
    return make_program(
        torch.nn.Linear(2, 2), lambda model, mesh: None, [torch.ones(4, 2)], mesh, split=split
    )


def relation(values, whole, split=(), factors=(1.0,)):
    pieces = {rank: RankPiece(value) for rank, value in enumerate(values)}
    samples = {0: (0, 2), 1: (2, 4)} if split else dict.fromkeys(pieces)
    return relate(program(split), samples, pieces, whole, NEAR, factors)


def test_the_whole_a_shard_and_a_term_are_legitimate():
    whole, term = normal64(4, 6), normal64(4, 6, seed=1)
    assert relation([whole, whole], whole).relation is Relation.WHOLE
    assert relation(whole.chunk(2, 1), whole).relation is Relation.SHARD
    assert relation([term, whole - term], whole).relation is Relation.PARTIAL


def test_rows_picked_from_all_over_are_a_shard():
    whole = normal64(4, 6)
    parts = [whole[:, [0, 2, 4]], whole[:, [1, 3, 5]]]
    assert relation(parts, whole).relation is Relation.SHARD


def test_a_rank_s_own_samples_are_legitimate_where_the_batch_is_split():
    whole = normal64(4, 6)
    assert relation(whole.chunk(2), whole, split="ranks").relation is Relation.WHOLE
    doubled = [2 * part for part in whole.chunk(2)]
    assert relation(doubled, whole, "ranks", (2.0, 1.0)).relation is Relation.WHOLE
    assert relation(doubled, whole, "ranks").relation is Relation.WRONG


def test_another_rank_s_shard_and_a_wrong_rank_are_told():
    whole = normal64(4, 6)
    left, right = whole.chunk(2, 1)
    assert relation([right, left], whole).relation is Relation.PERMUTED
    found = relation([whole, whole + 1], whole)
    assert (found.relation, found.ranks) == (Relation.WRONG, (1,))


def test_what_cannot_be_related_accuses_nobody():
    assert relation([normal64(3), normal64(3)], normal64(4, 6)).relation is Relation.UNKNOWN


def seen(names, reference, ranks):
    """Calls of modules by those names, with their values on one device and on each rank."""

    def step(values):
        calls = [
            ModuleCall(name, "Kind", {"": RankPiece(value)})
            for name, value in zip(names, values, strict=True)
        ]
        return StepTrace(modules=calls)

    steps = {rank: step(values) for rank, values in enumerate(ranks)}
    return WatchedStep(program(), step(reference), steps, dict.fromkeys(steps), 2.0**-53)


def test_the_first_module_that_is_wrong_is_named():
    a, b, c = (normal64(4, 6, seed=n) for n in range(3))
    found = locate_forward(seen("abc", [a, b, c], [[a, b + 1, c + 1], [a, b, c + 1]]))
    assert (found.module, found.kind, found.related.ranks) == ("b", "Kind", (0,))


def test_a_sum_that_somebody_takes_is_no_fault():
    a, b, term = (normal64(4, 6, seed=n) for n in range(3))
    assert locate_forward(seen("ab", [a, b], [[term, b], [a - term, b]])) is None


def test_a_sum_that_nobody_takes_is_the_fault_of_the_module_that_gave_the_terms():
    a, b, c, term = (normal64(4, 6, seed=n) for n in range(4))
    ranks = [[a, term, c + 1], [a, b - term, c + 2]]
    found = locate_forward(seen("abc", [a, b, c], ranks))
    assert found.module == "b"
    assert found.words == "the output of b is one rank's term of a sum that is never reduced"


@pytest.mark.parametrize("made", ["one term", "twice the sum"])
def test_a_sum_that_is_taken_wrongly_is_the_fault_of_the_module_that_takes_it(made):
    a, term = normal64(4, 6), normal64(4, 6, seed=1)
    both = term if made == "one term" else 2 * a
    found = locate_forward(seen(["up", "block"], [a, a], [[term, both], [a - term, both]]))
    assert found.module == "block"
    assert torch.equal(found.parts[0], term)
