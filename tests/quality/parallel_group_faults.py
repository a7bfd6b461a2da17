"""Faults of parallel programs that ask for more: which of several readers, which ranks, which axis.

They are made as those of `parallel_faults.py`, and named as strictly as can be.
"""

from __future__ import annotations

import functools

from quality import parallel_spoils as spoil
from quality.parallel_faults import (
    ALL_GRADIENTS,
    DOWN,
    DP,
    GATE,
    MLP_NORM,
    SCALE,
    TP,
    TP4,
    UNREDUCED,
    UP,
    by_hand,
    planted,
)
from quality.parallel_models import WIDE
from quality.parallel_plans import (
    SEQUENCE,
    TENSOR,
    megatron_late,
    megatron_over_data,
    megatron_tokens,
)
from quality.parallel_spoils import Spoiled, at

MLP, ATTENTION = "layers.1.mlp", "layers.1.attention"
GRID = {"dp": 2, "tp": 2}

FAULTS = [
    # One of several modules that read the same value: on the way back, it and no other.
    *(
        planted(
            f"a dropped all-reduce, backward, in {path} alone",
            by_hand(at(path, spoil.nothing_reduced_back)),
            TP,
            path,
            UNREDUCED,
        )
        for path in (UP, GATE, f"{ATTENTION}.q", f"{ATTENTION}.k", f"{ATTENTION}.v")
    ),
    *(
        planted(
            f"a doubled all-reduce, backward, in {path} alone",
            by_hand(at(path, spoil.reduced_twice_back)),
            TP,
            path,
            SCALE,
        )
        for path in (UP, GATE, f"{ATTENTION}.k")
    ),
    planted(
        "a dropped all-reduce, backward, in one of four ranks' parts",
        by_hand(at("layers.0.attention.k", spoil.nothing_reduced_back)),
        TP4,
        "layers.0.attention.k",
        UNREDUCED,
        sizes=WIDE,
    ),
    planted(
        "a dropped all-reduce, backward, where tokens are split",
        Spoiled(megatron_tokens, at(GATE, spoil.nothing_reduced_back_to_tokens)),
        TP,
        GATE,
    ),
    *(
        planted(
            f"a gradient doubled on its way back, {name}",
            Spoiled(plan, at(path, spoil.doubled_back)),
            mesh,
            path,
            SCALE,
        )
        for name, plan, mesh, path in (
            ("tensor parallel", TENSOR, TP, UP),
            ("sequence parallel", SEQUENCE, TP, GATE),
            ("fsdp", "fsdp", DP, f"{ATTENTION}.k"),
        )
    ),
    # Another collective, other ranks, another axis.
    planted(
        "a broadcast in place of a reduction",
        by_hand(at(DOWN, spoil.broadcast_for_reduced)),
        TP,
        DOWN,
    ),
    planted(
        "a broadcast in place of a reduction, of terms that are seen",
        Spoiled(megatron_late, at(MLP, spoil.broadcast_for_reduced)),
        TP,
        MLP,
        "one rank's part",
    ),
    planted(
        "a doubled all-reduce, in the block around",
        Spoiled(megatron_late, at(MLP, spoil.reduced_twice)),
        TP,
        MLP,
        SCALE,
    ),
    planted(
        "a rank left out of a group",
        by_hand(at(DOWN, spoil.last_rank_left_out)),
        TP4,
        DOWN,
        UNREDUCED,
        sizes=WIDE,
    ),
    planted(
        "a reduction along the data axis",
        Spoiled(megatron_over_data, functools.partial(spoil.reduced_along_data, DOWN)),
        GRID,
        DOWN,
        "wrong axis",
    ),
    planted(
        "a gradient averaged along the axis of channels",
        Spoiled(megatron_over_data, functools.partial(spoil.averaged_along_channels, MLP_NORM)),
        GRID,
        MLP_NORM,
        UNREDUCED,
    ),
    # All gradients at once.
    planted(
        "ddp that broadcasts gradients", Spoiled("ddp", spoil.ddp_broadcasts), DP, ALL_GRADIENTS
    ),
    planted(
        "the gradient of the loss multiplied by the number of ranks",
        "ddp",
        DP,
        "loss",
        SCALE,
        loss=spoil.gradient_times_world,
    ),
    planted(
        "the gradient of the loss divided by the number of ranks",
        "ddp",
        DP,
        "loss",
        SCALE,
        loss=spoil.gradient_over_world,
    ),
]
