"""`paritas verify --plan`: what a check would run, compile and hold in memory, and for how long.

Only the reference runs, natively, to measure its time. Nothing is compared, so a plan has no
status: it is not a verdict.
"""

from __future__ import annotations

import dataclasses
import textwrap
import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from paritas.core.errors import UsageError, in_one_line
from paritas.core.execution.block_notes import name_blocks
from paritas.core.execution.blocks import count_kinds, find_blocks, require_blocks
from paritas.core.execution.evidence import Evidence
from paritas.core.execution.fitting import (
    check_by,
    describe_saving,
    describe_shortage,
    measure_model,
)
from paritas.core.execution.reachable import reachable_modules
from paritas.core.execution.run_plan import (
    PlannedCheck,
    RunStep,
    costs_on,
)
from paritas.core.execution.saved_state import RandomState
from paritas.core.execution.subject_runs import SubjectProgram
from paritas.core.execution.subjects import Inputs, VerifyConfig, input_sets, inspect_subject
from paritas.core.numerics.automatic import MOST_PAIRS, MOST_RUNS
from paritas.core.numerics.bits import dtype_name
from paritas.core.results.progress import clock_words
from paritas.core.results.wording import count_things, size
from paritas.core.torch_private.dynamo import (
    backends_of,
    compile_seconds,
    original_of,
    seconds_to_compile,
)
from paritas.verification.verify import Verification

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paritas.core.execution.observation import Observation
    from paritas.core.execution.subjects import Subject

NOT_A_VERDICT = "not verified: this is a plan; nothing was compared"
# The first run of a short program is mostly warming up, so it runs again.
_SHORT_SECONDS = 2.0
# For each of two precisions, float64 and the native one: single runs, and pairs of runs.
_MOST_PERTURBED = 2 * (MOST_RUNS + 2 * MOST_PAIRS)
_WORDS = {
    RunStep.REFERENCE: "reference",
    RunStep.CANDIDATE: "candidate",
    RunStep.ARBITER: "reference in float64",
    RunStep.LIFTED: "candidate in float64",
    RunStep.BLOCKS: "each block, both sides, natively and in float64",
    RunStep.AGAIN: "reference once more",
}
_NOT_MADE = (
    "the candidate was not made, so its cost is not known; what it does not support, such as "
    "gradients or float64, is left out"
)


# --- What the plan is, as data --------------------------------------------------------------------


class Compilations(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a compiler will have to do; how many graphs a program has is known once it has run.

    Attributes:
        native: the least number of compilations in the dtype of the run.
        lifted: the least number of compilations in float64.
        seconds: what compiling the candidate has taken in this process; None if that is unknown.
    """

    native: int
    lifted: int
    seconds: float | None


class EstimatedRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A planned run.

    Attributes:
        what: what is run, for people.
        calls: of the program, on each set of inputs.
        compiles: a compiler may work on it.
        seconds: the estimate for all sets of inputs; None if there is none.
    """

    what: str
    calls: int
    compiles: bool
    seconds: float | None


class CheckPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a check would do, and what it costs. Times are in seconds, without compilation.

    Attributes:
        kind: tells it from a verdict.
        note: says that it is none.
        way: `whole`, or `blocks` one by one.
        reason: why it is by blocks, if that was not requested.
        blocks: their names.
        kinds_of_blocks: blocks that differ only in their weights are one kind, compiled once.
        gradients: whether gradients are compared.
        nbytes: of parameters and buffers.
        needed_bytes: the memory that is needed at least beside the model; by blocks, beside the
            largest of them. Values between operators come on top.
        free_bytes: None if it is unknown.
        native_seconds: measured: the reference on all sets of inputs.
        runs: in order; a check leaves out what it turns out not to need.
        perturbed_runs: the most that are usual, while values are undecided; by blocks, for each.
        perturbed_seconds: the estimate for one, by blocks for one of a typical block; None if there
            is none.
        compilations: None if the candidate is not made by `torch.compile`, or not made yet.
    """

    kind: Literal["plan"] = "plan"
    note: str = NOT_A_VERDICT
    target: str
    candidate: str
    way: Literal["whole", "blocks"]
    reason: str
    blocks: tuple[str, ...]
    kinds_of_blocks: int
    input_sets: int
    gradients: bool
    parameters: int
    nbytes: int
    dtype: str
    device: str
    needed_bytes: int
    free_bytes: int | None
    native_seconds: float
    runs: tuple[EstimatedRun, ...]
    perturbed_runs: int
    perturbed_seconds: float | None
    compilations: Compilations | None
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float | None:
        """The estimate for all planned runs; None if one of them has none."""
        estimates = [run.seconds for run in self.runs]
        return None if None in estimates else sum(filter(None, estimates))

    def to_json(self) -> bytes:
        """Encode it."""
        return msgspec.json.encode(self)


# --- Making it ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTarget:
    """What is to be checked.

    Attributes:
        name: of the model, for people.
        model: the reference.
        inputs: as for `verify`.
        candidate: None if making it would take long, as for another runtime.
        candidate_name: the candidate, for people.
    """

    name: str
    model: Callable[..., Any]
    inputs: Any
    candidate: Callable[..., Any] | None
    candidate_name: str


def plan_check(
    target: PlannedTarget,
    config: VerifyConfig,
    *,
    by: Literal["whole", "blocks"] | None = None,
    blocks: Sequence[str] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> CheckPlan:
    """Plan a check as `verify` would make it; only the reference runs, natively.

    Raises:
        UsageError: as `verify`; also if the reference raises on these inputs.
    """
    check_by(by, blocks)
    sets = input_sets(target.inputs)
    gradients = config.verify_gradients is not False and torch.is_grad_enabled()
    way, reason = _choose_way(target.model, by, blocks, gradients=gradients)
    modules = dict(reachable_modules(target.model, original_of))
    by_name = require_blocks(modules, blocks, "reference") if way == "blocks" else {}
    reference = inspect_subject(
        target.model, "reference", "framework_model", lends_parameters=way == "blocks"
    )
    tell(RunStep.REFERENCE)
    measured = _measure_reference(reference, sets, config)
    model_size = measure_model(modules.values(), gradients=measured.gradients, sketches=True)
    largest = max(
        (measure_model([block], gradients=measured.gradients) for block in by_name.values()),
        key=lambda block_size: block_size.needed,
        default=model_size,
    )
    is_compiled = target.candidate is not None and bool(backends_of(target.candidate))
    planned = PlannedCheck(
        costs=costs_on(measured.device, measured.dtype),
        compares=config.enabled,
        lifts=config.lift,
        is_narrow=measured.is_narrow,
        is_compiled=is_compiled,
        repeats=config.verify_second_call,
        calls=measured.calls,
    )
    runs = planned.plan_blocks() if way == "blocks" else planned.plan_whole()
    kinds = count_kinds(by_name.values())
    return CheckPlan(
        target=target.name,
        candidate=target.candidate_name,
        way=way,
        reason=reason,
        blocks=tuple(by_name),
        kinds_of_blocks=kinds,
        input_sets=len(sets),
        gradients=measured.gradients,
        parameters=model_size.parameters,
        nbytes=model_size.nbytes,
        dtype=dtype_name(measured.dtype),
        device=str(measured.device),
        needed_bytes=largest.needed,
        free_bytes=model_size.free,
        native_seconds=measured.seconds,
        runs=tuple(
            EstimatedRun(
                what=_WORDS[run.step],
                calls=run.calls,
                compiles=run.compiles,
                seconds=_multiply(run.cost, measured.seconds),
            )
            for run in runs
        ),
        perturbed_runs=_MOST_PERTURBED if planned.compares else 0,
        perturbed_seconds=_multiply(
            planned.costs.perturbed, measured.seconds / max(1, len(by_name))
        ),
        compilations=_count_compilations(target.candidate, planned, kinds) if is_compiled else None,
        notes=(*measured.notes, *([_NOT_MADE] if target.candidate is None else [])),
    )


def _multiply(cost: float | None, seconds: float) -> float | None:
    return None if cost is None else cost * seconds


def _choose_way(
    model: Callable[..., Any],
    by: str | None,
    patterns: Sequence[str] | None,
    *,
    gradients: bool,
) -> tuple[Literal["whole", "blocks"], str]:
    """As a whole or by blocks, as `verify` chooses, and why if the caller does not."""
    if by == "blocks" or patterns is not None:
        return "blocks", ""
    if by == "whole":
        return "whole", ""
    shortage = describe_shortage(model, gradients=gradients, sketches=True)[0]
    if shortage and find_blocks(dict(reachable_modules(model, original_of))):
        return "blocks", shortage
    saving = describe_saving(model, model)
    return ("blocks", saving) if saving else ("whole", "")


@dataclasses.dataclass(frozen=True)
class _Measured:
    """What native runs of the reference show.

    Attributes:
        seconds: of a call on each set of inputs, all together.
        calls: in each run; two if the first call leaves state behind.
    """

    seconds: float
    calls: int
    gradients: bool
    is_narrow: bool
    dtype: torch.dtype
    device: torch.device
    notes: tuple[str, ...]


class _NativeRun(Verification):
    """A check that runs the reference natively only, as a check would."""

    def __init__(self, reference: Subject, inputs: Inputs, config: VerifyConfig) -> None:
        super().__init__(reference, reference, inputs, config, 0, lambda _: None)
        self.conditions = dataclasses.replace(self.conditions, sketches=True)

    def measure(self) -> tuple[list[Observation], float]:
        """The observations of its calls, and the seconds of one of them, without compilation."""
        _synchronize()
        began, compiled = time.perf_counter(), compile_seconds()
        natives = self._run_reference()
        _synchronize()
        seconds = time.perf_counter() - began - max(0.0, compile_seconds() - compiled)
        return natives, max(0.0, seconds) / len(natives)

    def gather_evidence(self, natives: list[Observation]) -> Evidence[SubjectProgram]:
        """What the native runs show about the program; nothing else is run."""
        program = SubjectProgram(self.reference, self.inputs, self.rng, self.conditions)
        return Evidence(program, natives, self.config.seed)


def _measure_reference(
    reference: Subject, sets: Sequence[Inputs], config: VerifyConfig
) -> _Measured:
    rng = RandomState.now()
    seconds, calls, notes = 0.0, 1, dict[str, None]()
    try:
        for inputs in sets:
            run = _NativeRun(reference, inputs, config)
            natives, run_seconds = run.measure()
            _refuse_error(natives)
            if run_seconds < _SHORT_SECONDS:
                run_seconds = min(run_seconds, run.measure()[1])
            seconds, calls = seconds + run_seconds, max(calls, len(natives))
            error = natives[0].gradient_error
            if error is not None:
                notes[f"the reference's backward pass raises {in_one_line(error, 120)}"] = None
    finally:
        rng.restore()
    evidence = run.gather_evidence(natives)
    model_size = measure_model(
        reachable_modules(reference.call, original_of).values(), gradients=False
    )
    tensors = [value for _, value in natives[0].items() if isinstance(value, torch.Tensor)]
    is_held = model_size.nbytes > 0 or not tensors
    return _Measured(
        seconds=seconds,
        calls=calls,
        gradients=run.conditions.gradients,
        is_narrow=evidence.is_narrow or model_size.dtype is not None,
        dtype=model_size.dtype or evidence.dtype,
        device=model_size.device if is_held else tensors[0].device,
        notes=tuple(notes),
    )


def _refuse_error(natives: Sequence[Observation]) -> None:
    error = natives[0].error
    if error is not None:
        raise UsageError(
            f"there is nothing to plan: the reference raises {in_one_line(error, 200)}; fix the "
            "inputs, or check without --plan what the candidate raises"
        ) from error


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _count_compilations(
    candidate: Callable[..., Any] | None, planned: PlannedCheck, kinds: int
) -> Compilations:
    """The compilations that there will be at least; by blocks, each kind is compiled alone."""
    seconds = seconds_to_compile(candidate)
    native = 0 if seconds is not None else 1
    # What lies between the blocks is compiled, too.
    pieces = kinds + 1 if kinds else 0
    lifts = planned.compares and planned.lifts and planned.is_narrow
    compared_pieces = pieces if planned.compares else 0
    return Compilations(
        native=native + compared_pieces, lifted=(pieces or 1) * lifts, seconds=seconds
    )


# --- In words -------------------------------------------------------------------------------------

_WIDTH = 50
_COLUMNS = 79
_BRIEF_SECONDS = 10.0


def plan_text(plan: CheckPlan) -> str:
    """The plan as lines of at most 80 columns; the last one says that it is not a verdict."""
    lines = [f"plan for {plan.target}", *_describe_check(plan), ""]
    lines += [_table_line("run", "estimate")]
    lines += [_table_line(*row) for row in _list_runs(plan)]
    remarks = [line for text in _list_remarks(plan) for line in textwrap.wrap(text, _COLUMNS)]
    return "\n".join([*lines, "", *remarks, NOT_A_VERDICT])


def _describe_check(plan: CheckPlan) -> Iterator[str]:
    count = "no parameters"
    if plan.parameters:
        count = f"{count_things(plan.parameters, 'parameter', thousands=',')}, {size(plan.nbytes)}"
    free = "" if plan.free_bytes is None else f"; {size(plan.free_bytes)} free on {plan.device}"
    gradients = "with gradients" if plan.gradients else "without gradients"
    yield f"  candidate  {plan.candidate}"
    yield f"  model      {count}, {plan.dtype} on {plan.device}"
    if plan.way == "blocks":
        blocks = count_things(len(plan.blocks), "block")
        kinds = count_things(plan.kinds_of_blocks, "kind")
        yield f"  way        by blocks, {gradients}: {blocks} of {kinds}, and the rest"
        yield f"             {name_blocks(plan.blocks)}"
    else:
        yield f"  way        as a whole, {gradients}"
    if plan.reason:
        yield f"             because {plan.reason}"
    needed = f"at least {size(plan.needed_bytes)} more" if plan.needed_bytes else "no estimate"
    whose = " for the largest block" if plan.way == "blocks" else ""
    yield f"  memory     {needed}{whose}{free}"
    if plan.input_sets > 1:
        yield f"  inputs     {plan.input_sets} sets; the estimates are for all of them"


def _list_runs(plan: CheckPlan) -> Iterator[tuple[str, str]]:
    for number, run in enumerate(plan.runs):
        calls = ", twice" if run.calls > 1 else ""
        compiles = " + compilation" if run.compiles else ""
        measured = " (measured)" if number == 0 else ""
        yield f"{run.what}{calls}", f"{_time_words(run.seconds)}{measured}{compiles}"
    if plan.perturbed_runs:
        whose = " for a block" if plan.way == "blocks" else ""
        each = f"{_time_words(plan.perturbed_seconds)} each"
        yield f"perturbed runs, 0 to about {plan.perturbed_runs}{whose}", each
    compiles = " + compilation" if any(run.compiles for run in plan.runs) else ""
    yield "together, without perturbed runs", f"{_time_words(plan.seconds)}{compiles}"


def _list_remarks(plan: CheckPlan) -> Iterator[str]:
    if plan.compilations is not None:
        yield _describe_compilations(plan.compilations)
    if plan.perturbed_runs:
        yield (
            "Perturbed runs have random rounding errors. They are made one by one, only while a "
            "value is undecided. A failure also takes a search for where it starts."
        )
    yield (
        "Estimates follow from the native run by typical ratios; a check corrects them as its "
        "steps end."
    )
    for note in plan.notes:
        yield f"note: {note}"


def _describe_compilations(compilations: Compilations) -> str:
    native, lifted, seconds = compilations.native, compilations.lifted, compilations.seconds
    counts = f"Compilations, at least: {native} natively, {lifted} in float64, one for each graph. "
    if seconds is None:
        return f"{counts}How long they take is up to the compiler."
    return f"{counts}So far, compiling the candidate has taken {_time_words(seconds)}."


def _table_line(left: str, right: str) -> str:
    return f"{left:<{_WIDTH}}{right}"


def _time_words(seconds: float | None) -> str:
    if seconds is None:
        return "not known"
    return f"{seconds:.2g} s" if seconds < _BRIEF_SECONDS else clock_words(seconds)
