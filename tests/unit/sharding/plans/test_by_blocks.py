"""verify_parallel(by="blocks"): right plans are silent, mistakes are found in their piece."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from paritas.core.errors import UsageError
from paritas.core.execution.subjects import Inputs
from paritas.core.placement.rank_pieces import RankPiece, assemble
from paritas.core.results.findings import Status
from paritas.core.results.items import LocalPlacement
from paritas.sharding.plans.pieces import PieceMaker, PieceTask
from paritas.sharding.plans.plan import apply_styles, make_program
from paritas.sharding.plans.sketches import Abridger
from paritas.sharding.plans.verify import verify_parallel

from .small_programs import Tower, batch, by_hand, tower

WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
STYLES = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


def checked(plan, mesh=2, **how):
    return verify_parallel(tower(), plan, [batch()], mesh, by="blocks", steps=1, **how)


def each_block_by_hand(model, mesh):
    for block in model.blocks:
        by_hand(block, mesh)


def two_axes(model, mesh):
    parallelize_module(model, mesh["tp"], STYLES)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("plan", "mesh", "split"),
    [
        pytest.param(STYLES, 2, None, id="tensor parallel"),
        pytest.param(each_block_by_hand, 2, None, id="by hand"),
        pytest.param("fsdp", 2, None, id="fsdp"),
        pytest.param(
            two_axes,
            {"dp": 2, "tp": 2},
            "dp",
            id="fsdp over tensor parallel",
            marks=pytest.mark.skipif(not WHOLE, reason="PARITAS_WHOLE_CORPUS"),
        ),
    ],
)
def test_a_right_plan_is_silent(plan, mesh, split):
    verdict = checked(plan, mesh, split=split)
    assert verdict.passed, str(verdict)
    assert verdict.notes[0].startswith(
        "checked by blocks: 2 blocks (blocks.0, blocks.1), what lies"
    )
    assert {"blocks.0", "blocks.1", "between blocks", ""} == {
        finding.item.graph for finding in verdict.findings
    }


def scaled(path):
    def plan(model, mesh):
        each_block_by_hand(model, mesh)
        model.get_submodule(path).register_forward_hook(lambda _m, _args, value: value * 1.0001)

    return plan


def never_reduced(model, mesh):
    each_block_by_hand(model, mesh)
    model.blocks[1].down.forward = lambda x: nn.functional.linear(
        x, model.blocks[1].down.weight, model.blocks[1].down.bias
    )


@pytest.mark.parametrize(
    ("plan", "piece", "place"),
    [
        pytest.param(scaled("blocks.1.act"), "blocks.1", "blocks.1.act", id="in a block"),
        pytest.param(scaled("norm"), "between blocks", "norm", id="between blocks"),
        pytest.param(never_reduced, "blocks.1", "blocks.1.down", id="never reduced"),
    ],
)
def test_a_mistake_is_found_in_its_piece(plan, piece, place):
    verdict = checked(plan)
    assert verdict.status is Status.DIFFERENT
    first = verdict.failures[0]
    assert (first.item.graph, first.origin.name) == (piece, place), str(verdict)


def test_a_residual_that_is_dropped_between_blocks_is_found():
    def plan(model, mesh):
        each_block_by_hand(model, mesh)
        model.forward = lambda x: model.norm(model.blocks[1](x + model.blocks[0](x)))

    verdict = checked(plan)
    assert verdict.status is Status.DIFFERENT
    assert verdict.failures[0].item.graph == "between blocks"


def one_step(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("plan", "step", "why"),
    [
        ("ddp", None, "DistributedDataParallel reduces the gradients of all blocks at once"),
        (STYLES, one_step, "step= calls the model and its backward pass itself"),
    ],
)
def test_a_plan_that_cannot_be_cut_is_checked_as_a_whole_and_says_so(plan, step, why):
    verdict = checked(plan, step=step)
    assert verdict.passed, str(verdict)
    begins = "checked as a whole, since this plan cannot be checked by blocks"
    assert verdict.notes[0] == f"{begins}: {why}"


def test_a_model_without_blocks_is_bad_usage():
    with pytest.raises(UsageError, match="found no repeated modules in the model"):
        verify_parallel(nn.Linear(4, 4), "ddp", [torch.randn(2, 4)], by="blocks")
    with pytest.raises(UsageError, match="cannot be combined with by='whole'"):
        verify_parallel(Tower(), "ddp", [batch()], by="whole", blocks=["blocks.*"])


def test_only_the_piece_holds_numbers():
    program = make_program(tower(), "fsdp", [Inputs([batch()])])
    task = PieceTask(program, "blocks.0", [{"blocks.0": []}], [{"blocks.0": []}])
    piece = PieceMaker(task)()
    held = {name for name, one in piece.whole.named_parameters() if not one.is_meta}
    assert held == {name for name, _ in tower().named_parameters() if name.startswith("blocks.0")}


@pytest.mark.parametrize("rows", [[300, 300], [400, 200]])
def test_sketches_of_shards_add_up_to_the_sketch_of_the_whole(rows):
    torch.manual_seed(0)
    whole = torch.randn(600, 32)
    program = make_program(tower(), "fsdp", [Inputs([batch()])])
    abridge = Abridger(program, {"weight": whole})
    pieces = {}
    for rank, part in enumerate(whole.split(rows)):
        place = LocalPlacement(
            mesh=(2,),
            coordinate=(rank,),
            placements=("shard(0)",),
            global_shape=(600, 32),
            global_offset=(rank * rows[0], 0),
        )
        pieces[rank] = abridge("weight", rank, RankPiece(part, place))
    by_hand_too = {
        rank: abridge("weight", rank, RankPiece(part))
        for rank, part in enumerate(whole.split(rows))
    }
    expected = abridge("weight", 0, RankPiece(whole)).local
    assert expected.numel() < whole.numel()
    if rows[0] == rows[1]:  # torch cuts an uneven dim in another way
        torch.testing.assert_close(assemble(pieces, expected.shape).value, expected)
    torch.testing.assert_close(assemble(by_hand_too, expected.shape).value, expected)


def test_styles_of_a_block_are_those_that_parallelize_module_gives_it(monkeypatch):
    model, given = tower(), []
    known = {id(module): name for name, module in model.named_modules()}
    monkeypatch.setattr(
        "torch.distributed.tensor.parallel.parallelize_module",
        lambda module, _mesh, style: given.append((known[id(module)], style)),
    )
    plan = {"": "root", "*": "child", "blocks.*.up": "up", "blocks.0.down": "down", "norm": "norm"}
    apply_styles(model, None, plan, "blocks.1")
    assert given == [("", "root"), ("blocks", "child"), ("blocks.1.up", "up")]
