"""verify() block by block: models of any size, in the memory of a few of their blocks.

The reference runs natively once. What each call of a block got and returned, and the gradients that
went through it, are recorded; then each call is verified alone, like any other program, and so is
the rest of the model. Both models also run natively as a whole, and are compared at the noise that
the errors of the blocks become on their way through the model.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import warnings
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.errors import UsageError, in_one_line
from paritas.core.execution.block_noise import ComposedNoise, Shaken, measure_error
from paritas.core.execution.block_notes import describe_cut, label_texts
from paritas.core.execution.block_runs import Recorder, bring_back
from paritas.core.execution.blocks import named_modules, parameter_bytes, require_blocks
from paritas.core.execution.cut_models import BETWEEN, OtherArgument, Rest, Side
from paritas.core.execution.evidence import OWN_ERRORS, Demand, Evidence
from paritas.core.execution.observation import OUTPUT, RunOptions, keep_gradient, same_value
from paritas.core.execution.other_arguments import take_both_arguments
from paritas.core.execution.reachable import reachable_modules
from paritas.core.execution.run_plan import RunStep
from paritas.core.execution.saved_state import RandomState
from paritas.core.execution.subject_runs import SubjectLift, SubjectProgram
from paritas.core.execution.subjects import ForeignProgram, Inputs, inspect_subject
from paritas.core.judging.comparer import CollectedFindings, Comparer, LiftOf
from paritas.core.judging.failures import FailedPair
from paritas.core.judging.pairs import Pair, Ruling, judge_pair
from paritas.core.numerics import criterion
from paritas.core.numerics.automatic import FEW_RUNS
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.contents import detach_value
from paritas.core.numerics.flattening import flatten_value
from paritas.core.results.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.core.results.items import CALL, Item, ItemKind, gradient, harness, output
from paritas.core.results.progress import Progress
from paritas.core.results.wording import size
from paritas.core.time_limit import TimeLimit
from paritas.core.torch_private.dynamo import backends_of, original_of, undo_compile
from paritas.core.torch_private.tensors import is_out_of_memory
from paritas.core.transformers_library import arguments_without_cache
from paritas.verification.approximations import settle_and_locate
from paritas.verification.places import add_place, wrong_findings
from paritas.verification.verify import Verification, same_observation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from paritas.core.execution.block_runs import BlockCall, Parked
    from paritas.core.execution.observation import Observation
    from paritas.core.execution.subjects import Subject, VerifyConfig
    from paritas.core.locating.places import FailedCall

# The sum of the gradients of all pieces may differ by this share from the gradient of the whole.
_NEAR = 0.05
_NO_CUT_ADVICE = (
    "if blocks write to a cache that is passed to the model, pass none; otherwise name other "
    "blocks, or check the whole model with by='whole'"
)
_CACHE = (
    "the blocks write to a cache, so they were checked in a call with use_cache=False; the cache "
    "is compared natively, as an output of the whole model"
)
_FUSIONS = (
    "the compiled model cannot be entered, so its blocks were compiled alone, by the same backend "
    "with the same options; what the compiler does across blocks is seen only in the outputs and "
    "gradients of the whole model, at the noise of the whole model"
)


# --- The check ------------------------------------------------------------------------------------


class BlocksCheck:
    """One check of two models by blocks, on any number of sets of inputs."""

    def __init__(
        self,
        reference: Callable[..., Any],
        candidate: Callable[..., Any],
        config: VerifyConfig,
        patterns: Sequence[str] | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Find the blocks of both models.

        Raises:
            UsageError: a model has no blocks, or the candidate has others than the reference.
        """
        ours = dict(reachable_modules(reference, original_of))
        if backends_of(reference):
            raise UsageError("by='blocks' needs a reference that is not compiled")
        if isinstance(candidate, ForeignProgram):
            raise UsageError(f"by='blocks' cannot enter a candidate of {candidate.name}")
        blocks = require_blocks(ours, patterns, "reference")
        candidate_modules = dict(reachable_modules(candidate, original_of))
        modules_by_name = named_modules(candidate_modules)
        for name in blocks:
            if name not in modules_by_name:
                raise UsageError(
                    f"by='blocks' needs blocks of the same names on both sides: the candidate has "
                    f"no module {name}"
                )
        self.reference = Side(reference, reference, ours, blocks)
        others = {name: modules_by_name[name] for name in blocks}
        self.candidate = Side(candidate, undo_compile(candidate), candidate_modules, others)
        self.config = dataclasses.replace(config, raise_on_mismatch=False)
        self.tell = tell
        self.failed: list[FailedPair] = []
        self.search_limit: TimeLimit | None = None
        self.least_share = 0.0

    def run(self, inputs: Inputs, number: int = 0) -> Verdict:
        """Check one set of inputs; `number` is its number if there are several."""
        return _OneCheck(self, inputs, number).run()


class _OneCheck:
    """The check of one set of inputs."""

    def __init__(self, check: BlocksCheck, inputs: Inputs, number: int) -> None:
        self.check = check
        self.config = check.config
        self.inputs = inputs
        self.number = number
        self.rng = RandomState.now()
        self.out = CollectedFindings()
        # What pieces note and skip -> the pieces.
        self.notes: dict[str, list[str]] = collections.defaultdict(list)
        self.skipped: dict[str, list[str]] = collections.defaultdict(list)
        self.errors: dict[tuple[str, int], dict[str, Parked]] = {}
        self.repeats = False
        self.failed: dict[str, Status] = {}  # label of a piece -> its status
        # Parameter -> the sum of its gradients in all pieces, and the parameter itself.
        self.summed: dict[int, tuple[Tensor, Tensor]] = {}
        # Parameter -> the square of the error of its gradient in all pieces, where it matters.
        self.keeps_errors = False
        self.gradient_errors: dict[int, Tensor] = {}

    def run(self) -> Verdict:
        check = self.check
        reference = inspect_subject(
            check.reference.given, "reference", "framework_model", lends_parameters=True
        )
        candidate = inspect_subject(
            check.candidate.given,
            "candidate",
            "compiled_model",
            reference.state,
            lends_parameters=True,
        )
        prints = _Fingerprints((reference, candidate))
        config = dataclasses.replace(
            self.config, verify_input_gradients=False, verify_double_backward=False
        )
        whole_verification = _WholeVerification(
            reference, candidate, self.inputs, config, self.number, check.tell
        )
        recorder = Recorder(check.reference.blocks)
        whole_verification.run_both(recorder)
        if not self.config.enabled:
            note = "comparison was switched off (enabled=False); both sides ran"
            return Verdict(coverage=Coverage(), notes=(note,), enabled=False)
        if self._report_changed(prints):
            return self._verdict(recorder)
        try:
            recorder = self._check_all(whole_verification, recorder)
        except KeyboardInterrupt:
            if not wrong_findings(self.out.verdict(strict=self.config.strict)):
                raise
            note = "interrupted: the pieces after the last one that is listed were not compared"
            self.out.notes.append(note)
        self._report_changed(prints)
        return self._verdict(recorder)

    def _check_all(self, whole_verification: _WholeVerification, recorder: Recorder) -> Recorder:
        """Check the pieces, then the whole model at the noise that the pieces have."""
        recorded = whole_verification
        if whole_verification.natives[0].error is None:
            recorded, recorder = self._record_without_cache(whole_verification, recorder)
            self._check_pieces(whole_verification, recorded, recorder)

        def shaken(seed: int) -> Observation:
            watch = Shaken(self.check.reference.blocks, self.errors, seed)
            return whole_verification.once.run(RunOptions(watch=watch))[0]

        state = whole_verification.reference.state
        errors = {
            gradient(name): self.gradient_errors[id(parameter)]
            for name, parameter in {**state.lent, **state.tensors}.items()
            if id(parameter) in self.gradient_errors
        }
        noise = ComposedNoise(
            shaken, whole_verification.natives[0], self.config.seed, self.check.tell, errors
        )
        collected = whole_verification.compare(noise)
        if (
            whole_verification.natives[0].error is None
            and whole_verification.natives[0].gradient_error is None
        ):
            self._check_sums(recorded, noise)
        self.out.take(collected)
        return recorder

    def _record_without_cache(
        self, whole_verification: _WholeVerification, recorder: Recorder
    ) -> tuple[_WholeVerification, Recorder]:
        """The calls of blocks in a run that fills no cache, if they write to one in the first run.

        A model cannot be cut at blocks that write to their arguments.
        """
        model = self.check.reference.call
        kwargs = arguments_without_cache(model, self.inputs.kwargs) if recorder.uncut else None
        if kwargs is None:
            return whole_verification, recorder
        recorded = _WholeVerification(
            whole_verification.reference,
            whole_verification.candidate,
            dataclasses.replace(self.inputs, kwargs=kwargs),
            whole_verification.config,
            self.number,
            self.check.tell,
        )
        uncached = Recorder(self.check.reference.blocks)
        recorded.run_reference(uncached)
        if recorded.natives[0].error is not None or len(uncached.uncut) >= len(recorder.uncut):
            return whole_verification, recorder
        self.out.notes.append(_CACHE)
        return recorded, uncached

    # --- The pieces -------------------------------------------------------------------------------

    def _check_pieces(
        self,
        whole_verification: _WholeVerification,
        recorded: _WholeVerification,
        recorder: Recorder,
    ) -> None:
        """Check the blocks and the rest, as they were called in a recorded run."""
        self.keeps_errors = not whole_verification.is_identical
        self.repeats = whole_verification.repeats
        calls = recorder.cut_calls()
        rest = Rest(self.check.reference, self.check.candidate, recorded.inputs, calls)
        try:
            rest.look_for_passages(self.rng)
            rest.find_other_arguments(self.rng)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            reason = f"without its blocks, the model raises {in_one_line(error, 120)}"
            self._add_unverified(BETWEEN, reason, _NO_CUT_ADVICE)
            return
        recorder.uncut |= rest.uncut
        if not rest.calls:
            why = next(iter(recorder.uncut.values()), "the model calls none of them")
            self._add_unverified(
                BETWEEN, f"the model cannot be cut at its blocks: {why}", _NO_CUT_ADVICE
            )
            return
        self._require_share(rest)
        todo = [call for calls in rest.calls.values() for call in calls]
        for done, call in enumerate(todo):
            self._tell(done, len(todo) + 1)
            self._check_block(call, rest)
        self._tell(len(todo), len(todo) + 1)
        self._check_rest(rest, recorded)

    def _require_share(self, rest: Rest) -> None:
        """Refuse a model of which too little can be cut out, if that was asked for."""
        modules = self.check.reference.modules.values()
        whole_bytes = sum(map(parameter_bytes, modules))
        cut_bytes = sum(parameter_bytes(self.check.reference.blocks[name]) for name in rest.calls)
        if cut_bytes < self.check.least_share * whole_bytes:
            raise UsageError(
                f"the model can be cut only at blocks with {size(cut_bytes)} of its "
                f"{size(whole_bytes)} of parameters"
            )

    @property
    def _piece_config(self) -> VerifyConfig:
        # Which memory values share inside of a model is not visible to its caller. If the whole
        # candidate gave the same bits in its second call, so did each of its blocks.
        return dataclasses.replace(
            self.config,
            verify_double_backward=False,
            verify_aliasing=False,
            verify_strides=False,
            verify_second_call=self.config.verify_second_call and not self.repeats,
        )

    def _tell(self, done: int, total: int) -> None:
        failing = sum(not finding.status.passes() for finding in self.out.findings)
        step = Progress(RunStep.BLOCKS, done, total, failing=failing, peak=_peak_bytes())
        self.check.tell(step)

    def _check_block(self, call: BlockCall, rest: Rest) -> None:
        """Verify one call of a block, and release what is not needed any more."""
        ours, candidate_block = (
            self.check.reference.blocks[call.name],
            self.check.candidate.blocks[call.name],
        )
        label = _label_call(call)
        upstream = call.upstream_gradients()
        inputs = call.inputs()
        config = dataclasses.replace(self._piece_config, verify_input_gradients=False)
        with call.around.around(), _enter_call_buffers(call, ours, candidate_block):
            if call.others is not None:
                ours, candidate_block = take_both_arguments(ours, candidate_block)
            verification = self._verify_piece(
                _Piece(label, call.name), (ours, self.check.candidate.like(candidate_block)),
                inputs, call.draws[0], upstream, config,
            )  # fmt: skip
            evidence = verification.evidence
            if evidence is None or evidence.native[0].error is not None:
                return
            self._check_replay(label, call, verification)
            call.keep_returned(evidence.native[0])
            arbiter = evidence.arbiter() if self.keeps_errors else None
        if arbiter is not None:
            self.errors[call.name, call.number] = {
                item.name: error
                for item, value in evidence.native[0].outputs.items()
                if (error := measure_error(value, arbiter[0].value(item))) is not None
            }
        rest.release(call)

    def _verify_piece(
        self,
        piece: _Piece,
        pair: tuple[Callable[..., Any], Callable[..., Any]],
        inputs: Inputs,
        rng: RandomState,
        upstream: Mapping[Item, Tensor],
        config: VerifyConfig,
    ) -> _PieceVerification:
        """Verify one piece, and take its findings."""
        reference = inspect_subject(pair[0], "reference", "framework_model")
        candidate = inspect_subject(pair[1], "candidate", "compiled_model", reference.state)
        candidate = dataclasses.replace(candidate, family=self.check.candidate.given)
        if not upstream:  # nothing is differentiated, but the model may write to these values
            inputs = inputs.map_leaves(detach_value)
        rng.restore()
        verification = _PieceVerification(piece, (reference, candidate), inputs, config)
        verification.conditions = dataclasses.replace(
            verification.conditions,
            sketches=False,  # the gradients of its inputs go to other blocks
            upstream=upstream,
            gradients=verification.conditions.gradients and bool(upstream),
        )
        with warnings.catch_warnings():
            # Dynamo reads the gradients of all inputs; those of a block need not be leaves.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            verdict = verification.run()
            settled, failure_place = settle_and_locate(
                self._failed_call(verification, verdict), verdict
            )
            verdict = settled.verdict
            if failure_place is not None and not verdict.passed:
                verdict = add_place(verdict, failure_place)
        self._take(verdict, piece)
        if not verdict.passed:
            self.failed[piece.label] = verdict.status
        if not verdict.passed and len(self.check.failed) == 0 and piece.module:
            shown = [] if settled.inputs is None else [settled.inputs]
            self.check.failed.append(FailedPair(*pair, [*shown, inputs]))
        if verification.evidence is not None:
            self._add_gradients(reference, verification.evidence)
        is_search_over = failure_place is not None and failure_place.is_interrupted
        if verification.is_interrupted or settled.is_interrupted or is_search_over:
            raise KeyboardInterrupt  # after the findings about this piece
        return verification

    def _check_rest(self, rest: Rest, recorded: _WholeVerification) -> None:
        """Verify what lies between the blocks, as one program."""
        native = recorded.natives[0]
        upstream = rest.upstream(native, recorded.conditions)
        piece = _Piece(BETWEEN, names=rest.names(native), others=rest.other_arguments())
        with rest.cut() as pair:
            verification = self._verify_piece(
                piece, pair, rest.inputs(), self.rng, upstream, self._piece_config
            )
            self._report_other_arguments(verification)
            evidence = verification.evidence
            if evidence is None or evidence.native[0].error is not None:
                return
            expected = {
                item: value
                for item, value in rest.list_expected(native).items()
                if not piece.is_other(item.name)
            }
            self._check_values(BETWEEN, expected, verification)

    def _report_other_arguments(self, verification: _PieceVerification) -> None:
        """Judge arguments in another form by what the candidate's block makes of them.

        What its block was checked with came from its own code as its compiler traces it. What the
        compiled code passes must be the same.
        """
        agreeing: dict[str, list[str]] = collections.defaultdict(list)
        for argument in verification.piece.others:
            label = _label_call(argument.call)
            passed = [v for i, v in verification.passed.items() if argument.includes(i.name)]
            checked_leaves = argument.checked_leaves()
            item = output(argument.name).in_graph(BETWEEN).during(0, self.number)
            rule = functools.partial(
                _rule_on_other_argument, argument.words, label, self.failed.get(label)
            )
            if len(passed) != len(checked_leaves):
                reason = f"compiled, it passes {len(passed)} values, not {len(checked_leaves)}"
                self.out.add(item, Aspect.STRUCTURE, Status.DIFFERENT, reason)
                self.out.compared += 1
                continue
            for checked, value in [*zip(checked_leaves, passed, strict=True)] or [(None, None)]:
                findings, _ = judge_pair(Pair(item, checked, value), rules=[rule])
                self.out.findings += findings
                self.out.compared += len(findings)
                if all(finding.status.passes() for finding in findings):
                    agreeing[f"{argument.key}: {argument.words}"].append(label)
        for words, labels in agreeing.items():
            self.notes[f"argument {words}; its results are the same"] += labels

    # --- Is the model the sum of its pieces? ------------------------------------------------------

    def _check_replay(self, label: str, call: BlockCall, verification: Verification) -> None:
        """Check that a block alone computes what it computed inside of the model."""
        returned = flatten_value(bring_back(call.result), OUTPUT).leaves
        expected = {output(path): leaf for path, leaf in returned.items()}
        self._check_values(label, expected, verification)

    def _check_values(
        self, label: str, expected: Mapping[Item, Any], verification: Verification
    ) -> None:
        evidence = verification.evidence
        if evidence is None:
            return
        native = evidence.native[0]
        for item, value in expected.items():
            alone = native.value(item)
            same = same_value(value, alone) or not isinstance(value, torch.Tensor)
            if same or _is_near(evidence, item, value, alone):
                continue
            reason = f"alone, it does not compute the {item} that it computes inside of the model"
            advice = (
                "it depends on something that is neither an argument nor its state; check the "
                "whole model with by='whole', or name other blocks"
            )
            self._add_unverified(label, reason, advice)
            return

    def _add_gradients(self, subject: Subject, evidence: Evidence[Any]) -> None:
        native = evidence.native[0]
        arbiter = evidence.arbiter() if self.keeps_errors and native.gradients else None
        for name, parameter in subject.state.tensors.items():
            value = native.gradients.get(gradient(name))
            if value is None:
                continue
            gradient_copy = keep_gradient(value).double()
            earlier_sum = self.summed.get(id(parameter))
            total = gradient_copy if earlier_sum is None else earlier_sum[0] + gradient_copy
            self.summed[id(parameter)] = total, parameter
            true = None if arbiter is None else arbiter[0].gradients.get(gradient(name))
            if true is not None and is_inexact(value) and value.shape == true.shape:
                error = (gradient_copy - keep_gradient(true)).abs().square()
                error = error.nan_to_num(0.0, 0.0, 0.0)
                earlier = self.gradient_errors.get(id(parameter))
                self.gradient_errors[id(parameter)] = error if earlier is None else earlier + error

    def _check_sums(self, recorded: _WholeVerification, noise: ComposedNoise) -> None:
        """Check that the gradients of the whole model are the sums of those of its pieces."""
        first = recorded.natives[0]
        state = recorded.reference.state
        for name, parameter in {**state.lent, **state.tensors}.items():
            value = first.gradients.get(gradient(name))
            if value is None or not bool((value != 0).any()):
                continue
            summed_gradient = self.summed.get(id(parameter))
            total = (
                torch.zeros_like(value, dtype=torch.float64)
                if summed_gradient is None
                else summed_gradient[0]
            )
            if criterion.relative_rms(total - value, value) <= _NEAR:
                continue
            spread = noise.spread(gradient(name), FEW_RUNS)
            near = criterion.Noise(unit=0.0, spread=spread, factor=2.0)
            if spread is not None and criterion.score(total, value, near).score.passed:
                continue
            reason = "not checked by blocks: it is not the sum of the gradients of the blocks"
            advice = "blocks that run without gradients, as under reentrant checkpointing, hide it"
            item = gradient(name).during(0, self.number)
            self.out.add(item, Aspect.HARNESS, Status.UNVERIFIED, reason, advice)

    # --- Results ----------------------------------------------------------------------------------

    def _failed_call(self, verification: Verification, verdict: Verdict) -> FailedCall:
        """The call of a piece; all pieces share the time for the search."""
        if self.check.search_limit is None:
            self.check.search_limit = TimeLimit(self.config.locate_seconds)
        call = verification.failed_call(verdict)
        return dataclasses.replace(call, limit=self.check.search_limit, tell=self.check.tell)

    def _take(self, verdict: Verdict, piece: _Piece) -> None:
        """Take the findings of a piece, under its name."""
        label, within = piece.label, piece.module

        def label_item(item: Item) -> Item:
            graph = f"{label}: {item.graph}" if item.graph else label
            renamed = item.named(piece.names.get(item.name, item.name)).in_graph(graph)
            return renamed.during(item.call, self.number)

        paths = {finding.path: label_item(finding.item).text for finding in verdict.findings}
        for finding in verdict.findings:
            origin = finding.origin
            if origin is not None and within:
                module = f"{within}.{origin.module}" if origin.module else within
                origin = msgspec.structs.replace(origin, module=module)
            self.out.findings.append(
                msgspec.structs.replace(
                    finding,
                    item=label_item(finding.item),
                    origin=origin,
                    cause=paths.get(finding.cause, ""),
                )
            )
        self.out.compared += verdict.coverage.compared
        for skipped in verdict.coverage.skipped:
            self.skipped[skipped].append(label)
        self.out.unmatched += [
            f"{label}: {unmatched_name}" for unmatched_name in verdict.coverage.unmatched
        ]
        for note in verdict.notes:
            self.notes[note].append(label)

    def _add_unverified(self, label: str, reason: str, advice: str = "") -> None:
        item = harness(label).during(0, self.number)
        self.out.add(item, Aspect.HARNESS, Status.UNVERIFIED, reason, advice)

    def _report_changed(self, prints: _Fingerprints) -> bool:
        """Whether a call has changed parameters; they cannot be restored."""
        changed = prints.find_changed()
        for name in changed:
            item = Item(ItemKind.STATE_AFTER_CALL, name).during(0, self.number)
            reason = "a call changes this parameter, which a check by blocks does not copy"
            advice = "it was not restored; check the whole model with by='whole'"
            self.out.add(item, Aspect.HARNESS, Status.UNVERIFIED, reason, advice)
        return bool(changed)

    def _verdict(self, recorder: Recorder) -> Verdict:
        cut = [name for name in recorder.modules if name not in recorder.uncut]
        self.out.notes += label_texts(self.notes)
        self.out.skipped += label_texts(self.skipped)
        notes = [*describe_cut(cut, recorder.uncut)]
        if self.check.candidate.is_closed:
            notes.append(_FUSIONS)
        self.out.notes[:0] = notes
        return self.out.verdict(strict=self.config.strict)


def _label_call(call: BlockCall) -> str:
    return call.name if not call.number else f"{call.name} (call {call.number + 1})"


def _rule_on_other_argument(
    words: str, label: str, failed: Status | None, finding: Finding
) -> Ruling:
    """An argument is no result: what counts is whether the block's results are the same.

    `failed` is the status of the block, if it does not pass.
    """
    if failed is Status.UNVERIFIED:
        return Ruling(failed, f"{words}, and what {label} makes of them could not be compared")
    if failed is not None:
        reason = f"{words}, and {label} does not compute the same from them"
        return Ruling(Status.DIFFERENT, reason)
    if not finding.status.passes():
        reason = f"the compiled code passes another value than it does uncompiled: {finding.reason}"
        return Ruling(finding.status, reason)
    return Ruling(Status.EQUIVALENT, f"{words}; {label} computes the same from them")


def _is_near(evidence: Evidence[Any], item: Item, value: Any, alone: Any) -> bool:
    """Whether two native runs differ by no more than the error of one of them."""
    arbiter = evidence.arbiter()
    true = None if arbiter is None else arbiter[0].value(item)
    if true is None or not all(map(is_inexact, (value, alone, true))):
        return False
    if not value.shape == alone.shape == true.shape:
        return False
    apart = criterion.relative_rms(value.detach().to(true.dtype) - alone.detach(), true)
    return apart <= OWN_ERRORS * criterion.relative_rms(alone - true, true)


@contextlib.contextmanager
def _enter_call_buffers(call: BlockCall, *blocks: nn.Module) -> Iterator[None]:
    """Give blocks the buffers that the reference's had before a later call."""
    saved_buffers: list[tuple[Tensor, Tensor]] = []
    try:
        for block in blocks:
            for name, buffer in block.named_buffers():
                earlier_buffer = call.buffers.get(name.replace("_orig_mod.", ""))
                if earlier_buffer is not None:
                    saved_buffers.append((buffer, buffer.detach().clone()))
                    buffer.detach().copy_(earlier_buffer.back())
        yield
    finally:
        for buffer, value in reversed(saved_buffers):
            buffer.detach().copy_(value)


class _Fingerprints:
    """Shows whether parameters that were not copied have changed."""

    def __init__(self, subjects: Sequence[Subject]) -> None:
        self.parameters = {
            name: parameter
            for subject in subjects
            for name, parameter in subject.state.lent.items()
        }
        self.before = {name: _bits(parameter) for name, parameter in self.parameters.items()}

    def find_changed(self) -> list[str]:
        """The names of the parameters that have changed since the last time."""
        now = {name: _bits(parameter) for name, parameter in self.parameters.items()}
        changed = [name for name, bits in now.items() if bits != self.before[name]]
        self.before = now
        return changed


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(parameter: Tensor) -> tuple[int, int]:
    plain = parameter.detach()
    try:
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        total = int(plain.view(_INTEGERS[plain.dtype.itemsize]).sum(dtype=torch.int64))
    except (RuntimeError, KeyError, NotImplementedError):  # not dense
        total = 0
    return (0 if parameter.is_inference() else parameter._version), total  # noqa: SLF001


def _peak_bytes() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


# --- The two models as a whole, natively ----------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _WholeProgram(SubjectProgram):
    """A model as a whole, which runs natively only."""

    can_be_lifted = False


class _WholeVerification(Verification):
    """Runs both models natively, and compares them at the noise of all blocks together."""

    def run_both(self, recorder: Recorder) -> None:
        """Run the reference, with a recorder around its first call, and the candidate."""
        self.run_reference(recorder)
        plain = self.conditions
        self.mine = self._run_candidate(len(self.natives))
        self.intruded = self._intrusions()
        changing = {
            name
            for observation in (*self.natives, *self.mine)
            for name in observation.changed_state
        }
        conditions = dataclasses.replace(plain, changing=frozenset(changing))
        self.program = _WholeProgram(
            self.reference, self.inputs, self.rng, conditions, len(self.natives)
        )

    def run_reference(self, recorder: Recorder) -> None:
        """Run the reference, with a recorder around its first call."""
        plain = dataclasses.replace(self.conditions, sketches=True)
        watched = RunOptions(watch=recorder)
        self.conditions = dataclasses.replace(plain, options=watched)
        self.natives = self._run_reference()
        self.conditions = plain

    @property
    def once(self) -> _WholeProgram:
        """The reference, called once."""
        return dataclasses.replace(self.program, calls=1)

    @property
    def is_identical(self) -> bool:
        """Whether both sides gave the same bits."""
        return same_observation(self.natives[0], self.mine[0])

    def compare(self, noise: ComposedNoise) -> CollectedFindings:
        """Compare the first calls, and the candidate's second call."""
        first, candidate_calls = self.natives[0], self.mine
        evidence = Evidence(self.program, self.natives, self.config.seed)
        by_order = self._goes_by_order(first, candidate_calls[0])
        sides = SubjectLift(evidence, self.candidate, lift=False, by_order=by_order)
        if by_order:
            candidate_calls = sides.rename_outputs(candidate_calls)
        at_noise = functools.partial(Comparer, sides, lift=LiftOf.NO_CALL, noise=noise)
        comparer = at_noise(Demand(), self.config, 0, self._label_item(CALL))
        collected = comparer.compare(first, candidate_calls[0])
        collected.take(self.intruded)
        if self.repeats:
            collected.take(self._compare_second(sides, Demand(), self.natives, candidate_calls))
        elif len(candidate_calls) > 1:
            last, second = len(self.natives) - 1, self._label_item(CALL, call=2)
            comparer = at_noise(Demand(), self.config, last, second)
            collected.take(comparer.compare(self.natives[last], candidate_calls[1]))
        if self.config.verify_aliasing:
            collected.take(self._compare_memory(candidate_calls[0]))
        collected.notes += evidence.notes
        if collected.passes and first.error is None:
            self._compare_last(noise, sides, collected)
        return collected

    def _compare_last(
        self, noise: ComposedNoise, sides: SubjectLift, collected: CollectedFindings
    ) -> None:
        """Run the reference once more, for all pieces, which were not run again one by one."""
        self.tell(RunStep.AGAIN)
        first, last = self.natives[0], self.once.run(RunOptions())[0]
        if same_observation(first, last):
            return
        # If something changed the reference, the noise around the first run contains that change.
        moved = self._find_moved(sides, Demand(), first, last, noise.around(last))
        self._report_moved(collected, moved)


# --- The pieces -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A part of both models that is verified alone.

    Attributes:
        label: its name in findings.
        module: the path of the module that it is; "" for what lies between the blocks.
        names: path in the piece -> how findings name it.
        others: the arguments of blocks that the candidate passes in another form.
    """

    label: str
    module: str = ""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    others: Sequence[OtherArgument] = ()

    def is_other(self, path: str) -> bool:
        """Whether an output is, or belongs to, an argument in another form."""
        return any(other.includes(path) for other in self.others)


class _PieceVerification(Verification):
    """Verifies a piece; arguments in another form are set aside, for both sides differ in them.

    Attributes:
        passed: what the candidate itself passes as these arguments.
    """

    def __init__(
        self,
        piece: _Piece,
        sides: tuple[Subject, Subject],
        inputs: Inputs,
        config: VerifyConfig,
    ) -> None:
        super().__init__(*sides, inputs, config, 0, lambda _: None)
        self.piece = piece
        self.passed: dict[Item, Any] = {}
        self.runs_again_later = True

    def _run_reference(self) -> list[Observation]:
        return [self._set_aside(observation) for observation in super()._run_reference()]

    def _run_candidate(self, reference_calls: int) -> list[Observation]:
        observations = super()._run_candidate(reference_calls)
        outputs = observations[0].outputs.items()
        self.passed = {item: value for item, value in outputs if self.piece.is_other(item.name)}
        return [self._set_aside(observation) for observation in observations]

    def _set_aside(self, observation: Observation) -> Observation:
        if not self.piece.others:
            return observation
        is_other = self.piece.is_other
        return dataclasses.replace(
            observation,
            outputs={i: leaf for i, leaf in observation.outputs.items() if not is_other(i.name)},
            kinds={path: kind for path, kind in observation.kinds.items() if not is_other(path)},
            cut_off=[path for path in observation.cut_off if not is_other(path)],
        )
