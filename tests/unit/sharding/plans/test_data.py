"""What a user says, and which samples each rank has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paritas.core.errors import UsageError
from paritas.core.execution.subjects import Inputs
from paritas.sharding.plans.plan import check_batches, make_program, part_of_batch, samples_of

MODEL = nn.Linear(2, 2)


def unchanged(model, mesh):
    return None


def test_each_rank_has_its_samples_of_every_tensor_as_long_as_the_batch():
    x, target, scale = torch.arange(8.0).reshape(4, 2), torch.arange(4), torch.ones(2)
    given = Inputs((x, {"mask": scale}), {"target": target, "flag": True})
    program = make_program(MODEL, "ddp", given, 2)
    part = part_of_batch(program, 1, 0)
    assert torch.equal(part.args[0], x[2:])
    assert torch.equal(part.args[1]["mask"], scale)
    assert torch.equal(part.kwargs["target"], target[2:])
    assert part.kwargs["flag"] is True


def test_only_the_axes_that_split_the_batch_give_ranks_different_samples():
    mesh = {"dp": 2, "tp": 2}
    program = make_program(MODEL, unchanged, [torch.ones(4, 2)], mesh, split="dp")
    assert [samples_of(program, rank) for rank in range(4)] == [(0, 2), (0, 2), (2, 4), (2, 4)]
    assert [program.coordinate(rank) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_plan_in_code_gives_every_rank_the_whole_batch():
    program = make_program(MODEL, unchanged, [torch.ones(3, 2)], 2)
    assert samples_of(program, 1) is None
    assert part_of_batch(program, 1, 0) is program.batches[0]


def test_steps_take_the_batches_in_turn():
    batches = [Inputs((torch.zeros(2, 2),)), Inputs((torch.ones(2, 2),))]
    program = make_program(MODEL, "ddp", batches, 2, steps=3)
    assert [program.batch(step) is batches[step % 2] for step in range(3)] == [True] * 3


def test_a_batch_that_cannot_be_shared_evenly_is_refused():
    program = make_program(MODEL, "ddp", [torch.ones(5, 2)], 4)
    with pytest.raises(UsageError) as caught:
        check_batches(program)
    assert str(caught.value) == (
        "batch 0 has 5 samples, which do not divide evenly over the 4 ranks along ranks: pass a "
        "batch of 8, or another mesh"
    )


def test_a_batch_without_a_tensor_is_refused():
    program = make_program(MODEL, "fsdp", Inputs((3,)), 2)
    with pytest.raises(UsageError, match="batch 0 has no tensor to split over the 2 ranks"):
        check_batches(program)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"model": 3}, "model=3: pass a module"),
        ({"plan": "tensor"}, "plan='tensor': pass 'ddp', 'fsdp', 'hf', 'hf-ep', a dict"),
        ({"plan": {}}, "the dict of parallel styles is empty"),
        ({"plan": 3}, "plan=3: pass 'ddp'"),
        ({"mesh": 1}, "mesh=1 has only one rank"),
        ({"mesh": {"dp": 0, "tp": 2}}, "axis 'dp' needs 1 or more ranks, got 0"),
        ({"mesh": "2"}, "mesh='2': pass the number of ranks"),
        ({"split": "tp"}, "the mesh has no axis 'tp'; its axes: ranks"),
        ({"plan": {"up": object()}, "mesh": (2, 2)}, "needs a mesh with one axis"),
        ({"steps": 0}, "steps=0"),
        ({"loss": 1.0}, "loss=1.0: pass a function"),
        ({"seed": None}, "seed=None"),
    ],
)
def test_what_makes_no_sense_is_refused(said, message):
    told = {"model": MODEL, "plan": "ddp", "inputs": [torch.ones(4, 2)], **said}
    with pytest.raises(UsageError, match=message):
        make_program(**told)
