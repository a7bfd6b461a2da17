"""verify_parallel() block by block: in float64, the ranks hold one block at a time.

The model trains natively once on one device and once on the ranks. What each block gets and
returns, and the gradients that go through it, are recorded on one device; the ranks show in which
form they hold these values. Then each block is trained alone, on one device and on the ranks,
natively and in float64, like any other program; and so is what lies between the blocks. The whole
model is compared natively, at the noise of its blocks.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from paritas.core.errors import in_one_line
from paritas.core.execution.block_noise import measure_error
from paritas.core.execution.block_notes import describe_cut, label_texts
from paritas.core.execution.block_runs import TrainingRecorder
from paritas.core.execution.blocks import require_blocks
from paritas.core.execution.cut_models import run_without_blocks
from paritas.core.numerics import criterion
from paritas.core.numerics.gates import Near
from paritas.core.results.findings import Coverage, Verdict
from paritas.core.results.progress import Progress
from paritas.core.torch_private.tensors import return_free_memory
from paritas.sharding.plans.assembling import find_slots, step_items, unmatched_names
from paritas.sharding.plans.boundaries import FormFinder, NotByBlocksError, RankRecorder
from paritas.sharding.plans.causes import excuse_late_reductions
from paritas.sharding.plans.edges import EdgeJudge, Errors, Shaking
from paritas.sharding.plans.judging import KEPT_KINDS, complete_steps
from paritas.sharding.plans.pieces import PieceTask, piece_program, run_rest
from paritas.sharding.plans.sketches import Abridger
from paritas.sharding.plans.traces import watched_modules
from paritas.sharding.plans.training import Manner, build_model, dtype_of, same_surroundings
from paritas.sharding.plans.verify import (
    ProgramRuns,
    check_program,
    errors_of,
    ordered_findings,
    unusable,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paritas.core.execution.block_runs import BlockCall, Recorder
    from paritas.core.results.findings import Finding
    from paritas.core.results.items import Item
    from paritas.sharding.plans.boundaries import CallForms
    from paritas.sharding.plans.plan import ParallelProgram
    from paritas.sharding.plans.traces import ModelNames, Trace


def check_by_blocks(
    runs: ProgramRuns, patterns: Sequence[str] | None, *, strict: bool = False
) -> Verdict:
    """Check a model under a plan by blocks.

    Raises:
        UsageError: the model has no blocks, or a pattern matches none.
        NotByBlocksError: the plan does not allow it.
    """
    if runs.program.step is not None:
        raise NotByBlocksError("step= calls the model and its backward pass itself")
    model, dtype = _model_of(runs.program)
    blocks = require_blocks({"": model}, patterns, "model")
    near = Near(criterion.unit_roundoff(runs.program.compute_dtype or dtype))
    runs.program = dataclasses.replace(runs.program, model=model)
    return _BlocksOfPlan(runs, list(blocks), near, strict=strict).run(model)


def _model_of(program: ParallelProgram) -> tuple[nn.Module, torch.dtype]:
    """The model on one device, which every run copies, and its dtype."""
    if isinstance(program.model, nn.Module):
        return program.model, dtype_of(program.model)
    with same_surroundings(Manner()):
        built = build_model(program, Manner())
    return built.model, built.dtype


@dataclasses.dataclass(frozen=True)
class Recording:
    """Records the calls of blocks in each step; on ranks, what each rank holds."""

    blocks: tuple[str, ...]
    on_ranks: bool = False

    def __call__(self, names: ModelNames, trace: Trace) -> Recorder:
        """The context around the forward pass of the current step."""
        modules_by_name = watched_modules(names)
        blocks = {name: modules_by_name[name][0] for name in self.blocks if name in modules_by_name}
        step = len(trace.steps)
        recorder: Recorder = (
            RankRecorder(blocks, trace.equal, step) if self.on_ranks else TrainingRecorder(blocks)
        )
        trace.steps[-1].blocks, recorder.uncut = recorder.calls, trace.uncut
        return recorder


class _BlocksOfPlan:
    """One check."""

    def __init__(self, runs: ProgramRuns, blocks: list[str], near: Near, *, strict: bool) -> None:
        self.runs = runs
        self.blocks = blocks
        self.near = near
        self.strict = strict
        self.findings: list[Finding] = []
        self.compared = 0
        self.notes: dict[str, list[str]] = collections.defaultdict(list)
        # Block -> why it is checked as a part of what lies between the blocks.
        self.uncut: dict[str, str] = {}
        self.errors: Errors = [{} for _ in range(runs.program.steps)]
        # Items of pieces that are far from the reference, natively: item -> the piece.
        self.gross: dict[Item, str] = {}
        self.needs_whole = False

    def run(self, model: nn.Module) -> Verdict:
        """Check everything."""
        program = self.runs.program
        tensors = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        abridge = Abridger(program, {name: tensor.detach() for name, tensor in tensors.items()})
        reference, off = self._reference(abridge)
        return_free_memory()
        if reference.error is not None:
            return Verdict(findings=(unusable(reference),), strict=self.strict)
        self.runs.tell(f"training on {program.ranks} ranks")
        record = Recording(tuple(self.blocks), on_ranks=True)
        ranks = self.runs.split = self.runs.ranks(off, record=record, abridge=abridge)
        for trace in ranks:
            if trace.whole_only:
                raise NotByBlocksError(str(trace.error))
        raised = errors_of(ranks)
        if raised or not complete_steps(reference, ranks):
            return self.runs.agree_on(Verdict(findings=tuple(raised), strict=self.strict))
        calls, forms = self._cut(reference, ranks)
        for trace in (reference, *ranks):
            for step in trace.steps:
                step.blocks = {}
        self._check_pieces(calls, forms)
        self._check_edges(off, reference, ranks, abridge)
        return self.runs.agree_on(self._verdict(reference, ranks, calls))

    # --- The whole model, natively ----------------------------------------------------------------

    def _reference(self, abridge: Abridger) -> tuple[Trace, Any]:
        """Train on one device, without dropout if the model has it, and record the blocks."""
        program, record = self.runs.program, Recording(tuple(self.blocks))
        self.runs.tell("training on one device")
        trace = self.runs.reference(program, record=record, abridge=abridge)
        if trace.error is None and trace.random:
            off = dataclasses.replace(program, dropout="off")
            without = self.runs.reference(off, record=record, abridge=abridge)
            if without.error is None and not without.random:
                return without, off
        return trace, program

    def _cut(
        self, reference: Trace, ranks: list[Trace]
    ) -> tuple[list[dict[str, list[BlockCall]]], list[dict[str, list[dict[int, CallForms]]]]]:
        """The calls of each block that can be cut out, in each step, and their forms on ranks."""
        finder = FormFinder(self.runs.program, ranks, self.near)
        for trace in (reference, *ranks):
            self.uncut |= trace.uncut
        calls: list[dict[str, list[BlockCall]]] = [{} for _ in reference.steps]
        forms: list[dict[str, list[dict[int, CallForms]]]] = [{} for _ in reference.steps]
        for name in self.blocks:
            calls_by_step = [step.blocks.get(name, []) for step in reference.steps]
            if name in self.uncut or not all(calls_by_step):
                continue
            try:
                forms_by_step = [
                    [finder.forms(call, number) for call in step]
                    for number, step in enumerate(calls_by_step)
                ]
            except NotByBlocksError as error:
                self.uncut[name] = str(error)
                continue
            for number, step in enumerate(calls_by_step):
                calls[number][name], forms[number][name] = step, forms_by_step[number]
        return calls, forms

    # --- The pieces -------------------------------------------------------------------------------

    def _check_pieces(
        self,
        calls: list[dict[str, list[BlockCall]]],
        forms: list[dict[str, list[dict[int, CallForms]]]],
    ) -> None:
        total = len(calls[0]) + 1
        for done, name in enumerate(list(calls[0])):
            self._tell(done, total)
            block_calls = [{name: step[name]} for step in calls]
            shown = [{name: step[name]} for step in forms]
            why = self._check_piece(PieceTask(self.runs.program, name, block_calls, shown))
            return_free_memory()
            if why:
                self._leave_uncut(name, why, calls, forms)
        self._tell(total - 1, total)
        rest = PieceTask(self.runs.program, "", calls, forms)

        def leave_uncut(name: str, why: str) -> None:
            self._leave_uncut(name, why, calls, forms)

        try:
            run_without_blocks(lambda: run_rest(rest), calls[0], leave_uncut)
        except Exception as error:
            raised = in_one_line(error, 120)
            raise NotByBlocksError(f"without its blocks, the model raises {raised}") from error
        if not calls[0]:
            why = next(iter(self.uncut.values()), "the model calls none of them")
            raise NotByBlocksError(f"none of its blocks can be entered alone: {why}")
        why = self._check_piece(rest)
        if why:
            raise NotByBlocksError(f"without its blocks, the model fails on the ranks: {why}")

    def _leave_uncut(self, name: str, why: str, *tables: list[dict[str, Any]]) -> None:
        self.uncut[name] = why
        for table in tables:
            for step in table:
                step.pop(name, None)

    def _tell(self, done: int, total: int) -> None:
        failing = sum(not finding.status.passes() for finding in self.findings)
        self.runs.tell(Progress("checking blocks on the ranks", done, total, failing=failing))

    def _check_piece(self, task: PieceTask) -> str:
        """Check one piece; why it cannot be run alone, or nothing."""
        why = ""
        for needs_whole in (True,) if self.needs_whole else (False, True):
            task = dataclasses.replace(task, whole=needs_whole)
            runs = ProgramRuns(
                piece_program(task), self.runs.team, self.runs.timeout, lambda _: None
            )
            verdict = check_program(runs, strict=self.strict)
            failed = next((trace for trace in (runs.native, *runs.split) if trace.error), None)
            if failed is None:
                self.needs_whole = self.needs_whole or needs_whole
                self._take(task, verdict, runs)
                return ""
            why = str(failed.error)
        return f"alone, it raises {why}"

    def _take(self, task: PieceTask, verdict: Verdict, runs: ProgramRuns) -> None:
        """Take the findings of a piece, and the errors of its reference."""
        for finding in verdict.findings:
            item = finding.item.in_graph(task.label)
            self.findings.append(msgspec.structs.replace(finding, item=item))
        self.compared += verdict.coverage.compared
        for note in verdict.notes:
            self.notes[note].append(task.label)
        if not verdict.passed:
            self._look_for_contradictions(task, verdict, runs)
        if task.name and runs.lifted is not None:
            for step, (native, wide) in enumerate(
                zip(runs.native.steps, runs.lifted[0].steps, strict=False)
            ):
                self._keep_errors(task, step, native.outputs, wide.outputs)

    def _keep_errors(self, task: PieceTask, step: int, native: Any, wide: Any) -> None:
        for call in task.calls[step][task.name]:
            table = self.errors[step].setdefault((call.name, call.number), {})
            mark = task.mark(call)
            for path, piece in native.items():
                if path in wide and path.startswith(mark):
                    error = measure_error(piece.local, wide[path].local)
                    if error is not None:
                        table[f"output{path.removeprefix(mark)}"] = error

    def _look_for_contradictions(
        self, task: PieceTask, verdict: Verdict, runs: ProgramRuns
    ) -> None:
        """Note values of a piece that are natively far from the reference.

        If they are right in the parallel model, the piece alone is not what runs there.
        """
        failing = {finding.item for finding in verdict.failures}
        slots = find_slots(runs.program, runs.native.initial, runs.split)
        for number in range(complete_steps(runs.native, runs.split)):
            step = runs.native.steps[number]
            for step_item in step_items(runs.program, step, runs.split, number, slots):
                item = msgspec.structs.replace(step_item.item, step=number + 1)
                value = step_item.ranks.value
                if item not in failing or step_item.reference is None or value is None:
                    continue
                if not self.near(value, step_item.reference):
                    self.gross.setdefault(item, task.label)

    # --- The edges --------------------------------------------------------------------------------

    def _check_edges(
        self, program: Any, reference: Trace, ranks: list[Trace], abridge: Abridger
    ) -> None:
        cut = tuple(name for name in self.blocks if name not in self.uncut)
        shaking = Shaking(cut, self.errors, abridge)
        judge = EdgeJudge(program, reference, ranks, self.runs.reference, shaking, self.runs.tell)
        judged = excuse_late_reductions(judge, judge.judge())
        findings = ordered_findings(judged, None)
        right = {
            msgspec.structs.replace(judged_edge.item.item, step=judged_edge.step)
            for judged_edge in judged
            if judged_edge.item.reference is not None
            and judged_edge.item.ranks.value is not None
            and self.near(judged_edge.item.ranks.value, judged_edge.item.reference)
        }
        for item, label in self.gross.items():
            if item in right and item.kind in KEPT_KINDS:
                raise NotByBlocksError(
                    f"alone, {label} does not compute the {item} that it computes inside of the "
                    "parallel model"
                )
        self.findings += findings
        self.compared += sum(1 for judged_edge in judged if judged_edge.item.reference is not None)
        for note in judge.runs.notes:
            self.notes[note].append("the whole model")

    # --- Results ----------------------------------------------------------------------------------

    def _verdict(
        self, reference: Trace, ranks: list[Trace], calls: list[dict[str, Any]]
    ) -> Verdict:
        extra = tuple(f"{name} is on the ranks only" for name in unmatched_names(reference, ranks))
        return Verdict(
            findings=tuple(self.findings),
            coverage=Coverage(compared=self.compared, unmatched=extra),
            notes=(*self._notes(list(calls[0])), *dict.fromkeys(ranks[0].notes)),
            strict=self.strict,
        )

    def _notes(self, cut: list[str]) -> Iterator[str]:
        yield from describe_cut(cut, self.uncut)
        if self.needs_whole:
            yield (
                "the plan needs the numbers of the whole model, so each rank held a copy of it "
                "while a block was checked"
            )
        yield from label_texts(self.notes)
