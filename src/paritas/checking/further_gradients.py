"""Gradients that the caller's own call does not make, and others will ask of the same program.

A model that is called with plain data stands behind another model one day, and then the gradient
of its input counts; a gradient penalty differentiates gradients. Both are asked in a run of their
own, so that outputs and gradients are compared as the caller calls: a leaf that requires grad can
choose another kernel, makes compilers compile anew, and forbids writing to it.

What raises there is listed as not compared. It is no difference that anyone could miss: whoever
asks for it gets an exception, never a wrong number.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from paritas._torch.compiled import room_for_entries
from paritas._torch.lifting import WIDE
from paritas.checking.noise import is_inexact
from paritas.checking.observing import (
    GRADIENT,
    SECOND_GRADIENT,
    Observation,
    input_tensors,
    memory,
    place_of,
    running,
    same_value,
)
from paritas.numerics.findings import Aspect, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.checking.comparing import Collected
    from paritas.checking.config import Inputs, VerifyConfig
    from paritas.checking.observing import Conditions
    from paritas.checking.subjects import Subject
    from paritas.recording.isolation import RandomState

__all__ = ["MOST_NUMBERS", "FurtherGradients"]

# Parameters, inputs and outputs. Differentiating twice takes some three times what once takes, and
# as much more memory; programs of this size, kernels and layers in a test, take milliseconds.
MOST_NUMBERS = 1 << 18
_SECOND = "gradients of gradients"


class FurtherGradients:
    """Asks both sides for them, once natively, and says what the later runs have to make.

    Attributes:
        conditions: those of the later runs.
        skipped: what was not made, and why.
        failures: what a side raised where gradients of gradients were asked for by name.
    """

    def __init__(
        self,
        sides: tuple[Subject, Subject],
        inputs: Inputs,
        rng: RandomState,
        config: VerifyConfig,
        conditions: Conditions,
    ) -> None:
        """`conditions` are those of the caller's own call."""
        self.sides = sides
        self.inputs = inputs
        self.rng = rng
        self.config = config
        self.conditions = conditions
        self.skipped: list[str] = []
        self.failures: dict[str, Exception] = {}

    def ask(self, natives: tuple[Observation, Observation]) -> tuple[Observation, Observation]:
        """What both sides did in the caller's own call, with what they give beyond it."""
        reference, candidate = natives
        failed = any(seen.error or seen.gradient_error for seen in natives)
        stops = reference.gradients and not any(candidate.requires_grad.values())
        if not self.conditions.gradients or failed or stops:
            return natives
        written = {place_of(path) for seen in natives for path in seen.after}
        self.conditions = dataclasses.replace(
            self.conditions,
            also=frozenset(self._inputs(written)),
            written=frozenset(written),
            second=self._differentiates_twice(reference, candidate),
        )
        found = self._run_both(natives)
        return self._joined(reference, found[0]), self._joined(candidate, found[1])

    def _joined(self, native: Observation, seen: Observation) -> Observation:
        further = {path: value for path, value in seen.further.items() if self._is_asked(path)}
        return dataclasses.replace(native, further=further, again=seen.again)

    def _run_both(self, natives: tuple[Observation, Observation]) -> list[Observation]:
        """Both sides under the same flags: where one cannot have some, neither has."""
        while self._has_any:
            asked = self.conditions.also
            found = [self._run(*pair) for pair in zip(self.sides, natives, strict=True)]
            if self.conditions.also == asked:
                return found
        return [Observation(), Observation()]

    def report(self, collected: Collected) -> None:
        """Say what was not compared; a double backward that was asked for by name is missing."""
        collected.skipped += self.skipped
        for role, error in self.failures.items():
            status = Status.DIFFERENT if role == "candidate" else Status.UNVERIFIED
            reason = f"the {role} raises {_told(error)}"
            advice = "verify_double_backward=True asks for them"
            collected.add(_SECOND, Aspect.EXCEPTION, status, reason, advice)

    @property
    def _has_any(self) -> bool:
        return bool(self.conditions.also) or self.conditions.second

    def _is_asked(self, path: str) -> bool:
        return (
            self.conditions.second
            if path.startswith(SECOND_GRADIENT)
            else bool(self.conditions.also)
        )

    def _inputs(self, written: set[str]) -> Iterator[str]:
        if not self.config.verify_input_gradients:
            return
        if not self._runs_natively(self.sides[0]):
            self._skip("gradients of inputs that do not require grad", "the reference is compiled")
            return
        named = dict(input_tensors(self.inputs))
        places = [memory(tensor) for tensor in named.values()]
        for path, tensor in named.items():
            if tensor.requires_grad or not _is_differentiable(tensor):
                continue
            if path in written and places.count(memory(tensor)) > 1:
                self._skip(f"{GRADIENT} of {path}", "it is written to and shares memory")
            elif path in written and any(side.is_compiled for side in self.sides):
                # It would have to be no leaf, of which Dynamo warns the user.
                self._skip(f"{GRADIENT} of {path}", "a compiled program writes to it")
            else:
                yield path

    def _differentiates_twice(self, reference: Observation, candidate: Observation) -> bool:
        asked = self.config.verify_double_backward
        if asked is False:
            return False
        if reference.outputs.keys() != candidate.outputs.keys():
            self._skip(_SECOND, "the two sides name their outputs differently")
            return False
        if reference.gradients.keys() != candidate.gradients.keys():
            self._skip(_SECOND, "the two sides have gradients of other names")
            return False
        if any(seen.backward_changes_things for seen in (reference, candidate)):
            # It would change them twice, and what comes after would go on from there.
            self._skip(_SECOND, "the backward pass changes inputs, state or the random generators")
            return False
        if asked is not None:
            return asked
        if any(side.is_compiled for side in self.sides):
            self._skip(
                _SECOND, "few compilers support them; set verify_double_backward=True to try"
            )
            return False
        tensors = [*self.sides[0].state.tensors.values()]
        tensors += [tensor for _, tensor in input_tensors(self.inputs)]
        tensors += [leaf for leaf in reference.outputs.values() if is_inexact(leaf)]
        numbers = sum(tensor.numel() for tensor in tensors)
        if numbers > MOST_NUMBERS:
            why = (
                f"the program has {numbers} numbers, more than {MOST_NUMBERS}; set "
                "verify_double_backward=True to compare them"
            )
            self._skip(_SECOND, why)
        return numbers <= MOST_NUMBERS

    def _runs_natively(self, side: Subject) -> bool:
        """What is compiled would be compiled anew for this: its lifted run is, and has to do."""
        return not side.is_compiled or self.config.verify_double_backward is True

    def _run(self, side: Subject, native: Observation) -> Observation:
        """One side natively; whatever it cannot do is asked of none any more."""
        if not self._runs_natively(side):
            return Observation()
        seen = self._observe(side)
        error = seen.error or seen.gradient_error
        if self.conditions.also and error is not None:
            self._give_up_inputs(f"the {side.role} raises {_told(error)}")
        elif self.conditions.also and not _same_outputs(native, seen):
            self._give_up_inputs(f"the {side.role} computes something else then")
        elif self.conditions.second and (error := error or seen.second_error) is not None:
            self.conditions = dataclasses.replace(self.conditions, second=False)
            self._skip(_SECOND, f"the {side.role} raises {_told(error)}")
            if self.config.verify_double_backward:
                self.failures[side.role] = error
        return seen

    def _observe(self, side: Subject) -> Observation:
        """Run one side; of what the caller's own call has shown, make no more than is needed."""
        conditions = dataclasses.replace(
            self.conditions,
            wanted=frozenset(f"{GRADIENT} of {path}" for path in self.conditions.also),
            changing=frozenset(),
        )
        room = room_for_entries() if side.is_compiled else contextlib.nullcontext()
        with room, running(side, self.rng, conditions) as call:
            return call(self.inputs)

    def _give_up_inputs(self, why: str) -> None:
        for path in sorted(self.conditions.also):
            self._skip(f"{GRADIENT} of {path}, which does not require grad", why)
        self.conditions = dataclasses.replace(self.conditions, also=frozenset())

    def _skip(self, what: str, why: str) -> None:
        self.skipped.append(f"{what}: {why}")


def _is_differentiable(tensor: Tensor) -> bool:
    return is_inexact(tensor) and (tensor.dtype in WIDE or tensor.dtype in WIDE.values())


def _same_outputs(native: Observation, seen: Observation) -> bool:
    return native.outputs.keys() == seen.outputs.keys() and all(
        same_value(value, seen.outputs[path]) for path, value in native.outputs.items()
    )


def _told(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]:.120}" if text else repr(error)
