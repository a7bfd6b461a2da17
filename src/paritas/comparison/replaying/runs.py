"""A few operators as a program that is run again: natively, in float64, perturbed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.lifting import WIDE, map_tensors
from paritas.checking.noise import is_inexact
from paritas.checking.value_runs import VALUE, ValueRuns
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from paritas._torch.named_operators import NamedOperator

__all__ = ["Leaf", "Program", "ReplayRuns", "Result", "Step"]

# Batch normalisation in training writes to these, and its signature does not say so.
_SILENTLY_WRITTEN = frozenset({"running_mean", "running_var"})


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Stands for a tensor, or a size, that comes from outside."""

    key: str


@dataclasses.dataclass(frozen=True)
class Result:
    """Stands for what an earlier step gave."""

    step: str


@dataclasses.dataclass(frozen=True)
class Step:
    """A call; its arguments are plain values, leaves, results, and lists of these."""

    name: str
    operator: NamedOperator
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Program:
    """Calls in order.

    Attributes:
        position: which of the results of the last call is asked for: a number, or the name of an
            argument that it wrote to.
    """

    steps: tuple[Step, ...]
    position: str = "0"

    def run(self, values: Mapping[str, Any], most_bytes: int | None = None) -> Any:
        """Run it; what it is given is not written to.

        Raises:
            UsageError: it would make more bytes than it may, or nothing at that position.
        """
        done: dict[str, Any] = {}
        room = most_bytes
        result: Any = None
        for step in self.steps:
            args = [_filled(value, values, done) for value in step.args]
            named = {key: _filled(value, values, done) for key, value in step.kwargs.items()}
            named = step.operator.settled(named)
            if room is not None:
                room -= step.operator.foretell(args, named)
                if room < 0:
                    raise UsageError(f"{step.operator.name} would make more than can be run again")
            _copy_written(step.operator, args, named)
            result = done[step.name] = step.operator.run(*args, **named)
            if step is self.steps[-1] and not self.position.isdecimal():
                names = [name for name, _ in step.operator.takes]
                result = {**dict(zip(names, args, strict=False)), **named}.get(self.position)
        return _item(result, self.position)


class ReplayRuns(ValueRuns):
    """The runs of a program on given values."""

    def __init__(
        self, program: Program, values: Mapping[str, Any], most_bytes: int, seed: int = 0
    ) -> None:
        """Run it natively, once it is known that this takes no more than so many bytes."""
        self.program = program
        self.values = values
        counts: dict[torch.dtype, int] = {}
        for value in values.values():
            if is_inexact(value):
                counts[value.dtype] = counts.get(value.dtype, 0) + 1
        self._room: int | None = most_bytes
        super().__init__([], counts, seed)
        # What a compiler fuses it need not round between two operators.
        self.shake_inputs = True
        self.native = self.run_reference()
        self._room = None
        result: Any = self.native[0].outputs.get(VALUE)
        if is_inexact(result):
            self.dtypes.add(result.dtype)

    @property
    def result(self) -> Tensor:
        """What the native run gave.

        Raises:
            UsageError: nothing.
        """
        seen = self.native[0]
        value = seen.outputs.get(VALUE)
        if isinstance(seen.error, UsageError):
            raise seen.error
        if not isinstance(value, torch.Tensor):
            last = self.program.steps[-1].operator.name
            text = (str(seen.error or "it gave no tensor").strip().splitlines() or [""])[0]
            raise UsageError(f"{last} cannot be run again: {text:.160}")
        return value

    def truth(self) -> Tensor:
        """The result in float64; where no lifted run can be had, the native one."""
        lifted = self.arbiter()
        value = None if lifted is None else lifted[0].outputs.get(VALUE)
        if isinstance(value, torch.Tensor) and value.shape == self.result.shape:
            return value
        return self.result

    def prepare(self, *, wide: bool) -> Callable[[], Any]:
        """Run it once more."""
        values = self.values
        if wide:
            values = {key: _widened(value) for key, value in values.items()}
        return lambda: self.program.run(values, self._room)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in WIDE:
        return value.to(WIDE[value.dtype])
    return value


def _copy_written(operator: NamedOperator, args: list[Any], named: dict[str, Any]) -> None:
    for place, (name, _) in enumerate(operator.takes):
        if name not in operator.writes and name not in _SILENTLY_WRITTEN:
            continue
        if name in named:
            named[name] = map_tensors(named[name], torch.clone)
        elif place < len(args):
            args[place] = map_tensors(args[place], torch.clone)


def _filled(value: Any, values: Mapping[str, Any], done: Mapping[str, Any]) -> Any:
    if isinstance(value, Leaf):
        return values[value.key]
    if isinstance(value, Result):
        return done[value.step]
    if isinstance(value, list | tuple):
        return [_filled(item, values, done) for item in value]
    return value


def _item(result: Any, position: str) -> Any:
    if isinstance(result, list | tuple):
        place = int(position) if position.isdecimal() else -1
        return result[place] if 0 <= place < len(result) else None
    return result if position == "0" or not position.isdecimal() else None
