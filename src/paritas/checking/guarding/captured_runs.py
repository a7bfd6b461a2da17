"""Runs of a captured graph on the arguments of one call, with autograd above it."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.graphs import copy_graph, node_dtypes
from paritas._torch.naming import captured_input_names
from paritas._torch.random_twins import use_twins
from paritas._torch.stances import taking_stance
from paritas.checking.guarding.graph_runs import copy_argument
from paritas.checking.noise import NoiseRuns
from paritas.checking.observing import AFTER, Observation, aliases
from paritas.numerics.device_differences import all_equal
from paritas.recording.isolation import Copier, RandomState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.fx import GraphModule

    from paritas._torch.lifting import LiftMode


@dataclasses.dataclass(frozen=True)
class CapturedReference:
    """A graph as Dynamo captured it: torch functions, above autograd.

    Attributes:
        module: a copy that no backend has changed.
        inputs: a name for each input.
        dtypes: the floating dtypes it computes in, counted.
    """

    module: GraphModule
    inputs: tuple[str, ...]
    dtypes: dict[torch.dtype, int]

    @classmethod
    def of(cls, module: GraphModule) -> CapturedReference:
        """Copy a graph."""
        names = _unique(captured_input_names(module))
        mine = copy_graph(module)
        use_twins(mine)
        return cls(mine, tuple(names), node_dtypes(module))

    def named(self, args: list[Any]) -> dict[str, Any]:
        """The arguments by name."""
        return dict(zip(self.inputs, args, strict=False))

    def name_results(
        self, seen: Observation, results: Any, args: list[Any], kept: list[Any]
    ) -> None:
        """Put results, and the arguments that were written to, into an observation."""
        for position, value in enumerate(results):
            name = f"output[{position}]"
            seen.outputs[name] = value
            if isinstance(value, torch.Tensor):
                seen.requires_grad[name] = value.requires_grad
                if value.layout is torch.strided:
                    seen.strides[name] = tuple(value.stride())
        named = zip(self.inputs, args, kept, strict=False)
        tensors = {name: pair for name, *pair in named if isinstance(pair[0], torch.Tensor)}
        pairs = [(value.detach(), before.detach()) for value, before in tensors.values()]
        for name, (value, _), same in zip(tensors, pairs, all_equal(pairs), strict=True):
            if not same:
                seen.after[f"{name}{AFTER}"] = value.clone()
        seen.aliases = aliases(seen.outputs, self.named(args))


class CapturedRuns(NoiseRuns):
    """The runs of a captured graph on the arguments of one call, forward only.

    Attributes:
        kept: the arguments as they were before the call; nothing writes to them.
    """

    def __init__(
        self,
        reference: CapturedReference,
        kept: list[Any],
        rng: RandomState,
        surroundings: Surroundings,
        seed: int,
    ) -> None:
        """Run the reference natively, at once."""
        self.reference = reference
        self.kept = kept
        self.rng = rng
        self.surroundings = surroundings
        super().__init__([], reference.dtypes, seed)
        self.native = self.run_reference()

    def run_reference(
        self,
        *,
        wide: bool = False,
        mode: LiftMode | None = None,
        watch: contextlib.AbstractContextManager[Any] | None = None,
    ) -> list[Observation]:
        """Run the reference once more."""

        def once() -> list[Observation]:
            return self._run_once(wide=wide, mode=mode, watch=watch)

        return self.wide_default.run(mode, once) if wide else once()

    def _run_once(
        self,
        *,
        wide: bool,
        mode: LiftMode | None,
        watch: contextlib.AbstractContextManager[Any] | None,
    ) -> list[Observation]:
        args = self.arguments(wide=wide)
        before = self.kept if not wide else self.arguments(wide=True)
        self.rng.restore()
        seen = Observation(rng_before=self.rng)
        try:
            with self._around(watch, mode):
                results = self.reference.module(*args)
            seen.rng_after = RandomState.now()
            self.reference.name_results(seen, results, args, before)
            self._finish(seen, results, args, watch, mode)
        except Exception as error:  # noqa: BLE001  (the judge is told of it)
            seen.error = error
        if mode is not None:
            for name, value in seen.outputs.items():
                decision = mode.decision_for(value) if _is_discrete(value) else None
                if decision is not None:
                    seen.decisions[name] = decision
        seen.outputs = {name: _detached(value) for name, value in seen.outputs.items()}
        return [seen]

    def arguments(self, *, wide: bool = False) -> list[Any]:
        """Copies of the arguments, which may be written to."""
        copier = Copier(widen=wide)
        return [copy_argument(copier, value) for value in self.kept]

    def given(self) -> dict[str, Any]:
        """The arguments by name, as they came."""
        return self.reference.named(self.kept)

    def lifted(self) -> list[Observation] | None:
        """Compiled code is judged as it is: in float64 it would be another program."""
        return None

    def complete(self, seen: Observation, path: str) -> Any:
        """An item of a run; an argument it left alone has the value it came with."""
        value = seen.value(path)
        if value is None and path.endswith(AFTER):
            return self.reference.named(self.kept).get(path.removesuffix(AFTER))
        return value

    @contextlib.contextmanager
    def _around(self, watch: Any, mode: LiftMode | None) -> Iterator[None]:
        with (
            self.surroundings.again(),
            taking_stance("force_eager"),
            watch or contextlib.nullcontext(),
            mode or contextlib.nullcontext(),
        ):
            yield

    def _finish(
        self, seen: Observation, results: Any, args: list[Any], watch: Any, mode: LiftMode | None
    ) -> None:
        """What else is done with a run while its results are at hand."""


class GradientRuns(CapturedRuns):
    """The same with gradients, under the cotangents that came down to this graph."""

    def __init__(
        self,
        reference: CapturedReference,
        kept: list[Any],
        rng: RandomState,
        surroundings: Surroundings,
        seed: int,
        cotangents: dict[int, Tensor],
    ) -> None:
        """`cotangents` by the position of the output."""
        self.cotangents = cotangents
        super().__init__(reference, kept, rng, surroundings, seed)

    def _finish(
        self, seen: Observation, results: Any, args: list[Any], watch: Any, mode: LiftMode | None
    ) -> None:
        outputs = [results[position] for position in self.cotangents]
        given = [
            cotangent.to(output.dtype)
            for output, cotangent in zip(outputs, self.cotangents.values(), strict=True)
        ]
        wanted = {
            name: value
            for name, value in self.reference.named(args).items()
            if isinstance(value, torch.Tensor) and value.requires_grad
        }
        with watch or contextlib.nullcontext(), mode or contextlib.nullcontext():
            gradients = torch.autograd.grad(
                outputs, list(wanted.values()), given, allow_unused=True
            )
        for name, gradient in zip(wanted, gradients, strict=True):
            seen.gradients[f"gradient of {name}"] = gradient


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The conditions around a call: grad mode and autocast."""

    grad: bool
    autocast: dict[str, torch.dtype]

    @classmethod
    def now(cls) -> Surroundings:
        """What is in force."""
        kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        on = {kind: torch.get_autocast_dtype(kind) for kind in kinds if _autocasts(kind)}
        return cls(torch.is_grad_enabled(), on)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Put it in force."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
            for kind in kinds:
                dtype = self.autocast.get(kind)
                enabled = dtype is not None
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


def _autocasts(kind: str) -> bool:
    return torch.is_autocast_enabled(kind)


def _is_discrete(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return not (value.is_floating_point() or value.is_complex())


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _unique(names: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return result
