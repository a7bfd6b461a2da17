"""Further runs of both programs, made when the judge first asks for them.

The arbiter is the reference in float64, the lifted run the candidate in float64, and perturbed
runs are the reference with its roundings drawn at random.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.dynamo import CountingBackend, room_for_entries
from paritas._torch.global_state import taking_stance
from paritas._torch.operators import WIDE
from paritas.execution.evidence import WideDefault
from paritas.execution.isolation import MISSING
from paritas.execution.noise_runs import NoiseRuns
from paritas.execution.observation import (
    AFTER,
    AFTER_BACKWARD,
    STATE,
    Observation,
    RunConditions,
    RunOptions,
    input_contents,
    input_tensors,
    is_afterwards,
    named_like,
    place_of,
    running_subject,
    same_value,
)
from paritas.execution.subjects import ForeignProgram
from paritas.numerics import criterion
from paritas.numerics.automatic import RUNS
from paritas.numerics.criterion import UNIT_F32, unit_roundoff
from paritas.numerics.flattening import as_plain, flattened, is_dense, is_inexact
from paritas.precision.lifting import DtypeLog, LiftMode, is_rounding
from paritas.precision.widening import lifted_backend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from paritas.execution.saved_state import RandomState
    from paritas.execution.subjects import Inputs, Subject

_LONGEST_REASON = 200


class SubjectRuns(NoiseRuns):
    """The further runs for one set of inputs, shared by all items of it.

    Attributes:
        changing: the names of the state that either side changes, so worth looking at.
        at_second: gradients of gradients are judged now, and perturbed runs make them.
        by_order: the candidate's outputs go by the names of the reference's, in order.
    """

    def __init__(
        self,
        reference: Subject,
        candidate: Subject,
        inputs: Inputs,
        rng: RandomState,
        conditions: RunConditions,
        native: list[Observation],
        *,
        lift: bool = True,
    ) -> None:
        """`native` holds what the reference did, call by call."""
        self.reference = reference
        self.candidate = candidate
        self.inputs = inputs
        self.rng = rng
        self.conditions = conditions
        self.lift = lift
        self.changing: frozenset[str] | None = None
        self.at_second = False
        self.by_order = False
        super().__init__(native, self._count_dtypes(native[0]), conditions.seed)
        self._wanted: frozenset[str] | None = None
        self._makes_second = True
        self._lifted: list[Observation] | None = None
        self._again: list[Observation] | None = None
        self._repeat: list[Observation] | None = None
        self._graphs: int | None = None
        self._inside: float | None = None

    def lifted(self) -> list[Observation] | None:
        """The candidate in float64, call by call, or None if that cannot be."""
        if "lifted" not in self._asked:
            self._asked.add("lifted")
            if self.arbiter() is None:
                return None
            reason = self._no_lift()
            if reason:
                self.notes.append(f"only the native run was made: {reason}")
                return None
            seen = self._lift_candidate()
            if seen is not None and self.is_usable(
                seen, "only the native run was made: the candidate in float64"
            ):
                self._lifted = self.named(seen)
        return self._lifted

    def named(self, seen: list[Observation]) -> list[Observation]:
        """What the candidate did, call by call, under the names to be compared by."""
        if not self.by_order:
            return seen
        last = len(self.native) - 1
        return [named_like(one, self.native[min(call, last)]) for call, one in enumerate(seen)]

    def coarsest(self) -> float | None:
        """Unit roundoff of the coarsest dtype inside the reference; nothing if it is not lifted.

        Inputs, state and results do not show what autocast does between them. The arbiter does, if
        it was made; else one more forward run, which a verdict on equal bits is worth.
        """
        if self._no_lift():
            return None
        if self._shows_dtypes:
            return self.unit
        if self._inside is None:
            log = DtypeLog()
            # A dispatch mode has no business in compiled code, which would be compiled again.
            looks = self.unit <= UNIT_F32 and not self.reference.is_compiled
            if looks and self.native[0].error is None:
                self._observe(self.reference, watch=log, forward_once=True)
            inside = [unit_roundoff(dtype) for dtype in log.calls.values()]
            self._inside = max([self.unit, *inside])
        return self._inside

    def _no_lift(self) -> str | None:
        if not self.lift:
            return "the lifted run is switched off"
        if len(self.candidate.backends) > 1:
            return "the candidate is compiled by several backends"
        draws = any(seen.drew_random_numbers for seen in self.native)
        if draws and self.candidate.is_compiled and torch.cuda.is_available():
            return "random numbers drawn on the device depend on the dtype"
        return None

    def _lift_candidate(self) -> list[Observation] | None:
        self.tell("running the candidate in float64 (a compiler works on the first call)")
        if self.candidate.is_compiled:
            used = frozenset(self.dtypes)
            backend = lifted_backend(
                self.candidate.call, self.candidate.backends[0], self.dtype, used
            )
            with room_for_entries(), taking_stance("default", backend=backend):
                seen = self._observe(self.candidate, wide=True)
            self._graphs = backend.graphs or None  # what cannot be compiled wide may be natively
            if backend.graphs == 0:
                self.notes.append("only the native run was made: nothing was compiled in float64")
                return None
            leaks = set(backend.leaks)
            if not self.candidate.is_wholly_compiled:
                leaks.add("eager code around the compiled may compute in float32")
        elif isinstance(self.candidate.call, ForeignProgram):
            return self._lift_foreign(self.candidate.call)
        elif self.candidate.is_foreign:
            leaks = set()
            seen = self._observe(self.candidate, wide=True)
        else:
            lifts = functools.partial(is_rounding, used=frozenset(self.dtypes))
            mode = LiftMode(self.dtype, self.default, lifts=lifts)
            seen = self._observe(self.candidate, wide=True, mode=mode)
            leaks = {f"{name} may compute in any precision inside" for name in mode.foreign}
        if leaks or not self.candidate.is_faithful:
            self.lift_unit = UNIT_F32
            reason = "; ".join(sorted(leaks)) or "the candidate may compute in float32 inside"
            self.notes.append(f"the lifted run is judged at float32 noise: {reason}")
        return seen

    def _lift_foreign(self, program: ForeignProgram) -> list[Observation] | None:
        """Another runtime's program, made once more in float64."""
        if program.lift is None:
            self.notes.append(f"only the native run was made: {program.name} has no float64 form")
            return None
        try:
            lifted = program.lift(frozenset(self.dtypes))
        except Exception as error:  # noqa: BLE001  (any failure of theirs is what we report)
            text = " ".join(str(error).split())[:_LONGEST_REASON]
            told = f"{program.name} cannot be made in float64: {type(error).__name__}: {text}"
            self.notes.append(f"only the native run was made: {told}")
            return None
        if lifted.leaks:
            self.lift_unit = UNIT_F32
            reason = "; ".join(sorted(lifted.leaks))
            self.notes.append(f"the lifted run is judged at float32 noise: {reason}")
        return self._observe(dataclasses.replace(self.candidate, call=lifted.call), wide=True)

    def ran_uncompiled(self) -> bool:
        """Whether a compiled candidate really ran eagerly: Dynamo skips some code without a word.

        A program without a single operator leaves nothing to compile and does not count.
        """
        if not self.candidate.is_compiled:
            return False
        if self._graphs is None:
            backend = CountingBackend()
            conditions = dataclasses.replace(self.conditions, gradients=False)
            with (
                room_for_entries(),
                taking_stance("default", backend=backend),
                running_subject(self.candidate, self.rng, conditions) as call,
            ):
                call(self.inputs)
            self._graphs = backend.graphs
        return self._graphs == 0 and bool(self._dtype_log())

    def can_make_less(self) -> bool:
        """Whether a perturbed run may leave out gradients that nobody asks about any more.

        Not where it is told by their order in which dtype operators run, nor where a second call
        goes on from what the first one left.
        """
        self.arbiter()  # it shows all dtypes
        return self.conditions.gradients and len(self.native) == 1 and len(self.dtypes) == 1

    def perturbed(
        self, unit: float, seed: int, *, remember_decisions: bool = False
    ) -> list[Observation]:
        """Run the reference with its roundings drawn at random, as far as anything depends on it.

        Its gradients are no discrete values, about which decisions are remembered.
        """
        self._makes_second = self.at_second
        if self.can_make_less():
            self._wanted = frozenset(
                path
                for path in (*self.native[0].gradients, *self.native[0].further)
                if (0, path) not in self.settled and not remember_decisions
            )
        try:
            return super().perturbed(unit, seed, remember_decisions=remember_decisions)
        finally:
            self._wanted, self._makes_second = None, True

    def go_on_to_second(self) -> None:
        """Gradients of gradients are judged next, by perturbed runs of their own."""
        self.at_second = True
        self._spreads.clear()

    def complete(self, seen: Observation, path: str, side: Subject | None = None) -> Any:
        """An item of a run; an input or buffer it left alone has the value it came with."""
        if is_afterwards(path) and path not in seen.after and path not in seen.state:
            if path.endswith(AFTER_BACKWARD):
                return self.complete(seen, f"{place_of(path)}{AFTER}", side)
            return self.initial(path, side)
        return seen.value(path)

    def initial(self, path: str, side: Subject | None = None) -> Any:
        """What an input, or something of a side's state, was before the call; or `MISSING`."""
        name = place_of(path)
        if not name.startswith(f"{STATE} "):
            return as_plain(_find_part(input_contents(self.inputs, copy_tensors=False), name))
        name = name.removeprefix(f"{STATE} ")
        for one in (self.reference, self.candidate) if side is None else (side,):
            value = one.state.initial(name)
            value = _find_part(one.state.saved, name) if value is MISSING else value
            if value is not MISSING:
                return as_plain(value)
        return MISSING

    def repeats(self, path: str, first: Observation, last: Observation) -> bool:
        """Whether two native runs of the reference differ in an item by rounding alone.

        Its own error is no yardstick here: if something has changed it between the runs, that is
        what its error consists of. Two runs in float64 must agree far better than it rounds, and
        then the spread of the perturbed runs is what rounding does.
        """
        values = self.complete(first, path), self.complete(last, path)
        if not (is_inexact(values[0]) and is_inexact(values[1])) or values[0].is_complex():
            return True
        arbiter, again = self.arbiter(), self._repeated_arbiter()
        if arbiter is not None and again is not None:
            wide = self.complete(arbiter[0], path), self.complete(again[0], path)
            if not (is_inexact(wide[0]) and is_inexact(wide[1])):
                return False
            apart = criterion.rms_difference(wide[0], wide[1])
            if apart > UNIT_F32 * criterion.rms(wide[0]):
                return False
        spread = self.spread(self.unit, 0, path, RUNS[1])
        if spread is None:
            return True
        unit = unit_roundoff(values[0].dtype)
        noise = criterion.Noise(unit=unit, spread=spread, factor=2.0)
        return criterion.score(values[1], values[0], noise).score.passed

    def is_repeated(self, path: str, call: int) -> bool:
        """Whether another native run of the reference leaves the same there, to the bit."""
        if self._repeat is None:
            self._repeat = self._observe(self.reference)
        first, again = (
            self.complete(seen[call], path, self.reference) for seen in (self.native, self._repeat)
        )
        return same_value(first, again)

    def _repeated_arbiter(self) -> list[Observation] | None:
        if self._again is None and self.arbiter() is not None:
            mode = LiftMode(self.dtype, self.default)
            self._again = self.run_reference(mode=mode, wide=True)
        return self._again

    def run_reference(
        self,
        *,
        wide: bool = False,
        mode: LiftMode | None = None,
        watch: contextlib.AbstractContextManager[Any] | None = None,
    ) -> list[Observation]:
        """Run the reference once more."""
        return self._observe(self.reference, wide=wide, mode=mode, watch=watch)

    def _observe(
        self,
        subject: Subject,
        *,
        wide: bool = False,
        mode: LiftMode | None = None,
        watch: contextlib.AbstractContextManager[Any] | None = None,
        forward_once: bool = False,
    ) -> list[Observation]:
        conditions = dataclasses.replace(
            self.conditions,
            options=RunOptions(wide=wide, mode=mode, watch=watch, wanted=self._wanted),
            changing=self.changing,
            second=self.conditions.second and self._makes_second,
        )
        if forward_once:
            conditions = dataclasses.replace(conditions, gradients=False)
        calls = self.native[:1] if forward_once else self.native

        def once() -> list[Observation]:
            with running_subject(subject, self.rng, conditions) as call:
                return [call(self.inputs) for _ in calls]

        default = self.wide_default if subject is self.reference else WideDefault()
        seen = default.run(mode, once) if wide else once()
        if conditions.also and any(one.error or one.gradient_error for one in seen):
            # What the caller's own flags allow must not be lost over what was asked beyond them.
            conditions = dataclasses.replace(conditions, also=frozenset(), second=False)
            if mode is not None:
                mode.start_over()
            seen = default.run(mode, once) if wide else once()
        return seen

    def _count_dtypes(self, native: Observation) -> dict[torch.dtype, int]:
        """The floating dtypes of the program's state, inputs and outputs, with element counts."""
        counts: dict[torch.dtype, int] = {}
        tensors = [*self.reference.state.saved.values()]
        tensors += [tensor for _, tensor in input_tensors(self.inputs)]
        tensors += [leaf for leaf in native.outputs.values() if is_inexact(leaf)]
        for tensor in tensors:
            if is_inexact(tensor) and (tensor.dtype in WIDE or _is_float64(tensor)):
                counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
        return counts


def _find_part(known: Mapping[str, Any], name: str) -> Any:
    """What is known by that name, if only as a part of a tensor that is not dense."""
    if name in known:
        return known[name]
    for whole, value in known.items():
        is_whole = isinstance(value, torch.Tensor) and name.startswith(whole)
        if is_whole and not is_dense(value):
            return flattened(value.detach(), whole).leaves.get(name, MISSING)
    return MISSING


def _is_float64(tensor: Tensor) -> bool:
    return tensor.dtype in {torch.float64, torch.complex128}
