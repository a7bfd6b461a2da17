"""Real ranks: processes with gloo, and threads."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from integration import rank_programs as programs
from paritas.core.errors import UsageError
from paritas.core.operators.calls import OperatorCall
from paritas.core.placement.placement import Group, Recipe
from paritas.core.results.findings import Status
from paritas.core.results.items import Once, Partial, Replicate, Shard
from paritas.sharding.operators import nnscaler_functions
from paritas.sharding.operators.annotation import Annotation, Option
from paritas.sharding.operators.ranks.threads import check_on_threads, confirm_on_gloo
from paritas.sharding.operators.recipe_checks import check_recipe
from paritas.sharding.plans import rank_pool
from paritas.sharding.plans.rank_pool import LostRankError, RankPool, close_pools, warm_pool
from quality.partition_corpus import RIGHT
from quality.partition_corpus_wrong import WRONG

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _forked_ranks():
    """A parallel test runner has a thread that only listens; new interpreters would take long."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.accelerator.is_available():
            patch.setattr(rank_pool, "start_method", lambda: "fork")
        yield
        close_pools()


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def linear(dtype=torch.float32):
    shapes = ((4, 6), (8, 6), (8,))
    args = tuple(randn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))
    return OperatorCall(F.linear, args, {}, "torch.nn.functional.linear")


def call(function, *args, **kwargs):
    return OperatorCall(function, args, kwargs, f"torch.{function.__name__}")


ROWS = ((0, Shard(1)), (1, Shard(1)))
PAIRS = {
    "batch": (linear(), Recipe(((0, Shard(0)),), (Shard(0),)), True),
    "batch, uneven": (call(torch.neg, randn(5, 2)), Recipe(((0, Shard(0)),), (Shard(0),)), True),
    "columns": (linear(), Recipe(((1, Shard(0)), (2, Shard(0))), (Shard(1),)), True),
    "rows, bias once": (linear(), Recipe((*ROWS, (2, Once())), (Partial("sum"),)), True),
    "rows, bias per rank": (linear(), Recipe(ROWS, (Partial("sum"),)), False),
    "bfloat16 rows": (
        linear(torch.bfloat16),
        Recipe((*ROWS, (2, Once())), (Partial("sum"),)),
        True,
    ),
    "flip": (call(torch.flip, randn(4, 6), (1,)), Recipe(((0, Shard(1)),), (Shard(1),)), False),
    "amax": (call(torch.amax, randn(4, 6), 1), Recipe(((0, Shard(1)),), (Partial("max"),)), True),
    "mean": (call(torch.mean, randn(4, 6), 1), Recipe(((0, Shard(1)),), (Partial("avg"),)), True),
    "mean as sum": (
        call(torch.mean, randn(4, 6), 1),
        Recipe(((0, Shard(1)),), (Partial("sum"),)),
        False,
    ),
    "prod": (
        call(torch.prod, randn(4, 6), 1),
        Recipe(((0, Shard(1)),), (Partial("product"),)),
        True,
    ),
    "terms": (call(torch.neg, randn(4, 6)), Recipe(((0, Partial()),), (Partial("sum"),)), True),
    "terms through relu": (
        call(torch.relu, randn(4, 6)),
        Recipe(((0, Partial()),), (Partial("sum"),)),
        False,
    ),
    "all the same": (call(torch.neg, randn(4, 6)), Recipe((), (Replicate(),)), True),
    "said to be the same": (
        call(torch.neg, randn(4, 6)),
        Recipe(((0, Shard(0)),), (Replicate(),)),
        False,
    ),
    "booleans": (call(torch.isnan, randn(4, 6)), Recipe(((0, Shard(0)),), (Shard(0),)), True),
    "two results": (
        call(torch.sort, randn(4, 6)),
        Recipe(((0, Shard(0)),), (Shard(0), Shard(0))),
        True,
    ),
    "written to": (
        call(torch.Tensor.mul_, randn(4, 6), 2.0),
        Recipe(((0, Shard(0)),), (Shard(0),)),
        True,
    ),
    "a gradient that is a term": (
        linear(),
        Recipe(((0, Shard(0)), (1, Replicate(summed=False))), (Shard(0),)),
        False,
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PAIRS)
def test_processes_and_one_process_give_the_same_verdict(name):
    operator, recipe, right = PAIRS[name]
    here, there = check_recipe(operator, recipe), confirm_on_gloo(operator, recipe)
    assert (here.passed, there.passed) == (right, right), f"{here}\n{there}"
    assert [finding.path for finding in here.findings] == [f.path for f in there.findings]


def test_the_two_agree_on_the_corpus():
    """Every thirteenth rule, or all with `PARITAS_WHOLE_CORPUS`: see tests/README.md."""
    differ = []
    every = 1 if os.environ.get("PARITAS_WHOLE_CORPUS") == "1" else 13
    for case in [*RIGHT, *WRONG][::every]:
        operator = case.make(torch.float32)
        there = confirm_on_gloo(operator, case.recipe)
        if check_recipe(operator, case.recipe).passed != there.passed:
            differ.append(f"{case.name}: {there}")
    assert differ == []


@pytest.mark.parametrize("group", ["", " ; process_group=ranks(n)"])
def test_batch_norm_by_samples_is_right_where_real_ranks_exchange_statistics(group):
    vectors = [randn(2), randn(2), randn(2), torch.rand(2) + 0.5]
    operator = OperatorCall(
        nnscaler_functions.wrap_batchnorm2d_func,
        (randn(5, 2, 3, 3), *vectors, torch.tensor(3)),
        name="nnscaler.graph.function.wrapnn.wrap_batchnorm2d_func",
        without_gradient=frozenset({3, 4, 5}),
    )
    rule = Annotation.parse(f"n c h^ w^, c, c, c, c, ? -> n c h^ w^{group}")
    verdict = confirm_on_gloo(operator, rule.recipe(operator, Option(0, 0)))
    assert verdict.passed is bool(group), str(verdict)
    assert len(verdict.findings) == 7


def test_a_rank_that_fails_among_ranks_that_exchange_is_named():
    recipe = Recipe(((0, Shard(0)),), (Shard(0),), (("group", Group()),))
    verdict = confirm_on_gloo(call(programs.exchange_but_on_rank_one, randn(4, 6)), recipe)
    assert verdict.failures[0].reason == "rank 1 of 2 raised ValueError: no such part"


def test_a_function_that_torch_makes_itself_is_found_by_its_name():
    operator = OperatorCall(F.max_pool2d, (randn(2, 2, 4, 4), 2))
    assert confirm_on_gloo(operator, Recipe(((0, Shard(1)),), (Shard(1),))).passed


def test_a_mesh_of_two_axes_is_confirmed():
    batch = Recipe(((0, Shard(0)),), (Shard(0),))
    columns = Recipe(((1, Shard(0)), (2, Shard(0))), (Shard(1),))
    assert confirm_on_gloo(linear(), (batch, columns), (2, 2)).passed
    wrong = Recipe(((1, Shard(0)), (2, Shard(0))), (Shard(0),))
    assert not confirm_on_gloo(linear(), (batch, wrong), (2, 2)).passed


# --- ranks that fail ------------------------------------------------------------------------------

PARTS = Recipe(((0, Shard(0)),), (Shard(0),))


def test_what_one_rank_raises_is_reported():
    verdict = confirm_on_gloo(
        call(torch.clone, randn(4, 6)), PARTS, program=programs.raise_on_rank_one
    )
    assert verdict.status is Status.DIFFERENT
    assert verdict.failures[0].reason == "rank 1 of 2 raised ValueError: no such part"


def test_a_dying_rank_is_reported_and_the_next_check_has_new_ranks():
    operator = call(torch.clone, randn(4, 6))
    verdict = confirm_on_gloo(operator, PARTS, program=programs.die_on_rank_one)
    assert verdict.status is Status.UNVERIFIED
    assert verdict.failures[0].reason.startswith("rank 1 of 2 died by SIGABRT")
    assert confirm_on_gloo(operator, PARTS).passed


@pytest.mark.parametrize("program", [programs.hang_on_rank_one, programs.wait_for_nobody])
def test_a_rank_that_does_not_answer_ends_the_check(program):
    operator = call(torch.clone, randn(4, 6))
    verdict = confirm_on_gloo(operator, PARTS, program=program, timeout=1.0)
    assert verdict.status is Status.UNVERIFIED
    assert "of 2 had 1 s to run go_forward: no answer" in verdict.failures[0].reason


def test_an_operator_that_cannot_be_sent_is_refused():
    with pytest.raises(UsageError, match="define it at the top level of a module"):
        confirm_on_gloo(OperatorCall(lambda x: x, (randn(4, 6),)), PARTS)


# --- the pool -------------------------------------------------------------------------------------


def test_ranks_are_processes_that_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = [one.value for one in warm_pool(2).run(programs.where_am_i, ["a", "b"])]
    again = [one.value for one in warm_pool(2).run(programs.where_am_i, ["a", "b"])]
    assert [told[:4] for told in first] == [(0, 2, "a", 0), (1, 2, "b", 1)]
    assert len({told[4] for told in first} | {os.getpid()}) == 3
    assert first == again
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pool_leaves_no_process_and_refuses_work():
    with RankPool(2) as ranks:
        pids = [one.value[4] for one in ranks.run(programs.where_am_i, [None, None])]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(LostRankError, match="the pool was closed"):
        ranks.run(programs.where_am_i, [None, None])


def test_an_invalid_number_of_ranks_is_refused():
    with pytest.raises(UsageError, match="0 ranks: give a number from 1 to 64"):
        RankPool(0)


def test_ranks_in_interpreters_of_their_own_work_as_well():
    with RankPool(1, "anew") as ranks:
        assert ranks.run(programs.where_am_i, ["a"])[0].value[:4] == (0, 1, "a", 0)


# --- threads, and programs with collectives of their own ------------------------------------------

ONE_BIAS = Recipe((*ROWS, (2, Replicate(summed=False))), (Replicate(),))
PROGRAMS = [
    (programs.row_parallel, ONE_BIAS, True),
    (programs.row_parallel_with_a_bias_per_rank, ONE_BIAS, False),
    (programs.row_parallel_without_the_reduction, ONE_BIAS, False),
    (programs.bias_of_rank_zero, Recipe((*ROWS, (2, Replicate())), (Replicate(),)), True),
]


@pytest.mark.parametrize(("program", "recipe", "right"), PROGRAMS)
def test_a_program_of_ranks_is_held_against_the_operator(program, recipe, right):
    assert check_on_threads(linear(), program, recipe).passed is right
    assert confirm_on_gloo(linear(), recipe, program=program).passed is right


def test_threads_tell_what_a_rank_raised_and_do_not_hang():
    operator = call(torch.clone, randn(4, 6))
    verdict = check_on_threads(operator, programs.raise_on_rank_one, PARTS)
    assert verdict.failures[0].reason == "rank 1 of 2 raised ValueError: no such part"
    verdict = check_on_threads(operator, programs.wait_for_nobody, PARTS, timeout=1.0)
    assert verdict.status is Status.UNVERIFIED
