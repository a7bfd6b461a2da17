"""Judge one candidate on the cases of a task."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from paritas.core.execution.observation import input_tensors
from paritas.core.execution.subjects import Inputs, VerifyConfig
from paritas.core.judging.comparer import CollectedFindings
from paritas.core.results.findings import Aspect, Coverage, Status, Verdict, mismatch
from paritas.core.results.items import Item, ItemKind, harness, output
from paritas.core.results.progress import Progress
from paritas.core.results.wording import count_things, list_first
from paritas.core.time_limit import OutOfTime
from paritas.kernels.called import CalledCandidate, CannotConstructError
from paritas.kernels.calling import AUTOCAST, COMPILED, STREAM, callers_on, has_streams
from paritas.kernels.comparing import (
    RemoteLift,
    calls_reference,
    compare_below_autocast,
    compare_call,
    encode_inputs,
    ended_verdict,
    forbidden_calls,
    is_of_compiler,
    outside_findings,
    setting_findings,
    without_own_memory,
)
from paritas.kernels.messages import (
    PLAIN_CONDITIONS,
    CallConditions,
    CheckRegistrations,
    Registrations,
)
from paritas.kernels.processes import CandidateEnded, CandidateProcess
from paritas.kernels.references import JudgedCase, RefusedCase
from paritas.kernels.rows import (
    CaseEnd,
    CaseFamily,
    KernelReport,
    KernelRow,
    KernelTiming,
    TaskRating,
)
from paritas.kernels.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.kernels.cases import KernelCase
    from paritas.kernels.judge import KernelJudge
    from paritas.kernels.messages import CallRecord, Effects, SideName, Widening

# A candidate that ends its process this often is not called again.
_MOST_RESTARTS = 3
# Only the first failing cases are diagnosed: that takes longer than judging them.
_MOST_EXPLAINED = 2
# Of the time limit: for what the task is worth, and for each further step that is asked for.
_SHARE_OF_RATING, _SHARE_OF_STEP = 0.05, 0.2
# With less of the time, no further cases are made.
_LEAST_SHARE = 0.15


class Judgement:
    """One candidate: its process, its calls, and a row for each."""

    def __init__(self, judge: KernelJudge, name: SideName, cases: list[JudgedCase]) -> None:
        self.judge, self.name, self.cases = judge, name, list(cases)
        self.options, self.task, self.limit = judge.options, judge.task, judge.limit
        self.config = VerifyConfig(
            raise_on_mismatch=False,
            verify_gradients=self.options.gradients,
            verify_second_call=False,
            verify_input_gradients=False,
            verify_double_backward=False,
            verify_aliasing=False,  # stricter and milder here: see `compare_call`
            verify_requires_grad=True,
            strict=self.options.strict,
            seed=self.options.seed,
        )
        self.rows: list[KernelRow] = []
        self.notes: list[str] = []
        # The cases of other callers that the reference refuses.
        self.refused: list[str] = []
        self.called = CalledCandidate(judge, name, self.cases)
        self.restarts = 0
        self._is_cut_short = False
        # Results in memory that is used again in another call.
        self._used_again: dict[str, None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.called.end()

    def run(self) -> KernelReport:
        """Load it, call it on every case, and judge each call."""
        files = {"candidate": self.name.file, "reference": self.task.side.file}
        before = {role: _content(file) for role, file in files.items()}
        for case, reason in self.judge.unjudged.items():
            advice = "fix the reference, or its inputs"
            self._add_unverified(case, CaseFamily.GIVEN, reason, advice, role="reference")
        if self.judge.broken:
            case, reason = next(iter(self.judge.broken.items()))
            count = count_things(len(self.judge.broken), "made case")
            self.notes.append(f"{count} not judged: {reason}; the first is {case!r}")
        with self.limit.reserving(self._time_after_cases()):
            if self.cases and self._load():
                self._call_all()
        self._note_used_again()
        self._note_coverage()
        self._require_unchanged([role for role in files if _content(files[role]) != before[role]])
        rating = self._rate()
        timing = self._time() if self.options.timing else None
        smallest, script = self._shrink() if self.options.script is not None else ("", "")
        return KernelReport(
            reference=self.task.side.name.shown,
            candidate=self.name.shown,
            rows=tuple(self.rows),
            refused=(*self.judge.refused, *self.refused),
            rating=rating,
            timing=timing,
            notes=tuple(dict.fromkeys(self.notes)),
            promises=tuple(sorted(self.options.fixed)),
            smallest=smallest,
            script=script,
            strict=self.options.strict,
            seconds=round(self.limit.spent, 3),
        )

    def _time_after_cases(self) -> float:
        """What the steps after the cases may need."""
        requested_steps = [
            self.options.rate_task,
            self.options.timing,
            self.options.script is not None,
        ]
        return self.limit.seconds * (
            _SHARE_OF_RATING + _SHARE_OF_STEP * sum(map(bool, requested_steps))
        )

    def _note_coverage(self) -> None:
        """What was judged, and what was not, if the time limit was reached."""
        if not self._is_cut_short:
            return
        judged = [row for row in self.rows if row.ended is not CaseEnd.NOT_CALLED]
        families = dict.fromkeys(str(row.family) for row in judged)
        self.notes.append(
            f"the time limit was reached after {count_things(len(judged), 'case')}"
            + (f" ({', '.join(families)})" if families else "")
        )

    @property
    def _given_case(self) -> JudgedCase | None:
        """The case with the given inputs; None if the reference refuses them."""
        return next((judged for judged in self.cases if judged.case.is_given), None)

    @property
    def _failing_rows(self) -> list[KernelRow]:
        return [
            row
            for row in self.rows
            if not row.is_limit and not row.status.passes(strict=self.options.strict)
        ]

    def _require_unchanged(self, changed: list[str]) -> None:
        """What is timed, or judged next, is what was judged: files stay as they are."""
        for role in changed:
            collected = CollectedFindings(compared=1)
            reason = f"the file of the {role} has changed since the candidate was loaded"
            collected.add(harness(role), Aspect.SETTING, Status.DIFFERENT, reason)
            verdict = collected.verdict(strict=self.options.strict)
            self._add(f"the file of the {role}", CaseFamily.LOADING, verdict)

    def _rate(self) -> TaskRating:
        """What the task is worth; a kernel that fails has shown that it is worth something."""
        from paritas.kernels.references import plant_faults, rate_task

        rating = TaskRating()
        judged = [case for case in self.cases if case.row is not None]
        if judged and (not self._failing_rows or self.options.rate_task):
            try:
                rating = rate_task(judged)
            except OutOfTime:
                self._add_unverified(
                    "what the task accepts",
                    CaseFamily.GIVEN,
                    "the time limit was reached before it was known whether zeros would pass, too",
                    "raise the time limit",
                    role="task",
                )
            only_given = [
                given_accept
                for given_accept in rating.given_accepts
                if given_accept not in rating.accepts
            ]
            if only_given:
                self.notes.append(
                    f"with the given inputs alone, this task accepts {list_first(only_given, 5)}"
                )
        if self.options.rate_task:
            self.judge.tell("planting faults in the reference")
            rating = plant_faults(rating, self.cases, self.options.seed, self.limit.left)
        return rating

    def _check_registrations(self) -> None:
        """Check what a custom operator registers beside its kernel."""
        given_case, process = self._given_case, self.called.process
        if given_case is None or process is None or process.is_gone:
            return
        order = CheckRegistrations(inputs=encode_inputs(given_case.case.inputs))
        try:
            answer = process.ask(order, Registrations, self.called.seconds_to_build)
            results = answer.results
        except CandidateEnded as ended:
            results = {"opcheck": ended.how}
        if not results:
            return
        collected = CollectedFindings(compared=len(results))
        for name, problem in results.items():
            status = Status.DIFFERENT if problem else Status.IDENTICAL
            item = Item(ItemKind.NAMED, f"torch.library.opcheck {name}")
            collected.add(item, Aspect.STRUCTURE, status, problem or "passes")
        verdict = collected.verdict(strict=self.options.strict)
        self._add("registrations of the custom operator", CaseFamily.REGISTRATION, verdict)

    def _time(self) -> KernelTiming | None:
        """Time both sides in processes of their own, on the given inputs."""
        from paritas.kernels.calling import time_calls

        self.judge.tell("timing both sides")
        given_case = self._given_case
        if given_case is None:
            return None
        case = given_case.case
        try:
            with (
                self._timed_process(self.task.side.name, is_candidate=False) as reference_process,
                self._timed_process(self.name, is_candidate=True) as ours,
            ):
                encoded_inputs = encode_inputs(case.inputs)
                timing = time_calls(
                    reference_process, ours, encoded_inputs, is_cold=self.options.timing == "cold"
                )
        except (CandidateEnded, CannotConstructError) as error:
            timing = str(error) or "a side ended its process"
        except OutOfTime:
            timing = "the time limit was reached"
        if isinstance(timing, str):
            self.notes.append(f"there is no timing: {timing}")
            return None
        return timing

    def _timed_process(self, name: SideName, *, is_candidate: bool) -> CandidateProcess:
        process = CandidateProcess(
            name,
            self.judge.server,
            device=self.options.device,
            seconds=max(60.0, self.options.call_seconds * 10),
            limit=self.limit,
            is_candidate=is_candidate,
        )
        if process.loaded.error:
            process.close()
            raise CannotConstructError(process.loaded.error)
        seconds = self.called.seconds_to_build
        construction = process.construct(self.task.init, self.options.seed, seconds)
        if construction.error:
            process.close()
            raise CannotConstructError(construction.error)
        return process

    def _shrink(self) -> tuple[str, str]:
        """The smallest failing case in words, and the path of the script that shows it."""
        from paritas.core.reporting.scripts import NoScriptError, write
        from paritas.kernels.smallest import FailingCase, case_script, smallest_failing

        failing = next(
            (judged_case for judged_case in self.cases if judged_case.row in self._failing_rows),
            None,
        )
        assert self.options.script is not None  # noqa: S101  (for the type checker)
        if failing is None:
            return "", ""
        self.judge.tell("making the failing case smaller")
        # Some of the time is for the script itself, which is run once.
        with self.limit.reserving(self.limit.left / 2):
            case = smallest_failing(failing.case, self._still_fails)
        key = self.task.key(case)
        try:
            facts = FailingCase(
                case=case,
                reference=self.task.side.name,
                candidate=self.name,
                init=self.task.init,
                state=self.task.state(key),
                names=self.called.names,
                seed=self.options.seed,
                reason=_worst(failing.row),
                gradients=self.options.gradients,
            )
            script = case_script(facts)
            written = write(script, self.options.script, seconds=max(self.limit.left, 1.0))
        except NoScriptError as error:
            self.notes.append(f"there is no script: {error}")
            return f"{case.name}; {case.shapes}", ""
        if written.exit_code is None:
            self.notes.append(f"the script was not run to its end: {written.problem:.160}")
        elif not written.shows:
            self.notes.append(f"the script does not show it by itself: {written.problem:.160}")
        return f"{case.name}; {case.shapes}", str(written.path)

    def _still_fails(self, case: KernelCase) -> bool:
        try:
            run = self.task.run(case, gradients=self.options.gradients)
            self._construct(case)
            self.called.set_weights(case)
            record = self.called.call(case)
            collected = self._compare(JudgedCase(case, run), record)
        except (RefusedCase, OutOfTime):
            return False
        except (CandidateEnded, WireError, CannotConstructError):
            self.restarts += 1
            return self.restarts <= _MOST_RESTARTS
        return not collected.passes

    # --- The process of the candidate -------------------------------------------------------------

    def _load(self) -> bool:
        """Start the candidate; whether it can be called."""
        self.judge.tell("loading the candidate")
        collected = CollectedFindings()
        try:
            loaded = self.called.start()
            if loaded.error:
                return self._failed_to_load(loaded.error)
            collected.take(setting_findings(loaded.settings, "importing the candidate"))
            collected.take(self._outside(loaded, is_load=True))
            self._construct(self.cases[0].case)
        except CandidateEnded as ended:
            return self._failed_to_load(ended.how)
        except CannotConstructError as error:
            return self._failed_to_load(str(error))
        except OutOfTime:
            self._is_cut_short = True
            reason = "the time limit was reached before the candidate was loaded"
            self._add_unverified(
                "loading the candidate", CaseFamily.LOADING, reason, "raise the time limit"
            )
            return False
        self.notes += collected.notes
        if collected.findings:
            verdict = collected.verdict(strict=self.options.strict)
            self._add("loading the candidate", CaseFamily.LOADING, verdict)
        return True

    def _failed_to_load(self, reason: str) -> bool:
        collected = CollectedFindings(compared=1)
        words = f"the candidate cannot be loaded: {reason}"
        collected.add(harness("candidate"), Aspect.EXCEPTION, Status.DIFFERENT, words)
        verdict = collected.verdict(strict=self.options.strict)
        self._add("loading the candidate", CaseFamily.LOADING, verdict, ended=CaseEnd.RAISED)
        return False

    def _construct(self, case: KernelCase) -> None:
        """Start the candidate again if need be, and make its module for a case."""
        changed = self.called.construct(case)
        if changed.findings:
            verdict = changed.verdict(strict=self.options.strict)
            self._add("constructing the candidate", CaseFamily.LOADING, verdict)

    # --- The cases --------------------------------------------------------------------------------

    def _call_all(self) -> None:
        """Call it on every case, or on as many as the time limit allows, and for every caller."""
        remaining, is_called = list(range(len(self.cases))), False
        began, makes_haste = self.limit.left, False
        try:
            while remaining and self.restarts <= _MOST_RESTARTS:
                done = len(self.cases) - len(remaining)
                self.judge.tell(Progress("judging cases", done, len(self.cases)))
                self.limit.require()
                # At this pace, will there be time for all of them?
                so_far = began - self.limit.left if done else self.limit.seconds - began
                pace = so_far / (done or len(self.cases))
                makes_haste = makes_haste or pace * (len(remaining) + 8) > self.limit.left
                number = self._most_urgent(remaining) if makes_haste else remaining[0]
                if makes_haste and not is_called and self._is_judged(self.cases[number].case):
                    is_called = True
                    self._call_otherwise()
                row = self._judge_case(self.cases[number])
                remaining.remove(number)
                self.cases[number] = dataclasses.replace(self.cases[number], row=row)
                failing = not row.status.passes(strict=self.options.strict) and not row.is_limit
                if failing and self.options.stop_early:
                    self.notes.append("ended at the first case that fails")
                    return
                if not remaining and self.judge.unmade:
                    if not is_called:
                        is_called = True
                        self._call_otherwise()
                    remaining += self._more_cases()
            for number in remaining:
                self._not_called(self.cases[number].case)
            if not is_called and self.restarts <= _MOST_RESTARTS:
                self._call_otherwise()
            self._check_registrations()
        except OutOfTime:
            self._is_cut_short = True
            self._require_families([self.cases[number].case for number in remaining])
        self._require_made()

    def _more_cases(self) -> list[int]:
        """Cases of the families of which none was made in time, if there is time after all."""
        if self.limit.left < _LEAST_SHARE * self.limit.seconds:
            return []
        self.called.end()  # it must not find the process in which the reference is called
        known_count = len(self.cases)
        self.cases += self.judge.more_cases()
        return list(range(known_count, len(self.cases)))

    def _require_made(self) -> None:
        """Nothing is known about families of which no case was made in time."""
        for family in self.judge.unmade:
            if family not in self.options.promised:
                self._is_cut_short = True
                reason = "no case of this family was made before the time limit"
                advice = "raise the time limit, or promise what the task promises"
                self._add_unverified(f"cases of {family}", family, reason, advice, role="reference")

    def _most_urgent(self, remaining: list[int]) -> int:
        """The given inputs, then cases of families of which none is judged, then any."""

        def urgency(number: int) -> tuple[bool, bool, int]:
            case = self.cases[number].case
            return not case.is_given, self._is_judged(case), number

        return min(remaining, key=urgency)

    def _is_judged(self, case: KernelCase) -> bool:
        """Whether a case of its family was called."""
        return any(
            judged_case.row is not None and judged_case.case.family is case.family
            for judged_case in self.cases
        )

    def _call_otherwise(self) -> None:
        """Call it in filled memory, and as other callers do."""
        given_case = self._given_case
        if given_case is not None:
            self._watch_calls(given_case)
            self._from_other_callers(given_case)

    def _require_families(self, kernel_cases: list[KernelCase]) -> None:
        """A slow candidate does not choose what it is asked: one case of each family is judged."""
        judged = {
            judged_case.case.family for judged_case in self.cases if judged_case.row is not None
        }
        judged |= {row.family for row in self.rows if row.family is CaseFamily.CALLERS}
        judged |= self.options.promised
        case_by_family = {
            uncalled_case.family: uncalled_case for uncalled_case in reversed(kernel_cases)
        }
        reason = "not called: the time limit was reached before any case of its family"
        advice = "raise the time limit, promise what the task promises, or choose fewer cases"
        for family, case in case_by_family.items():
            if family not in judged:
                self._add_unverified(case.name, family, reason, advice, case=case)
        kernel_case = next(
            (uncalled_case for uncalled_case in kernel_cases if uncalled_case.is_given), None
        )
        if kernel_case is not None and CaseFamily.GIVEN in judged:
            before = "not called: the time limit was reached before the given inputs were compared"
            self._add_unverified(
                kernel_case.name, kernel_case.family, before, advice, case=kernel_case
            )
        if CaseFamily.CALLERS not in judged and self._other_callers():
            name = f"as given, {self._other_callers()[0]}"
            self._add_unverified(name, CaseFamily.CALLERS, reason, advice)

    def _not_called(self, case: KernelCase) -> None:
        reason = f"not called: the candidate ended its process {self.restarts} times"
        self._add_unverified(case.name, case.family, reason, case=case)

    def _add_unverified(
        self,
        name: str,
        family: CaseFamily,
        reason: str,
        advice: str = "",
        *,
        case: KernelCase | None = None,
        role: str = "candidate",
    ) -> None:
        """Add the row of a case in which the candidate is not called."""
        collected = CollectedFindings()
        collected.add(harness(role), Aspect.HARNESS, Status.UNVERIFIED, reason, advice)
        verdict = collected.verdict(strict=self.options.strict)
        self._add(name, family, verdict, case=case, ended=CaseEnd.NOT_CALLED)

    def _judge_case(self, judged: JudgedCase) -> KernelRow:
        case = judged.case
        missing = self.called.without_counterpart(case)
        if missing:
            verdict = _no_counterpart(missing)
            return self._add(case.name, case.family, verdict, case=case, ended=CaseEnd.NOT_CALLED)
        return self._judge_call(judged, self._compare)

    def _judge_call(
        self,
        judged: JudgedCase,
        compare: Callable[[JudgedCase, CallRecord], CollectedFindings],
        conditions: CallConditions = PLAIN_CONDITIONS,
    ) -> KernelRow:
        """Construct the candidate if need be, call it, compare, and add the row.

        Raises:
            RefusedCase: the comparison needs what the reference refuses.
        """
        case, collected = judged.case, CollectedFindings()
        how, seconds, problem = CaseEnd.RETURNED, 0.0, ""
        try:
            self._construct(case)
            collected.take(self.called.set_weights(case))
            record = self.called.call(case, conditions)
            how = CaseEnd.RETURNED if record.error is None else CaseEnd.RAISED
            seconds = record.seconds
            collected.take(compare(judged, record))
        except CandidateEnded as ended:
            return self._add_ended_row(case, ended)
        except OutOfTime:
            self.judge.renew(judged)
            raise
        except CannotConstructError as error:
            how, problem = CaseEnd.NOT_CALLED, f"the candidate cannot be constructed: {error}"
        except WireError as error:
            problem = f"the candidate's process sent a record that cannot be read: {error}"
        if problem:
            collected.compared += 1
            aspect = Aspect.EXCEPTION if how is CaseEnd.NOT_CALLED else Aspect.STRUCTURE
            collected.add(harness("candidate"), aspect, Status.DIFFERENT, problem)
        verdict = collected.verdict(strict=self.options.strict)
        return self._add(case.name, case.family, verdict, case=case, ended=how, seconds=seconds)

    def _compare(self, judged: JudgedCase, record: CallRecord) -> CollectedFindings:
        case, run, called = judged.case, judged.run, self.called

        def ask(inputs: Inputs, wide: Widening) -> CallRecord | None:
            try:
                if called.memory:
                    self._construct(case)
                    called.set_weights(case)
                widened = dataclasses.replace(case, inputs=inputs, reuse="")
                return called.call(widened, CallConditions(wide=wide))
            except CandidateEnded:
                self.restarts += 1
                return None

        if not self.options.fresh_outputs:
            record, reused_paths = without_own_memory(record, called.names)
            self._used_again |= dict.fromkeys(reused_paths)
        lift = RemoteLift(
            run.evidence,
            called.stand,
            ask,
            called.names,
            called.loaded.extensions,
            called.own_values,
        )
        failed = sum(not row.status.passes() for row in self.rows)
        collected = compare_call(
            run,
            record,
            lift,
            called.names,
            self.config,
            explains=failed < _MOST_EXPLAINED,
            nearby=functools.partial(self.task.run_nearby, case) if case.is_uniform else None,
        )
        collected.take(self._outside(record))
        collected.take(calls_reference(record, self.task.side.code_names))
        collected.take(forbidden_calls(record, self.options.forbid))
        return collected

    def _outside(self, effects: Effects, *, is_load: bool = False) -> CollectedFindings:
        file = self.name.file
        if is_load:  # builds write files, and start compilers
            built = {"writes", "deletes", "renames", "starts"}
            others = [event for event in effects.outside if event[0] not in built]
            effects = msgspec.structs.replace(effects, outside=others)
        return outside_findings(
            effects,
            reference_file=self.task.side.file,
            own_file=file or self.task.side.file,
            temporary=self.called.temporary,
        )

    def _add_ended_row(self, case: KernelCase, ended: CandidateEnded) -> KernelRow:
        self.restarts += 1
        timed_out = ended.kind == "timed out"
        return self._add(
            case.name,
            case.family,
            ended_verdict(ended.how, timed_out=timed_out, log=ended.log),
            case=case,
            ended=CaseEnd.TIMED_OUT if timed_out else CaseEnd.CRASHED,
        )

    def _watch_calls(self, judged_case: JudgedCase) -> None:
        """Call it again with poisoned memory, and look at what it calls."""
        for pattern in (0, 1):
            self.limit.require()
            # A caller may have gradients on without asking for any: as most do.
            grad_mode = bool(pattern) and not self.options.gradients
            case = dataclasses.replace(
                judged_case.case,
                name=f"as given, uninitialised memory filled ({'NaN' if not pattern else 'large'})",
                family=CaseFamily.MEMORY,
            )
            conditions = CallConditions(
                watch=True, profile=True, pattern=pattern, grad_mode=grad_mode
            )
            self._judge_call(JudgedCase(case, judged_case.run), self._compare, conditions)

    def _other_callers(self) -> list[str]:
        families = self.options.families
        if self.options.gradients or (families is not None and CaseFamily.CALLERS not in families):
            return []
        return callers_on(
            self.options.device,
            is_compiled=self.options.compiled,
            keeps_state=bool(self.called.memory),
        )

    def _from_other_callers(self, judged_case: JudgedCase) -> None:
        """Call it as programs do: with the given inputs, it computes the same for every caller."""
        callers = self._other_callers()
        if STREAM in callers and not has_streams(self.options.device):
            callers.remove(STREAM)
            self.notes.append(f"not called {STREAM}: {self.options.device} has no streams")
        for caller in callers:
            self.limit.require()
            case = dataclasses.replace(
                judged_case.case, name=f"as given, {caller}", family=CaseFamily.CALLERS
            )
            judged = JudgedCase(case, judged_case.run)
            compare = functools.partial(self._compare_for, caller)
            try:
                self._judge_call(judged, compare, CallConditions(caller=caller))
            except RefusedCase as refusal:
                self.refused.append(f"{case.name}: {refusal}")

    def _note_used_again(self) -> None:
        """A kernel that returns its own buffer is right; a caller that keeps results must know."""
        if not self._used_again:
            return
        collected = CollectedFindings(compared=len(self._used_again))
        for path in self._used_again:
            reason = "is in memory of the kernel's own, which a later call writes to again"
            advice = "copy a result before the next call; --fresh-outputs makes this a failure"
            collected.add(output(path), Aspect.ALIAS, Status.DIFFERENT, reason, advice)
        name = "a result that is kept until the next call"
        verdict = collected.verdict(strict=self.options.strict)
        self._add(name, CaseFamily.MEMORY, verdict, is_limit=True)
        self.notes.append(
            "the kernel returns memory of its own, and uses it again in the next call: copy a "
            "result that is kept; --fresh-outputs makes this a failure"
        )

    def _compare_for(
        self, caller: str, judged: JudgedCase, record: CallRecord
    ) -> CollectedFindings:
        if caller == COMPILED and record.error is not None and is_of_compiler(record.error):
            return CollectedFindings(notes=[f"not called {caller}: {record.error[1]:.200}"])
        if caller != AUTOCAST:
            return self._compare(judged, record)
        cast = self.task.run_below_autocast(judged.case)
        return compare_below_autocast(judged.run.native, cast, record, self.called.names)

    def _add(
        self,
        name: str,
        family: CaseFamily,
        verdict: Verdict,
        *,
        case: KernelCase | None = None,
        ended: CaseEnd = CaseEnd.RETURNED,
        seconds: float = 0.0,
        is_limit: bool = False,
    ) -> KernelRow:
        is_limit |= family in self.options.promised
        if case is not None:
            is_limit |= bool(case.weights) and CaseFamily.WEIGHTS in self.options.promised
            # Refusing a tensor without elements, or a caller, harms nobody; a wrong result does.
            is_empty = any(not tensor.numel() for _, tensor in input_tensors(case.inputs))
            is_refused = is_empty or family is CaseFamily.CALLERS
            is_limit |= is_refused and ended is CaseEnd.RAISED
        row = KernelRow.of(
            verdict,
            case=name,
            family=family,
            inputs="" if case is None else case.shapes,
            ended=ended,
            is_limit=is_limit and not verdict.status.passes(strict=self.options.strict),
            seconds=round(seconds, 6),
        )
        self.rows.append(row)
        return row


def _content(file: str) -> bytes:
    """What is in a file; nothing if there is none."""
    try:
        return Path(file).read_bytes() if file else b""
    except OSError:
        return b""


def _worst(row: KernelRow | None) -> str:
    worst = None if row is None else row.verdict.worst
    return "" if worst is None else worst.reason


def _no_counterpart(missing: list[str]) -> Verdict:
    reason = (
        f"{count_things(len(missing), 'parameter')} of the reference ({list_first(missing, 3)}) "
        "cannot be set in the candidate: no parameter has its name and shape, or its value"
    )
    advice = "keep the parameters, or promise fixed weights"
    finding = mismatch(Item(ItemKind.STATE, missing[0]), Aspect.STRUCTURE, reason, advice)
    return Verdict(findings=(finding,), coverage=Coverage(compared=1))
