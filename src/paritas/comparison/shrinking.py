"""Shrinks the first divergence of a `paritas compare` folder to one operator."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paritas.comparison.compare import open_reusable
from paritas.comparison.replay import ReplayLeaf, ReplayRuns, StepResult, make_plan
from paritas.comparison.results_folder import COMPARISON_JSON, read_comparison
from paritas.core.errors import UsageError
from paritas.core.execution.item_evidence import ItemEvidence
from paritas.core.execution.program import VALUE
from paritas.core.numerics.checkers import AutomaticValueChecker
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.reporting.scripts import Script, ScriptValues, literal
from paritas.core.shrinking import FolderShrinker, NothingFailsError, ShrinkReport, ShrinkSearch
from paritas.core.time_limit import TimeLimit
from paritas.formats.dumps.survey import RecordedCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from paritas.comparison.replay import ReplayPlan, ReplayProgram, ReplayStep
    from paritas.comparison.rows import Comparison, ComparisonRow, SideFacts
    from paritas.formats.dumps.opening import ReadableDump
    from paritas.formats.files.records import Record


# --- The operator of the first divergence ---------------------------------------------------------

# The inputs and outputs of both sides are recorded, so nothing is compiled: the operator runs again
# on its recorded inputs, and the script shows which output it does not reproduce. The case gets
# smaller by taking single rows, channels or batches, if the operator works on each of them alone.

MOST_BYTES = 256 << 20
# A part stands on its own if float64 reproduces it to this relative accuracy.
_SAME = 1e-9
# The most guesses of how an axis of the output corresponds to axes of the arguments.
MOST_TRIED = 64


def shrink_comparison(
    folder: Path,
    outdir: Path,
    *,
    graph: str | None = None,
    seconds: float = 120.0,
    on_progress: Callable[[str], None] | None = None,
) -> ShrinkReport:
    """Write the script of the first divergence: an operator on its recorded inputs.

    Args:
        graph: of no use here.

    Raises:
        NothingFailsError: the two dumps do not diverge, or not at an operator.
        UsageError: the dumps do not hold enough of it; the message says what is missing.
    """
    del graph
    search = ShrinkSearch(outdir, TimeLimit(seconds), on_progress)
    search.show("reading the comparison")
    comparison = read_comparison(folder)
    row = _first_divergence(comparison)
    search.show(f"running {row.op} again on its recorded inputs")
    case = _read_case(comparison, row)
    if not case.is_wrong():
        raise NothingFailsError(
            f"{row.name}: on its recorded inputs, {row.op} reproduces the output of each side; the "
            "difference comes from the inputs"
        )
    before = case.elements
    queries = 0
    with search.searching():
        for smaller in _shrink_cases(case, search.limit):
            queries += 1
            case = smaller
            search.show_step(f"taking single rows ({case.elements} numbers so far)")
    script = _operator_script(case, _script_heading(comparison, row))
    return search.report(
        search.write_and_run(lambda: script),
        what=f"{row.name}: {row.status}",
        before=f"{before} numbers",
        after=f"{case.elements} numbers",
        diagnosis=row.detail.diagnosis if row.detail else None,
        steps=(case.plan.words,),
        queries=queries,
    )


FOLDER_SHRINKER = FolderShrinker(COMPARISON_JSON, shrink_comparison)


def _first_divergence(comparison: Comparison) -> ComparisonRow:
    first = comparison.first
    if first is None:
        raise NothingFailsError("the two dumps do not diverge")
    return next(row for row in comparison.rows if row.index == first.row)


@dataclasses.dataclass(frozen=True)
class _RecordedCase:
    """An operator with the recorded inputs and outputs of both sides."""

    plan: ReplayPlan
    given: tuple[Mapping[str, Any], Mapping[str, Any]]
    made: tuple[Tensor, Tensor]

    @property
    def elements(self) -> int:
        values = [*self.given[0].values(), *self.made]
        return sum(value.numel() for value in values if isinstance(value, torch.Tensor))

    def is_wrong(self) -> bool:
        """Whether the output of a side is not what the operator returns."""
        pairs = zip(self.given, self.made, strict=True)
        return any(not _is_reproduced(self.plan.program, *pair) for pair in pairs)

    def truths(self) -> tuple[Tensor, Tensor]:
        runs = [
            ReplayRuns(self.plan.program, side_inputs, MOST_BYTES) for side_inputs in self.given
        ]
        return runs[0].truth(), runs[1].truth()


def _is_reproduced(
    program: ReplayProgram, recorded_inputs: Mapping[str, Any], recorded_output: Tensor
) -> bool:
    runs = ReplayRuns(program, recorded_inputs, MOST_BYTES)
    if runs.result.shape != recorded_output.shape:
        raise UsageError(
            f"its result has shape {list(runs.result.shape)}, but "
            f"{list(recorded_output.shape)} was recorded"
        )
    finding = AutomaticValueChecker().check(
        runs.result, recorded_output, ItemEvidence(runs.evidence, VALUE)
    )
    return finding is not None and finding.status.passes()


def _read_case(comparison: Comparison, row: ComparisonRow) -> _RecordedCase:
    my = open_reusable(comparison.my.path, comparison.my.kind)
    golden = open_reusable(comparison.golden.path, comparison.golden.kind)
    if row.my is None or row.golden is None:
        raise NothingFailsError(f"{row.name} has no counterpart, so there is nothing to run again")
    my_record, golden_record = _find_record(my, row.my), _find_record(golden, row.golden)
    plan = make_plan(
        my_record,
        golden_record,
        _calls_of_step(my, my_record),
        _calls_of_step(golden, golden_record),
    )
    left: dict[str, Any] = {}
    right: dict[str, Any] = {}
    for key, bound in plan.bindings.items():
        first, second = bound.my or bound.golden, bound.golden or bound.my
        if first is None or second is None:
            raise UsageError(f"neither side recorded {key}")
        left[key] = (my if bound.my is not None else golden).view(first).clone()
        right[key] = (golden if bound.golden is not None else my).view(second).clone()
    return _RecordedCase(
        plan, (left, right), (my.view(my_record).clone(), golden.view(golden_record).clone())
    )


def _find_record(dump: ReadableDump, side: SideFacts) -> Record:
    if side.made_of or len(side.ranks) > 1:
        raise UsageError(
            f"{side.id} was assembled from several ranks, not computed by one operator"
        )
    for record in dump.records():
        if record.id == side.id and record.step == side.step and record.rank in side.ranks:
            return record
    raise UsageError(f"{side.id} (step {side.step}) is no longer in the dump {side.path!r}")


def _calls_of_step(dump: ReadableDump, record: Record) -> RecordedCalls:
    return RecordedCalls(
        dump_record
        for dump_record in dump.records()
        if dump_record.rank == record.rank and dump_record.step == record.step
    )


# --- smaller cases --------------------------------------------------------------------------------


def _shrink_cases(case: _RecordedCase, limit: TimeLimit) -> Iterator[_RecordedCase]:
    """Ever smaller cases, each wrong in the same place."""
    for dim in range(case.made[0].dim()):
        size = case.made[0].shape[dim]
        if size < 2:  # noqa: PLR2004
            continue
        for places in _alignments(case, dim, size):
            limit.require()
            part = _part(case, dim, places)
            if part is not None:
                yield part
                case = part
                break


def _alignments(case: _RecordedCase, dim: int, size: int) -> Iterator[dict[str, int]]:
    """Guesses which axes of which arguments correspond to an axis of the output."""
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


def _part(case: _RecordedCase, dim: int, places: dict[str, int]) -> _RecordedCase | None:
    """The case at one index of an axis; None if that is another program, or not wrong."""
    try:
        truths = case.truths()
        index = _worst(case, truths, dim)
        my_inputs, golden = (
            {k: v.narrow(places[k], index, 1) if k in places else v for k, v in side.items()}
            for side in case.given
        )
        left, right = (value.narrow(dim, index, 1).contiguous() for value in case.made)
        part = dataclasses.replace(case, given=(my_inputs, golden), made=(left, right))
        for truth, part_truth in zip(truths, part.truths(), strict=True):
            expected_truth = truth.narrow(dim, index, 1)
            if part_truth.shape != expected_truth.shape or not _is_near(part_truth, expected_truth):
                return None
        return part if part.is_wrong() else None
    except (RuntimeError, UsageError, IndexError, TypeError, ValueError):
        return None


def _worst(case: _RecordedCase, truths: tuple[Tensor, Tensor], dim: int) -> int:
    errors = [
        (recorded_output.double() - truth.double()).abs().nan_to_num(nan=torch.inf)
        for recorded_output, truth in zip(case.made, truths, strict=True)
    ]
    error = max(errors, key=lambda side_errors: float(side_errors.max()))
    return int(torch.unravel_index(error.argmax(), error.shape)[dim])


def _is_near(left: Tensor, right: Tensor) -> bool:
    scale = right.abs().double().nan_to_num(0.0, 0.0, 0.0).max()
    return torch.allclose(
        left.double(), right.double(), rtol=_SAME, atol=_SAME * float(scale), equal_nan=True
    )


def _script_heading(comparison: Comparison, row: ComparisonRow) -> tuple[str, ...]:
    diagnosis = row.detail.diagnosis if row.detail else None
    versions = [side.torch or "unknown" for side in (comparison.my, comparison.golden)]
    recorded = (
        f"Recorded:   mine with torch {versions[0]}, golden with torch {versions[1]}; "
        f"compared with torch {torch.__version__}"
    )
    return (
        f"{row.op} does not return the recorded output for its recorded inputs.",
        "",
        f"Row:        {row.name}, step {row.step}, {row.status}",
        *([f"Source:     {Path(row.line).name}"] if row.line else []),
        *([f"Code:       {row.code.strip()}"] if row.code.strip() else []),
        *([f"Found:      {row.reason}"] if row.reason else []),
        *([f"What kind:  {diagnosis.sentence}"] if diagnosis and diagnosis.sentence else []),
        recorded,
    )


# --- The script of a recorded operator ------------------------------------------------------------

_RUN = """

def wide(values):
    return [
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in values
    ]


def main():
    found = dict(zip(("mine", "golden"), recorded()))
    again, exact = {}, {}
    for name, inputs in (("mine", mine), ("golden", golden)):
        # A side that computed in another dtype is judged in that dtype.
        again[name] = program(*inputs()).to(found[name].dtype)
        try:
            exact[name] = program(*wide(inputs()))
        except RuntimeError:  # some operators need their own dtypes
            pass
    return judged(again, found, exact)
"""


def _operator_script(case: _RecordedCase, heading: tuple[str, ...]) -> Script:
    """The script that runs an operator again on its recorded inputs."""
    my_inputs, golden = case.given
    names = {key: f"v{input_position}" for input_position, key in enumerate(my_inputs)}
    equal = all(_is_equal(my_inputs[key], golden[key]) for key in my_inputs)
    lists = {"mine": {f"mine_{names[key]}": my_inputs[key] for key in my_inputs}}
    if not equal:
        lists["golden"] = {f"golden_{names[key]}": golden[key] for key in my_inputs}
    lists["recorded"] = dict(zip(("mine", "golden"), case.made, strict=True))
    values = ScriptValues()
    position = itertools.count()
    rows = {
        name: [
            f"{values.text(input_key, _bare(values_by_name[input_key]), next(position))},"
            for input_key in values_by_name
        ]
        for name, values_by_name in lists.items()
    }
    program = case.plan.program
    function = [_program_text(program, names)]
    function += [values.list_function(name, lines) for name, lines in rows.items()]
    function += ["\n\ngolden = mine\n"] if equal else []
    has_python = any(_is_python_operator(step) for step in program.steps)
    return Script(
        heading=heading,
        imports=("import operator",) if has_python else (),
        values=values.stored,
        function="".join(function),
        run=_RUN,
        sides=("run again", "recorded"),
    )


def _is_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and bitwise_equal(left, right)
    return type(left) is type(right) and bool(left == right)


def _bare(value: Any) -> Any:
    return value.detach().contiguous() if isinstance(value, torch.Tensor) else value


def _is_python_operator(step: ReplayStep) -> bool:
    return not step.operator.name.startswith(("aten.", "prims."))


def _program_text(program: ReplayProgram, names: Mapping[str, str]) -> str:
    result_names: dict[str, str] = {}
    lines = [f"\n\ndef program({', '.join(names.values())}):"]
    for step_number, step in enumerate(program.steps):
        result_names[step.name] = f"r{step_number}"
        words = [_value_text(value, names, result_names) for value in step.args]
        named = step.operator.settle_options(dict(step.kwargs))
        words += [
            f"{key}={_value_text(value, names, result_names)}" for key, value in named.items()
        ]
        lines.append(f"    r{step_number} = {_callee(step)}({', '.join(words)})")
    last = f"r{len(program.steps) - 1}"
    if not program.position.isdecimal():
        raise UsageError(
            f"the value is the argument {program.position!r}, which the operator writes to"
        )
    lines.append(f"    return {last}[{program.position}] if isinstance({last}, tuple) else {last}")
    return "\n".join(lines) + "\n"


def _callee(step: ReplayStep) -> str:
    name = step.operator.name
    if not _is_python_operator(step):
        return f"torch.ops.{name}"
    short = name.removeprefix("operator.")
    if not hasattr(operator, short):
        raise UsageError(f"{name} cannot be written as a line of Python")
    return f"operator.{short}"


def _value_text(value: Any, names: Mapping[str, str], result_names: Mapping[str, str]) -> str:
    if isinstance(value, ReplayLeaf):
        return names[value.key]
    if isinstance(value, StepResult):
        return result_names[value.step]
    if isinstance(value, list | tuple):
        inner = ", ".join(_value_text(item, names, result_names) for item in value)
        return f"[{inner}]"
    return literal(value)
