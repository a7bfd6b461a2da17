"""A model as another runtime's program: built for the shapes it is to be called with."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas.candidates.capturing import (
    Capture,
    capture,
    capture_lifted,
    check_model,
    tensors_of,
    told,
)
from paritas.checking.config import Inputs, input_sets
from paritas.checking.foreign import ForeignProgram, LiftedProgram
from paritas.checking.isolation import ProgramState
from paritas.errors import UsageError
from paritas.numerics.trees import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]

__all__ = ["Built", "foreign_program"]


@dataclasses.dataclass(frozen=True)
class Built:
    """What runs a captured call, and what of that may compute in less than float64."""

    run: Run
    leaks: frozenset[str] = frozenset()


def foreign_program(
    name: str, model: nn.Module, inputs: Any, build: Callable[[Capture], Built]
) -> ForeignProgram:
    """A candidate that `build` makes of each captured call of the model.

    Args:
        name: of the runtime.
        model: what is captured; it stays as it is.
        inputs: as for `paritas.verify`: one program is built for each set of them.
        build: from a captured call to what runs it.

    Raises:
        UsageError: the model cannot be captured, or `build` fails.
    """
    check_model(model, name)
    sets = input_sets(inputs)
    state = ProgramState({"": model})
    native = _Programs(name, [_built(name, capture(model, one), build, one) for one in sets])

    def lift(used: frozenset[torch.dtype]) -> LiftedProgram:
        programs = [
            _built(name, capture_lifted(model, state, one, used), build, one) for one in sets
        ]
        leaks = frozenset[str]().union(*(program.leaks for program in programs))
        return LiftedProgram(_Programs(name, programs), leaks)

    return ForeignProgram(name, native, lift)


@dataclasses.dataclass(frozen=True)
class _Program:
    """What runs one captured call, and for which arguments it was made."""

    capture: Capture
    built: Built
    key: tuple[Any, ...]

    @property
    def leaks(self) -> frozenset[str]:
        """Of the capture, and of what was built of it."""
        return self.capture.leaks | self.built.leaks


class _Programs:
    """The programs of all sets of inputs, found by what they are called with."""

    def __init__(self, name: str, programs: list[_Program]) -> None:
        self.name = name
        self.programs = {program.key: program for program in programs}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = Inputs(args, kwargs)
        program = self.programs.get(_key(inputs))
        if program is None:
            shown = ", ".join(f"{t.dtype}{list(t.shape)}" for t in tensors_of(inputs))
            raise UsageError(
                f"{self.name} was built for other inputs than {shown}; give every set of inputs "
                "when it is made"
            )
        with torch.no_grad():
            given = program.built.run(tensors_of(inputs))
        return program.capture.result(given)


def _built(
    name: str, captured: Capture, build: Callable[[Capture], Built], inputs: Inputs
) -> _Program:
    try:
        # As it was captured: which form of attention is taken depends on whether gradients are on.
        with torch.no_grad():
            built = build(captured)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{name} refuses the model: {told(error)}") from error
    return _Program(captured, built, _key(inputs))


def _key(inputs: Inputs) -> tuple[Any, ...]:
    """Shapes and what is no tensor; not dtypes, which a lifted run widens."""
    found = [*leaves(list(inputs.args)), *leaves(inputs.kwargs)]
    return tuple(
        (path, tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else repr(leaf))
        for path, leaf in found
    )
