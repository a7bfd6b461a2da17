"""The error that an operator made, told from the error that came in: the operator is run again.

With c my value, g the golden one, f what computes them and x what it was given: c - f(x_my) is the
error that was made on my side, f(x_my) - f(x_golden) the one that came in, both with f in float64.
Whether the first is rounding is judged as everywhere else, from runs of f on my inputs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.quiet import quietly
from paritas.checking.evidence import ItemEvidence
from paritas.checking.value_runs import VALUE
from paritas.comparison.replaying.plans import make_plan
from paritas.comparison.replaying.runs import ReplayRuns
from paritas.dumps.dtypes import known_dtype
from paritas.dumps.finiteness import is_result
from paritas.errors import UsageError
from paritas.numerics.automatic import nonfinite_mismatch
from paritas.numerics.checkers import AutomaticValueChecker
from paritas.numerics.findings import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paritas.comparison.replaying.dataflow import Calls
    from paritas.comparison.replaying.plans import Plan
    from paritas.dumps.records import Record
    from paritas.numerics.automatic import Judgement

__all__ = ["MOST_BYTES", "Replayed", "Unreplayed", "replay"]

MOST_BYTES = 256 << 20
_NOT_REPRODUCED = (
    "run again on the golden inputs it does not give the golden output, nor mine on my inputs: the "
    "dump does not hold all that it depends on, or it draws random numbers"
)


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What running an operator again showed.

    Attributes:
        own: norm of my value's error, over that of the golden value.
        inherited: norm of what other inputs make of the result, likewise.
        judgement: of my value, against the operator on my inputs.
        golden_ok: whether the golden value is what the operator gives for the golden inputs.
        words: what was done.
    """

    own: float
    inherited: float
    judgement: Judgement
    golden_ok: bool
    words: str


@dataclasses.dataclass(frozen=True)
class Unreplayed:
    """Why it could not be run again."""

    reason: str


@quietly()
def replay(
    my: Record,
    golden: Record,
    my_calls: Calls,
    golden_calls: Calls,
    read_my: Callable[[Record], Tensor],
    read_golden: Callable[[Record], Tensor],
    *,
    most_bytes: int = MOST_BYTES,
) -> Replayed | Unreplayed:
    """Run again what made a pair of values, on the inputs of either side.

    Args:
        my_calls: all records of my rank and step.
        golden_calls: all records of the golden rank and step.
        most_bytes: of all inputs and results, as recorded; a run takes a few times as much.
    """
    try:
        if not (is_result(my.site) and is_result(golden.site)):
            raise UsageError("it is what a call was given")
        plan = make_plan(my, golden, my_calls, golden_calls)
        room = most_bytes - _bytes_read(my, golden, plan)
        if room < 0:
            raise UsageError(f"its inputs and results have more than {most_bytes} bytes")
        return _replayed(plan, (my, read_my), (golden, read_golden), room)
    except UsageError as error:
        return Unreplayed(str(error))
    except Exception as error:  # noqa: BLE001  (the row says that it was not run again)
        text = (str(error).strip().splitlines() or [""])[0]
        return Unreplayed(f"running it again raised {type(error).__name__}: {text:.160}")


def _replayed(
    plan: Plan,
    my: tuple[Record, Callable[[Record], Tensor]],
    golden: tuple[Record, Callable[[Record], Tensor]],
    room: int,
) -> Replayed | Unreplayed:
    mine, theirs = _inputs(plan, my[1], golden[1])
    runs = ReplayRuns(plan.program, mine, room)
    # The same inputs: there is but one run to make.
    others = runs if theirs is mine else ReplayRuns(plan.program, theirs, room)
    value, expected = my[1](my[0]), golden[1](golden[0])
    judgement, counter = _judge(runs, value), _judge(others, expected)
    mine_ok, golden_ok = judgement.status.passes(), counter.status.passes()
    if not mine_ok and not golden_ok:
        return Unreplayed(_NOT_REPRODUCED)
    if plan.unsure and not (mine_ok and golden_ok):
        # With the value that it had, it might have been right.
        return Unreplayed(f"what {', '.join(plan.unsure[:4])} was is not recorded on one side")
    return Replayed(
        own=_relative(value, runs.truth(), expected),
        inherited=0.0 if others is runs else _relative(runs.truth(), others.truth(), expected),
        judgement=judgement,
        golden_ok=golden_ok,
        words=plan.words,
    )


def _judge(runs: ReplayRuns, value: Tensor) -> Judgement:
    reference = runs.result
    if reference.shape != value.shape:
        found, recorded = list(reference.shape), list(value.shape)
        raise UsageError(f"run again it gives shape {found}, where {recorded} is recorded")
    judgement = AutomaticValueChecker().check(reference, value, ItemEvidence(runs, VALUE))
    if judgement is None or judgement.status is Status.UNVERIFIED:
        raise UsageError("what it gives cannot be compared")
    return judgement


def _inputs(
    plan: Plan, read_my: Callable[[Record], Tensor], read_golden: Callable[[Record], Tensor]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of the leaves on either side; one and the same where all are equal."""
    mine: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for key, bound in plan.bindings.items():
        if bound.my is None or (bound.golden is not None and _same(bound.my, bound.golden)):
            assert bound.golden is not None  # noqa: S101  (one of them is there)
            mine[key] = theirs[key] = read_golden(bound.golden)
        elif bound.golden is None:
            mine[key] = theirs[key] = read_my(bound.my)
        else:
            mine[key], theirs[key] = read_my(bound.my), read_golden(bound.golden)
    shared = all(mine[key] is theirs[key] for key in mine)
    return mine, mine if shared else theirs


def _same(left: Record, right: Record) -> bool:
    if not left.digest or left.digest != right.digest:
        return False
    one, other = left.tensor, right.tensor
    if one is None or other is None:
        return False
    # What is repeated is stored once, and its bytes do not tell how often, nor along what.
    repeated = 0 in one.stride or 0 in other.stride
    return (one.dtype, one.shape) == (other.dtype, other.shape) and not repeated


def _bytes_read(my: Record, golden: Record, plan: Plan) -> int:
    bound = [record for both in plan.bindings.values() for record in (both.my, both.golden)]
    return sum(_nbytes(record) for record in (my, golden, *bound) if record is not None)


def _nbytes(record: Record) -> int:
    if record.tensor is None:
        raise UsageError("it is no tensor")
    return math.prod(record.tensor.shape) * known_dtype(record.tensor.dtype).itemsize


def _relative(value: Tensor, truth: Tensor, golden: Tensor) -> float:
    """Norm of the difference over that of the golden value, all of them where they are finite.

    Infinite where one is finite and the other is not, for no number says how far that is.
    """
    value, truth, golden = (_wide(tensor) for tensor in (value, truth, golden))
    if nonfinite_mismatch(truth, value) is not None:
        return math.inf
    finite = torch.isfinite(truth)
    error = float(torch.linalg.vector_norm(torch.where(finite, value - truth, 0.0)))
    if error == 0.0:
        return 0.0
    scale = float(torch.linalg.vector_norm(torch.where(torch.isfinite(golden), golden, 0.0)))
    return error / scale if scale else math.inf


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
