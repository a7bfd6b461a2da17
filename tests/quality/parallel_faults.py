"""Faults of parallel programs, planted one at a time in a plan that is right without them.

Each says which modules may be named as the place where it starts, and what the diagnosis should
claim, where the numbers show it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import RowwiseParallel

from quality import parallel_spoils as spoil
from quality.parallel_models import WIDE
from quality.parallel_plans import (
    BIASED,
    SEQUENCE,
    TENSOR,
    TRACKED,
    Case,
    context,
    fsdp_over_tensor,
    megatron,
    megatron_tokens,
)
from quality.parallel_spoils import Spoiled, also_on, at

UNREDUCED, SCALE, BIAS = "missing reduction", "scale", "repeated bias"
SHARD, STALE = "wrong rank's shard", "stale"
TP, DP, CP = {"tp": 2}, {"dp": 2}, {"cp": 2}
TP4, DP4 = {"tp": 4}, {"dp": 4}

PARTIAL_DOWN = {**TENSOR, "layers.1.mlp.down": RowwiseParallel(output_layouts=Partial())}
# The pattern for all layers would be taken for this one as well.
del PARTIAL_DOWN["layers.*.mlp.down"]
PARTIAL_DOWN["layers.0.mlp.down"] = RowwiseParallel()


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        modules: where it may be said to start; one that wraps the model has its name left out.
        pattern: kind of the diagnosis; empty where the numbers need not show one.
        ranks: the ranks that are wrong, where that is not all of them.
        main: one of those that are also looked for in bfloat16.
    """

    case: Case
    modules: tuple[str, ...]
    pattern: str = ""
    ranks: tuple[int, ...] = ()
    main: bool = False

    def __str__(self) -> str:
        return self.case.name


def _fault(
    name: str,
    plan: Any,
    mesh: dict[str, int],
    modules: str,
    pattern: str = "",
    *,
    ranks: tuple[int, ...] = (),
    main: bool = False,
    **case: Any,
) -> Fault:
    split = "dp" if "dp" in mesh else None
    made = Case(name, plan, mesh, split, **case)
    return Fault(made, tuple(modules.split()), pattern, ranks, main)


def _hand(then: Any) -> Spoiled:
    return Spoiled(megatron, then)


OUT, DOWN, UP = "layers.0.attention.out", "layers.1.mlp.down", "layers.1.mlp.up"
GATE, MLP_NORM = "layers.1.mlp.gate", "layers.1.mlp_norm"
# A gradient goes wrong between the module that it leaves and the one at which it arrives.
MLP_WAY = f"layers.1.mlp {GATE} {UP} {MLP_NORM}"
ATTENTION_WAY = "layers.1.attention layers.1.attention_norm " + " ".join(
    f"layers.1.attention.{name}" for name in ("q", "k", "v")
)
# Where every gradient is off by one factor, the last module says as little as the first.
ALL_GRADIENTS = "loss head"

FAULTS = [
    # The seven that everybody meets.
    _fault(
        "a row-parallel bias on every rank",
        _hand(at(DOWN, spoil.bias_on_every_rank)),
        TP,
        DOWN,
        BIAS,
        sizes=BIASED,
        main=True,
    ),
    _fault(
        "a norm weight's gradient not reduced",
        Spoiled(megatron_tokens, at(MLP_NORM, spoil.gradient_not_reduced)),
        TP,
        MLP_NORM,
        UNREDUCED,
        main=True,
    ),
    _fault(
        "the loss divided by the number of ranks",
        "ddp",
        DP,
        "",
        SCALE,
        loss=spoil.loss_over_world,
        main=True,
    ),
    _fault(
        "the next rank's shard, by hand",
        _hand(at(GATE, spoil.next_ranks_shard)),
        TP,
        GATE,
        SHARD,
        main=True,
    ),
    _fault(
        "a buffer that is never updated",
        Spoiled(TENSOR, at("tracker", spoil.not_updated)),
        TP,
        "tracker",
        STALE,
        sizes=TRACKED,
        main=True,
    ),
    _fault(
        "a dropped all-reduce, forward",
        _hand(at(OUT, spoil.nothing_reduced)),
        TP,
        OUT,
        UNREDUCED,
        main=True,
    ),
    _fault(
        "a doubled all-reduce, forward",
        _hand(at(DOWN, spoil.reduced_twice)),
        TP,
        DOWN,
        SCALE,
        main=True,
    ),
    # Reductions.
    _fault(
        "a bias on each of four ranks",
        _hand(at(OUT, spoil.bias_on_every_rank)),
        TP4,
        OUT,
        BIAS,
        sizes=dataclasses.replace(WIDE, biased=True),
    ),
    _fault(
        "a dropped all-reduce, four ranks",
        _hand(at(DOWN, spoil.nothing_reduced)),
        TP4,
        DOWN,
        UNREDUCED,
        sizes=WIDE,
    ),
    _fault(
        "a dropped all-reduce, distributed tensors",
        PARTIAL_DOWN,
        TP,
        DOWN,
        UNREDUCED,
        main=True,
    ),
    _fault(
        "a dropped all-reduce, backward",
        _hand(at("layers.1.mlp", spoil.nothing_reduced_back)),
        TP,
        MLP_WAY,
        UNREDUCED,
    ),
    _fault(
        "a doubled all-reduce, backward",
        _hand(at("layers.1.attention", spoil.reduced_twice_back)),
        TP,
        ATTENTION_WAY,
        SCALE,
    ),
    _fault(
        "an average where a sum is due, forward",
        _hand(at(DOWN, spoil.averaged)),
        TP,
        DOWN,
        SCALE,
    ),
    _fault(
        "a gradient averaged where it is to be summed",
        Spoiled(megatron_tokens, at("layers.0.mlp_norm", spoil.gradient_averaged)),
        TP,
        "layers.0.mlp_norm",
        SCALE,
    ),
    _fault(
        "a parameter's gradient not reduced, context parallel",
        Spoiled(context, at(DOWN, spoil.gradient_not_reduced)),
        CP,
        DOWN,
        UNREDUCED,
    ),
    # Loss and data parallel.
    _fault(
        "the loss divided by the number of ranks twice",
        "ddp",
        DP,
        "",
        SCALE,
        loss=spoil.loss_over_world_twice,
    ),
    _fault(
        "the loss multiplied by the number of ranks, in a module",
        Spoiled("ddp", at("module.criterion", spoil.loss_times_world)),
        DP,
        "criterion",
        SCALE,
        own_loss=True,
        loss=None,
    ),
    _fault("ddp that sums gradients", Spoiled("ddp", spoil.ddp_sums), DP, ALL_GRADIENTS, SCALE),
    _fault(
        "ddp that averages gradients twice",
        Spoiled("ddp", spoil.ddp_averages_twice),
        DP4,
        ALL_GRADIENTS,
        SCALE,
        sizes=WIDE,
    ),
    _fault(
        "ddp without synchronisation",
        Spoiled("ddp", spoil.ddp_without_sync),
        DP,
        "head",
        UNREDUCED,
        main=True,
    ),
    _fault("fsdp that sums gradients", Spoiled("fsdp", spoil.fsdp_sums), DP, ALL_GRADIENTS, SCALE),
    _fault(
        "every rank reads the first one's data",
        Spoiled("ddp", spoil.first_ranks_data),
        DP,
        "model.embed",
        ranks=(1,),
        own_loss=True,
        loss=None,
    ),
    _fault(
        "another order of samples on one rank",
        Spoiled(TENSOR, at("embed", also_on(1, spoil.other_order))),
        TP,
        "embed",
        ranks=(1,),
    ),
    # Parts and positions.
    _fault(
        "the next rank's shard, distributed tensors",
        Spoiled(TENSOR, at(UP, spoil.next_ranks_local)),
        TP,
        UP,
        SHARD,
    ),
    _fault(
        "the next rank's shard, fsdp",
        Spoiled("fsdp", at(GATE, spoil.next_ranks_local)),
        DP,
        GATE,
        SHARD,
    ),
    _fault(
        "another seed on one rank, tensor parallel",
        Spoiled(TENSOR, at(MLP_NORM, also_on(1, spoil.drawn_again))),
        TP,
        MLP_NORM,
        ranks=(1,),
        main=True,
    ),
    _fault(
        "another seed on one rank, by hand",
        Spoiled(context, at("embed", also_on(1, spoil.drawn_again))),
        CP,
        "embed",
        ranks=(1,),
    ),
    _fault(
        "positions not shifted to the rank's tokens",
        Spoiled(context, at("layers.1.attention.rotation", spoil.from_the_start)),
        CP,
        "layers.1.attention.rotation",
        ranks=(1,),
        main=True,
    ),
    _fault(
        "a causal mask not shifted",
        Spoiled(context, at("layers.0.attention.core", spoil.from_the_start)),
        CP,
        "layers.0.attention.core",
        ranks=(1,),
    ),
    _fault(
        "heads of keys repeated in the wrong order",
        _hand(at("layers.0.attention.core", spoil.in_turn)),
        TP,
        "layers.0.attention.core",
        sizes=WIDE,
    ),
    _fault(
        "tokens of other ranks not left out",
        _hand(at("embed", spoil.other_tokens_kept)),
        TP,
        "embed",
    ),
    _fault(
        "parts joined backwards",
        _hand(at("head", spoil.joined_backwards)),
        TP,
        "head",
    ),
    # State.
    _fault(
        "a buffer updated on the first rank only",
        Spoiled(TENSOR, at("tracker", also_on(1, spoil.not_updated))),
        TP,
        "tracker",
        ranks=(1,),
        sizes=TRACKED,
    ),
    _fault("a frozen parameter", Spoiled(SEQUENCE, at(UP, spoil.frozen)), TP, UP),
    _fault(
        "a parameter that the optimizer does not know",
        TENSOR,
        TP,
        "embed",
        optimizer=spoil.all_but_the_first,
        main=True,
    ),
    _fault(
        "an optimizer that does nothing on one rank",
        "ddp",
        DP,
        "embed",
        ranks=(1,),
        optimizer=spoil.still_on_rank_1,
    ),
    # Two axes; a rank that fails.
    _fault(
        "a dropped all-reduce, fsdp over tensor parallel",
        functools.partial(fsdp_over_tensor, inner=PARTIAL_DOWN),
        {"dp": 2, "tp": 2},
        DOWN,
        UNREDUCED,
    ),
    _fault(
        "an exception on one rank",
        _hand(at("layers.1.mlp", also_on(1, spoil.raising))),
        TP,
        "layers.1.mlp",
        ranks=(1,),
    ),
]
