"""What can be run again in other precisions: one protocol for models, graphs, operators, ranks."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from paritas._torch.graphs import as_traced
from paritas.execution.isolation import MISSING
from paritas.execution.observation import Observation, note_decisions
from paritas.numerics.bits import is_inexact
from paritas.results.items import Item, ItemKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch import Tensor

    from paritas.execution.evidence import Evidence
    from paritas.execution.observation import RunOptions


class Program(abc.ABC):
    """Something that can be run as often as is asked, each time from the same start.

    Attributes:
        shakes_inputs: its inputs are themselves known to rounding only.
        sets_default: it sets the default dtype of its lifted runs by itself.
        knows_dtypes: `dtypes` are all there are, so that none is looked for in a lifted run.
        notes_float64: that it runs in float64 as it is, is worth a note.
    """

    shakes_inputs = False
    sets_default = False
    knows_dtypes = False
    notes_float64 = True

    @abc.abstractmethod
    def dtypes(self, native: list[Observation]) -> dict[torch.dtype, int]:
        """How often it uses each floating dtype; `native` is what it did natively."""

    @abc.abstractmethod
    def run(self, options: RunOptions) -> list[Observation]:
        """Run it, call by call; what it raises is in the observation."""

    def initial(self, item: Item) -> Any:
        """What an input or something of its state was before the call; or `MISSING`."""
        return MISSING

    def given(self) -> dict[str, Any]:
        """What it was given, by name, as far as that is known."""
        return {}

    def quick_wide(self) -> Observation | None:
        """A lifted run that needs no dispatch mode, where one is known to give the same."""
        return None

    def arbiter_made(self, runs: list[Observation]) -> None:  # noqa: B027  (most learn nothing)
        """Learn from the lifted run that a dispatch mode made."""

    def baseline(self, evidence: Evidence[Any]) -> list[Observation] | None:
        """What perturbed runs are compared with, if not the arbiter or the native run."""
        return None


def count_dtypes(
    values: Iterable[Any], weight: Callable[[Tensor], int] = lambda _: 1
) -> dict[torch.dtype, int]:
    """The floating dtypes among some values, each tensor counted by its weight."""
    counts: dict[torch.dtype, int] = {}
    for value in values:
        if is_inexact(value):
            counts[value.dtype] = counts.get(value.dtype, 0) + weight(value)
    return counts


# --- Programs that give one value: an operator, or a few in a row ---------------------------------

VALUE = Item(ItemKind.NAMED, "value")


class ValueProgram(Program):
    """Operators of which the outcome is a single value, under the name `VALUE`."""

    # What a compiler fuses it need not round between two operators.
    shakes_inputs = True

    def __init__(
        self, prepare: Callable[[RunOptions], Callable[[], Any]], values: Iterable[Any]
    ) -> None:
        """`prepare` copies, and widens, the inputs before any mode looks on.

        Args:
            prepare: gives what is to be run.
            values: the tensors among them say in which dtypes it runs.
        """
        self.prepare = prepare
        self._dtypes = count_dtypes(values)

    def dtypes(self, native: list[Observation]) -> dict[torch.dtype, int]:
        """Those of the values that it was made with."""
        return self._dtypes

    def run(self, options: RunOptions) -> list[Observation]:
        """Run it once."""
        seen = Observation()
        run = self.prepare(options)
        try:
            with as_traced(), options.around():
                seen.outputs[VALUE] = run()
        except Exception as error:  # noqa: BLE001  (then there is no such run)
            seen.error = error
        note_decisions(seen, seen.outputs, options.mode)
        return [seen]
