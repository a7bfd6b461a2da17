"""judge_kernel(): does a kernel compute what its reference computes, on more than one input?"""

from __future__ import annotations

import itertools
import secrets
from typing import TYPE_CHECKING, Any, Self

import msgspec
import torch

from paritas.core.errors import UsageError
from paritas.core.execution.observation import input_tensors
from paritas.core.execution.saved_state import RandomState
from paritas.core.execution.subjects import Inputs, usable_device
from paritas.core.numerics.contents import map_leaves
from paritas.core.results.findings import Verdict, unverified
from paritas.core.results.progress import Progress, shows_progress
from paritas.core.time_limit import OutOfTime, TimeLimit
from paritas.core.torch_private.global_state import quietly
from paritas.kernels import KernelOptions
from paritas.kernels.cases import CaseMaker, KernelCase, in_calling_order
from paritas.kernels.comparing import encode_inputs
from paritas.kernels.judging import Judgement
from paritas.kernels.references import (
    JudgedCase,
    KernelTask,
    ReferenceEnded,
    RefusedCase,
    Rehearsal,
)
from paritas.kernels.rows import CaseEnd, CaseFamily, KernelReport, KernelRow
from paritas.kernels.servers import shared_server
from paritas.kernels.sides import load_side, parse_side, resolve_inputs
from paritas.kernels.wire import WireError

if TYPE_CHECKING:
    import contextlib
    import os
    from collections.abc import Callable, Iterator, Sequence

    from paritas.kernels.references import ReferenceRun

# Cases of one seed are always the same, so their results can be learned by heart; except for one.
_MOST_SEEDS = 1 << 20
# Making cases may take the rest of the time.
_SHARE_OF_CALLS = 0.6


# --- The public function --------------------------------------------------------------------------


@shows_progress
def judge_kernel(
    reference: str | os.PathLike[str] | Callable[..., Any],
    candidate: str | os.PathLike[str] | Callable[..., Any],
    options: KernelOptions | None = None,
    *,
    inputs: str | Callable[[], Any] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> KernelReport:
    """Judge a kernel that may cheat against its reference, on many cases.

    The candidate runs in a process of its own, which never holds the reference's outputs.

    Args:
        reference: `file.py` with a class `Model`, `file.py:name`, `package.module:name`, an
            operator such as `aten.softmax.int`, or a function or class of an importable module.
        candidate: the same; in a file, the class `ModelNew`.
        options: how many cases, what the task promises, limits; see `KernelOptions`.
        inputs: makes the inputs, or the name of a function that does; by default the function
            `get_inputs` beside the reference, or torch's own samples for an operator.
        on_progress: called with a short text before each step that may take long.

    Returns:
        The report, true if the candidate computes what the reference computes.

    Raises:
        UsageError: the reference or the candidate cannot be found, or the inputs are not valid.
    """
    with KernelJudge(reference, options, inputs=inputs, on_progress=on_progress) as judge:
        return judge.judge(candidate)


class KernelJudge:
    """A task, and a process from which candidates are started: for many candidates of one task.

    Attributes:
        options: how candidates are judged.
        name: where the reference is.
        server: the process from which candidates are started.
        limit: the time that a judgement may take; that of the first includes making the cases.
        current: the judgement under way; the last one afterwards.
        refused: the cases that the reference does not accept, and why.
        unjudged: the given cases about which nothing can be said, and why.
        broken: the made cases in which the reference does not return, and why.
        unmade: the families of which no case was made in time.
    """

    def __init__(
        self,
        reference: str | os.PathLike[str] | Callable[..., Any],
        options: KernelOptions | None = None,
        *,
        inputs: str | Callable[[], Any] | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        """Load the reference, run it on every case, and keep what it computes.

        Raises:
            UsageError: the reference or its inputs cannot be used.
        """
        self.options = options or KernelOptions()
        self._on_progress = on_progress or (lambda _: None)
        self.limit, self._doing = TimeLimit(self.options.seconds), "starting"
        self.current: Judgement | None = None
        self.server = shared_server(self.options.preload)
        usable_device(self.options.device)
        self.name = name = parse_side(reference, "REFERENCE")
        self._rehearsal = Rehearsal(
            name,
            self.server,
            device=self.options.device,
            seconds=max(60.0, self.options.call_seconds * 10),
            limit=self.limit,
        )
        self.refused: list[str] = []
        self.unjudged: dict[str, str] = {}
        self._refusal_of_given = "they are not among the cases"
        self.broken: dict[str, str] = {}
        self.unmade: list[CaseFamily] = []
        self._interrupted: set[CaseFamily] = set()
        self._sources: list[tuple[CaseFamily, Iterator[KernelCase]]] = []
        self._cases: list[JudgedCase] | None = None
        self._inputs = inputs
        self._task: KernelTask | None = None
        self._load()
        self._spent = self.limit.spent

    def _load(self) -> None:
        """Load the reference, and make its inputs, unless that takes too long.

        Raises:
            UsageError: the reference or its inputs cannot be used.
        """
        rng = RandomState.now()
        try:
            self.tell("loading the reference")
            self._rehearsal.load()
            make = resolve_inputs(self._inputs)
            side = load_side(self.name, is_candidate=False)
            self.tell("making the inputs")
            self._task = KernelTask(
                side,
                make,
                device=self.options.device,
                seed=self.options.seed,
                rehearsal=self._rehearsal,
                limit=self.limit,
            )
        except OutOfTime:
            self._rehearsal.end()
        except BaseException:
            self._rehearsal.end()
            raise
        finally:
            rng.restore()

    def tell(self, step: str) -> None:
        """Say which step is begun."""
        self._doing = step
        self._on_progress(step)

    @property
    def task(self) -> KernelTask:
        """The reference with its inputs."""
        assert self._task is not None, "loading it took too long"  # noqa: S101
        return self._task

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget the cases."""
        self._cases = None
        self._rehearsal.end()

    @quietly()
    def judge(self, candidate: str | os.PathLike[str] | Callable[..., Any]) -> KernelReport:
        """Judge one candidate, within the time limit where that is in our hands."""
        name = parse_side(candidate, "CANDIDATE")
        self.limit.begin(self._spent)
        self._spent = 0.0
        if self._task is None:
            self._load()
        if self._task is None:
            return unfinished_report(self.name.shown, name.shown, self._doing, self)
        rng = RandomState.now()
        try:
            with self._grad_mode():
                prepared = self.cases()
                with Judgement(self, name, prepared) as judgement:
                    self.current = judgement
                    return judgement.run()
        finally:
            rng.restore()

    @quietly()
    def cases(self) -> list[JudgedCase]:
        """The cases that the reference accepts, in the order of the calls, with its runs."""
        if self._cases is None:
            try:
                with self._grad_mode():
                    self._cases = self._make_cases()
            except ReferenceEnded as ended:
                self._cases, self.unjudged["constructing the reference"] = [], str(ended)
            finally:
                self._rehearsal.end()  # a candidate must not find it
        return self._cases

    def renew(self, judged: JudgedCase) -> None:
        """Forget what was measured in a case whose judgement was interrupted."""
        for number, case in enumerate(self._cases or ()):
            if case.case is judged.case and self._cases is not None:
                self._cases[number] = JudgedCase(case.case, case.run.renew())

    def _grad_mode(self) -> contextlib.AbstractContextManager[Any]:
        return torch.set_grad_enabled(self.options.gradients)

    def _make_cases(self) -> list[JudgedCase]:
        """Take cases from all families in turn, until there are enough.

        One of each family that the task promises not to change: they show its limits only.
        """
        runs: dict[int, ReferenceRun] = {}
        taken: list[KernelCase] = []
        try:
            self._take_cases(taken, runs)
        except OutOfTime:
            if not taken:
                why = "the time limit was reached before the reference returned"
                self.unjudged["as given"] = why
        if not taken and not self.unjudged:
            reason = self.refused[0] if self.refused else "there are no inputs"
            raise UsageError(f"the reference accepts none of its inputs: {reason}")
        ordered = in_calling_order(taken, self.options.seed)
        cases = [JudgedCase(case, runs[id(case)]) for case in ordered]
        self._require_given(cases)
        return cases

    def _take_cases(self, taken: list[KernelCase], runs: dict[int, ReferenceRun]) -> None:
        """Take cases in turn, as long as time is left to call the candidate on them.

        Raises:
            OutOfTime: the time for making cases is used up.
        """
        self._sources = families = list(self._families())
        self.unmade = list(dict.fromkeys(name for name, _ in families))
        reserved = 0.0
        while families and len(taken) < self.options.cases:
            for family in list(families):
                self.tell(Progress("making cases", len(taken), self.options.cases))
                with self.limit.reserving(reserved):
                    case = self._next_accepted(family, runs)
                if case is not None:
                    taken.append(case)
                    # The given inputs are worth all of the time; others are no use without calls.
                    reserved = reserved or _SHARE_OF_CALLS * max(self.limit.left, 0.0)
                if case is None or case.family in self.options.promised:
                    families.remove(family)
                if len(taken) >= self.options.cases:
                    self.unmade = []
                    break

    def more_cases(self) -> list[JudgedCase]:
        """A case of each family of which none was made in time, as long as there is time now."""
        runs: dict[int, ReferenceRun] = {}
        taken: list[KernelCase] = []
        try:
            with self.limit.reserving(_SHARE_OF_CALLS * max(self.limit.left, 0.0)):
                for case_source in [source for source in self._sources if source[0] in self.unmade]:
                    case = (
                        self._next_accepted(case_source, runs)
                        if case_source[0] in self.unmade
                        else None
                    )
                    taken += [] if case is None else [case]
        except OutOfTime:
            pass
        finally:
            self._rehearsal.end()
        cases = [JudgedCase(case, runs[id(case)]) for case in taken]
        self._cases = [*(self._cases or ()), *cases]
        return cases

    def _require_given(self, cases: Sequence[JudgedCase]) -> None:
        """A pass needs a comparison on the given inputs, whatever else is compared."""
        families = self.options.families
        is_asked = families is None or CaseFamily.GIVEN in families
        given_cases = [case for case in cases if case.case.is_given]
        if (
            is_asked
            and not self.unjudged
            and not any(judged_case.run.has_results for judged_case in given_cases)
        ):
            reason = "its results have no elements" if given_cases else self._refusal_of_given
            self.unjudged["as given"] = f"the given inputs show nothing: {reason}"

    def _families(self) -> Iterator[tuple[CaseFamily, Iterator[KernelCase]]]:
        """The families of all sets of inputs.

        Of further sets, the given values and a few others are enough. Those whose other arguments
        are new come first, in turn with the families of the first set.
        """
        first, *others = map(self._families_of, _newest_first(self.task.given))
        given_families = [
            (name, families[name])
            for families in others
            for name in families
            if name is CaseFamily.GIVEN
        ]
        values = [
            (name, families[name])
            for families in others
            for name in families
            if name is CaseFamily.VALUES
        ]
        for pair in itertools.zip_longest(first.items(), [*given_families, *values]):
            yield from (family for family in pair if family is not None)

    def _families_of(self, number: int) -> dict[CaseFamily, Iterator[KernelCase]]:
        maker = CaseMaker(
            self._requiring_grad(self.task.given[number]),
            self._again(number),
            has_weights=self.task.has_weights,
            has_modes=self.task.has_modes,
            seed=self.options.seed + number,
            label=f"sample {number + 1}: " if len(self.task.given) > 1 else "",
            accepts=self.task.accepts,
        )
        maker.drawn = 2 + secrets.randbelow(_MOST_SEEDS)
        families = self.options.families
        return {
            family: cases
            for family, cases in maker.all_families().items()
            if families is None or family in families
        }

    def _again(self, number: int) -> Callable[[int], Inputs] | None:
        make = self.task.again(number)
        if make is None:
            return None
        return lambda seed: self._requiring_grad(make(seed))

    def _requiring_grad(self, inputs: Inputs) -> Inputs:
        if not self.options.gradients:
            return inputs
        for _, tensor in input_tensors(inputs):
            if tensor.is_floating_point() and tensor.is_leaf:
                tensor.requires_grad_()
        return inputs

    def _next_accepted(
        self, source: tuple[CaseFamily, Iterator[KernelCase]], runs: dict[int, ReferenceRun]
    ) -> KernelCase | None:
        """The next case of a family that the reference accepts.

        Raises:
            OutOfTime: the time limit was reached before there was one.
        """
        family, cases = source
        try:
            case = self._first_accepted(cases, runs)
        except OutOfTime:
            self._interrupted.add(family)  # what it was made by is at its end
            raise
        if family in self.unmade and (case is not None or family not in self._interrupted):
            self.unmade.remove(family)
        return case

    def _first_accepted(
        self, cases: Iterator[KernelCase], runs: dict[int, ReferenceRun]
    ) -> KernelCase | None:
        for case in cases:
            try:
                encode_inputs(case.inputs)
                runs[id(case)] = self.task.run(case, gradients=self.options.gradients)
            except RefusedCase as refusal:
                self.refused.append(f"{case.name}: {refusal}")
                if case.is_given:
                    self._refusal_of_given = str(refusal)
                if isinstance(refusal, ReferenceEnded):
                    (self.unjudged if case.is_given else self.broken)[case.name] = str(refusal)
            except WireError as error:
                raise UsageError(f"an input of the task: {error}") from error
            else:
                return case
        return None


def unfinished_report(
    reference: str, candidate: str, doing: str, judge: KernelJudge | None
) -> KernelReport:
    """What is known when the time limit is reached: cases that fail are failures all the same.

    `doing` is the step that did not end.
    """
    reason = f"the time limit was reached while {doing}"
    finding = unverified("judge", reason, "raise the time limit")
    row = KernelRow.of(
        Verdict(findings=(finding,)),
        case=doing,
        family=CaseFamily.LOADING,
        ended=CaseEnd.NOT_CALLED,
    )
    report = KernelReport(reference=reference, candidate=candidate, rows=(row,))
    if judge is None:
        return report
    rows = () if judge.current is None else judge.current.rows
    notes = () if judge.current is None else judge.current.notes
    return msgspec.structs.replace(
        report,
        rows=(*rows, row),
        notes=tuple(dict.fromkeys(notes)),
        promises=tuple(sorted(judge.options.fixed)),
        strict=judge.options.strict,
        seconds=round(judge.limit.spent, 3),
    )


def _newest_first(inputss: Sequence[Inputs]) -> list[int]:
    """The positions of sets of inputs: the first, those with other settings, the rest."""
    known_settings: set[str] = set()
    new: list[int] = []
    for number, inputs in enumerate(inputss):
        settings = str(map_leaves([list(inputs.args), inputs.kwargs], _setting))
        if settings not in known_settings:
            known_settings.add(settings)
            new.append(number)
    return [*new, *(number for number in range(len(inputss)) if number not in new)]


def _setting(leaf: Any) -> Any:
    """A tensor is known by its rank; what else decides what is computed, by its value."""
    return leaf.dim() if isinstance(leaf, torch.Tensor) else leaf
