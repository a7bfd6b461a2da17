"""Further runs of what gives one value: an operator by itself, or a few in a row."""

from __future__ import annotations

import abc
import contextlib
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.graphs import as_traced
from paritas.checking.noise import NoiseRuns, is_inexact
from paritas.checking.observing import Observation

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas._torch.lifting import LiftMode

__all__ = ["VALUE", "ValueRuns"]

VALUE = "value"


class ValueRuns(NoiseRuns):
    """Runs of which the outcome is a single value, under the name `VALUE`."""

    @abc.abstractmethod
    def prepare(self, *, wide: bool) -> Callable[[], Any]:
        """What is to be run; its inputs are copied, and widened, before any mode looks on."""

    def run_reference(
        self,
        *,
        wide: bool = False,
        mode: LiftMode | None = None,
        watch: contextlib.AbstractContextManager[Any] | None = None,
    ) -> list[Observation]:
        """Run it once more."""

        def once() -> list[Observation]:
            return self._run_once(self.prepare(wide=wide), mode, watch)

        return self.wide_default.run(mode, once) if wide else once()

    def _run_once(
        self,
        run: Callable[[], Any],
        mode: LiftMode | None,
        watch: contextlib.AbstractContextManager[Any] | None,
    ) -> list[Observation]:
        seen = Observation()
        try:
            with (
                as_traced(),
                watch or contextlib.nullcontext(),
                mode or contextlib.nullcontext(),
            ):
                result = run()
        except Exception as error:  # noqa: BLE001  (then there is no such run)
            seen.error = error
            return [seen]
        seen.outputs[VALUE] = result
        if mode is not None and isinstance(result, torch.Tensor) and not is_inexact(result):
            decision = mode.decision_for(result)
            if decision is not None:
                seen.decisions[VALUE] = decision
        return [seen]

    def lifted(self) -> list[Observation] | None:
        """There is no other form of it."""
        return None

    def complete(self, seen: Observation, path: str) -> Any:
        """The value."""
        return seen.value(path)
