"""Does a program fail, and how? Asked of the real compiler and of the one judge there is."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import torch

from paritas._torch.quiet import quietly
from paritas.checking.config import Inputs, VerifyConfig
from paritas.checking.verifying import verify
from paritas.errors import ParitasError
from paritas.minimizing.programs import EXCEPTION, Signature, same_failure, signature_of
from paritas.numerics.findings import Aspect, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from paritas.minimizing.programs import Candidate, Program
    from paritas.numerics.diagnoses import Diagnosis

__all__ = ["Answer", "Oracle", "OutOfTimeError"]

# From cheap to dear: natively; in float64 as well; with a second call.
_WAYS = (
    VerifyConfig(raise_on_mismatch=False, lift=False, verify_second_call=False),
    VerifyConfig(raise_on_mismatch=False, verify_second_call=False),
    VerifyConfig(raise_on_mismatch=False),
)
_NOT_RUNNING = Signature(status=Status.UNVERIFIED, aspect=Aspect.HARNESS, role=EXCEPTION)


class OutOfTimeError(ParitasError):
    """No time is left for another query. It ends a reduction and never reaches the user."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a query gave.

    Attributes:
        signature: of the failure; None if the program passes.
        diagnosis: what kind of wrong it is, where that was found out.
        verdict: behind it; None if not even the reference ran.
    """

    signature: Signature | None
    diagnosis: Diagnosis | None = None
    verdict: Verdict | None = None


class Oracle:
    """Judges programs, never the same one twice, and counts what that took.

    Attributes:
        queries: how many programs were compiled.
        hits: how many answers were known already.
    """

    def __init__(self, candidate: Candidate, seconds: float) -> None:
        """The clock starts now; `seconds` is for all queries together."""
        self.candidate = candidate
        self.seconds = seconds
        self.started = time.monotonic()
        self.queries = 0
        self.hits = 0
        self._way = 0
        self._known: dict[tuple[Any, ...], Answer] = {}

    @property
    def left(self) -> float:
        """Seconds until no further query is begun."""
        return self.started + self.seconds - time.monotonic()

    def check(self, program: Program, candidate: Candidate | None = None) -> Signature | None:
        """The signature of a program's failure; None if it passes."""
        return self.ask(program, candidate).signature

    def shows(self, program: Program | None, wanted: Signature, *, kind: bool = False) -> bool:
        """Whether a program fails in the wanted way, and not in another."""
        return program is not None and same_failure(self.check(program), wanted, kind=kind)

    def first(self, program: Program) -> Answer:
        """Judge a program that should fail; later queries are made in the cheapest way that showed.

        Most failures show natively, where one compile is enough. Some show in float64 alone, or
        only in a second call.
        """
        answer = Answer(None)
        for self._way in range(len(_WAYS)):
            answer = self.ask(program)
            if answer.signature is not None:
                return answer
        return answer

    @property
    def is_native(self) -> bool:
        """Whether failures show in the dtypes that the program has."""
        return self._way == 0

    def becomes_native(self, program: Program, wanted: Signature) -> bool:
        """Judge natively from now on, if a program shows the failure so."""
        before, self._way = self._way, 0
        if self.shows(program, wanted):
            return True
        self._way = before
        return False

    def ask(self, program: Program, candidate: Candidate | None = None) -> Answer:
        """Judge a program, or remember.

        Raises:
            OutOfTimeError: if the time is over.
        """
        how = candidate or self.candidate
        key = (program.key, self._way, repr(sorted(how.options.items())), how.backend, how.mode)
        if key in self._known:
            self.hits += 1
            return self._known[key]
        if self.left <= 0:
            raise OutOfTimeError(f"the {self.seconds:g} seconds for shrinking are over")
        self._known[key] = self._judge(program, how)
        return self._known[key]

    @quietly()
    def _judge(self, program: Program, candidate: Candidate) -> Answer:
        if not runs(program):
            return Answer(_NOT_RUNNING)
        self.queries += 1
        dynamic = True if program.dynamic else None
        compiled = candidate.compile(program.graph, dynamic=dynamic)
        config = dataclasses.replace(_WAYS[self._way], verify_gradients=program.gradients)
        inputs = Inputs(tuple(program.inputs))
        with (
            torch.random.fork_rng(devices=[]),
            torch.set_grad_enabled(program.gradients),
        ):
            torch.manual_seed(program.seed)
            verdict = verify(inputs, program.graph, compiled, config)
        found = signature_of(verdict)
        if found is None:
            return Answer(None, None, verdict)
        return Answer(found[0], found[1], verdict)


def runs(program: Program) -> bool:
    """Whether the reference runs at all: cheap to ask, and a compile saved where it does not."""
    # Not the module itself: calling that prints to stderr where it raises.
    call: Callable[..., Any] = program.graph.forward
    inputs = [
        value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
        for value in program.inputs
    ]
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(program.gradients):
        torch.manual_seed(program.seed)
        try:
            call(*inputs)
        except Exception:  # noqa: BLE001  (whatever it raises, it is no program to go on with)
            return False
    return True
