"""A model captured by `torch.export` as a program of tensors alone: no trees, no keywords.

Other runtimes take lists of tensors and give lists of tensors. What the model took and gave
besides, the structure and the values that are no tensors, is kept here and put around them again.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.default_dtypes import default_dtype
from paritas._torch.exported_lifting import lift_captured
from paritas._torch.quiet import quietly
from paritas.checking.config import Inputs
from paritas.checking.isolation import ProgramState, copied
from paritas.errors import UsageError
from paritas.numerics.trees import leaves, map_leaves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.export import ExportedProgram

__all__ = ["Capture", "capture", "capture_lifted", "check_model", "told"]

_LONGEST, _LONGEST_OUTER = 300, 80
_COLOUR = re.compile(r"\x1b\[\d+m")


class _Slot:
    """Where a tensor stood in what the model gave."""


@dataclasses.dataclass(frozen=True)
class Capture:
    """One call of a model, captured.

    Attributes:
        program: takes the tensors of the arguments in order, gives those of the result.
        tensors: what it was captured with.
        shape_of_result: the tree that the model gives, with a mark for every tensor.
        is_lifted: it is in float64, whatever the model is in.
        leaks: what of it could not be lifted, in words.
    """

    program: ExportedProgram
    tensors: tuple[Tensor, ...]
    shape_of_result: Any
    is_lifted: bool = False
    leaks: frozenset[str] = frozenset()

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """What the model would give, made of these tensors."""
        marks = sum(isinstance(leaf, _Slot) for _, leaf in leaves(self.shape_of_result))
        if marks != len(tensors):
            raise RuntimeError(
                f"the runtime gave {len(tensors)} tensors where the model has {marks}"
            )
        given = iter(tensors)
        return map_leaves(
            self.shape_of_result, lambda leaf: next(given) if isinstance(leaf, _Slot) else leaf
        )


class _Flat(torch.nn.Module):
    """A model that takes and gives tensors alone."""

    def __init__(self, model: nn.Module, inputs: Inputs, seen: list[Any]) -> None:
        super().__init__()
        self.model = model
        self._tree = [Inputs(tuple(inputs.args), dict(inputs.kwargs))]
        self._seen = seen

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Put the arguments together, call the model, take its result apart."""
        given = iter(tensors)

        def filled(leaf: Any) -> Any:
            return next(given) if isinstance(leaf, torch.Tensor) else leaf

        args = map_leaves(list(self._tree[0].args), filled)
        kwargs = map_leaves(self._tree[0].kwargs, filled)
        result = self.model(*args, **kwargs)
        self._seen[:] = [map_leaves(result, _marked)]
        return tuple(leaf for _, leaf in leaves(result) if isinstance(leaf, torch.Tensor))


def capture(model: nn.Module, inputs: Inputs) -> Capture:
    """Capture a model with the shapes of these inputs, for inference.

    Raises:
        UsageError: `torch.export` refuses it.
    """
    seen: list[Any] = []
    flat = _Flat(model, inputs, seen)
    fresh = tensors_of(copied(inputs))
    try:
        with quietly(), torch.no_grad():
            program = torch.export.export(flat, fresh)
    except Exception as error:
        raise UsageError(f"torch.export refuses the model: {told(error)}") from error
    return Capture(program, fresh, seen[0])


def capture_lifted(
    model: nn.Module, state: ProgramState, inputs: Inputs, used: frozenset[torch.dtype]
) -> Capture:
    """Capture the same in float64: state, inputs, defaults, and each cast that is mere rounding.

    `state` is the model's as it was when it was captured natively: what was done to the model since
    is no part of the candidate.
    """
    wide = copied(inputs, widen=True)
    with state.swapped(state.widened()), default_dtype(torch.float64):
        first = capture(model, wide)
        with quietly(), torch.no_grad():
            # Once more, for the dtypes that follow from the casts that were widened.
            program, leaks = lift_captured(first.program, first.tensors, used)
    return dataclasses.replace(first, program=program, is_lifted=True, leaks=leaks)


def tensors_of(inputs: Inputs) -> tuple[Tensor, ...]:
    """The tensors of the arguments, in the order in which a captured program takes them."""
    found = [*leaves(list(inputs.args)), *leaves(inputs.kwargs)]
    return tuple(leaf for _, leaf in found if isinstance(leaf, torch.Tensor))


def check_model(model: Any, name: str) -> None:
    """Raise `UsageError` unless `torch.export` could capture this."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"candidate {name!r} is made by torch.export, which takes an nn.Module, not "
            f"{type(model).__name__}; put the function into the forward of one"
        )


def told(error: BaseException) -> str:
    """An exception's kind and the start of its text, in one line, and what was the cause of it."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is error:
        return _line(error, _LONGEST)
    return f"{_line(error, _LONGEST_OUTER)}; the cause is {_line(cause, _LONGEST)}"


def _line(error: BaseException, longest: int) -> str:
    text = " ".join(_COLOUR.sub("", str(error)).split())
    return f"{type(error).__name__}: {text[:longest]}{' ...' if len(text) > longest else ''}"


def _marked(leaf: Any) -> Any:
    return _Slot() if isinstance(leaf, torch.Tensor) else leaf
