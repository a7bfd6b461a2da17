"""invariants(): do the ways of running one model that must agree, agree?

Both ways are runs of one model, so the arbiter is exact for both: first in float64, where they
agree to the last bits or are wrong; then in the dtype of the run, against measured noise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from paritas.core.call_options import takes_options
from paritas.core.errors import UsageError, in_one_line
from paritas.core.execution.evidence import Demand, Evidence, Notes, WideDefault, run_quietly
from paritas.core.execution.module_hooks import ModuleHooks
from paritas.core.execution.observation import RunConditions, RunOptions
from paritas.core.execution.saved_state import RandomState
from paritas.core.execution.subject_runs import SubjectLift, SubjectProgram
from paritas.core.execution.subjects import Inputs, VerifyConfig, input_sets, inspect_subject
from paritas.core.execution.ways import (
    DoesNotApply,
    NotPromised,
    OtherShape,
    current_piece,
)
from paritas.core.judging.comparer import Comparer
from paritas.core.judging.failures import Explainer
from paritas.core.numerics import criterion
from paritas.core.numerics.automatic import LIFTED_SLACK_SCALED, nonfinite_mismatch
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.checkers import AllCloseValueChecker, AutomaticValueChecker
from paritas.core.numerics.criterion import UNIT_F64, Noise
from paritas.core.numerics.pooling import NO_NOISE
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
from paritas.core.results.items import CALL, Item, ItemKind
from paritas.core.results.progress import shows_progress
from paritas.core.torch_private.dynamo import original_of, room_for_entries
from paritas.relations.relation import (
    Case,
    CheckedModel,
    RelationFamily,
    chosen,
)
from paritas.relations.rows import InvariantsReport, Promise, RelationRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from paritas.core.execution.observation import Observation
    from paritas.core.execution.subjects import Subject
    from paritas.core.execution.ways import Piece
    from paritas.relations.relation import Relation, Way

_LONGEST_REASON = 240
_BUFFER_RUNS = 3
_CHANGED = 0.1  # of a difference that is said to come from buffers, when these are moved
_BUFFERS_NOTE = (
    "in float64, the two ways differ only by the rounding of the model's buffers: only the native "
    "run was judged"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InvariantsOptions:
    """Which relations `invariants` checks, and what it reports on the way.

    Attributes:
        only: names of relations, or `serving`, `training` or `own`; by default, all that apply.
        candidate: a compiled or otherwise changed form of the model: it runs the other ways, and
            the model itself the plain ones.
        strict: count `unstable` as a failure.
        seed: seed of the perturbed runs.
        target: the name of the model in the report.
        on_progress: called with a short text before each step that may take long.
        on_result: called with the line of each relation that was checked, as soon as it was.
    """

    only: Sequence[str] | str | None = None
    candidate: Any = None
    strict: bool = False
    seed: int = 0
    target: str = ""
    on_progress: Callable[[str], None] | None = None
    on_result: Callable[[str], None] | None = None


@shows_progress
@takes_options(InvariantsOptions)
def invariants(model: Any, inputs: Any, options: InvariantsOptions) -> InvariantsReport:
    """Check relations between ways of running one model that must agree.

    Args:
        model: an `nn.Module` or a callable, in the mode in which it is used.
        inputs: as for `verify`: a list of positional inputs, a dict of keyword arguments, or
            `Inputs(args, kwargs)`.
        options: given as keyword arguments; see `InvariantsOptions`.

    Returns:
        A report with a row for each relation. A relation that the model does not promise has a row
        with the reason, and is not a failure.

    Raises:
        UsageError: the inputs are not valid, or there is no relation of a name in `only`.
    """
    sets = input_sets(inputs)
    if len(sets) != 1:
        raise UsageError(f"invariants takes one set of inputs, got {len(sets)}")
    strict, on_result = options.strict, options.on_result
    names = [options.only] if isinstance(options.only, str) else options.only
    relations = chosen(names)
    began = time.monotonic()
    tell = options.on_progress or (lambda _: None)
    rng = RandomState.now()
    try:
        check = _Check(model, options.candidate, sets[0], strict=strict, seed=options.seed)
        rows: list[RelationRow] = []
        for relation in relations:
            tell(f"checking {relation.name}")
            row = check.link_to_earlier(check.run(relation), rows)
            rows.append(row)
            if on_result is not None and row.status is not None:
                on_result(f"{row.word}: {row.relation}: {row.summary}")
        rows += check.list_unrestored()
    finally:
        rng.restore()
    return InvariantsReport(
        rows=tuple(rows), target=options.target, strict=strict, seconds=time.monotonic() - began
    )


class _Check:
    """All relations of one model on one set of inputs."""

    def __init__(
        self, model: Any, candidate: Any, inputs: Inputs, *, strict: bool, seed: int
    ) -> None:
        self.checked = CheckedModel(model, inputs)
        self.reference = inspect_subject(model, "reference", "model")
        self.candidate = self.reference
        if candidate is not None:
            state = self.reference.state
            self.candidate = inspect_subject(candidate, "candidate", "candidate", state)
        self.rng = RandomState.now()
        self.strict = strict
        self.seed = seed
        self._known: dict[Any, Evidence[SubjectProgram]] = {}
        self._demands: dict[Any, Demand] = {}
        # Relation -> the first wrong module, once a case of it has failed.
        self._origins: dict[str, Origin | None] = {}

    def run(self, relation: Relation) -> RelationRow:
        """Check one relation; what it raises is a row, never an exception."""
        began = time.monotonic()
        skipped: list[DoesNotApply | NotPromised] = []
        verdicts: list[Verdict] = []
        try:
            for case in relation.cases(self.checked):
                try:
                    verdicts.append(self._verdict(relation, case))
                except (DoesNotApply, NotPromised) as why:  # the other cases may still apply
                    skipped.append(why)
        except (DoesNotApply, NotPromised) as why:
            skipped.append(why)
        except Exception as error:  # noqa: BLE001  (an unverified row reports it)
            if _is_refusal(error):
                skipped.append(NotPromised(f"it raises {in_one_line(error, _LONGEST_REASON)}"))
            else:
                verdicts.append(self._report_unverified(relation, "", error))
        promise: Promise = "checked"
        reasons = list(dict.fromkeys(map(str, skipped)))
        if verdicts:
            names = tuple(f"{relation.name}: {reason}" for reason in reasons)
            verdicts.append(Verdict(coverage=Coverage(skipped=names)))
        else:
            skipped = skipped or [DoesNotApply("it has no cases for this model")]
            promise = "not promised" if isinstance(skipped[0], NotPromised) else "does not apply"
        verdict = _merge_verdicts(verdicts)
        return RelationRow(
            relation=relation.name,
            about=relation.about,
            promise=promise,
            reason="; ".join(reasons) or str(skipped[0]) if skipped else "",
            verdict=msgspec.structs.replace(verdict, strict=self.strict),
            seconds=time.monotonic() - began,
        )

    def link_to_earlier(self, row: RelationRow, before: list[RelationRow]) -> RelationRow:
        """The row, with the first one before it that fails at the same place, if one does."""
        origin_of_row = self._origins.get(row.relation)
        if origin_of_row is None or row.verdict.passed:
            return row
        alike = [
            earlier_row.relation
            for earlier_row in before
            if not earlier_row.verdict.passed
            and self._origins.get(earlier_row.relation) == origin_of_row
        ]
        return msgspec.structs.replace(row, linked=alike[0]) if alike else row

    def list_unrestored(self) -> list[RelationRow]:
        """A row if something of the model could not be restored between runs."""
        failures = {**self.reference.state.failures, **self.candidate.state.failures}
        findings = tuple(
            unverified(Item(ItemKind.STATE, name), reason) for name, reason in failures.items()
        )
        about = "every run starts from the same state"
        row = RelationRow(
            relation="same-start",
            about=about,
            promise="checked",
            verdict=Verdict(findings=findings),
        )
        return [row] if findings else []

    def _report_unverified(self, relation: Relation, label: str, error: Exception) -> Verdict:
        item = Item(ItemKind.HARNESS, "run").in_graph(relation.name)
        item = item.under(label) if label else item
        finding = unverified(item, f"it raised {in_one_line(error, _LONGEST_REASON)}")
        return Verdict(findings=(finding,), coverage=Coverage())

    def _judge_raised_error(self, relation: Relation, label: str, error: Exception) -> Verdict:
        """What a way raised: another shape, a refusal, or a failure."""
        if isinstance(error, OtherShape):
            return self._another_shape(relation, label, error)
        if _is_refusal(error):
            raise NotPromised(f"it raises {in_one_line(error, _LONGEST_REASON)}")
        return self._report_unverified(relation, label, error)

    @staticmethod
    def _another_shape(relation: Relation, label: str, error: OtherShape) -> Verdict:
        item = Item(ItemKind.OUTPUT, "output").in_graph(relation.name)
        finding = mismatch(item.under(label) if label else item, Aspect.SHAPE, str(error))
        return Verdict(findings=(finding,), coverage=Coverage(compared=1))

    # --- One case ---

    def _verdict(self, relation: Relation, case: Case) -> Verdict:
        # Looking for what a model promises calls it, and it may remember its last call.
        self.reference.state.touch()
        self.reference.state.restore()
        evidence = self._evidence(case)
        error = evidence.native[0].error
        if error is not None:
            return self._judge_raised_error(relation, case.label, error)
        if not case.draws_alike and evidence.depends_on_draws():
            raise DoesNotApply("its result depends on random numbers that it draws")
        side = self._compiled_subject if case.compiles else self.candidate
        is_trained = relation.family is RelationFamily.TRAINING and side is not self.reference
        if is_trained and not isinstance(original_of(side.call), nn.Module):
            raise DoesNotApply("the candidate is not a module: it has no parameters to train")
        program = dataclasses.replace(
            evidence.program, subject=self._subject(side, case.actual, case)
        )
        # A compiled model meets many shapes here. At its limit it would quietly run eagerly, and
        # eager would be compared with eager.
        with room_for_entries():
            side_run = program.run(RunOptions())[0]
        if side_run.error is not None:
            if side is not self.reference and _is_refusal(side_run.error):
                # What a compiler refuses, the model itself may do.
                reference_subject = self._subject(self.reference, case.actual, case)
                plain = dataclasses.replace(evidence.program, subject=reference_subject).run(
                    RunOptions()
                )[0]
                if plain.error is None or not _is_refusal(plain.error):
                    return self._report_unverified(relation, case.label, side_run.error)
            return self._judge_raised_error(relation, case.label, side_run.error)
        sides = SubjectLift(evidence, program.subject, notes=Notes())
        config = self._config(relation)
        demand = self._demands.setdefault(_key(case), Demand(settles=False))
        is_first = relation.name not in self._origins
        comparer = Comparer(sides, demand, config, 0, CALL)
        if not is_first:
            comparer.explainer = Explainer(left=0)
        collected = comparer.compare(evidence.native[0], side_run)
        if not collected.passes:
            if is_first:  # the cases of a relation that fail, fail at one place
                self._origins[relation.name] = self._origin(case, evidence, sides)
            origin = self._origins[relation.name]
            if self._is_rounding_of_buffers(evidence, sides, origin):
                del self._origins[relation.name]
                natively = SubjectLift(evidence, program.subject, lift=False, notes=Notes())
                comparer = Comparer(natively, demand, config, 0, CALL)
                collected = comparer.compare(evidence.native[0], side_run)
                collected.notes.append(_BUFFERS_NOTE)
            elif is_first:
                collected.findings = [
                    self._locate_finding(finding, relation, case, evidence, sides, side_run)
                    for finding in collected.findings
                ]
        collected.findings = [
            self._name_case(finding, relation, case) for finding in collected.findings
        ]
        collected.notes += [*evidence.notes, *sides.notes]
        return collected.verdict(strict=self.strict)

    @functools.cached_property
    def _compiled_subject(self) -> Subject:
        """The model under `torch.compile`; a candidate that is compiled is used as it is."""
        if self.candidate.is_compiled:
            return self.candidate
        compiled_model = torch.compile(self.checked.model)
        return inspect_subject(compiled_model, "candidate", "candidate", self.reference.state)

    def _evidence(self, case: Case) -> Evidence[SubjectProgram]:
        key = _key(case)
        if key not in self._known:
            program = SubjectProgram(
                self._subject(self.reference, case.expected, case),
                self.checked.inputs if case.inputs is None else case.inputs,
                self.rng,
                RunConditions(gradients=False, seed=self.seed, changing=frozenset()),
            )
            self._known[key] = Evidence(program, seed=self.seed)
        return self._known[key]

    @staticmethod
    def _subject(subject: Subject, way: Way, case: Case) -> Subject:
        model = subject.call

        def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
            with torch.set_grad_enabled(case.trains):
                named_values = dict(way(model, Inputs(args, kwargs)))
            # A slice and a concatenation have other strides, which nobody promises.
            return {name: _contiguous(value) for name, value in named_values.items()}

        return dataclasses.replace(subject, call=call, is_module=False)

    @staticmethod
    def _config(relation: Relation) -> VerifyConfig:
        exact = AllCloseValueChecker(rtol=0.0, atol=0.0)
        checker = exact if relation.bitwise else AutomaticValueChecker()
        return VerifyConfig(
            value_checker=checker,
            verify_gradients=False,
            verify_mutation=False,
            verify_state=False,
            verify_aliasing=False,
            verify_rng=False,
            verify_second_call=False,
            raise_on_mismatch=False,
        )

    @staticmethod
    def _name_case(finding: Finding, relation: Relation, case: Case) -> Finding:
        item = finding.item.in_graph(relation.name)
        item = item.under(case.label) if case.label else item
        return msgspec.structs.replace(finding, item=item)

    def _is_rounding_of_buffers(
        self, evidence: Evidence[SubjectProgram], sides: SubjectLift, origin: Origin | None
    ) -> bool:
        """Whether the two ways differ in float64 no more than the rounding of buffers explains.

        Only the buffers of the first wrong module count.

        A buffer holds what was computed when the model was built, in its dtype. A way that reads
        the buffer and a way that computes the same numbers then differ by that rounding, also in
        float64.
        """
        arbiter, lifted = evidence.arbiter(), sides.runs()
        module = self.checked.model
        if origin is not None and origin.name and isinstance(module, nn.Module):
            module = module.get_submodule(origin.name)
        shaken = _ShakenBuffers(module, evidence.unit, self.seed)
        if arbiter is None or lifted is None or not shaken.has_any:
            return False
        moved = [
            evidence.run(RunOptions(wide=True, mode=evidence.lift_mode(), watch=shaken))[0]
            for _ in range(_BUFFER_RUNS)
        ]
        for item, value in arbiter[0].outputs.items():
            other = lifted[0].value(item)
            if not is_inexact(value) or not isinstance(other, torch.Tensor):
                continue
            if other.shape != value.shape:
                return False
            runs = [moved_run.value(item) for moved_run in moved]
            if not all(isinstance(run, torch.Tensor) and run.shape == value.shape for run in runs):
                return False
            if nonfinite_mismatch(value, other) is not None:
                return False
            usual = max(criterion.relative_rms(run - value, value) for run in runs)
            if not criterion.relative_rms(other - value, value) <= criterion.MAX_Z * usual:
                return False
        return self._depends_on_buffers(module, evidence, sides)

    def _depends_on_buffers(
        self, module: Any, evidence: Evidence[SubjectProgram], sides: SubjectLift
    ) -> bool:
        """Whether the difference of the two ways changes as the buffers do.

        Two ways that read the same buffers move alike, and their difference has another reason.
        """
        arbiter, lifted = evidence.arbiter(), sides.runs()
        if arbiter is None or lifted is None:
            return False

        def run_shaken(program: SubjectProgram) -> Observation:
            shaken = _ShakenBuffers(module, evidence.unit, self.seed)
            options = RunOptions(wide=True, mode=evidence.lift_mode(), watch=shaken)
            return run_quietly(program, options, WideDefault())[0]

        ours, other_moved = run_shaken(evidence.program), run_shaken(sides.program)
        for item, value in arbiter[0].outputs.items():
            values = [value, lifted[0].value(item), ours.value(item), other_moved.value(item)]
            if not all(map(is_inexact, values)):
                continue
            before, after = values[1] - value, values[3] - values[2]
            if criterion.relative_rms(after - before, before) > _CHANGED:
                return True
        return False

    # --- Where a difference starts ---

    def _locate_finding(
        self,
        finding: Finding,
        relation: Relation,
        case: Case,
        evidence: Evidence[SubjectProgram],
        sides: SubjectLift,
        observation: Observation,
    ) -> Finding:
        """Add the first wrong module and token to a value that computes something else."""
        if finding.status is not Status.DIFFERENT or finding.aspect is not Aspect.VALUE:
            return finding
        origin = self._origins[relation.name]
        finding = msgspec.structs.replace(finding, origin=origin)
        if case.size is None:
            return finding
        wide = evidence.arbiter() is not None
        native = evidence.native
        runs = (
            [evidence.arbiter(), native, sides.runs()] if wide else [native, native, [observation]]
        )
        values: list[Any] = [None if run is None else run[0].value(finding.item) for run in runs]
        wrong_token = None
        if all(isinstance(value, torch.Tensor) and value.dim() > 1 for value in values):
            expected, measured, actual = values
            wrong_token = first_wrong_token(expected, measured, actual, evidence.unit)
        if wrong_token is not None:
            row, token = wrong_token
            words = f"first wrong at row {row}, token {token} (from 0, of {case.size[1]})"
            reason = f"{finding.reason}; {words}" if finding.reason else words
            finding = msgspec.structs.replace(finding, reason=reason)
        return finding

    def _origin(
        self, case: Case, evidence: Evidence[SubjectProgram], sides: SubjectLift
    ) -> Origin | None:
        """The first wrong module; None if it is not known."""
        model = self.checked.model
        if case.size is None or self.candidate.is_compiled or not isinstance(model, nn.Module):
            return None
        try:
            return self._first_wrong(model, case.size, evidence, sides)
        except Exception as error:  # noqa: BLE001  (a place is an extra: the verdict stands)
            sides.notes.append(f"no module was located: {in_one_line(error, 120)}")
            return None

    @staticmethod
    def _first_wrong(
        model: nn.Module,
        size: tuple[int, int],
        evidence: Evidence[SubjectProgram],
        sides: SubjectLift,
    ) -> Origin | None:
        """Run both ways once more, in float64 if that is possible, and compare their modules."""
        wide = evidence.arbiter() is not None
        expected = ModuleLog(model, size)
        native, actual = (ModuleLog(model, size, expected) for _ in range(2))

        def options(log: ModuleLog) -> RunOptions:
            mode = evidence.lift_mode() if wide else None
            return RunOptions(wide=wide, mode=mode, watch=log)

        evidence.run(options(expected))
        evidence.run(RunOptions(watch=native))
        run_quietly(sides.program, options(actual), WideDefault())
        return first_wrong(expected, native, actual, evidence.unit)


# How a library says that it does not do a thing, rather than fail at it.
_REFUSAL = re.compile(
    r"\b(only|not|isn't|un) ?supported\b|\bdoes(n't| not) support\b|\bnot compatible\b"
    r"|\bnot (yet )?implemented\b|\bcannot be run on (CPU|GPU|CUDA)\b"
)


def _is_refusal(error: BaseException) -> bool:
    """Whether an error says that something is not supported."""
    if isinstance(error, NotImplementedError):
        return True
    spoken = isinstance(error, ValueError | AssertionError)
    return spoken and bool(_REFUSAL.search(str(error)))


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def _merge_verdicts(verdicts: list[Verdict]) -> Verdict:
    """One verdict; a part that only lists what was skipped is not a failure."""
    judged = [judged_verdict for judged_verdict in verdicts if judged_verdict.findings]
    merged = Verdict.merge(judged)
    coverage = merged.coverage
    for verdict in verdicts:
        if not verdict.findings:
            coverage += verdict.coverage
    return msgspec.structs.replace(merged, coverage=coverage)


class _ShakenBuffers(contextlib.AbstractContextManager[None]):
    """Moves the floating buffers of a model by about a rounding error, each time by another."""

    def __init__(self, model: Any, unit: float, seed: int) -> None:
        self._model = model if isinstance(model, nn.Module) else nn.Module()
        self._unit = unit
        self._random = torch.Generator().manual_seed(seed)
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def has_any(self) -> bool:
        """Whether there is a buffer to move."""
        return any(map(is_inexact, self._model.buffers()))

    def __enter__(self) -> None:
        """Move them."""
        buffers = [
            module_buffer for module_buffer in self._model.buffers() if is_inexact(module_buffer)
        ]
        self._before = [(module_buffer, module_buffer.clone()) for module_buffer in buffers]
        for buffer in buffers:
            noise = torch.rand(buffer.shape, generator=self._random, dtype=torch.float64) * 2 - 1
            buffer.mul_((1 + self._unit * noise).to(buffer.device, buffer.dtype))

    def __exit__(self, *_: object) -> None:
        """Put them back."""
        for buffer, value in self._before:
            buffer.copy_(value)
        self._before = []


def _key(case: Case) -> Any:
    """Cases with the same plain way and the same inputs share its runs."""
    return case.expected, id(case.inputs)


# --- Where two ways part: the first wrong module, and the first wrong token -----------------------

# Both ways run once more in float64 with hooks on every module. A way may call the model many
# times, on a few tokens or rows each; the values of a module are put together at their places in
# the whole, and then compared.

# One value of a module: its path, which of its calls within one call of the model, and which of its
# inputs or outputs.
Key = tuple[str, int, str]


@dataclasses.dataclass
class _Canvas:
    """A value of the whole batch and sequence, and which of its places are known."""

    value: Tensor
    known: Tensor


class ModuleLog(ModuleHooks):
    """Records the inputs and outputs of all modules, at their places in the whole.

    Attributes:
        values: in the order in which the modules finished.
    """

    def __init__(
        self, model: nn.Module, size: tuple[int, int], like: ModuleLog | None = None
    ) -> None:
        """Record nothing yet.

        Args:
            model: the model whose modules are watched.
            size: the batch and the number of tokens of the whole.
            like: the log of the plain way, which shows the axes of each value.
        """
        super().__init__(dict(model.named_modules()))
        self.model = model
        self.axes: dict[Key, int] = {} if like is None else like.axes
        self._learns = like is None
        self.size = size
        self.values: dict[Key, _Canvas] = {}
        self._calls: dict[str, int] = {}

    def enter_call(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Copy the inputs."""
        if not name:
            self._calls.clear()
        inputs = [
            (f"in {argument}/{nth}", leaf.detach().clone())
            for argument, value in [*enumerate(args), *kwargs.items()]
            for nth, leaf in enumerate(_floats(value))
        ]
        return inputs, args, kwargs

    def leave_call(
        self, name: str, entered: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Put the inputs and the outputs at their places."""
        number = self._calls.get(name, 0)
        self._calls[name] = number + 1
        outputs = [(f"out {nth}", leaf) for nth, leaf in enumerate(_floats(result))]
        for value_name, leaf in [*entered, *outputs]:
            self._place((name, number, value_name), leaf.detach(), current_piece())

    def _place(self, key: Key, value: Tensor, piece: Piece) -> None:
        piece_cells = torch.zeros(self.size, dtype=torch.int64)[piece.rows][:, piece.tokens]
        size = (piece_cells.shape[0], piece_cells.shape[1])
        if self._learns and key not in self.axes:
            self.axes[key] = _token_axis(value, size)
        aligned = _align_axes(value, size, piece.own, self.axes.get(key, UNKNOWN))
        if aligned is None or not piece_cells.numel():
            return
        canvas = self.values.get(key)
        if canvas is None:
            shape = (*self.size, *aligned.shape[2:])
            canvas = _Canvas(
                torch.zeros(shape, dtype=aligned.dtype, device=aligned.device),
                torch.zeros(self.size, dtype=torch.bool, device=aligned.device),
            )
            self.values[key] = canvas
        if canvas.value.shape[2:] != aligned.shape[2:]:
            self.values.pop(key)
            return
        rows = piece.rows if isinstance(piece.rows, slice) else piece.rows.to(aligned.device)
        part, filled_cells = canvas.value[rows], canvas.known[rows]
        part[:, piece.tokens] = aligned.to(part.dtype)
        filled_cells[:, piece.tokens] = True
        canvas.value[rows], canvas.known[rows] = part, filled_cells


def _floats(value: Any) -> Iterator[Tensor]:
    """The floating tensors in a value of a module."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for leaf in value.values():
            yield from _floats(leaf)
    elif isinstance(value, list | tuple):
        for leaf in value:
            yield from _floats(leaf)


# The first axis may hold batch and tokens together; the axis may be unknown.
TOGETHER, UNKNOWN = 0, -1


def _token_axis(value: Tensor, size: tuple[int, int]) -> int:
    """The axis of the tokens, in a call on the whole."""
    rows, tokens = size
    for axis in (1, 2):
        if value.dim() > axis and value.shape[0] in {1, rows} and value.shape[axis] == tokens:
            return axis
    return TOGETHER if value.dim() and value.shape[0] == rows * tokens else UNKNOWN


def _align_axes(value: Tensor, size: tuple[int, int], own_tokens: Any, axis: int) -> Tensor | None:
    """The value with batch and tokens as its first axes; None if it does not have both."""
    rows, tokens = size
    if axis == UNKNOWN:
        return None
    if axis == TOGETHER:
        if not value.dim() or not rows or value.shape[0] % rows:
            return None
        moved = value.reshape(rows, -1, *value.shape[1:])
    else:
        if value.dim() <= axis or value.shape[0] not in {1, rows}:
            return None
        moved = value.movedim(axis, 1)
        moved = moved.expand(rows, *moved.shape[1:])
    if isinstance(own_tokens, torch.Tensor):
        own_tokens = own_tokens.to(value.device)
        if int(own_tokens.max()) >= moved.shape[1]:
            return None
        return moved[torch.arange(rows, device=value.device)[:, None], own_tokens]
    moved = moved[:, own_tokens]
    return moved if moved.shape[1] == tokens else None


def first_wrong(
    expected: ModuleLog, native: ModuleLog, actual: ModuleLog, unit: float
) -> Origin | None:
    """The first module whose output is wrong although its inputs are right; None if none is wrong.

    Args:
        expected: the values of the plain way in float64.
        native: the same in the dtype of the run, which shows how much the values round.
        actual: the values of the other way in float64.
        unit: unit roundoff of the native run.
    """
    wrong = {
        key
        for key in expected.values
        if key in actual.values and _differs(key, expected, native, actual, unit)
    }
    suspects = dict.fromkeys((key[0], key[1]) for key in expected.values if key in wrong)
    for path, nth in suspects:
        kinds = {key[2].partition(" ")[0] for key in wrong if key[:2] == (path, nth)}
        if kinds == {"out"}:
            return _origin(expected.model, path)
    outputs = [key for key in expected.values if key in wrong and key[2].startswith("out")]
    return _origin(expected.model, outputs[0][0]) if outputs else None


def _origin(model: nn.Module, path: str) -> Origin:
    module = model.get_submodule(path)
    return Origin(kind=OriginKind.MODULE, name=path, operator=type(module).__name__)


def _differs(
    key: Key, expected: ModuleLog, native: ModuleLog, actual: ModuleLog, unit: float
) -> bool:
    ours, actual_canvas = expected.values[key], actual.values[key]
    if ours.value.shape != actual_canvas.value.shape:
        return False
    both = ours.known & actual_canvas.known
    if not bool(both.any()):
        return False
    left, right = ours.value[both].double(), actual_canvas.value[both].double()
    plain = native.values.get(key)
    own_noise = NO_NOISE
    if plain is not None and plain.value.shape == ours.value.shape:
        own_noise = criterion.own_noise(plain.value[both], left).times(UNIT_F64 / unit)
    noise = Noise(unit=UNIT_F64, own=own_noise, factor=LIFTED_SLACK_SCALED)
    finite = torch.isfinite(left) == torch.isfinite(right)
    return not (criterion.score(right, left, noise).score.passed and bool(finite.all()))


def first_wrong_token(
    expected: Tensor, native: Tensor, actual: Tensor, unit: float
) -> tuple[int, int] | None:
    """The row and the token of the earliest wrong value, both in float64; None if there is none."""
    own_noise, true = (
        criterion.own_noise(native, expected).times(UNIT_F64 / unit),
        expected.double(),
    )
    floors = criterion.NoiseFloors.of(true, Noise(unit=UNIT_F64, own=own_noise, own_share=1.0))
    noise = floors.at(true, true.abs()) + UNIT_F64 * floors.populations.scale(true)
    error = (true - actual.double()).abs().nan_to_num(torch.inf)
    over = error > criterion.MAX_Z * LIFTED_SLACK_SCALED * noise
    wrong = over.reshape(*error.shape[:2], -1).any(dim=2)
    tokens = wrong.any(dim=0).nonzero()
    if not len(tokens):
        return None
    token = int(tokens[0])
    return int(wrong[:, token].nonzero()[0]), token
