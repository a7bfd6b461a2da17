"""Is anything divided between the ranks? A plan is shown to be right only along axes where it is.

If the ranks along an axis hold the same parameters, have the same samples and send each other the
same values, they are copies of each other. Each of them computes what one device does, whatever the
plan does there: nothing, or an average of equal gradients that could as well be left out.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.placement.meshes import lines_along
from paritas.core.results.findings import Finding, unverified
from paritas.core.results.items import Replicate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas.core.placement.rank_pieces import RankPiece
    from paritas.sharding.plans.plan import ParallelProgram
    from paritas.sharding.plans.traces import Trace


def find_undivided(
    program: ParallelProgram, ranks: list[Trace], listen: Callable[[ParallelProgram], list[Trace]]
) -> Finding | None:
    """The finding for a plan that does not divide anything along some axes; None if it does.

    Args:
        ranks: the traces of a training under the plan.
        listen: trains a few steps again, and records what ranks give to collectives.
    """
    same = [axis for axis, size in program.mesh.items() if size > 1 and axis not in program.split]
    copies = [axis for axis in same if not _hold_parts(program, ranks, axis)]
    may_average = any(trace.is_fsdp for trace in ranks)
    if not copies and not (same and may_average):
        return None
    heard = listen(dataclasses.replace(program, steps=1))
    failed = next((trace.error for trace in heard if trace.error is not None), None)
    if failed is not None:
        unknown = "every rank holds the whole model, and what they send could not be seen"
        return unverified("plan", f"{unknown}: {failed}", _ADVICE) if copies else None
    copies = [axis for axis in copies if not _send_others(program, heard, axis)]
    if copies:
        return unverified("plan", *_describe_copies(program, copies))
    averaged = [axis for axis in same if may_average and _average_equals(program, heard, axis)]
    return unverified("plan", *_describe_averages(program, averaged)) if averaged else None


def _neighbors(
    program: ParallelProgram, ranks: list[Trace], axis: str
) -> Iterator[tuple[Trace, Trace]]:
    """Each rank with the first of those that differ from it along the axis alone."""
    traces = {trace.rank: trace for trace in sorted(ranks, key=lambda trace: trace.rank)}
    coordinates = {rank: program.coordinate(rank) for rank in traces}
    for first, *others in lines_along(coordinates, list(program.mesh).index(axis)):
        yield from ((traces[first], traces[other]) for other in others)


# --- What the ranks along an axis hold ------------------------------------------------------------


def _hold_parts(program: ParallelProgram, ranks: list[Trace], axis: str) -> bool:
    """Whether ranks along the axis hold different parameters, or different parts of them."""
    return any(
        rank_state.keys() != other.keys()
        or any(_differ(rank_state[name], other[name]) for name in rank_state)
        for rank_state, other in (
            (_state(a), _state(b)) for a, b in _neighbors(program, ranks, axis)
        )
    )


def _state(trace: Trace) -> dict[str, RankPiece]:
    """Parameters and buffers before the first step; after it, if the trace begins there."""
    return trace.initial or {**trace.steps[0].parameters, **trace.steps[0].buffers}


def _differ(rank_piece: RankPiece, other: RankPiece) -> bool:
    if rank_piece.placement is not None and other.placement is not None:
        places = zip(
            rank_piece.placement.coordinate,
            other.placement.coordinate,
            rank_piece.placement.roles,
            strict=False,
        )
        if any(a != b and not isinstance(role, Replicate) for a, b, role in places):
            return True
    a, b = rank_piece.local, other.local
    return a.shape != b.shape or a.dtype is not b.dtype or not bitwise_equal(a, b)


# --- What they send -------------------------------------------------------------------------------


def _send_others(program: ParallelProgram, heard: list[Trace], axis: str) -> bool:
    """Whether ranks along the axis give different values to collectives."""
    return any(a.messages != b.messages for a, b in _neighbors(program, heard, axis))


def _average_equals(program: ParallelProgram, heard: list[Trace], axis: str) -> bool:
    """Whether every sum that is scattered along the axis, as FSDP does, is one of equal terms."""
    for a, b in _neighbors(program, heard, axis):
        sums, other = (
            [message for message in trace.messages if message.scatters_a_sum] for trace in (a, b)
        )
        if not sums or sums != other:
            return False
    return True


# --- In words: a reason and an advice -------------------------------------------------------------

_ADVICE = "pass split= if ranks should have different samples, or use simulated ranks"


def _describe_copies(program: ParallelProgram, axes: list[str]) -> tuple[str, str]:
    split = f"pass split={axes[0]!r} if ranks should have different samples"
    if _are_all(program, axes):
        reason = (
            "the plan divides nothing: every rank holds the whole model, has the whole batch and "
            "sends only what the others have, so each of them computes what one device does"
        )
        return reason, f"{split}; a plan that makes a new model must return it"
    reason = (
        f"the plan divides nothing along {' and '.join(axes)}: ranks there hold the same "
        "parameters, have the same samples and send the same values, so nothing shows what it does "
        "there"
    )
    return reason, f"{split}, or leave it out of the mesh"


def _describe_averages(program: ParallelProgram, axes: list[str]) -> tuple[str, str]:
    which = "all ranks" if _are_all(program, axes) else f"ranks along {' and '.join(axes)}"
    reason = (
        f"{which} have the same samples, so the gradients that FSDP averages are equal, and "
        "nothing shows whether it averages them"
    )
    return reason, f"pass split={axes[0]!r} to give ranks different samples"


def _are_all(program: ParallelProgram, axes: list[str]) -> bool:
    return len(axes) == sum(size > 1 for size in program.mesh.values())
