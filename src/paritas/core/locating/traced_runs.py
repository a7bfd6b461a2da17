"""Run the two sides of a failed call once more, each operator recorded."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.execution.evidence import Evidence, WideDefault, complete_item, run_quietly
from paritas.core.execution.observation import RunOptions, named_like
from paritas.core.execution.program import Program
from paritas.core.execution.subject_runs import SubjectProgram
from paritas.core.precision.lifting import is_rounding
from paritas.core.torch_private.tensors import free_bytes
from paritas.core.tracing.figures import figures_of
from paritas.core.tracing.traces import OutOfTimeError, Trace, TraceRecorder

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from paritas.core.execution.observation import Observation
    from paritas.core.execution.subjects import Subject
    from paritas.core.locating.places import FailedCall
    from paritas.core.results.items import Item
    from paritas.core.tracing.figures import Figures

Instead = dict[int, dict[int, "Tensor"]]

# The share of the free memory that the values of one run may take, and the most they may take.
_SHARE = 0.1
_MOST_KEPT = 1 << 30
# Two runs in float64 that are this near have the same values.
SAME_IN_FLOAT64 = 1e-13


@dataclasses.dataclass(frozen=True)
class TracedRun:
    """One run of one side.

    Attributes:
        trace: its operators.
        seen: what a caller observes of the call that failed.
        wide: whether it ran in float64.
        instead: by operator and result, the values that it continued with in place of its own.
    """

    trace: Trace
    seen: Observation
    wide: bool
    instead: Instead


@dataclasses.dataclass(eq=False)
class _TracedProgram(Program):
    """A side that is recorded; a run that starts over starts the recording over."""

    side: SubjectProgram
    recording: dict[str, Any]
    recorder: TraceRecorder | None = None

    def dtypes(self, native: list[Observation]) -> dict[torch.dtype, int]:
        return self.side.dtypes(native)

    def run(self, options: RunOptions) -> list[Observation]:
        self.recorder = TraceRecorder(**self.recording)
        return self.side.run(dataclasses.replace(options, listener=self.recorder))


@dataclasses.dataclass(frozen=True)
class WrongItem:
    """A result that differs in a pair of runs.

    Attributes:
        item: what it is.
        reference: the figures of the right value, if there is one.
        candidate: the figures of the wrong value, if there is one.
    """

    item: Item
    reference: Figures | None
    candidate: Figures | None

    @property
    def distance(self) -> float:
        """How far the values are apart, as a share of their norm."""
        left, right = self.reference, self.candidate
        if left is None or right is None:
            return 0.0 if left is right else math.inf
        if left.shape != right.shape:
            return math.inf
        distance = left.distance(right)
        return math.inf if left.is_exact and distance else distance


class TracedSides:
    """Runs the sides of a failed call, natively or in float64.

    Attributes:
        items: the results that failed, as observations name them.
    """

    def __init__(self, call: FailedCall) -> None:
        """Nothing runs yet."""
        self.call = call
        items = [finding.item for finding in call.failures]
        self._in_second = bool(items) and all(item.call > 1 for item in items)
        self.items = list(
            dict.fromkeys(
                msgspec.structs.replace(item, call=0, inputs=0, draw=0)
                for item in items
                if (item.call > 1) is self._in_second
            )
        )
        self._evidence: Evidence[SubjectProgram] | None = None

    def run(
        self,
        side: Subject,
        *,
        wide: bool = False,
        instead: Instead | None = None,
        keep: Collection[int] | None = None,
        like: tuple[Trace, int] | None = None,
    ) -> TracedRun:
        """Run one side, recorded as `TraceRecorder` describes.

        Raises:
            OutOfTimeError: the time is over.
        """
        program = self._program(side)
        room = min(_MOST_KEPT, int(_SHARE * (free_bytes(torch.device("cpu")) or _MOST_KEPT)))
        recording = {
            "limit": self.call.limit,
            "room": room,
            "keep": keep,
            "instead": instead,
            "like": like,
        }
        traced = _TracedProgram(program, recording)
        mode = None
        if wide:
            evidence = self._reference_evidence()
            used = frozenset(evidence.dtypes)
            lifts = None if side.role == "reference" else functools.partial(is_rounding, used=used)
            mode = evidence.lift_mode(lifts=lifts)
        quietly = run_quietly(traced, RunOptions(wide=wide, mode=mode), WideDefault())
        if any(isinstance(error, OutOfTimeError) for error in _errors(quietly)):
            raise OutOfTimeError
        recorder = traced.recorder
        trace = Trace() if recorder is None else recorder.trace
        return TracedRun(trace, quietly[-1], wide, instead or {})

    def has_wide(self) -> bool:
        """Whether the sides can run in float64 and compute something else there."""
        candidate = self.call.candidate
        return (
            self.call.config.lift
            and self._reference_evidence().is_narrow
            and candidate.is_faithful
            and not candidate.is_compiled
        )

    @property
    def unit(self) -> float:
        """Unit roundoff of the native runs."""
        return self._reference_evidence().unit

    def wrong_items(self, reference: TracedRun, candidate: TracedRun) -> list[WrongItem]:
        """The values of the failed results in a pair of runs."""
        left, right = reference.seen, candidate.seen
        if left.outputs.keys() != right.outputs.keys():
            right = named_like(right, left)
        wrong = []
        for item in self.items:
            ours = complete_item(left, item, self._program(self.call.reference))
            candidate_value = complete_item(right, item, self._program(self.call.candidate))
            pair = (ours, candidate_value)
            if any(isinstance(value, torch.Tensor) for value in pair):
                figures = [
                    figures_of(value) if isinstance(value, torch.Tensor) else None for value in pair
                ]
                wrong.append(WrongItem(item, *figures))
        return wrong

    def _program(self, side: Subject) -> SubjectProgram:
        call = self.call
        # What differs in the forward pass explains what follows from it.
        is_of_backward = all(item.kind.is_of_backward for item in self.items)
        gradients = call.conditions.gradients and is_of_backward
        conditions = dataclasses.replace(
            call.conditions, gradients=gradients, second=False, repeats=False, sketches=False
        )
        calls = 2 if self._in_second else 1
        return SubjectProgram(side, call.inputs, call.rng, conditions, calls)

    def _reference_evidence(self) -> Evidence[SubjectProgram]:
        if self._evidence is None:
            self._evidence = Evidence(self._program(self.call.reference))
        return self._evidence


def _errors(observations: list[Observation]) -> list[Exception | None]:
    return [
        error
        for observation in observations
        for error in (observation.error, observation.gradient_error)
    ]


def kept_tensors(
    sides: TracedSides, side: Subject, run: TracedRun, value_indices: Mapping[int, Any] | set[int]
) -> dict[int, Tensor]:
    """Whole values of a run; the side runs again if they were not kept."""
    values = run.trace.values
    missing = {index for index in value_indices if values[index].tensor is None}
    again = values
    if missing:
        everything = run.trace, len(run.trace.operations)
        again = sides.run(side, wide=run.wide, keep=missing, like=everything).trace.values
    tensors: dict[int, Tensor] = {}
    for index in value_indices:
        tensor = values[index].tensor
        if tensor is None and index < len(again):
            tensor = again[index].tensor
        if tensor is not None:
            tensors[index] = tensor
    return tensors
