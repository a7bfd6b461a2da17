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


def planted(
    name: str,
    plan: Any,
    mesh: dict[str, int],
    modules: str | tuple[str, ...],
    pattern: str = "",
    *,
    ranks: tuple[int, ...] = (),
    main: bool = False,
    **case: Any,
) -> Fault:
    split = "dp" if "dp" in mesh else None
    made = Case(name, plan, mesh, split, **case)
    places = tuple(modules.split()) if isinstance(modules, str) else modules
    return Fault(made, places, pattern, ranks, main)


def by_hand(then: Any) -> Spoiled:
    return Spoiled(megatron, then)


OUT, DOWN, UP = "layers.0.attention.out", "layers.1.mlp.down", "layers.1.mlp.up"
GATE, MLP_NORM = "layers.1.mlp.gate", "layers.1.mlp_norm"
# A gradient goes wrong between the module that it leaves and the one at which it arrives.
MLP_WAY = f"layers.1.mlp {GATE} {UP} {MLP_NORM}"
ATTENTION_WAY = "layers.1.attention layers.1.attention_norm " + " ".join(
    f"layers.1.attention.{name}" for name in ("q", "k", "v")
)
# Where every gradient is wrong and right at every module, no module is to blame.
ALL_GRADIENTS = ("gradient reduction",)

FAULTS = [
    # The seven that everybody meets.
    planted(
        "a row-parallel bias on every rank",
        by_hand(at(DOWN, spoil.bias_on_every_rank)),
        TP,
        DOWN,
        BIAS,
        sizes=BIASED,
        main=True,
    ),
    planted(
        "a norm weight's gradient not reduced",
        Spoiled(megatron_tokens, at(MLP_NORM, spoil.gradient_not_reduced)),
        TP,
        MLP_NORM,
        UNREDUCED,
        main=True,
    ),
    planted(
        "the loss divided by the number of ranks",
        "ddp",
        DP,
        "loss",
        SCALE,
        loss=spoil.loss_over_world,
        main=True,
    ),
    planted(
        "the next rank's shard, by hand",
        by_hand(at(GATE, spoil.next_ranks_shard)),
        TP,
        GATE,
        SHARD,
        main=True,
    ),
    planted(
        "a buffer that is never updated",
        Spoiled(TENSOR, at("tracker", spoil.not_updated)),
        TP,
        "tracker",
        STALE,
        sizes=TRACKED,
        main=True,
    ),
    planted(
        "a dropped all-reduce, forward",
        by_hand(at(OUT, spoil.nothing_reduced)),
        TP,
        OUT,
        UNREDUCED,
        main=True,
    ),
    planted(
        "a doubled all-reduce, forward",
        by_hand(at(DOWN, spoil.reduced_twice)),
        TP,
        DOWN,
        SCALE,
        main=True,
    ),
    # Reductions.
    planted(
        "a bias on each of four ranks",
        by_hand(at(OUT, spoil.bias_on_every_rank)),
        TP4,
        OUT,
        BIAS,
        sizes=dataclasses.replace(WIDE, biased=True),
    ),
    planted(
        "a dropped all-reduce, four ranks",
        by_hand(at(DOWN, spoil.nothing_reduced)),
        TP4,
        DOWN,
        UNREDUCED,
        sizes=WIDE,
    ),
    planted(
        "a dropped all-reduce, distributed tensors",
        PARTIAL_DOWN,
        TP,
        DOWN,
        UNREDUCED,
        main=True,
    ),
    planted(
        "a dropped all-reduce, backward",
        by_hand(at("layers.1.mlp", spoil.nothing_reduced_back)),
        TP,
        MLP_WAY,
        UNREDUCED,
    ),
    planted(
        "a doubled all-reduce, backward",
        by_hand(at("layers.1.attention", spoil.reduced_twice_back)),
        TP,
        ATTENTION_WAY,
        SCALE,
    ),
    planted(
        "an average where a sum is due, forward",
        by_hand(at(DOWN, spoil.averaged)),
        TP,
        DOWN,
        SCALE,
    ),
    planted(
        "a gradient averaged where it is to be summed",
        Spoiled(megatron_tokens, at("layers.0.mlp_norm", spoil.gradient_averaged)),
        TP,
        "layers.0.mlp_norm",
        SCALE,
    ),
    planted(
        "a parameter's gradient not reduced, context parallel",
        Spoiled(context, at(DOWN, spoil.gradient_not_reduced)),
        CP,
        DOWN,
        UNREDUCED,
    ),
    # Loss and data parallel.
    planted(
        "the loss divided by the number of ranks twice",
        "ddp",
        DP,
        "loss",
        SCALE,
        loss=spoil.loss_over_world_twice,
    ),
    planted(
        "the loss multiplied by the number of ranks, in a module",
        Spoiled("ddp", at("module.criterion", spoil.loss_times_world)),
        DP,
        "criterion",
        SCALE,
        own_loss=True,
        loss=None,
    ),
    planted("ddp that sums gradients", Spoiled("ddp", spoil.ddp_sums), DP, ALL_GRADIENTS, SCALE),
    planted(
        "ddp that averages gradients twice",
        Spoiled("ddp", spoil.ddp_averages_twice),
        DP4,
        ALL_GRADIENTS,
        SCALE,
        sizes=WIDE,
    ),
    planted(
        "ddp without synchronisation",
        Spoiled("ddp", spoil.ddp_without_sync),
        DP,
        ALL_GRADIENTS,
        UNREDUCED,
        main=True,
    ),
    planted("fsdp that sums gradients", Spoiled("fsdp", spoil.fsdp_sums), DP, ALL_GRADIENTS, SCALE),
    planted(
        "every rank reads the first one's data",
        Spoiled("ddp", spoil.first_ranks_data),
        DP,
        "model.embed",
        ranks=(1,),
        own_loss=True,
        loss=None,
    ),
    planted(
        "another order of samples on one rank",
        Spoiled(TENSOR, at("embed", also_on(1, spoil.other_order))),
        TP,
        "embed",
        ranks=(1,),
    ),
    # Parts and positions.
    planted(
        "the next rank's shard, distributed tensors",
        Spoiled(TENSOR, at(UP, spoil.next_ranks_local)),
        TP,
        UP,
        SHARD,
    ),
    planted(
        "the next rank's shard, fsdp",
        Spoiled("fsdp", at(GATE, spoil.next_ranks_local)),
        DP,
        GATE,
        SHARD,
    ),
    planted(
        "another seed on one rank, tensor parallel",
        Spoiled(TENSOR, at(MLP_NORM, also_on(1, spoil.drawn_again))),
        TP,
        MLP_NORM,
        ranks=(1,),
        main=True,
    ),
    planted(
        "another seed on one rank, by hand",
        Spoiled(context, at("embed", also_on(1, spoil.drawn_again))),
        CP,
        "embed",
        ranks=(1,),
    ),
    planted(
        "positions not shifted to the rank's tokens",
        Spoiled(context, at("layers.1.attention.rotation", spoil.from_the_start)),
        CP,
        "layers.1.attention.rotation",
        ranks=(1,),
        main=True,
    ),
    planted(
        "a causal mask not shifted",
        Spoiled(context, at("layers.0.attention.core", spoil.from_the_start)),
        CP,
        "layers.0.attention.core",
        ranks=(1,),
    ),
    planted(
        "heads of keys repeated in the wrong order",
        by_hand(at("layers.0.attention.core", spoil.in_turn)),
        TP,
        "layers.0.attention.core",
        sizes=WIDE,
    ),
    planted(
        "tokens of other ranks not left out",
        by_hand(at("embed", spoil.other_tokens_kept)),
        TP,
        "embed",
    ),
    planted(
        "parts joined backwards",
        by_hand(at("head", spoil.joined_backwards)),
        TP,
        "head",
        SHARD,
    ),
    # State.
    planted(
        "a buffer updated on the first rank only",
        Spoiled(TENSOR, at("tracker", also_on(1, spoil.not_updated))),
        TP,
        "tracker",
        ranks=(1,),
        sizes=TRACKED,
    ),
    planted("a frozen parameter", Spoiled(SEQUENCE, at(UP, spoil.frozen)), TP, UP),
    planted(
        "a parameter that the optimizer does not know",
        TENSOR,
        TP,
        "embed",
        optimizer=spoil.all_but_the_first,
        main=True,
    ),
    planted(
        "an optimizer that does nothing on one rank",
        "ddp",
        DP,
        "embed",
        ranks=(1,),
        optimizer=spoil.still_on_rank_1,
    ),
    # Two axes; a rank that fails.
    planted(
        "a dropped all-reduce, fsdp over tensor parallel",
        functools.partial(fsdp_over_tensor, inner=PARTIAL_DOWN),
        {"dp": 2, "tp": 2},
        DOWN,
        UNREDUCED,
    ),
    planted(
        "an exception on one rank",
        by_hand(at("layers.1.mlp", also_on(1, spoil.raising))),
        TP,
        "layers.1.mlp",
        ranks=(1,),
    ),
]
