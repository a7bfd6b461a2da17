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
from paritas._torch.lifting import LiftMode
from paritas._torch.random_twins import draws_random_numbers, use_twins
from paritas._torch.widening import widened
from paritas.checking.guarding.lean_graphs import LeanGraph
from paritas.checking.noise import NoiseRuns
from paritas.checking.observing import AFTER, Observation, aliases, memory
from paritas.numerics.metrics import bitwise_equal
from paritas.recording.isolation import Copier, RandomState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.fx import GraphModule


@dataclasses.dataclass(frozen=True)
class ReferenceGraph:
    """A graph from below autograd as a program that can be run op by op.

    Attributes:
        module: the graph, drawing the random numbers that compiled code draws.
        inputs: a name for each input.
        outputs: a name for each output.
        written: positions of the inputs it may write to.
        dtypes: the floating dtypes it computes in, counted.
        draws: whether it draws random numbers.
        wide: the same in float64.
        lean: the same, holding less.
    """

    module: GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    written: frozenset[int]
    dtypes: dict[torch.dtype, int]
    draws: bool
    wide: WideGraph
    lean: LeanGraph

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
        written = written_placeholders(module)
        return cls(
            module=mine,
            inputs=tuple(inputs or [node.name for node in placeholders(mine)]),
            outputs=tuple(outputs or [f"output[{i}]" for i in range(len(returned(mine)))]),
            written=written,
            dtypes=node_dtypes(module),
            draws=draws_random_numbers(module),
            wide=WideGraph(mine, written),
            lean=LeanGraph(mine),
        )

    def observe(
        self, args: list[Any], mode: LiftMode | None = None, module: GraphModule | None = None
    ) -> Observation:
        """Run it, or `module` for it, on arguments that it may write to; name what came out."""
        seen = Observation()
        try:
            with as_traced(), mode or contextlib.nullcontext():
                results = (module or self.module).forward(*args)
        except Exception as error:  # noqa: BLE001  (the judge is told that there is no such run)
            seen.error = error
            return seen
        self.name_results(seen, list(results), args, mode)
        return seen

    def name_results(
        self, seen: Observation, results: list[Any], args: list[Any], mode: LiftMode | None = None
    ) -> None:
        """Put results and written inputs into an observation, under their names."""
        seen.outputs = dict(zip(self.outputs, results, strict=False))
        for position in sorted(self.written):
            value = args[position]
            if isinstance(value, torch.Tensor):
                seen.after[f"{self.inputs[position]}{AFTER}"] = value.detach()
        if mode is None:
            return
        for name, value in seen.outputs.items():
            decision = mode.decision_for(value) if isinstance(value, torch.Tensor) else None
            if decision is not None:
                seen.decisions[name] = decision

    def aliases(
        self, seen: Observation, args: list[Any], addresses: list[int], names: Iterable[str]
    ) -> frozenset[tuple[str, str]]:
        """Which of the named outputs share memory, and with what; `addresses` are of the inputs."""
        outputs = {name: seen.outputs[name] for name in names if name in seen.outputs}
        places = {memory(value) for value in outputs.values()}
        given = zip(self.inputs, args, addresses, strict=False)
        return aliases(outputs, {name: value for name, value, at in given if at in places})


class WideGraph:
    """The graph rewritten for float64, once that was seen to give what the mode gives."""

    def __init__(self, module: GraphModule, written: frozenset[int]) -> None:
        """Nothing is rewritten before it is first needed."""
        self._original = module
        self._written = written
        self._module: GraphModule | None = None
        self._trusted: bool | None = None

    def run(self, reference: ReferenceGraph, args: list[Any]) -> Observation | None:
        """Run it on arguments as they are; None where the mode has to do it."""
        if not self._trusted or self._module is None:
            return None
        return self._observe(self._module, reference, args)

    def compare_once(self, reference: ReferenceGraph, args: list[Any], truth: Observation) -> None:
        """Rewrite the graph, and trust it from now on if it gives the same bits as the mode."""
        if self._trusted is not None or truth.error is not None:
            return
        self._trusted = False
        self._module = widened(self._original, self._written)
        if self._module is None:
            return
        seen = self._observe(self._module, reference, args)
        values = dict(truth.items())
        self._trusted = seen.error is None and all(
            _same(value, values.get(name)) for name, value in seen.items()
        )

    def _observe(
        self, module: GraphModule, reference: ReferenceGraph, args: list[Any]
    ) -> Observation:
        seen = Observation()
        try:
            with as_traced():
                results = list(module.forward(*args))
        except Exception as error:  # noqa: BLE001  (the judge is told that there is no such run)
            seen.error = error
            return seen
        count = len(reference.outputs)
        seen.outputs = dict(zip(reference.outputs, results[:count], strict=True))
        for position, value in zip(sorted(self._written), results[count:], strict=True):
            if isinstance(value, torch.Tensor):
                seen.after[f"{reference.inputs[position]}{AFTER}"] = value
        return seen


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
        self._restore_random()
        seen = reference.observe(self.used, module=reference.lean.module)
        seen.rng_after = RandomState.of_torch() if reference.draws else rng
        super().__init__([seen], reference.dtypes, seed)

    def become_lean(self) -> None:
        """See whether later calls of this graph may hold less than this one."""
        seen = self.native[0]
        if self.reference.lean.is_settled or seen.error is not None:
            return

        def run(module: GraphModule) -> list[Any]:
            self._restore_random()
            again = self.reference.observe(self.arguments(), module=module)
            if again.error is not None:
                raise again.error
            return [value for _, value in again.items()]

        self.reference.lean.compare_once([value for _, value in seen.items()], run)

    def given(self) -> dict[str, Any]:
        """The arguments by name, as they came."""
        return dict(zip(self.reference.inputs, self.kept, strict=False))

    def arbiter(self) -> list[Observation] | None:
        """The reference in float64, or None if that cannot be."""
        if "arbiter" not in self._asked and self.is_narrow:
            self._restore_random()
            seen = self.reference.wide.run(self.reference, self.kept)
            self._asked.add("arbiter")
            if seen is not None and seen.error is None:
                self._arbiter = [seen]
                return self._arbiter
            # Not rewritten, or it failed on these arguments: the mode does it, or says why not.
            mode = LiftMode(self.dtype, self.default)
            runs = self.run_reference(wide=True, mode=mode)
            if self.is_usable(runs, "no arbiter: the reference in float64"):
                self._arbiter = runs
                self._restore_random()
                self.reference.wide.compare_once(self.reference, self.kept, runs[0])
        return self._arbiter

    def run_reference(
        self,
        *,
        wide: bool = False,
        mode: LiftMode | None = None,
        watch: contextlib.AbstractContextManager[Any] | None = None,
    ) -> list[Observation]:
        """Run the reference once more."""

        def once() -> list[Observation]:
            args = self.wide_arguments() if wide else self.arguments()
            self._restore_random()
            with watch or contextlib.nullcontext():
                return [self.reference.observe(args, mode)]

        return self.wide_default.run(mode, once) if wide else once()

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

    def _restore_random(self) -> None:
        if self.reference.draws:
            self.rng.restore()


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


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return bitwise_equal(left.detach(), right.detach())
    return type(left) is type(right) and bool(left == right)
