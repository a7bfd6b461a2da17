"""The further runs of the reference's training: in float64, and with every rounding perturbed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from paritas._torch.lifting import LiftMode
from paritas.checking.noise import NoiseRuns, is_inexact
from paritas.checking.observing import Observation
from paritas.numerics.criterion import UNIT_F64, unit_roundoff
from paritas.partition.plans.items import reference_values

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from paritas.partition.plans.program import Program
    from paritas.partition.plans.traces import Trace

    RunReference = Callable[..., Trace]

__all__ = ["PlanRuns"]


class PlanRuns(NoiseRuns):
    """One observation for each training step; what the ranks did in float64 is given."""

    def __init__(
        self,
        program: Program,
        native: Trace,
        lifted: list[dict[str, Tensor | None]] | None,
        run: RunReference,
    ) -> None:
        """`lifted` are the ranks' values in float64, step by step; `run` is `run_reference`."""
        self.program = program
        self.run = run
        self._ranks = None
        if lifted is not None:
            self._ranks = [Observation(outputs=dict(values)) for values in lifted]
        self._lift: LiftMode | None = None
        counts: dict[torch.dtype, int] = {}
        pieces = [*native.initial.values(), *native.steps[0].outputs.values()]
        for piece in pieces:
            if is_inexact(piece.local):
                counts[piece.local.dtype] = counts.get(piece.local.dtype, 0) + 1
        super().__init__(_observed(native), counts, program.seed)

    def run_reference(
        self,
        *,
        wide: bool = False,
        mode: LiftMode | None = None,
        watch: contextlib.AbstractContextManager[Any] | None = None,
    ) -> list[Observation]:
        """Train the reference once more."""
        if wide and type(mode) is LiftMode:
            self._lift = mode
        return _observed(self.run(self.program, wide=wide, mode=_Around(watch, mode)))

    def arbiter(self) -> list[Observation] | None:
        """The reference in float64; casts of the model's own bound what the ranks' run can show.

        The ranks run on a model in float64, not under our dispatch mode: what the model itself
        casts to float32 inside is rounded there.
        """
        found = super().arbiter()
        casts = self._lift.casts if self._lift is not None else set()
        narrow = [unit_roundoff(dtype) for dtype in casts if dtype.is_floating_point]
        self.lift_unit = max([UNIT_F64, *narrow])
        return found

    def lifted(self) -> list[Observation] | None:
        """The ranks in float64."""
        return self._ranks

    def complete(self, seen: Observation, path: str) -> Any:
        """An item of a run."""
        return seen.outputs.get(path)


def _observed(trace: Trace) -> list[Observation]:
    """Step by step; an error is the last step's."""
    seen = [Observation(outputs=dict(reference_values(step))) for step in trace.steps]
    if trace.error is not None:
        seen.append(Observation(error=RuntimeError(trace.error)))
    return seen


class _Around(contextlib.AbstractContextManager[None]):
    """Several managers as one that can be entered again; a missing one is left out."""

    def __init__(self, *managers: Any) -> None:
        self._managers = [manager for manager in managers if manager is not None]

    def __enter__(self) -> None:
        for manager in self._managers:
            manager.__enter__()

    def __exit__(self, *error: object) -> None:
        for manager in reversed(self._managers):
            manager.__exit__(*error)
