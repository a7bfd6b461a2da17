"""Runs of one graph on the arguments of one call: natively, in float64, perturbed."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.graphs import (
    as_traced,
    copy_graph,
    node_dtypes,
    placeholders,
    returned,
    written_placeholders,
)
from paritas._torch.random_twins import use_twins
from paritas.checking.isolation import Copier, RandomState
from paritas.checking.noise import NoiseRuns
from paritas.checking.observing import AFTER, Observation, aliases, default_dtype, memory

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from paritas._torch.lifting import LiftMode


@dataclasses.dataclass(frozen=True)
class ReferenceGraph:
    """A graph from below autograd as a program that can be run op by op.

    Attributes:
        module: the graph, drawing the random numbers that compiled code draws.
        inputs: a name for each input.
        outputs: a name for each output.
        written: positions of the inputs it may write to.
        dtypes: the floating dtypes it computes in, counted.
    """

    module: GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    written: frozenset[int]
    dtypes: dict[torch.dtype, int]

    @classmethod
    def of(
        cls,
        module: GraphModule,
        inputs: list[str] | None = None,
        outputs: list[str] | None = None,
    ) -> ReferenceGraph:
        """Copy a graph; without names, positions name its inputs and outputs."""
        mine = copy_graph(module)
        use_twins(mine)
        return cls(
            module=mine,
            inputs=tuple(inputs or [node.name for node in placeholders(mine)]),
            outputs=tuple(outputs or [f"output[{i}]" for i in range(len(returned(mine)))]),
            written=written_placeholders(module),
            dtypes=node_dtypes(module),
        )

    def observe(self, args: list[Any], mode: LiftMode | None = None) -> Observation:
        """Run it on arguments that it may write to, and name what came out."""
        seen = Observation(rng_before=RandomState.now())
        try:
            with as_traced(), mode or contextlib.nullcontext():
                results = self.module(*args)
        except Exception as error:  # noqa: BLE001  (the judge is told that there is no such run)
            seen.error = error
            return seen
        seen.rng_after = RandomState.now()
        self.name_results(seen, list(results), args, mode)
        return seen

    def name_results(
        self, seen: Observation, results: list[Any], args: list[Any], mode: LiftMode | None = None
    ) -> None:
        """Put results and written inputs into an observation, under their names."""
        for name, value in zip(self.outputs, results, strict=False):
            seen.outputs[name] = value
            if not isinstance(value, torch.Tensor):
                continue
            if value.layout is torch.strided:
                seen.strides[name] = tuple(value.stride())
            if mode is None:
                continue
            decision = mode.decision_for(value)
            if decision is not None:
                seen.decisions[name] = decision
        for position in sorted(self.written):
            value = args[position]
            if isinstance(value, torch.Tensor):
                seen.after[f"{self.inputs[position]}{AFTER}"] = value.detach()
        seen.aliases = aliases(seen.outputs, dict(zip(self.inputs, args, strict=False)))


class GraphRuns(NoiseRuns):
    """The runs of a reference graph on the arguments of one call.

    Attributes:
        kept: the arguments as they were before the call; nothing writes to them.
        used: the arguments of the native run: `kept`, but where it writes to them.
    """

    def __init__(
        self, reference: ReferenceGraph, kept: list[Any], rng: RandomState, seed: int = 0
    ) -> None:
        """Run the reference natively, at once."""
        self.reference = reference
        self.kept = kept
        self.rng = rng
        self.used = self.arguments()
        self.rng.restore()
        super().__init__([reference.observe(self.used)], reference.dtypes, seed)

    def run_reference(
        self,
        *,
        wide: bool = False,
        mode: LiftMode | None = None,
        watch: contextlib.AbstractContextManager[Any] | None = None,
    ) -> list[Observation]:
        """Run the reference once more."""
        args = self.wide_arguments() if wide else self.arguments()
        self.rng.restore()
        with (
            default_dtype(torch.float64) if wide else contextlib.nullcontext(),
            watch or contextlib.nullcontext(),
        ):
            return [self.reference.observe(args, mode)]

    def arguments(self) -> list[Any]:
        """The arguments, with copies of those that the graph may write to."""
        return written_copied(self.kept, self.reference.written)

    def wide_arguments(self) -> list[Any]:
        """Copies of all arguments in float64."""
        copier = Copier(widen=True)
        return [copy_argument(copier, value) for value in self.kept]

    def lifted(self) -> list[Observation] | None:
        """Compiled code is judged as it is: in float64 it would be another program."""
        return None

    def complete(self, seen: Observation, path: str) -> Any:
        """An item of a run."""
        return seen.value(path)


def copy_argument(copier: Copier, value: Any) -> Any:
    """A tensor's copy; numbers, generators and the like as they are."""
    return copier.copy_tensor(value) if isinstance(value, torch.Tensor) else value


def written_copied(args: list[Any], written: frozenset[int]) -> list[Any]:
    """The arguments with copies of the written ones and of whatever shares memory with them."""
    if not written:
        return list(args)
    shared = {memory(args[position]) for position in written if position < len(args)} - {0}
    copier = Copier()
    return [
        copy_argument(copier, value) if position in written or memory(value) in shared else value
        for position, value in enumerate(args)
    ]
