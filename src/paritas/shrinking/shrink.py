"""Shrinks a failing program to the smallest that fails in the same way, and writes its script."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.compiled.locate import REMEDY_SWITCHES
from paritas.core.execution.compilation import Candidate
from paritas.core.results.findings import Aspect, Diagnosis, Status
from paritas.core.results.wording import count_things
from paritas.core.shrinking import NothingFailsError, ShrinkReport, ShrinkSearch
from paritas.core.time_limit import TimeLimit
from paritas.shrinking.inputs import in_double, reduce_dtypes, reduce_shapes, reduce_values
from paritas.shrinking.nested_graphs import inline_bodies, with_bodies_inlined
from paritas.shrinking.nodes import SIZES, drop_outputs, reduce_nodes, wrong_part
from paritas.shrinking.programs import (
    EXCEPTION,
    GRADIENT,
    OUTPUT,
    FailingProgram,
    FailureSignature,
    Oracle,
)
from paritas.shrinking.scripts import NOT_SEEN, program_script

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paritas.core.reporting.scripts import Script, WrittenScript
    from paritas.shrinking.programs import Answer


# --- Shrinking ------------------------------------------------------------------------------------


def shrink(
    program: FailingProgram | list[FailingProgram],
    candidate: Candidate | None = None,
    *,
    signature: FailureSignature | None = None,
    places: Mapping[str, Diagnosis | None] = MappingProxyType({}),
    limit: TimeLimit | None = None,
    outdir: str | Path | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Shrunk:
    """Make a failing program as small as possible and write a script that shows the failure.

    Args:
        program: what fails; of several, the first that fails is shrunk.
        candidate: how it is compiled.
        signature: of the failure, if a verdict already has it: then a part may be tried before the
            whole program is compiled again.
        places: source lines or nodes where the failure was seen to start, with what kind of wrong
            it is there; they are tried first.
        limit: the time limit, 120 seconds by default; when it is over, the best result so far is
            written.
        outdir: the folder for the script; a new folder by default.
        on_progress: called with a description before each step.

    Raises:
        UsageError: nothing fails.
    """
    programs = [program] if isinstance(program, FailingProgram) else list(program)
    search = ShrinkSearch(outdir, limit or TimeLimit(120.0), on_progress)
    return _Shrinking(candidate or Candidate(), search).run(programs, signature, places)


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """The result of shrinking: the report, and the objects behind it."""

    report: ShrinkReport
    script: WrittenScript
    original: FailingProgram
    program: FailingProgram
    signature: FailureSignature | None


_Reduction = Callable[[Oracle, FailingProgram, FailureSignature], FailingProgram]
# Failures that single calls are tried for if the failure is not known: the most frequent first.
_LIKELY = tuple(
    FailureSignature(Status.DIFFERENT, Aspect.VALUE, role) for role in (OUTPUT, GRADIENT)
)


class _Shrinking:
    """The state of a search.

    Attributes:
        original: the program that is shrunk, or the one that is tried now.
        best: the smallest part of it that is known to fail.
        wanted: the failure, once it has been seen.
    """

    original: FailingProgram
    best: FailingProgram
    wanted: FailureSignature | None

    def __init__(self, candidate: Candidate, search: ShrinkSearch) -> None:
        self.candidate = candidate
        self.search = search
        self.oracle = Oracle(candidate, search.limit)
        self.steps: list[str] = []
        self.remedies: tuple[str, ...] = ()
        self.diagnosis: Diagnosis | None = None

    def run(
        self,
        programs: list[FailingProgram],
        failure_signature: FailureSignature | None,
        places: Mapping[str, Diagnosis | None],
    ) -> Shrunk:
        if not programs:
            raise NothingFailsError(
                "torch.compile makes no graph of it: there is nothing to shrink"
            )
        self.original = self.best = programs[0]
        self.wanted = failure_signature
        with self.search.searching():
            self._search(programs, failure_signature, places)
        if not self.search.ended:
            over = f"the {self.search.limit.seconds:g} seconds for shrinking are over"
            self.steps.append("interrupted" if self.search.interrupted else over)
        written = self.search.write_and_run(self._make_script)
        report = self.search.report(
            written,
            what=NOT_SEEN if self.wanted is None else self.wanted.sentence,
            before=count_things(len(self.original.calls), "operator call"),
            after=count_things(len(self.best.calls), "operator call"),
            diagnosis=self.diagnosis,
            steps=tuple(self.steps),
            remedies=self.remedies,
            queries=self.oracle.queries,
        )
        return Shrunk(report, written, self.original, self.best, self.wanted)

    def _search(
        self,
        programs: list[FailingProgram],
        failure_signature: FailureSignature | None,
        places: Mapping[str, Diagnosis | None],
    ) -> None:
        if not self._find_part(programs, failure_signature, places):
            self._find_failing(programs)
            self._reduce_calls()
        self._reduce_inputs()

    def _find_part(
        self,
        programs: list[FailingProgram],
        failure_signature: FailureSignature | None,
        places: Mapping[str, Diagnosis | None],
    ) -> bool:
        """Find the first program of which a small part shows the failure by itself.

        That compiles less than the program does. If the failure is not known, only single calls
        are tried. The places are tried in all programs first.
        """
        if failure_signature is not None and failure_signature.role == EXCEPTION:
            return False
        likely = _LIKELY if failure_signature is None else (failure_signature,)
        sizes = SIZES[:1] if failure_signature is None else SIZES
        for some, program in itertools.product([(), sizes] if places else [sizes], programs):
            self.original = self.best = program
            opened = with_bodies_inlined(program)
            one_by_one = f"trying the {len(program.calls)} operator calls one by one"
            self.search.show_step(one_by_one if some else "trying the place where it starts")
            for likely_signature in likely:
                if likely_signature.role == GRADIENT and not program.gradients:
                    continue
                part = wrong_part(self.oracle, opened, likely_signature, places, some)
                if part is not None:
                    smaller = f"{_describe_size(program)} -> {_describe_size(part)}"
                    self.steps.append(f"wrong on its own: {smaller}")
                    self.best, self.wanted = part, likely_signature
                    kinds = [places[node.name] for node in part.calls if node.name in places]
                    self.diagnosis = next(iter(kinds), None)
                    self.search.write(self._make_script())
                    return True
        return False

    def _find_failing(self, programs: list[FailingProgram]) -> None:
        """Find the first program that fails; if random numbers hide it, with those of eager."""
        unclear: list[str] = []
        for position, program in enumerate(programs):
            self.original = self.best = program
            self.search.show_step(
                f"looking for the failure in graph {position + 1} of {len(programs)}"
            )
            answer = self.oracle.first(program)
            # Something could not be compared, and nothing else is wrong.
            is_unclear = answer.signature is not None and not answer.signature.is_mismatch
            if is_unclear and self.candidate.backend == "inductor":
                answer = self._with_random_numbers_of_eager(program) or answer
            if answer.signature is None or not answer.signature.is_mismatch:
                unclear += [] if answer.signature is None else [answer.signature.sentence]
                continue
            self.diagnosis, self.wanted = answer.diagnosis, answer.signature
            return
        message = (
            f"none of the {len(programs)} graphs fails on its own, so there is nothing to shrink; "
            "the failure may need the code around them, or more than one call"
        )
        raise NothingFailsError("; ".join([message, *unclear[:1]]))

    def _with_random_numbers_of_eager(self, program: FailingProgram) -> Answer | None:
        """Make Inductor draw the random numbers of eager mode, which can be compared."""
        options = {**self.candidate.options, "fallback_random": True}
        self.candidate = dataclasses.replace(self.candidate, options=options)
        before, self.oracle.candidate = self.oracle.candidate, self.candidate
        answer = self.oracle.first(program)
        if answer.signature is not None and answer.signature.is_mismatch:
            self.steps.append("random numbers of eager mode")
            return answer
        self.candidate = self.oracle.candidate = before
        return None

    def _reduce_calls(self) -> None:
        if not self.oracle.is_native:
            self._step("float64 everywhere", in_double)
        self._step("nested graphs inlined", inline_bodies)
        self._step("fewer operator calls", reduce_nodes)

    def _reduce_inputs(self) -> None:
        answer = self.oracle.ask(self.best, explains=True)
        self.wanted = answer.signature or self.wanted
        if self.diagnosis is None or (answer.diagnosis is not None and answer.diagnosis.patterns):
            self.diagnosis = answer.diagnosis
        self._step("fewer outputs", drop_outputs)
        self._step("smaller shapes", reduce_shapes)
        self._step("simpler values", reduce_values)
        self._step("simpler dtypes", reduce_dtypes)
        self.search.show_step("compiler options")
        self.remedies = tuple(decisive_options(self.oracle, self.best))

    def _step(self, name: str, reduce: _Reduction) -> None:
        """Do one reduction, and write the result so far: the compiler may crash later."""
        if self.wanted is None:
            return
        self.search.show_step(f"{name} ({len(self.best.calls)} operator calls so far)")
        smaller = reduce(self.oracle, self.best, self.wanted)
        if smaller is self.best:
            return
        self.steps.append(f"{name}: {_describe_size(self.best)} -> {_describe_size(smaller)}")
        self.best = smaller
        self.search.write(self._make_script())

    def _make_script(self) -> Script:
        # A plain function has no nested graphs; whether it fails without them, the run shows.
        best = with_bodies_inlined(self.best)
        return program_script(best, self.candidate, self.wanted, self.diagnosis, self.remedies)


def _describe_size(program: FailingProgram) -> str:
    tensors = [value for value in program.inputs if isinstance(value, torch.Tensor)]
    elements = sum(tensor.numel() for tensor in tensors)
    return f"{count_things(len(program.calls), 'call')} on {count_things(elements, 'number')}"


# --- Compiler options that make the failure go away -----------------------------------------------


def decisive_options(oracle: Oracle, program: FailingProgram) -> list[str]:
    """Inductor options each of which alone makes the program pass; empty for other compilers.

    If the program fails with all of them together, none is tried alone.
    """
    if oracle.candidate.backend != "inductor" or oracle.candidate.mode is not None:
        return []
    everything = {key: value for options, _ in REMEDY_SWITCHES for key, value in options.items()}
    if not _passes_with(oracle, program, everything):
        return []
    return [text for options, text in REMEDY_SWITCHES if _passes_with(oracle, program, options)]


def _passes_with(oracle: Oracle, program: FailingProgram, options: dict[str, Any]) -> bool:
    candidate = oracle.candidate
    changed = dataclasses.replace(candidate, options={**candidate.options, **options})
    answer = oracle.ask(program, changed)
    return answer.signature is None and answer.verdict is not None and answer.verdict.passed
