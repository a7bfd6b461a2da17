"""Programs that run in several precisions: one protocol for models, graphs, operators, ranks."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from paritas.core.execution.held_values import MISSING
from paritas.core.execution.observation import Observation, note_decisions
from paritas.core.numerics.bits import is_inexact
from paritas.core.results.items import Item, ItemKind
from paritas.core.torch_private.graphs import as_traced

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable

    import torch
    from torch import Tensor

    from paritas.core.execution.evidence import Evidence
    from paritas.core.execution.observation import RunOptions


class Program(abc.ABC):
    """Something that can be run repeatedly, each time from the same start.

    Attributes:
        shakes_inputs: its inputs have rounding errors themselves.
        sets_default: it sets the default dtype of its lifted runs itself.
        knows_dtypes: `dtypes` is complete; a lifted run need not look for others.
        notes_float64: whether a note says that it runs in float64 natively.
        can_be_lifted: there is enough memory to run it in float64.
    """

    shakes_inputs = False
    sets_default = False
    knows_dtypes = False
    notes_float64 = True
    can_be_lifted = True

    @abc.abstractmethod
    def dtypes(self, native: list[Observation]) -> dict[torch.dtype, int]:
        """Count its uses of each floating dtype; `native` are its native runs."""

    @abc.abstractmethod
    def run(self, options: RunOptions) -> list[Observation]:
        """Run it, call by call; an exception is stored in the observation."""

    def initial(self, item: Item) -> Any:
        """The value of an input or state before the call, or `MISSING`."""
        return MISSING

    def known_arguments(self) -> dict[str, Any]:
        """Its known arguments by name."""
        return {}

    def quick_wide(self) -> Observation | None:
        """A lifted run without a dispatch mode, if it is known to give the same result."""
        return None

    def arbiter_made(self, runs: list[Observation]) -> None:  # noqa: B027  (most learn nothing)
        """Learn from the lifted run that a dispatch mode made."""

    def baseline(self, evidence: Evidence[Any]) -> list[Observation] | None:
        """The runs that perturbed runs are compared with; None for the arbiter or native run."""
        return None


def count_dtypes(
    values: Iterable[Any], weight: Callable[[Tensor], int] = lambda _: 1
) -> dict[torch.dtype, int]:
    """Count the floating dtypes among some values; each tensor counts by its weight."""
    counts: dict[torch.dtype, int] = {}
    for value in values:
        if is_inexact(value):
            counts[value.dtype] = counts.get(value.dtype, 0) + weight(value)
    return counts


# --- Programs that give one value: an operator, or a few in sequence ------------------------------

VALUE = Item(ItemKind.NAMED, "value")


class ValueProgram(Program):
    """Operators with a single result, named `VALUE`."""

    # A compiler that fuses operators need not round between them.
    shakes_inputs = True

    def __init__(
        self, prepare: Callable[[RunOptions], Callable[[], Any]], values: Iterable[Any]
    ) -> None:
        """`prepare` copies and widens the inputs outside of any mode.

        Args:
            prepare: returns the function to run.
            values: the tensors among them show the dtypes in which it runs.
        """
        self.prepare = prepare
        self._dtypes = count_dtypes(values)

    def dtypes(self, native: list[Observation]) -> dict[torch.dtype, int]:
        """The dtypes of the values given to the constructor."""
        return self._dtypes

    def around(self) -> contextlib.AbstractContextManager[None]:
        """What is set around each run."""
        return as_traced()

    def run(self, options: RunOptions) -> list[Observation]:
        """Run it once."""
        observation = Observation()
        run = self.prepare(options)
        try:
            with self.around(), options.around():
                observation.outputs[VALUE] = run()
        except Exception as error:  # noqa: BLE001  (the observation carries it)
            observation.error = error
        note_decisions(observation, observation.outputs, options.mode)
        return [observation]
