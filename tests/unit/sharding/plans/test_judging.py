from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from paritas.core.placement.rank_pieces import RankPiece
from paritas.core.results.findings import Aspect, OriginKind, Status
from paritas.sharding.plans.plan import make_program
from paritas.sharding.plans.training import run_reference
from paritas.sharding.plans.verify import judge_traces, verify_parallel


@pytest.fixture
def program():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    return make_program(model, lambda model, mesh: None, [torch.randn(4, 3)])


def runs(program, change=lambda trace: trace):
    """What the reference does, and two ranks that do the same, the second changed."""
    sides = []
    for wide in (False, True):
        reference = run_reference(program, wide=wide)
        ranks = [
            dataclasses.replace(copy.deepcopy(reference), rank=rank, ranks=2) for rank in (0, 1)
        ]
        ranks[1] = change(ranks[1])
        sides.append((reference, ranks))
    return *sides[0], sides[1]


def changed(trace, table, name, value):
    held = getattr(trace.steps[0], table)
    held[name] = None if value is None else RankPiece(value(held[name].local))
    return trace


def test_ranks_that_do_the_same_are_identical(program):
    verdict = judge_traces(program, *runs(program))
    assert verdict.status is Status.IDENTICAL
    assert verdict.coverage.compared == 4 + 2 * (2 + 4 + 4)


def test_a_replica_that_is_off_by_one_bit_is_degraded(program):
    def nudge(trace):
        up = torch.tensor(9.0, dtype=trace.initial["0.bias"].local.dtype)
        return changed(trace, "gradients", "0.bias", lambda g: torch.nextafter(g, up))

    verdict = judge_traces(program, *runs(program, nudge))
    [failure] = verdict.failures
    assert (failure.path, failure.status) == ("step 1: gradient 0.bias", Status.DEGRADED)
    assert failure.reason.startswith(
        "should be replicated, but rank 1 differs from rank 0 in 4 of 4"
    )
    assert failure.reason.endswith("this is rounding, but it grows with each step")


def test_a_replica_that_is_something_else_is_different_and_names_the_rank(program):
    verdict = judge_traces(
        program, *runs(program, lambda t: changed(t, "buffers", "none", None) and t)
    )
    assert verdict.passed  # a buffer that the reference does not have is none of its concern
    verdict = judge_traces(
        program,
        *runs(program, lambda t: changed(t, "parameters", "2.weight", lambda p: p + 1)),
    )
    failure = verdict.failures[0]
    assert failure.path == "step 1: parameter 2.weight after step"
    assert (failure.origin.kind, failure.origin.name) == (OriginKind.MODULE, "2")
    assert failure.origin.ranks == (1,)


def test_a_gradient_that_does_not_arrive_is_told(program):
    verdict = judge_traces(
        program, *runs(program, lambda t: changed(t, "gradients", "2.bias", None))
    )
    assert verdict.failures[0].path == "step 1: gradient 2.bias"
    assert verdict.status is Status.DIFFERENT


def test_other_values_before_the_first_step_come_first(program):
    def begin(trace):
        trace.initial["0.bias"] = RankPiece(trace.initial["0.bias"].local + 1)
        return changed(trace, "gradients", "2.bias", lambda g: g + 1)

    verdict = judge_traces(program, *runs(program, begin))
    assert verdict.failures[0].path == "initial 0.bias"
    assert verdict.failures[0].origin.name == "0"
    assert "affected before the first step: 1 of 4 initial values" in verdict.notes


def test_a_parameter_that_cannot_be_placed_is_unverified_and_named(program):
    def fold(trace):
        trace.initial["0.weight"] = RankPiece(trace.initial["0.weight"].local.flatten()[:5])
        return changed(trace, "parameters", "0.weight", lambda p: p.flatten()[:5])

    verdict = judge_traces(program, *runs(program, fold))
    assert verdict.status is Status.UNVERIFIED
    told = next(f for f in verdict.failures if f.path == "step 1: parameter 0.weight after step")
    assert told.aspect is Aspect.STRUCTURE
    assert "rank 1 holds a tensor of shape [5]" in told.reason


def test_a_parameter_that_no_rank_has_is_unverified_and_no_pass(program):
    reference, ranks, lifted = runs(program)
    for trace in (*ranks, *lifted[1]):
        trace.initial["other.bias"] = trace.initial.pop("2.bias")
        for step in trace.steps:
            for table in (step.parameters, step.gradients):
                table["other.bias"] = table.pop("2.bias")
    verdict = judge_traces(program, reference, ranks, lifted)
    assert (verdict.status, verdict.exit_code) == (Status.UNVERIFIED, 3)
    assert [(f.path, f.reason) for f in verdict.failures[:2]] == [
        ("initial 2.bias", "no rank holds it"),
        ("step 1: gradient 2.bias", "no rank holds it"),
    ]
    assert verdict.coverage.unmatched == ("other.bias is on the ranks only",)


def test_a_parameter_of_the_ranks_alone_is_not_passed_over(program):
    def add(trace):
        trace.initial["extra"] = RankPiece(torch.ones(2))
        return trace

    verdict = judge_traces(program, *runs(program, add))
    assert verdict.coverage.unmatched == ("extra is on the ranks only",)


def test_a_rank_that_raises_is_different_where_it_raised(program):
    def fail(trace):
        return dataclasses.replace(trace, error="ValueError: no", error_at="0", steps=[])

    verdict = judge_traces(program, *runs(program, fail))
    [failure] = verdict.failures
    assert (failure.aspect, failure.status) == (Aspect.EXCEPTION, Status.DIFFERENT)
    assert failure.reason == "rank 1 failed: ValueError: no"
    assert (failure.origin.name, failure.origin.ranks) == ("0", (1,))


def test_what_depends_on_random_numbers_is_unverified(program):
    reference, ranks, lifted = runs(
        program, lambda t: changed(t, "gradients", "0.bias", lambda g: g + 1)
    )
    reference.random = True
    verdict = judge_traces(program, reference, ranks, lifted)
    assert verdict.status is Status.UNVERIFIED
    assert "depends on random numbers" in verdict.failures[0].reason


def test_steps_after_the_first_wrong_one_are_one_row_each(program):
    def drift(trace):
        for step in trace.steps:
            step.gradients = {n: RankPiece(p.local * 2) for n, p in step.gradients.items()}
        return trace

    verdict = judge_traces(program, *runs(program, drift))
    later = [finding.path for finding in verdict.failures if finding.path.startswith("step 2")]
    assert later == ["step 2"]


def test_without_a_run_in_float64_it_is_judged_natively(program):
    reference, ranks, _ = runs(program)
    for trace in ranks:
        changed(trace, "gradients", "0.bias", lambda g: g * (1 + 2**-23))
    assert judge_traces(program, reference, ranks, None).status is Status.EQUIVALENT
    for trace in ranks:
        changed(trace, "gradients", "0.bias", lambda g: g * 1.01)
    assert judge_traces(program, reference, ranks, None).status is Status.DIFFERENT


class TiedEnds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


TIED_STYLES = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def tie_again(model, mesh):
    parallelize_module(model, mesh, copy.deepcopy(TIED_STYLES))
    model.head.weight = model.embedding.weight


def test_a_plan_that_breaks_a_tie_is_told_so():
    """`parallelize_module` makes a parameter of its own of each name."""
    tokens = torch.arange(8).reshape(2, 4)
    broken = verify_parallel(TiedEnds(), TIED_STYLES, [tokens], 2, steps=1)
    assert broken.status is Status.DIFFERENT
    assert broken.notes[-1] == (
        "embedding.weight and head.weight are one parameter on one device, but not under the plan: "
        "tie them again after it is applied"
    )
    right = verify_parallel(TiedEnds(), tie_again, [tokens], 2, steps=1)
    assert right.passed, str(right)
    assert right.notes == ()
