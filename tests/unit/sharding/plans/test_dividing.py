"""A plan that divides nothing along an axis shows nothing about it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from paritas.core.results.findings import Status
from paritas.sharding.plans.verify import verify_parallel

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}
NOTHING = (
    "the plan divides nothing: every rank holds the whole model, has the whole batch and sends "
    "only what the others have, so each of them computes what one device does"
)
NOTHING_ALONG_DP = (
    "the plan divides nothing along dp: ranks there hold the same parameters, have the same "
    "samples and send the same values, so nothing shows what it does there"
)
EQUAL_AVERAGES = (
    "have the same samples, so the gradients that FSDP averages are equal, and nothing shows "
    "whether it averages them"
)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Small()


def do_nothing(model, mesh):
    pass


def parallelize_a_copy(model, mesh):
    parallelize_module(copy.deepcopy(model), mesh, copy.deepcopy(STYLES))


def replicate(model, mesh):
    return nn.parallel.DistributedDataParallel(model)


def shard(model, mesh):
    fully_shard(model, mesh=mesh)


def tensor_parallel(model, mesh):
    parallelize_module(model, mesh["tp"], copy.deepcopy(STYLES))


def sharded_and_tensor_parallel(model, mesh):
    tensor_parallel(model, mesh)
    fully_shard(model, mesh=mesh["dp"])


def hybrid(model, mesh):
    fully_shard(model, mesh=mesh["dp", "tp"])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("plan", "mesh", "reason"),
    [
        (do_nothing, 2, NOTHING),
        (parallelize_a_copy, 2, NOTHING),
        (replicate, 2, NOTHING),
        (tensor_parallel, {"dp": 2, "tp": 2}, NOTHING_ALONG_DP),
        (tensor_parallel, {"tp": 2, "dp": 2}, NOTHING_ALONG_DP),
        (hybrid, {"dp": 2, "tp": 2}, NOTHING_ALONG_DP),
        (shard, 2, f"all ranks {EQUAL_AVERAGES}"),
        (sharded_and_tensor_parallel, {"dp": 2, "tp": 2}, f"ranks along dp {EQUAL_AVERAGES}"),
    ],
)
def test_an_axis_along_which_nothing_is_divided_is_unverified(model, plan, mesh, reason):
    verdict = verify_parallel(model, plan, [BATCH], mesh, steps=1)
    assert verdict.status is Status.UNVERIFIED
    first = verdict.findings[0]
    assert (first.path, first.reason) == ("plan", reason)
    assert "split=" in (first.advice or "")
    assert all(finding.status.passes() for finding in verdict.findings[1:])


@pytest.mark.parametrize(
    ("plan", "mesh", "split"),
    [
        (replicate, 2, "ranks"),
        (shard, 2, "ranks"),
        (tensor_parallel, {"dp": 1, "tp": 2}, None),
        (sharded_and_tensor_parallel, {"tp": 2, "dp": 2}, "dp"),
        (hybrid, {"dp": 2, "tp": 2}, ("dp", "tp")),
    ],
)
def test_what_is_divided_is_verified(model, plan, mesh, split):
    verdict = verify_parallel(model, plan, [BATCH], mesh, split=split, steps=1)
    assert verdict.passed, str(verdict)


class Gathered(torch.autograd.Function):
    """The rows of all ranks, of which each has computed its own."""

    @staticmethod
    def forward(ctx, rows):
        ctx.size = len(rows)
        parts = [torch.empty_like(rows) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.narrow(0, distributed.get_rank() * ctx.size, ctx.size)


def rows_by_rank(model, mesh):
    """Whole weights, and a batch that the model divides itself."""
    ranks, forward = mesh.size(), model.forward
    model.forward = lambda x: Gathered.apply(forward(x.chunk(ranks)[mesh.get_local_rank()]))
    for parameter in model.parameters():

        def add_up(one):
            distributed.all_reduce(one.grad)

        parameter.register_post_accumulate_grad_hook(add_up)


def test_a_plan_that_divides_activations_alone_is_verified(model):
    verdict = verify_parallel(model, rows_by_rank, [BATCH], 2, steps=1)
    assert verdict.passed, str(verdict)


@pytest.mark.slow
def test_ranks_that_are_processes_are_heard_too(model):
    nothing = verify_parallel(model, replicate, [BATCH], 2, steps=1, ranks="gloo")
    assert nothing.findings[0].reason == NOTHING
    averages = verify_parallel(model, shard, [BATCH], 2, steps=1, ranks="gloo")
    assert averages.findings[0].reason == f"all ranks {EQUAL_AVERAGES}"
    divided = verify_parallel(model, rows_by_rank, [BATCH], 2, steps=1, ranks="gloo")
    assert divided.passed, str(divided)


# --- Names of a plan that match nothing -----------------------------------------------------------


def test_a_plan_of_which_no_name_matches_is_unverified(model):
    plan = {"layers.*.up": ColwiseParallel(), "downs": RowwiseParallel()}
    verdict = verify_parallel(model, plan, [BATCH], 2, steps=1)
    assert verdict.status is Status.UNVERIFIED
    assert [finding.reason for finding in verdict.findings] == [
        "no module matches 'layers.*.up', 'downs' of the plan, so nothing is parallel"
    ]


@pytest.mark.parametrize("by", ["whole", "blocks"])
def test_a_name_of_a_plan_that_matches_nothing_is_noted(by):
    torch.manual_seed(0)
    model = nn.Sequential(Small(), Small())
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel(), "*.dwon": RowwiseParallel()}
    verdict = verify_parallel(model, plan, [BATCH], 2, steps=1, by=by)
    assert verdict.passed, str(verdict)
    assert verdict.notes.count("no module matches '*.dwon' of the plan") == 1
