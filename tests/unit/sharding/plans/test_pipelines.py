"""Plans that return a pipeline schedule."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from paritas.core.results.findings import Status
from paritas.sharding.plans.verify import verify_parallel

CPU = torch.device("cpu")
BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def make_model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


def unused_loss(output, _target):
    return output.mean()


def by_slices(model, mesh, kind=Schedule1F1B, microbatches=4, spoil=None, **how):
    """Each rank has a slice of the model, which keeps its modules."""
    pipeline = mesh["pp"] if mesh.ndim > 1 else mesh
    rank, ranks = pipeline.get_local_rank(), pipeline.size()
    own = model[rank * 4 // ranks : (rank + 1) * 4 // ranks]
    if spoil is not None:
        spoil(own, rank)
    stage = PipelineStage(own, rank, ranks, CPU, group=pipeline.get_group())
    return kind(stage, microbatches, loss_fn=unused_loss, **how)


def interleaved(model, mesh):
    """Each rank has two copies of the model, of which one layer each is left."""
    rank = mesh.get_local_rank()
    stages = []
    for number in (rank, rank + 2):
        part = copy.deepcopy(model)
        for name in {"0", "1", "2", "3"} - {str(number)}:
            del part._modules[name]
        stages.append(PipelineStage(part, number, 4, CPU))
    return ScheduleInterleaved1F1B(stages, 2, loss_fn=unused_loss)


@pytest.mark.parametrize(
    "plan",
    [functools.partial(by_slices, kind=ScheduleGPipe), by_slices, interleaved],
    ids=["gpipe", "1f1b", "interleaved"],
)
def test_a_right_schedule_passes(plan):
    verdict = verify_parallel(make_model, plan, [BATCH], steps=2)
    assert verdict.passed, str(verdict)
    assert verdict.coverage.compared == 8 + 2 * (1 + 1 + 8 + 8)


def test_a_wrong_stage_is_located():
    def spoil(own, rank):
        if rank == 1:
            own[1].register_forward_hook(lambda _module, _args, output: 1.01 * output)

    verdict = verify_parallel(
        make_model, functools.partial(by_slices, spoil=spoil), [BATCH], steps=1
    )
    assert verdict.status is Status.DIFFERENT
    assert verdict.failures[0].origin.name == "3"


def test_gradients_that_are_not_divided_by_the_number_of_microbatches_are_found():
    plan = functools.partial(by_slices, scale_grads=False)
    verdict = verify_parallel(make_model, plan, [BATCH], steps=1)
    assert verdict.status is Status.DIFFERENT
    assert verdict.failures[0].origin.name == "gradient reduction"
    assert "4 times the reference" in verdict.failures[0].diagnosis.sentence


def test_a_missing_reduction_over_another_axis_is_found():
    mesh = {"dp": 2, "pp": 2}
    plan = functools.partial(by_slices, microbatches=2)
    verdict = verify_parallel(make_model, plan, [BATCH], mesh, split="dp", steps=1)
    assert verdict.failures[0].diagnosis.best.kind == "missing reduction"


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (
            functools.partial(by_slices, microbatches=3),
            "the 8 samples of a rank do not divide evenly over the 3 micro-batches of the schedule",
        ),
        (
            lambda model, mesh: ScheduleGPipe(
                PipelineStage(model, mesh.get_local_rank(), 2, CPU), 2
            ),
            (
                "the pipeline schedule has no loss, so it trains nothing: pass loss_fn=, which "
                "verify_parallel replaces by its own loss"
            ),
        ),
        (
            lambda _model, _mesh: 3,
            (
                "the plan returned 3: return the parallel module, a pipeline schedule, or None if "
                "the model was changed in place"
            ),
        ),
    ],
    ids=["uneven", "no loss", "no module"],
)
def test_what_cannot_be_checked_is_unverified_not_different(plan, reason):
    verdict = verify_parallel(make_model, plan, [BATCH], steps=1)
    assert verdict.status is Status.UNVERIFIED
    assert [finding.reason for finding in verdict.findings] == [reason]
