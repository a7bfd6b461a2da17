"""Checkpoints that are saved under a plan and loaded on another mesh."""

from __future__ import annotations

import pytest
import torch

from paritas.core.errors import UsageError
from paritas.core.execution.subjects import Inputs
from paritas.core.results.findings import Status
from paritas.sharding.plans.verify import verify_parallel

from .small_programs import batch, by_hand, tower

pytestmark = pytest.mark.usefixtures("undiagnosed")
BATCHES = [Inputs([batch()]), Inputs([2 * batch()])]


def resumed(plan, *, optimizer=None, mesh=2, resume=4):
    return verify_parallel(
        tower(), plan, BATCHES, mesh, steps=1, resume=resume, optimizer=optimizer
    )


class Forgetful(torch.optim.SGD):
    """Does not save its momentum."""

    def state_dict(self):
        made = super().state_dict()
        zeros = {
            number: {name: torch.zeros_like(one) for name, one in held.items()}
            for number, held in made["state"].items()
        }
        return {**made, "state": zeros}


def test_a_checkpoint_is_loaded_on_more_ranks_and_the_training_goes_on():
    verdict = resumed("fsdp")
    assert verdict.passed, str(verdict)
    assert verdict.notes[0] == (
        "after 1 of 2 steps, a checkpoint was saved, and loaded on ranks=4; step 1 there is what "
        "was loaded"
    )
    later = [one.path for one in verdict.findings if one.path.startswith("resumed on ranks=4: ")]
    assert "resumed on ranks=4: step 1: parameter norm.weight after step" in later
    assert "resumed on ranks=4: step 2: loss" in later


def test_momentum_that_is_not_saved_is_found_in_the_step_after_it():
    verdict = resumed(
        "fsdp", optimizer=lambda given: Forgetful(given, lr=0.1, momentum=0.9), resume=2
    )
    assert verdict.status is Status.DIFFERENT
    assert {one.item.step for one in verdict.failures} == {2}
    assert all(one.path.startswith("resumed on ranks=2: step 2: par") for one in verdict.failures)


def test_shards_that_a_checkpoint_takes_for_replicas_are_found():
    """They are plain tensors of the same name, and the checkpoint has those of one rank."""

    def each_block(model, mesh):
        for block in model.blocks:
            by_hand(block, mesh)

    verdict = resumed(each_block, resume=2)
    assert verdict.status is Status.DIFFERENT
    assert verdict.failures[0].path == "resumed on ranks=2: step 2: output"


def test_a_checkpoint_by_blocks_is_bad_usage():
    with pytest.raises(UsageError, match=r"resume=... cannot be combined with by='blocks'"):
        verify_parallel(tower(), "fsdp", BATCHES, 2, resume=4, by="blocks")
