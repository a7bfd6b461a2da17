"""An operator run whole, in float64: what any way to split it is held against."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.default_dtypes import default_dtype
from paritas._torch.lifting import map_tensors
from paritas.checking.noise import NoiseRuns, is_inexact
from paritas.checking.observing import Observation, cotangent
from paritas.numerics.trees import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from paritas._torch.lifting import LiftMode

__all__ = ["TruthRuns", "argument_tensors", "differentiate", "map_call", "tensors_of", "wide"]

# How often gradients are taken, each time of other random numbers.
DRAWS = 2


def map_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], function: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with each of their tensors replaced."""
    named = {name: map_tensors(value, function) for name, value in kwargs.items()}
    return tuple(map_tensors(value, function) for value in args), named


def wide(tensor: Tensor) -> Tensor:
    """A floating tensor in float64, with no more digits than float32 has.

    So the terms into which it is taken apart add up to it again, bit for bit.
    """
    tensor = tensor.detach()
    if tensor.is_floating_point():
        return tensor.to(torch.float32).to(torch.float64)
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.clone()


def argument_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a call by the path that a caller would write."""
    found = [*leaves(list(args), "args"), *leaves(dict(kwargs), "kwargs")]
    return {path: leaf for path, leaf in found if isinstance(leaf, torch.Tensor)}


def tensors_of(result: Any) -> dict[str, Any]:
    """What a call gave, by path."""
    return dict(leaves(result, "output"))


def draw_cotangents(outputs: Mapping[str, Any], seed: int) -> list[dict[str, Tensor]]:
    """Random numbers to send back from each result that requires it, for each draw."""
    return [
        {
            path: cotangent(path, leaf, seed + draw, torch.float32)
            for path, leaf in outputs.items()
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        }
        for draw in range(DRAWS)
    ]


def differentiate(
    outputs: Mapping[str, Any],
    given: Mapping[str, Tensor],
    cotangents: list[dict[str, Tensor]],
) -> dict[str, Tensor | None]:
    """Gradients of everything floating that was given, by path, for each draw of cotangents."""
    asked = {path: leaf for path, leaf in given.items() if leaf.requires_grad}
    ends = {
        path: leaf
        for path, leaf in outputs.items()
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }
    gradients: dict[str, Tensor | None] = {}
    if not asked or not ends:
        return gradients
    for draw, upstream in enumerate(cotangents):
        found = torch.autograd.grad(
            list(ends.values()),
            list(asked.values()),
            [upstream[path] for path in ends],
            retain_graph=draw + 1 < len(cotangents),
            allow_unused=True,
        )
        which = f" (draw {draw + 1})"
        for path, gradient in zip(asked, found, strict=True):
            gradients[f"gradient of {path}{which}"] = gradient
    return gradients


class TruthRuns(NoiseRuns):
    """The operator on whole arguments, as it is and with its roundings drawn at random.

    Attributes:
        cotangents: what is sent back from its results, for each draw; made once, of the first run.
    """

    def __init__(
        self,
        operator: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        seed: int = 0,
    ) -> None:
        """Run it once; what it is given is in float64 already."""
        self.operator = operator
        self.args, self.kwargs = args, kwargs
        self.cotangents: list[dict[str, Tensor]] | None = None
        super().__init__([], {torch.float64: 1}, seed)
        self.native = self.run_reference()

    def run_reference(
        self,
        *,
        wide: bool = False,
        mode: LiftMode | None = None,
        watch: contextlib.AbstractContextManager[Any] | None = None,
    ) -> list[Observation]:
        """Run it forward and backward."""
        seen = Observation()
        try:
            with (
                default_dtype(torch.float64),
                watch or contextlib.nullcontext(),
                mode or contextlib.nullcontext(),
            ):
                args, kwargs = map_call(self.args, self.kwargs, _leaf)
                given = argument_tensors(args, kwargs)
                outputs = tensors_of(self.operator(*args, **kwargs))
                if self.cotangents is None:
                    self.cotangents = draw_cotangents(outputs, self.seed)
                seen.gradients |= differentiate(outputs, given, self.cotangents)
        except Exception as error:  # noqa: BLE001  (then there is no such run, and it is told)
            seen.error = error
            return [seen]
        for path, leaf in outputs.items():
            value = seen.outputs[path] = leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
            if mode is not None and isinstance(value, torch.Tensor) and not is_inexact(value):
                decision = mode.decision_for(value)
                if decision is not None:
                    seen.decisions[path] = decision
        return [seen]

    def lifted(self) -> list[Observation] | None:
        """The candidate is in float64 as it is."""
        return None

    def complete(self, seen: Observation, path: str) -> Any:
        """An item of a run."""
        return seen.value(path)


def _leaf(tensor: Tensor) -> Tensor:
    made = tensor.detach().clone()
    return made.requires_grad_(made.is_floating_point() or made.is_complex())
