"""From a folder of `paritas compare` to the operator that its first divergence starts at.

Both sides' outputs are recorded, and so is what the operator was given. So nothing is compiled: the
operator is run again on what was recorded, and the script tells which of the outputs it does not
give. It gets smaller by taking single rows, channels or batches, where the operator works on each
of them alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paritas.checking.evidence import ItemEvidence
from paritas.checking.value_runs import VALUE
from paritas.comparison.opened_dumps import opened
from paritas.comparison.replaying.dataflow import Calls
from paritas.comparison.replaying.plans import make_plan
from paritas.comparison.replaying.runs import ReplayRuns
from paritas.errors import UsageError
from paritas.minimizing.comparison_scripts import Recorded, write_recorded
from paritas.minimizing.reports import ShrinkReport
from paritas.minimizing.scripts import run_script
from paritas.minimizing.shrinking import NothingFailsError
from paritas.numerics.checkers import AutomaticValueChecker
from paritas.reporting.comparison_files import read
from paritas.reporting.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paritas.comparison.replaying.plans import Plan
    from paritas.comparison.replaying.runs import Program
    from paritas.dumps.opening import ReadableDump
    from paritas.dumps.records import Record
    from paritas.numerics.comparisons import Comparison, Row, SideFacts

__all__ = ["shrink_comparison"]

SCRIPT = "repro.py"
MOST_BYTES = 256 << 20
# A part is the operator's own if float64 gives it to so many digits.
_SAME = 1e-9
# Ways in which an axis of the output may be one of the arguments'.
MOST_TRIED = 64


def shrink_comparison(
    folder: Path,
    outdir: Path,
    *,
    seconds: float = 120.0,
    on_progress: Callable[[str], None] | None = None,
) -> ShrinkReport:
    """Write the script of the first divergence: an operator on its recorded inputs.

    Raises:
        NothingFailsError: the two dumps do not diverge, or not at an operator.
        UsageError: the dumps do not hold enough of it; the message says what is missing.
    """
    began = time.monotonic()
    tell = on_progress or (lambda _: None)
    tell("reading the comparison")
    comparison = read(folder)
    row = _first(comparison)
    tell(f"running {row.op} again on what was recorded")
    case = _recorded(comparison, row)
    if not case.is_wrong():
        raise NothingFailsError(
            f"{row.name}: run again on its recorded inputs, {row.op} gives what either side has; "
            "the difference came in with the inputs"
        )
    before = case.elements
    ended, interrupted = True, False
    queries = 0
    try:
        for smaller in _smaller(case, began + seconds):
            queries += 1
            case = smaller
            words = f"taking single rows ({case.elements} numbers so far)"
            tell(Progress(words, at_most=began + seconds - time.monotonic()))
    except KeyboardInterrupt:
        ended = False
        interrupted = True
    written = write_recorded(_facts(case, comparison, row), outdir / SCRIPT)
    tell("running the script by itself")
    try:
        _, shows, output = run_script(written.path, max(30.0, seconds))
    except KeyboardInterrupt:
        interrupted, shows, output = True, False, ""
    lines = output.strip().splitlines()
    return ShrinkReport(
        script=str(written.path),
        data=None if written.data is None else str(written.data),
        shows=shows,
        what=f"{row.name}: {row.status}",
        before=f"{before} numbers",
        after=f"{case.elements} numbers",
        diagnosis=row.detail.diagnosis if row.detail else None,
        steps=(f"{case.plan.words}",),
        queries=queries,
        seconds=time.monotonic() - began,
        ended=ended and time.monotonic() < began + seconds,
        interrupted=interrupted,
        said=lines[-1] if lines else "" if interrupted else "it printed nothing",
    )


def _first(comparison: Comparison) -> Row:
    first = comparison.first
    if first is None:
        raise NothingFailsError("the two dumps do not diverge")
    row = next(row for row in comparison.rows if row.index == first.row)
    if row.my is None or row.golden is None:
        raise NothingFailsError(f"{row.name} has no counterpart: there is nothing to run again")
    return row


@dataclasses.dataclass(frozen=True)
class _Case:
    """An operator, what it was given on either side, and what either side says it gave."""

    plan: Plan
    given: tuple[Mapping[str, Any], Mapping[str, Any]]
    made: tuple[Tensor, Tensor]

    @property
    def elements(self) -> int:
        values = [*self.given[0].values(), *self.made]
        return sum(value.numel() for value in values if isinstance(value, torch.Tensor))

    def is_wrong(self) -> bool:
        """Whether either side's output is not what the operator gives."""
        pairs = zip(self.given, self.made, strict=True)
        return any(not _passes(self.plan.program, *pair) for pair in pairs)

    def truths(self) -> tuple[Tensor, Tensor]:
        runs = [ReplayRuns(self.plan.program, given, MOST_BYTES) for given in self.given]
        return runs[0].truth(), runs[1].truth()


def _passes(program: Program, given: Mapping[str, Any], made: Tensor) -> bool:
    runs = ReplayRuns(program, given, MOST_BYTES)
    if runs.result.shape != made.shape:
        raise UsageError(
            f"run again it gives shape {list(runs.result.shape)}, recorded is {list(made.shape)}"
        )
    found = AutomaticValueChecker().check(runs.result, made, ItemEvidence(runs, VALUE))
    return found is not None and found.status.passes()


def _recorded(comparison: Comparison, row: Row) -> _Case:
    my = opened(comparison.my.path, comparison.my.kind)
    golden = opened(comparison.golden.path, comparison.golden.kind)
    if row.my is None or row.golden is None:  # seen to before
        raise NothingFailsError(f"{row.name} has no counterpart")
    mine, theirs = _record(my, row.my), _record(golden, row.golden)
    plan = make_plan(mine, theirs, _calls(my, mine), _calls(golden, theirs))
    left: dict[str, Any] = {}
    right: dict[str, Any] = {}
    for key, bound in plan.bindings.items():
        first, second = bound.my or bound.golden, bound.golden or bound.my
        if first is None or second is None:
            raise UsageError(f"what {key} was is recorded on neither side")
        left[key] = (my if bound.my is not None else golden).view(first).clone()
        right[key] = (golden if bound.golden is not None else my).view(second).clone()
    return _Case(plan, (left, right), (my.view(mine).clone(), golden.view(theirs).clone()))


def _record(dump: ReadableDump, side: SideFacts) -> Record:
    if side.made_of or len(side.ranks) > 1:
        raise UsageError(f"{side.id} was put together from several ranks: no operator gives it")
    for record in dump.records():
        if record.id == side.id and record.step == side.step and record.rank in side.ranks:
            return record
    raise UsageError(f"{side.id} (step {side.step}) is not in the dump {side.path!r} any more")


def _calls(dump: ReadableDump, record: Record) -> Calls:
    return Calls(
        one for one in dump.records() if one.rank == record.rank and one.step == record.step
    )


# --- a part of it ---------------------------------------------------------------------------------


def _smaller(case: _Case, until: float) -> Iterator[_Case]:
    """One smaller case after the other, each wrong in the same place."""
    for dim in range(case.made[0].dim()):
        size = case.made[0].shape[dim]
        if size < 2:  # noqa: PLR2004
            continue
        for places in _alignments(case, dim, size):
            if time.monotonic() > until:
                return
            part = _part(case, dim, places)
            if part is not None:
                yield part
                case = part
                break


def _alignments(case: _Case, dim: int, size: int) -> Iterator[dict[str, int]]:
    """Which axes of which arguments an axis of the output may be; tried, not known."""
    rank = case.made[0].dim()
    tensors = {k: v for k, v in case.given[0].items() if isinstance(v, torch.Tensor)}
    behind = {
        k: v.dim() - (rank - dim)
        for k, v in tensors.items()
        if v.dim() >= rank - dim and v.shape[v.dim() - (rank - dim)] == size
    }
    axes = [(k, axis) for k, v in tensors.items() for axis in range(v.dim())]
    fitting = [(k, axis) for k, axis in axes if tensors[k].shape[axis] == size]
    several = [dict(chosen) for n in (1, 2, 3) for chosen in itertools.combinations(fitting, n)]
    tried: list[dict[str, int]] = []
    for places in (behind, *several[:MOST_TRIED]):
        if places and places not in tried:
            tried.append(places)
            yield places


def _part(case: _Case, dim: int, places: dict[str, int]) -> _Case | None:
    """The case at one index of an axis; None where that is another program, or not wrong."""
    try:
        truths = case.truths()
        index = _worst(case, truths, dim)
        mine, golden = (
            {k: v.narrow(places[k], index, 1) if k in places else v for k, v in side.items()}
            for side in case.given
        )
        left, right = (value.narrow(dim, index, 1).contiguous() for value in case.made)
        part = dataclasses.replace(case, given=(mine, golden), made=(left, right))
        for whole, own in zip(truths, part.truths(), strict=True):
            wanted = whole.narrow(dim, index, 1)
            if own.shape != wanted.shape or not _near(own, wanted):
                return None
        return part if part.is_wrong() else None
    except (RuntimeError, UsageError, IndexError, TypeError, ValueError):
        return None


def _worst(case: _Case, truths: tuple[Tensor, Tensor], dim: int) -> int:
    errors = [
        (made.double() - truth.double()).abs().nan_to_num(nan=torch.inf)
        for made, truth in zip(case.made, truths, strict=True)
    ]
    error = max(errors, key=lambda one: float(one.max()))
    return int(torch.unravel_index(error.argmax(), error.shape)[dim])


def _near(left: Tensor, right: Tensor) -> bool:
    scale = right.abs().double().nan_to_num(0.0, 0.0, 0.0).max()
    return torch.allclose(
        left.double(), right.double(), rtol=_SAME, atol=_SAME * float(scale), equal_nan=True
    )


def _facts(case: _Case, comparison: Comparison, row: Row) -> Recorded:
    diagnosis = row.detail.diagnosis if row.detail else None
    versions = [side.torch or "unknown" for side in (comparison.my, comparison.golden)]
    recorded = (
        f"Recorded:   mine with torch {versions[0]}, golden with torch {versions[1]}; "
        f"compared with torch {torch.__version__}"
    )
    heading = [
        f"{row.op}: what was recorded is not what it gives for its recorded inputs.",
        "",
        f"Row:        {row.name}, step {row.step}, {row.status}",
        *([f"Source:     {Path(row.line).name}"] if row.line else []),
        *([f"Code:       {row.code.strip()}"] if row.code.strip() else []),
        *([f"Found:      {row.reason}"] if row.reason else []),
        *([f"What kind:  {diagnosis.sentence}"] if diagnosis and diagnosis.sentence else []),
        recorded,
        "",
        "Exit code 1: the fault is there; 0: it is gone.",
    ]
    return Recorded(tuple(heading), case.plan.program, case.given, case.made)
