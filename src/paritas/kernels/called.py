"""The candidate, as the judge calls it: in its process, with the parameters of a case."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from paritas.core.judging.comparer import CollectedFindings
from paritas.core.results.findings import Aspect, Status
from paritas.core.results.items import harness
from paritas.kernels.comparing import encode_inputs, setting_findings, stand_in
from paritas.kernels.messages import (
    PLAIN_CONDITIONS,
    Call,
    CallConditions,
    CallRecord,
    Loaded,
    SetState,
    StateSet,
)
from paritas.kernels.processes import CandidateProcess
from paritas.kernels.weights import fitting, match_weights
from paritas.kernels.wire import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paritas.kernels.cases import KernelCase
    from paritas.kernels.judge import KernelJudge
    from paritas.kernels.messages import SideName
    from paritas.kernels.references import JudgedCase, KernelTask

# A construction, or the first call of a process, may take longer than another call.
_TIMES_TO_BUILD = 3


class CannotConstructError(Exception):
    """The candidate's constructor raises."""


class CalledCandidate:
    """One candidate, in one process after the other.

    Attributes:
        process: its process; None before the first one.
        names: its name of a parameter -> the reference's.
        own_values: its floating parameters and buffers that are not the reference's.
        stand: a subject with its parameters and buffers.
        memory: what a call leaves in the reference, apart from parameters and buffers. The
            reference is restored after each call; so the candidate is constructed again for each.
    """

    def __init__(self, judge: KernelJudge, name: SideName, cases: Sequence[JudgedCase]) -> None:
        self._name, self._server = name, judge.server
        self._options, self._task, self._limit = judge.options, judge.task, judge.limit
        self.process: CandidateProcess | None = None
        self.names: dict[str, str] = {}
        self.own_values: list[str] = []
        self.stand: Any = None
        self.memory = sorted(
            {name for case in cases for name in _list_left_state(case, self._task)}
        )
        self._made: tuple[int, str, bool] | None = None
        self._weights: tuple[int, str, int] | None = None
        self._fit: dict[str, Callable[[Tensor], Tensor]] = {}
        # The mode in which it was constructed: a case before may have changed it.
        self._own_mode: bool | None = None
        self._counts = 0
        self._is_built = False

    @property
    def _running(self) -> CandidateProcess:
        assert self.process is not None, "it was not started"  # noqa: S101
        return self.process

    @property
    def loaded(self) -> Loaded:
        """What its import did."""
        return self._running.loaded

    @property
    def temporary(self) -> str:
        """Its folder for temporary files."""
        return self._running.temporary

    @property
    def seconds_to_build(self) -> float:
        """The time limit of a call that may build a kernel."""
        return self._options.call_seconds * _TIMES_TO_BUILD

    def start(self) -> Loaded:
        """Start its process, and return what loading it did."""
        self.end()
        self.process = CandidateProcess(
            self._name,
            self._server,
            device=self._options.device,
            memory=self._options.memory,
            seconds=max(60.0, self._options.call_seconds * 10),
            limit=self._limit,
        )
        self._made = self._weights = None
        self._is_built = False
        return self.process.loaded

    def end(self) -> None:
        """End its process."""
        if self.process is not None:
            self.process.close()
            self.process = None

    def construct(self, case: KernelCase) -> CollectedFindings:
        """Make its module for a case, unless it is there already, in a new process if need be.

        Raises:
            CannotConstructError: it cannot be made.
        """
        key = case.construction, case.dtype, case.is_moved
        if (self.process is None or self.process.is_gone) and self.start().error:
            raise CannotConstructError(self.loaded.error)
        if self._made == key and not self.memory:
            return CollectedFindings()
        construction = self._running.construct(
            self._task.init,
            self._options.seed + case.construction,
            self.seconds_to_build,
            case.dtype if self._task.side.is_module_class else "",
            moves=case.is_moved,
        )
        if construction.error or construction.state is None:
            raise CannotConstructError(construction.error)
        candidate_state: dict[str, Tensor] = decode(construction.state)
        self._own_mode = construction.train
        reference = self._task.state((case.construction, case.dtype, 0, None))
        self.names = match_weights(reference, candidate_state, reshapes=not self._options.gradients)
        self._fit = {
            name: fitting(reference[reference_name], candidate_state[name])
            for name, reference_name in self.names.items()
        }
        self.own_values = [
            name
            for name, v in candidate_state.items()
            if name not in self.names and v.is_floating_point()
        ]
        self.stand = stand_in(
            {self.names.get(name, name): v for name, v in candidate_state.items()}
        )
        self._made, self._weights = key, None
        return setting_findings(construction.settings, "constructing the candidate")

    def set_weights(self, case: KernelCase) -> CollectedFindings:
        """Give the candidate the parameters of the reference of this case."""
        collected = CollectedFindings()
        key = self._task.key(case)
        if self._weights == (key[0], key[1], key[2]):
            return collected
        state = self._task.state(key)
        values = {
            name: self._fit[name](state[reference_name].detach())
            for name, reference_name in self.names.items()
        }
        answer = StateSet()
        if values:
            order = SetState(state=encode(values))
            answer = self._running.ask(order, StateSet, self._options.call_seconds)
        self._weights = (key[0], key[1], key[2])
        if answer.error:
            collected.compared += 1
            reason = f"the candidate's parameters cannot be set: {answer.error}"
            collected.add(harness("candidate"), Aspect.STRUCTURE, Status.DIFFERENT, reason)
        return collected

    def without_counterpart(self, case: KernelCase) -> list[str]:
        """Floating parameters of the reference that the candidate does not have."""
        if not case.weights:
            return []
        matched_names = set(self.names.values())
        state = self._task.state(self._task.key(case))
        return [
            name
            for name, tensor in state.items()
            if name not in matched_names and tensor.is_floating_point()
        ]

    def call(self, case: KernelCase, conditions: CallConditions = PLAIN_CONDITIONS) -> CallRecord:
        """Call it on a case."""
        self._counts += 1
        # A candidate that sees that it is watched only sometimes behaves only then.
        is_watched = bool(self._options.forbid) and conditions.wide is None
        is_imported = self._task.side.file in self.loaded.files
        order = Call(
            inputs=encode_inputs(case.inputs),
            seed=(self._options.seed * 7919 + self._counts * 104729) % (1 << 31),
            pattern=self._counts % 2 if conditions.pattern is None else conditions.pattern,
            train=case.train if case.train is not None else self._own_mode,
            shared=list(self.names),
            attributes=self.memory,
            reuse=case.reuse,
            grad=self._options.gradients,
            cotangents=self._options.seed,
            conditions=msgspec.structs.replace(
                conditions,
                watch=conditions.watch or is_watched,
                profile=conditions.profile
                or (is_imported and self._task.side.file != self._name.file),
            ),
        )
        # The first call may build a kernel, and tune it.
        seconds = self._options.call_seconds if self._is_built else self.seconds_to_build
        record = self._running.ask(order, CallRecord, seconds)
        self._is_built = True
        return record


def _list_left_state(judged: JudgedCase, task: KernelTask) -> list[str]:
    """What a call leaves in the reference, apart from parameters and buffers."""
    known_state = task.state(task.key(judged.case))
    return [item.name for item in judged.run.native.state if item.name not in known_state]
