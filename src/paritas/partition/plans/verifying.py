"""A model under a parallel plan: does it train as it does on one device?"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from torch import distributed

from paritas._torch.quiet import quietly
from paritas.numerics.findings import (
    Aspect,
    Coverage,
    Finding,
    Origin,
    OriginKind,
    Status,
    Verdict,
)
from paritas.partition.plans.judging import Judge, Judged, complete_steps
from paritas.partition.plans.naming_causes import Cause, excuse_late_reductions, find_cause
from paritas.partition.plans.program import Program, make_program
from paritas.partition.plans.reference import run_reference
from paritas.partition.plans.teams import Team, device_here, run_ranks
from paritas.partition.plans.traces import Trace
from paritas.reporting.progress import shows_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

__all__ = ["judge_traces", "verify_parallel"]

T = TypeVar("T")


@shows_progress
def verify_parallel(  # noqa: PLR0913  (each is a thing that a training has)
    model: nn.Module | Callable[[], nn.Module],
    plan: Any,
    inputs: Any,
    mesh: int | Sequence[int] | Mapping[str, int] = 2,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    steps: int = 2,
    split: str | Sequence[str] | None = None,
    ranks: Team = "simulated",
    seed: int = 0,
    strict: bool = False,
    timeout: float = 120.0,
    on_progress: Callable[[str], None] | None = None,
) -> Verdict:
    """Train a model a few steps on one device and under a plan on ranks, and compare everything.

    Compared are outputs, losses, the gradient of every parameter put back together, parameters
    after each step, buffers; and what is claimed replicated, bit for bit between ranks.

    Args:
        model: the model on one device, which is left alone; or a function that makes it.
        plan: a `dict[str, ParallelStyle]`, `"ddp"`, `"fsdp"`, or a function of the model and the
            device mesh that gives the parallel model (None: it changed the one it was given).
        inputs: a batch `[x, ...]` or `Inputs`, or a list of `Inputs`, one for each step.
        mesh: how many ranks, along one axis or several: `4`, `(2, 2)`, `{"dp": 2, "tp": 2}`.
        loss: of the output and what the batch holds; otherwise the output, if that is a scalar, or
            a weighted mean of it.
        optimizer: of the parameters; SGD with momentum otherwise.
        steps: how many.
        split: axes of the mesh along which ranks have different samples; all of them for `"ddp"`
            and `"fsdp"`, none otherwise.
        ranks: `"simulated"` in threads of this process, `"gloo"` in processes, `"here"` if this
            process is a rank itself: all ranks call this and get the same verdict.
        seed: of the model that is made, and of every draw.
        strict: count `unstable` as a failure.
        timeout: seconds that the ranks of one run may take.
        on_progress: hears of every run.

    Returns:
        A verdict. The first failure is the earliest; where it starts and which collective is
        missing, doubled or mis-scaled are in its `origin` and `diagnosis`.

    Raises:
        UsageError: the arguments make no sense, or the model on one device cannot be trained.
    """
    program = make_program(
        model,
        plan,
        inputs,
        mesh,
        loss=loss,
        optimizer=optimizer,
        steps=steps,
        split=split,
        seed=seed,
    )
    runs = _Runs(program, ranks, timeout, on_progress or (lambda _: None))
    runs.tell("training on one device")
    reference = runs.native = runs.reference()
    if reference.error is not None:
        return Verdict(findings=(_unusable(reference),), strict=strict)
    runs.tell(f"training on {program.ranks} ranks")
    traces = runs.ranks()
    lifted, notes = _lifted(runs, traces)
    verdict = judge_traces(
        program, reference, traces, lifted, strict=strict, runs=runs, notes=tuple(notes)
    )
    return runs.agreed(verdict)


class _Runs:
    """How the program is run again."""

    def __init__(
        self, program: Program, team: Team, timeout: float, tell: Callable[[str], None]
    ) -> None:
        self.program = program
        self.team = team
        self.timeout = timeout
        self.tell = tell
        self.native = Trace()

    def reference(self, program: Program | None = None, **how: Any) -> Trace:
        """On one device: that of this rank, where this process is one."""
        device = device_here() if self.team == "here" else None
        return run_reference(program or self.program, device=device, **how)

    def ranks(self, program: Program | None = None, **how: Any) -> list[Trace]:
        """On the ranks."""
        return run_ranks(program or self.program, self.team, timeout=self.timeout, **how)

    def agreed(self, value: T) -> T:
        """What the first rank says, where all of them are here.

        Each judges for itself, and on real devices two runs of one program may round differently;
        but all have to take part in the same runs, and to end alike.
        """
        if self.team != "here":
            return value
        box = [value]
        group = distributed.new_group(backend="gloo")
        distributed.broadcast_object_list(box, src=0, group=group)
        distributed.destroy_process_group(group)
        return box[0]


def judge_traces(
    program: Program,
    reference: Trace,
    ranks: list[Trace],
    lifted: tuple[Trace, list[Trace]] | None,
    *,
    strict: bool = False,
    runs: _Runs | None = None,
    notes: tuple[str, ...] = (),
) -> Verdict:
    """Judge what the ranks did by what the reference did.

    Args:
        lifted: both in float64; None if that could not be had.
        runs: for the runs that tell where a fault is; without, nothing is located.
    """
    errors = _errors(ranks)
    judged: list[Judged] = []
    told = [*notes]
    if complete_steps(reference, ranks) or not errors:
        judge = Judge(
            program, reference, ranks, lifted, run_reference if runs is None else runs.reference
        )
        if runs is not None:
            judge.runs.tell = runs.tell
        judged = excuse_late_reductions(judge, judge.judge())
        told += [note for note in judge.runs.notes if "no wider arbiter" not in note]
        wrong = [one for one in judged if not one.status.passes()]
        cause = None
        located = bool(wrong) and not errors
        if located if runs is None else runs.agreed(located):
            first = min((one.step for one in wrong), default=1)
            watched = _watched(runs, lifted, first if runs is None else runs.agreed(first))
            cause = find_cause(judge, wrong, *watched) if wrong else None
            told += _affected(judged, wrong)
        findings = _ordered(judged, cause)
    else:
        findings = []
    compared = sum(1 for one in judged if one.item.reference is not None)
    coverage = Coverage(compared=compared, unmatched=tuple(_unmatched(reference, ranks)))
    return Verdict(
        findings=(*errors, *findings),
        coverage=coverage,
        notes=tuple(dict.fromkeys(told)),
        strict=strict,
    )


@quietly()
def _watched(
    runs: _Runs | None, lifted: tuple[Trace, list[Trace]] | None, step: int
) -> tuple[Trace | None, list[Trace]]:
    """Both sides once more, to the first step that is wrong, with what every module gave there."""
    if runs is None:
        return None, []
    runs.tell("looking for the module where it starts")
    wide = lifted is not None
    shorter = dataclasses.replace(runs.program, steps=max(1, step))
    reference = runs.reference(shorter, wide=wide, watch_modules=True)
    return reference, runs.ranks(shorter, wide=wide, watch_modules=True)


@quietly()
def _lifted(
    runs: _Runs, natively: list[Trace]
) -> tuple[tuple[Trace, list[Trace]] | None, list[str]]:
    """Both sides in float64, or why not."""
    if any(trace.error is not None for trace in natively):
        return None, []
    if _all_float64(runs.native):
        return (runs.native, natively), []
    runs.tell("training on one device, in float64")
    reference = runs.reference(wide=True)
    if reference.error is not None:
        return None, [f"no run in float64: on one device {reference.error}; judged natively"]
    runs.tell("training on ranks, in float64")
    ranks = runs.ranks(wide=True)
    failed = next((trace for trace in ranks if trace.error is not None), None)
    if failed is not None:
        return None, [f"no run in float64: rank {failed.rank} {failed.error}; judged natively"]
    return (reference, ranks), []


def _all_float64(trace: Trace) -> bool:
    """Whether the model runs in float64 by itself: there is no wider run."""
    pieces = [*trace.initial.values(), *trace.steps[0].outputs.values()]
    dtypes = {piece.local.dtype for piece in pieces if piece.local.is_floating_point()}
    return dtypes == {torch.float64}


def _unusable(reference: Trace) -> Finding:
    at = f" in module {reference.error_at}" if reference.error_at else ""
    return Finding(
        path="reference",
        aspect=Aspect.HARNESS,
        status=Status.UNVERIFIED,
        reason=f"the model fails on one device{at}: {reference.error}",
        advice="make it train on one device first",
    )


def _errors(ranks: list[Trace]) -> list[Finding]:
    """One finding for all ranks that raised: the first that did not merely wait for another."""
    failed = [trace for trace in ranks if trace.error is not None]
    if not failed:
        return []
    # Others are let go, or wait for it: the one that knows where it was comes first.
    first = max(failed, key=lambda trace: (not _waits(trace), bool(trace.error_at), -trace.rank))
    alike = tuple(trace.rank for trace in failed if trace.error == first.error)
    step = len(first.steps)
    where = f"step {step}: " if step else ""
    which = ", ".join(map(str, alike))
    reason = f"rank{'s' * (len(alike) > 1)} {which} failed: {first.error}"
    origin = None
    if first.error_at:
        origin = Origin(
            kind=OriginKind.MODULE,
            name=first.error_at,
            ranks=alike if len(alike) < len(ranks) else (),
        )
    return [
        Finding(
            path=f"{where}ranks",
            aspect=Aspect.EXCEPTION,
            status=Status.DIFFERENT,
            reason=reason,
            origin=origin,
        )
    ]


def _waits(trace: Trace) -> bool:
    """Whether a rank failed only because another did."""
    text = trace.error or ""
    return "another rank" in text or "no answer" in text or "Connection closed" in text


def _affected(judged: list[Judged], wrong: list[Judged]) -> list[str]:
    """How much of the first wrong step is wrong, kind by kind."""
    if not wrong:
        return []
    step = min(one.step for one in wrong)
    bad = Counter(one.item.kind for one in wrong if one.step == step)
    whole = Counter(one.item.kind for one in judged if one.step == step)
    when = f"step {step}" if step else "before the first step"
    parts = [f"{count} of {whole[kind]} {kind} values" for kind, count in bad.items()]
    return [f"affected in {when}: {', '.join(parts)}" if step else f"affected {when}: {parts[0]}"]


def _unmatched(reference: Trace, ranks: list[Trace]) -> list[str]:
    from paritas.partition.plans.items import unmatched

    return [f"{name} is on the ranks only" for name in unmatched(reference, ranks)]


def _ordered(judged: list[Judged], cause: Cause | None) -> list[Finding]:
    """All findings, the cause first; of the steps after the first wrong one, a row for each."""
    wrong = [one.step for one in judged if one.status is Status.DIFFERENT]
    # What is wrong before the first step is a cause of its own; step 1 still shows what it does.
    last = max(min(wrong), 1) if wrong else None
    found: list[Finding] = []
    later: dict[int, list[Judged]] = {}
    for one in judged:
        if last is not None and one.step > last and not one.status.passes():
            later.setdefault(one.step, []).append(one)
            continue
        findings = list(one.findings)
        if cause is not None and one is cause.judged:
            at = next(i for i, f in enumerate(findings) if not f.status.passes())
            findings[at] = cause.told(findings[at])
            found = [findings.pop(at), *found]
        found += [_explained(finding, one, cause) for finding in findings]
    for step, those in later.items():
        whole = sum(1 for one in judged if one.step == step)
        reason = (
            f"{len(those)} of its {whole} values are not plainly the reference's, the first is "
            f"{those[0].item.path}; not judged: it goes on from what is wrong before"
        )
        found.append(
            Finding(
                path=f"step {step}", aspect=Aspect.VALUE, status=Status.UNVERIFIED, reason=reason
            )
        )
    return found


def _explained(finding: Finding, one: Judged, cause: Cause | None) -> Finding:
    if cause is None or finding.status.passes():
        return finding
    diagnosis = cause.others.get((one.step, one.item.path))
    return finding if diagnosis is None else msgspec.structs.replace(finding, diagnosis=diagnosis)
