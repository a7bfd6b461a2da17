"""Does a model under a parallel plan train as it does on one device?"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import torch
from torch import distributed

from paritas.core.call_options import takes_options
from paritas.core.errors import UsageError
from paritas.core.execution.fitting import check_by
from paritas.core.results.findings import (
    Aspect,
    Coverage,
    Finding,
    Origin,
    OriginKind,
    Status,
    Verdict,
    mismatch,
    unverified,
)
from paritas.core.results.items import Item, ItemKind
from paritas.core.results.progress import shows_progress
from paritas.core.results.rank_backends import GLOO
from paritas.core.torch_private.global_state import quietly
from paritas.sharding.plans.assembling import broken_ties, unmatched_names
from paritas.sharding.plans.boundaries import NotByBlocksError
from paritas.sharding.plans.causes import ParallelCause, excuse_late_reductions, find_cause
from paritas.sharding.plans.dividing import find_undivided
from paritas.sharding.plans.judging import ADVICE, Judge, Judged, complete_steps
from paritas.sharding.plans.later_steps import LaterSteps
from paritas.sharding.plans.plan import KEYED, ParallelProgram, ProgramOptions, program_of
from paritas.sharding.plans.resuming import Resumption, new_folder
from paritas.sharding.plans.traces import Trace
from paritas.sharding.plans.training import Team, device_here, run_ranks, run_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from paritas.sharding.plans.plan import Dropout


# --- The check of a plan --------------------------------------------------------------------------

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyParallelOptions(ProgramOptions):
    """How a program is trained, on which ranks, and how it is judged.

    Attributes:
        ranks: `"simulated"` for threads of this process, `"gloo"` for processes, `"here"` if this
            process is a rank itself: all ranks call this and get the same verdict.
        strict: count `unstable` as a failure.
        timeout: of the ranks in one run, in seconds.
        by: "blocks" to check the blocks of the model one by one in float64, in the memory of one of
            them on each rank beside the native model; by default "whole". A plan that does not
            allow this is checked as a whole, and a note says why.
        blocks: names or globs of the blocks, such as `layers.*`; by default, the repeated modules
            of the model. With them, `by` is "blocks".
        resume: another mesh: after `steps` steps, a checkpoint is saved with
            `torch.distributed.checkpoint`, loaded on this mesh under the same plan, and as many
            further steps are trained. What was loaded and what follows are compared with a training
            that was not interrupted.
        on_progress: called with a message before every run.
    """

    ranks: Team = "simulated"
    strict: bool = False
    timeout: float = 120.0
    by: Literal["whole", "blocks"] | None = None
    blocks: Sequence[str] | None = None
    resume: int | Sequence[int] | Mapping[str, int] | None = None
    on_progress: Callable[[str], None] | None = None


@shows_progress
@takes_options(VerifyParallelOptions)
def verify_parallel(
    model: nn.Module | Callable[[], nn.Module],
    plan: Any,
    inputs: Any,
    options: VerifyParallelOptions,
) -> Verdict:
    """Train a model a few steps on one device and under a plan on ranks, and compare everything.

    This compares outputs, losses, the assembled gradient of every parameter, parameters after each
    step, and buffers. Replicas must be equal bit for bit between ranks.

    Args:
        model: the model on one device, which is copied; or a function that makes it.
        plan: a `dict[str, ParallelStyle]`, `"ddp"`, `"fsdp"`, `"hf"`, `"hf-ep"`, or a function of
            the model and the mesh that returns the parallel model or a pipeline schedule (None: it
            changed the model in place).
        inputs: a batch `[x, ...]` or `Inputs`, or a list of `Inputs`, one for each step.
        options: the mesh, and keyword arguments; see `VerifyParallelOptions`.

    Returns:
        A verdict. The first failure is the earliest; where it starts and which collective is
        missing, doubled or mis-scaled are in its `origin` and `diagnosis`.

    Raises:
        UsageError: an argument is not valid, or the model on one device cannot be trained.
    """
    least = 1 if options.ranks == "here" else 2
    program = program_of(model, plan, inputs, options, least=least)
    tell = options.on_progress or (lambda _: None)
    runs = ProgramRuns(program, options.ranks, options.timeout, tell)
    strict, resume = options.strict, options.resume
    check_by(options.by, options.blocks)
    if options.by != "blocks" and options.blocks is None:
        verdict = _with_undivided(check_program(runs, strict=strict), runs)
        if resume is None or not verdict.passed:
            return verdict
        resumed = dataclasses.replace(options, mesh=resume)
        resumption = Resumption(program, program_of(model, plan, inputs, resumed, least=least))
        return resumption.join_verdicts(verdict, _check_resumption(resumption, runs, strict=strict))
    if resume is not None:
        raise UsageError("resume=... cannot be combined with by='blocks'")
    from paritas.sharding.plans.by_blocks import check_by_blocks

    try:
        verdict = _with_undivided(check_by_blocks(runs, options.blocks, strict=strict), runs)
        return _without_later_steps(verdict, program)
    except NotByBlocksError as error:
        reason = str(error)
    verdict = _with_undivided(check_program(runs, strict=strict), runs)
    note = f"checked as a whole, since this plan cannot be checked by blocks: {reason}"
    return msgspec.structs.replace(verdict, notes=(note, *verdict.notes))


@quietly()
def _with_undivided(verdict: Verdict, runs: ProgramRuns) -> Verdict:
    """The verdict; unverified if it passed, but nothing is divided along an axis of the mesh."""
    if not verdict.passed:
        return verdict

    def listen(program: ParallelProgram) -> list[Trace]:
        runs.tell("listening to what the ranks send")
        return runs.ranks(program, listen=True)

    finding = find_undivided(runs.program, runs.split, listen)
    if finding is None:
        return verdict
    return msgspec.structs.replace(verdict, findings=(finding, *verdict.findings))


def _check_resumption(resumption: Resumption, runs: ProgramRuns, *, strict: bool) -> Verdict:
    """Check what ranks load from a checkpoint of other ranks, and how they train on."""
    with new_folder() as folder:
        how = ResumedRuns(resumption, runs.agree_on(folder), runs)
        return check_program(how, strict=strict)


def check_program(runs: ProgramRuns, *, strict: bool = False) -> Verdict:
    """Train on one device and on the ranks, and judge."""
    program = runs.program
    runs.tell("training on one device")
    reference = runs.native = runs.reference()
    if reference.error is not None:
        return Verdict(findings=(unusable(reference),), strict=strict)
    drops = reference.random and runs.without_dropout()
    runs.tell(f"training on {program.ranks} ranks")
    runs.split = traces = runs.ranks()
    runs.lifted, notes = _lift_runs(runs, traces)
    verdict = judge_traces(
        runs.program, runs.native, traces, runs.lifted, strict=strict, runs=runs, notes=tuple(notes)
    )
    verdict = runs.agree_on(verdict)
    if runs.program.later and verdict.passed:
        verdict = _with_later_steps(verdict, runs)
    return _with_dropout(verdict, runs) if drops else verdict


def _without_later_steps(verdict: Verdict, program: ParallelProgram) -> Verdict:
    """The verdict, with a note that later steps were not trained."""
    if not program.later or not verdict.passed:
        return verdict
    note = f"{program.steps} steps were compared; pass steps= to compare more"
    return msgspec.structs.replace(verdict, notes=(*verdict.notes, note))


def _with_later_steps(verdict: Verdict, runs: ProgramRuns) -> Verdict:
    """The verdict about later steps, too: of them alone if they are plainly equal, or of all."""
    first, later = runs.program.steps, runs.program.later
    if runs.are_later_near is None:
        return _without_later_steps(verdict, runs.program)
    if runs.agree_on(runs.are_later_near):
        note = (
            f"{first + later} steps were compared: the first {first} in full, {later} more in "
            "float64"
        )
    else:
        longer = dataclasses.replace(runs.program, steps=first + later, later=0)
        verdict = check_program(runs.like(longer), strict=verdict.strict)
        note = f"{first + later} steps were compared in full"
    return msgspec.structs.replace(verdict, notes=(*verdict.notes, note))


class ProgramRuns:
    """Runs a program, as often as it takes.

    Attributes:
        native: on one device.
        split: natively on the ranks.
        lifted: on one device and on the ranks, in float64; None if there are no such runs.
        are_later_near: whether later steps are plainly equal in float64; None if that is unknown.
    """

    def __init__(
        self, program: ParallelProgram, team: Team, timeout: float, tell: Callable[[str], None]
    ) -> None:
        self.program = program
        self.team = team
        self.timeout = timeout
        self.tell = tell
        self.native = Trace()
        self.split: list[Trace] = []
        self.lifted: tuple[Trace, list[Trace]] | None = None
        self.are_later_near: bool | None = None

    def reference(self, program: ParallelProgram | None = None, **how: Any) -> Trace:
        """Train on one device: that of this rank, if this process is one."""
        device = device_here() if self.team == "here" else None
        return run_reference(program or self.program, device=device, **how)

    def ranks(self, program: ParallelProgram | None = None, **how: Any) -> list[Trace]:
        """Train on the ranks."""
        return run_ranks(program or self.program, self.team, timeout=self.timeout, **how)

    def like(self, program: ParallelProgram) -> ProgramRuns:
        """Runs of a changed program."""
        return ProgramRuns(program, self.team, self.timeout, self.tell)

    def without_dropout(self) -> bool:
        """Switch dropout off on both sides, if nothing else draws random numbers."""
        off = dataclasses.replace(self.program, dropout="off")
        reference = self.reference(off)
        if reference.random or reference.error is not None:
            return False
        self.program, self.native = off, reference
        return True

    def agree_on(self, value: T) -> T:
        """The value of the first rank, if this process is a rank.

        Each rank judges for itself, and on real devices two runs of one program may round
        differently. But all ranks must take part in the same runs and return the same.
        """
        if self.team != "here":
            return value
        box = [value]
        group = distributed.new_group(backend=GLOO.group)
        distributed.broadcast_object_list(box, src=0, group=group)
        distributed.destroy_process_group(group)
        return box[0]


class ResumedRuns(ProgramRuns):
    """Runs a program from a checkpoint on, which ranks of another mesh save before each run."""

    def __init__(self, resumption: Resumption, folder: str, runs: ProgramRuns) -> None:
        super().__init__(resumption.program(), runs.team, runs.timeout, runs.tell)
        self.resumption, self.folder, self.checkpoints = resumption, folder, itertools.count()

    def like(self, program: ParallelProgram) -> ProgramRuns:
        """Runs of a changed program."""
        resumed_runs = ResumedRuns(self.resumption, self.folder, self)
        resumed_runs.program, resumed_runs.checkpoints = program, self.checkpoints
        return resumed_runs

    def reference(self, program: ParallelProgram | None = None, **how: Any) -> Trace:
        """Train on one device, without an interruption."""
        return self.resumption.reference(
            super().reference, self._shorten_program(program, **how), **how
        )

    def ranks(self, program: ParallelProgram | None = None, **how: Any) -> list[Trace]:
        """Train on the ranks before the checkpoint, and on those after it."""
        folder = f"{self.folder}/{next(self.checkpoints)}"
        resumed_program = self._shorten_program(program, **how)
        return self.resumption.ranks(super().ranks, resumed_program, folder, **how)

    def _shorten_program(self, program: ParallelProgram | None, **how: Any) -> ParallelProgram:
        """The steps to train; of those that are watched, the first is what was loaded."""
        program = program or self.program
        fewer = program.steps - 1 if how.get("watch_modules") else program.steps
        return dataclasses.replace(program, steps=max(1, fewer))


_DROPOUT = (
    "dropout was switched off, and checked in float64 with masks that depend on the masked values; "
    "the numbers that ranks draw were not compared"
)


def _with_dropout(verdict: Verdict, runs: ProgramRuns) -> Verdict:
    """The verdict without dropout, and the failures of a check with masks by value.

    A mask by value differs by chance where a value is next to where its leading bits change. Only
    what fails with two kinds of masks is a fault.
    """
    mask_findings: tuple[Finding, ...] = ()
    if verdict.status.passes():
        for kind in KEYED:
            mask_findings = _failures_with_masks(kind, runs, strict=verdict.strict)
            if not mask_findings:
                break
    return msgspec.structs.replace(
        verdict, findings=(*mask_findings, *verdict.findings), notes=(*verdict.notes, _DROPOUT)
    )


@quietly()
def _failures_with_masks(kind: Dropout, runs: ProgramRuns, *, strict: bool) -> tuple[Finding, ...]:
    """What fails in float64 with masks by value."""
    program = dataclasses.replace(runs.program, dropout=kind)
    masked = runs.like(program)
    runs.tell("training on one device and on ranks, in float64, with dropout by value")
    reference = masked.native = masked.reference(wide=True)
    ranks = masked.ranks(wide=True)
    failed = next((trace.error for trace in (reference, *ranks) if trace.error is not None), None)
    if failed is not None:
        return (unverified("dropout", f"dropout could not be checked: {failed}", ADVICE),)
    verdict = judge_traces(
        program, reference, ranks, (reference, ranks), strict=strict, runs=masked
    )
    verdict = masked.agree_on(verdict)
    return tuple(
        msgspec.structs.replace(finding, reason=f"with dropout: {finding.reason}")
        for finding in verdict.findings
        if not finding.status.passes()
    )


def judge_traces(
    program: ParallelProgram,
    reference: Trace,
    ranks: list[Trace],
    lifted: tuple[Trace, list[Trace]] | None,
    *,
    strict: bool = False,
    runs: ProgramRuns | None = None,
    notes: tuple[str, ...] = (),
) -> Verdict:
    """Judge what the ranks did by what the reference did.

    Args:
        lifted: both in float64; None if there are no such runs.
        runs: makes the runs that locate a fault; without it, nothing is located.
    """
    errors = errors_of(ranks)
    judged: list[Judged] = []
    noted = [*notes, *(note for trace in ranks for note in trace.notes)]
    if complete_steps(reference, ranks) or not errors:
        judge = Judge(
            program, reference, ranks, lifted, run_reference if runs is None else runs.reference
        )
        if runs is not None:
            judge.runs.tell = runs.tell
        judged = excuse_late_reductions(judge, judge.judge())
        noted += judge.runs.notes
        wrong = [wrong_item for wrong_item in judged if not wrong_item.status.passes()]
        cause = None
        located = bool(wrong) and not errors
        if located if runs is None else runs.agree_on(located):
            first = min((wrong_item.step for wrong_item in wrong), default=1)
            watched = _watch_modules(runs, lifted, first if runs is None else runs.agree_on(first))
            cause = find_cause(judge, wrong, *watched) if wrong else None
            noted += _count_affected_values(judged, wrong)
            noted += [
                f"{' and '.join(tied)} are one parameter on one device, but not under the plan: "
                "tie them again after it is applied"
                for tied in broken_ties(reference, ranks)
            ]
        findings = ordered_findings(judged, cause)
    else:
        findings = []
    compared = sum(1 for judged_item in judged if judged_item.item.reference is not None)
    extra = tuple(f"{name} is on the ranks only" for name in unmatched_names(reference, ranks))
    coverage = Coverage(compared=compared, unmatched=extra)
    return Verdict(
        findings=(*errors, *findings),
        coverage=coverage,
        notes=tuple(dict.fromkeys(noted)),
        strict=strict,
    )


@quietly()
def _watch_modules(
    runs: ProgramRuns | None, lifted: tuple[Trace, list[Trace]] | None, step: int
) -> tuple[Trace | None, list[Trace]]:
    """Run both sides again, up to the first wrong step, and watch every module there."""
    if runs is None:
        return None, []
    runs.tell("looking for the module where it starts")
    wide = lifted is not None
    shorter = dataclasses.replace(runs.program, steps=max(1, step))
    reference = runs.reference(shorter, wide=wide, watch_modules=True)
    return reference, runs.ranks(shorter, wide=wide, watch_modules=True)


@quietly()
def _lift_runs(
    runs: ProgramRuns, natively: list[Trace]
) -> tuple[tuple[Trace, list[Trace]] | None, list[str]]:
    """Both sides in float64, or a note that says why not."""
    if any(trace.error is not None for trace in natively):
        return None, []
    later = LaterSteps.after(runs.program, runs.native, natively)
    is_wide = not _all_float64(runs.native)
    if not is_wide and not runs.program.later:
        return (runs.native, natively), []
    runs.tell("training on one device, in float64")
    reference = runs.reference(later.program, wide=is_wide, **later.how)
    reference_later = later.begin(reference)
    if reference_later.error is not None:
        return None, [f"no run in float64: on one device {reference_later.error}; judged natively"]
    runs.tell("training on ranks, in float64")
    ranks = runs.ranks(later.program, wide=is_wide, **later.how)
    split = [later.begin(trace) for trace in ranks]
    failed = next((trace for trace in split if trace.error is not None), None)
    if failed is not None:
        if any(later.is_in_them(trace) for trace in ranks):
            runs.are_later_near = False  # the rank that failed early may have been waiting
        return None, [f"no run in float64: rank {failed.rank} {failed.error}; judged natively"]
    runs.are_later_near = later.are_near(reference, ranks)
    return ((reference_later, split) if is_wide else (runs.native, natively)), []


def _all_float64(trace: Trace) -> bool:
    """Whether the model itself runs in float64, so there is no wider run."""
    state_pieces = trace.initial or trace.steps[0].parameters
    pieces = [*state_pieces.values(), *trace.steps[0].outputs.values()]
    dtypes = {piece.local.dtype for piece in pieces if piece.local.is_floating_point()}
    return dtypes == {torch.float64}


def unusable(reference: Trace) -> Finding:
    """The finding for a model that cannot be trained on one device."""
    at = f" in module {reference.error_at}" if reference.error_at else ""
    reason = f"the model fails on one device{at}: {reference.error}"
    return unverified("reference", reason, "fix the training on one device first")


def errors_of(ranks: list[Trace]) -> list[Finding]:
    """One finding for all ranks that raised: the first that did not just wait for another."""
    failed = [trace for trace in ranks if trace.error is not None]
    if not failed:
        return []
    # Prefer ranks that did not just wait, then those that know the module.
    first = max(failed, key=lambda trace: (not trace.waited, bool(trace.error_at), -trace.rank))
    if any(trace.unsupported for trace in failed):
        first = next(trace for trace in failed if trace.unsupported)
        return [unverified("plan", str(first.error))]
    alike = tuple(trace.rank for trace in failed if trace.error == first.error)
    step = len(first.steps)
    which = ", ".join(map(str, alike))
    reason = f"rank{'s' * (len(alike) > 1)} {which} failed: {first.error}"
    origin = None
    if first.error_at:
        origin = Origin(
            kind=OriginKind.MODULE,
            name=first.error_at,
            ranks=alike if len(alike) < len(ranks) else (),
        )
    item = Item(ItemKind.HARNESS, "ranks", step=step)
    return [mismatch(item, Aspect.EXCEPTION, reason, origin=origin)]


_KIND_WORDS = {ItemKind.TRAINING_GRADIENT: "gradient", ItemKind.GRADIENT: "returned"}


def _count_affected_values(judged: list[Judged], wrong: list[Judged]) -> list[str]:
    """How many values of each kind are wrong in the first wrong step."""
    if not wrong:
        return []
    step = min(wrong_item.step for wrong_item in wrong)
    bad = Counter(wrong_item.item.kind for wrong_item in wrong if wrong_item.step == step)
    counter = Counter(judged_item.item.kind for judged_item in judged if judged_item.step == step)
    when = f"in step {step}" if step else "before the first step"
    parts = [
        f"{count} of {counter[kind]} {_KIND_WORDS.get(kind, kind)} values"
        for kind, count in bad.items()
    ]
    return [f"affected {when}: {', '.join(parts)}"]


def ordered_findings(judged: list[Judged], cause: ParallelCause | None) -> list[Finding]:
    """All findings, the cause first; one finding for each step after the first wrong one."""
    wrong = [wrong_item.step for wrong_item in judged if wrong_item.status is Status.DIFFERENT]
    # Wrong initial values are a cause of their own, and step 1 shows their effect.
    last = max(min(wrong), 1) if wrong else None
    sorted_findings: list[Finding] = []
    later: dict[int, list[Judged]] = {}
    for judged_item in judged:
        if last is not None and judged_item.step > last and not judged_item.status.passes():
            later.setdefault(judged_item.step, []).append(judged_item)
            continue
        findings = list(judged_item.findings)
        if cause is not None and judged_item is cause.judged:
            at = next(i for i, f in enumerate(findings) if not f.status.passes())
            findings[at] = cause.explain_finding(findings[at])
            sorted_findings = [findings.pop(at), *sorted_findings]
        sorted_findings += [_explain_finding(finding, judged_item, cause) for finding in findings]
    for step, those in later.items():
        value_count = sum(1 for item_of_step in judged if item_of_step.step == step)
        reason = (
            f"{len(those)} of its {value_count} values are not plainly the reference's, the "
            "first is "
            f"{those[0].item.item.text}; not judged, since it continues from wrong values"
        )
        sorted_findings.append(unverified(Item(name=f"step {step}"), reason, aspect=Aspect.VALUE))
    return sorted_findings


def _explain_finding(finding: Finding, judged: Judged, cause: ParallelCause | None) -> Finding:
    if cause is None or finding.status.passes():
        return finding
    diagnosis = cause.others.get((judged.step, judged.item.item.text))
    return finding if diagnosis is None else msgspec.structs.replace(finding, diagnosis=diagnosis)
