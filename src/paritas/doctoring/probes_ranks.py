"""Probes of what simulates ranks and reads distributed tensors; see `probes_values`."""

from __future__ import annotations

from typing import Any

import torch

from paritas.doctoring.expecting import expect

__all__ = ["PROBES"]


def placements() -> None:
    """A plain tensor is told from a distributed one, whose placements are read."""
    from torch.distributed.tensor import DTensor, Shard

    from paritas._torch.placements import local_part
    from paritas._torch.simulated_ranks import of_ranks, simulated_ranks

    expect("the part of a plain tensor", local_part(torch.ones(2)), None)
    with simulated_ranks(2) as mesh:
        local = of_ranks([torch.ones(2, 3), torch.ones(2, 3)])
        part = local_part(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
    expect("the whole shape", None if part is None else tuple(part.global_shape), (4, 3))


def rank_lifting() -> None:
    """What ranks compute is lifted to float64 as any other program is."""
    from paritas._torch.rank_lifting import RankLiftMode

    with RankLiftMode(torch.float32, torch.float32):
        total = torch.full((2,), 0.3).double() / 3
    expect("the dtype of a lifted result", total.dtype, torch.float64)


def sharding_rules() -> None:
    """It is seen when DTensor moves the arguments of an operator."""
    from torch.distributed.tensor import DTensor, Partial

    from paritas._torch.sharding_rules import watch_redistribution
    from paritas._torch.simulated_ranks import of_ranks, simulated_ranks

    with simulated_ranks(2) as mesh:
        local = of_ranks([torch.ones(2, 4), torch.ones(2, 4)])
        terms = DTensor.from_local(local, mesh, [Partial()], run_check=False)
        with watch_redistribution() as moved:
            torch.relu(terms)
    # Once DTensor knows a call by heart, it moves arguments without saying for which operator.
    expect("how many operators had their arguments moved", len(moved), 1)


def simulated_ranks() -> None:
    """Threads can be ranks that take part in collectives."""
    from paritas._torch.simulated_ranks import run_in_threads

    def program(rank: int) -> Any:
        value = torch.tensor(float(rank + 1))
        torch.distributed.all_reduce(value)
        return float(value)

    values = [outcome.value for outcome in run_in_threads(program, 2, timeout=30)]
    expect("a sum over ranks", values, [3.0, 3.0])


PROBES = {
    "placements": placements,
    "rank_lifting": rank_lifting,
    "sharding_rules": sharding_rules,
    "simulated_ranks": simulated_ranks,
}
