"""From a failing program to the smallest one that fails in the same way, within a given time."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paritas.errors import UsageError
from paritas.minimizing.oracle import Oracle, OutOfTimeError
from paritas.minimizing.programs import EXCEPTION, Candidate, Program, Signature
from paritas.minimizing.reducing.bodies import lay_open
from paritas.minimizing.reducing.inputs import reduce_dtypes, reduce_shapes, reduce_values
from paritas.minimizing.reducing.nodes import reduce_nodes, wrong_part
from paritas.minimizing.reducing.options import decisive_options
from paritas.minimizing.reducing.outputs import drop_outputs
from paritas.minimizing.scripts import Written, write_script
from paritas.reporting.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.minimizing.oracle import Answer
    from paritas.numerics.diagnoses import Diagnosis

__all__ = ["NothingFailsError", "Shrunk", "shrink"]

SCRIPT = "repro.py"
# Kept back for the run of the script itself.
_SCRIPT_SHARE = 0.25
# But never less: importing torch and compiling take their time on a busy machine.
_SCRIPT_SECONDS = 60.0


class NothingFailsError(UsageError):
    """No graph fails by itself: there is nothing to shrink."""


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """What shrinking came to.

    Attributes:
        script: the script and how its own run ended; None if no program failed.
        program: the smallest program.
        signature: of its failure, the same as that of the program it was made of.
        diagnosis: what kind of wrong it is, where that is known.
        nodes_before: operator calls at the start.
        nodes_after: and at the end.
        queries: programs that were compiled.
        seconds: it took, the run of the script included.
        steps: what was done, in words, in order.
        remedies: compiler options each of which alone makes the failure go away.
        ended: False if the time ran out or it was interrupted; the best so far is what was kept.
        interrupted: whether it was.
    """

    script: Written
    program: Program
    signature: Signature
    diagnosis: Diagnosis | None
    nodes_before: int
    nodes_after: int
    queries: int
    seconds: float
    steps: tuple[str, ...]
    remedies: tuple[str, ...]
    ended: bool
    interrupted: bool = False


def shrink(
    program: Program | list[Program],
    candidate: Candidate | None = None,
    *,
    signature: Signature | None = None,
    seconds: float = 120.0,
    outdir: str | Path | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Shrunk:
    """Make a failing program as small as it gets and write the script that shows the failure.

    Args:
        program: what fails; of several, the first that does is shrunk.
        candidate: how the candidate is made.
        signature: of the failure, where a verdict has told it already: a part may then be tried
            before the whole is compiled again.
        seconds: for all of it; when they are over, the best so far is written.
        outdir: where the script goes; a new folder by default.
        on_progress: called with a few words before each step.

    Raises:
        UsageError: if nothing fails.
    """
    programs = [program] if isinstance(program, Program) else list(program)
    if not seconds > 0:
        message = f"seconds must be a positive number, not {seconds!r}"
        raise UsageError(message)
    folder = Path(tempfile.mkdtemp(prefix="paritas-shrink-") if outdir is None else outdir)
    work = _Shrinking(candidate or Candidate(), seconds, folder, on_progress or (lambda _: None))
    return work.run(programs, signature)


# The program that fails, what is known to be enough of it, and how it fails.
_Start = tuple[Program, Program, Signature]


class _Shrinking:
    best: Program

    def __init__(
        self, candidate: Candidate, seconds: float, folder: Path, tell: Callable[[str], None]
    ) -> None:
        self.candidate = candidate
        self.seconds = seconds
        self.folder = folder
        self.tell = tell
        self.started = time.monotonic()
        self.oracle = Oracle(candidate, seconds * (1 - _SCRIPT_SHARE))
        self.steps: list[str] = []
        self.remedies: tuple[str, ...] = ()
        self.diagnosis: Diagnosis | None = None

    def run(self, programs: list[Program], known: Signature | None) -> Shrunk:
        try:
            program, self.best, wanted = self._known(programs, known) or self._failing(programs)
        except OutOfTimeError as error:
            message = f"{error} before a graph was seen to fail; give more of them"
            raise UsageError(message) from None
        ended, interrupted = True, False
        try:
            if self.best is program:
                self._reduce_calls(wanted)
            self._reduce_inputs(wanted)
        except (OutOfTimeError, KeyboardInterrupt) as stop:
            ended, interrupted = False, isinstance(stop, KeyboardInterrupt)
            self.steps.append("interrupted" if interrupted else str(stop))
        self.tell("running the script by itself")
        try:
            written = self._write(wanted, run=True)
        except KeyboardInterrupt:
            interrupted = True
            written = self._write(wanted, run=False)
        return Shrunk(
            script=written,
            program=self.best,
            signature=wanted,
            diagnosis=self.diagnosis,
            nodes_before=len(program.calls),
            nodes_after=len(self.best.calls),
            queries=self.oracle.queries,
            seconds=time.monotonic() - self.started,
            steps=tuple(self.steps),
            remedies=self.remedies,
            ended=ended,
            interrupted=interrupted,
        )

    def _known(self, programs: list[Program], known: Signature | None) -> _Start | None:
        """The first program of which a small part shows a known failure."""
        if known is None or known.role == EXCEPTION:
            return None
        for program in programs:
            self._tell(f"trying the {len(program.calls)} operator calls by themselves")
            part = wrong_part(self.oracle, program, known)
            if part is not None:
                self.steps.append(f"wrong by itself: {_measure(program)} -> {_measure(part)}")
                return program, part, known
        return None

    def _failing(self, programs: list[Program]) -> _Start:
        """The first program that fails; where random numbers hide it, with those of eager."""
        unclear: list[str] = []
        for position, program in enumerate(programs):
            self._tell(f"looking for the failure in graph {position + 1} of {len(programs)}")
            answer = self.oracle.first(program)
            if _is_unclear(answer) and self.candidate.backend == "inductor":
                answer = self._with_random_numbers_of_eager(program) or answer
            if answer.signature is None or not answer.signature.is_mismatch:
                unclear += [] if answer.signature is None else [answer.signature.sentence]
                continue
            self.diagnosis = answer.diagnosis
            return program, program, answer.signature
        message = (
            f"none of the {len(programs)} graphs fails by itself, so there is nothing to shrink; "
            f"the failure may need what is around them, or more than one call"
        )
        raise NothingFailsError(message + "".join(f"; {text}" for text in unclear[:1]))

    def _with_random_numbers_of_eager(self, program: Program) -> Answer | None:
        """Inductor's own random numbers cannot be compared; those that eager draws can."""
        options = {**self.candidate.options, "fallback_random": True}
        self.candidate = dataclasses.replace(self.candidate, options=options)
        before, self.oracle.candidate = self.oracle.candidate, self.candidate
        answer = self.oracle.first(program)
        if answer.signature is not None and answer.signature.is_mismatch:
            self.steps.append("random numbers as eager draws them")
            return answer
        self.candidate = self.oracle.candidate = before
        return None

    def _reduce_calls(self, wanted: Signature) -> None:
        if not self.oracle.is_native:
            self._step("float64 throughout", lambda: in_double(self.oracle, self.best, wanted))
        self._step("sub-graphs laid open", lambda: lay_open(self.oracle, self.best, wanted))
        self._step("fewer operator calls", lambda: reduce_nodes(self.oracle, self.best, wanted))

    def _reduce_inputs(self, wanted: Signature) -> None:
        answer = self.oracle.ask(self.best)
        wanted = answer.signature or wanted
        self.diagnosis = answer.diagnosis or self.diagnosis
        self._step("fewer outputs", lambda: drop_outputs(self.oracle, self.best, wanted))
        self._step("smaller shapes", lambda: reduce_shapes(self.oracle, self.best, wanted))
        self._step("rounder values", lambda: reduce_values(self.oracle, self.best, wanted))
        self._step("plainer dtypes", lambda: reduce_dtypes(self.oracle, self.best, wanted))
        self._tell("compiler options")
        self.remedies = tuple(decisive_options(self.oracle, self.best))

    def _step(self, name: str, reduce: Callable[[], Program]) -> None:
        """Take a step, and write what is known by then: a compiler may take us down with it."""
        self._tell(f"{name} ({len(self.best.calls)} operator calls so far)")
        smaller = reduce()
        if smaller is self.best:
            return
        self.steps.append(f"{name}: {_measure(self.best)} -> {_measure(smaller)}")
        self.best = smaller
        signature = self.oracle.check(smaller)
        if signature is not None:
            self._write(signature, run=False)

    def _tell(self, words: str) -> None:
        """Of a step that ends when the time is over."""
        self.tell(Progress(words, at_most=self._left()))

    def _left(self) -> float:
        return self.started + self.seconds - time.monotonic()

    def _write(self, wanted: Signature, *, run: bool) -> Written:
        notes = [f"It goes away with {text}" for text in self.remedies]
        return write_script(
            self.best,
            self.candidate,
            wanted,
            self.diagnosis,
            self.folder / SCRIPT,
            notes=tuple(notes),
            seconds=max(self._left(), _SCRIPT_SECONDS),
            run=run,
        )


def in_double(oracle: Oracle, program: Program, wanted: Signature) -> Program:
    """The program on float64 inputs, if it fails natively there: a script can show that."""
    inputs = tuple(
        value.detach().double().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for value in program.inputs
    )
    wide = dataclasses.replace(program, inputs=inputs)
    return wide if oracle.becomes_native(wide, wanted) else program


def _is_unclear(answer: Answer) -> bool:
    """Whether something could not be compared, and nothing else is wrong."""
    return answer.signature is not None and not answer.signature.is_mismatch


def _measure(program: Program) -> str:
    tensors = [value for value in program.inputs if isinstance(value, torch.Tensor)]
    elements = sum(tensor.numel() for tensor in tensors)
    count = len(program.calls)
    return f"{count} call{'s' * (count != 1)} on {elements} numbers"
