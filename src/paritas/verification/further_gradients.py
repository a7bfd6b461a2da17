"""Gradients that the caller's own call does not compute."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from paritas.core.errors import in_one_line
from paritas.core.execution.observation import (
    Observation,
    RunConditions,
    RunOptions,
    input_tensors,
    same_value,
    storage_address,
)
from paritas.core.execution.running import running_subject
from paritas.core.numerics.bits import is_inexact
from paritas.core.results.findings import Aspect, Status
from paritas.core.results.items import Item, ItemKind, gradient
from paritas.core.results.wording import size
from paritas.core.torch_private.dynamo import room_for_entries
from paritas.core.torch_private.operators import WIDE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.core.execution.saved_state import RandomState
    from paritas.core.execution.subjects import Inputs, Subject, VerifyConfig
    from paritas.core.judging.comparer import CollectedFindings


# A model that is called with plain data may later follow another model, and then the gradient of
# its input matters; a gradient penalty differentiates gradients. Both are computed in a separate
# run, and the caller's own call is compared unchanged: a leaf that requires grad can select another
# kernel, makes compilers recompile, and cannot be written to.
#
# If this run raises, the gradients are listed as not compared. Nobody can miss that difference:
# whoever computes these gradients gets an exception, never a wrong number.

# Counts parameters, inputs and outputs. Differentiating twice takes about three times the time and
# memory of differentiating once; programs of this size (kernels, layers) take milliseconds.
MOST_NUMBERS = 1 << 18
_SECOND = "gradients of gradients"
# A second backward pass over one graph keeps what the first one would free step by step: at most as
# much as the gradients take.
MOST_REPEATED = 1 << 30
_AGAIN = "a second backward pass over one graph"


class FurtherGradients:
    """Computes them natively on both sides, and decides what later runs have to compute.

    Attributes:
        conditions: the conditions of the later runs.
        skipped: what was not computed, and why.
        failures: by role, what a side raised for verify_double_backward=True.
    """

    def __init__(
        self,
        sides: tuple[Subject, Subject],
        inputs: Inputs,
        rng: RandomState,
        config: VerifyConfig,
        conditions: RunConditions,
    ) -> None:
        """`conditions` are the conditions of the caller's own call."""
        self.sides = sides
        self.inputs = inputs
        self.rng = rng
        self.config = config
        self.conditions = conditions
        self.skipped: list[str] = []
        self.failures: dict[str, Exception] = {}

    def ask(self, natives: tuple[Observation, Observation]) -> tuple[Observation, Observation]:
        """Add the further gradients to the observations of the caller's own call."""
        reference, candidate = natives
        failed = any(native.error or native.gradient_error for native in natives)
        stops = reference.gradients and not any(candidate.requires_grad.values())
        if not self.conditions.gradients or failed or stops:
            return natives
        written = {item.name for native in natives for item in native.after}
        self.conditions = dataclasses.replace(
            self.conditions,
            also=frozenset(self._inputs(written)),
            written=frozenset(written),
            second=self._differentiates_twice(reference, candidate),
            repeats=self._repeats_backward(reference, candidate),
        )
        both_runs = self._run_both(natives)
        self.conditions = dataclasses.replace(self.conditions, repeats=False)  # shown by now
        return self._join_observations(reference, both_runs[0]), self._join_observations(
            candidate, both_runs[1]
        )

    def _join_observations(self, native: Observation, observation: Observation) -> Observation:
        further = {
            item: value for item, value in observation.further.items() if self._is_asked(item)
        }
        forms = native.gradient_forms | observation.gradient_forms
        return dataclasses.replace(
            native, further=further, again=observation.again, gradient_forms=forms
        )

    def _run_both(self, natives: tuple[Observation, Observation]) -> list[Observation]:
        """Run both sides under the same flags: what one side cannot compute, neither computes."""
        while self.conditions.also or self.conditions.second or self.conditions.repeats:
            also = self.conditions.also
            observations = [self._run(*pair) for pair in zip(self.sides, natives, strict=True)]
            if self.conditions.also == also:
                return observations
        return [Observation(), Observation()]

    def report(self, collected: CollectedFindings) -> None:
        """Report what was not compared; an exception under verify_double_backward=True fails."""
        collected.skipped += self.skipped
        for role, error in self.failures.items():
            status = Status.DIFFERENT if role == "candidate" else Status.UNVERIFIED
            reason = f"the {role} raises {in_one_line(error, 120)}"
            advice = "they were requested by verify_double_backward=True"
            item = Item(ItemKind.GRADIENTS, _SECOND)
            raised = type(error).__name__ if role == "candidate" else ""
            collected.add(item, Aspect.EXCEPTION, status, reason, advice, raised)

    def _is_asked(self, item: Item) -> bool:
        if item.kind is ItemKind.SECOND_GRADIENT:
            return self.conditions.second
        return bool(self.conditions.also)

    def _inputs(self, written: set[str]) -> Iterator[str]:
        if not self.config.verify_input_gradients:
            return
        if not self._runs_natively(self.sides[0]):
            self._skip("gradients of inputs that do not require grad", "the reference is compiled")
            return
        named = dict(input_tensors(self.inputs))
        places = [storage_address(tensor) for tensor in named.values()]
        for path, tensor in named.items():
            if tensor.requires_grad or not _is_differentiable(tensor):
                continue
            if path in written and places.count(storage_address(tensor)) > 1:
                self._skip(gradient(path).text, "it is written to and shares memory")
            elif path in written and any(side.is_compiled for side in self.sides):
                # It could not be a leaf, and Dynamo would warn the user.
                self._skip(gradient(path).text, "a compiled program writes to it")
            else:
                yield path

    def _differentiates_twice(self, reference: Observation, candidate: Observation) -> bool:
        verify_double_backward = self.config.verify_double_backward
        if verify_double_backward is False:
            return False
        if reference.outputs.keys() != candidate.outputs.keys():
            self._skip(_SECOND, "the two sides name their outputs differently")
            return False
        if reference.gradients.keys() != candidate.gradients.keys():
            self._skip(_SECOND, "the two sides name their gradients differently")
            return False
        if any(observation.backward_changes_things for observation in (reference, candidate)):
            # It would change them twice and affect what runs later.
            self._skip(_SECOND, "the backward pass changes inputs, state or the random generators")
            return False
        if verify_double_backward is not None:
            return verify_double_backward
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

    def _repeats_backward(self, reference: Observation, candidate: Observation) -> bool:
        """Whether to make a second backward pass: where the candidate's own code computes it.

        Torch's own functions leave what they have saved as it is.
        """
        if not candidate.own_backward or self.config.verify_double_backward is False:
            return False
        if any(observation.backward_changes_things for observation in (reference, candidate)):
            self._skip(_AGAIN, "the backward pass changes inputs, state or the random generators")
            return False
        fits = candidate.gradient_bytes <= MOST_REPEATED
        if not fits:
            self._skip(_AGAIN, f"the gradients take more than {size(MOST_REPEATED)}")
        return fits

    def _runs_natively(self, side: Subject) -> bool:
        """Whether a side runs natively for this. A compiled one only lifts: it would recompile."""
        return not side.is_compiled or self.config.verify_double_backward is True

    def _run(self, side: Subject, native: Observation) -> Observation:
        """Run one side natively; what it cannot compute is dropped for both sides."""
        if not self._runs_natively(side):
            return Observation()
        observation = self._observe(side)
        error = observation.error or observation.gradient_error
        if self.conditions.also and error is not None:
            self._give_up_inputs(f"the {side.role} raises {in_one_line(error, 120)}")
        elif self.conditions.also and not _same_outputs(native, observation):
            self._give_up_inputs(f"the {side.role} gives other outputs in a run in which they do")
        elif self.conditions.second and (error := error or observation.second_error) is not None:
            self.conditions = dataclasses.replace(self.conditions, second=False)
            self._skip(_SECOND, f"the {side.role} raises {in_one_line(error, 120)}")
            if self.config.verify_double_backward:
                self.failures[side.role] = error
        if observation.again_error is not None and side.role == "candidate":
            self._skip(_AGAIN, f"the candidate raises {in_one_line(observation.again_error, 120)}")
        return observation

    def _observe(self, side: Subject) -> Observation:
        """Run one side; compute nothing that the caller's own call has shown already."""
        wanted_gradients = frozenset(map(gradient, self.conditions.also))
        conditions = dataclasses.replace(
            self.conditions, options=RunOptions(wanted=wanted_gradients), changing=frozenset()
        )
        room = room_for_entries() if side.is_compiled else contextlib.nullcontext()
        with room, running_subject(side, self.rng, conditions) as call:
            return call(self.inputs)

    def _give_up_inputs(self, why: str) -> None:
        for path in sorted(self.conditions.also):
            self._skip(f"{gradient(path)}, which does not require grad", why)
        self.conditions = dataclasses.replace(self.conditions, also=frozenset())

    def _skip(self, what: str, why: str) -> None:
        self.skipped.append(f"{what}: {why}")


def _is_differentiable(tensor: Tensor) -> bool:
    return is_inexact(tensor) and (tensor.dtype in WIDE or tensor.dtype in WIDE.values())


def _same_outputs(native: Observation, observation: Observation) -> bool:
    return native.outputs.keys() == observation.outputs.keys() and all(
        same_value(value, observation.outputs[path]) for path, value in native.outputs.items()
    )
